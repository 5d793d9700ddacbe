"""Fill the folder `finetune/` of an output: a training script, and configs to launch it with.

The script trains what the operations changed. It is a single file that needs the checkpoint in the
folder above it, and not this package. Its contents follow from the record of the conversion and
from config.json, so that it holds only what this model needs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from surgery import operations
from surgery.checkpoint.config import parse_config
from surgery.demo import corpus
from surgery.errors import SurgeryError
from surgery.families import ALWAYS_OPEN, Family, find
from surgery.files import JSON_LIMIT, read
from surgery.files import write as write_file
from surgery.quoting import printable, python
from surgery.storage import enter
from surgery.storage.record import seen_from

FOLDER = "finetune"
REQUIREMENTS = ("torch>=2.6", "transformers>=5.24", "trl>=1.16", "datasets>=4", "accelerate>=1.10")
SMOKE_BYTES = 40_000  # limit of smoke.txt
SPLINES = r"\.coefficients$"
EVERYTHING, ROUTERS, MEMORY = 'r""', r'r"\.(gate|router)\."', 'r"memory"'


@dataclass(frozen=True, kw_only=True, slots=True)
class Needs:
    """What the training of one checkpoint needs."""

    what: str  # the operations, for the docstring
    source: str  # a path relative to the output, or a Hub id or URL
    revision: str | None  # commit of a source on the Hub
    moe: bool
    sparse: bool
    memory: bool
    tables: tuple[str, ...]  # parts of the names of tables that have a learning rate of their own
    splines: bool
    down: str  # the last part of the name of down_proj, whose input is the product
    always_open: int  # last neurons of every MLP that no zeros are asked of
    ramp: bool  # thresholds rise from 0, because no repair has fitted the weights to them
    remote: bool  # the checkpoint comes with its own code
    eager: bool  # attention caps its scores, which sdpa would leave out
    sparse_gradients: bool  # a memory's table has sparse gradients
    two_outputs: bool  # the router returns scores and logits, and no indices
    given: tuple[str, ...]  # options that the recipe gives to the script

    @property
    def stages(self) -> list[list[str]]:
        """Return the rows of the script's table of stages.

        A row has the end of the stage as a share of the steps, the pattern of the parameters it
        trains (if some train alone at first), the factor of --l1, and the factor of the thresholds.
        """
        if self.sparse:
            rise = [("0.1", "0.0"), ("0.4", "0.5"), ("0.7", "1.0"), ("1.0", "1.0")]
            return [[end, factor, *([factor] if self.ramp else [])] for end, factor in rise]
        first, end = (MEMORY, "0.2") if self.memory else (ROUTERS, "0.05")
        return [[end, first], ["1.0", EVERYTHING]] if self.staged else []

    @property
    def staged(self) -> bool:
        """Return whether some parameters train alone at first."""
        return self.moe or self.memory


def files(
    record: Mapping[str, Any], config: Mapping[str, Any], folder: Path | None = None
) -> dict[str, bytes]:
    """Return the files of `finetune/` by name, for a converted checkpoint.

    `record` is its surgery.json, `config` its config.json. `folder` is where it is; without it, a
    source on this disk is taken to be in the same parent folder.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("surgery.finetune"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"python": python, "printable": printable, "yaml": _yaml}
    values = _values(needs(record, config, folder))
    names = environment.list_templates(extensions=["j2"])
    texts = {n.removesuffix(".j2"): environment.get_template(n).render(**values) for n in names}
    texts["smoke.txt"] = _text()
    return {f"{FOLDER}/{name}": text.encode() for name, text in texts.items()}


def of_folder(folder: Path, record: Mapping[str, Any]) -> dict[str, bytes]:
    """Return `files` for the converted checkpoint in `folder`, whose surgery.json is `record`."""
    path = folder / "config.json"
    return files(record, parse_config(read(folder, "config.json", JSON_LIMIT), str(path)), folder)


def write(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write `files` below `folder`, and list them in its record."""
    for name, data in files.items():
        write_file(folder, name, data, sync=False)
    enter(folder, files)


def needs(
    record: Mapping[str, Any], config: Mapping[str, Any], folder: Path | None = None
) -> Needs:
    """Return what a checkpoint needs to be trained, judging by what was done to it."""
    try:
        family = find(config)
    except SurgeryError:  # a copy of a model whose family is unknown
        family = Family(model_type="")
    steps = [s for s in record["recipe"] if s["operation"] != "cast"]
    blocks = config.get("surgery_blocks") or ()
    kinds = {str(entry["kind"]) for entry in blocks}
    records = ((s, operations.known(s["operation"])) for s in steps)
    relufied = [step for step, record in records if record and record.makes_zeros]
    moe = family.is_moe or "experts" in kinds
    sparse = bool(relufied) and not (moe or "memory" in kinds)
    ruled = any(e.get("rule", "plain") != "plain" for e in blocks)
    options = record.get("finetune") or {}
    return Needs(
        what=", then ".join(s["operation"] for s in steps) or "a copy",
        source=seen_from(folder, str(record["source"]["location"])),
        revision=record["source"]["revision"],
        moe=moe,
        sparse=sparse,
        memory="memory" in kinds,
        tables=_tables([entry for entry in blocks if entry["kind"] == "memory"]),
        splines="spline" in kinds,
        down="." + family.down.rsplit(".", 1)[-1],
        always_open=int((config.get("text_config") or config).get(ALWAYS_OPEN) or 0),
        ramp=ruled and [s.get("repair") for s in relufied] == ["none"],
        remote=bool(config.get("auto_map")),
        eager=bool((config.get("text_config") or config).get("attn_logit_softcapping")),
        sparse_gradients=any(e.get("sparse_gradients") for e in blocks),
        two_outputs=family.mlp == "feed_forward",
        given=tuple(f"--{key}={value}" for key, value in options.items()),
    )


def _tables(memories: list[dict[str, Any]]) -> tuple[str, ...]:
    """Return patterns of the memories' tables that train at a rate of their own.

    Tables that hold an MLP's own neurons do not: they were trained already.
    """
    drawn = [str(m.get("shared")) for m in memories if m.get("slots") != "neurons"]
    if len(drawn) < len(memories):
        return tuple(f"{name}." for name in drawn)
    return ("memory_values",) if drawn else ()


def _values(n: Needs) -> dict[str, Any]:
    """Return the variables of the templates."""
    alone = n.splines and not (n.staged or n.sparse)
    pattern = "|".join(map(re.escape, n.tables))
    rates = [[python(pattern), "10.0", "0.0"]] if n.tables else []
    columns = ["its end as a share of the steps"]
    columns += ["pattern of the names it trains"] if n.staged else []
    columns += ["factor of --l1"] if n.sparse else []
    columns += ["factor of the thresholds"] if n.ramp else []
    used = {"cos": n.sparse, "log": n.moe, "pi": n.sparse}
    return asdict(n) | {
        "tables": list(n.tables),
        "requirements": REQUIREMENTS,
        "columns": ", ".join(columns),
        "stages": ", ".join(f"({', '.join(row)})" for row in n.stages),
        "staged": n.staged,
        "groups": [*rates, [EVERYTHING, "1.0", "0.1"]] if n.memory else [],
        "trains": SPLINES if alone else "",  # pattern of the only parameters that train
        "watches": n.moe or n.sparse,
        "passed": "options=options, " * (n.moe or n.sparse) + "teacher=teacher, " * n.sparse,
        "load": ", trust_remote_code=True" * n.remote + ', attn_implementation="eager"' * n.eager,
        "beyond": _beyond(n),
        "maths": [name for name, needed in used.items() if needed],
        "lr": 1e-3 if alone else 1e-4 if n.memory else 5e-5 if n.moe else 3e-5,
    }


def _yaml(value: Any) -> str:
    """Return a value as YAML on one line."""
    import yaml

    class Dumper(yaml.SafeDumper):
        def represent_str(self, text: str) -> yaml.ScalarNode:
            style = None if text.isprintable() else '"'
            return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)

    Dumper.add_representer(str, Dumper.represent_str)
    made = yaml.dump(value, Dumper=Dumper, default_flow_style=True, width=float("inf"))
    return str(made).removesuffix("...\n").rstrip("\n")


def _beyond(n: Needs) -> str:
    """Return what an axolotl run lacks, compared with the script."""
    found = []
    if n.sparse:
        found += ["the L1 loss", "the zeros in the log", "learning from the source"]
    if n.moe:
        found += ["the routers' balancing loss", "their load in the log"]
    if n.staged:
        found += [f"the stage that trains the {'memory' if n.memory else 'routers'} alone"]
    return ", ".join(found) or "nothing"


def _text() -> str:
    """Return a little of every built-in domain."""
    return corpus.mixed("fit", SMOKE_BYTES // len(corpus.domains())) + "\n"

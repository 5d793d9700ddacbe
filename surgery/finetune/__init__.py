"""The folder `finetune/` of an output: a script that trains what the operations changed, and
configs to launch it with.

The script is one file that stands alone: it needs the checkpoint in the folder above it, and not
this package. What is in it follows from the record of the conversion and from config.json, so that
a reader finds what this model needs alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from surgery import operations
from surgery.errors import SurgeryError
from surgery.families import Family, find

FOLDER = "finetune"
REQUIREMENTS = ("torch>=2.6", "transformers>=5.24", "trl>=1.16", "datasets>=4", "accelerate>=1.10")
SMOKE_BYTES = 40_000
SPLINES = r"\.coefficients$"
EVERYTHING, ROUTERS, MEMORY = 'r""', r'r"\.(gate|router)\."', 'r"memory"'


@dataclass(frozen=True, kw_only=True, slots=True)
class Needs:
    """What the training of one checkpoint needs."""

    what: str  # the operations, for the docstring
    source: str
    revision: str | None  # of a source on the Hub
    moe: bool
    sparse: bool
    memory: bool
    tables: tuple[
        str, ...
    ]  # of memories, in names of parameters; not those that hold an MLP's own neurons
    splines: bool
    down: str  # the last part of the name of down_proj, whose input is the product
    ramp: bool  # the thresholds rise from 0: no repair has fitted the weights to them
    remote: bool  # it comes with code of its own
    eager: bool  # its attention caps scores, which sdpa leaves out
    sparse_gradients: bool  # of a memory's table
    two_outputs: bool  # the router gives its scores and logits, and no indices
    given: tuple[str, ...]  # options that the recipe gives the script

    @property
    def stages(self) -> list[list[str]]:
        """Rows of the script's table: the end of a stage, what it trains, times --l1, times the
        thresholds.
        """
        l1 = [
            ("0.1", "0.0", "0.0"),
            ("0.4", "0.5", "0.5"),
            ("0.7", "1.0", "1.0"),
            ("1.0", "1.0", "1.0"),
        ]
        if self.sparse:
            return [[end, x, *([t] if self.ramp else [])] for end, x, t in l1]
        first, end = (MEMORY, "0.2") if self.memory else (ROUTERS, "0.05")
        return [[end, first], ["1.0", EVERYTHING]] if self.staged else []

    @property
    def staged(self) -> bool:
        """Whether there are parameters that train alone at first."""
        return self.moe or self.memory


def files(record: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, bytes]:
    """What goes beside the weights of a converted checkpoint, by name, for its surgery.json and
    config.json.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("surgery.finetune"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    values = _values(needs(record, config))
    names = environment.list_templates(extensions=["j2"])
    texts = {n.removesuffix(".j2"): environment.get_template(n).render(**values) for n in names}
    return {
        f"{FOLDER}/{name}": text.encode() for name, text in (texts | {"smoke.txt": _text()}).items()
    }


def of_folder(folder: Path, record: Mapping[str, Any]) -> dict[str, bytes]:
    """`files` of the converted checkpoint in `folder`, whose surgery.json is `record`."""
    return files(record, json.loads((folder / "config.json").read_bytes()))


def write(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write `files` below `folder`."""
    (folder / FOLDER).mkdir(exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)


def needs(record: Mapping[str, Any], config: Mapping[str, Any]) -> Needs:
    """What a checkpoint needs to be trained, by what was done to it."""
    try:
        family = find(config)
    except SurgeryError:  # a copy of a model of another family
        family = Family(model_type="")
    steps = [s for s in record["recipe"] if s["operation"] != "cast"]
    blocks = config.get("surgery_blocks") or ()
    kinds = {str(entry["kind"]) for entry in blocks}
    records = ((s, operations.known(s["operation"])) for s in steps)
    relufied = [step for step, record in records if record and record.makes_zeros]
    moe = family.is_moe or "experts" in kinds
    sparse = bool(relufied) and not (moe or "memory" in kinds)
    source = Path(str(record["source"]["location"])).expanduser()
    return Needs(
        what=", then ".join(s["operation"] for s in steps) or "a copy",
        source=str(source.resolve() if source.exists() else record["source"]["location"]),
        revision=record["source"]["revision"],
        moe=moe,
        sparse=sparse,
        memory="memory" in kinds,
        tables=_tables([entry for entry in blocks if entry["kind"] == "memory"]),
        splines="spline" in kinds,
        down="." + family.down.rsplit(".", 1)[-1],
        ramp=any(e.get("rule", "plain") != "plain" for e in blocks)
        and [s.get("repair") for s in relufied] == ["none"],
        remote=bool(config.get("auto_map")),
        eager=bool((config.get("text_config") or config).get("attn_logit_softcapping")),
        sparse_gradients=any(e.get("sparse_gradients") for e in blocks),
        two_outputs=family.mlp == "feed_forward",
        given=tuple(f"--{key}={value}" for key, value in (record.get("finetune") or {}).items()),
    )


def _tables(memories: list[dict[str, Any]]) -> tuple[str, ...]:
    drawn = [entry["shared"] for entry in memories if entry["slots"] != "neurons"]
    return (
        tuple(f"{name}." for name in drawn)
        if len(drawn) < len(memories)
        else ("memory_values",) * bool(drawn)
    )


def _values(n: Needs) -> dict[str, Any]:
    """What the templates are filled with."""
    alone = n.splines and not (n.staged or n.sparse)
    pattern = "|".join(map(re.escape, n.tables))
    rates = [[f'r"{pattern}"', "10.0", "0.0"]] if n.tables else []
    columns = ["until this share" if n.ramp else "until this share of the steps"]
    columns += ["trains these (a pattern of names)"] if n.staged else []
    columns += ["× --l1"] if n.sparse else []
    columns += ["× thresholds"] if n.ramp else []
    used = {"cos": n.sparse, "log": n.moe, "pi": n.sparse}
    return asdict(n) | {
        "requirements": REQUIREMENTS,
        "columns": "; ".join(columns),
        "stages": n.stages,
        "staged": n.staged,
        "groups": [*rates, [EVERYTHING, "1.0", "0.1"]] if n.memory else [],
        "trains": SPLINES if alone else "",  # and nothing else does
        "watches": n.moe or n.sparse,
        "load": (", trust_remote_code=True" if n.remote else "")
        + (', attn_implementation="eager"' if n.eager else ""),
        "beyond": _beyond(n),
        "maths": [name for name, needed in used.items() if needed],
        "lr": 1e-3 if alone else 1e-4 if n.memory else 5e-5 if n.moe else 3e-5,
    }


def _beyond(n: Needs) -> str:
    """What an axolotl run lacks."""
    found = ["the L1 loss, the zeros in the log, learning from the source"] if n.sparse else []
    found += (
        ["the routers' balancing loss for every family, their load in the log"] if n.moe else []
    )
    found += (
        [f"the stage that trains the {'memory' if n.memory else 'routers'} alone"]
        if n.staged
        else []
    )
    return ", ".join(found) or "nothing"


def _text() -> str:
    """The beginning of the package's own text, up to the end of a paragraph."""
    text = (resources.files("surgery.demo") / "text" / "repair.txt").read_text(encoding="utf-8")[
        :SMOKE_BYTES
    ]
    return text[: text.rfind("\n\n")] + "\n"

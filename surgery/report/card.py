"""README.md of an output, the model card: metadata for the Hub, what was done and why, the recipe,
before and after, how to load and train it, limits and citations.

The source's own README.md is not copied, as what it says is true of another model; its licence,
language and pipeline are taken over. A card that somebody has edited is never written again: the
last line of ours is a hash of the others.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from surgery.analysis.weigh import weigh
from surgery.checkpoint import Checkpoint
from surgery.demo import DEMO
from surgery.report import layers, methods, summary
from surgery.report.inspection import quantity

NAME = "README.md"
FOLLOWED = (
    "license",
    "license_name",
    "license_link",
    "language",
    "pipeline_tag",
)  # of the source's metadata


@dataclass(frozen=True, kw_only=True, slots=True)
class TableRow:
    """A line of the table: what, of the source, of the output."""

    what: str
    before: str
    after: str


def files(
    source: Checkpoint | None, output: Checkpoint, folder: Path, record: Mapping[str, Any]
) -> dict[str, bytes]:
    """The card of the output in `folder` and its figure, by their names; nothing where somebody has
    edited it.
    """
    if (folder / NAME).exists() and not is_ours(folder):
        return {}
    drawn = layers.panels(record["verification"])
    return {
        NAME: _sealed(render(source, output, folder, record)),
        **({layers.NAME: layers.draw(drawn)} if drawn else {}),
    }


def renamed(folder: Path, new: str) -> dict[str, bytes]:
    """Return a card of ours that loads the model by another name, for instance a Hub id.

    It is empty where somebody has edited the card.
    """
    if not is_ours(folder):
        return {}
    text = (folder / NAME).read_text(encoding="utf-8").rpartition("<!--")[0]
    return {NAME: _sealed(_renamed(text, new))}


def _renamed(text: str, new: str) -> str:
    text = re.sub(r"^name = .*$", f"name = {json.dumps(new)}", text, count=1, flags=re.MULTILINE)
    return re.sub(r"(?<=pretrained=)[^, ]+", new, text, count=1)


def is_ours(folder: Path) -> bool:
    """Whether the folder has a card as we wrote it."""
    path = folder / NAME
    return path.is_file() and (data := path.read_bytes()) == _sealed(
        data.decode(errors="replace").rpartition("<!--")[0]
    )


def _sealed(text: str) -> bytes:
    return f"{text}<!-- surgery {hashlib.sha256(text.encode()).hexdigest()} -->\n".encode()


def render(
    source: Checkpoint | None, output: Checkpoint, folder: Path, record: Mapping[str, Any]
) -> str:
    """The card. `source` is what it was made of (None where that is not at hand: then there is no
    "before").
    """
    steps = [(s["operation"], s) for s in record["recipe"]]
    names = [operation for operation, _ in steps]
    followed = metadata_of(source or output)
    papers = list(dict.fromkeys(paper for o, p in steps for paper in methods.papers(o, p)))
    recipe = folder / "recipe.yaml"
    return _template("card.md.j2").render(
        metadata=_metadata(output, record, followed, names),
        name=folder.resolve().name.removesuffix(".staged"),
        finding=_finding(record),
        source=_link(record["source"]),
        done=[(methods.done(o, p), methods.why(o)) for o, p in steps],
        exact=record["exact"],
        notes=record.get("notes") or (),
        recipe=recipe.read_text(encoding="utf-8") if recipe.is_file() else "",
        rows=table(source, output, record),
        figure=layers.NAME,
        shown=[panel.title for panel in layers.panels(record["verification"])],
        looks_up=_looks_up(output),
        verification=record["verification"],
        sample=((record["verification"] or {}).get("sample") or {}),
        trust=output.custom_code,
        finetune=(folder / "finetune").is_dir(),
        limits=methods.limits(names),
        licence=followed.get("license"),
        licence_files=sorted(
            f.name for f in output.files if re.search(r"LICEN[CS]E|USE_POLICY|NOTICE", f.name)
        ),
        papers=[paper.bibtex for paper in papers],
    )


def _finding(record: Mapping[str, Any]) -> str:
    """Return what the first paragraph says of function and cost."""
    if record["verification"] is None:
        return "Nothing of it was verified."
    return summary.finding(record["verification"]) + "."


def _looks_up(output: Checkpoint) -> bool:
    """Return whether a token reads few rows of a large table."""
    blocks = output.config.get("surgery_blocks") or ()
    return any(b["kind"] == "memory" and b["slots"] != "neurons" for b in blocks)


@cache
def _template(name: str) -> Any:
    from jinja2 import Environment, PackageLoader

    environment = Environment(
        loader=PackageLoader("surgery.report"),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["number"] = number
    return environment.get_template(name)


# --- metadata -------------------------------------------------------------------------------------


def metadata_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """The metadata of the source's README.md; empty where it has none, or none that can be read."""
    import yaml

    if checkpoint.card is None:
        return {}
    text = checkpoint.card.path().read_text(encoding="utf-8", errors="replace")
    match = re.match(r"\ufeff?\s*---\s*\n(.*?)\n---\s*(\n|$)", text, re.DOTALL)
    try:
        found = yaml.safe_load(match[1]) if match else None
    except yaml.YAMLError:
        return {}
    return found if isinstance(found, dict) else {}


def _metadata(
    output: Checkpoint, record: Mapping[str, Any], followed: Mapping[str, Any], names: list[str]
) -> str:
    """The YAML between the card's dashes."""
    from huggingface_hub import ModelCardData

    models = [
        m.partition("@")[0]
        for s in record["recipe"]
        for m in s.get("expert_models") or ()
        if _is_id(m)
    ]
    base = (
        [record["source"]["location"]]
        if record["source"]["revision"]
        else followed.get("base_model") or []
    )
    base = list(dict.fromkeys([*([base] if isinstance(base, str) else base), *models]))
    tags = [*methods.tags(names), *(["custom_code"] if output.custom_code else []), "surgery"]
    kept = {k: followed[k] for k in FOLLOWED if followed.get(k)}
    data = ModelCardData(
        base_model=base[0] if len(base) == 1 else base or None,
        library_name="transformers",
        tags=tags,
        base_model_relation=("merge" if models else "finetune") if base else None,
        **{"pipeline_tag": "text-generation", **kept},
    )
    return str(data.to_yaml())


def _is_id(location: str) -> bool:
    return re.fullmatch(r"[\w.-]+/[\w.-]+(@.*)?", location) is not None and not location.startswith(
        (".", "/")
    )


def _link(source: Mapping[str, Any]) -> str:
    """The source in Markdown; of a folder its name alone, as a path is nobody else's business."""
    location, revision = source["location"], source["revision"]
    if not revision:
        if location == DEMO:
            return "The model embedded in surgery"
        return f"`{location if '://' in location else Path(location).resolve().name}`"
    return f"[{location}](https://huggingface.co/{location}) at `{revision[:12]}`"


# --- before and after -----------------------------------------------------------------------------


def table(
    source: Checkpoint | None, output: Checkpoint, record: Mapping[str, Any]
) -> list[TableRow]:
    """What both weigh, and what the verification found of both."""
    before, after = source and weigh(source, source.config), weigh(output, output.config)
    rows = [
        TableRow(what=what, before=of(before) if before else "", after=of(after))
        for what, of in _WEIGHED
    ]
    return [*rows, *_measured(record["verification"])]


_WEIGHED: tuple[tuple[str, Any], ...] = (
    ("architecture", lambda w: f"`{w.model_type}`"),
    ("activation of the MLPs", lambda w: w.activation),
    ("parameters", lambda w: quantity(w.parameters())),
    ("active for a token", lambda w: quantity(w.active())),
    ("bytes of weights read for a token", lambda w: quantity(w.nbytes(), "B")),
    ("FLOPs of a token", lambda w: quantity(w.flops(), "FLOP")),
)


def _measured(verification: Mapping[str, Any] | None) -> list[TableRow]:
    """Return what the verification found of the source and of the output, in its order."""
    rows = summary.rows_of(verification)
    return [found for key in rows if (found := _compared(key, rows)) is not None]


def _compared(key: str, rows: Mapping[str, Any]) -> TableRow | None:
    """Return the line of the table for the row of this key; None where it has none."""
    row, kind = rows[key], key.partition(".")[0]
    what = row["check"].replace("|", "\\|")
    if kind in ("perplexity", "zeros"):
        before, shown = rows.get(key.replace(".output", ".source")), number
        if ".output" not in key:
            return None
        if kind == "zeros":
            shown = share
        what = what.replace(" of the output", "")
        return TableRow(
            what=what,
            before=shown(before["value"]) if before else "",
            after=shown(row["value"]),
        )
    if kind in ("agreement", "left"):
        return TableRow(what=what, before="100%", after=share(row["value"]))
    if key == "logits.difference":
        at_most = f"{what}, at most {number(row['limit'])}"
        return TableRow(what=at_most, before="0", after=number(row["value"]))
    return None


def number(value: Any) -> str:
    """Four significant digits."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def share(value: Any) -> str:
    return f"{value:.1%}" if isinstance(value, int | float) else str(value)

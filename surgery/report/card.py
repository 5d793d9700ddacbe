"""The model card of an output, README.md.

It has metadata for the Hub, what was done and what that cost, the recipe, before and after, how to
load and train the model, limits and citations. The source's own README.md is not copied, because
what it says is true of another model; its licence, language and pipeline are taken over.

A card that somebody has edited is never written again: the last line of ours is a hash of the rest.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from surgery import operations
from surgery.analysis.weigh import weigh
from surgery.checkpoint import Checkpoint
from surgery.checkpoint.metadata import FOLLOWED, metadata_of
from surgery.demo import DEMO
from surgery.files import content, read
from surgery.proof import verdict
from surgery.quoting import code, fenced, markdown, prose, python, shell
from surgery.report import layers, methods
from surgery.report.inspection import quantity

NAME, RECIPE = "README.md", "recipe.yaml"
EDITABLE = (NAME, RECIPE)  # files that their owner may complete before they are published
# The line of the loading code that names the model, perhaps with a comment.
_LOADED = re.compile(r'^name = ("(?:[^"\\]|\\.)*").*$', re.MULTILINE)


@dataclass(frozen=True, kw_only=True, slots=True)
class TableRow:
    """A line of the table: what it is about, its value for the source, and for the output."""

    what: str
    before: str
    after: str


def files(
    source: Checkpoint | None, output: Checkpoint, folder: Path, record: Mapping[str, Any]
) -> dict[str, bytes]:
    """Return the card of the output in `folder` and its figure, by name.

    There is nothing to write where somebody has edited the card.
    """
    path = folder / NAME
    if path.exists() and not path.is_symlink() and not is_ours(folder):
        return {}
    drawn = layers.panels(record["verification"])
    figure = {layers.NAME: layers.draw(drawn)} if drawn else {}
    return {NAME: _sealed(render(source, output, folder, record)), **figure}


def renamed(folder: Path, name: str) -> dict[str, bytes]:
    """Return our card with the model loaded by another name; nothing where it was edited."""
    if not is_ours(folder):
        return {}
    text = (folder / NAME).read_text(encoding="utf-8").rpartition("<!--")[0]
    before = _loaded_name(folder)
    text = _LOADED.sub(lambda _: f"name = {python(name)}", text, count=1)
    text = text.replace(_arguments(before), _arguments(name), 1)
    return {NAME: _sealed(text)}


def is_ours(folder: Path) -> bool:
    """Return whether the folder has a card as it was written here."""
    path = folder / NAME
    if not path.is_file() or path.is_symlink():
        return False
    data = content(path)
    return data == _sealed(data.decode(errors="replace").rpartition("<!--")[0])


def _sealed(text: str) -> bytes:
    return f"{text}<!-- surgery {hashlib.sha256(text.encode()).hexdigest()} -->\n".encode()


def render(
    source: Checkpoint | None, output: Checkpoint, folder: Path, record: Mapping[str, Any]
) -> str:
    """Return the card; `source` is None where it is not at hand, and then there is no "before"."""
    steps = [(s["operation"], s) for s in record["recipe"]]
    names = [operation for operation, _ in steps]
    followed, verification = metadata_of(source or output), record["verification"]
    papers = dict.fromkeys(paper for o, p in steps for paper in methods.papers(o, p))
    kinds = {(b["kind"], b.get("slots")) for b in output.config.get("surgery_blocks") or ()}
    licences = (f.name for f in output.files if _is_licence(f.name))
    recipe = read(folder, RECIPE).decode(errors="replace") if (folder / RECIPE).exists() else ""
    return _template("card.md.j2").render(
        metadata=_metadata(source, output, record, followed),
        name=_loaded_name(folder),
        arguments=_arguments(_loaded_name(folder)),
        source=_link(record["source"]),
        done=[(methods.done(o, p), methods.why(o)) for o, p in steps],
        trained=operations.TRAINED in names,
        fitted=bool(record.get("calibration")),
        cost=_cost(record),
        exact=record["exact"],
        notes=record.get("notes") or (),
        recipe=recipe,
        rows=table(source, output, record),
        figure=layers.NAME,
        shown=[panel.title for panel in layers.panels(verification)],
        looks_up=any(kind == "memory" and slots != "neurons" for kind, slots in kinds),
        verification=verification,
        files_checked=verdict.files_checked(verification) if verification else "",
        ignored=verdict.ignored_fields(verification),
        sample=(verification or {}).get("sample") or {},
        judged=verdict.judged(verification) if verification else "",
        compared=verdict.compared(verification),
        trust=output.custom_code,
        finetune=(folder / "finetune").is_dir(),
        limits=methods.limits(names),
        licence=followed.get("license"),
        licence_files=sorted(licences),
        papers=[paper.bibtex for paper in papers],
    )


def _is_licence(name: str) -> bool:
    return re.search(r"LICEN[CS]E|USE_POLICY|NOTICE", name) is not None


def _loaded_name(folder: Path) -> str:
    """Return what the model is loaded by: its folder's name, or the repository it was pushed to."""
    text = (folder / NAME).read_text(encoding="utf-8") if is_ours(folder) else ""
    found = _LOADED.search(text)
    named = str(ast.literal_eval(found[1])) if found else ""
    return named if "/" in named else folder.resolve().name.removesuffix(".staged")


def _arguments(name: str) -> str:
    """Return the beginning of the evaluation's argument that names the model, for a shell."""
    return f"pretrained={shell(name)}"


def _cost(record: Mapping[str, Any]) -> str:
    """Return a sentence on what the conversion cost, for the first paragraph."""
    verification = record["verification"]
    if not verification:
        claim = "should compute" if record["exact"] else "does not compute"
        return f"It {claim} what its source does; that was not verified."
    if not verdict.compared(verification):
        claim = "should compute" if record["exact"] else "does not compute"
        why = "the source's logits are NaN or Inf, so that nothing could be compared"
        return f"It {claim} what its source does; that was not checked: {why}."
    if record["exact"]:
        return f"It computes what its source does. {verdict.headline(verification)}."
    costs = verdict.cost(verification)
    if not costs:
        return "What it costs in quality could not be measured."
    damaged = " It is damaged until it is trained." if verdict.damaged(verification) else ""
    return f"Perplexity against its source: {costs}.{damaged}"


@cache
def _template(name: str) -> Any:
    from jinja2 import Environment, PackageLoader

    environment = Environment(
        loader=PackageLoader("surgery.report"),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"figure": verdict.figure, "small": verdict.small}
    environment.filters |= {f.__name__: f for f in (code, fenced, markdown, prose, python)}
    return environment.get_template(name)


# --- metadata -------------------------------------------------------------------------------------


def _metadata(
    source: Checkpoint | None,
    output: Checkpoint,
    record: Mapping[str, Any],
    followed: Mapping[str, Any],
) -> str:
    """Return the YAML between the card's dashes."""
    from huggingface_hub import ModelCardData

    names = [step["operation"] for step in record["recipe"]]
    experts = (m for step in record["recipe"] for m in step.get("expert_models") or ())
    models = [m.partition("@")[0] for m in experts if _is_id(m)]
    base = list(dict.fromkeys([*_base(source, record, followed), *models]))
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


def _base(
    source: Checkpoint | None, record: Mapping[str, Any], followed: Mapping[str, Any]
) -> Sequence[str]:
    """Return the Hub ids of the source, as far as they are known.

    A folder has one where it lies in the Hub's cache or its config names the model it was loaded
    from. Otherwise the base of the source is the base of the output.
    """
    if record["source"]["revision"]:
        return [b for b in [str(record["source"]["location"])] if _is_id(b)]
    location = str(source.source.location) if source else ""
    if cached := re.search(r"/models--([\w.-]+?)--([\w.-]+)/snapshots/", location):
        return [f"{cached[1]}/{cached[2]}"]
    named = str(source.config.get("_name_or_path") or "") if source else ""
    if named and _is_id(named) and not Path(named).exists():
        return [named]
    base = followed.get("base_model") or []
    return [b for b in ([base] if isinstance(base, str) else base) if _is_id(b)]


def _is_id(location: str) -> bool:
    """Return whether a location has the form of a Hub id, OWNER/NAME."""
    shaped = re.fullmatch(r"[\w.-]+/[\w.-]+(@[\w./-]+)?", location, re.ASCII) is not None
    return shaped and not location.startswith((".", "/"))


def _link(source: Mapping[str, Any]) -> str:
    """Return the source in Markdown; of a folder only its name."""
    location, revision = source["location"], source["revision"]
    if not revision:
        if location == DEMO:
            return "The model embedded in surgery"
        return code(location if "://" in location else Path(location).resolve().name)
    if not _is_id(location):
        return f"{code(location)} at {code(revision[:12])}"
    return f"[{markdown(location)}](https://huggingface.co/{location}) at {code(revision[:12])}"


# --- before and after -----------------------------------------------------------------------------


def table(
    source: Checkpoint | None, output: Checkpoint, record: Mapping[str, Any]
) -> list[TableRow]:
    """Return what both weigh, and what the verification found of both."""
    before, after = source and weigh(source, source.config), weigh(output, output.config)
    rows = [
        TableRow(what=what, before=of(before) if before else "", after=of(after))
        for what, of in _WEIGHED
    ]
    return [*rows, *_measured(record["verification"])]


_WEIGHED: tuple[tuple[str, Any], ...] = (
    ("architecture", lambda w: code(w.model_type, cell=True)),
    ("activation of the MLPs", lambda w: markdown(w.activation)),
    ("parameters", lambda w: quantity(w.parameters())),
    ("active parameters per token", lambda w: quantity(w.active())),
    ("bytes of weights read per token", lambda w: quantity(w.nbytes(), "B", digits=3)),
    ("FLOPs per token", lambda w: quantity(w.flops(), "FLOP", digits=3)),
)


def _measured(verification: Mapping[str, Any] | None) -> list[TableRow]:
    """Return what the verification found of the source and of the output, in its order."""
    rows = verdict.rows_by_key(verification)
    compared = [found for key in rows if (found := _compared(key, rows)) is not None]
    return compared + ([_agreement(rows[verdict.MEAN])] if verdict.MEAN in rows else [])


def _compared(key: str, rows: Mapping[str, Any]) -> TableRow | None:
    """Return the line of the table for the row of this key; None where it has none."""
    row, kind = rows[key], key.partition(".")[0]
    what = prose(str(row["check"]))
    if kind in ("perplexity", "domain") or key == verdict.MEAN:
        return _perplexity(key, row)
    if kind == "zeros":
        if ".output" not in key:
            return None
        source = rows.get(key.replace(".output", ".source"))
        before = verdict.share(source["value"]) if source else ""
        label = what.replace(" of the output", "")
        return TableRow(what=label, before=before, after=verdict.share(row["value"]))
    if kind == "left":
        return TableRow(what=what, before="100%", after=verdict.share(row["value"]))
    if key == "logits.difference":
        at_most = f"{what}, at most {verdict.small(row['limit'])}"
        return TableRow(what=at_most, before="0", after=verdict.small(row["value"]))
    return None


def _perplexity(key: str, row: Mapping[str, Any]) -> TableRow:
    """Return the line of one domain, or of the geometric mean of all."""
    before, after = (row["models"][name]["perplexity"] for name in ("source", "output"))
    of = {"perplexity": "", verdict.MEAN: ", geometric mean"}.get(key)
    what = f"perplexity{f', {key.removeprefix(verdict.DOMAIN)}' if of is None else of}"
    ratio = "" if key == "perplexity" else f" ({verdict.times(float(row['value']))})"
    return TableRow(
        what=prose(what), before=verdict.figure(before), after=f"{verdict.figure(after)}{ratio}"
    )


def _agreement(mean: Mapping[str, Any]) -> TableRow:
    share = verdict.share(mean["models"]["output"]["agreement"])
    return TableRow(what="next tokens as the source's", before="100%", after=share)

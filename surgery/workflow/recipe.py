"""A recipe is data: a YAML file that says all of a surgery, so that one command repeats it.

    source: Qwen/Qwen3-8B              # a folder, a file, a Hub id, or `demo`, the embedded model
    calibration: {tokens: 32768}       # of every operation that takes one and has none of its own
    operations:
      - operation: relufy
        activation: relu
      - operation: upcycle
        experts: 8

The keys of an operation are the parameters of the function of that name. What is not understood is
an error with its line and the nearest key that is known. Operations compose: all of them are one
pass over the disk.
"""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from surgery import operations
from surgery.calibration.settings import Calibration
from surgery.calibration.texts import relocated
from surgery.checkpoint import Checkpoint, schema
from surgery.checkpoint.parsing import is_number
from surgery.demo import DEMO, MODEL
from surgery.errors import SurgeryError, UsageError
from surgery.files import expanded
from surgery.proof.require import Require
from surgery.quoting import printable
from surgery.storage import open_checkpoint
from surgery.storage.record import seen_from
from surgery.workflow import recipe_text


@dataclass(frozen=True, kw_only=True, slots=True)
class Push:
    """Where an output goes once it is verified.

    Args:
        repo: Hub id, OWNER/NAME.
        private: create it as a private one.
        pr: leave a pull request open instead of merging it.
    """

    repo: str
    private: bool = False
    pr: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """What a recipe file holds, checked.

    Args:
        source: a folder, a weight file, a Hub id, a URL, or "demo", the embedded model.
        revision: branch, tag or commit of a Hub id.
        strip_prefix: what to strip from the names of the source's tensors, like "module.".
        dequantize: open weights in fp8 or mxfp4 as bf16.
        calibration: of every operation that takes one and does not say otherwise.
        operations: what is done, in this order, in one pass over the disk.
        dtype: convert weights to bf16, fp16 or fp32 while writing.
        max_shard_size: largest shard, like 5GB or 500MB.
        verify: prove the output against its source.
        require: what the verification is to find for the output to pass, and to be pushed.
        finetune: options of the script that the output brings, which it then has by itself, like
            max_steps: 2000.
        push: publish the output on the Hub.
    """

    source: str | None = None
    revision: str | None = None
    strip_prefix: str | None = None
    dequantize: bool = False
    calibration: dict[str, Any] = field(default_factory=dict)
    operations: tuple[dict[str, Any], ...]
    dtype: str | None = None
    max_shard_size: str | int | None = None
    verify: bool = True
    require: Require | None = None
    finetune: dict[str, str | int | float | bool] = field(default_factory=dict)
    push: Push | None = None


# --- files ----------------------------------------------------------------------------------------


def folder() -> Path:
    """Return the folder of the shipped recipes: in the package, or at the root of a checkout."""
    package = Path(__file__).parent.parent
    return package / "recipes" if (package / "recipes").is_dir() else package.parent / "recipes"


def shipped() -> dict[str, str]:
    """Return the shipped recipes by name, each with the first line of its file: what it does."""
    texts = {p.stem: p.read_text(encoding="utf-8") for p in sorted(folder().glob("*.yaml"))}
    return {name: text.partition("\n")[0].lstrip("# ") for name, text in texts.items()}


def read(name: str | Path) -> str:
    """Return the text of a recipe: a file, or a shipped one by its name."""
    path = expanded(name)
    if not path.is_file() and path.name == str(name):
        path = folder() / f"{name}.yaml"
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        near = difflib.get_close_matches(Path(name).stem, list(shipped()), 1)
        known = f"give a file, or a shipped one: {', '.join(shipped())}"
        hint = f"did you mean {near[0]}?" if near else known
        raise SurgeryError(f"no recipe {name}", hint) from None
    except ValueError:
        raise SurgeryError(f"{path} is no text in UTF-8", "give a recipe, a YAML file") from None


def load(name: str | Path, changes: Sequence[str] = ()) -> Recipe:
    """Read a recipe file, or a shipped recipe by its name. Paths in it are seen from its folder.

    Args:
        changes: "dotted.key=value", the value in YAML, list items by their number.

    Raises SurgeryError with the line of what is not understood.
    """
    found, path = parse(read(name), str(name), changes), expanded(name)
    return _placed(found, path.parent, changes) if path.is_file() else found


def _placed(recipe: Recipe, folder: Path, changes: Sequence[str]) -> Recipe:
    """Return the recipe with the paths that are there when seen from `folder`."""

    def place(location: str) -> str:
        path = folder / location
        return str(path) if location.startswith(".") and path.exists() else location

    given = any(change.startswith("source=") for change in changes)
    source = recipe.source if recipe.source is None or given else place(recipe.source)
    entries = tuple(_with_paths(entry, place) for entry in recipe.operations)
    return replace(recipe, source=source, operations=entries)


def parse(text: str, name: str, changes: Sequence[str] = ()) -> Recipe:
    """Return the recipe in a text, which errors call `name`."""
    data, lines = recipe_text.read(text, name)
    for change in changes:
        path = recipe_text.change(data, change)
        kept = {k: v for k, v in lines.items() if k[: len(path)] != path}
        lines = kept | {path: f"--set {change}"}
    for found in _violations(data):
        known = (lines.get(found.path[:n]) for n in range(len(found.path), 0, -1))
        where = next(filter(None, known), name)  # its own line, or that of what it stands in
        raise SurgeryError(f"{where}: {_of_what(found.path, data)}{found.message}", found.hint)
    push = data.get("push")
    push = push and Push(**({"repo": push} if isinstance(push, str) else push))
    operations = tuple(_entry(e) for e in data["operations"])
    parts = {key: data.get(key) or {} for key in ("calibration", "finetune")}
    require = _required(data.get("require"), lines, name)
    return Recipe(**{**data, **parts, "operations": operations, "push": push, "require": require})


def _required(
    found: Mapping[str, Any] | None, lines: Mapping[schema.Keys, str], name: str
) -> Require | None:
    """Return what a recipe requires. Raises SurgeryError with the line of a wrong number."""
    try:
        return Require.of(found) if found else None
    except UsageError as e:
        where = lines.get(("require",), name)
        raise SurgeryError(f"{where}: {e.message}", e.hint) from None


def _of_what(path: schema.Keys, data: Mapping[str, Any]) -> str:
    """Return the name of the operation at fault, to stand before a message."""
    if len(path) > 2 and path[0] == "operations" and path[2] != "operation":
        return f"{data['operations'][path[1]]['operation']}: "
    return ""


def _entry(entry: dict[str, Any]) -> dict[str, Any]:
    """Return an operation with its layers as numbers, also where the file has "0-7,12"."""
    text = entry.get("layers")
    if isinstance(text, str) and is_number(text.lstrip()[:1]):
        return entry | {"layers": sorted(parse_layers(text) or ())}
    return entry


def parse_layers(text: str | None) -> set[int] | None:
    """Return the layer numbers of "0-7,12,20-23". Raises UsageError for anything else."""
    if text is None:
        return None
    chosen: set[int] = set()
    for part in text.split(","):
        # No model has more than 9,999 layers.
        match = re.fullmatch(r"\s*([0-9]{1,4})(?:\s*-\s*([0-9]{1,4}))?\s*", part)
        if not match or int(match[2] or match[1]) < int(match[1]):
            raise UsageError(f"{text!r} does not name layers", "write them like 0-7,12,20-23")
        chosen |= set(range(int(match[1]), int(match[2] or match[1]) + 1))
    return chosen


# --- the schema -----------------------------------------------------------------------------------


def json_schema() -> schema.Schema:
    """Return the JSON schema of a recipe, for editors: every operation with its parameters."""
    known = _frame()
    known["properties"]["operations"]["items"] = {
        "anyOf": [_operation(name) for name in operations.names()]
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A recipe of surgery",
        **known,
    }


def _frame() -> schema.Schema:
    """Return the schema of a recipe without the parameters of its operations."""
    known = schema.of_dataclass(Recipe)
    parts = known["properties"]
    parts["calibration"] |= schema.of_dataclass(Calibration)
    parts["push"] = {
        "anyOf": [schema.of_dataclass(Push), {"type": ["string", "null"]}],
        "description": parts["push"]["description"],
    }
    entry = {
        "type": "object",
        "required": ["operation"],
        "properties": {"operation": {"enum": list(operations.names())}},
    }
    parts["operations"]["items"] = entry
    return known


def _operation(name: str) -> schema.Schema:
    record = operations.find(name)
    own, what = record.options, (inspect.getdoc(record.function) or "").partition("\n")[0]
    properties = {"operation": {"const": name, "description": what}, **own["properties"]}
    return own | {"properties": properties, "required": ["operation", *own["required"]]}


def _violations(data: Mapping[str, Any]) -> Iterator[schema.Violation]:
    yield from schema.violations(data, _frame())
    for i, entry in enumerate(data["operations"]):
        yield from schema.violations(entry, _operation(entry["operation"]), ("operations", i))


# --- what it amounts to ---------------------------------------------------------------------------


def location(recipe: Recipe) -> str:
    """Return where the source is."""
    if recipe.source is None:
        raise SurgeryError("the recipe names no source", "give one with --set source=MODEL")
    return str(MODEL) if recipe.source == DEMO else recipe.source


def open_source(recipe: Recipe) -> Checkpoint:
    """Open the source."""
    return open_checkpoint(
        location(recipe),
        revision=recipe.revision,
        strip_prefix=recipe.strip_prefix,
        dequantize=recipe.dequantize,
    )


def apply(recipe: Recipe, checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint after all operations; nothing is computed yet."""
    for entry in recipe.operations:
        parameters = {k: v for k, v in entry.items() if k != "operation"}
        record = operations.find(entry["operation"])
        if recipe.calibration and record.calibrates:
            own = parameters.get("calibration") or {}
            parameters["calibration"] = {**recipe.calibration, **own}
        checkpoint = apply_step(checkpoint, record.name, parameters)
    return apply_step(checkpoint, "cast", {"dtype": recipe.dtype}) if recipe.dtype else checkpoint


def apply_step(checkpoint: Checkpoint, operation: str, parameters: Mapping[str, Any]) -> Checkpoint:
    """Return the checkpoint after an operation with the parameters of a recipe or of a step."""
    record, given = operations.find(operation), _given(parameters)
    for name in record.models:
        if name in given:
            given[name] = [open_checkpoint(model) for model in given[name]]
    return record.function(checkpoint, **given)


def recipe_of(output: Checkpoint, folder: Path | None = None) -> Recipe:
    """Return the recipe of the operations that make `output` again, its source pinned.

    Paths are as seen from `folder`, the output's, and absolute without one.
    """
    source = output.source

    def place(location: str) -> str:
        return _absolute(location) if folder is None else seen_from(folder, location)

    entries = ({"operation": s.operation, **_given(s.asked)} for s in output.steps)
    demo = source.revision is None and _absolute(source.location) == str(MODEL.resolve())
    location = source.location if source.revision else place(source.location)
    return Recipe(
        source=DEMO if demo else location,
        revision=source.revision,
        strip_prefix=source.strip_prefix,
        dequantize=source.dequantize,
        operations=tuple(_with_paths(entry, place) for entry in entries),
    )


def _given(parameters: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in parameters.items() if v is not None and v != []}


def _with_paths(entry: dict[str, Any], place: Callable[[str], str]) -> dict[str, Any]:
    """Return the entry of an operation with `place` applied to every path in it."""
    record, entry = operations.known(entry["operation"]), dict(entry)
    for key in (*record.models, *record.files) if record else ():
        if key in entry:
            entry[key] = [place(location) for location in entry[key]]
    calibration = entry.get("calibration") or {}
    if "text" in calibration:
        entry["calibration"] = relocated(calibration, place)
    return entry


def _absolute(location: str) -> str:
    """Return a path that exists as an absolute one, anything else as it is."""
    path = expanded(location)
    return str(path.resolve()) if path.exists() else location


def dump(recipe: Recipe) -> str:
    """Return the recipe as YAML, without what is as by default."""
    import yaml

    class Dumper(yaml.SafeDumper):
        pass

    def represent_list(dumper: Any, items: Sequence[Any]) -> Any:
        flow = not any(isinstance(i, Mapping) for i in items)
        return dumper.represent_sequence("tag:yaml.org,2002:seq", items, flow_style=flow)

    for kind in (list, tuple):
        Dumper.add_representer(kind, represent_list)
    values = ((f, getattr(recipe, f.name)) for f in fields(recipe))
    data = {f.name: value for f, value in values if value not in (None, {}, Require(), f.default)}
    data |= {"push": asdict(recipe.push)} if recipe.push else {}
    data |= {"require": recipe.require.as_dict()} if recipe.require else {}
    form: dict[str, Any] = {"Dumper": Dumper, "sort_keys": False, "width": 120}
    made = str(yaml.dump(data, allow_unicode=True, **form))
    plain = made == printable(made, lines=True)
    return made if plain else str(yaml.dump(data, allow_unicode=False, **form))

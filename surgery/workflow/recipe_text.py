"""YAML with the line of every key, and "dotted.key=value" put into it."""

from __future__ import annotations

import re
from typing import Any

from surgery.checkpoint.schema import Keys
from surgery.errors import SurgeryError, UsageError

MAX_TEXT, MAX_BRACKETS, MAX_KEYS, MAX_DEPTH = 1_000_000, 1000, 10_000, 50


def loader() -> Any:
    """Return a SafeLoader that reads 1e-3 as a number, as YAML 1.2 does and PyYAML does not."""
    import yaml

    class Loader(yaml.SafeLoader):
        pass

    number = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+.0123456789"))
    return Loader


def read(text: str, name: str) -> tuple[dict[str, Any], dict[Keys, str]]:
    """Return the value in a text, and "FILE, line N" of every key and item in it."""
    import yaml

    lines: dict[Keys, str] = {}
    brackets = text.count("[") + text.count("{")  # PyYAML takes their square in time
    if len(text) > MAX_TEXT or brackets > MAX_BRACKETS:
        what = f"{name} is no recipe: {len(text):,} characters, {brackets:,} brackets"
        raise SurgeryError(what, "give a recipe, a YAML file")

    def visit(node: Any, path: Keys) -> None:
        # A few aliases of aliases are billions of keys.
        if len(lines) > MAX_KEYS or len(path) > MAX_DEPTH:
            raise SurgeryError(
                f"{name} has more than {MAX_KEYS} keys, or one inside more than {MAX_DEPTH}",
                "write it without aliases",
            )
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                inner = (*path, str(key.value))
                if inner in lines:
                    raise SurgeryError(
                        f"{name}, line {key.start_mark.line + 1}: {key.value!r} a second time",
                        f"the first is in {lines[inner].rpartition(', ')[2]}: keep one",
                    )
                lines[inner] = f"{name}, line {key.start_mark.line + 1}"
                visit(value, inner)
        elif isinstance(node, yaml.SequenceNode):
            for i, item in enumerate(node.value):
                inner = (*path, i)
                lines[inner] = f"{name}, line {item.start_mark.line + 1}"
                visit(item, inner)

    try:
        visit(yaml.compose(text, loader()), ())
        data = yaml.load(text, loader())
    except (
        yaml.YAMLError,
        RecursionError,
        ValueError,
        OverflowError,
    ) as e:  # 0x_ is a number to the reader, and none
        mark = getattr(e, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        raise SurgeryError(
            f"{name}{where}: not YAML: {getattr(e, 'problem', None) or e}", "mend it"
        ) from e
    if not isinstance(data, dict) or not isinstance(data.get("operations"), list):
        raise SurgeryError(
            f"{name} has no list of operations", "see `surgery recipes` for the form"
        )
    return data, lines


def change(data: dict[str, Any], text: str) -> Keys:
    """Put the value of "operations.0.experts=4" in its place, and return the path of that."""
    import yaml

    key, equals, value = text.partition("=")
    path: tuple[Any, ...] = tuple(int(p) if p.isdigit() else p for p in key.split("."))
    if not equals or "" in path:
        raise UsageError(
            f"--set {text} has no key and value", "write it like --set operations.0.experts=4"
        )
    place: Any = data
    for part, following in zip(path, (*path[1:], ""), strict=True):
        if not isinstance(place, list | dict):
            raise UsageError(f"--set {text}: {place!r} has no {part}", "give the key of a value")
        if isinstance(place, list) and part not in range(len(place)):
            raise UsageError(
                f"--set {text}: no {part} in a list of {len(place)}", "items are counted from 0"
            )
        if following == "":
            try:
                place[part] = yaml.load(value, loader())
            except yaml.YAMLError as e:
                raise UsageError(f"--set {text}: {value!r} is not YAML", "quote it") from e
        elif isinstance(place, dict) and place.get(part) is None:
            place[part] = {}
        place = place[part]
    return path

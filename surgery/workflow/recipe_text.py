"""YAML with the line of every key, and "dotted.key=value" put into it."""

from __future__ import annotations

from typing import Any

from surgery.checkpoint.parsing import Unreadable, is_number, read_yaml, yaml_loader
from surgery.checkpoint.schema import Keys
from surgery.errors import SurgeryError, UsageError


def read(text: str, name: str) -> tuple[dict[str, Any], dict[Keys, str]]:
    """Return the value in a text, and "FILE, line N" of every key and item in it."""
    data = read_yaml(text, name, "mend it, or begin with one of `surgery recipes`")
    if not isinstance(data, dict) or not isinstance(data.get("operations"), list):
        raise SurgeryError(
            f"{name} has no list of operations", "see `surgery recipes` for the form"
        )
    return data, _lines(text, name)


def _lines(text: str, name: str) -> dict[Keys, str]:
    """Return "FILE, line N" of every key and item. Raises SurgeryError for a key given twice."""
    import yaml

    lines: dict[Keys, str] = {}

    def visit(node: Any, path: Keys) -> None:
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

    visit(yaml.compose(text, yaml_loader()), ())
    return lines


def change(data: dict[str, Any], text: str) -> Keys:
    """Put the value of "operations.0.experts=4" in its place, and return the path of that."""
    key, equals, value = text.partition("=")
    path: tuple[Any, ...] = tuple(int(p) if is_number(p) else p for p in key.split("."))
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
            place[part] = _value(value, text)
        elif isinstance(place, dict) and place.get(part) is None:
            place[part] = {}
        place = place[part]
    return path


def _value(value: str, text: str) -> Any:
    try:
        return read_yaml(value, f"--set {text}", "quote it")
    except Unreadable as e:
        raise UsageError(e.message, e.hint) from None

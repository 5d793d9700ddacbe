"""JSON schemas of functions and dataclasses, from their signatures and docstrings; and what in a
value breaks one.

Only what a signature can say is used: type, enum, items, properties, required,
additionalProperties.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Collection as AbstractCollection
from pathlib import Path
from typing import Any

Schema = dict[str, Any]
_NAMES = {
    "Any": Any,
    "Path": Path,
    "Collection": AbstractCollection,
    "Mapping": Mapping,
    "Sequence": Sequence,
}
_PLAIN = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    type(None): "null",
    Path: "string",
}
_PYTHON: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
    "array": (list,),
    "object": (Mapping,),
}
_LAYERS = {
    "type": "string",
    "pattern": r"^\s*\d+(\s*-\s*\d+)?(\s*,\s*\d+(\s*-\s*\d+)?)*\s*$",
}  # like 0-7,12


def of_function(function: Callable[..., Any], names: Mapping[str, Any]) -> Schema:
    """Of the parameters but the first, each with what the docstring says of it under "Args:".
    `names` are what classes in annotations stand for, in a file."""
    texts, found, required = _argument_texts(inspect.getdoc(function) or ""), {}, []
    scope = {**_NAMES, **vars(inspect.getmodule(function)), **names}
    for name, p in list(inspect.signature(function).parameters.items())[1:]:
        hint = eval(p.annotation, scope) if isinstance(p.annotation, str) else p.annotation
        found[name] = _described(of_hint(hint), texts.get(name), p.default)
        if p.default is inspect.Parameter.empty:
            required.append(name)
    return {
        "type": "object",
        "properties": found,
        "additionalProperties": False,
        "required": required,
    }


def of_dataclass(kind: type) -> Schema:
    """Of the fields, each with what the docstring says of it under "Args:"."""
    hints, texts = typing.get_type_hints(kind), _argument_texts(inspect.getdoc(kind) or "")
    found, required = {}, []
    for f in dataclasses.fields(kind):
        found[f.name] = _described(of_hint(hints[f.name]), texts.get(f.name), f.default)
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
            required.append(f.name)
    return {
        "type": "object",
        "properties": found,
        "additionalProperties": False,
        "required": required,
    }


def of_hint(hint: Any) -> Schema:
    """Of an annotation. Numbers of layers may also be text, "0-7,12"; what no file can hold is left
    out of a union.
    """
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return of_dataclass(hint)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return _union([of_hint(a) for a in arguments if _in_files(a)])
    if origin is typing.Literal:
        return {"enum": list(arguments)}
    if isinstance(origin, type) and issubclass(origin, Mapping):
        value = of_hint(arguments[1]) if arguments else {}
        return {"type": "object", **({"additionalProperties": value} if value else {})}
    if isinstance(origin, type) and issubclass(origin, AbstractCollection):
        items = {"type": "array", "items": of_hint(arguments[0])}
        return (
            _union([items, _LAYERS])
            if origin is AbstractCollection and arguments[0] is int
            else items
        )
    return {"type": _PLAIN[hint]} if hint in _PLAIN else {}


def _in_files(hint: Any) -> bool:
    """Whether a file can hold it: of the dataclasses those that can be made `of` a mapping."""
    return hint in _PLAIN or typing.get_origin(hint) is not None or hasattr(hint, "of")


def _union(parts: list[Schema]) -> Schema:
    """One schema for several; an object whose keys are known hides one whose keys are not."""
    parts = [inner for p in parts for inner in p.get("anyOf", [p])]
    if any("properties" in p for p in parts):
        parts = [p for p in parts if p != {"type": "object"}]
    unique = [p for i, p in enumerate(parts) if p not in parts[:i]]
    if all(set(p) == {"type"} for p in unique):
        names = [p["type"] for p in unique]
        return {"type": names[0] if len(names) == 1 else names}
    return unique[0] if len(unique) == 1 else {"anyOf": unique}


def _described(schema: Schema, text: str | None, default: Any) -> Schema:
    known = default is not inspect.Parameter.empty and isinstance(default, str | int | float | bool)
    return (
        schema | ({"description": text} if text else {}) | ({"default": default} if known else {})
    )


def _argument_texts(docstring: str) -> dict[str, str]:
    """What stands under "Args:", by argument."""
    section = re.search(r"^Args:\n((?:[ ]+.*\n?|\n)*)", docstring, re.MULTILINE)
    texts: dict[str, str] = {}
    for entry in re.split(r"\n(?=    \w)", "\n" + section[1].rstrip()) if section else ():
        names, _, text = entry.strip().partition(":")
        texts |= dict.fromkeys(re.split(r",\s*", names), " ".join(text.split()))
    return texts


# --- what breaks it -------------------------------------------------------------------------------

Keys = tuple[str | int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Violation:
    """The value at `path` (an unknown key itself is its last part), what is wrong with it, and what
    would be right.
    """

    path: Keys
    message: str
    hint: str


def violations(value: Any, schema: Schema, path: Keys = ()) -> Iterator[Violation]:
    """What in `value` the schema does not allow, in the order of the value."""
    if "anyOf" in schema:
        each = [(s, list(violations(value, s, path))) for s in schema["anyOf"]]
        if all(found for _, found in each):  # the one that was meant is of the value's type
            yield from max(each, key=lambda e: "type" in e[0] and _is(value, e[0]["type"]))[1]
    elif "enum" in schema:
        if value not in schema["enum"]:
            yield _unknown(value, [str(v) for v in schema["enum"]], path)
    elif "type" in schema and not _is(value, schema["type"]):
        names = " or ".join(_names(schema["type"]))
        what = f"item {path[-1]} of {path[-2]}" if isinstance(path[-1], int) else path[-1]
        yield Violation(path=path, message=f"{what} is {value!r}", hint=f"give {names}")
    elif "pattern" in schema and isinstance(value, str) and not re.search(schema["pattern"], value):
        yield Violation(path=path, message=f"{path[-1]} is {value!r}", hint="write it like 0-7,12")
    elif isinstance(value, Mapping):
        yield from _of_mapping(value, schema, path)
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from violations(item, schema.get("items", {}), (*path, i))


def _of_mapping(value: Mapping[str, Any], schema: Schema, path: Keys) -> Iterator[Violation]:
    known = schema.get("properties", {})
    for key, item in value.items():
        if key in known:
            yield from violations(item, known[key], (*path, key))
        elif (other := schema.get("additionalProperties", {})) is False:
            yield _unknown(key, list(known), (*path, key), "key ")
        else:
            yield from violations(item, other, (*path, key))
    for key in schema.get("required", ()):
        if key not in value:
            yield Violation(path=path, message=f"no {key}", hint=f"add {key}: …")


def _unknown(value: Any, known: list[str], path: Keys, what: str = "") -> Violation:
    near = difflib.get_close_matches(str(value), known, 1)
    return Violation(
        path=path,
        message=f"unknown {what}{value!r}",
        hint=f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}",
    )


def _is(value: Any, names: str | list[str]) -> bool:
    """Whether a value is of one of the types; True and False are no numbers."""
    listed = [names] if isinstance(names, str) else names
    kinds = tuple(kind for n in listed for kind in _PYTHON[n])
    return isinstance(value, kinds) and (not isinstance(value, bool) or "boolean" in listed)


def _names(names: str | list[str]) -> list[str]:
    words = {
        "string": "text",
        "integer": "a whole number",
        "number": "a number",
        "boolean": "true or false",
        "array": "a list",
        "object": "keys with values",
        "null": "nothing",
    }
    listed = [words[n] for n in ([names] if isinstance(names, str) else names)]
    return [n for n in listed if n != "nothing"] or listed

"""JSON schemas made from signatures and docstrings, and the violations of a schema in a value.

The schemas use the keywords that a signature can express: type, enum, items, properties, required
and additionalProperties.
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
# Layer numbers as text, such as "0-7,12".
_LAYERS = {
    "type": "string",
    "pattern": r"^\s*[0-9]+(\s*-\s*[0-9]+)?(\s*,\s*[0-9]+(\s*-\s*[0-9]+)?)*\s*$",
}


def of_function(function: Callable[..., Any], names: Mapping[str, Any]) -> Schema:
    """Return the schema of a function's parameters, without the first one.

    Each parameter is described by its text under "Args:" in the docstring.

    Args:
        function: the function.
        names: the types that stand in a file for classes named in annotations.
    """
    texts, found, required = _argument_texts(inspect.getdoc(function) or ""), {}, []
    scope = {**_NAMES, **vars(inspect.getmodule(function)), **names}
    for name, p in list(inspect.signature(function).parameters.items())[1:]:
        hint = eval(p.annotation, scope) if isinstance(p.annotation, str) else p.annotation
        found[name] = _described(of_hint(hint), texts.get(name), p.default)
        if p.default is inspect.Parameter.empty:
            required.append(name)
    return _closed_object(found, required)


def of_dataclass(kind: type) -> Schema:
    """Return the schema of a dataclass; fields are described under "Args:" in its docstring."""
    hints, texts = typing.get_type_hints(kind), _argument_texts(inspect.getdoc(kind) or "")
    found, required = {}, []
    for f in dataclasses.fields(kind):
        found[f.name] = _described(of_hint(hints[f.name]), texts.get(f.name), f.default)
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
            required.append(f.name)
    return _closed_object(found, required)


def _closed_object(properties: dict[str, Schema], required: list[str]) -> Schema:
    """Return the schema of an object that has no other keys than `properties`."""
    schema: Schema = {"type": "object", "properties": properties, "additionalProperties": False}
    return schema | {"required": required}


def of_hint(hint: Any) -> Schema:
    """Return the schema of an annotation.

    A collection of integers may also be text such as "0-7,12". Members of a union that no file can
    hold are left out.
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
        layers = origin is AbstractCollection and arguments[0] is int
        return _union([items, _LAYERS]) if layers else items
    return {"type": _PLAIN[hint]} if hint in _PLAIN else {}


def _in_files(hint: Any) -> bool:
    """Return whether a file can hold a value of this type.

    A dataclass qualifies if it has a constructor `of` that takes a mapping.
    """
    return hint in _PLAIN or typing.get_origin(hint) is not None or hasattr(hint, "of")


def _union(parts: list[Schema]) -> Schema:
    """Return one schema for several; objects with known keys replace the object without any."""
    parts = [inner for p in parts for inner in p.get("anyOf", [p])]
    if any("properties" in p for p in parts):
        parts = [p for p in parts if p != {"type": "object"}]
    unique = [p for i, p in enumerate(parts) if p not in parts[:i]]
    if all(set(p) == {"type"} for p in unique):
        names = [p["type"] for p in unique]
        return {"type": names[0] if len(names) == 1 else names}
    return unique[0] if len(unique) == 1 else {"anyOf": unique}


def _described(schema: Schema, text: str | None, default: Any) -> Schema:
    if text:
        schema = schema | {"description": text}
    if default is not inspect.Parameter.empty and isinstance(default, str | int | float | bool):
        schema = schema | {"default": default}
    return schema


def _argument_texts(docstring: str) -> dict[str, str]:
    """Return the texts under "Args:" in a docstring, by argument."""
    section = re.search(r"^Args:\n((?:[ ]+.*\n?|\n)*)", docstring, re.MULTILINE)
    texts: dict[str, str] = {}
    for entry in re.split(r"\n(?=    \w)", "\n" + section[1].rstrip()) if section else ():
        names, _, text = entry.strip().partition(":")
        texts |= dict.fromkeys(re.split(r",\s*", names), " ".join(text.split()))
    return texts


# --- violations -----------------------------------------------------------------------------------

Keys = tuple[str | int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Violation:
    """One violation of a schema.

    Args:
        path: the keys that lead to the value; the last one is the key itself where it is unknown.
        message: what is wrong.
        hint: what would be right.
    """

    path: Keys
    message: str
    hint: str


def violations(value: Any, schema: Schema, path: Keys = ()) -> Iterator[Violation]:
    """Yield what the schema does not allow, in the order in which it appears in `value`."""
    if "anyOf" in schema:
        each = [(s, list(violations(value, s, path))) for s in schema["anyOf"]]
        if all(found for _, found in each):
            # The alternative with the value's type is most likely the one that was meant.
            yield from max(each, key=lambda e: "type" in e[0] and _is(value, e[0]["type"]))[1]
    elif "enum" in schema:
        if value not in list(schema["enum"]):  # a list or a mapping has no hash
            yield _unknown(value, [str(v) for v in schema["enum"]], path)
    elif "type" in schema and not _is(value, schema["type"]):
        names = " or ".join(_names(schema["type"]))
        what = f"item {path[-1]} of {path[-2]}" if isinstance(path[-1], int) else path[-1]
        yield Violation(path=path, message=f"{what} is {value!r}", hint=f"give {names}")
    elif (
        "pattern" in schema
        and isinstance(value, str)
        and not re.fullmatch(schema["pattern"], value)
    ):
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
    """Return whether a value has one of the types; True and False are not numbers."""
    listed = [names] if isinstance(names, str) else names
    kinds = tuple(kind for n in listed for kind in _PYTHON[n])
    return isinstance(value, kinds) and (not isinstance(value, bool) or "boolean" in listed)


def _names(names: str | list[str]) -> list[str]:
    """Return the types in words, without null unless it is the only one."""
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

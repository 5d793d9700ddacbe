"""The command of an operation that has no module of its own here, made from its record.

Its options are the keywords of the operation's function, as their JSON schema describes them.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

import click

from surgery import operations
from surgery.checkpoint.schema import Schema
from surgery.cli.options import CommonOptions, calibrated, converting, execute
from surgery.operations import Operation

CALIBRATION = "calibration"  # the keyword that the calibration options fill
_TYPES: dict[str, Any] = {"integer": int, "number": float, "string": str}


def command_of(name: str) -> click.Command:
    """Return the command of the operation `name`. Raises KeyError for a name that is none."""
    operation = operations.find(name)
    schema = operation.options
    own = {n: s for n, s in schema["properties"].items() if n != CALIBRATION}

    def command(common: CommonOptions, **values: Any) -> int:
        return _run(operation, common, values)

    command.__name__, command.__doc__ = f"{name}_command", _help(operation)
    wrapped: Callable[..., Any] = command
    if operation.calibrates:
        wrapped = calibrated(wrapped)
    wrapped = converting(wrapped, without=own)
    for option, described in reversed(own.items()):
        wrapped = _option(option, described, option in schema["required"])(wrapped)
    return click.command(name)(wrapped)


def _run(operation: Operation, common: CommonOptions, values: Mapping[str, Any]) -> int:
    """Apply the operation with the options that were given; the others have their defaults."""
    from surgery.workflow.recipe import apply_step

    schemas = operation.options["properties"]
    given = {n: _parsed(v, schemas[n]) for n, v in values.items() if v not in (None, (), {})}
    return execute(common, lambda checkpoint: apply_step(checkpoint, operation.name, given))


# --- from a schema to an option -------------------------------------------------------------------


def _option(name: str, schema: Schema, required: bool) -> Callable[[Any], Any]:
    """Return the option of one keyword of the function."""
    flag = f"--{name.replace('_', '-')}"
    text = _sentence(str(schema.get("description", "")))
    default, kinds = schema.get("default"), _kinds(schema)
    if kinds == {"boolean"}:
        both = f"{flag}/--no-{flag[2:]}" if default else flag
        return click.option(both, name, is_flag=True, default=default, help=text)
    if default is not None:
        text = f"{text} [default: {default}]".strip()
    if "enum" in schema:
        kind: Any = click.Choice([str(choice) for choice in schema["enum"]])
        return click.option(flag, name, type=kind, required=required, help=text)
    if kinds == {"array"}:
        return click.option(flag, name, multiple=True, required=required, help=text)
    only = kinds.pop() if len(kinds) == 1 else "string"
    return click.option(flag, name, type=_TYPES.get(only, str), required=required, help=text)


def _kinds(schema: Schema) -> set[str]:
    """Return the types that a value may have, without null."""
    found: set[str] = set()
    for part in schema.get("anyOf", [schema]):
        names = part.get("type", [])
        found |= {names} if isinstance(names, str) else set(names)
    return found - {"null"}


def _parsed(value: Any, schema: Schema) -> Any:
    """Return the value of an option as the function takes it."""
    from surgery.workflow.recipe import parse_layers

    if isinstance(value, tuple):
        return list(value)
    if not isinstance(value, str):
        return value
    if "enum" in schema:
        return next(choice for choice in schema["enum"] if str(choice) == value)
    if any("pattern" in part for part in schema.get("anyOf", ())):  # layers, like 0-7,12
        return sorted(parse_layers(value) or ())
    return _number(value, _kinds(schema))


def _number(text: str, kinds: set[str]) -> Any:
    """Return the number in a text where numbers are allowed, else the text."""
    for kind, make in (("integer", int), ("number", float)):
        if kind in kinds:
            try:
                return make(text)
            except ValueError:
                pass
    return text


def _help(operation: Operation) -> str:
    """Return the summary and what the function's docstring says before its arguments."""
    text = (inspect.getdoc(operation.function) or "").partition("\n\nArgs:")[0]
    text = text.partition("\n\nExample:")[0].partition("\n\nRaises")[0]
    schemas = operation.options["properties"]
    required = (_example(name, schemas[name]) for name in operation.options["required"])
    example = f"surgery {operation.name} ./my-model{''.join(required)} --dry-run"
    return f"{operation.summary}\n\n{text}\n\n\b\nExamples:\n  {example}"


def _example(name: str, schema: Schema) -> str:
    """Return an option with the first value that its description names, or else its own name."""
    quoted = re.search('"([^"]+)"', str(schema.get("description", "")))
    return f" --{name.replace('_', '-')} {quoted[1] if quoted else name.upper()}"


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]

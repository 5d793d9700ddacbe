"""JSON and YAML from strangers, read within limits.

Python's readers take what no checkpoint holds: objects a thousand deep, keys that stand twice, NaN,
numbers of thousands of digits, and YAML whose aliases unfold into billions of values. Each of these
is an error here, before anything is made of it.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from functools import cache, partial
from typing import Any

from surgery.errors import SurgeryError

MAX_DEPTH = 50  # of lists and objects in each other
MAX_DIGITS = 100  # of one number
MAX_TEXT, MAX_BRACKETS, MAX_NODES = 1_000_000, 1000, 20_000  # of YAML


class Unreadable(SurgeryError):  # noqa: N818
    """Text that is not what it should be; the message says where it is from and what is wrong."""


def read_json(
    data: bytes | str,
    where: str,
    hint: str,
    repeated: list[str] | None = None,
    *,
    finite: bool = False,
) -> Any:
    """Return the value of a JSON text.

    Infinity is let through unless `finite`, because configs of state-space models hold it.

    Args:
        data: the text, in UTF-8 where it is bytes.
        where: what it is, for the error: "config.json of ./model".
        hint: what to do about it.
        repeated: takes the keys that an object has more than once, of which the last counts;
            without it such keys are an error.
        finite: whether Infinity, and -0 as a whole number, are errors.

    Raises Unreadable where it is no JSON, and where it exceeds a limit.
    """
    try:
        value = json.loads(
            data,
            object_pairs_hook=partial(_object, repeated=repeated),
            parse_constant=_no_constant if finite else _constant,
            parse_int=_unsigned_zero if finite else _integer,
            parse_float=_float,
        )
        _check_depth(value)
        # Half a surrogate pair can be read, but it could not be written.
        json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise Unreadable(f"{where} is not valid JSON: {_TOO_DEEP}", hint) from None
    except ValueError as e:
        raise Unreadable(f"{where} is not valid JSON: {str(e)[:200]}", hint) from None
    return value


_TOO_DEEP = f"lists and objects are more than {MAX_DEPTH} deep"


def _object(pairs: list[tuple[str, Any]], repeated: list[str] | None) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = [k[:100] for k, count in Counter(k for k, _ in pairs).items() if count > 1]
        if repeated is None:
            raise ValueError(f"{twice[0]!r} stands in it twice")
        repeated.extend(twice)
    return found


def _constant(name: str) -> float:
    if name == "NaN":
        raise ValueError("it holds NaN")
    return float(name)


def _no_constant(name: str) -> float:
    raise ValueError(f"it holds {name}")


def _unsigned_zero(digits: str) -> int:
    if digits == "-0":
        raise ValueError("it holds -0")
    return _integer(digits)


def _integer(digits: str) -> int:
    return int(_short(digits))


def _float(digits: str) -> float:
    value = float(_short(digits))
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"the number {digits} is too large")
    return value


def _short(digits: str) -> str:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"a number of {len(digits):,} digits, {digits[:10]}…")
    return digits


def _check_depth(value: Any) -> None:
    level, depth = [value], 0
    while level := [v for v in level if isinstance(v, dict | list)]:
        depth += 1
        if depth > MAX_DEPTH:
            raise ValueError(_TOO_DEEP)
        level = [
            v for inner in level for v in (inner.values() if isinstance(inner, dict) else inner)
        ]


def is_number(text: str) -> bool:
    """Return whether a text is a whole number that `int` reads: "12", and not "²" or "٣"."""
    return text.isascii() and text.isdecimal() and len(text) <= MAX_DIGITS


# --- YAML -----------------------------------------------------------------------------------------


@cache
def yaml_loader() -> Any:
    """Return a SafeLoader for plain values.

    It reads 1e-3 as a number, as YAML 1.2 does and PyYAML does not, and leaves dates as text.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        pass

    date = "tag:yaml.org,2002:timestamp"
    Loader.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in found if tag != date]
        for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    number = re.compile(r"[-+]?([0-9]+(\.[0-9]*)?|\.[0-9]+)[eE][-+]?[0-9]+")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+.0123456789"))
    return Loader


def read_yaml(text: str, where: str, hint: str) -> Any:
    """Return the value of a YAML text: plain values, without aliases and tags.

    Args:
        text: the text.
        where: what it is, for the error: "my.yaml".
        hint: what to do about it.

    Raises Unreadable, with the line where one is known.
    """
    import yaml

    brackets = text.count("[") + text.count("{")  # PyYAML takes their square in time
    if len(text) > MAX_TEXT or brackets > MAX_BRACKETS:
        size = f"{len(text):,} characters, {brackets:,} brackets"
        raise Unreadable(f"{where} is too large: {size}", hint)
    try:
        _check_events(text)
        value = yaml.load(text, yaml_loader())
        _check_numbers(value)
    except yaml.YAMLError as e:
        mark = getattr(e, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        problem = str(getattr(e, "problem", None) or e)[:200]
        raise Unreadable(f"{where}{line}: not YAML: {problem}", hint) from None
    except (ValueError, OverflowError, TypeError, RecursionError) as e:
        # 0x_ is a number to the reader, and none.
        raise Unreadable(f"{where}: not YAML: {str(e)[:200]}", hint) from None
    return value


_PLAIN = {f"tag:yaml.org,2002:{name}" for name in ("str", "int", "float", "bool", "null")}


def _check_events(text: str) -> None:
    """Raise YAMLError for what no value is made of here, before PyYAML makes any of it."""
    import yaml

    depth = nodes = 0
    for event in yaml.parse(text, yaml_loader()):
        opens = isinstance(event, yaml.CollectionStartEvent)
        depth += opens - isinstance(event, yaml.CollectionEndEvent)
        nodes += isinstance(event, yaml.NodeEvent)
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            problem = "aliases and anchors are not read"
        elif (tag := getattr(event, "tag", None)) and tag not in _PLAIN:
            problem = f"the tag {tag[:100]!r} is not read"
        elif depth > MAX_DEPTH or nodes > MAX_NODES:
            problem = f"more than {MAX_NODES} values, or one inside more than {MAX_DEPTH} others"
        else:
            continue
        raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)


def _check_numbers(value: Any) -> None:
    """Raise ValueError for a whole number that nothing could print."""
    if isinstance(value, dict | list):
        for inner in [*value, *value.values()] if isinstance(value, dict) else value:
            _check_numbers(inner)
    elif isinstance(value, int) and value.bit_length() > 128:
        raise ValueError(f"a number of {value.bit_length():,} bits")

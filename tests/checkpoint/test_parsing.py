"""JSON, YAML and numbers within limits: the last value that is read and the first that is not."""

from __future__ import annotations

from typing import Any

import pytest

from surgery.checkpoint.parsing import (
    MAX_BRACKETS,
    MAX_DEPTH,
    MAX_DIGITS,
    MAX_NODES,
    MAX_TEXT,
    Unreadable,
    is_number,
    read_json,
    read_yaml,
)


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (nested(MAX_DEPTH), None),
        ("9" * MAX_DIGITS, int("9" * MAX_DIGITS)),
        ("1e308", 1e308),
        ("-0", 0),
        ("-Infinity", float("-inf")),
        ('"\\ud83d\\ude00"', "\U0001f600"),
    ],
)
def test_the_last_json_that_is_read(text: str, value: Any) -> None:
    found = read_json(text, "it", "")
    assert value is None or found == value


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (nested(MAX_DEPTH + 1), f"more than {MAX_DEPTH} deep"),
        ("[" * 100_000, f"more than {MAX_DEPTH} deep"),
        ("9" * (MAX_DIGITS + 1), f"a number of {MAX_DIGITS + 1} digits"),
        ("1e309", "the number 1e309 is too large"),
        ("-1e309", "is too large"),
        ("NaN", "it holds NaN"),
        ('{"a": 1, "a": 2}', "'a' stands in it twice"),
        ('"\\ud800"', "surrogates not allowed"),
    ],
)
def test_the_first_json_that_is_not(text: str, words: str) -> None:
    with pytest.raises(Unreadable, match="it is not valid JSON: ") as caught:
        read_json(text, "it", "")
    assert words in caught.value.message


def test_finite_json_has_neither_infinity_nor_minus_zero() -> None:
    for text, words in (("Infinity", "it holds Infinity"), ("-0", "it holds -0")):
        with pytest.raises(Unreadable, match=words):
            read_json(text, "it", "", finite=True)
    assert read_json("[0, -1]", "it", "", finite=True) == [0, -1]


def test_repeated_keys_are_listed_and_the_last_counts() -> None:
    repeated: list[str] = []
    assert read_json('{"a": 1, "b": 2, "a": 3}', "it", "", repeated) == {"a": 3, "b": 2}
    assert repeated == ["a"]


@pytest.mark.parametrize(
    ("text", "is_one"),
    [("12", True), ("", False), ("-1", False), ("²", False), ("٣", False), ("1.0", False)],
)
def test_numbers(text: str, is_one: bool) -> None:
    assert is_number(text) is is_one
    assert is_number("1" * MAX_DIGITS) and not is_number("1" * (MAX_DIGITS + 1))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a: 1e-3", {"a": 0.001}),
        ("a: 2026-01-01", {"a": "2026-01-01"}),
        ("- " * 3 + "x", [[["x"]]]),
        ("[" * 50 + "]" * 50, None),
        (f"a: {2**128 - 1}", {"a": 2**128 - 1}),
        ("[" + "x," * (MAX_NODES - 2) + "x]", None),
        ("x" * MAX_TEXT, "x" * MAX_TEXT),
    ],
)
def test_the_last_yaml_that_is_read(text: str, value: Any) -> None:
    if text.startswith("[x"):
        text = text.replace(",x]", "]")
    found = read_yaml(text, "it", "")
    assert value is None or found == value


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: &x 1", "it, line 1: not YAML: aliases and anchors are not read"),
        ("a: 1\nb: *x", "it, line 2: not YAML: aliases and anchors are not read"),
        ("a: !!binary aGk=", "the tag 'tag:yaml.org,2002:binary' is not read"),
        (f"a: {2**128}", "a number of 129 bits"),
        (f"- [{-(2**200)}]", "a number of 201 bits"),
        ("[" + "x," * MAX_NODES + "]", f"more than {MAX_NODES} values"),
        ("x" * (MAX_TEXT + 1), f"too large: {MAX_TEXT + 1:,} characters, 0 brackets"),
        ("[" * (MAX_BRACKETS + 1), f"too large: {MAX_BRACKETS + 1:,} characters"),
        ("a: [", "not YAML"),
    ],
)
def test_the_first_yaml_that_is_not(text: str, words: str) -> None:
    with pytest.raises(Unreadable) as caught:
        read_yaml(text, "it", "")
    assert words in caught.value.message

"""The house's habits that a program can check: few parameters, and docstrings that begin with a
verb.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import surgery

ROOT = Path(__file__).resolve().parent.parent / "surgery"
FILES = sorted(ROOT.rglob("*.py"))
MOST_PARAMETERS = 6


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def functions(path: Path) -> Iterator[ast.FunctionDef]:
    """Yield every function and method of a file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            yield node


def parameters(function: ast.FunctionDef) -> list[str]:
    """Return the parameters that a caller gives."""
    a = function.args
    return [p.arg for p in (*a.posonlyargs, *a.args, *a.kwonlyargs) if p.arg not in ("self", "cls")]


def is_public(path: Path, function: ast.FunctionDef) -> bool:
    """Return whether a function is of the API or a command, which have one option a choice."""
    operation = path.parent.name == "operations" and function.name in surgery.__all__
    command = any(".command(" in ast.unparse(d) for d in function.decorator_list)
    return operation or command or path.name == "api.py"


@pytest.mark.parametrize("path", FILES, ids=name)
def test_below_the_api_no_function_has_many_parameters(path: Path) -> None:
    """A long list of arguments is a record that nobody has named."""
    long = {
        f.name: parameters(f)
        for f in functions(path)
        if len(parameters(f)) > MOST_PARAMETERS and not is_public(path, f)
    }
    assert not long


def test_ruff_formats_every_line() -> None:
    """A line that is laid out by hand is laid out again by whoever touches it."""
    assert not [name(path) for path in FILES if "# fmt:" in path.read_text()]


# First words of docstrings that need the name of the function as their subject.
NO_VERB = re.compile(
    "A|All|An|And|As|At|Both|By|Each|Every|For|From|How|If|In|It|Its|No|None|Not|Of|On|One|Only"
    "|Or|That|The|These|This|Those|To|What|When|Where|Whether|Which|Who|With|[^A-Z].*"
)


@pytest.mark.parametrize("path", FILES, ids=name)
def test_docstrings_of_functions_begin_with_a_verb(path: Path) -> None:
    """A reader of help and API pages sees the sentence without the code around it."""
    found = ((f.name, ast.get_docstring(f)) for f in functions(path))
    first = {called: text.split()[0].strip(",.:;") for called, text in found if text}
    assert not {called: word for called, word in first.items() if NO_VERB.fullmatch(word)}

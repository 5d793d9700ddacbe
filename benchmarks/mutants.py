"""Plant faults in the code that proves and publishes, and count those that the tests catch.

  python benchmarks/mutants.py                       # 60 mutants, on one core
  python benchmarks/mutants.py --count 10 --only surgery/workflow/publish.py --seed 3

Each mutant is one change of one expression in a copy of the working tree: a comparison or an
operator is exchanged, a constant moved, a condition negated, a call of `raise` left out, a returned
value replaced. The sample is drawn by a seed, evenly over the rooms.

1. The tests named in TESTS pass without a fault, and the functions that each calls are noted.
2. Against each mutant run the tests that call its function, the fastest first, until one fails.
3. A mutant that survives is printed with its line.

benchmarks/equivalent_mutants.txt lists changes that change nothing, with the reason; they are never
drawn. Exits 1 where fewer than 90% are caught.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
EQUIVALENT = Path(__file__).with_name("equivalent_mutants.txt")
ENOUGH = 0.9
SECONDS = 300  # of the tests of one mutant; one that hangs them is caught
# Where faults are planted, and the tests that should notice.
TESTS: dict[str, tuple[str, ...]] = {
    "surgery/checkpoint": (
        "tests/checkpoint",
        "tests/test_planted_faults.py",
        "tests/storage/test_reader.py",
        "tests/storage/test_shards.py",
        "tests/storage/test_property.py",
        "tests/storage/test_kinds.py",
        "tests/storage/test_prefixes.py",
        "tests/operations/test_cast.py",
        "tests/blocks/test_decoding.py",
    ),
    "surgery/proof": (
        "tests/proof",
        "tests/test_planted_faults.py",
        "tests/storage/test_resumed_digests.py",
        "tests/workflow/test_other_head.py",
        "tests/cli/test_quality_limit.py",
    ),
    "surgery/workflow/publish.py": ("tests/workflow/test_publish.py",),
    "surgery/report/card.py": ("tests/report/test_card.py", "tests/test_hostile_text.py"),
}
_COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Div,
    ast.Mod: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}


def mutated(node: ast.AST) -> ast.AST | None:
    """Return another node in the place of `node`, or None where there is no fault to plant."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _COMPARED:
        return ast.Compare(
            node.left, [_COMPARED[type(node.ops[0])](), *node.ops[1:]], node.comparators
        )
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return ast.BinOp(node.left, _OPERATORS[type(node.op)](), node.right)
    if isinstance(node, ast.BoolOp):
        return ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return node.operand
    if isinstance(node, ast.If | ast.While):
        return type(node)(ast.UnaryOp(ast.Not(), node.test), node.body, node.orelse)
    if isinstance(node, ast.Raise):
        return ast.Pass()
    if isinstance(node, ast.Constant) and type(node.value) in (int, float, bool):
        moved = not node.value if isinstance(node.value, bool) else node.value + 1
        return ast.Constant(moved)
    if isinstance(node, ast.Return) and node.value is not None:
        already = isinstance(node.value, ast.Constant) and node.value.value is None
        return None if already else ast.Return(ast.Constant(None))
    return None


def places(tree: ast.Module) -> list[ast.AST]:
    """Return the nodes inside functions in which a fault can be planted; no annotations."""
    found = []
    for function in (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)):
        for statement in function.body:
            found += [n for n in _expressions(statement) if mutated(n) is not None]
    return list({id(n): n for n in found}.values())


def _expressions(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    for field, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and field not in ("annotation", "returns"):
                yield from _expressions(child)


class _Planter(ast.NodeTransformer):
    def __init__(self, target: ast.AST) -> None:
        self.target = target

    def visit(self, node: ast.AST) -> ast.AST:
        if node is self.target:
            new = mutated(node)
            assert new is not None
            return ast.copy_location(new, node)
        return super().visit(node)


@dataclass(frozen=True, slots=True)
class Mutant:
    """One fault: its file, the file's text with it, the line, and the change in words.

    `function` is the line at which its function begins, decorators included.
    """

    file: Path
    planted: str
    line: int
    change: str
    function: int

    @property
    def key(self) -> str:
        """Return the change as benchmarks/equivalent_mutants.txt names it."""
        return f"{self.file.as_posix()}: {self.change}"


@cache
def _count(file: Path) -> int:
    return len(places(ast.parse(file.read_text())))


def plant(file: Path, number: int) -> Mutant:
    """Return fault `number` of a file."""
    tree = ast.parse(file.read_text())
    target = places(tree)[number]
    new = mutated(target)
    assert new is not None
    words = [ast.unparse(ast.fix_missing_locations(n)).partition("\n")[0] for n in (target, new)]
    line, function = getattr(target, "lineno", 0), _begin_of_function(tree, target)
    planted = ast.fix_missing_locations(_Planter(target).visit(tree))
    return Mutant(file.relative_to(ROOT), ast.unparse(planted), line, " -> ".join(words), function)


def _begin_of_function(tree: ast.Module, target: ast.AST) -> int:
    """Return the first line of the outermost function that holds a node."""
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
    function = next(f for f in functions if any(n is target for n in ast.walk(f)))
    return min([function.lineno, *(d.lineno for d in function.decorator_list)])


def equivalent() -> set[str]:
    """Return the keys of the mutants that compute what the code computes."""
    lines = EQUIVALENT.read_text().splitlines()
    return {line.partition("  # ")[0] for line in lines if line and not line.startswith("#")}


def sample(count: int, seed: int, only: str | None) -> list[tuple[str, Mutant]]:
    """Return `count` mutants with their rooms, evenly over the rooms and none of them twice."""
    draw, known, found = random.Random(seed), equivalent(), dict[str, tuple[str, Mutant]]()
    rooms = [room for room in TESTS if only is None or only.startswith(room)]
    while len(found) < count:
        room = rooms[len(found) % len(rooms)]
        files = sorted((ROOT / room).glob("*.py")) if (ROOT / room).is_dir() else [ROOT / room]
        files = [f for f in files if only in (None, room) or f == ROOT / only]
        mutant = plant(*draw.choice([(f, n) for f in files for n in range(_count(f))]))
        if mutant.key not in known:
            found.setdefault(f"{mutant.key} {mutant.line}", (room, mutant))
    return list(found.values())


class Calls:
    """A plugin of pytest that notes the functions of `folder` that each test calls, and its time.

    What one test sets up may serve the others of its file, so its calls count for all of them.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._now = str(folder / "surgery"), set[str]()
        self._seen: dict[str, set[str]] = {}
        self._setups: dict[str, set[str]] = {}
        self._seconds: dict[str, float] = {}

    def _trace(self, frame: Any, event: str, argument: object) -> None:
        code = frame.f_code
        if code.co_filename.startswith(self._folder):
            place = Path(code.co_filename).relative_to(Path(self._folder).parent)
            self._now.add(f"{place.as_posix()}:{code.co_firstlineno}")

    def pytest_runtest_logreport(self, report: Any) -> None:
        name, file = report.nodeid, report.nodeid.partition("::")[0]
        (self._setups if report.when == "setup" else self._seen).setdefault(
            file if report.when == "setup" else name, set()
        ).update(self._now)
        self._seconds[name] = self._seconds.get(name, 0.0) + report.duration
        self._now.clear()

    def pytest_sessionstart(self) -> None:
        threading.settrace(self._trace)
        sys.settrace(self._trace)

    def found(self) -> list[tuple[float, str, list[str]]]:
        """Return the seconds, the name and the functions of each test."""
        return [
            (self._seconds[name], name, sorted(calls | self._setups[name.partition("::")[0]]))
            for name, calls in self._seen.items()
        ]


def run_tests(copy: Path, tests: Sequence[str], notes: Path | None = None) -> bool:
    """Return whether the tests pass on a copy, in a process that has imported torch already.

    What they call is written to `notes`.
    """
    child = os.fork()
    if not child:
        _in_child(copy, tests, notes)
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status) == 0
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


def _in_child(copy: Path, tests: Sequence[str], notes: Path | None) -> None:
    """Run the tests with the copy's code and no output, and end the process."""
    import pytest

    code, calls = 1, Calls(copy)
    try:
        os.setsid()
        os.chdir(copy)
        os.environ["PYTHONPATH"] = str(copy)
        sys.path.insert(0, str(copy))
        nothing = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(nothing, descriptor)
        arguments = ["-q", "-x", "-p", "no:cacheprovider", *tests]
        code = int(pytest.main(arguments, plugins=[calls] if notes else []))
        if notes:
            notes.write_text(json.dumps(calls.found()))
    finally:
        os._exit(code)


def tests_of(mutant: Mutant, room: str, notes: Path) -> list[str]:
    """Return the tests that call a mutant's function, the fastest first; all where none does.

    A command that a test starts as a process of its own is not seen.
    """
    called = f"{mutant.file.as_posix()}:{mutant.function}"
    found = sorted((seconds, name) for seconds, name, calls in _read(notes) if called in calls)
    return [name for _, name in found] or list(TESTS[room])


@cache
def _read(notes: Path) -> list[tuple[float, str, list[str]]]:
    return [(seconds, name, calls) for seconds, name, calls in json.loads(notes.read_text())]


def _import_what_tests_import() -> None:
    """Import what is large and is not under test, once for all mutants."""
    os.environ["OMP_NUM_THREADS"] = "1"
    import safetensors.torch
    import torch
    import transformers

    torch.set_num_threads(1)
    assert safetensors.torch and transformers.LlamaForCausalLM and transformers.MixtralForCausalLM


def _copy_of_the_tree(folder: Path) -> Path:
    ignored = shutil.ignore_patterns(".git", ".venv", "__pycache__", "*.egg-info", "shared")
    return Path(shutil.copytree(ROOT, folder / "copy", ignore=ignored))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="a room or a file of TESTS")
    a = parser.parse_args()
    os.nice(10)
    _import_what_tests_import()
    drawn, caught = sample(a.count, a.seed, a.only), 0
    with tempfile.TemporaryDirectory(prefix="mutants-") as temporary:
        copy = _copy_of_the_tree(Path(temporary))
        notes = {room: Path(temporary, f"{i}.json") for i, room in enumerate(TESTS)}
        for room in dict.fromkeys(room for room, _ in drawn):
            if not run_tests(copy, TESTS[room], notes[room]):
                sys.exit(f"the tests of {room} fail without a fault: {' '.join(TESTS[room])}")
        for room, mutant in drawn:
            (copy / mutant.file).write_text(mutant.planted)
            found = not run_tests(copy, tests_of(mutant, room, notes[room]))
            shutil.copy(ROOT / mutant.file, copy / mutant.file)
            caught += found
            word = "caught  " if found else "SURVIVED"
            print(f"{word} {mutant.file}:{mutant.line}: {mutant.change}", flush=True)
    print(f"{caught} of {a.count} caught, {caught / max(1, a.count):.0%}")
    sys.exit(caught < ENOUGH * a.count)


if __name__ == "__main__":
    main()

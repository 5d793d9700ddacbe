"""Plant faults in the code that proves and publishes, and count those that the tests catch.

  python benchmarks/mutants.py                       # 60 mutants, about an hour
  python benchmarks/mutants.py --count 10 --only surgery/workflow/publish.py --seed 3

Each mutant is one change of one expression in a copy of the working tree: a comparison or an
operator is exchanged, a constant moved, a condition negated, a call of `raise` left out, a returned
value replaced. The sample is drawn by a seed, evenly over the files. The tests named in TESTS for
its file run against it until the first that fails; a mutant that survives is printed with its line.
Exits 1 where fewer than 90% are caught.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ENOUGH = 0.9
SECONDS = 1200  # of the tests of one mutant; one that hangs them is caught
# Where faults are planted, and the tests that should notice, fastest first.
TESTS = {
    "surgery/checkpoint": ("tests/checkpoint", "tests/storage", "tests/operations"),
    "surgery/proof": ("tests/proof", "tests/storage/test_resumed_digests.py", "tests/workflow"),
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
        return ast.Return(ast.Constant(None))
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


def plant(text: str, number: int) -> tuple[str, int, str]:
    """Return a file with fault `number` in it, its line, and the line as it was."""
    tree = ast.parse(text)
    target = places(tree)[number]
    line = getattr(target, "lineno", 0)
    planted = ast.fix_missing_locations(_Planter(target).visit(tree))
    return ast.unparse(planted), line, text.splitlines()[line - 1].strip()


def sample(count: int, seed: int, only: str | None) -> list[tuple[Path, int, tuple[str, ...]]]:
    """Return the file, the number of the fault and the tests of each mutant."""
    draw, found = random.Random(seed), []
    rooms = {room: tests for room, tests in TESTS.items() if only is None or only.startswith(room)}
    for i in range(count):
        room, tests = list(rooms.items())[i % len(rooms)]
        files = sorted((ROOT / room).glob("*.py")) if (ROOT / room).is_dir() else [ROOT / room]
        files = [f for f in files if only in (None, room) or f == ROOT / only]
        numbers = [(f, n) for f in files for n in range(len(places(ast.parse(f.read_text()))))]
        file, number = draw.choice(numbers)
        found.append((file.relative_to(ROOT), number, tests))
    return found


def is_caught(copy: Path, tests: tuple[str, ...]) -> bool:
    """Return whether a test fails, or the tests cannot even begin."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    environment = os.environ | {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    try:
        ran = subprocess.run(
            command, cwd=copy, env=environment, capture_output=True, timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return True
    return ran.returncode != 0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="a room or a file of TESTS")
    a = parser.parse_args()
    os.nice(10)
    caught = 0
    with tempfile.TemporaryDirectory(prefix="mutants-") as temporary:
        copy = Path(temporary) / "copy"
        ignored = shutil.ignore_patterns(".git", ".venv", "__pycache__", "*.egg-info", "shared")
        shutil.copytree(ROOT, copy, ignore=ignored)
        for file, number, tests in sample(a.count, a.seed, a.only):
            whole = (copy / file).read_text()
            planted, line, before = plant(whole, number)
            (copy / file).write_text(planted)
            found = is_caught(copy, tests)
            (copy / file).write_text(whole)
            caught += found
            print(f"{'caught  ' if found else 'SURVIVED'} {file}:{line}: {before}", flush=True)
    print(f"{caught} of {a.count} caught, {caught / max(1, a.count):.0%}")
    sys.exit(caught < ENOUGH * a.count)


if __name__ == "__main__":
    main()

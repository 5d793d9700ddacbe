"""Every import goes down: the floors of the layout, lowest first. What could break it is a
shortcut.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent / "surgery"
FLOORS = (
    ("errors", "quoting"),
    ("checkpoint", "demo"),
    ("storage",),
    ("families",),
    ("blocks",),
    ("fitting",),
    ("calibration",),
    ("analysis",),
    ("proof",),
    ("operations",),
    ("finetune", "report"),
    ("workflow",),
    ("api",),
    ("cli",),
    ("__main__",),
)
LEVEL = {name: i for i, floor in enumerate(FLOORS) for name in floor}


def imports(path: Path) -> list[str]:
    """Every module that a file imports, inside functions too."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.append(node.module)
    return found


def test_processes_in_other_folders_run_this_checkout(tmp_path: Path) -> None:
    """Tests that start the command line elsewhere must not test another, installed copy."""
    command = [sys.executable, "-c", "import surgery; print(surgery.__file__)"]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert Path(found.stdout.strip()) == ROOT / "__init__.py"


@pytest.mark.parametrize(
    "path", sorted(ROOT.rglob("*.py")), ids=lambda p: p.relative_to(ROOT).as_posix()
)
def test_imports_go_down(path: Path) -> None:
    own = path.relative_to(ROOT).parts[0].removesuffix(".py")
    if own == "__init__":
        return  # the package's face: it names the API, lazily
    for module in imports(path):
        parts = module.split(".")
        if parts[0] == "surgery" and len(parts) > 1:
            assert LEVEL[parts[1]] < LEVEL[own] or parts[1] == own, (
                f"{own} imports {module} beside it"
            )
        if own == "checkpoint":
            assert parts[0] != "transformers"
        if own == "operations":
            other = parts[:2] == ["surgery", "operations"] and parts[2:] != ["operation"]
            assert not other, "operations do not import each other"
        if own == "fitting":
            assert parts[:2] not in (["surgery", "storage"], ["surgery", "calibration"])
        if own not in ("cli", "report"):
            assert parts[0] not in ("click", "rich", "tqdm", "matplotlib"), (
                f"{own} shows things: {module}"
            )

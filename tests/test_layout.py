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
    ("files",),
    ("checkpoint", "demo"),
    ("storage",),
    ("families",),
    ("blocks",),
    ("fitting",),
    ("calibration",),
    ("analysis",),
    ("proof",),
    ("operations",),
    ("finetune", "report", "engines"),
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


# Calls that create, overwrite or copy files, by the last part of their name.
_WRITES = {
    *("write_text", "write_bytes", "savefig", "save_file", "save_pretrained", "touch", "tofile"),
    *("symlink_to", "hardlink_to", "copy", "copy2", "copyfile", "copytree", "copyfileobj", "move"),
    *("NamedTemporaryFile", "mkstemp"),
}
_CREATING = {"O_CREAT", "O_WRONLY", "O_RDWR", "O_TRUNC"}
# The one place; one call into memory; files without a name; scripts that no command runs.
_MAY_WRITE = {
    "files.py": _WRITES | {"open"},
    "report/canvas.py": {"savefig"},
    "blocks/sparse_kernel.py": {"write_text"},  # in a folder that it has just made; it travels
    "calibration/walk.py": {"NamedTemporaryFile"},
    "demo/train.py": _WRITES | {"save"},
    "demo/texts.py": _WRITES,
}


def writes(tree: ast.AST) -> set[str]:
    """Every call that creates or overwrites a file, by the last part of its name."""
    found = set()
    for call in (n for n in ast.walk(tree) if isinstance(n, ast.Call)):
        owner, name = "", ""
        if isinstance(call.func, ast.Attribute):
            owner, name = ast.unparse(call.func.value), call.func.attr
        elif isinstance(call.func, ast.Name):
            name = call.func.id
        given = [*call.args, *(k.value for k in call.keywords)]
        modes = [a.value for a in given if isinstance(a, ast.Constant) and isinstance(a.value, str)]
        flags = {n.attr for a in given for n in ast.walk(a) if isinstance(n, ast.Attribute)}
        if (
            (name in _WRITES and not (name in ("copy", "move") and owner != "shutil"))
            or (
                name == "open"
                and any(set(m) <= set("rwaxbt+") and set(m) & set("wax+") for m in modes)
            )
            or (name == "open" and flags & _CREATING)
            or (name == "save" and owner == "torch")
        ) and "devnull" not in flags:
            found.add(name)
    return found


def test_the_search_for_writes_finds_them() -> None:
    for code, name in (
        ("p.write_text('')", "write_text"),
        ("p.open('wb')", "open"),
        ("open(p, mode='a')", "open"),
        ("os.open(p, os.O_RDWR | os.O_CREAT)", "open"),
        ("shutil.copy(a, b)", "copy"),
        ("torch.save(x, p)", "save"),
    ):
        assert writes(ast.parse(code)) == {name}, code
    for code in (
        "p.open('rb')",
        "open(p)",
        "x.copy()",
        "os.open(p, os.O_RDONLY)",
        "gzip.open(p, 'rt')",
    ):
        assert not writes(ast.parse(code)), code


@pytest.mark.parametrize(
    "path", sorted(ROOT.rglob("*.py")), ids=lambda p: p.relative_to(ROOT).as_posix()
)
def test_files_are_created_in_one_place(path: Path) -> None:
    """`surgery.files` follows no link that somebody has planted; any other way might."""
    name = path.relative_to(ROOT).as_posix()
    assert writes(ast.parse(path.read_text())) <= _MAY_WRITE.get(name, set())


@pytest.mark.parametrize(
    "path", sorted(ROOT.rglob("*.py")), ids=lambda p: p.relative_to(ROOT).as_posix()
)
def test_folders_are_removed_in_one_place(path: Path) -> None:
    """Only a folder with our mark is removed, or a temporary one that `mkdtemp` has made."""
    used = "rmtree" in path.read_text()
    assert not used or path.relative_to(ROOT).as_posix() in (
        "storage/scratch.py",
        "checkpoint/work.py",
        "workflow/delivery.py",
    )

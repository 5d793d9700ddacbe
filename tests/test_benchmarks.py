"""Every benchmark can be started: it imports, shows its help, and names what the package has.

They run too seldom for anything else to notice that a function was renamed.
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
FILES = sorted(BENCHMARKS.glob("*.py"))


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let benchmarks import each other, as when they are started.

    Their names are free before it, since other tests import a script of an output by its name, and
    after it.
    """
    monkeypatch.syspath_prepend(BENCHMARKS)
    names = [path.stem for path in FILES]
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield
    for name in names:
        sys.modules.pop(name, None)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_it_imports_and_shows_its_help(
    path: Path,
    beside: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    module = importlib.import_module(path.stem)
    assert Path(str(module.__file__)) == path
    if "argparse" not in vars(module):
        return
    monkeypatch.setattr(sys, "argv", [path.name, "--help"])
    with pytest.raises(SystemExit) as ended:
        module.main()
    assert ended.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.startswith(f"usage: {path.name}") and f"python benchmarks/{path.name}" in shown


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_what_its_child_processes_import_is_there(path: Path) -> None:
    """The code of a child is a string, which neither mypy nor an import looks into."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            for module, names in imports(node.value):
                found = importlib.import_module(module)
                assert [n for n in names if not hasattr(found, n)] == [], f"in {module}"


def imports(code: str) -> Iterator[tuple[str, list[str]]]:
    """Yield what a text imports from the package, if it is Python."""
    if "surgery" not in code or "import" not in code:
        return
    try:
        tree = ast.parse(code)
    except SyntaxError:
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == "surgery":
            yield str(node.module), [alias.name for alias in node.names]

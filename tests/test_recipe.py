"""Recipes: what is not understood is an error that names it, never ignored."""

from __future__ import annotations

from pathlib import Path

import pytest

from surgery import recipe
from surgery.checkpoint import open_checkpoint
from surgery.demo import MODEL
from surgery.errors import SurgeryError


def write(folder: Path, text: str) -> Path:
    (folder / "r.yaml").write_text(text)
    return folder / "r.yaml"


def test_shipped_recipes_load_and_apply() -> None:
    shipped = sorted(recipe.folder().glob("*.yaml"))
    assert [p.stem for p in shipped] == ["demo-relufy", "demo-upcycle"]
    made = [recipe.apply(recipe.load(p), open_checkpoint(MODEL)) for p in shipped]
    assert [c.config["model_type"] for c in made] == ["llama", "mixtral"]
    assert made[0].config["hidden_act"] == "relu" and made[1].config["num_local_experts"] == 8


@pytest.mark.parametrize(
    ("text", "seen", "hint"),
    [
        ("operations:\n  - operation: upcycle\n    expert: 8\n", "'expert' of upcycle", "did you mean experts?"),
        ("operations:\n  - operation: upcicle\n", "'upcicle'", "upcycle"),
        ("operations: []\nseed: 3\n", "'seed'", "operations"),
        ("operations:\n  - 3\n", "operation 3", "relufy"),
        ("- upcycle\n", "no list of operations", "shipped"),
        ("operations: [", "not YAML", "mend"),
    ],
)
def test_what_is_not_understood(text: str, seen: str, hint: str, tmp_path: Path) -> None:
    with pytest.raises(SurgeryError) as caught:
        recipe.load(write(tmp_path, text))
    assert seen in caught.value.message and hint in caught.value.hint


def test_a_missing_recipe_names_the_shipped_ones(tmp_path: Path) -> None:
    with pytest.raises(SurgeryError) as caught:
        recipe.load(tmp_path / "absent.yaml")
    assert "demo-upcycle" in caught.value.hint

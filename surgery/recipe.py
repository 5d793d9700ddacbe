"""A recipe is data: a YAML file with the list of operations that make one checkpoint of another.

    operations:
      - operation: upcycle
        experts: 8

The keys of an entry are the parameters of the function of that name; a typo is an error that names the nearest one.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from surgery.checkpoint import Checkpoint
from surgery.errors import SurgeryError
from surgery.operations.cast import cast
from surgery.operations.relufy import relufy
from surgery.operations.upcycle import upcycle

OPERATIONS: dict[str, Callable[..., Checkpoint]] = {"upcycle": upcycle, "relufy": relufy, "cast": cast}


def folder() -> Path:
    """The shipped recipes: inside the package where it is installed, at the root of a checkout."""
    inside = Path(__file__).parent / "recipes"
    return inside if inside.is_dir() else Path(__file__).parent.parent / "recipes"


def load(path: Path) -> list[dict[str, Any]]:
    """The operations of a recipe file, checked. Raises SurgeryError for what is unknown in it."""
    import yaml

    try:
        recipe = yaml.safe_load(path.read_text())
    except OSError as e:
        raise SurgeryError(
            f"no recipe {path}", f"shipped: {', '.join(p.stem for p in sorted(folder().glob('*.yaml')))}"
        ) from e
    except yaml.YAMLError as e:
        raise SurgeryError(f"{path} is not YAML: {' '.join(str(e).split())}", "mend it") from e
    if not isinstance(recipe, Mapping) or not isinstance(recipe.get("operations"), Sequence):
        raise SurgeryError(f"{path} has no list of operations", "see the shipped recipes for the form")
    _check(recipe, ["operations"], str(path))
    for entry in recipe["operations"]:
        name = entry.get("operation") if isinstance(entry, Mapping) else entry
        if name not in OPERATIONS:
            raise SurgeryError(f"unknown operation {name!r} in {path}", f"one of: {', '.join(OPERATIONS)}")
        _check(entry, ["operation", *list(inspect.signature(OPERATIONS[name]).parameters)[1:]], f"{name} in {path}")
    return [dict(entry) for entry in recipe["operations"]]


def _check(entry: Mapping[str, Any], known: list[str], where: str) -> None:
    for key in entry:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, 1)
            raise SurgeryError(
                f"unknown key {key!r} of {where}", f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
            )


def apply(operations: Sequence[Mapping[str, Any]], checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint after all operations; nothing is computed yet."""
    for entry in operations:
        parameters = {k: v for k, v in entry.items() if k != "operation"}
        checkpoint = OPERATIONS[entry["operation"]](checkpoint, **parameters)
    return checkpoint

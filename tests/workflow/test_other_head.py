"""A config that ties the head to the embedding, and a file that holds another head.

transformers 5 uses the head, transformers 4 the embedding. Every operation says so, and the
verification compares what transformers 5 loads.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from operated import EVERY_OPERATION as OPERATIONS
from support import write_llama

import surgery
from surgery import operations
from surgery.checkpoint import Checkpoint
from surgery.storage import open_checkpoint
from surgery.workflow.convert import convert_alone
from surgery.workflow.record import notes_of

HEAD = "lm_head.weight"


def source(folder: Path, tied: bool) -> Checkpoint:
    write_llama(folder, layers=2)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": tied}))
    found = open_checkpoint(folder)
    assert HEAD in found.tensors
    return found


@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_operation_says_it(operation: str, tmp_path: Path) -> None:
    assert set(OPERATIONS) == set(operations.names())
    (note,) = (
        n for n in notes_of(OPERATIONS[operation](source(tmp_path / "m", True))) if HEAD in n
    )
    assert "transformers 5" in note and "transformers 4" in note
    assert not [
        n for n in notes_of(OPERATIONS[operation](source(tmp_path / "n", False))) if HEAD in n
    ]


def test_no_note_where_the_two_are_equal(tmp_path: Path) -> None:
    found = source(tmp_path / "m", True)
    equal = {**found.tensors, HEAD: found.tensors["model.embed_tokens.weight"]}
    assert not [n for n in notes_of(found.replace(tensors=equal)) if HEAD in n]


def test_the_verification_compares_with_the_head_of_the_file(tmp_path: Path) -> None:
    """Its source is as good as the same file whose config does not tie the two."""
    measured = {}
    for tied in (True, False):
        found = source(tmp_path / f"m{tied}", tied)
        output = surgery.relufy(found, repair="none")
        result = convert_alone(found, output, tmp_path / f"out{tied}")
        assert result.verification and result.verification.passed
        measured[tied] = {
            r.key: r.value for r in result.verification.rows if r.key.startswith("domain.")
        }
        card = (tmp_path / f"out{tied}" / "README.md").read_text()
        assert ("differs from" in card) == tied
    assert measured[True] == measured[False] and measured[True]

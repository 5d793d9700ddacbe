"""Tensors fetched ahead are those that would have been read.

On a CPU the thread is the same, without pinned memory and streams.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from models import sample_ids, save_model

from surgery.calibration.prefetch import Prefetch
from surgery.calibration.walk import Walk
from surgery.checkpoint import constant
from surgery.storage import open_checkpoint


def test_values_are_those_on_disk(tmp_path: Path) -> None:
    """Every tensor that was begun is taken, with its value."""
    save_model("llama", tmp_path)
    tensors = dict(open_checkpoint(tmp_path).tensors)
    ahead = Prefetch("cpu")
    ahead.start(tensors)
    taken = ahead.take(tensors)
    assert taken.keys() == tensors.keys() and ahead.coming == {}
    assert {t.recipe for t in taken.values()} == {"prefetched"}
    assert all(torch.equal(t.read(), tensors[n].read()) for n, t in taken.items())


def test_other_weights_of_the_same_name_are_not_what_was_begun(tmp_path: Path) -> None:
    """An operation may have replaced a layer's weights."""
    save_model("llama", tmp_path)
    name, tensors = "model.norm.weight", open_checkpoint(tmp_path).tensors
    ahead, other = Prefetch("cpu"), constant(0.0, (32,), "F32")
    ahead.start({name: tensors[name], "computed": other})
    assert ahead.take({name: other})[name] is other and "computed" not in ahead.coming


def test_an_error_of_reading_comes_with_the_tensor(tmp_path: Path) -> None:
    """It is raised where the tensor is taken, not lost in the thread."""
    save_model("llama", tmp_path)
    tensors = dict(open_checkpoint(tmp_path).tensors)
    ahead = Prefetch("cpu")
    (tmp_path / "model.safetensors").unlink()
    ahead.start(tensors)
    with pytest.raises(FileNotFoundError):
        ahead.take(tensors)


def test_a_walk_that_fetches_ahead_computes_the_same(tmp_path: Path) -> None:
    """Bit for bit."""
    save_model("llama", tmp_path)
    found = []
    for ahead in (None, Prefetch("cpu")):
        walk = Walk(open_checkpoint(tmp_path), sample_ids())
        walk.ahead = ahead
        for layer in walk:
            layer.run()
        found.append(list(walk.hidden))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))

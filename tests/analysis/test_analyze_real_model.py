"""The figures of a real model are those that hooks on the whole of it give.

Run with SURGERY_REAL_MODEL=FOLDER pytest -m slow, for a model whose MLP is that of llama. The whole
model is in memory, in fp32.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from models import load

from surgery.analysis.analyze import analyze
from surgery.calibration.data import sample_ids
from surgery.storage import open_checkpoint

LENGTH = 256
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


def test_figures_are_those_of_the_whole_model() -> None:
    """A trained model has outliers and near zeros that a random one lacks."""
    named = os.environ.get("SURGERY_REAL_MODEL")
    if not named:
        pytest.skip("SURGERY_REAL_MODEL names no folder")
    folder = Path(named)
    checkpoint = open_checkpoint(folder)
    sample = sample_ids(checkpoint, tokens=512, sequence_length=LENGTH)
    layers = analyze(checkpoint, sample).layers
    model, _ = load(folder)
    checked = []

    def check(index: int, mlp: Any) -> Any:
        def hook(module: Any, inputs: Any, output: Any) -> None:
            x = inputs[0][:, 1:].flatten(0, 1)
            gate, up = mlp.gate_proj(x), mlp.up_proj(x)
            compare(layers[index].mlp, gate, mlp.act_fn(gate) * up, mlp.down_proj.weight)
            checked.append(index)

        return hook

    for index, layer in enumerate(model.model.layers):
        layer.mlp.register_forward_hook(check(index, layer.mlp))
    with torch.no_grad():
        model(sample.input_ids)
    assert checked == list(range(len(layers))) != []


def compare(m: Any, gate: torch.Tensor, h: torch.Tensor, down: torch.Tensor) -> None:
    """Compare the figures of one MLP with its activations.

    Counts may differ by the few values that rounding in another batch size moves across zero; the
    rest agrees to the precision of fp32.
    """
    n = gate.numel()
    assert m.tokens == len(gate) and m.product.total == n
    assert (m.active - (gate > 0).sum(0)).abs().sum() <= 1e-5 * n
    assert m.product.zeros == pytest.approx(int((h == 0).sum()), abs=1e-5 * n)
    mass = h.abs().double().mean(0) * down.double().norm(dim=0)
    torch.testing.assert_close(m.mass, mass, rtol=1e-3, atol=1e-7)
    seen = h.view(-1, LENGTH - 1, h.shape[1])[:, ::4]  # what the histogram takes
    for t in (0.65, 0.9):
        assert (seen.abs() < m.product.threshold(t)).double().mean() == pytest.approx(t, abs=0.01)
    for t in m.truncations:
        inactive = h.abs() * down.norm(dim=0) < t.threshold
        error = (((h * inactive) @ down.T).norm(dim=1) / (h @ down.T).norm(dim=1)).mean().item()
        assert t.sparsity == pytest.approx(inactive.double().mean().item(), abs=1e-3)
        assert t.cett == pytest.approx(error, rel=1e-2)

"""Reconstruct an MLP: a short optimisation of gate, up and down together against the layer's
targets (repair.py).

Adam on the weighted squared error, in the space where the inputs are white (W L with L Lᵀ = E[z
zᵀ]): there a step is as long in every direction that the inputs have, and eighty steps do what
hundreds do in the plain one. The threshold follows the wanted sparsity of the batch, so that the
optimisation cannot buy accuracy with zeros. Without a threshold (ReLU) the gate stays, for the same
reason. A ridge refit of `down` comes before and after.

Shapes: n rows of a batch, H hidden_size, F intermediate_size.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from surgery.fitting.repair import Neurons, Rows, error, quantiles, ridge, whitening

STEPS, BATCH, LR = 80, 2048, 3e-2  # the learning rate is of the root mean square of each matrix
WARM_UP = 10  # steps
MEMORY = 0.9  # of the thresholds of earlier batches


def reconstruct(
    neurons: Neurons,
    rows: Rows,
    *,
    sparsity: float | None,
    per_neuron: bool,
    bias: bool,
    biases: bool = False,
    rank: int = 0,
    steps: int = STEPS,
    seed: int = 0,
) -> Neurons:
    """`neurons` optimised on the rows that may be fitted on, or refitted alone where that is better
    on the others.

    `bias`: a correction of the output can be kept; `biases`: those of gate and up as well; `rank`:
    of a bypass.
    """
    first = ridge(neurons, rows, bias=bias, rank=rank)
    white, coloured = whitening(rows)
    start = dataclasses.replace(
        first, gate=None if first.gate is None else first.gate @ coloured, up=first.up @ coloured
    )
    if biases:
        start = dataclasses.replace(
            start, gate_bias=torch.zeros(len(start.up)), up_bias=torch.zeros(len(start.up))
        )
    trained = _optimise(start, rows, white, sparsity, per_neuron, steps, seed)
    gate = None if trained.gate is None else trained.gate @ white
    trained = dataclasses.replace(
        trained, gate=gate if neurons.threshold is not None else neurons.gate, up=trained.up @ white
    )
    last = ridge(trained, rows, bias=bias, rank=rank)
    return min((first, last), key=lambda n: error(n, rows, rows.fitted))


def _optimise(
    neurons: Neurons,
    rows: Rows,
    white: Tensor,
    sparsity: float | None,
    per_neuron: bool,
    steps: int,
    seed: int,
) -> Neurons:
    """Adam on what of `neurons`, in white space, may change."""
    changes = ["up", "down", "up_bias", "correction"]
    changes += ["gate", "gate_bias"] if neurons.threshold is not None else []
    masters = {
        n: t.detach().clone().requires_grad_()
        for n in changes
        if (t := getattr(neurons, n)) is not None
    }
    scale = (
        sum(
            (y.square().mean(1) * (1 if w is None else w)).sum().item()
            for _, y, w in rows.parts(0, rows.fitted)
        )
        / rows.fitted
    )
    optimiser = torch.optim.Adam(
        [{"params": [p], "lr": LR * _size(n, p, rows)} for n, p in masters.items()],
        betas=(0.9, 0.95),
    )
    rates = [group["lr"] for group in optimiser.param_groups]
    for step, batch in zip(range(steps), _batches(rows.fitted, seed), strict=False):
        factor = min(1.0, (step + 1) / WARM_UP) * (
            0.02 + 0.49 * (1 + math.cos(math.pi * step / steps))
        )
        for group, rate in zip(optimiser.param_groups, rates, strict=True):
            group["lr"] = rate * factor
        with torch.enable_grad():
            working = dataclasses.replace(neurons, **masters)
            gate, up = _open(working, rows.z[batch], white)
            if sparsity is not None:
                neurons = working = _follow(working, neurons, gate, up, sparsity, per_neuron, step)
            h = working.multiply(gate, up)
            y = (h @ working.down.to(h.dtype).T).float()
            if working.bypass_out is not None:  # stays as it was fitted
                y = y + torch.nn.functional.linear(
                    working.bypassed(rows.z[batch].float()), working.bypass_out
                )
            missed = (
                (
                    y
                    + (0 if working.correction is None else working.correction)
                    - rows.y[batch].float()
                )
                .square()
                .mean(1)
            )
            loss = (missed if rows.weight is None else missed * rows.weight[batch]).mean() / scale
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return dataclasses.replace(neurons, **{n: p.detach() for n, p in masters.items()})


def _size(name: str, p: Tensor, rows: Rows) -> float:
    """The scale that a parameter's learning rate is relative to."""
    if name == "correction":
        return 0.5 * rows.y[:: max(1, len(rows.y) // 4096)].float().square().mean().sqrt().item()
    return 0.5 if name.endswith("bias") else p.detach().square().mean().sqrt().item()


def _batches(count: int, seed: int) -> Iterator[Tensor]:
    """Rows of every batch: permutations without end."""
    generator = torch.Generator().manual_seed(seed)
    size = min(BATCH, count)
    while True:
        order = torch.randperm(count, generator=generator)
        for i in range(0, count - size + 1, size):
            yield order[i : i + size]


def _open(neurons: Neurons, z: Tensor, white: Tensor) -> tuple[Tensor, Tensor]:
    """Gate and up of inputs in the walk's dtype, which is the fast one; the masters are fp32."""
    dtype = z.dtype
    x = z @ white.to(dtype)

    def project(weight: Tensor, bias: Tensor | None) -> Tensor:
        return torch.nn.functional.linear(
            x, weight.to(dtype), None if bias is None else bias.to(dtype)
        )

    up = project(neurons.up, neurons.up_bias)
    return (up if neurons.gate is None else project(neurons.gate, neurons.gate_bias)), up


@torch.no_grad()
def _follow(
    working: Neurons,
    before: Neurons,
    gate: Tensor,
    up: Tensor,
    sparsity: float,
    per_neuron: bool,
    step: int,
) -> Neurons:
    """`working` with thresholds that move towards those of this batch."""
    keep = 0.0 if step < 5 else MEMORY
    found = quantiles(working, gate.float(), up.float(), sparsity, per_neuron)
    moved = {n: keep * getattr(before, n) + (1 - keep) * t for n, t in found.items()}
    return dataclasses.replace(working, **moved)

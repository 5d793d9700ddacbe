"""Reconstruct an MLP: a short optimisation of gate, up and down together, towards the layer's
targets (rows.py).

Adam minimises the weighted squared error, in the space where the inputs are white (W L with
L Lᵀ = E[z zᵀ]). A step there is as long in every direction that the inputs have, and eighty steps
do what hundreds do in the plain space. The threshold follows the wanted sparsity of the batch, so
that the optimisation cannot buy accuracy by keeping fewer zeros. Without a threshold (ReLU) the
gate stays as it is, for the same reason. A ridge refit of `down` comes before and after.

Shapes: n rows of a batch, H hidden_size, F intermediate_size.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from surgery.fitting.measures import error
from surgery.fitting.neurons import Neurons
from surgery.fitting.ridge import ridge, whitening
from surgery.fitting.rows import Rows
from surgery.fitting.thresholds import quantiles

STEPS, BATCH, LR = 80, 2048, 3e-2  # the learning rate is of the root mean square of each matrix
WARM_UP = 10  # steps over which the learning rate rises
SETTLING = 5  # first steps, whose batches set the thresholds by themselves
MEMORY = 0.9  # weight of the thresholds of earlier batches after that


@dataclass(frozen=True, kw_only=True, slots=True)
class Reconstruction:
    """Options of a reconstruction.

    Args:
        sparsity: the fraction of zeros that the thresholds are kept at; None keeps the thresholds.
        per_neuron: whether each neuron has a threshold of its own.
        bias: whether a correction of the output can be kept.
        biases: whether biases of gate and up can be kept as well.
        rank: that of the bypass.
        steps: how many steps Adam takes.
        seed: what the batches are drawn with.
    """

    sparsity: float | None = None
    per_neuron: bool = False
    bias: bool = False
    biases: bool = False
    rank: int = 0
    steps: int = STEPS
    seed: int = 0


def reconstruct(neurons: Neurons, rows: Rows, options: Reconstruction) -> Neurons:
    """Return `neurons` optimised on the rows that are fitted on.

    If a ridge refit alone is better on the rows that are held out, that is returned.
    """
    first = ridge(neurons, rows, bias=options.bias, rank=options.rank)
    white, coloured = whitening(rows)
    start = dataclasses.replace(
        first, gate=None if first.gate is None else first.gate @ coloured, up=first.up @ coloured
    )
    if options.biases:
        start = dataclasses.replace(
            start, gate_bias=torch.zeros(len(start.up)), up_bias=torch.zeros(len(start.up))
        )
    trained = _optimise(start, rows, white, options)
    gate = None if trained.gate is None else trained.gate @ white
    trained = dataclasses.replace(
        trained, gate=gate if neurons.threshold is not None else neurons.gate, up=trained.up @ white
    )
    last = ridge(trained, rows, bias=options.bias, rank=options.rank)
    return min((first, last), key=lambda n: error(n, rows, rows.fitted))


def _optimise(neurons: Neurons, rows: Rows, white: Tensor, options: Reconstruction) -> Neurons:
    """Return `neurons`, in white space, after Adam on those of its tensors that may change."""
    masters = _masters(neurons)
    scale = _mean_square(rows)
    optimiser = torch.optim.Adam(
        [{"params": [p], "lr": LR * _size(n, p, rows)} for n, p in masters.items()],
        betas=(0.9, 0.95),
    )
    rates = [group["lr"] for group in optimiser.param_groups]
    batches = _batches(rows.fitted, options.seed)
    for step, batch in zip(range(options.steps), batches, strict=False):
        for group, rate in zip(optimiser.param_groups, rates, strict=True):
            group["lr"] = rate * _schedule(step, options.steps)
        with torch.enable_grad():
            working = dataclasses.replace(neurons, **masters)
            gate, up = _open(working, rows.z[batch], white)
            if options.sparsity is not None:
                neurons = working = _follow(working, neurons, (gate, up), options, step)
            loss = _missed(working, rows, batch, working.multiply(gate, up)).mean() / scale
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return dataclasses.replace(neurons, **{n: p.detach() for n, p in masters.items()})


def _masters(neurons: Neurons) -> dict[str, Tensor]:
    """Return copies of the tensors that may change, by name, for Adam to update."""
    changes = ["up", "down", "up_bias", "correction"]
    changes += ["gate", "gate_bias"] if neurons.threshold is not None else []
    return {
        n: t.detach().clone().requires_grad_()
        for n in changes
        if (t := getattr(neurons, n)) is not None
    }


def _mean_square(rows: Rows) -> float:
    """Return the weighted mean square of the targets that are fitted to."""
    total = sum(
        (y.square().mean(1) * (1 if w is None else w)).sum().item()
        for _, y, w in rows.parts(0, rows.fitted)
    )
    return total / rows.fitted


def _schedule(step: int, steps: int) -> float:
    """Return the factor of the learning rate: a linear rise, times a cosine that ends at 0.02."""
    return min(1.0, (step + 1) / WARM_UP) * (0.02 + 0.49 * (1 + math.cos(math.pi * step / steps)))


def _missed(working: Neurons, rows: Rows, batch: Tensor, h: Tensor) -> Tensor:
    """Return the weighted squared error [n] of the products h [n, F] of a batch of rows."""
    y = (h @ working.down.to(h.dtype).T).float()
    if working.bypass_out is not None:  # stays as it was fitted
        y = y + torch.nn.functional.linear(
            working.bypassed(rows.z[batch].float()), working.bypass_out
        )
    correction = 0 if working.correction is None else working.correction
    missed = (y + correction - rows.y[batch].float()).square().mean(1)
    return missed if rows.weight is None else missed * rows.weight[batch]


def _size(name: str, p: Tensor, rows: Rows) -> float:
    """Return the scale that a parameter's learning rate is relative to."""
    if name == "correction":
        return 0.5 * rows.y[:: max(1, len(rows.y) // 4096)].float().square().mean().sqrt().item()
    return 0.5 if name.endswith("bias") else p.detach().square().mean().sqrt().item()


def _batches(count: int, seed: int) -> Iterator[Tensor]:
    """Yield the rows of every batch, from one permutation after another, without end."""
    generator = torch.Generator().manual_seed(seed)
    size = min(BATCH, count)
    while True:
        order = torch.randperm(count, generator=generator)
        for i in range(0, count - size + 1, size):
            yield order[i : i + size]


def _open(neurons: Neurons, z: Tensor, white: Tensor) -> tuple[Tensor, Tensor]:
    """Return gate and up [n, F] of inputs, in the walk's dtype.

    That dtype is the fast one; the masters stay in fp32.
    """
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
    opened: tuple[Tensor, Tensor],
    options: Reconstruction,
    step: int,
) -> Neurons:
    """Return `working` with the thresholds of `before`, moved towards those of this batch.

    `opened` are gate and up [n, F] of the batch.
    """
    assert options.sparsity is not None
    gate, up = (t.float() for t in opened)
    found = quantiles(working, gate, up, options.sparsity, options.per_neuron)
    keep = 0.0 if step < SETTLING else MEMORY
    moved = {n: keep * getattr(before, n) + (1 - keep) * t for n, t in found.items()}
    return dataclasses.replace(working, **moved)

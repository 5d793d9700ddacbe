"""Make all neurons of an MLP the slots of a memory, which a token finds by product keys, fitted to
the rows of a layer (rows.py).

The score of a slot is that of its row plus that of its column in a square grid, so it matters which
neurons share a row or a column.

1. The neurons begin in the order of their mean mass, (h_i ‖down_i‖)² as a share of the token's.
2. Query and keys learn which slots hold most mass on a token, by the loss of a carved router
   (carved_mlp.py).
3. Column by column and row by row, the neurons are put where most of their mass is read. Steps 2
   and 3 take turns.
4. `down` is refitted to the products that are read. A refit that is worse on rows that it was not
   fitted on is dropped.

Shapes: N rows, H hidden_size, F intermediate_size, n keys of a half, n² ≥ F slots, of which those
beyond F are empty.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from surgery.blocks.memory_mlp import Memory
from surgery.checkpoint.tensors import DTYPES
from surgery.families import Mlp
from surgery.fitting.carved_mlp import descend, spread
from surgery.fitting.measures import error
from surgery.fitting.memory_init import MASSES, PLACED
from surgery.fitting.neurons import Neurons
from surgery.fitting.partition import balanced
from surgery.fitting.ridge import ridge
from surgery.fitting.rows import CHUNK, Rows

DAMPING = 0.1  # of the refit
ROUNDS, STEPS = 6, 200  # of learning and placing


@dataclass(kw_only=True)
class Found(Neurons):
    """Hold the neurons in their order, with the `slot` [F] of each.

    `memory` chooses which slots are read.
    """

    memory: Memory
    slot: Tensor

    def read(self, z: Tensor) -> Tensor:
        """Return 1.0 for the neurons that inputs z [N, H] read, else 0, [N, F]."""
        return _read(self.memory, z)[:, self.slot]

    def product(self, z: Tensor) -> Tensor:
        """Return the products h [N, F] of inputs [N, H], zero where a neuron is not read."""
        return super().product(z) * self.read(z)


def fit(
    mlp: Mlp, act: str, rows: Rows, entry: Mapping[str, Any], seed: int
) -> tuple[dict[str, Any], dict[str, float]]:
    """Return what a layer's memory starts as, and figures on rows that were not fitted on.

    The tensors are by path in the memory, and those of the table are "table.up" and so on.
    """
    whole = Neurons.of(mlp, rule="plain", act=act, device=str(rows.z.device))
    memory, slot = search(whole, rows, entry, seed)
    memory.to(getattr(torch, DTYPES[mlp.down.dtype][1])).float()  # as it will be on the disk
    values: dict[str, Any] = {f.name: getattr(whole, f.name) for f in dataclasses.fields(whole)}
    found = Found(**values, memory=memory, slot=slot)
    refitted = ridge(found, rows, damping=DAMPING, bias=True)
    before, after = (error(n, rows, rows.fitted) for n in (found, refitted))
    mass = read = 0.0
    for z, _, _ in rows.parts(rows.fitted):
        share = whole.shares(z)
        mass, read = mass + share.sum().item(), read + (share * found.read(z)).sum().item()
    best = refitted if after <= before else found
    state = dict(memory.named_parameters()) | {"scale": torch.zeros(1), "bias": _bias(best)}
    table = {f"table.{part}": value for part, value in _table(best, slot, entry, seed).items()}
    return state | table, {
        "without refit": before,
        "error": min(before, after),
        "mass_read": read / max(mass, 1e-30),
    }


def _bias(neurons: Neurons) -> Tensor:
    """Return what is added to the stream whichever slots are read, [H]."""
    found = neurons.down.new_zeros(len(neurons.down))
    for t in (neurons.down_bias, neurons.correction):
        found = found if t is None else found + t
    return found


def _table(
    neurons: Neurons, slot: Tensor, entry: Mapping[str, Any], seed: int
) -> dict[str, Tensor]:
    """Return the table, with the neurons at their slots.

    In empty slots gate and up are drawn, and everything else is zero.
    """
    draw, found = torch.Generator().manual_seed(seed), {}
    for part in entry["parts"]:
        value = neurons.down.T if part == "down" else getattr(neurons, part)
        rows = torch.zeros(entry["keys"] ** 2, *value.shape[1:])
        if part in ("gate", "up"):
            rows = torch.randn(rows.shape, generator=draw) * rows.shape[1] ** -0.5
        rows = rows.to(value.device)
        rows[slot] = value
        found[part] = rows
    return found


# --- what finds them, and where they are ----------------------------------------------------------


def search(
    neurons: Neurons, rows: Rows, entry: Mapping[str, Any], seed: int
) -> tuple[Memory, Tensor]:
    """Return a memory that finds the neurons with most mass, and the slot [F] of each neuron."""
    n, width, device = entry["keys"], len(neurons.up), rows.z.device
    memory, draw = _begun(entry, rows.z.shape[1], seed), torch.Generator().manual_seed(seed)
    memory.to(device)
    z = rows.z[: rows.fitted : max(1, rows.fitted * n * n // MASSES)].float()
    mean, std = spread(z)
    first = z[:0] if rows.first is None else rows.first.z.float()
    counts, z = (len(z), len(first)), torch.cat([z, first])
    mass = torch.cat(
        [F.pad(neurons.shares(part), (0, n * n - width)).bfloat16() for part in z.split(CHUNK)]
    )
    z = (z - mean) / std
    # The number of the neuron that stands in each cell.
    grid = mass.mean(0, dtype=torch.float32).argsort(descending=True, stable=True).view(n, n)
    if entry["knn"] < n * n:
        some = slice(None, None, max(1, len(z) * n * n // PLACED))
        border = torch.cat([_border(part.float(), entry["knn"]) for part in mass.split(CHUNK)])
        lesson = _Lesson(z=z, counts=counts, mass=mass, border=border)
        for i in range(ROUNDS):
            _learn(memory, lesson, grid.flatten(), draw)
            if i < ROUNDS - 1:
                read = torch.cat([_read(memory, part) for part in z[some].split(CHUNK)])
                grid = place(grid, mass[some].float(), read.unflatten(1, (n, n)))
    memory.query.weight /= std
    memory.query.bias -= memory.query.weight @ mean
    return memory, grid.flatten().argsort()[:width]


def place(grid: Tensor, mass: Tensor, read: Tensor) -> Tensor:
    """Return the `grid` [n, n] of neurons with each column, and then each row, reordered.

    The new order is the one that puts most of the neurons' mass [N, n²] into cells that are `read`
    [N, n, n].
    """
    grid = grid.clone()
    for dim in (1, 0):
        for line, cells in enumerate(read.unbind(dim + 1)):
            who = grid.select(dim, line).clone()
            to = balanced(-(mass[:, who].T @ cells)).to(grid.device)
            grid.select(dim, line)[to] = who
    return grid


def _begun(entry: Mapping[str, Any], hidden: int, seed: int) -> Memory:
    """Return a memory with a random query, and keys that hardly prefer one slot to another."""
    memory = Memory(dict(entry), hidden).requires_grad_(False)
    draw = torch.Generator().manual_seed(seed)
    for p, size in (
        (memory.query.weight, hidden**-0.5),
        (memory.query.bias, 0.0),
        (memory.keys, 0.1 * memory.keys.shape[3] ** -0.5),
    ):
        p.copy_(size * torch.randn(p.shape, generator=draw))
    return memory


def _border(mass: Tensor, knn: int) -> Tensor:
    """Return the mass [N, 1] above which a neuron is to be read."""
    return mass.topk(knn + 1, dim=1).values[:, -2:].mean(1, keepdim=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Lesson:
    """Hold what query and keys learn from.

    `z` [N, H] are inputs of mean 0 and variance 1, `mass` [N, n²] that of each neuron on them, and
    `border` [N, 1] the mass above which a neuron is to be read; `counts` as in `descend`.
    """

    z: Tensor
    counts: tuple[int, int]
    mass: Tensor
    border: Tensor


def _learn(memory: Memory, lesson: _Lesson, order: Tensor, draw: torch.Generator) -> None:
    """Train query and keys by the cross-entropy of which slots hold more mass than the border.

    Each slot is weighted by how far its mass is from the border. `order` [n²] says which column of
    the mass stands in each slot.
    """
    z = lesson.z

    def loss(some: Tensor) -> Tensor:
        some = some.to(z.device)
        over = lesson.mass[some][:, order].float() - lesson.border[some]
        halves = torch.einsum(
            "Nsd,snd->Nsn", memory.query(z[some]).unflatten(1, (2, -1)), memory.keys[0]
        )
        scores = (halves[:, 0, :, None] + halves[:, 1, None, :]).flatten(1)
        return F.binary_cross_entropy_with_logits(
            scores, (over > 0).float(), over.abs() / over.abs().mean()
        )

    learned = [memory.query.weight, memory.query.bias, memory.keys]
    descend(learned, loss, lesson.counts, STEPS, draw)


def _read(memory: Memory, z: Tensor) -> Tensor:
    """Return 1.0 for the slots that inputs z [N, H] read, else 0, [N, n²]."""
    slots, _ = memory._find(z)
    return z.new_zeros(len(z), memory.keys_of_half**2).scatter_(1, slots.flatten(1), 1.0)

"""All neurons of an MLP as slots that a token finds by product keys, fitted to the rows of a layer
(repair.py).

A score is a row's plus a column's of a square grid, so it matters which neurons share them. They
begin in the order of their mean mass, (h_i ‖down_i‖)² as a share of the token's. In turn, query and
keys learn which slots hold most mass on a token, by the loss of a carved router (carving.py); then,
column by column and row by row, the neurons are put where most of their mass is read. Last, `down`
is refitted to the products that are read; a refit that is worse on rows that it was not fitted on
is dropped.

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
from surgery.fitting import repair
from surgery.fitting.carved_mlp import descend, spread
from surgery.fitting.memory_init import MASSES, PLACED
from surgery.fitting.partition import balanced
from surgery.fitting.repair import Neurons, Rows

DAMPING = 0.1  # of the refit
ROUNDS, STEPS = 6, 200  # of learning and placing


@dataclass(kw_only=True)
class Found(Neurons):
    """Neurons in their order; `slot` [F] is where each stands, `memory` says which are read."""

    memory: Memory
    slot: Tensor

    def read(self, z: Tensor) -> Tensor:
        """1.0 for the neurons that inputs z [N, H] read, [N, F]."""
        return _read(self.memory, z)[:, self.slot]

    def product(self, z: Tensor) -> Tensor:
        """h [N, F] of inputs [N, H], zero where a neuron is not read."""
        return super().product(z) * self.read(z)


def fit(
    mlp: Mlp, act: str, rows: Rows, entry: Mapping[str, Any], seed: int
) -> tuple[dict[str, Any], dict[str, float]]:
    """What a layer's memory starts as, by path, its table as "table.up" and so on; and figures on
    rows that were not fitted on.
    """
    whole = Neurons.of(mlp, rule="plain", act=act, device=str(rows.z.device))
    memory, slot = search(whole, rows, entry, seed)
    memory.to(getattr(torch, DTYPES[mlp.down.dtype][1])).float()  # as it will be on the disk
    values: dict[str, Any] = {f.name: getattr(whole, f.name) for f in dataclasses.fields(whole)}
    found = Found(**values, memory=memory, slot=slot)
    refitted = repair.ridge(found, rows, damping=DAMPING, bias=True)
    before, after = (repair.error(n, rows, rows.fitted) for n in (found, refitted))
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
    """What is added to the stream whatever is read [H]."""
    found = neurons.down.new_zeros(len(neurons.down))
    for t in (neurons.down_bias, neurons.correction):
        found = found if t is None else found + t
    return found


def _table(
    neurons: Neurons, slot: Tensor, entry: Mapping[str, Any], seed: int
) -> dict[str, Tensor]:
    """Neurons at their slots; gate and up of the others are drawn, and the rest of them is zero."""
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
    """A memory whose query and keys find the neurons with most mass, and the slot [F] of each
    neuron.
    """
    n, width, device = entry["keys"], len(neurons.up), rows.z.device
    memory, draw = _begun(entry, rows.z.shape[1], seed), torch.Generator().manual_seed(seed)
    memory.to(device)
    z = rows.z[: rows.fitted : max(1, rows.fitted * n * n // MASSES)].float()
    mean, std = spread(z)
    first = z[:0] if rows.first is None else rows.first.z.float()
    counts, z = (len(z), len(first)), torch.cat([z, first])
    mass = torch.cat(
        [
            F.pad(neurons.shares(part), (0, n * n - width)).bfloat16()
            for part in z.split(repair.CHUNK)
        ]
    )
    z = (z - mean) / std
    grid = (
        mass.mean(0, dtype=torch.float32).argsort(descending=True, stable=True).view(n, n)
    )  # who stands there
    if entry["knn"] < n * n:
        some = slice(None, None, max(1, len(z) * n * n // PLACED))
        border = torch.cat(
            [_border(part.float(), entry["knn"]) for part in mass.split(repair.CHUNK)]
        )
        for i in range(ROUNDS):
            _learn(memory, z, counts, mass, border, grid.flatten(), draw)
            if i < ROUNDS - 1:
                read = torch.cat([_read(memory, part) for part in z[some].split(repair.CHUNK)])
                grid = place(grid, mass[some].float(), read.unflatten(1, (n, n)))
    memory.query.weight /= std
    memory.query.bias -= memory.query.weight @ mean
    return memory, grid.flatten().argsort()[:width]


def place(grid: Tensor, mass: Tensor, read: Tensor) -> Tensor:
    """`grid` [n, n] of neurons, each column's and then each row's put in the order in which most of
    their mass [N, n²] is in the cells that are `read` [N, n, n]."""
    grid = grid.clone()
    for dim in (1, 0):
        for line, cells in enumerate(read.unbind(dim + 1)):
            who = grid.select(dim, line).clone()
            to = balanced(-(mass[:, who].T @ cells)).to(grid.device)
            grid.select(dim, line)[to] = who
    return grid


def _begun(entry: Mapping[str, Any], hidden: int, seed: int) -> Memory:
    """A memory with a query of its own, and keys that hardly prefer a slot."""
    memory, draw = (
        Memory(dict(entry), hidden).requires_grad_(False),
        torch.Generator().manual_seed(seed),
    )
    for p, size in (
        (memory.query.weight, hidden**-0.5),
        (memory.query.bias, 0.0),
        (memory.keys, 0.1 * memory.keys.shape[3] ** -0.5),
    ):
        p.copy_(size * torch.randn(p.shape, generator=draw))
    return memory


def _border(mass: Tensor, knn: int) -> Tensor:
    """The mass [N, 1] above which a neuron is to be read."""
    return mass.topk(knn + 1, dim=1).values[:, -2:].mean(1, keepdim=True)


def _learn(
    memory: Memory,
    z: Tensor,
    counts: tuple[int, int],
    mass: Tensor,
    border: Tensor,
    order: Tensor,
    draw: torch.Generator,
) -> None:
    """Cross-entropy of which slots hold more mass than `border` [N, 1], weighted by how far each is
    from it; `counts` as in `descend`. `order` [n²] says which column of `mass` [N, n²] stands in
    each slot."""

    def loss(some: Tensor) -> Tensor:
        some = some.to(z.device)
        over = mass[some][:, order].float() - border[some]
        halves = torch.einsum(
            "Nsd,snd->Nsn", memory.query(z[some]).unflatten(1, (2, -1)), memory.keys[0]
        )
        scores = (halves[:, 0, :, None] + halves[:, 1, None, :]).flatten(1)
        return F.binary_cross_entropy_with_logits(
            scores, (over > 0).float(), over.abs() / over.abs().mean()
        )

    descend([memory.query.weight, memory.query.bias, memory.keys], loss, counts, STEPS, draw)


def _read(memory: Memory, z: Tensor) -> Tensor:
    """1.0 for the slots that inputs z [N, H] read, [N, n²]."""
    slots, _ = memory._find(z)
    return z.new_zeros(len(z), memory.keys_of_half**2).scatter_(1, slots.flatten(1), 1.0)

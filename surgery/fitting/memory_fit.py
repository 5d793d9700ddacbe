"""Fit a memory in the place of an MLP to the rows of a layer (rows.py).

What stands in the MLP's place, before anything is looked up, depends on the init:

*slots*: neurons of the MLP itself. They are slots too (Geva et al. 2021, arXiv 2012.14913), whose
keys are gate and up and whose value v is the column of down. Those that write most, by Σ h²·‖v‖²,
are kept and always read; their values are refitted by ridge regression that shrinks to what they
were.

*fit*: an affine map, by ridge regression.

What these still miss of the targets is looked up. A head's query is the whitened input in its first
principal directions, rotated at random. The keys of a half are the k-means of the queries. How near
a key is, q·k - ‖k‖²/2 says; its last term is one more dimension, in which every query is 1. The
values are the ridge regression of what is missed on the softmax weights of the slots that are read.
A memory that does not help on rows that it was not fitted on starts empty.

Shapes: N rows, H hidden_size, F intermediate_size, S slots.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from surgery.blocks.memory_mlp import Memory
from surgery.checkpoint.tensors import DTYPES
from surgery.families import Mlp
from surgery.fitting.neurons import Neurons
from surgery.fitting.reconstruct import Reconstruction, reconstruct
from surgery.fitting.ridge import ridge, solve
from surgery.fitting.rows import Rows

DAMPING, AFFINE_DAMPING, VALUE_DAMPING = 0.1, 0.1, 3.0
ROUNDS, KMEANS_ROWS = 12, 16_384
PAIRED = 512  # rows whose pairs of slots are added up at a time


def fit(
    mlp: Mlp, act: str, rows: Rows, entry: Mapping[str, Any], seed: int, distill: int = 0
) -> tuple[dict[str, Any], dict[str, float]]:
    """Return what a layer's memory starts as, and the figures of the layer.

    The tensors are by path in the memory, those of kept neurons by part, and the table is
    "table.weight". `distill` is the number of steps of Adam on the kept neurons (reconstruct.py).
    """
    whole = Neurons.of(mlp, rule="plain", act=act, device=str(rows.z.device))
    if entry["width"]:
        kept = best(whole, rows, entry["width"])
        if distill:
            # A threshold lets the gate move; this one cuts nothing.
            kept.threshold = torch.zeros(1, device=rows.z.device)
            kept = reconstruct(kept, rows, Reconstruction(bias=True, steps=distill, seed=seed))
        else:
            kept = ridge(kept, rows, damping=DAMPING, bias=True)
        found = {
            part: value
            for part in ("gate", "up", "down", "gate_bias", "up_bias", "down_bias")
            if (value := getattr(kept, part)) is not None
        }
        found["bias"] = kept.correction
        rest = missed(rows, kept)
    else:
        weight, bias = affine(rows)
        found = {"bypass.weight": weight, "bypass.bias": bias}
        rest = missed(rows, lambda z: F.linear(z, weight, bias))
    memory = keys(rows.z[: rows.fitted].float(), entry, seed)
    # Round the keys as they will be on the disk: the values are fitted to those.
    memory.to(getattr(torch, DTYPES[mlp.down.dtype][1])).float()
    table = values(memory, rest)
    with_table = missed(rest, lambda z: look_up(memory, table, z))
    before, after = (size(r, rest.fitted) / size(rows, rest.fitted) for r in (rest, with_table))
    if after > before:
        table = torch.zeros_like(table)
    found |= {
        "query.weight": memory.query.weight,
        "query.bias": memory.query.bias,
        "keys": memory.keys,
        "table.weight": table,
    }
    return found, {"without memory": before, "error": min(before, after)}


def best(neurons: Neurons, rows: Rows, width: int) -> Neurons:
    """Return the `width` neurons that write most, in the order that they have."""
    energy = torch.zeros(len(neurons.up), device=rows.z.device)
    for z, _, weight in rows.fitting():
        h = neurons.product(z).square()
        energy += (h if weight is None else h * weight[:, None]).sum(0)
    chosen = (energy * neurons.down.square().sum(0)).topk(width).indices.sort().values
    return neurons.pick(chosen)


def affine(rows: Rows) -> tuple[Tensor, Tensor]:
    """Return the weight [H, H] and the bias [H] of the ridge regression of y on z."""
    hidden = rows.z.shape[1]

    def sums(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        gram = torch.zeros(hidden + 1, hidden + 1, dtype=dtype, device=rows.z.device)
        cross = torch.zeros(hidden, hidden + 1, dtype=dtype, device=rows.z.device)
        for z, y, weight in rows.fitting():
            x = F.pad(z, (0, 1), value=1.0).to(dtype)
            weighted = x if weight is None else x * weight[:, None]
            gram.addmm_(weighted.T, x)
            cross.addmm_(y.to(dtype).T, weighted)
        return gram, cross

    solved = solve(sums, AFFINE_DAMPING)
    return solved[:, :-1].contiguous(), solved[:, -1].contiguous()


def missed(rows: Rows, function: Any) -> Rows:
    """Return the rows with what `function` of z misses of y as their targets."""
    y = torch.cat([y - function(z) for z, y, _ in rows.parts()])
    return Rows(
        z=rows.z, y=y, weight=rows.weight, first=rows.first and missed(rows.first, function)
    )


def size(rows: Rows, start: int = 0) -> float:
    """Return the weighted sum of squares of y, from row `start` on."""
    total = 0.0
    for _, y, weight in rows.parts(start):
        total += (
            (y.square() if weight is None else y.square() * weight[:, None])
            .sum(dtype=torch.float64)
            .item()
        )
    return total


# --- the memory -----------------------------------------------------------------------------------


def keys(z: Tensor, entry: Mapping[str, Any], seed: int) -> Memory:
    """Return a memory whose query and keys are fitted to inputs z [N, H]."""
    memory = Memory(dict(entry), z.shape[1]).to(z.device).requires_grad_(False)
    heads, n, half = entry["heads"], entry["keys"], entry["key_dim"] // 2 - 1
    generator = torch.Generator().manual_seed(seed)
    mean = z.mean(0)
    eigenvalues, vectors = torch.linalg.eigh((z - mean).T @ (z - mean) / len(z))
    white = (vectors * eigenvalues.clamp_min(1e-6 * eigenvalues[-1]).rsqrt()).T.flip(0)[
        : 2 * half
    ]  # [2·half, H]
    sample = z[torch.randperm(len(z), generator=generator)[:KMEANS_ROWS].to(z.device)]
    query, bias = (
        memory.query.weight.view(heads, 2, half + 1, -1).zero_(),
        memory.query.bias.view(heads, 2, half + 1).zero_(),
    )
    for head in range(heads):
        rotation = torch.linalg.qr(torch.randn(len(white), len(white), generator=generator))[0].to(
            z.device
        )
        directions = (rotation @ white).view(-1, len(white) // 2, z.shape[1])
        for side, direction in enumerate(directions[:2]):
            query[head, side, :half], bias[head, side, :half] = direction, -direction @ mean
            bias[head, side, half] = 1
            centres = kmeans((sample - mean) @ direction.T, n, generator)
            memory.keys[head, side] = torch.cat(
                [centres, -centres.square().sum(1, keepdim=True) / 2], dim=1
            )
    return memory


def kmeans(x: Tensor, n: int, generator: torch.Generator) -> Tensor:
    """Return n centres [n, d] of x [N, d], by Lloyd's rounds from rows drawn at random.

    A centre that no row is nearest to stays where it is.
    """
    centres = x[torch.randint(len(x), (n,), generator=generator).to(x.device)].clone()
    for _ in range(ROUNDS):
        nearest = (x @ centres.T - centres.square().sum(1) / 2).argmax(1)
        counts = torch.bincount(nearest, minlength=n)[:, None]
        sums = torch.zeros_like(centres).index_add_(0, nearest, x)
        centres = torch.where(counts > 0, sums / counts.clamp_min(1), centres)
    return centres


def codes(memory: Memory, z: Tensor) -> tuple[Tensor, Tensor]:
    """Return the slots that inputs z [N, H] read, and their weights, both [N, h·k]."""
    slots, scores = memory._find(z)
    return slots.flatten(1), scores.softmax(-1).flatten(1)


def values(memory: Memory, rows: Rows) -> Tensor:
    """Return the table [S, H], the ridge regression of y on the weights of the slots z reads."""
    count, hidden = memory.keys_of_half**2, rows.z.shape[1]

    def sums(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        gram = memory.keys.new_zeros(count * count, dtype=dtype)
        cross = memory.keys.new_zeros(count, hidden, dtype=dtype)
        for z, y, weight in rows.fitting():
            slots, x = codes(memory, z)
            x = x.to(dtype)
            weighted = x if weight is None else x * weight[:, None]
            for s, a, b in zip(
                slots.split(PAIRED), weighted.split(PAIRED), x.split(PAIRED), strict=True
            ):
                gram.index_add_(
                    0,
                    (s[:, :, None] * count + s[:, None, :]).flatten(),
                    (a[:, :, None] * b[:, None, :]).flatten(),
                )
            for slot, w in zip(slots.T, weighted.T, strict=True):
                cross.index_add_(0, slot, y * w[:, None])
        return gram.view(count, count), cross.T.contiguous()

    return solve(sums, VALUE_DAMPING).T.contiguous()


def look_up(memory: Memory, table: Tensor, z: Tensor) -> Tensor:
    """Return what the table adds to the stream [N, H] for inputs z [N, H]."""
    slots, weights = codes(memory, z)
    return F.embedding_bag(slots, table, per_sample_weights=weights, mode="sum")

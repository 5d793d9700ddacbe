"""Splines: the MLP's fixed activation gets a learnable function beside it, after KAN (Liu et al. 2024, arXiv 2404.19756).

All coefficients are zero, so the output is the source's function bit for bit, inside the grid and outside; nothing is gained
until it is trained. What the functions are is said in surgery/modeling/spline_mlp.py.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from surgery import modeling
from surgery.checkpoint import Checkpoint, Step, constant
from surgery.errors import SurgeryError, UsageError
from surgery.families import Blocks, locate
from surgery.operations.sound import chosen_layers, require_plain, require_whole, with_blocks

KINDS = ("spline", "rational")
CELLS = (4, 4096)  # least and most of a grid


def splinify(checkpoint: Checkpoint, *, kind: str = "spline", grid: int = 32, range: float = 8.0,
             groups: str | int = "channel", layers: Collection[int] | None = None) -> Checkpoint:  # fmt: skip
    """The model with a learnable activation, which computes what it did.

    Args:
        kind: "spline" (cubic) or "rational" (5 over 4).
        grid: cells of the spline's grid.
        range: the grid reaches from -range to range; the rational function takes x / range.
        groups: "channel": a function for each channel of the MLP; "layer": one for the layer; or how many.
        layers: default all.

    Raises SurgeryError where the family keeps its MLP in no module, or a layer was operated on already.
    """
    blocks = _check(checkpoint, kind, grid, range, layers)
    chosen = chosen_layers(blocks, layers)
    width = blocks.mlp(chosen[0]).width
    rows = (
        {"channel": width, "layer": 1}[groups] if isinstance(groups, str) and groups in ("channel", "layer") else groups
    )
    if not isinstance(rows, int) or rows < 1 or width % rows:
        raise UsageError(
            f"{groups} groups of {width} channels", f"give channel, layer, or a number that divides {width}"
        )
    spec: dict[str, Any] = {"function": kind, "grid": grid, "range": range, "groups": rows}
    changes = with_blocks(checkpoint, [modeling.entry(blocks.family, "spline", chosen, **spec)])
    shape = rows, grid - 3 if kind == "spline" else 10
    dtype = blocks.mlp(chosen[0]).down.dtype
    added = {f"{blocks.layer(i)}{blocks.family.mlp}.coefficients": constant(0.0, shape, dtype) for i in chosen}
    parameters = {"kind": kind, "grid": grid, "range": range, "groups": groups} | (
        {} if layers is None else {"layers": list(chosen)}
    )
    notes = (f"{len(chosen) * shape[0] * shape[1]:,} coefficients were added, all zero: the same function until they are trained",
             "loads with trust_remote_code=True: its code goes along; other runtimes (llama.cpp, vLLM) cannot run it")  # fmt: skip
    step = Step(operation="splinify", parameters=parameters, exact=True, layers=chosen, notes=notes)
    return checkpoint.replace(step=step, tensors={**checkpoint.tensors, **added}, **changes)


def _check(checkpoint: Checkpoint, kind: str, grid: int, range: float, layers: Collection[int] | None) -> Blocks:
    if kind not in KINDS:
        raise UsageError(f"unknown kind {kind!r}", f"one of: {', '.join(KINDS)}")
    if not CELLS[0] <= grid <= CELLS[1]:
        raise UsageError(f"a grid of {grid} cells", f"give {CELLS[0]} to {CELLS[1]}")
    if not 0 < range < float("inf"):
        raise UsageError(f"a range of {range}", "give what the grid reaches to, like 8")
    require_plain(checkpoint)
    blocks = locate(checkpoint)
    require_whole(blocks)
    for entry in checkpoint.config.get("surgery_blocks") or ():
        if both := sorted(set(entry["layers"]) & set(chosen_layers(blocks, layers))):
            raise SurgeryError(f"layer {both[0]} has a {entry['kind']} block, whose activation is its own",
                               "give the model from before that, or leave the layer out")  # fmt: skip
    return blocks

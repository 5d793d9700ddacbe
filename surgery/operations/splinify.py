"""Splines: the MLP's fixed activation gets a learnable function beside it, after KAN (Liu et al.
2024, arXiv 2404.19756).

All coefficients are zero, so the output is the source's function bit for bit, inside the grid and
outside; nothing is gained until it is trained. Pruned to straight lines ("linear"), the function
takes the activation's place and is near it, not exactly it. What the functions are is said in
surgery/blocks/spline_mlp.py.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from surgery.blocks import block_config
from surgery.blocks.custom_code import with_blocks, with_gathered_mlps
from surgery.blocks.preconditions import chosen_layers, require_whole
from surgery.checkpoint import Checkpoint, LazyTensor, Step, constant, derive
from surgery.errors import SurgeryError, UsageError
from surgery.families import Blocks, locate

if TYPE_CHECKING:
    from torch import Tensor

GRIDS = {"spline": 32, "rational": 32, "linear": 512}  # cells, by kind
FAR = 1e4  # where an activation goes on straight
CELLS = (4, 4096)  # least and most of a grid


def splinify(
    checkpoint: Checkpoint,
    *,
    kind: str = "spline",
    grid: int | None = None,
    range: float = 8.0,
    groups: str | int | None = None,
    layers: Collection[int] | None = None,
) -> Checkpoint:
    """The model with a learnable activation, which computes what it did (but for the "linear" one,
    nearly).

    Args:
        kind: "spline" (cubic), "rational" (5 over 4), or "linear" (straight lines between knots on
            the activation).
        grid: cells of the grid, by default those of GRIDS.
        range: the grid reaches from -range to range; the rational function takes x / range.
        groups: "channel": a function for each channel of the MLP; "layer": one for the layer; or
            how many. By default "channel", but "layer" of straight lines.
        layers: default all.

    Raises SurgeryError for a mixture of experts, or where a layer was operated on already.
    """
    grid = GRIDS.get(kind, 0) if grid is None else grid
    groups = groups or ("layer" if kind == "linear" else "channel")
    checkpoint = with_gathered_mlps(checkpoint)
    blocks = _check(checkpoint, kind, grid, range, layers)
    chosen = chosen_layers(blocks, layers)
    width = blocks.mlp(chosen[0]).width
    rows = (
        {"channel": width, "layer": 1}[groups]
        if isinstance(groups, str) and groups in ("channel", "layer")
        else groups
    )
    if not isinstance(rows, int) or rows < 1 or width % rows:
        raise UsageError(
            f"{groups} groups of {width} channels",
            f"give channel, layer, or a number that divides {width}",
        )
    spec: dict[str, Any] = {"function": kind, "grid": grid, "range": range, "groups": rows}
    act = blocks.activation
    exact = kind != "linear"
    spec |= {} if exact else {"slopes": _slopes(act)}
    changes = with_blocks(checkpoint, [block_config.entry(blocks.family, "spline", chosen, **spec)])
    shape = rows, {"spline": grid - 3, "linear": grid + 1}.get(kind, 10)
    made = (
        constant(0.0, shape, blocks.mlp(chosen[0]).down.dtype)
        if exact
        else _knots(act, range, shape)
    )
    added = {f"{blocks.layer(i)}{blocks.family.mlp}.coefficients": made for i in chosen}
    parameters = {"kind": kind, "grid": grid, "range": range, "groups": groups} | (
        {} if layers is None else {"layers": list(chosen)}
    )
    said = (
        "all zero: the same function until they are trained"
        if exact
        else f"{act} at the knots of straight lines: nearly the same function"
    )
    notes = (
        f"{len(chosen) * shape[0] * shape[1]:,} coefficients were added, {said}",
        "loads with trust_remote_code=True: its code goes along; other runtimes (llama.cpp, vLLM) cannot run it",
    )
    step = Step(
        operation="splinify", parameters=parameters, exact=exact, layers=chosen, notes=notes
    )
    return checkpoint.replace(step=step, tensors={**checkpoint.tensors, **added}, **changes)


def _check(
    checkpoint: Checkpoint, kind: str, grid: int, range: float, layers: Collection[int] | None
) -> Blocks:
    if kind not in GRIDS:
        raise UsageError(f"unknown kind {kind!r}", f"one of: {', '.join(GRIDS)}")
    if not CELLS[0] <= grid <= CELLS[1]:
        raise UsageError(f"a grid of {grid} cells", f"give {CELLS[0]} to {CELLS[1]}")
    if not 0 < range < float("inf"):
        raise UsageError(f"a range of {range}", "give what the grid reaches to, like 8")
    blocks = locate(checkpoint)
    require_whole(blocks)
    for entry in block_config.changed(checkpoint.config):
        if both := sorted(set(entry["layers"]) & set(chosen_layers(blocks, layers))):
            raise SurgeryError(
                f"layer {both[0]} has a {entry['kind']} block, whose activation is its own",
                "give the model from before that, or leave the layer out",
            )
    return blocks


def _knots(act: str, reach: float, shape: tuple[int, int]) -> LazyTensor:
    """The activation at equal steps from -reach to reach, in every row."""

    def make() -> Tensor:
        import torch
        from transformers.activations import ACT2FN

        x = torch.linspace(-reach, reach, shape[1], dtype=torch.float64)
        values: Tensor = ACT2FN[act](x).float().expand(shape).clone()
        return values

    return derive(f"{act} at {shape[1]} points over ±{reach!r}", make, dtype="F32", shape=shape)


def _slopes(act: str) -> list[float]:
    """The slopes that the activation has far to the left and to the right."""
    import torch
    from transformers.activations import ACT2FN

    near, far = ACT2FN[act](torch.tensor([[-FAR, FAR], [-2 * FAR, 2 * FAR]], dtype=torch.float64))
    slopes = (far - near) / torch.tensor([-FAR, FAR])
    if (far - 2 * near).abs().max() > 1:
        raise UsageError(f"{act} does not go on straight", "take --kind spline or rational")
    return [round(s, 6) + 0.0 for s in slopes.tolist()]

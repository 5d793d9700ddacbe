"""Splines: the MLP's fixed activation gets a learnable function beside it, after KAN (Liu et al.
2024, arXiv 2404.19756).

All coefficients are zero, so the output is the source's function bit for bit, inside the grid and
outside; nothing is gained until it is trained. Pruned to straight lines ("linear"), the function
takes the activation's place and is near it, not exactly it. What the functions are is said in
surgery/blocks/spline_mlp.py.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from surgery.blocks import block_config
from surgery.blocks.custom_code import NEEDS_TRUST, with_blocks, with_gathered_mlps
from surgery.blocks.paper import Paper
from surgery.blocks.preconditions import chosen_layers, require_whole
from surgery.checkpoint import Checkpoint, LazyTensor, Step, constant, derive
from surgery.errors import SurgeryError, UsageError
from surgery.families import Blocks, locate
from surgery.operations.operation import Operation

if TYPE_CHECKING:
    from torch import Tensor

GRIDS = {"spline": 32, "rational": 32, "linear": 512}  # cells, by kind
FAR = 1e4  # where an activation goes on straight
CELLS = (4, 4096)  # least and most of a grid


@dataclass(frozen=True, kw_only=True, slots=True)
class _Job:
    """Functions to be added, checked: `rows` in a layer, on `grid` cells over ±`range`."""

    blocks: Blocks
    layers: tuple[int, ...]
    kind: str
    grid: int
    range: float
    rows: int

    @property
    def exact(self) -> bool:
        """Return whether the new function is added to the activation, and begins at zero."""
        return self.kind != "linear"

    @property
    def shape(self) -> tuple[int, int]:
        """Return the shape of a layer's coefficients."""
        return self.rows, {"spline": self.grid - 3, "linear": self.grid + 1}.get(self.kind, 10)

    @property
    def entry(self) -> dict[str, Any]:
        """Return the `surgery_blocks` entry of the layers."""
        spec = {"function": self.kind, "grid": self.grid, "range": self.range, "groups": self.rows}
        slopes = {} if self.exact else {"slopes": _slopes(self.blocks.activation)}
        return block_config.entry(self.blocks.family, "spline", self.layers, **spec, **slopes)


def splinify(
    checkpoint: Checkpoint,
    *,
    kind: str = "spline",
    grid: int | None = None,
    range: float = 8.0,
    groups: str | int | None = None,
    layers: Collection[int] | None = None,
) -> Checkpoint:
    """Return the model with a learnable activation, which computes what it did.

    Straight lines ("linear") compute it nearly, the other kinds exactly.

    Args:
        kind: "spline" (cubic), "rational" (5 over 4), or "linear" (straight lines between knots on
            the activation).
        grid: cells of the grid, by default those of GRIDS.
        range: the grid reaches from -range to range; the rational function takes x / range.
        groups: "channel": a function for each channel of the MLP; "layer": one for the layer; or
            how many. By default "channel", but "layer" of straight lines.
        layers: default all.

    Raises SurgeryError for a mixture of experts, or where a layer was operated on already.

    Example:
        >>> source = surgery.open("meta-llama/Llama-2-7b-hf")
        >>> output = surgery.splinify(source, groups="layer")
    """
    checkpoint = with_gathered_mlps(checkpoint)
    grid = GRIDS.get(kind, 0) if grid is None else grid
    groups = groups or ("layer" if kind == "linear" else "channel")
    blocks = _check(checkpoint, kind, grid, range, layers)
    chosen = chosen_layers(blocks, layers)
    rows = _rows(groups, blocks.mlp(chosen[0]).width)
    job = _Job(blocks=blocks, layers=chosen, kind=kind, grid=grid, range=range, rows=rows)
    dtype, act = blocks.mlp(chosen[0]).down.dtype, blocks.activation
    made = constant(0.0, job.shape, dtype) if job.exact else _knots(act, range, job.shape)
    added = {f"{blocks.layer(i)}{blocks.family.mlp}.coefficients": made for i in chosen}
    parameters = {"kind": kind, "grid": grid, "range": range, "groups": groups}
    step = Step(
        operation="splinify",
        parameters=parameters | ({} if layers is None else {"layers": list(chosen)}),
        exact=job.exact,
        layers=chosen,
        notes=_notes(job),
    )
    changes = with_blocks(checkpoint, [job.entry])
    return checkpoint.replace(step=step, tensors={**checkpoint.tensors, **added}, **changes)


def _rows(groups: str | int, width: int) -> int:
    """Return how many functions a layer of this width has."""
    named = {"channel": width, "layer": 1}
    rows = named.get(groups) if isinstance(groups, str) else groups
    if rows is None or rows < 1 or width % rows:
        raise UsageError(
            f"{groups} groups of {width} channels",
            f"give channel, layer, or a number that divides {width}",
        )
    return rows


def _notes(job: _Job) -> tuple[str, ...]:
    zero = "all zero: the same function until they are trained"
    near = f"{job.blocks.activation} at the knots of straight lines: nearly the same function"
    count = len(job.layers) * job.shape[0] * job.shape[1]
    return (f"{count:,} coefficients were added, {zero if job.exact else near}", NEEDS_TRUST)


def _check(
    checkpoint: Checkpoint,
    kind: str,
    grid: int,
    range: float,
    layers: Collection[int] | None,
) -> Blocks:
    if kind not in GRIDS:
        raise UsageError(f"unknown kind {kind!r}", f"one of: {', '.join(GRIDS)}")
    if not CELLS[0] <= grid <= CELLS[1]:
        raise UsageError(f"a grid of {grid} cells", f"give {CELLS[0]} to {CELLS[1]}")
    if not 0 < range < float("inf"):
        raise UsageError(f"a range of {range}", "give what the grid reaches to, like 8")
    blocks = locate(checkpoint)
    blocks.family.require_dense()
    require_whole(blocks)
    chosen = set(chosen_layers(blocks, layers))
    for entry in block_config.changed(checkpoint.config):
        if both := sorted(set(entry["layers"]) & chosen):
            raise SurgeryError(
                f"layer {both[0]} has a {entry['kind']} block, whose activation is its own",
                "give the model from before that, or leave the layer out",
            )
    return blocks


def _knots(act: str, reach: float, shape: tuple[int, int]) -> LazyTensor:
    """Return the activation at equal steps from -reach to reach, in every row."""

    def make() -> Tensor:
        import torch
        from transformers.activations import ACT2FN

        x = torch.linspace(-reach, reach, shape[1], dtype=torch.float64)
        values: Tensor = ACT2FN[act](x).float().expand(shape).clone()
        return values

    return derive(f"{act} at {shape[1]} points over ±{reach!r}", make, dtype="F32", shape=shape)


def _slopes(act: str) -> list[float]:
    """Return the slopes that the activation has far to the left and to the right."""
    import torch
    from transformers.activations import ACT2FN

    near, far = ACT2FN[act](torch.tensor([[-FAR, FAR], [-2 * FAR, 2 * FAR]], dtype=torch.float64))
    slopes = (far - near) / torch.tensor([-FAR, FAR])
    if (far - 2 * near).abs().max() > 1:
        raise UsageError(f"{act} does not go on straight", "take --kind spline or rational")
    return [round(s, 6) + 0.0 for s in slopes.tolist()]


KAN = Paper("2404.19756", "Liu, Ziming", "KAN: Kolmogorov-Arnold Networks", 2024)

OPERATION = Operation(
    name="splinify",
    function=splinify,
    summary="Make the activation learnable, exactly.",
    done=lambda p, where: f"{where} got a learnable activation ({p.get('kind')})",
    why="The activation becomes learnable: a function of zeros beside it, or straight lines in its "
    "place, which training can shape.",
    limits="It was not trained after the conversion: it gains nothing over its source yet.",
    suffix=lambda p: "splinify",
    papers=lambda p: [KAN],
    tags=("kan",),
    blocks=("spline",),
)

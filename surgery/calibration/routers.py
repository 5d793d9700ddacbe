"""How the router of a mixture begins: at random, at zero, or from what it is going to read.

    centroids    balanced k-means of the router's inputs on calibration text, by direction: a copy for each kind of token
    class-means  of each expert's own text, the mean of the router's inputs on it (as mergekit's
    hidden-state gates): a
                 copy for each kind of text

Inputs are those of the MLP, behind the norm after attention, seen as a walk of the model comes to
each layer, experts that differ in place. A router has no bias, and the inputs a mean that would
decide for all tokens alike. So each row [H] is centred, and what a bias would add stands on the
direction d with d·x ≈ 1 on all inputs: W x ≈ C (x - x̄) + b. Rows are scaled until the logits have
LOGIT_STD on the text.

Shapes: n tokens, H hidden_size, N copies of the MLP; a copy's parts have equal rows.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from surgery.blocks import block_config
from surgery.blocks.custom_code import with_blocks
from surgery.calibration.settings import Calibration
from surgery.checkpoint import Checkpoint, LazyTensor, Progress, Work, constant, derive, normal
from surgery.checkpoint.work import identity
from surgery.errors import UsageError
from surgery.families import Mlp, locate
from surgery.families.targets import Shape

if TYPE_CHECKING:
    from torch import Tensor

    from surgery.calibration.walk import Layer, Walk

ROUTERS = ("normal", "zero", "centroids", "class-means")
CALIBRATED = ROUTERS[2:]
LOGIT_STD = 1.0
TOKENS = 16_384  # that rows are fitted on
ROUNDS = 20  # of k-means
STEPS, EVEN = (
    100,
    0.02,
)  # of Sinkhorn's iteration, at most, and a share's distance from an even one that ends it


@dataclass(frozen=True, kw_only=True, slots=True)
class Beginning:
    """How routers begin; `texts` are files, one for each expert."""

    kind: str
    std: float
    seed: int
    texts: tuple[str, ...] = ()
    calibration: Calibration = dataclasses.field(default_factory=Calibration)

    def __post_init__(self) -> None:
        if self.kind not in ROUTERS:
            raise UsageError(f"unknown router {self.kind!r}", f"one of: {', '.join(ROUTERS)}")
        if self.std < 0:
            raise UsageError(
                f"a router of standard deviation {self.std}", "give 0 or more; 0.02 is usual"
            )
        if self.texts and self.kind != "class-means":
            raise UsageError(
                f"texts of experts, and a router that begins {self.kind}",
                "give --router class-means",
            )

    @property
    def reads(self) -> bool:
        return self.kind in CALIBRATED


@dataclass(frozen=True, kw_only=True, slots=True)
class Mixture:
    """What is walked: `checkpoint` is all but the experts; `wide` gives a layer's MLP with the
    neurons of all experts, and `entry` the block that has it, where they compute something else
    than the MLP that stands there (else None)."""

    checkpoint: Checkpoint
    layers: Sequence[int]
    shape: Shape
    wide: Callable[[int], Mlp] | None = None
    entry: Mapping[str, Any] | None = None


def router_rows(
    begin: Beginning, name: str, index: int, s: Shape, hidden: int, dtype: str, work: Work | None
) -> LazyTensor:
    """[E, H] of layer `index`: the parts of a copy, which follow one another, have equal rows."""
    if work is not None:
        rows = work.promise(str(index), "F32", (s.copies, hidden)).cast(dtype)
    elif begin.kind == "zero":
        rows = constant(0.0, (s.copies, hidden), dtype)
    else:
        rows = normal(name, begin.seed, begin.std, (s.copies, hidden), dtype)
    return each_row(rows, s.shards)


def each_row(rows: LazyTensor, times: int) -> LazyTensor:
    """Return the rows [N, H] with each of them several times, [N · times, H]."""
    if times == 1:
        return rows
    return derive(
        f"each row {times} times",
        lambda t: t.repeat_interleave(times, 0),
        rows,
        dtype=rows.dtype,
        shape=(times * rows.shape[0], rows.shape[1]),
    )


def work_of(begin: Beginning, mixture: Mixture) -> Work:
    """What makes the rows of all layers; a "layer" of its report are the figures of `figures`."""
    tensors, blocks = dict(mixture.checkpoint.tensors), locate(mixture.checkpoint)
    if mixture.wide is not None:
        wide = {i: mixture.wide(i) for i in mixture.layers}
        tensors |= {
            f"{i}.{f.name}": t
            for i, mlp in wide.items()
            for f in dataclasses.fields(mlp)
            if isinstance(t := getattr(mlp, f.name), LazyTensor)
        }
    texts = [begin.calibration.of_one(t).identity for t in begin.texts]
    own = (begin.kind, begin.seed, mixture.shape, mixture.layers)
    parts = (*own, begin.calibration.identity, texts)
    layer = sum(mixture.checkpoint.tensors[n].numel for n in blocks.names(0))
    experts = mixture.wide(mixture.layers[0]).up.numel * 3 if mixture.wide else 0
    hidden = blocks.mlp(0).up.shape[1]
    peak = 4 * (layer + 2 * experts + 2 * (begin.calibration.tokens + TOKENS) * hidden)
    return Work(
        identity("router", mixture.checkpoint.replace(tensors=tensors), *parts),
        lambda work, progress: _calibrate(begin, mixture, work, progress),
        total=blocks.count,
        title="routers",
        peak_memory=peak,
        check=lambda: _require(begin, mixture.checkpoint),
    )


# --- what is computed -----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class _Text:
    """ids and mask [B, T]: the tokens that rows are fitted on; `kinds` [B]: whose text a sequence
    is of.
    """

    ids: Tensor
    mask: Tensor
    kinds: Tensor


def _calibrations(begin: Beginning) -> list[Calibration]:
    """Return what is read of each text: all have the same share of the tokens."""
    if not begin.texts:
        return [begin.calibration]
    tokens = max(1, begin.calibration.tokens // len(begin.texts))
    own = dataclasses.replace(begin.calibration, tokens=tokens)
    return [own.of_one(text) for text in begin.texts]


def _require(begin: Beginning, checkpoint: Checkpoint) -> None:
    for calibration in _calibrations(begin):
        calibration.require(checkpoint)


def _text(begin: Beginning, checkpoint: Checkpoint, work: Work) -> _Text:
    import torch

    samples = [calibration.sample(checkpoint) for calibration in _calibrations(begin)]
    work.note(
        "sample", samples[0].as_dict() if len(samples) == 1 else [s.as_dict() for s in samples]
    )
    length = min(s.input_ids.shape[1] for s in samples)
    ids = torch.cat([s.input_ids[:, :length] for s in samples])
    mask = torch.cat([s.mask[:, :length] for s in samples])
    every = -(-int(mask.sum()) // TOKENS)
    sampled = mask & (
        (mask.flatten().cumsum(0) % every == 0).view(mask.shape) if every > 1 else mask
    )
    kinds = torch.cat([torch.full((len(s.input_ids),), i) for i, s in enumerate(samples)])
    return _Text(ids=ids, mask=sampled, kinds=kinds)


def _calibrate(begin: Beginning, mixture: Mixture, work: Work, progress: Progress) -> None:
    """Walk the model; the rows of each layer come from what the mixtures before it give."""
    text = _text(begin, mixture.checkpoint, work)
    walk = begin.calibration.walk(mixture.checkpoint, text.ids)
    mixed = None if mixture.wide is None else _mixed(mixture, work)
    for layer in walk:
        if layer.index in mixture.layers:
            if not work.has(str(layer.index)):
                x, kinds = _inputs(layer, walk, text, moves=mixture.wide is None)
                rows = _rows(begin, x, kinds, mixture.shape.copies)
                work.put(str(layer.index), rows)
                logits = x @ rows.T
                work.note(
                    str(layer.index),
                    figures(logits, logits.topk(mixture.shape.active_copies, dim=1).indices),
                )
            if mixed is not None:
                walk.install(layer, mixed)
        if not layer.done:
            layer.run()
        progress(1)


def _inputs(layer: Layer, walk: Walk, text: _Text, *, moves: bool) -> tuple[Tensor, Tensor]:
    """What the MLP reads at the tokens of the mask [n, H], and whose text they are of [n]; `moves`:
    the layer is run.
    """
    import torch

    from surgery.calibration.observe import tapped

    found: list[Tensor] = []
    kinds: list[Tensor] = []
    row = 0

    def keep(b: int, out: Tensor) -> None:
        nonlocal row
        mask = text.mask[row : row + len(out)]
        x = taps.caught["input"].reshape(*mask.shape, -1)[mask.to(out.device)]
        kinds.append(text.kinds[row : row + len(out), None].expand(mask.shape)[mask])
        found.append(x.float().cpu())
        row += len(out)

    with tapped(layer.module, walk.blocks.family, walk.checkpoint.text_config) as taps:
        if moves:
            layer.run(keep)
        else:
            for b, out in enumerate(layer.outputs()):
                keep(b, out)
    return torch.cat(found), torch.cat(kinds)


def _mixed(mixture: Mixture, work: Work) -> Checkpoint:
    """Return the model with its mixtures in custom-code blocks, whatever the output will be."""
    assert mixture.wide is not None and mixture.entry is not None
    blocks, tensors = locate(mixture.checkpoint), dict(mixture.checkpoint.tensors)
    for index in mixture.layers:
        wide = mixture.wide(index)
        tensors |= blocks.restored(index, wide)
        rows = each_row(work.lazy(str(index)), mixture.shape.shards)
        (path,) = block_config.router_tensors(mixture.entry, wide.up.shape[1])
        tensors[blocks.layer(index) + path] = rows
    return mixture.checkpoint.replace(
        tensors=tensors, **with_blocks(mixture.checkpoint, [mixture.entry])
    )


# --- rows -----------------------------------------------------------------------------------------


def _rows(begin: Beginning, x: Tensor, kinds: Tensor, count: int) -> Tensor:
    """[N, H] from inputs [n, H]."""
    if begin.kind == "centroids":
        centres, offsets = centroids(x, count, begin.seed)
    else:
        centres, offsets = class_means(x, kinds, count)
    rows = with_offsets(centres, offsets, x)
    return rows * (LOGIT_STD / (x @ rows.T).std().clamp_min(1e-20))


def centroids(x: Tensor, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Balanced k-means of the directions of x - x̄: unit centres [N, H], and what to add to their
    products with x - x̄ [N] so that each is the largest equally often."""
    import torch

    centred = x - x.mean(0)
    u = torch.nn.functional.normalize(centred, dim=1)
    centres = _spread(u, count, seed)
    label, offsets = torch.empty(0), u.new_zeros(count)
    for _ in range(ROUNDS):
        scores = u @ centres.T
        offsets = even(scores, offsets)
        before, label = label, (scores + offsets).argmax(1)
        if torch.equal(before, label):
            break
        sums = torch.zeros_like(centres).index_add_(0, label, u)
        centres = torch.nn.functional.normalize(sums, dim=1)
    scores = centred @ centres.T
    return centres, even(scores, u.new_zeros(count))


def _spread(u: Tensor, count: int, seed: int) -> Tensor:
    """k-means++ (Arthur & Vassilvitskii 2007) by cosine: rows of u far from one another."""
    import torch

    draw = torch.Generator().manual_seed(seed)
    chosen = [int(torch.randint(len(u), (1,), generator=draw))]
    distance = torch.full((len(u),), 2.0)
    while len(chosen) < count:
        distance = torch.minimum(distance, (1 - u @ u[chosen[-1]]).clamp_min(1e-6))
        chosen.append(int(distance.multinomial(1, generator=draw)))
    return u[chosen]


def even(scores: Tensor, offsets: Tensor) -> Tensor:
    """Offsets [N] with which every column of the scores [n, N] is the largest about equally often,
    from a guess of them: Sinkhorn's iteration (Cuturi 2013, arXiv 1306.0895) at a temperature of a
    twentieth of the scores' spread."""
    temperature = 0.05 * scores.std().clamp_min(1e-20)
    columns = (
        scores / temperature
    ).T.contiguous()  # a softmax of few elements is slow along the last dimension
    for _ in range(STEPS):
        share = (columns + (offsets / temperature)[:, None]).softmax(0).mean(1).clamp_min(
            1e-6
        ) * len(columns)
        offsets = offsets - temperature * share.log()
        if (share - 1).abs().max() < EVEN:
            break
    return offsets - offsets.mean()


def class_means(x: Tensor, kinds: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Means of each kind less the mean of all means [N, H], and the offsets to x̄ that make the
    nearest mean win [N].
    """
    import torch

    means = torch.stack([x[kinds == i].mean(0) for i in range(count)])
    centre = means.mean(0)
    apart = means - centre
    return apart, apart @ (x.mean(0) - centre) - apart.square().sum(1) / 2


def with_offsets(centres: Tensor, offsets: Tensor, x: Tensor) -> Tensor:
    """Rows W [N, H] without a bias, with W x ≈ C (x - x̄) + b on the inputs x [n, H]."""
    import torch

    double, hidden = x.double(), x.shape[1]
    gram = double.T @ double / len(x)
    gram += 1e-3 * gram.trace() / hidden * torch.eye(hidden, dtype=torch.float64)
    one = torch.linalg.solve(gram, double.mean(0)).float()  # one · x is as near to 1 as can be
    return centres + (offsets - centres @ x.mean(0))[:, None] * one


def figures(logits: Tensor, selected: Tensor) -> dict[str, float]:
    """Of logits [n, E] and the experts that were chosen for them [n, K]: their standard deviation,
    the mean of the largest probability, the entropy of the load (1: even), and the least load of an
    expert over an even one."""
    import torch

    count = logits.shape[1]
    load = torch.bincount(selected.flatten(), minlength=count).double() / selected.numel()
    entropy = (
        -(load * load.clamp_min(1e-300).log()).sum().item() / math.log(count) if count > 1 else 1.0
    )
    found = {
        "logit_std": logits.std().item(),
        "largest_probability": logits.softmax(1).amax(1).mean().item(),
        "load_entropy": entropy,
        "least_load": load.min().item() * count,
    }
    return {k: round(v, 4) for k, v in found.items()}

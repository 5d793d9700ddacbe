"""Pruning: narrower MLPs, in the architecture's own form.

The neurons that the output can best do without are left out, the same number in every layer, and
`down_proj` is refitted to what is left (fitting/ridge.py), on the stream that the pruned layers
before it give. Which neurons those are is said in fitting/selection.py.

Neurons that add exactly nothing to any output are left out without a change of the function: that
is what `keep=1` does.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from surgery.blocks import block_config
from surgery.blocks.paper import Paper
from surgery.blocks.preconditions import chosen_layers, require_plain, require_whole
from surgery.calibration.settings import Calibration
from surgery.checkpoint import Checkpoint, LazyTensor, Progress, Step, Work
from surgery.checkpoint.edit import config_with
from surgery.checkpoint.tensors import derive
from surgery.checkpoint.work import identity
from surgery.errors import SurgeryError, UsageError
from surgery.families import Blocks, locate
from surgery.fitting.sizes import fit_nbytes
from surgery.operations.operation import OWN_TEXT, Operation, Parameters, hyphenated

if TYPE_CHECKING:
    from torch import Tensor

    from surgery.calibration.install import Fitting
    from surgery.fitting.neurons import Neurons

Criterion = Literal["second_order", "mass", "magnitude", "random"]
Repair = Literal["ridge", "none"]
NEED_TEXT = ("second_order", "mass")
FP64_BYTES = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class _Job:
    """What is to be done, checked: every MLP gets `width` neurons."""

    blocks: Blocks
    keep: float
    criterion: str
    repair: str
    multiple_of: int
    seed: int
    calibration: Calibration
    width: int

    @property
    def exact(self) -> bool:
        """Return whether only neurons go that add nothing."""
        return self.keep == 1

    @property
    def needs_text(self) -> bool:
        """Return whether a choice or a fit reads calibration text."""
        return not self.exact and (self.criterion in NEED_TEXT or self.repair != "none")

    @property
    def layers(self) -> tuple[int, ...]:
        """Return the layers that have an MLP."""
        return chosen_layers(self.blocks, None)

    @property
    def before(self) -> int:
        """Return the number of neurons of an MLP before."""
        return self.blocks.mlp(self.layers[0]).width


def prune(
    checkpoint: Checkpoint,
    *,
    keep: float = 0.75,
    criterion: Criterion = "second_order",
    repair: Repair = "ridge",
    multiple_of: int = 64,
    seed: int = 0,
    calibration: Calibration | Mapping[str, Any] | None = None,
) -> Checkpoint:
    """Return the model with narrower MLPs: fewer neurons, the same architecture.

    Args:
        keep: the share of the neurons of each MLP that stays; 1 leaves out only those that add
            exactly nothing, so that the function stays the same.
        criterion: "second_order" leaves out what a refit of the others makes up for best; "mass"
            what adds least to the stream; "magnitude" the smallest weights; "random" any.
        repair: "ridge" (refit down_proj in closed form) or "none".
        multiple_of: the new width is rounded up to a multiple of this.
        seed: of what is drawn at random.
        calibration: what neurons are chosen on, and the repair is fitted on; see `Calibration`.

    Raises SurgeryError for a mixture of experts, for layers that have a custom-code block, and
    where nothing would be left out.

    Example:
        >>> source = surgery.open("meta-llama/Llama-3.2-1B")
        >>> output = surgery.prune(source, keep=0.75)
    """
    blocks = _check(checkpoint, keep, multiple_of)
    kept = _not_idle(blocks) if keep == 1 else None
    before = blocks.mlp(chosen_layers(blocks, None)[0]).width
    job = _Job(
        blocks=blocks,
        keep=keep,
        criterion=criterion,
        repair=repair if keep < 1 else "none",
        multiple_of=multiple_of,
        seed=seed,
        calibration=Calibration.of(calibration),
        width=_width(before, keep, multiple_of, kept),
    )
    work = None if kept is not None else _work(job)
    tensors = dict(checkpoint.tensors)
    for number, index in enumerate(job.layers):
        order = _fixed(kept[number], job.width) if kept is not None else None
        tensors |= _pruned(job, index, order, work)
    step = Step(
        operation="prune",
        parameters=_parameters(job),
        exact=job.exact,
        layers=job.layers,
        notes=_notes(job),
        work=work,
    )
    config = config_with(checkpoint, {blocks.family.width_key: job.width})
    return checkpoint.replace(step=step, tensors=tensors, config=config)


def _parameters(job: _Job) -> dict[str, Any]:
    """Return what makes the same again, without what is as by default."""
    chosen = {} if job.exact else {"criterion": job.criterion, "repair": job.repair}
    seed = {"seed": job.seed} if job.criterion == "random" and not job.exact else {}
    calibration = job.calibration.as_dict() if job.needs_text else {}
    given = {"keep": job.keep, "multiple_of": job.multiple_of} | chosen | seed
    return given | ({"calibration": calibration} if calibration else {})


# --- what is asked for ----------------------------------------------------------------------------


def _check(checkpoint: Checkpoint, keep: float, multiple_of: int) -> Blocks:
    if not 0 < keep <= 1:
        raise UsageError(f"a share of {keep:g} to keep", "give a fraction, like 0.75")
    if multiple_of < 1:
        raise UsageError(f"a multiple of {multiple_of}", "give 1 or more, like 64")
    require_plain(checkpoint)
    blocks = locate(checkpoint)
    blocks.family.require_dense()
    require_whole(blocks)
    if entries := block_config.changed(checkpoint.config):
        raise SurgeryError(
            f"layer {entries[0]['layers'][0]} has a {entries[0]['kind']} block, whose neurons are "
            "not the architecture's own",
            "prune first, then convert the narrower model",
        )
    layers = chosen_layers(blocks, None)
    if blocks.family.width_key not in blocks.family.effective(checkpoint.text_config):
        raise SurgeryError(
            f"no config field of this {blocks.family.model_type} holds the width of its MLPs",
            "`surgery families` lists the architectures whose width is known",
        )
    widths = {blocks.mlp(i).width for i in layers}
    if len(widths) > 1:
        raise SurgeryError(
            f"the MLPs of this {blocks.family.model_type} have {len(widths)} widths, "
            f"{min(widths)} to {max(widths)}",
            "prune takes models whose MLPs are equally wide",
        )
    return blocks


def _width(before: int, keep: float, multiple_of: int, kept: list[list[int]] | None) -> int:
    """Return the new number of neurons of every MLP. Raises UsageError where it is no smaller.

    `kept` are the neurons of each layer that may add something, where the others are to go.
    """
    needed = math.ceil(before * keep) if kept is None else max(1, *map(len, kept))
    width = math.ceil(needed / multiple_of) * multiple_of
    if width < before:
        return width
    raise UsageError(
        f"{needed:,} of {before:,} neurons stay, in multiples of {multiple_of}: there is nothing "
        "to leave out",
        "give a smaller --multiple-of, or a smaller --keep",
    )


def _not_idle(blocks: Blocks) -> list[list[int]]:
    """Return the neurons of each layer that may add something, read one layer at a time.

    The new width depends on them, so the plan has to wait for this. Those that are always open are
    among them, zero or not: every layer has as many.
    """
    from surgery.fitting.neurons import Neurons
    from surgery.fitting.selection import idle

    found = []
    for index in chosen_layers(blocks, None):
        stays = ~idle(Neurons.at(blocks, index))
        stays[len(stays) - blocks.always_open :] = True
        found.append(stays.nonzero().flatten().tolist())
    return found


def _notes(job: _Job) -> tuple[str, ...]:
    left_out = (
        "those left out added exactly nothing"
        if job.exact
        else {
            "ridge": "down_proj was refitted on calibration text",
            "none": "the weights that are left are the source's own",
        }[job.repair]
    )
    field = f"{job.blocks.family.width_key} is {job.width}"
    return (f"each MLP keeps {job.width:,} of {job.before:,} neurons ({field}); {left_out}",)


# --- what is planned ------------------------------------------------------------------------------


def _pruned(
    job: _Job, index: int, order: LazyTensor | None, work: Work | None
) -> dict[str, LazyTensor]:
    """Return the tensors of a layer's MLP with the neurons of `order` [width] alone.

    Without `order` the work makes it.
    """
    mlp, width = job.blocks.mlp(index), job.width
    hidden = mlp.down.shape[0]
    if order is None:
        assert work is not None
        order = work.promise(f"{index}.order", "I64", (width,))
    chosen = order

    def rows(t: LazyTensor) -> LazyTensor:
        shape = (width, *t.shape[1:])
        return derive("chosen rows", lambda t, o: t[o], t, chosen, dtype=t.dtype, shape=shape)

    if job.repair != "none":
        assert work is not None
        down = work.promise(f"{index}.down", mlp.down.dtype, (hidden, width))
    else:
        down = derive(
            "chosen columns",
            lambda t, o: t[:, o],
            mlp.down,
            chosen,
            dtype=mlp.down.dtype,
            shape=(hidden, width),
        )
    return job.blocks.restored(index, dataclasses.replace(mlp.by_neuron(rows), down=down))


def _fixed(kept: list[int], width: int) -> LazyTensor:
    """Return an order that is known: `kept`, and as many of the others as fill `width`."""
    others = (i for i in range(width + len(kept)) if i not in set(kept))
    chosen = sorted([*kept, *(next(others) for _ in range(width - len(kept)))])
    digest = hashlib.sha256(repr(chosen).encode()).hexdigest()[:16]

    def make() -> Tensor:
        import torch

        return torch.tensor(chosen)

    return derive(f"neurons {digest}", make, dtype="I64", shape=(width,))


def _work(job: _Job) -> Work:
    checkpoint, mlp = job.blocks.checkpoint, job.blocks.mlp(job.layers[0])
    hidden, before = mlp.down.shape
    layer = 4 * sum(checkpoint.tensors[n].numel for n in job.blocks.names(job.layers[0]))
    streams = 3 * 4 * job.calibration.tokens * hidden if job.needs_text else 0
    chooses = 3 * FP64_BYTES * before * before if job.criterion == "second_order" else 0
    parts = (job.width, job.criterion, job.repair, job.seed)
    return Work(
        identity("prune", checkpoint, parts, job.calibration.identity if job.needs_text else ""),
        lambda work, progress: _run(job, work, progress),
        total=max(job.layers) + 1 if job.needs_text else len(job.layers),
        peak_memory=2 * layer + streams + max(chooses, fit_nbytes(hidden, job.width)),
        check=lambda: job.calibration.require(checkpoint) if job.needs_text else None,
    )


# --- what is computed -----------------------------------------------------------------------------


def _run(job: _Job, work: Work, progress: Progress) -> None:
    """Prune every layer, on a walk of what the pruned ones before it give where it needs text."""
    from surgery.fitting.neurons import Neurons

    if not job.needs_text:
        for index in job.layers:
            neurons = Neurons.at(job.blocks, index)
            work.put(f"{index}.order", _choose(job, index, neurons))
            progress(1)
        return
    from surgery.calibration.install import fit_layers, read_text

    reading = read_text(job.blocks, job.calibration, work)
    fit_layers(reading, job.layers, work, progress, lambda fitting: _fit(job, fitting, work))


def _fit(job: _Job, fitting: Fitting, work: Work) -> None:
    """Choose the neurons of a layer that stay, and refit what they write."""
    from surgery.fitting import measures
    from surgery.fitting.cross_validation import validated
    from surgery.fitting.neurons import Neurons

    rows, index = fitting.rows, fitting.index
    neurons = Neurons.at(job.blocks, index, fitting.layer.device)
    order = _choose(job, index, neurons, rows)
    left = neurons.pick(order)
    refitted = left if job.repair == "none" else validated(left, rows)[0]
    best, errors = measures.better(left, refitted, rows)
    work.note(str(index), measures.figures(**errors))
    work.put(f"{index}.order", order)
    if work.promised(f"{index}.down"):
        work.put(f"{index}.down", best.down)


def _choose(job: _Job, index: int, neurons: Neurons, rows: Any = None) -> Tensor:
    """Return the neurons of a layer that stay, sorted, [width]; always-open ones are the last.

    `rows` are those of the layer, for a criterion that needs text.
    """
    from surgery.fitting import selection

    count, fixed = job.width, job.blocks.always_open
    if job.criterion == "second_order":
        return selection.least_missed(neurons, rows, count, fixed)
    score = {
        "mass": lambda: selection.mass(neurons, rows),
        "magnitude": lambda: selection.magnitude(neurons),
        "random": lambda: selection.chance(neurons, job.seed + index),
    }[job.criterion]()
    return selection.largest(score, count, fixed)


# --- the record -----------------------------------------------------------------------------------

ZIPLM = Paper(
    "2302.04089",
    "Kurtic, Eldar",
    "ZipLM: Inference-Aware Structured Pruning of Language Models",
    2023,
)


def _done(p: Parameters, where: str) -> str:
    if p["keep"] == 1:
        return f"{where} lost the neurons that added exactly nothing"
    repair = ", down_proj refitted to what is left" if p["repair"] == "ridge" else ""
    return f"{where} keeps {p['keep']:.4g} of its neurons{repair}"


def _remedies(p: Parameters) -> Sequence[str]:
    repair = ("a repair: --repair ridge",) if p.get("repair") == "none" else ()
    return (*repair, "more neurons: --keep", *OWN_TEXT)


OPERATION = Operation(
    name="prune",
    function=prune,
    summary="Make the MLPs narrower, in the architecture's own form.",
    done=_done,
    why="The MLPs have fewer neurons, so that the model is smaller and faster in every engine that "
    "runs its architecture.",
    limits="It was not trained after the conversion: what the missing neurons computed is made up "
    "for on the calibration text's kinds of text best.",
    suffix=lambda p: hyphenated("prune", f"{100 * p['keep']:.4g}"),
    papers=lambda p: [ZIPLM] if p.get("criterion") == "second_order" else [],
    tags=("pruning",),
    remedies=_remedies,
)

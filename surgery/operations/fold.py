"""Turn a relufied model with custom code into a stock one: what its blocks add becomes neurons.

A sparse block adds thresholds, a correction and a bypass to an MLP. All of them fit into plain rows
of a wider MLP (fitting/fold.py), because the MLP's input holds a constant. `down` is then fitted on
what the folded layer computes, towards what the layer with code computes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from surgery.blocks import block_config
from surgery.blocks.custom_code import SHELL, files
from surgery.calibration.settings import Calibration
from surgery.checkpoint import Checkpoint, LazyTensor, Progress, Step, Work
from surgery.checkpoint.work import identity
from surgery.errors import SurgeryError
from surgery.families import ALWAYS_OPEN, Blocks, locate
from surgery.fitting.sizes import LIMIT, fit_nbytes, grown
from surgery.operations.operation import OWN_TEXT, Operation

if TYPE_CHECKING:
    from surgery.calibration.install import Fitting

ACTIVATIONS = ("relu", "relu2")  # a neuron that multiplies by one keeps its products with these
RULES = ("plain", "shifted")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Job:
    """What is to be done, the same for every layer."""

    blocks: Blocks
    width: int  # of the MLP that is written
    calibration: Calibration


def fold(
    checkpoint: Checkpoint, *, calibration: Calibration | Mapping[str, Any] | None = None
) -> Checkpoint:
    """Return a relufied model with custom code as a model of the stock class.

    Args:
        calibration: what the constant direction and `down` are fitted on; see `Calibration`.

    Raises SurgeryError where a block has what plain neurons cannot hold; and when it is written,
    where the inputs of a layer hold no constant.

    Example:
        >>> surgery.fold(surgery.open("Llama-2-7b-hf-shifted-80-ridge-bypass4096"))
    """
    blocks = locate(checkpoint)
    entry = _foldable(blocks)
    own = blocks.mlp(blocks.dense[0]).width
    added = int(entry["bypass"]) + bool(entry["correction"])
    job = _Job(
        blocks=blocks,
        width=grown(own + added) if added else own,
        calibration=Calibration.of(calibration),
    )
    work = _work(job)
    tensors = _tensors(job, work)
    step = Step(
        operation="fold",
        parameters={"calibration": job.calibration.as_dict()} if job.calibration.as_dict() else {},
        exact=False,
        layers=blocks.dense,
        notes=(
            "the sparse blocks became plain neurons, so that it loads without code; "
            f"{job.width - own} neurons of each MLP are always open or zero, and stand last",
        ),
        work=work,
    )
    names = files("llama", block_config.kinds(checkpoint.config)).keys() | {SHELL}
    return checkpoint.replace(
        step=step,
        tensors=tensors,
        config=_stock_config(job, entry),
        files=tuple(f for f in checkpoint.files if f.name not in names),
        custom_code=False,
    )


def _foldable(blocks: Blocks) -> Mapping[str, Any]:
    """Return an entry that stands for all sparse blocks. Raises SurgeryError where none can."""
    config = blocks.checkpoint.config
    entries = block_config.changed(config)
    if not entries:
        raise SurgeryError(
            "this checkpoint has no custom-code blocks",
            "there is nothing to fold: give an output of `surgery relufy --form code`",
        )
    covered = {i for entry in entries for i in entry["layers"]}
    for entry in entries:
        if (reason := _unfoldable(entry)) or entry["bypass"] != entries[0]["bypass"]:
            raise SurgeryError(
                f"a block of {reason or 'another bypass than the first'} does not fit into plain "
                "neurons",
                f"folded are the rules {' and '.join(RULES)} with {' or '.join(ACTIVATIONS)}, in "
                "every layer, without stage 2",
            )
    if missing := sorted(set(blocks.dense) - covered):
        raise SurgeryError(
            f"layer {missing[0]} has no sparse block, and the activation is one for all layers",
            "relufy every layer",
        )
    return entries[0]


def _unfoldable(entry: Mapping[str, Any]) -> str:
    """Return what of an entry no plain neuron can hold, "" where all can."""
    if entry["kind"] != "sparse":
        return f"kind {entry['kind']}"
    if entry["rule"] not in RULES or entry["activation"] not in ACTIVATIONS:
        return f"rule {entry['rule']} with {entry['activation'] or 'the activation of the source'}"
    if not entry["gate"] and not entry["fused"]:
        return "an MLP without a gate"
    return "stage 2" if entry["relu_after"] or entry["inputs"] else ""


def _stock_config(job: _Job, entry: Mapping[str, Any]) -> dict[str, Any]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    old, family = job.blocks.checkpoint.config, job.blocks.family
    if not family.activation_key:
        raise SurgeryError(
            f"the activation of {family.model_type} is fixed in its code", "keep the form with code"
        )
    base, own = block_config.base_type(old), job.blocks.mlp(job.blocks.dense[0]).width
    if base not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or old.get("text_config"):
        raise SurgeryError(
            f"{base} is not a language model of transformers alone", "keep the form with code"
        )
    config = {k: v for k, v in old.items() if k not in ("auto_map", "surgery_blocks")}
    config |= {
        "model_type": base,
        "architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[base]],
        family.activation_key: entry["activation"],
    }
    more = {family.width_key: job.width, ALWAYS_OPEN: job.width - own}
    return config | (more if job.width > own else {})


def _tensors(job: _Job, work: Work) -> dict[str, LazyTensor]:
    blocks, tensors = job.blocks, dict(job.blocks.checkpoint.tensors)
    for index in blocks.dense:
        mlp = blocks.mlp(index)
        hidden, dtype = mlp.down.shape[0], mlp.down.dtype
        shapes: dict[str, tuple[int, ...]] = {
            "gate": (job.width, hidden),
            "up": (job.width, hidden),
            "down": (hidden, job.width),
        }
        if mlp.biased:
            shapes |= {"gate_bias": (job.width,), "up_bias": (job.width,), "down_bias": (hidden,)}
        parts: dict[str, Any] = {
            name: work.promise(f"{index}.{name}", dtype, shape) for name, shape in shapes.items()
        }
        start = blocks.layer(index)
        for entry in block_config.changed(blocks.checkpoint.config):
            for path in block_config.sparse_tensors(entry, hidden, mlp.width):
                tensors.pop(start + path, None)
        tensors |= blocks.restored(index, replace(mlp, **parts))
    return tensors


def _work(job: _Job) -> Work:
    checkpoint = job.blocks.checkpoint
    first = job.blocks.dense[0]
    hidden = job.blocks.mlp(first).down.shape[0]
    layer = 8 * sum(checkpoint.tensors[n].numel for n in job.blocks.names(first))
    streams = 3 * 4 * job.calibration.tokens * hidden
    return Work(
        identity("fold", checkpoint, job.calibration.identity),
        lambda work, progress: _calibrate(job, work, progress),
        total=max(job.blocks.dense) + 1,
        peak_memory=layer + streams + fit_nbytes(hidden, job.width),
        check=lambda: job.calibration.require(checkpoint),
    )


def _calibrate(job: _Job, work: Work, progress: Progress) -> None:
    from surgery.calibration.install import fit_layers, read_text

    reading = read_text(job.blocks, job.calibration, work)
    fit_layers(reading, job.blocks.dense, work, progress, lambda fitting: _fit(job, fitting, work))


def _fit(job: _Job, fitting: Fitting, work: Work) -> None:
    """Fold a layer and fit `down` on what it computes then."""
    from surgery.fitting import measures
    from surgery.fitting.cross_validation import validated
    from surgery.fitting.fold import balanced, constant_direction, deviation, folded
    from surgery.fitting.neurons import Neurons
    from surgery.fitting.thresholds import rounded

    rows, index = fitting.rows, fitting.index
    neurons = Neurons.at(job.blocks, index, fitting.layer.device)
    direction = None if job.blocks.mlp(index).biased else constant_direction(rows)
    off = 0.0 if direction is None else deviation(direction, rows)
    if off > LIMIT:
        raise SurgeryError(
            f"the inputs of the MLP of layer {index} hold no constant: v·x is 1 ± {off:.3f}, and "
            f"{LIMIT} is the limit",
            "keep the form with code, or calibrate on more text with --tokens",
        )
    plain = rounded(
        folded(balanced(neurons, rows), direction, job.width), job.blocks.mlp(index).up.dtype
    )
    fitted, errors = measures.better(plain, validated(plain, rows)[0], rows)
    zeros = measures.sparsity(fitted, rows, rows.fitted, len(neurons.up))
    work.note(str(index), measures.figures(**errors, zeros=zeros, deviation=off))
    for name in ("gate", "up", "down", "gate_bias", "up_bias", "down_bias"):
        if work.promised(f"{index}.{name}"):
            work.put(f"{index}.{name}", getattr(fitted, name))


OPERATION = Operation(
    name="fold",
    function=fold,
    summary="Turn a relufied model with code into a stock one.",
    done=lambda p, where: f"the custom-code block of {where} became plain neurons",
    why="A model without code of its own loads anywhere that its class does.",
    limits="The constant that its always-open neurons rest on holds within a few percent.",
    suffix=lambda p: "stock",
    makes_zeros=True,
    remedies=lambda p: OWN_TEXT[:2],
)

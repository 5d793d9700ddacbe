"""Relufication: the MLP's activation becomes one that gives exact zeros, and the MLP is repaired on
calibration text.

The published way (ReLU Strikes Back, Mirzadeh et al. 2023, arXiv 2310.04564) swaps the activation
and trains for billions of tokens. The swap alone ruins a SiLU or GELU model; a refit of `down_proj`
(repair.py) brings most of it back.

What stock transformers can compute is written as a stock model: ReLU and ReLU² are a config field,
shifted ReLU is ReLU with a bias of the gate where the family has one. Everything else travels with
its code (surgery/blocks).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from surgery.blocks import block_config
from surgery.blocks.custom_code import with_blocks
from surgery.blocks.preconditions import bypass_rank, require_plain, require_whole
from surgery.calibration.settings import Calibration
from surgery.checkpoint import Checkpoint, LazyTensor, Progress, Step, Work, constant
from surgery.checkpoint.edit import config_with
from surgery.errors import SurgeryError, UsageError
from surgery.families import Blocks, Mlp, locate
from surgery.fitting.sizes import fit_nbytes

if TYPE_CHECKING:
    from torch import Tensor

    from surgery.calibration.data import Sample
    from surgery.calibration.walk import Layer, Walk
    from surgery.fitting.repair import Neurons, Rows

REPAIRS = ("none", "ridge", "reconstruct")
ALLOCATIONS = ("uniform", "greedy")
LEVELS = (
    0.3,
    0.4,
    0.5,
    0.55,
    0.6,
    0.65,
    0.7,
    0.75,
    0.8,
    0.85,
    0.9,
    0.95,
)  # sparsities that a layer may be given
ALLOCATION_TOKENS = 8192


@dataclass(frozen=True, kw_only=True, slots=True)
class Swap:
    """A published activation: a rule of surgery/blocks/sparse_mlp.py, and the function in it ("":
    the source's own).
    """

    rule: str
    act: str
    sparsity: float | None = None  # by default; None: what threshold 0 gives
    paper: str


ACTIVATIONS: dict[str, Swap] = {
    "relu": Swap(rule="plain", act="relu", paper="ReLU Strikes Back, arXiv 2310.04564"),
    "relu2": Swap(rule="plain", act="relu2", paper="Primer, arXiv 2109.08668"),
    "shifted": Swap(
        rule="shifted", act="relu", sparsity=0.8, paper="ReLU Strikes Back, arXiv 2310.04564"
    ),
    "fatrelu": Swap(rule="fatrelu", act="relu", sparsity=0.8, paper="ProSparse, arXiv 2402.13516"),
    "drelu": Swap(rule="drelu", act="relu", paper="TurboSparse, arXiv 2406.05955"),
    "cats": Swap(rule="cats", act="", sparsity=0.65, paper="CATS, arXiv 2404.08763"),
    "teal": Swap(rule="teal", act="", sparsity=0.7, paper="TEAL, arXiv 2408.14690"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Job:
    """What is to be done, checked: the same for every layer."""

    blocks: Blocks
    swap: Swap
    act: str
    layers: tuple[int, ...]
    native: bool  # stock transformers can compute it
    shifts: bool  # natively, by a bias of the gate
    sparsity: float | None
    fixed: Mapping[int, float]  # the threshold of each layer, 0 where it is chosen on data
    per_neuron: bool
    allocation: str
    source_act: str
    norms: tuple[str, ...]  # followed by a ReLU
    repair: str
    bypass: int  # its rank
    calibration: Calibration

    @property
    def thresholds(self) -> tuple[str, ...]:
        """The thresholds that a layer has."""
        return {"plain": (), "drelu": ("threshold", "threshold_up")}.get(
            self.swap.rule, ("threshold",)
        )

    @property
    def needs_data(self) -> bool:
        return self.repair != "none" or (bool(self.thresholds) and self.sparsity is not None)

    @property
    def turns(self) -> bool:
        """Whether neurons may take the other sign, which is free and decides what a ReLU of `up`
        keeps.
        """
        return self.swap.rule == "drelu" and self.repair != "none"

    @property
    def fitted(self) -> tuple[str, ...]:
        """The parts of an MLP that the repair changes."""
        gate = ("gate",) if self.blocks.family.gated else ()
        ridge = ("up", "down") if self.turns else ("down",)
        return {"none": (), "ridge": ridge, "reconstruct": (*gate, "up", "down")}[self.repair]

    @property
    def biased(self) -> bool:
        """Whether the repair also fits a bias of the output."""
        return self.repair != "none" and not (self.native and not self.shifts)

    @property
    def entry(self) -> dict[str, Any]:
        return block_config.sparse_entry(
            self.blocks.family,
            self.layers,
            rule=self.swap.rule,
            activation=self.act,
            per_neuron=self.per_neuron,
            correction=self.biased,
            bypass=self.bypass,
            relu_after=self.norms,
        )


def relufy(
    checkpoint: Checkpoint,
    *,
    activation: str = "relu",
    sparsity: float | None = None,
    threshold: float | Sequence[float] | None = None,
    per_neuron: bool = False,
    allocation: str = "uniform",
    stage: int = 1,
    repair: str = "ridge",
    bypass: int | str = 0,
    layers: Collection[int] | None = None,
    calibration: Calibration | Mapping[str, Any] | None = None,
) -> Checkpoint:
    """The model with another activation in its MLPs.

    Args:
        activation: a key of ACTIVATIONS.
        sparsity: the fraction of exact zeros that thresholds are chosen for, on the calibration
            text, layer by layer.
        threshold: instead, one for all layers or one for each that is converted, in their order (of
            the gate; "cats": of |act(gate)|; "teal": of |product|). `analysis.stored` has those of
            a source that was analysed.
        per_neuron: a threshold for each neuron instead of one for each layer.
        allocation: "uniform": `sparsity` in every layer; "greedy": on average, and more of it where
            it costs least.
        stage: 2 puts a ReLU after the norms that attention and the MLP read, too.
        repair: "none", "ridge" (refit down_proj in closed form) or "reconstruct" (optimise gate, up
            and down as well).
        bypass: the rank of a linear map from the MLP's input to its output that the repair fits as
            well, or "full". Read for every token, and with code.
        layers: default all.
        calibration: what the thresholds and the repair are fitted on; see `Calibration`.

    Raises SurgeryError where the activation is already that, or the family cannot have it.
    """
    job = _check(
        checkpoint,
        activation,
        sparsity,
        threshold,
        per_neuron,
        allocation,
        stage,
        repair,
        bypass,
        layers,
        Calibration.of(calibration),
    )
    work = _work(checkpoint, job) if job.needs_data else None
    parameters: dict[str, Any] = {"activation": activation, "repair": repair}
    parameters |= {} if job.sparsity is None else {"sparsity": job.sparsity}
    parameters |= (
        {}
        if threshold is None
        else {"threshold": threshold if isinstance(threshold, float | int) else list(threshold)}
    )
    parameters |= {"per_neuron": True} if per_neuron else {}
    parameters |= {"allocation": allocation} if allocation != "uniform" else {}
    parameters |= {"stage": 2} if stage == 2 else {}
    parameters |= {"bypass": job.bypass} if job.bypass else {}
    parameters |= {} if layers is None else {"layers": list(job.layers)}
    parameters |= (
        {"calibration": job.calibration.as_dict()} if work and job.calibration.as_dict() else {}
    )
    step = Step(
        operation="relufy",
        parameters=parameters,
        exact=False,
        layers=job.layers,
        notes=_notes(job, activation),
        work=work,
    )
    tensors = dict(checkpoint.tensors)
    for index in job.layers:
        tensors |= _converted(job, index, work)
    if job.native:
        return checkpoint.replace(
            step=step, config=_native_config(checkpoint, job), tensors=tensors
        )
    return checkpoint.replace(step=step, tensors=tensors, **with_blocks(checkpoint, [job.entry]))


# --- what is asked for ----------------------------------------------------------------------------


def _check(
    checkpoint: Checkpoint,
    activation: str,
    sparsity: float | None,
    threshold: float | Sequence[float] | None,
    per_neuron: bool,
    allocation: str,
    stage: int,
    repair: str,
    bypass: int | str,
    layers: Collection[int] | None,
    calibration: Calibration,
) -> _Job:
    _check_options(activation, sparsity, threshold, per_neuron, allocation, stage, repair)
    require_plain(checkpoint)
    blocks, swap = locate(checkpoint), ACTIVATIONS[activation]
    require_whole(blocks)
    family = blocks.family
    if family.is_moe and (repair != "none" or swap.rule != "plain"):
        raise SurgeryError(
            f"{family.model_type} is a mixture of experts: only relu and relu2 without repair are known for it",
            "relufy the dense model first, then upcycle; or give --repair none",
        )
    if not family.activation_key and swap.rule == "plain" and repair == "none":
        raise SurgeryError(
            f"the activation of {family.model_type} is fixed in its code, no config field changes it",
            "`surgery families` lists where relufy works",
        )
    before = blocks.activation
    if swap.rule == "plain" and before == swap.act and stage == 1:
        raise SurgeryError(
            f"the activation of this {family.model_type} is {before} already",
            "there is nothing to do",
        )
    if stage == 2 and not family.pre_norms:
        raise SurgeryError(
            f"{family.model_type} has no norm before attention and the MLP", "leave --stage 2 out"
        )
    chosen = tuple(sorted(set(range(blocks.count) if layers is None else layers)))
    if not chosen or chosen[0] < 0 or chosen[-1] >= blocks.count:
        raise UsageError(
            f"layers {list(chosen)} of a model with {blocks.count}",
            f"layers are 0 to {blocks.count - 1}",
        )
    rank = bypass_rank(bypass, blocks, repair)
    whole = (
        len(chosen) == blocks.count
        and stage == 1
        and not rank
        and not checkpoint.config.get("surgery_blocks")
    )
    shifts = whole and swap.rule == "shifted" and bool(family.bias_key) and not blocks.mlp(0).biased
    native = whole and ((swap.rule == "plain" and bool(family.activation_key)) or shifts)
    if threshold is None and sparsity is None:
        sparsity = swap.sparsity
    job = _Job(
        blocks=blocks,
        swap=swap,
        act=swap.act or before,
        layers=chosen,
        native=native,
        shifts=shifts,
        sparsity=sparsity,
        fixed=_fixed(threshold, chosen),
        per_neuron=per_neuron,
        allocation=allocation,
        source_act=before,
        repair=repair,
        bypass=rank,
        calibration=calibration,
        norms=family.pre_norms if stage == 2 else (),
    )
    if not native or job.needs_data:
        entry = job.entry  # raises where no block can take the MLP's place
        if not native:
            block_config.config_changes(
                checkpoint.config, [entry]
            )  # raises where no code can go along
    return job


def _fixed(threshold: float | Sequence[float] | None, layers: Sequence[int]) -> dict[int, float]:
    if threshold is None or isinstance(threshold, float | int):
        return dict.fromkeys(layers, float(threshold or 0))
    if len(threshold) != len(layers):
        raise UsageError(
            f"{len(threshold)} thresholds for {len(layers)} layers",
            "give one, or one for each layer converted",
        )
    return dict(zip(layers, map(float, threshold), strict=True))


def _check_options(
    activation: str,
    sparsity: float | None,
    threshold: float | Sequence[float] | None,
    per_neuron: bool,
    allocation: str,
    stage: int,
    repair: str,
) -> None:
    if activation not in ACTIVATIONS:
        raise UsageError(f"unknown activation {activation!r}", f"one of: {', '.join(ACTIVATIONS)}")
    if allocation not in ALLOCATIONS:
        raise UsageError(f"unknown allocation {allocation!r}", f"one of: {', '.join(ALLOCATIONS)}")
    if repair not in REPAIRS:
        raise UsageError(f"unknown repair {repair!r}", f"one of: {', '.join(REPAIRS)}")
    if stage not in (1, 2):
        raise UsageError(f"stage {stage}", "ReLU Strikes Back has stages 1 and 2")
    if sparsity is not None and threshold is not None:
        raise UsageError(
            f"both a sparsity ({sparsity}) and a threshold ({threshold})", "give one of them"
        )
    if sparsity is not None and not 0 < sparsity < 1:
        raise UsageError(f"a sparsity of {sparsity}", "give the fraction of zeros, like 0.8")
    if ACTIVATIONS[activation].rule == "plain" and (
        sparsity is not None or threshold is not None or per_neuron
    ):
        raise UsageError(
            f"{activation} has no threshold to choose",
            "take --activation shifted or fatrelu for a sparsity",
        )


def _notes(job: _Job, activation: str) -> tuple[str, ...]:
    weights = {
        "none": "the weights are the source's own, so quality drops until it is trained",
        "ridge": "down_proj was refitted on calibration text",
        "reconstruct": "gate, up and down were optimised on calibration text",
    }[job.repair]
    notes = [f"{job.source_act} became {activation}; {weights}"]
    if job.native and not job.shifts:
        notes.append(
            "runtimes that hard-code the activation (llama.cpp, vLLM for llama and qwen) ignore this field or refuse it"
        )
    elif not job.native:
        notes.append(
            "loads with trust_remote_code=True: stock transformers cannot compute it, its code goes along; "
            "other runtimes (llama.cpp, vLLM) cannot run it"
        )
    if job.repair != "none" and not job.bypass:
        notes.append(
            "--bypass full repairs much more: a linear map beside the MLP, whose code travels with the checkpoint"
        )
    return tuple(notes)


# --- what is planned ------------------------------------------------------------------------------


def _native_config(checkpoint: Checkpoint, job: _Job) -> dict[str, Any]:
    family = job.blocks.family
    changes: dict[str, Any] = {family.activation_key: job.act}
    return config_with(checkpoint, changes | ({str(family.bias_key): True} if job.shifts else {}))


def _converted(job: _Job, index: int, work: Work | None) -> dict[str, LazyTensor]:
    """The tensors of a layer's MLP that differ from the source's."""
    if work is None and job.native and not job.shifts:
        return {}
    blocks, mlp = job.blocks, job.blocks.mlp(index)

    def made(name: str, dtype: str, shape: tuple[int, ...], otherwise: float) -> LazyTensor:
        return (
            work.promise(f"{index}.{name}", dtype, shape)
            if work
            else constant(otherwise, shape, dtype)
        )

    fitted: dict[str, Any] = {
        part: made(part, t.dtype, t.shape, 0) for part in job.fitted if (t := getattr(mlp, part))
    }
    mlp = dataclasses.replace(mlp, **fitted)
    hidden, width = mlp.down.shape
    if job.shifts:
        mlp = dataclasses.replace(
            mlp,
            gate_bias=made("gate_bias", mlp.up.dtype, (width,), -job.fixed[index]),
            up_bias=made("up_bias", mlp.up.dtype, (width,), 0)
            if "up" in job.fitted
            else constant(0.0, (width,), mlp.up.dtype),
            down_bias=made("correction", mlp.up.dtype, (hidden,), 0)
            if job.biased
            else constant(0.0, (hidden,), mlp.up.dtype),
        )
    out = blocks.restored(index, mlp) if fitted or job.shifts else {}
    if not job.native:
        for path, shape in block_config.sparse_tensors(job.entry, hidden, width).items():
            name = path.rpartition(".")[2]
            dtype = "F32" if "threshold" in name else mlp.down.dtype
            out[blocks.layer(index) + path] = made(name, dtype, shape, job.fixed[index])
    return out


def _work(checkpoint: Checkpoint, job: _Job) -> Work:
    parts = dataclasses.asdict(dataclasses.replace(job, blocks=None, calibration=None))  # type: ignore[arg-type]
    source = "\n".join(f"{n} {t.identity()}" for n, t in sorted(checkpoint.tensors.items()))
    hidden, width = job.blocks.mlp(0).down.shape
    tokens = job.calibration.tokens
    layer = 4 * sum(checkpoint.tensors[n].numel for n in job.blocks.names(0))
    copies = {"none": 1, "ridge": 2, "reconstruct": 5}[job.repair]
    peak = layer * copies + 3 * 4 * tokens * hidden + fit_nbytes(hidden, width, job.bypass)
    return Work(
        f"relufy {parts} {job.calibration.identity}\n{source}",
        lambda work, progress: _calibrate(checkpoint, job, work, progress),
        total=max(job.layers) + 1,
        peak_memory=peak,
    )


# --- what is computed -----------------------------------------------------------------------------


def _calibrate(checkpoint: Checkpoint, job: _Job, work: Work, progress: Progress) -> None:
    """Walk the model, converting each layer on what the converted ones before it give."""
    from surgery.calibration.install import convert_layers

    def first(sample: Sample) -> None:
        if (
            job.allocation == "greedy"
            and job.sparsity is not None
            and "allocation" not in work.report
        ):
            work.note("allocation", _allocate(checkpoint, job, sample))

    convert_layers(
        checkpoint,
        job.calibration,
        job.layers,
        work,
        progress,
        first=first,
        fit=lambda layer, sample, source: _fit(layer, job, sample, source, work),
        install=lambda layer, walk: _install(layer, job, walk, work),
    )


def _allocate(checkpoint: Checkpoint, job: _Job, sample: Sample) -> dict[str, float]:
    """A sparsity for each layer, by a walk of the source over the first tokens of the sample."""
    from surgery.calibration.install import observe
    from surgery.fitting import repair

    first = dataclasses.replace(
        sample, input_ids=sample.input_ids[: max(1, ALLOCATION_TOKENS // sample.input_ids.shape[1])]
    )
    walk, costs = job.calibration.walk(checkpoint, first.input_ids), {}
    for layer in walk:
        if layer.index in job.layers:
            rows = observe(layer, job.blocks, first, list(layer.outputs()), feedback=0.0)
            costs[layer.index] = repair.cost(
                _swapped(layer, job, rows), job.source_act, rows, LEVELS, job.bypass
            )
        layer.run()
    found = repair.allocate(costs, LEVELS, job.sparsity or 0.0)
    return {str(i): round(s, 4) for i, s in found.items()}


def _swapped(layer: Layer, job: _Job, rows: Rows) -> Neurons:
    """The layer's MLP with the activation that it is to have, thresholds at 0."""
    from surgery.fitting import repair

    neurons = repair.Neurons.of(
        job.blocks.mlp(layer.index), rule=job.swap.rule, act=job.act, device=layer.device
    )
    return repair.turned(neurons, rows) if job.turns else neurons


def _fit(layer: Layer, job: _Job, sample: Sample, source: Sequence[Tensor], work: Work) -> None:
    """Choose the thresholds of a layer and repair it."""
    from surgery.calibration.install import observe
    from surgery.fitting import repair
    from surgery.fitting.reconstruct import reconstruct

    index = layer.index
    rows = observe(layer, job.blocks, sample, source)
    neurons = _swapped(layer, job, rows)
    sparsity = work.report.get("allocation", {}).get(str(index), job.sparsity)
    if sparsity is not None:
        neurons = repair.thresholded(neurons, rows, sparsity, job.per_neuron)
    elif job.thresholds:
        neurons = dataclasses.replace(
            neurons, **{n: neurons.up.new_full((1,), job.fixed[index]) for n in job.thresholds}
        )
    if job.shifts:
        neurons = repair.rounded(neurons, job.blocks.mlp(index).up.dtype)
    before = repair.error(neurons, rows, rows.fitted)
    fitted = neurons
    if job.repair == "ridge":
        fitted = repair.ridge(neurons, rows, bias=job.biased, rank=job.bypass)
    elif job.repair == "reconstruct":
        fitted = reconstruct(
            neurons,
            rows,
            sparsity=sparsity,
            per_neuron=job.per_neuron,
            bias=job.biased,
            biases=job.shifts,
            rank=job.bypass,
        )
    after = repair.error(fitted, rows, rows.fitted)
    if after > before:  # on rows that were not fitted on: a repair that makes it worse is none
        fitted, after = neurons, before
    work.note(
        str(index),
        repair.figures(
            error=before, repaired=after, zeros=repair.sparsity(fitted, rows, rows.fitted)
        ),
    )
    _keep(work, job, index, fitted)


def _keep(work: Work, job: _Job, index: int, neurons: Neurons) -> None:
    """Put what was promised of a layer."""
    values = {
        "gate": neurons.gate,
        "up": neurons.up,
        "down": neurons.down,
        "threshold": neurons.threshold,
        "threshold_up": neurons.threshold_up,
    }
    values["correction"] = (
        neurons.up.new_zeros(len(neurons.down))
        if neurons.correction is None
        else neurons.correction
    )
    values |= neurons.bypass(job.bypass)
    values["up_bias"] = (
        neurons.up.new_zeros(len(neurons.up)) if neurons.up_bias is None else neurons.up_bias
    )
    if neurons.threshold is not None:
        values["gate_bias"] = (
            0 if neurons.gate_bias is None else neurons.gate_bias
        ) - neurons.threshold.expand(len(neurons.up))
    for name, value in values.items():
        if value is not None and work.promised(f"{index}.{name}"):
            work.put(f"{index}.{name}", value)


def _install(layer: Layer, job: _Job, walk: Walk, work: Work) -> None:
    """Put the converted MLP into the layer, as it will be on the disk."""
    import torch

    from surgery.blocks.sparse_mlp import SparseMLP

    family, index = job.blocks.family, layer.index
    entry = job.entry
    block = SparseMLP(getattr(layer.module, family.mlp), entry)
    for name in job.thresholds:
        source = f"{index}.{name}" if work.promised(f"{index}.{name}") else f"{index}.gate_bias"
        value = (
            work.get(source).float() if work.promised(source) else torch.tensor([job.fixed[index]])
        )
        setattr(block, name, (-value if source.endswith("bias") else value).to(layer.device))
    for name in ("correction", "bypass_in", "bypass_out"):
        if getattr(block, name) is not None:
            value = work.get(f"{index}.{name}").to(layer.device, walk.dtype)
            setattr(block, name, torch.nn.Parameter(value, requires_grad=False))
    if work.promised(f"{index}.up_bias"):
        bias = work.get(f"{index}.up_bias").to(layer.device, walk.dtype)
        block.get_submodule(entry["up"]).bias = torch.nn.Parameter(bias, requires_grad=False)
    setattr(layer.module, family.mlp, block)
    for norm in job.norms:
        layer.module.get_submodule(norm).register_forward_hook(
            lambda module, inputs, output: torch.relu(output)
        )
    fitted: dict[str, Any] = {part: work.lazy(f"{index}.{part}") for part in job.fitted}
    mlp = dataclasses.replace(job.blocks.mlp(index), **fitted)
    for path, tensor in job.blocks.restored(index, _weights(mlp)).items():
        weight = layer.module.get_submodule(
            path.removeprefix(job.blocks.layer(index)).rpartition(".")[0]
        ).weight
        weight.data.copy_(tensor.read())


def _weights(mlp: Mlp) -> Mlp:
    return dataclasses.replace(mlp, gate_bias=None, up_bias=None, down_bias=None)

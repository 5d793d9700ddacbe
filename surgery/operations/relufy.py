"""Relufication: the MLP's activation becomes one that gives exact zeros, and the MLP is repaired.

The published way (ReLU Strikes Back, Mirzadeh et al. 2023, arXiv 2310.04564) swaps the activation
and trains for billions of tokens. The swap alone ruins a SiLU or GELU model; a refit of `down_proj`
on calibration text (fitting/ridge.py) brings most of it back.

What stock transformers can compute is written as a stock model: ReLU and ReLU² are a config field,
shifted ReLU is ReLU with a bias of the gate where the family has one. Everything else is a
custom-code block (blocks/sparse_mlp.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from surgery.blocks import block_config
from surgery.blocks.custom_code import NEEDS_TRUST, with_blocks, with_gathered_mlps
from surgery.blocks.preconditions import (
    bypass_rank,
    chosen_layers,
    require_plain,
    require_whole,
)
from surgery.blocks.rules import ACTIVATIONS, RELU_STRIKES_BACK, Activation
from surgery.calibration.settings import Calibration
from surgery.checkpoint import Checkpoint, LazyTensor, Progress, Step, Work, constant
from surgery.checkpoint.edit import config_with
from surgery.checkpoint.work import identity
from surgery.errors import SurgeryError, UsageError
from surgery.families import Blocks, locate
from surgery.fitting.sizes import fit_nbytes
from surgery.operations.operation import OWN_TEXT, Operation, Parameters, bypass_phrase, hyphenated

if TYPE_CHECKING:
    from surgery.calibration.data import Sample
    from surgery.calibration.install import Fitting
    from surgery.calibration.walk import Layer
    from surgery.fitting.neurons import Neurons
    from surgery.fitting.rows import Rows

REPAIRS = ("none", "ridge", "reconstruct")
ALLOCATIONS = ("uniform", "greedy")
LEVELS = (0.3, 0.4, 0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95)  # a layer's sparsity
ALLOCATION_TOKENS = 8192
COPIES = {"none": 1, "ridge": 2, "reconstruct": 5}  # of a layer in fp32, that a repair holds


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What `relufy` is asked for; its docstring explains each."""

    activation: str
    sparsity: float | None
    threshold: float | Sequence[float] | None
    per_neuron: bool
    allocation: str
    stage: int
    repair: str
    bypass: int | str
    layers: Collection[int] | None
    calibration: Calibration

    def __post_init__(self) -> None:
        for what, value, known in (
            ("activation", self.activation, ACTIVATIONS),
            ("allocation", self.allocation, ALLOCATIONS),
            ("repair", self.repair, REPAIRS),
        ):
            if value not in known:
                raise UsageError(f"unknown {what} {value!r}", f"one of: {', '.join(known)}")
        if self.stage not in (1, 2):
            raise UsageError(f"stage {self.stage}", "ReLU Strikes Back has stages 1 and 2")
        self._check_thresholds()

    def _check_thresholds(self) -> None:
        sparsity, threshold = self.sparsity, self.threshold
        if sparsity is not None and threshold is not None:
            both = f"both a sparsity ({sparsity}) and a threshold ({threshold})"
            raise UsageError(both, "give one of them")
        if sparsity is not None and not 0 < sparsity < 1:
            raise UsageError(f"a sparsity of {sparsity}", "give the fraction of zeros, like 0.8")
        chosen = sparsity is not None or threshold is not None or self.per_neuron
        if self.swap.how.plain and chosen:
            raise UsageError(
                f"{self.activation} has no threshold to choose",
                "take --activation shifted or fatrelu for a sparsity",
            )

    @property
    def swap(self) -> Activation:
        return ACTIVATIONS[self.activation]

    @property
    def wanted(self) -> float | None:
        """The sparsity that thresholds are chosen for; None where they are given."""
        if self.threshold is None and self.sparsity is None:
            return self.swap.sparsity
        return self.sparsity


@dataclass(frozen=True, kw_only=True, slots=True)
class _Job:
    """What is to be done, checked against the checkpoint: the same for every layer."""

    blocks: Blocks
    options: Options
    layers: tuple[int, ...]
    rank: int  # of the bypass
    native: bool  # stock transformers can compute it
    shifts: bool  # natively, by a bias of the gate
    fixed: Mapping[int, float]  # the threshold of each layer, 0 where it is chosen on data

    @property
    def act(self) -> str:
        """The function in the rule, a name of ACT2FN."""
        return self.options.swap.act or self.blocks.activation

    @property
    def norms(self) -> tuple[str, ...]:
        """The norms that a ReLU follows, by path in a decoder layer."""
        return self.blocks.family.pre_norms if self.options.stage == 2 else ()

    @property
    def thresholds(self) -> tuple[str, ...]:
        return self.options.swap.how.thresholds

    @property
    def needs_data(self) -> bool:
        chooses = bool(self.thresholds) and self.options.wanted is not None
        return self.options.repair != "none" or chooses

    @property
    def turns(self) -> bool:
        """Whether neurons may change their sign.

        That is free, and decides what a ReLU of `up` keeps.
        """
        return self.options.swap.how.cuts == "both" and self.options.repair != "none"

    @property
    def fitted(self) -> tuple[str, ...]:
        """The parts of an MLP that the repair changes."""
        gate = ("gate",) if self.blocks.family.gated else ()
        ridge = ("up", "down") if self.turns else ("down",)
        found = {"none": (), "ridge": ridge, "reconstruct": (*gate, "up", "down")}
        return found[self.options.repair]

    @property
    def biased(self) -> bool:
        """Whether the repair also fits a bias of the output."""
        return self.options.repair != "none" and not (self.native and not self.shifts)

    @property
    def entry(self) -> dict[str, Any]:
        """The `surgery_blocks` entry of the layers. Raises SurgeryError where no block fits."""
        options = block_config.Sparse(
            rule=self.options.swap.rule,
            activation=self.act,
            per_neuron=self.options.per_neuron,
            correction=self.biased,
            bypass=self.rank,
            relu_after=self.norms,
        )
        return block_config.sparse_entry(self.blocks.family, self.layers, options)


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
    """Return the model with another activation in its MLPs.

    Args:
        activation: a key of ACTIVATIONS (blocks/rules.py).
        sparsity: the fraction of exact zeros that thresholds are chosen for, on the calibration
            text, layer by layer.
        threshold: instead, one for all layers or one for each that is converted, in their order (of
            the gate; "cats": of |act(gate)|; "teal": of |product|).
            `surgery.analysis.saved_thresholds` has those of a source that was analysed.
        per_neuron: choose a threshold for each neuron instead of one for each layer.
        allocation: "uniform": `sparsity` in every layer; "greedy": on average, and more of it where
            it costs least.
        stage: 2 puts a ReLU after the norms that attention and the MLP read, too.
        repair: "none", "ridge" (refit down_proj in closed form) or "reconstruct" (optimise gate, up
            and down as well).
        bypass: the rank of a linear map from the MLP's input to its output that the repair fits as
            well, or "full". It is read for every token, and is computed by custom code.
        layers: default all.
        calibration: what the thresholds and the repair are fitted on; see `Calibration`.

    Raises SurgeryError where the activation is already that, or the family cannot have it.

    Example:
        >>> source = surgery.open("meta-llama/Llama-2-7b-hf")
        >>> output = surgery.relufy(source, activation="shifted", sparsity=0.8)
    """
    options = Options(
        activation=activation,
        sparsity=sparsity,
        threshold=threshold,
        per_neuron=per_neuron,
        allocation=allocation,
        stage=stage,
        repair=repair,
        bypass=bypass,
        layers=layers,
        calibration=Calibration.of(calibration),
    )
    job = _check(checkpoint, options)
    work = _work(job) if job.needs_data else None
    tensors = _without_activations(job)
    for index in job.layers:
        tensors |= _converted(job, index, work)
    step = Step(
        operation="relufy",
        parameters=_parameters(job),
        exact=False,
        layers=job.layers,
        notes=_notes(job),
        advice=_advice(job),
        work=work,
    )
    checkpoint = job.blocks.checkpoint
    changes = _native_changes(job) if job.native else with_blocks(checkpoint, [job.entry])
    return checkpoint.replace(step=step, tensors=tensors, **changes)


def _parameters(job: _Job) -> dict[str, Any]:
    """Return what makes the same again, without what is as by default."""
    o = job.options
    threshold = list(o.threshold) if isinstance(o.threshold, Sequence) else o.threshold
    given = {
        "sparsity": o.wanted,
        "threshold": threshold,
        "per_neuron": o.per_neuron or None,
        "allocation": o.allocation if o.allocation != "uniform" else None,
        "stage": o.stage if o.stage == 2 else None,
        "bypass": job.rank or None,
        "layers": None if o.layers is None else list(job.layers),
        "calibration": (job.needs_data and o.calibration.as_dict()) or None,
    }
    kept = {k: v for k, v in given.items() if v is not None}
    return {"activation": o.activation, "repair": o.repair, **kept}


# --- what is asked for ----------------------------------------------------------------------------


def _check(checkpoint: Checkpoint, options: Options) -> _Job:
    require_plain(checkpoint)
    blocks = locate(checkpoint)
    require_whole(blocks)
    _require_possible(blocks, options)
    chosen = chosen_layers(blocks, options.layers)
    rank = bypass_rank(options.bypass, blocks, options.repair)
    every = chosen == chosen_layers(blocks, None) and not checkpoint.config.get("surgery_blocks")
    stock = every and options.stage == 1 and not rank
    family, swap = blocks.family, options.swap
    biased = bool(family.bias_key) and not blocks.mlp(chosen[0]).biased
    shifts = stock and swap.rule == "shifted" and biased
    native = shifts or (stock and swap.how.plain and bool(family.activation_key))
    if family.loose and not native:  # a block needs a module whose place it can take
        return _check(with_gathered_mlps(checkpoint), options)
    job = _Job(
        blocks=blocks,
        options=options,
        layers=chosen,
        rank=rank,
        native=native,
        shifts=shifts,
        fixed=_fixed(options.threshold, chosen),
    )
    if not native or job.needs_data:
        entry = job.entry  # raises where no block can take the MLP's place
        if not native:
            block_config.config_changes(checkpoint.config, [entry])  # raises where no code can go
    return job


def _require_possible(blocks: Blocks, options: Options) -> None:
    family, swap, plain = blocks.family, options.swap, options.swap.how.plain
    if family.is_moe and (options.repair != "none" or not plain):
        raise SurgeryError(
            f"this model is a mixture already: of the experts of {family.model_type} only relu and "
            "relu2 without repair are known",
            "relufy the dense model first, then upcycle; or give --repair none",
        )
    if family.is_moe and not family.activation_key:
        raise SurgeryError(
            f"the activation of {family.model_type} is fixed in its code, and no config field "
            "changes it",
            "`surgery families` lists where relufy works",
        )
    if plain and blocks.activation == swap.act and options.stage == 1:
        raise SurgeryError(
            f"the activation of this {family.model_type} is {swap.act} already",
            "there is nothing to do",
        )
    if options.stage == 2 and not family.pre_norms:
        raise SurgeryError(
            f"{family.model_type} has no norm before attention and the MLP", "leave --stage 2 out"
        )


def _fixed(threshold: float | Sequence[float] | None, layers: Sequence[int]) -> dict[int, float]:
    if threshold is None or isinstance(threshold, float | int):
        return dict.fromkeys(layers, float(threshold or 0))
    if len(threshold) != len(layers):
        raise UsageError(
            f"{len(threshold)} thresholds for {len(layers)} layers",
            "give one, or one for each layer converted",
        )
    return dict(zip(layers, map(float, threshold), strict=True))


def _notes(job: _Job) -> tuple[str, ...]:
    weights = {
        "none": "the weights are the source's own, so quality drops until it is trained",
        "ridge": "down_proj was refitted on calibration text",
        "reconstruct": "gate, up and down were optimised on calibration text",
    }[job.options.repair]
    notes = [f"{job.blocks.activation} became {job.options.activation}; {weights}"]
    if job.native and not job.shifts:
        notes.append(
            "runtimes that hard-code the activation (llama.cpp, vLLM for llama and qwen) ignore "
            "this field or refuse it"
        )
    elif not job.native:
        notes.append(NEEDS_TRUST)
    return tuple(notes)


def _advice(job: _Job) -> tuple[str, ...]:
    if job.options.repair == "none" or job.rank:
        return ()
    return (
        "--bypass full repairs much more: a linear map beside the MLP, computed by custom code",
    )


# --- what is planned ------------------------------------------------------------------------------


def _native_changes(job: _Job) -> dict[str, Any]:
    family = job.blocks.family
    changes: dict[str, Any] = {family.activation_key: job.act}
    changes |= {str(family.bias_key): True} if job.shifts else {}
    return {"config": config_with(job.blocks.checkpoint, changes)}


def _without_activations(job: _Job) -> dict[str, LazyTensor]:
    """Return the source's tensors, without the weights of activations that a stock class drops."""
    blocks = job.blocks
    if not (job.native and blocks.family.own_activation):
        return dict(blocks.checkpoint.tensors)
    gone = tuple(f"{blocks.layer(i)}{blocks.family.own_activation}." for i in job.layers)
    return {n: t for n, t in blocks.checkpoint.tensors.items() if not n.startswith(gone)}


def _converted(job: _Job, index: int, work: Work | None) -> dict[str, LazyTensor]:
    """Return the tensors of a layer's MLP that differ from the source's."""
    if work is None and job.native and not job.shifts:
        return {}
    blocks, mlp = job.blocks, job.blocks.mlp(index)
    hidden, width = mlp.down.shape

    def made(name: str, dtype: str, shape: tuple[int, ...], otherwise: float) -> LazyTensor:
        if work is None:
            return constant(otherwise, shape, dtype)
        return work.promise(f"{index}.{name}", dtype, shape)

    fitted: dict[str, Any] = {
        part: made(part, t.dtype, t.shape, 0) for part in job.fitted if (t := getattr(mlp, part))
    }
    if job.shifts:
        dtype, zeros = mlp.up.dtype, constant(0.0, (width,), mlp.up.dtype)
        fitted["gate_bias"] = made("gate_bias", dtype, (width,), -job.fixed[index])
        moves = "up" in job.fitted
        fitted["up_bias"] = made("up_bias", dtype, (width,), 0) if moves else zeros
        correction = constant(0.0, (hidden,), dtype)
        fitted["down_bias"] = made("correction", dtype, (hidden,), 0) if job.biased else correction
    out = blocks.restored(index, dataclasses.replace(mlp, **fitted)) if fitted else {}
    if not job.native:
        for path, shape in block_config.sparse_tensors(job.entry, hidden, width).items():
            name = path.rpartition(".")[2]
            dtype = "F32" if "threshold" in name else mlp.down.dtype
            out[blocks.layer(index) + path] = made(name, dtype, shape, job.fixed[index])
    return out


def _work(job: _Job) -> Work:
    checkpoint, calibration = job.blocks.checkpoint, job.options.calibration
    parts = dataclasses.asdict(dataclasses.replace(job.options, calibration=None))  # type: ignore[arg-type]
    hidden, width = job.blocks.mlp(job.layers[0]).down.shape
    layer = 4 * sum(checkpoint.tensors[n].numel for n in job.blocks.names(job.layers[0]))
    streams = 3 * 4 * calibration.tokens * hidden
    peak = layer * COPIES[job.options.repair] + streams + fit_nbytes(hidden, width, job.rank)
    return Work(
        identity("relufy", checkpoint, parts, calibration.identity),
        lambda work, progress: _calibrate(job, work, progress),
        total=max(job.layers) + 1,
        peak_memory=peak,
        check=lambda: calibration.require(checkpoint),
    )


# --- what is computed -----------------------------------------------------------------------------


def _calibrate(job: _Job, work: Work, progress: Progress) -> None:
    """Walk the model, converting each layer on what the converted ones before it give."""
    from surgery.calibration.install import fit_layers

    def first(sample: Sample) -> None:
        greedy = job.options.allocation == "greedy" and job.options.wanted is not None
        if greedy and "allocation" not in work.report:
            work.note("allocation", _allocate(job, sample))

    fit_layers(
        job.blocks,
        job.options.calibration,
        job.layers,
        work,
        progress,
        fit=lambda fitting: _fit(job, fitting, work),
        first=first,
    )


def _allocate(job: _Job, sample: Sample) -> dict[str, float]:
    """Return a sparsity for each layer, by a walk of the source over the first tokens."""
    from surgery.calibration.install import costs_of_layers
    from surgery.fitting import allocation

    def cost(layer: Layer, rows: Rows) -> list[float]:
        swapped = _swapped(job, layer.index, layer.device, rows)
        return allocation.cost(swapped, job.blocks.activation, rows, LEVELS, job.rank)

    count = max(1, ALLOCATION_TOKENS // sample.input_ids.shape[1])
    some = dataclasses.replace(sample, input_ids=sample.input_ids[:count])
    costs = costs_of_layers(job.blocks, job.options.calibration, some, job.layers, cost)
    found = allocation.allocate(costs, LEVELS, job.options.wanted or 0.0)
    return {str(i): round(s, 4) for i, s in found.items()}


def _swapped(job: _Job, index: int, device: str, rows: Rows) -> Neurons:
    """Return the layer's MLP with the activation that it is to have, thresholds at 0."""
    from surgery.fitting.neurons import Neurons, turned

    mlp, rule = job.blocks.mlp(index), job.options.swap.rule
    neurons = Neurons.of(mlp, rule=rule, act=job.act, device=device)
    return turned(neurons, rows) if job.turns else neurons


def _fit(job: _Job, fitting: Fitting, work: Work) -> None:
    """Choose the thresholds of a layer and repair it."""
    from surgery.fitting import measures

    rows, index = fitting.rows, fitting.index
    sparsity = work.report.get("allocation", {}).get(str(index), job.options.wanted)
    neurons = _swapped(job, index, fitting.layer.device, rows)
    neurons = _thresholded(job, index, neurons, rows, sparsity)
    fitted, errors = measures.better(neurons, _repaired(job, neurons, rows, sparsity), rows)
    zeros = measures.sparsity(fitted, rows, rows.fitted)
    work.note(str(index), measures.figures(**errors, zeros=zeros))
    for name, value in _kept(job, fitted).items():
        if value is not None and work.promised(f"{index}.{name}"):
            work.put(f"{index}.{name}", value)


def _thresholded(
    job: _Job, index: int, neurons: Neurons, rows: Rows, sparsity: float | None
) -> Neurons:
    """Return the neurons with their thresholds, rounded as they will be on the disk."""
    from surgery.fitting.thresholds import rounded, thresholded

    if sparsity is not None:
        neurons = thresholded(neurons, rows, sparsity, job.options.per_neuron)
    elif job.thresholds:
        fixed = neurons.up.new_full((1,), job.fixed[index])
        neurons = dataclasses.replace(neurons, **dict.fromkeys(job.thresholds, fixed))
    return rounded(neurons, job.blocks.mlp(index).up.dtype) if job.shifts else neurons


def _repaired(job: _Job, neurons: Neurons, rows: Rows, sparsity: float | None) -> Neurons:
    from surgery.fitting.reconstruct import Reconstruction, reconstruct
    from surgery.fitting.ridge import ridge

    if job.options.repair == "ridge":
        return ridge(neurons, rows, bias=job.biased, rank=job.rank)
    if job.options.repair == "reconstruct":
        options = Reconstruction(
            sparsity=sparsity,
            per_neuron=job.options.per_neuron,
            bias=job.biased,
            biases=job.shifts,
            rank=job.rank,
        )
        return reconstruct(neurons, rows, options)
    return neurons


def _kept(job: _Job, neurons: Neurons) -> dict[str, Any]:
    """Return what may have been promised of a layer, by name."""
    width, zeros = len(neurons.up), neurons.up.new_zeros
    found = {name: getattr(neurons, name) for name in ("gate", "up", "down", *job.thresholds)}
    correction, up_bias = neurons.correction, neurons.up_bias
    found["correction"] = zeros(len(neurons.down)) if correction is None else correction
    found["up_bias"] = zeros(width) if up_bias is None else up_bias
    if neurons.threshold is not None:
        before = 0 if neurons.gate_bias is None else neurons.gate_bias
        found["gate_bias"] = before - neurons.threshold.expand(width)
    return found | neurons.bypass(job.rank)


# --- the record -----------------------------------------------------------------------------------


def _done(p: Parameters, where: str) -> str:
    zeros = f" at {p['sparsity']:.0%} zeros" if p.get("sparsity") else ""
    repair = {
        "ridge": ", down_proj refitted to what it should give",
        "reconstruct": ", gate, up and down optimised",
    }.get(str(p.get("repair")), ", nothing was repaired")
    return f"{where} got the activation {p['activation']}{zeros}{bypass_phrase(p)}{repair}"


def _suffix(p: Parameters) -> str:
    percent = f"{p['sparsity'] * 100:g}" if "sparsity" in p else ""
    repair = "" if p["repair"] == "none" else p["repair"]
    bypass = f"bypass{p['bypass']}" if p.get("bypass") else ""
    return hyphenated(p["activation"], percent, repair, bypass)


def _beside(source: Checkpoint, output: Checkpoint, p: Parameters) -> dict[str, Checkpoint]:
    """Return the change without its repair."""
    from surgery.proof.quality import plain_swap

    if p.get("repair") == "none":
        return {}
    return {"swap without repair": plain_swap(source, output)}


def _remedies(p: Parameters) -> Sequence[str]:
    bypass = () if p.get("bypass") else ("a linear map beside the MLP: --bypass full",)
    repair = ("a repair: --repair ridge",) if p.get("repair") == "none" else bypass
    return (*repair, *OWN_TEXT)


OPERATION = Operation(
    name="relufy",
    function=relufy,
    summary="Make the MLPs sparse: ReLU and kin, repaired.",
    done=_done,
    why="With an activation that gives exact zeros, most neurons of a token need no rows of "
    "up_proj and down_proj: what is zero need not be read, and reading weights is what decoding spends its "
    "time on.",
    limits="It was not trained after the conversion, and is worse than its source, more so outside "
    "the domains that it was calibrated on. Zeros save time only in a runtime that skips them.",
    suffix=_suffix,
    papers=lambda p: list(dict.fromkeys([RELU_STRIKES_BACK, ACTIVATIONS[p["activation"]].paper])),
    tags=("activation-sparsity", "relufication"),
    blocks=("sparse",),
    beside=_beside,
    makes_zeros=True,
    remedies=_remedies,
)

"""Relufication: the MLP's activation becomes one that gives exact zeros, and the MLP is repaired.

The published way (ReLU Strikes Back, Mirzadeh et al. 2023, arXiv 2310.04564) swaps the activation
and trains for billions of tokens. The swap alone ruins a SiLU or GELU model; a refit of `down_proj`
on calibration text (fitting/ridge.py) brings most of it back.

What stock transformers can compute is written as a stock model: ReLU and ReLU² are a config field,
and thresholds, bias and bypass are folded into plain neurons (fitting/fold.py), or into the biases
of families that have them. Everything else is a custom-code block (blocks/sparse_mlp.py).
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
from surgery.checkpoint import Checkpoint, LazyTensor, Pending, Progress, Step, Work, constant
from surgery.checkpoint.edit import config_with
from surgery.checkpoint.work import identity
from surgery.errors import SurgeryError, UsageError
from surgery.families import ALWAYS_OPEN, Blocks, Mlp, find, locate
from surgery.fitting.sizes import BYPASS_PART, LIMIT, affordable_rank, fit_nbytes, grown
from surgery.operations.operation import OWN_TEXT, Operation, Parameters, bypass_phrase, hyphenated

if TYPE_CHECKING:
    from surgery.calibration.data import Sample
    from surgery.calibration.install import Fitting
    from surgery.calibration.walk import Layer
    from surgery.fitting.neurons import Neurons
    from surgery.fitting.rows import Rows

REPAIRS = ("none", "ridge", "reconstruct")
ALLOCATIONS = ("uniform", "greedy")
LEVELS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)  # a layer's sparsity
ALLOCATION_TOKENS = 8192
FORMS = ("auto", "stock", "biases", "code")
FORM_TOKENS = 8192  # that the form is chosen on
AUTO_SPARSITY = 0.62  # of ReLU with thresholds; more of what a ReLU at 0 opens is lost beyond it
COPIES = {"none": 1, "ridge": 2, "reconstruct": 5}  # of a layer in fp32, that a repair holds


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """The options of `relufy`; its docstring explains each."""

    activation: str
    sparsity: float | None
    threshold: float | Sequence[float] | None
    per_neuron: bool
    allocation: str
    stage: int
    repair: str
    bypass: int | str
    form: str
    layers: Collection[int] | None
    calibration: Calibration

    def __post_init__(self) -> None:
        for what, value, known in (
            ("activation", self.activation, ACTIVATIONS),
            ("allocation", self.allocation, ALLOCATIONS),
            ("repair", self.repair, REPAIRS),
            ("form", self.form, FORMS),
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
        """Return the sparsity that thresholds are chosen for; None where they are given."""
        if self.threshold is None and self.sparsity is None:
            return self.swap.sparsity
        return self.sparsity


@dataclass(frozen=True, kw_only=True, slots=True)
class _Job:
    """A relufication, checked against the checkpoint: the same for every layer."""

    blocks: Blocks
    options: Options
    layers: tuple[int, ...]
    rank: int  # of the bypass
    native: bool  # stock transformers can compute it
    folds: str  # what holds thresholds and bypass natively: "stock" neurons, "biases" or ""
    added: int  # neurons that each MLP gets more
    fixed: Mapping[int, float]  # the threshold of each layer, 0 where it is chosen on data

    @property
    def waits(self) -> bool:
        """Return whether the form is yet to be chosen, by a measurement."""
        asked = self.options.form == "auto" and self.folds == "stock"
        return asked and not self.blocks.mlp(self.layers[0]).biased

    @property
    def width(self) -> int:
        """Return the number of neurons of the MLPs that are written."""
        return self.blocks.mlp(self.layers[0]).width + self.added

    @property
    def act(self) -> str:
        """Return the function in the rule, a name of ACT2FN."""
        return self.options.swap.act or self.blocks.activation

    @property
    def norms(self) -> tuple[str, ...]:
        """Return the norms that a ReLU follows, by path in a decoder layer."""
        return self.blocks.family.pre_norms if self.options.stage == 2 else ()

    @property
    def thresholds(self) -> tuple[str, ...]:
        return self.options.swap.how.thresholds

    @property
    def needs_data(self) -> bool:
        chooses = bool(self.thresholds) and self.options.wanted is not None
        return self.options.repair != "none" or chooses or self.folds == "stock"

    @property
    def turns(self) -> bool:
        """Return whether neurons may change their sign.

        That is free, and decides what a ReLU of `up` keeps.
        """
        return self.options.swap.how.cuts == "both" and self.options.repair != "none"

    @property
    def fitted(self) -> tuple[str, ...]:
        """Return the parts of an MLP that are written anew."""
        if self.folds == "stock" or (self.folds and self.options.repair != "none"):
            return ("gate", "up", "down")
        gate = ("gate",) if self.blocks.family.gated else ()
        ridge = ("up", "down") if self.turns else ("down",)
        found = {"none": (), "ridge": ridge, "reconstruct": (*gate, "up", "down")}
        return found[self.options.repair]

    @property
    def biased(self) -> bool:
        """Return whether the repair also fits a bias of the output."""
        held = not self.native or self.folds == "biases" or self.added > 0
        return self.options.repair != "none" and held

    @property
    def entry(self) -> dict[str, Any]:
        """Return the `surgery_blocks` entry of the layers.

        Raises SurgeryError where no block fits.
        """
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
    activation: str = "auto",
    sparsity: float | None = None,
    threshold: float | Sequence[float] | None = None,
    per_neuron: bool = False,
    allocation: str = "uniform",
    stage: int = 1,
    repair: str = "ridge",
    bypass: int | str = "auto",
    form: str = "auto",
    layers: Collection[int] | None = None,
    calibration: Calibration | Mapping[str, Any] | None = None,
) -> Checkpoint:
    """Return the model with another activation in its MLPs.

    Args:
        activation: a key of ACTIVATIONS (blocks/rules.py), or "auto": "shifted" at AUTO_SPARSITY or
            at what `sparsity` or `threshold` say, and "relu" where nothing would fit thresholds.
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
            well, "full", "auto" (about an eighth of the MLP's bytes; none without a repair or a
            gate) or "none". It is read for every token.
        form: "stock": thresholds and bypass become plain neurons of a wider MLP, which needs no
            code; "biases": they need biases that the family has (llama's `mlp_bias`); "code": a
            custom-code block. "auto" is stock where the constant that it needs is in the MLP's
            input (fitting/fold.py), measured on the source; else biases, or code.
        layers: default all.
        calibration: what the thresholds and the repair are fitted on; see `Calibration`.

    Raises SurgeryError where the activation is already that, or the family cannot have it.

    Example:
        >>> source = surgery.open("meta-llama/Llama-2-7b-hf")
        >>> output = surgery.relufy(source, activation="shifted", sparsity=0.8)
    """
    thresholds = sparsity is not None or threshold is not None or per_neuron
    fits = repair != "none" and bypass not in ("none", 0) and find(checkpoint.config).gated
    if activation == "auto":
        activation = "shifted" if thresholds or fits else "relu"
        sparsity = AUTO_SPARSITY if fits and threshold is None and sparsity is None else sparsity
    options = Options(
        activation=activation,
        sparsity=sparsity,
        threshold=threshold,
        per_neuron=per_neuron,
        allocation=allocation,
        stage=stage,
        repair=repair,
        bypass=bypass,
        form=form,
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
        pending=_pending(job, checkpoint) if job.waits else None,
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
        "bypass": job.rank if o.repair != "none" else None,
        "form": o.form if o.form != "auto" else None,
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
    every = chosen == chosen_layers(blocks, None)
    whole = every and not checkpoint.config.get("surgery_blocks")
    folds = _folds(blocks, options, whole=whole)
    rank, added = _sizes(blocks, options, folds)
    plain = options.swap.how.plain and bool(blocks.family.activation_key) and not rank
    stock = plain and options.stage == 1 and whole
    folds = folds if rank or not stock else ""
    native = bool(folds) or stock
    if blocks.family.loose and not native:  # a block needs a module whose place it can take
        return _check(with_gathered_mlps(checkpoint), options)
    job = _Job(
        blocks=blocks,
        options=options,
        layers=chosen,
        rank=rank,
        native=native,
        folds=folds,
        added=added,
        fixed=_fixed(options.threshold, chosen),
    )
    if not job.native:
        block_config.config_changes(checkpoint.config, [job.entry])  # raises where no code can go
    return job


def _folds(blocks: Blocks, options: Options, *, whole: bool) -> str:
    """Return the form of FORMS that holds thresholds and bypass without code, "" where none does.

    Raises UsageError where the form that is asked for is impossible.
    """
    family, swap = blocks.family, options.swap
    operated = blocks.checkpoint.config.get("surgery_blocks")
    foldable = (
        whole
        and not operated
        and options.stage == 1
        and swap.rule in ("plain", "shifted")
        and family.gated
        and not family.is_moe
        and bool(family.activation_key)
    )
    if options.form in ("stock", "biases") and not foldable:
        raise UsageError(
            f"no {options.form} form of {options.activation} in this {family.model_type}",
            "it needs relu, relu2 or shifted in every layer of a gated MLP whose activation is a "
            "config field: leave --form out",
        )
    if options.form == "code" or not foldable:
        return ""
    biased = blocks.mlp(chosen_layers(blocks, None)[0]).biased
    if options.form == "biases" and not (family.bias_key or biased):
        raise UsageError(f"the MLP of {family.model_type} has no biases", "take --form stock")
    if options.form == "auto" and options.repair == "none":  # no text is read for a direction
        return "biases" if family.bias_key else ""
    return "biases" if biased else options.form.replace("auto", "stock")


def _sizes(blocks: Blocks, options: Options, folds: str) -> tuple[int, int]:
    """Return the rank of the bypass, and how many neurons each MLP gets more to hold it."""
    auto = options.bypass == "auto"
    rank = 0 if auto else bypass_rank(options.bypass, blocks, options.repair)
    if not rank and (not auto or options.repair == "none" or not blocks.family.gated):
        return 0, 0
    hidden, width = blocks.mlp(chosen_layers(blocks, None)[0]).down.shape
    if not folds:
        return rank or affordable_rank(hidden, width, BYPASS_PART), 0
    constant = int(folds == "stock")  # the neuron that holds the correction
    most = grown(width + width // BYPASS_PART)
    rank = rank or min(hidden, most - width - constant)
    wider = grown(width + rank + constant)
    return rank, (min(most, wider) if auto else wider) - width


def _require_possible(blocks: Blocks, options: Options) -> None:
    family, swap, plain = blocks.family, options.swap, options.swap.how.plain
    if blocks.always_open:
        raise SurgeryError(
            f"the last {blocks.always_open} neurons of each MLP are always open: it was relufied",
            "give the model that it was made from",
        )
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
    if job.added:
        notes.append(
            f"{job.added} neurons were added to each MLP, always open or zero; they stand last"
        )
    if job.native:
        notes.append(
            "runtimes that hard-code the activation (llama.cpp, vLLM for llama and qwen) ignore "
            "the one in config.json, or refuse the model"
        )
    else:
        notes.append(NEEDS_TRUST)
    return tuple(notes)


def _advice(job: _Job) -> tuple[str, ...]:
    if job.options.repair == "none" or job.rank:
        return ()
    return ("--bypass auto repairs much more: a linear map beside the MLP",)


# --- the form -------------------------------------------------------------------------------------


def _pending(job: _Job, base: Checkpoint) -> Pending:
    """Return the choice of the form, which a walk of the source makes."""
    calibration = job.options.calibration
    return Pending(
        base=base,
        title="choosing the form",
        total=job.blocks.count,
        identity=identity("form", base, calibration.identity),
        choose=lambda progress: {"form": _measured_form(job, progress)},
        check=lambda: calibration.require(base),
        asked={"form": "auto"},
    )


def _measured_form(job: _Job, progress: Progress) -> str:
    """Return the form that the constant in the MLPs' inputs allows."""
    from surgery.calibration.install import costs_of_layers
    from surgery.fitting.fold import constant_direction, deviation

    def deviates(layer: Layer, rows: Rows) -> float:
        progress(1)
        return deviation(constant_direction(rows), rows)

    calibration = dataclasses.replace(job.options.calibration, generated=0.0)
    calibration = dataclasses.replace(calibration, tokens=min(calibration.tokens, FORM_TOKENS))
    sample = calibration.sample(job.blocks.checkpoint)
    found = costs_of_layers(job.blocks, calibration, sample, job.layers, deviates)
    if max(found.values()) <= LIMIT:
        return "stock"
    return "biases" if job.blocks.family.bias_key else "code"


# --- what is planned ------------------------------------------------------------------------------


def _native_changes(job: _Job) -> dict[str, Any]:
    family = job.blocks.family
    changes: dict[str, Any] = {family.activation_key: job.act}
    if job.added:
        changes |= {family.width_key: job.width, ALWAYS_OPEN: job.added}
    changes |= {str(family.bias_key): True} if job.folds == "biases" and family.bias_key else {}
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
    if work is None and job.native and not job.folds:
        return {}
    blocks, mlp = job.blocks, job.blocks.mlp(index)
    hidden, dtype = mlp.down.shape[0], mlp.down.dtype

    def made(name: str, dtype: str, shape: tuple[int, ...], otherwise: float = 0) -> LazyTensor:
        if work is None:
            return constant(otherwise, shape, dtype)
        return work.promise(f"{index}.{name}", dtype, shape)

    shapes: dict[str, tuple[int, ...]] = {
        "gate": (job.width, hidden),
        "up": (job.width, hidden),
        "down": (hidden, job.width),
        "gate_bias": (job.width,),
        "up_bias": (job.width,),
        "down_bias": (hidden,),
    }
    fitted: dict[str, Any] = {part: made(part, dtype, shapes[part]) for part in job.fitted}
    if job.folds == "biases" and work is None:
        fitted |= _shifted_biases(mlp, job.fixed[index])
    elif job.folds == "biases":
        names = ("gate_bias", "up_bias", "down_bias")
        fitted |= {name: made(name, dtype, shapes[name]) for name in names}
    out = blocks.restored(index, dataclasses.replace(mlp, **fitted)) if fitted else {}
    if not job.native:
        for path, shape in block_config.sparse_tensors(job.entry, *mlp.down.shape).items():
            name = path.rpartition(".")[2]
            own = "F32" if "threshold" in name else dtype
            out[blocks.layer(index) + path] = made(name, own, shape, job.fixed[index])
    return out


def _shifted_biases(mlp: Mlp, threshold: float) -> dict[str, LazyTensor]:
    """Return the biases of an MLP with a threshold in that of the gate, zeros where it had none."""
    hidden, width = mlp.down.shape
    if mlp.gate_bias is None:
        gate = constant(-threshold, (width,), mlp.up.dtype)
    else:
        gate = mlp.gate_bias.map(f"minus {threshold!r}", lambda t: t - threshold)
    return {
        "gate_bias": gate,
        "up_bias": mlp.up_bias or constant(0.0, (width,), mlp.up.dtype),
        "down_bias": mlp.down_bias or constant(0.0, (hidden,), mlp.up.dtype),
    }


def _work(job: _Job) -> Work:
    checkpoint, calibration = job.blocks.checkpoint, job.options.calibration
    parts = dataclasses.asdict(dataclasses.replace(job.options, calibration=None))  # type: ignore[arg-type]
    hidden = job.blocks.mlp(job.layers[0]).down.shape[0]
    layer = 4 * sum(checkpoint.tensors[n].numel for n in job.blocks.names(job.layers[0]))
    streams = 3 * 4 * calibration.tokens * hidden
    peak = layer * COPIES[job.options.repair] + streams + fit_nbytes(hidden, job.width, hidden)
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
    from surgery.calibration.install import fit_layers, read_text

    reading = read_text(job.blocks, job.options.calibration, work)
    greedy = job.options.allocation == "greedy" and job.options.wanted is not None
    if greedy and "allocation" not in work.report:
        work.note("allocation", _allocate(job, reading.sample))
    fit_layers(reading, job.layers, work, progress, lambda fitting: _fit(job, fitting, work))


def _allocate(job: _Job, sample: Sample) -> dict[str, float]:
    """Return a sparsity for each layer, by a walk of the source over the first tokens."""
    from surgery.calibration.install import costs_of_layers
    from surgery.fitting import allocation

    def cost(layer: Layer, rows: Rows) -> list[float]:
        swapped = _swapped(job, layer.index, layer.device, rows)
        return allocation.cost(swapped, job.blocks.activation, rows, LEVELS, job.rank)

    count = max(1, ALLOCATION_TOKENS // sample.input_ids.shape[1])
    some = sample.rows(slice(count))
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
    width, found = len(neurons.up), dict[str, float]()
    repaired = _repaired(job, neurons, rows, sparsity)
    if job.folds:
        neurons, repaired, found = _folded(job, neurons, repaired, rows)
    if job.options.repair != "none":
        repaired, chosen = _refitted(job, repaired, rows)
        found |= chosen
    fitted, errors = measures.better(neurons, repaired, rows)
    zeros = measures.sparsity(fitted, rows, rows.fitted, width)
    work.note(str(index), measures.figures(**errors, zeros=zeros, **found))
    for name, value in _kept(job, fitted).items():
        if value is not None and work.promised(f"{index}.{name}"):
            work.put(f"{index}.{name}", value)


def _thresholded(
    job: _Job, index: int, neurons: Neurons, rows: Rows, sparsity: float | None
) -> Neurons:
    from surgery.fitting.thresholds import thresholded

    if sparsity is not None:
        return thresholded(neurons, rows, sparsity, job.options.per_neuron)
    fixed = neurons.up.new_full((1,), job.fixed[index])
    return dataclasses.replace(neurons, **dict.fromkeys(job.thresholds, fixed))


def _repaired(job: _Job, neurons: Neurons, rows: Rows, sparsity: float | None) -> Neurons:
    from surgery.fitting.reconstruct import Reconstruction, reconstruct
    from surgery.fitting.ridge import beginning

    if job.options.repair == "ridge":  # `_refitted` comes last
        return beginning(neurons, rows, bias=job.biased, rank=job.rank)
    if job.options.repair == "reconstruct":
        options = Reconstruction(
            sparsity=sparsity,
            per_neuron=job.options.per_neuron,
            bias=job.biased,
            biases=job.folds == "biases",
            rank=job.rank,
        )
        return reconstruct(neurons, rows, options)
    return neurons


def _folded(
    job: _Job, neurons: Neurons, repaired: Neurons, rows: Rows
) -> tuple[Neurons, Neurons, dict[str, float]]:
    """Return the neurons before and after the repair in stock form, and how constant v·x is."""
    from surgery.fitting.fold import balanced, constant_direction, deviation, folded
    from surgery.fitting.thresholds import rounded

    direction = constant_direction(rows) if job.folds == "stock" else None
    found = {} if direction is None else {"deviation": deviation(direction, rows)}
    dtype = job.blocks.mlp(job.layers[0]).up.dtype
    before, after = (
        rounded(folded(balanced(n, rows), direction, job.width), dtype) for n in (neurons, repaired)
    )
    return before, after, found


def _refitted(job: _Job, neurons: Neurons, rows: Rows) -> tuple[Neurons, dict[str, float]]:
    """Fit all of `down` on what the neurons compute as they will be on the disk."""
    from surgery.fitting.cross_validation import validated

    bias = job.biased and job.folds != "stock"  # there it is a neuron
    rank = 0 if job.folds else job.rank
    fitted, choice = validated(neurons, rows, bias=bias, rank=rank)
    if choice is None:
        return fitted, {}
    return fitted, {"damping": choice.damping, "part": choice.part, "left_out": choice.error}


def _kept(job: _Job, neurons: Neurons) -> dict[str, Any]:
    """Return what may have been promised of a layer, by name."""
    zeros = neurons.up.new_zeros
    found = {n: getattr(neurons, n) for n in ("gate", "up", "down", *job.thresholds)}
    correction = zeros(len(neurons.down)) if neurons.correction is None else neurons.correction
    if job.folds:
        biases = {name: getattr(neurons, name) for name in ("gate_bias", "up_bias")}
        down_bias = 0 if neurons.down_bias is None else neurons.down_bias
        return found | biases | {"down_bias": down_bias + correction}
    return found | {"correction": correction} | neurons.bypass(job.rank)


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
    return hyphenated(p["activation"], percent, repair, bypass, p.get("form", ""))


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
    "up_proj and down_proj: what is zero need not be read, and reading weights is what decoding "
    "spends its time on.",
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

"""Carving: each MLP is cut into experts of its own neurons, so that a token passes some of them.

No weight is added but a router's. The neurons are put into another order, and a router chooses
among runs of them: with all experts active that is the same function. With fewer it is not, and
`down_proj` is refitted to what is left (fitting/ridge.py), on the stream that the carved layers
before it give.

No router of transformers gives its experts the weight 1, so a custom-code block computes it
(blocks/experts_mlp.py). The weight is 1 + u·score with u = 0, as in CMoE: through u a router can
learn, once it is trained.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from surgery.blocks import block_config
from surgery.blocks.custom_code import NEEDS_TRUST, with_blocks, with_gathered_mlps
from surgery.blocks.paper import Paper
from surgery.blocks.preconditions import bypass_rank, chosen_layers, require_whole
from surgery.calibration.settings import Calibration
from surgery.checkpoint import Checkpoint, LazyTensor, Pending, Progress, Step, Work
from surgery.checkpoint.tensors import derive
from surgery.checkpoint.work import identity
from surgery.errors import SurgeryError, UsageError
from surgery.families import Blocks, locate
from surgery.fitting.expert_split import ExpertSplit, average, usual
from surgery.fitting.sizes import SAMPLED, fit_nbytes
from surgery.operations.operation import (
    OWN_TEXT,
    Operation,
    Parameters,
    bypass_phrase,
    check,
    hyphenated,
)

if TYPE_CHECKING:
    from surgery.calibration.install import Fitting
    from surgery.calibration.walk import Layer
    from surgery.fitting.rows import Rows
    from surgery.proof.comparison import Check

METHODS = ("random", "kmeans", "coactivation", "cmoe", "mass")
ROUTERS = ("centroids", "trained", "analytic")
REPAIRS = ("none", "ridge")
ALLOCATIONS = ("uniform", "greedy")
ROUTER_WIDTH = 64  # of the trained one
KINDS = {"centroids": "linear", "trained": "mlp", "analytic": "neurons", "oracle": "linear"}
FLOAT_BYTES = 4
ALLOCATION_TOKENS = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """The options of `carve`; its docstring explains each. `router` may also be "oracle"."""

    experts: int = 16
    active: int | Sequence[int] | None = None
    shared: int = 0
    method: str = "mass"
    router: str = "trained"
    repair: str = "ridge"
    bypass: int | str = "none"
    seed: int = 0
    allocation: str = "uniform"
    layers: Collection[int] | None = None
    calibration: Calibration = dataclasses.field(default_factory=Calibration)

    def __post_init__(self) -> None:
        for what, value, known in (
            ("method", self.method, METHODS),
            ("router", self.router, (*ROUTERS, "oracle")),
            ("repair", self.repair, REPAIRS),
            ("allocation", self.allocation, ALLOCATIONS),
        ):
            if value not in known:
                raise UsageError(f"unknown {what} {value!r}", f"one of: {', '.join(known)}")
        if self.allocation == "greedy" and not isinstance(self.active, int | None):
            raise UsageError(
                "--allocation greedy finds how many parts each layer has active",
                "give --active one number",
            )
        for number in self.numbers:
            self._check_parts(number)

    def _check_parts(self, active: int) -> None:
        experts, shared = self.experts, self.shared
        if not 0 <= shared <= experts - 2:
            wrong = f"{shared} shared parts of {experts}"
            raise UsageError(wrong, "two at least must be left to choose between")
        if not shared < active <= experts:
            raise UsageError(
                f"{active} active parts of {experts}, {shared} of them shared",
                f"give {shared + 1} to {experts}: shared parts count among the active ones",
            )

    @property
    def numbers(self) -> Sequence[int]:
        """Return the active parts: one number for every layer, or one for each."""
        active = usual(self.experts, self.shared) if self.active is None else self.active
        return [active] if isinstance(active, int) else active

    @property
    def fits(self) -> str:
        """Return the repair: none with all parts active, where nothing is lost."""
        return "none" if average(self.numbers) == self.experts else self.repair


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A carving, checked: the same for every layer but the number of active parts."""

    blocks: Blocks
    options: Options
    layers: tuple[int, ...]
    splits: Mapping[int, ExpertSplit]

    @property
    def calibration(self) -> Calibration:
        return self.options.calibration

    @property
    def split(self) -> ExpertSplit:
        """Return the split of the first layer; others differ in `active` and `bypass` at most."""
        return self.splits[self.layers[0]]

    @property
    def exact(self) -> bool:
        return all(split.exact for split in self.splits.values())

    @property
    def active(self) -> int | list[int]:
        """Return the active parts: one number for all layers, or one for each if they differ."""
        each = [split.active for split in self.splits.values()]
        return each if len(set(each)) > 1 else each[0]

    @property
    def part(self) -> float:
        """Return the part of the neurons that a token passes."""
        splits = self.splits.values()
        return sum(s.active for s in splits) / sum(s.experts for s in splits)

    @property
    def entries(self) -> list[dict[str, Any]]:
        """Return the `surgery_blocks` entries: one for all layers that are split alike."""
        config, alike = self.blocks.checkpoint.config, dict[Any, list[int]]()
        for index, split in self.splits.items():
            sparse = block_config.sparse_entry_of(config, index)
            alike.setdefault((split, tuple(sparse.get("layers", ()))), []).append(index)
        return [self._entry(layers) for layers in alike.values()]

    def entry(self, index: int) -> dict[str, Any]:
        """Return the entry that covers layer `index`."""
        return next(e for e in self.entries if index in e["layers"])

    def _entry(self, layers: list[int]) -> dict[str, Any]:
        split, mlp = self.splits[layers[0]], self.blocks.mlp(layers[0])
        width, trained = mlp.width // split.experts, split.router == "trained"
        options = block_config.Experts(
            experts=split.routed,
            width=width,
            top_k=split.top_k,
            shared_neurons=split.shared * width,
            router=KINDS[split.router],
            weights="scaled",
            router_bias=trained or (split.router == "analytic" and mlp.biased),
            router_width=ROUTER_WIDTH if trained else 0,
            bypass=split.bypass,
        )
        sparse = block_config.sparse_entry_of(self.blocks.checkpoint.config, layers[0])
        return block_config.experts_entry(self.blocks.family, layers, options, sparse)


def carve(
    checkpoint: Checkpoint,
    *,
    experts: int = 16,
    active: int | Sequence[int] | None = None,
    shared: int = 0,
    method: str = "mass",
    router: str = "trained",
    repair: str = "ridge",
    bypass: int | str = "none",
    seed: int = 0,
    allocation: str = "uniform",
    layers: Collection[int] | None = None,
    calibration: Calibration | Mapping[str, Any] | None = None,
) -> Checkpoint:
    """Return the model with its MLPs cut into experts.

    Args:
        experts: parts of equal width that an MLP is cut into, the shared ones among them.
        active: parts that a token passes, the shared ones among them, in every layer or one number
            for each of `layers`; all of them is exactly the source. By default three quarters.
        shared: parts that every token passes, of the neurons that matter most on average.
        method: which neurons stand together: "random", "kmeans", "coactivation", "cmoe" or "mass".
        router: "centroids", "trained" or "analytic".
        repair: "none" or "ridge" (refit down_proj in closed form).
        bypass: the rank of a linear map from the MLP's input to its output that the repair fits as
            well, "full" or "none". It is read for every token, and more active parts for the same
            bytes repair more where many are active. One that relufication put there is kept and
            fitted again.
        seed: of what is drawn at random.
        allocation: "uniform", or "greedy": more active parts in layers where they matter most,
            `active` in the mean. They are found on the calibration text before the output is
            planned.
        layers: default all.
        calibration: what groups, routers and the repair are fitted on; see `Calibration`.

    Raises SurgeryError for a mixture of experts, and for layers that have a block already, other
    than the sparse one of relufication.

    Example:
        >>> source = surgery.open("meta-llama/Llama-3.2-1B")
        >>> output = surgery.carve(source, experts=16, active=12)
    """
    options = Options(
        experts=experts,
        active=active,
        shared=shared,
        method=method,
        router=router,
        repair=repair,
        bypass=bypass,
        seed=seed,
        allocation=allocation,
        layers=layers,
        calibration=Calibration.of(calibration),
    )
    base, checkpoint = checkpoint, with_gathered_mlps(checkpoint)
    if router not in ROUTERS:
        raise UsageError(f"unknown router {router!r}", f"one of: {', '.join(ROUTERS)}")
    job = plan(checkpoint, options)
    work = _work(job)
    tensors = dict(checkpoint.tensors)
    for index in job.layers:
        tensors |= _carved(job, index, work.promise)
    step = Step(
        operation="carve",
        parameters=_parameters(job),
        exact=job.exact,
        layers=job.layers,
        notes=_notes(job),
        work=work,
        pending=_pending(job, base) if allocation == "greedy" and not job.exact else None,
    )
    return checkpoint.replace(step=step, tensors=tensors, **with_blocks(checkpoint, job.entries))


def _parameters(job: Job) -> dict[str, Any]:
    """Return the options that make the same again, without those at their defaults."""
    options, split = job.options, job.split
    parameters = {k: v for k, v in dataclasses.asdict(split).items() if k != "bypass"}
    parameters |= {"active": job.active}
    rank = bypass_rank(options.bypass, job.blocks, options.repair)
    parameters |= {"bypass": rank} if rank else {}
    parameters |= {} if options.layers is None else {"layers": list(job.layers)}
    calibration = job.calibration.as_dict() if split.needs_data else {}
    return parameters | ({"calibration": calibration} if calibration else {})


def _pending(job: Job, base: Checkpoint) -> Pending:
    """Return the choice of active parts by layer, which a walk of the source makes."""
    return Pending(
        base=base,
        title="allocating",
        total=job.blocks.count,
        identity=identity("allocation", job.blocks.checkpoint, job.options),
        choose=lambda progress: {"active": allocate(job, progress), "allocation": "uniform"},
        check=lambda: job.calibration.require(job.blocks.checkpoint),
        asked={"allocation": "greedy"},
    )


# --- what is asked for ----------------------------------------------------------------------------


def plan(checkpoint: Checkpoint, options: Options) -> Job:
    """Check the options against the checkpoint. Raises SurgeryError where it cannot be cut so."""
    blocks = locate(checkpoint)
    require_whole(blocks)
    if blocks.always_open:
        raise SurgeryError(
            f"the last {blocks.always_open} neurons of each MLP are always open, for every token",
            "relufy with --form code and carve that: experts keep its bypass and its thresholds",
        )
    chosen = chosen_layers(blocks, options.layers)
    _require_free(blocks, chosen)
    _check_width(blocks.mlp(chosen[0]).width, options.experts)
    each = list(options.numbers) * (len(chosen) if len(options.numbers) == 1 else 1)
    if len(each) != len(chosen):
        raise UsageError(
            f"{len(each)} numbers of active parts for {len(chosen)} layers",
            "give one number, or one for each layer",
        )
    rank = bypass_rank(options.bypass, blocks, options.fits)
    splits = {
        index: ExpertSplit(
            experts=options.experts,
            active=active,
            shared=options.shared,
            method=options.method,
            router=options.router,
            repair=options.fits,
            seed=options.seed,
            bypass=_rank(blocks, index, rank),
        )
        for index, active in zip(chosen, each, strict=True)
    }
    job = Job(blocks=blocks, options=options, layers=chosen, splits=splits)
    block_config.config_changes(checkpoint.config, job.entries)  # raises where no code can go
    return job


def _require_free(blocks: Blocks, chosen: Collection[int]) -> None:
    """Raise SurgeryError where the layers are no MLPs, dense or relufied."""
    for entry in block_config.changed(blocks.checkpoint.config):
        both = sorted(set(entry["layers"]) & set(chosen))
        if both and (entry["kind"] != "sparse" or entry.get("inputs")):
            sparse = entry["kind"] == "sparse"
            what = "cuts its inputs" if sparse else f"has a {entry['kind']} block already"
            raise SurgeryError(
                f"layer {both[0]} {what}",
                "give the model from before that, or leave the layer out",
            )
    blocks.family.require_dense()


def _rank(blocks: Blocks, index: int, asked: int) -> int:
    """Return the rank of the bypass that a layer has, or will have."""
    sparse = block_config.sparse_entry_of(blocks.checkpoint.config, index)
    own = int(sparse.get("bypass", 0))
    if own and asked not in (0, own):
        raise UsageError(
            f"a bypass of rank {asked} for layer {index}, which has one of rank {own}",
            "leave --bypass out: the one that is there is kept, and fitted again",
        )
    return own or asked


def _check_width(width: int, experts: int) -> None:
    if width % experts:
        divisors = (n for n in range(2, 257) if width % n == 0)
        near = sorted(divisors, key=lambda n: abs(n - experts))[:3]
        hint = f"{', '.join(map(str, sorted(near)))} would" if near else "no number up to 256 does"
        raise UsageError(f"{experts} experts do not divide {width} neurons", hint)


def _notes(job: Job) -> tuple[str, ...]:
    split, least = job.split, min(s.active for s in job.splits.values())
    most = max(s.active for s in job.splits.values())
    active = least if least == most else f"{least} to {most}"
    same = "all experts are active: the same function"
    fewer = (
        f"a token passes {active} of {split.experts} parts of an MLP, {job.part:.0%} of its neurons"
    )
    return (
        same if job.exact else fewer,
        _sizes(job),
        NEEDS_TRUST,
    )


def _sizes(job: Job) -> str:
    """Say what a token uses of the parameters, and reads of the MLPs' bytes."""
    checkpoint, blocks, part = job.blocks.checkpoint, job.blocks, job.part
    hidden = blocks.mlp(job.layers[0]).down.shape[0]
    mlps = [checkpoint.tensors[n] for i in job.layers for n in blocks.mlp(i).names]
    mlp, mlp_bytes = sum(t.numel for t in mlps), sum(t.nbytes for t in mlps)
    beside = {
        blocks.layer(i) + name: math.prod(shape)
        for i in job.layers
        for name, shape in block_config.bypass_tensors(job.entry(i), hidden).items()
    }
    width, bypass = mlp_bytes / mlp, sum(beside.values())
    new = sum(size for name, size in beside.items() if name not in checkpoint.tensors)
    shapes = block_config.router_tensors(job.entries[0], hidden).values()
    router = len(job.layers) * sum(map(math.prod, shapes))
    used = checkpoint.parameters - mlp + mlp * part + router + new
    read = mlp_bytes * part + router * FLOAT_BYTES + bypass * width
    parts = f"{router * FLOAT_BYTES / 1e6:,.1f} MB of it routers"
    parts += f", {bypass * width / 1e6:,.1f} the bypass" if bypass else ""
    return (
        f"a token uses {used / 1e6:,.1f}M of {(checkpoint.parameters + router + new) / 1e6:,.1f}M "
        f"parameters, and reads {read / 1e6:,.1f} of "
        f"{(mlp_bytes + (bypass - new) * width) / 1e6:,.1f} MB of the MLPs, {parts}"
    )


# --- what is planned ------------------------------------------------------------------------------


def _carved(
    job: Job, index: int, value: Callable[[str, str, tuple[int, ...]], LazyTensor]
) -> dict[str, LazyTensor]:
    """Return the tensors of a layer: its MLP in another order, and its router.

    `value` gives what the work makes, by name.
    """
    mlp, blocks, entry = job.blocks.mlp(index), job.blocks, job.entry(index)
    repaired = job.split.repair != "none"
    order = value(f"{index}.order", "I64", (mlp.width,))
    down = mlp.down

    def rows(t: LazyTensor) -> LazyTensor:
        return derive("rows in order", lambda t, o: t[o], t, order, dtype=t.dtype, shape=t.shape)

    if repaired:
        down = value(f"{index}.down", down.dtype, down.shape)
    else:
        down = derive(
            "columns in order",
            lambda t, o: t[:, o],
            down,
            order,
            dtype=down.dtype,
            shape=down.shape,
        )
    out = blocks.restored(index, dataclasses.replace(mlp.by_neuron(rows), down=down))
    hidden, start = down.shape[0], blocks.layer(index)
    for path, shape in block_config.router_tensors(entry, hidden).items():
        out[start + path] = value(f"{index}.router.{path.rpartition('.')[2]}", "F32", shape)
    if repaired:
        for path, shape in block_config.bypass_tensors(entry, hidden).items():
            out[start + path] = value(f"{index}.{path.rpartition('.')[2]}", down.dtype, shape)
    for threshold in ("threshold", "threshold_up"):
        name = f"{start}{entry['mlp']}.{threshold}"
        if entry.get("per_neuron") and name in blocks.checkpoint.tensors:
            out[name] = rows(blocks.checkpoint.tensors[name])
    return out


def _work(job: Job) -> Work:
    checkpoint, needs_data = job.blocks.checkpoint, job.split.needs_data
    hidden, width = job.blocks.mlp(job.layers[0]).down.shape
    peak = 2 * 4 * sum(checkpoint.tensors[n].numel for n in job.blocks.names(job.layers[0]))
    if needs_data:
        peak += 4 * (4 * job.calibration.tokens * hidden + 4 * SAMPLED)
        peak += fit_nbytes(hidden, width, max(s.bypass for s in job.splits.values()))
    data = job.calibration.identity if needs_data else ""
    splits = {i: dataclasses.asdict(s) for i, s in job.splits.items()}
    return Work(
        identity("carve", checkpoint, splits, data),
        lambda work, progress: _run(job, work, progress),
        total=max(job.layers) + 1 if needs_data else len(job.layers),
        peak_memory=peak,
        check=lambda: job.calibration.require(checkpoint) if needs_data else None,
    )


# --- what is computed -----------------------------------------------------------------------------


def _run(job: Job, work: Work, progress: Progress) -> None:
    """Carve every layer, on a walk over text if the method or the fit needs text."""
    if not job.split.needs_data:
        for index in job.layers:
            _fit(job, index, None, "cpu", work)
            progress(1)
        return
    from surgery.calibration.install import fit_layers, read_text

    def fit(fitting: Fitting) -> None:
        _fit(job, fitting.index, fitting.rows, fitting.layer.device, work)

    reading = read_text(job.blocks, job.calibration, work)
    fit_layers(reading, job.layers, work, progress, fit)


def _fit(job: Job, index: int, rows: Rows | None, device: str, work: Work) -> None:
    """Carve a layer and put what was promised of it."""
    from surgery.fitting import carved_mlp
    from surgery.fitting.neurons import Neurons

    split, neurons = job.splits[index], Neurons.at(job.blocks, index, device)
    carved, found = carved_mlp.fit(neurons, rows, split, job.entry(index))
    if found:
        work.note(str(index), found)
    assert carved.router is not None
    work.put(f"{index}.order", carved.order)
    for name, value in carved.router.named_parameters():
        work.put(f"{index}.router.{name}", value)
    for name, value in {"down": carved.down, **carved.bypass(split.bypass)}.items():
        if work.promised(f"{index}.{name}"):
            work.put(f"{index}.{name}", value)


def allocate(job: Job, progress: Progress = lambda n: None) -> list[int]:
    """Return how many parts each layer has active, with the mean that the job has.

    One part after another is left out where that adds least to the error of the stream behind the
    layer, as the oracle chooses, on the first tokens of the calibration text.
    """
    from surgery.calibration.install import costs_of_layers
    from surgery.fitting import allocation, carved_mlp
    from surgery.fitting.neurons import Neurons

    split = dataclasses.replace(job.split, router="oracle", repair="none", bypass=0)

    def cost(layer: Layer, rows: Rows) -> list[float]:
        neurons = Neurons.at(job.blocks, layer.index, layer.device)
        found = carved_mlp.costs(neurons, rows, split)
        progress(1)
        return found

    sample = job.calibration.sample(job.blocks.checkpoint)
    count = max(1, ALLOCATION_TOKENS // sample.input_ids.shape[1])
    some = sample.rows(slice(count))
    costs = costs_of_layers(job.blocks, job.calibration, some, job.layers, cost)
    levels = [left_out / split.experts for left_out in range(split.routed)]
    found = allocation.allocate(costs, levels, 1 - split.active / split.experts)
    return [split.experts - round(part * split.experts) for part in found.values()]


# --- the record -----------------------------------------------------------------------------------

MOEFICATION = Paper(
    "2110.01786",
    "Zhang, Zhengyan",
    "MoEfication: Transformer Feed-forward Layers are Mixtures of Experts",
    2021,
)
LLAMA_MOE = Paper(
    "2406.16554",
    "Zhu, Tong",
    "LLaMA-MoE: Building Mixture-of-Experts from LLaMA with Continual Pre-training",
    2024,
)
CMOE = Paper(
    "2502.04416",
    "Pei, Zehua",
    "CMoE: Converting Mixture-of-Experts from Dense to Accelerate LLM Inference",
    2025,
)
_PAPERS = {"kmeans": LLAMA_MOE, "coactivation": MOEFICATION, "cmoe": CMOE}


def _done(p: Parameters, where: str) -> str:
    mean = "" if isinstance(p["active"], int) else " in the mean of the layers"
    return (
        f"{where} was cut into {p['experts']} experts of its own neurons, "
        f"{average(p['active']):.3g} of them active for a token{mean}{bypass_phrase(p)}"
    )


def _suffix(p: Parameters) -> str:
    bypass = f"bypass{p['bypass']}" if p.get("bypass") else ""
    return hyphenated(f"carve-{average(p['active']):.3g}of{p['experts']}", bypass)


def _papers(p: Parameters) -> Sequence[Paper]:
    own = _PAPERS.get(str(p.get("method")))
    return [MOEFICATION, own] if own not in (None, MOEFICATION) else [MOEFICATION]


def _checks(p: Parameters) -> Sequence[Check]:
    return [check("routing")]


def _remedies(p: Parameters) -> Sequence[str]:
    bypass = () if p.get("bypass") else ("a linear map beside the MLP: --bypass full",)
    return ("more active parts: --active", *bypass, *OWN_TEXT)


OPERATION = Operation(
    name="carve",
    function=carve,
    summary="Cut each MLP into experts of its own neurons.",
    done=_done,
    why="The neurons that one token needs stand together in experts of their own, so that a "
    "router can leave the others unread.",
    limits="It was not trained after the conversion: tokens that a router sends elsewhere lose "
    "what the other neurons computed.",
    suffix=_suffix,
    papers=_papers,
    tags=("mixture-of-experts", "moefication"),
    blocks=("experts",),
    checks=_checks,
    remedies=_remedies,
)

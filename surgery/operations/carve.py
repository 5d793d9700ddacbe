"""Carving: each MLP is cut into experts, so that a token passes some of its neurons; no weight is
added but a router's.

The neurons are put into another order, and a router chooses among runs of them: with all experts
active that is the same function. With fewer it is not, and `down_proj` is refitted to what is left
(repair.py), on the stream that the carved layers before it give. No router of transformers gives
its experts the weight 1, so that the block that computes it travels with the checkpoint
(surgery/blocks/experts_mlp.py). The weight is 1 + u·score with u = 0, as in CMoE: through u a
router can learn, once it is trained.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from surgery.blocks import block_config
from surgery.blocks.custom_code import with_blocks, with_gathered_mlps
from surgery.blocks.preconditions import bypass_rank, chosen_layers, require_whole
from surgery.calibration.settings import Calibration
from surgery.checkpoint import Checkpoint, LazyTensor, Progress, Step, Work
from surgery.checkpoint.tensors import derive
from surgery.errors import SurgeryError, UsageError
from surgery.families import Blocks, locate
from surgery.fitting.expert_split import ExpertSplit, average, usual
from surgery.fitting.sizes import fit_nbytes

if TYPE_CHECKING:
    from torch import Tensor

    from surgery.calibration.data import Sample
    from surgery.calibration.walk import Layer

METHODS = ("random", "kmeans", "coactivation", "cmoe", "mass")
ROUTERS = ("centroids", "trained", "analytic")
REPAIRS = ("none", "ridge")
ROUTER_WIDTH = 64  # of the trained one
KINDS = {"centroids": "linear", "trained": "mlp", "analytic": "neurons", "oracle": "linear"}
FLOAT_BYTES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What is to be done, checked: the same for every layer, but for how many parts are active."""

    blocks: Blocks
    layers: tuple[int, ...]
    cuts: Mapping[int, ExpertSplit]
    calibration: Calibration

    @property
    def cut(self) -> ExpertSplit:
        """Of the first layer: the others differ in `active` and `bypass` at most."""
        return self.cuts[self.layers[0]]

    @property
    def exact(self) -> bool:
        return all(cut.exact for cut in self.cuts.values())

    @property
    def active(self) -> int | list[int]:
        """Of every layer, or by layer where they differ."""
        each = [cut.active for cut in self.cuts.values()]
        return each if len(set(each)) > 1 else each[0]

    @property
    def part(self) -> float:
        """Of the neurons, those that a token passes."""
        return sum(cut.active for cut in self.cuts.values()) / sum(
            cut.experts for cut in self.cuts.values()
        )

    @property
    def entries(self) -> list[dict[str, Any]]:
        """One for the layers of each number of active parts, and of each sparse block that they are
        made of.
        """
        alike: dict[Any, list[int]] = {}
        for index, cut in self.cuts.items():
            sparse = block_config.sparse_entry_of(self.blocks.checkpoint.config, index)
            alike.setdefault((cut, tuple(sparse.get("layers", ()))), []).append(index)
        return [self._entry(layers) for layers in alike.values()]

    def entry(self, index: int) -> dict[str, Any]:
        """The one that a layer is in."""
        return next(e for e in self.entries if index in e["layers"])

    def _entry(self, layers: list[int]) -> dict[str, Any]:
        cut, mlp = self.cuts[layers[0]], self.blocks.mlp(layers[0])
        width, trained = mlp.width // cut.experts, cut.router == "trained"
        return block_config.experts_entry(
            self.blocks.family,
            layers,
            experts=cut.routed,
            width=width,
            top_k=cut.top_k,
            shared=cut.shared * width,
            router=KINDS[cut.router],
            weights="scaled",
            router_bias=trained or (cut.router == "analytic" and mlp.biased),
            router_width=ROUTER_WIDTH if trained else 0,
            bypass=cut.bypass,
            sparse=block_config.sparse_entry_of(self.blocks.checkpoint.config, layers[0]),
        )


def carve(
    checkpoint: Checkpoint,
    *,
    experts: int = 16,
    active: int | Sequence[int] | None = None,
    shared: int = 0,
    method: str = "mass",
    router: str = "trained",
    repair: str = "ridge",
    bypass: int | str = 0,
    seed: int = 0,
    layers: Collection[int] | None = None,
    calibration: Calibration | Mapping[str, Any] | None = None,
) -> Checkpoint:
    """The model with its MLPs cut into experts.

    Args:
        experts: parts of equal width that an MLP is cut into, the shared ones among them.
        active: parts that a token passes, the shared ones among them, in every layer or one number
            for each of `layers` (surgery.analysis.carve_sweep.allocate finds them); all of them is
            exactly the source. By default three quarters.
        shared: parts that every token passes, of the neurons that matter most on average.
        method: which neurons stand together: "random", "kmeans", "coactivation", "cmoe" or "mass".
        router: "centroids", "trained" or "analytic".
        repair: "none" or "ridge" (refit down_proj in closed form).
        bypass: the rank of a linear map from the MLP's input to its output that the repair fits as
            well, or "full". Read for every token. One that relufication put there is kept and
            fitted again.
        seed: of what is drawn at random.
        layers: default all.
        calibration: what groups, routers and the repair are fitted on; see `Calibration`.

    Raises SurgeryError for a mixture of experts, or where a layer was operated on already: but for
    a relufied one.
    """
    active = usual(experts, shared) if active is None else active
    _check_names(method, router, repair)
    checkpoint = with_gathered_mlps(checkpoint)
    job = check(
        checkpoint,
        experts=experts,
        active=active,
        shared=shared,
        method=method,
        router=router,
        repair="none" if average(active) == experts else repair,
        bypass=bypass,
        seed=seed,
        layers=layers,
        calibration=Calibration.of(calibration),
    )
    work = _work(checkpoint, job)
    parameters = {k: v for k, v in dataclasses.asdict(job.cut).items() if k != "bypass"} | {
        "active": job.active
    }
    parameters |= {"bypass": rank} if (rank := bypass_rank(bypass, job.blocks, repair)) else {}
    parameters |= {} if layers is None else {"layers": list(job.layers)}
    parameters |= (
        {"calibration": job.calibration.as_dict()}
        if job.cut.needs_data and job.calibration.as_dict()
        else {}
    )
    step = Step(
        operation="carve",
        parameters=parameters,
        exact=job.exact,
        layers=job.layers,
        notes=_notes(checkpoint, job),
        work=work,
    )
    tensors = dict(checkpoint.tensors)
    for index in job.layers:
        tensors |= _carved(job, index, work.promise)
    return checkpoint.replace(step=step, tensors=tensors, **with_blocks(checkpoint, job.entries))


# --- what is asked for ----------------------------------------------------------------------------


def _check_names(method: str, router: str, repair: str) -> None:
    for what, value, known in (
        ("method", method, METHODS),
        ("router", router, ROUTERS),
        ("repair", repair, REPAIRS),
    ):
        if value not in known:
            raise UsageError(f"unknown {what} {value!r}", f"one of: {', '.join(known)}")


def _check_parts(experts: int, active: int, shared: int) -> None:
    if not 0 <= shared <= experts - 2:
        raise UsageError(
            f"{shared} shared parts of {experts}", "two at least must be left to choose between"
        )
    if not shared < active <= experts:
        raise UsageError(
            f"{active} active parts of {experts}, {shared} of them shared",
            f"give {shared + 1} to {experts}: shared parts count among the active ones",
        )


def check(
    checkpoint: Checkpoint,
    *,
    calibration: Calibration,
    active: int | Sequence[int],
    layers: Collection[int] | None = None,
    bypass: int | str = 0,
    **options: Any,
) -> Job:
    """The job, checked against the checkpoint; `options` are those of ExpertSplit, `active` as in `carve`.
    Raises SurgeryError where it cannot be carved so.
    """
    for number in [active] if isinstance(active, int) else active:
        _check_parts(options["experts"], number, options["shared"])
    blocks = locate(checkpoint)
    require_whole(blocks)
    chosen = chosen_layers(blocks, layers)
    for entry in block_config.changed(checkpoint.config):
        if (both := sorted(set(entry["layers"]) & set(chosen))) and (
            entry["kind"] != "sparse" or entry.get("inputs")
        ):
            what = (
                "cuts its inputs"
                if entry["kind"] == "sparse"
                else f"has a {entry['kind']} block already"
            )
            raise SurgeryError(
                f"layer {both[0]} {what}", "give the model from before that, or leave the layer out"
            )
    if blocks.family.is_moe:
        block_config.entry(blocks.family, "experts", chosen)  # raises: it has experts
    _check_width(blocks.mlp(chosen[0]).width, options["experts"])
    each = [active] * len(chosen) if isinstance(active, int) else active
    if len(each) != len(chosen):
        raise UsageError(
            f"{len(each)} numbers of active parts for {len(chosen)} layers",
            "give one number, or one for each layer",
        )
    rank = bypass_rank(bypass, blocks, options["repair"])
    cuts = {
        index: ExpertSplit(**options, active=number, bypass=_rank(blocks, index, rank))
        for index, number in zip(chosen, each, strict=True)
    }
    job = Job(blocks=blocks, layers=chosen, cuts=cuts, calibration=calibration)
    block_config.config_changes(checkpoint.config, job.entries)
    return job


def _rank(blocks: Blocks, index: int, asked: int) -> int:
    """That of the bypass that a layer has, or will have."""
    own = int(block_config.sparse_entry_of(blocks.checkpoint.config, index).get("bypass", 0))
    if own and asked not in (0, own):
        raise UsageError(
            f"a bypass of rank {asked} for layer {index}, which has one of rank {own}",
            "leave --bypass out: the one that is there is kept, and fitted again",
        )
    return own or asked


def _check_width(width: int, experts: int) -> None:
    if width % experts:
        near = sorted((n for n in range(2, 257) if width % n == 0), key=lambda n: abs(n - experts))[
            :3
        ]
        hint = f"{', '.join(map(str, sorted(near)))} would" if near else "no number up to 256 does"
        raise UsageError(f"{experts} experts do not divide {width} neurons", hint)


def _notes(checkpoint: Checkpoint, job: Job) -> tuple[str, ...]:
    cut, hidden = job.cut, job.blocks.mlp(job.layers[0]).down.shape[0]
    names = [n for i in job.layers for n in job.blocks.mlp(i).names]
    mlp, mlp_bytes = (
        sum(getattr(checkpoint.tensors[n], size) for n in names) for size in ("numel", "nbytes")
    )
    part, width = job.part, mlp_bytes / mlp
    beside = {
        job.blocks.layer(i) + n: math.prod(s)
        for i in job.layers
        for n, s in block_config.bypass_tensors(job.entry(i), hidden).items()
    }
    bypass, new = (
        sum(beside.values()),
        sum(size for n, size in beside.items() if n not in checkpoint.tensors),
    )
    router = len(job.layers) * sum(
        math.prod(s) for s in block_config.router_tensors(job.entries[0], hidden).values()
    )
    left = checkpoint.parameters - mlp + mlp * part + router + new
    read = mlp_bytes * part + router * FLOAT_BYTES + bypass * width
    least, most = (f([c.active for c in job.cuts.values()]) for f in (min, max))
    same = (
        "all experts are active: the same function"
        if job.exact
        else (
            f"a token passes {least if least == most else f'{least} to {most}'} of {cut.experts} parts of an MLP, {part:.0%} of its neurons"
        )
    )
    parts = f"{router * FLOAT_BYTES / 1e6:,.1f} MB of it routers"
    parts += f", {bypass * width / 1e6:,.1f} the bypass" if bypass else ""
    return (
        same,
        f"a token uses {left / 1e6:,.1f}M of {(checkpoint.parameters + router + new) / 1e6:,.1f}M parameters, and reads "
        f"{read / 1e6:,.1f} of {(mlp_bytes + (bypass - new) * width) / 1e6:,.1f} MB of the MLPs, {parts}",
        "loads with trust_remote_code=True: its code goes along; other runtimes (llama.cpp, vLLM) cannot run it",
    )


# --- what is planned ------------------------------------------------------------------------------


def _carved(
    job: Job, index: int, value: Callable[[str, str, tuple[int, ...]], LazyTensor]
) -> dict[str, LazyTensor]:
    """The tensors of a layer: its MLP in another order, and its router. `value` gives what the work
    does, by name.
    """
    mlp, blocks, entry, repaired = (
        job.blocks.mlp(index),
        job.blocks,
        job.entry(index),
        job.cut.repair != "none",
    )
    order = value(f"{index}.order", "I64", (mlp.width,))

    def rows(t: LazyTensor | None) -> LazyTensor | None:
        return t and derive(
            "rows in order", lambda t, o: t[o], t, order, dtype=t.dtype, shape=t.shape
        )

    down = (
        value(f"{index}.down", mlp.down.dtype, mlp.down.shape)
        if repaired
        else derive(
            "columns in order",
            lambda t, o: t[:, o],
            mlp.down,
            order,
            dtype=mlp.down.dtype,
            shape=mlp.down.shape,
        )
    )
    by_row: dict[str, Any] = {
        name: rows(getattr(mlp, name)) for name in ("gate", "up", "gate_bias", "up_bias")
    }
    out = blocks.restored(index, dataclasses.replace(mlp, down=down, **by_row))
    hidden, start = mlp.down.shape[0], blocks.layer(index)
    for path, shape in block_config.router_tensors(entry, hidden).items():
        out[start + path] = value(f"{index}.router.{path.rpartition('.')[2]}", "F32", shape)
    for path, shape in block_config.bypass_tensors(entry, hidden).items() if repaired else ():
        out[start + path] = value(f"{index}.{path.rpartition('.')[2]}", mlp.down.dtype, shape)
    for name in (
        f"{start}{entry['mlp']}.{threshold}" for threshold in ("threshold", "threshold_up")
    ):
        if entry.get("per_neuron") and (ordered := rows(blocks.checkpoint.tensors.get(name))):
            out[name] = ordered
    return out


def _work(checkpoint: Checkpoint, job: Job) -> Work:
    from surgery.fitting.carved_mlp import SAMPLED

    parts = dataclasses.asdict(dataclasses.replace(job, blocks=None, calibration=None))  # type: ignore[arg-type]
    source = "\n".join(f"{n} {t.identity()}" for n, t in sorted(checkpoint.tensors.items()))
    data = job.calibration.identity if job.cut.needs_data else ""
    hidden, width = job.blocks.mlp(job.layers[0]).down.shape
    layer = 4 * sum(checkpoint.tensors[n].numel for n in job.blocks.names(job.layers[0]))
    peak = 2 * layer
    if job.cut.needs_data:
        peak += 4 * (4 * job.calibration.tokens * hidden + 4 * SAMPLED)
        peak += fit_nbytes(hidden, width, max(cut.bypass for cut in job.cuts.values()))
    return Work(
        f"carve {parts} {data}\n{source}",
        lambda work, progress: _run(checkpoint, job, work, progress),
        total=max(job.layers) + 1 if job.cut.needs_data else len(job.layers),
        peak_memory=peak,
    )


# --- what is computed -----------------------------------------------------------------------------


def _run(checkpoint: Checkpoint, job: Job, work: Work, progress: Progress) -> None:
    """Carve every layer, on a walk of what the carved ones before it give where there is anything
    to fit.
    """
    if not job.cut.needs_data:
        for index in job.layers:
            _fit(job, index, None, "cpu", work)
            progress(1)
        return
    from surgery.calibration.install import convert_layers

    convert_layers(
        checkpoint,
        job.calibration,
        job.layers,
        work,
        progress,
        fit=lambda layer, sample, source: _fit_on_walk(layer, job, sample, source, work),
        install=lambda layer, walk: _install(layer, job, work),
    )


def _fit_on_walk(
    layer: Layer, job: Job, sample: Sample, source: Sequence[Tensor], work: Work
) -> None:
    from surgery.calibration.install import observe

    _fit(job, layer.index, observe(layer, job.blocks, sample, source), layer.device, work)


def _fit(job: Job, index: int, rows: Any, device: str, work: Work) -> None:
    """Carve a layer and put what was promised of it."""
    from surgery.fitting import carved_mlp, repair

    neurons = repair.Neurons.at(job.blocks, index, device)
    carved, found = carved_mlp.fit(neurons, rows, job.cuts[index], job.entry(index))
    if found:
        work.note(str(index), found)
    assert carved.router is not None
    work.put(f"{index}.order", carved.order)
    for name, value in carved.router.named_parameters():
        work.put(f"{index}.router.{name}", value)
    for name, value in {"down": carved.down, **carved.bypass(job.cuts[index].bypass)}.items():
        if work.promised(f"{index}.{name}"):
            work.put(f"{index}.{name}", value)


def _install(layer: Layer, job: Job, work: Work) -> None:
    """Put the carved MLP into the layer, as it will be on the disk."""
    from surgery.blocks.experts_mlp import ExpertsMLP

    blocks, index, mlp = job.blocks, layer.index, job.blocks.family.mlp
    block = ExpertsMLP(getattr(layer.module, mlp), job.entry(index)).to(layer.device)
    setattr(layer.module, mlp, block)
    tensors = {
        **blocks.checkpoint.tensors,
        **_carved(job, index, lambda name, dtype, shape: work.lazy(name)),
    }
    for name, value in block.state_dict().items():
        value.copy_(tensors[f"{blocks.layer(index)}{mlp}.{name}"].read())

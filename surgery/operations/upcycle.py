"""Upcycling: each MLP becomes a mixture of experts behind a new router, in an architecture that
transformers has, or in a block that travels with the checkpoint where none can hold the model.

Verbatim copies (Komatsuzaki et al. 2022, arXiv 2212.05055), copies cut in finer experts (virtual
groups, He et al. 2024, arXiv 2410.07524), and shared experts beside them compute exactly what the
model did; training makes the experts differ. Partial re-initialisation, noise and the MLPs of
several models make them differ from the start, and change the function.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from surgery.blocks import block_config
from surgery.blocks.custom_code import NEEDS_TRUST, with_blocks, with_gathered_mlps
from surgery.blocks.paper import Paper
from surgery.blocks.preconditions import chosen_layers, require_plain, require_whole
from surgery.calibration.routers import Beginning, Mixture, router_rows, work_of
from surgery.calibration.settings import Calibration
from surgery.checkpoint import Checkpoint, LazyTensor, Step, Work
from surgery.checkpoint.compat import complete
from surgery.checkpoint.edit import drop_tied_head
from surgery.errors import SurgeryError, UsageError
from surgery.families import OPERATED, Blocks, Mlp, find, locate
from surgery.families.choice import Choice, choose
from surgery.families.targets import SURGERY, Shape, config_of, whole_copies
from surgery.fitting.experts import (
    average,
    dropped,
    joined,
    noisy,
    part,
    require_kin,
    routed_experts,
    scaled,
    shared_expert,
)
from surgery.operations.operation import Operation, Parameters, hyphenated

if TYPE_CHECKING:
    from surgery.proof.comparison import Check

ATTENTION = ("base", "average")
COPIES, ACTIVE = 8, 2  # by default
MOST_EXPERTS = 65536  # of a layer


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """How experts and router begin: as copies, or made different."""

    drop: float
    noise: float
    models: tuple[Checkpoint, ...]
    attention: str
    router: Beginning

    @property
    def copies(self) -> bool:
        """Whether the experts are the source's MLP and nothing else."""
        return not (self.drop or self.noise or self.models)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Job:
    """What is to be done, checked. `source` is whose MLPs are converted; `trunk` what all else is
    taken from.
    """

    source: Blocks
    trunk: Blocks
    models: tuple[Blocks, ...]
    layers: tuple[int, ...]
    choice: Choice
    start: Start

    @property
    def router(self) -> str:
        """Where a layer has its router's rows."""
        path = self.choice.target.router
        return path if self.choice.target.place else path.replace("mlp", self.source.family.mlp, 1)


def upcycle(
    checkpoint: Checkpoint,
    *,
    experts: int | None = None,
    top_k: int | None = None,
    granularity: int = 1,
    shared: int | None = None,
    layers: Collection[int] | None = None,
    dense_first: int = 0,
    target: str = "auto",
    drop: float = 0.0,
    noise: float = 0.0,
    expert_models: Sequence[Checkpoint] = (),
    attention: str = "base",
    router: str = "normal",
    router_std: float = 0.02,
    expert_texts: Sequence[str] = (),
    seed: int = 0,
    calibration: Calibration | Mapping[str, Any] | None = None,
) -> Checkpoint:
    """A mixture of `experts` in place of each MLP, `top_k` of them active per token.

    Args:
        checkpoint: a dense model; see `surgery families` for which.
        experts: routed experts of a layer, E (default: those of 8 copies, or of one for each of
            `expert_models`).
        top_k: of them active, K (default: those of 2 copies).
        granularity: parts that a copy of the MLP is cut in, G. Expert e is a part of copy e div
            (parts that are routed); E and K count parts, so both are multiples of those that are
            routed.
        shared: parts that every token passes, in the target's shared expert; only the others are
            routed. At granularity 1, one shared expert takes half of the output. Default: what the
            target usually has.
        layers: the layers to convert (default: all), where the architecture can keep some dense.
        dense_first: how many first layers stay dense, instead of `layers`.
        target: the MoE model_type; "surgery" for the block that travels; "auto" for the first
            architecture that can hold this model in this shape exactly, or else that block.
        drop: the part of each expert's neurons that is drawn anew (drop-upcycling; 0.5 in the
            paper).
        noise: the standard deviation of noise added to the experts' weights.
        expert_models: checkpoints whose MLPs become the copies (branch-train-mix).
        attention: what all else is taken from: "base", this checkpoint, or "average", the mean of
            `expert_models`.
        router: how its rows [E, H] begin: "normal", N(0, router_std²), "zero", "centroids" or
            "class-means" (routers.py).
        expert_texts: files with text for each of `expert_models`, in their order, for class-means.
        seed: with the tensor's name, decides every random value.
        calibration: the text that centroids are found on; see `Calibration`.

    Raises SurgeryError for a model that no target can hold exactly, UsageError for impossible
    options.
    """
    begin = Beginning(
        kind=router,
        std=router_std,
        seed=seed,
        texts=tuple(map(str, expert_texts)),
        calibration=Calibration.of(calibration),
    )
    start = Start(
        drop=drop, noise=noise, models=tuple(expert_models), attention=attention, router=begin
    )
    _check_start(start)
    shape = _shape(experts, top_k, granularity, shared or 0, len(start.models))
    checkpoint, job, notes = _job(
        checkpoint, shape, shared, _layers(layers, dense_first), target, start
    )
    work = work_of(begin, _mixture_of(job)) if begin.reads else None
    tensors = _tensors(job, work)
    exact = start.copies and _always_whole(job, tensors)
    step = Step(
        operation="upcycle",
        parameters=_parameters(job),
        exact=exact,
        layers=job.layers,
        notes=(*notes, *job.choice.notes, *_notes(job, exact)),
        work=work,
    )
    return checkpoint.replace(step=step, tensors=tensors, **_written(job))


def _job(
    checkpoint: Checkpoint,
    shape: Shape,
    shared: int | None,
    layers: Collection[int] | range | None,
    target: str,
    start: Start,
) -> tuple[Checkpoint, _Job, list[str]]:
    """The source without a head that is tied, what is to be done, and what is to be said of the
    head.
    """
    require_plain(checkpoint)
    _require_stock(checkpoint)
    checkpoint = with_gathered_mlps(checkpoint)
    blocks = locate(checkpoint)
    require_whole(blocks)
    start = dataclasses.replace(start, models=tuple(map(with_gathered_mlps, start.models)))
    config = _effective(checkpoint)
    chosen = _chosen(blocks, layers)
    if not blocks.family.is_moe:
        shape = dataclasses.replace(shape, width=blocks.mlp(chosen[0]).width)
    choice = choose(blocks, config, target, shape, shared, chosen)
    _check_copies(choice.shape, start)
    checkpoint, notes = drop_tied_head(checkpoint, bool(config.get("tie_word_embeddings")))
    trunk = _trunk(checkpoint, chosen, start)
    job = _Job(
        source=locate(checkpoint),
        trunk=locate(trunk),
        models=tuple(map(locate, start.models)),
        layers=chosen,
        choice=choice,
        start=start,
    )
    return checkpoint, job, notes


# --- options --------------------------------------------------------------------------------------


def _shape(
    experts: int | None, top_k: int | None, granularity: int, shared: int, models: int
) -> Shape:
    """The shape asked for; of `experts` and `top_k`, what is not given follows from the number of
    copies.
    """
    if (
        granularity < 1
        or shared < 0
        or (shared >= granularity > 1)
        or (granularity == 1 and shared > 1)
    ):
        raise UsageError(
            f"{shared} shared of {granularity} parts of an MLP",
            "a part at least must be routed; without --granularity, --shared is 0 or 1",
        )
    routed = granularity - shared if granularity > 1 else 1
    experts = (models or COPIES) * routed if experts is None else experts
    top_k = ACTIVE * routed if top_k is None else top_k
    if experts < 1 or top_k < 1:
        raise UsageError(
            f"{experts} experts with top-k {top_k}: both must be at least 1",
            "for example --experts 8 --top-k 2",
        )
    if experts > MOST_EXPERTS:
        raise UsageError(f"{experts} experts", f"give at most {MOST_EXPERTS}")
    if top_k > experts:
        raise UsageError(
            f"top-k {top_k} of {experts} experts", "top-k can be at most the number of experts"
        )
    for name, value in (("experts", experts), ("top-k", top_k)):
        if value % routed:
            raise UsageError(
                f"{name} {value} is no multiple of the {routed} routed experts that make up a copy",
                f"for example --experts {COPIES * routed} --top-k {ACTIVE * routed}",
            )
    return Shape(experts=experts, top_k=top_k, granularity=granularity, shared=shared)


def _check_start(start: Start) -> None:
    if not 0 <= start.drop <= 1:
        raise UsageError(
            f"drop {start.drop} of the neurons", "give a part from 0 to 1; 0.5 is the paper's"
        )
    if start.noise < 0:
        raise UsageError(
            f"noise of standard deviation {start.noise}",
            "give 0 or more, well below that of the weights",
        )
    if start.attention not in ATTENTION:
        raise UsageError(f"attention from {start.attention!r}", f"one of: {', '.join(ATTENTION)}")
    if start.attention == "average" and not start.models:
        raise UsageError("an average of no models", "name them, each with --expert MODEL")
    if start.router.kind == "class-means" and not len(start.models) == len(start.router.texts) > 1:
        raise UsageError(
            f"class means of {len(start.router.texts)} texts for {len(start.models)} models",
            "give --expert MODEL and --expert-text FILE for each of them, two at least",
        )


def _check_copies(shape: Shape, start: Start) -> None:
    models = len(start.models)
    if shape.width % shape.granularity:
        near = [g for g in range(1, shape.width + 1) if shape.width % g == 0]
        best = min(near, key=lambda g: abs(g - shape.granularity))
        raise UsageError(
            f"granularity {shape.granularity} does not divide {shape.width} neurons", f"{best} does"
        )
    if models and shape.copies % models:
        raise UsageError(
            f"{shape.copies} copies of {models} expert models",
            "give a multiple of them with --experts",
        )
    if start.router.kind == "class-means" and shape.copies != models:
        raise UsageError(
            f"class means of {models} models for {shape.copies} copies", "leave --experts out"
        )


def _require_stock(checkpoint: Checkpoint) -> None:
    kind, family = str(checkpoint.config.get("model_type")), find(checkpoint.config)
    if kind.startswith(OPERATED):
        raise SurgeryError(
            f"a {kind} has blocks that its own code computes: no target of upcycle has them",
            f"upcycle the {family.model_type} that it was made of",
        )
    if checkpoint.config.get("text_config"):
        raise SurgeryError(
            f"{checkpoint.config.get('model_type')} is multimodal: no target of upcycle holds its other towers",
            f"give its language model, a {family.model_type}, as a checkpoint of its own",
        )


def _layers(layers: Collection[int] | None, dense_first: int) -> Collection[int] | range | None:
    """The layers named; of `dense_first` all from there on, however many there are."""
    if dense_first and layers is not None:
        raise UsageError("both --layers and --dense-first", "give one of them")
    if layers is not None and not layers:
        raise UsageError("no layer to convert", "leave --layers out for all of them")
    return range(dense_first, 2**31) if dense_first else layers


def _chosen(blocks: Blocks, layers: Collection[int] | range | None) -> tuple[int, ...]:
    if isinstance(layers, range):
        if not 0 < layers.start < blocks.count:
            raise UsageError(
                f"{layers.start} dense layers of {blocks.count}", f"give 1 to {blocks.count - 1}"
            )
        layers = range(layers.start, blocks.count)
    return chosen_layers(blocks, layers)


# --- tensors --------------------------------------------------------------------------------------


def _tensors(job: _Job, work: Work | None) -> dict[str, LazyTensor]:
    target, trunk = job.choice.target, job.trunk
    tensors = dict(trunk.checkpoint.tensors)
    for index in range(trunk.count):
        mlp = trunk.mlp(index)
        if target is not SURGERY and (mlp.biased or mlp.gate_bias is not None):
            raise SurgeryError(
                f"the MLP of layer {index} has biases, which {target.model_type} cannot hold",
                "--target surgery holds them",
            )
        if index in job.layers:
            new = _block(job, index, work)
        elif target is not SURGERY:
            new = {trunk.layer(index) + path: t for path, t in target.dense([mlp]).items()}
        else:
            continue
        for name in mlp.names:
            del tensors[name]
        tensors |= new
    rewrite = job.choice.route and job.choice.route.rewrite
    return rewrite(tensors, _effective(job.source.checkpoint)) if rewrite else tensors


def _block(job: _Job, index: int, work: Work | None) -> dict[str, LazyTensor]:
    """The block of one layer, by name."""
    target, s, layer, mlp = (
        job.choice.target,
        job.choice.shape,
        job.trunk.layer(index),
        job.trunk.mlp(index),
    )
    dtype = mlp.up.dtype
    router = router_rows(
        job.start.router,
        layer + job.router,
        index,
        s,
        mlp.up.shape[1],
        "F32" if target.router_fp32 else dtype,
        work,
    )
    if target.place is None:
        return {**job.trunk.restored(index, _wide(job, index)), layer + job.router: router}
    new = target.place(_experts(job, index))
    if (
        (shared := shared_expert(mlp, target, s)) is not None
        and target.shared
        and target.shared.place
    ):
        new |= target.shared.place([shared])
    new |= {**target.extra(s.experts, dtype), job.router: router}
    return {layer + path: tensor for path, tensor in new.items()}


def _experts(job: _Job, index: int) -> list[Mlp]:
    """The routed experts of a layer as they begin."""
    mlp, layer, start = job.trunk.mlp(index), job.trunk.layer(index), job.start
    copies = _copies(mlp, [b.mlp(index) for b in job.models], job.choice.shape.copies)
    parts = [
        p for copy in copies for p in routed_experts(copy, job.choice.target, job.choice.shape)
    ]
    keys = [f"{layer}expert {i}" for i in range(len(parts))]
    return [
        noisy(dropped(p, start.drop, key, start.router.seed), start.noise, key, start.router.seed)
        for p, key in zip(parts, keys, strict=True)
    ]


def _wide(job: _Job, index: int) -> Mlp:
    """The MLP of a layer with the neurons of all its experts, the shared ones first."""
    mlp, s = job.trunk.mlp(index), job.choice.shape
    shared = (
        [scaled(part(mlp, 0, s.shared * s.expert_width), 0.5 if s.halved else 1.0)]
        if s.shared
        else []
    )
    return joined([*shared, *_experts(job, index)])


def _entry(job: _Job) -> dict[str, Any]:
    """The block that computes a `_wide` MLP as a mixture."""
    s, target = job.choice.shape, job.choice.target
    return block_config.experts_entry(
        job.source.family,
        job.layers,
        experts=s.experts,
        width=s.expert_width,
        top_k=s.top_k,
        shared=s.shared * s.expert_width,
        group=s.shards,
        factor=s.factor if target.groups else 1.0,
    )


def _mixture_of(job: _Job) -> Mixture:
    """What calibration walks. Of copies, and of Llama 4's, whose experts begin with an output of
    zero, that is the source.
    """
    shared = job.choice.target.shared
    if job.start.copies or (shared and shared.whole):
        return Mixture(checkpoint=job.trunk.checkpoint, layers=job.layers, shape=job.choice.shape)
    return Mixture(
        checkpoint=job.trunk.checkpoint,
        layers=job.layers,
        shape=job.choice.shape,
        wide=partial(_wide, job),
        entry=_entry(job),
    )


def _trunk(checkpoint: Checkpoint, chosen: Sequence[int], start: Start) -> Checkpoint:
    """What all but the routed experts is taken from. Raises SurgeryError for models that do not
    belong together.
    """
    blocks = locate(checkpoint)
    experts = [name for index in chosen for name in blocks.mlp(index).names]
    names = checkpoint.tensors if start.attention == "average" else experts
    for model in start.models:
        require_kin(checkpoint, model, names, _effective)
    return average(checkpoint, start.models) if start.attention == "average" else checkpoint


def _copies(mlp: Mlp, models: Sequence[Mlp], count: int) -> Iterator[Mlp]:
    """`count` MLPs: copies of one, or those of several models, equally many of each and one model
    after another.
    """
    for c in range(count):
        chosen = models[c * len(models) // count] if models else mlp
        yield chosen if chosen.up.dtype == mlp.up.dtype else _cast(chosen, mlp.up.dtype)


def _cast(mlp: Mlp, dtype: str) -> Mlp:
    values: dict[str, Any] = {
        f.name: t.cast(dtype)
        for f in dataclasses.fields(mlp)
        if isinstance(t := getattr(mlp, f.name), LazyTensor)
    }
    return dataclasses.replace(mlp, **values)


def _effective(checkpoint: Checkpoint) -> dict[str, Any]:
    return find(checkpoint.config).effective(complete(checkpoint.config))


def _written(job: _Job) -> dict[str, Any]:
    """Config and code of the result."""
    choice, source = job.choice, job.source
    if choice.route is None:
        return with_blocks(source.checkpoint, [_entry(job)])
    config = config_of(
        choice.target,
        choice.route,
        _effective(source.checkpoint),
        choice.shape,
        job.layers,
        source.count,
    )
    return {"config": config, "custom_code": False}


# --- what is said ---------------------------------------------------------------------------------


def _always_whole(job: _Job, tensors: Mapping[str, LazyTensor]) -> bool:
    """Whether every token gets whole copies in the dtype that the model is loaded in."""
    target, router = job.choice.target, job.start.router
    if whole_copies(target, job.choice.shape):
        return True
    dtypes = {t.dtype for n, t in tensors.items() if n.endswith(job.router)}
    return (target.router_fp32 or dtypes == {"F32"}) and router.kind != "zero" and router.std > 0


def _parameters(job: _Job) -> dict[str, Any]:
    s, start, router = job.choice.shape, job.start, job.start.router
    found = {
        "experts": s.experts,
        "top_k": s.top_k,
        "granularity": s.granularity,
        "shared": s.shared,
        "layers": None if len(job.layers) == job.source.count else list(job.layers),
        "target": job.choice.target.model_type,
        "drop": start.drop,
        "noise": start.noise,
        "expert_models": [
            m.source.location + (f"@{m.source.revision}" if m.source.revision else "")
            for m in start.models
        ],
        "attention": start.attention,
        "router": router.kind,
        "router_std": router.std,
        "seed": router.seed,
    }
    found |= {"expert_texts": list(router.texts)} if router.texts else {}
    return found | (
        {"calibration": router.calibration.as_dict()}
        if router.reads and router.calibration.as_dict()
        else {}
    )


def _notes(job: _Job, exact: bool) -> Iterator[str]:
    target, s, start = job.choice.target, job.choice.shape, job.start
    if target is SURGERY:
        yield NEEDS_TRUST
    if s.shards > 1 and not whole_copies(target, s):
        where = "hardly ever" if exact else "about one token in a thousand, in each layer"
        yield (
            f"{target.model_type} chooses experts one by one: where the router's logits of two copies are equal a token gets "
            f"parts of both, in this dtype {where}; --target glm4_moe chooses whole copies"
        )
    if s.granularity > 1 and s.expert_width % 8 and target is not SURGERY:
        yield (
            f"experts of {s.expert_width} neurons: grouped matrix products in bf16 want a multiple of 8, and "
            "transformers stops there without one"
        )
    if target.note:
        yield target.note
    elif target.shared and target.shared.required and not s.shared:
        yield (
            f"{target.model_type} always has a shared expert: it begins with down_proj at zero, and computes nothing until it "
            "is trained; --shared puts a part of the MLP there"
        )
    if s.experts > 1 or s.top_k == 1:
        yield _gradient(s, start)
    if start.models:
        others = "the mean of theirs" if start.attention == "average" else "the base's"
        yield f"the experts are the MLPs of {len(start.models)} models; attention, embeddings and norms are {others}"


def _gradient(s: Shape, start: Start) -> str:
    if s.top_k == 1:
        return (
            "with top-k 1 the renormalised routing weight is always 1: the router never gets a gradient from the "
            "language-model loss"
        )
    if not start.copies:
        return (
            "the experts differ from the start: this is another function, and where training begins"
        )
    if s.shards > 1:
        return (
            "the copies are identical, and the parts of a copy are not: the language-model loss weighs these against one "
            "another, and copies differ as training goes on"
        )
    return (
        "the experts are identical, so the router has no language-model gradient until they differ: train with the "
        "auxiliary loss, or begin with --drop or --noise"
    )


# --- the record -----------------------------------------------------------------------------------

SPARSE_UPCYCLING = Paper(
    "2212.05055",
    "Komatsuzaki, Aran",
    "Sparse Upcycling: Training Mixture-of-Experts from Dense Checkpoints",
    2022,
)
VIRTUAL_GROUPS = Paper(
    "2410.07524",
    "He, Ethan",
    "Upcycling Large Language Models into Mixture of Experts",
    2024,
)
DEEPSEEK_MOE = Paper(
    "2401.06066",
    "Dai, Damai",
    "DeepSeekMoE: Towards Ultimate Expert Specialization in Mixture-of-Experts Language Models",
    2024,
)
DROP_UPCYCLING = Paper(
    "2502.19261",
    "Nakamura, Taishi",
    "Drop-Upcycling: Training Sparse Mixture of Experts with Partial Re-initialization",
    2025,
)
BRANCH_TRAIN_MIX = Paper(
    "2403.07816",
    "Sukhbaatar, Sainbayar",
    "Branch-Train-MiX: Mixing Expert LLMs into a Mixture-of-Experts LLM",
    2024,
)


def _done(p: Parameters, where: str) -> str:
    shared = p.get("shared")
    beside = f", beside {shared} shared part{'s' if shared > 1 else ''}" if shared else ""
    active = f"{p['top_k']} of them active for a token"
    return f"{where} became {p['experts']} experts, {active}{beside} ({p['target']})"


def _suffix(p: Parameters) -> str:
    shape = f"{p['target']}-{p['experts']}x-top{p['top_k']}".replace("_", "-")
    changes = (f"{key}{p[key]:g}" for key in ("shared", "drop", "noise") if p.get(key))
    return hyphenated(shape, *changes)


def _papers(p: Parameters) -> Sequence[Paper]:
    fine = [VIRTUAL_GROUPS, DEEPSEEK_MOE] if (p.get("granularity") or 1) > 1 else []
    dropped = [DROP_UPCYCLING] if p.get("drop") else []
    mixed = [BRANCH_TRAIN_MIX] if p.get("expert_models") else []
    return [SPARSE_UPCYCLING, *fine, *dropped, *mixed]


def _checks(p: Parameters) -> Sequence[Check]:
    from surgery.proof import copies, routing

    shards = max(1, int(p.get("granularity") or 1) - int(p.get("shared") or 0))
    return [*([copies.check(shards)] if shards > 1 else []), routing.check(shards)]


OPERATION = Operation(
    name="upcycle",
    function=upcycle,
    summary="Turn each MLP into a mixture of copies, exactly.",
    done=_done,
    why="A dense model that was paid for already is the cheapest beginning of a mixture of experts: "
    "capacity grows with the experts, the work of a token with those that are active.",
    limits="It was not trained after the conversion: it is where training starts from, larger and not "
    "better than its source.",
    suffix=_suffix,
    papers=_papers,
    tags=("mixture-of-experts", "upcycling"),
    blocks=("experts",),
    checks=_checks,
    models=("expert_models",),
    files=("expert_texts",),
)

"""Upcycling: each MLP becomes a mixture of experts behind a new router.

The output has an architecture of transformers, or a custom-code block where none can hold the model
exactly. Verbatim copies (Komatsuzaki et al. 2022, arXiv 2212.05055), copies cut in finer experts
(virtual groups, He et al. 2024, arXiv 2410.07524), and shared experts beside them compute exactly
what the model did; training makes the experts differ. Partial re-initialisation, noise and the MLPs
of several models make them differ from the start, and change the function.

Shapes: H hidden_size, F intermediate_size, E experts, K of them active.
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
from surgery.calibration.routers import Beginning, Mixture, drawn_rows, each_row, work_of
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
from surgery.operations.operation import Operation, Parameters, check, hyphenated

if TYPE_CHECKING:
    from surgery.proof.comparison import Check

ATTENTION = ("base", "average")
COPIES, ACTIVE = 8, 2  # by default
MOST_EXPERTS = 65536  # of a layer


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """How experts and routers begin: as copies, or made different."""

    drop: float
    noise: float
    models: tuple[Checkpoint, ...]
    attention: str
    router: Beginning

    def __post_init__(self) -> None:
        if not 0 <= self.drop <= 1:
            what = f"drop {self.drop} of the neurons"
            raise UsageError(what, "give a part from 0 to 1; 0.5 is the paper's")
        if self.noise < 0:
            what = f"noise of standard deviation {self.noise}"
            raise UsageError(what, "give 0 or more, well below that of the weights")
        if self.attention not in ATTENTION:
            what = f"attention from {self.attention!r}"
            raise UsageError(what, f"one of: {', '.join(ATTENTION)}")
        if self.attention == "average" and not self.models:
            raise UsageError("an average of no models", "name them, each with --expert MODEL")
        texts = len(self.router.texts)
        if self.router.kind == "class-means" and not len(self.models) == texts > 1:
            raise UsageError(
                f"class means of {texts} texts for {len(self.models)} models",
                "give --expert MODEL and --expert-text FILE for each of them, two at least",
            )

    @property
    def copies(self) -> bool:
        """Return whether the experts are the source's MLP and nothing else."""
        return not (self.drop or self.noise or self.models)

    @property
    def seed(self) -> int:
        return self.router.seed


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """The options of `upcycle` but those of how experts begin; its docstring explains each."""

    experts: int | None
    top_k: int | None
    granularity: int
    shared: int | None
    layers: Collection[int] | None
    dense_first: int
    target: str

    def __post_init__(self) -> None:
        if self.dense_first and self.layers is not None:
            raise UsageError("both --layers and --dense-first", "give one of them")
        if self.layers is not None and not self.layers:
            raise UsageError("no layer to convert", "leave --layers out for all of them")
        granularity, shared = self.granularity, self.shared or 0
        most = granularity - 1 if granularity > 1 else 1
        if granularity < 1 or not 0 <= shared <= most:
            raise UsageError(
                f"{shared} shared of {granularity} parts of an MLP",
                "a part at least must be routed; without --granularity, --shared is 0 or 1",
            )

    def chosen(self, blocks: Blocks) -> tuple[int, ...]:
        """Return the layers to convert."""
        first = self.dense_first
        if not first:
            return chosen_layers(blocks, self.layers)
        if not 0 < first < blocks.count:
            what = f"{first} dense layers of {blocks.count}"
            raise UsageError(what, f"give 1 to {blocks.count - 1}")
        return tuple(range(first, blocks.count))

    def shape(self, models: int) -> Shape:
        """Return the shape asked for; what is not given follows from the number of copies."""
        shared = self.shared or 0
        routed = self.granularity - shared if self.granularity > 1 else 1
        experts = (models or COPIES) * routed if self.experts is None else self.experts
        top_k = ACTIVE * routed if self.top_k is None else self.top_k
        _check_numbers(experts, top_k, routed)
        return Shape(experts=experts, top_k=top_k, granularity=self.granularity, shared=shared)


def _check_numbers(experts: int, top_k: int, routed: int) -> None:
    """Raise UsageError for impossible numbers of experts; `routed` of them make up a copy."""
    if experts < 1 or top_k < 1:
        what = f"{experts} experts with top-k {top_k}: both must be at least 1"
        raise UsageError(what, "for example --experts 8 --top-k 2")
    if experts > MOST_EXPERTS:
        raise UsageError(f"{experts} experts", f"give at most {MOST_EXPERTS}")
    if top_k > experts:
        what = f"top-k {top_k} of {experts} experts"
        raise UsageError(what, "top-k can be at most the number of experts")
    for name, value in (("experts", experts), ("top-k", top_k)):
        if value % routed:
            raise UsageError(
                f"{name} {value} is no multiple of the {routed} routed experts that make up a copy",
                f"for example --experts {COPIES * routed} --top-k {ACTIVE * routed}",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Job:
    """An upcycling, checked: `source` has the MLPs, `trunk` has everything else."""

    source: Blocks
    trunk: Blocks
    models: tuple[Blocks, ...]
    layers: tuple[int, ...]
    choice: Choice
    start: Start

    @property
    def router(self) -> str:
        """Return the path of a router's rows in a decoder layer."""
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
    """Return the model with a mixture of `experts` in place of each MLP, `top_k` active per token.

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
        target: the MoE model_type; "surgery" for a custom-code block; "auto" for the first
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

    Example:
        >>> source = surgery.open("Qwen/Qwen3-8B")
        >>> output = surgery.upcycle(source, experts=8, top_k=2)
    """
    options = Options(
        experts=experts,
        top_k=top_k,
        granularity=granularity,
        shared=shared,
        layers=layers,
        dense_first=dense_first,
        target=target,
    )
    begin = Beginning(
        kind=router,
        std=router_std,
        seed=seed,
        texts=tuple(map(str, expert_texts)),
        calibration=Calibration.of(calibration),
    )
    models = tuple(expert_models)
    start = Start(drop=drop, noise=noise, models=models, attention=attention, router=begin)
    job = _check(checkpoint, options, start)
    work = work_of(begin, _mixture_of(job)) if begin.reads else None
    tensors = _tensors(job, work)
    exact = start.copies and _always_whole(job, tensors)
    custom = job.choice.target is SURGERY
    why, others = (job.choice.notes, ()) if custom else ((), job.choice.notes)
    step = Step(
        operation="upcycle",
        parameters=_parameters(job),
        exact=exact,
        layers=job.layers,
        notes=(*why, *_notes(job, exact)),
        advice=(*others, *_advice(job)),
        work=work,
    )
    return job.source.checkpoint.replace(step=step, tensors=tensors, **_written(job))


# --- what is asked for ----------------------------------------------------------------------------


def _check(checkpoint: Checkpoint, options: Options, start: Start) -> _Job:
    """Check the options against the checkpoint, and choose the target.

    The source loses a head that is tied to the embedding and equal to it.
    """
    require_plain(checkpoint)
    _require_stock(checkpoint)
    checkpoint = with_gathered_mlps(checkpoint)
    blocks = locate(checkpoint)
    require_whole(blocks)
    start = dataclasses.replace(start, models=tuple(map(with_gathered_mlps, start.models)))
    config, shape = _effective(checkpoint), options.shape(len(start.models))
    chosen = options.chosen(blocks)
    if not blocks.family.is_moe:
        shape = dataclasses.replace(shape, width=blocks.mlp(chosen[0]).width)
    choice = choose(blocks, config, options.target, shape, options.shared, chosen)
    _check_copies(choice.shape, start)
    checkpoint = drop_tied_head(checkpoint, bool(config.get("tie_word_embeddings")))
    return _Job(
        source=locate(checkpoint),
        trunk=locate(_trunk(checkpoint, chosen, start)),
        models=tuple(map(locate, start.models)),
        layers=chosen,
        choice=choice,
        start=start,
    )


def _check_copies(shape: Shape, start: Start) -> None:
    """Raise UsageError where the copies cannot be cut so, or shared out among the models."""
    models = len(start.models)
    if shape.width % shape.granularity:
        near = [g for g in range(1, shape.width + 1) if shape.width % g == 0]
        best = min(near, key=lambda g: abs(g - shape.granularity))
        what = f"granularity {shape.granularity} does not divide {shape.width} neurons"
        raise UsageError(what, f"{best} does")
    if models and shape.copies % models:
        what = f"{shape.copies} copies of {models} expert models"
        raise UsageError(what, "give a multiple of them with --experts")
    if start.router.kind == "class-means" and shape.copies != models:
        what = f"class means of {models} models for {shape.copies} copies"
        raise UsageError(what, "leave --experts out")


def _require_stock(checkpoint: Checkpoint) -> None:
    """Raise SurgeryError for a model with custom code."""
    kind, family = str(checkpoint.config.get("model_type")), find(checkpoint.config)
    if kind.startswith(OPERATED):
        raise SurgeryError(
            f"a {kind} has blocks that its own code computes: no target of upcycle has them",
            f"upcycle the {family.model_type} that it was made of",
        )


# --- what is planned ------------------------------------------------------------------------------


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
    """Return the tensors of a layer's mixture, by name."""
    target, shape = job.choice.target, job.choice.shape
    layer, mlp = job.trunk.layer(index), job.trunk.mlp(index)
    dtype, hidden = mlp.up.dtype, mlp.up.shape[1]
    name, kept_in = layer + job.router, "F32" if target.router_fp32 else dtype
    size = (shape.copies, hidden)
    if work is None:
        rows = drawn_rows(job.start.router, name, size, kept_in)
    else:
        rows = work.promise(str(index), "F32", size).cast(kept_in)
    rows = each_row(rows, shape.shards)  # The parts of a copy follow one another.
    if target.place is None:
        return {**job.trunk.restored(index, _wide(job, index)), name: rows}
    new = target.place(_experts(job, index))
    shared = shared_expert(mlp, target, shape)
    if shared is not None and target.shared and target.shared.place:
        new |= target.shared.place([shared])
    new |= {**target.extra(shape.experts, dtype), job.router: rows}
    return {layer + path: tensor for path, tensor in new.items()}


def _experts(job: _Job, index: int) -> list[Mlp]:
    """Return the routed experts of a layer as they begin."""
    mlp, layer, start = job.trunk.mlp(index), job.trunk.layer(index), job.start
    target, shape = job.choice.target, job.choice.shape
    copies = _copies(mlp, [b.mlp(index) for b in job.models], shape.copies)
    found: list[Mlp] = []
    for copy in copies:
        for expert in routed_experts(copy, target, shape):
            key = f"{layer}expert {len(found)}"
            changed = dropped(expert, start.drop, key, start.seed)
            found.append(noisy(changed, start.noise, key, start.seed))
    return found


def _wide(job: _Job, index: int) -> Mlp:
    """Return the MLP of a layer with the neurons of all its experts, the shared ones first."""
    mlp, shape, shared = job.trunk.mlp(index), job.choice.shape, list[Mlp]()
    if shape.shared:
        first = part(mlp, 0, shape.shared * shape.expert_width)
        shared = [scaled(first, 0.5 if shape.halved else 1.0)]
    return joined([*shared, *_experts(job, index)])


def _entry(job: _Job) -> dict[str, Any]:
    """Return the `surgery_blocks` entry that computes a `_wide` MLP as a mixture."""
    shape, target = job.choice.shape, job.choice.target
    options = block_config.Experts(
        experts=shape.experts,
        width=shape.expert_width,
        top_k=shape.top_k,
        shared_neurons=shape.shared * shape.expert_width,
        group=shape.shards,
        factor=shape.factor if target.groups else 1.0,
    )
    return block_config.experts_entry(job.source.family, job.layers, options)


def _mixture_of(job: _Job) -> Mixture:
    """Return the model that calibration walks.

    It is the source where the experts are copies, and for Llama 4, whose routed experts begin with
    an output of zero.
    """
    shared, shape = job.choice.target.shared, job.choice.shape
    walked = Mixture(checkpoint=job.trunk.checkpoint, layers=job.layers, shape=shape)
    if job.start.copies or (shared and shared.whole):
        return walked
    return dataclasses.replace(walked, wide=partial(_wide, job), entry=_entry(job))


def _trunk(checkpoint: Checkpoint, chosen: Sequence[int], start: Start) -> Checkpoint:
    """Return the model that everything but the routed experts is taken from.

    Raises SurgeryError for models that do not belong together.
    """
    blocks = locate(checkpoint)
    experts = [name for index in chosen for name in blocks.mlp(index).names]
    names = checkpoint.tensors if start.attention == "average" else experts
    for model in start.models:
        require_kin(checkpoint, model, names, _effective)
    return average(checkpoint, start.models) if start.attention == "average" else checkpoint


def _copies(mlp: Mlp, models: Sequence[Mlp], count: int) -> Iterator[Mlp]:
    """Yield `count` MLPs: copies of one, or equally many of each model, one after another."""
    for c in range(count):
        chosen = models[c * len(models) // count] if models else mlp
        yield chosen if chosen.up.dtype == mlp.up.dtype else _cast(chosen, mlp.up.dtype)


def _cast(mlp: Mlp, dtype: str) -> Mlp:
    parts = {f.name: getattr(mlp, f.name) for f in dataclasses.fields(mlp)}
    tensors = {name: t for name, t in parts.items() if isinstance(t, LazyTensor)}
    values: dict[str, Any] = {name: t.cast(dtype) for name, t in tensors.items()}
    return dataclasses.replace(mlp, **values)


def _effective(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the config with the defaults of its class written out."""
    return find(checkpoint.config).effective(complete(checkpoint.config))


def _written(job: _Job) -> dict[str, Any]:
    """Return the config and the custom code of the output."""
    choice, source = job.choice, job.source
    if choice.route is None:
        return with_blocks(source.checkpoint, [_entry(job)])
    before = _effective(source.checkpoint)
    config = config_of(choice.target, choice.route, before, choice.shape, job.layers, source.count)
    return {"config": config, "custom_code": False}


# --- what is said ---------------------------------------------------------------------------------


def _always_whole(job: _Job, tensors: Mapping[str, LazyTensor]) -> bool:
    """Return whether every token gets whole copies in the dtype that the model is loaded in."""
    target, router = job.choice.target, job.start.router
    if whole_copies(target, job.choice.shape):
        return True
    dtypes = {t.dtype for n, t in tensors.items() if n.endswith(job.router)}
    return (target.router_fp32 or dtypes == {"F32"}) and router.kind != "zero" and router.std > 0


def _parameters(job: _Job) -> dict[str, Any]:
    """Return the options that make the same again."""
    shape, start, router = job.choice.shape, job.start, job.start.router
    every = len(job.layers) == job.source.count
    found = {
        "experts": shape.experts,
        "top_k": shape.top_k,
        "granularity": shape.granularity,
        "shared": shape.shared,
        "layers": None if every else list(job.layers),
        "target": job.choice.target.model_type,
        "drop": start.drop,
        "noise": start.noise,
        "expert_models": list(map(_named, start.models)),
        "attention": start.attention,
        "router": router.kind,
        "router_std": router.std,
        "seed": router.seed,
    }
    found |= {"expert_texts": list(router.texts)} if router.texts else {}
    calibration = router.calibration.as_dict() if router.reads else {}
    return found | ({"calibration": calibration} if calibration else {})


def _named(model: Checkpoint) -> str:
    revision = model.source.revision
    return model.source.location + (f"@{revision}" if revision else "")


def _notes(job: _Job, exact: bool) -> Iterator[str]:
    target, shape, start = job.choice.target, job.choice.shape, job.start
    if target is SURGERY:
        yield NEEDS_TRUST
    if shape.shards > 1 and not whole_copies(target, shape):
        where = "hardly ever" if exact else "about one token in a thousand, in each layer"
        yield (
            f"{target.model_type} chooses experts one by one: where the router's logits of two "
            f"copies are equal a token gets parts of both, in this dtype {where}"
        )
    if target.note:
        yield target.note
    elif target.shared and target.shared.required and not shape.shared:
        yield (
            f"{target.model_type} always has a shared expert: it begins with down_proj at zero, "
            "and computes nothing until it is trained"
        )
    if shape.experts > 1 or shape.top_k == 1:
        yield _gradient(shape, start)
    if start.models:
        others = "the mean of theirs" if start.attention == "average" else "the base's"
        rest = f"attention, embeddings and norms are {others}"
        yield f"the experts are the MLPs of {len(start.models)} models; {rest}"
    sizes = (shape.expert_width, job.source.mlp(job.layers[0]).down.shape[0])
    if any(size % 8 for size in sizes) and target is not SURGERY:
        yield (
            f"experts of {sizes[0]} neurons on {sizes[1]} channels: grouped matrix products in "
            "bf16 want multiples of 8, and transformers 5 stops there without them; load it with "
            'experts_implementation="eager"'
        )


def _gradient(shape: Shape, start: Start) -> str:
    """Say whether the language-model loss teaches the routers anything at first."""
    if shape.top_k == 1:
        return (
            "with top-k 1 the renormalised routing weight is always 1: the router never gets a "
            "gradient from the language-model loss"
        )
    if not start.copies:
        return (
            "the experts differ from the start: this is another function, and where training begins"
        )
    if shape.shards > 1:
        return (
            "the copies are identical, and the parts of a copy are not: the language-model loss "
            "weighs these against one another, and copies differ as training goes on"
        )
    return (
        "the experts are identical, so the router has no language-model gradient until they "
        "differ: train with the auxiliary loss"
    )


def _advice(job: _Job) -> Iterator[str]:
    target, shape, start = job.choice.target, job.choice.shape, job.start
    if shape.shards > 1 and not whole_copies(target, shape):
        yield "--target glm4_moe chooses whole copies"
    if target.shared and target.shared.required and not shape.shared and not target.note:
        yield "--shared puts a part of the MLP into the shared expert"
    if shape.experts > 1 and shape.top_k > 1 and shape.shards == 1 and start.copies:
        yield "experts that differ from the start teach the router: --drop 0.5 or --noise"


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
    shards = max(1, int(p.get("granularity") or 1) - int(p.get("shared") or 0))
    return [*([check("copies", shards)] if shards > 1 else []), check("routing", shards)]


OPERATION = Operation(
    name="upcycle",
    function=upcycle,
    summary="Turn each MLP into a mixture of copies, exactly.",
    done=_done,
    why="A dense model that was paid for already is the cheapest beginning of a mixture of "
    "experts: capacity grows with the experts, the work of a token with those that are active.",
    limits="It was not trained after the conversion: it is where training starts from, larger and "
    "not better than its source.",
    suffix=_suffix,
    papers=_papers,
    tags=("mixture-of-experts", "upcycling"),
    blocks=("experts",),
    checks=_checks,
    models=("expert_models",),
    files=("expert_texts",),
)

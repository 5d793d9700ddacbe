"""Upcycling: each MLP becomes a mixture of experts behind a new router, in an architecture that transformers has.

Verbatim copies (Komatsuzaki et al. 2022, arXiv 2212.05055), copies cut in finer experts (virtual groups, He et al. 2024,
arXiv 2410.07524), and shared experts beside them compute exactly what the model did; training makes the experts differ.
Partial re-initialisation, noise and the MLPs of several models make them differ from the start, and change the function.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surgery.checkpoint import Checkpoint, LazyTensor, Step, open_checkpoint
from surgery.checkpoint.compat import complete
from surgery.errors import SurgeryError, UsageError
from surgery.families import OPERATED, Blocks, Mlp, find, locate
from surgery.families.targets import (
    ROUTES,
    TARGETS,
    UNABLE,
    Route,
    Shape,
    Target,
    config_of,
    misfit,
    resolve,
    unmet,
    whole_copies,
)
from surgery.operations.experts import (
    ROUTERS,
    average,
    dropped,
    noisy,
    require_kin,
    routed_experts,
    router_rows,
    shared_expert,
)
from surgery.operations.sound import drop_tied_head, require_plain, require_whole

ATTENTION = ("base", "average")
COPIES, ACTIVE = 8, 2  # by default


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """The route taken, and the shape that its target gives the experts; `notes` say why it and which others could."""

    route: Route
    target: Target
    shape: Shape
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """How experts and router begin: as copies, or made different."""

    drop: float
    noise: float
    models: tuple[Checkpoint, ...]
    attention: str
    router: str
    router_std: float
    seed: int

    @property
    def copies(self) -> bool:
        """Whether the experts are the source's MLP and nothing else."""
        return not (self.drop or self.noise or self.models)


def upcycle(checkpoint: Checkpoint, *, experts: int | None = None, top_k: int | None = None, granularity: int = 1,
            shared: int | None = None, layers: Collection[int] | None = None, dense_first: int = 0,
            target: str = "auto", drop: float = 0.0, noise: float = 0.0,
            expert_models: Sequence[Checkpoint | str | Path] = (), attention: str = "base", router: str = "normal",
            router_std: float = 0.02, seed: int = 0) -> Checkpoint:  # fmt: skip
    """A mixture of `experts` in place of each MLP, `top_k` of them active per token, in a native architecture.

    Args:
        checkpoint: a dense model; see `surgery families` for which.
        experts: routed experts of a layer, E (default: those of 8 copies, or of one for each of `expert_models`).
        top_k: of them active, K (default: those of 2 copies).
        granularity: parts that a copy of the MLP is cut in, G. Expert e is a part of copy e div (parts that are routed);
            E and K count parts, so both are multiples of those that are routed.
        shared: parts that every token passes, in the target's shared expert; only the others are routed. At granularity
            1, one shared expert takes half of the output. Default: what the target usually has.
        layers: the layers to convert (default: all), where the architecture can keep some dense.
        dense_first: how many first layers stay dense, instead of `layers`.
        target: the MoE model_type, or "auto" for the first that can hold this model in this shape exactly.
        drop: the part of each expert's neurons that is drawn anew (drop-upcycling; 0.5 in the paper).
        noise: the standard deviation of noise added to the experts' weights.
        expert_models: checkpoints, or what names them, whose MLPs become the copies (branch-train-mix).
        attention: what all else is taken from: "base", this checkpoint, or "average", the mean of `expert_models`.
        router: how its rows [E, H] begin: "normal", N(0, router_std²), or "zero".
        seed: with the tensor's name, decides every random value.

    Raises SurgeryError for a model that no native architecture can hold exactly, UsageError for impossible options.
    """
    models = tuple(m if isinstance(m, Checkpoint) else open_checkpoint(m) for m in expert_models)
    start = Start(drop=drop, noise=noise, models=models, attention=attention, router=router, router_std=router_std,
                  seed=seed)  # fmt: skip
    _check_start(start)
    shape = _shape(experts, top_k, granularity, shared or 0, len(models))
    require_plain(checkpoint)
    blocks = locate(checkpoint)
    require_whole(blocks)
    _require_stock(checkpoint, blocks)
    config = _effective(checkpoint)
    chosen = _choose_layers(blocks, layers, dense_first)
    shape = dataclasses.replace(shape, width=int(config[blocks.family.width_key]))
    choice = choose(blocks, config, target, shape, shared, chosen)
    _check_copies(choice.shape, len(models))
    checkpoint, notes = drop_tied_head(checkpoint, bool(config.get("tie_word_embeddings")))
    tensors = _tensors(checkpoint, chosen, choice, start)
    if choice.route.rewrite:
        tensors = choice.route.rewrite(tensors, config)
    exact = start.copies and _always_whole(choice, start, tensors)
    step = Step(
        operation="upcycle",
        parameters=_parameters(choice, start, None if len(chosen) == blocks.count else chosen),
        exact=exact,
        layers=tuple(chosen),
        notes=(*notes, *choice.notes, *_notes(choice, start, exact)),
    )  # fmt: skip
    new_config = config_of(choice.target, choice.route, config, choice.shape, chosen, blocks.count)
    return checkpoint.replace(step=step, config=new_config, tensors=tensors, custom_code=False)


# --- options ----------------------------------------------------------------------------------------------------------


def _shape(experts: int | None, top_k: int | None, granularity: int, shared: int, models: int) -> Shape:
    """The shape asked for; of `experts` and `top_k`, what is not given follows from the number of copies."""
    if granularity < 1 or shared < 0 or (shared >= granularity > 1) or (granularity == 1 and shared > 1):
        raise UsageError(f"{shared} shared of {granularity} parts of an MLP",
                         "a part at least must be routed; without --granularity, --shared is 0 or 1")  # fmt: skip
    routed = granularity - shared if granularity > 1 else 1
    experts = (models or COPIES) * routed if experts is None else experts
    top_k = ACTIVE * routed if top_k is None else top_k
    if experts < 1 or top_k < 1:
        raise UsageError(
            f"{experts} experts with top-k {top_k}: both must be at least 1", "for example --experts 8 --top-k 2"
        )
    if top_k > experts:
        raise UsageError(f"top-k {top_k} of {experts} experts", "top-k can be at most the number of experts")
    for name, value in (("experts", experts), ("top-k", top_k)):
        if value % routed:
            raise UsageError(f"{name} {value} is no multiple of the {routed} routed experts that make up a copy",
                             f"for example --experts {COPIES * routed} --top-k {ACTIVE * routed}")  # fmt: skip
    return Shape(experts=experts, top_k=top_k, granularity=granularity, shared=shared)


def _check_start(start: Start) -> None:
    if start.router_std < 0:
        raise UsageError(f"a router of standard deviation {start.router_std}", "give 0 or more; 0.02 is usual")
    if start.router not in ROUTERS:
        raise UsageError(f"unknown router {start.router!r}", f"one of: {', '.join(ROUTERS)}")
    if not 0 <= start.drop <= 1:
        raise UsageError(f"drop {start.drop} of the neurons", "give a part from 0 to 1; 0.5 is the paper's")
    if start.noise < 0:
        raise UsageError(f"noise of standard deviation {start.noise}", "give 0 or more, well below that of the weights")
    if start.attention not in ATTENTION:
        raise UsageError(f"attention from {start.attention!r}", f"one of: {', '.join(ATTENTION)}")
    if start.attention == "average" and not start.models:
        raise UsageError("an average of no models", "name them, each with --expert MODEL")


def _check_copies(shape: Shape, models: int) -> None:
    if shape.width % shape.granularity:
        near = [g for g in range(1, shape.width + 1) if shape.width % g == 0]
        best = min(near, key=lambda g: abs(g - shape.granularity))
        raise UsageError(f"granularity {shape.granularity} does not divide {shape.width} neurons", f"{best} does")
    if models and shape.copies % models:
        raise UsageError(f"{shape.copies} copies of {models} expert models", "give a multiple of them with --experts")


def _require_stock(checkpoint: Checkpoint, blocks: Blocks) -> None:
    kind = str(checkpoint.config.get("model_type"))
    if kind.startswith(OPERATED):
        raise SurgeryError(f"a {kind} has blocks that its own code computes: no target of upcycle has them",
                           f"upcycle the {blocks.family.model_type} that it was made of")  # fmt: skip
    if checkpoint.config.get("text_config"):
        raise SurgeryError(f"{checkpoint.config.get('model_type')} is multimodal: no target of upcycle holds its other towers",
                           f"give its language model, a {blocks.family.model_type}, as a checkpoint of its own")  # fmt: skip


def _choose_layers(blocks: Blocks, layers: Collection[int] | None, dense_first: int) -> list[int]:
    everything = list(range(blocks.count))
    if dense_first:
        if layers is not None:
            raise UsageError("both --layers and --dense-first", "give one of them")
        if not 0 < dense_first < blocks.count:
            raise UsageError(f"{dense_first} dense layers of {blocks.count}", f"give 1 to {blocks.count - 1}")
        return everything[dense_first:]
    if layers is None:
        return everything
    if unknown := sorted(set(layers) - set(everything)):
        raise UsageError(
            f"layer {unknown[0]} of a model with {blocks.count} layers", f"layers are 0 to {blocks.count - 1}"
        )
    if not layers:
        raise UsageError("no layer to convert", "leave --layers out for all of them")
    return sorted(set(layers))


# --- the target -------------------------------------------------------------------------------------------------------


def choose(blocks: Blocks, config: Mapping[str, Any], target: str, shape: Shape, shared: int | None,
           chosen: Sequence[int]) -> Choice:  # fmt: skip
    """The route into `target`; for "auto" the first exact one, of those that never tear a copy if there is one.

    Raises SurgeryError where there is none.
    """
    source = blocks.family.model_type
    reasons: dict[str, str] = {}  # by target, why not
    able: list[tuple[Route, Target, Shape]] = []
    for route in _named(blocks, target):
        candidate = TARGETS[route.target]
        fitted = resolve(candidate, shape, shared)
        if bad := unmet(route, config):
            reasons[route.target] = ", ".join(bad)
        elif why := misfit(candidate, fitted, chosen, blocks.count):
            reasons[route.target] = f"{route.target} {why}"
        else:
            able.append((route, candidate, fitted))
    if not able:
        raise _none_fits(source, reasons, len(chosen) < blocks.count)
    able.sort(key=lambda c: not whole_copies(c[1], c[2]))
    route, best, fitted = able[0]
    others = [r.target for r, _, _ in able[1:]]
    return Choice(route=route, target=best, shape=fitted,
                  notes=_why(source, best, others, reasons) if target == "auto" else ())  # fmt: skip


def _named(blocks: Blocks, target: str) -> list[Route]:
    """The routes of the source into `target`."""
    family = blocks.family
    if family.is_moe:
        raise SurgeryError(f"{family.model_type} is a mixture of experts already", "give a dense model")
    if target in UNABLE:
        raise UsageError(f"{target} {UNABLE[target]}", f"one of: auto, {', '.join(TARGETS)}")
    if target not in ("auto", *TARGETS):
        raise UsageError(f"unknown target {target!r}", f"one of: auto, {', '.join(TARGETS)}")
    routes = [r for r in ROUTES if r.source == family.model_type]
    if not routes:
        sources = ", ".join(dict.fromkeys(r.source for r in ROUTES))
        raise SurgeryError(f"no native mixture-of-experts architecture can hold a {family.model_type} exactly",
                           f"upcycle takes {sources}")  # fmt: skip
    if named := [r for r in routes if r.target == target or (target == "auto" and r.auto)]:
        return named
    raise SurgeryError(f"{family.model_type} does not go into {target} exactly", "use --target auto")


def _none_fits(source: str, reasons: Mapping[str, str], some_layers: bool) -> SurgeryError:
    """Why no target does: the config, or the shape."""
    shape = [why for target, why in reasons.items() if why.startswith(f"{target} ")]
    if shape:
        hint = "leave --layers out" if some_layers else "ask for another shape, or another --target"
        return SurgeryError("; ".join(shape), hint)
    listed = "; ".join(f"{target}: {why}" for target, why in reasons.items())
    return SurgeryError(f"this {source} does not go into a native architecture exactly ({listed})",
                        "a config like this needs custom code, which upcycle does not write yet")  # fmt: skip


def _why(source: str, best: Target, others: Sequence[str], reasons: Mapping[str, str]) -> tuple[str, ...]:
    """What `--target auto` says of its choice."""
    could = f"; --target {' or '.join(others)} could too" if others else ""
    not_these = [why if why.startswith(f"{t} ") else f"{t} not: {why}" for t, why in reasons.items()]
    cannot = f" ({'; '.join(not_these)})" if not_these else ""
    return (f"{best.model_type} holds this {source} exactly in this shape{could}{cannot}",)


# --- tensors ----------------------------------------------------------------------------------------------------------


def _tensors(checkpoint: Checkpoint, chosen: Sequence[int], choice: Choice, start: Start) -> dict[str, LazyTensor]:
    trunk, sources = _trunk(checkpoint, chosen, start), [locate(m) for m in start.models]
    blocks, target = locate(trunk), choice.target
    tensors = dict(trunk.tensors)
    for index in range(blocks.count):
        mlp, layer = blocks.mlp(index), blocks.layer(index)
        if mlp.biased or mlp.gate_bias is not None:
            raise SurgeryError(f"the MLP of layer {index} has biases, which {target.model_type} cannot hold",
                               "no native architecture takes this model exactly")  # fmt: skip
        for name in mlp.names:
            del tensors[name]
        others = [b.mlp(index) for b in sources]
        new = _mixture(mlp, others, layer, choice, start) if index in chosen else target.dense([mlp])
        tensors |= {layer + path: tensor for path, tensor in new.items()}
    return tensors


def _mixture(mlp: Mlp, others: Sequence[Mlp], layer: str, choice: Choice, start: Start) -> dict[str, LazyTensor]:
    """The block of one layer, by path in it."""
    target, s, dtype = choice.target, choice.shape, mlp.up.dtype
    parts = [part for copy in _copies(mlp, others, s.copies) for part in routed_experts(copy, target, s)]
    new = target.place([_begun(e, f"{layer}expert {i}", start) for i, e in enumerate(parts)])
    if (shared := shared_expert(mlp, target, s)) is not None and target.shared:
        new |= target.shared.place([shared])
    router = router_rows(start.router, layer + target.router, start.seed, start.router_std, s, mlp.up.shape[1],
                          "F32" if target.router_fp32 else dtype)  # fmt: skip
    return {**new, **target.extra(s.experts, dtype), target.router: router}


def _begun(expert: Mlp, key: str, start: Start) -> Mlp:
    """An expert as it begins."""
    return noisy(dropped(expert, start.drop, key, start.seed), start.noise, key, start.seed)


def _trunk(checkpoint: Checkpoint, chosen: Sequence[int], start: Start) -> Checkpoint:
    """What all but the routed experts is taken from. Raises SurgeryError for models that do not belong together."""
    blocks = locate(checkpoint)
    experts = [name for index in chosen for name in blocks.mlp(index).names]
    names = checkpoint.tensors if start.attention == "average" else experts
    for model in start.models:
        require_kin(checkpoint, model, names, _effective)
    return average(checkpoint, start.models) if start.attention == "average" else checkpoint


def _copies(mlp: Mlp, models: Sequence[Mlp], count: int) -> Iterator[Mlp]:
    """`count` MLPs: copies of one, or those of several models, equally many of each and one model after another."""
    for c in range(count):
        chosen = models[c * len(models) // count] if models else mlp
        yield chosen if chosen.up.dtype == mlp.up.dtype else _cast(chosen, mlp.up.dtype)


def _cast(mlp: Mlp, dtype: str) -> Mlp:
    return dataclasses.replace(mlp, gate=mlp.gate and mlp.gate.cast(dtype), up=mlp.up.cast(dtype),
                               down=mlp.down.cast(dtype))  # fmt: skip


def _effective(checkpoint: Checkpoint) -> dict[str, Any]:
    return find(checkpoint.config).effective(complete(checkpoint.config))


# --- what is said -----------------------------------------------------------------------------------------------------


def _always_whole(choice: Choice, start: Start, tensors: Mapping[str, LazyTensor]) -> bool:
    """Whether every token gets whole copies in the dtype that the model is loaded in."""
    if whole_copies(choice.target, choice.shape):
        return True
    dtypes = {t.dtype for n, t in tensors.items() if n.endswith(choice.target.router)}
    return (choice.target.router_fp32 or dtypes == {"F32"}) and start.router != "zero" and start.router_std > 0


def _parameters(choice: Choice, start: Start, layers: list[int] | None) -> dict[str, Any]:
    s = choice.shape
    return {"experts": s.experts, "top_k": s.top_k, "granularity": s.granularity, "shared": s.shared, "layers": layers,
            "target": choice.target.model_type, "drop": start.drop, "noise": start.noise,
            "expert_models": [m.source.location + (f"@{m.source.revision}" if m.source.revision else "") for m in start.models],
            "attention": start.attention, "router": start.router, "router_std": start.router_std, "seed": start.seed}  # fmt: skip


def _notes(choice: Choice, start: Start, exact: bool) -> Iterator[str]:
    target, s = choice.target, choice.shape
    if s.shards > 1 and not whole_copies(target, s):
        where = "hardly ever" if exact else "about one token in a thousand, in each layer"
        yield (f"{target.model_type} chooses experts one by one: where the router's logits of two copies are equal a token gets "
               f"parts of both, in this dtype {where}; --target glm4_moe chooses whole copies")  # fmt: skip
    if s.granularity > 1 and s.expert_width % 8:
        yield (f"experts of {s.expert_width} neurons: grouped matrix products in bf16 want a multiple of 8, and "
               "transformers stops there without one")  # fmt: skip
    if target.note:
        yield target.note
    elif target.shared and target.shared.required and not s.shared:
        yield (f"{target.model_type} always has a shared expert: it begins with down_proj at zero, and computes nothing until it "
               "is trained; --shared puts a part of the MLP there")  # fmt: skip
    if s.experts > 1 or s.top_k == 1:
        yield _gradient(s, start)
    if start.models:
        others = "the mean of theirs" if start.attention == "average" else "the base's"
        yield f"the experts are the MLPs of {len(start.models)} models; attention, embeddings and norms are {others}"


def _gradient(s: Shape, start: Start) -> str:
    if s.top_k == 1:
        return ("with top-k 1 the renormalised routing weight is always 1: the router never gets a gradient from the "
                "language-model loss")  # fmt: skip
    if not start.copies:
        return "the experts differ from the start: this is another function, and where training begins"
    return ("the experts are identical, so the router has no language-model gradient until they differ: train with the "
            "auxiliary loss, or begin with --drop or --noise")  # fmt: skip

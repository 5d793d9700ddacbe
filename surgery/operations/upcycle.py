"""Sparse upcycling (Komatsuzaki et al. 2022, arXiv 2212.05055): each MLP becomes `experts` copies behind a new router.

The copies' routing weights sum to one, so the model computes exactly what it did; training makes the experts differ.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from surgery.checkpoint import Checkpoint, LazyTensor, Step, normal
from surgery.checkpoint.compat import complete
from surgery.errors import SurgeryError, UsageError
from surgery.families import Blocks, locate
from surgery.families.targets import ROUTES, TARGETS, Route, Target, evaluate, unmet
from surgery.operations.sound import drop_tied_head, require_plain, require_whole


def upcycle(checkpoint: Checkpoint, *, experts: int = 8, top_k: int = 2, layers: Collection[int] | None = None,
            target: str = "auto", router_std: float = 0.02, seed: int = 0) -> Checkpoint:  # fmt: skip
    """A mixture of `experts` copies of each MLP, `top_k` of them active per token, in a native architecture.

    Args:
        checkpoint: a dense model; see `surgery families` for which.
        layers: the layers to convert (default: all), where the architecture can keep some dense.
        target: the MoE model_type, or "auto" for the first that can hold this model exactly.
        router_std: standard deviation of the router's weights [E, H], drawn from N(0, router_std²).
        seed: with the tensor's name, decides every random value.

    Raises SurgeryError for a model that no native architecture can hold exactly, UsageError for impossible options.
    """
    _check_counts(experts, top_k, router_std)
    require_plain(checkpoint)
    blocks = locate(checkpoint)
    require_whole(blocks)
    _require_text_only(checkpoint, blocks)
    config = blocks.family.effective(complete(checkpoint.config))
    route = choose_route(blocks, config, target)
    chosen = _choose_layers(blocks, layers, TARGETS[route.target])
    checkpoint, notes = drop_tied_head(checkpoint, bool(config.get("tie_word_embeddings")))
    blocks = locate(checkpoint)
    tensors = _tensors(blocks, chosen, TARGETS[route.target], experts, router_std, seed)
    if route.rewrite:
        tensors = route.rewrite(tensors, config)
    if top_k == 1 or experts > 1:
        notes.append(_gradient_note(top_k))
    step = Step(
        operation="upcycle",
        parameters={"experts": experts, "top_k": top_k, "layers": None if layers is None else sorted(chosen),
                    "target": route.target, "router_std": router_std, "seed": seed},
        exact=True,
        layers=tuple(chosen),
        notes=tuple(notes),
    )  # fmt: skip
    new_config = _config(config, route, chosen, blocks.count, experts, top_k)
    return checkpoint.replace(step=step, config=new_config, tensors=tensors, custom_code=False)


def _check_counts(experts: int, top_k: int, router_std: float) -> None:
    if experts < 1 or top_k < 1:
        raise UsageError(
            f"{experts} experts with top-k {top_k}: both must be at least 1", "for example --experts 8 --top-k 2"
        )
    if top_k > experts:
        raise UsageError(f"top-k {top_k} of {experts} experts", "top-k can be at most the number of experts")
    if router_std < 0:
        raise UsageError(f"a router of standard deviation {router_std}", "give 0 or more; 0.02 is usual")


def _require_text_only(checkpoint: Checkpoint, blocks: Blocks) -> None:
    if checkpoint.config.get("text_config"):
        raise SurgeryError(f"{checkpoint.config.get('model_type')} is multimodal: no target of upcycle holds its other towers",
                           f"give its language model, a {blocks.family.model_type}, as a checkpoint of its own")  # fmt: skip


def choose_route(blocks: Blocks, config: Mapping[str, Any], target: str) -> Route:
    """The route into `target`, or the first exact one for "auto". Raises SurgeryError where there is none."""
    family = blocks.family
    if family.is_moe:
        raise SurgeryError(f"{family.model_type} is a mixture of experts already", "give a dense model")
    if target not in ("auto", *TARGETS):
        raise UsageError(f"unknown target {target!r}", f"one of: auto, {', '.join(TARGETS)}")
    routes = [r for r in ROUTES if r.source == family.model_type]
    if not routes:
        sources = ", ".join(dict.fromkeys(r.source for r in ROUTES))
        raise SurgeryError(f"no native mixture-of-experts architecture can hold a {family.model_type} exactly",
                           f"upcycle takes {sources}")  # fmt: skip
    routes = [r for r in routes if target in ("auto", r.target)]
    if not routes:
        raise SurgeryError(f"{family.model_type} does not go into {target} exactly", "use --target auto")
    reasons = [f"{r.target}: {', '.join(bad)}" for r in routes if (bad := unmet(r, config))]
    exact = [r for r in routes if not unmet(r, config)]
    if not exact:
        raise SurgeryError(f"this {family.model_type} does not go into a native architecture exactly ({'; '.join(reasons)})",
                           "a config like this needs custom code, which upcycle does not write yet")  # fmt: skip
    return exact[0]


def _choose_layers(blocks: Blocks, layers: Collection[int] | None, target: Target) -> list[int]:
    everything = list(range(blocks.count))
    if layers is None:
        return everything
    if unknown := sorted(set(layers) - set(everything)):
        raise UsageError(
            f"layer {unknown[0]} of a model with {blocks.count} layers", f"layers are 0 to {blocks.count - 1}"
        )
    if not layers:
        raise UsageError("no layer to convert", "leave --layers out for all of them")
    if set(layers) != set(everything) and not target.dense_layers_key:
        raise SurgeryError(f"{target.model_type} has experts in every layer: it cannot keep some layers dense",
                           "leave --layers out")  # fmt: skip
    return sorted(set(layers))


def _tensors(blocks: Blocks, chosen: list[int], target: Target, experts: int, router_std: float,
             seed: int) -> dict[str, LazyTensor]:  # fmt: skip
    tensors = dict(blocks.checkpoint.tensors)
    for index in chosen:
        mlp, start = blocks.mlp(index), blocks.layer(index)
        if mlp.biased or mlp.gate_bias is not None:
            raise SurgeryError(f"the MLP of layer {index} has biases, which {target.model_type} cannot hold",
                               "no native architecture takes this model exactly")  # fmt: skip
        for name in mlp.names:
            del tensors[name]
        routed, new = target.share(mlp) if target.share else (mlp, {})
        new = new | target.place([routed] * experts)
        hidden = mlp.up.shape[1]
        new[target.router] = normal(start + target.router, seed, router_std, (experts, hidden), mlp.up.dtype)
        tensors |= {start + path: tensor for path, tensor in new.items()}
    return tensors


def _config(config: Mapping[str, Any], route: Route, chosen: list[int], count: int, experts: int,
            top_k: int) -> dict[str, Any]:  # fmt: skip
    target = TARGETS[route.target]
    out = {k: v for k, v in config.items() if k != "auto_map"}
    out |= evaluate(target.config, config) | evaluate(route.config, config)
    out |= {"architectures": [target.architecture], "model_type": target.model_type, "num_experts_per_tok": top_k}
    out |= dict.fromkeys(target.experts_keys, experts)
    out[target.width_key] = config["intermediate_size"]
    if target.dense_layers_key:
        out[target.dense_layers_key] = [i for i in range(count) if i not in chosen]
    return out


def _gradient_note(top_k: int) -> str:
    if top_k == 1:
        return ("with top-k 1 the renormalised routing weight is always 1: the router never gets a gradient from the "
                "language-model loss")  # fmt: skip
    return ("the experts are identical, so the router has no language-model gradient until they differ: train with the "
            "auxiliary loss")  # fmt: skip

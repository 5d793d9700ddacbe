"""Native mixture-of-experts architectures that can hold a dense model exactly.

`TARGETS` says where experts, router and shared experts are on disk and what the config calls them.
Which source goes into which target is in `routes`.

A block of copies of an MLP computes s·MLP(x), where s is the sum of the selected routing weights.
Every target here has s = 1, or a factor in its config. Finer shapes cut each copy into G shards
(Krajewski et al. 2024, arXiv 2402.07871). The rows of the router are equal within a copy (virtual
groups, He et al. 2024, arXiv 2410.07524), and K is a multiple of the shards. If whole copies are
selected, the weights of the shards of a copy sum to s/G, so a factor of G restores the function.

Shapes: H hidden_size, F intermediate_size; E experts, K of them active; N = E / shards copies.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from surgery.checkpoint import constant
from surgery.families import layouts
from surgery.families.layouts import Place, Tensors
from surgery.families.routes import ROUTES, Config, Route, evaluate, head_dim, unmet

__all__ = [
    "ROUTES",
    "SURGERY",
    "TARGETS",
    "Route",
    "Shape",
    "Shared",
    "Target",
    "evaluate",
    "misfit",
    "unmet",
    "whole_copies",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """The shape of a mixture of experts made of copies of an MLP.

    Args:
        experts: routed experts, E.
        top_k: active experts, K.
        granularity: the parts that each copy of the MLP is cut into.
        shared: how many of these parts form the shared expert, which every token passes; the others
            are routed. At granularity 1, one shared expert gives half of the output.
        width: the MLP's intermediate_size, F.
    """

    experts: int
    top_k: int
    granularity: int = 1
    shared: int = 0
    width: int = 0

    @property
    def shards(self) -> int:
        """Return the routed experts that make up a copy."""
        return self.granularity - self.shared if self.granularity > 1 else 1

    @property
    def copies(self) -> int:
        """Return the copies of the MLP among the routed experts, N."""
        return self.experts // self.shards

    @property
    def active_copies(self) -> int:
        """Return the copies that a token passes."""
        return self.top_k // self.shards

    @property
    def expert_width(self) -> int:
        """Return the intermediate_size of an expert."""
        return self.width // self.granularity

    @property
    def halved(self) -> bool:
        """Return whether the shared expert is a whole copy, so that it gives half of the output."""
        return self.granularity == 1 and self.shared > 0

    @property
    def factor(self) -> float:
        """Return the factor of the routed experts' output, where their weights sum to one."""
        return 0.5 if self.halved else float(self.shards)


@dataclass(frozen=True, kw_only=True, slots=True)
class Shared:
    """The shared expert of a target.

    Args:
        place: its tensors on disk.
        required: whether it exists even without parts of the MLP; it then computes zero.
        gated: whether its output is multiplied by sigmoid(gate·x), which is 1/2 for a gate of zero.
        whole: whether it must be the MLP itself, while the routed experts start at zero. That is so
            where the routing weights scale the experts' *input*.
        most: how many parts it can hold; None for any number.
        usual: how many it has at granularity 1.
    """

    place: Place | None
    required: bool = True
    gated: bool = False
    whole: bool = False
    most: int | None = None
    usual: int = 1


_MLP = layouts.usual("mlp")


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """One architecture. Paths are relative to a decoder layer.

    Args:
        model_type: its `model_type`.
        architecture: the name of its class.
        router: the path of the router's weight.
        place: the routed experts' tensors on disk. None where they are neurons of one wide MLP,
            which keeps the place of the dense one.
        config: entries of the config. A value may be a function of the source's config.
        experts_keys: the config keys of the number of experts.
        top_k_key: the config key of the number of active experts.
        width_key: the config key of the experts' intermediate_size.
        shape: gives further config entries that depend on the shape.
        shared: the shared expert.
        extra: gives further tensors, from the number of experts and their dtype.
        router_fp32: whether the class computes the router in fp32 whatever its dtype, so that it is
            stored in fp32.
        groups: whether it selects whole groups of experts, so that copies are always whole.
        dense_layers: gives the config entries for experts in these layers of so many, or None where
            the other layers cannot stay dense. It is None where all layers must have experts.
        dense: the tensors of a layer that stays dense.
        dense_rule: completes the error where layers cannot stay dense.
        note: what the user should know.
    """

    model_type: str
    architecture: str
    router: str
    place: Place | None
    config: Mapping[str, Any]
    experts_keys: tuple[str, ...] = ("num_local_experts",)
    top_k_key: str = "num_experts_per_tok"
    width_key: str = "intermediate_size"
    shape: Callable[[Shape], dict[str, Any]] = lambda s: {}
    shared: Shared | None = None
    extra: Callable[[int, str], Tensors] = lambda e, dtype: {}
    router_fp32: bool = False
    groups: bool = False
    dense_layers: Callable[[Sequence[int], int], dict[str, Any] | None] | None = None
    dense: Place = _MLP
    dense_rule: str = "has experts in every layer: it cannot keep some layers dense"
    note: str = ""


# --- layers that stay dense -----------------------------------------------------------------------


def _any_layer(chosen: Sequence[int], count: int) -> dict[str, Any]:
    return {"mlp_only_layers": [i for i in range(count) if i not in chosen]}


def _first_layers(chosen: Sequence[int], count: int) -> dict[str, Any] | None:
    if list(chosen) != list(range(chosen[0], count)):
        return None
    return {"first_k_dense_replace": chosen[0]}


def _outer_layers(chosen: Sequence[int], count: int) -> dict[str, Any] | None:
    if list(chosen) != list(range(chosen[0], chosen[-1] + 1)):
        return None
    return {
        "moe_layer_start_index": chosen[0],
        "moe_layer_end_index": chosen[-1],
        "moe_layer_interval": 1,
    }


def _named_layers(chosen: Sequence[int], count: int) -> dict[str, Any]:
    return {"moe_layers": list(chosen)}


# --- the table ------------------------------------------------------------------------------------


def _grouped(s: Shape) -> dict[str, Any]:
    """Return the config entries for DeepSeek-V3's router, whose groups are copies.

    The score of a group is the sum of its two best experts, so a group has at least two.
    """
    groups, chosen = (s.copies, s.active_copies) if s.shards > 1 else (1, 1)
    return {
        "n_group": groups,
        "topk_group": chosen,
        "routed_scaling_factor": s.factor,
        "n_shared_experts": max(1, s.shared),
    }


def _zero_gate(experts: Sequence[Any]) -> Tensors:
    """Return Qwen2-MoE's shared expert, with a gate of zero."""
    shared, mlp = layouts.usual("mlp.shared_expert")(experts), experts[0]
    gate = constant(0.0, (1, mlp.up.shape[1]), mlp.up.dtype)
    return shared | {"mlp.shared_expert_gate.weight": gate}


def _correction(path: str, *groups: int) -> Callable[[int, str], Tensors]:
    """Return a zero bias for the selection of experts, which training uses to balance the load."""
    return lambda e, dtype: {f"{path}.e_score_correction_bias": constant(0.0, (*groups, e), "F32")}


_QWEN_EXPERTS = layouts.usual("mlp.experts.{e}")
_AUXILIARY = {"output_router_logits": False, "router_aux_loss_coef": 0.001}
# DeepSeek-V3's block of experts, in architectures with usual attention.
_DEEPSEEK: dict[str, Any] = {
    "router": "mlp.gate.weight",
    "place": _QWEN_EXPERTS,
    "experts_keys": ("n_routed_experts",),
    "width_key": "moe_intermediate_size",
    "shape": _grouped,
    "shared": Shared(place=layouts.usual("mlp.shared_experts")),
    "extra": _correction("mlp.gate"),
    "router_fp32": True,
    "groups": True,
    "dense_layers": _first_layers,
    "dense_rule": "can keep only the first layers dense",
}

TARGETS: dict[str, Target] = {
    t.model_type: t
    for t in (
        Target(
            model_type="mixtral",
            architecture="MixtralForCausalLM",
            router="block_sparse_moe.gate.weight",
            place=layouts.per_expert(
                "block_sparse_moe.experts.{e}.w1",
                "block_sparse_moe.experts.{e}.w3",
                "block_sparse_moe.experts.{e}.w2",
            ),
            # yarn and longrope need a number for head_dim, and Mixtral's default is None.
            config=_AUXILIARY | {"router_jitter_noise": 0.0, "head_dim": head_dim},
        ),
        Target(
            model_type="qwen2_moe",
            architecture="Qwen2MoeForCausalLM",
            router="mlp.gate.weight",
            place=_QWEN_EXPERTS,
            config=_AUXILIARY
            | {"norm_topk_prob": True, "decoder_sparse_step": 1, "qkv_bias": True},
            experts_keys=("num_experts",),
            width_key="moe_intermediate_size",
            shape=lambda s: {"shared_expert_intermediate_size": max(1, s.shared) * s.expert_width},
            shared=Shared(place=_zero_gate, gated=True),
            dense_layers=_any_layer,
        ),
        Target(
            model_type="qwen3_moe",
            architecture="Qwen3MoeForCausalLM",
            router="mlp.gate.weight",
            place=_QWEN_EXPERTS,
            config=_AUXILIARY | {"norm_topk_prob": True, "decoder_sparse_step": 1},
            experts_keys=("num_experts", "num_local_experts"),
            width_key="moe_intermediate_size",
            dense_layers=_any_layer,
        ),
        Target(
            model_type="granitemoe",
            architecture="GraniteMoeForCausalLM",
            router="block_sparse_moe.router.layer.weight",
            place=layouts.granite,
            config=_AUXILIARY | {"head_dim": head_dim},
        ),
        Target(
            model_type="granitemoeshared",
            architecture="GraniteMoeSharedForCausalLM",
            router="block_sparse_moe.router.layer.weight",
            place=layouts.granite,
            config=_AUXILIARY | {"head_dim": head_dim},
            shape=lambda s: {"shared_intermediate_size": s.shared * s.expert_width},
            shared=Shared(place=layouts.granite_shared, required=False),
        ),
        Target(
            model_type="flex_olmo",
            architecture="FlexOlmoForCausalLM",
            router="mlp.gate.weight",
            place=_QWEN_EXPERTS,
            config=_AUXILIARY | {"norm_topk_prob": True},
            experts_keys=("num_experts",),
        ),
        Target(
            model_type="glm4_moe",
            architecture="Glm4MoeForCausalLM",
            # No source has the layers for multi-token prediction that transformers 5 assumes.
            config={"norm_topk_prob": True, "head_dim": head_dim, "num_nextn_predict_layers": 0},
            **_DEEPSEEK,
        ),
        Target(
            model_type="dots1",
            architecture="Dots1ForCausalLM",
            config={"norm_topk_prob": True, "head_dim": head_dim},
            **_DEEPSEEK,
        ),
        Target(
            model_type="ernie4_5_moe",
            architecture="Ernie4_5_MoeForCausalLM",
            router="mlp.gate.weight",
            place=_QWEN_EXPERTS,
            config=_AUXILIARY | {"head_dim": head_dim, "moe_norm_min": 1e-12},
            experts_keys=("moe_num_experts",),
            top_k_key="moe_k",
            width_key="moe_intermediate_size",
            shape=lambda s: {"moe_num_shared_experts": s.shared},
            shared=Shared(place=layouts.usual("mlp.shared_experts"), required=False, usual=0),
            extra=_correction("mlp.moe_statics", 1),
            router_fp32=True,
            dense_layers=_outer_layers,
            dense_rule="can keep only the first and the last layers dense",
        ),
        Target(
            model_type="hunyuan_v1_moe",
            architecture="HunYuanMoEV1ForCausalLM",
            router="mlp.gate.wg.weight",
            place=_QWEN_EXPERTS,
            config={"head_dim": head_dim},
            experts_keys=("num_experts",),
            top_k_key="moe_topk",
            shared=Shared(place=layouts.usual("mlp.shared_mlp"), most=1),
        ),
        Target(
            model_type="llama4_text",
            architecture="Llama4ForCausalLM",
            router="feed_forward.router.weight",
            place=layouts.llama4,
            config=_AUXILIARY
            | {
                "head_dim": head_dim,
                "router_jitter_noise": 0.0,
                "interleave_moe_layer_step": 1,
                "intermediate_size_mlp": lambda c: c["intermediate_size"],
            },
            shared=Shared(place=layouts.usual("feed_forward.shared_expert"), whole=True),
            dense_layers=_named_layers,
            dense=layouts.usual("feed_forward"),
            note="the shared expert is the MLP, and the routed experts start with a down_proj of "
            "zero, because Llama 4 scales the input of its experts: their outputs cannot add up to "
            "the MLP's",
        ),
        Target(
            model_type="gpt_oss",
            architecture="GptOssForCausalLM",
            router="mlp.router.weight",
            place=layouts.gpt_oss,
            config=_AUXILIARY
            | {"head_dim": head_dim, "swiglu_alpha": 1.0, "swiglu_limit": 60000.0},
            extra=lambda e, dtype: {"mlp.router.bias": constant(0.0, (e,), dtype)},
            note="swiglu_alpha and swiglu_limit make GPT-OSS's activation SiLU in transformers 5; "
            "transformers 4.57 and other runtimes ignore both, and compute another function",
        ),
    )
}

# The custom-code block (surgery/blocks/experts_mlp.py), for any dense family whose MLP is a module.
SURGERY = Target(
    model_type="surgery",
    architecture="SurgeryForCausalLM",
    router="mlp.router.weight",
    place=None,
    config={},
    shared=Shared(place=None, required=False, usual=0),
    router_fp32=True,
    groups=True,
    dense_layers=lambda chosen, count: {},
)

# Architectures that people ask for and that hold no dense model exactly, with the reason.
UNABLE = {
    "deepseek_v3": "normalises its compressed keys and values, which no source does; "
    "glm4_moe has the same experts and router",
    "deepseek_v2": "does not renormalise its routing weights",
    "phimoe": "has routing weights that never sum to one (sparsemixer)",
    "olmoe": "normalises queries and keys whole, which no source with norms before its blocks does",
    "minimax": "takes its residual after the norm, which no source does",
}


def resolve(target: Target, shape: Shape, shared: int | None) -> Shape:
    """Return the shape with `shared` shared parts; None stands for what the target usually has."""
    if shared is None:
        usual = target.shared.usual if target.shared else 0
        shared = usual if shape.granularity == 1 else 0
    return dataclasses.replace(shape, shared=shared)


def misfit(target: Target, s: Shape, chosen: Sequence[int], count: int) -> str:
    """Return why a target cannot have this shape in the layers `chosen` of `count`, or ""."""
    shared = target.shared
    rule = target.dense_layers
    if len(chosen) < count and (rule is None or rule(chosen, count) is None):
        return target.dense_rule
    if s.shared and shared is None:
        return "has no shared expert"
    if shared and shared.whole and (s.granularity > 1 or s.shared != 1):
        return "has one shared expert, which is the MLP, and cannot cut it"
    if shared and shared.most and s.shared > shared.most:
        return f"has {shared.most} shared expert, as wide as the others"
    if target is SURGERY and s.halved:
        return "can share a part of the MLP, but not all of it: cut it with --granularity"
    if target.groups and s.shards == 1 and s.experts < 2 and target is not SURGERY:
        return "needs at least two experts"
    return ""


def whole_copies(target: Target, s: Shape) -> bool:
    """Return whether a token always gets whole copies.

    Where experts are selected one by one, two copies with equal router logits can each give a part.
    In bf16 that happens to about one token in a thousand in each layer, in fp32 hardly ever.
    """
    return s.shards == 1 or s.top_k == s.experts or target.groups


def config_of(
    target: Target, route: Route, source: Config, s: Shape, chosen: Sequence[int], count: int
) -> dict[str, Any]:
    """Return the config.json of the result.

    Args:
        target: the architecture.
        route: the route into it.
        source: the source's config, with the defaults of its class written out.
        s: the shape of the experts.
        chosen: the layers that have experts.
        count: the number of layers.
    """
    out = {k: v for k, v in source.items() if k != "auto_map"}
    out |= evaluate(target.config, source) | evaluate(route.config, source)
    out |= {
        "architectures": [target.architecture],
        "model_type": target.model_type,
        target.top_k_key: s.top_k,
    }
    out |= dict.fromkeys(target.experts_keys, s.experts) | target.shape(s)
    out[target.width_key] = s.expert_width
    return out | (target.dense_layers(chosen, count) or {} if target.dense_layers else {})

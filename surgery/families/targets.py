"""Native mixture-of-experts architectures that can hold a dense model exactly. `TARGETS` says where
experts, router and shared experts stand on disk and what their config calls them; which source goes
into which is in `routes`.

A block of copies computes s·MLP(x), s the sum of the selected routing weights: every target here
has s = 1, or a factor in its config. Finer shapes cut each copy in G shards (Krajewski et al. 2024,
arXiv 2402.07871): with the router's rows equal within a copy (virtual groups, He et al. 2024, arXiv
2410.07524), K a multiple of the shards and whole copies selected, the shards of a copy have weights
that sum to s/G, so a factor of G restores it.

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
    """E experts, K active. A copy of the MLP is cut in `granularity` parts; `shared` of them stand
    in the shared expert, which every token passes, the others are routed. At granularity 1, one
    shared expert takes half of the output."""

    experts: int
    top_k: int
    granularity: int = 1
    shared: int = 0
    width: int = 0  # F

    @property
    def shards(self) -> int:
        """Routed experts that make up a copy."""
        return self.granularity - self.shared if self.granularity > 1 else 1

    @property
    def copies(self) -> int:
        return self.experts // self.shards

    @property
    def active_copies(self) -> int:
        return self.top_k // self.shards

    @property
    def expert_width(self) -> int:
        return self.width // self.granularity

    @property
    def halved(self) -> bool:
        return self.granularity == 1 and self.shared > 0

    @property
    def factor(self) -> float:
        """What a routed expert's output is multiplied by, its routing weights summing to one."""
        return 0.5 if self.halved else float(self.shards)


@dataclass(frozen=True, kw_only=True, slots=True)
class Shared:
    """A target's shared expert. `most`: parts that it can hold; `usual`: how many it takes at
    granularity 1.
    """

    place: Place | None
    required: bool = True  # without parts of its own it is there all the same, and computes zero
    gated: bool = False  # its output is multiplied by sigmoid(gate·x): one half at a gate of zero
    whole: bool = False  # the routing weights scale the experts' *input*: it is the MLP, and the others begin at zero
    most: int | None = None
    usual: int = 1


_MLP = layouts.usual("mlp")


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """One architecture. Paths are relative to a decoder layer. A config value may be a function of
    the source config.
    """

    model_type: str
    architecture: str
    router: str
    place: (
        Place | None
    )  # the routed experts' tensors; None: neurons of one wide MLP, which stands where the MLP did
    config: Mapping[str, Any]
    experts_keys: tuple[str, ...] = ("num_local_experts",)
    top_k_key: str = "num_experts_per_tok"
    width_key: str = "intermediate_size"
    shape: Callable[[Shape], dict[str, Any]] = (
        lambda s: {}
    )  # what else the shape changes in the config
    shared: Shared | None = None
    extra: Callable[[int, str], Tensors] = lambda e, dtype: {}  # of E experts and their dtype
    router_fp32: bool = (
        False  # the class computes it in fp32 whatever its dtype, so it is kept in that
    )
    groups: bool = False  # it chooses whole groups of experts: a copy is never torn
    # Which layers can stay dense: the config entries for those that do not, of how many; None where
    # it cannot.
    dense_layers: Callable[[Sequence[int], int], dict[str, Any] | None] | None = None
    dense: Place = _MLP  # of a layer that does
    dense_rule: str = "has experts in every layer: it cannot keep some layers dense"
    note: str = ""


# --- layers that stay dense -----------------------------------------------------------------------


def _any_layer(chosen: Sequence[int], count: int) -> dict[str, Any]:
    return {"mlp_only_layers": [i for i in range(count) if i not in chosen]}


def _first_layers(chosen: Sequence[int], count: int) -> dict[str, Any] | None:
    return (
        {"first_k_dense_replace": chosen[0]}
        if list(chosen) == list(range(chosen[0], count))
        else None
    )


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
    """DeepSeek-V3's router: groups are copies. A group's score is the sum of its two best, so it
    has two at least.
    """
    groups, chosen = (s.copies, s.active_copies) if s.shards > 1 else (1, 1)
    return {
        "n_group": groups,
        "topk_group": chosen,
        "routed_scaling_factor": s.factor,
        "n_shared_experts": max(1, s.shared),
    }


def _zero_gate(experts: Sequence[Any]) -> Tensors:
    """Qwen2-MoE's shared expert and its gate."""
    shared, mlp = layouts.usual("mlp.shared_expert")(experts), experts[0]
    return shared | {
        "mlp.shared_expert_gate.weight": constant(0.0, (1, mlp.up.shape[1]), mlp.up.dtype)
    }


def _correction(path: str, *groups: int) -> Callable[[int, str], Tensors]:
    """The bias that only selects; training balances the load with it."""
    return lambda e, dtype: {f"{path}.e_score_correction_bias": constant(0.0, (*groups, e), "F32")}


_QWEN_EXPERTS = layouts.usual("mlp.experts.{e}")
_AUXILIARY = {"output_router_logits": False, "router_aux_loss_coef": 0.001}
_DEEPSEEK: dict[
    str, Any
] = {  # DeepSeek-V3's block of experts, in architectures with usual attention
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
            # yarn and longrope want a number here, where Mixtral's default is None
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
            # transformers 5 counts layers for predicting several tokens, which no source has
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
            note="the shared expert is the MLP, and the routed experts start with down_proj at zero: Llama 4 scales what "
            "its experts read, so their outputs cannot be summed to the MLP's",
        ),
        Target(
            model_type="gpt_oss",
            architecture="GptOssForCausalLM",
            router="mlp.router.weight",
            place=layouts.gpt_oss,
            config=_AUXILIARY
            | {"head_dim": head_dim, "swiglu_alpha": 1.0, "swiglu_limit": 60000.0},
            extra=lambda e, dtype: {"mlp.router.bias": constant(0.0, (e,), dtype)},
            note="swiglu_alpha and swiglu_limit make GPT-OSS's activation SiLU in transformers 5: 4.57 and other runtimes "
            "ignore both, and compute another function",
        ),
    )
}

# The block that travels with its code (surgery/blocks/experts_mlp.py), in any dense family whose
# MLP is a module.
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

# Architectures that are asked for and hold no dense model exactly, with the reason.
UNABLE = {
    "deepseek_v3": "normalises its compressed keys and values, which no source does; glm4_moe has the same experts and "
    "router",
    "deepseek_v2": "does not renormalise its routing weights",
    "phimoe": "has routing weights that never sum to one (sparsemixer)",
    "olmoe": "normalises queries and keys whole, which no source with norms before its blocks does",
    "minimax": "takes its residual after the norm, which no source does",
}


def resolve(target: Target, shape: Shape, shared: int | None) -> Shape:
    """The shape with as many shared parts as asked for, or as the target usually has."""
    if shared is None:
        usual = target.shared.usual if target.shared else 0
        shared = usual if shape.granularity == 1 else 0
    return dataclasses.replace(shape, shared=shared)


def misfit(target: Target, s: Shape, chosen: Sequence[int], count: int) -> str:
    """Why a target cannot have this shape in the layers `chosen` of `count`, "" where it can."""
    shared = target.shared
    if len(chosen) < count and (
        target.dense_layers is None or target.dense_layers(chosen, count) is None
    ):
        return target.dense_rule
    if s.shared and shared is None:
        return "has no shared expert"
    if shared and shared.whole and (s.granularity > 1 or s.shared != 1):
        return "has one shared expert, which is the MLP, and cannot cut it"
    if shared and shared.most and s.shared > shared.most:
        return f"has {shared.most} shared expert, as wide as the others"
    if target is SURGERY and s.halved:
        return "shares parts of the MLP, which --granularity cuts it in"
    if target.groups and s.shards == 1 and s.experts < 2 and target is not SURGERY:
        return "chooses among two experts at least"
    return ""


def whole_copies(target: Target, s: Shape) -> bool:
    """Whether a token always gets whole copies. Where experts are chosen one by one, two copies
    whose router logits are equal can each give a part; in bf16 that happens to about one token in a
    thousand in each layer, in fp32 hardly ever."""
    return s.shards == 1 or s.top_k == s.experts or target.groups


def config_of(
    target: Target, route: Route, source: Config, s: Shape, chosen: Sequence[int], count: int
) -> dict[str, Any]:
    """config.json of the result, from the source's with its class's defaults written out."""
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

"""Native mixture-of-experts architectures that can hold a dense model exactly, and which source goes into which.

With identical experts a block computes s·MLP(x), s the sum of the selected routing weights: every target here has
s = 1. `TARGETS` says where experts and router stand on disk, `ROUTES` what else must change between two families.
Per-expert names are written: transformers 4 reads fused ones as random experts without an exception.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from surgery.checkpoint import LazyTensor, concatenate, constant
from surgery.families.family import Mlp

Tensors = dict[str, LazyTensor]
Config = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """One architecture. Paths are relative to a decoder layer. A config value may be a function of the source config."""

    model_type: str
    architecture: str
    router: str
    place: Callable[[Sequence[Mlp]], Tensors]  # the experts' tensors
    config: Mapping[str, Any]
    experts_keys: tuple[str, ...] = ("num_local_experts",)
    width_key: str = "intermediate_size"
    dense_layers_key: str | None = None  # the config's list of layers that stay dense
    share: Callable[[Mlp], tuple[Mlp, Tensors]] | None = None  # what a routed expert keeps, and the shared expert


@dataclass(frozen=True, kw_only=True, slots=True)
class Route:
    """A source family into a target. `requires`: config values without which the target is not the same function."""

    source: str
    target: str
    requires: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    rewrite: Callable[[Tensors, Config], Tensors] | None = None  # tensors outside the MLPs


def _per_expert(gate: str, up: str, down: str) -> Callable[[Sequence[Mlp]], Tensors]:
    """One tensor per expert and matrix; paths with an {e}."""

    def place(experts: Sequence[Mlp]) -> Tensors:
        out: Tensors = {}
        for e, mlp in enumerate(experts):
            assert mlp.gate is not None
            for path, tensor in ((gate, mlp.gate), (up, mlp.up), (down, mlp.down)):
                out[f"{path.format(e=e)}.weight"] = tensor
        return out

    return place


def _granite(experts: Sequence[Mlp]) -> Tensors:
    """input_linear [E, 2F, H] (gate's rows, then up's) and output_linear [E, H, F]: still copied by the kernel."""
    gate_up = concatenate([t for mlp in experts for t in (mlp.gate, mlp.up) if t is not None])
    down = concatenate([mlp.down for mlp in experts])
    (f, h), e = experts[0].up.shape, len(experts)
    return {"block_sparse_moe.input_linear.weight": gate_up.reshape(e, 2 * f, h),
            "block_sparse_moe.output_linear.weight": down.reshape(e, h, f)}  # fmt: skip


def _gated_shared(mlp: Mlp) -> tuple[Mlp, Tensors]:
    """Qwen2-MoE's shared expert behind a sigmoid gate: a zero gate lets one half through, so the routed experts give
    the other half: sigmoid(0)·MLP + Σw·(MLP/2) = MLP. Halving is exact in binary floating point."""
    assert mlp.gate is not None
    half = mlp.down.map("times 0.5", lambda t: t * 0.5)
    shared = {"gate_proj": mlp.gate, "up_proj": mlp.up, "down_proj": mlp.down}
    out = {f"mlp.shared_expert.{name}.weight": tensor for name, tensor in shared.items()}
    out["mlp.shared_expert_gate.weight"] = constant(0.0, (1, mlp.up.shape[1]), mlp.up.dtype)
    return dataclasses.replace(mlp, down=half), out


def _head_dim(config: Config) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


_QWEN_EXPERTS = _per_expert("mlp.experts.{e}.gate_proj", "mlp.experts.{e}.up_proj", "mlp.experts.{e}.down_proj")
_AUXILIARY = {"output_router_logits": False, "router_aux_loss_coef": 0.001}

TARGETS: dict[str, Target] = {
    t.model_type: t
    for t in (
        Target(
            model_type="mixtral",
            architecture="MixtralForCausalLM",
            router="block_sparse_moe.gate.weight",
            place=_per_expert("block_sparse_moe.experts.{e}.w1", "block_sparse_moe.experts.{e}.w3",
                              "block_sparse_moe.experts.{e}.w2"),
            # yarn and longrope want a number here, where Mixtral's default is None
            config=_AUXILIARY | {"router_jitter_noise": 0.0, "head_dim": _head_dim},
        ),
        Target(
            model_type="qwen2_moe",
            architecture="Qwen2MoeForCausalLM",
            router="mlp.gate.weight",
            place=_QWEN_EXPERTS,
            config=_AUXILIARY | {"norm_topk_prob": True, "decoder_sparse_step": 1, "qkv_bias": True,
                                 "shared_expert_intermediate_size": lambda c: c["intermediate_size"]},
            experts_keys=("num_experts",),
            width_key="moe_intermediate_size",
            dense_layers_key="mlp_only_layers",
            share=_gated_shared,
        ),
        Target(
            model_type="qwen3_moe",
            architecture="Qwen3MoeForCausalLM",
            router="mlp.gate.weight",
            place=_QWEN_EXPERTS,
            config=_AUXILIARY | {"norm_topk_prob": True, "decoder_sparse_step": 1},
            experts_keys=("num_experts", "num_local_experts"),
            width_key="moe_intermediate_size",
            dense_layers_key="mlp_only_layers",
        ),
        Target(
            model_type="granitemoe",
            architecture="GraniteMoeForCausalLM",
            router="block_sparse_moe.router.layer.weight",
            place=_granite,
            config=_AUXILIARY | {"head_dim": _head_dim},
        ),
        Target(
            model_type="flex_olmo",
            architecture="FlexOlmoForCausalLM",
            router="mlp.gate.weight",
            place=_QWEN_EXPERTS,
            config=_AUXILIARY | {"norm_topk_prob": True},
            experts_keys=("num_experts",),
        ),
    )
}  # fmt: skip


# --- what changes outside the MLPs ---------------------------------------------------------------------------------


def _split_qkv(tensors: Tensors, config: Config) -> Tensors:
    """Phi-3's qkv_proj holds the rows of q, then k, then v."""
    heads, kv = config["num_attention_heads"], config["num_key_value_heads"]
    size = config.get("head_dim") or config["hidden_size"] // heads
    out: Tensors = {}
    for name, t in tensors.items():
        if ".qkv_proj." not in name:
            out[name] = t
            continue
        row = 0
        for part, count in (("q_proj", heads), ("k_proj", kv), ("v_proj", kv)):
            out[name.replace("qkv_proj", part)] = t.rows(row, row + count * size)
            row += count * size
    return out


def _fold_gemma(tensors: Tensors, config: Config) -> Tensors:
    """Gemma scales by 1 + w in its norms and its embeddings by √H. Folded in, both are kept in fp32: rounding them to
    bf16 would change the function. The head keeps the plain embedding, so it is no longer tied."""
    embed, scale = "model.embed_tokens.weight", float(config["hidden_size"]) ** 0.5
    out = {
        name: t.map("1 + w", lambda w: 1.0 + w, "F32") if name.endswith("norm.weight") else t
        for name, t in tensors.items()
    }
    out.setdefault("lm_head.weight", tensors[embed])
    out[embed] = tensors[embed].map(f"times {scale!r}", lambda t: t * scale, "F32")
    return out


def _gemma_activation(config: Config) -> str:
    """Gemma's first files say "gelu", and its class takes the approximation by tanh that they mean."""
    return "gelu_pytorch_tanh" if config["hidden_act"] == "gelu" else str(config["hidden_act"])


_NO_MLP_BIAS = {"mlp_bias": (False,)}
_NO_BIAS = _NO_MLP_BIAS | {"attention_bias": (False,)}
_USUAL_HEADS = {"head_dim": (None, lambda c: c["hidden_size"] // c["num_attention_heads"])}
_NO_WINDOW = {"use_sliding_window": (False,)}
_WHOLE_ROTARY = {"partial_rotary_factor": (1.0, None)}
_UNSCALED = {"embedding_multiplier": 1.0, "logits_scaling": 1.0, "residual_multiplier": 1.0}

# The first route of a source whose requirements hold is what `--target auto` takes.
ROUTES: tuple[Route, ...] = (
    Route(source="llama", target="mixtral", requires=_NO_BIAS, config={"sliding_window": None}),
    Route(source="llama", target="granitemoe", requires=_NO_MLP_BIAS | _USUAL_HEADS,
          config=_UNSCALED | {"attention_multiplier": lambda c: _head_dim(c) ** -0.5}),
    Route(source="mistral", target="mixtral"),
    Route(source="qwen2", target="qwen2_moe", requires=_NO_WINDOW),
    Route(source="qwen3", target="qwen3_moe", requires=_NO_WINDOW),
    Route(source="phi3", target="mixtral", requires=_WHOLE_ROTARY, rewrite=_split_qkv),
    Route(source="granite", target="granitemoe", requires=_NO_MLP_BIAS | _USUAL_HEADS),
    Route(source="olmo2", target="flex_olmo"),
    Route(source="gemma", target="mixtral", requires={"attention_bias": (False,), "use_bidirectional_attention": (None, False)},
          config={"tie_word_embeddings": False, "sliding_window": None, "hidden_act": _gemma_activation},
          rewrite=_fold_gemma),
)  # fmt: skip


def unmet(route: Route, config: Config) -> list[str]:
    """The requirements of a route that a config does not meet, as "key is value"."""
    missing = []
    for key, allowed in route.requires.items():
        values = [a(config) if callable(a) else a for a in allowed]
        if (value := config.get(key, values[0])) not in values:
            missing.append(f"{key} is {value!r}")
    return missing


def evaluate(entries: Mapping[str, Any], config: Config) -> dict[str, Any]:
    """Config entries, with the functions among them applied to the source config."""
    return {key: value(config) if callable(value) else value for key, value in entries.items()}

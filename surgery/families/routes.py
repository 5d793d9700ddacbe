"""Which mixture of experts can hold which dense family exactly.

A route also says what must change outside the MLPs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from surgery.checkpoint import constant, derive
from surgery.checkpoint.edit import EMBEDDINGS
from surgery.families.layouts import Tensors

if TYPE_CHECKING:
    import torch

Config = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Route:
    """The way from a source family into a target architecture.

    Args:
        source: the `model_type` of the dense family.
        target: the `model_type` of the mixture of experts.
        requires: by config key, the values of the source without which the target would compute
            another function. A value may be a function of the config.
        config: entries of the output's config. A value may be a function of the source's config.
        rewrite: changes the tensors outside the MLPs.
        auto: whether `--target auto` may choose it.
    """

    source: str
    target: str
    requires: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    rewrite: Callable[[Tensors, Config], Tensors] | None = None
    auto: bool = True


def head_dim(config: Config) -> int:
    """Return the dimensions of an attention head."""
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


# --- tensors --------------------------------------------------------------------------------------


def _split_qkv(tensors: Tensors, config: Config) -> Tensors:
    """Split Phi-3's qkv_proj, which holds the rows of q, then k, then v."""
    heads, kv, size = config["num_attention_heads"], config["num_key_value_heads"], head_dim(config)
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
    """Fold the scales of Gemma into its weights: 1 + w in its norms, √H in its embeddings.

    Both are kept in fp32, because rounding them to bf16 would change the function. The head keeps
    the plain embedding, so it is no longer tied.
    """
    scale = float(config["hidden_size"]) ** 0.5
    embed = next(name for name in tensors if name.endswith(EMBEDDINGS))
    out = {
        name: t.map("1 + w", lambda w: 1.0 + w, "F32") if name.endswith("norm.weight") else t
        for name, t in tensors.items()
    }
    out.setdefault("lm_head.weight", tensors[embed])
    out[embed] = tensors[embed].map(f"times {scale!r}", lambda t: t * scale, "F32")
    return out


def _interleave_rotary(tensors: Tensors, config: Config) -> Tensors:
    """Put rows i and i + d/2 of each head of q and k next to each other.

    Llama 4 rotates pairs of neighbouring dimensions, the other families pairs from the two halves.
    """
    half = head_dim(config) // 2
    recipe = f"halves of {2 * half} rows in turn"

    def interleave(t: torch.Tensor) -> torch.Tensor:
        return t.unflatten(0, (-1, 2, half)).transpose(1, 2).reshape(t.shape)

    out = dict(tensors)
    for name, t in tensors.items():
        if name.split(".")[-2] in ("q_proj", "k_proj"):
            out[name] = derive(recipe, interleave, t, dtype=t.dtype, shape=t.shape)
    return out


def _quiet_sinks(tensors: Tensors, config: Config) -> Tensors:
    """Add what GPT-OSS has and the source lacks, without changing the function.

    Attention sinks of -1e4 take no attention, because exp(-1e4) is 0; missing biases are zero.
    """
    out, heads = dict(tensors), config["num_attention_heads"]
    for name, t in tensors.items():
        start, _, part = name.rpartition("self_attn.")
        if part.endswith("_proj.weight"):
            out.setdefault(name.replace(".weight", ".bias"), constant(0.0, t.shape[:1], t.dtype))
        if part == "q_proj.weight":
            out[f"{start}self_attn.sinks"] = constant(-1e4, (heads,), t.dtype)
    return out


# --- config ---------------------------------------------------------------------------------------


def _gemma_activation(config: Config) -> str:
    """Return Gemma's activation.

    Its first configs say "gelu", and its class takes that as the tanh approximation, which is
    meant.
    """
    return "gelu_pytorch_tanh" if config["hidden_act"] == "gelu" else str(config["hidden_act"])


def _rotary_part(config: Config) -> float:
    return float(config.get("partial_rotary_factor") or 1.0)


def _rope_with_part(config: Config) -> dict[str, Any]:
    """Return rope_parameters that say how many dimensions are rotated; GLM-4 assumes half."""
    rope = config.get("rope_parameters")
    rope = rope or {"rope_type": "default", "rope_theta": config["rope_theta"]}
    return {**rope, "partial_rotary_factor": _rotary_part(config)}


def _windows(config: Config) -> list[str]:
    """Return the attention of each layer of a Qwen; windows, if used, are in the upper layers."""
    count, full = config["num_hidden_layers"], _full_layers(config)
    if not _window(config):
        return ["full_attention"] * count
    usual = ["full_attention"] * full + ["sliding_attention"] * max(0, count - full)
    kinds = config.get("layer_types") or usual
    return list(kinds[:count])


def _full_layers(config: Config) -> int:
    return int(config.get("max_window_layers", 28))


def _window(config: Config) -> int | None:
    return config.get("sliding_window", 4096) if config.get("use_sliding_window") else None


def _some_window(config: Config) -> int:
    """Return a window size even where no layer uses it, because the target needs a number."""
    window = config.get("sliding_window", 4096) if config.get("use_sliding_window", True) else None
    return int(window or config["max_position_embeddings"])


def _same_window(config: Config) -> list[str]:
    """Return the attention of each layer of a Mistral."""
    kind = "sliding_attention" if config["sliding_window"] else "full_attention"
    return [kind] * config["num_hidden_layers"]


def _rope_layers(config: Config) -> list[int]:
    """Return 1 for each layer of a SmolLM3 that has rotary embeddings, 0 for the others."""
    interval = config.get("no_rope_layer_interval", 4)
    usual = [int((i + 1) % interval != 0) for i in range(config["num_hidden_layers"])]
    return list(config.get("no_rope_layers") or usual)


def _all_full(config: Config) -> list[str]:
    return ["full_attention"] * config["num_hidden_layers"]


# --- the table ------------------------------------------------------------------------------------

_NO_MLP_BIAS = {"mlp_bias": (False,)}
_NO_BIAS = _NO_MLP_BIAS | {"attention_bias": (False,)}
_USUAL_HEADS = {"head_dim": (None, lambda c: c["hidden_size"] // c["num_attention_heads"])}
_NO_WINDOW = {"use_sliding_window": (False,)}
_NOT_SLIDING = {"sliding_window": (None,)}
_WHOLE_ROTARY = {"partial_rotary_factor": (1.0, None)}
_SILU = {"hidden_act": ("silu",)}
_ONE_WAY = {"attention_bias": (False,), "use_bidirectional_attention": (None, False)}
_UNSCALED = {"embedding_multiplier": 1.0, "logits_scaling": 1.0, "residual_multiplier": 1.0}
_FOLDED_GEMMA = {"tie_word_embeddings": False, "hidden_act": _gemma_activation}
_GLM = {
    "use_qk_norm": False,
    "attention_bias": False,
    "partial_rotary_factor": _rotary_part,
    "rope_parameters": _rope_with_part,
}
# The class builds a sliding mask even if no layer uses it, and assumes yarn where rope_scaling is
# absent (transformers 4).
_SINKS = {
    "attention_bias": True,
    "sliding_window": lambda c: c["max_position_embeddings"],
    "rope_scaling": lambda c: c.get("rope_scaling"),
}
_NO_TUNING = {
    "use_qk_norm": False,
    "attn_temperature_tuning": False,
    "no_rope_layers": _rope_layers,
    "layer_types": _all_full,
    "attention_chunk_size": lambda c: c["max_position_embeddings"],
    "attention_bias": False,
}

# `--target auto` takes the first route of a source whose requirements hold and whose target can
# have the shape.
ROUTES: tuple[Route, ...] = (
    Route(source="llama", target="mixtral", requires=_NO_BIAS, config={"sliding_window": None}),
    Route(
        source="llama",
        target="granitemoe",
        requires=_NO_MLP_BIAS | _USUAL_HEADS,
        config=_UNSCALED | {"attention_multiplier": lambda c: head_dim(c) ** -0.5},
    ),
    Route(source="llama", target="glm4_moe", requires=_NO_BIAS, config=_GLM),
    Route(
        source="llama",
        target="gpt_oss",
        requires=_NO_MLP_BIAS | _SILU,
        rewrite=_quiet_sinks,
        auto=False,
        config=_SINKS | {"layer_types": _all_full},
    ),
    Route(source="mistral", target="mixtral"),
    Route(source="mistral", target="glm4_moe", requires=_NOT_SLIDING, config=_GLM),
    Route(
        source="mistral",
        target="gpt_oss",
        requires=_SILU,
        rewrite=_quiet_sinks,
        auto=False,
        config=_SINKS | {"layer_types": _same_window, "sliding_window": _some_window},
    ),
    Route(source="qwen2", target="qwen2_moe", requires=_NO_WINDOW),
    Route(
        source="qwen2",
        target="glm4_moe",
        requires=_NO_WINDOW,
        config=_GLM | {"attention_bias": True},
    ),
    Route(
        source="qwen2",
        target="gpt_oss",
        requires=_SILU,
        rewrite=_quiet_sinks,
        auto=False,
        config=_SINKS | {"layer_types": _windows, "sliding_window": _some_window},
    ),
    Route(source="qwen3", target="qwen3_moe", requires=_NO_WINDOW),
    Route(
        source="qwen3",
        target="glm4_moe",
        requires=_NO_WINDOW | {"attention_bias": (False,)},
        config=_GLM | {"use_qk_norm": True},
    ),
    Route(
        source="qwen3",
        target="dots1",
        config={
            "layer_types": _windows,
            "sliding_window": _window,
            "max_window_layers": _full_layers,
        },
    ),
    Route(source="phi3", target="mixtral", requires=_WHOLE_ROTARY, rewrite=_split_qkv),
    Route(source="phi3", target="glm4_moe", requires=_NOT_SLIDING, config=_GLM, rewrite=_split_qkv),
    Route(source="granite", target="granitemoe", requires=_NO_MLP_BIAS | _USUAL_HEADS),
    Route(source="granite", target="granitemoeshared", requires=_NO_MLP_BIAS | _USUAL_HEADS),
    Route(source="olmo2", target="flex_olmo"),
    Route(
        source="gemma",
        target="mixtral",
        requires=_ONE_WAY,
        config=_FOLDED_GEMMA | {"sliding_window": None},
        rewrite=_fold_gemma,
    ),
    Route(
        source="gemma",
        target="glm4_moe",
        requires=_ONE_WAY,
        config=_GLM | _FOLDED_GEMMA,
        rewrite=_fold_gemma,
    ),
    Route(
        source="smollm3",
        target="llama4_text",
        requires=_NO_BIAS | _NO_WINDOW,
        config=_NO_TUNING,
        rewrite=_interleave_rotary,
    ),
    Route(source="ernie4_5", target="ernie4_5_moe", requires={"use_bias": (False,)}),
    Route(
        source="hunyuan_v1_dense",
        target="hunyuan_v1_moe",
        config={"sep_token_id": lambda c: c.get("sep_token_id")},
    ),
)


def unmet(route: Route, config: Config) -> list[str]:
    """Return the requirements of a route that a config does not meet, each as "key is value"."""
    missing = []
    for key, allowed in route.requires.items():
        values = [a(config) if callable(a) else a for a in allowed]
        if (value := config.get(key, values[0])) not in values:
            missing.append(f"{key} is {value!r}")
    return missing


def evaluate(entries: Mapping[str, Any], config: Config) -> dict[str, Any]:
    """Return config entries, with the functions among them applied to the source config."""
    return {key: value(config) if callable(value) else value for key, value in entries.items()}

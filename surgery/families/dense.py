"""The table of dense families."""

from typing import Any

from surgery.families.family import Family, same_as

# What the model classes assume where config.json has no value. A conversion to another class writes
# these values out, because the other class assumes different ones (Mixtral: 8 key-value heads,
# rope_theta 1e6).
_DEFAULTS = {
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "attention_dropout": 0.0,
}
_LLAMA = _DEFAULTS | {
    "num_key_value_heads": same_as("num_attention_heads"),
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_QWEN = _DEFAULTS | {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
}
_MISTRAL = _DEFAULTS | {
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GEMMA = _DEFAULTS | {
    "num_key_value_heads": 16,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "hidden_act": "gelu_pytorch_tanh",
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
_PHI3 = _DEFAULTS | {
    "num_key_value_heads": same_as("num_attention_heads"),
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 32000,
    "pad_token_id": 32000,
    "original_max_position_embeddings": 4096,
    "sliding_window": None,
}
_GRANITE = _LLAMA | {
    "embedding_multiplier": 1.0,
    "logits_scaling": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": 1.0,
    "attention_bias": False,
}
_OLMO2 = _DEFAULTS | {
    "num_key_value_heads": same_as("num_attention_heads"),
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "pad_token_id": 1,
    "eos_token_id": 50279,
    "attention_bias": False,
}
_SMOLLM3 = _DEFAULTS | {
    "rope_theta": 2000000.0,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "pad_token_id": 128004,
}
_ERNIE = {
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "use_bias": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_HUNYUAN = _LLAMA | {"rms_norm_eps": 1e-5, "pad_token_id": 0, "attention_bias": False}
_GEMMA_2: dict[str, Any] = {
    "activation_key": "hidden_activation",
    "activation": "gelu_pytorch_tanh",
    "post_norm": "post_feedforward_layernorm",
    "pre_norms": ("input_layernorm", "pre_feedforward_layernorm"),
}


def _plain(model_type: str, up: str, down: str, **facts: object) -> Family:
    """Return a family whose MLP has no gate."""
    return Family(model_type=model_type, gate=None, up=up, down=down, **facts)  # type: ignore[arg-type]


DENSE: dict[str, Family] = {
    f.model_type: f
    for f in (
        Family(model_type="llama", defaults=_LLAMA, bias_key="mlp_bias"),
        Family(model_type="mistral", defaults=_MISTRAL),
        Family(model_type="qwen2", defaults=_QWEN),
        Family(model_type="qwen3", defaults=_QWEN | {"head_dim": 128, "attention_bias": False}),
        Family(model_type="gemma", activation="gelu_pytorch_tanh", defaults=_GEMMA),
        Family(model_type="gemma2", **_GEMMA_2),
        Family(model_type="gemma3", layers="language_model.layers", **_GEMMA_2),
        Family(model_type="gemma3_text", **_GEMMA_2),
        Family(
            model_type="phi3",
            gate="mlp.gate_up_proj",
            up="mlp.gate_up_proj",
            fused_gate_up=True,
            defaults=_PHI3,
        ),
        Family(
            model_type="olmo2",
            defaults=_OLMO2,
            post_norm="post_feedforward_layernorm",
            pre_norms=(),
        ),
        Family(model_type="granite", defaults=_GRANITE, bias_key="mlp_bias"),
        Family(model_type="smollm3", defaults=_SMOLLM3, bias_key="mlp_bias"),
        Family(model_type="ernie4_5", defaults=_ERNIE, bias_key="use_bias"),
        Family(model_type="hunyuan_v1_dense", defaults=_HUNYUAN),
        _plain(
            "gpt2",
            "mlp.c_fc",
            "mlp.c_proj",
            layers="h",
            pre_norms=("ln_1", "ln_2"),
            transposed=True,
            hidden_key="n_embd",
            width_key="n_inner",
            layers_key="n_layer",
            activation_key="activation_function",
            activation="gelu_new",
        ),
        _plain(
            "opt",
            "fc1",
            "fc2",
            layers="decoder.layers",
            mlp="",
            loose=("fc1", "activation_fn", "fc2"),
            pre_norms=(),
            width_key="ffn_dim",
            activation_key="activation_function",
            activation="relu",
        ),
        _plain("gpt_neox", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h", activation="gelu"),
        _plain(
            "falcon",
            "mlp.dense_h_to_4h",
            "mlp.dense_4h_to_h",
            layers="h",
            pre_norms=(),
            width_key="ffn_hidden_size",
            activation_key="activation",
            activation="gelu",
        ),
        _plain("nemotron", "mlp.up_proj", "mlp.down_proj", activation="relu2"),
    )
}

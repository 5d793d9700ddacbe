"""Dense families."""

from surgery.families.family import Family

_ROPE_1E4 = {"rope_theta": 10000.0}


def _plain(model_type: str, up: str, down: str, **facts: object) -> Family:
    """An MLP without a gate."""
    return Family(model_type=model_type, gate=None, up=up, down=down, **facts)  # type: ignore[arg-type]


DENSE: dict[str, Family] = {
    f.model_type: f
    for f in (
        Family(model_type="llama"),
        Family(model_type="mistral"),
        Family(model_type="qwen2"),
        Family(model_type="qwen3"),
        Family(model_type="gemma", activation="gelu_pytorch_tanh"),
        Family(model_type="gemma2", activation_key="hidden_activation", activation="gelu_pytorch_tanh"),
        Family(model_type="gemma3", activation_key="hidden_activation", activation="gelu_pytorch_tanh"),
        Family(model_type="gemma3_text", activation_key="hidden_activation", activation="gelu_pytorch_tanh"),
        Family(model_type="phi3", gate="mlp.gate_up_proj", up="mlp.gate_up_proj", fused_gate_up=True),
        Family(model_type="olmo2"),
        Family(model_type="granite"),
        Family(model_type="smollm3"),
        _plain("gpt2", "mlp.c_fc", "mlp.c_proj", layers="h", transposed=True, hidden_key="n_embd", width_key="n_inner",
               layers_key="n_layer", activation_key="activation_function", activation="gelu_new"),
        _plain("opt", "fc1", "fc2", mlp="", width_key="ffn_dim", activation_key="activation_function",
               activation="relu"),
        _plain("gpt_neox", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h", activation="gelu"),
        _plain("falcon", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h", layers="h", width_key="ffn_hidden_size",
               activation_key="activation", activation="gelu"),
        _plain("nemotron", "mlp.up_proj", "mlp.down_proj", activation="relu2"),
    )
}  # fmt: skip

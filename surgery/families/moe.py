"""The table of mixture-of-experts families.

Names are those on disk; where a family has two layouts, those of one tensor per expert.
"""

from typing import Any

from surgery.families.family import Family

_BLOCK: dict[str, Any] = {"mlp": "block_sparse_moe", "experts_key": "num_local_experts"}
# Its dense layers, which some models have between those of experts, are Linears at the same place.
_LLAMA_4: dict[str, Any] = {
    "mlp": "feed_forward",
    "gate": "feed_forward.gate_proj",
    "up": "feed_forward.up_proj",
    "down": "feed_forward.down_proj",
    "experts": "feed_forward.experts",
    "router": "feed_forward.router",
    "shared": "feed_forward.shared_expert",
    "experts_key": "num_local_experts",
}

MOE: dict[str, Family] = {
    f.model_type: f
    for f in (
        Family(
            model_type="mixtral",
            experts="block_sparse_moe.experts",
            router="block_sparse_moe.gate",
            gate="w1",
            up="w3",
            down="w2",
            **_BLOCK,
        ),
        Family(
            model_type="qwen2_moe",
            experts="mlp.experts",
            router="mlp.gate",
            shared="mlp.shared_expert",
        ),
        Family(model_type="qwen3_moe", experts="mlp.experts", router="mlp.gate"),
        Family(model_type="flex_olmo", experts="mlp.experts", router="mlp.gate"),
        Family(
            model_type="granitemoe",
            experts="block_sparse_moe.input_linear",
            router="block_sparse_moe.router.layer",
            **_BLOCK,
        ),
        Family(
            model_type="granitemoeshared",
            experts="block_sparse_moe.input_linear",
            router="block_sparse_moe.router.layer",
            shared="shared_mlp",
            **_BLOCK,
        ),
        Family(
            model_type="deepseek_v3",
            experts="mlp.experts",
            router="mlp.gate",
            shared="mlp.shared_experts",
            experts_key="n_routed_experts",
        ),
        Family(
            model_type="glm4_moe",
            experts="mlp.experts",
            router="mlp.gate",
            shared="mlp.shared_experts",
            experts_key="n_routed_experts",
        ),
        Family(
            model_type="dots1",
            experts="mlp.experts",
            router="mlp.gate",
            shared="mlp.shared_experts",
            experts_key="n_routed_experts",
        ),
        Family(
            model_type="ernie4_5_moe",
            experts="mlp.experts",
            router="mlp.gate",
            shared="mlp.shared_experts",
            experts_key="moe_num_experts",
            top_k_key="moe_k",
        ),
        Family(
            model_type="hunyuan_v1_moe",
            experts="mlp.experts",
            router="mlp.gate.wg",
            shared="mlp.shared_mlp",
            top_k_key="moe_topk",
        ),
        Family(model_type="llama4", **_LLAMA_4),
        Family(model_type="llama4_text", **_LLAMA_4),
        Family(
            model_type="gpt_oss",
            activation_key="",
            experts="mlp.experts",
            router="mlp.router",
            experts_key="num_local_experts",
        ),
        Family(
            model_type="nemotron_h",
            embedding="embeddings.weight",
            mlp="mixer",
            gate=None,
            up="mixer.up_proj",
            down="mixer.down_proj",
            experts="mixer.experts",
            router="mixer.gate",
            shared="mixer.shared_experts",
            activation="relu2",
            activation_key="mlp_hidden_act",
            experts_key="n_routed_experts",
        ),
    )
}

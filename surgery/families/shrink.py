"""Make a config small: the same class, the same switches, tiny sizes and few layers.

A model of such a config runs in milliseconds, and its MLPs compute what those of the whole one do.
Sizes are known by the names that configs give them. Switches (strings, booleans, fractions) stay.

Shapes: H hidden_size 32, F intermediate_size 56; all sizes differ, so that a shape tells its role.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

HIDDEN, WIDTH, VOCAB, HEADS, HEAD = 32, 56, 96, 4, 8
ROTARY = 8  # the rotary part of a head of latent attention
EXPERTS = 6
MOST_LAYERS = 10

# What a field becomes, by a pattern of its whole name; the first match wins. Fields that are not
# named, and fields of None, stay.
_SIZES: tuple[tuple[str, Any], ...] = (
    (r"(moe|expert)_?(intermediate|ffn_hidden|shared_expert_intermediate)_size", 24),
    (r"expert_ffn_hidden_size", 24),
    (r"(moe_)?shared_experts?_intermediate_size|shared_intermediate_size", 40),
    (r"intermediate_size_mlp", 48),
    (r"(dense_)?intermediate_size|ffn_hidden_size|n_inner|d_inner|dff|dim_ff", WIDTH),
    (r"(en|de)coder_ffn_dim|ffn_dim|feed_forward_size|block_dim|attention_dim_ff", WIDTH),
    (r"hidden_size|n_embd|d_model|dim_model|emb_dim|embedding_dim|embed_dim|lru_width", HIDDEN),
    (r"attention_hidden_size", 2 * HIDDEN),
    (r"word_embed_proj_dim|(input|output)_embedding_size|embedding_size", 16),
    (r"(backbone|cross|out|text|encoder)_hidden_size|hidden_size_global|codebook_dim", HIDDEN),
    (r"encoder_cross_output_size", HIDDEN),
    (r"axial_pos_embds_dim", HIDDEN // 2),
    (r"hidden_size_per_layer_input", 12),
    (r"(num_|swa_num_|(en|de)coder_|num_(en|de)coder_)?attention_heads|n_heads?", HEADS),
    (r"num_heads", HEADS),
    (r"(swa_)?num_key_value_heads|num_kv_heads|num_query_groups|multi_query_group_num", 2),
    (r"num_global_key_value_heads|kv_n_heads", 2),
    (r"(swa_|global_)?head_dim|attention_head_(dim|size)|dim_head|d_head|d_kv|kv_channels", HEAD),
    (r"d_rel|rel_extent", 8),
    (r"rotary_dim", 4),
    (r"num_decoder_layers|num_encoder_layers|(en|de)coder_layers", 3),
    (r"vocab_size_per_layer_input|vocab_size|unpadded_vocab_size|decoder_vocab_size", VOCAB),
    (r"(max_position_embeddings|n_positions|n_ctx|max_seq_len|context_length)", 256),
    (r"(num_|num_local_|n_routed_|moe_num_)experts", EXPERTS),
    (r"(num_experts_per_tok(en)?|moe_k|moe_topk|moe_top_k|top_k_experts)", 2),
    (r"n_group|topk_group|num_expert_group", 1),
    (r"(n_shared_experts|num_shared_experts|moe_num_shared_experts)", 1),
    (r"zero_expert_num", 2),
    (r"kv_lora_rank|o_lora_rank|hc_lowrank|laurel_rank|adapter_rank|gated_norm_rank", 16),
    (r"q_lora_rank", 20),
    (r"qk_rope_head_dim", ROTARY),
    (r"qk_nope_head_dim|v_head_dim|index(er)?_head_dim", 8),
    (r"qk_head_dim", 8 + ROTARY),
    (r"index_n_heads", 4),
    (r"index_topk", 8),
    (r"index_kpool", 4),
    (r"linear_num_(key|value)?_?heads", 4),
    (r"linear_(key|value)?_?head_dim", 8),
    (r"mamba_(n|num)_heads|n_mamba_heads", 8),
    (r"mamba_(d_head|head_dim|headdim)", 8),
    (r"mamba_d_ssm", 64),
    (r"mamba_d_state|ssm_state_size|state_size", 8),
    (r"mamba_(n_groups|ngroups)", 1),
    (r"mamba_dt_rank|time_step_rank", 4),
    (r"(mamba_)?chunk_size", 8),
    (r"n_groups", 1),
    (r"sliding_window(_size)?|(attention|keep)_window_size|local_attention", 8),
    (r"window_size", 56),  # in pixels, in towers of vision
    (r"original_max_position_embeddings", 64),
    (r"num_kv_shared_layers", 2),
    (r"image_size", 56),
    (r"mm_tokens_per_image", 4),
    (r"codebook_size", 4),
    (r"base_channels|latent_channels", 32),
    (r"image_token_offset", VOCAB - 16),
    (r"audio_token_offset", VOCAB - 12),
    (r"patch_size", 14),
    (r"(image|video|audio)_token_(id|index)", 90),
    (r"ngram_vocab_size_base", 100),
    (r"router_hidden_size", 16),
    (r"(pronunciation|shape)_embed_dim", 16),
    (r"(pronunciation|shape)_vocab_size", 32),
    (r"encoder_hash_byte_group_vocab", 64),
    (r"depths?", 2),
)
_TOWER = re.compile(r"vision|visual|audio")
_LAYERS = re.compile(r"num_hidden_layers|n_layers?|num_layers|num_blocks")
_TYPES = ("layer_types", "layers_block_type", "mlp_layer_types")
_TOKEN = re.compile(
    r"(pad|bos|eos|unk|sep|cls|mask|decoder_start|forced_eos|eod|boi|eoi|boa|eoa)"
    r"(_token)?_(id|index)"
)
# Sizes that may be lists: of layers, of axes, of towers.
_BY_LAYER = re.compile(r"intermediate_size|moe_intermediate_size|axial_pos_embds_dim|image_size")
# Layers of a wrapper's tower whose outputs it reads.
_READ = re.compile(r"\w*(feature_layers?|deepstack_visual_indexes|deepstack_layers)")
# Sizes that a class may want to be 1.
_AT_MOST = re.compile(r"num_experts_per_tok(en)?|moe_k|moe_topk|moe_top_k|top_k_experts|\w*kv\w*")
_COMPILED = tuple((re.compile(pattern), value) for pattern, value in _SIZES)


def shrink(config: Mapping[str, Any], layers: int = MOST_LAYERS) -> dict[str, Any]:
    """Return a small config with the switches of `config`.

    It has at most `layers` layers, and lists with an item for each layer are cut to them.
    """
    out: dict[str, Any] = {}
    counts = {v for k, v in config.items() if _LAYERS.fullmatch(k) and isinstance(v, int)}
    types = next((config[k] for k in _TYPES if config.get(k)), None)
    kept = _kept(types, min(layers, max(counts, default=layers)))
    for name, value in config.items():
        if name == "per_layer_config" and isinstance(value, Mapping):
            out[name] = {i: shrink(v, layers) for i, v in value.items() if int(i) < kept}
        elif isinstance(value, Mapping) and "rope" in name:
            out[name] = _rotary(value)
        elif name == "text_config" and isinstance(value, Mapping) and "vision_config" in config:
            out[name] = _three_axes(shrink(value, layers))
        elif isinstance(value, Mapping) and name.endswith(("config", "_cfg")):
            out[name] = shrink(value, 2 if _TOWER.match(name) else layers)
        elif _READ.fullmatch(name) and value is not None:
            out[name] = _read(value)
        elif _LAYERS.fullmatch(name) and isinstance(value, int):
            out[name] = min(value, kept)
        elif isinstance(value, list | tuple) and len(value) in counts and len(value) > kept:
            out[name] = [_item(name, v) for v in list(value)[:kept]]
        else:
            out[name] = _item(name, value)
    if config.get("state_size") and config.get("expand") and config.get("num_heads"):
        out["num_heads"] = int(config["expand"]) * HIDDEN // HEAD
    for start in ("num_", "swa_num_"):
        heads, shared = f"{start}attention_heads", f"{start}key_value_heads"
        if config.get(heads) and config.get(heads) == config.get(shared):
            out[shared] = out[heads]
    return out | (_latent(config) if config.get("qk_rope_head_dim") else {})


def _latent(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sizes of latent attention, which has no key-value heads of its own.

    It calls the rotary part of a head its size, or states which fraction of a head that is.
    """
    size, rotary = config.get("head_dim"), config["qk_rope_head_dim"]
    many = size // rotary if isinstance(size, int) else 1
    if config.get("qk_nope_head_dim") and many > 1:
        many = 2
    heads = 1 if config.get("num_key_value_heads") == 1 else HEADS
    out = {"num_key_value_heads": heads, "head_dim": max(1, many) * ROTARY}
    return out | ({"swa_head_dim": 2 * ROTARY} if config.get("swa_head_dim") else {})


def _rotary(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return rotary embeddings for heads of HEAD, of each kind of layer where there are several."""
    out = dict(value)
    for name, item in value.items():
        if isinstance(item, Mapping):
            out[name] = _rotary(item)
        elif name == "mrope_section" and isinstance(item, list | tuple):
            pairs = int(HEAD * float(value.get("partial_rotary_factor") or 1)) // 2
            out[name] = [1, 1, pairs - 2] if len(item) == 3 else list(item)
        elif name in ("short_factor", "long_factor") and isinstance(item, list | tuple):
            pairs = int(HEAD * float(value.get("partial_rotary_factor") or 1)) // 2
            out[name] = list(item)[:pairs]
    return out


def _three_axes(text: dict[str, Any]) -> dict[str, Any]:
    """State the sections of rotary embeddings over three axes; classes assume those of large heads.

    Classes without such embeddings ignore them.
    """
    rope = text.get("rope_parameters")
    if not isinstance(rope, Mapping) or any(isinstance(v, Mapping) for v in rope.values()):
        return text
    half = int(HEAD * float(rope.get("partial_rotary_factor") or 1)) // 2
    return text | {"rope_parameters": {"mrope_section": [1, 1, half - 2], **rope} if rope else {}}


def _read(layers: Any) -> Any:
    """Return layers that a small tower has; those counted from its end stay."""
    if isinstance(layers, list | tuple):
        return [i if v >= 0 else v for i, v in enumerate(layers[:2])]
    return min(layers, 1) if isinstance(layers, int) else layers


def _kept(types: Any, most: int) -> int:
    """Return how many layers to keep.

    Where layers have types, each is kept twice, and the last layer keeps that of the last.
    """
    if not isinstance(types, list | tuple) or len(types) <= most:
        return most
    wanted = {kind: min(2, list(types).count(kind)) for kind in types}

    def whole(k: int) -> bool:
        seen = list(types[:k])
        return types[k - 1] == types[-1] and all(seen.count(t) >= n for t, n in wanted.items())

    return next((k for k in range(min(4, len(types)), len(types) + 1) if whole(k)), most)


def _item(name: str, value: Any) -> Any:
    if isinstance(value, list | tuple) and _BY_LAYER.fullmatch(name):
        return [_item(name, v) for v in value]
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    if _TOKEN.fullmatch(name):
        return value if value < VOCAB - 8 else value % (VOCAB - 16) + 1
    for pattern, size in _COMPILED:
        if pattern.fullmatch(name):
            # A size of 0 leaves something out.
            return min(size, value) if not value or _AT_MOST.fullmatch(name) else size
    return value

"""A relufied Llama, Mistral or Qwen2 as llama.cpp's `smallthinker` with one expert.

llama.cpp computes SiLU in its `llama` and `qwen2`, whatever the config says. Its gated ReLU is in
SmallThinker, a mixture: down(relu(gate(x)) · up(x)) in every expert. With one expert, whose weight
is the softmax of one number and so 1, full attention and rotary embeddings in every layer, it
computes what a relufied Llama does. Rows of queries and keys stand there as transformers has them.

Source: llama.cpp, src/models/smallthinker.cpp.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from surgery.checkpoint import Checkpoint, LazyTensor, concatenate, constant, derive
from surgery.checkpoint.tensors import FLOATS
from surgery.engines import tokenizer
from surgery.engines.gguf import File, Tensor, Value
from surgery.engines.quantise import TYPES
from surgery.errors import SurgeryError, UsageError

ARCHITECTURE = "smallthinker"
FAMILIES = ("llama", "mistral", "qwen2")  # whose formulas are these, apart from the activation
_SOFTMAX = 1  # enum llama_expert_gating_func_type
_QUANTISATION_VERSION = 2
# Names in the checkpoint and in the file; those in _LAYER follow "model.layers.N." and "blk.N.".
_MODEL = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_LAYER = {
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.q_proj.bias": "attn_q.bias",
    "self_attn.k_proj.bias": "attn_k.bias",
    "self_attn.v_proj.bias": "attn_v.bias",
    "self_attn.o_proj.weight": "attn_output.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate_exps.weight",
    "mlp.up_proj.weight": "ffn_up_exps.weight",
    "mlp.down_proj.weight": "ffn_down_exps.weight",
}
_NO_WEIGHTS = re.compile(r".*\.rotary_emb\.inv_freq|.*\.attn\.masked_bias")
_EMBEDDINGS = ("token_embd.weight", "output.weight")


def smallthinker(checkpoint: Checkpoint, kind: str) -> File:
    """Return the GGUF file of a checkpoint: everything is planned, nothing is read.

    Args:
        checkpoint: a stock Llama, Mistral or Qwen2 with `hidden_act: relu`.
        kind: a name in `TYPES`, that of the matrices. Norms, biases and the router stay in f32.
            In a q4_0 file the embedding and the head have q8_0.

    Raises SurgeryError for what the architecture cannot hold, with the reason.
    """
    if kind not in TYPES:
        raise UsageError(f"no type {kind!r}", f"choose from {', '.join(TYPES)}")
    _require_held(checkpoint)
    tensors = list(_tensors(checkpoint, kind))
    embedding = next(t for t in tensors if t.name == "token_embd.weight")
    metadata = _metadata(checkpoint, kind) | tokenizer.fields(checkpoint, embedding.shape[0])
    return File(metadata=metadata, tensors=tensors, notes=_notes(checkpoint))


def _notes(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return what a user of the file should know."""
    window, context = _window(checkpoint.config), checkpoint.config["max_position_embeddings"]
    if window is None or window >= context:
        return ()
    return (
        f"the context is {window:,} tokens, the sliding window, instead of {context:,}: within it "
        "the attention is the same",
    )


# --- what cannot be held --------------------------------------------------------------------------


def _require_held(checkpoint: Checkpoint) -> None:
    """Raise SurgeryError where the architecture does not compute what the checkpoint does."""
    config = checkpoint.config
    for found, why, hint in _reasons(config):
        if found:
            raise SurgeryError(f"llama.cpp cannot run {checkpoint.source.location}: {why}", hint)
    for name, tensor in checkpoint.tensors.items():
        if _name(name, config["num_hidden_layers"]) is None and not _NO_WEIGHTS.fullmatch(name):
            raise SurgeryError(
                f"llama.cpp's {ARCHITECTURE} has no place for {name}", _advice_on(name)
            )
        if tensor.dtype not in FLOATS:
            raise SurgeryError(
                f"{name} is {tensor.dtype}, and only floats are exported",
                "give the checkpoint before it was quantised",
            )


def _reasons(config: Mapping[str, Any]) -> Iterator[tuple[bool, str, str]]:
    """Yield whether something keeps a config from being held, what it is, and what to do."""
    fold = "`surgery fold` turns relufied blocks with code into plain neurons"
    code = bool(config.get("surgery_blocks") or config.get("auto_map"))
    yield code, "it has code of its own, which no other engine runs", fold
    kind = str(config.get("model_type"))
    others = "for mixtures and other families use llama.cpp's own converter"
    yield kind not in FAMILIES, f"a {kind} is none of {', '.join(FAMILIES)}", others
    act = config.get("hidden_act")
    relufy = "`surgery relufy` makes it relu; one with silu is for llama.cpp's own converter"
    yield act != "relu", f"its activation is {act}, and this is for relu", relufy
    rope = _rope(config)
    plain = rope["rope_type"] in ("default", "linear") and not config.get("partial_rotary_factor")
    none = "there is nothing to be done but to run it in transformers"
    yield not plain, f"rotary embeddings of the type {rope['rope_type']} have no place there", none
    heads = config["num_attention_heads"]
    divides = "head_dim" in config or config["hidden_size"] % heads == 0
    yield not divides, f"{heads} heads do not divide {config['hidden_size']}", none


def _advice_on(name: str) -> str:
    """Return what to do about a tensor that has no place."""
    if re.search(r"\.mlp\.\w+\.bias", name):
        return "`surgery relufy --form stock`, or `--bypass none`, writes MLPs without biases"
    return "run the checkpoint in transformers"


# --- metadata -------------------------------------------------------------------------------------


def _metadata(checkpoint: Checkpoint, kind: str) -> dict[str, Value]:
    """Return the metadata of the file, without that of the tokenizer."""
    config, rope = checkpoint.config, _rope(checkpoint.config)
    layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    width = _width(checkpoint, kind)
    context = config["max_position_embeddings"]
    own: dict[str, Value] = {
        "block_count": layers,
        "context_length": min(context, _window(config) or context),
        "vocab_size": config["vocab_size"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": width,
        "expert_feed_forward_length": width,
        "expert_count": 1,
        "expert_used_count": 1,
        "expert_gating_func": _SOFTMAX,
        "attention.head_count": heads,
        "attention.head_count_kv": config.get("num_key_value_heads") or heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.dimension_count": head_dim,
        "rope.freq_base": float(rope["rope_theta"]),
    }
    if rope["rope_type"] == "linear":
        own |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(rope["factor"])}
    return {
        "general.architecture": ARCHITECTURE,
        "general.type": "model",
        "general.name": checkpoint.source.location.rstrip("/").rpartition("/")[2],
        "general.file_type": TYPES[kind].file_type,
        "general.quantization_version": _QUANTISATION_VERSION,
        **{f"{ARCHITECTURE}.{key}": value for key, value in own.items()},
    }


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of rotary embeddings, of a config of transformers 4 or 5."""
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = found.get("rope_type") or found.get("type") or "default"
    theta = found.get("rope_theta") or config.get("rope_theta") or 10000.0
    return {**found, "rope_type": kind, "rope_theta": theta}


def _window(config: Mapping[str, Any]) -> int | None:
    """Return the sliding window, where some layer has one.

    A Mistral has it in every layer; a Qwen2 only where `use_sliding_window` says so.
    """
    if config["model_type"] == "llama" or not config.get("use_sliding_window", True):
        return None
    default = 4096 if config["model_type"] == "mistral" else None
    window: int | None = config.get("sliding_window", default)
    return window


# --- tensors --------------------------------------------------------------------------------------


def _tensors(checkpoint: Checkpoint, kind: str) -> Iterator[Tensor]:
    """Yield the tensors of the file, in the order of the layers."""
    config, found = checkpoint.config, checkpoint.tensors
    tied = config.get("tie_word_embeddings", False)
    for name, new in _MODEL.items():
        if not (tied and name == "lm_head.weight"):
            yield _tensor(new, _required(found, name), kind)
    hidden, width = config["hidden_size"], _width(checkpoint, kind)
    for i in range(config["num_hidden_layers"]):
        for part, new in _LAYER.items():
            name = f"model.layers.{i}.{part}"
            if not part.endswith("bias") or name in found:
                value = _widened(_required(found, name), part, width)
                yield _tensor(f"blk.{i}.{new}", value, kind)
        router = constant(0.0, (1, hidden), "F32")
        yield Tensor(name=f"blk.{i}.ffn_gate_inp.weight", value=router, type="f32")


def _required(tensors: Mapping[str, LazyTensor], name: str) -> LazyTensor:
    if name not in tensors:
        raise SurgeryError(
            f"the checkpoint has no {name}", "check the source with `surgery inspect`"
        )
    return tensors[name]


def _name(name: str, layers: int) -> str | None:
    """Return the name of a tensor in the file, or None where it has no place there."""
    found = re.fullmatch(r"model\.layers\.([0-9]{1,9})\.(.+)", name)
    if found is None:
        return _MODEL.get(name)
    known = _LAYER.get(found[2]) if int(found[1]) < layers else None
    return known and f"blk.{found[1]}.{known}"


def _tensor(name: str, value: LazyTensor, kind: str) -> Tensor:
    """Return a tensor of the file with the type that it has there."""
    experts = name.endswith("_exps.weight")
    return Tensor(name=name, value=value, type=_type(name, value, kind), leading=int(experts))


def _type(name: str, value: LazyTensor, kind: str) -> str:
    """Return the type of a tensor in a file of the type `kind`."""
    if len(value.shape) == 1:
        return "f32"
    if kind == "q4_0" and name in _EMBEDDINGS:
        kind = "q8_0"
    # Rows that blocks do not divide keep 16 bits, as in llama.cpp's own files.
    return kind if value.shape[-1] % TYPES[kind].block == 0 else "f16"


def _width(checkpoint: Checkpoint, kind: str) -> int:
    """Return how many neurons an MLP has in the file: a multiple of the type's block."""
    width, block = checkpoint.config["intermediate_size"], TYPES[kind].block
    return int(-(-width // block) * block)


def _widened(value: LazyTensor, part: str, width: int) -> LazyTensor:
    """Return a matrix of an MLP with neurons of zeros at its end, which compute nothing."""
    if not part.startswith("mlp."):
        return value
    rows, columns = value.shape
    if part == "mlp.down_proj.weight":
        return value if columns == width else _with_columns(value, width)
    if rows == width:
        return value
    return concatenate([value, constant(0.0, (width - rows, columns), value.dtype)])


def _with_columns(value: LazyTensor, width: int) -> LazyTensor:
    """Return a matrix with columns of zeros at its end."""
    more = width - value.shape[1]

    def widen(matrix: Any) -> Any:
        import torch

        return torch.nn.functional.pad(matrix, (0, more))

    shape = (value.shape[0], width)
    return derive(f"{more} columns of zeros", widen, value, dtype=value.dtype, shape=shape)

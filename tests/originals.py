"""Models written as Meta and Mistral write them, from the Hugging Face form."""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from models import read_config, save_model
from safetensors.torch import load_file, save_file

# By name in transformers: the name in the original, and the axis of its pieces.
NAMES = {
    "input_layernorm": ("attention_norm", None),
    "post_attention_layernorm": ("ffn_norm", None),
    "self_attn.q_proj": ("attention.wq", 0),
    "self_attn.k_proj": ("attention.wk", 0),
    "self_attn.v_proj": ("attention.wv", 0),
    "self_attn.o_proj": ("attention.wo", 1),
    "mlp.gate_proj": ("feed_forward.w1", 0),
    "mlp.down_proj": ("feed_forward.w2", 1),
    "mlp.up_proj": ("feed_forward.w3", 0),
}


def pairs(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Put row i and row i + half of each head beside each other, as Meta has them."""
    first, second = rows.view(heads, 2, -1, rows.shape[1]).unbind(1)
    return torch.stack([first, second], 2).reshape(rows.shape)


def as_original(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, int | None]]:
    """Return the tensors of a model under their original names, and the axes of their pieces."""
    config, tensors = read_config(folder), load_file(folder / "model.safetensors")
    found = {
        "tok_embeddings.weight": tensors["model.embed_tokens.weight"],
        "norm.weight": tensors["model.norm.weight"],
        # Meta writes a tied head as well.
        "output.weight": tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"]),
    }
    axes: dict[str, int | None] = {"tok_embeddings.weight": 1, "output.weight": 0}
    heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}
    for i in range(config["num_hidden_layers"]):
        for name, (other, axis) in NAMES.items():
            t = tensors[f"model.layers.{i}.{name}.weight"]
            kind = name.removeprefix("self_attn.")[0] if name.endswith(("q_proj", "k_proj")) else ""
            found[f"layers.{i}.{other}.weight"] = pairs(t, heads[kind]) if kind else t
            axes[f"layers.{i}.{other}.weight"] = axis
    return found, axes


def params_of(config: Mapping[str, Any], maker: str = "Meta") -> dict[str, Any]:
    """Return the params.json of a model."""
    params = {
        "dim": config["hidden_size"],
        "n_layers": config["num_hidden_layers"],
        "n_heads": config["num_attention_heads"],
        "norm_eps": config["rms_norm_eps"],
        "vocab_size": -1,
    }
    if config["num_key_value_heads"] != config["num_attention_heads"]:
        params["n_kv_heads"] = config["num_key_value_heads"]
    rope = config["rope_parameters"]
    if rope["rope_theta"] != 10000:
        params["rope_theta"] = rope["rope_theta"]
    if maker == "Mistral":
        own = {"head_dim": config["head_dim"], "hidden_dim": config["intermediate_size"]}
        return params | own | {"sliding_window": config["sliding_window"], "vocab_size": 61}
    return params | {"multiple_of": 16} | ({"use_scaled_rope": True} if "factor" in rope else {})


def write_original(
    name: str, folder: Path, *, parts: int = 1, embedding_axis: int = 1, **changes: Any
) -> Path:
    """Write a model of MODELS to `folder`/hf, and in Meta's form to `folder`/meta, in parts.

    Returns the latter. Before Llama 3 embeddings were cut by columns (axis 1), then by rows.
    """
    hf, out = folder / "hf", folder / "meta"
    out.mkdir(parents=True)
    # 96 is what Meta's formula gives for a hidden size of 32 in multiples of 16.
    save_model(name, hf, dtype=torch.bfloat16, **{"intermediate_size": 96} | changes)
    tensors, axes = as_original(hf)
    axes["tok_embeddings.weight"] = embedding_axis
    for part in range(parts):
        pieces = {
            n: t if axes.get(n) is None else t.chunk(parts, axes[n])[part].clone()
            for n, t in tensors.items()
        }
        pieces["rope.freqs"] = torch.ones(4)
        torch.save(pieces, out / f"consolidated.{part:02d}.pth")
    (out / "params.json").write_text(json.dumps(params_of(read_config(hf))))
    return out


def write_mistral(folder: Path, **changes: Any) -> Path:
    """Write a Mistral to `folder`/hf, and in Mistral's form to `folder`/mistral."""
    hf, out = folder / "hf", folder / "mistral"
    out.mkdir(parents=True)
    save_model("mistral", hf, dtype=torch.bfloat16, head_dim=16, **changes)
    tensors = {n: t.contiguous() for n, t in as_original(hf)[0].items()}
    save_file(tensors, out / "consolidated.safetensors")
    (out / "params.json").write_text(json.dumps(params_of(read_config(hf), "Mistral")))
    return out


# --- tokenizers -----------------------------------------------------------------------------------


def _number(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def _field(number: int, value: int | float | bytes) -> bytes:
    if isinstance(value, float):
        return _number(number << 3 | 5) + struct.pack("<f", value)
    if isinstance(value, int):
        return _number(number << 3) + _number(value)
    return _number(number << 3 | 2) + _number(len(value)) + value


def sentencepiece_model(special: Sequence[str] = ("<unk>", "<s>", "</s>")) -> bytes:
    """Return a SentencePiece file: three special pieces, the bytes, and words of a and b."""
    names = [(name, 0.0, 2 if name == "<unk>" else 3) for name in special]
    pieces = names + [(f"<0x{b:02X}>", 0.0, 6) for b in range(256)]
    words = ("▁a", "ab", "▁ab", "▁", "a", "b")
    pieces += [(w, -float(i), 1) for i, w in enumerate(words)]
    made = b"".join(
        _field(1, _field(1, t.encode()) + _field(2, s) + _field(3, k)) for t, s, k in pieces
    )
    ids = [special.index(name) for name in ("<unk>", "<s>", "</s>")]
    told = b"".join(_field(number, i) for number, i in zip((40, 41, 42), ids, strict=True))
    return made + _field(2, _field(3, 2) + _field(35, 1) + told)


def ranks_of_bytes() -> bytes:
    """Return a file of ranks as Llama 3 has it: the bytes, then ab and abab."""
    tokens = [bytes([b]) for b in range(256)] + [b"ab", b"abab"]
    lines = (f"{base64.b64encode(t).decode()} {i}\n" for i, t in enumerate(tokens))
    return "".join(lines).encode()

"""Write a random bf16 Llama of any size, for benchmarks that look at bytes and not at quality.

python benchmarks/synthetic.py OUT    # 1.04 B parameters: hidden 2048, ff 5504, 18 layers
# the shape of Llama-2-7B:
python benchmarks/synthetic.py OUT --hidden 4096 --ff 11008 --layers 32 --heads 32 --shard 5GB
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import nn

from surgery.checkpoint import Checkpoint, LazyTensor, Source, make_plan, normal, parse_size
from surgery.storage import finish, write


def llama(hidden: int, ff: int, layers: int, heads: int, vocab: int) -> Checkpoint:
    """Return a Llama with N(0, 0.02²) weights. Shapes: Linear's [out, in]."""
    shapes = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (vocab, hidden),
    }
    for i in range(layers):
        start = f"model.layers.{i}."
        shapes |= {f"{start}self_attn.{p}_proj.weight": (hidden, hidden) for p in "qkvo"}
        shapes |= {f"{start}mlp.{p}_proj.weight": (ff, hidden) for p in ("gate", "up")}
        shapes |= {f"{start}mlp.down_proj.weight": (hidden, ff)}
        shapes |= {f"{start}{p}_layernorm.weight": (hidden,) for p in ("input", "post_attention")}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": ff,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "vocab_size": vocab,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    tensors: dict[str, LazyTensor] = {
        n: normal(n, 0, 0.02, shape, "BF16") for n, shape in shapes.items()
    }
    return Checkpoint(config=config, tensors=tensors, source=Source(location="synthetic"))


def main() -> None:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("out", type=Path)
    for name, value in (
        ("hidden", 2048),
        ("ff", 5504),
        ("layers", 18),
        ("heads", 16),
        ("vocab", 32000),
    ):
        p.add_argument(f"--{name}", type=int, default=value)
    p.add_argument("--shard", default="460MB", help="largest shard")
    a = p.parse_args()
    checkpoint = llama(a.hidden, a.ff, a.layers, a.heads, a.vocab)
    plan = make_plan(checkpoint, parse_size(a.shard))
    write(plan, a.out, source=checkpoint)
    finish(a.out, {"fingerprint": plan.fingerprint})
    print(
        f"{checkpoint.parameters:,} parameters, {plan.nbytes:,} bytes, {len(plan.shards)} shards "
        f"in {a.out}"
    )


if __name__ == "__main__":
    main()


class Mlp(nn.Module):
    """The children of a Llama's MLP."""

    def __init__(self, hidden: int, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, width, bias=False, dtype=dtype)
        self.up_proj = nn.Linear(hidden, width, bias=False, dtype=dtype)
        self.down_proj = nn.Linear(width, hidden, bias=False, dtype=dtype)

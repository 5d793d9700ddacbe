"""Time the decoding of one MLP by sparsity, dense and skipping its zeros.

`surgery bench` measures the same in a model.

  python benchmarks/decode.py                  # 4096 x 11008 in bf16, as in Llama-2-7B
  python benchmarks/decode.py --hidden 896 --width 4864 --dtype fp32 --threads 1
  python benchmarks/decode.py --rule teal      # only down is skipped

Random weights and tokens; the threshold is the quantile of what the rule cuts, so that every token
has nearly the sparsity of its row. Medians over the tokens; dense and skipping take turns, with
cold caches.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from synthetic import Mlp
from torch import Tensor

from surgery.analysis.bench import Clock, disagreement
from surgery.analysis.sparsity import REMAINING
from surgery.blocks import block_config
from surgery.blocks.sparse_mlp import SparseMLP
from surgery.calibration.walk import choose_dtype
from surgery.families import known

SPARSITIES = (0.5, 0.65, 0.8, 0.9, 0.95)


def threshold(mlp: Any, tokens: Tensor, rule: str, sparsity: float) -> float:
    """Return the threshold that cuts this part of the values, over all tokens."""
    values = mlp._product(tokens).abs() if rule == "teal" else mlp.gate_proj(tokens)
    return values.float().flatten().sort().values[int(sparsity * values.numel())].item()


@torch.no_grad()
def main() -> None:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--hidden", type=int, default=4096)
    p.add_argument("--width", type=int, default=11008)
    p.add_argument("--dtype", choices=("bf16", "fp16", "fp32"))
    p.add_argument("--device", default="cpu")
    p.add_argument("--threads", type=int, default=torch.get_num_threads())
    p.add_argument("--tokens", type=int, default=32)
    p.add_argument("--rule", choices=("fatrelu", "teal"), default="fatrelu")
    a = p.parse_args()
    torch.set_num_threads(a.threads)
    torch.manual_seed(0)
    dtype = choose_dtype(a.dtype, a.device)
    tokens = torch.randn(a.tokens, a.hidden).to(dtype).to(a.device)
    activation = "silu" if a.rule == "teal" else "relu"
    options = block_config.Sparse(rule=a.rule, activation=activation)
    entry = block_config.sparse_entry(known()["llama"], (), options)
    dense, skipping = (
        SparseMLP(Mlp(a.hidden, a.width, dtype), entry).to(a.device).eval() for _ in range(2)
    )
    skipping.load_state_dict(dense.state_dict())
    skipping.sparse_decode = True
    kernel, clock = "down only" if a.rule == "teal" else "gate first", Clock(a.device)
    print(
        f"{a.hidden} x {a.width}, {dtype}, {a.device}, {a.threads} threads, {a.rule}, medians of "
        f"{a.tokens} tokens"
    )
    print("sparsity  dense ms  skipping ms  speedup  ideal  error")
    for sparsity in SPARSITIES:
        t = threshold(dense, tokens, a.rule, sparsity)
        for mlp in (dense, skipping):
            mlp.threshold.fill_(t)
        slow, fast = clock.medians([dense, skipping], tokens)
        ideal = 1 / REMAINING[kernel](sparsity, True)
        print(
            f"{sparsity:8.2f}  {slow:8.2f}  {fast:11.2f}  {slow / fast:6.2f}x  {ideal:4.2f}x  "
            f"{disagreement(dense, skipping, tokens):.0e}"
        )


if __name__ == "__main__":
    main()

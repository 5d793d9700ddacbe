"""Decoding time of one MLP by share of zeros: dense in torch, the gather in torch, the kernel in C.

python benchmarks/kernel.py                     # 4096 x 11008 in bf16, as in Llama-2-7B
python benchmarks/kernel.py --hidden 576 --width 1536 --threads 1         # SmolLM2-135M
python benchmarks/kernel.py --tokens 8 --clock cpu      # eight sequences; beside other programs

Random weights, relu(gate - threshold), the threshold at the quantile that gives the row's share of
zeros. Medians over single steps that take turns, each with caches that other data has been written
through. Printed are the times, what the kernel gains over torch and over itself without zeros, what
the bytes left out would allow, and the share of the rate at which all three matrices are read when
nothing is computed with them. `--clock cpu` counts the processor time of the one thread, which
waiting for other programs does not lengthen; memory they do share.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from synthetic import Mlp
from torch import Tensor

from surgery.blocks import block_config, sparse_kernel
from surgery.blocks.sparse_mlp import SparseMLP
from surgery.families import known

SHARES = (0.0, 0.5, 0.8, 0.9, 0.95)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
COLUMNS = "zeros  dense ms  gather ms  kernel ms  kernel/dense  kernel/itself  bytes  stream  error"


class Gathering(SparseMLP):
    """A block that never finds a kernel."""

    def _has_kernel(self, x: Tensor) -> bool:
        return False


def mlps(a: argparse.Namespace) -> list[SparseMLP]:
    """Return the same MLP dense, gathering and with the kernel."""
    options = block_config.Sparse(rule="shifted", activation="relu")
    entry = block_config.sparse_entry(known()["llama"], (), options)
    made = [
        kind(Mlp(a.hidden, a.width, DTYPES[a.dtype]), entry).eval()
        for kind in (SparseMLP, Gathering, SparseMLP)
    ]
    for mlp in made[1:]:
        mlp.load_state_dict(made[0].state_dict())
        mlp.sparse_decode = True
    return made


class Clock:
    """Time functions that take turns, each after other data went through the caches."""

    def __init__(self, name: str, evict: int) -> None:
        self.now = time.perf_counter if name == "wall" else time.thread_time
        self.other = torch.zeros(evict * 2**18, dtype=torch.int32)

    def medians(self, functions: list[Callable[[], Any]], rounds: int) -> list[float]:
        """Return the median milliseconds of each; one more round before is not counted."""
        times: list[list[float]] = [[] for _ in functions]
        for number in range(rounds + 1):
            for found, function in zip(times, functions, strict=True):
                self.other.add_(1)
                start = self.now()
                function()
                if number:
                    found.append(1e3 * (self.now() - start))
        return [statistics.median(found) for found in times]


def row(share: float, made: list[SparseMLP], clock: Clock, a: argparse.Namespace) -> list[float]:
    """Return the milliseconds of each MLP, the gather's NaN for several tokens, and the error."""
    x = torch.randn(a.tokens, 1, a.hidden).to(DTYPES[a.dtype])
    gates = made[0].gate_proj(x).float().flatten().sort().values
    for mlp in made:
        mlp.threshold.fill_(gates[int(share * (len(gates) - 1))].item())
    dense, kernel = made[0](x), made[2](x)
    error = ((kernel - dense).float().norm() / dense.float().norm()).item()
    dense_ms, gather_ms, kernel_ms = clock.medians(
        [lambda mlp=mlp: mlp(x) for mlp in made], a.rounds
    )
    return [dense_ms, gather_ms if a.tokens == 1 else float("nan"), kernel_ms, error]


def live_union(share: float, tokens: int) -> float:
    """Return the share of neurons that any of the tokens needs, when gates are independent."""
    return float(1 - share**tokens)


@torch.no_grad()
def main() -> None:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--hidden", type=int, default=4096)
    p.add_argument("--width", type=int, default=11008)
    p.add_argument("--dtype", choices=DTYPES, default="bf16")
    p.add_argument("--threads", type=int, default=torch.get_num_threads())
    p.add_argument("--tokens", type=int, default=1, help="sequences that are decoded together")
    p.add_argument("--rounds", type=int, default=15)
    p.add_argument("--evict", type=int, default=512, help="MiB written between two timings")
    p.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="cpu: of one thread")
    a = p.parse_args()
    if a.clock == "cpu":
        a.threads = 1
    torch.set_num_threads(a.threads)
    torch.manual_seed(0)
    if not sparse_kernel.available():
        raise SystemExit("there is no C compiler")
    made, clock = mlps(a), Clock(a.clock, a.evict)
    matrices = [made[2].get_parameter(f"{n}_proj.weight").view(-1) for n in ("gate", "up", "down")]
    views = [m.data.view(torch.float32) for m in matrices]
    (stream,) = clock.medians([lambda: [v.sum() for v in views]], a.rounds)
    size = sum(m.nbytes for m in matrices)
    level = sparse_kernel.LEVELS[sparse_kernel.best_level()]
    print(
        f"{a.hidden} x {a.width}, {a.dtype}, {a.threads} threads, {a.tokens} tokens, {level}; "
        f"{a.clock} clock, medians of {a.rounds}\n"
        f"all bytes summed by torch: {stream:.2f} ms, {size / stream / 1e6:.1f} GB/s\n{COLUMNS}"
    )
    itself = 0.0
    for share in SHARES:
        dense, gather, kernel, error = row(share, made, clock, a)
        itself = itself or kernel
        left = (1 + 2 * live_union(share, a.tokens)) / 3
        print(
            f"{share:5.2f}  {dense:8.2f}  {gather:9.2f}  {kernel:9.2f}  {dense / kernel:11.2f}x  "
            f"{itself / kernel:12.2f}x  {1 / left:4.2f}x  {stream * left / kernel:6.2f}  "
            f"{error:.0e}",
            flush=True,
        )


if __name__ == "__main__":
    main()

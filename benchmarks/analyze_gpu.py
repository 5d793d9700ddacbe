"""Compare `surgery analyze` on a GPU with bare forward passes of the same tokens, in tokens/s.

  python benchmarks/analyze_gpu.py              # a random Llama of 1.04 B parameters
  python benchmarks/analyze_gpu.py Qwen/Qwen2.5-7B --tokens 131072
  # a trial without a GPU:
  python benchmarks/analyze_gpu.py --hidden 64 --ff 176 --layers 2 --tokens 2048 --device cpu

  resident   the stock model in the device's memory, its body alone
  bare       the walk with the collectors off: reads the weights of each layer as it comes to it
  analyze    the walk with them

All in one process: a first round to warm up, then rounds in turn; medians, the device being waited
for before the clock is read. analyze / bare is what counting costs, bare / resident what it costs
that the model need not fit in memory.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from synthetic import llama
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from surgery.analysis.analyze import analyze
from surgery.calibration.data import Sample, sample_ids
from surgery.calibration.walk import BATCH_TOKENS, Walk, choose_dtype
from surgery.checkpoint import Checkpoint, make_plan
from surgery.storage import finish, open_checkpoint, write


def synthesize(a: argparse.Namespace, folder: Path) -> str:
    checkpoint = llama(a.hidden, a.ff, a.layers, a.hidden // 64 or 1, a.vocab)
    plan = make_plan(checkpoint, 5 * 10**9)
    write(plan, folder, source=checkpoint)
    finish(folder, {"fingerprint": plan.fingerprint})
    return str(folder)


def resident(model: str, sample: Sample, dtype: torch.dtype, device: str) -> Callable[[], None]:
    disable_progress_bar()
    body = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).to(device).eval().base_model
    batches = sample.input_ids.split(max(1, BATCH_TOKENS // sample.input_ids.shape[1]))

    @torch.no_grad()
    def run() -> None:
        for ids in batches:
            body(input_ids=ids.to(device), use_cache=False)

    return run


def bare(checkpoint: Checkpoint, sample: Sample, dtype: torch.dtype, device: str) -> None:
    for layer in Walk(checkpoint, sample.input_ids, dtype=dtype, device=device):
        layer.run()


def seconds(run: Callable[[], object], device: str) -> float:
    wait = torch.cuda.synchronize if device.startswith("cuda") else lambda: None
    wait()
    start = time.perf_counter()
    run()
    wait()
    return time.perf_counter() - start


def measure(
    runs: dict[str, Callable[[], object]], rounds: int, device: str
) -> dict[str, list[float]]:
    """Seconds of each run, in turn; the first round is not kept."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(1 + rounds):
        for name, run in runs.items():
            found[name].append(seconds(run, device))
    return {name: times[1:] for name, times in found.items()}


def peaks(runs: dict[str, Callable[[], object]], device: str) -> dict[str, int]:
    """Bytes of the device that each run needs above what is held all the time."""
    found = {}
    for name, run in runs.items() if device.startswith("cuda") else ():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        run()
        found[name] = torch.cuda.max_memory_allocated() - held
    return found


def report(found: dict[str, list[float]], memory: dict[str, int], tokens: int) -> None:
    for name, times in found.items():
        took, peak = (
            statistics.median(times),
            f"  {memory[name] / 1e9:8.2f} GB at most" if name in memory else "",
        )
        print(f"{name:9} {took:8.2f} s  {tokens / took:10.0f} tokens/s{peak}")
    for over, under in (("analyze", "bare"), ("bare", "resident")):
        if over in found and under in found:
            ratios = [x / y for x, y in zip(found[over], found[under], strict=True)]
            print(
                f"{over} / {under}: {statistics.median(ratios):.2f} ({min(ratios):.2f} to "
                f"{max(ratios):.2f})"
            )


def main() -> None:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("model", nargs="?", help="a folder or a Hub id; without one a random Llama")
    for name, value in (
        ("hidden", 2048),
        ("ff", 5504),
        ("layers", 18),
        ("vocab", 32000),
        ("tokens", 65536),
        ("rounds", 3),
    ):
        p.add_argument(f"--{name}", type=int, default=value)
    p.add_argument("--device", default="cuda")
    p.add_argument("--dtype", choices=["bf16", "fp16", "fp32"])
    p.add_argument(
        "--no-resident",
        action="store_true",
        help="for a model that does not fit in the device's memory",
    )
    a = p.parse_args()
    if a.device.startswith("cuda") and not torch.cuda.is_available():
        print("skipped: no CUDA device here (--device cpu for a trial)")
        return
    with tempfile.TemporaryDirectory() as folder:
        model = a.model or synthesize(a, Path(folder, "model"))
        checkpoint, dtype = open_checkpoint(model), choose_dtype(a.dtype, a.device)
        sample = sample_ids(checkpoint, tokens=a.tokens, sequence_length=512, part="fit")
        runs: dict[str, Callable[[], object]] = {
            "bare": lambda: bare(checkpoint, sample, dtype, a.device),
            "analyze": lambda: analyze(checkpoint, sample, dtype=dtype, device=a.device),
        }
        memory = peaks(runs, a.device)
        if not a.no_resident:
            runs["resident"] = resident(model, sample, dtype, a.device)
        name = torch.cuda.get_device_name() if a.device.startswith("cuda") else a.device
        tokens = sample.input_ids.numel()
        print(
            f"{a.model or 'random Llama'}, {tokens} tokens on {name}, {dtype}, medians of "
            f"{a.rounds}"
        )
        report(measure(runs, a.rounds, a.device), memory, tokens)


if __name__ == "__main__":
    main()

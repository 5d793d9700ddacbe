"""Tokens per second of a whole model: a real `generate()` of one sequence, greedy, of fixed length.

Ways of computing the same model take turns: dense, with zeros skipped, and with the kernel reading
every row, so that nobody takes a faster kernel for sparsity. The source is another model, which is
loaded and timed before. Its MLPs are the baseline of what the bytes would allow.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from surgery.analysis.weigh import weigh
from surgery.blocks.decoding import set_sparse_decode
from surgery.blocks.sparse_kernel import available
from surgery.calibration import stock
from surgery.checkpoint import Checkpoint, Progress
from surgery.families import locate

ROUNDS = 3
PROMPT = 16  # tokens
DENSE, SKIPPING, ALL_ROWS = "dense", "skipping", "kernel, all rows"


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """What was measured.

    Args:
        rates: tokens per second by way of computing, medians; the source's under "source".
        new_tokens: tokens that each run generates.
        same_tokens: whether dense and skipping generate the same.
        ideal: the speed-up over the source (without one, over the model dense) if time were the
            bytes that a token reads.
    """

    rates: dict[str, float]
    new_tokens: int
    same_tokens: bool
    ideal: float

    @property
    def verdict(self) -> str:
        """Return one line that says what the whole model gains."""
        base = "source" if "source" in self.rates else DENSE
        gain = self.rates[SKIPPING] / self.rates[base]
        return (
            f"the whole model generates {self.rates[SKIPPING]:.1f} tokens/s skipping zeros, "
            f"{gain:.2f}x {'the source' if base == 'source' else 'dense'}; "
            f"the bytes would allow {self.ideal:.2f}x"
        )

    def as_dict(self) -> dict[str, Any]:
        """Return all of it, for JSON."""
        return {
            "tokens_per_second": self.rates,
            "new_tokens": self.new_tokens,
            "prompt_tokens": PROMPT,
            "same_tokens": self.same_tokens,
            "ideal_speedup": self.ideal,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What is the same for every model: the prompt [1, n], and how to go on after it."""

    prompt: Tensor
    new_tokens: int
    dtype: torch.dtype
    device: str
    progress: Progress = lambda n: None


def measure(
    checkpoint: Checkpoint, source: Checkpoint | None, setting: Setting, left: Sequence[float]
) -> Generation:
    """Time the generation after the first PROMPT tokens of the prompt.

    `left` is the share of the bytes of each layer's MLP that skipping reads, as `bench` found it.
    Each model is in memory whole, one after the other. Raises SurgeryError where transformers
    cannot load it.
    """
    times: dict[str, float] = {}
    if source is not None:
        times, _ = _run(source, {"source": _dense}, setting)
    ways = {DENSE: _dense, SKIPPING: _skipping}
    if setting.device == "cpu" and available():
        ways[ALL_ROWS] = _all_rows
    more, found = _run(checkpoint, ways, setting)
    return Generation(
        rates={way: setting.new_tokens / t for way, t in (times | more).items()},
        new_tokens=setting.new_tokens,
        same_tokens=torch.equal(found[DENSE], found[SKIPPING]),
        ideal=_ideal(source or checkpoint, checkpoint, left),
    )


def _run(
    checkpoint: Checkpoint, ways: Mapping[str, Callable[[Any], Any]], setting: Setting
) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Return the median seconds of each way, and what it generates; one round is not counted."""
    model = stock.meta_model(checkpoint, setting.dtype, setting.device)
    stock.load(model, checkpoint.tensors, setting.device)
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = None
    count = setting.new_tokens
    config = GenerationConfig(
        do_sample=False, max_new_tokens=count, min_new_tokens=count, use_cache=True
    )
    prompt = setting.prompt[:1, :PROMPT].to(setting.device)
    times: dict[str, list[float]] = {way: [] for way in ways}
    out: dict[str, Tensor] = {}
    for number in range(ROUNDS + 1):
        for way, computing in ways.items():
            with computing(model), torch.no_grad():
                start = time.perf_counter()
                mask = torch.ones_like(prompt)
                out[way] = model.generate(prompt, attention_mask=mask, generation_config=config)
                out[way] = out[way].cpu()  # waits for a GPU
                if number:
                    times[way].append(time.perf_counter() - start)
            setting.progress(1)
    return {way: statistics.median(t) for way, t in times.items()}, out


@contextmanager
def _dense(model: Any) -> Iterator[None]:
    if any(hasattr(module, "sparse_decode") for module in model.modules()):
        set_sparse_decode(model, False)
    yield


@contextmanager
def _skipping(model: Any) -> Iterator[None]:
    set_sparse_decode(model)
    yield
    set_sparse_decode(model, False)


@contextmanager
def _all_rows(model: Any) -> Iterator[None]:
    """Open every gate: the text is nonsense, and every row of every MLP is read."""
    set_sparse_decode(model)
    blocks = [module for module in model.modules() if hasattr(module, "sparse_decode")]
    before = [(block.rule_name, block.act_name) for block in blocks]
    for block in blocks:
        block.rule_name, block.act_name = "plain", "linear"
    yield
    for block, (rule, act) in zip(blocks, before, strict=True):
        block.rule_name, block.act_name = rule, act
    set_sparse_decode(model, False)


def _ideal(source: Checkpoint, output: Checkpoint, left: Sequence[float]) -> float:
    """Return the weights that a token reads of the source, by those that it reads of the output.

    The output's MLPs may have more neurons than the source's, and a bypass that is read whole.
    """
    blocks = locate(output)
    mlps = (blocks.mlp(index) for index in blocks.dense)
    sizes = [math.prod(m.up.shape) * (2 if m.gate is None else 3) for m in mlps]
    skipped = sum(size * (1 - share) for size, share in zip(sizes, left, strict=True))
    before, after = (weigh(c, c.config).active() for c in (source, output))
    return before / (after - skipped)

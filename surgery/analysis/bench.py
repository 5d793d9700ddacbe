"""Measured decoding time of the MLPs, dense and with zeros skipped.

Each layer is timed on single tokens of real text at the point of the walk where the model has them,
so that the sparsity is the model's own. Zeros are skipped by the very code that is saved with a
sparse checkpoint (surgery/blocks/sparse_mlp.py), which is put around a stock MLP too. Dense and
skipping take turns on the same tokens. The weights are evicted from the caches before each run,
because decoding reads those of all other layers in between.
"""

from __future__ import annotations

import copy
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from surgery.analysis.generation import Generation
from surgery.blocks import block_config
from surgery.blocks.decoding import ZEROING, block_of
from surgery.calibration.data import Sample
from surgery.calibration.observe import Taps, tapped
from surgery.calibration.walk import Layer, Walk
from surgery.checkpoint import Checkpoint, Progress
from surgery.errors import SurgeryError
from surgery.families import Family, locate

TIMED = 16  # tokens of each layer
EVICT = 2**28  # bytes written between two timings: more than a processor's last cache, or a GPU's
WORTH = 1.05  # a smaller gain is within what timings vary
SPREAD = 0.25  # of the median: a larger distance of the quartiles means that something else ran

Quartiles = tuple[float, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerBench:
    """One MLP.

    Args:
        index: of the decoder layer.
        sparsity: the fraction of zeros among its products on the sample, without neurons that are
            always open.
        sparsity_of_all: the same with those.
        left: the fraction of the MLP's bytes that skipping still reads.
        dense: milliseconds per token, the median.
        skipping: the same with zeros skipped; equal to `dense` where there are none to skip.
        error: ‖skipping − dense‖ / ‖dense‖, the largest of a token.
        skips: whether the layer has zeros to skip.
        dense_quartiles: the first and third quartile of the milliseconds.
        skipping_quartiles: the same with zeros skipped.
    """

    index: int
    sparsity: float
    left: float
    dense: float
    skipping: float
    error: float
    skips: bool = True
    sparsity_of_all: float = 0.0
    dense_quartiles: Quartiles = (0.0, 0.0)
    skipping_quartiles: Quartiles = (0.0, 0.0)

    def as_dict(self) -> dict[str, Any]:
        """Return all of it, for JSON."""
        return {
            "layer": self.index,
            "sparsity": self.sparsity,
            "sparsity_of_all": self.sparsity_of_all,
            "bytes_left": self.left,
            "dense_ms": self.dense,
            "skipping_ms": self.skipping,
            "dense_ms_quartiles": list(self.dense_quartiles),
            "skipping_ms_quartiles": list(self.skipping_quartiles),
            "speedup": self.dense / self.skipping,
            "error": self.error,
            "skips": self.skips,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """All layers, and what they were timed on; `threads` is None on a GPU.

    `always_open` is how many of the last neurons of each MLP are. `load` is the machine's load
    average before the timing, None where the system has none, and `generation` what the whole
    model gains, where that was measured.
    """

    source: str
    model_type: str
    dtype: str
    device: str
    threads: int | None
    sample: Sample
    layers: tuple[LayerBench, ...]
    always_open: int = 0
    load: float | None = None
    generation: Generation | None = None

    @property
    def dense(self) -> float:
        """Return the milliseconds per token in all MLPs."""
        return sum(layer.dense for layer in self.layers)

    @property
    def skipping(self) -> float:
        """Return the milliseconds per token in all MLPs, with zeros skipped."""
        return sum(layer.skipping for layer in self.layers)

    @property
    def speedup(self) -> float:
        """Return how many times as fast the MLPs are with zeros skipped."""
        return self.dense / self.skipping

    @property
    def ideal(self) -> float:
        """Return the speedup if time were proportional to the bytes read."""
        return self.dense / sum(layer.dense * layer.left for layer in self.layers)

    @property
    def sparsity(self) -> float:
        """Return the mean sparsity of the layers."""
        return statistics.fmean(layer.sparsity for layer in self.layers)

    @property
    def sparsity_of_all(self) -> float:
        """Return the same with the neurons that are always open."""
        return statistics.fmean(layer.sparsity_of_all for layer in self.layers)

    def quartiles(self, what: str) -> Quartiles:
        """Return the sums of the layers' quartiles, of "dense" or "skipping"."""
        each = [getattr(layer, f"{what}_quartiles") for layer in self.layers]
        return sum(low for low, _ in each), sum(high for _, high in each)

    @property
    def warnings(self) -> list[str]:
        """Return reasons to doubt the timings."""
        found, cores = [], os.cpu_count() or 1
        if self.load is not None and self.load > cores:
            found.append(
                f"the machine is busy: a load average of {self.load:.1f} on {cores} cores; "
                "time it again when it is idle"
            )
        for what, median in (("dense", self.dense), ("skipping", self.skipping)):
            low, high = self.quartiles(what)
            if high - low > SPREAD * median:
                found.append(
                    f"the timings of {what} spread: half of them lie between {low:.3f} and "
                    f"{high:.3f} ms, the median is {median:.3f} ms"
                )
        return found

    @property
    def verdict(self) -> str:
        """Return one line that says whether skipping pays."""
        if self.speedup < WORTH:
            return (
                "no gain at this size and sparsity: skipping runs at "
                f"{self.speedup:.2f}x the speed of dense MLPs"
            )
        return (
            f"skipping makes the MLPs {self.speedup:.2f}x as fast as dense; "
            f"the bytes it leaves out would allow {self.ideal:.2f}x"
        )

    def as_dict(self) -> dict[str, Any]:
        """Return all of it, for JSON."""
        return {
            "source": self.source,
            "model_type": self.model_type,
            "dtype": self.dtype,
            "device": self.device,
            "threads": self.threads,
            "sample": self.sample.as_dict(),
            "timed_tokens": TIMED,
            "dense_ms": self.dense,
            "skipping_ms": self.skipping,
            "dense_ms_quartiles": list(self.quartiles("dense")),
            "skipping_ms_quartiles": list(self.quartiles("skipping")),
            "load": self.load,
            "warnings": self.warnings,
            "speedup": self.speedup,
            "ideal_speedup": self.ideal,
            "sparsity": self.sparsity,
            "sparsity_of_all": self.sparsity_of_all,
            "always_open": self.always_open,
            "verdict": self.verdict,
            "generation": self.generation and self.generation.as_dict(),
            "layers": [layer.as_dict() for layer in self.layers],
        }


def bench(
    checkpoint: Checkpoint,
    sample: Sample,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    threads: int | None = None,
    progress: Progress = lambda n: None,
) -> Bench:
    """Walk the checkpoint over the sample and time the MLP of each layer.

    Raises SurgeryError where no layer can skip anything: because no activation gives zeros, or
    because the MLPs are not dense modules.
    """
    block_config.entry(locate(checkpoint).family, "sparse", ())  # raises where no MLP can be sparse
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    walk = Walk(checkpoint, sample.input_ids, dtype=dtype, device=device)
    masks = sample.mask.split([len(h) for h in walk.hidden])
    clock = Clock(device)
    layers = []
    with torch_threads(threads):
        for layer in walk:
            layers.append(_time_layer(layer, walk, masks, clock))
            progress(1)
        used = None if device != "cpu" else torch.get_num_threads()
    if not any(layer.skips for layer in layers):
        raise SurgeryError(
            f"no MLP of {checkpoint.source.location} has zeros to skip",
            "`surgery relufy` makes them",
        )
    return Bench(
        source=checkpoint.source.location,
        model_type=str(checkpoint.text_config.get("model_type")),
        dtype=str(dtype).removeprefix("torch."),
        device=device,
        threads=used,
        sample=sample,
        layers=tuple(layers),
        always_open=walk.blocks.always_open,
        load=load,
    )


@contextmanager
def torch_threads(wanted: int | None) -> Iterator[None]:
    """Compute with this number of threads; None leaves it as it is."""
    before = torch.get_num_threads()
    torch.set_num_threads(wanted or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# --- one layer ------------------------------------------------------------------------------------


def _time_layer(layer: Layer, walk: Walk, masks: Sequence[Tensor], clock: Clock) -> LayerBench:
    family, config = walk.blocks.family, walk.checkpoint.text_config
    activation = str(config.get(family.activation_key) or family.activation)
    dense = getattr(layer.module, family.mlp)
    skipping = skipping_mlp(dense, family, activation)
    seen, inputs = _Live(skipping, walk.blocks.always_open), []
    hook = dense.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    with tapped(layer.module, family, config) as taps:
        layer.run(lambda b, output: seen.add(taps, masks[b]))
    hook.remove()
    rows = torch.cat([x[m.to(x.device)] for x, m in zip(inputs, masks, strict=True)])
    tokens = rows[torch.linspace(0, len(rows) - 1, min(TIMED, len(rows))).long()]
    times = clock.times([dense] if skipping is None else [dense, skipping], tokens)
    return LayerBench(
        index=layer.index,
        sparsity=seen.sparsity,
        sparsity_of_all=1 - seen.live / seen.products,
        left=1.0 if skipping is None else seen.left,
        dense=statistics.median(times[0]),
        skipping=statistics.median(times[-1]),
        error=0.0 if skipping is None else disagreement(dense, skipping, tokens),
        skips=skipping is not None,
        dense_quartiles=quartiles(times[0]),
        skipping_quartiles=quartiles(times[-1]),
    )


def skipping_mlp(mlp: nn.Module, family: Family, activation: str) -> Any:
    """Return a copy of an MLP that skips its zeros; None where its activation gives none."""
    if hasattr(mlp, "sparse_decode"):
        skipping: Any = copy.deepcopy(mlp)
    elif activation in ZEROING:
        skipping = block_of(copy.deepcopy(mlp), family, activation)
    else:
        return None
    skipping.sparse_decode = True
    return skipping.eval()


class _Live:
    """Counts zeros among the products, and what skipping reads of the weights.

    It reads all of gate, up where the gate is open (all of it where the product must be known
    first), and down where the product is not zero.
    """

    def __init__(self, skipping: Any, always_open: int = 0) -> None:
        self.skipping, self.always_open = skipping, always_open
        self.gated = skipping is not None and bool(skipping.entry["gate"])
        self.gate_first = self.gated and not skipping.rule.cuts_product
        self.products = self.open = self.live = 0
        self.others = self.live_others = 0  # products of neurons that are not always open

    def add(self, taps: Taps, mask: Tensor) -> None:
        """Count what the taps caught of a batch, on the tokens of its mask."""
        product, gate = (self._counted(taps, name, mask) for name in ("product", "gate"))
        self.products += product.numel()
        self.live += int(torch.count_nonzero(product))
        others = product[:, : product.shape[1] - self.always_open]
        self.others += others.numel()
        self.live_others += int(torch.count_nonzero(others))
        opened = torch.ones_like(product)
        if self.gate_first:
            opened = self.skipping.rule.opens(self.skipping.act, gate, self.skipping.threshold)
        self.open += int(torch.count_nonzero(opened))

    def _counted(self, taps: Taps, name: str, mask: Tensor) -> Tensor:
        tap = taps.caught[name]
        return tap.reshape(*mask.shape, -1)[mask.to(tap.device)]

    @property
    def sparsity(self) -> float:
        """Return the fraction of zeros among the products of neurons that are not always open."""
        return 1 - self.live_others / max(1, self.others)

    @property
    def left(self) -> float:
        """Return the fraction of the MLP's bytes that skipping reads."""
        up, down = self.open / self.products, self.live / self.products
        return (1 + up + down) / 3 if self.gated else (1 + down) / 2


# --- the clock ------------------------------------------------------------------------------------


class Clock:
    """A clock for functions of one token, which take turns, each with cold caches."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.other = torch.zeros(EVICT // 4, dtype=torch.int32, device=device)

    @torch.no_grad()
    def medians(self, modules: Sequence[Callable[[Tensor], Tensor]], tokens: Tensor) -> list[float]:
        """Return the median milliseconds of each over tokens [n, H]."""
        return [statistics.median(found) for found in self.times(modules, tokens)]

    @torch.no_grad()
    def times(
        self, modules: Sequence[Callable[[Tensor], Tensor]], tokens: Tensor
    ) -> list[list[float]]:
        """Return the milliseconds of each module on each of the tokens [n, H].

        The first token is run once more before, unmeasured.
        """
        times: list[list[float]] = [[] for _ in modules]
        for number, token in enumerate([tokens[0], *tokens]):
            for found, module in zip(times, modules, strict=True):
                elapsed = self._once(module, token.view(1, 1, -1))
                if number:
                    found.append(elapsed)
        return times

    def _once(self, module: Callable[[Tensor], Tensor], x: Tensor) -> float:
        self.other.add_(1)
        self._wait()
        start = time.perf_counter()
        module(x)
        self._wait()
        return 1e3 * (time.perf_counter() - start)

    def _wait(self) -> None:
        if self.device.startswith("cuda"):
            torch.cuda.synchronize(self.device)


def quartiles(times: Sequence[float]) -> Quartiles:
    """Return the first and the third quartile."""
    if len(times) < 2:
        return times[0], times[0]
    low, _, high = statistics.quantiles(times, n=4, method="inclusive")
    return low, high


@torch.no_grad()
def disagreement(dense: nn.Module, skipping: nn.Module, tokens: Tensor) -> float:
    """Return the largest ‖skipping − dense‖ / ‖dense‖ of tokens [n, H], each run alone."""
    errors = []
    for token in tokens:
        a, b = (module(token.view(1, 1, -1)).float() for module in (dense, skipping))
        errors.append(((b - a).norm() / a.norm().clamp_min(torch.finfo(torch.float32).tiny)).item())
    return max(errors)

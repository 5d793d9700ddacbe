"""Decoding time of the MLPs, measured: one token against weights that no cache holds, dense and
with zeros skipped.

Each layer is timed on tokens of real text at the point of the walk where the model has them, so
that the sparsity is the model's own. Skipping is the very code that travels with a checkpoint
(surgery/blocks/sparse_mlp.py), around a stock MLP too. Dense and skipping take turns on the same
tokens; the weights are evicted before each, as decoding reads those of all other layers in between.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from surgery.blocks import block_config
from surgery.calibration.data import Sample
from surgery.calibration.observe import Taps, tapped
from surgery.calibration.walk import Layer, Walk
from surgery.checkpoint import Checkpoint, Progress
from surgery.errors import SurgeryError
from surgery.families import Family, locate

TIMED = 16  # tokens of each layer
EVICT = 2**28  # bytes written between two timings: more than a processor's last cache, or a GPU's
WORTH = 1.05  # a smaller gain is within what timings vary
ZEROING = ("relu", "relu2", "relu6")


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerBench:
    """One MLP: milliseconds a token, medians. `sparsity` is of its products on the sample; `left`
    is the fraction of the MLP's bytes that skipping still reads; `error` is ‖skipping − dense‖ /
    ‖dense‖, the largest of a token. A layer that has no zeros to skip (`skips` False) is dense in
    both columns."""

    index: int
    sparsity: float
    left: float
    dense: float
    skipping: float
    error: float
    skips: bool = True

    def as_dict(self) -> dict[str, Any]:
        return {
            "layer": self.index,
            "sparsity": self.sparsity,
            "bytes_left": self.left,
            "dense_ms": self.dense,
            "skipping_ms": self.skipping,
            "speedup": self.dense / self.skipping,
            "error": self.error,
            "skips": self.skips,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """Every layer, and on what: `threads` is None on a GPU."""

    source: str
    model_type: str
    dtype: str
    device: str
    threads: int | None
    sample: Sample
    layers: tuple[LayerBench, ...]

    @property
    def dense(self) -> float:
        """Milliseconds a token in all MLPs."""
        return sum(layer.dense for layer in self.layers)

    @property
    def skipping(self) -> float:
        return sum(layer.skipping for layer in self.layers)

    @property
    def speedup(self) -> float:
        return self.dense / self.skipping

    @property
    def ideal(self) -> float:
        """The speedup if time were bytes read: each layer's own weights, each read once."""
        return self.dense / sum(layer.dense * layer.left for layer in self.layers)

    @property
    def sparsity(self) -> float:
        return statistics.fmean(layer.sparsity for layer in self.layers)

    @property
    def verdict(self) -> str:
        """One line that says whether skipping pays."""
        if self.speedup < WORTH:
            return f"no gain at this size and sparsity: skipping runs at {self.speedup:.2f}x the speed of dense MLPs"
        return f"skipping makes the MLPs {self.speedup:.2f}x as fast as dense; the bytes it leaves out would allow {self.ideal:.2f}x"

    def as_dict(self) -> dict[str, Any]:
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
            "speedup": self.speedup,
            "ideal_speedup": self.ideal,
            "sparsity": self.sparsity,
            "verdict": self.verdict,
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

    Raises SurgeryError where no layer can skip anything: no activation gives zeros, or its MLPs are
    not dense modules.
    """
    block_config.entry(locate(checkpoint).family, "sparse", ())  # raises where no MLP could be one
    walk = Walk(checkpoint, sample.input_ids, dtype=dtype, device=device)
    masks = sample.mask.split([len(h) for h in walk.hidden])
    clock = Clock(device)
    layers = []
    with _threads(threads):
        for layer in walk:
            layers.append(_time_layer(layer, walk, masks, clock))
            progress(1)
        used = None if device != "cpu" else torch.get_num_threads()
    if not any(layer.skips for layer in layers):
        raise SurgeryError(
            f"no MLP of {checkpoint.source.location} has zeros to skip",
            "`surgery relufy` makes them, and needs training after it",
        )
    return Bench(
        source=checkpoint.source.location,
        model_type=str(checkpoint.text_config.get("model_type")),
        dtype=str(dtype).removeprefix("torch."),
        device=device,
        threads=used,
        sample=sample,
        layers=tuple(layers),
    )


@contextmanager
def _threads(wanted: int | None) -> Iterator[None]:
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
    seen, inputs = _Live(skipping), []
    hook = dense.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    with tapped(layer.module, family, config) as taps:
        layer.run(lambda b, output: seen.add(taps, masks[b]))
    hook.remove()
    rows = torch.cat([x[m.to(x.device)] for x, m in zip(inputs, masks, strict=True)])
    tokens = rows[torch.linspace(0, len(rows) - 1, min(TIMED, len(rows))).long()]
    if skipping is None:
        (ms,) = clock.medians([dense], tokens)
        return LayerBench(
            index=layer.index,
            sparsity=seen.sparsity,
            left=1.0,
            dense=ms,
            skipping=ms,
            error=0.0,
            skips=False,
        )
    times = clock.medians([dense, skipping], tokens)
    return LayerBench(
        index=layer.index,
        sparsity=seen.sparsity,
        left=seen.left,
        dense=times[0],
        skipping=times[1],
        error=disagreement(dense, skipping, tokens),
    )


def skipping_mlp(mlp: nn.Module, family: Family, activation: str) -> Any:
    """A copy of an MLP that skips its zeros, or None where it has none by its making."""
    if hasattr(mlp, "sparse_decode"):
        skipping: Any = copy.deepcopy(mlp)
    elif activation in ZEROING:
        from surgery.blocks.sparse_mlp import SparseMLP

        entry = block_config.sparse_entry(family, (), rule="plain", activation=activation)
        skipping = SparseMLP(copy.deepcopy(mlp), entry)
    else:
        return None
    skipping.sparse_decode = True
    return skipping.eval()


class _Live:
    """How many products are zeros, and what skipping reads of the weights: gate whole, up where the
    gate is open (all of it where the product must be known first), down where the product is not
    zero."""

    def __init__(self, skipping: Any) -> None:
        self.skipping = skipping
        self.gated = skipping is not None and bool(skipping.entry["gate"])
        self.gate_first = self.gated and not skipping.rule.cuts_product
        self.products = self.open = self.live = 0

    def add(self, taps: Taps, mask: Tensor) -> None:
        product, gate = (self._counted(taps, name, mask) for name in ("product", "gate"))
        self.products += product.numel()
        self.live += int(torch.count_nonzero(product))
        opened = (
            self.skipping.rule.opens(self.skipping.act, gate, self.skipping.threshold)
            if self.gate_first
            else torch.ones_like(product)
        )
        self.open += int(torch.count_nonzero(opened))

    def _counted(self, taps: Taps, name: str, mask: Tensor) -> Tensor:
        tap = taps.caught[name]
        return tap.reshape(*mask.shape, -1)[mask.to(tap.device)]

    @property
    def sparsity(self) -> float:
        return 1 - self.live / self.products

    @property
    def left(self) -> float:
        """The fraction of the MLP's bytes."""
        up, down = self.open / self.products, self.live / self.products
        return (1 + up + down) / 3 if self.gated else (1 + down) / 2


# --- the clock ------------------------------------------------------------------------------------


class Clock:
    """Times functions of one token, taking turns, each with cold caches."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.other = torch.zeros(EVICT // 4, dtype=torch.int32, device=device)

    @torch.no_grad()
    def medians(self, modules: Sequence[Callable[[Tensor], Tensor]], tokens: Tensor) -> list[float]:
        """Milliseconds of each, over tokens [n, H]; the first is run once more, unmeasured."""
        times: list[list[float]] = [[] for _ in modules]
        for number, token in enumerate([tokens[0], *tokens]):
            for found, module in zip(times, modules, strict=True):
                elapsed = self._once(module, token.view(1, 1, -1))
                if number:
                    found.append(elapsed)
        return [statistics.median(found) for found in times]

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


@torch.no_grad()
def disagreement(dense: nn.Module, skipping: nn.Module, tokens: Tensor) -> float:
    """The largest ‖skipping − dense‖ / ‖dense‖ of tokens [n, H], each alone."""
    errors = []
    for token in tokens:
        a, b = (module(token.view(1, 1, -1)).float() for module in (dense, skipping))
        errors.append(((b - a).norm() / a.norm().clamp_min(torch.finfo(torch.float32).tiny)).item())
    return max(errors)

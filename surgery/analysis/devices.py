"""Devices and the roofline model of a decoding step.

A step takes the longer of streaming its bytes and doing its FLOPs: S. Williams, A. Waterman, D.
Patterson, "Roofline: an insightful visual performance model for multicore architectures", CACM
2009. Both rates are peaks that no kernel reaches, so the times are lower bounds.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from surgery.analysis.weigh import BYTES, Weights
from surgery.errors import UsageError
from surgery.families.roles import MLP_ROLES


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """A device: `bandwidth` of the memory in bytes/s, `peak` of dense bf16 products in FLOP/s."""

    name: str
    bandwidth: float
    peak: float
    source: str = "given"

    @property
    def ridge(self) -> float:
        """Return the FLOP per byte above which arithmetic, not memory, is the limit."""
        return self.peak / self.bandwidth

    def as_dict(self) -> dict[str, Any]:
        """Return the device for JSON."""
        return {**asdict(self), "ridge": self.ridge}


DEVICES: dict[str, Device] = {
    name: Device(name=name, bandwidth=tb_per_s * 1e12, peak=tflops * 1e12, source=source)
    for name, tb_per_s, tflops, source in (
        ("h100", 3.35, 989, "NVIDIA H100 data sheet, SXM5 80 GB"),
        ("h200", 4.8, 989, "NVIDIA H200 data sheet, SXM5 141 GB"),
        ("b200", 8.0, 2250, "NVIDIA Blackwell data sheet, SXM6"),
        ("a100", 2.039, 312, "NVIDIA A100 data sheet, SXM4 80 GB"),
        ("a100-40gb", 1.555, 312, "NVIDIA A100 data sheet, SXM4 40 GB"),
        ("l40s", 0.864, 362.05, "NVIDIA L40S data sheet"),
        ("l4", 0.3, 121, "NVIDIA L4 data sheet (half of the rate with sparsity)"),
        ("a10", 0.6, 125, "NVIDIA A10 data sheet"),
        ("rtx5090", 1.792, 209.5, "NVIDIA RTX Blackwell whitepaper, fp32 accumulation"),
        ("rtx4090", 1.008, 165.2, "NVIDIA Ada whitepaper, fp32 accumulation"),
        ("rtx3090", 0.936, 71, "NVIDIA GA102 whitepaper, fp32 accumulation"),
        ("mi300x", 5.3, 1307.4, "AMD Instinct MI300X data sheet"),
        ("mi325x", 6.0, 1307.4, "AMD Instinct MI325X data sheet"),
        ("tpu-v5e", 0.819, 197, "Google Cloud TPU documentation"),
        ("tpu-v5p", 2.765, 459, "Google Cloud TPU documentation"),
        ("m2-ultra", 0.8, 27.2, "Apple M2 Ultra, 76 GPU cores: fp32 rate"),
        ("cpu", 0.0896, 2.0, "two channels of DDR5-5600; 16 cores of AVX-512, an estimate"),
    )
}
_UNITS = {"G": 1e9, "T": 1e12, "P": 1e15}
_BANDWIDTH = re.compile(r"([\d.]+)\s*([GTP])B/s", re.IGNORECASE)
_PEAK = re.compile(r"([\d.]+)\s*([GTP])FLOP(?:/?s)?", re.IGNORECASE)


def parse_device(text: str) -> Device:
    """Return a device of the table by its name, or one given as "3.35TB/s,989TFLOP/s".

    Raises UsageError for anything else.
    """
    if text.lower() in DEVICES:
        return DEVICES[text.lower()]
    bandwidth, peak = _BANDWIDTH.search(text), _PEAK.search(text)
    if not bandwidth or not peak:
        raise UsageError(
            f"no device {text!r} is known",
            f"give one of {', '.join(DEVICES)}, or rates like 3.35TB/s,989TFLOP/s",
        )
    return Device(name=text, bandwidth=_rate(bandwidth), peak=_rate(peak))


def _rate(match: re.Match[str]) -> float:
    return float(match[1]) * _UNITS[match[2].upper()]


@dataclass(frozen=True, slots=True)
class Cost:
    """The FLOPs and the bytes read of one decoding step."""

    flops: float
    nbytes: float

    @property
    def intensity(self) -> float:
        """Return the FLOP per byte; 0 if no byte is read."""
        return self.flops / self.nbytes if self.nbytes else 0.0

    def seconds(self, device: Device) -> float:
        """Return the time in seconds that the step takes on `device` at best."""
        return max(self.nbytes / device.bandwidth, self.flops / device.peak)

    def bound(self, device: Device) -> str:
        """Return "compute" or "memory", whichever limits the step on `device`."""
        return "compute" if self.intensity >= device.ridge else "memory"

    def as_dict(self, device: Device) -> dict[str, Any]:
        """Return the cost for JSON, timed on `device` in milliseconds."""
        return {
            **asdict(self),
            "intensity": self.intensity,
            "ms": 1e3 * self.seconds(device),
            "bound": self.bound(device),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Decode:
    """The cost of decoding one token for each of `batch` sequences: MLPs, and whole model."""

    device: Device
    batch: int
    dtype: str | None  # None means as stored
    context: int  # positions attended to; 0 leaves out attention scores and the KV cache
    mlp: Cost
    whole: Cost
    compute_bound_from: int | None  # smallest batch that brings the MLPs to the ridge, if any

    def as_dict(self) -> dict[str, Any]:
        """Return the step for JSON: FLOPs, bytes and milliseconds, FLOP per byte."""
        return {
            "device": self.device.as_dict(),
            "batch": self.batch,
            "dtype": self.dtype,
            "context": self.context,
            "mlp": self.mlp.as_dict(self.device),
            "whole": self.whole.as_dict(self.device),
            "mlp_compute_bound_from_batch": self.compute_bound_from,
        }


def decode(
    weights: Weights, device: Device, *, batch: int = 1, dtype: str | None = None, context: int = 0
) -> Decode:
    """Return what one decoding step costs on a device.

    Every weight is read once, as stored or as if it were stored in `dtype`. `context` is the number
    of positions that each sequence attends to.

    Raises UsageError for a dtype that is not in `weigh.BYTES`.
    """
    if dtype and dtype not in BYTES:
        raise UsageError(f"no dtype {dtype!r} is known", f"give one of {', '.join(BYTES)}")

    def mlp(batch: int) -> Cost:
        return mlp_work(weights, batch, dtype)

    nbytes = weights.nbytes(batch=batch, dtype=dtype, context=context)
    whole = Cost(batch * weights.flops(context=context), nbytes)
    return Decode(
        device=device,
        batch=batch,
        dtype=dtype,
        context=context,
        mlp=mlp(batch),
        whole=whole,
        compute_bound_from=_first_batch(mlp, device.ridge) if mlp(1).flops else None,
    )


def mlp_work(weights: Weights, batch: int, dtype: str | None = None) -> Cost:
    """Return the part of a decoding step that the MLPs take, without the routers."""
    nbytes = weights.nbytes(*MLP_ROLES, batch=batch, dtype=dtype)
    return Cost(batch * weights.flops(*MLP_ROLES), nbytes)


def _first_batch(work: Callable[[int], Cost], ridge: float) -> int:
    """Return the smallest batch whose intensity is at least `ridge`.

    There is one: FLOPs grow with the batch, and the bytes of the weights are bounded.
    """
    high = 1
    while work(high).intensity < ridge:
        high *= 2
    low = high // 2
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (middle, high) if work(middle).intensity < ridge else (low, middle)
    return high

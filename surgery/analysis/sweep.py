"""The results of a sweep of carved models, as data."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

from surgery.calibration.data import Sample
from surgery.fitting.expert_split import average


@dataclass(kw_only=True)
class Point:
    """One variant of a carved model, and what it is worth.

    Args:
        method: how its neurons were grouped.
        router: what chooses the parts, or "oracle".
        active: the active parts, of all layers or by layer.
        experts: the parts in all.
        perplexity: on held-out text.
        agreement: the part of the next tokens that are the source's.
        errors: of the output, by carved layer.
        recall: the part of the oracle's choices that the router makes, by carved layer.
        mass_recall: the same, weighed by what the parts add to the output.
    """

    method: str
    router: str
    active: int | list[int]
    experts: int
    perplexity: float = math.nan
    agreement: float = math.nan
    errors: list[float] = field(default_factory=list)
    recall: list[float] = field(default_factory=list)
    mass_recall: list[float] = field(default_factory=list)

    @property
    def fraction(self) -> float:
        return average(self.active) / self.experts

    @property
    def error(self) -> float:
        """Return the mean error of the layers."""
        return sum(self.errors) / len(self.errors) if self.errors else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Sweep:
    """All variants, the source's own `perplexity`, and the number of `tokens` evaluated."""

    source: str
    model_type: str
    repair: str
    shared: int
    layers: tuple[int, ...]
    perplexity: float
    tokens: int
    sample: Sample
    points: tuple[Point, ...]

    def as_dict(self) -> dict[str, Any]:
        points = [
            dataclasses.asdict(p) | {"fraction": p.fraction, "error": p.error} for p in self.points
        ]
        return {
            "source": self.source,
            "model_type": self.model_type,
            "repair": self.repair,
            "shared": self.shared,
            "layers": list(self.layers),
            "perplexity": self.perplexity,
            "tokens": self.tokens,
            "sample": self.sample.as_dict(),
            "points": points,
        }

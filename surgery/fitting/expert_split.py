"""How an MLP is cut into experts, as data: planning with it needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertSplit:
    """How MLPs are cut: `shared` and `active` count parts among `experts`; `bypass` is a rank."""

    experts: int
    active: int
    shared: int
    method: str
    router: str
    repair: str
    seed: int
    bypass: int = 0

    @property
    def routed(self) -> int:
        return self.experts - self.shared

    @property
    def top_k(self) -> int:
        return self.active - self.shared

    @property
    def exact(self) -> bool:
        return self.active == self.experts

    @property
    def needs_data(self) -> bool:
        free = self.method == "random" or (self.method == "kmeans" and not self.shared)
        return not (free and self.router == "centroids" and self.repair == "none")


def usual(experts: int, shared: int) -> int:
    """Parts that are active where nobody says how many: three quarters."""
    return max(shared + 1, experts * 3 // 4)


def average(active: int | Sequence[int]) -> float:
    """Of what `carve` takes as `active`: a number for every layer, or one for each."""
    return active if isinstance(active, int) else sum(active) / max(1, len(active))

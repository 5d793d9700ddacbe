"""How an MLP is cut into experts, as data: planning with it needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertSplit:
    """Describe how MLPs are cut into parts.

    `experts` is the number of all parts, of which `active` are read for a token, `shared` of them
    always. `bypass` is the rank of a bypass.
    """

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
        """Return how many parts a router chooses from."""
        return self.experts - self.shared

    @property
    def top_k(self) -> int:
        """Return how many parts a router chooses."""
        return self.active - self.shared

    @property
    def exact(self) -> bool:
        """Return whether every token passes all parts, so that the output is the source's."""
        return self.active == self.experts

    @property
    def needs_data(self) -> bool:
        """Return whether the split reads calibration text."""
        free = self.method == "random" or (self.method == "kmeans" and not self.shared)
        return not (free and self.router == "centroids" and self.repair == "none")


def usual(experts: int, shared: int) -> int:
    """Return how many parts are active by default: three quarters of them."""
    return max(shared + 1, experts * 3 // 4)


def average(active: int | Sequence[int]) -> float:
    """Return the mean of `active`: one number for every layer, or a number for each."""
    return active if isinstance(active, int) else sum(active) / max(1, len(active))

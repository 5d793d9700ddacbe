"""Groups of neurons: balanced assignments are optimal, and what was planted is found.

What could break it: a group with too many neurons, an assignment that is only nearly the best, a
group number that is taken for a neuron's.
"""

from __future__ import annotations

import numpy
import pytest
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from surgery.fitting import partition


def draw(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def sizes(label: Tensor, groups: int) -> list[int]:
    return torch.bincount(label, minlength=groups).tolist()


def is_planted(label: Tensor, planted: Tensor) -> bool:
    """Whether two labels group alike, whatever the numbers of the groups."""
    pairs = set(zip(label.tolist(), planted.tolist(), strict=True))
    return len(pairs) == len(planted.unique())


@pytest.mark.parametrize(("points", "groups"), [(12, 3), (60, 5), (240, 16), (64, 64), (30, 1)])
@pytest.mark.parametrize("kind", ["normal", "tied", "skewed", "same"])
def test_a_balanced_assignment_is_the_best(points: int, groups: int, kind: str) -> None:
    """Against an assignment of points to places, of which each group has as many."""
    cost = torch.randn(points, groups, generator=draw(points))
    cost = {
        "normal": cost,
        "tied": cost.round(),
        "skewed": cost.exp() ** 4 * torch.arange(1, groups + 1),
        "same": torch.zeros_like(cost),
    }[kind]
    label = partition.balanced(cost)
    assert sizes(label, groups) == [points // groups] * groups
    places = numpy.repeat(cost.double().numpy(), points // groups, axis=1)
    best = places[linear_sum_assignment(places)].sum()
    assert cost.double()[torch.arange(points), label].sum().item() == pytest.approx(
        best, rel=1e-9, abs=1e-9
    )


@pytest.mark.parametrize("seed", range(5))
def test_rounding_does_not_move_points_for_ever(seed: int) -> None:
    """From prices so large that the cheapest group is often chosen by their rounding: it ends, and
    near the best.
    """
    cost = torch.randn(96, 8, generator=draw(seed)).exp() ** 3
    prices = 1e9 * numpy.random.default_rng(seed).standard_normal(8)
    label = partition.balanced(cost, prices)
    assert sizes(label, 8) == [12] * 8
    best = cost[torch.arange(96), partition.balanced(cost)].sum().item()
    assert cost[torch.arange(96), label].sum().item() == pytest.approx(best, rel=1e-3)


@pytest.mark.parametrize("seed", [9, 12, 15])
def test_what_rounding_leaves_adds_up_to_no_endless_path(seed: int) -> None:
    """Costs that differ by less than one of them is rounded by."""
    cost = torch.randint(0, 8, (128, 16), generator=draw(seed)).double() * 0.8e-10
    cost[0, 0] = 100.0
    label = partition.balanced(cost)
    assert sizes(label, 16) == [8] * 16 and label[0] != 0
    assert cost[torch.arange(128), label].sum() < 0.1 * cost[1:].mean() * 128


def test_points_that_do_not_divide() -> None:
    with pytest.raises(ValueError, match="10 points"):
        partition.balanced(torch.zeros(10, 3))


def planted(groups: int = 6, width: int = 8) -> Tensor:
    """The group of each neuron, shuffled."""
    return (torch.arange(groups * width) // width)[torch.randperm(groups * width, generator=draw())]


def firing(label: Tensor, tokens: int = 300) -> Tensor:
    """Tokens [N, n] on each of which the neurons of one group, and few others, fire."""
    token = torch.randint(int(label.max()) + 1, (tokens, 1), generator=draw(1))
    noise = torch.rand(tokens, len(label), generator=draw(2)) < 0.05
    return ((label[None] == token) | noise).float()


def test_kmeans_finds_what_was_planted() -> None:
    label = planted()
    centres = torch.randn(6, 20, generator=draw(3))
    points = centres[label] + 0.3 * torch.randn(len(label), 20, generator=draw(4))
    assert is_planted(partition.kmeans(points, 6, seed=0), label)


def test_a_graph_is_cut_where_it_was_planted() -> None:
    label = planted()
    fires = firing(label)
    fires[:, :5] = (
        1  # neurons that always fire have edges to all, and must not draw all others to them
    )
    found = partition.graph(fires.T @ fires, 6, seed=0)
    assert sizes(found, 6) == [8] * 6
    assert is_planted(partition.graph(firing(label).T @ firing(label), 6, seed=0), label)


def test_markers_of_the_same_tokens_stand_together() -> None:
    """As CMoE does it, around the most active neurons: each group's is made so."""
    label = planted()
    marks = firing(label)
    for g in range(6):
        first = int((label == g).nonzero()[0])
        marks[:, first] = torch.maximum(
            marks[:, first], (marks[:, label == g].mean(1) > 0.1).float()
        )
    found = partition.markers(marks, 6)
    assert is_planted(found, label)
    for g, neuron in enumerate(partition.representatives(marks, found, 6).tolist()):
        assert found[neuron] == g


def test_mass_is_concentrated() -> None:
    """Each token's mass is in two planted groups: two groups of six hold nearly all of it, which a
    third of the neurons taken at random does not; and a step never makes it less."""
    label = planted()
    token = torch.stack([torch.randperm(6, generator=draw(i))[:2] for i in range(400)])
    mass = (label[None] == token[:, :1]) * 1.0 + (label[None] == token[:, 1:]) * 1.0
    mass += 0.02 * torch.rand(mass.shape, generator=draw(9))
    start = partition.random(len(label), 6, seed=1)

    def held(groups: Tensor) -> float:
        by_group = torch.zeros(len(mass), 6).index_add_(1, groups, mass)
        return (by_group.topk(2, dim=1).values.sum(1) / mass.sum(1)).mean().item()

    found = partition.concentrate(mass, start, 6, active=2)
    assert sizes(found, 6) == [8] * 6
    assert held(found) > held(start) + 0.15
    assert held(partition.concentrate(mass, label, 6, active=2)) >= held(label) > 0.95


def test_rates_fill_one_group_after_another() -> None:
    assert partition.by_rate(torch.tensor([0.1, 0.9, 0.5, 0.7, 0.0, 0.2]), 3).tolist() == [
        2,
        0,
        1,
        0,
        2,
        1,
    ]


def test_random_groups_depend_on_the_seed() -> None:
    found = [partition.random(24, 4, seed) for seed in (0, 0, 1)]
    assert (
        sizes(found[0], 4) == [6] * 4
        and torch.equal(found[0], found[1])
        and not torch.equal(found[0], found[2])
    )

"""Which neurons of an MLP stand together: n neurons in G groups of n / G, by functions of tensors
alone.

Every way ends in a balanced assignment, solved exactly by `balanced`. They differ in what brings
two neurons together:

    random        nothing
    kmeans        the direction of their rows of gate and up                 LLaMA-MoE, Zhu et al. 2024, arXiv 2406.16554
    coactivation  that they fire on the same tokens, a balanced cut of the   MoEfication, Zhang et al. 2022, arXiv 2110.01786
                  normalised graph of co-firing counts
    cmoe          that they are among the largest products of the same       CMoE, Pei et al. 2025, arXiv 2502.04416
                  tokens; those that are most often stand in shared groups
    mass          that the same tokens are served by them: groups and the tokens' choices of `active` groups are
                  optimised in turn, so that as much as can be of what the MLP adds is in the chosen
                  groups

A neuron's mass on a token is (h_i ‖W_down[:, i]‖)², the energy of what it adds to the residual
stream.

Shapes: N tokens, n neurons, G groups, w = n / G.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

ROUNDS = 10  # of k-means and its kin, which stop when nothing moves
SWEEPS = 4  # over the prices of the groups, before single points are moved


def balanced(cost: Tensor, price: NDArray[numpy.float64] | None = None) -> Tensor:
    """The group [n] of each point that minimises the sum of cost [n, G] where every group has n / G
    points.

    A transport problem: prices of the groups first spread the points, cheapest group for each,
    which is optimal for the sizes that come out; then the excess goes along shortest chains of
    moves to groups with room, which keeps it so. A linear assignment of n places (as CMoE solves
    it) takes time of order n³; this one about n·G². `price` [G] is where the
    search begins, and is brought up to date: what was found for a similar cost spares most of the
    moves.
    """
    c = cost.double().cpu().numpy()
    points, groups = c.shape
    if points % groups:
        raise ValueError(f"{points} points do not divide into {groups} groups")
    width, price = points // groups, numpy.zeros(groups) if price is None else price
    _climb(c, price)
    label = (c + price).argmin(1)
    sizes = numpy.bincount(label, minlength=groups)
    move, mover = numpy.empty((groups, groups)), numpy.zeros((groups, groups), dtype=numpy.int64)
    for g in range(groups):
        _cheapest_moves(c, label, g, move, mover)
    least = 1e-12 * (
        abs(c).max() + abs(price).max()
    )  # less may be rounding, and a cycle of moves gain for ever
    while (sizes > width).any():
        chain = _chain(move, sizes > width, sizes < width, least)
        for g, h in pairwise(chain):
            label[mover[g, h]] = h
        sizes[chain[0]] -= 1
        sizes[chain[-1]] += 1
        for g in chain:
            _cheapest_moves(c, label, g, move, mover)
    return torch.from_numpy(label)


def _climb(c: NDArray[numpy.float64], price: NDArray[numpy.float64]) -> None:
    """Change what is added to the cost of each group, so that the cheapest groups are nearly
    balanced: one group after another takes the price at which n / G points prefer it, which climbs
    the dual of the transport problem."""
    points, groups = c.shape
    width = points // groups
    for _ in range(SWEEPS if groups > 1 else 0):
        for g in range(groups):
            others = c + price
            others[:, g] = numpy.inf
            prefers = numpy.partition(others.min(1) - c[:, g], (points - width - 1, points - width))
            price[g] = prefers[points - width - 1 : points - width + 1].mean()


def _cheapest_moves(
    c: NDArray[numpy.float64],
    label: NDArray[numpy.int64],
    g: int,
    move: NDArray[numpy.float64],
    mover: NDArray[numpy.int64],
) -> None:
    """What the cheapest move of a point of group g to each other group costs [G, G], and which
    point it is.
    """
    members = numpy.flatnonzero(label == g)
    if not len(members):
        move[g] = numpy.inf
        return
    costs = c[members] - c[members, g][:, None]
    best = costs.argmin(0)
    move[g], mover[g] = costs[best, numpy.arange(len(move))], members[best]


def _chain(
    move: NDArray[numpy.float64],
    over: NDArray[numpy.bool_],
    under: NDArray[numpy.bool_],
    least: float,
) -> list[int]:
    """The groups on the shortest path from one with too many points to one with too few (Bellman
    and Ford); a detour must gain `least`. Paths that are too long by less may add up to a cycle of
    moves that gains: then it is found, and taken first.
    """
    distance = numpy.where(over, 0.0, numpy.inf)
    before = numpy.full(len(move), -1)
    for _ in range(len(move)):
        through = distance[:, None] + move
        best = through.argmin(0)
        found = through[best, numpy.arange(len(move))]
        shorter = found < distance - least
        if not shorter.any():
            break
        distance[shorter], before[shorter] = found[shorter], best[shorter]
    chain = [int(numpy.where(under, distance, numpy.inf).argmin())]
    while before[chain[-1]] >= 0:
        chain.append(int(before[chain[-1]]))
        if chain[-1] in chain[:-1]:
            chain = chain[chain.index(chain[-1]) :]
            break
    return chain[::-1]


# --- ways to group --------------------------------------------------------------------------------


def random(neurons: int, groups: int, seed: int) -> Tensor:
    """The group of each neuron [n]."""
    order = torch.randperm(neurons, generator=torch.Generator().manual_seed(seed))
    return torch.empty_like(order).scatter_(0, order, torch.arange(neurons) // (neurons // groups))


def kmeans(points: Tensor, groups: int, seed: int) -> Tensor:
    """Balanced k-means of points [n, d]: the group of each [n]."""
    centroids = points[
        _spread(len(points), groups, seed, lambda i: (points - points[i]).square().sum(1))
    ]
    square = points.square().sum(1, keepdim=True)

    def cost(label: Tensor | None) -> Tensor:
        middle = (
            centroids
            if label is None
            else _members(label, groups, points).T @ points * (groups / len(points))
        )
        return square - 2 * points @ middle.T + middle.square().sum(1)

    return _settle(cost)


def graph(affinity: Tensor, groups: int, seed: int) -> Tensor:
    """A balanced cut of the graph with these weights [n, n] that keeps most of the weight inside
    groups, each edge in proportion to the geometric mean of its ends' degrees: kernel k-means, one
    balanced assignment after another."""
    root = affinity.sum(1).clamp_min(1e-12).rsqrt()
    kernel = affinity * root[:, None] * root
    square = kernel.diagonal()
    start = _spread(len(kernel), groups, seed, lambda i: square + square[i] - 2 * kernel[i])

    def cost(label: Tensor | None) -> Tensor:
        if label is None:
            return square[start] - 2 * kernel[:, start]
        inside = _members(label, groups, kernel)
        to_group = kernel @ inside * (groups / len(kernel))  # mean affinity of a neuron to a group
        return (to_group * inside).sum(0) * (groups / len(kernel)) - 2 * to_group

    return _settle(cost)


def concentrate(mass: Tensor, label: Tensor, groups: int, active: int) -> Tensor:
    """Groups such that the `active` best of a token hold as much as can be of its mass [N, n], from
    a first `label` on.

    In turn, each token chooses its groups, and the neurons are assigned to groups so that most mass
    is chosen: neither can make it less.
    """

    def cost(now: Tensor | None) -> Tensor:
        held = mass @ _members(label if now is None else now, groups, mass)
        chosen = torch.zeros_like(held).scatter_(1, held.topk(active, dim=1).indices, 1.0)
        return -(mass.T @ chosen)

    return _settle(cost)


def markers(points: Tensor, groups: int) -> Tensor:
    """Balanced groups of 0/1 columns [N, n] around those with most ones, one for each, by how many
    tokens differ.
    """
    centre = points[:, points.sum(0).topk(groups).indices]
    return balanced(points.sum(0)[:, None] + centre.sum(0) - 2 * (points.T @ centre))


def representatives(points: Tensor, label: Tensor, groups: int) -> Tensor:
    """The neuron of each group [G] whose 0/1 column [N, n] is nearest to the mean of the group's,
    by absolute difference.
    """
    inside = _members(label, groups, points)
    mean = points @ inside * (groups / len(label))
    far = points.sum(0)[:, None] + mean.sum(0) - 2 * (points.T @ mean)
    return far.masked_fill(inside == 0, torch.inf).argmin(0)


def by_rate(rate: Tensor, groups: int) -> Tensor:
    """The group of each neuron where the first group has those with the highest rates [n], and so
    on.
    """
    label = torch.empty(len(rate), dtype=torch.long)
    label[rate.argsort(descending=True, stable=True).cpu()] = torch.arange(len(rate)) // (
        len(rate) // groups
    )
    return label


def _settle(cost: Callable[[Tensor | None], Tensor]) -> Tensor:
    """Assign and look again at what that costs, until nothing moves."""
    first = cost(None)
    price = numpy.zeros(first.shape[1])
    label = balanced(first, price)
    for _ in range(ROUNDS):
        before, label = label, balanced(cost(label), price)
        if torch.equal(before, label):
            break
    return label


def _members(label: Tensor, groups: int, like: Tensor) -> Tensor:
    """Which neuron is in which group, 0 and 1 [n, G]."""
    return torch.nn.functional.one_hot(label, groups).to(like)


def _spread(points: int, count: int, seed: int, apart: Callable[[int], Tensor]) -> Tensor:
    """Indices of `count` points, each drawn in proportion to the squared distance to those before
    it (k-means++). `apart(i)` [n] is that of each point to point i."""
    draw = torch.Generator().manual_seed(seed)
    chosen = [int(torch.randint(points, (1,), generator=draw))]
    nearest = apart(chosen[0])
    while len(chosen) < count:
        chosen.append(int(torch.multinomial(nearest.clamp_min(1e-30).cpu(), 1, generator=draw)))
        nearest = torch.minimum(nearest, apart(chosen[-1]))
    return torch.tensor(chosen)

"""Group the neurons of an MLP: n neurons in G groups of n / G each.

Every method ends in a balanced assignment, which `balanced` solves exactly. The methods differ in
what brings two neurons together:

    random        chance alone
    kmeans        the direction of their rows of gate and up
                  (LLaMA-MoE, Zhu et al. 2024, arXiv 2406.16554)
    coactivation  they fire on the same tokens: a balanced cut of the normalised graph of counts
                  of how often two fire together (MoEfication, Zhang et al. 2022, arXiv 2110.01786)
    cmoe          they are among the largest products of the same tokens; the neurons that are so
                  most often are shared (CMoE, Pei et al. 2025, arXiv 2502.04416)
    mass          they serve the same tokens: the groups, and the `active` groups that each token
                  chooses, are optimised in turn, so that the chosen groups hold as much as possible
                  of what the MLP adds

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

ROUNDS = 10  # the most rounds of k-means and its kin, which stop when nothing moves
SWEEPS = 4  # over the prices of the groups, before single points are moved


def balanced(cost: Tensor, price: NDArray[numpy.float64] | None = None) -> Tensor:
    """Return the group [n] of each point that minimises the sum of the costs [n, G].

    Every group gets n / G points. This is a transport problem, solved in two steps:

    1. Each point goes to its cheapest group, at prices of the groups that spread the points. That
       is optimal for whatever sizes the groups come out with.
    2. The excess moves to groups with room, along shortest chains of moves, which keeps it optimal.

    A linear assignment of n places (as CMoE solves it) takes time of order n³, this one about n·G².
    The search begins at `price` [G] and brings it up to date: prices that were found for a similar
    cost spare most of the moves.
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
    # A smaller gain may be rounding, with which a cycle of moves would gain for ever.
    least = 1e-12 * (abs(c).max() + abs(price).max())
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
    """Change the prices in place, so that the points' cheapest groups are nearly balanced.

    One group after another takes the price at which n / G points prefer it. That climbs the dual of
    the transport problem.
    """
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
    """Fill row g of `move` and `mover` [G, G].

    They hold what the cheapest move of a point from group g to each other group costs, and which
    point that is.
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
    """Return the groups on the shortest path from one with too many points to one with too few.

    The search is Bellman and Ford's, where a detour must gain `least`. Paths that are too long by
    less than that may add up to a cycle of moves that gains; then the cycle is returned, to be
    taken first.
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
    """Return the group of each neuron [n], drawn at random."""
    order = torch.randperm(neurons, generator=torch.Generator().manual_seed(seed))
    return torch.empty_like(order).scatter_(0, order, torch.arange(neurons) // (neurons // groups))


def kmeans(points: Tensor, groups: int, seed: int) -> Tensor:
    """Return the group [n] of each of the points [n, d], by balanced k-means."""
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
    """Return the groups [n] of a balanced cut of the graph with these weights [n, n].

    The cut keeps as much of the weight as it can inside groups, where the weight of an edge is
    relative to the geometric mean of its ends' degrees. It is found by kernel k-means, one balanced
    assignment after another.
    """
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
    """Return groups [n] whose `active` best for a token hold as much as possible of its mass.

    `mass` [N, n] is that of the neurons on each token, and `label` [n] the groups to begin with. In
    turn, each token chooses its groups, and the neurons are assigned to the groups so that most
    mass is chosen. Neither step can make the chosen mass smaller.
    """

    def cost(now: Tensor | None) -> Tensor:
        held = mass @ _members(label if now is None else now, groups, mass)
        chosen = torch.zeros_like(held).scatter_(1, held.topk(active, dim=1).indices, 1.0)
        return -(mass.T @ chosen)

    return _settle(cost)


def markers(points: Tensor, groups: int) -> Tensor:
    """Return balanced groups [n] of the 0/1 columns [N, n].

    Each group stands around one of the columns with most ones; the distance of two columns is the
    number of tokens on which they differ.
    """
    centre = points[:, points.sum(0).topk(groups).indices]
    return balanced(points.sum(0)[:, None] + centre.sum(0) - 2 * (points.T @ centre))


def representatives(points: Tensor, label: Tensor, groups: int) -> Tensor:
    """Return the neuron of each group [G] that is most like the group.

    It is the one whose 0/1 column [N, n] differs least from the mean of the group's columns.
    """
    inside = _members(label, groups, points)
    mean = points @ inside * (groups / len(label))
    far = points.sum(0)[:, None] + mean.sum(0) - 2 * (points.T @ mean)
    return far.masked_fill(inside == 0, torch.inf).argmin(0)


def by_rate(rate: Tensor, groups: int) -> Tensor:
    """Return the group of each neuron [n], where the first group has the highest rates [n]."""
    label = torch.empty(len(rate), dtype=torch.long)
    label[rate.argsort(descending=True, stable=True).cpu()] = torch.arange(len(rate)) // (
        len(rate) // groups
    )
    return label


def _settle(cost: Callable[[Tensor | None], Tensor]) -> Tensor:
    """Assign the points, compute the costs that follow, and assign again, until nothing moves.

    `cost` gives the costs [n, G] for a label, and those to begin with for None.
    """
    first = cost(None)
    price = numpy.zeros(first.shape[1])
    label = balanced(first, price)
    for _ in range(ROUNDS):
        before, label = label, balanced(cost(label), price)
        if torch.equal(before, label):
            break
    return label


def _members(label: Tensor, groups: int, like: Tensor) -> Tensor:
    """Return which neuron is in which group, as 0 and 1 [n, G]."""
    return torch.nn.functional.one_hot(label, groups).to(like)


def _spread(points: int, count: int, seed: int, apart: Callable[[int], Tensor]) -> Tensor:
    """Draw the indices of `count` points that lie far apart (k-means++).

    Each is drawn in proportion to its squared distance to the nearest of those before it;
    `apart(i)` [n] is the squared distance of every point to point i.
    """
    draw = torch.Generator().manual_seed(seed)
    chosen = [int(torch.randint(points, (1,), generator=draw))]
    nearest = apart(chosen[0])
    while len(chosen) < count:
        chosen.append(int(torch.multinomial(nearest.clamp_min(1e-30).cpu(), 1, generator=draw)))
        nearest = torch.minimum(nearest, apart(chosen[-1]))
    return torch.tensor(chosen)

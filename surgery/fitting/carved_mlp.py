"""Carve one MLP into experts: group its neurons (partition.py), fit a router, and refit what the
experts miss (ridge.py).

Of `experts` parts of equal width a token passes `active`: the first `shared` of them always, the
others as a router chooses. Each has weight 1, so that all of them together are the MLP that they
were cut from. A mass is the energy (h_i ‖W_down[:, i]‖)² of a neuron, as a share of the token's.
Routers:

    oracle     chooses the routed experts with most mass on the token; it has to compute all of
               them, so it only serves as a measure for the others
    centroids  compares x with the mean direction of an expert's rows of gate, or of up where there
               is no gate (MoEfication)
    trained    W tanh(V x + b) + c, where V has `router_width` rows; it learns which experts the
               oracle would choose (MoEfication)
    analytic   the product of one neuron of each expert, the one whose tokens are most like those
               of the whole expert (CMoE)

The cross-entropy of a wrong choice is weighted by the mass that the choice is about: which of two
equal experts is taken does not matter.

Shapes: N tokens, H hidden_size, F intermediate_size, S shared neurons, G routed experts of w
neurons, F = S + G·w.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn import functional as F
from transformers.activations import ACT2FN

from surgery.blocks.experts_mlp import Router
from surgery.fitting import partition
from surgery.fitting.cross_validation import validated
from surgery.fitting.expert_split import ExpertSplit
from surgery.fitting.measures import better, error, figures
from surgery.fitting.neurons import Neurons
from surgery.fitting.rows import CHUNK, FIRST, Rows
from surgery.fitting.sizes import SAMPLED

MARKED = 10  # products of a token that CMoE marks
FIRING = 0.1  # the part of the neurons that fire on a token: those with most mass
# Rows that the old weights stand for in the refit, because what an inactive expert leaves to fit is
# small and noisy. Left-out domains choose among these parts of it.
DAMPED = 4000
DAMPINGS = (0.03, 0.1, 0.3, 1.0, 3.0)
STEPS, BATCH, RATE = 300, 512, 1e-2  # of a router's training


@dataclass(kw_only=True)
class Carved(Neurons):
    """Hold neurons in the order of their experts, the shared ones first.

    `order` [F] says which neurons of the source they are, and `norm` [F] is the norm of their
    columns of `down` there. Without a `router` the oracle chooses.
    """

    split: ExpertSplit
    order: Tensor
    norm: Tensor
    router: Router | None = None

    def product(self, z: Tensor) -> Tensor:
        """Return the products h [n, F] of inputs [n, H], zero where an expert was not chosen."""
        h = super().product(z)
        chosen = self.choose(self.mass(h)) if self.router is None else self.route(z)
        width = h.shape[1] // self.split.experts
        return h * F.pad(
            chosen.repeat_interleave(width, 1), (self.split.shared * width, 0), value=1.0
        )

    def mass(self, h: Tensor) -> Tensor:
        """Return the mass of each routed expert [n, G] for products [n, F]."""
        energy = (h * self.norm).square()
        share = energy / energy.sum(1, keepdim=True).clamp_min(1e-30)
        return share.unflatten(1, (self.split.experts, -1)).sum(2)[:, self.split.shared :]

    def choose(self, score: Tensor) -> Tensor:
        """Return 1.0 for the experts with the highest scores, else 0, [n, G] of scores [n, G]."""
        return torch.zeros_like(score).scatter_(1, score.topk(self.split.top_k, dim=1).indices, 1.0)

    def route(self, z: Tensor) -> Tensor:
        """Return 1.0 for the experts that the router chooses, else 0, [n, G] of inputs [n, H]."""
        assert self.router is not None
        with torch.no_grad():
            _, _, chosen = self.router(z, ACT2FN[self.act])
        return z.new_zeros(len(z), self.split.routed).scatter_(1, chosen, 1.0)


def fit(
    neurons: Neurons, rows: Rows | None, split: ExpertSplit, entry: dict[str, Any]
) -> tuple[Carved, dict[str, Any]]:
    """Carve an MLP, and return it with its figures on rows that were not fitted on.

    Without rows there are no figures. `entry` is the entry of the block in `surgery_blocks`.
    `neurons` are reordered in place, because in fp32 they may be larger than anything else.
    """
    seen = None if rows is None else _Seen(neurons, rows)
    label = _labels(neurons, seen, split)
    marks = seen.marks if seen is not None and split.router == "analytic" else None
    order = label.argsort(stable=True).to(neurons.up.device)
    neurons.reorder(order)
    values = {f.name: getattr(neurons, f.name) for f in dataclasses.fields(neurons)}
    carved = Carved(**values, split=split, order=order, norm=neurons.down.norm(dim=0))
    if split.router != "oracle":
        carved.router = _router(carved, rows, marks, entry)
    if rows is None:
        return carved, {}
    fitted, chosen = _refitted(carved, rows) if split.repair == "ridge" else (carved, {})
    kept, errors = better(carved, fitted, rows)
    return kept, figures(**errors, **chosen, **_against_oracle(carved, rows))


def _refitted(carved: Carved, rows: Rows) -> tuple[Carved, dict[str, float]]:
    """Return the experts with `down` and the bypass refitted, and what left-out domains chose."""
    dampings = [part * DAMPED / rows.fitted for part in DAMPINGS]
    fitted, choice = validated(carved, rows, rank=carved.split.bypass, dampings=dampings)
    if choice is None:
        return fitted, {}
    return fitted, {"damping": choice.damping, "part": choice.part, "left_out": choice.error}


def costs(neurons: Neurons, rows: Rows, split: ExpertSplit) -> list[float]:
    """Return what it costs the stream behind the layer to leave out 0, 1, 2, … routed experts.

    The oracle chooses which, and the cost is the weighted squared error on rows that the neurons
    were not grouped by. `neurons` are reordered in place.
    """
    carved, _ = fit(neurons, rows, dataclasses.replace(split, router="oracle", repair="none"), {})
    size = sum(
        ((1.0 if w is None else w) * y.square().mean(1)).sum().item()
        for _, y, w in rows.parts(rows.fitted)
    )
    found = []
    for active in range(split.experts, split.shared, -1):
        fewer = dataclasses.replace(carved, split=dataclasses.replace(split, active=active))
        found.append(size * error(fewer, rows, rows.fitted) / len(rows.z))
    return found


def _against_oracle(carved: Carved, rows: Rows) -> dict[str, float]:
    """Return how well the router does beside the oracle, as figures of the layer.

    "recall" is the part of the oracle's experts that the router chooses too. "mass_recall" is the
    mass of the router's experts over that of the oracle's. "oracle_error" is the oracle's error.
    """
    if carved.router is None:
        return {}
    agreed = wanted = held = best = 0.0
    for z, _, _ in rows.parts(rows.fitted):
        mass, chosen = carved.mass(Neurons.product(carved, z)), carved.route(z)
        ideal = carved.choose(mass)
        agreed, wanted = agreed + (chosen * ideal).sum().item(), wanted + ideal.sum().item()
        held, best = held + (chosen * mass).sum().item(), best + (ideal * mass).sum().item()
    oracle = error(dataclasses.replace(carved, router=None), rows, rows.fitted)
    return {
        "recall": agreed / wanted,
        "mass_recall": held / max(best, 1e-30),
        "oracle_error": oracle,
    }


# --- groups ---------------------------------------------------------------------------------------


class _Seen:
    """Tell what the neurons do on a sample of the rows that are fitted on."""

    def __init__(self, neurons: Neurons, rows: Rows) -> None:
        step = max(1, rows.fitted * len(neurons.up) // SAMPLED)
        self.neurons, self.z = neurons, rows.z[: rows.fitted : step].float()

    @cached_property
    def shares(self) -> Tensor:
        """Return the mass of each neuron on each token, [N, F]."""
        return self.neurons.shares(self.z)

    @cached_property
    def marks(self) -> Tensor:
        """Return 1.0 for the MARKED largest products of each token, else 0, [N, F].

        Inputs and rows of the weights are scaled to norm 1 first, as in CMoE's code.
        """
        n = self.neurons
        z, gate, up = (None if t is None else F.normalize(t, dim=1) for t in (self.z, n.gate, n.up))
        assert z is not None
        unit = dataclasses.replace(n, gate=gate, up=up, rule="plain")
        return _largest(unit.product(z).abs(), min(MARKED, len(n.up)))


def _largest(values: Tensor, count: int) -> Tensor:
    """Return 1.0 for the `count` largest values of each row that are not zero, else 0."""
    found = values.topk(count, dim=1)
    return torch.zeros_like(values).scatter_(1, found.indices, (found.values > 0).to(values.dtype))


def _labels(neurons: Neurons, seen: _Seen | None, split: ExpertSplit) -> Tensor:
    """Return the part [F] that each neuron belongs to; the shared parts come first."""
    width = len(neurons.up)
    if split.method == "random" or (split.shared and seen is None):
        return partition.random(width, split.experts, split.seed)
    rate = None
    if seen is not None:
        rate = (seen.marks if split.method == "cmoe" else seen.shares).mean(0)
    label = (
        torch.zeros(width, dtype=torch.long)
        if rate is None
        else partition.by_rate(rate, split.experts)
    )
    rest = (label >= split.shared).nonzero()[:, 0]
    label[rest] = split.shared + _grouped(
        neurons, seen, split, rest.to(neurons.up.device), label[rest] - split.shared
    )
    return label


def _grouped(
    neurons: Neurons, seen: _Seen | None, split: ExpertSplit, rest: Tensor, ranked: Tensor
) -> Tensor:
    """Return the routed expert of each neuron of `rest`; `ranked` has them by firing rate."""
    if split.method == "kmeans":
        parts = [F.normalize(t[rest], dim=1) for t in (neurons.gate, neurons.up) if t is not None]
        return partition.kmeans(torch.cat(parts, dim=1), split.routed, split.seed)
    assert seen is not None
    if split.method == "cmoe":
        return partition.markers(seen.marks[:, rest], split.routed)
    shares = seen.shares[:, rest]
    if split.method == "coactivation":
        fires = _largest(seen.shares, max(1, int(FIRING * len(neurons.up))))[:, rest]
        return partition.graph(fires.T @ fires, split.routed, split.seed)
    return partition.concentrate(shares, ranked, split.routed, _competing(split))


def _competing(split: ExpertSplit) -> int:
    """Return how many routed experts are to be chosen for a token.

    Where all are active, that is half of them, for those who will use fewer later.
    """
    return split.top_k if split.top_k < split.routed else split.routed // 2


# --- routers --------------------------------------------------------------------------------------


def _router(
    carved: Carved, rows: Rows | None, marks: Tensor | None, entry: dict[str, Any]
) -> Router:
    """Make the router of a carved MLP; `marks` [N, F] are in the old order of the neurons."""
    split, width = carved.split, len(carved.up) // carved.split.experts
    router = Router(entry, carved.up.shape[1], std=0.0).to(carved.up.device).requires_grad_(False)
    router.init_block_weights()  # zeros
    if split.router == "trained":
        assert rows is not None
        _train(router, carved, rows)
        return router
    opens = carved.up if carved.gate is None else carved.gate
    if split.router == "centroids":
        experts = F.normalize(opens, dim=1).unflatten(0, (split.experts, width))[split.shared :]
        router.weight.copy_(experts.mean(1))
        return router
    assert marks is not None
    marks = marks[:, carved.order][:, split.shared * width :]
    label = torch.arange(split.routed, device=marks.device).repeat_interleave(width)
    chosen = split.shared * width + partition.representatives(marks, label, split.routed)
    for side, matrix, bias in (
        ("", carved.up, carved.up_bias),
        ("_in", carved.gate, carved.gate_bias),
    ):
        if matrix is not None:
            norm = matrix[chosen].norm(dim=1, keepdim=True).clamp_min(1e-12)
            getattr(router, f"weight{side}").copy_(matrix[chosen] / norm)
            if entry["router_bias"]:
                getattr(router, f"bias{side}").copy_(
                    0 if bias is None else bias[chosen] / norm[:, 0]
                )
    return router


def _train(router: Router, carved: Carved, rows: Rows) -> None:
    """Train the router by the cross-entropy of each expert's choice.

    It is weighted by how far the expert's mass is from the mass that decides. The inputs are scaled
    to mean 0 and variance 1, and the weights take that scale in at the end. First tokens are few,
    and are drawn more often than they occur.
    """
    k = _competing(carved.split)
    first = rows.z[:0] if rows.first is None else rows.first.z
    inputs = torch.cat([rows.z[: rows.fitted], first]).float()
    mass = torch.cat([carved.mass(Neurons.product(carved, z)) for z in inputs.split(CHUNK)])
    border = mass.topk(k + 1, dim=1).values[:, k - 1 :].mean(1, keepdim=True)
    wanted, weight = (mass > border).float(), (mass - border).abs()
    weight /= weight.mean().clamp_min(1e-30)
    z = inputs[: rows.fitted]
    mean, std = spread(z)
    draw = torch.Generator().manual_seed(carved.split.seed)
    _begin(router, draw)

    def loss(some: Tensor) -> Tensor:
        some = some.to(z.device)
        logits, _, _ = router((inputs[some] - mean) / std, ACT2FN[carved.act])
        return F.binary_cross_entropy_with_logits(logits, wanted[some], weight[some])

    descend(list(router.parameters()), loss, (len(z), len(first)), STEPS, draw)
    router.weight_in /= std
    router.bias_in -= router.weight_in @ mean


def spread(z: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean and the standard deviation [H] of inputs [N, H].

    No standard deviation comes out nearly 0, so that it can be divided by.
    """
    std = z.std(0)
    return z.mean(0), std.clamp_min(1e-3 * std.mean())


def descend(
    parameters: list[Parameter],
    loss: Callable[[Tensor], Tensor],
    counts: tuple[int, int],
    steps: int,
    draw: torch.Generator,
) -> None:
    """Minimise `loss`, a function of the indices [b] of rows, by Adam.

    The learning rate rises and falls once. `counts` are the number of rows and that of first
    tokens, which come after them.
    """
    for p in parameters:
        p.requires_grad_(True)
    optimizer = torch.optim.AdamW(parameters, lr=RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps)
    with torch.enable_grad():
        for _ in range(steps):
            some = torch.randint(counts[0], (BATCH,), generator=draw)
            if counts[1]:
                some[::FIRST] = counts[0] + torch.randint(
                    counts[1], (BATCH // FIRST,), generator=draw
                )
            value = loss(some)
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            schedule.step()
    for p in parameters:
        p.requires_grad_(False)


def _begin(router: Router, draw: torch.Generator) -> None:
    """Draw the first weights of a router that is to be trained."""
    for name, p in router.named_parameters():
        if p.ndim == 2:
            p.copy_(
                torch.randn(p.shape, generator=draw)
                * p.shape[1] ** -0.5
                * (1.0 if name == "weight_in" else 0.1)
            )

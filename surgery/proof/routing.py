"""What a mixture's routers do on text, and whether the language-model loss can train them.

Identical experts whose weights sum to one compute the same whatever the router says. Its gradient
is then zero, and only an auxiliary loss moves it. So d(loss)/d(router) is measured, from the last
layer back to the first: each layer is computed once more from the hidden states that entered it.
Memory holds one layer, what one sequence computes in it, and the hidden states of all layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from surgery.calibration.fp64 import arithmetic
from surgery.calibration.observe import Parts, Taps, tapped
from surgery.calibration.routers import figures
from surgery.calibration.walk import Layer, Walk
from surgery.checkpoint import Checkpoint, Progress
from surgery.checkpoint.row import Row
from surgery.proof.comparison import Comparison

TOKENS = 1024  # that routers are measured on
# A smaller gradient is rounding: in fp32 identical experts give about 1e-9, others 1e-3 and more.
NOTHING = 1e-6
SATURATED = 0.95  # a router with a larger mean of the largest probability is saturated
IDLE = 0.01  # an expert with a smaller part of an even load is idle
COUNTED = 20  # choices per expert, on average, below which idle experts are not counted


@dataclass(frozen=True, kw_only=True, slots=True)
class Routing:
    """One layer's router: the `figures` of calibration/routers.py, and more.

    Args:
        idle: how many experts are idle.
        equal: how many pairs of copies have equal rows in the router.
        gradient: the norm of d(mean loss)/d(router's parameters).
    """

    layer: int
    logit_std: float
    largest_probability: float
    load_entropy: float
    least_load: float
    idle: int
    equal: int
    gradient: float = math.nan


def measure(
    checkpoint: Checkpoint,
    input_ids: Tensor,
    *,
    shards: int = 1,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    progress: Progress = lambda n: None,
) -> list[Routing]:
    """Measure each layer that routes, on ids [B, T].

    `shards` consecutive experts make up a copy of an MLP.
    """
    walk = Walk(checkpoint, input_ids, dtype=dtype, device=device, batch_size=1)
    inputs, found = list[list[Tensor]](), dict[int, Routing]()
    for layer in walk:
        inputs.append(list(layer.hidden))
        with tapped(layer.module, walk.blocks.family, checkpoint.text_config) as taps:
            if taps.parts.router is not None:
                found[layer.index] = _routing(layer, taps, shards)
            else:
                layer.run()
        progress(1)
    for index, norm in _gradients(walk, input_ids, inputs, progress):
        if index in found:
            found[index] = _with_gradient(found[index], norm)
    return list(found.values())


def check(shards: int = 1) -> Callable[[Comparison, Tensor], Iterator[Row]]:
    """Return the check that measures the routers of an output, for its operation to bring.

    `shards` consecutive experts make up a copy of an MLP.
    """

    def run(pair: Comparison, input_ids: Tensor) -> Iterator[Row]:
        ids = input_ids[: max(1, TOKENS // input_ids.shape[1])]
        found = measure(
            pair.output,
            ids,
            shards=shards,
            dtype=pair.dtype,
            device=pair.device,
            progress=pair.progress,
        )
        return rows(found)

    return run


def rows(found: Sequence[Routing]) -> Iterator[Row]:
    """Yield the mean of each figure over the layers, then a warning for each fault."""
    if not found:
        return
    for name, text in _MEANS.items():
        each = tuple((r.layer, getattr(r, name)) for r in found)
        mean = sum(v for _, v in each) / len(each)
        yield Row(key=f"routers.{name}", check=text, value=mean, layers=each)
    for name, wrong in _wrong(found).items():
        if wrong:
            yield Row(
                key=f"routers.{name}",
                check=f"warning: {_WARNINGS[name]}",
                value=len(wrong),
                layers=tuple(wrong),
                warns=True,
            )


_MEANS = {
    "logit_std": "router logits: standard deviation",
    "largest_probability": "largest routing probability",
    "load_entropy": "entropy of the experts' load, 1 where even",
    "gradient": "gradient of the routers (language-model loss)",
}
_WARNINGS = {
    "no_gradient": (
        "no gradient reaches the router but that of an auxiliary loss: its experts are identical, "
        "or one alone has weight 1"
    ),
    "saturated": f"saturated routers, largest probability above {SATURATED}",
    "idle_experts": f"experts with less than {IDLE} of an even load",
    "equal_copies": "pairs of copies with equal routers",
}


def _wrong(found: Sequence[Routing]) -> dict[str, list[tuple[int, float]]]:
    """Return the layers that each warning is about, with the value seen."""
    return {
        "no_gradient": [(r.layer, r.gradient) for r in found if r.gradient < NOTHING],
        "saturated": [
            (r.layer, r.largest_probability) for r in found if r.largest_probability > SATURATED
        ],
        "idle_experts": [(r.layer, float(r.idle)) for r in found if r.idle],
        "equal_copies": [(r.layer, float(r.equal)) for r in found if r.equal],
    }


def _routing(layer: Layer, taps: Taps, shards: int) -> Routing:
    """Run the layer and see what its router does with every token but the first of a sequence."""
    assert taps.parts.router is not None
    seen: dict[str, list[Tensor]] = {"selected": [], "router_logits": []}

    def look(b: int, out: Tensor) -> None:
        for name, values in seen.items():
            values.append(taps.caught[name].unflatten(0, out.shape[:2])[:, 1:].flatten(0, 1))

    layer.run(look)
    selected, logits = (torch.cat(values) for values in seen.values())
    load = torch.bincount(selected.flatten(), minlength=taps.experts)
    even = selected.numel() / taps.experts
    rows = torch.nn.functional.normalize(taps.parts.router.weight.detach().float()[::shards], dim=1)
    alike = (rows @ rows.T).triu(1) > 0.9999
    zero = int((rows.norm(dim=1) == 0).sum())
    return Routing(
        layer=layer.index,
        **figures(logits.float(), selected),
        idle=int((load < IDLE * even).sum()) if even >= COUNTED else 0,
        equal=int(alike.sum()) + zero * (zero - 1) // 2,
    )


def _with_gradient(routing: Routing, norm: float) -> Routing:
    values = {name: getattr(routing, name) for name in Routing.__dataclass_fields__}
    return Routing(**values | {"gradient": norm})


def _gradients(
    walk: Walk, input_ids: Tensor, inputs: Sequence[Sequence[Tensor]], progress: Progress
) -> Iterator[tuple[int, float]]:
    """Yield the index of each layer and the norm of its router's gradient, from the last layer."""
    gradients = walk.loss_gradient(input_ids)
    for index in reversed(range(len(walk))):
        steps = walk.steps(start=index)
        layer = next(steps)
        with closing(steps):  # type: ignore[type-var]
            router = Parts.of(layer.module, walk.blocks.family).router
            own = [] if router is None else [p.requires_grad_() for p in router.parameters()]
            sums = [torch.zeros_like(p) for p in own]
            for b, x in enumerate(inputs[index]):
                gradients[b], *others = _back(layer, b, x, own, gradients[b])
                for total, g in zip(sums, others, strict=True):
                    total += 0 if g is None else g
            yield index, math.sqrt(sum(g.double().square().sum().item() for g in sums))
        progress(1)


def _back(
    layer: Layer, b: int, x: Tensor, own: Sequence[Tensor], gradient: Tensor
) -> Sequence[Any]:
    """Return the gradient of x [b, T, H], batch `b` as it enters the layer, and those of `own`.

    They follow from the gradient of what leaves the layer; None where a parameter has no part.
    """
    x = x.detach().to(layer.device).requires_grad_()
    args, kwargs = layer.arguments[b]
    with arithmetic(x.dtype):
        out = layer.module(x, *args, **kwargs)
        out = out[0] if isinstance(out, tuple) else out
        return torch.autograd.grad(out, [x, *own], gradient, allow_unused=True)

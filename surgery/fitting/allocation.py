"""Share a sparsity among the layers, so that those that bear it best take most of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from surgery.fitting.measures import error
from surgery.fitting.neurons import Neurons
from surgery.fitting.ridge import ridge
from surgery.fitting.rows import Rows
from surgery.fitting.thresholds import thresholded

NEURONS, COST_ROWS = 768, 4096  # neurons and rows that the cost of a sparsity is estimated on


def cost(
    neurons: Neurons, act: str, rows: Rows, levels: Sequence[float], rank: int = 0
) -> list[float]:
    """Return what each sparsity costs the stream of a layer after a ridge refit.

    That is the weighted squared error on rows that were not fitted on. It is measured on every k-th
    neuron, about NEURONS of them, and scaled up to all. `act` is the source's activation. With a
    `rank` the refit has a full bypass: what the leading directions leave of it is small, and they
    need not be found for every level.
    """
    step = max(1, len(neurons.up) // NEURONS)
    some = dataclasses.replace(neurons.pick(slice(None, None, step)), down_bias=None)
    some.down = some.down.contiguous()
    source = dataclasses.replace(some, rule="plain", act=act)
    z = rows.z[:: max(1, len(rows.z) // COST_ROWS)]
    weight = None if rows.weight is None else rows.weight[:: max(1, len(rows.z) // COST_ROWS)]
    own = Rows(z=z, y=source(z.float()), weight=weight)
    size = (own.y.square().mean(1) * (1 if weight is None else weight)).mean().item() * step
    full = len(neurons.down) if rank else 0
    fitted = (ridge(thresholded(some, own, level), own, bias=True, rank=full) for level in levels)
    return [size * error(n, own, own.fitted) for n in fitted]


def allocate(
    costs: Mapping[int, Sequence[float]], levels: Sequence[float], sparsity: float
) -> dict[int, float]:
    """Choose a sparsity for each layer, with the mean `sparsity`.

    Greedily, the layer whose next level adds the least error is raised, as TEAL does with its
    projections (Liu et al. 2024, arXiv 2408.14690).
    """
    at = dict.fromkeys(costs, 0)
    needed = sparsity * len(costs)
    while (reached := sum(levels[i] for i in at.values())) < needed:
        open_ = {layer: i for layer, i in at.items() if i + 1 < len(levels)}
        if not open_:
            break
        best = min(
            open_,
            key=lambda n: (
                (costs[n][at[n] + 1] - costs[n][at[n]]) / (levels[at[n] + 1] - levels[at[n]])
            ),
        )
        at[best] += 1
        if sum(levels[i] for i in at.values()) >= needed:
            # The last step goes only as far as it is needed.
            chosen = {layer: levels[i] for layer, i in at.items()}
            return chosen | {best: levels[at[best] - 1] + needed - reached}
    return {
        layer: min(sparsity, levels[i]) if sparsity < levels[0] else levels[i]
        for layer, i in at.items()
    }

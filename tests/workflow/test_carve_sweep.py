"""The sweep of carved models: each point is what the written model would be worth.

What could break it: streams of variants that mix, an error of other tokens than those held out, a
router that is the oracle.
"""

from __future__ import annotations

from statistics import mean
from typing import Any

import pytest

from surgery.analysis.sweep import Sweep
from surgery.calibration.data import sample_ids
from surgery.calibration.settings import Calibration
from surgery.demo import MODEL
from surgery.errors import UsageError
from surgery.operations.carve import Options, allocate, carve, plan
from surgery.proof import quality
from surgery.storage import open_checkpoint
from surgery.workflow.carve_sweep import sweep

SETTINGS = Calibration(tokens=1536, dtype="fp32")  # three windows, a batch


@pytest.fixture(scope="module")
def swept() -> Sweep:
    return sweep(
        open_checkpoint(MODEL),
        experts=8,
        fractions=[0.25, 0.75, 1],
        layers=[2, 5],
        calibration=SETTINGS,
        evaluated=1024,
    )


def test_a_point_is_the_written_model(swept: Sweep) -> None:
    """The same text, the same carving: but for the rounding of down_proj to bf16."""
    source = open_checkpoint(MODEL)
    output = carve(source, experts=8, active=6, layers=[2, 5], calibration=SETTINGS)
    sample = sample_ids(source, tokens=1024, sequence_length=512)
    found = quality.measure({"source": source, "output": output}, sample)
    (point,) = (p for p in swept.points if (p.method, p.router, p.active) == ("mass", "trained", 6))
    assert swept.perplexity == pytest.approx(found["source"].mean, rel=1e-5)
    assert point.perplexity == pytest.approx(found["output"].mean, rel=4e-3)
    assert point.agreement == pytest.approx(mean(found["output"].agreement.values()), abs=0.02)


def test_the_order_of_the_variants(swept: Sweep) -> None:
    """The oracle beats the router, the method beats random, more beats fewer; all is the source."""
    at = {(p.method, p.router, p.active): p for p in swept.points}
    assert len(at) == 9 and len(at["mass", "trained", 2].errors) == 2
    for active in (2, 6):
        for method in ("mass", "random"):
            assert at[method, "oracle", active].error < at[method, "trained", active].error
        for router in ("trained", "oracle"):
            assert at["mass", router, active].error < at["random", router, active].error
    assert at["mass", "trained", 6].perplexity < at["mass", "trained", 2].perplexity
    assert at["all", "", 8].perplexity == swept.perplexity and at["all", "", 8].error == 0


def test_parts_go_to_the_layers_that_need_them() -> None:
    """Nearly all of layer 0, few of layer 4; with as many in the mean. The random split has as many
    in each.
    """
    source = open_checkpoint(MODEL)
    options: dict[str, Any] = {"experts": 8, "layers": [0, 4], "calibration": SETTINGS}
    found = allocate(plan(source, Options(active=4, **options)))
    assert sum(found) == 8 and found[0] >= 6
    each = {
        a: sweep(source, fractions=[0.5, 1], allocation=a, evaluated=1024, **options)
        for a in ("uniform", "greedy")
    }
    greedy, uniform = (
        {(p.method, p.router): p for p in each[a].points} for a in ("greedy", "uniform")
    )
    assert greedy["mass", "oracle"].active == found and greedy["mass", "oracle"].fraction == 0.5
    assert greedy["random", "trained"] == uniform["random", "trained"]
    for router in ("trained", "oracle"):
        assert greedy["mass", router].perplexity < uniform["mass", router].perplexity


def test_a_layer_that_writes_nothing_needs_no_part() -> None:
    source = open_checkpoint(MODEL)
    name = "model.layers.3.mlp.down_proj.weight"
    quiet = source.tensors[name].map("nearly nothing", lambda t: t * 1e-3)
    source = source.replace(tensors={**source.tensors, name: quiet})
    options = {"experts": 8, "shared": 1, "layers": [2, 3, 5], "calibration": SETTINGS}
    found = {n: allocate(plan(source, Options(active=n, **options))) for n in (4, 5)}
    assert [sum(found[n]) for n in (4, 5)] == [12, 15] and found[4][1] == found[5][
        1
    ] == 2  # one shared, one to choose


def test_layers_and_shared_parts() -> None:
    found = sweep(
        open_checkpoint(MODEL),
        experts=8,
        fractions=[0.25],
        shared=4,
        layers=[4],
        random=False,
        calibration=SETTINGS,
        evaluated=512,
    )
    # One of the two parts is shared.
    assert found.layers == (4,) and [len(p.errors) for p in found.points] == [1, 1]
    assert found.points[0].perplexity < 1.2 * found.perplexity


def test_impossible_options() -> None:
    with pytest.raises(UsageError, match="unknown allocation 'even'"):
        sweep(open_checkpoint(MODEL), allocation="even", calibration=SETTINGS)
    with pytest.raises(UsageError, match="120%"):
        sweep(open_checkpoint(MODEL), fractions=[1.2], calibration=SETTINGS, evaluated=512)

"""The options of `surgery carve` reach the operation and the sweep."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support import Call, assert_two_lines

from surgery.demo import MODEL

FEW = ("--tokens", "512", "--sequence-length", "128", "--calibration-dtype", "fp32")


def test_all_active_is_verified(call: Call, model: Path) -> None:
    ran = call(
        "carve",
        model,
        "--experts",
        "8",
        "--active",
        "8",
        "--method",
        "kmeans",
        "--router",
        "centroids",
    )
    assert ran.code == 0 and "Same function: fp32 logits differ by" in ran.out
    assert "note: all experts are active: the same function" in ran.out


def test_options_are_recorded(call: Call, model: Path) -> None:
    ran = call(
        "carve",
        model,
        "--experts",
        "8",
        "--active",
        "4",
        "--shared",
        "2",
        "--method",
        "cmoe",
        "--router",
        "analytic",
        "--repair",
        "none",
        "--seed",
        "3",
        "--layers",
        "1",
        *FEW,
        "--no-verify",
        "--json",
    )
    assert ran.code == 0, ran.err
    step = ran.json["recipe"][0]
    expected = {
        "operation": "carve",
        "experts": 8,
        "active": 4,
        "shared": 2,
        "method": "cmoe",
        "router": "analytic",
        "repair": "none",
        "seed": 3,
        "layers": [1],
    }
    assert {k: step[k] for k in expected} == expected
    assert list(ran.json["calibration"][0]) == ["sample", "1"]


def test_active_parts_by_layer(call: Call, model: Path) -> None:
    free = (
        "--method",
        "kmeans",
        "--router",
        "centroids",
        "--repair",
        "none",
        "--no-verify",
        "--json",
    )
    options = ("--experts", "8", *free, *FEW, "--out", model.parent / "out")
    ran = call("carve", model, "--active", "2,8,6", *options)
    assert ran.code == 0, ran.err
    assert ran.json["recipe"][0]["active"] == [2, 8, 6]
    shutil.rmtree(model.parent / "out")
    found = call("carve", model, "--active", "6", "--allocation", "greedy", *options)
    assert found.code == 0, found.err
    active = found.json["recipe"][0]["active"]
    assert sum(active) == 18 and len(active) == 3
    assert "in the mean of the layers" in (model.parent / "out" / "README.md").read_text()


def test_a_dry_run_says_what_is_active(call: Call, model: Path) -> None:
    ran = call("carve", model, "--active", "4", "--dry-run")
    assert (
        ran.code == 0
        and "4 of 16 parts of an MLP, 25% of its neurons" in ran.out
        and "parameters, and reads" in ran.out
    )
    assert [p.name for p in model.parent.iterdir()] == [model.name]


def test_a_sweep(call: Call, tmp_path: Path) -> None:
    plot = tmp_path / "sweep.svg"
    ran = call(
        "carve",
        MODEL,
        "--sweep",
        "50,100",
        "--experts",
        "4",
        *FEW,
        "--plot",
        plot,
        "--layers",
        "1",
        "--json",
    )
    assert ran.code == 0, ran.err
    found = {(p["method"], p["router"]): p for p in ran.json["points"]}
    assert set(found) == {
        ("mass", "trained"),
        ("mass", "oracle"),
        ("random", "trained"),
        ("random", "oracle"),
        ("all", ""),
    }
    assert found["mass", "trained"]["fraction"] == 0.5 and ran.json["layers"] == [1]
    assert "perplexity, × source" in plot.read_text() or plot.stat().st_size > 5000


def test_the_table_of_a_sweep(call: Call) -> None:
    ran = call(
        "carve",
        MODEL,
        "--sweep",
        "75",
        "--experts",
        "4",
        *FEW,
        "--layers",
        "3",
        "--method",
        "coactivation",
    )
    assert ran.code == 0, ran.err
    assert "75% of the neurons give 1.0" in ran.out.splitlines()[0]
    assert [
        line.split()[:3] for line in ran.out.splitlines() if line.startswith(("coact", "random"))
    ][:2] == [["coactivation", "trained", "75%"], ["coactivation", "oracle", "75%"]]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--sweep", "half"), ("'half'", "25,50,75,100")),
        (("--plot", "a.png"), ("--plot draws a sweep",)),
        (("--sweep", "50", "--active", "4"), ("--sweep writes nothing", "leave them out")),
        (("--sweep", "50", "--plot", "a.gif"), ("a.gif", ".png, .svg, .pdf")),
        (("--active", "half"), ("'half'", "16,15,12")),
        (("--active", "4,5"), ("2 numbers of active parts for 3 layers",)),
        (("--active", "0", "--allocation", "greedy"), ("0 active parts of 16", "give 1 to 16")),
        (("--active", "4,5,6", "--allocation", "greedy"), ("greedy finds", "one number")),
        (("--experts", "7"), ("7 experts do not divide 64 neurons", "2, 4, 8 would")),
    ],
)
def test_wrong_usage(
    options: tuple[str, ...], words: tuple[str, ...], call: Call, model: Path
) -> None:
    assert_two_lines(call("carve", model, *options), *words, code=2)

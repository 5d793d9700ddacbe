"""The report of an analysis is well formed and self-contained, and says what the analysis says.

What could break it: a title computed from another figure's data, a curve upside down, a model's
name that is markup, a layer without neurons, a NaN among the coordinates.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from models import sample_ids, save_model

from surgery.analysis.analyze import Analysis, analyze, firing_rate
from surgery.analysis.devices import DEVICES
from surgery.calibration.collectors import BINS, Distribution
from surgery.calibration.data import Sample
from surgery.cli import run
from surgery.operations.relufy import relufy
from surgery.operations.upcycle import upcycle
from surgery.report import curves, figures, png, svg
from surgery.report.figures import Figure
from surgery.report.html import render, write_report
from surgery.storage import open_checkpoint

H100 = DEVICES["h100"]
VOID = {"meta", "link"}
KINDS = ("dense", "relufied", "mixture", "mixed")
MAKERS = (
    "sparsity_by_layer",
    "hot_cold",
    "heat_map",
    "histograms",
    "unions",
    "router_load",
    "router_entropy",
    "residual",
)


class Page(HTMLParser):
    """A parsed page: its elements with their attributes, and the text outside of <style>.

    Fails on a tag that closes another.
    """

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["style"]:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


@pytest.fixture(scope="module")
def analyses(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Analysis]:
    folder = tmp_path_factory.mktemp("model") / "llama"
    save_model("llama", folder)
    source = open_checkpoint(folder)
    sample = Sample(input_ids=sample_ids(), source="test", text=True)
    checkpoints = {
        "dense": source,
        "relufied": relufy(source, repair="none"),
        "mixture": upcycle(source, experts=4, top_k=2),
    }
    found = {kind: analyze(checkpoint, sample) for kind, checkpoint in checkpoints.items()}
    layers = (found["dense"].layers[0], *found["mixture"].layers[1:])
    return found | {"mixed": replace(found["mixture"], layers=layers)}


@pytest.fixture(params=KINDS)
def analysis(request: pytest.FixtureRequest, analyses: dict[str, Analysis]) -> Analysis:
    return analyses[request.param]


def drawn(a: Analysis) -> dict[str, Figure]:
    """Return the figures by the name of the function that makes them."""
    found = {name: getattr(figures, name)(a) for name in MAKERS}
    found["savings"] = figures.savings(a, H100)
    return {name: figure for name, figure in found.items() if figure}


def test_is_one_well_formed_file(analysis: Analysis) -> None:
    """Every tag is closed, and nothing is loaded from the network."""
    page = render(analysis, H100)
    parsed = Page(page)
    assert parsed.open == [] and "http" not in page.replace("http-equiv", "")
    assert "url(" not in page and "@import" not in page
    assert not {"script", "img", "iframe", "object"} & {tag for tag, _ in parsed.elements}
    loaded = [a for _, a in parsed.elements if "href" in a or "src" in a]
    assert loaded == [{"rel": "icon", "href": "data:,"}]
    assert analysis.sample.sha256 in parsed.text and "h = 0" in parsed.text
    assert all(figure.title in parsed.text for figure in figures.figures(analysis, H100))


def test_each_kind_has_its_figures(analyses: dict[str, Analysis]) -> None:
    """A figure without data is left out."""
    common = {"sparsity_by_layer", "hot_cold", "heat_map", "histograms", "residual"}
    for kind in ("dense", "relufied"):
        assert set(drawn(analyses[kind])) == common | {"unions", "savings"}
    assert set(drawn(analyses["mixture"])) == common | {"savings", "router_load", "router_entropy"}


def numbers(markup: str) -> Iterator[float]:
    """Yield every coordinate."""
    for value in re.findall(r' (?:d|x|y|cx|cy|r|width|height|viewBox)="([^"]*)"', markup):
        yield from (float(n) for n in re.split(r"[MLHVz ]+", value) if n)


def test_coordinates_lie_in_the_plot(analysis: Analysis) -> None:
    """A NaN, or a point outside of the figure, would be drawn nowhere."""
    for name, figure in drawn(analysis).items():
        found, height = list(numbers(figure.svg)), float(figure.svg.split('"')[1].split()[3])
        assert len(found) > 20 and all(map(math.isfinite, found)), name
        assert min(found) >= 0 and max(found) <= max(height, svg.WIDTH), name


def test_titles_say_the_numbers_of_a_dense_model(analyses: dict[str, Analysis]) -> None:
    """Titles have the numbers of analysis.json."""
    a, figure = analyses["dense"], {n: f.title for n, f in drawn(analyses["dense"]).items()}
    rate = torch.cat([m.active for m in a.mlps]).double() / a.mlps[0].tokens
    dict_ = a.as_dict(H100)
    at = [layer["mlp"]["cett"][1]["sparsity"] for layer in dict_["layers"]]
    first = f"{sum(at) / 3:.0%} of the products can be left out: {min(at):.0%} in layer "
    assert f"{first}{at.index(min(at))}, " in figure["sparsity_by_layer"]
    hot = [layer["mlp"]["hot_80"]["firing"] for layer in dict_["layers"]]
    first = f"{min(hot):.0%} of the neurons in layer {hot.index(min(hot))}, "
    assert f"{first}{max(hot):.0%} in layer" in figure["hot_cold"]
    assert f"the mean one fires for {rate.mean():.0%} of the tokens" in figure["heat_map"]
    one = f"One token leaves {1 - rate.mean():.0%} of the neurons idle, 8 consecutive"
    assert one in figure["unions"]
    left = {}
    for s in dict_["savings"]:
        left[s["rule"], s["kernel"]] = s["after"]["nbytes"] / s["before"]["nbytes"]
    down = f"{left['CETT 0.2', 'down only']:.0%} of the MLP bytes to read; foreseen, "
    assert down in figure["savings"]
    assert f"{left['CETT 0.2', 'foreseen']:.0%}" in figure["savings"]
    assert f"{a.layers[2].residual:.0%} after layer 2" in figure["residual"]


def test_titles_say_what_relu_and_a_router_change(analyses: dict[str, Analysis]) -> None:
    """Titles lead with zeros or experts where there are any."""
    zeros = [m.product.zeros / m.product.total for m in analyses["relufied"].mlps]
    relufied, mixture = drawn(analyses["relufied"]), drawn(analyses["mixture"])
    lead = f"{sum(zeros) / 3:.0%} of the products are exact zeros"
    assert relufied["sparsity_by_layer"].title.startswith(lead)
    left = f"{1 - 2 / 3 * sum(zeros) / 3:.0%} of the MLP bytes"
    assert relufied["savings"].title.startswith(f"Skipping exact zeros leaves a token {left}")
    loads = torch.stack([r.load for r in analyses["mixture"].routers]).double()
    busiest, layer = loads.max() / loads[0].mean(), int(loads.max(1).values.argmax())
    lead = f"{busiest:.2f} times an even share, in layer {layer}"
    assert lead in mixture["router_load"].title
    at = [r.at(0.2).sparsity for r in analyses["mixture"].routers]
    lead = f"At a CETT of 0.2, {sum(at) / 3:.0%} of the experts' products can be left out: "
    lead += f"{min(at):.0%} in layer {at.index(min(at))}, "
    assert mixture["sparsity_by_layer"].title.startswith(lead)


def test_curves_are_the_data(analyses: dict[str, Analysis]) -> None:
    """The dots of sparsity by layer, read back from the SVG, are the data."""
    a = analyses["relufied"]
    markup = drawn(a)["sparsity_by_layer"].svg
    dots = re.findall(r'<circle class="fill (\w+)" cx="[^"]*" cy="([^"]*)"', markup)
    read = [(svg.BOTTOM - float(y)) / (svg.BOTTOM - svg.TOP) for _, y in dots]
    expected = [m.product.zero for m in a.mlps]
    expected += [m.at(c).sparsity for c in (0.1, 0.2) for m in a.mlps]
    assert [tone for tone, _ in dots] == ["zero"] * 3 + ["cett1"] * 3 + ["cett2"] * 3
    assert read == pytest.approx(expected, abs=1e-3)


def test_the_hot_curve_starts_at_nothing_and_ends_at_everything(
    analyses: dict[str, Analysis],
) -> None:
    """The line of a layer, read back, has every point of the data, also the first."""
    a = analyses["dense"]
    lines = re.findall(r'class="line depth" d="M([^"]*)"', drawn(a)["hot_cold"].svg)
    assert len(lines) == len(a.mlps) == 3
    for path, m in zip(lines, a.mlps, strict=True):
        read = [tuple(map(float, point.split())) for point in path.split("L")]
        assert read[0] == (svg.LEFT, svg.BOTTOM) and read[-1] == (svg.RIGHT, svg.TOP)
        counts = m.active.double().sort(descending=True).values.cumsum(0)
        done = [0.0, *(counts / counts[-1]).tolist()]
        expected = [done[round(i / 100 * m.width)] for i in range(101)]
        heights = [(svg.BOTTOM - y) / (svg.BOTTOM - svg.TOP) for _, y in read]
        assert heights == pytest.approx(expected, abs=1e-3)
        across = [(x - svg.LEFT) / (svg.RIGHT - svg.LEFT) for x, _ in read]
        assert across == pytest.approx([i / 100 for i in range(101)], abs=1e-3)


def test_the_ink_of_the_heat_map_is_the_firing_rate(analyses: dict[str, Analysis]) -> None:
    """Opacity times area, summed over the map, is the mean firing rate."""
    a = analyses["dense"]
    rows = [m.rate.sort(descending=True).values.tolist() for m in a.mlps]
    drawn_map, ink = svg.cells(rows, (0, 100), 0, 10, most=1.0), 0.0
    for opacity, path in re.findall(r'fill-opacity="([^"]*)" d="([^"]*)"', drawn_map):
        for left, top, right, bottom in re.findall(r"M(\S+) (\S+?)H(\S+?)V(\S+?)H\S+?z", path):
            ink += float(opacity) * (float(right) - float(left)) * (float(bottom) - float(top))
    assert ink / (100 * 10 * len(rows)) == pytest.approx(a.mean(firing_rate), abs=0.5 / svg.LEVELS)


def test_a_name_is_no_markup(analyses: dict[str, Analysis], tmp_path: Path) -> None:
    """Hostile names are shown as text.

    The figures are not escaped as they go into the page, and $ would start mathematics in
    matplotlib.
    """
    name = "<script>alert('$x_$')"
    hostile = replace(
        analyses["dense"],
        source=name,
        activation="</svg><img src=x>",
        sample=replace(analyses["dense"].sample, source='"><b onclick=x>'),
    )
    written = write_report(hostile, H100, tmp_path)
    parsed = Page(written[0].read_text(encoding="utf-8"))
    assert not {"script", "img", "b"} & {tag for tag, _ in parsed.elements} and parsed.open == []
    assert name in parsed.text and '"><b onclick=x>' in parsed.text
    assert "<b>" not in svg.text(0, 0, "<b>") + svg.dot(0, 0, "", "<b>")


def test_a_page_of_32_layers_stays_small(analyses: dict[str, Analysis]) -> None:
    """A model of 32 layers of 11,008 neurons gives less than 400 kB."""
    mlp = analyses["dense"].mlps[0]
    draw = torch.Generator().manual_seed(0)

    @cache
    def wide(layer: int) -> Distribution:
        counts = torch.randint(1000, (2, BINS), generator=draw)
        return Distribution(counts=counts, zeros=layer, total=int(counts.sum()) + layer)

    layers = []
    for i in range(32):
        active = torch.randint(101, (11008,), generator=draw)
        own = replace(mlp, width=11008, tokens=100, active=active, product=wide(i))
        layers.append(replace(analyses["dense"].layers[0], index=i, mlp=own))
    page = render(replace(analyses["dense"], layers=tuple(layers)), H100)
    assert len(page.encode()) < 400_000


def test_a_layer_of_dead_neurons(analyses: dict[str, Analysis], tmp_path: Path) -> None:
    """No activation leaves nothing to divide by, and one layer has no line through it."""
    layer = analyses["relufied"].layers[0]
    mlp = layer.mlp
    assert mlp
    zeros = Distribution(counts=torch.zeros(2, BINS).long(), zeros=9, total=9)
    nothing = replace(mlp, active=torch.zeros_like(mlp.active), product=zeros)
    a = replace(analyses["relufied"], layers=(replace(layer, mlp=nothing, residual=float("nan")),))
    found = drawn(a)
    assert all(map(math.isfinite, (n for f in found.values() for n in numbers(f.svg))))
    assert "hot_cold" not in found and "residual" not in found
    assert "48 of 48 neurons never fire" in found["heat_map"].title
    written = [p.name for p in write_report(a, H100, tmp_path)]
    assert written == ["report.html", "sparsity_by_layer.png", "savings.png"]


def test_pngs_need_matplotlib_and_the_page_does_not(
    analyses: dict[str, Analysis], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without matplotlib the page is written all the same."""
    page, *pngs = write_report(analyses["dense"], H100, tmp_path / "with")
    assert page.name == "report.html" and [p.name for p in pngs] == list(png.FILES)
    for data in (p.read_bytes() for p in pngs):
        assert data[1:4] == b"PNG" and int.from_bytes(data[16:20], "big") == 1050  # wide
    monkeypatch.setattr(png, "find_spec", lambda name: None)
    written = write_report(analyses["dense"], H100, tmp_path / "without")
    assert [p.name for p in written] == ["report.html"]


def test_pngs_of_an_earlier_report_go(
    analyses: dict[str, Analysis], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PNGs of an earlier report are removed: those that this analysis has no data for, and all of
    them without matplotlib. A user's own files stay.
    """
    (tmp_path / "mine.png").write_bytes(b"mine")
    write_report(analyses["dense"], H100, tmp_path)
    first = (tmp_path / "hot_cold.png").read_bytes()
    layer = analyses["relufied"].layers[0]
    assert layer.mlp
    dead = replace(layer, mlp=replace(layer.mlp, active=torch.zeros_like(layer.mlp.active)))
    second = write_report(replace(analyses["relufied"], layers=(dead,)), H100, tmp_path)
    assert len(first) > 1000 and len(second) == 3
    kept = {"mine.png", "sparsity_by_layer.png", "savings.png"}
    assert {p.name for p in tmp_path.glob("*.png")} == kept
    monkeypatch.setattr(png, "find_spec", lambda name: None)
    write_report(analyses["dense"], H100, tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {"mine.png", "report.html"}


def test_savings_of_a_mixture_lead_with_its_zeros(analyses: dict[str, Analysis]) -> None:
    """They are those of its experts, since it has no dense MLP."""
    a = analyses["mixture"]
    foreseen = next(s for s in a.savings if (s.rule, s.kernel) == ("CETT 0.2", "foreseen"))
    left = f"{foreseen.after.nbytes / foreseen.before.nbytes:.0%}"
    title = drawn(a)["savings"].title
    assert title.startswith("A CETT of 0.2 leaves") and title.endswith(left)
    layers = []
    for layer in a.layers:
        assert layer.router and layer.router.product
        half = replace(layer.router.product, zeros=layer.router.product.total // 2)
        layers.append(replace(layer, router=replace(layer.router, product=half)))
    title = drawn(replace(a, layers=tuple(layers)))["savings"].title
    assert title.startswith("Skipping exact zeros leaves a token 67% of the MLP bytes")
    assert "an expert's own output" in Page(render(a, H100)).text


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0, "0%"),
        (0.0004, "< 0.1%"),
        (0.038, "3.8%"),
        (0.66, "66%"),
        (0.996, "99.6%"),
        (0.9999, "> 99.9%"),
        (1, "100%"),
    ],
)
def test_shares(value: float, words: str) -> None:
    """Shares near 0 and 1 have one more digit, and are never rounded to certainty."""
    assert curves.share(value) == words


def test_the_command_writes_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Without matplotlib too, and it says how to get the PNGs."""
    save_model("llama", tmp_path / "model")
    monkeypatch.setattr(png, "find_spec", lambda name: None)
    out = tmp_path / "out"
    short = ["--tokens", "40", "--sequence-length", "40", "--out", str(out)]
    assert run(["analyze", str(tmp_path / "model"), *short]) == 0
    assert Page((out / "report.html").read_text(encoding="utf-8")).open == []
    printed = capfd.readouterr().out
    assert "report.html" in printed and "pip install 'model-surgery[plot]'" in printed


def test_the_page_explains_cett_where_it_is_named(analyses: dict[str, Analysis]) -> None:
    """A reader who has not met the term finds one sentence right after the finding."""
    words = Page(render(analyses["dense"], H100)).text
    finding = words.index("could be left out at a CETT")
    explained = words.index("CETT is the relative error of an MLP's output")
    assert finding < explained < words.index("CETT of 0.1")


def test_thirty_layers_have_thirty_colours(analyses: dict[str, Analysis]) -> None:
    """They are ordered by depth, in light and in dark mode, and named by a legend."""
    layers = tuple(replace(analyses["dense"].layers[0], index=i) for i in range(30))
    markup = drawn(replace(analyses["dense"], layers=layers))["hot_cold"].svg
    pattern = r'class="line depth" d="[^"]*" style="--on-light:(#\w+);--on-dark:(#\w+)"'
    styles = re.findall(pattern, markup)
    light, dark = zip(*styles, strict=True)
    assert len(set(light)) == len(set(dark)) == 30
    assert (light[0], light[-1]) == (svg.ON_LIGHT[0], svg.ON_LIGHT[-1])
    assert (dark[0], dark[-1]) == (svg.ON_DARK[0], svg.ON_DARK[-1])
    for colours in (light, dark):
        shades = [brightness(colour) for colour in colours]
        assert shades == sorted(shades)
    assert "layer 0</text>" in markup and ">29</text>" in markup


def brightness(colour: str) -> float:
    """Return the relative luminance of #rrggbb, by the weights of sRGB."""
    channels = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.0336, "33.6 ms"), (1.2345e-6, "1.23 µs"), (2.0, "2 s"), (0, "0 ns")]
)
def test_durations(seconds: float, words: str) -> None:
    """Three significant digits, and a unit that leaves no row of zeros."""
    assert curves.duration(seconds) == words

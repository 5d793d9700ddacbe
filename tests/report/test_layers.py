"""The card's figure draws what the verification measured, and nothing where it measured nothing by
layer.
"""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

from surgery.report import layers


def row(key: str, *values: float | str) -> dict[str, object]:
    return {"key": key, "check": "", "value": 0.0, "layers": [[i, v] for i, v in enumerate(values)]}


def test_zeros_of_the_output_stand_beside_the_sources() -> None:
    rows = [
        row("zeros.source", 0.0000, 0.0100),
        row("zeros.output", 0.5000, 0.7000),
    ]
    (panel,) = layers.panels({"rows": rows})
    assert panel.title == "60% of the MLPs' products are exact zeros (layers: 50% to 70%)"
    assert [c.points for c in panel.curves] == [[(0, 0.5), (1, 0.7)], [(0, 0.0), (1, 0.01)]]
    drawn = ElementTree.fromstring(layers.draw([panel]))
    titles = [t.text for t in drawn.iter("{http://www.w3.org/2000/svg}title")]
    assert titles[:2] == ["layer 0, this model: 50.0%", "layer 1, this model: 70.0%"]


def test_layers_without_an_mlp_of_their_own_are_left_out() -> None:
    rows = [
        row("zeros.output", 0.5000, "nan", 0.9000),
        row("routers.load_entropy", 0.98, 1e-05),
    ]
    zeros, load = layers.panels({"rows": rows})
    assert zeros.curves[0].points == [(0, 0.5), (2, 0.9)] and load.curves[0].points == [
        (0, 0.98),
        (1, 1e-05),
    ]
    assert len(ElementTree.fromstring(layers.draw([zeros, load])).findall(".//{*}g/{*}g")) == 2


def test_nothing_measured_is_nothing_drawn() -> None:
    assert layers.panels(None) == [] == layers.panels({"rows": [row("zeros.output", 0.0000)]})

"""The plot of the figures of decoding, which README and the page Engines show."""

from xml.etree import ElementTree

from modelctl.cli.bench import HEIGHT, PANEL, Panel, draw
from tools.docs.decoding_plot import decoding_plot
from tools.docs.performance import result_files


def test_the_plot_has_a_panel_for_each_measured_model() -> None:
    root = ElementTree.fromstring(decoding_plot())
    shown = [text for text in root.itertext() if text.strip()]
    models = {name.split(":")[0] for name in result_files()["decoding"].values if ": reading the weights" in name}
    assert shown.count("limit of the memory") == len(models)


def test_lines_stay_inside_their_panel_and_a_larger_value_is_higher() -> None:
    panel = Panel("a model", [1, 8, 128], {"limit": [1000, 8000, 128_000], "measured": [150, 1200.5, 90_000]})
    root = ElementTree.fromstring(draw("two models", "streams", "tokens/s", [panel, panel]))
    space = "{http://www.w3.org/2000/svg}"
    assert root.attrib["viewBox"] == f"0 0 {2 * PANEL} {HEIGHT}"
    limit, measured = (
        [tuple(map(float, point.split())) for point in path.attrib["d"].removeprefix("M").split("L")]
        for path in root.find(f"{space}g").iterfind(f"{space}path")
        if "L" in path.attrib["d"]
    )
    assert all(0 <= x <= PANEL and 0 <= y <= HEIGHT for x, y in limit + measured)
    assert [x for x, _ in limit] == [x for x, _ in measured] == sorted(x for x, _ in limit)
    assert all(y < below for (_, y), (_, below) in zip(limit, measured, strict=True))
    assert [y for _, y in limit] == sorted((y for _, y in limit), reverse=True)

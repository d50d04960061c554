"""Draw lines over a doubling scale as an SVG file: tokens per second over streams, a panel for each model. Pure.

Both axes are logarithmic. The file follows the reader's light or dark colours, and needs no script and no font.
``modelctl bench --plot`` and the documentation draw with this module.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

PANEL, HEIGHT = 460, 350
LEFT, RIGHT, TOP, BOTTOM = 78, 16, 92, 44
STYLE = """
    .back { fill: #ffffff; }
    text { fill: #1f2328; font-family: -apple-system, "Segoe UI", "Noto Sans", Helvetica, Arial, sans-serif;
      font-size: 12px; }
    .title { font-weight: 600; font-size: 14px; }
    .grid { stroke: #d0d7de; }
    .s0 { stroke: #57606a; fill: none; stroke-dasharray: 5 4; stroke-width: 1.5; }
    .s1 { stroke: #3f51b5; fill: none; stroke-width: 2.5; }
    .s2 { stroke: #ff9800; fill: none; stroke-width: 2; }
    .s3 { stroke: #78909c; fill: none; stroke-width: 2; }
    @media (prefers-color-scheme: dark) {
      .back { fill: #0d1117; }
      text { fill: #e6edf3; }
      .grid { stroke: #30363d; }
      .s0 { stroke: #9198a1; }
      .s1 { stroke: #8c9eff; }
    }
"""


@dataclass(frozen=True)
class Panel:
    """Lines over the same places: {name: values}. At most four; the first one is dashed, as a limit.

    places  in ascending order, greater than 0
    series  as many values as places, greater than 0. A line over one place is drawn as a dot
    """

    title: str
    places: Sequence[float]
    series: Mapping[str, Sequence[float]]


def draw(title: str, across: str, up: str, panels: Sequence[Panel]) -> str:
    """Return the panels, side by side, as an SVG file.

    across, up  what the axes mean
    """
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {columns * PANEL} {rows * HEIGHT}" role="img" '
        f'aria-label="{escape(title)}">',
        f"  <style>{STYLE}  </style>",
        f'  <rect class="back" width="{columns * PANEL}" height="{rows * HEIGHT}"/>',
    ]
    for number, panel in enumerate(panels):
        at = f"translate({number % columns * PANEL} {number // columns * HEIGHT})"
        parts += [f'  <g transform="{at}">', *(f"    {part}" for part in _panel(panel, across, up)), "  </g>"]
    return "\n".join([*parts, "</svg>", ""])


def _panel(panel: Panel, across: str, up: str) -> Iterator[str]:
    values = [value for series in panel.series.values() for value in series]
    low = math.floor(math.log10(min(values)))
    high = max(low + 1, math.ceil(math.log10(max(values))))
    first, last = math.log2(panel.places[0]), math.log2(panel.places[-1])

    def x(place: float) -> float:
        share = (math.log2(place) - first) / (last - first) if last > first else 0.5
        return round(LEFT + share * (PANEL - LEFT - RIGHT), 1)

    def y(value: float) -> float:
        return round(HEIGHT - BOTTOM - (math.log10(value) - low) / (high - low) * (HEIGHT - TOP - BOTTOM), 1)

    yield f'<text class="title" x="{LEFT}" y="20">{escape(panel.title)}</text>'
    for number, name in enumerate(panel.series):
        at, line = LEFT + number % 2 * (PANEL - LEFT) // 2, 40 + number // 2 * 18
        yield f'<path class="s{number}" d="M{at} {line}h18"/>'
        yield f'<text x="{at + 23}" y="{line + 4}">{escape(name)}</text>'
    for power in range(low, high + 1):
        yield f'<path class="grid" d="M{LEFT} {y(10.0**power)}H{PANEL - RIGHT}"/>'
        yield f'<text x="{LEFT - 8}" y="{y(10.0**power) + 4}" text-anchor="end">{10.0**power:,.10g}</text>'
    for place in panel.places:
        yield f'<path class="grid" d="M{x(place)} {TOP}V{HEIGHT - BOTTOM}"/>'
        yield f'<text x="{x(place)}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{place:g}</text>'
    yield f'<text x="{(LEFT + PANEL - RIGHT) / 2}" y="{HEIGHT - 10}" text-anchor="middle">{escape(across)}</text>'
    yield f'<text x="{LEFT - 8}" y="{TOP - 10}" text-anchor="end">{escape(up)}</text>'
    for number, series in enumerate(panel.series.values()):
        points = "L".join(f"{x(place)} {y(value)}" for place, value in zip(panel.places, series, strict=True))
        if len(series) > 1:
            yield f'<path class="s{number}" d="M{points}"/>'
        else:
            yield f'<circle class="s{number}" cx="{x(panel.places[0])}" cy="{y(series[0])}" r="4"/>'

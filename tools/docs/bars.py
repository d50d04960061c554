"""Draw horizontal bars as SVG, for light and dark pages."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

WIDTH = 720
LABELS = 270
"""Pixels left of the bars, for the labels."""
VALUES = 110
"""Pixels right of the bars, for the values."""
BAR, GAP, HEAD = 16, 10, 26
COLOURS = ("#3f51b5", "#b0bec5", "#ff9800")
"""Colours of the series. Readers can distinguish them on a light and a dark page, and without seeing red and green."""


@dataclass(frozen=True)
class Chart:
    """Bars in groups. ``series`` has a value for each label: {name: values}."""

    title: str
    unit: str
    labels: Sequence[str]
    series: Mapping[str, Sequence[float]]


def draw(chart: Chart) -> str:
    """Return the chart as an SVG element. A bar's length is in proportion to its value, from zero."""
    largest = max(value for values in chart.series.values() for value in values)
    per_group = BAR * len(chart.series) + GAP
    height = HEAD + per_group * len(chart.labels)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="{escape(chart.title)}" font-family="sans-serif" font-size="12">',
        "<style>text { fill: #1f2328; } @media (prefers-color-scheme: dark) { text { fill: #e6edf3; } }</style>",
    ]
    at = LABELS
    for name, colour in zip(chart.series, COLOURS, strict=False):
        parts.append(f'<rect x="{at}" y="4" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{at + 17}" y="14">{escape(name)}</text>')
        at += 34 + 7 * len(name)
    for group, label in enumerate(chart.labels):
        top = HEAD + group * per_group
        middle = top + BAR * len(chart.series) / 2 + 4
        parts.append(f'<text x="{LABELS - 10}" y="{middle:g}" text-anchor="end">{escape(label)}</text>')
        for place, (values, colour) in enumerate(zip(chart.series.values(), COLOURS, strict=False)):
            length = values[group] / largest * (WIDTH - LABELS - VALUES)
            y = top + place * BAR
            parts.append(f'<rect x="{LABELS}" y="{y}" width="{length:.1f}" height="{BAR - 2}" fill="{colour}"/>')
            message = f"{shown(values[group])} {chart.unit}"
            parts.append(f'<text x="{LABELS + length + 5:.1f}" y="{y + 12}">{escape(message)}</text>')
    return "\n".join([*parts, "</svg>"])


def shown(value: float) -> str:
    """Return a figure for people with four digits, or with all digits before the point."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"

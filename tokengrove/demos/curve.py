"""Plots numbers from 0 to 1, as text and as SVG, without a plotting library."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import pairwise

_BLOCKS = " ▁▂▃▄▅▆▇█"
_ROWS = 10
_COLUMNS = 72
_LABELLED = {_ROWS - 1: "1.0", _ROWS // 2 - 1: "0.5", 0: "0.0"}
# Size of the plot area and the margins for labels, in SVG units.
_WIDTH, _HEIGHT, _LEFT, _TOP, _RIGHT, _BOTTOM = 640.0, 320.0, 56.0, 48.0, 24.0, 48.0

_STYLE = """<style>
rect { fill: #fff } text { fill: #333 } line { stroke: #ddd }
polyline { stroke: #167a3e } circle { fill: #167a3e }
line.target { stroke: #b45309 } text.target { fill: #b45309 }
@media (prefers-color-scheme: dark) {
rect { fill: #0d1117 } text { fill: #e6edf3 } line { stroke: #30363d }
polyline { stroke: #3fb950 } circle { fill: #3fb950 }
line.target { stroke: #f0883e } text.target { fill: #f0883e }
}
</style>"""


def text_curve(values: Sequence[float]) -> str:
    """Return ten rows of text with a scale, one column per value. Beyond 72 values, adjacent values are averaged."""
    columns = _averaged(values, _COLUMNS)
    lines = []
    for row in reversed(range(_ROWS)):
        cells = "".join(_BLOCKS[_filled(value, row)] for value in columns)
        lines.append(f"{_LABELLED.get(row, ''):>4} ┤{cells}")
    return "\n".join(lines)


def text_figure(values: Sequence[float], title: str, across: str) -> str:
    """Return `text_curve` below a title and above the axis of the values' indices, named `across`."""
    width, last = min(len(values), _COLUMNS), str(max(0, len(values) - 1))
    axis = f"0 {across} {last}" if width < len(across) + len(last) + 3 else f"0{across:^{width - len(last) - 1}}{last}"
    return f"{title}\n{text_curve(values)}\n     └{'─' * width}\n      {axis}"


def _filled(value: float, row: int) -> int:
    """Eighths of the cell in `row` that are below `value`."""
    return max(0, min(8, round((value * _ROWS - row) * 8)))


def _averaged(values: Sequence[float], most: int) -> list[float]:
    count = min(len(values), most)
    bounds = [len(values) * place // count for place in range(count + 1)] if count else []
    return [sum(values[low:high]) / (high - low) for low, high in pairwise(bounds)]


def svg_curve(values: Sequence[float], title: str, across: str, up: str, target: float) -> str:
    """Return an SVG document: the curve with both axes and a dashed line at `target`. Value i is at x = i."""
    right, bottom = _LEFT + _WIDTH, _TOP + _HEIGHT
    points = " ".join(f"{_x(place, values):.1f},{_y(value):.1f}" for place, value in enumerate(values))
    dots = "".join(f'<circle cx="{_x(at, values):.1f}" cy="{_y(v):.1f}" r="2.5"/>' for at, v in enumerate(values))
    middle, low = (_LEFT + right) / 2, bottom + 38
    turned = f"translate(16 {(_TOP + bottom) / 2}) rotate(-90)"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {right + _RIGHT:g} {bottom + _BOTTOM:g}" '
        f'font-family="sans-serif" font-size="13">{_STYLE}',
        '<rect width="100%" height="100%"/>',
        f'<text x="{_LEFT}" y="26" font-size="16">{escape(title)}</text>',
        *(_level(tick / 5) for tick in range(6)),
        *(_mark(place, values) for place in _marked(len(values))),
        f'<line class="target" x1="{_LEFT}" y1="{_y(target)}" x2="{right}" y2="{_y(target)}" stroke-dasharray="6 4"/>',
        f'<text class="target" x="{_LEFT + 6}" y="{_y(target) - 5}">{target:g}</text>',
        f'<polyline points="{points}" fill="none" stroke-width="2"/>{dots}',
        f'<text x="{middle}" y="{low}" text-anchor="middle">{escape(across)}</text>',
        f'<text transform="{turned}" text-anchor="middle">{escape(up)}</text>',
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def html_page(svg: str, title: str) -> str:
    """Return a self-contained HTML page that shows the SVG."""
    head = f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title></head>'
    return f'{head}<body style="margin: 2em auto; max-width: 52em">\n{svg}</body></html>\n'


def _x(place: float, values: Sequence[float]) -> float:
    return _LEFT + _WIDTH * place / max(1, len(values) - 1)


def _y(value: float) -> float:
    return round(_TOP + _HEIGHT * (1 - value), 1)


def _level(value: float) -> str:
    line = f'<line x1="{_LEFT}" y1="{_y(value)}" x2="{_LEFT + _WIDTH}" y2="{_y(value)}"/>'
    return f'{line}<text x="{_LEFT - 8}" y="{_y(value) + 4}" text-anchor="end">{value:.1f}</text>'


def _mark(place: int, values: Sequence[float]) -> str:
    return f'<text x="{_x(place, values):.1f}" y="{_TOP + _HEIGHT + 18}" text-anchor="middle">{place}</text>'


def _marked(count: int) -> range:
    """At most eleven tick marks, at round distances."""
    step = next(step for step in (1, 2, 5, 10, 20, 50, 100, 1000, 10**9) if count <= step * 10)
    return range(0, count, step)

"""What every way exposes, as an SVG picture: one bar a row, on a logarithmic scale. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from xml.sax.saxutils import escape

from step_benchmark.report import Row

_WIDTH, _LABELS, _VALUES = 860, 390, 70
_ROW, _BAR, _TOP = 22, 14, 40
_MIN_US = 1.0
_COLOURS = {
    "compiled-graph": "#1f6f8b",
    "shared-memory": "#7a9e3f",
    "actor-call": "#b5651d",
}


def render_svg(rows: Sequence[Row]) -> str:
    """Steps driven in-process expose nothing by definition, so they have no bar."""
    shown = [row for row in rows if not row.cell.is_baseline]
    top_us = 10.0 ** max(1, math.ceil(math.log10(max([_MIN_US, *(r.exposed_us for r in shown)]))))
    height = _TOP + _ROW * len(shown) + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        '<text x="8" y="18">microseconds a step exposed, against the same steps in-process</text>',
        *_grid(top_us, height),
        *(part for at, row in enumerate(shown) for part in _bar(row, _TOP + _ROW * at, top_us)),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _x(exposed_us: float, top_us: float) -> float:
    share = math.log10(max(exposed_us, _MIN_US) / _MIN_US) / math.log10(top_us / _MIN_US)
    return _LABELS + share * (_WIDTH - _LABELS - _VALUES)


def _grid(top_us: float, height: int) -> list[str]:
    lines: list[str] = []
    for power in range(round(math.log10(top_us)) + 1):
        x = _x(10.0**power, top_us)
        lines.append(f'<line x1="{x:.1f}" y1="34" x2="{x:.1f}" y2="{height}" stroke="#ddd"/>')
        lines.append(f'<text x="{x:.1f}" y="32" fill="#777" font-size="10">{10**power}</text>')
    return lines


def _bar(row: Row, y: int, top_us: float) -> list[str]:
    cell, end = row.cell, _x(row.exposed_us, top_us)
    step = "model" if cell.step_ms is None else f"{cell.step_ms:g} ms"
    placed = "" if cell.backend == "mp" else f", {cell.placement}"
    name = (
        f"{cell.device} {step}, {cell.backend} {cell.transport}{placed}, {cell.returns}, "
        f"{cell.in_flight} in flight"
    )
    # A way that is faster than none is within the noise, and has the shortest bar.
    width, colour = max(end - _LABELS, 1.0), _COLOURS[cell.transport]
    return [
        f'<text x="{_LABELS - 8}" y="{y + 12}" text-anchor="end" font-size="11">'
        f"{escape(name)}</text>",
        f'<rect x="{_LABELS}" y="{y}" width="{width:.1f}" height="{_BAR}" fill="{colour}"/>',
        f'<text x="{_LABELS + width + 6:.1f}" y="{y + 12}">{row.exposed_us:.0f}</text>',
    ]

"""A picture of what a run did over time: small charts one above the other, as SVG, written by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, CHART, LEFT, RIGHT, TOP, GAP = 760, 110, 66, 16, 46, 46
COLORS = ("#1f6f8b", "#c8553d", "#6a8d3a")


@dataclass(frozen=True, slots=True)
class Line:
    label: str
    points: Sequence[tuple[float, float]]  # (seconds, value); values that are NaN are left out


@dataclass(frozen=True, slots=True)
class Chart:
    title: str
    unit: str
    lines: Sequence[Line]


def svg(title: str, charts: Sequence[Chart]) -> str:
    """The picture. All charts share the axis of time, in minutes."""
    height = TOP + len(charts) * (CHART + GAP) + 10
    end_s = max((at for chart in charts for line in chart.lines for at, _ in line.points), default=1.0)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}"'
        ' font-family="sans-serif" font-size="11" fill="#333">',
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
        f'<text x="{LEFT}" y="22" font-size="15" fill="#111">{escape(title)}</text>',
    ]
    for number, chart in enumerate(charts):
        parts += _chart(chart, TOP + number * (CHART + GAP), end_s, last=number == len(charts) - 1)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _chart(chart: Chart, top: float, end_s: float, last: bool) -> list[str]:
    values = [value for line in chart.lines for _, value in line.points if math.isfinite(value)]
    high, step = _scale(max(values, default=1.0))
    inner, base = WIDTH - LEFT - RIGHT, top + 16 + CHART - 16

    def x(at_s: float) -> float:
        return LEFT + inner * at_s / max(end_s, 1e-9)

    def y(value: float) -> float:
        return base - (CHART - 16) * value / high

    parts = [f'<text x="{LEFT}" y="{top + 8}" fill="#111">{escape(chart.title)}, {escape(chart.unit)}</text>']
    mark = 0.0
    while mark <= high * 1.0001:
        parts.append(
            f'<line x1="{LEFT}" y1="{y(mark):.1f}" x2="{WIDTH - RIGHT}" y2="{y(mark):.1f}" stroke="#e3e3e3"/>'
            f'<text x="{LEFT - 6}" y="{y(mark) + 4:.1f}" text-anchor="end">{mark:,.{_digits(step)}f}</text>'
        )
        mark += step
    minutes = end_s / 60
    _, pace = _scale(minutes)
    mark = 0.0
    while mark <= minutes * 1.0001:
        parts.append(
            f'<line x1="{x(mark * 60):.1f}" y1="{base}" x2="{x(mark * 60):.1f}" y2="{base + 4}" stroke="#888"/>'
            f'<text x="{x(mark * 60):.1f}" y="{base + 15}" text-anchor="middle">{mark:,.{_digits(pace)}f}</text>'
        )
        mark += pace
    if last:
        parts.append(f'<text x="{WIDTH - RIGHT}" y="{base + 30}" text-anchor="end">minutes</text>')
    for number, line in enumerate(chart.lines):
        color = COLORS[number % len(COLORS)]
        dots = " ".join(f"{x(at):.1f},{y(value):.1f}" for at, value in line.points if math.isfinite(value))
        parts.append(f'<polyline points="{dots}" fill="none" stroke="{color}" stroke-width="1.4"/>')
        if line.label:
            parts.append(
                f'<text x="{WIDTH - RIGHT - 110 * (len(chart.lines) - 1 - number)}" y="{top + 8}" text-anchor="end"'
                f' fill="{color}">{escape(line.label)}</text>'
            )
    return parts


def _scale(largest: float) -> tuple[float, float]:
    """(upper end, step) of an axis from 0 with about four round steps."""
    if not largest > 0 or not math.isfinite(largest):
        return 1.0, 0.5
    raw = largest / 4
    power = 10 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= raw * 0.999)
    return step * math.ceil(largest / step * 0.999), step


def _digits(step: float) -> int:
    digits = 0
    while digits < 4 and abs(step * 10**digits - round(step * 10**digits)) > 1e-6:
        digits += 1
    return digits

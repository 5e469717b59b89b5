"""Prometheus' text format: families of values with help and type, and histograms."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
ROWS = (10, 100, 1_000, 10_000, 30_000, 100_000, 300_000, 1_000_000)


class Histogram:
    """Counts of observations up to each bound. One thread observes; others may read."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def lines(self, name: str, labels: str = "") -> list[str]:
        """Samples of the family `name`; `labels` are encoded ones, such as `what="telemetry"`."""
        found, total = [], 0
        comma = "," if labels else ""
        for bound, count in zip((*self._bounds, float("inf")), self._counts.copy(), strict=True):
            total += count
            found.append(f'{name}_bucket{{{labels}{comma}le="{number(bound)}"}} {total}')
        braces = f"{{{labels}}}" if labels else ""
        return [*found, f"{name}_sum{braces} {number(self._sum)}", f"{name}_count{braces} {total}"]


class Page:
    """Families in the order in which they are added. What is None or an empty mapping is not known: it is left out."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def gauge(self, name: str, help_: str, value: float | Mapping[str, float] | None, label: str = "") -> None:
        self._add(name, "gauge", help_, value, label)

    def counter(self, name: str, help_: str, value: float | Mapping[str, float] | None, label: str = "") -> None:
        """`name` ends in _total."""
        self._add(name, "counter", help_, value, label)

    def histogram(self, name: str, help_: str, value: Histogram | Mapping[str, Histogram], label: str = "") -> None:
        lines = (
            value.lines(name)
            if isinstance(value, Histogram)
            else [line for key, each in sorted(value.items()) for line in each.lines(name, pair(label, key))]
        )
        if lines:
            self._lines += [*_head(name, "histogram", help_), *lines]

    def text(self) -> str:
        return "\n".join(self._lines) + "\n"

    def _add(self, name: str, kind: str, help_: str, value: float | Mapping[str, float] | None, label: str) -> None:
        if value is None or (isinstance(value, Mapping) and not value):
            return
        self._lines += _head(name, kind, help_)
        if isinstance(value, Mapping):
            # A copy: the event loop may add a key meanwhile.
            items = sorted(dict(value).items())
            self._lines += [f"{name}{{{pair(label, key)}}} {number(item)}" for key, item in items]
        else:
            self._lines.append(f"{name} {number(value)}")


def pair(label: str, value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'{label}="{escaped}"'


def number(value: float) -> str:
    return "+Inf" if value == float("inf") else f"{value:.15g}"


def _head(name: str, kind: str, help_: str) -> list[str]:
    return [f"# HELP {name} {help_}", f"# TYPE {name} {kind}"]

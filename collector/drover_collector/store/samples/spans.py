"""Spans of time or of numbers: [from, to)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Span = tuple[int, int]


def without(span: Span, holes: Sequence[Span]) -> list[Span]:
    """Return the parts of a span outside the holes, which are in order and apart (see `merged`)."""
    found, low = [], span[0]
    for first, last in holes:
        if first > low:
            found.append((low, min(first, span[1])))
        low = max(low, last)
    if low < span[1]:
        found.append((low, span[1]))
    return [(a, b) for a, b in found if a < b]


def within(span: Span, holes: Sequence[Span]) -> list[Span]:
    """Return the parts of the holes within a span."""
    cut = ((max(first, span[0]), min(last, span[1])) for first, last in holes)
    return [(a, b) for a, b in cut if a < b]


def merged(spans: Iterable[Span]) -> list[Span]:
    """Return the spans in order, those that touch as one."""
    found: list[Span] = []
    for low, high in sorted(spans):
        if found and low <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], high)
        else:
            found.append((low, high))
    return found

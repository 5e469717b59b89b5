"""Times are integer milliseconds since the epoch, UTC, everywhere inside; ISO 8601 UTC at the edges."""

from __future__ import annotations

from datetime import UTC, datetime


def iso(ts_ms: int) -> str:
    """`2026-11-21T06:17:00.250Z`."""
    return datetime.fromtimestamp(ts_ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def from_iso(value: str | int | float) -> int:
    """Milliseconds of an ISO 8601 time (no zone means UTC) or of a number (seconds below 1e11, else milliseconds).

    Raises:
        ValueError: neither of these.
    """
    if isinstance(value, bool):
        raise ValueError(f"{value} is not a time")
    if isinstance(value, int | float):
        return round(value * 1000) if abs(value) < 1e11 else round(value)
    moment = datetime.fromisoformat(value)
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return round(moment.timestamp() * 1000)

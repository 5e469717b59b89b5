"""Convert times: integer milliseconds since the epoch, UTC, inside Drover; ISO 8601 UTC in its interfaces."""

from __future__ import annotations

from datetime import UTC, datetime


def iso(ts_ms: int) -> str:
    """Return a time as `2026-11-21T06:17:00.250Z`."""
    return datetime.fromtimestamp(ts_ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def from_iso(value: str | int | float) -> int:
    """Return the ms of an ISO 8601 time (no zone means UTC) or of a number (seconds below 1e11, else ms).

    Raises:
        ValueError: the value is not a time.
    """
    if isinstance(value, bool):
        raise ValueError(f"{value} is not a time")
    if isinstance(value, int | float):
        return round(value * 1000) if abs(value) < 1e11 else round(value)
    time = datetime.fromisoformat(value)
    if time.tzinfo is None:
        time = time.replace(tzinfo=UTC)
    return round(time.timestamp() * 1000)

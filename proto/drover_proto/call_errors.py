"""The reason inside gRPC's long error texts."""

from __future__ import annotations

REASONS = ("connection refused", "no route to host", "connection reset", "handshake failed", "timed out")


def reason_of(detail: str) -> str:
    """Return a few words for people; "" when gRPC gave no detail."""
    lowered = detail.lower()
    for reason in REASONS:
        if reason in lowered:
            return reason
    if "dns" in lowered or "name resolution" in lowered:
        return "its name cannot be resolved"
    return detail.splitlines()[0][:120] if detail else ""

"""Describe silences, for the API, the commands and the console."""

from __future__ import annotations

from drover_core.model.events import Silence
from drover_core.times import iso

KEYS = ("incident", "node", "gpu", "rack", "leaf", "pool", "kind")


def describe_scope(silence: Silence) -> str:
    """Return what a silence covers: `rack r1, kind thermal`."""
    return ", ".join(f"{key} {' '.join(map(str, values))}" for key in KEYS if (values := getattr(silence, key)))


def describe_author(silence: Silence) -> str:
    """Return `by anna until 2026-11-22T06:00:00Z: firmware`."""
    return f"by {silence.by} until {iso(silence.until_ms)[:19]}Z: {silence.why}"

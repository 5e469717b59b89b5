"""Types of arguments: what is out of range is refused with one line before anything runs."""

from __future__ import annotations

import argparse
import math

MOST = 10_000_000


def count(text: str) -> int:
    """A whole number from 1 to 10 million."""
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= MOST:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to {MOST:,}")
    return int(text)


def finite(text: str) -> float:
    """A number; `nan` and `inf` are none."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number")
    return number


def address(text: str) -> str:
    """HOST:PORT."""
    host, _, port = text.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or not 1 <= int(port) <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT, such as collector.example:7302")
    return text

"""What a check finds."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class CheckState(StrEnum):
    """`missing` is not there, which may be as it should be; `broken` is asked for and does not work."""

    OK = "ok"
    LIMITED = "limited"
    MISSING = "missing"
    BROKEN = "broken"


@dataclass(frozen=True, slots=True)
class Line:
    """One finding; `remedy` is empty when nothing is to be done."""

    name: str
    state: CheckState
    text: str
    remedy: str = ""

"""The result of a check."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class CheckState(StrEnum):
    """`missing`: it is not there, which may be intended. `broken`: it is wanted and does not work."""

    OK = "ok"
    LIMITED = "limited"
    MISSING = "missing"
    BROKEN = "broken"


@dataclass(frozen=True, slots=True)
class CheckResult:
    """What one check found; `remedy` is empty if nothing needs to be done."""

    name: str
    state: CheckState
    text: str
    remedy: str = ""

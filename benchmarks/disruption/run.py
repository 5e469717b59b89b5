"""One fault after another while agents stream, and how long each takes to be over."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from disruption.place import Place

RECOVER_S = 150.0

# Up to its `yield` a fault is caused and taken away again. It is over when the fleet is well and what it yields holds.
# What follows the `yield` is checked then.
Fault = Callable[["Run"], Iterator[Callable[[], object] | None]]


@dataclass
class Row:
    """One line of the table. Times in milliseconds since 1970, and in seconds."""

    group: str
    name: str
    begin_ms: int = 0
    held_s: float = 0.0
    recovered_s: float | None = None  # None: not within RECOVER_S
    seen: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    rows_lost: int = 0
    events_lost: int = 0
    skipped: str = ""


@dataclass
class Run:
    """What the faults work with.

    Attributes:
        allowed: (node, from_ms, to_ms) of rows that a damaged spool may have lost before they were acknowledged.
        broken: nodes that were given a fault which the policy drains for.
    """

    place: Place
    folder: Path
    rows: list[Row] = field(default_factory=list)
    allowed: list[tuple[str, int, int]] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)
    with_: dict[str, Any] = field(default_factory=dict)  # proxy, certificates, Slurm ... by name

    def __getitem__(self, name: str) -> Any:
        return self.with_[name]

    @property
    def row(self) -> Row:
        return self.rows[-1]

    def saw(self, text: str) -> None:
        self.row.seen.append(text)

    def must(self, true: object, text: str) -> None:
        """`text` says what should be."""
        if not true:
            self.row.wrong.append(f"not so: {text}")

    def until(self, true: Callable[[], object], seconds: float, text: str) -> None:
        self.must(self.place.wait(true, seconds), text)

    def hold(self, seconds: float) -> None:
        time.sleep(seconds)

    def suffer(self, group: str, name: str, fault: Fault) -> Row:
        row = Row(group, name, now_ms())
        self.rows.append(row)
        started = time.monotonic()
        try:
            steps = fault(self)
            also = next(steps)
            row.held_s = time.monotonic() - started
            lifted = time.monotonic()
            why = ""
            while time.monotonic() - lifted < RECOVER_S:
                self.place.supervise()
                why = self.place.well() or ("" if also is None or self.place.wait(also, 0) else "it has not come yet")
                if not why:
                    row.recovered_s = time.monotonic() - lifted
                    break
                time.sleep(0.1)
            self.must(not why, f"well again within {RECOVER_S:g} s ({why})")
            next(steps, None)
        except SkipError as error:
            row.skipped = str(error)
        except Exception as error:  # noqa: BLE001  # a fault that cannot be brought about is a finding of its own
            row.wrong.append(f"{type(error).__name__}: {error}")
        print(self.line(row), file=sys.stderr, flush=True)
        return row

    @staticmethod
    def line(row: Row) -> str:
        recovered = "never" if row.recovered_s is None else f"{row.recovered_s:.1f} s"
        seen = row.skipped or "; ".join(row.seen)
        return f"{row.name}: held {row.held_s:.1f} s, over after {recovered}; {seen} {row.wrong or ''}"


class SkipError(Exception):
    """This machine cannot bring the fault about; one line says what it lacks."""


def now_ms() -> int:
    return time.time_ns() // 1_000_000

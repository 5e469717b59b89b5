"""Plan which telemetry is sent on the BACKFILL lane, in which order, under which sequences.

After an outage the backlog is moved from LIVE to BACKFILL, the newest first. A record's place in the plan gives its
sequence. A new plan begins above all sequences of the last one, so that acknowledgements stay cumulative. The plan is
on disk before its first record is sent.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from drover_agent.atomic_file import write_whole

Range = tuple[int, int]  # record numbers low .. high, both included


@dataclass(frozen=True, slots=True)
class BackfillPlan:
    """Ranges of record numbers, the newest first; the first record of the first range has the sequence `base`."""

    base: int = 1
    ranges: tuple[Range, ...] = ()
    through: int = 0  # records up to here are in a plan or were held when it was made: none is sent on LIVE
    floor: int = 0  # what was held of LIVE when the plan was made; a collector that holds less has lost data

    @property
    def next_base(self) -> int:
        return self.base + sum(high - low + 1 for low, high in self.ranges)

    def seq_of(self, number: int) -> int:
        """Return the BACKFILL sequence of a record in the plan."""
        at = self.base
        for low, high in self.ranges:
            if low <= number <= high:
                return at + high - number
            at += high - low + 1
        raise ValueError(f"record {number} is not in the plan")

    def after(self, seq: int) -> tuple[Range, ...]:
        """Return what remains if everything up to `seq` is held, in order."""
        left: list[Range] = []
        at = self.base
        for low, high in self.ranges:
            done = min(max(seq - at + 1, 0), high - low + 1)
            if high - done >= low:
                left.append((low, high - done))
            at += high - low + 1
        return tuple(left)

    def replaced_by(self, ranges: Sequence[Range], held: int) -> BackfillPlan:
        """Return a plan for these ranges, which may overlap, above all sequences of this one. `held`: of LIVE."""
        joined: list[Range] = []
        for low, high in sorted(ranges):
            if joined and low <= joined[-1][1]:
                joined[-1] = (joined[-1][0], max(high, joined[-1][1]))
            else:
                joined.append((low, high))
        return BackfillPlan(self.next_base, tuple(joined[::-1]), max(self.through, joined[-1][1]), held)

    def save(self, path: Path) -> None:
        """Write the plan.

        Raises:
            OSError: the disk refuses.
        """
        write_whole(path, json.dumps(asdict(self)).encode())

    @classmethod
    def load(cls, path: Path) -> BackfillPlan:
        """Read the plan from a file; an empty one if there is no file.

        Raises:
            ValueError: the file is damaged.
        """
        try:
            data = json.loads(path.read_bytes())
        except FileNotFoundError:
            return cls()
        try:
            ranges = tuple((int(low), int(high)) for low, high in data["ranges"])
            return cls(int(data["base"]), ranges, int(data["through"]), int(data["floor"]))
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a backfill plan: {error}") from None

"""What one rank's flight recorder dump says, short enough for an event: where the rank stands in each of its groups.

An agent makes it of the dumps on its node; the collector puts those of a job's ranks together (`join`) and asks
`collectives.find_faults` which rank did not come to which collective. The message of such an event is one JSON object:

    v       1
    text    a sentence for people
    job     name of the job, as the file's path gives it; empty: the path does not
    rank    of the process in the job
    written when the dump was written, ms
    groups  of the process groups that wait, then the others, at most MAX_GROUPS:
            [name, members as runs [first, last, step], newest number, operations]
            an operation: [number, kind, sent sizes, received sizes, types, it is done, age in ms, place in the program]

Of each group the operations around the first that is not done are kept, without a gap between their numbers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

from drover_core.jobs.collectives import find_faults, is_done
from drover_core.jobs.flight import Dump, Operation
from drover_core.jobs.lines import RANK_LIMIT
from drover_core.jobs.model import Fault

MAX_GROUPS = 12
BEFORE, AFTER = 3, 12  # operations kept before the first that is not done, and after it
MAX_CHARS = 7_000  # of a message; agents cut an event's message at 8,000
MAX_MEMBERS = 200_000  # of all groups of a report
SHARED_FROM = 256  # members of a group: the reports of a larger one share them in memory
MAX_KEPT = 8  # sizes and types of an operation that are kept
_WORD = re.compile(r"[^\w.:/>< -]")


class ReportError(ValueError):
    """A message that is no report of a rank."""


@dataclass(frozen=True, slots=True)
class RankGroup:
    """Where a rank stands in one process group. `newest`: the highest number that it has enqueued."""

    name: str
    members: tuple[int, ...]
    newest: int
    operations: tuple[Operation, ...]  # `completed`: the rank has finished it, also where its backend knows no states


@dataclass(frozen=True, slots=True)
class RankReport:
    """Where a rank stands."""

    rank: int
    job: str
    written_ms: int
    groups: tuple[RankGroup, ...]
    text: str = ""

    def waits_ms(self, group: str, sequence: int) -> int | None:
        """Return how long before the dump the rank came to an operation; None: it did not, or that is not known."""
        for each in self.groups:
            for operation in each.operations if each.name == group else ():
                if operation.sequence == sequence and operation.created_ns:
                    return max(0, self.written_ms - operation.created_ns // 1_000_000)
        return None


def of_dump(dump: Dump, job: str, written_ms: int) -> RankReport:
    """Return the report of a dump."""
    by_group: dict[str, dict[int, Operation]] = {}
    for operation in dump.operations:
        if not operation.point:
            by_group.setdefault(operation.group, {}).setdefault(operation.sequence, operation)
    groups = []
    for name, operations in by_group.items():
        members = dump.groups.get(name) or (dump.groups.get("", ()) if len(dump.groups) == 1 else ())
        groups.append(RankGroup(name, members, max(operations), _around(operations)))
    groups.sort(key=lambda each: _waits_since(each) or 1 << 62)
    report = RankReport(dump.rank, job, written_ms, tuple(groups[:MAX_GROUPS]))
    return replace(report, text=_sentence(report))


def _around(operations: Mapping[int, Operation]) -> tuple[Operation, ...]:
    """Return the operations around the first that is not done, without a gap."""
    numbers = sorted(operations)
    waiting = next((n for n in numbers if not is_done(operations[n], operations)), numbers[-1])
    low = high = waiting
    while low - 1 in operations and waiting - low < BEFORE:
        low -= 1
    while high + 1 in operations and high - waiting < AFTER:
        high += 1
    return tuple(
        replace(operations[n], completed=is_done(operations[n], operations), retired=False)
        for n in range(low, high + 1)
    )


def _waits_since(group: RankGroup) -> int | None:
    """Return when the rank came to the first operation of a group that is not done, in ns."""
    return next((each.created_ns for each in group.operations if not each.completed), None)


def _sentence(report: RankReport) -> str:
    for group in report.groups:
        for each in group.operations:
            if not each.completed:
                of = f" of group {group.name}" if group.name not in ("", "0") else ""
                where = f" ({each.where})" if each.where else ""
                return f"rank {report.rank} is in {each.kind} {each.sequence}{of}{where}"
    return f"rank {report.rank} waits in no collective"


def to_message(report: RankReport) -> str:
    """Return the message of an event: JSON of at most MAX_CHARS. What does not fit is left out, the newest last."""
    found = _message(report)
    if len(found) > MAX_CHARS:
        report = replace(report, groups=tuple(replace(each, members=()) for each in report.groups))
        found = _message(report)
    while len(found) > MAX_CHARS and len(report.groups) > 1:
        report = replace(report, groups=report.groups[:-1])
        found = _message(report)
    while len(found) > MAX_CHARS and report.groups and len(report.groups[0].operations) > 1:
        (group,) = report.groups
        report = replace(report, groups=(replace(group, operations=group.operations[:-1]),))
        found = _message(report)
    return found


def _message(report: RankReport) -> str:
    groups = [
        [each.name, _runs(each.members), each.newest, [_row(o, report.written_ms) for o in each.operations]]
        for each in report.groups
    ]
    value = {"v": 1, "text": report.text, "job": report.job, "rank": report.rank, "written": report.written_ms}
    return json.dumps({**value, "groups": groups}, separators=(",", ":"))


def _row(operation: Operation, written_ms: int) -> list[Any]:
    age_ms = written_ms - operation.created_ns // 1_000_000 if operation.created_ns else None
    return [
        operation.sequence, operation.kind, operation.sent[:MAX_KEPT], operation.received[:MAX_KEPT],
        operation.types[:MAX_KEPT], int(operation.completed), age_ms, operation.where,
    ]  # fmt: skip


def _runs(members: Sequence[int]) -> list[list[int]]:
    """Return ranks as runs [first, last, step]: groups are ranges, or every so-many-th rank."""
    found: list[list[int]] = []
    for rank in sorted(set(members)):
        run = found[-1] if found else None
        if run and (run[0] == run[1] or rank - run[1] == run[2]):
            run[1], run[2] = rank, rank - run[1]
        else:
            found.append([rank, rank, 1])
    return found


def read_message(message: str) -> RankReport:
    """Return the report of a message, checked: its sender is a node, and what it read a user may have written.

    Raises:
        ReportError: it is none.
    """
    try:
        found = json.loads(message)
        if not isinstance(found, dict) or found.get("v") != 1:
            raise ReportError("it is no report of version 1")
        room = [MAX_MEMBERS]
        groups = tuple(_group(each, int(found["written"]), room) for each in found["groups"][:MAX_GROUPS])
        report = RankReport(
            int(found["rank"]), _text(found["job"], 200), int(found["written"]), groups, _text(found["text"], 300)
        )
    except ReportError:
        raise
    except (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RecursionError) as error:
        raise ReportError(f"it is damaged ({type(error).__name__})") from None
    if not 0 <= report.rank < RANK_LIMIT or not 0 <= report.written_ms < 10**13:
        raise ReportError("its rank or its time is none")
    return report


def text_of(message: str) -> str:
    """Return the sentence for people in a message, or the message itself if it is no report."""
    try:
        return read_message(message).text or message
    except ReportError:
        return message


def _group(row: Any, written_ms: int, room: list[int]) -> RankGroup:
    name, runs, newest, operations = row
    for first, last, step in runs:
        if not (0 <= first <= last < RANK_LIMIT and step > 0):
            raise ReportError("a group of it has no ranks")
        room[0] -= (last - first) // step + 1
        if room[0] < 0:
            raise ReportError(f"its groups have more than {MAX_MEMBERS:,} ranks")
    ranges = tuple((first, last, step) for first, last, step in runs)
    large = sum((last - first) // step + 1 for first, last, step in ranges) >= SHARED_FROM
    members = _shared_members(ranges) if large else _members(ranges)
    name = _text(name, 80)
    found = tuple(_operation(name, each, written_ms) for each in operations[: BEFORE + AFTER + 1])
    if any(b.sequence != a.sequence + 1 for a, b in pairwise(found)):
        raise ReportError("the operations of a group have a gap")
    return RankGroup(name, members, int(newest), found)


def _members(runs: tuple[tuple[int, int, int], ...]) -> tuple[int, ...]:
    return tuple(rank for first, last, step in runs for rank in range(first, last + 1, step))


_shared_members = lru_cache(maxsize=32)(_members)  # one tuple for the thousands of reports of a group


def _operation(group: str, row: Any, written_ms: int) -> Operation:
    sequence, kind, sent, received, types, done, age_ms, where = row
    created = 0 if age_ms is None else max(0, written_ms - int(age_ms)) * 1_000_000
    if not 0 <= int(sequence) < 1 << 63:
        raise ReportError("a number of it is none")
    return Operation(
        group, int(sequence), _text(kind, 80), _sizes(sent), _sizes(received),
        tuple(_text(each, 40) for each in types[:MAX_KEPT]), False, bool(done), False, created, _text(where, 120),
    )  # fmt: skip


def _sizes(value: Any) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(int(n) for n in each[:16]) for each in value[:MAX_KEPT])


def _text(value: Any, most: int) -> str:
    if not isinstance(value, str):
        raise ReportError("a text of it is none")
    return _WORD.sub(" ", value[:most]) if most < 200 else "".join(c if c.isprintable() else " " for c in value[:most])


@dataclass(slots=True)
class Joined:
    """What is known of one process group, as dumps that can be compared.

    Attributes:
        passed: ranks that are in no dump, because their reports do not reach back so far.
    """

    group: str
    dumps: dict[int, Dump] = field(default_factory=dict)
    passed: set[int] = field(default_factory=set)


def join(reports: Iterable[RankReport]) -> list[Joined]:
    """Return the operations of each group up to the number that every report of it reaches.

    A report shows a part of what its rank enqueued. What is above the end of one part is not known to be missing there,
    so it is compared with nobody.
    """
    reports = list(reports)
    groups = {report.rank: {group.name: group for group in report.groups} for report in reports}
    found = []
    for name in dict.fromkeys(group.name for report in reports for group in report.groups):
        of_name = [of[name] for of in groups.values() if name in of]
        lasts = [each.operations[-1].sequence if each.operations else -1 for each in of_name]
        cut = [last for last, each in zip(lasts, of_name, strict=True) if last < each.newest]
        limit = min(cut, default=max(lasts))
        joined = Joined(name)
        members = next((each.members for each in of_name if each.members), ())
        for report in reports:
            group = groups[report.rank].get(name)
            kept = [o for o in group.operations if o.sequence <= limit] if group else []
            if (group and not kept) or (group is None and len(report.groups) >= MAX_GROUPS):
                joined.passed.add(report.rank)
            elif group or report.rank in members:
                joined.dumps[report.rank] = Dump(report.rank, kept, {name: members} if members else {})
        found.append(joined)
    return found


def find_fault(reports: Iterable[RankReport], world: Iterable[int] = ()) -> Fault | None:
    """Return what one rank did that others did not: the fault that began first. `world`: ranks that are known."""
    found = [
        (min((o.created_ns for dump in group.dumps.values() for o in dump.operations[-1:]), default=0), fault)
        for group in join(reports)
        for fault in find_faults(group.dumps, world, frozenset(group.passed))
    ]
    return min(found, key=lambda each: each[0], default=(0, None))[1]

"""What an agent sends of a rank's dump, and what the ranks' reports say together as well as whole dumps do."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from drover_core.jobs.collectives import find_faults
from drover_core.jobs.flight import Dump, Operation, read_dump
from drover_core.jobs.model import Fault
from drover_core.jobs.rank_report import (
    MAX_CHARS,
    RankGroup,
    RankReport,
    ReportError,
    find_fault,
    of_dump,
    read_message,
    text_of,
    to_message,
)
from testbed.rank_events import FOLDER, report

NOW_MS = 1_800_000_000_000


def operations(group: str, upto: int, done: int, size: int = 8, first: int = 1) -> Iterator[Operation]:
    for number in range(first, upto + 1):
        created = (NOW_MS - 40_000 + number) * 1_000_000
        shape = ((size,),)
        yield Operation(group, number, "all_reduce", shape, shape, ("Float",), False, number <= done, False, created)


def sent(rank: int, *groups: tuple[str, int, int], members: tuple[int, ...] = (0, 1, 2)) -> RankReport:
    """Return the report of a rank as the collector reads it. `groups`: (name, newest, the last one that is done)."""
    found = [each for name, upto, done in groups for each in operations(name, upto, done)]
    dump = Dump(rank, found, {name: members for name, _, _ in groups})
    return read_message(to_message(of_dump(dump, "4711", NOW_MS)))


def named(fault: Fault | None) -> tuple[str, tuple[int, ...], int | None] | None:
    return None if fault is None else (fault.what, fault.ranks, fault.sequence)


def test_recorded_ranks_name_the_one_that_slept_as_whole_dumps_do() -> None:
    reports = [report("skip", rank, NOW_MS) for rank in range(4)]
    fault = find_fault(reports)
    assert named(fault) == ("missing", (2,), 13)
    files = [f"trace_rank_{rank}.json" for rank in range(4)]
    whole = {rank: read_dump(name, (FOLDER / "skip" / name).read_bytes()) for rank, name in enumerate(files)}
    assert named(find_faults(whole)[0]) == named(fault)
    waited = reports[0].waits_ms("0", 13)
    assert waited is not None and 30_000 < waited < 36_000
    assert reports[2].waits_ms("0", 13) is None


def test_recorded_ranks_name_the_one_with_another_size() -> None:
    assert named(find_fault([report("size", rank, NOW_MS) for rank in (1, 2, 3)])) == ("size", (1,), 13)


def test_a_rank_that_enqueues_hundreds_ahead_is_compared_where_it_waits() -> None:
    reports = [sent(0, ("0", 500, 9)), sent(1, ("0", 500, 9)), sent(2, ("0", 9, 9))]
    fault = find_fault(reports)
    assert named(fault) == ("missing", (2,), 10)
    assert fault is not None and fault.waiting == (0, 1)


def test_a_rank_that_has_gone_on_is_not_accused() -> None:
    """Its report does not reach back to where another one waits: nothing is known of it there."""
    reports = [sent(0, ("0", 500, 9)), sent(1, ("0", 500, 9)), sent(2, ("0", 900, 800))]
    assert find_fault(reports) is None


def test_each_group_is_judged_and_the_one_that_stopped_first_counts() -> None:
    everyone = [sent(rank, ("0", 5, 5), ("tensor", 7, 6)) for rank in (0, 1)]
    assert named(find_fault([*everyone, sent(2, ("0", 5, 5), ("tensor", 6, 6))])) == ("missing", (2,), 7)


def test_a_rank_without_a_dump_is_named_where_all_others_wait_at_one_collective() -> None:
    assert named(find_fault([sent(0, ("0", 7, 6)), sent(1, ("0", 7, 6))])) == ("silent", (2,), 7)


@pytest.mark.parametrize("size", [1, 4, 40_000])
def test_a_message_fits_an_event_whatever_the_job_is_like(size: int) -> None:
    members = tuple(n * n % 100_003 for n in range(size))  # no runs
    groups = [operations(f"group {n} with a long name", 400, 200, 10**9) for n in range(40)]
    dump = Dump(3, [each for group in groups for each in group], {"group 3 with a long name": members})
    message = to_message(of_dump(dump, "4711", NOW_MS))
    assert len(message) <= MAX_CHARS
    found = read_message(message)
    assert found.groups and found.groups[0].newest == 400
    assert any(each.sequence == 201 and not each.completed for each in found.groups[0].operations)


def test_members_come_back_from_their_runs() -> None:
    for members in ((0, 1, 2), tuple(range(0, 4096, 8)), (5,), (1, 2, 4, 8, 16)):
        dump = Dump(members[0], list(operations("0", 3, 2)), {"0": members})
        assert read_message(to_message(of_dump(dump, "", NOW_MS))).groups[0].members == members


@pytest.mark.parametrize(
    "change",
    [
        {"v": 2}, {"rank": -1}, {"rank": "x"}, {"written": None}, {"groups": 7}, {"text": 5}, {"written": 10**14},
        {"groups": [["0", [[0, 10**9, 1]], 3, []]]}, {"groups": [["0", [[0, 9, 0]], 3, []]]},
        {"groups": [["0", [[0, 900_000, 1]], 3, []]]}, {"groups": [["0", [], 3, [[1], [2]]]]},
        {"groups": [["0", [], 9, [[1, "x", [], [], [], 0, 1, ""], [3, "x", [], [], [], 0, 1, ""]]]]},
    ],
)  # fmt: skip
def test_what_is_no_report_is_refused(change: dict[str, object]) -> None:
    good = {"v": 1, "text": "t", "job": "", "rank": 1, "written": NOW_MS, "groups": []}
    assert read_message(json.dumps(good)).rank == 1
    with pytest.raises(ReportError):
        read_message(json.dumps(good | change))


def test_people_read_the_sentence_and_of_no_report_what_is_there() -> None:
    message = to_message(of_dump(Dump(2, list(operations("0", 7, 6))), "", NOW_MS))
    assert text_of(message) == "rank 2 is in all_reduce 7"
    assert text_of("no JSON") == "no JSON"


def test_reports_of_a_large_group_share_its_members() -> None:
    """Found by an attack: 4,096 dumps of a job that hangs took 1.2 GB of the collector's memory."""
    members = tuple(range(4096))
    message = to_message(RankReport(0, "j", 1, (RankGroup("0", members, 0, ()),)))
    first, second = (read_message(message).groups[0].members for _ in range(2))
    assert first == members
    assert first is second

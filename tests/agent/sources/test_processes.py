"""The processes that hold each GPU: what is sent of them, when, and what never is."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from drover_agent.sources.base import Reading
from drover_agent.sources.workloads.processes import EVERY_MS, TICKS, ProcessReport
from drover_core.model.gpu_processes import MOST, GpuProcess, key, pack, unpack, without

BOOT_S, NOW_MS = 1_700_000_000, 1_700_010_000_000


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    (tmp_path / "stat").write_text(f"cpu 1 2 3\nbtime {BOOT_S}\n")
    (tmp_path / "1/root/etc").mkdir(parents=True)
    (tmp_path / "1/root/etc/passwd").write_text(f"ada:x:{os.getuid()}:100::/home/ada:/bin/sh\n")
    for pid, name in ((10, "python3 train) x"), (11, "<b>vllm</b>")):
        (tmp_path / str(pid)).mkdir()
        fields = " ".join(["S", "1", *["0"] * 17, str(50 * TICKS), "0"])
        (tmp_path / str(pid) / "stat").write_text(f"{pid} ({name}) {fields}")
        (tmp_path / str(pid) / "cmdline").write_text("python3\0--token=SECRET\0")
    return tmp_path


def sent(report: ProcessReport, pids: dict[int, tuple[int, ...] | None], now_ms: int) -> dict[str, str]:
    """In the second of two readings that are alike, or the first."""
    reading = Reading()
    for _ in range(2):
        report.report(pids, reading, now_ms)
    return reading.inventory


def test_user_name_and_beginning_are_sent_and_never_the_arguments(proc: Path) -> None:
    found = sent(ProcessReport(proc), {0: (11, 10, 99), 1: (), 2: None}, NOW_MS)
    assert set(found) == {key(0), key(1)}, "what was never known is not sent"
    since_ms = (BOOT_S + 50) * 1000
    assert unpack(found[key(0)]) == (
        [
            GpuProcess(10, os.getuid(), "ada", "python3 train) x", since_ms),
            GpuProcess(11, os.getuid(), "ada", "<b>vllm</b>", since_ms),
        ],
        2,
    )
    assert unpack(found[key(1)]) == ([], 0)
    assert "SECRET" not in json.dumps(found)


def test_only_a_change_is_sent_once_it_has_settled_and_not_too_often(proc: Path) -> None:
    report = ProcessReport(proc)
    first: Reading = Reading()
    report.report({0: (10,)}, first, NOW_MS)
    assert not first.inventory, "more may begin within the moment"
    assert sent(report, {0: (10,)}, NOW_MS)
    assert not sent(report, {0: (10,)}, NOW_MS + EVERY_MS), "nothing changed"
    assert not sent(report, {0: (11,)}, NOW_MS + EVERY_MS - 1)
    assert sent(report, {0: (11,)}, NOW_MS + EVERY_MS)
    assert sent(report, {0: None}, NOW_MS + 2 * EVERY_MS) == {key(0): ""}, "no longer known is not: none"
    assert sent(report, {0: (10,)}, NOW_MS + 3 * EVERY_MS)
    assert sent(report, {}, NOW_MS + 4 * EVERY_MS) == {key(0): ""}, "of a GPU that has gone"
    for at in range(4, 6):
        unsettled = Reading()
        report.report({0: (10, 11)[at % 2 :]}, unsettled, NOW_MS + at * EVERY_MS)
        assert not unsettled.inventory
    last = Reading()
    report.report({0: (10, 11)}, last, NOW_MS + 6 * EVERY_MS)
    assert last.inventory, "where processes come and go all the time, the list is not old for ever"


def test_after_a_reading_that_may_be_lost_all_is_sent_again(proc: Path) -> None:
    report = ProcessReport(proc)
    assert sent(report, {0: (10,)}, NOW_MS)
    report.forget()
    assert sent(report, {0: (10,)}, NOW_MS + 1000)


def test_a_user_without_a_name_on_the_node_has_a_number(proc: Path) -> None:
    (proc / "1/root/etc/passwd").unlink()
    listed, _ = unpack(sent(ProcessReport(proc), {0: (10,)}, NOW_MS)[key(0)]) or ([], 0)
    assert [(process.user, process.uid) for process in listed] == [("", os.getuid())]


@pytest.mark.parametrize("text", ["", "x", "[]", "{}", '{"total":1,"processes":[{}]}', '{"total":"x","processes":[]}'])
def test_an_entry_that_cannot_be_read_is_not_known(text: str) -> None:
    assert unpack(text) is None


def test_many_processes_are_cut_and_counted() -> None:
    listed, total = unpack(pack(GpuProcess(pid, 1, "", "x", 0) for pid in range(MOST + 5))) or ([], 0)
    assert (len(listed), total) == (MOST, MOST + 5)
    assert without({key(0): "x", "gpu0.pci": "y", "gpu0.processes2": "z"}) == {"gpu0.pci": "y", "gpu0.processes2": "z"}

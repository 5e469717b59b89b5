"""Dumps of ranks become events: once, of this node's ranks, whole ones only, and never in the way of the agent."""

from __future__ import annotations

import json
import os
import pickle
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from drover_agent.config import load_config
from drover_agent.polled_sources import build_sources
from drover_agent.sources.base import NodeEvent
from drover_agent.sources.gpus import Gpus
from drover_agent.sources.workloads import rank_dumps
from drover_agent.sources.workloads.rank_dumps import RankDumpsSource
from drover_agent.telemetry.event_dedup import EventMerger
from drover_core.jobs.rank_report import read_message
from drover_core.model.kinds import EventKind
from drover_core.settings import SettingsError
from testbed.job_processes import node
from testbed.rank_events import dump_at
from testbed.waiting import wait_until


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    (tmp_path / "logs/4711").mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/mountinfo").write_text("")
    return tmp_path / "logs/4711"


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def source(logs: Path, gpus: Gpus | None = None) -> RankDumpsSource:
    pattern = f"{logs.parent}/{{job}}/trace_rank_*"
    return RankDumpsSource([pattern], gpus or node(4), logs.parents[1] / "proc")


def leave(logs: Path, rank: int) -> Path:
    path = logs / f"trace_rank_{rank}.json"
    path.write_bytes(dump_at("skip", rank, now_ms()))
    return path


def events(found: RankDumpsSource) -> list[NodeEvent]:
    return found.read(now_ms()).events


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may take longer than WAIT_S for the first dump."""
    monkeypatch.setattr(rank_dumps, "WAIT_S", 20.0)


def run_rank(logs: Path, gpus: Gpus, slot: int, rank: int) -> None:
    folder = logs.parents[1] / f"proc/{slot + 100}"
    folder.mkdir()
    (folder / "environ").write_text(f"PATH=/bin\0RANK={rank}\0WORLD_SIZE=4\0")
    gpus.set_pids(slot, (slot + 100,))


def test_each_dump_is_one_event_and_a_new_one_of_the_same_rank_another(logs: Path) -> None:
    found = source(logs)
    assert events(found) == []
    for rank in range(4):
        leave(logs, rank)
    sent = events(found)
    reports = [read_message(event.message) for event in sent]
    assert sorted(report.rank for report in reports) == [0, 1, 2, 3]
    assert {report.job for report in reports} == {"4711"}
    assert {(event.kind, event.code, event.forgeable, event.gpu) for event in sent} == {
        (EventKind.RANK, "collective", True, None)
    }
    assert events(found) == []
    leave(logs, 2)
    assert [read_message(event.message).rank for event in events(found)] == [2]


def test_the_gpu_of_a_rank_is_that_of_its_process_also_after_its_end(logs: Path) -> None:
    gpus = node(4)
    run_rank(logs, gpus, 3, 0)
    found = source(logs, gpus)
    events(found)
    gpus.set_pids(3, ())  # the watchdog ends the process right after its dump
    leave(logs, 0)
    leave(logs, 1)
    assert {read_message(event.message).rank: event.gpu for event in events(found)} == {0: 3, 1: None}


def test_two_jobs_of_a_user_with_such_a_rank_leave_it_open(logs: Path) -> None:
    gpus = node(4)
    run_rank(logs, gpus, 1, 0)
    run_rank(logs, gpus, 2, 0)
    leave(logs, 0)
    assert [event.gpu for event in events(source(logs, gpus))] == [None]


def test_on_a_file_system_of_the_network_only_ranks_of_this_node_are_sent(logs: Path) -> None:
    device = logs.stat().st_dev
    line = f"36 35 {os.major(device)}:{os.minor(device)} / {logs} rw,noatime shared:1 - nfs4 server:/logs rw\n"
    (logs.parents[1] / "proc/self/mountinfo").write_text(line)
    gpus = node(4)
    run_rank(logs, gpus, 0, 2)
    for rank in range(4):
        leave(logs, rank)
    assert [(read_message(e.message).rank, e.gpu) for e in events(source(logs, gpus))] == [(2, 0)]


def test_a_half_written_dump_is_read_when_it_is_whole(logs: Path) -> None:
    found = source(logs)
    events(found)
    whole = dump_at("skip", 0, now_ms())
    path = logs / "trace_rank_0.json"
    path.write_bytes(whole[: len(whole) // 2])
    assert events(found) == []
    path.write_bytes(whole)
    assert len(events(found)) == 1


def test_what_is_no_dump_of_now_is_left_out(logs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_dumps, "MAX_BYTES", 10_000)
    old = leave(logs, 0)
    os.utime(old, (time.time() - 3600, time.time() - 3600))
    (logs / "trace_rank_1.json").write_bytes(b'{"entries": [' + b" " * 20_000)
    os.mkfifo(logs / "trace_rank_2.json")
    (logs / "trace_rank_3.json").symlink_to(old)
    (logs / "trace_rank_4.json").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    (logs / "trace_rank_5.json").write_bytes(b"")
    assert events(source(logs)) == []


def test_a_dump_that_takes_long_comes_later_and_one_that_hangs_fails_the_source(
    logs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, go_on = source(logs), threading.Event()
    leave(logs, 0)
    monkeypatch.setattr(rank_dumps, "WAIT_S", 0.01)
    monkeypatch.setattr(rank_dumps, "_bytes", lambda path: go_on.wait(120) and Path(path).read_bytes())
    began = time.monotonic()
    assert events(found) == []
    assert time.monotonic() - began < 60, "it is not waited for"
    monkeypatch.setattr(rank_dumps, "HUNG_S", 0.0)
    with pytest.raises(TimeoutError, match="rank_dumps"):
        events(found)
    go_on.set()
    wait_until(lambda: events(found), "its event")


def test_what_fails_in_the_thread_fails_the_read(logs: Path) -> None:
    found = source(logs)
    (logs.parents[1] / "proc/self/mountinfo").unlink()
    leave(logs, 0)
    with pytest.raises(OSError, match="mountinfo"):
        events(found)


def test_it_is_off_unless_paths_are_set_and_takes_absolute_ones_only() -> None:
    by_name = {each.name: each for each in build_sources(load_config(None, ["hardware=none"]), Gpus())}
    assert by_name["rank_dumps"].interval_s == 3600.0
    on = load_config(None, ["hardware=none", 'rank_dumps=["/logs/{job}/x_*"]'])
    assert {each.name: each for each in build_sources(on, Gpus())}["rank_dumps"].interval_s == 2.0
    for pattern in ("logs/x", "/logs/**/x", "/{job}/{job}"):
        with pytest.raises(SettingsError, match="absolute"):
            load_config(None, [f'rank_dumps=["{pattern}"]'])


def test_no_report_is_summed_with_another() -> None:
    merger = EventMerger(expect_kernel_log=True)
    one = NodeEvent(1, None, EventKind.RANK, "collective", "a", "rank_dumps", forgeable=True)
    assert [merger.offer(one), merger.offer(one)] == [[one], [one]]


@pytest.mark.parametrize("write", [json.dumps, pickle.dumps])
def test_a_forged_dump_of_many_values_is_not_read(
    logs: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[object], str | bytes]
) -> None:
    """Found by an attack: one of 16 MB took 570 MB, and systemd ends an agent at 256: the node had been silent."""
    assert rank_dumps.MAX_VALUES * 100 < 128 << 20
    monkeypatch.setattr(rank_dumps, "MAX_VALUES", 1000)
    made = write({"entries": [1.5] * 900})
    found, path = source(logs), logs / "trace_rank_0"
    path.write_bytes(made.encode() if isinstance(made, str) else made)
    assert len(events(found)) == 1
    made = write({"entries": [1.5] * 1100})
    path.write_bytes(made.encode() if isinstance(made, str) else made)
    assert events(found) == []


def test_thousands_of_old_dumps_do_not_hide_a_new_one(logs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by an attack: where nobody removes dumps, the limit was full of old ones, and no hang was named."""
    monkeypatch.setattr(rank_dumps, "MAX_FILES", 4)
    for rank in range(40):
        os.utime(leave(logs, rank % 4).rename(logs / f"trace_rank_{100 + rank}.json"), (1e9, 1e9))
    for rank in range(4):
        leave(logs, rank)
    assert len(events(source(logs))) == 4

"""A training loop's reports: over a real socket, from many processes, forged, in a flood, and with nobody there."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import shutil
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from drover_agent.client.training_steps import Reporter
from drover_agent.sources.base import Entity, Reading
from drover_agent.sources.gpus import Gpus
from drover_agent.sources.workloads.peaks import PEAKS, bf16_peak_flops
from drover_agent.sources.workloads.steps import (
    MAX_DATAGRAM,
    MAX_NAMES,
    MAX_NAMES_OF_USER,
    MAX_PER_TICK,
    MAX_RANKS,
    NAMES,
    NEW_NAME_S,
    RETRY_S,
    STALE_S,
    JunkError,
    Report,
    StepsSource,
    read_report,
)
from drover_core.metrics.catalog import Scope
from testbed.steps_listening import GOOD, Listening, T, Ticks, h100s, row
from testbed.waiting import wait_until


@pytest.fixture
def path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="steps") as folder:  # short, as the paths of Unix sockets must be
        yield Path(folder) / "steps.sock"


@pytest.fixture
def listening(path: Path) -> Iterator[Listening]:
    one = Listening(path)
    yield one
    one.source.close()


def absences(reading: Reading) -> dict[str, str]:
    return {name: why.value for _, name, why in reading.absent}


def test_the_row_is_the_median_of_the_ranks_that_report_now(listening: Listening) -> None:
    times = {0: 1.0, 1: 1.1, 2: 1.2, 3: 9.0}
    reading = listening.after(lambda: [listening.send(rank=r, step_time_s=s) for r, s in times.items()], 4)
    assert row(reading)["step_time_s"] == 1.1
    listening.ticks.now_s += 20  # only the slow one goes on
    assert row(listening.after(lambda: listening.send(rank=3, step_time_s=9.0)))["step_time_s"] == 9.0


def test_a_loop_that_stands_still_is_lost_and_not_frozen(listening: Listening) -> None:
    listening.after(lambda: listening.send(step_time_s=20.0))
    for waited_s in (STALE_S + 1, 5 * 20.0 - STALE_S - 2):
        listening.ticks.now_s += waited_s
        assert listening.source.read(T) == Reading(), "it may be a long step"
    listening.ticks.now_s += 3
    reading = listening.source.read(T)
    assert absences(reading) == dict.fromkeys(NAMES, "lost")
    assert [entity.key for entity, _, _ in reading.absent] == ["n1/pretrain"] * len(NAMES)
    assert listening.source.read(T) == Reading()
    assert row(listening.after(lambda: listening.send()))["step_time_s"] == 0.5


@pytest.mark.parametrize(
    ("gpus", "flops", "why"),
    [
        (Gpus(), 1e15, "unsupported"),
        (h100s(8, "NVIDIA Imaginary 9000"), 1e15, "unsupported"),
        (h100s(), None, "unsupported"),
        (h100s(), 1e19, "out-of-range"),
    ],
)
def test_mfu_is_absent_where_it_is_not_known(path: Path, gpus: Gpus, flops: float | None, why: str) -> None:
    listening = Listening(path, gpus)
    reading = listening.after(lambda: listening.send(flops=flops))
    assert absences(reading)["mfu_ratio"] == why
    assert "mfu_ratio" not in row(reading)
    listening.source.close()


def test_two_models_on_a_node_have_no_common_peak(path: Path) -> None:
    gpus = h100s()
    gpus.set_entity(Entity(Scope.GPU, "other", 8, model="NVIDIA A100-SXM4-80GB"))
    listening = Listening(path, gpus)
    assert absences(listening.after(lambda: listening.send(flops=1e15)))["mfu_ratio"] == "unsupported"
    listening.source.close()


@pytest.mark.parametrize(
    "junk",
    [
        b"", b"\xff\xfe", b"[]", b"null", b"{}", b"[" * 1000, json.dumps(GOOD | {"v": 2}).encode(),
        *(json.dumps(GOOD | {key: value}).encode() for key, value in (
            ("name", "../etc"), ("name", 7), ("name", "a\nb"), ("rank", -1), ("rank", True), ("rank", 1e30),
            ("world_size", 0), ("step_time_s", 0), ("step_time_s", "1"), ("step_time_s", 1e9), ("step_time_s", None),
            ("tokens", -5), ("flops", 1e31), ("flops", [1]),
        )),
        b'{"v": 1, "name": "x", "rank": 0, "world_size": 1, "step_time_s": NaN}',
        b'{"v": 1, "name": "x", "rank": 0, "world_size": 1, "step_time_s": 1e999}',
        b'{"v": 1, "name": "x", "rank": 0, "world_size": 1, "step_time_s": 1' + b"0" * 900 + b"}",
    ],
)  # fmt: skip
def test_junk_is_refused_with_a_reason(junk: bytes) -> None:
    with pytest.raises(JunkError, match=r"it is no|its .* is none"):
        read_report(junk)


def test_keys_of_a_newer_reporter_are_skipped() -> None:
    assert read_report(json.dumps(GOOD | {"loss": 2.5}).encode()).step_time_s == 0.5


def test_junk_is_counted_logged_once_and_touches_no_row(listening: Listening, caplog: pytest.LogCaptureFixture) -> None:
    def send() -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as one:
            one.connect(str(listening.path))
            for data in (b"junk", b"junk", b"{}", b"x" * (MAX_DATAGRAM + 1)):
                one.send(data)

    assert listening.after(send, 4) == Reading()
    assert listening.source.junk == 4
    texts = [r.getMessage() for r in caplog.records]
    assert len(texts) == 3
    assert all(f"uid {os.getuid()}" in text for text in texts)
    assert row(listening.after(lambda: listening.send()))["step_time_s"] == 0.5


def test_a_workload_belongs_to_the_user_who_reports_it(listening: Listening) -> None:
    source = listening.source
    source.take(read_report(json.dumps(GOOD).encode()), uid=1001)
    with pytest.raises(JunkError, match="is that of uid 1001"):
        source.take(read_report(json.dumps(GOOD | {"step_time_s": 9.0}).encode()), uid=1002)
    assert row(source.read(T))["step_time_s"] == 0.5
    listening.ticks.now_s += STALE_S + 1
    source.read(T)
    source.take(read_report(json.dumps(GOOD | {"step_time_s": 9.0}).encode()), uid=1002)
    assert row(source.read(T))["step_time_s"] == 9.0, "its name is free when it has ended"


def test_names_and_ranks_are_bounded(listening: Listening) -> None:
    def report(**fields: Any) -> Report:
        return read_report(json.dumps(GOOD | fields).encode())

    for number in range(MAX_NAMES):
        listening.source.take(report(name=f"w{number}"), number // MAX_NAMES_OF_USER)
    with pytest.raises(JunkError, match=f"{MAX_NAMES} workloads"):
        listening.source.take(report(name="one-more"), 99)
    for rank in range(MAX_RANKS - 1):
        listening.source.take(report(name="w0", rank=rank + 10), 0)
    with pytest.raises(JunkError, match=f"{MAX_RANKS} ranks"):
        listening.source.take(report(name="w0", rank=9), 0)
    assert len(listening.source.read(T).rows) == MAX_NAMES


def test_one_user_leaves_room_for_others(listening: Listening) -> None:
    def take(name: str, uid: int) -> None:
        listening.source.take(read_report(json.dumps(GOOD | {"name": name}).encode()), uid)

    for number in range(MAX_NAMES_OF_USER):
        take(f"w{number}", 1001)
    with pytest.raises(JunkError, match="of uid 1001 report already"):
        take("one-more", 1001)
    take("another", 1002)
    take("w0", 1001)  # of its own it may report


def test_names_that_never_come_back_fill_no_store(listening: Listening) -> None:
    """Each is a row, its absences and a thing to remember, for ever."""
    began = 0
    for _ in range(200):
        for number in range(MAX_NAMES_OF_USER):
            with contextlib.suppress(JunkError):
                listening.source.take(read_report(json.dumps(GOOD | {"name": f"n{began}-{number}"}).encode()), 1001)
                began += 1
        listening.ticks.now_s += STALE_S + 1
        listening.source.read(T)
    assert began <= MAX_NAMES + 200 * (STALE_S + 1) / NEW_NAME_S
    listening.ticks.now_s += MAX_NAMES * NEW_NAME_S
    listening.source.take(read_report(json.dumps(GOOD | {"name": "later"}).encode()), 1001)


def test_numbers_of_numpy_are_numbers(listening: Listening) -> None:
    numbers: list[Any] = [np.int64(100), np.float32(2e15), np.int64(8), np.int64(3)]
    reporter = Reporter("pretrain", *numbers, socket_path=str(listening.path))
    found = row(listening.after(lambda: reporter.step(np.float64(0.5))))
    assert (found["step_time_s"], found["tokens_per_step"]) == (0.5, 100)
    assert listening.source.junk == 0


def test_a_job_name_of_many_bytes_still_fits(listening: Listening, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DROVER_JOB", "训" * 200)
    reporter = Reporter("x" * 64, 1e15, 1e15, socket_path=str(listening.path))
    assert listening.after(lambda: reporter.step(1.0)).rows


def test_a_flood_is_cut_off_until_the_next_tick(listening: Listening) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as flood:
        flood.setblocking(False)
        flood.connect(str(listening.path))

        def pour() -> bool:
            """Whether as much was taken as a tick may take, and senders are turned away now."""
            try:
                while True:
                    flood.send(b"junk")
            except BlockingIOError:
                return listening.source.received >= MAX_PER_TICK

        wait_until(pour, "the source has had enough")
        assert listening.source.received == MAX_PER_TICK
        listening.source.read(T)
        wait_until(lambda: listening.source.received > MAX_PER_TICK, "the next tick takes more")


def test_without_a_folder_there_is_nothing_and_it_is_reported_once(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ticks = Ticks()
    source = StepsSource("n1", path / "no" / "steps.sock", Gpus(), ticks)
    with caplog.at_level(logging.INFO):
        for _ in range(5):
            assert source.read(T) == Reading()
            ticks.now_s += RETRY_S
    [record] = caplog.records
    assert "RuntimeDirectory=drover" in record.getMessage()
    path.mkdir()
    (path / "no").mkdir()
    source.read(T)
    assert (path / "no" / "steps.sock").is_socket()
    source.close()
    assert not (path / "no" / "steps.sock").exists()


def test_a_socket_that_was_removed_is_made_again(listening: Listening) -> None:
    listening.ticks.now_s += RETRY_S
    listening.source.read(T)
    shutil.rmtree(listening.path.parent)
    listening.path.parent.mkdir()
    listening.ticks.now_s += RETRY_S
    assert row(listening.after(lambda: (listening.source.read(T), listening.send())))["step_time_s"] == 0.5
    others = [thread for thread in threading.enumerate() if thread.name == "steps"]
    wait_until(lambda: sum(thread.is_alive() for thread in others) <= 1, "the old one's thread ends")


def test_a_socket_that_fails_is_made_again_and_the_loop_that_stood_still_is_reported(listening: Listening) -> None:
    class Broken:
        def recvmsg(self, *_: int) -> None:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")

        def shutdown(self, _: int) -> None:
            raise OSError(errno.EBADF, "Bad file descriptor")

        def close(self) -> None:
            """Nothing is open."""

    source = listening.source
    listening.after(lambda: listening.send())
    source._drop()
    wait_until(lambda: all(thread.name != "steps" for thread in threading.enumerate()), "its thread has ended")
    broken: Any = Broken()
    source._socket, source._next_try_s = broken, listening.ticks.now_s + 10 * STALE_S
    source._receive(broken)
    assert source._socket is None
    listening.ticks.now_s += STALE_S + 1
    assert absences(source.read(T)) == dict.fromkeys(NAMES, "lost"), "though nobody can report now"
    listening.ticks.now_s += 10 * STALE_S
    assert row(listening.after(lambda: (source.read(T), listening.send())))["step_time_s"] == 0.5


def test_its_thread_ends_with_it(path: Path) -> None:
    others = set(threading.enumerate())
    idle, exhausted = Listening(path), Listening(path.with_name("other.sock"))
    mine = {thread for thread in set(threading.enumerate()) - others if thread.name == "steps"}
    assert len(mine) == 2
    exhausted.source._room = 0
    exhausted.send()  # so that it does not wait for a datagram
    wait_until(lambda: not exhausted.source._more.is_set(), "it waits for room")
    idle.source.close()
    exhausted.source.close()
    wait_until(lambda: not any(thread.is_alive() for thread in mine), "both threads end")


def test_any_user_may_write_to_the_socket(listening: Listening) -> None:
    assert listening.path.stat().st_mode & 0o777 == 0o666


def test_a_socket_in_use_is_left_to_its_agent_and_a_dead_one_is_not(listening: Listening) -> None:
    second = StepsSource("n1", listening.path, Gpus(), Ticks())
    assert second.read(T) == Reading()
    second.close()
    assert listening.path.exists(), "`drover-agent once` takes nothing from the running agent"
    assert row(listening.after(lambda: listening.send()))
    stale = listening.path.with_name("stale.sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as killed:
        killed.bind(str(stale))
    again = Listening(stale)
    assert row(again.after(lambda: again.send()))
    again.source.close()


def test_a_file_in_the_way_is_not_removed(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path.write_text("mine")
    with caplog.at_level(logging.INFO):
        StepsSource("n1", path, Gpus()).read(T)
    assert path.read_text() == "mine"
    assert "no socket; remove it" in caplog.records[0].getMessage()


# ---- peaks


@pytest.mark.parametrize(
    ("model", "tflops"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("A100-SXM4-40GB", 312),
        ("NVIDIA A800-SXM4-80GB", 312),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H800", None),
        ("NVIDIA H200", 989.4),
        ("NVIDIA H200 NVL", 835.5),
        ("NVIDIA GH200 480GB", 989.4),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
        ("NVIDIA L40S", 362.05),
        ("NVIDIA L40", 181.05),
        ("NVIDIA L4", 121),
        ("NVIDIA A10", 125),
        ("Tesla V100-SXM2-32GB", None),
        ("NVIDIA A1000 Laptop GPU", None),
        ("", None),
    ],
)
def test_peaks_by_nvmls_names(model: str, tflops: float | None) -> None:
    assert bf16_peak_flops(model) == (None if tflops is None else tflops * 1e12)
    assert len({pattern for pattern, _ in PEAKS}) == len(PEAKS)

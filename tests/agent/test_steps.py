"""A training loop's reports: over a real socket, from many processes, forged, in a flood, and with nobody there."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import drover_agent.steps
from drover_agent.sources.base import Entity, Reading
from drover_agent.sources.gpus import Gpus
from drover_agent.sources.peaks import PEAKS, bf16_peak_flops
from drover_agent.sources.steps import (
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
from drover_agent.steps import RECONNECT_S, Reporter, transformer_flops
from drover_proto.catalog import Scope
from testbed.waiting import wait_until

T = 1_800_000_000_000
GOOD = {"v": 1, "name": "pretrain", "rank": 3, "world_size": 8, "step": 5, "steps": 1, "step_time_s": 0.5}


class Ticks:
    """The source's clock, which stands still unless it is set."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Listening:
    """A source with its socket open."""

    def __init__(self, path: Path, gpus: Gpus | None = None) -> None:
        self.path, self.ticks = path, Ticks()
        self.source = StepsSource("n1", path, gpus or Gpus(), self.ticks)
        self.source.read(T)

    def after(self, send: Callable[[], object], heard: int = 1) -> Reading:
        """The reading after `send`, when this many datagrams more were heard."""
        before = self.source.heard
        send()
        wait_until(lambda: self.source.heard >= before + heard, "the reports are heard")
        return self.source.read(T)

    def send(self, **fields: object) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as one:
            one.connect(str(self.path))
            one.send(json.dumps(GOOD | fields).encode())


@pytest.fixture
def path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="steps") as folder:  # short, as the paths of Unix sockets must be
        yield Path(folder) / "steps.sock"


@pytest.fixture
def listening(path: Path) -> Iterator[Listening]:
    one = Listening(path)
    yield one
    one.source.close()


def row(reading: Reading) -> dict[str, float]:
    [(entity, values)] = reading.rows
    assert entity.scope is Scope.WORKLOAD
    return dict(values)


def absences(reading: Reading) -> dict[str, str]:
    return {name: why.value for _, name, why in reading.absent}


def h100s(count: int = 8, model: str = "NVIDIA H100 80GB HBM3") -> Gpus:
    gpus = Gpus()
    for slot in range(count):
        gpus.tell(Entity(Scope.GPU, f"S{slot}", slot, serial=f"S{slot}", model=model))
    return gpus


# ---- the reporter


def test_a_loop_is_one_row_with_its_own_values(path: Path) -> None:
    listening = Listening(path, h100s())
    flops = transformer_flops(7e9, 4_194_304)
    reporter = Reporter("pretrain", 4_194_304, flops, world_size=512, rank=0, socket_path=str(path))
    reading = listening.after(lambda: reporter.step(step_time_s=0.8))
    assert row(reading) == {
        "step_time_s": 0.8,
        "tokens_per_step": 4_194_304,
        "flops_per_step": 6 * 7e9 * 4_194_304,
        "mfu_ratio": pytest.approx(6 * 7e9 * 4_194_304 / 0.8 / (512 * 989.4e12)),
    }
    [(entity, _)] = reading.rows
    assert (entity.key, entity.link) == ("n1/pretrain", "pretrain")
    assert listening.source.read(T) == Reading(), "no news, no row"
    listening.source.close()


def test_it_measures_the_time_between_calls(listening: Listening, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Ticks()
    monkeypatch.setattr(drover_agent.steps, "monotonic", clock)
    reporter = Reporter("pretrain", socket_path=str(listening.path))

    def steps() -> None:
        reporter.step()  # begins
        for taken_s in (0.25, 0.25, 0.25, 0.25, 1.0):
            clock.now_s += taken_s
            reporter.step()

    assert row(listening.after(steps, 2))["step_time_s"] == pytest.approx((0.25 * 3 + 1.0) / 4), (
        "the mean since the last"
    )
    clock.now_s += 60  # an evaluation
    reporter.reset()

    def one_more() -> None:
        clock.now_s += 0.5
        reporter.step()

    assert row(listening.after(one_more))["step_time_s"] == 0.5
    assert reporter.unsent == 0


@pytest.mark.parametrize("wrong", [0.0, -1.0, float("nan"), float("inf")])
def test_a_time_that_is_none_is_left_out(listening: Listening, wrong: float) -> None:
    reporter = Reporter("pretrain", socket_path=str(listening.path))
    assert row(listening.after(lambda: (reporter.step(wrong), reporter.step(2.0))))["step_time_s"] == 2.0


def test_without_an_agent_the_loop_goes_on_and_its_steps_are_told_later(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Ticks()
    monkeypatch.setattr(drover_agent.steps, "monotonic", clock)
    reporter = Reporter("pretrain", socket_path=str(path))
    for _ in range(10):
        clock.now_s += 1
        reporter.step(1.0)
    assert reporter.unsent == 10
    listening = Listening(path)
    clock.now_s += RECONNECT_S
    assert row(listening.after(lambda: reporter.step(12.0)))["step_time_s"] == 2.0, "the mean of all eleven"
    listening.source.close()


def test_an_agent_that_begins_anew_is_found_again(path: Path) -> None:
    first = Listening(path)
    reporter = Reporter("pretrain", socket_path=str(path))
    first.after(lambda: reporter.step(1.0))
    first.source.close()
    assert not path.exists()
    second = Listening(path)
    for _ in range(2):  # the first one finds out that the agent has gone
        reporter._next_send = reporter._next_connect = 0.0
        reporter.step(3.0)
    assert reporter.unsent == 1
    wait_until(lambda: second.source.heard, "the report reaches the new agent")
    assert row(second.source.read(T))["step_time_s"] == 3.0
    second.source.close()


def test_an_agent_that_is_behind_blocks_nothing(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as deaf:
        deaf.bind(str(path))
        reporter = Reporter("pretrain", socket_path=str(path))
        limit = int(Path("/proc/sys/net/unix/max_dgram_qlen").read_text()) + 5
        for _ in range(limit):
            reporter._next_send = 0.0
            reporter.step(1.0)
        assert 0 < reporter.unsent < limit
        for _ in range(3):
            deaf.recv(MAX_DATAGRAM)
        reporter._next_send, unsent = 0.0, reporter.unsent
        reporter.step(1.0)
        assert reporter.unsent == unsent, "there is room again"


def test_a_forked_process_reports_for_itself(listening: Listening) -> None:
    reporter = Reporter("pretrain", rank=0, socket_path=str(listening.path))
    listening.after(lambda: reporter.step(1.0))

    def child() -> None:
        pid = os.fork()
        if pid == 0:
            reporter._next_send = 0.0
            reporter.step(7.0)
            os._exit(reporter.unsent)
        assert os.waitpid(pid, 0)[1] == 0

    assert row(listening.after(child))["step_time_s"] == 7.0
    reporter._next_send = 0.0
    assert row(listening.after(lambda: reporter.step(5.0)))["step_time_s"] == 5.0, "the parent's socket is its own"


def test_many_ranks_in_processes_of_their_own_are_one_row(listening: Listening) -> None:
    program = (
        "from drover_agent.steps import Reporter; import sys; r = Reporter('pretrain', socket_path=sys.argv[1]);"
        "r.step(float(sys.argv[2])); sys.exit(r.unsent)"
    )
    ranks = 16

    def start() -> None:
        for rank in range(ranks):
            env = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(ranks)}
            args = [sys.executable, "-c", program, str(listening.path), str(1.0 + rank / 100)]
            processes.append(subprocess.Popen(args, env=env))

    processes: list[subprocess.Popen[bytes]] = []
    reading = listening.after(start, ranks)
    assert [process.wait() for process in processes] == [0] * ranks
    assert row(reading)["step_time_s"] == pytest.approx(1.07), "the lower median of 16"


def test_its_file_stands_alone(tmp_path: Path) -> None:
    """Copied beside a training loop it imports nothing but the standard library."""
    copy = tmp_path / "reporter.py"
    shutil.copy(drover_agent.steps.__file__, copy)
    program = (
        "import sys; before = set(sys.modules); import reporter; r = reporter.Reporter('x', socket_path='/no/socket');"
        "r.step(1.0); assert r.unsent == 1;"
        "new = {m.partition('.')[0] for m in set(sys.modules) - before} - {'reporter'};"
        "assert new <= sys.stdlib_module_names, new"
    )
    subprocess.run(
        [sys.executable, "-I", "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {program}"], check=True
    )


def test_what_it_knows_of_its_job_goes_along(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "4242")
    monkeypatch.setenv("SLURM_PROCID", "17")
    monkeypatch.setenv("SLURM_NTASKS", "64")
    monkeypatch.setenv("DROVER_STEPS_SOCKET", str(path))
    for name in ("RANK", "WORLD_SIZE", "DROVER_JOB"):
        monkeypatch.delenv(name, raising=False)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as agent:
        agent.bind(str(path))
        Reporter("pretrain", tokens_per_step=100).step(0.5)
        sent = agent.recv(MAX_DATAGRAM)
    assert json.loads(sent) == {
        "v": 1, "name": "pretrain", "rank": 17, "world_size": 64, "tokens": 100, "job": "4242",
        "step": 1, "steps": 1, "step_time_s": 0.5,
    }  # fmt: skip
    assert read_report(sent) == Report("pretrain", 17, 64, 0.5, 100, None, "4242")


@pytest.mark.parametrize("name", ["", "a b", "../x", "x" * 65, "ü"])
def test_names_that_the_agent_would_not_take(name: str) -> None:
    with pytest.raises(ValueError, match="64 at most"):
        Reporter(name)


def test_flops_of_a_transformer() -> None:
    assert transformer_flops(7e9, 1000) == 6 * 7e9 * 1000
    assert transformer_flops(7e9, 1000, 32, 4096, 2048) == 1000 * (6 * 7e9 + 12 * 32 * 4096 * 2048)
    with pytest.raises(ValueError, match="tokens_per_step"):
        Reporter("x", tokens_per_step=float("nan"))


# ---- the source


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
    gpus.tell(Entity(Scope.GPU, "other", 8, model="NVIDIA A100-SXM4-80GB"))
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
    take("w0", 1001)  # of its own it may tell


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
                return listening.source.heard >= MAX_PER_TICK

        wait_until(pour, "the source has had enough")
        assert listening.source.heard == MAX_PER_TICK
        listening.source.read(T)
        wait_until(lambda: listening.source.heard > MAX_PER_TICK, "the next tick takes more")


def test_without_a_folder_there_is_nothing_and_it_is_told_once(path: Path, caplog: pytest.LogCaptureFixture) -> None:
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


def test_a_socket_that_was_removed_is_made_anew(listening: Listening) -> None:
    listening.ticks.now_s += RETRY_S
    listening.source.read(T)
    shutil.rmtree(listening.path.parent)
    listening.path.parent.mkdir()
    listening.ticks.now_s += RETRY_S
    assert row(listening.after(lambda: (listening.source.read(T), listening.send())))["step_time_s"] == 0.5
    others = [thread for thread in threading.enumerate() if thread.name == "steps"]
    wait_until(lambda: sum(thread.is_alive() for thread in others) <= 1, "the old one's thread ends")


def test_a_socket_that_fails_is_made_anew_and_what_stood_still_is_told(listening: Listening) -> None:
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

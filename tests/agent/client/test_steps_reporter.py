"""What a training loop reports, as the agent's source receives it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import drover_agent.client.training_steps
from drover_agent.client.training_steps import RECONNECT_S, Reporter, transformer_flops
from drover_agent.sources.base import Reading
from drover_agent.sources.workloads.steps import MAX_DATAGRAM, SAVES_AHEAD, SAVES_S, Report, read_report
from drover_core.jobs.checkpoint import CheckpointReport, from_message
from drover_core.model.kinds import EventKind
from drover_core.model.reports import event_text
from testbed.steps_listening import Listening, T, Ticks, h100s, row
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


def test_a_job_that_is_asked_saves_itself_and_says_so(listening: Listening, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "4242")
    reporter = Reporter("pretrain", rank=0, socket_path=str(listening.path))
    saves: list[int] = []
    before = signal.getsignal(signal.SIGUSR1)
    try:
        reporter.on_save(lambda: saves.append(1))
        listening.after(lambda: reporter.step(step_time_s=0.5))
        os.kill(os.getpid(), signal.SIGUSR1)
        assert (reporter.save_asked, saves) == (True, [])
        reading = listening.after(reporter.step)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert (saves, reporter.save_asked) == ([1], False)
    [event] = reading.events
    assert (event.kind, event.code, event.forgeable) == (EventKind.RANK, "checkpoint", True)
    assert from_message(event.message) == CheckpointReport("4242", 2), "the step that was just done is in it"
    assert event_text(event.kind, event.message) == "job 4242 saved a checkpoint at step 2"
    steps = [
        from_message(event.message).step
        for number in range(SAVES_AHEAD + 3)
        for event in listening.after(lambda number=number: reporter.saved(900 + number)).events  # type: ignore[misc]  # bound now
    ]
    assert steps == [900 + number for number in range(SAVES_AHEAD - 1)], "of many in a row the newest waits"
    listening.ticks.now_s += SAVES_S
    [event] = listening.source.read(T).events
    assert from_message(event.message).step == 900 + SAVES_AHEAD + 2


def test_a_checkpoint_of_another_users_workload_is_left_out(listening: Listening) -> None:
    listening.source.take(Report("pretrain", 0, 8, 0.5, None, None, "7"), uid=4321)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as one:
        one.connect(str(listening.path))
        reading = listening.after(lambda: one.send(b'{"v":1,"name":"pretrain","job":"7","saved":5}'))
        assert reading.events == []
        assert listening.source.junk == 1
        listening.after(lambda: one.send(b'{"v":1,"name":"pretrain","saved":5}'))
    assert listening.source.junk == 2, "a checkpoint of no job"


def test_only_rank_0_reports_a_checkpoint(listening: Listening) -> None:
    reporter = Reporter("pretrain", rank=3, socket_path=str(listening.path))
    reporter.saved(5)
    assert (reporter.unsent, listening.source.received) == (0, 0)


def test_it_measures_the_time_between_calls(listening: Listening, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Ticks()
    monkeypatch.setattr(drover_agent.client.training_steps, "monotonic", clock)
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


def test_without_an_agent_the_loop_goes_on_and_its_steps_are_reported_later(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Ticks()
    monkeypatch.setattr(drover_agent.client.training_steps, "monotonic", clock)
    reporter = Reporter("pretrain", socket_path=str(path))
    for _ in range(10):
        clock.now_s += 1
        reporter.step(1.0)
    assert reporter.unsent == 10
    listening = Listening(path)
    clock.now_s += RECONNECT_S
    assert row(listening.after(lambda: reporter.step(12.0)))["step_time_s"] == 2.0, "the mean of all eleven"
    listening.source.close()


def test_an_agent_that_restarts_is_found_again(path: Path) -> None:
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
    wait_until(lambda: second.source.received, "the report reaches the new agent")
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
        "from drover_agent.client.training_steps import Reporter; import sys;"
        "r = Reporter('pretrain', socket_path=sys.argv[1]);"
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
    """Copied next to a training loop it imports nothing but the standard library."""
    copy = tmp_path / "reporter.py"
    shutil.copy(drover_agent.client.training_steps.__file__, copy)
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


def test_a_file_that_changes_asks_the_job_to_save_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drover_agent.client.training_steps, "LOOK_S", 0.0)
    file, saves = tmp_path / "asked", []
    file.write_text("2026-11-28T10:00:00Z")  # of before this container
    before = signal.getsignal(signal.SIGUSR1)
    try:
        reporter = Reporter("a", socket_path=str(tmp_path / "none"))
        reporter.on_save(lambda: saves.append(1), path=str(file))
        for text, total in (("", 0), ("2026-11-28T11:00:00Z", 1), ("2026-11-28T11:00:00Z", 1), ("12:00", 2)):
            file.write_text(text)
            reporter.step(0.5)
            assert len(saves) == total
        file.unlink()
        reporter.step(0.5)
        assert len(saves) == 2
    finally:
        signal.signal(signal.SIGUSR1, before)

"""A scheduler's job that holds the node while it is probed: the real process of the job, and the probe service."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from drover_agent.probes import hold, plan, runner, service
from drover_agent.probes.exchange import JOB, ExchangeFolder, ProbeAnswer, ProbeAsk, read_answer
from drover_agent.probes.service import Service
from testbed.waiting import wait_until

ID = f"p{os.getpid()}x1"
PLAYED = Path(__file__).resolve().parents[2] / "testbed/probe_child.py"


def command(id_: str) -> list[str]:
    return [sys.executable, "-m", "drover_agent.main", "probe", "--hold", id_]


@pytest.fixture
def job() -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(command(ID), stderr=subprocess.PIPE, text=True)
    yield process
    process.kill()
    process.communicate()


def joined() -> hold.Held:
    return hold.join(ID, threading.Event().wait)


def test_the_job_holds_until_the_probe_is_over(job: subprocess.Popen[str]) -> None:
    held = joined()
    assert held.lost() == ""
    assert job.poll() is None
    held.close()
    _, said = job.communicate(timeout=120)
    assert (job.returncode, said) == (0, "the probe is over\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGTSTP], ids=["ended", "suspended"])
def test_a_job_that_must_end_waits_until_the_probe_has_given_way(
    job: subprocess.Popen[str], number: signal.Signals
) -> None:
    held = joined()
    job.send_signal(number)
    wait_until(held.lost, "the probe knows")
    assert held.lost() == hold.WANTED
    assert job.poll() is None, "else the next job would find the GPUs held"
    held.close()
    _, said = job.communicate(timeout=120)
    assert (job.returncode, said) == (0, f"{hold.WANTED}; the probe has given way\n")


def test_a_job_that_is_killed_reports_too(job: subprocess.Popen[str]) -> None:
    held = joined()
    job.kill()
    wait_until(held.lost, "the probe knows")
    held.close()


def test_a_job_that_no_probe_comes_to_ends() -> None:
    assert hold.hold(ID, wait_s=0.01) == "no probe came"


def test_one_that_must_end_before_does_so_at_once(job: subprocess.Popen[str]) -> None:
    joined().close()  # it has begun
    job.communicate(timeout=120)
    again = subprocess.Popen(command(ID), stderr=subprocess.PIPE, text=True)
    wait_until(lambda: hold._name(ID).replace("\0", "@") in Path("/proc/net/unix").read_text(), "it listens")
    again.terminate()
    _, said = again.communicate(timeout=120)
    assert (again.returncode, said) == (0, "no probe came\n")


def test_without_a_job_nothing_holds() -> None:
    with pytest.raises(hold.NotHeldError, match="no job of the scheduler holds this node"):
        hold.join("nobody", threading.Event().wait, wait_s=0.0)


def test_two_jobs_do_not_hold_for_one_request() -> None:
    with socket.socket(socket.AF_UNIX) as taken:
        taken.bind(hold._name(f"{ID}y"))
        second = subprocess.run(command(f"{ID}y"), capture_output=True, text=True, timeout=120, check=False)
    assert second.returncode == 2
    assert second.stderr == f"drover-agent probe: --hold {ID}y: Address already in use\n"


def test_another_users_job_is_not_taken_for_one(job: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hold, "_trusted", lambda _: False)
    with pytest.raises(hold.NotHeldError, match="another user's"):
        joined()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ExchangeFolder:
    """Of a service whose probes hang."""
    monkeypatch.setattr(runner, "CHILD", (sys.executable, str(PLAYED), "hang"))
    monkeypatch.setattr(plan, "has_torch", lambda: True)
    made = ExchangeFolder(tmp_path / "probes")
    made.make()
    made.put(made.requests, ID, ProbeAsk(ID, ("gemm_bf16",), protection=JOB))
    return made


def served(folder: ExchangeFolder) -> ProbeAnswer:
    Service(folder.root).serve(linger_s=0.01)
    return read_answer(folder.results / f"{ID}.json")


def test_the_service_runs_nothing_for_a_request_that_no_job_holds(
    folder: ExchangeFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hold.join, "__defaults__", (0.0,))
    answer = served(folder)
    assert (answer.end, answer.results) == ("refused", ())
    assert answer.detail.startswith("no job of the scheduler holds this node")


def test_a_probe_gives_way_when_its_job_is_preempted_and_only_then_the_job_ends(
    folder: ExchangeFolder, job: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    log = service.log.info
    monkeypatch.setattr(
        service.log, "info", lambda *words: (log(*words), job.terminate() if "bf16" in words[0] else None)
    )  # once it is in its product
    answer = served(folder)
    assert (answer.end, answer.probe) == ("stopped", "gemm_bf16")
    assert answer.detail.endswith(f": {hold.WANTED}")
    _, said = job.communicate(timeout=120)
    assert said == f"{hold.WANTED}; the probe has given way\n"

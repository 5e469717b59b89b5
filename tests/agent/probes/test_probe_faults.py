"""Faults at the node through the real probe process, on the CPU device: each ends in the right result and state.

Those of the judgement (a GPU 5 % slow, a link at half width) and of the collector (a node that never answers) are in
tests/collector; the table in docs/reference/probes.md says where each is.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from drover_agent.probes import eligible, processes, runner
from drover_agent.probes.eligible import Guard
from drover_agent.probes.exchange import ProbeAnswer
from drover_agent.probes.relay import results_of
from drover_agent.probes.runner import End, Report, Request, Runner
from drover_collector.probes.judging.judgement import judge
from drover_collector.probes.judging.measurements import End as JudgedEnd
from drover_collector.probes.judging.measurements import Measurement
from drover_collector.store.repositories.probes import Key
from testbed.nvml import FakeNvml
from testbed.system import SYSTEM
from testbed.waiting import wait_until

# Not `importorskip`: each worker of pytest reads this file, and torch takes two seconds of CPU to import.
pytestmark = pytest.mark.skipif(not find_spec("torch"), reason="probes need torch: pip install 'drover[probe]'")

CHILD = Path(__file__).resolve().parents[2] / "testbed/probe_faults.py"
CGROUPS = Path("/sys/fs/cgroup")


def command(fault: str, file: Path) -> list[str]:
    return [sys.executable, str(CHILD), fault, str(file)]


def judged(report: Report) -> dict[int | None, bool | None]:
    """GPU -> verdict, of what the collector gets."""
    answered = results_of(ProbeAnswer("r", report.end, report.detail, results=tuple(report.results)), "n1", 1)
    return {
        v.measurement.gpu: v.ok
        for v in judge(
            [
                Measurement(r.node, r.gpu, r.probe, r.value, Key("board"), ok=r.ok, detail=r.detail)
                for r in answered
                if not r.end
            ]
        ).verdicts
    }


def nothing_is_left(report: Report, session: int, folder: Path) -> bool:
    return all(processes.is_dead(pid) for pid in processes.members(session)) and list(folder.iterdir()) == []


def test_one_bit_of_one_in_a_million_products_names_the_gpu(tmp_path: Path) -> None:
    request = Request(("sdc",), cpus=3, scale=0.001, folder=str(tmp_path))
    report = Runner(request, command=command("flip", tmp_path)).run()
    assert (report.end, report.detail) == (End.DONE, "")
    assert [(r.gpu, r.ok) for r in report.results] == [(0, True), (1, False), (2, True)]
    assert report.results[1].detail == "fp32 1024: 1 of 3 products differ from the first"
    assert judged(report) == {0: True, 1: False, 2: True}


def test_a_probe_that_hangs_is_reported_ended_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "SLACK_S", 0.5)
    sessions: list[int] = []
    request = Request(("launch", "gemm_bf16"), scale=0.01, folder=str(tmp_path))
    report = Runner(request, lambda s: (sessions.append(s), "")[1], command=command("hang", tmp_path)).run()
    assert (report.end, report.probe) == (End.HUNG, "gemm_bf16")
    assert report.detail.startswith("probe hung: gemm_bf16, cpu: bf16 256; nothing came for")
    assert [r.probe for r in report.results] == ["launch"], "what was measured before is kept"
    assert nothing_is_left(report, sessions[0], tmp_path)


@pytest.fixture
def job() -> Iterator[int]:
    process = subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE, start_new_session=True
    )
    yield process.pid
    process.communicate()


def test_a_job_that_arrives_has_its_gpu_back(
    fake_nvml: FakeNvml, job: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eligible, "LOOK_S", 0.02)
    fake_nvml.hold(0)
    (gpu,) = [gpu for gpu in eligible.look().gpus if gpu.slot == 0]
    sessions: list[int] = []
    computes, folder = tmp_path / "computes", tmp_path / "scratch"
    folder.mkdir()
    with Guard([gpu]) as guard:

        def needed(session: int) -> str:
            sessions.append(session)
            if computes.exists():  # the real process is within its product
                fake_nvml.hold(0, job)
            return guard.needed(session)

        request = Request(("gemm_bf16",), scale=1000.0, folder=str(folder))
        report = Runner(request, needed, command=command("job", computes)).run()
    assert report.end is End.STOPPED
    assert report.detail.startswith(f"gave way during gemm_bf16, cpu: bf16 256: GPU 0 is held by process {job} (")
    assert processes.is_dead(int(computes.read_text()))
    assert nothing_is_left(report, sessions[0], folder)


@pytest.fixture
def small() -> Iterator[Path]:
    """A cgroup that may take 400 MiB: importing torch fits, and not much more."""
    old = (CGROUPS / "memory").is_dir()  # of version 1
    made = CGROUPS / ("memory" if old else "") / f"drover-test-{os.getpid()}"
    try:
        made.mkdir()
        (made / ("memory.limit_in_bytes" if old else "memory.max")).write_text(str(400 << 20))
    except OSError as error:
        if SYSTEM:  # where nothing is skipped
            raise
        pytest.skip(f"no cgroup of memory can be made here: {error}")
    yield made
    wait_until(lambda: not (made / "cgroup.procs").read_text(), "the end of its processes")
    made.rmdir()


def test_a_probe_that_the_kernel_kills_for_memory_says_so_and_speaks_against_no_gpu(
    small: Path, tmp_path: Path
) -> None:
    sessions: list[int] = []
    request = Request(("launch", "gemm_bf16"), scale=0.01, folder=str(tmp_path))
    report = Runner(request, lambda s: (sessions.append(s), "")[1], command=command("oom", small)).run()
    assert (report.end, report.probe) == (End.MEMORY, "gemm_bf16")
    assert "was killed by SIGKILL during gemm_bf16" in report.detail
    assert "perhaps the kernel was out of memory" in report.detail
    assert nothing_is_left(report, sessions[0], tmp_path)
    ended = Measurement("n1", 3, "gemm_bf16", None, end=JudgedEnd(report.end.value), detail=report.detail)
    (verdict,) = judge([ended]).verdicts
    assert verdict.ok is None, "the host's memory: no word against a GPU that was named"
    hung = dataclasses.replace(ended, end=JudgedEnd.HUNG, tries=2)
    assert judge([hung]).verdicts[0].ok is False

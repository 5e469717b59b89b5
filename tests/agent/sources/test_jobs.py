"""Which job holds which GPU: trees that stand for /proc, a real gRPC server for the kubelet, and a real Slurm."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from drover_agent.commands.check import sources as check_sources
from drover_agent.commands.check.result import CheckState
from drover_agent.commands.read_all import SourceReading
from drover_agent.config import AgentConfig
from drover_agent.sources.base import Entity, Reading
from drover_agent.sources.gpus import Gpus
from drover_agent.sources.workloads.jobs import (
    GOOD_READS,
    HIDDEN,
    INITIAL,
    TROUBLE,
    JobsSource,
)
from drover_agent.sources.workloads.slurm import MAX_ENVIRONMENT, NO_ENVIRONMENT
from drover_core.metrics.catalog import Scope
from testbed.job_processes import T, namespace, node, process, source, uuid
from testbed.kubelet import Kubelet, pod, serving
from testbed.nvml import FakeNvml
from testbed.source_cases import cases_of, check, reported
from testbed.telemetry_server import TelemetryServer, play
from testbed.trees import plant
from testbed.waiting import until

CASES = [*cases_of("slurm"), *cases_of("kubernetes")]


def described(case: Path) -> Gpus:
    """The GPUs of a case and the processes on them; a GPU that it does not name could not be asked."""
    data: dict[str, Any] = json.loads((case / "gpus.json").read_text("utf-8"))
    gpus = node(data["gpus"])
    for slot in range(data["gpus"]):
        pids = data["pids"].get(str(slot))
        gpus.set_pids(slot, None if pids is None else tuple(pids))
    for mig, slot in data.get("mig", {}).items():
        gpus.set_entity(Entity(Scope.GPU, f"S{slot}", slot, uuid=mig, mig=mig))
    return gpus


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.parent.name}-{case.name}")
def test_case(case: Path, tmp_path: Path) -> None:
    plant(case / "tree.txt", tmp_path)
    socket = tmp_path / "kubelet.sock"
    jobs = source(described(case), tmp_path / "proc", socket)
    if (case / "pods.json").exists():
        with serving(socket, json.loads((case / "pods.json").read_text("utf-8"))):
            found = reported(jobs.read(T))
    else:
        found = reported(jobs.read(T))
    jobs.close()
    check(case, found)


# ---- in time


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """A machine with init alone."""
    process(tmp_path / "proc", 1, "systemd", 0)
    namespace(tmp_path / "proc", INITIAL)
    return tmp_path / "proc"


def end(proc: Path, *pids: int) -> None:
    for pid in pids:
        (proc / str(pid)).rename(proc.parent / f"ended-{pid}")


def start_job(proc: Path, job: int, environment: str | None = None) -> int:
    """Its step daemon, with a process of its own; gives that one."""
    daemon, child = 1000 * job, 1000 * job + 1
    process(proc, daemon, "slurmstepd", 1, cmdline=f"slurmstepd: [{job}.batch]\0")
    process(proc, child, "python", daemon, **({} if environment is None else {"environ": environment}))
    (proc / f"{daemon}/task/{daemon}/children").write_text(f"{child} ")
    return child


def test_changes_alone_are_reported(proc: Path) -> None:
    gpus = node(2)
    jobs = source(gpus, proc)
    assert jobs.read(T).holdings == [(0, None), (1, None)]
    child = start_job(proc, 7, "SLURM_JOB_ID=7\0SLURM_JOB_GPUS=1\0")
    assert jobs.read(T).holdings == [(1, "7")]
    gpus.set_pids(1, (child,))
    assert jobs.read(T).holdings == []
    end(proc, 7000, 7001)
    gpus.set_pids(1, ())
    assert jobs.read(T).holdings == [(1, None)]


def test_a_job_keeps_its_gpu_while_it_runs_though_its_process_died(proc: Path) -> None:
    gpus = node(2)
    jobs = source(gpus, proc)
    child = start_job(proc, 7)  # its environment cannot be read: what its process holds is all there is
    gpus.set_pids(0, (child,))
    assert jobs.read(T).holdings == [(0, "7")]  # nothing of GPU 1, which may be the job's as well
    end(proc, 7001)
    gpus.set_pids(0, ())
    assert jobs.read(T).holdings == []
    end(proc, 7000)
    assert jobs.read(T).holdings == [(0, None), (1, None)]


def test_one_job_follows_another_without_a_gap(proc: Path) -> None:
    gpus = node(1)
    jobs = source(gpus, proc)
    start_job(proc, 7, "SLURM_JOB_ID=7\0SLURM_JOB_GPUS=0\0")
    assert jobs.read(T).holdings == [(0, "7")]
    end(proc, 7000, 7001)
    start_job(proc, 8, "SLURM_JOB_ID=8\0SLURM_JOB_GPUS=0\0")
    assert jobs.read(T).holdings == [(0, "8")]


def test_a_job_that_ended_is_reported_though_its_gpu_cannot_be_asked(proc: Path) -> None:
    gpus = node(1)
    jobs = source(gpus, proc)
    start_job(proc, 7, "SLURM_JOB_ID=7\0SLURM_JOB_GPUS=0\0")
    assert jobs.read(T).holdings == [(0, "7")]
    end(proc, 7000, 7001)
    gpus.set_pids(0, None)
    assert jobs.read(T).holdings == [(0, None)]


def test_a_job_known_by_cgroups_alone_is_not_over_because_its_gpu_cannot_be_asked(proc: Path) -> None:
    """As where slurmd is not root's, so that its step daemons count for nothing."""
    gpus = node(1)
    process(proc, 800, "python", 1, cgroup="/system.slice/slurmstepd.scope/job_7/step_0/user/task_0")
    jobs = source(gpus, proc)
    gpus.set_pids(0, (800,))
    assert jobs.read(T).holdings == [(0, "7")]
    gpus.set_pids(0, None)
    assert jobs.read(T).holdings == []
    gpus.set_pids(0, ())
    assert jobs.read(T).holdings == [(0, None)]


def test_a_step_daemon_that_has_no_title_yet_is_looked_at_again(proc: Path) -> None:
    gpus = node(1)
    jobs = source(gpus, proc)
    child = start_job(proc, 7, "SLURM_JOB_ID=7\0SLURM_JOB_GPUS=0\0")
    title = proc / "7000/cmdline"
    title.write_text("/usr/sbin/slurmstepd\0")
    (proc / "7000/comm").write_text("slurmd\n")  # between fork and exec
    gpus.set_pids(0, (child,))
    jobs.read(T)
    (proc / "7000/comm").write_text("slurmstepd\n")
    jobs.read(T)
    title.write_text("slurmstepd: [7.batch]\0")
    assert jobs.read(T).holdings == [(0, "7")]


def test_a_step_daemon_that_is_still_called_as_the_thread_that_makes_it_is_found(proc: Path) -> None:
    gpus = node(1)
    jobs = source(gpus, proc)
    start_job(proc, 7, "SLURM_JOB_ID=7\0SLURM_JOB_GPUS=0\0")
    (proc / "7000/comm").write_text("worker[3]\n")
    jobs.read(T)
    (proc / "7000/comm").write_text("slurmstepd\n")
    assert jobs.read(T).holdings == [(0, "7")]


def test_processes_that_are_no_step_daemon_are_looked_at_twice_and_never_again(proc: Path) -> None:
    process(proc, 700, "bash", 1)
    jobs = source(node(1), proc)
    jobs.read(T)
    jobs.read(T)
    (proc / "700/comm").write_text("slurmstepd\n")
    (proc / "700/cmdline").write_text("slurmstepd: [7.0]\0")
    jobs.read(T)
    assert not jobs._slurm.running, "thousands of processes are not asked their names every five seconds"


def test_a_gpu_that_a_job_only_claims_is_the_one_whose_process_is_on_it(proc: Path) -> None:
    """A user writes his own script's environment, as in `#!/usr/bin/env -S SLURM_JOB_GPUS=0,1 sh`."""
    gpus = node(2)
    jobs = source(gpus, proc)
    start_job(proc, 7, "SLURM_JOB_ID=7\0SLURM_JOB_GPUS=0,1\0")
    child = start_job(proc, 8)
    gpus.set_pids(1, (child,))
    assert jobs.read(T).holdings == [(0, "7"), (1, "8")]
    end(proc, 8001)
    gpus.set_pids(1, ())
    assert jobs.read(T).holdings == [], "it keeps what it was seen with"
    end(proc, 8000)
    assert jobs.read(T).holdings == [(1, "7")]


def test_an_environment_is_read_in_bounds(proc: Path) -> None:
    jobs = source(node(2), proc)
    start_job(proc, 7, f"SLURM_JOB_ID=7\0SLURM_JOB_GPUS=0\0X={'x' * MAX_ENVIRONMENT}\0SLURM_JOB_GPUS=1\0")
    assert jobs.read(T).holdings == [(0, "7"), (1, None)]


def test_environments_that_may_not_be_read_are_reported_as_trouble_once(
    proc: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = node(2)
    jobs = source(gpus, proc)
    child = start_job(proc, 7, "SLURM_JOB_ID=7\0SLURM_JOB_GPUS=0,1\0")
    gpus.set_pids(0, (child,))
    forbid(monkeypatch, lambda path: path.endswith("/environ"))
    first = jobs.read(T)
    assert (first.holdings, first.inventory) == ([(0, "7")], {TROUBLE: NO_ENVIRONMENT})
    assert jobs.read(T).inventory == {}
    monkeypatch.undo()
    later = jobs.read(T)
    assert (later.holdings, later.inventory) == ([(1, "7")], {})
    assert troubles(jobs, GOOD_READS) == [""]


def troubles(jobs: JobsSource, reads: int) -> list[str]:
    """What these readings change in the inventory."""
    return [trouble for _ in range(reads) for trouble in jobs.read(T).inventory.values()]


def test_jobs_that_come_and_go_change_no_inventory(proc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each change is a new Hello of the node, with all that it has to say."""
    jobs = source(node(2), proc)
    forbid(monkeypatch, lambda path: path.endswith("/environ"))
    for job in (7, 8, 9):
        start_job(proc, job, f"SLURM_JOB_ID={job}\0")
        assert troubles(jobs, 2) == ([NO_ENVIRONMENT] if job == 7 else [])
        end(proc, 1000 * job, 1000 * job + 1)
        assert troubles(jobs, 2 * GOOD_READS) == [], "that no job runs does not say that one's could be read"


def test_a_trouble_that_comes_and_goes_is_one(proc: Path, tmp_path: Path, kubelet: Kubelet) -> None:
    jobs = source(node(2), proc, tmp_path / "kubelet.sock")
    found = []
    for turn in range(GOOD_READS):
        kubelet.refusal = None if turn % 2 else grpc.StatusCode.RESOURCE_EXHAUSTED
        kubelet.words = f"message larger than max ({1000 + turn} vs. 16777216)"
        found += troubles(jobs, 1)
    kubelet.refusal = None
    assert [text.partition(": ")[2] for text in found] == ["RESOURCE_EXHAUSTED: message larger than max (# vs. #)"]
    assert troubles(jobs, GOOD_READS) == [""]
    jobs.close()


def forbid(monkeypatch: pytest.MonkeyPatch, which: Callable[[str], bool]) -> None:
    """What root would never see: a file of another user."""
    opened = open

    def open_(path: Any, *args: Any, **kwargs: Any) -> Any:
        if which(str(path)):
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *args, **kwargs)

    monkeypatch.setattr("builtins.open", open_)


@pytest.mark.parametrize("how", ["hidepid", "namespace"])
def test_where_processes_are_hidden_no_gpu_is_called_free(proc: Path, how: str) -> None:
    if how == "hidepid":
        end(proc, 1)
    else:
        namespace(proc, "pid:[4026532000]")
    reading = source(node(1), proc).read(T)
    assert (reading.holdings, reading.inventory) == ([], {TROUBLE: HIDDEN})


def test_what_a_user_calls_a_process_or_a_login_a_cgroup_makes_no_job(proc: Path) -> None:
    gpus = node(2)
    process(proc, 700, "slurmstepd", 1, cmdline="slurmstepd: [7.0]\0", status="Uid:\t1000\t1000\t1000\t1000")
    process(proc, 701, "python", 700)
    login = "/user.slice/user-1000.slice/user@1000.service/slurmstepd.scope/job_9/step_0/user/task_0"
    process(proc, 702, "python", 1, cgroup=login)
    gpus.set_pids(0, (701,))
    gpus.set_pids(1, (702,))
    assert source(gpus, proc).read(T).holdings == [(0, None), (1, None)]


@pytest.mark.parametrize(("user", "job"), [("1000", "7"), ("1001", None)])
def test_a_process_that_left_its_step_belongs_to_the_job_that_it_names_if_that_is_its_users(
    proc: Path, user: str, job: str | None
) -> None:
    gpus = node(1)
    start_job(proc, 7, "SLURM_JOB_ID=7\0")
    (proc / "7001/status").write_text("Name:\tpython\nUid:\t1000\t1000\t1000\t1000\n")
    process(proc, 800, "python", 1, environ="SLURM_JOB_ID=7\0", status=f"Uid:\t{user}\t{user}\t{user}\t{user}")
    gpus.set_pids(0, (800,))
    assert source(gpus, proc).read(T).holdings == [(0, job)]


def test_a_node_without_gpus_asks_nobody(tmp_path: Path) -> None:
    assert reported(source(Gpus(), tmp_path / "there-is-none").read(T))["holdings"] == {}


def test_all_is_reported_again_when_a_reading_took_so_long_that_it_may_be_lost(
    proc: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter([0.0, 2.6, 10.0, 10.1, 15.0, 15.1])
    monkeypatch.setattr("drover_agent.sources.workloads.jobs.time", SimpleNamespace(monotonic=lambda: next(times)))
    jobs = source(node(1), proc)
    assert [jobs.read(T).holdings for _ in range(3)] == [[(0, None)], [(0, None)], []]


# ---- the agent


def test_the_agent_reports_the_job_of_a_gpus_process_and_its_end(
    tmp_path: Path, proc: Path, fake_nvml: FakeNvml
) -> None:
    """By NVML's process list: on the stand-in the process on GPU 3 has the number 4000."""
    process(proc, 700, "slurmstepd", 1, cmdline="slurmstepd: [7.0]\0")
    process(proc, 4000, "python", 700)

    async def scenario() -> None:
        server = TelemetryServer()
        settings = {
            "node": "n1", "collectors": f'["{await server.start()}"]', "spool.dir": str(tmp_path / "spool"),
            "proc_root": str(proc), "kmsg_enabled": "false", "batch_s": "1", "kubelet_socket": "",
        }  # fmt: skip
        words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
        agent = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "drover_agent.main", "run", *words, env=os.environ | fake_nvml.env()
        )
        await until(lambda: server.holdings, "the job of GPU 3")
        end(proc, 700, 4000)
        await until(lambda: len(server.holdings) > 1, "its end")
        assert [(holding.gpu, holding.job) for holding in server.holdings[:2]] == [(3, "7"), (3, "")]
        agent.send_signal(signal.SIGTERM)
        await asyncio.wait_for(agent.wait(), 120)
        assert server.broken == []

    play(scenario())


def test_check_says_what_cannot_be_known_of_jobs_and_why() -> None:
    known = Reading(holdings=[(0, "7"), (1, None)])
    [line] = check_sources.sources(AgentConfig(hardware="none"), [SourceReading("jobs", 5.0, readings=[known])])[1:2]
    assert (line.state, line.text) == (CheckState.OK, "jobs of 2 GPUs known, 1 held")
    refused = Reading(holdings=[(0, "7")], inventory={TROUBLE: NO_ENVIRONMENT})
    [line] = check_sources.sources(AgentConfig(hardware="none"), [SourceReading("jobs", 5.0, readings=[refused])])[1:2]
    assert line.state is CheckState.LIMITED
    assert NO_ENVIRONMENT in line.text
    assert "CAP_SYS_PTRACE" in line.remedy


# ---- the kubelet


@pytest.fixture
def kubelet(tmp_path: Path) -> Iterator[Kubelet]:
    with serving(tmp_path / "kubelet.sock", [pod("a", uuid(0))]) as served:
        yield served

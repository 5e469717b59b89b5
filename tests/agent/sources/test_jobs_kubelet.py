"""Jobs by the kubelet: pods, one that refuses, hangs or goes, sockets of root; and jobs that have ended."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from drover_agent.sources.gpus import Gpus
from drover_agent.sources.workloads.jobs import HIDDEN, INITIAL, TROUBLE
from drover_agent.sources.workloads.slurm import NO_ENVIRONMENT
from testbed import slurm
from testbed.job_processes import T, ended, namespace, node, process, source, uuid
from testbed.kubelet import Kubelet, pod, serving
from testbed.waiting import wait_until


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """A machine with init alone."""
    process(tmp_path / "proc", 1, "systemd", 0)
    namespace(tmp_path / "proc", INITIAL)
    return tmp_path / "proc"


@pytest.fixture
def kubelet(tmp_path: Path) -> Iterator[Kubelet]:
    with serving(tmp_path / "kubelet.sock", [pod("a", uuid(0))]) as served:
        yield served


def test_pods_come_and_go(proc: Path, tmp_path: Path, kubelet: Kubelet) -> None:
    jobs = source(node(2), proc, tmp_path / "kubelet.sock")
    assert jobs.read(T).holdings == [(0, "team/a"), (1, None)]
    kubelet.pods = [pod("a", uuid(0)), pod("b", uuid(0) + "::1", uuid(1))]
    assert jobs.read(T).holdings == [(1, "team/b")]  # of two on a GPU the first stays
    kubelet.pods = [pod("b", uuid(1))]
    assert jobs.read(T).holdings == [(0, None)]
    jobs.close()


@pytest.mark.parametrize("code", [grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNIMPLEMENTED])
def test_a_kubelet_that_refuses_frees_no_gpu(
    proc: Path, tmp_path: Path, kubelet: Kubelet, code: grpc.StatusCode
) -> None:
    jobs = source(node(2), proc, tmp_path / "kubelet.sock")
    jobs.read(T)
    kubelet.refusal, kubelet.pods = code, []
    reading = jobs.read(T)
    assert reading.holdings == []
    assert code.name in reading.inventory[TROUBLE]
    kubelet.refusal = None
    assert jobs.read(T).holdings == [(0, None)]
    jobs.close()


def test_a_kubelet_that_hangs_or_goes_frees_no_gpu(
    proc: Path, tmp_path: Path, kubelet: Kubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("drover_agent.sources.workloads.kubernetes.LIST_LIMIT_S", 0.2)
    jobs = source(node(2), proc, tmp_path / "kubelet.sock")
    jobs.read(T)
    kubelet.silent = True
    reading = jobs.read(T)
    assert reading.holdings == []
    assert "DEADLINE_EXCEEDED" in reading.inventory[TROUBLE]
    (tmp_path / "kubelet.sock").unlink()
    gone = jobs.read(T)
    assert gone.holdings == []
    assert "the kubelet does not run" in gone.inventory[TROUBLE]
    kubelet.end.set()
    with serving(tmp_path / "kubelet.sock", []):  # a new one, with a new socket of the old name
        monkeypatch.setattr("drover_agent.sources.workloads.kubernetes.LIST_LIMIT_S", 5.0)
        assert jobs.read(T).holdings == [(0, None)]
    jobs.close()


def test_a_socket_that_may_not_be_used_is_reported_with_its_mend(
    proc: Path, tmp_path: Path, kubelet: Kubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    def connect(self: Any, path: str) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("drover_agent.sources.workloads.kubernetes.socket.socket.connect", connect, raising=False)
    reading = source(node(2), proc, tmp_path / "kubelet.sock").read(T)
    assert reading.holdings == []
    assert "permission denied" in reading.inventory[TROUBLE]
    assert kubelet.asked == 0


def as_nobody(proc: Path, kubelet: Path | None) -> list[tuple[list[tuple[int, str | None]], dict[str, str]]]:
    """What two readings give to an unprivileged user, by a process of its own."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()

    def work() -> None:
        gc.freeze()  # channels of gRPC that this process left behind: to collect them in a child hangs
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        jobs = source(node(2), proc, kubelet)
        theirs.send([(reading.holdings, reading.inventory) for reading in (jobs.read(T), jobs.read(T))])

    reader = context.Process(target=work)
    reader.start()
    assert ours.poll(20), "the reader does not answer"
    reader.join(20)
    found: list[tuple[list[tuple[int, str | None]], dict[str, str]]] = ours.recv()
    return found


@pytest.mark.system
def test_a_proc_that_hides_other_users_processes_frees_no_gpu() -> None:
    folder = Path(tempfile.mkdtemp(prefix="drover-proc-"))
    folder.chmod(0o755)
    subprocess.run(["mount", "-t", "proc", "-o", "hidepid=invisible", "proc", folder], check=True)
    try:
        assert as_nobody(folder, None) == [([], {TROUBLE: HIDDEN}), ([], {})]
    finally:
        subprocess.run(["umount", folder], check=True)
        folder.rmdir()


@pytest.mark.system
@pytest.mark.parametrize("forbidden", ["folder", "socket"])
def test_a_socket_of_root_is_no_business_of_nobody(forbidden: str) -> None:
    folder = Path(tempfile.mkdtemp(prefix="drover-kubelet-"))
    folder.chmod(0o700 if forbidden == "folder" else 0o755)
    with socket.socket(socket.AF_UNIX) as listener:  # not gRPC's, whose threads a fork would not survive
        listener.bind(str(folder / "kubelet.sock"))
        listener.listen()
        (folder / "kubelet.sock").chmod(0o600)
        (first, trouble), (second, nothing_new) = as_nobody(Path("/proc"), folder / "kubelet.sock")
    assert "permission denied" in trouble[TROUBLE]
    assert (first, second, nothing_new) == ([], [], {})
    shutil.rmtree(folder)


# ---- a real Slurm


def outlook(gpus: Gpus, pipe: Any, user: int | None) -> None:
    """In a process of its own: read as `user` when asked, and report what changed."""
    gc.freeze()  # as above
    if user is not None:
        os.setgroups([])
        os.setgid(user)
        os.setuid(user)
    jobs = source(gpus, Path("/proc"))
    while (pids := pipe.recv()) is not None:
        for slot, held in pids.items():
            gpus.set_pids(slot, held)
        reading = jobs.read(T)
        pipe.send((reading.holdings, reading.inventory))


def descendants(parent: int) -> list[int]:
    children = [int(p) for p in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]
    return [*children, *(p for child in children for p in descendants(child))]


def sleeper(job: str) -> int:
    """The `sleep` of a real job, below its step daemon."""
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and (entry / "cmdline").read_text().startswith(f"slurmstepd: [{job}.batch]"):
                for pid in descendants(int(entry.name)):
                    if Path(f"/proc/{pid}/comm").read_text() == "sleep\n":
                        return pid
        except OSError:
            continue
    return 0


@pytest.mark.system
@pytest.mark.parametrize("user", [None, 65534], ids=["root", "nobody"])
def test_a_real_slurm_job_is_seen_to_come_and_go(tmp_path: Path, user: int | None) -> None:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    reader = context.Process(target=outlook, args=(node(), theirs, user), daemon=True)
    reader.start()

    def read(**pids: tuple[int, ...]) -> tuple[dict[int, str | None], dict[str, str]]:
        ours.send({int(slot[1:]): held for slot, held in pids.items()})
        assert ours.poll(20), "the reader does not answer"
        holdings, inventory = ours.recv()
        return dict(holdings), inventory

    with slurm.running(tmp_path) as cluster, contextlib.ExitStack() as left:
        left.callback(reader.kill)
        assert read() == (dict.fromkeys(range(8)), {})
        other = cluster.submit("sleep 600", "--gres=gpu:3")
        cluster.wait_for(other, "RUNNING")
        wait_until(lambda: sleeper(other), "the other job's process")
        job = cluster.submit("sleep 600", "--gres=gpu:2")
        cluster.wait_for(job, "RUNNING")
        wait_until(lambda: sleeper(job), "the job's process")
        holdings, inventory = read(g3=(sleeper(job),))
        if user is None:  # its environment says that it was given GPU 4 too, and which the other job has
            assert (holdings, inventory) == ({0: other, 1: other, 2: other, 3: job, 4: job}, {})
        else:
            assert (holdings, inventory) == ({3: job}, {TROUBLE: NO_ENVIRONMENT})
        cluster.command("scancel", job)
        wait_until(lambda: not sleeper(job), "the job has ended")
        wait_until(lambda: ended(read(g3=())[0], 3), "the holding has ended")

"""Whose the jobs of a node are: environments and users in a tree that stands for /proc, and of a real Slurm."""

from __future__ import annotations

from pathlib import Path

import pytest

from drover_agent.sources.gpus import Gpus
from drover_agent.sources.workloads.owners import AGAIN_MS, CHANGED_MS, MAX_ENVIRONMENT, VARIABLES, OwnersSource
from drover_core.jobs.owner import MAX_CHARS, JobOwner, from_message
from drover_core.model.kinds import OWNER
from testbed import slurm
from testbed.job_processes import T, namespace, node, process, source, uuid
from testbed.kubelet import pod, serving
from testbed.waiting import wait_until

SECRET = "AWS_SECRET_ACCESS_KEY=hunter2\0HOME=/root\0"
SLURM = "SLURM_JOB_ID=7\0SLURM_JOB_ACCOUNT=vision\0SLURM_JOB_USER=alice\0SLURM_NODEID=0\0"


def owners(gpus: Gpus, proc: Path, names: dict[int, str] | None = None) -> OwnersSource:
    return OwnersSource(proc, gpus, lambda uid: (names or {1000: "alice"}).get(uid, ""))


def rank(proc: Path, pid: int, environment: str | None = None, uid: int = 1000, title: str = "python\0") -> None:
    files = {} if environment is None else {"environ": environment}
    process(proc, pid, "python", 1, status=f"Name:\tpython\nUid:\t{uid}\t{uid}", cmdline=title, **files)


def of(gpus: Gpus, proc: Path) -> JobOwner | None:
    events = owners(gpus, proc).read(T).events
    assert len(events) < 2
    return from_message(events[0].message) if events else None


def test_a_slurm_job_and_none_of_its_secrets(tmp_path: Path) -> None:
    gpus = node(2)
    rank(tmp_path, 70, SECRET + SLURM + "SLURM_ARRAY_JOB_ID=5\0SLURM_ARRAY_TASK_ID=2\0DROVER_PROJECT=llama\0")
    gpus.set_jobs({"7": (70,)})
    found = owners(gpus, tmp_path)
    (event,) = found.read(T).events
    assert (event.code, event.forgeable, event.gpu) == (OWNER, True, None)
    assert from_message(event.message) == JobOwner(
        "7", user="alice", uid=1000, account="vision", project="llama", array="5_2"
    )
    assert "hunter2" not in event.message and "hunter2" not in repr(vars(found))


def test_once_then_when_it_changed_and_once_a_day(tmp_path: Path) -> None:
    gpus = node(1)
    rank(tmp_path, 70, SLURM)
    gpus.set_jobs({"7": (70,)})
    found = owners(gpus, tmp_path)
    assert [len(found.read(T + ms).events) for ms in (0, 10_000, AGAIN_MS - 1, AGAIN_MS)] == [1, 0, 0, 1]
    (tmp_path / "70/environ").write_text(SLURM.replace("vision", "speech"))
    at = T + AGAIN_MS
    assert [len(found.read(at + ms).events) for ms in (10_000, CHANGED_MS)] == [0, 1]  # it is read again by then
    gpus.set_jobs({})
    found.read(at)
    gpus.set_jobs({"7": (70,)})
    assert found.read(at).events  # it came back, as one that was requeued


def test_what_is_not_known_is_not_made_up(tmp_path: Path) -> None:
    gpus = node(1)
    gpus.set_jobs({"7": (70,)})
    assert of(gpus, tmp_path) is None  # it has ended
    rank(tmp_path, 70)  # no right to read it: its user is the kernel's word
    assert of(gpus, tmp_path) == JobOwner("7", user="alice", uid=1000)
    rank(tmp_path, 71, SLURM.replace("=7", "=8"), uid=1001)
    gpus.set_jobs({"7": (71,)})  # it says that it is another job's
    assert of(gpus, tmp_path) == JobOwner("7", user="uid 1001", uid=1001)
    gpus.set_jobs({"team/a": (71,)})
    assert of(gpus, tmp_path) is None  # users of pods are no persons, nor is a pod Slurm's


def test_a_user_that_the_node_does_not_know_keeps_its_id(tmp_path: Path) -> None:
    gpus = node(1)
    rank(tmp_path, 70, SLURM, uid=1234)
    gpus.set_jobs({"7": (70,)})
    found = of(gpus, tmp_path)
    assert found is not None and found.user == "alice (uid 1234)"


def test_the_first_node_reports_a_job(tmp_path: Path) -> None:
    gpus = node(1)
    rank(tmp_path, 70, SLURM.replace("NODEID=0", "NODEID=3"))
    gpus.set_jobs({"7": (70,)})
    assert of(gpus, tmp_path) is None


def test_hostile_values_are_cut(tmp_path: Path) -> None:
    gpus = node(1)
    rank(tmp_path, 70, "SLURM_JOB_ID=7\0SLURM_JOB_ACCOUNT=a\x1b[31m\n" + "x" * 1_000_000 + "\0DROVER_PROJECT=lost\0")
    gpus.set_jobs({"7": (70,)})
    found = of(gpus, tmp_path)
    assert found is not None
    assert found.account == "a[31m" + "x" * (MAX_CHARS - 5)
    assert found.project == ""  # behind MAX_ENVIRONMENT
    assert MAX_ENVIRONMENT < 1_000_000
    rank(tmp_path, 71, SLURM.replace("vision", "") + "SLURM_ARRAY_JOB_ID=x\0SLURM_ARRAY_TASK_ID=1\0")
    gpus.set_jobs({"7": (71,)})
    found = of(gpus, tmp_path)
    assert found is not None and (found.account, found.array) == ("", "")
    rank(tmp_path, 72, "NOT_SLURM_JOB_ID=7\0XSLURM_JOB_ACCOUNT=x\0" + SLURM + "SLURM_JOB_ACCOUNT=second\0")
    gpus.set_jobs({"7": (72,)})
    found = of(gpus, tmp_path)
    assert found is not None and found.account == "vision"


def test_the_parts_of_a_heterogeneous_job(tmp_path: Path) -> None:
    gpus = node(1)
    ids = "SLURM_JOB_ID=7\0SLURM_JOB_ID_HET_GROUP_0=7\0SLURM_JOB_ID_HET_GROUP_1=8\0SLURM_NODEID=1\0"
    accounts = "SLURM_JOB_ACCOUNT=a\0SLURM_JOB_ACCOUNT_HET_GROUP_0=a\0SLURM_JOB_ACCOUNT_HET_GROUP_1=b\0"
    rank(tmp_path, 70, ids + accounts)
    gpus.set_jobs({"8": (70,)})
    found = of(gpus, tmp_path)
    assert found is not None and (found.het, found.account) == ("7+1", "b")


def test_ray_jobs_and_actors(tmp_path: Path) -> None:
    """Titles as Ray 2.60 sets them: padded with NUL to the length of the first command line."""
    gpus = node(2)
    rank(tmp_path, 70, "RAY_JOB_ID=02000000\0", title="ray::Trainer.loop" + "\0" * 80)
    rank(tmp_path, 71, "RAY_JOB_ID=ffffffff\0", title="ray::IDLE" + "\0" * 80)  # made before it got work
    rank(tmp_path, 72, title="ray::Fake.actor\0")  # a title without Ray's variables
    gpus.set_jobs({"team/a": (71, 70, 72)})
    assert of(gpus, tmp_path) == JobOwner("team/a", ray_job="02000000", ray_work="Trainer")


def test_jobs_hands_on_the_processes_of_slurm_and_of_pods(tmp_path: Path) -> None:
    proc = tmp_path / "proc"
    process(proc, 1, "systemd", 0)
    namespace(proc, "pid:[4026531836]")
    process(proc, 7000, "slurmstepd", 1, cmdline="slurmstepd: [7.batch]\0")
    process(proc, 7001, "python", 7000, environ=SLURM + "SLURM_JOB_GPUS=0\0")
    (proc / "7000/task/7000/children").write_text("7001 ")
    slice_ = "/kubepods.slice/kubepods-podabc.slice/cri-containerd-1.scope"
    process(proc, 80, "python", 1, cgroup=slice_)
    process(proc, 81, "python", 1, cgroup=slice_)
    gpus = node(3)
    gpus.set_pids(1, (80,))
    gpus.set_pids(2, (81,))
    with serving(tmp_path / "kubelet.sock", [pod("a", uuid(1)), pod("b", uuid(2)), pod("c", uuid(2) + "::1")]):
        jobs = source(gpus, proc, tmp_path / "kubelet.sock")
        jobs.read(T)
        jobs.close()
    # Nobody says which of the two pods on GPU 2 has process 81.
    assert gpus.jobs() == {"7": (7001,), "team/a": (80,), "team/b": ()}


def test_only_the_listed_variables_are_ever_kept() -> None:
    assert not [name for name in VARIABLES if not name.startswith(("SLURM_", "RAY_JOB_ID", "DROVER_PROJECT"))]
    assert not [name for name in VARIABLES if any(word in name for word in ("TOKEN", "KEY", "SECRET", "JWT", "PASS"))]


@pytest.mark.system
def test_a_real_slurm_says_whose_its_array_tasks_and_parts_are(tmp_path: Path) -> None:
    def seen() -> dict[str, JobOwner]:
        gpus = node(8)
        source(gpus, Path("/proc")).read(T)
        events = OwnersSource(Path("/proc"), gpus).read(T).events
        return {owner.job: owner for owner in (from_message(event.message) for event in events)}

    with slurm.running(tmp_path, ("gpu01", "gpu02")) as cluster:
        array = cluster.submit("sleep 600", "--gres=gpu:1", "--array=4", "--account=vision")
        wait_until(lambda: array in seen(), "the array's task is seen")
        task = seen()[array]
        cluster.command("scancel", array)
        wait_until(lambda: array not in seen(), "the array's task has ended")
        # Both nodes are this machine: of the GPUs of the same numbers the second part has one more.
        script = tmp_path / "het.sh"
        lines = ("--gres=gpu:1 --account=speech", "hetjob", "--gres=gpu:2 --account=audio")
        text = "".join(f"#SBATCH {line}\n" for line in lines)
        script.write_text(f"#!/bin/sh\n{text}srun --het-group=0,1 sleep 600\n")
        leader = cluster.command("sbatch", "--parsable", f"--output={tmp_path}/%j.out", str(script)).strip()
        second = str(int(leader) + 1)
        wait_until(lambda: seen().keys() >= {leader, second}, "both parts are seen")
        found = seen()
    assert (task.user, task.uid, task.account, task.array) == ("root", 0, "vision", f"{array}_4")
    assert (found[leader].het, found[leader].account) == (f"{leader}+0", "speech")
    assert (found[second].het, found[second].account) == (f"{leader}+1", "audio")

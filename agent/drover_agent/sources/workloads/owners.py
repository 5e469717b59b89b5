"""Whose the jobs on this node are, as events: by the kernel's user id and by a few variables of their processes.

Environments hold secrets, so of each only the variables in `VARIABLES` are kept, and nothing else is sent or logged.
What they say their user may have written: it is cut, and marked forgeable. A job's own name is not among it: that comes
from `jobs`. Reading another user's environment needs CAP_SYS_PTRACE; without it a job's user alone is known.

Names of variables: sbatch(1), "output environment variables". In each part of a heterogeneous job SLURM_JOB_ID is the
leader's, and ..._HET_GROUP_N are those of part N (seen with Slurm 22.05). RAY_JOB_ID is set by
src/ray/raylet/worker_pool.cc of Ray, all f (its nil) in a worker that was started before it got work; workers call
themselves ray::ACTOR.METHOD or ray::TASK (seen with Ray 2.60).
"""

from __future__ import annotations

import os
import pwd
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from drover_agent.sources.base import NodeEvent, Reading
from drover_agent.sources.gpus import Gpus
from drover_agent.sources.workloads.places import PlaceReader
from drover_core.jobs.owner import MAX_UID, JobOwner, clean, to_message
from drover_core.model.kinds import OWNER, EventKind

AGAIN_MS = 86_400_000  # a job that goes on is reported again, so that a report of a week finds it
CHANGED_MS = 600_000  # a job whose owner has changed is reported again no sooner
MAX_JOBS = 256
MAX_PROCESSES = 32  # of a job, that are asked at each read
MAX_ENVIRONMENT = 1 << 18
MAX_VALUE = 1_024  # bytes, before it is cut
MAX_TITLE = 200
MAX_WORK = 4  # names of Ray's actors and tasks
HET_GROUPS = 16
PARTS = tuple(f"SLURM_JOB_ID_HET_GROUP_{number}" for number in range(HET_GROUPS))
ACCOUNTS = tuple(f"SLURM_JOB_ACCOUNT_HET_GROUP_{number}" for number in range(HET_GROUPS))
VARIABLES = frozenset({
    "SLURM_JOB_ID", "SLURM_JOB_ACCOUNT", "SLURM_JOB_USER", "SLURM_NODEID", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID",
    "RAY_JOB_ID", "DROVER_PROJECT", *PARTS, *ACCOUNTS,
})  # fmt: skip
_KEYS = {name: b"\0" + name.encode() + b"=" for name in sorted(VARIABLES)}
_RAY = re.compile(r"ray::([A-Za-z_][\w.<>\-]{0,100})")
_USER = re.compile(r"^Uid:\s+(\d{1,10})", re.MULTILINE)  # of /proc/PID/status: proc(5)


def user_name(uid: int) -> str:
    """Return the node's name of a user; "": it has none. May wait for a directory service."""
    try:
        return pwd.getpwuid(uid).pw_name
    except (KeyError, OverflowError):
        return ""


class OwnersSource:
    """An event for each job, when it is first seen, when its owner changes, and once a day; and the places of ranks."""

    name = "owners"
    interval_s = 10.0

    def __init__(self, proc: Path, gpus: Gpus, name_of: Callable[[int], str] = user_name) -> None:
        self._proc, self._gpus, self._name_of = proc, gpus, name_of
        self._places = PlaceReader(proc, gpus)
        self._sent: dict[str, tuple[str, int]] = {}  # job -> (message, when it was sent)
        self._names: dict[int, str] = {}  # uid -> name
        self._found: dict[int, tuple[dict[str, str], int]] = {}  # process -> (its variables, when they were read)

    def read(self, now_ms: int) -> Reading:
        reading = Reading(inventory=self._places.read(now_ms))
        jobs = self._gpus.jobs()
        self._sent = {job: sent for job, sent in self._sent.items() if job in jobs}
        asked = {job: jobs[job][:MAX_PROCESSES] for job in sorted(jobs)[:MAX_JOBS]}
        there = {process for processes in asked.values() for process in processes}
        self._found = {p: kept for p, kept in self._found.items() if p in there and 0 <= now_ms - kept[1] < CHANGED_MS}
        for job, processes in asked.items():
            owner = self._owner(job, processes, now_ms)
            if owner is None:
                continue
            text = to_message(owner)
            before, at_ms = self._sent.get(job, ("", now_ms))
            if not before or now_ms - at_ms >= (AGAIN_MS if text == before else CHANGED_MS) or now_ms < at_ms:
                self._sent[job] = text, now_ms
                reading.events.append(NodeEvent(now_ms, None, EventKind.RANK, OWNER, text, self.name, forgeable=True))
        return reading

    def close(self) -> None:
        """Nothing is held open."""

    def _owner(self, job: str, processes: Sequence[int], now_ms: int) -> JobOwner | None:
        """Return whose a job is; None: nothing is known, or its first node reports it."""
        found = [(process, self._variables(process, now_ms)) for process in processes]
        own = [each for each in found if job in _ids(each[1])]
        slurm = own[0][1] if own else {}
        part = next((number for number, name in enumerate(PARTS) if slurm.get(name) == job), None)
        if part is None and slurm.get("SLURM_NODEID", "0") not in ("", "0"):
            return None
        # Users of pods are the image's, and no persons.
        uid = self._uid((own or found)[0][0]) if found and "/" not in job else None
        ray = [(process, each["RAY_JOB_ID"]) for process, each in found if "RAY_JOB_ID" in each]
        work = sorted({name for process, _ in ray if (name := self._ray_work(process))})
        owner = JobOwner(
            job, user=self._user(uid, slurm), uid=uid,
            account=slurm.get("SLURM_JOB_ACCOUNT" if part is None else ACCOUNTS[part], ""),
            project=next((each["DROVER_PROJECT"] for _, each in found if "DROVER_PROJECT" in each), ""),
            array=_array(slurm), het="" if part is None else f"{slurm.get(PARTS[0], '')}+{part}",
            ray_job=next((id_ for _, id_ in ray if id_.strip("f")), ""),
            ray_work=clean(", ".join(work[:MAX_WORK])),
        )  # fmt: skip
        return None if owner == JobOwner(job) else owner

    def _variables(self, process: int, now_ms: int) -> dict[str, str]:
        """Return those of VARIABLES that a process has, the first of each name, as getenv(3) finds it."""
        if process in self._found:
            return self._found[process][0]
        try:
            descriptor = os.open(f"{self._proc}/{process}/environ", os.O_RDONLY | os.O_CLOEXEC)
            with os.fdopen(descriptor, "rb") as file:
                data = b"\0" + file.read(MAX_ENVIRONMENT)
        except OSError:  # it has ended, or may not be read
            return {}
        found: dict[str, str] = {}
        for name, key in _KEYS.items():  # not split first: a hostile user can put 100,000 variables there
            at = data.find(key)
            if at >= 0:
                begin = at + len(key)
                found[name] = clean(data[begin : begin + MAX_VALUE].partition(b"\0")[0].decode("utf-8", "replace"))
        if found:  # else it may be between fork and exec
            self._found[process] = found, now_ms
        return found

    def _uid(self, process: int) -> int | None:
        """Return the real user of a process."""
        try:
            found = _USER.search((self._proc / str(process) / "status").read_text("utf-8", "replace")[:4096])
        except OSError:
            return None
        uid = int(found[1]) if found else -1
        return uid if 0 <= uid <= MAX_UID else None

    def _user(self, uid: int | None, slurm: Mapping[str, str]) -> str:
        """Return the name of a user. One that this node does not know has Slurm's, with the id that proves more."""
        if uid is None:
            return ""
        if uid not in self._names:
            if len(self._names) >= MAX_JOBS:
                self._names.clear()
            self._names[uid] = clean(self._name_of(uid))
        said = slurm.get("SLURM_JOB_USER", "")
        return self._names[uid] or (f"{said} (uid {uid})" if said else f"uid {uid}")

    def _ray_work(self, process: int) -> str:
        """Return the class of the actor, or the task, that one of Ray's workers runs; "": none."""
        try:
            with (self._proc / str(process) / "cmdline").open("rb") as file:
                title = file.read(MAX_TITLE).partition(b"\0")[0].decode("utf-8", "replace")
        except OSError:
            return ""
        match = _RAY.fullmatch(title)
        if match is None or match[1] == "IDLE":
            return ""
        return match[1].rpartition(".")[0] or match[1]


def _ids(found: Mapping[str, str]) -> tuple[str, ...]:
    """Return the ids that Slurm gives the job of a process: of a heterogeneous job those of all its parts."""
    return tuple(found[name] for name in ("SLURM_JOB_ID", *PARTS) if name in found)


def _array(slurm: Mapping[str, str]) -> str:
    job, task = slurm.get("SLURM_ARRAY_JOB_ID", ""), slurm.get("SLURM_ARRAY_TASK_ID", "")
    return f"{job}_{task}" if job.isdecimal() and task.isdecimal() else ""

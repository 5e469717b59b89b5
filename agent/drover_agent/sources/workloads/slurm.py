"""Slurm's jobs on this node, from what any user may see of its processes, and a little more where that is allowed.

Every step of a job has a `slurmstepd` on the node for as long as it runs; its title says which: "slurmstepd:
[1234.batch]" (Slurm: src/slurmd/slurmstepd). So the jobs here are known without rights, settings or questions to
slurmctld, whichever way Slurm tracks processes. A job is called by Slurm's own number for it, JobId: that of an array's
task or of a part of a heterogeneous job is its own, and the same on all of its nodes; ARRAY_TASK names would need the
environment of processes, which an unprivileged agent cannot read on some nodes and would then spell otherwise.

Which GPUs a job was given, used or not, stands in the environment of its batch script (SLURM_JOB_GPUS) and of its
steps (SLURM_STEP_GPUS; sbatch(1), srun(1)): reading it needs the same user or CAP_SYS_PTRACE. The device cgroup does
not show it: version 2 keeps it as a BPF program.

Users may call their processes and cgroups what they like, so a step daemon counts only when it is root's (SlurmdUser,
slurm.conf(5)), a cgroup only outside those of logins, an environment only of the job's own user. What an environment
claims its user may have written: it gives a job no GPU on which another job's process is.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

# /slurm/uid_1000/job_7/step_0 (cgroup v1), /system.slice/slurmstepd.scope/job_7/step_0/user/task_0 (v2); with several
# slurmd on a machine /slurm_NODE/... and /system.slice/NODE_slurmstepd.scope/... (Slurm: src/plugins/cgroup).
_CGROUP = re.compile(
    r"^\d+:[^:\n]*:(?!/user\.slice/)[^\n]*?/(?:slurm(?:_[^/\n]+)?(?:/uid_\d+)?|(?:[^/\n]+_)?slurmstepd\.scope)"
    r"/job_(\d+)(?=/|$)",
    re.MULTILINE,
)
_TITLE = re.compile(r"slurmstepd: \[(\d+)\.([^\]]*)\]")
_USER = re.compile(r"^Uid:\s+(\d+)", re.MULTILINE)  # of /proc/PID/status: proc(5)
_SCRIPTS = ("batch", "interactive")  # steps whose environment lists the GPUs of the whole job on this node

NO_ENVIRONMENT = (
    "environments of other users' processes cannot be read, so GPUs that a job was given and does not use are not "
    "reported as its own; CAP_SYS_PTRACE would allow it"
)


def job_in_cgroup(text: str) -> str | None:
    """The job in a /proc/PID/cgroup."""
    found = _CGROUP.search(text)
    return found[1] if found else None


MAX_ENVIRONMENT = 1 << 20  # characters; a user may make his as large as his stack


@dataclass(slots=True, eq=False, repr=False)
class _Job:
    seen: set[int] = field(default_factory=set)  # slots on which processes of it were, since it began
    given: set[int] = field(default_factory=set)  # slots that environments of it name
    complete: bool = False  # no other GPU of this node is its own
    answered: set[int] = field(default_factory=set)  # step daemons whose processes gave their GPUs
    user: int | None = None  # whose it is, once a process was read
    process: int | None = None  # the last whose environment gave its GPUs


class SlurmJobs:
    """Call `look` before everything else."""

    def __init__(self, proc: Path, slot_of: Callable[[str], int | None]) -> None:
        """`slot_of`: GPU by what Slurm calls it: the number of its device file, or a UUID."""
        self._proc, self._slot_of = str(proc), slot_of
        self._others: set[str] = set()  # processes that are no step daemon
        self._fresh: set[str] = set()  # those that were none at their first look, the last one
        self._steps: dict[str, tuple[str, str]] = {}  # process -> (job, step)
        self._jobs: dict[str, _Job] = {}
        self.trouble = ""  # what cannot be read, and what would mend it

    def look(self) -> None:
        """Find the jobs that are here now.

        Raises:
            OSError: /proc cannot be listed.
        """
        processes = {name for name in os.listdir(self._proc) if name[0] in "123456789"}  # noqa: PTH208  # thousands
        self._others &= processes
        fresh: set[str] = set()
        self._steps = {p: step for p, step in self._steps.items() if p in processes and self._name(p) == "slurmstepd"}
        for process in processes - self._others - self._steps.keys():
            name = self._name(process)
            if name == "slurmstepd":
                # Without a title it has only begun: the next reading will show.
                if not self._is_of_root(process):
                    self._others.add(process)
                elif found := _TITLE.match(self._read(process, "cmdline")):
                    self._steps[process] = found[1], found[2]
            elif name not in ("", "slurmd"):
                # Between fork and exec a step daemon is called as the thread of slurmd that makes it, which since 25.05
                # is "worker[7]" and the like (Slurm: src/common/threadpool.c): so one look does not do.
                (self._others if process in self._fresh else fresh).add(process)
        self._fresh = fresh
        running = {job for job, _ in self._steps.values()}
        self._jobs = {job: self._jobs.get(job) or _Job() for job in running}
        answers = set()
        for process, (name, step) in self._steps.items():
            job = self._jobs[name]
            if not job.complete and int(process) not in job.answered:
                answers.add(self._ask(job, process, step))
        # Between two jobs it is not known that the next one's can be read: what was reported stands until one could be.
        if False in answers:
            self.trouble = NO_ENVIRONMENT
        elif True in answers:
            self.trouble = ""

    @property
    def running(self) -> frozenset[str]:
        return frozenset(self._jobs)

    def processes(self) -> dict[str, list[int]]:
        """Return a process of each job, where one could be read."""
        return {name: [job.process] for name, job in self._jobs.items() if job.process is not None}

    @property
    def complete(self) -> bool:
        """Whether no job here holds a GPU that is not known of."""
        return all(job.complete for job in self._jobs.values())

    def note(self, job: str, slot: int) -> None:
        """A process of this job holds this GPU: so the job does, for as long as it runs."""
        if job in self._jobs:
            self._jobs[job].seen.add(slot)

    def holders(self, slot: int, *, claimed: bool) -> list[str]:
        """The jobs that hold a GPU, the oldest first; with `claimed`, those that only say so, if no other does."""
        seen = [name for name, job in self._jobs.items() if slot in job.seen]
        given = [name for name, job in self._jobs.items() if slot in job.given] if claimed else []
        return sorted(seen or given, key=int)

    def of_step(self, process: int) -> str | None:
        """The job whose step daemon this process is."""
        found = self._steps.get(str(process))
        return found[0] if found else None

    def by_environment(self, process: str) -> str | None:
        """The job that a process says it belongs to, if that is its user's and runs here.

        Raises:
            OSError: it has ended, or is not to be read.
        """
        job = self._environment(process).get("SLURM_JOB_ID", "")
        return job if job in self._jobs and self._jobs[job].user == self._user(process) else None

    def _ask(self, job: _Job, process: str, step: str) -> bool | None:
        """Look into the environment of a step's process. Gives whether it may be read, None where there is none."""
        denied = False
        for child in self._children(process):
            try:
                pairs = self._environment(child)
            except PermissionError:
                denied = True
                continue
            except OSError:  # it has just ended
                continue
            if "SLURM_JOB_ID" not in pairs:
                continue  # not yet begun, or the daemon's own
            of_job = step in _SCRIPTS  # in others SLURM_JOB_GPUS is handed down from the batch script's node
            slots = [self._slot_of(item) for item in pairs.get(_variable(of_job), "").split(",") if item]
            job.given |= {slot for slot in slots if slot is not None}
            job.complete = job.complete or (of_job and None not in slots)
            job.answered.add(int(process))
            job.user, job.process = self._user(child), int(child)
            return True
        return False if denied else None

    def _environment(self, process: str) -> dict[str, str]:
        """
        Raises:
            OSError: it has ended, or may not be read.
        """
        with open(f"{self._proc}/{process}/environ", encoding="utf-8", errors="replace") as file:  # noqa: PTH123  # quick
            return dict(item.partition("=")[::2] for item in file.read(MAX_ENVIRONMENT).split("\0"))

    def _children(self, process: str) -> Iterator[str]:
        folder = f"{self._proc}/{process}/task"
        try:
            threads = os.listdir(folder)  # noqa: PTH208  # names only
        except OSError:
            return
        for thread in threads:
            yield from self._read(process, f"task/{thread}/children").split()

    def _user(self, process: str) -> int | None:
        """Real user of a process that has not ended."""
        found = _USER.search(self._read(process, "status"))
        return int(found[1]) if found else None

    def _is_of_root(self, process: str) -> bool:
        return self._user(process) in (0, None)  # ended meanwhile: the next reading will show

    def _name(self, process: str) -> str:
        """ "" when the process has ended meanwhile. By hand, as each process that begins is asked twice: a third of
        what `open` takes."""
        try:
            descriptor = os.open(f"{self._proc}/{process}/comm", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return ""
        try:
            return os.read(descriptor, 64).decode("utf-8", "replace").rstrip("\n")
        except OSError:
            return ""
        finally:
            os.close(descriptor)

    def _read(self, process: str, file: str) -> str:
        """ "" when the process has ended meanwhile."""
        try:
            with open(f"{self._proc}/{process}/{file}", encoding="utf-8", errors="replace") as opened:  # noqa: PTH123  # quick
                return opened.read()
        except OSError:
            return ""


def _variable(of_job: bool) -> str:
    return "SLURM_JOB_GPUS" if of_job else "SLURM_STEP_GPUS"

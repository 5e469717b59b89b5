"""Which job holds which GPU: Slurm's by its step daemons, cgroups and environments, Kubernetes' by the kubelet.

Only changes are reported: (slot, job) and, when it is known that no job holds it, (slot, None). A process that belongs
to no job makes no job of its own. Unknown is not none: while something that could hold a GPU cannot be read, nothing is
reported of that GPU, but that the job reported before has ended.

A Slurm job keeps every GPU that it was seen with until it has ended on this node, as Slurm's allocations do: a rank
that died, or one that is between two programs, has not given its GPU away. Of several jobs on one GPU (MIG instances,
shares) the first is reported until it ends; where Slurm itself runs in pods its job is, not the pod.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from drover_agent.sources.base import Entity, Reading
from drover_agent.sources.gpus import Gpus
from drover_agent.sources.workloads.kubernetes import Pods, PodsError, in_pod
from drover_agent.sources.workloads.processes import ProcessReport
from drover_agent.sources.workloads.slurm import SlurmJobs, job_in_cgroup

RESULT_LOST_S = 2.5  # a read of about the sampler's limit may have been given up: all is reported again then
MAX_ANCESTORS = 64
GOOD_READS = 12  # until a trouble is reported as over: a change of the inventory is a new Hello of the node
TROUBLE = "jobs.trouble"  # key of the inventory
HIDDEN = (
    "other users' processes cannot be seen, so that no GPU can be said to be held by nobody: mount /proc without "
    "hidepid for the agent, and run it in the machine's own PID namespace (hostPID in Kubernetes)"
)
INITIAL = "pid:[4026531836]"  # the machine's own namespace (kernel: include/linux/proc_ns.h, PROC_PID_INIT_INO)

_log = logging.getLogger(__name__)


class JobsSource:
    """Asks at each read; `gpus` says which processes hold which GPU."""

    name = "jobs"
    interval_s = 5.0

    def __init__(
        self,
        proc: Path,
        gpus: Gpus,
        kubelet_socket: str,
        resources: Sequence[str],
        processes: ProcessReport | None = None,
    ) -> None:
        """
        Args:
            resources: patterns for the names that Kubernetes has for GPUs.
            processes: reports the processes that hold them too; None: nothing does.
        """
        self._proc, self._gpus = proc, gpus
        self._slurm = SlurmJobs(proc, self._slot_of)
        self._pods = Pods(kubelet_socket, resources, self._slot_of)
        self._process_report = processes
        self._reported: dict[int, str | None] = {}
        self._stepped: set[str] = set()  # of these, Slurm's whose step daemons were seen
        self._minors: tuple[tuple[Entity, ...], dict[int, int]] = (), {}
        self._trouble = ""
        self._good = 0  # reads in a row without a trouble
        self._processes: dict[str, list[int]] = {}  # of jobs, as far as this reading came across them

    def read(self, now_ms: int) -> Reading:
        began = time.monotonic()
        reading = Reading()
        gpus = [entity.gpu for entity in self._gpus.all() if entity.gpu is not None]
        if not gpus:
            return reading
        self._slurm.look()
        self._processes = self._slurm.processes()
        trouble = [] if self._sees_all() else [HIDDEN]
        pods: dict[int, list[str]] | None = None
        asked = True
        try:
            pods = self._pods.holders()
        except PodsError as error:
            asked = False
            trouble.append(str(error))
        # All before any is reported: of what jobs hold, their processes are part of the evidence.
        owners = {gpu: self._owners(gpu, in_pods=pods is not None) for gpu in gpus}
        certain = asked and self._slurm.complete and not self._pods.unplaced and HIDDEN not in trouble
        for gpu in gpus:
            jobs, clear = owners[gpu]
            of_slurm = self._slurm.holders(gpu, claimed=not jobs)
            jobs = list(dict.fromkeys([*of_slurm, *jobs, *(pods or {}).get(gpu, [])]))
            reported = self._reported.get(gpu)
            if jobs and reported not in jobs:
                self._report_holder(reading, gpu, jobs[0])
            elif not jobs and ((certain and clear) or (reported and self._ended(reported, asked=asked))):
                self._report_holder(reading, gpu, None)
        self._set_jobs(pods or {})
        running = self._slurm.running
        self._stepped = {job for job in self._reported.values() if job and (job in running or job in self._stepped)}
        self._report([*trouble, self._slurm.trouble], reading)
        if self._process_report is not None:
            known = self._gpus.pids() if HIDDEN not in trouble else {}
            self._process_report.report({gpu: known.get(gpu) for gpu in gpus}, reading, now_ms)
        if time.monotonic() - began > RESULT_LOST_S:
            self._reported.clear()
            if self._process_report is not None:
                self._process_report.forget()
        return reading

    def close(self) -> None:
        self._pods.close()

    def _report_holder(self, reading: Reading, gpu: int, job: str | None) -> None:
        if gpu not in self._reported or self._reported[gpu] != job:
            self._reported[gpu] = job
            reading.holdings.append((gpu, job))

    def _ended(self, job: str, *, asked: bool) -> bool:
        """Return whether a reported job that is no longer seen is over. Pods have a slash, and only the kubelet knows
        them. A job known by its processes' cgroups alone may go on where they cannot be asked."""
        return asked if "/" in job else job in self._stepped and job not in self._slurm.running

    def _owners(self, gpu: int, *, in_pods: bool) -> tuple[list[str], bool]:
        """Return the jobs of the processes on a GPU, and whether each process' job is known."""
        processes = self._gpus.pids().get(gpu)
        jobs, clear = [], processes is not None
        for process in processes or ():
            job, known = self._owner(process, in_pods=in_pods)
            clear = clear and known
            if job is not None:
                jobs.append(job)
                self._processes.setdefault(job, []).append(process)
                self._slurm.note(job, gpu)
        return jobs, clear

    def _set_jobs(self, pods: Mapping[int, Sequence[str]]) -> None:
        """Note the processes of each job. A GPU that several pods share shows none of theirs."""
        for gpu, names in pods.items():
            if len(names) == 1 and self._reported.get(gpu) == names[0]:
                found = [process for process in self._gpus.pids().get(gpu, ()) if self._is_in_pod(process)]
                self._processes.setdefault(names[0], []).extend(found)
        held = set(filter(None, self._reported.values()))
        self._gpus.set_jobs({job: tuple(dict.fromkeys(self._processes.get(job, ()))) for job in held})

    def _is_in_pod(self, process: int) -> bool:
        try:
            return in_pod(_text(f"{self._proc}/{process}/cgroup"))
        except OSError:  # it has ended
            return False

    def _owner(self, process: int, *, in_pods: bool) -> tuple[str | None, bool]:
        """(the Slurm job of a process, whether that is known). Those of pods come from the kubelet's list."""
        try:
            cgroup = _text(f"{self._proc}/{process}/cgroup")
            if job := job_in_cgroup(cgroup):
                return job, True
            state, parent = self._parent(process)
            if state == "Z":  # its cgroup is the root's and its environment empty, whatever it was
                return None, False
            for _ in range(MAX_ANCESTORS):
                if job := self._slurm.of_step(parent):
                    return job, True
                if parent <= 1:
                    break
                _, parent = self._parent(parent)
            if in_pod(cgroup):
                return None, in_pods
            return self._by_environment(process)
        except (OSError, ValueError, IndexError):  # it has ended, or is not to be seen
            return None, False

    def _sees_all(self) -> bool:
        """Not where /proc is mounted with hidepid or is that of a container."""
        try:
            self._parent(1)
            return str((self._proc / "self/ns/pid").readlink()) == INITIAL
        except (OSError, ValueError, IndexError):
            return False

    def _parent(self, process: int) -> tuple[str, int]:
        """(state, parent), of /proc/PID/stat: proc(5). The name in it may hold anything."""
        rest = _text(f"{self._proc}/{process}/stat").rpartition(")")[2].split()
        return rest[0], int(rest[1])

    def _by_environment(self, process: int) -> tuple[str | None, bool]:
        """For a process that left its step, where Slurm tracks processes by their parents."""
        if not self._slurm.running:
            return None, True
        return self._slurm.by_environment(str(process)), True

    def _slot_of(self, device: str) -> int | None:
        """Return the slot of the GPU with a UUID, of one whose instance has it, or of the device file so numbered."""
        if not device.isdecimal():
            found = self._gpus.find(uuid=device)
            return found.gpu if found else None
        entities = self._gpus.all()
        if self._minors[0] != entities:
            self._minors = entities, self._read_minors()
        slots = {entity.gpu for entity in entities}
        # Without the driver's own list the order of device files is taken to be NVML's: both follow the bus.
        slot = self._minors[1].get(int(device)) if self._minors[1] else int(device)
        return slot if slot in slots else None

    def _read_minors(self) -> dict[int, int]:
        """Number of the device file -> slot (NVIDIA driver README, "the /proc file system interface")."""
        found: dict[int, int] = {}
        for file in (self._proc / "driver/nvidia/gpus").glob("*/information"):
            gpu = self._gpus.find(pci=file.parent.name)
            minor = re.search(r"^Device Minor:\s*(\d+)", file.read_text("utf-8", "replace"), re.MULTILINE)
            if gpu is not None and gpu.gpu is not None and minor:
                found[int(minor[1])] = gpu.gpu
        return found

    def _report(self, parts: Iterable[str], reading: Reading) -> None:
        trouble = "; ".join(filter(None, parts))
        self._good = 0 if trouble else self._good + 1
        if trouble != self._trouble and (trouble or self._good >= GOOD_READS):
            self._trouble = trouble
            reading.inventory[TROUBLE] = trouble
            if trouble:
                _log.warning("jobs: %s", trouble)


def _text(path: str) -> str:
    """A file of /proc/PID, which the kernel gives whole in one read; there may be hundreds to read."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, 65_536).decode("utf-8", "replace")
    finally:
        os.close(descriptor)

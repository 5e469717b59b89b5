"""What happens in a case besides jobs: changes of parameters, counts, states, rows that do not come, lines, labels."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from drover_simulator.strangers.d.engine import Edits
from drover_simulator.strangers.d.jobs import Job
from drover_simulator.strangers.d.site import Site
from drover_simulator.strangers.writer import iso


@dataclass
class Plan:
    site: Site
    jobs: list[Job]
    edits: Edits = field(default_factory=Edits)
    counts: dict[tuple[str, str, int], list[np.ndarray]] = field(default_factory=dict)  # scope, column, what -> times
    rates: list[tuple[str, str, int, float, float, float, float]] = field(
        default_factory=list
    )  # ..., a, b, rate at a, at b
    states: list[tuple[str, str, int, float, float, float]] = field(default_factory=list)  # ..., a, b, value
    scales: list[tuple[str, str, int, float, float, float]] = field(default_factory=list)  # the same: factor
    adds: list[tuple[str, str, int, float, float, float]] = field(default_factory=list)
    silent: list[tuple[str, int, float, float]] = field(default_factory=list)  # "gpu", "node", "gpus": all of a node
    thin: list[tuple[str, int, float, float, float]] = field(default_factory=list)  # share of rows that is lost
    boots: list[tuple[int, float]] = field(default_factory=list)  # node: counters begin again
    shifts: list[tuple[int, float, float, float]] = field(default_factory=list)  # node, a, b, s: its clock
    events: list[tuple[float, int, int | None, str, str, str]] = field(default_factory=list)
    labels: list[dict[str, Any]] = field(default_factory=list)
    facts: list[tuple[float, int, str, str]] = field(default_factory=list)  # s, node, key, value
    taken: dict[int, list[tuple[float, float]]] = field(default_factory=dict)  # GPU -> when something has it
    jobs_taken: dict[str, list[tuple[float, float]]] = field(default_factory=dict)

    # ---- who is free ----
    def free(self, gpus: Any, a: float, b: float) -> bool:
        return not any(x < b and a < y for g in np.atleast_1d(gpus) for x, y in self.taken.get(int(g), ()))

    def take(self, gpus: Any, a: float, b: float, margin: float = 600.0) -> None:
        for g in np.atleast_1d(gpus):
            self.taken.setdefault(int(g), []).append((a - margin, b + margin))

    def job_free(self, job: Job, a: float, b: float) -> bool:
        return not any(x < b and a < y for x, y in self.jobs_taken.get(job.id, ()))

    def take_job(self, job: Job, a: float, b: float, margin: float = 420.0) -> None:
        self.jobs_taken.setdefault(job.id, []).append((a - margin, b + margin))

    def job_at(self, gpu: int, t: float) -> Job | None:
        return next((j for j in self.jobs if j.start <= t < j.end and gpu in j.members), None)

    def running(self, a: float, b: float, sync: bool = False, least: int = 1) -> list[Job]:
        """Jobs that run from a (at least ten minutes old) to b, or to near it."""
        return [
            j
            for j in self.jobs
            if j.start + 600 <= a and j.end >= b and j.used and (j.sync or not sync) and len(j.members) >= least
        ]

    # ---- what shows ----
    def count(self, scope: str, column: str, what: int, times: Any) -> None:
        self.counts.setdefault((scope, column, int(what)), []).append(np.atleast_1d(np.asarray(times, float)))

    def rate(
        self, scope: str, column: str, what: int, a: float, b: float, first: float, last: float | None = None
    ) -> None:
        """Counts a second, from `first` to `last`, as a Poisson process."""
        self.rates.append((scope, column, int(what), a, b, first, first if last is None else last))

    def state(self, scope: str, column: str, what: int, a: float, b: float, value: float) -> None:
        self.states.append((scope, column, int(what), a, b, value))

    def event(self, t: float, gpu: int, code: int, text: str, pid: str | None = None) -> None:
        """Write an XID's line as the driver does."""
        if not -86400 < t < self.site.span:
            return
        rng = self.site.rng
        who = (
            pid
            if pid is not None
            else f"pid={int(rng.integers(2000, 400000))}, name={rng.choice(['python3', 'python', 'pt_main_thread'])}, "
        )
        message = f"NVRM: Xid (PCI:{self.site.bus(gpu)}): {code}, {who}{text}"
        self.events.append((t, int(self.site.node_of[gpu]), int(self.site.slot_of[gpu]), "xid", str(code), message))

    def kernel(self, t: float, node: int, gpu: int | None, code: str, text: str, kind: str = "kernel") -> None:
        if t < self.site.span:
            self.events.append((t, node, gpu, kind, code, text))

    def place(self, gpu: int) -> list[Any]:
        return [self.site.names[int(self.site.node_of[gpu])], int(self.site.slot_of[gpu])]

    def label(self, kind: str, cause: str, a: float, b: float | None, *, gpu: int | None = None, node: int | None = None,
              members: list[list[Any]] | None = None, hardware: bool = True, **more: Any) -> None:  # fmt: skip
        """Add a label: of a GPU, of a node, or of `members`."""
        site = self.site
        where = [self.place(gpu)] if gpu is not None else members or [[site.names[int(node or 0)], None]]
        scope = "gpu" if gpu is not None else "node" if members is None else more.pop("scope", "group")
        end = None if b is None or b >= site.span else site.t0_ms + b * 1000
        if "precursor_start" in more:
            more["precursor_start"] = iso(site.t0_ms + more["precursor_start"] * 1000)
        self.labels.append({
            "id": f"d{len(self.labels):03d}", "kind": kind, "cause": cause, "hardware": hardware, "scope": scope,
            "node": where[0][0], "gpu": where[0][1], "members": where, "start": site.t0_ms + max(a, 0) * 1000, "end": end, **more,
        })  # fmt: skip

    # ---- what follows for jobs ----
    def kill(self, gpu_or_node: Any, t: float, job: Job, wait: float, *, again: bool, lost: set[int]) -> float:
        """A member is gone at `t`: the others spin in NCCL until its watchdog ends the job. Gives when that is."""
        end = min(t + wait, job.end)
        if job.sync:
            self.edits.during(t, end, "spin", job.members, 1.0)
            old_end, job.end = job.end, end
        else:
            old_end = job.end
            hit = np.array([m in lost for m in job.members])
            rest = np.isin(job.groups, job.groups[hit])
            self.edits.set(t, "spin", job.members[rest], 2.0)
            self.edits.set(old_end, "spin", job.members[rest], 0.0)
            return end
        if again and end + 300 < min(old_end, self.site.span):
            successor = job.restart_from(end + float(self.site.rng.uniform(90, 600)), lost)
            if successor is not None:
                successor.end = old_end
                self.jobs.append(successor)
        return end

    def reboot(self, node: int, t: float, lasts: float, *, clean: bool = True) -> None:
        """A node is away and back; its volatile counters begin again."""
        name = self.site.names[node]
        self.silent.append(("node", node, t, t + lasts))
        self.edits.during(t, t + lasts, "off", node, 1.0)
        self.boots.append((node, t + lasts))
        if clean:
            self.kernel(
                t - 5,
                node,
                None,
                "agent_stopped",
                f"{name}: the agent was asked to stop",
                "lifecycle",
            )
        if t + lasts < self.site.span:
            self.kernel(t + lasts, node, None, "agent_started", f"{name}: the agent started", "lifecycle")

    def clear_node(self, node: int, t: float) -> bool:
        """End what runs on a node shortly before `t`, as a drain does; false where that would tear a large job apart."""
        mine = [j for j in self.jobs if j.start < t < j.end and np.isin(self.site.node_of[j.members], node).any()]
        if any(len(set(self.site.node_of[j.members])) > 2 for j in mine):
            return False
        for job in mine:
            job.end = t - float(self.site.rng.uniform(60, 300))
        return True

"""Plan an adversary's fleet: which troubles hit which units and when, which jobs they end, and the ground truth."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from drover_core.times import iso
from drover_simulator.adversary.facts import facts_of
from drover_simulator.adversary.jobs import Job
from drover_simulator.adversary.kinds import (
    CREEPING,
    FAILS_AGAIN,
    FAULTS,
    INTERMITTENT,
    KINDS,
    NEGATIVES,
    NVLINK_ENDS_GPU,
    RAMP_S,
    Kind,
    weights,
)
from drover_simulator.adversary.stock import Stock
from drover_simulator.adversary.trouble import Trouble
from drover_simulator.hardware import Hardware, Ints

SETTLE_S = 300.0  # without a trouble on a node before and after each one, so that they can be distinguished
CRASH_PAUSE_S = 1300.0  # after a crash, without a trouble, as the job starts again and loads
RESTART_S = (180.0, 600.0)
TRIES = 60
MOST_TRIED = 3  # kinds dealt for each trouble wanted, at most
VISIBLE = 0.03  # share of speed from which a growing straggler counts as grown
VANISHES = 0.5  # of GPUs whose remaps pile up (one is published; the share is assumed)
PREEMPTED, APPLICATION, LOST_RANK = (45,), (43, 45), (45, 43)
JOB_ENDS_AFTER_S = {
    ("xid", "application"): 3.0, ("memory", "uncorrectable"): 5.0, ("xid", "uncontained_ecc"): 5.0,
    ("xid", "spi_failure"): 5.0, ("xid", "nvlink5"): 20.0, ("liveness", "maintenance"): -30.0,
}  # fmt: skip
WATCHDOG_S = (30.0, 600.0)  # until a job that lost a rank ends: NCCL has 600 s, launchers may be faster


@dataclass(frozen=True, slots=True)
class Plan:
    jobs: list[Job]
    troubles: list[Trouble]
    labels: list[dict[str, Any]]
    inventory: list[dict[str, Any]]
    crashes: dict[int, tuple[int, ...]]


def draw_plan(
    rng: np.random.Generator, hardware: Hardware, jobs: list[Job], end_s: float, start_ms: int, faults: int,
    negatives: int,
) -> Plan:  # fmt: skip
    """Return a plan with `faults` and `negatives` troubles until `end_s`, or fewer in a small fleet, and what follows.

    A kind without a place is skipped; faults and negatives alternate.
    """
    planner = _Planner(rng, hardware, jobs, end_s)
    decks = {False: _deal(rng, NEGATIVES, MOST_TRIED * negatives), True: _deal(rng, FAULTS, MOST_TRIED * faults)}
    left = {False: negatives, True: faults}
    while any(left.values()):
        more_faults = left[True] > left[False]
        name = next(decks[more_faults], None)
        if name is None:
            left[more_faults] = 0
        elif any(planner.attempt(name, KINDS[name]) for _ in range(TRIES)):
            left[more_faults] -= 1
    return planner.finish(start_ms)


def _deal(rng: np.random.Generator, table: Mapping[tuple[str, str], Kind], count: int) -> Iterator[tuple[str, str]]:
    """Yield `count` kinds: rounds of all of them in random order, each as often as its weight."""
    deck: list[tuple[str, str]] = []
    once = weights(table)
    for _ in range(count):
        if not deck:
            deck = [once[i] for i in rng.permutation(len(once))]
        yield deck.pop()


class _Planner:
    def __init__(self, rng: np.random.Generator, hardware: Hardware, jobs: list[Job], end_s: float) -> None:
        self._rng, self._hw, self._end_s = rng, hardware, end_s
        self._jobs = list(jobs)
        self._crashes: dict[str, tuple[int, ...]] = {}
        self._ended: set[str] = set()  # jobs
        self._away: list[tuple[int, float, float]] = []  # node, from, to: no job may start there
        self._busy: dict[int, list[tuple[float, float]]] = {}
        self._troubles: list[Trouble] = []
        self._stock = Stock(hardware)
        self._leafs = np.unique([node.leaf for node in hardware.spec.nodes], return_inverse=True)[1]
        self._pools = np.unique([node.pool for node in hardware.spec.nodes], return_inverse=True)[1]

    # One trouble

    def attempt(self, name: tuple[str, str], kind: Kind) -> bool:
        """Plan one trouble of a kind. Return False if it does not fit."""
        rng = self._rng
        low, high = kind.duration_s
        lasts = min(float(np.exp(rng.uniform(np.log(low), np.log(high)))), 0.5 * self._end_s)
        if name[0] == "drift" and kind.hardware:
            lasts = self._end_s  # nobody repairs it
        job: Job | None = None
        if kind.needs != "free":
            job = self._job_for(kind, lasts)
            if job is None:
                return False
            first, last = max(job.ready_s() + SETTLE_S, SETTLE_S), min(job.end_s, self._end_s)
            lasts = min(lasts, last - first - 60)
            start_s = float(rng.uniform(first, last - lasts - 30))
            node = int(rng.choice(job.nodes))
        else:
            latest = max(self._end_s - (0.2 if kind.ends_job else 1.0) * lasts - 60, SETTLE_S)
            start_s = 0.0 if name[0] == "drift" and kind.hardware else float(rng.uniform(SETTLE_S, latest))
            node = int(rng.integers(self._hw.nodes))
        if kind.boards and self._hw.sku_of_node[node].name not in kind.boards:
            return False
        start_s = round(start_s, 1)
        gpus, nodes = self._target(name, kind, job, node, start_s, lasts)
        if not len(nodes):
            return False
        severity = float(np.exp(rng.uniform(*np.log(kind.severity))))
        trouble = self._trouble(name, kind, gpus, nodes, job, start_s, lasts, severity)
        return trouble is not None and self._take(trouble, kind) and self._chain(trouble, kind)

    def _trouble(
        self, name: tuple[str, str], kind: Kind, gpus: Ints, nodes: Ints, job: Job | None, start_s: float,
        lasts: float, severity: float,
    ) -> Trouble | None:  # fmt: skip
        rng = self._rng
        onset = str(rng.choice(kind.onsets))
        ramp_s = float(np.exp(rng.uniform(*np.log(RAMP_S)))) if onset == CREEPING else 0.0
        on_s = float(np.exp(rng.uniform(np.log(20), np.log(600)))) if onset == INTERMITTENT else 0.0
        drawn = facts_of(rng, name, self._hw, nodes, gpus, job, severity)
        links = np.flatnonzero(np.isin(self._hw.link_node, nodes))
        links = np.roll(links, -int(rng.integers(max(1, len(links))))) if len(nodes) == 1 else links
        return Trouble(
            f"{len(self._troubles) + 1:03d}", *name, gpus, nodes, links, None, start_s, round(start_s + lasts, 1),
            round(drawn.pop("severity", severity), 4), onset, min(ramp_s, 0.8 * lasts), on_s,
            on_s * float(rng.uniform(0.5, 4.0)), drawn,
        )  # fmt: skip

    def _job_for(self, kind: Kind, lasts: float) -> Job | None:
        """Return a job of the kind that is needed, with time for the trouble; larger and longer ones more often."""
        fit, weight = [], []
        least = min(max(kind.duration_s[0], 0.3 * lasts), 0.4 * self._end_s)
        for job in self._jobs:
            room = min(job.end_s, self._end_s) - max(job.ready_s(), 0.0) - SETTLE_S - 100
            fits = {
                "train": job.trains, "many": job.trains and len(job.nodes) > 1, "any": True,
                "serve": job.pattern == "inference",
            }[kind.needs]  # fmt: skip
            if fits and room >= least:
                fit.append(job)
                weight.append(math.sqrt(len(job.gpus)) * room)
        return fit[int(self._rng.choice(len(fit), p=np.array(weight) / sum(weight)))] if fit else None

    def _target(
        self, name: tuple[str, str], kind: Kind, job: Job | None, node: int, start_s: float, lasts: float
    ) -> tuple[Ints, Ints]:
        """Return the GPUs and nodes to hit."""
        hw, nodes = self._hw, np.array([node])
        if kind.scope == "gpu":
            here = hw.gpus_of(node) if job is None else job.gpus[hw.gpu_node[job.gpus] == node]
            return self._rng.choice(here, 1), nodes
        if kind.scope == "job" and job is not None:
            return job.gpus, np.array(job.nodes)
        if kind.scope == "rack":
            nodes = np.flatnonzero(hw.rack == hw.rack[node])
        elif kind.scope == "leaf":
            nodes = np.flatnonzero(self._leafs == self._leafs[node])
        elif kind.scope == "pool":
            nodes = np.flatnonzero(self._pools == self._pools[node])
        elif kind.scope == "fleet":
            nodes = np.arange(hw.nodes)
        if name == ("drift", "rollout"):  # only nodes that are free all the time are updated
            held = {n for j in self._jobs if j.start_s < start_s + lasts and j.end_s > start_s - 60 for n in j.nodes}
            begin, end = start_s - SETTLE_S, start_s + lasts + SETTLE_S
            held |= {n for n, spans in self._busy.items() if any(begin < b and a < end for a, b in spans)}
            nodes = np.array([n for n in nodes if n not in held], np.int64)
        elif kind.scope in ("rack", "leaf") and len(nodes) * 2 > hw.nodes and hw.nodes > 2:
            return np.zeros(0, np.int64), np.zeros(0, np.int64)  # not most of the fleet at once
        return np.flatnonzero(np.isin(hw.gpu_node, nodes)), nodes

    def _take(self, t: Trouble, kind: Kind) -> bool:
        """Book the nodes of a trouble, and end its jobs. Return False if the nodes are not free."""
        ended = self._ended_by(t, kind)
        booked = dict.fromkeys(t.nodes.tolist(), (t.start_s, t.end_s))
        at_s = {job.id: t.start_s + self._ends_after(t) for job in ended}
        for job in ended:
            until = max(at_s[job.id] + CRASH_PAUSE_S, t.start_s)
            for n in job.nodes:
                booked[n] = (t.start_s, max(until, booked.get(n, (0.0, 0.0))[1]))
        broad = kind.scope == "fleet"
        for n, (a, b) in booked.items():
            if not broad and any(a - SETTLE_S < d and c < b + SETTLE_S for c, d in self._busy.get(n, [])):
                return False
        if any(at_s[job.id] <= job.start_s + 60 or job.id in self._ended for job in ended):
            return False  # the continuation of a job is drawn at its end: no earlier end is possible
        if not (t.kind == "drift" or broad):
            for n, span in booked.items():
                self._busy.setdefault(n, []).append(span)
        elif t.cause in ("power_limit", "clock_limit", "rollout"):
            for n in t.nodes.tolist():
                self._busy.setdefault(n, []).append((t.start_s, t.end_s))
        out = dict.fromkeys(t.nodes.tolist(), t.end_s) if t.name != ("xid", "application") else {}
        if kind.scope == "job":
            out = {}
        for job in ended:
            self._end_job(job, at_s[job.id], self._codes(t), set(out))
        if kind.ends_job:
            self._away += [(n, t.start_s, until) for n, until in out.items()]
        self._troubles.append(t)
        self._stock.change(t)
        return True

    def _ended_by(self, t: Trouble, kind: Kind) -> list[Job]:
        if not kind.ends_job:
            return []
        hit = set(t.nodes.tolist())
        running = [job for job in self._jobs if job.start_s < t.start_s < job.end_s]
        if kind.scope == "gpu":
            return [job for job in running if t.gpu in job.gpus]
        return [job for job in running if hit & set(job.nodes)]

    def _ends_after(self, t: Trouble) -> float:
        if t.kind == "hang":
            return t.end_s - t.start_s
        if t.name == ("xid", "preempted"):
            return 1.0
        if t.name == ("link", "leaf_down"):
            return t.facts["hold_s"]
        fixed = JOB_ENDS_AFTER_S.get(t.name)
        return t.facts.get("watchdog_s", 60.0) if fixed is None else fixed

    def _codes(self, t: Trouble) -> tuple[int, ...]:
        if t.name == ("liveness", "maintenance") or t.name == ("link", "leaf_down"):
            return ()
        return {("xid", "application"): APPLICATION, ("xid", "preempted"): PREEMPTED}.get(t.name, LOST_RANK)

    def _end_job(self, job: Job, at_s: float, codes: tuple[int, ...], without: set[int]) -> None:
        """End a job early; it starts again on its remaining nodes."""
        self._jobs[self._jobs.index(job)] = replace(job, end_s=at_s)
        self._ended.add(job.id)
        if codes:
            self._crashes[job.id] = codes
        base, _, attempt = job.id.partition("r")
        again_s = at_s + float(self._rng.uniform(*RESTART_S))
        again = job.again(f"{base}r{int(attempt or 0) + 1}", again_s, without, self._hw)
        if again is not None and again.end_s - again_s > 900:
            self._jobs.append(again)

    def _chain(self, t: Trouble, kind: Kind) -> bool:
        """Plan what follows from a fault: the GPU is lost by its NVLinks or memory, or the repair does not last."""
        rng = self._rng
        if not kind.hardware:
            return True
        follows = None
        if t.name == ("link", "nvlink") and rng.random() < NVLINK_ENDS_GPU:
            follows = t.end_s + SETTLE_S + 1
        if t.name == ("memory", "remaps_pile_up") and rng.random() < VANISHES:
            follows = t.end_s + SETTLE_S + 1
        if follows is not None:
            self._follow(t, ("liveness", "gpu_lost"), follows)
        elif kind.duration_s[1] >= 5400 and t.kind != "drift" and kind.scope != "job" and rng.random() < FAILS_AGAIN:
            self._follow(t, t.name, t.end_s + float(rng.uniform(2 * SETTLE_S + 1, 5400)))
        return True

    def _follow(self, t: Trouble, name: tuple[str, str], at_s: float) -> None:
        kind = KINDS[name]
        lasts = min(t.end_s - t.start_s, self._end_s - at_s - 60)
        if lasts < min(300.0, kind.duration_s[0]):
            return
        job = self._job_at(t.gpu, at_s, lasts) if kind.needs != "free" else None
        if kind.needs != "free" and (job is None or not (job.trains or kind.needs == "any")):
            return
        again = self._trouble(
            name, kind, t.gpus, t.nodes, job, round(at_s, 1), lasts, t.severity if name == t.name else 1.0
        )
        if again is not None:
            self._take(replace(again, follows=t.id), kind)

    def _job_at(self, gpu: int, at_s: float, lasts: float = 0.0) -> Job | None:
        for job in self._jobs:
            if job.ready_s() <= at_s and at_s + lasts <= job.end_s and gpu in job.gpus:
                return job
        return None

    # The whole

    def finish(self, start_ms: int) -> Plan:
        jobs: list[Job] = []
        for job in self._jobs:
            gone = {n for n, a, b in self._away if n in job.nodes and a < job.start_s < b}
            kept = job.again(job.id, job.start_s, gone, self._hw) if gone else job
            if kept is not None and kept.start_s < self._end_s and kept.end_s > kept.start_s:
                jobs.append(kept)
        jobs.sort(key=lambda job: (job.start_s, job.id))
        jobs = _apart(jobs, self._hw)
        number = {job.id: j for j, job in enumerate(jobs)}
        troubles: list[Trouble] = []
        labels: list[dict[str, Any]] = []
        ids: dict[str, str] = {}
        for t in sorted(self._troubles, key=lambda t: t.start_s):
            named = replace(t, id=f"t{len(troubles) + 1:03d}", follows=ids.get(t.follows, ""))
            ids[t.id], kind = named.id, KINDS[t.name]
            holder = next((j for j in jobs if j.start_s <= t.start_s < j.end_s and np.isin(t.gpus, j.gpus).any()), None)
            if kind.needs != "free":
                if holder is None:
                    continue
                named = replace(named, job=number[holder.id])
                if holder.end_s < t.end_s and not kind.ends_job:
                    named = replace(named, end_s=round(holder.end_s, 1))
            troubles.append(named)
            labels.append(self._label(named, kind, holder, start_ms))
        crashes = {number[id_]: codes for id_, codes in self._crashes.items() if id_ in number}
        return Plan(jobs, troubles, labels, self._stock.rows(start_ms), crashes)

    def _label(self, t: Trouble, kind: Kind, holder: Job | None, start_ms: int) -> dict[str, Any]:
        def at(seconds: float) -> str:
            return iso(start_ms + round(seconds * 1000))

        names, slot = self._hw.names, int(self._hw.gpu_slot[t.gpu]) if kind.scope == "gpu" else None
        members: list[list[Any]] = [[names[n], slot] for n in t.nodes.tolist()]
        if t.name == ("link", "nvlink") and t.facts["other"] >= 0:
            members.append([names[t.node], int(self._hw.gpu_slot[int(t.facts["other"])])])
        grown = t.start_s
        if t.onset == CREEPING and t.kind == "straggler":
            grown += t.ramp_s * min(1.0, VISIBLE / t.severity)
        return {
            "id": t.id, "kind": t.kind, "node": names[t.node], "gpu": slot, "start": at(t.start_s),
            "end": None if t.end_s >= self._end_s else at(t.end_s), "cause": t.cause, "hardware": kind.hardware,
            "scope": kind.scope, "members": members, "severity": t.severity, "onset": t.onset, "grown": at(grown),
            "job": None if holder is None else holder.id, "job_gpus": 0 if holder is None else len(holder.gpus),
            "follows": t.follows or None,
        }  # fmt: skip


def _apart(jobs: list[Job], hardware: Hardware) -> list[Job]:
    """Return the jobs without overlaps: a job begins without the nodes that another job still holds."""
    until = np.full(hardware.gpus, -np.inf)
    result = []
    for job in jobs:
        taken = set(hardware.gpu_node[job.gpus[until[job.gpus] > job.start_s]].tolist())
        kept = job.again(job.id, job.start_s, taken, hardware) if taken else job
        if kept is not None:
            until[kept.gpus] = kept.end_s
            result.append(kept)
    return result

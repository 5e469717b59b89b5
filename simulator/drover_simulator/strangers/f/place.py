"""Where and when: booking of nodes, events as kernels write them, precursors, reboots. Faults use this."""

from __future__ import annotations

import numpy as np

from drover_simulator.strangers.f.jobs import Job, cut, load_of
from drover_simulator.strangers.f.sim import Plan
from drover_simulator.strangers.f.world import Fleet, power_parts, steady

MIN = 60.0
SYNC = ("train", "pipe", "moe")


class Place:
    def __init__(self, f: Fleet, plan: Plan, jobs: list[Job], span: float, cols, ncols, lcols, rng) -> None:
        self.f, self.plan, self.jobs, self.span, self.rng = f, plan, jobs, span, rng
        self.cols, self.ncols, self.lcols = cols, ncols, lcols
        self.booked: list[list[tuple[float, float]]] = [[] for _ in range(f.n)]
        self.labels: list[dict] = []
        self.events: list[tuple] = []
        self.facts: list[tuple] = []  # t, node, changes of its inventory
        self.taken: dict[str, list[tuple[float, float]]] = {}  # by job: when a straggler or a hang has it
        self.short = span < 6000
        self.clock_rows = True
        self.bus = rng.permutation([0x1B, 0x43, 0x52, 0x61, 0x9D, 0xC3, 0xD1, 0xDF])

    # -- draws -------------------------------------------------------------------------------------------------------
    def size(self, lo: float, hi: float, log: bool = False) -> float:
        """From the low half as often as from the high one."""
        a = self.rng.random() * 0.5 + (0.5 if self.rng.random() < 0.5 else 0)
        return float(lo * (hi / lo) ** a) if log else float(lo + (hi - lo) * a)

    def window(self, lo_min=32.0, hi_min=110.0) -> tuple[float, float]:
        lo, hi = lo_min * MIN, hi_min * MIN
        if self.short:
            lo, hi = 0.3 * self.span, 0.6 * self.span
        d = self.rng.uniform(lo, hi)
        t0 = self.rng.uniform(min(0.08 * self.span, 900), max(0.1 * self.span, self.span - lo - 60))
        return t0, min(self.span + 1, t0 + d)

    def ramp(self, t0: float, t1: float, hi_min=60.0) -> float:
        return 0.0 if self.rng.random() < 0.5 else min(self.rng.uniform(10, hi_min) * MIN, 0.7 * (t1 - t0))

    def end(self, t1: float):
        return None if t1 >= self.span else t1

    def free(self, nodes, t0, t1) -> bool:
        return all(t1 + 1260 <= a or b + 1260 <= t0 for n in nodes for a, b in self.booked[n])

    def book(self, nodes, t0, t1) -> None:
        for n in nodes:
            self.booked[n].append((t0, t1))

    def nodes(self, t0, t1, ok=lambda n: True) -> int | None:
        out = [n for n in range(self.f.n) if ok(n) and self.free([n], t0, t1)]
        return int(self.rng.choice(out)) if out else None

    def job_at(self, i: int, t: float) -> Job | None:
        return next((j for j in self.jobs if j.t0 <= t < j.t1 and j.has(i)), None)

    def jobs_in(self, t0, t1, kinds, ok=lambda j: True) -> list[Job]:
        out = [j for j in self.jobs if j.kind in kinds and j.t0 < t0 - 300 and j.t1 >= t1 and ok(j)]
        self.rng.shuffle(out)
        return out

    def job_free(self, job: Job, t0: float, t1: float) -> bool:
        """No other straggler or hang in the job: the slower one would hide the other."""
        return all(t1 + 600 < a or b + 600 < t0 for a, b in self.taken.get(job.root or job.id, []))

    def take(self, job: Job, t0: float, t1: float) -> None:
        self.taken.setdefault(job.root or job.id, []).append((t0, t1))

    def gpu_in_load(self, t0, t1, loads) -> tuple[int, Job] | None:
        """A GPU of a job of these kinds whose node is free."""
        for job in self.jobs_in(t0, t1, loads):
            for i in self.rng.permutation(job.gpus)[:6]:
                if self.free([self.f.node_of[i]], t0, t1):
                    return int(i), job
        return None

    def any_gpu(self, t0, t1, ok=lambda i: True) -> int | None:
        for i in self.rng.permutation(self.f.g)[:200]:
            if self.free([self.f.node_of[i]], t0, t1) and ok(int(i)):
                return int(i)
        return None

    # -- records -----------------------------------------------------------------------------------------------------
    def event(self, t, i_or_node, kind, code, message, gpu=True):
        if 0 <= t < self.span:
            n = int(self.f.node_of[i_or_node]) if gpu else int(i_or_node)
            self.events.append(
                (t, self.f.names[n], int(self.f.slot[i_or_node]) if gpu else None, kind, str(code), message)
            )

    def xid(self, t, i, code, text, pid=True):
        proc = f"pid={int(self.rng.integers(2e3, 4e6))}, name=python3" if pid else "pid='<unknown>', name=<unknown>"
        bus = self.bus[self.f.slot[i] % 8]
        self.event(t, i, "xid", code, f"NVRM: Xid (PCI:0000:{bus:02x}:00): {code}, {proc}, {text}")

    def label(self, kind, cause, t0, t1, node=None, gpu=None, members=None, hardware=True, **more):
        names = self.f.names
        if members is None:
            members = [[names[node], None if gpu is None else int(self.f.slot[gpu])]]
        row = {
            "id": f"{'f' if hardware else 'n'}{len(self.labels) + 1:03d}",
            "kind": kind,
            "node": members[0][0] if node is None else names[node],
            "gpu": None if gpu is None else int(self.f.slot[gpu]),
            "start": max(0.0, t0),
            "end": None if t1 is None or t1 >= self.span else t1,
            "cause": cause,
            "hardware": hardware,
            "members": members,
            "severity": 1.0,
            **more,
        }
        self.labels.append(row)
        return row

    def precursor(self, what: str, t0: float, i: int | None, node: int) -> dict:
        """A third of some faults are announced. 20 to 60 min before, by what was published for such faults: corrected
        ECC and remaps before uncorrectable ones, link errors that ramp, heat that creeps, rows that go partly missing."""
        if self.rng.random() > 1 / 3 or t0 < 25 * MIN:
            return {}
        ps = t0 - min(self.rng.uniform(20, 60) * MIN, t0 - 300)
        if not self.free([node], ps, t0):
            return {}
        p, gpus = self.plan, self.f.gpus(node) if i is None else np.array([i])
        if what == "heat" and self.job_at(int(gpus[0]), ps) is None:
            what = "telemetry"  # an idle GPU's heat says nothing
        if what in ("ecc", "remap") and "ecc_dram_corrected" not in self.cols:
            what = "telemetry"
        if what == "ecc":
            p.eff("q_edc", gpus[:1], ps, t0, "set", self.size(10, 300, True) / 3600)
        elif what == "remap":
            p.eff("q_edc", gpus[:1], ps, t0, "set", 6 / 3600)
            for t in np.sort(self.rng.uniform(ps, t0, int(self.rng.integers(1, 4)))):
                p.bumps.append((t, "remapped_rows_corrected", gpus[:1], 1))
                p.sets.append((t, "pending", gpus[:1], 1.0))
                self.xid(t, gpus[0], 63, "Row Remapper: New row marked for remapping, reset gpu to activate.", False)
        elif what == "nvlink":
            for k in ("q_crc", "q_nvr"):
                p.eff(k, gpus, ps, t0, "add", self.size(60, 1500, True) / 3600, t0 - ps)
            what = "link_errors"
        elif what == "port":
            for k in ("l_sym", "l_rxe", "l_recov"):
                p.eff(
                    k,
                    self.f.link_of_gpu[gpus[:1]],
                    ps,
                    t0,
                    "add",
                    self.size(60, 1500, True) / 3600 / (9 if k == "l_recov" else 1),
                    t0 - ps,
                )
            what = "link_errors"
        elif what == "pcie":
            p.eff("q_pcie", gpus, ps, t0, "add", self.size(60, 1500, True) / 3600, t0 - ps)
            what = "link_errors"
        elif what == "heat":
            p.eff("m_rds", gpus, ps, t0, "mul", self.size(1.25, 1.6), t0 - ps)
        if what == "telemetry":
            p.drops.append((gpus, ps, t0, self.size(0.15, 0.6)))
        self.booked[node].append((ps, t0))
        return {"precursor": what, "precursor_start": ps}

    # -- what follows ------------------------------------------------------------------------------------------------
    def kill(self, i: int, t: float, again=True, without=()) -> Job | None:
        """The job on GPU i dies; schedulers start it again in 5 to 20 min, without the node."""
        job = self.job_at(i, t)
        if job is None:
            return None
        lo = t + self.rng.uniform(300, 1200)
        if len(set(self.f.node_of[job.gpus].tolist())) <= len(set(without)):
            again = False
        cut(self.jobs, job, t, set(without), lo if again else None, self.f.node_of)
        return job

    def clear(self, node: int, t0: float, t1: float) -> None:
        """No job on the node from t0 to t1."""
        for _ in range(40):
            job = next((j for j in self.jobs for i in self.f.gpus(node) if j.t0 < t1 and j.t1 > t0 and j.has(i)), None)
            if job is None:
                return
            if job.t0 >= t0:
                if len(set(self.f.node_of[job.gpus].tolist())) > 1:
                    keep = self.f.node_of[job.gpus] != node
                    job.gpus, job.w = job.gpus[keep], job.w[keep]
                else:
                    job.t0 = t1 + 120
                    job.t1 = max(job.t1, job.t0)
                continue
            cut(self.jobs, job, t0, {node}, t0 + self.rng.uniform(300, 900), self.f.node_of)

    def reboot(self, node: int, t0: float, t1: float) -> None:
        """Off from t0 to t1; counters start again, the agent says so."""
        self.plan.node_gone.append((node, t0, t1))
        if t1 < self.span:
            self.plan.resets.append((t1, node, True))
            self.event(t1 + 2, node, "lifecycle", "agent_started", "agent started, boot is new", gpu=False)

    def repair(self, node: int, t: float, gpus) -> float:
        """Operators drain the node some minutes after a fatal error, and boot it; or leave it. Returns the end."""
        if self.rng.random() < 0.35:
            self.clear(node, t + 60, self.span + 1)
            return self.span + 1
        a = t + self.rng.uniform(30, 60) * MIN
        b = a + self.rng.uniform(8, 25) * MIN
        self.clear(node, t + 60, b + 60)
        self.event(a, node, "lifecycle", "agent_stopped", "agent was asked to stop", gpu=False)
        self.reboot(node, a, b)
        for k in ("pending", "action", "failed", "thresh"):
            if k != "failed":
                self.plan.sets.append((b, k, gpus, 0.0))
        self.book([node], a, b)
        return a

    def rels(self, job: Job) -> np.ndarray:
        """Clock of each rank under its load, as a share of the top clock."""
        return np.array(
            [steady(self.f, int(i), load_of(job, float(w)))[0] for i, w in zip(job.gpus, job.w, strict=True)]
        )

    def watts(self, i: int, act, rel: float, td: float) -> tuple[float, float]:
        p = {k: float(v[i]) for k, v in self.f.p.items()}
        die, _, total = power_parts(p, rel, *act, td)
        return float(total), float(die)

"""Hard negatives: what looks like a fault and is none. Labels with hardware false, kind of what it looks like."""

from __future__ import annotations

from typing import Any

import numpy as np

from drover_simulator.strangers.a.boards import has
from drover_simulator.strangers.a.faults import Placer
from drover_simulator.strangers.a.jobs import Job


class Negatives:
    """Places them in the gaps that the faults left."""

    def __init__(self, placer: Placer) -> None:
        self.p, self.f, self.s, self.e, self.rng = placer, placer.f, placer.s, placer.e, placer.rng

    def run(self, count: int) -> None:
        menu = [
            "drain",
            "crash",
            "crash",
            "data_stall",
            "uneven",
            "evaluation",
            "service_burst",
            "warm_room",
            "capped_rack",
            "gc_pauses",
            "benchmark",
            "checkpoint_storm",
            "incast",
            "few_ecc",
            "few_ecc",
            "few_retries",
        ]
        placed = 0
        for name in [menu[i] for _ in range(12) for i in self.rng.permutation(len(menu))]:
            if placed >= count:
                return
            if name.startswith("few") and sum(x["cause"] == name for x in self.p.labels) > count // 8:
                continue
            for _ in range(8):
                if getattr(self, name)():
                    placed += 1
                    break

    def times(self, low: float, high: float) -> tuple[float, float]:
        length = min(float(self.rng.uniform(low, high)), self.f.end * 0.5)
        t0 = float(self.rng.uniform(self.f.end * 0.06, self.f.end - length - 60))
        return t0, t0 + length

    def job(self, t0: float, t1: float, ok: Any) -> Job | None:
        """A running job on whose nodes nothing else is labelled in this time."""
        for k in self.rng.permutation(len(self.s.jobs)):
            j = self.s.jobs[k]
            if (
                ok(j)
                and j.start + 900 < t0
                and t1 < j.end
                and j.free(t0, t1)
                and all(self.p.free(int(n), t0, t1, 300) for n in np.unique(self.f.g_node[j.gpus]))
            ):
                return j
        return None

    def of_job(self, job: Job, kind: str, cause: str, t0: float, t1: float) -> bool:
        self.p.take(self.f.g_node[job.gpus], t0, t1)
        job.held.append((t0, t1, cause))
        self.p.label(kind, cause, t0, t1, [(int(self.f.g_node[g]), int(g)) for g in job.gpus], hardware=False)
        return True

    def drain(self) -> bool:
        """Jobs end, the node is emptied, reboots (8 to 20 min) and comes back."""
        t0, t1 = self.times(900, 2400)
        for n in self.rng.permutation(len(self.f.nodes)):
            n = int(n)
            gpus = self.f.gpus(n)
            if not self.p.free(n, t0 - 600, t1) or not all(self.p.may_die(int(g), t0) for g in gpus):
                continue
            jobs = self.s.on_node(n, t0 - 300, t1)
            if any(len(np.unique(self.f.g_node[j.gpus])) > 2 for j in jobs):
                continue
            for j in jobs:
                old, j.end = j.end, min(j.end, t0 - float(self.rng.uniform(10, 240)))
                if j.start >= j.end:
                    j.start = j.end  # it would have begun during the drain
                if old > t1 + 600:
                    self.s.phases(self.s.make(j.gpus, j.kind, t1 + float(self.rng.uniform(60, 600)), old, like=j))
            self.p.reboot(n, t0 + 60, float(self.rng.uniform(480, min(1200, t1 - t0 - 70) if t1 - t0 > 560 else 481)))
            self.p.take(n, t0, t1)
            self.p.label("liveness", "planned_drain", t0, t1, [(n, None)], hardware=False)
            return True
        return False

    def crash(self) -> bool:
        """An illegal access on one rank, or on all of them; the job dies and starts again."""
        t0, t1 = self.times(300, 900)
        job = self.job(t0, t1, lambda j: j.kind in ("dp", "moe", "pipe", "single") and self.s.clear(j.gpus, t0, j.end))
        if job is None:
            return False
        code = int(self.rng.choice([31, 13]))
        some = job.gpus if self.rng.random() < 0.5 else self.rng.choice(job.gpus, 1)
        for g in some:
            self.p.xid(t0 + float(self.rng.uniform(0, 3)), int(g), code)
            if self.rng.random() < 0.5:
                self.p.xid(t0 + float(self.rng.uniform(3, 5)), int(g), 45)
        gpus, old = job.gpus, job.end
        job.phases.append((t0, t0 + 60, "hang", 1.0))
        job.end = t0 + float(self.rng.uniform(5, 45))
        if old > t1 + 60:
            self.s.phases(self.s.make(gpus, job.kind, t1, old, like=job))
        return self.of_job(job, "xid", "job_crash", t0, t1)

    def data_stall(self) -> bool:
        t0, t1 = self.times(300, 1500)
        job = self.job(t0, t1, lambda j: j.sync)
        if job is None:
            return False
        t = t0
        while t < t1:
            length = float(self.rng.uniform(15, 240))
            job.phases.append((t, min(t + length, t1), "stall", float(self.rng.uniform(1, 8))))
            t += length + float(self.rng.uniform(10, 200))
        return self.of_job(job, "straggler", "data_stall", t0, t1)

    def uneven(self) -> bool:
        t0, t1 = self.times(3000, 9000)
        j = self.job(t0, t1, lambda j: j.kind in ("pipe", "moe") and len(j.gpus) > 1)
        return j is not None and self.of_job(
            j, "straggler", "uneven_stages" if j.kind == "pipe" else "uneven_experts", t0, t1
        )

    def evaluation(self) -> bool:
        t0, t1 = self.times(240, 900)
        job = self.job(t0, t1, lambda j: j.kind in ("dp", "pipe", "moe"))
        if job is None:
            return False
        job.phases.append((t0, t1, "eval", 1.0))
        return self.of_job(job, "straggler", "evaluation", t0, t1)

    def service_burst(self) -> bool:
        t0, t1 = self.times(300, 1800)
        job = self.job(t0, t1, lambda j: j.kind == "infer")
        if job is None:
            return False
        job.bursts.append((t0, t1, float(self.rng.uniform(0.3, 0.8))))
        return self.of_job(job, "thermal", "service_burst", t0, t1)

    def warm_room(self) -> bool:
        """All racks 3 to 6 K warmer over an hour: the outside air of an afternoon. Once in a case."""
        if any(x["cause"] == "warm_room" for x in self.p.labels):
            return False
        t0, t1 = self.times(5400, 10800)
        racks = np.arange(int(self.f.node_rack.max()) + 1)
        self.e.add(
            "rack",
            racks,
            t0,
            self.f.end + 1,
            float(self.rng.uniform(3, 6)) * self.rng.uniform(0.8, 1.1, len(racks)),
            "add",
            ramp=float(self.rng.uniform(2400, 4800)),
        )
        self.p.label(
            "thermal", "warm_room", t0 + 900, None, [(n, None) for n in range(len(self.f.nodes))], hardware=False
        )
        return True

    def capped_rack(self) -> bool:
        """A rack gets a lower limit by plan (demand response): 70 to 90 %."""
        t0, t1 = self.times(2400, 7200)
        f = self.f
        for r in self.rng.permutation(int(f.node_rack.max()) + 1):
            nodes = np.flatnonzero(f.node_rack == r)
            gpus = np.flatnonzero(np.isin(f.g_node, nodes))
            if len(nodes) < 2 or not all(self.p.free(int(n), t0, t1, 300) for n in nodes):
                continue
            share = float(self.rng.uniform(0.7, 0.9))
            watts = np.round(f.p["cap"][gpus] * share)
            self.e.add("cap", gpus, t0, t1, watts, "set")
            if f.opt["inventory"]:
                for n in nodes:
                    mine = [(int(f.g_slot[g]), w) for g, w in zip(gpus, watts, strict=True) if f.g_node[g] == n]
                    self.p.inventory.append((t0, int(n), {f"gpu{s}.power_limit_set_w": f"{w:.0f}" for s, w in mine}))
                    back = {
                        f"gpu{f.g_slot[g]}.power_limit_set_w": f"{f.p['cap'][g]:.0f}" for g in gpus if f.g_node[g] == n
                    }
                    if t1 < f.end:
                        self.p.inventory.append((t1, int(n), back))
            self.p.take(nodes, t0, t1)
            for n in nodes:
                for j in self.s.on_node(int(n), t0, t1):
                    j.held.append((t0, t1, "cap"))
            self.p.label("drift", "capped_rack", t0, t1, [(int(n), None) for n in nodes], hardware=False)
            return True
        return False

    def gc_pauses(self) -> bool:
        """One rank's interpreter collects for 0.5 to 2 s now and then; seen only as short dips of all."""
        t0, t1 = self.times(1200, 3600)
        job = self.job(t0, t1, lambda j: j.sync)
        if job is None:
            return False
        g = int(self.rng.choice(job.gpus))
        period, pause = float(self.rng.uniform(60, 240)), float(self.rng.uniform(0.5, 2))
        duty = max(pause, self.f.dt) / period
        self.e.add(
            "host", g, t0, t1, 1 + 15 * min(1, pause / max(pause, self.f.dt)), period=period, duty=min(0.9, duty)
        )
        return self.of_job(job, "straggler", "gc_pauses", t0, t1)

    def benchmark(self) -> bool:
        """Someone burns in an idle node: full power from nothing."""
        t0, t1 = self.times(1200, 2700)
        for n in self.rng.permutation(len(self.f.nodes)):
            n = int(n)
            if self.p.free(n, t0, t1, 300) and not self.s.on_node(n, t0 - 60, t1 + 60):
                job = self.s.make(self.f.gpus(n), "bench", t0, t1)
                job.prof, job.inten = (0.93, 0.05, 0.0, 0.01, 0.01, 0.0), 1.1
                return self.of_job(job, "thermal", "benchmark", t0, t1)
        return False

    def checkpoint_storm(self) -> bool:
        t0, t1 = self.times(120, 600)
        job = self.job(t0, t1, lambda j: j.kind in ("dp", "pipe", "moe") and len(j.gpus) >= 8)
        if job is None:
            return False
        job.phases.append((t0, t1, "ckpt", 3.0))
        ports = np.unique(self.f.g_link[job.gpus])
        self.e.add("tx_wait_share", ports[ports >= 0], t0, t1, float(self.rng.uniform(0.05, 0.3)), "add")
        return self.of_job(job, "link", "checkpoint_storm", t0, t1)

    def incast(self) -> bool:
        t0, t1 = self.times(900, 3600)
        job = self.job(t0, t1, lambda j: j.sync and j.prof[5] > 0.03 and self.f.board(int(j.gpus[0])).nics > 0)
        if job is None or not self.f.opt["link_file"]:
            return False
        job.phases.append((t0, t1, "incast", float(self.rng.uniform(0.3, 1))))
        return self.of_job(job, "link", "incast", t0, t1)

    def few_ecc(self) -> bool:
        """3 to 20 corrected errors over hours: what a healthy board shows now and then."""
        t0, t1 = self.times(3600, 9000)
        g = self.p.gpu(t0, t1)
        if g is None:
            return False
        for t in self.rng.uniform(t0, t1, int(self.rng.integers(3, 21))):
            self.e.bump("ecc_dram_corrected", float(t), g)
        self.p.take(self.f.g_node[g], t0, t1)
        self.p.label("memory", "few_ecc", t0, t1, [(int(self.f.g_node[g]), g)], hardware=False)
        return True

    def few_retries(self) -> bool:
        t0, t1 = self.times(3600, 9000)
        g = self.p.gpu(t0, t1)
        if g is None:
            return False
        nv = self.f.board(g).nvlinks > 0 and has(self.f, "nvlink_crc_errors") and self.rng.random() < 0.5
        for t in self.rng.uniform(t0, t1, int(self.rng.integers(3, 30))):
            self.e.bump("nvlink_crc_errors" if nv else "pcie_replays", float(t), g)
        self.p.take(self.f.g_node[g], t0, t1)
        self.p.label("link", "few_retries", t0, t1, [(int(self.f.g_node[g]), g)], hardware=False)
        return True

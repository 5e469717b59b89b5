"""Hard negatives: what looks bad and is not a fault. Each gives a label with hardware false."""

from __future__ import annotations

from typing import Any

import numpy as np

from drover_simulator.strangers.c.faults import FIRST_FACTS, Fault, Placer, ramp
from drover_simulator.strangers.c.jobs import CKPT, EVAL, NONE, STALL, SYNC, TRAIN, make

WEIGHTS = {
    "drain": 2.0,
    "crash": 2.5,
    "data_stall": 2.0,
    "uneven": 1.5,
    "evaluation": 1.2,
    "burst": 1.5,
    "room": 0.7,
    "planned_cap": 0.7,
    "gc": 1.2,
    "benchmark": 1.0,
    "checkpoint": 1.2,
    "incast": 1.2,
    "few_ecc": 1.6,
    "few_retries": 1.4,
    "notebook": 1.0,
    "reload": 0.8,
    "outage": 0.5,
}


def negative(p: Placer, what: str, change: Any) -> bool:
    rng, f, plan, end = p.rng, p.f, p.plan, p.end
    a = rng.uniform(400, max(401, end - 1800))

    def add(
        kind: str,
        cause: str,
        members: list,
        b: float | None,
        effect: Any = None,
        nodes: list[int] | None = None,
        start: float = a,
        jobs: list | None = None,
        onset: float | None = None,
    ) -> bool:
        p.take(
            Fault(
                kind, cause, members, nodes or [], start, b, effect, hardware=False, begin=min(start, a), onset=onset
            ),
            jobs or [],
        )
        return True

    def some(kinds: set[str], least: int = 2, length: float = 900, ok: Any = None) -> Any:
        js = [
            j
            for j in plan.covering(a, min(end, a + length))
            if j.kind in kinds
            and len(j.gpus) >= least
            and p.job_free(j, a - 300, a + length)
            and all(p.free([n], a, a + length) for n in j.nodes(f))
            and (ok is None or ok(j))
        ]
        return js[int(rng.integers(len(js)))] if js else None

    if what == "drain":
        n = int(rng.integers(f.N))
        b = a + rng.uniform(300, 900)  # POST, driver, fabric: 5 to 15 minutes
        gpus = f.gpus_of(n)
        if not p.free([n], a - 300, b) or not p.can_kill(gpus, a - 200):
            return False
        gone = a - rng.uniform(30, 200)
        onset = gone if p.kill(gpus, gone, [n], b) else a  # its jobs are ended first
        p.say(a, n, None, "lifecycle", "agent_stopped", "agent stopped: SIGTERM")
        p.say(b, n, None, "lifecycle", "agent_started", "agent started")
        p.resets.append((b, gpus))

        def dark(w: Any, t: float, h: float) -> None:
            w.dark[n] = True

        return add("liveness", "drain_reboot", [[f.name(n), None]], b, dark, [n], onset=onset)
    if what == "reload":  # a new driver between two jobs: volatile counters begin at 0
        b = a + rng.uniform(25, 120)
        idle = [
            n
            for n in range(f.N)
            if p.free([n], a, b)
            and not any(j.start < b + 30 and j.end > a - 30 and np.isin(n, j.nodes(f)).any() for j in plan.jobs)
        ]
        if not idle:
            return False
        n = int(rng.choice(idle))
        gpus = f.gpus_of(n)
        p.say(a, n, None, "lifecycle", "driver_missing", "no usable NVIDIA driver")
        p.say(b, n, None, "lifecycle", "driver_back", "the driver answers again")
        p.resets.append((b, gpus))

        def unloaded(w: Any, t: float, h: float) -> None:
            w.gone[gpus] = True

        return add("liveness", "driver_reload", [[f.name(n), None]], b, unloaded, [n])
    if (
        what == "outage"
    ):  # the collector or its network is away for minutes: all nodes at once, or a leaf's management switch
        b = a + rng.uniform(40, 240)
        ns = np.arange(f.N) if rng.random() < 0.5 else np.flatnonzero(f.leaf == rng.choice(f.leaf))
        if (
            len(ns) < 4
            or any(x.cause == "collector_gap" for x in p.faults)
            or any(x.hardware and x.kind == "liveness" and abs(x.start - a) < 1200 for x in p.faults)
        ):
            return False

        def away(w: Any, t: float, h: float) -> None:
            w.dark[ns] = True

        return add("liveness", "collector_gap", [[f.name(int(n)), None] for n in ns], b, away)
    if what == "crash":
        j = some(SYNC | {"single", "notebook"}, 1)
        if j is None or not p.can_kill(j.gpus, a):
            return False
        code, every = (31, 0.5) if rng.random() < 0.6 else (13, 0.6)
        hit = j.gpus if rng.random() < every else rng.choice(j.gpus, 1)
        for g in hit:
            p.xid(a + rng.uniform(0, 3), int(g), code)
            if rng.random() < 0.2:
                p.xid(a + rng.uniform(3, 9), int(g), 43)
        p.kill(j.gpus, a, [])
        return add("xid", "app_crash", [f.member(int(g)) for g in j.gpus], a + 300)
    if what == "data_stall":
        b = a + rng.uniform(120, 1200)
        j = some(SYNC, 4, b - a)
        if j is None:
            return False
        if rng.random() < 0.5:  # on and off
            for s in np.arange(a, b, 90):
                plan.paint(j, STALL, s, s + rng.uniform(20, 70), TRAIN)
        else:
            plan.paint(j, STALL, a, b, TRAIN)
        return add("straggler", "data_stall", [f.member(int(g)) for g in j.gpus], b, jobs=[j])
    if what == "uneven":
        js = [
            j
            for j in plan.jobs
            if j.kind in ("pipeline", "moe")
            and j.start < end - 1800
            and j.end > 1800
            and not any(x.extra.get("uneven") is j for x in p.faults)
        ]
        if not js:
            return False
        j = js[int(rng.integers(len(js)))]
        add(
            "straggler",
            "uneven_stages" if j.kind == "pipeline" else "uneven_experts",
            [f.member(int(g)) for g in j.gpus],
            None if j.end >= end else j.end,
            start=max(1.0, j.start),
        )
        p.faults[-1].extra["uneven"] = j
        return True
    if what == "evaluation":
        b = a + rng.uniform(240, 1200)
        j = some(SYNC, 2, b - a)
        if j is None:
            return False
        plan.paint(j, EVAL, a, b)
        return add("straggler", "evaluation", [f.member(int(g)) for g in j.gpus], b, jobs=[j])
    if what == "burst":
        b = a + rng.uniform(120, 1500)
        j = some({"service"}, 1, b - a)
        if j is None:
            return False
        j.surges.append((a, b, rng.uniform(1.6, 3.5)))
        return add("straggler", "service_burst", [f.member(int(g)) for g in j.gpus], b, jobs=[j])
    if what == "room":  # a chiller trips, a hot afternoon: 3 to 7 K for all that the unit supplies
        ns = np.flatnonzero(f.pool == rng.choice(f.pool)) if rng.random() < 0.6 else np.arange(f.N)
        rise, slope = rng.uniform(3, 7), rng.uniform(900, 3600)
        b = min(end - 30, a + slope + rng.uniform(900, 3600))

        def warm(w: Any, t: float, h: float) -> None:
            w.m_inlet[ns] += rise * ramp(t, a, a + slope) * (1 - ramp(t, b - 900, b))

        if any(x.cause == "room" for x in p.faults):
            return False
        return add("thermal", "room", [[f.name(int(n)), None] for n in ns], b, warm)
    if what == "planned_cap":
        racks = [
            r for r in range(len(f.racks)) if (f.rack == r).sum() >= 2 and p.free(np.flatnonzero(f.rack == r), 1, None)
        ]
        if not racks or any(x.cause == "planned_cap" for x in p.faults):
            return False
        ns = [int(n) for n in np.flatnonzero(f.rack == int(rng.choice(racks)))]
        if any(not p.job_free(j, 1, None) for j in plan.jobs if np.isin(j.nodes(f), ns).any()):
            return False
        s = 1.0 if rng.random() < 0.5 else a
        cut = rng.uniform(0.7, 0.9)
        gpus = np.concatenate([f.gpus_of(n) for n in ns])
        watts = np.array([np.round(f.boards[int(f.gnode[g])].tdp * cut / 5) * 5 for g in gpus])
        for g, x in zip(gpus, watts, strict=True):
            change(int(f.gnode[g]), int(f.slot[g]), "power_limit_set_w", f"{x:.0f}", s)

        def cap(w: Any, t: float, h: float) -> None:
            w.m_cap[gpus] = watts

        return add(
            "drift",
            "planned_cap",
            [[f.name(n), None] for n in ns],
            None,
            cap,
            ns,
            start=s,
            onset=FIRST_FACTS if s <= 1 else None,
        )
    if what == "gc":  # garbage collection of all ranks' Python: 0.2 to 2 s each half minute (ByteDance: 5 % and more)
        b = a + rng.uniform(1200, 5400)
        j = some({"dp", "pipeline", "moe", "finetune"}, 4, 900)
        if j is None:
            return False
        b = min(b, j.end, end - 30)
        ns = j.nodes(f)

        def pause(w: Any, t: float, h: float) -> None:
            if h < 3:
                if w.rng.random() < h / 20:
                    w.m_host[int(w.rng.choice(ns))] += w.rng.uniform(0.3, 1.5)
            else:
                w.m_host[ns] += w.rng.uniform(0, 0.12, len(ns))

        return add("straggler", "gc_pause", [f.member(int(g)) for g in j.gpus], b, pause, jobs=[j])
    if what == "benchmark":
        b, onset = a + rng.uniform(600, 2400), a
        free = [
            n
            for n in range(f.N)
            if p.free([n], a - 600, b)
            and not any(np.isin(n, j.nodes(f)).any() and j.start < b + 120 and j.end > a - 60 for j in plan.jobs)
        ]
        if not free:
            cand = [n for n in range(f.N) if p.free([n], a - 600, b) and p.can_kill(f.gpus_of(n), a - 300)]
            if not cand:
                return False
            n = int(rng.choice(cand))
            if p.kill(f.gpus_of(n), a - 240, [n], b):
                onset = a - 240  # its jobs are ended first
        else:
            n = int(rng.choice(free))
        for j in plan.jobs:  # nobody else meanwhile
            if j.start >= a - 300 and j.start < b + 60 and np.isin(n, j.nodes(f)).any():
                plan.stop(j, j.start)
                j.phase[:] = NONE
        make(rng, f, plan, "benchmark", f.gpus_of(n), a, b, f"burnin-{n}")
        plan.jobs[-1].phase[plan.jobs[-1].phase != NONE] = TRAIN
        return add("thermal", "benchmark", [[f.name(n), None]], b, None, [n], onset=onset)
    if what == "checkpoint":  # many jobs write at once to one store
        b = a + rng.uniform(90, 420)
        js = [j for j in plan.covering(a, b) if j.kind in SYNC and len(j.gpus) >= 4 and p.job_free(j, a, b)]
        if not js:
            return False
        js = js[: int(rng.integers(1, 4))]
        ns = np.unique(np.concatenate([j.nodes(f) for j in js]))
        for j in js:
            plan.paint(j, CKPT, a, b * rng.uniform(0.99, 1.0), TRAIN)

        def store(w: Any, t: float, h: float) -> None:
            w.m_storage[ns] += 8e9 * w.rng.uniform(0.6, 1.2)
            w.m_wait[np.isin(w.f.lnode, ns)] += 0.2

        return add("straggler", "checkpoint_storage", [f.member(int(g)) for j in js for g in j.gpus], b, store, jobs=js)
    if what == "incast":
        b = a + rng.uniform(900, 3600)
        j = some(SYNC, 8, 900, ok=lambda j: j.inter > 0.02 and len(j.nodes(f)) > 1)
        if j is None:
            return False
        b = min(b, j.end, end - 30)
        ports = np.unique(f.glink[j.gpus])
        wait = rng.uniform(0.1, 0.4)

        def congest(w: Any, t: float, h: float) -> None:
            w.m_wait[ports] += wait * w.rng.lognormal(0, 0.3, len(ports))
            w.m_link[ports] = 0.85

        return add("link", "own_incast", [[f.name(int(n)), None] for n in j.nodes(f)], b, congest, jobs=[j])
    if what in ("few_ecc", "few_retries"):
        b = min(end - 30, a + rng.uniform(1800, 5400))
        g = int(rng.integers(f.G))
        n = int(f.gnode[g])
        if not p.free([n], a, b):
            return False
        if what == "few_ecc" and f.sees(n, "ecc_dram_corrected"):
            rate = rng.uniform(1.5, 10)  # an hour

            def few(w: Any, t: float, h: float) -> None:
                w.cnt["ecc_dram_corrected"][g] += w.rng.poisson(rate * h / 3600)

            return add("memory", "few_corrected", [f.member(g)], b, few, [n])
        if what == "few_retries" and f.sees(n, "pcie_replays"):
            rate = rng.uniform(2, 15)

            def few2(w: Any, t: float, h: float) -> None:
                w.cnt["pcie_replays"][g] += w.rng.poisson(rate * h / 3600)
                w.lc["symbol_errors"][int(f.glink[g])] += w.rng.poisson(rate * 0.5 * h / 3600)

            return add("link", "few_retries", [f.member(g)], b, few2, [n])
        return False
    if what == "notebook":
        js = [
            j
            for j in plan.jobs
            if j.kind == "notebook"
            and j.start < end - 3600
            and j.end > 3600
            and p.free(j.nodes(f), 1, None)
            and not any(x.extra.get("uneven") is j for x in p.faults)
        ]
        if not js:
            return False
        j = js[int(rng.integers(len(js)))]
        add(
            "idle",
            "notebook",
            [f.member(int(g)) for g in j.gpus],
            None if j.end >= end else j.end,
            start=max(1.0, j.start),
        )
        p.faults[-1].extra["uneven"] = j
        return True
    raise ValueError(what)

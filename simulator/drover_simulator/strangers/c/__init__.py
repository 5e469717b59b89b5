"""Stranger c: a mixed cloud of A100, H100, H200, GB200/GB300 and L4 with tenants, services and bad instruments."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from drover_simulator.strangers.writer import CaseWriter, iso

from drover_simulator.strangers.c.boards import Fleet, build_fleet
from drover_simulator.strangers.c.faults import FIRST_FACTS, Placer
from drover_simulator.strangers.c.jobs import Plan, make, schedule
from drover_simulator.strangers.c.negatives import WEIGHTS, negative
from drover_simulator.strangers.c.world import Recorder, World

# how often each fault comes: shares after the reports of Meta (Llama 3, RSC), ByteDance, Alibaba and Tencent, flattened so that
# rare ones are in the exam too
FAULTS: dict[tuple[str, str], float] = {
    **{
        ("straggler", c): v
        for c, v in {
            "thermal": 1.2,
            "power_cap": 1.3,
            "clock": 1.2,
            "hbm": 1,
            "pcie": 1.6,
            "nvlink": 1.1,
            "nic": 1.4,
            "host": 1.1,
            "unexplained": 1.1,
        }.items()
    },
    ("hang", "rank_stopped"): 1.6,
    **{("thermal", c): v for c, v in {"cooling": 1.8, "fan": 1, "rack": 0.8, "hbm": 0.7}.items()},
    **{
        ("memory", c): v
        for c, v in {
            "ecc_storm": 1,
            "uncorrectable": 1.1,
            "remap_failed": 0.7,
            "remaps_pile_up": 0.8,
            "sram_threshold": 0.6,
        }.items()
    },
    **{
        ("link", c): v
        for c, v in {
            "port_down": 1,
            "ib_flap": 1.1,
            "ib_errors": 1,
            "nvlink": 0.8,
            "pcie_downgrade": 0.7,
            "pcie_replays": 0.7,
            "congestion_port": 1.2,
            "hot_switch": 0.6,
        }.items()
    },
    ("xid", "fatal"): 3.2,
    **{
        ("liveness", c): v
        for c, v in {"silent": 1, "gpu_lost": 0.8, "driver_hung": 0.7, "rack_power": 0.8, "clock_wrong": 0.5}.items()
    },
    **{
        ("drift", c): v
        for c, v in {"driver": 0.5, "vbios": 0.5, "power_limit": 0.7, "clock_limit": 0.7, "ecc_mode": 0.4}.items()
    },
    ("idle", "held"): 1.2,
}
INTERVALS, ODDS = [1, 2, 5, 10, 15, 20, 30, 60], [0.05, 0.05, 0.14, 0.28, 0.15, 0.08, 0.15, 0.10]


def write_case(
    folder: Any,
    seed: int,
    *,
    nodes: int | None = None,
    hours: float | None = None,
    interval_s: float | None = None,
    healthy: bool = False,
) -> None:
    """Write one case. What is None is drawn by the seed."""
    rng = np.random.default_rng([seed, 0xC])
    want = (float(rng.choice(INTERVALS, p=ODDS)), int(rng.integers(8, 49)), float(rng.uniform(2.5, 5)))
    interval = float(interval_s) if interval_s is not None else want[0]
    if interval < 2:  # 1 s: a shorter case, so that it is written in a minute
        want = (want[0], want[1], 2.5 + (want[2] - 2.5) * 0.3)
    length = (float(hours) if hours is not None else want[2]) * 3600
    most = max(8, int(1.9e6 / (length / interval) / 8))
    count = int(nodes) if nodes is not None else min(want[1], most)
    sub = 1 if interval <= 5 else int(np.ceil(interval / 5))
    h = interval / sub
    fleet = build_fleet(rng, count, interval)
    plan = Plan(int(length / h) // sub * sub, h, [])
    schedule(rng, fleet, plan)
    t0 = datetime(2026, 1, 5, tzinfo=UTC).timestamp() * 1000 + float(rng.integers(0, 200 * 86400)) * 1000
    facts = inventories(rng, fleet)
    changes: list[tuple[float, int, str, str]] = []

    def change(n: int, slot: int | None, key: str, value: str, when: float) -> None:
        changes.append((when, n, key if slot is None else f"gpu{slot}.{key}", value))

    place = Placer(rng, fleet, plan)
    target = max(3, round(18.5 * fleet.G / 200 * length / 14400 * rng.uniform(0.7, 1.3)))
    if not healthy:
        place_faults(rng, place, target, change)
    place_negatives(rng, place, target, change)
    backfill(rng, fleet, plan, place)
    jobs = [
        {
            "id": j.id,
            "start": iso(t0 + j.start * 1000),
            "end": None if j.end >= plan.length else iso(t0 + j.end * 1000),
            "members": [fleet.member(int(g)) for g in j.gpus],
        }
        for j in plan.jobs
        if j.phase.any() or j.kind == "service" and j.end > max(0, j.start)
    ]
    writer = CaseWriter(
        Path(folder), {"generator": "stranger c", "nodes": fleet.nodes, "jobs": jobs if fleet.tell_jobs else []}
    )
    early = [c for c in changes if c[0] <= 1]  # differed before the case began
    changes = [c for c in changes if c[0] > 1]
    for _, n, key, value in early:
        facts[n][key] = value
    for n in range(fleet.N):
        writer.inventory(t0 + FIRST_FACTS * 1000, fleet.name(n), facts[n])
    for _, n, key, value in changes:  # a node changes once
        facts[n][key] = value
    for when, n in sorted({(when, n) for when, n, _, _ in changes}):
        writer.inventory(t0 + when * 1000, fleet.name(n), facts[n])
    world = World(np.random.default_rng([seed, 0xC, 1]), fleet, plan)
    run(world, Recorder(np.random.default_rng([seed, 0xC, 2]), world, writer, t0), place, sub)
    for s, n, d in world.restarts:
        if s + d < plan.length and rng.random() < 0.9:
            writer.event(t0 + s * 1000, fleet.name(n), None, "lifecycle", "agent_stopped", "agent stopped: SIGTERM")
            writer.event(t0 + (s + d) * 1000, fleet.name(n), None, "lifecycle", "agent_started", "agent started")
    for when, n, code, text in world.log:
        writer.event(t0 + when * 1000, fleet.name(n), None, "kernel", code, text)
    for when, n, slot, kind, code, text in place.events:
        writer.event(t0 + when * 1000, fleet.name(n), slot, kind, code, text)
    labels(writer, place, world, t0, plan.length)
    writer.close()


def inventories(rng: np.random.Generator, f: Fleet) -> list[dict[str, str]]:
    """What nodes report. A pool has one image; the GPUs of a pool may have two VBIOS builds in equal shares (two lots)."""
    facts: list[dict[str, str]] = []
    drivers = {int(p): str(rng.choice(["570.172.08", "550.163.01", "580.65.06"])) for p in np.unique(f.pool)}
    lots = {int(p): rng.random() < 0.2 for p in np.unique(f.pool)}
    for n, b in enumerate(f.boards):
        row = {"driver_version": drivers[int(f.pool[n])]}
        lot = "5" if lots[int(f.pool[n])] and n % 2 else "1"
        for k in range(b.gpus):
            row |= {
                f"gpu{k}.model": b.name,
                f"gpu{k}.power_limit_set_w": f"{b.tdp:.0f}",
                f"gpu{k}.sm_clock_max_mhz": f"{b.fmax:.0f}",
                f"gpu{k}.vbios": b.vbios + lot,
                f"gpu{k}.ecc_mode": "enabled",
            }
            if f.tell_nic and b.nics == b.gpus:
                row[f"gpu{k}.nic"] = f"mlx5_{k}"
        facts.append(row)
    return facts


def place_faults(rng: np.random.Generator, p: Placer, target: int, change: Any) -> None:
    keys = list(FAULTS)
    base = np.array([FAULTS[k] for k in keys])
    placed: dict[tuple[str, str], int] = {}
    order_first = ["rack_power", "rack", "hot_switch"]  # need many free nodes: try them first, as often as drawn
    draws = [keys[int(rng.choice(len(keys), p=base / base.sum()))] for _ in range(target)]
    # then those that need a job that lives on; what ends jobs comes last
    draws.sort(key=lambda k: 0 if k[1] in order_first else 1 if k[0] in ("straggler", "hang", "idle") else 2)
    tries = 0
    while draws and tries < target * 12:
        tries += 1
        kind, cause = draws.pop(0)
        many = placed.get((kind, cause), 0)
        done = False
        if not (kind, cause) == ("thermal", "rack") and cause in order_first and many:
            done = False
        elif kind == "straggler":
            done = p.straggler(cause)
        elif kind == "hang":
            done = p.hang()
        elif kind == "thermal":
            done = p.thermal(cause)
        elif kind == "memory":
            done = p.memory(cause)
        elif kind == "link":
            done = p.link(cause)
        elif kind == "xid":
            done = p.fatal()
        elif kind == "liveness":
            done = p.liveness(cause)
        elif kind == "drift":
            done = many < 2 and p.drift(cause, change)
        else:
            done = p.held()
        if done:
            placed[kind, cause] = many + 1
        else:  # no place for it, or its columns are missing: another one
            like = base * np.array([(k[0] == kind) * 6 + 1 for k in keys]) if tries < target * 6 else base
            draws.insert(
                0 if kind == "straggler" else len(draws), keys[int(rng.choice(len(keys), p=like / like.sum()))]
            )


def place_negatives(rng: np.random.Generator, p: Placer, target: int, change: Any) -> None:
    keys = list(WEIGHTS)
    odds = np.array([WEIGHTS[k] for k in keys])
    done = {k: 0 for k in keys}
    for _ in range(target * 12):
        what = str(rng.choice(keys, p=odds / odds.sum()))
        if sum(done.values()) < target and done[what] < 1 + target // 6:
            done[what] += negative(p, what, change)


def backfill(rng: np.random.Generator, f: Fleet, plan: Plan, p: Placer) -> None:
    """The queue fills nodes that jobs left, in minutes: but none that a fault or a negative holds."""
    for n in range(f.N):
        ends = [j.end for j in plan.jobs if np.isin(n, j.nodes(f)) and (j.phase.any() or j.kind == "service")]
        if ends and 0 < max(ends) < plan.length - 2400 and p.free([n], max(ends), None) and rng.random() < 0.7:
            kind = str(rng.choice(["finetune", "dp", "moe"])) if f.boards[n].links else "service"
            start = max(ends) + rng.uniform(120, 1500)
            make(
                rng,
                f,
                plan,
                kind,
                f.gpus_of(n),
                start,
                start + rng.lognormal(np.log(9000), 0.6),
                f"fill-{n}-{int(start)}",
            )


def run(world: World, rec: Recorder, place: Placer, sub: int) -> None:
    """All steps, and a row each `sub` of them."""
    f, plan = world.f, world.plan
    world.clear()
    for _ in range(int(700 / plan.h)):  # before the case: temperatures settle
        world.step(0, [])
    resets = sorted(place.resets, key=lambda r: r[0])
    every = f.node_every * sub
    for k in range(plan.K):
        world.step(k, place.faults)
        while resets and resets[0][0] <= world.t:
            world.reset(resets.pop(0)[1])
        if (k + 1) % sub == 0:
            rec.take("gpu", world.gpu_values())
        if (k + 1) % every == 0:
            if f.has_node:
                rec.take("node", world.node_values())
            if f.has_link:
                rec.take("link", world.link_values())
    for scope in ("gpu", "node", "link"):
        rec.flush(scope, last=True)


def labels(writer: CaseWriter, place: Placer, world: World, t0: float, length: float) -> None:
    """A label starts with the first effect of all; ids follow `Fault.start`."""
    for i, x in enumerate(sorted(place.faults, key=lambda x: x.start)):
        severity = x.severity
        if "uneven" in x.extra:  # as long as its job
            x.end = x.extra["uneven"].end
            if x.end - x.start < 600:
                continue
        if x.kind == "straggler" and x.hardware:
            severity = float(np.mean(x.seen)) if x.seen else 0.0
            if severity < 0.015:  # its job never waited for it: no effect, no label
                continue
        start = x.start if x.onset is None else x.onset
        if "shift" in x.extra:  # rows carry the node's own time: with a clock that is slow they seem to be earlier
            start += min(0.0, x.extra["shift"] + float(world.offset[x.nodes[0]]))
        node, gpu = x.members[0]
        row: dict[str, Any] = dict(
            id=f"c{i:03d}",
            kind=x.kind,
            node=node,
            gpu=gpu,
            start=t0 + start * 1000,
            end=None if x.end is None or x.end >= length else t0 + x.end * 1000,
            cause=x.cause,
            hardware=x.hardware,
            members=x.members,
            severity=round(severity, 4),
        )
        if x.pre is not None:
            row |= dict(precursor=x.pre, precursor_start=iso(t0 + x.begin * 1000))
        writer.label(**row)

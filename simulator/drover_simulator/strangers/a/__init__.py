"""Stranger a: fleets as RC networks in air streams, with an explicit step model. See `write_case`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from drover_simulator.strangers.writer import CaseWriter, iso

from drover_simulator.strangers.a.boards import Fleet, make_fleet
from drover_simulator.strangers.a.effects import Effects
from drover_simulator.strangers.a.faults import Placer
from drover_simulator.strangers.a.jobs import Schedule
from drover_simulator.strangers.a.negatives import Negatives
from drover_simulator.strangers.a.observe import Observer
from drover_simulator.strangers.a.physics import Physics

NAME = "stranger a"


def write_case(
    folder: str | Path,
    seed: int,
    *,
    nodes: int | None = None,
    hours: float | None = None,
    interval_s: float | None = None,
    healthy: bool = False,
) -> None:
    """Write one case. The same arguments give the same bytes."""
    rng = np.random.default_rng([seed, 0xA])
    fleet = make_fleet(rng, nodes, hours, interval_s)
    schedule, effects = Schedule(fleet, rng), Effects()
    placer = Placer(fleet, schedule, effects, rng)
    # 12 to 25 faults in 200 GPUs over 4 hours
    count = max(3, round(len(fleet.g_node) * fleet.hours / 800 * float(rng.uniform(12, 25))))
    if not healthy:
        placer.faults(count)
    Negatives(placer).run(count)
    schedule.jobs = [j for j in schedule.jobs if j.end > j.start]
    writer = CaseWriter(Path(folder), _fleet_json(fleet, schedule, rng))
    _simulate(fleet, schedule, effects, placer, rng, writer)
    _labels(fleet, placer, writer)
    _text(fleet, placer, writer)
    writer.close()


def _simulate(
    fleet: Fleet, schedule: Schedule, effects: Effects, placer: Placer, rng: np.random.Generator, writer: CaseWriter
) -> None:
    observer = Observer(fleet, schedule, effects, rng, writer)
    for t, n, gap in observer.restarts:
        placer.say(t, n, None, "lifecycle", "agent_stopped", "agent stopped: update")
        placer.say(t + gap, n, None, "lifecycle", "agent_started", "agent started: version 0.9.1")
    for n in range(len(fleet.nodes)):  # noise of the operating system: a node is slow for half a minute now and then
        for t in rng.uniform(0, fleet.end, int(rng.poisson(0.12 * fleet.hours))):
            effects.add("host", fleet.gpus(n), float(t), float(t + rng.uniform(8, 45)), float(rng.uniform(1.5, 4)))
    physics = Physics(fleet, schedule, effects, rng)
    physics.watch = placer.watch
    waiting = effects.solvable()
    cuts = {0, fleet.steps} | {min(fleet.steps, int(np.ceil(e.t0 / fleet.dt))) for e in waiting}
    cuts |= set(range(0, fleet.steps, max(8, min(256, 120_000 // len(fleet.g_node)))))
    edges = sorted(cuts)
    for a, b in zip(edges[:-1], edges[1:], strict=True):
        ts = np.arange(a, b) * fleet.dt
        for effect in waiting:
            if effect.amount is None and effect.t0 <= ts[0] and effect.solve is not None:
                effect.amount = effect.solve(physics)
        out = physics.block(ts, fleet.dt)
        observer.gpu(ts, out)
        traffic = observer.link(ts, out)
        if fleet.opt["node_file"]:
            observer.node(ts, out, traffic)


def _labels(fleet: Fleet, placer: Placer, writer: CaseWriter) -> None:
    """Labels with the loss that the physics gave. A straggler that cost nothing was none."""
    drop = []
    for w in placer.watch:
        loss = 1 - w["free"] / w["with"] if w["with"] else 0.0
        w["label"]["severity"] = round(float(max(loss, 0)), 4)
        if loss < 0.02:
            if w["label"]["cause"] == "thermal":
                w["label"].update(kind="thermal", cause="cooling")
            elif loss < 0.012:
                drop.append(id(w["label"]))
    for k, row in enumerate(
        sorted((r for r in placer.labels if id(r) not in drop), key=lambda r: (r["start"], r["cause"]))
    ):
        row = dict(row)
        for key in ("start", "end"):
            row[key] = None if row[key] is None else fleet.ms(row[key])
        if "precursor_start" in row:
            row["precursor_start"] = iso(fleet.ms(max(0.0, row["precursor_start"])))
        writer.label(id=f"a{k:03d}", **row)


def _text(fleet: Fleet, placer: Placer, writer: CaseWriter) -> None:
    """Events and inventory."""
    for t, n, gpu, kind, code, text in sorted(placer.events, key=lambda x: (x[0], x[1], str(x[4]))):
        writer.event(fleet.ms(t), fleet.name(n), gpu, kind, code, text)
    if not fleet.opt["inventory"]:
        return
    for n in range(len(fleet.nodes)):
        board = fleet.boards[n]
        facts = {"driver_version": fleet.drivers[n]}
        for g in fleet.gpus(n):
            k = f"gpu{fleet.g_slot[g]}."
            facts |= {
                k + "model": board.name,
                k + "power_limit_set_w": f"{fleet.p['cap'][g]:.0f}",
                k + "sm_clock_max_mhz": f"{board.fmax:.0f}",
                k + "vbios": fleet.g_vbios[g],
                k + "ecc_mode": "enabled",
            }
            if fleet.opt["nic_inventory"] and fleet.g_link[g] >= 0:
                facts[k + "nic"] = str(fleet.l_name[fleet.g_link[g]])
        later = sorted((x for x in placer.inventory if x[1] == n), key=lambda x: x[0])
        begin = -72 * 3600.0
        for t, _, change in later:
            if t <= 0:
                facts |= change
        writer.inventory(fleet.ms(begin), fleet.name(n), facts)
        for t, _, change in later:
            if t > 0:
                facts = facts | change
                writer.inventory(fleet.ms(t), fleet.name(n), facts)


def _fleet_json(fleet: Fleet, schedule: Schedule, rng: np.random.Generator) -> dict[str, Any]:
    nodes = [dict(x) for x in fleet.nodes]
    if fleet.opt["links_listed"]:
        for n, node in enumerate(nodes):
            node["links"] = [
                {
                    "link": str(fleet.l_name[p]),
                    "gpu": int(fleet.g_slot[np.flatnonzero(fleet.g_link == p)[0]]),
                    "leaf": node["leaf"],
                }
                for p in np.flatnonzero(fleet.l_node == n)
            ]
    jobs = []
    listed = fleet.opt["jobs_listed"]
    for job in schedule.jobs:
        if listed == "none" or job.start > fleet.end or job.end < 0 or (listed == "some" and rng.random() < 0.5):
            continue
        jobs.append(
            {
                "id": job.id,
                "start": iso(fleet.ms(job.start)),
                "end": None if job.end > fleet.end else iso(fleet.ms(job.end)),
                "members": [[fleet.name(int(fleet.g_node[g])), int(fleet.g_slot[g])] for g in job.gpus],
            }
        )
    return {"generator": NAME, "nodes": nodes, "jobs": jobs}

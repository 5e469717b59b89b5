"""Fleets of "strangers-f": one case from a seed."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from drover_simulator.strangers.writer import CaseWriter, iso

from drover_simulator.strangers.f.faults import FAULTS, LATE, WIDE
from drover_simulator.strangers.f.instruments import Instruments, draw_columns, draw_link_columns, draw_node_columns
from drover_simulator.strangers.f.jobs import plan_jobs
from drover_simulator.strangers.f.negatives import NEGATIVES
from drover_simulator.strangers.f.place import Place
from drover_simulator.strangers.f.sim import Plan, simulate
from drover_simulator.strangers.f.world import build

NAME = "stranger f"


def write_case(folder, seed: int, *, nodes=None, hours=None, interval_s=None, healthy: bool = False) -> None:
    """Write the case of `seed` into the new folder `folder`."""
    rng = np.random.default_rng([seed, 0xF])
    hours = float(hours or np.round(rng.uniform(2.5, 5), 2))
    interval = float(
        interval_s or rng.choice([1, 2, 5, 10, 15, 20, 30, 60], p=[0.05, 0.07, 0.15, 0.26, 0.18, 0.1, 0.12, 0.07])
    )
    most = max(8, int(2.2e6 * interval / (hours * 3600 * 8)))  # 2.2 million GPU rows: a minute on one core
    nodes = int(nodes or min(most, rng.integers(8, 49)))
    span = hours * 3600
    f = build(rng, nodes)
    plan = Plan(f, span)
    jobs = plan_jobs(f, rng, span)
    cols = draw_columns(rng, f)
    ncols = draw_node_columns(rng) if rng.random() < 0.88 else set()
    lcols = draw_link_columns(rng, f) if rng.random() < 0.82 else set()
    place = Place(f, plan, jobs, span, cols, ncols, lcols, rng)
    place.used = set()
    place.clock_rows = bool(rng.random() < 0.5)
    links_in = bool(rng.random() < 0.35)
    nic_in = not links_in and bool(rng.random() < 0.4)
    no_jobs, share = bool(rng.random() < 0.35), float(rng.choice([1, 1, 0.6]))
    epoch = datetime(2026, 1, 5, tzinfo=UTC).timestamp() + float(rng.integers(0, 250 * 1440)) * 60
    place_all(place, f, healthy, rng, hours)

    def facts(n: int) -> dict[str, str]:
        b = f.boards[n]
        out = {"driver_version": driver[b.pool]}
        for s in range(b.gpus):
            out |= {
                f"gpu{s}.model": b.model,
                f"gpu{s}.power_limit_set_w": f"{b.tdp:.0f}",
                f"gpu{s}.vbios": b.vbios,
                f"gpu{s}.sm_clock_max_mhz": f"{b.fmax:.0f}",
                f"gpu{s}.ecc_mode": "enabled",
            }
            if nic_in:
                out[f"gpu{s}.nic"] = f.link_name[f.link_of_gpu[f.first[n] + s]]
        return out

    driver = {b.pool: str(rng.choice(["570.172.08", "550.163.01", "575.57.08"])) for b in dict.fromkeys(f.boards)}
    listed = []
    for j in jobs:
        if j.t1 <= max(j.t0, 0) or j.t0 >= span:
            continue
        shown = j.listed and not no_jobs and (j.kind == "held" or share == 1 or j.seed % 100 < 100 * share)
        if shown:
            listed.append(
                {
                    "id": j.id,
                    "start": iso(1000 * (epoch + j.t0)),
                    "end": None if j.t1 >= span else iso(1000 * (epoch + j.t1)),
                    "members": [[f.names[f.node_of[i]], int(f.slot[i])] for i in j.gpus],
                }
            )
    rows = []
    for n in range(f.n):
        row = {
            "name": f.names[n],
            "rack": f.rack[n],
            "leaf": f.leaf[n],
            "pool": f.boards[n].pool,
            "sku": f.boards[n].model,
            "gpus": f.boards[n].gpus,
        }
        if links_in:
            row["links"] = [
                {"link": f.link_name[x], "gpu": int(f.slot[f.gpu_of_link[x]]), "leaf": f.link_leaf[x]}
                for x in f.links(n)
            ]
        rows.append(row)
    w = CaseWriter(Path(folder), {"generator": NAME, "nodes": rows, "jobs": listed})
    now = {n: facts(n) for n in range(f.n)}
    changes = sorted(place.facts, key=lambda c: c[0])
    for t, n, change in changes:
        if t <= 0:
            now[n] |= change
    for n in range(f.n):
        w.inventory(1000 * (epoch - 72 * 3600), f.names[n], now[n])
    for t, n, change in changes:
        if 0 < t < span:
            now[n] |= change
            w.inventory(1000 * (epoch + t + 3), f.names[n], now[n])
    mean = bool(rng.random() < 0.5)
    sink = Instruments(w, f, plan, cols, ncols, lcols, interval, epoch, span, place.clock_rows, mean)
    simulate(f, jobs, plan, span, interval, mean, sink)
    finish(place, plan)
    for t, name, gpu, kind, code, text in place.events:
        w.event(1000 * (epoch + t), name, gpu, kind, code, text)
    for row in place.labels:
        row["start"] = 1000 * (epoch + row["start"])
        row["end"] = None if row["end"] is None else 1000 * (epoch + row["end"])
        if "precursor_start" in row:
            row["precursor_start"] = iso(1000 * (epoch + row["precursor_start"]))
        row["severity"] = round(float(row["severity"]), 4)
        w.label(**row)
    w.close()


def place_all(place: Place, f, healthy: bool, rng, hours: float) -> None:
    """Faults in an order that is even over kinds and causes; those that need much room first."""
    count = int(np.clip(round(18 * (f.g / 200) ** 0.6 * (hours / 4) ** 0.7 * rng.uniform(0.8, 1.25)), 2, 34))
    if not healthy:
        keys = list(FAULTS)
        order = [keys[k] for k in rng.permutation(len(keys))]
        order = sorted(order[:count], key=lambda c: 0 if c in WIDE else 2 if c in LATE else 1) + order[count:]
        placed = 0
        for cause in order + [keys[k] for k in rng.permutation(len(keys))]:
            if placed >= count:
                break
            for _ in range(6):
                if FAULTS[cause](place):
                    placed += 1
                    break
    count = max(4, count)
    order = list(rng.permutation(len(NEGATIVES))) + list(rng.permutation(len(NEGATIVES)))
    placed = 0
    for k in order:
        if placed >= count:
            break
        if any(NEGATIVES[k](place) for _ in range(4)):
            placed += 1


def finish(place: Place, plan: Plan) -> None:
    """Stragglers get the loss that the run measured; what cost nothing gets no label. Nor does a weak heat path of a
    GPU whose job went away meanwhile: at 70 W it is a degree."""
    f = place.f
    for row in list(place.labels):
        heat = (
            row["kind"] == "thermal"
            and row["hardware"]
            and (row["cause"] in ("cooling", "hbm") or row["cause"] == "fan" and "fan_min_rpm" not in place.ncols)
        )
        if heat:
            i = f.first[f.names.index(row["node"])] + (row["gpu"] or 0)
            end = row["end"] or place.span
            work = sum(max(0.0, min(j.t1, end) - max(j.t0, row["start"])) for j in place.jobs if j.has(i))
            if work < 0.4 * (end - row["start"]):
                place.labels.remove(row)
    for (row, _, _, _), seen in plan.loss:
        loss = float(np.mean(seen)) if seen else 0.0
        if loss < 0.015:
            if row["cause"] == "thermal":
                row["kind"], row["cause"] = "thermal", "cooling"
                continue
            place.labels.remove(row)
        row["severity"] = max(loss, 0.0)

"""Generator D of strangers, for tuning. Its author had seen no detector, no other generator and no score.

Requirements
============
A case is some hours of one site. The seed draws the site, its jobs, its faults and its ordinary trouble; the same seed
gives the same files. Nothing is made easy or hard: a fault acts on a physical quantity, and what shows is what follows.

What varies
-----------
- 1 to 40 nodes (mostly 6 to 24), 4 to 12 h, a row each 1, 5, 10, 15, 30 or 60 s (long and large cases get longer ones).
- Boards: A100 PCIe and SXM, H100, H200, B200, GB200, GB300, L40S, T4; a fifth of the sites has two. Air or liquid.
- InfiniBand, RoCE or no figures of the network; rails or one leaf a node; ports for storage; ports listed or not.
- Columns: profiling, PCIe traffic, HBM temperature, T.Limit, inlet, fans, AER, the agent's own, and single columns
  there or not. Inventories, rows of workloads, racks, leaves there or not. Jobs listed, in part, or not.
- Whole degrees or tenths, jitter of ticks, clocks some ms off, rows that are lost, late, doubled, gaps.

Which physics
-------------
- Power is idle + leakage (exponential in temperature) + C V^2 f of what computes + HBM. A clock is the highest that
  power limit, heat and caps allow while it computes; reasons and counters of throttling follow (NVML's bits).
- Two time constants of heat: die (3-8 s), heat sink (70-160 s, a cold plate 18-40 s), and the room's or loop's own
  (minutes, and a day). Fans follow the hottest die. GPUs behind others get warmed air. HBM follows die and traffic.
- A synchronous step is the slowest member's compute, memory, PCIe and host time plus the slowest link's collective. Who
  is done spins in NCCL: utilisation 100 %, little SM activity, no tensor activity, less power. A slow GPU stays busy.
- Pipeline stages and experts are uneven; experts move. Services get a day, bursts, queues. Checkpoints, evaluations,
  growing sequences, restarts. Units of a board differ in power, clock and heat.
- A hang: NCCL spins until the watchdog (10 or 30 min) ends the job, which then often starts again without its node.

Faults: see `faults.ALL`. Labels name the members at fault (not those that wait for them), from when the quantity is
wrong to when it is right again or its job ends. `severity` is a share, a rate or degrees. About half of the hard faults
of memory, a third of the lost GPUs and half of the downed ports have a precursor; most falls off the bus have none.
Hard negatives: see `life.EVENTS`; stages, experts, evaluations and bursts are life and have no label.

What is left open: the values of some inventory keys are the author's guess. Case files do not say whether rows carry the node's clock: half of the sites shift them, half do not.

Sources, the papers named from the author's memory
--------------------------------------------------
Llama 3 (Meta 2024), RSC-1/2 (Kokolis 2024), MegaScale and Greyhound (ByteDance 2024, 2025), MLaaS (Weng 2022), Delta
(Cui 2025), "Not all GPUs are created equal" (Sinha SC'22), Perlmutter, Titan (Ostrouchov 2020), InfiniteHBD, Theta;
NVIDIA's data sheets, XID catalogue, documents of memory error management, NVML and DCGM fields; lines of kernel logs in
issues of gpud and open-gpu-kernel-modules; Linux' documents of InfiniBand counters.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from drover_simulator.strangers.d import engine, life, output
from drover_simulator.strangers.d import faults as hardware
from drover_simulator.strangers.d.jobs import draw_jobs
from drover_simulator.strangers.d.plan import Plan
from drover_simulator.strangers.d.site import Site, draw_site
from drover_simulator.strangers.writer import iso

__all__ = ["write_case"]


def write_case(
    folder: Path, seed: int, *, nodes: int | None = None, hours: float | None = None, interval_s: float | None = None,
    healthy: bool = False, faults: int | None = None,
) -> None:  # fmt: skip
    """Write a case into the new folder `folder`; what is not given is drawn by `seed`.

    Args:
        healthy: no fault of hardware, and many things that look like one.
        faults: how many to place, as far as there is room.
    """
    rng = np.random.default_rng([seed, 0xD])
    site = draw_site(rng, nodes, hours, interval_s)
    plan = Plan(site, draw_jobs(site))
    life.background(plan)
    drawn = int(np.clip(round(8 + site.n * 0.55 + rng.normal(0, 2)), 10, 25))
    ordinary = int(rng.integers(8, 17)) if healthy else int(rng.integers(3, 9))
    life.place(plan, ordinary // 2)
    if not healthy:
        hardware.place(plan, drawn if faults is None else faults)
    life.place(plan, ordinary - ordinary // 2)
    plan.jobs = [job for job in plan.jobs if job.end > max(job.start, 0) and job.start < site.span]
    out = engine.run(site, plan.jobs, plan.edits)
    folder = Path(folder)
    folder.mkdir(parents=True)
    (folder / "fleet.json").write_text(json.dumps(_fleet(plan)), "utf-8")
    output.write(folder, plan, out)
    _lines(folder, plan)


def _fleet(plan: Plan) -> dict[str, Any]:
    site, nodes = plan.site, []
    for k, name in enumerate(site.names):
        known = site.labels_known
        row: dict[str, Any] = {
            "name": name,
            "rack": site.racks[k] if known else "",
            "leaf": site.leaves[k] if known else "",
            "pool": site.pools[k] if known else "",
            "sku": site.boards[k].name,
            "gpus": site.boards[k].gpus,
        }
        if site.ports_listed and site.ports and known:
            row["links"] = [{"link": p[1], "gpu": p[2], "leaf": p[3]} for p in site.ports if p[0] == k]
        nodes.append(row)
    jobs = []
    for job in plan.jobs:
        if job.listed:
            end = None if job.end >= site.span else iso(site.t0_ms + job.end * 1000)
            jobs.append(
                {
                    "id": job.id,
                    "start": iso(site.t0_ms + job.start * 1000),
                    "end": end,
                    "members": [plan.place(int(g)) for g in job.members],
                }
            )
    return {"generator": "d", "nodes": nodes, "jobs": jobs}


def _lines(folder: Path, plan: Plan) -> None:
    site = plan.site
    events = [
        {
            "ts": iso(site.t0_ms + t * 1000),
            "node": site.names[n],
            "gpu": gpu,
            "kind": kind,
            "code": code,
            "message": text,
        }
        for t, n, gpu, kind, code, text in sorted(plan.events, key=lambda row: (row[0], row[1], row[2] or 0))
    ]
    labels = []
    for row in sorted(plan.labels, key=lambda row: (row["start"], row["id"])):
        labels.append({**row, "start": iso(row["start"]), "end": None if row["end"] is None else iso(row["end"])})
    files = {"events": events, "labels": labels}
    if site.inventories:
        files["inventory"] = _inventories(plan)
    for name, rows in files.items():
        with (folder / f"{name}.jsonl").open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)


def _inventories(plan: Plan) -> list[dict[str, Any]]:
    """All that each node reported of itself: at first, and when something of it changed."""
    site = plan.site
    rng = site.rng
    drivers = (
        ["570.124.06", "570.172.08"]
        if site.boards[0].blackwell
        else ["535.183.06", "550.90.07", "570.124.06", "570.172.08"]
    )
    driver = str(rng.choice(drivers))
    rom = f"{int(rng.integers(86, 98))}.00.{int(rng.integers(16, 99)):02X}.00.0{int(rng.integers(1, 9))}"
    rows = []
    for k, name in enumerate(site.names):
        board = site.boards[k]
        facts = {"driver_version": driver, "kernel": "5.15.0-1053", "cuda_driver_version": "12.8"}
        for gpu in map(int, site.gpus_of(k)):
            slot, port = int(site.slot_of[gpu]), site.port_of(gpu)
            facts |= {
                f"gpu{slot}.name": board.name,
                f"gpu{slot}.vbios": rom if board is site.boards[0] else rom.replace(".00.", ".01.", 1),
                f"gpu{slot}.ecc_mode": "enabled",
                f"gpu{slot}.power_limit_set_w": f"{board.tdp_w:.0f}",
                f"gpu{slot}.sm_clock_max_mhz": f"{board.clock:.0f}",
            }
            if port is not None:
                facts |= {f"gpu{slot}.nic": site.ports[port][1], f"gpu{slot}.nic_path": "PIX"}
        changes = sorted((t, key, value) for t, n, key, value in plan.facts if n == k)
        for _t, key, value in [c for c in changes if c[0] < 0]:
            facts[key] = value
        rows.append({"ts": iso(site.t0_ms - 60_000), "node": name, "inventory": dict(facts)})
        later = sorted({c[0] for c in changes if 0 <= c[0] < site.span})
        for t in later:
            for when, key, value in changes:
                if when == t:
                    facts[key] = value
            rows.append({"ts": iso(site.t0_ms + (t + 5) * 1000), "node": name, "inventory": dict(facts)})
    return sorted(rows, key=lambda row: (row["ts"], row["node"]))

"""What happens to healthy fleets and looks like faults: reboots, upgrades, caps, crashes of programs, congestion."""

from __future__ import annotations

import numpy as np

from drover_simulator.strangers.d.plan import Plan

MMU = "Ch 00000008, intr 00000000. MMU Fault: ENGINE GRAPHICS GPCCLIENT_T1_{0} faulted @ 0x7f{1:02x}_2a000000. Fault is of type FAULT_PDE ACCESS_TYPE_VIRT_READ"


def background(plan: Plan) -> None:
    """Add counts that any fleet has: a few corrected bits, a few replays, a few discards, clocks some ms off."""
    site, rng = plan.site, plan.site.rng
    for gpu in rng.choice(site.g, max(1, site.g // 25), replace=False):
        plan.rate("gpu", "ecc_dram_corrected", int(gpu), 0, site.span, float(10 ** rng.uniform(-5, -3.7)))
    for gpu in rng.choice(site.g, max(1, site.g // 6), replace=False):
        plan.rate("gpu", "pcie_replays", int(gpu), 0, site.span, float(10 ** rng.uniform(-5, -3)))
        if site.board(int(gpu)).links and rng.random() < 0.1:
            plan.rate("gpu", "nvlink_crc_errors", int(gpu), 0, site.span, float(10 ** rng.uniform(-5, -4)))
    for gpu in rng.choice(site.g, max(1, site.g // 40), replace=False):  # remapped long ago
        plan.count("gpu", "remapped_rows_corrected", int(gpu), np.full(int(rng.integers(1, 4)), -10.0))
    for port in range(len(site.ports)):
        plan.rate("link", "tx_discards", port, 0, site.span, float(10 ** rng.uniform(-4, -1.5)))
        plan.rate("link", "out_of_sequence", port, 0, site.span, float(10 ** rng.uniform(-4, -2.0)))
        if rng.random() < 0.1:
            plan.rate("link", "symbol_errors", port, 0, site.span, float(10 ** rng.uniform(-5, -3.3)))
        if rng.random() < 0.3:
            plan.rate("link", "rnr_nak_retries", port, 0, site.span, float(10 ** rng.uniform(-5, -3.5)))
    for node in range(site.n):
        plan.rate("node", "pcie_aer_correctable", node, 0, site.span, float(10 ** rng.uniform(-5.5, -3)))
        if rng.random() < 0.1:
            plan.rate("node", "edac_corrected", node, 0, site.span, float(10 ** rng.uniform(-5, -3.5)))


def reboot(plan: Plan) -> bool:
    site, rng = plan.site, plan.site.rng
    a, lasts = float(rng.uniform(0.08, 0.9)) * site.span, float(rng.uniform(200, 800))
    node = int(rng.integers(site.n))
    if not plan.free(site.gpus_of(node), a, a + lasts) or not _quiet(plan, [node], a) or not plan.clear_node(node, a):
        return False
    plan.take(site.gpus_of(node), a, a + lasts)
    plan.reboot(node, a, lasts)
    plan.label("liveness", "planned_reboot", a, a + lasts, node=node, hardware=False)
    return True


def _quiet(plan: Plan, nodes: list[int], a: float) -> bool:
    gpus = np.concatenate([plan.site.gpus_of(k) for k in nodes])
    for job in plan.jobs:
        if job.start < a < job.end and np.isin(job.members, gpus).any():
            if not plan.job_free(job, a - 600, plan.site.span) or any(
                y > a for g in job.members for _, y in plan.taken.get(int(g), ())
            ):
                return False
    return True


def upgrade(plan: Plan) -> bool:
    """A driver goes from node to node."""
    site, rng = plan.site, plan.site.rng
    if site.n < 4:
        return False
    t = float(rng.uniform(0.1, 0.5)) * site.span
    step, lasts, done = float(rng.uniform(60, 900)), float(rng.uniform(240, 600)), False
    for node in range(site.n):
        if t > site.span - 900:
            break
        if plan.free(site.gpus_of(node), t, t + lasts) and _quiet(plan, [node], t) and plan.clear_node(node, t):
            plan.take(site.gpus_of(node), t, t + lasts)
            plan.reboot(node, t, lasts)
            plan.facts.append((t + lasts, node, "driver_version", "570.195.03"))
            plan.label("liveness", "driver_upgrade", t, t + lasts + 600, node=node, hardware=False)
            t += step
            done = True
    return done


def pool_cap(plan: Plan) -> bool:
    site, rng = plan.site, plan.site.rng
    pool = str(rng.choice(sorted(set(site.pools))))
    gpus = np.flatnonzero(np.array(site.pools)[site.node_of] == pool)
    a = float(rng.uniform(0.1, 0.7)) * site.span
    b = min(a + float(rng.uniform(1800, 14400)), site.span)
    if not plan.free(gpus, a - 600, b):
        return False
    plan.take(gpus, a, b, 0)
    plan.edits.during(a, b, "plim", gpus, float(rng.uniform(0.6, 0.9)))
    members = [[site.names[k], None] for k in sorted(set(site.node_of[gpus]))]
    plan.label(
        "drift",
        "pool_power_cap",
        a,
        b,
        members=[*members, *(plan.place(int(g)) for g in gpus)],
        hardware=False,
        scope="pool",
    )
    return True


def crash(plan: Plan) -> bool:
    """A program ends itself, on one GPU or on all of its."""
    site, rng = plan.site, plan.site.rng
    a = float(rng.uniform(0.08, 0.95)) * site.span
    jobs = [
        j
        for j in plan.jobs
        if j.start + 120 < a < j.end
        and plan.job_free(j, a - 600, site.span)
        and not any(y > a for g in j.members for _, y in plan.taken.get(int(g), ()))
    ]
    if not jobs:
        return False
    job = jobs[int(rng.integers(len(jobs)))]
    code = int(rng.choice([13, 31, 43, 45]))
    hit = job.members if rng.random() < 0.4 else job.members[:1]
    for gpu in map(int, hit):
        if code == 13:
            plan.event(a, gpu, 13, "Graphics SM Warp Exception on (GPC 2, TPC 1, SM 0): Out Of Range Address")
        elif code == 31:
            plan.event(a, gpu, 31, MMU.format(int(rng.integers(0, 8)), int(rng.integers(0, 255))))
        if code != 45:
            plan.event(a + 0.3, gpu, 43, "Ch 00000010")
    if code == 45 or rng.random() < 0.5:
        for gpu in map(int, job.members):
            plan.event(a + float(rng.uniform(0.5, 4)), gpu, 45, f"Ch 0000{int(rng.integers(16, 99)):04x}")
    old, job.end = job.end, a + float(rng.uniform(3, 60))
    if rng.random() < 0.6 and old > a + 900:
        again = job.restart_from(job.end + float(rng.uniform(30, 400)), set())
        if again is not None:
            again.end = old
            plan.jobs.append(again)
    plan.take_job(job, a, a + 60, 0)
    plan.label("xid", "application", a, a + 120, members=[plan.place(int(g)) for g in hit], hardware=False, scope="job")
    return True


def single_bits(plan: Plan) -> bool:
    site, rng = plan.site, plan.site.rng
    gpu = int(rng.integers(site.g))
    a = float(rng.uniform(0.05, 0.95)) * site.span
    if not plan.free(gpu, a, a + 600):
        return False
    plan.take(gpu, a, a + 600, 0)
    plan.count("gpu", "ecc_dram_corrected", gpu, a + rng.uniform(0, 300, int(rng.integers(1, 6))))
    plan.label("memory", "corrected_single", a, a + 600, gpu=gpu, hardware=False)
    return True


def switch_work(plan: Plan) -> bool:
    """A switch is maintained, announced: its ports go down together while their nodes are drained."""
    site, rng = plan.site, plan.site.rng
    if not site.ports:
        return False
    leaf = site.ports[int(rng.integers(len(site.ports)))][3]
    ports = [k for k, p in enumerate(site.ports) if p[3] == leaf]
    nodes = sorted({site.ports[p][0] for p in ports})
    a, lasts = float(rng.uniform(0.3, 0.9)) * site.span, float(rng.uniform(120, 900))
    gpus = np.concatenate([site.gpus_of(k) for k in nodes])
    serving = any(site.ports[p][2] >= 0 for p in ports)
    if not plan.free(gpus, a, a + lasts) or not _quiet(plan, nodes, a):
        return False
    plan.take(gpus, a, a + lasts)
    if serving:
        for job in plan.jobs:
            if job.start < a < job.end and np.isin(job.members, gpus).any() and job.net:
                old, job.end = job.end, a - float(rng.uniform(60, 600))
                again = (
                    job.restart_from(a + lasts + float(rng.uniform(120, 900)), set())
                    if old > a + lasts + 1800
                    else None
                )
                if again is not None:
                    again.end = old
                    plan.jobs.append(again)
    for p in ports:
        plan.state("link", "link_up", p, a, a + lasts, 0)
        plan.scales.append(("link", "bytes", p, a, a + lasts, 0.0))
        plan.count("link", "link_downed", p, [a])
    plan.label(
        "link",
        "switch_maintenance",
        a,
        a + lasts,
        members=[[site.names[k], None] for k in nodes] + [plan.place(int(g)) for g in gpus],
        hardware=False,
        scope="leaf",
    )
    return True


def incast(plan: Plan) -> bool:
    """Checkpoints of a job all go to the same storage: short back-pressure on its own ports."""
    site, rng = plan.site, plan.site.rng
    jobs = [j for j in plan.jobs if j.sync and len(j.members) >= 8 and min(j.end, site.span) - max(j.start, 0) > 2400]
    if not site.ports or not jobs:
        return False
    job = jobs[int(rng.integers(len(jobs)))]
    a, b = max(job.start, 0.0), min(job.end, site.span)
    ports = sorted({p for g in job.members for p in [site.port_of(int(g))] if p is not None})
    t = a + float(rng.uniform(300, 1200))
    every = float(rng.uniform(900, 2400))
    while t < b:
        lasts = float(rng.uniform(5, 60))
        job.stalls.append((t, t + lasts, "checkpoint"))
        for p in ports:
            if rng.random() < 0.7:
                column = "tx_wait" if site.fabric == "ib" else "cnp_handled"
                plan.rate(
                    "link",
                    column,
                    p,
                    t,
                    t + lasts,
                    float(rng.uniform(0.05, 0.5)) * (2e8 if site.fabric == "ib" else 4e3),
                )
                plan.rate("link", "tx_discards", p, t, t + lasts, float(rng.uniform(0, 1)))
        t += every
    nodes = sorted(set(site.node_of[job.members]))
    plan.label("link", "incast", a, b, members=[[site.names[k], None] for k in nodes], hardware=False, scope="job")
    return True


def warm_room(plan: Plan) -> bool:
    site, rng = plan.site, plan.site.rng
    a = float(rng.uniform(0.05, 0.7)) * site.span
    up, x, lasts = float(rng.uniform(1800, 7200)), float(rng.uniform(2, 5)), float(rng.uniform(1800, 7200))
    plan.edits.ramp(a, a + up, "warm", np.arange(site.n), 0.0, x)
    plan.edits.ramp(a + up + lasts, a + 2 * up + lasts, "warm", np.arange(site.n), x, 0.0)
    if plan.site.n > 1:
        plan.label(
            "thermal",
            "warm_room",
            a,
            min(a + 2 * up + lasts, site.span),
            members=[[name, None] for name in site.names],
            hardware=False,
            scope="fleet",
        )
    return True


def agent_restart(plan: Plan) -> bool:
    site, rng = plan.site, plan.site.rng
    a, lasts = float(rng.uniform(0.05, 0.95)) * site.span, float(rng.uniform(5, 90))
    nodes = range(site.n) if rng.random() < 0.3 else rng.choice(site.n, 1)
    for node in map(int, nodes):
        t = a + node * float(rng.uniform(0, 30))
        plan.silent.append(("node", node, t, t + lasts))
        plan.kernel(t + lasts, node, None, "agent_started", "drover-agent started", "lifecycle")
    return True


def counters_reset(plan: Plan) -> bool:
    """Somebody clears a node's volatile counters (a reset of its GPUs between jobs does)."""
    site, rng = plan.site, plan.site.rng
    node = int(rng.integers(site.n))
    plan.boots.append((node, float(rng.uniform(0.1, 0.9)) * site.span))
    return True


EVENTS = ((reboot, 1.2), (upgrade, 0.5), (pool_cap, 0.7), (crash, 3.0), (single_bits, 2.0), (switch_work, 0.6), (incast, 0.8),
          (warm_room, 0.5), (agent_restart, 1.0), (counters_reset, 0.7))  # fmt: skip


def place(plan: Plan, count: int) -> int:
    """Place up to `count` of these; gives how many found a place."""
    rng, made = plan.site.rng, 0
    weights = np.array([w for _, w in EVENTS])
    for _ in range(count * 5):
        if made >= count:
            break
        k = int(rng.choice(len(EVENTS), p=weights / weights.sum()))
        made += EVENTS[k][0](plan)
        weights[k] *= 0.6
    return made

"""Hard negatives: what looks like a fault and is none. One function each; False when there is no place."""

from __future__ import annotations

import numpy as np

from drover_simulator.strangers.f.jobs import Job, mix
from drover_simulator.strangers.f.place import MIN, SYNC, Place


def _whole(pl: Place, kind, cause, t0, t1, job, **more):
    nodes = sorted(set(pl.f.node_of[job.gpus].tolist()))
    members = (
        [[pl.f.names[n], None] for n in nodes]
        if len(nodes) > 1 or len(job.gpus) > 1
        else [[pl.f.names[nodes[0]], int(pl.f.slot[job.gpus[0]])]]
    )
    pl.label(kind, cause, t0, t1, members=members, hardware=False, **more)


def _job(pl: Place, t0, t1, kinds=SYNC, ok=lambda j: True):
    for job in pl.jobs_in(t0, t1, kinds, ok):
        if (id(job), "neg") not in pl.used:
            pl.used.add((id(job), "neg"))
            return job
    return None


def drain(pl):
    t0, t1 = pl.window(8, 30)
    node = pl.nodes(t0 - 600, t1)
    if node is None:
        return False
    pl.clear(node, t0 - pl.rng.uniform(60, 600), t1 + 120)
    pl.event(t0 - 1, node, "lifecycle", "agent_stopped", "agent was asked to stop", gpu=False)
    pl.reboot(node, t0, t1)
    pl.label("liveness", "drain", t0, t1, node, hardware=False)
    pl.book([node], t0 - 600, t1)
    return True


def app_crash(pl):
    t0, t1 = pl.window()
    job = _job(pl, t0, t0 + 60, (*SYNC, "serve", "single"), lambda j: pl.job_free(j, t0, t0 + 1500))
    if job is None:
        return False
    code = int(pl.rng.choice([31, 13]))
    ranks = job.gpus if pl.rng.random() < 0.5 else job.gpus[[int(pl.rng.integers(len(job.gpus)))]]
    for i in ranks:
        pl.xid(
            t0 + pl.rng.uniform(0, 4),
            int(i),
            code,
            {
                31: "Ch 0000000a, intr 00000000. MMU Fault: ENGINE GRAPHICS GPCCLIENT_T1_3 faulted @ 0x7f3a_4c000000. "
                "Fault is of type FAULT_PDE ACCESS_TYPE_VIRT_READ",
                13: "Graphics SM Warp Exception on (GPC 3, TPC 1, SM 0): Out Of Range Address",
            }[code],
        )
    if pl.rng.random() < 0.4:
        for i in job.gpus[:40]:
            pl.xid(t0 + pl.rng.uniform(4, 20), int(i), 45, "Ch 0000000a, Preemptive Channel Removal")
    _whole(pl, "xid", "app_crash", t0, t0 + 900, job)
    pl.kill(int(ranks[0]), t0 + 8)
    return True


def data_stall(pl):
    t0, t1 = pl.window(6, 25)
    job = _job(pl, t0, t1)
    if job is None:
        return False
    job.mods.append(("scale", t0, t1, pl.size(0.02, 0.6)))
    _whole(pl, "straggler", "data_stall", t0, t1, job)
    return True


def uneven(pl, kind, cause):
    t0, t1 = pl.window(60, 150)
    job = _job(pl, t0, t0 + 600, (kind,))
    if job is None:
        return False
    _whole(pl, "straggler", cause, max(0, job.t0), job.t1, job)
    return True


def evaluation(pl):
    t0, t1 = pl.window(8, 30)
    job = _job(pl, t0, t1)
    if job is None:
        return False
    job.mods.append(("scale", t0, t1, pl.size(0.3, 0.7)))
    _whole(pl, "straggler", "evaluation", t0, t1, job)
    return True


def burst(pl):
    t0, t1 = pl.window(10, 60)
    job = _job(pl, t0, t1, ("serve",))
    if job is None:
        return False
    job.mods.append(("scale", t0, t1, pl.size(1.5, 4)))
    _whole(pl, "thermal", "burst", t0, t1, job)
    return True


def room_warms(pl):
    t0, t1 = pl.window(60, 150)
    nodes = list(range(pl.f.n))
    ramp = 0.5 * (t1 - t0)
    pl.plan.eff("inlet", nodes, t0, t1, "add", pl.size(1.5, 5), ramp)
    pl.label("thermal", "room_warms", t0, t1, members=[[pl.f.names[n], None] for n in nodes], hardware=False)
    return True


def capped_rack(pl):
    f = pl.f
    t0, t1 = pl.window(40, 150)
    for r in pl.rng.permutation(list(dict.fromkeys(f.rack))):
        nodes = [n for n in range(f.n) if f.rack[n] == r]
        if not pl.free(nodes, t0, t1) or len(nodes) < 2:
            continue
        share = 1 - pl.size(0.08, 0.3)
        for n in nodes:
            gpus = f.gpus(n)
            new = np.round(f.p["tdp"][gpus[0]] * share / 10) * 10
            pl.plan.eff("plim", gpus, t0, t1, "set", new)
            pl.facts.append((t0, n, {f"gpu{s}.power_limit_set_w": f"{new:.0f}" for s in range(len(gpus))}))
            if t1 < pl.span:
                pl.facts.append(
                    (t1, n, {f"gpu{s}.power_limit_set_w": f"{f.p['tdp'][gpus[0]]:.0f}" for s in range(len(gpus))})
                )
        pl.label("drift", "capped_rack", t0, t1, members=[[f.names[n], None] for n in nodes], hardware=False)
        pl.book(nodes, t0, t1)
        return True
    return False


def gc_pauses(pl):
    t0, t1 = pl.window(30, 120)
    job = _job(pl, t0, t1)
    if job is None:
        return False
    job.mods.append(("stutter", t0, t1, (pl.rng.uniform(40, 200), pl.rng.uniform(2, 9), 0.15)))
    _whole(pl, "straggler", "gc_pauses", t0, t1, job)
    return True


def benchmark(pl):
    """A burn-in of a spare node: all of it at the power cap."""
    f = pl.f
    t0, t1 = pl.window(15, 50)
    node = pl.nodes(
        t0,
        t1,
        lambda n: not any(j.t0 < t1 + 300 and j.t1 > t0 - 300 and np.any(f.node_of[j.gpus] == n) for j in pl.jobs),
    )
    if node is None:
        return False
    q = mix(pl.rng, "train", f.boards[node], False)
    q.update(tc=0.8, tm=0.15, tl=0.0, tn=0.0, tp=0.01, th=0.04)
    for i in f.gpus(node):
        pl.jobs.append(
            Job(
                f"burn-{node}-{f.slot[i]}",
                "bench",
                np.array([i]),
                t0,
                t1,
                dict(q),
                np.ones(1),
                listed=False,
                seed=int(pl.rng.integers(1 << 31)),
                memory=0.9,
            )
        )
    pl.label("thermal", "benchmark", t0, t1, node, hardware=False)
    pl.book([node], t0, t1)
    return True


def checkpoint(pl):
    t0, t1 = pl.window(3, 12)
    job = _job(pl, t0, t1, SYNC, lambda j: len(j.gpus) >= 8)
    if job is None:
        return False
    job.mods.append(("scale", t0, t1, 0.02))
    nodes = sorted(set(pl.f.node_of[job.gpus].tolist()))
    pl.plan.eff("net", nodes, t0, t1, "add", pl.size(1e9, 9e9))
    pl.plan.eff("disk", nodes, t0, t1, "add", pl.size(2e8, 4e9))
    pl.plan.eff("cpu", nodes, t0, t1, "add", 0.06)
    _whole(pl, "straggler", "checkpoint", t0, t1, job)
    return True


def incast(pl):
    if not pl.lcols:
        return False
    t0, t1 = pl.window(15, 80)
    job = _job(pl, t0, t1, SYNC, lambda j: j.par.get("tn", 0) > 0.02 and len(j.gpus) >= 16)
    if job is None:
        return False
    k = pl.size(0.1, 1)
    on = np.unique(pl.f.link_of_gpu[job.gpus])
    s = np.exp(pl.rng.normal(0, 0.35, len(on)))
    pl.plan.eff("l_wait", on, t0, t1, "mul", 6 * 8**k * s)
    for name, z in (("l_oos", 0.3), ("l_cnps", 8), ("l_cnph", 8), ("l_rnr", 0.05)):
        pl.plan.eff(name, on, t0, t1, "add", z * 500 * 10**k * s / 3600)
    pl.plan.eff("fnic", job.gpus, t0, t1, "mul", 1 - 0.25 * k)
    _whole(pl, "link", "incast", t0, t1, job)
    return True


def few_ecc(pl):
    t0, t1 = pl.window(30, 120)
    i = pl.any_gpu(t0, t1, lambda i: "ecc_dram_corrected" in pl.cols)
    if i is None:
        return False
    for t in np.sort(pl.rng.uniform(t0, t1, int(pl.rng.integers(1, 7)))):
        pl.plan.bumps.append((t, "ecc_dram_corrected", np.array([i]), float(pl.rng.integers(1, 3))))
    pl.label("memory", "few_ecc", t0, t1, int(pl.f.node_of[i]), i, hardware=False)
    pl.book([int(pl.f.node_of[i])], t0, t1)
    return True


def few_retries(pl):
    t0, t1 = pl.window(30, 120)
    i = pl.any_gpu(t0, t1)
    if i is None:
        return False
    n = int(pl.f.node_of[i])
    rate = pl.size(4, 25) / 3600
    what = str(pl.rng.choice(["q_pcie", "q_crc", "l_sym"]))
    if what == "q_crc" and pl.f.p["nvlinks"][i] == 0:
        what = "q_pcie"
    pl.plan.eff(what, [pl.f.link_of_gpu[i] if what == "l_sym" else i], t0, t1, "add", rate)
    pl.label("link", "few_retries", t0, t1, n, i, hardware=False)
    pl.book([n], t0, t1)
    return True


NEGATIVES = [
    drain,
    app_crash,
    data_stall,
    lambda pl: uneven(pl, "pipe", "uneven_stages"),
    lambda pl: uneven(pl, "moe", "uneven_experts"),
    evaluation,
    burst,
    room_warms,
    capped_rack,
    gc_pauses,
    benchmark,
    checkpoint,
    incast,
    few_ecc,
    few_retries,
]

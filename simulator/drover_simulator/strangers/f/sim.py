"""The physics and the work, step by step, arrays over GPUs; blocks of ticks go to the instruments.

A GPU is three masses: die (quick), sink or cold plate, HBM stacks; HBM has a path of its own into the sink and one to
the die. Air passes the first row of GPUs, then the second; water passes cold plates in pairs. A BMC moves the fans of a
node by PI with a dead band. Clocks step down by 15 MHz under the power cap, the heat limit, or a brake.
"""

from __future__ import annotations

import numpy as np

from drover_simulator.strangers.f.jobs import Job, duty
from drover_simulator.strangers.f.world import Fleet, power_parts, upstream

GPU_ONES = ("m_rds", "m_rsa", "m_rhs", "fmem", "flink", "fnic", "fpcie", "fhost", "fun", "ones", "mclk", "hd_open")
GPU_RATES = ("q_pcie", "q_crc", "q_nvr", "q_nvrec", "q_edc", "q_esc", "q_edu")
LINK_RATES = ("l_sym", "l_recov", "l_rxe", "l_disc", "l_integ", "l_oos", "l_pse", "l_rnr", "l_ack", "l_cnps", "l_cnph")


class Plan:
    """What happens to the machines, filled in by faults.py."""

    def __init__(self, f: Fleet, span: float) -> None:
        self.effects: list[tuple] = []  # array, index, t0, t1, "mul" | "add" | "set", value, ramp s
        self.sets: list[tuple] = []  # t, array, index, value: from then on
        self.bumps: list[tuple] = []  # t, counter, index, amount
        self.node_gone: list[tuple] = []
        self.gpu_gone: list[tuple] = []
        self.drops: list[tuple] = []  # gpus, t0, t1, share of rows lost
        self.nulls: list[tuple] = []  # gpus, t0, t1
        self.resets: list[tuple] = []  # t, node, whole node?
        self.offsets: list[tuple] = []  # node, t0, t1, s
        self.watch: list[tuple] = []  # label, gpus, t0, t1
        g, n, m = f.g, f.n, len(f.link_node)
        rng = f.rng
        a = {k: np.ones(g) for k in GPU_ONES}
        a.update({k: np.zeros(g) for k in GPU_RATES})
        a["fcap"], a["plim"] = f.p["fcap"].copy(), f.p["tdp"].copy()
        a.update(
            brake=np.zeros(g),
            links=f.p["nvlinks"].copy(),
            gen=f.p["pcie_gen"].copy(),
            width=np.full(g, 16.0),
            pending=np.zeros(g),
            failed=np.zeros(g),
            thresh=np.zeros(g),
            action=np.zeros(g),
            ber=np.full(g, -15.0) + rng.normal(0, 0.6, g),
            eccoff=np.zeros(g),
        )
        a.update({k: np.zeros(n) for k in ("inlet", "fansfail", "cpu", "q_aer", "q_edac", "disk", "net", "hung")})
        a.update(fanflow=np.ones(n), fanmin=np.ones(n), coolflow=np.ones(n))
        a.update(
            {k: np.zeros(m) for k in LINK_RATES},
            l_up=np.ones(m),
            l_wait=np.ones(m),
            l_rate=np.ones(m),
            l_share=np.ones(m),
        )
        # healthy background: a few GPUs give corrected errors and replays now and then (per hour and GPU)
        a["q_edc"] = np.where(rng.random(g) < 0.06, rng.uniform(0.1, 1.5, g), 0.003) / 3600
        a["q_esc"] = np.where(rng.random(g) < 0.02, rng.uniform(0.1, 0.6, g), 0.001) / 3600
        a["q_pcie"] = np.where(rng.random(g) < 0.1, rng.uniform(0.2, 4, g), 0.01) / 3600
        a["q_crc"] = np.where(rng.random(g) < 0.05, rng.uniform(0.1, 1, g), 0.004) / 3600 * (f.p["nvlinks"] > 0)
        a["q_nvr"] = a["q_crc"] * 0.7
        a["q_aer"] = np.where(rng.random(n) < 0.2, rng.uniform(0.2, 6, n), 0.02) / 3600
        a["q_edac"] = np.where(rng.random(n) < 0.1, rng.uniform(0.1, 2, n), 0.002) / 3600
        a["l_sym"] = np.where(rng.random(m) < 0.08, rng.uniform(0.2, 3, m), 0.02) / 3600
        a["l_rxe"] = a["l_sym"] * 0.5
        a["l_recov"] = np.full(m, 0.004 / 3600)
        roce = 30.0 if f.roce else 0.05
        a["l_oos"] = np.exp(rng.normal(0, 0.6, m)) * roce / 3600
        a["l_pse"] = a["l_oos"] * 0.5
        a["l_rnr"] = np.exp(rng.normal(0, 0.8, m)) * 0.4 / 3600
        a["l_ack"] = np.full(m, 0.05 / 3600)
        a["l_disc"] = np.full(m, 0.2 / 3600)
        a["l_cnps"] = np.exp(rng.normal(0, 0.7, m)) * roce * 40 / 3600
        a["l_cnph"] = np.exp(rng.normal(0, 0.7, m)) * roce * 40 / 3600
        self.a = a

    def eff(self, array, idx, t0, t1, how, value, ramp=0.0):
        self.effects.append((array, np.atleast_1d(np.asarray(idx)), t0, t1, how, value, ramp))


def groups_of(jobs: list[Job], g: int):
    """Sync groups: (job, gpus) each; a replica of a service, a whole training job."""
    out, where = [], []
    for job in jobs:
        begin = len(out)
        if job.kind == "serve":
            for a in range(0, len(job.gpus), job.replica):
                out.append((job, np.arange(a, min(a + job.replica, len(job.gpus)))))
        else:
            out.append((job, np.arange(len(job.gpus))))
        where.append((begin, len(out)))
    return out, where


def simulate(f: Fleet, jobs: list[Job], plan: Plan, span: float, interval: float, mean: bool, sink) -> None:
    """Run, and give blocks of ticks to `sink(t, values, increments)`."""
    rng, p, g, n = f.rng, f.p, f.g, f.n
    ticks, sub = int(span // interval), max(1, int(np.ceil(interval / 5.0)))
    dt = interval / sub
    lead = int(600 // dt) // sub * sub  # settle for ten minutes before the first tick
    times = (np.arange(-lead, ticks * sub) + 1) * dt
    groups, where = groups_of(jobs, g)
    ng = len(groups)
    u = np.zeros((ng + 1, len(times)), np.float32)  # the last: no job
    for job, (a, b) in zip(jobs, where, strict=True):
        k0, k1 = np.searchsorted(times, [job.t0, job.t1])
        if k1 > k0:
            u[a:b, k0:k1] = duty(job, b - a, times[k0:k1], dt)
    q = {k: np.zeros(ng + 1) for k in ("tc", "tm", "tl", "tn", "tp", "th", "kt", "kd", "ks", "kl", "kn", "sync")}
    for x, (job, _) in enumerate(groups):
        for k in q:
            q[k][x] = job.par.get(k, 0.0)
        q["sync"][x] = job.kind in ("train", "pipe", "moe")
    change = []
    for x, (job, ranks) in enumerate(groups):
        change.append((job.t0, 1, x, job.gpus[ranks]))
        change.append((job.t1, 0, x, job.gpus[ranks]))
    change.sort(key=lambda c: (c[0], c[1]))
    used = np.zeros(g)
    work_of = {x: job.w[ranks] for x, (job, ranks) in enumerate(groups)}
    up, liquid = upstream(f), p["liquid"] > 0
    has_up = up != np.arange(g)
    first_of = np.zeros(ng + 1, int)
    grp = np.full(g, ng)
    # air: each rack has its own inlet, nodes a height in it; the room breathes slowly
    racks = {r: k for k, r in enumerate(dict.fromkeys(f.rack))}
    rack = np.array([racks[r] for r in f.rack])
    lq_node = np.array([b.liquid for b in f.boards])
    base_in = (
        np.where(lq_node, rng.uniform(28, 38), rng.uniform(20, 26))
        + rng.normal(0, 1.0, len(racks))[rack]
        + rng.normal(0, 0.5, n) * ~lq_node
    )
    recirc = np.where(lq_node, rng.uniform(1, 3), rng.uniform(1.5, 5))  # K at full load of the rack
    room_a, room_p, room_f = rng.uniform(0.2, 1.0), rng.uniform(1500, 9000), rng.uniform(0, 6.28)
    node_tdp = np.add.reduceat(p["tdp"], f.first)
    rack_tdp = np.bincount(rack, node_tdp)
    set_point = rng.uniform(53, 66)
    fan, integ, held_at = np.full(n, 0.55), np.full(n, 0.5), np.zeros(n)
    fan_every = max(1, int(round(10 / dt)))
    # states
    ts = np.full(g, 40.0)
    td = np.full(g, 45.0)
    th = np.full(g, 45.0)
    clk = p["fmax"].copy()
    fth = p["fmax"].copy()
    tin = base_in.copy()
    power = p["tdp"] * 0.3
    hot = np.zeros(g, bool)
    names = {e[0] for e in plan.effects} | {s[1] for s in plan.sets}
    cur = {k: v.copy() for k, v in plan.a.items()}
    sets = sorted(plan.sets, key=lambda s: s[0])
    edges = sorted({e[2] for e in plan.effects} | {e[3] for e in plan.effects})
    ci = si = 0
    dirty = True
    block = max(8, min(2048, 120_000 // g))
    keep = [
        "clk",
        "power",
        "td",
        "th",
        "ten",
        "sm",
        "dram",
        "util",
        "nvl",
        "net",
        "pcie",
        "used",
        "t_p",
        "t_s",
        "t_h",
        "t_b",
        "busy",
    ]
    buf = {k: np.zeros((block, g), np.float32) for k in keep}
    nbuf = {k: np.zeros((block, n), np.float32) for k in ("tin", "fan")}
    vbuf = {k: np.zeros((block, len(plan.a[k])), np.float64) for k in names}
    acc = {k: np.zeros(g) for k in keep}
    loss: dict[int, list] = {id(w): [] for w in plan.watch}
    row, done = 0, 0

    def ex(tau):
        return 1 - np.exp(-dt / tau)

    tau_die = ex(1.2)
    w = np.ones(g)
    for k, t in enumerate(times):
        # who runs where
        while ci < len(change) and change[ci][0] <= t:
            _, start, x, gp = change[ci]
            ci += 1
            if start:
                grp[gp] = x
                w[gp] = work_of[x]
                used[gp] = groups[x][0].memory
            else:
                gone = gp[grp[gp] == x]
                grp[gone] = ng
                used[gone] = 0
            dirty = True
        if dirty:
            order = np.argsort(grp, kind="stable")
            gs = grp[order]
            starts = np.flatnonzero(np.r_[True, gs[1:] != gs[:-1]])
            ids = gs[starts]
            first_of[ids] = order[starts]
            qg = {key: v[grp] for key, v in q.items()}
            dirty = False
            moe = qg["sync"] > 0
        # what is wrong now
        while si < len(sets) and sets[si][0] <= t:
            _, array, idx, value = sets[si]
            plan.a[array][idx] = value
            si += 1
        if names:
            for name in names:
                cur[name] = plan.a[name].copy()
            for array, idx, t0, t1, how, value, ramp in plan.effects:
                if t0 <= t < t1:
                    r = min(1.0, (t - t0) / ramp) if ramp else 1.0
                    x = cur[array]
                    if how == "mul":
                        x[idx] *= 1 + (value - 1) * r
                    elif how == "add":
                        x[idx] += value * r
                    else:
                        x[idx] += (value - x[idx]) * r
        # the work: every rank's own part, then what all share
        ug = u[:, k]
        rel = clk / p["fmax"]
        own = qg["tc"] * w / rel + qg["tm"] * w / cur["fmem"] + qg["tp"] / cur["fpcie"] + qg["th"] / cur["fhost"]
        own = own / cur["fun"]
        o = own[order]
        mx = np.maximum.reduceat(o, starts)
        fl = np.minimum.reduceat(cur["flink"][order], starts)
        fn = np.minimum.reduceat(cur["fnic"][order], starts)
        step = np.ones(ng + 1)
        step[ids] = mx + q["tl"][ids] / fl + q["tn"][ids] / fn
        step[ng] = 1.0
        want = ug.astype(float)
        hang = want < -0.5
        want = np.where(hang, 0.0, want)
        nominal = np.where(q["sync"] > 0, 1.0, np.minimum(step, 1.6))
        busy = np.where(q["sync"] > 0, want, np.minimum(1.0, want * nominal))  # share of the time at work
        rate = (busy / np.maximum(step, 0.05))[grp]
        bg, tg = busy[grp], step[grp]
        live = grp < ng
        ten = qg["kt"] * qg["tc"] * w / rel * rate
        dram = np.minimum(0.95, (qg["kd"] * qg["tm"] * w + 0.25 * qg["tc"] * w) * rate)
        # SMs: own kernels, then NCCL kernels that spin (12 % of the SMs) while others work; idle while the host is late
        host = qg["th"] / cur["fhost"]
        share = np.minimum(1, (own - host / cur["fun"]) / np.maximum(tg, 0.05))
        sm = live * bg * (qg["ks"] * share + 0.12 * np.maximum(0, 1 - share - host / np.maximum(tg, 0.05)))
        util = live * np.where(moe, np.minimum(1, bg * 1.04), 1 - (1 - bg) ** 1.7)
        full = qg["kl"] * qg["tl"] * rate
        nvl, net = full * cur["flink"], qg["kn"] * qg["tn"] * rate
        pcie = qg["tp"] * rate + 0.15 * net + 0.1 * (full - nvl)  # part of what NVLink lost goes another way
        if hang.any():
            spin = hang[grp]  # NCCL kernels spin on every rank but the dead one: busy, no work
            stopped = cur["ones"] < 0.5
            sm = np.where(spin, np.where(stopped, 0, 0.16), sm)
            util = np.where(spin, np.where(stopped, 0, 1.0), util)
            dram = np.where(spin, 0.01, dram)
        # watts, clocks
        die, mem, total = power_parts(p, rel, ten, sm, dram, nvl / 0.1, td)
        lazy = (used <= 0) & (sm < 0.01)
        floor = np.where(lazy, p["idle"], 0)
        total = np.where(lazy, floor + 0.15 * (td - 35), total)
        die, mem = np.where(lazy, 0.5 * total, die), np.where(lazy, 0.25 * total, mem)
        over = total / cur["plim"]
        cap = np.minimum(cur["fcap"], p["fmax"])
        capped = over > 0.99
        fpow = clk * np.where(over > 1, np.maximum(0.93, over**-0.4), np.minimum(1 + 0.006 * min(dt, 3), over**-0.35))
        hot = td > p["t_slow"]
        fth = np.where(hot, fth - 5 * dt * (td - p["t_slow"]), fth + np.minimum(p["t_slow"] - td, 4) * 4 * dt)
        fth = np.clip(fth, 0.3 * p["fmax"], p["fmax"])
        hw = td > p["t_hw"]
        brk = cur["brake"] > 0
        clk = np.minimum(np.minimum(fpow, fth), cap)
        clk = np.where(brk, np.minimum(clk, p["fmax"] * (1 - cur["brake"])), clk)
        clk = np.where(hw, 0.5 * p["fmax"], clk)
        clk = np.where(lazy, p["fidle"], np.maximum(clk, 0.2 * p["fmax"]))
        power = total
        # heat
        if k % fan_every == 0:
            worst = np.maximum.reduceat(td, f.first)
            e = worst - set_point
            e = np.where(np.abs(e - held_at) < 1.0, held_at, e)  # dead band
            held_at = e
            integ = np.clip(integ + 0.0004 * e * dt * fan_every, 0.2, 1.0)
            fan = np.clip(fan + 0.3 * (np.clip(integ + 0.012 * e, 0.28, 1.0) - fan), 0.28, 1.0)
        flow = np.where(lq_node, cur["coolflow"], np.maximum(0.1, fan * cur["fanflow"] / 0.7))
        fg = flow[f.node_of]
        load = np.bincount(rack, np.add.reduceat(power, f.first)) / rack_tdp
        goal = base_in + recirc * load[rack] + room_a * np.sin(t / room_p + room_f) + cur["inlet"]
        tin += ex(150.0) * (goal - tin)
        local = tin[f.node_of] + np.where(has_up, power[up] / (p["preheat"] * fg), 0.0)
        r_sa = p["r_sa"] * cur["m_rsa"] * fg ** np.where(liquid, -0.4, -0.72)
        r_hs, r_hd = p["r_hs"] * cur["m_rhs"], p["r_hd"] * cur["hd_open"]
        # HBM heat goes into the sink and, over the interposer, to or from the die
        q_hs, q_hd = (th - ts) / r_hs, (th - td) / r_hd
        ts_goal = local + r_sa * (die + q_hd + q_hs)
        ts += (1 - np.exp(-dt / (p["c_s"] * r_sa))) * (ts_goal - ts)
        td += tau_die * (ts + (die + q_hd) * p["r_ds"] * cur["m_rds"] - td)
        gh = 1 / r_hs + 1 / r_hd
        th += (1 - np.exp(-dt * gh / p["c_h"])) * ((mem + ts / r_hs + td / r_hd) / gh - th)
        if t <= 0:
            continue
        # measured loss of stragglers
        if k % 3 == 0:
            for item in plan.watch:
                label, gp, t0, t1 = item
                if t0 <= t < t1:
                    x = grp[gp[0]]
                    if x < ng and busy[x] > 0.5:
                        m = grp == x
                        m[gp] = False
                        if m.any():
                            clean = own[m].max() + q["tl"][x] + q["tn"][x]
                            loss[id(item)].append(1 - clean / step[x])
        thermal = hot & (fth < np.minimum(fpow, cap) + 1) & ~lazy
        pow_thr = capped & ~thermal & ~lazy
        us = 1e6 * dt
        inst = dict(
            clk=clk,
            power=power,
            td=td,
            th=th,
            ten=ten,
            sm=sm,
            dram=dram,
            util=util,
            nvl=nvl,
            net=net,
            pcie=pcie,
            used=used,
            busy=bg,
        )
        acc["t_p"] += us * pow_thr * 0.95
        acc["t_s"] += us * thermal * 0.9
        acc["t_h"] += us * hw
        acc["t_b"] += us * brk * (sm > 0.01)
        if mean:
            for key in ("ten", "sm", "dram", "util", "nvl", "net", "pcie", "busy"):
                acc[key] += inst[key]
        acc["power"] += power * dt
        if (k + 1) % sub:
            continue
        for key, v in inst.items():
            buf[key][row] = (
                acc[key] / sub if mean and key in ("ten", "sm", "dram", "util", "nvl", "net", "pcie", "busy") else v
            )
        for key in ("t_p", "t_s", "t_h", "t_b"):
            buf[key][row] = acc[key]
        nbuf["tin"][row], nbuf["fan"][row] = tin, fan
        for key in names:
            vbuf[key][row] = cur[key]
        if "energy" not in buf:
            buf["energy"] = np.zeros((block, g), np.float64)
        buf["energy"][row] = acc["power"]
        for v in acc.values():
            v[:] = 0
        row += 1
        done += 1
        if row == block or done == ticks:
            tt = (np.arange(done - row, done) + 1) * interval
            view = {k2: v[:row] for k2, v in buf.items()}
            view.update({k2: v[:row] for k2, v in nbuf.items()})
            now = {
                k2: (vbuf[k2][:row] if k2 in names else np.broadcast_to(plan.a[k2], (row, len(plan.a[k2]))))
                for k2 in plan.a
            }
            sink(tt, view, now)
            row = 0
    plan.loss = [(item, loss[id(item)]) for item in plan.watch]

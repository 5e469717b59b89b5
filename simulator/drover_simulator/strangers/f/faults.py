"""The faults, one function each; a function returns False when the fleet offers no place for it."""

from __future__ import annotations

import numpy as np

from drover_simulator.strangers.f.jobs import load_of
from drover_simulator.strangers.f.place import MIN, SYNC, Place


# ---- stragglers: 3 to 35 % of a job's speed (Falcon, MegaScale: most between 5 and 40 %) -----------------------------
def _straggler(pl: Place, cause: str) -> bool:
    f, rng, p = pl.f, pl.rng, pl.plan
    if cause == "nic" and not pl.lcols or cause == "unexplained" and "sm_active_ratio" not in pl.cols:
        return False
    t0, t1 = pl.window()

    def fits(j):
        multi = len(set(f.node_of[j.gpus].tolist())) >= 2
        return (
            (multi or len(j.gpus) >= 4 and cause != "host")
            and pl.job_free(j, t0, t1)
            and (cause != "nic" or j.par.get("tn", 0) > 0.02)
            and (cause != "nvlink" or j.par.get("tl", 0) > 0.02)
        )

    for job in pl.jobs_in(t0, t1, SYNC, fits):
        ranks = [
            k
            for k in rng.permutation(len(job.gpus))
            if job.w[k] > np.quantile(job.w, 0.5) - 1e-9 and pl.free([f.node_of[job.gpus[k]]], t0, t1)
        ]
        if not ranks:
            continue
        i, w, q = int(job.gpus[ranks[0]]), float(job.w[ranks[0]]), job.par
        node, loss = int(f.node_of[i]), pl.size(0.03, 0.35)
        rel = pl.rels(job)
        own = q["tc"] * job.w / rel + q["tm"] * job.w + q["tp"] + q["th"]
        mine, step = float(own[ranks[0]]), float(own.max() + q["tl"] + q["tn"])
        need = step / (1 - loss) - q["tl"] - q["tn"]  # what the rank must take
        slow = q["tc"] * w / max(0.05, need - (mine - q["tc"] * w / rel[ranks[0]]))
        ramp, hurt = pl.ramp(t0, t1), np.array([i])
        if cause in ("clock", "power_cap", "thermal"):
            slow = max(0.35, slow)
            act = tuple(x * (1 - loss) for x in load_of(job, w))
            act = (act[0] / slow * rel[ranks[0]], min(1.0, act[1] / (1 - loss)), act[2], act[3])
            watts, die = pl.watts(i, act, slow, f.p["t_slow"][i] if cause == "thermal" else 62)
            if cause == "clock":
                if ramp and rng.random() < 0.5:
                    ramp = 0
                p.eff("fcap", hurt, t0, t1, "set", np.round(slow * f.p["fmax"][i] / 15) * 15, ramp)
            elif cause == "power_cap":
                if rng.random() < 0.3 and "throttle_brake_us" in pl.cols:
                    p.eff("brake", hurt, t0, t1, "set", 1 - slow)
                    ramp = 0
                else:
                    p.eff("plim", hurt, t0, t1, "set", np.round(watts / 5) * 5)
                    ramp = 0
            else:
                air = 30.0 + 3.5 * (f.slot[i] >= 4)
                k = (f.p["t_slow"][i] + 0.5 - air - die * f.p["r_sa"][i]) / (die * f.p["r_ds"][i])
                p.eff("m_rds", hurt, t0, t1, "mul", float(np.clip(k, 1.15, 9)), ramp)
        elif cause == "hbm":
            fm = q["tm"] * w / (q["tm"] * w + max(0.02, need - mine))
            if rng.random() < 0.5 and "memory_clock_mhz" in pl.cols:
                p.eff("mclk", hurt, t0, t1, "mul", fm)
            elif "ecc_dram_corrected" in pl.cols:
                p.eff("q_edc", hurt, t0, t1, "add", pl.size(20, 900, True) / 3600)
            elif "dram_active_ratio" not in pl.cols:
                return False
            p.eff("fmem", hurt, t0, t1, "mul", fm, ramp)
        elif cause == "pcie":
            if "pcie_width" not in pl.cols:
                return False
            fp = max(1 / 16, q["tp"] / (q["tp"] + max(0.01, need - mine)))
            if rng.random() < 0.6:
                fp = float(min((0.5, 0.25, 0.125, 0.0625), key=lambda x: abs(np.log(x / fp))))
                p.eff("width", hurt, t0, t1, "set", 16 * fp)
                ramp = 0
            else:
                p.eff("q_pcie", hurt, t0, t1, "add", pl.size(200, 2e4, True) / 3600, ramp)
                p.eff("q_aer", [node], t0, t1, "add", pl.size(200, 2e4, True) / 3600, ramp)
            p.eff("fpcie", hurt, t0, t1, "mul", fp, ramp)
        elif cause == "nvlink":
            fl = q["tl"] / (q["tl"] + step * loss / (1 - loss))
            how = int(rng.integers(4))
            if how and "nvlink_replays" not in pl.cols:
                how = 0
            if how == 0 and "nvlink_tx_bytes_per_s" not in pl.cols:
                return False
            if how == 1:
                p.eff("q_nvr", hurt, t0, t1, "add", pl.size(300, 5e4, True) / 3600, ramp)
            elif how == 2:
                p.eff("q_crc", hurt, t0, t1, "add", pl.size(200, 2e4, True) / 3600, ramp)
                p.eff("q_nvrec", hurt, t0, t1, "add", pl.size(2, 60, True) / 3600, ramp)
                p.eff("ber", hurt, t0, t1, "add", pl.size(2, 6), ramp)
            elif how == 3:
                n = f.p["nvlinks"][i]
                left = float(np.clip(round(n * fl), 1, n - 1))
                fl, ramp = left / n, 0
                p.eff("links", hurt, t0, t1, "set", left)
            p.eff("flink", hurt, t0, t1, "mul", fl, ramp)
        elif cause == "nic":
            link = f.link_of_gpu[i]
            hurt = np.flatnonzero(f.link_of_gpu == link)
            hurt = hurt[np.isin(hurt, job.gpus)]
            fn = q["tn"] / (q["tn"] + step * loss / (1 - loss))
            how = int(rng.integers(3))
            if how == 0:  # the port came up at half or a quarter of its rate
                fn = 0.5 if fn > 0.35 else 0.25
                ramp = 0
                p.eff("l_rate", [link], t0, t1, "set", fn)
            elif how == 1 and "out_of_sequence" in pl.cols | pl.lcols:
                for k, z in (("l_oos", 1), ("l_pse", 0.7), ("l_ack", 0.05)):
                    p.eff(k, [link], t0, t1, "add", z * pl.size(600, 4e4, True) / 3600, ramp)
            else:
                for k in ("l_rxe", "l_sym"):
                    p.eff(k, [link], t0, t1, "add", pl.size(200, 2e4, True) / 3600, ramp)
            p.eff("l_share", [link], t0, t1, "mul", 0.5 + 0.5 * fn, ramp)
            p.eff("fnic", hurt, t0, t1, "mul", fn, ramp)
        elif cause == "host":
            hurt = f.gpus(node)
            hurt = hurt[np.isin(hurt, job.gpus)]
            p.eff("fhost", hurt, t0, t1, "mul", q["th"] / (q["th"] + max(0.01, need - mine)), ramp)
            if rng.random() < 0.7:
                p.eff("cpu", [node], t0, t1, "add", pl.size(0.15, 0.7), ramp)
        else:
            p.eff("fun", hurt, t0, t1, "mul", mine / max(mine * 1.02, need), ramp)
        whole = cause == "host"
        row = pl.label("straggler", cause, t0 + ramp / 3, t1, node, None if whole else i, severity=loss)
        pl.book([node], t0, t1)
        pl.take(job, t0, t1)
        p.watch.append((row, hurt, t0 + ramp / 3, t1))
        return True
    return False


# ---- hang ------------------------------------------------------------------------------------------------------------
def rank_stopped(pl: Place) -> bool:
    t0, t1 = pl.window(30, 75)
    for job in pl.jobs_in(t0, t1, SYNC, lambda j: len(j.gpus) >= 4 and pl.job_free(j, t0, t1)):
        i = int(pl.rng.choice(job.gpus))
        node = int(pl.f.node_of[i])
        if not pl.free([node], t0, t1):
            continue
        job.mods.append(("hang", t0, t1, 0))
        pl.take(job, t0, t1)
        pl.plan.eff("ones", [i], t0, t1, "set", 0.0)
        if t1 < pl.span:  # a watchdog or a person ends it
            pl.kill(i, t1)
        pl.label("hang", "rank_stopped", t0, t1, node, i)
        pl.book([node], t0, t1)
        return True
    return False


# ---- thermal -----------------------------------------------------------------------------------------------------------
def _loads(pl: Place):
    kinds = [("single", "serve", "held"), ("serve",), SYNC]
    pl.rng.shuffle(kinds)
    return kinds


def cooling(pl: Place) -> bool:
    f = pl.f
    t0, t1 = pl.window()
    for loads in _loads(pl):
        got = pl.gpu_in_load(t0, t1, loads)
        if not got:
            continue
        i, job = got
        node, k = int(f.node_of[i]), pl.size(0.10, 0.60)
        r = float(f.p["r_ds"][i] + f.p["r_sa"][i])
        watts = f.p["tdp"][i] * (0.8 if job.kind in SYNC else 0.3)
        k = max(k, min(0.6, 3.5 / (watts * r)))  # under 3 K nobody could see it
        ramp = 0 if pl.rng.random() < 0.5 else min(pl.rng.uniform(20, 65) * MIN, 0.75 * (t1 - t0))
        if pl.rng.random() < 0.5:  # paste: between die and sink
            pl.plan.eff("m_rds", [i], t0, t1, "mul", 1 + k * r / f.p["r_ds"][i], ramp)
        else:  # dust, a clogged plate
            pl.plan.eff("m_rsa", [i], t0, t1, "mul", 1 + k * r / f.p["r_sa"][i], ramp)
        more = pl.precursor("heat" if pl.rng.random() < 0.7 else "telemetry", t0, i, node)
        pl.label("thermal", "cooling", t0 + ramp / 3, t1, node, i, severity=k, **more)
        pl.book([node], t0, t1)
        return True
    return False


def hbm(pl: Place) -> bool:
    f = pl.f
    if "memory_temp_c" not in pl.cols:
        return False
    t0, t1 = pl.window()
    for loads in _loads(pl):
        got = pl.gpu_in_load(t0, t1, loads)
        if not got or not f.boards[f.node_of[got[0]]].mem_temp:
            continue
        i, job = got
        node = int(f.node_of[i])
        heat = f.p["hbm_w"][i] * (0.65 if job.kind in SYNC else 0.45) * f.p["r_hs"][i] * 0.7
        k = max(pl.size(0.35, 1.4), 5.0 / heat)
        ramp = pl.ramp(t0, t1)
        pl.plan.eff("m_rhs", [i], t0, t1, "mul", 1 + k, ramp)
        pl.plan.eff("hd_open", [i], t0, t1, "mul", 1 + k, ramp)
        more = pl.precursor("heat" if pl.rng.random() < 0.7 else "telemetry", t0, i, node)
        pl.label("thermal", "hbm", t0 + ramp / 3, t1, node, i, severity=k, **more)
        pl.book([node], t0, t1)
        return True
    return False


def fan(pl: Place) -> bool:
    f = pl.f
    t0, t1 = pl.window()
    busy = {int(f.node_of[j.gpus[0]]) for j in pl.jobs_in(t0, t1, (*SYNC, "serve"))}
    node = pl.nodes(t0, t1, lambda n: not f.boards[n].liquid and (n in busy or pl.rng.random() < 0.2))
    if node is None:
        return False
    flow, ramp = pl.size(0.38, 0.78), pl.ramp(t0, t1, 40)
    seen = "fan_min_rpm" in pl.ncols
    if not seen:
        flow = min(flow, 0.6)
    more = pl.precursor("telemetry" if pl.rng.random() < 0.2 else "heat", t0, None, node)
    pl.plan.eff("fanflow", [node], t0, t1, "mul", flow, ramp)
    pl.plan.eff(
        "fanmin", [node], t0, t1, "mul", 0.0 if not ramp and pl.rng.random() < 0.6 else pl.rng.uniform(0.25, 0.7), ramp
    )
    if not ramp and pl.rng.random() < 0.6:
        pl.plan.eff("fansfail", [node], t0, t1, "set", float(pl.rng.integers(1, 3)))
    pl.label("thermal", "fan", t0 + ramp / 3, t1, node, severity=1 / flow**0.72 - 1, **more)
    pl.book([node], t0 - 0, t1)
    return True


def rack(pl: Place) -> bool:
    f = pl.f
    t0, t1 = pl.window(32, 80)
    names = list(dict.fromkeys(f.rack))
    pl.rng.shuffle(names)
    for r in names:
        nodes = [n for n in range(f.n) if f.rack[n] == r]
        if not 2 <= len(nodes) <= max(2, f.n // 2) or not pl.free(nodes, t0, t1):
            continue
        ramp = pl.rng.uniform(3, 10) * MIN if pl.rng.random() < 0.5 else pl.rng.uniform(15, 40) * MIN
        ramp = min(ramp, 0.6 * (t1 - t0))
        if f.boards[nodes[0]].liquid and pl.rng.random() < 0.5:  # a pump, a filter, a valve
            pl.plan.eff("coolflow", nodes, t0, t1, "mul", pl.size(0.25, 0.6), ramp)
        else:
            pl.plan.eff("inlet", nodes, t0, t1, "add", pl.size(5, 15), ramp)
        pl.label("thermal", "rack", t0 + ramp / 3, t1, members=[[f.names[n], None] for n in nodes], scope="rack")
        pl.book(nodes, t0, t1)
        return True
    return False


# ---- memory ------------------------------------------------------------------------------------------------------------
def _ecc_ok(pl, i):
    return "ecc_dram_corrected" in pl.cols and pl.plan.a["eccoff"][i] == 0


def ecc_storm(pl: Place) -> bool:
    t0, t1 = pl.window()
    i = pl.any_gpu(t0, t1, lambda i: _ecc_ok(pl, i))
    if i is None:
        return False
    ramp, node = pl.ramp(t0, t1), int(pl.f.node_of[i])
    more = pl.precursor("ecc", t0, i, node)
    pl.plan.eff("q_edc", [i], t0, t1, "set", pl.size(250, 4e4, True) / 3600, ramp)
    if pl.rng.random() < 0.3:
        pl.plan.eff("q_esc", [i], t0, t1, "set", pl.size(30, 600, True) / 3600, ramp)
    if pl.rng.random() < 0.5:
        pl.xid(t0 + ramp / 2 + 90, i, 92, "High single-bit ECC error rate", False)
    pl.label("memory", "ecc_storm", t0 + ramp / 3, t1, node, i, **more)
    pl.book([node], t0, t1)
    return True


def uncorrectable(pl: Place) -> bool:
    t0, t1 = pl.window(45, 100)
    i = pl.any_gpu(t0, t1, lambda i: _ecc_ok(pl, i))
    if i is None:
        return False
    p, f, rng = pl.plan, pl.f, pl.rng
    node, me = int(f.node_of[i]), np.array([i])
    more = pl.precursor(["ecc", "remap"][int(rng.integers(2))], t0, i, node)
    p.bumps.append((t0, "ecc_dram_uncorrected", me, float(rng.integers(1, 4))))
    p.bumps.append((t0 + 1, "remapped_rows_uncorrected", me, 1))
    p.sets.append((t0 + 1, "pending", me, 1.0))
    p.sets.append((t0 + 1, "action", me, float(rng.choice([1, 4]))))
    if rng.random() < 0.6:
        pl.xid(
            t0,
            i,
            48,
            "An uncorrectable double bit error (DBE) has been detected on GPU in the framebuffer at "
            f"partition {int(rng.integers(0, 10))}, subpartition {int(rng.integers(0, 4))}.",
            False,
        )
    pl.xid(t0 + 0.3, i, 63, "Row Remapper: New row marked for remapping, reset gpu to activate.", False)
    code = 94 if rng.random() < 0.6 else 95
    pl.xid(
        t0 + 0.6,
        i,
        code,
        "Contained: SM. RST: No, D-RST: No" if code == 94 else "Uncontained: LTC TAG (0x2,0x0). RST: Yes, D-RST: No",
        True,
    )
    pl.kill(i, t0 + 5, without=[node])
    end = pl.repair(node, t0 + 5, me)
    pl.label("memory", "uncorrectable", t0, end, node, i, **more)
    pl.book([node], t0, end)
    return True


def remap_failed(pl: Place) -> bool:
    t0, t1 = pl.window(45, 100)
    i = pl.any_gpu(t0, t1, lambda i: "row_remap_failed" in pl.cols)
    if i is None:
        return False
    p, node, me = pl.plan, int(pl.f.node_of[i]), np.array([i])
    more = pl.precursor("remap", t0, i, node)
    p.sets.append((t0, "failed", me, 1.0))
    p.sets.append((t0, "pending", me, 0.0))
    p.bumps.append((t0, "ecc_dram_uncorrected", me, 1))
    p.sets.append((t0, "action", me, 1.0))
    pl.xid(t0, i, 64, "Row Remapper: Error recording new row remapping, all reserved rows for bank are remapped", False)
    end = pl.span + 1
    if pl.rng.random() < 0.5:
        pl.kill(i, t0 + 5, without=[node])
        end = pl.repair(node, t0 + 5, me)
    pl.label("memory", "remap_failed", t0, end, node, i, **more)
    pl.book([node], t0, end)
    return True


def remaps_pile_up(pl: Place) -> bool:
    t0, t1 = pl.window(45, 150)
    i = pl.any_gpu(t0, t1, lambda i: "row_remap_failed" in pl.cols and pl.plan.a["eccoff"][i] == 0)
    if i is None:
        return False
    p, node, me = pl.plan, int(pl.f.node_of[i]), np.array([i])
    n = int(pl.size(4, 24))
    when = np.sort(pl.rng.uniform(t0, t1 - 60, n))
    if pl.rng.random() < 0.4:
        when = np.sort(t0 + (t1 - t0) * pl.rng.beta(3, 1, n))
    more = pl.precursor("ecc", when[0], i, node)
    p.eff("q_edc", me, t0, t1, "add", pl.size(5, 200, True) / 3600)
    for t in when:
        p.bumps.append((t, "remapped_rows_corrected", me, 1))
        p.sets.append((t, "pending", me, 1.0))
        pl.xid(t, i, 63, "Row Remapper: New row marked for remapping, reset gpu to activate.", False)
    pl.label("memory", "remaps_pile_up", float(when[min(n - 1, n // 3)]), pl.span + 1, node, i, **more)
    pl.book([node], t0, pl.span + 1)
    return True


def sram_threshold(pl: Place) -> bool:
    t0, t1 = pl.window(45, 120)
    i = pl.any_gpu(t0, t1, lambda i: _ecc_ok(pl, i))
    if i is None:
        return False
    p, node, me = pl.plan, int(pl.f.node_of[i]), np.array([i])
    more = pl.precursor("ecc", t0, i, node)
    for k in range(int(pl.rng.integers(4, 9))):
        p.bumps.append((t0 + k * pl.rng.uniform(2, 60), "ecc_sram_uncorrected", me, 1))
    p.sets.append((t0, "thresh", me, 1.0))
    code = 172 if pl.rng.random() < 0.3 else 140 if pl.rng.random() < 0.3 else 94
    pl.xid(
        t0,
        i,
        code,
        {
            172: "Uncorrectable SRAM error",
            140: "ECC unrecoverable error detected by the hardware",
            94: "Contained: SM. RST: No, D-RST: No",
        }[code],
        code == 94,
    )
    if code != 94:
        p.sets.append((t0, "action", me, 1.0))
    pl.kill(i, t0 + 5, without=[node])
    end = pl.repair(node, t0 + 5, me) if code != 94 or pl.rng.random() < 0.5 else pl.span + 1
    pl.label("memory", "sram_threshold", t0, end, node, i, **more)
    pl.book([node], t0, end)
    return True


# ---- links -------------------------------------------------------------------------------------------------------------
def _port(pl: Place, t0, t1, net=False):
    def ok(i):
        job = pl.job_at(i, t0) if net else None
        return not net or (job is not None and job.par.get("tn", 0) > 0.02 and job.t1 >= t1)

    if not pl.lcols:
        return None
    i = pl.any_gpu(t0, t1, ok)
    return None if i is None else (i, int(pl.f.node_of[i]), int(pl.f.link_of_gpu[i]))


def _nic_event(pl, t, node, link, up):
    q = pl.f.link_name[link]
    pl.event(
        t,
        node,
        "kernel",
        "nic_link",
        f"mlx5_core 0000:{0x18 + 8 * (link % 8):02x}:00.0 {q}: " + ("Link up" if up else "Link down"),
        gpu=False,
    )


def port_down(pl: Place) -> bool:
    t0, t1 = pl.window()
    got = _port(pl, t0, t1)
    if not got:
        return False
    i, node, link = got
    more = pl.precursor("port", t0, i, node)
    pl.plan.eff("l_up", [link], t0, t1, "set", 0.0)
    pl.plan.bumps.append((t0, "link_downed", np.array([link]), 1))
    _nic_event(pl, t0, node, link, False)
    if t1 < pl.span:
        _nic_event(pl, t1, node, link, True)
    served = np.flatnonzero(pl.f.link_of_gpu == link)
    if pl.rng.random() < 0.5:
        job = pl.job_at(i, t0)
        if job is not None and job.par.get("tn", 0) > 0:
            pl.kill(i, t0 + pl.rng.uniform(20, 400), without=[node])
    pl.plan.eff("fnic", served, t0, t1, "mul", 0.5)
    pl.label("link", "port_down", t0, t1, node, i, **more)
    pl.book([node], t0, t1)
    return True


def ib_flap(pl: Place) -> bool:
    t0, t1 = pl.window()
    got = _port(pl, t0, t1)
    if not got:
        return False
    i, node, link = got
    more = pl.precursor("port", t0, i, node)
    t, gap = t0, pl.size(90, 900, True)
    while t < t1:
        d = pl.rng.uniform(4, 40)
        pl.plan.eff("l_up", [link], t, t + d, "set", 0.0)
        pl.plan.bumps.append((t, "link_downed", np.array([link]), 1))
        _nic_event(pl, t, node, link, False)
        _nic_event(pl, t + d, node, link, True)
        t += pl.rng.exponential(gap) + 30
    pl.plan.eff("l_recov", [link], t0, t1, "add", 3 / gap)
    pl.plan.eff("l_sym", [link], t0, t1, "add", 20 / gap)
    pl.plan.eff("fnic", np.flatnonzero(pl.f.link_of_gpu == link), t0, t1, "mul", 0.93)
    pl.label("link", "ib_flap", t0, t1, node, i, **more)
    pl.book([node], t0, t1)
    return True


def ib_errors(pl: Place) -> bool:
    t0, t1 = pl.window()
    got = _port(pl, t0, t1)
    if not got:
        return False
    i, node, link = got
    ramp, more = pl.ramp(t0, t1), pl.precursor("port", t0, i, node)
    x = pl.size(120, 3e4, True) / 3600
    for k, z in (("l_sym", 1.0), ("l_rxe", 0.6), ("l_integ", 0.1), ("l_oos", 0.2), ("l_pse", 0.15), ("l_recov", 0.005)):
        pl.plan.eff(k, [link], t0, t1, "add", x * z, ramp)
    pl.label("link", "ib_errors", t0 + ramp / 3, t1, node, i, **more)
    pl.book([node], t0, t1)
    return True


def nvlink(pl: Place) -> bool:
    t0, t1 = pl.window()
    i = pl.any_gpu(t0, t1, lambda i: pl.f.p["nvlinks"][i] > 0)
    if "nvlink_crc_errors" not in pl.cols or i is None:
        return False
    f, p, node = pl.f, pl.plan, int(pl.f.node_of[i])
    ramp, more = pl.ramp(t0, t1), pl.precursor("nvlink", t0, i, node)
    x = pl.size(80, 3e4, True) / 3600
    p.eff("q_crc", [i], t0, t1, "add", x, ramp)
    p.eff("q_nvr", [i], t0, t1, "add", x * 0.8, ramp)
    p.eff("q_nvrec", [i], t0, t1, "add", x * 0.004 + 2 / 3600, ramp)
    p.eff("ber", [i], t0, t1, "add", pl.size(2, 7), ramp)
    if pl.rng.random() < 0.35:
        p.eff("links", [i], t0 + ramp, t1, "add", -float(pl.rng.integers(1, 3)))
        p.eff("flink", [i], t0 + ramp, t1, "mul", 0.85)
    if pl.rng.random() < 0.4:
        if f.boards[node].pool in ("b200", "gb200"):
            pl.xid(t0 + ramp + 1, i, 149, "NETIR_LINK_DOWN Nonfatal XC0 i0 Link 05 (0x004485c6 0x00000000)", False)
        else:
            pl.xid(
                t0 + ramp + 1,
                i,
                74,
                "NVLink: fatal error detected on link "
                f"{int(pl.rng.integers(0, 12))}(0x10000, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0)",
                False,
            )
    pl.label("link", "nvlink", t0 + ramp / 3, t1, node, i, **more)
    pl.book([node], t0, t1)
    return True


def pcie_downgrade(pl: Place) -> bool:
    if "pcie_width" not in pl.cols:
        return False
    t0, t1 = pl.window()
    got = pl.gpu_in_load(t0, t1, (*SYNC, "serve", "single"))
    if not got:
        return False
    i, node = got[0], int(pl.f.node_of[got[0]])
    more = pl.precursor("pcie", t0, i, node)
    if pl.rng.random() < 0.6:
        w = float(pl.rng.choice([8, 4, 2, 1]))
        pl.plan.eff("width", [i], t0, t1, "set", w)
        pl.plan.eff("fpcie", [i], t0, t1, "mul", max(0.3, w / 16))
    else:
        g = float(pl.rng.choice([1, 2, 3]))
        pl.plan.eff("gen", [i], t0, t1, "set", g)
        pl.plan.eff("fpcie", [i], t0, t1, "mul", max(0.3, 2 ** (g - pl.f.p["pcie_gen"][i])))
    pl.label("link", "pcie_downgrade", t0, t1, node, i, **more)
    pl.book([node], t0, t1)
    return True


def pcie_replays(pl: Place) -> bool:
    if "pcie_replays" not in pl.cols:
        return False
    t0, t1 = pl.window()
    i = pl.any_gpu(t0, t1)
    if i is None:
        return False
    node, ramp = int(pl.f.node_of[i]), pl.ramp(t0, t1)
    more = pl.precursor("pcie", t0, i, node)
    x = pl.size(150, 4e4, True) / 3600
    pl.plan.eff("q_pcie", [i], t0, t1, "add", x, ramp)
    pl.plan.eff("q_aer", [node], t0, t1, "add", x * 1.3, ramp)
    if pl.rng.random() < 0.5:
        pl.event(
            t0 + ramp + 20,
            i,
            "kernel",
            "aer",
            "pcieport 0000:15:01.0: AER: Correctable error message received "
            "from 0000:1b:00.0: PCIe Bus Error: severity=Correctable, type=Data Link Layer, (Transmitter ID)",
        )
    pl.label("link", "pcie_replays", t0 + ramp / 3, t1, node, i, **more)
    pl.book([node], t0, t1)
    return True


def congestion_port(pl: Place) -> bool:
    t0, t1 = pl.window()
    got = _port(pl, t0, t1, net=True)
    if not got:
        return False
    i, node, link = got
    ramp, k = pl.ramp(t0, t1), pl.size(0.1, 1.0)
    p = pl.plan
    p.eff("l_wait", [link], t0, t1, "mul", 12 * 12**k, ramp)  # waits 5 to 60 % of the time instead of some per mille
    for name, z in (("l_oos", 1), ("l_pse", 0.7), ("l_rnr", 0.05), ("l_ack", 0.02), ("l_cnps", 8), ("l_cnph", 30)):
        p.eff(name, [link], t0, t1, "add", z * 1500 * 10**k / 3600, ramp)
    p.eff("fnic", np.flatnonzero(pl.f.link_of_gpu == link), t0, t1, "mul", 1 - 0.35 * k, ramp)
    pl.label("link", "congestion_port", t0 + ramp / 3, t1, node, i)
    pl.book([node], t0, t1)
    return True


def hot_switch(pl: Place) -> bool:
    f, p = pl.f, pl.plan
    if not pl.lcols or not pl.lcols & {"tx_wait", "cnp_handled"}:
        return False
    t0, t1 = pl.window(30, 60)
    leaves = list(dict.fromkeys(f.link_leaf))
    pl.rng.shuffle(leaves)
    for leaf in leaves:
        links = np.array([k for k in range(len(f.link_leaf)) if f.link_leaf[k] == leaf])
        nodes = sorted({int(f.link_node[k]) for k in links})
        if not 2 <= len(nodes) <= max(2, 0.7 * f.n) or not pl.free(nodes, t0, t1):
            continue
        busy = [
            n
            for n in nodes
            if (j := pl.job_at(int(f.first[n]), t0)) is not None and j.par.get("tn", 0) > 0.02 and j.t1 > t1 - 600
        ]
        if len(busy) < max(2, 0.5 * len(nodes)):
            continue
        on = links[pl.rng.random(len(links)) < pl.rng.uniform(0.7, 1)]
        ramp, k = pl.ramp(t0, t1, 20), pl.size(0.1, 1)
        spread = np.exp(pl.rng.normal(0, 0.3, len(on)))
        p.eff("l_wait", on, t0, t1, "mul", 8 * 8**k * spread, ramp)
        for name, z in (("l_oos", 0.6), ("l_pse", 0.4), ("l_cnps", 6), ("l_cnph", 20)):
            p.eff(name, on, t0, t1, "add", z * 600 * 10**k * spread / 3600, ramp)
        p.eff("fnic", np.flatnonzero(np.isin(f.link_of_gpu, on)), t0, t1, "mul", 1 - 0.3 * k, ramp)
        pl.label("link", "hot_switch", t0 + ramp / 3, t1, members=[[f.names[n], None] for n in nodes], scope="leaf")
        pl.book(nodes, t0, t1)
        return True
    return False


# ---- xid ---------------------------------------------------------------------------------------------------------------
XIDS = {  # code: (text, with a process, pools or None)
    79: ("GPU has fallen off the bus.", False, None),
    62: ("PMU Halt Error 2a0b3c11 0000a0b4 00000000", False, None),
    109: ("Ch 00000008, errorString CTX SWITCH TIMEOUT, Info 0x1c014", True, None),
    119: (
        "Timeout after 6s of waiting for RPC response from GPU0 GSP! Expected function 76 (GSP_RM_CONTROL) (0x20802a02 0x4).",
        True,
        None,
    ),
    120: ("GSP task exception: watchdog timeout (0x2) @ pc:0x4ab7c1e, partition:5#0, task:2", False, None),
    140: ("Unrecovered ECC error: DRAM 0, SRAM 1", False, None),
    46: ("GPU stopped processing", False, None),
    158: ("GPU fatal timeout detected", False, None),
    110: ("SEC Fault Error: 0x0000003f", False, ("h100", "h100-dlc", "h200", "b200", "gb200")),
    143: ("GPU Initialization Failure", False, ("h100", "h100-dlc", "h200", "b200", "gb200")),
    136: ("ALI Training Failed on link 3", False, ("h100", "h100-dlc", "h200")),
    74: (
        "NVLink: fatal error detected on link 7(0x0, 0x0, 0x10000, 0x0, 0x0, 0x0, 0x0)",
        False,
        ("a100", "h100", "h100-dlc", "h200"),
    ),
    145: ("RLW_SRC_TRACK Fatal XC1 i0 Link -1 (0x000004e2 0x00000001 0x00000000)", True, ("b200", "gb200")),
    155: ("NVLink SW defined error", False, ("b200", "gb200")),
    167: ("PCIe fatal timeout", False, ("h100", "h200", "b200")),
}


def xid(pl: Place) -> bool:
    rng, f, p = pl.rng, pl.f, pl.plan
    t0, t1 = pl.window(45, 100)
    i = pl.any_gpu(t0, t1)
    if i is None:
        return False
    node, me = int(f.node_of[i]), np.array([i])
    pool = f.boards[node].pool
    code = int(rng.choice([c for c, x in XIDS.items() if x[2] is None or pool in x[2]]))
    more = pl.precursor(
        {79: "pcie", 167: "pcie", 74: "nvlink", 136: "nvlink", 145: "nvlink", 140: "ecc"}.get(
            code, str(rng.choice(["heat", "telemetry", "ecc"]))
        ),
        t0,
        i,
        node,
    )
    text, proc, _ = XIDS[code]
    for k in range(1 if code in (79, 143) else int(rng.integers(1, 5))):
        pl.xid(t0 + k * rng.uniform(1, 12), i, code, text, proc)
    if code == 79:
        pl.event(t0 + 0.2, i, "kernel", "nvrm", "NVRM: GPU at PCI:0000:1b:00: GPU has fallen off the bus.")
    if rng.random() < 0.5:
        pl.xid(
            t0 + 1,
            i,
            154,
            "GPU recovery action changed from 0x0 (None) to 0x%s"
            % ("2 (Node Reboot Required)" if code == 79 else "1 (GPU Reset Required)"),
            False,
        )
    p.sets.append((t0 + 1, "action", me, 2.0 if code == 79 else 1.0))
    pl.kill(i, t0 + rng.uniform(2, 40), without=[node])
    end = pl.repair(node, t0 + 45, me)
    if code in (79, 143) or code in (119, 120, 167) and rng.random() < 0.5:
        p.gpu_gone.append((me, t0 + rng.uniform(0, 15), end))
        pl.event(t0 + 16, i, "lifecycle", "gpu_lost", "GPU no longer answers")
    for other in f.gpus(node)[rng.random(f.boards[node].gpus) < 0.3]:
        if other != i and rng.random() < 0.5:
            pl.xid(t0 + rng.uniform(3, 30), int(other), 45, "Ch 00000010, Preemptive Channel Removal", True)
    pl.label("xid", f"xid_{code}", t0, end, node, i, **more)
    pl.book([node], t0, end)
    return True


# ---- liveness ----------------------------------------------------------------------------------------------------------
def _gone(pl, node, t0, t1):
    pl.clear(node, t0, t1 + 180)
    pl.reboot(node, t0, t1)


def silent(pl: Place) -> bool:
    t0, t1 = pl.window()
    node = pl.nodes(t0, t1)
    if node is None:
        return False
    more = pl.precursor("telemetry", t0, None, node) if pl.rng.random() < 0.3 else {}
    if pl.rng.random() < 0.2:  # the agent alone died: its jobs go on
        pl.plan.node_gone.append((node, t0, t1))
        pl.event(t1 + 1, node, "lifecycle", "agent_started", "agent started", gpu=False)
    else:
        _gone(pl, node, t0, t1)
    pl.label("liveness", "silent", t0, t1, node, **more)
    pl.book([node], t0, t1)
    return True


def gpu_lost(pl: Place) -> bool:
    t0, t1 = pl.window()
    i = pl.any_gpu(t0, t1)
    if i is None:
        return False
    node = int(pl.f.node_of[i])
    pl.plan.gpu_gone.append((np.array([i]), t0, t1))
    if pl.rng.random() < 0.6:
        pl.event(t0 + pl.rng.uniform(5, 30), i, "lifecycle", "gpu_lost", "GPU no longer answers")
        if t1 < pl.span:
            pl.event(t1 + 1, i, "lifecycle", "gpu_back", "a lost GPU answers again")
    pl.kill(i, t0 + pl.rng.uniform(5, 60), without=[node])
    pl.clear(node, t0 + 61, t1 + 60)
    pl.label("liveness", "gpu_lost", t0, t1, node, i)
    pl.book([node], t0, t1)
    return True


def driver_hung(pl: Place) -> bool:
    t0, t1 = pl.window(30, 70)
    node = pl.nodes(t0, t1)
    if node is None:
        return False
    p, gpus = pl.plan, pl.f.gpus(node)
    if pl.rng.random() < 0.5:
        p.nulls.append((gpus, t0, t1))
    else:
        p.gpu_gone.append((gpus, t0, t1))
    p.eff("hung", [node], t0, t1, "set", 1.0)
    if pl.rng.random() < 0.75 or not pl.ncols:
        pl.event(t0 + 30, node, "lifecycle", "driver_hung", "calls into the driver do not return", gpu=False)
        if t1 < pl.span:
            pl.event(t1 + 5, node, "lifecycle", "driver_back", "the driver answers again", gpu=False)
    if pl.rng.random() < 0.5:
        pl.event(
            t0 + 130,
            node,
            "kernel",
            "hung_task",
            "INFO: task nvidia-smi:48211 blocked for more than 122 seconds.",
            gpu=False,
        )
    pl.clear(node, t0 + 20, t1 + 60)
    if t1 < pl.span:
        p.resets.append((t1, node, False))
    pl.label("liveness", "driver_hung", t0, t1, node)
    pl.book([node], t0, t1)
    return True


def rack_power(pl: Place) -> bool:
    f = pl.f
    t0, t1 = pl.window(25, 60)
    names = list(dict.fromkeys(f.rack))
    pl.rng.shuffle(names)
    for r in names:
        nodes = [n for n in range(f.n) if f.rack[n] == r]
        if not 2 <= len(nodes) <= max(2, f.n // 3) or not pl.free(nodes, t0, t1):
            continue
        for n in nodes:
            _gone(pl, n, t0 + pl.rng.uniform(0, 2), t1 + pl.rng.uniform(0, 240))
        pl.label("liveness", "rack_power", t0, t1, members=[[f.names[n], None] for n in nodes], scope="rack")
        pl.book(nodes, t0, t1 + 240)
        return True
    return False


def clock_wrong(pl: Place) -> bool:
    t0, t1 = pl.window()
    node = pl.nodes(t0, t1)
    seen = "clock_offset_s" in pl.ncols
    if node is None or (not pl.clock_rows and not seen):
        return False
    s = pl.size(6, 400, True) * pl.rng.choice([-1, 1])
    if pl.rng.random() < 0.3:  # creeps: the offset passes 5 s on the way, in steps
        n = 40
        creep = np.linspace(0, 1, n + 1)
        t_up = 0.5 * (t1 - t0)
        for a, b, c in zip(creep[:-1], creep[1:], (creep[:-1] + creep[1:]) / 2, strict=True):
            pl.plan.offsets.append((node, t0 + a * t_up, t0 + b * t_up, s * c))
        pl.plan.offsets.append((node, t0 + t_up, t1, s))
        start = t0 + t_up * min(1, 5 / abs(s)) + 1
    else:
        pl.plan.offsets.append((node, t0, t1, s))
        start = t0
    if not seen or pl.rng.random() < 0.5:
        pl.event(
            start + 20,
            node,
            "lifecycle",
            "clock_wrong",
            f"node's clock differs from the collector's by {s:.1f} s",
            gpu=False,
        )
    pl.label("liveness", "clock_wrong", start, t1, node)
    pl.book([node], t0, t1)
    return True


# ---- drift -------------------------------------------------------------------------------------------------------------
def _drift(pl: Place, cause: str) -> bool:
    """From the start, or from a reboot within the case."""
    f, p, rng = pl.f, pl.plan, pl.rng
    late = rng.random() < 0.4
    t0 = rng.uniform(0.1, 0.6) * pl.span if late else 0.0
    node = pl.nodes(t0 - 1200, pl.span, lambda n: len(pl.f.pool_nodes(n)) >= 4)
    if node is None:
        return False
    since = t0
    if late:
        off = rng.uniform(5, 15) * MIN
        pl.clear(node, t0, t0 + off + 30)
        pl.event(t0, node, "lifecycle", "agent_stopped", "agent was asked to stop", gpu=False)
        pl.reboot(node, t0, t0 + off)
        since = t0 + off
    t_eff = since if late else -1e6
    whole = cause == "driver" or rng.random() < 0.5
    gpus = f.gpus(node)
    if not whole:
        gpus = gpus[[int(rng.integers(len(gpus)))]]
    end, slots = pl.span + 1, [int(f.slot[i]) for i in gpus]
    if cause == "driver":
        pl.facts.append(
            (since, node, {"driver_version": str(rng.choice(["550.54.15", "550.127.08", "535.216.01", "570.86.15"]))})
        )
        p.eff("fun", gpus, t_eff, end, "mul", 1 - pl.size(0.0, 0.06))
    elif cause == "vbios":
        old = f.boards[node].vbios[:-2] + "%02X" % int(rng.integers(0x20, 0x60))
        pl.facts.append((since, node, {f"gpu{s}.vbios": old for s in slots}))
        if rng.random() < 0.5:
            p.eff("fcap", gpus, t_eff, end, "set", np.round(f.p["fmax"][gpus[0]] * (1 - pl.size(0.02, 0.12)) / 15) * 15)
    elif cause == "power_limit":
        new = np.round(f.p["tdp"][gpus[0]] * (1 - pl.size(0.07, 0.4)) / 10) * 10
        p.eff("plim", gpus, t_eff, end, "set", new)
        pl.facts.append((since, node, {f"gpu{s}.power_limit_set_w": f"{new:.0f}" for s in slots}))
    elif cause == "clock_limit":
        new = np.round(f.p["fmax"][gpus[0]] * (1 - pl.size(0.08, 0.4)) / 15) * 15
        p.eff("fcap", gpus, t_eff, end, "set", new)
        pl.facts.append((since, node, {f"gpu{s}.sm_clock_max_mhz": f"{new:.0f}" for s in slots}))
    else:
        p.eff("eccoff", gpus, t_eff, end, "set", 1.0)
        p.eff("fmem", gpus, t_eff, end, "mul", 1.01)
        pl.facts.append((since, node, {f"gpu{s}.ecc_mode": "disabled" for s in slots}))
    pl.label("drift", cause, since, end, node, None if whole else int(gpus[0]))
    pl.book([node], t0 if late else 0, end)
    return True


# ---- idle --------------------------------------------------------------------------------------------------------------
def held(pl: Place) -> bool:
    """A job that holds GPUs and does nothing: a forgotten notebook, a debugger; or a job that went quiet."""
    from drover_simulator.strangers.f.jobs import Job

    f, rng = pl.f, pl.rng
    if not pl.cols & {"framebuffer_used_bytes", "compute_processes"}:
        return False
    t0 = rng.uniform(-2 * 3600, 0.35 * pl.span)
    t1 = pl.span + 1
    if rng.random() < 0.35:
        t1 = max(t0 + 5400, rng.uniform(0.7, 1) * pl.span)
    sizes = [1, int(rng.integers(2, 8)), 8, 16, 24]
    rng.shuffle(sizes)
    for want in sizes:
        first, got = int(rng.integers(f.n)), []
        for d in range(f.n):
            n = (first + d) % f.n
            if f.boards[n].pool != f.boards[first].pool or not pl.free([n], max(t0, 0), t1):
                continue
            if any(
                j.t0 < t1 and j.t1 > t0 and len(set(f.node_of[j.gpus].tolist())) > 1
                for j in pl.jobs
                if np.any(f.node_of[j.gpus] == n)
            ):
                continue
            got.append(n)
            if sum(f.boards[x].gpus for x in got) >= want:
                break
        if sum(f.boards[x].gpus for x in got) < want:
            continue
        gpus = np.concatenate([f.gpus(n) for n in got])[:want]
        for j in [j for j in pl.jobs if np.isin(j.gpus, gpus).any() and j.t0 < t1 and j.t1 > t0]:
            j.t1 = min(j.t1, t0 - 60)
        listed = bool(rng.random() < 0.6)
        job = Job(
            f"{int(rng.integers(1e5, 9e5))}",
            "held",
            gpus,
            t0,
            t1,
            {},
            np.ones(want),
            listed=listed,
            seed=int(rng.integers(1 << 31)),
            memory=rng.uniform(0.04, 0.9),
        )
        pl.jobs[:] = [j for j in pl.jobs if j.t1 > j.t0]
        pl.jobs.append(job)
        pl.label(
            "idle",
            "held",
            t0,
            t1,
            int(f.node_of[gpus[0]]),
            int(gpus[0]) if want == 1 else None,
            members=[[f.names[f.node_of[i]], int(f.slot[i])] for i in gpus],
            hardware=True,
        )
        pl.book(got, max(t0, 0), t1)
        return True
    return False


STRAGGLERS = ("thermal", "power_cap", "clock", "hbm", "pcie", "nvlink", "nic", "host", "unexplained")
DRIFTS = ("driver", "vbios", "power_limit", "clock_limit", "ecc_mode")
FAULTS = {("straggler", c): (lambda pl, c=c: _straggler(pl, c)) for c in STRAGGLERS}
FAULTS |= {("drift", c): (lambda pl, c=c: _drift(pl, c)) for c in DRIFTS}
FAULTS |= {
    ("hang", "rank_stopped"): rank_stopped,
    ("thermal", "cooling"): cooling,
    ("thermal", "fan"): fan,
    ("thermal", "rack"): rack,
    ("thermal", "hbm"): hbm,
    ("xid", "xid"): xid,
    ("idle", "held"): held,
}
FAULTS |= {("memory", x.__name__): x for x in (ecc_storm, uncorrectable, remap_failed, remaps_pile_up, sram_threshold)}
FAULTS |= {
    ("link", x.__name__): x
    for x in (port_down, ib_flap, ib_errors, nvlink, pcie_downgrade, pcie_replays, congestion_port, hot_switch)
}
FAULTS |= {("liveness", x.__name__): x for x in (silent, gpu_lost, driver_hung, rack_power, clock_wrong)}
WIDE = {("thermal", "rack"), ("link", "hot_switch"), ("liveness", "rack_power"), ("idle", "held")}
LATE = {("straggler", c) for c in STRAGGLERS} | {("hang", "rank_stopped")}  # after those that end jobs

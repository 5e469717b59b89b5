"""What the GPUs do, step by step: clocks, power, heat, waiting for each other.

- Power: idle + leakage (exponential in temperature) + dynamic power C V^2 f of the share of time that computes + HBM.
- Clock: the highest at which the compute phase stays under the power limit, under thermal slowdown and under caps.
- Heat: die over cold plate or heat sink (seconds), sink over air or loop (a minute or two), room (a day). Fans follow
  the hottest die of their node. GPUs behind others breathe or drink what these have warmed.
- A step of a group ends when its slowest member and its slowest link are done; the others spin in NCCL until then.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from drover_simulator.strangers.d.jobs import SERIES, Job, series
from drover_simulator.strangers.d.site import Site

GPU_PARAMS = {"fcap": 1.0, "unx": 1.0, "hbm": 1.0, "memclk": 1.0, "nvl": 1.0, "pcie": 1.0, "nic": 1.0, "host": 1.0, "rth": 1.0,
              "rhbm": 1.0, "plim": 1.0, "brake": 1.0, "spin": 0.0, "left": 0.0, "procs": 0.0, "mute": 0.0}  # fmt: skip
NODE_PARAMS = {"air": 1.0, "warm": 0.0, "off": 0.0, "cpu": 0.0}
X = np.linspace(0.05, 1.0, 400)
G = X * np.maximum(0.70, 0.40 + 0.60 * X) ** 2  # f V^2 over that at the highest clock
IDLE, POWER, SW_HEAT, HW_HEAT, BRAKE, SETTING, HW = 0x1, 0x4, 0x20, 0x40, 0x80, 0x2, 0x8


@dataclass
class Edits:
    """Changes of parameters over time: (s, parameter, GPUs or nodes, value)."""

    rows: list[tuple[float, int, str, Any, float]] = field(default_factory=list)

    def set(self, t: float, name: str, at: Any, value: float) -> None:
        self.rows.append((t, len(self.rows), name, np.atleast_1d(at), float(value)))

    def during(self, a: float, b: float, name: str, at: Any, value: float) -> None:
        self.set(a, name, at, value)
        self.set(b, name, at, (GPU_PARAMS | NODE_PARAMS)[name])

    def ramp(self, a: float, b: float, name: str, at: Any, first: float, last: float) -> None:
        for k in range(31):
            self.set(a + (b - a) * k / 30, name, at, first + (last - first) * k / 30)


@dataclass
class Units:
    """How units of one board differ: SC'22 found 8 % in mean, 22 % at most."""

    power: np.ndarray
    clock: np.ndarray
    heat: np.ndarray
    hbm: np.ndarray
    preheat: np.ndarray  # degC at full node power
    idle: np.ndarray


def resistance(site: Site) -> np.ndarray:
    """K/W from die to air or loop, of each GPU of mean build: at its limit a GPU is at `design_c`."""
    return np.maximum(site.design_c - max(site.room_c, 20) - 4, 14) / site.of_board("tdp_w")


def draw_units(site: Site) -> Units:
    rng, g = site.rng, site.g
    rear = np.where(site.slot_of >= site.of_board("gpus") / 2, 1.0, 0.25)
    if site.liquid:
        pre = rng.uniform(0.5, 3.5) * (site.slot_of % 4) / 3
    else:
        pre = rng.uniform(2, 8) * rear
    return Units(
        1 + 0.035 * rng.standard_normal(g).clip(-2.5, 2.5), 1 - 0.006 * np.abs(rng.standard_normal(g)),
        1 + 0.07 * rng.standard_normal(g).clip(-2, 2), rng.uniform(6, 13, g), pre + rng.normal(0, 0.4, g),
        1 + 0.06 * rng.standard_normal(g).clip(-2, 2),
    )  # fmt: skip


def run(site: Site, jobs: list[Job], edits: Edits) -> dict[str, np.ndarray]:
    """Play the whole span; gives float32 [steps, GPUs] by name, and [steps, nodes] for "inlet", "fan", "cpu", "store", "air"."""
    rng, g, n, steps, dt = site.rng, site.g, site.n, site.steps, site.dt
    unit = draw_units(site)
    v = {name: np.full(g, value) for name, value in GPU_PARAMS.items()}
    w = {name: np.full(n, value) for name, value in NODE_PARAMS.items()}
    queue = sorted(edits.rows)
    tdp, fmax, slow = site.of_board("tdp_w"), site.of_board("clock"), site.of_board("t_slow")
    idle_w = site.of_board("idle_w") * unit.idle
    idle_x = site.of_board("idle_clock") / fmax
    kc, km = 0.92 * tdp * unit.power, 0.2 * tdp
    r_all = resistance(site) * unit.heat
    r_die, r_sink = 0.45 * r_all, 0.55 * r_all
    tau_die, tau_sink = rng.uniform(3, 8), rng.uniform(18, 40) if site.liquid else rng.uniform(70, 160)
    tau_loop, tau_fan = rng.uniform(150, 400), rng.uniform(15, 45)
    node = site.node_of
    data = np.zeros((steps, len(jobs) + 1, len(SERIES)), np.float32)
    for j, job in enumerate(jobs):
        data[:, j] = series(site, job)
    changes = sorted(
        {max(0, int(np.ceil(t / dt - 1e-9))) for job in jobs for t in (job.start, job.end) if t < site.span} | {0}
    )
    names = (
        "clock",
        "power",
        "die",
        "hbm",
        "util",
        "sm",
        "tensor",
        "dram",
        "nvlink",
        "pcie",
        "net",
        "fill",
        "procs",
        "busy",
        "plim",
        "memclk",
        "step",
        "rate",
    )
    out = {name: np.zeros((steps, g), np.float32) for name in names}
    out |= {name: np.zeros((steps, n), np.float32) for name in ("inlet", "fan", "cpu", "store", "air")}
    out["why"] = np.zeros((steps, g), np.uint8)
    out["job"] = np.full((steps, g), -1, np.int16)
    room = site.room_c + site.drift_c * np.sin(2 * np.pi * np.arange(steps) * dt / 86400 + site.room_phase)
    inlet = np.full(n, room[0])
    spread = rng.normal(0, 0.7, n)
    die = np.full(g, room[0] + 12.0)
    sink = np.full(g, room[0] + 8.0)
    hot = die + 2
    fan, xth = np.full(n, 0.45), np.ones(g)
    power = idle_w.copy()
    full = np.bincount(node, tdp, n)
    costs = {c: np.zeros(g) for c in "cmphnx"}
    per = {
        c: np.zeros(g)
        for c in ("tensor", "intensity", "dram", "memory", "net", "weight", "wobble", "serve", "phase", "period")
    }
    jobidx = np.full(g, len(jobs))
    order, starts, back = np.arange(g), np.arange(g), np.arange(g)
    sub = max(1, int(np.ceil(dt / 10)))
    h = dt / sub
    warm_up = max(1, int(600 / h))
    e_die, e_sink, e_loop, e_fan = (1 - np.exp(-h / tau) for tau in (tau_die, tau_sink, tau_loop, tau_fan))
    stuck = float(rng.uniform(0.05, 0.4))  # a kernel that never ends: a few warps, on few SMs
    at = 0
    for k in range(steps):
        t = k * dt
        while at < len(queue) and queue[at][0] <= t + dt * 0.5:
            _, _, name, where, value = queue[at]
            (v if name in v else w)[name][where] = value
            at += 1
        if changes and k >= changes[0]:
            while changes and k >= changes[0]:
                changes.pop(0)
            jobidx, order, starts, back = _hold(site, jobs, t, costs, per)
        row = data[k][jobidx]
        load = row[:, 0] * (v["spin"] == 0) * (w["off"][node] == 0)
        weight = (
            per["weight"] + per["wobble"] * np.sin(2 * np.pi * t / per["period"] + per["phase"])
            if per["wobble"].any()
            else per["weight"]
        )
        spin = v["spin"]
        held = jobidx < len(jobs)
        for _ in range(sub if k else sub + warm_up):
            leak = 0.05 * tdp * (np.exp((die - 45) / 55) - 1)
            peak = np.maximum(kc * per["intensity"] * row[:, 1] / v["unx"], 1e-3)
            room_w = v["plim"] * tdp - idle_w - leak - km * per["dram"] * 0.6
            xp = np.interp(np.maximum(room_w / peak, 0), G, X)
            cap = v["fcap"] * unit.clock
            x = np.minimum(np.minimum(xp, cap), np.minimum(xth, v["brake"]))
            hw = die > slow + 5
            x = np.where(hw, np.minimum(x, 0.5), x)
            compute = costs["c"] * weight * row[:, 2] * v["unx"] / x
            memory = costs["m"] * weight * row[:, 2] / (v["hbm"] * v["memclk"])
            pcie, host = costs["p"] / v["pcie"], costs["h"] * v["host"]
            own = compute + memory + pcie + host
            links = np.stack([own, costs["n"] * row[:, 3] / v["nvl"], costs["x"] * row[:, 3] / v["nic"]])
            most = np.maximum.reduceat(links[:, order], starts, axis=1)[:, back]
            step = np.maximum(most.sum(0), 1e-6)
            r = np.where(per["serve"] > 0, np.minimum(1.0, load * step), np.minimum(load, 1.0))
            cs, ms, hs, ps = (r * part / step for part in (compute, memory, host, pcie))
            wait = np.maximum(r - cs - ms - hs - ps, 0) * held
            spinning = (spin == 1) + (spin == 3) * stuck
            dram = np.minimum(per["dram"] * r * row[:, 2] * weight / (step * v["hbm"]) * 1.3, 0.95)
            busy = cs + wait * 0.16 + spinning * 0.15
            gx = np.interp(x, X, G)
            power = (
                idle_w
                + leak
                + held * 0.03 * tdp
                + (peak * (cs + 0.12 * hs) + kc * (0.2 * wait + 0.16 * spinning + 0.1 * ms)) * gx
                + km * dram
            )
            power = np.where(w["off"][node] > 0, 0.1 * idle_w, power)
            total = np.bincount(node, power, n)
            inlet += ((room[k] + spread + w["warm"]) - inlet) * e_loop
            want = np.clip(0.35 + (np.maximum.reduceat(die, site.first[:-1]) - 52) * 0.02, 0.28, 1.0)
            fan += (want - fan) * e_fan
            flow = np.ones(n) if site.liquid else fan * w["air"]
            rs = (
                r_sink
                * v["rth"]
                * (0.4 + 0.36 / flow[node] if not site.liquid else 1 / np.maximum(w["air"][node], 0.2))
            )
            air = inlet[node] + unit.preheat * (total / full)[node] / (
                1.0 if site.liquid else np.sqrt(flow[node] + 0.3)
            )
            sink += (air + rs * power - sink) * e_sink
            die += (sink + r_die * (1 + 0.5 * (v["rth"] - 1)) * power - die) * e_die
            hot += (0.55 * die + 0.45 * sink + unit.hbm * dram * 2.0 * v["rhbm"] + 3 * v["rhbm"] - hot) * e_die
            err = np.maximum(die - slow, (hot - 99) * 0.7)
            xth = np.clip(xth - np.where(err > -3, 0.0012 * h * (err + 0.5), -0.004 * h), 0.3, 1.0)
        idle = (load < 0.01) & (spin == 0)
        asleep = idle & ~held & (v["procs"] == 0)
        share = np.where(asleep, idle_x, np.where(idle, np.minimum(cap, np.minimum(xth, v["brake"])), x))
        o = out
        o["clock"][k], o["power"][k], o["die"][k], o["hbm"][k] = share * fmax, power, die, hot
        o["util"][k] = np.clip(r - hs - 0.5 * ps + (spinning > 0), 0, 1)
        o["sm"][k] = np.clip(0.93 * cs + 0.8 * ms + 0.14 * wait + 0.13 * spinning, 0, 1)
        o["tensor"][k] = np.clip(
            per["tensor"] * 1.25 * row[:, 6] * r * costs["c"] * weight * row[:, 2] / (x * step), 0, 0.97
        )
        o["dram"][k] = np.clip(dram + 0.02 * wait + 0.005 * spinning, 0, 1)
        o["nvlink"][k] = np.where(costs["n"] > 0, r * costs["n"] * row[:, 3] / step * 0.55, 0)
        o["pcie"][k] = 0.05 * r / step + 0.02 * held
        o["net"][k] = per["net"] * r * row[:, 3] / step
        o["fill"][k] = np.maximum(held * per["memory"] * row[:, 5], v["left"])
        o["procs"][k] = np.maximum(held * 1.0, v["procs"])
        o["busy"][k] = busy
        o["step"][k], o["rate"][k] = np.where(held, step, 0), r / step * held
        o["plim"][k], o["memclk"][k] = v["plim"] * tdp, v["memclk"]
        capped = (xp < np.minimum(cap, np.minimum(xth, v["brake"])) - 0.002) & (r > 0.15)
        o["why"][k] = (IDLE * asleep + POWER * capped + SW_HEAT * ((xth < 0.995) & (xth <= np.minimum(xp, cap) + 0.01) & ~idle) + (HW_HEAT | HW) * hw
                       + SETTING * ((v["fcap"] < 0.97) & (v["mute"] == 0) & (v["fcap"] < xp)) + (BRAKE | HW) * (v["brake"] < 1))  # fmt: skip
        o["job"][k] = np.where(held, jobidx, -1)
        o["inlet"][k], o["fan"][k], o["air"][k] = inlet, fan, w["air"]
        size = np.array([b.gpus for b in site.boards])
        o["cpu"][k] = np.clip(
            0.02 + np.bincount(node, 0.12 * r + 0.02 * held + 0.015 * spinning, n) / size + w["cpu"], 0, 1
        )
        o["store"][k] = np.bincount(node, row[:, 4] * held, n) / size
    return out


def _hold(
    site: Site, jobs: list[Job], t: float, costs: dict[str, np.ndarray], per: dict[str, np.ndarray]
) -> tuple[np.ndarray, ...]:
    """Who holds which GPU from `t` on; fills costs and traits of each GPU."""
    g = site.g
    jobidx, group = np.full(g, len(jobs)), np.arange(g) + 1_000_000
    for values in costs.values():
        values[:] = 0
    for values in per.values():
        values[:] = 0
    per["weight"][:] = 1
    per["period"][:] = 1000
    for j, job in enumerate(jobs):
        if not job.start <= t + site.dt * 0.001 < job.end:
            continue
        m = job.members
        jobidx[m], group[m] = j, j * 1000 + job.groups
        for c, values in costs.items():
            values[m] = job.costs[c]
        rng = np.random.default_rng(job.seed + 1)
        phase, period = rng.uniform(0, 2 * np.pi, len(m)), rng.uniform(500, 4000, len(m))
        for name, value in (("tensor", job.tensor), ("intensity", job.intensity), ("dram", job.dram), ("memory", job.memory), ("net", job.net), ("weight", job.weights), ("wobble", job.wobble), ("serve", float(job.kind in ("infer", "notebook"))), ("phase", phase), ("period", period)):  # fmt: skip
            per[name][m] = value
    order = np.argsort(group, kind="stable")
    ranked = group[order]
    first = np.flatnonzero(np.concatenate([[True], ranked[1:] != ranked[:-1]]))
    back = np.empty(g, int)
    back[order] = np.cumsum(np.concatenate([[True], ranked[1:] != ranked[:-1]])) - 1
    return jobidx, order, first, back

"""The physics: an RC network per GPU (die, memory, sink) in an air stream, power, clocks, and the step model.

Backward Euler on the linear 3-node network with the power of this sub-step; sub-steps of at most 10 s (the sink's time
constant is 12 to 75 s, the die follows in 2 to 3 s).
"""

from __future__ import annotations

import numpy as np

from drover_simulator.strangers.a.boards import Fleet
from drover_simulator.strangers.a.effects import Effects
from drover_simulator.strangers.a.jobs import Schedule

X = np.linspace(0.0, 1.0, 401)
DYN = X * (0.5 + 0.5 * X) ** 2  # dynamic power over clock: f * V(f)^2, the voltage falls to half at the lowest clock
OUT = (
    "t_die",
    "t_hbm",
    "power",
    "x",
    "xw",
    "w_c",
    "w_m",
    "w_x",
    "w_net",
    "w_wait",
    "w_host",
    "u_busy",
    "proc",
    "pow_lim",
    "th_lim",
    "hw_lim",
    "br_lim",
    "own",
    "tstep",
    "cap_now",
)


class Physics:
    """State of all GPUs, nodes and racks; `block` advances it."""

    def __init__(self, fleet: Fleet, schedule: Schedule, effects: Effects, rng: np.random.Generator) -> None:
        self.f, self.s, self.e, self.rng = fleet, schedule, effects, rng
        g, p = len(fleet.g_node), fleet.p
        self.rack_n = int(fleet.node_rack.max()) + 1
        self.rack_t = np.zeros(self.rack_n)
        self.rack_nom = np.bincount(fleet.node_rack[fleet.g_node], weights=p["tdp"], minlength=self.rack_n) + 1
        self.liquid = p["liquid"] > 0
        self.pre = p["preheat"] / p["tdp"] * fleet.g_rear
        self.room_phase = rng.uniform(0, 6.28)
        rack_liquid = np.zeros(self.rack_n)
        rack_liquid[fleet.node_rack] = p["n_liquid"]
        self.rack_base = np.where(rack_liquid > 0, p["coolant"], p["room"]) + rng.normal(0, 0.7, self.rack_n)
        self.recirc = np.where(rack_liquid > 0, 1.5, p["recirc"])
        self.rack_t = self.rack_base + 0.6 * self.recirc
        self.v = np.full(len(fleet.nodes), 0.6)
        inlet = self.rack_t[fleet.node_rack[fleet.g_node]]
        self.ts_, self.td, self.th = inlet + 12.0, inlet + 18.0, inlet + 16.0
        self.power = p["idle"] * 1.1
        self.hot = np.zeros(g, bool)
        self.ou = rng.normal(0, 1, g)
        self.use = np.zeros(g)
        self.smooth = np.zeros(g)  # inference: slow part of the load
        self.g_rack = fleet.node_rack[fleet.g_node]
        self.last: dict[str, np.ndarray] = {}
        self.watch: list[dict[str, object]] = []  # stragglers: what the job would do without them
        self._jobs()
        for _ in range(60):  # settle before the case begins
            self.block(np.array([0.0]), min(max(fleet.dt, 10.0), 60.0), quiet=True)

    def _jobs(self) -> None:
        jobs, g = self.s.jobs, len(self.f.g_node)
        self.jp = np.array([j.prof for j in jobs] + [(0,) * 6], float)
        self.jinten = np.array([j.inten for j in jobs] + [0.0])
        self.jspin = np.array([j.spin for j in jobs] + [0.0])
        self.jou = np.array([j.ou for j in jobs] + [0.0])
        self.jbub = np.array([j.bubble for j in jobs] + [0.0])
        self.jinfer = np.array([j.kind == "infer" for j in jobs] + [False])
        self.jrate = np.array([j.rate for j in jobs] + [(0, 0)], float)
        self.load = np.ones((len(jobs) + 1, g), np.float32)
        for k, j in enumerate(jobs):
            self.load[k, j.gpus] = j.load
        self.lead = np.tile(np.arange(g), (len(jobs) + 1, 1))  # the GPU whose load a replica follows
        for k, j in enumerate(jobs):
            if j.kind == "infer":
                self.lead[k, j.gpus] = j.gpus[np.arange(len(j.gpus)) // j.replica * j.replica]

    def block(self, ts: np.ndarray, dt: float, quiet: bool = False) -> dict[str, np.ndarray]:
        """Advance over the times `ts`; returns arrays [B, G] of OUT, [B, N] of fans and inlets."""
        f, p, e, rng = self.f, self.f.p, self.e, self.rng
        g, nn, nj = len(f.g_node), len(f.nodes), len(self.s.jobs) + 1
        one, zero = np.ones(g), np.zeros(g)
        tab, owner = self.s.tables(ts), self.s.owner(ts)
        tab = {k: np.concatenate([v, np.zeros((len(ts), 1))], axis=1) for k, v in tab.items()}
        r_sa, r_ds, r_hs = (e.over(k, p[k], ts) for k in ("r_sa", "r_ds", "r_hs"))
        cap, clk, eff = e.over("cap", p["cap"], ts), e.over("clk", p["clk"], ts), e.over("eff", p["eff"], ts)
        hbm, pcie, nvl, nic = (e.over(k, one, ts) for k in ("hbm", "pcie", "nvl", "nic"))
        host, stop, dead, brake = (
            e.over("host", one, ts),
            e.over("stop", zero, ts),
            e.over("dead", zero, ts),
            e.over("brake", one, ts),
        )
        flow, n_in = e.over("flow", np.ones(nn), ts), e.over("inlet", np.zeros(nn), ts)
        r_in = e.over("rack", np.zeros(self.rack_n), ts)
        burst = np.zeros((len(ts), nj))
        for k, job in enumerate(self.s.jobs):
            for b0, b1, amount in job.bursts:
                burst[(ts >= b0) & (ts < b1), k] += amount
        sub = max(1, int(np.ceil(dt / 10)))
        h = dt / sub
        out = {k: np.zeros((len(ts), g)) for k in OUT}
        fan, inlet_out = np.zeros((len(ts), nn)), np.zeros((len(ts), nn))
        noise = rng.normal(0, 1, (len(ts), g, 2))
        shared = rng.normal(0, 1, (len(ts), nj))
        for i, t in enumerate(ts):
            jid = owner[i]
            on = (jid >= 0) & (dead[i] == 0)
            pr = self.jp[jid]
            infer = self.jinfer[jid]
            act = tab["act"][i][jid] * on
            comp = tab["comp"][i][jid]
            # load of experts wanders over minutes; of services over seconds to minutes
            self.ou += (-self.ou * dt / (600 + dt)) + noise[i, :, 0] * np.sqrt(2 * dt / (600 + dt)) * 0.7
            load = self.load[jid, np.arange(g)] * (1 + self.jou[jid] * self.ou)
            k120 = dt / (120 + dt)
            self.smooth += k120 * (-self.smooth) + np.sqrt(k120) * noise[i, :, 1] * 0.8
            want = (
                self.jrate[jid, 0] * (1 + 0.12 * np.sin(t / 3600 * 1.3 + jid))
                + self.jrate[jid, 1] * (0.6 * self.smooth[self.lead[jid, np.arange(g)]] + 0.35 * shared[i][jid])
                + burst[i][jid]
            )
            use = np.where(infer, np.clip(want, 0.0, 1.0), 1.0)
            t_in_rack = self.rack_t
            power_sum = 0.0
            for _ in range(sub):
                # clocks: the lowest of power, heat, and set limits
                static = p["static"] * (1 - p["leak"] + p["leak"] * np.exp((self.td - 40) / 55))
                air = self._air(n_in[i])
                room_for = (p["t_soft"] + 0.5 - self.ts_) / r_ds[i]  # W that the die may give with this sink
                inten = np.maximum(self.jinten[jid], 0.05)
                memw = p["mem_w"] * 0.5
                d_pow = (cap[i] - static - memw) / (p["dyn"] * inten)
                d_th = (room_for - static - 0.2 * memw) / (p["dyn"] * inten)
                x_pow = np.interp(np.clip(d_pow, 0, 1), DYN, X)
                x_th = np.interp(np.clip(0.5 * (d_th + self.last.get("d_th", d_th)), 0, 1), DYN, X)
                self.last["d_th"] = d_th
                self.hot = (self.td > p["t_hw"]) | (self.hot & (self.td > p["t_hw"] - 6))
                top = np.minimum(clk[i], brake[i]) * np.where(self.hot, 0.5, 1.0)
                x = np.maximum(np.minimum(np.minimum(x_pow, x_th), top), 0.15)
                x = np.floor(x * p["fmax"] / p["fstep"] + 0.5) * p["fstep"] / p["fmax"]
                # the step
                jit = 1 + 0.006 * noise[i, :, 1]
                tc = pr[:, 0] * comp * load * jit / (eff[i] * x)
                tm = pr[:, 1] * comp * load / hbm[i]
                tx = pr[:, 2] / nvl[i]
                tp = pr[:, 3] / pcie[i]
                th = pr[:, 4] * host[i] * tab["host"][i][jid]
                own = np.where(on & ~infer, tc + tm + tx + tp + th, 0.0)
                own_i = own / (1 - self.jbub[jid])
                slow = np.zeros(nj)
                np.maximum.at(slow, jid, own_i)
                wire = np.full(nj, 1.0)
                np.maximum.at(wire, jid, np.where(on, 1 / nic[i], 1.0))
                te = self.jp[:, 5] * tab["net"][i] * wire
                t_job = np.maximum(slow + te, 1e-6)
                tj = np.where(infer, np.maximum(tc + tm + tx + tp + th, 1e-6) / np.maximum(use, 1e-3), t_job[jid])
                scale = act / tj
                halted = (stop[i] > 0) & on
                scale = np.where(halted, 0.0, scale)
                w_c, w_m, w_x, w_host = tc * scale, tm * scale, (tx + tp) * scale, th * scale
                w_net = np.where(infer, 0.0, te[jid] * scale)
                w_wait = np.where(
                    infer | ~on,
                    0.0,
                    np.maximum(act - w_c - w_m - w_x - w_host - w_net, 0) + (on - act) * tab["spin"][i][jid],
                )
                w_wait = np.where(halted, 0.0, w_wait)
                gx, gw = np.interp(x, X, DYN), np.interp(np.minimum(top, 1.0), X, DYN)
                dyn = p["dyn"] * (
                    w_c * inten * gx
                    + (0.5 * w_m + 0.3 * w_x) * gx
                    + self.jspin[jid] * (w_wait + w_net) * np.minimum(gw, 1)
                )
                pm = p["mem_w"] * np.minimum(1.0, w_m * 0.95 + w_c * 0.35)
                ctx = np.where(on, 0.25, 0.0) * p["static"]  # a context keeps clocks and memory awake
                pd = np.minimum(static + dyn + ctx, np.maximum(cap[i] - pm, static))
                self._heat(h, pd, pm, air, r_sa[i], r_ds[i], r_hs[i], flow[i])
                self.power = pd + pm
                power_sum = power_sum + self.power
                self._fans(h, flow[i])
                rack_w = np.bincount(self.g_rack, weights=self.power, minlength=self.rack_n) / self.rack_nom
                goal = (
                    self.rack_base + self.recirc * rack_w + r_in[i] + 0.7 * np.sin(t / 14400 * 6.28 + self.room_phase)
                )
                self.rack_t = self.rack_t + (goal - self.rack_t) * (1 - np.exp(-h / 240))
            if quiet:
                continue
            busy = w_c + w_m + w_x + w_wait + w_net
            bound = np.minimum(np.minimum(x_pow, x_th), top)
            work = w_c + w_m
            values = (
                self.td,
                self.th,
                power_sum / sub,
                x,
                np.minimum(top, 1.0),
                w_c,
                w_m,
                w_x,
                w_net,
                w_wait,
                w_host,
                busy,
                on,
                (x_pow <= bound + 1e-3) * (x_pow < 0.995) * work,
                (x_th <= bound + 1e-3) * (x_th < 0.985) * work,
                self.hot,
                brake[i] < 1,
                own_i,
                tj,
                cap[i],
            )
            for name, value in zip(OUT, values, strict=True):
                out[name][i] = value
            fan[i], inlet_out[i] = self.v, t_in_rack[f.node_rack] + p["n_height"] + n_in[i]
            self._watch(t, jid, own_i, te, nic[i], act, slow)
            if i == len(ts) - 1:  # for faults whose size is solved next: the plain step, free of evaluations and stalls
                comp = np.maximum(comp, 0.05)
                tc, tm, th, te = tc / comp, tm / comp, pr[:, 4] * host[i], (self.jp[:, 5] * wire)[jid]
                own = (tc + tm + tx + tp + th) / (1 - self.jbub[jid])
                slow = np.zeros(nj)
                np.maximum.at(slow, jid, np.where(on & ~infer, own, 0.0))
                self.last.update(
                    tc=tc,
                    tm=tm,
                    tx=tx,
                    tp=tp,
                    th_=th,
                    own=own,
                    te=te,
                    slow=slow[jid],
                    x=x,
                    air=air,
                    static=static,
                    inten=inten,
                    tn=slow[jid] + te,
                    spin=self.jspin[jid],
                )
        out["owner"], out["fan"], out["inlet"] = owner, fan, inlet_out
        out["io"], out["incast"] = tab["io"], tab["incast"]
        out["nic"] = nic
        return out

    def _air(self, n_in: np.ndarray) -> np.ndarray:
        """Air (or coolant) at each GPU: the inlet, what the GPU in front gave to it, and the lane."""
        f, p = self.f, self.f.p
        inlet = self.rack_t[f.node_rack] + p["n_height"] + n_in
        return (
            inlet[f.g_node]
            + self.pre * self.power[f.g_front] * 0.8 / np.maximum(self.v[f.g_node], 0.15)
            + p["slot_hot"]
        )

    def _heat(self, h: float, pd, pm, air, r_sa, r_ds, r_hs, flow) -> None:
        """One backward Euler step of the three nodes. Convection goes with flow^0.8 (turbulent duct)."""
        f, p = self.f, self.f.p
        v = np.maximum(self.v[f.g_node], 0.1) / 0.8
        gs = np.where(self.liquid, flow[f.g_node] ** 0.5, v**0.8) / r_sa
        gd, gh, gdh = 1 / r_ds, 1 / r_hs, 1 / p["r_dh"]
        cd, ch, cs = p["c_d"] / h, p["c_h"] / h, p["c_s"] / h
        # die:  (cd+gd+gdh) Td - gdh Th - gd Ts = cd Td0 + pd ;  HBM the same; put both into the sink's row
        a, b = cd + gd + gdh, ch + gh + gdh
        det = a * b - gdh * gdh
        rd, rh = cd * self.td + pd, ch * self.th + pm
        d0, d1 = (rd * b + rh * gdh) / det, (gd * b + gh * gdh) / det  # Td = d0 + d1 Ts
        h0, h1 = (rh * a + rd * gdh) / det, (gh * a + gd * gdh) / det
        top = cs * self.ts_ + gs * air + gd * d0 + gh * h0
        self.ts_ = top / (cs + gs + gd * (1 - d1) + gh * (1 - h1))
        self.td, self.th = d0 + d1 * self.ts_, h0 + h1 * self.ts_

    def _fans(self, h: float, flow: np.ndarray) -> None:
        """Proportional control on the hottest GPU with a lag of 25 s; a failed fan takes its share of the flow away."""
        hot = np.maximum.reduceat(self.td, self.f.first)
        goal = np.clip(0.38 + (hot - 45) * 0.018, 0.35, 1.0) * flow
        self.v = self.v + (goal - self.v) * (1 - np.exp(-h / 25))

    def _watch(self, t: float, jid, own, te, nic, act, slow) -> None:
        for w in self.watch:
            if not w["t0"] <= t < w["t1"]:
                continue
            idx = w["idx"]
            j = int(jid[idx[0]])
            if j < 0 or act[idx[0]] < 0.5 or self.jp[j, 5] < 0:
                continue
            others = jid == j
            others[idx] = False
            if not others.any():
                continue
            free = own[others].max()
            wire = float(max(1.0, (1 / nic[others]).max()))
            base = self.jp[j, 5] * wire
            now = slow[j] + te[j]
            w["with"] += now
            w["free"] += free + (base if w["net"] else te[j])

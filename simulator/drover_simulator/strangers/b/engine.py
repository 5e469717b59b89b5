"""The step of each job at each sample: phases, waits, power, governor, temperatures. Vectors over all GPUs."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from drover_simulator.strangers.b.faults import Plan
from drover_simulator.strangers.b.network import solve

GPU_PARAMS = ("cap", "mem", "hbm", "pcie", "nvl", "nic", "work", "xwork", "slow", "plim", "vrm", "rth", "rhbm", "host", "hostjob", "inlet",
              "stall", "hang", "dead", "spin1", "stuck", "brake", "appclk", "hwslow", "incast")  # fmt: skip
ONES = {"cap", "mem", "hbm", "pcie", "nvl", "nic", "work", "xwork", "slow", "plim", "vrm", "rth", "rhbm"}
NODE_PARAMS = ("cpuload", "fan", "ckpt")
SPIN = 0.16  # share of SMs that NCCL kernels hold while they wait (about 20 of 132)
KEYS = ("power", "pavg", "clk", "mclk", "sm", "tensor", "dram", "util", "mutil", "ptx", "prx", "nvl", "nic", "temp", "mtemp", "thr_p", "thr_t", "thr_h",
        "thr_b", "reasons", "step", "used", "plim", "queue", "incast", "has", "inlet", "bound")  # fmt: skip


class Engine:
    """Runs a plan; `chunks` gives arrays [time, GPU]."""

    def __init__(self, p: Plan) -> None:
        f = self.f = p.f
        self.p = p
        self.rng = np.random.default_rng(f.rng.integers(2**63))
        G = f.G
        self.fc = np.ones(G)  # clock of compute phases over fmax
        self.fth = np.ones(G)  # clamp by heat
        self.inl = np.where(f.liquid, f.coolant, f.room + 3) + f.rack_off[f.rack[f.node]] + f.slot_heat
        self.x1, self.x2, self.xm = np.zeros(G), np.zeros(G), np.zeros(G)
        self.phi = self.rng.random(G) * 100
        self.ar, self.tele = self.rng.standard_normal(G), np.ones(G)
        self.fan_pwm = np.full(f.n, 0.4)
        self.mods = sorted(p.mods, key=lambda m: m.t0)
        self.netcache: dict[Any, Any] = {}
        self.severity: dict[str, list[tuple[float, float]]] = {}
        self.watch = [r for r in p.labels if r["kind"] == "straggler" and "_vic" in r]
        self.edges = np.unique(
            [0.0] + [x for j in f.jobs for x in (j.start, j.end)] + [x for a in p.net for x in a[:2]]
        )
        self.epoch = -2
        self.seed = p.net_seed

    def _bind(self, t: float) -> None:
        """Set the vectors of the jobs that run at t."""
        f, G = self.f, self.f.G
        run = [j for j in f.jobs if j.start <= t < j.end]
        self.w = {k: np.zeros(G) for k in ("F", "B", "N", "X", "P", "H", "O", "bub", "tens", "ov")}
        self.has, self.frac, self.rho0 = np.zeros(G, bool), np.zeros(G), np.ones(G)
        self.demand, self.onoff, self.wait_idle = np.zeros(G, bool), np.zeros(G, bool), np.zeros(G, bool)
        tp, sync = np.arange(G) + 10**9, np.arange(G) + 10**9
        multi = np.zeros(G, bool)
        for k, j in enumerate(run):
            g = j.gpus
            assert j.tp is not None and j.sync is not None
            for a in self.w:
                self.w[a][g] = j.work[a]
            self.has[g], self.frac[g], self.rho0[g] = True, j.frac, j.seed_rho
            tp[g], sync[g] = j.tp + k * 10**5, j.sync + k * 10**5
            self.demand[g] = not j.waits
            self.onoff[g] = j.kind in ("notebook", "mig")
            multi[g] = j.waits
            if j.kind == "mig":
                self.w["tens"][g] *= 0.4
        _, self.tpi = np.unique(tp, return_inverse=True)
        self.tpo = np.argsort(self.tpi, kind="stable")
        self.tps = np.searchsorted(self.tpi[self.tpo], np.arange(self.tpi.max() + 1))
        _, self.syi = np.unique(sync, return_inverse=True)
        self.syo = np.argsort(self.syi, kind="stable")
        self.sys = np.searchsorted(self.syi[self.syo], np.arange(self.syi.max() + 1))
        self.rep = self.syo[self.sys][self.syi]
        faults = tuple((a[2], a[3], a[4]) for a in self.p.net if a[0] <= t < a[1])
        key = (tuple(id(j) for j in run), faults)
        if key not in self.netcache:
            self.netcache[key] = solve(f, run, list(faults), self.seed)
        self.neteff, self.queue = self.netcache[key]
        self.multi = multi
        w = self.w
        self.nominal = (w["F"] ** 4 + w["B"] ** 4) ** 0.25 + w["N"] + w["X"] + w["P"] + w["H"] + w["O"]

    def _maxtp(self, x: np.ndarray) -> np.ndarray:
        return np.maximum.reduceat(x[self.tpo], self.tps)[self.tpi]

    def _maxsync(self, x: np.ndarray) -> np.ndarray:
        return np.maximum.reduceat(x[self.syo], self.sys)[self.syi]

    def _params(self, t: float, dt: float) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        f = self.f
        q = {k: (np.ones if k in ONES else np.zeros)(f.G) for k in GPU_PARAMS}
        nq = {k: (np.ones if k == "fan" else np.zeros)(f.n) for k in NODE_PARAMS}
        for m in self.mods:
            if m.t0 >= t + dt:
                break
            if m.t1 <= t:
                continue
            x = q[m.param] if m.param in q else nq[m.param]
            share = max(0.0, min(t + dt, m.t1) - max(t, m.t0)) / dt
            if m.param in ("hang", "stall"):
                x[m.idx] = np.minimum(1, x[m.idx] + share)
            elif m.how == "share" or m.param in ("dead", "spin1", "stuck", "ckpt"):
                x[m.idx] = np.maximum(x[m.idx], float(share > 0))
            else:
                lv = m.level(t + dt / 2) * (share if m.segs is None else 1.0)
                if lv <= 0:
                    continue
                if m.how == "mul":
                    x[m.idx] *= 1 + (m.val - 1) * lv
                elif m.how == "add":
                    x[m.idx] += m.val * lv
                else:
                    x[m.idx] = m.val
        self.mods = [m for m in self.mods if m.t1 > t]
        return q, nq

    def _window(self, phi0: np.ndarray, phi1: np.ndarray, cum: np.ndarray, frac: np.ndarray) -> np.ndarray:
        """Share of the window [phi0, phi1] (in steps) that each phase takes: [phase, GPU]."""
        a, b = phi0 % 1.0, phi1 % 1.0
        whole = np.floor(phi1) - np.floor(phi0)
        return (whole * frac + np.clip(b - cum, 0, frac) - np.clip(a - cum, 0, frac)) / np.maximum(phi1 - phi0, 1e-9)

    def chunks(self) -> Iterator[tuple[int, dict[str, np.ndarray], dict[str, np.ndarray]]]:
        """Run; give (first sample, GPU arrays, node arrays) by chunks."""
        f = self.f
        size = int(np.clip(400_000 // f.G, 50, f.T))
        for a in range(0, f.T, size):
            n = min(size, f.T - a)
            out = {k: np.zeros((n, f.G), np.float32) for k in KEYS}
            nout = {k: np.zeros((n, f.n), np.float32) for k in ("cpu", "fanr", "ckpt", "load", "inletn")}
            for i in range(n):
                self._step((a + i) * f.dt, out, nout, i)
            yield a, out, nout

    def _step(self, t: float, out: dict[str, np.ndarray], nout: dict[str, np.ndarray], i: int) -> None:
        f, rng, dt, b = self.f, self.rng, self.f.dt, self.f.b
        e = int(np.searchsorted(self.edges, t, side="right"))
        if e != self.epoch:
            self.epoch = e
            self._bind(t)
        q, nq = self._params(t, dt)
        w, has = self.w, self.has
        G = f.G
        # step
        noise = 1 + 0.006 * rng.standard_normal((2, G))
        self.ar += -self.ar * min(1, dt / 240) + np.sqrt(min(1, 2 * dt / 240)) * rng.standard_normal(G)
        r = np.maximum(self.fc, 0.05) * f.unit
        F = w["F"] * q["work"] / r * noise[0]
        B = w["B"] * q["work"] / (q["mem"] * q["hbm"])
        N = w["N"] * q["work"] / q["nvl"]
        comp = np.sqrt(np.sqrt(F**4 + B**4)) * q["slow"]
        own = comp + N
        fb = self._maxtp(own)
        load = w["P"] * q["work"] / q["pcie"] + w["H"] + q["host"] * self.nominal
        opt = w["O"] / (q["mem"] * q["hbm"]) * q["slow"]
        A = self._maxsync(load + fb + opt)
        nicq = q["nic"] * self.neteff
        x = w["X"] * q["xwork"] / nicq
        x = x + np.maximum(0, w["ov"] * x - 0.66 * fb)
        X = self._maxsync(x)
        now = [row for row in self.watch if row["start"] <= t < row["end"]]
        if now:
            every = np.unique(np.concatenate([row["_vic"] for row in now]))
            mine = load + own + opt
            for row in now:
                g, v = row["_jobgpus"], row["_vic"]
                o = g[~np.isin(g, every)]
                if len(o) and has[v[0]] and q["hang"][v[0]] == 0:
                    base, bx = float(mine[o].max()), float(x[o].max())
                    tot = max(base, float(mine[v].max())) + max(bx, float(x[v].max()))
                    self.severity.setdefault(row["id"], []).append((t, max(0.0, 1 - (base + bx) / max(tot, 1e-9))))
        A = A * (1 + 0.01 * self.ar[self.rep] * 0.5 + 0.004 * noise[1][self.rep] - 0.004) + q["hostjob"] * self.nominal
        S = A * (1 + w["bub"]) + X
        # services and notebooks: as much as is asked for
        if self.demand.any():
            tod = 1 + 0.12 * np.sin(2 * np.pi * t / 86400 + f.day[1])
            rho = np.clip(self.rho0 * tod * np.exp(0.22 * self.ar[self.rep]), 0.03, 1.0)
            flip = rng.random(G) < dt / np.where(self.tele > 0, 500.0, 350.0)
            self.tele = np.where(flip, 1 - self.tele, self.tele)
            rho = np.where(self.onoff, np.where(self.tele[self.rep] > 0, np.minimum(1, rho + 0.3), 0.01), rho)
            S = np.where(self.demand, np.maximum(S, self.nominal / rho), S)
        S = np.where(has, np.maximum(S, 1e-3), 1.0)
        lens = np.stack([load, fb / 3, fb * 2 / 3, np.zeros(G), X, opt])
        lens[:, ~has] = 0
        lens[3] = np.maximum(0, S - lens.sum(0))
        frac = lens / lens.sum(0)
        cum = np.cumsum(frac, 0) - frac
        halt = np.minimum(1, q["stall"] + q["hang"])
        adv = np.maximum(dt * (1 - halt) / S, 1e-6)
        phi0 = self.phi
        phi1 = phi0 + adv
        full = self._window(phi0, phi1, cum, frac)
        wi = min(dt, f.pw_window)
        phi2 = phi1 - np.minimum(adv, np.maximum(wi * (1 - halt) / S, 1e-6))
        inst = self._window(phi2, phi1, cum, frac)
        self.phi = phi1 - np.floor(phi1 / 1e4) * 1e4
        self.phi = self.phi[self.rep] % 1e4
        both = np.stack([full, inst], 1) * (1 - halt)  # phase, window, GPU
        both[3] += halt
        f0, f1, f2, f3, f4, f5 = both
        fbs = f1 + f2
        idlew = (self.demand | ~has | (q["dead"] > 0)).astype(float)
        spin = np.where(q["spin1"] > 0, 1.0, 1 - idlew)
        fbl = np.maximum(fb, 1e-9)
        tens_peak = w["tens"] * F / np.maximum(comp, 1e-9)
        tensor = fbs * w["tens"] * F / fbl
        dram = (
            fbs * (0.92 * w["B"] * q["work"] / (q["mem"])) / fbl + f5 * 0.85 * q["hbm"] + 0.03 * f4 + f3 * spin * 0.004
        )
        smk = np.where(self.onoff, 0.55, 0.94)
        sm = fbs * (smk * comp / fbl + SPIN * (fbl - comp) / fbl) + f3 * spin * SPIN + f4 * SPIN * 1.1 + f5 * 0.9
        sm = sm + q["stuck"] * f3 * 0.6
        lowload = (load > 0) * 0.9
        util = np.clip(fbs + f3 * spin + f4 + f5 + f0 * (1 - lowload), 0, 1)
        mutil = np.clip(dram * 0.95, 0, 1)
        nvl = (fbs * w["N"] * q["work"] * 0.8 * b["nvl_bw"] / fbl)[0]
        pb = np.where(load > 0, w["P"] * q["work"] / np.maximum(load, 1e-9), 0) * 0.8 * b["pcie_bw"]
        portshare = f.port_bw[f.gport] / np.bincount(f.gport)[f.gport]
        nicb = w["X"] * q["xwork"] * portshare * 0.85
        nic = (f4 * nicb / np.maximum(X, 1e-9) + fbs * w["ov"] * nicb / fbl)[0]
        nic = np.where(self.multi, nic, nic * 0.1)
        # power of phases and governor
        tdp = b["tdp"]
        thr = {k: np.zeros(G) for k in "pthb"}
        cap = q["cap"]
        lim = tdp * q["plim"] * q["vrm"]
        sub = int(min(6, max(1, np.ceil(dt / 5))))
        h = dt / sub
        act = np.where(has, 0.1, 0.02) * np.where(has & (q["dead"] > 0), 0.7, 1)
        stat0 = b["idle"] * 0.9
        e1, e2, em = (
            1 - np.exp(-h / np.where(f.liquid, 5.0, 9.0)),
            1 - np.exp(-h / np.where(f.liquid, 60.0, 150.0)),
            1 - np.exp(-h / 25.0),
        )
        room = f.day[0] * np.sin(2 * np.pi * t / 86400 + f.day[1]) + f.crac[1] * np.sin(
            2 * np.pi * t / f.crac[0] + f.crac[2]
        )
        kc = np.where(has, 1.0, 0.12)
        pavg = np.zeros(G)
        temp = self.inl
        for _ in range(sub):
            fo = np.minimum(cap, self.fth)
            v2 = lambda y: y * (0.5 + 0.5 * y) ** 2
            leak = stat0 * (1 + 0.004 * (temp - 45))
            hp = 0.13 * tdp * np.where(f.hbm, 1.0, 0.7)
            dynp = tdp * f.cd * (act + 0.13 * smk + 1.1 * tens_peak)
            hbmp = hp * np.minimum(1, 0.92 * w["B"] / np.maximum(comp, 1e-9)) + 0.05 * tdp * (w["N"] > 0)
            pc = leak + dynp * v2(self.fc) + hbmp
            over = pc > lim
            ratio = np.clip((lim - leak - hbmp) / np.maximum(dynp * v2(self.fc), 1e-3), 0.2, 3.0)
            want = self.fc * ratio**0.42
            goal = np.where(over, want, np.where(pc < 0.965 * lim, np.maximum(self.fc, want * 0.985), self.fc))
            goal = np.minimum(goal, fo)
            self.fc = np.clip(self.fc + (goal - self.fc) * min(1.0, 0.5 + h / 6), 0.15, 1.0)
            pcap = has & (self.fc < fo - 0.012)
            fcn = self.fc
            vc, vo = v2(fcn), v2(np.where(has, fo, 0.15))
            pw = leak + tdp * f.cd * (
                fbs * (act * vc + 0.13 * smk * comp / fbl * vc)
                + 1.1 * tensor * vc
                + (1 - fbs) * act * vo * kc
                + 0.13 * SPIN * (f3 * spin + f4) * vo
                + 0.11 * f5 * vo
            )
            pw = (
                pw
                + q["stuck"] * f3 * 0.1 * tdp
                + hp * dram
                + 0.05 * tdp * np.where(b["nvl_bw"] > 0, nvl / np.maximum(b["nvl_bw"], 1), 0)
            )
            pa = pw[0]
            pavg += pa / sub
            rth = f.R * q["rth"]
            if not f.liquid.all():
                nf = self.fan_pwm[f.node] * np.where(nq["fan"] < 1, 0.8 + 0.2 * nq["fan"], 1)[f.node]
                rth = np.where(f.liquid, rth, rth * (1.25 - 0.4 * nf))
            self.x1 += (pa * rth * 0.35 - self.x1) * e1
            self.x2 += (pa * rth * 0.65 - self.x2) * e2
            self.xm += (
                (hp * dram[0] + 0.02 * tdp) * q["rhbm"] * 0.28 * 700 / tdp * np.where(f.liquid, 0.7, 1) * 0.5
                + (q["rhbm"] - 1) * 15 * (pa / tdp)
                - self.xm
            ) * em
            air = self.inl + room * np.where(f.liquid, 0.4, 1.0) + q["inlet"]
            temp = air + self.x1 + self.x2
            mtemp = air + 0.93 * (self.x1 + self.x2) + self.xm + 4
            hot = np.maximum(temp - b["t_sw"], np.where(f.hbm, mtemp - b["tm_sw"], -50))
            self.fth = np.where(
                hot > 0,
                self.fth - np.minimum(0.06, 0.006 * hot + 0.003) * min(h, 4),
                np.where(hot < -1.5, self.fth + 0.006 * h, self.fth),
            )
            vhot = temp > b["t_hw"]
            self.fth = np.clip(np.where(vhot, np.minimum(self.fth, 0.55), self.fth), 0.3, 1.0)
            busy = fbs[0]
            thr["p"] += np.where(pcap, busy, 0) * h
            thr["t"] += np.where(self.fth < 0.995, 1, 0) * h * has
            thr["h"] += np.where(vhot, 1, 0) * h
            thr["b"] += np.where(q["brake"] > 0, 1, 0) * h
        nodeload = np.zeros(f.n)
        np.maximum.at(nodeload, f.node, temp)
        aim = np.clip((nodeload - 40) / 45, 0.25, 1)
        self.fan_pwm += (aim - self.fan_pwm) * min(1, dt / 30)
        # what the sensors of clocks see
        fo = np.minimum(cap, self.fth)
        clk = b["fmax"] * np.where(
            fbs[1] + 0.5 * f5[1] > 0.5,
            self.fc,
            np.minimum(fo, np.where(fbs[1] > 0.05, fbs[1] * self.fc + (1 - fbs[1]) * fo, fo)),
        )
        clk = np.where(has, clk, b["fidle"])
        lowp = ~has & ~f.hbm
        reasons = np.where(has, 0, 1)
        reasons = (
            reasons
            | np.where(pcap & (fbs[1] > 0.05), 4, 0)
            | np.where((self.fth < 0.995) & has, 0x20, 0)
            | np.where(vhot, 0x48, 0)
        )
        reasons = (
            reasons
            | np.where(q["brake"] > 0, 0x88, 0)
            | np.where(q["appclk"] > 0, 2, 0)
            | np.where(q["hwslow"] > 0, 8, 0)
        )
        o = out
        o["power"][i], o["pavg"][i], o["clk"][i] = pw[1], pavg, clk
        o["mclk"][i] = np.where(lowp, b["mclk_idle"], b["mclk"] * q["mem"])
        o["sm"][i], o["tensor"][i], o["dram"][i], o["util"][i], o["mutil"][i] = (
            sm[0],
            tensor[0],
            dram[0],
            util[1],
            mutil[1],
        )
        rx = (f0 * pb)[0]
        o["prx"][i], o["ptx"][i], o["nvl"][i], o["nic"][i] = rx + nic, rx * 0.12 + nic, nvl, nic
        o["temp"][i], o["mtemp"][i] = temp, mtemp
        o["thr_p"][i], o["thr_t"][i], o["thr_h"][i], o["thr_b"][i] = thr["p"], thr["t"], thr["h"], thr["b"]
        o["reasons"][i], o["step"][i], o["has"][i] = reasons, S, has
        o["used"][i] = np.where(has, self.frac, 0)
        o["plim"][i] = tdp * q["plim"]
        o["queue"][i] = np.maximum(self.queue[f.gport], np.where(q["nic"] < 0.7, 0.5 * (1 - q["nic"]), 0)) * (
            f4[0] + 0.3 * f2[0]
        )
        o["incast"][i] = q["incast"] + 0.015 * f4[0]
        o["inlet"][i] = air - f.slot_heat
        cpu = np.zeros(f.n)
        np.add.at(cpu, f.node, np.where(has, 0.25 + 0.6 * np.minimum(1, f0[0] * 4), 0.02) / f.ng[f.node] * 0.3)
        nout["cpu"][i] = np.clip(cpu + nq["cpuload"] + 0.02, 0, 0.99)
        nout["fanr"][i] = self.fan_pwm * np.where(nq["fan"] < 1, nq["fan"], 1)
        nout["ckpt"][i] = nq["ckpt"]
        nout["inletn"][i] = o["inlet"][i][f.g0[:-1]]

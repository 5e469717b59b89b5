"""The physics of a fleet, step by step with arrays over GPUs, and the rows that its instruments make of it.

Heat: a Foster network of three stages a GPU (die, sink or cold plate, chassis), solved exactly over a step at constant
power. Power: base + leakage exp(0.02 (T - 60)) (doubles in 35 K, as measured on 7 and 4 nm) + activity * V(f)^2 f.
Clock: the highest step of the table that keeps the cap, less what software slowdown takes off above its threshold.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from drover_simulator.strangers.c.boards import Fleet
from drover_simulator.strangers.c.jobs import (
    CKPT,
    HANG,
    NONE,
    PH_ACT,
    PH_COMM,
    PH_CPU,
    PH_UTIL,
    STALL,
    SYNC,
    TRAIN,
    WARM,
    Plan,
    Service,
)

GRID = np.linspace(0.08, 1, 185)
VOLT = np.maximum(0.74, 0.74 + 0.26 * (GRID - 0.6) / 0.4)
CUBE = GRID * VOLT**2
GPU_COUNTERS = [
    "throttle_power_us",
    "throttle_thermal_sw_us",
    "throttle_thermal_hw_us",
    "throttle_brake_us",
    "throttle_sync_us",
    "energy_j",
    "pcie_replays",
    "nvlink_crc_errors",
    "nvlink_replays",
    "nvlink_recoveries",
    "ecc_sram_corrected",
    "ecc_sram_uncorrected",
    "ecc_dram_corrected",
    "ecc_dram_uncorrected",
    "remapped_rows_corrected",
    "remapped_rows_uncorrected",
]
KEPT = {"remapped_rows_corrected", "remapped_rows_uncorrected"}  # in the InfoROM: no reset
LINK_COUNTERS = [
    "rx_bytes",
    "tx_bytes",
    "symbol_errors",
    "link_downed",
    "link_error_recoveries",
    "rx_errors",
    "tx_discards",
    "tx_wait",
    "local_integrity_errors",
    "buffer_overruns",
    "out_of_sequence",
    "packet_sequence_errors",
    "rnr_nak_retries",
    "ack_timeouts",
    "cnp_sent",
    "cnp_handled",
]
NODE_COUNTERS = [
    "pcie_aer_correctable",
    "pcie_aer_fatal",
    "edac_corrected",
    "edac_uncorrected",
    "oom_kills",
    "agent_read_failures",
    "agent_missed_ticks",
]


class World:
    """State of all units. Faults write into the `m_` arrays (reset each step), the counters and the states."""

    def __init__(self, rng: np.random.Generator, f: Fleet, plan: Plan) -> None:
        self.rng, self.f, self.plan = rng, f, plan
        G, N, L = f.G, f.N, len(f.lnode)
        self.h = plan.h
        b = [f.boards[n] for n in f.gnode]
        get = lambda a: np.array([float(getattr(x, a)) for x in b])
        self.tdp, self.fmax, self.fidle, self.fmem = get("tdp"), get("fmax"), get("fidle"), get("fmem")
        self.liquid = get("liquid") > 0
        self.slow_c, self.hot_c = get("slow_c"), get("hot_c")
        self.nlinks, self.gen, self.width = get("links"), get("gen"), get("width")
        self.nv_bps = get("nv_gbs") * 1e9
        self.fb_total = get("mem_gib") * 2**30 - np.where(get("hbm") > 0, 0.45, 0.0) * 2**30
        self.ecc = np.ones(G, bool)
        self.step_mhz = get("clock_step")
        # units: power, leakage, resistance, speed (SC'22 "Not all GPUs are created equal": 8 % of performance between
        # healthy GPUs under a cap, outliers 22 %; temperature spreads of 10 K and more)
        self.ctx = get("ctx")
        leak60 = 0.11 * self.tdp * rng.lognormal(0, 0.18, G)
        self.leak60 = leak60
        self.base = np.maximum(4, get("idle") * rng.lognormal(0, 0.03, G) - leak60 * np.exp(-0.02 * 25))
        self.pmem = 0.17 * self.tdp
        self.pdyn = (1.55 * self.tdp - get("idle") - self.ctx - 0.11 * self.tdp - self.pmem) * rng.normal(1, 0.045, G)
        slot_r = {n: rng.uniform(0, 0.10) for n in sorted({x.name for x in b})}
        back = np.array([s >= x.gpus / 2 for s, x in zip(f.slot, b, strict=True)])  # downstream in the air
        odd = rng.random() < 0.3
        back = back ^ (odd & (f.slot % 2 == 1))
        self.R = get("resistance") * rng.lognormal(0, 0.05, G) * (1 + back * np.array([slot_r[x.name] for x in b]))
        self.Rm = np.where(self.liquid, 0.35, 0.55) * rng.lognormal(0, 0.08, G) * 14 / self.pmem  # HBM over the die
        self.preheat = np.where(
            self.liquid, np.where(back, 0.25, 0.05), np.where(back, rng.uniform(0.5, 1.3), 0.1)
        )  # K a kW
        self.share = np.where(self.liquid[:, None], [[0.42, 0.43, 0.15]], [[0.24, 0.46, 0.30]])
        tau = np.where(self.liquid[:, None], [[0.8, 7.0, 55.0]], [[1.5, 22.0, 170.0]]) * rng.lognormal(0, 0.08, (G, 1))
        self.keep = np.exp(-self.h / tau)
        self.keep_mem = np.exp(-self.h / 18.0)
        self.speed = rng.normal(1, 0.008, G)
        self.limit = self.tdp.copy()  # set limits
        self.clk = self.fmax.copy()  # set clock limits
        # air and coolant
        P = int(f.pool.max()) + 1
        liquid_pool = np.array([f.boards[int(np.flatnonzero(f.pool == p)[0])].liquid for p in range(P)])
        self.set_c = np.where(liquid_pool, rng.uniform(26, 36, P), rng.uniform(19, 27, P))
        self.supply = self.set_c.copy()
        self.wander = np.zeros(P)
        self.set_steps = [
            (rng.uniform(60, plan.length), p, rng.normal(0, 0.9))
            for p in range(P)
            for _ in range(rng.poisson(plan.length / 9000))
        ]
        self.rack_off = rng.normal(0, 0.6, len(f.racks)) + rng.uniform(0, 2.2, len(f.racks))
        self.recirc = rng.uniform(0.5, 2.5, len(f.racks))
        self.node_off = rng.normal(0, 0.35, N)
        self.node_nominal = np.array([x.tdp * x.gpus for x in f.boards])
        self.fan = np.full(N, 0.5)
        self.fan_max = np.array(
            [0 if x.liquid else rng.uniform(0.97, 1.03) * (9800 if "L4" in x.name else 15500) for x in f.boards]
        )
        self.liquid_node = np.array([x.liquid for x in f.boards])
        self.mem_total = (
            np.array(
                [
                    {"A100-SXM4-80GB": 1024}.get(x.name[7:], 512 if "L4" in x.name else 960 if x.liquid else 2048)
                    for x in f.boards
                ]
            )
            * 2.0**30
            * 0.984
        )
        self.root = rng.uniform(0.15, 0.75, N)
        # state
        self.theta = np.zeros((G, 3))
        self.T = np.full(G, 35.0)
        self.Tm = np.full(G, 38.0)
        self.P = get("idle")
        self.x = np.full(G, 0.95)
        self.slowdown = np.zeros(G)
        self.fb = np.zeros(G)
        self.load1 = np.ones(N)
        self.cnt = {c: np.zeros(G) for c in GPU_COUNTERS}
        up = rng.uniform(3, 90, N)[f.gnode] * 86400
        for c in GPU_COUNTERS[:5]:
            self.cnt[c] = up * 1e6 * rng.beta(0.4, 6, G) * (1 if "power" in c else 0.002)
        self.cnt["throttle_brake_us"][:] = 0
        self.cnt["throttle_sync_us"][:] = 0
        self.cnt["energy_j"] = up * self.tdp * rng.uniform(0.4, 0.7, G)
        self.cnt["pcie_replays"] = rng.poisson(rng.gamma(0.2, 20, G)).astype(float)
        self.cnt["nvlink_crc_errors"] = rng.poisson(rng.gamma(0.1, 30, G)).astype(float) * (self.nlinks > 0)
        self.cnt["nvlink_replays"] = self.cnt["nvlink_crc_errors"] // 3
        self.cnt["ecc_dram_corrected"] = rng.poisson(rng.gamma(0.08, 60, G)).astype(float)
        self.cnt["ecc_sram_corrected"] = rng.poisson(0.05, G).astype(float)
        self.cnt["remapped_rows_corrected"] = rng.poisson(0.05, G).astype(float)
        self.cnt["remapped_rows_uncorrected"] = rng.poisson(0.03, G).astype(float)
        self.lc = {c: np.zeros(L) for c in LINK_COUNTERS}
        for c in ("rx_bytes", "tx_bytes"):
            self.lc[c] = rng.uniform(1e13, 4e16, L)
        self.lc["symbol_errors"] = rng.poisson(rng.gamma(0.1, 30, L)).astype(float)
        self.lc["link_downed"] = rng.poisson(0.6, L).astype(float)
        self.lc["tx_wait"] = rng.uniform(0, 1e12, L)
        for c in ("out_of_sequence", "packet_sequence_errors", "rnr_nak_retries"):
            self.lc[c] = rng.poisson(rng.gamma(0.3, 200, L)).astype(float)
        self.lc["cnp_sent"], self.lc["cnp_handled"] = rng.uniform(0, 1e7, L) * f.roce, rng.uniform(0, 1e7, L) * f.roce
        self.nc = {c: np.zeros(N) for c in NODE_COUNTERS}
        self.nc["pcie_aer_correctable"] = rng.poisson(rng.gamma(0.3, 30, N)).astype(float)
        self.nc["edac_corrected"] = rng.poisson(rng.gamma(0.1, 30, N)).astype(float)
        self.lgbps = np.array([f.boards[n].nic_gbps for n in f.lnode], float)
        # the background of healthy units, per hour: most have none, few have some (Schroeder; Tiwari; Meta's reports)
        self.bg_ecc = rng.gamma(0.06, 4, G)
        self.bg_replay = rng.gamma(0.06, 5, G)
        self.bg_crc = rng.gamma(0.05, 6, G) * (self.nlinks > 0)
        self.bg_sym = rng.gamma(0.08, 6, L)
        self.bg_oos = rng.gamma(0.4, 40, L)
        self.bg_aer = rng.gamma(0.1, 6, N)
        self.banks_lost = self.cnt["remapped_rows_corrected"] + self.cnt["remapped_rows_uncorrected"]
        self.fabric = np.where(self.nlinks > 0, 3.0, 0.0)
        self.ber = 10 ** rng.uniform(-16, -14, G)
        self.offset = rng.normal(0, 0.02, N) + np.where(rng.random(N) < 0.06, rng.normal(0, 1.0, N), 0)
        self.restarts = [
            (rng.uniform(60, plan.length), n, rng.uniform(8, 60))
            for n in range(N)
            for _ in range(rng.poisson(plan.length / 3600 * 0.04))
        ]
        # what a kernel log holds anyway: corrected bus errors, killed notebooks, slow storage
        self.log: list[tuple[float, int, str, str]] = []
        lines = [
            ("aer", "pcieport 0000:16:01.0: AER: Corrected error received: 0000:17:00.0"),
            ("oom", "Out of memory: Killed process 81733 (python3) total-vm:918273644kB, anon-rss:503316480kB"),
            ("edac", "EDAC MC3: 1 CE memory read error on CPU_SrcID#1_MC#1_Chan#0_DIMM#0"),
            ("hung_task", "INFO: task kworker/u448:3:9913 blocked for more than 122 seconds."),
            ("cpu_throttle", "CPU44: Package temperature above threshold, cpu clock throttled"),
        ]
        for _ in range(rng.poisson(N * plan.length / 3600 * 0.03)):
            code, text = lines[int(rng.choice(5, p=[0.35, 0.25, 0.25, 0.1, 0.05]))]
            self.log.append((float(rng.uniform(0, plan.length)), int(rng.integers(N)), code, text))
        # jobs
        self.jobs = plan.jobs
        J = len(self.jobs)
        self.phase = np.zeros((J + 1, plan.K + 1), np.uint8)
        self.jid = np.full(G, J)
        self.wgt = np.ones(G)
        self.changes: dict[int, list[tuple[np.ndarray, int]]] = {}
        col = lambda a, none=0.0: np.array([float(getattr(j, a)) for j in self.jobs] + [none])
        self.jp = {
            a: col(a)
            for a in (
                "c",
                "m",
                "h",
                "p",
                "inter",
                "intra",
                "act",
                "tensor",
                "dense",
                "fb",
                "spin",
                "noise",
                "net",
                "stall",
                "wander",
            )
        }
        self.sync = np.array([j.kind in SYNC and len(j.gpus) > 1 for j in self.jobs] + [False])
        self.spans = np.array([len(j.nodes(f)) > 1 for j in self.jobs] + [False])
        self.services: list[tuple[int, Service]] = []
        for i, j in enumerate(self.jobs):
            if j.kind == "service":
                self.services.append((i, Service(rng, j, plan.length)))
        self.load_jobs()
        self.fb_rank = rng.normal(1, 0.015, G)
        self.experts = np.zeros(G)
        self.mood = np.zeros(J + 1)
        self.pg: dict[str, np.ndarray] = {}  # the jobs' numbers, by GPU
        # a busy share is not a load: a server with few requests runs kernels nearly all the time
        self.serve = np.array([j.kind == "service" for j in self.jobs] + [False])
        self.swing = np.array([rng.uniform(0.3, 1.6) for _ in self.jobs] + [1.0])  # long steps swing more
        self.held_rows: dict[str, list[Any]] = {}
        self.loss = float(rng.choice([0, 0.0005, 0.004, 0.02]))
        self.blank = float(rng.choice([0, 0, 0.0005, 0.004]))  # values that could not be read
        self.late = float(rng.choice([0, 0.001, 0.01]))
        self.cpu_job = np.append(rng.lognormal(0, 0.55, J), 1.0)  # loaders: 4 to 30 % of a node's cores
        self.cpu_node = rng.lognormal(np.log(0.012), 0.4, N)
        self.cpu_mood = np.zeros(N)
        self.shape = rng.uniform(0, 1, (3, J + 1))  # other pipes: fp16, fp32, fp64 shares

    def load_jobs(self) -> None:
        """Read the plan's jobs (after faults changed it): phases and who has which GPU when."""
        for i, j in enumerate(self.jobs):
            self.phase[i, : self.plan.K] = j.phase
            if j.kind == "service":
                a, b = self.plan.step(max(0, j.start)), self.plan.step(min(j.end, self.plan.length))
                self.phase[i, a:b] = TRAIN
            on = np.flatnonzero(self.phase[i])
            if len(on):
                self.changes.setdefault(int(on[0]), []).append((j.gpus, i))
                self.changes.setdefault(int(on[-1]) + 1, []).append((j.gpus, -1 - i))

    def reset(self, gpus: np.ndarray) -> None:
        """A driver reload: volatile counters begin at 0."""
        for c, v in self.cnt.items():
            if c not in KEPT:
                v[gpus] = 0

    def clear(self) -> None:
        G, N, L = self.f.G, self.f.N, len(self.f.lnode)
        one = np.ones
        self.m_R, self.m_mem, self.m_speed, self.m_hbm, self.m_pcie = one(G), np.zeros(G), one(G), one(G), one(G)
        self.m_clk, self.m_cap, self.m_brake = np.full(G, 1e9), np.full(G, 1e9), np.zeros(G)
        self.m_nv, self.m_link, self.m_wait = one(G), one(L), np.zeros(L)
        self.m_host, self.m_cpu, self.m_air, self.m_inlet, self.m_shift = (
            np.zeros(N),
            np.zeros(N),
            one(N),
            np.zeros(N),
            np.zeros(N),
        )
        self.m_storage = np.zeros(N)
        self.fan_bad = np.zeros(N)
        self.stuck, self.stopped, self.hung = np.zeros(G, bool), np.zeros(G, bool), np.zeros(len(self.jobs) + 1, bool)
        self.gone, self.dark, self.drop = np.zeros(G, bool), np.zeros(N, bool), np.zeros(G)
        self.hung_driver = np.zeros(N, bool)
        # states: what is not set by a fault is well
        self.up, self.rate_now = one(L), self.lgbps.copy()
        self.active_links, self.st_gen, self.st_width = self.nlinks.copy(), self.gen.copy(), self.width.copy()
        self.pending, self.failed, self.sram_bad, self.action, self.banks_none = (np.zeros(G) for _ in range(5))
        self.ber_now = self.ber.copy()

    def step(self, k: int, faults: list[Any]) -> None:
        f, rng, h = self.f, self.rng, self.h
        t = (k + 1) * h
        self.t = t
        for gpus, i in sorted(self.changes.get(k, []), key=lambda c: c[1]):  # ends first
            if i < 0:
                self.jid[gpus] = np.where(self.jid[gpus] == -1 - i, len(self.jobs), self.jid[gpus])
            else:
                self.jid[gpus] = i
                self.wgt[gpus] = self.jobs[i].weight
        self.clear()
        for x in faults:
            if x.begin <= t and (x.end is None or t < x.end):
                x.apply(self, t, h)
        for s, n, d in self.restarts:
            if s <= t < s + d:
                self.dark[n] = True
        for s, n, code, _ in self.log:
            if t - h < s <= t and code in ("aer", "oom", "edac"):
                self.nc[{"aer": "pcie_aer_correctable", "oom": "oom_kills", "edac": "edac_corrected"}[code]][n] += 1
        J = len(self.jobs)
        jid, jp, node = self.jid, self.jp, f.gnode
        if k in self.changes or not self.pg:
            self.pg = {a: v[jid] for a, v in jp.items()}
        pg = self.pg
        ph = self.phase[:, k]
        hang = self.hung & (ph != NONE)
        ph = np.where(hang, HANG, ph)
        act_j = np.where(ph == STALL, jp["stall"], PH_ACT[ph])
        A = act_j[jid]
        rho, loaded = np.ones(f.G), np.ones(f.G)
        for i, s in self.services:
            if ph[i] != NONE:
                rho[s.job.gpus], loaded[s.job.gpus] = s.tick(t, h)
        A = A * rho
        # a step of each rank, in units of the job's free step
        self.experts += -self.experts * h / 240 + pg["wander"] * np.sqrt(2 * h / 240) * rng.standard_normal(f.G)
        w = self.wgt * np.exp(self.experts * (pg["wander"] > 0)) * (1 + pg["noise"] * rng.standard_normal(f.G))
        xs = np.maximum(self.x, 0.08)
        c, m = pg["c"], pg["m"]
        tc = w * c / (xs * self.speed * self.m_speed)
        tm = w * m / self.m_hbm
        th = pg["h"] + self.m_host[node] + pg["p"] / self.m_pcie
        tr = tc + tm + th
        slow_net = np.where(f.glink >= 0, 1 / np.maximum(self.m_link, 0.02)[f.glink], 1.0)
        comm_scale = PH_COMM[ph]
        worst, net, nv = np.zeros(J + 1), np.ones(J + 1), np.ones(J + 1)
        np.maximum.at(worst, jid, tr)
        np.maximum.at(net, jid, slow_net)
        np.maximum.at(nv, jid, 1 / self.m_nv)
        comm_j = (jp["inter"] * net + jp["intra"] * nv) * comm_scale
        step = np.where(self.sync[jid], worst[jid] + comm_j[jid], tr)
        step = np.maximum(step, 1e-3)
        for x in faults:
            if x.watch is not None and x.start <= t and (x.end is None or t < x.end):
                x.observe(self, k, tr, xs, w, comm_j, worst)
        fc, fm = tc / step, tm / step
        fx = np.where(self.sync, comm_j, 0)[jid] / step
        fw = np.where(self.sync[jid], 1 - fc - fm - th / step - fx, 0)
        spin = pg["spin"]
        here = jid < J
        hung = hang[jid]
        self.mood += -self.mood * h / 90 + np.sqrt(2 * h / 90) * rng.standard_normal(
            J + 1
        )  # sequences of other lengths
        act = (
            A
            * (
                pg["act"] * fc * (0.5 + 0.5 * self.m_speed) * (1 + 0.018 * self.mood[jid])
                + 0.35 * fm
                + 0.16 * (fx + fw * spin)
            )
            * loaded
        )
        act = np.where(hung & ~self.stopped, 0.15, np.where(self.stopped, self.stuck * 0.03, act))
        dram = A * (0.82 * fm * self.m_hbm + 0.22 * fc + 0.12 * fx)
        dram = np.where(hung, 0.01, dram)
        util = np.where(hung, 1.0, A * (fc + fm + fx + fw * spin) + (1 - A) * PH_UTIL[ph][jid] * (loaded > 0))
        util = np.where(self.serve[jid], np.minimum(1, util * 1.6), util)
        util = np.where(self.stopped, self.stuck * 1.0, util)
        sm = A * (pg["dense"] * (fc + 0.9 * fm) + 0.16 * (fx + fw * spin))
        sm = np.where(hung & ~self.stopped, 0.15, np.where(self.stopped, self.stuck * 0.04, sm))
        tensor = np.where(hung, 0, A * pg["tensor"] * (fc * self.m_speed))
        rate = A / step  # steps a free step's time
        # air and coolant
        self.wander += -self.wander * h / 1800 + 0.6 * np.sqrt(2 * h / 1800) * rng.standard_normal(len(self.wander))
        for s, p, d in self.set_steps:
            if s <= t < s + h:
                self.set_c[p] += d
        self.supply += (self.set_c - self.supply) * (1 - np.exp(-h / 480))
        Pn = np.bincount(node, self.P, f.N)
        rack_load = np.bincount(f.rack, Pn, len(f.racks)) / np.bincount(f.rack, self.node_nominal, len(f.racks))
        liquid_n = self.liquid_node
        inlet = (
            (self.supply + self.wander)[f.pool]
            + np.where(liquid_n, 0.4, 1) * (self.rack_off + self.recirc * rack_load)[f.rack]
            + self.node_off
            + self.m_inlet
        )
        air = self.fan * self.m_air
        conv = np.where(liquid_n, 1 / self.m_air, (0.72 / np.maximum(air, 0.05)) ** 0.5)
        other = np.maximum(0, Pn[node] - self.P) / 1000
        Tin = inlet[node] + self.preheat * other * np.where(self.liquid, 1, np.minimum(2.5, conv[node]))
        # clock and power
        context = here & (loaded > 0)
        leak = self.leak60 * np.exp(0.02 * (np.minimum(self.T, 110) - 60))
        cap = np.minimum(self.limit, self.m_cap)
        rest = self.base + leak + self.ctx * context + self.pmem * dram
        # the cap works on milliseconds, in which a step's dense part draws more than the step's mean
        room = np.maximum(cap - rest, 1) / np.maximum(self.pdyn * act * 1.13, 1e-6)
        x_cap = np.interp(room, CUBE, GRID)
        x_lock = np.minimum(self.clk, self.m_clk) / self.fmax
        hot = self.T - self.slow_c
        self.slowdown = np.clip(self.slowdown + np.clip(hot * 0.004 * h, -0.02 * h, 0.03 * h), 0, 0.6)
        hw = self.T > self.hot_c
        top = np.minimum(x_lock, 1 - self.slowdown)
        top = np.where(hw, np.minimum(top, 0.5), top)
        top = top * (1 - 0.5 * self.m_brake)
        x = np.minimum(x_cap, top)
        capped = x_cap < top - 1e-3
        dith = np.where(capped, rng.normal(0, 0.006, f.G), 0)
        self.x = np.clip(self.x + (x + dith - self.x) * (1 - np.exp(-h / 1.0)), 0.1, top)
        run = np.floor(self.x * self.fmax / self.step_mhz) * self.step_mhz
        run = np.where(top >= 0.9999, np.where(self.x > 0.995, self.fmax, run), run)
        clock = np.where(context, run, self.fidle)
        dyn = self.pdyn * act * np.interp(np.where(context, self.x, 0.1), GRID, CUBE)
        self.P = rest + dyn
        # heat
        R = self.R * self.m_R
        scale = np.stack([R, R * conv[node], R * conv[node]], 1) * self.share
        self.theta = self.theta * self.keep + (1 - self.keep) * scale * self.P[:, None]
        self.T = Tin + self.theta.sum(1)
        self.Tm += (self.T + self.Rm * (self.pmem * dram + 0.05 * self.P) + self.m_mem - self.Tm) * (1 - self.keep_mem)
        tmax = np.full(f.N, -99.0)
        np.maximum.at(tmax, node, self.T)
        want = np.clip(0.32 + (tmax - 50) / 30 * 0.55, 0.32, 1)
        self.fan += (want - self.fan) * (1 - np.exp(-h / 15))
        # memory in use
        fb = (
            np.where(here, pg["fb"] * self.fb_rank, 0) * (loaded > 0.4) * self.fb_total
            + 0.55e9 * (self.fb_total > 3e10)
            + 0.2e9
        )
        self.fb += (np.minimum(fb, self.fb_total * 0.985) - self.fb) * (1 - np.exp(-h / np.where(here, 12, 1.5)))
        # counters
        n = self.cnt
        us = h * 1e6
        n["throttle_power_us"] += us * capped * context * rng.uniform(0.85, 1, f.G)
        soft = (self.slowdown > 0.004) & context
        n["throttle_thermal_sw_us"] += us * soft
        n["throttle_thermal_hw_us"] += us * hw
        n["throttle_brake_us"] += us * self.m_brake
        n["energy_j"] += self.P * h
        self.rare(n["ecc_dram_corrected"], self.bg_ecc * self.ecc)
        self.rare(n["pcie_replays"], self.bg_replay)
        self.rare(n["nvlink_crc_errors"], self.bg_crc)
        # ports: queue of a port as M/D/1 with bursts; what waits has no credit (IB) or is marked (RoCE)
        want_bps = np.where(self.sync & self.spans, jp["net"], jp["net"] * 0.02)[jid] * rate * comm_scale[jid]
        want_bps = np.where(hung, 0, want_bps)
        L = len(f.lnode)
        tx = np.zeros(L)
        has = f.glink >= 0
        np.add.at(tx, f.glink[has], want_bps[has])
        capacity = self.lgbps / 8 * 1e9 * np.minimum(self.m_link, 1)
        ck = np.bincount(node, (ph == CKPT)[jid], f.N) / np.maximum(np.bincount(node), 1)
        per = np.bincount(f.lnode, minlength=f.N)
        store = ck * 6e9 + self.m_storage
        tx = np.minimum(tx * rng.normal(1, 0.03, L) + (store / per)[f.lnode], capacity * 0.97) * self.up
        tx = np.maximum(tx, 2e4 * rng.random(L))
        rx = np.maximum(tx * rng.normal(1, 0.04, L), 0)
        r = np.clip(tx / capacity, 0, 0.98)
        waiting = np.clip(
            0.015 * r**2 / (1 - r) * rng.lognormal(0, 0.4, L) + self.m_wait * np.minimum(1, r * 4), 0, 0.95
        )
        q = self.lc
        q["tx_bytes"] += tx * h
        q["rx_bytes"] += rx * h
        q["tx_wait"] += waiting * h * 4e8
        marks = 3e3 * waiting * (r > 0.02) * (1 if f.roce else 0.0)
        self.poisson(q["cnp_sent"], marks * h)
        self.poisson(q["cnp_handled"], marks * 1.1 * h)
        self.rare(q["symbol_errors"], self.bg_sym)
        for c, part in (("out_of_sequence", 1.0), ("packet_sequence_errors", 0.4)):
            self.rare(q[c], self.bg_oos, part * (r > 0.01))
            self.poisson(q[c], 2 * self.m_wait * h * (r > 0.02))
        self.rare(q["rnr_nak_retries"], 0.2 * self.bg_oos)
        self.rare(self.nc["pcie_aer_correctable"], self.bg_aer)
        self.rare(self.nc["agent_read_failures"], np.full(f.N, 0.03))
        self.rare(self.nc["agent_missed_ticks"], np.full(f.N, 0.15))
        if f.roce:  # a full buffer without credits drops
            self.poisson(q["tx_discards"], 0.4 * self.m_wait * h * (r > 0.05))
        self.sample = dict(
            util=util,
            sm=sm,
            tensor=tensor,
            dram=dram,
            act=act,
            clock=clock,
            capped=capped & context,
            soft=soft,
            hw=hw,
            rate=rate,
            context=context,
            dyn=dyn,
            ph=ph,
            inlet=inlet,
            tx=tx,
            rx=rx,
            ck=ck,
            fx=fx,
            lock=(x_lock < 0.999) & context,
            A=A,
        )
        self.cpu_mood += -self.cpu_mood * h / 200 + np.sqrt(2 * h / 200) * rng.standard_normal(f.N)
        cpu = (
            np.bincount(node, (PH_CPU[ph] * self.cpu_job)[jid], f.N) / np.bincount(node) * np.exp(0.12 * self.cpu_mood)
            + self.cpu_node
            + self.m_cpu
        )
        self.cpu = np.clip(cpu * rng.normal(1, 0.06, f.N), 0.002, 1)
        self.load1 += (self.cpu * 190 - self.load1) * (1 - np.exp(-h / 60))

    def poisson(self, counter: np.ndarray, mean: np.ndarray) -> None:
        some = np.flatnonzero(mean > 0)
        if len(some):
            counter[some] += self.rng.poisson(mean[some])

    def rare(self, counter: np.ndarray, rates: np.ndarray, share: Any = 1.0) -> None:
        """Background events: `rates` an hour of each; drawn for all at once, as most steps have none."""
        mean = rates * share * self.h / 3600
        total = float(mean.sum())
        k = self.rng.poisson(total)
        if k:
            np.add.at(counter, self.rng.choice(len(mean), k, p=mean / total), 1)

    # what the instruments say

    def gpu_values(self) -> dict[str, np.ndarray]:
        f, s, rng, G = self.f, self.sample, self.rng, self.f.G
        jid, jp = self.jid, self.jp
        swing = self.swing[jid]
        noise = (
            0.75 * rng.standard_normal(len(self.jobs) + 1)[jid] + 0.66 * rng.standard_normal(G)
        ) * swing  # ranks swing together
        # a moment's power swings with the parts of a step; an average over a second less
        power = self.P + s["dyn"] * noise * (0.025 if f.power_average else 0.11) + rng.normal(0, 0.003, G) * self.tdp
        power = np.clip(power, self.base * 0.8, self.limit * (1.03 if f.power_average else 1.18))
        reasons = (
            (~s["context"]) * 1
            + s["capped"] * 4
            + s["soft"] * 32
            + s["hw"] * 72
            + (self.m_brake > rng.random(G)) * 136
            + s["lock"] * 2
        )
        deg = 10.0 if f.tenths else 1.0
        temp = np.round((self.T + rng.normal(0, 0.3, G)) * deg) / deg
        jit = lambda v, e: np.clip(v * (1 + e * rng.standard_normal(G)), 0, 1)
        fp = self.shape[:, jid]
        nvt = (
            self.nv_bps * 0.35 * np.minimum(1, (jp["intra"][jid] + 0.02) * 3) * s["rate"] * (self.sync[jid]) * self.m_nv
        )
        pc = (2e8 + 2.5e9 * np.minimum(jp["p"][jid] * 20, 3)) * s["rate"] * np.minimum(1, self.m_pcie)
        phg = s["ph"][jid]
        pc = pc + (phg == WARM) * 4e9 + 2e6 * s["context"]
        v = {
            "sm_clock_mhz": s["clock"],
            "memory_clock_mhz": np.where(s["context"] | (self.fmem < 5000), self.fmem, 405),
            "clock_event_reasons": reasons.astype(float),
            "power_w": np.round(power, 1),
            "power_limit_w": np.minimum(self.limit, self.m_cap),
            "gpu_temp_c": temp,
            "memory_temp_c": np.round(self.Tm + rng.normal(0, 0.4, G)),
            "thermal_margin_c": np.round(self.slow_c + 2 - self.T),
            "gpu_util_ratio": np.round(jit(s["util"], 0.015), 2),
            "memory_util_ratio": np.round(jit(s["dram"] * 0.95, 0.04), 2),
            "framebuffer_used_bytes": np.round(self.fb / 2**20) * 2**20,
            "framebuffer_total_bytes": np.round(self.fb_total / 2**20) * 2**20,
            "sm_active_ratio": np.round(jit(s["sm"], 0.02), 4),
            "tensor_active_ratio": np.round(jit(s["tensor"], 0.02), 4),
            "dram_active_ratio": np.round(jit(s["dram"], 0.02), 4),
            "sm_occupancy_ratio": np.round(jit(s["sm"] * (0.15 + 0.35 * fp[0]), 0.02), 4),
            "fp16_active_ratio": np.round(jit(s["sm"] * 0.06 * fp[0], 0.04), 4),
            "fp32_active_ratio": np.round(jit(s["sm"] * 0.18 * fp[1], 0.04), 4),
            "fp64_active_ratio": np.zeros(G),
            "pcie_tx_bytes_per_s": np.round(pc * 0.6 * rng.lognormal(0, 0.15, G)),
            "pcie_rx_bytes_per_s": np.round(pc * rng.lognormal(0, 0.15, G)),
            "nvlink_tx_bytes_per_s": np.round(nvt * rng.normal(1, 0.04, G)),
            "nvlink_rx_bytes_per_s": np.round(nvt * rng.normal(1, 0.04, G)),
            "pcie_generation": np.where(s["context"] | (self.fmem < 5000), self.st_gen, np.minimum(self.st_gen, 1)),
            "pcie_width": self.st_width.copy(),
            "nvlink_active_links": self.active_links.copy(),
            "nvlink_effective_ber": self.ber_now * rng.lognormal(0, 0.2, G),
            "sram_threshold_exceeded": self.sram_bad.copy(),
            "row_remap_pending": self.pending.copy(),
            "row_remap_failed": self.failed.copy(),
            "remap_banks_max": 640 - self.banks_lost,
            "remap_banks_none": self.banks_none.copy(),
            "recovery_action": self.action.copy(),
            "fabric_state": self.fabric.copy(),
            "compute_processes": s["context"] * 1.0,
        }
        for c, a in self.cnt.items():
            v[c] = np.floor(a)
            if c.startswith("ecc_"):
                v[c] = np.where(self.ecc, v[c], np.nan)
        hungd = self.hung_driver[f.gnode]
        if hungd.any():
            for c in v:
                v[c] = np.where(hungd, np.nan, v[c])
        return v

    def node_values(self) -> dict[str, np.ndarray]:
        f, s, rng, N = self.f, self.sample, self.rng, self.f.N
        net = np.bincount(f.lnode, s["tx"], N)
        warm = np.bincount(f.gnode, (s["ph"][self.jid] == WARM), N) / np.bincount(f.gnode)
        bad = self.hung_driver * 1.0
        read = 0.012 * np.bincount(f.gnode) * rng.lognormal(0, 0.3, N) + bad * 10
        v = {
            "cpu_util_ratio": np.round(self.cpu, 4),
            "load1": np.round(self.load1, 2),
            "memory_available_bytes": self.mem_total * np.clip(0.93 - 0.5 * self.cpu - 0.2 * self.root, 0.02, 1),
            "memory_total_bytes": self.mem_total,
            "disk_read_bytes_per_s": np.round(warm * 1.5e9 * rng.random(N) + rng.exponential(3e5, N)),
            "disk_write_bytes_per_s": np.round(s["ck"] * 8e8 * rng.random(N) + rng.exponential(1e6, N)),
            "root_used_ratio": np.round(self.root, 4),
            "net_rx_bytes_per_s": np.round(np.bincount(f.lnode, s["rx"], N) + rng.exponential(2e6, N)),
            "net_tx_bytes_per_s": np.round(net + rng.exponential(2e6, N)),
            "inlet_temp_c": np.where(
                f.inlet_dead,
                np.nan,
                np.round((s["inlet"] + rng.normal(0, 0.25, N)) * (1 if not f.tenths else 2))
                / (1 if not f.tenths else 2),
            ),
            "clock_offset_s": np.round(self.offset + self.m_shift + rng.normal(0, 0.002, N), 6),
            "agent_cpu_ratio": np.round(rng.lognormal(np.log(0.012), 0.3, N), 4),
            "agent_rss_bytes": 6.5e7 + 4e6 * np.round(rng.random(N), 2),
            "spool_bytes": np.round(rng.exponential(2e4, N)),
            "agent_tick_s": np.round(read + 0.02 + rng.exponential(0.01, N), 4),
            "agent_slowest_read_s": np.round(read, 4),
            "agent_sources_failing": np.zeros(N),
            "agent_sources_hung": bad,
            "source_nvml_read_s": np.round(read, 4),
            "source_nvml_outcome": bad * 2,
            "fan_min_rpm": np.where(
                self.liquid_node, np.nan, np.round(self.fan * self.fan_max * (1 - self.fan_bad) / 60) * 60
            ),
            "fans_failed": np.where(self.liquid_node, np.nan, (self.fan_bad > 0.5) * 1.0),
        }
        v.update({c: np.floor(a) for c, a in self.nc.items()})
        return v

    def link_values(self) -> dict[str, np.ndarray]:
        v = {"link_up": self.up.copy(), "rate_gbps": self.rate_now.copy()}
        v.update({c: np.floor(a) for c, a in self.lc.items()})
        return v


class Recorder:
    """Turns values into rows: lost rows, late rows, clocks that are off, nodes out of phase, columns that pools lack."""

    def __init__(self, rng: np.random.Generator, world: World, writer: Any, t0: float) -> None:
        self.rng, self.w, self.writer, self.t0 = rng, world, writer, t0
        f = world.f
        self.names = np.array([x["name"] for x in f.nodes], object)
        self.phase = rng.uniform(0, min(f.interval, 5) * 900, f.N)
        self.jitter = float(rng.choice([2, 15, 60]))
        self.columns = {"gpu": f.gpu_columns, "node": f.node_columns, "link": f.link_columns}
        self.owner = {"gpu": f.gnode, "node": np.arange(f.N), "link": f.lnode}
        self.second = {"gpu": f.slot.astype(np.int64), "node": None, "link": f.lname}
        self.blocks: dict[str, list[tuple[np.ndarray, dict, np.ndarray]]] = {"gpu": [], "node": [], "link": []}
        self.late: dict[str, Any] = {}
        self.absent = {c: np.array([c in f.lacks[int(f.pool[n])] for n in f.gnode]) for c in f.gpu_columns}
        self.eth_absent = f.roce

    def take(self, scope: str, values: dict[str, np.ndarray]) -> None:
        w, f, rng = self.w, self.w.f, self.rng
        owner = self.owner[scope]
        stamp = np.rint(
            self.t0 + w.t * 1000 + self.phase + (w.offset + w.m_shift) * 1000 + rng.normal(0, self.jitter, f.N)
        ).astype(np.int64)
        stamp = stamp[owner]
        keep = ~w.dark[owner] & (rng.random(len(owner)) >= w.loss)
        if w.loss:
            keep &= ~(rng.random(f.N) < w.loss)[owner]
        if scope == "gpu":
            keep &= ~w.gone & (rng.random(f.G) >= w.drop)
        cols = {c: values[c].astype(float)[keep] for c in self.columns[scope]}
        self.blocks[scope].append((stamp[keep], cols, np.flatnonzero(keep)))
        if sum(len(b[0]) for b in self.blocks[scope][-1:]) * len(self.blocks[scope]) > 120_000:
            self.flush(scope)

    def flush(self, scope: str, last: bool = False) -> None:
        blocks = self.blocks[scope]
        if not blocks:
            return
        ts = np.concatenate([b[0] for b in blocks])
        who = np.concatenate([b[2] for b in blocks])
        cols = {c: np.concatenate([b[1][c] for b in blocks]) for c in self.columns[scope]}
        if scope == "gpu":
            if self.w.blank:
                for c in self.columns[scope]:
                    hit = self.rng.random(len(ts)) < self.w.blank
                    cols[c][hit] = np.nan
            for c, a in self.absent.items():
                if a.any():
                    cols[c] = np.where(a[who], np.nan, cols[c])
        if self.w.late and not last and len(ts) > 100:  # some rows come minutes later: behind the others
            order = np.arange(len(ts), dtype=float)
            some = self.rng.random(len(ts)) < self.w.late
            order[some] += self.rng.exponential(len(ts) / 6, some.sum())
            order = np.argsort(order, kind="stable")
            ts, who, cols = ts[order], who[order], {c: v[order] for c, v in cols.items()}
        second = self.second[scope]
        self.writer.rows(scope, ts, self.names[self.owner[scope][who]], cols, None if second is None else second[who])
        self.blocks[scope] = []

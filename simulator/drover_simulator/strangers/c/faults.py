"""Faults and hard negatives: what each one does to the world, and how the planner finds a place for it.

Sizes: each function says where its range comes from. Times are seconds after the case's start.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from drover_simulator.strangers.c.boards import Fleet
from drover_simulator.strangers.c.jobs import HELD, NONE, SYNC, TRAIN, Job, Plan, fill

BUS = {8: ["18", "2a", "3a", "5d", "9a", "ab", "ba", "db"], 4: ["08", "09", "18", "19"]}
FIRST_FACTS = -1.0  # when the first inventories are written
Effect = Callable[[Any, float, float], None]


@dataclass
class Fault:
    kind: str
    cause: str
    members: list
    nodes: list[int]
    start: float
    end: float | None
    effect: Effect | None = None
    hardware: bool = True
    severity: float = 1.0
    pre: str | None = None
    begin: float = 0.0  # of the precursor, or of a ramp's first sign
    onset: float | None = None  # the label's start, if not `start`: the first effect of all
    pre_effect: Effect | None = None
    watch: Job | None = None
    bad: np.ndarray | None = None
    seen: list = field(default_factory=list)
    extra: dict = field(default_factory=dict)

    def apply(self, w: Any, t: float, h: float) -> None:
        if t < self.start and self.pre is not None:
            if self.pre_effect is not None:
                self.pre_effect(w, t, h)
        elif self.effect is not None:
            self.effect(w, t, h)

    def observe(self, w: Any, k: int, tr: Any, xs: Any, wt: Any, comm: Any, worst: Any) -> None:
        """Measure what share of its job's speed the straggler takes."""
        i = self.extra["job"]
        if w.phase[i, k] != TRAIN:
            return
        j = self.watch
        rest = np.setdiff1d(j.gpus, self.bad)
        x = np.median(xs[rest]) if len(rest) else 0.95
        want = wt[self.bad] * (j.c / x + j.m) + j.h + j.p
        free = max(float(np.max(tr[rest])) if len(rest) else 0, float(np.max(want))) + j.inter + j.intra
        self.seen.append(1 - free / (worst[i] + comm[i]))


def ramp(t: float, a: float, b: float) -> float:
    return float(np.clip((t - a) / max(b - a, 1e-9), 0, 1))


def spells(rng: np.random.Generator, a: float, b: float, on: float, off: float) -> list[tuple[float, float]]:
    """Draw spells of about `on` seconds, about `off` seconds between them; the first begins at a."""
    out, t = [], a
    while t < b and len(out) < 2000:
        d = on * rng.uniform(0.5, 1.6)
        out.append((t, t + d))
        t += d + off * (0.15 + rng.exponential(0.85))
    return out


def within(times: list[tuple[float, float]], t: float) -> bool:
    i = bisect_right(times, (t, 1e18)) - 1
    return i >= 0 and t < times[i][1]


class Placer:
    """Draws faults, finds free places, changes the plan of jobs where a fault ends one, and writes events."""

    def __init__(self, rng: np.random.Generator, f: Fleet, plan: Plan) -> None:
        self.rng, self.f, self.plan = rng, f, plan
        self.faults: list[Fault] = []
        self.events: list[tuple[float, int, int | None, str, str, str]] = []
        self.node_use: list[tuple[int, float, float]] = []
        self.job_use: list[tuple[Job, float, float]] = []
        self.facts: list[tuple[float, int, dict[str, str]]] = []  # changes of inventories
        self.setup: list[Effect] = []  # once, before the first step
        self.restarts: list[tuple[float, float, int]] = []
        self.resets: list[tuple[float, np.ndarray]] = []
        self.end = plan.length

    # places

    def free(self, nodes: Any, a: float, b: float | None) -> bool:
        b = self.end if b is None else b
        return not any(n in nodes and a < y + 1260 and b > x - 1260 for n, x, y in self.node_use)

    def job_free(self, job: Job, a: float, b: float | None) -> bool:
        b = self.end if b is None else b
        return not any(j is job and a < y + 120 and b > x - 120 for j, x, y in self.job_use)

    def span(self, low: float = 1850, pre: float = 0.0) -> tuple[float, float | None]:
        """Start and end: half last until the case's end (not repaired in time), all at least half an hour."""
        first = min(500 + pre, self.end * 0.45)
        a = self.rng.uniform(first, max(first + 1, self.end - low - 60))
        if self.rng.random() < 0.45:
            return a, None
        return a, min(self.end - 30, a + low + self.rng.exponential(1800))

    def take(self, fault: Fault, jobs: list[Job] = []) -> None:
        b = self.end if fault.end is None else fault.end
        if not fault.begin:
            fault.begin = fault.start
        for n in fault.nodes:
            self.node_use.append((n, fault.begin, b))
        for j in jobs:
            self.job_use.append((j, fault.begin, b))
        self.faults.append(fault)

    def busy(
        self,
        a: float,
        b: float | None,
        kinds: set[str],
        *,
        least: int = 1,
        need: tuple[str, ...] = (),
        ok: Callable[[Job], bool] | None = None,
    ) -> tuple[Job, int] | None:
        """Draw a GPU in a job that works from a to b, on a node that is free and shows the columns."""
        stop = min(self.end, self.end if b is None else b)
        found = []
        for j in self.plan.covering(a, stop - 1):
            if (
                j.kind not in kinds
                or len(j.gpus) < least
                or (ok is not None and not ok(j))
                or not self.job_free(j, a, b)
            ):
                continue
            ns = [
                int(n)
                for n in np.unique(self.f.gnode[self.working(j)])
                if self.free([n], a, b) and self.f.sees(int(n), *need)
            ]
            if ns:
                found.append((j, ns))
        if not found:
            return None
        j, ns = found[int(self.rng.integers(len(found)))]
        n = ns[int(self.rng.integers(len(ns)))]
        mine = self.working(j)
        mine = mine[self.f.gnode[mine] == n]
        return j, int(self.rng.choice(mine))

    def working(self, j: Job) -> np.ndarray:
        """GPUs that work all the time: of a service only the replicas that its scaler never stops."""
        if j.kind != "service":
            return j.gpus
        return j.gpus[: max(1, int(len(j.gpus) // j.replica * 0.3)) * j.replica]

    def any_gpu(self, a: float, b: float | None, *need: str, busy: float = 0.85, hbm: bool = False) -> int | None:
        """Draw a GPU on a free node: mostly one that works."""
        if self.rng.random() < busy:
            got = self.busy(a, b, SYNC | {"service", "single"}, need=need)
            if got is not None and (not hbm or self.f.boards[int(self.f.gnode[got[1]])].hbm):
                return got[1]
        ns = [
            n
            for n in range(self.f.N)
            if self.free([n], a, b) and self.f.sees(n, *need) and (not hbm or self.f.boards[n].hbm)
        ]
        if not ns:
            return None
        n = ns[int(self.rng.integers(len(ns)))]
        return int(self.rng.choice(self.f.gpus_of(n)))

    # events

    def say(self, t: float, n: int, slot: int | None, kind: str, code: str, message: str) -> None:
        if t < self.end:
            self.events.append((t, n, slot, kind, code, message))

    def pci(self, g: int) -> str:
        n = int(self.f.gnode[g])
        if self.f.boards[n].liquid:
            return f"PCI:00{['08', '09', '18', '19'][int(self.f.slot[g])]}:01:00"
        return f"PCI:0000:{BUS[8][int(self.f.slot[g])]}:00"

    def xid(self, t: float, g: int, code: int) -> None:
        r = self.rng
        pid = f"pid={int(r.integers(2000, 400000))}, name={r.choice(['python', 'python3', 'pt_main_thread', 'vllm', 'torchrun'])}"
        ch = f"Ch {int(r.integers(2, 40)):08x}"
        text = {
            13: f"{pid}, Graphics SM Warp Exception on (GPC {r.integers(8)}, TPC {r.integers(9)}, SM {r.integers(2)}): Out Of Range Address",
            31: f"{pid}, {ch}, intr 00000000. MMU Fault: ENGINE GRAPHICS GPCCLIENT_T1_{r.integers(20)} faulted @ 0x7f{r.integers(256):02x}_{int(r.integers(2**31)):08x}. Fault is of type FAULT_PDE ACCESS_TYPE_VIRT_READ",
            43: f"{pid}, {ch}",
            45: f"{pid}, {ch}",
            46: "pid='<unknown>', name=<unknown>, GPU stopped processing",
            48: f"{pid}, An uncorrectable double bit error (DBE) has been detected on GPU in the framebuffer at partition {r.integers(20)}, subpartition {r.integers(2)}.",
            62: f"pid='<unknown>', name=<unknown>, {int(r.integers(65536)):04x}({int(r.integers(65536)):04x}) 00000000 00000000",
            63: f"pid='<unknown>', name=<unknown>, Row Remapper: New row (0x{int(r.integers(2**31)):016x}) marked for remapping, reset gpu to activate.",
            64: f"pid='<unknown>', name=<unknown>, Row Remapper: Failed to remap row (0x{int(r.integers(2**31)):016x}), remap resources exhausted",
            74: f"pid='<unknown>', name=<unknown>, NVLink: fatal error detected on link {r.integers(12)}(0x{1 << int(r.integers(20)):x}, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0)",
            79: "pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
            92: "pid='<unknown>', name=<unknown>, High single-bit ECC error rate",
            94: f"{pid}, Contained: SM (0x1). RST: No, D-RST: No",
            95: f"{pid}, Uncontained: LTC TAG (0x2,0x0). RST: Yes, D-RST: No",
            109: f"{pid}, {ch}, errorString CTX SWITCH TIMEOUT, Info 0x{int(r.integers(2**20)):x}",
            119: f"{pid}, Timeout after 45s of waiting for RPC response from GPU{int(self.f.slot[g])} GSP! Expected function 76 (GSP_RM_CONTROL) (0x2080a04b 0x4b0).",
            120: f"pid='<unknown>', name=<unknown>, GSP task exception: load access fault (5) (error code (0)) @ pc:0x{int(r.integers(2**24)):x}, partition:4#0, task:3",
            140: "pid='<unknown>', name=<unknown>, Unrecovered ECC Error",
            145: f"{pid}, NVLink: RLW_REMAP Nonfatal XC0 i0 Link {r.integers(18):02d} (0x00000004 0x00000000 0x00000000 0x00000000 0x00000000 0x00000000)",
            149: f"{pid}, NVLink: NETIR_LINK_EVT Fatal XC0 i0 Link {r.integers(18):02d} (0x004505c6 0x00000000 0x00000000 0x00000000 0x00000000 0x00000000)",
            154: "pid='<unknown>', name=<unknown>, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)",
            158: "pid='<unknown>', name=<unknown>, GPU Fatal Timeout",
        }[code]
        self.say(
            t, int(self.f.gnode[g]), int(self.f.slot[g]), "xid", str(code), f"NVRM: Xid ({self.pci(g)}): {code}, {text}"
        )

    def can_kill(self, gpus: np.ndarray, t: float) -> bool:
        for j in self.plan.jobs:
            if j.end > t and np.isin(gpus, j.gpus).any() and not self.job_free(j, t, None):
                return False
        return True

    def kill(self, gpus: np.ndarray, t: float, nodes_out: list[int], back: float | None = None) -> list[Job]:
        """End the jobs that use these GPUs; most start again without the bad nodes, which serve again from `back`."""
        f, rng, out = self.f, self.rng, []
        for j in [j for j in self.plan.jobs if j.end > t and np.isin(gpus, j.gpus).any()]:
            old = j.end
            if back is not None and j.start > back + 30:
                continue
            if j.start >= t and nodes_out:  # was still in the queue: goes elsewhere
                self.plan.stop(j, j.start)
                j.phase[:] = NONE
                continue
            if j.start >= t:
                continue
            out.append(j)
            die = t + (rng.uniform(1, 8) if j.kind != "service" else 1)
            self.plan.stop(j, die)
            stay = ~np.isin(f.gnode[j.gpus], nodes_out)
            if j.kind == "service":
                stay[np.flatnonzero(stay)[int(stay.sum()) // j.replica * j.replica :]] = False
            if stay.any() and min(old, self.end) - die > 1500 and rng.random() < 0.8:
                one = len(np.unique(f.gnode[j.gpus[stay]])) == 1
                again = die + (rng.uniform(120, 900) if j.kind != "service" else 20)
                new = replace(
                    j,
                    id=j.id + "-r1",
                    gpus=j.gpus[stay],
                    weight=j.weight[stay],
                    start=again,
                    end=old,
                    ckpts=[],
                    inter=0.0 if one else j.inter,
                    intra=j.intra + (j.inter if one else 0),
                )
                fill(rng, self.plan, new)
                self.plan.jobs.append(new)
        return out

    # stragglers: 3 to 35 % of a job's speed (Meta, ByteDance "What-if": most stragglers 5 to 30 %)

    def straggler(self, cause: str) -> bool:
        rng, f = self.rng, self.f
        a, b = self.span()
        s = float(np.clip(rng.lognormal(np.log(0.11), 0.6), 0.035, 0.35))
        two = lambda j: len(j.gpus) >= 4 or len(j.nodes(f)) > 1
        need: tuple[str, ...] = ()
        ok = two
        if cause == "nic":
            need, ok = ("tx_bytes",), lambda j: two(j) and j.inter > 0.02
        elif cause == "nvlink":
            ok = lambda j: two(j) and j.intra > 0.01 and f.boards[int(f.gnode[j.gpus[0]])].links > 0
            need = ("nvlink_active_links",)
        elif cause == "pcie":
            need, ok = ("pcie_width",), lambda j: two(j) and f.boards[int(f.gnode[j.gpus[0]])].width == 16
        elif cause == "host":
            need = ("cpu_util_ratio",) if f.has_node and "cpu_util_ratio" in f.node_columns else ()
        elif cause == "hbm":
            need = ("dram_active_ratio",) if "dram_active_ratio" in f.gpu_columns else ()
        kinds = {"dp", "pipeline", "finetune", "moe"} if cause not in ("nic", "nvlink") else {"dp", "moe", "pipeline"}
        got = self.busy(a, b, kinds, least=2, need=need, ok=ok)
        if got is None:
            return False
        j, g = got
        n = int(f.gnode[g])
        wt = float(j.weight[int(np.flatnonzero(j.gpus == g)[0])])
        slack = max(0.0, float(j.weight.max() - wt)) * (j.c + j.m) + 2 * j.noise + 0.025 + 1.5 * j.wander
        delta = s / (1 - s) + slack
        if slack > 0.12:
            return False
        fault = Fault("straggler", cause, [f.member(g)], [n], a, b, watch=j, bad=np.array([g]))
        fault.extra["job"] = self.plan.jobs.index(j)
        mod = 1 / (1 + delta / (j.c * wt / 0.95))
        steady = rng.random() < 0.7  # else: comes and goes, minutes on and minutes off, mostly on
        period, duty = rng.uniform(300, 900), rng.uniform(0.6, 0.85)
        when = spells(rng, a, self.end, period * duty, period * (1 - duty))
        on = (lambda t: True) if steady else (lambda t: within(when, t))
        slot = g
        known: dict[str, float] = {}

        def peers(w: Any) -> float:
            """The clock share of the job's other ranks when the fault begins."""
            if "x" not in known and w.sample["A"][slot] > 0.6:
                known["x"] = float(np.median(w.x[j.gpus]))
            return known.get("x", 0.96)

        if cause == "thermal":  # paste pumped out or a blocked sink: until the slowdown takes the share (R up to x3)
            state = {"r": 1.0}

            def effect(w: Any, t: float, h: float) -> None:
                aim = 1 - peers(w) * mod
                if w.slowdown[slot] < aim * 0.95:
                    state["r"] = min(3.5, state["r"] + h / 500)
                elif w.slowdown[slot] > aim * 1.12:
                    state["r"] = max(1.0, state["r"] - h / 900)
                w.m_R[slot] *= state["r"]

            fault.begin, fault.start, fault.onset = a, a + 120, a
        elif cause == "power_cap":  # a brake signal of a weak supply, or a cap out of band
            if rng.random() < 0.5 and f.sees(n, "throttle_brake_us") or not f.sees(n, "power_limit_w"):

                def effect(w: Any, t: float, h: float) -> None:
                    aim = peers(w) * mod
                    if on(t):
                        w.m_brake[slot] = min(1.0, 2 * (1 - aim))
            else:
                state = {"cap": 0.9}

                def effect(w: Any, t: float, h: float) -> None:
                    if t - a < 120:
                        state["cap"] = max(
                            0.3,
                            state["cap"] - (h / 60 if w.x[slot] > peers(w) * mod and w.sample["A"][slot] > 0.6 else 0),
                        )
                    w.m_cap[slot] = round(state["cap"] * w.tdp[slot])
        elif cause == "clock":

            def effect(w: Any, t: float, h: float) -> None:
                aim = np.floor(f.boards[n].fmax * peers(w) * mod / 15) * 15
                if on(t):
                    w.m_clk[slot] = aim
        elif cause == "hbm":
            slow = 1 / (1 + delta / (j.m * wt))

            def effect(w: Any, t: float, h: float) -> None:
                if on(t):
                    w.m_hbm[slot] = slow
        elif cause == "pcie":
            if j.p < 0.04:
                j.c, j.p = j.c - 0.03, j.p + 0.03  # a job that feeds through the bus (offload, CPU optimizer)
            width = int(rng.choice([1, 2, 4]))
            while width > 1 and j.p * (16 / width - 1) < 0.04 + slack:
                width //= 2
            while width < 8 and j.p * (16 / width - 1) > 0.5 + slack:
                width *= 2

            def effect(w: Any, t: float, h: float) -> None:
                w.st_width[slot] = width
                w.m_pcie[slot] = width / 16
        elif cause == "nvlink":
            if j.intra < 0.08:
                j.c, j.intra = j.c - 0.06, j.intra + 0.06
            links = f.boards[n].links
            left = int(rng.choice([links // 2, links // 3, links * 2 // 3]))
            crc = rng.uniform(5, 300)

            def effect(w: Any, t: float, h: float) -> None:
                w.active_links[slot] = left
                w.m_nv[slot] = left / links * 0.9
                w.cnt["nvlink_crc_errors"][slot] += w.rng.poisson(crc * h / 60)
                w.cnt["nvlink_replays"][slot] += w.rng.poisson(crc / 2 * h / 60)
        elif cause == "nic":
            if j.inter < 0.1:
                j.c, j.inter = j.c - 0.08, j.inter + 0.08
            port = int(f.glink[g])
            share = float(np.clip(1 / (1 + (s / (1 - s)) / j.inter), 0.1, 0.8))
            rate = rng.random() < 0.5 and "rate_gbps" in f.link_columns
            if rate:
                share = 0.5 if share > 0.35 else 0.25

            def effect(w: Any, t: float, h: float) -> None:
                if on(t) or rate:
                    w.m_link[port] = share
                    if rate:
                        w.rate_now[port] = w.lgbps[port] * share
                    else:  # a marginal cable: what is lost is sent again
                        w.lc["symbol_errors"][port] += w.rng.poisson(8 * h)
                        for c in ("out_of_sequence", "packet_sequence_errors"):
                            w.lc[c][port] += w.rng.poisson(30 * h)
                        w.lc["rx_errors"][port] += w.rng.poisson(0.5 * h)
        elif cause == "host":  # a runaway daemon, bad NUMA placement, a slow memory channel
            fault.members, fault.bad = [[f.name(n), None]], j.gpus[f.gnode[j.gpus] == n]
            cpu = rng.uniform(0.25, 0.7)

            def effect(w: Any, t: float, h: float) -> None:
                if on(t):
                    w.m_host[n] += delta
                    w.m_cpu[n] += cpu
        else:

            def effect(w: Any, t: float, h: float) -> None:
                if on(t):
                    w.m_speed[slot] *= mod

        fault.effect = effect
        self.take(fault, [j])
        return True

    def hang(self) -> bool:
        """One rank stops, the others spin until a watchdog or an operator ends the job (Llama 3: the most dear kind)."""
        a = self.rng.uniform(400, max(401, self.end - 2000))
        b = min(self.end - 60, a + self.rng.uniform(1850, 4500))
        got = self.busy(a, b, {"dp", "pipeline", "moe", "finetune"}, least=4)
        if got is None or not self.job_free(got[0], a, None):
            return False
        j, g = got
        i = self.plan.jobs.index(j)
        stuck = (
            self.rng.random() < 0.25
        )  # in a kernel that never ends: busy, and hardly any power; else its process waits or is gone

        def effect(w: Any, t: float, h: float) -> None:
            w.hung[i] = True
            w.stopped[g] = True
            w.stuck[g] = stuck

        self.plan.stop(j, b)
        fault = Fault("hang", "rank_stopped", [self.f.member(g)], [int(self.f.gnode[g])], a, b, effect)
        self.take(fault, [j])
        return True

    # thermal

    def thermal(self, cause: str) -> bool:
        rng, f = self.rng, self.f
        pre = rng.random() < 0.45  # a rack has none: a third is left
        lead = rng.uniform(600, 2400) if pre else 0.0
        a, b = self.span(pre=lead)
        if cause == "rack":
            lead, pre = 0.0, False
            at_work = np.zeros(f.N, bool)
            for j in self.plan.covering(a, min(self.end, b or self.end, a + 3600) - 1):
                at_work[j.nodes(f)] = True
            racks = [
                r
                for r in range(len(f.racks))
                if (f.rack == r).sum() >= 2
                and at_work[f.rack == r].mean() >= 0.5
                and self.free(np.flatnonzero(f.rack == r), a, b)
            ]
            if not racks:
                return False
            ns = [int(n) for n in np.flatnonzero(f.rack == int(rng.choice(racks)))]
            liquid = f.boards[ns[0]].liquid
            rise, slope = (
                rng.uniform(5, 11) if liquid else rng.uniform(5, 14),
                rng.uniform(180, 1200),
            )  # a door open, a CDU valve, a dead blower

            def effect(w: Any, t: float, h: float) -> None:
                w.m_inlet[ns] += rise * ramp(t, a, a + slope)

            fault = Fault(
                "thermal",
                "rack",
                [[f.name(n), None] for n in ns],
                ns,
                a + slope / 3,
                b,
                effect,
                severity=round(rise / 38, 3),
                begin=a,
                onset=a,
            )
            if b is not None and b - fault.start < 1200:
                fault.end = None
            self.take(fault)
            return True
        need = ("memory_temp_c",) if cause == "hbm" else ()
        air = lambda j: not f.boards[int(f.gnode[j.gpus[0]])].liquid
        got = self.busy(
            a - lead,
            b,
            {"dp", "pipeline", "moe", "finetune", "service", "single"},
            need=need,
            ok=air if cause == "fan" else None,
        )
        if got is None:
            return False
        j, g = got
        n = int(f.gnode[g])
        if cause == "fan":
            air_left = rng.uniform(0.45, 0.75)  # 1 or 2 of 6 to 10 fans and the air that flows back through them

            def effect(w: Any, t: float, h: float) -> None:
                w.m_air[n] = air_left
                w.fan_bad[n] = 1.0

            def before(w: Any, t: float, h: float) -> None:  # the bearing drags: slower, slower
                w.m_air[n] = 1 - 0.4 * (1 - air_left) * ramp(t, a - lead, a)
                w.fan_bad[n] = 0.45 * ramp(t, a - lead, a)

            fault = Fault(
                "thermal", "fan", [[f.name(n), None]], [n], a, b, effect, severity=round(air_left**-0.5 - 1, 3)
            )
        elif cause == "hbm":
            rise = rng.uniform(8, 22)  # a stack's contact: HBM throttles at 95 to 105

            def effect(w: Any, t: float, h: float) -> None:
                w.m_mem[g] += rise * ramp(t, a, a + 300)

            def before(w: Any, t: float, h: float) -> None:
                w.m_mem[g] += rise * 0.3 * ramp(t, a - lead, a)

            fault = Fault(
                "thermal",
                "hbm",
                [f.member(g)],
                [n],
                a + (0 if pre else 100),
                b,
                effect,
                severity=round(rise / 40, 3),
                begin=a,
                onset=a,
            )
            pre = False if rise < 12 else pre
            if pre:

                def effect2(w: Any, t: float, h: float) -> None:
                    w.m_mem[g] += rise * (0.3 + 0.7 * ramp(t, a, a + 200))

                fault.effect = effect2
        else:
            factor = rng.uniform(0.12, 0.6)
            slope = 20.0 if rng.random() < 0.5 else rng.uniform(1200, 3600)
            if pre:
                slope = 120.0

            def effect(w: Any, t: float, h: float) -> None:
                w.m_R[g] *= 1 + factor * ((0.3 + 0.7 * ramp(t, a, a + slope)) if pre else ramp(t, a, a + slope))

            def before(w: Any, t: float, h: float) -> None:
                w.m_R[g] *= 1 + factor * 0.3 * ramp(t, a - lead, a)

            start = a if pre else a + slope / 3
            if b is not None and b - start < 1800:
                b = min(self.end - 30, start + 1800)
            fault = Fault(
                "thermal", "cooling", [f.member(g)], [n], start, b, effect, severity=round(factor, 3), begin=a, onset=a
            )
        if pre:
            fault.pre, fault.begin, fault.pre_effect = "heat", a - lead, before
        self.take(fault, [j])
        return True

    # precursors: what published studies saw before a failure (Delta and Blue Waters, Meta's and Tencent's reports)

    def precursor(self, fault: Fault, g: int, choices: list[str], lead: float) -> None:
        """Add one where the columns show it: an hour to ten minutes before."""
        rng, f = self.rng, self.f
        n, port = int(f.gnode[g]), int(f.glink[g])
        shown = {
            "ecc": f.sees(n, "ecc_dram_corrected"),
            "remap": f.sees(n, "remapped_rows_corrected"),
            "telemetry": True,
            "heat": False,
            "link_errors": f.sees(n, "symbol_errors") or f.sees(n, "nvlink_crc_errors") or f.sees(n, "pcie_replays"),
        }
        choices = [c for c in choices if shown[c]]
        if not choices or not lead:
            return
        what = str(rng.choice(choices))
        p0, p1 = fault.start - lead, fault.start
        if what == "ecc":
            top = rng.uniform(20, 600)  # an hour

            def before(w: Any, t: float, h: float) -> None:
                if (t - p0) % 300 < 120:
                    w.cnt["ecc_dram_corrected"][g] += w.rng.poisson(top * 2.5 * (0.3 + ramp(t, p0, p1)) * h / 3600)
        elif what == "remap":
            every = lead / rng.integers(3, 9)

            def before(w: Any, t: float, h: float) -> None:
                if (t - p0) % every < h:
                    w.cnt["remapped_rows_corrected"][g] += 1
                    w.banks_lost[g] += 1
        elif what == "link_errors":
            top = rng.uniform(10, 200)  # a minute
            use_port = fault.kind == "link" and fault.cause in ("port_down", "ib_flap") and f.sees(n, "symbol_errors")
            use_nv = (
                not use_port
                and f.sees(n, "nvlink_crc_errors")
                and fault.cause in ("nvlink", "xid_74", "xid_149", "xid_145")
            )
            if not use_port and not use_nv and not f.sees(n, "pcie_replays"):
                return

            def before(w: Any, t: float, h: float) -> None:
                k = w.rng.poisson(top * (0.05 + ramp(t, p0, p1)) ** 2 * h / 60)
                if use_port:
                    w.lc["symbol_errors"][port] += k
                    w.lc["link_error_recoveries"][port] += w.rng.poisson(k / 400)
                elif use_nv:
                    w.cnt["nvlink_crc_errors"][g] += k
                    w.cnt["nvlink_replays"][g] += k // 3
                else:
                    w.cnt["pcie_replays"][g] += k
                    w.nc["pcie_aer_correctable"][n] += k // 2
        else:
            top = rng.uniform(0.3, 0.7)

            def before(w: Any, t: float, h: float) -> None:
                w.drop[g] = max(w.drop[g], top * (0.2 + 0.8 * ramp(t, p0, p1)))

        fault.pre, fault.begin, fault.pre_effect = what, p0, before

    def lead(self) -> float:
        return (
            self.rng.uniform(600, 2700) if self.rng.random() < 0.55 else 0.0
        )  # a third is left after those whose columns are missing

    # memory

    def memory(self, cause: str) -> bool:
        rng, f = self.rng, self.f
        lead = self.lead() if cause != "ecc_storm" else 0.0
        a, b = self.span(pre=lead)
        need = {
            "ecc_storm": ("ecc_dram_corrected",),
            "uncorrectable": ("ecc_dram_uncorrected",),
            "remap_failed": ("row_remap_failed",),
            "remaps_pile_up": ("remapped_rows_corrected",),
            "sram_threshold": ("sram_threshold_exceeded",),
        }[cause]
        g = self.any_gpu(a - lead, b, *need, hbm=cause != "ecc_storm")
        if g is None:
            return False
        n = int(f.gnode[g])
        mine = np.array([g])
        fault = Fault("memory", cause, [f.member(g)], [n], a, b)
        held: list[Job] = []
        if cause == "ecc_storm":
            rate = (
                rng.lognormal(np.log(1500), 1.2) + 200
            )  # an hour: a weak cell or via, hundreds to 10^5 (Tiwari; Meta)

            def effect(w: Any, t: float, h: float) -> None:
                w.cnt["ecc_dram_corrected"][g] += w.rng.poisson(rate * w.rng.lognormal(-0.3, 0.8) * h / 3600)

            if rate > 4000 and rng.random() < 0.5:
                self.xid(a + 300, g, 92)
        elif cause == "remaps_pile_up":
            every = rng.uniform(90, 420)
            some_xid = rng.random() < 0.6

            def effect(w: Any, t: float, h: float) -> None:
                if w.rng.random() < h / every:
                    w.cnt["remapped_rows_corrected"][g] += 1 + w.rng.poisson(0.3)
                    w.banks_lost[g] += 1
                    w.cnt["ecc_dram_corrected"][g] += w.rng.poisson(3)

            if some_xid:
                for x in np.sort(rng.uniform(a, b or self.end, int(rng.integers(1, 5)))):
                    self.xid(float(x), g, 63)
            self.precursor(fault, g, ["ecc"], lead)
        else:
            if not self.can_kill(mine, a):
                return False
            sram = cause == "sram_threshold"
            extra = int(rng.integers(1, 4))

            def effect(w: Any, t: float, h: float) -> None:
                key = "ecc_sram_uncorrected" if sram else "ecc_dram_uncorrected"
                if t - h < a <= t:
                    w.cnt[key][g] += extra * (4 if sram else 1)
                    if cause == "uncorrectable":
                        w.cnt["remapped_rows_uncorrected"][g] += 1
                elif w.rng.random() < h / 1800:
                    w.cnt[key][g] += 1
                if sram:
                    w.sram_bad[g] = 1
                elif cause == "remap_failed":
                    w.failed[g] = 1
                    w.banks_none[g] = 1
                else:
                    w.pending[g] = 1
                w.action[g] = 1 if not sram else 4

            if cause == "uncorrectable":
                first = int(rng.choice([48, 94, 95], p=[0.3, 0.45, 0.25]))
                self.xid(a + 0.5, g, first)
                self.xid(a + 1.2, g, 63)
            elif cause == "remap_failed":
                self.xid(a + 0.5, g, 48)
                self.xid(a + 1.0, g, 64)
            else:
                self.xid(a + 0.5, g, int(rng.choice([94, 95, 48])))
            self.kill(mine, a, [n], b)
            fault.extra["repaired"] = True
            self.precursor(fault, g, ["ecc", "remap"] if cause != "sram_threshold" else ["ecc", "telemetry"], lead)
            if b is not None:
                self.resets.append((b, mine))
        fault.effect = effect
        self.take(fault, held)
        return True

    # links

    def link(self, cause: str) -> bool:
        rng, f = self.rng, self.f
        lead = self.lead() if cause in ("port_down", "ib_flap", "nvlink", "pcie_downgrade") else 0.0
        a, b = self.span(pre=lead)
        need = {
            "port_down": ("link_up",),
            "ib_flap": ("link_downed",),
            "ib_errors": ("rx_errors",),
            "nvlink": ("nvlink_crc_errors",),
            "pcie_downgrade": ("pcie_width",),
            "pcie_replays": ("pcie_replays",),
            "congestion_port": ("tx_bytes",),
            "hot_switch": ("tx_bytes",),
        }[cause]
        waits = ("tx_wait",) if not f.roce else ("out_of_sequence",)
        if cause == "hot_switch":
            for leaf in rng.permutation(len(f.leaves)):
                ns = [int(n) for n in np.flatnonzero(f.leaf == leaf)]
                jobs = [
                    j
                    for j in self.plan.covering(a, (b or self.end) - 1)
                    if j.kind in SYNC and j.inter > 0.02 and len(np.intersect1d(j.nodes(f), ns)) >= 1
                ]
                used = set(int(n) for j in jobs for n in j.nodes(f)) & set(ns)
                if (
                    len(ns) >= 3
                    and len(used) >= 3
                    and self.free(ns, a, b)
                    and f.sees(ns[0], *waits)
                    and all(self.job_free(j, a, b) for j in jobs)
                ):
                    ports = np.flatnonzero(np.isin(f.lnode, ns))
                    hit = ports[rng.random(len(ports)) < rng.uniform(0.6, 0.95)]
                    wait, share = (
                        rng.uniform(0.15, 0.5),
                        rng.uniform(0.6, 0.85),
                    )  # half the uplinks of a leaf lost, or bad hashing

                    def effect(w: Any, t: float, h: float) -> None:
                        w.m_wait[hit] += wait * w.rng.lognormal(0, 0.4, len(hit))
                        w.m_link[hit] = share

                    self.take(Fault("link", cause, [[f.name(n), None] for n in ns], ns, a, b, effect), jobs)
                    return True
            return False
        moving = cause in ("congestion_port", "ib_flap", "port_down")
        if moving:
            got = self.busy(
                a - lead,
                b,
                SYNC,
                need=need + (waits if cause == "congestion_port" else ()),
                ok=lambda j: j.inter > 0.02,
            )
            if got is None:
                return False
            j, g = got
        else:
            g0 = self.any_gpu(a - lead, b, *need)
            if g0 is None:
                return False
            g, j = g0, None
        n = int(f.gnode[g])
        port = int(f.glink[g])
        bd = f.boards[n]
        if cause == "pcie_downgrade" and bd.width != 16:
            return False
        by_port = cause in ("port_down", "ib_flap", "ib_errors", "congestion_port")
        if by_port and bd.nics != bd.gpus:
            members = [[f.name(n), None]]
        else:
            members = [f.member(g)]
        fault = Fault("link", cause, members, [n], a, b)
        name = str(f.lname[port])
        held = [j] if j is not None else []
        if cause == "port_down":
            dies = rng.random() < 0.5 and self.can_kill(np.array([g]), a)

            def effect(w: Any, t: float, h: float) -> None:
                if t - h < a <= t:
                    w.lc["link_downed"][port] += 1
                w.up[port] = 0
                w.rate_now[port] = w.lgbps[port] if not f.roce else np.nan
                w.m_link[port] = 0.5  # its traffic goes through another port

            self.say(
                a + 0.2,
                n,
                None,
                "kernel",
                "nic_link",
                f"mlx5_core 0000:{BUS[8][int(f.slot[g])]}:00.0 {name}: Link down",
            )
            if b is not None:
                self.say(
                    b, n, None, "kernel", "nic_link", f"mlx5_core 0000:{BUS[8][int(f.slot[g])]}:00.0 {name}: Link up"
                )
            if dies:
                self.kill(np.array([g]), a + rng.uniform(5, 60), [n], b)
                held = []
            self.precursor(fault, g, ["link_errors"], lead)
        elif cause == "ib_flap":
            every, size = (
                rng.uniform(90, 420),
                rng.uniform(2, 20),
            )  # training of a port takes seconds; flaps every some minutes
            flaps = spells(rng, a, b or self.end, size, every)
            starts = [x for x, _ in flaps]

            def effect(w: Any, t: float, h: float) -> None:
                times = bisect_right(starts, t) - bisect_right(starts, t - h)
                if times:
                    w.lc["link_downed"][port] += times
                    w.lc["link_error_recoveries"][port] += times + w.rng.poisson(1)
                    w.lc["symbol_errors"][port] += w.rng.poisson(40)
                if times or within(flaps, t):
                    w.up[port] = float(not within(flaps, t))
                    w.m_link[port] = 0.3

            for x, y in flaps:
                self.say(
                    x + 0.1,
                    n,
                    None,
                    "kernel",
                    "nic_link",
                    f"mlx5_core 0000:{BUS[8][int(f.slot[g])]}:00.0 {name}: Link down",
                )
                self.say(
                    y, n, None, "kernel", "nic_link", f"mlx5_core 0000:{BUS[8][int(f.slot[g])]}:00.0 {name}: Link up"
                )
            self.precursor(fault, g, ["link_errors"], lead)
        elif cause == "ib_errors":
            rate = (
                rng.lognormal(np.log(40), 1.0) + 8
            )  # a minute: IBTA calls > 10 symbol errors an hour bad; seen up to 10^4

            def effect(w: Any, t: float, h: float) -> None:
                k = rate * h / 60 * w.rng.lognormal(0, 0.5)
                w.lc["symbol_errors"][port] += w.rng.poisson(k)
                w.lc["rx_errors"][port] += w.rng.poisson(k / 3)
                w.lc["local_integrity_errors"][port] += w.rng.poisson(k / 20)
                w.lc["link_error_recoveries"][port] += w.rng.poisson(k / 200)
                w.lc["packet_sequence_errors"][port] += w.rng.poisson(k / 4)
        elif cause == "nvlink":
            rate = rng.lognormal(np.log(60), 1.0) + 10  # a minute
            lost = int(rng.random() < 0.5)

            def effect(w: Any, t: float, h: float) -> None:
                k = w.rng.poisson(rate * h / 60 * w.rng.lognormal(0, 0.5))
                w.cnt["nvlink_crc_errors"][g] += k
                w.cnt["nvlink_replays"][g] += k // 2
                w.cnt["nvlink_recoveries"][g] += w.rng.poisson(0.2 * h / 60)
                w.active_links[g] -= lost
                w.ber_now[g] = 10**-8.5

            if not bd.liquid and rng.random() < 0.4:
                self.say(
                    a + 2,
                    n,
                    None,
                    "sxid",
                    "20034",
                    f"nvidia-nvswitch{rng.integers(4)}: SXid (PCI:0000:c{rng.integers(4, 8)}:00.0): 20034, Non-fatal, Link {rng.integers(64)} LTSSM Fault Up",
                )
            if rng.random() < 0.5 and self.can_kill(np.array([g]), a):
                self.xid(a + 1, g, 149 if bd.blackwell else 74)
                self.kill(np.array([g]), a, [n], b)
            self.precursor(fault, g, ["link_errors"], lead)
        elif cause == "pcie_downgrade":
            width = int(rng.choice([8, 4, 1], p=[0.5, 0.3, 0.2]))  # lanes that fail come in halves
            slower = rng.random() < 0.25
            if not bd.hbm:  # an L4 lowers its generation itself when idle
                slower = False

            def effect(w: Any, t: float, h: float) -> None:
                if slower:
                    w.st_gen[g] = 1
                    w.m_pcie[g] = 0.25
                else:
                    w.st_width[g] = width
                    w.m_pcie[g] = width / 16

            self.precursor(fault, g, ["link_errors"], lead)
        elif cause == "pcie_replays":
            rate = rng.lognormal(np.log(40), 1.1) + 8  # a minute; healthy: a few a day

            def effect(w: Any, t: float, h: float) -> None:
                k = w.rng.poisson(rate * h / 60 * w.rng.lognormal(0, 0.5))
                w.cnt["pcie_replays"][g] += k
                w.nc["pcie_aer_correctable"][n] += k // 2

            for x in np.sort(rng.uniform(a, b or self.end, int(rng.integers(1, 6)))):
                self.say(
                    float(x),
                    n,
                    int(f.slot[g]),
                    "kernel",
                    "aer",
                    f"nvidia {self.pci(g)[4:]}.0: PCIe Bus Error: severity=Corrected, type=Data Link Layer, (Transmitter ID)",
                )
        else:
            wait, share = (
                rng.uniform(0.2, 0.6),
                rng.uniform(0.45, 0.8),
            )  # share of time without credit; what goodput is left

            def effect(w: Any, t: float, h: float) -> None:
                w.m_wait[port] += wait * w.rng.lognormal(0, 0.3)
                w.m_link[port] = share
                w.lc["out_of_sequence"][port] += w.rng.poisson(20 * h)
                w.lc["ack_timeouts"][port] += w.rng.poisson(0.05 * h)

        fault.effect = effect
        self.take(fault, held)
        return True

    # XID

    def fatal(self) -> bool:
        rng, f = self.rng, self.f
        lead = self.lead()
        a, b = self.span(pre=lead)
        g = self.any_gpu(a - lead, b, busy=0.95)
        if g is None or not self.can_kill(np.array([g]), a):
            return False
        n = int(f.gnode[g])
        bd = f.boards[n]
        codes = {79: 0.3, 119: 0.2, 95: 0.1, 109: 0.08, 62: 0.07, 140: 0.05, 46: 0.05, 120: 0.05}
        if bd.links and not bd.blackwell:
            codes[74] = 0.1
        if bd.blackwell:
            codes |= {149: 0.12, 158: 0.05}
        code = int(rng.choice(list(codes), p=np.array(list(codes.values())) / sum(codes.values())))
        self.xid(a, g, code)
        if code in (79, 119) and rng.random() < 0.7:
            self.xid(a + rng.uniform(2, 30), g, 154)
        if code == 119:
            for x in range(int(rng.integers(1, 6))):
                self.xid(a + 45 * (x + 1), g, 119)
        lost = code == 79 or (code in (119, 120, 62) and rng.random() < 0.4)
        if lost and rng.random() < 0.6:
            self.say(
                a + rng.uniform(1, 12),
                n,
                int(f.slot[g]),
                "lifecycle",
                "gpu_lost",
                "GPU is lost: NVML_ERROR_GPU_IS_LOST",
            )
        if code == 79 and rng.random() < 0.4:
            self.say(
                a + 0.1,
                n,
                int(f.slot[g]),
                "kernel",
                "pcie",
                f"pcieport 0000:{BUS[8][int(f.slot[g])]}:01.0: pciehp: Slot({int(f.slot[g]) + 1}): Link Down",
            )
        for j in self.kill(np.array([g]), a, [n], b):
            if rng.random() < 0.5:  # the other ranks of the node are removed
                for o in j.gpus[f.gnode[j.gpus] == n]:
                    if o != g:
                        self.xid(a + rng.uniform(2, 20), int(o), 45)

        def effect(w: Any, t: float, h: float) -> None:
            if lost:
                w.gone[g] = True
            else:
                w.action[g] = 1
                if t - h < a <= t and code in (95, 140):
                    w.cnt["ecc_sram_uncorrected"][g] += 1

        fault = Fault("xid", f"xid_{code}", [f.member(g)], [n], a, b, effect)
        self.precursor(
            fault,
            g,
            {
                79: ["telemetry", "link_errors"],
                119: ["telemetry"],
                120: ["telemetry"],
                95: ["ecc"],
                140: ["ecc"],
                74: ["link_errors"],
                149: ["link_errors"],
            }.get(code, ["ecc", "telemetry"]),
            lead,
        )
        if b is not None:
            self.resets.append((b, np.array([g])))
            if lost:
                self.say(b + 5, n, int(f.slot[g]), "lifecycle", "gpu_back", "GPU answers again")
        self.take(fault)
        return True

    # liveness

    def liveness(self, cause: str) -> bool:
        rng, f = self.rng, self.f
        a, b = self.span()
        if cause == "rack_power":
            racks = [r for r in range(len(f.racks)) if 2 <= (f.rack == r).sum() <= max(4, f.N // 3)]
            rng.shuffle(racks)
            for r in racks:
                ns = [int(n) for n in np.flatnonzero(f.rack == r)]
                gpus = np.concatenate([f.gpus_of(n) for n in ns])
                if self.free(ns, a, b) and self.can_kill(gpus, a):
                    break
            else:
                return False
        elif cause == "gpu_lost":
            g = self.any_gpu(a, b)
            if g is None or not self.can_kill(np.array([g]), a):
                return False
            ns, gpus = [int(f.gnode[g])], np.array([g])
        else:
            free = [
                n
                for n in range(f.N)
                if self.free([n], a, b) and (cause == "clock_wrong" or self.can_kill(f.gpus_of(n), a))
            ]
            if not free:
                return False
            ns = [int(rng.choice(free))]
            gpus = f.gpus_of(ns[0])
        n = ns[0]
        members = [[f.name(x), None] for x in ns]
        if cause in ("silent", "rack_power"):

            def effect(w: Any, t: float, h: float) -> None:
                w.dark[ns] = True
        elif cause == "gpu_lost":
            members = [f.member(int(gpus[0]))]

            def effect(w: Any, t: float, h: float) -> None:
                w.gone[gpus] = True

            if rng.random() < 0.6:
                self.say(
                    a + rng.uniform(0.5, 15),
                    n,
                    int(f.slot[gpus[0]]),
                    "lifecycle",
                    "gpu_lost",
                    "GPU is lost: NVML_ERROR_GPU_IS_LOST",
                )
        elif cause == "driver_hung":
            rows_end = rng.random() < 0.5

            def effect(w: Any, t: float, h: float) -> None:
                w.hung_driver[n] = True
                if rows_end:
                    w.gone[gpus] = True

            if rng.random() < 0.7:
                self.say(a + rng.uniform(10, 40), n, None, "lifecycle", "driver_hung", "NVML has not returned for 10 s")
            self.say(
                a + 130,
                n,
                None,
                "kernel",
                "hung_task",
                "INFO: task nvidia-smi:48213 blocked for more than 122 seconds.",
            )
        else:
            shift = float(rng.choice([-1, 1]) * rng.lognormal(np.log(40), 1.1) + 0)
            shift += 7 * np.sign(shift)
            if rng.random() < 0.6:
                self.say(a + 20, n, None, "lifecycle", "clock_wrong", f"the node's clock differs by {shift:.1f} s")

            def effect(w: Any, t: float, h: float) -> None:
                w.m_shift[n] = shift

        if cause != "clock_wrong":
            self.kill(gpus, a, ns, b)
            if b is not None:
                self.resets.append((b, gpus))
                for x in ns:
                    if cause in ("silent", "rack_power"):
                        self.say(b + rng.uniform(0, 20), x, None, "lifecycle", "agent_started", "agent started")
                    elif cause == "driver_hung":
                        self.say(b + 2, x, None, "lifecycle", "driver_back", "the driver answers again")
                if cause == "gpu_lost":
                    self.say(b + 2, n, int(f.slot[gpus[0]]), "lifecycle", "gpu_back", "GPU answers again")
        self.take(
            Fault(
                "liveness", cause, members, ns, a, b, effect, extra={"shift": shift} if cause == "clock_wrong" else {}
            )
        )
        return True

    # drift

    def drift(self, cause: str, key_change: Callable[[int, int | None, str, str, float], None]) -> bool:
        rng, f = self.rng, self.f
        # an image, a VBIOS or an ECC mode changes with a reboot only: it differed before the case; limits are set at any time
        a = 1.0 if cause in ("driver", "vbios", "ecc_mode") or rng.random() < 0.35 else rng.uniform(600, self.end * 0.6)
        b = None
        got = self.busy(max(a, 300), b, {"dp", "pipeline", "moe", "finetune", "service", "single"})
        if got is None or (f.pool == f.pool[int(f.gnode[got[1]])]).sum() < 4:
            return False
        j, g = got
        n = int(f.gnode[g])
        bd = f.boards[n]
        whole = cause == "driver" or rng.random() < 0.4
        gpus = f.gpus_of(n) if whole else np.array([g])
        members = [[f.name(n), None]] if whole else [f.member(g)]
        sev = 1.0
        effect: Effect = lambda w, t, h: None
        if cause == "driver":  # an image that was not rolled out: other host overhead and power manager
            slow = rng.uniform(0, 0.03)  # release notes: launches and copies some per cent slower or faster
            key_change(n, None, "driver_version", str(rng.choice(["535.129.03", "550.54.15", "560.35.05"])), a)

            def effect(w: Any, t: float, h: float) -> None:
                w.m_host[n] += slow
        elif cause == "vbios":
            cut = rng.uniform(0.95, 1.0)  # other boost tables: up to some clock steps
            for x in gpus:
                key_change(n, int(f.slot[x]), "vbios", bd.vbios[:-3] + ".02", a)

            def effect(w: Any, t: float, h: float) -> None:
                w.m_clk[gpus] = np.floor(bd.fmax * cut / 15) * 15
        elif cause == "power_limit":
            # nvidia-smi allows 50 to 100 % on most boards; left over from a test or a rack's cap
            watts = float(np.round(bd.tdp * rng.uniform(0.55, 0.88) / 5) * 5)
            for x in gpus:
                key_change(n, int(f.slot[x]), "power_limit_set_w", f"{watts:.0f}", a)

            def effect(w: Any, t: float, h: float) -> None:
                w.m_cap[gpus] = watts
        elif cause == "clock_limit":
            mhz = float(np.floor(bd.fmax * rng.uniform(0.65, 0.92) / 15) * 15)
            for x in gpus:
                key_change(n, int(f.slot[x]), "sm_clock_max_mhz", f"{mhz:.0f}", a)

            def effect(w: Any, t: float, h: float) -> None:
                w.m_clk[gpus] = mhz
        else:
            for x in gpus:
                key_change(n, int(f.slot[x]), "ecc_mode", "disabled", a)

            def effect(w: Any, t: float, h: float) -> None:
                w.ecc[gpus] = False
                if not bd.hbm:
                    w.fb_total[gpus] = 24.0 * 2**30

        # what differed before the case is in the first inventory
        self.take(
            Fault("drift", cause, members, [n], a, b, effect, severity=sev, onset=FIRST_FACTS if a <= 1 else None)
        )
        return True

    def held(self) -> bool:
        """Someone keeps GPUs for hours: contexts and memory are there, no kernel runs."""
        rng, f = self.rng, self.f
        found = [
            j
            for j in self.plan.covering(300, self.end - 1)
            if j.kind in ("single", "finetune", "dp", "moe", "notebook")
            and len(j.nodes(f)) == 1
            and self.free(j.nodes(f), 1, None)
            and self.job_free(j, 1, None)
        ]
        if not found:
            return False
        j = found[int(rng.integers(len(found)))]
        a = 1.0 if rng.random() < 0.7 else rng.uniform(300, max(301, min(self.end * 0.35, self.end - 7300)))
        j.kind = "held"
        j.phase[self.plan.step(a) :][j.phase[self.plan.step(a) :] != NONE] = HELD
        self.take(Fault("idle", "held", [f.member(int(g)) for g in j.gpus], [int(n) for n in j.nodes(f)], a, None), [j])
        return True

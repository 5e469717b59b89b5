"""What goes wrong, and what only looks so: marks on physics, counters, events and labels. Times in seconds from the start."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from drover_simulator.strangers.b.fleet import Fleet, Job
from drover_simulator.strangers.b.network import solve

XID = {13: "Graphics Exception: ESR 0x50df30=0x107000e", 31: "MMU Fault: ENGINE GRAPHICS GPCCLIENT_T1_3 faulted @ 0x7f2a_c0000000. Fault is of type FAULT_PDE ACCESS_TYPE_VIRT_READ",
       43: "Reset Channel Verif Error", 45: "Preemptive Removal, due to previous errors", 48: "An uncorrectable double bit error (DBE) has been detected on GPU in the framebuffer", 63: "Row Remapper: New row marked for remapping, reset gpu to activate",
       64: "Row Remapper: Failed to remap row", 74: "NVLink: fatal error detected on link 3(0x10000, 0x0, 0x0)", 79: "GPU has fallen off the bus.", 92: "High single-bit ECC error rate", 94: "Contained: SM (0x1). RST: No, D-RST: No",
       95: "Uncontained: LTC TAG (0x2,0x0). RST: Yes, D-RST: No", 119: "Timeout after 6s of waiting for RPC response from GPU0 GSP! Expected function 76 (GSP_RM_CONTROL)", 120: "GSP task exception: load access fault (5) @ pc:0x3f8a6e",
       122: "SPI PMU RPC read fail", 144: "NVLINK: SAW Error", 145: "NVLINK: RLW Error", 146: "NVLINK: TLW Error", 147: "NVLINK: TREX Error", 148: "NVLINK: NVLPW_CTRL Error", 149: "NVLINK: NETIR_LINK_EVT Fatal error, link down", 150: "NVLINK: MSE Error"}  # fmt: skip


@dataclass
class Mod:
    """A change of one parameter over a time. `segs`: when it is on; `ramp`: share of the time over which it grows."""

    param: str
    idx: np.ndarray
    t0: float
    t1: float
    val: float
    how: str = "mul"
    ramp: float = 0.0
    segs: list[tuple[float, float]] | None = None

    def level(self, t: float) -> float:
        """0 to 1."""
        if self.segs is not None:
            return float(any(a <= t < b for a, b in self.segs))
        return min(1.0, (t - self.t0) / (self.ramp * (self.t1 - self.t0))) if self.ramp > 0 else 1.0


@dataclass
class Plan:
    """All that happens, in addition to healthy physics."""

    f: Fleet
    mods: list[Mod] = field(default_factory=list)
    events: list[tuple[float, int, int | None, str, str, str]] = field(default_factory=list)
    labels: list[dict[str, Any]] = field(default_factory=list)
    incs: list[tuple[str, float, int, float]] = field(default_factory=list)  # column, time, index, how many
    states: list[tuple[str, int, float, float, float]] = field(default_factory=list)  # column, index, from, to, value
    down_node: list[tuple[float, float, int]] = field(default_factory=list)
    down_gpu: list[tuple[float, float, int]] = field(default_factory=list)
    down_gpurows: list[tuple[float, float, int]] = field(default_factory=list)  # node: only its GPU rows
    lost_cols: list[tuple[float, float, int, tuple[str, ...]]] = field(default_factory=list)
    resets: list[tuple[float, int]] = field(default_factory=list)  # node: counters start again
    shifts: list[tuple[float, float, int, float]] = field(default_factory=list)
    inv: list[tuple[float, int, dict[str, str]]] = field(default_factory=list)  # changes
    net: list[tuple[float, float, str, int, float]] = field(default_factory=list)  # "port"|"uplink", index, factor
    used: dict[int, float] = field(default_factory=dict)  # node -> until when it is busy with a fault
    jobbusy: dict[str, float] = field(default_factory=dict)
    no: int = 0
    net_seed: int = 0

    def __post_init__(self) -> None:
        self.rng = self.f.rng
        self.net_seed = int(self.rng.integers(1 << 30))

    def mod(
        self,
        param: str,
        idx: Any,
        t0: float,
        t1: float,
        val: float,
        how: str = "mul",
        ramp: float = 0.0,
        segs: Any = None,
    ) -> None:
        self.mods.append(Mod(param, np.atleast_1d(np.asarray(idx, int)), t0, t1, val, how, ramp, segs))

    def xid(self, t: float, g: int, code: int, pid: bool = True) -> None:
        n, s = int(self.f.node[g]), int(self.f.slot[g])
        who = f", pid={self.rng.integers(2000, 900000)}, name=python" if pid else ""
        bus = (0x1B, 0x43, 0x52, 0x61, 0x9D, 0xC3, 0xD1, 0xDF)[s % 8]
        self.events.append((t, n, s, "xid", str(code), f"NVRM: Xid (PCI:0000:{bus:02x}:00): {code}{who}, {XID[code]}"))

    def life(self, t: float, n: int, code: str, s: int | None = None) -> None:
        text = {"agent_started": "agent started", "agent_stopped": "agent was asked to stop", "gpu_lost": "GPU no longer answers", "gpu_back": "GPU answers again",
                "driver_hung": "NVML calls do not return", "driver_back": "driver answers again", "clock_wrong": "node clock differs from the collector's"}[code]  # fmt: skip
        self.events.append((t, n, s, "lifecycle", code, text))

    def kern(self, t: float, n: int, code: str, msg: str) -> None:
        self.events.append((t, n, None, "kernel", code, msg))

    def label(
        self,
        kind: str,
        cause: str,
        t0: float,
        t1: float | None,
        node: int | None,
        gpu: int | None,
        hardware: bool = True,
        **more: Any,
    ) -> dict[str, Any]:
        self.no += 1
        where = more["members"][0][0] if node is None else self.f.names[node]
        row = {"id": f"L{self.no:03d}", "kind": kind, "node": where, "gpu": None if gpu is None else int(self.f.slot[gpu]),
               "start": t0, "end": t1, "cause": cause, "hardware": hardware, **more}  # fmt: skip
        row.setdefault("severity", 1.0)
        row.setdefault("onset", "sudden")
        self.labels.append(row)
        return row

    def members(self, gpus: Any) -> list[list[Any]]:
        return [[self.f.names[self.f.node[g]], int(self.f.slot[g])] for g in gpus]

    def nodes_members(self, nodes: Any) -> list[list[Any]]:
        return [[self.f.names[i], None] for i in nodes]

    # what runs
    def job_at(self, g: int, t: float) -> Job | None:
        for j in self.f.jobs:
            if j.start <= t < j.end and g in j.gpus:
                return j
        return None

    def sync_jobs(self, t: float, dur: float, least: int = 2) -> list[Job]:
        return [j for j in self.f.jobs if j.waits and len(j.gpus) >= least and j.start + 240 + 6 * self.f.dt < t and j.end > t + dur and self.jobbusy.get("x" + j.name, 0) < t]  # fmt: skip

    def free_gpu(
        self,
        t: float,
        dur: float,
        busy: bool = True,
        hbm: bool | None = None,
        ok: np.ndarray | None = None,
        crash: bool = False,
    ) -> int | None:
        """A GPU on a node without trouble; busy: in a job that lasts."""
        f = self.f
        for g in self.rng.permutation(f.G)[:400]:
            if ok is not None and not ok[g]:
                continue
            if self.used.get(int(f.node[g]), -1) > t or (hbm is not None and bool(f.hbm[g]) != hbm):
                continue
            j = self.job_at(int(g), t)
            if busy and (j is None or j.start + 300 > t or j.kind in ("notebook", "held") or j.end < t + dur):
                continue
            if crash and not self.free_for_crash(t, [int(g)]):
                continue
            return int(g)
        return None

    def crash(self, t: float, g: int, restart_without: bool = True, delay: float | None = None) -> None:
        """The job of g ends; a restart without that node follows."""
        f = self.f
        hit = [j for j in f.jobs if g in j.gpus and j.start < t < j.end]
        for j in hit:
            old_end, j.end = j.end, t
            for row in self.labels:  # what only this job shows ends with it
                if row.get("_job") == j.name and row["end"] > t:
                    row["end"] = t
            rest = j.gpus[f.node[j.gpus] != f.node[g]] if restart_without else j.gpus
            back = t + (delay or self.rng.uniform(90, 600))
            if j.kind == "pp" or len(rest) == 0 or back > min(old_end, f.span) - 120:
                if len(rest) and back < f.span - 300 and len(rest) > 1:
                    f.add_job("dp", rest, back, old_end)
                continue
            f.add_job(j.kind, rest, back, old_end, like=j)

    def free_for_crash(self, t: float, gs: Any) -> bool:
        """No fault is in force in the jobs of these GPUs."""
        names = [j.name for g in gs for j in self.f.jobs if g in j.gpus and j.start < t < j.end]
        return all(self.jobbusy.get(n, -1) < t for n in names)

    def reboot(self, t: float, n: int, back: float, asked: bool = False) -> None:
        """The node is away from t to back; counters start again."""
        if asked:
            self.life(t, n, "agent_stopped")
        self.down_node.append((t, back, n))
        if back < self.f.span:
            self.life(back, n, "agent_started")
            self.resets.append((back, n))


def shape(p: Plan, t0: float, t1: float) -> tuple[str, float, list[tuple[float, float]] | None]:
    """Draw an onset: its name, the ramp and the segments."""
    rng, dt = p.rng, p.f.dt
    k = str(rng.choice(["sudden", "creeping", "intermittent"], p=[0.55, 0.2, 0.25]))
    if k == "creeping":
        return k, float(rng.uniform(0.3, 0.9)), None
    if k == "intermittent" and t1 - t0 > 30 * dt and t1 - t0 > 600:
        segs, t = [], t0
        while t < t1:
            on = max(5 * dt, rng.uniform(60, 360))
            segs.append((t, min(t1, t + on)))
            t += on + max(3 * dt, rng.uniform(40, 240))
        return k, 0.0, segs
    return "sudden", 0.0, None


def duration(p: Plan, lo: float = 480, hi: float = 3600) -> float:
    """Seconds, never under ten samples."""
    return float(max(10 * p.f.dt, np.exp(p.rng.uniform(np.log(lo), np.log(hi)))))


def straggler(p: Plan, t: float, cause: str, again: int | None = None) -> bool:
    f, rng = p.f, p.rng
    dur = duration(p)
    jobs = p.sync_jobs(t, min(dur, 600))
    if cause == "nvlink":
        jobs = [j for j in jobs if f.b["links"][j.gpus[0]] > 0 and j.work["N"].max() > 0]
    if cause == "hbm":
        jobs = [j for j in jobs if f.hbm[j.gpus[0]]]
    if cause == "nic":
        jobs = [j for j in jobs if len(np.unique(f.node[j.gpus])) > 1]
    if again is not None:
        jobs = [j for j in jobs if again in j.gpus]
    if not jobs:
        return False
    j = jobs[int(rng.integers(len(jobs)))]
    g = again if again is not None else int(rng.choice(j.gpus))
    n = int(f.node[g])
    if p.used.get(n, -1) > t:
        return False
    t1 = min(t + dur, j.end, f.span)
    s = float(np.exp(rng.uniform(np.log(0.04), np.log(0.38))))
    if not f.prof.any() and cause in ("host", "unexplained"):  # with gauges of NVML only, less would show nowhere
        s = max(s, 0.1)
    onset, ramp, segs = shape(p, t, t1)
    i = int(np.flatnonzero(j.gpus == g)[0])
    w = {k: float(v[i]) for k, v in j.work.items()}
    step = (w["F"] ** 4 + w["B"] ** 4) ** 0.25 + w["N"] + w["X"] + w["P"] + w["H"] + w["O"]
    extra = step * s / (1 - s)
    vic = np.array([g])
    grown = 0.0
    scope = "gpu"
    if cause == "power_cap":
        v = int(rng.integers(3))
        s = max(s, 0.08)
        k = (1 - s) ** 2.1 * float(rng.uniform(0.82, 0.92))
        if v == 0:
            p.mod("plim", g, t, t1, k, "mul", ramp, segs)
        elif v == 1:
            p.mod("vrm", g, t, t1, k, "mul", ramp, segs)
        else:
            vic = f.gpus_of(n) if rng.random() < 0.6 else vic
            p.mod("brake", vic, t, t1, 1, "set", 0, segs)
            p.mod("cap", vic, t, t1, max(0.4, (1 - s) * 0.9), "mul", ramp, segs)
    elif cause == "clock":
        k = (1 - s) * float(rng.uniform(0.82, 0.93))
        p.mod("cap", g, t, t1, k, "mul", ramp, segs)
        v = int(rng.integers(3))
        if v:
            p.mod("appclk" if v == 1 else "hwslow", g, t, t1, 1, "set", 0, segs)
    elif cause == "hbm":
        total = (w["F"] ** 4 + w["B"] ** 4) ** 0.25 + extra
        k = w["B"] / max(total**4 - w["F"] ** 4, 1e-9) ** 0.25
        if rng.random() < 0.5:
            p.mod("mem", g, t, t1, k, "mul", 0, segs)
            onset = onset if segs else "sudden"
        else:
            p.mod("hbm", g, t, t1, k, "mul", ramp, segs)
    elif cause == "pcie":
        k = w["P"] / (w["P"] + extra)
        p.mod("pcie", g, t, t1, k, "mul", ramp, segs)
        if rng.random() < 0.4:
            p.states += [
                ("pcie_width" if rng.random() < 0.5 else "pcie_generation", g, a, b, float(rng.choice([1, 2, 4])))
                for a, b in (segs or [(t, t1)])
            ]
            if ramp:
                p.mods[-1].ramp, onset = 0.0, "sudden"
        elif rng.random() < 0.5:
            for x in np.arange(t, t1, 20):
                p.incs.append(("pcie_replays", x, g, float(rng.poisson(12))))
                p.incs.append(("pcie_aer_correctable", x, n, float(rng.poisson(8))))
    elif cause == "nvlink":
        k = w["N"] / (w["N"] + extra)
        p.mod("nvl", g, t, t1, k, "mul", ramp, segs)
        if rng.random() < 0.7:
            for x in np.arange(t, t1, 30):
                if segs is None or any(a <= x < b for a, b in segs):
                    p.incs.append(("nvlink_replays", x, g, float(rng.poisson(40))))
                    p.incs.append(("nvlink_crc_errors", x, g, float(rng.poisson(25))))
    elif cause == "nic":
        port = int(f.gport[g])
        vic = np.flatnonzero(f.gport == port)
        vic = vic[np.isin(vic, j.gpus)]
        k = w["X"] / (w["X"] + extra)
        p.mod("nic", vic, t, t1, max(k, 0.02), "mul", ramp, segs)
        if rng.random() < 0.4:
            p.states += [("rate_gbps", port, a, b, f.port_bw[port] / 1.25e8 / 2) for a, b in (segs or [(t, t1)])]
        if len(vic) > 1:
            scope = "node"
    elif cause == "host":
        vic = f.gpus_of(n) if rng.random() < 0.7 else vic
        vic = vic[np.isin(vic, j.gpus)]
        p.mod("host", vic, t, t1, s / (1 - s), "add", ramp, segs)
        p.mod("cpuload", [n], t, t1, float(rng.uniform(0.15, 0.6)), "add", ramp, segs)
        scope = "node" if len(vic) > 1 else "gpu"
    elif cause == "thermal":
        s = max(s, 0.06)
        power = min(f.b["tdp"][g] * (0.5 + 0.5 * min(1.0, w["F"] / step * 1.35)), f.b["tdp"][g]) * (1 - s) ** 1.9
        want = (f.b["t_sw"][g] + 2 - (f.coolant if f.liquid[g] else f.room + 5)) / power
        grown = max(0.2, want / f.R[g] - 1)
        p.mod("rth", g, t - 200, t1, max(1.2, want / f.R[g]), "mul", 0.0)
        onset = "creeping"
    else:
        p.mod("slow", vic, t, t1, 1 / (1 - s), "mul", ramp, segs)
    if len(vic) > 1 and scope == "gpu":
        scope = "node"
    more = {"members": p.members(vic)} if len(vic) > 1 else {}
    p.label(
        "straggler",
        cause,
        t,
        t1,
        n,
        g if len(vic) == 1 else None,
        severity=s,
        onset=onset,
        scope=scope,
        _job=j.name,
        _grown=grown,
        _vic=vic,
        _jobgpus=j.gpus,
        **more,
    )
    p.used[n] = t1 + 120
    p.jobbusy[j.name] = max(p.jobbusy.get(j.name, 0), t1)
    if rng.random() < 0.7:
        p.jobbusy["x" + j.name] = t1 + 300
    if again is None and t1 + 700 < f.span and rng.random() < 0.2:  # the same place again
        p.used[n] = t1 + 100
        straggler(p, t1 + float(rng.uniform(400, 1500)), cause, g)
    return True


def thermal(p: Plan, t: float, cause: str) -> bool:
    f, rng = p.f, p.rng
    dur = duration(p, 1200, 7200)
    g = p.free_gpu(t, 600, hbm=True if cause == "hbm" else None, ok=~f.liquid if cause == "fan" else None)
    if g is None or (cause == "hbm" and not f.have["memtemp"]):
        return False
    n, t1 = int(f.node[g]), min(t + dur, f.span)
    onset = "creeping" if rng.random() < 0.5 else "sudden"
    ramp = float(rng.uniform(0.3, 0.9)) if onset == "creeping" else 0.0
    s = float(np.exp(rng.uniform(np.log(0.12), np.log(1.5))))
    if cause == "cooling":
        p.mod("rth", g, t, t1, 1 + s, "mul", ramp)
        p.label("thermal", cause, t, t1, n, g, severity=s, onset=onset, scope="gpu")
    elif cause == "hbm":
        s = max(s, 0.25)
        p.mod("rhbm", g, t, t1, 1 + s, "mul", ramp)
        p.label("thermal", cause, t, t1, n, g, severity=s, onset=onset, scope="gpu")
    elif cause == "fan":
        if f.liquid[g]:
            return False
        gs = f.gpus_of(n)
        near = np.exp(-np.abs(f.slot[gs] - rng.integers(len(gs))) / 2.5)
        s = float(rng.uniform(0.15, 0.6))
        for x, k in zip(gs, near, strict=True):
            p.mod("rth", x, t, t1, 1 + s * (0.35 + 0.65 * float(k)), "mul", ramp)
        p.mod("fan", [n], t, t1, float(rng.choice([0.0, 0.45, 0.6])), "mul", 0)
        p.label("thermal", cause, t, t1, n, None, severity=s, onset=onset, scope="node", members=p.members(gs))
    else:
        rk = int(f.rack[n])
        nodes = np.flatnonzero(f.rack == rk)
        if len(nodes) < 2:
            return False
        s = float(rng.uniform(0.15, 0.6))
        gs = f.gpus_of(nodes)
        if rng.random() < 0.5:  # a pump or a door that recirculates: the inlet warms
            p.mod("inlet", gs, t, t1, float(rng.uniform(5, 14)), "add", max(ramp, 0.15))
        p.mod("rth", gs, t, t1, 1 + s, "mul", max(ramp, 0.1))
        p.label(
            "thermal",
            cause,
            t,
            t1,
            None,
            None,
            severity=s,
            onset="creeping",
            scope="rack",
            members=p.nodes_members(nodes),
        )
        for x in nodes:
            p.used[int(x)] = t1
    p.used[n] = t1
    for j in f.jobs:
        if g in j.gpus and j.start < t < j.end:
            p.jobbusy[j.name] = max(p.jobbusy.get(j.name, 0), min(t1, t + 1800))
    return True


def memory(p: Plan, t: float, cause: str) -> bool:
    f, rng, dt = p.f, p.rng, p.f.dt
    g = p.free_gpu(
        t, 300, busy=rng.random() < 0.8, hbm=True, crash=cause in ("uncorrectable", "remap_failed", "sram_threshold")
    )
    if g is None:
        return False
    n = int(f.node[g])
    more: dict[str, Any] = {}
    if cause in ("uncorrectable", "remap_failed", "sram_threshold"):
        if not p.free_for_crash(t, [g]):
            return False
        pre = rng.random()
        lead = min(t - 30, float(rng.uniform(600, 7200)))
        if pre < 0.4 and lead > 300:
            for x in np.sort(t - lead * rng.random(int(rng.integers(6, 40))) ** 1.5):
                p.incs.append(
                    (
                        "ecc_dram_corrected" if cause != "sram_threshold" else "ecc_sram_corrected",
                        float(x),
                        g,
                        float(rng.geometric(0.2)),
                    )
                )
            more = {"precursor": "ecc", "precursor_start": t - lead}
        elif pre < 0.55 and lead > 300 and cause != "sram_threshold":
            for x in np.sort(t - lead * rng.random(int(rng.integers(3, 9)))):
                p.incs += [
                    ("remapped_rows_corrected", float(x), g, 1.0),
                    ("ecc_dram_corrected", float(x), g, float(rng.integers(1, 40))),
                ]
                p.xid(float(x), g, 63, False)
            more = {"precursor": "remap", "precursor_start": t - lead}
        end: float | None = t + duration(p, 900, 6000)
        assert end is not None
        kind = "sram" if cause == "sram_threshold" else "dram"
        p.incs.append((f"ecc_{kind}_uncorrected", t, g, float(rng.integers(1, 4 if kind == "dram" else 9))))
        if cause == "uncorrectable":
            p.xid(t, g, 48)
            p.xid(t + 0.2, g, 94 if rng.random() < 0.7 else 63, False)
            p.incs.append(("remapped_rows_uncorrected", t + 1, g, 1.0))
            p.states.append(("row_remap_pending", g, t + 1, end, 1.0))
        elif cause == "remap_failed":
            p.xid(t, g, 48)
            p.xid(t + 0.3, g, 64, False)
            p.states += [("row_remap_failed", g, t, 1e9, 1.0), ("remap_banks_none", g, t, 1e9, 1.0)]
            end = 1e9
        else:
            p.xid(t, g, 48)
            p.states.append(("sram_threshold_exceeded", g, t, 1e9, 1.0))
            p.incs += [
                ("ecc_sram_uncorrected", t + k * rng.uniform(20, 400), g, 1.0) for k in range(int(rng.integers(1, 5)))
            ]
            end = 1e9
        p.states.append(("recovery_action", g, t + 1, end, float(rng.choice([1, 1, 4]))))
        p.xid(t + 0.6, g, 45)
        p.crash(t + 2, g)
        if end < f.span - 600:
            away = end + max(240, 5 * dt)
            p.reboot(end, n, away, True)
            p.crash(end, int(f.g0[n]))
            end = away
        lab_end = end if end < f.span else None
    elif cause == "ecc_storm":
        end = t + duration(p, 600, 5400)
        col = "ecc_dram_corrected" if rng.random() < 0.7 else "ecc_sram_corrected"
        rate = float(np.exp(rng.uniform(np.log(20), np.log(3000)))) / 60
        x = t
        while x < min(end, f.span):
            p.incs.append((col, x, g, float(rng.poisson(rate * 15 * rng.gamma(1.5, 0.67)))))
            x += 15
        if rng.random() < 0.4:
            p.xid(t + rng.uniform(5, 120), g, 92, False)
        lab_end = end if end < f.span else None
    else:
        end = min(f.span, t + duration(p, 2400, 10000))
        k = int(rng.integers(8, 60))
        for x in np.sort(rng.uniform(t, end, k)):
            p.incs += [
                ("remapped_rows_corrected", float(x), g, 1.0),
                ("ecc_dram_corrected", float(x), g, float(rng.integers(1, 60))),
            ]
            if rng.random() < 0.3:
                p.xid(float(x), g, 63, False)
        p.states += (
            [("remap_banks_none", g, t + (end - t) * q, 1e9, float(v)) for q, v in ((0.5, 1), (0.8, 2))]
            if k > 25
            else []
        )
        lab_end = end if end < f.span else None
    p.label(
        "memory",
        cause,
        t,
        lab_end,
        n,
        g,
        scope="gpu",
        onset="creeping" if cause == "remaps_pile_up" else "sudden",
        **more,
    )
    p.used[n] = lab_end or f.span
    return True


def link(p: Plan, t: float, cause: str) -> bool:
    f, rng = p.f, p.rng
    dur = duration(p, 480, 4000)
    t1 = min(f.span, t + dur)
    if cause in ("nvlink", "pcie_replays", "pcie_downgrade"):
        g = p.free_gpu(t, 600)
        if g is None:
            return False
        n = int(f.node[g])
        s = 0.0
        onset, more, lab_end = "sudden", {}, t1
        j = p.job_at(g, t)
        if cause == "nvlink":
            if f.b["links"][g] == 0:
                return False
            total = f.b["links"][g]
            bad = float(rng.choice([0, 1, 2, 4, total], p=[0.3, 0.25, 0.2, 0.15, 0.1]))
            if bad == total and not p.free_for_crash(t, [g]):
                bad = 1.0
            for x in np.arange(t, t1, 20):
                p.incs += [
                    ("nvlink_replays", x, g, float(rng.poisson(30))),
                    ("nvlink_crc_errors", x, g, float(rng.poisson(60 if bad == 0 else 15))),
                ]
                p.incs.append(("nvlink_recoveries", x, g, float(rng.poisson(0.15))))
            p.states.append(("_ber", g, t, t1, float(10 ** rng.uniform(-11, -8))))
            s = float(bad / total)
            if bad:
                p.states.append(("nvlink_active_links", g, t, t1, total - bad))
                p.mod("nvl", g, t, t1, max(0.08, 1 - bad / total), "mul")
                if rng.random() < 0.6 and not f.boards[n].blackwell:
                    p.xid(t, g, 74, False)
                p.kern(t + 0.1, n, "nvlink", "nvidia-nvswitch: NVLink: link down on GPU port")
            else:
                p.mod("nvl", g, t, t1, float(rng.uniform(0.6, 0.95)), "mul")
            if bad == total:
                p.crash(t + 4, g)
        elif cause == "pcie_replays":
            onset = "creeping" if rng.random() < 0.4 else "sudden"
            for x in np.arange(t, t1, 10):
                rate = rng.uniform(4, 30) * (min(1, (x - t) / (t1 - t) * 2) if onset == "creeping" else 1)
                p.incs += [
                    ("pcie_replays", x, g, float(rng.poisson(rate))),
                    ("pcie_aer_correctable", x, n, float(rng.poisson(rate))),
                ]
            for x in rng.uniform(t, t1, 5):
                p.kern(float(x), n, "aer", "pcieport: AER: Corrected error received: BadTLP Replay Timer Timeout")
            p.mod("pcie", g, t, t1, float(rng.uniform(0.5, 0.95)), "mul")
        else:
            gen = rng.random() < 0.5
            k = float(rng.choice([0.5, 0.25, 0.125]))
            if gen:
                p.states.append(("pcie_generation", g, t, t1, max(1.0, f.b["gen"][g] + np.log2(k))))
            else:
                p.states.append(("pcie_width", g, t, t1, 16 * k))
            s = 1 - k
            p.mod("pcie", g, t, t1, k, "mul")
        p.label("link", cause, t, lab_end, n, g, severity=s, onset=onset, scope="gpu", **more)
        p.used[n] = t1
        if j is not None:
            p.jobbusy[j.name] = max(p.jobbusy.get(j.name, 0), t1)
        return True
    if not f.have["link_file"]:
        return False
    jobs = [j for j in p.sync_jobs(t, 400) if len(np.unique(f.node[j.gpus])) > 1]
    if cause == "port_down":
        jobs = [j for j in jobs if p.jobbusy.get(j.name, -1) < t]
    if not jobs:
        return False
    j = jobs[int(rng.integers(len(jobs)))]
    g = int(rng.choice(j.gpus))
    n, port = int(f.node[g]), int(f.gport[g])
    if p.used.get(n, -1) > t:
        return False
    mine = np.flatnonzero(f.gport == port)
    gl = mine[0] if len(mine) == 1 else None
    t1 = min(t1, j.end)
    nic = f.port_name[port]
    if cause == "port_down":
        if not p.free_for_crash(t, [g]):
            return False
        more: dict[str, Any] = {}
        if rng.random() < 0.35 and t > 1500:
            lead = float(rng.uniform(600, min(5000, t - 60)))
            for x in np.arange(t - lead, t, 20):
                p.incs.append(("symbol_errors", x, port, float(rng.poisson(6 * max(0.0, 1 - (t - x) / lead)))))
            more = {"precursor": "link_errors", "precursor_start": t - lead}
        t1 = min(f.span, t + duration(p, 600, 4000))
        p.states.append(("link_up", port, t, t1, 0.0))
        p.incs += [("link_downed", t, port, 1.0)]
        p.kern(t, n, "nic_link", f"mlx5_core: {nic}: Link down")
        if t1 < f.span:
            p.kern(t1, n, "nic_link", f"mlx5_core: {nic}: Link up")
        hold = float(rng.uniform(20, 90))
        p.mod("hang", j.gpus, t, t + hold, 1, "set")
        p.crash(t + hold, g)
        p.label("link", cause, t, t1, n, gl, scope="gpu" if gl is not None else "node", port=nic, **more)
        p.used[n] = t1
        return True
    if cause == "ib_flap":
        x = t
        segs = []
        while x < t1:
            d = float(rng.uniform(2, 15))
            segs.append((x, x + d))
            p.incs += [
                ("link_downed", x, port, 1.0),
                ("link_error_recoveries", x, port, float(rng.integers(1, 4))),
                ("symbol_errors", x, port, float(rng.integers(5, 200))),
            ]
            p.states.append(("link_up", port, x, x + d, 0.0))
            p.kern(x, n, "nic_link", f"mlx5_core: {nic}: Link down")
            p.kern(x + d, n, "nic_link", f"mlx5_core: {nic}: Link up")
            p.mod("stall", j.gpus, x, x + d + float(rng.uniform(1, 6)), 1.0, "share")
            x += float(rng.uniform(60, 400))
        p.label("link", cause, t, t1, n, gl, scope="gpu" if gl is not None else "node", onset="intermittent", port=nic)
    elif cause == "ib_errors":
        creeping = rng.random() < 0.4
        rate = float(np.exp(rng.uniform(np.log(0.5), np.log(60))))
        for x in np.arange(t, t1, 10):
            k = rate * 10 * (min(1, (x - t) / (t1 - t) * 2) if creeping else 1)
            p.incs += [
                ("symbol_errors", x, port, float(rng.poisson(k))),
                ("local_integrity_errors", x, port, float(rng.poisson(k * 0.1))),
                ("rx_errors", x, port, float(rng.poisson(k * 0.05))),
            ]
            p.incs.append(
                ("out_of_sequence" if f.roce else "link_error_recoveries", x, port, float(rng.poisson(k * 0.02)))
            )
        loss = float(rng.uniform(0.02, 0.45))
        p.mod("nic", mine, t, t1, 1 - loss, "mul")
        p.label(
            "link",
            cause,
            t,
            t1,
            n,
            gl,
            severity=loss,
            scope="gpu" if gl is not None else "node",
            onset="creeping" if creeping else "sudden",
            port=nic,
        )
    elif cause == "congestion_port":
        k = float(rng.uniform(0.12, 0.45))
        if not _congests(p, t, ("port", port, k)):
            return False
        p.net.append((t, t1, "port", port, k))
        p.label(
            "link",
            cause,
            t,
            t1,
            n,
            gl,
            scope="gpu" if gl is not None else "node",
            severity=1 - k,
            port=nic,
            _net=("port", port, k),
        )
    else:
        worst = 1 - (f.uplinks - 1) / f.uplinks
        leaves = [int(x) for x in rng.permutation(len(f.leaf_names))[:16] if _congests(p, t, ("uplink", int(x), worst))]
        if not leaves:
            return False
        leaf = leaves[0]
        ports = np.flatnonzero(f.port_leaf == leaf)
        t1 = min(f.span, t + dur)
        able = [k for k in range(1, f.uplinks) if _congests(p, t, ("uplink", leaf, 1 - k / f.uplinks))]
        if not able:
            return False
        lost = int(able[int(len(able) * rng.random() ** 1.5)])
        p.net.append((t, t1, "uplink", leaf, 1 - lost / f.uplinks))
        nodes = np.unique(np.array(f.port_node)[ports])
        p.label(
            "link",
            cause,
            t,
            t1,
            None,
            None,
            scope="leaf",
            severity=lost / f.uplinks,
            members=p.nodes_members(nodes),
            leaf=str(f.leaf_names[leaf]),
            _net=("uplink", leaf, 1 - lost / f.uplinks),
        )
    p.used[n] = t1
    p.jobbusy[j.name] = max(p.jobbusy.get(j.name, 0), t1)
    return True


def _congests(p: Plan, t: float, fault: tuple[str, int, float]) -> bool:
    """Whether a network fault slows any exchange by a tenth or more."""
    run = [j for j in p.f.jobs if j.start <= t < j.end]
    before, after = solve(p.f, run, [], p.net_seed)[0], solve(p.f, run, [fault], p.net_seed)[0]
    return bool((after < 0.9 * before).any())


def xid(p: Plan, t: float, cause: str) -> bool:
    f, rng, dt = p.f, p.rng, p.f.dt
    black = np.array([f.boards[i].blackwell for i in f.node]) if cause == "nvlink5" else None
    g = p.free_gpu(t, 120, busy=rng.random() < 0.85, ok=black, crash=True)
    if g is None:
        return False
    n = int(f.node[g])
    if cause == "nvlink5" and not f.boards[n].blackwell:
        return False
    if cause == "spi_failure" and f.boards[n].name == "T4":
        return False
    back = t + max(12 * dt, float(rng.uniform(900, 5400)))
    more: dict[str, Any] = {}
    lead = float(rng.uniform(400, max(500.0, min(6000.0, t - 100))))
    if rng.random() < 0.4 and lead < t - 50:
        pre = str(
            rng.choice(
                ["telemetry", "link_errors", "heat", "ecc"]
                if cause == "fallen_off_bus"
                else ["telemetry", "ecc", "heat"]
            )
        )
        if pre == "telemetry":
            cols = tuple(
                rng.choice(
                    [
                        "power_w",
                        "memory_temp_c",
                        "sm_clock_mhz",
                        "memory_clock_mhz",
                        "gpu_util_ratio",
                        "pcie_replays",
                        "thermal_margin_c",
                    ],
                    int(rng.integers(1, 4)),
                    replace=False,
                )
            )
            x = t - lead
            while x < t:
                p.lost_cols.append((x, min(t, x + max(2 * dt, lead * rng.uniform(0.05, 0.3))), g, cols))
                x = p.lost_cols[-1][1] + lead * rng.uniform(0.02, 0.2)
        elif pre == "link_errors":
            for x in np.arange(t - lead, t, 15):
                k = float(rng.poisson(5 * max(0.0, 1 - (t - x) / lead)))
                p.incs += [("pcie_replays", x, g, k), ("pcie_aer_correctable", x, n, k)]
        elif pre == "heat":
            p.mod("rth", g, t - lead, t, float(rng.uniform(1.25, 1.8)), "mul", 0.9)
        else:
            for x in np.sort(t - lead * rng.random(int(rng.integers(8, 50)))):
                p.incs.append(
                    ("ecc_dram_corrected" if f.hbm[g] else "ecc_sram_corrected", float(x), g, float(rng.geometric(0.3)))
                )
        more = {"precursor": pre, "precursor_start": t - lead}
    reset_end = back
    if cause == "fallen_off_bus":
        if rng.random() < 0.5:
            p.incs.append(("pcie_aer_fatal", t, n, 1.0))
            p.kern(t - 0.1, n, "pcie", "pcieport: pciehp: Slot: Link Down")
        p.xid(t, g, 79)
        p.down_gpu.append((t, back, g))
        p.life(t + rng.uniform(2, 20), n, "gpu_lost", int(f.slot[g]))
    elif cause == "gsp_timeout":
        code = 119 if rng.random() < 0.75 else 120
        for k in range(int(rng.integers(1, 5))):
            p.xid(t + 6.5 * k, g, code)
        if rng.random() < 0.6:
            p.down_gpu.append((t + 1, back, g))
            p.life(t + rng.uniform(10, 30), n, "gpu_lost", int(f.slot[g]))
        p.states.append(("recovery_action", g, t, back, 1.0))
    elif cause == "uncontained_ecc":
        p.incs.append(("ecc_dram_uncorrected" if f.hbm[g] else "ecc_sram_uncorrected", t, g, float(rng.integers(1, 5))))
        p.xid(t, g, 95, False)
        p.xid(t + 0.4, g, 45)
        p.states.append(("recovery_action", g, t, back, 1.0))
    elif cause == "spi_failure":
        p.xid(t, g, 122, False)
        if rng.random() < 0.85:
            p.xid(t + 0.04, g, 31)
        p.states.append(("recovery_action", g, t, back, 2.0))
    else:
        code = int(rng.integers(144, 151))
        for k in range(int(rng.integers(1, 4))):
            p.xid(t + 0.3 * k, g, code, False)
        p.incs += [
            ("nvlink_recoveries", t, g, float(rng.integers(1, 6))),
            ("nvlink_crc_errors", t, g, float(rng.integers(10, 900))),
        ]
        p.states.append(("nvlink_active_links", g, t, back, float(f.b["links"][g] - rng.integers(1, 5))))
        p.states.append(("recovery_action", g, t, back, 1.0))
    hold = float(rng.uniform(1, 40)) if rng.random() < 0.6 else float(rng.uniform(60, 300))
    j = p.job_at(g, t)
    if j is not None:
        p.mod("hang", j.gpus, t, t + hold, 1, "set")
        p.mod("dead", g, t, t + hold, 1, "set")
        p.crash(t + hold, g)
    if reset_end < f.span - 300:
        p.reboot(reset_end, n, reset_end + max(200, 4 * dt, float(rng.uniform(200, 600))))
        p.crash(reset_end, int(f.g0[n]))
        reset_end = p.down_node[-1][1] + 1  # in force until its node is back
        if cause == "fallen_off_bus":
            p.life(p.down_node[-1][1] + 5, n, "gpu_back", int(f.slot[g]))
    p.label("xid", cause, t, reset_end if reset_end < f.span else None, n, g, scope="gpu", **more)
    p.used[n] = min(f.span, reset_end + 900)
    return True


def liveness(p: Plan, t: float, cause: str) -> bool:
    f, rng, dt = p.f, p.rng, p.f.dt
    mask = None
    if cause == "rack_power":
        mask = np.zeros(f.G, bool)
        for rk in np.unique(f.rack):
            ns = np.flatnonzero(f.rack == rk)
            if (
                2 <= len(ns) <= f.n * 0.5
                and all(p.used.get(int(x), -1) < t for x in ns)
                and p.free_for_crash(t, f.gpus_of(ns))
            ):
                mask[f.gpus_of(ns)] = True
    g = p.free_gpu(t, 120, busy=rng.random() < 0.8, ok=mask, crash=cause != "clock_wrong")
    if g is None or (cause != "clock_wrong" and not p.free_for_crash(t, f.gpus_of(f.node[g]))):
        return False
    n = int(f.node[g])
    t1 = t + max(12 * dt, duration(p, 480, 4000))
    end = t1 if t1 < f.span else None
    hold = float(rng.uniform(15, 240))
    if cause == "rack_power":
        nodes = np.flatnonzero(f.rack == f.rack[n])
        if (
            len(nodes) > f.n / 2
            or len(nodes) < 2
            or any(p.used.get(int(x), -1) > t for x in nodes)
            or not p.free_for_crash(t, f.gpus_of(nodes))
        ):
            return False
    else:
        nodes = np.array([n])
    if cause in ("silent", "rack_power"):
        if cause == "silent" and rng.random() < 0.3 and t > 900:
            pass
        done = set()
        for x in nodes:
            p.down_node.append((t, t1, int(x)))
            if t1 < f.span:
                p.life(t1 + rng.uniform(0, 40), int(x), "agent_started")
                p.resets.append((t1, int(x)))
            for gg in f.gpus_of(x):
                j = p.job_at(int(gg), t)
                if j is not None and j.name not in done and t + hold < j.end:
                    done.add(j.name)
                    rest = j.gpus[~np.isin(f.node[j.gpus], nodes)]
                    if len(rest) and j.waits:
                        p.mod("hang", rest, t, t + hold, 1, "set")
                    old, j.end = j.end, t + hold if j.waits else t
                    if len(rest) > 1 and t + hold + 300 < min(f.span, old):
                        f.add_job(
                            j.kind if j.kind != "pp" else "dp",
                            rest,
                            t + hold + float(rng.uniform(100, 500)),
                            old,
                            like=j if j.kind != "pp" else None,
                        )
        if cause == "silent":
            p.label("liveness", cause, t, end, n, None, scope="node")
        else:
            p.label("liveness", cause, t, end, None, None, scope="rack", members=p.nodes_members(nodes))
    elif cause == "gpu_lost":
        p.down_gpu.append((t, t1, g))
        p.life(t + rng.uniform(3, 40), n, "gpu_lost", int(f.slot[g]))
        j = p.job_at(g, t)
        if j is not None:
            p.mod("hang", j.gpus, t, t + hold, 1, "set")
            p.crash(t + hold, g)
        if t1 < f.span - 100:
            p.life(t1, n, "gpu_back", int(f.slot[g]))
        p.label("liveness", cause, t, end, n, g, scope="gpu")
    elif cause == "driver_hung":
        p.down_gpurows.append((t, t1, n))
        p.states += [("agent_sources_hung", n, t, t1, 1.0), ("source_nvml_outcome", n, t, t1, 2.0)]
        p.life(t + rng.uniform(10, 40), n, "driver_hung")
        if rng.random() < 0.6:
            p.kern(
                t + rng.uniform(100, 200),
                n,
                "hung_task",
                "INFO: task nvidia-smi:88121 blocked for more than 120 seconds.",
            )
        if t1 < f.span:
            p.life(t1, n, "driver_back")
        for gg in f.gpus_of(n):
            j = p.job_at(int(gg), t + 1)
            if j is not None and t + hold < j.end:
                p.mod("hang", j.gpus, t, t + hold, 1, "set")
                p.crash(t + hold, int(gg))
        p.label("liveness", cause, t, end, n, None, scope="node")
    else:
        off = float(rng.choice([-1, 1]) * np.exp(rng.uniform(np.log(75), np.log(900))))
        p.shifts.append((t, t1, n, off))
        p.life(t + rng.uniform(1, 20), n, "clock_wrong")
        p.label("liveness", cause, t, end, n, None, scope="node", severity=abs(off))
    for x in nodes:
        p.used[int(x)] = min(f.span, t1 + 600)
    return True


def hang(p: Plan, t: float, cause: str) -> bool:
    f, rng = p.f, p.rng
    jobs = [j for j in p.sync_jobs(t, 700, 2) if p.jobbusy.get(j.name, -1) < t]
    if not jobs:
        return False
    j = jobs[int(rng.integers(len(jobs)))]
    g = int(rng.choice(j.gpus))
    n = int(f.node[g])
    if p.used.get(n, -1) > t:
        return False
    t1 = t + min(max(10 * f.dt, float(rng.uniform(400, 1900))), f.span - t)
    t1 = min(t1, j.end)
    p.mod("hang", j.gpus, t, t1, 1, "set")
    spins = rng.random() < 0.3
    p.mod("stuck" if spins else "dead", g, t, t1, 1, "set")
    p.label("hang", cause, t, t1, n, g, scope="gpu", severity=1.0, how="spins" if spins else "idles")
    if t1 < min(j.end, f.span - 120):
        p.crash(t1, g)
    p.used[n] = t1 + 300
    return True


def drift(p: Plan, t: float, cause: str) -> bool:
    f, rng = p.f, p.rng
    g = p.free_gpu(t, 60, busy=False)
    if g is None or not f.have["inventory"] or np.sum(f.pool == f.pool[f.node[g]]) < 4:
        return False
    n, s = int(f.node[g]), int(f.slot[g])
    whole = cause in ("driver",) or rng.random() < 0.4
    gs = f.gpus_of(n) if whole else np.array([g])
    if rng.random() < 0.5 or not p.free_for_crash(t, f.gpus_of(n)):
        t = 0.0  # it was so before
        if any(rw["kind"] == "drift" and rw["node"] == f.names[n] for rw in p.labels):
            return False
    else:
        back = t + max(5 * f.dt, float(rng.uniform(200, 500)))
        p.reboot(t, n, back, True)
        p.crash(t, g)
        t = back
        p.label("liveness", "planned_reboot", back - 200, back, n, None, False, scope="node")
        if t > f.span - 900:
            return True
    sev = 0.0
    facts: dict[str, str] = {}
    if cause == "driver":
        facts["driver_version"] = "@" + str(rng.choice(["550.163.01", "565.57.01", "570.86.15"]))
    for x in gs:
        k = f"gpu{int(f.slot[x])}"
        if cause == "vbios":
            facts[f"{k}.vbios"] = "96.00.30.00.01"
        elif cause == "power_limit":
            sev = sev or float(rng.uniform(0.12, 0.45))
            lim = round(f.b["tdp"][x] * (1 - sev) / 5) * 5
            facts[f"{k}.power_limit_set_w"] = str(lim)
            p.mod("plim", x, t, 1e9, lim / f.b["tdp"][x], "mul")
        elif cause == "clock_limit":
            sev = sev or float(rng.uniform(0.08, 0.4))
            lim = round(f.b["fmax"][x] * (1 - sev) / 15) * 15
            facts[f"{k}.sm_clock_max_mhz"] = str(lim)
            p.mod("cap", x, t, 1e9, lim / f.b["fmax"][x], "mul")
            if rng.random() < 0.5:
                p.mod("appclk", x, t, 1e9, 1, "set")
        elif cause == "ecc_mode":
            facts[f"{k}.ecc_mode"] = "disabled"
    p.inv.append((t, n, facts))
    p.label(
        "drift",
        cause,
        t,
        None,
        n,
        None if whole else g,
        scope="node" if whole else "gpu",
        severity=sev,
        **({"members": p.members(gs)} if whole else {}),
    )
    p.used[n] = max(p.used.get(n, 0), t + 300)
    del s
    return True


def idle(p: Plan, t: float, cause: str) -> bool:
    f, rng = p.f, p.rng
    jobs = [
        j
        for j in f.jobs
        if j.start < t - 300
        and j.end > t + 2400
        and j.kind != "service"
        and p.jobbusy.get(j.name, -1) < t
        and len(j.gpus) <= 64
    ]
    if not jobs or t + 2400 > f.span:
        return False
    jobs.sort(key=lambda x: len(x.gpus))
    j = jobs[int(len(jobs) * rng.random() ** 1.7)]
    if any(p.used.get(int(x), -1) > t for x in np.unique(f.node[j.gpus])):
        return False
    t1 = min(j.end, f.span, t + float(rng.uniform(2400, 9000)))
    p.mod("hang", j.gpus, t, t1, 1, "set")
    p.mod("dead", j.gpus, t, t1, 1, "set")
    one = len(j.gpus) == 1
    p.label(
        "idle",
        cause,
        t,
        t1 if t1 < f.span else None,
        int(f.node[j.gpus[0]]) if one else None,
        int(j.gpus[0]) if one else None,
        scope="gpu" if one else "job",
        members=p.members(j.gpus),
    )
    for x in np.unique(f.node[j.gpus]):
        p.used[int(x)] = t1
    return True


WEIGHTS: dict[Any, dict[str, float]] = {
    straggler: {
        "power_cap": 3,
        "clock": 1.5,
        "hbm": 1.7,
        "pcie": 2,
        "nvlink": 2,
        "nic": 2.2,
        "host": 1.8,
        "thermal": 3.5,
        "unexplained": 2,
    },
    thermal: {"cooling": 2.2, "fan": 2.2, "rack": 1.5, "hbm": 2.2},
    memory: {"uncorrectable": 1.5, "remap_failed": 1.7, "ecc_storm": 1.2, "remaps_pile_up": 1.2, "sram_threshold": 1.5},
    link: {
        "nvlink": 1.4,
        "port_down": 4,
        "ib_flap": 1.7,
        "ib_errors": 1.3,
        "pcie_replays": 1.3,
        "pcie_downgrade": 1.3,
        "congestion_port": 3,
        "hot_switch": 6,
    },
    xid: {"fallen_off_bus": 1.8, "gsp_timeout": 1.8, "uncontained_ecc": 1.8, "spi_failure": 1.8, "nvlink5": 6},
    liveness: {"silent": 1.5, "gpu_lost": 1.2, "driver_hung": 1.8, "rack_power": 5, "clock_wrong": 1.3},
    hang: {"rank_stopped": 2.5},
    drift: {"driver": 1, "vbios": 1, "power_limit": 1.2, "clock_limit": 1, "ecc_mode": 1},
    idle: {"held": 2.2},
}  # relative, against how often a place for one is found
FAULTS: list[tuple[Callable[[Plan, float, str], bool], str, float]] = [
    (fn, c, w) for fn, row in WEIGHTS.items() for c, w in row.items()
]


def hard_negative(p: Plan, t: float, kind: str) -> bool:
    """One thing that only looks like a fault."""
    f, rng, dt = p.f, p.rng, p.f.dt
    jobs = [j for j in f.jobs if j.start < t - 200 and j.end > t + 400 and j.waits]
    j = jobs[int(rng.integers(len(jobs)))] if jobs else None
    lab = lambda k, c, a, b, gs, **m: p.label(k, c, a, b, None, None, False, scope="job", members=p.members(gs), **m)
    if kind == "app_crash":
        k = [
            x
            for x in f.jobs
            if x.start < t - 200 and x.end > t + 60 and p.jobbusy.get(x.name, -1) < t and x.kind not in ("held",)
        ]
        if not k:
            return False
        j = k[int(rng.integers(len(k)))]
        if any(p.used.get(int(x), -1) > t for x in np.unique(f.node[j.gpus])):
            return False
        code = int(rng.choice([13, 31, 43, 45]))
        hit = j.gpus if rng.random() < 0.5 else rng.choice(j.gpus, 1)
        for g in hit:
            p.xid(t + rng.uniform(0, 0.8), int(g), code)
            if code != 45 and rng.random() < 0.6:
                p.xid(t + 1 + rng.uniform(0, 0.5), int(g), 45)
        p.label("xid", "app_crash", t, t + 60, None, None, False, scope="job", members=p.members(j.gpus))
        p.crash(t + 1, int(j.gpus[0]), False)
    elif kind in ("reboot", "rolling_driver"):
        ns = [x for x in rng.permutation(f.n) if p.used.get(int(x), -1) < t and p.free_for_crash(t, f.gpus_of(x))]
        if not ns:
            return False
        if kind == "reboot":
            n = int(ns[0])
            back = t + max(4 * dt, float(rng.uniform(200, 900)))
            for g in f.gpus_of(n):
                p.crash(t, int(g))
            p.reboot(t, n, back, True)
            p.label("liveness", "planned_reboot", t, back, n, None, False, scope="node")
            p.used[n] = back + 300
        else:
            same = [x for x in ns if f.pool[x] == f.pool[ns[0]]][: int(rng.integers(3, 12))]
            x0, done = t, []
            ver = "580.95.05"
            for n in same:
                if x0 > f.span - 900:
                    break
                if p.used.get(int(n), -1) > x0 or not p.free_for_crash(x0, f.gpus_of(n)):
                    continue
                back = x0 + max(4 * dt, float(rng.uniform(150, 300)))
                for g in f.gpus_of(n):
                    p.crash(x0, int(g))
                p.reboot(x0, int(n), back, True)
                p.inv.append((back, int(n), {"driver_version": "@" + ver}))
                p.used[int(n)] = back + 100
                done.append(int(n))
                x0 = back + float(rng.uniform(60, 300))
            if done:
                p.label(
                    "drift", "rolling_driver", t, None, None, None, False, scope="job", members=p.nodes_members(done)
                )
    elif kind == "room_warms":
        t1 = min(f.span, t + float(rng.uniform(3000, 9000)))
        p.mod("inlet", np.arange(f.G), t, t1, float(rng.uniform(2, 6)), "add", 0.6)
        p.label(
            "thermal",
            kind,
            t,
            t1,
            None,
            None,
            False,
            scope="job",
            members=p.nodes_members(range(f.n)),
            onset="creeping",
        )
    elif kind == "rack_capped":
        rk = int(rng.integers(f.rack.max() + 1))
        nodes = np.flatnonzero(f.rack == rk)
        if any(p.used.get(int(x), -1) > t for x in nodes):
            return False
        t1 = min(f.span, t + float(rng.uniform(1500, 6000)))
        k = float(rng.choice([0.65, 0.75, 0.85]))
        p.mod("plim", f.gpus_of(nodes), t, t1, k, "mul")
        p.label(
            "straggler", kind, t, t1, None, None, False, scope="rack", members=p.nodes_members(nodes), severity=1 - k
        )
        for x in nodes:
            p.used[int(x)] = t1
    elif kind in ("single_remap", "few_ecc"):
        g = int(rng.integers(f.G))
        if not f.hbm[g] or p.used.get(int(f.node[g]), -1) > t:
            return False
        if kind == "single_remap":
            p.incs += [("remapped_rows_corrected", t, g, 1.0), ("ecc_dram_corrected", t, g, float(rng.integers(1, 20)))]
            p.xid(t, g, 63, False)
        else:
            for x in rng.uniform(t, t + 3000, int(rng.integers(2, 9))):
                p.incs.append(
                    (
                        str(rng.choice(["ecc_dram_corrected", "ecc_sram_corrected"])),
                        float(x),
                        g,
                        float(rng.integers(1, 4)),
                    )
                )
        p.label(
            "memory",
            kind,
            t,
            min(f.span, t + (120 if kind == "single_remap" else 3000)),
            int(f.node[g]),
            g,
            False,
            scope="gpu",
        )
    elif j is None:
        return False
    elif kind in ("evaluation", "batch_change"):
        t1 = min(
            j.end,
            f.span,
            t + (float(rng.uniform(180, 900)) if kind == "evaluation" else float(rng.uniform(1500, 8000))),
        )
        k = float(rng.uniform(0.35, 0.6)) if kind == "evaluation" else float(rng.uniform(0.5, 0.9))
        p.mod("work", j.gpus, t, t1, k, "mul")
        p.mod("xwork", j.gpus, t, t1, 0.1 if kind == "evaluation" else 1.0, "mul")
        if kind == "batch_change":
            p.mod("hostjob", j.gpus, t, t1, float(rng.uniform(0, 0.1)), "add")
        lab("straggler", kind, t, t1, j.gpus)
    elif kind == "checkpoint":
        x, every, first = t, float(rng.uniform(900, 2400)), t
        while x < min(j.end, f.span, t + 9000):
            d = float(rng.uniform(8, 90))
            p.mod("stall", j.gpus, x, x + d, 1.0, "share")
            p.mod("dead" if rng.random() < 0.5 else "spin1", j.gpus, x, x + d, 1, "set")
            p.mod("ckpt", np.unique(f.node[j.gpus]), x, x + d, 1.0, "add")
            x += every
        lab("hang", kind, first, min(x, f.span), j.gpus, onset="intermittent")
    elif kind == "data_stall":
        t1 = min(j.end, f.span, t + float(rng.uniform(200, 1500)))
        p.mod("hostjob", j.gpus, t, t1, float(rng.uniform(0.2, 1.5)), "add")
        lab("straggler", kind, t, t1, j.gpus)
    elif kind == "garbage_collection":
        t1 = min(j.end, f.span, t + float(rng.uniform(1800, 7200)))
        x = t
        while x < t1:
            d = float(rng.uniform(1, 6))
            p.mod("stall", j.gpus, x, x + d, 1.0, "share")
            x += float(rng.uniform(30, 150))
        lab("straggler", kind, t, t1, j.gpus, onset="intermittent")
    elif kind == "incast":
        if not f.have["link_file"]:
            return False
        t1 = min(j.end, f.span, t + float(rng.uniform(600, 3000)))
        p.mod("nic", j.gpus, t, t1, float(rng.uniform(0.6, 0.85)), "mul")
        p.mod("incast", j.gpus, t, t1, float(rng.uniform(0.05, 0.3)), "add")
        lab("link", kind, t, t1, j.gpus)
    return True


NEGATIVES = ("app_crash", "app_crash", "reboot", "rolling_driver", "room_warms", "rack_capped", "single_remap", "few_ecc", "evaluation", "batch_change",
             "checkpoint", "checkpoint", "data_stall", "garbage_collection", "incast")  # fmt: skip


def draw(f: Fleet, healthy: bool) -> Plan:
    """Draw all trouble of a fleet, in order of time."""
    p = Plan(f)
    rng = f.rng
    todo: list[tuple[float, int, Any, str]] = []
    for k in NEGATIVES:
        some = 0.35 if k in ("reboot", "rolling_driver") else 0.8
        for _ in range(int(rng.poisson(some * float(np.clip(f.n * f.hours / 50, 0.8, 4))))):
            todo.append((float(rng.uniform(300, f.span * 0.9)), 0, hard_negative, k))
    want = 0 if healthy else int(np.clip(rng.poisson(12 + f.n * f.hours / 13), 6, 40))
    w = np.array([x[2] for x in FAULTS])
    order: list[Any] = []
    while len(order) < want * 3 + 3:
        order += [FAULTS[i] for i in rng.choice(len(FAULTS), len(FAULTS), replace=False, p=w / w.sum())]
    pairs = float(rng.uniform(0, 0.3))
    times = []
    for _ in range(want * 2):
        times.append(
            times[-1] + float(rng.uniform(0, 60))
            if times and rng.random() < pairs
            else float(rng.uniform(500, f.span * 0.88))
        )
    for i, x in enumerate(times):
        todo.append((x, 1, order[i][0], order[i][1]))
    todo.sort(key=lambda a: (a[0], a[1]))
    if want:  # jobs that hold and ranks that stop need long quiet jobs: asked for first
        for fn, cause, most in ((idle, "held", 0.45), (hang, "rank_stopped", 0.4), (liveness, "rack_power", 0.3), (link, "hot_switch", 0.4),
                                (straggler, "power_cap", 0.2), (straggler, "hbm", 0.15), (link, "ib_errors", 0.15), (xid, "nvlink5", 0.3)):  # fmt: skip
            for _ in range(2):
                if rng.random() < most:
                    todo.append((float(rng.uniform(300, f.span * (0.5 if fn in (idle, hang) else 0.8))), 0, fn, cause))
        todo.sort(key=lambda a: (a[0], a[1]))
    skip = rng.permutation(len(times))
    made, seen, spare = 0, 0, []
    for x, real, fn, cause in todo:
        if real:
            seen += 1
            if made < want and (skip[seen - 1] < want or spare):
                if fn(p, x, cause):
                    made += 1
                    if skip[seen - 1] >= want:
                        spare.pop()
                else:
                    spare.append(cause)
        else:
            fn(p, x, cause)
    for j in list(f.jobs):  # uneven by nature
        a, b = max(0.0, j.start), min(j.end, f.span)
        if b - a > 300 and j.kind in ("moe", "pp", "service") and len(j.gpus) > 1:
            what = {"moe": "uneven_experts", "pp": "unbalanced_stages", "service": "replica_load"}[j.kind]
            p.label("straggler", what, a, b, None, None, False, scope="job", members=p.members(j.gpus))
    return p

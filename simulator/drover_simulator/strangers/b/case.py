"""Turn a run into files: sensors with their noise and rounding, counters, losses, labels."""

from pathlib import Path
from typing import Any

import numpy as np

from drover_simulator.strangers.b.engine import Engine
from drover_simulator.strangers.b.faults import Plan, draw
from drover_simulator.strangers.b.fleet import Fleet
from drover_simulator.strangers.b.network import solve
from drover_simulator.strangers.writer import CaseWriter, iso

GPU_COUNT = ("pcie_replays", "nvlink_crc_errors", "nvlink_replays", "nvlink_recoveries", "ecc_sram_corrected", "ecc_sram_uncorrected",
             "ecc_dram_corrected", "ecc_dram_uncorrected", "remapped_rows_corrected", "remapped_rows_uncorrected")  # fmt: skip
LASTING = {"remapped_rows_corrected", "remapped_rows_uncorrected"}
LINK_COUNT = ("symbol_errors", "link_downed", "link_error_recoveries", "rx_errors", "tx_discards", "local_integrity_errors", "buffer_overruns",
              "out_of_sequence", "packet_sequence_errors", "rnr_nak_retries", "ack_timeouts")  # fmt: skip
NODE_COUNT = (
    "pcie_aer_correctable",
    "pcie_aer_fatal",
    "edac_corrected",
    "edac_uncorrected",
    "oom_kills",
    "agent_read_failures",
    "agent_missed_ticks",
)
F64 = np.float64


def _fleet_json(f: Fleet, t: Any) -> dict[str, Any]:
    nodes = []
    for i in range(f.n):
        row: dict[str, Any] = {"name": f.names[i], "rack": "" if f.blank_rack else f"rack{f.rack[i]:02d}", "leaf": "", "pool": f"pool{f.pool[i]}", "sku": f.boards[i].name, "gpus": int(f.ng[i])}  # fmt: skip
        ports = [k for k in range(f.NP) if f.port_node[k] == i]
        if not f.blank_leaf and (not f.rail or len(ports) == 1):
            row["leaf"] = str(f.leaf_names[f.port_leaf[ports[0]]])
        if f.have["links"] and f.have["link_file"]:
            row["links"] = [{"link": f.port_name[k], "gpu": f.port_gpu[k], "leaf": "" if f.blank_leaf else str(f.leaf_names[f.port_leaf[k]])} for k in ports]  # fmt: skip
        nodes.append(row)
    jobs = []
    for j in sorted(f.jobs, key=lambda x: x.start):
        if j.listed and j.start < f.span and j.end > j.start + 1:
            jobs.append({"id": j.name, "start": iso(t(j.start)), "end": None if j.end > f.span else iso(t(j.end)), "members": [[f.names[f.node[g]], int(f.slot[g])] for g in j.gpus]})  # fmt: skip
    return {"nodes": nodes, "jobs": jobs}


def _natural(p: Plan) -> None:
    """Trouble without a label: reloads, agents that restart, small clock steps, background errors."""
    f, rng = p.f, p.rng
    for _ in range(rng.poisson(f.n * f.hours / 150)):
        n, t = int(rng.integers(f.n)), float(rng.uniform(100, f.span))
        p.life(t, n, "agent_stopped")
        p.down_node.append((t, t + float(rng.uniform(3, 25)), n))
        p.life(p.down_node[-1][1], n, "agent_started")
    for _ in range(rng.poisson(f.n * f.hours / 120)):
        n, t = int(rng.integers(f.n)), float(rng.uniform(100, f.span))
        p.shifts.append((t, t + float(rng.uniform(200, 4000)), n, float(rng.uniform(-8, 8))))
    for col, rate in (
        ("ecc_dram_corrected", 0.004),
        ("pcie_replays", 0.02),
        ("nvlink_replays", 0.01),
        ("nvlink_crc_errors", 0.006),
    ):
        bad = rng.random(f.G) < 0.05
        for _ in range(rng.poisson(rate * f.G * f.hours)):
            g = int(rng.choice(np.flatnonzero(bad))) if bad.any() and rng.random() < 0.6 else int(rng.integers(f.G))
            p.incs.append((col, float(rng.uniform(0, f.span)), g, float(rng.geometric(0.5))))
    for col, rate in (
        ("symbol_errors", 0.15),
        ("rx_errors", 0.01),
        ("out_of_sequence", 0.1 if f.roce else 0),
        ("rnr_nak_retries", 0.02),
        ("tx_discards", 0.01),
    ):
        for _ in range(rng.poisson(rate * f.NP * f.hours)):
            p.incs.append((col, float(rng.uniform(0, f.span)), int(rng.integers(f.NP)), float(rng.geometric(0.6))))
    for col, rate in (
        ("pcie_aer_correctable", 0.05),
        ("edac_corrected", 0.02),
        ("agent_read_failures", 0.02),
        ("agent_missed_ticks", 0.02),
    ):
        for _ in range(rng.poisson(rate * f.n * f.hours)):
            p.incs.append((col, float(rng.uniform(0, f.span)), int(rng.integers(f.n)), float(rng.geometric(0.6))))


class _Counters:
    """Counters of one scope with events, carried from chunk to chunk."""

    def __init__(self, p: Plan, cols: tuple[str, ...], size: int, start: dict[str, np.ndarray]) -> None:
        self.value = {c: start.get(c, np.zeros(size)).astype(F64) for c in cols}
        self.by: dict[str, Any] = {}
        for c in cols:
            rows = [(t, i, k) for name, t, i, k in p.incs if name == c and k > 0]
            self.by[c] = np.array(sorted(rows), F64).reshape(-1, 3)

    def add(
        self, col: str, inc: np.ndarray | None, t0: float, dt: float, n: int, resets: list[tuple[int, Any]]
    ) -> np.ndarray:
        base = self.value[col]
        m = np.zeros((n, len(base))) if inc is None else inc.astype(F64)
        ev = self.by[col]
        ev = ev[(ev[:, 0] > t0) & (ev[:, 0] <= t0 + n * dt)]
        if len(ev):
            np.add.at(
                m, (np.clip(np.ceil((ev[:, 0] - t0) / dt).astype(int) - 1, 0, n - 1), ev[:, 1].astype(int)), ev[:, 2]
            )
        m = np.cumsum(m, 0) + base
        if col not in LASTING:
            for k, idx in resets:
                m[k:, idx] -= m[k, idx]
        self.value[col] = m[-1].copy()
        return m


def write_case(folder: Path, seed: int, *, nodes: int | None = None, hours: float | None = None, interval_s: float | None = None,
               healthy: bool = False, boards: str | None = None) -> dict[str, int]:  # fmt: skip
    """Write one case; return counts."""
    rng = np.random.default_rng([20260, seed])
    f = Fleet(rng, nodes, hours, interval_s, boards)
    p = draw(f, healthy)
    _natural(p)
    ms = lambda t: f.t0_ms + 1000 * t
    out = CaseWriter(Path(folder), {"generator": "stranger b", **_fleet_json(f, ms)})
    counts = _rows(f, p, out, rng)
    counts |= _lines(f, p, out, rng, ms)
    out.close()
    return counts


def _rows(f: Fleet, p: Plan, w: CaseWriter, rng: np.random.Generator) -> dict[str, int]:
    e = Engine(p)
    G, dt, b, have = f.G, f.dt, f.b, f.have
    names = np.array(f.names, object)
    links = b["links"] > 0
    any_hbm, any_nv = bool(f.hbm.any()), bool(links.any())
    start = {"pcie_replays": rng.poisson(2, G), "ecc_dram_corrected": rng.poisson(0.15, G) * rng.integers(1, 30, G), "remapped_rows_corrected": (rng.random(G) < 0.05) * rng.integers(1, 4, G),
             "nvlink_replays": rng.poisson(0.3, G), "remapped_rows_uncorrected": (rng.random(G) < 0.02) * 1}  # fmt: skip
    gc = _Counters(
        p,
        (*GPU_COUNT, "energy_j", "thr_p", "thr_t", "thr_h", "thr_b"),
        G,
        {
            **start,
            "energy_j": rng.uniform(1e6, 4e9, G),
            "thr_p": rng.uniform(0, 1e11, G),
            "thr_t": rng.uniform(0, 1e8, G),
        },
    )
    lc = _Counters(p, (*LINK_COUNT, "rx_bytes", "tx_bytes", "tx_wait", "cnp_sent", "cnp_handled"), f.NP, {"rx_bytes": rng.uniform(1e12, 9e15, f.NP), "tx_bytes": rng.uniform(1e12, 9e15, f.NP), "tx_wait": rng.uniform(1e6, 1e12, f.NP), "symbol_errors": rng.poisson(3, f.NP), "link_downed": rng.poisson(1, f.NP), "cnp_sent": rng.uniform(0, 1e9, f.NP), "cnp_handled": rng.uniform(0, 1e9, f.NP)})  # fmt: skip
    nc = _Counters(
        p, NODE_COUNT, f.n, {"pcie_aer_correctable": rng.poisson(3, f.n), "edac_corrected": rng.poisson(0.5, f.n)}
    )
    toff = rng.normal(0, 1.0, G)
    poff = rng.normal(1, 0.012, G)
    clock = rng.uniform(-0.02, 0.02, f.n)
    phase = rng.uniform(0, min(dt, 10) * 0.9, f.n) if rng.random() < 0.6 else np.zeros(f.n)
    fbo = rng.normal(1, 0.006, G)
    mem_total = rng.choice([5.4e11, 1.08e12, 2.16e12]) * np.ones(f.n)
    root = rng.uniform(0.1, 0.7, f.n)
    rx_share = rng.uniform(0.96, 1.0)
    n_gpu = n_link = n_node = 0
    load1 = np.zeros(f.n)
    noise = lambda m, s: 1 + s * rng.standard_normal(m.shape, dtype=np.float32)
    for a, o, no in e.chunks():
        n = len(o["power"])
        t0 = a * dt
        ts = t0 + dt * np.arange(n)
        cell = lambda t: int(np.clip(np.ceil((t - t0) / dt) - 1, 0, n))
        res = [(cell(t), nd) for t, nd in p.resets if t0 < t <= t0 + n * dt]
        rg = [(k, f.gpus_of(nd)) for k, nd in res if k < n]
        rp = [(k, np.flatnonzero(np.array(f.port_node) == nd)) for k, nd in res if k < n]
        rn = [(k, np.array([nd])) for k, nd in res if k < n]

        def state(col: str, base: np.ndarray, n: int = n, cell: Any = cell) -> np.ndarray:
            m = np.tile(np.asarray(base, F64), (n, 1)) if np.ndim(base) == 1 else np.asarray(base, F64).copy()
            for c, i, x0, x1, v in p.states:
                if c == col:
                    m[cell(x0) : cell(x1), i] = v
            return m

        # which rows arrive
        upn = np.ones((n, f.n), bool)
        for x0, x1, nd in p.down_node:
            upn[cell(x0) : cell(x1), nd] = False
        runs = rng.random((n, f.n)) < 0.0015
        upn &= ~runs
        more = runs & (rng.random((n, f.n)) < 0.35)
        upn[1:] &= ~more[:-1]
        upg = upn[:, f.node] & (rng.random((n, G)) > 0.0003)
        for x0, x1, g in p.down_gpu:
            upg[cell(x0) : cell(x1), g] = False
        for x0, x1, nd in p.down_gpurows:
            upg[cell(x0) : cell(x1), f.g0[nd] : f.g0[nd + 1]] = False
        # a node that is away draws nothing
        jit = rng.normal(0, 0.02, (n, f.n)) + np.where(rng.random((n, f.n)) < 0.001, rng.uniform(-3, 3, (n, f.n)), 0)
        tsn = ts[:, None] + dt + phase + jit
        off = np.tile(clock, (n, 1))
        for x0, x1, nd, d in p.shifts:
            tsn[cell(x0) : cell(x1), nd] += d
            off[cell(x0) : cell(x1), nd] += d
        tsm = np.round(f.t0_ms + 1000 * tsn).astype(np.int64)
        c: dict[str, np.ndarray] = {}
        has = o["has"] > 0
        c["sm_clock_mhz"] = np.round(o["clk"] / 15) * 15
        c["memory_clock_mhz"] = np.round(o["mclk"])
        if have["reasons"]:
            c["clock_event_reasons"] = o["reasons"]
        if have["throttle"]:
            for col, k in (
                ("throttle_power_us", "thr_p"),
                ("throttle_thermal_sw_us", "thr_t"),
                ("throttle_thermal_hw_us", "thr_h"),
                ("throttle_brake_us", "thr_b"),
            ):
                c[col] = np.round(gc.add(k, o[k] * 1e6, t0, dt, n, rg))
        c["power_w"] = np.round(o["power"] * poff * noise(o["power"], 0.008), 1)
        c["power_limit_w"] = np.round(o["plim"], 1)
        if have["energy"]:
            c["energy_j"] = np.round(gc.add("energy_j", o["pavg"] * poff * dt, t0, dt, n, rg), 3)
        c["gpu_temp_c"] = np.round(o["temp"] + toff + 0.3 * rng.standard_normal(o["temp"].shape))
        if have["memtemp"] and any_hbm:
            c["memory_temp_c"] = np.where(
                f.hbm, np.round(o["mtemp"] + 0.5 * toff + 0.3 * rng.standard_normal(o["temp"].shape)), np.nan
            )
        if have["margin"]:
            c["thermal_margin_c"] = np.round(b["t_sw"] + 1) - c["gpu_temp_c"]
        prof = f.prof.any()
        util = np.clip(o["util"] * noise(o["util"], 0.004), 0, 1)
        c["gpu_util_ratio"] = np.round(util, 2)
        c["memory_util_ratio"] = np.round(np.clip(o["mutil"] * noise(util, 0.03), 0, 1), 2)
        c["framebuffer_used_bytes"] = (
            np.round(np.where(has, 0.6e9 + np.minimum(o["used"] * fbo, 0.98) * (b["mem"] - 1.2e9), 0.55e9) / 2**20)
            * 2**20
        )
        c["framebuffer_total_bytes"] = np.tile(np.round(b["mem"]), (n, 1))
        na = np.where(f.prof, 1.0, np.nan)
        if prof:
            fin = lambda k, s: np.round(np.clip(o[k] * noise(o[k], s), 0, 1), 4) * na
            c["sm_active_ratio"], c["tensor_active_ratio"], c["dram_active_ratio"] = (
                fin("sm", 0.008),
                fin("tensor", 0.008),
                fin("dram", 0.01),
            )
            if have["occupancy"]:
                c["sm_occupancy_ratio"] = np.round(o["sm"] * 0.31 * noise(util, 0.02), 4) * na
            if have["fp"]:
                c["fp32_active_ratio"] = np.round(o["sm"] * 0.07 * noise(util, 0.03), 4) * na
                c["fp16_active_ratio"] = np.round(o["sm"] * 0.03 * noise(util, 0.03), 4) * na
                c["fp64_active_ratio"] = np.zeros_like(util, dtype=F64) * na
        if have["traffic"]:
            c["pcie_tx_bytes_per_s"] = np.round((o["ptx"] * noise(util, 0.02) + 2e5) * np.where(has, 1, 0.2))
            c["pcie_rx_bytes_per_s"] = np.round((o["prx"] * noise(util, 0.02) + 3e5) * np.where(has, 1, 0.2))
            if any_nv and prof:
                c["nvlink_tx_bytes_per_s"] = np.round(o["nvl"] * noise(util, 0.012)) * np.where(links, na, np.nan)
                c["nvlink_rx_bytes_per_s"] = np.round(o["nvl"] * noise(util, 0.012)) * np.where(links, na, np.nan)
        gen = np.where(~has & ~f.hbm, 1.0, b["gen"])
        c["pcie_generation"], c["pcie_width"] = state("pcie_generation", gen), state("pcie_width", np.full(G, 16.0))
        for col in GPU_COUNT:
            m = gc.add(col, None, t0, dt, n, rg)
            if col.startswith("nvlink"):
                if not (any_nv and have["nvlerr"]):
                    continue
                m = np.where(links, m, np.nan)
            elif "remapped" in col or "dram" in col:
                if not any_hbm or ("remapped" in col and not have["remap"]):
                    continue
                m = np.where(f.hbm, m, np.nan)
            c[col] = m
        if any_nv:
            c["nvlink_active_links"] = np.where(links, state("nvlink_active_links", b["links"]), np.nan)
            if any(x.blackwell for x in f.boards) and have["nvlerr"]:
                bw = np.array([f.boards[i].blackwell for i in f.node])
                c["nvlink_effective_ber"] = np.where(bw, state("_ber", np.full(G, 1e-15)), np.nan)
        c["sram_threshold_exceeded"] = state("sram_threshold_exceeded", np.zeros(G))
        if any_hbm and have["remap"]:
            hb = np.where(f.hbm, 0.0, np.nan)
            c["row_remap_pending"] = state("row_remap_pending", hb)
            c["row_remap_failed"] = state("row_remap_failed", hb)
            c["remap_banks_none"] = state("remap_banks_none", hb)
            c["remap_banks_max"] = np.where(
                f.hbm, 640.0 - c["remapped_rows_corrected"] - c["remapped_rows_uncorrected"], np.nan
            )
        c["recovery_action"] = state("recovery_action", np.zeros(G))
        if have["procs"]:
            c["compute_processes"] = has.astype(F64)
        odd = np.flatnonzero(rng.random(n * G) < 2e-6)
        for k in odd:
            col, v = [("power_w", 0.0), ("gpu_temp_c", 255.0)][int(rng.integers(2))]
            c[col].reshape(-1)[k] = v
        for x0, x1, g, cols in p.lost_cols:
            for col in cols:
                if col in c:
                    c[col] = c[col].astype(F64)
                    c[col][cell(x0) : cell(x1), g] = np.nan
        flat = np.flatnonzero(upg.ravel())
        flat = _disorder(flat, rng)
        if len(flat):
            w.rows(
                "gpu",
                tsm[:, f.node].ravel()[flat],
                names[f.node][flat % G],
                {k: v.ravel()[flat].astype(F64) for k, v in c.items()},
                second=f.slot[flat % G],
            )
            n_gpu += len(flat)
        if have["link_file"]:
            n_link += _links(f, p, w, rng, o, no, lc, t0, n, state, upn, tsm, rp, rx_share, names)
        if have["node"]:
            n_node += _nodes(f, p, w, rng, o, no, nc, t0, n, state, upn, tsm, off, rn, names, mem_total, root, load1)
    p.labels = _measured(f, p, e)
    return {"gpu_rows": n_gpu, "link_rows": n_link, "node_rows": n_node}


def _disorder(flat: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Repeat a few rows, and let a few come late."""
    again = flat[rng.random(len(flat)) < 0.0001]
    key = np.arange(len(flat)) + np.where(rng.random(len(flat)) < 0.0004, rng.integers(50, 3000, len(flat)), 0)
    return np.concatenate([flat[np.argsort(key, kind="stable")], again])


def _links(
    f: Fleet,
    p: Plan,
    w: CaseWriter,
    rng: Any,
    o: Any,
    no: Any,
    lc: _Counters,
    t0: float,
    n: int,
    state: Any,
    upn: Any,
    tsm: Any,
    rp: Any,
    rx_share: float,
    names: Any,
) -> int:
    dt, NP = f.dt, f.NP
    pn = np.array(f.port_node)
    order = np.argsort(f.gport, kind="stable")
    cuts = np.searchsorted(f.gport[order], np.arange(NP))
    per = lambda m: np.add.reduceat(m[:, order].astype(F64), cuts, axis=1)
    mean = np.bincount(f.gport, minlength=NP)
    nic, queue, inc = per(o["nic"]), per(o["queue"]) / mean, per(o["incast"]) / mean
    busy = np.minimum(1, nic / f.port_bw)
    rnd = lambda s: np.maximum(0, 1 + s * rng.standard_normal((n, NP)))
    c: dict[str, np.ndarray] = {}
    up = state("link_up", np.ones(NP))
    c["link_up"] = up
    c["rate_gbps"] = state("rate_gbps", f.port_bw / 1.25e8)
    ck = no["ckpt"][:, pn] * 1.5e9
    c["tx_bytes"] = np.round(lc.add("tx_bytes", (nic * rnd(0.01) + 2e4 + ck) * dt * up, t0, dt, n, rp))
    c["rx_bytes"] = np.round(lc.add("rx_bytes", (nic * rx_share * rnd(0.01) + 3e4) * dt * up, t0, dt, n, rp))
    c["tx_wait"] = np.round(lc.add("tx_wait", (queue * 0.7 + busy * inc * 0.4) * rnd(0.25) * dt * 2.5e8, t0, dt, n, rp))
    for col in LINK_COUNT:
        if f.roce and col in ("buffer_overruns",):
            continue
        c[col] = lc.add(col, None, t0, dt, n, rp)
    if f.roce:
        cnp = (queue * 4000 + busy * inc * 900) * dt
        c["cnp_handled"] = np.round(lc.add("cnp_handled", rng.poisson(cnp), t0, dt, n, rp))
        c["cnp_sent"] = np.round(lc.add("cnp_sent", rng.poisson(cnp * 0.9), t0, dt, n, rp))
    flat = _disorder(np.flatnonzero(upn[:, pn].ravel()), rng)
    if len(flat):
        w.rows(
            "link",
            tsm[:, pn].ravel()[flat],
            names[pn][flat % NP],
            {k: v.ravel()[flat].astype(F64) for k, v in c.items()},
            second=np.array(f.port_name, object)[flat % NP],
        )
    return len(flat)


def _nodes(
    f: Fleet,
    p: Plan,
    w: CaseWriter,
    rng: Any,
    o: Any,
    no: Any,
    nc: _Counters,
    t0: float,
    n: int,
    state: Any,
    upn: Any,
    tsm: Any,
    off: Any,
    rn: Any,
    names: Any,
    total: Any,
    root: Any,
    load1: Any,
) -> int:
    N, dt, have = f.n, f.dt, f.have
    rnd = lambda s: np.maximum(0, 1 + s * rng.standard_normal((n, N)))
    busy = np.add.reduceat(o["has"].astype(F64), f.g0[:-1], axis=1) / f.ng
    nic = np.add.reduceat(o["nic"].astype(F64), f.g0[:-1], axis=1)
    c: dict[str, np.ndarray] = {}
    c["cpu_util_ratio"] = np.round(np.clip(no["cpu"] * rnd(0.06), 0, 1), 4)
    k = 1 - np.exp(-dt / 60)
    ld = np.zeros((n, N))
    for i in range(n):
        load1 += (no["cpu"][i] * 160 - load1) * k
        ld[i] = load1
    c["load1"] = np.round(ld * rnd(0.03), 2)
    c["memory_total_bytes"] = np.tile(total, (n, 1))
    c["memory_available_bytes"] = np.round(total * (0.93 - 0.35 * busy) * rnd(0.004) / 4096) * 4096
    c["disk_read_bytes_per_s"] = np.round(busy * 2e7 * rng.gamma(0.7, 1.4, (n, N)))
    c["disk_write_bytes_per_s"] = np.round((2e5 + busy * 2e6) * rng.gamma(0.7, 1.4, (n, N)) + no["ckpt"] * 8e8)
    c["root_used_ratio"] = np.round(np.tile(root, (n, 1)) + 1e-7 * t0, 4)
    net = nic if f.roce else 0
    c["net_rx_bytes_per_s"] = np.round(net * rnd(0.02) + (1e5 + busy * 3e7) * rng.gamma(2, 0.5, (n, N)))
    c["net_tx_bytes_per_s"] = np.round(
        net * rnd(0.02) + (1e5 + busy * 1e7) * rng.gamma(2, 0.5, (n, N)) + no["ckpt"] * 9e8
    )
    if have["inlet"]:
        c["inlet_temp_c"] = np.round(no["inletn"] + 0.15 * rng.standard_normal((n, N)), 1)
    c["clock_offset_s"] = np.round(off + 0.002 * rng.standard_normal((n, N)), 6)
    for col in NODE_COUNT:
        c[col] = nc.add(col, None, t0, dt, n, rn)
    c["agent_cpu_ratio"] = np.round(0.012 * rnd(0.15), 4)
    c["agent_rss_bytes"] = np.round(4.2e7 * rnd(0.002) / 4096) * 4096
    c["spool_bytes"] = np.round(4e4 * rnd(0.5))
    if have["fans"] and not f.liquid.all():
        air = ~f.liquid[f.g0[:-1]]
        c["fan_min_rpm"] = np.where(air, np.round(no["fanr"] * 14000 * rnd(0.01) / 10) * 10, np.nan)
        c["fans_failed"] = np.where(air, (no["fanr"] < 0.02).astype(F64), np.nan)
    c["agent_tick_s"] = np.round(0.03 * rnd(0.3) + 0.002, 4)
    c["agent_sources_failing"] = np.zeros((n, N))
    c["agent_sources_hung"] = state("agent_sources_hung", np.zeros(N))
    if have["sources"]:
        c["source_nvml_outcome"] = state("source_nvml_outcome", np.zeros(N))
        c["source_nvml_read_s"] = np.round(np.where(c["source_nvml_outcome"] > 0, 10.0, 0.02 * rnd(0.3)), 4)
    flat = _disorder(np.flatnonzero(upn.ravel()), rng)
    if len(flat):
        w.rows("node", tsm.ravel()[flat], names[flat % N], {k2: v.ravel()[flat].astype(F64) for k2, v in c.items()})
    return len(flat)


def _slows(f: Fleet, p: Plan, r: dict[str, Any]) -> bool:
    """Whether a network fault slows an exchange at least a third of its time, by the jobs that ran in the end."""
    seen = 0
    for t in np.linspace(r["start"] + 1, r["end"] - 1, 9):
        run = [j for j in f.jobs if j.start <= t < j.end]
        others = [(a[2], a[3], a[4]) for a in p.net if a[0] <= t < a[1] and (a[2], a[3], a[4]) != r["_net"]]
        without, with_it = solve(f, run, others, p.net_seed)[0], solve(f, run, [*others, r["_net"]], p.net_seed)[0]
        seen += bool((with_it < 0.9 * without).any())
    return seen >= 3


def _measured(f: Fleet, p: Plan, e: Engine) -> list[dict[str, Any]]:
    """Labels with the slowdown that the run had; those that slowed nothing go."""
    keep = []
    for r in p.labels:
        if r["kind"] == "straggler" and "_vic" in r:
            on = [x for x in e.severity.get(r["id"], []) if x[1] > 0.012]
            sev = float(np.mean([x[1] for x in on])) if on else 0.0
            if len(on) < 5 or sev < 0.025:  # others are slower still, or it passed too soon: no straggler
                if r["_grown"] > 0:
                    r |= {"kind": "thermal", "cause": "cooling", "severity": r["_grown"]}
                else:
                    r |= {"hardware": False, "cause": r["cause"] + "_unfelt", "severity": round(sev, 4)}
            else:
                r["severity"] = round(sev, 4)
                r["start"] = max(r["start"], on[0][0])
                r["end"] = min(r["end"], on[-1][0] + f.dt)
        if "_net" in r and not _slows(f, p, r):
            r |= {"hardware": False, "cause": r["cause"] + "_unfelt"}
        if r["end"] is not None and r["end"] <= r["start"]:
            continue
        if r["hardware"] and (f.span if r["end"] is None else min(f.span, r["end"])) - r["start"] < 5 * f.dt:
            r |= {"hardware": False, "cause": r["cause"] + "_short"}
        keep.append(r)
    return keep


def _lines(f: Fleet, p: Plan, w: CaseWriter, rng: Any, ms: Any) -> dict[str, int]:
    for t, n, g, kind, code, msg in p.events:
        if 0 <= t < f.span:
            w.event(ms(t), f.names[n], g, kind, code, msg)
    for r in p.labels:
        row = {k: v for k, v in r.items() if not k.startswith("_")}
        row["severity"] = round(float(row["severity"]), 4)
        row["start"] = ms(max(0.0, row["start"]))
        row["end"] = None if row["end"] is None or row["end"] >= f.span else ms(row["end"])
        if "precursor_start" in row:
            row["precursor_start"] = iso(ms(max(0.0, row["precursor_start"])))
        w.label(**row)
    if f.have["inventory"]:
        base: list[dict[str, str]] = []
        vb = {
            x.name: f"9{int(rng.integers(2, 7))}.00.{int(rng.integers(10, 99)):02d}.00.0{int(rng.integers(1, 9))}"
            for x in f.boards
        }
        ver = str(rng.choice(["570.172.08", "535.247.01", "550.127.08", "580.65.06"]))
        for i in range(f.n):
            bd = f.boards[i]
            d = {"driver_version": ver, "kernel": "5.15.0-1078-nvidia", "cuda_version": "12.8"}
            for s in range(int(f.ng[i])):
                d |= {f"gpu{s}.name": "NVIDIA " + bd.name, f"gpu{s}.vbios": vb[bd.name], f"gpu{s}.power_limit_set_w": str(int(bd.tdp)), f"gpu{s}.ecc_mode": "enabled",
                      f"gpu{s}.sm_clock_max_mhz": str(int(bd.fmax)), f"gpu{s}.uuid": f"GPU-{i:04x}{s:02x}{int(rng.integers(1 << 30)):08x}"}  # fmt: skip
                if not f.have["links"] and f.ports_per_gpu:
                    d[f"gpu{s}.nic"] = f.port_name[f.gport[f.g0[i] + s]]
            base.append(d)
        for t, n, facts in sorted(p.inv, key=lambda x: x[0]):
            if t <= 0:
                base[n] |= {k: v.lstrip("@") for k, v in facts.items()}
        for i in range(f.n):
            w.inventory(ms(-259200), f.names[i], base[i])
        for t, n, facts in sorted(p.inv, key=lambda x: x[0]):
            if 0 < t < f.span:
                base[n] = base[n] | {k: v.lstrip("@") for k, v in facts.items()}
                w.inventory(ms(t), f.names[n], base[n])
    hw = [r for r in p.labels if r["hardware"]]
    return {
        "nodes": f.n,
        "gpus": f.G,
        "samples": f.T,
        "jobs": len(f.jobs),
        "labels": len(p.labels),
        "faults": len(hw),
        "events": len(p.events),
    }

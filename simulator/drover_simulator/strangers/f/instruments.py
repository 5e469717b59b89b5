"""What telemetry sees of it: columns by fleet, noise and rounding by sensor, counters, gaps, lost and late rows."""

from __future__ import annotations

import numpy as np

from drover_simulator.strangers.f.sim import LINK_RATES, Plan
from drover_simulator.strangers.f.world import Fleet

RATE_COLUMNS = {
    "q_pcie": "pcie_replays",
    "q_crc": "nvlink_crc_errors",
    "q_nvr": "nvlink_replays",
    "q_nvrec": "nvlink_recoveries",
    "q_edc": "ecc_dram_corrected",
    "q_esc": "ecc_sram_corrected",
}
BUMPED = ("ecc_dram_uncorrected", "ecc_sram_uncorrected", "remapped_rows_corrected", "remapped_rows_uncorrected")
LINK_COLUMNS = dict(
    zip(
        LINK_RATES,
        (
            "symbol_errors",
            "link_error_recoveries",
            "rx_errors",
            "tx_discards",
            "local_integrity_errors",
            "out_of_sequence",
            "packet_sequence_errors",
            "rnr_nak_retries",
            "ack_timeouts",
            "cnp_sent",
            "cnp_handled",
        ),
        strict=True,
    )
)
THROTTLE = ("throttle_power_us", "throttle_thermal_sw_us", "throttle_thermal_hw_us", "throttle_brake_us")
NVLINK = ("nvlink_active_links", "nvlink_crc_errors", "nvlink_replays", "nvlink_recoveries")
ECC = ("ecc_sram_corrected", "ecc_sram_uncorrected", "ecc_dram_corrected", "ecc_dram_uncorrected")
REMAP = ("remapped_rows_corrected", "remapped_rows_uncorrected", "row_remap_pending", "row_remap_failed")


def draw_columns(rng, f: Fleet) -> set[str]:
    """Which columns this fleet has at all."""
    c = {"sm_clock_mhz", "power_w", "gpu_temp_c", "gpu_util_ratio"}

    def some(p, *names):
        if rng.random() < p:
            c.update(names)

    some(0.85, "memory_temp_c")
    some(0.75, "clock_event_reasons")
    some(0.65, *THROTTLE)
    some(0.85, "power_limit_w")
    some(0.7, "energy_j")
    some(0.5, "thermal_margin_c")
    some(0.6, "memory_util_ratio")
    some(0.8, "memory_clock_mhz")
    some(0.9, "framebuffer_used_bytes", "framebuffer_total_bytes")
    some(
        0.72,
        "sm_active_ratio",
        "sm_occupancy_ratio",
        "tensor_active_ratio",
        "dram_active_ratio",
        "pcie_tx_bytes_per_s",
        "pcie_rx_bytes_per_s",
        "nvlink_tx_bytes_per_s",
        "nvlink_rx_bytes_per_s",
    )
    if "sm_active_ratio" in c:
        some(0.4, "fp16_active_ratio", "fp32_active_ratio", "fp64_active_ratio")
    some(0.85, "pcie_generation", "pcie_width", "pcie_replays")
    some(0.8, *NVLINK)
    some(0.4, "nvlink_effective_ber")
    some(0.9, *ECC)
    some(0.9, *REMAP)
    if "row_remap_failed" in c:
        some(0.5, "remap_banks_max", "remap_banks_none")
    some(0.5, "sram_threshold_exceeded")
    some(0.5, "recovery_action")
    some(0.4, "fabric_state")
    some(0.65, "compute_processes")
    return c


def draw_node_columns(rng) -> set[str]:
    c = {"cpu_util_ratio", "load1", "memory_available_bytes", "memory_total_bytes"}
    for p, names in (
        (0.7, ("disk_read_bytes_per_s", "disk_write_bytes_per_s")),
        (0.7, ("root_used_ratio",)),
        (0.8, ("net_rx_bytes_per_s", "net_tx_bytes_per_s")),
        (0.85, ("inlet_temp_c",)),
        (0.85, ("clock_offset_s",)),
        (0.7, ("pcie_aer_correctable", "pcie_aer_fatal")),
        (0.7, ("edac_corrected", "edac_uncorrected")),
        (0.6, ("oom_kills",)),
        (0.6, ("agent_cpu_ratio", "agent_rss_bytes", "spool_bytes")),
        (0.75, ("fan_min_rpm", "fans_failed")),
        (
            0.6,
            (
                "agent_tick_s",
                "agent_slowest_read_s",
                "agent_sources_failing",
                "agent_sources_hung",
                "source_nvml_read_s",
                "source_nvml_outcome",
            ),
        ),
    ):
        if rng.random() < p:
            c.update(names)
    return c


def draw_link_columns(rng, f: Fleet) -> set[str]:
    c = {"link_up", "rate_gbps", "rx_bytes", "tx_bytes", "link_downed", "rx_errors", "tx_discards"}
    if not f.roce:
        c |= {"symbol_errors", "link_error_recoveries", "tx_wait", "local_integrity_errors", "buffer_overruns"}
    if rng.random() < 0.85:
        c |= {"out_of_sequence", "packet_sequence_errors", "rnr_nak_retries", "ack_timeouts"}
    if f.roce or rng.random() < 0.5:
        c |= {"cnp_sent", "cnp_handled"}
    return c


def poisson(rng, lam):
    """Poisson counts; sparse when few are expected."""
    total = float(lam.sum())
    if total > 0.02 * lam.size + 50:
        return rng.poisson(lam).astype(float)
    out = np.zeros(lam.shape)
    k = rng.poisson(total)
    if k:
        at = np.searchsorted(np.cumsum(lam.ravel()), rng.uniform(0, total, k))
        np.add.at(out.ravel(), np.minimum(at, out.size - 1), 1.0)
    return out


class Instruments:
    def __init__(
        self,
        writer,
        f: Fleet,
        plan: Plan,
        cols,
        ncols,
        lcols,
        interval: float,
        epoch: float,
        span: float,
        clock_rows: bool,
        mean: bool,
    ) -> None:
        rng = self.rng = np.random.default_rng(f.rng.integers(1 << 62))
        self.w, self.f, self.plan, self.interval, self.epoch = writer, f, plan, interval, epoch
        self.cols, self.ncols, self.lcols, self.clock_rows = cols, ncols, lcols, clock_rows
        self.phase = rng.uniform(0, min(interval, 10) * 0.8, f.n) * (rng.random() < 0.7)
        self.off = rng.normal(0, 0.02, f.n) + np.where(rng.random(f.n) < 0.05, rng.uniform(-0.8, 0.8, f.n), 0)
        g, n, m = f.g, f.n, len(f.link_node)
        start = {}
        for c in RATE_COLUMNS.values():
            rare = c in ("nvlink_recoveries", "ecc_sram_corrected")
            start[c] = np.where(rng.random(g) < (0.03 if rare else 0.15), rng.integers(0, 5 if rare else 400, g), 0)
        for c in THROTTLE:
            start[c] = np.floor(rng.exponential(4e9 if "power" in c else 2e7, g) * (rng.random(g) < 0.7))
        for c in BUMPED:
            start[c] = (
                np.where(rng.random(g) < 0.04, rng.integers(1, 4, g), 0) if c.startswith("remapped") else np.zeros(g)
            )
        start["energy_j"] = rng.uniform(1e6, 4e9, g)
        for c in ("pcie_aer_correctable", "edac_corrected", "oom_kills"):
            start[c] = np.where(rng.random(n) < 0.3, rng.integers(0, 500, n), 0)
        start["pcie_aer_fatal"] = start["edac_uncorrected"] = np.zeros(n)
        for c in (*LINK_COLUMNS.values(), "link_downed", "buffer_overruns", "rx_bytes", "tx_bytes", "tx_wait"):
            start[c] = np.floor(rng.exponential(50, m) * (rng.random(m) < 0.4))
        for c in ("rx_bytes", "tx_bytes", "tx_wait"):
            start[c] = np.floor(rng.uniform(0, 4e15, m) if c != "tx_wait" else rng.uniform(0, 4e11, m))
        for c in ("cnp_sent", "cnp_handled"):
            start[c] = np.floor(rng.uniform(0, 1e8, m))
        self.c = {k: v.astype(float) for k, v in start.items()}
        self.no_inlet = rng.random(n) < rng.choice([0, 0.1, 0.35])
        self.no_fan = np.array([b.liquid for b in f.boards]) | (rng.random(n) < rng.choice([0, 0.15]))
        self.mem_base = rng.choice([1.0, 1.5, 2.0]) * 2**40 * np.ones(n)
        self.root = rng.uniform(0.1, 0.8, n)
        self.max_rpm = float(rng.choice([10800, 16000, 18000, 23000]))
        self.bias_in = rng.normal(0, 0.5, n)
        self.bias_p = np.exp(rng.normal(0, 0.01, g))  # shunts: 1 %
        self.gap = [
            (int(x), t, t + rng.uniform(20, 240))
            for x, t in zip(  # agents that restart or stall
                rng.integers(0, n, 400), rng.uniform(0, span, 400), strict=True
            )
        ][: rng.poisson(0.004 * n * span / 600)]
        self.lost = float(rng.choice([0, 0.0005, 0.004]))
        self.late = float(rng.choice([0, 0.01, 0.05]))
        self.float_temp = rng.random() < 0.12
        self.util_step = 0.01  # NVML gives whole percents
        self.power_step = float(rng.choice([0.001, 0.1, 1.0], p=[0.5, 0.3, 0.2]))
        self.jit = 0.12 if mean else 0.3
        self.mem_clock = np.array([f.boards[x].mem_clock for x in f.node_of])
        self.ups = np.array([b.nic_gbps for b in f.boards])[f.link_node]
        self.bw = np.array([f.boards[x].hbm_bw for x in f.node_of])
        self.pcie_bw = np.where(f.p["pcie_gen"] > 4, 5.2e10, 2.6e10)
        self.names = np.array(f.names, object)

    def count(self, name, inc, ts, level: str):
        """Cumulative values of a counter: increments, jumps, resets."""
        rel = [b for b in self.plan.bumps if b[1] == name and ts[0] - self.interval < b[0] <= ts[-1]]
        inc = np.array(inc, float)
        for t, _, idx, amount in rel:
            inc[min(len(ts) - 1, int(np.searchsorted(ts, t))), idx] += amount
        out = np.cumsum(inc, 0) + self.c[name]
        if not name.startswith("remapped"):
            for t, node, whole in self.plan.resets:
                if ts[0] - self.interval < t <= ts[-1] and (whole or level == "gpu"):
                    k = int(np.searchsorted(ts, t))
                    idx = {
                        "gpu": lambda: self.f.gpus(node),
                        "node": lambda: np.array([node]),
                        "link": lambda: self.f.links(node),
                    }[level]()
                    if k < len(ts):
                        out[k:, idx] -= out[k, idx]
        self.c[name] = out[-1].copy()
        return np.floor(out) if name != "energy_j" else np.round(out, 3)

    def present(self, ts):
        f, rng = self.f, self.rng
        on = rng.random((len(ts), f.n)) >= self.lost
        for n, a, b in [*self.gap, *self.plan.node_gone]:
            on[(ts >= a) & (ts < b), n] = False
        return on

    def __call__(self, ts, v, now) -> None:
        f, rng, dt = self.f, self.rng, self.interval
        b, g = len(ts), f.g
        on = self.present(ts)
        shift = np.zeros((b, f.n))
        for n, a, e, s in self.plan.offsets:
            shift[(ts >= a) & (ts < e), n] = s
        when = ts[:, None] + self.phase + (self.off + shift if self.clock_rows else 0)
        when = np.round((self.epoch + when) * 1000 + rng.integers(0, 12, when.shape)).astype(np.int64)
        self.gpu(ts, v, now, on, when)
        if self.ncols:
            self.node(ts, v, now, on, when, shift)
        if self.lcols:
            self.link(ts, v, now, on, when)

    def put(self, scope, when, keep, who, columns, second=None):
        """Rows of a block by time; a few come late: some rows after the others."""
        k = np.flatnonzero(keep.ravel())
        if self.late and len(k) > 10:
            wait = self.rng.random(keep.shape[0] * len(set(who.tolist()))) < self.late * 0.2
            width = keep.shape[1]
            node_ix = np.unique(who, return_inverse=True)[1]
            key = (k // width) * (node_ix.max() + 1) + node_ix[k % width]
            k = np.r_[k[~wait[key % len(wait)]], k[wait[key % len(wait)]]]
        who_k = self.names[np.broadcast_to(who, keep.shape).ravel()[k]]
        cols = {c: np.ascontiguousarray(x, dtype=float).ravel()[k] for c, x in columns.items()}
        sec = None if second is None else np.broadcast_to(second, keep.shape).ravel()[k]
        self.w.rows(scope, when[:, who].ravel()[k], who_k, cols, sec)

    def gpu(self, ts, v, now, on, when) -> None:
        f, rng, dt, p, cols = self.f, self.rng, self.interval, self.f.p, self.cols
        b, g = len(ts), f.g
        shape = (b, g)

        def z(s):
            return rng.standard_normal(shape, dtype=np.float32) * s

        busy = np.clip(v["sm"], 0, 1)
        live = v["used"] > 0
        out: dict[str, np.ndarray] = {}
        out["sm_clock_mhz"] = np.floor(v["clk"] / p["step"]) * p["step"]
        wob = 1 + z(self.jit * 0.12) * np.sqrt(busy)
        out["power_w"] = (
            np.round(np.maximum(0.8 * p["idle"], v["power"] * wob * self.bias_p) / self.power_step) * self.power_step
        )
        out["gpu_temp_c"] = np.round(v["td"] + z(0.25), 1) if self.float_temp else np.floor(v["td"] + z(0.25))
        if "memory_temp_c" in cols:
            ok = np.array([f.boards[x].mem_temp for x in f.node_of])
            out["memory_temp_c"] = np.where(ok, np.floor(v["th"] + z(0.3)), np.nan)
        if "thermal_margin_c" in cols:
            out["thermal_margin_c"] = np.floor(p["t_slow"] - v["td"] + z(0.25))
        out["gpu_util_ratio"] = (
            np.clip(
                np.round(v["util"] * 100 + z(1.5 + 4 * self.jit) * (v["util"] > 0.01) * (v["util"] < 0.995)), 0, 100
            )
            / 100
        )
        if "memory_util_ratio" in cols:
            out["memory_util_ratio"] = (
                np.clip(np.round(100 * v["dram"] * 0.9 + z(1.5) * (v["dram"] > 0.005)), 0, 100) / 100
            )
        if "sm_active_ratio" in cols:
            n1 = 1 + z(0.08 * self.jit + 0.01)
            out["sm_active_ratio"] = np.round(np.clip(v["sm"] * n1, 0, 1), 4)
            out["sm_occupancy_ratio"] = np.round(np.clip(v["sm"] * 0.38 * n1, 0, 1), 4)
            out["tensor_active_ratio"] = np.round(np.clip(v["ten"] * (1 + z(0.12 * self.jit + 0.01)), 0, 1), 4)
            out["dram_active_ratio"] = np.round(np.clip(v["dram"] * (1 + z(0.12 * self.jit + 0.01)), 0, 1), 4)
            x = self.pcie_bw * v["pcie"]
            out["pcie_tx_bytes_per_s"] = np.floor(x * 0.6 * np.exp(z(0.15)) + np.where(live, 2e5, 3e3) * np.exp(z(0.3)))
            out["pcie_rx_bytes_per_s"] = np.floor(x * np.exp(z(0.15)) + np.where(live, 3e5, 4e3) * np.exp(z(0.3)))
            y = p["nvl_bw"] * v["nvl"]
            for c in ("nvlink_tx_bytes_per_s", "nvlink_rx_bytes_per_s"):
                out[c] = np.where(p["nvlinks"] > 0, np.floor(y * (1 + z(0.06))), np.nan)
        for c, s, k in (
            ("fp16_active_ratio", "sm", 0.06),
            ("fp32_active_ratio", "sm", 0.09),
            ("fp64_active_ratio", "sm", 0),
        ):
            if c in cols:
                out[c] = np.round(np.clip(v[s] * k * (1 + z(0.1)), 0, 1), 4)
        if "memory_clock_mhz" in cols:
            out["memory_clock_mhz"] = np.round(self.mem_clock * now["mclk"]) * np.ones(shape)
        if "clock_event_reasons" in cols:
            idle = (v["sm"] < 0.002) & ~live
            out["clock_event_reasons"] = (
                1.0 * idle
                + 4.0 * (v["t_p"] > 0)
                + 0x20 * (v["t_s"] > 0)
                + 0x48 * (v["t_h"] > 0)
                + 0x88 * (v["t_b"] > 0)
                + 2.0 * ((now["fcap"] < p["fmax"] - 20) & (v["t_p"] <= 0) & ~idle)
            )
        for c, key in zip(THROTTLE, ("t_p", "t_s", "t_h", "t_b"), strict=True):
            if c in cols:
                out[c] = self.count(c, v[key], ts, "gpu")
        if "power_limit_w" in cols:
            out["power_limit_w"] = np.broadcast_to(now["plim"], shape)
        if "energy_j" in cols:
            out["energy_j"] = self.count("energy_j", v["energy"], ts, "gpu")
        if "framebuffer_used_bytes" in cols:
            base = 0.0065 * p["fb"]
            slow = 1 + 0.02 * np.sin(ts[:, None] / 1700 + np.arange(g))
            out["framebuffer_used_bytes"] = np.floor(
                base + (p["fb"] - base) * np.clip(v["used"] * np.where(live, slow, 1), 0, 0.985)
            )
            out["framebuffer_total_bytes"] = np.broadcast_to(p["fb"], shape)
        if "pcie_width" in cols:
            out["pcie_generation"] = np.where(live | (p["pcie_gen"] > 4), now["gen"], np.minimum(now["gen"], 1))
            out["pcie_width"] = np.broadcast_to(now["width"], shape)
        for rate, c in RATE_COLUMNS.items():
            if c in cols:
                x = self.count(c, poisson(rng, now[rate] * dt), ts, "gpu")
                if c.startswith("nvlink"):
                    x = np.where(p["nvlinks"] > 0, x, np.nan)
                if c.startswith("ecc"):
                    x = np.where(now["eccoff"] > 0, np.nan, x)
                out[c] = x
        if "nvlink_active_links" in cols:
            out["nvlink_active_links"] = np.where(p["nvlinks"] > 0, now["links"], np.nan)
        if "nvlink_effective_ber" in cols:
            bl = np.array([f.boards[x].pool in ("b200", "gb200") for x in f.node_of])
            if bl.any():
                ber = now["ber"] + 0.05 * np.sin(ts[:, None] / 900 + np.arange(g))
                out["nvlink_effective_ber"] = np.where(bl, 10.0 ** np.round(ber, 1), np.nan)
        for c in BUMPED:
            if c in cols:
                x = self.count(c, np.zeros(shape), ts, "gpu")
                out[c] = np.where(now["eccoff"] > 0, np.nan, x) if c.startswith("ecc") else x
        for c, key in (
            ("row_remap_pending", "pending"),
            ("row_remap_failed", "failed"),
            ("sram_threshold_exceeded", "thresh"),
            ("recovery_action", "action"),
        ):
            if c in cols:
                out[c] = np.broadcast_to(now[key], shape)
        if "remap_banks_max" in cols:
            used = np.nan_to_num(out["remapped_rows_corrected"] + out["remapped_rows_uncorrected"])
            banks = np.where(p["hbm_w"] > 100, 1536, 640)
            out["remap_banks_max"] = banks - np.minimum(used, banks)
            out["remap_banks_none"] = np.where(now["failed"] > 0, 1.0, 0.0) * np.ones(shape)
        if "fabric_state" in cols:
            out["fabric_state"] = np.where(p["nvlinks"] > 0, 3.0, 0.0) * np.ones(shape)
        if "compute_processes" in cols:
            out["compute_processes"] = np.where(live, 1.0, 0.0)
        for idx, a, e in self.plan.nulls:
            m = (ts >= a) & (ts < e)
            if m.any():
                for c in out:
                    x = np.array(out[c], float)
                    x[np.ix_(m, idx)] = np.nan
                    out[c] = x
        keep = on[:, f.node_of].copy()
        for idx, a, e in self.plan.gpu_gone:
            keep[np.ix_((ts >= a) & (ts < e), idx)] = False
        for idx, a, e, share in self.plan.drops:
            m = np.flatnonzero((ts >= a) & (ts < e))
            if len(m):
                keep[np.ix_(m, idx)] &= rng.random((len(m), len(idx))) >= share
        self.put("gpu", when, keep, f.node_of, out, f.slot)

    def node(self, ts, v, now, on, when, shift) -> None:
        f, rng, dt, c = self.f, self.rng, self.interval, self.ncols
        b, n = len(ts), f.n
        shape = (b, n)

        def z(s):
            return rng.standard_normal(shape) * s

        act = np.add.reduceat(v["busy"] * (v["used"] > 0), f.first, 1) / np.array([x.gpus for x in f.boards])
        out: dict[str, np.ndarray] = {}
        cpu = np.clip(0.012 + 0.16 * act + now["cpu"] + z(0.01), 0.002, 1)
        out["cpu_util_ratio"] = np.round(cpu, 4)
        out["load1"] = np.round(np.maximum(0, cpu * 160 * (1 + z(0.05))), 2)
        out["memory_total_bytes"] = np.broadcast_to(self.mem_base, shape)
        out["memory_available_bytes"] = np.floor(self.mem_base * np.clip(0.95 - 0.4 * act + z(0.004), 0.02, 1))
        out["disk_read_bytes_per_s"] = np.floor(2e7 * act * np.exp(z(0.8)) + 4e4)
        out["disk_write_bytes_per_s"] = np.floor(6e6 * np.exp(z(0.9)) * (0.2 + act) + now["disk"] * np.exp(z(0.1)))
        out["root_used_ratio"] = np.round(np.clip(self.root + ts[:, None] * 2e-7, 0, 1), 4)
        out["net_rx_bytes_per_s"] = np.floor(1.5e8 * act * np.exp(z(0.4)) + 5e4 + now["net"] * 0.2)
        out["net_tx_bytes_per_s"] = np.floor(6e7 * act * np.exp(z(0.4)) + 6e4 + now["net"] * np.exp(z(0.1)))
        out["inlet_temp_c"] = np.where(self.no_inlet, np.nan, np.round((v["tin"] + self.bias_in + z(0.1)) * 2) / 2)
        out["clock_offset_s"] = np.round(self.off + shift + z(0.0015), 6)
        lam = now["q_aer"] * dt
        out["pcie_aer_correctable"] = self.count("pcie_aer_correctable", poisson(rng, lam), ts, "node")
        out["pcie_aer_fatal"] = self.count("pcie_aer_fatal", np.zeros(shape), ts, "node")
        out["edac_corrected"] = self.count("edac_corrected", poisson(rng, now["q_edac"] * dt), ts, "node")
        out["edac_uncorrected"] = self.count("edac_uncorrected", np.zeros(shape), ts, "node")
        out["oom_kills"] = self.count("oom_kills", np.zeros(shape), ts, "node")
        out["agent_cpu_ratio"] = np.round(np.abs(0.012 + z(0.003)), 4)
        out["agent_rss_bytes"] = np.floor(4.2e7 + 3e5 * np.sin(ts[:, None] / 3000 + np.arange(n))) * np.ones(shape)
        out["spool_bytes"] = np.floor(np.abs(z(2e4)))
        rpm = v["fan"] * self.max_rpm * now["fanmin"] * (1 + z(0.004))
        out["fan_min_rpm"] = np.where(self.no_fan, np.nan, np.round(rpm / 60) * 60)
        out["fans_failed"] = np.where(self.no_fan, np.nan, now["fansfail"] * np.ones(shape))
        hung = now["hung"] > 0
        read = np.abs(0.02 + z(0.006))
        out["agent_slowest_read_s"] = np.round(np.where(hung, 10, read * 2), 4)
        out["agent_tick_s"] = np.round(np.where(hung, 10, read * 2.2), 4)
        out["source_nvml_read_s"] = np.round(np.where(hung, 10, read), 4)
        out["source_nvml_outcome"] = np.where(hung, 2.0, 0.0)
        out["agent_sources_failing"] = np.zeros(shape)
        out["agent_sources_hung"] = np.where(hung, 1.0, 0.0)
        self.put("node", when, on.copy(), np.arange(n), {k: x for k, x in out.items() if k in c})

    def link(self, ts, v, now, on, when) -> None:
        f, rng, dt, c = self.f, self.rng, self.interval, self.lcols
        m = len(f.link_node)
        shape = (len(ts), m)
        up = now["l_up"] > 0.5
        full = self.ups * 1e9 / 8
        net = np.add.reduceat(v["net"], f.gpu_of_link, 1) / np.diff(np.r_[f.gpu_of_link, f.g])
        flow = np.minimum(net * full * now["l_share"], full * now["l_rate"]) * up + 300
        z = rng.standard_normal
        out = {
            "link_up": up * np.ones(shape),
            "rate_gbps": np.where(up, np.round(self.ups * now["l_rate"], 1), 0) * np.ones(shape),
        }
        out["tx_bytes"] = self.count("tx_bytes", flow * dt * (1 + 0.03 * z(shape)), ts, "link")
        out["rx_bytes"] = self.count("rx_bytes", flow * dt * (1 + 0.03 * z(shape)), ts, "link")
        # ticks of about 4 ns x lanes: a loaded healthy port waits for some per mille of the time
        wait = 2.5e8 * dt * 0.004 * np.minimum(net, 1) ** 1.5 * np.exp(0.5 * z(shape)) * now["l_wait"]
        out["tx_wait"] = self.count("tx_wait", np.minimum(wait, 2.4e8 * dt), ts, "link")
        busy = 0.05 + np.minimum(1, net * 8)
        for rate, name in LINK_COLUMNS.items():
            if name in c:
                lam = now[rate] * dt * (busy if rate in ("l_oos", "l_pse", "l_rnr", "l_cnps", "l_cnph") else 1)
                out[name] = self.count(name, poisson(rng, lam * np.ones(shape)), ts, "link")
        out["link_downed"] = self.count("link_downed", np.zeros(shape), ts, "link")
        out["buffer_overruns"] = self.count("buffer_overruns", np.zeros(shape), ts, "link")
        self.put(
            "link",
            when,
            on[:, f.link_node].copy(),
            f.link_node,
            {k: x for k, x in out.items() if k in c},
            np.array(f.link_name, object),
        )

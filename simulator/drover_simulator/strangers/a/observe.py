"""Instruments: from the physics to rows, with rounding, pace, gaps, late rows and clocks that are a little off."""

from __future__ import annotations

from typing import Any

import numpy as np

from drover_simulator.strangers.a.boards import Fleet
from drover_simulator.strangers.a.effects import Effects
from drover_simulator.strangers.a.jobs import Schedule

VOLATILE = {
    "energy_j",
    "ecc_sram_corrected",
    "ecc_sram_uncorrected",
    "ecc_dram_corrected",
    "ecc_dram_uncorrected",
    "throttle_power_us",
    "throttle_thermal_sw_us",
    "throttle_thermal_hw_us",
    "throttle_brake_us",
    "throttle_sync_us",
    "nvlink_crc_errors",
    "nvlink_replays",
    "nvlink_recoveries",
    "pcie_replays",
}
FAST = {
    "sm_clock_mhz",
    "power_w",
    "power_limit_w",
    "gpu_temp_c",
    "memory_temp_c",
    "gpu_util_ratio",
    "sm_active_ratio",
    "sm_occupancy_ratio",
    "tensor_active_ratio",
    "dram_active_ratio",
    "fp64_active_ratio",
    "fp32_active_ratio",
    "fp16_active_ratio",
    "pcie_tx_bytes_per_s",
    "pcie_rx_bytes_per_s",
    "nvlink_tx_bytes_per_s",
    "nvlink_rx_bytes_per_s",
}
HALF_MINUTE = {"nvlink_crc_errors", "nvlink_replays", "nvlink_recoveries", "nvlink_effective_ber"}
# Background per second and unit: a few corrected errors a week per 100 GPUs, a replay a day, an SRAM hit a month.
GPU_RATES = {
    "ecc_dram_corrected": 3e-7,
    "ecc_sram_corrected": 4e-8,
    "ecc_sram_uncorrected": 0.0,
    "ecc_dram_uncorrected": 0.0,
    "pcie_replays": 2e-5,
    "nvlink_crc_errors": 1e-5,
    "nvlink_replays": 4e-6,
    "nvlink_recoveries": 0.0,
    "remapped_rows_corrected": 0.0,
    "remapped_rows_uncorrected": 0.0,
}
LINK_RATES = {
    "symbol_errors": 2e-5,
    "link_downed": 0.0,
    "link_error_recoveries": 0.0,
    "rx_errors": 2e-6,
    "tx_discards": 1e-4,
    "local_integrity_errors": 2e-6,
    "buffer_overruns": 0.0,
    "out_of_sequence": 2e-3,
    "packet_sequence_errors": 1e-3,
    "rnr_nak_retries": 5e-4,
    "ack_timeouts": 3e-5,
    "cnp_sent": 0.0,
    "cnp_handled": 0.0,
}


class Observer:
    """Turns blocks into rows of the three files."""

    def __init__(
        self, fleet: Fleet, schedule: Schedule, effects: Effects, rng: np.random.Generator, writer: Any
    ) -> None:
        self.f, self.s, self.e, self.rng, self.w = fleet, schedule, effects, rng, writer
        g, n, links = len(fleet.g_node), len(fleet.nodes), len(fleet.l_node)
        up = rng.uniform(1, 90, n)[fleet.g_node] * 86400  # s since the driver was loaded
        self.carry: dict[str, np.ndarray] = {}
        p = fleet.p
        for name in (
            "throttle_power_us",
            "throttle_thermal_sw_us",
            "throttle_thermal_hw_us",
            "throttle_brake_us",
            "throttle_sync_us",
        ):
            share = {"throttle_power_us": 0.2, "throttle_thermal_sw_us": 0.0005}.get(name, 0.0)
            self.carry[name] = np.floor(up * 1e6 * share * rng.uniform(0, 1, g))
        self.carry["energy_j"] = up * p["tdp"] * rng.uniform(0.3, 0.8, g)
        for name in GPU_RATES:
            self.carry[name] = np.floor(rng.lognormal(0, 1.5, g) * (rng.random(g) < 0.06) * 3)
        for name in ("ecc_sram_uncorrected", "ecc_dram_uncorrected", "remapped_rows_uncorrected"):
            self.carry[name] *= 0
        self.carry["pcie_replays"] = np.floor(rng.lognormal(0.5, 1.5, g) * (rng.random(g) < 0.5))
        self.carry["remapped_rows_uncorrected"] = (rng.random(g) < 0.01).astype(float)
        self.lcarry = {name: np.floor(rng.lognormal(2, 2, links) * (rng.random(links) < 0.4)) for name in LINK_RATES}
        self.lcarry["link_downed"] = rng.integers(0, 4, links).astype(float)
        for name in ("rx_bytes", "tx_bytes", "tx_wait"):
            self.lcarry[name] = np.floor(rng.uniform(1e12, 5e15, links))
        self.ncarry = {
            "pcie_aer_correctable": rng.integers(0, 50, n).astype(float),
            "pcie_aer_fatal": np.zeros(n),
            "edac_corrected": np.floor(rng.lognormal(0, 2, n) * (rng.random(n) < 0.2)),
            "edac_uncorrected": np.zeros(n),
            "oom_kills": rng.integers(0, 3, n).astype(float),
            "agent_missed_ticks": np.zeros(n),
            "agent_read_failures": np.zeros(n),
        }
        self.slot_second = rng.integers(0, 10, g)
        self.node_names = np.array([x["name"] for x in fleet.nodes], object)
        self.link_jitter = rng.lognormal(0, 0.1, links)
        self.mem_total = np.where(rng.random() < 0.5, 1.08e12, 2.16e12) * np.ones(n)
        self.cpu = 0.3 * rng.lognormal(0, 0.15, n)
        self.root = rng.uniform(0.1, 0.7, n)
        self.restarts = [
            (float(t), int(k), float(rng.uniform(8, 60)))
            for k in range(n)
            if rng.random() < 0.06
            for t in rng.uniform(0, fleet.end, 1)
        ]
        gaps = [
            (float(rng.uniform(0, fleet.end)), int(k), float(rng.uniform(20, 150)))
            for k in range(n)
            if rng.random() < 0.08
        ]
        if rng.random() < 0.15:  # the collector itself was away
            t, gap = float(rng.uniform(0, fleet.end)), float(rng.uniform(60, 240))
            gaps += [(t, k, gap) for k in range(n)]
        for t, k, gap in self.restarts + gaps:  # an agent is updated: a short gap
            for scope in ("lost_gpu_node", "lost_node", "lost_link_node"):
                effects.add(scope, k, t, t + gap, 1.0, "set")

    def count(
        self, carry: dict[str, np.ndarray], name: str, inc: np.ndarray, ts: np.ndarray, resets: list[Any]
    ) -> np.ndarray:
        cum = carry[name] + np.cumsum(inc, axis=0)
        for t, idx in resets:
            if ts[0] - self.f.dt < t <= ts[-1]:
                k = min(int(np.searchsorted(ts, t)), len(ts) - 1)
                before = cum[k - 1, idx] if k else carry[name][idx]
                cum[k:, idx] -= before
        carry[name] = cum[-1].copy()
        return cum

    def events(self, name: str, base: float, n: int, ts: np.ndarray) -> np.ndarray:
        """Increments of a counter of rare events: Poisson, with bumps."""
        shape, dt = (len(ts), n), self.f.dt
        active = any(e.t0 <= ts[-1] and e.t1 > ts[0] for e in self.e.all.get(name, ()))
        if active:
            rate = self.e.over(name, np.full(n, base), ts)
            inc = self.rng.poisson(np.maximum(rate, 0) * dt).astype(float)
        else:
            inc = np.zeros(shape)
            hits = int(self.rng.poisson(base * dt * inc.size))
            if hits:
                np.add.at(inc.reshape(-1), self.rng.integers(0, inc.size, hits), 1)
        self.e.bumped(name, inc, ts, dt)
        return inc

    def emit(
        self,
        scope: str,
        ts: np.ndarray,
        node_of: np.ndarray,
        second: Any,
        cols: dict[str, np.ndarray],
        lost: np.ndarray,
    ) -> None:
        """Write a block: drop lost rows, shift clocks, put late rows at the end."""
        f, o, rng = self.f, self.f.opt, self.rng
        off = self.e.over("clock_off", o["offset"], ts)
        ms = f.t0_ms + 1000 * (ts[:, None] + o["phase"] + off)
        ms = ms[:, node_of] if scope != "node" else ms
        ms = np.round(ms + rng.integers(0, 4, len(ts))[:, None])
        keep = ~lost
        if o["loss"]:
            keep &= rng.random(keep.shape) >= o["loss"]
        flat = np.flatnonzero(keep.reshape(-1))
        if o["late"]:
            late = rng.random(len(flat)) < o["late"]
            flat = np.concatenate([flat[~late], flat[late]])
        names = np.broadcast_to(self.node_names[node_of], keep.shape).reshape(-1)[flat]
        out = {}
        for k, v in cols.items():
            if k in o["drop"]:
                continue
            v = np.broadcast_to(v, keep.shape).reshape(-1)[flat]
            if o["null"] and k in (
                "power_w",
                "gpu_temp_c",
                "sm_active_ratio",
                "inlet_temp_c",
                "memory_temp_c",
                "rx_bytes",
            ):
                v = np.where(rng.random(len(v)) < o["null"], np.nan, v)
            out[k] = v.astype(float)
        two = None if second is None else np.broadcast_to(second, keep.shape).reshape(-1)[flat]
        self.w.rows(scope, ms.reshape(-1)[flat].astype(np.int64), names, out, two)

    def lost(self, ts: np.ndarray, scope: str, node_of: np.ndarray) -> np.ndarray:
        lost = self.e.over(scope, np.zeros(len(self.f.nodes)), ts)[:, node_of] > 0
        return np.array(lost)

    # ---- GPUs

    def gpu(self, ts: np.ndarray, b: dict[str, np.ndarray]) -> None:
        f, e, rng, p, dt = self.f, self.e, self.rng, self.f.p, self.f.dt
        shape = b["power"].shape
        g = shape[1]
        zero = np.zeros(g)
        jobs = self.s.jobs
        tens = np.array([j.tensor for j in jobs] + [0.0])[b["owner"]]
        mem = np.array([j.mem for j in jobs] + [0.0])[b["owner"]]
        dead = e.over("dead", zero, ts) > 0
        proc = (b["proc"] > 0) & ~dead
        noise = rng.normal(0, 1, (4, *shape))
        work = b["w_c"] + b["w_m"]
        # The clock is read at a moment: while computing it is held down, while waiting it is free to rise.
        # The longer the moment is averaged, the nearer both come (exporters differ): mostly the mean over computing.
        x = np.where(rng.random(shape) < np.clip(work + 0.25, 0, 1), b["x"], b["xw"])
        x = np.where(proc, x, p["fidle"] / p["fmax"])
        clock = np.floor(x * p["fmax"] / p["fstep"] + 0.5) * p["fstep"]
        power = b["power"] * (1 + noise[0] * np.where(proc, 0.018, 0.004)) + noise[1] * 0.3
        temp = np.round(b["t_die"] + p["sensor"] + noise[1] * 0.25)
        limit = np.round(b["cap_now"], 1)
        cols: dict[str, Any] = {
            "sm_clock_mhz": clock,
            "memory_clock_mhz": np.where(proc | (p["hbm"] > 0), p["mem_mhz"], 405.0),
        }
        reasons = (~proc | (work + b["w_x"] + b["w_wait"] < 0.02)) * 1.0
        active = reasons == 0
        reasons = (
            reasons
            + 4.0 * (active & (b["pow_lim"] > 0.3))
            + 32.0 * (active & (b["th_lim"] > 0.2))
            + 72.0 * (b["hw_lim"] > 0)
            + 136.0 * (b["br_lim"] > 0)
        )
        reasons = reasons + 2.0 * (e.over("clk", p["clk"], ts) < 1) * active
        cols["clock_event_reasons"] = np.minimum(reasons, 511)
        us = dt * 1e6
        for name, share in (
            ("throttle_power_us", b["pow_lim"]),
            ("throttle_thermal_sw_us", b["th_lim"]),
            ("throttle_thermal_hw_us", b["hw_lim"] * 1.0),
            ("throttle_brake_us", b["br_lim"] * 1.0),
            ("throttle_sync_us", zero),
        ):
            cols[name] = self.count(
                self.carry, name, np.floor(np.broadcast_to(share, shape) * us * active), ts, e.resets
            )
        cols["power_w"] = np.round(np.maximum(power, 1), 1)
        cols["power_limit_w"] = limit
        cols["energy_j"] = np.round(self.count(self.carry, "energy_j", b["power"] * dt, ts, e.resets), 3)
        cols["gpu_temp_c"] = temp
        hot = b["t_hbm"] + p["hbm_sensor"] + e.over("hbm_hot", zero, ts) * np.clip((b["power"] / p["tdp"]), 0.2, 1)
        cols["memory_temp_c"] = np.where(p["hbm"] > 0, np.round(hot + noise[2] * 0.25), np.nan)
        cols["thermal_margin_c"] = np.where(p["tdp"] >= 350, np.round(p["t_soft"] + 2 - b["t_die"]), np.nan)
        busy = np.clip(b["u_busy"] + noise[2] * 0.008 * (b["u_busy"] > 0.01), 0, 1)
        gpm = f.opt["style"] == "full"
        cols["gpu_util_ratio"] = np.round(busy, 4 if gpm else 2)
        dram = np.clip(
            b["w_m"] * 0.85 * e.over("hbm", np.ones(g), ts) + b["w_c"] * 0.3 + (b["w_x"] + b["w_net"]) * 0.1, 0, 1
        )
        cols["memory_util_ratio"] = np.round(np.clip(dram * 1.05 + noise[3] * 0.01 * proc, 0, 1), 2)
        total = p["mem_gb"] * 1.0737e9 * np.where((e.over("ecc_off", zero, ts) > 0) & (p["hbm"] == 0), 1.0667, 1.0)
        cols["framebuffer_total_bytes"] = np.broadcast_to(np.round(total), shape)
        cols["framebuffer_used_bytes"] = np.round(np.where(proc, total * mem, 0) + 5e8)
        live = proc * 1.0
        wait = (b["w_wait"] + b["w_net"]) * live
        sm = np.clip(b["w_c"] * 0.93 + b["w_m"] * 0.88 + b["w_x"] * 0.25 + wait * 0.16, 0, 1)
        cols["sm_active_ratio"] = np.round(np.clip(sm * (1 + noise[0] * 0.006), 0, 1), 4)
        cols["sm_occupancy_ratio"] = np.round(np.clip(b["w_c"] * 0.28 + b["w_m"] * 0.5 + wait * 0.03, 0, 1), 4)
        cols["tensor_active_ratio"] = np.round(
            np.clip(b["w_c"] * tens * e.over("eff", p["eff"], ts) * (1 + noise[1] * 0.006), 0, 1), 4
        )
        cols["dram_active_ratio"] = np.round(np.clip(dram * (1 + noise[2] * 0.01), 0, 1), 4)
        cols["fp64_active_ratio"] = np.zeros(shape)
        cols["fp32_active_ratio"] = np.round(b["w_c"] * 0.06 + b["w_m"] * 0.1, 4)
        cols["fp16_active_ratio"] = np.round(b["w_c"] * 0.03 + b["w_m"] * 0.04, 4)
        pc = p["pcie_bps"] * e.over("pcie", np.ones(g), ts)
        share_p = np.array([j.prof[3] / max(1e-9, j.prof[2] + j.prof[3]) for j in jobs] + [0.0])[b["owner"]]
        wx_p = b["w_x"] * share_p
        base = live * 3e7 * (b["u_busy"] > 0.02) + 2e5
        cols["pcie_tx_bytes_per_s"] = np.round(
            (base + 0.35 * pc * wx_p + 0.1 * pc * b["w_net"]) * np.exp(noise[3] * 0.1)
        )
        cols["pcie_rx_bytes_per_s"] = np.round(
            (base * 1.4 + 0.4 * pc * wx_p + 0.1 * pc * b["w_net"]) * np.exp(noise[3] * 0.1)
        )
        nv = (
            p["nvl_bps"] * e.over("nvl", np.ones(g), ts) * (b["w_x"] * (1 - share_p) * 0.6 + b["w_net"] * 0.1)
        ) * np.exp(noise[2] * 0.05)
        has_nv = p["nvlinks"] > 0
        for name, v in (("nvlink_tx_bytes_per_s", nv), ("nvlink_rx_bytes_per_s", nv * np.exp(noise[0] * 0.02))):
            cols[name] = np.where(has_nv, np.round(v), np.nan)
        gen = np.where(proc | (p["hbm"] > 0), p["pcie_gen"], 1.0)  # boards with GDDR drop to generation 1 when idle
        set_gen = e.over("pcie_generation", np.full(g, 9.0), ts)
        cols["pcie_generation"] = np.minimum(gen, set_gen)
        cols["pcie_width"] = e.over("pcie_width", np.full(g, 16.0), ts)
        counts = {
            name: self.count(self.carry, name, self.events(name, rate, g, ts), ts, e.resets if name in VOLATILE else [])
            for name, rate in GPU_RATES.items()
        }
        cols["pcie_replays"] = counts["pcie_replays"]
        cols["nvlink_active_links"] = np.where(has_nv, e.over("nvlink_active_links", p["nvlinks"], ts), np.nan)
        for name in ("nvlink_crc_errors", "nvlink_replays", "nvlink_recoveries"):
            cols[name] = np.where(has_nv, counts[name], np.nan)
        if any(x.blackwell for x in f.boards):
            black = np.array([f.boards[k].blackwell for k in f.g_node])
            ber = e.over("nvl_ber", np.full(g, 1e-15), ts) * np.exp(noise[3] * 0.3)
            cols["nvlink_effective_ber"] = np.where(black, ber, np.nan)
        ecc_off = e.over("ecc_off", zero, ts) > 0
        for name in ("ecc_sram_corrected", "ecc_sram_uncorrected", "ecc_dram_corrected", "ecc_dram_uncorrected"):
            cols[name] = np.where(ecc_off, np.nan, counts[name])
        remap = p["remap"] > 0
        cols["sram_threshold_exceeded"] = np.where(
            remap & (p["tdp"] > 360), e.over("sram_threshold_exceeded", zero, ts), np.nan
        )
        for name, v in (
            ("remapped_rows_corrected", counts["remapped_rows_corrected"]),
            ("remapped_rows_uncorrected", counts["remapped_rows_uncorrected"]),
            ("row_remap_pending", e.over("row_remap_pending", zero, ts)),
            ("row_remap_failed", e.over("row_remap_failed", zero, ts)),
            ("remap_banks_max", np.maximum(0, e.over("remap_banks_max", np.where(p["hbm"] > 0, 2560.0, 384.0), ts))),
            ("remap_banks_none", e.over("remap_banks_none", zero, ts)),
        ):
            cols[name] = np.where(remap, v, np.nan)
        cols["recovery_action"] = e.over("recovery_action", zero, ts)
        cols["fabric_state"] = np.where(has_nv & (p["tdp"] >= 700), 3.0, np.nan)
        cols["compute_processes"] = proc * 1.0
        if f.opt["slow_pace"]:
            turn = (np.round(ts[:, None] / dt) + self.slot_second) * dt
            slow, half = (turn % 10) >= dt, (turn % 30) >= dt
            for name in cols:
                if name not in FAST:
                    cols[name] = np.where(half if name in HALF_MINUTE else slow, np.nan, cols[name])
        lost = self.lost(ts, "lost_gpu_node", f.g_node) | (rng.random(shape) < e.over("lost_gpu", zero, ts))
        self.emit("gpu", ts, f.g_node, f.g_slot, cols, lost)

    # ---- nodes

    def node(self, ts: np.ndarray, b: dict[str, np.ndarray], tx: np.ndarray) -> None:
        f, e, rng, dt, n = self.f, self.e, self.rng, self.f.dt, len(self.f.nodes)
        shape = (len(ts), n)
        zero, z = np.zeros(n), rng.normal(0, 1, (4, len(ts), n))
        per = np.add.reduceat(b["w_host"] + 0.15 * b["u_busy"], f.first, axis=1) / f.count
        procs = np.add.reduceat(b["proc"], f.first, axis=1)
        cpu = np.clip(0.02 + self.cpu * per + e.over("cpu_util_ratio", zero, ts) + 0.006 * z[0], 0.003, 1)
        io = np.zeros(shape)
        for k, job in enumerate(self.s.jobs):
            if b["io"][:, k].any():
                io[:, np.unique(f.g_node[job.gpus])] += b["io"][:, k : k + 1]
        inlet = b["inlet"] + 0.15 * z[1]
        inlet = np.where(f.opt["inlet_ok"], np.round(inlet) if f.opt["inlet_whole"] else np.round(inlet, 1), np.nan)
        rpm = b["fan"] * f.p["n_rpm"] * e.over("fan_min", np.ones(n), ts) * (1 + 0.006 * z[2])
        hung = e.over("nvml_hung", zero, ts)
        since = np.zeros(shape)
        for x in e.all.get("nvml_hung", ()):
            since[:, x.idx] = np.where((ts >= x.t0) & (ts < x.t1), ts - x.t0, 0)[:, None]
        cols: dict[str, Any] = {
            "cpu_util_ratio": np.round(cpu, 4),
            "load1": np.round(cpu * 128 + procs + np.abs(z[1]), 2),
            "memory_available_bytes": np.round(self.mem_total * (0.93 - 0.05 * procs / f.count - 0.002 * np.abs(z[3]))),
            "memory_total_bytes": self.mem_total,
            "disk_read_bytes_per_s": np.round(2e5 * np.exp(z[2]) + 3e7 * procs / f.count),
            "disk_write_bytes_per_s": np.round(1e6 * np.exp(0.6 * z[0]) + np.minimum(io, 1) * 1.5e9),
            "root_used_ratio": np.round(self.root, 4),
            "net_rx_bytes_per_s": np.round(3e5 * np.exp(z[1] * 0.5) + 6e7 * procs / f.count + tx * f.roce),
            "net_tx_bytes_per_s": np.round(2e5 * np.exp(z[3] * 0.5) + np.minimum(io, 3) * 8e8 + tx * f.roce),
            "inlet_temp_c": inlet,
            "clock_offset_s": np.round(e.over("clock_off", f.opt["offset"], ts) + 0.002 * z[2], 6),
            "agent_cpu_ratio": np.round(0.02 + 0.003 * np.abs(z[0]), 4),
            "agent_rss_bytes": np.round(4.5e7 + 2e5 * z[1]),
            "fan_min_rpm": np.where(f.opt["fan_ok"], np.round(rpm), np.nan),
            "fans_failed": np.where(f.opt["fan_ok"], e.over("fans_failed", zero, ts), np.nan),
            "agent_tick_s": np.round(0.04 + 0.01 * np.abs(z[3]) + np.minimum(since, 10), 4),
            "agent_sources_hung": np.where(since > 5, 1.0, 0.0),
            "source_nvml_read_s": np.round(0.012 + 0.004 * np.abs(z[2]) + since, 4),
            "source_nvml_outcome": np.where(hung > 0, 2.0, 0.0),
            "source_host_read_s": np.round(0.001 + 0.0004 * np.abs(z[1]), 4),
        }
        for name, base in (
            ("pcie_aer_correctable", 3e-6),
            ("pcie_aer_fatal", 0.0),
            ("edac_corrected", 1e-6),
            ("edac_uncorrected", 0.0),
            ("oom_kills", 1e-6),
            ("agent_missed_ticks", 1e-5),
        ):
            cols[name] = self.count(self.ncarry, name, self.events(name, base, n, ts), ts, [])
        self.emit("node", ts, np.arange(n), None, cols, self.lost(ts, "lost_node", np.arange(n)))

    # ---- ports

    def link(self, ts: np.ndarray, b: dict[str, np.ndarray]) -> np.ndarray:
        """Write the ports' rows; returns bytes/s by node."""
        f, e, rng, dt, links = self.f, self.e, self.rng, self.f.dt, len(self.f.l_node)
        by_node = np.zeros((len(ts), len(f.nodes)))
        if not links:
            return by_node
        ok = f.g_link >= 0
        cast = np.zeros((len(ts), links))
        jn = np.array([j.prof[5] for j in self.s.jobs] + [0.0])
        share = b["w_net"] * ok * (jn[b["owner"]] > 0) * np.minimum(1.0, b["nic"])
        per = np.bincount(f.g_link[ok], minlength=links)
        order = np.argsort(f.g_link[ok], kind="stable")
        starts = np.concatenate([[0], np.cumsum(per)[:-1]])
        wired = np.add.reduceat(share[:, ok][:, order], starts, axis=1) / per
        inc_j = np.concatenate([b["incast"][:, :-1], np.zeros((len(ts), 1))], axis=1)
        if b["incast"].any():
            cast_g = np.take_along_axis(inc_j, b["owner"] % inc_j.shape[1], axis=1)
            cast = np.add.reduceat(cast_g[:, ok][:, order], starts, axis=1) / per
        z = rng.normal(0, 1, (3, len(ts), links))
        up = e.over("link_up", np.ones(links), ts)
        # 60 to 80 % of line rate while exchanging
        bps = (
            (f.l_rate * 1.25e8 * 0.7 * wired * np.exp(0.04 * z[0]) + 2e3 * np.exp(z[1]))
            * e.over("traffic", np.ones(links), ts)
            * up
        )
        np.add.at(by_node, (slice(None), f.l_node), bps)
        if not f.opt["link_file"]:
            return by_node
        rate = e.over("rate_gbps", f.l_rate, ts)
        cols: dict[str, Any] = {"link_up": up, "rate_gbps": np.where(up > 0, rate, np.nan if f.roce else 10.0)}
        cols["rx_bytes"] = np.round(
            self.count(self.lcarry, "rx_bytes", bps * np.exp(0.02 * z[2]) * dt, ts, e.resets_links)
        )
        cols["tx_bytes"] = np.round(self.count(self.lcarry, "tx_bytes", bps * dt, ts, e.resets_links))
        wait = e.over("tx_wait_share", np.zeros(links), ts) * np.clip(wired * 6, 0.05, 1) * np.exp(0.3 * z[1])
        wait = wait + (0.004 * np.exp(0.6 * z[2]) * wired * 5 + cast * 0.25 * np.exp(0.2 * z[0])) * self.link_jitter
        cols["tx_wait"] = np.round(
            self.count(self.lcarry, "tx_wait", np.clip(wait, 0, 0.95) * 2.5e8 * dt, ts, e.resets_links)
        )  # ticks of 4 ns
        for name, base in LINK_RATES.items():
            inc = self.events(name, base, links, ts)
            if name in ("cnp_sent", "cnp_handled") and f.roce:
                inc = inc + np.floor((40 * wired + 4000 * cast) * np.exp(0.5 * z[1]) * dt)
            if name in ("out_of_sequence", "packet_sequence_errors"):
                inc = inc + rng.poisson(np.minimum(0.02 * wired + 15 * cast, 1e3) * dt)
            cols[name] = self.count(self.lcarry, name, inc, ts, e.resets_links)
        self.emit("link", ts, f.l_node, f.l_name, cols, self.lost(ts, "lost_link_node", f.l_node))
        return by_node

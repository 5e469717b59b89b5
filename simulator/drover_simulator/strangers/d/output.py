"""From what the GPUs did to what their node's agent reports: noise, steps of instruments, lost rows; then the files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from drover_core.metrics.catalog import BY_NAME
from drover_simulator.strangers.d import engine
from drover_simulator.strangers.d.plan import Plan

GIB = 2.0**30
BLOCK_ROWS = 15_000
KEYS = {"gpu": "gpu", "node": None, "link": "link", "workload": "workload"}
CARRIED = {"gpu": ("nvlink_crc_errors", "nvlink_replays", "nvlink_recoveries", "ecc_sram_corrected", "ecc_sram_uncorrected", "ecc_dram_corrected", "ecc_dram_uncorrected", "remapped_rows_corrected", "remapped_rows_uncorrected", "pcie_replays"),
           "node": ("pcie_aer_correctable", "pcie_aer_fatal", "edac_corrected", "edac_uncorrected"),
           "link": ("symbol_errors", "link_downed", "link_error_recoveries", "rx_errors", "tx_discards", "tx_wait", "local_integrity_errors", "buffer_overruns", "out_of_sequence", "packet_sequence_errors", "rnr_nak_retries", "ack_timeouts", "cnp_sent", "cnp_handled")}  # fmt: skip
KEPT = ("remapped_rows_corrected", "remapped_rows_uncorrected")  # in the InfoROM: a reboot does not clear them


class Table:
    """One Parquet file, written block by block."""

    def __init__(self, path: Path, scope: str) -> None:
        self._path, self._key = path, KEYS[scope]
        self._writer: pq.ParquetWriter | None = None

    def add(self, ts: Any, names: Any, second: Any, columns: dict[str, np.ndarray]) -> None:
        if not len(ts):
            return
        arrays: dict[str, Any] = {
            "ts": pa.array(np.rint(ts).astype(np.int64)).cast(pa.timestamp("ms", "UTC")),
            "node": pa.array(names),
        }
        if self._key:
            arrays[self._key] = pa.array(second)
        for name, values in columns.items():
            metric = BY_NAME[name]
            gone = np.isnan(values)
            step = metric.step
            if step == 1 and name not in ("gpu_temp_c", "memory_temp_c", "thermal_margin_c"):
                arrays[name] = pa.array(np.where(gone, 0, np.rint(values)).astype(np.int64), pa.int64(), mask=gone)
            else:
                if step and step < 1:
                    values = np.rint(values / step) * step
                arrays[name] = pa.array(values, pa.float64(), mask=gone)
        table = pa.table(arrays)
        if self._writer is None:
            self._writer = pq.ParquetWriter(self._path, table.schema, compression="zstd")
        self._writer.write_table(table)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class Series:
    """Columns that are mostly still: counts, states, factors; made for a block of steps."""

    def __init__(self, plan: Plan, scope: str) -> None:
        self.plan, self.scope, site = plan, scope, plan.site
        self.counts: dict[str, dict[int, np.ndarray]] = {}
        steps, dt, rng = site.steps, site.dt, site.rng
        grid = np.arange(steps) * dt
        for (s, column, what), times in sorted(plan.counts.items(), key=lambda row: row[0]):
            if s == scope:
                at = np.clip(np.ceil(np.concatenate(times) / dt), 0, steps).astype(int)
                at = at[at < steps]
                self._of(column, what, steps)[:] += np.bincount(at, minlength=steps)[:steps]
        for s, column, what, a, b, first, last in plan.rates:
            if s != scope:
                continue
            low, high = max(int(np.ceil(a / dt)), 0), min(int(np.ceil(b / dt)) + 1, steps)
            if high <= low:
                continue
            cover = np.clip((np.minimum(grid[low:high], b) - np.maximum(grid[low:high] - dt, a)) / dt, 0, 1)
            rate = first + (last - first) * np.clip((grid[low:high] - a) / max(b - a, 1), 0, 1)
            mean = rate * cover * dt
            if column in ("tx_wait", "cnp_sent", "cnp_handled"):
                mean = mean * rng.uniform(0.4, 1.6, len(mean))
            self._of(column, what, steps)[low:high] += rng.poisson(mean)
        for column, found in self.counts.items():
            for what, values in found.items():
                total = np.cumsum(values)
                node = what if scope == "node" else int(site.node_of[what]) if scope == "gpu" else site.ports[what][0]
                if column not in KEPT:
                    for n, t in sorted(plan.boots):
                        k = int(np.ceil(t / dt))
                        if n == node and 0 < k < steps:
                            total[k:] -= total[k - 1]
                found[what] = total

    def _of(self, column: str, what: int, steps: int) -> np.ndarray:
        return self.counts.setdefault(column, {}).setdefault(what, np.zeros(steps))

    def count(self, column: str, low: int, high: int, width: int) -> np.ndarray:
        out = np.zeros((high - low, width))
        for what, values in self.counts.get(column, {}).items():
            out[:, what] = values[low:high]
        return out

    def settle(self, column: str, values: np.ndarray, low: int) -> np.ndarray:
        """Apply the plan's factors, sums and states to [steps, things] from step `low`."""
        site = self.plan.site
        t = (low + np.arange(len(values)))[:, None][:, 0] * site.dt
        for kind, rows in (("scale", self.plan.scales), ("add", self.plan.adds), ("state", self.plan.states)):
            for scope, name, what, a, b, value in rows:
                if scope != self.scope or name != column:
                    continue
                on = (t >= a) & (t < b)
                if not on.any():
                    continue
                if kind == "scale":
                    values[on, what] *= value
                elif kind == "add":
                    values[on, what] += value if name != "source_nvml_read_s" else t[on] - a
                else:
                    values[on, what] = value
        return values


def lost(plan: Plan) -> tuple[np.ndarray, np.ndarray]:
    """Which rows did not come: [steps, GPUs], [steps, nodes]."""
    site, rng = plan.site, plan.site.rng
    t = np.arange(site.steps) * site.dt
    gpu, node = np.zeros((site.steps, site.g), bool), np.zeros((site.steps, site.n), bool)
    for scope, what, a, b in plan.silent:
        on = (t >= a) & (t < b)
        if scope == "gpu":
            gpu[on, what] = True
        elif scope == "gpus":
            gpu[np.ix_(on, site.gpus_of(what))] = True
        else:
            node[on, what] = True
    for _, what, a, b, share in plan.thin:
        on = (t >= a) & (t < b)
        gpu[on, what] |= rng.random(int(on.sum())) < share
    if site.gaps:
        for _ in range(int(rng.poisson(site.gaps * site.steps * site.n / 8))):
            k, n = int(rng.integers(site.steps)), int(rng.integers(site.n))
            node[k : k + int(rng.integers(1, 16)), n] = True
        node |= rng.random(node.shape) < site.gaps
    gpu |= node[:, site.node_of]
    return gpu, node


def write(folder: Path, plan: Plan, out: dict[str, np.ndarray]) -> None:
    """Write the four Parquet files."""
    site = plan.site
    gone_gpu, gone_node = lost(plan)
    offset = np.cumsum(site.rng.normal(0, 0.0004, (site.steps, site.n)) * np.sqrt(site.dt / 10), 0) + site.rng.normal(
        0, 0.004, site.n
    )
    for node, a, b, s in plan.shifts:
        t = np.arange(site.steps) * site.dt
        offset[(t >= a) & (t < b), node] += s
    _gpus(folder, plan, out, gone_gpu, offset)
    _nodes(folder, plan, out, gone_node, offset)
    if site.ports:
        _links(folder, plan, out, gone_node, offset)
    if site.workloads:
        _workloads(folder, plan, out, gone_node)


def _stamps(plan: Plan, low: int, high: int, offset: np.ndarray) -> np.ndarray:
    """Milliseconds [steps, nodes]: the agent's tick, by its own clock where the site keeps that."""
    site = plan.site
    shape = (high - low, site.n)
    late = (
        site.rng.exponential(0.4, shape) * site.jitter_s * 1000 * (site.rng.random(shape) < 0.25)
    )  # most ticks are in time
    ts = site.t0_ms + (np.arange(low, high) * site.dt * 1000)[:, None] + np.minimum(late, site.dt * 400)
    if site.rows_shifted:
        ts = ts + offset[low:high] * 1000
    return ts


def _emit(
    table: Table,
    plan: Plan,
    ts: np.ndarray,
    names: np.ndarray,
    second: np.ndarray | None,
    columns: dict[str, np.ndarray],
    keep: np.ndarray,
) -> None:
    """Write the rows of a block that came, some twice, some late."""
    site, at = plan.site, np.flatnonzero(keep.ravel())
    if site.doubled:
        at = np.sort(np.concatenate([at, site.rng.choice(at, int(len(at) * site.doubled))])) if len(at) else at
    if site.shuffle and len(at) > 10:
        some = site.rng.choice(len(at), int(len(at) * site.shuffle))
        where = np.arange(len(at), dtype=float)
        where[some] += site.rng.uniform(0, 300, len(some))
        at = at[np.argsort(where, kind="stable")]
    whole = (len(keep), keep.shape[1])
    table.add(
        ts.ravel()[at], np.broadcast_to(names, whole).ravel()[at], None if second is None else np.broadcast_to(second, whole).ravel()[at],
        {name: values.ravel()[at] for name, values in columns.items()},
    )  # fmt: skip


def _gpus(folder: Path, plan: Plan, out: dict[str, np.ndarray], gone: np.ndarray, offset: np.ndarray) -> None:
    site, rng = plan.site, plan.site.rng
    drop, held = site.drop["gpu"], Series(plan, "gpu")
    table = Table(folder / "gpu.parquet", "gpu")
    names = np.array(site.names, object)[site.node_of]
    size = max(1, BLOCK_ROWS // site.g)
    carry = {name: rng.uniform(0, 3e9, site.g) for name in ("throttle_power_us", "throttle_thermal_sw_us")}
    carry |= {name: np.zeros(site.g) for name in ("throttle_thermal_hw_us", "throttle_brake_us", "throttle_sync_us")}
    carry["energy_j"] = rng.uniform(1e7, 5e9, site.g)
    jobs = len(plan.jobs) + 1
    bias = rng.normal(0, 0.4, site.g)
    for low in range(0, site.steps, size):
        high = min(low + size, site.steps)
        columns = _gpu_columns(plan, {name: values[low:high] for name, values in out.items()}, jobs, bias)
        c, why = columns, out["why"][low:high]
        busy = np.clip(out["busy"][low:high], 0, 1) * site.dt * 1e6
        gains = {"energy_j": c["power_w"] * site.dt, "throttle_power_us": busy * ((why & engine.POWER) > 0), "throttle_thermal_sw_us": site.dt * 1e6 * ((why & engine.SW_HEAT) > 0),
                 "throttle_thermal_hw_us": site.dt * 1e6 * ((why & engine.HW_HEAT) > 0), "throttle_brake_us": busy * ((why & engine.BRAKE) > 0), "throttle_sync_us": busy * 0}  # fmt: skip
        for name, gain in gains.items():
            total = carry[name] + np.cumsum(gain, 0)
            for node, t in sorted(plan.boots):
                k = int(np.ceil(t / site.dt)) - low
                if 0 <= k < len(total):
                    mine = site.gpus_of(node)
                    total[k:, mine] -= total[k, mine].copy()
            carry[name] = total[-1].copy()
            c[name] = total
        for name in CARRIED["gpu"]:
            c[name] = held.count(name, low, high, site.g)
        links = np.broadcast_to(site.of_board("links"), why.shape).copy()
        c["nvlink_active_links"] = links
        for name in ("sram_threshold_exceeded", "row_remap_pending", "row_remap_failed", "recovery_action"):
            c[name] = np.zeros(why.shape)
        c["remap_banks_max"], c["remap_banks_none"] = np.full(why.shape, 640.0), np.zeros(why.shape)
        c["fabric_state"] = np.where(links > 0, 3.0, 0.0)
        c["nvlink_effective_ber"] = 10 ** rng.normal(-15.2, 0.2, why.shape)
        kept = {name: held.settle(name, values, low) for name, values in c.items() if name not in drop}
        if not all(b.hbm for b in site.boards):
            soft = ~np.array([b.hbm for b in site.boards])[site.node_of]
            for name in ("memory_temp_c", "remap_banks_max", "remap_banks_none"):
                if name in kept:
                    kept[name] = np.where(soft, np.nan, kept[name])
        if not all(b.links for b in site.boards):
            for name in list(kept):
                if name.startswith("nvlink"):
                    kept[name] = np.where(site.of_board("links") > 0, kept[name], np.nan)
        ts = _stamps(plan, low, high, offset)[:, site.node_of]
        _emit(table, plan, ts, names, site.slot_of.astype(np.int64), kept, ~gone[low:high])
    table.close()


def _gpu_columns(plan: Plan, o: dict[str, np.ndarray], jobs: int, bias: np.ndarray) -> dict[str, np.ndarray]:
    """The gauges of a block. What a job's GPUs share (the phase of its steps) moves together."""
    site, rng = plan.site, plan.site.rng
    shape, noise = o["power"].shape, site.noise
    common = rng.standard_normal((shape[0], jobs))
    shared = np.take_along_axis(common, np.where(o["job"] < 0, jobs - 1, o["job"]).astype(int), 1)
    idle = site.of_board("idle_w")

    def near(values: np.ndarray, both: float, own: float) -> np.ndarray:
        return values * (1 + noise * (both * shared + own * rng.standard_normal(shape)))

    swing = 0.025 if site.dt > 4 else 0.05
    c: dict[str, np.ndarray] = {}
    dynamic = np.maximum(o["power"] - idle, 0)
    power = np.minimum(o["power"], idle) + np.maximum(near(dynamic, swing, swing * 0.8), 0) + rng.normal(0, 0.4, shape)
    c["power_w"] = np.clip(power, 2, np.maximum(o["plim"] * 1.08, o["power"] * 1.01))
    c["power_limit_w"] = o["plim"].astype(float)
    capped = (o["why"] & engine.POWER) > 0
    clock = o["clock"] * (1 - capped * np.abs(rng.normal(0, 0.008 * noise, shape)))
    c["sm_clock_mhz"] = np.rint(clock / 15) * 15
    asleep = (o["why"] & engine.IDLE) > 0
    hbm = np.array([b.hbm for b in site.boards])[site.node_of]
    c["memory_clock_mhz"] = np.where(asleep & ~hbm, 405.0, site.of_board("mem_clock") * o["memclk"])
    c["clock_event_reasons"] = o["why"].astype(float)
    step = site.round_temp
    die = o["die"] + bias * 0.3 + rng.normal(0, 0.25, shape)
    c["gpu_temp_c"] = np.rint(die / step) * step
    c["memory_temp_c"] = np.rint((o["hbm"] + bias + rng.normal(0, 0.3, shape)) / step) * step
    c["thermal_margin_c"] = np.rint(site.of_board("t_slow") - die)
    c["gpu_util_ratio"] = np.clip(np.rint(near(o["util"], 0.01, 0.008).clip(0, 1) * 100) / 100, 0, 1)
    for name, key, ceiling in (
        ("sm_active_ratio", "sm", 1.0),
        ("tensor_active_ratio", "tensor", 0.98),
        ("dram_active_ratio", "dram", 1.0),
    ):
        c[name] = np.clip(near(o[key], 0.012, 0.008), 0, ceiling)
    c["memory_util_ratio"] = np.clip(np.rint(o["dram"] * 1.15 * 100) / 100, 0, 1)
    c["sm_occupancy_ratio"] = np.clip(near(o["sm"] * 0.3, 0.01, 0.01), 0, 1)
    c["fp64_active_ratio"] = np.zeros(shape)
    c["fp32_active_ratio"] = np.clip(near(o["sm"] * 0.09, 0.02, 0.02), 0, 1)
    c["fp16_active_ratio"] = np.clip(near(o["sm"] * 0.03, 0.02, 0.02), 0, 1)
    total = site.of_board("memory_gib") * GIB
    c["framebuffer_total_bytes"] = np.broadcast_to(np.rint(total / 2**20) * 2**20, shape).copy()
    used = np.minimum(0.006 + o["fill"], 0.985) * total
    c["framebuffer_used_bytes"] = np.rint(used * (1 + 0.0005 * shared * (o["fill"] > 0.05)) / 2**21) * 2**21
    lane = site.of_board("lanes") * 1e9 * 2.0 ** (site.of_board("pcie") - 3)
    c["pcie_tx_bytes_per_s"] = np.clip(near(o["pcie"] * lane * 0.4, 0.1, 0.1), 0, lane)
    c["pcie_rx_bytes_per_s"] = np.clip(near(o["pcie"] * lane * 0.6, 0.1, 0.1), 0, lane)
    full = site.of_board("link_gbs") * 1e9
    c["nvlink_tx_bytes_per_s"] = np.clip(near(o["nvlink"] * full, 0.02, 0.015), 0, full)
    c["nvlink_rx_bytes_per_s"] = np.clip(near(o["nvlink"] * full, 0.02, 0.015), 0, full)
    drops = np.array([b.name.startswith(("L40S", "T4")) for b in site.boards])[site.node_of]
    c["pcie_generation"] = np.where(asleep & drops, 1.0, site.of_board("pcie"))
    c["pcie_width"] = np.broadcast_to(site.of_board("lanes"), shape).copy()
    c["compute_processes"] = np.rint(o["procs"]).astype(float)
    return c


def _nodes(folder: Path, plan: Plan, out: dict[str, np.ndarray], gone: np.ndarray, offset: np.ndarray) -> None:
    site, rng = plan.site, plan.site.rng
    drop, held, table = site.drop["node"], Series(plan, "node"), Table(folder / "node.parquet", "node")
    names = np.array(site.names, object)
    size = max(1, BLOCK_ROWS // site.n)
    cores, memory = int(rng.choice([64, 96, 128, 192])), float(rng.choice([512, 1024, 2048])) * GIB
    rpm, base_read = float(rng.uniform(9000, 20000)), float(rng.uniform(0.01, 0.08))
    bias = rng.normal(0, 0.5, site.n)
    missed = np.zeros(site.n)
    for low in range(0, site.steps, size):
        high = min(low + size, site.steps)
        shape = (high - low, site.n)
        cpu, store = out["cpu"][low:high].astype(float), out["store"][low:high].astype(float)
        c: dict[str, np.ndarray] = {}
        c["cpu_util_ratio"] = np.clip(cpu * (1 + 0.08 * rng.standard_normal(shape)) + 0.002 * rng.random(shape), 0, 1)
        c["load1"] = np.clip(cpu * cores * (1 + 0.1 * rng.standard_normal(shape)) + 0.3, 0, None)
        c["memory_total_bytes"] = np.full(shape, memory)
        c["memory_available_bytes"] = memory * np.clip(0.93 - 0.6 * cpu - 0.01 * rng.random(shape), 0.05, 1)
        c["disk_read_bytes_per_s"] = 10 ** rng.normal(5.5, 0.6, shape)
        c["disk_write_bytes_per_s"] = 10 ** rng.normal(5.8, 0.4, shape) + store * 1e9
        c["root_used_ratio"] = np.clip(0.41 + bias * 0.05 + np.zeros(shape), 0, 1)
        c["net_rx_bytes_per_s"] = 10 ** rng.normal(6.3, 0.4, shape) + 4e8 * cpu
        c["net_tx_bytes_per_s"] = 10 ** rng.normal(6.0, 0.4, shape) + store * 2e9
        c["inlet_temp_c"] = (
            np.rint((out["inlet"][low:high] + bias + rng.normal(0, 0.1, shape)) / site.round_temp) * site.round_temp
        )
        c["clock_offset_s"] = offset[low:high].copy()
        for name in CARRIED["node"]:
            c[name] = held.count(name, low, high, site.n)
        c["oom_kills"] = np.zeros(shape)
        c["fan_min_rpm"] = np.rint(out["fan"][low:high] * rpm * (1 + 0.005 * rng.standard_normal(shape)) / 60) * 60
        c["fans_failed"] = np.zeros(shape)
        c["agent_cpu_ratio"] = np.abs(rng.normal(0.012, 0.002, shape))
        c["agent_rss_bytes"] = np.full(shape, 48e6) + rng.integers(0, 300, shape) * 4096
        c["spool_bytes"] = rng.integers(0, 20000, shape).astype(float)
        c["source_nvml_read_s"] = np.abs(rng.normal(base_read, base_read * 0.2, shape))
        c["agent_slowest_read_s"] = c["source_nvml_read_s"] * 1.2
        c["agent_tick_s"] = c["source_nvml_read_s"] * 1.4
        for name in ("source_nvml_outcome", "agent_sources_failing", "agent_sources_hung", "agent_read_failures"):
            c[name] = np.zeros(shape)
        c["agent_missed_ticks"] = missed + np.cumsum(rng.random(shape) < 0.0005, 0)
        missed = c["agent_missed_ticks"][-1].copy()
        kept = {name: held.settle(name, values, low) for name, values in c.items() if name not in drop}
        _emit(table, plan, _stamps(plan, low, high, offset), names, None, kept, ~gone[low:high])
    table.close()


def _links(folder: Path, plan: Plan, out: dict[str, np.ndarray], gone: np.ndarray, offset: np.ndarray) -> None:
    site, rng = plan.site, plan.site.rng
    ports, drop = len(site.ports), site.drop["link"]
    held, table = Series(plan, "link"), Table(folder / "link.parquet", "link")
    node = np.array([p[0] for p in site.ports])
    names, links = np.array(site.names, object)[node], np.array([p[1] for p in site.ports], object)
    rate = np.array([site.boards[n].nic_gbps for n in node])
    serves = np.zeros((site.g, ports))
    for gpu in range(site.g):
        port = site.port_of(gpu)
        if port is not None:
            serves[gpu, port] = 1
    serves /= np.maximum(serves.sum(0), 1)
    storage = np.array([p[2] < 0 for p in site.ports])
    first = np.array([p[1] == "mlx5_0" for p in site.ports])
    stores = storage if storage.any() else first
    waits = 10 ** rng.uniform(2, 5.5, ports) * (site.fabric == "ib")
    marks = 10 ** rng.uniform(-1.5, 0.8, ports) * (site.fabric == "roce")
    total = {name: rng.uniform(1e12, 4e15, ports) for name in ("rx_bytes", "tx_bytes")}
    extra = {name: rng.uniform(0, 1e9, ports) for name in ("tx_wait", "cnp_sent", "cnp_handled")}
    size = max(1, BLOCK_ROWS // ports)
    for low in range(0, site.steps, size):
        high = min(low + size, site.steps)
        shape = (high - low, ports)
        flow = out["net"][low:high].astype(float) @ serves * 1e9
        flow += stores * out["store"][low:high][:, node] * rate * 1e9 / 8 * 0.35
        flow = held.settle("bytes", flow + 10 ** rng.normal(4, 0.5, shape), low)
        flow = np.minimum(flow, rate * 1e9 / 8 * 0.97)
        c = {"link_up": np.ones(shape), "rate_gbps": np.broadcast_to(rate, shape).copy()}
        load = flow / (rate * 1e9 / 8)
        gains = {"rx_bytes": flow * (1 + 0.03 * rng.standard_normal(shape)) * site.dt, "tx_bytes": flow * (1 + 0.03 * rng.standard_normal(shape)) * site.dt,
                 "tx_wait": load * waits * site.dt * rng.exponential(1, shape) * 10, "cnp_sent": load * marks * site.dt * rng.exponential(1, shape) * 20,
                 "cnp_handled": load * marks * site.dt * rng.exponential(1, shape) * 20}  # fmt: skip
        for name in CARRIED["link"]:
            c[name] = held.count(name, low, high, ports)
        for name, gain in gains.items():
            carry = total if name in total else extra
            sums = carry[name] + np.cumsum(np.maximum(gain, 0), 0)
            for n, t in sorted(plan.boots):
                k = int(np.ceil(t / site.dt)) - low
                if 0 <= k < len(sums):
                    mine = np.flatnonzero(node == n)
                    sums[k:, mine] -= sums[k, mine].copy()
            carry[name] = sums[-1].copy()
            c[name] = sums if name in total else c[name] + sums
        kept = {name: held.settle(name, values, low) for name, values in c.items() if name not in drop}
        _emit(table, plan, _stamps(plan, low, high, offset)[:, node], names, links, kept, ~gone[low:high][:, node])
    table.close()


def _workloads(folder: Path, plan: Plan, out: dict[str, np.ndarray], gone: np.ndarray) -> None:
    """What training loops and inference servers report of themselves, every half minute."""
    site, rng = plan.site, plan.site.rng
    table, every = Table(folder / "workload.parquet", "workload"), max(1, int(round(30 / site.dt)))
    for number, job in enumerate(plan.jobs):
        steps = np.arange(0, site.steps, every)
        t = steps * site.dt
        head = int(job.members[0])
        node = int(site.node_of[head])
        steps = steps[
            (t >= job.start)
            & (t < job.end)
            & ~gone[steps, node]
            & (out["job"][steps, head] == number)
            & (out["rate"][steps, head] > 0)
        ]
        if not len(steps) or job.kind not in ("dp", "pp", "moe", "one", "infer"):
            continue
        per = np.random.default_rng(job.seed + 2).uniform(1, 12)
        step, rate = out["step"][steps, head].astype(float), out["rate"][steps, head].astype(float)
        blank = np.full(len(steps), np.nan)
        c = {
            name: blank.copy()
            for name in (
                "step_time_s",
                "tokens_per_step",
                "ttft_p50_s",
                "ttft_p95_s",
                "tokens_per_s",
                "requests_running",
                "requests_waiting",
            )
        }
        if job.kind == "infer":
            mine = out["rate"][np.ix_(steps, job.members)].sum(1)
            full = np.clip(rate * step, 0, 1)
            c["tokens_per_s"] = mine * 900 * per * (1 + 0.03 * rng.standard_normal(len(steps)))
            c["ttft_p50_s"] = 0.08 * per * step * (1 + 1.5 * full**6)
            c["ttft_p95_s"] = c["ttft_p50_s"] * (2 + 4 * full**8)
            c["requests_running"], c["requests_waiting"] = np.rint(64 * full), np.rint(np.maximum(full - 0.95, 0) * 800)
        else:
            c["step_time_s"] = per * step * (1 + 0.01 * rng.standard_normal(len(steps)))
            c["tokens_per_step"] = np.full(len(steps), float(len(job.members) * 65536))
        table.add(
            site.t0_ms + steps * site.dt * 1000,
            np.full(len(steps), site.names[node], object),
            np.full(len(steps), job.id, object),
            c,
        )
    table.close()

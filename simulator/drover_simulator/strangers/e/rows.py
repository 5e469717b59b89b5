"""Instruments: from what happened to rows, events and inventory, as agents report them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from drover_simulator.strangers.e.boards import Array, Rng, Site, Units
from drover_simulator.strangers.e.faults_heat import Traces
from drover_simulator.strangers.e.jobs import Load
from drover_simulator.strangers.e.physics import Effects, Run
from drover_simulator.strangers.writer import CaseWriter

DRIVERS = ("535.183.06", "550.127.08", "570.172.08", "580.65.06")
IDLE, POWER, SOFT, HARD = 1, 4, 0x20, 0x40  # bits of nvml.h (memory)


@dataclass
class Story:
    """A finished case before it is measured."""

    site: Site
    units: Units
    load: Load
    eff: Effects
    run: Run
    traces: Traces


class Measure:
    """Makes the columns of a block of rows; counters go on from block to block."""

    def __init__(self, rng: Rng, story: Story) -> None:
        """Draw where counters stand and how late agents are."""
        self.rng, self.story = rng, story
        site = story.site
        self.shape = (site.nodes, site.slots)
        self.base: dict[str, Array] = {}
        self.phase = rng.uniform(0, min(1.0, site.interval) * 1000, site.nodes)
        self.lost = float(rng.choice([0, 0.0005, 0.003]))
        self.gaps = self._gaps()
        self.resets = self._resets()

    def _gaps(self) -> Array:
        """Agents that restart: a node's rows are missing for 20 to 120 s."""
        site, rng = self.story.site, self.rng
        gaps = np.zeros((site.rows, site.nodes))
        for n in range(site.nodes):
            for _ in range(int(rng.poisson(0.15 * site.seconds / 14400))):
                at = rng.uniform(0, site.seconds)
                gaps[site.row(at) : site.row(at + rng.uniform(20, 120)), n] = 1
        return gaps

    def _resets(self) -> list[tuple[int, int]]:
        """(row, node) at which counters begin again at 0: after a planned stop."""
        site = self.story.site
        lines = self.story.traces.lines
        return [(site.row(at), n) for at, n, _, _, code, _ in lines if code == "agent_started"]

    def counter(self, name: str, add: Array, start: float, when: slice) -> Array:
        """Cumulative sum of `add` (rows, nodes, slots) on from the last block."""
        base = self.base.setdefault(name, np.floor(self.rng.exponential(start + 1e-9, self.shape)))
        total = base + np.cumsum(add, axis=0)
        for row, n in self.resets:
            if when.start <= row < when.stop:
                total[row - when.start :, n] -= total[row - when.start, n].copy()
        self.base[name] = total[-1].copy()
        return total

    def gpu(self, when: slice) -> dict[str, Array]:
        """Columns of gpu.parquet."""
        story, rng, has = self.story, self.rng, self.story.site.columns
        run, units = story.run, story.units
        steps = np.arange(when.start, when.stop) * story.site.sub + story.site.sub - 1
        shape = (when.stop - when.start, *self.shape)
        out: dict[str, Array] = {}
        sharp = 10 if "temp_fine" in has else 1
        die = run.die[when] + units.offset + rng.normal(0, 0.25, shape)
        out["gpu_temp_c"] = np.round(die * sharp) / sharp
        power = run.power[when] * (1 + rng.normal(0, 0.006, shape))
        out["power_w"] = np.round(power, 0 if "power_round" in has else 1)
        out["sm_clock_mhz"] = np.round(run.clock[when] * units.clock / 15) * 15
        if "memory_temp_c" in has:
            warm = np.round(run.hbm[when] + units.offset_hbm + rng.normal(0, 0.3, shape))
            out["memory_temp_c"] = np.where([[b.hbm] for b in story.site.boards], warm, np.nan)
        if "thermal_margin_c" in has:
            out["thermal_margin_c"] = np.round(units.slow - die)
        if "power_limit_w" in has:
            out["power_limit_w"] = np.round(story.eff.limit[steps].astype(np.float64), 1)
        self._use(out, when, steps)
        self._counters(out, when, steps)
        for name, values in story.traces.states.items():
            if name in out:
                out[name] = np.where(np.isnan(values[when]), out[name], values[when])
        return out

    def _use(self, out: dict[str, Array], when: slice, steps: Any) -> None:
        story, rng, has = self.story, self.rng, self.story.site.columns
        load, duty = story.load, story.run.duty[when]
        demand = load.demand[steps] * (1 - story.eff.dead[steps])
        noise = 1 + rng.normal(0, 0.03, demand.shape)
        asked = demand > 0.005
        spin = np.clip(demand * (1 + 0.08 * asked), 0, 1)  # NVML: any kernel, waiting ones too
        whole = story.site.mig[None, :, None]
        if "gpu_util_ratio" in has:
            out["gpu_util_ratio"] = np.where(whole, np.nan, np.round(np.clip(spin * noise, 0, 1), 2))
        if "memory_util_ratio" in has:
            value = np.round(np.clip(demand * load.dram[steps] * duty * noise, 0, 1), 2)
            out["memory_util_ratio"] = np.where(whole, np.nan, value)
        if "prof" in has:
            work = demand * (duty + (1 - duty) * 0.25)
            out["sm_active_ratio"] = np.round(np.clip(work * 0.92 * noise, 0, 1), 4)
            out["tensor_active_ratio"] = np.round(np.clip(demand * duty * load.kernel[steps] * 0.55 * noise, 0, 1), 4)
            out["dram_active_ratio"] = np.round(np.clip(demand * duty * load.dram[steps] * noise, 0, 1), 4)
        if "framebuffer" in has:
            total = np.array([b.memory_gb * 2**30 for b in story.site.boards])[:, None]
            used = load.memory[steps].astype(np.float64)
            if "framebuffer" in story.traces.states:
                gone = story.traces.states["framebuffer"][when]
                used = np.where(np.isnan(gone), used, gone)
            out["framebuffer_used_bytes"] = np.round(used * total / 2**20) * 2**20
            out["framebuffer_total_bytes"] = np.broadcast_to(total, used.shape).copy()
        if "compute_processes" in has:
            out["compute_processes"] = load.processes[steps].astype(np.float64)
        if "memory_clock_mhz" in has:
            full = np.array([b.memory_mhz for b in story.site.boards])[:, None]
            out["memory_clock_mhz"] = np.where(asked | (load.processes[steps] > 0) | (full > 1000), full, 405.0)

    def _counters(self, out: dict[str, Array], when: slice, steps: Any) -> None:
        story, has, run = self.story, self.story.site.columns, self.story.run
        before = max(when.start - 1, 0)

        def since(values: Array) -> Array:
            return np.diff(values[when], axis=0, prepend=values[before : before + 1])

        power, soft, hard = since(run.held_power), since(run.held_soft), since(run.held_hard)
        if "energy_j" in has:
            out["energy_j"] = np.round(self.counter("energy_j", since(run.energy), 4e9, when), 3)
        if "clock_event_reasons" in has:
            idle = (story.load.demand[steps] <= 0.005) | (story.eff.dead[steps] > 0.99)
            bits = IDLE * idle + POWER * (power > 0) + SOFT * (soft > 0) + HARD * (hard > 0)
            out["clock_event_reasons"] = bits.astype(np.float64)
        if "throttle" in has:
            for name, add in (("power", power), ("thermal_sw", soft), ("thermal_hw", hard)):
                out[f"throttle_{name}_us"] = np.round(self.counter(f"throttle_{name}_us", add * 1e6, 3e9, when))
        names = []
        if "ecc" in has:
            names += [
                "ecc_dram_corrected",
                "ecc_dram_uncorrected",
                "remapped_rows_corrected",
                "remapped_rows_uncorrected",
                "ecc_sram_uncorrected",
            ]
            for name in ("row_remap_pending", "row_remap_failed", "sram_threshold_exceeded"):
                out[name] = np.zeros_like(out["power_w"])
        if "pcie" in has:
            names.append("pcie_replays")
            out["pcie_width"] = np.full_like(out["power_w"], 16)
            out["pcie_generation"] = np.full_like(out["power_w"], 5 if story.site.boards[0].tdp_w > 400 else 4)
        quiet = {"ecc_dram_corrected": 2e-6, "pcie_replays": 1e-5}
        for name in names:
            add = self.rng.poisson(quiet.get(name, 0) * story.site.interval, out["power_w"].shape).astype(np.float64)
            if name in story.traces.counts:
                add += story.traces.counts[name][when]
            out[name] = self.counter(name, add, 3 if name in quiet else 0, when)

    def node(self, when: slice) -> dict[str, Array]:
        """Columns of node.parquet, (rows, nodes)."""
        story, rng, site = self.story, self.rng, self.story.site
        run, has, out = story.run, site.columns, {}
        shape = (when.stop - when.start, site.nodes)
        if "inlet" in has:
            inlet = run.inlet[when] + self._constant("inlet", 0.6) + rng.normal(0, 0.1, shape)
            inlet = (
                np.round(inlet)
                if "temp_fine" not in has and self._constant("whole", 1.0)[0] > 0
                else np.round(inlet, 1)
            )
            out["inlet_temp_c"] = np.where(site.no_inlet, np.nan, inlet)
        if "fan" in has:
            rpm = np.round(run.fan_min[when] * site.fan_max_rpm * (1 + rng.normal(0, 0.004, shape)) / 60) * 60
            out["fan_min_rpm"] = np.where(site.no_fan, np.nan, rpm)
            if "fans_failed" in has:
                failed = story.traces.states.get("fans_failed")
                value = np.zeros(shape) if failed is None else np.nan_to_num(failed[when][:, :, 0])
                out["fans_failed"] = np.where(site.no_fan, np.nan, value)
        if "clock" in has:
            offset = self._constant("offset", 0.004) + rng.normal(0, 0.0008, shape)
            out["clock_offset_s"] = np.round(
                offset + (0 if story.traces.clock is None else story.traces.clock[when]), 6
            )
        if "host" in has or not out:
            steps = np.arange(when.start, when.stop) * site.sub + site.sub - 1
            busy = story.load.demand[steps].mean(axis=2)
            out["cpu_util_ratio"] = np.round(np.clip(0.03 + 0.15 * busy + rng.normal(0, 0.01, shape), 0, 1), 4)
            out["load1"] = np.round(np.clip(1 + 14 * busy + rng.normal(0, 0.5, shape), 0, None), 2)
            out["memory_total_bytes"] = np.full(shape, 2.0**41)
            out["memory_available_bytes"] = np.round((0.9 - 0.4 * busy) * 2**41)
            out["net_tx_bytes_per_s"] = np.round(4e7 * busy * (1 + rng.exponential(0.3, shape)))
        return out

    def _constant(self, name: str, size: float) -> Array:
        if name not in self.base:
            self.base[name] = self.rng.normal(0, size, self.story.site.nodes)
        return self.base[name]

    def link(self, when: slice) -> dict[str, Array]:
        """Columns of link.parquet; a port for each GPU, all (rows, nodes, slots)."""
        story, site = self.story, self.story.site
        ports = story.traces.ports
        steps = np.arange(when.start, when.stop) * site.sub + site.sub - 1
        wide = np.array([j.kind in ("train", "moe", "pipeline") for j in story.load.jobs] + [False])
        sync = wide[story.load.job[steps].astype(int)]
        flow = story.load.demand[steps] * (1 - story.eff.dead[steps]) * story.run.duty[when] * sync * 6e9 + 1e4
        up = ports.get("link_up")
        up = np.ones_like(flow) if up is None else np.where(np.isnan(up[when]), 1.0, up[when])
        out = {"link_up": up, "rate_gbps": np.where(up > 0, 400.0, np.nan)}
        for name in ("rx_bytes", "tx_bytes"):
            out[name] = np.round(self.counter(name, flow * up * site.interval, 1e14, when))
        errors = ports.get("symbol_errors")
        add = np.zeros_like(flow) if errors is None else errors[when]
        out["symbol_errors"] = self.counter("symbol_errors", add, 4, when)
        out["link_downed"] = self.counter("link_downed", np.maximum(-np.diff(up, axis=0, prepend=up[:1]), 0), 1, when)
        return out


def write_rows(writer: CaseWriter, measure: Measure) -> None:
    """Write all rows in blocks."""
    story, rng = measure.story, measure.rng
    site, traces = story.site, story.traces
    names = np.array(site.names, object)
    block = max(1, 150_000 // (site.nodes * site.slots))
    ports = np.array([f"mlx5_{k}" for k in range(site.slots)], object)
    for first in range(0, site.rows, block):
        when = slice(first, min(first + block, site.rows))
        count = when.stop - when.start
        tick = (np.arange(when.start, when.stop) + 1)[:, None] * site.interval * 1000
        late = rng.uniform(0, 40, (count, site.nodes))
        ts = np.round(site.t0_ms + tick - measure.phase * 0.9 + late).astype(np.int64)
        there = (rng.random((count, site.nodes)) >= measure.lost) & (measure.gaps[when] == 0)
        nodes = np.broadcast_to(names, (count, site.nodes))
        if traces.node_gone is not None:
            there &= traces.node_gone[when] == 0
        if site.has_node:
            cells = {name: values[there] for name, values in measure.node(when).items()}
            writer.rows("node", ts[there], nodes[there], cells)
        full = np.repeat(there[:, :, None], site.slots, axis=2)
        wide_ts, wide = np.repeat(ts[:, :, None], site.slots, axis=2), np.repeat(nodes[:, :, None], site.slots, axis=2)
        if site.has_link:
            cells = {name: values[full] for name, values in measure.link(when).items()}
            writer.rows("link", wide_ts[full], wide[full], cells, np.broadcast_to(ports, full.shape)[full])
        if traces.gone is not None:
            full &= np.isnan(traces.gone[when])
        cells = {name: values[full] for name, values in measure.gpu(when).items()}
        slots = np.broadcast_to(np.arange(site.slots), full.shape)[full]
        writer.rows("gpu", wide_ts[full], wide[full], cells, slots)


def write_inventory(writer: CaseWriter, rng: Rng, story: Story) -> None:
    """What nodes report of themselves: at the start, and after each change."""
    site, units = story.site, story.units
    driver, bios = (
        str(rng.choice(DRIVERS)),
        f"{rng.integers(86, 98)}.00.{rng.integers(10, 99)}.00.0{rng.integers(1, 9)}",
    )
    for n, board in enumerate(site.boards):
        facts = {"driver_version": driver}
        for k in range(site.slots):
            facts |= {
                f"gpu{k}.model": board.model, f"gpu{k}.power_limit_set_w": f"{units.limit[n, k]:.0f}",
                f"gpu{k}.sm_clock_max_mhz": f"{board.clock_mhz:.0f}", f"gpu{k}.vbios": bios,
                f"gpu{k}.ecc_mode": "enabled",
            }  # fmt: skip
            if "inventory_memory_max" in site.columns and board.hbm:
                facts[f"gpu{k}.memory_temp_max_c"] = f"{board.memory_max_c:.0f}"
        changes = sorted((c for c in story.traces.facts if c[1] == n), key=lambda c: c[0])
        for at, _, fact in changes:
            if at < 0:
                facts |= fact
        writer.inventory(site.ms(0), site.names[n], facts)
        for at, _, fact in changes:
            if at >= 0:
                facts |= fact
                writer.inventory(site.ms(at), site.names[n], facts)

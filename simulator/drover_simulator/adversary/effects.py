"""Slow or stop work in the adversary's fleets, step by step: faults of units, and what only looks like them.

An effect changes the modifiers of one step. The severity of a straggler is the share of its speed that the unit loses;
how much slower the affected part of a step gets follows from that part's share of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Protocol

import numpy as np

from drover_simulator.adversary.teams import Teams
from drover_simulator.adversary.trouble import Trouble
from drover_simulator.counters import Counters
from drover_simulator.hardware import Floats, Hardware, Ints
from drover_simulator.modifiers import LANE_SPEED, Modifiers
from drover_simulator.physics import clock_at, draw


class StepRun(Protocol):
    """What effects read and change in one step of a run."""

    hw: Hardware
    rng: np.random.Generator
    modifiers: Modifiers
    counters: Counters
    teams: Teams
    now_s: float
    inlet_c: Floats
    skew_s: Floats
    node_facts: dict[str, Floats]

    def show(self, scope: str, metric: str, index: Ints, values: Floats) -> None: ...

    def hide_setting(self, gpus: Ints) -> None: ...

    def keep_memory_clock(self, gpus: Ints) -> None: ...


During = Callable[[StepRun, Trouble, float, float], None]  # level 0..1, seconds of the step
NO_JOB_SHARE = 0.7  # of a step that computes, where no job runs
DIVIDED_S = 120.0  # for which an uneven division of work stays the same (assumed)
HALF_RATES = (1.0, 0.5, 0.25, 0.125)  # a port that trains lower runs at these shares of its rate


def left_of(share: Floats | float, severity: float) -> Floats:
    """Return the speed left in the part that takes `share` of a step, when the whole loses `severity` of its speed."""
    share = np.maximum(share, 1e-3)
    return np.asarray(share / (1 / (1 - severity) - 1 + share))


def healthy_clock(run: StepRun, gpus: Ints) -> Floats:
    """Return the clock ratio that these GPUs would have in their job without a fault."""
    activity = np.maximum(run.teams.profile("activity")[gpus], 0.1)
    room = (run.hw.tdp_w[gpus] - run.hw.static_w[gpus]) / (run.hw.dynamic_w[gpus] * activity)
    return clock_at(room)


def _slow_clock(run: StepRun, t: Trouble, level: float) -> Floats:
    compute = run.teams.profile("compute")[t.gpus]
    compute = np.where(compute > 0, compute, NO_JOB_SHARE)
    return np.asarray(healthy_clock(run, t.gpus) * left_of(compute, t.severity * level))


def _power_cap(run: StepRun, t: Trouble, level: float, _dt: float) -> None:
    """Set the power limit that lowers the clock as the severity asks."""
    g, hw = t.gpus, run.hw
    activity = np.maximum(run.teams.profile("activity")[g], 0.3)
    watts = hw.static_w[g] + hw.dynamic_w[g] * activity * draw(_slow_clock(run, t, level))
    run.modifiers.limit_w[g] = np.minimum(hw.tdp_w[g], np.round(watts / 5) * 5)


def _clock(run: StepRun, t: Trouble, level: float, _dt: float) -> None:
    run.modifiers.clock_cap[t.gpus] = _slow_clock(run, t, level)
    if t.facts.get("silent"):
        run.hide_setting(t.gpus)


def _hot(run: StepRun, t: Trouble, level: float, _dt: float) -> None:
    """Set the thermal resistance at which heat lowers the clock as the severity asks."""
    g, hw = t.gpus, run.hw
    activity = np.maximum(run.teams.profile("activity")[g], 0.3)
    watts = hw.static_w[g] + hw.dynamic_w[g] * activity * draw(_slow_clock(run, t, 1.0))
    wanted = (hw.operating_temp_c[g] - run.inlet_c[hw.gpu_node[g]]) / watts / hw.resistance[g]
    run.modifiers.resistance[g] = 1 + np.maximum(wanted - 1, 0.05) * level


def _resistance(run: StepRun, t: Trouble, level: float, _dt: float) -> None:
    run.modifiers.resistance[t.gpus] = 1 + t.severity * level
    if t.cause == "fan" and t.facts.get("reported"):
        run.node_facts["fans_failed"][t.nodes] = 1.0
        run.node_facts["fan_min_rpm"][t.nodes] *= 1 - 0.9 * level


def _hbm(run: StepRun, t: Trouble, level: float, dt: float) -> None:
    memory = np.maximum(run.teams.profile("memory")[t.gpus], 0.05)
    run.modifiers.memory_speed[t.gpus] = left_of(memory, t.severity * level)
    if t.facts.get("silent"):
        run.keep_memory_clock(t.gpus)
    run.counters.gpu["ecc_dram_corrected"][t.gpus] += run.rng.poisson(0.02 * dt)


def pcie_state(speed: float, generation: int, width: int) -> tuple[int, int]:
    """Return the lower generation and width whose bandwidth is nearest to `speed` of the full link's."""
    full = LANE_SPEED[generation] * width
    states = [(g, w) for g in range(1, generation + 1) for w in (1, 2, 4, 8, 16) if (g, w) != (generation, width)]
    return min(states, key=lambda s: abs(np.log(LANE_SPEED[s[0]] * s[1] / full / speed)))


def _pcie(run: StepRun, t: Trouble, _level: float, dt: float) -> None:
    run.modifiers.pcie_generation[t.gpus] = t.facts["generation"]
    run.modifiers.pcie_width[t.gpus] = t.facts["width"]
    run.counters.gpu["pcie_replays"][t.gpus] += run.rng.poisson(t.facts["replays_per_s"] * dt)
    run.counters.node["pcie_aer_correctable"][t.nodes] += run.rng.poisson(t.facts["replays_per_s"] * dt / 4)


def _nvlink(run: StepRun, t: Trouble, _level: float, dt: float) -> None:
    g, down = t.gpus, t.facts["down"]
    run.modifiers.nvlinks_down[g] = down
    run.modifiers.nvlink_speed[g] = 1 - down / run.hw.nvlinks[g]
    for name, per_s in (("nvlink_crc_errors", 1.0), ("nvlink_replays", 0.25), ("nvlink_recoveries", 0.0005)):
        run.counters.gpu[name][g] += run.rng.poisson(per_s * t.facts["errors_per_s"] * dt)
    run.show("gpu", "nvlink_effective_ber", g, np.full(len(g), 10.0 ** t.facts["ber"]))


def _nic(run: StepRun, t: Trouble, level: float, dt: float) -> None:
    """Run one port at a fraction of its rate, or at its rate with lost packets."""
    link = t.links[:1]
    sync = float(run.teams.profile("sync_share")[t.gpus].max())
    speed = float(left_of(max(sync, 0.01), t.severity * level))
    if t.facts.get("trained_lower"):
        speed = min(HALF_RATES[1:], key=lambda rate: abs(np.log(rate / speed)))
        run.modifiers.link_rate[link] = speed
    _slow_network(run, link, 1 / speed)
    for name, per_s in (
        ("symbol_errors", 12.0), ("rx_errors", 6.0), ("out_of_sequence", 40.0), ("packet_sequence_errors", 15.0),
        ("ack_timeouts", 1.5), ("tx_wait", 5e5),
    ):  # fmt: skip
        run.counters.link[name][link] += run.rng.poisson(per_s * level * dt)


def _slow_network(run: StepRun, links: Ints, factor: float) -> None:
    served = run.hw.link_gpu[links]
    served = served[served >= 0]
    run.modifiers.network_time[served] = np.maximum(run.modifiers.network_time[served], factor)


def _host(run: StepRun, t: Trouble, level: float, _dt: float) -> None:
    share = np.maximum(run.teams.profile("host")[t.gpus], 1e-3)
    late = 1 / (1 - t.severity * level) - 1
    run.modifiers.host_time[t.gpus] = 1 + late / share
    run.modifiers.host_busy[t.nodes] = level * t.facts.get("busy", 0.0)


def _stop(run: StepRun, t: Trouble, _level: float, _dt: float) -> None:
    run.modifiers.stopped[t.gpus] = True


def _deadlock(run: StepRun, t: Trouble, _level: float, _dt: float) -> None:
    run.modifiers.deadlocked[t.gpus] = True


def _ecc(run: StepRun, t: Trouble, level: float, dt: float) -> None:
    run.counters.gpu["ecc_dram_corrected"][t.gpus] += run.rng.poisson(t.severity * level * dt)
    if t.cause == "ecc_storm":
        run.counters.gpu["remapped_rows_corrected"][t.gpus] += run.rng.poisson(dt / 600)


def _pile_up(run: StepRun, t: Trouble, _level: float, dt: float) -> None:
    """Remap rows after corrected errors, without any XID, until banks run out of spares."""
    rows = run.rng.poisson(t.severity * dt / 60, len(t.gpus))
    run.counters.gpu["remapped_rows_corrected"][t.gpus] += rows
    run.counters.gpu["ecc_dram_corrected"][t.gpus] += rows * 3
    run.counters.gpu["remap_banks_none"][t.gpus] += rows >= 4


def _flap(run: StepRun, t: Trouble, _level: float, dt: float) -> None:
    """Take a port down for at least 25 s and up again, repeatedly (gpud's definition of a flap)."""
    link, period = t.links[:1], t.facts["down_s"] + t.facts["up_s"]
    into = (run.now_s - t.start_s) % period
    if into < t.facts["down_s"]:
        run.modifiers.link_down[link] = True
        _slow_network(run, link, 4.0)
        if into < dt:
            for name, count in (("link_downed", 1), ("link_error_recoveries", 2), ("symbol_errors", 300)):
                run.counters.link[name][link] += count


def _port_down(run: StepRun, t: Trouble, _level: float, _dt: float) -> None:
    run.modifiers.link_down[t.links[:1]] = True
    _slow_network(run, t.links[:1], 2.5)  # its rail's traffic goes over the others


def _ib_errors(run: StepRun, t: Trouble, level: float, dt: float) -> None:
    for name, per_s in (("symbol_errors", 15.0), ("rx_errors", 12.0), ("link_error_recoveries", 0.1)):
        run.counters.link[name][t.links[:1]] += run.rng.poisson(per_s * t.severity * level * dt)
    _slow_network(run, t.links[:1], 1.0 + 0.05 * level)


def _replays(run: StepRun, t: Trouble, level: float, dt: float) -> None:
    run.counters.gpu["pcie_replays"][t.gpus] += run.rng.poisson(t.severity * level * dt)
    run.counters.node["pcie_aer_correctable"][t.nodes] += run.rng.poisson(t.severity * level * dt / 4)


def _lose(run: StepRun, t: Trouble, _level: float, _dt: float) -> None:
    run.modifiers.lost[t.gpus] = True
    run.modifiers.stopped[t.gpus] = True


def _silence(run: StepRun, t: Trouble, _level: float, _dt: float) -> None:
    run.modifiers.silent[t.nodes] = True
    run.modifiers.stopped[t.gpus] = True


def _gap(run: StepRun, t: Trouble, _level: float, _dt: float) -> None:
    """Lose the telemetry of nodes that go on working."""
    run.modifiers.silent[t.nodes] = True


def _hang_driver(run: StepRun, t: Trouble, _level: float, _dt: float) -> None:
    run.modifiers.hung[t.nodes] = True


def _wrong_clock(run: StepRun, t: Trouble, _level: float, _dt: float) -> None:
    run.skew_s[t.nodes] = t.severity * t.facts["sign"]


def _limit(run: StepRun, t: Trouble, _level: float, _dt: float) -> None:
    watts = np.round(run.hw.tdp_w[t.gpus] * (1 - t.severity) / 25) * 25
    run.modifiers.limit_w[t.gpus] = np.minimum(run.modifiers.limit_w[t.gpus], watts)


def _clock_limit(run: StepRun, t: Trouble, _level: float, _dt: float) -> None:
    run.modifiers.clock_cap[t.gpus] = np.minimum(run.modifiers.clock_cap[t.gpus], 1 - t.severity)


def _clock_policy(run: StepRun, t: Trouble, _level: float, _dt: float) -> None:
    """Lock the clocks of all GPUs of a job, as its owner would."""
    run.modifiers.clock_cap[t.gpus] = 1 - t.severity


def _stages(run: StepRun, t: Trouble, _level: float, _dt: float) -> None:
    """Give some parts of a job more work than others, as its author would."""
    parts = int(t.facts["parts"])
    order = np.random.default_rng(int(t.facts["seed"])).permutation(parts)
    part = order[np.arange(len(t.gpus)) * parts // len(t.gpus)]
    run.modifiers.work[t.gpus] *= 1 + t.severity * part / max(1, parts - 1)


def _divided(run: StepRun, t: Trouble, _level: float, _dt: float) -> None:
    """Divide the work over the nodes differently every two minutes."""
    turn = max(0, int((run.now_s - t.start_s) // DIVIDED_S))
    shares = np.random.default_rng([int(t.facts["seed"]), turn]).random(len(t.nodes))
    of_gpu = shares[np.searchsorted(t.nodes, run.hw.gpu_node[t.gpus])]
    run.modifiers.work[t.gpus] *= 1 + t.severity * of_gpu


def _sequences(run: StepRun, t: Trouble, _level: float, _dt: float) -> None:
    """Give some nodes batches with longer sequences, others in each step."""
    longer = np.abs(run.rng.standard_normal(len(t.nodes)))
    of_gpu = longer[np.searchsorted(t.nodes, run.hw.gpu_node[t.gpus])]
    run.modifiers.work[t.gpus] *= 1 + t.severity * of_gpu


def _garbage(run: StepRun, t: Trouble, _level: float, _dt: float) -> None:
    """Pause the interpreters of a few random ranks for a short time."""
    hit = t.gpus[run.rng.random(len(t.gpus)) < t.facts["share"]]
    share = np.maximum(run.teams.profile("host")[hit], 1e-3)
    run.modifiers.host_time[hit] = 1 + t.severity * run.rng.exponential(1.0, len(hit)) / share


def _congestion(run: StepRun, t: Trouble, level: float, dt: float) -> None:
    served = t.gpus
    run.modifiers.network_time[served] = np.maximum(run.modifiers.network_time[served], 1 + t.severity * level)
    run.counters.link["tx_wait"][t.links] += run.rng.poisson(2e6 * level * dt, len(t.links))


def _rest(run: StepRun, t: Trouble, level: float, _dt: float) -> None:
    """Leave the job without work for a share of the time."""
    run.modifiers.running[t.gpus] *= 1 - t.severity * level


def _save(run: StepRun, t: Trouble, _level: float, _dt: float) -> None:
    run.modifiers.running[t.gpus] = 0.0
    run.node_facts["disk_write_bytes_per_s"][t.nodes] += 4e9


def _inlet(run: StepRun, t: Trouble, level: float, _dt: float) -> None:
    run.modifiers.inlet_rise_c[t.nodes] += t.severity * level


def _leaf(run: StepRun, t: Trouble, _level: float, _dt: float) -> None:
    run.modifiers.link_down[t.links] = True
    if run.now_s < t.start_s + t.facts["hold_s"]:
        run.modifiers.deadlocked[t.gpus] = True  # collectives wait for the fabric until the job is ended


def _rollout(run: StepRun, t: Trouble, _level: float, _dt: float) -> None:
    """Take one node after the other away for its update."""
    each = t.facts["each_s"]
    k = int((run.now_s - t.start_s) // each)
    if 0 <= k < len(t.nodes) and (run.now_s - t.start_s) % each < t.facts["away_s"]:
        run.modifiers.silent[t.nodes[k]] = True


DURING: Mapping[tuple[str, str], During] = MappingProxyType(
    {
        ("straggler", "power_cap"): _power_cap,
        ("straggler", "clock"): _clock,
        ("straggler", "thermal"): _hot,
        ("straggler", "hbm"): _hbm,
        ("straggler", "pcie"): _pcie,
        ("straggler", "nvlink"): _nvlink,
        ("straggler", "nic"): _nic,
        ("straggler", "host"): _host,
        ("hang", "rank_stopped"): _stop,
        ("thermal", "cooling"): _resistance,
        ("thermal", "fan"): _resistance,
        ("memory", "ecc_storm"): _ecc,
        ("memory", "remaps_pile_up"): _pile_up,
        ("link", "nvlink"): _nvlink,
        ("link", "ib_flap"): _flap,
        ("link", "ib_errors"): _ib_errors,
        ("link", "port_down"): _port_down,
        ("link", "pcie_replays"): _replays,
        ("xid", "fallen_off_bus"): _lose,
        ("xid", "gsp_timeout"): _lose,
        ("liveness", "gpu_lost"): _lose,
        ("liveness", "silent"): _silence,
        ("liveness", "rack_power"): _silence,
        ("liveness", "driver_hung"): _hang_driver,
        ("liveness", "clock_wrong"): _wrong_clock,
        ("drift", "power_limit"): _limit,
        ("drift", "clock_limit"): _clock_limit,
        ("idle", "held"): _rest,
        ("straggler", "stage_imbalance"): _stages,
        ("straggler", "sequence_length"): _sequences,
        ("straggler", "expert_imbalance"): _divided,
        ("straggler", "garbage_collection"): _garbage,
        ("straggler", "planned_power_cap"): _limit,
        ("straggler", "clock_policy"): _clock_policy,
        ("straggler", "congestion"): _congestion,
        ("hang", "data_stall"): _rest,
        ("hang", "checkpoint"): _save,
        ("hang", "evaluation"): _rest,
        ("hang", "deadlock"): _deadlock,
        ("thermal", "inlet_rack"): _inlet,
        ("thermal", "inlet_all"): _inlet,
        ("drift", "rollout"): _rollout,
        ("link", "leaf_down"): _leaf,
        ("liveness", "maintenance"): _gap,
        ("liveness", "telemetry_gap"): _gap,
        ("memory", "corrected_background"): _ecc,
        ("idle", "low_load"): _rest,
    }
)

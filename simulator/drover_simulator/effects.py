"""Change a simulated fleet as each kind of fault does.

An effect has up to three parts: `begin` at the onset, `during` in every step while the fault lasts (on modifiers that
were reset just before), and `end` at the repair. Sequences follow published ones: a GPU that falls off the bus causes
PCIe errors in half of the cases, and its job hangs and ends a minute later; a GSP timeout leaves the GPU unusable in 99
of 100 cases; an NVLink error returns with probability .66.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

import numpy as np

from drover_core.model.events import EventKind
from drover_simulator.counters import Counters
from drover_simulator.fault import Fault
from drover_simulator.hardware import Hardware, Ints
from drover_simulator.modifiers import Modifiers
from drover_simulator.physics import Physics, clock_at, draw
from drover_simulator.steps import Steps
from drover_simulator.xid_lines import RECOVERY_ACTIONS

HANG_BEFORE_END_S = 60.0  # until the scheduler ends a job that lost a rank
USUAL_ACTIVITY = 0.75  # of a training job, where no job is running
NVLINK_RECURS = 0.66
PCIE_ERRORS_WITH_79 = 0.43


class FaultyFleet(Protocol):
    """What effects read and change of a fleet."""

    hardware: Hardware
    modifiers: Modifiers
    counters: Counters
    physics: Physics
    steps: Steps
    now_s: float

    def event(self, node: int, gpu: int | None, kind: EventKind, code: str, message: str, at_s: float) -> None: ...

    def xid(self, gpu: int, xid: int, at_s: float, after: int = 0) -> None: ...

    def crash(self, job_id: str | None, at_s: float, xids: tuple[int, ...]) -> None: ...


@dataclass(frozen=True, slots=True)
class Target:
    """GPUs, nodes and ports that a fault hits, by index, and the job that held them at the onset."""

    gpus: Ints
    nodes: Ints
    links: Ints
    job: str | None
    rng: np.random.Generator

    @property
    def gpu(self) -> int:
        return int(self.gpus[0])


Once = Callable[[FaultyFleet, Fault, Target], None]
During = Callable[[FaultyFleet, Fault, Target, float, float], None]  # level 0..1, seconds of the step


@dataclass(frozen=True, slots=True)
class Effect:
    begin: Once | None = None
    during: During | None = None
    end: Once | None = None


def _power_cap(fleet: FaultyFleet, fault: Fault, target: Target, level: float, _dt: float) -> None:
    """Set the limit that lowers the clock of this GPU, if it is its job's slowest, by the severity."""
    g = target.gpus
    clock = 1 - fault.severity * level
    asked = fleet.steps.profile("activity")[g]
    activity = np.where(asked > 0, np.maximum(asked, 0.1), USUAL_ACTIVITY)  # the cap outlasts the job
    static, dynamic = fleet.hardware.static_w[g], fleet.hardware.dynamic_w[g] * activity
    healthy = clock_at((fleet.hardware.tdp_w[g] - static) / dynamic)
    fleet.modifiers.limit_w[g] = np.round((static + dynamic * draw(healthy * clock)) / 5) * 5


def _clock(fleet: FaultyFleet, fault: Fault, target: Target, level: float, _dt: float) -> None:
    fleet.modifiers.clock_cap[target.gpus] = 1 - fault.severity * level


def _resistance(fleet: FaultyFleet, fault: Fault, target: Target, level: float, _dt: float) -> None:
    fleet.modifiers.resistance[target.gpus] = 1 + fault.severity * level


def _hbm(fleet: FaultyFleet, fault: Fault, target: Target, level: float, dt: float) -> None:
    fleet.modifiers.memory_speed[target.gpus] = 1 - fault.severity * level
    fleet.counters.gpu["ecc_dram_corrected"][target.gpus] += target.rng.poisson(0.02 * dt)


def _pcie(fleet: FaultyFleet, fault: Fault, target: Target, _level: float, dt: float) -> None:
    """Train the link with fewer lanes or at a lower generation, with replays."""
    g, m = target.gpus, fleet.modifiers
    if fault.severity < 0.88:
        m.pcie_width[g] = 4 if fault.severity < 0.8 else 2
    else:
        m.pcie_generation[g] = 2 if fault.severity < 0.92 else 1
    fleet.counters.gpu["pcie_replays"][g] += target.rng.poisson(2.0 * dt)
    fleet.counters.node["pcie_aer_correctable"][target.nodes] += target.rng.poisson(0.5 * dt)


def _nvlink(fleet: FaultyFleet, fault: Fault, target: Target, _level: float, dt: float) -> None:
    g, m = target.gpus, fleet.modifiers
    m.nvlinks_down[g] = np.maximum(1.0, np.round(fault.severity * fleet.hardware.nvlinks[g]))
    m.nvlink_speed[g] = 1 - m.nvlinks_down[g] / fleet.hardware.nvlinks[g]
    for name, per_s in (("nvlink_crc_errors", 130.0), ("nvlink_replays", 30.0), ("nvlink_recoveries", 0.05)):
        fleet.counters.gpu[name][g] += target.rng.poisson(per_s * dt)


def _nic(fleet: FaultyFleet, fault: Fault, target: Target, _level: float, dt: float) -> None:
    """Run one port of the node at a fraction of its rate, with lost packets."""
    link = target.links[:1]
    fleet.modifiers.link_rate[link] = 1 - fault.severity
    served = fleet.hardware.link_gpu[link]
    fleet.modifiers.network_time[served[served >= 0]] = 1 / (1 - min(fault.severity, 0.95))
    for name, per_s in (
        ("symbol_errors", 12.0), ("rx_errors", 6.0), ("out_of_sequence", 40.0), ("packet_sequence_errors", 15.0),
        ("ack_timeouts", 1.5), ("tx_wait", 5e5),
    ):  # fmt: skip
        fleet.counters.link[name][link] += target.rng.poisson(per_s * dt)


def _host(fleet: FaultyFleet, fault: Fault, target: Target, level: float, _dt: float) -> None:
    share = np.maximum(fleet.steps.profile("host")[target.gpus], 1e-3)
    fleet.modifiers.host_time[target.gpus] = 1 + level * fault.severity / share
    fleet.modifiers.host_busy[target.nodes] = level


def _stop(fleet: FaultyFleet, _fault: Fault, target: Target, _level: float, _dt: float) -> None:
    fleet.modifiers.stopped[target.gpus] = True


def _lose(fleet: FaultyFleet, _fault: Fault, target: Target, _level: float, _dt: float) -> None:
    fleet.modifiers.lost[target.gpus] = True
    fleet.modifiers.stopped[target.gpus] = True


def _silence(fleet: FaultyFleet, _fault: Fault, target: Target, _level: float, _dt: float) -> None:
    fleet.modifiers.silent[target.nodes] = True
    fleet.modifiers.stopped[target.gpus] = True


def _hang_driver(fleet: FaultyFleet, _fault: Fault, target: Target, _level: float, _dt: float) -> None:
    fleet.modifiers.hung[target.nodes] = True


def _corrupt(fleet: FaultyFleet, _fault: Fault, target: Target, _level: float, _dt: float) -> None:
    fleet.modifiers.corrupting[target.gpus] = True


def _ecc_storm(fleet: FaultyFleet, fault: Fault, target: Target, _level: float, dt: float) -> None:
    c = fleet.counters.gpu
    c["ecc_dram_corrected"][target.gpus] += target.rng.poisson(fault.severity * dt)
    c["remapped_rows_corrected"][target.gpus] += target.rng.poisson(dt / 60)


def _flap(fleet: FaultyFleet, fault: Fault, target: Target, _level: float, dt: float) -> None:
    """Take a port down for 35 s and up for 55 s, repeatedly: a flap for gpud is down >= 25 s, three times."""
    since = fleet.now_s - fault.start_s
    link = target.links[:1]
    if since % 90.0 < 35.0:
        fleet.modifiers.link_down[link] = True
        served = fleet.hardware.link_gpu[link]
        fleet.modifiers.network_time[served[served >= 0]] = 6.0
        if since % 90.0 < dt:
            counters = fleet.counters.link
            counters["link_downed"][link] += 1
            counters["link_error_recoveries"][link] += 2
            counters["symbol_errors"][link] += 300
            counters["rx_errors"][link] += 40


def _uneven(fleet: FaultyFleet, fault: Fault, target: Target, _level: float, _dt: float) -> None:
    """Give the job four pipeline stages of unequal work, as its author would."""
    order = np.random.default_rng(round(fault.start_s)).permutation(4)
    stage = order[(np.arange(len(target.gpus)) * 4) // len(target.gpus)]
    fleet.modifiers.work[target.gpus] = 1 + fault.severity * stage / 3


def _stall(fleet: FaultyFleet, fault: Fault, target: Target, _level: float, _dt: float) -> None:
    fleet.modifiers.running[target.gpus] = 1 - fault.severity


def _rack_cap(fleet: FaultyFleet, fault: Fault, target: Target, _level: float, _dt: float) -> None:
    fleet.modifiers.limit_w[target.gpus] = np.round(fleet.hardware.tdp_w[target.gpus] * (1 - fault.severity) / 10) * 10


def _inlet(fleet: FaultyFleet, fault: Fault, target: Target, level: float, _dt: float) -> None:
    fleet.modifiers.inlet_rise_c[target.nodes] += fault.severity * level


def _request_recovery(fleet: FaultyFleet, gpu: int, xid: int, at_s: float) -> None:
    """Let the driver ask for a recovery action, in XID 154 and in its state."""
    fleet.counters.gpu["recovery_action"][gpu] = RECOVERY_ACTIONS[xid][0]
    fleet.xid(gpu, 154, at_s, after=xid)


def _fall_off(fleet: FaultyFleet, fault: Fault, target: Target) -> None:
    node = int(target.nodes[0])
    if target.rng.random() < PCIE_ERRORS_WITH_79:
        fleet.counters.node["pcie_aer_fatal"][node] += 1
        text = f"pcieport 0000:15:01.0: AER: Uncorrected (Fatal) error received: {fleet.hardware.pci(target.gpu)}.0"
        fleet.event(node, target.gpu, EventKind.KERNEL, "aer", text, fault.start_s)
    fleet.xid(target.gpu, 79, fault.start_s)
    _request_recovery(fleet, target.gpu, 79, fault.start_s + 0.2)
    _report_lost(fleet, fault, target)
    fleet.crash(target.job, fault.start_s + HANG_BEFORE_END_S, (45, 43))


def _report_lost(fleet: FaultyFleet, fault: Fault, target: Target) -> None:
    text = f"GPU {fleet.hardware.gpu_slot[target.gpu]} no longer answers: GPU is lost"
    fleet.event(int(target.nodes[0]), target.gpu, EventKind.LIFECYCLE, "gpu_lost", text, fault.start_s + 1)


def _come_back(fleet: FaultyFleet, fault: Fault, target: Target) -> None:
    """Reset the repaired GPU and report it."""
    _reset(fleet, fault, target)
    text = f"GPU {fleet.hardware.gpu_slot[target.gpu]} answers again"
    fleet.event(int(target.nodes[0]), target.gpu, EventKind.LIFECYCLE, "gpu_back", text, fault.end_s or fleet.now_s)


def _reset(fleet: FaultyFleet, _fault: Fault, target: Target) -> None:
    fleet.counters.forget(target.gpu)
    fleet.physics.forget(target.gpu)


def _vanish(fleet: FaultyFleet, fault: Fault, target: Target) -> None:
    _report_lost(fleet, fault, target)
    fleet.crash(target.job, fault.start_s + HANG_BEFORE_END_S, (45, 43))


def _gsp_timeout(fleet: FaultyFleet, fault: Fault, target: Target) -> None:
    for again in range(3):
        fleet.xid(target.gpu, 119, fault.start_s + 6 * again)
    _request_recovery(fleet, target.gpu, 119, fault.start_s + 0.2)
    _vanish(fleet, fault, target)


def _uncontained(fleet: FaultyFleet, fault: Fault, target: Target) -> None:
    c = fleet.counters.gpu
    c["ecc_sram_uncorrected"][target.gpu] += 1
    c["sram_threshold_exceeded"][target.gpu] = 1
    fleet.xid(target.gpu, 95, fault.start_s)
    _request_recovery(fleet, target.gpu, 95, fault.start_s + 0.2)
    fleet.crash(target.job, fault.start_s + 5, (45,))


def _uncorrectable(fleet: FaultyFleet, fault: Fault, target: Target) -> None:
    """Cause a double-bit error that a remap repairs after a reset; the process that touched it dies."""
    c = fleet.counters.gpu
    c["ecc_dram_uncorrected"][target.gpu] += 1
    c["remapped_rows_uncorrected"][target.gpu] += 1
    c["row_remap_pending"][target.gpu] = 1
    for xid, after_s in ((48, 0.0), (63, 0.05), (94, 0.1)):
        fleet.xid(target.gpu, xid, fault.start_s + after_s)
    fleet.crash(target.job, fault.start_s + 5, (45,))


def _fail_remap(fleet: FaultyFleet, fault: Fault, target: Target) -> None:
    c = fleet.counters.gpu
    c["ecc_dram_uncorrected"][target.gpu] += 1
    c["row_remap_failed"][target.gpu] = 1
    c["remap_banks_none"][target.gpu] += 1
    fleet.xid(target.gpu, 64, fault.start_s)
    _request_recovery(fleet, target.gpu, 64, fault.start_s + 0.2)


def _break_nvlink(fleet: FaultyFleet, fault: Fault, target: Target) -> None:
    at_s = fault.start_s
    for _ in range(4):
        fleet.xid(target.gpu, 74, at_s)
        at_s += float(target.rng.uniform(40, 200))
        if target.rng.random() > NVLINK_RECURS or (fault.end_s is not None and at_s > fault.end_s):
            break


def _go_silent(fleet: FaultyFleet, fault: Fault, target: Target) -> None:
    fleet.crash(target.job, fault.start_s + HANG_BEFORE_END_S, (45,))


def _report_hung(fleet: FaultyFleet, fault: Fault, target: Target) -> None:
    text = "calls into the NVIDIA driver have not returned for 5 s"
    fleet.event(int(target.nodes[0]), None, EventKind.LIFECYCLE, "driver_hung", text, fault.start_s + 5)


def _report_driver_back(fleet: FaultyFleet, fault: Fault, target: Target) -> None:
    text = "the NVIDIA driver answers again"
    fleet.event(int(target.nodes[0]), None, EventKind.LIFECYCLE, "driver_back", text, fault.end_s or fleet.now_s)


def _crash_application(fleet: FaultyFleet, fault: Fault, target: Target) -> None:
    """Crash the job by its own bug: an illegal access on one rank, and every rank's process dies."""
    fleet.xid(int(target.rng.choice(target.gpus)), int(target.rng.choice((13, 31))), fault.start_s)
    fleet.crash(target.job, fault.start_s + 3, (43, 45))


def _end_job(fleet: FaultyFleet, fault: Fault, target: Target) -> None:
    fleet.crash(target.job, fault.end_s or fleet.now_s, ())


EFFECTS: Mapping[tuple[str, str], Effect] = MappingProxyType(
    {
        ("straggler", "power_cap"): Effect(during=_power_cap),
        ("straggler", "clock"): Effect(during=_clock),
        ("straggler", "thermal"): Effect(during=_resistance),
        ("straggler", "hbm"): Effect(during=_hbm),
        ("straggler", "pcie"): Effect(during=_pcie),
        ("straggler", "nvlink"): Effect(during=_nvlink),
        ("straggler", "nic"): Effect(during=_nic),
        ("straggler", "host"): Effect(during=_host),
        ("hang", "rank_stopped"): Effect(during=_stop, end=_end_job),
        ("thermal", "cooling"): Effect(during=_resistance),
        ("thermal", "fan"): Effect(during=_resistance),
        ("memory", "row_remap_failure"): Effect(begin=_fail_remap, end=_reset),
        ("memory", "uncorrectable"): Effect(begin=_uncorrectable, end=_reset),
        ("memory", "ecc_storm"): Effect(during=_ecc_storm),
        ("link", "nvlink"): Effect(begin=_break_nvlink, during=_nvlink),
        ("link", "ib_flap"): Effect(during=_flap),
        ("xid", "fallen_off_bus"): Effect(begin=_fall_off, during=_lose, end=_come_back),
        ("xid", "gsp_timeout"): Effect(begin=_gsp_timeout, during=_lose, end=_come_back),
        ("xid", "uncontained_ecc"): Effect(begin=_uncontained, end=_reset),
        ("liveness", "silent"): Effect(begin=_go_silent, during=_silence),
        ("liveness", "gpu_lost"): Effect(begin=_vanish, during=_lose, end=_come_back),
        ("liveness", "driver_hung"): Effect(begin=_report_hung, during=_hang_driver, end=_report_driver_back),
        ("sdc", "wrong_results"): Effect(during=_corrupt),
        ("xid", "application"): Effect(begin=_crash_application),
        ("straggler", "workload"): Effect(during=_uneven),
        ("hang", "data_stall"): Effect(during=_stall),
        ("straggler", "planned_power_cap"): Effect(during=_rack_cap),
        ("thermal", "inlet"): Effect(during=_inlet),
    }
)

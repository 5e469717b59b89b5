"""Apply what happens once, at the onset and at the repair of an adversary's fault: events, counters, driver states.

Sequences follow published ones; the details of each are drawn when the fault is planned (`Trouble.facts`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Protocol

from drover_core.model.events import EventKind
from drover_simulator.adversary.trouble import Trouble
from drover_simulator.counters import Counters
from drover_simulator.hardware import Hardware
from drover_simulator.physics import Physics
from drover_simulator.xid_lines import RECOVERY_ACTIONS


class EventRun(Protocol):
    """What onsets and repairs change of a run."""

    hw: Hardware
    counters: Counters
    physics: Physics

    def event(self, node: int, gpu: int | None, kind: EventKind, code: str, message: str, at_s: float) -> None: ...

    def xid(self, gpu: int, xid: int, at_s: float, after: int = 0) -> None: ...


Once = Callable[[EventRun, Trouble], None]


def _request_recovery(run: EventRun, t: Trouble, xid: int) -> None:
    run.counters.gpu["recovery_action"][t.gpu] = RECOVERY_ACTIONS[xid][0]
    run.xid(t.gpu, 154, t.start_s + 0.2, after=xid)


def _report_lost(run: EventRun, t: Trouble) -> None:
    text = f"GPU {run.hw.gpu_slot[t.gpu]} no longer answers: GPU is lost"
    run.event(t.node, t.gpu, EventKind.LIFECYCLE, "gpu_lost", text, t.start_s + 1)


def _fall_off(run: EventRun, t: Trouble) -> None:
    if t.facts["aer"]:
        run.counters.node["pcie_aer_fatal"][t.node] += 1
        text = f"pcieport 0000:15:01.0: AER: Uncorrected (Fatal) error received: {run.hw.pci(t.gpu)}.0"
        run.event(t.node, t.gpu, EventKind.KERNEL, "aer", text, t.start_s)
    run.xid(t.gpu, 79, t.start_s)
    _request_recovery(run, t, 79)
    _report_lost(run, t)


def _gsp(run: EventRun, t: Trouble) -> None:
    for again in range(3):
        run.xid(t.gpu, 119, t.start_s + 6 * again)
    _request_recovery(run, t, 119)
    _report_lost(run, t)


def _spi(run: EventRun, t: Trouble) -> None:
    run.xid(t.gpu, 122, t.start_s)
    if t.facts["mmu"]:
        run.xid(t.gpu, 31, t.start_s + 0.04)


def _nvlink5(run: EventRun, t: Trouble) -> None:
    run.xid(t.gpu, 145, t.start_s)
    _request_recovery(run, t, 145)


def _uncontained(run: EventRun, t: Trouble) -> None:
    c = run.counters.gpu
    c["ecc_sram_uncorrected"][t.gpu] += 1
    run.xid(t.gpu, 95, t.start_s)
    _request_recovery(run, t, 95)


def _sram(run: EventRun, t: Trouble) -> None:
    c = run.counters.gpu
    c["ecc_sram_uncorrected"][t.gpu] += 4
    c["sram_threshold_exceeded"][t.gpu] = 1


def _uncorrectable(run: EventRun, t: Trouble) -> None:
    """Write XID 48, then 63 or 64, then 94 (contained) or 95."""
    c, g = run.counters.gpu, t.gpu
    c["ecc_dram_uncorrected"][g] += 1
    run.xid(g, 48, t.start_s)
    if t.facts["remapped"]:
        c["remapped_rows_uncorrected"][g] += 1
        c["row_remap_pending"][g] = 1
        run.xid(g, 63, t.start_s + 0.05)
    else:
        c["row_remap_failed"][g] = 1
        c["remap_banks_none"][g] += 1
        run.xid(g, 64, t.start_s + 0.05)
    run.xid(g, 94 if t.facts["contained"] else 95, t.start_s + 0.1)
    if not t.facts["contained"]:
        _request_recovery(run, t, 95)


def _remap_failed(run: EventRun, t: Trouble) -> None:
    c = run.counters.gpu
    c["row_remap_failed"][t.gpu] = 1
    c["remap_banks_none"][t.gpu] += 1
    run.xid(t.gpu, 64, t.start_s)
    _request_recovery(run, t, 64)


def _nvlink(run: EventRun, t: Trouble) -> None:
    code = 145 if run.hw.sku_of_node[t.node].name == "B200-SXM" else 74
    for k in range(int(t.facts["times"])):
        run.xid(t.gpu, code, t.start_s + k * t.facts["apart_s"])
    if t.facts["other"] >= 0:
        run.xid(int(t.facts["other"]), code, t.start_s + 0.5)


def _driver_hung(run: EventRun, t: Trouble) -> None:
    text = "calls into the NVIDIA driver have not returned for 5 s"
    run.event(t.node, None, EventKind.LIFECYCLE, "driver_hung", text, t.start_s + 5)


def _driver_back(run: EventRun, t: Trouble) -> None:
    run.event(t.node, None, EventKind.LIFECYCLE, "driver_back", "the NVIDIA driver answers again", t.end_s)


def _clock_wrong(run: EventRun, t: Trouble) -> None:
    text = f"the node's clock is {t.severity:.1f} s {'ahead' if t.facts['sign'] > 0 else 'behind'}"
    run.event(t.node, None, EventKind.LIFECYCLE, "clock_wrong", text, t.start_s)


def _leaf(run: EventRun, t: Trouble) -> None:
    run.counters.link["link_downed"][t.links] += 1


def _stopped(run: EventRun, t: Trouble) -> None:
    run.event(t.node, None, EventKind.LIFECYCLE, "agent_stopped", "the agent was asked to stop", t.start_s - 1)


def _started(run: EventRun, t: Trouble) -> None:
    run.event(t.node, None, EventKind.LIFECYCLE, "agent_started", "the agent has started", t.end_s + 1)


def _rollout(run: EventRun, t: Trouble) -> None:
    for k, n in enumerate(t.nodes.tolist()):
        at_s = t.start_s + k * t.facts["each_s"]
        run.event(n, None, EventKind.LIFECYCLE, "agent_stopped", "the agent was asked to stop", at_s - 1)
        back_s = at_s + t.facts["away_s"] + 1
        run.event(n, None, EventKind.LIFECYCLE, "agent_started", "the agent has started", back_s)


def _application(run: EventRun, t: Trouble) -> None:
    run.xid(int(t.gpus[int(t.facts["which"]) % len(t.gpus)]), int(t.facts["code"]), t.start_s)


def _solo(run: EventRun, t: Trouble) -> None:
    run.xid(t.gpu, 45, t.start_s)


def _reset(run: EventRun, t: Trouble) -> None:
    run.counters.forget(t.gpu)
    run.physics.forget(t.gpu)


def _back(run: EventRun, t: Trouble) -> None:
    _reset(run, t)
    text = f"GPU {run.hw.gpu_slot[t.gpu]} answers again"
    run.event(t.node, t.gpu, EventKind.LIFECYCLE, "gpu_back", text, t.end_s)


def _booted(run: EventRun, t: Trouble) -> None:
    """Restart the counters of the rebooted nodes' drivers at 0, and report their agents."""
    for n in t.nodes.tolist():
        for g in run.hw.gpus_of(n).tolist():
            run.counters.forget(g)
            run.physics.forget(g)
        run.event(n, None, EventKind.LIFECYCLE, "agent_started", "the agent has started", t.end_s + 1)


BEGIN: Mapping[tuple[str, str], Once] = MappingProxyType(
    {
        ("memory", "uncorrectable"): _uncorrectable,
        ("memory", "remap_failed"): _remap_failed,
        ("memory", "sram_threshold"): _sram,
        ("link", "nvlink"): _nvlink,
        ("xid", "fallen_off_bus"): _fall_off,
        ("xid", "gsp_timeout"): _gsp,
        ("xid", "uncontained_ecc"): _uncontained,
        ("xid", "spi_failure"): _spi,
        ("xid", "nvlink5"): _nvlink5,
        ("liveness", "gpu_lost"): _report_lost,
        ("liveness", "driver_hung"): _driver_hung,
        ("liveness", "clock_wrong"): _clock_wrong,
        ("link", "leaf_down"): _leaf,
        ("liveness", "maintenance"): _stopped,
        ("drift", "rollout"): _rollout,
        ("xid", "application"): _application,
        ("xid", "solo_45"): _solo,
    }
)
END: Mapping[tuple[str, str], Once] = MappingProxyType(
    {
        ("memory", "uncorrectable"): _reset,
        ("memory", "remap_failed"): _reset,
        ("memory", "sram_threshold"): _reset,
        ("xid", "fallen_off_bus"): _back,
        ("xid", "gsp_timeout"): _back,
        ("xid", "uncontained_ecc"): _reset,
        ("xid", "spi_failure"): _reset,
        ("xid", "nvlink5"): _reset,
        ("liveness", "gpu_lost"): _back,
        ("liveness", "silent"): _booted,
        ("liveness", "rack_power"): _booted,
        ("liveness", "driver_hung"): _driver_back,
        ("liveness", "maintenance"): _started,
    }
)

"""What the GPUs and ports of a job show while it works, and which of it explains that its steps take longer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from drover_collector.detectors._lib.metrics import Ints
from drover_collector.detectors._lib.robust import middle
from drover_collector.detectors._lib.texts import listing
from drover_collector.detectors._lib.window import Window
from drover_collector.detectors.slowdown.series import Steps
from drover_collector.fleet.buckets import Floats
from drover_core.model.events import Evidence

METRICS = ("tensor_active_ratio", "sm_active_ratio", "sm_clock_mhz", "gpu_util_ratio", "dram_active_ratio")
TENSOR, SM, CLOCK, UTIL, DRAM, TRAFFIC = range(6)
WORDS = ("tensor activity", "SM activity", "SM clock", "utilisation", "memory activity", "traffic of ports")

LOWER_CLOCK = 0.97  # of the other racks' clocks: chips of one kind at full power differ less from rack to rack
PART = 0.5  # of the slowdown that a cause must explain at least
IDLE_RISE = 0.02  # of the time without a kernel, that grew
LEAST_TENSOR = 0.02
SAME_MIX = 0.25  # of the effect: figures that fell alike differ by less than this
SAME_MIX_LEAST = 0.01  # log
SAME_MIX_FIGURES = 2


@dataclass(slots=True)
class PortNodes:
    """The node of each port, int64 [ports]: kept, as a large fleet has 100,000."""

    of: Ints

    def of_window(self, window: Window) -> Ints:
        if len(self.of) != len(window.index.ports):
            self.of = np.array([port.node for port in window.index.ports.all()], np.int64)
        return self.of


def extras(window: Window, found: Sequence[Steps], ports: PortNodes) -> Floats:
    """Return the means of METRICS over the GPUs of each loop, and bytes/s that a node sends, float64 [loops, 6]."""
    result = np.full((len(found), len(METRICS) + 1), np.nan)
    if not found:
        return result
    gpus = np.concatenate([steps.gpus for steps in found])
    code = np.repeat(np.arange(len(found)), [len(steps.gpus) for steps in found])
    for m, metric in enumerate(METRICS):
        column = window.newest.gpu.get(metric)
        if column is not None:
            result[:, m] = _means(column[gpus], code, len(found))
    sent = _sent(window, ports)
    if sent is not None:
        nodes = np.concatenate([np.array(steps.nodes, np.int64) for steps in found])
        of = np.repeat(np.arange(len(found)), [len(steps.nodes) for steps in found])
        result[:, TRAFFIC] = _means(sent[nodes], of, len(found))
    return result


def _means(values: Floats, code: Ints, count: int) -> Floats:
    there = ~np.isnan(values)
    number = np.bincount(code[there], minlength=count)
    total = np.bincount(code[there], values[there], count)
    return np.where(number > 0, total / np.maximum(number, 1), np.nan)


def _sent(window: Window, ports: PortNodes) -> Floats | None:
    """Return bytes/s that the ports of each node sent since the bucket before, float64 [N], NaN where not known."""
    if len(window.buckets) < 2:
        return None
    before, now = (bucket.link.get("tx_bytes") for bucket in window.buckets[-2:])
    if before is None or now is None or len(before) != len(now):
        return None
    of = ports.of_window(window)
    grown = now - before
    there = grown >= 0  # a restarted counter says nothing
    nodes = window.index.node_count
    number = np.bincount(of[there], minlength=nodes)
    total = np.bincount(of[there], grown[there], nodes) / (window.newest.length_ms / 1000)
    return np.where(number > 0, total, np.nan)


@dataclass(frozen=True, slots=True)
class Reading:
    """What the telemetry of a slower job points to.

    Attributes:
        cause: of the finding. text: a sentence. facts: with values.
    """

    cause: str
    text: str
    facts: tuple[Evidence, ...]


def reading(window: Window, gpus: Ints, usual: Floats, now: Floats, effect: float) -> Reading:
    """Return what explains that the steps of a job on these GPUs take longer.

    Args:
        usual, now: the means before and now, float64 [6]. effect: log.
    """
    facts = _facts(usual, now)
    racks = _capped_racks(window, gpus) if fell(usual, now, CLOCK) >= PART * effect / 2 else []
    count = f"{len(gpus)} GPUs"
    if racks:
        names = listing([f"rack {name}" for name, _, _ in racks])
        text = "; ".join(f"{name} at {clock:.0f} MHz, the others at {rest:.0f}" for name, clock, rest in racks)
        verb = "runs" if len(racks) == 1 else "run"
        return Reading(
            "rack_capped",
            f"{names[0].upper()}{names[1:]} {verb} at lower clocks than the job's other racks: {text}.",
            facts,
        )
    if more_work(usual, now, effect) >= PART * effect:
        return Reading(
            "more_work",
            "Its GPUs do as much more tensor work in a step: longer sequences or a larger batch that the loop does not"
            " report, an evaluation, or other kernels (another image or precision).",
            facts,
        )
    if fell(usual, now, CLOCK) >= PART * effect:
        text = f"The clocks of all {count} fell alike: a power cap, heat or a setting of the whole job."
        return Reading("clocks", text, facts)
    if usual[UTIL] - now[UTIL] >= max(IDLE_RISE, PART * (1 - math.exp(-effect))):
        return Reading(
            "waits_for_host",
            f"All {count} run no kernel for more of the time: they wait for data, storage or the host.",
            facts,
        )
    if max(fell(usual, now, TENSOR), fell(usual, now, SM)) >= PART * effect:
        return Reading(
            "waits_alike",
            f"All {count} wait alike, in kernels, and no GPU stands out: most likely in collectives on the"
            " network.",
            facts,
        )  # fmt: skip
    why = "no figure of its GPUs explains it" if facts else "its GPUs report no activity that could explain it"
    return Reading("slower", f"All {count} are slower together; {why}.", facts)


def stretched(usual: Floats, now: Floats, effect: float) -> bool:
    """Return whether tensor work, memory traffic and network traffic all fell as the steps got longer.

    A step that is slower does the same work in more time. An evaluation does other work: it exchanges no gradients.
    """
    changes = [
        compute_fell(usual, now) if fell(usual, now, TENSOR) else 0.0,
        fell(usual, now, DRAM),
        fell(usual, now, TRAFFIC),
    ]
    known = [value for value in changes if value]
    off = max(SAME_MIX * effect, SAME_MIX_LEAST)
    return len(known) >= SAME_MIX_FIGURES and all(abs(value - effect) <= off for value in known)


def compute_fell(usual: Floats, now: Floats) -> float:
    """Return by how much tensor work for each second fell, log: active cycles = activity x clock."""
    return fell(usual, now, TENSOR) + fell(usual, now, CLOCK)


def fell(usual: Floats, now: Floats, at: int) -> float:
    """Return by how much a figure fell, log; 0 where it is not known."""
    if len(usual) <= at or len(now) <= at or not (usual[at] > 0 and now[at] > 0):
        return 0.0
    return math.log(usual[at] / now[at])


def more_work(usual: Floats, now: Floats, effect: float) -> float:
    """Return by how much the tensor work of a step grew, log: active cycles = activity x clock x time."""
    if len(usual) <= CLOCK or not (usual[TENSOR] >= LEAST_TENSOR and now[TENSOR] > 0):
        return 0.0
    return effect - compute_fell(usual, now)


def _capped_racks(window: Window, gpus: Ints) -> list[tuple[str, float, float]]:
    """Return (rack, its median clock, that of the job's other racks) of racks whose GPUs all run below the others."""
    clock = window.newest.gpu.get("sm_clock_mhz")
    if clock is None:
        return []
    index = window.index
    values = clock[gpus]
    racks = index.rack[index.gpu_node[gpus]]
    there = ~np.isnan(values)
    codes = np.unique(racks[there])
    if len(codes) < 2:
        return []
    found = []
    for code in codes.tolist():
        mine, rest = values[there & (racks == code)], values[there & (racks != code)]
        low, high = middle(mine), middle(rest)
        if low < LOWER_CLOCK * high and np.quantile(mine, 0.9) < np.quantile(rest, 0.1):
            found.append((index.racks[code] or "without a name", low, high))
    return found if len(found) < len(codes) / 2 or len(codes) == 2 else []


def _facts(usual: Floats, now: Floats) -> tuple[Evidence, ...]:
    found = []
    for at, word in enumerate(WORDS):
        if len(usual) <= at or len(now) <= at or math.isnan(usual[at]) or math.isnan(now[at]):
            continue
        if at == CLOCK:
            text = f"The SM clock of its GPUs is {now[at]:.0f} MHz in the mean, before {usual[at]:.0f}."
        elif at == TRAFFIC:
            text = f"The ports of each node send {now[at] / 1e9:.2f} GB/s, before {usual[at] / 1e9:.2f}."
        else:
            text = f"The {word} of its GPUs is {now[at]:.1%} in the mean, before {usual[at]:.1%}."
        found.append(Evidence(text, value=float(now[at]), expected=float(usual[at]), key=f"slowdown {word}"))
    return tuple(found)

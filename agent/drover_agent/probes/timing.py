"""Timing on a device: warm-up, CUDA events around several calls, medians, and how far repeats lie apart."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from drover_agent.probes.base import Device

WARM_UP_S = 0.3  # clocks rise and libraries choose their kernels; on a GPU as long however short the probe is
LEAST_REPEATS = 5
BATCH_S = 0.02  # calls between two events take about this long, so that the event's own microseconds do not count


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds per call: the median over `repeats`, and their coefficient of variation."""

    seconds: float
    spread: float
    repeats: int


def time_calls(
    torch: Any, device: Device, call: Callable[[], object], seconds: float, stopping: Callable[[], bool]
) -> Timing:
    """How long one `call` takes on the device, out of as many as fit into `seconds` (at least LEAST_REPEATS batches).

    Raises:
        InterruptedError: it was told to stop.
    """
    clock = _CudaClock(torch, device) if device.is_cuda else _HostClock()
    once = _warm_up(clock, call, WARM_UP_S if device.is_cuda else min(WARM_UP_S, seconds / 4), stopping)
    batch = max(1, round(BATCH_S / max(once, 1e-9)))
    until, found = time.monotonic() + seconds, [clock.measure(call, batch)]
    while len(found) < LEAST_REPEATS or time.monotonic() < until:
        if stopping():
            raise InterruptedError("told to stop")
        found.append(clock.measure(call, batch))
    return Timing(statistics.median(found), variation(found), len(found))


def variation(values: Sequence[float]) -> float:
    """Coefficient of variation: standard deviation over the mean; 0 for a single value."""
    if len(values) < 2:
        return 0.0
    mean = statistics.fmean(values)
    return statistics.stdev(values) / mean if mean and math.isfinite(mean) else math.inf


def _warm_up(
    clock: _CudaClock | _HostClock, call: Callable[[], object], seconds: float, stop: Callable[[], bool]
) -> float:
    until, once = time.monotonic() + seconds, clock.measure(call, 1)
    while time.monotonic() < until:
        if stop():
            raise InterruptedError("told to stop")
        once = clock.measure(call, 1)
    return once


class _HostClock:
    """For the CPU, which computes while it is called."""

    def measure(self, call: Callable[[], object], count: int) -> float:
        began = time.perf_counter()
        for _ in range(count):
            call()
        return (time.perf_counter() - began) / count


class _CudaClock:
    """Events on the device's current stream: the time between them is the device's own."""

    def __init__(self, torch: Any, device: Device) -> None:
        self._torch, self._device = torch, torch.device(device.name)
        with torch.cuda.device(self._device):
            self._began = torch.cuda.Event(enable_timing=True)
            self._ended = torch.cuda.Event(enable_timing=True)

    def measure(self, call: Callable[[], object], count: int) -> float:
        with self._torch.cuda.device(self._device):
            self._began.record()
            for _ in range(count):
                call()
            self._ended.record()
            self._ended.synchronize()
        return float(self._began.elapsed_time(self._ended)) / 1e3 / count

"""Timing on a device: warm-up, CUDA events around several calls, medians, and how far repeats lie apart."""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from drover_agent.probes.base import Device

LEAST_REPEATS = 5
CHUNK = 16 << 20  # bytes drawn at random, again and again in larger ones


@dataclass(frozen=True, slots=True)
class Pace:
    """How a kind of call is timed; on a GPU the same however short the probe is.

    Attributes:
        warm_up_s: products: clocks rise and libraries choose their kernels; copies: a link leaves its power saving.
        batch_s: calls between two events take about this long, so that the event's own microseconds do not count.
    """

    warm_up_s: float
    batch_s: float

    @property
    def least_s(self) -> float:
        """What one timing takes at least, where a call is shorter than a batch."""
        return self.warm_up_s + LEAST_REPEATS * self.batch_s


PRODUCTS = Pace(0.3, 0.02)
COPIES = Pace(0.05, 0.02)
PAIRS = Pace(0.02, 0.005)  # a node of 16 GPUs has 240 of them


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds per call: the median over `repeats`, and their coefficient of variation."""

    seconds: float
    spread: float
    repeats: int


def time_calls(
    torch: Any,
    device: Device,
    call: Callable[[], object],
    seconds: float,
    stopping: Callable[[], bool],
    pace: Pace = PRODUCTS,
) -> Timing:
    """How long one `call` takes on the device, out of as many as fit into `seconds` (at least LEAST_REPEATS batches).

    Raises:
        InterruptedError: it was asked to stop.
    """
    clock = _CudaClock(torch, device) if device.is_cuda else _HostClock()
    once = _warm_up(clock, call, pace.warm_up_s if device.is_cuda else min(pace.warm_up_s, seconds / 4), stopping)
    batch = max(1, round(pace.batch_s / max(once, 1e-9)))
    until, found = time.monotonic() + seconds, [clock.measure(call, batch)]
    while len(found) < LEAST_REPEATS or time.monotonic() < until:
        if stopping():
            raise InterruptedError("asked to stop")
        found.append(clock.measure(call, batch))
    return Timing(statistics.median(found), variation(found), len(found))


def variation(values: Sequence[float]) -> float:
    """Coefficient of variation: standard deviation over the mean; 0 for a single value."""
    if len(values) < 2:
        return 0.0
    mean = statistics.fmean(values)
    return statistics.stdev(values) / mean if mean and math.isfinite(mean) else math.inf


def random_bytes(torch: Any, size: int, seed: int, device: str = "cpu") -> Any:
    """uint8 [size], the same on every device: of zeros or ones a link or a memory would cost less power."""
    return _drawn(torch, min(size, CHUNK), seed).to(device).repeat(-(-size // CHUNK))[:size]


@functools.lru_cache(maxsize=4)
def _drawn(torch: Any, size: int, seed: int) -> Any:
    """Kept: a node of 16 GPUs has 240 pairs, and drawing takes a tenth of a second."""
    return torch.randint(0, 256, (size,), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def _warm_up(
    clock: _CudaClock | _HostClock, call: Callable[[], object], seconds: float, stop: Callable[[], bool]
) -> float:
    until, once = time.monotonic() + seconds, clock.measure(call, 1)
    while time.monotonic() < until:
        if stop():
            raise InterruptedError("asked to stop")
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

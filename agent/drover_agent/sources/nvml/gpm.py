"""GPU performance monitoring (Hopper and newer): rates out of the difference of two samples."""

from __future__ import annotations

import contextlib
import ctypes
import struct
from collections.abc import Sequence
from typing import Any

import pynvml

from drover_agent.sources.nvml.calls import function
from drover_agent.sources.nvml.found import GpmTargets

_METRIC = "4xid24x"  # nvmlGpmMetric_t: metricId, nvmlReturn, value, three names
_POINTERS = struct.Struct("=QQ")  # sample1 and sample2 of nvmlGpmMetricsGet_t


def _address(sample: Any) -> int:
    return ctypes.cast(sample, ctypes.c_void_p).value or 0


class Gpm:
    """Two samples of one GPU or of one of its GPU instances, taken in turn.

    Raises (at construction and when read):
        NVMLError: NOT_SUPPORTED on a GPU without GPM; or a sample could not be made.
    """

    def __init__(self, handle: Any, targets: GpmTargets, instance: int | None = None) -> None:
        """`targets`: what is asked. `instance`: id of a GPU instance of the GPU of this handle."""
        if not pynvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        if instance is None:
            self._sample = function("nvmlGpmSampleGet")
            self._whose: tuple[Any, ...] = (handle,)
        else:
            self._sample = function("nvmlGpmMigSampleGet")
            self._whose = (handle, instance)
        self._compute = function("nvmlGpmMetricsGet")
        self._previous: Any = None
        self._samples = [pynvml.nvmlGpmSampleAlloc(), pynvml.nvmlGpmSampleAlloc()]
        self._addresses = {id(sample): _address(sample) for sample in self._samples}
        self.choose(targets)

    def choose(self, targets: GpmTargets) -> None:
        """Ask for these from now on."""
        self.targets = targets
        self._answered = False
        # Made once: with room for each of NVML's metrics it takes 19 KB.
        question = pynvml.c_nvmlGpmMetricsGet_t()
        question.version = pynvml.NVML_GPM_METRICS_GET_VERSION
        question.numMetrics = len(targets.keys)
        for place, key in enumerate(targets.keys):
            question.metrics[place].metricId = getattr(pynvml, f"NVML_{key}")
        self._unpacked = struct.Struct("=" + len(targets.keys) * _METRIC)
        first = type(question).metrics.offset
        self._answers = memoryview(question).cast("B")[first : first + self._unpacked.size]
        self._pair = memoryview(question).cast("B")[type(question).sample1.offset :]
        self._question = ctypes.byref(question)

    def read(self) -> Sequence[Any]:
        """Return code and raw value of each of the targets' keys in turn, since the previous read; empty at the first,
        and at the next one after a sample failed."""
        if code := self.ask():
            raise pynvml.NVMLError(code)
        return self.answers()

    def ask(self) -> int:
        """Take a sample, and have NVML compare it with the last one; its return code."""
        sample = self._samples[0]
        before, self._previous = self._previous, None
        self._answered = False
        if code := self._sample(*self._whose, sample):
            return code
        self._previous = sample
        self._samples.reverse()
        if before is None:
            return 0
        _POINTERS.pack_into(self._pair, 0, self._addresses[id(before)], self._addresses[id(sample)])
        code = self._compute(self._question)
        self._answered = not code
        return code

    def answers(self) -> Sequence[Any]:
        """What `ask` brought; see `read`."""
        return self._unpacked.unpack(self._answers) if self._answered else ()

    def skip(self) -> None:
        """Not read in this tick: the next read shall not give the mean since long ago."""
        self._previous = None

    def close(self) -> None:
        for sample in self._samples:
            with contextlib.suppress(pynvml.NVMLError):  # NVML is about to end and frees what it holds
                pynvml.nvmlGpmSampleFree(sample)
        self._samples = []

"""GPU performance monitoring (Hopper and newer): rates out of the difference of two samples."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import pynvml

from drover_agent.sources.nvml_fields import GPM_IDS


class Gpm:
    """Two samples of one GPU, taken in turn.

    Raises:
        NVMLError: whether GPM is there could not be asked, or a sample could not be made.
    """

    def __init__(self, handle: Any) -> None:
        self.supported = bool(pynvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice)
        self._previous: Any = None
        if not self.supported:
            return
        self._samples = [pynvml.nvmlGpmSampleAlloc(), pynvml.nvmlGpmSampleAlloc()]
        # Made once: with room for each of NVML's metrics it takes 19 KB.
        self._question = pynvml.c_nvmlGpmMetricsGet_t()
        self._question.version = pynvml.NVML_GPM_METRICS_GET_VERSION
        self._question.numMetrics = len(GPM_IDS)
        for place, number in enumerate(GPM_IDS.values()):
            self._question.metrics[place].metricId = number

    def read(self, handle: Any) -> Mapping[str, Any]:
        """Raw value, or the NVMLError, of each key since the previous read; empty at the first.

        Raises:
            NVMLError: no sample could be taken; the next read is a first one again.
        """
        sample = self._samples[0]
        before, self._previous = self._previous, None
        pynvml.nvmlGpmSampleGet(handle, sample)
        self._previous = sample
        self._samples.reverse()
        if before is None:
            return {}
        self._question.sample1, self._question.sample2 = before, sample
        pynvml.nvmlGpmMetricsGet(self._question)
        return {
            key: metric.value if metric.nvmlReturn == pynvml.NVML_SUCCESS else pynvml.NVMLError(metric.nvmlReturn)
            for key, metric in zip(GPM_IDS, self._question.metrics, strict=False)
        }

    def close(self) -> None:
        if self.supported:
            for sample in self._samples:
                with contextlib.suppress(pynvml.NVMLError):  # NVML is about to end and frees what it holds
                    pynvml.nvmlGpmSampleFree(sample)

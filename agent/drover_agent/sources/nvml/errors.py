"""What NVML's return codes mean for a reading, and the two that end it."""

from __future__ import annotations

import pynvml

from drover_core.metrics.catalog import Absent

ABSENT = {
    pynvml.NVML_ERROR_NOT_SUPPORTED: Absent.UNSUPPORTED,
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND: Absent.UNSUPPORTED,  # a driver older than the call
    pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH: Absent.UNSUPPORTED,  # or than this version of its struct
    pynvml.NVML_ERROR_DEPRECATED: Absent.UNSUPPORTED,
    pynvml.NVML_ERROR_NO_PERMISSION: Absent.NO_PERMISSION,
    pynvml.NVML_ERROR_TIMEOUT: Absent.TIMEOUT,
}
_LOST = frozenset({pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_GPU_NOT_FOUND})
DRIVER_GONE = frozenset(
    {
        pynvml.NVML_ERROR_UNINITIALIZED,
        pynvml.NVML_ERROR_DRIVER_NOT_LOADED,
        pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH,
    }
)
FOR_GOOD = frozenset({Absent.UNSUPPORTED, Absent.NO_PERMISSION})  # another call a second later gives the same


class LostError(Exception):
    """The GPU has fallen off the bus: nothing more to ask it in this tick."""


class DriverGoneError(Exception):
    """NVML no longer works for any GPU: it must be closed and opened again."""


def absence(code: int) -> Absent:
    """The reason for the records of one failure.

    Raises:
        LostError, DriverGoneError: the rest need not be asked.
    """
    if code in _LOST:
        raise LostError
    if code in DRIVER_GONE:
        raise DriverGoneError(str(pynvml.NVMLError(code)))
    return ABSENT.get(code, Absent.ERROR)

"""What one read of a GPU has found: raw values of NVML and GPM in catalog units, or why there is none."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from drover_agent.sources.base import RATE_STEP
from drover_agent.sources.nvml_calls import Raw
from drover_agent.sources.nvml_fields import GPM_METRICS, NVML_METRICS, UTILIZATION_KEY
from drover_proto.catalog import Absent, Metric

Why = Callable[[int, str], Absent]  # (code, what): the reason, or LostError, DriverGoneError


class Target(NamedTuple):
    """Where a raw value goes."""

    name: str
    scale: float
    low: float
    high: float


def _target(metric: Metric, reader: str) -> Target:
    return Target(metric.name, metric.sources[reader].scale, metric.low, metric.high)


TARGETS: Mapping[str, Target] = {key: _target(metric, "nvml") for key, metric in NVML_METRICS.items()}
UTILIZATION_NAME = TARGETS[UTILIZATION_KEY].name
UTILIZATION_STEP = 0.01  # NVML tells whole percents: a GPU shall look the same by either


def _step(metric: Metric) -> float:
    if metric.name == UTILIZATION_NAME:
        return UTILIZATION_STEP
    return RATE_STEP if metric.unit == "B/s" else 0.0


# In GPM's order: the name, the factor to our unit, the range of raw values (1.05 of a ratio's highest is rounding), our
# highest value, the step in which it is told, 0 for GPM's own.
_GPM = tuple(
    (
        metric.name,
        metric.sources["gpm"].scale,
        metric.low / metric.sources["gpm"].scale,
        metric.high / metric.sources["gpm"].scale * (1.05 if metric.unit == "ratio" else 1.0),
        metric.high,
        _step(metric),
    )
    for metric in GPM_METRICS.values()
)
_GPM_KEYS = tuple(GPM_METRICS)


class Found:
    """What one read has found, by metric name."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}
        self.absent: dict[str, Absent] = {}

    def put(self, target: Target, raw: Raw) -> None:
        name, scale, low, high = target
        if raw is None:
            self.absent[name] = Absent.UNSUPPORTED
            return
        value = raw * scale
        if low <= value <= high:  # NaN fails both comparisons
            self.values[name] = value
        else:
            self.absent[name] = Absent.OUT_OF_RANGE

    def rest(self, names: Iterable[str], why: Absent) -> None:
        """Whatever of `names` was not read is absent for this reason."""
        for name in names:
            if name not in self.values:
                self.absent[name] = why


def put_gpm(found: Found, answers: Sequence[Any], why: Why) -> bool:
    """GPM's answers, code and value of each key in turn or none at all, in the resolution that is told.

    Returns:
        Whether GPM says how busy the GPU is; where it does not, what NVML itself has said of it stands.
    """
    values, codes = found.values, answers[::2]
    before = values.pop(UTILIZATION_NAME, None)
    for (name, scale, low, rounding, high, step), raw in zip(_GPM, answers[1::2], strict=False):
        if not low <= raw <= rounding:  # NaN fails too
            found.absent[name] = Absent.OUT_OF_RANGE
        else:  # GPM divides two windows that do not end together: a busy unit comes out above 100 %
            value = raw * scale
            values[name] = min(round(value / step) * step if step else value, high)
    if any(codes):
        for key, (name, *_), code in zip(_GPM_KEYS, _GPM, codes, strict=True):
            if code:
                values.pop(name, None)
                found.absent[name] = why(code, key)
    told = UTILIZATION_NAME in values
    if not told and before is not None:
        values[UTILIZATION_NAME] = before
    if UTILIZATION_NAME in values:
        found.absent.pop(UTILIZATION_NAME, None)
    return told

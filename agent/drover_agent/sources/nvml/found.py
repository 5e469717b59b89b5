"""What one read of a GPU has found: raw values of NVML and GPM in catalog units, or why there is none."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import le, mul
from typing import Any, NamedTuple

from drover_agent.sources.base import RATE_STEP
from drover_agent.sources.nvml.calls import Raw
from drover_agent.sources.nvml.fields import GPM_METRICS, NVML_METRICS, UTILIZATION_KEY
from drover_core.metrics.catalog import Absent, Metric

Why = Callable[[int, str], Absent]  # (code, what): the reason, or LostError, DriverGoneError


class Target(NamedTuple):
    """Where a raw value goes."""

    name: str
    scale: float
    low: float
    high: float


class Targets:
    """Where several raw values go, always the same ones together."""

    __slots__ = ("all", "highs", "lows", "names", "scales")

    def __init__(self, targets: Sequence[Target]) -> None:
        self.all = tuple(targets)
        self.names, self.scales = tuple(t.name for t in targets), tuple(t.scale for t in targets)
        self.lows, self.highs = tuple(t.low for t in targets), tuple(t.high for t in targets)


def _target(metric: Metric, reader: str) -> Target:
    return Target(metric.name, metric.sources[reader].scale, metric.low, metric.high)


TARGETS: Mapping[str, Target] = {key: _target(metric, "nvml") for key, metric in NVML_METRICS.items()}
UTILIZATION_NAME = TARGETS[UTILIZATION_KEY].name
UTILIZATION_STEP = 0.01  # NVML gives whole percents: a GPU must look the same by either


def _step(metric: Metric) -> float:
    if metric.name == UTILIZATION_NAME:
        return UTILIZATION_STEP
    return RATE_STEP if metric.unit == "B/s" else 0.0


# In GPM's order: the name, the factor to our unit, the range of raw values (1.05 of a ratio's highest is rounding), our
# highest value, the step in which it is sent, 0 for GPM's own.
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
_GPM_NAMES, _GPM_SCALES, _GPM_LOWS, _GPM_ROUNDING, _GPM_HIGHS, _ = zip(*_GPM, strict=True)
_GPM_STEPS = tuple((place, row[-1]) for place, row in enumerate(_GPM) if row[-1])


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

    def put_all(self, targets: Targets, raws: Sequence[Raw]) -> None:
        """`put` of each, by loops in C where nothing is missing or out of its range."""
        if None not in raws:
            values = list(map(mul, raws, targets.scales))
            if all(map(le, targets.lows, values)) and all(map(le, values, targets.highs)):
                self.values.update(zip(targets.names, values, strict=True))
                return
        for target, raw in zip(targets.all, raws, strict=True):
            self.put(target, raw)

    def rest(self, names: Iterable[str], why: Absent) -> None:
        """Whatever of `names` was not read is absent for this reason."""
        for name in names:
            if name not in self.values:
                self.absent[name] = why


def put_gpm(found: Found, answers: Sequence[Any], why: Why) -> bool:
    """Put in GPM's answers, code and value of each key in turn or none, in the resolution that is sent.

    Returns:
        Whether GPM says how busy the GPU is; where it does not, what NVML itself has said of it stands.
    """
    values, codes, raws = found.values, answers[::2], answers[1::2]
    if raws and not any(codes) and all(map(le, _GPM_LOWS, raws)) and all(map(le, raws, _GPM_ROUNDING)):
        scaled = list(map(mul, raws, _GPM_SCALES))
        for place, step in _GPM_STEPS:
            scaled[place] = round(scaled[place] / step) * step
        if not all(map(le, scaled, _GPM_HIGHS)):
            scaled = list(map(min, scaled, _GPM_HIGHS))
        values.update(zip(_GPM_NAMES, scaled, strict=True))
        found.absent.pop(UTILIZATION_NAME, None)
        return True
    before = values.pop(UTILIZATION_NAME, None)
    for (name, scale, low, rounding, high, step), raw in zip(_GPM, raws, strict=False):
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
    reported = UTILIZATION_NAME in values
    if not reported and before is not None:
        values[UTILIZATION_NAME] = before
    if UTILIZATION_NAME in values:
        found.absent.pop(UTILIZATION_NAME, None)
    return reported

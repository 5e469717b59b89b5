"""What one read of a GPU has found: raw values of NVML and GPM in catalog units, or why there is none."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import le, mul
from typing import Any, NamedTuple

from drover_agent.sources.base import RATE_STEP
from drover_agent.sources.nvml.calls import Raw
from drover_agent.sources.nvml.fields import GPM_METRICS, GPM_UTILIZATION_KEY, NVML_METRICS, UTILIZATION_KEY
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
NVML_NAMES = frozenset(target.name for target in TARGETS.values())
UTILIZATION_NAME = TARGETS[UTILIZATION_KEY].name
UTILIZATION_STEP = 0.01  # NVML gives whole percents: a GPU must look the same by either


def _step(metric: Metric) -> float:
    if metric.name == UTILIZATION_NAME:
        return UTILIZATION_STEP
    return RATE_STEP if metric.unit == "B/s" else 0.0


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


class _GpmTarget(NamedTuple):
    """Where one of GPM's answers goes; `low` and `highest_raw` bound the raw value."""

    name: str
    scale: float
    low: float
    highest_raw: float
    high: float
    step: float  # in which it is sent; 0: as GPM gives it


def _gpm_target(metric: Metric) -> _GpmTarget:
    scale = metric.sources["gpm"].scale
    # GPM divides two windows that do not end together: a busy unit comes out above 100 %.
    rounding = 1.05 if metric.unit == "ratio" else 1.0
    return _GpmTarget(
        metric.name, scale, metric.low / scale, metric.high / scale * rounding, metric.high, _step(metric)
    )


class GpmTargets:
    """Where GPM's answers to some of its keys go.

    Attributes:
        keys: in the order in which GPM is asked.
        names: of their metrics.
    """

    def __init__(self, keys: Iterable[str]) -> None:
        self.keys = tuple(keys)
        self._targets = tuple(_gpm_target(GPM_METRICS[key]) for key in self.keys)
        self.names, self._scales, self._lows, self._highest_raw, self._highs, steps = zip(*self._targets, strict=True)
        self._steps = tuple((place, step) for place, step in enumerate(steps) if step)

    def put(self, found: Found, answers: Sequence[Any], why: Why) -> None:
        """Put in GPM's answers, code and value of each key in turn or none, in the resolution that is sent.

        What NVML itself did not give (`found.absent`) is no longer absent if GPM gives it.
        """
        if not answers:  # at the first sample
            return
        codes, raws = answers[::2], answers[1::2]
        if not any(codes) and all(map(le, self._lows, raws)) and all(map(le, raws, self._highest_raw)):
            scaled = list(map(mul, raws, self._scales))
            for place, step in self._steps:
                scaled[place] = round(scaled[place] / step) * step
            if not all(map(le, scaled, self._highs)):
                scaled = list(map(min, scaled, self._highs))
            found.values.update(zip(self.names, scaled, strict=True))
        else:
            for key, target, code, raw in zip(self.keys, self._targets, codes, raws, strict=True):
                if code:
                    found.absent[target.name] = why(code, key)
                elif not target.low <= raw <= target.highest_raw:  # NaN fails too
                    found.absent[target.name] = Absent.OUT_OF_RANGE
                else:
                    value = raw * target.scale
                    value = round(value / target.step) * target.step if target.step else value
                    found.values[target.name] = min(value, target.high)
        if found.absent:
            for name in found.values.keys() & found.absent.keys():
                del found.absent[name]


GPM_ALL = GpmTargets(GPM_METRICS)
GPM_BUT_UTILIZATION = GpmTargets(key for key in GPM_METRICS if key != GPM_UTILIZATION_KEY)

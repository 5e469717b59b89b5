"""The metric catalog: one row for each metric.

The wire (field types), the store (columns), the detectors (ranges), the console and docs (label, unit, help) all use
these rows. A new metric needs one row in `catalog_rows.py`, and a line in a source unless NVML's field values have it.

Values are sent and stored as fixed-point integers: ``stored = round(value / step)``. A step of 0 means IEEE float64.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from drover_core.metrics.catalog_rows import (
    GPU_ROWS,
    LINK_ROWS,
    NODE_ROWS,
    WORKLOAD_ROWS,
)


class Kind(StrEnum):
    """How values of a metric behave in time."""

    GAUGE = "gauge"
    COUNTER = "counter"  # grows until its owner restarts
    STATE = "state"  # a code, flag or bitmask: never averaged


class Scope(StrEnum):
    """The kind of entity that a value belongs to; each has its table of samples and its kind of block."""

    GPU = "gpu"
    NODE = "node"
    LINK = "link"
    WORKLOAD = "workload"


class Absent(StrEnum):
    """Why a value is absent. Absence is stored as such, never as 0, -1 or NaN."""

    UNSUPPORTED = "unsupported"  # this device, driver or kernel does not have it
    LOST = "lost"  # the device has gone
    TIMEOUT = "timeout"  # the read did not return in time
    NO_PERMISSION = "no-permission"
    ERROR = "error"  # the read failed; the agent logs how
    OUT_OF_RANGE = "out-of-range"  # what was read cannot be true


# struct code of each storage type -> (name in the store, lowest, highest stored integer)
STORAGE: Mapping[str, tuple[str, float, float]] = MappingProxyType(
    {
        "B": ("UInt8", 0, 2**8 - 1),
        "H": ("UInt16", 0, 2**16 - 1),
        "I": ("UInt32", 0, 2**32 - 1),
        "Q": ("UInt64", 0, 2**64 - 1),
        "h": ("Int16", -(2**15), 2**15 - 1),
        "q": ("Int64", -(2**63), 2**63 - 1),
        "d": ("Float64", -math.inf, math.inf),
    }
)


@dataclass(frozen=True, slots=True)
class Source:
    """Where one source finds a metric, and the factor from its unit to the catalog's."""

    key: str
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Metric:
    """One row. `low` and `high`, in `unit`, bound what is possible; the collector rejects other values."""

    id: int
    name: str
    unit: str
    kind: Kind
    scope: Scope
    type: str
    step: float
    low: float
    high: float
    label: str
    help: str
    sources: Mapping[str, Source]

    @property
    def sums_time(self) -> bool:
        """True if it sums the time in a state since the driver was loaded: only its growth means anything."""
        return self.kind is Kind.COUNTER and self.unit == "us"

    def encode(self, value: float) -> int | float:
        """Return the stored form of `value`.

        Raises:
            ValueError: the value is not finite or lies outside [low, high].
        """
        if not self.low <= value <= self.high:  # NaN fails both comparisons
            raise ValueError(f"{self.name} = {value} {self.unit} is outside {self.low} .. {self.high}")
        return float(value) if self.step == 0 else round(value / self.step)

    def decode(self, stored: float) -> float:
        """Return the value, in `unit`, of a stored number."""
        return stored if self.step == 0 else stored * self.step


def _build() -> tuple[Metric, ...]:
    rows: list[Metric] = []
    for scope, table in (
        (Scope.GPU, GPU_ROWS),
        (Scope.NODE, NODE_ROWS),
        (Scope.LINK, LINK_ROWS),
        (Scope.WORKLOAD, WORKLOAD_ROWS),
    ):
        for number, name, unit, kind, storage, step, low, high, label, help_, sources in table:
            named = {reader: Source(*where) for reader, where in sources.items()}
            rows.append(
                Metric(
                    number,
                    name,
                    unit,
                    Kind(kind),
                    scope,
                    storage,
                    step,
                    low,
                    high,
                    label,
                    help_,
                    MappingProxyType(named),
                )
            )
    return tuple(rows)


METRICS: tuple[Metric, ...] = _build()
BY_ID: Mapping[int, Metric] = MappingProxyType({m.id: m for m in METRICS})
BY_NAME: Mapping[str, Metric] = MappingProxyType({m.name: m for m in METRICS})


def of_scope(scope: Scope) -> tuple[Metric, ...]:
    """Return all rows of one scope, in order."""
    return tuple(m for m in METRICS if m.scope is scope)


def of_agents(scope: Scope) -> tuple[Metric, ...]:
    """Return the rows of one scope that an agent may read; the others come from pages of exporters only."""
    return tuple(m for m in of_scope(scope) if not m.sources or m.sources.keys() - {"amd", "scrape"})


# Bits of clock_event_reasons, as NVML's nvmlClocksEventReason* constants number them.
CLOCK_EVENT_REASONS: Mapping[int, str] = MappingProxyType(
    {
        0x001: "GPU idle",
        0x002: "application clock setting",
        0x004: "software power cap",
        0x008: "hardware slowdown",
        0x010: "sync boost",
        0x020: "software thermal slowdown",
        0x040: "hardware thermal slowdown",
        0x080: "external power brake",
        0x100: "display clock setting",
    }
)

# Values of recovery_action, as NVML's nvmlDeviceGpuRecoveryAction_t numbers them.
RECOVERY_ACTIONS: tuple[str, ...] = ("none", "reset the GPU", "reboot the node", "drain P2P", "drain and reset")
# Values of fabric_state, as NVML's NVML_GPU_FABRIC_STATE_* number them; the last is DCGM's DcgmFMStatusFailure.
FABRIC_STATES: tuple[str, ...] = ("not supported", "not started", "in progress", "completed", "failed")
# Values of source_*_outcome.
READ_OUTCOMES: tuple[str, ...] = ("answered", "failed", "overran its limit")
_ENUMS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "recovery_action": RECOVERY_ACTIONS,
        "fabric_state": FABRIC_STATES,
        **{m.name: READ_OUTCOMES for m in METRICS if m.name.startswith("source_") and m.unit == "enum"},
    }
)


def describe(metric: Metric, value: float) -> str:
    """Return a value as text: `1,410 MHz`, `software power cap`, `93.4 %`."""
    if metric.name == "clock_event_reasons":
        names = [text for bit, text in CLOCK_EVENT_REASONS.items() if int(value) & bit]
        return ", ".join(names) or "none"
    if table := _ENUMS.get(metric.name):
        return table[int(value)] if 0 <= int(value) < len(table) else f"code {int(value)}"
    if metric.unit == "bool":
        return "yes" if value else "no"
    if metric.unit == "ratio" and metric.high <= 1:
        return f"{value * 100:.1f} %" if value >= 0.001 or value == 0 else f"{value:.2g}"
    if metric.unit in ("B", "B/s"):
        for prefix, factor in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
            if abs(value) >= factor:
                return f"{value / factor:,.1f} {prefix}{metric.unit}"
    text = f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"
    return text if metric.unit == "count" else f"{text} {metric.unit}"

"""GPU metrics as OpenTelemetry's semantic conventions for hardware name them.

https://opentelemetry.io/docs/specs/semconv/hardware/gpu/, .../common/ and .../temperature/, status Development: names
may change there. What they have no name for is sent as `drover.gpu.NAME` in the catalog's unit. Not given are
`hw.gpu.memory.utilization` (usage over limit, which every receiver can divide) and `hw.gpu.io` (a counter of bytes
there; GPM gives a rate).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from drover_core.metrics.catalog import BY_NAME, Kind

GAUGE, COUNTER, UP_DOWN = "gauge", "counter", "updowncounter"


@dataclass(frozen=True, slots=True)
class Instrument:
    """Where a metric goes. Values are the catalog's. `attributes`: of each point, in addition to those of the GPU."""

    name: str
    unit: str
    kind: str
    description: str
    attributes: Mapping[str, str] = field(default_factory=dict)


_ERRORS = {
    "ecc_sram_corrected": "sram_corrected", "ecc_sram_uncorrected": "sram_uncorrected",
    "ecc_dram_corrected": "dram_corrected", "ecc_dram_uncorrected": "dram_uncorrected",
    "pcie_replays": "pcie_replay", "nvlink_crc_errors": "nvlink_crc",
}  # fmt: skip
_TABLE = {
    "gpu_util_ratio": ("hw.gpu.utilization", "1", GAUGE, {"hw.gpu.task": "general"}),
    "framebuffer_used_bytes": ("hw.gpu.memory.usage", "By", UP_DOWN, {}),
    "framebuffer_total_bytes": ("hw.gpu.memory.limit", "By", UP_DOWN, {}),
    "power_w": ("hw.power", "W", GAUGE, {}),
    "energy_j": ("hw.energy", "J", COUNTER, {}),
    "gpu_temp_c": ("hw.temperature", "Cel", GAUGE, {"hw.sensor_location": "gpu"}),
    "memory_temp_c": ("hw.temperature", "Cel", GAUGE, {"hw.sensor_location": "memory"}),
    **{metric: ("hw.errors", "{error}", COUNTER, {"error.type": kind}) for metric, kind in _ERRORS.items()},
}
_UNITS = {"degC": "Cel", "B": "By", "B/s": "By/s", "ratio": "1", "bool": "1", "enum": "1", "bitmask": "1", "count": "1",
          "lanes": "1"}  # fmt: skip  # of UCUM, as OpenTelemetry asks for


def instrument_of(metric: str) -> Instrument:
    """Return where a metric of GPUs goes."""
    known = BY_NAME[metric]
    if metric in _TABLE:
        name, unit, kind, attributes = _TABLE[metric]
        return Instrument(name, unit, kind, known.help, {"hw.type": "gpu", **attributes})
    kind = COUNTER if known.kind is Kind.COUNTER else GAUGE
    return Instrument(f"drover.gpu.{metric}", _UNITS.get(known.unit, known.unit), kind, known.help, {"hw.type": "gpu"})

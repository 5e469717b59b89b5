"""The catalog is consistent: everything else follows from it."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

from drover_core.metrics.catalog import (
    BY_ID,
    BY_NAME,
    METRICS,
    STORAGE,
    Kind,
    Metric,
    describe,
)

UNIT_SUFFIX = {
    "MHz": "_mhz", "W": "_w", "J": "_j", "degC": "_c", "us": "_us", "B/s": "_bytes_per_s", "s": "_s", "Gb/s": "_gbps",
}  # fmt: skip


def test_ids_and_names_are_unique() -> None:
    assert len(BY_ID) == len(BY_NAME) == len(METRICS)


def test_what_was_released_keeps_its_id() -> None:
    """Stores and agents of earlier releases know a metric by its id: it keeps name, unit and scope."""
    released = json.loads(Path(__file__).with_name("released.json").read_text("utf-8"))
    assert {m.id: [m.name, m.unit, m.scope.value] for m in METRICS if str(m.id) in released} == {
        int(id_): row for id_, row in released.items()
    }


@pytest.mark.parametrize("metric", METRICS, ids=lambda m: m.name)
def test_row(metric: Metric) -> None:
    assert re.fullmatch(r"[a-z][a-z0-9_]*", metric.name)
    assert metric.name.endswith(UNIT_SUFFIX.get(metric.unit, ""))
    assert (metric.unit == "ratio") == metric.name.endswith(("_ratio", "_ber"))
    assert metric.label and metric.help and metric.sources
    assert metric.low < metric.high
    assert (metric.step == 0) == (metric.type == "d")
    _, lowest, highest = STORAGE[metric.type]
    if metric.step:
        assert lowest <= round(metric.low / metric.step), "the lowest value does not fit the storage type"
        assert round(metric.high / metric.step) <= highest, "the highest value does not fit the storage type"
    if metric.kind is Kind.COUNTER:
        assert metric.low == 0 and metric.type == "Q"
    if metric.unit in ("bool", "bitmask", "enum"):
        assert metric.kind is Kind.STATE
    for source in metric.sources.values():
        assert source.key and source.scale > 0


@pytest.mark.parametrize("metric", METRICS, ids=lambda m: m.name)
def test_stored_form_keeps_the_value(metric: Metric) -> None:
    for value in (metric.low, metric.high / 3, min(metric.high, 2.0**40)):
        value = max(value, metric.low)
        back = metric.decode(metric.encode(value))
        assert math.isclose(back, value, rel_tol=1e-9, abs_tol=metric.step / 2 + 1e-12)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1.0, 6001.0])
def test_what_cannot_be_true_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="power_w"):
        BY_NAME["power_w"].encode(value)


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("sm_clock_mhz", 1410, "1,410 MHz"),
        ("gpu_util_ratio", 0.934, "93.4 %"),
        ("gpu_util_ratio", 0.0, "0.0 %"),
        ("nvlink_effective_ber", 1e-13, "1e-13"),
        ("clock_event_reasons", 0x44, "software power cap, hardware thermal slowdown"),
        ("clock_event_reasons", 0, "none"),
        ("recovery_action", 1, "reset the GPU"),
        ("recovery_action", 77, "code 77"),
        ("row_remap_failed", 1, "yes"),
        ("framebuffer_total_bytes", 85.9e9, "85.9 GB"),
        ("pcie_replays", 12, "12"),
    ],
)
def test_values_read_as_an_operator_reads_them(name: str, value: float, text: str) -> None:
    assert describe(BY_NAME[name], value) == text

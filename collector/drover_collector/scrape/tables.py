"""The table file of each exporter: which series of its page is which metric of the catalog, and with what doubt.

A table is a TOML file in `tables/`. Each row cites the exporter's source. What stands in no row is not read.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

from drover_core.metrics.catalog import BY_NAME, Metric, Scope

NAMES = ("dcgm", "amd", "node")  # of exporters with a page
ALL_NAMES = (*NAMES, "hw")  # with what comes by OTLP alone
# value: the number times scale; rate: growth per second; is_zero, is_active: 1 where it is 0, or 4; busy_share and
# used_share: of node_exporter's CPU seconds and of a file system
HOWS = ("value", "rate", "is_zero", "is_active", "busy_share", "used_share")
JOINS = ("first", "sum", "max")


class TableError(ValueError):
    """A table file that cannot be used; the message names the file and the row."""


@dataclass(frozen=True, slots=True)
class Row:
    """One series of the page. `metric` None: it becomes an event of the kind `event`."""

    series: str
    metric: Metric | None
    source: str
    scale: float = 1.0
    how: str = "value"
    join: str = "first"
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # label -> values; `en*` is a beginning
    states: tuple[float, ...] = ()  # the only values with the catalog's meaning; none: all
    event: str = ""
    doubt: str = ""
    whole: bool = False  # samples of a part of a GPU have the whole GPU's value
    unit: str = ""  # that a point of OTLP must have, where it says one; "": the name fixes it

    def matches(self, labels: Mapping[str, str]) -> bool:
        return all(_fits(labels.get(name, ""), values) for name, values in self.labels.items())


def _fits(value: str, patterns: tuple[str, ...]) -> bool:
    return any(value.startswith(p[:-1]) if p.endswith("*") else value == p for p in patterns)


@dataclass(frozen=True, slots=True)
class GpuLabels:
    """Names of the labels that say which GPU a sample is of, the first that is there counts."""

    slot: tuple[str, ...]
    uuid: tuple[str, ...]
    serial: tuple[str, ...]
    pci: tuple[str, ...]
    model: tuple[str, ...]
    skip_with: tuple[str, ...]  # samples with one of these are of something else, such as a part of a GPU
    only: Mapping[str, str]  # label -> its value, where the label is there
    parts: tuple[str, ...] = ()  # those of skip_with that name a part of a GPU


@dataclass(frozen=True, slots=True)
class Table:
    name: str
    title: str
    vendor: str
    needs: str  # scope of the values without which a page is not this exporter's: gpu or node
    prefixes: tuple[str, ...]  # that an exporter may be set to put before its names
    blanks: frozenset[float]  # values that mean that there is none
    gpu: GpuLabels | None
    rows: tuple[Row, ...]
    within_ms: int = 0  # samples whose times differ by at most this are of one page

    def by_series(self) -> Mapping[str, tuple[Row, ...]]:
        """Return the rows of each name on the page, with each prefix."""
        found: dict[str, tuple[Row, ...]] = {}
        for prefix in self.prefixes:
            for row in self.rows:
                found[prefix + row.series] = (*found.get(prefix + row.series, ()), row)
        return found

    def metrics(self) -> tuple[Metric, ...]:
        return tuple({row.metric.id: row.metric for row in self.rows if row.metric is not None}.values())


@cache
def table(name: str) -> Table:
    """Return a table of the package.

    Raises:
        TableError: it is not valid.
    """
    text = resources.files("drover_collector.scrape").joinpath(f"tables/{name}.toml").read_text("utf-8")
    return parse_table(name, text)


def parse_table(name: str, text: str) -> Table:
    """
    Raises:
        TableError: an unknown metric or way of reading, or a row without its source.
    """
    data = tomllib.loads(text)
    labels = data.get("gpu")
    return Table(
        data["name"], data["title"], data["vendor"], data["needs"], tuple(data["prefixes"]), frozenset(data["blanks"]),
        None if labels is None else _labels(labels), tuple(_row(name, entry) for entry in data["row"]),
        data.get("within_ms", 0),
    )  # fmt: skip


def _labels(data: Mapping[str, Any]) -> GpuLabels:
    slot, uuid, serial, pci, model, skip = (
        tuple(data[key]) for key in ("slot", "uuid", "serial", "pci", "model", "skip_with")
    )
    return GpuLabels(slot, uuid, serial, pci, model, skip, data.get("only", {}), tuple(data.get("parts", ())))


def _row(name: str, entry: Mapping[str, Any]) -> Row:
    where = f"{name}.toml: {entry.get('series')!r}"
    metric = BY_NAME.get(entry.get("metric", ""))
    if not entry.get("source") or (metric is None) != ("event" in entry):
        raise TableError(f"{where}: needs a source, and either a metric of the catalog or an event")
    if metric is not None and metric.scope is Scope.WORKLOAD:
        raise TableError(f"{where}: {metric.name} is of a workload, which no page of an exporter names")
    if entry.get("how", "value") not in HOWS or entry.get("join", "first") not in JOINS:
        raise TableError(f"{where}: how is one of {', '.join(HOWS)}; join one of {', '.join(JOINS)}")
    return Row(
        entry["series"], metric, entry["source"], float(entry.get("scale", 1.0)), entry.get("how", "value"),
        entry.get("join", "first"), {k: tuple(v) for k, v in entry.get("labels", {}).items()},
        tuple(map(float, entry.get("states", ()))), entry.get("event", ""), entry.get("doubt", ""),
        bool(entry.get("whole")), entry.get("unit", ""),
    )  # fmt: skip

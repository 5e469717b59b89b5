"""The metrics page: families in the order in which they are added, written by prometheus_client."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4 as CONTENT_TYPE
from prometheus_client.registry import Collector

__all__ = ["CONTENT_TYPE", "Page"]

Values = float | Mapping[str, float] | None  # one value, or one for each value of a label


class Page(Collector):
    """A page under construction. A value that is None or an empty mapping is not known, and its family is left out."""

    def __init__(self) -> None:
        self._families: list[Metric] = []

    def gauge(self, name: str, help_: str, value: Values, label: str = "") -> None:
        self._add(GaugeMetricFamily(name, help_, labels=[label] if label else None), value)

    def counter(self, name: str, help_: str, value: Values, label: str = "") -> None:
        """`name` ends in _total."""
        self._add(CounterMetricFamily(name, help_, labels=[label] if label else None), value)

    def histogram(self, histogram: Histogram) -> None:
        """Add a histogram with its own name, help and label. Bounds are written as `1000`, not `1000.0`."""
        for family in histogram.collect():
            family.samples = [
                sample._replace(labels={key: value.removesuffix(".0") if key == "le" else value for key, value in
                                        sample.labels.items()})
                for sample in family.samples
                if not sample.name.endswith("_created")
            ]  # fmt: skip
            if family.samples:
                self._families.append(family)

    def collect(self) -> list[Metric]:
        return self._families

    def text(self) -> str:
        registry = CollectorRegistry()
        registry.register(self)
        return generate_latest(registry).decode()

    def _add(self, family: GaugeMetricFamily | CounterMetricFamily, value: Values) -> None:
        if value is None or (isinstance(value, Mapping) and not value):
            return
        if isinstance(value, Mapping):
            for key, item in sorted(dict(value).items()):  # a copy: the event loop may add a key meanwhile
                family.add_metric([key], item)
        else:
            family.add_metric([], value)
        self._families.append(family)

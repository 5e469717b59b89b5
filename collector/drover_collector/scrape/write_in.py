"""Take requests of Prometheus remote_write: find the node and the exporter of each series."""

from __future__ import annotations

from collections.abc import Mapping

from drover_collector.scrape.mapping import PageMapper
from drover_collector.scrape.received import MANY, MAX_WAITING, NAMELESS, Received, Series
from drover_collector.scrape.remote_write import Reader, unpack
from drover_collector.scrape.settings import WriteInConfig, is_this_host, node_name
from drover_collector.scrape.tables import Table, table
from drover_collector.scrape.wire import WriteError


class WriteTaker:
    """Used from one event loop."""

    def __init__(self, config: WriteInConfig, received: Received) -> None:
        self._config, self._received = config, received
        self._wanted: dict[str, Table] = {}
        for name in config.exporters:
            for series in PageMapper(table(name)).wanted:
                self._wanted.setdefault(series, table(name))
        self._reader: Reader[Series] = Reader(self._series)
        self._changes = 0
        self._now_s = 0.0

    def take(self, body: bytes, now_ms: int, now_s: float) -> tuple[int, str]:
        """Take a request. Return the status of HTTP and a sentence.

        Args:
            now_ms: of the clock. now_s: of a clock that is never set.
        """
        self._now_s = now_s
        received = self._received
        if received.is_full:
            return 503, f"{MAX_WAITING} samples wait to be used; send it again"
        if self._changes != received.changes:
            self._changes = received.changes
            self._reader.forget()
        try:
            read = self._reader.read(unpack(body))
        except WriteError as error:
            return 400, str(error)
        for series, points in read:
            for point in points:
                if not point.ended:  # else it is absent from now on
                    received.take(series, point.ts_ms, point.value, now_ms, now_s)
        return 204, ""

    def _series(self, labels: dict[str, str]) -> Series | None:
        name = labels.pop("__name__")
        of = self._wanted.get(name)
        if of is None:
            return None
        node = next((text for label in self._config.node_labels if (text := self._node(label, labels))), "")
        if not node:
            self._received.leave_out(NAMELESS)
            return None
        instance = labels.get("instance", "")
        for label in self._config.drop_labels:
            labels.pop(label, None)
        series = self._received.series(name, labels, node, of, instance, self._now_s)
        if series is None:
            self._received.leave_out(MANY)
        return series

    def _node(self, label: str, labels: Mapping[str, str]) -> str:
        text, short = labels.get(label, ""), self._config.short_names
        node = node_name(text, with_port=label == "instance", short=short)
        return "" if label == "instance" and is_this_host(node) else node

"""Values of nodes that Prometheus sends by remote_write: put together to pages, and mapped as pages are.

A sender splits the samples of one scrape over several requests, and each of them has the scrape's timestamp. They are
one page when none has come for it for a moment. Pages of all exporters of a node make one round, as when they are
read. Not used, and counted with the reason: what is a minute off the collector's clock, as after an outage of the
sender, and what is not newer than the page before. A mark that a series has ended is no value: it is absent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from drover_collector.scrape.mapping import CLOCK_MS, Found, PageMapper
from drover_collector.scrape.messages import NodeMessages
from drover_collector.scrape.remote_write import MAX_KNOWN_BYTES, Reader, WriteError, unpack
from drover_collector.scrape.settings import MAX_TARGETS, WriteInConfig, node_name
from drover_collector.scrape.tables import Table, table
from drover_core.metrics.prometheus_text import MAX_SAMPLES, ExpositionError, Sample

QUIET_S, WHOLE_S = 2.0, 8.0  # a page is whole when nothing came for it for so long, or so long after its first sample
WAITS_S = 15.0  # a page waits at most so long for those of the node's other exporters
SILENT_S = 60.0  # a source without a page for so long is down, and no other waits for it
FORGET_S = 3600.0  # a node that is silent for so long is no longer named
MAX_PAGES = 16  # of one source that wait; the oldest go
MAX_SOURCES = 8  # of one node
MAX_WAITING = 4_000_000  # samples that wait for their page to be whole, some 100 bytes each
MAX_LABEL_SETS = 100_000  # that series share
STALE, OLD, NAMELESS, MANY = (
    "a minute or more off the collector's clock", "not newer than the page before",
    "no label names the node", "above a limit of one page, node or fleet",
)  # fmt: skip

Labels = Mapping[str, str]


@dataclass(slots=True)
class Page:
    first_s: float
    last_s: float
    samples: dict[str, list[Sample]] = field(default_factory=dict)
    count: int = 0


@dataclass(slots=True)
class Source:
    """One exporter of one node, as its `instance` label names it."""

    table: Table
    mapper: PageMapper
    newest_s: float
    pages: dict[int, Page] = field(default_factory=dict)  # by timestamp
    newest_ms: int = 0  # of the pages that were mapped

    def whole(self, now_s: float) -> list[int]:
        """Return the timestamps of pages that are whole, oldest first."""
        return sorted(
            ts for ts, page in self.pages.items() if now_s - page.last_s >= QUIET_S or now_s - page.first_s >= WHOLE_S
        )


@dataclass(slots=True)
class ReceivedNode:
    messages: NodeMessages
    sources: dict[tuple[str, str], Source] = field(default_factory=dict)  # by table and instance


@dataclass(frozen=True, slots=True)
class Series:
    name: str
    labels: Labels
    source: Source


@dataclass(frozen=True, slots=True)
class Round:
    """What all sources of a node gave together."""

    node: str
    messages: NodeMessages
    found: Found
    tables: list[Table]
    down: int


class Received:
    """Used from one event loop. `left_out`: why samples were not used -> how many, since the start."""

    def __init__(self, config: WriteInConfig) -> None:
        self._config = config
        self._wanted: dict[str, Table] = {}
        for name in config.exporters:
            for series in PageMapper(table(name)).wanted:
                self._wanted.setdefault(series, table(name))
        self._reader: Reader[Series] = Reader(self._series)
        self._labels: dict[tuple[tuple[str, str], ...], Labels] = {}
        self._label_bytes = 0
        self._now_s = 0.0
        self._waiting = 0  # samples of pages that are not whole
        self.nodes: dict[str, ReceivedNode] = {}
        self.left_out: Counter[str] = Counter()
        self.pages = self.failed = 0

    def take(self, body: bytes, now_ms: int, now_s: float) -> tuple[int, str]:
        """Take a request. Return the status of HTTP and a sentence.

        Args:
            now_ms: of the clock. now_s: of a clock that is never set.
        """
        self._now_s = now_s
        if self._waiting >= MAX_WAITING:
            return 503, f"{MAX_WAITING} samples wait to be used; send it again"
        try:
            read = self._reader.read(unpack(body))
        except WriteError as error:
            return 400, str(error)
        for series, points in read:
            for point in points:
                if point.ended:
                    continue  # it is absent from now on
                if abs(point.ts_ms - now_ms) > CLOCK_MS:
                    self.left_out[STALE] += 1
                elif point.ts_ms <= series.source.newest_ms:
                    self.left_out[OLD] += 1
                else:
                    self._add(series, point.ts_ms, point.value)
        return 204, ""

    def rounds(self, now_s: float, scraped: Mapping[str, object]) -> Iterator[Round]:
        """Yield the rounds that are due. `scraped`: nodes whose pages are read; what comes of them is not used."""
        for name, node in self.nodes.items():
            if name in scraped:
                for source in node.sources.values():
                    self.left_out["of a node whose pages are read"] += sum(p.count for p in source.pages.values())
                    source.pages.clear()
                continue
            if (made := self._round(name, node, now_s)) is not None:
                yield made
        self._waiting = sum(
            page.count for node in self.nodes.values() for of in node.sources.values() for page in of.pages.values()
        )

    def forget(self, now_s: float) -> list[str]:
        """Forget nodes that were silent for long, and return them. What is missing is judged elsewhere."""
        over = [
            name
            for name, node in self.nodes.items()
            if all(now_s - source.newest_s >= FORGET_S for source in node.sources.values())
        ]
        for name in over:
            del self.nodes[name]
        if over:
            self._reader.forget()
        return over

    def silent(self, now_s: float) -> list[tuple[str, str, float]]:
        """Return (node, exporter, for how long) of sources without a page, the longest silent first."""
        found = [
            (name, source.table.title, now_s - source.newest_s)
            for name, node in self.nodes.items()
            for source in node.sources.values()
            if now_s - source.newest_s >= SILENT_S
        ]
        return sorted(found, key=lambda entry: -entry[2])

    @property
    def sources(self) -> int:
        return sum(len(node.sources) for node in self.nodes.values())

    # ---- series

    def _series(self, labels: dict[str, str]) -> Series | None:
        name = labels.pop("__name__")
        of = self._wanted.get(name)
        if of is None:
            return None
        node = next((text for label in self._config.node_labels if (text := self._node(label, labels))), "")
        if not node:
            self.left_out[NAMELESS] += 1
            return None
        source = self._source(node, of, labels.get("instance", ""))
        if source is None:
            self.left_out[MANY] += 1
            return None
        for label in self._config.drop_labels:
            labels.pop(label, None)
        pairs = tuple(sorted(labels.items()))
        if len(self._labels) >= MAX_LABEL_SETS or self._label_bytes >= MAX_KNOWN_BYTES:
            self._labels.clear()
            self._label_bytes = 0
        self._label_bytes += 0 if pairs in self._labels else sum(len(text) for pair in pairs for text in pair)
        return Series(name, self._labels.setdefault(pairs, labels), source)

    def _node(self, label: str, labels: Labels) -> str:
        return node_name(labels.get(label, ""), with_port=label == "instance", short=self._config.short_names)

    def _source(self, name: str, of: Table, instance: str) -> Source | None:
        node = self.nodes.get(name)
        if node is None:
            if len(self.nodes) >= MAX_TARGETS:
                return None
            node = self.nodes[name] = ReceivedNode(NodeMessages(name))
        key = of.name, instance
        if key not in node.sources:
            if len(node.sources) >= MAX_SOURCES:
                return None
            node.sources[key] = Source(of, PageMapper(of), self._now_s)
        return node.sources[key]

    def _add(self, series: Series, ts_ms: int, value: float) -> None:
        source = series.source
        page = source.pages.get(ts_ms)
        if page is None:
            if len(source.pages) >= MAX_PAGES:
                self.left_out[MANY] += source.pages.pop(min(source.pages)).count
            page = source.pages[ts_ms] = Page(self._now_s, self._now_s)
        if page.count >= MAX_SAMPLES:
            self.left_out[MANY] += 1
            return
        page.count, page.last_s, source.newest_s = page.count + 1, self._now_s, self._now_s
        self._waiting += 1
        page.samples.setdefault(series.name, []).append((series.labels, value))

    # ---- rounds

    def _round(self, name: str, node: ReceivedNode, now_s: float) -> Round | None:
        ready = {key: stamps for key, source in node.sources.items() if (stamps := source.whole(now_s))}
        if not ready:
            return None
        waiting = [key for key, s in node.sources.items() if key not in ready and now_s - s.newest_s < SILENT_S]
        first_s = min(node.sources[key].pages[stamps[0]].first_s for key, stamps in ready.items())
        if waiting and now_s - first_s < WAITS_S:
            return None
        found, tables = Found(), []
        for key, stamps in ready.items():
            source = node.sources[key]
            if (mapped := self._mapped(source, stamps)) is not None:
                found.add(mapped)
                tables.append(source.table)
        for key in self._replaced(node, now_s):
            del node.sources[key]
            self._reader.forget()  # it knows series of this source
        return Round(name, node.messages, found, tables, len(node.sources) - len(tables)) if tables else None

    def _replaced(self, node: ReceivedNode, now_s: float) -> list[tuple[str, str]]:
        """Return silent sources in whose place another has come, as of a pod with another address."""
        living = {key[0] for key, source in node.sources.items() if now_s - source.newest_s < SILENT_S}
        return [k for k, s in node.sources.items() if k[0] in living and now_s - s.newest_s >= SILENT_S]

    def _mapped(self, source: Source, stamps: list[int]) -> Found | None:
        """Return what the pages gave together, of each value the newest; None: nothing."""
        together: Found | None = None
        for ts_ms in stamps:
            page = source.pages.pop(ts_ms)
            source.newest_ms = max(source.newest_ms, ts_ms)
            try:
                newest = source.mapper.map(page.samples, ts_ms)
            except ExpositionError:  # a part of a page without any value
                self.failed += 1
                continue
            self.pages += 1
            if together is not None:
                newest.add(together)
            together = newest
        return together

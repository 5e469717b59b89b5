"""Values of nodes that are sent, by remote_write or OTLP: put together to pages, and mapped as pages are.

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
from drover_collector.scrape.precedence import ALIKE, COUNTED, Precedence
from drover_collector.scrape.settings import MAX_TARGETS
from drover_collector.scrape.tables import Table
from drover_core.metrics.prometheus_text import MAX_SAMPLES, ExpositionError, Sample

QUIET_S, WHOLE_S = 2.0, 8.0  # a page is whole when nothing came for it for so long, or so long after its first sample
WAITS_S = 15.0  # a page waits at most so long for those of the node's other exporters
SILENT_S = 60.0  # a source without a page for so long is down, and no other waits for it
FORGET_S = 3600.0  # a node that is silent for so long is no longer named
MAX_PAGES = 16  # of one source that wait; the oldest go
MAX_SOURCES = 8  # of one node
MAX_WAITING = 4_000_000  # samples that wait for their page to be whole, some 100 bytes each
MAX_REASONS = 100  # why samples are not used; what a page says of itself may be one
MAX_LABEL_SETS = 100_000  # that series share
MAX_SHARED_BYTES = 512 << 20  # of these
STALE, OLD, NAMELESS, MANY, AGAIN = (
    "a minute or more off the collector's clock", "not newer than the page before",
    "no label names the node", "above a limit of one page, node or fleet",
    "sent again, as a sender does that got no answer in time: each counts once",
)  # fmt: skip

Labels = Mapping[str, str]


@dataclass(slots=True)
class Page:
    first_s: float
    last_s: float
    samples: dict[str, list[Sample]] = field(default_factory=dict)
    count: int = 0
    restarted: list[tuple[str, Labels]] = field(default_factory=list)  # series that were reset since the page before

    def drop_repeats(self) -> int:
        """Leave out samples that came again with the same value. Return how many. With another value they stay."""
        dropped = 0
        for name, found in self.samples.items():
            if len({id(labels) for labels, _ in found}) == len(found):
                continue
            once = {(id(labels), repr(value)): (labels, value) for labels, value in reversed(found)}
            dropped += len(found) - len(once)
            self.samples[name] = list(reversed(once.values()))
        return dropped


@dataclass(slots=True)
class Source:
    """One exporter of one node, as its `instance` label names it."""

    table: Table
    mapper: PageMapper
    newest_s: float
    pages: dict[int, Page] = field(default_factory=dict)  # by timestamp
    newest_ms: int = 0  # of the pages that were mapped

    def stamp(self, ts_ms: int) -> int:
        """Return the timestamp of the page that a sample belongs to: its own, or that of a page close by."""
        if self.table.within_ms and ts_ms not in self.pages:
            return next((at for at in self.pages if abs(at - ts_ms) <= self.table.within_ms), ts_ms)
        return ts_ms

    def whole(self, now_s: float) -> list[int]:
        """Return the timestamps of pages that are whole, oldest first."""
        return sorted(
            ts for ts, page in self.pages.items() if now_s - page.last_s >= QUIET_S or now_s - page.first_s >= WHOLE_S
        )


@dataclass(slots=True)
class ReceivedNode:
    messages: NodeMessages
    sources: dict[tuple[str, str], Source] = field(default_factory=dict)  # by table and instance


@dataclass(slots=True)
class Series:
    """`start`: since when its newest value was counted, as its sender says it; 0: it does not."""

    name: str
    labels: Labels
    source: Source
    start: int = 0


@dataclass(frozen=True, slots=True)
class Round:
    """What all sources of a node gave together."""

    node: str
    messages: NodeMessages
    found: Found
    tables: list[Table]
    down: int


class Received:
    """Used from one event loop, by all that take requests.

    Attributes:
        left_out: why samples were not used -> how many, since the start.
        changes: grows when sources were forgotten: a Series of before is of no use.
        precedences: of nodes; also of those whose pages are read.
    """

    def __init__(self) -> None:
        self._labels: dict[tuple[tuple[str, str], ...], Labels] = {}
        self._label_bytes = 0
        self._waiting = 0  # samples of pages that are not whole
        self.nodes: dict[str, ReceivedNode] = {}
        self.left_out: Counter[str] = Counter()
        self.precedences: dict[str, Precedence] = {}
        self.pages = self.failed = self.changes = 0

    @property
    def is_full(self) -> bool:
        return self._waiting >= MAX_WAITING

    def series(
        self, name: str, labels: dict[str, str], node: str, of: Table, instance: str, now_s: float
    ) -> Series | None:
        """Return a series of a node's exporter; None: there are too many.

        Args:
            instance: distinguishes two exporters of one kind.
        """
        source = self._source(node, of, instance, now_s)
        return None if source is None else Series(name, self._shared(labels), source)

    def take(self, series: Series, ts_ms: int, value: float, now_ms: int, now_s: float) -> str:
        """Take a sample. Return why it is not used; "": it is."""
        if abs(ts_ms - now_ms) > CLOCK_MS:
            why = STALE
        elif ts_ms <= series.source.newest_ms:
            why = OLD
        else:
            why = self._add(series, ts_ms, value, now_s)
        if why:
            self.leave_out(why)
        return why

    def leave_out(self, why: str, count: int = 1) -> None:
        """Count samples, or pages, that are not used."""
        known = why in self.left_out or len(self.left_out) < MAX_REASONS
        self.left_out[why if known else "for other reasons"] += count

    def restart(self, series: Series, ts_ms: int) -> None:
        """Note that a series was reset between the page before and the sample at `ts_ms`, which was taken."""
        page = series.source.pages.get(series.source.stamp(ts_ms))
        if page is not None:
            page.restarted.append((series.name, series.labels))

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
            self.changes += 1
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

    def _shared(self, labels: dict[str, str]) -> Labels:
        """Return one object for all series with the same labels: the mapper reads each object once."""
        pairs = tuple(sorted(labels.items()))
        if len(self._labels) >= MAX_LABEL_SETS or self._label_bytes >= MAX_SHARED_BYTES:
            self._labels.clear()
            self._label_bytes = 0
        self._label_bytes += 0 if pairs in self._labels else sum(len(text) for pair in pairs for text in pair)
        return self._labels.setdefault(pairs, labels)

    def _source(self, name: str, of: Table, instance: str, now_s: float) -> Source | None:
        node = self.nodes.get(name)
        if node is None:
            if len(self.nodes) >= MAX_TARGETS:
                return None
            node = self.nodes[name] = ReceivedNode(NodeMessages(name))
        key = of.name, instance
        if key not in node.sources:
            if len(node.sources) >= MAX_SOURCES:
                return None
            node.sources[key] = Source(of, PageMapper(of, name), now_s)
        return node.sources[key]

    def _add(self, series: Series, ts_ms: int, value: float, now_s: float) -> str:
        source = series.source
        stamp = source.stamp(ts_ms)
        page = source.pages.get(stamp)
        if page is None:
            if len(source.pages) >= MAX_PAGES:
                self.left_out[MANY] += source.pages.pop(min(source.pages)).count
            page = source.pages[stamp] = Page(now_s, now_s)
        if page.count >= MAX_SAMPLES:
            return MANY
        page.count, page.last_s, source.newest_s = page.count + 1, now_s, now_s
        self._waiting += 1
        page.samples.setdefault(series.name, []).append((series.labels, value))
        return ""

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
        precedence = self.precedences.setdefault(name, Precedence())
        for key, stamps in ready.items():
            source = node.sources[key]
            mapped = self._mapped(source, stamps)
            if mapped is None:
                continue
            if precedence.is_alike(key, mapped, now_s):
                self.leave_out(ALIKE)
                continue
            kept_back = precedence.keep(key, source.table, mapped, now_s)
            if kept_back and len(ready) == 1:  # else the other gave it in this round
                self.leave_out(COUNTED, kept_back)
            found.add(mapped)
            tables.append(source.table)
        for key in self._replaced(node, now_s):
            del node.sources[key]
            precedence.drop(key)
            self.changes += 1
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
            if page.restarted:
                source.mapper.forget(page.restarted)
            if again := page.drop_repeats():
                self.leave_out(AGAIN, again)
            try:
                newest = source.mapper.map(page.samples, ts_ms)
            except ExpositionError as error:  # a part of a page without any value
                self.failed += 1
                self.leave_out(str(error), page.count)
                continue
            self.pages += 1
            for why in newest.problems:
                self.leave_out(why)
            if together is not None:
                newest.add(together)
            together = newest
        return together

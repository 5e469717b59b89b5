"""Take requests of OTLP metrics: find the node and the exporter of each point, and what to answer.

Two namings are understood: series of an exporter's page, as a Collector's prometheus receiver sends them (names and
labels as on the page; the target is the resource), and OpenTelemetry's own names for hardware. Used are gauges and
cumulative sums. A sum with delta temporality is refused: its sender may repeat or lose one unnoticed. A new start time
says that a sum was reset, or that its sender was: its growth since the point before is unknown, and it has no rate.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from drover_collector.scrape.mapping import PageMapper
from drover_collector.scrape.otlp import (
    GAUGE,
    MAX_JSON,
    MAX_PLAIN,
    SUM,
    Instrument,
    KnownSeries,
    Labels,
    Reader,
    unpacked,
)
from drover_collector.scrape.otlp_json import JsonReader
from drover_collector.scrape.received import MANY, MAX_WAITING, NAMELESS, Received, Series
from drover_collector.scrape.settings import OtlpInConfig, node_name, node_of_instance
from drover_collector.scrape.tables import Table, table
from drover_collector.scrape.wire import WriteError

NAMED = 4  # reasons in one answer
NAMES_IN_ONE, NAMES_KEPT = 8, 10_000  # names of metrics that nobody wants: in one answer, and remembered
NAMED_AGAIN_S = 600.0  # between two answers that name one: a sender logs each
DELTA = "a sum without cumulative temporality: set the sender to cumulative, or use the processor deltatocumulative"
NO_NUMBER = "of a histogram or summary: a gauge or a sum is needed"
OTHER_UNIT = "of another unit than the conventions': {}"
INSTANCES = ("service.instance.id", "instance")


@dataclass(frozen=True, slots=True)
class Form:
    """How a request is written."""

    is_json: bool = False
    is_gzip: bool = False

    def pack(self, body: bytes) -> bytes:
        """Return a request with its form before it."""
        return bytes((self.is_json, self.is_gzip)) + body

    @classmethod
    def unpack(cls, message: bytes) -> tuple[Form, bytes]:
        return cls(bool(message[0]), bool(message[1])), message[2:]


@dataclass(frozen=True, slots=True)
class Answer:
    """`status`: of HTTP. `text`: "" or a sentence. `rejected`: points that were not used."""

    status: int
    text: str = ""
    rejected: int = 0


@dataclass(frozen=True, slots=True)
class _Wanted:
    table: Table
    units: frozenset[str] = field(default_factory=frozenset)


class OtlpTaker:
    """Used from one event loop."""

    def __init__(self, config: OtlpInConfig, received: Received) -> None:
        self._config, self._received = config, received
        self._wanted: dict[str, _Wanted] = {}
        for name in config.exporters:
            of = table(name)
            for series in PageMapper(of).wanted:
                units = frozenset(row.unit for row in of.by_series().get(series, ()) if row.unit)
                self._wanted.setdefault(series, _Wanted(of, units))
        self._known: KnownSeries[Series] = KnownSeries(self)
        self._protobuf, self._json = Reader(self._known), JsonReader(self._known)
        self._changes = 0
        self._now_s = 0.0
        self._named_s: dict[str, float] = {}  # metric that nobody wants -> when an answer named it

    def take(self, body: bytes, form: Form, now_ms: int, now_s: float) -> Answer:
        """Take a request.

        Args:
            now_ms: of the clock. now_s: of a clock that is never set.
        """
        self._now_s = now_s
        received = self._received
        if received.is_full:
            return Answer(503, f"{MAX_WAITING} samples wait to be used; send it again")
        if self._changes != received.changes:
            self._changes = received.changes
            self._known.forget()
        try:
            plain = unpacked(body, form.is_gzip, MAX_JSON if form.is_json else MAX_PLAIN)
            read = (self._json if form.is_json else self._protobuf).read(plain)
        except WriteError as error:
            return Answer(400, str(error))
        for why, count in read.rejected.items():
            received.leave_out(why, count)
        rejected = Counter(read.rejected)
        for point in read.points:
            if not math.isfinite(point.value):
                continue  # it is absent, and its exporter may be down
            why = received.take(point.series, point.ts_ms, point.value, now_ms, now_s)
            if why:
                rejected[why] += 1
            elif point.start and point.series.start != point.start:
                if point.series.start:
                    received.restart(point.series, point.ts_ms)
                point.series.start = point.start
        if read.unused and not read.points and not rejected:
            return Answer(200, _unused(sorted(read.unused_names), f"Drover uses none of these {read.unused} metrics"))
        texts = _sentence(rejected), self._not_named_yet(read.unused_names)
        return Answer(200, "; ".join(filter(None, texts)), rejected.total())

    def _not_named_yet(self, names: set[str]) -> str:
        """Return a sentence about metrics that nobody wants and no answer has named lately."""
        since_s = self._now_s - NAMED_AGAIN_S
        fresh = sorted(name for name in names if self._named_s.get(name, since_s) <= since_s)[:NAMES_IN_ONE]
        if not fresh:
            return ""
        if len(self._named_s) > NAMES_KEPT:
            self._named_s.clear()
        self._named_s.update(dict.fromkeys(fresh, self._now_s))
        return _unused(fresh, "Drover does not use these metrics")

    # ---- what is used

    def refusal(self, instrument: Instrument) -> str | None:
        """Return why no point of it can be used; "": some can; None: nobody wants it."""
        wanted = self._wanted.get(instrument.name)
        if wanted is None:
            return None
        if instrument.kind not in (GAUGE, SUM):
            return NO_NUMBER
        if not instrument.is_cumulative:
            return DELTA
        if wanted.units and instrument.unit and instrument.unit not in wanted.units:
            return OTHER_UNIT.format(instrument.name)
        return ""

    def series(self, resource: Mapping[str, str], instrument: Instrument, attributes: Labels) -> Series | str:
        """Return what points with these attributes are taken for, or why they are not used."""
        node = self._node(resource, attributes)
        if not node:
            return NAMELESS
        instance = next((text for name in INSTANCES if (text := resource.get(name) or attributes.get(name, ""))), "")
        of = self._wanted[instrument.name].table
        return self._received.series(instrument.name, attributes, node, of, instance, self._now_s) or MANY

    def _node(self, resource: Mapping[str, str], attributes: Mapping[str, str]) -> str:
        for name in self._config.node_attributes:
            text = attributes.get(name) or resource.get(name, "")
            if not text:
                continue
            short = self._config.short_names
            node = node_of_instance(text, short) if name in INSTANCES else node_name(text, short=short)
            if node:
                return node
        return ""


def _unused(names: list[str], what: str) -> str:
    """Return which metrics stand in no table, for the sender's log."""
    shown = ", ".join("".join(c for c in name if c.isprintable()) for name in names[:NAMES_IN_ONE])
    more = " and more" if len(names) > NAMES_IN_ONE else ""
    return f"{what}: {shown}{more}; see docs/how-to/without-agents.md"


def _sentence(rejected: Mapping[str, int]) -> str:
    """Return what was not used and why, for the sender's log."""
    ordered = sorted(rejected.items(), key=lambda entry: -entry[1])
    more = f"; and {len(ordered) - NAMED} more reasons" if len(ordered) > NAMED else ""
    return "; ".join(f"{count} points {why}" for why, count in ordered[:NAMED]) + more

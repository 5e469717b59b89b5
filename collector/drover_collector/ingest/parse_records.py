"""Parse the records of the events lane into the values that are stored."""

from __future__ import annotations

from dataclasses import dataclass, replace

from drover_collector.engine.late_events import HISTORY_MS, is_error
from drover_collector.ingest.schema_registry import Refusal
from drover_core.metrics.catalog import BY_NAME
from drover_core.model.events import Absence, Event, EventKind, Holding, ProbeResult, from_json
from drover_proto import telemetry_pb2 as pb

OF_AGENTS = tuple(kind for kind in EventKind if kind is not EventKind.CONDITION)  # that is Kubernetes' own
SUSPECT_MS = 60_000  # NTP leaves far less, and operators notice only more
MAX_MS = 10_000_000_000_000  # year 2286; the store holds times from 1970 until then
MAX_TEXT = 16_384  # a kernel line has at most 1 kB; agents join a few


@dataclass(frozen=True, slots=True)
class ParsedRecord:
    """One of these is set."""

    event: Event | None = None
    absence: Absence | None = None
    holding: Holding | None = None
    probe: ProbeResult | None = None


@dataclass(frozen=True, slots=True)
class RecordSource:
    """The agent that sent a record, and its clocks.

    Attributes:
        received_ms: the collector's clock.
        hello_ms: the agent's clock when its Hello was answered.
        clock_offset_ms: the collector's clock minus the agent's at the Hello.
        boot: the node's boot at the Hello.
        age_ms: how long ago the event happened by the node's time since that boot, which no step of a clock changes;
            None: unknown.
    """

    node: str
    spool: str
    received_ms: int
    hello_ms: int
    clock_offset_ms: int
    boot: str = ""
    age_ms: int | None = None


def parse_record(record: pb.Record, source: RecordSource) -> ParsedRecord | Refusal:
    """Return the value of a record, or why it is refused. No record is refused for its time."""
    match record.WhichOneof("body"):
        case "event":
            return _event(record, source)
        case "absence":
            return _absence(record.absence, source)
        case "holding":
            return _holding(record.holding, source)
        case "probe_result":
            return _probe_result(record.probe_result, source)
    return Refusal("bad record", "a record of a kind that is unknown to this collector; update it")


def _event(record: pb.Record, source: RecordSource) -> ParsedRecord | Refusal:
    event = record.event
    if event.kind not in OF_AGENTS:
        return Refusal("bad record", f"an event of kind {event.kind[:80]!r}; valid: {', '.join(OF_AGENTS)}")
    if event.gpu > 255 or max(map(len, (event.code, event.message, event.source, event.boot_id))) > MAX_TEXT:
        text = f"an event with GPU {event.gpu} (0 to 255 are allowed) or a text of more than {MAX_TEXT} characters"
        return Refusal("bad record", text)
    ts_ms, age_ms = _storable_ms(event.ts_ms, source), source.age_ms
    # Of a previous boot, or so old by the node's own count that an operator may have handled it.
    past = bool(event.boot_id and source.boot and event.boot_id != source.boot) or (age_ms or 0) > HISTORY_MS
    backlog = event.backlog or (past and is_error(event.kind, event.code))
    parsed = Event(
        id=f"{source.node}/{source.spool}/{record.seq}",
        ts_ms=ts_ms,
        node=source.node,
        gpu=event.gpu if event.HasField("gpu") else None,
        kind=EventKind(event.kind),
        code=event.code,
        message=event.message,
        source=event.source,
        backlog=backlog,
        count=max(event.count, 1),
        received_ms=source.received_ms,
        clock_suspect=ts_ms != event.ts_ms or (not backlog and _clock_suspect(ts_ms, event.told_ms, source)),
        forgeable=event.forgeable,
        boot=event.boot_id,
    )
    return ParsedRecord(event=parsed)


def _clock_suspect(ts_ms: int, read_ms: int, source: RecordSource) -> bool:
    """Return whether the node's clock was wrong by more than a minute.

    An event that was read long after it happened, or that waited in the spool since before the Hello, is late: that
    does not make the clock suspect.

    Args:
        read_ms: when the agent read the event; 0: unknown.
    """
    if source.age_ms is not None:  # the node's time since boot checks its wall clock
        return abs(source.received_ms - source.age_ms - ts_ms) > SUSPECT_MS
    if abs(source.clock_offset_ms) > SUSPECT_MS or ts_ms - source.received_ms > SUSPECT_MS:
        return True
    read_ms = read_ms or ts_ms
    return read_ms >= source.hello_ms and abs(source.received_ms - read_ms) > SUSPECT_MS


def _absence(absence: pb.Absence, source: RecordSource) -> ParsedRecord | Refusal:
    if absence.metric not in BY_NAME or absence.gpu > 255 or max(len(absence.reason), len(absence.link)) > 256:
        text = f"an absence of metric {absence.metric[:80]!r}: unknown metric, invalid slot, or a text that is too long"
        return Refusal("bad record", text)
    parsed = Absence(
        node=source.node,
        gpu=absence.gpu if absence.HasField("gpu") else None,
        metric=absence.metric,
        reason=absence.reason,
        from_ms=_storable_ms(absence.from_ms, source),
        to_ms=_storable_ms(absence.to_ms, source) if absence.HasField("to_ms") else None,
        link=absence.link or None,
    )
    return ParsedRecord(absence=parsed)


def _holding(holding: pb.Holding, source: RecordSource) -> ParsedRecord | Refusal:
    if holding.gpu > 255 or len(holding.job) > MAX_TEXT:
        return Refusal("bad record", f"job {holding.job[:80]!r} on GPU {holding.gpu}; slots are 0 to 255")
    from_ms = _storable_ms(holding.from_ms, source)
    return ParsedRecord(holding=Holding(source.node, holding.gpu, holding.job or None, from_ms))


def _probe_result(sent: pb.ProbeResult, source: RecordSource) -> ParsedRecord | Refusal:
    """Parse a probe result. It counts for the agent's own node, whatever it names."""
    if len(sent.json) > MAX_TEXT or len(sent.request_id) > 256:
        return Refusal("bad record", f"a probe result of more than {MAX_TEXT} characters")
    try:
        result = from_json(ProbeResult, sent.json)
    except (ValueError, RecursionError) as error:
        return Refusal("bad record", f"an invalid probe result: {str(error)[:200]}")
    if result.gpu is not None and not 0 <= result.gpu <= 255:
        return Refusal("bad record", f"a probe result of GPU {result.gpu}; slots are 0 to 255")
    return ParsedRecord(probe=replace(result, node=source.node, ts_ms=_storable_ms(result.ts_ms, source)))


def _storable_ms(ts_ms: int, source: RecordSource) -> int:
    """Return a time that the store can hold: when the record was received, if its own is impossible."""
    return ts_ms if 0 <= ts_ms < MAX_MS else source.received_ms

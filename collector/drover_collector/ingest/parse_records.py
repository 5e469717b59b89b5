"""Records of the events lane, from the wire to the values that are stored."""

from __future__ import annotations

from dataclasses import dataclass, replace

from drover_collector.engine.late_events import HISTORY_MS, is_error
from drover_collector.ingest.schema_registry import Refusal
from drover_core.metrics.catalog import BY_NAME
from drover_core.model.events import (
    Absence,
    Event,
    EventKind,
    Holding,
    ProbeResult,
    from_json,
)
from drover_proto import telemetry_pb2 as pb

SUSPECT_MS = 60_000  # a minute is far above what NTP leaves and below what matters to an operator
LATEST_MS = 10_000_000_000_000  # year 2286: beyond it, and before 1970, the store has no moment for a time
MAX_TEXT = 16_384  # a kernel line has 1 kB at most; agents join a few


@dataclass(frozen=True, slots=True)
class Taken:
    """One of these."""

    event: Event | None = None
    absence: Absence | None = None
    holding: Holding | None = None
    probe: ProbeResult | None = None


def take_record(
    record: pb.Record,
    node: str,
    spool: str,
    received_ms: int,
    hello_ms: int,
    clock_offset_ms: int,
    boot: str = "",
    age_ms: int | None = None,
) -> Taken | Refusal:
    """The value of a record, or why it is none. No record is refused for its time.

    Args:
        hello_ms: the agent's clock when its Hello was answered; clock_offset_ms: the collector's minus the agent's.
        boot: the node's boot as of that Hello. age_ms: how old an event is by the node's time since that boot, which no
            step of a clock changes; None: not known.
    """
    kind = record.WhichOneof("body")
    if kind == "event":
        return _event(record, node, spool, received_ms, hello_ms, clock_offset_ms, boot, age_ms)
    if kind == "absence":
        return _absence(record.absence, node, received_ms)
    if kind == "holding":
        holding = record.holding
        if holding.gpu > 255 or len(holding.job) > MAX_TEXT:
            return Refusal("bad record", f"job {holding.job[:80]!r} on GPU {holding.gpu}; slots are 0 to 255")
        from_ms = _moment(holding.from_ms, received_ms)
        return Taken(holding=Holding(node, holding.gpu, holding.job or None, from_ms))
    if kind == "probe_result":
        return _probe_result(record.probe_result, node, received_ms)
    return Refusal("bad record", "a record with nothing that this collector knows; update it")


def _event(
    record: pb.Record,
    node: str,
    spool: str,
    received_ms: int,
    hello_ms: int,
    clock_offset_ms: int,
    boot: str,
    age_ms: int | None,
) -> Taken | Refusal:
    event = record.event
    if event.kind not in tuple(EventKind):
        return Refusal("bad record", f"an event of kind {event.kind[:80]!r}, which is none of {', '.join(EventKind)}")
    if event.gpu > 255 or max(map(len, (event.code, event.message, event.source, event.boot_id))) > MAX_TEXT:
        return Refusal("bad record", f"an event with GPU {event.gpu} or a text that is too long (over {MAX_TEXT})")
    ts_ms = _moment(event.ts_ms, received_ms)
    if age_ms is not None:  # the node counted the time since: its wall clock can be checked by it
        wrong = abs(received_ms - age_ms - ts_ms) > SUSPECT_MS
    else:
        wrong = _clock_suspect(ts_ms, event.told_ms or ts_ms, received_ms, hello_ms, clock_offset_ms)
    # Of before its node's boot, or so old by the node's own count that somebody may have dealt with it.
    past = bool(event.boot_id and boot and event.boot_id != boot) or (age_ms or 0) > HISTORY_MS
    backlog = event.backlog or (past and is_error(event.kind, event.code))
    suspect = ts_ms != event.ts_ms or (wrong and not backlog)
    taken = Event(
        id=f"{node}/{spool}/{record.seq}",
        ts_ms=ts_ms,
        node=node,
        gpu=event.gpu if event.HasField("gpu") else None,
        kind=EventKind(event.kind),
        code=event.code,
        message=event.message,
        source=event.source,
        backlog=backlog,
        count=max(event.count, 1),
        received_ms=received_ms,
        clock_suspect=suspect,
        forgeable=event.forgeable,
        boot=event.boot_id,
    )
    return Taken(event=taken)


def _clock_suspect(ts_ms: int, told_ms: int, received_ms: int, hello_ms: int, clock_offset_ms: int) -> bool:
    """Whether the node's clock is wrong by more than a minute. An event that was told long after it happened (the
    agent's reader stood still), or that waited in the spool (it was told before the stream's Hello), is late and not
    wrong: there the clock when it was told, or that at Hello, tells."""
    if abs(clock_offset_ms) > SUSPECT_MS or ts_ms - received_ms > SUSPECT_MS:
        return True
    return told_ms >= hello_ms and abs(received_ms - told_ms) > SUSPECT_MS


def _absence(absence: pb.Absence, node: str, received_ms: int) -> Taken | Refusal:
    if absence.metric not in BY_NAME or absence.gpu > 255 or max(len(absence.reason), len(absence.link)) > 256:
        return Refusal("bad record", f"an absence of {absence.metric[:80]!r}, which is no metric here, or of no slot")
    to_ms = _moment(absence.to_ms, received_ms) if absence.HasField("to_ms") else None
    taken = Absence(
        node=node,
        gpu=absence.gpu if absence.HasField("gpu") else None,
        metric=absence.metric,
        reason=absence.reason,
        from_ms=_moment(absence.from_ms, received_ms),
        to_ms=to_ms,
        link=absence.link or None,
    )
    return Taken(absence=taken)


def _probe_result(told: pb.ProbeResult, node: str, received_ms: int) -> Taken | Refusal:
    """An agent speaks only for its own node, whatever the result says."""
    if len(told.json) > MAX_TEXT or len(told.request_id) > 256:
        return Refusal("bad record", f"a probe's result that is too long (over {MAX_TEXT})")
    try:
        result = from_json(ProbeResult, told.json)
    except (ValueError, RecursionError) as error:
        return Refusal("bad record", f"no probe's result: {str(error)[:200]}")
    if result.gpu is not None and not 0 <= result.gpu <= 255:
        return Refusal("bad record", f"a probe's result of GPU {result.gpu}; slots are 0 to 255")
    return Taken(probe=replace(result, node=node, ts_ms=_moment(result.ts_ms, received_ms)))


def _moment(ts_ms: int, received_ms: int) -> int:
    """A time that the store can hold: the receipt where the clock was absurd."""
    return ts_ms if 0 <= ts_ms < LATEST_MS else received_ms

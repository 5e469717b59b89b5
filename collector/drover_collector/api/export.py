"""The store as the files of a case, in pieces that fit into a message."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import pyarrow as pa

from drover_collector.api.snapshot import ApiSnapshot, bad_argument
from drover_collector.pipeline.restore import BEFORE_MS, SLICE_NODES
from drover_collector.store import ProbeRow
from drover_core.metrics.catalog import Scope
from drover_core.model import gpu_processes
from drover_core.model.events import (
    Absence,
    Event,
    Holding,
    Incident,
    ProbeOrder,
    ProbeVerdict,
)
from drover_core.model.fleet import FleetSpec, JobSpec, dump_json
from drover_core.model.reports import event_report, incident_report
from drover_core.times import iso
from drover_proto import fleet_pb2 as pb

CHUNK_BYTES = 1 << 20  # a client's default limit is 4 MiB a message
EVENTS_PAGE = 10_000
JUST_NOW_MS = 60_000  # detection is never further behind, unless it has a trouble; then nothing is left out


def export(facts: ApiSnapshot, request: pb.ExportRequest) -> Generator[pb.ExportChunk]:
    """The chunks of all files, one file after the other.

    One that reaches up to now ends with the newest bucket that was judged: a replay that saw more than the live run
    would have more.
    """
    incidents, judged_ms = _judged(facts)
    from_ms, to_ms = request.from_ms, request.to_ms or facts.now_ms()
    judged_to_ms = to_ms
    if judged_ms < to_ms <= judged_ms + JUST_NOW_MS:
        to_ms, judged_to_ms = judged_ms, min(to_ms, judged_ms + facts.pipeline.lag_ms)  # when that bucket was judged
    if from_ms >= to_ms:
        raise bad_argument(f"from_ms {from_ms} is not before to_ms {to_ms}")
    store, index = facts.store, facts.index
    jobs = jobs_of(h for h in store.jobs.holdings(from_ms, to_ms) if index.gpu(h.node, h.gpu) is not None)
    yield from _text(
        "fleet.json", [dump_json(FleetSpec(index.nodes, jobs, index.spec.name, objectives=index.spec.objectives))]
    )
    for scope in Scope:
        yield from _tables(f"{scope}.parquet", store.export.tables(scope, from_ms, to_ms))
    if request.instances:
        yield from _tables("mig.parquet", store.export.instance_tables(from_ms, to_ms))
    yield from _text("events.jsonl", _lines(event_report(e) for e in _events(facts, from_ms, judged_to_ms)))
    absences = (a for a in store.absences.between(from_ms, to_ms) if a.node in index.node_number)
    yield from _text("absences.jsonl", _lines(absence_row(a) for a in absences))
    mine = index.node_number
    if request.inventory:
        yield from _text("inventory.jsonl", _lines(_inventories(facts, from_ms, to_ms)))
    probes = _probes(
        [r for r in store.probes.results.between(from_ms, judged_to_ms) if r.result.node in mine],
        [o for o in store.probes.orders.between(from_ms, judged_to_ms) if o.node in mine],
        [v for v in store.probes.verdicts.read(from_ms=from_ms, to_ms=judged_to_ms) if v.node in mine],
    )
    yield from _text("probes.jsonl", _lines(probes))
    yield from _text(
        "incidents.jsonl",
        _lines(
            incident_report(i)
            for i in sorted(incidents, key=lambda i: (i.opened_ms, i.id))
            if i.opened_ms <= judged_to_ms and (i.closed_ms is None or i.closed_ms >= from_ms)
        ),
    )


def _judged(facts: ApiSnapshot) -> tuple[list[Incident], int]:
    """Incidents in their newest version, and the end of the newest bucket that they cover; 0: none."""
    ticks = facts.pipeline.ticks
    while True:
        judged_ms = ticks.newest_end_ms
        incidents = facts.incidents()
        if ticks.newest_end_ms == judged_ms:
            return incidents, judged_ms


def jobs_of(holdings: Iterable[Holding]) -> tuple[JobSpec, ...]:
    """Make jobs of what held each GPU. Nodes report a job at slightly different times: it spans them all.

    A job id that comes back after it had ended everywhere (a requeued job) is a second entry.
    """
    spans: dict[str, list[tuple[int, int | None, tuple[str, int]]]] = {}
    current: dict[tuple[str, int], Holding] = {}

    def end(member: tuple[str, int], at_ms: int | None) -> None:
        held = current.pop(member, None)
        if held is not None and held.job is not None:
            spans.setdefault(held.job, []).append((held.from_ms, at_ms, member))

    for holding in sorted(holdings, key=lambda h: h.from_ms):
        member = (holding.node, holding.gpu)
        if member in current and current[member].job == holding.job:
            continue  # reported again after an agent's restart
        end(member, holding.from_ms)
        if holding.job is not None:
            current[member] = holding
    for member in list(current):
        end(member, None)

    jobs: list[JobSpec] = []
    for name, held in spans.items():
        held.sort(key=lambda s: s[0])
        run: list[tuple[int, int | None, tuple[str, int]]] = []
        run_end: int | None = held[0][0]
        for span in held:
            if run_end is not None and span[0] > run_end:
                jobs.append(_job(name, run, run_end))
                run = []
                run_end = span[1]
            elif run_end is not None:
                run_end = None if span[1] is None else max(run_end, span[1])
            run.append(span)
        jobs.append(_job(name, run, run_end))
    return tuple(sorted(jobs, key=lambda j: (j.start_ms, j.id)))


def _job(name: str, run: Sequence[tuple[int, int | None, tuple[str, int]]], end_ms: int | None) -> JobSpec:
    return JobSpec(name, run[0][0], end_ms, tuple(sorted({member for _, _, member in run})))


def absence_row(absence: Absence) -> dict[str, Any]:
    row = asdict(absence)
    row["from"] = iso(row.pop("from_ms"))
    to_ms = row.pop("to_ms")
    row["to"] = None if to_ms is None else iso(to_ms)
    return row


def _events(facts: ApiSnapshot, from_ms: int, to_ms: int) -> Iterator[Event]:
    """All events of the span, oldest first, in pages."""
    page: list[Event] = []
    while page := facts.store.events.read_after(from_ms, to_ms, page[-1] if page else None, EVENTS_PAGE):
        yield from (e for e in page if e.node in facts.index.node_number)


def _inventories(facts: ApiSnapshot, from_ms: int, to_ms: int) -> Iterator[dict[str, Any]]:
    """What nodes were made of, from as long before the span as a start of detection looks back."""
    slices = max(1, -(-facts.index.node_count // SLICE_NODES))
    for number in range(slices):
        for ts_ms, node, inventory in facts.store.inventories.between(
            max(0, from_ms - BEFORE_MS), to_ms, number, slices
        ):
            if node in facts.index.node_number:
                yield {"ts": iso(ts_ms), "node": node, "inventory": gpu_processes.without(inventory)}


def _probes(
    results: Iterable[ProbeRow], orders: Iterable[ProbeOrder], verdicts: Iterable[ProbeVerdict]
) -> Iterator[dict[str, Any]]:
    """Lines of probes.jsonl; a replay judges by the verdicts."""
    for row in results:
        made_of = {"key": asdict(row.key), "serial": row.serial, "uuid": row.uuid, "received_ms": row.received_ms}
        yield {"result": asdict(row.result)} | made_of
    for order in orders:
        yield {"order": asdict(order)}
    for verdict in verdicts:
        yield {"verdict": asdict(verdict)}


def _lines(rows: Iterable[dict[str, Any]]) -> Iterator[str]:
    return (json.dumps(row, allow_nan=False) + "\n" for row in rows)


def _text(file: str, parts: Iterable[str]) -> Iterator[pb.ExportChunk]:
    held = bytearray()
    for part in parts:
        held += part.encode()
        while len(held) > CHUNK_BYTES:
            yield pb.ExportChunk(file=file, data=bytes(held[:CHUNK_BYTES]))
            del held[:CHUNK_BYTES]
    yield pb.ExportChunk(file=file, data=bytes(held), last=True)


def _tables(file: str, tables: Iterable[pa.Table]) -> Iterator[pb.ExportChunk]:
    """Each chunk is a whole Arrow IPC stream. A scope without any row gives no file."""
    before: bytes | None = None
    for table in tables:
        rows = max(1, CHUNK_BYTES * len(table) // max(table.nbytes, 1))
        for start in range(0, len(table), rows):
            if before is not None:
                yield pb.ExportChunk(file=file, data=before)
            before = _stream(table.slice(start, rows))
    if before is not None:
        yield pb.ExportChunk(file=file, data=before, last=True)


def _stream(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    data: bytes = sink.getvalue().to_pybytes()
    return data

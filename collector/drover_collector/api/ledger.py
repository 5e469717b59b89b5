"""The ledger: what held GPU-hours were used for, made of stored facts alone, so that a restart changes nothing."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from drover_collector.api.moves import messages, moves_of
from drover_collector.api.owners import teams_of
from drover_collector.api.snapshot import DAY_MS, ApiSnapshot, RefusalError, bad_argument, not_found
from drover_collector.ledger.account import Account, asked_energy, make_account
from drover_collector.ledger.facts import Facts, LedgerIncident
from drover_collector.ledger.holds import of_changes, steps_of_jobs
from drover_collector.ledger.message import HOUR_MS, Asked, Prices, make_message
from drover_collector.ledger.spans import GpuSpans, Ints
from drover_collector.ledger.telemetry import Buckets, EnergyMeter, find_activity, find_energy
from drover_collector.store import Store
from drover_collector.store.samples.usage import STEP_MS, UsageReader
from drover_core.jobs.checkpoint import ReportError, from_message
from drover_core.model.conditions import is_foreign
from drover_core.model.events import NoteKind
from drover_core.model.kinds import CHECKPOINT, EventKind
from drover_proto import fleet_pb2 as pb

DAYS, MOST_DAYS = 7, 35  # of one report
READ_DAYS = 400  # as long as incidents are looked back at elsewhere
# Facts of this time before and after count too: a fault ends a job ten minutes later, a restart takes half an hour.
MARGIN_MS = 3_600_000
CHECKPOINTS = 50_000  # that are read for one report
KEPT_S = 60.0
WAIT_S = 20.0  # for another report
LISTED, LISTED_MAX = 200, 5000
CLOSINGS = frozenset({NoteKind.CLOSED, NoteKind.REFUTED, NoteKind.ABSORBED, NoteKind.NO_LONGER_WANTED})

_one_at_a_time = threading.Lock()  # a week of a large fleet takes a core for seconds


@dataclass(frozen=True, slots=True)
class _Made:
    facts: Facts
    account: Account
    doubts: Sequence[str]


def get_ledger(facts: ApiSnapshot, request: pb.LedgerRequest) -> pb.Ledger:
    now_ms = facts.now_ms()
    to_ms = min(request.to_ms or now_ms, now_ms)
    from_ms = request.from_ms or to_ms - DAYS * DAY_MS
    if not 0 < to_ms - from_ms <= MOST_DAYS * DAY_MS or from_ms < 0:
        raise bad_argument(
            f"from_ms {from_ms} to to_ms {to_ms}: give a span of more than 0 and at most {MOST_DAYS} days in the past"
        )
    if from_ms < now_ms - READ_DAYS * DAY_MS:
        raise bad_argument(f"from_ms {from_ms}: it is at most {READ_DAYS} days ago")
    moves = moves_of(facts, from_ms, to_ms, request.job)
    made = facts.once(("ledger", from_ms, to_ms // STEP_MS), KEPT_S, lambda: _make(facts, from_ms, to_ms))
    job = None
    if request.job:
        if request.job not in made.facts.jobs:
            raise not_found(f"no job {request.job!r} held a GPU in this time")
        job = made.facts.jobs.index(request.job)
    asked = Asked(job, min(request.limit or LISTED, LISTED_MAX))
    reply = make_message(facts.index, made.facts, made.account, prices(facts), asked, made.doubts)
    reply.moves.extend(messages(moves, made.facts))
    return reply


def day_total(facts: ApiSnapshot, from_ms: int, to_ms: int) -> pb.LedgerRow:
    """Return the total of a time. It is not kept: a day of a large fleet takes much memory.

    Raises:
        RefusalError: another report is being made.
    """
    made = _make(facts, from_ms, to_ms)
    return make_message(facts.index, made.facts, made.account, prices(facts), Asked(None, 1)).total


def prices(facts: ApiSnapshot) -> Prices:
    cost = facts.config.cost
    return Prices(
        cost.currency, [cost.price(node.pool, node.sku) for node in facts.index.nodes], cost.kwh or None,
        cost.availability,
    )  # fmt: skip


def _make(facts: ApiSnapshot, from_ms: int, to_ms: int) -> _Made:
    if not _one_at_a_time.acquire(timeout=WAIT_S):
        raise RefusalError(grpc.StatusCode.RESOURCE_EXHAUSTED, "another report is being made; ask again in a minute")
    try:
        return _read(facts, from_ms, to_ms)
    finally:
        _one_at_a_time.release()


def _read(facts: ApiSnapshot, from_ms: int, to_ms: int) -> _Made:
    found, meter, to_ms, late_ms = read_facts(facts, from_ms, to_ms)
    doubts = [
        f"Late samples of {late_ms / HOUR_MS:,.1f} hours are still being added to the rollups; until then their time is"
        " unknown."
    ] if late_ms else []  # fmt: skip
    return _Made(found, make_account(facts.index, found, meter, from_ms, to_ms), doubts)


def read_facts(
    facts: ApiSnapshot, from_ms: int, to_ms: int, gpus: Ints | None = None
) -> tuple[Facts, EnergyMeter, int, int]:
    """Return the facts of a time, energy, up to where they reach, and how much of it is still to be rolled up.

    `gpus`: whose telemetry is read; None: of all.
    """
    index, store = facts.index, facts.store
    usage = UsageReader(store.rows, store.rollups, store.entities.registry)
    upto_ms = usage.upto_ms(facts.now_ms())
    to_ms = max(from_ms + 1, min(to_ms, upto_ms))
    # Whole days: how full a bucket is follows from the fullest of its day, whatever span is asked for.
    read_ms = (from_ms - MARGIN_MS) // DAY_MS * DAY_MS
    until_ms = max(to_ms, min(upto_ms, -(-(to_ms + MARGIN_MS) // DAY_MS) * DAY_MS))
    changes = store.jobs.changes(index, read_ms, until_ms)
    holds = of_changes(changes.gpu, changes.from_ms, changes.job, until_ms)
    meter = asked_energy(index, holds, from_ms, to_ms)
    activity = []
    for piece in usage.pieces(index, read_ms, -(-until_ms // STEP_MS) * STEP_MS, gpus):
        buckets = Buckets(STEP_MS, piece.gpu, piece.start_ms, piece.rows, piece.busy, piece.energy_mj).in_order()
        activity.append(find_activity(buckets))
        meter.add(find_energy(buckets))
    checkpoints, checkpoints_from_ms = checkpoints_of(store, changes.jobs, read_ms)
    found = Facts(
        changes.jobs, holds, until_ms, GpuSpans.join(activity).apart().merged().clipped(0, until_ms),
        [ledger_incident(row) for row in store.incidents.for_ledger(read_ms) if not is_foreign(row["cause"])],
        steps_of_jobs(index, holds, usage.steps(read_ms, until_ms)), store.outages.histories(read_ms),
        checkpoints, checkpoints_from_ms, teams_of(store, facts.config.teams, changes.jobs, read_ms),
        store.outages.gpus.histories(read_ms),
    )  # fmt: skip
    return found, meter, to_ms, usage.late_ms(from_ms, to_ms)


def checkpoints_of(store: Store, jobs: Sequence[str], since_ms: int) -> tuple[list[tuple[int, int]], int]:
    """Return (job, ms) of checkpoints that jobs reported, of very many the newest, and from when on these are all."""
    number = {name: at for at, name in enumerate(jobs)}
    found = []
    events = store.events.of_code(EventKind.RANK, CHECKPOINT, since_ms, limit=CHECKPOINTS)
    for event in events:
        with contextlib.suppress(ReportError):  # it stays in the store as it came
            job = number.get(from_message(event.message).job)
            if job is not None:
                found.append((job, event.ts_ms))
    return found, since_ms if len(events) < CHECKPOINTS else events[0].ts_ms


def ledger_incident(row: Mapping[str, Any]) -> LedgerIncident:
    """Return an incident of the store's form."""

    def millis(hours: float | None) -> int | None:
        return None if hours is None else round(hours * HOUR_MS)

    return LedgerIncident(
        row["id"], row["kind"], row["cause"], row["node"], [(str(node), gpu) for node, gpu in row["members"]],
        row["job"], row["since_ms"], row["closed_ms"], row["closed_ms"] or row["updated_ms"], row["severity"],
        row["summary"], opened_spans(row["since_ms"], row["closed_ms"], row["timeline"]), millis(row["lost"]),
        millis(row["waited"]),
    )  # fmt: skip


def opened_spans(
    since_ms: int, closed_ms: int | None, timeline: Sequence[Mapping[str, Any]]
) -> list[tuple[int, int | None]]:
    """Return when an incident was open. A line that a full timeline has left out joins the spans around it."""
    found: list[tuple[int, int | None]] = []
    begin: int | None = since_ms
    for note in timeline:
        kind, at_ms = note.get("kind", ""), int(note["ts_ms"])
        if kind in CLOSINGS and begin is not None:
            found.append((begin, at_ms))
            begin = None
        elif kind == NoteKind.CAME_BACK and begin is None:
            begin = at_ms
    if begin is not None:
        found.append((begin, closed_ms))
    return [(low, high) for low, high in found if high is None or low < high]

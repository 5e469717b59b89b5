"""The ledger of a case folder: holds from fleet.json, telemetry from its samples, incidents from a replay."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from drover_cli.case.read import Case
from drover_cli.errors import CliError
from drover_collector.api.ledger import opened_spans
from drover_collector.engine.replay import Replay
from drover_collector.fleet.buckets import Bucket
from drover_collector.ledger.account import asked_energy, make_account
from drover_collector.ledger.facts import Facts, LedgerIncident
from drover_collector.ledger.holds import of_jobs
from drover_collector.ledger.message import HOUR_MS, Asked, Prices, make_message
from drover_collector.ledger.telemetry import Buckets, find_activity, find_energy
from drover_collector.policy.policy import Policy
from drover_core.model.events import Incident
from drover_core.times import from_iso
from drover_proto import fleet_pb2 as pb

STEP_MS = 300_000  # as the store's rollups: the same time gives the same ledger
MJ = 1000
STEPS_UNREAD = "Steps of training loops are not read from a case."


def replayed(case: Case) -> tuple[list[LedgerIncident], list[Bucket]]:
    """Return what a replay of the case found, and the case's buckets."""
    kept: list[Bucket] = []

    def watched() -> Iterable[Bucket]:
        for bucket in case.buckets():
            kept.append(bucket)
            yield bucket

    newest: dict[str, Incident] = {}
    replay = Replay(case.index, watched(), case.events, Policy.named("nvidia"), case.inventories, case.probes.verdicts)
    for outcome in replay:
        newest.update((incident.id, incident) for incident in outcome.incidents)
    return [_of_incident(incident) for incident in newest.values() if incident.scope != "fleet"], kept


def read_incidents(path: Path, until_ms: int) -> list[LedgerIncident]:
    """Read the lines of `drover replay --json`.

    Raises:
        CliError: no such file, or another form.
    """
    try:
        rows = [json.loads(line) for line in path.read_text("utf-8").splitlines() if line.strip()]
        return [_of_report(row, until_ms) for row in rows]
    except OSError as error:
        raise CliError(f"{path}: {error.strerror}; write it with drover replay CASE --json") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CliError(f"{path}: not the lines of drover replay --json ({error!r})") from None


def case_ledger(
    case: Case,
    incidents: Sequence[LedgerIncident],
    buckets: Iterable[Bucket],
    span: tuple[int, int] | None,
    prices: Prices,
    limit: int,
) -> pb.Ledger:
    """Return the ledger of a case, or of a span of it."""
    first, last = case.span
    until_ms = last + case.bucket_ms
    from_ms, to_ms = span or (first, until_ms)
    names, holds = of_jobs(case.index, case.spec.jobs, until_ms)
    usage = usage_of(case, buckets)
    facts = Facts(names, holds, until_ms, find_activity(usage).clipped(0, until_ms), incidents)
    to_ms = max(from_ms, min(to_ms, until_ms))
    meter = asked_energy(case.index, holds, from_ms, to_ms)
    meter.add(find_energy(usage))
    account = make_account(case.index, facts, meter, from_ms, to_ms)
    return make_message(case.index, facts, account, prices, Asked(limit=limit), [STEPS_UNREAD])


def usage_of(case: Case, buckets: Iterable[Bucket]) -> Buckets:
    """Return the case's buckets as the store's rollups have them: of 5 minutes, or longer if the case's are."""
    length_ms = max(STEP_MS, -(-case.bucket_ms // STEP_MS) * STEP_MS)
    found: dict[int, list[Bucket]] = {}
    for bucket in buckets:
        found.setdefault(bucket.start_ms // length_ms * length_ms, []).append(bucket)
    parts = [_folded(case, start_ms, length_ms, each) for start_ms, each in found.items()]
    columns = zip(*parts, strict=True) if parts else ((np.zeros(0, np.int64),) for _ in range(5))
    gpu, start, rows, busy, energy = (np.concatenate(column) for column in columns)
    return Buckets(length_ms, gpu, start, rows, busy.astype(np.float64), energy).in_order()


def _folded(case: Case, start_ms: int, length_ms: int, buckets: Sequence[Bucket]) -> tuple[np.ndarray[Any, Any], ...]:
    size = case.index.gpu_count
    rows = sum((bucket.gpu_rows > 0 for bucket in buckets), np.zeros(size, np.int64))
    busy = np.full((len(buckets), size), np.nan)
    energy = np.full(size, np.nan)
    for at, bucket in enumerate(buckets):
        for name in ("gpu_util_ratio", "sm_active_ratio"):
            if name in bucket.gpu:
                busy[at] = np.fmax(busy[at], bucket.gpu[name])
        if "energy_j" in bucket.gpu:
            value = bucket.gpu["energy_j"]
            energy = np.where(np.isnan(value), energy, value)
    known = ~np.isnan(busy).all(axis=0)
    middle = np.full(size, np.nan)
    middle[known] = np.nanquantile(busy[:, known], 0.5, axis=0, method="lower")
    there = np.flatnonzero(rows > 0)
    counter = np.where(np.isnan(energy), -1, np.rint(np.nan_to_num(energy) * MJ)).astype(np.int64)
    # A short last bucket is cut at the end of the case, and lacks no rows.
    full = max(1, min(length_ms, case.span[1] + case.bucket_ms - start_ms) // case.bucket_ms)
    counted = rows[there] * (length_ms // case.bucket_ms) // full
    return there, np.full(len(there), start_ms, np.int64), counted, middle[there], counter[there]


def _of_incident(incident: Incident) -> LedgerIncident:
    notes = [{"kind": note.kind, "ts_ms": note.ts_ms} for note in incident.timeline]
    return LedgerIncident(
        incident.id, incident.kind, incident.cause, incident.node, incident.members, incident.job, incident.since_ms,
        incident.closed_ms, incident.closed_ms or incident.updated_ms, incident.severity, incident.summary,
        opened_spans(incident.since_ms, incident.closed_ms, notes), _millis(incident.gpu_hours_lost),
        _millis(incident.gpu_hours_waited),
    )  # fmt: skip


def _of_report(row: dict[str, Any], until_ms: int) -> LedgerIncident:
    since_ms, closed_ms = from_iso(row["since"]), None if row["closed"] is None else from_iso(row["closed"])
    return LedgerIncident(
        row["id"], row["kind"], row["cause"], row["node"], [(str(node), gpu) for node, gpu in row["members"]],
        row["job"], since_ms, closed_ms, closed_ms or until_ms, row["severity"], row["summary"],
        [(since_ms, closed_ms)], _millis(row["gpu_hours_lost"]), _millis(row["gpu_hours_waited"]),
    )  # fmt: skip


def _millis(hours: float | None) -> int | None:
    return None if hours is None else round(hours * HOUR_MS)

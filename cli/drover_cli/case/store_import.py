"""A case folder into a store: what `drover import` does. Again is as once: rows, events and jobs have identities."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from drover_cli.case.read import Case, CaseError, read_jsonl
from drover_cli.case.samples import NodeParts, Samples, read_parts
from drover_cli.case.write import INSTANCE
from drover_collector.fleet.index import FleetIndex
from drover_collector.store import EntityRow, SampleBatch, Store, entity_id
from drover_core.metrics.catalog import BY_NAME, Scope
from drover_core.model.events import Absence, Holding
from drover_core.model.fleet import FleetSpec
from drover_core.times import from_iso

ROWS = 200_000  # of one insert
EVENTS = 20_000
INVENTORIES = 1_000  # of some 10 kB each
Key = tuple[str, int | None, str, str]  # node, slot, link or workload, MIG instance


def load(
    store: Store,
    case: Case,
    absences: Sequence[Absence],
    say: Callable[[int], None],
    instances: NodeParts | None = None,
) -> dict[str, int]:
    """Write a case into an open store.

    Args:
        say: gets the rows of samples that are written. instances: of GPUs, by MIG, which nothing judges.
    Returns:
        How much of each kind there was.
    Raises:
        StoreError: what was written stays, and an import again goes on.
    """
    done: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    parts, workloads = instances or NodeParts(), case.work
    files = (
        (Scope.GPU, case.gpu, None),
        (Scope.GPU, parts.samples, [_instance(node, name) for node, name in parts.names]),
        (Scope.NODE, case.node, None),
        (Scope.LINK, case.link, None),
        (Scope.WORKLOAD, workloads.samples, [(node, None, name, "") for node, name in workloads.names]),
    )
    for scope, samples, places in files:
        if samples is None or not len(samples.ts_ms):
            continue
        ids = _entities(store, case.index, scope, samples, _places(case, scope) if places is None else places)
        for batch in _batches(scope, samples, ids, refused):
            store.samples.write(batch)
            store.dirty_ranges.mark_late(batch, time.time_ns() // 1_000_000)
            done["rows"] += batch.rows
            say(done["rows"])
    for start in range(0, len(case.events), EVENTS):
        events = case.events[start : start + EVENTS]
        store.events.write_judged(events)  # first: nobody is alarmed about the past
        store.events.write(events)
    holdings = holdings_of(case.spec)
    store.jobs.write_holdings(holdings)
    store.absences.write(absences)
    for start in range(0, len(case.inventories), INVENTORIES):
        chosen = case.inventories[start : start + INVENTORIES]
        store.inventories.write([(node, ts_ms, entries) for ts_ms, node, entries in chosen])
    probes = case.probes.write(store)
    case.notes += [f"{n} values of {name} outside its possible range were left out" for name, n in refused.items()]
    return {"rows": done["rows"], "events": len(case.events), "holdings": len(holdings), "absences": len(absences)} | (
        {name: count for name, count in (("inventories", len(case.inventories)), ("probes", probes)) if count}
    )


def holdings_of(spec: FleetSpec) -> list[Holding]:
    """What each GPU was held by, from when on. A job that follows at once leaves no gap."""
    changes: dict[tuple[str, int], dict[int, str | None]] = defaultdict(dict)
    for job in sorted(spec.jobs, key=lambda j: j.start_ms):
        for member in job.members:
            changes[member][job.start_ms] = job.id
            if job.end_ms is not None:
                changes[member].setdefault(job.end_ms, None)
    return [
        Holding(node, gpu, job, from_ms)
        for (node, gpu), entries in changes.items()
        for from_ms, job in sorted(entries.items())
    ]


def read_absences(case: Case) -> list[Absence]:
    """Absences of a case; none without the file.

    Raises:
        CaseError: a line that cannot be used.
    """
    path = case.path / "absences.jsonl"
    if not path.exists():
        return []
    found, strangers = [], 0
    for number, row in read_jsonl(path):
        try:
            gpu, to, link = row.get("gpu"), row.get("to"), row.get("link")
            absence = Absence(
                str(row["node"]),
                None if gpu is None else int(gpu),
                str(row["metric"]),
                str(row["reason"]),
                from_iso(row["from"]),
                None if to is None else from_iso(to),
                None if link is None else str(link),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise CaseError(
                f'{path}: line {number}: expected {{"node", "gpu", "metric", "reason", "from", "to"}} ({error!r})'
            ) from None
        if absence.node in case.index.node_number and absence.metric in BY_NAME:
            found.append(absence)
        else:
            strangers += 1
    if strangers:
        case.notes.append(f"absences.jsonl: {strangers} of unknown nodes or metrics were left out")
    return found


def read_instances(case: Case) -> NodeParts:
    """Return MIG instances of GPUs that the fleet lists, which nothing judges; none without the file.

    Raises:
        CaseError: it cannot be used.
    """

    def known(node: str, name: str) -> bool:
        slot, _, instance = name.partition("/")
        return slot.isdecimal() and bool(instance) and case.index.gpu(node, int(slot)) is not None

    return read_parts(case.path / "mig.parquet", Scope.GPU, INSTANCE, case.index, case.notes, known)


def _batches(
    scope: Scope, samples: Samples, ids: npt.NDArray[np.uint64], refused: Counter[str]
) -> Iterator[SampleBatch]:
    for low in range(0, len(samples.ts_ms), ROWS):
        high = min(low + ROWS, len(samples.ts_ms))
        values = {name: samples.column(BY_NAME[name], low, high, refused) for name in samples.names}
        yield SampleBatch.of_values(scope, ids[samples.entity[low:high]], samples.ts_ms[low:high], values)


def _places(case: Case, scope: Scope) -> list[Key]:
    """In the order of the numbers that samples have."""
    nodes = case.index.nodes
    if scope is Scope.GPU:
        return [(node.name, slot, "", "") for node in nodes for slot in range(node.gpus)]
    if scope is Scope.NODE:
        return [(node.name, None, "", "") for node in nodes]
    return [(nodes[port.node].name, None, port.name, "") for port in case.index.ports.all()]


def _instance(node: str, name: str) -> Key:
    slot, _, instance = name.partition("/")
    return node, int(slot), "", instance


def _entities(
    store: Store, index: FleetIndex, scope: Scope, samples: Samples, places: Sequence[Key]
) -> npt.NDArray[np.uint64]:
    """uint64 by the number that samples have: the entity that the store knows at that place, else a new one."""
    used = np.unique(samples.entity)
    known = {
        (row.node, row.gpu, row.link, row.mig): row
        for node in sorted({places[number][0] for number in used})
        for row in store.entities.of_node(node)
        if row.scope is scope
    }
    span = int(samples.ts_ms[0]), int(samples.ts_ms[-1])
    ids = np.zeros(len(places), np.uint64)
    rows = []
    for number in used.tolist():
        place = places[number]
        row = known.get(place)
        if row is None:
            # As agents name nodes, ports and workloads; for a GPU, whose serial a case does not have, its place.
            node, slot, link, mig = place
            whole = known.get((node, slot, link, ""))
            key = whole.key if whole else "/".join(str(word) for word in place[:3] if word not in (None, ""))
            name = f"{key}/{mig}" if mig else key
            gpu = scope is Scope.GPU
            named = store.entities.gpu_id(name, node, index.near(node)) if gpu else entity_id(scope, name)
            row = EntityRow(named, scope, key, node, slot, link=link, mig=mig, first_ms=span[0])
        ids[number] = row.entity_id
        rows.append(replace(row, first_ms=min(row.first_ms, span[0]), last_ms=max(row.last_ms, span[1])))
    store.entities.write(rows)
    return ids

"""One adversary's fleet through the engine and the baselines, bucket by bucket, without files; and its result."""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
from baselines import fixed, mahalanobis, minder, peers, zscore

from drover_cli.scoring.score import (
    Found,
    Label,
    Score,
    counts,
    covers,
    found_of,
    label_of,
    score,
)
from drover_collector.engine.engine import LAG_MS, Engine
from drover_collector.fleet.buckets import BUCKET_MS, Bucket
from drover_collector.fleet.index import FleetIndex
from drover_collector.policy.policy import Policy
from drover_core.metrics.catalog import BY_NAME, Kind
from drover_core.model.events import Event, Incident, Severity
from drover_core.model.reports import incident_report
from drover_core.times import from_iso
from drover_simulator.adversary import AdversaryFleet, Tick

Floats = npt.NDArray[np.float64]
BASELINES: Mapping[str, ModuleType] = {
    "fixed thresholds": fixed, "z-score, own history": zscore, "z-score, peers": peers, "Minder": minder,
    "Mahalanobis": mahalanobis,
}  # fmt: skip
OURS = "Drover"
ANY = "straggler"  # a baseline names no kind: labels and alarms of all kinds get this one, which fits itself
QUIET_MS = 600_000  # an alarm of a baseline that was off for so long is another one


@dataclass(slots=True)
class Played:
    """What one method made of one fleet."""

    seed: int
    gpu_days: float
    faults: dict[str, tuple[str, str]]  # label id -> (kind, cause)
    delays_s: dict[str, float]  # of those that were found
    severity: dict[str, float]
    job_gpus: dict[str, int]
    negatives: int
    reported: int  # warnings that name a fault, the first for each and further ones
    false: list[str]
    false_drains: list[str]
    seconds: float = 0.0
    named: dict[str, str] = field(default_factory=dict)  # label id -> kind/cause that was reported
    otherwise: dict[str, float] = field(default_factory=dict)  # of those missed, reported in another incident: seconds


def buckets(fleet: AdversaryFleet, interval_ms: int) -> Iterator[tuple[Bucket, list[Event]]]:
    """The fleet's buckets as a collector would make them: of 10 s, or of the interval where that is longer."""
    length_ms = max(BUCKET_MS, interval_ms)
    each = max(1, length_ms // interval_ms)
    names = tuple(job.id for job in fleet.spec.jobs)
    held: list[Tick] = []
    for tick in fleet.ticks(interval_ms):
        held.append(tick)
        if len(held) < each:
            continue
        last = held[-1]
        yield (
            Bucket(
                last.ts_ms - length_ms, length_ms, _joined([t.gpu for t in held]), _joined([t.node for t in held]),
                np.sum([t.gpu_present for t in held], axis=0, dtype=np.int32),
                np.sum([t.node_present for t in held], axis=0, dtype=np.int32),
                fleet.holders(last.ts_ms), names, _joined([t.link for t in held]),
            ),
            [event for t in held for event in t.events],
        )  # fmt: skip
        held = []


def _joined(columns: list[dict[str, Floats]]) -> dict[str, Floats]:
    """Gauge: lower median; counter and state: the last (buckets.aggregate does the same from rows)."""
    if len(columns) == 1:
        return dict(columns[0])
    result = {}
    for name in columns[-1]:
        values = np.array([c[name] for c in columns])
        known = ~np.isnan(values)
        if BY_NAME[name].kind is Kind.GAUGE:
            values, at = np.sort(values, axis=0), np.maximum(known.sum(axis=0) - 1, 0) // 2
        else:
            at = np.where(known.any(axis=0), len(columns) - 1 - known[::-1].argmax(axis=0), 0)
        result[name] = np.take_along_axis(values, at[None], axis=0)[0]
    return result


class _Ours:
    def __init__(self, fleet: AdversaryFleet, index: FleetIndex) -> None:
        self._engine = Engine(index, Policy.named("nvidia"), fleet.start_ms)
        self._inventory = [(from_iso(row["ts"]), row["node"], row["inventory"]) for row in fleet.inventory]
        self._inventory.sort(key=lambda row: row[0], reverse=True)
        self.incidents: dict[str, Incident] = {}

    def step(self, bucket: Bucket, events: Sequence[Event]) -> None:
        due_ms = bucket.end_ms + LAG_MS
        while self._inventory and self._inventory[-1][0] <= due_ms:
            ts_ms, node, facts = self._inventory.pop()
            self._engine.on_inventory(node, facts, ts_ms)
        for event in sorted(events, key=lambda e: e.received_ms or e.ts_ms):
            self._take(self._engine.on_events([event], event.received_ms or event.ts_ms).incidents)
        self._take(self._engine.on_bucket(bucket, due_ms).incidents)

    def _take(self, incidents: Sequence[Incident]) -> None:
        self.incidents.update((incident.id, incident) for incident in incidents)

    def found(self) -> list[Found]:
        troubles = self._engine.errors
        if troubles:
            raise RuntimeError(f"detectors failed: {troubles}")
        return [found_of(incident_report(incident)) for incident in self.incidents.values()]


class Flags:
    """A baseline's flags as incidents: each GPU or node from its first flag until it was quiet for QUIET_MS."""

    def __init__(self, index: FleetIndex, module: ModuleType, threshold: float) -> None:
        self._index = index
        self._baseline = module.Baseline(index, threshold)
        self._last_ms: dict[tuple[str, int | None], int] = {}
        self._found: list[Found] = []

    def step(self, bucket: Bucket, events: Sequence[Event]) -> None:
        gpus, nodes = self._baseline.step(bucket, events)
        now_ms = bucket.end_ms + LAG_MS
        members: list[tuple[str, int | None]] = [self._index.member(g) for g in np.flatnonzero(gpus).tolist()]
        members += [(self._index.nodes[n].name, None) for n in np.flatnonzero(nodes).tolist()]
        for member in members:
            if now_ms - self._last_ms.get(member, -(10**15)) > QUIET_MS:
                number = str(len(self._found))
                self._found.append(Found(number, ANY, frozenset([member]), now_ms, Severity.WARNING, "", "drain"))
            self._last_ms[member] = now_ms

    def found(self) -> list[Found]:
        return self._found


def play(
    fleet: AdversaryFleet, interval_ms: int, methods: Mapping[str, tuple[ModuleType, float]], ours: bool = True
) -> dict[str, Played]:
    """Method -> what it made of the fleet. `methods`: name -> (module of a baseline, threshold)."""
    index = FleetIndex(fleet.spec)
    runs: dict[str, _Ours | Flags] = {OURS: _Ours(fleet, index)} if ours else {}
    runs |= {name: Flags(index, module, threshold) for name, (module, threshold) in methods.items()}
    seconds = dict.fromkeys(runs, 0.0)
    for bucket, events in buckets(fleet, interval_ms):
        for name, run in runs.items():
            began = time.process_time()
            run.step(bucket, events)
            seconds[name] += time.process_time() - began
    labels = [label_of(row) for row in fleet.labels]
    rows = {str(row["id"]): row for row in fleet.labels}
    return {name: _scored(fleet, labels, rows, run.found(), name == OURS, seconds[name]) for name, run in runs.items()}


def _scored(
    fleet: AdversaryFleet,
    labels: list[Label],
    rows: dict[str, dict[str, Any]],
    found: list[Found],
    kinds: bool,
    seconds: float,
) -> Played:
    named: dict[str, str] = {}
    if not kinds:
        labels = [replace(label, kind=ANY) for label in labels]
    result: Score = score(labels, found, fleet.gpu_days)
    faults = [label for label in labels if label.hardware]
    for label in faults:
        first = [f for f in found if counts(f) and covers(label, f)]
        named[label.id] = " ".join(sorted({f"{f.kind}/{f.cause}" for f in first}))
    return Played(
        fleet.seed, fleet.gpu_days, {label.id: (str(rows[label.id]["kind"]), label.cause) for label in faults},
        result.delays_of,
        {label.id: float(rows[label.id].get("severity", 1.0)) for label in faults},
        {label.id: int(rows[label.id].get("job_gpus") or 0) for label in faults},
        result.negatives, result.matched + result.duplicates, [_described(f, labels, rows) for f in result.false],
        [_described(f, labels, rows) for f in result.false_drains], seconds, named, result.otherwise,
    )  # fmt: skip


def _described(found: Found, labels: list[Label], rows: dict[str, dict[str, Any]]) -> str:
    """What a false incident says, and which labels lie on the same members at that time."""
    near = sorted({f"{rows[label.id]['kind']}/{label.cause}" for label in labels if covers(label, found)})
    return f"{found.kind}/{found.cause}" + (f" during {', '.join(near)}" if near else "")


def each_fleet(
    play_one: Callable[[int], Any], seeds: Sequence[int], processes: int, failed: list[str]
) -> Iterator[Any]:
    """Play a fleet for each seed, each in a process of its own, and yield the results as they come.

    Args:
        play_one: returns a result, or a sentence that says why it failed; that is printed and added to `failed`.
    """
    began = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(min(processes, len(seeds)), maxtasksperchild=1) as pool:
        for done, played in enumerate(pool.imap_unordered(play_one, seeds), 1):
            if isinstance(played, str):
                failed.append(played)
                print(f"A fleet failed, {played}", file=sys.stderr, flush=True)
            else:
                yield played
            passed = time.monotonic() - began
            left = passed / done * (len(seeds) - done)
            print(
                f"{done} of {len(seeds)} fleets in {passed:.0f} s, about {left:.0f} s left", file=sys.stderr, flush=True
            )


def nothing_wrong(gpu_days: float) -> Callable[[int], str]:
    """A bound in words for a count of false alarms in `gpu_days`: 3/N (95 %) where there was none."""

    def words(count: int) -> str:
        if not gpu_days:
            return "unknown"
        rate = 1000 * (count or 3) / gpu_days
        return f"{rate:.3g}" if count else f"0 (below {rate:.3g} at 95 %)"

    return words

"""Name the rank that stopped a job, by what the ranks themselves recorded: events of kind `rank`.

Each event says where one rank stands in its collectives (drover_core.jobs.rank_report). Those of a job are compared
when all of its ranks have sent one, or when none has come for SETTLE_MS. Which GPU a rank has: its agent says so; else
it is the one that is left; else the usual order of launchers (torchrun, `srun` by default) says it: consecutive ranks
on each node, and on a node in the order of its GPUs.

Users write what this rests on, so it asks for no action of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from drover_collector.detectors._lib.metrics import Ints
from drover_collector.detectors._lib.window import Window
from drover_collector.fleet.buckets import BUCKET_MS
from drover_collector.fleet.index import FleetIndex
from drover_core.jobs.model import Fault
from drover_core.jobs.rank_report import RankReport, ReportError, find_fault, read_message
from drover_core.model.events import Event, EventKind
from drover_core.model.kinds import CHECKPOINT, OWNER

SETTLE_MS = 5_000  # after the newest report: ranks write their dumps within seconds
TOGETHER_MS = 120_000  # between the dumps of one hang; an older one is of another run
# Ranks of a healthy job wait for each other for milliseconds, and in a save or an evaluation for seconds.
WAITED_MS = 30_000
KEPT_MS = 1_800_000  # a hang whose job goes on to hold its GPUs is reported for so long
PENDING_MS = 60_000  # a report whose job is not known yet waits for it
MAX_PENDING, MAX_JOBS = 256, 64
SURE = 0.7  # confidence from which the rank is named


@dataclass(frozen=True, slots=True)
class Sent:
    """A report as it came."""

    report: RankReport
    node: str
    gpu: int | None  # number of the GPU, if its agent knows it
    at_ms: int  # when it was received


@dataclass(frozen=True, slots=True)
class Named:
    """What the ranks' reports show of a job.

    Attributes:
        places: rank -> number of its GPU; `exact`: no guess by the usual order is among them.
        since_ms: when the first rank came to the collective that did not end.
    """

    fault: Fault
    places: Mapping[int, int]
    exact: bool
    since_ms: int
    sent_ms: int
    ranks: int  # that have sent a report


@dataclass(slots=True)
class JobRanks:
    """The reports of one job."""

    gpus: Ints  # int64: numbers of its GPUs, as last seen
    sent: dict[int, Sent] = field(default_factory=dict)
    judged: bool = False
    named: Named | None = None
    began_hang: bool = False  # its reports came before telemetry showed the hang

    @property
    def newest_ms(self) -> int:
        return max((each.at_ms for each in self.sent.values()), default=0)


class Holders:
    """Which jobs hold GPUs of a node: thousands of reports may come at once, and there may be thousands of jobs."""

    def __init__(self, index: FleetIndex, held: Mapping[str, Ints]) -> None:
        self.held, self._names = held, list(held)
        job = np.repeat(np.arange(len(held)), [len(gpus) for gpus in held.values()])
        node = index.gpu_node[np.concatenate([np.zeros(0, np.int64), *held.values()])]
        pairs = np.unique(node.astype(np.int64) * max(1, len(held)) + job)
        self._node: Ints = pairs // max(1, len(held))
        self._job: Ints = pairs % max(1, len(held))

    def on_node(self, n: int) -> dict[str, Ints]:
        low, high = np.searchsorted(self._node, [n, n + 1])
        return {(name := self._names[number]): self.held[name] for number in self._job[low:high].tolist()}


def is_report(event: Event) -> bool:
    """Return whether an event says where a rank stands in its collectives."""
    return event.kind is EventKind.RANK and event.code not in (CHECKPOINT, OWNER)


@dataclass(slots=True)
class RankReports:
    """All jobs' reports, and those whose job is not known."""

    jobs: dict[str, JobRanks] = field(default_factory=dict)
    pending: list[tuple[int, Event]] = field(default_factory=list)

    def take(self, window: Window, held: Mapping[str, Ints], now_ms: int) -> None:
        """Add the window's events. `held`: job -> numbers of its GPUs, also of jobs that ended minutes ago."""
        new = [(now_ms, e) for e in window.events if is_report(e) and not e.backlog]
        if not new and not self.pending and not self.jobs:
            return
        waiting, self.pending = [*self.pending, *new], []
        holders = Holders(window.index, held if waiting else {})
        for at_ms, event in waiting:
            if not self._add(window.index, holders, event) and now_ms - at_ms < PENDING_MS:
                self.pending.append((at_ms, event))
        self.pending = self.pending[-MAX_PENDING:]
        for name, job in list(self.jobs.items()):
            if now_ms - job.newest_ms > KEPT_MS:
                del self.jobs[name]
        while len(self.jobs) > MAX_JOBS:
            del self.jobs[min(self.jobs, key=lambda name: self.jobs[name].newest_ms)]

    def _add(self, index: FleetIndex, holders: Holders, event: Event) -> bool:
        """Add a report to its job. Return False if that is not known (yet)."""
        try:
            report = read_message(event.message)
        except ReportError:
            return True  # it stays in the store as it came
        n = index.node_number.get(event.node)
        if n is None:
            return True
        gpu = None if event.gpu is None else index.gpu(event.node, event.gpu)
        name = _job_of(holders.on_node(n), gpu, report.job)
        if name is None:
            return False
        job = self.jobs.setdefault(name, JobRanks(holders.held[name]))
        job.gpus = holders.held[name]
        if report.rank not in job.sent and len(job.sent) >= max(16, 2 * len(job.gpus)):
            return True  # more ranks than the job can have
        job.sent[report.rank] = Sent(report, event.node, gpu, event.received_ms or event.ts_ms)
        job.judged, job.named = False, None
        return True

    def judge(self, index: FleetIndex, now_ms: int) -> Iterator[tuple[str, Named]]:
        """Yield jobs whose reports name what stopped them."""
        for name, job in self.jobs.items():
            if not job.judged and (_all_sent(job) or now_ms - job.newest_ms >= SETTLE_MS):
                job.judged, job.named = True, _judge(index, job)
            if job.named is not None:
                yield name, job.named


def _job_of(here: Mapping[str, Ints], gpu: int | None, named: str) -> str | None:
    """Return the job of a report: what its path names, that of its GPU, or the only one of its node, `here`."""
    if named in here:
        return named
    if gpu is not None:
        return next((name for name, gpus in here.items() if gpu in gpus), None)
    return next(iter(here)) if len(here) == 1 else None


def _all_sent(job: JobRanks) -> bool:
    world = _world(job.sent)
    return bool(world) and world <= job.sent.keys() and _is_fresh(job)


def _world(sent: Mapping[int, Sent]) -> set[int]:
    """Return all ranks of the groups. The reports of a large group share one tuple, which is looked at once."""
    groups = {id(group.members): group.members for each in sent.values() for group in each.report.groups}
    return set().union(*groups.values())


def _is_fresh(job: JobRanks) -> bool:
    """Return True if all reports are of one moment: while a job's second hang is reported, some are of the first."""
    times = [each.report.written_ms for each in job.sent.values()]
    return max(times) - min(times) <= TOGETHER_MS


def _judge(index: FleetIndex, job: JobRanks) -> Named | None:
    newest = max(each.report.written_ms for each in job.sent.values())
    sent = {rank: each for rank, each in job.sent.items() if newest - each.report.written_ms <= TOGETHER_MS}
    fault = find_fault([each.report for each in sent.values()])
    if fault is None or not fault.ranks:
        return None
    waited = {
        rank: ms
        for rank in fault.waiting
        if rank in sent and (ms := sent[rank].report.waits_ms(fault.group, fault.sequence or 0)) is not None
    }
    since_ms = min((sent[rank].report.written_ms - ms for rank, ms in waited.items()), default=newest)
    if fault.what in ("missing", "silent"):
        # A dump of before the others came there accuses nobody.
        late = [sent[rank].report.written_ms for rank in fault.ranks if rank in sent] or [newest]
        if not waited or min(late) - since_ms < WAITED_MS:
            return None
    places, exact = _places(index, job.gpus, sent)
    return Named(fault, places, exact, since_ms, max(each.at_ms for each in sent.values()), len(sent))


def _places(index: FleetIndex, gpus: Ints, sent: Mapping[int, Sent]) -> tuple[dict[int, int], bool]:
    """Return the GPU of each rank as far as that is known, and whether no guess is among them."""
    places = {rank: each.gpu for rank, each in sent.items() if each.gpu is not None}
    world = _world(sent)
    if world and world != set(range(len(gpus))):
        return places, True  # not one rank a GPU
    left = sorted(set(gpus.tolist()) - set(places.values()))
    lacking = sorted(set(range(len(gpus))) - places.keys())
    if not lacking:
        return places, True
    if len(left) == len(lacking) == 1:
        return {**places, lacking[0]: left[0]}, True
    usual = _usual_order(index, gpus, sent)
    if any(usual.get(rank, gpu) != gpu for rank, gpu in places.items()):
        return places, True  # this job has another order
    return {**usual, **places}, False


def _usual_order(index: FleetIndex, gpus: Ints, sent: Mapping[int, Sent]) -> dict[int, int]:
    """Return the GPU of each rank if ranks are consecutive on each node, which must fit the nodes that sent reports."""
    by_node: dict[int, list[int]] = {}
    for gpu in sorted(gpus.tolist()):
        by_node.setdefault(int(index.gpu_node[gpu]), []).append(gpu)
    sizes = {len(each) for each in by_node.values()}
    if len(sizes) != 1:
        return {}
    size = sizes.pop()
    blocks: dict[int, int] = {}  # rank // size -> node
    for rank, each in sent.items():
        n = index.node_number[each.node]
        if n not in by_node or blocks.setdefault(rank // size, n) != n:
            return {}
    rest = by_node.keys() - set(blocks.values())
    unseen = set(range(len(by_node))) - blocks.keys()
    if len(set(blocks.values())) != len(blocks) or not blocks.keys() <= set(range(len(by_node))):
        return {}
    if len(rest) == len(unseen) == 1:
        blocks[unseen.pop()] = rest.pop()
    return {block * size + at: gpu for block, n in blocks.items() for at, gpu in enumerate(by_node[n])}


def job_goes_on(named: Named, gpus: Ints, worked_ms: Ints) -> bool:
    """Return True if at least half of a job's GPUs have worked since its ranks wait. `worked_ms`: int64 [G]."""
    later = worked_ms[gpus] > named.since_ms + 2 * BUCKET_MS
    return bool(len(gpus) and np.count_nonzero(later) * 2 >= len(gpus))

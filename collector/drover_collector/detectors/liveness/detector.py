"""Detect silent nodes, lost GPUs, hung drivers, nodes that never reported, and wrong clocks.

Telemetry alone cannot distinguish a dead node from a broken management network. The finding says so, and asks for a
drain only after the time in which Slurm itself sets a node DOWN.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from drover_collector.detectors._lib.examples import (
    START_MS,
    Example,
    play,
    small_fleet,
)
from drover_collector.detectors._lib.report_interval import MISSED, SILENT_BUCKETS
from drover_collector.detectors._lib.robust import Bools
from drover_collector.detectors._lib.window import Window
from drover_collector.detectors.liveness.pages import SUFFIX, PagesTogether
from drover_collector.detectors.liveness.partial import OTHERS_SHARE, PartialReports
from drover_collector.detectors.liveness.peers import PeersOfSilent, Progress
from drover_collector.detectors.liveness.texts import (
    driver_gone,
    gpu_gone,
    gpu_page_silent,
    group_silent,
    job_of,
    mass_silent,
    no_gpu_answers,
    node_cut_off,
    node_late,
    node_silent,
    page_without_gpu,
    pages_silent,
    pages_without_gpus,
    planned,
    worked_on_silent,
)
from drover_collector.fleet.buckets import Bucket, Floats
from drover_collector.fleet.index import FleetIndex
from drover_core.model.events import (
    Event,
    EventKind,
    Evidence,
    Finding,
    Incident,
    IncidentKind,
    RecommendedAction,
    Severity,
)

NAME = "liveness"
VERSION = 1
QUIET_MS: int | None = None  # it reports the end of a silence itself
KIND = IncidentKind.LIVENESS

DRAIN_AFTER_MS = 300_000  # of silence: Slurm's default SlurmdTimeout, after which it sets a node DOWN
GPU_DRAIN_MS = 90_000  # without values of one GPU: some sites lose a few of its rows
NEVER_CAME_MS = 60_000  # grace for expected nodes after the collector's start
CLOCK_WRONG_S = 5.0  # beyond it a node's samples fall into other buckets than its peers' of the same time
CLOCK_HELD_MS = 600_000  # for which one report of a wrong clock counts
MASS_SHARE = 0.5  # of the fleet: if more is silent at once, the collector or its network is the first suspect
MASS_NODES = 4
# While this share of the nodes comes back in each bucket after the collector was away, the others are still waiting:
# thousands of agents that connect at once are admitted one after the other (decision 22; 12,500 in about a minute).
COMING_SHARE = 0.01  # of all nodes, two at least
COMING_MS = 300_000  # at most
REPORTS_AGAIN = 3  # after a stop, until it counts as over: an agent sends what it has read, some of it late
# Some sites lose telemetry of a node for a minute or two now and then, and nothing is wrong. Where that of two nodes,
# or of a thousandth of them, came back by itself within a day, a single node must be silent for twice as long as these
# to be reported. Drains are asked for as soon as before, until three nodes were away for longer and came back without
# a start of their agent: then a drain waits for twice as long as these, half an hour at most. A node that is silent now
# counts as one of the three for half an hour, unless its job stopped with it: that several nodes die by themselves
# within minutes is less likely than that something between them and the collector is wrong. Our own limits.
GAPS_USUAL, GAPS_SHARE, GAPS_MS, GAPS_KEPT = 2, 0.001, 24 * 3_600_000, 1024
GAP_SLACK = 2.0
AWAY_USUAL, LONGEST_AWAY_MS = 3, 1_800_000
# A single node that is away for a minute or two is mostly an agent that restarts or a management network that blinks.
# Kubernetes waits 50 s (node-monitor-grace-period), Slurm 300 s (SlurmdTimeout). Its job's other nodes know more: if
# they stopped computing with it, it is dead, and nobody has to wait; if they go on, it lives.
GPU_PAGE_MS = 240_000  # an exporter that restarts, or is upgraded, is back by then
ALONE_MS = {Progress.STOPPED: 0, Progress.UNKNOWN: 150_000, Progress.GOES_ON: 240_000}
LEAST_GAP = 0.5  # of the time after which a node counts as silent: a shorter gap is a lost sample
TOGETHER_MS = 20_000  # between the last reports of nodes that one thing took away, or one bucket of a recording
LONGEST_GAP_MS = 240_000
# And five reports of a node that is read seldom: four minutes are four of those that come each minute, and where three
# are lost now and then, four are too.
LONGEST_GAP_REPORTS = 5
GROUP_STAYS = 0.5  # a silent rack or leaf stays one finding until less than this share of it is silent
# And for so long after that, while some of it is: after a loss of power, nodes boot one after the other. How long
# that takes differs by board: our own limit.
GROUP_COMES_MS = 600_000

CORE = ("gpu_temp_c", "power_w", "sm_clock_mhz")  # a GPU that answers has a value of one of these
LOST = ("gpu_lost", "driver_hung", "driver_missing", "driver_released")
EXPLAIN_SILENCE = ("driver_hung", "driver_missing", "driver_released")  # reports that explain silence of all GPUs
OF_GPUS = frozenset(
    {"gpu_lost", "gpu_missing", "driver_lost", "driver_missing", "pages_without_gpus", "gpu_page_silent"}
)  # end when one of the GPUs answers
ANSWERS_AGAIN_MS = 60_000  # of values after an agent reported the GPU lost: its report "gpu_back" was lost
PAGES_SILENT = ("pages_silent", f"pages_silent{SUFFIX}")
SILENT_BEFORE = ("silent", "late", *PAGES_SILENT)  # no planned work explains them once they are open
Times = npt.NDArray[np.int64]
Key = tuple[str, str, str, int | None]  # scope, cause, node or group, GPU


@dataclass(slots=True)
class Reception:
    """What the collector itself received.

    Attributes:
        newest_end_ms: of its newest bucket. none_reporting: no node reported in that.
        has_node_rows: rows of nodes were seen, not only of their GPUs.
        gaps: (end, length, node) of silences that ended by themselves, oldest first.
        started_ms: node -> when its agent started last.
        scraped: bool [N], the node's newest values came from pages of exporters, not from an agent.
        unread_ms: int64 [N], end of the newest bucket in which one of its pages was not read and none of its GPUs
            answered: the page may be theirs; 0: none.
        coming_ms: (scope, name) of a silent rack or leaf -> when less than GROUP_STAYS of it was silent.
        silent_pages: nodes none of whose pages is read. silent_gpu_pages: whose GPUs' page is not.
        left_ms: int64 [N], end of the newest bucket with rows of the node before its last such silence; 0: none.
    """

    newest_end_ms: int = 0
    none_reporting: bool = False
    has_node_rows: bool = False
    gaps: deque[tuple[int, int, int]] = field(default_factory=lambda: deque(maxlen=GAPS_KEPT))
    started_ms: dict[str, int] = field(default_factory=dict)
    scraped: Bools = field(default_factory=lambda: np.zeros(0, bool))
    unread_ms: Times = field(default_factory=lambda: np.zeros(0, np.int64))
    coming_ms: dict[tuple[str, str], int] = field(default_factory=dict)
    silent_pages: PagesTogether = field(default_factory=PagesTogether)
    silent_gpu_pages: PagesTogether = field(default_factory=PagesTogether)
    left_ms: Times = field(default_factory=lambda: np.zeros(0, np.int64))

    def still_coming(self, group: tuple[str, str], share: float, now_ms: int) -> bool:
        """Return whether a rack or leaf that was silent is coming back. `share`: of it that is silent."""
        if share in (0.0, 1.0):
            self.coming_ms.pop(group, None)
            return share > 0.0
        if share >= GROUP_STAYS and group not in self.coming_ms:
            return True
        # Also where more are silent again: a node that dies then is not waited for without end.
        return now_ms - self.coming_ms.setdefault(group, now_ms) < GROUP_COMES_MS

    def note_pages(self, bucket: Bucket, reporting: Bools, answering: Bools) -> None:
        """Note which nodes' values come from exporters' pages, and when the page of their GPUs may not have been read.

        Args:
            answering: bool [N], a GPU of the node has values.
        """
        up, down = (bucket.node.get(f"exporters_{state}") for state in ("up", "down"))
        self.scraped[reporting] = False if up is None else ~np.isnan(up[reporting])
        if down is not None:
            self.unread_ms[(down > 0) & ~answering] = bucket.end_ms

    def usual_gap_ms(self, now_ms: int, nodes: int, limit_ms: int) -> int:
        """Return how long a silence must last to be longer than this site's usual gaps, ms; 0: it has none.

        Args:
            limit_ms: time after which the node counts as silent, at least MISSED of its reports.
        """
        self._forget_gaps(now_ms)
        longest_ms = max(LONGEST_GAP_MS, LONGEST_GAP_REPORTS * limit_ms // MISSED)
        short = [(length, n) for _, length, n in self.gaps if length < longest_ms]
        return min(longest_ms, _longer(short, max(GAPS_USUAL, GAPS_SHARE * nodes)))

    def usual_away_ms(self, now_ms: int, nodes: int, silent: Sequence[int]) -> int:
        """Return how long a silence must last to be longer than those of nodes that lived, ms; 0: there were none.

        Args:
            silent: nodes that may live too: silent now, by themselves, and not for long.
        """
        self._forget_gaps(now_ms)
        long = [(length, n) for _, length, n in self.gaps if length >= LONGEST_GAP_MS]
        least = max(AWAY_USUAL, GAPS_SHARE * nodes)
        if longer_ms := _longer(long, least):
            return min(LONGEST_AWAY_MS, longer_ms)
        return LONGEST_AWAY_MS if len({n for _, n in long} | set(silent)) >= least else 0

    def _forget_gaps(self, now_ms: int) -> None:
        while self.gaps and now_ms - self.gaps[0][0] > GAPS_MS:
            self.gaps.popleft()


def _longer(gaps: Sequence[tuple[int, int]], least: float) -> int:
    """Return GAP_SLACK times the longest of gaps (length, node), ms; 0: fewer than `least` nodes had one."""
    return int(GAP_SLACK * max(length for length, _ in gaps)) if len({n for _, n in gaps}) >= least else 0


@dataclass(slots=True)
class PlannedStops:
    """Nodes whose agents were stopped on purpose.

    Attributes:
        stopped_ms: node -> when. reports: node -> its reports after that.
        started_ms: node -> when its agent started after such a stop, until its first row.
    """

    stopped_ms: dict[str, int] = field(default_factory=dict)
    reports: dict[str, int] = field(default_factory=dict)
    started_ms: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class LivenessState:
    """State of a fleet.

    Attributes:
        seen_ms: int64 [N], end of the newest bucket with rows of the node; 0: none.
        answered_ms: int64 [G], end of the newest bucket with values of the GPU; 0: none.
        late_ms: int64 [N], end of the newest bucket that the node's rows missed.
        returned_ms: int64 [N], when the node last reported again after a silence.
        resumed_ms: no silence counts from before it, as the collector itself was away or received nothing.
        coming_ms: until then nodes may still be coming back, one after the other.
    """

    seen_ms: Times
    answered_ms: Times
    late_ms: Times
    returned_ms: Times
    resumed_ms: int
    coming_ms: int
    partial: PartialReports
    peers: PeersOfSilent
    reception: Reception = field(default_factory=Reception)
    planned: PlannedStops = field(default_factory=PlannedStops)
    reported: dict[tuple[str, int | None, str], int] = field(default_factory=dict)  # (node, GPU, code) -> since
    unsure: dict[tuple[str, int | None, str], int] = field(default_factory=dict)  # old reports: see _confirm
    clock_wrong: dict[str, tuple[int, str]] = field(default_factory=dict)  # node -> newest report, its text
    open: dict[Key, Finding] = field(default_factory=dict)  # findings that hold now
    reopened: set[Key] = field(default_factory=set)  # those of `open` that only a former run has reported


def restored(incidents: Sequence[Incident], index: FleetIndex, started_ms: int) -> LivenessState:
    """Return state with the open incidents: which nodes are silent since when, and what agents reported."""
    s = _fresh(index, started_ms)
    for incident in incidents:
        if NAME not in incident.detectors or incident.closed_ms is not None:
            continue
        # An incident of another detector's kind: this detector knows only that the GPU does not answer.
        of_gpu = incident.scope == "gpu" and incident.kind is not KIND
        cause, node = "gpu_lost" if of_gpu else incident.cause, incident.node
        finding = Finding(
            NAME, KIND, cause, incident.scope, node, incident.gpu, incident.members, incident.updated_ms,
            incident.since_ms, incident.severity, incident.confidence, incident.asked or incident.action,
            incident.summary, incident.advice, incident.evidence, incident.job,
        )  # fmt: skip
        key = finding.scope, cause, node or _group_of(finding, index), finding.gpu
        s.open[key] = finding
        s.reopened.add(key)
        _resume_pages(s, index, incident, cause)
        if cause in ("silent", "late", "maintenance", *PAGES_SILENT):
            for name, _ in incident.members:
                if (n := index.node_number.get(name)) is not None:
                    s.seen_ms[n] = incident.since_ms
                    if incident.job and incident.snapshot_of(NAME).get("goes_on"):  # else it stopped, or nobody knew
                        s.peers.resume(slice(int(index.first_gpu[n]), int(index.first_gpu[n + 1])), incident.job)
        if node is not None:
            g = None if incident.gpu is None else index.gpu(node, incident.gpu)
            if cause == "gpu_partial" and g is not None:
                s.partial.resume(g, incident.since_ms)
            elif cause == "agent_stopped":
                s.planned.stopped_ms[node] = incident.since_ms
            elif cause in LOST:
                s.reported[node, incident.gpu, cause] = incident.since_ms
            elif cause == "clock_wrong":
                s.clock_wrong[node] = (incident.updated_ms, incident.evidence[0].text if incident.evidence else "")
    _resume_agents(s, index)
    return s


def _resume_agents(s: LivenessState, index: FleetIndex) -> None:
    """Take nodes that got an agent while their pages were silent out of what was resumed of pages.

    An incident of many keeps all of its members. As one of them, a node whose agent is silent would never be drained.
    """
    pages = s.reception.silent_pages
    for (scope, cause, node, _), finding in s.open.items():
        n = index.node_number.get(node) if scope == "node" and cause in ("silent", "late") else None
        if n is not None and finding.since_ms > pages.since_ms.get(n, finding.since_ms):
            s.reception.scraped[n], s.seen_ms[n] = False, finding.since_ms
    pages.end(~s.reception.scraped)


def _resume_pages(s: LivenessState, index: FleetIndex, incident: Incident, cause: str) -> None:
    """Take up an open incident of pages."""
    numbers = [index.node_number[name] for name, _ in incident.members if name in index.node_number]
    if cause in PAGES_SILENT:
        s.reception.scraped[numbers] = True  # else their silence would count as an agent's
    if cause == f"pages_silent{SUFFIX}":
        s.reception.silent_pages.resume(numbers, incident.since_ms)
    elif cause == f"gpu_page_silent{SUFFIX}":
        s.reception.silent_gpu_pages.resume(numbers, incident.since_ms)


def _fresh(index: FleetIndex, started_ms: int) -> LivenessState:
    seen, late, returned = (np.zeros(index.node_count, np.int64) for _ in range(3))
    answered, partial = np.zeros(index.gpu_count, np.int64), PartialReports.of(index.gpu_count)
    peers = PeersOfSilent.of(index.gpu_count)
    unread, left = (np.zeros(index.node_count, np.int64) for _ in range(2))
    reception = Reception(scraped=np.zeros(index.node_count, bool), unread_ms=unread, left_ms=left)
    return LivenessState(seen, answered, late, returned, started_ms, started_ms + COMING_MS, partial, peers, reception)


def detect(window: Window, state: LivenessState | None, now_ms: int) -> tuple[list[Finding], LivenessState]:
    index = window.index
    s = state or _fresh(index, window.started_ms)
    for event in window.events:
        if event.kind is EventKind.LIFECYCLE:
            _on_lifecycle(s, event, now_ms)
    found: list[Finding] = []
    if window.fresh:
        reporting = _add_bucket(window, s)
        found += _silence(window, s, reporting, now_ms)
        found += _gpus(window, s, reporting, now_ms)
        found += s.partial.findings(window, CORE, now_ms)
        found += _clocks(window, s, now_ms)
    found += _reported(window, s, now_ms)
    current = {(f.scope, f.cause, f.node or _group_of(f, index), f.gpu): f for f in found}
    if not window.fresh:  # a call for events only shows nothing about silence: report only what is new
        new = [f for key, f in current.items() if key not in s.open]
        s.open |= current
        return new, s
    s.reopened -= current.keys()
    missed = {k: f for k, f in s.open.items() if k not in current}
    mass = any(cause == "no_telemetry" for _, cause, _, _ in (*s.open, *current))
    kept = {
        k: replace(f, ts_ms=now_ms)
        for k, f in missed.items()
        if not _is_member(f, current) and (_unproven(window, s, k, f) or (not mass and _waits(window, s, f)))
    }
    over = [
        replace(f, cleared=True, ts_ms=now_ms, action=RecommendedAction.NONE)
        for k, f in missed.items()
        if k not in kept
    ]
    s.open, s.reopened = current | kept, s.reopened & kept.keys()
    return [*found, *kept.values(), *over], s


def _is_member(finding: Finding, current: Mapping[Key, Finding]) -> bool:
    """Return whether a finding of one node's pages is part of one for many."""
    many = current.get(("rack", finding.cause + SUFFIX, "", None))
    return many is not None and (finding.node, None) in many.members


def _unproven(window: Window, s: LivenessState, key: Key, finding: Finding) -> bool:
    """Return True if a finding that was not repeated still holds.

    None of its GPUs has answered since; or it is of a former run, and none of its nodes has reported since.
    """
    index = window.index
    if key in s.reopened and finding.gpu is None and finding.cause != "maintenance":
        numbers = [index.node_number[name] for name, _ in finding.members if name in index.node_number]
        if numbers and not (s.seen_ms[numbers] >= window.newest.end_ms).any():
            return True
    n = index.node_number.get(finding.node or "")
    if n is None or finding.cause not in OF_GPUS:
        return False
    if finding.cause == "gpu_page_silent" and finding.node in s.planned.stopped_ms:
        return False  # nobody reads its pages any longer
    gpus = slice(int(index.first_gpu[n]), int(index.first_gpu[n + 1]))
    if finding.gpu is not None:
        g = index.gpu(finding.node or "", finding.gpu)
        if g is None:
            return False
        gpus = slice(g, g + 1)
    return not (s.answered_ms[gpus] >= window.newest.end_ms).any()


def _waits(window: Window, s: LivenessState, finding: Finding) -> bool:
    """Return True if a silence still holds that began before a bucket in which no node was in time.

    It is not over, and too early to be found again: before that bucket the node was silent while others reported.
    """
    bucket, number = window.newest, window.index.node_number
    if finding.cause not in ("silent", "never_came") or finding.node in s.planned.stopped_ms:
        return False
    members = [number[name] for name, _ in finding.members if name in number]
    if not members:
        return False
    again_ms = int(window.silent_after_ms(s.seen_ms < bucket.end_ms)[members].max())
    again_ms = max(NEVER_CAME_MS if finding.cause == "never_came" else 0, again_ms)
    if not s.reception.none_reporting and bucket.end_ms - s.resumed_ms >= again_ms:
        return False
    return float((s.seen_ms[members] < bucket.end_ms).mean()) >= GROUP_STAYS


def could_not_judge(window: Window) -> list[str]:
    if not window.newest.node_rows.any() and not window.newest.gpu_rows.any():
        return ["silent nodes: the data has no rows"]
    missing = [] if window.newest.gpu_rows.any() else ["lost GPUs: the data has no rows of GPUs"]
    return missing + ([] if "clock_offset_s" in window.newest.node else ["wrong clocks: the data lacks clock_offset_s"])


def _on_lifecycle(s: LivenessState, event: Event, now_ms: int) -> None:
    if event.code == "agent_stopped":
        s.planned.stopped_ms[event.node], s.planned.reports[event.node] = now_ms, 0
    elif event.code == "agent_started":
        s.reception.started_ms[event.node] = now_ms
        if s.planned.stopped_ms.pop(event.node, None) is not None:
            s.planned.started_ms[event.node] = now_ms  # its first rows are still to come
        for known in (s.reported, s.unsure):
            for key in [key for key in known if key[0] == event.node]:
                del known[key]  # the new agent checks again
    elif event.code in LOST:
        (s.unsure if event.backlog else s.reported).setdefault((event.node, event.gpu, event.code), event.ts_ms)
    elif event.code == "gpu_back":
        for known in (s.reported, s.unsure):
            known.pop((event.node, event.gpu, "gpu_lost"), None)
    elif event.code == "driver_back":
        for known in (s.reported, s.unsure):
            for key in [key for key in known if key[0] == event.node and key[2].startswith("driver")]:
                if event.gpu in (None, key[1]):  # with a GPU: a call for it returned; the others are unknown
                    del known[key]
    elif event.code == "clock_wrong":  # sent once, when it goes wrong
        s.clock_wrong[event.node] = (now_ms, event.message)


def _add_bucket(window: Window, s: LivenessState) -> Bools:
    """Update the state's times. Return which nodes have rows in the newest bucket, bool [N]."""
    bucket, index = window.newest, window.index
    rows = bucket.node_rows + np.bincount(index.gpu_node, bucket.gpu_rows, index.node_count)
    reporting = np.asarray(rows > 0)
    missing = (
        s.reception.newest_end_ms and bucket.start_ms - s.reception.newest_end_ms > SILENT_BUCKETS * bucket.length_ms
    )
    if missing or (s.reception.none_reporting and reporting.any()):
        _restart(s, bucket)  # buckets are missing or empty: the collector was away, not the nodes
    again = reporting & (s.seen_ms < bucket.start_ms)
    if again.any():  # an empty bucket between two reports of a node that reports seldom is not an absence
        again &= bucket.start_ms - s.seen_ms >= window.spacing_ms(again)
        _note_gaps(window, s, again, reporting)
    if bucket.end_ms <= s.coming_ms:
        if again.sum() >= max(2, COMING_SHARE * len(again)):
            s.resumed_ms = bucket.start_ms
        elif bucket.end_ms - s.resumed_ms >= float(np.median(window.silent_after_ms(~reporting))):
            s.coming_ms = 0
    s.reception.newest_end_ms = bucket.end_ms
    s.reception.silent_pages.end(reporting)
    s.reception.none_reporting = not reporting.any() and _most_overdue(window, s)
    s.reception.has_node_rows |= bool(bucket.node)
    s.returned_ms[again] = bucket.start_ms
    s.seen_ms[reporting] = bucket.end_ms
    s.late_ms[[index.node_number[name] for name in bucket.late]] = bucket.end_ms
    core = [bucket.gpu[metric] for metric in CORE if metric in bucket.gpu]
    answers = bucket.gpu_rows > 0
    if core:
        answers = answers & ~np.isnan(np.array(core)).all(axis=0)
    s.answered_ms[answers] = bucket.end_ms
    s.reception.note_pages(bucket, reporting, np.bincount(index.gpu_node[answers], minlength=index.node_count) > 0)
    away = ~reporting
    if away.any():
        away &= (s.seen_ms > 0) & (bucket.end_ms - s.seen_ms >= window.silent_after_ms(away))
    s.peers.add_bucket(bucket, away[index.gpu_node])
    s.partial.note(window, answers)
    for node, gpu, code in [key for key in s.reported if key[2] == "gpu_lost" and key[1] is not None]:
        g = index.gpu(node, gpu) if gpu is not None else None
        if g is not None and answers[g] and bucket.end_ms - s.reported[node, gpu, code] >= ANSWERS_AGAIN_MS:
            del s.reported[node, gpu, code]
    _confirm(window, s, reporting)
    stops = s.planned
    for n in [n for n in stops.stopped_ms if n in index.node_number]:
        if reporting[index.node_number[n]] and bucket.start_ms > stops.stopped_ms[n]:
            stops.reports[n] = stops.reports.get(n, 0) + 1
            if stops.reports[n] >= REPORTS_AGAIN:
                del stops.stopped_ms[n]
    return reporting


def _note_gaps(window: Window, s: LivenessState, again: Bools, reporting: Bools) -> None:
    """Note how long nodes that report again were silent, if neither a restart nor many others explain it."""
    bucket = window.newest
    quiet_ms = bucket.start_ms - s.seen_ms
    limit_ms = window.silent_after_ms(again)
    gaps = np.flatnonzero(again & (s.seen_ms > s.resumed_ms) & (quiet_ms >= LEAST_GAP * limit_ms))
    s.reception.left_ms[gaps] = s.seen_ms[gaps]
    left_ms = np.where(reporting, s.reception.left_ms, s.seen_ms)
    gaps = gaps[quiet_ms[gaps] < LONGEST_AWAY_MS]
    if len(gaps) >= MASS_NODES:
        return
    for n in gaps.tolist():
        name = window.index.nodes[n].name
        long = quiet_ms[n] >= LONGEST_GAP_MS
        together = int((np.abs(left_ms - s.seen_ms[n]) <= max(TOGETHER_MS, bucket.length_ms)).sum())  # with itself
        if together >= (MASS_NODES if long else 2):
            continue  # it was part of something larger
        if long and s.reception.started_ms.get(name, 0) > s.seen_ms[n]:
            continue  # it was down
        if name not in s.planned.stopped_ms and name not in s.planned.started_ms and name not in s.clock_wrong:
            s.reception.gaps.append((bucket.end_ms, int(quiet_ms[n]), n))


def _confirm(window: Window, s: LivenessState, reporting: Bools) -> None:
    """Accept old reports of agents once the GPUs have no values now; drop those with a GPU that answers."""
    index, bucket = window.index, window.newest
    limit_ms = window.silent_after_ms(np.ones(index.node_count, bool)) if s.unsure else np.zeros(0)
    for node, gpu, code in list(s.unsure):
        n = index.node_number.get(node)
        g = index.gpu(node, gpu) if gpu is not None else None
        if n is None or (gpu is not None and g is None):
            del s.unsure[node, gpu, code]
            continue
        gpus = slice(int(index.first_gpu[n]), int(index.first_gpu[n + 1])) if g is None else slice(g, g + 1)
        answered_ms = int(s.answered_ms[gpus].max(initial=0))
        if answered_ms >= bucket.end_ms:
            del s.unsure[node, gpu, code]
        # From the node's return: an agent that starts reports the host some seconds before the driver answers.
        elif reporting[n] and bucket.end_ms - max(answered_ms, int(s.returned_ms[n])) >= limit_ms[n]:
            s.reported.setdefault((node, gpu, code), s.unsure.pop((node, gpu, code)))


def _restart(s: LivenessState, bucket: Bucket) -> None:
    """Count silence from this bucket on."""
    s.resumed_ms, s.coming_ms = bucket.start_ms, bucket.end_ms + COMING_MS


def _most_overdue(window: Window, s: LivenessState) -> bool:
    """Return True if most nodes should have reported by now; with reports every 15 s each third bucket is empty."""
    ever = s.seen_ms > 0
    overdue = window.newest.end_ms - s.seen_ms >= window.spacing_ms(ever)
    return not ever.any() or float(overdue[ever].mean()) > MASS_SHARE


def _last_report_ms(window: Window, s: LivenessState) -> Times:
    """Return about when each node last reported, int64 [N], for texts; judgement uses `seen_ms`, a bucket's end."""
    last = s.seen_ms.copy()
    interval, length_ms = window.report_interval, window.newest.length_ms
    if interval is None:
        return last
    for n in np.flatnonzero((last > 0) & (last < window.newest.end_ms)).tolist():
        at_ms = interval.last_ms(n, length_ms)
        if last[n] - length_ms < at_ms < last[n]:
            last[n] = at_ms
    return last


def _quiet_since_ms(window: Window, s: LivenessState) -> Times:
    """Return from when on each node's silence counts, int64 [N]."""
    result = np.maximum(s.seen_ms, s.resumed_ms)
    for name, started_ms in list(s.planned.started_ms.items()):
        n = window.index.node_number.get(name)
        if n is None or s.seen_ms[n] >= started_ms:
            del s.planned.started_ms[name]
        else:
            result[n] = max(int(result[n]), started_ms)
    return result


def _maintained(window: Window, s: LivenessState) -> Bools:
    """Return the nodes on which people work and that reported until they began, bool [N].

    A node that fell silent before stays silent: that was not the work.
    """
    found = np.zeros(window.index.node_count, bool)
    # After a restart only what is open says so, also of a node that fell silent with its rack.
    before = {node for key, f in s.open.items() if key[1] in SILENT_BEFORE for node, _ in f.members}
    for name, since_ms in window.maintained.items():
        n = window.index.node_number.get(name)
        if n is not None and name not in before:
            seen_ms = max(int(s.seen_ms[n]), s.resumed_ms)
            found[n] = s.seen_ms[n] == 0 or seen_ms >= since_ms - 2 * window.newest.length_ms
    return found


def _awaited(index: FleetIndex, s: LivenessState) -> Bools:
    """Return the nodes that should report, bool [N]."""
    awaited = (
        node.name not in s.planned.stopped_ms and (node.gpus > 0 or s.reception.has_node_rows) for node in index.nodes
    )
    return np.fromiter(awaited, bool, index.node_count)


def _explained(window: Window, s: LivenessState, quiet: Bools, worked_on: Bools, now_ms: int) -> Iterator[Finding]:
    """Report silences whose reason is known: a planned stop of an agent, maintenance."""
    for name, stopped_ms in s.planned.stopped_ms.items():
        n = window.index.node_number.get(name)
        if n is not None and quiet[n]:
            yield planned(window, name, stopped_ms, now_ms, bool(s.reception.scraped[n]))
    for n in np.flatnonzero(worked_on).tolist():
        if window.index.nodes[n].name not in s.planned.stopped_ms:
            yield worked_on_silent(window, n, now_ms)


def _silence(window: Window, s: LivenessState, reporting: Bools, now_ms: int) -> Iterator[Finding]:
    index, bucket = window.index, window.newest
    limit_ms = window.silent_after_ms(~reporting)
    never = s.seen_ms == 0
    quiet_ms = np.where(reporting, 0, bucket.end_ms - _quiet_since_ms(window, s))
    present = reporting | (quiet_ms < window.spacing_ms(~reporting))
    silent = expected = quiet_ms >= np.where(never, np.maximum(limit_ms, NEVER_CAME_MS), limit_ms)
    worked_on = np.zeros(index.node_count, bool)
    if silent.any():
        worked_on = silent & _maintained(window, s)
        expected = _awaited(index, s) & ~worked_on
        silent = expected & silent
    # Judgement counts from the collector's return; the finding says when the node last reported.
    since = np.where(never, s.resumed_ms, _last_report_ms(window, s)) if silent.any() else s.seen_ms
    shown_ms = bucket.end_ms - since
    yield from _explained(window, s, quiet_ms >= limit_ms, worked_on, now_ms)
    was_mass = any(key[1] == "no_telemetry" for key in s.open)
    # One bucket without any node in time is no proof; a fleet is silent after the same time as a node.
    all_silent = s.reception.none_reporting and silent.sum() > MASS_SHARE * expected.sum()
    mass = all_silent or (silent.sum() >= MASS_NODES and silent.mean() > MASS_SHARE)
    if was_mass and not mass:  # the collector's own fault has ended: judge the nodes still away from now on
        _restart(s, bucket)
        return
    if not silent.any() or (not mass and s.reception.none_reporting):
        return
    if mass and index.node_count > 1:
        yield mass_silent(window, silent, present, int(since[silent].min()), now_ms)
        return
    pages, silent = silent & s.reception.scraped, silent & ~s.reception.scraped
    late = silent & (bucket.end_ms - s.late_ms < limit_ms)
    late[[index.node_number[name] for name in s.clock_wrong if name in index.node_number]] = False  # a wrong clock
    silent &= ~late
    for n in np.flatnonzero(late & (quiet_ms >= DRAIN_AFTER_MS)).tolist():
        yield node_late(window, n, int(since[n]), int(shown_ms[n]), now_ms)
    for scope, codes, names in (("rack", index.rack, index.racks), ("leaf", index.leaf, index.leafs)):
        for code in np.unique(codes[silent]).tolist():
            inside = (codes == code) & expected
            # A group that comes back node by node stays one finding.
            known = any(k[:2] == (scope, "silent") and k[2] == names[code] for k in s.open)
            away = not (present | late)[inside].any()
            if known:
                away |= s.reception.still_coming((scope, names[code]), float(silent[inside].mean()), bucket.end_ms)
            else:
                s.reception.coming_ms.pop((scope, names[code]), None)
            if names[code] and inside.sum() >= 2 and away and not inside.all():
                yield group_silent(window, scope, names[code], inside, int(since[inside].min()), now_ms)
                silent = silent & ~inside
    alone = np.flatnonzero(silent | pages)  # a rack's exporters say nothing of the rack
    found = list(_single_nodes(window, s, alone, Quiet(never, quiet_ms, limit_ms, since), now_ms))
    yield from _together(window, s.reception.silent_pages, "pages_silent", found, ~pages, now_ms)


def _together(
    window: Window, pages: PagesTogether, cause: str, found: Sequence[Finding], over: Bools, now_ms: int
) -> Iterator[Finding]:
    """Put findings of single nodes' pages together where they are many. Others are passed on."""
    number = window.index.node_number
    alone = {number[f.node]: f for f in found if f.cause == cause and f.node is not None}
    pages.update({n: f.since_ms for n, f in alone.items()}, over)
    if many := pages.finding(window, cause, now_ms):
        yield many
    yield from (f for f in found if f.cause != cause or number[f.node or ""] not in pages.members)


@dataclass(frozen=True, slots=True)
class Quiet:
    """Silence of each node, [N]: whether it never came, ms judged, ms at which it counts, and from when it is shown."""

    never: Bools
    ms: Times
    limit_ms: Times
    since_ms: Times

    def may_live(self, n: int, s: LivenessState) -> bool:
        """Return whether a node that is silent by itself may live: it has reported, and has not been away for long."""
        return bool(not self.never[n] and self.ms[n] < LONGEST_AWAY_MS and not s.reception.scraped[n])


def _single_nodes(window: Window, s: LivenessState, silent: Times, quiet: Quiet, now_ms: int) -> Iterator[Finding]:
    """Report nodes that are silent alone, once they have been for long enough."""
    index, bucket = window.index, window.newest
    limit_s = quiet.limit_ms // 1000  # few values, however many nodes are silent
    usual_ms = {
        limit: s.reception.usual_gap_ms(bucket.end_ms, index.node_count, 1000 * limit)
        for limit in np.unique(limit_s[silent]).tolist()
    }
    shares = s.peers.shares(window) if len(silent) else np.zeros(0)
    progress_of = {n: s.peers.progress(window, n, shares) for n in silent.tolist()}
    may_live = [n for n, p in progress_of.items() if p is not Progress.STOPPED and quiet.may_live(n, s)]
    away_ms = s.reception.usual_away_ms(bucket.end_ms, index.node_count, may_live)
    for n, progress in progress_of.items():
        name = index.nodes[n].name
        never, enough = bool(quiet.never[n]), quiet.ms[n] >= max(usual_ms[int(limit_s[n])], ALONE_MS[progress])
        scraped = bool(s.reception.scraped[n])
        known = ("node", "pages_silent" if scraped else "silent", name, None) in s.open
        if not (never or enough or known or (scraped and n in s.reception.silent_pages.members)):
            continue
        since_ms, wrong = int(quiet.since_ms[n]), name in s.clock_wrong
        shown_ms = bucket.end_ms - since_ms
        if scraped:
            yield pages_silent(window, n, since_ms, shown_ms, now_ms, progress is Progress.GOES_ON)
            continue
        if progress is Progress.GOES_ON and not never and not wrong:
            yield node_cut_off(window, n, since_ms, shown_ms, now_ms)
            continue
        drain_ms = max(DRAIN_AFTER_MS, 2 * int(quiet.limit_ms[n]), away_ms)  # a warning always precedes it
        long = bool(min(quiet.ms[n], bucket.end_ms - s.late_ms[n]) >= drain_ms)
        yield node_silent(window, n, never, since_ms, shown_ms, wrong, long, now_ms)


def _gpus(window: Window, s: LivenessState, reporting: Bools, now_ms: int) -> Iterator[Finding]:
    """Report GPUs without values while their node reports."""
    index, bucket = window.index, window.newest
    some = bool((s.answered_ms > 0).any())
    answered = np.bincount(index.gpu_node[s.answered_ms >= bucket.end_ms], minlength=index.node_count) > 0
    for name in s.planned.stopped_ms.keys() & index.node_number.keys():
        answered[index.node_number[name]] = True  # nobody reads its pages any longer
    unread = list(_unread_gpus(window, s, reporting, now_ms)) if some else []
    yield from _together(window, s.reception.silent_gpu_pages, "gpu_page_silent", unread, answered, now_ms)
    if not some:
        return  # no GPU telemetry yet, but for what is open of a former run: could_not_judge reports it
    quiet = np.zeros(index.node_count, bool)
    quiet[index.gpu_node[s.answered_ms < bucket.end_ms]] = True
    limit_ms = window.silent_after_ms(quiet)[index.gpu_node]
    never = s.answered_ms == 0
    # From the node's return: an agent that starts reports the host some seconds before the driver answers.
    # Not while the page of its node's GPUs cannot be read: nothing is known then.
    known_ms = np.maximum(s.returned_ms, s.reception.unread_ms)[index.gpu_node]
    since = np.maximum(np.maximum(s.answered_ms, s.resumed_ms), known_ms)
    limit_ms = np.where(never, np.maximum(limit_ms, NEVER_CAME_MS), limit_ms)
    missing = reporting[index.gpu_node] & (bucket.end_ms - since >= limit_ms)
    since = np.where(never, since, np.maximum(s.answered_ms, s.returned_ms[index.gpu_node]))  # for the finding
    for n in np.unique(index.gpu_node[missing]).tolist():
        first, end = int(index.first_gpu[n]), int(index.first_gpu[n + 1])
        gone = [g for g in range(first, end) if missing[g]]
        node = index.nodes[n].name
        if any((node, None, code) in s.reported for code in EXPLAIN_SILENCE):
            continue
        scraped = bool(s.reception.scraped[n])
        if len(gone) == end - first and len(gone) > 1:
            say = pages_without_gpus if scraped else no_gpu_answers
            yield say(window, node, bool(never[gone].all()), int(since[gone].min()), len(gone), now_ms)
            continue
        # Where most other GPUs of a node lose rows, the agent or its network does: then a GPU is lost as a node is.
        others = s.partial.share[first:end][~missing[first:end]]
        loses = len(others) > 0 and float(np.median(others)) > OTHERS_SHARE
        drain_ms = DRAIN_AFTER_MS if loses else GPU_DRAIN_MS
        for g in gone:
            # Rows that fall just past a bucket's edge are no missed ones: count those of its neighbours.
            missed = end - first == 1 or never[g] or s.partial.unanswered[g] >= MISSED
            if missed and (node, g - first, "gpu_lost") not in s.reported:
                long = bool(bucket.end_ms - since[g] >= drain_ms)
                say_gone = page_without_gpu if scraped else gpu_gone
                yield say_gone(window, node, g - first, bool(never[g]), int(since[g]), now_ms, long)


def _unread_gpus(window: Window, s: LivenessState, reporting: Bools, now_ms: int) -> Iterator[Finding]:
    """Report nodes without an agent whose GPUs' page is not read for long, while another of their pages is."""
    index, end_ms = window.index, window.newest.end_ms
    for n in np.flatnonzero(reporting & s.reception.scraped & (s.reception.unread_ms == end_ms)).tolist():
        gpus = slice(int(index.first_gpu[n]), int(index.first_gpu[n + 1]))
        since = np.maximum(s.answered_ms[gpus], max(s.resumed_ms, int(s.returned_ms[n])))
        limit_ms = GPU_PAGE_MS if s.answered_ms[gpus].any() else NEVER_CAME_MS
        if len(since) and end_ms - int(since.max()) >= limit_ms:
            yield gpu_page_silent(window, n, int(since.max()), now_ms)


def _reported(window: Window, s: LivenessState, now_ms: int) -> Iterator[Finding]:
    """Report what agents have reported: lost GPUs, hung or missing drivers."""
    for (node, gpu, code), since_ms in s.reported.items():
        n = window.index.node_number.get(node)
        if n is None or (code == "driver_missing" and not window.index.nodes[n].gpus):
            continue
        if code == "driver_released":  # requested by an operator; the agent ends it within an hour
            continue
        if code == "gpu_lost" and gpu is not None:
            yield gpu_gone(window, node, gpu, False, since_ms, now_ms, True, "the agent reported the GPU as lost")
            continue
        yield driver_gone(window, n, code, since_ms, now_ms)


def _clocks(window: Window, s: LivenessState, now_ms: int) -> Iterator[Finding]:
    offsets = window.newest.node.get("clock_offset_s")
    if offsets is not None:
        for n in np.flatnonzero(np.abs(offsets) > CLOCK_WRONG_S).tolist():
            s.clock_wrong[window.index.nodes[n].name] = (now_ms, f"it is off by {offsets[n]:+.1f} s")
    number = window.index.node_number
    away = {node for node in s.clock_wrong if node in number and s.seen_ms[number[node]] < window.newest.end_ms}
    # While a node's samples do not arrive in time, its clock cannot be checked.
    s.clock_wrong = {k: v for k, v in s.clock_wrong.items() if k in away or now_ms - v[0] <= CLOCK_HELD_MS}
    for node, (ts_ms, text) in s.clock_wrong.items():
        yield Finding(
            NAME, KIND, "clock_wrong", "node", node, None, ((node, None),), now_ms, ts_ms, Severity.WARNING, 0.8,
            RecommendedAction.NONE, f"The clock of node {node} is wrong: {text or 'it differs from the collector'}.",
            "Repair its time service (chrony, NTP). Until then its telemetry cannot be compared with its peers'.",
            (Evidence(text or "the collector's clock differs", "clock_offset_s", expected=0.0),), job_of(window, node),
        )  # fmt: skip


def _group_of(finding: Finding, index: FleetIndex) -> str:
    """Return the name of a finding's rack or leaf, from its first member."""
    if finding.node is not None or not finding.members or finding.cause.endswith(SUFFIX):
        return finding.node or ""  # of many: whatever rack the first is in
    node = index.spec.by_name.get(finding.members[0][0])
    return "" if node is None else node.rack if finding.scope == "rack" else node.leaf


def _answers_in_part(number: int, gpu: dict[str, Floats], _node: dict[str, Floats]) -> None:
    if number >= 10 and number % 2:
        for metric in CORE:
            gpu[metric][21] = np.nan


EXAMPLES = (
    Example("all nodes report; one agent is stopped for work on its node", lambda: play(
        small_fleet(), 12, silent=lambda number: [2] if number >= 4 else [],
        events={3: [Event("e1", START_MS + 39_000, "n02", None, EventKind.LIFECYCLE, "agent_stopped", "")]},
    ), frozenset({("liveness", "agent_stopped", "node", "info")})),
    Example("a GPU often does not answer, its neighbours do", lambda: play(small_fleet(), 60, _answers_in_part),
            frozenset({("liveness", "gpu_partial", "gpu", "warning")})),
    Example("a node falls silent", lambda: play(
        small_fleet(), 30, silent=lambda number: [2] if number >= 4 else [],
    ), frozenset({("liveness", "silent", "node", "warning")})),
    Example("a node is away for two minutes, and its job goes on without a break", lambda: play(
        small_fleet(), 30, silent=lambda number: [2] if 4 <= number < 16 else [],
    ), frozenset()),
    Example("a whole rack falls silent: one finding", lambda: play(
        small_fleet(12), 10, silent=lambda number: [4, 5, 6, 7] if number >= 4 else [],
    ), frozenset({("liveness", "silent", "rack", "critical")})),
    Example("the collector receives nothing: one finding, none for a node", lambda: play(
        small_fleet(), 10, silent=lambda number: range(8) if 4 <= number < 8 else [],
    ), frozenset({("liveness", "no_telemetry", "rack", "critical")})),
)  # fmt: skip

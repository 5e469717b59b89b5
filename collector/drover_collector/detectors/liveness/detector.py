"""Liveness: silent nodes, lost GPUs, hung drivers, nodes that never came, wrong clocks.

Silence cannot be told from a broken management network by telemetry alone; the finding says so, and asks for a drain
only after the time in which Slurm itself would give the node up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from drover_collector.detectors._lib.examples import (
    START_MS,
    Example,
    play,
    small_fleet,
)
from drover_collector.detectors._lib.rhythm import SILENT_BUCKETS
from drover_collector.detectors._lib.robust import Bools
from drover_collector.detectors._lib.window import Window
from drover_collector.detectors.liveness.texts import (
    gpu_gone,
    group_silent,
    job_of,
    mass_silent,
    no_gpu_answers,
    node_late,
    node_silent,
    planned,
)
from drover_collector.fleet.buckets import Bucket
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
QUIET_MS = None  # it says itself when something is over
KIND = IncidentKind.LIVENESS

DRAIN_AFTER_MS = 300_000  # of silence: Slurm's SlurmdTimeout default, after which it too sets a node DOWN
NEVER_CAME_MS = 60_000  # grace for expected nodes after the start of watching
CLOCK_WRONG_S = 5.0  # beyond it, samples of a node fall into other buckets than its peers' of the same moment
CLOCK_HELD_MS = 600_000  # how long one report of a wrong clock is told
MASS_SHARE = 0.5  # more of the fleet silent at once: the collector or its network is the first suspect
MASS_NODES = 4
# While so many nodes come back in each bucket after the collector itself was away, the others wait for their turn:
# thousands of agents that connect at once are let in one after the other (decision 22; 12,500 within about a minute).
COMING_SHARE = 0.01  # of all nodes, two at least
COMING_MS = 300_000  # no longer than this
GROUP_STAYS = 0.5  # a silent rack or leaf is told as one until less than this share of it is silent

CORE = ("gpu_temp_c", "power_w", "sm_clock_mhz")  # a GPU that answers gives one of these
LOST = ("gpu_lost", "driver_hung", "driver_missing", "driver_released")
EXPLAIN_SILENCE = ("driver_hung", "driver_missing", "driver_released")  # of all GPUs of a node that said so
OF_GPUS = frozenset({"gpu_lost", "gpu_missing", "driver_lost", "driver_missing"})  # over once a GPU of it answers
ANSWERS_AGAIN_MS = 60_000  # of values after an agent reported the GPU as lost: its word that it is back got lost
Times = npt.NDArray[np.int64]
Key = tuple[str, str, str, int | None]  # scope, cause, node or group, GPU


@dataclass(slots=True)
class LivenessState:
    """`heard_ms` [N] and `answered_ms` [G]: end of the newest bucket with rows, 0 never. `spoke_ms` [N]: of the newest
    for which the node was late. `returned_ms` [N]: when the node was last heard again after a silence. `resumed_ms`: no
    silence counts from before it (the collector itself was deaf or away)."""

    heard_ms: Times
    answered_ms: Times
    spoke_ms: Times
    returned_ms: Times
    resumed_ms: int
    coming_ms: int  # until then nodes may still be coming back, one after the other
    newest_end_ms: int = 0
    deaf: bool = False  # nobody at all was heard in the newest bucket
    hosts_tell: bool = False  # rows of nodes themselves were seen, not only of their GPUs
    planned: dict[str, int] = field(default_factory=dict)  # node -> when its agent was stopped on purpose
    reported: dict[tuple[str, int | None, str], int] = field(default_factory=dict)  # (node, GPU, code) -> since
    unsure: dict[tuple[str, int | None, str], int] = field(default_factory=dict)  # likewise, of long ago: see _confirm
    clock_wrong: dict[str, tuple[int, str]] = field(default_factory=dict)  # node -> last report, its text; see _clocks
    told: dict[Key, Finding] = field(default_factory=dict)  # what is now so
    left: set[Key] = field(default_factory=set)  # of it, what a former run told and this one has not told again


def restored(index: FleetIndex, incidents: Sequence[Incident], started_ms: int) -> LivenessState:
    """State that knows what a former run told of and has not ended: who is away since when, what agents reported."""
    s = _fresh(index, started_ms)
    for incident in incidents:
        if NAME not in incident.detectors or incident.closed_ms is not None:
            continue
        # Another detector's headline may stand over it: what this one knows of a GPU is that it does not answer.
        of_gpu = incident.scope == "gpu" and incident.kind is not KIND
        cause, node = "gpu_lost" if of_gpu else incident.cause, incident.node
        finding = Finding(
            NAME, KIND, cause, incident.scope, node, incident.gpu, incident.members, incident.updated_ms,
            incident.since_ms, incident.severity, incident.confidence, incident.asked or incident.action,
            incident.summary, incident.advice, incident.evidence, incident.job,
        )  # fmt: skip
        key = finding.scope, cause, node or _group_of(finding, index), finding.gpu
        s.told[key] = finding
        s.left.add(key)
        if cause in ("silent", "late"):
            for name, _ in incident.members:
                if (n := index.node_number.get(name)) is not None:
                    s.heard_ms[n] = incident.since_ms
        if node is not None:
            if cause == "agent_stopped":
                s.planned[node] = incident.since_ms
            elif cause in LOST:
                s.reported[node, incident.gpu, cause] = incident.since_ms
            elif cause == "clock_wrong":
                s.clock_wrong[node] = (incident.updated_ms, incident.evidence[0].text if incident.evidence else "")
    return s


def _fresh(index: FleetIndex, started_ms: int) -> LivenessState:
    heard, spoke, returned = (np.zeros(index.node_count, np.int64) for _ in range(3))
    return LivenessState(
        heard, np.zeros(index.gpu_count, np.int64), spoke, returned, started_ms, started_ms + COMING_MS
    )


def detect(window: Window, state: LivenessState | None, now_ms: int) -> tuple[list[Finding], LivenessState]:
    index = window.index
    s = state or _fresh(index, window.started_ms)
    for event in window.events:
        if event.kind is EventKind.LIFECYCLE:
            _on_lifecycle(s, event, now_ms)
    found: list[Finding] = []
    if window.fresh:
        heard = _listen(window, s)
        found += _silence(window, s, heard, now_ms)
        found += _gpus(window, s, heard, now_ms)
        found += _clocks(window, s, now_ms)
    found += _reported(window, s, now_ms)
    now_told = {(f.scope, f.cause, f.node or _group_of(f, index), f.gpu): f for f in found}
    if not window.fresh:  # a call for events says nothing about silence: only what is new counts
        new = [f for key, f in now_told.items() if key not in s.told]
        s.told |= now_told
        return new, s
    s.left -= now_told.keys()
    missed = {k: f for k, f in s.told.items() if k not in now_told}
    mass = any(cause == "no_telemetry" for _, cause, _, _ in (*s.told, *now_told))
    kept = {
        k: replace(f, ts_ms=now_ms)
        for k, f in missed.items()
        if _unproven(window, s, k, f) or (not mass and _waits(window, s, f))
    }
    over = [
        replace(f, cleared=True, ts_ms=now_ms, action=RecommendedAction.NONE)
        for k, f in missed.items()
        if k not in kept
    ]
    s.told, s.left = now_told | kept, s.left & kept.keys()
    return [*found, *kept.values(), *over], s


def _unproven(window: Window, s: LivenessState, key: Key, finding: Finding) -> bool:
    """Whether a finding still stands although nothing repeats it: none of its GPUs has answered since; or it is of a
    former run, and none of its nodes was heard since."""
    index = window.index
    if key in s.left and finding.gpu is None:
        numbers = [index.node_number[name] for name, _ in finding.members if name in index.node_number]
        if numbers and not (s.heard_ms[numbers] >= window.newest.end_ms).any():
            return True
    n = index.node_number.get(finding.node or "")
    if n is None or finding.cause not in OF_GPUS:
        return False
    gpus = slice(int(index.first_gpu[n]), int(index.first_gpu[n + 1]))
    if finding.gpu is not None:
        g = index.gpu(finding.node or "", finding.gpu)
        if g is None:
            return False
        gpus = slice(g, g + 1)
    return not (s.answered_ms[gpus] >= window.newest.end_ms).any()


def _waits(window: Window, s: LivenessState, finding: Finding) -> bool:
    """Whether a silence stands that was told before a moment in which nobody was in time, since it is not over and too
    early to be told anew: until then it was silent while others reported."""
    bucket, number = window.newest, window.index.node_number
    if finding.cause not in ("silent", "never_came") or finding.node in s.planned:
        return False
    members = [number[name] for name, _ in finding.members if name in number]
    if not members:
        return False
    again_ms = int(window.silent_after_ms(s.heard_ms < bucket.end_ms)[members].max())
    again_ms = max(NEVER_CAME_MS if finding.cause == "never_came" else 0, again_ms)
    if not s.deaf and bucket.end_ms - s.resumed_ms >= again_ms:
        return False
    return float((s.heard_ms[members] < bucket.end_ms).mean()) >= GROUP_STAYS


def could_not_judge(window: Window) -> list[str]:
    if not window.newest.node_rows.any() and not window.newest.gpu_rows.any():
        return ["silent nodes: the data has no rows at all"]
    missing = [] if window.newest.gpu_rows.any() else ["lost GPUs: no GPU rows in the data"]
    return missing + ([] if "clock_offset_s" in window.newest.node else ["wrong clocks: clock_offset_s is missing"])


def _on_lifecycle(s: LivenessState, event: Event, now_ms: int) -> None:
    if event.code == "agent_stopped":
        s.planned[event.node] = now_ms
    elif event.code == "agent_started":
        s.planned.pop(event.node, None)
        for known in (s.reported, s.unsure):
            for key in [key for key in known if key[0] == event.node]:
                del known[key]  # the new agent looks for itself
    elif event.code in LOST:
        (s.unsure if event.backlog else s.reported).setdefault((event.node, event.gpu, event.code), event.ts_ms)
    elif event.code == "gpu_back":
        for known in (s.reported, s.unsure):
            known.pop((event.node, event.gpu, "gpu_lost"), None)
    elif event.code == "driver_back":
        for known in (s.reported, s.unsure):
            for key in [key for key in known if key[0] == event.node and key[2].startswith("driver")]:
                if event.gpu in (None, key[1]):  # of one GPU: a call for it returned, which says nothing of the others
                    del known[key]
    elif event.code == "clock_wrong":  # told once, when it goes wrong
        s.clock_wrong[event.node] = (now_ms, event.message)


def _listen(window: Window, s: LivenessState) -> Bools:
    """Who gave rows in the newest bucket, bool [N]; brings the state's times up to date."""
    bucket, index = window.newest, window.index
    rows = bucket.node_rows + np.bincount(index.gpu_node, bucket.gpu_rows, index.node_count)
    heard = np.asarray(rows > 0)
    missing = s.newest_end_ms and bucket.start_ms - s.newest_end_ms > SILENT_BUCKETS * bucket.length_ms
    if missing or (s.deaf and heard.any()):
        _resume(s, bucket)  # buckets are missing or empty: it was not the nodes that were away
    again = heard & (s.heard_ms < bucket.start_ms)
    if again.any():  # an empty bucket between two reports of one that reports seldom is no absence
        again &= bucket.start_ms - s.heard_ms >= window.spacing_ms(again)
    if bucket.end_ms <= s.coming_ms:
        if again.sum() >= max(2, COMING_SHARE * len(again)):
            s.resumed_ms = bucket.start_ms
        elif bucket.end_ms - s.resumed_ms >= float(np.median(window.silent_after_ms(~heard))):
            s.coming_ms = 0
    s.newest_end_ms = bucket.end_ms
    s.deaf = not heard.any() and _most_overdue(window, s)
    s.hosts_tell |= bool(bucket.node)
    s.returned_ms[again] = bucket.start_ms
    s.heard_ms[heard] = bucket.end_ms
    s.spoke_ms[[index.node_number[name] for name in bucket.late]] = bucket.end_ms
    core = [bucket.gpu[metric] for metric in CORE if metric in bucket.gpu]
    answers = bucket.gpu_rows > 0
    if core:
        answers = answers & ~np.isnan(np.array(core)).all(axis=0)
    s.answered_ms[answers] = bucket.end_ms
    for node, gpu, code in [key for key in s.reported if key[2] == "gpu_lost" and key[1] is not None]:
        g = index.gpu(node, gpu) if gpu is not None else None
        if g is not None and answers[g] and bucket.end_ms - s.reported[node, gpu, code] >= ANSWERS_AGAIN_MS:
            del s.reported[node, gpu, code]
    _confirm(window, s, heard)
    for n in [n for n, since in s.planned.items() if n in index.node_number]:
        if heard[index.node_number[n]] and bucket.start_ms > s.planned[n]:
            del s.planned[n]
    return heard


def _confirm(window: Window, s: LivenessState, heard: Bools) -> None:
    """What agents reported long ago holds once the GPUs give nothing now; a value of one of them ends it."""
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
        # Since the node came back: an agent that starts sends of the host some seconds before the driver answers.
        elif heard[n] and bucket.end_ms - max(answered_ms, int(s.returned_ms[n])) >= limit_ms[n]:
            s.reported.setdefault((node, gpu, code), s.unsure.pop((node, gpu, code)))


def _resume(s: LivenessState, bucket: Bucket) -> None:
    s.resumed_ms, s.coming_ms = bucket.start_ms, bucket.end_ms + COMING_MS


def _most_overdue(window: Window, s: LivenessState) -> bool:
    """Whether most nodes should have reported by now: where all are read every 15 s, each third bucket is empty."""
    ever = s.heard_ms > 0
    overdue = window.newest.end_ms - s.heard_ms >= window.spacing_ms(ever)
    return not ever.any() or float(overdue[ever].mean()) > MASS_SHARE


def _last_heard(window: Window, s: LivenessState) -> Times:
    """When each node was last heard, ms [N], for what people read; judged by is `State.heard_ms`, a bucket's end."""
    last = s.heard_ms.copy()
    rhythm, length_ms = window.rhythm, window.newest.length_ms
    if rhythm is None:
        return last
    for n in np.flatnonzero((last > 0) & (last < window.newest.end_ms)).tolist():
        at_ms = rhythm.last_ms(n, length_ms)
        if last[n] - length_ms < at_ms < last[n]:
            last[n] = at_ms
    return last


def _silence(window: Window, s: LivenessState, heard: Bools, now_ms: int) -> Iterator[Finding]:
    index, bucket = window.index, window.newest
    limit_ms = window.silent_after_ms(~heard)
    never = s.heard_ms == 0
    quiet_ms = np.where(heard, 0, bucket.end_ms - np.maximum(s.heard_ms, s.resumed_ms))
    present = heard | (quiet_ms < window.spacing_ms(~heard))
    silent = expected = quiet_ms >= np.where(never, np.maximum(limit_ms, NEVER_CAME_MS), limit_ms)
    if silent.any():
        awaited = (node.name not in s.planned and (node.gpus > 0 or s.hosts_tell) for node in index.nodes)
        expected = np.fromiter(awaited, bool, index.node_count)
        silent = expected & silent
    # Judged from when the collector listened again, said from when the node was last heard.
    since = np.where(never, s.resumed_ms, _last_heard(window, s)) if silent.any() else s.heard_ms
    said_ms = bucket.end_ms - since
    for name, stopped_ms in s.planned.items():
        n = index.node_number.get(name)
        if n is not None and quiet_ms[n] >= limit_ms[n]:
            yield planned(window, name, stopped_ms, now_ms)
    was_mass = any(key[1] == "no_telemetry" for key in s.told)
    # One bucket that nobody was in time for says nothing yet; a fleet that is gone is silent as a node is.
    deaf = s.deaf and silent.sum() > MASS_SHARE * expected.sum()
    mass = deaf or (silent.sum() >= MASS_NODES and silent.mean() > MASS_SHARE)
    if was_mass and not mass:  # the collector's own trouble ends: who is still away now is judged from now on
        _resume(s, bucket)
        return
    if not silent.any() or (not mass and s.deaf):
        return
    if mass and index.node_count > 1:
        yield mass_silent(window, silent, present, int(since[silent].min()), now_ms)
        return
    late = silent & (bucket.end_ms - s.spoke_ms < limit_ms)
    late[[index.node_number[name] for name in s.clock_wrong if name in index.node_number]] = False  # told as what it is
    silent = silent & ~late
    for n in np.flatnonzero(late & (quiet_ms >= DRAIN_AFTER_MS)).tolist():
        yield node_late(window, n, int(since[n]), int(said_ms[n]), now_ms)
    for scope, codes, names in (("rack", index.rack, index.racks), ("leaf", index.leaf, index.leafs)):
        for code in np.unique(codes[silent]).tolist():
            inside = (codes == code) & expected
            # Once all were silent, the others of a group that comes back node by node are no troubles of their own.
            told = any(k[:2] == (scope, "silent") and k[2] == names[code] for k in s.told)
            away = not (present | late)[inside].any() or (told and silent[inside].mean() >= GROUP_STAYS)
            if names[code] and inside.sum() >= 2 and away and not inside.all():
                yield group_silent(window, scope, names[code], inside, int(since[inside].min()), now_ms)
                silent = silent & ~inside
    for n in np.flatnonzero(silent).tolist():
        clock = s.clock_wrong.get(index.nodes[n].name)
        drain_ms = max(DRAIN_AFTER_MS, 2 * int(limit_ms[n]))  # the warning comes first, however seldom it reports
        long = bool(min(quiet_ms[n], bucket.end_ms - s.spoke_ms[n]) >= drain_ms)
        yield node_silent(window, n, bool(never[n]), int(since[n]), int(said_ms[n]), clock is not None, long, now_ms)


def _gpus(window: Window, s: LivenessState, heard: Bools, now_ms: int) -> Iterator[Finding]:
    """GPUs that give no values while their node reports."""
    index, bucket = window.index, window.newest
    if not (s.answered_ms > 0).any():
        return  # no GPU telemetry at all: could_not_judge says so
    quiet = np.zeros(index.node_count, bool)
    quiet[index.gpu_node[s.answered_ms < bucket.end_ms]] = True
    limit_ms = window.silent_after_ms(quiet)[index.gpu_node]
    never = s.answered_ms == 0
    # Since the node came back: an agent that starts tells of the host some seconds before the driver answers.
    since = np.maximum(np.maximum(s.answered_ms, s.resumed_ms), s.returned_ms[index.gpu_node])
    limit_ms = np.where(never, np.maximum(limit_ms, NEVER_CAME_MS), limit_ms)
    missing = heard[index.gpu_node] & (bucket.end_ms - since >= limit_ms)
    since = np.where(never, since, np.maximum(s.answered_ms, s.returned_ms[index.gpu_node]))  # said, not judged
    for n in np.unique(index.gpu_node[missing]).tolist():
        first, end = int(index.first_gpu[n]), int(index.first_gpu[n + 1])
        gone = [g for g in range(first, end) if missing[g]]
        node = index.nodes[n].name
        if any((node, None, code) in s.reported for code in EXPLAIN_SILENCE):
            continue
        if len(gone) == end - first and len(gone) > 1:
            yield no_gpu_answers(window, node, bool(never[gone].all()), int(since[gone].min()), len(gone), now_ms)
            continue
        for g in gone:
            if (node, g - first, "gpu_lost") not in s.reported:
                yield gpu_gone(window, node, g - first, bool(never[g]), int(since[g]), now_ms)


def _reported(window: Window, s: LivenessState, now_ms: int) -> Iterator[Finding]:
    """What the agents themselves said: lost GPUs, hung or missing drivers."""
    for (node, gpu, code), since_ms in s.reported.items():
        n = window.index.node_number.get(node)
        if n is None or (code == "driver_missing" and not window.index.nodes[n].gpus):
            continue
        if code == "driver_released":  # an operator asked for it, and the agent ends it within the hour
            continue
        if code == "gpu_lost" and gpu is not None:
            yield gpu_gone(window, node, gpu, False, since_ms, now_ms, "the agent reported the GPU as lost")
            continue
        hung = code == "driver_hung"
        yield Finding(
            NAME,
            IncidentKind.LIVENESS,
            code,
            "node",
            node,
            None,
            ((node, None),),
            now_ms,
            since_ms,
            Severity.CRITICAL if hung else Severity.WARNING,
            0.9,
            RecommendedAction.DRAIN if hung else RecommendedAction.ADVISE,
            f"Node {node}: calls into its NVIDIA driver do not return."
            if hung
            else f"Node {node} should have {window.index.nodes[n].gpus} GPUs but no usable NVIDIA driver.",
            "Drain the node and reboot it: a hung driver does not come back by itself."
            if hung
            else "Load or install the driver (nvidia-smi must list the GPUs), or correct fleet.toml.",
            (Evidence(f"the agent reported {code}", from_ms=since_ms),),
            job_of(window, node),
            lost_gpus=float(window.index.nodes[n].gpus),
        )


def _clocks(window: Window, s: LivenessState, now_ms: int) -> Iterator[Finding]:
    offsets = window.newest.node.get("clock_offset_s")
    if offsets is not None:
        for n in np.flatnonzero(np.abs(offsets) > CLOCK_WRONG_S).tolist():
            s.clock_wrong[window.index.nodes[n].name] = (now_ms, f"it is off by {offsets[n]:+.1f} s")
    number = window.index.node_number
    away = {node for node in s.clock_wrong if node in number and s.heard_ms[number[node]] < window.newest.end_ms}
    # While a node's samples do not arrive in time, nothing says that its clock was mended.
    s.clock_wrong = {k: v for k, v in s.clock_wrong.items() if k in away or now_ms - v[0] <= CLOCK_HELD_MS}
    for node, (ts_ms, text) in s.clock_wrong.items():
        yield Finding(
            NAME,
            IncidentKind.LIVENESS,
            "clock_wrong",
            "node",
            node,
            None,
            ((node, None),),
            now_ms,
            ts_ms,
            Severity.WARNING,
            0.8,
            RecommendedAction.NONE,
            f"The clock of node {node} is wrong: {text or 'the collector saw it'}.",
            "Mend its time service (chrony, NTP): until then its telemetry cannot be compared with its peers'.",
            (Evidence(text or "the collector's clock differs", "clock_offset_s", expected=0.0),),
            job_of(window, node),
        )


def _group_of(finding: Finding, index: FleetIndex) -> str:
    """Name of a rack or leaf finding's group, from its first member."""
    if finding.node is not None or not finding.members:
        return finding.node or ""
    node = index.spec.by_name.get(finding.members[0][0])
    return "" if node is None else node.rack if finding.scope == "rack" else node.leaf


EXAMPLES = (
    Example("all report; one agent is stopped for work on its node", lambda: play(
        small_fleet(), 12, silent=lambda number: [2] if number >= 4 else [],
        events={3: [Event("e1", START_MS + 39_000, "n02", None, EventKind.LIFECYCLE, "agent_stopped", "")]},
    ), frozenset({("liveness", "agent_stopped", "node", "info")})),
    Example("a node falls silent", lambda: play(
        small_fleet(), 10, silent=lambda number: [2] if number >= 4 else [],
    ), frozenset({("liveness", "silent", "node", "warning")})),
    Example("a whole rack falls silent: one finding", lambda: play(
        small_fleet(12), 10, silent=lambda number: [4, 5, 6, 7] if number >= 4 else [],
    ), frozenset({("liveness", "silent", "rack", "critical")})),
    Example("the collector hears nobody: one finding, none of a node", lambda: play(
        small_fleet(), 10, silent=lambda number: range(8) if 4 <= number < 8 else [],
    ), frozenset({("liveness", "no_telemetry", "rack", "critical")})),
)  # fmt: skip

"""Judge XIDs and SXids: distinguish hardware faults from crashes, repeats from bursts, and causes from consequences.

Severities follow NVIDIA's XID catalog (drover_core/xid/table.py). A policy may rate any code differently.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

import numpy as np

from drover_collector.detectors._lib.examples import (
    START_MS,
    Example,
    play,
    small_fleet,
)
from drover_collector.detectors._lib.texts import duration, listing, place
from drover_collector.detectors._lib.window import Window
from drover_collector.detectors.xid import resets, resolution
from drover_collector.detectors.xid.resolution import QUIET_INFO_MS
from drover_collector.detectors.xid.state import (
    Key,
    Open,
    Seen,
    Where,
    XidState,
)
from drover_collector.detectors.xid.verdicts import RECOVERY_CODE, Verdict, judge
from drover_collector.fleet.index import FleetIndex
from drover_core.metrics.catalog import RECOVERY_ACTIONS
from drover_core.model.events import (
    SEVERITY_ORDER,
    Event,
    EventKind,
    Evidence,
    Finding,
    Incident,
    IncidentKind,
    RecommendedAction,
    Severity,
)
from drover_core.xid.codes import SYMPATHETIC, previous_xid_from_message

NAME = "xid"
VERSION = 1
QUIET_MS: int | None = None  # it reports the end itself

BURST_GAP_MS = 180_000  # lines closer than this are one burst (NVSentinel: 3 min)
REPEAT_WINDOW_MS = 24 * 3_600_000  # in which repeats count (NVSentinel, NVIDIA's workflows for 13 and 31)
FATAL_BURSTS = 5  # a fatal code in this many bursts a day: a reset does not repair it (NVSentinel)
APP_REPEATS = 2  # 13 or 31 this often a day on one GPU: diagnose the hardware (NVIDIA, workflows 13 and 31)
DIAGNOSE_WHEN_REPEATED = frozenset({13, 31})
ATTRIBUTE_MS = 60_000  # a code within this time after its possible cause is attributed to it
JOB_ATTRIBUTE_MS = 900_000  # programs die this late after a fault in their job (NCCL's watchdog waits 10 min)
CRASH_GPUS = 3  # the same application fault on this many GPUs of a job is the job's, not the GPUs'
CRASH_WINDOW_MS = 60_000
HOLD_MS = 10_000  # for which application faults wait, to distinguish a crash of the job from one GPU's fault
PRUNE_MS = 1_000
SAME_MS = 1_000  # for which an attributed line is not attributed again: a storm has thousands
PER_KEY = 16  # bursts kept per GPU and code
MOST_PENDING = 512  # waiting faults that are searched for those that a worse one explains
MAX_KEYS = 200_000  # pairs of GPU and code kept in all; the oldest are dropped first


def detect(window: Window, state: XidState | None, now_ms: int) -> tuple[list[Finding], XidState]:
    """Return the findings of the new events, and of application faults and endings that are due."""
    s = state if state is not None else XidState()
    if abs(now_ms - s.pruned_ms) >= PRUNE_MS:
        s.pruned_ms = now_ms
        s.recent = {key: seen for key, seen in s.recent.items() if now_ms - seen.ts_ms <= CRASH_WINDOW_MS}
        s.causes.forget(
            lambda seen: (
                now_ms - seen.ts_ms > (JOB_ATTRIBUTE_MS if seen.severity is Severity.CRITICAL else CRASH_WINDOW_MS)
            )
        )
    found: list[Finding] = []
    for event in window.events:
        if event.kind in (EventKind.XID, EventKind.SXID):
            found += _on_error(window, s, event, now_ms)
        elif event.kind is EventKind.LIFECYCLE and event.code in ("gpu_back", "driver_back"):
            for (node, gpu), held in s.open.items():
                if node == event.node and event.gpu in (None, gpu):
                    held.back_ms = now_ms
    found += _crashes(s, now_ms)
    found += _due(s, now_ms)
    if window.fresh:
        found += _recovery_actions(window, s, now_ms)
        resets.note_resets(window, s.open, now_ms)
        found += resolution.ended(window, s, now_ms)
        _forget(s, now_ms)
    return found, s


def could_not_judge(window: Window) -> list[str]:
    """Return what is missing besides XIDs, which are events: the absence of events is not visible."""
    return [] if "recovery_action" in window.newest.gpu else ["recovery actions: the data lacks recovery_action"]


def restored(incidents: Sequence[Incident], _index: FleetIndex | None = None, _started_ms: int = 0) -> XidState:
    """Return state that can close `incidents`."""
    state = XidState()
    for incident in incidents:
        if NAME in incident.detectors and incident.closed_ms is None and incident.node is not None:
            where = (incident.node, incident.gpu)
            state.open[where] = Open(incident.severity, incident.kind, incident.cause, incident.updated_ms)
        elif incident.cause == "job_crash" and incident.closed_ms is None and incident.job is not None:
            code = int(incident.snapshot_of(NAME).get("code", 0))
            state.crashes[incident.job, code] = (incident.updated_ms, incident.members)
    return state


def _on_error(window: Window, s: XidState, event: Event, now_ms: int) -> list[Finding]:
    verdict = judge(event)
    if verdict is None:
        return []
    ts_ms = now_ms if event.clock_suspect else event.ts_ms
    key: Key = (event.node, event.gpu, verdict.code)
    bursts = s.bursts.setdefault(key, [])
    same_burst = bool(bursts) and ts_ms - bursts[-1][1] <= BURST_GAP_MS
    if same_burst:
        bursts[-1][1] = max(ts_ms, bursts[-1][1])
    else:
        bursts.append([ts_ms, ts_ms])
        del bursts[:-PER_KEY]
    if event.backlog or event.forgeable:
        return [] if same_burst else [_history(s, event, verdict, ts_ms)]
    if verdict.recovered:
        if (recovered := s.open.get((event.node, event.gpu))) is not None:
            recovered.back_ms = now_ms
        return []
    gpu_index = window.index.gpu(event.node, event.gpu) if event.gpu is not None else None
    job = window.job_of(gpu_index) if gpu_index is not None else None
    held = s.open.get((event.node, event.gpu))
    if held is not None:
        held.last_ms, held.back_ms = max(held.last_ms, ts_ms), None
        held.proven.clear()
    if same_burst and not verdict.app and held is not None and _rank(held.severity) >= _rank(verdict.severity):
        _note(s, Seen(ts_ms, event.node, event.gpu, verdict.code, job, verdict.severity))
        return []  # a burst is one observation, and its worst line was reported
    if verdict.severity is not Severity.CRITICAL or verdict.code in (74, 119, 120):
        if same_burst and 0 <= ts_ms - s.followed.get(key, -SAME_MS) < SAME_MS:
            return []
        cause = _cause_of(s, event, verdict, job, ts_ms)
        if cause is not None:
            s.followed[key] = ts_ms
            return [_follows(event, verdict, cause, ts_ms, job)]
    _note(s, Seen(ts_ms, event.node, event.gpu, verdict.code, job, verdict.severity))
    if verdict.app and job is not None:
        if not same_burst or (job, verdict.code) in s.crashes:
            s.pending.setdefault(key, (now_ms + HOLD_MS, event, job))
        return []
    if verdict.app:
        return [] if same_burst else [_app_fault(s, event, verdict, ts_ms, job)]
    return [_hardware_fault(s, event, verdict, ts_ms, job)]


def _history(s: XidState, event: Event, verdict: Verdict, ts_ms: int) -> Finding:
    """Return an old line, or one that users could have written, as information."""
    old = "over an hour old, or from before the agent's start, the node's boot or its return to service"
    why = old if event.backlog else "from a source that users can write to"
    plain = replace(
        verdict, severity=Severity.INFO, action=RecommendedAction.NONE, advice=f"Nothing to do: the line is {why}."
    )
    return _opened(s, event, plain, ts_ms, None, (_line(event, ts_ms),))


def _note(s: XidState, seen: Seen) -> None:
    if seen.severity is Severity.INFO:
        s.recent[seen.node, seen.gpu, seen.code] = seen
    else:
        s.causes.add(seen)


def _cause_of(s: XidState, event: Event, verdict: Verdict, job: str | None, ts_ms: int) -> Seen | None:
    """Return the worst recent line that may have caused this one: of its GPU, for some codes of its node or job."""
    causes = SYMPATHETIC.get(verdict.code, frozenset())
    named = previous_xid_from_message(event.message)
    if named is not None:
        causes |= {named}
    found: list[Seen] = []
    for seen in s.causes.near(event.node, job if verdict.app else None):
        close = seen.code in causes and abs(ts_ms - seen.ts_ms) <= ATTRIBUTE_MS
        same_gpu = close and (seen.node, seen.gpu) == (event.node, event.gpu)
        same_node = close and seen.node == event.node and verdict.code in (74, 145)
        # A program that loses one GPU fails on the others too, with any code.
        same_job = verdict.app and job is not None and seen.job == job and seen.severity is Severity.CRITICAL
        if same_gpu or same_node or same_job:
            found.append(seen)
    return max(found, key=lambda seen: (_rank(seen.severity), -seen.ts_ms), default=None)


def _follows(event: Event, verdict: Verdict, cause: Seen, ts_ms: int, job: str | None) -> Finding:
    """Return an XID as a consequence of another: evidence in that incident, without one of its own."""
    apart = duration(abs(ts_ms - cause.ts_ms))
    text = f"XID {verdict.code} on {place(event.node, event.gpu)} within {apart} is a consequence"
    return Finding(
        NAME, IncidentKind.XID, f"xid_{cause.code}", "gpu" if cause.gpu is not None else "node", cause.node, cause.gpu,
        ((cause.node, cause.gpu),), ts_ms, cause.ts_ms, Severity.INFO, 0.8, RecommendedAction.NONE,
        f"XID {verdict.code} is a consequence of XID {cause.code} on {place(cause.node, cause.gpu)}.",
        f"Nothing to do for this XID; see the advice for XID {cause.code}.", (Evidence(text, from_ms=ts_ms),), job,
    )  # fmt: skip


def _hardware_fault(s: XidState, event: Event, verdict: Verdict, ts_ms: int, job: str | None) -> Finding:
    evidence = [_line(event, ts_ms)]
    held = [(key, item) for key, item in islice(s.pending.items(), MOST_PENDING)]
    for key, item in [(key, item) for key, item in held if _explains(verdict.code, item, event, job)]:
        del s.pending[key]
        evidence.append(Evidence(f"XID {item[1].code} on {place(item[1].node, item[1].gpu)} is a consequence"))
    times = _bursts_today(s, (event.node, event.gpu, verdict.code), ts_ms)
    if times > 1:
        evidence.append(Evidence(f"{times} bursts of XID {verdict.code} on this GPU within 24 h"))
    if verdict.severity is Severity.CRITICAL and times >= FATAL_BURSTS:
        verdict = replace(
            verdict,
            advice="Drain the node and have the GPU repaired or replaced: it repeats so often that resets do not help.",
        )
    elif verdict.severity is Severity.WARNING and times >= APP_REPEATS and verdict.known:
        verdict = replace(
            verdict,
            action=RecommendedAction.PROBE,
            advice=f"Run diagnostics on the GPU: the XID repeats. {verdict.advice}",
        )
    return _opened(s, event, verdict, ts_ms, job, tuple(evidence))


def _explains(code: int, pending: tuple[int, Event, str], event: Event, job: str | None) -> bool:
    held = pending[1]
    near = (held.node, held.gpu) == (event.node, event.gpu) or (job is not None and pending[2] == job)
    return near and code in SYMPATHETIC.get(int(held.code), frozenset())


def _app_fault(s: XidState, event: Event, verdict: Verdict, ts_ms: int, job: str | None) -> Finding:
    """Return a program's fault on one GPU: information, until it repeats on the same GPU."""
    key = (event.node, event.gpu, verdict.code)
    faults = s.app_faults.setdefault(key, [])
    faults.append(ts_ms)
    del faults[:-PER_KEY]
    today = [ts for ts in faults if ts_ms - ts <= REPEAT_WINDOW_MS]
    evidence = [_line(event, ts_ms)]
    if verdict.code in DIAGNOSE_WHEN_REPEATED and len(today) >= APP_REPEATS:
        verdict = replace(
            verdict, severity=Severity.WARNING, action=RecommendedAction.PROBE, confidence=0.7,
            cause=f"xid_{verdict.code}_repeated",
            advice="Run diagnostics on the GPU: a bug in a program would fail on other GPUs too.",
        )  # fmt: skip
        evidence.append(Evidence(f"{len(today)} times within 24 h on this GPU, but not on the other GPUs of its jobs"))
    return _opened(s, event, verdict, ts_ms, job, tuple(evidence))


def _crashes(s: XidState, now_ms: int) -> list[Finding]:
    """Return one finding for each job whose programs failed the same way on many GPUs, and none for the nodes."""
    together: dict[tuple[str, int], list[Seen]] = {}
    for seen in s.recent.values():
        if seen.job is not None:
            together.setdefault((seen.job, seen.code), []).append(seen)
    found = []
    for (job, code), lines in together.items():
        members = tuple(sorted({(seen.node, seen.gpu) for seen in lines}, key=str))
        nodes = {node for node, _ in members}
        newest, before = s.crashes.get((job, code), (0, ()))
        known = set(members) <= set(before) and now_ms - newest <= QUIET_INFO_MS
        if len(members) < CRASH_GPUS or known:
            continue
        s.crashes[job, code] = (now_ms, members)
        since = min(seen.ts_ms for seen in lines)
        verdict = judge(Event("", since, "", None, EventKind.XID, str(code), ""))
        meaning = verdict.meaning if verdict else ""
        found.append(
            Finding(
                NAME, IncidentKind.XID, "job_crash", "job", None, None, members, now_ms, since, Severity.INFO, 0.9,
                RecommendedAction.NONE,
                f"Job {job} failed with XID {code} on {len(members)} GPUs of {_nodes(nodes)} at once. {meaning}",
                "Check the job's program and its log. The nodes are not at fault.",
                (Evidence(f"XID {code} on {listing(nodes)}", from_ms=since),), job, snapshot={"code": code},
            )
        )  # fmt: skip
    return found


def _due(s: XidState, now_ms: int) -> list[Finding]:
    due = {key: item for key, item in s.pending.items() if item[0] <= now_ms}
    if due:
        s.pending = {key: item for key, item in s.pending.items() if key not in due}
    found = []
    for _, event, job in due.values():
        verdict = judge(event)
        if verdict is None or (job, verdict.code) in s.crashes:
            continue
        fault = _app_fault(s, event, verdict, event.ts_ms, job)
        # The rank that failed first may have another code: part of the crash, unless this GPU repeats it.
        if fault.severity is not Severity.INFO or not any(crashed == job for crashed, _ in s.crashes):
            found.append(fault)
    return found


def _nodes(names: set[str]) -> str:
    return "1 node" if len(names) == 1 else f"{len(names)} nodes"


def _opened(
    s: XidState, event: Event, verdict: Verdict, ts_ms: int, job: str | None, evidence: tuple[Evidence, ...]
) -> Finding:
    where: Where = (event.node, event.gpu)
    held = s.open.get(where)
    if held is None or _rank(verdict.severity) >= _rank(held.severity):
        s.open[where] = Open(verdict.severity, verdict.kind, verdict.cause, max(ts_ms, held.last_ms if held else 0))
    label = "SXid" if event.kind is EventKind.SXID else "XID"
    serious = verdict.severity is Severity.CRITICAL
    return Finding(
        NAME, verdict.kind, verdict.cause, "gpu" if event.gpu is not None else "node", event.node, event.gpu, (where,),
        ts_ms, ts_ms, verdict.severity, verdict.confidence, verdict.action,
        f"{label} {verdict.code} on {place(event.node, event.gpu)}: {verdict.meaning}", verdict.advice, evidence, job,
        lost_gpus=1.0 if serious and event.gpu is not None else None,
    )  # fmt: skip


def _recovery_actions(window: Window, s: XidState, now_ms: int) -> list[Finding]:
    """Return findings for the metric recovery_action, in case the line of XID 154 was lost."""
    requested = window.newest.gpu.get("recovery_action")
    if requested is None:
        return []
    found = []
    for g in np.flatnonzero(requested > 0):
        node, gpu = window.index.member(int(g))
        held = s.open.get((node, gpu))
        if held is not None and held.severity is Severity.CRITICAL:
            held.last_ms = now_ms
            continue
        number = int(requested[g])
        known = number < len(RECOVERY_ACTIONS)
        words = RECOVERY_ACTIONS[number] if known else f"do action {number}, which Drover does not know"
        # The same severity as RECOVERY_SEVERITY gives in XID 154.
        serious = known and RECOVERY_ACTIONS[number] != "drain P2P"
        event = Event("", window.newest.start_ms, node, gpu, EventKind.XID, str(RECOVERY_CODE), "")
        verdict = Verdict(
            RECOVERY_CODE, IncidentKind.XID, "recovery_action", Severity.CRITICAL if serious else Severity.WARNING,
            RecommendedAction.DRAIN if serious else RecommendedAction.WATCH, 0.95, f"The driver asks to {words}.",
            f"{'Drain the node, then do' if serious else 'Do'} what the driver asks for: {words}.",
        )  # fmt: skip
        evidence = (Evidence(f"the driver's recovery action is: {words}", "recovery_action", float(number), 0.0),)
        found.append(
            replace(
                _opened(s, event, verdict, window.newest.end_ms, window.job_of(int(g)), evidence),
                summary=f"The driver of {place(node, gpu)} asks to {words}.",
            )
        )
    return found


def _bursts_today(s: XidState, key: Key, ts_ms: int) -> int:
    return sum(1 for _, last in s.bursts.get(key, []) if ts_ms - last <= REPEAT_WINDOW_MS)


def _forget(s: XidState, now_ms: int) -> None:
    for key in [key for key, bursts in s.bursts.items() if now_ms - bursts[-1][1] > REPEAT_WINDOW_MS]:
        del s.bursts[key]
    s.followed = {key: ts_ms for key, ts_ms in s.followed.items() if now_ms - ts_ms <= ATTRIBUTE_MS}
    for key in [key for key, faults in s.app_faults.items() if now_ms - faults[-1] > REPEAT_WINDOW_MS]:
        del s.app_faults[key]
    for key in list(s.bursts)[: max(0, len(s.bursts) - MAX_KEYS)]:
        del s.bursts[key]
    for key in list(s.app_faults)[: max(0, len(s.app_faults) - MAX_KEYS)]:
        del s.app_faults[key]


def _rank(severity: Severity) -> int:
    return SEVERITY_ORDER.index(severity)


def _line(event: Event, ts_ms: int) -> Evidence:
    times = f" ({event.count} times)" if event.count > 1 else ""
    return Evidence(f"{event.source or 'log'}: {event.message or event.code}{times}", from_ms=ts_ms, to_ms=ts_ms)


def _xid(number: int, code: int, node: str, gpu: int) -> Event:
    ts_ms = START_MS + number * 1000
    return Event(f"e{number}", ts_ms, node, gpu, EventKind.XID, str(code), f"NVRM: Xid (PCI:0000:3b:00): {code}, ...")


EXAMPLES = (
    Example(
        "a program crashes on eight nodes at once: one finding for the job, none for the nodes",
        lambda: play(small_fleet(), 4, events={1: [_xid(20 + n, 31, f"n{n:02d}", 3) for n in range(8)]}),
        frozenset({("xid", "job_crash", "job", "info")}),
    ),
    Example(
        "a GPU falls off the bus, and the other GPUs of its job are stopped",
        lambda: play(
            small_fleet(), 4, events={1: [_xid(20, 79, "n03", 5)] + [_xid(21, 45, f"n{n:02d}", 0) for n in range(8)]}
        ),
        frozenset({("xid", "xid_79", "gpu", "critical"), ("xid", "xid_79", "gpu", "info")}),
    ),
)

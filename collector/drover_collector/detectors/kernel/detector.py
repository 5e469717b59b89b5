"""Judge the kernel log other than XIDs, and the host's sensors: PCIe, memory, CPU, drives, adapters, fans, room.

Lines wait HOLD_MS: if many nodes log the same, the cause is common (a job, a shared file system, a room) and no node is
at fault; a PCIe error near a GPU that falls off the bus belongs to that GPU. rules.py has the meaning of each line.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np

from drover_collector.detectors._lib.examples import (
    START_MS,
    Example,
    play,
    small_fleet,
)
from drover_collector.detectors._lib.robust import Bools
from drover_collector.detectors._lib.texts import duration, listing, place
from drover_collector.detectors._lib.window import Window
from drover_collector.detectors.kernel.fans import Fans
from drover_collector.detectors.kernel.rules import Rule, rule_of
from drover_collector.detectors.kernel.shortage import Held, Shortage, Shortages, evidence
from drover_collector.fleet.buckets import Floats
from drover_collector.fleet.index import FleetIndex
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

NAME = "kernel"
VERSION = 1
QUIET_MS = 3_600_000  # without a further line, as for an XID that is a warning

HOLD_MS = 10_000  # as for application faults in xid
TOGETHER_MS = 300_000  # the same line from many nodes within this time has a common cause
TOGETHER_SHARE, TOGETHER_LEAST = 0.1, 3  # of all nodes or of a job's, and nodes at least; as for ports in links
ATTRIBUTE_MS = 60_000  # a PCIe error within this time of a GPU's loss is attributed to it; as in xid
AGAIN_MS = 300_000  # between two findings on a condition that lasts
COUNT_MS = 3_600_000  # in which lines of a rule count
FALLS_OFF = "79"  # XID of a GPU that has fallen off the bus

CORRECTED_PER_S = 15.0  # host memory; above it Linux 3.5 to 6.7 disabled interrupts for corrected errors (mce/intel.c)
AER_PER_S = 2.0  # Linux 6.16 calls more than 10 in 5 s too many to print (pci/pcie/aer.c)
STORM_BUCKETS = 3
FANS_HELD_MS = 120_000  # a BMC is read once a minute: a second reading must agree
FANS_SLOW_MS = 600_000  # for fans that turn: after a pause of a job they need minutes to follow the heat

COUNTERS = {"edac_corrected": CORRECTED_PER_S, "pcie_aer_correctable": AER_PER_S}
JUDGED = (
    "fans_failed", "fan_min_rpm", "edac_uncorrected", "root_used_ratio", "memory_available_bytes", *COUNTERS,
)  # fmt: skip
Key = tuple[str, int | None, str]  # node, GPU, cause
K = TypeVar("K", str, int)


@dataclass(slots=True)
class Line:
    """Lines of one cause on one device that wait for HOLD_MS."""

    rule: Rule
    event: Event
    ts_ms: int
    count: int
    due_ms: int


@dataclass(slots=True)
class KernelState:
    """State, bounded by nodes, GPUs and causes."""

    held: dict[Key, Line] = field(default_factory=dict)
    reported: dict[Key, tuple[int, Severity]] = field(default_factory=dict)  # newest finding
    lines: dict[Key, list[tuple[int, int]]] = field(default_factory=dict)  # (when, how many), for rules that count
    nodes: dict[str, dict[str, int]] = field(default_factory=dict)  # cause -> node -> newest line
    lost: dict[str, dict[int, int]] = field(default_factory=dict)  # node -> GPU -> when it fell off the bus
    storms: dict[str, Floats] = field(default_factory=dict)  # counter -> buckets in a row, [N]
    uncorrected: Floats = field(default_factory=lambda: np.zeros(0))  # newest known edac_uncorrected, [N]
    fans: Held = field(default_factory=Held)  # fans that failed, stand still or turn too slowly
    speeds: Fans = field(default_factory=Fans)
    shortages: Shortages = field(default_factory=Shortages)


def detect(window: Window, state: KernelState | None, now_ms: int) -> tuple[list[Finding], KernelState]:
    s = state if state is not None else KernelState()
    for event in window.events:
        _take(window, s, event, now_ms)
    found = list(_due(window, s, now_ms))
    if window.fresh:
        found += _storms(window, s, now_ms)
        found += _uncorrected(window, s, now_ms)
        found += _fans(window, s, now_ms)
        found += _shortages(window, s, now_ms)
        _forget(s, now_ms)
    return found, s


def restored(incidents: Sequence[Incident], _index: FleetIndex | None = None, _started_ms: int = 0) -> KernelState:
    """Return state that knows the usual speed of slow fans; all else that still holds is reported again."""
    known = {
        i.node: e.expected
        for i in incidents
        if i.closed_ms is None and i.node is not None
        for e in i.evidence
        if e.metric == "fan_min_rpm" and e.expected
    }
    return KernelState(speeds=Fans(reopened=known))


def could_not_judge(window: Window) -> list[str]:
    lacking = [name for name in JUDGED if name not in window.newest.node]
    return [f"fans, host memory, room and PCIe errors: the data lacks {', '.join(lacking)}"] if lacking else []


def _take(window: Window, s: KernelState, event: Event, now_ms: int) -> None:
    if event.node not in window.index.node_number or event.backlog or event.forgeable:
        return  # an old line, or one that users can write: stored and shown only
    ts_ms = now_ms if event.clock_suspect else min(event.ts_ms, now_ms)
    falls = event.kind is EventKind.XID and event.code == FALLS_OFF
    if event.gpu is not None and (falls or (event.kind is EventKind.LIFECYCLE and event.code == "gpu_lost")):
        s.lost.setdefault(event.node, {})[event.gpu] = ts_ms
    if event.kind is not EventKind.KERNEL or (rule := rule_of(event)) is None:
        return
    known = event.gpu is not None and window.index.gpu(event.node, event.gpu) is not None
    key = (event.node, event.gpu if known else None, rule.cause)
    if rule.least > 1:
        rule = _counted(s, key, rule, event.count, ts_ms)
    s.nodes.setdefault(rule.cause, {})[event.node] = now_ms
    held = s.held.get(key)
    if held is None:
        s.held[key] = Line(rule, event, ts_ms, event.count, now_ms + HOLD_MS)
    else:
        held.count += event.count
        if _rank(rule.severity) > _rank(held.rule.severity):
            held.rule, held.event = rule, event


def _counted(s: KernelState, key: Key, rule: Rule, count: int, ts_ms: int) -> Rule:
    """Return the rule, as information until enough lines were counted."""
    lines = [(at, n) for at, n in s.lines.get(key, []) if ts_ms - at <= COUNT_MS][-rule.least :]
    s.lines[key] = [*lines, (ts_ms, count)]
    enough = sum(n for _, n in s.lines[key]) >= rule.least
    return rule if enough else replace(rule, severity=Severity.INFO, action=RecommendedAction.NONE)


def _due(window: Window, s: KernelState, now_ms: int) -> Iterator[Finding]:
    due = {key: line for key, line in s.held.items() if line.due_ms <= now_ms}
    jobs: dict[tuple[str, str], list[Line]] = defaultdict(list)  # (cause, job) -> lines
    many: dict[str, Counter[str | None]] = {}
    for key, line in due.items():
        del s.held[key]
        node, gpu, cause = key
        severity = line.rule.severity
        if (owner := _owner(s, line)) is not None:
            yield _attributed(line, owner, now_ms)
            continue
        if cause not in many:
            many[cause] = _by_job(window, s, cause, now_ms)
        job = _job(window, node)
        together = _together(window, many[cause], job)
        if together and severity is not Severity.INFO:
            severity = Severity.INFO
        if not _is_new(s, key, severity, now_ms):
            continue
        if together and job is not None:
            jobs[cause, job].append(line)
        else:
            yield _of_line(line, node, gpu, severity, together, job, now_ms)
    for (_, job), lines in jobs.items():
        yield _of_job(lines, job, now_ms)


def _is_new(s: KernelState, key: Key, severity: Severity, now_ms: int) -> bool:
    """Return True, and note it, if no finding of the same or a higher severity was reported within AGAIN_MS."""
    at_ms, before = s.reported.get(key, (now_ms - AGAIN_MS, severity))
    if now_ms - at_ms < AGAIN_MS and _rank(severity) <= _rank(before):
        return False
    s.reported[key] = now_ms, severity
    return True


def _owner(s: KernelState, line: Line) -> int | None:
    """Return the GPU that fell off the bus near the time of a PCIe error."""
    if line.rule.cause not in ("pcie_fatal", "pcie_uncorrected", "pcie_slot", "pcie_device"):
        return None
    lost = s.lost.get(line.event.node, {})
    near = [gpu for gpu, ts_ms in lost.items() if abs(line.ts_ms - ts_ms) <= ATTRIBUTE_MS]
    return line.event.gpu if line.event.gpu in near else near[0] if line.event.gpu is None and len(near) == 1 else None


def _by_job(window: Window, s: KernelState, cause: str, now_ms: int) -> Counter[str | None]:
    """Count the nodes with the same cause now, by their job."""
    return Counter(
        _job(window, node) for node, at_ms in s.nodes.get(cause, {}).items() if now_ms - at_ms <= TOGETHER_MS
    )


def _together(window: Window, nodes: Counter[str | None], job: str | None) -> int:
    """Return how many nodes of the fleet or of the job share the cause; 0 if they are few."""
    if nodes.total() >= max(TOGETHER_LEAST, TOGETHER_SHARE * window.index.node_count):
        return nodes.total()
    return nodes[job] if job is not None and nodes[job] >= TOGETHER_LEAST else 0


def _job(window: Window, node: str) -> str | None:
    """Return the only job of a node; None if there is none or more than one."""
    n = window.index.node_number[node]
    first, end = (int(window.index.first_gpu[at]) for at in (n, n + 1))
    jobs = {window.job_of(g) for g in range(first, end)}
    return jobs.pop() if len(jobs) == 1 else None


def _of_line(
    line: Line, node: str, gpu: int | None, severity: Severity, together: int, job: str | None, now_ms: int
) -> Finding:
    rule, evidence = line.rule, [_evidence(line)]
    if together:
        evidence.append(
            Evidence(f"{together} nodes log the same within {duration(TOGETHER_MS)}: the cause is not this node")
        )
    times = f", {line.count} lines" if line.count > 1 else ""
    return Finding(
        NAME, rule.kind, rule.cause, "node" if gpu is None else "gpu", node, gpu, ((node, gpu),), now_ms, line.ts_ms,
        severity, 0.9 if severity is Severity.CRITICAL else 0.8,
        RecommendedAction.NONE if severity is Severity.INFO else rule.action,
        f"{_upper(place(node, gpu))}: {rule.what}{times}.", rule.advice, tuple(evidence), job,
    )  # fmt: skip


def _of_job(lines: list[Line], job: str, now_ms: int) -> Finding:
    """Return one finding for a job whose nodes log the same at once, instead of one for each node."""
    rule, nodes = lines[0].rule, sorted({line.event.node for line in lines})
    return Finding(
        NAME, rule.kind, rule.cause, "job", None, None, tuple((node, None) for node in nodes), now_ms,
        min(line.ts_ms for line in lines), Severity.INFO, 0.8, RecommendedAction.NONE,
        f"Job {job}: {rule.what} on {listing(nodes)} at once.",
        "Check the job and what its nodes share. No single node is at fault.", (_evidence(lines[0]),), job,
    )  # fmt: skip


def _attributed(line: Line, gpu: int, now_ms: int) -> Finding:
    """Return a line as evidence for the incident of the GPU that fell off the bus."""
    node = line.event.node
    return Finding(
        NAME, IncidentKind.LINK, line.rule.cause, "gpu", node, gpu, ((node, gpu),), now_ms, line.ts_ms, Severity.INFO,
        0.8, RecommendedAction.NONE, f"{_upper(place(node, gpu))}: {line.rule.what} when it fell off the bus.",
        "See the advice for the lost GPU; check its board, riser and power for the cause.", (_evidence(line),),
    )  # fmt: skip


def _evidence(line: Line) -> Evidence:
    times = f" ({line.count} lines)" if line.count > 1 else ""
    return Evidence(f"{line.event.source or 'log'}: {line.event.message or line.event.code}{times}", from_ms=line.ts_ms)


def _storms(window: Window, s: KernelState, now_ms: int) -> Iterator[Finding]:
    """Report high rates of corrected errors: worn memory slows the node; PCIe devices may still be healthy."""
    first, last = window.buckets[0], window.buckets[-1]
    for counter, limit in COUNTERS.items():
        before, now = first.node.get(counter), last.node.get(counter)
        if before is None or now is None or last is first:
            continue
        rate = (now - before) / ((last.end_ms - first.end_ms) / 1000)  # NaN where unknown
        streak = s.storms.get(counter, np.zeros(len(rate)))
        s.storms[counter] = streak = np.where(rate >= limit, streak + 1, 0)
        common = np.count_nonzero(streak) >= max(TOGETHER_LEAST, TOGETHER_SHARE * window.index.node_count)
        memory = counter == "edac_corrected"
        for n in np.flatnonzero(streak >= STORM_BUCKETS).tolist():
            key = (window.index.nodes[n].name, None, counter)
            severity = Severity.WARNING if memory and not common else Severity.INFO
            if not _is_new(s, key, severity, now_ms):
                continue
            text = f"{rate[n]:.0f} corrected errors of {'host memory' if memory else 'PCIe devices'} per second"
            seen = Evidence(
                f"{text} over {duration(last.end_ms - first.end_ms)}", counter, float(now[n]), from_ms=first.end_ms,
                to_ms=last.end_ms,
            )  # fmt: skip
            yield Finding(
                NAME, IncidentKind.MEMORY if memory else IncidentKind.LINK,
                "host_memory_corrected" if memory else "pcie_corrected", "node", key[0], None, ((key[0], None),),
                now_ms, first.end_ms, severity, 0.8,
                RecommendedAction.ADVISE if severity is Severity.WARNING else RecommendedAction.NONE,
                f"Node {key[0]}: {text}.",
                "Find the memory module in the BMC's event log and replace it when the node is free."
                if memory
                else "Find the device in the kernel log (AER). Reseat it if it is slower than its peers.",
                (seen,),
            )  # fmt: skip


def _uncorrected(window: Window, s: KernelState, now_ms: int) -> Iterator[Finding]:
    """Report uncorrected errors from the counter, in case the line in the kernel log was lost."""
    now = window.newest.node.get("edac_uncorrected")
    if now is None:
        return
    last = s.uncorrected if len(s.uncorrected) == len(now) else np.full(len(now), np.nan)
    s.uncorrected = np.where(np.isnan(now), last, now)
    for n in np.flatnonzero(now > last).tolist():
        node = window.index.nodes[n].name
        key = (node, None, "host_memory")
        if key in s.held or not _is_new(s, key, Severity.WARNING, now_ms):
            continue
        more = Evidence(
            f"{now[n] - last[n]:.0f} more uncorrected errors of host memory", "edac_uncorrected", float(now[n]),
            float(last[n]), from_ms=window.newest.start_ms, to_ms=window.newest.end_ms,
        )  # fmt: skip
        yield Finding(
            NAME, IncidentKind.MEMORY, "host_memory", "node", node, None, ((node, None),), now_ms,
            window.newest.start_ms, Severity.WARNING, 0.8, RecommendedAction.ADVISE, f"Node {node}: {more.text}.",
            "Give the node no new long job. Find the memory module in the BMC's event log and replace it.", (more,),
        )  # fmt: skip


def _fans(window: Window, s: KernelState, now_ms: int) -> Iterator[Finding]:
    """Report bad fans. If many nodes have them, it is how they are built, read or set, and not reported."""
    slow, expected = s.speeds.bad(window)
    failed = window.newest.node.get("fans_failed", np.full(len(slow), np.nan))
    s.fans.read(window, np.fmax(failed, slow))
    failing = s.fans.value > 0
    slow_only = (slow == 1) & (window.newest.node.get("fan_min_rpm", slow) > 0) & ~(failed > 0)
    held = s.fans.hold(window, failing, np.where(slow_only, FANS_SLOW_MS, FANS_HELD_MS))
    if np.count_nonzero(failing) >= max(TOGETHER_LEAST, TOGETHER_SHARE * np.count_nonzero(~np.isnan(s.fans.value))):
        return
    for n in np.flatnonzero(held).tolist():
        node, count = window.index.nodes[n].name, int(s.fans.value[n])
        key = (node, None, "fan")
        if not _is_new(s, key, Severity.WARNING, now_ms):
            continue
        since = int(s.fans.since_ms[n])
        if slow[n] == 1:
            rpm, usual = float(s.speeds.speed.value[n]), float(expected[n])
            text = f"a fan turns at {rpm:,.0f} rpm; with such heat {usual:,.0f} or more is usual"
            text = text if rpm > 0 else "a fan stands still"
            least = None if np.isnan(usual) else usual
            seen = Evidence(text, "fan_min_rpm", rpm, least, None, None, since, window.newest.end_ms)
        else:
            text = f"{'a fan has' if count == 1 else f'{count} fans have'} failed, as its board reports"
            seen = Evidence(text, "fans_failed", float(count), 0.0, None, None, since, window.newest.end_ms)
        yield Finding(
            NAME, IncidentKind.THERMAL, "fan", "node", node, None, ((node, None),), now_ms, since, Severity.WARNING,
            0.85, RecommendedAction.ADVISE, f"Node {node}: {seen.text}.",
            "Replace the fan. Give the node no new long job if its GPUs get warmer.", (seen,),
        )  # fmt: skip


def _shortages(window: Window, s: KernelState, now_ms: int) -> Iterator[Finding]:
    """Report nodes that run out of room or of memory."""
    for shortage, short, held in s.shortages.short(window):
        common = np.count_nonzero(short) >= max(TOGETHER_LEAST, TOGETHER_SHARE * window.index.node_count)
        if common:
            yield from _short_everywhere(window, s, shortage, short, held, now_ms)
            continue
        for n in np.flatnonzero(short).tolist():
            node = window.index.nodes[n].name
            if not _is_new(s, (node, None, shortage.cause), shortage.severity, now_ms):
                continue
            seen = evidence(shortage, held, n, window.newest.end_ms)
            yield Finding(
                NAME, shortage.kind, shortage.cause, "node", node, None, ((node, None),), now_ms,
                int(held.since_ms[n]), shortage.severity, 0.9, shortage.action,
                f"Node {node}: {seen.text}.", shortage.advice, (seen,),
            )  # fmt: skip


def _short_everywhere(
    window: Window, s: KernelState, shortage: Shortage, short: Bools, held: Held, now_ms: int
) -> Iterator[Finding]:
    """Report once what many nodes run short of: it is their job or their image."""
    nodes = np.flatnonzero(short)
    names = [window.index.nodes[n].name for n in nodes.tolist()]
    if not _is_new(s, ("", None, f"{shortage.cause}_common"), Severity.INFO, now_ms):
        return
    worst = nodes[int(np.argmax(np.abs(held.value[nodes] - shortage.limit)))]
    seen, since_ms = evidence(shortage, held, int(worst), window.newest.end_ms), int(held.since_ms[nodes].min())
    yield Finding(
        NAME, shortage.kind, f"{shortage.cause}_common", "rack", None, None, tuple((name, None) for name in names),
        now_ms, since_ms, Severity.INFO, 0.9, RecommendedAction.NONE,
        f"{len(names)} nodes at once, {listing(names)}; at the worst {seen.text}.", shortage.advice, (seen,),
    )  # fmt: skip


def _forget(s: KernelState, now_ms: int) -> None:
    s.reported = {key: newest for key, newest in s.reported.items() if now_ms - newest[0] <= AGAIN_MS}
    s.lines = {key: lines for key, lines in s.lines.items() if now_ms - lines[-1][0] <= COUNT_MS}
    s.nodes = _fresh(s.nodes, now_ms - TOGETHER_MS)
    s.lost = _fresh(s.lost, now_ms - 2 * ATTRIBUTE_MS)


def _fresh(known: dict[str, dict[K, int]], from_ms: int) -> dict[str, dict[K, int]]:
    kept = {name: {key: ms for key, ms in seen.items() if ms >= from_ms} for name, seen in known.items()}
    return {name: seen for name, seen in kept.items() if seen}


def _rank(severity: Severity) -> int:
    return SEVERITY_ORDER.index(severity)


def _upper(text: str) -> str:
    return text[:1].upper() + text[1:]


def _event(second: int, code: str, message: str, node: str = "n02", gpu: int | None = None) -> Event:
    ts_ms = START_MS + second * 1000
    return Event(f"{node}/{code}/{second}", ts_ms, node, gpu, EventKind.KERNEL, code, message, "kmsg")


def _fan_fails(number: int, _gpu: dict[str, Floats], node: dict[str, Floats]) -> None:
    node["fans_failed"] = np.zeros(len(node["inlet_temp_c"]))
    node["fans_failed"][3] = number >= 2


def _fan_stops(number: int, _gpu: dict[str, Floats], node: dict[str, Floats]) -> None:
    node["fan_min_rpm"] = np.full(len(node["inlet_temp_c"]), 6100.0)
    node["fan_min_rpm"][3] = 0.0 if number >= 2 else 6100.0


def _fans_rest(number: int, _gpu: dict[str, Floats], node: dict[str, Floats]) -> None:
    """All fans rest at once, as a controller lets them; one board never reads its fan."""
    node["fan_min_rpm"] = np.full(len(node["inlet_temp_c"]), 0.0 if number >= 4 else 900.0)
    node["fan_min_rpm"][3] = np.nan


_OOM = "Memory cgroup out of memory: Killed process 51807 (python) total-vm:412192kB"
_FATAL = "pcieport 0000:3a:02.0: AER: Uncorrected (Fatal) error received: 0000:3b:00.0"
EXAMPLES = (
    Example(
        "a log with lines of healthy nodes",
        lambda: play(small_fleet(), 6, events={2: [
            _event(27, "nic_link", "mlx5_core 0000:29:00.0 ens6f0np0: Link down"),
            _event(27, "aer", "pcieport 0000:3a:02.0: AER: Corrected error received: 0000:3b:00.0", gpu=0),
            _event(27, "mce", "mce: [Hardware Error]: Machine check events logged"),
            _event(27, "edac", "EDAC MC2: 1 CE memory read error on CPU_SrcID#0_MC#2_Chan#0_DIMM#0"),
        ]}),
        frozenset(),
    ),
    Example(
        "a job that uses all memory of its nodes: one finding for the job",
        lambda: play(small_fleet(), 6, events={2: [_event(27, "oom", _OOM, f"n{n:02d}") for n in range(8)]}),
        frozenset({("memory", "oom", "job", "info")}),
    ),
    Example(
        "a fatal PCIe error of a GPU",
        lambda: play(small_fleet(), 6, events={2: [_event(27, "aer", _FATAL, gpu=0)]}),
        frozenset({("link", "pcie_fatal", "gpu", "warning")}),
    ),
    Example(
        "a fan fails permanently",
        lambda: play(small_fleet(), 18, _fan_fails),
        frozenset({("thermal", "fan", "node", "warning")}),
    ),
    Example(
        "a fan stands still, and its board says nothing",
        lambda: play(small_fleet(), 18, _fan_stops),
        frozenset({("thermal", "fan", "node", "warning")}),
    ),
    Example("all fans rest at once", lambda: play(small_fleet(), 20, _fans_rest), frozenset()),
)  # fmt: skip

"""The parts of the System page: agents, ingest, detection, store, notifiers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import streamlit as st

from drover_dashboard import client
from drover_dashboard.widgets import format as fmt
from drover_dashboard.widgets import view
from drover_dashboard.widgets.table import (
    Cell,
    Column,
    Mark,
    Row,
    table,
)
from drover_proto import fleet_pb2 as pb

ROLES = {
    "active": "active: it detects and notifies",
    "standby": "standby: it takes in and answers; another one detects",
    "ingest": "ingest: it takes in and answers, and never detects",
}
# Kinds of trouble with agents: the word, what it means, how bad (a badge of the tables).
KINDS = {
    "silent": ("silent", "critical"),
    "never": ("never came", "warning"),
    "lag": ("behind", "warning"),
    "refused": ("refused", "warning"),
    "rival": ("two claim it", "warning"),
    "clock": ("wrong clock", "warning"),
    "spool": ("spool fills", "info"),
    "source": ("sources fail", "warning"),
    "unknown": ("not in fleet.toml", "info"),
}
LISTED_PX = 260
TABLES_PX = 300
FOREVER_DAYS = 36_500
LATE_TICKS = 3  # a bucket is judged every 10 s, some seconds after its end
NEAR_S = 0.5  # as far as a clock may be off before it is marked; detectors call 5 s wrong
FULL_RATIO = 0.5


def tiles(system: pb.System, who: view.Viewer) -> None:
    """The numbers that say whether Drover is well; each says what it is of."""
    agents, detection, store = system.agents, system.detection, system.store
    waiting = sum(n.pending for n in system.notifiers)
    failing = sum(bool(n.trouble) for n in system.notifiers)
    of_tick = f"newest ended {who.ago(detection.newest_tick_ms)} ago"
    shown = (
        ("Agents reporting", fmt.number(agents.reporting), f"of {fmt.number(agents.expected)} nodes"),
        ("Samples per second", fmt.number(system.ingest.samples_per_s), f"{fmt.size(system.ingest.bytes_per_s)}/s"),
        (
            "Judging a bucket takes",
            f"{detection.tick_s:.2f} s" if detection.newest_tick_ms else "not by this one",
            of_tick if detection.newest_tick_ms else detection.role,
        ),
        ("Store", fmt.size(store.bytes) if store.answers else "does not answer", _left(store)),
        (
            "Messages waiting",
            fmt.number(waiting),
            f"receivers failing: {failing}" if system.notifiers else "no receiver",
        ),
        (
            "Worst clock",
            f"{agents.clock_worst_s:+.3f} s" if agents.HasField("clock_worst_s") else "not reported",
            "off the collector's",
        ),
    )
    view.tiles("system", shown)


def away(known: client.Answer[pb.Status], who: view.Viewer) -> None:
    """What to do where the collector does not answer: its unit, host and log, what was known last, the run book."""
    last, target = known.value, client.fleet().target
    facts = [
        ("Where", Cell(target, sub="its Fleet API, as this console was started with --collector")),
        ("Unit", Cell("systemctl status drover-collector", kind="mono")),
        ("Log", Cell("journalctl -u drover-collector -n 100", kind="mono")),
        (
            "Run book",
            Cell("drover runbook DroverCollectorDown", kind="mono", sub="or docs/runbooks/DroverCollectorDown.md"),
        ),
    ]
    state = "this console has not had an answer since its start"
    if last is not None:
        state = (
            f"{fmt.number(last.nodes_reporting)} of {fmt.number(last.nodes_expected)} nodes reported,"
            f" {fmt.number(sum(last.open_incidents_by_severity.values()))} incidents open, version {last.version}"
        )
    facts.append(("Last known", Cell(state, sub=f"at {who.clock(known.as_of_ms)}" if last is not None else "")))
    _facts("away", "What to look at", facts)


def _left(store: pb.StoreState) -> str:
    if not store.answers:
        return "sizes not known"
    if not store.HasField("days_left"):
        return "too young to say for how long"
    if store.days_left >= FOREVER_DAYS:
        return "room for all that is kept"
    return f"full in {fmt.duration(store.days_left * 86_400_000)}"


def agents(system: pb.System, who: view.Viewer) -> None:
    state = system.agents
    lag = "not known"
    if state.HasField("lag_median_s"):
        lag = f"median {state.lag_median_s:.1f} s, worst {state.lag_max_s:.1f} s"
    versions = (
        ", ".join(f"{v.version or 'not reported'}: {fmt.number(v.nodes)}" for v in state.versions) or "none is known"
    )
    ours = {v.version for v in state.versions} - {system.version, ""}
    facts = [
        ("Connected now", Cell(f"{fmt.number(state.connected)} agents")),
        ("Versions, nodes", Cell(versions, sub=f"this collector is {system.version}" if ours else "")),
        ("Age of newest samples", Cell(lag, title="of nodes that report")),
    ]
    _facts("agent_facts", "Agents", facts)
    rows = [
        Row(
            (
                Cell(KINDS.get(t.kind, (t.kind, "info"))[0], badge=KINDS.get(t.kind, (t.kind, "info"))[1]),
                Cell(t.node, kind="strong"),
                Cell(who.localize(t.text), sub=who.since(t.since_ms) if t.since_ms else ""),
            ),
            id=t.node,
            href="" if t.kind == "unknown" else view.href(view.NODE, node=t.node),
        )
        for t in state.troubles
    ]
    columns = (Column("Trouble"), Column("Node"), Column("What", wrap=True))
    empty = "Every node of the fleet file reports, in time and with a right clock."
    height = LISTED_PX if len(rows) > 4 else None
    clicked = table("agent_troubles", columns, rows, empty=empty, link_column=1, height=height)
    if clicked:
        st.switch_page(view.NODE, query_params={"node": clicked})
    with view.place():
        _more(state, len(rows))


def _more(state: pb.AgentsState, shown: int) -> None:
    total = sum(state.trouble_counts.values())
    if total > shown:
        counts = ", ".join(
            f"{KINDS.get(k, (k, ''))[0]} {fmt.number(n)}" for k, n in sorted(state.trouble_counts.items())
        )
        view.notice("agents_more", "remark", f"{shown} of {fmt.number(total)} shown: {counts}")


def _facts(key: str, title: str, facts: Iterable[tuple[str, Cell]]) -> None:
    rows = [Row((Cell(name, kind="faint"), cell)) for name, cell in facts]
    table(key, (Column(title), Column(wrap=True)), rows, empty="")


def ingest(state: pb.IngestState) -> None:
    used = state.waiting_bytes / state.waiting_limit_bytes if state.waiting_limit_bytes else 0.0
    full = Mark(f"{used:.0%} of the room", "bad" if used > FULL_RATIO else "warn") if used > FULL_RATIO / 5 else None
    facts = [
        ("Per second", Cell(
            f"{fmt.number(state.samples_per_s)} samples, {fmt.number(state.batches_per_s, 1)} batches,"
            f" {fmt.number(state.records_per_s, 1)} events and records, {fmt.size(state.bytes_per_s)}"
        )),
        ("Taken in, not stored yet", Cell(fmt.size(state.waiting_bytes), mark=full)),
        ("Refused data", _counts(state.rejected)),
        ("Values that cannot be true", _counts(state.out_of_range)),
        ("Refused calls", _counts(state.calls_refused)),
        ("Backpressure", Cell(
            f"{fmt.number(state.left_with_agents)} left with agents, {fmt.number(state.backoffs)} asked to wait,"
            f" {fmt.number(state.slowed)} read later",
            title="messages, as the store failed; agents, as too much waited; agents that sent more than their share",
        )),
        ("Writes that the store refused", _warned(state.store_failures)),
    ]  # fmt: skip
    if state.unstored_events:
        facts.append(("Events judged, not stored", _warned(state.unstored_events)))
    _facts("ingest", "Ingest since the start", facts)


def _counts(counts: Mapping[str, int]) -> Cell:
    sorted_counts = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    text = ", ".join(f"{name} {fmt.number(count)}" for name, count in sorted_counts)
    return Cell(text) if text else Cell("none", kind="faint")


def _warned(count: int) -> Cell:
    return Cell(fmt.number(count), mark=Mark("see the log", "warn")) if count else Cell("none", kind="faint")


def detection(system: pb.System, who: view.Viewer) -> None:
    state = system.detection
    role = Cell(ROLES.get(state.role, state.role or "not reported"), sub=_lease(state))
    late_ms = system.ts_ms - state.newest_tick_ms
    late = state.role == "active" and state.newest_tick_ms and late_ms > LATE_TICKS * 1000 * max(state.interval_s, 1)
    newest = "nothing judged yet" if state.role == "active" else "not by this collector"
    if state.newest_tick_ms:
        newest = f"bucket that ended {who.clock(state.newest_tick_ms)}, {who.ago(state.newest_tick_ms)} ago"
    facts = [
        ("Role", role),
        ("Newest", Cell(newest, mark=Mark("late", "bad") if late else None)),
        ("A tick on average", Cell(
            f"read {state.read_s:.2f} s, judge {state.judge_s:.2f} s, rollups {state.rollup_s:.2f} s"
            if state.ticks else "none yet",
            sub=f"{fmt.number(state.ticks)} judged, {fmt.number(state.skipped)} left out,"
            f" {fmt.number(state.failures)} failed",
        )),
        ("Waiting", Cell(
            f"{fmt.several(state.events_waiting, 'event')}, {fmt.several(state.outcomes_waiting, 'result')}"
        )),
        ("This process", Cell(
            f"{fmt.size(system.resident_bytes)} of memory, {system.cpu_cores:.2f} cores", sub=_life(system, who)
        )),
    ]  # fmt: skip
    if system.certificate_ends_ms:
        facts.append(("Its certificate", Cell(f"ends {who.clock(system.certificate_ends_ms)}")))
    _facts("detection", "Detection", facts)
    rows = [
        Row((Cell(d.name), Cell(f"{d.seconds * 1000:,.1f} ms"), _failed(d)))
        for d in state.detectors
        if d.failures or d.seconds > 0
    ]
    columns = (Column("Detector"), Column("Mean of a tick", "right"), Column("Failures", wrap=True))
    table("detectors", columns, rows, empty="No detector has run yet.", height=190 if len(rows) > 4 else None)


def _life(system: pb.System, who: view.Viewer) -> str:
    return f"version {system.version}, started {who.clock(system.started_ms)} ({who.ago(system.started_ms)} ago)"


def _lease(state: pb.DetectionState) -> str:
    if not state.lease_s:
        return "holds the lock on its store's folder"
    left = f", {state.lease_left_s:.1f} s left" if state.HasField("lease_left_s") and state.lease_left_s > 0 else ""
    return f"{state.holder}; the lease lasts {state.lease_s:g} s{left}"


def _failed(state: pb.DetectorState) -> Cell:
    if not state.failures:
        return Cell("none", kind="faint")
    return Cell(fmt.number(state.failures), sub=state.newest_failure, mark=Mark("a defect: report it", "bad"))


def notifiers(found: Sequence[pb.NotifierState]) -> None:
    rows = [
        Row(
            (
                Cell("failing", badge="critical") if n.trouble else Cell("well", badge="healthy"),
                Cell(n.name, sub=n.kind, kind="strong"),
                Cell(
                    f"{fmt.number(n.pending)} wait"
                    + (f", the oldest {fmt.duration(n.oldest_s * 1000)}" if n.pending else ""),
                    sub=f"{fmt.number(n.delivered)} delivered, {fmt.number(n.given_up)} given up since the start",
                ),
                Cell(n.trouble, kind="" if n.trouble else "faint"),
            )
        )
        for n in found
    ]
    columns = (Column("Receivers"), Column(), Column("Messages"), Column("Why", wrap=True))
    table(
        "notifiers",
        columns,
        rows,
        empty="Nobody is notified of incidents: no receiver is set in the collector's settings.",
    )


def store(state: pb.StoreState) -> None:
    free = "not known (a server)"
    if state.HasField("free_bytes"):
        free = f"{fmt.size(state.free_bytes)} of {fmt.size(state.disk_bytes)} free; {_left(state)}"
    held = f"{fmt.duration(state.held_s * 1000)} of samples held, " if state.HasField("held_s") else ""
    facts = [
        ("Kind", Cell(state.kind)),
        ("Disk", Cell(free) if state.answers else Cell("not known while it does not answer", kind="absent")),
        ("Kept", Cell(f"{held}{state.retention_days} days kept")),
        ("Newest write took", Cell(f"{state.write_s:.2f} s")),
        ("Rollups to be made again", Cell(
            f"{fmt.number(state.rollup_marks)}, the oldest {fmt.duration(state.rollup_oldest_s * 1000)}"
            if state.rollup_marks else "none", kind="" if state.rollup_marks else "faint",
        )),
    ]  # fmt: skip
    if state.HasField("dropped_bytes") and state.dropped_bytes:
        lost = Mark("the disk is short", "bad")
        facts.append(("Deleted for room in 24 h", Cell(fmt.size(state.dropped_bytes), mark=lost)))
    if state.damaged_parts:
        facts.append(("Damaged parts set aside", _warned(state.damaged_parts)))
    _facts("store", "Store", facts)
    rows = [
        Row((Cell(t.name), Cell(fmt.size(t.bytes)), Cell(fmt.number(t.rows)), Cell(_span(t), kind="faint")))
        for t in state.tables
        if t.rows
    ]
    columns = (Column("Table"), Column("Size", "right"), Column("Rows", "right"), Column("Over"))
    empty = "The store is empty." if state.answers else "Sizes are not known while the store does not answer."
    table("store_tables", columns, rows, empty=empty, height=TABLES_PX if len(rows) > 6 else None)


def _span(size: pb.TableSize) -> str:
    return fmt.duration(size.newest_ms - size.oldest_ms) if size.oldest_ms else ""

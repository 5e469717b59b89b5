"""How findings become incidents: joined, led by the root cause, absorbed, held back, closed."""

from __future__ import annotations

import dataclasses

import pytest

from drover_collector.detectors._lib.examples import START_MS, small_fleet
from drover_collector.incidents.book import REFRESH_MS, REOPEN_MS, IncidentBook
from drover_core.model.events import (
    Evidence,
    Finding,
    Incident,
    IncidentKind,
    Note,
    NoteKind,
    RecommendedAction,
    Severity,
)

INDEX = small_fleet(12)
SECOND = 1000
MINUTE = 60_000
QUIET = {"straggler": 3 * MINUTE, "thermal": 5 * MINUTE, "memory": 5 * MINUTE, "xid": None, "liveness": None}


def book() -> IncidentBook:
    return IncidentBook(INDEX, QUIET, lambda incident, asked: asked)


def finding(
    kind: str = "straggler",
    cause: str = "power_cap",
    at_s: float = 0,
    scope: str = "gpu",
    node: str | None = "n01",
    gpu: int | None = 2,
    severity: str = "warning",
    action: str = "probe",
    **more: object,
) -> Finding:
    detector = {"link": "xid"}.get(kind, kind)
    members = () if node is None else ((node, gpu),)
    ts_ms = START_MS + round(at_s * SECOND)
    made = Finding(
        detector, IncidentKind(kind), cause, scope, node, gpu, members, ts_ms, ts_ms, Severity(severity), 0.9,
        RecommendedAction(action), f"{kind}/{cause} on {node} {gpu}.", "Do something.", (Evidence(f"{cause} seen"),),
    )  # fmt: skip
    return dataclasses.replace(made, **more)  # type: ignore[arg-type]  # whatever field the test says


def give(b: IncidentBook, at_s: float, *findings: Finding, closing: bool = True) -> list[Incident]:
    ids = b.apply(findings, START_MS + round(at_s * SECOND), closing)
    return [b.records[id_].incident for id_ in ids if id_ in b.records]


def opened(b: IncidentBook) -> list[Incident]:
    return [record.incident for record in b.open()]


def test_the_same_thing_again_is_the_same_incident_and_no_new_version() -> None:
    b = book()
    (first,) = give(b, 0, finding())
    assert first.version == 1
    for n in range(1, 20):
        assert give(b, n * 10, finding(at_s=n * 10)) == []
    (refreshed,) = give(b, REFRESH_MS / SECOND, finding(at_s=300))
    assert (refreshed.id, refreshed.version) == (first.id, 2)


@pytest.mark.parametrize(
    ("first", "second", "led"),
    [
        (("straggler", "thermal"), ("thermal", "cooling"), ("thermal", "cooling")),
        (("thermal", "cooling"), ("straggler", "thermal"), ("thermal", "cooling")),
        (("liveness", "gpu_lost"), ("xid", "xid_79"), ("xid", "xid_79")),
        (("xid", "xid_79"), ("liveness", "gpu_lost"), ("xid", "xid_79")),
        (("xid", "xid_154"), ("memory", "remap_failed"), ("xid", "xid_154")),
    ],
)
def test_one_gpu_has_one_incident_led_by_the_root_cause(
    first: tuple[str, str], second: tuple[str, str], led: tuple[str, str]
) -> None:
    b = book()
    give(b, 0, finding(*first))
    give(b, 10, finding(*second, at_s=10))
    (incident,) = opened(b)
    assert (incident.kind, incident.cause) == led
    assert len(incident.evidence) == 2
    assert incident.opened_ms == START_MS
    assert set(incident.detectors) == {first[0], second[0]}
    assert len(incident.timeline) > 1


def test_severity_and_action_are_the_strongest() -> None:
    b = book()
    give(b, 0, finding("xid", "xid_79", severity="critical", action="drain"))
    give(b, 10, finding("thermal", "cooling", at_s=10, severity="warning", action="advise"))
    (incident,) = opened(b)
    assert (incident.severity, incident.action) == (Severity.CRITICAL, RecommendedAction.DRAIN)


def test_what_makes_an_incident_worse_says_what_to_do_and_the_root_cause_stays() -> None:
    """A GPU with remapped rows vanishes: nobody shall run a memory test on it."""
    b = book()
    piles = finding("memory", "remaps_pile_up", summary="Rows pile up.", advice="Run a memory test.")
    lost = finding(
        "liveness", "gpu_lost", severity="critical", action="drain", summary="It is gone.", advice="Drain it."
    )
    give(b, 0, piles)
    for at_s in (10, 20):
        give(b, at_s, lost, piles)
        (incident,) = opened(b)
        assert (incident.kind, incident.cause) == ("memory", "remaps_pile_up")
        assert (incident.severity, incident.action) == (Severity.CRITICAL, RecommendedAction.DRAIN)
        assert (incident.summary, incident.advice) == ("It is gone. Before that: Rows pile up.", "Drain it.")
    give(b, 30, dataclasses.replace(lost, cleared=True), piles)
    (incident,) = opened(b)
    assert (incident.summary, incident.action, incident.advice) == (
        "Rows pile up.",
        RecommendedAction.DRAIN,
        "Drain it.",
    )


def test_the_advice_is_that_of_the_finding_that_asks_for_most() -> None:
    """A hot GPU asks for a look, its slowness for a test: the headline said "test it", and the text another thing."""
    b = book()
    hot = finding("thermal", "cooling", action="advise", advice="Look at its heat sink.")
    give(b, 0, hot)
    give(b, 10, finding(cause="thermal", action="probe", advice="Test it with a probe."))
    for at_s in (20, 30):
        give(b, at_s, hot)
        (one,) = opened(b)
        assert (one.kind, one.summary) == (IncidentKind.THERMAL, hot.summary), "the root cause leads"
        assert (one.action, one.advice) == (RecommendedAction.PROBE, "Test it with a probe.")
    give(
        b,
        40,
        dataclasses.replace(hot, action=RecommendedAction.DRAIN, advice="Drain the node, then see its heat sink."),
    )
    assert (opened(b)[0].action, opened(b)[0].advice) == (
        RecommendedAction.DRAIN,
        "Drain the node, then see its heat sink.",
    )


def test_neighbours_are_separate() -> None:
    b = book()
    give(b, 0, finding(gpu=2), finding(gpu=3), finding(node="n02"))
    assert len(opened(b)) == 3


def test_information_joins_but_never_carries_a_fault() -> None:
    b = book()
    give(b, 0, finding("xid", "xid_31", severity="info", action="none"))
    give(b, 60, finding(at_s=60))
    assert {(i.cause, i.severity) for i in opened(b)} == {("xid_31", "info"), ("power_cap", "warning")}
    give(b, 70, finding("xid", "xid_43", at_s=70, severity="info", action="none"))
    fault = next(i for i in opened(b) if i.cause == "power_cap")
    assert fault.severity is Severity.WARNING
    assert fault.opened_ms == START_MS + 60 * SECOND


def test_a_silent_node_takes_in_its_lost_gpus_and_what_comes_after() -> None:
    b = book()
    give(b, 0, finding("liveness", "gpu_lost", severity="critical"))
    silent = finding("liveness", "silent", 20, "node", "n01", None, action="advise")
    give(b, 20, silent)
    give(b, 30, finding("straggler", "clock", 30, gpu=5), finding("liveness", "gpu_lost", 30, gpu=6))
    (incident,) = opened(b)
    assert incident.cause == "silent"
    assert incident.action is RecommendedAction.ADVISE  # what it explains asks for nothing by itself


def test_an_xid_stays_next_to_the_silence_of_its_node() -> None:
    b = book()
    give(b, 0, finding("xid", "xid_79", severity="critical", action="drain"))
    give(b, 60, finding("liveness", "silent", 60, "node", "n01", None))
    assert {i.cause for i in opened(b)} == {"xid_79", "silent"}


def test_a_hot_node_takes_in_its_slow_gpus() -> None:
    b = book()
    give(b, 0, finding("straggler", "thermal"))
    give(b, 10, finding("thermal", "fan", 10, "node", "n01", None, action="drain"))
    give(b, 20, finding("straggler", "thermal", 20, gpu=4))
    (incident,) = opened(b)
    assert (incident.cause, incident.scope) == ("fan", "node")


def test_a_rack_takes_in_its_nodes_and_is_one_incident_by_its_name() -> None:
    b = book()
    members = tuple((f"n{n:02d}", None) for n in range(4, 8))
    give(b, 0, finding("liveness", "silent", 0, "node", "n05", None))
    rack = finding("liveness", "silent", 10, "rack", None, None, severity="critical", action="advise", members=members)
    give(b, 10, rack)
    give(b, 20, dataclasses.replace(rack, members=members[:3]), finding("liveness", "silent", 20, "node", "n06", None))
    (incident,) = opened(b)
    assert incident.scope == "rack"
    assert len(incident.members) == 4
    absorbed = next(r.incident for r in b.records.values() if r.incident.scope == "node")
    assert absorbed.closed_ms is not None
    assert incident.id in absorbed.timeline[-1].text


def test_peers_of_a_failed_gpu_are_not_stragglers() -> None:
    b = book()
    give(b, 0, finding("xid", "xid_79", severity="critical", action="drain", job="812"))
    give(b, 30, finding("straggler", "clock", 30, node="n07", job="812"))
    assert [i.cause for i in opened(b)] == ["xid_79"]
    give(b, 30, finding("straggler", "clock", 30, node="n07", job="900"))
    assert len(opened(b)) == 2


@pytest.mark.parametrize("cause", ["power_cap", "thermal", "hbm", "pcie"])
def test_a_failure_elsewhere_in_the_job_hides_no_gpu_that_shows_why_it_is_slow(cause: str) -> None:
    b = book()
    give(b, 0, finding("memory", "row_remap_failed", severity="critical", action="drain", job="812"))
    give(b, 30, finding("straggler", cause, 30, node="n07", job="812"))
    assert {(i.node, i.cause) for i in opened(b)} == {("n01", "row_remap_failed"), ("n07", cause)}


def test_a_crash_of_a_job_takes_in_the_notes_of_its_gpus() -> None:
    b = book()
    give(b, 0, finding("xid", "xid_31", severity="info", action="none", job="812"))
    members = tuple((f"n{n:02d}", 2) for n in range(4))
    crash = finding("xid", "job_crash", 5, "job", None, None, "info", "none", job="812", members=members)
    give(b, 5, crash)
    assert [i.scope for i in opened(b)] == ["job"]


def test_quiet_detectors_let_go_after_their_own_time() -> None:
    b = book()
    give(b, 0, finding())
    assert opened(b)
    give(b, 170)
    assert opened(b)
    (closed,) = give(b, 180)
    assert closed.closed_ms == START_MS + 180 * SECOND
    assert "ended" in closed.timeline[-1].text


def test_sticky_detectors_let_go_only_when_they_say_so() -> None:
    b = book()
    give(b, 0, finding("xid", "xid_79", severity="critical"))
    give(b, 86_400)
    assert opened(b)
    give(b, 86_410, finding("xid", "xid_79", 86_410, cleared=True))
    assert not opened(b)


def test_one_detector_that_ends_leaves_the_others_hold() -> None:
    b = book()
    give(b, 0, finding("xid", "xid_79", severity="critical"), finding("liveness", "gpu_lost"))
    give(b, 10, finding("liveness", "gpu_lost", 10, cleared=True))
    assert opened(b)


def test_silence_of_its_node_does_not_end_an_incident() -> None:
    b = book()
    give(b, 0, finding("thermal", "cooling"))
    give(b, 60, finding("liveness", "silent", 60, "node", "n01", None))
    give(b, 4000, finding("liveness", "silent", 4000, "node", "n01", None))
    assert {i.kind for i in opened(b)} == {IncidentKind.LIVENESS}  # the heat went into the silence
    give(b, 4010, finding("liveness", "silent", 4010, "node", "n01", None, cleared=True))
    assert not opened(b)


def test_what_is_said_again_since_the_same_moment_does_not_overwrite_its_incident() -> None:
    b = book()
    (first,) = give(b, 0, finding())
    give(b, 200)
    later = 500 + REOPEN_MS / SECOND + 10
    (again,) = give(b, later, finding(at_s=0))
    assert (again.id, again.opened_ms, again.closed_ms) == (first.id, first.opened_ms, None)
    assert "came back" in [note.text for note in again.timeline]


def test_what_is_said_again_since_the_same_moment_hours_later_is_not_hidden_behind_its_old_incident() -> None:
    """The store shows an id's highest version: one that begins at 1 again would stay closed for everybody."""
    b = book()
    node = finding("liveness", "silent", gpu=None, scope="node")
    rack = tuple((n.name, None) for n in INDEX.nodes if n.rack == INDEX.spec.by_name["n01"].rack)
    (first,) = give(b, 0, node)
    give(b, 20, finding("liveness", "silent", 20, "rack", None, None, members=rack))
    closed = b.records[first.id].incident
    assert closed.closed_ms is not None
    for at_s in range(600, 3 * 3600, 600):
        give(b, at_s, finding("liveness", "silent", 20, "rack", None, None, members=rack))
    assert first.id not in b.records
    again = give(b, 3 * 3600, finding("liveness", "silent", 20, "rack", None, None, members=rack, cleared=True), node)
    (mine,) = (i for i in again if i.scope == "node")
    assert mine.closed_ms is None
    assert mine.id != closed.id or mine.version > closed.version
    assert [i.id for i in opened(b)] == [mine.id]


def test_what_comes_back_soon_goes_on_in_the_same_incident() -> None:
    b = book()
    (first,) = give(b, 0, finding())
    give(b, 200)
    assert not opened(b)
    (again,) = give(b, 260, finding(at_s=260))
    assert again.id == first.id
    assert again.closed_ms is None
    assert "came back" in again.timeline[-1].text
    give(b, 500)
    later = 500 + REOPEN_MS / SECOND + 10
    (other,) = give(b, later, finding(at_s=later))
    assert other.id != first.id


def test_hours_are_counted_from_the_onset() -> None:
    b = book()
    slow = finding(lost_gpus=None, waiting_gpus=12.0, since_ms=START_MS - 30 * SECOND)
    give(b, 0, slow)
    give(b, 3570, slow)
    (incident,) = opened(b)
    assert incident.gpu_hours_waited == pytest.approx(12.0)
    assert incident.gpu_hours_lost is None  # not known is not zero


def test_a_restored_incident_goes_on() -> None:
    before = book()
    (first,) = give(before, 0, finding("thermal", "cooling"))
    after = book()
    after.restore([first])
    assert give(after, 20, finding("thermal", "cooling", 20)) == []
    assert [i.id for i in opened(after)] == [first.id]


def test_a_new_share_replaces_the_one_before() -> None:
    b = book()
    for at, share in enumerate(("75.0%", "74.9%", "+75 %")):
        usual = Evidence(f"before, its clock was {share} of its peers'", value=0.75, key="usual clock")
        said = (usual, Evidence(f"Xid on {at}"))
        give(b, 10 * at, finding("straggler", "power_cap", 3, evidence=said))
    (found,) = opened(b)
    assert [e.text for e in found.evidence if "clock" in e.text] == ["before, its clock was +75 % of its peers'"]
    assert len([e for e in found.evidence if "Xid" in e.text]) == 3, "other facts are kept"


def test_evidence_and_timeline_are_bounded_and_keep_their_beginning() -> None:
    b = book()
    give(b, 0, finding())
    for n in range(200):
        text = f"again {n}."
        more = finding("xid", f"xid_{n}", n, severity="info", action="none", summary=text, evidence=(Evidence(text),))
        give(b, n, more, finding(at_s=n))
    (incident,) = opened(b)
    assert len(incident.evidence) <= 16
    assert len(incident.timeline) <= 60
    assert incident.timeline[0].text.startswith("opened")
    assert "199" in incident.timeline[-1].text


def test_a_node_that_returns_without_a_gpu_leaves_its_silence_for_an_incident_of_that_gpu() -> None:
    b = book()
    silent = finding("liveness", "silent", 0, "node", gpu=None, severity="critical", action="drain")
    give(b, 0, silent)
    lost = finding("liveness", "gpu_lost", 60, severity="critical", action="drain")
    give(b, 60, dataclasses.replace(silent, cleared=True, ts_ms=START_MS + 60_000), lost)
    assert [(i.cause, i.gpu, i.action) for i in opened(b)] == [("gpu_lost", 2, RecommendedAction.DRAIN)]
    give(b, 120, dataclasses.replace(lost, cleared=True))
    assert opened(b) == []


def test_what_a_wider_incident_explains_does_not_keep_it_open() -> None:
    b = book()
    silent = finding("liveness", "silent", 0, "node", gpu=None, severity="critical", action="drain")
    give(b, 0, silent)
    give(b, 10, silent, finding("thermal", "cooling", 10))
    assert [i.cause for i in opened(b)] == ["silent"]
    give(b, 20, dataclasses.replace(silent, cleared=True))
    assert opened(b) == []


def test_a_fault_from_well_before_the_silence_stays_an_incident_of_its_own() -> None:
    b = book()
    give(b, 0, finding("thermal", "cooling", 0))
    give(b, 300, finding("liveness", "silent", 300, "node", gpu=None, severity="critical"))
    assert {i.cause for i in opened(b)} == {"cooling", "silent"}


def test_hot_air_of_a_rack_does_not_hide_a_heat_sink_that_asks_for_a_drain() -> None:
    b = book()
    rack = finding("thermal", "inlet", 0, "rack", node=None, gpu=None, members=(("n00", None), ("n01", None)))
    give(b, 0, rack)
    give(b, 10, rack, finding("thermal", "cooling", 10, gpu=1), finding("thermal", "cooling", 10, action="drain"))
    assert {(i.scope, i.gpu) for i in opened(b)} == {("rack", None), ("gpu", 2)}


def test_a_failure_elsewhere_in_the_job_does_not_end_a_straggler_that_was_known_before() -> None:
    b = book()
    give(b, 0, finding(job="j1"))
    give(b, 10, finding("xid", "xid_79", 10, node="n05", severity="critical", action="drain", job="j1"))
    for n in range(2, 40):
        give(b, n * 10, finding(at_s=n * 10, job="j1"))
    assert {i.cause for i in opened(b)} == {"power_cap", "xid_79"}


def test_time_without_reports_is_no_quiet_time() -> None:
    b = book()
    b.apply([finding("memory", "remap_failed", 0, severity="critical")], START_MS, True, lambda member: 10_000)
    for n in range(1, 61):  # deaf for ten minutes
        b.apply([], START_MS + n * 10_000, True, lambda member: 0)
    assert len(opened(b)) == 1
    b.apply([], START_MS + 3_600_000, True, lambda member: 10_000)  # the collector was away
    assert len(opened(b)) == 1
    for n in range(1, 31):
        b.apply([], START_MS + 3_600_000 + n * 10_000, True, lambda member: 10_000)
    assert opened(b) == []


def test_a_port_or_a_switch_explains_no_link_of_a_gpu_but_those_of_the_whole_node_do() -> None:
    b = book()
    nvlink = finding("link", "nvlink_down")
    (first,) = give(b, 0, nvlink)
    port = finding("link", "port_down", 10, "node", gpu=None)
    switch = finding("link", "switch", 50, "leaf", node=None, gpu=None, members=(("n01", None), ("n02", None)))
    for n in range(1, 10):
        give(b, n * 10, nvlink, port if n < 5 else switch)
    assert {(i.cause, i.opened_ms) for i in opened(b)} == {
        ("nvlink_down", first.opened_ms), ("switch", START_MS + 50_000),
    }  # fmt: skip
    give(b, 100, finding("link", "nvlink_down", 100, "node", gpu=None))
    assert {i.scope for i in opened(b)} == {"node", "leaf"}


@pytest.mark.parametrize("scope", ["gpu", "leaf"])
def test_a_job_that_hangs_after_a_failure_is_no_incident_of_its_own_however_long_it_lasts(scope: str) -> None:
    b = book()
    cause = (
        finding("xid", "xid_79", 0, severity="critical", job="j1")
        if scope == "gpu"
        else finding("link", "switch", 0, scope, None, None, "critical", members=(("n01", None), ("n02", None)))
    )
    give(b, 0, cause)
    members = tuple((f"n{n:02d}", g) for n in range(1, 4) for g in range(8))
    hang = finding("hang", "standstill", 30, "job", None, None, job="j1", members=members)
    for n in range(12, 200):
        give(b, n * 10, cause, hang)
    assert [i.kind for i in opened(b)] == [cause.kind]


def test_a_job_that_hangs_long_after_a_failure_is_one() -> None:
    b = book()
    give(b, 0, finding("xid", "xid_79", 0, severity="critical", job="j1"))
    give(b, 800, finding("hang", "standstill", 700, "job", None, None, job="j1", members=(("n03", 0), ("n04", 0))))
    assert {i.kind for i in opened(b)} == {IncidentKind.XID, IncidentKind.HANG}


def test_a_rank_that_stops_on_another_node_is_no_consequence_of_a_failure_in_its_job() -> None:
    """Its job would wait for the GPU that failed; it waits for this one."""
    b = book()
    give(b, 0, finding("xid", "xid_64", 0, severity="critical", job="j1"))
    stopped = finding("hang", "rank_stopped", 60, "gpu", "n03", 2, job="j1")
    give(b, 150, stopped, finding("straggler", "unexplained", 60, "gpu", "n04", 1, job="j1"))
    assert {(i.kind, i.node) for i in opened(b)} == {(IncidentKind.XID, "n01"), (IncidentKind.HANG, "n03")}


def test_a_rank_that_stops_next_to_a_gpu_that_failed_is_a_consequence() -> None:
    """What starts a node's ranks ends them all when one fails."""
    b = book()
    give(b, 0, finding("xid", "xid_79", 0, severity="critical", job="j1"))
    give(b, 150, finding("hang", "rank_stopped", 60, "node", "n01", None, job="j1"))
    assert {i.kind for i in opened(b)} == {IncidentKind.XID}


def lost(at_s: float) -> Finding:
    return finding("liveness", "gpu_lost", at_s, severity="critical", action="drain")


@pytest.mark.parametrize("severity", ["warning", "critical"])
def test_a_gpu_that_is_lost_long_after_another_fault_is_news_and_each_goes_on_by_itself(severity: str) -> None:
    b = book()
    give(b, 0, finding("memory", "remaps_pile_up", severity=severity))
    give(b, 1200, finding("memory", "remaps_pile_up", 1200), lost(1200))
    give(b, 1210, finding("memory", "remaps_pile_up", 1210), lost(1210))
    give(b, 1220, finding("xid", "xid_79", 1220, severity="critical", action="drain"))
    found = {(i.kind.value, i.cause): (i.opened_ms, i.severity.value) for i in opened(b)}
    assert found == {
        ("memory", "remaps_pile_up"): (START_MS, severity),
        ("xid", "xid_79"): (START_MS + 1200 * SECOND, "critical"),
    }


@pytest.mark.parametrize(("kind", "at_s"), [("memory", 300), ("xid", 1200)])
def test_a_gpu_that_is_lost_soon_after_or_was_given_up_already_is_one_incident(kind: str, at_s: int) -> None:
    b = book()
    give(b, 0, finding(kind, "any", severity="critical"))
    give(b, at_s, lost(at_s))
    (only,) = opened(b)
    assert "liveness" in only.detectors


def slow_job(at_s: float, cause: str = "waits_alike", since_s: float = 0.0, severity: str = "warning") -> Finding:
    since_ms = START_MS + round(since_s * SECOND)
    members = (("n01", None), ("n02", None))
    return finding(
        "slowdown", cause, at_s, "job", None, None, severity, "none", job="812", members=members, since_ms=since_ms,
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["straggler", "thermal", "link", "hang", "xid"])
def test_a_slow_job_is_evidence_of_what_explains_it(kind: str) -> None:
    b = book()
    give(b, 0, finding(kind, "x", job="812"))
    give(b, 150, slow_job(150))
    (only,) = opened(b)
    assert only.kind is IncidentKind(kind)
    assert "slowdown/waits_alike on None None." in [fact.text for fact in only.evidence]
    assert [note.text for note in only.timeline if note.detector == "slowdown"] == [
        "slowdown: slowdown/waits_alike on None None."
    ]
    assert only.detectors == (finding(kind).detector,), "it does not keep that incident open"


def test_a_straggler_that_is_found_later_takes_the_slow_job_in_and_gives_it_back() -> None:
    b = book()
    give(b, 150, slow_job(150))
    assert [i.kind for i in opened(b)] == [IncidentKind.SLOWDOWN]
    give(b, 160, slow_job(160), finding(at_s=160, job="812"))
    (straggler,) = opened(b)
    assert straggler.kind is IncidentKind.STRAGGLER
    closed = next(r.incident for r in b.records.values() if r.incident.kind is IncidentKind.SLOWDOWN)
    assert closed.end is not None
    assert (closed.end.kind, closed.end.incident) == (NoteKind.ABSORBED, straggler.id)
    b.close([straggler.id], Note(START_MS + 170 * SECOND, "closed: mended", NoteKind.CLOSED))
    give(b, 180, slow_job(180))
    assert [i.kind for i in opened(b)] == [IncidentKind.SLOWDOWN], "the job is still slow, and nothing explains it"


def test_what_does_not_explain_a_slow_job() -> None:
    others = (
        finding("straggler", "x", job="7", node="n09"),  # another job on another node
        finding("drift", "driver", scope="node", gpu=None, severity="info", action="none"),
        finding("memory", "ecc", node="n02"),
    )
    b = book()
    give(b, 0, *others)
    give(b, 150, slow_job(150))
    assert {i.kind.value for i in opened(b)} == {"straggler", "drift", "memory", "slowdown"}
    b = book()
    give(b, 0, finding(job="812"))  # it was there hours before the job became slower
    give(b, 8_000, finding(at_s=8_000, job="812"), slow_job(8_000, since_s=7_800))
    assert [i.kind.value for i in opened(b)] == ["straggler", "slowdown"]


def test_a_missed_objective_is_an_incident_of_its_own() -> None:
    b = book()
    give(b, 0, finding(job="812"))
    give(b, 150, slow_job(150), slow_job(150, "step_time_objective"))
    assert [(i.kind.value, i.cause) for i in opened(b)] == [
        ("straggler", "power_cap"), ("slowdown", "step_time_objective"),
    ]  # fmt: skip
    b = book()
    give(b, 150, slow_job(150), slow_job(150, "step_time_objective"))
    assert sorted(i.cause for i in opened(b)) == ["step_time_objective", "waits_alike"]


def slower(at_s: float, lost: float = 1.08, since_s: float = 0, **more: object) -> Finding:
    """A job of four GPUs whose step is 37 % longer: 1.08 GPUs' work is lost."""
    fields: dict[str, object] = {
        "job": "812", "members": (("n01", None), ("n02", None)), "lost_gpus": lost,
        "since_ms": START_MS + round(since_s * SECOND),
    }  # fmt: skip
    return finding("slowdown", "slower", at_s, "job", None, None, action="none", **(fields | more))


def test_what_a_job_became_slower_is_what_the_incident_behind_it_costs() -> None:
    """The peers of a slow GPU look busy while they wait: its detector counts nothing."""
    b = book()
    for at_s in range(0, 190, 10):  # the slowdown is found after three minutes
        give(b, at_s, finding(at_s=at_s, job="812", waiting_gpus=0.0))
    for at_s in range(190, 1810, 10):
        give(b, at_s, finding(at_s=at_s, job="812", waiting_gpus=0.0), slower(at_s))
    (incident,) = opened(b)
    assert (incident.kind, incident.gpu_hours_lost) == (IncidentKind.STRAGGLER, None)
    assert incident.gpu_hours_waited == pytest.approx(1.08 * 1800 / 3600)
    for at_s in range(1810, 2400, 10):  # it is as fast again, and the GPU still slow
        give(b, at_s, finding(at_s=at_s, job="812", waiting_gpus=0.0))
    (incident,) = opened(b)
    assert incident.gpu_hours_waited == pytest.approx(1.08 * 1800 / 3600)


def test_of_what_a_job_became_slower_counts_only_what_the_incident_does_not_count_itself() -> None:
    b = book()
    for at_s in range(0, 3610, 10):
        give(b, at_s, finding(at_s=at_s, job="812", waiting_gpus=0.9), slower(at_s, 1.0))
    (incident,) = opened(b)
    assert incident.gpu_hours_waited == pytest.approx(1.0)
    b = book()
    for at_s in range(0, 3610, 10):
        give(b, at_s, finding(at_s=at_s, job="812", waiting_gpus=3.0), slower(at_s, 1.0))
    (incident,) = opened(b)
    assert incident.gpu_hours_waited == pytest.approx(3.0), "it measured more"


def test_a_port_that_slows_a_job_is_an_incident_of_that_job() -> None:
    b = book()
    port = ("link", "port_errors", 0, "node", "n01", None)
    for at_s in range(0, 3610, 10):
        give(b, at_s, finding(*port), slower(at_s), slower(at_s, job="900"))
    (incident,) = opened(b)
    assert (incident.job, incident.gpu_hours_waited) == ("812", pytest.approx(1.08)), "another job's is not its own"


def test_a_restart_counts_no_slowness_twice() -> None:
    b = book()
    for at_s in range(0, 1810, 10):
        give(b, at_s, finding(at_s=at_s, job="812", waiting_gpus=0.0), slower(at_s))
    again = book()
    again.restore([dataclasses.replace(incident, updated_ms=START_MS + 1800 * SECOND) for incident in opened(b)])
    for at_s in range(1810, 3610, 10):
        give(again, at_s, finding(at_s=at_s, job="812", waiting_gpus=0.0), slower(at_s))
    (incident,) = opened(again)
    assert incident.gpu_hours_waited == pytest.approx(1.08)

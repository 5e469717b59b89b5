"""Pages say no untruth: one number of hurt jobs, a job that died, nodes in trouble apart, one form of time."""

from __future__ import annotations

import time
from datetime import UTC
from pathlib import Path
from typing import Any

import grpc
import pytest
from streamlit.testing.v1 import AppTest

import drover_dashboard
from drover_core.metrics import catalog
from drover_core.metrics.catalog import Scope
from drover_core.model.events import Decision, RecommendedAction
from drover_dashboard.client import FleetClient
from drover_dashboard.pages import fabric_parts, job_parts, node_detail
from drover_dashboard.server import signin
from drover_dashboard.server.auth_settings import Person
from drover_dashboard.widgets import format as fmt
from drover_dashboard.widgets import table, view
from drover_proto import fleet_pb2 as pb

from .conftest import Chosen

PAGES = Path(drover_dashboard.__file__).parent / "pages"


class Given(Chosen):
    def __init__(self) -> None:
        super().__init__()
        self.given: dict[str, Any] = {}


@pytest.fixture
def chosen() -> Given:
    """Its answers, once `given`, are those."""
    made = Given()
    for name in ("ListJobs", "ListRisk", "ListIncidents", "GetNode"):
        usual = getattr(made, name)

        def answer(request: Any, context: Any, name: str = name, usual: Any = usual) -> Any:
            return made.given[name] if name in made.given else usual(request, context)

        setattr(made, name, answer)
    return made


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Tables by key, as their component gets them."""
    found: dict[str, Any] = {}

    class Shown:
        open = None

    def mount(key: str, data: Any, **_: Any) -> Shown:
        found[key] = data
        return Shown()

    monkeypatch.setattr(table, "component", lambda name: mount)
    monkeypatch.setattr(job_parts, "component", lambda name: mount)
    return found


def opened(page: str, **query: str) -> AppTest:
    app = AppTest.from_file(str(PAGES / f"{page}.py"), default_timeout=120)
    for name, value in query.items():
        app.query_params[name] = value
    app.run()
    assert not app.exception, app.exception
    return app


def said(app: AppTest) -> str:
    return " ".join(text.value for text in app.text)


def dead_job() -> pb.JobRow:
    now_ms = time.time_ns() // 1_000_000
    died = pb.JobDeath(incident_id="i1", kind="xid", cause="xid_79", node="r03n06", gpu=0, restarted_as="job-2001r1")
    return pb.JobRow(
        job="job-2001", gpus=64, nodes=8, since_ms=now_ms - 600_000, ended_ms=now_ms, severity="critical",
        hurt="GPU 0 fell off the bus", incidents=["i1"], died=died,
    )  # fmt: skip


def test_the_job_that_died_says_when_of_what_and_what_became_of_it(
    shared: FleetClient, chosen, drawn: dict[str, Any]
) -> None:
    jobs = [dead_job(), pb.JobRow(job="well", gpus=8, nodes=1, since_ms=1)]
    chosen.given["ListJobs"] = pb.JobList(jobs=jobs, total=2, hurt=4)
    assert "1 job hold 8 GPUs  ·  4 hurt, 1 of them died" in said(opened("job"))
    first = drawn["jobs"]["rows"][0]["cells"]
    assert first[0]["text"] == "DIED"
    assert first[1]["sub"].startswith("died ")
    assert first[1]["sub"].endswith(" with XID 79 on r03n06 GPU 0, restarted as job-2001r1")


def test_a_closed_list_names_no_severity_that_was_not_chosen(
    shared: FleetClient, chosen, drawn: dict[str, Any]
) -> None:
    chosen.given["ListIncidents"] = pb.IncidentList()
    opened("incidents", state="closed")
    assert drawn["incidents"]["empty"] == "No closed incident."
    opened("incidents", state="all", severity="critical")
    assert drawn["incidents"]["empty"] == "No critical incident."


def test_another_list_does_not_keep_an_incident_that_it_has_not(
    shared: FleetClient, chosen, drawn: dict[str, Any]
) -> None:
    app = opened("incidents", id="i1")
    assert "facts" in drawn
    chosen.given["ListIncidents"] = pb.IncidentList()
    drawn.clear()
    app.segmented_control[0].set_value("closed").run()
    assert "facts" not in drawn
    assert "id" not in app.query_params


def test_nodes_in_trouble_stand_apart_from_those_that_may_fail_next(
    shared: FleetClient, chosen, drawn: dict[str, Any]
) -> None:
    in_trouble = pb.TroubledNode(
        node="n2",
        incident_id="i1",
        kind="xid",
        cause="xid_79",
        severity="critical",
        since_ms=1,
        summary="GPU 1 is lost",
    )
    rows = [pb.RiskRow(node="n1", chance=0.02)]
    reply = pb.RiskList(nodes=rows, total=2, days=7, in_trouble=[in_trouble], in_trouble_total=1)
    chosen.given["ListRisk"] = reply
    app = opened("risk")
    (row,) = drawn["in_trouble"]["rows"]
    assert (row["id"], row["cells"][1]["text"]) == ("i1", "n2")
    assert drawn["risk"]["empty"].startswith("Nothing is known that sets one of the other nodes apart")
    assert "All 1 nodes show no sign" in said(app)


def test_a_silent_nodes_host_says_its_time_as_the_page_does(shared: FleetClient, drawn: dict[str, Any]) -> None:
    metric = catalog.of_scope(Scope.NODE)[0].name
    silent = pb.Value(metric=metric, reason="silent since 2026-11-23T19:06:21.039Z")
    detail = pb.NodeDetail(row=pb.NodeRow(name="n1"), values=[silent])
    who = view.Viewer(fmt.zone("Europe/Berlin"), 1_795_464_000_000)
    node_detail._inventory(detail, who)
    assert drawn["host"]["rows"][0]["cells"][0]["text"] == "silent since 20:06:21"


@pytest.mark.parametrize(("pending", "receivers"), [(0, 1), (2, 0)])
def test_what_waits_for_a_person_and_that_nobody_is_notified_is_loud_on_fleet(
    shared: FleetClient, chosen, drawn: dict[str, Any], monkeypatch: pytest.MonkeyPatch, pending: int, receivers: int
) -> None:
    chosen.pending, chosen.receivers = pending, receivers
    links: list[str] = []
    monkeypatch.setattr("streamlit.page_link", lambda page, label, **_: links.append(label))
    app = opened("fleet")
    assert any("2 decisions wait for you" in label for label in links) is bool(pending)
    assert ("Nobody is notified of incidents" in said(app)) is (receivers == 0)
    links.clear()
    monkeypatch.setattr(signin, "person", lambda: Person("kim", False))
    opened("fleet")
    assert any("2 decisions wait for an operator" in label for label in links) is bool(pending)


@pytest.mark.parametrize(("may", "rows"), [(True, 0), (False, 1)])
def test_a_decision_is_listed_once_with_who_works_there_and_the_guards_word(
    shared: FleetClient, chosen, drawn: dict[str, Any], may: bool, rows: int
) -> None:
    chosen.decision = Decision(
        "d1", "i1", 1, "n2", RecommendedAction.DRAIN, "approve", "pending_approval", "fatal", "asks to"
    )
    chosen.may_answer = may
    chosen.preview = pb.ActPreview(
        may_act=True, guard="2 of 2 nodes would be out", jobs=[pb.JobThere(job="train", gpus_here=2, gpus=8, nodes=4)]
    )
    app = opened("policy")
    assert len(drawn.get("policy_pending", {"rows": []})["rows"]) == rows
    assert ("Jobs on n2: train (2 of its 8 GPUs)." in said(app)) is may
    assert ("The guard would hold a drain back: 2 of 2 nodes would be out." in said(app)) is may


def test_without_a_collector_the_system_page_says_where_to_look(
    shared: FleetClient, chosen, drawn: dict[str, Any]
) -> None:
    chosen.failure = (grpc.StatusCode.UNAVAILABLE, "connection refused")
    opened("system")
    shown = str(drawn["away"])
    for text in (shared.target, "systemctl status drover-collector", "journalctl -u drover-collector", "CollectorDown"):
        assert text in shown
    assert "has not had an answer" in shown


def test_leaves_of_equal_trouble_keep_their_place_and_the_chosen_node_is_marked() -> None:
    rows = [
        pb.LeafRow(name=name, nodes_troubled=bad, nodes=[pb.LeafNode(node=f"{name}n1", state="ok")])
        for name, bad in (("leaf03", 0), ("leaf01", 0), ("leaf02", 1))
    ]
    who = view.Viewer(UTC, 1_800_000_000_000)
    tiles = fabric_parts.leaf_tiles(pb.Fabric(leafs=rows), "", who, "leaf01n1")["groups"][0]["tiles"]
    assert [tile["name"] for tile in tiles] == ["leaf02", "leaf01", "leaf03"]
    assert [len(tile["cells"][0]) for tile in tiles] == [2, 3, 2]


def test_a_silent_nodes_charts_end_when_it_last_reported(shared: FleetClient, chosen) -> None:
    seen_ms = time.time_ns() // 1_000_000 - 7_200_000
    detail = pb.NodeDetail(row=pb.NodeRow(name="n2", last_seen_ms=seen_ms), gpus=[pb.GpuDetail(gpu=0)])
    chosen.given["GetNode"] = detail
    opened("node", node="n2")
    assert (chosen.series[-1].to_ms, chosen.series[-1].from_ms) == (seen_ms, seen_ms - 900_000)

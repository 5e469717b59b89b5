"""Several clusters: an act reaches its own only, also where two have nodes of one name; who is away greys one strip."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent import futures
from dataclasses import replace
from datetime import UTC
from pathlib import Path
from typing import Any

import grpc
import pytest
from starlette.requests import Request
from streamlit.testing.v1 import AppTest

import drover_dashboard
from drover_core.model.events import Health, Incident, IncidentKind, RecommendedAction, Severity
from drover_dashboard import client, clusters
from drover_dashboard.client import Answer, FleetClient, Trouble
from drover_dashboard.clusters import Clusters, LastAnswers
from drover_dashboard.pages import clusters_overview
from drover_dashboard.server import app as server_app
from drover_dashboard.widgets import cluster_choice, view
from drover_proto import fleet_pb2 as pb
from drover_proto.fleet_pb2_grpc import add_FleetServicer_to_server
from testbed.waiting import wait_until

NOW = 1_800_000_000_000
SCRIPT = Path(drover_dashboard.__file__).parent / "script" / "console.py"
Acting = Any  # the stand-in of conftest.py that writes down what it was asked to do


def acting(kind: type) -> Acting:
    def act(self: Any, request: pb.ActRequest, _: Any) -> pb.ActReply:
        self.acts.append((request.act, request.node, request.why, request.who, request.force))
        return pb.ActReply(state="done")

    return type("Acting", (kind,), {"ActOnNode": act})()


def served(chosen: Any) -> tuple[grpc.Server, str]:
    server = grpc.server(futures.ThreadPoolExecutor(4), options=[("grpc.so_reuseport", 0)])
    add_FleetServicer_to_server(chosen, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    return server, f"127.0.0.1:{port}"


@pytest.fixture
def both(chosen: Any) -> Iterator[tuple[Acting, Acting]]:
    """West and east: each has nodes n1 and n2."""
    west, east = acting(type(chosen)), acting(type(chosen))
    servers = [served(west), served(east)]
    clients = [FleetClient(address, cluster=name) for (_, address), name in zip(servers, ("west", "east"), strict=True)]
    found = Clusters(clients)
    server_app.share_several(found)
    wait_until(lambda: all(one.incidents.value for one in found.received()), "both answered", 10)
    yield west, east
    found.stop()
    clusters.share(None)
    for one in (west, east):
        one.hang.set()
    for server, _ in servers:
        server.stop(None).wait()


def opened(**query: str) -> AppTest:
    """The Node page in the console's frame, as the script runs it."""
    app = AppTest.from_string(FRAME, default_timeout=120)
    return asked(app, **query)


# st.navigation knows files below the script's folder only, so a test runs the frame's steps around one page.
FRAME = """
import streamlit as st
from drover_dashboard import clusters
from drover_dashboard.pages import clusters_overview
from drover_dashboard.widgets import address, cluster_choice, view
address.settle("node")
if cluster_choice.settle("node"):
    cluster_choice.bar()
    exec(compile(view.NODE.read_text(), str(view.NODE), "exec"))
else:
    clusters_overview.choose("node")
"""


def asked(app: AppTest, **query: str) -> AppTest:
    for name in list(app.query_params):
        del app.query_params[name]
    for name, value in query.items():
        app.query_params[name] = value
    return run(app)


def run(app: AppTest) -> AppTest:
    app.run()
    assert not app.exception, app.exception
    return app


def button(app: AppTest, label: str) -> Any:
    return next(one for one in app.button if one.label == label)


def said(app: AppTest) -> str:
    return " ".join(text.value for text in app.text)


def form(app: AppTest, act: str = "Drain") -> AppTest:
    """Its form is open and filled."""
    button(app, f"{act} ...").click()
    run(app)
    name, why = (next(one for one in app.text_input if one.label == label) for label in ("Your name", "Why"))
    name.input("alex")
    why.input("fan")
    return app


def test_an_act_reaches_the_cluster_of_its_page_and_says_so(both: tuple[Acting, Acting]) -> None:
    west, east = both
    app = form(opened(cluster="east", node="n1"))
    assert "Drain n1 in cluster east" in said(app)
    button(app, "Drain n1 in cluster east").click()
    run(app)
    assert east.acts == [("drain", "n1", "fan", "alex", False)]
    assert not west.acts
    assert "Drain n1 in cluster east: done" in said(app)


def test_a_form_of_one_cluster_sent_under_the_address_of_another_does_nothing(both: tuple[Acting, Acting]) -> None:
    """Somebody goes to the same node's page in the other cluster, and the press arrives with that address."""
    west, east = both
    app = form(opened(cluster="west", node="n1"))
    button(app, "Drain n1 in cluster west").click()
    asked(app, cluster="east", node="n1")
    assert not west.acts
    assert not east.acts
    assert "Drain n1" not in said(app), "the form is closed in the other cluster"
    assert "Drain n1 in cluster west" not in {one.label for one in app.button}


def test_an_open_form_and_what_was_done_stay_with_their_cluster(both: tuple[Acting, Acting]) -> None:
    _, east = both
    app = form(opened(cluster="west", node="n1"))
    asked(app, cluster="east", node="n1")
    button(app, "Drain ...").click()
    run(app)
    why = next(one for one in app.text_input if one.label == "Why")
    assert why.value == "", "the reason was written for the other cluster"
    asked(app, cluster="west", node="n1")
    assert "Drain n1 in cluster west" in {one.label for one in app.button}
    assert not east.acts


def test_a_page_without_a_cluster_asks_for_one_and_no_collector(both: tuple[Acting, Acting]) -> None:
    for query in ({"node": "n1"}, {"node": "n1", "cluster": "north"}, {"node": "n1", "cluster": ""}):
        app = opened(**query)
        assert "Choose the cluster to look at." in said(app)
        assert not app.button
    assert "There is no cluster 'north' here." in said(opened(node="n1", cluster="north"))
    assert not any("node" in one.calls for one in both)


def test_the_next_page_keeps_the_cluster_and_names_it(both: tuple[Acting, Acting]) -> None:
    app = asked(opened(cluster="east", node="n1"), node="n2")
    assert app.query_params["cluster"] in ("east", ["east"])
    assert app.session_state["cluster"] == "east"


def test_the_picture_of_no_cluster_is_refused(both: tuple[Acting, Acting]) -> None:
    def of(query: bytes) -> Request:
        return Request({"type": "http", "query_string": query, "headers": []})

    for query in (b"", b"cluster=north"):
        assert server_app.layout(of(query)).status_code == 400
        assert server_app.picture(of(query)).status_code == 400
    assert server_app.picture(of(b"cluster=east")).status_code == 200


def test_a_collector_that_hangs_holds_up_nobody_and_its_strip_turns_old(
    both: tuple[Acting, Acting], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clusters, "FRESH_MS", 2500)
    both[1].hang.clear()
    found = clusters.shared()
    assert found is not None
    began = time.monotonic()
    received = found.received()
    clusters.strips(received, clusters.now_ms())
    assert time.monotonic() - began < 60
    assert found.ask_all(lambda fleet: fleet.nodes(3).value, limit_s=0.5)["east"] is None
    assert time.monotonic() - began < 60
    wait_until(lambda: not found.received()[1].fresh(clusters.now_ms()), "the silent one is said to be")
    assert found.received()[0].fresh(clusters.now_ms())
    strips = clusters.strips(found.received(), clusters.now_ms())
    assert [strip["state"] for strip in strips["clusters"]] == ["fresh", "old"]


OVERVIEW = """
from drover_dashboard import clusters
from drover_dashboard.pages import clusters_overview
clusters_overview._incidents(clusters.shared())
"""


@pytest.mark.parametrize("kept", [None, pb.IncidentList()])
def test_a_cluster_whose_incidents_are_not_of_now_has_no_empty_list(
    both: tuple[Acting, Acting], monkeypatch: pytest.MonkeyPatch, kept: pb.IncidentList | None
) -> None:
    now = clusters.now_ms()
    received = [LastAnswers("west", answer(now), Answer(kept, now if kept else 0, AWAY))]
    monkeypatch.setattr(Clusters, "received", lambda _: received)
    app = run(AppTest.from_string(OVERVIEW, default_timeout=120))
    assert "west does not answer: what is open there now is not known" in said(app)


# ---- pure


def answer(as_of_ms: int = NOW, trouble: Trouble | None = None, **more: Any) -> Answer[pb.Status]:
    counts = {"healthy": 7, "confirmed": 1}
    status = pb.Status(
        gpus_expected=8, gpus_by_health=counts, ts_ms=as_of_ms, newest_sample_ms=as_of_ms, receivers=1, **more
    )
    return Answer(status, as_of_ms, trouble)


AWAY = Trouble("Collector", "connection refused", "is it running?", NOW - 60_000)
SLOW = Trouble("Collector", "2 s", "is it overloaded?", NOW, slow=True)


@pytest.mark.parametrize(
    ("status", "state"),
    [
        (answer(), "fresh"),
        (answer(NOW - clusters.FRESH_MS), "fresh"),
        (answer(NOW - clusters.FRESH_MS - 1), "old"),
        (answer(NOW + clusters.FRESH_MS + 1), "old"),
        (answer(trouble=SLOW), "fresh"),
        (answer(trouble=AWAY), "old"),
        (Answer(None, 0, AWAY), "never"),
        (Answer(None, 0), "asked"),
    ],
)
def test_what_is_not_of_now_is_never_counted_as_healthy(status: Answer[pb.Status], state: str) -> None:
    received = [LastAnswers("a", answer(), Answer(None, 0)), LastAnswers("b", status, Answer(None, 0))]
    found = clusters.strips(received, NOW)
    assert found["clusters"][1]["state"] == state
    health, known = found["total"]["health"], status.value is not None
    assert health["healthy"] == (14 if state == "fresh" else 7)
    assert health["unknown"] == (8 if state == "old" else 0)
    assert found["total"]["gpus"] == (16 if known else 8)
    assert found["total"]["uncounted"] == int(not known)
    assert found["total"]["answering"] == 1 + (state == "fresh")


def test_a_cluster_that_has_judged_nothing_is_not_without_incidents() -> None:
    judged = LastAnswers("a", answer(newest_tick_ms=NOW), Answer(None, 0))
    found = clusters.strips([judged, LastAnswers("b", answer(), Answer(None, 0))], NOW)
    assert [strip["judged"] for strip in found["clusters"]] == [True, False]
    assert not found["total"]["judged"]
    assert clusters.strips([judged], NOW)["total"]["judged"]


def test_gpus_that_no_word_covers_are_unknown() -> None:
    odd = Answer(pb.Status(gpus_expected=10, gpus_by_health={"healthy": 4, "splendid": 1}), NOW)
    (strip,) = clusters.strips([LastAnswers("a", odd, Answer(None, 0))], NOW)["clusters"]
    assert strip["health"][Health.HEALTHY] == 4
    assert strip["health"][Health.UNKNOWN] == 6


def test_a_collector_that_answers_and_is_blind_says_so() -> None:
    blind = answer(blind=["The store is full."])
    quiet = Answer(pb.Status(gpus_expected=1, ts_ms=NOW, newest_sample_ms=NOW - 300_000, receivers=0), NOW)
    received = [LastAnswers("a", blind, Answer(None, 0)), LastAnswers("b", quiet, Answer(None, 0))]
    one, two = clusters.strips(received, NOW)["clusters"]
    assert one["notes"] == ["The store is full."]
    assert two["notes"] == ["No telemetry for 5 min.", "Nobody is notified of its incidents."]


def test_incidents_of_all_are_merged_the_worst_first_with_their_cluster() -> None:
    bad = Incident(
        "i1", IncidentKind.XID, "gpu_lost", "gpu", "n2", 1, (("n2", 1),), NOW, NOW, None, Severity.CRITICAL, 0.99,
        RecommendedAction.DRAIN, "lost", "Drain n2.", (), (), ("xid",),
    )  # fmt: skip
    mild = replace(bad, severity=Severity.WARNING)
    newer = replace(bad, opened_ms=bad.opened_ms + 1)
    nothing = pb.IncidentList()
    taken = pb.IncidentList(handling={"i1": pb.IncidentHandling(acknowledged_by="bo")})
    found = clusters.merged({"a": ([mild], nothing), "b": ([bad], nothing), "c": ([newer], taken)}, {"b"})
    assert [(one.cluster, one.old) for one in found] == [("c", False), ("b", True), ("a", False)]
    (row, *_) = clusters_overview.rows(found, view.Viewer(UTC, NOW))
    assert (row.tone, row.cells[2].mark and row.cells[2].mark.text) == ("muted", "acknowledged by bo")


def test_links_of_a_page_name_its_cluster() -> None:
    client.share_choice(lambda: FleetClient("x:1", cluster="west"), lambda: "west")
    assert view.href(view.NODE, node="n1") == "node?cluster=west&node=n1"
    assert view.href(view.NODE, cluster="east", node="n1") == "node?cluster=east&node=n1"
    client.share(FleetClient("x:1"))
    assert view.href(view.NODE, node="n1") == "node?node=n1"


def test_one_collector_has_no_clusters() -> None:
    clusters.share(None)
    assert cluster_choice.settle("node") == ""
    assert cluster_choice.inside("Drain n1") == "Drain n1"

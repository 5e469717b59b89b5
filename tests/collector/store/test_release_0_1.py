"""A store that release 0.1 left goes on: what that release read out of sentences stands in fields.

The rows were written by that release's own code (tests/data/release_0_1/make.py), which noted too what its detectors
find after a restart. To be removed together with drover_core/model/legacy.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from testbed.release_0_1 import EXPECTED, Left, unpacked

SCENES = EXPECTED["scenes"]
ACT: dict[tuple[str, int], str] = {(node, gpu): id_ for id_, node, gpu, _ in EXPECTED["act"]["incidents"]}
Incidents = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Left]:
    with unpacked(tmp_path_factory.mktemp("left")) as made:
        yield made


@pytest.fixture(scope="module")
def incidents(left: Left) -> Incidents:
    found: Incidents = left.ask("incidents")
    return found


def one(incidents: Incidents, scene: str, node: str | None, cause: str = "") -> dict[str, Any]:
    of_scene = [incidents[id_] for id_ in SCENES[scene]["incidents"]]
    (found,) = [i for i in of_scene if i["node"] == node and (not cause or i["cause"] == cause)]
    return found


def test_nothing_is_lost(left: Left) -> None:
    assert left.ask("counts") == EXPECTED["counts"]
    found = left.ask("telemetry")
    assert found["samples"] == EXPECTED["samples"]["before"]
    assert found["events"] == EXPECTED["events"]["before"]


@pytest.mark.parametrize(
    ("node", "stage", "withheld", "passed_before", "incidents"),
    [
        ("act01", "drained", "quiet", True, [("act01", 5)]),
        ("act02", "validating", "", True, [("act02", 5)]),  # for the second time, since its return was withheld
        ("act03", "drained", "review", False, []),  # probes could not judge it
        ("act04", "draining", "review", False, []),  # found closed by Drover, and not known
        ("act05", "draining", "", False, []),
        ("act06", "drained", "", False, []),  # by a person
        ("act07", "drained", "review", False, [("act07", 6)]),  # withheld twice
        ("act08", "healthy", "", False, []),
        ("act11", "drained", "", False, []),  # a person has drained it too
        ("act13", "repair", "", False, []),
    ],
)
def test_what_a_return_waits_for(
    left: Left, node: str, stage: str, withheld: str, passed_before: bool, incidents: list[tuple[str, int]]
) -> None:
    duty = left.ask("duties")[node]
    found = duty["stage"], duty["withheld"], duty["passed_before"], duty["incidents"]
    assert found == (stage, withheld, passed_before, [ACT[where] for where in incidents])


def test_a_command_that_ran_and_a_drain_of_somebody_else(left: Left) -> None:
    found = left.ask("actions")
    assert len(found) == EXPECTED["counts"]["actions"]
    assert {(a["node"], a["action"]) for a in found if a["running"]} == {("act10", "reboot")}
    assert {(a["node"], a["action"]) for a in found if a["foreign"]} == {("act09", "drain")}


def test_what_holds_decisions_back(left: Left) -> None:
    found = left.ask("decisions", [*SCENES["mass"]["incidents"], *SCENES["ask"]["incidents"], *ACT.values()])
    assert {d["node"] for d in found if d["cause"] == "maintenance"} == {"mass20"}
    guarded = {d["node"] for d in found if d["cause"] == "guard"}
    assert guarded == {f"mass{n:02d}" for n in (1, 5, 21, 25, 29, 33, 10, 11, 12, 13, 14, 15)}
    assert {(d["node"], d["outcome"]) for d in found if d["cause"] == "unanswered"} == {("ask01", "expired")}
    assert {d["cause"] for d in found if d["outcome"] not in ("held", "expired")} == {""}
    assert {d["cause"] for d in found if d["outcome"] == "expired" and d["node"] == ""} == {""}, "a mass event's end"


def test_lines_of_timelines(incidents: Incidents) -> None:
    def lines(incident: dict[str, Any]) -> list[tuple[str, str]]:
        return [(note["kind"], note["detector"]) for note in incident["timeline"]]

    came_and_went = [("opened", ""), ("closed", ""), ("came_back", ""), ("again", "")]
    assert lines(one(incidents, "life", "life09")) == came_and_went
    back = [("opened", ""), ("joined", "liveness"), ("", ""), ("ended", "liveness"), ("again", "")]
    assert lines(one(incidents, "life", "life05")) == back
    assert lines(one(incidents, "life", "life06")) == [("opened", ""), ("again", "")]
    rack = one(incidents, "life", None)
    assert set(lines(rack)) == {("opened", ""), ("joined", "thermal")}
    part = one(incidents, "life", "life00")["timeline"][-1]
    assert (part["kind"], part["incident"]) == ("absorbed", rack["id"])
    assert incidents[EXPECTED["probe"]["suspect"]]["timeline"][-1]["kind"] == "refuted"
    ended = {i["timeline"][-1]["kind"] for i in incidents.values() if i["cause"] == "mass_event" and i["closed_ms"]}
    assert ended == {"no_longer_wanted"}


def test_receivers_get_why_it_ended(left: Left, incidents: Incidents) -> None:
    mass = next(i["id"] for i in incidents.values() if i["cause"] == "mass_event" and i["closed_ms"])
    part, rack = one(incidents, "life", "life00")["id"], one(incidents, "life", None)["id"]
    silent, suspect = one(incidents, "mass", "mass01")["id"], EXPECTED["probe"]["suspect"]
    found = left.ask("messages", [part, mass, silent, suspect])
    assert found[:3] == [
        [f"part of incident {rack}", rack],
        ["none of its nodes is to leave service", ""],
        ["the condition has ended", ""],
    ]
    assert found[3][0].startswith("cleared by a probe: GPU 1 of probe01: ")
    assert left.ask("outbox") == [[EXPECTED["outbox"], True, rack]]


def test_news_of_a_question_that_nobody_answered(left: Left) -> None:
    assert left.ask("news", SCENES["ask"]["incidents"]) == ["incident.asks", "incident.unanswered"]


def test_what_made_an_incident_worse(left: Left, incidents: Incidents) -> None:
    worse = one(incidents, "life", "life07")["id"]
    before, after = left.ask("worsened", worse)
    assert before == after, "its words stay when the root cause is reported again, which is milder"
    assert {i["id"] for i in incidents.values() if i["worsened"]} == {worse}


def test_evidence_of_ports_and_of_what_was_usual(incidents: Incidents) -> None:
    def about(scene: str, node: str) -> set[str]:
        return {e[name] for e in one(incidents, scene, node)["evidence"] for name in ("port", "key") if e[name]}

    assert about("port", "port02") == {"mlx5_4"}
    assert about("port", "port04") == {"mlx5_1"}
    assert about("port", "port06") == {"mlx5_2"}, "slower than its peers"
    assert about("warm", "warm02") == {"own past of GPU 5"}
    assert about("slow", "slow01") == {"usual clock", "usual duty"}


def test_snapshots(incidents: Incidents) -> None:
    def of(scene: str, node: str | None, cause: str = "") -> Any:
        return one(incidents, scene, node, cause)["snapshots"]

    assert of("crash", None) == {"xid": {"code": 31}}
    assert of("hang", "hang02") == {"hang": {"why": "runs no kernel"}}
    assert of("drift", "drift02") == {"drift": {"differs": {"ecc_mode": "off", "power_limit_set_w": "500"}}}
    assert of("drift", "drift07") == {"drift": {"differs": {"driver": "535.54.03", "nic.mlx5_0": "26.36.1010"}}}
    assert of("leaf", None) == {"links": {"leafs": {"leaf-l0": True}}}
    reset = of("reset", None)["links"]
    assert reset["leafs"] == {"reset-l0": True}
    ((leaf, count, from_ms, to_ms),) = reset["resets"]
    assert (leaf, count, to_ms - from_ms) == ("reset-l0", 2, 50_000)
    assert list(of("warm", "warm02")["thermal"]["past"]) == ["5"]
    assert of("warm", "warm02")["thermal"]["past"]["5"] == pytest.approx(0.0546, abs=1e-3)
    assert sorted(of("slow", "slow01")["straggler"]["usual"]) == ["clock", "duty"]
    events = [i for i in incidents.values() if i["cause"] == "mass_event"]
    assert {i["snapshots"]["guard"]["about"] for i in events} == {"xid_79", "silent"}
    (shifts,) = EXPECTED["probe"]["shifts"]
    figure = "gemm_bf16 (quick) of NVIDIA H200, driver 580.1:"
    assert incidents[shifts]["snapshots"] == {"probe_drift": {"figures": {figure: True}}}


@pytest.mark.parametrize(
    "name", [name for name, known in SCENES.items() if known["after"]["findings"] or name in ("crash", "mass")]
)
def test_detectors_and_guard_go_on_as_release_0_1_itself_did(left: Left, name: str) -> None:
    """By the incidents alone, as after a stop that was longer than what a start reads."""

    def known(after: dict[str, Any]) -> dict[str, Any]:
        """0.1 opened an incident of a switch's resets that names no node again; that is no example."""
        found = [finding for finding in after["findings"] if finding[-1]]
        return after | {"findings": found, "incidents": [i for i in after["incidents"] if i[5]]}

    found = left.ask("scene", name, SCENES[name]["incidents"])
    why = found.pop("why")
    assert known(found) == known(SCENES[name]["after"])
    assert why == ["runs no kernel" if name == "hang" else ""]


def test_a_configuration_that_is_well_again_ends_its_incident(left: Left) -> None:
    found = left.ask("shifted", EXPECTED["probe"]["shifts"])
    assert found == EXPECTED["probe"]["after"] == [["driver_gemm_bf16", True]]


def test_verdicts_with_shifts(left: Left) -> None:
    node = next(v for v in left.ask("verdicts", "probe03-1") if v["gpu"] is None)
    (shift,), (figure,) = node["shifts"], node["shifted"]
    assert figure == "gemm_bf16 (quick) of NVIDIA H200, driver 580.1:"
    assert figure in node["measured"]
    assert shift.startswith(figure)


def test_orders_and_what_protects_them(left: Left) -> None:
    newest = {order["id"]: order for order in left.ask("orders")}
    sent = newest.pop(EXPECTED["order"])
    assert (sent["state"], sent["protection"], sent["job"]) == ("sent", "job", "801")
    assert {(o["protection"], o["job"]) for o in newest.values()} == {("none", ""), ("drained", "")}


def test_what_somebody_else_has_drained_is_not_decided_again(left: Left) -> None:
    assert left.ask("again", "act09", None) == []
    assert left.ask("again", "act09", False) == ["act"], "another failure is"


def test_nodes_that_are_out_go_on_where_they_were(tmp_path: Any) -> None:
    with unpacked(tmp_path) as left:
        found = left.ask("act")
    assert found["early"] == ["act14"], "act01 waits for quiet; act03, act04 and act07 for a person"
    assert found["asked"] == ["act01", "act05", "act14"]
    assert found["waits"]["act02"] == "review", "its return is withheld for the second time"
    assert [found["waits"][node] for node in ("act03", "act04", "act07")] == ["review"] * 3
    assert found["reboot"] == [True, False], "nobody knows whether it was done, so it is not done again"

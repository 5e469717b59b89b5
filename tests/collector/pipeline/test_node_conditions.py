"""Conditions of Kubernetes nodes become events: from the API server's list to the store, and on to the node's page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from drover_collector.actions.kubernetes import api as kubernetes_api
from drover_collector.actions.kubernetes.api import KubernetesApi
from drover_collector.actions.settings import KubernetesConfig
from drover_collector.detectors.conditions.detector import NAME
from drover_collector.pipeline import node_conditions
from drover_collector.pipeline.maintenance_events import marks_of
from drover_collector.pipeline.node_conditions import NEW_MS, OLD_MS, TROUBLE, ConditionSettings, NodeConditions
from drover_collector.store import Store, StoreError
from drover_core.model.conditions import NodeCondition, Place, Standing, from_message, to_message
from drover_core.model.events import Event, Evidence, Incident, IncidentKind, RecommendedAction, Severity
from drover_core.settings import SettingsError, load_text
from drover_core.times import iso
from testbed.collected import small_index
from testbed.kubernetes_stand_in import StandIn, stand_in

T0 = 1_800_000_000_000
HOUR_MS = 3_600_000


def condition(type_: str, status: str, since_ms: int = T0 - HOUR_MS, reason: str = "Because") -> dict[str, str]:
    at = iso(since_ms)[:19] + "Z"
    return {
        "type": type_, "status": status, "reason": reason, "message": f"{type_} is {status}", "lastTransitionTime": at,
        "lastHeartbeatTime": at,
    }  # fmt: skip


def node(name: str, *conditions: dict[str, str], created_ms: int = T0 - 90 * OLD_MS, **spec: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "creationTimestamp": iso(created_ms)[:19] + "Z"}, "spec": spec,
        "status": {"conditions": [condition("Ready", "True"), *conditions]},
    }  # fmt: skip


class Read:
    """A collector's part that reads conditions, with the stand-in of the API server behind the real client."""

    def __init__(self, server: StandIn, token: Path, warn: Sequence[str] = (), ignore: Sequence[str] = ()) -> None:
        token.write_text("token")
        self.api = KubernetesApi(KubernetesConfig(server=server.url, token_file=str(token), timeout_s=5))
        self.server, self.now_ms, self.stored = server, T0, list[Event]()
        self.taken: list[Event] = []
        self.open: list[Incident] = []
        self.refuses = False
        store = SimpleNamespace(
            events=SimpleNamespace(write=self._write), incidents=SimpleNamespace(newest=lambda state: self.open)
        )
        self.pipeline: Any = SimpleNamespace(
            index=small_index(4, 2), store=store, leading=True, engine=object(), now_ms=lambda: self.now_ms,
            ticks=SimpleNamespace(troubles=dict[str, str]()),
        )  # fmt: skip
        self.conditions = NodeConditions(
            ConditionSettings.of(warn, ignore), cast(Any, self.pipeline), self.api.nodes, self.taken.extend
        )

    def _write(self, events: Sequence[Event]) -> None:
        if self.refuses:
            raise StoreError("the disk is full")
        self.stored += events

    def set(self, *nodes: dict[str, Any]) -> None:
        self.server.node, self.server.others = nodes[0], list(nodes[1:])

    def ask(self, after_s: int = 60) -> list[tuple[str, str, Standing]]:
        """Read once more; return what is new."""
        self.now_ms += after_s * 1000
        before = len(self.stored)
        self.conditions.ask()
        assert self.taken == self.stored
        found = [(event.node, from_message(event.message)) for event in self.stored[before:]]
        return [(name, each.type, each.standing) for name, each in found]

    @property
    def newest(self) -> NodeCondition:
        return from_message(self.stored[-1].message)


@pytest.fixture
def server() -> Iterator[StandIn]:
    with stand_in(StandIn(node("n0"), [])) as made:
        yield made


@pytest.fixture
def read(server: StandIn, tmp_path: Path) -> Read:
    return Read(server, tmp_path / "token")


def test_what_is_bad_is_stored_once_and_again_when_it_changes(read: Read) -> None:
    deadlock = condition("KernelDeadlock", "True", reason="DockerHung")
    own = condition("DroverHealthy", "False")
    read.set(node("n0", deadlock, condition("XfsShutdown", "False"), own), node("n1"), node("stranger", deadlock))
    assert read.ask() == [("n0", "KernelDeadlock", Standing.FAULT)]
    [event] = read.stored
    assert (event.kind, event.code, event.source, event.received_ms) == (
        "condition", "KernelDeadlock", "kubernetes", read.now_ms,
    )  # fmt: skip
    first = read.newest
    assert (first.since_ms, first.old, first.place) == (T0 - HOUR_MS, False, Place.SERVICE)
    deadlock["message"] = "its author counts up in it"
    assert read.ask() == []
    deadlock["reason"] = "AnotherTask"
    assert read.ask() == [("n0", "KernelDeadlock", Standing.FAULT)]
    read.server.cordon()
    assert read.ask() == [("n0", "KernelDeadlock", Standing.FAULT)] and read.newest.place is Place.CLOSED
    deadlock["status"] = "Unknown"
    assert read.ask() == [("n0", "KernelDeadlock", Standing.UNKNOWN)]
    deadlock["status"] = "False"
    assert read.ask() == [("n0", "KernelDeadlock", Standing.WELL)]
    read.set(node("n1", condition("KernelDeadlock", "True")))
    assert read.ask() == [("n1", "KernelDeadlock", Standing.FAULT)]  # that n0 is gone says nothing: it was well
    read.set(node("n0"))
    assert read.ask() == [("n1", "KernelDeadlock", Standing.GONE)]


def test_types_that_nobody_knows_are_shown_and_not_judged_and_settings_add_and_leave_out(
    server: StandIn, tmp_path: Path
) -> None:
    both = Read(server, tmp_path / "token", ["LunchOk=False", "Strange"], ["NTPProblem"])
    both.set(
        node("n0", condition("Weather", "True"), condition("LunchOk", "False"), condition("NTPProblem", "True"),
             condition("Strange", "False"))
    )  # fmt: skip
    assert both.ask() == [("n0", "LunchOk", Standing.FAULT)]
    shown, well = both.conditions.reading.nodes["n0"]
    assert ([(each.type, each.standing) for each in shown], well) == (
        [("Weather", Standing.SHOWN), ("LunchOk", Standing.FAULT)], 2,
    )  # fmt: skip
    both.set(node("n0", condition("Weather", "False")))
    assert both.ask() == [("n0", "LunchOk", Standing.GONE), ("n0", "Weather", Standing.SHOWN)]  # "Strange" was well


@pytest.mark.parametrize(
    ("bad", "place", "old"),
    [
        (node("n0", condition("GPUMissing", "True"), created_ms=T0 - NEW_MS // 2), Place.NEW, False),
        (node("n0", condition("GPUMissing", "True"), unschedulable=True), Place.CLOSED, False),
        (node("n0", condition("GPUMissing", "True", T0 - 21 * OLD_MS)), Place.SERVICE, True),
        (node("n0", condition("GPUMissing", "True", T0 + HOUR_MS)), Place.SERVICE, False),
    ],
)
def test_what_else_is_known_goes_along(read: Read, bad: dict[str, Any], place: Place, old: bool) -> None:
    read.set(bad)
    read.ask()
    assert (read.newest.place, read.newest.old) == (place, old)
    assert read.newest.since_ms <= read.now_ms  # the API server's clock may be ahead


def test_a_new_leader_reports_what_stands_and_what_has_ended_meanwhile(read: Read) -> None:
    deadlock = condition("KernelDeadlock", "True")
    read.set(node("n0", deadlock))
    read.ask()
    read.pipeline.engine = object()
    over = NodeCondition("GPUMissing", "True", standing=Standing.FAULT)
    read.open = [
        Incident(
            "i1", IncidentKind.LIVENESS, "condition_gpu_missing", "node", "n0", None, (("n0", None), ("n3", None)), T0,
            T0, None, Severity.WARNING, 0.5, RecommendedAction.WATCH, "", "", (Evidence(""),), detectors=(NAME,),
            snapshots={NAME: {"GPUMissing": to_message(over)}},
        )
    ]  # fmt: skip
    assert read.ask() == [
        ("n0", "KernelDeadlock", Standing.FAULT), ("n0", "GPUMissing", Standing.GONE),
        ("n3", "GPUMissing", Standing.GONE),
    ]  # fmt: skip
    assert read.ask() == []


def test_no_answer_ends_nothing_and_is_said(read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in the middle of a list: its first pages alone would make the nodes of the others look gone."""
    monkeypatch.setattr(kubernetes_api, "PAGE", 1)
    read.set(node("n0"), node("n1", condition("KernelDeadlock", "True")))
    assert len(read.ask()) == 1
    read_ms = read.now_ms
    answer = read.server.answer

    def half(method: str, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any], dict[str, str]]:
        return (503, {"message": "later"}, {}) if "continue" in read.server.query else answer(method, path, body)

    read.server.answer = half  # type: ignore[method-assign]  # it fails at the second page
    assert read.ask(600) == []
    assert read.pipeline.ticks.troubles[TROUBLE].startswith(
        "The conditions of Kubernetes' nodes are last read 10 minutes ago: cannot list the nodes: later (503)"
    )
    assert read.conditions.reading.at_ms == read_ms
    read.server.answer = answer  # type: ignore[method-assign]  # it is well again
    assert read.ask() == [] and TROUBLE not in read.pipeline.ticks.troubles


def test_what_cannot_be_stored_is_found_again(read: Read) -> None:
    read.set(node("n0", condition("KernelDeadlock", "True")))
    read.refuses = True
    assert read.ask() == [] and "the disk is full" in read.pipeline.ticks.troubles[TROUBLE]
    read.refuses = False
    assert read.ask() == [("n0", "KernelDeadlock", Standing.FAULT)]


def test_of_very_many_changes_the_faults_come_first_and_the_rest_with_the_next_reading(
    read: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_conditions, "EVENTS", 2)
    read.set(*(node(f"n{n}") for n in range(4)))
    read.ask()
    read.set(*(node(f"n{n}", condition("KernelDeadlock", "True")) for n in range(4)))
    assert [name for name, _, _ in read.ask()] == ["n0", "n1"]
    assert [name for name, _, _ in read.ask()] == ["n2", "n3"]
    assert read.ask() == []


def test_types_that_nobody_judges_do_not_keep_the_end_of_a_fault_waiting(
    read: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_conditions, "EVENTS", 2)
    read.set(
        *(node(f"n{n}", condition("Noise", "True")) for n in range(3)), node("n3", condition("XfsShutdown", "True"))
    )
    read.ask()
    read.set(
        *(node(f"n{n}", condition("Noise", "False")) for n in range(3)), node("n3", condition("XfsShutdown", "False"))
    )
    assert ("n3", "XfsShutdown", Standing.WELL) in read.ask()


def test_reasons_that_change_at_each_reading_are_not_kept(read: Read) -> None:
    for number in range(20):
        read.set(node("n0", condition("Strange", "True", reason=f"Round{number}")))
        read.ask()
    assert len(read.conditions._shared) <= 4


@pytest.mark.parametrize(
    ("page", "why"),
    [
        ({}, "without a list"),
        ({"items": None}, "without a list"),
        ({"items": []}, "none of the fleet's nodes"),
        ({"items": [node("n0.other")]}, "none of the fleet's nodes"),
        ({"items": [node("n0")], "metadata": {"continue": "again"}}, "same page"),
    ],
)
def test_an_api_server_that_answers_nonsense_ends_nothing_and_is_said(
    read: Read, page: dict[str, Any], why: str
) -> None:
    """As one whose database was lost, and one whose nodes have other names than the fleet's."""
    read.set(node("n1", condition("KernelDeadlock", "True")))
    assert len(read.ask()) == 1
    read_ms, asked = read.now_ms, 0

    def broken(method: str, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any], dict[str, str]]:
        nonlocal asked
        asked += 1
        return (200, page, {}) if asked < 20 else (503, {"message": "asked without end"}, {})

    read.server.answer = broken  # type: ignore[method-assign]  # a list that makes no sense
    assert read.ask() == []
    assert why in read.pipeline.ticks.troubles[TROUBLE] and read.conditions.reading.at_ms == read_ms


def test_one_list_serves_planned_work_too(read: Read) -> None:
    read.set(node("n0", condition("KernelDeadlock", "True")), node("n1", taints=[{"key": "maintenance"}]))
    assert marks_of(read.conditions.through(read.api.nodes()), {"maintenance"}, set(), lambda _: False) == {
        "n1": ["maintenance"]
    }
    assert [event.node for event in read.stored] == ["n0"]


def test_a_large_cluster_is_read_less_often(read: Read) -> None:
    assert read.conditions.every_s == 60
    read.conditions.reading = node_conditions.Reading(T0, {f"n{n}": ((), 5) for n in range(12_500)})
    assert read.conditions.every_s == 250


def test_garbled_conditions_are_left_out(read: Read) -> None:
    bad = node("n0", {"type": "", "status": "True"}, condition("KernelDeadlock", "True"))
    bad["status"]["conditions"] += ["x", {"type": "GPUMissing", "status": "True", "lastTransitionTime": "yesterday"}]
    read.set(bad, {"metadata": None, "status": None}, {"metadata": {"name": "n1"}})
    assert [type_ for _, type_, _ in read.ask()] == ["KernelDeadlock", "GPUMissing"]
    assert read.newest.since_ms == 0


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('warn_conditions = ["A=Maybe"]', "give TYPE, TYPE=True or TYPE=False"),
        ('warn_conditions = ["no type"]', "is no type of a condition"),
        ('ignore_conditions = ["A=True"]', "is no type of a condition"),
    ],
)
def test_settings_are_checked(line: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        load_text(KubernetesConfig, line, "collector.toml")


def test_events_of_conditions_are_stored_and_read_for_the_nodes_page(store: Store) -> None:
    event = node_conditions._event("n0", NodeCondition("Ready", "False", standing=Standing.FAULT), T0)
    store.events.write([event])
    assert store.events.read(T0 - 1, T0 + 1, "n0") == [event]

"""Evictions by policy/v1, cordons of others and answers of all kinds, on the stand-in of an API server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from drover_collector.actions.base import ActError, AwayError, LaterError, Service
from drover_collector.actions.kubernetes.actuator import KubernetesActuator
from drover_collector.actions.kubernetes.api import KubernetesApi, in_cluster
from drover_collector.actions.settings import ActConfig, KubernetesConfig
from drover_collector.store import Store
from drover_core.model.events import Act, ActionState, Health
from testbed.desks import Detected, dispatcher_of
from testbed.kubernetes_pods import pod, request
from testbed.kubernetes_stand_in import StandIn, stand_in
from testbed.waiting import wait_until


@pytest.fixture
def current(tmp_path: Path) -> Iterator[tuple[StandIn, KubernetesActuator]]:
    (tmp_path / "token").write_text("t")
    node = {
        "metadata": {"name": "gpu01", "resourceVersion": "1"}, "spec": {},
        "status": {"conditions": [{"type": "Ready", "status": "True"}]},
    }  # fmt: skip
    mirror = pod("mirror", "gpu01", "Node", 0)
    mirror["metadata"]["annotations"] = {"kubernetes.io/config.mirror": "hash"}
    pods = [pod("a", "gpu01"), pod("b", "gpu01"), pod("daemon", "gpu01", "DaemonSet"), mirror]
    with stand_in(StandIn(node, pods)) as made:
        config = KubernetesConfig(server=made.url, token_file=str(tmp_path / "token"), ca_file="", timeout_s=5)
        yield made, KubernetesActuator(KubernetesApi(config), config.gpu_resources)


def test_policy_v1_evictions_of_this_very_pod(current: tuple[StandIn, KubernetesActuator]) -> None:
    server, actuator = current
    assert "evicted: default/a, default/b" in actuator.do(*request(Act.ISOLATE, "gpu01")).detail
    assert [e["apiVersion"] for e in server.evictions] == ["policy/v1", "policy/v1"]
    assert [e["deleteOptions"]["preconditions"]["uid"] for e in server.evictions] == ["uid-a", "uid-b"]
    assert actuator.observe("gpu01").service is Service.DRAINED


@pytest.mark.parametrize(
    ("says", "reason"),
    [
        ("fresh", "still being processed"),
        ("budget", "needs 2 healthy pods and has 2"),
        ("two", "more than one PodDisruptionBudget"),
    ],
)
def test_a_budget_that_holds_one_pod_does_not_hold_the_next(
    current: tuple[StandIn, KubernetesActuator], says: str, reason: str
) -> None:
    server, actuator = current
    server.says["a"] = says
    with pytest.raises(LaterError, match=f"evicted: default/b; held by a disruption budget: default/a .*{reason}"):
        actuator.do(*request(Act.ISOLATE, "gpu01"))
    server.says.clear()
    assert "evicted: default/a" in actuator.do(*request(Act.ISOLATE, "gpu01")).detail


@pytest.mark.parametrize("says", ["gone", "successor"])
def test_a_pod_that_has_gone_meanwhile_is_not_claimed(current: tuple[StandIn, KubernetesActuator], says: str) -> None:
    server, actuator = current
    server.says["a"] = says
    assert "evicted: default/b" in actuator.do(*request(Act.ISOLATE, "gpu01")).detail


@pytest.mark.parametrize(
    ("broken", "error", "reason"),
    [
        ((200, b"<html>please log in"), AwayError, "no JSON"),
        ((503, b"<html>no upstream"), AwayError, "no upstream"),
        ((500, b'{"message": "etcdserver: leader changed"}'), LaterError, "leader changed"),
        ((429, b'{"message": "too many requests"}'), LaterError, "too many requests"),
        ((422, b'{"message": "spec.taints[0].value: Invalid value"}'), ActError, "Invalid value"),
        ((302, b""), ActError, "302"),
    ],
)
def test_other_answers(
    current: tuple[StandIn, KubernetesActuator], broken: tuple[int, bytes], error: type[ActError], reason: str
) -> None:
    server, actuator = current
    server.broken = broken
    with pytest.raises(ActError, match=reason) as raised:
        actuator.do(*request(Act.DRAIN, "gpu01"))
    assert type(raised.value) is error


@pytest.mark.parametrize(("says", "state"), [("budget", ActionState.INTENDED), ("forbidden", ActionState.FAILED)])
def test_a_node_that_is_closed_is_out_though_its_pods_stay(
    current: tuple[StandIn, KubernetesActuator], kept: Store, says: str, state: ActionState
) -> None:
    """The desk looks after it, a person can put it back, and then nothing closes it again."""
    server, actuator = current
    server.says["a"] = says
    desk = dispatcher_of(kept, ActConfig(mode="enforce", validate=False), [actuator], lambda _: actuator, look_s=3600)
    desk.start()
    try:
        asked = desk.drain("gpu01", Act.ISOLATE, "corrupts data", "ann")
        wait_until(lambda: kept.actions.history(asked.id)[-1].detail, "the first try is over")
        assert desk.context.outages.current["gpu01"].stage is Health.DRAINING
        tried = kept.actions.history(asked.id)[-1]
        assert tried.state is state
        assert "default/a" in tried.detail

        back, _ = desk.resume("gpu01", "wrong node", "ann", force=True)
        assert back is not None
        assert desk.wait(back, 20).state is ActionState.DONE
        wait_until(lambda: kept.actions.history(asked.id)[-1].state is ActionState.FAILED, "the isolation is dropped")
        assert desk.context.outages.current["gpu01"].stage is Health.HEALTHY
        assert actuator.observe("gpu01").service is Service.IN
    finally:
        desk.stop()


def test_an_isolation_that_waits_for_a_budget_does_not_close_again_what_somebody_has_put_back(
    current: tuple[StandIn, KubernetesActuator], kept: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("drover_collector.actions.worker.WAITS_S", (0.05,))
    server, actuator = current
    server.says["a"], answer = "budget", server.answer

    def answers(method: str, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any], dict[str, str]]:
        said = answer(method, path, body)
        if path.endswith("/eviction") and len(server.evictions) == 3:  # of a and b, and of a once more
            server.change({"spec": {"taints": [], "unschedulable": None}}, "kubectl")
        return said

    monkeypatch.setattr(server, "answer", answers)
    desk = dispatcher_of(kept, ActConfig(mode="enforce", validate=False), [actuator], lambda _: actuator, look_s=0.02)
    desk.start()
    try:
        asked = desk.drain("gpu01", Act.ISOLATE, "corrupts data", "ann")
        done = desk.wait(asked, 20)
        assert (done.state, "somebody else has put the node back" in done.detail) == (ActionState.FAILED, True)
        wait_until(lambda: desk.context.outages.current["gpu01"].stage is Health.HEALTHY, "it is theirs")
    finally:
        desk.stop()
    assert actuator.observe("gpu01").service is Service.IN


@pytest.mark.parametrize("tracks", [True, False], ids=["the server says who has set it", "it does not"])
def test_a_cordon_set_after_ours_was_lifted_is_not_undone(
    current: tuple[StandIn, KubernetesActuator], kept: Store, tracks: bool
) -> None:
    """Where the server does not say it, a look in between does."""
    server, actuator = current
    server.tracks, server.pods = tracks, []
    desk = dispatcher_of(kept, ActConfig(mode="enforce", validate=False), [actuator], lambda _: actuator, look_s=0.02)
    desk.start()
    try:
        assert desk.wait(desk.drain("gpu01", Act.DRAIN, "slow", "ann"), 20).state is ActionState.DONE
        wait_until(lambda: desk.context.outages.current["gpu01"].stage is Health.DRAINED, "it is empty")
        server.cordon(False)
        wait_until(lambda: kept.audit.read(subject="gpu01"), "it is in the audit")
        server.cordon()
        back, _ = desk.resume("gpu01", "well again", "ann", force=True)
        assert back is not None
        done = desk.wait(back, 20)
        assert (done.state, "is somebody else's, and stays" in done.detail) == (ActionState.DONE, True)
    finally:
        desk.stop()
    assert server.node["spec"] == {"taints": [], "unschedulable": True}
    (line,) = kept.audit.read(subject="gpu01")
    assert (line.what, line.by) == ("uncordon", "somebody else")


def test_a_cordon_between_two_looks_is_distinguished_from_drovers_by_who_has_set_it(
    current: tuple[StandIn, KubernetesActuator],
) -> None:
    server, actuator = current
    actuator.do(*request(Act.DRAIN, "gpu01"))
    server.cordon()  # again: still Drover's
    actuator.do(*request(Act.RESUME, "gpu01"))
    assert server.node["spec"] == {"taints": []}
    actuator.do(*request(Act.DRAIN, "gpu01"))
    server.cordon(False)
    server.cordon()
    actuator.do(*request(Act.RESUME, "gpu01"))
    assert server.node["spec"] == {"taints": [], "unschedulable": True}
    server.cordon(False)
    actuator.do(*request(Act.DRAIN, "gpu01"))
    server.node["metadata"]["managedFields"][0]["manager"] = "ancient-changes"  # after ten others
    actuator.do(*request(Act.RESUME, "gpu01"))
    assert server.node["spec"] == {"taints": []}


def test_the_guard_learns_of_foreign_cordons_and_a_missing_right_to_list_stays_in_sight(
    current: tuple[StandIn, KubernetesActuator], kept: Store
) -> None:
    server, actuator = current
    server.rows = [
        {"cells": ["gpu01", "Ready", "", "1d", "v"]},
        {"cells": ["gpu02", "Ready,SchedulingDisabled", "", "", ""]},
    ]
    detected = Detected()
    desk = dispatcher_of(
        kept, ActConfig(mode="enforce"), [actuator], lambda _: actuator, nodes=["gpu01", "gpu02"], look_s=0.02,
        detection=detected,
    )  # fmt: skip
    desk.start()
    try:
        wait_until(lambda: [s.closed for s in detected.surveys] == [{"gpu02"}], "it is counted")
    finally:
        desk.stop()
    server.broken = (403, b'{"message": "nodes is forbidden: cannot list resource"}')
    desk.start()
    try:
        wait_until(lambda: "cannot list" in desk.context.troubles.get("kubernetes nodes", ""), "it is said")
    finally:
        desk.stop()
    assert "rbac.yaml" in desk.context.troubles["kubernetes nodes"]


@pytest.mark.parametrize("text", ["", "secret1\nsecret2", "secret1 secret2"])
def test_a_token_file_with_something_else_in_it(
    current: tuple[StandIn, KubernetesActuator], tmp_path: Path, text: str
) -> None:
    (tmp_path / "token").write_text(text)
    with pytest.raises(AwayError, match="must hold one token") as raised:
        current[1].observe("gpu01")
    assert "secret" not in str(raised.value)


def test_a_server_that_is_not_of_this_authority(current: tuple[StandIn, KubernetesActuator], tmp_path: Path) -> None:
    """Nor one that speaks no TLS: the token does not go there."""
    server, _ = current
    url = server.url.replace("http:", "https:")
    api = KubernetesApi(KubernetesConfig(server=url, token_file=str(tmp_path / "token"), ca_file="", timeout_s=5))
    with pytest.raises(AwayError, match="Kubernetes"):
        api.node("gpu01")


def test_what_counts_as_a_job(current: tuple[StandIn, KubernetesActuator]) -> None:
    server, actuator = current
    claim, mig = pod("claim", "gpu01", gpus=0), pod("mig", "gpu01", gpus=0)
    claim["spec"]["resourceClaims"] = [{"name": "gpu"}]
    mig["spec"]["initContainers"] = [{"resources": {"limits": {"nvidia.com/mig-1g.10gb": "1"}}}]
    server.pods = [pod("web", "gpu01", gpus=0), pod("daemon", "gpu01", "DaemonSet"), claim, mig]
    assert actuator.observe("gpu01").jobs == ("default/claim", "default/mig")


def test_address_inside_of_a_cluster() -> None:
    assert in_cluster({}) == ""
    assert in_cluster({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}) == "https://10.0.0.1:443"
    assert (
        in_cluster({"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "6443"})
        == "https://[fd00::1]:6443"
    )

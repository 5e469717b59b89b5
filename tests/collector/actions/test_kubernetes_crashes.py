"""Around each call that changes something in Kubernetes the desk ends at once: after the next start each act is done,
and each of its effects has happened once. The API server is one in memory; a real one: test_kubernetes.py."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from drover_collector.actions.dispatcher import ActionDispatcher
from drover_collector.actions.kubernetes.actuator import KubernetesActuator
from drover_collector.actions.kubernetes.api import KubernetesApi
from drover_collector.actions.settings import ActConfig, KubernetesConfig
from drover_collector.store import Store
from drover_core.model.events import (
    Act,
    Action,
    ActionState,
    Health,
    Incident,
    RecommendedAction,
)
from testbed.desks import T0, Detected, decision, dispatcher_of, incident
from testbed.kubernetes_stand_in import StandIn, stand_in
from testbed.waiting import wait_until

NODE = "gpu01"
CONFIG = ActConfig(mode="enforce", validate=False)
# The calls of each act that change something, in their order; the desk ends before and after each.
CALLS = {
    Act.DRAIN: ("patch_node", "patch_conditions"),
    Act.ISOLATE: ("patch_node", "patch_conditions", "evict", "evict"),
    Act.RESUME: ("patch_node", "patch_conditions"),
    Act.ADVISE: ("patch_node",),
    Act.UNADVISE: ("patch_node",),
}
POINTS = [
    (act, number, when) for act, calls in CALLS.items() for number in range(len(calls)) for when in ("before", "after")
]  # fmt: skip


class CrashError(SystemExit):
    """Ends a thread as kill -9 ends all of them: nothing after it runs."""


class Server(StandIn):
    """Notes what it has changed."""

    def __init__(self) -> None:
        node = {
            "metadata": {"name": NODE, "resourceVersion": "1"}, "spec": {},
            "status": {"conditions": [{"type": "Ready", "status": "True"}]},
        }  # fmt: skip
        owners = [{"kind": "Job", "name": "o", "uid": "u", "controller": True}]
        pods = [
            {"metadata": {"name": n, "namespace": "default", "uid": n, "ownerReferences": owners}, "spec": {}}
            for n in ("a", "b")
        ]
        super().__init__(node, pods)
        self.changes: list[str] = []

    def answer(self, method: str, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any], dict[str, str]]:
        if method in ("PATCH", "POST"):
            self.changes.append(
                path.rpartition(f"/{NODE}")[2] or "node" if method == "PATCH" else body["metadata"]["name"]
            )
        return super().answer(method, path, body)


class Dying(KubernetesApi):
    """Ends the thread that calls it, at its change of this number: before it is made, or before its answer is known."""

    def __init__(self, config: KubernetesConfig, number: int, when: str) -> None:
        super().__init__(config)
        self.at, self.number, self.happened = (number, when), -1, threading.Event()

    def _around(self, call: Callable[[], Any]) -> Any:
        self.number += 1
        if (self.number, "before") == self.at or self.happened.is_set():
            self.happened.set()
            raise CrashError
        answer = call()
        if (self.number, "after") == self.at:
            self.happened.set()
            raise CrashError
        return answer

    def patch_node(self, *args: Any) -> None:
        self._around(lambda: super(Dying, self).patch_node(*args))

    def patch_conditions(self, *args: Any) -> None:
        self._around(lambda: super(Dying, self).patch_conditions(*args))

    def evict(self, *args: Any) -> bool:
        return bool(self._around(lambda: super(Dying, self).evict(*args)))


class Scene:
    """What outlives a collector."""

    def __init__(self, store: Store, folder: Path) -> None:
        (folder / "token").write_text("t")
        self.store, self.token = store, str(folder / "token")

    def begin(self, server: Server, number: int) -> None:
        """Another incident and another cluster with a node of the same name."""
        self.server, self.id = server, f"inc{number}"
        self.incidents: dict[str, Incident] = {self.id: incident(self.id, node=NODE)}
        self.config = KubernetesConfig(server=server.url, token_file=self.token, ca_file="", timeout_s=5)

    @contextmanager
    def desk(self, client: KubernetesApi | None = None) -> Iterator[ActionDispatcher]:
        actuator = KubernetesActuator(client or KubernetesApi(self.config), self.config.gpu_resources)
        made = dispatcher_of(
            self.store, CONFIG, [actuator], lambda _: actuator,
        detection=Detected(lambda: self.incidents), now_ms=lambda: T0,
            look_s=0.02,
        )  # fmt: skip
        made.start()
        try:
            yield made
        finally:
            made.stop()

    def decide(self, desk: ActionDispatcher, wanted: RecommendedAction) -> None:
        made = decision(wanted, NODE, f"d-{self.id}", of=self.id)
        self.store.decisions.write([made])
        desk.take([made])

    def actions(self, act: Act) -> list[Action]:
        return [a for a in self.store.actions.newest(incident=self.id) if a.action is act]

    def ended(self, act: Act) -> Action:
        wait_until(lambda: [a for a in self.actions(act) if a.state is not ActionState.INTENDED], f"{act} has ended")
        (found,) = self.actions(act)
        return found


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("act", CALLS)
def test_ended_around_any_change_it_is_done_and_each_effect_has_happened_once(
    kept: Store, tmp_path: Path, act: Act
) -> None:
    scene = Scene(kept, tmp_path)
    for number, (_, call, when) in enumerate(point for point in POINTS if point[0] is act):
        with stand_in(Server()) as server:
            assert isinstance(server, Server)
            scene.begin(server, number)
            at = f"{CALLS[act][call]} {call} {when}"
            if act in (Act.RESUME, Act.UNADVISE):
                first = Act.DRAIN if act is Act.RESUME else Act.ADVISE
                with scene.desk() as desk:
                    scene.decide(desk, RecommendedAction(first.value))
                    assert scene.ended(first).state is ActionState.DONE
                server.changes.clear()
            if act is Act.UNADVISE:
                scene.incidents = {scene.id: incident(scene.id, T0 + 1, NODE)}
            dying = Dying(scene.config, call, when)
            with scene.desk(dying) as desk:
                if act is Act.RESUME:
                    desk.resume(NODE, "a new fan", f"ann{number}", force=True)
                elif act is not Act.UNADVISE:
                    scene.decide(desk, RecommendedAction(act.value))
                assert dying.happened.wait(120), at
            assert [a.state for a in scene.actions(act)] == [ActionState.INTENDED], at
            with scene.desk() as desk:
                assert scene.ended(act).state is ActionState.DONE, at
                duty = desk.context.outages.current.get(NODE)
            effects = {"patch_node": "node", "patch_conditions": "/status"}
            expected = [effects.get(name, "ab"[max(0, n - 2)]) for n, name in enumerate(CALLS[act])]
            assert server.changes == expected, at
            if act in (Act.DRAIN, Act.ISOLATE):
                assert duty is not None
                assert duty.stage in (Health.DRAINING, Health.DRAINED)
                assert duty.incident_id == scene.id
                kept.outages.write([type(duty)(NODE, Health.HEALTHY, T0, scene.id, "the next begins")])

"""CloudEvents of incidents, decisions and actions, to receivers that take, refuse and fail."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest

from drover_collector.exporters import sending
from drover_collector.exporters.cloud_events import CloudEvents, cloud_event
from drover_collector.exporters.exports import Exports
from drover_collector.exporters.records import Record, of_action, of_audit, of_decision, of_incident
from drover_collector.exporters.settings import CloudEventsConfig, ExportConfig, validate_export
from drover_collector.store import Store
from drover_core.model.events import (
    Act,
    Action,
    ActionState,
    Audit,
    Decision,
    DecisionCause,
    GpuRef,
    RecommendedAction,
    Severity,
)
from drover_core.settings import SettingsError, load
from testbed.exported import Exported
from testbed.monitoring import INCIDENT
from testbed.notify_schemas import CLOUD_EVENT
from testbed.receivers import HttpReceiver, Reply, http_receiver
from testbed.waiting import wait_until

ROOT = Path(__file__).resolve().parents[3]
NOW_MS = 1_790_000_000_123
ACTION = Action(
    "a-7", "d-3", "i1", "r01n03", Act.DRAIN, "slurm", ActionState.DONE, NOW_MS,
    detail="slurm: r01n03 is draining", why="XID 79 on GPU 3", attempts=1,
)  # fmt: skip
DECISION = Decision(
    "d-3", "i1", NOW_MS, "r01n03", RecommendedAction.DRAIN, "enforce", "act", "xid", "XID 79 asks for a drain"
)
CHECKS = jsonschema.Draft202012Validator(CLOUD_EVENT)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending, "FIRST_S", 0.01)
    monkeypatch.setattr(sending, "MOST_S", 0.05)


@contextmanager
def sending_to(receiver: HttpReceiver, **settings: object) -> Iterator[CloudEvents]:
    config = replace(CloudEventsConfig("bus", receiver.url), **{"timeout_s": 2.0, **settings})
    made = CloudEvents(config, "export.cloud_events[0]")
    made.sender.start()
    try:
        yield made
    finally:
        made.close()


@pytest.mark.parametrize("state", list(ActionState))
def test_an_action_is_an_event_in_each_of_its_states(state: ActionState) -> None:
    event = cloud_event(of_action(replace(ACTION, state=state)), "/drover/alpha")
    CHECKS.validate(event)
    assert (event["type"], event["subject"]) == (f"drover.action.{state}", "r01n03")
    data = event["data"]
    assert (data["action"], data["state"], data["incident"], data["by"]) == ("drain", str(state), "i1", "drover")
    assert data["severity"] == ("warning" if state is ActionState.FAILED else "info")


@pytest.mark.parametrize("outcome", ["act", "would_act", "held", "pending_approval", "approved", "rejected", "expired"])
def test_what_is_held_refused_or_waits_for_a_person_is_an_event_of_its_decision(outcome: str) -> None:
    event = cloud_event(of_decision(replace(DECISION, outcome=outcome, cause=DecisionCause.GUARD)), "/drover")
    CHECKS.validate(event)
    assert event["type"] == f"drover.decision.{outcome}"
    assert event["data"]["node"] == "r01n03" and event["data"]["cause"] == "guard"


def test_incidents_and_gpus_and_odd_names_are_events_too() -> None:
    CHECKS.validate(cloud_event(of_incident(INCIDENT), "/drover"))
    of_gpu = of_action(replace(ACTION, action=Act.ISOLATE_GPU, gpu=GpuRef(3, "GPU-a")))
    CHECKS.validate(cloud_event(of_gpu, "/drover"))
    assert of_gpu.attributes["gpu"] == 3 and of_gpu.text.startswith("isolate_gpu GPU 3 of r01n03: done")
    odd = of_audit(Audit("x", NOW_MS, "operator/a", "approve (too late)", "", "", "", ""))
    event = cloud_event(odd, "/drover")
    CHECKS.validate(event)
    assert event["type"] == "drover.audit.approve_too_late" and "subject" not in event
    CHECKS.validate(cloud_event(Record(NOW_MS, "security", "...", "text"), "/drover"))


def test_two_states_of_an_action_differ_in_their_ids_and_one_that_is_sent_again_does_not() -> None:
    done, undone = (of_action(replace(ACTION, state=s)) for s in (ActionState.DONE, ActionState.UNDONE))
    assert cloud_event(done, "/drover")["id"] != cloud_event(undone, "/drover")["id"]
    with http_receiver() as receiver:
        receiver.replies += [Reply(503), Reply(how="close")]
        with sending_to(receiver) as made:
            made.take(done)
            wait_until(lambda: made.sender.status.sent == 1)
    assert len(receiver.got) == 3 and len({request.body for request in receiver.got}) == 1
    (request, *_) = receiver.got
    assert request.headers["content-type"] == "application/cloudevents+json; charset=utf-8"
    CHECKS.validate(request.json)


def test_two_versions_of_an_incident_at_one_time_differ_in_their_ids() -> None:
    """A receiver that takes each id once would not get the second."""
    first, second = (
        cloud_event(of_incident(replace(INCIDENT, version=n, updated_ms=NOW_MS)), "/drover") for n in (2, 3)
    )
    assert first["time"] == second["time"]
    assert first["id"] != second["id"]


def test_an_event_that_is_refused_keeps_back_none_after_it(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("t0ken")
    token.chmod(0o600)
    with http_receiver() as receiver:
        receiver.replies += [Reply(400)]
        with sending_to(receiver, token_file=str(token)) as made:
            for number in range(3):
                made.take(of_action(replace(ACTION, id=f"a-{number}")))
            wait_until(lambda: made.sender.status.sent == 2)
        assert (made.sender.status.refused, made.sender.status.dropped) == (1, 0)
    assert [request.headers["authorization"] for request in receiver.got] == ["Bearer t0ken"] * 3


def test_actions_are_handed_out_when_they_are_stored_once_in_each_state(store: Store) -> None:
    with http_receiver() as receiver:
        config = ExportConfig(cloud_events=(CloudEventsConfig("bus", receiver.url, "/drover/alpha"),))
        exported = Exported()
        exports = Exports(config, exported.index, exported.registry)
        store.actions.takers.append(exports.take_actions)
        exports.start(lambda: None)
        try:
            intended = replace(ACTION, state=ActionState.INTENDED)
            store.actions.write([intended])
            store.actions.write([replace(intended, running=True)])  # its command has begun
            store.actions.write([ACTION])
            exports.take_found([INCIDENT], [replace(DECISION, outcome="pending_approval")])
            exports.take_audit([Audit("x", NOW_MS, "operator/a", "drain", "n0", "", "", "")])  # of a kind not asked for
            wait_until(lambda: len(receiver.got) == 4)
        finally:
            exports.close()
        assert exports.statuses()["bus"].sent == 4
    assert [request.json["type"] for request in receiver.got] == [
        "drover.action.intended", "drover.action.done", f"drover.incident.{of_incident(INCIDENT).name}",
        "drover.decision.pending_approval",
    ]  # fmt: skip
    assert {request.json["source"] for request in receiver.got} == {"/drover/alpha"}


def test_settings_that_do_not_go_together_are_named(tmp_path: Path) -> None:
    def problem(text: str) -> str:
        (tmp_path / "c.toml").write_text(f'[[cloud_events]]\nname = "bus"\nurl = "http://127.0.0.1:1/"\n{text}')
        with pytest.raises(SettingsError) as error:
            validate_export(load(ExportConfig, tmp_path / "c.toml"))
        return str(error.value)

    assert "'metrics' is not known; there are incident, decision, action" in problem('kinds = ["metrics"]')
    assert "must be a URI or a path" in problem('source = ""')
    assert "must be a URI or a path" in problem('source = "two words"')
    assert "no such file" in problem('ca_file = "/none"')
    assert "'bus' is there twice" in problem('[[cloud_events]]\nname = "bus"\nurl = "http://127.0.0.1:1/"')


def test_the_example_in_the_docs_is_what_is_sent() -> None:
    page = (ROOT / "docs/how-to/standards.md").read_text("utf-8")
    section = page.partition("## CloudEvents\n")[2].partition("\n## ")[0]
    shown = re.search(r"^    \{.*?^    \}$", section, re.M | re.S)
    assert shown is not None
    assert json.loads(shown[0]) == cloud_event(of_action(ACTION), "/drover/alpha")
    assert Severity(json.loads(shown[0])["data"]["severity"])
    for state in ActionState:
        assert f"`drover.action.{state}`" in section

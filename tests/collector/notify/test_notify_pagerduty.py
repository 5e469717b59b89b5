"""PagerDuty: an alert for each incident under its id, and what PagerDuty's answers mean."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator

import jsonschema
import pytest

from drover_collector.notify.base import ReceiverOptions
from drover_collector.notify.receivers.pagerduty import PagerDuty, event
from drover_collector.notify.wording import read_message
from drover_core.model.events import Incident, Severity
from testbed.notified import LOST_GPU, NASTY, NOW_MS, OVER, PLACES, body
from testbed.notify_schemas import PAGERDUTY, PAGERDUTY_BYTES
from testbed.receivers import HttpReceiver, Reply, http_receiver

KEY = "R0SECRETKEY" + "0" * 21
RACK = dataclasses.replace(
    LOST_GPU, scope="rack", node=None, gpu=None, members=tuple((f"r01n{n:02}", None) for n in range(1, 17)),
    summary="Rack r01 gets hot air.",
)  # fmt: skip
STEPS = [("opened", LOST_GPU), ("changed", LOST_GPU), ("closed", OVER), ("opened", NASTY), ("repeated", RACK)]


@pytest.fixture
def server() -> Iterator[HttpReceiver]:
    with http_receiver() as made:
        made.usual = Reply(202, b'{"status": "success", "message": "Event processed", "dedup_key": "x"}')
        yield made


def pagerduty(server: HttpReceiver) -> PagerDuty:
    return PagerDuty(ReceiverOptions("pager", Severity.CRITICAL, 10, PLACES), KEY, f"{server.url}/v2/enqueue")


@pytest.mark.parametrize(("step", "incident"), STEPS, ids=["opened", "changed", "closed", "nasty", "rack"])
def test_pagerduty_takes_every_event(step: str, incident: Incident) -> None:
    request = event(read_message(body(step, incident), PLACES), KEY, NOW_MS)
    jsonschema.validate(request, PAGERDUTY)
    assert len(json.dumps(request)) < PAGERDUTY_BYTES


def test_an_alert_is_raised_made_worse_and_resolved_under_one_key(server: HttpReceiver) -> None:
    notifier = pagerduty(server)
    milder = dataclasses.replace(LOST_GPU, severity=Severity.WARNING)
    for step, incident in (("opened", milder), ("changed", LOST_GPU), ("closed", OVER)):
        assert notifier.deliver(f"m-{step}", body(step, incident), NOW_MS).delivered
    assert {request.path for request in server.got} == {"/v2/enqueue"}
    payload = [request.json for request in server.got]
    assert {one["dedup_key"] for one in payload} == {"3f2a9c1e77aa01bc"}
    assert {one["routing_key"] for one in payload} == {KEY}
    assert [one["event_action"] for one in payload] == ["trigger", "trigger", "resolve"]
    assert [one["payload"]["severity"] for one in payload[:2]] == ["warning", "critical"]
    assert payload[1]["payload"]["summary"].startswith("CRITICAL (worse than before): XID 79 on GPU 3")


def test_what_the_page_says(server: HttpReceiver) -> None:
    pagerduty(server).deliver("m1", body(), NOW_MS)
    payload = server.got[0].json
    assert payload["payload"]["source"] == "r01n03"
    assert payload["payload"]["component"] == "GPU 3"
    assert payload["payload"]["group"] == "train"
    assert payload["payload"]["timestamp"] == "2026-11-23T02:13:20.000Z"
    details = payload["payload"]["custom_details"]
    assert details["What to do"] == LOST_GPU.advice
    assert details["Where"] == "r01n03 GPU 3 (rack r01, pool train, H100-SXM)"
    assert details["Since"] == "23 Nov 01:59 UTC, for 14 min"
    assert details["Seen"].endswith("7 of its 8 GPUs answer.")
    assert payload["links"][0]["href"] == "https://drover.example/incidents?id=3f2a9c1e77aa01bc"


@pytest.mark.parametrize("severity", list(Severity))
def test_severities_are_pagerdutys(severity: Severity) -> None:
    payload = read_message(body("opened", dataclasses.replace(LOST_GPU, severity=severity)), PLACES)
    assert event(payload, KEY, NOW_MS)["payload"]["severity"] == severity.value


def test_a_bad_request_is_given_up_with_pagerdutys_words_but_not_the_key(server: HttpReceiver) -> None:
    errors = ["Length of 'routing_key' is incorrect (should be 32 characters)", f"no integration {KEY}"]
    said = {"status": "invalid event", "message": "Event object is invalid", "errors": errors}
    server.usual = Reply(400, json.dumps(said).encode())
    result = pagerduty(server).deliver("m1", body(), NOW_MS)
    assert (result.delivered, result.permanent) == (False, True)
    assert result.detail.startswith("answered 400: Event object is invalid; Length of 'routing_key'")
    assert "no integration ***; check the Integration Key" in result.detail


@pytest.mark.parametrize("text", [b"", b"nonsense", b"[]", b'{"message": 1, "errors": 2}'])
def test_a_bad_request_without_words_too(server: HttpReceiver, text: bytes) -> None:
    server.usual = Reply(400, text)
    result = pagerduty(server).deliver("m1", body(), NOW_MS)
    assert result.permanent
    assert "check the Integration Key" in result.detail


@pytest.mark.parametrize("status", [429, 500, 503])
def test_the_others_are_sent_again(server: HttpReceiver, status: int) -> None:
    server.usual = Reply(status)
    result = pagerduty(server).deliver("m1", body(), NOW_MS)
    assert (result.delivered, result.permanent) == (False, False)

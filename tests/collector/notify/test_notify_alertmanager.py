"""Alertmanager: alerts that live as long as their incident, in a stand-in's words and in a real one (SYSTEM=1)."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from drover_collector.notify.base import ReceiverOptions
from drover_collector.notify.receivers.alertmanager import Alertmanager, alert
from drover_collector.notify.wording import read_message
from drover_core.model.events import Incident, IncidentKind, Severity
from drover_core.times import from_iso
from testbed.alertmanager import Running, alertmanager
from testbed.notified import LOST_GPU, NASTY, NOW_MS, PLACES, body
from testbed.notify_schemas import ALERTMANAGER
from testbed.receivers import HttpReceiver, Reply, http_receiver
from testbed.waiting import wait_until

MASS = dataclasses.replace(
    LOST_GPU, scope="fleet", cause="mass_event", node=None, gpu=None, members=tuple((n, None) for n in PLACES)
)
WARNING = dataclasses.replace(LOST_GPU, severity=Severity.WARNING)
LABELS = {
    "alertname": "DroverXid", "incident": LOST_GPU.id, "severity": "critical", "kind": "xid", "scope": "gpu",
    "node": "r01n03", "gpu": "3", "rack": "r01", "pool": "train",
}  # fmt: skip


@pytest.fixture
def server() -> Iterator[HttpReceiver]:
    with http_receiver() as made:
        made.usual = Reply(200, b"[]")
        yield made


def notifier(*urls: str, **options: Any) -> Alertmanager:
    return Alertmanager(ReceiverOptions("am", Severity.INFO, 10, PLACES), urls, **{"repeat_s": 60, **options})


def known(labels: dict[str, str]) -> Reply:
    """What the API answers when it has this alert."""
    one = {"labels": labels, "annotations": {"summary": "s"}, "startsAt": "2026-11-23T02:00:00.123Z",
           "endsAt": "2026-11-23T03:00:00Z", "generatorURL": "https://drover.example/i",
           "receivers": [], "fingerprint": "f", "updatedAt": "x", "status": {"state": "active"}}  # fmt: skip
    return Reply(200, json.dumps([one]).encode())


@pytest.mark.parametrize("incident", [LOST_GPU, NASTY, MASS], ids=["gpu", "nasty", "mass"])
def test_alertmanager_takes_every_alert(incident: Incident) -> None:
    message = read_message(body("opened", incident), PLACES)
    jsonschema.validate([alert(message, {"cluster": "alpha"}, NOW_MS, 60)], ALERTMANAGER)


def test_labels_say_where_and_annotations_what(server: HttpReceiver) -> None:
    assert notifier(server.url, labels={"cluster": "alpha"}).deliver("m1", body(), NOW_MS).delivered
    asked, posted = server.got
    assert (asked.method, asked.path) == ("GET", "/api/v2/alerts?filter=incident%3D%223f2a9c1e77aa01bc%22")
    assert (posted.method, posted.path) == ("POST", "/api/v2/alerts")
    (one,) = posted.json
    jsonschema.validate(posted.json, ALERTMANAGER)
    assert one["labels"] == {**LABELS, "cluster": "alpha"}
    assert one["annotations"]["summary"] == LOST_GPU.summary
    assert one["annotations"]["advice"] == LOST_GPU.advice
    assert "7 of its 8 GPUs answer." in one["annotations"]["description"]
    assert from_iso(one["startsAt"]) == LOST_GPU.since_ms
    assert from_iso(one["endsAt"]) == NOW_MS + 180_000  # two messages may be lost
    assert one["generatorURL"] == "https://drover.example/incidents?id=3f2a9c1e77aa01bc"


def test_a_mass_event_is_called_one() -> None:
    message = read_message(body("opened", MASS), PLACES)
    assert alert(message, {}, NOW_MS, 60)["labels"]["alertname"] == "DroverMassEvent"


def test_an_alert_is_sent_again_without_a_question(server: HttpReceiver) -> None:
    am = notifier(server.url)
    am.deliver("m1", body(), NOW_MS)
    assert am.repeat_s == 60
    am.deliver("m2", body("repeated"), NOW_MS + 60_000)
    assert [request.method for request in server.got] == ["GET", "POST", "POST"]
    assert from_iso(server.got[2].json[0]["endsAt"]) == NOW_MS + 240_000
    assert server.got[2].json[0]["labels"] == server.got[1].json[0]["labels"]


@pytest.mark.parametrize("restarted", [False, True])
def test_an_escalation_ends_the_old_alert_in_the_same_request(server: HttpReceiver, restarted: bool) -> None:
    am = notifier(server.url)
    am.deliver("m1", body("opened", WARNING), NOW_MS)
    if restarted:
        am = notifier(server.url)
    server.replies = [known({**LABELS, "severity": "warning"})]
    assert am.deliver("m2", body("changed", LOST_GPU), NOW_MS + 5000).delivered
    new, old = server.got[-1].json
    jsonschema.validate(server.got[-1].json, ALERTMANAGER)
    assert new["labels"] == LABELS
    assert old["labels"] == {**LABELS, "severity": "warning"}
    assert from_iso(old["endsAt"]) == NOW_MS + 5000
    assert old["startsAt"] == "2026-11-23T02:00:00.123Z"


def test_the_end_ends_whatever_there_is_of_it(server: HttpReceiver) -> None:
    am = notifier(server.url)
    am.deliver("m1", body(), NOW_MS)
    server.replies = [known(LABELS)]
    over = dataclasses.replace(LOST_GPU, closed_ms=NOW_MS + 60_000)
    assert am.deliver("m2", body("closed", over, NOW_MS + 61_000), NOW_MS + 90_000).delivered
    (one,) = server.got[-1].json
    assert one["labels"] == LABELS
    assert from_iso(one["endsAt"]) == NOW_MS + 60_000  # then it was over, not when this could be sent
    before = len(server.got)
    assert am.deliver("m3", body("closed", over), NOW_MS + 90_000).delivered
    assert [request.method for request in server.got[before:]] == ["GET"]  # it has none any more: none is made


def test_each_member_of_a_cluster_gets_it_and_one_is_enough(
    server: HttpReceiver, caplog: pytest.LogCaptureFixture
) -> None:
    with http_receiver() as other:
        other.usual = Reply(503)
        am = notifier(other.url, server.url)
        assert am.deliver("m1", body(), NOW_MS).delivered
        assert "alertmanager am, member 1: answered 503" in caplog.text
        other.usual = Reply(200, b"[]")
        assert am.deliver("m2", body("repeated"), NOW_MS + 60_000).delivered
        assert other.got[-1].json[0]["labels"] == LABELS
        other.usual = server.usual = Reply(503)
        result = am.deliver("m3", body("repeated"), NOW_MS + 60_000)
        assert (result.delivered, result.detail) == (False, "answered 503")
        assert caplog.text.count("member 1") == 2  # each time that it begins to fail


def test_a_member_that_hangs_keeps_none_of_the_others_waiting(server: HttpReceiver) -> None:
    with http_receiver() as other:
        other.usual = Reply(how="hang")
        am = Alertmanager(ReceiverOptions("am", Severity.INFO, 0.2, PLACES), (other.url, server.url), repeat_s=60)
        assert am.deliver("m1", body(), NOW_MS).delivered
        assert [request.method for request in server.got] == ["GET", "POST"]


def test_who_asks_is_answered(server: HttpReceiver) -> None:
    notifier(server.url, authorization="Bearer t0ken").deliver("m1", body(), NOW_MS)
    assert [request.headers["authorization"] for request in server.got] == ["Bearer t0ken"] * 2
    server.usual = Reply(401)
    result = notifier(server.url, authorization="Bearer t0ken").deliver("m1", body(), NOW_MS)
    assert (result.delivered, result.permanent) == (False, False)
    assert result.detail == "answered 401: give username and password_file, or token_file"


def test_what_it_calls_invalid_is_given_up_with_its_words(server: HttpReceiver) -> None:
    server.replies = [Reply(200, b"[]"), Reply(400, b'"invalid label set:\n t0ken"')]
    result = notifier(server.url, authorization="Bearer t0ken").deliver("m1", body(), NOW_MS)
    assert (result.permanent, result.detail) == (True, 'answered 400: "invalid label set: ***"')


def test_another_server_at_that_address(server: HttpReceiver) -> None:
    server.usual = Reply(200, b"<html>")
    result = notifier(server.url).deliver("m1", body(), NOW_MS)
    assert not result.delivered
    assert "check that this is the address of an Alertmanager" in result.detail


class Pages:
    """What a real Alertmanager would send people, as its webhook carries it."""

    def __init__(self, hook: HttpReceiver) -> None:
        self._hook = hook

    def of(self, incident: str, status: str) -> list[str]:
        """Severities of the alerts of this incident that were sent so, in order."""
        return [
            one["labels"]["severity"]
            for request in self._hook.got
            for one in request.json["alerts"]
            if one["labels"]["incident"] == incident and one["status"] == status
        ]


@pytest.fixture(scope="module")
def hook() -> Iterator[HttpReceiver]:
    with http_receiver() as made:
        yield made


@pytest.fixture(scope="module")
def real(hook: HttpReceiver, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with alertmanager(tmp_path_factory.mktemp("alertmanager"), hook.url, members=2) as running:
        yield running


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def lived(id_: str, node: str, **changes: Any) -> Incident:
    at_ms = now_ms()
    return dataclasses.replace(
        LOST_GPU, id=id_, node=node, members=((node, 3),), opened_ms=at_ms, since_ms=at_ms - 60_000,
        severity=Severity.WARNING, **changes,
    )  # fmt: skip


@pytest.mark.system
def test_a_real_cluster_receives_groups_escalates_and_resolves(real: Running, hook: HttpReceiver) -> None:
    am, pages = notifier(*real.urls), Pages(hook)
    one, two = lived("real1", "r01n01"), lived("real2", "r01n02", kind=IncidentKind.THERMAL)
    for incident in (one, two):
        assert am.deliver("m", body("opened", incident, now_ms()), now_ms()).delivered
    wait_until(lambda: pages.of("real1", "firing") and pages.of("real2", "firing"), "both are sent")
    together = [
        request.json for request in hook.got
        if {a["labels"]["incident"] for a in request.json["alerts"]} >= {"real1", "real2"}
    ]  # fmt: skip
    assert together, "grouped by their rack into one page"
    assert together[0]["groupLabels"] == {"rack": "r01"}
    for member in (0, 1):
        assert {labels["incident"] for labels in real.firing(member)} == {"real1", "real2"}

    worse = dataclasses.replace(one, severity=Severity.CRITICAL, version=2)
    restarted = notifier(*real.urls)  # remembers nothing of the warning
    assert restarted.deliver("m", body("changed", worse, now_ms()), now_ms()).delivered
    wait_until(lambda: "critical" in pages.of("real1", "firing"), "the critical alert is sent")
    wait_until(lambda: "warning" in pages.of("real1", "resolved"), "the end of the warning is sent")
    for member in (0, 1):
        severities = [labels["severity"] for labels in real.firing(member) if labels["incident"] == "real1"]
        assert severities == ["critical"], "no warning is left burning"

    assert restarted.deliver("m", body("repeated", worse, now_ms()), now_ms()).delivered
    for incident in (worse, two):
        over = dataclasses.replace(incident, closed_ms=now_ms(), version=3)
        assert restarted.deliver("m", body("closed", over, now_ms()), now_ms()).delivered
    wait_until(lambda: "critical" in pages.of("real1", "resolved"), "the end is sent")
    wait_until(lambda: pages.of("real2", "resolved"), "the other's too")
    for member in (0, 1):
        wait_until(lambda member=member: real.firing(member) == [], "nothing burns any more")


@pytest.mark.system
def test_a_real_one_forgets_what_is_not_sent_again(real: Running, hook: HttpReceiver) -> None:
    am = notifier(*real.urls, repeat_s=1)
    incident = lived("real3", "r02n01")
    assert am.deliver("m", body("opened", incident, now_ms()), now_ms()).delivered
    assert [labels["incident"] for labels in real.firing()] == ["real3"]
    wait_until(lambda: Pages(hook).of("real3", "resolved"), "a collector that died leaves no alert for ever")


@pytest.mark.system
def test_a_real_one_takes_what_is_long_and_odd(real: Running) -> None:
    odd = dataclasses.replace(NASTY, id="real4", opened_ms=now_ms(), since_ms=now_ms())
    assert notifier(*real.urls).deliver("m", body("opened", odd, now_ms()), now_ms()).delivered
    (one,) = [one for one in real.alerts() if one["labels"]["incident"] == "real4"]
    assert one["annotations"]["summary"].startswith("r01n03 GPU 3: <!channel> & <https://evil|look>")
    over = dataclasses.replace(odd, closed_ms=now_ms())
    assert notifier(*real.urls).deliver("m", body("closed", over, now_ms()), now_ms()).delivered
    wait_until(lambda: not [a for a in real.firing() if a["incident"] == "real4"], "it is over")

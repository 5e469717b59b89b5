"""Slack: what a person reads there, what Slack takes, and what its answers mean."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator

import jsonschema
import pytest

from drover_collector.notify.base import ReceiverOptions
from drover_collector.notify.receivers.slack import ERRORS, Slack, payload
from drover_collector.notify.wording import read_message
from drover_core.model.events import Incident, RecommendedAction, Severity
from testbed.notified import LOST_GPU, NASTY, NOW_MS, OVER, PLACES, body
from testbed.notify_schemas import SLACK
from testbed.receivers import HttpReceiver, Reply, http_receiver

STEPS = [("opened", LOST_GPU), ("changed", LOST_GPU), ("repeated", LOST_GPU), ("closed", OVER), ("opened", NASTY)]


@pytest.fixture
def server() -> Iterator[HttpReceiver]:
    with http_receiver() as made:
        made.usual = Reply(200, b"ok")
        yield made


def slack(server: HttpReceiver) -> Slack:
    return Slack(ReceiverOptions("ops", Severity.WARNING, 10, PLACES), f"{server.url}/services/T0/B0/x")


def texts(request: dict[str, object]) -> str:
    return json.dumps(request, ensure_ascii=False)


@pytest.mark.parametrize(("step", "incident"), STEPS, ids=["opened", "changed", "repeated", "closed", "nasty"])
def test_slack_takes_every_message(step: str, incident: Incident) -> None:
    jsonschema.validate(payload(read_message(body(step, incident), PLACES), NOW_MS), SLACK)


def test_an_opened_incident_says_what_where_since_when_and_what_to_do(server: HttpReceiver) -> None:
    assert slack(server).deliver("m1", body(), NOW_MS).delivered
    (request,) = server.got
    assert request.path == "/services/T0/B0/x"
    assert request.headers["content-type"].startswith("application/json")
    sent = request.json
    assert sent["text"] == "CRITICAL: XID 79 on GPU 3 of node r01n03: GPU has fallen off the bus."
    assert sent["attachments"][0]["color"] == "#c8102e"
    said = texts(sent)
    for part in (
        "*What to do:* Drain the node, then reset it",
        "*Where*\\nr01n03 GPU 3 (rack r01, pool train, H100-SXM)",
        "*Since*\\n23 Nov 01:59 UTC, for 14 min",
        "*Job*\\n4711",
        "*Lost so far*\\n0.4 GPU-hours to the fault, 31.2 to peers that waited",
        "*Drover wants*\\nisolate",
        "• 7 of its 8 GPUs answer.",
        "<https://drover.example/incidents?id=3f2a9c1e77aa01bc|Open it in the console>",
        "`drover explain 3f2a9c1e77aa01bc`",
    ):
        assert part in said, part


def test_the_end_is_sent_as_one_and_asks_for_nothing(server: HttpReceiver) -> None:
    now_ms = NOW_MS + 1_680_000
    assert slack(server).deliver("m2", body("closed", OVER, now_ms), now_ms).delivered
    sent = server.got[0].json
    assert sent["text"] == "CLOSED: r01n03 GPU 3, xid 79, after 42 min"
    assert sent["attachments"][0]["color"] == "#2e9e5b"
    assert "Closed: the condition has ended. It was: XID 79 on GPU 3" in texts(sent)
    assert "*Lasted*\\n42 min, until 23 Nov 02:41 UTC" in texts(sent)
    assert "What to do" not in texts(sent)
    assert "Drover wants" not in texts(sent)


def test_texts_can_neither_mention_nor_link() -> None:
    said = texts(payload(read_message(body("opened", NASTY), PLACES), NOW_MS))
    assert "<!channel>" not in said
    assert "<https://evil" not in said
    assert "&lt;!channel&gt; &amp; &lt;https://evil|look&gt;" in said


def test_the_policy_and_the_detectors_may_differ() -> None:
    milder = dataclasses.replace(LOST_GPU, action=RecommendedAction.WATCH, asked=RecommendedAction.ISOLATE)
    assert "*Drover wants*\\nwatch (detectors recommend isolate)" in texts(
        payload(read_message(body("opened", milder), PLACES), NOW_MS)
    )


def test_a_message_that_waited_says_so() -> None:
    sent = read_message(body(), PLACES)
    assert "this message is 14 min old" in texts(payload(sent, NOW_MS + 840_000))
    assert "Late" not in texts(payload(sent, NOW_MS + 60_000))


def test_a_message_that_slack_does_not_take_is_sent_as_plain_text(server: HttpReceiver) -> None:
    server.replies = [Reply(400, b"invalid_blocks")]
    assert slack(server).deliver("m1", body("opened", NASTY), NOW_MS).delivered
    first, second = server.got
    assert "attachments" in first.json
    assert list(second.json) == ["text"]
    assert second.json["text"].startswith("CRITICAL: r01n03 GPU 3: &lt;!channel&gt;")
    assert len(second.json["text"]) < 4000


@pytest.mark.parametrize("word", sorted(ERRORS))
def test_a_webhook_that_is_gone_is_given_up_with_what_to_do(server: HttpReceiver, word: str) -> None:
    server.usual = Reply(404, word.encode())
    result = slack(server).deliver("m1", body(), NOW_MS)
    assert (result.delivered, result.permanent) == (False, True)
    assert f"answered 404 ({word}): {ERRORS[word]}; create a new one in Slack" in result.detail


@pytest.mark.parametrize("status", [403, 410])
def test_a_channel_that_is_closed_to_it_too(server: HttpReceiver, status: int) -> None:
    server.usual = Reply(status, b"<html>who knows</html>")
    result = slack(server).deliver("m1", body(), NOW_MS)
    assert result.permanent
    assert result.detail.startswith(f"answered {status}: this webhook no longer exists")


def test_too_many_messages_wait_as_long_as_slack_asks(server: HttpReceiver) -> None:
    server.usual = Reply(429, b"rate_limited", {"retry-after": "30"})
    result = slack(server).deliver("m1", body(), NOW_MS)
    assert (result.delivered, result.permanent, result.retry_after_s) == (False, False, 30)

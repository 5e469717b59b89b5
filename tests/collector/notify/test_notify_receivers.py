"""What every notifier makes of receivers that are well, ill, slow or gone; on real sockets."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from standardwebhooks import Webhook as Verifier

from drover_cli.pki import authority as certs
from drover_collector.notify.base import Notifier, ReceiverOptions
from drover_collector.notify.http import HttpAnswer, TimeLimited, _seconds
from drover_collector.notify.receivers.alertmanager import Alertmanager
from drover_collector.notify.receivers.apprise import Apprise
from drover_collector.notify.receivers.pagerduty import PagerDuty
from drover_collector.notify.receivers.slack import Slack
from drover_collector.notify.receivers.webhook import Webhook
from drover_core.model.events import Severity
from testbed.certificates import Fleet
from testbed.notified import NOW_MS, PLACES, body
from testbed.receivers import HttpReceiver, Reply, http_receiver
from testbed.waiting import wait_until

SECRET = "T0SECRETPATH"
ROUTING_KEY = "R0SECRETKEY" + "0" * 21
KEY = bytes(range(32))
LEAST = Severity.WARNING
MAKE: dict[str, Callable[[str, float], Notifier]] = {
    "webhook": lambda url, timeout_s: Webhook(ReceiverOptions("ops", LEAST, timeout_s), f"{url}/{SECRET}", KEY),
    "slack": lambda url, timeout_s: Slack(ReceiverOptions("ops", LEAST, timeout_s, PLACES), f"{url}/{SECRET}"),
    "pagerduty": lambda url, timeout_s: PagerDuty(
        ReceiverOptions("ops", LEAST, timeout_s, PLACES), ROUTING_KEY, f"{url}/v2/enqueue"
    ),
    "alertmanager": lambda url, timeout_s: Alertmanager(
        ReceiverOptions("ops", LEAST, timeout_s, PLACES), (url,), repeat_s=60, authorization=f"Bearer {SECRET}"
    ),
    "apprise": lambda url, timeout_s: Apprise(
        ReceiverOptions("ops", LEAST, timeout_s, PLACES), (f"{url.replace('http', 'json')}/{SECRET}",)
    ),
}
KINDS = list(MAKE)


@pytest.fixture
def server() -> Iterator[HttpReceiver]:
    with http_receiver() as made:
        made.usual = Reply(200, b"[]")
        yield made


@pytest.fixture(params=KINDS)
def make(request: pytest.FixtureRequest, server: HttpReceiver) -> Iterator[Callable[..., Notifier]]:
    made: list[Notifier] = []

    def build(timeout_s: float = 10.0, url: str = server.url) -> Notifier:
        made.append(MAKE[request.param](url, timeout_s))
        return made[-1]

    yield build
    for notifier in made:
        notifier.close()


def test_what_is_taken_is_delivered(make: Callable[..., Notifier], server: HttpReceiver) -> None:
    notifier = make()
    assert notifier.deliver("m1", body(), NOW_MS).delivered
    assert notifier.name == "ops"
    assert notifier.kind in KINDS
    assert notifier.min_severity is LEAST
    assert (notifier.repeat_s is not None) == (notifier.kind == "alertmanager")
    assert server.got[-1].method == "POST"


@pytest.mark.parametrize("status", [500, 503, 429])
def test_what_may_pass_is_tried_again(make: Callable[..., Notifier], server: HttpReceiver, status: int) -> None:
    server.usual = Reply(status, b"no", {"retry-after": "17"})
    notifier = make()
    result = notifier.deliver("m1", body(), NOW_MS)
    assert not result.delivered
    assert not result.permanent
    if notifier.kind == "apprise":
        assert "did not accept the message" in result.detail
    else:
        assert str(status) in result.detail
        assert result.retry_after_s == 17
    server.usual = Reply(200, b"[]")
    assert notifier.deliver("m1", body(), NOW_MS).delivered


def test_a_redirect_is_not_followed(make: Callable[..., Notifier], server: HttpReceiver) -> None:
    with http_receiver() as elsewhere:
        server.usual = Reply(307, b"", {"location": elsewhere.url})
        result = make().deliver("m1", body(), NOW_MS)
        assert not result.delivered
        assert elsewhere.got == []


@pytest.mark.parametrize("how", ["hang", "trickle", "close"])
def test_one_that_does_not_answer_is_left_in_time(
    make: Callable[..., Notifier], server: HttpReceiver, how: str
) -> None:
    server.usual = Reply(how=how)
    results: list[object] = []
    trying = threading.Thread(target=lambda: results.append(make(timeout_s=0.2).deliver("m1", body(), NOW_MS)))
    trying.start()
    trying.join(10)  # far more than twice the timeout, far less than the receiver takes
    assert len(results) == 1
    assert not results[0].delivered  # type: ignore[attr-defined]
    assert results[0].detail  # type: ignore[attr-defined]


def test_nothing_secret_is_sent(
    make: Callable[..., Notifier], server: HttpReceiver, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    for name in ("urllib3", "requests"):  # the collector keeps these quiet: main.py
        logging.getLogger(name).setLevel(logging.ERROR)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{free.getsockname()[1]}"
    details = [make(url=nobody).deliver("m1", body(), NOW_MS).detail]
    for reply in (
        Reply(400, SECRET.encode()),
        Reply(404, SECRET.encode()),
        Reply(307, b"", {"location": f"/{SECRET}"}),
    ):
        server.usual = reply
        details.append(make().deliver("m1", body(), NOW_MS).detail)
    assert all(details)
    assert not [text for text in (*details, caplog.text) if SECRET in text or ROUTING_KEY in text]


def test_the_public_library_takes_the_webhooks_signature(server: HttpReceiver) -> None:
    now_ms = int(time.time() * 1000)  # the library refuses what is older than five minutes
    assert MAKE["webhook"](server.url, 10).deliver("msg_i1_1_ops", body(now_ms=now_ms), now_ms).delivered
    (request,) = server.got
    payload = Verifier(KEY).verify(request.body, dict(request.headers))
    assert payload["type"] == "incident.opened"
    assert request.headers["webhook-id"] == "msg_i1_1_ops"
    with pytest.raises(Exception, match="No matching signature"):
        Verifier(KEY).verify(request.body + b" ", dict(request.headers))


def test_a_webhook_that_is_gone_is_given_up_at_once(server: HttpReceiver) -> None:
    server.usual = Reply(410)
    result = MAKE["webhook"](server.url, 10).deliver("m1", body(), NOW_MS)
    assert (result.delivered, result.permanent) == (False, True)
    assert "gone" in result.detail


def test_a_private_authority_is_trusted_only_where_it_is_named(tmp_path: Path) -> None:
    files = Fleet(tmp_path).issue(certs.COLLECTOR, "receiver")
    with http_receiver((files.cert, files.key)) as server:
        server.usual = Reply(200, b"[]")
        for ca_file, taken in ((str(files.ca), True), (None, False)):
            for notifier in (
                Webhook(ReceiverOptions("ops", LEAST, 10, ca_file=ca_file), server.url, KEY),
                Alertmanager(ReceiverOptions("ops", LEAST, 10, PLACES, ca_file=ca_file), (server.url,), repeat_s=60),
            ):
                result = notifier.deliver("m1", body(), NOW_MS)
                assert result.delivered is taken, result.detail
                assert ("TLS failed; check that the receiver's certificate is valid" in result.detail) is not taken
        assert [request.method for request in server.got] == ["POST", "GET", "POST"]


def test_a_proxy_is_asked_in_the_receivers_place(server: HttpReceiver) -> None:
    chat = Slack(ReceiverOptions("ops", LEAST, 10, PLACES, proxy=server.url), "http://hooks.example/T0")
    assert chat.deliver("m1", body(), NOW_MS).delivered
    assert server.got[0].path == "http://hooks.example/T0"
    hidden = PagerDuty(
        ReceiverOptions("ops", LEAST, 10, PLACES, proxy=server.url), ROUTING_KEY, "https://events.example/"
    )
    result = hidden.deliver("m1", body(), NOW_MS)
    assert not result.delivered  # this proxy has no CONNECT
    assert result.detail == "the proxy did not answer or refused the request; check its address"


def test_retry_after_is_seconds_or_a_date() -> None:
    assert _seconds("120") == 120
    assert _seconds("0") == 0
    assert _seconds("Fri, 01 Jan 2100 00:00:00 GMT") == 3600  # at most: somebody waits for the message
    assert _seconds("Fri, 01 Jan 1999 00:00:00 GMT") == 0
    assert [_seconds(text) for text in (None, "", "soon", "-5")] == [None] * 4


def test_a_call_that_hangs_is_left_behind_and_nothing_new_is_begun_before_it_ends() -> None:
    release, begun = threading.Event(), []
    bounded = TimeLimited[HttpAnswer]("try", 0.05)

    def work() -> HttpAnswer:
        begun.append(1)
        release.wait(120)
        return HttpAnswer(200)

    assert bounded.call(work) is None
    assert bounded.call(work) is None
    assert begun == [1]
    release.set()
    wait_until(lambda: bounded.call(lambda: HttpAnswer(204)) == HttpAnswer(204), "it goes on")


def test_what_a_call_raises_is_raised() -> None:
    bounded = TimeLimited[HttpAnswer]("try", 10)
    with pytest.raises(ZeroDivisionError):
        bounded.call(lambda: HttpAnswer(1 // 0))
    assert bounded.call(lambda: HttpAnswer(204)) == HttpAnswer(204)

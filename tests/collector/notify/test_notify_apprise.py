"""E-mail and the rest through the real library apprise: a real SMTP server, and HTTP receivers of its own forms."""

from __future__ import annotations

import builtins
import logging
import socket
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from drover_collector.notify.base import ReceiverOptions
from drover_collector.notify.receivers import apprise as module
from drover_collector.notify.receivers.apprise import Apprise, without_secrets
from drover_core.model.events import Severity
from drover_core.settings import SettingsError
from testbed.notified import LOST_GPU, NASTY, NOW_MS, OVER, PLACES, body
from testbed.receivers import Mailbox, Reply, http_receiver, mail_server
from testbed.waiting import wait_until

PASSWORD = "hunter22secret"


@pytest.fixture(scope="module")
def post() -> Iterator[Mailbox]:
    with mail_server() as box:
        yield box


@pytest.fixture
def box(post: Mailbox) -> Mailbox:
    post.mails.clear()
    post.refusing.clear()
    return post


def address(port: int, to: str = "ops@example.org", login: str = "") -> str:
    return f"mailto://{login}127.0.0.1:{port}?mode=insecure&from=drover@example.org&to={to}"


def apprise(*urls: str, timeout_s: float = 10) -> Apprise:
    return Apprise(ReceiverOptions("mail", Severity.WARNING, timeout_s, PLACES), urls)


def test_an_incident_arrives_as_a_mail_that_can_be_read(box: Mailbox) -> None:
    assert apprise(address(box.port)).deliver("m1", body(), NOW_MS).delivered
    ((to, mail),) = box.mails
    assert to == ["ops@example.org"]
    assert mail["subject"] == "CRITICAL: XID 79 on GPU 3 of node r01n03: GPU has fallen off the bus."
    assert "drover@example.org" in mail["from"]
    assert mail["x-application"] == "Drover"
    part = mail.get_body(("plain", "html"))
    assert part is not None
    text = part.get_content()
    for line in (
        "What to do: Drain the node, then reset it; if it comes back, replace the board.",
        "Where: r01n03 GPU 3 (rack r01, pool train, H100-SXM)",
        "Since: 23 Nov 01:59 UTC, for 14 min",
        "- 7 of its 8 GPUs answer.",
        "https://drover.example/incidents?id=3f2a9c1e77aa01bc",
        "drover explain 3f2a9c1e77aa01bc",
    ):
        assert line in text.replace("&amp;", "&"), line


def test_the_end_of_one_too(box: Mailbox) -> None:
    assert apprise(address(box.port)).deliver("m2", body("closed", OVER, NOW_MS + 1_680_000), NOW_MS).delivered
    ((_, mail),) = box.mails
    assert mail["subject"] == "CLOSED: r01n03 GPU 3, xid 79, after 42 min"


def test_markup_of_a_message_stays_text(box: Mailbox) -> None:
    assert apprise(address(box.port)).deliver("m3", body("opened", NASTY), NOW_MS).delivered
    ((_, mail),) = box.mails
    part = mail.get_body(("html",))
    if part is not None:
        assert "<!channel>" not in part.get_content()
    assert len(mail["subject"]) <= module.MAX_TITLE


def test_of_two_addresses_the_one_that_took_it_is_not_sent_it_again(box: Mailbox) -> None:
    box.refusing.add("night@example.org")
    notifier = apprise(address(box.port), address(box.port, "night@example.org"))
    first = notifier.deliver("m1", body(), NOW_MS)
    assert not first.delivered
    assert first.detail.startswith("address 2 (mailto) did not accept the message: ")
    assert [to for to, _ in box.mails] == [["ops@example.org"]]
    box.refusing.clear()
    assert notifier.deliver("m1", body(), NOW_MS).delivered
    assert [to for to, _ in box.mails] == [["ops@example.org"], ["night@example.org"]]
    assert notifier.deliver("m2", body(), NOW_MS).delivered  # another message goes to both
    assert len(box.mails) == 4


def test_a_mail_server_that_is_away_is_reported_without_the_password(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    result = apprise(address(port, login=f"alex:{PASSWORD}@")).deliver("m1", body(), NOW_MS)
    assert not result.delivered
    assert 'Connection error while submitting email to "127.0.0.1"' in result.detail
    assert PASSWORD not in result.detail + caplog.text
    assert not [r for r in caplog.records if r.name != "mail.log"], "apprise is silent; that is the mail server"


def test_a_mail_server_that_says_nothing_is_left_in_time_and_taken_when_it_speaks() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        notifier = apprise(address(mute.getsockname()[1]), timeout_s=0.2)
        results: list[Any] = []
        trying = threading.Thread(target=lambda: results.append(notifier.deliver("m1", body(), NOW_MS)))
        trying.start()
        trying.join(10)
        assert len(results) == 1
        assert not results[0].delivered
        assert results[0].detail.startswith("address 1 (mailto) ")


def test_one_that_hangs_keeps_the_others_not_waiting(box: Mailbox) -> None:
    with http_receiver() as hung:
        hung.usual = Reply(how="trickle")
        notifier = apprise(f"json://127.0.0.1:{hung.port}", address(box.port), timeout_s=2.0)
        result = notifier.deliver("m1", body(), NOW_MS)
        assert result.detail.startswith("address 1 (json) ")
        assert "address 2" not in result.detail
        assert len(box.mails) == 1


def test_what_is_taken_late_is_not_sent_again() -> None:
    with http_receiver() as slow:
        slow.usual = Reply(how="trickle")
        notifier = apprise(f"json://127.0.0.1:{slow.port}", timeout_s=0.2)
        assert not notifier.deliver("m1", body(), NOW_MS).delivered
        (address_of_it,) = notifier._addresses
        address_of_it._accepted["m1"] = None  # as its thread does when the answer comes
        assert notifier.deliver("m1", body(), NOW_MS).delivered
        assert len(slow.got) == 1


def test_the_severity_is_apprises_kind() -> None:
    with http_receiver() as server:
        notifier = apprise(f"json://127.0.0.1:{server.port}/x")
        for number, (step, incident) in enumerate((("opened", LOST_GPU), ("closed", OVER))):
            assert notifier.deliver(f"m{number}", body(step, incident), NOW_MS).delivered
        assert [request.json["type"] for request in server.got] == ["failure", "success"]
        assert server.got[0].json["title"].startswith("CRITICAL: XID 79")


def test_what_apprise_says_is_reported_without_what_stands_in_the_address() -> None:
    url = "hook://discord/W3bh00kId/T0k%40en?footer=yes"
    said = "Failed to send to https://discord.com/W3BH00KID/T0k@en: \n T0k error=404"
    assert without_secrets(said, url) == "Failed to send to https://***.com/***/***: *** error=404"
    mail = f"mailtos://alex:{PASSWORD}@smtp.example.org:465?to=ops@example.org"
    assert without_secrets(f"no login at smtp.example.org for alex, {PASSWORD}", mail) == (
        "no login at smtp.example.org for ***, ***"
    )


@pytest.mark.parametrize("url", ["nonsense://x", "mailto://", "discord://only-one"])
def test_an_address_that_apprise_does_not_know_is_refused_by_number(url: str, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(SettingsError, match=r"apprise 'mail': address 2 \(\w+://\.\.\.\) is unknown to apprise"):
        apprise("json://127.0.0.1:9", url)
    assert not [r for r in caplog.records if r.name != "mail.log"]


def test_without_the_library_it_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "apprise", None)
    with pytest.raises(SettingsError, match=r"apprise is not installed: pip install 'drover\[apprise\]'"):
        apprise("json://127.0.0.1:9")


def test_a_plugin_that_breaks_is_a_try_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    notifier = apprise("json://127.0.0.1:9")
    (only,) = notifier._addresses

    def breaks(**_: object) -> bool:
        raise builtins.KeyError(PASSWORD)

    monkeypatch.setattr(only, "_service", type("Broken", (), {"notify": staticmethod(breaks)}))
    result = notifier.deliver("m1", body(), NOW_MS)
    assert (result.delivered, result.detail) == (False, "address 1 (json) failed (KeyError)")


def test_nothing_is_left_running_when_all_went_well(box: Mailbox) -> None:
    assert apprise(address(box.port)).deliver("m1", body(), NOW_MS).delivered
    wait_until(
        lambda: not [t for t in threading.enumerate() if "apprise-mail" in t.name or "ThreadPool" in t.name],
        "no thread that a stop would wait for",
    )

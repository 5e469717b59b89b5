"""Receivers in the settings: what is refused, with its line, and that no secret is shown; and `notify-test`."""

from __future__ import annotations

import base64
import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest

from drover_collector.config import load_config
from drover_collector.main import main
from drover_collector.notify import settings
from drover_collector.notify.factory import notifiers
from drover_collector.notify.settings import AlertmanagerConfig, authorization
from drover_core.model.fleet import load_toml
from drover_core.settings import SettingsError
from testbed.receivers import Reply, http_receiver, mail_server

SIGNING = "whsec_" + base64.b64encode(bytes(range(32))).decode()
ROUTING_KEY = "R0SECRETKEY" + "0" * 21
SLACK_URL = "https://hooks.slack.com/services/T0/B0/S3CR3T"
ENVIRONMENT = {"SIGNING": SIGNING, "PD": ROUTING_KEY, "SLACK": SLACK_URL, "MAIL": "json://h/S3CR3T", "BAD": "S3CR3T !"}

Write = Callable[[str, str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def make(name: str, text: str, mode: int = 0o600) -> Path:
        path = tmp_path / name
        path.write_text(text)
        path.chmod(mode)
        return path

    return make


def table(kind: str, *lines: str, name: str = "ops") -> str:
    return "\n".join([f"[[notify.{kind}]]", f'name = "{name}"', *lines, ""])


def test_one_of_each_from_files_and_from_the_environment(write: Write, tmp_path: Path) -> None:
    fleet = write("fleet.toml", 'name = "t"\n[[nodes]]\nnames = "n1"\npool = "p"\n')
    files = {name: write(name, text) for name, text in {
        "signing": SIGNING, "url": "https://example.org/hook", "slack": f"{SLACK_URL}\n", "pd": f"{ROUTING_KEY}\n",
        "token": "t0ken\n", "mail": "# whom to notify\n\njson://h/a\njson://h/b\n",
    }.items()}  # fmt: skip
    text = (
        table("webhook", f'url_file = "{files["url"]}"', f'secret_file = "{files["signing"]}"', name="hook")
        + table("slack", f'url_file = "{files["slack"]}"', name="slack")
        + table("pagerduty", f'routing_key_file = "{files["pd"]}"', name="pager")
        + table(
            "alertmanager", 'urls = ["http://a:9093", "http://b:9093"]', f'token_file = "{files["token"]}"', name="am"
        )
        + table("apprise", f'url_file = "{files["mail"]}"', name="mail")
        + table("slack", 'url_env = "SLACK"', 'proxy = "http://proxy:3128"', name="slack2")
        + table("pagerduty", 'routing_key_env = "PD"', name="pager2")
        + table("apprise", 'url_env = "MAIL"', name="mail2")
        + '[[webhooks]]\nname = "old"\nurl = "https://example.org/hook"\nsecret_env = "SIGNING"\n'
    )
    config = load_config(write("c.toml", f'fleet = "{fleet}"\n{text}'), ENVIRONMENT)
    made = notifiers(config.notify, config.webhooks, load_toml(fleet), ENVIRONMENT)
    kinds = {notifier.name: notifier.kind for notifier in made}
    assert kinds == {
        "old": "webhook", "hook": "webhook", "slack": "slack", "slack2": "slack", "pager": "pagerduty",
        "pager2": "pagerduty", "am": "alertmanager", "mail": "apprise", "mail2": "apprise",
    }  # fmt: skip
    assert {n.name: n.min_severity.value for n in made}["pager"] == "critical"  # a page wakes somebody


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (table("slack"), ":1: notify.slack[0].url_file: give either url_file or url_env; the address is a secret"),
        (table("slack", 'url_env = "NOWHERE"'), ":3: notify.slack[0].url_env: environment variable NOWHERE is not set"),
        (table("slack", 'url_env = "BAD"'), "environment variable BAD does not hold an https:// address"),
        (table("slack", 'url = "https://x"'), "notify.slack[0].url: unknown key; did you mean"),
        (table("slack", 'url_env = "SLACK"', 'url_file = "/x"'), "give either url_file or url_env"),
        (table("pagerduty", 'routing_key_env = "BAD"'), "does not hold an Integration Key of 32 letters"),
        (table("pagerduty", 'routing_key_file = "/nowhere"'), "/nowhere: No such file"),
        (table("pagerduty", 'routing_key_env = "PD"', 'url = "https://u:S3CR3T@x"'), ".url: must not hold a user or"),
        (table("alertmanager"), "notify.alertmanager[0].urls: missing; addresses of all members"),
        (table("alertmanager", "urls = []"), "urls: name at least one address"),
        (table("alertmanager", 'urls = ["am:9093"]'), "urls: must be an http:// or https:// address"),
        (table("alertmanager", 'urls = ["http://am"]', 'labels = ["a-b=c"]'), 'labels: must be like ["cluster=alpha"]'),
        (table("alertmanager", 'urls = ["http://am"]', 'username = "u"'), "give username and password_file, or"),
        (table("alertmanager", 'urls = ["http://am"]', 'ca_file = "/nowhere"'), "ca_file: /nowhere: no such file"),
        (table("alertmanager", 'urls = ["http://am"]', "repeat_s = 1"), "repeat_s: must be from 10 to 3600"),
        (table("apprise", 'url_env = "BAD"'), "does not hold addresses like mailto://"),
        (table("webhook", 'secret_env = "SIGNING"'), "notify.webhook[0].url: give either url or url_file"),
        (table("webhook", 'url = "https://x"'), "give either secret_file or secret_env; every message is signed"),
        (table("webhook", 'url = "https://x"', 'secret_env = "SIGNING"', "timeout_s = 0"), "timeout_s: must be from"),
        (
            table("slack", 'url_env = "SLACK"') + table("pagerduty", 'routing_key_env = "PD"'),
            "notify.pagerduty[0].name: 'ops' is there twice",
        ),
        (table("slack", 'url_env = "SLACK"', name="a.b"), "must be a word of letters"),
    ],
)  # fmt: skip
def test_what_is_refused(write: Write, text: str, says: str) -> None:
    with pytest.raises(SettingsError) as error:
        load_config(write("c.toml", text), ENVIRONMENT)
    assert says in str(error.value)
    assert "S3CR3T" not in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", ["slack", "apprise"])
def test_a_secret_that_everyone_can_read_is_refused(write: Write, tmp_path: Path, kind: str) -> None:
    secret = write("secret", SLACK_URL)
    secret.chmod(0o644)
    with pytest.raises(SettingsError, match=f"url_file: {secret} is open to every user; chmod o= {secret}"):
        load_config(write("c.toml", table(kind, f'url_file = "{secret}"')))


@pytest.mark.parametrize("text", [f"{SLACK_URL}\nsecond line", f"{SLACK_URL} x", "hooks.slack.com/x", "", "https://:x"])
def test_a_file_that_holds_no_address_is_refused_and_not_shown(write: Write, text: str) -> None:
    secret = write("secret", text)
    with pytest.raises(SettingsError, match="does not hold an https:// address") as error:
        load_config(write("c.toml", table("slack", f'url_file = "{secret}"')))
    assert "S3CR3T" not in str(error.value)


def test_an_http_address_is_slacks_only_on_this_machine(write: Write) -> None:
    good = {"U": "http://127.0.0.1:8080/x"}
    assert load_config(write("c.toml", table("slack", 'url_env = "U"')), good)
    with pytest.raises(SettingsError, match="does not hold an https:// address"):
        load_config(write("c.toml", table("slack", 'url_env = "U"')), {"U": "http://hooks.slack.com/x"})


def test_apprise_that_is_not_installed_is_reported_before_anything_runs(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        settings, "find_spec", lambda name: None if name == "apprise" else importlib.util.find_spec(name)
    )
    with pytest.raises(SettingsError, match=r"notify.apprise\[0\]: apprise is not installed; pip install 'drover\[app"):
        load_config(write("c.toml", table("apprise", 'url_env = "MAIL"')), ENVIRONMENT)


def test_who_asks_an_alertmanager(write: Write) -> None:
    password, token = write("password", "p4ss\n"), write("token", "t0ken\n")
    urls = ("http://am",)
    assert authorization(AlertmanagerConfig("am", urls)) is None
    basic = authorization(AlertmanagerConfig("am", urls, username="alex", password_file=str(password)))
    assert basic == "Basic " + base64.b64encode(b"alex:p4ss").decode()
    assert authorization(AlertmanagerConfig("am", urls, token_file=str(token))) == "Bearer t0ken"
    with pytest.raises(SettingsError, match="not both"):
        authorization(
            AlertmanagerConfig("am", urls, username="alex", password_file=str(password), token_file=str(token))
        )
    token.write_text("t0ken\r\nx-injected: yes")
    with pytest.raises(SettingsError, match="must hold one line") as error:
        authorization(AlertmanagerConfig("am", urls, token_file=str(token)))
    assert "t0ken" not in str(error.value)


def test_notify_test_proves_receivers_and_says_which_is_none(
    write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet = write("fleet.toml", 'name = "t"\n[[nodes]]\nnames = "n1"\n')
    with http_receiver() as slack, http_receiver() as pager, mail_server() as box:
        pager.usual = Reply(202)
        mail = f"mailto://127.0.0.1:{box.port}?mode=insecure&from=a@example.org&to=ops@example.org"
        text = (
            table("slack", f'url_file = "{write("slack", slack.url)}"', name="chat")
            + table(
                "pagerduty", f'routing_key_file = "{write("key", ROUTING_KEY)}"', f'url = "{pager.url}"', name="pager"
            )
            + table("apprise", f'url_file = "{write("mail", mail)}"', name="mail")
        )
        config = write("c.toml", f'fleet = "{fleet}"\n{text}')
        assert main(["check", "--config", str(config)]) == 0
        assert "notifies chat (slack), pager (pagerduty), mail (apprise)" in capsys.readouterr().out
        assert main(["notify-test", "--config", str(config)]) == 0
        said = capsys.readouterr().out.splitlines()
        assert [line.partition(" accepted in ")[0] for line in said[:3]] == [
            "slack chat:",
            "pagerduty pager:",
            "apprise mail:",
        ]
        assert "`notify-test --over`" in said[3]
        assert slack.got[0].json["text"] == "CRITICAL: This is a test of Drover's messages to chat. Nothing is wrong."
        assert box.mails[0][1]["subject"].startswith("CRITICAL: This is a test")

        assert main(["notify-test", "pager", "--over", "--config", str(config)]) == 0
        assert [request.json["event_action"] for request in pager.got] == ["trigger", "resolve"]
        assert len({request.json["dedup_key"] for request in pager.got}) == 1
        assert len(slack.got) == 1
        capsys.readouterr()

        slack.usual = Reply(404, b"no_service")
        assert main(["notify-test", "chat", "--config", str(config)]) == 1
        assert "slack chat: NOT accepted: answered 404 (no_service): the webhook was removed" in capsys.readouterr().out

        assert main(["notify-test", "nobody", "--config", str(config)]) == 2
        assert "no receiver 'nobody' is configured; there are chat, pager, mail" in capsys.readouterr().err


def test_notify_test_without_receivers(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    fleet = write("fleet.toml", 'name = "t"\n[[nodes]]\nnames = "n1"\n')
    assert main(["notify-test", "--config", str(write("c.toml", f'fleet = "{fleet}"'))]) == 2
    assert "no receiver is configured: add one, such as [[notify.slack]]" in capsys.readouterr().err


def test_check_finds_an_address_that_apprise_does_not_know(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    fleet = write("fleet.toml", 'name = "t"\n[[nodes]]\nnames = "n1"\n')
    lines = table("apprise", f'url_file = "{write("mail", "nonsense://S3CR3T")}"')
    assert main(["check", "--config", str(write("c.toml", f'fleet = "{fleet}"\n{lines}'))]) == 2
    error = capsys.readouterr().err
    assert "address 1 (nonsense://...) is unknown to apprise" in error
    assert "S3CR3T" not in error

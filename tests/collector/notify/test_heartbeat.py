"""The dead-man's switch: what counts as blind, and that its sign is given only while nothing is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from drover_collector.notify.dead_man_settings import HeartbeatConfig, ping_urls
from drover_collector.observability.dead_man_switch import SUBJECT, DeadManSwitch
from drover_collector.observability.self_check import (
    JUDGED_S,
    STARTING_S,
    STUCK_S,
    UNDELIVERED_S,
    HealthSignals,
    read_signals,
    self_check,
    works,
)
from drover_collector.store import Store, StoreError
from drover_core.settings import SettingsError
from testbed.monitoring import facts_of
from testbed.receivers import HttpReceiver, Reply, http_receiver

WELL = HealthSignals(
    leading=True, up_s=3600, expected=100, known=100, reporting=99, judged_s=17, undelivered_s={"ops": 0, "am": 3}
)
HALF = 0.5


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({}, None),
        ({"reporting": 50}, None),
        ({"reporting": 49}, "nothing arrives from 51 of 100 nodes"),
        ({"reporting": 0, "known": 0}, "no agent of 100 nodes has ever reported"),
        ({"expected": 0, "known": 0, "reporting": 0}, None),
        ({"judged_s": JUDGED_S}, None),
        ({"judged_s": JUDGED_S + 1}, "nothing was judged for 91 s"),
        ({"refused": "no space left"}, "the store takes no telemetry (no space left)"),
        ({"write_s": STUCK_S + 1}, "a write to the store has not returned for 61 s"),
        ({"undelivered_s": {"ops": UNDELIVERED_S + 60, "am": 0}}, None),  # the other one is notified
        (
            {"undelivered_s": {"ops": UNDELIVERED_S + 60, "am": UNDELIVERED_S + 1}},
            "no receiver takes messages, the oldest waits",
        ),
        ({"undelivered_s": {}}, None),
        ({"up_s": STARTING_S - 1, "reporting": 0, "judged_s": 999}, None),
        ({"leading": False, "reporting": 0, "judged_s": 999}, None),
    ],
)
def test_what_is_blind(changed: dict[str, object], says: str | None) -> None:
    found = self_check(replace(WELL, **changed), HALF)  # type: ignore[arg-type]  # the fields' own values
    assert [says in text for text in found] == ([] if says is None else [True])


def test_nobody_gives_a_sign_that_does_not_detect_or_has_not_begun() -> None:
    assert works(WELL, [])
    assert not works(WELL, ["nothing was judged"])
    assert not works(replace(WELL, leading=False), [])
    assert not works(replace(WELL, up_s=5, judged_s=JUDGED_S + 1), []), "it begins: nothing is judged yet"
    assert not works(replace(WELL, up_s=5, reporting=0), []), "it begins: no agent is back yet"


class Watched:
    """A heartbeat whose figures and time a test sets."""

    def __init__(self, folder: Path, url: str, fail_url: str = "") -> None:
        self.figures: HealthSignals | Exception = WELL
        self.now_s = 0.0
        self.troubles: dict[str, str] = {}
        config = HeartbeatConfig(url_file=self._secret(folder / "url", url), timeout_s=2.0)
        if fail_url:
            config = replace(config, fail_url_file=self._secret(folder / "fail", fail_url))
        self.heartbeat = DeadManSwitch(config, self._look, self.troubles, monotonic=lambda: self.now_s)

    @staticmethod
    def _secret(path: Path, text: str) -> str:
        path.write_text(text + "\n")
        path.chmod(0o600)
        return str(path)

    def _look(self) -> HealthSignals:
        if isinstance(self.figures, Exception):
            raise self.figures
        return self.figures

    def after(self, seconds: float) -> None:
        self.now_s += seconds
        self.heartbeat.check()


@pytest.fixture
def receiver() -> Iterator[HttpReceiver]:
    with http_receiver() as made:
        yield made


def test_silence_alarms_and_blindness_is_said(tmp_path: Path, receiver: HttpReceiver) -> None:
    watched = Watched(tmp_path, f"{receiver.url}/secret-id", f"{receiver.url}/secret-id/fail")

    def paths() -> list[str]:
        found = [got.path for got in receiver.got]
        receiver.got.clear()
        return found

    watched.after(0)
    assert paths() == ["/secret-id"]
    watched.after(10)
    assert paths() == [], "not before its interval"
    watched.after(60)
    assert paths() == ["/secret-id"]
    watched.figures = replace(WELL, judged_s=500)
    watched.after(10)
    assert paths() == []
    assert watched.troubles == {SUBJECT: "Drover is blind: nothing was judged for 500 s."}
    watched.after(60)
    assert paths() == ["/secret-id/fail"]
    watched.figures = StoreError("it hangs")
    watched.after(60)
    assert paths() == ["/secret-id/fail"]
    assert watched.troubles == {SUBJECT: "Drover is blind: the store does not answer (it hangs)."}
    watched.figures = replace(WELL, leading=False)  # another collector has taken over, and gives the sign
    watched.after(60)
    assert (paths(), watched.troubles) == ([], {})
    watched.figures = WELL
    watched.after(60)
    assert paths() == ["/secret-id"]
    assert (watched.heartbeat.status.sent, watched.heartbeat.status.failed) == (5, 0)


def test_without_a_second_address_blindness_is_silence(tmp_path: Path, receiver: HttpReceiver) -> None:
    watched = Watched(tmp_path, f"{receiver.url}/id")
    watched.figures = replace(WELL, reporting=1)
    watched.after(0)
    watched.after(60)
    assert receiver.got == []
    assert "nothing arrives from 99 of 100 nodes" in watched.troubles[SUBJECT]


def test_a_sign_that_does_not_arrive_is_counted_and_reported_without_its_address(
    tmp_path: Path, receiver: HttpReceiver, caplog: pytest.LogCaptureFixture
) -> None:
    watched = Watched(tmp_path, f"{receiver.url}/secret-id")
    receiver.usual = Reply(status=404)
    watched.after(0)
    watched.after(60)
    assert (watched.heartbeat.status.sent, watched.heartbeat.status.failed) == (0, 2)
    assert [r.message for r in caplog.records if "heartbeat" in r.message] == [
        "the heartbeat did not reach 127.0.0.1: answered 404"
    ]
    assert "secret-id" not in caplog.text
    receiver.usual = Reply()
    watched.after(60)
    assert watched.heartbeat.status.trouble == ""


def test_a_store_that_hangs_is_blindness(
    tmp_path: Path, receiver: HttpReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(tmp_path, f"{receiver.url}/id")
    monkeypatch.setattr(watched.heartbeat._signals, "_limit_s", 0.05)
    receiver.usual = Reply(how="hang")  # stands for the store: whatever does not return

    def hangs() -> HealthSignals:
        receiver.released.wait(120)
        return WELL

    watched.heartbeat._read_signals = hangs
    watched.after(0)
    assert "the store does not answer within" in watched.troubles[SUBJECT]
    assert receiver.got == []
    receiver.released.set()


def test_settings_that_cannot_be(tmp_path: Path) -> None:
    secret = tmp_path / "url"
    secret.write_text("https://hc.example/secret-id\n")
    secret.chmod(0o644)
    for config, says in (
        (HeartbeatConfig(url_file=str(secret)), "is open to every user"),
        (HeartbeatConfig(url_file=str(secret), url_env="X"), "give it or url_env, not both"),
        (HeartbeatConfig(url_env="PING"), "PING is not set"),
        (HeartbeatConfig(fail_url_file=str(secret)), "nobody notices the silence"),
    ):
        with pytest.raises(SettingsError, match=says) as raised:
            ping_urls(config, {})
        assert "secret-id" not in str(raised.value)
    secret.chmod(0o600)
    assert ping_urls(HeartbeatConfig(url_file=str(secret)), {}) == ("https://hc.example/secret-id", None)
    assert ping_urls(HeartbeatConfig(), {}) == (None, None)
    secret.write_text("not an address")
    with pytest.raises(SettingsError, match="does not hold an http"):
        ping_urls(HeartbeatConfig(url_file=str(secret)), {})


def test_the_figures_of_a_collector(store: Store) -> None:
    facts = facts_of(store)
    facts.pipeline.leading = True
    facts.stats.last_seen = {node.name: facts.now_ms() for node in facts.index.nodes[:3]}
    facts.stats.troubles["telemetry"] = "no space left"
    found = read_signals(facts)
    assert (found.leading, found.expected, found.known, found.reporting) == (True, 4, 3, 3)
    assert (found.refused, found.undelivered_s) == ("no space left", {"ops": 0.0})

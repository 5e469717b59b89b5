"""The last good answer stays while the collector is away, with one line that says since when and what to do."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import grpc
import pytest

from drover_dashboard import client as module
from drover_dashboard.client import VALUES_FRESH_S, ClientError, FleetClient, Tls
from drover_dashboard.widgets.fleet_picture import REFRESH_S
from drover_proto import fleet_methods as methods
from drover_proto import fleet_pb2 as pb
from testbed.waiting import wait_until


class Ticking:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.ms = 1_000_000

    def __call__(self) -> int:
        return self.ms


def test_answers_are_shared_for_a_second_and_then_asked_again(served: str, chosen) -> None:
    clock = Ticking()
    fleet = FleetClient(served, now_ms=clock)
    assert fleet.status().value is fleet.status().value
    assert chosen.calls == ["status"]
    clock.ms += 1000
    fleet.status()
    assert chosen.calls == ["status", "status"]
    fleet.close()


def test_a_metric_of_all_gpus_is_shared_for_longer_than_health_and_asked_again_before_a_page_refreshes(
    served: str, chosen
) -> None:
    clock = Ticking()
    fleet = FleetClient(served, now_ms=clock)
    for color_by in ("health", "power_w"):
        fleet.picture(color_by)
    clock.ms += 4800
    asked = len(chosen.calls)
    fleet.picture("power_w")
    assert len(chosen.calls) == asked
    fleet.picture("health")
    assert len(chosen.calls) == asked + 1
    clock.ms += 100
    fleet.picture("power_w")
    assert len(chosen.calls) == asked + 2
    assert VALUES_FRESH_S < REFRESH_S
    fleet.close()


def test_an_old_answer_is_kept_and_the_silence_begins_at_its_first_failure(served: str, chosen) -> None:
    clock = Ticking()
    fleet = FleetClient(served, now_ms=clock)
    good = fleet.status()
    assert good.trouble is None
    chosen.failure = (grpc.StatusCode.UNAVAILABLE, "connection refused by the network")
    for later_ms in (5000, 9000):
        clock.ms = 1_000_000 + later_ms
        old = fleet.status()
        assert old.value == good.value
        assert old.as_of_ms == 1_000_000
        assert old.trouble is not None
        assert old.trouble.since_ms == 1_005_000
        assert old.trouble.what == f"Collector {served} has not answered"
        assert old.trouble.reason == "connection refused"
        assert old.trouble.advice == "is drover-collector running?"
    chosen.failure = None
    clock.ms += 1000
    assert fleet.status().trouble is None
    chosen.failure = (grpc.StatusCode.UNAVAILABLE, "")
    clock.ms += 60_000
    again = fleet.status().trouble
    assert again is not None
    assert again.since_ms == clock.ms, "a new silence has its own start"
    fleet.close()


def test_nothing_listens() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        fleet = FleetClient(f"127.0.0.1:{closed.getsockname()[1]}")
        answer = fleet.layout()
    assert answer.value is None
    assert answer.trouble is not None
    assert answer.trouble.reason == "connection refused"
    fleet.close()


def test_a_hanging_collector_costs_the_deadline(served: str, chosen, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen.hang.clear()
    fleet = FleetClient(served)
    answer = fleet.ask(module.methods.GET_STATUS, module.pb.StatusRequest(), deadline_s=0.2)
    assert answer.trouble is not None
    assert answer.trouble.reason == "no answer within 0.2 s"
    fleet.close()


def test_while_the_collector_hangs_one_call_asks_and_all_others_wait_for_none(served: str, chosen) -> None:
    """Else each of a page's many questions costs its deadline, and the page stands still for half a minute."""
    clock = Ticking()
    fleet = FleetClient(served, now_ms=clock)
    fleet.status()
    clock.ms += 1000
    chosen.failure = (grpc.StatusCode.UNAVAILABLE, "")
    assert fleet.status().trouble is not None
    asked = len(chosen.calls)
    old, none = fleet.status(), fleet.layout()
    assert len(chosen.calls) == asked, "within the second nothing is asked"
    assert old.value is not None
    assert none.value is None
    assert none.trouble == old.trouble
    clock.ms += 1000
    fleet.layout()
    fleet.layout()
    assert chosen.calls[asked:] == ["layout"]
    fleet.close()


def test_a_slow_chart_does_not_make_the_collector_away(served: str, chosen) -> None:
    fleet = FleetClient(served)
    fleet.status()
    slow = grpc.StatusCode.DEADLINE_EXCEEDED
    chosen.failure = (slow, "")
    assert fleet.series(module.pb.SeriesRequest(), "chart").trouble is not None
    chosen.failure = None
    assert fleet.layout().trouble is None
    fleet.close()


def test_an_unknown_name_is_reported_and_shows_no_old_answer(served: str) -> None:
    fleet = FleetClient(served)
    answer = fleet.node("n9")
    assert answer.value is None
    assert answer.trouble is not None
    assert answer.trouble.not_found
    assert "n9" in answer.trouble.reason
    fleet.close()


@pytest.mark.parametrize(
    ("code", "part", "reason"),
    [
        (grpc.StatusCode.PERMISSION_DENIED, "has refused this console", "why"),
        (grpc.StatusCode.UNIMPLEMENTED, "has not known a question of this page", "it is older than this console"),
        (grpc.StatusCode.INTERNAL, "has failed to answer", "INTERNAL: why"),
    ],
)
def test_refusals_are_one_line_and_say_when_they_began(
    served: str, chosen, code: grpc.StatusCode, part: str, reason: str
) -> None:
    chosen.failure = (code, "why")
    clock = Ticking()
    fleet = FleetClient(served, now_ms=clock)
    for later_ms, since_ms in ((0, 1_000_000), (30_000, 1_000_000), (120_000, 1_120_000)):
        clock.ms = 1_000_000 + later_ms
        trouble = fleet.status().trouble
        assert trouble is not None
        assert part in trouble.what
        assert trouble.reason == reason
        assert trouble.since_ms == since_ms, "it starts again where nobody asked for a while"
    fleet.close()


def test_an_answer_that_came_late_says_so_and_since_when(served: str, chosen, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Ticking()
    fleet = FleetClient(served, now_ms=clock)
    took_ms = 2000
    call = fleet._channel.call

    def late(*args: Any) -> object:
        clock.ms += took_ms
        return call(*args)

    monkeypatch.setattr(fleet._channel, "call", late)
    for later_ms in (0, 5000):
        clock.ms = 1_000_000 + later_ms
        answer = fleet.status()
        assert answer.value is not None
        assert answer.trouble is not None
        assert answer.trouble.slow
        assert (answer.trouble.what, answer.trouble.reason) == (f"Collector {served} has answered slowly", "2.0 s")
        assert answer.trouble.since_ms == 1_000_000
    took_ms = 1900
    clock.ms = 1_010_000
    assert fleet.status().trouble is None
    fleet.close()


@pytest.mark.parametrize(("took_ms", "shared_ms"), [(3000, 6000), (400, 1000), (20_000, 10_000)])
def test_a_slow_answer_is_shared_for_twice_as_long_as_it_took(
    served: str, chosen, monkeypatch: pytest.MonkeyPatch, took_ms: int, shared_ms: int
) -> None:
    """So that ten open pages do not keep a slow collector busy all the time. What must be fresh is asked again."""
    clock = Ticking()
    fleet = FleetClient(served, now_ms=clock)
    call = fleet._channel.call

    def late(*args: Any) -> object:
        clock.ms += took_ms
        return call(*args)

    monkeypatch.setattr(fleet._channel, "call", late)
    fleet.status()
    clock.ms += shared_ms - 1
    fleet.status()
    assert len(chosen.calls) == 1
    fleet.ask(methods.GET_STATUS, pb.StatusRequest(), fresh_s=0.0)
    assert len(chosen.calls) == 2
    clock.ms += shared_ms
    fleet.status()
    assert len(chosen.calls) == 3
    fleet.close()


def test_it_recovers_when_the_collector_is_back(served: str, chosen) -> None:
    chosen.failure = (grpc.StatusCode.UNAVAILABLE, "")
    fleet = FleetClient(served)
    assert fleet.status().trouble is not None
    chosen.failure = None
    wait_until(lambda: fleet.status().trouble is None, "the collector answers again")
    fleet.close()


def test_kept_answers_are_bounded(served: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEPT_ANSWERS", 3)
    fleet = FleetClient(served)
    for name in ("power_w", "gpu_temp_c", "sm_clock_mhz", "gpu_util_ratio"):
        fleet.picture(name)
    assert len(fleet._kept) == 3
    fleet.close()


def test_a_missing_certificate_is_one_clear_line(tmp_path: Path) -> None:
    missing = tmp_path / "ca.pem"
    with pytest.raises(ClientError, match=r"--ca: cannot read .*ca\.pem: No such file or directory; check the path"):
        FleetClient("127.0.0.1:1", Tls(missing, missing, missing))


def test_two_acts_of_one_millisecond_are_both_done(served: str, chosen) -> None:
    fleet = FleetClient(served, now_ms=Ticking())
    for node in ("n0", "n1"):
        assert fleet.act(module.methods.ACT_ON_NODE, module.pb.ActRequest(node=node, act="drain", why="w")).value
    assert [node for _, node, *_ in chosen.acts] == ["n0", "n1"]
    fleet.close()

"""What exchanges prove of this node's clock."""

from __future__ import annotations

import pytest

from drover_agent.uplink.clock_offset import KEPT, ClockOffset
from testbed.clock import ManualClock


class Exchange:
    """A node whose clock is `wrong_s` ahead of the collector's."""

    def __init__(self, wrong_s: float = 0.0) -> None:
        self.clock = ManualClock()
        self.offset = ClockOffset(self.clock)
        self.wrong_s = wrong_s

    def answer(self, there_s: float, back_s: float) -> float:
        sent_s = self.clock.monotonic()
        self.pass_s(there_s)
        theirs_ms = self.clock.now_ms() - round(1000 * self.wrong_s)
        self.pass_s(back_s)
        self.offset.add_exchange(sent_s, theirs_ms)
        assert self.offset.seconds is not None
        return self.offset.seconds

    def pass_s(self, seconds: float) -> None:
        self.clock._steady_s += seconds
        self.clock._now_ms += round(1000 * seconds)


@pytest.mark.parametrize("wrong_s", [0.0, 0.25, 8.0, -3600.0])
def test_a_quick_answer_says_it_to_its_way(wrong_s: float) -> None:
    assert Exchange(wrong_s).answer(1.0, 0.01) == pytest.approx(wrong_s + 0.01)


def test_answers_that_wait_for_seconds_make_no_clock_wrong() -> None:
    """Of 256 nodes on a busy machine 200 were reported to have a wrong clock."""
    node = Exchange()
    assert node.answer(0.5, 9.0) == 0.0
    assert node.answer(12.0, 7.0) == 0.0
    assert node.answer(1.0, 0.05) == pytest.approx(0.05)
    assert node.answer(1.0, 9.0) == pytest.approx(0.05), "what was proven stays so"


@pytest.mark.parametrize("wrong_s", [30.0, -30.0])
def test_a_wrong_clock_shows_though_answers_wait(wrong_s: float) -> None:
    assert abs(Exchange(wrong_s).answer(4.0, 9.0)) >= 30 - 9


@pytest.mark.parametrize("set_s", [20.0, -20.0])
def test_a_clock_that_is_set_shows_with_the_next_answer(set_s: float) -> None:
    node = Exchange()
    node.answer(0.1, 0.01)
    node.clock.jump(round(1000 * set_s))
    node.wrong_s = set_s
    assert node.answer(0.1, 0.01) == pytest.approx(set_s + 0.01)
    node.wrong_s += 5  # now the collector's is set: what was proven of it does not hold any more
    assert node.answer(0.1, 0.01) == pytest.approx(set_s + 5.01)


def test_a_clock_that_drifts_is_followed() -> None:
    node = Exchange()
    for k in range(5 * KEPT):
        node.wrong_s = 0.01 * k
        node.clock._now_ms += 10
        reported = node.answer(0.1, 0.02)
    assert reported == pytest.approx(node.wrong_s + 0.02, abs=0.01 * KEPT)


def test_an_answer_to_nothing_bounds_it_from_above_alone() -> None:
    node = Exchange()
    node.pass_s(30)
    node.offset.add_exchange(None, node.clock.now_ms() - 9_000)
    assert node.offset.seconds == 0.0
    node.offset.add_exchange(None, node.clock.now_ms() + 60_000)
    assert node.offset.seconds == pytest.approx(-60)

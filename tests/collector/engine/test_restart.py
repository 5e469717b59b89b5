"""A restart in the middle of trouble: what was open stays open under its id, nothing is reported twice, and what ended
while nobody judged is ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from drover_collector.detectors import DETECTORS, Detector
from drover_collector.detectors._lib.examples import (
    LAG_MS,
    START_MS,
    small_fleet,
    training_bucket,
)
from drover_collector.engine.engine import Engine, Outcome
from drover_collector.fleet.buckets import Bucket
from drover_collector.policy.policy import Policy
from drover_core.model.events import (
    Event,
    EventKind,
    Incident,
    Severity,
)
from testbed.detecting import only

INDEX = small_fleet(8, ports=8)
Columns = dict[str, np.ndarray]
RESTART, BEGINS, READ, AFTER = (
    130,
    40,
    60,
    45,
)  # buckets: when, since when there is trouble, what a start reads, how long


def _memory(number: int, gpu: Columns, _link: Columns) -> None:
    gpu["ecc_dram_uncorrected"][11] = number >= BEGINS  # once, 15 minutes before the restart


def _flaps(number: int, _gpu: Columns, link: Columns) -> None:
    link["link_downed"][20] += sum(number >= at for at in (BEGINS, BEGINS + 5, BEGINS + 10))


def _port(number: int, _gpu: Columns, link: Columns) -> None:
    link["link_up"][20] = number < BEGINS


def _cooling(number: int, gpu: Columns, _link: Columns) -> None:
    """Worse than its own past by 26 %, and than its peers by less than they differ."""
    if number >= BEGINS:
        gpu["gpu_temp_c"][21] = 26 + (gpu["gpu_temp_c"][21] - 26) * 1.26


def _clock(number: int, gpu: Columns, _link: Columns) -> None:
    """2.5 % slower than before, and its job waits for it."""
    if number >= BEGINS:
        gpu["sm_clock_mhz"][21] *= 0.975
        for metric in ("sm_active_ratio", "tensor_active_ratio"):
            gpu[metric][np.arange(64) != 21] *= 0.975


def _nothing(_number: int, _gpu: Columns, _link: Columns) -> None:
    pass


def _buckets(
    change: Callable[[int, Columns, Columns], None], away: Callable[[int], Sequence[int]], numbers: range
) -> list[Bucket]:
    return [
        training_bucket(
            INDEX, n, lambda k, gpu, _node: change(k, gpu, {}), away(n), links=lambda k, link: change(k, {}, link)
        )
        for n in numbers
    ]


def _event(code: str, node: str, gpu: int | None, number: int) -> Event:
    ts_ms = START_MS + number * 10_000
    return Event(f"{code}/{number}", ts_ms, node, gpu, EventKind.LIFECYCLE, code, code, received_ms=ts_ms + 500)


def _xid(code: str, node: str, gpu: int, number: int) -> Event:
    ts_ms = START_MS + number * 10_000 + 1000
    return Event(f"xid{code}/{number}", ts_ms, node, gpu, EventKind.XID, code, f"Xid {code}", received_ms=ts_ms + 500)


def _run(engine: Engine, buckets: Sequence[Bucket], events: Sequence[Event] = ()) -> None:
    waiting = list(events)
    for bucket in buckets:
        while waiting and waiting[0].ts_ms < bucket.end_ms:
            event = waiting.pop(0)
            engine.on_events([event], event.received_ms or event.ts_ms)
        engine.on_bucket(bucket, bucket.end_ms + LAG_MS)


def _open(engine: Engine) -> dict[str, Incident]:
    return {i.id: i for i in engine.incidents.values() if i.closed_ms is None}


def _nobody(_number: int) -> Sequence[int]:
    return ()


CASES = {
    "an uncorrected error": (_memory, _nobody, ()), "flaps": (_flaps, _nobody, ()), "a port": (_port, _nobody, ()),
    "cooling against its own past": (_cooling, _nobody, ()), "a small slowness": (_clock, _nobody, ()),
    "a silent node": (_nothing, lambda n: [2] if n >= BEGINS else (), ()),
    "a lost GPU": (_nothing, _nobody, (_event("gpu_lost", "n03", 4, BEGINS),)),
    "a hung driver": (_nothing, _nobody, (_event("driver_hung", "n03", None, BEGINS),)),
    "an agent stopped on purpose": (
        _nothing, lambda n: [2] if n >= BEGINS else (), (_event("agent_stopped", "n02", None, BEGINS),)
    ),
}  # fmt: skip


# Which detectors an engine has; of an uncorrected error all thirteen, which cost ten times as much CPU as three.
FEW = {
    "flaps": only("links", "liveness", "xid"), "a port": only("links", "liveness", "xid"),
    "cooling against its own past": only("thermal", "liveness", "xid"),
    "a small slowness": only("straggler", "slowdown", "liveness", "xid"),
    "a lost GPU": only("liveness", "hang", "memory", "xid"),
    "a silent node": only("liveness", "hang", "xid"), "a hung driver": only("liveness", "memory", "xid"),
    "an agent stopped on purpose": only("liveness", "hang", "xid"),
}  # fmt: skip
OF_LINES = only("kernel", "liveness", "memory", "xid")


def _engines(count: int, detectors: Sequence[Detector] = DETECTORS) -> list[Engine]:
    return [Engine(INDEX, Policy.named("nvidia"), START_MS, detectors) for _ in range(count)]


# The model of a GPU's heat is an hour old before it judges, and needs four blocks of five minutes: more buckets before
# BEGINS, and before RESTART.
EARLIER = {"cooling against its own past": (450, 540)}


@pytest.mark.parametrize("name", CASES)
def test_what_is_open_stays_open_and_is_not_reported_twice(name: str) -> None:
    change, away, events = CASES[name]
    earlier, more = EARLIER.get(name, (0, 0))
    restart = RESTART + more
    first, second = _engines(2, FEW.get(name, DETECTORS))

    def changed(number: int, gpu: Columns, link: Columns) -> None:
        if (gpu and change in (_flaps, _port)) or (link and change not in (_flaps, _port)):
            return
        change(number - earlier, gpu, link)
        if gpu and name == "a lost GPU" and number >= BEGINS:
            for values in gpu.values():
                values[28] = np.nan
        if gpu and name == "a hung driver" and number >= BEGINS:
            for values in gpu.values():
                values[24:32] = np.nan

    _run(first, _buckets(changed, away, range(restart)), events)
    before = _open(first)
    assert len(before) == 1, [i.summary for i in before.values()]
    second.started_ms = START_MS + restart * 10_000
    second.restore(list(before.values()), _buckets(changed, away, range(restart - READ, restart)), [])
    _run(second, _buckets(changed, away, range(restart, restart + AFTER)))
    assert [(i.id, i.cause) for i in second.incidents.values()] == [(i.id, i.cause) for i in before.values()]
    (after,) = _open(second).values()
    assert not any("over" in note.text or "came back" in note.text for note in after.timeline[1:])


def _without_end_times(outcomes: Sequence[Outcome]) -> list[object]:
    """The outcome of calls, but for the time at which what had ended unseen is reported."""
    return [
        (
            [(f.detector, f.cause, f.node, f.gpu, f.cleared) for f in o.findings],
            [(i.id, i.cause, i.severity, i.action, i.closed_ms is None) for i in o.incidents],
            [(d.incident_id, d.wanted, d.outcome) for d in o.decisions],
            [(h.node, h.gpu, h.health) for h in o.health],
        )
        for o in outcomes
    ]


@pytest.mark.parametrize("name", ["an uncorrected error", "a silent node", "nothing"])
def test_an_event_that_comes_while_the_past_is_taken_up_is_judged_at_once_and_alike(name: str) -> None:
    """A fleet of 100,000 GPUs takes a while to be read again: an XID does not wait for it, and what it and all that
    follows come to is what they would have come to after it."""
    change, away, events = CASES.get(name, (_nothing, _nobody, ()))
    first, whole, steps = _engines(3, DETECTORS if name == "nothing" else OF_LINES)

    def changed(number: int, gpu: Columns, link: Columns) -> None:
        if bool(gpu) is not (change in (_flaps, _port)):
            change(number, gpu, link)

    early = [_xid("48", "n05", 1, RESTART - 30), _xid("31", "n06", 2, RESTART - 2)]  # judged before the restart
    _run(first, _buckets(changed, away, range(RESTART)), sorted([*events, *early], key=lambda e: e.ts_ms))
    before = [i for i in first.incidents.values() if i.closed_ms is None]
    past, later = _buckets(changed, away, range(RESTART - READ, RESTART)), range(RESTART, RESTART + 20)
    news = [
        _xid("79", "n07", 0, RESTART),
        _xid("79", "n05", 1, RESTART),
        _xid("31", "n06", 2, RESTART),
        _xid("94", "n01", 3, RESTART),
    ]
    for engine in (whole, steps):
        engine.started_ms = START_MS + RESTART * 10_000
    whole.restore(before, past, early)
    expected = [whole.on_events([event], event.received_ms or 0) for event in news]
    steps.begin(before, early, held=[replace(bucket, gpu={}, node={}, link={}) for bucket in past])
    found = [steps.on_events([news[0]], news[0].received_ms or 0)]
    for bucket in past[: READ // 2]:
        steps.recall(bucket)
    found += [steps.on_events([event], event.received_ms or 0) for event in news[1:]]
    for bucket in past[READ // 2 :]:
        steps.recall(bucket)
    steps.recalled()
    assert any(i.cause == "xid_79" for outcome in found for i in outcome.incidents)
    for bucket in _buckets(changed, away, later):
        expected.append(whole.on_bucket(bucket, bucket.end_ms + LAG_MS))
        found.append(steps.on_bucket(bucket, bucket.end_ms + LAG_MS))
    assert _without_end_times(found) == _without_end_times(expected)
    assert steps.incidents == whole.incidents


_FATAL = "pcieport 0000:3a:02.0: AER: Uncorrected (Fatal) error received: 0000:3b:00.0"


@pytest.mark.parametrize("name", ["a line of the kernel", "faults of a program"])
def test_what_was_reported_before_the_restart_is_not_reported_again_by_the_next_event(name: str) -> None:
    """Some lines wait 10 s for company. The node of these was mended since: they are no new suspicion of it."""
    lines = [_xid("31", "n02", 1, RESTART - back) for back in (55, 35, 15)]
    if name == "a line of the kernel":
        lines = [replace(lines[0], kind=EventKind.KERNEL, code="aer", message=_FATAL)]
    first, second = _engines(2, OF_LINES)
    past = _buckets(_nothing, _nobody, range(RESTART - READ, RESTART))
    _run(first, past, lines)
    assert {i.node for i in _open(first).values()} == {"n02"}
    second.begin([], lines, held=[replace(bucket, gpu={}, node={}, link={}) for bucket in past])
    news = _xid("79", "n07", 0, RESTART + 1)
    outcome = second.on_events([news], news.received_ms or 0)
    assert {i.node for i in outcome.incidents} == {"n07"}


@pytest.mark.parametrize("name", ["a line of the kernel", "a fault of a program, again"])
def test_a_line_that_waited_for_company_when_the_collector_stopped_is_reported_by_the_next_one(name: str) -> None:
    lines = [_xid("31", "n02", 1, RESTART - back) for back in (50, 5)]
    if name == "a line of the kernel":
        lines = [replace(lines[1], kind=EventKind.KERNEL, code="aer", message=_FATAL)]
    first, second = _engines(2, OF_LINES)
    past = _buckets(_nothing, _nobody, range(RESTART - READ, RESTART))
    _run(first, past[:-6], lines[:-1])
    first.on_events(lines[-1:], lines[-1].received_ms or 0)  # and then it is killed, for 40 s
    assert not any(i.severity is not Severity.INFO for i in first.incidents.values())
    known = list(first.incidents.values())
    second.restore(known, past, lines)
    incidents = [i for o in _outcomes(second, range(RESTART, RESTART + 10)) for i in o.incidents]
    assert {(i.node, i.severity) for i in incidents} == {("n02", Severity.WARNING)}
    assert len({i.id for i in incidents}) == 1
    (third,) = _engines(1, OF_LINES)
    third.restore(list(second.incidents.values()), past, lines)
    assert [o.findings for o in _outcomes(third, range(RESTART, RESTART + 10)) if o.findings] == []


def _outcomes(engine: Engine, numbers: range) -> list[Outcome]:
    return [engine.on_bucket(bucket, bucket.end_ms + LAG_MS) for bucket in _buckets(_nothing, _nobody, numbers)]


def test_what_an_event_says_nothing_of_is_decided_when_the_past_is_read() -> None:
    """What was open before the restart may be over: who reads its values first knows."""
    first, second = _engines(2, OF_LINES)
    *past, after = _buckets(_nothing, _nobody, range(RESTART + 1))
    held = [replace(bucket, gpu={}, node={}, link={}) for bucket in past[-READ:]]
    early, news = _xid("79", "n05", 1, RESTART - 3), _xid("79", "n07", 0, RESTART)
    _run(first, past, [early])
    second.begin(list(_open(first).values()), [early], held=held)
    assert {d.node for d in second.on_events([news], news.received_ms or 0).decisions} == {"n07"}
    for bucket in past[-READ:]:
        second.recall(bucket)
    second.recalled()
    assert {d.node for d in second.on_bucket(after, after.end_ms + LAG_MS).decisions} == {"n05"}


@pytest.mark.parametrize("name", ["a silent node", "a lost GPU", "an agent stopped on purpose"])
def test_what_ended_while_nobody_judged_is_ended(name: str) -> None:
    _, away, events = CASES[name]
    first, second = _engines(2, OF_LINES)
    _run(first, _buckets(_nothing, away, range(RESTART)), events)
    before = list(_open(first).values())
    if name == "a lost GPU":  # its values never went away here; the agent's word stands until they are seen again
        before = before or list(first.incidents.values())
    assert len(before) == 1
    second.restore(before, _buckets(_nothing, _nobody, range(RESTART, RESTART + READ)), [])
    _run(second, _buckets(_nothing, _nobody, range(RESTART + READ, RESTART + READ + 10)))
    assert _open(second) == {}

"""Planned work that others report: what counts, for how long, and how much of the fleet at most."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from drover_collector.actions.base import AwayError
from drover_collector.actions.kubernetes.actuator import kept_closed
from drover_collector.config import load_config
from drover_collector.detectors._lib.examples import START_MS, play, small_fleet
from drover_collector.detectors.liveness import detector as liveness
from drover_collector.notify.maintenance_events import MaintenanceEventsConfig, planned_work, read_file
from drover_collector.notify.silences import Silences
from drover_collector.pipeline.maintenance_events import GONE, MaintenanceEvents, marks_of, of_marks
from drover_collector.policy.decider import Decider
from drover_collector.policy.gate import GateAnswer, gate_verdicts
from drover_core.model.events import Audit, Incident, RecommendedAction, Severity, Silence
from drover_core.model.fleet import FleetSpec, NodeSpec
from drover_core.settings import SettingsError
from drover_core.times import iso
from testbed.deciding import OPEN, decide, fleet, incident, policy
from testbed.outboxes import HOUR_MS, T0, fault, silence

SPEC = FleetSpec(tuple(NodeSpec(f"n{n}", "r0", "l0", "train") for n in range(10)))
HALF = MaintenanceEventsConfig(most_ratio=0.5)
TAINT = "aws-node-termination-handler/scheduled-maintenance"


def work(*nodes: str, begin_ms: int = T0, hours: float = 1, id_: str = "w1", source: str = "aws") -> Silence:
    return planned_work(source, id_, nodes, (begin_ms, begin_ms + round(hours * HOUR_MS)), "new board", begin_ms)


def on(node: str, opened_ms: int = T0) -> Incident:
    return replace(fault(f"i {node}"), node=node, members=((node, 0),), opened_ms=opened_ms)


def silences(*known: Silence, config: MaintenanceEventsConfig = HALF) -> Silences:
    made = Silences(SPEC.by_name, (), config)
    made.load(known)
    return made


def test_it_holds_its_nodes_until_its_end_and_not_a_moment_longer() -> None:
    subject = silences(work("n1", "n2"))
    assert sorted(subject.held(T0)) == ["n1", "n2"]
    assert subject.held_since(T0) == {"n1": T0, "n2": T0}
    assert "planned work (aws)" in subject.held(T0)["n1"]
    assert sorted(subject.held(T0 + HOUR_MS - 1)) == ["n1", "n2"]
    assert not subject.held(T0 + HOUR_MS)
    assert not subject.held(T0 - 1)
    assert not subject.held_since(T0 + HOUR_MS)


def test_what_began_before_it_is_not_silenced_by_it_and_by_a_persons_silence_it_is() -> None:
    subject = silences(work("n1"))
    assert subject.of(on("n1"), T0 + 1000) is not None
    assert subject.of(on("n1", opened_ms=T0 - 1), T0 + 1000) is None
    subject.load([silence(node=("n1",), maintenance=True)])
    assert subject.of(on("n1", opened_ms=T0 - 1), T0 + 1000) is not None


def test_a_window_of_the_whole_fleet_does_not_count_and_those_before_it_do() -> None:
    hostile = work(*SPEC.by_name, begin_ms=T0 + 1, id_="all")
    subject = silences(work("n1"), hostile)
    assert sorted(subject.held(T0 + 10)) == ["n1"]
    assert [s.event for s in subject.refused(T0 + 10)] == ["aws:all"]
    assert subject.of(on("n5", T0 + 5), T0 + 10) is None, "nor does it silence anything"
    assert not subject.refused(T0 + 2 * HOUR_MS)


def test_many_small_ones_together_cover_no_more_than_one_large_one() -> None:
    subject = silences(*[work(f"n{n}", begin_ms=T0 + n, id_=f"w{n}") for n in range(10)])
    assert sorted(subject.held(T0 + 10)) == [f"n{n}" for n in range(5)]
    assert len(subject.refused(T0 + 10)) == 5


def test_a_persons_window_of_the_whole_fleet_is_a_persons_business() -> None:
    assert len(silences(silence(pool=("train",), maintenance=True)).held(T0)) == 10


def test_the_file_gives_windows_and_one_that_a_person_ended_stays_ended(tmp_path: Path) -> None:
    path = tmp_path / "work.toml"
    path.write_text(
        '[[window]]\nid = "4711"\nnode = ["n1", "n99"]\nstart = "2027-01-15T02:00:00Z"\n'
        'end = "2027-01-15T06:00:00Z"\nwhy = "board"\nsource = "ops"\n'
        '[[window]]\nnode = ["n2"]\nstart = "2026-12-01T02:00:00Z"\nend = "2027-12-01T06:00:00Z"\nwhy = "for ever"\n'
    )
    (made,), wrong = read_file(path, SPEC.by_name, T0)
    assert (made.node, made.event, made.maintenance) == (("n1",), "ops:4711", True)
    assert "window[0].node: 'n99' is not in the fleet file" in wrong
    assert "1 more" in wrong, "the one that lasts a year"
    subject = silences()
    subject.set_file([made])
    assert sorted(subject.held(made.from_ms)) == ["n1"]
    subject.take(replace(made, until_ms=made.from_ms, ended_by="anna"))
    assert not subject.held(made.from_ms)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[[window]]\nnode = ["n1"]\nstart = "tonight"\nend = "2026-12-01T06:00:00Z"\nwhy = "w"', "must be a time"),
        ('[[window]]\nnode = ["n1"]\nstart = 2026-12-01T02:00:00Z\nend = "2026-12-01T06:00:00Z"\nwhy = "w"', "string"),
        ("[[window]]\nnodes = 1", "unknown key"),
        ("nonsense", "not valid TOML"),
    ],
)
def test_a_file_that_cannot_be_read_says_why(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "work.toml"
    path.write_text(text)
    with pytest.raises(SettingsError, match=said):
        read_file(path, SPEC.by_name, T0)


def test_taints_need_an_api_server_to_ask(tmp_path: Path) -> None:
    path = tmp_path / "collector.toml"
    path.write_text(f'[maintenance_events]\ntaints = ["{TAINT}"]\n')
    with pytest.raises(SettingsError, match=r"maintenance_events\.taints: set act\.kubernetes"):
        load_config(path, {})


# ---- the watcher


class Watched:
    """A pipeline as the watcher needs it."""

    def __init__(self, config: MaintenanceEventsConfig, marks: Any = None) -> None:
        self.now, self.marks = T0, marks
        self.written: list[Silence] = []
        self.audit: list[str] = []
        kept = silences(config=config)
        self.pipeline = SimpleNamespace(
            outbox=SimpleNamespace(silences=kept), index=SimpleNamespace(spec=SPEC), now_ms=lambda: self.now,
            ticks=SimpleNamespace(troubles={}), leading=True, take_silence=self._take,
        )  # fmt: skip
        self.silences = kept
        self.watch = self.restarted(config)

    def restarted(self, config: MaintenanceEventsConfig) -> MaintenanceEvents:
        self.silences.load(self.written)
        self.watch = MaintenanceEvents(config, self.pipeline, lambda: self.marks)  # type: ignore[arg-type]  # a stand-in
        return self.watch

    def _take(self, silence: Silence, audit: Audit) -> None:
        self.written.append(silence)
        self.audit.append(audit.what)
        self.silences.take(silence)

    @property
    def trouble(self) -> str:
        return str(self.pipeline.ticks.troubles.get("maintenance_events", ""))

    def look(self) -> None:
        self.watch.look_at_file()
        if self.marks is not None:
            self.watch.ask_kubernetes()
        self.watch._note()


def test_a_changed_file_is_read_and_a_bad_one_leaves_what_is_known_until_its_end(tmp_path: Path) -> None:
    path = tmp_path / "work.toml"
    subject = Watched(replace(HALF, file=str(path)))
    subject.look()
    assert "no window of it counts" in subject.trouble
    path.write_text(
        '[[window]]\nnode = ["n1"]\nstart = "2020-01-01T00:00:00Z"\nend = "2020-01-02T00:00:00Z"\nwhy = "w"\n'
    )
    subject.now = 1_577_836_800_000  # its start
    subject.look()
    subject.look()
    assert (sorted(subject.silences.held(subject.now)), subject.trouble) == (["n1"], "")
    path.write_text("broken")
    subject.look()
    subject.look()
    assert sorted(subject.silences.held(subject.now)) == ["n1"]
    assert "count until their end" in subject.trouble
    assert not subject.silences.held(subject.now + 24 * HOUR_MS)
    path.unlink()
    subject.look()
    subject.look()
    assert not subject.silences.held(subject.now)


def test_a_file_with_the_whole_fleet_is_refused_and_shown(tmp_path: Path) -> None:
    path = tmp_path / "work.toml"
    nodes = ", ".join(f'"{name}"' for name in SPEC.by_name)
    path.write_text(
        f'[[window]]\nnode = [{nodes}]\nstart = "2020-01-01T00:00:00Z"\nend = "2020-01-02T00:00:00Z"\nwhy = "w"\n'
    )
    subject = Watched(replace(HALF, file=str(path)))
    subject.now = 1_577_836_800_000
    subject.look()
    assert not subject.silences.held(subject.now)
    assert "1 windows of 10 nodes do not count" in subject.trouble
    assert "more than 5 nodes" in subject.trouble


def test_a_taint_opens_one_window_that_ends_with_it_or_at_its_limit_also_over_a_restart() -> None:
    config = replace(HALF, taints=(TAINT,), taint_hours=2.0)
    subject = Watched(config, {"n1": [TAINT], "elsewhere": [TAINT]})
    subject.look()
    subject.look()
    assert (sorted(subject.silences.held(T0)), subject.audit) == (["n1"], ["maintenance"])
    subject.restarted(config)
    subject.now += HOUR_MS
    subject.look()
    assert len(subject.written) == 1, "a restart opens no second one"
    subject.now = T0 + 2 * HOUR_MS
    subject.look()
    assert not subject.silences.held(subject.now), "a forgotten taint hides nothing any more"
    assert "longer than it counts: n1" in subject.trouble
    for day in range(1, 12):  # silences that are over are forgotten after four days
        subject.now = T0 + day * 24 * HOUR_MS
        subject.restarted(config)
        subject.silences.load([s for s in subject.written[-1:] if s.until_ms > subject.now - 4 * 24 * HOUR_MS])
        subject.look()
        assert not subject.silences.held(subject.now), f"day {day}"
    subject.marks = {}
    subject.look()
    assert subject.written[-1].ended_by == GONE
    assert subject.trouble == ""
    subject.marks = {"n1": [TAINT]}
    subject.now += 1000
    subject.look()
    assert sorted(subject.silences.held(subject.now)) == ["n1"], "a new taint is new work"


def test_a_person_ends_the_window_of_a_taint_and_it_stays_ended() -> None:
    subject = Watched(replace(HALF, taints=(TAINT,)), {"n1": [TAINT]})
    subject.look()
    subject.silences.take(replace(subject.written[0], until_ms=T0 + 1, ended_by="anna"))
    subject.now += 60_000
    subject.look()
    assert not subject.silences.held(subject.now)


def test_a_fleet_full_of_taints_is_bounded_stored_no_further_and_shown() -> None:
    subject = Watched(replace(HALF, taints=(TAINT,)), {name: [TAINT] for name in SPEC.by_name})
    subject.look()
    subject.now += 60_000
    subject.look()
    assert len(subject.silences.held(subject.now)) == 5
    assert len(subject.written) == 5
    assert "5 more nodes carry a mark of maintenance than may count (at most 5)" in subject.trouble


def test_two_marks_of_one_node_take_one_place() -> None:
    marks = {name: [TAINT, "Other"] for name in list(SPEC.by_name)[:5]}
    subject = Watched(replace(HALF, taints=(TAINT, "Other")), marks)
    subject.look()
    assert {node for silence in subject.written for node in silence.node} == set(marks)
    assert len(subject.written) == 10
    assert not subject.trouble


def test_an_api_server_that_is_away_extends_nothing() -> None:
    subject = Watched(replace(HALF, taints=(TAINT,), taint_hours=1.0), {"n1": [TAINT]})
    subject.look()

    def away() -> Mapping[str, list[str]]:
        raise AwayError("no answer")

    subject.watch._marks = away
    subject.now += HOUR_MS
    subject.look()
    assert not subject.silences.held(subject.now)
    assert "not known: no answer" in subject.trouble


def test_marks_are_others_taints_and_true_conditions_and_never_drovers_own_cordon() -> None:
    unschedulable = "node.kubernetes.io/unschedulable"

    def node(name: str, taints: Any = None, conditions: Any = None, **meta: Any) -> dict[str, Any]:
        return {
            "metadata": {"name": name, **meta}, "spec": {"taints": taints}, "status": {"conditions": conditions},
        }  # fmt: skip

    cordon = [{"key": unschedulable, "effect": "NoSchedule"}]
    nodes: list[Any] = [
        node("n1", [{"key": TAINT}, {"key": "other"}]),
        node("n2", None, [{"type": "VMEventScheduled", "status": "True"}]),
        node("n3", None, [{"type": "VMEventScheduled", "status": "False"}]),
        node("n4", cordon),
        node("n5", [*cordon, {"key": "drover.dev/drain", "value": "i1"}]),
        node("n6", cordon, annotations={"drover.dev/cordon": "i1"}),
        {"metadata": None, "spec": []},
    ]
    found = marks_of(nodes, {TAINT, unschedulable}, {"VMEventScheduled"}, kept_closed)
    assert found == {"n1": [TAINT], "n2": ["VMEventScheduled"], "n4": [unschedulable]}


def test_an_api_server_that_lists_none_of_the_fleets_nodes_ends_no_window() -> None:
    """As with the conditions that are read from the same list. The nodes would be called silent amid their work."""
    subject = Watched(replace(HALF, taints=(TAINT,)), {"n1": [TAINT]})
    subject.look()

    def lists(*names: str) -> None:
        nodes = [{"metadata": {"name": name}} for name in names]
        subject.watch._marks = partial(marks_of, nodes, {TAINT}, set(), kept_closed, SPEC.by_name)
        subject.look()

    for names in ((), ("elsewhere",)):
        lists(*names)
        assert [silence.ended_by for silence in subject.written] == [""]
        assert "lists none of the fleet's nodes" in subject.trouble
    lists("n1")
    assert [silence.ended_by for silence in subject.written] == ["", GONE], "it is listed, and has no mark"


def test_two_marks_of_a_node_are_two_windows_and_each_ends_alone() -> None:
    both, _ = of_marks({"n1": ["a", "b"]}, (), T0, HOUR_MS)
    assert len({s.id for s in both}) == 2
    new, over = of_marks({"n1": ["b"]}, both, T0 + 5, HOUR_MS)
    assert (new, [s.event.partition("@")[0] for s in over]) == ([], ["kubernetes:n1/a"])


# ---- detectors, guard, gate


def causes(since_ms: int | None, until: int) -> list[str]:
    """Return what is found of a node that falls silent, in maintenance from `since_ms` until bucket `until` of 40."""
    state, found = None, []
    steps = play(small_fleet(), 40, silent=lambda number: [2] if number >= 6 else [])
    for number, (window, now_ms) in enumerate(steps):
        held = {} if since_ms is None or number >= until or now_ms < since_ms else {"n02": since_ms}
        found, state = liveness.detect(replace(window, maintained=held), state, now_ms)
    return [f.cause for f in found if not f.cleared]


@pytest.mark.parametrize(
    ("since_ms", "until", "cause"),
    [
        (None, 40, "silent"),
        (START_MS + 30_000, 40, "maintenance"),  # the work began, then it went silent
        (START_MS + 120_000, 40, "silent"),  # silent a minute before the work began: that was not it
        (START_MS + 30_000, 39, "silent"),  # the work is over: at once
    ],
)
def test_silence_that_begins_in_planned_work_alarms_nobody_until_its_end(
    since_ms: int | None, until: int, cause: str
) -> None:
    assert causes(since_ms, until) == [cause]


def test_a_restart_in_the_work_knows_it_and_one_after_it_finds_the_silence() -> None:
    index = small_fleet()
    open_ = replace(
        fault("i1"), kind=liveness.KIND, cause="maintenance", scope="node", node="n02", gpu=None,
        members=(("n02", None),), detectors=("liveness",), since_ms=START_MS, severity=Severity.INFO,
    )  # fmt: skip
    for held, cause in (({"n02": START_MS}, "maintenance"), ({}, "silent")):
        state: Any = liveness.restored([open_], index, START_MS)
        found: list[Any] = []
        for window, now_ms in play(index, 30, silent=lambda _: [2]):
            found, state = liveness.detect(replace(window, maintained=held), state, now_ms)
        assert [f.cause for f in found if not f.cleared] == [cause]


def test_nodes_in_maintenance_count_as_out_for_the_caps_of_others() -> None:
    subject = Decider(fleet(8), policy("enforce", replace(OPEN, fleet_nodes=2)), "enforce")
    subject.maintenance = {"n001": "planned work", "n002": "planned work"}
    (held,), _ = decide(subject, [incident("n003")], 1000)
    assert (held.outcome, "3 of 8 nodes of the fleet would be out" in held.reason) == ("held", True)
    subject.maintenance = {"n001": "planned work"}
    (made,), _ = decide(subject, [incident("n003")], 2000)
    assert made.outcome == "act"


def test_the_gate_passes_there_and_says_so() -> None:
    subject = Decider(fleet(8), policy("enforce", OPEN), "enforce")
    subject.maintenance = {"n001": "planned work"}
    verdict = gate_verdicts(subject)["n001"]
    assert (verdict.answer, verdict.text) == (GateAnswer.PASS, "planned work")
    decide(subject, [incident("n001", wanted=RecommendedAction.DRAIN)], 1000)
    assert gate_verdicts(subject)["n001"].answer is GateAnswer.HELD


# ---- what strangers tried


def window_text(node: str, start: str, end: str, id_: str = "w1", **more: str) -> str:
    rest = "".join(f'{key} = "{value}"\n' for key, value in more.items())
    return f'[[window]]\nid = "{id_}"\nnode = ["{node}"]\nstart = "{start}"\nend = "{end}"\nwhy = "w"\n{rest}'


DAY = window_text("n1", "2027-01-15T00:00:00Z", "2027-01-16T00:00:00Z")
NOON = 1_800_014_400_000  # 2027-01-15T12:00:00Z


def test_a_pipe_a_device_and_a_huge_file_do_not_stop_the_collector(tmp_path: Path) -> None:
    pipe, large, device = tmp_path / "pipe", tmp_path / "large.toml", tmp_path / "device"
    os.mkfifo(pipe)
    with large.open("wb") as file:
        file.truncate(1 << 40)
    device.symlink_to("/dev/zero")
    for path, said in ((pipe, "not a regular file"), (large, "larger than 1 MiB"), (device, "not a regular file")):
        with pytest.raises(SettingsError, match=said):
            read_file(path, SPEC.by_name, T0)


@pytest.mark.parametrize("text", ["x = " + "[" * 100_000, "x = " + "9" * 5000, 'x = "\udcff"'])
def test_hostile_toml_is_a_file_that_cannot_be_read(tmp_path: Path, text: str) -> None:
    path = tmp_path / "work.toml"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(SettingsError, match="not valid TOML"):
        read_file(path, SPEC.by_name, T0)


@pytest.mark.parametrize(
    "more",
    [{"source": "kubernetes"}, {"source": "a:b"}, {"source": "a" * 65}, {"id_": "\\u001b[2J"}, {"id_": "i" * 101}],
)
def test_a_window_takes_no_other_sources_name_and_no_odd_one(tmp_path: Path, more: dict[str, str]) -> None:
    path = tmp_path / "work.toml"
    path.write_text(window_text("n1", "2027-01-15T00:00:00Z", "2027-01-16T00:00:00Z", **more))
    with pytest.raises(SettingsError):
        read_file(path, SPEC.by_name, T0)


def test_a_half_written_or_vanished_file_changes_nothing_for_a_moment(tmp_path: Path) -> None:
    path = tmp_path / "work.toml"
    path.write_text(DAY)
    subject = Watched(replace(HALF, file=str(path)))
    subject.now = NOON
    subject.look()
    assert sorted(subject.silences.held(NOON)) == ["n1"]
    path.write_text("")  # an editor or a script has begun to write it
    subject.look()
    assert sorted(subject.silences.held(NOON)) == ["n1"]
    path.write_text(DAY + "# same\n")
    subject.look()
    path.unlink()
    subject.look()
    assert sorted(subject.silences.held(NOON)) == ["n1"]
    subject.look()
    assert not subject.silences.held(NOON), "it is gone, and not for a moment"


def test_a_window_of_the_file_that_comes_late_hides_nothing_of_before_also_with_more_nodes(tmp_path: Path) -> None:
    path = tmp_path / "work.toml"
    path.write_text("")
    subject = Watched(replace(HALF, file=str(path)))
    subject.now = NOON
    subject.look()
    path.write_text(DAY)
    subject.look()
    subject.look()
    assert subject.silences.held_since(NOON) == {"n1": NOON}
    assert subject.silences.of(on("n1", NOON - 1), NOON + 1) is None
    path.write_text(DAY.replace('["n1"]', '["n1", "n2"]'))
    subject.now = NOON + 1000
    subject.look()
    subject.look()
    assert subject.silences.of(on("n2", NOON + 500), NOON + 2000) is None, "n2 was sick before"
    path.write_text(DAY.replace("16T00", "15T23"))
    subject.now = NOON + 2000
    subject.look()
    subject.look()
    assert subject.silences.of(on("n1", NOON + 1500), NOON + 2000) is not None, "a change of the end keeps the begin"


def test_the_file_is_no_older_than_it_was_written_after_a_restart_too(tmp_path: Path) -> None:
    path = tmp_path / "work.toml"
    path.write_text(DAY)
    written_ms = path.stat().st_ctime_ns // 1_000_000
    subject = Watched(replace(HALF, file=str(path)))
    path.write_text(window_text("n1", iso(written_ms - HOUR_MS), iso(written_ms + HOUR_MS)))
    os.utime(path, (0, 0))  # a time that anyone can set
    subject.now = written_ms + 60_000
    subject.look()
    assert subject.silences.held_since(subject.now)["n1"] >= written_ms


def test_to_end_a_window_of_next_month_ends_no_other(tmp_path: Path) -> None:
    subject = silences(silence(node=("n3",), maintenance=True))
    later = work("n1", begin_ms=T0 + 30 * 24 * HOUR_MS)
    subject.set_file([later])
    assert "n3" in subject.held(T0)
    subject.take(replace(later, from_ms=T0, until_ms=T0, ended_by="anna"))
    assert "n3" in subject.held(T0), "a person's own window goes on"


def test_a_rack_that_was_silent_before_the_work_stays_an_alarm_over_a_restart() -> None:
    index = small_fleet(12)
    rack = index.nodes[4].rack
    names = tuple(node.name for node in index.nodes if node.rack == rack)
    open_ = replace(
        fault("i1"), kind=liveness.KIND, cause="silent", scope="rack", node=None, gpu=None,
        members=tuple((name, None) for name in names), detectors=("liveness",), since_ms=START_MS - HOUR_MS,
        severity=Severity.CRITICAL,
    )  # fmt: skip
    state: Any = liveness.restored([open_], index, START_MS)
    found: list[Any] = []
    quiet = [n for n, node in enumerate(index.nodes) if node.name in names]
    for window, now_ms in play(index, 30, silent=lambda _: quiet):
        found, state = liveness.detect(replace(window, maintained={names[0]: START_MS - 60_000}), state, now_ms)
    assert [(f.cause, len(f.members)) for f in found if not f.cleared] == [("silent", len(names))]


def test_a_window_with_the_id_of_an_earlier_one_is_said_to_be_left_out(tmp_path: Path) -> None:
    path = tmp_path / "work.toml"
    of = 'id = "x"\nstart = "2027-01-15T02:00:00Z"\nend = "2027-01-15T06:00:00Z"\nwhy = "board"\nsource = "aws"\n'
    path.write_text(f'[[window]]\nnode = ["n1"]\n{of}[[window]]\nnode = ["n2"]\n{of}')
    found, wrong = read_file(path, SPEC.by_name, T0)
    assert [made.node for made in found] == [("n1",)]
    assert "window[1]: an earlier window has its source and id" in wrong

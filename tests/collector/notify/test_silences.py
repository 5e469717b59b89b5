"""What a silence covers, and when a maintenance window is open."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from drover_collector.config import load_config
from drover_collector.notify.maintenance_windows import MaintenanceConfig, validate_window_places
from drover_collector.notify.silences import Silences, covers
from drover_core.model.events import Incident, IncidentKind, Member
from drover_core.model.fleet import FleetSpec, NodeSpec
from drover_core.model.silences import describe_scope
from drover_core.settings import SettingsError
from drover_core.times import from_iso, iso
from testbed.outboxes import HOUR_MS, T0, fault, silence

SPEC = FleetSpec(tuple(NodeSpec(f"n{n}", f"r{n // 2}", f"l{n // 4}", "train" if n < 4 else "lab") for n in range(8)))


def on(*members: Member, kind: IncidentKind = IncidentKind.XID, id_: str = "i1") -> Incident:
    node, gpu = members[0] if len(members) == 1 else (None, None)
    return replace(fault(id_), kind=kind, node=node, gpu=gpu, members=members)


@pytest.mark.parametrize(
    ("places", "incident", "covered"),
    [
        ({"node": ("n1", "n2")}, on(("n1", 3)), True),
        ({"node": ("n1",)}, on(("n2", 3)), False),
        ({"node": ("n1",)}, on(("n1", None)), True),
        ({"node": ("n1",), "gpu": (3,)}, on(("n1", 3)), True),
        ({"node": ("n1",), "gpu": (3,)}, on(("n1", 4)), False),
        ({"node": ("n1",), "gpu": (3,)}, on(("n1", None)), False),
        ({"rack": ("r0",)}, on(("n0", 1), ("n1", 1)), True),
        ({"rack": ("r0",)}, on(("n1", 1), ("n2", 1)), False),
        ({"leaf": ("l0",), "kind": ("xid",)}, on(("n3", 1)), True),
        ({"leaf": ("l0",), "kind": ("link",)}, on(("n3", 1)), False),
        ({"pool": ("lab",)}, on(("n7", 1)), True),
        ({"pool": ("lab",)}, on(("elsewhere", 1)), False),
        ({"kind": ("thermal",)}, on(("n1", 1), kind=IncidentKind.THERMAL), True),
        ({"incident": ("i1",)}, on(("n1", 1)), True),
        ({"incident": ("i1",)}, on(("n1", 1), id_="i2"), False),
        ({"incident": ("i1",), "node": ("n2",)}, on(("n1", 1)), False),
        ({"node": ("n1",)}, replace(on(("n1", 1)), members=(), node=None), False),
        ({}, on(("n1", 1)), False),
    ],
)  # fmt: skip
def test_what_a_silence_covers(places: dict[str, Any], incident: Incident, covered: bool) -> None:
    assert covers(silence(**places), incident, SPEC.by_name) is covered


def test_of_several_the_one_that_lasts_longest_and_each_in_its_time() -> None:
    silences = Silences(SPEC.by_name)
    incident = on(("n1", 1))
    assert silences.of(incident, T0) is None
    silences.load([silence("short", 10, node=("n1",)), silence("other", 600, node=("n2",))])
    silences.take(silence("long", 60, node=("n1",)))
    silences.take(silence("later", 600, T0 + 2 * HOUR_MS, rack=("r0",)))
    found = [silences.of(incident, T0 + minutes * 60_000) for minutes in (0, 59, 60, 119, 120)]
    assert [s and s.id for s in found] == ["long", "long", None, None, "later"]
    assert [s.id for s in silences.known(T0)] == ["short", "long", "other", "later"]
    assert [s.id for s in silences.active(T0)] == ["short", "long", "other"]
    silences.take(silence("long", 1, node=("n1",)))  # ended before its time
    assert silences.of(incident, T0 + 20 * 60_000) is None


def test_only_maintenance_holds_nodes() -> None:
    silences = Silences(SPEC.by_name)
    silences.take(silence("s", rack=("r0",)))
    silences.take(silence("m", rack=("r1",), maintenance=True))
    held = silences.held(T0)
    assert sorted(held) == ["n2", "n3"]
    assert held["n2"] == f"maintenance window: by anna until {iso(T0 + HOUR_MS)[:19]}Z: planned"
    assert silences.held(T0 + HOUR_MS) == {}


def test_in_words() -> None:
    assert describe_scope(silence(rack=("r1", "r2"), kind=("link",), gpu=(3,))) == "gpu 3, rack r1 r2, kind link"


WEEKLY = MaintenanceConfig(
    "patching", "driver updates", ("saturday",), "23:30", 4.0, "Europe/Berlin", pool=("lab",)
)  # fmt: skip


@pytest.mark.parametrize(
    ("at", "until"),
    [
        ("2026-11-21T22:29:59Z", None),  # 23:29:59 in Berlin
        ("2026-11-21T22:30:00Z", "2026-11-22T02:30:00.000Z"),
        ("2026-11-22T02:29:59Z", "2026-11-22T02:30:00.000Z"),  # Sunday there: it goes on past midnight
        ("2026-11-22T02:30:00Z", None),
        ("2026-07-04T21:30:00Z", "2026-07-05T01:30:00.000Z"),  # the same hour in summer
        ("2026-10-24T21:30:00Z", "2026-10-25T01:30:00.000Z"),  # 4 h, whatever clocks do in that night
        ("2026-11-20T23:00:00Z", None),  # a Saturday already there, in its first hour
    ],
)
def test_a_window_is_open_at_its_local_time(at: str, until: str | None) -> None:
    found = WEEKLY.open_at(from_iso(at))
    assert (None if found is None else iso(found.until_ms)) == until
    if found is not None:
        assert (found.by, found.why, found.pool, found.maintenance) == (
            "maintenance patching", "driver updates", ("lab",), True,
        )  # fmt: skip
        assert found.id.startswith("patching-20")


def test_a_window_of_several_days_is_open_on_the_last() -> None:
    window = replace(WEEKLY, hours=72.0, time_zone="UTC")
    assert window.open_at(from_iso("2026-11-24T23:29:00Z")) is not None
    assert window.open_at(from_iso("2026-11-24T23:30:00Z")) is None


def test_a_window_covers_and_can_be_ended_this_once() -> None:
    now_ms = from_iso("2026-11-21T23:00:00Z")
    silences = Silences(SPEC.by_name, [WEEKLY])
    found = silences.of(on(("n7", 0)), now_ms)
    assert found is not None
    assert sorted(silences.held(now_ms)) == ["n4", "n5", "n6", "n7"]
    silences.take(replace(found, until_ms=now_ms, ended_by="bo"))
    assert silences.of(on(("n7", 0)), now_ms) is None
    assert silences.held(now_ms + 60_000) == {}
    assert silences.held(now_ms + 7 * 24 * HOUR_MS) != {}, "the next week's is another"


GOOD = '[[maintenance]]\nname = "m"\nwhy = "updates"\ndays = ["monday"]\nstart = "02:00"\nhours = 2\npool = ["lab"]\n'


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('"monday"', '"mon"', "6: maintenance[0].days: 'mon' is not one of monday, tuesday"),
        ('["monday"]', "[]", "6: maintenance[0].days: name at least one day"),
        ('"02:00"', '"24:00"', "7: maintenance[0].start: must be a time of day such as 02:30, found '24:00'"),
        ("hours = 2", "hours = 73", "8: maintenance[0].hours: must be from 0.1 to 72, found 73.0"),
        ("hours = 2\n", "", "3: maintenance[0].hours: missing; how long it lasts"),
        ('pool = ["lab"]\n', "", "3: maintenance[0]: say where: give node, rack, leaf or pool"),
        (
            'pool = ["lab"]',
            'pool = ["lab"]\ntime_zone = "Berlin"',
            "10: maintenance[0].time_zone: is not a time zone",
        ),
        (
            'pool = ["lab"]',
            'pool = ["lab"]\ntime_zone = "Europe"',
            "10: maintenance[0].time_zone: is not a time zone",
        ),
        ('"updates"', '" "', "5: maintenance[0].why: is empty"),
    ],
)
def test_what_is_wrong_with_a_window_is_reported_with_its_line(tmp_path: Path, old: str, new: str, says: str) -> None:
    path = tmp_path / "collector.toml"
    text = "[notify]\nmax_silence_h = 8\n" + GOOD
    path.write_text(text)
    assert load_config(path).maintenance[0].start == "02:00"
    path.write_text(text.replace(old, new))
    with pytest.raises(SettingsError) as caught:
        load_config(path)
    assert str(caught.value).startswith(f"{path}:{says}")


def test_a_window_for_a_place_that_the_fleet_does_not_have() -> None:
    validate_window_places([WEEKLY], SPEC)
    with pytest.raises(SettingsError, match=r"maintenance\[0\].rack: 'r9' is not in the fleet file"):
        validate_window_places([replace(WEEKLY, rack=("r9",))], SPEC)

"""What `drover status` says of the store and of this collector's part, line by line."""

from __future__ import annotations

from typing import Any

import pytest

from drover_cli.main import main
from drover_proto import fleet_pb2 as pb
from testbed.fleet_stand_in import FleetStandIn

HOUR_MS = 3_600_000
NOW_MS = 1_790_000_000_000


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Lines by name that the command prints of a status."""

    def ask(**fields: Any) -> dict[str, str]:
        class Stub(FleetStandIn):
            def GetStatus(self, request: pb.StatusRequest) -> pb.Status:  # gRPC's name
                return pb.Status(mode="observe", policy="nvidia", retention_days=30, **fields)

        Stub().install(monkeypatch)
        assert main(["status"]) == 0
        lines = capsys.readouterr().out.splitlines()
        return {line[:15].strip() if line[0] != " " else line.split()[0]: line[16:].strip() for line in lines}

    return ask


def samples(name: str, hours: float, size: int) -> pb.TableSize:
    return pb.TableSize(name=name, rows=10, bytes=size, oldest_ms=NOW_MS - round(hours * HOUR_MS), newest_ms=NOW_MS)


@pytest.mark.parametrize(
    ("days_left", "says"),
    [
        (None, "9.0 GB free, too little data yet to say for how long"),
        (36_500.0, "9.0 GB free, enough for all that is kept"),
        (5.25, "9.0 GB free, at this rate the oldest samples go for room in 5.2 d"),
        (0.01, "9.0 GB free, at this rate the oldest samples go for room in 14 min"),
    ],
)
def test_the_store_in_bytes_and_days(said: Any, days_left: float | None, says: str) -> None:
    tables = [samples("gpu_samples", 49, 10**9), samples("node_samples", 60, 10**6), samples("gpu_5m", 900, 10**6)]
    shown = said(store_bytes=2 * 10**9, store_free_bytes=9 * 10**9, store_days_left=days_left, tables=tables)
    assert shown["store"] == f"2.0 GB on disk; samples of 2.5 d, kept 30 days; {says}"


def test_a_server_and_an_empty_store_show_nothing_that_is_not_known(said: Any) -> None:
    shown = said(store_bytes=100, tables=[pb.TableSize(name="incidents", rows=0, bytes=7)])
    assert shown["store"] == "100 B on disk; samples kept 30 days"
    assert shown["last detection"] == "never"
    assert shown["newest sample"] == "never"
    assert "over" not in shown["incidents"]


def test_tables_show_spans_in_units_that_are_not_zero(said: Any) -> None:
    shown = said(tables=[samples("gpu_samples", 0.1, 5000)])
    assert shown["gpu_samples"].endswith("5.0 kB, 10 rows over 6 min")


def test_small_tables_do_not_scroll_the_rest_away(said: Any) -> None:
    tables = [pb.TableSize(name=f"t{k}", rows=1, bytes=1000 * (9 - k)) for k in range(8)]
    shown = said(tables=tables)
    assert [name for name in shown if name.startswith("t")] == ["t0", "t1", "t2", "t3", "t4"]
    assert shown["3"].endswith("9.0 kB; --json has each")


@pytest.mark.parametrize(
    ("role", "says", "detection"),
    [
        ("active", "active: detects and notifies", "never"),
        ("standby", "standby: takes in and answers; another collector detects", "not by this collector"),
        ("ingest", "ingest: takes in and answers, never detects", "not by this collector"),
        ("", "not reported", "never"),
    ],
)
def test_the_part_of_this_collector(said: Any, role: str, says: str, detection: str) -> None:
    shown = said(role=role)
    assert (shown["role"], shown["last detection"]) == (says, detection)


def test_incidents_are_counted_the_worst_first(said: Any) -> None:
    for order in (("warning", "critical", "info"), ("info", "critical", "warning")):
        counts = {name: 1 + len(name) for name in order}
        assert said(open_incidents_by_severity=counts)["open incidents"] == "9 critical, 8 warning, 5 info"


def test_before_anything_is_judged_nothing_found_is_not_none(said: Any) -> None:
    unknown = "not known: nothing is judged yet"
    shown = said()
    assert (shown["open incidents"], shown["jobs hurt"]) == (unknown, unknown)
    shown = said(newest_tick_ms=1)
    assert (shown["open incidents"], shown["jobs hurt"]) == ("none", "0 by open incidents")

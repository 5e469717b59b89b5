"""What is older than its retention goes; not by the word of one clock that is wrong."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import pytest

from drover_collector.config import StoreConfig
from drover_collector.pipeline.expiry import (
    APART_S,
    REPORT_ROWS_S,
    ROWS_S,
    ClockGuardedExpiry,
)
from drover_collector.pipeline.maintenance import Maintenance
from drover_collector.store import Store
from drover_core.metrics.catalog import Scope
from drover_core.model.events import Event, EventKind
from testbed.fleets import T0, everything, gpu_row, hello, node_row, samples
from testbed.ingest import QUICK, Collector
from testbed.loop import in_loop
from testbed.waiting import until

HOUR_MS, DAY_MS = 3_600_000, 86_400_000
YEARS_MS = 5 * 365 * DAY_MS
KEPT, HELD = 12, 16  # days that are to be kept, and that are there: each of these is a partition, which costs CPU
NOW = T0 // DAY_MS * DAY_MS + 13 * HOUR_MS


@pytest.fixture
def aged(store: Store) -> Store:
    """A sample at noon of each of HELD days, today's the last."""
    store.retention.kept_days = {name: KEPT for name in store.retention.kept_days if name.endswith("_samples")}
    store.entities.write(everything())
    noons = [NOW - HOUR_MS - day * DAY_MS for day in range(HELD)]
    store.samples.write(samples(Scope.GPU, [(gpu_row(0, 0), ts, {"power_w": 300.0}) for ts in noons]))
    store.samples.write(samples(Scope.NODE, [(node_row(0), ts, {"load1": 1.0}) for ts in noons]))
    return store


def days(store: Store, table: str = "gpu_samples") -> list[int]:
    """How many days before NOW its rows lie, the oldest first."""
    rows = store.clients.rows(f"SELECT toUnixTimestamp64Milli(ts) AS ts FROM {table} FINAL ORDER BY ts")
    return [(NOW - row["ts"]) // DAY_MS for row in rows]


ALL, IN_TIME = list(reversed(range(HELD))), list(reversed(range(KEPT)))


@dataclass
class Desk:
    """Passes by hand: a fleet whose agents vote, and two clocks."""

    store: Store
    votes: tuple[int, int] = (3, 3)
    nodes: int = 3
    ahead_ms: int = 0
    now_s: float = 0.0
    troubles: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.expiring = ClockGuardedExpiry(
            self.store, lambda: self.votes, self.nodes, self.troubles, lambda: self.now_s
        )

    def once(self, after_s: float = 0) -> None:
        self.now_s += after_s
        now_ms = NOW + round(self.now_s * 1000) + self.ahead_ms
        self.expiring.once(now_ms, self.expiring.doubt(now_ms))


def test_no_merge_deletes_what_this_machine_s_clock_calls_old(store_url: str) -> None:
    """As of a clock that is five years ahead: the engine itself must not go by it."""
    opened = Store.open(store_url, retention_days=30, retention_10s_days=30)
    then = time.time_ns() // 1_000_000 - YEARS_MS
    opened.entities.write(everything())
    opened.samples.write(samples(Scope.GPU, [(gpu_row(0, 0), then, {"power_w": 300.0})]))
    opened.events.write([Event("e1", then, "n0", 0, EventKind.XID, "79", "off the bus", "kmsg", received_ms=then)])
    opened.clients.command(
        f"INSERT INTO gpu_10s (entity_id, ts, version, rows) VALUES (1, fromUnixTimestamp64Milli({then}), 1, 1)"
    )
    held = ("gpu_samples", "gpu_10s", "events")
    for table in held:
        opened.clients.command(f"OPTIMIZE TABLE {table} FINAL")
    counts = [opened.clients.rows(f"SELECT count() AS n FROM {table}")[0]["n"] for table in held]
    opened.close()
    assert counts == [1, 1, 1]


def test_tables_of_a_version_before_lose_their_ttl_and_no_row(store_url: str) -> None:
    opened = Store.open(store_url, retention_days=3650)
    ttls = [
        row["q"].rpartition(" TTL ")[2]
        for row in opened.clients.rows(
            "SELECT create_table_query AS q FROM system.tables WHERE database = currentDatabase() AND q LIKE '% TTL %'"
        )
    ]
    assert ttls == []
    opened.entities.write([gpu_row(0, 0)])
    opened.samples.write(samples(Scope.GPU, [(gpu_row(0, 0), T0, {"power_w": 300.0})]))
    opened.clients.command("ALTER TABLE gpu_samples MODIFY TTL toDateTime(ts) + toIntervalDay(3650)")
    opened.clients.command("ALTER TABLE events MODIFY TTL toDateTime(received) + toIntervalDay(400)")
    opened.close()
    again = Store.open(store_url, retention_days=3650)
    changed = again.clients.rows("SELECT change FROM schema_versions WHERE change LIKE '%no TTL' ORDER BY change")
    again.clients.command("OPTIMIZE TABLE gpu_samples FINAL")
    left = again.clients.rows("SELECT count() AS n FROM gpu_samples")
    kept = again.clients.rows(
        "SELECT name FROM system.tables WHERE database = currentDatabase() AND create_table_query LIKE '% TTL %'"
    )
    again.close()
    assert [row["change"] for row in changed] == ["events: no TTL", "gpu_samples: no TTL"]
    assert (left, kept) == ([{"n": 1}], [])


def test_what_agreeing_clocks_call_too_old_goes_and_nothing_else(aged: Store) -> None:
    desk = Desk(aged)
    desk.once()
    desk.once(APART_S - 1)
    assert days(aged) == ALL
    desk.once(1)
    assert days(aged) == days(aged, "node_samples") == IN_TIME
    assert desk.expiring.dropped == 2 * (HELD - KEPT)
    assert desk.troubles == {}
    desk.once(DAY_MS / 1000)
    desk.once(APART_S)
    assert days(aged) == IN_TIME[1:]


def test_a_partition_goes_when_its_last_row_is_too_old(aged: Store) -> None:
    aged.samples.write(samples(Scope.GPU, [(gpu_row(0, 0), NOW - KEPT * DAY_MS + 5000, {"power_w": 1.0})]))
    desk = Desk(aged)
    kept = []
    for after_s in (0, APART_S, APART_S):  # one of its two rows is too old; both are; they were an hour ago
        desk.once(after_s)
        kept.append(KEPT in days(aged))
    assert kept == [True, True, False]


def test_what_is_merged_is_on_the_disk_before_its_sources_may_go(aged: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    command = aged.clients.command

    def note(sql: str) -> None:
        said.append(sql.split()[3] if sql.startswith("ALTER") else sql)
        command(sql)

    monkeypatch.setattr(aged.clients, "command", note)
    monkeypatch.setattr("drover_collector.store.durability.retention.os.sync", lambda: said.append("sync"))
    assert aged.retention.expire([]) == 0
    assert said == []
    assert aged.retention.expire(aged.retention.expired(NOW)) == 2 * (HELD - KEPT)
    assert said == ["sync", *["DROP"] * 2 * (HELD - KEPT)]


@pytest.mark.parametrize("votes", [(3, 0), (0, 0), (3, 3)])
def test_a_clock_that_jumps_five_years_ahead_deletes_nothing_and_retention_goes_on_after_it(
    aged: Store, votes: tuple[int, int]
) -> None:
    """Alone; without an agent; with the clocks of the whole fleet, of one bad time server."""
    desk = Desk(aged, votes=votes, ahead_ms=YEARS_MS)
    for _ in range(3):
        desk.once(2 * APART_S)
        assert days(aged) == ALL
    trouble = desk.troubles["expiry"]
    assert trouble.startswith("Nothing is deleted for its age since 20")
    assert desk.expiring.held_s == 4 * APART_S
    assert {(3, 0): "3 of 3 connected agents", (0, 0): "no agent is connected", (3, 3): "samples of 0 of"}[
        votes
    ] in trouble
    desk.votes, desk.ahead_ms = (3, 3), 0
    desk.once()
    assert (desk.troubles, desk.expiring.held_s) == ({}, 0.0)
    assert days(aged) == ALL
    desk.once(APART_S)
    assert days(aged) == [day for day in ALL if day < KEPT]


def test_one_look_at_a_wrong_clock_is_not_enough(aged: Store) -> None:
    desk = Desk(aged)
    desk.once()
    desk.ahead_ms = 10 * DAY_MS  # and the doubts do not see it
    desk.expiring.doubt = lambda _: ""  # type: ignore[method-assign]
    desk.once(APART_S / 2)
    desk.ahead_ms = 0
    desk.once(APART_S / 2)
    desk.once(APART_S)
    assert days(aged) == IN_TIME


def test_whose_word_is_enough(aged: Store) -> None:
    """A single wrong clock among them neither deletes anything nor holds it back for ever."""
    for nodes, votes, why in (
        (3, (3, 2), ""), (2, (2, 1), ""), (1, (1, 1), ""), (500, (500, 400), ""), (500, (3, 3), ""),
        (1, (1, 0), "1 of 1 connected agents have a time that differs from this machine's by more than 60 min"),
        (3, (3, 1), "2 of 3 connected agents"),
        (500, (2, 2), "only 2 connected agents have the time of this machine's clock, 3 are needed"),
        (500, (1, 1), "only 1 connected agent has the time"),
        (3, (0, 0), "no agent is connected"),
    ):  # fmt: skip
        found = Desk(aged, votes, nodes).expiring.doubt(NOW)
        assert found.startswith(why), (nodes, votes)
        assert bool(found) == bool(why), (nodes, votes)


def test_a_store_must_have_lived_up_to_now_by_that_clock(aged: Store) -> None:
    assert aged.retention.days_lived(NOW) == (14, 7)
    assert aged.retention.days_lived(NOW + 7 * DAY_MS) == (7, 7)
    assert aged.retention.days_lived(NOW + 8 * DAY_MS) == (6, 7)
    assert aged.retention.days_lived(NOW - YEARS_MS) == (0, 7)
    aged.retention.kept_days = {"gpu_samples": 2, "gpu_10s": 1, "gpu_5m": 1100}
    assert aged.retention.days_lived(NOW) == (4, 2)


def test_with_nothing_too_old_nothing_is_reported_until_the_daily_pass_is_overdue(store: Store) -> None:
    desk = Desk(store, votes=(0, 0))
    desk.once()
    assert (desk.troubles, desk.expiring.held_s) == ({}, 0.0)
    desk.once(REPORT_ROWS_S - ROWS_S)
    assert "no agent is connected" in desk.troubles["expiry"]


def test_rows_of_tables_without_partitions_go_once_a_day_and_by_the_earlier_of_two_looks(aged: Store) -> None:
    old, young = NOW - 401 * DAY_MS, NOW - 399 * DAY_MS
    aged.events.write(
        [
            Event(name, ts, "n0", 0, EventKind.XID, "79", "off the bus", "kmsg", received_ms=ts)
            for name, ts in (("old", old), ("young", young))
        ]
    )

    def left() -> list[str]:
        aged.clients.command("OPTIMIZE TABLE events FINAL")  # waits for what is being deleted
        return [row["id"] for row in aged.clients.rows("SELECT id FROM events ORDER BY id")]

    wrong = Desk(aged, votes=(3, 0), ahead_ms=YEARS_MS)
    wrong.once()
    wrong.once(APART_S)
    assert left() == ["old", "young"]
    desk = Desk(aged)
    desk.once()
    assert left() == ["old", "young"]
    desk.expiring.doubt = lambda _: ""  # type: ignore[method-assign]
    desk.ahead_ms = 10 * DAY_MS  # only the second look
    desk.once(APART_S)
    assert left() == ["young"]


@in_loop
async def test_a_collector_whose_clock_jumps_keeps_all_and_deletes_again_when_it_is_set(aged: Store) -> None:
    """From what agents say in their Hellos to the partitions."""
    async with (
        Collector(aged, QUICK, now_ms=NOW) as collector,
        collector.agent(hello("n0", ts_ms=NOW)),
        collector.agent(hello("n1", "s2", ts_ms=NOW)),
        collector.agent(hello("n2", "s3", ts_ms=NOW + 2 * HOUR_MS)),
    ):
        stats = collector.ingest.stats
        assert stats.clock_votes == (3, 2)
        desk = Desk(aged)
        desk.expiring._votes = lambda: stats.clock_votes
        collector.now_ms, desk.ahead_ms = NOW + YEARS_MS, YEARS_MS
        await until(lambda: stats.clock_votes == (3, 0), "the clock is seen to be set")
        desk.once()
        desk.once(APART_S)
        assert days(aged) == ALL
        collector.now_ms, desk.ahead_ms = NOW, 0
        await until(lambda: stats.clock_votes == (3, 2), "it is set back")
        desk.once()
        desk.once(APART_S)
        assert days(aged) == IN_TIME
    assert stats.clock_votes == (0, 0)


@pytest.mark.parametrize("ahead_ms", [-YEARS_MS, YEARS_MS])
def test_room_is_made_oldest_first_whatever_the_clock_says(aged: Store, ahead_ms: int) -> None:
    """Years behind, nothing would be old enough to go; years ahead, the newest hour would be as old as all."""
    newest = NOW - 30 * 60_000
    aged.samples.write(samples(Scope.GPU, [(gpu_row(0, 1), newest, {"power_w": 1.0})]))
    troubles: dict[str, str] = {}
    maintenance = Maintenance(
        aged, StoreConfig(max_bytes=1), now_ms=lambda: NOW + ahead_ms, troubles=troubles, votes=lambda: (3, 0), nodes=3
    )
    maintenance.once()
    assert "maintenance" not in troubles
    assert days(aged) == [0]
    assert aged.clients.rows("SELECT max(toUnixTimestamp64Milli(ts)) AS at FROM gpu_samples") == [{"at": newest}]

"""Attacks by who has a certificate and by who has none, on a collector that agents stream to, and what they cost it.

Each runs with the collector in a memory cgroup where one can be made, while an operator asks GetStatus again and again.
The last two have a place of their own, whose store has a past.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from disruption.around import mounted
from disruption.elsewhere import plain
from disruption.faults_processes import fill
from disruption.place import CALL_S
from disruption.run import Row, Run, SkipError
from drover_collector.store import Store, keep_free
from drover_core.metrics.catalog import Scope
from drover_core.model.events import (
    Incident,
    IncidentKind,
    RecommendedAction,
    Severity,
)
from drover_proto import fleet_pb2 as pb
from drover_proto.fleet_pb2_grpc import FleetStub
from testbed import hostile_agents, hostile_fleet_api
from testbed.certificates import Files
from testbed.fleets import gpu_row, hello, node_row, samples
from testbed.hostile_fleet_api import Cost, cage, channel, resident, watch

Steps = Iterator[Callable[[], object] | None]
PATIENT_S = 60.0
ANSWERS = 3  # of GetStatus that an attack must see
BOMB_BYTES = 16 << 20  # 16 kB once it is compressed
AGENT_BOMB_BYTES = 5_100_000  # 5 kB once it is compressed
IDLE = 2_000
SPANS, CLOSED = 100, 20_000
SECONDS = 10.0  # of the attacks that have no end of their own
DAY_MS = 86_400_000
OLD = "n0"  # the node of testbed.fleets that the store's past is of
DISK_BYTES = 768 << 20
PASS_S = 45.0  # maintenance looks at the disk every 30 s


@contextlib.contextmanager
def attacked(run: Run, *, operator: Files | None = None, reconnect: bool = False) -> Iterator[Cost]:
    """What happens within is an attack: its cost is in the row."""
    process, target = run.place.collectors["c1"], run.place.apis["c1"]
    pid = process.child.pid
    with cage(pid) as where:
        with watch(pid, target, operator, reconnect=reconnect) as cost:
            yield cost
            run.place.wait(lambda: cost.answered >= ANSWERS, PATIENT_S)
        run.must(process.alive and resident(pid), f"the collector goes on, within a {where}")
    failed = f"{len(cost.failed)} not answered: {cost.failed[0]}" if cost.failed else ""
    run.must(not cost.failed, f"GetStatus is answered ({failed})")
    run.saw(cost.row() + (failed and f", {failed}"))


def known(run: Run, role: str, name: str) -> Files:
    files: Files = run["authority"].issue(role, name)
    return files


def fleet_api_bombs(role: str) -> Callable[[Run], Steps]:
    def fault(run: Run) -> Steps:
        attacker, target = known(run, role, "n00"), run.place.apis["c1"]
        with attacked(run, operator=known(run, "operator", "olga")):
            codes = hostile_fleet_api.flood(
                target, attacker, hostile_fleet_api.empty_targets(BOMB_BYTES), connections=4, calls=20, rounds=1
            )
        run.must("OK" not in codes, "no bomb is taken")
        run.saw(f"{codes.total()} requests of 16 kB, each 16 MiB unpacked: {counted(codes)}")
        yield None

    return fault


def agent_bombs(run: Run) -> Steps:
    attacker, ends = known(run, "agent", "n00"), dict[str, int]()
    with attacked(run, operator=known(run, "operator", "olga")):
        for kind in ("records", "blocks", "entities"):
            message = hostile_agents.empty_parts(kind, AGENT_BOMB_BYTES)
            for end in hostile_agents.bombs_before_hello(run["ingest"], attacker, message).values():
                ends[f"status {end}"] = ends.get(f"status {end}", 0) + 1
    run.must("status 0" not in ends, "no bomb is taken")
    run.saw(f"{sum(ends.values())} streams that begin with 5 kB, each 5 MB unpacked: {counted(ends)}")
    yield None


def welcomed_bombs(run: Run) -> Steps:
    """By a node's certificate that no agent uses now: the fleet's own is the rival of none."""
    attacker = known(run, "agent", "n99")
    own = hello("n99")
    own.ts_ms = time.time_ns() // 1_000_000  # else its clock is wrong, and its stream is ended for that
    ends = []
    with attacked(run, operator=known(run, "operator", "olga")):
        for kind in ("records", "blocks"):
            message = hostile_agents.loose(hostile_agents.empty_parts(kind, 10_000_000))
            ends.append(hostile_agents.bombs_after_hello(run["ingest"], attacker, own, message, 3))
    run.saw(f"6 messages of 70 kB, each 10 MB unpacked; their streams end with {ends}")
    yield None


def settings_floods(run: Run) -> Steps:
    with attacked(run, operator=known(run, "operator", "olga")):
        codes = hostile_agents.settings_floods(run["ingest"], known(run, "agent", "n00"), seconds=SECONDS)
    run.saw(f"{len(codes)} connections of one certificate; {sum(code is not None for code in codes)} got a GOAWAY")
    yield None


def silent(name: str) -> Callable[[Run], Steps]:
    def fault(run: Run) -> Steps:
        target = run.place.apis["c1"] if name == "api" else run["metrics"]
        host, port = target.rsplit(":", 1)
        pid = run.place.collectors["c1"].child.pid
        with attacked(run, operator=known(run, "operator", "olga"), reconnect=True) as cost:
            before = hostile_fleet_api.open_files(pid)
            with hostile_fleet_api.idle_connections(host, int(port), IDLE):
                run.hold(SECONDS)
                answered = cost.answered
                run.until(lambda: cost.answered > answered, PATIENT_S, "an operator's new connection is answered")
                more = hostile_fleet_api.open_files(pid) - before
        run.saw(f"{IDLE:,} connections took {more} files")
        yield None

    return fault


def pinned(role: str, certificates: int) -> Callable[[Run], Steps]:
    def fault(run: Run) -> Steps:
        attackers = [known(run, role, f"n{number:02}") for number in range(certificates)]
        with (
            attacked(run, operator=known(run, "operator", "olga"), reconnect=True) as cost,
            hostile_fleet_api.pinned_calls(run.place.apis["c1"], attackers, 30, 64) as sent,
        ):
            answered = cost.answered
            run.hold(SECONDS)
            run.until(lambda: cost.answered > answered, PATIENT_S, "an operator is answered")
        run.saw(f"{sent.calls:,} calls on 30 connections, answers never read")
        yield None

    return fault


def counted(counts: Any) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))


# ---- a place with a past


def spans(run: Run) -> Steps:
    """A viewer asks for what faults cost in one span after another."""
    now_ms = time.time_ns() // 1_000_000
    with attacked(run), channel(run.place.apis["c1"], None) as made:
        for number in range(SPANS):
            request = pb.CapacityRequest(from_ms=now_ms - (1 + 3 * number) * DAY_MS, to_ms=now_ms)
            FleetStub(made).GetCapacity(request, timeout=CALL_S)
    run.saw(f"{SPANS} spans of GetCapacity over {CLOSED:,} closed incidents")
    yield None


def backup(run: Run) -> Steps:
    """There is room for a copy of the store, but none for its reserve in addition."""
    disk: Path | None = run["disk"]
    if disk is None:
        raise SkipError("needs root, to mount a disk of its own")
    past = run.place.stub().GetSystem(pb.SystemRequest(), timeout=CALL_S).store
    run.must(held_s(past) > DAY_MS / 1000, "the store has a past")
    size = sum(file.stat().st_size for file in (disk / "store").rglob("*") if file.is_file())
    ballast = fill(disk, keep_free(DISK_BYTES, 0) + size // 2)
    refused = ""
    with attacked(run):
        try:
            run.place.stub().Backup(pb.BackupRequest(name="night"), timeout=CALL_S)
        except grpc.RpcError as error:
            refused = f"{error.code().name}: {error.details()}"
        run.hold(PASS_S)  # maintenance deletes, if anything does
    ballast.unlink()
    run.must(refused, "the backup is refused")
    after = run.place.stub().GetSystem(pb.SystemRequest(), timeout=CALL_S).store
    run.must(held_s(after) >= held_s(past) and not after.dropped_bytes, "the store's past is unchanged")
    run.saw(f"refused; samples of {held_s(after) / 3600:.0f} h are there as before")
    yield None


def held_s(state: pb.StoreState) -> float:
    return state.held_s if state.HasField("held_s") else 0.0


def give_a_past(store: Path) -> None:
    """20,000 closed incidents of a year, and a day of samples of a node that is gone."""
    now_ms = time.time_ns() // 1_000_000
    opened = Store.open(f"chdb://{store}", wait_s=30, retention_days=3650)
    try:
        opened.entities.write([gpu_row(0, 0, first_ms=now_ms - 2 * DAY_MS), node_row(0)])
        rng = np.random.default_rng(1)
        rows = [(gpu_row(0, 0), now_ms - 2 * DAY_MS + k * 1000, {"power_w": rng.random() * 700}) for k in range(40_000)]
        opened.samples.write(samples(Scope.GPU, rows))
        opened.incidents.write([closed(number, now_ms) for number in range(CLOSED)])
    finally:
        opened.close()


def closed(number: int, now_ms: int) -> Incident:
    opened_ms = now_ms - DAY_MS - number * (360 * DAY_MS // CLOSED)
    return Incident(
        f"past-{number}", IncidentKind.XID, "xid_79", "gpu", OLD, 0, ((OLD, 0),), opened_ms, opened_ms,
        opened_ms + 3_600_000, Severity.WARNING, 1.0, RecommendedAction.WATCH, "a GPU fell off the bus", "drain it",
        gpu_hours_lost=1.0, updated_ms=opened_ms + 3_600_000,
    )  # fmt: skip


HISTORY: tuple[tuple[str, Callable[[Run], Steps]], ...] = (
    ("spans of GetCapacity, by a viewer", spans),
    ("a backup that leaves no room for the store's reserve", backup),
)


def history(folder: Path, names: Sequence[str]) -> tuple[list[Row], dict[str, object]]:
    with ExitStack() as stack:
        folder.mkdir(parents=True)
        disk = mounted(folder / "disk", DISK_BYTES, stack)
        store = (disk or folder) / "store"
        give_a_past(store)
        backups = f'backup_folder = "{store.parent}/backups"\n'
        place = plain(folder, {"c1": f"chdb://{store}"}, kept=backups)
        stack.callback(place.close)
        place.start_collector()
        place.start_agents()
        run = Run(place, folder)
        run.with_["disk"] = disk
        if not place.wait(lambda: not place.well(), PATIENT_S):
            raise RuntimeError(f"the fleet with a past does not begin: {place.well()}")
        for name, fault in HISTORY:
            if name in names:
                run.suffer("attack", name, fault)
        place.finish()
        return run.rows, place.check(f"chdb://{store}", others=OLD)


ATTACKS: tuple[tuple[str, Callable[[Run], Steps]], ...] = (
    ("Fleet API bombs, by an agent's certificate", fleet_api_bombs("agent")),
    ("Fleet API bombs, by a viewer's certificate", fleet_api_bombs("viewer")),
    ("bombs on the agents' port before a Hello", agent_bombs),
    ("bombs on the agents' port after a Hello", welcomed_bombs),
    ("floods of SETTINGS on the agents' port", settings_floods),
    ("silent connections to the Fleet API", silent("api")),
    ("silent connections to the metrics page", silent("metrics")),
    ("refused calls whose answers nobody reads", pinned("agent", 1)),
    ("calls of six viewers whose answers nobody reads", pinned("viewer", 6)),
)

"""The lease: two that want it, with clocks that the test moves and a process that stands still where it hurts most."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from drover_collector.store import Lease, Store, StoreError
from drover_collector.store.clickhouse import server as server_module
from drover_collector.store.ha.lease import (
    KEPT,
    NOBODY,
    KeeperEpochs,
    TableEpochs,
)
from testbed.front import Front, front
from testbed.system_processes import free_port, reachable
from testbed.waiting import wait_until

TTL_S = 10.0


class Clock:
    """Seconds since boot, and the wall clock, which may jump by itself."""

    def __init__(self) -> None:
        self.s = 1000.0
        self.jumped_s = 0.0

    def __call__(self) -> tuple[float, float]:
        return self.s, self.s + self.jumped_s


class Epochs:
    """In memory; `meanwhile` happens within the next claim, before it is decided."""

    def __init__(self) -> None:
        self.held: dict[int, str] = {}
        self.away = False
        self.lose_answer = False
        self.meanwhile: Callable[[], object] = lambda: None

    def newest(self) -> tuple[int, str]:
        if self.away:
            raise StoreError("away")
        return max(self.held.items(), default=(0, NOBODY))

    def claim(self, epoch: int, holder: str) -> bool:
        if self.away:
            raise StoreError("away")
        meanwhile, self.meanwhile = self.meanwhile, lambda: None
        meanwhile()
        if epoch in self.held:
            return False
        self.held[epoch] = holder
        if self.lose_answer:
            self.lose_answer = False
            raise StoreError("no answer within 3 s")
        return True

    def forget(self, before: int) -> None:
        self.held = {epoch: holder for epoch, holder in self.held.items() if epoch >= before}


class World:
    def __init__(self) -> None:
        self.epochs = Epochs()
        self.clocks = {name: Clock() for name in "ab"}
        self.a, self.b = (Lease(self.epochs, name, TTL_S, clock=self.clocks[name]) for name in "ab")

    def later(self, seconds: float) -> None:
        for clock in self.clocks.values():
            clock.s += seconds

    def one_at_most(self) -> None:
        assert not (self.a.holds() and self.b.holds())


def test_the_first_to_come_has_it_and_renews_it() -> None:
    world = World()
    assert world.a.step()
    assert not world.b.step()
    for _ in range(100):
        world.later(world.a.every_s)
        assert world.a.step()
        assert not world.b.step()
        world.one_at_most()
    assert world.a.token == 101
    assert len(world.epochs.held) <= 2 * KEPT + 1


def test_of_two_that_claim_at_once_one_has_it() -> None:
    world = World()
    world.epochs.meanwhile = world.b.step
    assert not world.a.step()
    assert world.b.holds()
    world.one_at_most()


def test_one_that_is_gone_is_followed_after_its_time_and_a_margin() -> None:
    world = World()
    world.a.step()
    world.b.step()
    waited = 0.0
    while not world.b.step():
        world.later(0.5)
        waited += 0.5
        world.one_at_most()
    assert waited == TTL_S + world.b.margin_s
    assert world.b.token == 2


def test_one_that_stood_still_finds_its_time_over_before_it_asks_anybody() -> None:
    world = World()
    world.a.step()
    world.b.step()
    world.clocks["b"].s += 15
    world.clocks["a"].s += 15  # a is stopped; b has watched all the while
    assert world.b.step()
    assert not world.a.holds()
    assert not world.a.step()
    assert world.b.holds()


def test_one_that_stood_still_within_a_claim_has_not_got_the_time_back() -> None:
    """The claim is made, its answer is read after a pause: the time counts from before it."""
    world = World()
    world.a.step()

    def pause() -> None:
        world.clocks["a"].s += 20

    world.epochs.meanwhile = pause
    assert not world.a.step()
    assert not world.a.holds()


def test_a_renewal_that_nobody_saw_yet_is_not_taken_over() -> None:
    """b's picture is old when its time is over: the claim meets the renewal and fails."""
    world = World()
    world.a.step()
    world.b.step()
    world.clocks["b"].s += 15  # b's clock ran ahead, or a renewed only at the last moment
    world.epochs.meanwhile = world.a.step
    assert not world.b.step()
    assert world.a.holds()


def test_given_back_it_is_taken_at_once() -> None:
    world = World()
    world.a.step()
    assert not world.b.step()
    world.a.release()
    assert not world.a.holds()
    assert world.b.step()


def test_a_claim_whose_answer_was_lost_is_ones_own() -> None:
    world = World()
    world.a.step()
    world.later(2)
    world.epochs.lose_answer = True
    with pytest.raises(StoreError):
        world.a.step()
    world.later(2)
    assert world.a.step()
    assert world.a.token == 3


def test_a_store_that_is_away_ends_it_and_the_same_one_has_it_back_at_once() -> None:
    world = World()
    world.a.step()
    world.b.step()
    world.epochs.away = True
    world.later(TTL_S)
    assert not world.a.holds()
    with pytest.raises(StoreError):
        world.a.step()
    world.epochs.away = False
    assert world.a.step()
    assert not world.b.step()


def test_a_wall_clock_that_jumps_ends_ones_own_time_and_nobody_elses() -> None:
    world = World()
    world.a.step()
    world.b.step()
    world.clocks["b"].jumped_s = 3600
    assert not world.b.step()
    world.clocks["a"].jumped_s = 3600
    assert not world.a.holds()  # it may have slept
    assert not world.b.step()
    world.clocks["a"].jumped_s = 0


def test_an_old_picture_claims_an_epoch_that_is_long_forgotten_and_has_nothing() -> None:
    world = World()
    world.a.step()
    for _ in range(3 * KEPT):
        world.later(world.a.every_s)
        world.a.step()
    assert min(world.epochs.held) > 1
    world.epochs.held[1] = "b"  # as a claim that was on its way all the time
    assert world.epochs.newest()[1] == "a"
    assert not world.b.step()


def test_epochs_are_tables_of_one_server(server_front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    """CREATE TABLE decides: of two that claim one epoch, through connections of their own, one has it."""
    monkeypatch.setattr(server_module, "QUICK_S", 120)
    stores = [Store.open(server_front.url("leases")) for _ in range(2)]
    try:
        a, b = (TableEpochs(store.clients.apart()) for store in stores)
        assert a.newest() == (0, NOBODY)
        assert sorted([a.claim(1, "a"), b.claim(1, "b")]) == [False, True]
        assert b.claim(2, "b:1-x_")
        assert a.newest() == b.newest() == (2, "b:1-x_")
        a.forget(2)
        assert b.claim(1, "late")  # and has nothing of it
        assert b.newest() == (2, "b:1-x_")
    finally:
        for store in stores:
            store.close()


@pytest.mark.system
def test_epochs_are_keys_in_keeper(tmp_path: Path) -> None:
    """KeeperMap of the real engine, with ZooKeeper as the Keeper."""
    assert shutil.which("java"), "ZooKeeper is missing: apt-get install zookeeper"
    port = free_port()
    (tmp_path / "zoo.cfg").write_text(
        f"tickTime=500\ndataDir={tmp_path}/zk\nclientPort={port}\nclientPortAddress=127.0.0.1\n"
        "admin.enableServer=false\n"
    )
    main = "org.apache.zookeeper.server.quorum.QuorumPeerMain"
    with (tmp_path / "zk.log").open("w") as log:
        keeper = subprocess.Popen(
            ["java", "-cp", "/usr/share/java/zookeeper.jar:/usr/share/java/*", main, str(tmp_path / "zoo.cfg")],
            stdout=log, stderr=log,
        )  # fmt: skip
    try:
        wait_until(lambda: reachable("127.0.0.1", port), "ZooKeeper answers")
        with front(tmp_path, "--keeper", f"127.0.0.1:{port}") as server:
            stores = [Store.open(server.url("leases")) for _ in range(2)]
            a, b = (KeeperEpochs(store.clients.apart(), "leases") for store in stores)
            assert a.newest() == (0, NOBODY)
            assert sorted([a.claim(1, "a"), b.claim(1, "b")]) == [False, True]
            assert b.claim(2, "b")
            assert a.newest() == (2, "b")
            a.forget(2)
            assert a.newest() == (2, "b")
            for store in stores:
                store.close()
    finally:
        keeper.kill()
        keeper.wait()

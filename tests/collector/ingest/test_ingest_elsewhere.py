"""What a page or a writer says of a node whose agent reports to another collector of the same store is not used.

An attack: the holder of a writer's certificate sends values for somebody else's node, or names somebody else's GPU.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import replace
from itertools import count

import pytest

from drover_collector.ingest.agents_elsewhere import AgentsElsewhere
from drover_collector.ingest.limits import Limits
from drover_collector.ingest.ownership import NodeOwnership
from drover_collector.ingest.session import Session
from drover_collector.scrape import frames
from drover_collector.scrape.feed import NodeFeed
from drover_collector.scrape.mapping import PageMapper
from drover_collector.scrape.messages import NodeMessages
from drover_collector.scrape.tables import table
from drover_collector.store import Store
from drover_core.metrics.catalog import Scope
from drover_proto import telemetry_pb2 as pb
from testbed.fleets import batch, block, hello
from testbed.ingest import LIVE, Collector
from testbed.loop import in_loop
from testbed.waiting import until

QUICK = Limits(flush_s=0.01, retry_s=0.01, check_s=0.02, seqs_every_s=0)
PAGE = 'DCGM_FI_DEV_GPU_TEMP{gpu="1",UUID="GPU-a"} 95\nDCGM_FI_DEV_XID_ERRORS{gpu="1",UUID="GPU-a"} 79\n'


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


class Written:
    """What one collector takes of a writer, for one node. `ahead_ms`: that collector's clock is, of the real time."""

    def __init__(self, collector: Collector, node: str, ahead_ms: int = 0) -> None:
        (handler,) = collector.ingest.methods().values()
        self.ahead_ms = ahead_ms
        self.feed, self.messages, self.mapper = NodeFeed(node, handler), NodeMessages(node), PageMapper(table("dcgm"))

    def send(self, page: str = PAGE) -> None:
        """Send a page, at once also after a refusal."""
        self.feed._next_s = 0.0
        now_ms = _now_ms() + self.ahead_ms
        found = self.mapper.read(page, now_ms)
        fresh, data, records = self.messages.add(now_ms, found, [table("dcgm")], 1, 0)
        if fresh:
            self.feed.put(frames.HELLO, self.messages.hello.SerializeToString())
        for record in records:
            self.feed.put(frames.RECORD, record)
        self.feed.put(frames.BATCH, data)


def _agent_of(node: str) -> pb.Hello:
    """Return the Hello of an agent whose first GPU is the one of PAGE."""
    made = hello(node, ts_ms=_now_ms())
    made.entities[1].key = made.entities[1].uuid = "GPU-a"
    return made


def _rows(seq: int, watts: float = 300.0, waited_ms: int = 0) -> pb.Batch:
    """Return a batch of GPU-a; with `waited_ms` also a sample that waited for so long at the agent."""
    ages = [waited_ms, 0] if waited_ms else [0]
    return batch(seq, block([(_now_ms() - age, 1, (watts, 50.0)) for age in ages]))


def _homes(store: Store) -> list[str]:
    """Return the node that has GPU-a."""
    return [row.node for row in store.entities.registry.gpus() if row.key == "GPU-a"]


async def _taken(written: Written, store: Store) -> None:
    """Send pages until the GPU is the writer's."""
    for _ in range(200):
        written.send()
        await asyncio.sleep(0.1)
        if _homes(store) == [written.messages.hello.hello.node]:
            return
    raise AssertionError(f"GPU-a is on {_homes(store)}")


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Store, "shared", True)
    monkeypatch.setattr("drover_collector.ingest.agents_elsewhere.EVERY_S", 0.05)


def _stored(store: Store, node: str, ahead_ms: int = 0) -> set[str]:
    found = store.samples.latest_values(node, _now_ms() + 1000 + max(0, ahead_ms))
    return {metric for (scope, _, _), values in found.items() for metric in values if scope is not Scope.LINK}


@in_loop
async def test_a_writer_cannot_speak_for_a_node_whose_agent_reports_to_another_collector(
    store: Store, shared: None, caplog: pytest.LogCaptureFixture
) -> None:
    async with Collector(store, QUICK, _now_ms()) as home, Collector(store, QUICK, _now_ms()) as other:
        async with home.agent(_agent_of("n1")) as agent:
            await agent.send(batch=_rows(1))
            await agent.until_held(LIVE, 1)
            await until(lambda: "n1" in store.offsets.newest_notes("scrape"))
            written = Written(other, "n1")
            written.send()
            await until(lambda: other.ingest._handshakes.elsewhere.is_known)
            for _ in range(3):
                written.send()
                await until(lambda: written.feed.has_agent and written.feed._call is None)
            assert other.ingest.stats.rows == 0 and not other.events
            assert "exporters_up" not in _stored(store, "n1")
            await agent.send(batch=_rows(2))
            await agent.until_held(LIVE, 2)
        assert sum("reports to another collector" in record.getMessage() for record in caplog.records) == 1
        await written.feed.close()


@in_loop
async def test_a_writer_is_cut_off_when_the_agent_comes_to_another_collector_and_taken_when_that_is_gone(
    store: Store, shared: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Collector(store, QUICK, _now_ms()) as home, Collector(store, QUICK, _now_ms()) as other:
        written = Written(other, "n1")
        written.send()
        await until(lambda: other.ingest._handshakes.elsewhere.is_known)
        written.send()
        await until(lambda: other.ingest.stats.rows > 0)  # nobody else speaks for it
        async with home.agent(_agent_of("n1")) as agent:
            await agent.send(batch=_rows(1))
            await agent.until_held(LIVE, 1)
            await until(lambda: written.feed.has_agent and written.feed._call is None)
            rows = other.ingest.stats.rows
            written.send()
            await until(lambda: written.feed._call is None)
            assert other.ingest.stats.rows == rows
        monkeypatch.setattr("drover_collector.ingest.agents_elsewhere.FRESH_MS", 500)  # nothing was noted for longer
        await until(lambda: "n1" not in other.ingest._handshakes.elsewhere)
        for _ in range(200):
            written.send()
            await asyncio.sleep(0.1)
            if other.ingest.stats.rows > rows:
                break
        assert other.ingest.stats.rows > rows
        await written.feed.close()


@in_loop
async def test_a_writer_cannot_take_a_gpu_from_a_node_whose_agent_reports_to_another_collector(
    store: Store, shared: None
) -> None:
    async with Collector(store, QUICK, _now_ms()) as home, Collector(store, QUICK, _now_ms()) as other:
        async with home.agent(_agent_of("n1")) as agent:
            await agent.send(batch=_rows(1))
            await agent.until_held(LIVE, 1)
            await until(lambda: "n1" in store.offsets.newest_notes("scrape"))
            written = Written(other, "n2")  # a node without an agent
            written.send()
            await until(lambda: other.ingest._handshakes.elsewhere.is_known)
            written.send()
            await until(lambda: other.ingest.stats.rejected_total > 0)
            (notice,) = other.ingest.stats.notices()
            assert "'GPU-a' belongs to another node: 'n1' reports it now" in notice
            await until(lambda: "exporters_up" in _stored(store, "n2"))  # all else of its page is used
        assert [row.node for row in store.entities.registry.gpus() if row.key == "GPU-a"] == ["n1"]
        await written.feed.close()


@in_loop
async def test_a_board_that_was_moved_to_a_node_without_an_agent_is_taken_there(
    store: Store, shared: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_ms = _now_ms()
    async with Collector(store, QUICK, now_ms) as home, home.agent(_agent_of("n1")) as agent:
        await agent.send(batch=_rows(1))
        await agent.until_held(LIVE, 1)
        await until(lambda: "n1" in store.offsets.newest_notes("scrape"))
        elsewhere = AgentsElsewhere(store, _now_ms)
        assert not elsewhere.is_known
        read: list[object] = []
        elsewhere.tick(read.append)
        await until(lambda: bool(read))
        assert elsewhere.is_known and "n1" in elsewhere
        (id_,) = (row.entity_id for row in store.entities.registry.gpus() if row.key == "GPU-a")
        assert (elsewhere.holder(id_, "n2"), elsewhere.holder(id_, "n1")) == ("n1", "")
        monkeypatch.setattr("drover_collector.ingest.agents_elsewhere.FRESH_MS", 300)
        await asyncio.sleep(0.4)
        await agent.send(batch=batch(2, block([(_now_ms(), 2, (300.0, 50.0))])))  # it reports, and not this GPU
        await agent.until_held(LIVE, 2)
        assert elsewhere.holder(id_, "n2") == ""


@in_loop
@pytest.mark.parametrize("ahead_ms", [120_000, -120_000])
async def test_no_clock_of_a_collector_takes_the_agents_of_another_for_gone(
    store: Store, shared: None, ahead_ms: int
) -> None:
    """Pages would feed the node's series next to its agent, and where that collector is the active one, which then
    sees no row in time, the node would be silent to it.
    """
    async with (
        Collector(store, QUICK, _now_ms()) as home,
        Collector(store, QUICK, _now_ms() + ahead_ms) as other,
        home.agent(_agent_of("n1")) as agent,
    ):
        seqs = count(1)

        async def report() -> None:
            number = next(seqs)
            await agent.send(batch=_rows(number))
            await agent.until_held(LIVE, number)
            other.now_ms = _now_ms() + ahead_ms

        elsewhere = other.ingest._handshakes.elsewhere
        same, moved = Written(other, "n1", ahead_ms), Written(other, "n2", ahead_ms)
        for _ in range(100):
            await report()
            if elsewhere.is_known:
                break
        for _ in range(4):
            await report()
            same.send()
            moved.send()
            await asyncio.sleep(0.1)
        await until(lambda: same.feed.has_agent and same.feed._call is None)
        assert "exporters_up" not in _stored(store, "n1", ahead_ms)
        assert _homes(store) == ["n1"]
        for _ in range(100):
            await report()
            if other.ingest.spoke_ms().get("n1", 0) > other.now_ms - 10_000:
                break
        assert other.ingest.spoke_ms()["n1"] > other.now_ms - 10_000  # so that its rows are late, and it is not silent
        await same.feed.close()
        await moved.feed.close()


@in_loop
async def test_an_agent_gets_its_gpu_from_a_writer_that_named_it_before(store: Store) -> None:
    """As after a restart of the collector: writers are back before agents."""
    async with Collector(store, QUICK, _now_ms()) as collector:
        written = Written(collector, "n2")
        written.send()
        await until(lambda: collector.ingest.stats.rows > 0)
        async with collector.agent(_agent_of("n1")) as agent:
            await agent.send(batch=_rows(1))
            await agent.until_held(LIVE, 1)
            assert agent.rejected == {}
            written.send()
            await until(lambda: collector.ingest.stats.rejected_total > 0)
            (notice,) = collector.ingest.stats.notices()
            assert "the agent of 'n1' reports it now" in notice
            await agent.send(batch=_rows(2, 310.0))
            await agent.until_held(LIVE, 2)
        assert [row.node for row in store.entities.registry.gpus() if row.key == "GPU-a"] == ["n1"]
        await written.feed.close()


@in_loop
async def test_an_agent_that_also_sends_what_waited_gets_its_gpu_from_a_writer(store: Store) -> None:
    """As after a restart of the collector: samples from before the writer named the GPU are in the same insert."""
    async with Collector(store, QUICK, _now_ms()) as collector:
        nodes = collector.ingest._handshakes.nodes
        async with collector.agent(_agent_of("n1")) as agent:
            await agent.send(batch=_rows(1))
            await agent.until_held(LIVE, 1)
        await until(lambda: nodes.owner_of("n1") is None)
        written = Written(collector, "n2")
        await _taken(written, store)
        async with collector.agent(_agent_of("n1")) as agent:
            await agent.send(batch=_rows(2, waited_ms=30_000))
            await agent.until_held(LIVE, 2)
            assert _homes(store) == ["n1"]
        await written.feed.close()


@in_loop
async def test_a_page_gets_the_gpu_of_an_agent_that_has_gone(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the agents of a fleet are taken off, and pages have other names of its nodes."""
    monkeypatch.setattr("drover_collector.ingest.ownership.FREE_S", 0.1)
    async with Collector(store, QUICK, _now_ms()) as collector:
        written = Written(collector, "n2")
        async with collector.agent(_agent_of("n1")) as agent:
            await agent.send(batch=_rows(1))
            await agent.until_held(LIVE, 1)
            written.send()
            await until(lambda: collector.ingest.stats.rejected_total > 0)
            assert _homes(store) == ["n1"]
        await _taken(written, store)
        await written.feed.close()


@in_loop
@pytest.mark.parametrize("waited_ms", [0, 30_000])
async def test_an_agent_gets_its_gpu_from_a_writer_to_another_collector(
    store: Store, shared: None, waited_ms: int
) -> None:
    """The writer named it while the agent was away."""
    async with Collector(store, QUICK, _now_ms()) as home, Collector(store, QUICK, _now_ms()) as other:
        written = Written(other, "n2")
        await _taken(written, store)
        async with home.agent(_agent_of("n1")) as agent:
            await agent.send(batch=_rows(1, waited_ms=waited_ms))
            await agent.until_held(LIVE, 1)
            await until(lambda: "n1" in other.ingest._handshakes.elsewhere)
            await until(lambda: _homes(store) == ["n1"])
            for _ in range(200):
                if other.ingest.stats.rejected_total:
                    break
                written.send()
                await asyncio.sleep(0.1)
            (notice,) = other.ingest.stats.notices()
            assert "'GPU-a' belongs to another node: the agent of 'n1' reports it now" in notice
            assert _homes(store) == ["n1"]
        await written.feed.close()


@in_loop
async def test_a_writer_that_names_many_nodes_leaves_room_for_agents(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits, looks = replace(QUICK, unknown_nodes=4), Counter[str]()
    monkeypatch.setattr("drover_collector.ingest.handshake.FORGET_EVERY_S", 3600.0)
    owners = NodeOwnership.owners

    def counted(nodes: NodeOwnership) -> list[Session]:
        looks["owners"] += 1
        return owners(nodes)

    monkeypatch.setattr(NodeOwnership, "owners", counted)
    async with Collector(store, limits, _now_ms()) as collector:
        stats = collector.ingest.stats
        made = [Written(collector, f"n{number}") for number in range(50, 60)]
        for number, written in enumerate(made):
            written.send(PAGE.replace("GPU-a", f"GPU-{number}"))
        await until(lambda: stats.rejected["unknown node"] == 8)
        async with collector.agent(hello("n77", ts_ms=_now_ms())) as agent:
            assert agent.welcome.collector
        assert (len(stats.unknown_nodes), looks["owners"]) == (3, 1), (
            "which have gone is not looked at with each refusal"
        )
        for written in made:
            await written.feed.close()


def test_reads_of_a_replica_that_lags_are_no_word_of_a_dead_nodes_agent(store: Store) -> None:
    """It would be late for ever, never silent, and its pages would not be used."""
    elsewhere, now_ms = AgentsElsewhere(store, _now_ms), _now_ms()
    for reached in (9, 5, 9, 5, 9):
        elsewhere._note({"n1": (reached, now_ms)})
        elsewhere._is_read = True
        assert elsewhere.spoke_ms() == {}
    elsewhere._note({"n1": (10, now_ms)})
    assert set(elsewhere.spoke_ms()) == {"n1"}


def test_a_spool_of_the_past_that_is_deleted_is_no_word_of_an_agent(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Retention deletes it a month after: a node that is dead since then would be late, and not silent, for a while."""
    monkeypatch.setattr("drover_collector.ingest.agents_elsewhere.FRESH_MS", -1)  # all has gone, unless it grows
    elsewhere = AgentsElsewhere(store, _now_ms)

    def read() -> None:
        elsewhere._note(store.offsets.newest_notes("scrape"))
        elsewhere._is_read = True

    store.offsets.write({("n1", "old"): {0: 7}, ("n1", "new"): {0: 3, 1: 4}, ("n2", "a"): {0: 1}})
    read()
    assert elsewhere.spoke_ms() == {}  # when it grew is not known
    store.clients.command("DELETE FROM lane_seqs WHERE spool = 'old'")
    read()
    assert elsewhere.spoke_ms() == {}
    store.offsets.write({("n1", "new"): {0: 4}})
    read()
    assert set(elsewhere.spoke_ms()) == {"n1"}


@in_loop
async def test_one_collector_alone_asks_the_store_nothing(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(*_: object) -> dict[str, tuple[int, int]]:
        raise AssertionError("the store was asked")

    monkeypatch.setattr(type(store.offsets), "newest_notes", asked)
    async with Collector(store, QUICK, _now_ms()) as collector:
        written = Written(collector, "n2")
        written.send()
        await until(lambda: collector.ingest.stats.rows > 0)
        await asyncio.sleep(10 * QUICK.check_s)
        assert collector.ingest._handshakes.elsewhere.is_known
        await written.feed.close()

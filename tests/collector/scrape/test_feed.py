"""Values of pages enter by the same path as agents' values, and a node's own agent wins."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import socket
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from drover_collector.scrape import frames, process
from drover_collector.scrape.feed import NodeFeed, ScrapeFeed
from drover_collector.scrape.fetch import FetchError, fetch
from drover_collector.scrape.mapping import PageMapper
from drover_collector.scrape.messages import NodeMessages
from drover_collector.scrape.process import Scraper, make_room_for_lookups
from drover_collector.scrape.settings import ScrapeConfig
from drover_collector.scrape.tables import table
from drover_collector.store import Store
from drover_core.metrics.catalog import Scope
from drover_core.model.scraped import BLIND, EXPORTERS
from drover_proto import telemetry_pb2 as pb
from testbed.fleets import T0, batch, hello
from testbed.ingest import GOOD, LIVE, Collector
from testbed.loop import in_loop
from testbed.waiting import until

DCGM = (Path(__file__).parent / "pages/dcgm.txt").read_text("utf-8")


def _feed(collector: Collector, node: str = "n0") -> NodeFeed:
    (handler,) = collector.ingest.methods().values()
    return NodeFeed(node, handler)


def _put(feed: NodeFeed, messages: NodeMessages, page: str, mapper: PageMapper, ts_ms: int) -> int:
    fresh, data, records = messages.add(ts_ms, mapper.read(page, ts_ms), [table("dcgm")], 1, 0)
    dropped = 0
    if fresh:
        dropped += feed.put(frames.HELLO, messages.hello.SerializeToString())
    for record in records:
        dropped += feed.put(frames.RECORD, record)
    return dropped + feed.put(frames.BATCH, data)


@in_loop
async def test_a_page_is_stored_as_an_agents_values_and_says_who_is_blind(store: Store) -> None:
    async with Collector(store) as collector:
        feed, messages, mapper = _feed(collector), NodeMessages("n0"), PageMapper(table("dcgm"))
        assert _put(feed, messages, DCGM, mapper, T0) == 0
        await until(lambda: collector.ingest.stats.rows == 3)  # two GPUs and the node
        assert _put(feed, messages, DCGM.replace("} 31\n", "} 79\n"), mapper, T0 + 1000) == 0
        await until(lambda: collector.ingest.stats.rows == 6 and collector.events)
        newest = store.samples.latest_values("n0", T0 + 2000)
        assert newest[Scope.GPU, 1, None]["power_w"] == (pytest.approx(688.1), T0 + 1000)
        assert newest[Scope.NODE, None, None]["exporters_up"] == (1, T0 + 1000)
        assert "ecc_dram_uncorrected" not in newest[Scope.GPU, 1, None]
        (event,) = collector.events
        assert (event.kind, event.code, event.gpu, event.backlog) == ("xid", "79", 1, False)
        inventory = store.inventories.newest("n0")
        assert inventory[EXPORTERS] == "dcgm-exporter"
        assert "ecc_dram_uncorrected missing" in inventory[BLIND + "memory"]
        assert "kernel log" in inventory[BLIND + "kernel"] and BLIND + "straggler" in inventory
        assert not collector.ingest.stats.rejected_total
        await feed.close()


@in_loop
async def test_an_agent_that_comes_takes_over_and_a_scrape_that_comes_is_turned_away(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    async with Collector(store) as collector:
        feed, messages, mapper = _feed(collector), NodeMessages("n0"), PageMapper(table("dcgm"))
        _put(feed, messages, DCGM, mapper, T0)
        await until(lambda: collector.ingest.stats.rows == 3)
        assert not collector.ingest.has_agent("n0")
        async with collector.agent(hello()) as agent:  # not refused
            await until(lambda: feed.has_agent)
            assert collector.ingest.has_agent("n0")
            await agent.send(batch=batch(1, GOOD))
            await agent.until_held(LIVE, 1)
            rows = collector.ingest.stats.rows
            assert _put(feed, messages, DCGM, mapper, T0 + 1000) == 0  # not used, and no loss
            feed._next_s = time.monotonic()
            feed.has_agent = False
            _put(feed, messages, DCGM, mapper, T0 + 1500)
            await until(lambda: feed.has_agent)
            assert collector.ingest.stats.rows == rows
            await agent.send(batch=batch(2, GOOD))
            await agent.until_held(LIVE, 2)
        await until(lambda: collector.ingest.stream("n0") is None)
        assert collector.ingest.has_agent("n0"), "what it said last is an agent's word"
        feed._next_s = time.monotonic()
        _put(feed, messages, DCGM, mapper, T0 + 1900)
        await until(
            lambda: store.samples.latest_values("n0", T0 + 2000)[Scope.NODE, None, None]["exporters_up"][1] > T0
        )
        assert not collector.ingest.has_agent("n0")
        assert sum("its exporters are scraped too" in record.getMessage() for record in caplog.records) == 1
        assert not collector.ingest.stats.notices()
        await feed.close()


@contextlib.asynccontextmanager
async def _exporter(page: str) -> AsyncIterator[int]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n" + page.encode())
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


@in_loop
async def test_the_process_reads_pages_and_says_which_it_cannot(store: Store) -> None:
    async with (
        Collector(store, now_ms=time.time_ns() // 1_000_000) as collector,
        _exporter(DCGM) as port,
    ):
        (handler,) = collector.ingest.methods().values()
        troubles: dict[str, str] = {}
        # By their names these nodes are read within the first second of the interval.
        config = ScrapeConfig("gpus", "dcgm", (f"n08=127.0.0.1:{port}", "n11=127.0.0.1:1"), interval_s=5.0)
        feed = ScrapeFeed([config], handler, troubles)
        task = asyncio.create_task(feed.run())
        try:
            await until(lambda: collector.ingest.stats.rows == 3)
            assert set(collector.ingest.stats.last_seen) == {"n08"}  # the other is silent, not healthy
            assert collector.ingest.stats.agent_versions["n08"].endswith("(scraped)")
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            await feed.close()
        assert not troubles


def test_what_fails_is_a_sentence_for_the_operator() -> None:
    feed = ScrapeFeed([], None, {})  # type: ignore[arg-type]  # no stream is opened
    state = b'{"targets": 3, "failing": 1, "troubles": [], "named": [["n01", "dcgm-exporter", "it answers 404"]]}'
    feed._take(frames.STATE, "", state)
    assert feed._troubles == {
        "scrape": "1 of 3 pages of exporters cannot be read, so the state of these nodes is unknown, not bad: n01,"
        " dcgm-exporter: it answers 404."
    }
    feed._take(frames.STATE, "", b'{"targets": 3, "failing": 0, "troubles": [], "named": []}')
    assert feed._troubles == {}


def test_sequences_grow_though_the_collectors_clock_is_set_back() -> None:
    messages, mapper = NodeMessages("n0"), PageMapper(table("dcgm"))
    page = 'DCGM_FI_DEV_GPU_TEMP{gpu="0",UUID="GPU-a"} 40\n'
    seqs = []
    for ts_ms in (T0, T0 + 10_000, T0 - 3_600_000, T0 - 3_590_000):
        _, message, _ = messages.add(ts_ms, mapper.read(page, ts_ms), [table("dcgm")], 1, 0)
        seqs.append(pb.AgentMessage.FromString(message).batch.seq)
    assert seqs == sorted(set(seqs))


@in_loop
async def test_names_that_no_server_answers_do_not_hold_up_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    over, real = threading.Event(), socket.getaddrinfo

    def getaddrinfo(host: str, *more: Any, **options: Any) -> Any:
        if host.endswith(".invalid"):
            over.wait(120)
            raise OSError("no answer")
        return real("127.0.0.1", *more, **options)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    async with _exporter('DCGM_FI_DEV_GPU_TEMP{gpu="0",UUID="GPU-a"} 40\n') as port:
        make_room_for_lookups()
        hanging = [asyncio.create_task(fetch(f"n{n}.invalid", 1, "/", None, {}, 3.0)) for n in range(48)]
        try:
            await asyncio.sleep(0)
            assert await fetch("some.host", port, "/metrics", None, {}, 2.0)
        finally:
            over.set()
            assert all(isinstance(one, FetchError) for one in await asyncio.gather(*hanging, return_exceptions=True))


def _scraper(*configs: ScrapeConfig) -> Scraper:
    return Scraper(list(configs))


@in_loop
async def test_pages_of_a_node_are_read_at_the_shortest_interval_of_its_tables_also_when_one_is_added(
    tmp_path: Path,
) -> None:
    path = tmp_path / "hosts.json"
    path.write_text("[]")
    scraper = _scraper(
        ScrapeConfig("gpus", "dcgm", ("n0=127.0.0.1:1",), interval_s=60.0),
        ScrapeConfig("hosts", "node", (), (str(path),), interval_s=10.0),
    )
    scraper._update()
    node = scraper._nodes["n0"]
    assert node.interval_s == 60
    path.write_text('[{"targets": ["127.0.0.1:2"], "labels": {"node": "n0"}}]')
    scraper._update()
    assert scraper._nodes["n0"] is node
    assert node.interval_s == 10
    texts = {field.name: field.metadata["help"] for field in dataclasses.fields(ScrapeConfig)}
    assert "of a node together" in texts["interval_s"]
    assert node.task is not None
    node.task.cancel()


@in_loop
async def test_a_node_that_is_taken_off_the_list_is_said_to_be_so_after_a_minute_and_not_before(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    written: list[tuple[bytes, str, bytes]] = []
    monkeypatch.setattr(process, "_write", lambda *frame: written.append(frame))
    path, now_s = tmp_path / "gpus.json", [1000.0]
    monkeypatch.setattr(process.time, "monotonic", lambda: now_s[0])
    both = '[{"targets": ["n0:1", "n1:1"]}]'
    path.write_text(both)
    scraper = _scraper(ScrapeConfig("gpus", "dcgm", (), (str(path),)))
    scraper._update()
    tasks = [node.task for node in scraper._nodes.values()]
    page = PageMapper(table("dcgm")).read(DCGM, T0)
    scraper._write_round("n1", scraper._nodes["n1"].messages, page, [table("dcgm")], 0)

    def put(text: str) -> None:
        path.write_text(text)
        os.utime(path, ns=(int(now_s[0]) + 1, 1))
        scraper._update()

    put('[{"targets": ["n0:1"]}]')
    now_s[0] += 30
    put(both)  # it was a moment, as of a file that is written again
    put('[{"targets": ["n0:1"]}]')
    now_s[0] += 59
    scraper._update()
    assert {kind for kind, _, _ in written} == {frames.HELLO, frames.BATCH}
    now_s[0] += 2
    scraper._update()
    (kind, name, record), gone = written[-2:]
    assert (kind, name, gone) == (frames.RECORD, "n1", (frames.GONE, "n1", b""))
    event = pb.AgentMessage.FromString(record).record.event
    assert (event.kind, event.code, event.source) == ("lifecycle", "agent_stopped", "scrape")
    scraper._update()
    assert written[-1] is gone  # once
    for task in [*tasks, *(node.task for node in scraper._nodes.values())]:
        assert task is not None
        task.cancel()


@in_loop
async def test_the_stream_of_a_node_that_is_taken_off_the_list_ends_when_its_last_word_is_stored(store: Store) -> None:
    async with Collector(store) as collector:
        (handler,) = collector.ingest.methods().values()
        feed, messages = ScrapeFeed([], handler, {}), NodeMessages("n0")
        _, data, _ = messages.add(T0, PageMapper(table("dcgm")).read(DCGM, T0), [table("dcgm")], 1, 0)
        feed._take(frames.HELLO, "n0", messages.hello.SerializeToString())
        feed._take(frames.BATCH, "n0", data)
        await until(lambda: collector.ingest.stats.rows == 3)
        feed._take(frames.RECORD, "n0", messages.stopped(T0 + 1000))
        feed._take(frames.GONE, "n0", b"")
        await until(lambda: bool(collector.events))
        assert [(event.kind, event.code) for event in collector.events] == [("lifecycle", "agent_stopped")]
        await until(lambda: collector.ingest.stream("n0") is None)
        assert not feed._nodes
        await feed.close()

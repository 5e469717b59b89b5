"""remote_write in: hostile requests are refused before they cost, and what is sent becomes what a page would give."""

from __future__ import annotations

import asyncio
import contextlib
import random
import struct
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import cramjam
import pytest

from drover_collector.config import CollectorConfig, RestConfig, validate
from drover_collector.scrape import remote_write
from drover_collector.scrape.feed import ScrapeFeed
from drover_collector.scrape.mapping import PageMapper
from drover_collector.scrape.received import OLD, STALE, Received
from drover_collector.scrape.remote_write import MAX_PLAIN, MAX_SERIES, Reader, labels_of, unpack
from drover_collector.scrape.settings import WriteInConfig
from drover_collector.scrape.tables import table
from drover_collector.scrape.wire import WriteError
from drover_collector.scrape.write_in import WriteTaker
from drover_collector.store import Store
from drover_core.metrics.prometheus_text import parse
from drover_core.settings import SettingsError
from testbed.fleets import T0
from testbed.ingest import Collector
from testbed.loop import in_loop
from testbed.prometheus_messages import CLASSES
from testbed.waiting import until

PAGES = Path(__file__).parent / "pages"
STALE_NAN = struct.unpack("<d", struct.pack("<Q", 0x7FF0000000000002))[0]
Point = tuple[Mapping[str, str], float, int]


def _points(page: str, exporter: str, ts_ms: int, node: str = "n0", **more: str) -> list[Point]:
    """Return what Prometheus sends of a page that it has scraped."""
    of = table(exporter)
    extra = {"instance": f"{node}:9400", "job": "gpus", **more}
    samples = parse((PAGES / page).read_text("utf-8"), PageMapper(of).wanted)
    return [({"__name__": n, **labels, **extra}, v, ts_ms) for n, found in samples.items() for labels, v in found]


def _plain(points: Iterable[Point]) -> bytes:
    request = CLASSES["WriteRequest"]()
    for labels, value, ts_ms in points:
        series = request.timeseries.add()
        for name in sorted(labels):
            series.labels.add(name=name, value=labels[name])
        series.samples.add(value=value, timestamp=ts_ms)
    return bytes(request.SerializeToString())


def _packed(points: Iterable[Point]) -> bytes:
    return bytes(cramjam.snappy.compress_raw(_plain(points)))


class _Writes(Received):
    """Received, with the requests of remote_write that fill it."""

    def __init__(self, **settings: object) -> None:
        super().__init__()
        self._taker = WriteTaker(WriteInConfig(True, **settings), self)  # type: ignore[arg-type]  # each is of its field's type

    def write(self, body: bytes, now_ms: int, now_s: float) -> tuple[int, str]:
        return self._taker.take(body, now_ms, now_s)


# ---- requests


def test_a_request_is_read_as_protobuf_reads_it() -> None:
    sent = [({"__name__": "a", "x": "é"}, 1.5, T0), ({"__name__": "a", "x": "2"}, -0.0, -5)]
    read = Reader(lambda labels: labels).read(unpack(_packed(sent)))
    assert [(labels, p.value, p.ts_ms, p.ended) for labels, (p,) in read] == [
        (labels, value, ts_ms, False) for labels, value, ts_ms in sent
    ]
    ((_, (point,)),) = Reader(lambda labels: labels).read(_plain([({"__name__": "a"}, STALE_NAN, T0)]))
    assert point.ended


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"\xff\xff\xff\xff\x0f" + b"\x00" * 50, "unpacks to 4294967295 bytes"),
        (bytes(cramjam.snappy.compress_raw(bytes(MAX_PLAIN + 1))), f"unpacks to {MAX_PLAIN + 1} bytes"),
        (b"\x80" * 9, "cut off"),
        (b"hello, this is no snappy", "not snappy"),
        (b"\x05" + b"\x00a", "snappy"),
    ],
)
def test_what_would_unpack_to_too_much_is_refused_unread(body: bytes, why: str) -> None:
    with pytest.raises(WriteError, match=why):
        unpack(body)


def test_many_empty_series_and_long_labels_are_refused() -> None:
    reader: Reader[int] = Reader(lambda _: 1)
    series = _plain([({"__name__": "a"}, 1.0, 1)])
    with pytest.raises(WriteError, match="more than 20000 series"):
        reader.read(series * (MAX_SERIES + 1))
    with pytest.raises(WriteError, match="no __name__"):
        reader.read(b"\x0a\x00")
    with pytest.raises(WriteError, match="bytes of labels"):
        reader.read(_plain([({"__name__": "a", **{f"l{n}": "x" * 400 for n in range(60)}}, 1.0, 1)]))
    with pytest.raises(WriteError, match="comes twice"):
        labels_of(b"\x0a\x06\x0a\x01a\x12\x01b" * 2)


@pytest.mark.parametrize(
    "plain",
    [
        b"\x1a\x00" * 20_001,  # empty metadata
        b"\x0a\x87\x04\x0a\x0d\x0a\x08__name__\x12\x01a" + b"\x1a\x00" * 252,  # empty exemplars of a series
        b"\x0a\xda\x01\x0a\x0d\x0a\x08__name__\x12\x01a\x12\xc8\x01" + b"\x10\x00" * 100,  # one sample
        b"\x0a\x19\x0a\x17\x0a\x08__name__\x12\x01a" + b"\x1a\x00" * 5,  # one label
        (b"\x0a\x8b\x01\x0a\x0d\x0a\x08__name__\x12\x01a" + b"\x12\x00" * 62) * 1_700,  # empty samples
    ],
    ids=["metadata", "exemplars", "sample", "label", "samples"],
)
def test_no_small_request_makes_the_reader_work_for_seconds(plain: bytes) -> None:
    with pytest.raises(WriteError, match="more than"):
        Reader(lambda _: 1).read(plain)


def test_what_is_kept_of_labels_is_limited_by_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_write, "MAX_KNOWN_BYTES", 100_000)
    reader: Reader[int] = Reader(lambda _: None)
    for number in range(100):
        reader.read(_plain([({"__name__": "a", "n": str(number), "l": "x" * 4000}, 1.0, 1)]))
    assert 0 < sum(map(len, reader._known)) <= 105_000


def test_samples_that_wait_are_limited_and_are_to_be_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drover_collector.scrape.received.MAX_WAITING", 5)
    received, body = _Writes(), _packed(_points("dcgm.txt", "dcgm", T0))
    assert received.write(body, T0, 0.0)[0] == 204
    assert received.write(body, T0, 0.0)[0] == 503
    assert len(list(received.rounds(5.0, {}))) == 1
    assert received.write(_packed(_points("dcgm.txt", "dcgm", T0 + 5000)), T0 + 5000, 5.0)[0] == 204


def test_no_bytes_make_the_reader_fail_otherwise() -> None:
    rng, good = random.Random(3), _plain(_points("dcgm.txt", "dcgm", T0)[:20])
    reader: Reader[int] = Reader(lambda _: 1)
    for _ in range(1500):
        data = bytearray(good)
        for _ in range(rng.randrange(1, 6)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        with contextlib.suppress(WriteError):
            reader.read(bytes(data[: rng.randrange(len(data) + 1)]))


# ---- pages


def test_samples_of_one_scrape_in_several_requests_are_the_page_that_a_scrape_would_have_read() -> None:
    received, points = _Writes(), _points("dcgm.txt", "dcgm", T0)
    for part in range(3):
        assert received.write(_packed(points[part::3]), T0 + 1000, 100.0 + part) == (204, "")
    assert not list(received.rounds(102.5, {}))  # more may come
    (made,) = received.rounds(104.0, {})
    text = "\n".join(line for line in (PAGES / "dcgm.txt").read_text("utf-8").splitlines())
    page = PageMapper(table("dcgm")).read(text, T0)
    assert (made.node, made.down, [t.name for t in made.tables]) == ("n0", 0, ["dcgm"])
    assert made.found.gpus == page.gpus
    assert made.found.node == page.node
    assert not list(received.rounds(120.0, {}))
    assert not received.left_out


def test_rates_are_by_the_scrapes_own_times_and_copies_of_prometheus_count_once() -> None:
    received, grows = _Writes(), {"node_disk_read_bytes_total", "node_network_receive_bytes_total"}
    single = _Writes()
    for number, replica in enumerate(("a", "b", "a", "b")):  # two copies that scrape one exporter, in turn
        at_ms = T0 + number * 5000
        points = [
            (labels, value + number * 5e6 * (labels["__name__"] in grows), ts)
            for labels, value, ts in _points("node.txt", "node", at_ms, replica=replica)
        ]
        received.write(_packed(points), at_ms + 4000 * (number % 2), number * 5.0)  # one of them is late
        (made,) = received.rounds(number * 5.0 + 3, {})
        if replica == "a":
            single.write(_packed(points), at_ms, number * 5.0)
            (alone,) = single.rounds(number * 5.0 + 3, {})
    assert made.found.node["disk_read_bytes_per_s"] > 0
    for name in ("disk_read_bytes_per_s", "net_rx_bytes_per_s"):
        assert made.found.node[name] == pytest.approx(alone.found.node[name])


def test_stale_and_old_samples_and_marks_of_an_end_are_no_values() -> None:
    received, points = _Writes(), _points("dcgm.txt", "dcgm", T0)
    received.write(_packed(points), T0, 0.0)
    (made,) = received.rounds(3.0, {})
    received.write(_packed(points), T0 + 5000, 5.0)  # again
    assert received.left_out == {OLD: len(points)}
    received.write(_packed((labels, v, T0 - 3_600_000) for labels, v, _ in points), T0 + 5000, 5.0)  # a backlog
    assert received.left_out[STALE] == len(points)
    ended = [(labels, STALE_NAN, T0 + 10_000) for labels, _, _ in points]
    assert received.write(_packed(ended), T0 + 10_000, 10.0) == (204, "")
    assert not list(received.rounds(30.0, {}))  # its exporter is down: nothing is made up
    assert received.silent(70.0) == [("n0", "dcgm-exporter", 70.0)]
    assert made.found.gpus


def test_the_exporters_of_a_node_make_one_round_and_one_that_is_silent_is_down() -> None:
    received = _Writes()
    gpus, host = _points("dcgm.txt", "dcgm", T0), _points("node.txt", "node", T0 + 4000)
    received.write(_packed(gpus), T0, 0.0)
    received.write(_packed(host), T0 + 4000, 4.0)
    assert not list(received.rounds(5.0, {}))  # the other is not whole yet
    (made,) = received.rounds(7.0, {})
    assert ([t.name for t in made.tables], made.down) == (["dcgm", "node"], 0)
    received.write(_packed((labels, v, T0 + 14_000) for labels, v, _ in host), T0 + 14_000, 14.0)
    assert not list(received.rounds(20.0, {}))  # the GPUs' page may come
    (made,) = received.rounds(30.0, {})
    assert ([t.name for t in made.tables], made.down) == (["node"], 1)  # so no GPU is taken for lost
    received.write(_packed((labels, v, T0 + 90_000) for labels, v, _ in host), T0 + 90_000, 90.0)
    (made,) = received.rounds(93.0, {})  # it has been silent for a minute: nothing waits for it
    assert made.down == 1


def test_a_label_names_the_node_and_what_has_none_or_is_scraped_is_said() -> None:
    points = _points("dcgm.txt", "dcgm", T0, node="10.0.0.7")
    received = _Writes(node_labels=("node", "Hostname", "instance"), short_names=True)
    named = [({**labels, "node": "gpu7.example.org"}, v, ts) for labels, v, ts in points]
    received.write(_packed(named), T0, 0.0)
    assert list(received.nodes) == ["gpu7"]
    assert not list(received.rounds(3.0, {"gpu7": object()}))  # its pages are read: they count
    assert sum(received.left_out.values()) == len(points)
    nameless = _Writes(node_labels=("host",))
    nameless.write(_packed(points), T0, 0.0)
    assert list(nameless.left_out) == ["no label names the node"]
    assert not nameless.nodes


def test_a_pod_with_another_address_takes_the_place_of_the_one_before_and_a_node_without_a_word_is_forgotten() -> None:
    received = _Writes()
    for number, address in enumerate(("10.0.0.1", "10.0.0.2")):
        at_ms = T0 + number * 70_000
        points = [({**labels, "node": "n0", "instance": f"{address}:9400"}, v, ts)
                  for labels, v, ts in _points("dcgm.txt", "dcgm", at_ms)]  # fmt: skip
        received.write(_packed(points), at_ms, number * 70.0)
        (made,) = received.rounds(number * 70.0 + 3, {})
        assert made.down == 0
    assert received.sources == 1
    assert not received.silent(120.0)
    assert received.forget(3600.0) == []
    assert received.forget(3671.0) == ["n0"]
    received.write(_packed((labels, v, T0 + 3_700_000) for labels, v, _ in points), T0 + 3_700_000, 3700.0)
    assert list(received.nodes) == ["n0"]  # and it comes back


def test_it_needs_the_listener_of_rest() -> None:
    with pytest.raises(SettingsError, match=r"rest.remote_write.enabled: it is served at rest.listen"):
        validate(CollectorConfig(rest=RestConfig(remote_write=WriteInConfig(True))), {})


# ---- with the process and ingest


@in_loop
async def test_what_is_sent_is_stored_as_an_agents_values(store: Store) -> None:
    async with Collector(store, now_ms=time.time_ns() // 1_000_000) as collector:
        (handler,) = collector.ingest.methods().values()
        feed = ScrapeFeed([], handler, {}, WriteInConfig(True))
        assert (await asyncio.to_thread(feed.writes.ask, b""))[0] == 503
        task = asyncio.create_task(feed.run())
        try:
            await until(lambda: bool(feed.state.of_process))
            now_ms = time.time_ns() // 1_000_000
            body = _packed(_points("dcgm.txt", "dcgm", now_ms))
            assert await asyncio.to_thread(feed.writes.ask, body) == (204, "")
            assert (await asyncio.to_thread(feed.writes.ask, b"no snappy"))[0] == 400
            await until(lambda: collector.ingest.stats.rows == 3)  # two GPUs and the node
            assert collector.ingest.stats.agent_versions["n0"].endswith("(scraped)")
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            await feed.close()

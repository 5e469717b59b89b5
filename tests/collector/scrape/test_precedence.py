"""Several sources of one node: no counter jumps between them, no value is of another GPU, and nothing counts twice."""

from __future__ import annotations

import time
from collections.abc import Mapping
from itertools import count

import grpc
import pytest

from drover_collector.detectors import memory
from drover_collector.detectors._lib.examples import play, small_fleet
from drover_collector.fleet.buckets import Floats
from drover_collector.scrape import frames, process
from drover_collector.scrape.feed import NodeCall, ScrapeFeed
from drover_collector.scrape.gpu_ids import GpuId
from drover_collector.scrape.mapping import Found, PageMapper
from drover_collector.scrape.messages import NodeMessages
from drover_collector.scrape.precedence import ALIKE, COUNTED, KEPT_S, MAX_PLACES, SAME_XID_S, SETTLES_S, Precedence
from drover_collector.scrape.process import Scraper
from drover_collector.scrape.received import AGAIN, Received, Round
from drover_collector.scrape.settings import ScrapeConfig
from drover_collector.scrape.tables import table
from drover_collector.store import Store
from drover_core.metrics.catalog import Scope
from drover_core.model.events import RecommendedAction
from testbed.fleets import T0
from testbed.ingest import Collector
from testbed.loop import in_loop
from testbed.waiting import until

UUIDS = [f"GPU-0000000{n}-1111-2222-3333-444444444444" for n in range(2)]
XIDS = "DCGM_FI_DEV_XID_ERRORS"
DBE = "DCGM_FI_DEV_ECC_DBE_VOL_DEV"


class Node(Received):
    """What several sources send of the node n0. Times are seconds of both clocks."""

    def put(self, exporter: str, instance: str, at_s: float, values: Mapping[str, float], uuid: str = UUIDS[0]) -> None:
        of = table(exporter)
        for name, value in values.items():
            labels = {"gpu": "0", "UUID": uuid}
            if exporter == "hw":
                labels = {"hw.id": uuid, "hw.type": "gpu", "gpu.index": "0"}
                labels |= {"error.type": "uncorrected"} if name == "hw.errors" else {}
            series = self.series(name, labels, "n0", of, instance, at_s)
            assert series is not None
            now_ms = T0 + round(at_s * 1000)
            assert self.take(series, now_ms, value, now_ms, at_s) == ""

    def dcgm(self, at_s: float, errors: float = 5.0, instance: str = "n0:9400", **more: float) -> None:
        self.put("dcgm", instance, at_s, {"DCGM_FI_DEV_POWER_USAGE": 300.0, DBE: errors, **more})

    def hw(self, at_s: float, errors: float = 0.0, instance: str = "a") -> None:
        self.put("hw", instance, at_s, {"hw.gpu.power": 310.0, "hw.errors": errors})

    def made(self, at_s: float) -> Round | None:
        return next(self.rounds(at_s, {}), None)

    def gpu(self, at_s: float) -> Mapping[str, float]:
        """Return the values of the GPU of the round that is due."""
        made = self.made(at_s)
        assert made is not None
        (values,) = made.found.gpus.values()
        return values


def test_a_counter_is_never_taken_from_one_source_and_then_from_another() -> None:
    """The driver has counted 5 errors; the SDK's program began later, and has counted none."""
    node, given = Node(), []
    for number in range(20):
        at_s = 15.0 * number
        node.hw(at_s)
        if number % 3:  # its page is late now and then, or it starts
            node.dcgm(at_s)
        values = node.gpu(at_s + 16)
        given.append(values.get("ecc_dram_uncorrected"))
        assert "power_w" in values
    assert {value for value in given if value is not None} == {5.0}
    assert node.left_out[COUNTED] > 0  # and that is said

    def played(number: int, gpu: dict[str, Floats], _node: dict[str, Floats]) -> None:
        gpu["ecc_dram_uncorrected"][16] = float("nan") if given[number] is None else given[number]

    state = None
    for window, now_ms in play(small_fleet(), len(given), played):
        found, state = memory.detect(window, state, now_ms)
        assert [f for f in found if f.action is not RecommendedAction.NONE] == []


def test_programs_that_count_since_their_own_start_do_not_take_turns() -> None:
    node, given = Node(), set()
    for number in range(12):
        at_s = 15.0 * number
        node.hw(at_s, 2.0 if number % 2 else 0.0, "ab"[number % 2])
        given.add(node.gpu(at_s + 16).get("ecc_dram_uncorrected"))
    assert given == {None, 0.0}


def test_a_counter_whose_source_has_gone_for_long_is_anothers_and_other_values_are_at_once() -> None:
    node = Node()
    node.dcgm(0.0)
    assert node.gpu(3.0) == {"power_w": 300.0, "ecc_dram_uncorrected": 5.0}
    for at_s in (60.0, 600.0, KEPT_S - 60):
        node.hw(at_s)
        assert node.gpu(at_s + 16) == {"power_w": 310.0}
    node.hw(KEPT_S + 60)
    assert node.gpu(KEPT_S + 76) == {"power_w": 310.0, "ecc_dram_uncorrected": 0.0}


def test_who_comes_first_after_a_start_does_not_decide_who_counts() -> None:
    node = Node()
    node.hw(0.0)
    assert node.gpu(3.0) == {"power_w": 310.0}  # a page of the node may come
    node.dcgm(15.0)
    assert node.gpu(31.0)["ecc_dram_uncorrected"] == 5
    alone = Node()
    alone.hw(0.0)
    alone.gpu(3.0)
    alone.hw(SETTLES_S + 1)
    assert alone.gpu(SETTLES_S + 4)["ecc_dram_uncorrected"] == 0
    assert not alone.left_out


def test_what_is_counted_since_a_senders_start_does_not_follow_an_agent() -> None:
    """An agent is upgraded, and the node's SDK is used meanwhile: when it is back, its 5 errors would be new ones."""
    node = Node()
    for at_s in (0.0, 100.0):
        node.hw(at_s)
        node.gpu(at_s + 16)
    assert "ecc_dram_uncorrected" in node.gpu(_sent(node, 200.0))
    node.precedences["n0"].note_agent(210.0)  # ingest uses its agent
    assert node.gpu(_sent(node, 300.0)) == {"power_w": 310.0}
    node.dcgm(400.0)  # the driver's own counters are the agent's too
    assert node.gpu(416.0)["ecc_dram_uncorrected"] == 5
    alone = Node()
    alone.hw(0.0)
    alone.gpu(3.0)
    alone.precedences["n0"].note_agent(10.0)
    assert alone.gpu(_sent(alone, 20.0 + KEPT_S)) == {"power_w": 310.0, "ecc_dram_uncorrected": 0.0}  # it was taken off


def _sent(node: Node, at_s: float) -> float:
    node.hw(at_s)
    return at_s + 16


@in_loop
async def test_the_process_learns_of_an_agent_now_and_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def turned_away(_: object, call: NodeCall) -> None:
        await call.abort(grpc.StatusCode.ALREADY_EXISTS, "node 'n0' has an agent")

    scraper, sent = Scraper([], Received()), []
    feed = ScrapeFeed([], turned_away, {})  # type: ignore[arg-type]  # as ingest answers
    monkeypatch.setattr(feed.writes, "note_agent", sent.append)
    messages = NodeMessages("n0")
    page = PageMapper(table("dcgm")).read(_page(0, power_w=300.0), T0)
    _, batch, _ = messages.add(T0, page, [table("dcgm")], 1, 0)
    feed._take(frames.HELLO, "n0", messages.hello.SerializeToString())
    await until(lambda: feed._nodes["n0"].has_agent)
    for _ in range(3):
        feed._take(frames.BATCH, "n0", batch)
    assert sent == ["n0"]  # now and then, not with each page
    scraper.note_agent("n0")
    found = PageMapper(table("dcgm")).read(_page(0, power_w=300.0), T0)
    (values,) = found.gpus.values()
    values["ecc_dram_uncorrected"] = 0.0
    assert scraper._precedences["n0"].keep("sdk", table("hw"), found, time.monotonic() + 100) == 0
    assert values == {"power_w": 300.0}
    await feed.close()


def test_a_pod_with_another_address_goes_on_at_once() -> None:
    """dcgm-exporter gives what the driver counts, whichever pod it is."""
    node = Node()
    node.dcgm(0.0, 5.0)
    node.gpu(3.0)
    node.dcgm(15.0, 6.0, "10.0.0.2:9400")
    assert node.gpu(31.0) == {"power_w": 300.0, "ecc_dram_uncorrected": 6.0}


def test_a_program_that_starts_again_under_another_name_counts_again() -> None:
    """OpenTelemetry's SDKs make up an instance at each start."""
    node, given = Node(), {}
    for number in range(12):
        at_s = 30.0 * number
        node.hw(at_s, 3.0 if number < 5 else 0.0, "a" if number < 5 else "b")
        given[number] = node.gpu(at_s + 16).get("ecc_dram_uncorrected")
    assert set(given.values()) == {None, 3.0, 0.0}
    assert given[4] == 3 and given[5] is None and given[11] == 0


def test_an_xid_that_two_exporters_of_a_node_report_is_one() -> None:
    node, found = Node(), []
    for number, code in enumerate((0.0, 79.0, 79.0, 48.0)):
        at_s = 15.0 * number
        node.dcgm(at_s, instance="n0:9400", **{XIDS: code})
        node.dcgm(at_s + 4, instance="10.0.0.2:9400", **{XIDS: code})  # also sent by OTLP, or by a second DaemonSet
        made = node.made(at_s + 7)
        assert made is not None
        found += made.found.xids
    assert found == [(0, 79), (0, 48)]


def test_a_gpu_keeps_its_name_whichever_source_comes() -> None:
    """By another name it would be another board, with another past."""
    node, keys = Node(), set()
    for number in range(6):
        at_s = 15.0 * number
        if number % 2:
            node.hw(at_s)
        else:
            of = table("dcgm")
            labels = {"gpu": "0", "UUID": UUIDS[0], "DCGM_FI_DEV_SERIAL": "1652923001234"}
            series = node.series("DCGM_FI_DEV_POWER_USAGE", labels, "n0", of, "n0:9400", at_s)
            assert series is not None
            node.take(series, T0 + round(at_s * 1000), 300.0, T0 + round(at_s * 1000), at_s)
        made = node.made(at_s + 16)
        assert made is not None
        keys |= {gpu.key for gpu in made.found.gpus}
    assert keys == {"1652923001234"}


def test_two_nodes_with_one_name_are_not_mixed_though_their_pages_never_come_together() -> None:
    node, seen = Node(), set()
    for number in range(8):
        at_s = 15.0 * number
        node.put("dcgm", f"10.0.0.{number % 2}:9400", at_s, {DBE: 7.0 * (number % 2)}, UUIDS[number % 2])
        made = node.made(at_s + 15.5)
        seen |= {gpu.uuid for gpu in made.found.gpus} if made is not None else set()
    assert seen == {UUIDS[0]}
    assert node.left_out[ALIKE] == 4


def test_a_source_that_goes_on_for_another_is_not_mixed_with_one_of_another_node_either() -> None:
    node = Node()
    node.dcgm(0.0, instance="n0:9400")
    node.gpu(3.0)
    for number in range(1, 9):
        at_s = 20.0 * number
        node.dcgm(at_s, instance="10.0.0.2:9400")
        node.gpu(at_s + 16)
    node.put("dcgm", "10.0.0.3:9400", 180.0, {DBE: 7.0}, UUIDS[1])
    assert node.made(196.0) is None
    assert node.left_out[ALIKE] == 1


@pytest.mark.parametrize("parts", [1, 2])
def test_a_page_that_is_sent_again_before_it_is_whole_is_no_page_with_series_twice(parts: int) -> None:
    node = Node()
    node.dcgm(0.0)
    for _ in range(parts):
        node.dcgm(0.0)
    assert node.gpu(3.0) == {"power_w": 300.0, "ecc_dram_uncorrected": 5.0}
    assert dict(node.left_out) == {AGAIN: 2 * parts}
    node.dcgm(15.0, 5.0)
    node.dcgm(15.0, 6.0)  # another value of the same time: who sends that does have it twice
    assert node.gpu(18.0)["ecc_dram_uncorrected"] == 5
    assert node.left_out == {AGAIN: 2 * parts + 1, "series that stand there twice": 1}


# ---- which values are one source's


def _kept(precedence: Precedence, exporter: str, at_s: float, *gpus: Mapping[str, float]) -> list[Mapping[str, float]]:
    """Return what is used of the values that an exporter gives of the GPUs in slots 0, 1, ..."""
    found = Found(gpus={GpuId(n, UUIDS[n], UUIDS[n]): dict(values) for n, values in enumerate(gpus)})
    precedence.keep(exporter, table(exporter), found, at_s)
    return list(found.gpus.values())


def test_a_counter_that_one_gpu_has_of_a_source_may_be_anothers_of_another_gpu() -> None:
    """An SDK of OpenTelemetry gives a counter when it first grows: here one GPU has had errors, and the other none."""
    precedence = Precedence()
    sdk = {"ecc_dram_uncorrected": 1.0, "pcie_replays": 2.0}, {"pcie_replays": 3.0}
    _kept(precedence, "hw", 0.0, *sdk)
    assert _kept(precedence, "hw", SETTLES_S + 1, *sdk) == [*sdk]
    dcgm = {"ecc_dram_uncorrected": 7.0, "pcie_replays": 8.0}
    assert _kept(precedence, "dcgm", SETTLES_S + 2, dcgm, dcgm) == [{}, {"ecc_dram_uncorrected": 7.0}]


def test_a_counter_that_ends_of_one_gpu_is_anothers_after_the_hour_while_the_source_goes_on_for_other_gpus() -> None:
    precedence, values = Precedence(), {"ecc_dram_uncorrected": 5.0}
    for at_s in (0.0, SETTLES_S + 1):
        _kept(precedence, "hw", at_s, values, values)
    last_s = SETTLES_S + 1
    for number in range(1, 10):
        _kept(precedence, "hw", last_s + number * KEPT_S / 8, values)  # no longer of the GPU in slot 1
    assert _kept(precedence, "dcgm", last_s + KEPT_S - 1, values, values) == [{}, {}]
    assert _kept(precedence, "dcgm", last_s + KEPT_S + 1, values, values) == [{}, values]


def test_who_sends_ever_new_ports_and_codes_of_xids_does_not_fill_the_memory() -> None:
    precedence, of = Precedence(), table("dcgm")
    for number in range(200):
        links = {f"mlx{number}_{n}": {"symbol_errors": 1.0} for n in range(100)}
        found = Found(links=links, xids=[(n, number) for n in range(100)])
        precedence.keep("dcgm", of, found, float(number))
        assert len(found.xids) == 100
    (given,) = precedence._given.values()
    assert len(given.counters) == MAX_PLACES
    assert len(precedence._xids) == SAME_XID_S * 100
    found = Found(links={"mlx_new": {"symbol_errors": 1.0}})
    precedence.keep("dcgm", of, found, 200.0 + KEPT_S)  # what was long ago makes room
    assert list(given.counters) == ["mlx_new"]


# ---- a page that is read, and a writer


def _page(*slots: int, power_w: float) -> str:
    lines = [f'DCGM_FI_DEV_POWER_USAGE{{gpu="{slot}",UUID="{UUIDS[slot]}"}} {power_w + slot}' for slot in slots]
    return "\n".join(lines) + "\n"


@in_loop
async def test_a_node_that_is_read_and_then_sent_and_read_again_has_each_value_at_its_own_gpu(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A list of targets that breaks and comes back, while Prometheus sends the node's pages as well."""
    received = Received()
    scraper = Scraper([ScrapeConfig("gpus", "dcgm", ("n0=127.0.0.1:1",))], received)
    scraper._update()
    state = scraper._nodes["n0"]
    assert state.task is not None
    state.task.cancel()
    mapper, steps = PageMapper(table("dcgm")), count(1)

    def read() -> None:
        page = mapper.read(_page(0, 1, power_w=300.0), T0)
        scraper._write_round("n0", state.messages, page, [table("dcgm")], 0)

    def sent() -> None:
        at_s = 10.0 * next(steps)
        for slot in (1, 0):  # a writer's series are in another order
            labels = {"gpu": str(slot), "UUID": UUIDS[slot]}
            series = received.series("DCGM_FI_DEV_POWER_USAGE", labels, "n0", table("dcgm"), "n0:9400", at_s)
            assert series is not None
            received.take(series, T0 + round(at_s * 1000), 300.0 + slot, T0 + round(at_s * 1000), at_s)
        for made in received.rounds(at_s + 3, {}):
            scraper._write_round(made.node, made.messages, made.found, made.tables, made.down)

    async with Collector(store, now_ms=time.time_ns() // 1_000_000) as collector:
        (handler,) = collector.ingest.methods().values()
        feed = ScrapeFeed([], handler, {})
        monkeypatch.setattr(process, "_write", feed._take)
        for number, step in enumerate((read, sent, read, sent, sent), 1):
            step()
            await until(lambda rows=3 * number: collector.ingest.stats.rows == rows)
            values = store.samples.latest_values("n0", time.time_ns() // 1_000_000 + 1000)
            assert [values[Scope.GPU, slot, None]["power_w"][0] for slot in (0, 1)] == [300, 301]
        await feed.close()

"""The Fleet service over real gRPC, with a real store and engine behind it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gzip
import json
import math
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import grpc
import numpy as np
import pytest

from drover_collector.api import fleet as api_fleet
from drover_collector.api import service as api
from drover_collector.api.fleet import scale
from drover_collector.store import Store
from drover_core.metrics.catalog import BY_NAME
from drover_core.model.events import (
    Absence,
    Event,
    Incident,
    from_json,
)
from drover_core.times import iso
from drover_proto import fleet_pb2 as pb
from drover_proto.fleet_pb2_grpc import FleetStub
from testbed.collected import gpu_key, write_ticks
from testbed.fleet_served import END, NOW, T0, XID, Against, Check, Served, served


@pytest.fixture(scope="module")
def against(store_root: Path) -> Iterator[Callable[[Check], None]]:
    """Runs checks against one served fleet; they leave it unchanged."""
    store = Store.open(f"chdb://{store_root}?database=api")
    with asyncio.Runner() as runner:
        stack = contextlib.AsyncExitStack()
        fleet = runner.run(stack.enter_async_context(served(store)))
        yield lambda check: runner.run(check(fleet))
        runner.run(stack.aclose())
    store.close()


def test_status(against: Against) -> None:
    async def check(fleet: Served) -> None:
        fleet.store.last_query.at_s = -math.inf
        status = await fleet.stub.GetStatus(pb.StatusRequest())
        assert fleet.store.last_query.at_s > 0  # what comes in is stored sooner while a page is open
        assert (status.fleet, status.mode, status.policy) == ("small", "observe", "nvidia")
        assert (status.nodes_expected, status.nodes_reporting, status.gpus_expected) == (4, 3, 8)
        assert dict(status.gpus_by_health) == {"healthy": 5, "confirmed": 1, "unknown": 2}
        assert dict(status.open_incidents_by_severity) == {"critical": 1, "warning": 1}
        assert status.newest_tick_ms == END
        assert status.newest_sample_ms == END - 1000
        assert status.samples_stored > 6 * 60 * 8
        assert status.store_bytes > 0

    against(check)


def test_layout_is_by_rack_and_the_picture_follows_it(against: Against) -> None:
    async def check(fleet: Served) -> None:
        layout = await fleet.stub.GetLayout(pb.LayoutRequest())
        assert [(r.name, [n.name for n in r.nodes]) for r in layout.racks] == [
            ("r0", ["n0", "n2"]),
            ("r1", ["n1", "n3"]),
        ]
        picture = await fleet.stub.GetPicture(pb.PictureRequest())
        assert picture.layout_version == layout.version
        assert [picture.legend[cell] for cell in picture.cells] == [
            "healthy", "healthy", "healthy", "healthy", "healthy", "confirmed", "unknown", "unknown",
        ]  # fmt: skip

    against(check)


def test_a_metric_picture_shows_unknown_as_zero(against: Against) -> None:
    async def check(fleet: Served) -> None:
        picture = await fleet.stub.GetPicture(pb.PictureRequest(color_by="gpu_temp_c"))
        assert list(picture.cells) == [1, 1, 255, 1, 1, 1, 0, 0]
        assert (picture.low, picture.high, picture.unit) == (62, 64, "degC")
        values = np.frombuffer(picture.values, "<f4")
        assert values[2] == 64
        assert np.isnan(values[6:]).all()

    against(check)


def test_a_packed_picture_has_the_cells_by_health_those_of_the_metric_and_its_values(
    against: Against, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check(fleet: Served) -> None:
        health = await fleet.stub.GetPicture(pb.PictureRequest())
        colored = await fleet.stub.GetPicture(pb.PictureRequest(color_by="gpu_temp_c"))
        packed = await fleet.stub.GetPicture(pb.PictureRequest(color_by="gpu_temp_c", packed=True))
        assert gzip.decompress(packed.frame) == health.cells + colored.cells + colored.values
        assert (packed.gpus, packed.known, packed.exact, packed.low, packed.high) == (8, 6, True, 62, 64)
        assert list(packed.legend) == list(health.legend)
        assert packed.layout_version == health.layout_version
        assert not packed.cells
        assert not packed.values
        alone = await fleet.stub.GetPicture(pb.PictureRequest(packed=True))
        assert gzip.decompress(alone.frame) == health.cells
        monkeypatch.setattr(api_fleet, "EXACT_VALUES", 7)
        large = await fleet.stub.GetPicture(pb.PictureRequest(color_by="power_w", packed=True))
        assert not large.exact
        assert len(gzip.decompress(large.frame)) == 16

    against(check)


def test_the_parts_of_a_packed_picture_are_padded_to_four_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    health = pb.Picture(cells=b"\1\2\3", ts_ms=5, legend=["a"])
    colored = pb.Picture(cells=b"\4\0\6", ts_ms=3, values=bytes(12))
    facts = SimpleNamespace(once=lambda key, seconds, make: make())
    monkeypatch.setattr(api_fleet, "_health_picture", lambda _: health)
    monkeypatch.setattr(api_fleet, "_metric_picture", lambda _, metric: colored)
    packed = api_fleet.get_picture(facts, "power_w", packed=True)
    assert gzip.decompress(packed.frame) == b"\1\2\3\0" + b"\4\0\6\0" + bytes(12)
    assert (packed.known, packed.ts_ms) == (2, 3)


def test_scaling() -> None:
    share = BY_NAME["gpu_util_ratio"]
    assert scale(np.array([0.0, 0.5, 1.0, np.nan]), share)[0].tolist() == [1, 128, 255, 0]
    power = BY_NAME["power_w"]
    assert scale(np.array([300.0, 300.0]), power)[0].tolist() == [128, 128]
    assert scale(np.array([np.nan, np.nan]), power)[0].tolist() == [0, 0]


def test_nodes_come_worst_first(against: Against) -> None:
    async def check(fleet: Served) -> None:
        found = await fleet.stub.ListNodes(pb.ListNodesRequest())
        assert [n.name for n in found.nodes] == ["n1", "n3", "n0", "n2"]
        assert (found.total, found.nodes[0].health, found.nodes[1].health) == (4, "confirmed", "unknown")
        assert list(found.nodes[0].gpu_health) == ["healthy", "confirmed"]
        assert list(found.nodes[0].incidents) == [fleet.incident.id]
        assert found.nodes[0].reason
        assert found.nodes[1].last_seen_ms == 0
        assert list(found.nodes[2].jobs) == ["train"]
        by_name = await fleet.stub.ListNodes(pb.ListNodesRequest(order="name", limit=2))
        assert ([n.name for n in by_name.nodes], by_name.total) == (["n0", "n1"], 4)
        healthy = await fleet.stub.ListNodes(pb.ListNodesRequest(health="healthy", contains="2"))
        assert [n.name for n in healthy.nodes] == ["n2"]

    against(check)


def test_one_node_in_full(against: Against) -> None:
    async def check(fleet: Served) -> None:
        node = await fleet.stub.GetNode(pb.NodeRequest(node="n0"))
        assert dict(node.inventory) == {"driver": "570.1", "kernel": "6.1"}
        assert [(g.gpu, g.serial, g.job) for g in node.gpus] == [
            (0, gpu_key("n0", 0), "train"), (1, gpu_key("n0", 1), "train"),
        ]  # fmt: skip
        values = {v.metric: v for v in node.gpus[1].values}
        temp = values["gpu_temp_c"]
        assert (temp.present, temp.value, temp.ts_ms) == (True, 62, END - 1000)
        assert (temp.peers_median, temp.peers) == (63, 2)  # the job's others: 62 and 64
        assert not values["memory_temp_c"].present
        assert values["memory_temp_c"].reason == "unsupported"
        assert values["fabric_state"].reason == "not reported"
        own = {v.metric: v for v in node.values}
        assert (own["load1"].value, own["load1"].peers) == (8, 2)

    against(check)


def test_a_gpu_without_a_job_is_compared_with_its_sku(against: Against) -> None:
    async def check(fleet: Served) -> None:
        node = await fleet.stub.GetNode(pb.NodeRequest(node="n1"))
        temp = next(v for v in node.gpus[0].values if v.metric == "gpu_temp_c")
        assert (temp.peers_median, temp.peers) == (62, 5)
        assert list(node.incident_ids) == [fleet.incident.id]
        assert [from_json(Event, text).code for text in node.events_json] == ["79"]

    against(check)


def test_a_silent_node_says_so_for_every_value(against: Against) -> None:
    async def check(fleet: Served) -> None:
        node = await fleet.stub.GetNode(pb.NodeRequest(node="n3"))
        values = [v for g in node.gpus for v in g.values] + list(node.values)
        assert values
        assert {(v.present, v.reason) for v in values} == {(False, "never reported")}

    against(check)


def test_incidents(against: Against) -> None:
    async def check(fleet: Served) -> None:
        found = await fleet.stub.ListIncidents(pb.ListIncidentsRequest())
        causes = [from_json(Incident, text).cause for text in found.incidents_json]
        assert causes == ["xid_79", "never_came"]  # the worst first
        assert (await fleet.stub.ListIncidents(pb.ListIncidentsRequest(node="n0"))).total == 0
        assert (await fleet.stub.ListIncidents(pb.ListIncidentsRequest(state="closed"))).total == 0
        assert (
            await fleet.stub.ListIncidents(pb.ListIncidentsRequest(state="all", min_severity="critical"))
        ).total == 1

    against(check)


def test_one_incident_by_the_beginning_of_its_id(against: Against) -> None:
    async def check(fleet: Served) -> None:
        detail = await fleet.stub.GetIncident(pb.IncidentRequest(id=fleet.incident.id[:6]))
        assert from_json(Incident, detail.incident_json) == fleet.incident
        assert [json.loads(text)["outcome"] for text in detail.decisions_json]
        assert [from_json(Event, text).id for text in detail.events_json] == [XID.id]
        assert list(detail.notifications) == ["ops: incident.opened waits for its first try"]
        assert detail.health == "confirmed"
        assert any("n1 GPU 1: confirmed" in line for line in detail.health_history)

    against(check)


def test_series_with_gaps_and_peers(against: Against) -> None:
    async def check(fleet: Served) -> None:
        reply = await fleet.stub.QuerySeries(
            pb.SeriesRequest(
                scope="gpu",
                targets=[pb.SeriesTarget(node="n2", gpu=0), pb.SeriesTarget(node="n3", gpu=0)],
                metrics=["gpu_temp_c"],
                from_ms=T0,
                to_ms=END,
                with_peers=True,
            )
        )
        points = len(np.frombuffer(reply.ts_ms, "<i8"))
        assert points > 5
        found = {(s.node, s.role): np.frombuffer(s.values, "<f4") for s in reply.series}
        assert set(found) == {
            ("n2", "value"), ("n3", "value"), ("n2", "peers_p10"), ("n2", "peers_median"), ("n2", "peers_p90"),
        }  # fmt: skip
        assert {len(values) for values in found.values()} == {points}
        assert np.nanmax(found["n2", "value"]) == 64
        assert np.isnan(found["n3", "value"]).all()
        assert np.nanmedian(found["n2", "peers_median"]) == 62

    against(check)


def test_an_answer_fits_into_a_message(against: Against) -> None:
    async def check(fleet: Served) -> None:
        wide = pb.SeriesRequest(
            scope="gpu", from_ms=T0, to_ms=T0 + 86_400_000, max_points=10_000,
            targets=[pb.SeriesTarget(node=f"n{n}", gpu=g) for n in range(4) for g in range(2)] * 8,
            metrics=["power_w", "gpu_temp_c", "gpu_util_ratio", "sm_clock_mhz", "memory_temp_c"],
        )  # fmt: skip
        reply = await fleet.stub.QuerySeries(wide)
        assert reply.ByteSize() < 4 << 20
        wide.max_points = 1
        assert len(np.frombuffer((await fleet.stub.QuerySeries(wide)).ts_ms, "<i8")) <= 2

    against(check)


def test_what_became_absent_is_unknown_at_once_and_until_it_comes_back(store: Store) -> None:
    async def scenario() -> None:
        async with served(store) as fleet:
            before = await fleet.stub.GetPicture(pb.PictureRequest(color_by="power_w"))
            cells = np.frombuffer(before.cells, np.uint8)
            assert cells[4] > 0  # n1 GPU 0
            store.absences.write([Absence("n1", 0, "power_w", "lost", END)])
            store.absences.write([Absence("n1", 1, "power_w", "lost", END - 5000)])  # its end was never sent
            fleet.facts._kept.clear()
            after = await fleet.stub.GetPicture(pb.PictureRequest(color_by="power_w"))
            assert np.isnan(np.frombuffer(after.values, "<f4")[4:6]).tolist() == [True, False]
            node = await fleet.stub.GetNode(pb.NodeRequest(node="n1"))
            found = [next(v for v in gpu.values if v.metric == "power_w") for gpu in node.gpus]
            assert [(v.present, v.reason) for v in found] == [(False, "lost"), (True, "")]

    asyncio.run(scenario())


def test_a_sample_of_the_future_does_not_make_a_silent_node_report(store: Store) -> None:
    async def scenario() -> None:
        async with served(store) as fleet:
            write_ticks(store, fleet.facts.index, NOW + 3_600_000, NOW + 3_601_000, silent=["n0", "n1", "n2"])
            status = await fleet.stub.GetStatus(pb.StatusRequest())
            assert (status.nodes_reporting, status.nodes_expected) == (3, 4)

    asyncio.run(scenario())


def test_peers_of_long_ago_are_no_measure(store: Store) -> None:
    async def scenario() -> None:
        async with served(store) as fleet:
            fleet.pipeline.now_ms = lambda: END + 61_000
            node = await fleet.stub.GetNode(pb.NodeRequest(node="n0"))
            assert {v.peers for gpu in node.gpus for v in gpu.values} == {0}
            assert {v.peers for v in node.values} == {0}

    asyncio.run(scenario())


def test_what_is_stuck_or_broken_inside_is_reported(store: Store) -> None:
    async def scenario() -> None:
        async with served(store) as fleet:
            assert not [t for t in (await fleet.stub.GetStatus(pb.StatusRequest())).troubles if "Webhook" not in t]
            stats = fleet.facts.stats
            stats.writing["telemetry"] = time.monotonic() - 100
            stats.defects, stats.defect = 2, "telemetry: KeyError"
            fleet.pipeline.leading, fleet.pipeline.now_ms = True, lambda: END + 100_000
            troubles = (await fleet.stub.GetStatus(pb.StatusRequest())).troubles
            for words in (
                "Writing telemetry to the store has been blocked",
                "failed 2 times",
                f"Nothing has been judged since {iso(END)}",
            ):
                assert any(words in trouble for trouble in troubles), words

    asyncio.run(scenario())


def test_events(against: Against) -> None:
    async def check(fleet: Served) -> None:
        found = await fleet.stub.ListEvents(pb.EventsRequest(from_ms=T0))
        assert [from_json(Event, text).id for text in found.events_json] == [XID.id]
        assert len((await fleet.stub.ListEvents(pb.EventsRequest(node="n1", gpu=0))).events_json) == 0

    against(check)


Bad = tuple[str, Callable[[FleetStub], Awaitable[object]], grpc.StatusCode, str]
BAD: list[Bad] = [
    ("color", lambda s: s.GetPicture(pb.PictureRequest(color_by="load1")), grpc.StatusCode.INVALID_ARGUMENT,
     "give health or a GPU metric"),
    ("health", lambda s: s.ListNodes(pb.ListNodesRequest(health="well")), grpc.StatusCode.INVALID_ARGUMENT,
     "give one of healthy"),
    ("order", lambda s: s.ListNodes(pb.ListNodesRequest(order="age")), grpc.StatusCode.INVALID_ARGUMENT,
     "give trouble or name"),
    ("no node", lambda s: s.GetNode(pb.NodeRequest(node="zz")), grpc.StatusCode.NOT_FOUND, "no node 'zz'"),
    ("empty node", lambda s: s.GetNode(pb.NodeRequest()), grpc.StatusCode.INVALID_ARGUMENT, "node is empty"),
    ("state", lambda s: s.ListIncidents(pb.ListIncidentsRequest(state="new")), grpc.StatusCode.INVALID_ARGUMENT,
     "give open, closed or all"),
    ("severity", lambda s: s.ListIncidents(pb.ListIncidentsRequest(min_severity="x")),
     grpc.StatusCode.INVALID_ARGUMENT, "give one of info, warning, critical"),
    ("no incident", lambda s: s.GetIncident(pb.IncidentRequest(id="zzzz")), grpc.StatusCode.NOT_FOUND,
     "no incident 'zzzz'"),
    ("empty id", lambda s: s.GetIncident(pb.IncidentRequest()), grpc.StatusCode.INVALID_ARGUMENT, "no incident id"),
    ("scope", lambda s: s.QuerySeries(pb.SeriesRequest(scope="rack")), grpc.StatusCode.INVALID_ARGUMENT,
     "give gpu, node, link or workload"),
    ("targets", lambda s: s.QuerySeries(pb.SeriesRequest(scope="gpu", metrics=["power_w"])),
     grpc.StatusCode.INVALID_ARGUMENT, "0 targets: give 1 to"),
    ("metric", lambda s: s.QuerySeries(pb.SeriesRequest(
        scope="gpu", targets=[pb.SeriesTarget(node="n0", gpu=0)], metrics=["load1"])),
     grpc.StatusCode.INVALID_ARGUMENT, "'load1' is no gpu metric"),
    ("slot", lambda s: s.QuerySeries(pb.SeriesRequest(
        scope="gpu", targets=[pb.SeriesTarget(node="n0", gpu=7)], metrics=["power_w"])),
     grpc.StatusCode.INVALID_ARGUMENT, "GPU 7 given; it has GPUs 0 to 1"),
    ("span", lambda s: s.QuerySeries(pb.SeriesRequest(
        scope="gpu", targets=[pb.SeriesTarget(node="n0", gpu=0)], metrics=["power_w"], from_ms=END, to_ms=T0)),
     grpc.StatusCode.INVALID_ARGUMENT, "give a span"),
    ("before all time", lambda s: s.QuerySeries(pb.SeriesRequest(
        scope="gpu", targets=[pb.SeriesTarget(node="n0", gpu=0)], metrics=["power_w"], from_ms=-5, to_ms=10)),
     grpc.StatusCode.INVALID_ARGUMENT, "give a span"),
    ("gpu alone", lambda s: s.ListEvents(pb.EventsRequest(gpu=1)), grpc.StatusCode.INVALID_ARGUMENT,
     "give the node too"),
    ("export span", lambda s: s.Export(pb.ExportRequest(from_ms=END, to_ms=T0)).read(),
     grpc.StatusCode.INVALID_ARGUMENT, "is not before to_ms"),
]  # fmt: skip


def test_bad_arguments_are_refused_with_what_to_do(against: Against) -> None:
    async def check(fleet: Served) -> None:
        for name, call, code, says in BAD:
            got, text = await fleet.refused(call(fleet.stub))
            assert got is code, name
            assert says in text, name
            assert "\n" not in text

    against(check)


def test_an_ambiguous_id_names_the_candidates(against: Against) -> None:
    async def check(fleet: Served) -> None:
        before, first = fleet.pipeline.incidents, fleet.incident
        twin = first.id + "x"
        fleet.pipeline.incidents = {**before, twin: dataclasses.replace(first, id=twin)}
        code, text = await fleet.refused(fleet.stub.GetIncident(pb.IncidentRequest(id=first.id[:5])))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert twin in text
        exact = await fleet.stub.GetIncident(pb.IncidentRequest(id=twin[:-1]))
        assert json.loads(exact.incident_json)["id"] == first.id
        fleet.pipeline.incidents = before

    against(check)


def test_a_closed_store_is_an_answer_too(store: Store) -> None:
    async def scenario() -> None:
        async with served(store) as fleet:
            store.close()
            code, text = await fleet.refused(fleet.stub.ListEvents(pb.EventsRequest(node="n1")))
            assert (code, text) == (grpc.StatusCode.UNAVAILABLE, "the store cannot answer: the store is closed")

    asyncio.run(scenario())


def test_an_act_does_not_wait_for_slow_questions(against: Against, monkeypatch: pytest.MonkeyPatch) -> None:
    async def check(fleet: Served) -> None:
        begun, go = threading.Semaphore(0), threading.Event()

        def slow(*_: object) -> pb.Layout:
            begun.release()
            assert go.wait(120)
            return pb.Layout()

        monkeypatch.setattr(api_fleet, "get_layout", slow)
        questions = [asyncio.ensure_future(fleet.stub.GetLayout(pb.LayoutRequest())) for _ in range(api.READ_THREADS)]
        try:
            for _ in questions:
                assert await asyncio.to_thread(begun.acquire, timeout=120)
            drain = pb.ActRequest(node="n0", act="drain", why="a fan")
            code, text = await fleet.refused(fleet.stub.ActOnNode(drain, timeout=120))
            assert (code, "only observes" in text) == (grpc.StatusCode.FAILED_PRECONDITION, True)
        finally:
            go.set()
            await asyncio.gather(*questions)

    against(check)

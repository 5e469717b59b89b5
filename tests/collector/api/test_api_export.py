"""Export by the Fleet API: what is asked for comes as a case, in pieces; and jobs from holdings."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from drover_collector.api import nodes
from drover_collector.api.export import jobs_of
from drover_collector.api.snapshot import OptionalParts
from drover_collector.pipeline.node_conditions import Reading
from drover_collector.store import Store
from drover_core.model.conditions import NodeCondition, Standing
from drover_core.model.events import Holding
from drover_core.times import iso
from drover_proto import fleet_pb2 as pb
from testbed.collected import BUSY, write_ticks
from testbed.fleet_served import END, NOW, T0, XID, Against, Check, Served, served


@pytest.fixture(scope="module")
def against(store_root: Path) -> Iterator[Callable[[Check], None]]:
    """Runs checks against one served fleet; they leave it unchanged."""
    store = Store.open(f"chdb://{store_root}?database=api_export")
    with asyncio.Runner() as runner:
        stack = contextlib.AsyncExitStack()
        fleet = runner.run(stack.enter_async_context(served(store)))
        yield lambda check: runner.run(check(fleet))
        runner.run(stack.aclose())
    store.close()


async def files_of(fleet: Served, request: pb.ExportRequest) -> dict[str, list[bytes]]:
    files: dict[str, list[bytes]] = {}
    done: set[str] = set()
    async for chunk in fleet.stub.Export(request):
        assert chunk.file not in done
        files.setdefault(chunk.file, []).append(chunk.data)
        if chunk.last:
            done.add(chunk.file)
    assert done == set(files)
    return files


def test_an_export_is_a_case(against: Against) -> None:
    async def check(fleet: Served) -> None:
        files = await files_of(fleet, pb.ExportRequest(from_ms=T0, to_ms=NOW))
        assert list(files) == [
            "fleet.json", "gpu.parquet", "node.parquet", "events.jsonl", "absences.jsonl", "probes.jsonl",
            "incidents.jsonl",
        ]  # fmt: skip
        spec = json.loads(b"".join(files["fleet.json"]))
        assert [n["name"] for n in spec["nodes"]] == ["n0", "n1", "n2", "n3"]
        assert spec["jobs"] == [
            {"id": "train", "start": iso(T0), "end": None, "members": [["n0", 0], ["n0", 1], ["n2", 0]]}
        ]
        table = pa.concat_tables(pa.ipc.open_stream(data).read_all() for data in files["gpu.parquet"])
        assert table.num_rows == 6 * 60
        assert table.schema.field("ts").type == pa.timestamp("ms", "UTC")
        assert max(table["gpu_temp_c"].to_pylist()) == 64
        unread = table.filter(pa.compute.and_(pa.compute.equal(table["node"], "n0"), pa.compute.equal(table["gpu"], 1)))
        assert unread["memory_temp_c"].null_count == 60
        assert set(table["power_w"].to_pylist()) == {BUSY["power_w"]}
        (event,) = [json.loads(line) for line in b"".join(files["events.jsonl"]).splitlines()]
        assert (event["ts"], event["node"], event["gpu"], event["kind"], event["code"]) == (
            iso(XID.ts_ms), "n1", 1, "xid", 79,
        )  # fmt: skip
        (absence,) = [json.loads(line) for line in b"".join(files["absences.jsonl"]).splitlines()]
        assert (absence["metric"], absence["reason"], absence["to"]) == ("memory_temp_c", "unsupported", None)
        incidents = [json.loads(line) for line in b"".join(files["incidents.jsonl"]).splitlines()]
        assert [i["cause"] for i in incidents] == ["xid_79", "never_came"]
        assert (incidents[0]["id"], incidents[0]["opened"]) == (fleet.incident.id, iso(XID.ts_ms + 50))

    against(check)


def test_who_asks_for_inventories_gets_what_nodes_reported(store: Store) -> None:
    async def scenario() -> None:
        async with served(store) as fleet:
            held = {"gpu0.processes": '{"total":0,"processes":[]}'}
            store.inventories.write_one("n1", T0 - 1000, {"driver_version": "570"} | held)
            store.inventories.write_one("stranger", T0 - 1000, {"driver_version": "1"})
            files = await files_of(fleet, pb.ExportRequest(from_ms=T0, to_ms=NOW, inventory=True))
            reports = [json.loads(line) for line in b"".join(files["inventory.jsonl"]).splitlines()]
            assert {"ts": iso(T0 - 1000), "node": "n1", "inventory": {"driver_version": "570"}} in reports
            assert "stranger" not in [row["node"] for row in reports]
            for names in (True, False):
                shown = nodes.get_node(fleet.facts, pb.NodeRequest(node="n1"), names).inventory
                assert ("gpu0.processes" in shown) is names, "users and processes are not for readers, nor exported"

    asyncio.run(scenario())


def test_a_node_has_its_conditions_of_kubernetes_where_they_are_read(store: Store) -> None:
    async def scenario() -> None:
        async with served(store) as fleet:
            request = pb.NodeRequest(node="n1")
            assert not nodes.get_node(fleet.facts, request).conditions_read_ms
            bad = NodeCondition("KernelDeadlock", "True", "DockerHung", "stuck", T0, Standing.FAULT)
            fleet.facts.parts = OptionalParts(conditions=lambda: Reading(NOW, {"n1": ((bad,), 7)}))
            shown = nodes.get_node(fleet.facts, request)
            assert (shown.conditions_well, shown.conditions_read_ms) == (7, NOW)
            [found] = shown.conditions
            assert (found.type, found.status, found.reason, found.message, found.since_ms, found.standing) == (
                "KernelDeadlock", "True", "DockerHung", "stuck", T0, "fault",
            )  # fmt: skip

    asyncio.run(scenario())


def test_an_export_up_to_now_ends_with_what_was_judged(store: Store) -> None:
    async def scenario() -> None:
        async with served(store) as fleet:
            write_ticks(store, fleet.facts.index, END, NOW)
            ends = ((0, END, 2), (NOW, END, 2), (END - 15_000, END - 15_000, 1), (NOW + 120_000, NOW, 2))
            for to_ms, newest, incidents in ends:
                files = await files_of(fleet, pb.ExportRequest(from_ms=T0, to_ms=to_ms))
                tables = [pa.ipc.open_stream(data).read_all() for data in files["node.parquet"]]
                last = max(table["ts"].cast(pa.int64()).to_numpy().max() for table in tables)
                assert last == newest - 1000
                opened = [json.loads(line) for line in b"".join(files["incidents.jsonl"]).splitlines()]
                assert len(opened) == incidents  # the second was opened by one of the newest buckets

    asyncio.run(scenario())


def test_an_export_comes_in_pieces_that_fit_a_message(against: Against, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drover_collector.api.export.CHUNK_BYTES", 4096)

    async def check(fleet: Served) -> None:
        files = await files_of(fleet, pb.ExportRequest(from_ms=T0, to_ms=NOW))
        assert len(files["gpu.parquet"]) > 5
        table = pa.concat_tables(pa.ipc.open_stream(data).read_all() for data in files["gpu.parquet"])
        assert table.num_rows == 6 * 60

    against(check)


def test_jobs_are_what_the_holdings_say() -> None:
    held = [
        Holding("a", 0, "one", 100), Holding("a", 1, "one", 130), Holding("b", 0, "one", 160),
        Holding("a", 0, "one", 200),  # sent again
        Holding("a", 0, None, 500), Holding("a", 1, "two", 510), Holding("b", 0, None, 520),
        Holding("a", 0, "one", 900),  # requeued
    ]  # fmt: skip
    assert [(j.id, j.start_ms, j.end_ms, j.members) for j in jobs_of(held)] == [
        ("one", 100, 520, (("a", 0), ("a", 1), ("b", 0))),
        ("two", 510, None, (("a", 1),)),
        ("one", 900, None, (("a", 0),)),
    ]

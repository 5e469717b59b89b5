"""Answers of a past moment over a real store: what stood then, and what is not known of it."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from drover_collector.pipeline.start_line import START
from drover_collector.store import Store
from drover_core.model.events import Audit, Incident, Silence, from_json
from drover_proto import fleet_pb2 as pb
from testbed.fleet_served import END, NOW, T0, XID, Against, Check, Served, served

BEFORE = XID.ts_ms - 1000  # the first bucket is judged, the XID has not come
AFTER = END


@pytest.fixture(scope="module")
def against(store_root: Path) -> Iterator[Callable[[Check], None]]:
    """Runs checks against one served fleet; they leave it unchanged."""
    store = Store.open(f"chdb://{store_root}?database=moment")
    with asyncio.Runner() as runner:
        stack = contextlib.AsyncExitStack()
        fleet = runner.run(stack.enter_async_context(served(store)))
        yield lambda check: runner.run(check(fleet))
        runner.run(stack.aclose())
    store.close()


def frames(reply: pb.Playback) -> list[list[str]]:
    body = gzip.decompress(reply.frames)
    size = reply.gpus + -reply.gpus % 4
    return [[reply.legend[code] for code in body[at * size :][: reply.gpus]] for at in range(len(reply.frames_ms))]


def test_the_picture_plays_what_stood_at_each_moment(against: Against) -> None:
    async def check(fleet: Served) -> None:
        reply = await fleet.stub.GetPlayback(pb.PlaybackRequest(from_ms=T0 - 1000, to_ms=AFTER, frames=3))
        before, _, last = frames(reply)
        assert set(before) == {"unknown"}, "nothing was judged yet"
        assert last == ["healthy"] * 5 + ["confirmed"] + ["unknown"] * 2
        assert dict(reply.gpus_by_health) == {"healthy": 5, "confirmed": 1, "unknown": 2}
        assert (reply.jobs, reply.gpus_held) == (1, 3)
        (now,) = frames(await fleet.stub.GetPlayback(pb.PlaybackRequest(to_ms=BEFORE)))
        assert now == ["healthy"] * 6 + ["unknown"] * 2

    against(check)


def test_a_metric_is_played_on_one_scale(against: Against) -> None:
    async def check(fleet: Served) -> None:
        request = pb.PlaybackRequest(color_by="gpu_temp_c", from_ms=T0 - 20_000, to_ms=AFTER, frames=2)
        reply = await fleet.stub.GetPlayback(request)
        cells = gzip.decompress(reply.frames)[2 * reply.gpus :]
        assert list(cells) == [0] * 8 + [1, 1, 255, 1, 1, 1, 0, 0]
        assert (reply.low, reply.high, reply.known) == (62, 64, True)

    against(check)


def test_what_is_asked_of_a_playback_is_bounded(against: Against) -> None:
    async def check(fleet: Served) -> None:
        for request, said in (
            (pb.PlaybackRequest(from_ms=T0, to_ms=END, frames=61), "at most 60"),
            (pb.PlaybackRequest(to_ms=NOW + 1), "last 400 days"),
            (pb.PlaybackRequest(to_ms=END, color_by="x"), "give health or a GPU metric"),
        ):
            code, text = await fleet.refused(fleet.stub.GetPlayback(request))
            assert code is grpc.StatusCode.INVALID_ARGUMENT
            assert said in text

    against(check)


def test_where_nobody_judged_all_is_unknown(store_root: Path) -> None:
    async def check() -> None:
        store = Store.open(f"chdb://{store_root}?database=moment_gap")
        async with served(store) as fleet:
            store.audit.write(
                [Audit("s", END + 500, "drover", START, "collector", "", "started", str(T0 + 40_000))]
            )  # fmt: skip
            reply = await fleet.stub.GetPlayback(pb.PlaybackRequest(from_ms=BEFORE, to_ms=END, frames=2))
            before, gap = frames(reply)
            assert before.count("healthy") == 6
            assert set(gap) == {"unknown"}
            assert "unknown" in reply.absent[0]
            node = await fleet.stub.GetNode(pb.NodeRequest(node="n1", at_ms=END))
            assert (node.row.health, set(node.row.gpu_health)) == ("unknown", {"unknown"})
        store.close()

    asyncio.run(check())


def test_incidents_are_those_open_then_in_the_version_of_then(against: Against) -> None:
    async def check(fleet: Served) -> None:
        before = await fleet.stub.ListIncidents(pb.ListIncidentsRequest(at_ms=BEFORE))
        after = await fleet.stub.ListIncidents(pb.ListIncidentsRequest(at_ms=AFTER))
        causes = [from_json(Incident, text).cause for text in after.incidents_json]
        assert "xid_79" not in [from_json(Incident, text).cause for text in before.incidents_json]
        assert "xid_79" in causes
        first = await fleet.stub.GetIncident(pb.IncidentRequest(id=fleet.incident.id, at_ms=XID.ts_ms + 500))
        assert from_json(Incident, first.incident_json).version == 1
        assert not first.may_answer
        code, _ = await fleet.refused(fleet.stub.GetIncident(pb.IncidentRequest(id=fleet.incident.id, at_ms=BEFORE)))
        assert code is grpc.StatusCode.NOT_FOUND

    against(check)


def test_a_node_of_then(against: Against) -> None:
    async def check(fleet: Served) -> None:
        before = await fleet.stub.GetNode(pb.NodeRequest(node="n1", at_ms=BEFORE))
        after = await fleet.stub.GetNode(pb.NodeRequest(node="n1", at_ms=AFTER))
        assert (before.row.health, after.row.health) == ("healthy", "confirmed")
        assert "XID 79" in after.gpus[1].reason
        assert not before.events_json
        n0 = await fleet.stub.GetNode(pb.NodeRequest(node="n0", at_ms=BEFORE))
        temp = next(value for value in n0.gpus[0].values if value.metric == "gpu_temp_c")
        assert (temp.present, temp.value, temp.ts_ms <= BEFORE) == (True, 62, True)
        assert (n0.gpus[0].job, n0.inventory["driver"]) == ("train", "570.1")
        n3 = await fleet.stub.GetNode(pb.NodeRequest(node="n3", at_ms=BEFORE))
        assert not any(value.present for gpu in n3.gpus for value in gpu.values)
        assert n3.row.health == "unknown"

    against(check)


def test_jobs_heat_and_ports_of_then(against: Against) -> None:
    async def check(fleet: Served) -> None:
        early = await fleet.stub.ListJobs(pb.ListJobsRequest(at_ms=T0 + 100))
        later = await fleet.stub.ListJobs(pb.ListJobsRequest(at_ms=T0 + 1000))
        assert [(job.job, job.gpus) for job in (*early.jobs, *later.jobs)] == [("train", 2), ("train", 3)]
        job = await fleet.stub.GetJob(pb.JobRequest(job="train", at_ms=AFTER))
        assert {"sm_clock_mhz", "gpu_temp_c"} <= {metric.metric for metric in job.metrics}
        racks = (await fleet.stub.GetThermals(pb.ThermalsRequest(at_ms=AFTER))).racks
        assert [rack.gpu_max_c for rack in racks] == [64, 62]
        assert (await fleet.stub.GetFabric(pb.FabricRequest(at_ms=AFTER))).absent

    against(check)


def test_changes_are_starts_and_windows_of_the_time(against: Against) -> None:
    async def check(fleet: Served) -> None:
        window = Silence("w", T0, T0 + 10_000, T0 + 20_000, "kim", "firmware", rack=("r1",), maintenance=True)
        fleet.store.silences.write([window])
        found = await fleet.stub.ListChanges(pb.ChangesRequest(from_ms=T0, to_ms=END, nodes=["n1"]))
        assert [(one.kind, one.from_ms) for one in found.changes] == [("maintenance", T0 + 10_000)]
        assert "rack r1" in found.changes[0].text
        assert not (await fleet.stub.ListChanges(pb.ChangesRequest(from_ms=T0, to_ms=END, nodes=["n0"]))).changes
        assert not (await fleet.stub.ListChanges(pb.ChangesRequest(from_ms=T0 + 30_000, to_ms=END))).changes

    against(check)


def test_a_day_without_data_is_a_gap_in_the_trend(against: Against) -> None:
    async def check(fleet: Served) -> None:
        trend = await fleet.stub.GetTrend(pb.TrendRequest(days=2))
        assert [day.pending for day in trend.days] == [False, False]
        first = trend.days[0]
        fields = ("util_ratio", "power_w", "gpu_hours_lost", "goodput")
        assert not any(first.HasField(name) for name in fields)

    against(check)

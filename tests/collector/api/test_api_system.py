"""System, capacity and the look before an act, over real gRPC with a real store and engine behind them."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest

from drover_collector.actions.settings import ActConfig
from drover_collector.actions.slurm.actuator import SlurmActuator
from drover_collector.api.capacity import MOST_DAYS, READ_DAYS, share_of
from drover_collector.api.snapshot import DAY_MS
from drover_collector.api.system import SystemWatch, get_system
from drover_collector.config import CostConfig, PoolPrice
from drover_collector.detectors import idle
from drover_collector.engine.node_state import Survey
from drover_collector.ingest.context import IngestContext, IngestListeners
from drover_collector.ingest.limits import Limits
from drover_collector.ingest.service import IngestService
from drover_collector.ingest.stats import IngestStats
from drover_collector.observability import families as metrics_families
from drover_collector.observability.page import Page
from drover_collector.store import EntityRow, SampleBatch, Store, entity_id
from drover_core.metrics.catalog import Scope
from drover_core.model.events import Health, IncidentKind, NodeOutage
from drover_proto import fleet_pb2 as pb
from testbed.desks import dispatcher_of
from testbed.fleet_served import END, NOW, T0, Served, served
from testbed.slurm_stand_in import SlurmStandIn

HOUR_MS = 3_600_000

Check = Callable[[Served], Awaitable[None]]
Against = Callable[[Check], None]


@pytest.fixture(scope="module")
def against(store_root: Path) -> Iterator[Against]:
    """Runs checks against one served fleet; they leave it unchanged."""
    store = Store.open(f"chdb://{store_root}?database=api_system")
    with asyncio.Runner() as runner:
        stack = contextlib.AsyncExitStack()
        fleet = runner.run(stack.enter_async_context(served(store)))
        yield lambda check: runner.run(check(fleet))
        runner.run(stack.aclose())
    store.close()


def test_nodes_of_the_file_and_those_that_only_report(against: Against) -> None:
    async def check(fleet: Served) -> None:
        stats, key = fleet.facts.stats, "S-new"
        stats.unknown_nodes, stats.last_seen["n9"] = frozenset({"n9"}), NOW
        row = EntityRow(entity_id(Scope.GPU, key), Scope.GPU, key, "n9", 0, model="NVIDIA H200", first_ms=T0)
        fleet.store.entities.registry.add([row])
        found = {node.name: node for node in (await fleet.stub.ListReporting(pb.ReportingRequest())).nodes}
        assert list(found) == ["n0", "n1", "n2", "n3", "n9"]
        assert (found["n0"].in_file, found["n0"].gpus, found["n0"].gpus_reported) == (True, 2, 2)
        assert (found["n3"].last_seen_ms, found["n3"].HasField("gpus_reported")) == (0, False)
        new = found["n9"]
        assert (new.in_file, new.gpus_reported, new.model, new.last_seen_ms) == (False, 1, "NVIDIA H200", NOW)
        stats.unknown_nodes = frozenset()
        del stats.last_seen["n9"]

    against(check)


def test_the_system_page_shows_every_part(against: Against) -> None:
    async def check(fleet: Served) -> None:
        stats = fleet.facts.stats
        stats.agent_versions.update({"n0": "0.2.0", "n1": "0.1.0", "n2": "0.2.0"})
        stats.count_refusal("n2", "impossible", "a batch with a time of 1970")
        system = await fleet.stub.GetSystem(pb.SystemRequest())
        assert (system.agents.expected, system.agents.reporting) == (4, 3)
        assert [(v.version, v.nodes) for v in system.agents.versions] == [("0.2.0", 2), ("0.1.0", 1)]
        assert {(t.node, t.kind): t.text for t in system.agents.troubles} == {
            ("n2", "refused"): "a batch with a time of 1970",
            ("n3", "never"): "its agent has never reported",
        }
        assert dict(system.agents.trouble_counts) == {"refused": 1, "never": 1}
        assert system.agents.lag_median_s == (NOW - (END - 1000)) / 1000
        assert dict(system.ingest.rejected) == {"impossible": 1}
        assert system.detection.role == "active"
        assert system.detection.ticks == fleet.pipeline.ticks.done
        assert len(system.detection.detectors) == len(fleet.pipeline.engine.seconds)
        assert system.store.answers
        assert {t.name for t in system.store.tables} >= {"gpu_samples", "incidents"}
        assert system.store.bytes == sum(t.bytes for t in system.store.tables)
        assert system.store.kind == "embedded"
        assert not system.agents.HasField("clock_worst_s"), "nobody reported clocks"
        (hook,) = system.notifiers
        assert (hook.name, hook.kind) == ("ops", "webhook")
        stats.rejected.clear()
        stats.refusals["n2"] = (time.monotonic() - 3600, "long ago")  # as all that is over: no trouble any more

    against(check)


def test_a_store_that_hangs_holds_the_answer_up_for_two_seconds_at_most(
    against: Against, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check(fleet: Served) -> None:
        asked: list[float] = []

        def hangs() -> None:
            asked.append(time.monotonic())
            raise AssertionError("the thread that answers asks the store itself")

        watch = SystemWatch(fleet.facts)
        monkeypatch.setattr(watch.store, "look", lambda: None)
        store = fleet.store
        for part, name in (
            (store.sizes, "partitions"), (store.rollups, "totals"), (store.retention, "drops"),
            (store.incidents, "for_cost"), (store.outages, "histories"),
        ):  # fmt: skip
            monkeypatch.setattr(part, name, lambda *_: hangs())
        system = get_system(watch)
        assert not asked
        assert not system.store.answers
        assert not system.store.tables
        assert not system.store.HasField("free_bytes")
        assert system.agents.expected == 4

    against(check)


def test_silent_and_late_agents_wrong_clocks_and_full_spools(against: Against, monkeypatch: pytest.MonkeyPatch) -> None:
    async def check(fleet: Served) -> None:
        later = NOW + 40_000
        monkeypatch.setattr(fleet.pipeline, "now_ms", lambda: later)
        monkeypatch.setattr(fleet.facts, "_kept", {})
        monkeypatch.setitem(fleet.facts.stats.last_seen, "n0", later - 1000)  # it reported, and nothing of it is stored
        bucket = fleet.pipeline.buckets.newest
        assert bucket is not None
        columns = {
            "clock_offset_s": np.array([0.01, np.nan, -7.5, np.nan]),
            "spool_bytes": np.array([5e6, 10.0, 0, np.nan]),
            "source_nvml_outcome": np.array([2, 0, np.nan, np.nan]),
            "source_jobs_outcome": np.array([1, 0, 0, np.nan]),
            "agent_sources_failing": np.array([1, 0, 3, 0]),  # n2's agent is older and reports less
        }
        newest = dataclasses.replace(bucket, start_ms=later - 10_000, node=columns)
        monkeypatch.setattr(fleet.pipeline.buckets, "newest", newest)
        monkeypatch.setattr(fleet.store.entities, "last_seen", lambda _: np.array([later - 70_000, END, END, 0]))
        agents = (await fleet.stub.GetSystem(pb.SystemRequest())).agents
        assert {(t.node, t.kind) for t in agents.troubles} == {
            ("n0", "lag"), ("n1", "silent"), ("n2", "silent"), ("n3", "never"), ("n2", "clock"), ("n0", "spool"),
            ("n0", "source"), ("n2", "source"),
        }  # fmt: skip
        assert [t.text for t in agents.troubles if t.kind == "source"] == [
            "source nvml overran its limit; source jobs failed",
            "3 of its sources give nothing",
        ]
        assert agents.clock_worst_s == -7.5

    against(check)


# ---- capacity


@pytest.mark.parametrize(
    ("start", "end", "share"),
    [(0, 100, 0.4), (40, 80, 1.0), (0, 40, 0.0), (60, 60, 1.0), (20, 20, 0.0), (70, 90, 0.5)],
)
def test_hours_are_spread_over_an_incidents_time(start: int, end: int, share: float) -> None:
    assert share_of(start, end, 40, 80) == share


def test_each_gpu_is_in_one_place(against: Against) -> None:
    async def check(fleet: Served) -> None:
        capacity = await fleet.stub.GetCapacity(pb.CapacityRequest())
        (pool,) = capacity.pools
        assert (pool.gpus, pool.held, pool.unknown, pool.out, pool.free) == (8, 3, 2, 0, 3)
        assert (pool.free_nodes, pool.idle) == (1, 0)
        assert not pool.HasField("price")
        assert not capacity.currency
        leafs = {leaf.leaf: (leaf.free, leaf.free_nodes, leaf.scattered) for leaf in capacity.leafs}
        assert leafs == {"leaf1": (2, 1, 0), "leaf0": (1, 0, 1)}
        assert capacity.judged_ms == END

    against(check)


def test_without_a_judged_bucket_nothing_is_called_free(against: Against, monkeypatch: pytest.MonkeyPatch) -> None:
    async def check(fleet: Served) -> None:
        monkeypatch.setattr(fleet.pipeline.buckets, "newest", None)
        (pool,) = (await fleet.stub.GetCapacity(pb.CapacityRequest())).pools
        assert (pool.held, pool.unknown, pool.free) == (3, 5, 0)
        assert not pool.HasField("idle")

    against(check)


def test_idle_gpus_and_who_holds_them(against: Against, monkeypatch: pytest.MonkeyPatch) -> None:
    async def check(fleet: Served) -> None:
        ms = np.array([idle.IDLE_MS, idle.IDLE_MS + HOUR_MS, 0, 0, idle.IDLE_MS - 1, 0, 0, 0], np.int64)
        monkeypatch.setitem(fleet.pipeline.engine._runner.states, idle.NAME, idle.IdleState(ms))
        capacity = await fleet.stub.GetCapacity(pb.CapacityRequest())
        (holder,) = capacity.idle
        assert (holder.job, holder.gpus, holder.idle, list(holder.nodes)) == ("train", 3, 2, ["n0"])
        assert holder.gpu_hours == 2.0
        assert holder.since_ms == END - idle.IDLE_MS - HOUR_MS
        assert capacity.pools[0].idle == 2

    against(check)


def test_what_faults_cost_by_cause_and_pool(against: Against, monkeypatch: pytest.MonkeyPatch) -> None:
    async def check(fleet: Served) -> None:
        first = dataclasses.replace(
            fleet.incident, id="a", since_ms=NOW - 10 * HOUR_MS, opened_ms=NOW - 10 * HOUR_MS, closed_ms=NOW,
            gpu_hours_lost=20.0, gpu_hours_waited=40.0,
        )  # fmt: skip
        others = [
            dataclasses.replace(first, id="b", gpu_hours_lost=2.0, gpu_hours_waited=None, members=(("gone", 0),)),
            dataclasses.replace(first, id="c", gpu_hours_lost=None, gpu_hours_waited=None),
            dataclasses.replace(first, id="d", kind=IncidentKind.IDLE, cause="idle_gpus", gpu_hours_lost=100.0),
            dataclasses.replace(first, id="e", since_ms=NOW - 300 * HOUR_MS, closed_ms=NOW - 200 * HOUR_MS),
        ]
        fleet.store.incidents.write([first, *others])
        stages = {4: Health.DRAINING, 3: Health.DRAINED, 1: Health.HEALTHY}  # hours ago
        fleet.store.outages.write([NodeOutage("n2", stage, NOW - h * HOUR_MS, "a", "x") for h, stage in stages.items()])
        monkeypatch.setattr(fleet.pipeline, "incidents", {})
        monkeypatch.setattr(fleet.facts, "_kept", {})
        prices = CostConfig("EUR", pools=(PoolPrice("pool", 2.0),))
        monkeypatch.setattr(fleet.facts, "config", dataclasses.replace(fleet.facts.config, cost=prices))
        capacity = await fleet.stub.GetCapacity(pb.CapacityRequest(from_ms=NOW - 5 * HOUR_MS, to_ms=NOW))
        lost = {(row.kind, row.cause): row for row in capacity.lost}
        assert set(lost) == {("xid", "xid_79"), ("idle", "idle_gpus"), ("service", "out_of_service")}
        faults = lost["xid", "xid_79"]  # half of each lies in the span; one of them in no pool of the fleet file
        assert (faults.incidents, faults.lost, faults.waited, faults.worst) == (2, 11.0, 20.0, "a")
        assert not faults.HasField("cost")
        assert lost["service", "out_of_service"].lost == 4.0  # two hours of two GPUs
        assert lost["service", "out_of_service"].cost == 8.0
        assert capacity.untold == 1
        (pool,) = capacity.pools
        assert (pool.gpu_hours_lost, pool.gpu_hours_waited, pool.gpu_hours_out, pool.price) == (10.0, 20.0, 4.0, 2.0)

    against(check)


def test_services_are_added_up_over_their_servers(against: Against) -> None:
    async def check(fleet: Served) -> None:
        rows, at = {}, NOW - 5000
        for node in ("n0", "n2"):
            for name in ("chat", "pretrain"):
                rows[node, name] = entity_id(Scope.WORKLOAD, f"{node}/{name}")
                row = EntityRow(rows[node, name], Scope.WORKLOAD, f"{node}/{name}", node, None, link=name)
                fleet.store.entities.write([dataclasses.replace(row, first_ms=at, last_ms=at)])
        ids = np.array([rows["n0", "chat"], rows["n2", "chat"], rows["n0", "pretrain"]], np.uint64)
        values = {
            "ttft_p50_s": np.array([0.2, 0.4, np.nan]), "ttft_p95_s": np.array([0.5, 2.0, np.nan]),
            "tokens_per_s": np.array([1000.0, np.nan, np.nan]), "step_time_s": np.array([np.nan, np.nan, 2.0]),
        }  # fmt: skip
        fleet.store.samples.write(SampleBatch.of_values(Scope.WORKLOAD, ids, np.full(3, at), values))
        fleet.facts._kept.pop("workloads", None)
        (chat,) = (await fleet.stub.GetCapacity(pb.CapacityRequest())).services
        assert (chat.service, chat.servers, list(chat.nodes)) == ("chat", 2, ["n0", "n2"])
        assert (round(chat.ttft_p50_s, 6), chat.ttft_p95_s, chat.tokens_per_s) == (0.3, 2.0, 1000.0)
        assert not chat.HasField("waiting")

    against(check)


def test_however_many_spans_are_asked_for_few_are_read_and_kept(
    against: Against, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check(fleet: Served) -> None:
        monkeypatch.setattr(fleet.facts, "_kept", {})
        read = []
        costs = fleet.store.incidents.for_cost
        monkeypatch.setattr(
            fleet.store.incidents, "for_cost", lambda since_ms: read.append(since_ms) or costs(since_ms)
        )
        for days in range(1, MOST_DAYS + 1, 5):
            request = pb.CapacityRequest(from_ms=NOW - days * DAY_MS, to_ms=NOW - days * DAY_MS + HOUR_MS)
            await fleet.stub.GetCapacity(request)
        assert len(read) <= len(READ_DAYS)
        kept = [key for key in fleet.facts._kept if isinstance(key, tuple)]
        assert len(kept) <= 2 * len(READ_DAYS)
        whole = await fleet.stub.GetCapacity(pb.CapacityRequest(from_ms=NOW - MOST_DAYS * DAY_MS, to_ms=NOW))
        assert whole.from_ms == NOW - MOST_DAYS * DAY_MS
        old = pb.CapacityRequest(from_ms=NOW - 400 * DAY_MS, to_ms=NOW - 399 * DAY_MS)
        code, text = await fleet.refused(fleet.stub.GetCapacity(old))
        assert (code, "366 days ago" in text) == (grpc.StatusCode.INVALID_ARGUMENT, True)

    against(check)


def test_the_limits_shown_are_those_in_force(against: Against, monkeypatch: pytest.MonkeyPatch) -> None:
    async def check(fleet: Served) -> None:
        limits = Limits(waiting_bytes=1_000, record_bytes=234)
        stats = IngestStats(limits=limits)
        monkeypatch.setattr(fleet.facts, "stats", stats)
        page = Page()
        metrics_families.ingest(page, fleet.facts)
        assert "\ndrover_waiting_limit_bytes 1234.0\n" in page.text()
        assert (await fleet.stub.GetSystem(pb.SystemRequest())).ingest.waiting_limit_bytes == 1234
        context = IngestContext(fleet.store, fleet.facts.index, IngestListeners(lambda _: None), limits)
        ingest = IngestService(context)
        assert ingest.stats.limits is limits

    against(check)


def test_a_span_that_is_none_is_refused(against: Against) -> None:
    async def check(fleet: Served) -> None:
        code, text = await fleet.refused(fleet.stub.GetCapacity(pb.CapacityRequest(from_ms=END, to_ms=T0)))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert "give a span" in text

    against(check)


# ---- before an act

ONLY_OBSERVES = 'this collector only observes; set act.mode to "approve" or "enforce", and an actuator'


def test_a_look_before_an_act_shows_jobs_and_that_this_one_only_observes(against: Against) -> None:
    async def check(fleet: Served) -> None:
        look = await fleet.stub.PreviewAct(pb.ActRequest(node="n0", act="drain"))
        assert look.hindrance == ONLY_OBSERVES
        assert look.may_act and not look.no_force
        (job,) = look.jobs
        assert (job.job, job.gpus_here, job.gpus, job.nodes) == ("train", 2, 3, 2)
        assert (await fleet.refused(fleet.stub.PreviewAct(pb.ActRequest(node="zz", act="drain"))))[1].startswith(
            "no node"
        )

    against(check)


@pytest.mark.parametrize("act", ["drain", "resume", "reboot"])
def test_in_observe_mode_a_look_and_the_act_itself_give_the_same_reason(
    against: Against, monkeypatch: pytest.MonkeyPatch, act: str
) -> None:
    """A collector that only observes has a desk too: nobody is sent to look for a second collector."""

    async def check(fleet: Served) -> None:
        actuator = SlurmActuator(SlurmStandIn("n0", "n1", "n2", "n3"), 10_000)
        desk = dispatcher_of(fleet.store, ActConfig(mode="observe"), [actuator], lambda _: actuator)
        desk.start()
        monkeypatch.setattr(fleet.pipeline, "dispatcher", desk)
        assert (await fleet.stub.PreviewAct(pb.ActRequest(node="n0", act=act))).hindrance == ONLY_OBSERVES
        done = fleet.stub.ActOnNode(pb.ActRequest(node="n0", act=act, why="fan", force=act == "reboot"))
        assert (await fleet.refused(done))[1] == ONLY_OBSERVES

    against(check)


def test_a_look_before_an_act_shows_what_the_guard_would_do(against: Against, monkeypatch: pytest.MonkeyPatch) -> None:
    async def check(fleet: Served) -> None:
        actuator = SlurmActuator(SlurmStandIn("n0", "n1", "n2", "n3"), 10_000)
        config = ActConfig(mode="approve", reboot_command=("true",))
        desk = dispatcher_of(fleet.store, config, [actuator], lambda node: None if node == "n3" else actuator)
        monkeypatch.setattr(fleet.pipeline, "dispatcher", desk)

        async def look(node: str, act: str) -> tuple[str, str]:
            found = await fleet.stub.PreviewAct(pb.ActRequest(node=node, act=act))
            return found.hindrance, found.guard

        assert await look("n0", "drain") == ("this collector is not the active one; ask the one that is", "")
        monkeypatch.setattr(type(desk), "acting", True)
        assert (await look("n3", "drain"))[0].startswith("no actuator")
        assert await look("n0", "drain") == ("", ""), "what observe mode only said holds nobody back"
        fleet.pipeline.engine.on_survey(Survey({"n2"}))
        assert (await look("n0", "drain"))[1].startswith("2 of 4 nodes of the fleet would be out (at most 1 may be")
        assert (await look("n0", "resume"))[0].endswith("only the person who did can put it back")
        assert await look("n0", "reboot") == ("", "jobs may run on n0: drain it first")
        assert (await look("n0", "reset"))[0].startswith("no command for it: set act.reset_command")

    against(check)

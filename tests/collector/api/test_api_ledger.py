"""The ledger out of a real store: rollups as the collector writes them, holds, an incident; and over gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc
import numpy as np
import pytest

from drover_collector.api import job_loss, trend
from drover_collector.api import ledger as api
from drover_collector.api.trend_days import TrendCache
from drover_collector.config import CollectorConfig, CostConfig, SkuPrice
from drover_collector.store import EntityRow, SampleBatch, Store, entity_id
from drover_core.jobs.checkpoint import CheckpointReport, to_message
from drover_core.metrics.catalog import Scope
from drover_core.model.events import (
    Act,
    Action,
    ActionState,
    Event,
    Holding,
    Incident,
    IncidentKind,
    RecommendedAction,
    Severity,
)
from drover_core.model.kinds import CHECKPOINT, EventKind
from drover_core.model.saving import JobSave, Saving
from drover_proto import fleet_pb2 as pb
from testbed.collected import gpu_key, small_index, write_entities, write_ticks
from testbed.fleet_served import NOW, T0, Served, served
from testbed.rolled import finish

INDEX = small_index(2, 2)
S = 1000
END = T0 + 900 * S
SAVED = T0 + 200 * S + 123  # a checkpoint
WATTS = 700


def fill(store: Store) -> None:
    """15 minutes: n1 is silent from 5 to 10 minutes, GPU 1 of n0 is idle from 10 on. A fault ends a job at 700 s.

    The job reports steps for 5 minutes: what its GPUs do after that, until the fault, is unknown.
    """
    write_entities(store, INDEX)
    idle = {("n0", 1): {"gpu_util_ratio": 0.0}}
    for low, high, silent, changed in ((0, 300, (), None), (300, 600, ("n1",), None), (600, 900, (), idle)):
        write_ticks(store, INDEX, T0 + low * S, T0 + high * S, 10 * S, silent=silent, changed=changed)
    ts = np.arange(T0, END, 10 * S, dtype=np.int64)
    ids = np.full(len(ts), entity_id(Scope.GPU, gpu_key("n0", 0)), np.uint64)
    joules = (ts - T0) / S * WATTS + 5e6
    store.samples.write(SampleBatch.of_values(Scope.GPU, ids, ts, {"energy_j": joules}))
    loop = EntityRow(entity_id(Scope.WORKLOAD, "n0/pre"), Scope.WORKLOAD, "n0/pre", "n0", None, link="pre", first_ms=T0)
    store.entities.write([loop])
    steps = {"step_time_s": np.full(len(ts) // 3, 2.0)}  # in the first 5 minutes
    store.samples.write(
        SampleBatch.of_values(Scope.WORKLOAD, np.full(len(ts) // 3, loop.entity_id), ts[: len(ts) // 3], steps)
    )
    store.rollups.closing_folds(END - 10 * S)
    store.rollups.roll_up()
    finish(store)  # the time before the newest bucket, as after a pause of the collector
    all_gpus = [("n0", 0), ("n0", 1), ("n1", 0), ("n1", 1)]
    holds = [Holding(*gpu, job, T0 + at * S) for gpu in all_gpus for at, job in ((60, "train"), (700, None))]
    holds += [Holding("n0", slot, "train", T0 + 750 * S) for slot in (0, 1)]
    store.jobs.write_holdings(holds)
    store.incidents.write(
        [
            Incident(
                "fault", IncidentKind.XID, "xid_79", "gpu", "n1", 0, (("n1", 0),), T0 + 625 * S, T0 + 620 * S, None,
                Severity.CRITICAL, 0.9, RecommendedAction.DRAIN, "GPU 0 of n1 fell off the bus.", "Drain it.",
                job="train", updated_ms=END,
            )
        ]
    )  # fmt: skip


@pytest.fixture(scope="module")
def url(store_root: Path) -> str:
    return f"chdb://{store_root}?database=api_ledger"


@pytest.fixture(scope="module")
def opened(url: str) -> Iterator[list[Store]]:
    """The open store, which a test may replace."""
    stores = [Store.open(url)]
    fill(stores[0])
    yield stores
    stores[-1].close()


@pytest.fixture
def store(opened: list[Store]) -> Store:
    return opened[-1]


def facts_of(store: Store, config: CollectorConfig | None = None) -> Any:
    return cast(
        Any,
        SimpleNamespace(
            index=INDEX, store=store, now_ms=lambda: END + 20 * S, config=config or CollectorConfig(),
            once=lambda _key, _seconds, make: make(),
        ),
    )  # fmt: skip


def test_rollups_holds_and_incidents_give_exact_shares(store: Store) -> None:
    reply = api.get_ledger(facts_of(store), pb.LedgerRequest(from_ms=T0, to_ms=END))
    shares = reply.total.shares
    assert reply.total.held_ms == (640 * 4 + 150 * 2) * S
    assert (shares.unknown_ms, shares.lost_ms, shares.waiting_ms, shares.idle_ms, shares.useful_ms) == tuple(
        n * S for n in (640 + 640, 80, 240, 150, 960 + 150)
    )
    (job,) = reply.jobs
    assert (job.name, job.interruptions, job.between_ms) == ("train", 1, 50 * 2 * S)
    assert job.ettr == 1110 / (2860 + 100)
    assert (reply.availability[0].silent_ms, reply.availability[0].recovered) == (600 * S, 1)
    assert reply.availability[0].recovery_ms == 130 * S
    assert reply.incidents[0].where == "n1 GPU 0"
    # Three readings, each at the end of its 5 minutes: the first 5 are not known.
    assert (reply.fleet_energy.mj, reply.fleet_energy.known_ms) == (600 * WATTS * 1000, 600 * S)
    assert [row.name for row in reply.nodes] == ["n0", "n1"]  # 160 s were taken from each


def test_a_day_of_the_trend_is_what_the_ledger_says_and_one_without_data_a_gap(store: Store) -> None:
    facts = facts_of(store)
    facts.trend = TrendCache()
    before, day = trend.get_trend(facts, pb.TrendRequest(days=2)).days
    total = api.get_ledger(facts, pb.LedgerRequest(from_ms=day.from_ms, to_ms=END + 20 * S)).total
    assert (day.goodput, day.gpu_hours_lost) == (total.goodput, (80 + 240) / 3600)
    # Three buckets of 5 minutes with 4, 2 and 4 GPUs of 600 W; one idles in the last.
    assert (day.util_ratio, day.power_w) == (pytest.approx(0.9), pytest.approx(2000))
    assert not before.pending
    assert not any(before.HasField(name) for name in ("util_ratio", "power_w", "gpu_hours_lost", "goodput"))


def test_checkpoints_are_known_to_the_millisecond_and_of_very_many_the_newest(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported = [("train", SAVED), ("nobody's", SAVED + 1), ("train", SAVED + 9 * S)]
    store.events.write(
        Event(f"n0/{at_ms}", at_ms, "n0", None, EventKind.RANK, CHECKPOINT, to_message(CheckpointReport(job, 7)),
              "steps", received_ms=at_ms)
        for job, at_ms in reported
    )  # fmt: skip
    found, _, _, _ = api.read_facts(facts_of(store), T0, END)
    assert [(found.jobs[job], at_ms) for job, at_ms in found.checkpoints] == [
        ("train", SAVED),
        ("train", SAVED + 9 * S),
    ]
    assert found.checkpoints_from_ms < T0
    monkeypatch.setattr(api, "CHECKPOINTS", 2)
    found, _, _, _ = api.read_facts(facts_of(store), T0, END)
    assert [at_ms for _, at_ms in found.checkpoints] == [SAVED + 9 * S]
    assert found.checkpoints_from_ms == SAVED + 1


def test_a_restart_of_the_collector_and_parts_of_the_span_change_nothing(opened: list[Store], url: str) -> None:
    store = opened[-1]
    whole = api._read(facts_of(store), T0, END).account
    cuts = [T0, T0 + 123_457, T0 + 650 * S, END]
    parts = [api._read(facts_of(store), low, high).account for low, high in pairwise(cuts)]
    assert sum(part.ledger.ms.sum(axis=0) for part in parts).tolist() == whole.ledger.ms.sum(axis=0).tolist()
    assert sum(int(part.energy_mj.sum()) for part in parts) == int(whole.energy_mj.sum())
    store.close()
    opened.append(Store.open(url))
    again = api._read(facts_of(opened[-1]), T0, END).account
    assert (again.ledger.ms == whole.ledger.ms).all()
    assert (again.ledger.claim_ms == whole.ledger.claim_ms).all()


def test_prices_by_model_and_one_job(store: Store) -> None:
    cost = CostConfig(currency="EUR", gpu_hour=1.0, kwh=0.5, skus=(SkuPrice("H100", 3.6),))
    request = pb.LedgerRequest(from_ms=T0, to_ms=END, job="train", limit=1)
    reply = api.get_ledger(facts_of(store, CollectorConfig(cost=cost)), request)
    assert reply.total.cost == pytest.approx(2860 / 1000)
    assert reply.fleet_energy.cost == pytest.approx(600 * WATTS / 3.6e6 * 0.5)
    assert (len(reply.nodes), reply.nodes_total) == (1, 2)
    with pytest.raises(api.RefusalError, match="no job 'gone'"):
        api.get_ledger(facts_of(store), pb.LedgerRequest(from_ms=T0, to_ms=END, job="gone"))


@pytest.mark.parametrize(("low", "high"), [(END, T0), (T0, T0), (1, T0), (END - 36 * api.DAY_MS, END)])
def test_a_span_that_cannot_be_answered_is_refused(store: Store, low: int, high: int) -> None:
    with pytest.raises(api.RefusalError, match="at most"):
        api.get_ledger(facts_of(store), pb.LedgerRequest(from_ms=low, to_ms=high))


def test_one_report_at_a_time(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "WAIT_S", 0.01)
    with api._one_at_a_time, pytest.raises(api.RefusalError, match="another report"):
        api.get_ledger(facts_of(store), pb.LedgerRequest(from_ms=T0, to_ms=END))


def test_a_timeline_gives_the_times_in_which_an_incident_was_open() -> None:
    lines = [("opened", 1), ("closed", 5), ("came_back", 7), ("again", 8), ("absorbed", 9), ("came_back", 12)]
    timeline = [{"kind": kind, "ts_ms": at} for kind, at in lines]
    assert api.opened_spans(1, None, timeline) == [(1, 5), (7, 9), (12, None)]
    assert api.opened_spans(1, 20, []) == [(1, 20)]


def test_without_rollups_all_time_is_unknown_over_grpc(store_root: Path) -> None:
    empty = Store.open(f"chdb://{store_root}?database=api_ledger_served")

    async def check(fleet: Served) -> None:
        reply = await fleet.stub.GetLedger(pb.LedgerRequest(from_ms=T0, to_ms=NOW))
        assert reply.total.held_ms == reply.total.shares.unknown_ms > 0
        assert not reply.total.HasField("cost")
        assert reply.objective == 0.999
        code, text = await fleet.refused(fleet.stub.GetLedger(pb.LedgerRequest(from_ms=NOW, to_ms=T0)))
        assert (code, "give a span" in text) == (grpc.StatusCode.INVALID_ARGUMENT, True)

    async def serve() -> None:
        async with served(empty) as fleet:
            await check(fleet)

    asyncio.run(serve())
    empty.close()


def test_a_jobs_loss_is_that_of_the_ledger_with_its_evidence_and_one_sentence(store: Store) -> None:
    facts = facts_of(store)
    reply = pb.JobDetail(row=pb.JobRow(job="train", since_ms=T0 + 60 * S, severity="critical"))
    job_loss.add_loss(facts, reply, "train", [0, 1, 2, 3], [])
    whole = api.get_ledger(facts, pb.LedgerRequest(from_ms=T0, to_ms=END, job="train")).total
    assert (reply.loss.shares, reply.loss.held_ms) == (whole.shares, whole.held_ms)
    (part,) = reply.loss.parts
    assert (part.blame, part.where, part.incident, part.ms) == ("gpu", "n1 GPU 0", "fault", (80 + 240) * S)
    assert reply.loss.lost_ms == part.ms
    assert job_loss.sentence_of(reply) == (
        "Job train is hurt; it lost 0.089 of 0.79 GPU-hours (11.2%): 100% by n1 GPU 0; 0.36 GPU-hours are unknown."
    )


def test_what_a_job_saved_before_its_node_went_stands_in_the_ledger(store: Store) -> None:
    asked_ms = T0 + 400 * S
    saved = JobSave(
        "train", "signal USR1", answered_ms=asked_ms + 9 * S, step=460, step_before=400,
        saved_ms=asked_ms + 7 * S, before_ms=asked_ms - 53 * S,
    )  # fmt: skip
    silent = JobSave("other", "signal USR1")
    stays = replace(saved, job="stays")

    def write(id_: str, act: Act, *jobs: JobSave, state: ActionState = ActionState.DONE) -> None:
        done = Action(id_, "d", "i", "n1", act, "slurm", state, asked_ms + 10 * S, saving=Saving(60.0, asked_ms, jobs))
        store.actions.write([done])

    write("a1", Act.ISOLATE, saved, silent)
    write("a2", Act.DRAIN, stays)
    write("a3", Act.ISOLATE, saved, state=ActionState.FAILED)
    moves = api.get_ledger(facts_of(store), pb.LedgerRequest(from_ms=T0, to_ms=END)).moves
    rows = [
        (
            m.job,
            m.answer,
            m.steps_kept if m.HasField("steps_kept") else None,
            m.kept_ms if m.HasField("kept_ms") else None,
        )
        for m in moves
    ]
    assert sorted(rows) == [  # what goes on where it is would have repeated nothing
        ("other", "none", None, None), ("stays", "saved", None, None), ("train", "saved", 60, 60 * S * 4),
    ]  # fmt: skip
    detail = pb.JobDetail(row=pb.JobRow(job="train", since_ms=T0 + 60 * S))
    job_loss.add_loss(facts_of(store), detail, "train", [0, 1, 2, 3], [])
    assert [m.text for m in detail.loss.moves] == [
        "job train saved itself at step 460, 60 steps after its last checkpoint"
    ]


def test_a_job_without_any_value_is_not_called_healthy(store: Store) -> None:
    reply = pb.JobDetail(row=pb.JobRow(job="other", since_ms=T0))
    assert job_loss.sentence_of(reply) == "Job other is not known to be healthy: its GPUs report nothing."
    job_loss.add_loss(facts_of(store), reply, "other", [0], [])
    assert "not known yet" in job_loss.sentence_of(reply)
    reply.metrics.add(metric="power_w")
    reply.loss.CopyFrom(pb.JobLoss(held_ms=1000, shares=pb.LedgerShares(unknown_ms=600, useful_ms=400)))
    assert "is not known to be healthy" in job_loss.sentence_of(reply)
    reply.loss.shares.unknown_ms = 0
    assert job_loss.sentence_of(reply).startswith("Job other is healthy; nothing of ")

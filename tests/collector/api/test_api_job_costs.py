"""What a job lost is one sum: the Job page, `drover job`, REST and the weekly report have it from the same ledger."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from drover_cli.report.page import taken_ms
from drover_collector.api import job_loss
from drover_collector.api import ledger as api
from drover_collector.config import CollectorConfig
from drover_collector.store import Store
from drover_core.model.events import Holding, Incident, IncidentKind, RecommendedAction, Severity, to_json
from drover_proto import fleet_pb2 as pb
from testbed.collected import small_index, write_entities, write_ticks
from testbed.fleet_served import T0
from testbed.rolled import finish

INDEX = small_index(2, 2)
S = 1000
END = T0 + 3600 * S
HOUR_MS = 3_600_000
SLOWER = 1 - 1 / 1.37
GPUS = [("n0", 0), ("n0", 1), ("n1", 0), ("n1", 1)]


def incident(id_: str, kind: IncidentKind, cause: str, since_s: int, closed_s: int | None, **more: Any) -> Incident:
    members = (("n1", 0),) if kind is not IncidentKind.SLOWDOWN else (("n0", None), ("n1", None))
    scope, (node, gpu) = ("gpu", members[0]) if len(members) == 1 else ("job", (None, None))
    return Incident(
        id_, kind, cause, scope, node, gpu, members, T0 + since_s * S, T0 + since_s * S,
        None if closed_s is None else T0 + closed_s * S, Severity.WARNING, 0.9, RecommendedAction.NONE, f"{kind}.", "",
        job="train", updated_ms=END, **more,
    )  # fmt: skip


FOUND = [
    incident("slow", IncidentKind.SLOWDOWN, "waits_for_host", 600, 2400, gpu_hours_lost=4 * 0.5 * SLOWER),
    # Both were open for five minutes: the hang takes all of them.
    incident("hang", IncidentKind.HANG, "rank_stopped", 2100, 2700, gpu_hours_lost=1 / 6, gpu_hours_waited=3 / 6),
]


@pytest.fixture(scope="module")
def store(store_root: Path) -> Iterator[Store]:
    """An hour of one job on four GPUs that all work."""
    store = Store.open(f"chdb://{store_root}?database=api_job_costs")
    write_entities(store, INDEX)
    write_ticks(store, INDEX, T0, END, 10 * S)
    store.rollups.closing_folds(END - 10 * S)
    store.rollups.roll_up()
    finish(store)
    store.jobs.write_holdings([Holding(*gpu, "train", T0) for gpu in GPUS])
    store.incidents.write(FOUND)
    yield store
    store.close()


def facts_of(store: Store) -> Any:
    made: dict[Any, Any] = {}

    def once(key: Any, _seconds: float, make: Any) -> Any:
        return made.setdefault(key, make()) if key not in made else made[key]

    return cast(
        Any, SimpleNamespace(index=INDEX, store=store, now_ms=lambda: END, config=CollectorConfig(), once=once)
    )  # fmt: skip


def detail_of(store: Store) -> pb.JobDetail:
    # As the list has it: each incident counted alone, the five minutes twice.
    row = pb.JobRow(job="train", since_ms=T0, severity="warning", gpu_hours_waited=0.5, gpu_hours_lost=0.71)
    reply = pb.JobDetail(row=row, incidents_json=[to_json(each) for each in FOUND])
    job_loss.add_loss(facts_of(store), reply, "train", [0, 1, 2, 3], FOUND)
    reply.sentence = job_loss.sentence_of(reply)
    return reply


def test_page_command_rest_and_report_have_one_sum_in_which_no_hour_counts_twice(store: Store) -> None:
    detail = detail_of(store)
    loss, shares = detail.loss, detail.loss.shares
    total = api.get_ledger(facts_of(store), pb.LedgerRequest(from_ms=T0, to_ms=END, job="train"))
    (job,) = api.get_ledger(facts_of(store), pb.LedgerRequest(from_ms=T0, to_ms=END)).jobs
    slow_ms = 4 * 1500 * S * SLOWER  # the last five minutes of it are the hang's
    assert loss.lost_ms == pytest.approx(4 * 600 * S + slow_ms, abs=500)
    assert loss.lost_ms == sum(part.ms for part in loss.parts) == taken_ms(shares) == taken_ms(job.shares)
    assert (loss.shares, job.shares) == (total.total.shares, total.total.shares)
    assert shares.useful_ms == loss.held_ms - loss.lost_ms, "what is lost is not useful"
    assert [(part.blame, part.ms) for part in loss.parts] == [
        ("unknown", 4 * 600 * S), ("storage", loss.lost_ms - 4 * 600 * S),
    ]  # fmt: skip
    row = detail.row
    assert (row.gpu_hours_waited + row.gpu_hours_lost) * HOUR_MS == pytest.approx(loss.lost_ms)
    assert row.gpu_hours_waited * HOUR_MS == pytest.approx(shares.waiting_ms)
    assert {cause.cause: taken_ms(cause.shares) for cause in total.causes} == {
        part.cause: part.ms for part in loss.parts
    }  # fmt: skip
    assert (
        f"it lost {loss.lost_ms / HOUR_MS:.1f} of 4.0 GPU-hours ({loss.lost_ms / loss.held_ms:.1%})" in detail.sentence
    )


def test_a_job_that_is_hurt_does_not_read_as_one_that_lost_nothing() -> None:
    held = pb.JobLoss(held_ms=4 * HOUR_MS, shares=pb.LedgerShares(useful_ms=4 * HOUR_MS))
    hurt = pb.JobDetail(row=pb.JobRow(job="t", severity="warning"), loss=held)
    assert job_loss.sentence_of(hurt) == "Job t is hurt; what that took is not known."


def test_a_job_that_hangs_is_not_only_hurt() -> None:
    open_ = incident("hang", IncidentKind.HANG, "rank_stopped", 0, None)
    detail = pb.JobDetail(row=pb.JobRow(job="t", severity="warning"), incidents_json=[to_json(open_)])
    assert job_loss.sentence_of(detail) == "Job t makes no progress."
    detail.incidents_json[0] = to_json(incident("hang", IncidentKind.HANG, "rank_stopped", 0, 60))
    assert job_loss.sentence_of(detail) == "Job t is hurt."

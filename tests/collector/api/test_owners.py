"""Whose jobs are, out of a real store: in the list and one job's answer, and summed up by team in the ledger."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from drover_collector.api import ledger as api_ledger
from drover_collector.api.owners import BEFORE_MS, add_owners, message, read_owners, teams_of
from drover_collector.config import CollectorConfig, TeamConfig
from drover_collector.store import Store
from drover_core.jobs.owner import KUBERNETES, JobOwner, to_message
from drover_core.model.events import Event, Holding
from drover_core.model.kinds import OWNER, EventKind
from drover_proto import fleet_pb2 as pb
from testbed.collected import small_index, write_entities, write_ticks
from testbed.fleet_served import T0
from testbed.rolled import finish

INDEX = small_index(2, 2)
S = 1000
END = T0 + 900 * S
ALICE = JobOwner("7", user="alice", uid=1000, account="vision", array="5_2")
TEAMS = (
    TeamConfig(account="vision", team="perception", project="driver"),
    TeamConfig(account="prod-*", team="serving"),
)


def event(owner: JobOwner | str, received_ms: int, node: str = "n0") -> Event:
    text = owner if isinstance(owner, str) else to_message(owner)
    return Event(
        f"{node}/{received_ms}/{hash(text)}", received_ms, node, None, EventKind.RANK, OWNER, text, "owners",
        received_ms=received_ms, forgeable=True,
    )  # fmt: skip


@pytest.fixture(scope="module")
def store(store_root: Path) -> Iterator[Store]:
    """Four GPUs for 15 minutes: job 7 of alice has two, a pod one, a job of nobody one."""
    opened = Store.open(f"chdb://{store_root}?database=api_owners")
    write_entities(opened, INDEX)
    write_ticks(opened, INDEX, T0, END, 10 * S)
    opened.rollups.closing_folds(END - 10 * S)
    opened.rollups.roll_up()
    finish(opened)
    jobs = {("n0", 0): "7", ("n0", 1): "7", ("n1", 0): "prod-chat/vllm-0", ("n1", 1): "9"}
    opened.jobs.write_holdings([Holding(node, gpu, job, T0) for (node, gpu), job in jobs.items()])
    opened.jobs.write_holdings([Holding(node, gpu, None, END - 60 * S) for node, gpu in jobs])
    opened.events.write(
        [
            event(ALICE, T0 - BEFORE_MS + S), event(ALICE, T0 + S, "n1"), event("{", T0 + S),
            event(replace(ALICE, account="", array=""), T0 + 2 * S),  # of a node that may not read environments
            event(JobOwner("prod-chat/vllm-0", KUBERNETES, account="said", controller="LeaderWorkerSet/vllm"), T0 + S),
            event(JobOwner("old", account="vision"), T0 - 40 * BEFORE_MS),
        ]
    )  # fmt: skip
    yield opened
    opened.close()


def facts_of(store: Store, teams: tuple[TeamConfig, ...] = TEAMS) -> Any:
    config = replace(CollectorConfig(), teams=teams)
    made = SimpleNamespace(index=INDEX, store=store, now_ms=lambda: END + 20 * S, config=config)
    made.once = lambda _key, _seconds, make: make()
    return cast(Any, made)


def test_rows_of_jobs_say_whose_they_are(store: Store) -> None:
    rows = [pb.JobRow(job=job) for job in ("7", "prod-chat/vllm-0", "lab/a", "9", "old")]
    add_owners(facts_of(store), rows)
    mine, pod, named, nobody, old = rows
    assert (mine.owner.team, mine.owner.project, mine.owner.user, mine.owner.said_by) == (
        "perception", "driver", "alice", "environment",
    )  # fmt: skip
    assert mine.owner.text == "team perception, user alice, account vision, project driver, array task 5_2"
    assert (pod.owner.team, pod.owner.account, pod.owner.controller) == (
        "serving", "prod-chat", "LeaderWorkerSet/vllm",
    )  # fmt: skip
    # A namespace is a part of a pod's name; that is all that is known of this one.
    assert (named.owner.team, named.owner.said_by, named.owner.text) == ("lab", "name", "account lab")
    assert not nobody.HasField("owner")  # unknown, and not the empty team
    assert not old.HasField("owner")


def test_the_ledger_by_team_adds_up_and_says_what_is_nobodys(store: Store) -> None:
    reply = api_ledger.get_ledger(facts_of(store), pb.LedgerRequest(from_ms=T0, to_ms=END))
    held = {row.name: row.held_ms for row in reply.teams}
    assert held == {"perception": 2 * 840 * S, "serving": 840 * S, "": 840 * S}
    assert sum(held.values()) == reply.total.held_ms
    hours = 840 / 3600
    assert f"Whose 1 of 3 jobs are is not known: {hours:,.1f} GPU-hours (docs/how-to/owners.md)." in reply.doubts
    assert not any("Users and teams" in doubt for doubt in reply.doubts)


def test_without_settings_the_account_is_the_team(store: Store) -> None:
    assert teams_of(store, (), ["7", "9", "prod-chat/vllm-0"], T0) == {"7": "vision", "prod-chat/vllm-0": "prod-chat"}
    assert read_owners(store, T0 + 3 * S) == {}


def test_a_user_alone_is_no_team() -> None:
    found = message(JobOwner("7", user="bob", uid=1001), TEAMS)
    assert (found.team, found.text) == ("", "user bob")

"""Health, incidents and decisions are folds over what is stored: a collector that was stopped at any moment of a random
history, and built all of it again out of its store, has the same answers as one that was not, then and ever after."""

from __future__ import annotations

import asyncio
import random
import re
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from drover_collector.fleet.buckets import BUCKET_MS
from drover_collector.notify import Outbox
from drover_collector.pipeline.pipeline import Pipeline, PipelineOptions
from drover_collector.policy.policy import Policy
from drover_collector.store import Store
from drover_core.model.events import (
    OUT_STAGES,
    Approval,
    Audit,
    Event,
    EventKind,
    Health,
    NodeOutage,
)
from testbed.collected import small_index, write_entities, write_ticks
from testbed.loop import in_loop
from testbed.waiting import until

T0 = 1_800_000_000_000
LAG_MS = 7000
INDEX = small_index(6, 2)
NODES = [node.name for node in INDEX.nodes]
CODES = ("79", "48", "31", "43", "63", "94", "119")
FAULTS = ({"row_remap_failed": 1.0}, {"gpu_temp_c": 97.0, "power_w": 300.0}, {"power_w": float("nan")})
STAGES = (Health.DRAINING, Health.DRAINED, Health.VALIDATING, Health.REPAIR)
WARM, LENGTH = 3, 20  # buckets without trouble, and in all


@dataclass
class Step:
    """What happens in one bucket."""

    silent: set[str] = field(default_factory=set)
    changed: dict[tuple[str, int], dict[str, float]] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    duties: list[tuple[str, Health]] = field(default_factory=list)
    answer: bool | None = None


def drawn(seed: int) -> list[Step]:
    """A history: nodes that fall silent, GPUs that fail, XIDs, nodes that go out and come back, people who answer."""
    rng = random.Random(seed)
    steps = [Step() for _ in range(LENGTH)]
    out: set[str] = set()
    for number in range(WARM, LENGTH):
        step, node, gpu = steps[number], rng.choice(NODES), rng.randrange(2)
        until_ = number + rng.randrange(3, 15)
        if rng.random() < 0.2:
            for later in steps[number:until_]:
                later.silent.add(node)
        if rng.random() < 0.4:
            fault = rng.choice(FAULTS)
            for later in steps[number:until_]:
                later.changed[node, gpu] = fault
        if rng.random() < 0.6:
            ts_ms = T0 + number * BUCKET_MS + rng.randrange(LAG_MS, BUCKET_MS - 300)  # after the last bucket was judged
            code = rng.choice(CODES)
            step.events.append(
                Event(f"{number}", ts_ms, node, gpu, EventKind.XID, code, f"Xid {code}", received_ms=ts_ms + 300)
            )
        if rng.random() < 0.4:
            stage = rng.choice((*STAGES, Health.HEALTHY)) if node in out else Health.DRAINING
            (out.discard if stage is Health.HEALTHY else out.add)(node)
            step.duties.append((node, stage))
        step.answer = rng.choice((None, None, True, False))
    return steps


class Run:
    """One collector after another on one store."""

    def __init__(self, store: Store) -> None:
        self.store, self.now_ms = store, T0
        self.duties: dict[str, NodeOutage] = {}
        self.seen: list[dict[str, Any]] = []  # after each bucket
        write_entities(store, INDEX)

    async def begin(self) -> None:
        self.pipeline = Pipeline(
            INDEX, self.store, replace(Policy.named("strict"), mode="approve"),
            Outbox(self.store, [], "http://console", now_ms=lambda: self.now_ms), PipelineOptions(lag_ms=LAG_MS,
            now_ms=lambda: self.now_ms, ceiling="enforce"),
        )  # fmt: skip
        await self.pipeline.start()
        await self.pipeline.buckets.take_up_past(self.pipeline)

    async def judge(self, call: Any, *args: Any) -> None:
        await asyncio.to_thread(lambda: self.pipeline._judge.submit(call, *args).result(120))

    async def step(self, number: int, step: Step) -> None:
        start_ms = T0 + number * BUCKET_MS
        write_ticks(
            self.store, INDEX, start_ms, start_ms + BUCKET_MS, silent=step.silent, changed=step.changed, step_ms=5000
        )
        for event in step.events:
            self.now_ms = event.received_ms or 0
            self.store.events.write([event])
            self.pipeline.take_events([event])
            await self.judge(self.pipeline.judge_events)
        self.now_ms = start_ms + BUCKET_MS - 1
        for node, stage in step.duties:
            known = sorted((i.opened_ms, i.id) for i in self.pipeline.incidents.values() if i.node == node)
            incident = known[0][1] if known else ""
            duty = self.duties.get(node)
            if stage is not Health.DRAINING and duty is not None:
                incident = duty.incident_id
            self.duties[node] = NodeOutage(node, stage, self.now_ms, incident, f"{stage} in {number}")
            self.store.outages.write([self.duties[node]])
            self.pipeline.take_outages(dict(self.duties))
        waiting = [d for d in self.pipeline.engine.decider.standing.values() if d.outcome == "pending_approval"]
        if step.answer is not None and waiting:
            given = Approval(min(d.id for d in waiting), self.now_ms, "ann", step.answer, "seen")
            line = Audit(f"a{number}", self.now_ms, "ann", "answer", "", "seen")
            await asyncio.to_thread(self.pipeline.answer, given, line)
        self.now_ms = start_ms + BUCKET_MS + LAG_MS
        bucket = await asyncio.to_thread(self.store.buckets.read_closing, INDEX, start_ms)
        await self.judge(self.pipeline.judge_bucket, bucket)
        await asyncio.to_thread(self.store.rollups.roll_up)
        self.pipeline.buckets.next_ms = start_ms + BUCKET_MS
        await until(lambda: not self.pipeline.waiting_outcomes, "all is stored")
        self.seen.append(self.snapshot())

    def snapshot(self) -> dict[str, Any]:
        """Health of all with its reason, what is open and why, how each decision stands, and who is out."""
        engine = self.pipeline.engine
        places = [(node, gpu) for node in NODES for gpu in (None, 0, 1)]
        return {
            "health": {place: (engine.health_of(*place)[0], timeless(engine.health_of(*place)[1])) for place in places},
            "incidents": {
                i.id: (i.kind, i.cause, i.severity, i.action, i.members, i.since_ms, i.opened_ms, timeless(i.summary))
                for i in engine.incidents.values() if i.closed_ms is None
            },
            "decisions": dict(engine.decider.standing),
            "out": dict.fromkeys(engine.decider.out(), True),
            "breaker": {id_: i.members for id_, i in engine.decider.breaker.events.items() if i.closed_ms is None},
            "pace": {"taken within an hour": engine.decider.pace.within_hour(self.now_ms)},
        }  # fmt: skip


def timeless(text: str) -> str:
    """A sentence that says for how long is stored when something else changes, and shown as of the newest bucket."""
    return re.sub(r"\b\d+(\.\d+)? (s|min|h)\b", "a while", text)


async def played(store: Store, history: list[Step], restarts: Collection[int]) -> list[dict[str, Any]]:
    run = Run(store)
    await run.begin()
    for number, step in enumerate(history):
        await run.step(number, step)
        if number in restarts:
            before = run.snapshot()
            await run.pipeline.stop()
            await run.begin()
            assert differs(before, run.snapshot()) == {}, f"right after the restart after bucket {number}"
    await run.pipeline.stop()
    return run.seen


def differs(expected: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """What is otherwise, by what it is about: as expected, as found."""
    return {
        f"{what} {key}": (value.get(key), found[what].get(key))
        for what, value in expected.items()
        for key in {**value, **found[what]}
        if value.get(key) != found[what].get(key)
    }


@pytest.mark.parametrize("seed", [1])
@in_loop
async def test_a_restart_anywhere_in_a_random_history_changes_no_answer(store_root: Path, seed: int) -> None:
    history = drawn(seed)
    restarts = random.Random(seed).sample(range(WARM + 2, LENGTH - 1), 3)
    stores = [Store.open(f"chdb://{store_root}?database=health{seed}{name}", retention_days=3650) for name in "ab"]
    whole = await played(stores[0], history, ())
    stopped = await played(stores[1], history, restarts)
    for number, (expected, found) in enumerate(zip(whole, stopped, strict=True)):
        assert differs(expected, found) == {}, f"after bucket {number}, restarts after {sorted(restarts)}"
    healths = {health for snapshot in whole for health, _ in snapshot["health"].values()}
    assert healths & OUT_STAGES
    assert healths >= {Health.HEALTHY, Health.CONFIRMED}
    decided = [decision for snapshot in whole for decision in snapshot["decisions"].values()]
    assert {decision.takes for decision in decided} == {True, False}, "of nodes that were out already too"
    assert {"act", "pending_approval"} <= {decision.outcome for decision in decided}
    open_ = [
        Counter(node for *_, members, _, _, _ in snapshot["incidents"].values() for node, _ in members)
        for snapshot in whole
    ]
    assert max(count for counts in open_ for count in counts.values()) > 1, "several faults of one node"
    for store in stores:
        store.close()

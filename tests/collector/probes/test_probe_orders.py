"""Orders for probes over a real stream: sent, sent again, judged once, and ended whatever becomes of the node."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from drover_collector.fleet.index import FleetIndex
from drover_collector.probes.context import NodeAccess, ProbeRuntime
from drover_collector.probes.service import ProbeOrderService
from drover_collector.probes.settings import ProbesConfig
from drover_collector.store import Store
from drover_core.model.events import (
    ProbeOrder,
    ProbeReason,
    ProbeResult,
    ProbeVerdict,
    to_json,
)
from drover_proto import telemetry_pb2 as pb
from testbed.fleets import T0, hello, index_of
from testbed.ingest import Agent, Collector
from testbed.loop import in_loop
from testbed.waiting import until

CONFIRM = ProbeReason.CONFIRM
H200 = "NVIDIA H200"


@dataclass
class Bench:
    """A collector with a desk; its clock stands until a test moves it."""

    collector: Collector
    config: ProbesConfig
    verdicts: list[ProbeVerdict] = field(default_factory=list)
    leading: bool = True
    held: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.store = self.collector.store
        self.desk = ProbeOrderService(
            self.store,
            index_of(),
            self.config,
            NodeAccess(self.collector.ingest.stream, busy=lambda: self.held),
            ProbeRuntime(lambda: self.leading, lambda: self.collector.now_ms, poll_s=0.02),
        )
        self.collector.on_probes = self.desk.orders.take_results
        self.desk.on_verdicts.append(self.verdicts.extend)

    def state(self, order: str) -> str:
        return self.store.probes.orders.versions(order)[-1].state

    async def ended(self, order: str) -> ProbeOrder:
        await until(lambda: self.state(order) in ("done", "failed"), "the order's end")
        return self.store.probes.orders.versions(order)[-1]


@contextlib.asynccontextmanager
async def bench(store: Store, config: ProbesConfig | None = None) -> AsyncIterator[Bench]:
    async with Collector(store) as collector:
        made = Bench(collector, config or ProbesConfig())
        running = asyncio.create_task(made.desk.run())
        try:
            yield made
        finally:
            running.cancel()
            await asyncio.wait([running])


async def ask(of: Bench, node: str = "n0", why: ProbeReason = CONFIRM, **more) -> str:
    return await asyncio.to_thread(lambda: of.desk.orders.ask(node, why, **more))


def figure(request: str, number: int, probe: str, gpu: int | None, value: float | None, **more) -> ProbeResult:
    base = ProbeResult(f"{request}/{number}", "n0", gpu, probe, T0, None, value, "x", request=request, device=H200)
    return replace(base, **more)


def closing(request: str, end: str = "done", **more) -> ProbeResult:
    base = ProbeResult(f"{request}/end", "n0", None, "", T0, None, None, "", request=request, end=end, device=H200)
    return replace(base, **more)


class Answers:
    """What an agent sends; its sequences go on."""

    def __init__(self, agent: Agent) -> None:
        self.agent, self.seq = agent, 0

    async def __call__(self, *results: ProbeResult) -> None:
        for result in results:
            self.seq += 1
            sent = pb.ProbeResult(request_id=result.request, json=to_json(result))
            await self.agent.send(record=pb.Record(seq=self.seq, probe_result=sent))


async def requested(agent: Agent) -> pb.ProbeRequest:
    return (await agent.read("probe_request")).probe_request


@in_loop
async def test_probes_that_a_node_ran_after_a_job_are_judged_although_nobody_asked(store: Store) -> None:
    """At most one in half a minute for each node; others are kept as figures."""
    async with bench(store) as at, at.collector.agent(hello()) as agent:
        answer = Answers(agent)
        await answer(figure("gate-1", 0, "sdc", 1, 1e6, ok=False, detail="bit 3"), closing("gate-1"))
        await until(lambda: len(store.probes.orders.versions("gate-1")) > 0, "its order")
        end = await at.ended("gate-1")
        assert (end.state, end.by, end.why, end.node) == ("done", "gate", ProbeReason.IDLE, "n0")
        assert [(v.gpu, v.passed) for v in at.verdicts if v.gpu is not None] == [(1, False)]
        judged = len(at.verdicts)
        await answer(closing("gate-2"), closing("other-3"))
        await until(lambda: "other-3" not in at.desk.orders.answered and not at.desk.orders._of_gates, "they came")
        assert [o.id for o in at.desk.orders.open_orders()] == []
        assert len(at.verdicts) == judged
        at.collector.now_ms -= 3_600_000  # the clock is set back: half a minute is not an hour and a half minute
        await answer(closing("gate-3"))
        await until(lambda: not at.desk.orders._of_gates and len(at.verdicts) > judged, "it is judged")


@in_loop
async def test_probes_refused_next_to_another_job_do_not_take_the_turn_of_those_after_that_one(store: Store) -> None:
    async with bench(store) as at, at.collector.agent(hello()) as agent:
        refused = closing("gate-1", "refused", detail="GPU 3: held by process 7")
        await Answers(agent)(refused, figure("gate-2", 0, "sdc", 1, 1e6, ok=False, detail="bit 3"), closing("gate-2"))
        versions = store.probes.orders.versions
        await until(lambda: versions("gate-1") or versions("gate-2"), "an order")
        assert not versions("gate-1")
        assert (await at.ended("gate-2")).state == "done"
        assert [(v.request, v.gpu, v.passed) for v in at.verdicts if v.gpu is not None] == [("gate-2", 1, False)]


@in_loop
async def test_an_order_is_sent_answered_and_judged(store: Store) -> None:
    async with bench(store) as at, at.collector.agent(hello()) as agent:
        answer = Answers(agent)
        order = await ask(at, gpus=[1, 0], probes=["sdc", "hbm_copy"], incident_id="i1")
        request = await requested(agent)
        assert (request.id, list(request.gpus), list(request.probes), request.level, request.timeout_s) == (
            order, [0, 1], ["sdc", "hbm_copy"], "quick", 600,
        )  # fmt: skip
        assert [o.state for o in store.probes.orders.versions(order)] == ["asked", "sent"]
        await answer(
            figure(order, 0, "sdc", 0, 1e6, ok=True), figure(order, 1, "sdc", 1, 1e6, ok=False, detail="bit 3"),
            figure(order, 2, "hbm_copy", 0, 4310.0), figure(order, 3, "hbm_copy", 1, 4290.0), closing(order),
        )  # fmt: skip
        end = await at.ended(order)
        assert (end.state, end.detail, end.incident_id, end.by) == ("done", "", "i1", "drover")
        assert [(v.gpu, v.passed, v.probe) for v in at.verdicts] == [
            (0, True, ""), (1, False, "sdc"), (None, False, "sdc"),
        ]  # fmt: skip
        assert at.verdicts[0].good == ("hbm_copy", "sdc")
        assert at.verdicts[1].text == "GPU 1 of n0: sdc gave a wrong answer (bit 3)"
        assert store.probes.verdicts.read("n0") == [at.verdicts[2], *at.verdicts[:2]]
        assert {v.incident_id for v in at.verdicts} == {"i1"}
        assert at.desk.orders.open_orders() == []


@in_loop
async def test_a_slow_gpu_fails_with_figure_and_expectation(store: Store) -> None:
    async with bench(store) as at, at.collector.agent(hello()) as agent:
        answer = Answers(agent)
        order = await ask(at)
        await requested(agent)
        slow = [figure(order, g, "hbm_copy", g, 3440.0 if g == 2 else 4300.0 + g, device=H200) for g in range(4)]
        await answer(*slow, closing(order))
        await at.ended(order)
        by_gpu = {v.gpu: v for v in at.verdicts}
        assert {gpu: v.passed for gpu, v in by_gpu.items()} == {0: True, 1: True, 2: False, 3: True, None: False}
        assert by_gpu[2].probe == "hbm_copy" and by_gpu[2].value == 3440.0
        assert by_gpu[2].expected == pytest.approx(4300, rel=0.01)


@pytest.mark.parametrize("why", [ProbeReason.VALIDATE, ProbeReason.REPAIRED, ProbeReason.PERSON])
@in_loop
async def test_a_node_that_came_up_with_a_gpu_fewer_does_not_pass_its_validation(
    store: Store, why: ProbeReason
) -> None:
    """A GPU that is off the bus at boot is none that its driver knows: the others are all there is, and are well.

    A person's order is what `drover validate` signs a node by.
    """
    async with bench(store) as at, at.collector.agent(hello()) as agent:
        answer, gpus = Answers(agent), index_of().spec.by_name["n0"].gpus
        for there, passed in ((gpus - 1, None), (gpus, True)):
            at.verdicts.clear()
            order = await ask(at, why=why)
            await requested(agent)
            figures = [figure(order, g, "sdc", g, 1e6, ok=True) for g in range(there)]
            await answer(*figures, closing(order))
            assert (await at.ended(order)).state == "done"
            sent = {v.gpu: v for v in at.verdicts}
            assert [sent[gpu].passed for gpu in range(there)] == [True] * there
            assert (len(sent), sent[None].passed) == (there + 1, passed)
            assert (f"its driver knows {there} of its {gpus} GPUs" in sent[None].text) is (passed is None)


@in_loop
async def test_the_same_open_order_is_not_asked_twice(store: Store) -> None:
    async with bench(store) as at:
        first = await ask(at, gpus=[1])
        assert await ask(at, gpus=[1]) == first
        assert await ask(at, gpus=[2]) != first
        assert await ask(at, why=ProbeReason.PERSON, gpus=[1], by="ann") != first
        assert next(o.id for o in at.desk.orders.open_orders()) == first


@in_loop
async def test_it_is_sent_again_after_a_reconnect_and_to_no_stream_twice(store: Store) -> None:
    async with bench(store) as at:
        order = await ask(at)
        async with at.collector.agent(hello()) as agent:
            assert (await requested(agent)).id == order
        async with at.collector.agent(hello()) as agent:
            assert (await requested(agent)).id == order
            second = await ask(at, level="standard")
            assert (await requested(agent)).id == second  # not the first one once more
            await Answers(agent)(closing(order, "refused", detail="GPU 0: held by python (12)"))
            end = await at.ended(order)
        assert (end.state, end.detail) == ("failed", "refused: GPU 0: held by python (12)")
        (verdict,) = at.verdicts
        assert (verdict.gpu, verdict.passed, verdict.probe) == (None, None, "")
        assert "GPU 0: held by python" in verdict.text


ENDS: dict[str, tuple[ProbeResult, list[tuple[int | None, bool | None]], str]] = {
    "hung in two tries": (
        closing("", "hung", probe="gemm_bf16", gpu=3, detail="nothing came for 34 s", tries=2),
        [(3, False), (None, False)], "failed",
    ),
    "hung once": (closing("", "hung", probe="gemm_bf16", gpu=3), [(3, None), (None, None)], "failed"),
    "crashed in two tries": (
        closing("", "crashed", probe="sdc", gpu=0, detail="CUDA error", tries=2), [(0, False), (None, False)], "failed",
    ),
    "crashed once": (closing("", "crashed", probe="sdc", gpu=0), [(0, None), (None, None)], "failed"),
    "lost": (closing("", "lost", probe="sdc", gpu=0), [(0, False), (None, False)], "failed"),
    "timeout": (closing("", "timeout", probe="sdc", gpu=0), [(0, None), (None, None)], "failed"),
    "memory": (closing("", "memory", probe="sdc", gpu=0), [(None, None)], "failed"),
    "stopped": (closing("", "stopped", detail="a job came"), [(None, None)], "failed"),
    "not_taken": (closing("", "not_taken"), [(None, None)], "failed"),
    "crashed, not known in what": (closing("", "crashed"), [(None, None)], "failed"),
    "a CPU": (closing("", device="cpu"), [(None, None)], "done"),
}  # fmt: skip


@in_loop
async def test_how_it_ends_is_no_word_on_the_hardware_unless_it_is(store: Store) -> None:
    async with bench(store) as at, at.collector.agent(hello()) as agent:
        answer = Answers(agent)
        for case, (end, expected, state) in ENDS.items():
            at.verdicts.clear()
            order = await ask(at)
            assert (await requested(agent)).id == order, case
            await answer(replace(end, id=f"{order}/end", request=order))
            assert (await at.ended(order)).state == state, case
            assert [(v.gpu, v.passed) for v in at.verdicts] == expected, case


@in_loop
async def test_a_node_that_is_not_there_or_never_answers(store: Store) -> None:
    config = ProbesConfig(wait_s=60)
    async with bench(store, config) as at:
        away = await ask(at, "n1")
        async with at.collector.agent(hello()) as agent:
            sent = await ask(at)
            await requested(agent)
            at.collector.now_ms += 60_000
            assert (await at.ended(away)).detail == "expired: not sent within 60 s, n1 has no stream"
            assert at.state(sent) == "sent"
            at.collector.now_ms += 1_800_000
            assert (await at.ended(sent)).detail == "expired: no answer within 1800 s"
        assert [(v.node, v.gpu, v.passed) for v in at.verdicts] == [("n1", None, None), ("n0", None, None)]


@in_loop
async def test_no_more_than_the_bound_are_under_way(store: Store) -> None:
    async with bench(store, ProbesConfig(most_per_rack=1)) as at, at.collector.agent(hello()) as agent:
        first = await ask(at, gpus=[0])
        second = await ask(at, gpus=[1])
        assert (await requested(agent)).id == first
        at.collector.now_ms += 900_000
        assert at.state(second) == "asked"
        await Answers(agent)(closing(first, "refused"))
        assert (await requested(agent)).id == second


@in_loop
async def test_drover_sends_nothing_of_its_own_to_a_node_that_a_job_has_come_to(store: Store) -> None:
    async with bench(store) as at, at.collector.agent(hello()) as agent:
        at.held = {"n0"}
        end = await at.ended(await ask(at))
        assert (end.state, end.detail) == ("failed", "given up: a job runs on n0 by now")
        assert [(v.gpu, v.passed) for v in at.verdicts] == [(None, None)]
        asked = await ask(at, why=ProbeReason.PERSON)
        assert (await requested(agent)).id == asked  # the first that is sent


@in_loop
async def test_results_that_lay_about_for_hours_prove_nothing(store: Store) -> None:
    async with bench(store) as at, at.collector.agent(hello()) as agent:
        order = await ask(at, gpus=[0])
        await requested(agent)
        at.leading = False  # nobody judges meanwhile
        await Answers(agent)(figure(order, 1, "sdc", 0, 1e6, ok=False), closing(order))
        await until(lambda: len(at.collector.probes) == 2)
        at.collector.now_ms += 6 * 3_600_000
        at.leading = True
        assert (await at.ended(order)).state == "failed"
        assert [(v.gpu, v.passed) for v in at.verdicts] == [(None, None)]


@in_loop
async def test_after_a_restart_what_was_answered_meanwhile_is_judged(store: Store) -> None:
    async with Collector(store) as collector, collector.agent(hello()) as agent:
        old = Bench(collector, ProbesConfig())
        order = await ask(old)
        waits = await ask(old, "n1")
        await Answers(agent)(closing(order, "refused"))  # the desk no longer runs
        await until(lambda: collector.probes)
        new = Bench(collector, ProbesConfig())
        running = asyncio.create_task(new.desk.run())
        try:
            assert (await new.ended(order)).state == "failed"
            assert [o.id for o in new.desk.orders.open_orders()] == [waits]
            assert len(new.verdicts) == 1
        finally:
            running.cancel()
            await asyncio.wait([running])


@in_loop
async def test_one_that_does_not_lead_sends_and_ends_nothing(store: Store) -> None:
    async with bench(store, ProbesConfig(wait_s=60)) as at, at.collector.agent(hello()) as agent:
        order = await ask(at)
        away = await ask(at, "n1")
        at.leading = False
        await requested(agent)
        await Answers(agent)(closing(order))
        at.collector.now_ms += 100_000
        await until(lambda: at.collector.probes)
        third = await ask(at, gpus=[2])
        assert (await requested(agent)).id == third  # a look later
        assert (at.state(order), at.state(away), at.verdicts) == ("sent", "asked", [])


WRONG: dict[str, Callable[[ProbeOrderService], str]] = {
    "no node is called 'n9'": lambda desk: desk.orders.ask("n9", CONFIRM),
    "n0 has no GPU 4; its slots are 0 to 3": lambda desk: desk.orders.ask("n0", CONFIRM, gpus=[4]),
    "no level is called 'fast'": lambda desk: desk.orders.ask("n0", CONFIRM, level="fast"),
    "no probe is called 'rm'": lambda desk: desk.orders.ask("n0", CONFIRM, probes=["rm"]),
}


@pytest.mark.parametrize("text", list(WRONG))
def test_what_cannot_be_asked(text: str) -> None:
    class NoStore:
        shared = False

    index: FleetIndex = index_of()
    nowhere: Any = NoStore()  # it must not be asked
    desk = ProbeOrderService(
        nowhere,
        index,
        ProbesConfig(),
        NodeAccess(stream=lambda _: None),
        ProbeRuntime(leading=lambda: True, now_ms=lambda: T0),
    )
    with pytest.raises(ValueError, match=text):
        WRONG[text](desk)

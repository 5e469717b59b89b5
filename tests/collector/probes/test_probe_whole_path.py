"""A fault of a GPU through all of it: order, stream, results, store, verdict, incident, health.

What the node answers is what its probe service sends in that case (tests/agent/probes/test_probe_faults.py has the
service's side); ingest, store, desk, judgement, engine and policy are the real ones.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest

from drover_collector.actions.settings import ActConfig
from drover_collector.app import make_probes
from drover_collector.detectors._lib.examples import training_bucket
from drover_collector.fleet.buckets import BUCKET_MS
from drover_collector.notify import Outbox
from drover_collector.pipeline.pipeline import Pipeline, PipelineOptions
from drover_collector.policy.policy import Policy
from drover_collector.probes.settings import ProbesConfig
from drover_collector.store import ProbeRow, Store
from drover_core.model.events import (
    Health,
    IncidentKind,
    ProbeReason,
    ProbeResult,
    RecommendedAction,
    Severity,
    to_json,
)
from drover_core.model.probe_figures import FIGURES
from drover_proto import telemetry_pb2 as pb
from testbed.fleets import GPUS, hello, index_of
from testbed.ingest import Agent, Collector
from testbed.loop import in_loop
from testbed.probed import KEY
from testbed.waiting import until

NODES, BAD = 8, 2  # the slot of the faulty one, on n0
USUAL = {"gemm_bf16": 789.0, "hbm_copy": 4302.0, "pcie_h2d": 55.4, "pcie_d2h": 55.1}
SPREAD = 0.004
HOUR_MS = 3_600_000
INVENTORY = {"driver_version": KEY.driver, "host.product": KEY.host} | {
    f"gpu{slot}.{key}": value
    for slot in range(GPUS)
    for key, value in {
        "model": KEY.sku, "power_limit_set_w": "700", "ecc_mode": "on", "mig_mode": "off", "pcie_generation_max": "5",
        "pcie_width_max": "16", "serial": f"S0-{slot}",
    }.items()
}  # fmt: skip


def healthy(node: str, request: str, ts_ms: int, seed: int) -> list[ProbeResult]:
    draw = np.random.default_rng(1000 + seed)
    base = ProbeResult("", node, None, "", ts_ms, None, None, "", request=request, level="quick", device=KEY.sku)
    found = [
        replace(
            base, gpu=gpu, probe=probe, value=usual * float(np.exp(draw.normal(0, SPREAD))), spread=0.002, repeats=9
        )
        for probe, usual in USUAL.items()
        for gpu in range(GPUS)
    ]
    found += [replace(base, gpu=gpu, probe="sdc", value=400.0, ok=True) for gpu in range(GPUS)]
    return [
        replace(r, id=f"{request}/{number}", unit=FIGURES[r.probe].unit) for number, r in enumerate(found)
    ] + [replace(base, id=f"{request}/end", end="done")]  # fmt: skip


def one(probe: str, **more: object) -> Callable[[list[ProbeResult]], list[ProbeResult]]:
    return lambda results: [
        replace(r, **more) if (r.probe, r.gpu) == (probe, BAD) else r  # type: ignore[arg-type]  # any fields
        for r in results
    ]


def times(probe: str, factor: float) -> Callable[[list[ProbeResult]], list[ProbeResult]]:
    return lambda results: [
        replace(r, value=r.value * factor) if r.value is not None and (r.probe, r.gpu) == (probe, BAD) else r
        for r in results
    ]


def ended(end: str, detail: str, probe: str = "", **more: object) -> Callable[[list[ProbeResult]], list[ProbeResult]]:
    """Nothing but how it ended."""
    return lambda results: [replace(results[-1], end=end, detail=detail, probe=probe, **more)]  # type: ignore[arg-type]  # any


@dataclass(frozen=True)
class Case:
    """`proves`: kind and cause of the incident; None: no word against any hardware."""

    answer: Callable[[list[ProbeResult]], list[ProbeResult]]
    proves: tuple[IncidentKind, str] | None
    text: str
    state: str = "done"


STRAGGLER, LINK, SDC, HANG = IncidentKind.STRAGGLER, IncidentKind.LINK, IncidentKind.SDC, IncidentKind.HANG
CASES = {
    "5 % slow": Case(times("hbm_copy", 0.95), (STRAGGLER, "hbm"), "% below the 32 boards of its configuration"),
    "a link at half width": Case(times("pcie_h2d", 0.5), (LINK, "pcie"), "% below the 32 boards of its configuration"),
    "a flipped bit": Case(
        one("sdc", ok=False, detail="fp16 3072: 1 of 1000000 products differ from the first"),
        (SDC, "wrong_results"), "sdc gave a wrong answer (fp16 3072: 1 of 1000000 products",
    ),
    "hung in two tries": Case(
        ended("hung", "probe hung: gemm_bf16, GPU 2: bf16 8192", "gemm_bf16", gpu=BAD, tries=2),
        (HANG, "probe_hung"), "gemm_bf16 hung in two tries", "failed",
    ),
    "hung once": Case(
        ended("hung", "probe hung: gemm_bf16, GPU 2: bf16 8192", "gemm_bf16", gpu=BAD), None,
        "once is no proof", "failed",
    ),
    "killed for memory": Case(
        ended("memory", "the probe's process was killed by SIGKILL during sdc; perhaps the kernel was out of memory"),
        None, "memory: the probe's process was killed", "failed",
    ),
    "a job arrives": Case(
        ended("stopped", "gave way during sdc, GPU 2: held by process 812 (python, ann)", "sdc", gpu=BAD),
        None, "stopped: gave way during sdc", "failed",
    ),
    "nothing": Case(lambda results: results, None, "GPUs give what their configuration gives"),
}  # fmt: skip


class Site:
    def __init__(self, collector: Collector) -> None:
        self.collector, self.store = collector, collector.store
        self.pipeline = Pipeline(
            collector.index, self.store, Policy.load(), Outbox(self.store, [], "http://127.0.0.1:8501"),
            PipelineOptions(lag_ms=7000,
            now_ms=lambda: collector.now_ms),
        )  # fmt: skip
        self.probes = make_probes(self.pipeline, ProbesConfig(), ActConfig(), collector.ingest.stream)
        self.probes.service.runtime.poll_s = 0.02
        collector.on_probes = self.probes.service.orders.take_results

    async def order(self) -> str:
        return await asyncio.to_thread(lambda: self.probes.service.orders.ask("n0", ProbeReason.PERSON, by="ann"))

    async def over(self, order: str) -> str:
        await until(lambda: self.store.probes.orders.versions(order)[-1].state in ("done", "failed"), "the order's end")
        return self.store.probes.orders.versions(order)[-1].state

    def health(self) -> list[Health]:
        return [self.pipeline.engine.health_of("n0", gpu)[0] for gpu in range(GPUS)]


@contextlib.asynccontextmanager
async def site(store: Store) -> AsyncIterator[Site]:
    """A fleet whose other nodes were probed within the hour."""
    async with Collector(store, index=index_of(NODES)) as collector:
        for n in range(1, NODES):
            results = healthy(f"n{n}", f"before-{n}", collector.now_ms - HOUR_MS, n)
            rows = [ProbeRow(r, KEY, f"S{n}-{r.gpu}", "", r.ts_ms) for r in results]
            await asyncio.to_thread(store.probes.results.write, rows)
        made = Site(collector)
        await made.pipeline.start()
        start_ms = collector.now_ms // BUCKET_MS * BUCKET_MS - BUCKET_MS
        bucket = training_bucket(collector.index, 0, start_ms=start_ms)  # all report, no job runs any more
        await asyncio.to_thread(
            made.pipeline.judge_bucket, replace(bucket, jobs=np.full_like(bucket.jobs, -1), job_names=())
        )
        running = asyncio.create_task(made.probes.service.run())
        try:
            yield made
        finally:
            running.cancel()
            await asyncio.wait([running])
            await made.pipeline.stop()


async def send(agent: Agent, results: list[ProbeResult], before: int = 0) -> None:
    """`before`: how many records the agent has sent already."""
    for seq, result in enumerate(results, before + 1):
        body = pb.ProbeResult(request_id=result.request, json=to_json(result))
        await agent.send(record=pb.Record(seq=seq, probe_result=body))


@in_loop
async def test_what_proves_nothing_is_no_word_against_any_gpu(store: Store) -> None:
    async with site(store) as at, at.collector.agent(hello(inventory=INVENTORY)) as agent:
        sent = 0
        for name, case in CASES.items():
            if case.proves is not None:
                continue
            order = await at.order()
            request = (await agent.read("probe_request")).probe_request
            assert request.id == order, name
            results = case.answer(healthy("n0", request.id, at.collector.now_ms, 0))
            await send(agent, results, sent)
            sent += len(results)
            assert await at.over(order) == case.state, name
            verdicts = {v.gpu: v for v in store.probes.verdicts.read(request=order)}
            assert any(case.text in v.text for v in verdicts.values()), [v.text for v in verdicts.values()]
            assert list(at.pipeline.incidents.values()) == [], name
            assert at.health() == [Health.HEALTHY] * GPUS, name
            assert not [v for v in verdicts.values() if v.passed is False], name
            assert verdicts[None].passed is (True if case.state == "done" else None), name


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.proves is not None])
@in_loop
async def test_each_fault_ends_in_the_right_verdict_and_state(store: Store, name: str) -> None:
    case = CASES[name]
    async with site(store) as at, at.collector.agent(hello(inventory=INVENTORY)) as agent:
        order = await at.order()
        request = (await agent.read("probe_request")).probe_request
        await send(agent, case.answer(healthy("n0", request.id, at.collector.now_ms, 0)))
        assert await at.over(order) == case.state
        verdicts = {v.gpu: v for v in store.probes.verdicts.read(request=order)}
        assert any(case.text in v.text for v in verdicts.values()), [v.text for v in verdicts.values()]
        incidents = list(at.pipeline.incidents.values())
        assert verdicts[BAD].passed is False
        assert {gpu for gpu, v in verdicts.items() if v.passed is False} == {BAD, None}
        (incident,) = incidents
        assert ((incident.kind, incident.cause), incident.node, incident.gpu) == (case.proves, "n0", BAD)
        assert (incident.severity, incident.action) == (Severity.CRITICAL, RecommendedAction.DRAIN)
        assert at.health() == [Health.CONFIRMED if gpu == BAD else Health.HEALTHY for gpu in range(GPUS)]
        assert [i.id for i in store.incidents.newest()] == [incident.id], "and it is stored"


@in_loop
async def test_a_node_that_never_answers_is_no_verdict_and_stays_unchanged(store: Store) -> None:
    async with site(store) as at, at.collector.agent(hello(inventory=INVENTORY)) as agent:
        order = await at.order()
        await agent.read("probe_request")
        at.collector.now_ms += 2 * HOUR_MS
        assert await at.over(order) == "failed"
        (verdict,) = store.probes.verdicts.read(request=order)
        assert verdict.passed is None
        assert "no answer within" in verdict.text
        assert list(at.pipeline.incidents.values()) == []
        assert at.health() == [Health.HEALTHY] * GPUS

"""The Fleet service with a real store and the real desk of probes; nodes that answer as agents do, where one wants."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import cast

import grpc

from drover_collector.api.service import FleetApi
from drover_collector.api.snapshot import ApiSnapshot, OptionalParts
from drover_collector.config import CollectorConfig
from drover_collector.fleet.index import FleetIndex
from drover_collector.ingest.stats import IngestStats
from drover_collector.pipeline.pipeline import Pipeline
from drover_collector.probes.context import NodeAccess, ProbeRuntime
from drover_collector.probes.service import ProbeOrderService
from drover_collector.probes.settings import ProbesConfig
from drover_collector.store import ProbeRow, Store
from drover_core.model.events import ProbeResult
from drover_proto import telemetry_pb2 as pb
from testbed.probed import KEY

Answer = Callable[[pb.ProbeRequest], list[ProbeResult]]


@dataclass
class ServedProbes:
    address: str
    facts: ApiSnapshot
    store: Store
    desk: ProbeOrderService


class Node:
    """The stream of an agent that has the answer to a request at once, and stores it as ingest does."""

    def __init__(self, store: Store, now_ms: Callable[[], int], answer: Answer) -> None:
        self.store, self.now_ms, self.answer = store, now_ms, answer
        self.desk: ProbeOrderService | None = None

    async def send(self, message: pb.CollectorMessage) -> None:
        request, now_ms = message.probe_request, self.now_ms()
        results = [replace(r, request=request.id, ts_ms=now_ms) for r in self.answer(request)]
        rows = [ProbeRow(r, KEY, "" if r.gpu is None else f"{r.node}-{r.gpu}", "", now_ms) for r in results]
        await asyncio.to_thread(self.store.probes.results.write, rows)
        assert self.desk is not None
        self.desk.orders.take_results(results)


@contextlib.asynccontextmanager
async def serving(
    store: Store,
    index: FleetIndex,
    now_ms: Callable[[], int],
    answers: Mapping[str, Answer] | None = None,
    config: ProbesConfig | None = None,
) -> AsyncIterator[ServedProbes]:
    """`answers`: of nodes that have a stream; with any, orders are sent and judged."""
    nodes = {name: Node(store, now_ms, answer) for name, answer in (answers or {}).items()}
    pipeline = cast(Pipeline, SimpleNamespace(index=index, store=store, now_ms=now_ms))
    desk = ProbeOrderService(
        store,
        index,
        config or ProbesConfig(),
        NodeAccess(stream=nodes.get, address=lambda _: "192.0.2.1"),
        ProbeRuntime(leading=lambda: True, now_ms=now_ms, poll_s=0.05),
    )
    for node in nodes.values():
        node.desk = desk
    facts = ApiSnapshot(pipeline, IngestStats(), CollectorConfig(), parts=OptionalParts(desk))
    api = FleetApi(facts)
    server = grpc.aio.server()
    api.add_to(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    running = asyncio.create_task(desk.run()) if nodes else None
    try:
        yield ServedProbes(f"127.0.0.1:{port}", facts, store, desk)
    finally:
        if running is not None:
            running.cancel()
            await asyncio.wait([running])
        await server.stop(0)
        api.close()

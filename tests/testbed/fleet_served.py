"""The Fleet API over a real store and a fleet of four nodes."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import grpc
import numpy as np

from drover_collector.api.service import FleetApi
from drover_collector.api.snapshot import ApiSnapshot
from drover_collector.config import CollectorConfig
from drover_collector.fleet.buckets import BUCKET_MS
from drover_collector.ingest.stats import IngestStats
from drover_collector.notify import Outbox, OutboxOptions, Webhook
from drover_collector.notify.base import ReceiverOptions
from drover_collector.pipeline.pipeline import Pipeline, PipelineOptions
from drover_collector.policy.policy import Policy
from drover_collector.store import Store
from drover_core.model.events import (
    Absence,
    Event,
    EventKind,
    Holding,
    Incident,
    Severity,
)
from drover_proto.fleet_pb2_grpc import FleetStub
from testbed.collected import small_index, write_entities, write_ticks

T0 = 1_800_000_000_000
END = T0 + 60_000
NOW = END + 8000

Check = Callable[["Served"], Awaitable[None]]


class Served:
    def __init__(
        self, stub: FleetStub, pipeline: Pipeline, facts: ApiSnapshot, store: Store, address: str = ""
    ) -> None:
        self.stub = stub
        self.address = address
        self.pipeline = pipeline
        self.facts = facts
        self.store = store

    @property
    def incident(self) -> Incident:
        (found,) = [i for i in self.pipeline.incidents.values() if i.cause == "xid_79"]
        return found

    async def refused(self, call: Awaitable[object]) -> tuple[grpc.StatusCode, str]:
        try:
            await call
        except grpc.aio.AioRpcError as error:
            return error.code(), error.details() or ""
        raise AssertionError("answered")


XID = Event(
    "n1/s/1", T0 + 31_000, "n1", 1, EventKind.XID, "79", "GPU has fallen off the bus.", "kmsg", received_ms=T0 + 31_050
)


@contextlib.asynccontextmanager
async def served(store: Store) -> AsyncIterator[Served]:
    """Four nodes of two GPUs in two racks: one GPU of n1 with XID 79, n3 has never reported, a warmer GPU on n2."""
    index = small_index()
    write_entities(store, index)
    write_ticks(
        store, index, T0, END, silent=["n3"],
        changed={("n2", 0): {"gpu_temp_c": 64.0}, ("n0", 1): {"memory_temp_c": np.nan}},
    )  # fmt: skip
    store.absences.write([Absence("n0", 1, "memory_temp_c", "unsupported", T0)])
    store.jobs.write_holdings(
        [Holding("n0", slot, "train", T0) for slot in (0, 1)] + [Holding("n2", 0, "train", T0 + 500)]
    )
    store.inventories.write_one("n0", T0, {"driver": "570.1", "kernel": "6.1"})
    store.events.write([XID])
    hook = Webhook(ReceiverOptions("ops", Severity.WARNING, 1), "http://127.0.0.1:9/", bytes(32))
    outbox = Outbox(store, [hook], "http://console", OutboxOptions(delays_s=(3600,) * 7), now_ms=lambda: NOW)
    now = [T0]
    pipeline = Pipeline(index, store, Policy.load(), outbox, PipelineOptions(lag_ms=7000, now_ms=lambda: now[0]))
    for start in range(T0, END, BUCKET_MS):
        if start <= XID.ts_ms < start + BUCKET_MS:
            now[0] = XID.ts_ms + 50
            pipeline.take_events([XID])
            pipeline.judge_events()
        now[0] = start + BUCKET_MS + 7000
        pipeline.judge_bucket(store.buckets.read(index, start))
    now[0] = NOW
    stats = IngestStats()
    facts = ApiSnapshot(pipeline, stats, CollectorConfig())
    api = FleetApi(facts)
    server = grpc.aio.server()
    api.add_to(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield Served(FleetStub(channel), pipeline, facts, store, f"127.0.0.1:{port}")
    finally:
        await server.stop(0)
        api.close()
        await pipeline.stop()


Against = Callable[[Check], None]

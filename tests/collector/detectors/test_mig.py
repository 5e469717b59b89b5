"""Rows of MIG instances: in the store as things of their own, and in no answer about the whole GPU."""

from __future__ import annotations

import pytest

from drover_collector.store import Store
from drover_proto import telemetry_pb2 as pb
from testbed.fleets import T0, batch, block, gpu_key, hello, index_of
from testbed.ingest import LIVE, Collector
from testbed.loop import in_loop

UUID = "MIG-00000000-0000-5000-8000-000000000000"
WHOLE = [(T0 + 1000, 1, (300.0, 50.0)), (T0 + 2000, 1, (310.0, 51.0)), (T0 + 2000, 2, (200.0, 40.0))]
PARTS = [(T0 + 1000, 9, (7.0, 99.0)), (T0 + 2000, 9, (8.0, 98.0))]


@in_loop
@pytest.mark.parametrize("with_parts", [False, True])
async def test_rows_of_instances_change_no_answer_about_the_gpu(store: Store, with_parts: bool) -> None:
    message = hello()
    message.entities.add(index=9, scope=pb.GPU, key=UUID, gpu=0, uuid=UUID, mig=UUID)
    async with Collector(store) as collector, collector.agent(message) as agent:
        await agent.send(batch=batch(1, block(WHOLE + (PARTS if with_parts else []))))
        await agent.until_held(LIVE, 1)
        assert agent.rejected == {}
    bucket = store.buckets.read(index_of(), T0)
    assert bucket.gpu["power_w"][:2].tolist() == [300.0, 200.0]  # the lower median of two
    assert bucket.gpu_rows[:2].tolist() == [2, 1]
    assert store.samples.latest_gpu(index_of(), "gpu_temp_c", T0 + 3000)[:2].tolist() == [51.0, 40.0]
    assert [row.key for row in store.entities.gpus_of("n0")] == [
        gpu_key(0, slot) for slot in range(2)
    ]  # those with rows
    held = store.clients.rows(
        "SELECT count() AS n FROM gpu_samples WHERE entity_id = {id:UInt64}",
        {"id": store.entities.gpu_id(f"{UUID}/{UUID}", "n0", index_of().near("n0"))},
    )
    assert held == [{"n": 2 if with_parts else 0}]
    assert [row.mig for row in store.entities.of_node("n0") if row.mig] == ([UUID] if with_parts else [])

"""A fleet of hosts only, such as service nodes: nothing to judge about GPUs, and no detector stumbles over that."""

from __future__ import annotations

import numpy as np

from drover_collector.engine.engine import LAG_MS, Engine
from drover_collector.fleet.buckets import BUCKET_MS, Bucket
from drover_collector.fleet.index import FleetIndex
from drover_collector.policy.policy import Policy
from drover_core.model.events import Health
from drover_core.model.fleet import FleetSpec, NodeSpec


def test_hosts_without_gpus_are_watched() -> None:
    engine = Engine(FleetIndex(FleetSpec((NodeSpec("a", gpus=0), NodeSpec("b", gpus=0)))), Policy.load(), 0)
    none = np.zeros(0, np.int32)
    for tick in range(22):
        rows = np.array([10, 10 if tick < 4 else 0], np.int32)
        values = np.where(rows > 0, 1.0, np.nan)
        bucket = Bucket(tick * BUCKET_MS, BUCKET_MS, {}, {"load1": values}, none, rows, none)
        engine.on_bucket(bucket, bucket.end_ms + LAG_MS)
    assert engine.errors == {}
    assert [(i.kind, i.node) for i in engine.incidents.values()] == [("liveness", "b")]
    assert engine.health_of("a")[0] is Health.HEALTHY
    assert engine.health_of("b")[0] is Health.UNKNOWN

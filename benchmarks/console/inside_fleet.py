"""`drover-collector run`, with a fleet whose telemetry is made inside.

12,500 agents do not fit on the machine that the browser and the console run on. So a thread of the collector's own
process stores what they would have sent, every 5 s the last 5 s of every GPU and node at 1 Hz, with METRICS of the
catalog's 51 columns. Nothing else differs from the real one: store, buckets, detectors, incidents, health, Fleet API.
The thread is called `inside` in /proc, so that its CPU can be split from the rest. SIGUSR1 has it write how often each
question of the Fleet API was asked so far into the file CALLS names in the environment; SIGUSR2 stops the writing, and
has it go on.

    CALLS=calls.json python -m console.inside_fleet run --config collector.toml
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from drover_collector import app
from drover_collector import main as collector
from drover_collector.api.service import FleetApi
from drover_collector.pipeline.pipeline import Pipeline
from drover_collector.store import EntityRow, SampleBatch, entity_id
from drover_core.metrics.catalog import BY_NAME, Scope
from drover_core.model.events import Event, EventKind, Holding

EVERY_S = 5  # as agents send
# Levels of a training fleet at work, and how far they move within 1 s and between GPUs (shares of the level).
METRICS = {
    "power_w": (620.0, 0.03), "gpu_temp_c": (62.0, 0.04), "memory_temp_c": (71.0, 0.04), "sm_clock_mhz": (1755.0, 0.01),
    "gpu_util_ratio": (0.97, 0.01), "sm_active_ratio": (0.82, 0.03), "tensor_active_ratio": (0.46, 0.04),
    "power_limit_w": (700.0, 0.0),
}  # fmt: skip
NODE_METRICS = {"cpu_util_ratio": (0.31, 0.05), "inlet_temp_c": (24.0, 0.02)}
JOB_NODES = 64
SILENT = 40  # nodes that do not report
FAULTY = 160  # GPUs of as many nodes with an XID, after the first look
CODES = ("79", "48", "64", "94", "119", "31", "13", "74")
JUDGED_MS = 25_000  # after so long the fleet's first buckets are judged, and events find their jobs


hushed = threading.Event()
calls: Counter[str] = Counter()  # by the question's type


def count_calls() -> None:
    answer = FleetApi._answer

    async def counted(self: FleetApi, rpc: Any, request: Any, context: Any) -> Any:
        calls[rpc.method.name] += 1
        return await answer(self, rpc, request, context)

    FleetApi._answer = counted  # type: ignore[method-assign]  # to look on


def write_calls(*_: Any) -> None:
    path = Path(os.environ["CALLS"])
    path.with_suffix(".part").write_text(json.dumps(calls))
    path.with_suffix(".part").rename(path)


def hush(*_: Any) -> None:
    (hushed.clear if hushed.is_set() else hushed.set)()


class Inside(Pipeline):
    """The real pipeline, and the thread that stores the fleet's telemetry while this one leads."""

    async def run(self) -> None:
        over = threading.Event()
        threading.Thread(target=self._send, args=(over,), name="inside", daemon=True).start()
        try:
            await super().run()
        finally:
            over.set()

    def _send(self, over: threading.Event) -> None:
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text("inside")
        ids = self._introduce()
        draw = np.random.default_rng(8)
        written_s, faults_written, began_ms = int(time.time()), False, self.now_ms()
        while not over.wait(max(0.0, written_s + EVERY_S - time.time())):
            for scope, metrics in ((Scope.GPU, METRICS), (Scope.NODE, NODE_METRICS)) if not hushed.is_set() else ():
                self.store.samples.write(_batch(scope, ids[scope], metrics, written_s, draw))
            written_s += EVERY_S
            if not faults_written and self.now_ms() - began_ms > JUDGED_MS:
                faults_written = True
                self._fail()

    def _introduce(self) -> dict[Scope, npt.NDArray[np.uint64]]:
        """Who is where and holds what; gives the ids of those that will report."""
        nodes = self.index.nodes[: len(self.index.nodes) - SILENT]
        rows = [EntityRow(entity_id(Scope.NODE, n.name), Scope.NODE, n.name, n.name, None) for n in nodes]
        holdings = []
        for number, node in enumerate(nodes):
            for slot in range(node.gpus):
                key = f"SN-{node.name}-{slot}"
                id_ = self.store.entities.gpu_id(key, node.name, self.index.near(node.name))
                rows.append(EntityRow(id_, Scope.GPU, key, node.name, slot, f"GPU-{key}", key))
                if number % 10:  # nine of ten nodes are held
                    holdings.append(Holding(node.name, slot, f"job{number // JOB_NODES:04d}", self.now_ms()))
        self.store.entities.write(rows)
        self.store.jobs.write_holdings(holdings)
        return {
            scope: np.array([row.entity_id for row in rows if row.scope is scope], np.uint64)
            for scope in (Scope.GPU, Scope.NODE)
        }

    def _fail(self) -> None:
        now_ms, apart = self.now_ms(), max(1, (len(self.index.nodes) - SILENT) // FAULTY)
        events = [
            Event(
                f"inside/{k}", now_ms, self.index.nodes[k * apart].name, k % 8, EventKind.XID, CODES[k % len(CODES)],
                f"NVRM: Xid (PCI:0000:3b:00): {CODES[k % len(CODES)]}, pid=4711, name=python", "kmsg",
            )
            for k in range(min(FAULTY, len(self.index.nodes) - SILENT))
        ]  # fmt: skip
        self.store.events.write(events)
        self.take_events(events)


def _batch(
    scope: Scope,
    ids: npt.NDArray[np.uint64],
    metrics: dict[str, tuple[float, float]],
    from_s: int,
    draw: np.random.Generator,
) -> SampleBatch:
    """EVERY_S seconds of all, a row each."""
    rows = EVERY_S * len(ids)
    own = np.tile((np.arange(len(ids)) * 7919 % 101) / 50 - 1, EVERY_S)  # -1..1, of each its own
    columns = {}
    for name, (level, spread) in metrics.items():
        noise = draw.standard_normal(rows, np.float32)
        columns[name] = np.minimum(level * (1 + spread * (own + 0.3 * noise)), BY_NAME[name].high)
    ts_ms = np.repeat(1000 * (from_s + np.arange(EVERY_S)), len(ids)).astype(np.int64)
    return SampleBatch.of_values(scope, np.tile(ids, EVERY_S), ts_ms, columns)


if __name__ == "__main__":
    vars(app)["Pipeline"] = Inside  # the only change to what the real command does
    count_calls()
    signal.signal(signal.SIGUSR1, write_calls)
    signal.signal(signal.SIGUSR2, hush)
    sys.exit(collector.main())

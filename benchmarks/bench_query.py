"""How long what the console asks takes, at 1,000 and 100,000 GPUs: this store against VictoriaMetrics, the same data.

A day of 100,000 GPUs and 51 metrics cannot be loaded here. So each question meets the rows that it reads, and a fleet
of series around them, the same in both: every GPU has METRICS at 1 Hz for the newest seconds (--seconds), one rack for
an hour, one node for a day. Not in either: the other columns (ours reads none that is not asked for; VictoriaMetrics'
index of series would be 17 times as large) and the fleet's older hours. Rollups are made by the collector's own way.

Ours is asked through the Fleet API over gRPC, as the console asks, without its one second's cache; VictoriaMetrics over
HTTP (Debian's, in a temporary folder), until the answer's last byte, without its cache, and nothing is parsed. Its
questions: the fleet now: an instant query of one metric; node and rack: query_range of the metric at our step; an
incident's window: query_range of each metric of the GPU, and `quantiles` over its job. Prints one JSON line; ratios are
ours / theirs. `floor_ms` is what ours costs without an answer: a call that is refused at once, a statement of nothing.

A rack's hour, a node's day and an incident's window are asked again for the same moments 30 days before (`..._30d`). A
month of one GPU is asked of this store only (`month_ms`, goal 300): its values of 5 min are written as `roll_up` writes
them, as raw rows of a month would take an hour to roll up.

The newest seconds are written last, as in a fleet that runs: of 1,000 GPUs they are held in memory (`store.recent`), of
100,000 they are not.

    python benchmarks/bench_query.py [--gpus 1000 100000] [--seconds 30] [--rounds 15]
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlencode

import grpc
import numpy as np
import numpy.typing as npt
from bench_bytes import Victoria, victoria

from drover_collector.api import fleet as api_fleet
from drover_collector.api import snapshot as api_facts
from drover_collector.api.service import FleetApi
from drover_collector.fleet.index import FleetIndex
from drover_collector.store import EntityRow, SampleBatch, Store
from drover_collector.store.samples.fold import Folded
from drover_collector.store.samples.rows import LEVELS_MS
from drover_core.metrics.catalog import BY_NAME, Scope
from drover_core.model.events import Holding
from drover_core.model.fleet import FleetSpec, NodeSpec
from drover_proto import fleet_pb2 as pb
from drover_proto.fleet_pb2_grpc import FleetStub

END_MS = 1_790_002_800_000  # a full hour
METRICS = ("power_w", "gpu_temp_c", "sm_active_ratio")
GPUS = 8  # of a node
RACK = 9  # nodes of a rack: 72 GPUs
NODE_MS, RACK_MS, WINDOW_MS = 86_400_000, 3_600_000, 1_800_000
BACK_MS = 30 * 86_400_000
MONTH_GOAL_MS = 300
GOALS = {"fleet_now": 0.3, **dict.fromkeys(("rack_hour", "node_day", "incident_window"), 1.0)}
SLICE_MS = 600_000  # loaded at once
LINES = 5_000  # series of one import

Floats = npt.NDArray[np.float64]


def index_of(gpus: int) -> FleetIndex:
    nodes = (
        NodeSpec(f"node{n:05d}", f"rack{n // RACK:04d}", "leaf", "pool", "H100", GPUS, ()) for n in range(gpus // GPUS)
    )
    return FleetIndex(FleetSpec(tuple(nodes)))


def values(metric: str, gpus: npt.NDArray[np.intp], ts_ms: npt.NDArray[np.int64]) -> Floats:
    """[len(gpus), len(ts_ms)] in the resolution that is stored: each GPU its own level, a slow wave and noise."""
    level = {"power_w": 500.0, "gpu_temp_c": 60.0, "sm_active_ratio": 0.8}[metric]
    noise = np.random.default_rng(int(ts_ms[0]) ^ len(metric) ^ int(gpus[0])).normal(0, 0.02, (len(gpus), len(ts_ms)))
    wave = 1 + 0.1 * np.sin(ts_ms / 60_000 + (gpus % 97)[:, None]) + noise
    step = BY_NAME[metric].step or 1
    found: Floats = np.rint(level * (0.8 + (gpus % 13)[:, None] / 40) * wave / step) * step
    return np.minimum(found, BY_NAME[metric].high)


class Both:
    """The same samples into both."""

    def __init__(self, index: FleetIndex, store: Store, vm: Victoria) -> None:
        self.index, self.store, self.vm = index, store, vm
        members = [index.member(g) for g in range(index.gpu_count)]
        self.ids = np.array([store.entities.gpu_id(f"{n}/{g}", n, index.near(n)) for n, g in members], np.uint64)
        first = END_MS - BACK_MS - NODE_MS
        store.entities.write(
            [
                EntityRow(int(key), Scope.GPU, f"{n}/{g}", n, g, first_ms=first, last_ms=first)
                for key, (n, g) in zip(self.ids, members, strict=True)
            ]
        )
        rack = index.rack[index.gpu_node]
        store.jobs.write_holdings(
            [
                Holding(node=n, gpu=g, job=f"job{r}", from_ms=first)
                for (n, g), r in zip(members, rack.tolist(), strict=True)
            ]
        )
        self.labels = [
            {
                "instance": f"{n}:9400",
                "Hostname": n,
                "gpu": str(g),
                "UUID": f"GPU-{key:016x}",
                "rack": f"r{r}",
                "job": "d",
            }
            for key, (n, g), r in zip(self.ids.tolist(), members, rack.tolist(), strict=True)
        ]

    def load(self, gpus: npt.NDArray[np.intp], from_ms: int, to_ms: int) -> int:
        """[from_ms, to_ms) at 1 Hz; gives how many values."""
        count = 0
        for low in range(from_ms, to_ms, SLICE_MS):
            ts = np.arange(low, min(low + SLICE_MS, to_ms), 1000)
            drawn = {metric: values(metric, gpus, ts) for metric in METRICS}
            flat = {metric: drawn[metric].ravel() for metric in METRICS}
            ids, times = np.repeat(self.ids[gpus], len(ts)), np.tile(ts, len(gpus))
            self.store.samples.write(SampleBatch.of_values(Scope.GPU, ids, times, flat))
            for metric in METRICS:
                self._import(metric, gpus, ts, drawn[metric])
            count += len(METRICS) * len(times)
        return count

    def _import(self, metric: str, gpus: npt.NDArray[np.intp], ts: npt.NDArray[np.int64], drawn: Floats) -> None:
        times = json.dumps(ts.tolist())
        digits = 1 if metric == "power_w" else 4
        for at in range(0, len(gpus), LINES):
            lines = []
            for row, gpu in enumerate(gpus[at : at + LINES].tolist(), at):
                name = json.dumps({"__name__": metric, **self.labels[gpu]})
                found = json.dumps(np.round(drawn[row], digits).tolist())
                lines.append(f'{{"metric":{name},"values":{found},"timestamps":{times}}}')
            self.vm.ask("/api/v1/import", "\n".join(lines).encode())


@contextmanager
def fleet_api(index: FleetIndex, store: Store) -> Iterator[FleetStub]:
    """The API that consoles ask, on loopback, without what it keeps for a second."""
    pipeline: Any = SimpleNamespace(index=index, store=store, now_ms=lambda: END_MS, incidents={})
    facts = api_facts.ApiSnapshot(pipeline, SimpleNamespace(), SimpleNamespace())  # type: ignore[arg-type]  # what is asked needs no more
    jobs, order = store.jobs.at(index, END_MS), api_fleet.layout_order(index)
    # No cache but of what is kept for long: the order, and for 5 s the jobs, which nobody watches move.
    api_facts.ApiSnapshot.once = lambda _self, key, _s, make: order if key == "order" else make()  # type: ignore[method-assign, assignment]  # its arguments have other names
    facts.jobs = lambda: jobs  # type: ignore[method-assign]  # see above
    ready, loop = threading.Event(), asyncio.new_event_loop()
    ports: list[int] = []
    done = asyncio.Event()

    async def serve() -> None:
        server = grpc.aio.server()
        api = FleetApi(facts)
        api.add_to(server)
        ports.append(server.add_insecure_port("127.0.0.1:0"))
        await server.start()
        ready.set()
        await done.wait()
        await server.stop(None)
        api.close()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    ready.wait(30)
    try:
        with grpc.insecure_channel(f"127.0.0.1:{ports[0]}") as channel:
            yield FleetStub(channel)
    finally:
        loop.call_soon_threadsafe(done.set)
        thread.join()
        loop.close()


def ours(api: FleetStub, node: str) -> dict[str, Callable[[], tuple[int, int]]]:
    """Question -> ask it: (bytes of the answer, its step in ms)."""
    now, back = _ours(api, node, END_MS), _ours(api, node, END_MS - BACK_MS)
    now["fleet_now"] = lambda: (api.GetPicture(pb.PictureRequest(color_by="power_w"), timeout=120).ByteSize(), 0)
    return now | {f"{name}_30d": ask for name, ask in back.items()}


def _ours(api: FleetStub, node: str, end_ms: int) -> dict[str, Callable[[], tuple[int, int]]]:
    index_node = int(node.removeprefix("node"))
    rack = index_node // RACK * RACK
    racks = [(f"node{n:05d}", g) for n in range(rack, rack + RACK) for g in range(GPUS)]
    eight = [(node, g) for g in range(GPUS)]

    def series(targets: list[tuple[str, int]], span_ms: int, metrics: tuple[str, ...], *, peers: bool = False) -> Any:
        request = pb.SeriesRequest(
            scope="gpu", metrics=metrics, from_ms=end_ms - span_ms, to_ms=end_ms, max_points=1000, with_peers=peers
        )
        request.targets.extend(pb.SeriesTarget(node=n, gpu=g) for n, g in targets)
        return api.QuerySeries(request, timeout=120)

    def size(reply: Any) -> tuple[int, int]:
        return reply.ByteSize(), reply.step_ms

    return {
        "node_day": lambda: size(series(eight, NODE_MS, ("power_w",))),
        "rack_hour": lambda: size(series(racks, RACK_MS, ("power_w",))),
        "incident_window": lambda: size(series(eight[:1], WINDOW_MS, METRICS, peers=True)),
    }


def theirs(vm: Victoria, index: FleetIndex, node: str, steps: dict[str, int]) -> dict[str, Callable[[], int]]:
    connection = http.client.HTTPConnection("127.0.0.1", vm.port, timeout=120)
    rack = f"r{index.rack[index.node_number[node]]}"
    one = f'Hostname="{node}",gpu="0"'

    def ask(path: str, **given: object) -> int:
        connection.request("GET", f"/api/v1/{path}?{urlencode({**given, 'nocache': 1})}")
        answer = connection.getresponse()
        body = answer.read()
        if answer.status != 200 or b'"result":[]' in body[:200]:
            raise RuntimeError(f"victoria-metrics: {answer.status} {body[:300]!r}")
        return len(body)

    def questions(end_ms: int, suffix: str) -> dict[str, Callable[[], int]]:
        def line(query: str, span_ms: int, question: str) -> int:
            return ask(
                "query_range", query=query, start=(end_ms - span_ms) / 1000, end=(end_ms - 1000) / 1000,
                step=f"{steps[question + suffix]}ms",
            )  # fmt: skip

        def window() -> int:
            found = 0
            for metric in METRICS:
                found += line(f"{metric}{{{one}}}", WINDOW_MS, "incident_window")
                found += line(f'quantiles("q", 0.1, 0.5, 0.9, {metric}{{rack="{rack}"}})', WINDOW_MS, "incident_window")
            return found

        return {
            f"node_day{suffix}": lambda: line(f'power_w{{Hostname="{node}"}}', NODE_MS, "node_day"),
            f"rack_hour{suffix}": lambda: line(f'power_w{{rack="{rack}"}}', RACK_MS, "rack_hour"),
            f"incident_window{suffix}": window,
        }

    return {
        "fleet_now": lambda: ask("query", query="power_w", time=(END_MS - 1000) / 1000),
        **questions(END_MS, ""),
        **questions(END_MS - BACK_MS, "_30d"),
    }


def timed(rounds: int, pairs: dict[str, tuple[Callable[[], Any], Callable[[], Any]]]) -> dict[str, dict[str, Any]]:
    """The two asked in turn, so that what else this machine does hurts both."""
    found: dict[str, dict[str, Any]] = {}
    for name, (mine, other) in pairs.items():
        took: tuple[list[float], list[float]] = ([], [])
        mine(), other()
        for _ in range(rounds):
            for ask, into in ((mine, took[0]), (other, took[1])):
                began = time.perf_counter()
                ask()
                into.append((time.perf_counter() - began) * 1000)
        (p50, p95), (p50_vm, p95_vm) = ((statistics.median(t), float(np.quantile(t, 0.95))) for t in took)
        found[name] = {
            "ms": {"p50": round(p50, 1), "p95": round(p95, 1)},
            "vm_ms": {"p50": round(p50_vm, 1), "p95": round(p95_vm, 1)},
            "ratio_p50": round(p50 / p50_vm, 3),
            "ratio_p95": round(p95 / p95_vm, 3),
        }
        goal = GOALS[name.removesuffix("_30d")]
        found[name] |= {"goal_p50": goal, "met": p50 / p50_vm <= goal}
    return found


def month(api: FleetStub, index: FleetIndex, store: Store, node: str, rounds: int) -> dict[str, Any]:
    """How long a month of one GPU takes: `METRICS` in one answer, and one of them."""
    key = store.entities.gpu_id(f"{node}/0", node, index.near(node))
    ts = np.arange(END_MS - BACK_MS, END_MS - NODE_MS, LEVELS_MS["5m"])
    gpu = np.array([index.gpu(node, 0)])
    flat = {metric: values(metric, gpu, ts)[0] for metric in METRICS}
    batch = SampleBatch.of_values(Scope.GPU, np.full(len(ts), key, np.uint64), ts, flat)
    counted = np.full(len(ts), 300)
    store.rollups._write(Scope.GPU, "5m", Folded(batch.entity_id, ts, counted, counted * 3, batch.columns), 1)
    found: dict[str, Any] = {"goal_ms": MONTH_GOAL_MS}
    for name, metrics in (("one_metric_ms", METRICS[:1]), ("three_metrics_ms", METRICS)):
        request = pb.SeriesRequest(
            scope="gpu", metrics=metrics, from_ms=END_MS - BACK_MS, to_ms=END_MS, max_points=1000
        )
        request.targets.add(node=node, gpu=0)
        took = []
        for _ in range(rounds + 1):
            began = time.perf_counter()
            reply = api.QuerySeries(request, timeout=120)
            took.append((time.perf_counter() - began) * 1000)
        values_held = np.isfinite(np.frombuffer(reply.series[0].values, "<f4")).sum()
        if values_held < 0.99 * len(reply.ts_ms) / 8:
            raise RuntimeError(f"a month has {values_held} values in {len(reply.ts_ms) // 8} steps")
        found |= {name: round(statistics.median(took[1:]), 1), "step_ms": reply.step_ms}
    return found


def floors(api: FleetStub, store: Store, rounds: int) -> dict[str, float]:
    def refused() -> None:
        try:
            api.QuerySeries(pb.SeriesRequest(), timeout=120)
        except grpc.RpcError:
            return
        raise RuntimeError("a question about nothing was answered")

    nothing = "SELECT entity_id FROM gpu_samples PREWHERE entity_id = 0"
    asks: dict[str, Callable[[], object]] = {"call": refused, "statement": lambda: store.clients.arrow(nothing)}
    found = {}
    for name, ask in asks.items():
        took = []
        for _ in range(rounds + 1):
            began = time.perf_counter()
            ask()
            took.append((time.perf_counter() - began) * 1000)
        found[name] = round(statistics.median(took[1:]), 2)
    return found


def run(gpus: int, seconds: int, rounds: int) -> dict[str, Any]:
    index = index_of(gpus)
    folder = tempfile.mkdtemp(prefix="drover-bench-query-")
    try:
        store = Store.open(f"chdb://{folder}/store", retention_days=3650)
        try:
            with victoria() as vm, fleet_api_after(index, store, vm, seconds) as (api, loaded, node):
                asked = ours(api, node)
                answers = {name: ask() for name, ask in asked.items()}
                steps = {name: step for name, (_, step) in answers.items() if step}
                other = theirs(vm, index, node, steps)
                pairs = {name: (asked[name], other[name]) for name in asked}
                sizes = {name: [answers[name][0], other[name]()] for name in asked}
                return {
                    "floor_ms": floors(api, store, rounds),
                    "month_of_a_gpu": month(api, index, store, node, rounds),
                    "samples": loaded, "series": index.gpu_count * len(METRICS), "steps_ms": steps,
                    "answer_bytes_ours_vm": sizes, **timed(rounds, pairs),
                }  # fmt: skip
        finally:
            store.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def fleet_api_after(
    index: FleetIndex, store: Store, vm: Victoria, seconds: int
) -> Iterator[tuple[FleetStub, int, str]]:
    """The API once all is loaded and rolled up; how many values; the node that is asked for."""
    both = Both(index, store, vm)
    began = time.perf_counter()
    node = index.node_count // 2 // RACK * RACK
    eight = np.arange(node * GPUS, (node + 1) * GPUS)
    others = np.arange((node + 1) * GPUS, (node + RACK) * GPUS)
    newest, back = END_MS - seconds * 1000, END_MS - BACK_MS
    loaded = both.load(eight, back - NODE_MS, back) + both.load(others, back - RACK_MS, back)
    loaded += both.load(eight, END_MS - NODE_MS, newest) + both.load(others, END_MS - RACK_MS, newest)
    for part in np.array_split(np.arange(index.gpu_count), max(1, index.gpu_count // 20_000)):
        loaded += both.load(part, newest, END_MS)
    vm.ask("/internal/force_flush")
    store.buckets.read_closing(index, END_MS - 20_000)  # the newest bucket is not rolled up yet
    store.rollups.roll_up()
    while store.rollups.roll_up_late(60):
        pass
    print(f"{index.gpu_count} GPUs: {loaded} values in {time.perf_counter() - began:.0f} s", file=sys.stderr)
    with fleet_api(index, store) as api:
        yield api, loaded, index.nodes[node].name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, nargs="+", default=[1000, 100_000])
    parser.add_argument("--seconds", type=int, default=30, help="of all GPUs, at 1 Hz")
    parser.add_argument("--rounds", type=int, default=15)
    given = parser.parse_args()
    print(
        json.dumps(
            {
                "benchmark": "query",
                "seconds": given.seconds,
                "metrics": len(METRICS),
                "rounds": given.rounds,
                "loaded": "both: all GPUs for the seconds; a rack's hour, a node's day, also 30 d back; 3 of 51",
                "gpus": {str(gpus): run(gpus, given.seconds, given.rounds) for gpus in given.gpus},
            }
        )
    )


if __name__ == "__main__":
    main()

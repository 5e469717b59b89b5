"""CPU of one 10 s tick: all detectors, incidents and health, over 100,000 GPUs in training. Prints one JSON line.

    python benchmarks/bench_tick.py [--nodes 12500] [--ticks 12] [--profile DETECTOR] [--worst [PART]]

The buckets lie in memory, as the store gives them; reading them is bench_ingest.py's matter. Faults are among them: a
share of the nodes is silent, and some GPUs are slow, hot or without ECC, so that findings cost what they cost.
`--worst`: fleets in which everything of one sort is wrong at once, one after the other (WORST).
"""

from __future__ import annotations

import argparse
import cProfile
import dataclasses
import json
import os
import pstats
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from drover_collector.detectors import DETECTORS
from drover_collector.detectors._lib.examples import START_MS, port_columns, training_columns
from drover_collector.engine.engine import LAG_MS, Engine
from drover_collector.fleet.buckets import BUCKET_MS, Bucket
from drover_collector.fleet.index import FleetIndex
from drover_collector.policy.policy import Policy
from drover_core.metrics.catalog import Scope, of_scope
from drover_core.model.events import Event, EventKind
from drover_core.model.fleet import FleetSpec, LinkSpec, NodeSpec

GPUS = 8
NODES_PER_RACK = 8
NODES_PER_LEAF = 32
JOB_NODES = (1, 2, 4, 8, 16, 64, 256)  # sizes of jobs, in turn
FAULTS = 40  # of each kind
WARM_TICKS = 4

Held = tuple[npt.NDArray[np.int32], tuple[str, ...]]


def fleet(nodes: int) -> FleetIndex:
    ports = tuple(LinkSpec(f"mlx5_{p}", p) for p in range(GPUS))
    return FleetIndex(
        FleetSpec(
            tuple(
                NodeSpec(
                    f"n{n:05d}", f"r{n // NODES_PER_RACK:04d}", f"l{n // NODES_PER_LEAF:03d}", "train", "H100", GPUS,
                    ports,
                )
                for n in range(nodes)
            )
        )
    )  # fmt: skip


def jobs(index: FleetIndex) -> Held:
    of_node = np.full(index.node_count, -1, np.int32)
    at = job = 0
    while at < 0.95 * index.node_count:  # the rest is free
        size = JOB_NODES[job % len(JOB_NODES)]
        of_node[at : at + size] = job
        at, job = at + size, job + 1
    return of_node[index.gpu_node], tuple(f"job{n}" for n in range(job))


def bucket(
    index: FleetIndex, number: int, held: tuple[np.ndarray[tuple[int], np.dtype[np.int32]], tuple[str, ...]]
) -> Bucket:
    gpu, node = training_columns(index, number)
    for metric in of_scope(Scope.GPU):  # all columns of the catalog, as a real fleet sends them
        gpu.setdefault(metric.name, np.full(index.gpu_count, max(0.0, float(metric.low))))
    gpu["sm_clock_mhz"][:FAULTS] *= 0.8
    gpu["gpu_temp_c"][FAULTS : 2 * FAULTS] += 25
    gpu["row_remap_failed"][2 * FAULTS : 3 * FAULTS] = 1
    rows = np.full(index.node_count, 10, np.int32)
    if number > WARM_TICKS:
        rows[-FAULTS:] = 0
    gpu_rows = rows[index.gpu_node]
    for column in gpu.values():
        column[gpu_rows == 0] = np.nan
    links = port_columns(index)
    links["tx_bytes"] = np.full(len(index.ports), number * 4e10)
    return Bucket(START_MS + number * BUCKET_MS, BUCKET_MS, gpu, node, gpu_rows, rows, held[0], held[1], links)


def send_inventories(engine: Engine, index: FleetIndex) -> float:
    """CPU seconds that the inventories of all nodes took, as at a start."""
    gpu = {"model": "NVIDIA H100", "vbios": "96.00.A5.00.01", "ecc_mode": "on", "power_limit_set_w": "700"}
    facts = {"driver_version": "570.172.08", "host.kernel": "5.15.0-1071-nvidia"}
    facts |= {f"gpu{slot}.{key}": value for slot in range(GPUS) for key, value in gpu.items()}
    odd = facts | {"driver_version": "535.54.03", "gpu3.ecc_mode": "off"}
    began = time.process_time()
    for n, node in enumerate(index.nodes):
        engine.on_inventory(node.name, odd if n < 5 else facts, START_MS - 600_000)
    return time.process_time() - began


def _all_memory(number: int, made: Bucket) -> Bucket:
    """Every GPU: all states of the driver, all counters growing, rows and corrected errors too."""
    grown = np.full(len(made.gpu_rows), 10_000.0 * number)
    names = ("ecc_dram_uncorrected", "ecc_sram_uncorrected", "ecc_dram_corrected", "remapped_rows_corrected")
    states = ("row_remap_failed", "row_remap_pending", "sram_threshold_exceeded")
    return _with(made, dict.fromkeys(names, grown) | dict.fromkeys(states, np.ones(len(grown))))


def _some_memory(number: int, made: Bucket) -> Bucket:
    """As many GPUs as are still listed one by one."""
    pending = (np.arange(len(made.gpu_rows)) % 100 < 9).astype(float)
    return _with(made, {"row_remap_pending": pending, "ecc_dram_uncorrected": pending * number})


def _all_hot(number: int, made: Bucket) -> Bucket:
    count = len(made.gpu_rows)
    held = np.full(count, number * BUCKET_MS * 500.0)
    hot = made.gpu["gpu_temp_c"] + 40
    return _with(
        made, {"thermal_margin_c": np.full(count, -5.0), "throttle_thermal_sw_us": held, "gpu_temp_c": hot}
    )  # fmt: skip


def _all_ports(number: int, made: Bucket) -> Bucket:
    """Every port goes down and comes back, again and again, and counts errors."""
    count = len(made.link["link_up"])
    flaps = {"link_up": float(number % 2), "symbol_errors": 1e3 * number, "link_downed": float(number // 2)}
    return dataclasses.replace(made, link={**made.link, **{name: np.full(count, v) for name, v in flaps.items()}})


def _lost_links(number: int, made: Bucket) -> Bucket:
    """A GPU of every second node has fewer NVLinks and lanes, and repeats."""
    few = np.where(np.arange(len(made.gpu_rows)) % 16 == 0, 0.5, 1.0)
    columns = {name: made.gpu[name] * few for name in ("nvlink_active_links", "pcie_width")}
    return _with(made, columns | {"pcie_replays": (1 - few) * 2000 * number})


def _many_slow(_number: int, made: Bucket) -> Bucket:
    """A GPU in a hundred is slow, and its job waits for it."""
    slow = np.arange(len(made.gpu_rows)) % 100 == 50
    duty = {name: np.where(slow, 1.0, 0.8) * made.gpu[name] for name in ("sm_active_ratio", "tensor_active_ratio")}
    clock = np.where(slow, 0.7, 1.0) * made.gpu["sm_clock_mhz"]
    return _with(made, duty | {"sm_clock_mhz": clock, "power_limit_w": np.where(slow, 450.0, 700.0)})


def _all_idle(number: int, made: Bucket) -> Bucket:
    none, length = np.zeros(len(made.gpu_rows)), 600_000
    rests = _with(made, {"gpu_util_ratio": none, "power_w": none + 90.0})
    return dataclasses.replace(rests, start_ms=START_MS + number * length, length_ms=length)


def _many_silent(number: int, made: Bucket) -> Bucket:
    """Two in five nodes: more is the collector's own trouble, and one finding."""
    away = (np.arange(len(made.node_rows)) % 5 < 2) & (number > WARM_TICKS)
    rows = np.where(away, 0, made.node_rows).astype(np.int32)
    of_gpu = np.repeat(rows, len(made.gpu_rows) // len(rows))
    return dataclasses.replace(made, node_rows=rows, gpu_rows=of_gpu)


def _with(made: Bucket, columns: dict[str, npt.NDArray[np.float64]]) -> Bucket:
    return dataclasses.replace(made, gpu={**made.gpu, **columns})


WORST: dict[str, Callable[[int, Bucket], Bucket]] = {
    "all GPUs have memory errors": _all_memory, "9 in 100 GPUs have memory errors": _some_memory,
    "all GPUs too hot": _all_hot, "all ports flap": _all_ports, "a GPU of each second node lost links": _lost_links,
    "a GPU in 100 is slow": _many_slow, "all held GPUs idle": _all_idle, "two in five nodes silent": _many_silent,
    "all nodes drifted": lambda _number, made: made,
}  # fmt: skip


def worst(nodes: int, ticks: int, part: str) -> dict[str, dict[str, float]]:
    """Case -> CPU seconds of the worst tick: of the detectors, of the dearest one, of all with incidents and health."""
    index = fleet(nodes)
    held = jobs(index)
    result: dict[str, dict[str, float]] = {}
    for name, change in WORST.items():
        if part not in name:
            continue
        engine = Engine(index, Policy.named("nvidia"), START_MS)
        if "drifted" in name:
            for n, node in enumerate(index.nodes):
                facts = {f"gpu{slot}.power_limit_set_w": str(600 if n % 19 == 0 else 700) for slot in range(GPUS)}
                engine.on_inventory(node.name, facts | {"driver_version": f"570.{n % 40}"}, START_MS - 600_000)
        whole = detecting = dearest_s = 0.0
        dearest = ""
        for number in range(ticks):
            made = change(number, bucket(index, number, held))
            before, began = dict(engine.seconds), time.process_time()
            engine.on_bucket(made, made.end_ms + LAG_MS)
            whole = max(whole, time.process_time() - began)
            spent = {d: s - before[d] for d, s in engine.seconds.items()}
            detecting = max(detecting, sum(spent.values()))
            for d, s in spent.items():
                dearest, dearest_s = max((dearest, dearest_s), (d, s), key=lambda item: item[1])
        result[name] = {
            "detectors": round(detecting, 2), dearest: round(dearest_s, 2), "tick": round(whole, 2),
            "open": sum(i.closed_ms is None for i in engine.incidents.values()),
        }  # fmt: skip
        failed = {n: t.latest for n, t in engine.errors.items()}
        print(name, result[name], failed or "", file=sys.stderr, flush=True)
    if part in STORM:
        result[STORM] = storm(index, held)
        print(STORM, result[STORM], file=sys.stderr, flush=True)
    return result


STORM = "800,000 XID lines"


def storm(index: FleetIndex, held: Held) -> dict[str, float]:
    """CPU seconds for the lines of 64 GPUs, as ingest hands them on, and of the tick after them."""
    engine = Engine(index, Policy.named("nvidia"), START_MS)
    made = bucket(index, 0, held)
    engine.on_bucket(made, made.end_ms + LAG_MS)
    codes = ("95", "31", "74", "45")
    events = [
        Event(f"e{k}", made.end_ms + k // 100, *index.member(k % 64), EventKind.XID, codes[k % 4], "")
        for k in range(800_000)
    ]
    began = time.process_time()
    for at in range(0, len(events), 5_000):
        engine.on_events(events[at : at + 5_000], events[at].ts_ms + 1_000)
    spent = time.process_time() - began
    made, began = bucket(index, 2, held), time.process_time()
    engine.on_bucket(made, made.end_ms + LAG_MS)
    after = time.process_time() - began
    return {"events": round(spent, 1), "xid": round(engine.seconds["xid"], 1), "tick": round(after, 1)}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=12_500, help="of 8 GPUs each")
    parser.add_argument("--ticks", type=int, default=12, help=f"in all; the first {WARM_TICKS} do not count")
    parser.add_argument("--profile", default="", metavar="DETECTOR", help="where its time goes, on stderr")
    parser.add_argument("--worst", nargs="?", const="", metavar="PART", help="the worst cases (whose name has PART)")
    args = parser.parse_args(argv)
    if args.worst is not None:
        found = worst(args.nodes, args.ticks, args.worst)
        print(
            json.dumps({"benchmark": "tick_worst", "gpus": args.nodes * GPUS, "cores": os.cpu_count(), "cpu_s": found})
        )
        return
    profile = cProfile.Profile()
    detectors = [
        dataclasses.replace(d, detect=partial(profile.runcall, d.detect))
        if d.name == args.profile else d
        for d in DETECTORS
    ]  # fmt: skip
    index = fleet(args.nodes)
    engine = Engine(index, Policy.named("nvidia"), START_MS, detectors)
    inventories_s = send_inventories(engine, index)
    held = jobs(index)
    ticks: list[float] = []
    seconds: dict[str, list[float]] = {d.name: [] for d in detectors}
    for number in range(args.ticks):
        made = bucket(index, number, held)
        before, began = dict(engine.seconds), time.process_time()
        engine.on_bucket(made, made.end_ms + LAG_MS)
        ticks.append(time.process_time() - began)
        for name in seconds:
            seconds[name].append(engine.seconds[name] - before[name])
    counted = ticks[WARM_TICKS:]
    if args.profile:
        pstats.Stats(profile, stream=sys.stderr).sort_stats("cumulative").print_stats(25)
    print(
        json.dumps(
            {
                "benchmark": "tick",
                "gpus": index.gpu_count,
                "cores": os.cpu_count(),
                "tick_cpu_s": {"median": round(float(np.median(counted)), 2), "max": round(max(counted), 2)},
                "first_tick_cpu_s": round(ticks[0], 2),
                "detectors_s": {n: round(float(np.median(v[WARM_TICKS:])), 3) for n, v in seconds.items()},
                "detectors_max_s": {n: round(max(v[WARM_TICKS:]), 3) for n, v in seconds.items()},
                "inventories_cpu_s": round(inventories_s, 2),
                "open_incidents": sum(i.closed_ms is None for i in engine.incidents.values()),
                "troubles": {name: trouble.latest for name, trouble in engine.errors.items()},
            }
        )
    )


if __name__ == "__main__":
    main()

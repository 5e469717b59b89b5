"""CPU of one 10 s tick: all detectors, incidents and health, over 100,000 GPUs in training. Prints one JSON line.

    python benchmarks/bench_tick.py [--nodes 12500] [--ticks 12] [--profile DETECTOR]

The buckets lie in memory, as the store gives them; reading them is bench_ingest.py's matter. Faults are among them: a
share of the nodes is silent, and some GPUs are slow, hot or without ECC, so that findings cost what they cost.
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
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from drover_collector.buckets import BUCKET_MS, Bucket
from drover_collector.detectors import DETECTORS
from drover_collector.detectors.example import START_MS, port_columns, training_columns
from drover_collector.engine import LAG_MS, Engine
from drover_collector.fleet_index import FleetIndex
from drover_collector.policy import Policy
from drover_proto.catalog import Scope, of_scope
from drover_proto.fleet import FleetSpec, LinkSpec, NodeSpec

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
    for metric in of_scope(Scope.GPU):  # all columns of the catalog, as a real fleet tells them
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
    return Bucket(
        START_MS + number * BUCKET_MS, BUCKET_MS, gpu, node, gpu_rows, rows, held[0], held[1], port_columns(index)
    )  # fmt: skip


def tell_inventories(engine: Engine, index: FleetIndex) -> float:
    """CPU seconds that the inventories of all nodes took, as at a start."""
    gpu = {"model": "NVIDIA H100", "vbios": "96.00.A5.00.01", "ecc_mode": "on", "power_limit_set_w": "700"}
    facts = {"driver_version": "570.172.08", "host.kernel": "5.15.0-1071-nvidia"}
    facts |= {f"gpu{slot}.{key}": value for slot in range(GPUS) for key, value in gpu.items()}
    odd = facts | {"driver_version": "535.54.03", "gpu3.ecc_mode": "off"}
    began = time.process_time()
    for n, node in enumerate(index.nodes):
        engine.on_inventory(node.name, odd if n < 5 else facts, START_MS - 600_000)
    return time.process_time() - began


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=12_500, help="of 8 GPUs each")
    parser.add_argument("--ticks", type=int, default=12, help=f"in all; the first {WARM_TICKS} do not count")
    parser.add_argument("--profile", default="", metavar="DETECTOR", help="where its time goes, on stderr")
    args = parser.parse_args(argv)
    profile = cProfile.Profile()
    detectors = [
        dataclasses.replace(d, detect=lambda w, s, t, _d=d.detect: profile.runcall(_d, w, s, t))
        if d.name == args.profile else d
        for d in DETECTORS
    ]  # fmt: skip
    index = fleet(args.nodes)
    engine = Engine(index, Policy.named("nvidia"), START_MS, detectors)
    inventories_s = tell_inventories(engine, index)
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
                "troubles": {name: trouble.newest for name, trouble in engine.troubles.items()},
            }
        )
    )


if __name__ == "__main__":
    main()

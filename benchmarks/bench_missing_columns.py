"""What each detector gives up where metrics, sensors or records are missing: measured on fleets of generator A.

Each fleet is written once as a case, and replayed whole and without one group of what it records after the other.
Prints one JSON line, and writes docs/evidence/missing_columns.md (`--no-write`: not).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shutil
import sys
import tempfile
import textwrap
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from detection_run import each_fleet

from drover_cli.case.read import Case, read_case, read_jsonl
from drover_cli.scoring.score import found_of, label_of, score
from drover_collector.detectors.links.congestion import METRICS as CONGESTION
from drover_collector.engine.replay import Replay
from drover_collector.fleet.buckets import Bucket
from drover_collector.policy.policy import Policy
from drover_core.model.events import Incident
from drover_core.model.reports import incident_report
from drover_simulator.strangers import a

PAGE = Path(__file__).parents[1] / "docs/evidence/missing_columns.md"
KINDS = ("straggler", "hang", "thermal", "memory", "link", "xid", "liveness", "drift", "idle")
TRAFFIC = frozenset(f"{way}_{end}_bytes_per_s" for way in ("nvlink", "pcie") for end in ("rx", "tx"))
WHOLE = "nothing"
# What is taken away -> columns; a word in capitals is no column.
GROUPS: Mapping[str, frozenset[str]] = {
    WHOLE: frozenset(),
    "names of jobs": frozenset({"JOBS"}),
    "inlet temperatures": frozenset({"inlet_temp_c"}),
    "all values of nodes": frozenset({"NODE"}),
    "SM, tensor and HBM activity": frozenset({"sm_active_ratio", "tensor_active_ratio", "dram_active_ratio"}),
    "NVLink and PCIe traffic": TRAFFIC,
    "activity and traffic": TRAFFIC | {"sm_active_ratio", "tensor_active_ratio", "dram_active_ratio"},
    "throttle times and reasons": frozenset({"clock_event_reasons", "throttle_power_us", "throttle_thermal_sw_us",
                                             "throttle_thermal_hw_us", "throttle_brake_us"}),
    "core temperatures and margins": frozenset({"gpu_temp_c", "thermal_margin_c"}),
    "HBM temperatures": frozenset({"memory_temp_c"}),
    "power": frozenset({"power_w"}),
    "power limits": frozenset({"power_limit_w"}),
    "utilisation": frozenset({"gpu_util_ratio"}),
    "SM clocks": frozenset({"sm_clock_mhz"}),
    "network ports": frozenset({"LINK"}),
    "counters of congestion": frozenset(CONGESTION),
    "inventory": frozenset({"INVENTORY"}),
    "kernel log and other events": frozenset({"EVENTS"}),
}  # fmt: skip


def without(case: Case, gone: frozenset[str]) -> Iterator[Bucket]:
    """Yield the buckets of a case without these columns."""
    for bucket in case.buckets():
        gpu, node, link = (
            {name: of[name] for name in of if name not in gone} for of in (bucket.gpu, bucket.node, bucket.link)
        )
        parts: dict[str, Any] = {
            "gpu": gpu,
            "node": {} if "NODE" in gone else node,
            "link": {} if "LINK" in gone else link,
        }
        if "JOBS" in gone:
            parts |= {"jobs": np.full_like(bucket.jobs, -1), "job_names": ()}
        yield replace(bucket, **parts)


def play(seed: int, nodes: int | None) -> dict[str, dict[str, Any]]:
    """Return what was taken away -> kinds (faults, found), reported, false, false drains."""
    scratch = Path(tempfile.mkdtemp(prefix="missing-"))
    try:
        a.write_case(scratch / "case", seed, nodes=nodes)
        labels = [label_of(row) for _, row in read_jsonl(scratch / "case/labels.jsonl")]
        result = {}
        for name, gone in GROUPS.items():
            case = read_case(scratch / "case")
            inventories = [] if "INVENTORY" in gone else case.inventories
            events = [] if "EVENTS" in gone else case.events
            replay = Replay(case.index, without(case, gone), events, Policy.named("nvidia"), inventories)
            incidents: dict[str, Incident] = {}
            for outcome in replay:
                incidents.update((i.id, i) for i in outcome.incidents if i.scope != "fleet")
            if replay.engine is not None and replay.engine.errors:
                raise RuntimeError(f"detectors failed without {name}: {replay.engine.errors}")
            found = score(labels, [found_of(incident_report(i)) for i in incidents.values()], 1.0)
            result[name] = {
                "kinds": {kind: (of.faults, of.found) for kind, of in found.kinds.items()},
                "reported": found.matched + found.duplicates, "false": len(found.false),
                "false_drains": len(found.false_drains),
            }  # fmt: skip
        return result
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _play(seed: int, nodes: int | None) -> Any:
    try:
        return play(seed, nodes)
    except Exception as error:  # noqa: BLE001  # it is printed, and the fleet counts as missing
        return f"a {seed}: {type(error).__name__}: {error}"


def page(sums: Mapping[str, Mapping[str, Any]], args: argparse.Namespace) -> str:
    intro = (
        f"Made by `benchmarks/bench_missing_columns.py` on {time.strftime('%Y-%m-%d', time.gmtime())}, {args.fleets} "
        f"fleets of [generator A](../explanation/simulation.md), seeds {args.first_seed} to "
        f"{args.first_seed + args.fleets - 1}; do not edit. Each fleet was replayed whole, and once without each of "
        "these. Whole is not complete: the generator leaves some of it out by itself, jobs and inlets most of all. "
        "Cells are faults found; the first row has their number too."
    )
    lines = ["# What is missed without some metrics", "", textwrap.fill(intro, 100), ""]
    lines += [
        f"| Without | {' | '.join(KINDS)} | All | False warnings | False drains |",
        "| --- |" + " --- |" * (len(KINDS) + 3),
    ]
    for name, row in sums.items():
        cells = [f"{found} of {faults}" if name == WHOLE else str(found) for faults, found in row["kinds"].values()]
        lines.append(f"| {name} | {' | '.join(cells)} | {row['found']} | {row['false']} | {row['false_drains']} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fleets", type=int, default=12)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--nodes", type=int, help="of each fleet, instead of what the seed draws")
    parser.add_argument("--processes", type=int, default=multiprocessing.cpu_count())
    parser.add_argument("--no-write", action="store_true", help="leave docs/evidence/missing_columns.md unchanged")
    args = parser.parse_args()
    kinds: dict[str, dict[str, Counter[str]]] = {name: defaultdict(Counter) for name in GROUPS}
    counts: dict[str, Counter[str]] = {name: Counter() for name in GROUPS}
    failed: list[str] = []
    seeds = range(args.first_seed, args.first_seed + args.fleets)
    for played in each_fleet(partial(_play, nodes=args.nodes), seeds, args.processes, failed):
        for name, row in played.items():
            for kind, (faults, found) in row["kinds"].items():
                kinds[name][kind] += Counter(faults=faults, found=found)
            counts[name] += Counter({key: row[key] for key in ("reported", "false", "false_drains")})
    if failed:
        sys.exit(f"{len(failed)} fleets could not be played.")
    sums = {
        name: {
            "kinds": {kind: (kinds[name][kind]["faults"], kinds[name][kind]["found"]) for kind in KINDS},
            "found": sum(of["found"] for of in kinds[name].values()),
            **{key: counts[name][key] for key in ("reported", "false", "false_drains")},
        }
        for name in GROUPS
    }  # fmt: skip
    if not args.no_write:
        PAGE.write_text(page(sums, args), encoding="utf-8")
    print(json.dumps({"benchmark": "missing_columns", "fleets": args.fleets, "without": sums}))


if __name__ == "__main__":
    main()

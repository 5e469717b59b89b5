"""`drover policy backtest` on a week of a 64-node fleet: seconds, and the table that a person decides on.

The week is the adversary's simulation (docs/explanation/simulation.md) at a sample a minute, judged by the detectors
unchanged; its incidents, jobs and ground truth are a case, as an export is one. Making it takes minutes and is not
timed; the backtest is, as the command that an operator gives. Prints one JSON line; `--table` prints its table
first, `--case` keeps the case there, or takes the one that is there.

The rates are a bad week's: Llama 3's fleet had half a fault in 1,000 GPU-days (docs/explanation/simulation.md).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

from detection_run import buckets

from drover_collector.engine.engine import LAG_MS, Engine
from drover_collector.fleet.index import FleetIndex
from drover_collector.policy.policy import Policy
from drover_core.model.events import Event, Incident
from drover_core.model.fleet import dump_json
from drover_core.model.reports import event_report, incident_report
from drover_core.times import from_iso
from drover_simulator.adversary import draw


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=64, help="of 8 GPUs (default 64)")
    parser.add_argument("--days", type=float, default=7.0, help="default 7")
    parser.add_argument("--seed", type=int, default=1064, help="1000-1999: those for tuning (default 1064)")
    parser.add_argument("--faults", type=float, default=6.0, help="per 1,000 GPU-days (default 6)")
    parser.add_argument(
        "--negatives", type=float, default=12.0, help="the same for what only looks like one (default 12)"
    )
    parser.add_argument("--interval", type=float, default=60.0, help="seconds between samples, 10 to 600 (default 60)")
    parser.add_argument("--policy", default="strict", help="the new one (default strict)")
    parser.add_argument("--against", default="nvidia", help="what it is held against (default nvidia)")
    parser.add_argument("--case", type=Path, help="folder of the week")
    parser.add_argument("--table", action="store_true", help="print the command's table first")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        case = args.case or Path(name) / "week"
        if not (case / "incidents.jsonl").is_file():
            make(case, args)
        if args.table:
            backtest(case, args.policy, args.against, "")
        found, seconds = backtest(case, args.policy, args.against, "--json")
    answer = json.loads(found)
    summary = {key: {k: v for k, v in answer[key].items() if k != "nodes_out"} for key in ("against", "new")}
    print(
        json.dumps(
            {
                "benchmark": "policy_backtest", "nodes": args.nodes, "days": args.days,
                "incidents": answer["incidents"], "seconds": round(seconds, 2),
                "decided_otherwise": len(answer["changed"]),
                **summary, "load1": round(os.getloadavg()[0], 1),
            }
        )
    )  # fmt: skip


def backtest(case: Path, policy: str, against: str, how: str) -> tuple[str, float]:
    """What the command prints, and how long it took with the start of Python and all imports."""
    words = [sys.executable, "-m", "drover_cli.main", "policy", "backtest", policy, "--against", against]
    began = time.monotonic()
    ran = subprocess.run(
        [*words, "--case", str(case), *([how] if how else [])], check=True, text=True,
        stdout=subprocess.PIPE if how else None,
    )  # fmt: skip
    return ran.stdout or "", time.monotonic() - began


def make(case: Path, args: argparse.Namespace) -> None:
    """The week as a case, without its samples: a backtest needs none."""
    fleet = draw(
        args.seed, gpus=8 * args.nodes, hours=24 * args.days, faults_per_1000_gpu_days=args.faults,
        negatives_per_1000_gpu_days=args.negatives,
    )  # fmt: skip
    index = FleetIndex(fleet.spec)
    engine = Engine(index, Policy.named(args.against), fleet.start_ms)
    reports = ((from_iso(row["ts"]), row["node"], row["inventory"]) for row in fleet.inventory)
    inventory = sorted(reports, key=lambda row: row[0], reverse=True)
    incidents: dict[str, Incident] = {}
    events: list[Event] = []
    for bucket, arrived in buckets(fleet, round(1000 * args.interval)):
        due_ms = bucket.end_ms + LAG_MS
        while inventory and inventory[-1][0] <= due_ms:
            ts_ms, node, facts = inventory.pop()
            engine.on_inventory(node, facts, ts_ms)
        for event in sorted(arrived, key=lambda e: e.received_ms or e.ts_ms):
            outcome = engine.on_events([event], event.received_ms or event.ts_ms)
            incidents.update((i.id, i) for i in outcome.incidents)
        incidents.update((i.id, i) for i in engine.on_bucket(bucket, due_ms).incidents)
        events += arrived
    if engine.errors:
        raise SystemExit(f"detectors failed: {engine.errors}")
    case.mkdir(parents=True)
    (case / "fleet.json").write_text(dump_json(fleet.spec))
    lines(case / "labels.jsonl", fleet.labels)
    lines(case / "events.jsonl", [event_report(event) for event in events])
    lines(case / "incidents.jsonl", [incident_report(incident) for incident in incidents.values()])


def lines(path: Path, rows: list[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()

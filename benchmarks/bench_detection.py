"""Detection on held-out simulated fleets: precision, recall and delay per fault kind, false alarms per 1,000 GPU-days.

Scoring seeds are 1 .. FLEETS; detectors are tuned on seeds from 1000 on and never on these. Prints one JSON line.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

FLEETS = 10
NODES = 32
HOURS = 2.0


def drover(*args: str) -> str:
    command = [sys.executable, "-m", "drover_cli.main", *args]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout


def main() -> None:
    kinds: dict[str, dict[str, Any]] = {}
    total = {"faults": 0, "found": 0, "false": 0, "false_drains": 0, "duplicates": 0, "named": 0, "negatives": 0}
    gpu_days = 0.0
    missed: list[str] = []
    false: list[str] = []
    for seed in range(1, FLEETS + 1):
        folder = Path(tempfile.mkdtemp(prefix="drover-bench-"))
        try:
            case, incidents = folder / "case", folder / "found.jsonl"
            drover("simulate", "--out", str(case), "--nodes", str(NODES), "--hours", str(HOURS), "--seed", str(seed))
            incidents.write_text(drover("replay", str(case), "--json"))
            found = json.loads(drover("score", str(case), str(incidents), "--json"))
        finally:
            shutil.rmtree(folder)
        gpu_days += found["gpu_days"]
        total["negatives"] += found["hard_negatives"]
        total["false"] += len(found["false_incidents"])
        total["false_drains"] += len(found["false_drains"])
        total["duplicates"] += found["duplicates"]
        total["named"] += found["named"]
        for name, kind in found["kinds"].items():
            row = kinds.setdefault(name, {"faults": 0, "found": 0, "delays": []})
            row["faults"] += kind["faults"]
            row["found"] += kind["found"]
            row["delays"] += kind["delays_s"]
        missed += [f"{m['kind']}/{m['cause']}" for m in found["missed"]]
        false += [f"{f['kind']}/{f['cause']}" for f in found["false_incidents"]]
    total["faults"] = sum(k["faults"] for k in kinds.values())
    total["found"] = sum(k["found"] for k in kinds.values())
    told = total["named"] + total["duplicates"] + total["false"]
    delays = sorted(d for k in kinds.values() for d in k["delays"])
    print(
        json.dumps(
            {
                "benchmark": "detection",
                "fleets": FLEETS,
                "nodes": NODES,
                "hours": HOURS,
                "gpu_days": round(gpu_days, 1),
                **total,
                "precision": round((told - total["false"]) / told, 4),
                "recall": round(total["found"] / total["faults"], 4),
                "delay_median_s": delays[len(delays) // 2],
                "delay_p95_s": delays[int(0.95 * (len(delays) - 1))],
                "false_drains_per_1000_gpu_days": round(total["false_drains"] * 1000 / gpu_days, 2),
                "false_warnings_per_1000_gpu_days": round(total["false"] * 1000 / gpu_days, 2),
                "zero_bounds_the_rate_at": round(3000 / gpu_days, 2),
                "recall_by_kind": {n: f"{k['found']}/{k['faults']}" for n, k in sorted(kinds.items())},
                "missed": sorted(missed),
                "false_incidents": sorted(false),
            }
        )
    )


if __name__ == "__main__":
    main()

"""Replay of 1,000 GPU-days at 10 s: CPU seconds of what `drover replay` does, from Parquet to incidents. One JSON line.

    python benchmarks/bench_replay.py [--gpus 2048] [--hours 12] [--seed 1000] [--case FOLDER]

The adversary's fleet is written as a case folder first (not timed; 0.5 GB by default: 1,024 GPU-days): into FOLDER
where one is named; one that is there already is taken, so that the replay alone can be had on a quiet machine. What is
read at the start, detectors and the whole are printed apart; figures are CPU seconds of one process, scaled to 1,000
GPU-days, for machines are shared. Of smaller cases what is done once weighs more.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import tempfile
import time
from pathlib import Path

from drover_cli.case.read import read_case
from drover_collector.engine.replay import Replay
from drover_collector.policy.policy import Policy
from drover_simulator.adversary import draw
from drover_simulator.adversary.case import write_case


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=2048)
    parser.add_argument("--hours", type=float, default=12.0)
    parser.add_argument("--seed", type=int, default=1000)
    parser.add_argument("--case", type=Path, help="keep it there; one that is there already is replayed unchanged")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = args.case or Path(folder) / "case"
        if not path.exists():
            write_case(draw(args.seed, gpus=args.gpus, hours=args.hours), path)
        wall, cpu = time.monotonic(), time.process_time()
        case = read_case(path)
        read_s = time.process_time() - cpu
        replay = Replay(case.index, case.buckets(), case.events, Policy.named("nvidia"), case.inventories)
        incidents = {i.id for outcome in replay for i in outcome.incidents}
        whole_s, wall_s = time.process_time() - cpu, time.monotonic() - wall
    first, last = case.span
    gpu_days = case.spec.gpu_count * (last - first) / 86_400_000
    detecting_s = sum(replay.engine.seconds.values()) if replay.engine else 0.0
    scale = 1000 / gpu_days
    print(
        json.dumps(
            {
                "benchmark": "replay", "gpus": case.spec.gpu_count, "gpu_days": round(gpu_days, 1),
                "cores": os.cpu_count(), "load": round(os.getloadavg()[0], 1),
                "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024, "incidents": len(incidents),
                "cpu_s_per_1000_gpu_days": round(whole_s * scale, 1), "read_cpu_s": round(read_s * scale, 1),
                "detectors_wall_s": round(detecting_s * scale, 1), "wall_s_per_1000_gpu_days": round(wall_s * scale, 1),
            }
        )
    )  # fmt: skip


if __name__ == "__main__":
    main()

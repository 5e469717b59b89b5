"""What of faults is found in fleets of a few nodes, where a GPU has few peers; on tuning seeds.

Each fleet is drawn from a seed of its own (from 1000 on) with one board. Faults come far more often than in any field,
so that a few hours hold some; half of the fleets of a size get none, and nothing that looks like one: what is reported
there is false. Prints one JSON line for each size.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter

from bench_detection import by_kind
from detection_run import OURS, Played, play

from drover_cli.scoring.summary import wilson
from drover_simulator.adversary import draw

GPUS = 8
HEALTHY_SEEDS = 500  # on from the others


def fleet_of(nodes: int, seed: int, hours: float, faults: float) -> Played:
    """One fleet of `nodes` nodes with about `faults` faults, and as many hard negatives."""
    rate = 1000 * faults / (nodes * GPUS * hours / 24)
    fleet = draw(seed, gpus=nodes * GPUS, hours=hours, faults_per_1000_gpu_days=rate, negatives_per_1000_gpu_days=rate)
    return play(fleet, 10_000, {})[OURS]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 4], help="sizes of fleets")
    parser.add_argument("--fleets", type=int, default=40, help="with faults, and as many without, of each size")
    parser.add_argument("--hours", type=float, default=4.0)
    parser.add_argument("--faults", type=float, default=2.0, help="in each fleet, as far as it has room for them")
    parser.add_argument("--first-seed", type=int, default=1000)
    args = parser.parse_args()
    if not 1000 <= args.first_seed <= 1999 - HEALTHY_SEEDS - args.fleets or args.fleets > HEALTHY_SEEDS:
        parser.error("only tuning seeds, 1000 to 1999: those below are held out for scores")
    for nodes in args.nodes:
        seeds = range(args.first_seed, args.first_seed + args.fleets)
        runs = [fleet_of(nodes, seed, args.hours, args.faults) for seed in seeds]
        healthy = [fleet_of(nodes, seed + HEALTHY_SEEDS, args.hours, 0.0) for seed in seeds]
        found, faults = sum(len(p.delays_s) for p in runs), sum(len(p.faults) for p in runs)
        result = {
            "nodes": nodes, "seeds": [seeds[0], seeds[-1]], "hours": args.hours, "faults": faults, "found": found,
            "recall": round(found / faults, 3) if faults else None, "interval": wilson(found, faults),
            "negatives": sum(p.negatives for p in runs), "false": Counter(what for p in runs for what in p.false),
            "false_drains": Counter(what for p in runs for what in p.false_drains),
            "healthy_gpu_days": round(sum(p.gpu_days for p in healthy), 1),
            "healthy_false": Counter(what for p in healthy for what in p.false),
            "healthy_false_drains": Counter(what for p in healthy for what in p.false_drains),
            "causes": {name: [row["found"], row["faults"]] for name, row in by_kind(runs, True).items()},
        }  # fmt: skip
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()

"""`drover simulate`: a case with ground truth, from the simulated fleet."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from drover_cli.arguments import count, finite
from drover_cli.errors import CliError
from drover_cli.extras import needs
from drover_cli.output import Progress, print_json

HELP = "make a case of a simulated fleet with faults and their ground truth"
# A fixed beginning, so that the same seed gives the same bytes on any day.
START_MS = 1_767_225_600_000  # 2026-01-01T00:00:00Z


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True, metavar="CASE", help="folder to make")
    parser.add_argument("--nodes", type=count, default=32, help="nodes of 8 GPUs (default 32)")
    parser.add_argument("--hours", type=finite, default=1.0, help="simulated time (default 1)")
    parser.add_argument("--seed", type=int, default=0, help="same seed, same case (default 0)")
    parser.add_argument("--faults", metavar="FILE", help="faults as JSON (default: drawn by the seed)")
    parser.add_argument("--interval", type=finite, default=10.0, help="seconds between samples, 1 to 600 (default 10)")
    parser.add_argument(
        "--probes", action="store_true", help="nodes are probed while nothing runs on them: probes.jsonl of the case"
    )
    parser.add_argument(
        "--adversary", action="store_true",
        help="a fleet made to prove detectors wrong: noisy, full of hard negatives (docs/explanation/simulation.md)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="one JSON object at the end")


def run(args: argparse.Namespace) -> int:
    if args.hours <= 0 or not 1 <= args.interval <= 600:
        raise CliError("--hours must be more than 0, --interval from 1 to 600")
    with needs("simulation"):
        from drover_cli.case.simulated import CaseSink
        from drover_cli.case.simulated_probes import SimulatedProbes
        from drover_cli.case.write import NewFolder, write_jsonl
        from drover_simulator.faults import FaultsError, draw_faults, load_faults
        from drover_simulator.fleet import SimulatedFleet, build_fleet

    started = time.monotonic()
    if args.adversary:
        return _adversary(args, started)
    spec = build_fleet(args.nodes, args.seed)
    try:
        faults = load_faults(Path(args.faults), spec) if args.faults else draw_faults(spec, args.hours, args.seed)
    except FaultsError as error:
        raise CliError(str(error)) from None
    fleet = SimulatedFleet(spec, args.seed, faults, START_MS)
    steps = max(1, round(args.hours * 3600 / args.interval))
    progress = Progress(f"simulating {args.nodes} nodes, {args.hours:g} h", steps)
    with NewFolder(args.out) as folder:
        sink = CaseSink(folder, spec)
        probes = SimulatedProbes(fleet, args.seed) if args.probes else None
        for step in range(steps):
            fleet.step(args.interval)
            sink.take(fleet)
            if probes is not None:
                probes.take()
            progress.update(step + 1)
        sink.close(fleet)
        if probes is not None:
            write_jsonl(folder / "probes.jsonl", probes.lines())
    progress.done()
    summary = {
        "case": str(args.out),
        "nodes": args.nodes,
        "gpus": spec.gpu_count,
        "hours": args.hours,
        "samples": sink.samples,
        "events": sink.events,
        **({"probes": probes.orders} if probes is not None else {}),
        "faults": sum(label.hardware for label in fleet.labels),
        "hard_negatives": sum(not label.hardware for label in fleet.labels),
        "seconds": round(time.monotonic() - started, 1),
    }
    _show(args, summary)
    return 0


def _adversary(args: argparse.Namespace, started: float) -> int:
    """A case of the adversary's fleet of this seed and size."""
    from drover_cli.case.write import NewFolder
    from drover_simulator.adversary import draw
    from drover_simulator.adversary.case import write_into

    if args.faults:
        raise CliError("--adversary draws its own faults; leave out --faults")
    if args.probes:
        raise CliError("--probes is for the plain fleet: leave out --adversary")
    fleet = draw(args.seed, gpus=8 * args.nodes, hours=args.hours)
    steps = max(1, round(args.hours * 3600 / args.interval))
    progress = Progress(f"simulating {args.nodes} nodes, {args.hours:g} h", steps)
    with NewFolder(args.out) as folder:
        written = write_into(fleet, folder, round(args.interval * 1000), progress.update)
    progress.done()
    faults = sum(bool(label["hardware"]) for label in fleet.labels)
    summary = {
        "case": str(args.out),
        "nodes": len(fleet.spec.nodes),
        "gpus": fleet.spec.gpu_count,
        "hours": args.hours,
        **written,
        "faults": faults,
        "hard_negatives": len(fleet.labels) - faults,
        "seconds": round(time.monotonic() - started, 1),
    }
    _show(args, summary)
    return 0


def _show(args: argparse.Namespace, summary: dict[str, Any]) -> None:
    if args.json:
        print_json(summary)
        return
    samples, events = summary["samples"], summary["events"]
    print(f"{args.out}: {summary['gpus']} GPUs, {args.hours:g} h, {samples:,} samples, {events} events")
    print(f"faults: {summary['faults']}, hard negatives: {summary['hard_negatives']}, in {summary['seconds']} s")
    print(f"next: drover replay {args.out} --json > found.jsonl && drover score {args.out} found.jsonl")

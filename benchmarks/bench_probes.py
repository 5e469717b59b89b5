"""Every probe's whole path on the CPU, by the runner and the real child: seconds each, and what it gave.

The figures are of a stand-in and say nothing about a GPU; what counts is that each gives one, or says why it cannot.
Prints one JSON line; ends with 1 when a run does not end well or a probe finds a wrong answer. `--gpus` probes the
node's free GPUs instead, and then the figures are the point.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from dataclasses import replace
from typing import Any

from drover_agent.probes import PROBES, Level, eligible, plan
from drover_agent.probes.exchange import LONGEST_S
from drover_agent.probes.runner import End, Report, Runner

CPU_SCALE = 0.05  # of each probe's length at level quick
CPUS = 2  # devices that the CPU stands in for: pairs of them too


class Clock:
    """When each probe began, by what the runner reports."""

    def __init__(self) -> None:
        self.began: dict[str, float] = {}

    def report(self, text: str) -> None:
        if text in PROBES:
            self.began[text] = time.monotonic()
            print(text, file=sys.stderr, flush=True)

    def seconds(self) -> dict[str, float]:
        times = [*self.began.values(), time.monotonic()]
        return {name: round(after - at, 2) for (name, at), after in zip(self.began.items(), times[1:], strict=True)}


def measure(level: Level, scale: float, on_gpus: bool, folder: str) -> dict[str, Any]:
    found = eligible.look() if on_gpus else eligible.Found()
    gpus, left_out = eligible.choose(found, [])
    if on_gpus and not gpus:
        raise SystemExit(f"no GPU can be probed: {found.why_none or left_out}")
    asked = plan.request_of(tuple(PROBES), level, gpus, LONGEST_S, folder)
    request = replace(asked, cpus=CPUS, scale=scale)
    clock = Clock()
    with eligible.Guard(gpus) as guard:
        report = Runner(request, guard.needed, clock.report).run()
    return line(report, clock, level, scale)


def line(report: Report, clock: Clock, level: Level, scale: float) -> dict[str, Any]:
    by_name: dict[str, list[Any]] = {name: [] for name in PROBES}
    for result in report.results:
        by_name.setdefault(result.probe, []).append(result)
    seconds = clock.seconds()
    return {
        "benchmark": "probes",
        "devices": [device.model for device in report.devices],
        "level": level.value,
        "scale": scale,
        "end": report.end.value,
        "detail": report.detail,
        "seconds": round(report.seconds, 1),
        "probes": {
            name: {
                "seconds": seconds.get(name),
                "unit": results[0].unit,
                "values": [result.value for result in results],
                "not_measured": sorted({result.detail for result in results if result.value is None}),
                "wrong": [result.detail for result in results if result.ok is False],
            }
            for name, results in by_name.items()
            if results
        },
        "without_a_result": [name for name, results in by_name.items() if not results],
        "load1": os.getloadavg()[0],  # figures of a machine that has more to do are worth less
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--level", choices=[level.value for level in Level], default="quick", help="length of each")
    parser.add_argument("--scale", type=float, default=CPU_SCALE, help="of each probe's length; default: 0.05")
    parser.add_argument("--gpus", action="store_true", help="on the node's free GPUs, in full length unless --scale")
    options = parser.parse_args()
    scale = 1.0 if options.gpus and options.scale == CPU_SCALE else options.scale
    with tempfile.TemporaryDirectory(prefix="drover-bench-probes-") as folder:
        found = measure(Level(options.level), scale, options.gpus, folder)
    print(json.dumps(found))
    wrong = any(probe["wrong"] for probe in found["probes"].values())
    return int(found["end"] != End.DONE or wrong or bool(found["without_a_result"]))


if __name__ == "__main__":
    sys.exit(main())

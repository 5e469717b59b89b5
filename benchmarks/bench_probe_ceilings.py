"""All that has to be shown on a real GPU, in one command of less than ten minutes:

    .venv/bin/python benchmarks/bench_probe_ceilings.py --record FOLDER

every probe at level quick; the quick level's own seconds; GEMM of each type and copy against what plain library calls
reach on the same device (benchmarks/probing/plain.py); their coefficient of variation over ten runs, each a process
of its own; and all of it kept in FOLDER as a reference and as test data: `figures.jsonl` (one result a line) and
`report.json`. Takes the node's first free GPU. Prints `report.json` as one line; ends with 1 where a goal is missed.

`--cpu` goes the same way on the CPU, shortened: it shows that the way works, and says nothing about a GPU; of its
goals `met` is null.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from drover_agent.probes import PROBES, Level, eligible, gemm, hbm, of_level, plan
from drover_agent.probes.eligible import Gpu
from drover_agent.probes.exchange import LONGEST_S
from drover_agent.probes.runner import End, Report, Runner
from drover_agent.probes.timing import variation

HERE = Path(__file__).resolve().parent
CPU_SCALE = 0.05  # of each probe's length
RUNS = 10
OF_CEILING = 0.95  # goals: achieved of what the plain call reaches; variation over the runs; seconds of level quick
VARIATION = 0.01
QUICK_S = 60.0
REPEATED = ("gemm_bf16", "hbm_copy")  # over RUNS processes
SIZES = ("gemm_fp64", "gemm_fp32", "gemm_tf32", "gemm_bf16", "gemm_fp16", "gemm_fp8", "hbm_copy")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", type=Path, metavar="FOLDER", help="keep all figures there")
    parser.add_argument("--runs", type=int, default=RUNS, help="of the repeated ones (default 10)")
    parser.add_argument("--cpu", action="store_true", help="the same way on the CPU, shortened")
    options = parser.parse_args()
    found = eligible.Found() if options.cpu else eligible.look()
    gpus, refused = eligible.choose(found, [])
    if not gpus and not options.cpu:
        raise SystemExit(f"no GPU can be probed: {found.why_none or refused}; --cpu shows that the way works")
    with tempfile.TemporaryDirectory(prefix="drover-bench-ceilings-") as folder:
        lines, report = measure(gpus[:1], options.runs, folder)
    if options.record:
        options.record.mkdir(parents=True, exist_ok=True)
        (options.record / "figures.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (options.record / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report))
    return int(any(goal["met"] is False for goal in report["goals"].values()))


def measure(gpus: Sequence[Gpu], runs: int, folder: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """(every result, its verdict)."""
    quick = tuple(probe.name for probe in of_level(Level.QUICK))
    lines: list[dict[str, Any]] = []
    level = run("quick", quick, gpus, folder, lines)
    rest = run("others", tuple(name for name in PROBES if name not in quick), gpus, folder, lines)
    ceilings = plain(gpus)
    again = [run(f"run {number}", REPEATED, gpus, folder, lines) for number in range(runs)]
    reached = {name: value for report in (level, rest) for name, value in values(report).items()}
    spread = {name: variation([v for r in again if (v := values(r).get(name)) is not None]) for name in REPEATED}
    of_ceiling = {name: reached[name] / ceilings[name] for name in SIZES if name in reached and name in ceilings}
    ended = {"quick": level, "others": rest} | {f"run {number}": report for number, report in enumerate(again)}
    bad = {name: f"{r.end.value}: {r.detail}" for name, r in ended.items() if r.end is not End.DONE}
    wrong = [r.detail for report in ended.values() for r in report.results if r.ok is False]
    on_gpu = bool(gpus)
    goals = {
        "every probe ran and answered right": goal(not bad and not wrong, True, "="),
        "level quick, s": goal(round(level.seconds, 1), QUICK_S, "<=", on_gpu),
        **{f"{name} of the plain call": goal(round(r, 4), OF_CEILING, ">=", on_gpu) for name, r in of_ceiling.items()},
        **{
            f"{name}, variation over {runs} runs": goal(round(v, 5), VARIATION, "<=", on_gpu)
            for name, v in spread.items()
        },
    }
    return lines, {
        "benchmark": "probe_ceilings", "device": [device.model for device in level.devices], "on_gpu": on_gpu,
        "torch": version(), "reached": {k: round(v, 4) for k, v in reached.items()},
        "plain": {k: round(v, 4) for k, v in ceilings.items()},
        "units": {name: PROBES[name].unit for name in reached if name in PROBES},
        "not_measured": {r.probe: r.detail for report in (level, rest) for r in report.results if r.value is None},
        "ended_otherwise": bad, "wrong": wrong, "goals": goals, "load1": round(os.getloadavg()[0], 1),
    }  # fmt: skip


def goal(value: float | bool, wanted: float | bool, how: str, judged: bool = True) -> dict[str, Any]:
    met = {"=": value == wanted, "<=": value <= wanted, ">=": value >= wanted}[how]
    return {"value": value, "goal": f"{how} {wanted}", "met": met if judged else None}


def run(what: str, names: tuple[str, ...], gpus: Sequence[Gpu], folder: str, lines: list[dict[str, Any]]) -> Report:
    """One process with these probes at level quick."""
    print(what, file=sys.stderr, flush=True)
    request = plan.request_of(names, Level.QUICK, gpus, LONGEST_S, folder)
    if not gpus:
        request = dataclasses.replace(request, cpus=2, scale=CPU_SCALE)
    with eligible.Guard(gpus) as guard:
        report = Runner(request, guard.needed, lambda _: None).run()
    model = report.devices[0].model if report.devices else ""
    ts_ms = time.time_ns() // 1_000_000
    lines += [{"run": what, "ts_ms": ts_ms, "device": model, **dataclasses.asdict(r)} for r in report.results]
    return report


def values(report: Report) -> dict[str, float]:
    """Figure -> what the device reached: the median where there are several."""
    by_name: dict[str, list[float]] = {}
    for result in report.results:
        if result.value is not None:
            by_name.setdefault(result.probe, []).append(result.value)
    return {name: statistics.median(found) for name, found in by_name.items()}


def plain(gpus: Sequence[Gpu]) -> dict[str, float]:
    """What plain calls reach, in a process of their own that knows nothing of Drover."""
    print("plain library calls", file=sys.stderr, flush=True)
    device, size, copied, seconds = ("cuda:0", gemm.SIZE, hbm.BYTES, 1.0)
    if not gpus:
        device, size, copied, seconds = ("cpu", gemm.CPU_SIZE, hbm.CPU_BYTES, 0.2)
    visible = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(gpu.uuid for gpu in gpus)}
    words = [sys.executable, str(HERE / "probing/plain.py"), device, str(size), str(copied), str(seconds)]
    ran = subprocess.run(words, check=True, capture_output=True, text=True, timeout=300, env={**os.environ, **visible})
    return dict(json.loads(ran.stdout))


def version() -> str:
    from importlib import metadata

    return metadata.version("torch")


if __name__ == "__main__":
    sys.exit(main())

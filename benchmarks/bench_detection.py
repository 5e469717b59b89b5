"""Detection on the adversary's held-out fleets, next to four baselines: what is found, how soon, and what is reported
wrongly.

Scoring seeds are 0-99, one for each fleet; detectors and baselines were tuned on 1000-1999 (`--tune` picks each
baseline's threshold there, the one of its GRID with the best F1; ours are in the detectors). `--healthy GPU_DAYS`
plays fleets in which nothing goes wrong, a minute at a time, and bounds the rate of false alarms; with `--healthy-log`
it goes on where it was ended. Writes docs/evidence/detection.md (`--no-write`: not) and prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import sys
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from detection_run import BASELINES, OURS, Played, each_fleet, play

from drover_cli.scoring.score import median, percentile
from drover_cli.scoring.summary import wilson
from drover_simulator.adversary import draw

PAGE = Path(__file__).parents[1] / "docs/evidence/detection.md"
FIELD_FAULTS = 0.474  # per 1,000 GPU-days: Llama 3 (16,384 H100, 54 days), all interruptions
GOALS = {"precision": 0.98, "recall": 0.95, "f1": 0.965, "false_drains": 0.02, "false_warnings": 1.0}
DRAWS = 2000  # of the bootstrap over fleets
SEED = 7
FAILED: list[str] = []  # fleets that could not be played, and why


def rates(runs: Sequence[Played]) -> tuple[float, float, float]:
    """Precision, recall, F1 of some fleets together; nan where undefined."""
    reported, false = sum(p.reported for p in runs), sum(len(p.false) for p in runs)
    found, faults = sum(len(p.delays_s) for p in runs), sum(len(p.faults) for p in runs)
    precision = reported / (reported + false) if reported + false else math.nan
    recall = found / faults if faults else math.nan
    both = precision + recall
    return precision, recall, 2 * precision * recall / both if both else 0.0 if both == 0 else math.nan


def f1_interval(runs: Sequence[Played]) -> tuple[float, float]:
    """95 % of F1 over fleets drawn with replacement."""
    rng = np.random.default_rng(SEED)
    drawn = [rates([runs[i] for i in rng.integers(0, len(runs), len(runs))])[2] for _ in range(DRAWS)]
    return float(np.nanpercentile(drawn, 2.5)), float(np.nanpercentile(drawn, 97.5))


def summary(runs: Sequence[Played]) -> dict[str, Any]:
    """All figures of one method."""
    days = sum(p.gpu_days for p in runs)
    precision, recall, f1 = rates(runs)
    reported, false = sum(p.reported for p in runs), sum(len(p.false) for p in runs)
    found, faults = sum(len(p.delays_s) for p in runs), sum(len(p.faults) for p in runs)
    drains = sum(len(p.false_drains) for p in runs)
    delays = [d for p in runs for d in p.delays_s.values()]
    per_1000 = 1000 / days
    in_field = recall * FIELD_FAULTS / (recall * FIELD_FAULTS + max(false, 3) * per_1000) if recall > 0 else 0.0
    return {
        "gpu_days": round(days, 1), "faults": faults, "negatives": sum(p.negatives for p in runs), "found": found,
        "reported": reported, "false": false, "false_drains": drains,
        "precision": _round(precision), "precision_interval": _pair(wilson(reported, reported + false)),
        "recall": _round(recall), "recall_interval": _pair(wilson(found, faults)),
        "f1": _round(f1), "f1_interval": _pair(f1_interval(runs)),
        "delay_median_s": median(delays), "delay_p95_s": percentile(delays, 0.95),
        "false_warnings_per_1000_gpu_days": round(false * per_1000, 3),
        "false_drains_per_1000_gpu_days": round(drains * per_1000, 3),
        "none_bounds_the_rate_at": round(3 * per_1000, 3),
        "precision_at_field_prevalence": _round(in_field),
        "cpu_s_per_1000_gpu_days": round(sum(p.seconds for p in runs) * per_1000, 1),
    }  # fmt: skip


def _round(value: float) -> float | None:
    return None if math.isnan(value) else round(value, 4)


def _pair(values: tuple[float, float]) -> list[float | None]:
    return [_round(value) for value in values]


def by_kind(runs: Sequence[Played], of_cause: bool) -> dict[str, dict[str, Any]]:
    """Kind (or kind/cause) -> faults, found, delays."""
    rows: dict[str, dict[str, Any]] = {}
    for p in runs:
        for id_, (kind, cause) in p.faults.items():
            row = rows.setdefault(f"{kind}/{cause}" if of_cause else kind, {"faults": 0, "found": 0, "delays": []})
            row["faults"] += 1
            if id_ in p.delays_s:
                row["found"] += 1
                row["delays"].append(p.delays_s[id_])
    return {
        name: {
            "faults": row["faults"], "found": row["found"], "interval": _pair(wilson(row["found"], row["faults"])),
            "delay_median_s": median(row["delays"]), "delay_p95_s": percentile(row["delays"], 0.95),
        }
        for name, row in sorted(rows.items())
    }  # fmt: skip


def _fleet(
    seed: int, gpus: int, hours: float, interval_ms: int, thresholds: dict[str, float], ours: bool, wrong: bool
) -> dict[str, Played] | str:
    """One fleet; method -> what it made of it, or why it failed. `wrong` False: one in which nothing goes wrong."""
    try:
        return _played(seed, gpus, hours, interval_ms, thresholds, ours, wrong)
    except Exception:  # noqa: BLE001  # one fleet that fails must not cost the others; it is printed, and counts as missing
        return f"seed {seed}: {traceback.format_exc()}"


def _played(
    seed: int, gpus: int, hours: float, interval_ms: int, thresholds: dict[str, float], ours: bool, wrong: bool
) -> dict[str, Played]:
    drawn = partial(draw, seed, gpus=gpus, hours=hours)
    fleet = drawn() if wrong else drawn(faults_per_1000_gpu_days=0.0, negatives_per_1000_gpu_days=0.0)
    methods = {name: (BASELINES[name.partition(" @")[0]], value) for name, value in thresholds.items()}
    return play(fleet, interval_ms, methods, ours=ours)


def run(
    seeds: Sequence[int], args: argparse.Namespace, interval_ms: int, thresholds: dict[str, float], *,
    ours: bool = True, wrong: bool = True, gpus: int | None = None, hours: float | None = None,
) -> dict[str, list[Played]]:  # fmt: skip
    """Method -> fleets, in order of seed."""
    one = partial(
        _fleet, gpus=gpus or args.gpus, hours=hours or args.hours, interval_ms=interval_ms, thresholds=thresholds,
        ours=ours, wrong=wrong,
    )  # fmt: skip
    result: dict[str, list[Played]] = {}
    log: Path | None = args.log if ours and wrong else None
    for line in log.read_text(encoding="utf-8").splitlines() if log is not None and log.exists() else ():
        for name, fields in json.loads(line).items():
            result.setdefault(name, []).append(Played(**fields))
    done_before = {p.seed for runs in result.values() for p in runs}
    seeds = [seed for seed in seeds if seed not in done_before]
    if not seeds:
        return {name: sorted(runs, key=lambda p: p.seed) for name, runs in result.items()}
    for played in each_fleet(one, seeds, args.processes, FAILED):
        for name, p in played.items():
            result.setdefault(name, []).append(p)
        if log is not None:
            with log.open("a", encoding="utf-8") as file:
                file.write(json.dumps({name: asdict(p) for name, p in played.items()}) + "\n")
    if not result:
        sys.exit("No fleet could be played.")
    return {name: sorted(runs, key=lambda p: p.seed) for name, runs in result.items()}


def tune(args: argparse.Namespace) -> dict[str, float]:
    """Each baseline's threshold with the best F1 over the tuning fleets."""
    grid = {
        f"{name} @{value}": value for name, module in BASELINES.items() if len(module.GRID) > 1 for value in module.GRID
    }
    played = run(range(1000, 1000 + args.fleets), args, 10_000, grid, ours=False)
    best: dict[str, tuple[float, float]] = {}
    for name, runs in played.items():
        method, _, value = name.partition(" @")
        _, _, f1 = rates(runs)
        print(f"{name}: precision, recall, F1 {rates(runs)}", file=sys.stderr)
        best[method] = max(best.get(method, (-1.0, 0.0)), (0.0 if math.isnan(f1) else f1, float(value)))
    return {method: value for method, (_, value) in best.items()}


def page(result: dict[str, Any]) -> str:
    """docs/evidence/detection.md."""
    ours = result["methods"][OURS]
    lines = [
        "# Detection: what is found, and what is reported wrongly", "",
        "Made by `make bench-detection` (`benchmarks/bench_detection.py`), the bad numbers too; do not edit.",
        f"Fleets of the adversary ([simulation](../explanation/simulation.md)), scoring seeds {result['seeds'][0]} to "
        f"{result['seeds'][1]}:",
        f"{ours['gpu_days']:,} GPU-days at {result['interval_s']:g} s, {ours['faults']} faults, "
        f"{ours['negatives']} hard negatives.",
        *(f"A fleet could not be played: {why.splitlines()[0]}" for why in result["failed"]),
        "Tuning used seeds from 1000 on. Intervals are of 95 %: Wilson's for shares, bootstrap over fleets for F1.", "",
        "| Method | Precision | Recall | F1 | Delay median, p95 | False warnings | False drains "
        "| Precision in the field |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]  # fmt: skip
    for name, row in result["methods"].items():
        lines.append(
            f"| {name} | {_share(row, 'precision')} | {_share(row, 'recall')} | {_share(row, 'f1')} "
            f"| {_seconds(row['delay_median_s'])}, {_seconds(row['delay_p95_s'])} | {_rate(row, 'false')} "
            f"| {_rate(row, 'false_drains')} | {_number(row['precision_at_field_prevalence'])} |"
        )
    lines += [
        "",
        "False warnings and drains are per 1,000 GPU-days of these fleets, which hold far more trouble than "
        "the field's;",
        "where there was none, 3/N bounds the rate. The last column takes that rate (or bound) with the field's",
        f"{FIELD_FAULTS} faults per 1,000 GPU-days (Llama 3). Baselines name no kind: theirs fits all kinds, and each "
        "alarm",
        "counts as a drain, as Minder evicts the machine. Their thresholds were chosen on the tuning fleets by F1.",
        "",
        "Goals: " + ", ".join(f"{name.replace('_', ' ')} {value:g}" for name, value in GOALS.items())
        + " (false ones per 1,000 GPU-days). " + _missed_goals(ours),
    ]  # fmt: skip
    if "healthy" in result:
        h = result["healthy"]
        lines += [
            "", "## Where nothing goes wrong", "",
            f"{h['gpu_days']:,} GPU-days of fleets without a fault, at 60 s, seeds {h['seeds'][0]} to "
            f"{h['seeds'][1]}: {h['false']} warnings ({h['false_per_1000_gpu_days']:g} per 1,000 GPU-days), "
            f"{h['false_drains']} drains. "
            f"None in that time bounds a rate at {h['none_bounds_the_rate_at']:g} per 1,000 GPU-days (3/N, 95 %).",
        ]  # fmt: skip
        lines += (
            ["", *(f"- {n} x {what}" for what, n in h["reported_wrongly"].items())] if h["reported_wrongly"] else []
        )
    for title, rows in (("By kind", result["kinds"]), ("By cause", result["causes"])):
        lines += ["", f"## {title}", "", "| Fault | Found | 95 % | Delay median, p95 |", "| --- | --- | --- | --- |"]
        for name, row in rows.items():
            low, high = row["interval"]
            lines.append(
                f"| {name} | {row['found']} of {row['faults']} | {low:.2f} to {high:.2f} "
                f"| {_seconds(row['delay_median_s'])}, {_seconds(row['delay_p95_s'])} |"
            )
    lines += [
        "",
        f"Of the {ours['faults'] - ours['found']} that are missed {result['missed_reported_otherwise']} were reported "
        "all the same, as more evidence in the incident of their cause, or as a note of idle GPUs.",
        "", "## Reported wrongly", "",
    ]  # fmt: skip
    lines += [f"- {n} x {what}" for what, n in result["reported_wrongly"].items()] or ["Nothing."]
    return "\n".join(lines) + "\n"


def _missed_goals(ours: dict[str, Any]) -> str:
    shares = ("precision", "recall", "f1")
    missed = [f"{name} by {GOALS[name] - (ours[name] or 0):.3f}" for name in shares if (ours[name] or 0) < GOALS[name]]
    for name in ("false_drains", "false_warnings"):
        over = ours[f"{name}_per_1000_gpu_days"] - GOALS[name]
        if over > 0:
            missed.append(f"{name.replace('_', ' ')} by {over:.2f}")
    return f"Missed: {', '.join(missed)}." if missed else "None is missed here."


def _share(row: dict[str, Any], name: str) -> str:
    low, high = row[f"{name}_interval"]
    return "-" if row[name] is None else f"{row[name]:.3f} ({_number(low)}-{_number(high)})"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f} s"


def _rate(row: dict[str, Any], count: str) -> str:
    key = "false_warnings_per_1000_gpu_days" if count == "false" else "false_drains_per_1000_gpu_days"
    return f"{row[key]:.2f}" if row[count] else f"none (below {row['none_bounds_the_rate_at']:.2f})"


def _false(runs: Sequence[Played]) -> dict[str, int]:
    return dict(Counter(what for p in runs for what in p.false).most_common())


def healthy(args: argparse.Namespace) -> dict[str, Any]:
    """Fleets in which nothing goes wrong, at 60 s, from `--healthy-seed` on (scoring seeds that the cases do not use).

    Each fleet that is done is a line of `--healthy-log`, and is not played again: a run may be ended and gone on with.
    """
    gpus, hours = 4096, args.healthy_hours
    log: Path | None = args.healthy_log
    lines = log.read_text(encoding="utf-8").splitlines() if log is not None and log.exists() else []
    done = {row["seed"]: row for row in map(json.loads, lines)}
    count = math.ceil(args.healthy / (gpus * hours / 24))
    seeds = range(args.healthy_seed, args.healthy_seed + count)
    if count and seeds[-1] % 1000 > 99:
        sys.exit(
            f"--healthy: at most {(100 - args.healthy_seed % 1000) * gpus * hours / 24:,.0f} GPU-days from this seed"
        )
    left = [seed for seed in seeds if seed not in done]
    for start in range(0, len(left), args.processes):
        some = left[start : start + args.processes]
        for p in run(some, args, 60_000, {}, wrong=False, gpus=gpus, hours=hours)[OURS]:
            done[p.seed] = {"seed": p.seed, "gpu_days": p.gpu_days, "false": p.false, "drains": len(p.false_drains)}
            if log is not None:
                with log.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(done[p.seed]) + "\n")
    if not done:
        sys.exit("No healthy fleet was played.")
    days = sum(row["gpu_days"] for row in done.values())
    false = Counter(what for row in done.values() for what in row["false"])
    return {
        "seeds": [min(done), max(done)], "gpu_days": round(days), "false": sum(false.values()),
        "false_drains": sum(row["drains"] for row in done.values()), "none_bounds_the_rate_at": round(3000 / days, 4),
        "false_per_1000_gpu_days": round(1000 * sum(false.values()) / days, 3),
        "reported_wrongly": dict(false.most_common()),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fleets", type=int, default=24)
    parser.add_argument("--gpus", type=int, default=512, help="of each fleet")
    parser.add_argument("--hours", type=float, default=4.0)
    parser.add_argument("--interval", type=float, default=10.0, help="seconds between samples")
    # 0 to 23 were scored before, and what was missed there has been read: no longer held out as well as these.
    parser.add_argument("--first-seed", type=int, default=24, help="for trying out: 1000 and more")
    parser.add_argument(
        "--log", type=Path, help="fleets that are done, a line each: a run may be ended and gone on with"
    )
    parser.add_argument("--healthy", type=float, default=0.0, metavar="GPU_DAYS", help="play healthy fleets too")
    parser.add_argument("--healthy-hours", type=float, default=24.0, help="of each healthy fleet of 4,096 GPUs")
    parser.add_argument("--healthy-seed", type=int, default=50, help="of the first healthy fleet")
    parser.add_argument("--healthy-log", type=Path, help="healthy fleets that are done, a line each")
    parser.add_argument("--only-healthy", action="store_true", help="and nothing else; leaves the page unchanged")
    parser.add_argument("--processes", type=int, default=multiprocessing.cpu_count())
    parser.add_argument("--tune", action="store_true", help="choose the baselines' thresholds on the tuning seeds")
    parser.add_argument("--no-write", action="store_true", help="leave docs/evidence/detection.md unchanged")
    args = parser.parse_args()
    began = time.monotonic()
    if args.tune:
        print(json.dumps({"benchmark": "detection_tuning", "thresholds": tune(args)}))
        return
    if args.only_healthy:
        print(json.dumps({"benchmark": "detection_healthy", **healthy(args), "failed": FAILED}))
        return
    thresholds = {name: float(module.THRESHOLD) for name, module in BASELINES.items()}
    seeds = range(args.first_seed, args.first_seed + args.fleets)
    played = run(seeds, args, round(args.interval * 1000), thresholds)
    result: dict[str, Any] = {
        "benchmark": "detection", "fleets": args.fleets, "gpus": args.gpus, "hours": args.hours,
        "interval_s": args.interval, "seeds": [seeds[0], seeds[-1]], "thresholds": thresholds,
        "methods": {name: summary(runs) for name, runs in played.items()},
        "kinds": by_kind(played[OURS], False), "causes": by_kind(played[OURS], True),
        "reported_wrongly": _false(played[OURS]), "failed": FAILED,
        "missed_reported_otherwise": sum(len(p.otherwise) for p in played[OURS]),
    }  # fmt: skip
    if args.healthy or args.healthy_log:
        result["healthy"] = healthy(args)
    result["wall_s"] = round(time.monotonic() - began)
    result["cpu_s_per_fleet"] = round(sum(p.seconds for runs in played.values() for p in runs) / len(played[OURS]), 1)
    if not args.no_write:
        PAGE.write_text(page(result), encoding="utf-8")
    print(json.dumps(result))


if __name__ == "__main__":
    main()

"""Detection on fleets of strangers: generators whose authors had not seen a detector, next to four baselines.

Generators A and D are for tuning and B for scoring, looked at only as figures. C is scored once, at the end
(`--final`). Each fleet is written as a case, replayed as `drover replay` does and scored as `drover score` does. Prints
one JSON line; with `--name` it keeps it in benchmarks/data/strangers.json under that name, and writes
docs/evidence/strangers.md.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import pickle
import shutil
import tempfile
import textwrap
import time
import traceback
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from detection_run import ANY, BASELINES, OURS, Flags, each_fleet

from drover_cli.case.read import Case, read_case, read_jsonl
from drover_cli.commands.score import summary_report
from drover_cli.scoring.score import Score, found_of, label_of, score
from drover_cli.scoring.summary import Summary, summarize
from drover_collector.engine.engine import LAG_MS
from drover_collector.engine.replay import Replay
from drover_collector.policy.policy import Policy
from drover_core.model.events import Incident, IncidentKind
from drover_core.model.reports import incident_report

DATA = Path(__file__).parent / "data/strangers.json"
PAGE = Path(__file__).parents[1] / "docs/evidence/strangers.md"
GOALS = "Goals: precision .98, recall .95, F1 .965, no false drain."
# The generators' brief asks for no labels of it. A job is slower for many reasons that are nobody's fault, and because
# of faults that are labelled. bench_slowdown.py judges it.
UNLABELLED = IncidentKind.SLOWDOWN
DAY = {"nodes": 256, "hours": 24.0, "interval_s": 60.0, "healthy": True}
DAY_SEED = 6000
SCORING = "B"
HEALTHY_HEAD = (
    "| Generator | Commit | GPU-days | False warnings | False drains | What |",
    "| --- | --- | --- | --- | --- | --- |",
)
FAILED: list[str] = []  # fleets that could not be played, and why


def play(folder: Path, baselines: bool) -> dict[str, Score]:
    """Return method -> its score of the case in `folder`.

    Raises:
        RuntimeError: a detector failed.
    """
    case = read_case(folder)
    replay = Replay(case.index, case.buckets(), case.events, Policy.named("nvidia"), case.inventories)
    incidents: dict[str, Incident] = {}
    for outcome in replay:
        judged = (i for i in outcome.incidents if i.scope != "fleet" and i.kind is not UNLABELLED)
        incidents.update((i.id, i) for i in judged)
    if replay.engine is not None and replay.engine.errors:
        raise RuntimeError(f"detectors failed: {replay.engine.errors}")
    labels = [label_of(row) for _, row in read_jsonl(folder / "labels.jsonl")]
    first, last = case.span
    days = case.spec.gpu_count * (last - first) / 86_400_000
    result = {OURS: score(labels, [found_of(incident_report(i)) for i in incidents.values()], days)}
    if baselines:
        same = [replace(label, kind=ANY) for label in labels]  # a baseline names no kind
        result |= {name: score(same, flags.found(), days) for name, flags in _flags(case).items()}
    return result


def _flags(case: Case) -> dict[str, Flags]:
    """Run the baselines over a case."""
    runs = {name: Flags(case.index, module, float(module.THRESHOLD)) for name, module in BASELINES.items()}
    events = sorted(case.events, key=lambda event: event.received_ms or event.ts_ms)
    at = 0
    for bucket in case.buckets():
        start, due_ms = at, bucket.end_ms + LAG_MS
        while at < len(events) and (events[at].received_ms or events[at].ts_ms) <= due_ms:
            at += 1
        for run in runs.values():
            run.step(bucket, events[start:at])
    return runs


def _fleet(seed: int, generator: str, options: dict[str, Any], baselines: bool, keep: Path | None) -> Any:
    """Return one fleet's scores, or why it failed."""
    held = None if keep is None else keep / f"{generator}-{seed}.pickle"
    if held is not None and held.exists():
        return pickle.loads(held.read_bytes())
    scratch = Path(tempfile.mkdtemp(prefix="strangers-"))
    try:
        made = import_module(f"drover_simulator.strangers.{generator}")
        made.write_case(scratch / "case", seed, **options)
        scores = play(scratch / "case", baselines)
    except Exception:  # noqa: BLE001  # one fleet that fails must not cost the others; it is printed, and counts as missing
        return f"{generator} {seed}: {traceback.format_exc()}"
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    if held is not None:
        held.write_bytes(pickle.dumps(scores))
    return scores


def run(
    generator: str, seeds: Sequence[int], args: argparse.Namespace, options: dict[str, Any], baselines: bool
) -> dict[str, Summary]:
    """Return method -> the sum over the fleets of a generator."""
    one = partial(_fleet, generator=generator, options=options, baselines=baselines, keep=args.keep)
    scores: dict[str, list[Score]] = {}
    for played in each_fleet(one, seeds, args.processes, FAILED):
        for name, result in played.items():
            scores.setdefault(name, []).append(result)
    return {name: summarize(those) for name, those in scores.items()}


def page(kept: dict[str, Any]) -> str:
    """Return docs/evidence/strangers.md of the runs that were kept, oldest first."""
    lines = [
        "# Detection on fleets of strangers", "",
        textwrap.fill(
            "Made by `benchmarks/bench_strangers.py`, the bad figures too; do not edit. Each generator is written "
            "by somebody who has seen neither a detector, nor the adversary, nor another of these: A, D, E and F for "
            "tuning, B for scoring, C for one look at the end. Who works on detectors looks at figures of B only: "
            "those of this page, of some runs between them, and once the kinds of labels near its false incidents. "
            "Intervals are of 95 % (Wilson). Slowdowns of jobs are not judged here: the generators' brief asks for no "
            "labels of them. "
            "False ones are per 1,000 GPU-days of these fleets, which hold far more trouble than the field's; "
            "where there was none, 3/N bounds the rate.",
            100,
        ),
        "", GOALS,
    ]  # fmt: skip
    lines += _runs(kept)
    for generator in sorted({g for result in kept.values() for g in result["generators"]}):
        held = [(name, result) for name, result in kept.items() if generator in result["generators"]]
        lines += _newest(generator, *held[-1])
        if generator == SCORING and len(held) > 1:
            _, result = held[0]
            lines += _causes(f"{generator} at the first scoring", result["generators"][generator][OURS])
    return "\n".join(lines) + "\n"


def _runs(kept: dict[str, Any]) -> list[str]:
    """Return the lines on every run, by generator, oldest first."""
    lines = ["", "## Every run", ""]
    lines += [
        "| Generator | Run | Commit | Faults | Precision | Recall | F1 | Delay median, p95 | False warnings "
        "| False drains |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for generator in sorted({g for result in kept.values() for g in result["generators"]}):
        for name, result in kept.items():
            if (methods := result["generators"].get(generator)) is not None:
                row = methods[OURS]
                lines.append(f"| {generator} | {name} | {result['commit']} | {row['faults']} | {_row(row)} |")
    for generator in sorted({g for result in kept.values() for g in result["generators"]}):
        held = [result["generators"][generator] for result in kept.values() if generator in result["generators"]]
        others = {method: row for methods in held for method, row in methods.items() if method != OURS}
        for method, row in others.items():
            lines.append(f"| {generator} | {method} | - | {row['faults']} | {_row(row)} |")
    lines += ["", "## Fleets without a fault", "", "Full of hard negatives, hours each:", "", *HEALTHY_HEAD]
    lines += _healthy(kept, "healthy")
    text = f"The same for a day: {DAY['nodes']} nodes, read once a minute, of seeds that nobody had looked at:"
    return [*lines, "", text, "", *HEALTHY_HEAD, *_healthy(kept, "days")]


def _newest(generator: str, name: str, result: dict[str, Any]) -> list[str]:
    """Return the lines on the newest run of a generator."""
    title = f"{generator}: {name}, at commit {result['commit']}, {result['date']}"
    return _causes(title, result["generators"][generator][OURS])


def _row(row: dict[str, Any]) -> str:
    f1 = "-" if row["f1"] is None else f"{row['f1']:.3f}"
    return (
        f"{_share(row, 'precision')} | {_share(row, 'recall')} | {f1} | {_seconds(row['delay_median_s'])}, "
        f"{_seconds(row['delay_p95_s'])} | {_rate(row, 'false')} | {_rate(row, 'false_drains')}"
    )


def _healthy(kept: dict[str, Any], form: str) -> list[str]:
    """Return the rows of the newest run on each generator's fleets without a fault."""
    newest = {g: (result, row) for result in kept.values() for g, row in result.get(form, {}).items()}
    lines = []
    for generator, (result, row) in sorted(newest.items()):
        what = ", ".join(f"{n} x {cause}" for cause, n in row["false_causes"].items()) or "nothing"
        rates = f"{_rate(row, 'false')} | {_rate(row, 'false_drains')}"
        lines.append(f"| {generator} | {result['commit']} | {row['gpu_days']:,.0f} | {rates} | {what} |")
    return lines


def _causes(title: str, row: dict[str, Any]) -> list[str]:
    """Return the lines on each kind and cause of a generator's faults, and what was reported wrongly."""
    lines = ["", f"## Generator {title}", "", "| Fault | Found | 95 % | Delay median, p95 |"]
    lines.append("| --- | --- | --- | --- |")
    for name, cause in row["causes"].items():
        low, high = cause["interval"]
        lines.append(
            f"| {name} | {cause['found']} of {cause['faults']} | {low:.2f} to {high:.2f} "
            f"| {_seconds(cause['delay_median_s'])}, {_seconds(cause['delay_p95_s'])} |"
        )
    if row["precursors"]:
        lines += ["", "| Precursor | Faults | Reported before the fault | Lead, median |", "| --- | --- | --- | --- |"]
        lines += [
            f"| {name} | {p['faults']} | {p['warned']} | {_seconds(p['lead_median_s'])} |"
            for name, p in row["precursors"].items()
        ]
    drains = row.get("false_drain_causes", {})
    wrong = ", ".join(
        f"{n} x {cause}" + (f" ({drains[cause]} of them a drain)" if cause in drains else "")
        for cause, n in row["false_causes"].items()
    )
    wrong = wrong or "nothing"
    return [*lines, "", textwrap.fill(f"Reported wrongly: {wrong}.", 100)]


def _share(row: dict[str, Any], name: str) -> str:
    low, high = row[f"{name}_interval"]
    return "-" if row[name] is None else f"{row[name]:.3f} ({low:.2f}-{high:.2f})"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f} s"


def _rate(row: dict[str, Any], count: str) -> str:
    per_1000 = 1000 / row["gpu_days"]
    return f"{row[count] * per_1000:.2f}" if row[count] else f"none (below {3 * per_1000:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--generators", nargs="+", default=["a", "b"], choices=["a", "b", "c", "d", "e", "f"])
    parser.add_argument("--fleets", type=int, default=20, help="of each generator")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--healthy", type=int, default=0, metavar="FLEETS", help="and so many fleets without a fault")
    parser.add_argument("--days", type=int, default=0, metavar="FLEETS", help="and so many for a day, 256 nodes each")
    parser.add_argument("--no-baselines", action="store_true")
    parser.add_argument("--final", action="store_true", help="generator c: once, when tuning is over")
    parser.add_argument("--keep", type=Path, help="folder for the scores of fleets that are done, to go on with")
    parser.add_argument("--name", help="keep the result under this name, and write the page")
    parser.add_argument("--commit", default="", help="of the detectors, for the page")
    parser.add_argument("--processes", type=int, default=multiprocessing.cpu_count())
    args = parser.parse_args()
    if "c" in args.generators and not args.final:
        parser.error("generator c is for one look at the end: add --final when that is now")
    if args.keep is not None:
        args.keep.mkdir(parents=True, exist_ok=True)
    seeds = range(args.first_seed, args.first_seed + args.fleets)
    result: dict[str, Any] = {"benchmark": "strangers", "fleets": args.fleets, "generators": {}, "commit": args.commit}
    result["date"] = time.strftime("%Y-%m-%d", time.gmtime())
    for generator in args.generators if seeds else ():
        sums = run(generator, seeds, args, {}, not args.no_baselines)
        result["generators"][generator.upper()] = {name: summary_report(total) for name, total in sums.items()}
    args.keep = None  # its scores are of fleets with faults
    for generator in args.generators if args.healthy else ():
        none = range(1000, 1000 + args.healthy)
        total = run(generator, none, args, {"healthy": True}, False)[OURS]
        result.setdefault("healthy", {})[generator.upper()] = summary_report(total)
    for generator in args.generators if args.days else ():
        total = run(generator, range(DAY_SEED, DAY_SEED + args.days), args, DAY, False)[OURS]
        result.setdefault("days", {})[generator.upper()] = summary_report(total)
    result["failed"] = FAILED
    if args.name:
        kept = json.loads(DATA.read_text("utf-8")) if DATA.exists() else {}
        kept[args.name] = result
        DATA.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
        PAGE.write_text(page(kept), encoding="utf-8")
    print(json.dumps(result))


if __name__ == "__main__":
    main()

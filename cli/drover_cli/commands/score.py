"""`drover score CASE INCIDENTS ...`: how well the incidents of replays name the faults of their cases."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drover_cli.output import print_json, print_table
from drover_core.times import iso

if TYPE_CHECKING:
    from drover_cli.scoring.score import (
        Found,
        KindScore,
        Label,
        Score,
    )
    from drover_cli.scoring.summary import Summary

HELP = "precision, recall and time to detect of a replay's incidents against the case's labels"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "pairs", type=Path, nargs="+", metavar="CASE INCIDENTS",
        help="case folder with labels.jsonl, and what `drover replay CASE --json` printed; several pairs are summed by "
        "the generator that made them",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="one JSON object")


def run(args: argparse.Namespace) -> int:
    from drover_cli.errors import CliError
    from drover_cli.scoring.summary import summarize

    if len(args.pairs) % 2:
        raise CliError("give pairs: a case folder and the incidents of its replay, and so on")
    scores: dict[str, list[Score]] = {}
    for case, incidents in zip(args.pairs[::2], args.pairs[1::2], strict=True):
        generator, result = _scored(case, incidents)
        scores.setdefault(generator, []).append(result)
    if len(args.pairs) == 2:
        if args.json:
            print_json(report(result))
        else:
            _print(result)
        return 0
    sums = {generator: summarize(those) for generator, those in sorted(scores.items())}
    if args.json:
        print_json({generator: summary_report(total) for generator, total in sums.items()})
    else:
        _print_sums(sums)
    return 0


def _scored(path: Path, incidents: Path) -> tuple[str, Score]:
    """Return which generator made a case, and its score."""
    from drover_cli.case.read import read_case, read_jsonl
    from drover_cli.errors import CliError
    from drover_cli.scoring import score as scoring

    labels_file = path / "labels.jsonl"
    if path.is_dir() and not labels_file.exists():
        raise CliError(
            f"{labels_file}: no such file; only a case with labels can be scored (`drover simulate` makes one)"
        )
    case = read_case(path)
    labels = _rows(labels_file, read_jsonl, scoring.label_of)
    if not incidents.exists():
        raise CliError(f"{incidents}: no such file; make it with `drover replay {path} --json > {incidents}`")
    found = _rows(incidents, read_jsonl, scoring.found_of)
    first, last = case.span
    made_by = json.loads((path / "fleet.json").read_text("utf-8")).get("generator")
    return str(made_by or "unnamed"), scoring.score(labels, found, case.spec.gpu_count * (last - first) / 86_400_000)


def _rows(path: Path, read: Any, convert: Any) -> list[Any]:
    from drover_cli.errors import CliError

    rows = []
    for number, row in read(path):
        try:
            rows.append(convert(row))
        except (KeyError, TypeError, ValueError) as error:
            raise CliError(
                f"{path}: line {number}: not of the documented form ({error!r}); see docs/reference/cases.md"
            ) from None
    return rows


def report(result: Score) -> dict[str, Any]:
    """The figures of a score as plain JSON."""
    from drover_cli.scoring.score import median, percentile

    def one(kind: KindScore) -> dict[str, Any]:
        return {
            "faults": kind.faults,
            "found": kind.found,
            "recall": kind.found / kind.faults,
            "delay_median_s": median(kind.delays_s),
            "delay_p95_s": percentile(kind.delays_s, 0.95),
            "delays_s": kind.delays_s,
        }

    def as_row(found: Found) -> dict[str, Any]:
        members = sorted(map(list, found.members), key=str)
        return {"id": found.id, "kind": found.kind, "cause": found.cause, "members": members, "action": found.action}

    def lost(label: Label) -> dict[str, Any]:
        return {"id": label.id, "kind": label.kind, "cause": label.cause, "start": iso(label.start_ms)}

    return {
        "kinds": {name: one(kind) for name, kind in sorted(result.kinds.items())},
        "faults": result.faults,
        "found": result.found,
        "precision": result.precision,
        "recall": result.recall,
        "f1": result.f1,
        "delay_median_s": median(result.delays_s),
        "delay_p95_s": percentile(result.delays_s, 0.95),
        "false_incidents": [as_row(f) for f in result.false],
        "false_drains": [as_row(f) for f in result.false_drains],
        "named": result.matched,
        "duplicates": result.duplicates,
        "hard_negatives": result.negatives,
        "tolerated_on_negatives": result.tolerated,
        "missed": [lost(label) for label in result.missed],
        "reported_otherwise": result.otherwise,
        "told_otherwise": result.otherwise,  # the name in 0.1; gone in the next release
        "false_notes": result.false_notes,
        "precursors": len(result.precursors),
        "warned_s": result.warned,
        "gpu_days": result.gpu_days,
    }


def _print(result: Score) -> None:
    from drover_cli.scoring.score import median, percentile

    def share(value: float | None) -> str:
        return "-" if value is None else f"{value:.3f}"

    def seconds(value: float | None) -> str:
        return "-" if value is None else f"{value:.0f} s"

    def line(name: str, faults: int, found: int, delays: list[float]) -> list[object]:
        recall = share(found / faults) if faults else "-"
        return [name, faults, found, recall, seconds(median(delays)), seconds(percentile(delays, 0.95))]

    rows = [line(name, k.faults, k.found, k.delays_s) for name, k in sorted(result.kinds.items())]
    rows.append(line("all", result.faults, result.found, result.delays_s))
    print_table(["FAULT", "FAULTS", "FOUND", "RECALL", "DELAY MEDIAN", "DELAY P95"], rows, right=frozenset(range(1, 6)))
    print()
    print(f"precision {share(result.precision)}   recall {share(result.recall)}   F1 {share(result.f1)}")
    print(
        f"{result.matched} incidents name a fault, {result.duplicates} name one again, {len(result.false)} name none; "
        f"{result.negatives} hard negatives, {result.tolerated} weaker incidents on them"
    )
    print(
        f"per 1,000 GPU-days ({result.gpu_days:.1f} GPU-days seen): "
        f"false drains {result.per_1000_gpu_days(len(result.false_drains))}, "
        f"false warnings {result.per_1000_gpu_days(len(result.false))}"
    )
    for f in result.false:
        print(f"false: {f.id} {f.kind}/{f.cause} on {sorted(f.members, key=str)[:3]}, wants {f.action}")
    for label in result.missed:
        members = sorted(label.members, key=str)[:3]
        late = result.otherwise.get(label.id)
        late_text = "" if late is None else f"; reported after {late:.0f} s by a note or in an incident open before"
        print(f"missed: {label.id} {label.kind}/{label.cause} on {members} at {iso(label.start_ms)}{late_text}")


def summary_report(total: Summary) -> dict[str, Any]:
    """Return the figures of several cases as plain JSON."""
    from drover_cli.scoring.score import median, percentile
    from drover_cli.scoring.summary import wilson

    found = len(total.delays_s)
    return {
        "cases": total.cases,
        "gpu_days": total.gpu_days,
        "faults": total.faults,
        "found": found,
        "hard_negatives": total.negatives,
        "reported": total.reported,
        "false": total.false,
        "false_drains": total.false_drains,
        "precision": total.precision,
        "precision_interval": list(wilson(total.reported, total.reported + total.false)),
        "recall": total.recall,
        "recall_interval": list(wilson(found, total.faults)),
        "f1": total.f1,
        "delay_median_s": median(total.delays_s),
        "delay_p95_s": percentile(total.delays_s, 0.95),
        "false_causes": dict(total.false_causes.most_common()),
        "false_drain_causes": dict(total.false_drain_causes.most_common()),
        "causes": {
            name: {
                "faults": cause.faults,
                "found": len(cause.delays_s),
                "interval": list(wilson(len(cause.delays_s), cause.faults)),
                "delay_median_s": median(cause.delays_s),
                "delay_p95_s": percentile(cause.delays_s, 0.95),
            }
            for name, cause in sorted(total.causes.items())
        },
        "precursors": {
            name: {"faults": kind.faults, "warned": len(kind.leads_s), "lead_median_s": median(kind.leads_s)}
            for name, kind in sorted(total.precursors.items())
        },
    }


def _print_sums(sums: dict[str, Summary]) -> None:
    from drover_cli.scoring.score import median, percentile
    from drover_cli.scoring.summary import wilson

    def share(value: float | None, hits: int, of: int) -> str:
        low, high = wilson(hits, of)
        return "-" if value is None else f"{value:.3f} ({low:.2f}-{high:.2f})"

    def seconds(value: float | None) -> str:
        return "-" if value is None else f"{value:.0f} s"

    rows = [
        [
            name, t.cases, f"{t.gpu_days:.1f}", t.faults, share(t.precision, t.reported, t.reported + t.false),
            share(t.recall, len(t.delays_s), t.faults), "-" if t.f1 is None else f"{t.f1:.3f}",
            seconds(median(t.delays_s)), seconds(percentile(t.delays_s, 0.95)), t.rate(t.false), t.rate(t.false_drains),
        ]
        for name, t in sums.items()
    ]  # fmt: skip
    print_table(
        ["GENERATOR", "CASES", "GPU-DAYS", "FAULTS", "PRECISION", "RECALL", "F1", "DELAY MEDIAN", "DELAY P95",
         "FALSE WARNINGS", "FALSE DRAINS"],
        rows, right=frozenset(range(1, 11)),
    )  # fmt: skip
    print("intervals of 95 %; false ones per 1,000 GPU-days")
    print()
    print_table(
        ["GENERATOR", "FAULT", "FAULTS", "FOUND", "RECALL", "DELAY MEDIAN", "DELAY P95"],
        [
            [name, cause, c.faults, len(c.delays_s), share(len(c.delays_s) / c.faults, len(c.delays_s), c.faults),
             seconds(median(c.delays_s)), seconds(percentile(c.delays_s, 0.95))]
            for name, t in sums.items()
            for cause, c in sorted(t.causes.items())
        ],
        right=frozenset(range(2, 7)),
    )  # fmt: skip
    warned = [
        [name, precursor, p.faults, len(p.leads_s), seconds(median(p.leads_s))]
        for name, t in sums.items()
        for precursor, p in sorted(t.precursors.items())
    ]
    if warned:
        print()
        print_table(["GENERATOR", "PRECURSOR", "FAULTS", "WARNED", "LEAD MEDIAN"], warned, right=frozenset({2, 3, 4}))
    for name, t in sums.items():
        for cause, count in t.false_causes.most_common():
            drains = t.false_drain_causes[cause]
            print(f"false: {name}: {count} x {cause}" + (f", {drains} of them a drain" if drains else ""))

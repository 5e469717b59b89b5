"""`drover score CASE INCIDENTS`: how well the incidents of a replay name the faults of the case."""

from __future__ import annotations

import argparse
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

HELP = "precision, recall and time to detect of a replay's incidents against the case's labels"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("case", type=Path, metavar="CASE", help="case folder with labels.jsonl")
    parser.add_argument("incidents", type=Path, metavar="INCIDENTS", help="what `drover replay CASE --json` printed")
    parser.add_argument("--json", action="store_true", help="one JSON object")


def run(args: argparse.Namespace) -> int:
    from drover_cli.case.read import read_case, read_jsonl
    from drover_cli.errors import CliError
    from drover_cli.scoring import score as scoring

    labels_file = args.case / "labels.jsonl"
    if args.case.is_dir() and not labels_file.exists():
        raise CliError(
            f"{labels_file}: no such file; only a case with labels can be scored (`drover simulate` makes one)"
        )
    case = read_case(args.case)
    labels = _rows(labels_file, read_jsonl, scoring.label_of)
    if not args.incidents.exists():
        raise CliError(
            f"{args.incidents}: no such file; make it with `drover replay {args.case} --json > {args.incidents}`"
        )
    found = _rows(args.incidents, read_jsonl, scoring.found_of)
    first, last = case.span
    result = scoring.score(labels, found, case.spec.gpu_count * (last - first) / 86_400_000)
    if args.json:
        print_json(report(result))
        return 0
    _print(result)
    return 0


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

"""`drover conform`: a sheet of requirements, answered row by row from the running collector."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from drover_cli import client
from drover_cli.errors import CliError
from drover_cli.output import print_json, print_table, say
from drover_proto import fleet_methods as methods

if TYPE_CHECKING:
    from drover_cli.conform.answers import RowAnswer

HELP = "NVIDIA's requirements for AI clouds (telemetry, breakfix, capacity), answered from the running collector"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    client.add_arguments(parser)
    parser.add_argument("rows", nargs="*", metavar="ROW", help="only these, such as BFX01 (default: all)")
    parser.add_argument("--json", action="store_true", help="one JSON object")


def run(args: argparse.Namespace) -> int:
    """Exit code 0 only if each row is answered with yes."""
    from drover_cli.conform import evidence
    from drover_cli.conform.answers import Answer
    from drover_cli.conform.sheet import ROWS

    known = {row.id.lower(): row for row in ROWS}
    for name in args.rows:
        if name.lower() not in known:
            raise CliError(f"no row {name!r}; there are {', '.join(row.id for row in ROWS)}")
    chosen = [known[name.lower()] for name in dict.fromkeys(args.rows)] or list(ROWS)
    with client.connect(args) as fleet:
        found = evidence.read(fleet)
    answers = [row.answered(found) for row in chosen]
    if args.json:
        print_json({"ts_ms": found.of(methods.GET_STATUS).ts_ms, "rows": [_as_json(answer) for answer in answers]})
    else:
        _print(answers)
    return int(any(answer.answer is not Answer.YES for answer in answers))


def _as_json(answer: RowAnswer) -> dict[str, object]:
    row = answer.row
    parts = [{"what": part.what, "answer": str(part.answer), "proof": part.proof} for part in answer.parts]
    return {
        "row": row.id, "area": row.area, "asks": row.asks, "source": row.source, "answer": str(answer.answer),
        "parts": parts,
    }  # fmt: skip


def _print(answers: list[RowAnswer]) -> None:
    print_table(
        ["ROW", "ANSWER", "PART", "PROOF"],
        [
            line
            for answer in answers
            for line in (
                [answer.row.id, answer.answer, answer.row.area, answer.row.asks],
                *(["", f"  {part.answer}", part.what, part.proof] for part in answer.parts),
            )
        ],
    )
    count = {word: sum(answer.answer == word for answer in answers) for word in ("yes", "partly", "no", "unknown")}
    say(f"\n{', '.join(f'{number} {word}' for word, number in count.items())}")

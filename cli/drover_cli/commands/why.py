"""`drover why PATH...`: why a job died or hangs, from the files that it left. Nothing is asked of the collector."""

from __future__ import annotations

import argparse
import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drover_cli.commands.export import moment
from drover_cli.errors import CliError
from drover_cli.output import print_json, say

if TYPE_CHECKING:
    from drover_core.jobs.files import File
    from drover_core.jobs.model import HardwareEvent, Proof, Verdict

HELP = "why a job died or hangs, from its log files and its ranks' dumps: which rank, what, what only followed from it"
MAX_FILES = 16_384
TAIL_MIB = 8
DUMP_MIB = 64
ALL_MIB = 256
LEAST_KIB = 16  # of a log, where there are many
SKIPPED = frozenset({".pt", ".pth", ".ckpt", ".safetensors", ".bin", ".npy", ".parquet", ".gz", ".xz", ".zst", ".zip"})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "path", nargs="+", type=Path, metavar="PATH",
        help="log files, flight recorder dumps, texts of NCCL RAS, files of NCCL Inspector, or folders of these",
    )  # fmt: skip
    parser.add_argument("--exit", type=int, metavar="CODE", help="the job's exit code, as the scheduler reports it")
    parser.add_argument("--signal", metavar="SIGNAL", help="the signal that ended the job: 9, KILL or SIGKILL")
    parser.add_argument("--case", type=Path, metavar="CASE", help="a case folder with the nodes' errors (XIDs, kernel)")
    parser.add_argument("--events", type=Path, metavar="FILE", help="the same as a file: events.jsonl of a case")
    parser.add_argument("--at", metavar="TIME", help="when the job ended (default: the last time in its logs, as UTC)")
    parser.add_argument(
        "--tail",
        type=int,
        default=TAIL_MIB,
        metavar="MIB",
        help=f"read the last so many MiB of each log (default {TAIL_MIB}; less where there are many)",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object")


def run(args: argparse.Namespace) -> int:
    from drover_core.jobs.files import gather
    from drover_core.jobs.judge import judge
    from drover_core.jobs.model import Failure

    if not 1 <= args.tail <= 256:
        raise CliError(f"--tail {args.tail}: give 1 to 256 MiB")
    ended_ms = moment(args.at, round(time.time() * 1000)) if args.at else None
    verdict = judge(gather(list(_files(args)), _events(args), _exit_code(args), ended_ms))
    if args.json:
        print_json(_json(verdict))
    else:
        _show(verdict)
    return 0 if verdict.failure is not Failure.UNKNOWN else 1


def _files(args: argparse.Namespace) -> Iterator[File]:
    from drover_core.jobs.files import File

    paths = _paths(args.path)
    tail = max(LEAST_KIB << 10, min(args.tail << 20, (ALL_MIB << 20) // len(paths)))
    for name, path in paths:
        try:
            size = path.stat().st_size
            with path.open("rb") as file:
                head = file.read(1)
                most = DUMP_MIB << 20 if head in (b"\x80", b"{") else tail
                cut = size > most
                file.seek(size - most if cut else 0)
                data = file.read(most)
        except OSError as error:
            raise CliError(f"{path}: cannot be read ({error.strerror})") from None
        yield File(name, data, cut)


def _paths(given: list[Path]) -> list[tuple[str, Path]]:
    """(name to show, file) of all that was given: folders are walked, links in them are not followed."""
    found: list[tuple[str, Path]] = []
    for path in given:
        if path.is_dir():
            inner = (each for each in sorted(path.rglob("*")) if each.is_file() and not each.is_symlink())
            found += [(str(each.relative_to(path)), each) for each in inner if each.suffix not in SKIPPED]
        elif path.is_file():
            found.append((str(path), path))
        else:
            raise CliError(f"{path}: there is no such file or folder")
        if len(found) > MAX_FILES:
            raise CliError(f"{path}: more than {MAX_FILES:,} files; give the job's own folder")
    if not found:
        raise CliError("no file to read: the folder is empty, or has weights and archives only")
    return found


def _exit_code(args: argparse.Namespace) -> int | None:
    if args.signal is None:
        return args.exit  # type: ignore[no-any-return]
    name = args.signal.upper()
    if name.isdigit() and 1 <= int(name) <= 64:
        return -int(name)
    try:
        return -signal.Signals[name if name.startswith("SIG") else f"SIG{name}"]
    except KeyError:
        raise CliError(f"--signal {args.signal}: there is no such signal; give 9, KILL or SIGKILL") from None


def _events(args: argparse.Namespace) -> list[HardwareEvent]:
    """Return the nodes' errors of a case or of a file in the form of its events.jsonl."""
    from drover_core.jobs.model import HardwareEvent
    from drover_core.times import from_iso

    path = args.case / "events.jsonl" if args.case else args.events
    if path is None:
        return []
    try:
        rows = [json.loads(line) for line in path.read_text("utf-8").splitlines() if line.strip()]
        return [
            HardwareEvent(
                str(r["node"]),
                r.get("gpu"),
                str(r["kind"]),
                str(r["code"]),
                str(r.get("message", "")),
                from_iso(r["ts"]),
            )
            for r in rows
            if not r.get("forgeable") and not r.get("backlog")  # what user space may have written proves nothing
        ]
    except OSError as error:
        raise CliError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CliError(f"{path}: not in the form of a case's events.jsonl (docs/reference/cases.md)") from None


def _show(verdict: Verdict) -> None:
    from drover_core.jobs.model import MEANING

    say(verdict.sentence)
    say(f"  class {verdict.failure}: {MEANING[verdict.failure]}; confidence {verdict.confidence:.0%}", 2)
    _section("evidence", verdict.proofs)
    faults = [
        fault.detail for fault in verdict.faults if not any(fault.detail == proof.text for proof in verdict.proofs)
    ]
    for title, lines in (("what the ranks recorded", faults), ("not read", verdict.notes)):
        if lines:
            print(f"\n{title}")
            for line in lines:
                say(f"  {line}", 4)
    _section("followed from it", verdict.consequences)


def _section(title: str, proofs: tuple[Proof, ...]) -> None:
    if proofs:
        print(f"\n{title}")
        for proof in proofs:
            of = f"rank {proof.rank}, " if proof.rank is not None else ""
            say(f"  {of}{proof.source}: {proof.text}", 4)


def _json(verdict: Verdict) -> dict[str, Any]:
    def proofs(found: tuple[Proof, ...]) -> list[dict[str, Any]]:
        return [{"text": p.text, "source": p.source, "rank": p.rank, "rule": p.rule or None} for p in found]

    return {
        "failure": str(verdict.failure),
        "confidence": verdict.confidence,
        "sentence": verdict.sentence,
        "rank": verdict.rank,
        "node": verdict.place.node or None,
        "gpu": verdict.place.gpu,
        "evidence": proofs(verdict.proofs),
        "consequences": proofs(verdict.consequences),
        "faults": [
            {
                "what": f.what, "ranks": list(f.ranks), "collective": f.collective or None, "sequence": f.sequence,
                "group": f.group or None, "detail": f.detail, "confidence": f.confidence, "waiting": list(f.waiting),
            }
            for f in verdict.faults
        ],
        "ranks": list(verdict.ranks),
        "notes": list(verdict.notes),
    }  # fmt: skip

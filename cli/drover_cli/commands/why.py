"""`drover why PATH...`: why a job died or hangs, from the files that it left. Nothing is asked of the collector."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drover_cli.commands.export import moment
from drover_cli.errors import CliError, visible
from drover_cli.output import print_json, say

if TYPE_CHECKING:
    from drover_core.jobs.files import File
    from drover_core.jobs.model import HardwareEvent, Proof, Verdict

HELP = "why a job died or hangs, from its log files and its ranks' dumps: which rank, what, what only followed from it"
MAX_FILES = 16_384
TAIL_MIB = 8
DUMP_MIB = 64
ALL_MIB = 256  # of logs
DUMPS_MIB = 2048  # all of them
EVENTS_MIB = 64
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
    verdict = judge(gather(_files(args), _events(args), _exit_code(args), ended_ms))
    if args.json:
        print_json(_json(verdict))
    else:
        _show(verdict)
    return 0 if verdict.failure is not Failure.UNKNOWN else 1


@dataclass(slots=True)
class _Found:
    """A file that was given, before it is read."""

    name: str
    path: Path
    size: int = 0
    whole: bool = False  # a dump: its tail alone says nothing
    problem: str = ""  # why it is not read


def _files(args: argparse.Namespace) -> Iterator[File]:
    """Yield each file: of a log its tail, of a dump all. What cannot be read is yielded with the reason."""
    from drover_core.jobs.files import File, fair_share

    found = _paths(args.path)
    for each in found:
        _look(each)
    if all(each.problem for each in found):
        raise CliError(f"{visible(found[0].name)}: {found[0].problem}; nothing else could be read")
    share = fair_share([each.size for each in found if not each.whole], ALL_MIB << 20)
    tail, left = min(args.tail << 20, share), DUMPS_MIB << 20
    for each in found:
        most = min(DUMP_MIB << 20, left) if each.whole else tail
        if each.whole and each.size > most:
            each.problem = f"it is larger than {DUMP_MIB} MiB, or all dumps than {DUMPS_MIB} MiB"
        data = b"" if each.problem else _tail(each, most)
        left -= len(data) if each.whole else 0
        yield File(each.name, data, each.size > most, each.problem)


def _look(each: _Found) -> None:
    """Set a file's size and kind, or why it cannot be read."""
    from drover_core.jobs.flight import looks_like_dump
    from drover_core.jobs.texts import looks_like_inspector

    if each.problem:
        return
    try:
        each.size = each.path.stat().st_size
        with each.path.open("rb") as file:
            head = file.read(4096)
    except OSError as error:
        each.problem = f"it cannot be read ({error.strerror})"
        return
    each.whole = looks_like_dump(head) or looks_like_inspector(head.decode("utf-8", "replace"))


def _tail(each: _Found, most: int) -> bytes:
    try:
        with each.path.open("rb") as file:
            file.seek(max(0, each.size - most))
            return file.read(min(most, each.size))
    except OSError as error:
        each.problem = f"it cannot be read ({error.strerror})"
        return b""


def _paths(given: list[Path]) -> list[_Found]:
    """Return all files that were given: folders are walked, links in them are not followed."""
    found: list[_Found] = []
    for path in given:
        mode = _mode(path)
        if stat.S_ISDIR(mode):
            found += sorted(_walk(path, MAX_FILES - len(found)), key=lambda each: each.path)
        elif stat.S_ISREG(mode):
            found.append(_Found(str(path), path))
        else:
            raise CliError(f"{visible(str(path))}: there is no such file or folder, or it is no regular file")
        if len(found) > MAX_FILES:
            raise CliError(f"{visible(str(path))}: more than {MAX_FILES:,} files; give the job's own folder")
    if not found:
        raise CliError("no file to read: the folder is empty, or has weights and archives only")
    return found


def _mode(path: Path, links: bool = True) -> int:
    """Return the kind of a file, 0 where there is none or its folder is closed. `links`: follow them."""
    try:
        return path.stat(follow_symlinks=links).st_mode
    except (OSError, ValueError):
        return 0


def _walk(folder: Path, most: int) -> list[_Found]:
    """Return the files in a folder and the folders in it that cannot be read; at most one more than `most`."""
    found: list[_Found] = []

    def unreadable(error: OSError) -> None:
        path = Path(error.filename)
        found.append(_Found(os.path.relpath(path, folder), path, 0, False, f"it cannot be read ({error.strerror})"))

    for at, _, names in os.walk(folder, onerror=unreadable):
        for name in names:
            path = Path(at, name)
            if path.suffix not in SKIPPED and stat.S_ISREG(_mode(path, links=False)):
                found.append(_Found(str(path.relative_to(folder)), path))
            if len(found) > most:
                return found
    return found


def _exit_code(args: argparse.Namespace) -> int | None:
    code: int | None = args.exit
    if code is not None and not 0 <= code <= 255:
        raise CliError(f"--exit {code}: an exit code is 0 to 255; give the number of a signal with --signal")
    if args.signal is None:
        return code
    name = args.signal.upper()
    if re.fullmatch("[0-9]{1,2}", name) and 1 <= int(name) <= 64:
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
        rows = [json.loads(line) for line in _events_text(path).splitlines() if line.strip()]
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
        raise CliError(f"{visible(str(path))}: cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        raise CliError(
            f"{visible(str(path))}: not in the form of a case's events.jsonl (docs/reference/cases.md)"
        ) from None


def _events_text(path: Path) -> str:
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:  # a FIFO: no wait
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise CliError(f"{visible(str(path))}: it is no regular file")
        data = file.read((EVENTS_MIB << 20) + 1)
    if len(data) > EVENTS_MIB << 20:
        raise CliError(f"{visible(str(path))}: larger than {EVENTS_MIB} MiB; give the errors of the job's hours only")
    return data.decode("utf-8")


def _show(verdict: Verdict) -> None:
    from drover_core.jobs.model import MEANING

    say(verdict.sentence)
    say(f"  class {verdict.failure}: {MEANING[verdict.failure]}; confidence {verdict.confidence:.0%}", 2)
    _section("evidence", verdict.proofs)
    faults = [
        fault.detail for fault in verdict.faults if not any(fault.detail == proof.text for proof in verdict.proofs)
    ]
    for title, lines in (("what the ranks recorded", faults), ("not read, or set aside", verdict.notes)):
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

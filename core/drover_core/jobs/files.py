"""Sort a job's files by what they hold: logs, flight recorder dumps, NCCL RAS and NCCL Inspector."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from drover_core.jobs.flight import Dump, DumpError, looks_like_dump, rank_of, read_dump
from drover_core.jobs.judge import Evidence
from drover_core.jobs.lines import Log, ranks_of_names, read_log
from drover_core.jobs.model import Fault, HardwareEvent, Place
from drover_core.jobs.texts import looks_like_inspector, looks_like_ras, read_inspector, read_ras

MAX_LINES = 500_000  # of all logs
LEAST_LINES = 20
MAX_VALUES = 60_000_000  # of all dumps, of eight bytes each
OPERATION = 40  # what one operation takes, in values
MAX_INSPECTED = 128 << 20  # bytes of NCCL Inspector's files


@dataclass(frozen=True, slots=True)
class File:
    """A file of a job. `cut`: `data` is its tail only. `problem`: there is no data."""

    name: str
    data: bytes
    cut: bool = False
    problem: str = ""  # why it was not read


def fair_share(wanted: Sequence[int], most: int) -> int:
    """Return the largest share that each may have so that all together have at most `most`: small ones leave more."""
    left = most
    for number, each in enumerate(ordered := sorted(wanted)):
        if each * (len(ordered) - number) > left:
            return left // (len(ordered) - number)
        left -= each
    return max(most, 1)


def gather(
    files: Iterable[File],
    events: Sequence[HardwareEvent] = (),
    exit_code: int | None = None,
    ended_ms: int | None = None,
) -> Evidence:  # fmt: skip
    """Return the evidence that files hold. What cannot be read is said in its notes."""
    notes: list[str] = []
    dumps: dict[int, Dump] = {}
    inspected: list[bytes] = []
    faults: list[Fault] = []
    places: dict[int, Place] = {}
    texts: list[File] = []
    for file in files:
        if file.problem:
            notes.append(f"{file.name}: {file.problem}; left out")
            continue
        head = file.data[:4096]
        text = head.decode("utf-8", "replace")
        if looks_like_dump(head) or (not file.data and "trace" in file.name and rank_of(file.name) is not None):
            _add_dump(file, dumps, notes)
        elif looks_like_ras(text):
            found, where = read_ras(file.data)
            faults += found
            places |= where
        elif looks_like_inspector(text):
            if sum(map(len, inspected)) + len(file.data) > MAX_INSPECTED:
                notes.append(f"{file.name}: more than {MAX_INSPECTED >> 20} MiB of NCCL Inspector's files; left out")
            else:
                inspected.append(file.data)
        elif head.count(0) > 64:
            notes.append(f"{file.name}: it is neither text nor a dump; left out")
        elif file.data:
            texts.append(file)
    if inspected:
        found, where = read_inspector(inspected)
        faults += found
        places |= where
    logs = _read_logs(texts, notes)
    return Evidence(logs, dumps, faults, places, events, exit_code, ended_ms, notes)


def _read_logs(texts: list[File], notes: list[str]) -> list[Log]:
    """Return the logs' last lines, MAX_LINES in all: a line of two bytes takes hundreds in memory."""
    named = ranks_of_names([file.name for file in texts])
    counts = [file.data.count(b"\n") + 1 for file in texts]
    most = max(LEAST_LINES, fair_share(counts, MAX_LINES))
    logs = []
    for file, count in zip(texts, counts, strict=True):
        logs.append(read_log(file.name, file.data, file.cut, named.get(file.name), most))
        if count > most:
            notes.append(f"{file.name}: only its last {most:,} lines were read")
        elif file.cut:
            notes.append(f"{file.name}: only its last {len(file.data) / 2**20:.3g} MiB were read")
    return logs


def _weight(dump: Dump) -> int:
    return dump.values + OPERATION * len(dump.operations)


def _add_dump(file: File, dumps: dict[int, Dump], notes: list[str]) -> None:
    if file.cut:
        notes.append(f"{file.name}: it is too large for a dump; left out")
        return
    try:
        dump = read_dump(file.name, file.data)
    except DumpError as error:
        notes.append(f"{file.name}: {error}; left out")
        return
    if sum(map(_weight, dumps.values())) + _weight(dump) > MAX_VALUES:
        notes.append(f"{file.name}: all dumps together hold too much; left out")
        return
    if dump.rank in dumps:
        notes.append(f"{file.name}: rank {dump.rank} has another dump already; left out")
        return
    dumps[dump.rank] = dump

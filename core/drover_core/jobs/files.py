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
MAX_VALUES = 120_000_000  # of all dumps, of eight bytes each: some 1,100 ranks with 2,000 entries
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
    dumps = _Dumps(notes)
    inspected: list[bytes] = []
    room = MAX_INSPECTED
    faults: list[Fault] = []
    places: dict[int, Place] = {}
    texts: list[File] = []
    for file in files:
        if file.problem:
            notes.append(f"{file.name}: {file.problem}; left out")
            dumps.skip(file.name)
            continue
        head = file.data[:4096]
        text = head.decode("utf-8", "replace")
        if looks_like_dump(head) or (not file.data and "trace" in file.name and rank_of(file.name) is not None):
            dumps.add(file)
        elif looks_like_ras(text):
            found, where = read_ras(file.data)
            faults += found
            places |= where
        elif looks_like_inspector(text):
            room -= len(file.data)
            if room < 0:
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
    skipped = frozenset(dumps.skipped - dumps.of_ranks.keys())
    return Evidence(
        logs, dumps.of_ranks, faults, places, events, exit_code, ended_ms, notes, skipped,
    )  # fmt: skip


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


class _Dumps:
    """The ranks' dumps. All together hold at most MAX_VALUES."""

    def __init__(self, notes: list[str]) -> None:
        self.of_ranks: dict[int, Dump] = {}
        self.skipped: set[int] = set()  # ranks that left a dump which is not read: they are not silent
        self._notes = notes
        self._room = MAX_VALUES

    def skip(self, name: str) -> None:
        if (rank := rank_of(name)) is not None:
            self.skipped.add(rank)

    def add(self, file: File) -> None:
        if why := self._add(file):
            self._notes.append(f"{file.name}: {why}; left out")

    def _add(self, file: File) -> str:
        """Keep a file's dump, or return why not."""
        if file.cut:
            self.skip(file.name)
            return "it is too large for a dump"
        try:
            dump = read_dump(file.name, file.data)
        except DumpError as error:
            return str(error)
        if dump.rank in self.of_ranks:
            return f"rank {dump.rank} has another dump already"
        weight = dump.values + OPERATION * len(dump.operations)
        if weight > self._room:
            self.skip(file.name)
            return "all dumps together hold too much"
        self._room -= weight
        self.of_ranks[dump.rank] = dump
        return ""

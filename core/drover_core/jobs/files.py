"""Sort a job's files by what they hold: logs, flight recorder dumps, NCCL RAS and NCCL Inspector."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from drover_core.jobs.flight import Dump, DumpError, looks_like_dump, rank_of, read_dump
from drover_core.jobs.judge import Evidence
from drover_core.jobs.lines import Log, ranks_of_names, read_log
from drover_core.jobs.model import Fault, HardwareEvent, Place
from drover_core.jobs.texts import looks_like_inspector, looks_like_ras, read_inspector, read_ras


@dataclass(frozen=True, slots=True)
class File:
    """A file of a job. `cut`: `data` is its tail only."""

    name: str
    data: bytes
    cut: bool = False


def gather(
    files: Sequence[File],
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
        head = file.data[:4096]
        text = head.decode("utf-8", "replace")
        if looks_like_dump(head) or (not file.data and "trace" in file.name and rank_of(file.name) is not None):
            _add_dump(file, dumps, notes)
        elif looks_like_ras(text):
            found, where = read_ras(file.data)
            faults += found
            places |= where
        elif looks_like_inspector(text):
            inspected.append(file.data)
        elif head.count(0) > 64:
            notes.append(f"{file.name}: it is neither text nor a dump; left out")
        elif file.data:
            texts.append(file)
    if inspected:
        found, where = read_inspector(inspected)
        faults += found
        places |= where
    named = ranks_of_names([file.name for file in texts])
    logs: list[Log] = []
    for file in texts:
        logs.append(read_log(file.name, file.data, file.cut, named.get(file.name)))
        if file.cut:
            notes.append(f"{file.name}: only its last {len(file.data) / 2**20:.3g} MiB were read")
    return Evidence(logs, dumps, faults, places, events, exit_code, ended_ms, notes)


def _add_dump(file: File, dumps: dict[int, Dump], notes: list[str]) -> None:
    if file.cut:
        notes.append(f"{file.name}: it is too large for a dump; left out")
        return
    try:
        dump = read_dump(file.name, file.data)
    except DumpError as error:
        notes.append(f"{file.name}: {error}; left out")
        return
    if dump.rank in dumps:
        notes.append(f"{file.name}: rank {dump.rank} has another dump already; left out")
        return
    dumps[dump.rank] = dump

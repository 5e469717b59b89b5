"""Events of ranks, made of recorded dumps (tests/data/rank_dumps) as an agent makes them."""

from __future__ import annotations

import json
from pathlib import Path

from drover_core.jobs.flight import read_dump
from drover_core.jobs.rank_report import RankReport, of_dump, read_message, to_message
from drover_core.model.events import Event, EventKind

FOLDER = Path(__file__).resolve().parents[1] / "data/rank_dumps"
RANKS = 4


def dump_at(kind: str, rank: int, written_ms: int) -> bytes:
    """Return a recorded dump with its times moved, so that the newest one was written then."""
    name = f"trace_rank_{rank}.json"
    times = json.loads((FOLDER / "written.json").read_text())
    newest = max(ms for path, ms in times.items() if path.startswith(f"{kind}/"))
    found = json.loads((FOLDER / kind / name).read_text())
    for entry in found["entries"]:
        entry["time_created_ns"] = int(entry["time_created_ns"]) + (written_ms - newest) * 1_000_000
    return json.dumps(found).encode()


def report(kind: str, rank: int, written_ms: int, job: str = "") -> RankReport:
    dump = read_dump(f"trace_rank_{rank}.json", dump_at(kind, rank, written_ms))
    return read_message(to_message(of_dump(dump, job, written_ms)))


def rank_event(found: RankReport, node: str, gpu: int | None, at_ms: int) -> Event:
    """Return the event of a report that reached the collector then."""
    return Event(
        f"{node}/s/{found.rank}", found.written_ms, node, gpu, EventKind.RANK, "collective", to_message(found),
        "rank_dumps", received_ms=at_ms, forgeable=True,
    )  # fmt: skip


def rank_events(kind: str, at_ms: int, node: str, *, gpus: bool = True, skip: tuple[int, ...] = ()) -> list[Event]:
    """Return the events of all recorded ranks on one node, those of `skip` left out."""
    there = [r for r in range(RANKS) if (FOLDER / kind / f"trace_rank_{r}.json").exists() and r not in skip]
    return [rank_event(report(kind, r, at_ms), node, r if gpus else None, at_ms) for r in there]

"""Where the ranks on this node's GPUs stand in their jobs' parallel groups: `gpu3.place` of the inventory.

The loop's own word (`Reporter(..., parallel=...)`) counts before the command line. It is an entry of the inventory, as
the processes of a GPU are: a state that a collector which starts again finds in its store, and that an export takes
along. Command lines and environments hold secrets: of each only the sizes and ranks are kept, and nothing else is sent
or logged.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from drover_agent.sources.gpus import Gpus
from drover_agent.sources.workloads.rank_arguments import RANKS, by_arguments, by_title, rank_and_world
from drover_core.jobs.place import PlaceError, RankPlace, key, pack

EVERY_MS = 60_000  # a change of the inventory is a new Hello of the node
AGAIN_MS = 60_000  # a process that says nothing is asked again: it may be between fork and exec, or not named yet
TRIES = 3
MAX_BYTES = 1 << 18
MAX_ANCESTORS = 5
MAX_LOGGED = 32
_NAMES = tuple(name for pair in RANKS for name in pair)

_log = logging.getLogger(__name__)


class PlaceReader:
    """Asks each process that holds a GPU once, and its loop's reports at each read."""

    def __init__(self, proc: Path, gpus: Gpus) -> None:
        self._proc, self._gpus = proc, gpus
        self._found: dict[int, RankPlace] = {}  # process -> its place
        self._asked: dict[int, tuple[int, int]] = {}  # process -> (times asked, when)
        self._seen: dict[int, str] = {}
        self._sent: dict[int, str] = {}
        self._sent_ms: int | None = None
        self._logged: set[str] = set()

    def read(self, now_ms: int) -> dict[str, str]:
        """Return what has changed of the inventory, once it has settled; an empty value: no longer known."""
        held = self._gpus.pids()
        there = {process for processes in held.values() for process in processes}
        self._found = {process: place for process, place in self._found.items() if process in there}
        self._asked = {process: asked for process, asked in self._asked.items() if process in there}
        self._gpus.keep_places(there)
        jobs = {process: job for job, processes in self._gpus.jobs().items() for process in processes}
        for process in sorted(there):
            self._ask(process, jobs.get(process, ""), now_ms)
        said = self._gpus.places()
        places = {slot: self._of_slot(processes, said, jobs) for slot, processes in held.items()}
        now = {slot: text for slot, text in places.items() if text} | {
            slot: "" for slot in self._sent if not places.get(slot)
        }
        settled, self._seen = now == self._seen, now
        changed = {slot: text for slot, text in now.items() if self._sent.get(slot, "") != text}
        if not changed or not settled or not self._is_due(now_ms):
            return {}
        self._sent, self._sent_ms = {slot: text for slot, text in now.items() if text}, now_ms
        return {key(slot): text for slot, text in changed.items()}

    def _is_due(self, now_ms: int) -> bool:
        return self._sent_ms is None or not 0 <= now_ms - self._sent_ms < EVERY_MS

    def _of_slot(self, processes: Sequence[int], said: Mapping[int, RankPlace], jobs: Mapping[int, str]) -> str:
        """Return the place of the rank on a GPU; "": none is known, or two processes say different ones."""
        named = {process: said[process] for process in processes if process in said}
        found = named or {process: self._found[process] for process in processes if process in self._found}
        texts = {
            pack(RankPlace(jobs.get(process, place.job), place.rank, place.world, place.axes, place.by))
            for process, place in found.items()
        }
        return texts.pop() if len(texts) == 1 else ""

    def _ask(self, process: int, job: str, now_ms: int) -> None:
        times, at_ms = self._asked.get(process, (0, 0))
        if process in self._found or times >= TRIES or (times and 0 <= now_ms - at_ms < AGAIN_MS):
            return
        self._asked[process] = times + 1, now_ms
        try:
            place = self._place(process, job)
        except PlaceError as error:
            self._log_once(f"the place of a rank of job {job or 'unknown'} is not known: {error}")
            return
        if place is not None:
            self._found[process] = place

    def _place(self, process: int, job: str) -> RankPlace | None:
        """
        Raises:
            PlaceError: what it says does not fit together.
        """
        arguments = self._arguments(process)
        if not arguments:
            return None
        if place := by_title(arguments[0], lambda: self._ancestors(process), job):
            return place
        rank = rank_and_world(self._environment(process))
        return None if rank is None else by_arguments(arguments, *rank, job)

    def _ancestors(self, process: int) -> Iterator[Sequence[str]]:
        for _ in range(MAX_ANCESTORS):
            try:
                rest = (self._proc / str(process) / "stat").read_text("utf-8", "replace").rpartition(")")[2].split()
                process = int(rest[1])
            except (OSError, ValueError, IndexError):
                return
            if process <= 1:
                return
            yield self._arguments(process)

    def _arguments(self, process: int) -> list[str]:
        return self._bytes(process, "cmdline").decode("utf-8", "replace").split("\0")[:-1]

    def _environment(self, process: int) -> dict[str, str]:
        """Return those of the launchers' variables that a process has, the first of each name."""
        data, found = b"\0" + self._bytes(process, "environ"), {}
        for name in _NAMES:
            _, there, rest = data.partition(b"\0" + name.encode() + b"=")
            if there:
                found[name] = rest[:32].partition(b"\0")[0].decode("ascii", "replace")
        return found

    def _bytes(self, process: int, name: str) -> bytes:
        try:
            descriptor = os.open(f"{self._proc}/{process}/{name}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:  # it has ended, or may not be read
            return b""
        with os.fdopen(descriptor, "rb") as file:
            try:
                return file.read(MAX_BYTES)
            except OSError:
                return b""

    def _log_once(self, text: str) -> None:
        if text not in self._logged and len(self._logged) < MAX_LOGGED:
            self._logged.add(text)
            _log.warning("%s", text)

"""Flight recorder dumps that ranks of jobs leave on this node, as events: where each rank stands in its collectives.

PyTorch's watchdog writes a dump when a collective times out (TORCH_FR_DUMP_TEMP_FILE and the rank; docs of
torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp). What is sent of it is small (drover_core.jobs.rank_report).

A dump is a file that a user wrote: it is read up to a size, by a reader that runs nothing (plain_pickle), and its event
is marked forgeable. A file is read once when it is new; what is older than the start of the agent is history. On a file
system of the network only dumps of ranks that run here are sent, for the agents of all nodes see the same files.
"""

from __future__ import annotations

import contextlib
import glob
import logging
import os
import queue
import re
import stat
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from drover_agent.sources.base import NodeEvent, Reading
from drover_agent.sources.gpus import Gpus
from drover_core.model.kinds import EventKind

MAX_FILES = 2_048  # new ones at the paths; more are not looked at
MAX_LOOKED = 50_000  # of any age: some sites never remove them
MAX_BYTES = 16 << 20  # of a dump; the recorder's usual 2,000 entries with their stacks take a fraction of it
# Values of a dump: each may take 100 bytes while it is read, and the agent may use 256 MB (MemoryMax in
# systemd/drover-agent.service). A pickle of 2,000 entries with 30 frames each has 850,000.
MAX_VALUES = 1_000_000
WAIT_S = 0.2  # of one reading for its look at the files: what takes longer comes with the next one
HUNG_S = 60.0  # a look that takes longer hangs, as on a file system whose server is away
OLD_MS = 600_000  # a dump that was written so long ago is history
PLACED_S = 3_600.0  # the GPU of a rank is remembered so long after its process has ended
MAX_ENVIRONMENT = 1 << 18
CODE = "collective"
# File systems that several nodes share (their names in /proc/self/mountinfo).
SHARED = ("nfs", "lustre", "ceph", "gpfs", "beegfs", "wekafs", "glusterfs", "cifs", "smb3", "9p", "virtiofs", "fuse")
RANKS = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")  # torchrun, srun, Open MPI, Hydra

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class RankPlaces:
    """Which rank runs on which GPU, by the environments of the processes that hold GPUs."""

    proc: Path
    gpus: Gpus
    _asked: set[int] = field(default_factory=set)  # processes whose environment was read, or may not be
    _found: dict[int, tuple[int, int, float]] = field(default_factory=dict)  # slot -> (rank, uid, seen at)

    def look(self, now_s: float) -> None:
        held = {process: slot for slot, processes in self.gpus.pids().items() for process in processes}
        self._asked &= held.keys()
        for process in held.keys() - self._asked:
            self._asked.add(process)
            if found := self._rank_and_user(process):
                self._found[held[process]] = *found, now_s
        for slot, (rank, uid, at_s) in list(self._found.items()):
            if slot in held.values():
                self._found[slot] = rank, uid, now_s
            elif now_s - at_s > PLACED_S:
                del self._found[slot]

    def _rank_and_user(self, process: int) -> tuple[int, int] | None:
        path = self.proc / str(process)
        try:
            with (path / "environ").open("rb") as file:
                text = file.read(MAX_ENVIRONMENT).decode("utf-8", "replace")
            uid = path.stat().st_uid
        except OSError:  # it has ended, or may not be read
            return None
        pairs = dict(item.partition("=")[::2] for item in text.split("\0"))
        number = next((pairs[name] for name in RANKS if pairs.get(name, "").isdecimal()), "")
        return (int(number), uid) if number and len(number) < 7 else None

    @property
    def known(self) -> bool:
        return bool(self._found)

    def slot_of(self, rank: int, uid: int) -> int | None:
        """Return the GPU of a user's rank; None: not known, or several jobs of the user have such a rank."""
        slots = [slot for slot, (number, user, _) in self._found.items() if (number, user) == (rank, uid)]
        return slots[0] if len(slots) == 1 else None


class RankDumpsSource:
    """Looks for new files at each read, in a thread of its own: to parse a large dump takes seconds."""

    name = "rank_dumps"
    interval_s = 2.0

    def __init__(self, patterns: Sequence[str], gpus: Gpus, proc: Path) -> None:
        self._patterns = [(pattern.replace("{job}", "*"), _regex(pattern)) for pattern in patterns]
        self._places = RankPlaces(proc, gpus)
        self._mounts = proc / "self/mountinfo"
        self._seen: dict[str, tuple[int, int, int]] = {}  # path -> (inode, size, time) of what was dealt with
        self._shared: dict[int, bool] = {}  # device -> several nodes share it
        self._first_ms: int | None = None
        self._warned: set[str] = set()
        self._found: queue.SimpleQueue[NodeEvent | Exception] = queue.SimpleQueue()
        self._looking: threading.Thread | None = None
        self._began_s = 0.0

    def read(self, now_ms: int) -> Reading:
        """
        Raises:
            TimeoutError: the last look hangs. OSError: it failed.
        """
        self._first_ms = now_ms if self._first_ms is None else self._first_ms
        if self._looking is None:
            self._looking = threading.Thread(target=self._look, name=self.name, daemon=True)
            self._began_s = time.monotonic()
            self._looking.start()
        self._looking.join(WAIT_S)
        if not self._looking.is_alive():
            self._looking = None
        elif time.monotonic() - self._began_s > HUNG_S:
            raise TimeoutError(f"a look at the paths of rank_dumps takes longer than {HUNG_S:.0f} s")
        reading = Reading()
        with contextlib.suppress(queue.Empty):
            while True:
                found = self._found.get_nowait()
                if isinstance(found, Exception):
                    raise found
                reading.events.append(found)
        return reading

    def close(self) -> None:
        """Nothing is held open; a look that hangs is left behind."""

    def _look(self) -> None:
        """The thread's work: find new files, and put the events of their dumps into the queue."""
        try:
            self._places.look(time.monotonic())
            there = dict(self._files())
            self._seen = {path: mark for path, mark in self._seen.items() if path in there}
            for path, (found, job) in there.items():
                mark = found.st_ino, found.st_size, found.st_mtime_ns
                if self._seen.get(path) == mark or not found.st_size:
                    continue
                self._seen[path] = mark
                if self._wanted(path, found) and (event := self._event(path, found, job)):
                    self._found.put(event)
        except Exception as error:  # noqa: BLE001  # raised by the next read, as one of its own
            self._found.put(error)

    def _files(self) -> Iterator[tuple[str, tuple[os.stat_result, str]]]:
        count = looked = 0
        young_ms = time.time_ns() // 1_000_000 - OLD_MS
        for pattern, regex in self._patterns:
            for path in glob.iglob(pattern):  # noqa: PTH207  # absolute patterns
                looked += 1
                try:
                    found = Path(path).stat(follow_symlinks=False)
                except OSError:  # removed meanwhile
                    continue
                count += found.st_mtime_ns // 1_000_000 >= young_ms
                if count > MAX_FILES or looked > MAX_LOOKED:
                    self._warn(f"too many files at the paths of rank_dumps, {looked} so far: the others are left out")
                    return
                if found.st_mtime_ns // 1_000_000 < young_ms:
                    continue
                match = regex.fullmatch(path)
                if match and stat.S_ISREG(found.st_mode):
                    yield path, (found, match.groupdict().get("job", ""))

    def _wanted(self, path: str, found: os.stat_result) -> bool:
        if self._first_ms is not None and found.st_mtime_ns // 1_000_000 < self._first_ms - OLD_MS:
            return False
        if found.st_size > MAX_BYTES:
            self._warn(f"{path}: a dump of more than {MAX_BYTES >> 20} MiB is not read")
            return False
        return True

    def _event(self, path: str, found: os.stat_result, job: str) -> NodeEvent | None:
        """Return the event of a dump; None: it is no whole one, or of a rank of another node."""
        from drover_core.jobs.flight import DumpError, rank_of, read_dump  # only where jobs leave dumps
        from drover_core.jobs.rank_report import of_dump, to_message

        name = path.rpartition("/")[2]
        rank = rank_of(name)
        slot = None if rank is None else self._places.slot_of(rank, found.st_uid)
        if slot is None and self._is_shared(found.st_dev):
            if not self._places.known:
                self._warn(f"{path}: nodes share this file system and no rank is known to run here: left out")
            return None
        try:
            dump = read_dump(name, _bytes(path), MAX_VALUES)
        except (OSError, DumpError) as error:  # half written: it is read again when it has changed
            self._warn(f"{path}: not read yet ({error})")
            return None
        written_ms = found.st_mtime_ns // 1_000_000
        message = to_message(of_dump(dump, job, written_ms))
        return NodeEvent(written_ms, slot, EventKind.RANK, CODE, message, self.name, forgeable=True, where=path)

    def _is_shared(self, device: int) -> bool:
        if device not in self._shared:
            self._shared[device] = _shared(self._mounts, device)
        return self._shared[device]

    def _warn(self, text: str) -> None:
        if text not in self._warned and len(self._warned) < 100:
            self._warned.add(text)
            _log.warning("%s", text)


def _regex(pattern: str) -> re.Pattern[str]:
    """Return what matches the paths of a pattern, with the job's name as a group."""
    parts = {"*": "[^/]*", "?": "[^/]", "{job}": "(?P<job>[^/]*)"}
    return re.compile("".join(parts.get(each) or re.escape(each) for each in re.split(r"(\{job\}|\*|\?)", pattern)))


def _bytes(path: str) -> bytes:
    """Return a file's bytes. Not through a link, and never waiting for a writer, as a FIFO in its place would."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return b""
        return file.read(MAX_BYTES)


def _shared(mounts: Path, device: int) -> bool:
    """Return whether nodes share the file system of a device. proc(5), mountinfo: fields 3 and, after " - ", 1."""
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in mounts.read_text("utf-8", "replace").splitlines():
        fields, _, rest = line.partition(" - ")
        if number in fields.split()[2:3]:
            return rest.split(" ", 1)[0].startswith(SHARED)
    return False  # devices of btrfs's subvolumes stand nowhere; those of network file systems do

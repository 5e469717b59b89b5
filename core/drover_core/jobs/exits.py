"""How the processes of a job ended, by their launchers' reports, and where they ran.

Forms: torchrun's report (torch/distributed/elastic/multiprocessing/errors, ChildFailedError), srun's lines of tasks,
mpirun's, torch.multiprocessing.spawn's, DeepSpeed's launcher's, and what NCCL and loops print of a rank's host.
"""

from __future__ import annotations

import re
import signal as signals
from collections.abc import Iterable
from dataclasses import dataclass, field

from drover_core.jobs.lines import RANK_LIMIT, Line
from drover_core.jobs.model import Place

_SRUN = re.compile(
    r"srun: error: ([\w.-]{1,80}): tasks? ([\d,\[\]-]{1,200}): (?:Exited with exit code (\d{1,3})|([A-Z][\w ()]{2,40}))"
)
_HOST = re.compile(r" *host +: (\S{1,80})")
_RANK = re.compile(r" *rank +: (\d{1,6}) \(local_rank: (\d{1,5})\)")
_CODE = re.compile(r" *exitcode +: (-?\d{1,4}) \(pid: \d+\)")
_MPI = re.compile(r"process rank (\d{1,6}) with PID \d+ on node (\S{1,80}) exited on signal (\d{1,2})")
_SPAWN = re.compile(r"process (\d{1,6}) terminated with (?:signal (SIG\w{2,8})|exit code (\d{1,3}))")
_SPAWNED = re.compile(r"-- Process (\d{1,6}) terminated with the following error")
_LIGHTNING = re.compile(r"\[rank: (\d{1,6})\] Child process with PID \d{1,10} terminated with code (-?\d{1,3})\b")
_RETURN = re.compile(r"exits with return code = (-?\d{1,3})")
_SHELL = re.compile(
    r"(?:^|: |\d )(Killed|Segmentation fault|Aborted|Bus error|Terminated)(?: +\(core dumped\)| {2,}|$)"
)
_KUBE = re.compile(r"\bExit Code: +(\d{1,3})\b|\"exitCode\": ?(\d{1,3})\b")
_SAYS_NODE = re.compile(
    r"\b(?:global[_ ]?)?rank[ =:]{1,3}(\d{1,6})\b.{0,24}?\b(?:on|host|hostname|node)[ =:]{1,3}([A-Za-z][\w.-]{0,80})"
    r"(?:.{0,40}?\b(?:local[_ ]?rank|gpu|device|cuda)[ =:]{1,3}(\d{1,3})\b)?",
    re.I,
)
_NCCL_RANK = re.compile(r"\brank (\d{1,6}) nranks \d+ cudaDev (\d{1,3})")
_ENDING = re.compile(
    r"Job step aborted|CANCELLED AT |closing signal SIG|Force Terminated|sigkill_handler"
    r"|Forcefully terminating all other processes"
)
_ANY = re.compile(
    r"srun|exit|Exit| host +:|rank|Rank|RANK|signal|terminated|Killed|Segmentation|Aborted|Bus error|Terminated"
    r"|Root Cause|Failures:|aborted|CANCELLED|sigkill"
)  # a line without one of these says nothing to this module
WORDS = {
    "Killed": 9, "Segmentation fault": 11, "Aborted": 6, "Bus error": 7, "Terminated": 15, "Out Of Memory": 9,
    "Floating point exception": 8, "Illegal instruction": 4,
}  # fmt: skip
MAX_EXITS = 50_000
CRASHES = frozenset({4, 6, 7, 8, 11})


@dataclass(frozen=True, slots=True)
class Exit:
    """The end of one rank's process. `code` below 0: ended by that signal."""

    rank: int | None
    code: int
    line: Line
    first: bool  # nothing had begun to end the job

    @property
    def words(self) -> str:
        if self.code >= 0:
            return f"ended with exit code {self.code}"
        try:
            return f"was ended by {signals.Signals(-self.code).name}"
        except ValueError:
            return f"was ended by signal {-self.code}"


@dataclass(slots=True)
class Ends:
    exits: list[Exit] = field(default_factory=list)
    places: dict[int, Place] = field(default_factory=dict)
    ranks: set[int] = field(default_factory=set)
    left_out: int = 0  # ends over MAX_EXITS

    def add(self, end: Exit) -> None:
        """Keep an end; the first MAX_EXITS only, for one line of srun can name thousands."""
        if len(self.exits) < MAX_EXITS:
            self.exits.append(end)
        else:
            self.left_out += 1

    @property
    def first(self) -> Exit | None:
        """The first process that failed by itself."""
        return next((each for each in self.exits if each.first and each.code), None)

    @property
    def crash(self) -> Exit | None:
        """The first process that crashed: no launcher ends another one like that."""
        return next((each for each in self.exits if -each.code in CRASHES - {6}), None)

    def of(self, rank: int) -> Exit | None:
        return next((each for each in self.exits if each.rank == rank), None)


def find_ends(lines: Iterable[Line]) -> Ends:
    """Return the ends of all ranks that a launcher reports, and where ranks ran."""
    ends, report, ending = Ends(), _Report(), False
    for line in lines:
        if line.rank is not None and line.rank < RANK_LIMIT:
            ends.ranks.add(line.rank)
            if line.node:
                ends.places.setdefault(line.rank, Place(line.node, line.gpu))
        if not _ANY.search(line.text):
            continue
        report.read(line, ends)
        _srun(line, ends, ending)
        _others(line, ends, ending)
        _place(line, ends)
        ending = ending or bool(_ENDING.search(line.text))
    return ends


class _Report:
    """Torchrun's report: blocks of host, rank, exit code; the root cause has a heading of its own."""

    def __init__(self) -> None:
        self._root = False
        self._host = ""
        self._rank = -1

    def read(self, line: Line, ends: Ends) -> None:
        text = line.text
        if "Root Cause (first observed failure)" in text:
            self._root = True
        elif text.startswith("Failures:"):
            self._root = False
        elif match := _HOST.match(text):
            self._host = match[1]
        elif match := _RANK.match(text):
            self._rank = int(match[1])
            host = "" if self._host in ("localhost", "") else self._host
            ends.places[self._rank] = Place(host, int(match[2]))
            ends.ranks.add(self._rank)
        elif (match := _CODE.match(text)) and self._rank >= 0:
            ends.add(Exit(self._rank, int(match[1]), line, self._root))


def _srun(line: Line, ends: Ends, ending: bool) -> None:
    match = _SRUN.search(line.text)
    if match is None:
        return
    code = int(match[3]) if match[3] else -WORDS.get((match[4] or "").partition(" (")[0].strip(), 0)
    if len(ends.exits) >= MAX_EXITS:
        ends.left_out += 1
        return
    for rank in _tasks(match[2]):
        ends.add(Exit(rank, code, line, not ending))
        ends.places[rank] = Place(match[1], ends.places.get(rank, Place()).gpu)
        ends.ranks.add(rank)


def _tasks(text: str) -> list[int]:
    """`3`, `0-2,5` or `[0-3]`, at most 4096."""
    found: list[int] = []
    for part in text.strip("[]").split(","):
        low, _, high = part.strip("[]").partition("-")
        if low.isdecimal() and len(low) < 7:
            last = int(high) if high.isdecimal() and len(high) < 7 else int(low)
            found += range(int(low), min(last, int(low) + 4096) + 1)
    return found[:4096]


def _others(line: Line, ends: Ends, ending: bool) -> None:
    text = line.text
    if match := _MPI.search(text):
        ends.add(Exit(int(match[1]), -int(match[3]), line, not ending))
        ends.places[int(match[1])] = Place(match[2])
    elif match := _SPAWN.search(text):
        number = getattr(signals, match[2], 0) if match[2] else 0
        ends.add(Exit(int(match[1]), -int(number) if match[2] else int(match[3]), line, True))
    elif match := _SPAWNED.search(text):
        ends.add(Exit(int(match[1]), 1, line, True))
    elif match := _RETURN.search(text):
        # DeepSpeed ends the others first, then reports the one that it had found dead: launcher/launch.py
        ends.add(Exit(None, int(match[1]), line, True))
    elif match := _LIGHTNING.search(text):
        ends.add(Exit(int(match[1]), int(match[2]), line, not ending))
        ends.ranks.add(int(match[1]))
    elif match := _KUBE.search(text):
        code = int(match[1] or match[2])
        ends.add(Exit(None, 128 - code if code > 128 else code, line, True))
    elif "srun" not in text and "DataLoader" not in text and (match := _SHELL.search(text)):
        ends.add(Exit(line.rank, -WORDS[match[1]], line, not ending))


def _place(line: Line, ends: Ends) -> None:
    if line.gpu is not None and (match := _NCCL_RANK.search(line.text)):
        ends.places[int(match[1])] = Place(line.node, int(match[2]))
    elif (match := _SAYS_NODE.search(line.text)) and (rank := int(match[1])) < RANK_LIMIT:
        gpu = int(match[3]) if match[3] else None
        ends.places.setdefault(rank, Place(match[2], gpu))
        ends.ranks.add(rank)

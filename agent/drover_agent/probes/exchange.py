"""The folder through which the agent and the probe service, which is no child of it, talk: one small file each.

    requests/ID.json   written by the agent; the service takes it by renaming it to
    taken/ID.json      while it runs; removed when there is
    results/ID.json    written by the service; the agent removes it when its spool has it

Every file is whole or not there. A file in `taken` while no service runs is one that a service left when it was killed.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from drover_agent.atomic_file import write_whole
from drover_agent.probes import GROUP, PROBES, Level
from drover_agent.probes.base import Device, Group, Result
from drover_core.model.events import from_dict

MAX_FILE_BYTES = 8 << 20
MAX_GPUS = 256
LONGEST_S = 4 * 3600.0
# What keeps new jobs off the node meanwhile: nothing (the collector knows no scheduler; "": it is older), the scheduler
# has drained it, a job of its own holds it (`hold.py`), or nobody but the person who asks.
JOB = "job"
# Begins the id of a request that an epilog made. Nobody keeps other jobs off the node meanwhile; the collector judges
# the result although it asked for none.
AFTER_JOB = "gate-"
PROTECTIONS = ("", "none", "drained", JOB, "hand")
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class Outcome(StrEnum):
    """How a request ended without the runner (whose `End` says the rest)."""

    REFUSED = "refused"  # not asked rightly, or its GPUs may not be probed now
    NOT_TAKEN = "not_taken"  # no probe service runs on the node
    EXPIRED = "expired"  # it waited for longer than its own timeout
    CRASHED = "crashed"  # the service itself was killed


@dataclass(frozen=True, slots=True)
class ProbeAsk:
    """A request. `probes` none: all of the level. `gpus` none: all that may be probed."""

    id: str
    probes: tuple[str, ...] = ()
    level: str = Level.QUICK.value
    gpus: tuple[int, ...] = ()
    timeout_s: float = 0.0  # 0: what suits the probes
    asked_ms: int = 0
    inlet_c: float | None = None
    group: Group | None = None
    protection: str = ""  # of PROTECTIONS

    def check(self) -> None:
        """Raises ValueError, with what is wrong: nothing is run that the table does not have."""
        if unknown := [name for name in self.probes if name not in PROBES]:
            raise ValueError(f"no probe is called {unknown[0][:80]!r}; there are {', '.join(PROBES)}")
        if self.level not in list(Level):
            raise ValueError(f"no level is called {self.level[:80]!r}; there are {', '.join(Level)}")
        if len(self.gpus) > MAX_GPUS or any(not 0 <= slot < MAX_GPUS for slot in self.gpus):
            raise ValueError(f"GPU slots are 0 to {MAX_GPUS - 1}")
        if not 0 <= self.timeout_s <= LONGEST_S:
            raise ValueError(f"timeout {self.timeout_s:g} s: must be at most {LONGEST_S:g} s")
        if self.protection not in PROTECTIONS:
            raise ValueError(f"protection {self.protection[:80]!r} is not known here: {', '.join(PROTECTIONS[1:])}")
        if self.group is not None:
            self.group.check()
            if alone := [name for name in self.probes if not name.endswith(GROUP)]:
                raise ValueError(f"{alone[0]} is measured on each node by itself, in no group")


@dataclass(frozen=True, slots=True)
class ProbeAnswer:
    """What the service says of a request.

    Attributes:
        end: of `runner.End` or `Outcome`; done: all ran to its end. detail: why it did not, a sentence.
        probe, gpu: what it was in when it did not.
        tries: how often that was run, each time with the same end.
        left_out: "GPU 3: why" of each that was not probed. devices: what was; the CPU where there is no driver.
    """

    id: str
    end: str
    detail: str = ""
    level: str = ""
    ts_ms: int = 0
    probe: str = ""
    gpu: int | None = None
    seconds: float = 0.0
    results: tuple[Result, ...] = ()
    left_out: tuple[str, ...] = ()
    devices: tuple[Device, ...] = ()
    tries: int = 1


def is_id(text: str) -> bool:
    """Whether it can name a file here: a collector's word must not become a path."""
    return _ID.fullmatch(text) is not None


class ExchangeFolder:
    """`probes` in the spool's folder. All of it waits for the disk."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.requests, self.taken, self.results = (root / name for name in ("requests", "taken", "results"))

    def make(self) -> None:
        """Raises OSError."""
        for folder in (self.root, self.requests, self.taken, self.results):
            folder.mkdir(mode=0o700, exist_ok=True)

    @staticmethod
    def ids(folder: Path) -> list[str]:
        """Of the files in one of the three, the oldest first."""
        found: list[tuple[int, str]] = []
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    if entry.name.endswith(".json") and entry.is_file(follow_symlinks=False):
                        found.append((entry.stat(follow_symlinks=False).st_mtime_ns, entry.name[:-5]))
        except FileNotFoundError:
            return []
        return [name for _, name in sorted(found)]

    def put(self, folder: Path, id_: str, value: ProbeAsk | ProbeAnswer) -> None:
        """Raises OSError."""
        write_whole(folder / f"{id_}.json", json.dumps(dataclasses.asdict(value)).encode())


def read_ask(path: Path) -> ProbeAsk:
    """Raises ValueError: it is no request; OSError."""
    return from_dict(ProbeAsk, _read(path))


def read_answer(path: Path) -> ProbeAnswer:
    """Raises ValueError: it is none; OSError."""
    return from_dict(ProbeAnswer, _read(path))


def _read(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        text = file.read(MAX_FILE_BYTES + 1)
    if len(text) > MAX_FILE_BYTES:
        raise ValueError(f"it has more than {MAX_FILE_BYTES} bytes")
    return read_object(text)


def read_object(text: bytes) -> dict[str, Any]:
    """A JSON object that somebody else wrote. NaN and infinities are no JSON, and would not leave this node.

    Raises:
        ValueError: it is none.
    """
    try:
        data = json.loads(text, parse_constant=_not_a_number)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(data, dict):
        raise ValueError("it is no object")
    return data


def _not_a_number(text: str) -> float:
    raise ValueError(f"{text} is no number")

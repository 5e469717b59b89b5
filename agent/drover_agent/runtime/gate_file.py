"""Keep a small file from which `drover-agent gate` answers: what the collector said of this node, and when.

The gate must not wait for Python's larger modules, so this module imports few. Times are of the clock since boot, which
nobody sets. Writes go to a file system in memory (/run), so they do not block.
"""

from __future__ import annotations

import json
import logging
import os
import stat
import time
from pathlib import Path
from typing import TYPE_CHECKING

from drover_agent.atomic_file import write_whole

if TYPE_CHECKING:
    from drover_agent.config import GateConfig
    from drover_agent.sources.base import NodeEvent
    from drover_proto import telemetry_pb2 as pb

FORMAT = 1
FRESH_S = 180.0  # the collector repeats its verdict each minute
MAX_FAULTS = 16  # of this node's own, the newest
MAX_TEXT = 500
MAX_BYTES = 65_536
_FAULT_OF = {"gpu_lost": "gpu_back", "driver_hung": "driver_back"}  # lifecycle code -> the one that ends it

_log = logging.getLogger(__name__)


def boot_s() -> float:
    """Return the seconds since this machine's boot, sleep included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class GateFile:
    """The running agent's side. For the event loop's thread."""

    def __init__(self, config: GateConfig, node: str, boot_id: str) -> None:
        self._path = Path(config.file)
        self._head = {
            "format": FORMAT,
            "node": node,
            "boot": boot_id,
            "unanswered": config.unanswered,
            "age_s": config.age_s,
        }
        self._verdict: dict[str, object] | None
        self._faults: list[tuple[float, str, str]]  # (time since boot, what ends it, text)
        self._verdict, self._faults = self._left()
        self._trouble = ""

    def _left(self) -> tuple[dict[str, object] | None, list[tuple[float, str, str]]]:
        """Return what an agent that ended had received and seen since this boot: the collector may be away now."""
        try:
            found = json.loads(_own_content(self._path))
            same = all(found[key] == self._head[key] for key in ("format", "node", "boot"))
            if not same:
                return None, []
            now_s, limit_s = boot_s(), float(str(self._head["age_s"]))
            verdict = _verdict(found["verdict"], now_s) if found["verdict"] else None
            faults = [(float(f["at_s"]), str(f.get("end", "")), str(f["text"])[:MAX_TEXT]) for f in found["faults"]]
            # What ends by itself, such as a lost GPU, this agent finds again if it still holds.
            kept = [f for f in faults if 0 <= now_s - f[0] <= limit_s and f[1].partition(" ")[0] == ""]
            return verdict, kept[-MAX_FAULTS:]
        except FileNotFoundError:
            return None, []
        except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            _log.warning("gate.file: %s is not read: %s; it is written again", self._path, error)
            return None, []

    def take_verdict(self, verdict: pb.GateVerdict) -> None:
        """Note what the collector said. It knows by now what this node reported before it was last away."""
        now_s = boot_s()
        self._verdict = {
            "received_s": now_s,
            "answer": verdict.answer[:MAX_TEXT],
            "text": verdict.text[:MAX_TEXT],
            "incident": verdict.incident[:MAX_TEXT],
            "mode": verdict.mode[:MAX_TEXT],
            "closed_by": verdict.closed_by[:MAX_TEXT],
        }
        self._faults = [fault for fault in self._faults if fault[0] > now_s - FRESH_S]
        self.write()

    def note_event(self, event: NodeEvent) -> None:
        """Note a fault that this node sees itself. It counts only while the collector is away."""
        if event.backlog or event.forgeable:
            return
        kept = [fault for fault in self._faults if fault[1] != f"{event.code} {event.gpu}"]
        if text := _fault(event):
            end = f"{_FAULT_OF.get(event.code, '')} {event.gpu}"
            kept = [fault for fault in kept if fault[2] != text]
            kept.append((boot_s(), end, text))
        if kept != self._faults:
            self._faults = kept[-MAX_FAULTS:]
            self.write()

    def write(self) -> None:
        """Replace the file. A failure is logged once, and the gate then has an older verdict."""
        faults = [{"at_s": at_s, "end": end, "text": text} for at_s, end, text in self._faults]
        content = {**self._head, "verdict": self._verdict, "faults": faults}
        try:
            write_whole(self._path, json.dumps(content).encode(), sync=False, mode=0o644)
        except OSError as error:
            trouble = f"{self._path}: {error.strerror}"
            if isinstance(error, FileNotFoundError):
                trouble = f"there is no folder {self._path.parent} (RuntimeDirectory=drover in the unit makes it)"
            if trouble != self._trouble:
                _log.info("`drover-agent gate` gets no verdict: %s", trouble)
            self._trouble = trouble
        else:
            self._trouble = ""


def _own_content(path: Path) -> bytes:
    """Return what an agent wrote. What others wrote must not become the word of this one.

    Raises:
        OSError, ValueError
    """
    # Without O_NONBLOCK, to open a FIFO waits for a writer.
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        about = os.fstat(file.fileno())
        if not stat.S_ISREG(about.st_mode):
            raise ValueError("it is not a regular file")
        if about.st_uid not in (0, os.geteuid()) or about.st_mode & stat.S_IWOTH:
            raise ValueError("another user may have written it")
        return file.read(MAX_BYTES)


def _verdict(found: dict[str, object], now_s: float) -> dict[str, object] | None:
    """Return a verdict of before this start; None: it is of a time that has not come.

    Raises:
        TypeError, ValueError, KeyError, OverflowError: it is not of the written form.
    """
    texts = {key: str(found[key])[:MAX_TEXT] for key in ("answer", "text", "incident", "mode")}
    texts["closed_by"] = str(found.get("closed_by", ""))[:MAX_TEXT]  # agents of version 0.1 do not write it
    received_s = float(str(found["received_s"]))
    return {"received_s": received_s, **texts} if 0 <= received_s <= now_s else None


def _fault(event: NodeEvent) -> str:
    """Return a sentence for an event after which no job should begin here; "": it is none."""
    where = "" if event.gpu is None else f" on GPU {event.gpu}"
    if event.code in _FAULT_OF:
        return f"{event.code}{where}: {event.message}"[:MAX_TEXT]
    if event.kind == "xid" and event.code.isdecimal():
        from drover_core.xid.codes import lookup  # only a node with XIDs needs the table

        row = lookup(int(event.code))
        if row is not None and row.severity == "critical":
            return f"XID {event.code}{where}: {row.meaning}"[:MAX_TEXT]
    return ""

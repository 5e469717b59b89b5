"""Which processes hold each GPU: id, user, name and beginning, never the arguments, which may hold secrets.

Formats: proc(5), `/proc/PID/stat` (field 22, starttime in clock ticks since the boot), `/proc/stat` (btime), passwd(5).
Users are named by the file of the node's first process alone: a container has another one, and a directory service may
not answer, while a source must not wait.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from drover_agent.sources.base import Reading
from drover_core.model.gpu_processes import NAME, GpuProcess, key, pack

# A change of the inventory is a new Hello of the node and a row of its inventory in the store: where processes come and
# go all the time it is sent this often; a job that begins after a quiet time is sent as soon as its processes stay.
EVERY_MS = 300_000
TICKS = os.sysconf("SC_CLK_TCK")


class ProcessReport:
    """Reports the processes of a GPU when one began or ended, or when they are no longer known."""

    def __init__(self, proc: Path) -> None:
        self._proc, self._passwd = proc, proc / "1/root/etc/passwd"
        self._sent: dict[int, tuple[int, ...] | None] = {}
        self._seen: dict[int, tuple[int, ...] | None] = {}
        self._sent_ms: int | None = None
        self._users: tuple[float, dict[int, str]] = 0.0, {}

    def report(self, pids: Mapping[int, Sequence[int] | None], reading: Reading, now_ms: int) -> None:
        """
        Args:
            pids: of each GPU by slot; None: they cannot be read.
        """
        held: dict[int, tuple[int, ...] | None] = dict.fromkeys(self._sent)  # of a GPU that has gone nothing is known
        held |= {slot: None if found is None else tuple(sorted(found)) for slot, found in pids.items()}
        changed = {slot: found for slot, found in held.items() if self._sent.get(slot) != found}
        settled, self._seen = held == self._seen, held
        if not changed or not self._is_due(now_ms, settled=settled):
            return
        boot_ms, users = self._boot_ms(), self._names()
        for slot, found in changed.items():
            looked = (self._look(pid, boot_ms, users) for pid in found or ())
            known = [process for process in looked if process is not None]
            reading.inventory[key(slot)] = "" if found is None else pack(known)
        self._sent, self._sent_ms = held, now_ms

    def forget(self) -> None:
        """All is reported again: the last reading may have been lost."""
        self._sent, self._sent_ms = {}, None

    def _is_due(self, now_ms: int, *, settled: bool) -> bool:
        """Return True at most once in `EVERY_MS`, and later where processes never settle."""
        if self._sent_ms is None:
            return settled
        waited_ms = now_ms - self._sent_ms
        return waited_ms < 0 or waited_ms >= (EVERY_MS if settled else 2 * EVERY_MS)

    def _look(self, pid: int, boot_ms: int, users: Mapping[int, str]) -> GpuProcess | None:
        """Return what /proc says of it; None: it has ended meanwhile, or is not to be seen."""
        folder = self._proc / str(pid)
        try:
            uid = folder.stat().st_uid
            head, _, rest = (folder / "stat").read_text("utf-8", "replace").rpartition(")")
            since_ms = boot_ms + int(rest.split()[19]) * 1000 // TICKS if boot_ms else 0
        except (OSError, ValueError, IndexError):
            return None
        return GpuProcess(pid, uid, users.get(uid, ""), head.partition("(")[2][:NAME], since_ms)

    def _boot_ms(self) -> int:
        """Return when the node booted; 0: not known."""
        try:
            lines = (self._proc / "stat").read_text("utf-8", "replace").splitlines()
            return int(next(line for line in lines if line.startswith("btime ")).split()[1]) * 1000
        except (OSError, ValueError, IndexError, StopIteration):
            return 0

    def _names(self) -> dict[int, str]:
        """Return the node's users by number, read again when the file changed."""
        try:
            changed = self._passwd.stat().st_mtime
            if changed != self._users[0]:
                fields = (line.split(":") for line in self._passwd.read_text("utf-8", "replace").splitlines())
                self._users = changed, {int(one[2]): one[0] for one in fields if len(one) > 3 and one[2].isdecimal()}
        except OSError:
            return {}
        return self._users[1]

"""The processes of a probe's session: what they print, what they take, and that nothing of them is left."""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import signal
import subprocess
from pathlib import Path
from typing import IO

log = logging.getLogger(__name__)

TERM_S = 0.1  # from SIGTERM to SIGKILL: with the looks of runner and guard, a node is given back within a second
REAP_S = 5.0  # a process that the kernel does not let die (a driver that hangs) is left behind
NICE = 10
STDERR_BYTES = 2_000  # kept of what the child printed, for a crash
LINE_BYTES = 1 << 20  # of one line; the child writes none that is longer


class Streams:
    """Lines of stdout, and the end of stderr, without waiting for either."""

    def __init__(self, out: IO[bytes], err: IO[bytes]) -> None:
        self._selector = selectors.DefaultSelector()
        for stream in (out, err):
            os.set_blocking(stream.fileno(), False)
            self._selector.register(stream, selectors.EVENT_READ)
        self._out = out
        self._rest = self.errors = b""
        self.ended = False

    def read(self, timeout_s: float) -> list[bytes]:
        for key, _ in self._selector.select(timeout_s):
            data = os.read(key.fd, 65_536)
            if key.fileobj is not self._out:
                self.errors = (self.errors + data)[-STDERR_BYTES:]
            elif not data:
                self.ended = True
            else:
                self._rest += data
            if not data:
                self._selector.unregister(key.fileobj)
        *lines, self._rest = self._rest.split(b"\n")
        if len(self._rest) > LINE_BYTES:
            lines, self._rest = [*lines, self._rest[:200]], b""
        return lines


def yield_to_all(pid: int) -> None:
    """Lowest priority; the first that goes when memory is short. Needs no rights: it only gives up some."""
    try:
        os.setpriority(os.PRIO_PROCESS, pid, NICE)
        Path(f"/proc/{pid}/oom_score_adj").write_text("1000")
    except OSError as error:
        log.warning("the probe's process could not be made to yield: %s", error)


def members(session: int) -> list[int]:
    """The processes of a session: collectives have one for each device."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it has ended
                if os.getsid(int(entry.name)) == session:
                    found.append(int(entry.name))
    return found


def private_bytes(pid: int) -> int:
    try:
        resident, shared = map(int, Path(f"/proc/{pid}/statm").read_text("ascii").split()[1:3])
    except (OSError, ValueError):  # it has ended
        return 0
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


def end_all(child: subprocess.Popen[bytes], *, at_once: bool) -> bool:
    """Nothing of the session is left: True; False where the kernel does not let it die."""
    if child.poll() is None and not at_once:
        child.send_signal(signal.SIGTERM)
        try:
            child.wait(TERM_S)
        except subprocess.TimeoutExpired:
            log.info("the probe's process does not end by itself; it is killed")
    _kill_session(child.pid)
    gone = True
    try:
        child.wait(REAP_S)
    except subprocess.TimeoutExpired:
        gone = False
        log.error("the probe's process %d does not die: it stands in a call into the driver", child.pid)
    for stream in (child.stdin, child.stdout, child.stderr):
        if stream is not None:
            stream.close()
    return gone


def _kill_session(leader: int) -> None:
    """Not the process group alone: a grandchild may have made one of its own."""
    for _ in range(3):  # one may have been born meanwhile
        left = [pid for pid in members(leader) if not is_dead(pid)]
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not left:
            return


def is_dead(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text("ascii", "replace").rpartition(")")[2].split()[0] in "ZX"
    except (OSError, IndexError):
        return True

"""A job of the scheduler that holds the node while it is probed: `drover-agent probe --hold ID` is all that it runs.

The job listens on a socket that is named after the request, and the probe service connects: as long as the connection
stands the scheduler gives the node to nobody else. When it wants the node back (a job of somebody's preempts this one)
it signals the job to end; that ends its half of the connection, the probe gives way, and only when the service has let
go does the job end, so that the next one finds the GPUs free. A job that is killed takes the connection with it.

The name is of Linux's abstract namespace (unix(7)): no file is left, and folders of the unit's own hide nothing. It is
no secret (squeue shows it); either end takes only its own user and root for the other, so who else binds it first can
only keep the probe from being run.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import struct
import time
from collections.abc import Callable

log = logging.getLogger(__name__)

WAIT_S = 300.0  # for the request to come to the node, from when the job begins
# A job that is to be suspended (PreemptMode=SUSPEND) gets SIGTSTP two seconds before it is stopped; slurm.conf(5).
ENDS = (signal.SIGTERM, signal.SIGINT, signal.SIGTSTP)
JOIN_S = 30.0  # for the job's process to be there: Python starts slowly from a busy file server
LOOK_S = 0.05
WANTED = "the scheduler wants the node back"


class NotHeldError(Exception):
    """No job holds the node; one line."""


def _name(id_: str) -> str:
    return f"\0drover-probe-{id_}"


def _trusted(connection: socket.socket) -> bool:
    """Whether root or our own user is at the other end (SO_PEERCRED: pid, uid, gid)."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return struct.unpack("3i", credentials)[1] in (0, os.getuid())


class Held:
    """The service's end. `close` gives the node back."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        connection.setblocking(False)

    def lost(self) -> str:
        """Why the probe must give way; "" while the job holds the node."""
        try:
            return WANTED if self._connection.recv(1) == b"" else ""
        except BlockingIOError:
            return ""
        except OSError as error:
            return f"{WANTED}: {error.strerror or error}"

    def close(self) -> None:
        self._connection.close()


def join(id_: str, stopped: Callable[[float], bool], wait_s: float = JOIN_S) -> Held:
    """The job that holds the node for this request.

    Args:
        stopped: waits for so many seconds; whether it is of no use to go on.
    Raises:
        NotHeldError: there is none.
    """
    until = time.monotonic() + wait_s
    while True:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(_name(id_))
            if not _trusted(connection):
                raise NotHeldError("its scheduler's job is another user's: see docs/how-to/probe.md")
            return Held(connection)
        except OSError:  # nobody listens there yet, or any more
            connection.close()
        except NotHeldError:
            connection.close()
            raise
        if time.monotonic() >= until or stopped(LOOK_S):
            raise NotHeldError("no job of the scheduler holds this node for it (any more): it was not begun")


def hold(id_: str, wait_s: float = WAIT_S) -> str:
    """Until the probe is over, nobody came for `wait_s`, or a signal has ended both; how it ended, a line.

    Raises:
        OSError: another job holds the node for this request.
    """
    wakes, wake = socket.socketpair()
    wake.setblocking(False)
    before = {number: signal.signal(number, lambda *_: None) for number in ENDS}
    wakeup = signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    try:
        with wakes, wake, socket.socket(socket.AF_UNIX) as server:
            server.bind(_name(id_))
            server.listen(1)
            connection = _probe(server, wakes, wait_s)
            if connection is None:
                return "no probe came"
            with connection:
                server.close()
                if connection in select.select([connection, wakes], [], [])[0]:
                    return "the probe is over"
                with contextlib.suppress(OSError):  # it has gone just now
                    connection.shutdown(socket.SHUT_WR)
                select.select([connection], [], [])  # the scheduler kills who takes too long
                return f"{WANTED}; the probe has given way"
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in before.items():
            signal.signal(number, handler)


def _probe(server: socket.socket, wakes: socket.socket, wait_s: float) -> socket.socket | None:
    """The service's connection; None: none came in time, or a signal did."""
    until = time.monotonic() + wait_s
    while (left_s := until - time.monotonic()) > 0:
        ready = select.select([server, wakes], [], [], left_s)[0]
        if wakes in ready or not ready:
            return None
        connection, _ = server.accept()
        if _trusted(connection):
            return connection
        connection.close()
    return None

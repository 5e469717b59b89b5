"""Log lines of a service: with fields into the journal when systemd keeps it, else as text on standard error.

In the journal a line has PRIORITY, LOGGER (the module), CODE_FILE, CODE_FUNC, CODE_LINE and THREAD_NAME beside its
MESSAGE: `journalctl -u drover-agent -p warning`, `journalctl LOGGER=drover_agent.uplink.stream -o json`.
Journald bounds and rotates. Sources: systemd.exec(5) "JOURNAL_STREAM", systemd's "Native Journal Protocol",
systemd.journal-fields(7).
"""

from __future__ import annotations

import logging
import os
import socket
import struct
import sys
from collections.abc import Mapping

SOCKET = "/run/systemd/journal/socket"
TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
MOST_BYTES = 64_000  # of a message; a datagram holds some 200 kB
# Level of Python's logging -> that of syslog.
PRIORITIES = ((logging.CRITICAL, 2), (logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6))
DEBUG = 7


def configure(level: str, environment: Mapping[str, str] = os.environ) -> None:
    """Have the root logger write; `level` is a name such as "info"."""
    text = logging.StreamHandler(sys.stderr)
    text.setFormatter(logging.Formatter(TEXT))
    handler = JournalHandler(text) if is_journal(2, environment) else text
    logging.basicConfig(level=level.upper(), handlers=[handler])


def is_journal(fd: int, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether systemd connected this descriptor with the journal, and nobody has redirected it since."""
    device, _, inode = environment.get("JOURNAL_STREAM", "").partition(":")
    try:
        found = os.fstat(fd)
    except OSError:
        return False
    return (device, inode) == (str(found.st_dev), str(found.st_ino))


class JournalHandler(logging.Handler):
    """Never waits: a line that the journal does not take at once goes to `otherwise`."""

    def __init__(self, otherwise: logging.Handler, path: str = SOCKET) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("%(message)s"))  # else basicConfig gives it level and module too
        self._otherwise, self._path = otherwise, path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._socket.sendto(datagram(self.format(record), record), self._path)
        except OSError:
            self._otherwise.handle(record)
        except Exception:  # noqa: BLE001  # a line that cannot be formatted must not end what it tells of
            self.handleError(record)

    def close(self) -> None:
        self._socket.close()
        super().close()


def datagram(message: str, record: logging.LogRecord) -> bytes:
    """A record in the journal's own protocol."""
    fields = {
        "MESSAGE": message,
        "PRIORITY": str(next((priority for level, priority in PRIORITIES if record.levelno >= level), DEBUG)),
        "LOGGER": record.name,
        "CODE_FILE": record.pathname,
        "CODE_FUNC": record.funcName or "",
        "CODE_LINE": str(record.lineno),
        "THREAD_NAME": record.threadName or "",
        "SYSLOG_IDENTIFIER": os.path.basename(sys.argv[0]),  # noqa: PTH119  # a text, not a path that is looked at
    }
    parts = []
    for name, text in fields.items():
        value = text.encode("utf-8", "replace")[:MOST_BYTES]
        # With its length, as a value may have lines: what comes from outside cannot add fields.
        parts.append(name.encode() + b"\n" + struct.pack("<Q", len(value)) + value + b"\n")
    return b"".join(parts)

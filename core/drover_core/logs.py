"""Log to the journal with fields if systemd connects standard error to it, else as text on standard error.

In the journal a line has PRIORITY, LOGGER (the module), CODE_FILE, CODE_FUNC, CODE_LINE and THREAD_NAME besides
MESSAGE: `journalctl -u drover-agent -p warning`, `journalctl LOGGER=drover_agent.uplink.stream -o json`.
Journald limits and rotates the log. Sources: systemd.exec(5) "JOURNAL_STREAM", systemd's "Native Journal Protocol",
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
MAX_FIELD_BYTES = 64_000  # a datagram holds some 200 kB
# Level of Python's logging -> that of syslog.
PRIORITIES = ((logging.CRITICAL, 2), (logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6))
DEBUG = 7


def configure(level: str, environment: Mapping[str, str] = os.environ) -> None:
    """Configure the root logger; `level` is a name such as "info"."""
    text = logging.StreamHandler(sys.stderr)
    text.setFormatter(logging.Formatter(TEXT))
    handler = JournalHandler(text) if is_journal(2, environment) else text
    logging.basicConfig(level=level.upper(), handlers=[handler])


def is_journal(fd: int, environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether systemd connected this descriptor to the journal and it was not redirected since."""
    device, _, inode = environment.get("JOURNAL_STREAM", "").partition(":")
    try:
        found = os.fstat(fd)
    except OSError:
        return False
    return (device, inode) == (str(found.st_dev), str(found.st_ino))


class JournalHandler(logging.Handler):
    """A handler that never waits: a line that the journal does not take at once goes to `fallback`."""

    def __init__(self, fallback: logging.Handler, path: str = SOCKET) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("%(message)s"))  # otherwise basicConfig adds level and module
        self._fallback, self._path = fallback, path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._socket.sendto(datagram(self.format(record), record), self._path)
        except OSError:
            self._fallback.handle(record)
        except Exception:  # noqa: BLE001  # a line that cannot be formatted must not end its caller
            self.handleError(record)

    def close(self) -> None:
        self._socket.close()
        super().close()


def datagram(message: str, record: logging.LogRecord) -> bytes:
    """Return a record in the journal's native protocol."""
    fields = {
        "MESSAGE": message,
        "PRIORITY": str(next((priority for level, priority in PRIORITIES if record.levelno >= level), DEBUG)),
        "LOGGER": record.name,
        "CODE_FILE": record.pathname,
        "CODE_FUNC": record.funcName or "",
        "CODE_LINE": str(record.lineno),
        "THREAD_NAME": record.threadName or "",
        "SYSLOG_IDENTIFIER": os.path.basename(sys.argv[0]),  # noqa: PTH119  # a text, not a path
    }
    parts = []
    for name, text in fields.items():
        value = text.encode("utf-8", "replace")[:MAX_FIELD_BYTES]
        # Each value has its length: a line break in text from outside cannot add fields.
        parts.append(name.encode() + b"\n" + struct.pack("<Q", len(value)) + value + b"\n")
    return b"".join(parts)

"""Audit and security records as syslog (RFC 5424) over TLS (RFC 5425), TCP (RFC 6587, octets counted), UDP (RFC 5426).

Syslog has no answer. Over TCP and TLS a line counts as sent when the other machine's kernel has acknowledged its bytes,
other lines are sent again. After a cut a line may come twice.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import re
import socket
import ssl
import termios
import time
from collections.abc import Sequence

from drover_collector.exporters.http_post import Answer
from drover_collector.exporters.records import Record
from drover_collector.exporters.sending import Sender
from drover_collector.exporters.settings import SyslogConfig
from drover_core.model.events import Severity
from drover_core.settings import SettingsError
from drover_core.times import iso

KINDS = frozenset({"audit", "security"})
APP = "drover-collector"
# RFC 5612: the number for examples. Drover has none of its own, and names without a number are IANA's.
SD_ID = "drover@32473"
MOST_BYTES, MOST_BYTES_UDP = 8192, 2048  # of a message; RFC 5424, 6.1: receivers should take 2048
BATCH = 100  # lines in one write
LOOK_S = 0.002  # between looks whether the other side has acknowledged
_SEVERITY = {Severity.INFO: 5, Severity.WARNING: 4, Severity.CRITICAL: 2}  # notice, warning, critical
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]+")
_NOT_NAME = re.compile(r"[^\x21-\x7e]+")


def message(record: Record, hostname: str, facility: int, most: int = MOST_BYTES) -> bytes:
    """Return one message. What it must leave out for its size is the end of the text."""
    name = _NOT_NAME.sub("_", record.name)[:32] or "-"
    head = (
        f"<{facility * 8 + _SEVERITY[record.severity]}>1 {iso(record.ts_ms)} {_name(hostname, 255)} {APP} {os.getpid()}"
    )
    facts = {"kind": record.kind, **record.attributes}
    values = "".join(f' {name}="{_value(str(value))}"' for name, value in facts.items())
    data = f"[{SD_ID}{values}]"
    start = f"{head} {name} {data} ".encode()
    if len(start) > most // 2:  # a fact that is a page long
        start = f'{head} {name} [{SD_ID} kind="{record.kind}" cut="1"] '.encode()
    text = b"\xef\xbb\xbf" + _CONTROL.sub(" ", record.text).encode("utf-8", "replace")
    return start + text[: most - len(start)].decode("utf-8", "ignore").encode()


def _name(text: str, most: int) -> str:
    return _NOT_NAME.sub("_", text)[:most] or "-"


def _value(text: str) -> str:
    """Return a PARAM-VALUE: RFC 5424, 6.3.3 asks for three escapes; control characters could begin another line."""
    return re.sub(r'(["\\\]])', r"\\\1", _CONTROL.sub(" ", text))


class Syslog:
    """One server. `take` from any thread.

    Raises (at construction):
        SettingsError: a certificate or a key cannot be used.
    """

    def __init__(self, config: SyslogConfig, key: str) -> None:
        host, _, port = config.address.rpartition(":")
        self._address, self._config = (host.strip("[]"), int(port)), config
        self._hostname = socket.gethostname()
        self._udp = config.transport == "udp"
        self._context: ssl.SSLContext | None = None
        if config.transport == "tls":
            try:
                self._context = ssl.create_default_context(cafile=config.ca_file)
                if config.cert_file is not None:
                    self._context.load_cert_chain(config.cert_file, config.key_file)
            except OSError as error:
                raise SettingsError(f"{key}.ca_file: its files cannot be used: {error}") from None
        self._socket: socket.socket | None = None
        self.sender: Sender[Record] = Sender(config.name, config.spool_bytes, self._send, BATCH, "syslog")

    def take(self, record: Record) -> None:
        if record.kind in KINDS:
            self.sender.put(record)

    def close(self) -> None:
        self.sender.stop()
        self._hang_up()

    def _send(self, records: Sequence[Record]) -> tuple[Answer, int, int]:
        most = MOST_BYTES_UDP if self._udp else MOST_BYTES
        lines = [message(record, self._hostname, self._config.facility, most) for record in records]
        try:
            self._hang_up_if_ended()
            if self._socket is None:
                self._socket = self._connected()
            if self._udp:
                for line in lines:
                    self._socket.send(line)
            else:
                self._socket.sendall(b"".join(b"%d %b" % (len(line), line) for line in lines))
                self._wait_acknowledged(self._socket)
        except OSError as error:
            self._hang_up()
            return Answer(_trouble(error, self._config.timeout_s)), 0, 0
        return Answer(), len(lines), len(lines)

    def _connected(self) -> socket.socket:
        if self._udp:
            family, kind, protocol, _, address = socket.getaddrinfo(*self._address, type=socket.SOCK_DGRAM)[0]
            made = socket.socket(family, kind, protocol)
            made.connect(address)
            return made
        plain = socket.create_connection(self._address, self._config.timeout_s)
        if self._context is None:
            return plain
        try:
            return self._context.wrap_socket(plain, server_hostname=self._address[0])
        except BaseException:
            plain.close()
            raise

    def _hang_up_if_ended(self) -> None:
        """Notice a server that has closed, before more is written to it."""
        own = self._socket
        if own is None or self._udp:
            return
        try:
            own.setblocking(False)
            ended = own.recv(4096) == b""
        except (BlockingIOError, ssl.SSLWantReadError):
            ended = False
        except OSError:
            ended = True
        if ended:
            self._hang_up()
        else:
            own.settimeout(self._config.timeout_s)

    def _wait_acknowledged(self, own: socket.socket) -> None:
        """
        Raises:
            TimeoutError: the other side has not acknowledged all bytes in time: it does not read, or is gone.
            ConnectionError: it has closed the connection meanwhile.
        """
        until_s = time.monotonic() + self._config.timeout_s
        left = array.array("i", [0])
        while True:
            fcntl.ioctl(own.fileno(), termios.TIOCOUTQ, left)
            if not left[0]:
                break
            if time.monotonic() > until_s:
                raise TimeoutError
            time.sleep(LOOK_S)
        if broken := own.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            raise OSError(broken, os.strerror(broken))

    def _hang_up(self) -> None:
        own, self._socket = self._socket, None
        if own is not None:
            with contextlib.suppress(OSError):  # it has ended by itself
                own.close()


def _trouble(error: OSError, timeout_s: float) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return "TLS failed: its certificate is not trusted, has ended, or is for another name; see ca_file"
    if isinstance(error, ssl.SSLError):
        return "TLS failed; check that this port speaks TLS, and whether it asks for a certificate"
    if isinstance(error, TimeoutError):
        return f"it has taken nothing within {timeout_s:g} s"
    return f"cannot connect or write: {error.strerror or type(error).__name__}; check that it runs"

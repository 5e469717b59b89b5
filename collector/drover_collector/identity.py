"""Who is at the other end of a connection, by its certificate: a URI name `drover://ROLE/NAME`."""

from __future__ import annotations

import logging
import ssl
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from urllib.parse import unquote

log = logging.getLogger(__name__)

SCHEME = "drover://"


class Role(StrEnum):
    AGENT = "agent"
    OPERATOR = "operator"
    VIEWER = "viewer"


@dataclass(frozen=True, slots=True)
class Identity:
    role: Role
    name: str

    def __str__(self) -> str:
        return f"{SCHEME}{self.role}/{self.name}"


class IdentityError(Exception):
    """A certificate that names nobody, or several; the message says what it should name."""


def parse(uri: str) -> Identity:
    """`drover://agent/r01n01`.

    Raises:
        IdentityError: another form.
    """
    role, slash, name = uri.removeprefix(SCHEME).partition("/")
    if not uri.startswith(SCHEME) or role not in tuple(Role) or not slash or not name or "/" in name:
        raise IdentityError(f"{uri!r} is not drover://agent/NODE, drover://operator/NAME or drover://viewer/NAME")
    return Identity(Role(role), unquote(name))


def peer(auth_context: Mapping[str, Sequence[bytes]]) -> Identity | None:
    """The identity of a gRPC peer; None on a connection without TLS (loopback only, as the settings see to).

    Args:
        auth_context: what `ServicerContext.auth_context()` gives.

    Raises:
        IdentityError: TLS, but not exactly one name of ours.
    """
    if not any(kind in (b"ssl", b"tls") for kind in auth_context.get("transport_security_type", ())):
        return None
    names = [name.decode("utf-8", "replace") for name in auth_context.get("x509_subject_alternative_name", ())]
    ours = [name for name in names if name.startswith(SCHEME)]
    if len(ours) != 1:
        found = f"{len(ours)} URI names" if ours else "no URI name"
        raise IdentityError(f"the certificate has {found} {SCHEME}ROLE/NAME; it needs exactly one")
    return parse(ours[0])


def refusal(identity: Identity | None, node: str) -> str | None:
    """Why this peer may not speak for `node`, or None when it may."""
    if identity is None or (identity.role is Role.AGENT and identity.name == node):
        return None
    return f"the certificate is for {identity}; data of node {node!r} needs one for {SCHEME}agent/{node}"


class DeniedError(ValueError):
    """A list of denied serials that cannot be used; the message says what to do."""


class Denied:
    """Serial numbers of certificates that are not accepted any more, from a file that may change at any time.

    A file that becomes unreadable leaves the last list in force, with `trouble`.
    """

    def __init__(self, path: Path | None) -> None:
        """
        Raises:
            DeniedError: the file cannot be read, or holds something else than serial numbers.
        """
        self.trouble = ""
        self._path = path
        self._lock = threading.Lock()
        self._stamp: tuple[int, int, int] | None = None
        self._serials: frozenset[int] = frozenset()
        if path is not None:
            self._read(path)

    def refusal(self, auth_context: Mapping[str, Sequence[bytes]]) -> str | None:
        """Why the certificate of this gRPC peer is not accepted, or None when it is; reads the file when it changed."""
        if self._path is None:
            return None
        with self._lock:
            try:
                self._read(self._path)
                self.trouble = ""
            except DeniedError as error:
                if self.trouble != str(error):
                    log.error("%s; the list as it was before stays in force", error)
                self.trouble = str(error)
        if not self._serials:
            return None
        for pem in auth_context.get("x509_pem_cert", ()):
            number = serial(ssl.PEM_cert_to_DER_cert(pem.decode("ascii")))
            if number in self._serials:
                return f"the certificate with serial {number:X} is denied"
        return None

    def _read(self, path: Path) -> None:
        try:
            stat = path.stat()
            stamp = stat.st_mtime_ns, stat.st_size, stat.st_ino
            if stamp == self._stamp:
                return
            lines = path.read_text("ascii").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "is not plain text"
            raise DeniedError(f"tls.denied_serials_file: {path}: {reason}; write one serial number a line") from None
        found = set()
        for number, line in enumerate(lines, 1):
            text = line.partition("#")[0].strip().removeprefix("serial=").replace(":", "")
            try:
                if text:
                    found.add(int(text, 16))
            except ValueError:
                raise DeniedError(
                    f"tls.denied_serials_file: {path}, line {number}: {line[:80]!r} is no serial number; write what"
                    " `openssl x509 -noout -serial` prints"
                ) from None
        self._stamp, self._serials = stamp, frozenset(found)


def serial(der: bytes) -> int:
    """The serial number of a certificate: SEQUENCE { SEQUENCE { [0] version, INTEGER serial, ... (RFC 5280, 4.1)."""
    at, _ = _element(der, 0)
    at, _ = _element(der, at)
    if der[at] == 0xA0:
        at, length = _element(der, at)
        at += length
    at, length = _element(der, at)
    return int.from_bytes(der[at : at + length], "big")


def _element(der: bytes, at: int) -> tuple[int, int]:
    """(start, length) of the content of the DER element at `at`."""
    length = der[at + 1]
    if length < 0x80:
        return at + 2, length
    size = length & 0x7F
    return at + 2 + size, int.from_bytes(der[at + 2 : at + 2 + size], "big")

"""Identify the peer of a connection by its certificate's URI name `drover://ROLE/NAME`."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from urllib.parse import quote, unquote

from drover_core import x509

log = logging.getLogger(__name__)

SCHEME = "drover://"


class Role(StrEnum):
    ADMIN = "admin"
    AGENT = "agent"
    OPERATOR = "operator"
    VIEWER = "viewer"
    WRITER = "writer"  # sends values of nodes without an agent, and reads nothing


@dataclass(frozen=True, slots=True)
class Identity:
    role: Role
    name: str

    def __str__(self) -> str:
        return f"{SCHEME}{self.role}/{quote(self.name, safe='')}"


class IdentityError(Exception):
    """A certificate that names no identity, or several; the message says what it should name."""


def parse(uri: str) -> Identity:
    """Parse a name such as `drover://agent/r01n01`.

    Raises:
        IdentityError: another form.
    """
    role, slash, name = uri.removeprefix(SCHEME).partition("/")
    if not uri.startswith(SCHEME) or role not in tuple(Role) or not slash or not name or "/" in name:
        raise IdentityError(
            f"{uri!r} is not drover://agent/NODE or drover://ROLE/NAME, with role viewer, operator or admin"
        )
    return Identity(Role(role), unquote(name))


def peer(auth_context: Mapping[str, Sequence[bytes]]) -> Identity | None:
    """Return the identity of a gRPC peer; None on a connection without TLS (loopback only: the settings check it).

    Args:
        auth_context: from `ServicerContext.auth_context()`.

    Raises:
        IdentityError: TLS, but not exactly one `drover://` name.
    """
    if not any(kind in (b"ssl", b"tls") for kind in auth_context.get("transport_security_type", ())):
        return None
    names = [name.decode("utf-8", "replace") for name in auth_context.get("x509_subject_alternative_name", ())]
    ours = [name for name in names if name.startswith(SCHEME)]
    if len(ours) != 1:
        found = f"{len(ours)} URI names" if ours else "no URI name"
        raise IdentityError(f"the certificate has {found} {SCHEME}ROLE/NAME; it needs exactly one")
    return parse(ours[0])


@dataclass(frozen=True, slots=True)
class Peer:
    """The other end of a connection with TLS."""

    identity: Identity
    certificate: x509.Certificate


def peer_of(auth_context: Mapping[str, Sequence[bytes]]) -> Peer | None:
    """Return the identity of a gRPC peer with its certificate; None on a connection without TLS.

    Raises:
        IdentityError: see `peer`; or gRPC does not give the certificate.
    """
    identity = peer(auth_context)
    if identity is None:
        return None
    for pem in auth_context.get("x509_pem_cert", ()):
        try:
            return Peer(identity, x509.parse_pem(pem)[0])
        except x509.CertificateError as error:
            raise IdentityError(f"the certificate of {identity}: {error}") from None
    raise IdentityError(f"there is no certificate of {identity}")


def refusal(identity: Identity | None, node: str) -> str | None:
    """Return why this peer may not send data of `node`, or None if it may."""
    if identity is None or (identity.role is Role.AGENT and identity.name == node):
        return None
    return f"the certificate is for {identity}; data of node {node!r} needs one for {SCHEME}agent/{node}"


class DeniedError(ValueError):
    """A list of denied serials that cannot be used; the message says what to do."""


class Denied:
    """Serial numbers of certificates that are no longer accepted, from a file that may change at any time.

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

    def serials(self) -> frozenset[int]:
        """Return the denied serials; read the file again if it changed."""
        if self._path is None:
            return self._serials
        with self._lock:
            try:
                self._read(self._path)
                self.trouble = ""
            except DeniedError as error:
                if self.trouble != str(error):
                    log.error("%s; the previous list stays in force", error)
                self.trouble = str(error)
        return self._serials

    def refusal(self, auth_context: Mapping[str, Sequence[bytes]]) -> str | None:
        """Return why the certificate of this gRPC peer is not accepted, or None if it is."""
        for pem in auth_context.get("x509_pem_cert", ()):
            number = x509.parse_pem(pem)[0].serial
            if number in self.serials():
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
                    f"tls.denied_serials_file: {path}, line {number}: {line[:80]!r} is not a serial number; write what"
                    " `openssl x509 -noout -serial` prints"
                ) from None
        self._stamp, self._serials = stamp, frozenset(found)

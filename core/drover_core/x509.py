"""Read and check certificates with the standard library only: the agent has no other library for them.

The three files are read and checked together, so a half-written file, or a key with an older certificate, is refused.
TLS checks signatures; nothing here does.
"""

from __future__ import annotations

import binascii
import contextlib
import re
import ssl
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

DAY_S = 86_400
WARN_DAYS = 14  # before the end of a certificate; an agent's is valid for 90 days
MAX_FILE_BYTES = 1 << 20
_PEM = re.compile(rb"-----BEGIN CERTIFICATE-----[A-Za-z0-9+/=\s]+-----END CERTIFICATE-----")
_SUBJECT_ALTERNATIVE_NAME = bytes.fromhex("0603551d11")  # its object identifier, 2.5.29.17
_PARTS = ((0, 4), (4, 6), (6, 8), (8, 10), (10, 12), (12, 14))  # of a time in digits
_URI = 0x86  # [6] of GeneralName


class CertificateError(ValueError):
    """Certificate files cannot be used. The message says which, and what to do."""


@dataclass(frozen=True, slots=True)
class Certificate:
    """The fields that Drover uses. Times are seconds since the epoch."""

    serial: int
    begins_s: float
    ends_s: float
    uris: tuple[str, ...]

    def ended(self, now_s: float) -> bool:
        return now_s >= self.ends_s

    def days_left(self, now_s: float) -> int:
        """Return whole days; negative after the end."""
        return int((self.ends_s - now_s) // DAY_S)


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """The content of three files that belong together."""

    ca: bytes
    cert: bytes
    key: bytes
    own: Certificate
    authorities: tuple[Certificate, ...]

    def __repr__(self) -> str:
        return f"TlsFiles(serial {self.own.serial:X})"  # never the key


def parse(der: bytes) -> Certificate:
    """Read a certificate in DER form (RFC 5280, 4.1).

    Raises:
        CertificateError: it is not a certificate.
    """
    try:
        return _parse(der)
    except (IndexError, ValueError, OverflowError, StopIteration):
        raise CertificateError("not a certificate") from None


def parse_pem(data: bytes) -> list[Certificate]:
    """Return all certificates in PEM text, in order.

    Raises:
        CertificateError: there is none, or one cannot be read.
    """
    found = [parse(_der(text)) for text in _PEM.findall(data)]
    if not found:
        raise CertificateError("holds no CERTIFICATE in PEM form; check which file it is")
    return found


def split_pem(data: bytes) -> list[str]:
    """Return each certificate in PEM text as a separate text."""
    return [text.decode("ascii") for text in _PEM.findall(data)]


def file_versions(*paths: Path | str) -> tuple[tuple[int, int, int], ...]:
    """Return a value that changes whenever one of the files does, also a missing one."""
    found = []
    for path in paths:
        try:
            status = Path(path).stat()
        except OSError as error:
            found.append((0, 0, error.errno or 0))
        else:
            found.append((status.st_mtime_ns, status.st_size, status.st_ino))
    return tuple(found)


def read_files(ca: Path | str, cert: Path | str, key: Path | str) -> TlsFiles:
    """Read the three files of one side of mutual TLS.

    Raises:
        CertificateError: one cannot be read, they do not belong together, or every user of this machine can read the
            key; one line that names the file.
    """
    before = file_versions(ca, cert, key)
    ca_data, cert_data, key_data = (_content(name, path) for name, path in (("ca", ca), ("cert", cert), ("key", key)))
    authorities, own = _certificates("ca", ca, ca_data), _certificates("cert", cert, cert_data)[0]
    if b"PRIVATE KEY-----" not in key_data:
        raise CertificateError(f"tls.key: {key} holds no PRIVATE KEY in PEM form; check which file it is")
    _require_private(key)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, _no_password)
    except _EncryptedError:
        raise CertificateError(
            f"tls.key: {key} is encrypted, and nobody can enter a password; write it unencrypted, with mode 0600"
        ) from None
    except (ssl.SSLError, OSError, ValueError) as error:
        if "MISMATCH" in str(error):
            text = f"tls.key: {key} does not belong to {cert}; copy both again from one issue"
        else:
            text = f"tls.key: {cert} and {key} cannot be used together ({_short(error)}); copy both again"
        raise CertificateError(text) from None
    if file_versions(ca, cert, key) != before:
        raise CertificateError(f"tls.cert: {cert}, or its key or ca, is being written")
    return TlsFiles(ca_data, cert_data, key_data, own, tuple(authorities))


def expiry_text(what: str, certificate: Certificate, now_s: float | None = None) -> str:
    """Return one line about a certificate that has ended or will soon, "" if it has at least WARN_DAYS left."""
    now = time.time() if now_s is None else now_s
    if now < certificate.begins_s:
        return f"{what} is valid only from {format_time(certificate.begins_s)}; is this clock right?"
    if certificate.ended(now):
        return f"{what} ended at {format_time(certificate.ends_s)}; renew it: drover certs renew"
    left = certificate.days_left(now)
    if left >= WARN_DAYS:
        return ""
    days = "1 day" if left == 1 else f"{left} days"
    return f"{what} ends in {days}, at {format_time(certificate.ends_s)}: drover certs renew"


def expiry_warnings(files: TlsFiles, ca: Path | str, cert: Path | str, now_s: float | None = None) -> list[str]:
    """Return a line for each certificate of `files` that is not valid now or ends soon."""
    # One of several authorities may end: its file keeps it until all that it signed is replaced.
    newest = max(files.authorities, key=lambda authority: authority.ends_s)
    lines = [
        expiry_text(f"tls.cert: the certificate in {cert}", files.own, now_s),
        expiry_text(f"tls.ca: the authority's certificate in {ca}", newest, now_s),
    ]
    return [line for line in lines if line]


def explain_failure(text: str, own_warnings: list[str], ca: Path | str, cert: Path | str) -> str:
    """Return gRPC's text for a failed connection as one line that says what to check.

    Args:
        own_warnings: `expiry_warnings` of the client's own files.
    """
    lowered = text.lower()
    if "certificate has expired" in lowered or "certificate_expired" in lowered:
        text = f"the other side's certificate, or its authority's, has ended by this clock; renew it there (ours: {ca})"
    elif "unable to get local issuer" in lowered or "self signed" in lowered or "self-signed" in lowered:
        text = f"the other side's certificate is signed by another authority than {ca}"
    elif "hostname verification" in lowered or "peer name" in lowered or "hostname mismatch" in lowered:
        text = f"the other side's certificate is not for this address: issue it with --host ({_first_line(text)})"
    elif "wrong_version_number" in lowered or "wrong version number" in lowered:
        text = "the other side does not use TLS: leave the certificates out here, or set them there too"
    elif any(
        word in lowered for word in ("handshake failed", "unwrap failed", "socket closed", "connection reset", "alert")
    ):
        advice = "its log or metrics may say why" if own_warnings else f"does it trust the authority of {cert}?"
        text = f"the TLS handshake failed ({_first_line(text)}); {advice}"
    else:
        return text
    return "; ".join([text, *own_warnings])


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0][:200] if text.strip() else "no reason given"


def format_time(time_s: float) -> str:
    """Return a time as `2026-11-21 06:17 UTC`."""
    return datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%d %H:%M UTC")


# ---- DER


def _parse(der: bytes) -> Certificate:
    outer = next(_elements(der, 0, len(der)))
    body = next(_elements(der, *outer[1:]))
    if outer[0] != 0x30 or body[0] != 0x30:
        raise ValueError
    parts = list(_elements(der, *body[1:]))
    if parts[0][0] == 0xA0:  # the version, which version 1 leaves out
        del parts[0]
    serial, validity = parts[0], parts[3]
    if serial[0] != 0x02 or validity[0] != 0x30:
        raise ValueError
    begins, ends = (_time(tag, der[at:to]) for tag, at, to in _elements(der, *validity[1:]))
    uris: list[str] = []
    for tag, at, to in parts[6:]:
        if tag == 0xA3:
            uris += _uris(der, at, to)
    return Certificate(int.from_bytes(der[serial[1] : serial[2]], "big"), begins, ends, tuple(uris))


def _elements(der: bytes, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield (tag, start, end) of the content of each element between `at` and `end`.

    Raises:
        IndexError, ValueError: not DER, or cut off.
    """
    while at < end:
        tag, length = der[at], der[at + 1]
        at += 2
        if length >= 0x80:
            size = length & 0x7F
            if not 1 <= size <= 4:
                raise ValueError
            length = int.from_bytes(der[at : at + size], "big")
            at += size
        if at + length > end:
            raise ValueError
        yield tag, at, at + length
        at += length


def _time(tag: int, text: bytes) -> float:
    """Read a UTCTime (1950 to 2049) or GeneralizedTime."""
    digits = text.decode("ascii")
    if tag == 0x17:
        digits = ("19" if digits[:2] >= "50" else "20") + digits
    if not digits[:-1].isdigit() or digits[14:] != "Z":
        raise ValueError
    year, month, day_, hour, minute, second = (int(digits[at:to]) for at, to in _PARTS)
    return datetime(
        year, month, day_, hour, minute, second, tzinfo=UTC
    ).timestamp()  # strptime takes five times as long


def _uris(der: bytes, at: int, end: int) -> list[str]:
    found = []
    _, at, end = next(_elements(der, at, end))
    for _, first, last in _elements(der, at, end):
        if der[first : first + len(_SUBJECT_ALTERNATIVE_NAME)] != _SUBJECT_ALTERNATIVE_NAME:
            continue
        *_, value = _elements(der, first, last)  # after the identifier and an optional `critical`
        names = next(_elements(der, *value[1:]))
        found += [der[a:b].decode("utf-8", "replace") for tag, a, b in _elements(der, *names[1:]) if tag == _URI]
    return found


# ---- files


class _EncryptedError(Exception):
    pass


def _no_password() -> str:
    raise _EncryptedError


def _content(name: str, path: Path | str) -> bytes:
    try:
        with Path(path).open("rb") as file:
            return file.read(MAX_FILE_BYTES)
    except OSError as error:
        raise CertificateError(
            f"tls.{name}: cannot read {path}: {error.strerror}; check the path and its permissions"
        ) from None


def _require_private(key: Path | str) -> None:
    with contextlib.suppress(OSError):
        if stat.S_IMODE(Path(key).stat().st_mode) & stat.S_IRWXO:
            raise CertificateError(
                f"tls.key: {key} is open to every user of this machine; chmod o= {key}, and issue a new one if"
                " somebody may have read it"
            )


def _certificates(name: str, path: Path | str, data: bytes) -> list[Certificate]:
    try:
        return parse_pem(data)
    except CertificateError as error:
        text = str(error)
        raise CertificateError(f"tls.{name}: {path} {text if text.startswith('holds') else f'is {text}'}") from None


def _der(pem: bytes) -> bytes:
    try:
        return ssl.PEM_cert_to_DER_cert(pem.decode("ascii").strip())
    except (ValueError, binascii.Error):
        raise CertificateError("not a certificate") from None


def _short(error: Exception) -> str:
    return str(getattr(error, "reason", None) or error.__class__.__name__).lower().replace("_", " ")

"""A fleet's certificates for tests, also ended ones and such as Drover would not issue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization

from drover_cli.pki import authority as certs
from drover_cli.pki.authority import Authority, Issued


@dataclass(frozen=True)
class Files:
    ca: Path
    cert: Path
    key: Path
    issued: Issued

    @property
    def serial(self) -> int:
        return int(self.issued.serial, 16)

    @property
    def paths(self) -> tuple[Path, Path, Path]:
        return self.ca, self.cert, self.key

    @property
    def credentials(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(self.ca.read_bytes(), self.key.read_bytes(), self.cert.read_bytes())

    @property
    def toml(self) -> str:
        return f'[tls]\nca = "{self.ca}"\ncert = "{self.cert}"\nkey = "{self.key}"\n'

    def renew_from(self, other: Files) -> None:
        """Put another pair into these files, the key first."""
        certs.write_pair(self.cert, other.cert.read_bytes(), other.key.read_bytes(), sync=False)


class Fleet:
    """An authority of 400 days ago in a folder, and what it signs."""

    def __init__(self, folder: Path, name: str = "test-ca") -> None:
        self.folder = folder
        self.ca = folder / "ca.pem"
        certs.init(folder, name, 1825, force=False, now=datetime.now(UTC) - timedelta(days=400))
        self._count = 0

    def issue(self, role: str, name: str, *, ends_in: timedelta = timedelta(days=60), days: int = 90) -> Files:
        """A collector's is for localhost and 127.0.0.1. Each lies in a file of its own."""
        authority = Authority(self.folder, datetime.now(UTC) + ends_in - timedelta(days=days))
        hosts = ("localhost", "127.0.0.1") if role == certs.COLLECTOR else ()
        cert, key, line = authority.issue(role, name, days=days, hosts=hosts)
        self._count += 1
        path = self.folder / f"{role}-{self._count}.pem"
        certs.write_pair(path, cert, key, sync=False)
        return Files(self.ca, path, certs.key_path(path), line)

    def odd(self, uris: Sequence[str]) -> Files:
        """A client's certificate with these names."""
        files = self.issue("viewer", "odd")
        authority = Authority(self.folder)
        now = datetime.now(UTC)
        old = certs.read_certificate(files.cert)
        builder = (
            x509.CertificateBuilder()
            .subject_name(old.subject)
            .issuer_name(old.issuer)
            .public_key(old.public_key())
            .serial_number(files.serial)
            .not_valid_before(now - timedelta(hours=1))
            .not_valid_after(now + timedelta(days=60))
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        )
        if uris:
            names = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(uri) for uri in uris])
            builder = builder.add_extension(names, critical=False)
        signed = builder.sign(authority._key, hashes.SHA256())
        files.cert.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
        return files

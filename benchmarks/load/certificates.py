"""Certificates made on the fly: an authority, the collector's, and one for each node and person."""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

DAYS = 90  # ends nearer than 14 days are reported as a trouble
VIEWER = "drover://viewer/benchmark"


class Authority:
    """Signs certificates. All agents of one process share a key, which costs a handshake nothing less."""

    def __init__(self, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> None:
        self._key, self._certificate = key, certificate
        self.pem = certificate.public_bytes(serialization.Encoding.PEM)
        self._leaf = ec.generate_private_key(ec.SECP256R1())

    @classmethod
    def new(cls) -> Authority:
        key = ec.generate_private_key(ec.SECP256R1())
        name = _name("benchmark authority")
        built = _builder(name, name, key.public_key())
        built = built.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        return cls(key, built.sign(key, hashes.SHA256()))

    @classmethod
    def load(cls, folder: Path) -> Authority:
        key = serialization.load_pem_private_key((folder / "ca.key").read_bytes(), None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        return cls(key, x509.load_pem_x509_certificate((folder / "ca.crt").read_bytes()))

    def save(self, folder: Path) -> None:
        """ca.crt and ca.key, and collector.crt and collector.key of a collector on 127.0.0.1."""
        (folder / "ca.crt").write_bytes(self.pem)
        _write_key(folder / "ca.key", _private(self._key))
        key, certificate = self.issue("drover collector", "", ("localhost", "127.0.0.1"))
        _write_key(folder / "collector.key", key)
        (folder / "collector.crt").write_bytes(certificate)

    def issue(self, common: str, uri: str, hosts: Sequence[str] = ()) -> tuple[bytes, bytes]:
        """(private key, certificate) as PEM, with a URI name such as drover://agent/NODE."""
        names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(uri)] if uri else []
        for host in hosts:
            try:
                names.append(x509.IPAddress(ipaddress.ip_address(host)))
            except ValueError:
                names.append(x509.DNSName(host))
        built = _builder(_name(common), self._certificate.subject, self._leaf.public_key())
        built = built.add_extension(x509.SubjectAlternativeName(names), critical=False)
        signed = built.sign(self._key, hashes.SHA256())
        return _private(self._leaf), signed.public_bytes(serialization.Encoding.PEM)


def _write_key(path: Path, pem: bytes) -> None:
    """For its owner only: a collector takes no other."""
    path.touch(0o600)
    path.write_bytes(pem)


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=DAYS))
    )


def _private(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )

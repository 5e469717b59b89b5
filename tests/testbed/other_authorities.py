"""Certificates in the shape that step-ca and cert-manager give them: not made by those programs.

step-ca's default template (`templates/x509/leaf.tpl` and the intermediate that `step ca init` makes): a root, an
intermediate, leaves of a day with both usages and a common name, an extension that names the provisioner; the file has
leaf and intermediate. cert-manager's CA issuer, for a Certificate with `usages` and no common name: a root, leaves of
90 days with an empty subject and a critical subject alternative name.
"""

from __future__ import annotations

import ipaddress
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID as Usage
from cryptography.x509.oid import NameOID, ObjectIdentifier

from drover_cli.pki import authority as certs
from drover_cli.pki.authority import Issued
from testbed.certificates import Files

PROVISIONER = ObjectIdentifier("1.3.6.1.4.1.37476.9000.64.1")  # smallstep's


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)] if text else [])


class OtherAuthority:
    """A root in a folder, and what it or its intermediate signs."""

    def __init__(self, folder: Path, *, intermediate: bool) -> None:
        self.folder = folder
        folder.mkdir()
        self.ca = folder / "root_ca.crt"
        root = ec.generate_private_key(ec.SECP256R1())
        certificate = self._sign(_name("Root CA"), _name("Root CA"), root, root, ca=1 if intermediate else 0)
        self.ca.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        self._issuer, self._key, self._chain = _name("Root CA"), root, b""
        if intermediate:
            key = ec.generate_private_key(ec.SECP256R1())
            between = self._sign(_name("Intermediate CA"), self._issuer, key, root, ca=0)
            self._issuer, self._key = _name("Intermediate CA"), key
            self._chain = between.public_bytes(serialization.Encoding.PEM)

    def _sign(
        self,
        subject: x509.Name,
        issuer: x509.Name,
        key: ec.EllipticCurvePrivateKey,
        by: ec.EllipticCurvePrivateKey,
        *,
        ca: int | None = None,
        days: int = 3650,
        extensions: tuple[tuple[x509.ExtensionType, bool], ...] = (),
    ) -> x509.Certificate:
        now = datetime.now(UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(issuer)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(minutes=1))
            .not_valid_after(now + timedelta(days=days))
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(by.public_key()), critical=False)
        )
        if ca is not None:
            builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=ca), critical=True)
        for extension, critical in extensions:
            builder = builder.add_extension(extension, critical=critical)
        return builder.sign(by, hashes.SHA256())

    def issue(
        self, common_name: str, *, uris: tuple[str, ...] = (), hosts: tuple[str, ...] = (), days: int = 1
    ) -> Files:
        """A leaf with the names that a person asks for, in a file of its own with its chain."""
        key = ec.generate_private_key(ec.SECP256R1())
        names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(uri) for uri in uris]
        for host in hosts:
            try:
                names.append(x509.IPAddress(ipaddress.ip_address(host)))
            except ValueError:
                names.append(x509.DNSName(host))
        usage = x509.KeyUsage(True, False, False, False, False, False, False, False, False)
        signed = self._sign(
            _name(common_name),
            self._issuer,
            key,
            self._key,
            days=days,
            extensions=(
                (usage, True),
                (x509.ExtendedKeyUsage([Usage.SERVER_AUTH, Usage.CLIENT_AUTH]), False),
                (x509.SubjectAlternativeName(names), not common_name),
                (x509.UnrecognizedExtension(PROVISIONER, b"0\x03\x02\x01\x01"), False),
            ),
        )
        path = self.folder / f"{len(list(self.folder.iterdir()))}.crt"
        pem = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
        )
        certs.write_pair(path, signed.public_bytes(serialization.Encoding.PEM) + self._chain, pem, sync=False)
        issued = Issued(f"{signed.serial_number:X}", "", common_name, "", "")
        return Files(self.ca, path, certs.key_path(path), issued)

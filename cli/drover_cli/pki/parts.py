"""Parts of certificates: names, usages, keys. `certificates.py` puts them together."""

from __future__ import annotations

import ipaddress
from datetime import datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from drover_cli.errors import CliError

BACKDATE = timedelta(hours=1)  # for nodes whose clock is behind
MAX_NAME = 253
MAX_COMMON_NAME = 64  # X.520


def self_signed(key: ec.EllipticCurvePrivateKey, name: x509.Name, now: datetime, days: int) -> bytes:
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BACKDATE)
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(key_usage(signs_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    return certificate.public_bytes(serialization.Encoding.PEM)


def key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def authority_id(authority: x509.Certificate) -> x509.AuthorityKeyIdentifier:
    # By the key alone: a renewed certificate of the authority has another serial number.
    try:
        own = authority.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    except x509.ExtensionNotFound:
        return x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key())  # type: ignore[arg-type]  # EC
    return x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(own)


def subject(role: str, name: str) -> x509.Name:
    # Not what counts, and of limited length: the alternative names say who it is.
    parts = [attribute(NameOID.ORGANIZATIONAL_UNIT_NAME, role)]
    return x509.Name([*parts, attribute(NameOID.COMMON_NAME, name[:MAX_COMMON_NAME])])


def attribute(kind: x509.ObjectIdentifier, text: str) -> x509.NameAttribute[str]:
    return x509.NameAttribute(kind, text)


def host(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        pass
    try:
        name = text.encode("idna").decode("ascii")
    except UnicodeError:
        name = ""
    if not name or len(name) > MAX_NAME or set(name) & set("/: ,@") or name.startswith("-"):
        raise CliError(f"--host {text}: neither a host's name nor an address; leave out the port and the scheme")
    return x509.DNSName(name)


def is_authority(certificate: x509.Certificate) -> bool:
    try:
        return certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except x509.ExtensionNotFound:
        return False


def key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def public(key: object) -> bytes:
    return key.public_bytes(  # type: ignore[attr-defined,no-any-return]  # every public key has it
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )

"""The fleet's certificate authority: a folder with a key, and what was issued with it.

    DIR/ca.pem  DIR/ca.key          the authority
    DIR/agent/NODE.pem  NODE.key    what was issued, by role
    DIR/issued.jsonl                every certificate ever issued: serial, role, name, times
    DIR/denied.txt                  serial numbers that collectors refuse (tls.denied_serials_file)

Keys are P-256, made here, written with mode 0600 and never shown. Files come whole by a rename, the key first, so that
who reads them in between finds a pair that does not fit, and waits.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import quote, unquote

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from drover_cli.errors import CliError
from drover_cli.pki.parts import (
    BACKDATE,
    MAX_NAME,
    attribute,
    authority_id,
    host,
    is_authority,
    key_pem,
    key_usage,
    public,
    self_signed,
    subject,
)

SCHEME = "drover://"
COLLECTOR = "collector"
ROLES = ("admin", "agent", COLLECTOR, "operator", "viewer", "writer")
# An agent's key lies on a node that jobs run on, an operator's can act: neither should be of use for long after it was
# copied. Renewing a month before the end leaves two months in which a failed roll-out is seen and mended.
DAYS = {"admin": 30, "agent": 90, COLLECTOR: 90, "operator": 30, "viewer": 90, "writer": 90}
CA_DAYS = 1825  # its key lies offline; all that it signed must be replaced with it
MOST_DAYS = 825  # for others than the authority
KEY_MODE, CERT_MODE = 0o600, 0o644


@dataclass(frozen=True, slots=True)
class Issued:
    """A line of the register. Times are ISO 8601 UTC."""

    serial: str
    role: str
    name: str
    begins: str
    ends: str

    @property
    def uri(self) -> str:
        return f"{self.role}/{self.name}"


class Authority:
    """A folder's authority, ready to sign."""

    def __init__(self, folder: Path, now: datetime | None = None) -> None:
        """
        Raises:
            CliError: there is none, or it cannot be used, in one line.
        """
        self.folder = folder
        self._now = now or datetime.now(UTC)
        cert_path, key_path = folder / "ca.pem", folder / "ca.key"
        if not cert_path.exists() or not key_path.exists():
            raise CliError(f"{folder}: no authority there (ca.pem, ca.key); make one with `drover certs init {folder}`")
        self.certificate = read_certificate(cert_path)
        self._key = _read_key(key_path)
        if public(self.certificate.public_key()) != public(self._key.public_key()):
            raise CliError(f"{key_path} does not belong to {cert_path}; put the pair of one `drover certs init` there")
        if not is_authority(self.certificate):
            raise CliError(f"{cert_path} is no authority's certificate; give the folder of `drover certs init`")

    def check_time(self) -> None:
        """
        Raises:
            CliError: the authority's own certificate has ended.
        """
        ends = self.certificate.not_valid_after_utc
        if ends <= self._now:
            raise CliError(
                f"{self.folder / 'ca.pem'} ended at {_day(ends)}; renew it with `drover certs renew"
                f" {self.folder / 'ca.pem'}` and bring it to every node"
            )

    def issue(
        self,
        role: str,
        name: str,
        *,
        days: int,
        hosts: Sequence[str] = (),
    ) -> tuple[bytes, bytes, Issued]:
        """(certificate, key) in PEM form, and their line of the register, which is not written."""
        key = ec.generate_private_key(ec.SECP256R1())
        certificate, line = self.sign(role, name, key.public_key(), days=days, hosts=hosts)
        return certificate, key_pem(key), line

    def sign(
        self, role: str, name: str, key: ec.EllipticCurvePublicKey, *, days: int, hosts: Sequence[str] = ()
    ) -> tuple[bytes, Issued]:
        """A certificate in PEM form for a key that another made, and its line of the register, which is not written."""
        alternatives: list[x509.GeneralName] = [host(each) for each in hosts]
        if role != COLLECTOR:
            alternatives = [x509.UniformResourceIdentifier(f"{SCHEME}{role}/{quote(name, safe='')}")]
        usage = ExtendedKeyUsageOID.SERVER_AUTH if role == COLLECTOR else ExtendedKeyUsageOID.CLIENT_AUTH
        begins = max(self._now - BACKDATE, self.certificate.not_valid_before_utc)
        ends = min(self._now + timedelta(days=days), self.certificate.not_valid_after_utc)
        serial = x509.random_serial_number()
        certificate = (
            x509.CertificateBuilder()
            .subject_name(subject(role, name))
            .issuer_name(self.certificate.subject)
            .public_key(key)
            .serial_number(serial)
            .not_valid_before(begins)
            .not_valid_after(ends)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(key_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
            .add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
            .add_extension(authority_id(self.certificate), critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        line = Issued(f"{serial:X}", role, name, _iso(begins), _iso(ends))
        return certificate.public_bytes(serialization.Encoding.PEM), line

    def renewed(self, days: int) -> bytes:
        """Renew the authority's certificate, with the same key and name: what it signed stays good."""
        return self_signed(self._key, self.certificate.subject, self._now, days)


def init(folder: Path, name: str, days: int, *, force: bool, now: datetime | None = None) -> None:
    """
    Raises:
        CliError: an authority is there already and `force` is not given; the folder cannot be written.
    """
    for path in (folder / "ca.pem", folder / "ca.key"):
        if path.exists() and not force:
            raise CliError(f"{path} is there already; all that it signed would be refused. Give --force if you mean it")
    key = ec.generate_private_key(ec.SECP256R1())
    name_of = x509.Name([attribute(NameOID.ORGANIZATION_NAME, "Drover"), attribute(NameOID.COMMON_NAME, name)])
    with _cli_errors():
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_whole(folder / "ca.key", key_pem(key), KEY_MODE)
        write_whole(folder / "ca.pem", self_signed(key, name_of, now or datetime.now(UTC), days), CERT_MODE)


def write_pair(cert_path: Path, cert: bytes, key: bytes, *, sync: bool = True) -> None:
    """
    Raises:
        CliError: the folder cannot be written.
    """
    with _cli_errors():
        cert_path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_whole(key_path(cert_path), key, KEY_MODE, sync=sync)
        write_whole(cert_path, cert, CERT_MODE, sync=sync)


def key_path(cert_path: Path) -> Path:
    return cert_path.with_name(cert_path.name.removesuffix(".pem") + ".key")


def file_of(role: str, name: str) -> Path:
    """Where a certificate lies within its folder, without ways out of it."""
    return Path(role) / f"{quote(name, safe=' ')}.pem"


def check_name(role: str, name: str) -> str:
    """
    Raises:
        CliError: collectors would not take it.
    """
    if not name or len(name) > MAX_NAME or not name.isprintable() or set(name) & {"/", " "} or name in (".", ".."):
        raise CliError(f"{name!r} is no name for {_a(role)}: up to {MAX_NAME} printable characters, no / and no space")
    return name


def read_certificate(path: Path) -> x509.Certificate:
    """
    Raises:
        CliError: it cannot be read, or is none.
    """
    try:
        return x509.load_pem_x509_certificates(path.read_bytes())[0]
    except OSError as error:
        raise CliError(f"{path}: {error.strerror}; check the path and its permissions") from None
    except ValueError:
        raise CliError(f"{path} holds no certificate in PEM form; check which file it is") from None


def describe(certificate: x509.Certificate) -> Issued:
    """Whose a certificate is. The role is "authority" for one that signs, "" for one that Drover did not issue."""
    names: list[str] = []
    hosts: list[str] = []
    common = "".join(str(part.value) for part in certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME))
    with contextlib.suppress(x509.ExtensionNotFound):
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        names = [uri for uri in found.get_values_for_type(x509.UniformResourceIdentifier) if uri.startswith(SCHEME)]
        hosts = list(found.get_values_for_type(x509.DNSName))
        hosts += [str(address) for address in found.get_values_for_type(x509.IPAddress)]
    role, _, name = names[0].removeprefix(SCHEME).partition("/") if len(names) == 1 else ("", "", "")
    if is_authority(certificate):
        role, name = "authority", common
    elif not names and hosts:
        role, name = COLLECTOR, common or hosts[0]
    begins, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    return Issued(f"{certificate.serial_number:X}", role, unquote(name), _iso(begins), _iso(ends))


def hosts_of(certificate: x509.Certificate) -> list[str]:
    found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return [*found.get_values_for_type(x509.DNSName), *map(str, found.get_values_for_type(x509.IPAddress))]


# ---- the register and the list of denied ones


def register(folder: Path, lines: Iterable[Issued]) -> None:
    """Append to the register; before the files are written, so that nothing issued is missing in it.

    Raises:
        CliError: it cannot be written.
    """
    data = "".join(json.dumps(asdict(line), ensure_ascii=False) + "\n" for line in lines).encode()
    with _cli_errors(), (folder / "issued.jsonl").open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def issued(folder: Path) -> list[Issued]:
    """The register, oldest first.

    Raises:
        CliError: it cannot be read.
    """
    path = folder / "issued.jsonl"
    if not path.exists():
        return []
    found = []
    with _cli_errors():
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
            try:
                found.append(Issued(**json.loads(line)))
            except (ValueError, TypeError):
                raise CliError(f"{path}, line {number}: not a line that `drover certs issue` writes; mend it") from None
    return found


def denied(path: Path) -> set[str]:
    """Serial numbers on a list, in upper case without leading zeros; none where there is no list."""
    if not path.exists():
        return set()
    with _cli_errors():
        lines = path.read_text("utf-8").splitlines()
    words = (line.partition("#")[0].strip().removeprefix("serial=").replace(":", "") for line in lines)
    return {word.upper().lstrip("0") for word in words if word}


def deny(path: Path, lines: Sequence[Issued], now: datetime | None = None) -> int:
    """Add to the list what is not there yet; the list stays whole at every moment.

    Returns:
        How many were added.
    Raises:
        CliError: it cannot be read or written.
    """
    known = denied(path)
    fresh = [line for line in lines if line.serial not in known]
    when = _iso(now or datetime.now(UTC))
    text = "".join(f"{line.serial}  # {line.uri}, ends {line.ends}, revoked {when}\n" for line in fresh)
    if fresh:
        with _cli_errors():
            before = path.read_text("utf-8") if path.exists() else "# serial numbers that collectors refuse\n"
            before += "" if before.endswith("\n") or not before else "\n"
            write_whole(path, (before + text).encode(), CERT_MODE)
    return len(fresh)


def write_whole(path: Path, data: bytes, mode: int, *, sync: bool = True) -> None:
    """Replace `path` in one step; it has `mode` from its first moment on.

    Raises:
        OSError: the old content is still there.
    """
    temporary = path.with_name(path.name + ".new")
    temporary.unlink(missing_ok=True)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, mode)
    with os.fdopen(descriptor, "wb") as file:
        os.fchmod(file.fileno(), mode)
        file.write(data)
        if sync:
            file.flush()
            os.fsync(file.fileno())
    temporary.replace(path)


# ---- small parts


@contextlib.contextmanager
def _cli_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CliError(f"{error.filename}: {error.strerror}; check the path, its permissions and the disk") from None


def _read_key(path: Path) -> ec.EllipticCurvePrivateKey:
    with _cli_errors():
        if stat.S_IMODE(path.stat().st_mode) & (stat.S_IRWXG | stat.S_IRWXO):
            raise CliError(f"{path} is open to other users, who could issue certificates; chmod 600 {path}")
        data = path.read_bytes()
    try:
        key = serialization.load_pem_private_key(data, None)
    except TypeError:
        raise CliError(f"{path} is encrypted; decrypt it: openssl pkey -in {path} -out OTHER, with umask 077") from None
    except ValueError:
        raise CliError(f"{path} holds no private key in PEM form; check which file it is") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise CliError(f"{path} is no EC key; Drover's authority has one of P-256: `drover certs init` in a new folder")
    return key


def _iso(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


def _day(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%d %H:%M UTC")


def _a(role: str) -> str:
    return f"an {role}" if role[0] in "aeiou" else f"a {role}"

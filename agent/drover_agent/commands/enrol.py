"""`drover-agent enrol` and `renew`: get this node's certificate for a key that is created here and never leaves.

The operator gives the SHA-256 of the authority's certificate. A first connection, which trusts nobody, fetches ca.pem
and sends nothing. The token is sent over a second connection, which trusts that authority only. `openssl`, which every
distribution has, creates key and request: the agent's own libraries cannot.
"""

from __future__ import annotations

import argparse
import getpass
import hashlib
import hmac
import http.client
import json
import os
import pwd
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

from drover_core import x509

ANSWER_LIMIT_S = 30.0
MAX_ANSWER_BYTES = 1 << 20
USER = "drover"
SERVER_VARIABLE, TOKEN_VARIABLE = "DROVER_ENROL_SERVER", "DROVER_ENROL_TOKEN"
CONFIG = "[req]\ndistinguished_name = name\n[name]\n"  # the machine's file may be missing, or ask questions
FOLDER = Path("/etc/drover/tls")


class EnrolError(Exception):
    """Enrolment failed. The message says why and what to do, in one line."""


def add_arguments(enrol: argparse.ArgumentParser, renew: argparse.ArgumentParser) -> None:
    for parser in (enrol, renew):
        parser.add_argument(
            "--server", default=os.environ.get(SERVER_VARIABLE, ""), metavar="HOST:PORT",
            help=f"of `drover certs serve` (or environment {SERVER_VARIABLE})",
        )  # fmt: skip
        parser.add_argument(
            "--dir", type=Path, default=FOLDER, help=f"folder of ca.pem, agent.pem, agent.key ({FOLDER})"
        )
    enrol.add_argument("--node", required=True, help="name of this node, for which the token was made")
    enrol.add_argument(
        "--ca-sha256", required=True, metavar="HEX", help="SHA-256 of the authority, from `drover certs token`"
    )
    enrol.add_argument(
        "--token-file", type=Path, metavar="FILE", help=f"without it: environment {TOKEN_VARIABLE}, else a prompt"
    )
    enrol.add_argument("--force", action="store_true", help="replace an existing certificate")
    renew.add_argument("--within-days", type=int, default=15, metavar="DAYS", help="only if it ends by then (15)")


def run(args: argparse.Namespace) -> int:
    """Run enrol or renew, and return the exit code.

    Raises:
        EnrolError: nothing was changed.
    """
    if not args.server.rpartition(":")[0] or not args.server.rpartition(":")[2].isdigit():
        raise EnrolError(f"--server {args.server!r} is not HOST:PORT of `drover certs serve`")
    return enrol(args) if args.command == "enrol" else renew(args)


def enrol(args: argparse.Namespace) -> int:
    folder: Path = args.dir
    for name in ("agent.key", "agent.pem"):
        if (folder / name).exists() and not args.force:
            raise EnrolError(f"{folder / name} exists; use `drover-agent renew`, or --force to replace it")
    token = _token(args.token_file)
    with _private_folder(folder) as work:
        ca = _pinned(args.server, args.ca_sha256)
        (work / "pinned.pem").write_text(ca)
        key, csr = _create_request(work)
        context = ssl.create_default_context(cafile=str(work / "pinned.pem"))
        answer = _post(args.server, context, "/v1/enrol", {"node": args.node, "token": token, "csr": csr})
        own = _install(work, folder, key, answer, args.node)
    print(f"{folder / 'agent.pem'}: {args.node}, until {x509.format_time(own.ends_s)}")
    return 0


def renew(args: argparse.Namespace) -> int:
    folder: Path = args.dir
    ca, cert, key_file = folder / "ca.pem", folder / "agent.pem", folder / "agent.key"
    try:
        present = x509.read_files(ca, cert, key_file).own
    except x509.CertificateError as error:
        raise EnrolError(f"{error}; without a valid certificate run `drover-agent enrol` with a token") from None
    left = present.days_left(time.time())
    if left >= args.within_days:
        print(f"{cert}: valid until {x509.format_time(present.ends_s)}; nothing to do")
        return 0
    if left < 0:
        raise EnrolError(
            f"{cert} ended at {x509.format_time(present.ends_s)}: run `drover-agent enrol --force` with a token"
        )
    with _private_folder(folder) as work:
        key, csr = _create_request(work)
        context = ssl.create_default_context(cafile=str(ca))
        context.load_cert_chain(cert, key_file)
        answer = _post(args.server, context, "/v1/renew", {"csr": csr})
        name = present.uris[0].rpartition("/")[2] if present.uris else ""
        own = _install(work, folder, key, answer, None, quoted=name)
    print(f"{cert}: until {x509.format_time(own.ends_s)}; the running agent uses it within a minute")
    return 0


def _token(path: Path | None) -> str:
    try:
        if path is not None:
            token = path.read_text("utf-8")
        else:
            token = os.environ.get(TOKEN_VARIABLE) or getpass.getpass("token: ")
    except (OSError, EOFError) as error:
        raise EnrolError(f"no token: {error or 'nothing was given'}; `drover certs token NODE` makes one") from None
    if not token.strip().isprintable() or not token.strip():
        raise EnrolError("no token was given; `drover certs token NODE` makes one")
    return token.strip()


def _pinned(server: str, sha256: str) -> str:
    """Return the certificate of the server's ca.pem that has this fingerprint."""
    wanted = sha256.replace(":", "").lower()
    if len(wanted) != 64 or not set(wanted) <= set("0123456789abcdef"):
        raise EnrolError("--ca-sha256 takes the 64 hex digits that `drover certs token` prints")
    no_trust = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    no_trust.check_hostname = False
    no_trust.verify_mode = ssl.CERT_NONE  # the answer is compared with the fingerprint, and nothing is sent
    pem = _request_page(server, no_trust, "GET", "/v1/ca", None)
    seen = []
    for text in x509.split_pem(pem):
        digest = hashlib.sha256(ssl.PEM_cert_to_DER_cert(text)).hexdigest()
        if hmac.compare_digest(digest, wanted):
            return text
        seen.append(digest)
    of = ", ".join(seen[:3]) or "none"
    raise EnrolError(f"{server} has another authority ({of}); nothing was sent to it. Is it the right one?")


def _create_request(work: Path) -> tuple[str, str]:
    """Return a new private key and its certificate request, in PEM form."""
    (work / "openssl.cnf").write_text(CONFIG)
    key, csr = work / "agent.key", work / "agent.csr"
    _openssl("genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256", "-out", str(key))
    _openssl(
        "req", "-new", "-key", str(key), "-subj", "/CN=drover", "-config", str(work / "openssl.cnf"), "-out", str(csr)
    )
    return key.read_text(), csr.read_text()


def _openssl(*words: str) -> None:
    try:
        done = subprocess.run(
            ["openssl", *words], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False
        )
    except FileNotFoundError:
        raise EnrolError("openssl is not installed; apt-get install openssl, or dnf install openssl") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EnrolError(f"openssl {words[0]}: {error}") from None
    if done.returncode:
        raise EnrolError(f"openssl {words[0]} failed: {' / '.join(done.stderr.strip().splitlines()[-2:])}")


def _post(server: str, context: ssl.SSLContext, path: str, body: dict[str, str]) -> dict[str, str]:
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    found = json.loads(_request_page(server, context, "POST", path, json.dumps(body)))
    if not all(isinstance(found.get(name), str) for name in ("certificate", "ca")):
        raise EnrolError(f"{server} answered without a certificate; is it `drover certs serve`?")
    return dict(found)


def _request_page(server: str, context: ssl.SSLContext, method: str, path: str, body: str | None) -> bytes:
    host, _, port = server.rpartition(":")
    connection = http.client.HTTPSConnection(host.strip("[]"), int(port), timeout=ANSWER_LIMIT_S, context=context)
    try:
        connection.request(method, path, body, {"content-type": "application/json"} if body else {})
        answer = connection.getresponse()
        content = answer.read(MAX_ANSWER_BYTES)
    except ssl.SSLCertVerificationError as error:
        raise EnrolError(f"{server}: {error.verify_message}; nothing was sent to it") from None
    except (OSError, http.client.HTTPException) as error:
        raise EnrolError(f"{server}: {error or type(error).__name__}; is `drover certs serve` running there?") from None
    finally:
        connection.close()
    if answer.status != 200:
        try:
            reason = str(json.loads(content)["error"])
        except (ValueError, KeyError, TypeError):
            reason = f"{answer.status} {answer.reason}"
        raise EnrolError(f"{server}: {reason}")
    return content


def _install(
    work: Path, folder: Path, key: str, answer: dict[str, str], node: str | None, *, quoted: str = ""
) -> x509.Certificate:
    """Check what was issued, then move it to its folder, the key first (docs/how-to/tls.md)."""
    files = {"agent.key": key, "agent.pem": answer["certificate"], "ca.pem": answer["ca"]}
    for name, text in files.items():
        (work / name).touch(0o600)
        (work / name).write_text(text)
    try:
        own = x509.read_files(work / "ca.pem", work / "agent.pem", work / "agent.key").own
    except x509.CertificateError as error:
        raise EnrolError(f"the issued certificate cannot be used: {error}") from None
    name = quoted or quote(node or "", safe="")
    if own.uris != (f"drover://agent/{name}",):
        raise EnrolError(f"the issued certificate is for {', '.join(own.uris) or 'nobody'}, not for {name}")
    for file, mode in (("ca.pem", 0o644), ("agent.key", 0o400), ("agent.pem", 0o644)):
        (work / file).chmod(mode)
        _set_owner(work / file, folder / file, secret=file == "agent.key")
        (work / file).replace(folder / file)
    return own


def _set_owner(new: Path, old: Path, *, secret: bool) -> None:
    """Set the owner: that of the replaced file, else user drover for the key, if root runs this."""
    if os.geteuid() != 0:
        return
    if old.exists():
        os.chown(new, old.stat().st_uid, old.stat().st_gid)
    elif secret and (user := _user()) is not None:
        os.chown(new, user.pw_uid, user.pw_gid)
    elif secret:
        print(f"there is no user {USER} yet: chown {old} to the agent's user", file=sys.stderr)


def _user() -> pwd.struct_passwd | None:
    try:
        return pwd.getpwnam(USER)
    except KeyError:
        return None


@contextmanager
def _private_folder(folder: Path) -> Iterator[Path]:
    """Yield a private folder on the same file system as the files, for renames."""
    try:
        if not folder.exists():
            folder.mkdir(mode=0o750, parents=True)
            if os.geteuid() == 0 and (user := _user()) is not None:
                os.chown(folder, 0, user.pw_gid)
        with tempfile.TemporaryDirectory(prefix=".enrol-", dir=folder) as work:
            yield Path(work)
    except OSError as error:
        raise EnrolError(f"{error.filename or folder}: {error.strerror}; run it as root") from None

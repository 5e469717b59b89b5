"""`drover certs token | serve`: new nodes get certificates for keys that never leave them."""

from __future__ import annotations

import argparse
import hashlib
import json
import ssl
from pathlib import Path

from drover_cli.arguments import address, count
from drover_cli.output import print_json
from drover_core import logs

HOURS, MOST_HOURS = 24, 24 * 30
DAYS = 30  # renewed by itself, so shorter than what is carried by hand
PORT = 7304


def add_arguments(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    token = actions.add_parser(
        "token", help="let a new node enrol", description="A token by which one node gets its certificate, once."
    )
    token.add_argument("name", nargs="+", metavar="NODE", help="name of the node, as in fleet.toml")
    token.add_argument("--dir", type=Path, default=Path(), metavar="DIR", help="the authority's folder")
    token.add_argument("--hours", type=count, default=HOURS, help=f"how long it is good (default {HOURS})")
    token.add_argument("--json", action="store_true", help="one JSON list")
    serve = actions.add_parser(
        "serve",
        help="issue to nodes that have a token, and renew",
        description="Serve enrolment and renewal, where the authority lies, until stopped.",
    )
    serve.add_argument("--dir", type=Path, default=Path(), metavar="DIR", help="the authority's folder")
    serve.add_argument(
        "--listen", type=address, default=f"127.0.0.1:{PORT}", metavar="HOST:PORT", help=f"default 127.0.0.1:{PORT}"
    )
    serve.add_argument(
        "--cert", type=Path, required=True, metavar="FILE", help="its own: `drover certs issue collector --host ...`"
    )
    serve.add_argument("--days", type=count, default=DAYS, help=f"how long what it issues is good (default {DAYS})")
    serve.add_argument("--json", action="store_true", help="where it listens as one JSON object, once it does")


def token(args: argparse.Namespace) -> int:
    from drover_cli.errors import CliError
    from drover_cli.pki import authority as certs
    from drover_cli.pki.tokens import make

    if args.hours > MOST_HOURS:
        raise CliError(f"--hours {args.hours}: at most {MOST_HOURS}; make it when the node is there")
    authority = certs.Authority(args.dir)
    authority.check_time()
    names = [certs.check_name("agent", name) for name in dict.fromkeys(args.name)]
    finger = fingerprint(args.dir / "ca.pem")
    made = [(name, make(args.dir, name, args.hours)) for name in names]
    if args.json:
        print_json([{"node": name, "token": text, "hours": args.hours, "ca_sha256": finger} for name, text in made])
        return 0
    for name, text in made:
        print(f"{name}: good once, for {args.hours} h. On the node, as root, with HOST:PORT of `drover certs serve`:")
        print(f"  drover-agent enrol --node {name} --server HOST:{PORT} --ca-sha256 {finger}")
        print(f"and give it, when it asks: {text}")
    return 0


def fingerprint(path: Path) -> str:
    """SHA-256 of the authority's certificate in DER form, as `openssl x509 -fingerprint -sha256` without colons."""
    from cryptography.hazmat.primitives.serialization import Encoding

    from drover_cli.pki.authority import read_certificate

    return hashlib.sha256(read_certificate(path).public_bytes(Encoding.DER)).hexdigest()


def serve(args: argparse.Namespace) -> int:
    from drover_cli.errors import CliError
    from drover_cli.pki import authority as certs
    from drover_cli.pki.enrolment import EnrolmentServer, EnrolmentService

    if args.days > certs.DAYS["agent"]:
        raise CliError(f"--days {args.days}: at most {certs.DAYS['agent']}; nodes renew by themselves")
    logs.configure("info")
    host, _, port = args.listen.rpartition(":")
    desk = EnrolmentService(args.dir, args.days)
    certs.read_certificate(args.cert)
    if not (key := certs.key_path(args.cert)).exists():
        raise CliError(f"{key} is not there; it belongs next to {args.cert}, of `drover certs issue collector`")
    try:
        server = EnrolmentServer((host.strip("[]"), int(port)), desk, args.cert, key)
    except ssl.SSLError as error:
        raise CliError(f"{args.cert} and its key cannot be used ({error.reason}); issue them again") from None
    except OSError as error:
        raise CliError(f"{error.filename or args.listen}: {error.strerror}; check the path or the address") from None
    with server:
        at = f"{host}:{server.server_address[1]}"
        print(json.dumps({"listen": at}) if args.json else f"enrolment at {at}", flush=True)
        server.serve_forever()
    return 0

"""`drover certs init | issue | renew | show | list | revoke | token | serve`: the certificates of a fleet."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drover_cli.arguments import count
from drover_cli.output import print_json, print_table
from drover_cli.pki import enrol_commands
from drover_core.x509 import WARN_DAYS

if TYPE_CHECKING:
    from cryptography.x509 import Certificate

    from drover_cli.pki.authority import Authority, Issued

ROLES = ("admin", "agent", "collector", "operator", "viewer", "writer")
HELP = "an authority for mutual TLS: make it, issue, renew and revoke certificates"
DENIED = "denied.txt"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True)
    init = actions.add_parser("init", help="make an authority", description="Make an authority.")
    init.add_argument("dir", type=Path, metavar="DIR", help="folder for it; keep it off the fleet's machines")
    init.add_argument("--name", default="drover-ca", help="its name, shown by tools only (default drover-ca)")
    init.add_argument("--days", type=count, help="how long it is good (default 1825)")
    init.add_argument("--force", action="store_true", help="replace the authority that is there")
    init.add_argument("--json", action="store_true", help="one JSON list")

    issue = actions.add_parser("issue", help="issue a certificate", description="Issue certificates, each with a key.")
    issue.add_argument("role", choices=ROLES, help="what its owner may do")
    issue.add_argument("name", nargs="*", metavar="NAME", help="of the node, person, program or file")
    _dir(issue)
    issue.add_argument("--host", nargs="+", default=[], metavar="HOST", help="names and addresses of a collector")
    issue.add_argument("--fleet", type=Path, metavar="FILE", help="agents: for every node of this fleet.toml")
    issue.add_argument("--out", type=Path, metavar="FILE", help="the certificate's file; its key goes next to it")
    issue.add_argument(
        "--days", type=count, help="default: agents, collectors, viewers, writers 90; operators, admins 30"
    )
    issue.add_argument("--force", action="store_true", help="replace files that are there")
    issue.add_argument("--json", action="store_true", help="one JSON list of what was issued")

    renew = actions.add_parser(
        "renew", help="renew certificates", description="Issue again, with a new key, into the same files."
    )
    renew.add_argument("files", nargs="*", type=Path, metavar="FILE", help="certificates; ca.pem keeps its key")
    _dir(renew)
    renew.add_argument("--all-expiring-within", type=count, metavar="DAYS", help="all under DIR that end by then")
    renew.add_argument("--days", type=count, help="how long the new ones are good (default: as for issue)")
    renew.add_argument("--json", action="store_true", help="one JSON list of what was renewed")

    show = actions.add_parser("show", help="show certificate files", description="Whose they are, until when.")
    show.add_argument("files", nargs="+", type=Path, metavar="FILE", help="certificates in PEM form")
    show.add_argument("--json", action="store_true", help="one JSON list")

    list_ = actions.add_parser("list", help="what was issued", description="What was issued, by when it ends.")
    _dir(list_)
    list_.add_argument("--all", action="store_true", help="also those that have ended")
    list_.add_argument("--json", action="store_true", help="one JSON list")

    revoke = actions.add_parser(
        "revoke", help="deny certificates", description="Put serial numbers on the list that collectors refuse."
    )
    revoke.add_argument("what", nargs="+", metavar="SERIAL|NAME", help="a serial number, a name, or ROLE/NAME")
    _dir(revoke)
    revoke.add_argument("--file", type=Path, help=f"the list, tls.denied_serials_file (default DIR/{DENIED})")
    revoke.add_argument("--json", action="store_true", help="one JSON list of what is denied")
    enrol_commands.add_arguments(actions)
    actions.metavar = "{" + ",".join(actions.choices) + "}"  # without an action, the error lists them


def _dir(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dir", type=Path, default=Path(), metavar="DIR", help="the authority's folder (default: the current one)"
    )


def run(args: argparse.Namespace) -> int:
    from drover_cli.extras import needs

    with needs("certs"):
        import drover_cli.pki.authority  # noqa: F401  # cryptography, which only this command needs
    return int(_ACTIONS[args.action](args))


def _init(args: argparse.Namespace) -> int:
    from drover_cli.pki.authority import CA_DAYS, init

    init(args.dir, args.name, args.days or CA_DAYS, force=args.force)
    if args.json:
        print_json([{"file": str(args.dir / "ca.pem"), "name": args.name}])
    else:
        print(f"{args.dir / 'ca.pem'}: the authority; copy it to every machine, and ca.key to none")
    return 0


def _issue(args: argparse.Namespace) -> int:
    from drover_cli.errors import CliError
    from drover_cli.pki import authority as certs

    names = _names(args)
    authority = certs.Authority(args.dir)
    authority.check_time()
    days = _days(args.days, args.role)
    wanted = {name: args.out or args.dir / certs.file_of(args.role, name) for name in names}
    there = {name: path for name, path in wanted.items() if path.exists() or certs.key_path(path).exists()}
    if there and not args.force:
        if args.fleet is None:
            path = next(iter(there.values()))
            raise CliError(f"{path} is there already; `drover certs renew {path}`, or --force for a new one")
        wanted = {name: path for name, path in wanted.items() if name not in there}
    pairs = [(path, authority.issue(args.role, name, days=days, hosts=args.host)) for name, path in wanted.items()]
    _write(authority, pairs)
    if args.json:
        print_json([{"file": str(path), **_plain(line)} for path, (_, _, line) in pairs])
        return 0
    for path, (_, _, line) in pairs if len(pairs) < 10 else []:
        print(f"{path}: {line.uri}, serial {line.serial}, until {line.ends}")
    if len(pairs) >= 10 or args.fleet is not None:
        skipped = f"; {len(there)} were there already" if there and not args.force else ""
        print(f"{args.dir / args.role}: {len(pairs)} certificates{skipped}")
    return 0


def _names(args: argparse.Namespace) -> list[str]:
    from drover_cli.errors import CliError
    from drover_cli.pki.authority import COLLECTOR, check_name

    names = list(args.name)
    if args.role == COLLECTOR:
        if not args.host:
            raise CliError("a collector's certificate needs --host: the names and addresses that agents reach it by")
        if len(names) > 1:
            raise CliError("one collector at a time; --host takes all its names")
        names = names or [args.host[0]]
    elif args.host:
        raise CliError(f"--host is for collectors; what counts for {args.role}s is the name")
    if args.fleet is not None:
        from drover_core.model.fleet import FleetError, load_toml

        if args.role != "agent" or names:
            raise CliError("--fleet is for agents, and takes the names from the file: issue agent --fleet FILE")
        try:
            names = [node.name for node in load_toml(args.fleet).nodes]
        except FleetError as error:
            raise CliError(str(error)) from None
    if not names:
        raise CliError(f"give a name, as in `drover certs issue {args.role} NAME`")
    if args.out is not None and len(names) > 1:
        raise CliError("--out is one file, and there are several names; leave it out for one file each under DIR")
    return list(dict.fromkeys(check_name(args.role, name) for name in names))


def _days(given: int | None, role: str) -> int:
    from drover_cli.errors import CliError
    from drover_cli.pki.authority import DAYS, MOST_DAYS

    days = given or DAYS[role]
    if days > MOST_DAYS:
        raise CliError(f"--days {days}: at most {MOST_DAYS}; renew instead, which disturbs nothing")
    return days


def _write(authority: Authority, pairs: list[tuple[Path, tuple[bytes, bytes, Issued]]]) -> None:
    from drover_cli.pki import authority as certs

    certs.register(authority.folder, [line for _, (_, _, line) in pairs])
    for path, (cert, key, line) in pairs:
        certs.write_pair(path, cert, key, sync=len(pairs) < 10)  # a disk takes thousands one by one for minutes
        ends = certs.describe(authority.certificate).ends
        if line.ends >= ends:
            print(f"{path}: ends with the authority, {ends}; renew ca.pem for more", file=sys.stderr)


def _renew(args: argparse.Namespace) -> int:
    from drover_cli.errors import CliError
    from drover_cli.pki import authority as certs

    files = list(args.files)
    if args.all_expiring_within is not None:
        files += _ending(args.dir, args.all_expiring_within)
    elif not files:
        raise CliError("name the files to renew, or give --all-expiring-within DAYS")
    authority = certs.Authority(args.dir)
    done: list[dict[str, Any]] = []
    ca_file = (args.dir / "ca.pem").resolve()
    if ca_file in {file.resolve() for file in files}:
        files = [file for file in files if file.resolve() != ca_file]
        certs.write_whole(args.dir / "ca.pem", authority.renewed(args.days or certs.CA_DAYS), certs.CERT_MODE)
        authority = certs.Authority(args.dir)
        ends = certs.describe(authority.certificate).ends
        done.append({"file": str(args.dir / "ca.pem"), "ends": ends})
        if not args.json:
            print(
                f"{args.dir / 'ca.pem'}: until {ends}, with its key; what it signed stays good."
                " Copy it to every machine"
            )
    authority.check_time()
    revoked = certs.denied(args.dir / DENIED)
    pairs = []
    for path in dict.fromkeys(files):
        old = certs.read_certificate(path)
        was = certs.describe(old)
        _renewable(path, old, was, authority, revoked)
        hosts = certs.hosts_of(old) if was.role == certs.COLLECTOR else ()
        days = _days(args.days, was.role)
        pairs.append((path, authority.issue(was.role, was.name, days=days, hosts=hosts)))
    _write(authority, pairs)
    if args.json:
        print_json(done + [{"file": str(path), **_plain(line)} for path, (_, _, line) in pairs])
        return 0
    for path, (_, _, line) in pairs if len(pairs) < 10 else []:
        print(f"{path}: {line.uri}, serial {line.serial}, until {line.ends}")
    print(f"{len(pairs)} renewed")
    return 0


def _renewable(path: Path, old: Certificate, was: Issued, authority: Authority, revoked: set[str]) -> None:
    from drover_cli.errors import CliError
    from drover_cli.pki import authority as certs

    if was.role not in certs.ROLES:
        raise CliError(f"{path}: role {was.role or 'unknown'!r}; only what `drover certs issue` issues is renewed")
    if was.serial in revoked:
        raise CliError(f"{path}: serial {was.serial} is revoked; `drover certs issue {was.role} {was.name} --force`")
    if old.issuer != authority.certificate.subject:
        raise CliError(f"{path} is of another authority than {authority.folder / 'ca.pem'}; issue a new one")


def _below(folder: Path) -> list[Path]:
    """Certificates under an authority's folder, the authority's own left out: renewing it concerns every machine."""
    from drover_cli.pki import authority as certs

    return sorted(path for role in certs.ROLES for path in (folder / role).glob("*.pem"))


def _ending(folder: Path, days: int) -> list[Path]:
    """Those under an authority's folder that end within `days`; revoked ones are left to end."""
    from drover_cli.pki import authority as certs

    revoked = certs.denied(folder / DENIED)
    found = []
    for path in _below(folder):
        certificate = certs.read_certificate(path)
        if _days_left(certificate) >= days:
            continue
        if certs.describe(certificate).serial in revoked:
            print(f"{path}: is revoked; left unchanged", file=sys.stderr)
        else:
            found.append(path)
    return found


def _days_left(certificate: Certificate) -> float:
    from datetime import UTC, datetime

    return (certificate.not_valid_after_utc - datetime.now(UTC)).total_seconds() / 86400


def _show(args: argparse.Namespace) -> int:
    from drover_cli.pki import authority as certs

    found = [(path, certs.describe(certs.read_certificate(path))) for path in args.files]
    if args.json:
        print_json([{"file": str(path)} | _plain(line) for path, line in found])
        return 0
    rows = [
        [path, line.role or "?", line.name or "?", line.ends, _state(line, set()), line.serial] for path, line in found
    ]
    print_table(["FILE", "ROLE", "NAME", "ENDS", "STATE", "SERIAL"], rows)
    return 0


def _list(args: argparse.Namespace) -> int:
    from drover_cli.pki import authority as certs

    authority = certs.describe(certs.read_certificate(args.dir / "ca.pem"))
    denied = certs.denied(args.dir / DENIED)
    lines = [line for line in certs.issued(args.dir) if args.all or _state(line, denied) != "ended"]
    lines = [authority, *sorted(lines, key=lambda line: (line.ends, line.role, line.name))]
    if args.json:
        print_json([_plain(line) | {"state": _state(line, denied)} for line in lines])
        return 0
    rows = [[line.role, line.name, line.ends, _state(line, denied), line.serial] for line in lines]
    print_table(["ROLE", "NAME", "ENDS", "STATE", "SERIAL"], rows)
    return 0


def _state(line: Issued, denied: set[str]) -> str:
    from datetime import UTC, datetime, timedelta

    now = datetime.now(UTC)
    ends = datetime.fromisoformat(line.ends)
    if ends <= now:
        return "ended"
    if line.serial in denied:
        return "denied"
    return "ends soon" if ends <= now + timedelta(days=WARN_DAYS) else "good"


def _plain(line: Issued) -> dict[str, Any]:
    return {"serial": line.serial, "role": line.role, "name": line.name, "begins": line.begins, "ends": line.ends}


def _revoke(args: argparse.Namespace) -> int:
    from drover_cli.pki import authority as certs

    known = [line for line in certs.issued(args.dir) if _state(line, set()) != "ended"]
    chosen: list[Issued] = []
    for what in args.what:
        chosen += _matching(what, known)
    path = args.file or args.dir / DENIED
    added = certs.deny(path, list(dict.fromkeys(chosen)))
    if args.json:
        print_json([_plain(line) for line in dict.fromkeys(chosen)])
        return 0
    for line in dict.fromkeys(chosen):
        print(f"{line.serial}  {line.uri}")
    print(f"{path}: {added} added; bring it to each collector's tls.denied_serials_file, which takes it up at once")
    return 0


def _matching(what: str, known: list[Issued]) -> list[Issued]:
    """Those of the register that `what` names: by serial, ROLE/NAME or NAME.

    Raises:
        CliError: none, or names of several roles.
    """
    from drover_cli.errors import CliError
    from drover_cli.pki.authority import SCHEME, Issued

    found = [line for line in known if what.removeprefix(SCHEME) in (line.uri, line.name)]
    if len(roles := sorted({line.role for line in found})) > 1:
        raise CliError(f"{what!r} is the name of several: say which, as in {roles[0]}/{what}")
    if found:
        return found
    serial = what.replace(":", "").upper().lstrip("0")
    found = [line for line in known if line.serial == serial]
    if found or (len(serial) >= 8 and set(serial) <= set("0123456789ABCDEF")):
        # One that is not in the register, such as of another tool's making, is denied all the same.
        return found or [Issued(serial, "?", "?", "?", "?")]
    raise CliError(f"{what!r}: no certificate in force has this name or serial number; see `drover certs list`")


_ACTIONS = {
    "init": _init,
    "issue": _issue,
    "renew": _renew,
    "show": _show,
    "list": _list,
    "revoke": _revoke,
    "token": enrol_commands.token,
    "serve": enrol_commands.serve,
}

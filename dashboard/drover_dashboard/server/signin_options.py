"""Options of `drover-dashboard` that say how people are known, and who may act."""

from __future__ import annotations

import argparse
import importlib.util
import ipaddress
import re
import stat
import tomllib
from pathlib import Path

from drover_dashboard.client import ClientError
from drover_dashboard.server.auth_settings import Network, SignIn

NEEDED = ("redirect_uri", "cookie_secret", "client_id", "client_secret", "server_metadata_url")  # of [auth]
LEAST_SECRET = 32  # characters: it signs the cookies that say who somebody is
CALLBACK = "/oauth2callback"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "people", "how they are known; without, anyone who reaches the console may do all"
    )
    group.add_argument("--user-header", default="", metavar="NAME", help="header in which a reverse proxy names them")
    group.add_argument("--groups-header", default="", metavar="NAME", help="and their groups, parted by commas")
    group.add_argument(
        "--trusted-proxy", action="append", default=[], metavar="ADDRESS",
        help="address or network of that proxy, repeatable; nobody else is answered",
    )  # fmt: skip
    group.add_argument(
        "--secrets", type=Path, metavar="FILE", help="OpenID Connect instead: Streamlit's secrets, [auth]"
    )
    group.add_argument("--groups-claim", default="groups", metavar="NAME", help="its claim of groups (%(default)s)")
    group.add_argument(
        "--operator", action="append", default=[], metavar="NAME",
        help="may act: as the header, or the provider's email or user name, has it; repeatable",
    )  # fmt: skip
    group.add_argument("--operator-group", action="append", default=[], metavar="NAME", help="whose members may act")


def sign_in(options: argparse.Namespace) -> SignIn:
    """
    Raises:
        ClientError: options that do not go together, or secrets that cannot be used; the message says what to do.
    """
    header, secrets = options.user_header, options.secrets
    if header and secrets:
        raise ClientError("--user-header and --secrets: people are known by one of them; leave one out")
    if bool(header) != bool(options.trusted_proxy):
        raise ClientError(
            "--user-header and --trusted-proxy belong together: a header is believed of that address only"
        )
    if options.groups_header and not header:
        raise ClientError("--groups-header without --user-header: give both")
    if (options.operator or options.operator_group) and not (header or secrets):
        raise ClientError("--operator: nobody is asked who they are; give --user-header or --secrets too")
    for name in (header, options.groups_header):
        if name and not re.fullmatch(r"[A-Za-z0-9-]{1,64}", name):
            raise ClientError(f"{name!r} is no name of a header, such as X-Forwarded-Email")
    if secrets:
        _check_secrets(secrets)
    return SignIn(
        header=header,
        groups_header=options.groups_header,
        proxies=tuple(_network(text) for text in options.trusted_proxy),
        oidc=bool(secrets),
        groups_claim=options.groups_claim,
        operators=frozenset(name.casefold() for name in options.operator),
        operator_groups=frozenset(options.operator_group),
    )


def _network(text: str) -> Network:
    try:
        return ipaddress.ip_network(text)
    except ValueError:
        raise ClientError(
            f"--trusted-proxy {text}: is no address or network, such as 10.0.0.5 or 10.0.0.0/28"
        ) from None


def _check_secrets(path: Path) -> None:
    try:
        if stat.S_IMODE(path.stat().st_mode) & stat.S_IRWXO:
            raise ClientError(f"--secrets {path}: is open to every user; chmod o= {path}")
        auth = tomllib.loads(path.read_text("utf-8")).get("auth", {})
    except OSError as error:
        raise ClientError(f"--secrets {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ClientError(f"--secrets {path}: not valid TOML: {error}") from None
    missing = [key for key in NEEDED if not isinstance(auth, dict) or not auth.get(key)]
    if missing:
        raise ClientError(
            f"--secrets {path}: [auth] lacks {', '.join(missing)} (docs/how-to/console.md has an example)"
        )
    if len(str(auth["cookie_secret"])) < LEAST_SECRET:
        raise ClientError(f"--secrets {path}: auth.cookie_secret: at least {LEAST_SECRET} random characters")
    if not str(auth["redirect_uri"]).endswith(CALLBACK):
        raise ClientError(f"--secrets {path}: auth.redirect_uri: must be the console's address and {CALLBACK}")
    lacking = [name for name in ("authlib", "httpx") if importlib.util.find_spec(name) is None]
    if lacking:
        raise ClientError(f"--secrets needs {' and '.join(lacking)}: pip install 'drover[signin]'")

"""The url of a ClickHouse server: parse it, connect, and hide its secrets."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import clickhouse_connect

from drover_collector.store.errors import StoreError

SCHEMES = ("clickhouse", "clickhouses")
PORT, TLS_PORT = 8123, 8443
CONNECT_S = 5
ANSWER_S = 60  # limit for one statement
QUICK_S = 3  # limit for a statement of the lease
FILES = ("ca_cert", "client_cert", "client_cert_key")


@dataclass(frozen=True, slots=True)
class Server:
    """A server. `where` is safe to show: host, port and database, without user and password."""

    where: str
    database: str
    timeout_s: float
    options: dict[str, Any]  # for clickhouse_connect.get_client

    def client(self, settings: Mapping[str, Any], *, database: str = "", quick: bool = False) -> Any:
        """Return a connected client of the url's database, or of `database`."""
        return clickhouse_connect.get_client(
            database=database or self.database,
            settings=dict(settings),
            send_receive_timeout=QUICK_S if quick else self.timeout_s,
            **self.options,
        )


def redacted(url: str) -> str:
    """Return the url without user, password and parameters, which may be secret."""
    return f"{url.partition('://')[0]}://{url.rpartition('@')[2].partition('?')[0]}" if "@" in url else url


def short(text: str) -> str:
    """Return why a connection failed, from the HTTP client's error: equal causes give equal texts."""
    if "ConnectionPool(" not in text:
        return text
    found = re.search(r"\[(?:Errno|SSL)[^\]]*\] ?([^()'\"]+)", text) or re.search(r"(\w+(?: to \S+)? timed out)", text)
    return found[1].strip() if found else re.sub(r"query_id=[0-9a-f-]+", "", text)


def parse(url: str, password: str | None, default_database: str) -> Server:
    """Parse a `clickhouse://` or `clickhouses://` (TLS) url.

    Args:
        password: takes precedence over the url's.
    Raises:
        StoreError: one line, without the password.
    """
    parts = urlsplit(url)
    shown = redacted(url)
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        raise StoreError(f"{shown}: its port is not a number; write clickhouse://USER@HOST:PORT/DATABASE") from None
    if not host:
        raise StoreError(f"{shown}: has no host; write clickhouse://USER@HOST:PORT/DATABASE")
    given = {key: values[-1] for key, values in parse_qs(parts.query).items()}
    known = {"secure", "verify", "timeout_s", *FILES}
    if unknown := sorted(given.keys() - known):
        raise StoreError(f"{shown}: {unknown[0]!r} is not known here; {', '.join(sorted(known))} are")
    secure = parts.scheme == "clickhouses" or _flag(shown, given, "secure", False)
    try:
        timeout_s = float(given.get("timeout_s", ANSWER_S))
    except ValueError:
        timeout_s = 0
    if not 1 <= timeout_s <= 3600:
        raise StoreError(f"{shown}: timeout_s must be a number of seconds from 1 to 3600")
    database = parts.path.strip("/") or default_database
    at = f"{f'[{host}]' if ':' in host else host}:{port or (TLS_PORT if secure else PORT)}"
    options: dict[str, Any] = {
        "host": host,
        "port": port or (TLS_PORT if secure else PORT),
        "secure": secure,
        "username": unquote(parts.username or "default"),
        "password": unquote(parts.password or "") if password is None else password,
        "verify": _flag(shown, given, "verify", True),
        "connect_timeout": CONNECT_S,
        "autogenerate_session_id": False,  # so that several statements run at once
        **{key: given[key] for key in FILES if key in given},
    }
    return Server(f"{at}/{database}", database, timeout_s, options)


def _flag(shown: str, given: dict[str, str], name: str, default: bool) -> bool:
    value = given.get(name, "1" if default else "0")
    if value not in ("0", "1"):
        raise StoreError(f"{shown}: {name} must be 0 or 1")
    return value == "1"


def cluster_name(cluster: str) -> str:
    """Return the name of a cluster.

    Raises:
        StoreError: it has other characters than letters, digits, `-` and `_`.
    """
    if not cluster.replace("_", "").replace("-", "").isalnum() or not cluster.isascii():
        raise StoreError(f"{cluster!r} is not a name for a cluster; use letters, digits, '-' and '_'")
    return cluster


def database_name(database: str) -> str:
    """Return the quoted name of a database.

    Raises:
        StoreError: it has other characters than letters, digits and `_`.
    """
    if not database.replace("_", "").isalnum() or not database.isascii():
        raise StoreError(f"{database!r} is not a name for a database; use letters, digits and '_'")
    return f"`{database}`"

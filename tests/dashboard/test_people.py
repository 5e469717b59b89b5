"""Who a person is and what they may: a proxy's headers, a provider's claims, and the door before every request."""

from __future__ import annotations

import argparse
import asyncio
import ipaddress
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from drover_dashboard.client import ClientError
from drover_dashboard.server import auth_settings as people
from drover_dashboard.server.auth_settings import Person, SignIn
from drover_dashboard.server.proxy_auth import TrustedProxyMiddleware
from drover_dashboard.server.signin_options import add_arguments, sign_in

PROXY = (ipaddress.ip_network("10.0.0.5"), ipaddress.ip_network("fd00::/64"))
WAY = SignIn(
    header="X-User", groups_header="X-Groups", proxies=PROXY, operators=frozenset({"alex@example.com"}),
    operator_groups=frozenset({"sre"}),
)  # fmt: skip


@pytest.mark.parametrize(
    ("headers", "person"),
    [
        ({"X-User": "alex@example.com"}, Person("alex@example.com", True)),
        ({"X-User": "Alex@Example.com"}, Person("Alex@Example.com", True)),
        ({"X-User": "kim", "X-Groups": "dev, sre"}, Person("kim", True)),
        ({"X-User": "kim", "X-Groups": "dev"}, Person("kim", False)),
        ({"X-User": "kim\n admin", "X-Groups": "SRE"}, Person("kim  admin", False)),
        ({"X-User": "  "}, None),
        ({"X-Groups": "sre"}, None),
    ],
)
def test_a_person_by_the_proxys_headers(headers: dict[str, str], person: Person | None) -> None:
    assert WAY.of_headers(headers) == person


@pytest.mark.parametrize(
    ("claims", "person"),
    [
        ({"is_logged_in": True, "email": "alex@example.com"}, Person("alex@example.com", True)),
        ({"is_logged_in": True, "email": "alex@example.com", "email_verified": False, "sub": "7"}, Person("7", False)),
        (
            {"is_logged_in": True, "email": "alex@example.com", "email_verified": "false", "sub": "7"},
            Person("7", False),
        ),
        (
            {
                "is_logged_in": True,
                "email": "x@y",
                "preferred_username": "alex@example.com",
                "email_verified": False,
                "sub": "7",
            },
            Person("7", False),
        ),
        ({"is_logged_in": True, "name": "alex@example.com", "sub": "7"}, Person("7", False)),
        ({"is_logged_in": True, "name": "alex@example.com"}, Person("alex@example.com", False)),
        ({"is_logged_in": True, "sub": "7", "groups": ["sre"]}, Person("7", True)),
        ({"is_logged_in": True, "sub": "7", "groups": "sre"}, Person("7", True)),
        ({"is_logged_in": True, "sub": "7", "groups": {"sre": 1}}, Person("7", False)),
        ({"is_logged_in": False, "email": "alex@example.com"}, None),
        ({}, None),
    ],
)
def test_a_person_by_a_providers_claims(claims: dict[str, Any], person: Person | None) -> None:
    way = SignIn(oidc=True, operators=WAY.operators, operator_groups=WAY.operator_groups)
    assert way.of_claims(claims) == person


@pytest.mark.parametrize(
    ("address", "trusted"),
    [("10.0.0.5", True), ("10.0.0.6", False), ("::ffff:10.0.0.5", True), ("fd00::9", True), ("", False), ("x", False)],
)
def test_the_proxy_is_known_by_its_address(address: str, trusted: bool) -> None:
    assert WAY.trusts(address) is trusted


@pytest.fixture
def way() -> Iterator[None]:
    people.share(WAY)
    yield
    people.share(SignIn())


def through(kind: str, path: str, client: str, *headers: tuple[str, str]) -> str:
    """What the door does: let in, or the status or code that it answers with."""
    seen: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append("let in")

    async def receive() -> dict[str, Any]:
        return {"type": "websocket.connect"}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            seen.append(str(message["status"]))
        if message["type"] == "websocket.close":
            seen.append(str(message["code"]))

    raw = [(name.lower().encode(), value.encode()) for name, value in headers]
    scope = {"type": kind, "path": path, "client": (client, 5), "headers": raw, "method": "GET", "query_string": b""}
    asyncio.run(TrustedProxyMiddleware(app)(scope, receive, send))
    (found,) = seen
    return found


NAMED = ("X-User", "kim")


@pytest.mark.parametrize(
    ("kind", "path", "client", "headers", "found"),
    [
        ("http", "/", "10.0.0.5", [NAMED], "let in"),
        ("http", "/", "10.0.0.9", [NAMED], "403"),
        ("http", "/drover/picture", "10.0.0.9", [NAMED], "403"),
        ("http", "/", "10.0.0.9", [NAMED, ("X-Forwarded-For", "10.0.0.5")], "403"),
        ("websocket", "/_stcore/stream", "10.0.0.9", [NAMED], "1008"),
        ("websocket", "/_stcore/stream", "10.0.0.5", [NAMED], "let in"),
        ("http", "/", "10.0.0.5", [], "403"),
        ("http", "/", "10.0.0.5", [("X-User", "")], "403"),
        ("http", "/", "10.0.0.5", [NAMED, ("x-user", "alex@example.com")], "403"),
        ("http", "/", "10.0.0.5", [NAMED, ("X-Groups", "sre"), ("X-Groups", "dev")], "403"),
        ("http", "/_stcore/health", "10.0.0.9", [], "let in"),
        ("http", "/drover/picture/_stcore/health", "10.0.0.9", [], "403"),
        ("websocket", "//_stcore/health", "10.0.0.9", [], "1008"),
    ],
)
def test_nobody_but_the_proxy_is_answered(
    way: None, kind: str, path: str, client: str, headers: list[tuple[str, str]], found: str
) -> None:
    assert through(kind, path, client, *headers) == found


def test_the_fleets_picture_wants_a_signed_cookie() -> None:
    from streamlit.web.server.server_util import get_cookie_secret
    from streamlit.web.server.starlette.starlette_app_utils import create_signed_value
    from streamlit.web.server.starlette.starlette_server_config import USER_COOKIE_NAME

    people.share(SignIn(oidc=True))
    try:
        good = create_signed_value(get_cookie_secret(), USER_COOKIE_NAME, '{"is_logged_in": true}').decode()
        out = create_signed_value(get_cookie_secret(), USER_COOKIE_NAME, '{"is_logged_in": false}').decode()
        forged = create_signed_value("another secret", USER_COOKIE_NAME, '{"is_logged_in": true}').decode()
        found = {
            name: through("http", "/drover/picture", "10.0.0.9", ("Cookie", f"{USER_COOKIE_NAME}={value}"))
            for name, value in {"good": good, "out": out, "forged": forged, "none": "x"}.items()
        }
        assert found == {"good": "let in", "out": "403", "forged": "403", "none": "403"}
        assert through("http", "/drover/assets/table.js", "10.0.0.9") == "let in"
        assert through("websocket", "/_stcore/stream", "10.0.0.9") == "let in", "its page asks to sign in"
    finally:
        people.share(SignIn())


# ---- options


def chosen(*words: str) -> SignIn:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return sign_in(parser.parse_args(words))


SECRETS = """[auth]
redirect_uri = "https://console.example/oauth2callback"
cookie_secret = "0123456789abcdef0123456789abcdef"
client_id = "drover"
client_secret = "s"
server_metadata_url = "https://idp.example/.well-known/openid-configuration"
"""


def test_by_default_nobody_is_asked() -> None:
    assert not chosen().asks


def test_the_proxys_options() -> None:
    way = chosen("--user-header", "X-User", "--trusted-proxy", "10.0.0.0/28", "--operator", "Alex@example.com")
    assert way.asks
    assert way.trusts("10.0.0.15")
    assert way.of_headers({"X-User": "alex@example.com"}) == Person("alex@example.com", True)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--user-header", "X-User"), "--user-header and --trusted-proxy belong together"),
        (("--trusted-proxy", "10.0.0.5"), "belong together"),
        (("--user-header", "X User", "--trusted-proxy", "10.0.0.5"), "is no name of a header"),
        (("--user-header", "X-User", "--trusted-proxy", "proxy"), "is no address or network"),
        (("--user-header", "X-User", "--trusted-proxy", "10.0.0.5/8"), "is no address or network"),
        (("--groups-header", "X-Groups"), "without --user-header"),
        (("--operator", "alex"), "nobody is asked who they are"),
        (("--secrets", "/nowhere/secrets.toml"), "No such file"),
        (("--secrets", "x", "--user-header", "X-User", "--trusted-proxy", "10.0.0.5"), "leave one out"),
    ],
)
def test_what_does_not_go_together_is_said(words: tuple[str, ...], says: str) -> None:
    with pytest.raises(ClientError, match=says):
        chosen(*words)


@pytest.mark.parametrize(
    ("text", "mode", "says"),
    [
        (SECRETS, 0o644, "is open to every user"),
        (SECRETS.replace("client_id", "id"), 0o600, r"\[auth\] lacks client_id"),
        (SECRETS.replace("0123456789abcdef", "0", 1), 0o600, "at least 32 random characters"),
        (SECRETS.replace("/oauth2callback", ""), 0o600, "redirect_uri"),
        ("[auth", 0o600, "not valid TOML"),
        ("auth = 3", 0o600, "lacks redirect_uri"),
    ],
)
def test_bad_secrets_are_reported_without_showing_them(tmp_path: Path, text: str, mode: int, says: str) -> None:
    path = tmp_path / "secrets.toml"
    path.write_text(text)
    path.chmod(mode)
    with pytest.raises(ClientError, match=says) as refused:
        chosen("--secrets", str(path))
    assert "0123456789abcdef0123456789abcdef" not in str(refused.value)

"""Before every request: where a proxy's header names people, nothing is answered that does not come from the proxy.

As ASGI middleware, so that neither a page nor a route of our own can forget it. With OpenID Connect pages ask for
themselves, and the routes of the fleet's picture look for the same signed cookie.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from starlette.requests import HTTPConnection
from starlette.responses import PlainTextResponse

from drover_dashboard.server import auth_settings as people

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

HEALTH = "/_stcore/health"  # load balancers ask it; it reveals nothing about the fleet
OURS = "/drover/"
STYLES = "/drover/assets/"
REFUSED = "This console is reached through its proxy only, which says who you are."
TWICE = "The proxy must replace the header that names a person, not add to one that a browser sent."
UNKNOWN = "Sign in first: reload the page."
CLOSED_POLICY = 1008  # RFC 6455: policy violation


class TrustedProxyMiddleware:
    """ASGI middleware."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope) if scope["type"] in ("http", "websocket") else ""
        if not refusal:
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await receive()  # its connect
            await send({"type": "websocket.close", "code": CLOSED_POLICY, "reason": refusal})
        else:
            await PlainTextResponse(refusal, 403)(scope, receive, send)

    def _refusal(self, scope: Scope) -> str:
        """Why it is not let in, or ""."""
        way, path = people.chosen(), str(scope.get("path", ""))
        if path == _health():
            return ""
        if way.header:
            if not way.trusts(str((scope.get("client") or ("",))[0])):
                return REFUSED
            headers: list[tuple[bytes, bytes]] = scope["headers"]
            found = [[value for name, value in headers if name.lower() == word] for word in way.words]
            if any(len(values) > 1 for values in found):
                return TWICE
            return "" if found[0] and found[0][0].strip() else REFUSED
        if way.oidc and OURS in path and STYLES not in path and not signed_in(HTTPConnection(scope)):
            return UNKNOWN
        return ""


def _health() -> str:
    """Compared whole: a path that only ends so may be another page's."""
    from streamlit import config

    base = str(config.get_option("server.baseUrlPath") or "").strip("/")
    return f"/{base}{HEALTH}" if base else HEALTH


def signed_in(connection: HTTPConnection) -> bool:
    """Whether Streamlit's signed cookie says so; by Streamlit's own reading, which has no public name."""
    from streamlit.web.server.starlette.starlette_server_config import USER_COOKIE_NAME
    from streamlit.web.server.starlette.starlette_websocket import _get_signed_cookie_with_chunks

    try:
        found = _get_signed_cookie_with_chunks(dict(connection.cookies), USER_COOKIE_NAME)
        return bool(found and json.loads(found).get("is_logged_in"))
    except ValueError:
        return False

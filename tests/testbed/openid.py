"""An OpenID provider: discovery, authorization code flow and signed ID tokens, for whom `claims` says is there.

Faithful where a client looks (OpenID Connect Core 1.0, sections 3.1 and 10.1; Discovery 1.0): a code is good once, the
client has to know its secret and redirect address, the nonce comes back, tokens are RS256 with a published key. It
asks no password.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlencode, urlsplit

from joserfc import jwt
from joserfc.jwk import RSAKey

CLIENT, SECRET = "drover", "the client's secret"


class Provider:
    """`claims`: of who is at the browser; `redirect`: where it may be sent back to."""

    def __init__(self) -> None:
        self.claims: dict[str, Any] = {"sub": "1"}
        self.redirect = ""
        self.url = ""
        self.key = RSAKey.generate_key(2048, {"kid": "k1", "use": "sig", "alg": "RS256"})
        self.codes: dict[str, str] = {}  # code -> nonce

    def authorize(self, query: dict[str, str]) -> str:
        """Where the browser is sent."""
        assert query["client_id"] == CLIENT
        assert query["redirect_uri"] == self.redirect
        assert "openid" in query["scope"].split()
        code = secrets.token_urlsafe(16)
        self.codes[code] = query.get("nonce", "")
        return f"{self.redirect}?{urlencode({'code': code, 'state': query['state']})}"

    def token(self, form: dict[str, str]) -> dict[str, Any]:
        nonce = self.codes.pop(form["code"])
        now = int(time.time())
        claims = {"iss": self.url, "aud": CLIENT, "iat": now, "exp": now + 300, "nonce": nonce, **self.claims}
        token = jwt.encode({"alg": "RS256", "kid": "k1"}, claims, self.key)
        return {"access_token": secrets.token_hex(8), "token_type": "Bearer", "expires_in": 300, "id_token": token}


@contextmanager
def serving() -> Iterator[Provider]:
    """A provider on a port of its own."""
    provider = Provider()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            url = urlsplit(self.path)
            query = {name: values[0] for name, values in parse_qs(url.query).items()}
            if url.path == "/authorize":
                self.send_response(302)
                self.send_header("Location", provider.authorize(query))
                self.end_headers()
                return
            base = provider.url
            pages: dict[str, Any] = {
                "/.well-known/openid-configuration": {
                    "issuer": base, "authorization_endpoint": f"{base}/authorize", "token_endpoint": f"{base}/token",
                    "jwks_uri": f"{base}/jwks", "response_types_supported": ["code"],
                    "subject_types_supported": ["public"], "id_token_signing_alg_values_supported": ["RS256"],
                },
                "/jwks": {"keys": [provider.key.as_dict(private=False)]},
            }  # fmt: skip
            self._answer(200 if url.path in pages else 404, pages.get(url.path, {}))

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"])).decode()
            form = {name: values[0] for name, values in parse_qs(body).items()}
            known = form.get("client_id"), form.get("client_secret")
            if (basic := self.headers.get("Authorization", "")).startswith("Basic "):
                name, _, secret = b64decode(basic[6:]).decode().partition(":")
                known = unquote(name), unquote(secret)
            if known != (CLIENT, SECRET) or form.get("code") not in provider.codes:
                self._answer(400, {"error": "invalid_client"})
                return
            self._answer(200, provider.token(form))

        def _answer(self, status: int, content: dict[str, Any]) -> None:
            body = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Nothing on standard error."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    provider.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield provider
    finally:
        server.shutdown()
        thread.join()
        server.server_close()

"""Receivers of messages on real sockets: an HTTP server that answers as set, and a real SMTP server (aiosmtpd)."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from email import message_from_bytes, policy
from email.message import EmailMessage
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from aiosmtpd.controller import Controller

from testbed.system_processes import free_port

LIMIT_S = 30.0  # for a client that is held up


@dataclass(frozen=True)
class Reply:
    status: int = 200
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    how: str = "answer"  # or hang, close (without a word), trickle (a byte now and then, without end)


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    headers: Mapping[str, str]  # names in lower case
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class HttpReceiver:
    """
    Attributes:
        replies: what is answered first; then `usual`.
    """

    def __init__(self, tls: tuple[Path, Path] | None = None) -> None:
        """`tls`: certificate and key."""
        self.got: list[Request] = []
        self.replies: list[Reply] = []
        self.usual = Reply()
        self.released = threading.Event()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                headers = {k.lower(): v for k, v in self.headers.items()}
                receiver.got.append(Request(self.command, self.path, headers, body))
                reply = receiver.replies.pop(0) if receiver.replies else receiver.usual
                self.close_connection = True
                if reply.how == "hang":
                    receiver.released.wait(LIMIT_S)
                elif reply.how == "trickle":
                    self.wfile.write(b"HTTP/1.1 200 OK\r\nx-slow: ")
                    while not receiver.released.wait(0.02):
                        self.wfile.write(b".")
                elif reply.how == "answer":
                    self.send_response(reply.status)
                    for name, value in {**reply.headers, "content-length": str(len(reply.body))}.items():
                        self.send_header(name, value)
                    self.end_headers()
                    self.wfile.write(reply.body)

            do_GET = do_POST

            def log_message(self, format: str, *args: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request: object, client_address: object) -> None:
                """A client that has left is part of the tests."""

        self._server = Server(("127.0.0.1", 0), Handler)
        if tls is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*tls)
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.port = self._server.server_address[1]
        self.url = f"http{'s' if tls else ''}://127.0.0.1:{self.port}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self.released.set()
        self._server.shutdown()
        self._server.server_close()


@contextmanager
def http_receiver(tls: tuple[Path, Path] | None = None) -> Iterator[HttpReceiver]:
    made = HttpReceiver(tls)
    try:
        yield made
    finally:
        made.close()


class Mailbox:
    """What a mail server took; `refusing`: it answers 550 to these recipients."""

    def __init__(self) -> None:
        self.mails: list[tuple[list[str], EmailMessage]] = []
        self.refusing: set[str] = set()
        self.port = 0

    async def handle_RCPT(self, server: Any, session: Any, envelope: Any, address: str, options: Any) -> str:
        if address in self.refusing:
            return "550 no such user"
        envelope.rcpt_tos.append(address)
        return "250 OK"

    async def handle_DATA(self, server: Any, session: Any, envelope: Any) -> str:
        mail = message_from_bytes(envelope.content, policy=policy.default)
        assert isinstance(mail, EmailMessage)
        self.mails.append((list(envelope.rcpt_tos), mail))
        return "250 taken"


@contextmanager
def mail_server() -> Iterator[Mailbox]:
    box = Mailbox()
    box.port = free_port()
    controller = Controller(box, hostname="127.0.0.1", port=box.port)
    controller.start()
    try:
        yield box
    finally:
        controller.stop()

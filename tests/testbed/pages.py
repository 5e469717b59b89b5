"""A web server with one page, as an exporter or inference server has it, that can also misbehave."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Served:
    """What is served: change it between two reads.

    Attributes:
        body, status, headers: the answer.
        hang: answers wait until it is cleared; `close_first`: connections are closed after each answer without a word.
        requests: paths asked for; connections: how many there were.
    """

    def __init__(self) -> None:
        self.body = b""
        self.status = 200
        self.headers: dict[str, str] = {}
        self.hang = False
        self.close_first = False
        self.requests: list[str] = []
        self.connections = 0
        self.sockets: list[socket.socket] = []
        self.port = 0
        self.released = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/metrics"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    served: Served

    def setup(self) -> None:
        super().setup()
        self.served.connections += 1
        self.served.sockets.append(self.connection)

    def do_GET(self) -> None:
        served = self.served
        served.requests.append(self.path)
        if served.hang:
            served.released.wait(120)
        self.send_response(served.status)
        if "Content-Length" not in served.headers:
            self.send_header("Content-Length", str(len(served.body)))
        for name, value in served.headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(served.body)
        if served.close_first:
            self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        """Nothing on standard error."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that did not wait for its answer is what some tests are about."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]  # as it was given


@contextmanager
def serving(port: int = 0) -> Iterator[Served]:
    """A server on a port of its own (or on `port`) until the end of the block; it ends its connections then."""
    served = Served()
    handler = type("Handler", (_Handler,), {"served": served, "timeout": 5})
    server = _Server(("127.0.0.1", port), handler)
    served.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield served
    finally:
        served.released.set()
        server.shutdown()
        server.server_close()
        thread.join()
        for connection in served.sockets:
            with contextlib.suppress(OSError):  # ended already
                connection.shutdown(socket.SHUT_RDWR)

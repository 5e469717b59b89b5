"""A reverse proxy that names the person in a header of each request, as a sign-in proxy does.

Chromium 150 no longer sends Playwright's extra headers with the handshake of a WebSocket.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from io import BufferedReader


@contextlib.contextmanager
def header_proxy(port: int, header: str, value: str) -> Iterator[str]:
    """Pass connections on to 127.0.0.1:`port` with `header: value` in each request; yield the proxy's address."""
    listener = socket.create_server(("127.0.0.1", 0))
    line = f"{header}: {value}\r\n".encode()

    def accept() -> None:
        with contextlib.suppress(OSError):  # closed below
            while True:
                client = listener.accept()[0]
                threading.Thread(target=_serve, args=(client, port, line), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.close()


def _serve(client: socket.socket, port: int, line: bytes) -> None:
    with client, socket.create_connection(("127.0.0.1", port)) as server:
        back = threading.Thread(target=_copy, args=(server, client), daemon=True)
        back.start()
        with contextlib.suppress(OSError), client.makefile("rb") as requests:
            while head := _head(requests):
                first, _, rest = head.partition(b"\r\n")
                server.sendall(first + b"\r\n" + line + rest)
                fields = {k.strip().lower(): v.strip() for k, _, v in (f.partition(b":") for f in rest.split(b"\r\n"))}
                server.sendall(requests.read(int(fields.get(b"content-length", b"0"))))
                if fields.get(b"upgrade", b"").lower() == b"websocket":
                    while data := requests.read1(65_536):
                        server.sendall(data)
        with contextlib.suppress(OSError):
            server.shutdown(socket.SHUT_WR)
        back.join(10)


def _head(requests: BufferedReader) -> bytes:
    """Return one request's head with its empty line; b"" at the end of the connection."""
    found = b""
    while not found.endswith(b"\r\n\r\n"):
        part = requests.readline()
        if not part:
            return b""
        found += part
    return found


def _copy(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65_536):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)

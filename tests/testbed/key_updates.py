"""A TLS client that says nothing but key updates: OpenSSL's own, as Python's `ssl` sends none."""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import socket
import threading
from typing import Any

from testbed.certificates import Files

NAME = ctypes.util.find_library("ssl")


class Flood:
    """A handshake, then so many key updates at once; what fails is the server's leaving."""

    def __init__(self, port: int, own: Files) -> None:
        assert NAME is not None
        self._tls = ctypes.CDLL(NAME)
        for name in ("TLS_client_method", "SSL_CTX_new", "SSL_new"):
            getattr(self._tls, name).restype = ctypes.c_void_p
        self._to_server = socket.create_connection(("127.0.0.1", port))
        ours, self._theirs = socket.socketpair()
        self._kept: list[bytes] | None = None
        self._empty = threading.Event()
        threading.Thread(target=self._back, daemon=True).start()
        threading.Thread(target=self._forth, daemon=True).start()
        context = self._call("SSL_CTX_new", ctypes.c_void_p(self._tls.TLS_client_method()))
        assert self._call("SSL_CTX_use_certificate_chain_file", context, str(own.cert).encode()) == 1
        assert self._call("SSL_CTX_use_PrivateKey_file", context, str(own.key).encode(), 1) == 1
        assert self._call("SSL_CTX_set_alpn_protos", context, b"\x02h2", 3) == 0
        self._ssl = ctypes.c_void_p(self._tls.SSL_new(context))
        self._ours = ours
        self._call("SSL_set_fd", self._ssl, ours.fileno())
        assert self._call("SSL_connect", self._ssl) == 1

    def send(self, count: int) -> None:
        self._kept = []
        for _ in range(count):
            assert self._call("SSL_key_update", self._ssl, 0) == 1
            assert self._call("SSL_do_handshake", self._ssl) == 1
        self._ours.shutdown(socket.SHUT_WR)
        self._empty.wait(120)
        with contextlib.suppress(OSError):
            self._to_server.sendall(b"".join(self._kept))

    def close(self) -> None:
        for each in (self._to_server, self._ours, self._theirs):
            each.close()

    def _call(self, name: str, *args: Any) -> Any:
        found = getattr(self._tls, name)(*args)
        return ctypes.c_void_p(found) if name == "SSL_CTX_new" else found

    def _back(self) -> None:
        with contextlib.suppress(OSError):
            while data := self._to_server.recv(65_536):
                self._theirs.sendall(data)

    def _forth(self) -> None:
        with contextlib.suppress(OSError):
            while data := self._theirs.recv(65_536):
                if self._kept is None:
                    self._to_server.sendall(data)
                else:
                    self._kept.append(data)
        self._empty.set()

"""Serve the collector's own metrics in Prometheus' text format, on an optional listener.

prometheus_client writes the page. Its HTTP server has no bound on connections and none on slow readers, so the
listener is ours.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from drover_collector.api.snapshot import ApiSnapshot
from drover_collector.api.store import StoreWatch
from drover_collector.auth.authorization import PAGE
from drover_collector.auth.connection_limit import ConnectionLimit
from drover_collector.auth.tls import Contexts
from drover_collector.observability import families, store_metrics
from drover_collector.observability.page import CONTENT_TYPE, Page
from drover_core import x509

log = logging.getLogger(__name__)

REQUEST_S = 10.0  # a request as a whole, handshake and all
BACKLOG = 128


def exposition(facts: ApiSnapshot, watch: StoreWatch) -> str:
    """Return the page. While the store hangs, its families are left out and the page does not wait."""
    page = Page()
    families.fleet(page, facts)
    families.ingest(page, facts)
    families.detection(page, facts)
    families.notifications(page, facts)
    store_metrics.add(page, facts, watch.look())
    families.process(page, facts)
    return page.text()


class MetricsServer:
    """Serves /metrics from threads of its own until `close`."""

    def __init__(self, facts: ApiSnapshot, host: str, port: int, tls: Contexts | None = None, most: int = 64) -> None:
        """
        Args:
            most: connections at once, each with a thread. One more closes the oldest of the address that has most.
        Raises:
            OSError: the address cannot be listened on.
        """
        self._server = _server(facts, host, port, tls, most)
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def _server(facts: ApiSnapshot, host: str, port: int, tls: Contexts | None, most: int) -> ThreadingHTTPServer:
    watch = StoreWatch(facts)
    limit: ConnectionLimit[socket.socket] = ConnectionLimit()
    lock = threading.Lock()  # of the limit

    class Handler(BaseHTTPRequestHandler):
        timeout = REQUEST_S

        def do_GET(self) -> None:
            if isinstance(self.connection, ssl.SSLSocket):
                why = facts.gate.refusal_of(_tls_of(self.connection), PAGE)
                if why:
                    self.send_error(403, why)
                    return
            if self.path.partition("?")[0] != "/metrics":
                self.send_error(404, "the page is /metrics")
                return
            page = exposition(facts, watch).encode()
            self.send_response(200)
            self.send_header("content-type", CONTENT_TYPE)
            self.send_header("content-length", str(len(page)))
            self.end_headers()
            self.wfile.write(page)

        def log_message(self, format: str, *args: object) -> None:
            log.debug(format, *args)

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        allow_reuse_port = False
        request_queue_size = BACKLOG

        def get_request(self) -> tuple[socket.socket, Any]:
            connection, address = super().get_request()
            if tls is None:
                return connection, address
            # The handshake happens in the request's own thread, which a stuck client may hold.
            return tls().wrap_socket(connection, server_side=True, do_handshake_on_connect=False), address

        def process_request(self, request: Any, client_address: Any) -> None:
            with lock:
                if len(limit) >= most and (spare := limit.spare()) is not None:
                    limit.leave(spare)
                    _cut(spare)
                limit.join(request, str(client_address[0]))
            try:
                super().process_request(request, client_address)
            except RuntimeError:  # no more threads
                self.shutdown_request(request)
                raise

        def process_request_thread(self, request: Any, client_address: Any) -> None:
            # Each read has its own timeout, so a peer that sends a byte now and then would never end.
            end = threading.Timer(REQUEST_S, _cut, [request])
            end.daemon = True
            end.start()
            try:
                super().process_request_thread(request, client_address)
            finally:
                end.cancel()

        def shutdown_request(self, request: Any) -> None:
            with lock:  # before it is closed: afterwards another may have its file number
                limit.leave(request)
            super().shutdown_request(request)

        def handle_error(self, _request: Any, client_address: Any) -> None:
            log.debug("a request of %s", client_address, exc_info=True)

    return Server((host, port), Handler)


def _cut(connection: socket.socket) -> None:
    """Close a connection under its thread, whose read then ends."""
    with contextlib.suppress(OSError):  # it has closed by itself
        socket.socket.shutdown(connection, socket.SHUT_RDWR)  # not TLS's own


def _tls_of(connection: ssl.SSLSocket) -> dict[str, list[bytes]]:
    """Return the peer's authentication as gRPC gives it."""
    der = connection.getpeercert(True) or b""
    names = [name.encode() for name in x509.parse(der).uris] if der else []
    pem = [ssl.DER_cert_to_PEM_cert(der).encode()] if der else []
    return {"transport_security_type": [b"ssl"], "x509_subject_alternative_name": names, "x509_pem_cert": pem}

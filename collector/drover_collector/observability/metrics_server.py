"""Serve the collector's own metrics, and pages of the fleet, in Prometheus' text format on an optional listener.

prometheus_client writes the page. Its HTTP server has no bound on connections and none on slow readers, so the
listener is ours.
"""

from __future__ import annotations

import contextlib
import http.client
import logging
import socket
import ssl
import threading
from collections.abc import Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import MappingProxyType
from typing import Any, BinaryIO, cast

from drover_collector.api.snapshot import ApiSnapshot
from drover_collector.api.store import StoreWatch
from drover_collector.auth.authorization import PAGE
from drover_collector.auth.connection_limit import ConnectionLimit
from drover_collector.auth.tls import Contexts
from drover_collector.exporters.page import FleetPage
from drover_collector.observability import families, store_metrics
from drover_collector.observability.page import CONTENT_TYPE, Page
from drover_collector.store import StoreError
from drover_core import x509

log = logging.getLogger(__name__)

REQUEST_S = 10.0  # a request as a whole, handshake and all
FLEET_S = 60.0  # one for a page of the fleet, which may have hundreds of megabytes
NO_PAGES: Mapping[str, FleetPage] = MappingProxyType({})
BACKLOG = 128
HEAD_BYTES = 65_536  # of a request's headers together


def exposition(facts: ApiSnapshot, watch: StoreWatch) -> str:
    """Return the page. While the store hangs, its families are left out and the page does not wait."""
    page = Page()
    families.fleet(page, facts)
    families.ingest(page, facts)
    families.detection(page, facts)
    families.notifications(page, facts)
    families.exports(page, facts)
    store_metrics.add(page, facts, watch.look())
    families.process(page, facts)
    return page.text()


class MetricsServer:
    """Serves /metrics, and the fleet's pages if there are any, from threads of its own until `close`."""

    def __init__(
        self,
        facts: ApiSnapshot,
        address: tuple[str, int],
        tls: Contexts | None = None,
        most: int = 64,
        pages: Mapping[str, FleetPage] = NO_PAGES,
    ) -> None:
        """
        Args:
            address: host and port.
            most: connections at once, each with a thread. One more closes the oldest of the address that has most.
            pages: path -> page of the fleet.
        Raises:
            OSError: the address cannot be listened on.
        """
        self._server = BoundedServer(address, type("Handler", (_Handler,), {"site": _Site(facts, pages)}), tls, most)
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Site:
    """What is served."""

    def __init__(self, facts: ApiSnapshot, pages: Mapping[str, FleetPage]) -> None:
        self.facts, self.pages, self.watch = facts, pages, StoreWatch(facts)

    def refusal(self, connection: socket.socket) -> str:
        return self.facts.gate.refusal_of(tls_of(connection), PAGE) if isinstance(connection, ssl.SSLSocket) else ""


class BoundedHandler(BaseHTTPRequestHandler):
    """Bounds a request's headers together, also REST's. http.server bounds each line, and their number to what any
    library of this process has set: a client of ClickHouse sets 10,000, of 64 KiB each.
    """

    timeout = REQUEST_S

    def parse_request(self) -> bool:
        whole = self.rfile
        self.rfile = cast(Any, _Head(cast(BinaryIO, whole)))
        try:
            return super().parse_request()
        finally:
            self.rfile = whole


class _Head:
    """Reads lines of headers until they are too many bytes."""

    def __init__(self, source: BinaryIO) -> None:
        self._source, self._left = source, HEAD_BYTES

    def readline(self, most: int) -> bytes:
        """
        Raises:
            LineTooLong: all lines together; http.server answers with 431.
        """
        line = self._source.readline(min(most, self._left + 1))
        self._left -= len(line)
        if self._left < 0:
            raise http.client.LineTooLong("headers")
        return line


class _Handler(BoundedHandler):
    site: _Site
    server: BoundedServer

    def do_GET(self) -> None:
        if why := self.site.refusal(self.connection):
            self.send_error(403, why)
            return
        path = self.path.partition("?")[0]
        if path == "/metrics":
            page = exposition(self.site.facts, self.site.watch).encode()
            self._begin({"content-length": str(len(page))})
            self.wfile.write(page)
        elif path in self.site.pages:
            self.server.give_longer(self.connection)
            self._send_fleet(self.site.pages[path])
        else:
            self.send_error(404, f"there are {', '.join(['/metrics', *self.site.pages])}")

    def _send_fleet(self, page: FleetPage) -> None:
        try:
            made = page.read()
        except StoreError as error:  # a standby reads the store's buckets
            self.send_error(503, f"the store does not answer: {error}")
            return
        if takes_gzip(self.headers.get_all("accept-encoding", [])):
            self._begin({"content-encoding": "gzip", "content-length": str(made.size)})
            for piece in made.pieces:
                self.wfile.write(piece)
            return
        self._begin({"content-length": str(made.plain_size)})  # so that a cut page cannot pass for a whole one
        for piece in made.plain():
            self.wfile.write(piece)

    def _begin(self, headers: Mapping[str, str]) -> None:
        self.send_response(200)
        for name, value in {"content-type": CONTENT_TYPE, **headers}.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        log.debug(format, *args)


class BoundedServer(ThreadingHTTPServer):
    """Bounds connections and the time of each; also REST's."""

    daemon_threads = True
    allow_reuse_port = False
    request_queue_size = BACKLOG

    def __init__(
        self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler], tls: Contexts | None, most: int
    ) -> None:
        self._tls, self._most = tls, most
        self._limit: ConnectionLimit[socket.socket] = ConnectionLimit()
        self._ends: dict[socket.socket, threading.Timer] = {}
        self._lock = threading.Lock()  # of both
        super().__init__(address, handler)

    def get_request(self) -> tuple[socket.socket, Any]:
        connection, address = super().get_request()
        if self._tls is None:
            return connection, address
        # The handshake happens in the request's own thread, which a stuck client may hold.
        return self._tls().wrap_socket(connection, server_side=True, do_handshake_on_connect=False), address

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            if len(self._limit) >= self._most and (spare := self._limit.spare()) is not None:
                self._limit.leave(spare)
                _cut(spare)
            self._limit.join(request, str(client_address[0]))
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no more threads
            self.shutdown_request(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        # Each read has its own timeout, so a peer that sends a byte now and then would never end.
        self._end_after(request, REQUEST_S)
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._end_after(request, None)

    def give_longer(self, request: socket.socket, seconds: float = FLEET_S) -> None:
        """Let a request take FLEET_S: a page of a large fleet takes seconds to make and to send."""
        self._end_after(request, seconds)

    def _end_after(self, request: socket.socket, seconds: float | None) -> None:
        """End a request after so long from now, instead of when it was to end. None: not any more."""
        end = None if seconds is None else threading.Timer(seconds, _cut, [request])
        with self._lock:
            before = self._ends.pop(request, None)
            if end is not None:
                self._ends[request] = end
        if before is not None:
            before.cancel()
        if end is not None:
            end.daemon = True
            end.start()

    def shutdown_request(self, request: Any) -> None:
        with self._lock:  # before it is closed: afterwards another may have its file number
            self._limit.leave(request)
        super().shutdown_request(request)

    def handle_error(self, _request: Any, client_address: Any) -> None:
        log.debug("a request of %s", client_address, exc_info=True)


def takes_gzip(accepted: Sequence[str]) -> bool:
    """Whether the Accept-Encoding headers (RFC 9110, 12.5.3) name gzip, and not with a weight of 0."""
    for part in ",".join(accepted).lower().split(","):
        coding, _, weight = part.replace(" ", "").partition(";q=")
        if coding == "gzip":
            return weight.strip("0.") != "" or not weight
    return False


def _cut(connection: socket.socket) -> None:
    """Close a connection under its thread, whose read then ends."""
    with contextlib.suppress(OSError):  # it has closed by itself
        socket.socket.shutdown(connection, socket.SHUT_RDWR)  # not TLS's own


def tls_of(connection: ssl.SSLSocket) -> dict[str, list[bytes]]:
    """Return the peer's authentication as gRPC gives it."""
    der = connection.getpeercert(True) or b""
    names = [name.encode() for name in x509.parse(der).uris] if der else []
    pem = [ssl.DER_cert_to_PEM_cert(der).encode()] if der else []
    return {"transport_security_type": [b"ssl"], "x509_subject_alternative_name": names, "x509_pem_cert": pem}

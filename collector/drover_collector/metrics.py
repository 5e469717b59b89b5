"""The collector's own figures in Prometheus' text format, on an optional listener."""

from __future__ import annotations

import logging
import socket
import ssl
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from drover_collector import metrics_families as families
from drover_collector import metrics_store
from drover_collector.api_facts import Facts
from drover_collector.exposition import CONTENT_TYPE, Page
from drover_collector.gate import PAGE
from drover_collector.metrics_store import StoreWatch
from drover_collector.tls import Contexts
from drover_proto import x509

log = logging.getLogger(__name__)

REQUEST_S = 10.0


def exposition(facts: Facts, watch: StoreWatch) -> str:
    """The page. It does not wait for a store that hangs: what only the store can tell is left out then."""
    page = Page()
    families.fleet(page, facts)
    families.ingest(page, facts)
    families.detection(page, facts)
    families.notifications(page, facts)
    metrics_store.add(page, facts, watch.look())
    families.process(page, facts)
    return page.text()


class MetricsServer:
    """Serves /metrics from threads of its own until `close`."""

    def __init__(self, facts: Facts, host: str, port: int, tls: Contexts | None = None) -> None:
        """
        Raises:
            OSError: the address cannot be listened on.
        """
        self._server = _server(facts, host, port, tls)
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def _server(facts: Facts, host: str, port: int, tls: Contexts | None) -> ThreadingHTTPServer:
    watch = StoreWatch(facts)

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

        def get_request(self) -> tuple[socket.socket, Any]:
            connection, address = super().get_request()
            if tls is None:
                return connection, address
            # The handshake happens in the request's own thread, which a stuck client may hold.
            return tls().wrap_socket(connection, server_side=True, do_handshake_on_connect=False), address

    return Server((host, port), Handler)


def _tls_of(connection: ssl.SSLSocket) -> dict[str, list[bytes]]:
    """What gRPC would tell of this peer."""
    der = connection.getpeercert(True) or b""
    names = [name.encode() for name in x509.parse(der).uris] if der else []
    pem = [ssl.DER_cert_to_PEM_cert(der).encode()] if der else []
    return {"transport_security_type": [b"ssl"], "x509_subject_alternative_name": names, "x509_pem_cert": pem}

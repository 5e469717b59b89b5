"""Serve a node's pages: one request at a time, each within a limit, from a thread of its own.

It holds up no reading: it only takes values that were read anyway.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

from drover_agent.clock import Clock
from drover_agent.config import PageConfig
from drover_agent.page.values import NewestValues
from drover_core.metrics.series import CONTENT_TYPE, DCGM, DROVER, series_of
from drover_core.settings import SettingsError

log = logging.getLogger(__name__)

REQUEST_S = 5.0  # a request as a whole: a scraper that hangs keeps others waiting no longer
PATHS = {"/metrics": DROVER, "/metrics/dcgm": DCGM}


class PageServer:
    """Serves from its construction until `close`.

    Raises (at construction):
        SettingsError: the address cannot be listened on.
    """

    def __init__(self, config: PageConfig, node: str, clock: Clock) -> None:
        self.values = NewestValues(node, clock.now_ms)
        families = {path: series_of(naming, config.metrics) for path, naming in PATHS.items()}
        values = self.values

        class Handler(BaseHTTPRequestHandler):
            timeout = REQUEST_S

            def do_GET(self) -> None:
                path = self.path.partition("?")[0]
                if path not in PATHS:
                    self.send_error(404, f"the pages are {' and '.join(PATHS)}")
                    return
                page = values.page(families[path], PATHS[path]).encode()
                self.send_response(200)
                self.send_header("content-type", CONTENT_TYPE)
                self.send_header("content-length", str(len(page)))
                self.end_headers()
                self.wfile.write(page)

            def log_message(self, format: str, *args: object) -> None:
                log.debug(format, *args)

        host, _, port = config.listen.rpartition(":")
        try:
            self._server = _Server((host.strip("[]"), int(port)), Handler)
        except OSError as error:
            raise SettingsError(
                f"page.listen: cannot listen on {config.listen}: {error.strerror or error}; set another address"
            ) from None
        self.port = int(self._server.server_address[1])
        threading.Thread(target=self._server.serve_forever, name="page", daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Server(HTTPServer):
    allow_reuse_port = False

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        super().__init__(address, handler)

    def server_bind(self) -> None:
        """Without HTTPServer's look-up of the host's name, which may wait for a name server."""
        super(HTTPServer, self).server_bind()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def finish_request(self, request: Any, client_address: Any) -> None:
        end = threading.Timer(REQUEST_S, _cut, [request])  # a peer may send a byte now and then
        end.daemon = True
        end.start()
        try:
            super().finish_request(request, client_address)
        finally:
            end.cancel()

    def handle_error(self, _request: Any, client_address: Any) -> None:
        log.debug("a request of %s", client_address, exc_info=True)


def _cut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it has closed by itself
        connection.shutdown(socket.SHUT_RDWR)

"""The collector's own figures in Prometheus' text format, on an optional listener."""

from __future__ import annotations

import logging
import socket
import ssl
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from drover_collector.api_facts import REPORTING_MS, Facts
from drover_collector.api_fleet import gpus_by_health
from drover_collector.gate import PAGE
from drover_collector.store import StoreError
from drover_collector.tls import Contexts
from drover_proto import x509

log = logging.getLogger(__name__)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
REQUEST_S = 10.0


def exposition(facts: Facts) -> str:
    """The page.

    Raises:
        StoreError: the store cannot say what it holds.
    """
    pipeline, stats, totals, now_ms = facts.pipeline, facts.stats, facts.totals(), facts.now_ms()
    ticks = pipeline.ticks
    incidents = Counter(str(i.severity) for i in facts.open_incidents())
    seen = facts.last_seen()
    lines: list[str] = []
    add = lines.extend
    add(_family("drover_gpus", "gauge", "GPUs of the fleet by health", gpus_by_health(facts), "health"))
    add(_family("drover_nodes_expected", "gauge", "nodes in the fleet file", facts.index.node_count))
    add(_family("drover_nodes_reporting", "gauge", "nodes heard lately", int((seen >= now_ms - REPORTING_MS).sum())))
    add(_family("drover_open_incidents", "gauge", "open incidents by severity", incidents, "severity"))
    add(_family("drover_agents_connected", "gauge", "agents with an open stream", stats.connected))
    add(_family("drover_batches_total", "counter", "batches taken from agents", stats.batches))
    add(_family("drover_samples_total", "counter", "samples taken from agents", stats.samples))
    add(_family("drover_rejected_total", "counter", "what was refused, by reason", stats.rejected, "reason"))
    add(
        _family(
            "drover_calls_total",
            "counter",
            "calls and streams let in with TLS, by service",
            facts.gate.calls,
            "service",
        )
    )
    add(
        _family("drover_refused_total", "counter", "calls and streams refused, by reason", facts.gate.refused, "reason")
    )
    if facts.tls is not None:
        add(
            _family(
                "drover_tls_connections_total", "counter", "TLS handshakes begun", facts.tls.connections, "listener"
            )
        )
        add(
            _family(
                "drover_certificate_end_seconds", "gauge", "end of this collector's certificate", facts.tls.own.ends_s
            )
        )
    add(_family("drover_ticks_total", "counter", "buckets judged", ticks.done))
    add(_family("drover_ticks_skipped_total", "counter", "buckets left out: too far behind", ticks.skipped))
    add(_family("drover_tick_seconds", "gauge", "time that the newest bucket took, read and detect", ticks.seconds))
    add(_family("drover_tick_end_seconds", "gauge", "end of the newest bucket judged", ticks.newest_end_ms / 1000))
    add(_family("drover_engine_failures_total", "counter", "ticks that failed", ticks.failures))
    add(_family("drover_store_failures_total", "counter", "store calls that failed", ticks.store_failures))
    add(_family("drover_store_bytes", "gauge", "size of the store", totals.bytes_on_disk))
    add(_family("drover_store_samples", "gauge", "samples in the store", totals.samples))
    add(_family("drover_outbox_pending", "gauge", "messages that wait", pipeline.outbox.pending, "webhook"))
    return "\n".join(lines) + "\n"


def _family(name: str, kind: str, help_: str, value: float | Mapping[str, float], label: str = "") -> Iterator[str]:
    yield f"# HELP {name} {help_}"
    yield f"# TYPE {name} {kind}"
    if isinstance(value, Mapping):
        for key, item in sorted(value.items()):
            escaped = key.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
            yield f'{name}{{{label}="{escaped}"}} {item:.15g}'
    else:
        yield f"{name} {value:.15g}"


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
            try:
                page = exposition(facts).encode()
            except StoreError as error:
                log.warning("metrics: %s", error)
                self.send_error(503, "the store cannot answer")
                return
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

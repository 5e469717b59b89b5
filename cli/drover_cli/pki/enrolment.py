"""The service by which nodes get certificates of their own keys: `drover certs serve`, where the authority lies.

    GET  /v1/ca        ca.pem; who asks compares it with the fingerprint that came with its token
    POST /v1/enrol     {"node", "token", "csr"} -> {"certificate", "ca"}; no client certificate
    POST /v1/renew     {"csr"} -> the same; the certificate in force says whose it is

Of a request for a certificate (PKCS #10) only the key counts: names are the token's or the present certificate's.
TLS 1.3 alone. Anyone who can reach it may send anything: sizes, times and connections are bounded, and an address whose
tokens are refused waits. The answer does not say why a token is refused; the log does.
"""

from __future__ import annotations

import json
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from drover_cli.errors import CliError
from drover_cli.pki import authority as certs
from drover_cli.pki.tokens import TokenError, take
from drover_core.x509 import CertificateError, parse

log = logging.getLogger(__name__)

REQUEST_S = 10.0  # a request as a whole, handshake and all
MOST_BYTES = 16_384
MOST_CONNECTIONS = 64
REFUSALS, REFUSALS_S = 5, 600.0  # of one address: after so many it waits until the first is so old
MOST_ADDRESSES = 10_000
PREFIX = f"{certs.SCHEME}agent/"


@dataclass(frozen=True, slots=True)
class Reply:
    status: int
    body: dict[str, str]


class Refusals:
    """Of addresses. Bounded: when too many come, those refused longest ago are forgotten."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._times: dict[str, list[float]] = {}
        self._lock = threading.Lock()

    def wait_s(self, address: str) -> float:
        """How long this address has to wait; 0: it may ask."""
        with self._lock:
            times = self._times.get(address, [])
            return max(0.0, times[0] + REFUSALS_S - self._now_s()) if len(times) >= REFUSALS else 0.0

    def add(self, address: str) -> None:
        with self._lock:
            times = [*self._times.pop(address, []), self._now_s()]
            self._times[address] = [each for each in times if each > times[-1] - REFUSALS_S][-REFUSALS:]
            if len(self._times) > MOST_ADDRESSES:
                del self._times[next(iter(self._times))]


class EnrolmentService:
    """What is answered. Used from several threads; one signs at a time."""

    def __init__(self, folder: Path, days: int, refusals: Refusals | None = None) -> None:
        """
        Raises:
            CliError: no authority is there.
        """
        certs.Authority(folder).check_time()
        self._folder, self._days = folder, days
        self._refusals = refusals or Refusals()
        self._lock = threading.Lock()

    def ca(self) -> bytes:
        return (self._folder / "ca.pem").read_bytes()

    def enrol(self, address: str, body: bytes) -> Reply:
        wait_s = self._refusals.wait_s(address)
        if wait_s:
            return Reply(429, {"error": f"too many refusals; come again in {wait_s:.0f} s"})
        try:
            node, token, csr = _texts(body, "node", "token", "csr")
            certs.check_name("agent", node)
            key = _key(csr)
        except (ValueError, CliError) as error:
            return self._refuse(address, 400, str(error), str(error))
        try:
            take(self._folder, token, node)
        except TokenError as error:
            text = "the token is refused: unknown, used, ended or for another node; make one with `drover certs token`"
            return self._refuse(address, 403, text, str(error))
        return self._issue(address, node, key)

    def renew(self, address: str, der: bytes, body: bytes) -> Reply:
        """`der`: the certificate of the connection, which TLS has checked; empty without one."""
        try:
            present = parse(der)
        except CertificateError:
            present = None
        # Nobody guesses with a certificate of the authority: its own refusals count, not those of its address, behind
        # which the nodes of a whole NAT may be.
        whose = address if present is None else f"serial {present.serial:X}"
        wait_s = self._refusals.wait_s(whose)
        if wait_s:
            return Reply(429, {"error": f"too many refusals; come again in {wait_s:.0f} s"})
        if present is None:
            return self._refuse(whose, 403, "renewal needs the certificate in force", "no certificate")
        if len(present.uris) != 1 or not present.uris[0].startswith(PREFIX):
            text = "only agents renew here"
            return self._refuse(whose, 403, text, f"{text}: {', '.join(present.uris) or 'no name'}")
        node = unquote(present.uris[0].removeprefix(PREFIX))
        if f"{present.serial:X}" in certs.denied(self._folder / "denied.txt"):
            text = "the certificate is revoked; make a token with `drover certs token`"
            return self._refuse(whose, 403, text, f"{node}: serial {present.serial:X} is revoked")
        again = present.begins_s + (present.ends_s - present.begins_s) / 3
        if time.time() < again:
            when = datetime.fromtimestamp(again, UTC).isoformat(timespec="seconds")
            return self._refuse(whose, 409, f"the certificate is new; it is renewed from {when} on", f"{node}: new")
        try:
            (csr,) = _texts(body, "csr")
            key = _key(csr)
        except ValueError as error:
            return self._refuse(whose, 400, str(error), f"{node}: {error}")
        return self._issue(address, node, key)

    def _issue(self, address: str, node: str, key: ec.EllipticCurvePublicKey) -> Reply:
        with self._lock:
            authority = certs.Authority(self._folder)  # read again: its certificate may have been renewed
            authority.check_time()
            pem, line = authority.sign("agent", node, key, days=self._days)
            certs.register(self._folder, [line])
        log.info("%s from %s: serial %s, until %s", node, address, line.serial, line.ends)
        return Reply(200, {"certificate": pem.decode(), "ca": self.ca().decode()})

    def _refuse(self, whose: str, status: int, text: str, why: str) -> Reply:
        """`whose`: the address or certificate for which it counts."""
        self._refusals.add(whose)
        log.warning("refused %s: %r", whose, why)  # !r: who is refused chose some of it
        return Reply(status, {"error": text})


def _texts(body: bytes, *names: str) -> list[str]:
    try:
        found = json.loads(body)
        texts = [found[name] for name in names]
    except (ValueError, TypeError, KeyError):
        texts = []
    if not texts or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"this takes JSON with {', '.join(names)}")
    return texts


def _key(csr: str) -> ec.EllipticCurvePublicKey:
    """
    Raises:
        ValueError: no request of who has the key, or a key of another kind than ours.
    """
    try:
        request = x509.load_pem_x509_csr(csr.encode())
        key, signed = request.public_key(), request.is_signature_valid
    except Exception as error:  # of hostile bytes the library may raise anything
        raise ValueError("csr holds no request for a certificate in PEM form") from error
    if not signed:
        raise ValueError("csr is not signed with its own key")
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise ValueError("csr: the key must be EC P-256")
    return key


class EnrolmentServer(ThreadingHTTPServer):
    """Serves from threads of its own; `serve_forever` blocks."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(
        self, address: tuple[str, int], desk: EnrolmentService, cert: Path, key: Path, *, request_s: float = REQUEST_S
    ):
        """
        Raises:
            OSError: the address cannot be listened on, or a file not be read.
        """
        self._places = threading.BoundedSemaphore(MOST_CONNECTIONS)
        self._cert, self._key, self._request_s = cert, key, request_s
        self._ca = desk.ca
        self._context()  # now, and not at the first request
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        super().__init__(address, _handler(desk))

    def _context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_OPTIONAL  # a node that enrols has none yet
        context.load_cert_chain(self._cert, self._key)
        context.load_verify_locations(cadata=self._ca().decode())
        return context

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._places.acquire(blocking=False):
            log.warning("refused %s: %d connections are open", client_address[0], MOST_CONNECTIONS)
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no thread more
            self._places.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        secured: ssl.SSLSocket | None = None
        end: threading.Timer | None = None
        try:
            request.settimeout(self._request_s)
            context = self._context()  # read again: files may have been renewed
            secured = context.wrap_socket(request, server_side=True, do_handshake_on_connect=False)
            # Each read has its own timeout, and a peer that sends a byte now and then would have for ever.
            end = threading.Timer(self._request_s, _cut, [secured])
            end.daemon = True
            end.start()
            secured.do_handshake()
            self.finish_request(secured, client_address)
        except OSError as error:
            log.info("%s: %s", client_address[0], error)
        except Exception:  # a defect of Drover must not end the service
            log.exception("a request of %s", client_address[0])
        finally:
            if end is not None:
                end.cancel()
            self.shutdown_request(request if secured is None else secured)
            self._places.release()


def _cut(connection: ssl.SSLSocket) -> None:
    try:
        socket.socket.shutdown(connection, socket.SHUT_RDWR)  # not TLS's: its thread is in the midst of a read
    except OSError:
        return  # it has gone by itself


def _handler(desk: EnrolmentService) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        server_version, sys_version = "drover", ""

        def do_GET(self) -> None:
            if self.path != "/v1/ca":
                self.send_error(404)
                return
            self._send(200, desk.ca(), "application/x-pem-file")

        def do_POST(self) -> None:
            length = self.headers.get("content-length", "")
            if not length.isascii() or not length.isdigit() or len(length) > 8 or int(length) > MOST_BYTES:
                self.send_error(413)
                return
            body = self.rfile.read(int(length))
            address = str(self.client_address[0])
            try:
                if self.path == "/v1/enrol":
                    reply = desk.enrol(address, body)
                elif self.path == "/v1/renew" and isinstance(self.connection, ssl.SSLSocket):
                    reply = desk.renew(address, self.connection.getpeercert(True) or b"", body)
                else:
                    reply = Reply(404, {"error": "no such page"})
            except (CliError, OSError) as error:
                log.error("%s", error)
                reply = Reply(500, {"error": "the authority cannot issue now; its log says why"})
            self._send(reply.status, json.dumps(reply.body).encode(), "application/json")

        def _send(self, status: int, body: bytes, kind: str) -> None:
            self.send_response(status)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            log.debug(format, *args)

    return Handler

"""Serve REST on a listener of its own, with the bounds of the metrics page's server: connections, their time, readers.

Each request has a thread. It asks the Fleet API's worker threads, as gRPC does, so REST computes at most as much at a
time as gRPC, and holds nothing that ingest waits for. A request is answered and its connection closed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import socket
import ssl
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any
from urllib.parse import SplitResult, urlsplit

from drover_collector.api.methods import METHODS
from drover_collector.api.service import FleetApi
from drover_collector.api.snapshot import ApiSnapshot, RefusalError
from drover_collector.auth.authorization import PAGE
from drover_collector.auth.identity import Identity, Role, peer_of
from drover_collector.auth.tls import Contexts
from drover_collector.observability.metrics_server import REQUEST_S, BoundedHandler, BoundedServer, takes_gzip, tls_of
from drover_collector.rest import otlp, requests, routes
from drover_collector.rest.annotations import annotated
from drover_collector.rest.answers import gzipped, page_of, plain
from drover_collector.rest.idempotency import Acts
from drover_collector.rest.incident_stream import Wanted, last_id, stream
from drover_collector.rest.openapi import document
from drover_collector.rest.problems import CONTENT_TYPE, ProblemError, of_error, of_failed_act
from drover_collector.rest.routes import Route
from drover_collector.scrape.otlp_in import Answer, Form
from drover_collector.scrape.remote_write import MAX_BODY
from drover_collector.store import StoreError

Given = dict[str, list[str]]  # parameters of a query

log = logging.getLogger(__name__)

BODY_BYTES = 65_536  # as a request by gRPC
CALLS_EACH = 8  # of one certificate at a time
STREAMS_MOST, STREAMS_EACH = 16, 4
WRITES_MOST, WRITES_EACH = 16, 8  # requests of remote_write and OTLP, of 4 MiB at most
READ_S = 8.0  # of what no method of the table reads
STREAM_S = 3600.0  # then a client begins again behind its last event
JSON_TYPE = "application/json"
LOCAL = frozenset({"localhost", "127.0.0.1", "::1"})


class RestServer:
    """Serves from threads of its own until `close`."""

    def __init__(
        self,
        api: FleetApi,
        facts: ApiSnapshot,
        address: tuple[str, int],
        tls: Contexts | None = None,
        most: int = 64,
    ) -> None:
        """
        Args:
            address: host and port.
            most: connections at once, each with a thread.
        Raises:
            OSError: the address cannot be listened on.
        """
        self._site = _Site(api, facts)
        self._server = BoundedServer(address, type("Handler", (_Handler,), {"site": self._site}), tls, most)
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, name="rest", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._site.closing.set()
        self._server.shutdown()
        self._server.server_close()


class _Site:
    """What all requests share."""

    def __init__(self, api: FleetApi, facts: ApiSnapshot) -> None:
        self.api, self.facts = api, facts
        self.acts = Acts()
        self.closing = threading.Event()
        self.document = json.dumps(document(), separators=(",", ":")).encode()
        self._lock = threading.Lock()
        self._under_way: Counter[tuple[str, str]] = Counter()  # by kind and caller

    @contextlib.contextmanager
    def turn(self, kind: str, caller: Identity | None, each: int, most: int) -> Iterator[None]:
        """Count a request of this caller as under way.

        Raises:
            Problem: there are too many.
        """
        key = kind, str(caller)
        with self._lock:
            if self._under_way[key] >= each or sum(n for (of, _), n in self._under_way.items() if of == kind) >= most:
                raise ProblemError(
                    429, "resource-exhausted", f"too many {kind} are under way ({each} for each certificate, {most} in"
                    " all); try again when some have ended", {"retry-after": "2"},
                )  # fmt: skip
            self._under_way[key] += 1
        try:
            yield
        finally:
            with self._lock:
                self._under_way[key] -= 1
                self._under_way += Counter()  # without those of 0


class _Handler(BoundedHandler):
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "drover", ""
    site: _Site
    server: BoundedServer

    def do_GET(self) -> None:  # noqa: N802  # http.server's name
        self.close_connection = True
        try:
            self._answer()
        except (ConnectionError, TimeoutError, ssl.SSLError):
            raise  # the reader has left, or is too slow
        except Exception as error:  # noqa: BLE001  # each kind of error has its answer
            self._send_problem(of_error(error))

    def _answer(self) -> None:
        parts = self._target()
        if parts.path == routes.WRITES and self.site.facts.parts.take_write is not None:
            return self._take_write(self.site.facts.parts.take_write)
        if parts.path == routes.OTLP and self.site.facts.parts.take_otlp is not None:
            return self._take_otlp(self.site.facts.parts.take_otlp)
        body = self._body()
        self._check_host()
        if parts.path in (routes.STREAM, routes.ANNOTATIONS, routes.DOCUMENT):
            self._check_verb(["GET"])
            self._authorize(PAGE)
            return self._serve_own(parts.path, requests.parameters(parts.query))
        found = routes.find(parts.path)
        if not found:
            raise ProblemError(
                404, "not-found", f"there is nothing at {parts.path[:200]}; {routes.DOCUMENT} says what there is"
            )
        verb = self._check_verb([route.verb for route, _ in found])
        ((route, path),) = [each for each in found if each[0].verb == verb]
        caller = self._authorize(frozenset(map(Role, route.method.roles)))
        with self.site.turn("requests", caller, CALLS_EACH, 1000):
            if route.acts:
                return self._act(route, path, body, caller)
            return self._read(route, path, requests.parameters(parts.query), caller)

    # ---- checks

    def _target(self) -> SplitResult:
        try:
            return urlsplit("http://x" + self.path if self.path.startswith("/") else self.path)
        except ValueError as error:
            raise ProblemError(400, "invalid-argument", f"the address is none: {error}") from None

    def _take_write(self, take: Callable[[bytes], tuple[int, str]]) -> None:
        """Take a request of remote_write 1.0. Who may send is asked before the body is read."""
        self._check_host()
        self._check_verb(["POST"])
        caller = self._authorize(frozenset({Role.WRITER}))
        kind = self.headers.get("content-type", "").replace(" ", "").lower()
        if kind not in ("application/x-protobuf", "application/x-protobuf;proto=prometheus.writerequest"):
            raise ProblemError(415, "unsupported-media-type", "send remote_write 1.0: application/x-protobuf")
        if self.headers.get("content-encoding", "").strip().lower() != "snappy":
            raise ProblemError(415, "unsupported-media-type", "send Content-Encoding: snappy")
        try:
            with self.site.turn("writes", caller, WRITES_EACH, WRITES_MOST):
                status, text = take(self._body(MAX_BODY))
        except ProblemError as error:
            if error.status != 429:
                raise
            status, text = 503, error.detail  # Prometheus drops what was answered with 429, unless it is set otherwise
        if status == 204:
            return self._begin(204, {})
        again = {"retry-after": "5"} if status == 503 else {}
        raise ProblemError(status, "unavailable" if again else "invalid-argument", text, again)

    def _take_otlp(self, take: Callable[[Form, bytes], Answer]) -> None:
        """Take a request of OTLP/HTTP. Who may send is asked before the body is read."""
        self._check_verb(["POST"])
        form = otlp.form_of(self.headers.get("content-type", ""), self.headers.get("content-encoding", ""))
        if isinstance(form, str):
            raise ProblemError(415, "unsupported-media-type", form)
        headers = {"content-type": otlp.content_type(form)}
        try:
            self._check_host()
            caller = self._authorize(frozenset({Role.WRITER}))
            with self.site.turn("writes", caller, WRITES_EACH, WRITES_MOST):
                answer = take(form, self._body(MAX_BODY))
        except ProblemError as error:
            return self._write(error.status, otlp.failed(form, error.detail), {**error.headers, **headers})
        if answer.status == 200:
            return self._write(200, otlp.taken(form, answer), headers)
        if answer.status == 503:
            headers["retry-after"] = "5"
        return self._write(answer.status, otlp.failed(form, answer.text), headers)

    def _body(self, most: int = BODY_BYTES) -> bytes:
        if "transfer-encoding" in self.headers:
            raise ProblemError(411, "length-required", "send the body with Content-Length")
        for name in ("content-length", "content-type", "host", "idempotency-key"):
            if len(self.headers.get_all(name, [])) > 1:  # a proxy may read the other
                raise ProblemError(400, "invalid-argument", f"the header {name} came twice; send it once")
        text = self.headers.get("content-length", "0")
        if not (text.isascii() and text.isdigit() and len(text) < 10):
            raise ProblemError(400, "invalid-argument", "Content-Length is not a number of bytes")
        if int(text) > most:
            raise ProblemError(413, "too-large", f"the body has more than {most} bytes; send less")
        body = self.rfile.read(int(text))
        if len(body) < int(text):
            raise ProblemError(400, "invalid-argument", f"the body ended after {len(body)} of {text} bytes")
        return body

    def _check_host(self) -> None:
        """Without TLS and on loopback a page of a browser may reach this by a name of its own: refuse such names."""
        if isinstance(self.connection, ssl.SSLSocket):
            return
        try:
            host = urlsplit("//" + self.headers.get("host", "localhost")).hostname
        except ValueError:
            host = None
        if host not in LOCAL:
            raise ProblemError(403, "permission-denied", "without TLS this answers to localhost and 127.0.0.1 alone")

    def _check_verb(self, verbs: list[str]) -> str:
        verb = "GET" if self.command == "HEAD" else self.command
        if verb not in verbs:
            allowed = ", ".join(sorted(verbs))
            raise ProblemError(405, "method-not-allowed", f"use {allowed} here", {"allow": allowed})
        return verb

    def _authorize(self, allowed: frozenset[Role]) -> Identity | None:
        if not isinstance(self.connection, ssl.SSLSocket):
            return None
        context = tls_of(self.connection)
        if why := self.site.facts.gate.refusal_of(context, allowed):
            raise ProblemError(403, "permission-denied", why)
        peer = peer_of(context)
        return None if peer is None else peer.identity

    # ---- answers

    def _read(
        self, route: Route, path: Mapping[str, str], given: dict[str, list[str]], caller: Identity | None
    ) -> None:
        paging = route.paging
        if paging is None:
            message = requests.from_query(route, given, path)
            return self._send(plain(self._wait(route, self._submit(route, message, caller))))
        size = requests.page_size(given)
        cursor = requests.one(given, "cursor")
        begin = requests.Cursor.parse(cursor, paging.most) if cursor else None
        message = requests.from_query(route, given, path)
        if "limit" in message.DESCRIPTOR.fields_by_name:
            place = 0 if begin is None else begin.place
            setattr(message, "limit", paging.most if paging.whole else min(place + size + 1, paging.most))  # noqa: B010  # each such message has one
        reply = plain(self._wait(route, self._submit(route, message, caller)))
        found = page_of(paging, reply, begin, size)
        limit = getattr(message, "limit", paging.most)
        if found["next_cursor"] is None and limit < paging.most and len(reply[paging.items]) >= limit:
            # What is new in front since the page before has used up what was asked for beyond this page.
            setattr(message, "limit", paging.most)  # noqa: B010  # as above
            found = page_of(paging, plain(self._wait(route, self._submit(route, message, caller))), begin, size)
        return self._send(found)

    def _act(self, route: Route, path: Mapping[str, str], body: bytes, caller: Identity | None) -> None:
        kind = self.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != JSON_TYPE:  # a page of a browser cannot send this without asking first
            raise ProblemError(415, "unsupported-media-type", f"send Content-Type: {JSON_TYPE}")
        message = requests.from_body(route, body, path)
        asked = hashlib.sha256(f"{route.operation} ".encode() + message.SerializeToString(deterministic=True)).digest()
        key = self.headers.get("idempotency-key", "")
        future, again = self.site.acts.once(str(caller), key, asked, lambda: self._submit(route, message, caller))
        try:
            reply = self._wait(route, future, cancel=False)
        except ProblemError as error:
            raise (of_failed_act(error) if again and future.done() else error) from None
        answer = plain(reply)
        self._send(answer, {"idempotency-replayed": "true"} if again else {})

    def _submit(self, route: Route, message: Any, caller: Identity | None) -> Future[Any]:
        try:
            return self.site.api.submit(METHODS[route.method.name], message, caller)
        except RuntimeError:
            raise ProblemError(
                503, "unavailable", "the collector stops; ask again in a minute", {"retry-after": "60"}
            ) from None

    def _wait(self, route: Route, future: Future[Any], cancel: bool = True) -> Any:
        """Return the reply. An act that takes longer goes on, and its key leads to its end."""
        limit_s = route.method.limit_s
        self.server.give_longer(self.connection, limit_s + REQUEST_S)
        try:
            return future.result(limit_s)
        except Exception as error:  # noqa: BLE001  # also a TimeoutError, which is the method's and not the connection's
            if isinstance(error, FutureTimeout) and not future.done() and not cancel:
                raise ProblemError(
                    504, "deadline-exceeded", "the act goes on; repeat the request with the same Idempotency-Key to"
                    " learn its end",
                ) from None  # fmt: skip
            future.cancel()
            raise of_error(error) from None

    def _serve_own(self, path: str, given: dict[str, list[str]]) -> None:
        if path == routes.DOCUMENT:
            return self._send_bytes(self.site.document, {"content-type": JSON_TYPE})
        names = ("min_severity", "node", "kind")
        words: dict[str, Any] = {name: requests.one(given, name) for name in names}
        times = {} if path == routes.STREAM else {name: requests.time_of(given, name) for name in ("from", "to")}
        if given:
            raise ProblemError(
                400, "invalid-argument", f"there are {', '.join([*names, *times])}; nothing else is known here"
            )
        facts = self.site.facts
        if path == routes.ANNOTATIONS:
            wanted = Wanted(**words)
            wanted.check(facts)
            to_ms = times["to"] or facts.now_ms()
            limits = self.site.turn("requests", self._authorize(PAGE), CALLS_EACH, 1000), facts.store.limited(READ_S)
            with limits[0], limits[1]:
                found = annotated(facts, wanted, times["from"] or to_ms - 86_400_000, to_ms)
            return self._send(found)
        wanted = Wanted(**words, after_ms=last_id(self.headers.get("last-event-id", "")))
        wanted.check(facts)
        return self._stream(wanted)

    def _stream(self, wanted: Wanted) -> None:
        caller = self._authorize(PAGE)
        with self.site.turn("streams", caller, STREAMS_EACH, STREAMS_MOST):
            self.server.give_longer(self.connection, STREAM_S)
            self._begin(200, {"content-type": "text/event-stream", "cache-control": "no-store", "connection": "close"})
            if self.command == "HEAD":
                return
            try:
                for piece in stream(self.site.facts, wanted, self._stopped):
                    self.wfile.write(piece)
            except (ConnectionError, TimeoutError, ssl.SSLError):
                raise  # the reader has left, or is too slow
            except (StoreError, RefusalError, ProblemError) as error:
                log.warning("a stream of incidents ends: %s", error)  # its reader begins again behind its last event
            except Exception:
                log.exception("a stream of incidents failed")  # no other answer may follow in the midst of it

    def _stopped(self, seconds: float) -> bool:
        """Wait. Return True when the collector stops, the peer's certificate has ended, or the peer has left."""
        if self.site.closing.wait(seconds):
            return True
        self._authorize(PAGE)
        return self._has_left()

    def _has_left(self) -> bool:
        if isinstance(self.connection, ssl.SSLSocket):
            return False  # the next write finds it
        self.connection.setblocking(False)
        try:
            return bool(self.connection.recv(1, socket.MSG_PEEK) == b"")
        except BlockingIOError:
            return False
        finally:
            self.connection.settimeout(self.timeout)

    # ---- sending

    def _send(self, value: Any, headers: Mapping[str, str] | None = None) -> None:
        text = json.dumps(value, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
        self._send_bytes(text.encode("utf-8", "backslashreplace"), {"content-type": JSON_TYPE, **(headers or {})})

    def _send_bytes(self, body: bytes, headers: Mapping[str, str]) -> None:
        tag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
        common = {"cache-control": "no-cache, private", "vary": "accept-encoding"}
        if self.command in ("GET", "HEAD"):
            common["etag"] = tag
            if _matches(self.headers.get("if-none-match", ""), tag):
                self._begin(304, common)
                return
        if len(body) > 1400 and takes_gzip(self.headers.get_all("accept-encoding", [])):
            body, common["content-encoding"] = gzipped(body), "gzip"
            common["etag"] = f"W/{tag}"
        self._write(200, body, {**common, **headers})

    def _send_problem(self, problem: ProblemError) -> None:
        if problem.status >= 500:
            log.debug("%s %s: %s", self.command, self.path, problem.detail)
        self._write(problem.status, problem.body(), {"content-type": CONTENT_TYPE, **problem.headers})

    def _write(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        self._begin(status, {**headers, "content-length": str(len(body))})
        if self.command != "HEAD":
            self.wfile.write(body)

    def _begin(self, status: int, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in {"connection": "close", "x-content-type-options": "nosniff", **headers}.items():
            self.send_header(name, value)
        self.end_headers()

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer what http.server itself refuses: what is not HTTP, and verbs that do not exist."""
        self.close_connection = True
        status = {501: 405, 505: 400}.get(code, code)
        allow = {"allow": "GET, HEAD, POST"} if status == 405 else {}
        self.requestline = getattr(self, "requestline", "")
        self.request_version = "HTTP/1.1"
        self.command = self.command or "GET"
        detail = f"{message or explain or 'this is no request of HTTP/1.1'}; see {routes.DOCUMENT}"
        self._send_problem(ProblemError(status, "bad-request", detail, allow))

    def log_message(self, format: str, *args: object) -> None:
        log.debug(format, *args)


for _verb in ("HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"):
    setattr(_Handler, f"do_{_verb}", _Handler.do_GET)


def _matches(given: str, tag: str) -> bool:
    """Whether If-None-Match (RFC 9110, 13.1.2, by weak comparison) names the tag."""
    return given.strip() == "*" or tag in [each.strip().removeprefix("W/") for each in given.split(",")]

"""Send requests, and repeat those that may be: reads; and acts that the collector has not received or has put off.

An act whose connection broke may have been done: a collector that has restarted since does not know its key any more.
"""

from __future__ import annotations

import asyncio
import ssl
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

import httpx

from drover_client.errors import OUTCOME_UNKNOWN, DroverError, answer_of, of_act, of_response, of_transport
from drover_client.stream import Parser, StreamEvent

TRIES = 4
AGAIN = frozenset({0, 429, 503})  # no answer, too many requests, not now
PAUSE_S = 1.0
PAUSE_MOST_S = 30.0
STREAM = "/api/v1/incidents/stream"
STREAM_SILENT_S = 60.0  # the server sends something every 15 s

Params = Mapping[str, Any]


def tls(ca: str | None, cert: str | None, key: str | None) -> ssl.SSLContext | bool:
    """Return the context of a certificate of Drover's own authority; True: the system's authorities."""
    if ca is None and cert is None:
        return True
    context = ssl.create_default_context(cafile=ca)
    if cert is not None:
        context.load_cert_chain(cert, key)
    return context


def query(params: Params) -> httpx.QueryParams:
    """Return parameters as text. None is left out."""
    found: list[tuple[str, str | int | float | bool | None]] = []
    for name, value in params.items():
        for each in value if isinstance(value, list | tuple) else [value]:
            if each is not None:
                found.append((name, _text(each)))
    return httpx.QueryParams(found)


def body(params: Params) -> dict[str, Any]:
    return {name: _text(value) if isinstance(value, datetime) else value for name, value in params.items()
            if value is not None}  # fmt: skip


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, datetime):
        if value.tzinfo is None:
            raise ValueError(f"{value} has no zone: give datetime.now(UTC) or the like")
        return value.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return str(value)


def pause_s(error: DroverError, attempt: int) -> float | None:
    """Return how long to wait before the next try; None: do not try again."""
    if error.status not in AGAIN or error.code == OUTCOME_UNKNOWN or attempt + 1 >= TRIES:
        return None
    return min(error.retry_after_s if error.retry_after_s is not None else PAUSE_S * 2**attempt, PAUSE_MOST_S)


def _act_headers(idempotency_key: str | None) -> dict[str, str]:
    return {"idempotency-key": idempotency_key or str(uuid.uuid4())}


def _of_request(error: httpx.TransportError, more: Mapping[str, Any]) -> DroverError:
    key = more.get("headers", {}).get("idempotency-key")
    return of_transport(error) if key is None else of_act(error, key)


class Transport:
    """Blocking requests to one collector. Close it, or use it in `with`."""

    def __init__(
        self, url: str, *, ca: str | None = None, cert: str | None = None, key: str | None = None,
        timeout_s: float = 60.0,
    ) -> None:  # fmt: skip
        """
        Args:
            url: of rest.listen, such as https://collector1:7304. ca, cert, key: PEM files, as `drover certs` makes.
        """
        self._http = httpx.Client(base_url=url, verify=tls(ca, cert, key), timeout=timeout_s)

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def _get(self, path: str, params: Params) -> Any:
        return self._send("GET", path, {"params": query(params)})

    def _post(self, path: str, params: Params, idempotency_key: str | None) -> Any:
        return self._send("POST", path, {"json": body(params), "headers": _act_headers(idempotency_key)})

    def _send(self, verb: str, path: str, more: Mapping[str, Any]) -> Any:
        attempt = 0
        while True:
            try:
                response = self._http.request(verb, path, **more)
                if response.is_success:
                    return answer_of(response)
                error = of_response(response)
            except httpx.TransportError as failed:
                error = _of_request(failed, more)
            wait_s = pause_s(error, attempt)
            if wait_s is None:
                raise error
            time.sleep(wait_s)
            attempt += 1

    def _pages(self, path: str, params: Params, items: str) -> Iterator[Any]:
        cursor = None
        while True:
            page = self._get(path, {**params, "cursor": cursor})
            yield from page[items]
            cursor = page["next_cursor"]
            if cursor is None:
                return

    def stream_incidents(
        self, *, min_severity: str | None = None, node: str | None = None, kind: str | None = None,
        last_event_id: str = "",
    ) -> Iterator[StreamEvent]:  # fmt: skip
        """Yield incidents as they change, without end. A stream that breaks is begun again behind its last event.

        An incident may come twice: its `id` and `version` identify what was seen.

        Raises:
            DroverError: refused, or not reached in TRIES tries.
        """
        parser, attempt = Parser(last_event_id), 0
        params = query({"min_severity": min_severity, "node": node, "kind": kind})
        while True:
            try:
                headers = {"last-event-id": parser.last_id} if parser.last_id else {}
                parser = Parser(parser.last_id)
                with self._http.stream("GET", STREAM, params=params, headers=headers, timeout=STREAM_SILENT_S) as got:
                    if not got.is_success:
                        got.read()
                        raise of_response(got)
                    for line in got.iter_lines():
                        attempt = 0
                        if (event := parser.line(line)) is not None:
                            yield event
                error = DroverError(0, "ended", "the stream ended")
            except httpx.TransportError as failed:
                error = of_transport(failed)
            except DroverError as refused:
                error = refused
            wait_s = pause_s(error, attempt)
            if wait_s is None:
                raise error
            time.sleep(wait_s)
            attempt += 1


class AsyncTransport:
    """The same for asyncio."""

    def __init__(
        self, url: str, *, ca: str | None = None, cert: str | None = None, key: str | None = None,
        timeout_s: float = 60.0,
    ) -> None:  # fmt: skip
        """
        Args:
            url: of rest.listen, such as https://collector1:7304. ca, cert, key: PEM files, as `drover certs` makes.
        """
        self._http = httpx.AsyncClient(base_url=url, verify=tls(ca, cert, key), timeout=timeout_s)

    async def __aenter__(self) -> Any:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    async def _get(self, path: str, params: Params) -> Any:
        return await self._send("GET", path, {"params": query(params)})

    async def _post(self, path: str, params: Params, idempotency_key: str | None) -> Any:
        return await self._send("POST", path, {"json": body(params), "headers": _act_headers(idempotency_key)})

    async def _send(self, verb: str, path: str, more: Mapping[str, Any]) -> Any:
        attempt = 0
        while True:
            try:
                response = await self._http.request(verb, path, **more)
                if response.is_success:
                    return answer_of(response)
                error = of_response(response)
            except httpx.TransportError as failed:
                error = _of_request(failed, more)
            wait_s = pause_s(error, attempt)
            if wait_s is None:
                raise error
            await asyncio.sleep(wait_s)
            attempt += 1

    async def _pages(self, path: str, params: Params, items: str) -> AsyncIterator[Any]:
        cursor = None
        while True:
            page = await self._get(path, {**params, "cursor": cursor})
            for each in page[items]:
                yield each
            cursor = page["next_cursor"]
            if cursor is None:
                return

    async def stream_incidents(
        self, *, min_severity: str | None = None, node: str | None = None, kind: str | None = None,
        last_event_id: str = "",
    ) -> AsyncIterator[StreamEvent]:  # fmt: skip
        """As `Drover.stream_incidents`."""
        parser, attempt = Parser(last_event_id), 0
        params = query({"min_severity": min_severity, "node": node, "kind": kind})
        while True:
            try:
                headers = {"last-event-id": parser.last_id} if parser.last_id else {}
                parser = Parser(parser.last_id)
                asked = self._http.stream("GET", STREAM, params=params, headers=headers, timeout=STREAM_SILENT_S)
                async with asked as got:
                    if not got.is_success:
                        await got.aread()
                        raise of_response(got)
                    async for line in got.aiter_lines():
                        attempt = 0
                        if (event := parser.line(line)) is not None:
                            yield event
                error = DroverError(0, "ended", "the stream ended")
            except httpx.TransportError as failed:
                error = of_transport(failed)
            except DroverError as refused:
                error = refused
            wait_s = pause_s(error, attempt)
            if wait_s is None:
                raise error
            await asyncio.sleep(wait_s)
            attempt += 1

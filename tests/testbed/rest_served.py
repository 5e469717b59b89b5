"""REST over a small real store: the fleet of `fleet_served`, from a loop of its own."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from drover_collector.api.service import FleetApi
from drover_collector.rest.server import RestServer
from drover_collector.store import Store
from testbed.fleet_served import Served, served


@dataclass
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Rest:
    server: RestServer
    api: FleetApi
    parts: Served
    key: int = field(default=0)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.port}"

    def ask(self, verb: str, path: str, headers: Mapping[str, str] | None = None, body: bytes | None = None) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=120)
        with contextlib.closing(connection):
            connection.request(verb, path, body, dict(headers or {}))
            response = connection.getresponse()
            return Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())

    def get(self, path: str, **headers: str) -> Answer:
        return self.ask("GET", f"/api/v1{path}", {key.replace("_", "-"): value for key, value in headers.items()})

    def post(self, path: str, body: Mapping[str, Any], key: str | None = None) -> Answer:
        self.key += 1
        headers = {"content-type": "application/json", "idempotency-key": key or f"key {self.key}"}
        return self.ask("POST", f"/api/v1{path}", headers, json.dumps(body).encode())


@contextlib.contextmanager
def rest_served(store_url: str) -> Iterator[Rest]:
    """Serve until the block ends."""
    store = Store.open(store_url)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    stack = contextlib.AsyncExitStack()
    try:
        parts = asyncio.run_coroutine_threadsafe(stack.enter_async_context(served(store)), loop).result()
        parts.pipeline.leading = True
        api = FleetApi(parts.facts)
        server = RestServer(api, parts.facts, ("127.0.0.1", 0))
        yield Rest(server, api, parts)
        server.close()
        api.close()
    finally:
        asyncio.run_coroutine_threadsafe(stack.aclose(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
        store.close()

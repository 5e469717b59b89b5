"""An open Fleet page without a browser: what Chromium asks of the console's server, and no drawing.

Ten browsers do not fit on two cores next to a collector of 100,000 GPUs, and what the collector pays does not depend on
who draws. This speaks Streamlit's own websocket protocol, as its front end does (streamlit 1.67, static/js/index.*.js:
`handleAutoRerun`, `ForwardMessageCache`): one full run, then each fragment again at the interval that the server gave
it, with the hashes of what is kept; and it polls the picture as assets/fleet.js does, 5 s after the last answer.
bench_console_fleet.py holds its questions against a Chromium's.
"""

from __future__ import annotations

import asyncio
import http.client
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from urllib.parse import parse_qs, urlencode, urlsplit

from streamlit.proto.BackMsg_pb2 import BackMsg
from streamlit.proto.ForwardMsg_pb2 import ForwardMsg
from websockets.asyncio.client import ClientConnection, connect
from websockets.typing import Origin, Subprotocol

PICTURE_S = 5.0  # drover_dashboard/widgets/fleet_picture.py
AGAIN_S = 1.0  # assets/fleet.js: what is back must be seen to be back
OPENED_S = 120.0
FINISHED_EARLY = ForwardMsg.FINISHED_EARLY_FOR_RERUN


@dataclass
class Viewer:
    url: str  # of the Fleet page, with what it is coloured by
    reruns: Counter[str] = field(default_factory=Counter)  # by fragment; "": the whole script
    socket_bytes: int = 0
    http_bytes: int = 0
    messages: int = 0
    refused: int = 0  # pictures that the console could not give
    missed: int = 0  # references to what is not kept: the server thinks that a browser has it
    drawn: asyncio.Event = field(default_factory=asyncio.Event)  # a first run has ended, and a picture is there
    _kept: dict[str, tuple[int, str]] = field(default_factory=dict)  # hash -> run and fragment it came with
    _runs: int = 0
    _most_age: int = 0
    _page: str = ""
    _timers: dict[str, tuple[float, asyncio.Task[None]]] = field(default_factory=dict)

    async def look(self) -> None:
        """Until it is cancelled."""
        where = urlsplit(self.url)
        origin = f"{where.scheme}://{where.netloc}"
        try:
            async with (
                asyncio.TaskGroup() as both,
                connect(
                    f"ws://{where.netloc}/_stcore/stream", subprotocols=[Subprotocol("streamlit")],
                    origin=Origin(origin), max_size=None,
                ) as socket,
            ):  # fmt: skip
                both.create_task(self._poll(where.netloc, where.query))
                await self._ask(socket, "")
                async for raw in socket:
                    self._take(socket, raw)
        finally:
            for _, task in self._timers.values():
                task.cancel()

    async def _ask(self, socket: ClientConnection, fragment: str) -> None:
        message = BackMsg()
        asked = message.rerun_script
        asked.query_string, asked.page_script_hash = urlsplit(self.url).query, self._page
        asked.fragment_id, asked.is_auto_rerun = fragment, bool(fragment)
        asked.cached_message_hashes.extend(self._kept)
        asked.context_info.timezone, asked.context_info.locale = "UTC", "en-US"
        asked.context_info.url = self.url
        asked.widget_states.SetInParent()
        self.reruns[fragment] += 1
        await socket.send(message.SerializeToString())

    def _take(self, socket: ClientConnection, raw: str | bytes) -> None:
        message = ForwardMsg.FromString(raw if isinstance(raw, bytes) else raw.encode())
        self.messages += 1
        self.socket_bytes += len(raw)
        what = message.WhichOneof("type")
        if what == "ref_hash":
            self.missed += message.ref_hash not in self._kept
        elif message.metadata.cacheable and message.hash:
            self._kept.setdefault(message.hash, (self._runs, message.delta.fragment_id))
        if what == "new_session":
            self._page = message.new_session.page_script_hash
            self._most_age = message.new_session.config.max_cached_message_age
        elif what == "auto_rerun":
            self._repeat(socket, message.auto_rerun.fragment_id, message.auto_rerun.interval)
        elif what == "stop_auto_rerun":
            for fragment in message.stop_auto_rerun.fragment_ids:
                if fragment in self._timers:
                    self._timers.pop(fragment)[1].cancel()
        elif what == "script_finished" and message.script_finished != FINISHED_EARLY:
            self._forget(set(message.metadata.run.fragment_ids))

    def _repeat(self, socket: ClientConnection, fragment: str, every_s: float) -> None:
        known = self._timers.get(fragment)
        if known is not None:
            if known[0] == every_s:
                return
            known[1].cancel()
        self._timers[fragment] = every_s, asyncio.create_task(self._timer(socket, fragment, every_s))

    async def _timer(self, socket: ClientConnection, fragment: str, every_s: float) -> None:
        due_s = time.monotonic()
        while True:
            due_s = max(due_s + every_s, time.monotonic())  # a browser's timer leaves out what it has missed
            await asyncio.sleep(due_s - time.monotonic())
            await self._ask(socket, fragment)

    def _forget(self, fragments: set[str]) -> None:
        """What was kept for more runs than the server counts on."""
        self._runs += 1
        old = [
            key for key, (run, fragment) in self._kept.items()
            if (not fragments or fragment in fragments) and self._runs - run > self._most_age
        ]  # fmt: skip
        for key in old:
            del self._kept[key]

    async def _poll(self, netloc: str, query: str) -> None:
        given = {key: values[0] for key, values in parse_qs(query).items()}
        link = http.client.HTTPConnection(netloc, timeout=OPENED_S)
        group, color = urlencode({"group": given.get("group", "rack")}), given.get("color", "health")
        paths, arranged = (f"/drover/layout?{group}", f"/drover/picture?{urlencode({'color_by': color})}"), False
        while True:
            arranged = arranged or await asyncio.to_thread(self._get, link, paths[0])
            given_one = arranged and await asyncio.to_thread(self._get, link, paths[1])
            if given_one:
                self.drawn.set()
            else:
                self.refused += 1
            await asyncio.sleep(PICTURE_S if given_one else AGAIN_S)

    def _get(self, link: http.client.HTTPConnection, path: str) -> bool:
        asked = partial(link.request, "GET", path, headers={"Accept-Encoding": "gzip", "Cache-Control": "no-cache"})
        try:
            asked()
            reply = link.getresponse()
        except (http.client.RemoteDisconnected, ConnectionError):  # as idle for too long; a browser asks again as well
            link.close()
            asked()
            reply = link.getresponse()
        body = reply.read()
        self.http_bytes += len(body)
        return reply.status == 200


class Viewers:
    """Some of them, in a thread of their own."""

    def __init__(self) -> None:
        self.open: list[Viewer] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="viewers", daemon=True)
        self._thread.start()

    def set(self, count: int, url: str) -> None:
        """Close what is open, and open `count` pages. Raises when one of them does not come."""
        asyncio.run_coroutine_threadsafe(self._set(count, url), self._loop).result()

    async def _set(self, count: int, url: str) -> None:
        for task in self._tasks:
            task.cancel()
        ended = await asyncio.gather(*self._tasks, return_exceptions=True)
        for error in ended:
            if isinstance(error, Exception):
                raise error
        self.open = [Viewer(url) for _ in range(count)]
        self._tasks = [asyncio.create_task(viewer.look()) for viewer in self.open]
        for viewer in self.open:
            await asyncio.wait_for(viewer.drawn.wait(), OPENED_S)

    def forget(self) -> None:
        """Count from now on. Raises what ended a page."""
        for viewer, task in zip(self.open, self._tasks, strict=True):
            if task.done():
                task.result()
                raise RuntimeError("the console closed a page")
            viewer.reruns.clear()
            viewer.socket_bytes = viewer.http_bytes = viewer.messages = viewer.missed = viewer.refused = 0

    def close(self) -> None:
        self.set(0, "")
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

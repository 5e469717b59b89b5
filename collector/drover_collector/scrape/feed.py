"""Runs the process that reads pages, and gives what it found to ingest as one stream for each node.

Ingest serves these streams as it serves agents': the same handshake, limits, checks and writes. A node's own agent
wins: ingest refuses the node's scrape while that is connected, and the scrape asks again now and then.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import grpc

from drover_collector.grpc_h2 import Handler
from drover_collector.scrape import frames
from drover_collector.scrape.otlp_in import Answer, Form
from drover_collector.scrape.settings import OtlpInConfig, ScrapeConfig, WriteInConfig

log = logging.getLogger(__name__)

MAX_WAITING = 6  # messages of one node that ingest has not taken: a minute of rounds; the oldest go
AGAIN_S = 60.0  # until a node whose agent is connected is tried again
AGENT_AGAIN_S = 600.0  # until the process is reminded that a node has an agent
RETRY_S = 5.0  # after another refusal, and until the process is started again
SILENT_S = 60.0  # without a word of the process, until it is started again
NAMED = 3
WRITE_S = 8.0  # for a request of remote_write or OTLP
LATE = f"it was not taken within {WRITE_S:g} s; send it again"
MAX_UNTAKEN = 16 << 20  # bytes of such requests that the process has not read


@dataclass(slots=True)
class ScrapeState:
    """What the process reported last, and what the feed counts. Event loop only, but for reading."""

    of_process: Mapping[str, Any] = field(default_factory=dict)
    dropped: int = 0  # messages that ingest did not take in time
    restarts: int = 0
    agents: int = 0  # nodes whose agent is connected, so that their pages are not used

    def trouble(self) -> str:
        """Return a sentence for an operator; "" where all pages are read."""
        now = self.of_process
        if not now:
            return ""
        parts = [str(text) for text in now["troubles"]]
        if now["failing"]:
            named = "; ".join(f"{node}, {title}: {why}" for node, title, why in now["named"][:NAMED])
            parts.append(
                f"{now['failing']} of {now['targets']} pages of exporters cannot be read, so the state of these nodes"
                f" is unknown, not bad: {named}"
            )
        return ". ".join(parts)


class EndedError(Exception):
    """Ingest has ended the stream."""


class NodeCall:
    """One node's stream, as ingest's handler sees a call of an agent."""

    scraped = True
    partial_bytes = 0

    def __init__(self, first: bytes) -> None:
        self.messages: deque[bytes] = deque([first])
        self.on_message: Any = None
        self.max_message_bytes = 0
        self.refusal: tuple[grpc.StatusCode, str] | None = None
        self._arrived = asyncio.Event()
        self._reading = False  # a reader waits: it has done with the message before
        self._is_ended = False

    def put(self, message: bytes) -> int:
        """Queue a message, or hand it over at once. Return how many older ones were dropped for it."""
        if self._reading and not self.messages and self.on_message is not None and self.on_message(message):
            return 0
        self.messages.append(message)
        dropped = 0
        while len(self.messages) > MAX_WAITING:
            del self.messages[1 if len(self.messages) > 1 else 0]  # the first may be the Hello
            dropped += 1
        self._arrived.set()
        return dropped

    def end(self) -> None:
        """End the stream when what is queued has been read."""
        self._is_ended = True
        self._arrived.set()

    # ---- as grpc_h2's Call

    async def read(self) -> Any:
        while not self.messages:
            if self._is_ended:
                return grpc.aio.EOF
            self._arrived.clear()
            self._reading = True
            try:
                await self._arrived.wait()
            finally:
                self._reading = False
        return self.messages.popleft()

    def try_write(self, _message: bytes) -> bool:
        return True  # Acks, Welcome and Backoff: nothing is kept that could be sent again

    async def write(self, _message: bytes) -> None:
        return

    async def abort(self, code: grpc.StatusCode, details: str = "") -> None:
        self.refusal = code, details
        raise EndedError(details)

    def peer(self) -> str:
        return "scrape"

    def auth_context(self) -> Mapping[str, Sequence[bytes]]:
        return {}

    def invocation_metadata(self) -> Sequence[tuple[str, str]]:
        return ()


class NodeFeed:
    """The stream of one node, opened again when ingest has ended it."""

    def __init__(self, node: str, handler: Handler) -> None:
        self._node, self._handler = node, handler
        self._hello = b""
        self._call: NodeCall | None = None
        self._task: asyncio.Task[None] | None = None
        self._next_s = 0.0
        self.has_agent = False
        self.noted_s = -AGENT_AGAIN_S  # when the process was reminded of the agent

    def put(self, kind: bytes, message: bytes) -> int:
        """Take a message. Return how many were dropped."""
        if kind == frames.HELLO:
            self._hello = message
        if self._call is None:
            if not self._hello or time.monotonic() < self._next_s:
                return 0 if self.has_agent else 1
            self._call = NodeCall(self._hello)
            self._task = asyncio.create_task(self._serve(self._call))
            return 0 if kind == frames.HELLO else self._call.put(message)
        self.has_agent = False  # ingest has not refused this stream
        return self._call.put(message)

    async def _serve(self, call: NodeCall) -> None:
        try:
            await self._handler(None, call)  # type: ignore[arg-type]  # it has what ingest uses of a call
        except EndedError:
            pass
        except Exception:  # a defect must not end the feed of other nodes
            log.exception("%s: the stream of scraped values failed", self._node)
        finally:
            code = call.refusal[0] if call.refusal is not None else None
            self.has_agent = code is grpc.StatusCode.ALREADY_EXISTS
            self._next_s = time.monotonic() + (AGAIN_S if self.has_agent else RETRY_S)
            self._call = None

    def end(self) -> None:
        """End the stream: the node is not read any more."""
        if self._call is not None:
            self._call.end()

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task


class Writes:
    """Requests on their way to the process and back. Event loop only, but for `ask` and `ask_otlp`."""

    def __init__(self) -> None:
        self._to: asyncio.StreamWriter | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: dict[str, asyncio.Future[Answer]] = {}
        self._next = 0  # number of the newest request

    def ask(self, body: bytes) -> tuple[int, str]:
        """Have a request of remote_write taken; from any other thread. Return the status of HTTP and a sentence."""
        answer = self._asked(frames.WRITE, body)
        return answer.status, answer.text

    def ask_otlp(self, form: Form, body: bytes) -> Answer:
        """Have a request of OTLP taken; from any other thread."""
        return self._asked(frames.OTLP, form.pack(body))

    async def take_otlp(self, form: Form, body: bytes) -> Answer:
        """Have a request of OTLP taken, in the event loop."""
        try:
            async with asyncio.timeout(WRITE_S):
                return await self._ask(frames.OTLP, form.pack(body))
        except TimeoutError:
            return Answer(503, LATE)

    def _asked(self, kind: bytes, message: bytes) -> Answer:
        loop = self._loop
        if loop is None:
            return Answer(503, "the process that takes it is not there yet; send it again")
        asked = asyncio.run_coroutine_threadsafe(self._ask(kind, message), loop)
        try:
            return asked.result(WRITE_S)
        except TimeoutError:
            asked.cancel()
            return Answer(503, LATE)

    async def _ask(self, kind: bytes, message: bytes) -> Answer:
        if self._to is None or self._to.transport.get_write_buffer_size() > MAX_UNTAKEN:
            return Answer(503, "the process that takes it is busy, or starts again; send it again")
        self._next += 1
        number = str(self._next)
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        self._to.write(frames.pack(kind, number, message))
        try:
            return await answer
        finally:
            self._waiting.pop(number, None)

    def begin(self, to: asyncio.StreamWriter) -> None:
        self._to, self._loop = to, asyncio.get_running_loop()

    def note_agent(self, node: str) -> None:
        """Say that a node has an agent."""
        if self._to is not None:
            self._to.write(frames.pack(frames.AGENT, node, b""))

    def answered(self, number: str, message: bytes) -> None:
        answer = self._waiting.get(number)
        if answer is not None and not answer.done():
            answer.set_result(Answer(**json.loads(message)))

    def end(self) -> None:
        """Say of all that wait that they are to be sent again."""
        self._to = None
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_result(Answer(503, "the process that takes it has ended; send it again"))


class ScrapeFeed:
    """Run `run` until it is cancelled; then call `close`."""

    def __init__(
        self,
        configs: Sequence[ScrapeConfig],
        handler: Handler,
        troubles: dict[str, str],
        remote_write: WriteInConfig = WriteInConfig(),  # noqa: B008  # frozen
        otlp: OtlpInConfig = OtlpInConfig(),  # noqa: B008  # frozen
    ) -> None:
        """
        Args:
            troubles: gets a sentence under "scrape" while pages cannot be read.
            remote_write, otlp: how values that are sent are taken, in the same process.
        """
        self._configs, self._handler, self._troubles = configs, handler, troubles
        self._remote_write, self._otlp = remote_write, otlp
        self._writes = Writes()
        self._nodes: dict[str, NodeFeed] = {}
        self.state = ScrapeState()

    def read_state(self) -> ScrapeState | None:
        """Return what is read; None: no page is. From any thread."""
        return self.state if self._is_used else None

    @property
    def _is_used(self) -> bool:
        return bool(self._configs) or self._remote_write.enabled or self._otlp.taken

    @property
    def writes(self) -> Writes:
        return self._writes

    async def run(self) -> None:
        while self._is_used:
            try:
                await self._run_process()
            except (asyncio.IncompleteReadError, ValueError, OSError) as error:
                log.error("the process that reads exporters' pages has ended (%s); it is started again", error)
            except Exception:  # a defect must not end the pages of all nodes
                log.exception("reading exporters' pages has failed; it is started again")
            self.state.restarts += 1
            self.state.of_process = {}  # what it said last is not of now
            self._troubles["scrape"] = "Exporters' pages are not read: their process has ended and is started again."
            await asyncio.sleep(RETRY_S)

    async def _run_process(self) -> None:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "drover_collector.scrape.process",
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=1 << 20,
        )  # fmt: skip
        assert process.stdin is not None and process.stdout is not None
        try:
            settings = {
                "scrape": [asdict(c) for c in self._configs],
                "remote_write": asdict(self._remote_write), "otlp": asdict(self._otlp),
            }  # fmt: skip
            process.stdin.write(json.dumps(settings).encode() + b"\n")
            await process.stdin.drain()
            self._writes.begin(process.stdin)
            for feed in self._nodes.values():
                feed.noted_s = -AGENT_AGAIN_S  # this process does not know it
            while True:
                async with asyncio.timeout(SILENT_S):  # it says how it is each few seconds
                    frame = await frames.read(process.stdout)
                self._take(*frame)
        finally:
            self._writes.end()
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    def _take(self, kind: bytes, node: str, message: bytes) -> None:
        if kind == frames.STATE:
            self.state.of_process = json.loads(message)
            self.state.agents = sum(feed.has_agent for feed in self._nodes.values())
            if trouble := self.state.trouble():
                self._troubles["scrape"] = f"{trouble}."
            else:
                self._troubles.pop("scrape", None)
            return
        if kind == frames.ANSWER:
            self._writes.answered(node, message)
            return
        if kind == frames.GONE:
            if (gone := self._nodes.pop(node, None)) is not None:
                gone.end()
            return
        feed = self._nodes.get(node)
        if feed is None:
            feed = self._nodes[node] = NodeFeed(node, self._handler)
        self.state.dropped += feed.put(kind, message)
        if feed.has_agent and time.monotonic() - feed.noted_s >= AGENT_AGAIN_S:
            feed.noted_s = time.monotonic()
            self._writes.note_agent(node)

    async def close(self) -> None:
        for feed in self._nodes.values():
            await feed.close()

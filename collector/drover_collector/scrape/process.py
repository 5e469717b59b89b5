"""The process that reads pages: `python -m drover_collector.scrape.process`, started by the collector.

It takes its settings as one line of JSON on stdin, ends when stdin does, and writes frames to stdout. Its work never
holds up ingest: a page is fetched, checked, parsed and packed here.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import sys
import time
import zlib
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

from drover_collector.scrape import frames
from drover_collector.scrape.fetch import FetchError, fetch
from drover_collector.scrape.mapping import Found, PageMapper
from drover_collector.scrape.messages import NodeMessages
from drover_collector.scrape.otlp_in import Answer, Form, OtlpTaker
from drover_collector.scrape.precedence import ALIKE, Precedence
from drover_collector.scrape.received import Received
from drover_collector.scrape.settings import (
    MAX_TARGETS,
    OtlpInConfig,
    ScrapeConfig,
    Target,
    WriteInConfig,
    headers,
)
from drover_collector.scrape.tables import Table, table
from drover_collector.scrape.targets import TargetList
from drover_collector.scrape.write_in import WriteTaker
from drover_core.metrics.prometheus_text import ExpositionError
from drover_core.settings import SettingsError

MAX_OPEN = 256  # connections at a time
LOOKUPS = 64  # of names at a time: one whose server does not answer takes a thread for some ten seconds
LEAVES_S = (
    60.0  # a node that is off the lists for so long is not read any more: a list may be in the middle of a change
)
REREAD_S = 5.0  # between looks at the files of targets
STATE_S = 5.0
TICK_S = 1.0  # between looks at what was sent
FAILING, SELDOM = 3, 4  # after so many failures in a row a page is tried in one round of four: it may hang
BLIND_MOST = 100  # sentences about detectors; nodes with the same pages share theirs
NAMED = 20  # failing targets that are named
MAX_BACKLOG = 16 << 20  # bytes that the collector has not taken: rounds are left out meanwhile


@dataclass(slots=True)
class PageState:
    """One target: how its pages are mapped, and how it fails."""

    config: ScrapeConfig
    target: Target
    table: Table
    mapper: PageMapper
    failures: int = 0
    trouble: str = ""
    rounds: int = 0
    since_s: float = 0.0

    @property
    def waits(self) -> bool:
        """Whether this round is left out: it has failed often."""
        return self.failures >= FAILING and self.rounds % SELDOM != 0


@dataclass(slots=True)
class NodeState:
    messages: NodeMessages
    pages: dict[tuple[str, Target], PageState] = field(default_factory=dict)
    task: asyncio.Task[None] | None = None

    @property
    def interval_s(self) -> float:
        return min(page.config.interval_s for page in self.pages.values())


class Scraper:
    """Reads all pages of a node together, every interval, and writes what they gave. One event loop."""

    def __init__(self, configs: list[ScrapeConfig], received: Received | None = None) -> None:
        """`received`: what is sent; None: nothing is taken."""
        self._configs, self._received = configs, received
        self._lists = {config.name: TargetList(config) for config in configs}
        self._contexts = {c.name: ssl.create_default_context(cafile=c.ca_file) if c.tls else None for c in configs}
        self._nodes: dict[str, NodeState] = {}
        self._leaving: dict[str, tuple[float, NodeMessages]] = {}  # taken off the lists: since when
        self._speaks: dict[str, NodeMessages] = {}  # node -> whose Hello ingest had last
        self._precedences = {} if received is None else received.precedences
        self._open = asyncio.Semaphore(MAX_OPEN)
        self._read = self._failed = self._left_out = 0

    async def run(self) -> None:
        make_room_for_lookups()
        due_s = state_s = 0.0
        while True:
            if time.monotonic() >= due_s:
                due_s = time.monotonic() + REREAD_S
                self._update()
            if time.monotonic() >= state_s:
                state_s = time.monotonic() + STATE_S
                self._write_state()
            self._write_received()
            await asyncio.sleep(STATE_S if self._received is None else TICK_S)

    def _write_received(self) -> None:
        """Write what was sent and is whole."""
        if self._received is None or _backlog() > MAX_BACKLOG:
            return
        for made in self._received.rounds(time.monotonic(), self._nodes):
            self._write_round(made.node, made.messages, made.found, made.tables, made.down)
        for node in self._received.forget(time.monotonic()):
            if node not in self._nodes:
                self._end(node)

    def _update(self) -> None:
        """Begin and end the tasks of nodes as the lists of targets say."""
        wanted: dict[str, dict[tuple[str, Target], ScrapeConfig]] = {}
        room = MAX_TARGETS
        for config in self._configs:
            targets = self._lists[config.name].current(room)
            room -= len(targets)
            for target in targets:
                wanted.setdefault(target.node, {})[config.name, target] = config
        now_s = time.monotonic()
        for node in self._nodes.keys() - wanted.keys():
            state = self._nodes.pop(node)
            if state.task is not None:
                state.task.cancel()
            self._leaving[node] = now_s, state.messages
        for node in [node for node, (since_s, _) in self._leaving.items() if now_s - since_s >= LEAVES_S]:
            self._write_gone(node, self._leaving.pop(node)[1])
        for node, pages in wanted.items():
            found = self._nodes.get(node)
            if found is None:
                _, messages = self._leaving.pop(node, (0.0, NodeMessages(node)))
                found = self._nodes[node] = NodeState(messages)
            state = found
            state.pages = {key: state.pages.get(key) or _page(config, key[1]) for key, config in pages.items()}
            if state.task is None or state.task.done():
                state.task = asyncio.create_task(self._read_forever(node, state))

    def _write_gone(self, node: str, messages: NodeMessages) -> None:
        """Say that a node's pages are not read any more, so that its silence is not taken for its death."""
        if self._received is not None and node in self._received.nodes:
            return  # its values are sent instead
        _write(frames.RECORD, node, messages.stopped(time.time_ns() // 1_000_000))
        self._end(node)

    def _end(self, node: str) -> None:
        self._speaks.pop(node, None)
        self._precedences.pop(node, None)
        _write(frames.GONE, node, b"")

    def note_agent(self, node: str) -> None:
        """Note that ingest uses the node's agent instead."""
        self._precedences.setdefault(node, Precedence()).note_agent(time.monotonic())

    async def _read_forever(self, node: str, state: NodeState) -> None:
        # Nodes are spread over the interval by their names, the same after each start.
        next_s = time.monotonic() + state.interval_s * (zlib.crc32(node.encode()) % 1000) / 1000
        while True:
            await asyncio.sleep(max(0.0, next_s - time.monotonic()))
            next_s = max(next_s + state.interval_s, time.monotonic())
            if _backlog() > MAX_BACKLOG:
                self._left_out += 1
                continue
            await self._round(node, state)

    async def _round(self, node: str, state: NodeState) -> None:
        pages = list(state.pages.items())
        results = await asyncio.gather(*(self._page(page) for _, page in pages))
        found, tables, now_s = Found(), [], time.monotonic()
        precedence = self._precedences.setdefault(node, Precedence())
        for (key, page), result in zip(pages, results, strict=True):
            if result is None:
                continue
            if precedence.is_alike(key, result, now_s):
                page.failures, page.since_s = FAILING, page.since_s or time.time()
                page.trouble = f"left out: it is {ALIKE}"
                continue
            precedence.keep(key, page.table, result, now_s)
            found.add(result)
            tables.append(page.table)
        if not tables:
            return  # the node is silent: no row of its own could be taken for its health
        self._write_round(node, state.messages, found, tables, len(pages) - len(tables))

    def _write_round(
        self, node: str, messages: NodeMessages, found: Found, tables: list[Table], down: int
    ) -> None:  # fmt: skip
        now_ms = time.time_ns() // 1_000_000
        before = self._speaks.get(node)
        if before is not None and before is not messages:  # it was read before, and is sent now, or the other way
            messages.follow(before)
        self._speaks[node] = messages
        fresh, batch, records = messages.add(now_ms, found, tables, len(tables), down)
        if fresh:
            _write(frames.HELLO, node, messages.hello.SerializeToString())
        for record in records:
            _write(frames.RECORD, node, record)
        _write(frames.BATCH, node, batch)

    async def _page(self, page: PageState) -> Found | None:
        """Return what a page gave; None: it could not be had, or is none of this exporter."""
        page.rounds += 1
        if page.waits:
            return None
        config, target = page.config, page.target
        try:
            async with self._open:
                text = await fetch(
                    target.host, target.port, config.path, self._contexts[config.name], headers(config),
                    config.timeout_s,
                )  # fmt: skip
            found = page.mapper.read(text, time.time_ns() // 1_000_000)
        except (FetchError, ExpositionError, SettingsError) as error:
            if not page.failures:
                page.since_s = time.time()
            page.failures += 1
            page.trouble = "".join(c for c in str(error)[:200] if c.isprintable())
            self._failed += 1
            return None
        page.failures, page.trouble = 0, "; ".join(sorted(found.problems))[:200]
        self._read += 1
        return found

    def _write_state(self) -> None:
        """Write counts and what fails, for the collector's troubles and metrics."""
        pages = [page for node in self._nodes.values() for page in node.pages.values()]
        failing = sorted((p for p in pages if p.failures >= FAILING), key=lambda p: (p.since_s, p.target.node))
        of_nodes = [node.messages for node in self._nodes.values()]
        named = [[p.target.node, p.table.title, p.trouble] for p in failing]
        sources, came = 0, 0
        unused: dict[str, int] = {}
        if self._received is not None:
            got = self._received
            of_nodes += [node.messages for name, node in got.nodes.items() if name not in self._nodes]
            named += [
                [node, title, f"nothing has been sent for {for_s:.0f} s"]
                for node, title, for_s in got.silent(time.monotonic())
                if node not in self._nodes
            ]
            sources, came, unused = got.sources, got.pages, dict(got.left_out)
        blind = Counter(": ".join(entry) for messages in of_nodes for entry in messages.blind().items())
        state = {
            "nodes": len(of_nodes), "targets": len(pages) + sources, "failing": len(named), "read": self._read + came,
            "failed": self._failed, "left_out": self._left_out, "blind": dict(blind.most_common(BLIND_MOST)),
            "troubles": [t for of in self._lists.values() for t in of.troubles.values()],
            "named": named[:NAMED], "unused": unused,
        }  # fmt: skip
        _write(frames.STATE, "", json.dumps(state).encode())


def make_room_for_lookups() -> None:
    """Give the running loop more threads: of asyncio's own few, names without an answer would leave the others none."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(LOOKUPS))


def _page(config: ScrapeConfig, target: Target) -> PageState:
    of = table(config.exporter)
    return PageState(config, target, of, PageMapper(of))


_out: asyncio.StreamWriter | None = None


def _backlog() -> int:
    return 0 if _out is None else _out.transport.get_write_buffer_size()


def _write(kind: bytes, node: str, message: bytes) -> None:
    if _out is not None:
        _out.write(frames.pack(kind, node, message))


def configs_of(data: list[Mapping[str, Any]]) -> list[ScrapeConfig]:
    """Return the settings that the collector sent as JSON."""
    lists = ("targets", "file_sd")
    known: list[dict[str, Any]] = [{k: tuple(v) if k in lists else v for k, v in entry.items()} for entry in data]
    return [ScrapeConfig(**entry) for entry in known]


class Takers:
    """Takes the requests that the collector passes on."""

    def __init__(self, write: WriteInConfig, otlp: OtlpInConfig) -> None:
        """`received` is what they bring; None: neither is enabled."""
        self.received = Received() if write.enabled or otlp.taken else None
        self._write = WriteTaker(write, self.received) if self.received is not None and write.enabled else None
        self._otlp = OtlpTaker(otlp, self.received) if self.received is not None and otlp.taken else None

    def answer(self, kind: bytes, message: bytes) -> Answer:
        now_ms, now_s = time.time_ns() // 1_000_000, time.monotonic()
        if _backlog() > MAX_BACKLOG:
            return Answer(503, "the collector does not keep up; send it again")
        if kind == frames.WRITE and self._write is not None:
            return Answer(*self._write.take(message, now_ms, now_s))
        if kind == frames.OTLP and self._otlp is not None:
            form, body = Form.unpack(message)
            return self._otlp.take(body, form, now_ms, now_s)
        return Answer(404, "nothing is taken here; set rest.remote_write.enabled or rest.otlp.enabled")


def _takers(settings: Mapping[str, Mapping[str, Any]]) -> Takers:
    def known(name: str) -> dict[str, Any]:
        return {k: tuple(v) if isinstance(v, list) else v for k, v in settings[name].items()}

    return Takers(WriteInConfig(**known("remote_write")), OtlpInConfig(**known("otlp")))


async def _answer_requests(reader: asyncio.StreamReader, takers: Takers, scraper: Scraper) -> None:
    """Answer requests until the collector stops."""
    with contextlib.suppress(asyncio.IncompleteReadError):
        while True:
            kind, number, message = await frames.read(reader)
            if kind == frames.AGENT:
                scraper.note_agent(number)
                continue
            _write(frames.ANSWER, number, json.dumps(asdict(takers.answer(kind, message))).encode())
            await asyncio.sleep(0)  # requests that are here already must not hold up the pages that are read


async def _main() -> None:
    global _out
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=64 << 20)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    transport, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, sys.stdout.buffer)
    _out = asyncio.StreamWriter(transport, protocol, None, loop)
    settings = json.loads(await reader.readline())
    takers = _takers(settings)
    scraper = Scraper(configs_of(settings["scrape"]), takers.received)
    scraping = asyncio.create_task(scraper.run())
    ended = asyncio.create_task(_answer_requests(reader, takers, scraper))  # the collector has stopped
    await asyncio.wait({scraping, ended}, return_when=asyncio.FIRST_COMPLETED)
    if scraping.done():
        scraping.result()


if __name__ == "__main__":
    asyncio.run(_main())

"""The process that reads pages: `python -m drover_collector.scrape.process`, started by the collector.

It takes its settings as one line of JSON on stdin, ends when stdin does, and writes frames to stdout. Its work never
holds up ingest: a page is fetched, checked, parsed and packed here.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import sys
import time
import zlib
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from drover_collector.scrape import frames
from drover_collector.scrape.fetch import FetchError, fetch
from drover_collector.scrape.mapping import Found, PageMapper
from drover_collector.scrape.messages import NodeMessages
from drover_collector.scrape.settings import ScrapeConfig, Target, headers
from drover_collector.scrape.tables import Table, table
from drover_collector.scrape.targets import TargetList
from drover_core.metrics.prometheus_text import ExpositionError
from drover_core.settings import SettingsError

MAX_OPEN = 256  # connections at a time
LOOKUPS = 64  # of names at a time: one whose server does not answer takes a thread for some ten seconds
REREAD_S = 5.0  # between looks at the files of targets
STATE_S = 5.0
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


class Scraper:
    """Reads all pages of a node together, every interval, and writes what they gave. One event loop."""

    def __init__(self, configs: list[ScrapeConfig]) -> None:
        self._configs = configs
        self._lists = {config.name: TargetList(config) for config in configs}
        self._contexts = {c.name: ssl.create_default_context(cafile=c.ca_file) if c.tls else None for c in configs}
        self._nodes: dict[str, NodeState] = {}
        self._open = asyncio.Semaphore(MAX_OPEN)
        self._read = self._failed = self._left_out = 0

    async def run(self) -> None:
        make_room_for_lookups()
        due_s = 0.0
        while True:
            if time.monotonic() >= due_s:
                due_s = time.monotonic() + REREAD_S
                self._update()
            self._write_state()
            await asyncio.sleep(STATE_S)

    def _update(self) -> None:
        """Begin and end the tasks of nodes as the lists of targets say."""
        wanted: dict[str, dict[tuple[str, Target], ScrapeConfig]] = {}
        for config in self._configs:
            for target in self._lists[config.name].current():
                wanted.setdefault(target.node, {})[config.name, target] = config
        for node in self._nodes.keys() - wanted.keys():
            task = self._nodes.pop(node).task
            if task is not None:
                task.cancel()
        for node, pages in wanted.items():
            state = self._nodes.get(node)
            if state is None:
                state = self._nodes[node] = NodeState(NodeMessages(node))
            state.pages = {key: state.pages.get(key) or _page(config, key[1]) for key, config in pages.items()}
            if state.task is None or state.task.done():
                state.task = asyncio.create_task(self._read_forever(node, state))

    async def _read_forever(self, node: str, state: NodeState) -> None:
        interval_s = min(page.config.interval_s for page in state.pages.values())
        # Nodes are spread over the interval by their names, the same after each start.
        next_s = time.monotonic() + interval_s * (zlib.crc32(node.encode()) % 1000) / 1000
        while True:
            await asyncio.sleep(max(0.0, next_s - time.monotonic()))
            next_s = max(next_s + interval_s, time.monotonic())
            if _backlog() > MAX_BACKLOG:
                self._left_out += 1
                continue
            await self._round(node, state)

    async def _round(self, node: str, state: NodeState) -> None:
        pages = list(state.pages.values())
        results = await asyncio.gather(*(self._page(page) for page in pages))
        found, tables = Found(), []
        for page, result in zip(pages, results, strict=True):
            if result is not None:
                found.add(result)
                tables.append(page.table)
        if not tables:
            return  # the node is silent: no row of its own could be taken for its health
        now_ms = time.time_ns() // 1_000_000
        fresh, batch, records = state.messages.add(now_ms, found, tables, len(tables), len(pages) - len(tables))
        if fresh:
            _write(frames.HELLO, node, state.messages.hello.SerializeToString())
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
        blind = Counter(": ".join(entry) for node in self._nodes.values() for entry in node.messages.blind().items())
        state = {
            "nodes": len(self._nodes), "targets": len(pages), "failing": len(failing), "read": self._read,
            "failed": self._failed, "left_out": self._left_out, "blind": dict(blind.most_common(BLIND_MOST)),
            "troubles": [t for of in self._lists.values() for t in of.troubles.values()],
            "named": [[p.target.node, p.table.title, p.trouble] for p in failing[:NAMED]],
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


async def _main() -> None:
    global _out
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=64 << 20)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    transport, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, sys.stdout.buffer)
    _out = asyncio.StreamWriter(transport, protocol, None, loop)
    configs = configs_of(json.loads(await reader.readline()))
    scraping = asyncio.create_task(Scraper(configs).run())
    ended = asyncio.create_task(reader.read())  # the collector has stopped
    await asyncio.wait({scraping, ended}, return_when=asyncio.FIRST_COMPLETED)
    if scraping.done():
        scraping.result()


if __name__ == "__main__":
    asyncio.run(_main())

"""Starting `clickhouse_http` in a process of its own, and giving it commands."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from drover_collector.store.clickhouse import client as engine
from testbed.databases import Databases

TESTS = str(Path(__file__).parents[1])


class Insert(NamedTuple):
    """As the front noted it once it was done."""

    ns: int
    port: int  # its number
    comment: str
    table: str


@dataclass
class Front:
    process: subprocess.Popen[str]
    ports: list[int]
    log: Path

    def url(self, database: str, number: int = 0) -> str:
        return f"clickhouse://default@127.0.0.1:{self.ports[number]}/{database}"

    def command(self, command: str) -> None:
        """`cut N`, `mend N` or `tear N`."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "ok\n"

    @contextlib.contextmanager
    def databases(self) -> Iterator[Databases]:
        clients = engine.connect(self.url("kept"), 0)
        try:
            yield Databases(clients, self.log.parent / "engine")
        finally:
            clients.close()

    def inserts(self) -> list[Insert]:
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [Insert(*json.loads(line)) for line in lines]


@contextlib.contextmanager
def front(folder: Path, *args: str, password: str = "") -> Iterator[Front]:
    """A front while inside; `args` as its command line takes them."""
    log = folder / "inserts.jsonl"
    process = subprocess.Popen(
        [sys.executable, "-m", "testbed.clickhouse_http", "--path", str(folder / "engine"), "--log", str(log), *args],
        cwd=TESTS, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=os.environ | {"FRONT_PASSWORD": password},
    )  # fmt: skip
    try:
        assert process.stdout is not None
        yield Front(process, [int(port) for port in process.stdout.readline().split()], log)
    finally:
        process.kill()
        process.wait()

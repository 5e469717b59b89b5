"""Databases of one engine for the tests of a process, which are used again: to make 39 tables takes 0.5 s of CPU."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from clickhouse_connect.driver._backend.models import ClientConfig
from clickhouse_connect.driver._backend.orchestration import InitializationResult, init_sequence, run_sync
from clickhouse_connect.driver._chdbclient import ChdbClient
from clickhouse_connect.driver.query import TzSource

from drover_collector.store.clickhouse.client import Clients
from drover_collector.store.durability.integrity import Integrity
from drover_collector.store.schema import ddl_copies, migrations
from drover_collector.store.schema.tables import Table

LATE_S = 10.0  # as between its later looks


class Databases:
    """One that is given back is emptied and given out again, if its tables have not changed; else it is dropped.

    Args:
        clients: of the engine, to another database.
        folder: the engine's.
        is_open: whether this process has the database of that name open.
    """

    def __init__(self, clients: Clients, folder: Path, is_open: Callable[[str], bool] = lambda _: False) -> None:
        self.clients = clients
        self._folder = folder
        self._is_open = is_open
        self._numbers = itertools.count(1)
        self._made: dict[str, tuple[bytes, int]] = {}  # how the tables rest, and how many changes of them are known
        self._free: list[str] = []
        self._wanted: dict[str, tuple[Table, ...]] = {}  # as the tables were made

    def new(self) -> str:
        return f"t{next(self._numbers)}"

    def empty(self) -> str:
        """One whose tables are made already, or a new one."""
        return self._free.pop() if self._free else self.new()

    @contextmanager
    def opening(self, name: str) -> Iterator[None]:
        """While a store is opened in one that `empty` gave: tables that were made as it wants them are not compared.

        `give` has seen that nobody changed them. To compare them, and to look for their copies, is a third of an open.
        """
        ensure = migrations.ensure

        def ensure_unless_made(clients: Clients, tables: Iterable[Table], *, keep_ttl: bool = False) -> list[str]:
            wanted = tuple(tables)
            if self._wanted.get(name) == wanted:
                patch.setattr(ddl_copies, "keep", lambda *_: None)
                return []
            changes = ensure(clients, wanted, keep_ttl=keep_ttl)
            self._wanted.setdefault(name, wanted)
            return changes

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(migrations, "ensure", ensure_unless_made)
            patch.setattr(Integrity, "_run", _late(Integrity._run))
            yield

    def opened(self, name: str) -> None:
        """The tables of one that `empty` gave are there now."""
        if name not in self._made:
            self._made[name] = self._form(name), self._changes(name)

    def give(self, name: str) -> None:
        """All stores in it are closed."""
        if self._is_open(name):  # the test left one open
            return
        made = self._made.get(name)
        if made is not None and self._form(name) == made[0] and self._emptied(name) and self._changes(name) == made[1]:
            self._free.append(name)
        else:
            self._made.pop(name, None)
            self._wanted.pop(name, None)
            self.clients.command(f"DROP DATABASE {name}")  # or every later start would load it

    def _emptied(self, name: str) -> bool:
        """Of an emptied one nothing may rest set aside, and no mutation be noted, as in one that is new."""
        self.clients.command(f"TRUNCATE ALL TABLES FROM {name} NOT LIKE 'schema_versions'")
        left = self.clients.rows(
            f"SELECT (SELECT count() FROM system.parts WHERE database = '{name}' AND rows AND active"
            " AND table <> 'schema_versions')"
            f" + (SELECT count() FROM system.detached_parts WHERE database = '{name}')"
            f" + (SELECT count() FROM system.mutations WHERE database = '{name}') AS n"
        )
        return not left[0]["n"]

    def _changes(self, name: str) -> int:
        return int(self.clients.rows(f"SELECT count() AS n FROM {name}.schema_versions")[0]["n"])

    def _form(self, name: str) -> bytes:
        """Of all tables, as they rest: what a test has altered is another."""
        files = sorted((self._folder / "metadata" / name).glob("*.sql"))
        return b"".join(hashlib.sha256(file.name.encode() + file.read_bytes()).digest() for file in files)


def _late(run: Callable[[Integrity], None]) -> Callable[[Integrity], None]:
    """What watches a store's files looks first when most tests have ended: a look costs half as much as an open."""

    def run_late(watch: Integrity) -> None:
        if not watch._stopping.wait(LATE_S):
            run(watch)

    return run_late


def ask_engine_once() -> None:
    """Clients of the embedded engine ask it once in this process for its version, time zone and settings.

    Each client does, and a store has up to six: 70 ms of CPU each, for the same answer. The library has no option
    for it.
    """
    answers: dict[str, InitializationResult] = {}

    def connect(self: ChdbClient, tz_source: TzSource) -> None:
        if tz_source not in answers:
            config = ClientConfig(settings=self._initial_settings or {}, timezone_policy=tz_source)
            answers[tz_source] = run_sync(init_sequence(config), self._execute_operation)
        self._apply_init_result(answers[tz_source])

    ChdbClient._init_common_settings = connect  # type: ignore[method-assign]  # in tests only

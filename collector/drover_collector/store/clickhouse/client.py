"""Opening ClickHouse: the embedded engine (chDB) or a server, through clickhouse-connect, one code path after that.

chDB's sharp edges, all handled here: one process, one path; no fork after it is open; a `config.xml` in the working
directory would be read, and its `path` obeyed, so it gets a config of its own; temporary files go under its own path.
"""

from __future__ import annotations

import itertools
import logging
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import clickhouse_connect
import pyarrow as pa
from clickhouse_connect.driver.exceptions import ClickHouseError

from drover_collector.store.clickhouse import embedded, server
from drover_collector.store.clickhouse.embedded import StoreFolderState
from drover_collector.store.clickhouse.pool import Pool
from drover_collector.store.durability import damaged_parts as sources
from drover_collector.store.durability.verify_insert import InsertVerifier
from drover_collector.store.errors import StoreError
from drover_collector.store.ha.cluster import SETTINGS as CLUSTER_SETTINGS
from drover_collector.store.ha.cluster import Cluster
from drover_collector.store.schema import ddl_copies as definitions

log = logging.getLogger(__name__)

_TEXT = re.compile(r"'(?:[^'\\]|\\.)*'", re.DOTALL)  # in a statement, as `base.word` writes it
CLIENTS = 4  # queries that run at once; each holds a client of its own
MENDS = 20  # damaged parts that one question gets past
WRITERS = 2  # inserts that run at once: clients of their own, so that slow questions never hold up what comes in
DATABASE = "drover"
# The embedded engine takes nothing more below this. A disk that is full to the last byte is worse than a stop: parts
# that were merged or inserted then have been seen with empty files, which no read of their day gets past.
KEEP_FREE_BYTES = 256 << 20

# The engine counts the memory of the whole process, Python's too, and refuses statements above this: no question may
# take the machine down. What is really used stays far below.
MEMORY_BYTES = max(1792 << 20, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4)
# What the embedded engine would else take for a server of its own: caches of gigabytes, and merges at full priority.
EMBEDDED = {
    "max_server_memory_usage": MEMORY_BYTES,
    "mark_cache_size": 64 << 20,
    "primary_index_cache_size": 64 << 20,
    "index_mark_cache_size": 4 << 20,
    "query_condition_cache_size": 8 << 20,
    "compiled_expression_cache_size": 16 << 20,
    "background_pool_size": 2,
    "merges_mutations_memory_usage_soft_limit": 640 << 20,  # above it no further merge starts
    "os_threads_nice_value_merge_mutate": 10,  # behind what comes in and what is asked
    "background_schedule_pool_size": 2,
    "background_schedule_pool_initial_size": 2,
    "max_thread_pool_free_size": 16,  # idle ones; each keeps memory of its own
    # After an insert a table looks for work at once. With nothing to do it looks again within a second, and ever later:
    # all 39 cost 2 to 12 ms of CPU each second of the minutes after a start.
    "background_processing_pool_thread_sleep_seconds_if_nothing_to_do": 5,
    "background_streaming_processing_pool_thread_sleep_seconds_if_nothing_to_do": 5,
    "memory_worker_period_ms": 1000,  # looks at the process' memory; twenty times a second is 2 ms of CPU each second
}

SETTINGS = {
    "optimize_on_insert": 0,  # inserts are sorted, not merged: reads merge, by FINAL
    "max_partitions_per_insert_block": 0,  # a backfill may touch as many days as are kept
    # A sample never leaves its partition, so that FINAL merges within each.
    "do_not_merge_across_partitions_select_final": 1,
    "prefer_column_name_to_alias": 1,  # else `max(ts) AS ts ... WHERE ts > 1` means the maximum
    "max_query_size": 64 << 20,  # a list of 100,000 entity ids
    "async_insert": 0,  # ours are large already
    "log_queries": 0,
}


class Clients:
    """Two pools, for questions and for inserts: each client is used by one thread at a time.

    Args:
        files: where the embedded engine takes inserts from (clickhouse-connect's way is a file in the system's
            temporary folder, which a kill -9 leaves there); None: a server, which takes them from the connection.
        cluster: the form that statements of the plain form are given.
        quick: makes the clients of `apart`.
    """

    def __init__(
        self,
        make: Callable[[], Any],
        files: Path | None = None,
        on_close: Callable[[], None] = lambda: None,
        *,
        cluster: Cluster | None = None,
        quick: Callable[[], Any] | None = None,
    ) -> None:
        self.cluster = cluster
        self._quick = quick
        self._make = make
        self._files = files
        self._numbers = itertools.count()
        self._on_close = on_close
        # Is told each error of a statement that can be done again; whether it mended what made it fail.
        self.mended: Callable[[str], bool] = lambda _: False
        self._until = threading.local()
        self._whole = InsertVerifier()
        self._merges_rest = False
        self._questions = Pool(make, CLIENTS)
        self._inserts = Pool(make, WRITERS)

    @property
    def embedded(self) -> bool:
        """Whether the engine lives in this process, which then holds the store alone."""
        return self._files is not None

    @property
    def home(self) -> tuple[Path, str] | None:
        """(folder of the embedded store, name of the database); None: a server."""
        return None if self._files is None else (self._files.parents[1], self._files.name)

    def disk(self) -> tuple[int, int] | None:
        """(free, total) bytes of the embedded store's disk; None: a server."""
        if self._files is None:
            return None
        usage = shutil.disk_usage(self._files)
        return usage.free, usage.total

    @contextmanager
    def use(self, pool: Pool | None = None) -> Iterator[Any]:
        """A client for this thread alone.

        Raises:
            StoreError: what ClickHouse refused, an answer that was cut off, a server that is away; as one line.
        """
        pool = pool or self._questions
        client = None
        try:
            client = pool.take()
            yield client
        except (ClickHouseError, pa.ArrowException, OSError, MemoryError) as error:
            raise StoreError(f"the store refused a statement: {_one_line(error)}") from error
        finally:
            if client is not None:
                pool.give(client)

    @contextmanager
    def limited(self, seconds: float) -> Iterator[None]:
        """Questions of this thread end after so long, also when nobody waits for them any more."""
        self._until.at = time.monotonic() + seconds
        try:
            yield
        finally:
            self._until.at = None

    def _limited(self, sql: str) -> str:
        """A question with the time that is left for it; raises StoreError when there is none."""
        until: float | None = getattr(self._until, "at", None)
        if until is None:
            return sql
        left_s = until - time.monotonic()
        if left_s <= 0:
            raise StoreError("this took too long; ask for less, or try again")
        # In the text: as a setting of the call, the embedded engine's client asks four statements more.
        given = " SETTINGS " in _TEXT.sub("''", sql)  # not in the name of a job
        return f"{sql}{',' if given else ' SETTINGS'} max_execution_time = {max(0.1, left_s):.1f}"

    def apart(self) -> Clients:
        """Clients of the same database that nothing else keeps waiting, and that give up soon."""
        return Clients(self._quick or self._make)

    @property
    def tables(self) -> str:
        """What to read instead of `system.tables` of this database: the tables in which rows rest."""
        if self.cluster is not None:
            return self.cluster.tables
        return "(SELECT * FROM system.tables WHERE database = currentDatabase())"

    @property
    def columns(self) -> str:
        """Likewise instead of `system.columns`."""
        if self.cluster is not None:
            return self.cluster.columns
        return "(SELECT * FROM system.columns WHERE database = currentDatabase())"

    @property
    def parts(self) -> str:
        """What to read instead of the active `system.parts` of this database."""
        if self.cluster is not None:
            return self.cluster.parts
        return "(SELECT * FROM system.parts WHERE active AND database = currentDatabase())"

    def arrow(self, sql: str, parameters: Mapping[str, Any] | None = None) -> pa.Table:
        """The result of a query."""
        if self.cluster is not None:
            sql = self.cluster.statements(sql)[0]
        for tries in range(MENDS + 1):
            try:
                limited = self._limited(sql)
                with self.use() as client:
                    return client.query_arrow(limited, parameters=dict(parameters or {}), use_strings=True)
            except StoreError as error:
                if tries == MENDS or not self.mended(str(error.__cause__)):
                    raise
        raise AssertionError("unreachable")

    def rows(self, sql: str, parameters: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
        """The result of a small query."""
        found: list[dict[str, Any]] = self.arrow(sql, parameters).to_pylist()
        return found

    def command(self, sql: str) -> None:
        with self.use() as client:
            for statement in [sql] if self.cluster is None else self.cluster.statements(sql):
                client.command(statement)

    def insert(self, table: str, data: pa.Table, note: str = "") -> None:
        """Durable when it returns: it survives a kill -9 of this process. A server logs the note with it.

        Raises:
            StoreError: refused, or not whole on the disk: it is to be done again.
        """
        if not data.num_rows:
            return
        with self.use(self._inserts) as client:
            if self._files is None:
                client.insert_arrow(table, data, settings={"log_comment": note} if note else None)
            else:
                _check_room(self._files)
                self._insert_file(client, table, data, self._files / f"insert-{next(self._numbers)}.arrow")

    @contextmanager
    def hold_inserts(self) -> Iterator[None]:
        """Returns when no insert runs; those that come wait. For moments only, and by one thread at a time."""
        held = []
        try:
            for _ in range(WRITERS):
                held.append(self._inserts.take())
            yield
        finally:
            for client in held:
                self._inserts.give(client)

    def _insert_file(self, client: Any, table: str, data: pa.Table, file: Path) -> None:
        columns = ", ".join(f"`{name}`" for name in data.column_names)
        try:
            with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_file(sink, data.schema) as writer:
                writer.write_table(data)
            before = self._whole.before(table, lambda: _folder_of(client, table))
            if broken := self._whole.take_broken(table):  # the disk takes something again
                sources.clear(self, table, unacknowledged=broken)
            client.command(f"INSERT INTO {table} ({columns}) FROM INFILE '{quoted(file)}' FORMAT Arrow")
            if not self._whole.after(table, before):
                raise OSError(0, f"what was written to table {table} is not on the disk")
            self._let_merge(client, True)
        except OSError as error:
            self._let_merge(client, False)
            raise StoreError(f"{file}: {error.strerror or error}; is the disk full?") from error
        finally:
            file.unlink(missing_ok=True)

    def _let_merge(self, client: Any, may: bool) -> None:
        """While the disk takes nothing a merge would put a part that is not whole in the place of those that are."""
        if may == self._merges_rest:
            client.command(f"SYSTEM {'START' if may else 'STOP'} MERGES")
            self._merges_rest = not may  # only now: what failed is done with the next insert

    def close(self) -> None:
        """Waits for running statements."""
        closed = [pool.close() for pool in (self._inserts, self._questions)]
        if all(closed):
            self._on_close()


def _folder_of(client: Any, table: str) -> Path | None:
    """Where the parts of an embedded table lie."""
    sql = "SELECT data_paths FROM system.tables WHERE database = currentDatabase() AND name = {name:String}"
    found = client.query_arrow(sql, parameters={"name": table}).to_pylist()
    return Path(found[0]["data_paths"][0]) if found and found[0]["data_paths"] else None


def _check_room(folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if free < KEEP_FREE_BYTES:
        raise StoreError(
            f"{folder.parent}: {free >> 20} MB are free on its disk, {KEEP_FREE_BYTES >> 20} are needed; make room,"
            " or lower store.retention_days"
        )


def connect(
    url: str, wait_s: float, *, password: str | None = None, cluster: str = "", sharded: frozenset[str] = frozenset()
) -> Clients:
    """Clients of the database that `url` names, which is made if need be.

    Args:
        password: of a server's user; goes before that of the url.
        cluster: name of a server's cluster; empty: one server.
        sharded: tables that are spread over the shards of a cluster.
    Raises:
        StoreError: a url that is none, a store that is in use, a server that does not answer.
    """
    at = address(url, password=password, cluster=cluster)
    if isinstance(at, server.Server):
        return _server(at, cluster, sharded)
    return _embedded(*at, wait_s)


def address(url: str, *, password: str | None = None, cluster: str = "") -> server.Server | tuple[Path, str]:
    """The server that a url names, or the folder and database of an embedded store. Opens nothing.

    Raises:
        StoreError: a url that is none, without what may be secret in it.
    """
    parts = urlsplit(url)
    if parts.scheme == "chdb":
        if parts.netloc or not parts.path.strip("/"):
            raise StoreError(f"{url}: an embedded store needs an absolute path; write chdb:///var/lib/drover/store")
        unknown = set(parse_qs(parts.query)) - {"database"}
        if unknown:
            raise StoreError(f"{url}: {min(unknown)!r} is not known here; only database=NAME is")
        if cluster:
            raise StoreError(f"{url}: an embedded store is no cluster; give a clickhouse:// url, or no store.cluster")
        database = parse_qs(parts.query).get("database", [DATABASE])[0]
        server.name(database)
        return Path(unquote(parts.path)), database
    if parts.scheme in server.SCHEMES:
        at = server.parse(url, password, DATABASE)
        server.name(at.database)
        if cluster:
            server.word(cluster)
        return at
    raise StoreError(
        f"{server.redacted(url)}: not a store; write chdb:///PATH (embedded) or clickhouse://USER@HOST/DATABASE"
    )


def folder_state(url: str, cluster: str = "") -> StoreFolderState | None:
    """Return what opening an embedded store would meet, without opening it; None: a server, which is not asked.

    Raises:
        StoreError: the url is invalid, it does not go with a cluster, or the folder cannot be a store. One line.
    """
    at = address(url, cluster=cluster)
    return embedded.look(at[0]) if isinstance(at, tuple) else None


def _server(at: server.Server, cluster: str, sharded: frozenset[str]) -> Clients:
    form = Cluster(server.word(cluster), at.database, sharded) if cluster else None
    settings = SETTINGS | (CLUSTER_SETTINGS if form else {})
    plain = f"CREATE DATABASE IF NOT EXISTS {server.name(at.database)}"
    try:
        first = at.client(settings, database="default")
        first.command(form.create_database() if form else plain)
        first.close()
    except (ClickHouseError, OSError) as error:
        raise StoreError(f"no ClickHouse at {at.where}: {_one_line(error)}; check store.url") from None
    return Clients(lambda: at.client(settings), cluster=form, quick=lambda: at.client(settings, quick=True))


def _embedded(path: Path, database: str, wait_s: float) -> Clients:
    try:
        embedded.make(path)
        path = path.resolve()
    except OSError as error:
        raise StoreError(f"{path}: {error.strerror}; give a folder that this user may write, in store.url") from None
    embedded.acquire(path, database, wait_s)
    try:
        config = embedded.pinned_config(path, EMBEDDED, KEEP_FREE_BYTES)

        def make(name: str) -> Any:
            return clickhouse_connect.get_client(
                interface="chdb",
                path=str(path),
                database=name,
                settings=SETTINGS,
                chdb_options={"config-file": str(config)},
            )

        embedded.clear(path / "inserts" / database)
        with embedded.no_stray_config(path):
            first = _start(lambda: make("default"), path)
        first.command(f"CREATE DATABASE IF NOT EXISTS {server.name(database)} ENGINE = Atomic")
        first.close()
    except (ClickHouseError, OSError) as error:
        embedded.release(path, database)
        raise StoreError(f"{path}: the embedded store does not open: {_one_line(error)}") from None
    except StoreError:
        embedded.release(path, database)
        raise
    return Clients(lambda: make(database), path / "inserts" / database, lambda: embedded.release(path, database))


def _start(make: Callable[[], Any], path: Path) -> Any:
    """The first client. The engine does not say which definition it cannot take: then all older ones are tried."""
    if embedded.runs(path):
        return make()
    definitions.mend(path)
    try:
        return make()
    except ClickHouseError:
        if not definitions.mend(path, doubtful=True):
            raise
        return make()


def quoted(path: Path) -> str:
    return str(path).replace("\\", "\\\\").replace("'", "\\'")


def _one_line(error: Exception) -> str:
    return server.short(" ".join(str(error).split()))[:500]

"""Open ClickHouse, the embedded engine (chDB) or a server, through clickhouse-connect, and run SQL on it.

chDB's pitfalls, all handled here: one path for each process; no fork while it is open; it would read a `config.xml` of
the working directory and use its `path`, so it gets its own config; temporary files go under its own path.
"""

from __future__ import annotations

import contextlib
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
from drover_collector.store.durability import damaged_parts
from drover_collector.store.durability.verify_insert import InsertVerifier
from drover_collector.store.errors import StoreError
from drover_collector.store.ha.cluster import SETTINGS as CLUSTER_SETTINGS
from drover_collector.store.ha.cluster import Cluster
from drover_collector.store.schema import ddl_copies as definitions

log = logging.getLogger(__name__)

_TEXT = re.compile(r"'(?:[^'\\]|\\.)*'", re.DOTALL)  # a literal in a statement, see `sql.sql_string`
CLIENTS = 4  # queries that run at once, each with its own client
CLEAR_TRIES = 3  # the first gets what was left over
REPEATS_MAX = 20  # damaged parts after which a query is repeated
WRITERS = 2  # inserts that run at once, with their own clients, so that slow queries never delay them
DATABASE = "drover"
# The embedded engine takes no inserts below this. A disk that is full to the last byte is worse than a stop: parts
# written then have been seen with empty files, which fail each read of their day.
KEEP_FREE_BYTES = 256 << 20

# The engine counts the memory of the whole process, with Python's, and refuses statements above this, so that no query
# takes down the machine. Real use stays far below.
MEMORY_BYTES = max(1792 << 20, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4)
# By default the engine uses the machine like a server: caches of gigabytes, and merges at full priority.
EMBEDDED = {
    "max_server_memory_usage": MEMORY_BYTES,
    "mark_cache_size": 64 << 20,
    "primary_index_cache_size": 64 << 20,
    "index_mark_cache_size": 4 << 20,
    "query_condition_cache_size": 8 << 20,
    "compiled_expression_cache_size": 16 << 20,
    "background_pool_size": 2,
    "merges_mutations_memory_usage_soft_limit": 640 << 20,  # above it no further merge starts
    "os_threads_nice_value_merge_mutate": 10,  # inserts and queries go first
    "background_schedule_pool_size": 2,
    "background_schedule_pool_initial_size": 2,
    "max_thread_pool_free_size": 16,  # idle threads; each keeps memory
    # A table without work polls for it within a second, then ever later: all 39 tables cost 2 to 12 ms of CPU each
    # second in the minutes after a start.
    "background_processing_pool_thread_sleep_seconds_if_nothing_to_do": 5,
    "background_streaming_processing_pool_thread_sleep_seconds_if_nothing_to_do": 5,
    "memory_worker_period_ms": 1000,  # polls the process' memory; the default of 50 ms costs 2 ms of CPU each second
}

SETTINGS = {
    "optimize_on_insert": 0,  # inserts are sorted, not merged: reads merge with FINAL
    "max_partitions_per_insert_block": 0,  # a backfill may touch as many days as are kept
    # A sample never leaves its partition, so that FINAL merges within each.
    "do_not_merge_across_partitions_select_final": 1,
    "prefer_column_name_to_alias": 1,  # else `max(ts) AS ts ... WHERE ts > 1` means the maximum
    "max_query_size": 64 << 20,  # holds a list of 100,000 entity ids
    "async_insert": 0,  # our inserts are large already
    "log_queries": 0,
}


class Clients:
    """Two pools of clients, for queries and for inserts. Thread-safe: a client is used by one thread at a time.

    Args:
        files: folder from which the embedded engine reads inserts (clickhouse-connect would use the system's temporary
            folder, where a kill -9 leaves them); None: a server, which reads them from the connection.
        cluster: translates statements to those of a cluster.
        quick: makes the clients of `apart`; None: the embedded engine's are all alike.
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
        # Called with the error of a query: whether it removed the cause, so that the query is repeated.
        self.mended: Callable[[str], bool] = lambda _: False
        self._deadline = threading.local()
        self._verifier = InsertVerifier()
        self._merges_stopped = False
        self._queries = Pool(make, CLIENTS)
        self._inserts = Pool(make, WRITERS)

    @property
    def embedded(self) -> bool:
        """Whether the engine runs in this process, which then is the only user of the store."""
        return self._files is not None

    @property
    def home(self) -> tuple[Path, str] | None:
        """(folder of the embedded store, name of the database); None: a server."""
        return None if self._files is None else (self._files.parents[1], self._files.name)

    def disk(self) -> tuple[int, int] | None:
        """Return (free, total) bytes of the embedded store's disk; None: a server."""
        if self._files is None:
            return None
        usage = shutil.disk_usage(self._files)
        return usage.free, usage.total

    @contextmanager
    def use(self, pool: Pool | None = None) -> Iterator[Any]:
        """Lend a client to this thread.

        Raises:
            StoreError: ClickHouse refused a statement, its result was cut off, or the server is away. One line.
        """
        pool = pool or self._queries
        client, done = None, False
        try:
            client = pool.take()
            yield client
            done = True
        except (ClickHouseError, pa.ArrowException, OSError, MemoryError) as error:
            raise StoreError(f"the store refused a statement: {_one_line(error)}") from error
        finally:
            if client is not None:
                usable = done or self._quick is not None or _cleared(client)
                (pool.give if usable else pool.discard)(client)

    @contextmanager
    def limited(self, seconds: float) -> Iterator[None]:
        """End queries of this thread after so long, even if nobody waits for them any longer."""
        self._deadline.at = time.monotonic() + seconds
        try:
            yield
        finally:
            self._deadline.at = None

    def _limited(self, sql: str) -> str:
        """Return a query with the time that is left for it.

        Raises:
            StoreError: no time is left.
        """
        deadline: float | None = getattr(self._deadline, "at", None)
        if deadline is None:
            return sql
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise StoreError("this took too long; ask for less, or try again")
        # In the text: as a setting of the call it makes the embedded engine's client run four more statements.
        given = " SETTINGS " in _TEXT.sub("''", sql)  # not in the name of a job
        return f"{sql}{',' if given else ' SETTINGS'} max_execution_time = {max(0.1, left_s):.1f}"

    def apart(self) -> Clients:
        """Return other clients of the same database, for which no one else waits, with a short timeout."""
        return Clients(self._quick or self._make, quick=self._quick)

    @property
    def tables(self) -> str:
        """What to read instead of `system.tables` of this database: the tables that hold rows."""
        if self.cluster is not None:
            return self.cluster.tables
        return "(SELECT * FROM system.tables WHERE database = currentDatabase())"

    @property
    def columns(self) -> str:
        """What to read instead of `system.columns` of this database."""
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
        """Return the result of a query."""
        if self.cluster is not None:
            sql = self.cluster.statements(sql)[0]
        for tries in range(REPEATS_MAX + 1):
            try:
                limited = self._limited(sql)
                with self.use() as client:
                    return client.query_arrow(limited, parameters=dict(parameters or {}), use_strings=True)
            except StoreError as error:
                if tries == REPEATS_MAX or not self.mended(str(error.__cause__)):
                    raise
        raise AssertionError("unreachable")

    def rows(self, sql: str, parameters: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
        """Return the result of a small query."""
        found: list[dict[str, Any]] = self.arrow(sql, parameters).to_pylist()
        return found

    def command(self, sql: str) -> None:
        """Run a statement without a result."""
        with self.use() as client:
            for statement in [sql] if self.cluster is None else self.cluster.statements(sql):
                client.command(statement)

    def insert(self, table: str, data: pa.Table, note: str = "") -> None:
        """Insert rows. They are durable on return: they survive a kill -9. A server logs the note with the insert.

        Raises:
            StoreError: refused, or not complete on the disk. Insert again.
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
        """Wait until no insert runs, and hold back new ones. For short times, by one thread at a time."""
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
            before = self._verifier.before(table, lambda: _folder_of(client, table))
            if broken := self._verifier.take_broken(table):  # the disk has room again
                damaged_parts.clear(self, table, unacknowledged=broken)
            client.command(f"INSERT INTO {table} ({columns}) FROM INFILE '{quoted(file)}' FORMAT Arrow")
            if not self._verifier.after(table, before):
                raise OSError(0, f"what was written to table {table} is not on the disk")
            self._let_merge(client, True)
        except OSError as error:
            self._let_merge(client, False)
            raise StoreError(f"{file}: {error.strerror or error}; is the disk full?") from error
        finally:
            file.unlink(missing_ok=True)

    def _let_merge(self, client: Any, may: bool) -> None:
        """Stop merges while the disk is full: one would replace complete parts by one that is cut off."""
        if may == self._merges_stopped:
            client.command(f"SYSTEM {'START' if may else 'STOP'} MERGES")
            self._merges_stopped = not may  # set last: if the command fails, the next insert repeats it

    def close(self) -> None:
        """Wait for running statements, and close."""
        closed = [pool.close() for pool in (self._inserts, self._queries)]
        if all(closed):
            self._on_close()


def _cleared(client: Any) -> bool:
    """Return whether a client of the embedded engine is as new after a statement that failed.

    The engine keeps what such a statement had written of its result, and puts it before the client's next result (chDB
    4.4.0). So that next one is asked here, and thrown away.
    """
    for _ in range(CLEAR_TRIES):
        with contextlib.suppress(Exception):  # of any kind: such a client is replaced, and none is lost to the pool
            if client.raw_query("SELECT 1 FORMAT TabSeparated") == b"1\n":
                return True
    return False


def _folder_of(client: Any, table: str) -> Path | None:
    """Return the folder of the parts of an embedded table."""
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
    """Return clients of the database of `url`. Create the database if it does not exist.

    Args:
        password: of a server's user; takes precedence over the url's.
        cluster: name of a server's cluster; empty: one server.
        sharded: tables that are spread over the shards of a cluster.
    Raises:
        StoreError: the url is invalid, the store is in use, or the server does not answer.
    """
    at = address(url, password=password, cluster=cluster)
    if isinstance(at, server.Server):
        return _server(at, cluster, sharded)
    return _embedded(*at, wait_s)


def address(url: str, *, password: str | None = None, cluster: str = "") -> server.Server | tuple[Path, str]:
    """Return the server of a url, or the folder and database of an embedded store. Opens nothing.

    Raises:
        StoreError: the url is invalid. The message has no secrets.
    """
    parts = urlsplit(url)
    if parts.scheme == "chdb":
        if parts.netloc or not parts.path.strip("/"):
            raise StoreError(f"{url}: an embedded store needs an absolute path; write chdb:///var/lib/drover/store")
        unknown = set(parse_qs(parts.query)) - {"database"}
        if unknown:
            raise StoreError(f"{url}: {min(unknown)!r} is not known here; only database=NAME is")
        if cluster:
            raise StoreError(
                f"{url}: an embedded store is not a cluster; give a clickhouse:// url, or remove store.cluster"
            )
        database = parse_qs(parts.query).get("database", [DATABASE])[0]
        server.database_name(database)
        return Path(unquote(parts.path)), database
    if parts.scheme in server.SCHEMES:
        at = server.parse(url, password, DATABASE)
        server.database_name(at.database)
        if cluster:
            server.cluster_name(cluster)
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
    return embedded.folder_state(at[0]) if isinstance(at, tuple) else None


def _server(at: server.Server, cluster: str, sharded: frozenset[str]) -> Clients:
    form = Cluster(server.cluster_name(cluster), at.database, sharded) if cluster else None
    settings = SETTINGS | (CLUSTER_SETTINGS if form else {})
    plain = f"CREATE DATABASE IF NOT EXISTS {server.database_name(at.database)}"
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
        first.command(f"CREATE DATABASE IF NOT EXISTS {server.database_name(database)} ENGINE = Atomic")
        first.close()
    except (ClickHouseError, OSError) as error:
        embedded.release(path, database)
        raise StoreError(f"{path}: the embedded store cannot be opened: {_one_line(error)}") from None
    except StoreError:
        embedded.release(path, database)
        raise
    return Clients(lambda: make(database), path / "inserts" / database, lambda: embedded.release(path, database))


def _start(make: Callable[[], Any], path: Path) -> Any:
    """Make the first client. If the engine cannot start, try it with older table definitions: it does not say which."""
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
    """Return a path for use within quotes in SQL."""
    return str(path).replace("\\", "\\\\").replace("'", "\\'")


def _one_line(error: Exception) -> str:
    return server.short(" ".join(str(error).split()))[:500]

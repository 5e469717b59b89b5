"""ClickHouse's HTTP interface as clickhouse-connect's sync client uses it, in front of the real engine (chDB).

Real: the engine, its SQL, its formats, codecs and errors; the client, its requests and its parsing of the answers.

Fake, and named so in docs/explanation/testing.md:
- the HTTP server itself: Python's, written here after the documented interface; answers are made whole before they are
  sent, so that an error in the middle of an answer happens only where a test asks for it (`tear`);
- users: one name and password, no rights;
- in the form of a cluster (`--cluster NAME`): one engine stands for two shards. ON CLUSTER is taken out of statements
  and Replicated* made plain, since an embedded engine has no queue of DDL and runs no replicas; each shard sees its
  rows of the common table by a filter on the sharding key; a DELETE with a subquery is refused as replicated tables
  do. Distributed tables and queries are the engine's own;
- several collectors reach it on ports of their own, each can be cut by itself, for a network that fails.

Commands on stdin, one a line, each answered with `ok`: `cut N`, `mend N` (the port of that number), `tear N` (its next
answer breaks off in the middle). `--log FILE` notes each INSERT: time in ns, port number, log_comment, table.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import gzip
import json
import os
import queue
import re
import socket
import sys
import tempfile
import threading
import time
import uuid
import zlib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

# Parameters of the interface itself; what else stands in the url is a setting or `param_NAME`.
TRANSPORT = {
    "query", "database", "user", "password", "session_id", "session_timeout", "session_check", "query_id", "quota_key",
    "compress", "decompress", "wait_end_of_query", "buffer_size", "role", "client_protocol_version",
    "send_progress_in_http_headers", "http_headers_progress_interval_ms", "enable_http_compression",
    "cancel_http_readonly_queries_on_client_close",
}  # fmt: skip
STATUS = {62: 400, 36: 400, 60: 404, 81: 404, 497: 403, 516: 403, 57: 500, 241: 500}  # as ClickHouse maps its codes
INSERT = re.compile(rb"\s*INSERT\s+INTO\s+(\S+)\s*(\([^)]*\))?\s*FORMAT\s+(\w+)[ \t]*\r?\n?", re.IGNORECASE)
FORMAT = re.compile(r"\bFORMAT\s+(\w+)\s*;?\s*$", re.IGNORECASE)
ON_CLUSTER = re.compile(r"\s+ON CLUSTER\s+(`[^`]*`|'[^']*'|\w+)", re.IGNORECASE)
OVER = re.compile(r"ENGINE = Distributed\('\w+', '\w+', '(\w+)', (.+)\)$")
SUBQUERY = re.compile(r"\s*ALTER TABLE \S+ (DELETE|UPDATE)\b.*\(SELECT\b", re.IGNORECASE | re.DOTALL)
REPLICATED = re.compile(r"Replicated(\w*MergeTree)\('[^']*', '[^']*'(?:, )?")


class EngineError(Exception):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        found = re.search(r"Code: (\d+)", text)
        self.code = int(found.group(1)) if found else 1000


class Engine:
    """The embedded engine, with a handle of its own for each request under way."""

    def __init__(self, path: Path, cluster: str, keeper: str) -> None:
        import chdb

        self.path, self.cluster = path, cluster
        config = path / "front.xml"
        (path / "tmp").mkdir(parents=True, exist_ok=True)
        shards = "".join(
            "<shard><internal_replication>true</internal_replication><replica>"
            f"<host>{host}</host><port>9000</port></replica></shard>"
            for host in ("127.0.0.1", "localhost")
        )
        parts = [f"<path>{path}/</path><tmp_path>{path}/tmp/</tmp_path><tcp_port>9000</tcp_port>"]
        if cluster:
            parts.append(f"<remote_servers><{cluster}>{shards}</{cluster}></remote_servers>")
            parts.append("<macros><shard>01</shard><replica>r1</replica></macros>")
        if keeper:
            host, _, port = keeper.rpartition(":")
            parts.append(f"<zookeeper><node><host>{host}</host><port>{port}</port></node></zookeeper>")
            parts.append("<keeper_map_path_prefix>/drover_keeper_map</keeper_map_path_prefix>")
        config.write_text(f"<clickhouse>{''.join(parts)}</clickhouse>", "utf-8")
        self._connect = lambda: chdb.connect(f"{path}?config-file={config}")
        self._free: queue.LifoQueue[tuple[Any, dict[str, str]]] = queue.LifoQueue()
        self._free.put((self._connect(), {}))
        self._sharded: dict[str, dict[str, str]] = {}  # database -> local table -> its sharding key

    def run(self, sql: str, form: str, database: str, settings: dict[str, str], params: dict[str, str]) -> bytes:
        if self.cluster:
            sql, settings = self._as_cluster(sql, database, settings)
        try:
            conn, held = self._free.get_nowait()
        except queue.Empty:
            conn, held = self._connect(), {}
        try:
            wanted = settings | {"\0": database}
            if held != wanted:
                for name in held.keys() - wanted.keys():
                    self._query(conn, f"SET {name} = DEFAULT", "Null", {})
                for name, value in wanted.items():
                    if held.get(name) != value:
                        statement = f"USE `{value}`" if name == "\0" else f"SET {name} = {_literal(value)}"
                        self._query(conn, statement, "Null", {})
                        held[name] = value
                held = wanted
            return self._query(conn, sql, form, params)
        except EngineError:
            held = {}
            conn.close()
            conn = None
            raise
        finally:
            if conn is not None:
                self._free.put((conn, dict(held)))

    def _query(self, conn: Any, sql: str, form: str, params: dict[str, str]) -> bytes:
        try:
            result = conn.query(sql, form, params=params) if params else conn.query(sql, form)
        except Exception as error:  # noqa: BLE001  # chDB raises RuntimeError and others of its own
            raise EngineError(str(error)) from None
        return bytes(result.bytes())

    def _as_cluster(self, sql: str, database: str, settings: dict[str, str]) -> tuple[str, dict[str, str]]:
        if over := OVER.search(sql):
            self._sharded.setdefault(database, {})[over.group(1)] = over.group(2)
        if SUBQUERY.match(sql) and settings.get("allow_nondeterministic_mutations") != "1":
            raise EngineError(
                "Code: 36. DB::Exception: ALTER UPDATE/ALTER DELETE statement with subquery may be nondeterministic,"
                " see allow_nondeterministic_mutations setting. (BAD_ARGUMENTS)"
            )  # as of replicated tables
        if not re.match(r"\s*(SELECT|INSERT)", sql, re.IGNORECASE):
            sql = ON_CLUSTER.sub("", REPLICATED.sub(r"\1(", sql))
        elif self._sharded.get(database):
            shards = self._sharded[database].items()
            filters = {f"{database}.{table}": f"{key} % 2 + 1 = shardNum()" for table, key in shards}
            pairs = ", ".join(f"{_literal(table)}: {_literal(text)}" for table, text in sorted(filters.items()))
            settings = settings | {"additional_table_filters": "{" + pairs + "}"}
        # What waits for replicas needs replicas.
        return sql, {key: value for key, value in settings.items() if not key.startswith("insert_quorum")}


class Front:
    """What the ports share."""

    def __init__(self, engine: Engine, user: str, password: str, log: Path | None) -> None:
        self.engine, self.user, self.password = engine, user, password
        self.log = None if log is None else log.open("a", buffering=1)
        self.cut: set[int] = set()
        self.tear: set[int] = set()
        self.sessions: set[str] = set()
        self.lock = threading.Lock()


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, front: Front, number: int, port: int) -> None:
        self.front, self.number = front, number
        self.open: set[socket.socket] = set()
        super().__init__(("127.0.0.1", port), Handler)

    def get_request(self) -> tuple[socket.socket, Any]:
        request, address = super().get_request()
        if self.number in self.front.cut:
            request.close()
            raise OSError("this port is cut")
        self.open.add(request)
        return request, address

    def close_request(self, request: Any) -> None:
        self.open.discard(request)
        super().close_request(request)

    def hang_up(self) -> None:
        for connection in list(self.open):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, *_: Any) -> None:
        """A client that hung up is no news."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Server

    def log_message(self, *_: Any) -> None:
        """Nothing on stderr."""

    def do_GET(self) -> None:  # the name that http.server looks for
        self._answer()

    def do_POST(self) -> None:  # as above
        self._answer()

    def _answer(self) -> None:
        parts = urlsplit(self.path)
        body = self._body()
        if parts.path == "/ping":
            self._send(200, b"Ok.\n", {})
            return
        given = dict(parse_qsl(parts.query, keep_blank_values=True))
        headers = {"X-ClickHouse-Query-Id": given.get("query_id", str(uuid.uuid4())), "X-ClickHouse-Timezone": "UTC"}
        try:
            self._authenticate(given)
            form, data = self._run(given, body)
        except EngineError as error:
            headers["X-ClickHouse-Exception-Code"] = str(error.code)
            self._send(STATUS.get(error.code, 500), str(error).encode(), headers)
            return
        except Exception as error:  # noqa: BLE001  # the client must see what is wrong with this front
            self._send(500, f"Code: 1001. the front failed: {error!r}".encode(), headers)
            return
        headers["X-ClickHouse-Summary"] = json.dumps({"read_rows": "0", "written_rows": "0", "elapsed_ns": "1"})
        if form:
            headers["X-ClickHouse-Format"] = form
        if given.get("enable_http_compression") == "1":
            data, encoding = _compressed(data, self.headers.get("Accept-Encoding", ""))
            if encoding:
                headers["Content-Encoding"] = encoding
        self._send(200, data, headers)

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            chunks = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                chunks.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            body = b"".join(chunks)
        else:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        return _decompressed(body, self.headers.get("Content-Encoding", ""))

    def _authenticate(self, given: dict[str, str]) -> None:
        front = self.server.front
        user, password = given.get("user", "default"), given.get("password", "")
        if "X-ClickHouse-User" in self.headers:
            user, password = self.headers["X-ClickHouse-User"], self.headers.get("X-ClickHouse-Key", "")
        scheme, _, token = self.headers.get("Authorization", "").partition(" ")
        if scheme == "Basic":
            user, _, password = base64.b64decode(token).decode().partition(":")
        if (user, password) != (front.user, front.password):
            raise EngineError(
                f"Code: 516. DB::Exception: {user}: Authentication failed: password is incorrect, or there is no user"
                " with such name. (AUTHENTICATION_FAILED)"
            )

    def _run(self, given: dict[str, str], body: bytes) -> tuple[str, bytes]:
        with self._session(given.get("session_id")):
            text = given["query"].encode() + b"\n" + body if "query" in given else body
            database = given.get("database", "default")
            settings = {k: v for k, v in given.items() if k not in TRANSPORT and not k.startswith("param_")}
            comment = settings.pop("log_comment", "")
            params = {k.removeprefix("param_"): v for k, v in given.items() if k.startswith("param_")}
            insert = INSERT.match(text)
            if insert is not None:
                return "", self._insert(insert, text[insert.end() :], database, settings, comment)
            sql = text.decode("utf-8").strip().rstrip(";")
            if self.command == "GET" and not re.match(r"\s*(SELECT|SHOW|DESC|WITH|EXISTS|EXPLAIN)", sql, re.IGNORECASE):
                raise EngineError("Code: 164. DB::Exception: Cannot execute query in readonly mode. (READONLY)")
            found = FORMAT.search(sql)
            form = found.group(1) if found else "TabSeparated"
            return form, self.server.front.engine.run(sql, form, database, settings, params)

    def _insert(
        self, insert: re.Match[bytes], data: bytes, database: str, settings: dict[str, str], comment: str
    ) -> bytes:
        front = self.server.front
        table, columns, form = ((part or b"").decode() for part in insert.groups())
        with tempfile.NamedTemporaryFile(dir=front.engine.path / "tmp", suffix=".data") as file:
            file.write(data)
            file.flush()
            sql = f"INSERT INTO {table} {columns} FROM INFILE '{file.name}' FORMAT {form}"
            front.engine.run(sql, "Null", database, settings, {})
        if front.log is not None:
            front.log.write(json.dumps([time.time_ns(), self.server.number, comment, table.strip("`")]) + "\n")
        return b""

    @contextlib.contextmanager
    def _session(self, name: str | None) -> Iterator[None]:
        """Two statements of one session at once are refused, as ClickHouse does."""
        front = self.server.front
        if name is None:
            yield
            return
        with front.lock:
            if name in front.sessions:
                raise EngineError("Code: 373. DB::Exception: Session is locked by a concurrent client.")
            front.sessions.add(name)
        try:
            yield
        finally:
            front.sessions.discard(name)

    def _send(self, status: int, data: bytes, headers: dict[str, str]) -> None:
        front, number = self.server.front, self.server.number
        if number in front.cut:
            self.close_connection = True
            return
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("X-ClickHouse-Server-Display-Name", "front")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        if number in front.tear and len(data) > 1:
            front.tear.discard(number)
            data = data[: len(data) // 2]
            self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
            self.close_connection = True
            return
        for start in range(0, len(data), 1 << 20):
            piece = data[start : start + (1 << 20)]
            self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
        self.wfile.write(b"0\r\n\r\n")


def _literal(text: str) -> str:
    return "'" + str(text).replace("\\", "\\\\").replace("'", "\\'") + "'"


def _decompressed(data: bytes, encoding: str) -> bytes:
    if encoding == "gzip":
        return gzip.decompress(data)
    if encoding == "deflate":
        return zlib.decompress(data)
    if encoding == "lz4":
        import lz4.frame

        return bytes(lz4.frame.decompress(data))
    if encoding == "zstd":
        from backports import zstd

        return bytes(zstd.decompress(data))
    return data


def _compressed(data: bytes, accepted: str) -> tuple[bytes, str]:
    wanted = {name.strip() for name in accepted.split(",")}
    if "lz4" in wanted:
        import lz4.frame

        return bytes(lz4.frame.compress(data)), "lz4"
    if "zstd" in wanted:
        from backports import zstd

        return bytes(zstd.compress(data)), "zstd"
    if "gzip" in wanted:
        return gzip.compress(data, 1), "gzip"
    return data, ""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--path", type=Path, required=True)
    parser.add_argument("--ports", type=int, default=1)
    parser.add_argument("--cluster", default="")
    parser.add_argument("--keeper", default="")
    parser.add_argument("--user", default="default")
    parser.add_argument("--log", type=Path)
    args = parser.parse_args()
    engine = Engine(args.path.resolve(), args.cluster, args.keeper)
    front = Front(engine, args.user, os.environ.get("FRONT_PASSWORD", ""), args.log)
    servers = [Server(front, number, 0) for number in range(args.ports)]
    for server in servers:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    print(" ".join(str(server.server_address[1]) for server in servers), flush=True)
    for line in sys.stdin:
        command, number = line.split()
        if command == "cut":
            front.cut.add(int(number))
            servers[int(number)].hang_up()
        elif command == "mend":
            front.cut.discard(int(number))
        elif command == "tear":
            front.tear.add(int(number))
        print("ok", flush=True)
    os._exit(0)  # the engine's threads would hold up an orderly end


if __name__ == "__main__":
    main()

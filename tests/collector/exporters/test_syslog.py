"""Syslog: the form of a line, and servers that are honest, deaf, slow or gone."""

from __future__ import annotations

import re
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from drover_cli.pki import authority as certs
from drover_collector.auth.authorization import Gate
from drover_collector.exporters import sending
from drover_collector.exporters.exports import Exports
from drover_collector.exporters.records import Record, Refusals, of_audit
from drover_collector.exporters.settings import ExportConfig, SyslogConfig, validate_export
from drover_collector.exporters.syslog import MOST_BYTES, Syslog, message
from drover_collector.store import Store
from drover_core.model.events import Audit, Severity
from drover_core.settings import SettingsError
from testbed.certificates import Fleet
from testbed.exported import Exported
from testbed.system_processes import free_port
from testbed.waiting import wait_until

NOW_MS = 1_790_000_000_123
AUDIT = Audit(
    "a1", NOW_MS, "operator/alice", "drain", "n0", 'dust "in" [fan]\n<13>1 - forged', "slurm: done", "policy text"
)
# RFC 5424, 6: HEADER SP STRUCTURED-DATA SP MSG, with one element.
LINE = re.compile(
    rb"<(\d{1,3})>1 (\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d{1,6})?Z) ([\x21-\x7e]{1,255}) ([\x21-\x7e]{1,48})"
    rb" ([\x21-\x7e]{1,128}) ([\x21-\x7e]{1,32}) (\[[^ ]+(?: [^ =\]\"]{1,32}=\"(?:[^\"\\\]]|\\[\"\\\]])*\")*\])"
    rb" \xef\xbb\xbf([^\x00-\x1f\x7f]*)"
)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending, "FIRST_S", 0.01)
    monkeypatch.setattr(sending, "MOST_S", 0.05)


def record(number: int = 0) -> Record:
    return of_audit(replace(AUDIT, id=f"a{number}", subject=f"n{number}"))


class Server:
    """Reads lines framed by their octets. `after`: closes each connection after so many reads, for so many times."""

    def __init__(self, context: ssl.SSLContext | None = None) -> None:
        self.lines: list[bytes] = []
        self.cuts = 0
        self._context = context
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                return
            threading.Thread(target=self._read, args=(connection,), daemon=True).start()

    def _read(self, connection: socket.socket) -> None:
        try:
            if self._context is not None:
                connection = self._context.wrap_socket(connection, server_side=True)
            data = b""
            while got := connection.recv(65536):
                if self.cuts:
                    self.cuts -= 1
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # a reset
                    connection.close()
                    return
                data += got
                while b" " in data:
                    size, _, rest = data.partition(b" ")
                    if len(rest) < int(size):
                        break
                    self.lines.append(rest[: int(size)])
                    data = rest[int(size) :]
        except OSError:
            return

    def close(self) -> None:
        self._listening.close()


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


@contextmanager
def logging_to(port: int, transport: str = "tcp", host: str = "127.0.0.1", **settings: object) -> Iterator[Syslog]:
    config = SyslogConfig("siem", f"{host}:{port}", transport)
    made = Syslog(replace(config, **{"timeout_s": 2.0, **settings}), "export.syslog[0]")
    made.sender.start()
    try:
        yield made
    finally:
        made.close()


def subjects(lines: list[bytes]) -> list[str]:
    return [found[1].decode() for line in lines if (found := re.search(rb' subject="([^"]*)"', line))]


def test_a_line_is_of_rfc_5424_and_nothing_in_it_can_begin_another() -> None:
    line = message(of_audit(AUDIT), "collector 1", 13)
    found = LINE.fullmatch(line)
    assert found is not None
    priority, when, host, app, _, name, data, text = found.groups()
    assert (int(priority), when, host, app, name) == (
        13 * 8 + 5, b"2026-09-21T14:13:20.123Z", b"collector_1", b"drover-collector", b"drain",
    )  # fmt: skip
    assert rb'why="dust \"in\" [fan\] <13>1 - forged"' in data
    assert text.decode() == 'operator/alice: drain n0; dust "in" [fan] <13>1 - forged; slurm: done'
    assert b"policy text" not in line


@pytest.mark.parametrize("most", [2048, MOST_BYTES])
def test_a_long_line_is_cut_and_stays_a_line(most: int) -> None:
    for long in (replace(AUDIT, why="ä" * 20_000), replace(AUDIT, detail="x" * 2000)):
        line = message(of_audit(long), "h", 13, most)
        assert len(line) <= most
        assert LINE.fullmatch(line)


def test_lines_arrive_in_order(server: Server) -> None:
    with logging_to(server.port) as log:
        for number in range(250):
            log.take(record(number))
        log.take(Record(NOW_MS, "incident", "opened", "not for a SIEM"))
        wait_until(lambda: len(server.lines) == 250)
    assert subjects(server.lines) == [f"n{number}" for number in range(250)]
    assert all(LINE.fullmatch(line) for line in server.lines)


def test_what_was_cut_off_is_sent_again(server: Server) -> None:
    server.cuts = 2
    with logging_to(server.port) as log:
        log.take(record(0))
        wait_until(lambda: not server.cuts or log.sender.status.sent)
        for number in range(1, 20):
            log.take(record(number))
            time.sleep(0.005)
        wait_until(lambda: "n19" in subjects(server.lines))
    assert log.sender.status.dropped == 0
    assert subjects(server.lines)[-15:] == [f"n{number}" for number in range(5, 20)]


def test_a_server_that_comes_back_gets_all_that_waited() -> None:
    port = free_port()
    with logging_to(port) as log:
        for number in range(50):
            log.take(record(number))
        wait_until(lambda: log.sender.status.failures > 2)
        assert "cannot connect" in log.sender.status.trouble
        server = Server.__new__(Server)
        server.lines, server.cuts, server._context = [], 0, None
        server._listening, server.port = socket.create_server(("127.0.0.1", port)), port
        threading.Thread(target=server._accept, daemon=True).start()
        wait_until(lambda: len(server.lines) == 50)
        server.close()
    assert subjects(server.lines) == [f"n{number}" for number in range(50)]


def test_a_server_that_reads_nothing_holds_up_nobody_and_what_waits_is_bounded() -> None:
    long = replace(record(), text="x" * 7000)
    with socket.create_server(("127.0.0.1", 0), backlog=1) as deaf, logging_to(
        deaf.getsockname()[1], timeout_s=0.2, spool_bytes=4_000_000
    ) as log:  # fmt: skip
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        began = time.monotonic()
        for _ in range(2000):
            log.take(long)
        assert time.monotonic() - began < 100, "each that waited would take 0.2 s"
        status = log.sender.status
        wait_until(lambda: status.failures)
        assert status.trouble == "it has taken nothing within 0.2 s"
        assert status.waiting_bytes <= 4_000_000
        assert status.dropped + status.sent + status.waiting == 2000
        assert status.dropped


def test_a_line_that_cannot_be_written_is_the_only_one_lost(server: Server) -> None:
    made = Syslog(SyslogConfig("siem", f"127.0.0.1:{server.port}", "tcp"), "export.syslog[0]")
    for line in (record(0), record(1), replace(record(2), ts_ms=10**20), record(3)):  # no year has so many digits
        made.take(line)
    made.sender.start()
    wait_until(lambda: not made.sender.status.waiting)
    made.close()
    assert (made.sender.status.sent, made.sender.status.refused) == (3, 1)


def test_udp_is_a_datagram_a_line() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as listening:
        listening.bind(("127.0.0.1", 0))
        listening.settimeout(5)
        with logging_to(listening.getsockname()[1], "udp") as log:
            log.take(record())
            assert LINE.fullmatch(listening.recv(65536))


def test_over_tls_only_a_certificate_that_is_trusted_gets_lines(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    files = fleet.issue(certs.COLLECTOR, "collector")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.paths[1], files.paths[2])
    server = Server(context)
    try:
        with logging_to(server.port, "tls", "localhost") as log:
            log.take(record())
            wait_until(lambda: log.sender.status.failures)
            assert log.sender.status.trouble.startswith("TLS failed: its certificate is not trusted")
            assert server.lines == []
        with logging_to(server.port, "tls", "localhost", ca_file=str(files.paths[0])) as log:
            for number in range(3):
                log.take(record(number))
            wait_until(lambda: len(server.lines) == 3)
    finally:
        server.close()


def test_a_peer_that_knocks_without_end_is_one_line_a_minute_with_a_count() -> None:
    now = [NOW_MS]
    refusals = Refusals(lambda: now[0])
    found = [refusals.of("agent/n0", "denied", "its serial is denied") for _ in range(1000)]
    assert [each is not None for each in found] == [True] + [False] * 999
    now[0] += 60_000
    later = refusals.of("agent/n0", "denied", "its serial is denied")
    assert later is not None
    assert later.attributes["count"] == 1000
    assert later.severity is Severity.WARNING
    for number in range(5000):
        refusals.of(f"agent/{number}", "denied", "")
    assert len(refusals._seen) <= 1000


def test_each_stored_audit_line_and_refused_peer_comes_once(store: Store, server: Server) -> None:
    fleet = Exported()
    config = ExportConfig(syslog=(SyslogConfig("siem", f"127.0.0.1:{server.port}", "tcp"),))
    exports = Exports(config, fleet.index, fleet.registry)
    exports.start(lambda: None)
    store.audit.takers.append(exports.take_audit)
    gate = Gate(secure=True, on_refused=exports.take_refusal)
    store.audit.write([AUDIT])
    store.audit.write([AUDIT, replace(AUDIT, what="drain (too late)")])
    assert gate.refusal_of({}, frozenset())
    wait_until(lambda: exports.statuses()["siem"].sent == 3)
    exports.close()
    assert [re.search(rb'kind="([a-z]+)"', line)[1] for line in server.lines] == [b"audit", b"audit", b"security"]  # type: ignore[index]  # each has one
    assert b"this needs" in server.lines[-1]


def test_settings_that_cannot_work_are_refused() -> None:
    entry = SyslogConfig("a", "h:1", cert_file="/nowhere")
    with pytest.raises(SettingsError, match="give cert_file and key_file"):
        validate_export(ExportConfig(syslog=(entry,)))
    with pytest.raises(SettingsError, match="no such file"):
        validate_export(ExportConfig(syslog=(replace(entry, ca_file="/nowhere/ca.pem"),)))


@pytest.mark.system
@pytest.mark.parametrize("transport", ["tcp", "udp"])
def test_rsyslog_takes_every_field(tmp_path: Path, transport: str) -> None:
    port = free_port()
    (tmp_path / "rsyslog.conf").write_text(
        f'module(load="im{transport}")\ninput(type="im{transport}" port="{port}")\n'
        'template(name="all" type="list") { property(name="pri") constant(value="|") property(name="app-name")'
        ' constant(value="|") property(name="msgid") constant(value="|") property(name="structured-data")'
        ' constant(value="|") property(name="msg") constant(value="\\n") }\n'
        f'*.* action(type="omfile" file="{tmp_path}/out" template="all" asyncWriting="off")\n'
    )
    command = ["rsyslogd", "-n", "-f", str(tmp_path / "rsyslog.conf"), "-i", str(tmp_path / "pid")]
    with (tmp_path / "log").open("w") as output:
        child = subprocess.Popen(command, stdout=output, stderr=output)
    out = tmp_path / "out"
    try:
        if transport == "udp":
            wait_until(lambda: f":{port:04X} " in Path("/proc/net/udp").read_text(), "rsyslog listens")
        with logging_to(port, transport) as log:
            for number in range(20):
                log.take(record(number))
            wait_until(lambda: out.exists() and out.read_text().count("\n") == 20, "all lines")
        pri, app, name, data, text = out.read_text().splitlines()[3].split("|")
        assert (pri, app, name) == (str(13 * 8 + 5), "drover-collector", "drain")
        assert data.startswith('[drover@32473 kind="audit" id="a3" by="operator/alice"')
        assert 'operator/alice: drain n3; dust "in" [fan]' in text
    finally:
        child.terminate()
        child.wait(120)

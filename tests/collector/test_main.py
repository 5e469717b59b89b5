"""The command drover-collector as operators run it: its errors, its start, its stop, and who may ask it."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from drover_collector.main import main
from drover_collector.store import Store, StoreError
from drover_core.model.events import Incident, from_json
from drover_proto import fleet_pb2 as pb
from drover_proto import telemetry_pb2 as wire
from drover_proto.fleet_pb2_grpc import FleetStub
from drover_proto.telemetry_pb2_grpc import TelemetryStub
from testbed.collector_process import START_S, Running, collector, write
from testbed.fleets import batch, block, hello
from testbed.system_processes import free_port


def said(capsys: pytest.CaptureFixture[str]) -> str:
    text = capsys.readouterr().err.strip()
    assert "\n" not in text
    assert text.startswith("drover-collector: ")
    return text


def test_start_answer_and_stop(tmp_path: Path) -> None:
    with collector(write(tmp_path, '[metrics]\nlisten = "127.0.0.1:0"')) as running:
        assert set(running.addresses) == {"agents", "Fleet API", "metrics"}
        with grpc.insecure_channel(running.addresses["Fleet API"]) as channel:
            status = FleetStub(channel).GetStatus(pb.StatusRequest(), timeout=120)
        assert (status.fleet, status.nodes_expected, status.gpus_expected) == ("test", 2, 4)
        assert dict(status.gpus_by_health) == {"unknown": 4}
        with contextlib.closing(socket.create_connection(_address(running.addresses["metrics"]), 20)) as page:
            page.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            text = page.makefile().read()
        assert 'drover_gpus{health="unknown"} 4' in text
        mapped = Path(f"/proc/{running.process.pid}/maps").read_text("utf-8")
        assert "/pyarrow/" in mapped
        assert "/pandas/" not in mapped, "for 31 MiB more, of no use"
        assert running.stop() == 0
    assert any("stopped" in line for line in running.errors)
    assert not any("Traceback" in line for line in running.errors)


def test_an_occupied_port_and_a_store_opened_twice(tmp_path: Path) -> None:
    with collector(write(tmp_path)) as running:
        other = tmp_path / "other"
        other.mkdir()
        for name in ("ingest", "api"):
            address = running.addresses["agents" if name == "ingest" else "Fleet API"]
            code, text = _fails(write(other, **{name: address}))
            assert code == 2
            assert f"{name}.listen: cannot listen on {address}" in text
        code, text = _fails(write(tmp_path))
        assert code == 2
        assert f"the store is open in process {running.process.pid}" in text
        assert running.stop(signal.SIGINT) == 0


HANGING = """
import sys, threading
from drover_collector import app, main
from drover_collector.store import Store
app.STOP_S = 0.5
Store.close = lambda self: threading.Event().wait()
sys.exit(main.main(["run", "--config", sys.argv[1]]))
"""


def test_a_store_that_hangs_does_not_hold_up_a_stop(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", HANGING, str(write(tmp_path))], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("drover-collector is ready: ")
            process.terminate()
            assert process.wait(120) == 1
            assert process.stderr is not None
            assert "not stopped within 0.5 s" in process.stderr.read()
        finally:
            process.kill()


def test_an_event_becomes_an_incident_that_survives_a_kill(tmp_path: Path) -> None:
    config = write(tmp_path)
    with collector(config) as running:
        with grpc.insecure_channel(running.addresses["agents"]) as channel:
            _send_xid(channel)
        first = _incidents(running, wait_for=1)
        running.process.kill()
        running.process.wait()
    with collector(config) as running:
        with grpc.insecure_channel(running.addresses["agents"]) as channel:
            _send_xid(channel)
        assert [i.id for i in _incidents(running, wait_for=1)] == [i.id for i in first]
        assert running.stop() == 0


def test_with_tls_only_viewers_and_operators_are_answered(tmp_path: Path) -> None:
    _certificates(tmp_path)
    tls = f'[tls]\nca = "{tmp_path}/ca.pem"\ncert = "{tmp_path}/collector.pem"\nkey = "{tmp_path}/collector.key"\n'
    with collector(write(tmp_path, tls, api="localhost:0")) as running:
        for name, answered in (("viewer", True), ("operator", True), ("agent", False)):
            credentials = grpc.ssl_channel_credentials(
                (tmp_path / "ca.pem").read_bytes(),
                (tmp_path / f"{name}.key").read_bytes(),
                (tmp_path / f"{name}.pem").read_bytes(),
            )
            with grpc.secure_channel(running.addresses["Fleet API"], credentials) as channel:
                if answered:
                    assert FleetStub(channel).GetStatus(pb.StatusRequest(), timeout=120).fleet == "test"
                    continue
                with pytest.raises(grpc.RpcError) as error:
                    FleetStub(channel).GetStatus(pb.StatusRequest(), timeout=120)
                assert error.value.code() is grpc.StatusCode.PERMISSION_DENIED
                assert "drover://agent/n1" in error.value.details()
                with pytest.raises(grpc.RpcError) as error:
                    list(FleetStub(channel).Export(pb.ExportRequest(), timeout=120))
                assert error.value.code() is grpc.StatusCode.PERMISSION_DENIED
        with grpc.insecure_channel(running.addresses["Fleet API"]) as channel, pytest.raises(grpc.RpcError):
            FleetStub(channel).GetStatus(pb.StatusRequest(), timeout=120)
        assert running.stop() == 0


def test_a_denied_certificate_is_refused_and_its_open_stream_ends(tmp_path: Path) -> None:
    _certificates(tmp_path)
    denied = tmp_path / "denied"
    denied.write_text("# lost laptops\n00\n")
    tls = (
        f'[tls]\nca = "{tmp_path}/ca.pem"\ncert = "{tmp_path}/collector.pem"\nkey = "{tmp_path}/collector.key"\n'
        f'denied_serials_file = "{denied}"\n'
    )

    def channel(name: str, address: str) -> grpc.Channel:
        files = [(tmp_path / file).read_bytes() for file in ("ca.pem", f"{name}.key", f"{name}.pem")]
        return grpc.secure_channel(address, grpc.ssl_channel_credentials(*files))

    def deny(*names: str) -> None:
        lines = [
            subprocess.run(
                ["openssl", "x509", "-noout", "-serial", "-in", f"{name}.pem"],
                cwd=tmp_path, capture_output=True, text=True, check=True,
            ).stdout
            for name in names
        ]  # fmt: skip
        denied.write_text("".join(lines))

    with collector(write(tmp_path, tls, ingest="localhost:0", api="localhost:0")) as running:
        with (
            channel("agent", running.addresses["agents"]) as agent,
            channel("viewer", running.addresses["Fleet API"]) as viewer,
            channel("operator", running.addresses["Fleet API"]) as operator,
        ):
            done = threading.Event()

            def up() -> Iterator[wire.AgentMessage]:
                yield wire.AgentMessage(hello=wire.Hello(node="n1", spool_id="s1", protocol=1, ts_ms=1))
                done.wait(120)

            stream = TelemetryStub(agent).Stream(up(), timeout=120)
            assert next(stream).WhichOneof("kind") == "welcome"
            assert FleetStub(viewer).GetStatus(pb.StatusRequest(), timeout=120).fleet == "test"
            deny("agent", "viewer")
            with pytest.raises(grpc.RpcError) as error:
                list(stream)  # with what its gate was to answer until then
            assert error.value.code() is grpc.StatusCode.PERMISSION_DENIED
            assert "is denied" in error.value.details()
            done.set()
            with pytest.raises(grpc.RpcError) as error:
                FleetStub(viewer).GetStatus(pb.StatusRequest(), timeout=120)
            assert "is denied" in error.value.details()
            again = wire.AgentMessage(hello=wire.Hello(node="n1", spool_id="s1", protocol=1, ts_ms=1))
            with pytest.raises(grpc.RpcError) as error:
                next(TelemetryStub(agent).Stream(iter([again]), timeout=120))
            assert error.value.code() is grpc.StatusCode.PERMISSION_DENIED
            denied.write_text("not a number\n")
            status = FleetStub(operator).GetStatus(pb.StatusRequest(), timeout=120)
            assert any("is not a serial number" in trouble for trouble in status.troubles)
            with pytest.raises(grpc.RpcError):
                FleetStub(viewer).GetStatus(pb.StatusRequest(), timeout=120)
        assert running.stop() == 0


def test_every_setting_of_the_retention_reaches_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, object] = {}

    def opened(url: str, **settings: object) -> None:
        given.update(settings)
        raise StoreError("seen enough")

    monkeypatch.setattr(Store, "open", opened)
    path = write(tmp_path)
    days = {"retention_days": 3, "retention_10s_days": 4, "retention_5min_days": 5}
    lines = "".join(f"{name} = {value}\n" for name, value in days.items())
    path.write_text(path.read_text().replace("[ingest]", f"{lines}[ingest]"))
    assert main(["run", "--config", str(path)]) != 0
    assert {name: given[name] for name in days} == days


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host, int(port)


def _fails(config: Path) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "drover_collector.main", "run", "--config", str(config)],
        capture_output=True, text=True, timeout=START_S, cwd=config.parent,
    )  # fmt: skip
    lines = [line for line in done.stderr.splitlines() if " INFO " not in line]
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("drover-collector: ")
    return done.returncode, lines[0]


def _send_xid(channel: grpc.Channel) -> None:
    """One agent's stream with one event, until it is acknowledged."""
    done = threading.Event()
    hello = wire.Hello(node="n1", spool_id="s1", boot_id="b1", protocol=1, ts_ms=1, agent_version="0")
    event = wire.Event(ts_ms=1_700_000_000_000, gpu=1, kind="xid", code="79", message="fell off the bus", source="nvml")

    def up() -> Iterator[wire.AgentMessage]:
        yield wire.AgentMessage(hello=hello)
        yield wire.AgentMessage(record=wire.Record(seq=1, event=event))
        done.wait(120)

    for message in TelemetryStub(channel).Stream(up(), timeout=120):
        held = {**{s.lane: s.seq for s in message.welcome.held}, **{s.lane: s.seq for s in message.ack.held}}
        if held.get(wire.EVENTS) == 1:
            done.set()
            return


def _incidents(running: Running, wait_for: int) -> list[Incident]:
    found: list[Incident] = []
    with grpc.insecure_channel(running.addresses["Fleet API"]) as channel:
        for _ in range(200):
            reply = FleetStub(channel).ListIncidents(pb.ListIncidentsRequest(), timeout=120)
            found = [from_json(Incident, text) for text in reply.incidents_json]
            if len(found) >= wait_for:
                assert json.loads(reply.incidents_json[0])["cause"] == "xid_79"
                return found
            threading.Event().wait(0.05)
    raise AssertionError(f"{len(found)} incidents, waited for {wait_for}")


def _certificates(folder: Path) -> None:
    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)

    openssl("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2",
            "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=test authority")  # fmt: skip
    names = {
        "collector": "DNS:localhost",
        "viewer": "URI:drover://viewer/console",
        "operator": "URI:drover://operator/alex",
        "agent": "URI:drover://agent/n1",
    }
    for name, alternative in names.items():
        (folder / f"{name}.ext").write_text(f"subjectAltName = {alternative}\n")
        openssl("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout", f"{name}.key",
                "-out", f"{name}.csr", "-subj", f"/CN={name}")  # fmt: skip
        openssl("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days",
                "2", "-out", f"{name}.pem", "-extfile", f"{name}.ext")  # fmt: skip


LEARNING = """
import sys
from drover_collector import main
from drover_collector.pipeline import adopted_nodes, learned_fleet
for watch in (adopted_nodes, learned_fleet):
    watch.LOOK_S, watch.STEADY_S = 0.1, 0.3
sys.exit(main.main(["run", "--config", sys.argv[1]]))
"""


def reporting(ended: threading.Event, node: str = "n0") -> Iterator[wire.AgentMessage]:
    """Yield what an agent of four GPUs sends, and keep its stream open."""
    now_ms = time.time_ns() // 1_000_000
    message = hello(node)
    message.ts_ms = now_ms
    yield wire.AgentMessage(hello=message)
    yield wire.AgentMessage(batch=batch(1, block([(now_ms, gpu, (300.0, 50.0)) for gpu in (1, 2, 3, 4)])))
    ended.wait(START_S)


def test_without_a_fleet_file_the_fleet_is_learned_and_said_to_be(tmp_path: Path) -> None:
    """It starts again, in the same process, when another node has reported for a while."""
    path = write(tmp_path, ingest=f"127.0.0.1:{free_port()}", api=(api := f"127.0.0.1:{free_port()}"))
    path.write_text(path.read_text().replace(f'"{tmp_path}/fleet.toml"', '""'))
    process = subprocess.Popen([sys.executable, "-c", LEARNING, str(path)], stdout=subprocess.PIPE, text=True)
    overdue = threading.Timer(START_S, process.kill)
    overdue.start()
    try:
        assert process.stdout is not None
        agents = process.stdout.readline().partition(" agents on ")[2].partition(",")[0]
        with grpc.insecure_channel(agents) as channel:
            stream = TelemetryStub(channel).Stream(reporting(ended := threading.Event()))
            next(iter(stream))
            assert process.stdout.readline().startswith("drover-collector is ready"), "in the same process"
            ended.set()
        with grpc.insecure_channel(api) as channel:
            status = FleetStub(channel).GetStatus(pb.StatusRequest(), timeout=120, wait_for_ready=True)
        assert (status.nodes_expected, status.gpus_expected, list(status.unknown_nodes)) == (1, 4, [])
        assert any(line.startswith("There is no fleet file: 1 node learned") for line in status.troubles)
        process.terminate()
        assert process.wait(120) == 0
    finally:
        overdue.cancel()
        process.kill()
        process.wait()


def test_an_adopted_node_is_in_the_fleet_after_a_start_of_its_own_and_can_be_given_up(tmp_path: Path) -> None:
    """Until then it is stored, and nothing of it is judged. The same process starts again, each time."""
    path = write(tmp_path, ingest=f"127.0.0.1:{free_port()}", api=(api := f"127.0.0.1:{free_port()}"))
    process = subprocess.Popen([sys.executable, "-c", LEARNING, str(path)], stdout=subprocess.PIPE, text=True)
    overdue = threading.Timer(2 * START_S, process.kill)
    overdue.start()
    try:
        assert process.stdout is not None
        agents = process.stdout.readline().partition(" agents on ")[2].partition(",")[0]
        with grpc.insecure_channel(agents) as channel:
            stream = TelemetryStub(channel).Stream(reporting(ended := threading.Event(), "n7"))
            next(iter(stream))
            with grpc.insecure_channel(api) as asked:
                fleet = FleetStub(asked)
                with pytest.raises(grpc.RpcError, match="no node 'n8' reports"):
                    fleet.AdoptNode(pb.AdoptRequest(node="n8", why="w"), timeout=120)
                before = fleet.ListReporting(pb.ReportingRequest(), timeout=120, wait_for_ready=True).nodes
                request = pb.AdoptRequest(node="n7", rack="r9", gpus=4, why="new", who="anna")
                assert "adopted with 4 GPUs" in fleet.AdoptNode(request, timeout=120).detail
            assert process.stdout.readline().startswith("drover-collector is ready"), "in the same process"
            ended.set()
        with grpc.insecure_channel(api) as asked:
            fleet = FleetStub(asked)
            (row,) = (
                n
                for n in fleet.ListReporting(pb.ReportingRequest(), timeout=120, wait_for_ready=True).nodes
                if n.name == "n7"
            )
            assert (row.in_file, row.adopted, row.rack, row.gpus) == (True, True, "r9", 4)
            assert [(n.in_file, n.adopted) for n in before if n.name == "n7"] == [(False, False)]
            assert fleet.GetStatus(pb.StatusRequest(), timeout=120).nodes_expected == len(before)
            (line,) = fleet.ListAudit(pb.AuditRequest(subject="n7"), timeout=120).audit_json
            assert "adopted into the fleet: 4 GPUs, rack r9" in line
            fleet.AdoptNode(pb.AdoptRequest(node="n7", why="gone", forget=True), timeout=120)
            rows = fleet.ListReporting(pb.ReportingRequest(), timeout=120).nodes
            assert not any(n.adopted for n in rows), "the next start, which comes by itself, is without it"
        process.terminate()
        assert process.wait(120) == 0
    finally:
        overdue.cancel()
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ('[act]\nmode = "approve"\n[act.slurm]\nenabled = true', 'act.mode "approve" acts on nodes'),
        ("", "several collectors on one server"),
    ],
)
def test_a_learned_fleet_is_never_acted_on_and_not_shared(
    more: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, more)
    text = path.read_text().replace(f'"{tmp_path}/fleet.toml"', '""')
    path.write_text(text if more else text.replace(f"chdb://{tmp_path}/store", "clickhouse://drover@server/drover"))
    assert main(["check", "--config", str(path)]) == 2
    assert says in said(capsys)

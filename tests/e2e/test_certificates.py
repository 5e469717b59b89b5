"""Certificates between real processes: renewed on both sides under a running stream, which loses nothing."""

from __future__ import annotations

import http.client
import io
import itertools
import json
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import grpc
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from drover_cli.main import main as drover
from drover_cli.pki.authority import issued
from drover_proto import fleet_pb2 as pb
from drover_proto.fleet_pb2_grpc import FleetStub
from testbed.certificates import Files, Fleet
from testbed.system_processes import free_port
from testbed.waiting import wait_until

NODE = "n0"
AGENT = """
import sys
import drover_agent.uplink.stream
drover_agent.uplink.stream.RENEWAL_CHECK_S = 0.2  # else the test would take a minute
from drover_agent.main import main
sys.exit(main(sys.argv[1:]))
"""
STOP_S = 120
BATCH_S = 3


@contextmanager
def process(log: Path, *words: str) -> Iterator[None]:
    with log.open("w") as output:
        child = subprocess.Popen([sys.executable, *words], stdout=output, stderr=output)
        try:
            yield
            assert child.poll() is None, log.read_text()[-2000:]
        finally:
            child.terminate()
            child.wait(STOP_S)


def status(api: str, files: Files) -> pb.Status | None:
    with grpc.secure_channel(api, files.credentials) as channel:
        try:
            return FleetStub(channel).GetStatus(pb.StatusRequest(), timeout=120)
        except grpc.RpcError:
            return None


def wait_for_data(api: str, files: Files) -> None:
    """Returns when a batch that begins after the call is stored."""
    begin_ms = time.time_ns() // 1_000_000 + BATCH_S * 1000

    def newest() -> int:
        found = status(api, files)
        return found.newest_sample_ms if found else 0

    wait_until(lambda: newest() > begin_ms, "rows arrive")


def moments(api: str, files: Files) -> list[int]:
    """Times of the node's rows in the store, ms, one for each row."""
    found: list[int] = []
    options = (("grpc.max_receive_message_length", 64 << 20),)
    with grpc.secure_channel(api, files.credentials, options) as channel:
        for chunk in FleetStub(channel).Export(pb.ExportRequest(), timeout=120):
            if chunk.file == "node.parquet" and chunk.data:
                table = pa.ipc.open_stream(io.BytesIO(chunk.data)).read_all()
                found += pc.cast(table["ts"], pa.int64()).to_pylist()
    return sorted(found)


def page(port: int, files: Files) -> tuple[int, int, str]:
    """(HTTP status, the collector's serial number, text) of /metrics."""
    context = ssl.create_default_context(cafile=files.ca)
    context.load_cert_chain(files.cert, files.key)
    serials: list[int] = []

    class Connection(http.client.HTTPSConnection):
        def connect(self) -> None:
            super().connect()
            serials.append(int(str((self.sock.getpeercert() or {})["serialNumber"]), 16))

    connection = Connection("localhost", port, context=context, timeout=120)
    connection.request("GET", "/metrics")
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, serials[0], text


def test_both_sides_are_renewed_under_a_running_stream(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path / "ca")
    own, agent, viewer = (
        fleet.issue("collector", "c1", ends_in=timedelta(days=5, hours=1)),
        fleet.issue("agent", NODE, ends_in=timedelta(days=3)),
        fleet.issue("viewer", "console"),
    )
    agents, api, metrics = (f"localhost:{free_port()}" for _ in range(3))
    (tmp_path / "fleet.toml").write_text(f'name = "test"\n[[nodes]]\nnames = "{NODE}"\ngpus = 0\n')
    (tmp_path / "collector.toml").write_text(
        f'fleet = "{tmp_path}/fleet.toml"\n[store]\nurl = "chdb://{tmp_path}/store"\n[ingest]\nlisten = "{agents}"\n'
        f'[api]\nlisten = "{api}"\n[metrics]\nlisten = "{metrics}"\n{own.toml}'
    )
    (tmp_path / "agent.toml").write_text(
        f'node = "{NODE}"\ncollectors = ["{agents}"]\nhardware = "none"\nkmsg_enabled = false\nbatch_s = {BATCH_S}\n'
        f'[spool]\ndir = "{tmp_path}/spool"\n{agent.toml}'
    )
    collector_log, agent_log = tmp_path / "collector.log", tmp_path / "agent.log"
    words = ("-m", "drover_collector.main", "run", "--config", str(tmp_path / "collector.toml"))
    with process(collector_log, *words):
        wait_until(lambda: status(api, viewer), "the collector answers")
        with process(agent_log, "-c", AGENT, "run", "--config", str(tmp_path / "agent.toml")):
            wait_for_data(api, viewer)
            before = status(api, viewer)
            assert before is not None
            assert any("This collector's tls.cert" in line and "ends in 5 days" in line for line in before.troubles)
            wait_until(
                lambda: any("drover://agent/n0 at" in line for line in (status(api, viewer) or before).troubles),
                "the agent's end is reported",
            )
            newer = fleet.issue("collector", "c1"), fleet.issue("agent", NODE)
            port = int(metrics.rpartition(":")[2])
            assert page(port, viewer)[:2] == (200, own.serial)
            code, _, text = page(port, agent)
            assert code == 403
            assert "needs one with a name drover://admin/NAME or drover://operator/NAME or drover://viewer/NAME" in text
            own.renew_from(newer[0])
            wait_until(lambda: page(port, viewer)[1] == newer[0].serial, "the page shows the renewed certificate")
            wait_for_data(api, viewer)
            assert "connecting with it" not in agent_log.read_text()
            assert agent_log.read_text().count("Connected to collector") == 1, "the collector's renewal drops no stream"
            agent.renew_from(newer[1])
            wait_until(lambda: agent_log.read_text().count("Connected to collector") == 2, "the agent connects again")
            wait_for_data(api, viewer)
            wait_until(lambda: (status(api, viewer) or before).troubles == [], "nothing is left to report")
            _, _, text = page(port, viewer)
        found = moments(api, viewer)
    assert len(found) == len(set(found))
    longest = max(later - earlier for earlier, later in itertools.pairwise(found))
    assert longest < BATCH_S * 1000, "no batch is missing: one would leave a gap of BATCH_S more"
    assert "no collector" not in agent_log.read_text()
    assert 'drover_calls_total{service="drover.telemetry.v1.Telemetry"} 2' in text
    assert 'drover_calls_refused_total{reason="wrong role"} 1' in text


@contextmanager
def enrolment(folder: Path) -> Iterator[str]:
    """`drover certs serve` as a process; its address."""
    words = ["certs", "serve", "--dir", str(folder), "--listen", f"localhost:{free_port()}", "--json"]
    with (folder / "serve.log").open("w") as log:
        command = [sys.executable, "-m", "drover_cli.main", *words, "--cert", str(folder / "collector/enrol.pem")]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        assert child.stdout is not None
        try:
            yield str(json.loads(child.stdout.readline())["listen"])
        finally:
            child.terminate()
            child.wait(STOP_S)
            child.stdout.close()


def test_a_node_enrols_by_a_token_and_streams_until_it_is_revoked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By commands alone, as docs/how-to/roll-out.md gives them."""
    ca, tls, denied = tmp_path / "ca", tmp_path / "tls", tmp_path / "denied.txt"
    agents, api = (f"localhost:{free_port()}" for _ in range(2))
    denied.write_text("")
    in_it = ("--dir", str(ca))
    assert drover(("certs", "init", str(ca))) == 0
    for name in ("enrol", "c1"):
        assert drover(("certs", "issue", "collector", name, "--host", "localhost", *in_it)) == 0
    assert drover(("certs", "issue", "viewer", "v", *in_it)) == 0
    viewer = Files(ca / "ca.pem", ca / "viewer/v.pem", ca / "viewer/v.key", issued(ca)[-1])
    (tmp_path / "fleet.toml").write_text(f'name = "test"\n[[nodes]]\nnames = "{NODE}"\ngpus = 0\n')
    (tmp_path / "collector.toml").write_text(
        f'fleet = "{tmp_path}/fleet.toml"\n[store]\nurl = "chdb://{tmp_path}/store"\n[ingest]\nlisten = "{agents}"\n'
        f'[api]\nlisten = "{api}"\n[tls]\nca = "{ca}/ca.pem"\ncert = "{ca}/collector/c1.pem"\n'
        f'key = "{ca}/collector/c1.key"\ndenied_serials_file = "{denied}"\n'
    )
    (tmp_path / "agent.toml").write_text(
        f'node = "{NODE}"\ncollectors = ["{agents}"]\nhardware = "none"\nkmsg_enabled = false\nbatch_s = 1\n'
        f'[spool]\ndir = "{tmp_path}/spool"\n[tls]\nca = "{tls}/ca.pem"\ncert = "{tls}/agent.pem"\n'
        f'key = "{tls}/agent.key"\n'
    )
    capsys.readouterr()
    assert drover(("certs", "token", NODE, "--json", *in_it)) == 0
    (made,) = json.loads(capsys.readouterr().out)
    (tmp_path / "token").write_text(made["token"])
    with enrolment(ca) as server:
        words = ["enrol", "--node", NODE, "--server", server, "--ca-sha256", made["ca_sha256"], "--dir", str(tls)]
        command = [sys.executable, "-m", "drover_agent.main", *words, "--token-file", str(tmp_path / "token")]
        subprocess.run(command, check=True, timeout=120)
    with process(tmp_path / "collector.log", "-m", "drover_collector.main", "run", "--config",
                 str(tmp_path / "collector.toml")):  # fmt: skip
        wait_until(lambda: status(api, viewer), "the collector answers")
        agent_log = tmp_path / "agent.log"
        with process(agent_log, "-m", "drover_agent.main", "run", "--config", str(tmp_path / "agent.toml")):
            wait_until(lambda: (status(api, viewer) or pb.Status()).newest_sample_ms > 0, "rows of the new node")
            assert drover(("certs", "revoke", f"agent/{NODE}", "--file", str(denied), *in_it)) == 0
            wait_until(lambda: "denied" in agent_log.read_text(), "the agent learns that it is denied")


def test_the_command_reads_its_files_again_and_explains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fleet = Fleet(tmp_path / "ca")
    own, past = fleet.issue("collector", "c1"), fleet.issue("viewer", "v", ends_in=timedelta(days=-2))
    api = f"localhost:{free_port()}"
    (tmp_path / "fleet.toml").write_text('name = "test"\n[[nodes]]\nnames = "n0"\ngpus = 8\n')
    (tmp_path / "collector.toml").write_text(
        f'fleet = "{tmp_path}/fleet.toml"\n[store]\nurl = "chdb://{tmp_path}/store"\n'
        f'[ingest]\nlisten = "localhost:0"\n[api]\nlisten = "{api}"\n{own.toml}'
    )
    words = ("-m", "drover_collector.main", "run", "--config", str(tmp_path / "collector.toml"))
    files = ("--ca", str(past.ca), "--cert", str(past.cert), "--key", str(past.key))
    ask = ("status", "--collector", api, *files)
    with process(tmp_path / "collector.log", *words):
        wait_until(lambda: status(api, fleet.issue("viewer", "v")), "the collector answers")
        capsys.readouterr()
        assert drover(ask) == 3
        error = capsys.readouterr().err
        assert f"--cert: the certificate in {past.cert} ended at 20" in error
        assert error.count("\n") == 1
        assert drover(("status", "--collector", api)) == 3
        assert "does it want --ca, --cert and --key?" in capsys.readouterr().err
        past.renew_from(fleet.issue("viewer", "v"))
        assert drover(ask) == 0

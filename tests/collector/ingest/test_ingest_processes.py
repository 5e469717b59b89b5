"""Ingest in a process of its own: killed with -9 between inserts, and with certificates."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from drover_collector.auth.tls import ServerTls
from drover_collector.grpc_h2 import GrpcServer
from drover_collector.ingest.context import IngestContext, IngestListeners
from drover_collector.ingest.service import IngestService
from drover_collector.store import Store
from drover_proto import telemetry_pb2 as pb
from drover_proto import telemetry_pb2_grpc as rpc
from testbed.fleets import T0, batch, block, hello, index_of
from testbed.loop import in_loop

SERVE = """
import asyncio, sys
sys.path.insert(0, sys.argv[2])
from testbed.fleets import T0, index_of
from drover_collector.grpc_h2 import GrpcServer
from drover_collector.ingest.context import IngestContext, IngestListeners
from drover_collector.ingest.limits import Limits
from drover_collector.ingest.service import IngestService
from drover_collector.store import Store

async def main():
    store = Store.open(sys.argv[1], wait_s=20, retention_days=3650)
    now = lambda: T0 + 3_600_000
    listeners = IngestListeners(lambda events: None)
    ingest = IngestService(IngestContext(store, index_of(), listeners, Limits(flush_s=0.01), now))
    server = GrpcServer(ingest.methods())
    print(server.listen("127.0.0.1", 0, None), flush=True)
    await server.start()
    await asyncio.Event().wait()

asyncio.run(main())
"""

COUNT = """
import json, sys
from drover_collector.store import Store
from drover_core.metrics.catalog import Scope
store = Store.open(sys.argv[1], wait_s=20, retention_days=3650)
ts = [row["ts_ms"] for row in store.clients.rows("SELECT toUnixTimestamp64Milli(ts) AS ts_ms FROM gpu_samples FINAL")]
print(json.dumps({"ts": sorted(ts), "events": len(store.events.read(0, 2**43, limit=9999))}))
store.close()  # else the engine crashes with the interpreter's end, now and then
"""
TESTS = str(Path(__file__).parents[2])


def serve(url: str) -> tuple[subprocess.Popen[bytes], int]:
    process = subprocess.Popen([sys.executable, "-c", SERVE, url, TESTS], stdout=subprocess.PIPE)
    assert process.stdout is not None
    return process, int(process.stdout.readline())


class Sender:
    """Sends one row and one event per sequence, as fast as they are taken, and notes what is acknowledged."""

    def __init__(self) -> None:
        self.held = {pb.EVENTS: 0, pb.LIVE: 0}
        self.sent = 0

    async def run(self, port: int, until_held: int) -> None:
        """Returns once that much is acknowledged; meanwhile more is on its way."""
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = rpc.TelemetryStub(channel).Stream()
            await call.write(pb.AgentMessage(hello=hello()))
            welcome = await call.read()
            held = {h.lane: h.seq for h in welcome.welcome.held}
            assert held[pb.EVENTS] >= self.held[pb.EVENTS]  # what is acknowledged is known after the crash
            writer = asyncio.create_task(self._write(call, self.held[pb.LIVE] + 1))
            try:
                while min(self.held.values()) < until_held:
                    message = await asyncio.wait_for(call.read(), 120)
                    assert not message.ack.rejected
                    for entry in message.ack.held:
                        if entry.lane in self.held:
                            self.held[entry.lane] = max(self.held[entry.lane], entry.seq)
            finally:
                writer.cancel()

    async def _write(self, call: Any, seq: int) -> None:
        while True:
            made = batch(seq, block([(T0 + 100 * seq, 1, (300.0, 50.0))]))
            await call.write(pb.AgentMessage(batch=made))
            event = pb.Event(ts_ms=T0 + seq, kind="kernel", code="oom", message="x")
            await call.write(pb.AgentMessage(record=pb.Record(seq=seq, event=event)))
            self.sent = max(self.sent, seq)
            seq += 1


@in_loop
async def test_killed_between_inserts_nothing_acknowledged_is_lost_or_doubled(tmp_path: Path) -> None:
    url = f"chdb://{tmp_path}/store"
    sender = Sender()
    for goal in (20, 60):
        process, port = await asyncio.to_thread(serve, url)
        with process:
            await sender.run(port, goal)
            process.kill()
    done = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", COUNT, url], capture_output=True, check=True, timeout=120
    )
    assert list((tmp_path / "store" / "inserts").rglob("*.arrow")) == []  # nothing is left of what was under way
    found = json.loads(done.stdout)
    seqs = [(ts - T0) // 100 for ts in found["ts"]]
    assert len(seqs) == len(set(seqs))
    assert set(range(1, sender.held[pb.LIVE] + 1)) <= set(seqs) <= set(range(1, sender.sent + 1))
    assert sender.held[pb.EVENTS] <= found["events"] <= sender.sent


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """ca, collector, and agent certificates for n0, made by openssl."""
    if shutil.which("openssl") is None:
        pytest.skip("certificates are made with openssl: apt-get install openssl")
    folder = tmp_path_factory.mktemp("certificates")

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)

    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl("req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=ca", "-days", "2")
    for name, alternative in (
        ("collector", "DNS:localhost"),
        ("agent", "URI:drover://agent/n0"),
        ("viewer", "URI:drover://viewer/n0"),
    ):
        openssl("req", *key, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        (folder / "san").write_text(f"subjectAltName={alternative}")
        openssl(
            "x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial",
            "-out", f"{name}.pem", "-days", "2", "-extfile", "san",
        )  # fmt: skip
    yield folder


@pytest.mark.parametrize(
    ("name", "node", "words"),
    [
        ("agent", "n0", ""),
        ("agent", "n1", "the certificate is for drover://agent/n0; data of node 'n1' needs one for drover://agent/n1"),
        ("viewer", "n0", "the certificate is for drover://viewer/n0"),
        ("collector", "n0", "the certificate has no URI name"),
    ],
)
@in_loop
async def test_a_certificate_speaks_for_its_node_only(
    store: Store, certificates: Path, name: str, node: str, words: str
) -> None:
    read = lambda file: (certificates / file).read_bytes()  # noqa: E731  # short, and used once below
    listeners = IngestListeners(lambda events: None)
    ingest = IngestService(IngestContext(store, index_of(), listeners, now_ms=lambda: T0))
    server = GrpcServer(ingest.methods())
    tls = ServerTls(*(certificates / file for file in ("ca.pem", "collector.pem", "collector.key")))
    port = server.listen("localhost", 0, tls.contexts("ingest.listen"))
    await server.start()
    own = grpc.ssl_channel_credentials(read("ca.pem"), read(f"{name}.key"), read(f"{name}.pem"))
    async with grpc.aio.secure_channel(f"localhost:{port}", own) as channel:
        call = rpc.TelemetryStub(channel).Stream()
        await call.write(pb.AgentMessage(hello=hello(node)))
        if words:
            with pytest.raises(grpc.RpcError):
                await asyncio.wait_for(call.read(), 120)
            assert await call.code() is grpc.StatusCode.PERMISSION_DENIED
            assert words in await call.details()
            assert ingest.stats.rejected == {"not allowed": 1}
            assert node not in ingest.stats.last_seen
        else:
            assert (await asyncio.wait_for(call.read(), 120)).WhichOneof("kind") == "welcome"
        call.cancel()
    await server.stop(0)
    await ingest.close()

"""Two collectors on one server, as processes of their own: one detects, and at no moment do both."""

from __future__ import annotations

import contextlib
import http.server
import json
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from drover_core.model.events import Incident, from_json
from drover_proto import fleet_pb2 as pb
from drover_proto import telemetry_pb2 as wire
from drover_proto.fleet_pb2_grpc import FleetStub
from drover_proto.telemetry_pb2_grpc import TelemetryStub
from testbed.front import Front, front
from testbed.waiting import wait_until

START_S = 300
LEASE_S = 2.0  # a takeover takes at most 1.7 times this, and the restore


class Collector:
    """A collector process that has said it is ready."""

    def __init__(self, folder: Path, name: str, store: str, webhook: int) -> None:
        self.folder, self.name = folder / name, name
        self.folder.mkdir(exist_ok=True)
        (self.folder / "fleet.toml").write_text('name = "t"\n[[nodes]]\nnames = "n[1-9]"\nrack = "r1"\ngpus = 2\n')
        (self.folder / "secret").write_text("whsec_" + "QUFB" * 8)
        (self.folder / "secret").chmod(0o600)
        config = self.folder / "collector.toml"
        config.write_text(
            f'fleet = "{self.folder}/fleet.toml"\n[store]\nurl = "{store}"\n[detect]\nlease_s = {LEASE_S}\n'
            '[ingest]\nlisten = "127.0.0.1:0"\n[api]\nlisten = "127.0.0.1:0"\n'
            f'[[webhooks]]\nname = "ops"\nurl = "http://127.0.0.1:{webhook}/"\nsecret_file = "{self.folder}/secret"\n'
            'min_severity = "info"\n'
        )
        self.log = (self.folder / "log").open("a")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "drover_collector.main", "run", "--config", str(config)],
            stdout=subprocess.PIPE, stderr=self.log, text=True, cwd=self.folder,
        )  # fmt: skip
        assert self.process.stdout is not None
        overdue = threading.Timer(START_S, self.process.kill)
        overdue.start()
        ready = self.process.stdout.readline().strip()
        overdue.cancel()
        assert ready.startswith("drover-collector is ready: "), (self.folder / "log").read_text()[-2000:]
        self.addresses = dict(part.split(" on ") for part in ready.partition(": ")[2].split(", "))
        self.channel = grpc.insecure_channel(self.addresses["Fleet API"])

    def status(self) -> pb.Status:
        return FleetStub(self.channel).GetStatus(pb.StatusRequest(), timeout=120)

    def is_role(self, role: str) -> bool:
        try:
            return self.status().role == role
        except grpc.RpcError:
            return False

    def incidents(self) -> list[Incident]:
        try:
            reply = FleetStub(self.channel).ListIncidents(pb.ListIncidentsRequest(), timeout=120)
        except grpc.RpcError:
            return []
        return [from_json(Incident, text) for text in reply.incidents_json]

    def notified(self, node: str) -> bool:
        """Whether this node's incident is there, and its message delivered and noted so."""
        found = [i.id for i in self.incidents() if i.node == node]
        if not found:
            return False
        detail = FleetStub(self.channel).GetIncident(pb.IncidentRequest(id=found[0]), timeout=120)
        return any("incident.opened delivered" in line for line in detail.notifications)

    def send_xid(self, node: str) -> None:
        """A GPU of this node is broken, of n5 and on in another way: five alike would be one mass event, sent as one.

        Returns when that is acknowledged.
        """
        done = threading.Event()
        hello = wire.Hello(node=node, spool_id="s1", boot_id="b1", protocol=1, ts_ms=1, agent_version="0")
        event = wire.Event(
            ts_ms=1_700_000_000_000,
            gpu=1,
            kind="xid",
            code="79" if node < "n5" else "95",
            message="it broke",
            source="nvml",
        )

        def up() -> Iterator[wire.AgentMessage]:
            yield wire.AgentMessage(hello=hello)
            yield wire.AgentMessage(record=wire.Record(seq=1, event=event))
            done.wait(120)

        with grpc.insecure_channel(self.addresses["agents"]) as channel:
            for message in TelemetryStub(channel).Stream(up(), timeout=120):
                held = {s.lane: s.seq for s in (*message.welcome.held, *message.ack.held)}
                if held.get(wire.EVENTS) == 1:
                    done.set()
                    return

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.channel.close()
        self.log.close()


class Receiver(http.server.BaseHTTPRequestHandler):
    """Takes webhooks."""

    got: list[tuple[str, str]]  # (message id, type)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.got.append((self.headers["webhook-id"], body["type"]))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing on stderr."""


@contextlib.contextmanager
def receiver() -> Iterator[tuple[int, list[tuple[str, str]]]]:
    got: list[tuple[str, str]] = []
    kind = type("Kind", (Receiver,), {"got": got})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), kind) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1], got
        server.shutdown()


class Two:
    """The collectors a and b, each at a port of the front of its own."""

    def __init__(self, folder: Path, server: Front, webhook: int) -> None:
        self._folder, self.server, self._webhook = folder, server, webhook
        self.a = self.start("a")
        self.b = self.start("b")

    def start(self, name: str) -> Collector:
        return Collector(self._folder, name, self.server.url("fleet", "ab".index(name)), self._webhook)

    def become(self, collector: Collector, role: str) -> None:
        wait_until(lambda: collector.is_role(role), f"{collector.name} is {role}")

    def reports(self, through: Collector, node: str, *, to: Collector) -> None:
        """An event that one took in becomes an incident at the other, which both then show."""
        through.send_xid(node)
        wait_until(lambda: to.notified(node), f"{to.name} shows the incident of {node}, and that it was sent")

    def check_effects(self) -> list[int]:
        """No effect of one holder after another has had one, by a later lease; gives the leases in their order."""
        newest, owner, leases = 0, "", []
        for insert in self.server.inserts():
            if not insert.comment:
                continue
            _, holder, token = insert.comment.split()
            assert int(token) >= newest or holder == owner, f"{insert}: after {owner} had lease {newest}"
            if holder != owner:
                leases.append(int(token))
            newest, owner = max(newest, int(token)), holder
        assert leases == sorted(leases)
        return leases


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Two]:
    with front(tmp_path, "--ports", "2") as server, receiver() as (port, got):
        both = Two(tmp_path, server, port)
        try:
            yield both
            # Whatever happened: nothing was sent twice.
            assert {count for _, count in Counter(got).items()} <= {1}, got
            opened = [id_ for id_, kind in got if kind == "incident.opened"]
            assert len(opened) == len(set(opened))
        finally:
            both.a.end()
            both.b.end()


def test_killed_stopped_and_cut_off_one_always_takes_over(two: Two) -> None:
    two.become(two.a, "active")
    two.become(two.b, "standby")
    two.reports(two.b, "n1", to=two.a)
    two.reports(two.a, "n2", to=two.b)

    two.a.signal(signal.SIGKILL)  # with what it had not sent to anybody
    two.a.process.wait()
    two.b.send_xid("n3")
    two.become(two.b, "active")
    wait_until(lambda: all(two.b.notified(node) for node in ("n1", "n2", "n3")), "b took all over")
    two.a.end()
    two.a = two.start("a")
    two.become(two.a, "standby")

    two.b.signal(signal.SIGSTOP)  # and wakes up when another has taken over
    two.become(two.a, "active")
    two.reports(two.a, "n4", to=two.a)
    two.b.signal(signal.SIGCONT)
    two.become(two.b, "standby")
    two.reports(two.b, "n5", to=two.a)

    two.server.command("cut 0")  # a no longer reaches its store
    two.become(two.b, "active")
    two.become(two.a, "standby")
    wait_until(lambda: any("store does not answer" in t for t in two.a.status().troubles), "a says so")
    two.reports(two.b, "n6", to=two.b)
    two.server.command("mend 0")
    two.reports(two.a, "n7", to=two.b)

    two.b.signal(signal.SIGTERM)  # hands over
    assert two.b.process.wait(120) == 0
    two.become(two.a, "active")
    assert len(two.check_effects()) >= 4
    incidents = two.a.incidents()
    assert sorted(i.node or "" for i in incidents) == [f"n{k}" for k in range(1, 8)]

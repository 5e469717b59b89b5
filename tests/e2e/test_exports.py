"""A real collector with exporters: its start, an XID and what it decides reach a SIEM and an OTLP receiver."""

from __future__ import annotations

import gzip
import socket
import threading
import time
from pathlib import Path

import grpc
import urllib3
from opentelemetry.proto.collector.logs.v1 import logs_service_pb2

from drover_proto import telemetry_pb2 as pb
from testbed.fleets import hello
from testbed.ingest import event
from testbed.receivers import HttpReceiver, http_receiver
from testbed.system_processes import free_port, running
from testbed.waiting import wait_until

METHOD = "/drover.telemetry.v1.Telemetry/Stream"


def send_xid(address: str) -> None:
    messages = [pb.AgentMessage(hello=hello("n0")),
                pb.AgentMessage(record=event(1, time.time_ns() // 1_000_000, gpu=0))]  # fmt: skip
    with grpc.insecure_channel(address) as channel:
        stream = channel.stream_stream(METHOD, response_deserializer=pb.CollectorMessage.FromString)
        call = stream(iter([message.SerializeToString() for message in messages]), timeout=120)
        assert any(lane.seq for message in call for lane in message.ack.held)


def names_in(receiver: HttpReceiver) -> set[str]:
    return {
        log.event_name
        for request in receiver.got if request.path == "/v1/logs"
        for resource in logs_service_pb2.ExportLogsServiceRequest.FromString(
            gzip.decompress(request.body)
        ).resource_logs
        for scope in resource.scope_logs for log in scope.log_records
    }  # fmt: skip


def test_audit_events_and_incidents_leave_a_real_collector(tmp_path: Path) -> None:
    agents, api, page = (free_port() for _ in range(3))
    lines: list[bytes] = []
    siem = socket.create_server(("127.0.0.1", 0))

    def read() -> None:
        connection, _ = siem.accept()
        while got := connection.recv(65536):
            lines.append(got)

    threading.Thread(target=read, daemon=True).start()
    (tmp_path / "fleet.toml").write_text('[[nodes]]\nnames = "n[0-3]"\nsku = "H100-SXM"\ngpus = 4\n')
    with http_receiver() as receiver:
        (tmp_path / "collector.toml").write_text(
            f'fleet = "{tmp_path}/fleet.toml"\n[store]\nurl = "chdb://{tmp_path}/store"\n'
            f'[ingest]\nlisten = "127.0.0.1:{agents}"\n[api]\nlisten = "127.0.0.1:{api}"\n'
            f'[metrics]\nlisten = "127.0.0.1:{page}"\n[export.page]\nnames = ["drover", "dcgm"]\n'
            f'[[export.otlp]]\nname = "otel"\nurl = "{receiver.url}"\n'
            f'[[export.remote_write]]\nname = "prom"\nurl = "http://127.0.0.1:9/"\n'
            f'[[export.syslog]]\nname = "siem"\naddress = "127.0.0.1:{siem.getsockname()[1]}"\ntransport = "tcp"\n'
        )
        with running(tmp_path, "drover_collector.main", "run", "--config", str(tmp_path / "collector.toml")) as log:
            wait_until(lambda: " is ready: " in log.read_text(), "it starts")
            wait_until(lambda: b'kind="audit"' in b"".join(lines), "the policy in force is a line of the audit")
            send_xid(f"127.0.0.1:{agents}")
            wanted = {"drover.event.xid", "drover.incident.opened", "drover.audit.policy"}
            wait_until(lambda: wanted <= names_in(receiver), "what happened is logged")
            for path in ("/metrics/fleet", "/metrics/dcgm"):
                assert urllib3.request("GET", f"http://127.0.0.1:{page}{path}", timeout=120).status == 200
            own = urllib3.request("GET", f"http://127.0.0.1:{page}/metrics", timeout=120).data.decode()
            assert 'drover_export_sent_total{exporter="otel-logs"}' in own
            assert 'drover_export_sent_total{exporter="siem"}' in own
    siem.close()

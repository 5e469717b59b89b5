"""OTLP: a receiver built on opentelemetry-proto decodes what comes, over HTTP and gRPC."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import duration_pb2
from opentelemetry.proto.collector.logs.v1 import logs_service_pb2, logs_service_pb2_grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.logs.v1.logs_pb2 import SEVERITY_NUMBER_ERROR, SEVERITY_NUMBER_INFO

from drover_collector.exporters import sending
from drover_collector.exporters.exports import Exports
from drover_collector.exporters.otlp import Otlp, retry_info
from drover_collector.exporters.records import of_audit, of_incident
from drover_collector.exporters.settings import (
    HARDWARE,
    ExportConfig,
    OtlpConfig,
    RemoteWriteConfig,
    validate_export,
)
from drover_core.metrics.series import GPU_METRICS
from drover_core.model.events import Audit, Decision, Event, EventKind, RecommendedAction
from drover_core.settings import SettingsError
from testbed.exported import END_MS, NAN, Exported, silent
from testbed.monitoring import INCIDENT
from testbed.receivers import HttpReceiver, Reply, http_receiver
from testbed.waiting import wait_until

AUDIT = Audit("a1", END_MS, "operator/alice", "drain", "n0", "dust")
SECRET = "s3cret-token-of-the-test"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending, "FIRST_S", 0.01)
    monkeypatch.setattr(sending, "MOST_S", 0.05)


@pytest.fixture
def fleet() -> Exported:
    return Exported()


class Service(metrics_service_pb2_grpc.MetricsServiceServicer, logs_service_pb2_grpc.LogsServiceServicer):  # type: ignore[misc]  # untyped
    """A gRPC receiver; `failing`: answers with these codes first."""

    def __init__(self) -> None:
        self.got: list[Any] = []
        self.tokens: list[str] = []
        self.failing: list[grpc.StatusCode] = []

    def Export(self, request: Any, context: Any) -> Any:
        self.tokens.append(dict(context.invocation_metadata()).get("authorization", ""))
        if self.failing:
            context.abort(self.failing.pop(0), f"no, {SECRET}")
        self.got.append(request)
        is_logs = isinstance(request, logs_service_pb2.ExportLogsServiceRequest)
        return (
            logs_service_pb2.ExportLogsServiceResponse() if is_logs
            else metrics_service_pb2.ExportMetricsServiceResponse()
        )  # fmt: skip


@contextmanager
def grpc_receiver(host: str = "127.0.0.1") -> Iterator[tuple[Service, str]]:
    service, server = Service(), grpc.server(ThreadPoolExecutor(2))
    metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(service, server)
    logs_service_pb2_grpc.add_LogsServiceServicer_to_server(service, server)
    port = server.add_insecure_port(f"{host}:0")
    server.start()
    try:
        yield service, f"http://{host}:{port}"
    finally:
        server.stop(None).wait()


@contextmanager
def sending_to(url: str, protocol: str = "http", **settings: object) -> Iterator[Otlp]:
    made = Otlp(replace(OtlpConfig("otel", url, protocol), **{"timeout_s": 2.0, **settings}), "export.otlp[0]")
    for sender in made.senders:
        sender.start()
    try:
        yield made
    finally:
        made.close()


def over_http(receiver: HttpReceiver) -> list[Any]:
    kinds = {
        "/v1/metrics": metrics_service_pb2.ExportMetricsServiceRequest,
        "/v1/logs": logs_service_pb2.ExportLogsServiceRequest,
    }
    assert all(r.headers["content-type"] == "application/x-protobuf" for r in receiver.got)
    return [kinds[r.path].FromString(gzip.decompress(r.body)) for r in receiver.got]


def facts(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}


def points(requests: list[Any]) -> list[tuple[str, str, Any, dict[str, Any]]]:
    """Host, name of the metric, point and its attributes."""
    found = []
    for request in requests:
        for resource in request.resource_metrics:
            host = facts(resource.resource.attributes)["host.name"]
            for scope in resource.scope_metrics:
                assert scope.scope.name == "drover"
                for metric in scope.metrics:
                    for point in getattr(metric, metric.WhichOneof("data")).data_points:
                        found.append((host, metric.name, point, facts(point.attributes)))
    return found


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_metrics_have_the_names_of_the_conventions(fleet: Exported, protocol: str) -> None:
    bucket = fleet.bucket(jobs=["train", "", "", ""], power_w=[600.5, 601, NAN, 603], energy_j=[10.0, 11, 12, 13],
                          ecc_dram_corrected=[1.0, 2, 3, 4], framebuffer_used_bytes=[2.0**30] * 4)  # fmt: skip
    with grpc_receiver() as (service, address), http_receiver() as receiver:
        url = address if protocol == "grpc" else receiver.url
        with sending_to(url, protocol, labels=("cluster=alpha",)) as otlp:
            otlp.take(bucket, fleet.identities(bucket), fleet.xids)
            wait_until(lambda: otlp.metrics.status.sent == 27)
        requests = service.got if protocol == "grpc" else over_http(receiver)
    found = points(requests)
    assert len(found) == 27
    power = {(host, at["hw.id"]): point.as_double for host, name, point, at in found if name == "hw.power"}
    assert power == {("n0", "GPU-n0-0"): 600.5, ("n0", "GPU-n0-1"): 601, ("n1", "GPU-n1-1"): 603}
    point, at = next((p, a) for _, name, p, a in found if name == "hw.gpu.utilization")
    assert point.time_unix_nano == END_MS * 1_000_000
    assert at == {
        "hw.id": "GPU-n0-0", "hw.name": "gpu0", "hw.model": 'NVIDIA "H100"\\80GB', "hw.vendor": "NVIDIA",
        "drover.job": "train", "hw.type": "gpu", "hw.gpu.task": "general",
    }  # fmt: skip
    assert {a["hw.sensor_location"] for _, n, _, a in found if n == "hw.temperature"} == {"gpu", "memory"}
    assert {a["error.type"] for _, n, _, a in found if n == "hw.errors"} == {"dram_corrected"}
    resource = requests[0].resource_metrics[0]
    assert facts(resource.resource.attributes) == {
        "service.name": "drover", "host.name": "n0", "cluster": "alpha", "drover.rack": "r0",
    }  # fmt: skip
    metrics = {m.name: m for m in resource.scope_metrics[0].metrics}
    assert (metrics["hw.energy"].unit, metrics["hw.energy"].sum.is_monotonic) == ("J", True)
    assert metrics["hw.energy"].sum.aggregation_temporality == 2  # cumulative
    assert (metrics["hw.gpu.memory.usage"].unit, metrics["hw.gpu.memory.usage"].sum.is_monotonic) == ("By", False)
    assert metrics["hw.power"].WhichOneof("data") == "gauge"


def test_every_metric_of_the_catalog_can_be_sent_and_a_metric_stands_once_in_a_resource(fleet: Exported) -> None:
    bucket = fleet.bucket(**{name: [1.0, 0, 1, 0] for name in GPU_METRICS})
    with http_receiver() as receiver:
        with sending_to(receiver.url, metrics=GPU_METRICS) as otlp:
            otlp.take(bucket, fleet.identities(bucket), fleet.xids)
            wait_until(lambda: otlp.metrics.status.sent == 4 * len(GPU_METRICS))
        for request in over_http(receiver):
            for resource in request.resource_metrics:
                names = [metric.name for metric in resource.scope_metrics[0].metrics]
                assert len(names) == len(set(names))
                assert "drover.gpu.sm_clock_mhz" in names


def test_a_gpu_that_falls_silent_has_a_point_without_a_value_once(fleet: Exported) -> None:
    with http_receiver() as receiver:
        with sending_to(receiver.url, metrics=("power_w",)) as otlp:
            for number in range(3):
                bucket = fleet.bucket(END_MS + number * 30_000)
                bucket = silent(bucket, 2) if number else bucket
                otlp.take(bucket, fleet.identities(bucket), fleet.xids)
            wait_until(lambda: not otlp.metrics.status.waiting)
        own = [point for _, _, point, at in points(over_http(receiver)) if at["hw.id"] == "GPU-n1-0"]
    assert [(point.WhichOneof("value"), point.flags) for point in own] == [("as_double", 0), (None, 1)]


def test_events_incidents_decisions_and_audit_are_logs_and_each_comes_once(fleet: Exported) -> None:
    decision = Decision("d1", "i1", END_MS, "n0", RecommendedAction.DRAIN, "observe", "would_act", "rule 1", "because")
    event = Event("e1", END_MS, "n0", 1, EventKind.XID, "79", "GPU has fallen off the bus")
    with http_receiver() as receiver:
        config = ExportConfig(otlp=(OtlpConfig("otel", receiver.url, signals=("logs",)),))
        exports = Exports(config, fleet.index, fleet.registry)
        exports.start(lambda: None)
        for _ in range(2):  # as after a store that failed
            exports.take_found([INCIDENT], [decision])
            exports.take_audit([AUDIT])
        exports.take_events([event])
        exports.take_refusal("agent/n9", "denied", "its serial is denied")
        wait_until(lambda: exports.statuses()["otel-logs"].sent == 5)
        exports.close()
        logs = [
            log for request in over_http(receiver) for resource in request.resource_logs
            for scope in resource.scope_logs for log in scope.log_records
        ]  # fmt: skip
    by_name = {log.event_name: log for log in logs}
    assert len(logs) == len(by_name) == 5
    assert set(by_name) == {
        "drover.incident.opened", "drover.decision.would_act", "drover.audit.drain", "drover.event.xid",
        "drover.security.refused",
    }  # fmt: skip
    opened = by_name["drover.incident.opened"]
    assert (opened.severity_number, opened.body.string_value) == (SEVERITY_NUMBER_ERROR, "summary")
    assert facts(opened.attributes)["drover.incident.gpu"] == 0
    assert facts(opened.attributes)["drover.incident.confidence"] == 0.9
    xid = by_name["drover.event.xid"]
    assert (xid.severity_number, xid.time_unix_nano) == (SEVERITY_NUMBER_INFO, END_MS * 1_000_000)
    assert facts(xid.attributes)["drover.event.code"] == "79"
    assert facts(by_name["drover.audit.drain"].attributes)["drover.audit.by"] == "operator/alice"


def test_over_grpc_what_fails_is_sent_again_and_what_is_invalid_is_given_up(
    fleet: Exported, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.write_text(SECRET)
    token.chmod(0o600)
    with grpc_receiver() as (service, address):
        service.failing = [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNAUTHENTICATED]
        with sending_to(address, "grpc", token_file=str(token)) as otlp:
            otlp.take_record(of_audit(AUDIT))
            wait_until(lambda: otlp.logs.status.sent == 1)
            assert otlp.logs.status.failures == 2
            service.failing = [grpc.StatusCode.INVALID_ARGUMENT]
            otlp.take_record(of_audit(AUDIT))
            otlp.take_record(of_incident(INCIDENT))
            wait_until(lambda: not otlp.logs.status.waiting)
            assert otlp.logs.status.refused >= 1
    assert set(service.tokens) == {f"Bearer {SECRET}"}
    assert "UNAVAILABLE" in caplog.text
    assert SECRET not in caplog.text


def test_over_grpc_nobody_there_and_a_receiver_that_hangs_hold_up_nothing(fleet: Exported) -> None:
    hangs = threading.Event()

    class Hanging(Service):
        def Export(self, request: Any, context: Any) -> Any:
            hangs.wait(120)
            return super().Export(request, context)

    with sending_to("http://127.0.0.1:9", "grpc", timeout_s=0.3) as otlp:
        otlp.take_record(of_audit(AUDIT))
        wait_until(lambda: otlp.logs.status.failures)
        assert otlp.logs.status.waiting == 1
    server = grpc.server(ThreadPoolExecutor(2))
    logs_service_pb2_grpc.add_LogsServiceServicer_to_server(Hanging(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with sending_to(f"http://127.0.0.1:{port}", "grpc", timeout_s=0.2) as otlp:
        otlp.take_record(of_audit(AUDIT))
        wait_until(lambda: otlp.logs.status.failures)
        assert otlp.logs.status.trouble == "answered DEADLINE_EXCEEDED"
        hangs.set()
        wait_until(lambda: otlp.logs.status.sent == 1)
    server.stop(None).wait()


def test_points_that_a_receiver_leaves_out_of_what_it_takes_are_said(fleet: Exported) -> None:
    partial = metrics_service_pb2.ExportMetricsServiceResponse()
    partial.partial_success.rejected_data_points = 3
    partial.partial_success.error_message = f"too old {SECRET}"
    bucket = fleet.bucket()
    with http_receiver() as receiver:
        receiver.replies = [Reply(200, partial.SerializeToString()), Reply(200, b"\xff\xff no protobuf")]
        with sending_to(receiver.url) as otlp:
            for _ in range(2):
                otlp.take(bucket, fleet.identities(bucket), fleet.xids)
            wait_until(lambda: not otlp.metrics.status.waiting)
            assert otlp.metrics.status.refused == 3
            assert otlp.metrics.status.sent == 2 * sum(key in bucket.gpu for key in HARDWARE) * 4 - 3
    assert len(receiver.got) == 2


@pytest.mark.parametrize(
    "settings, said",
    [
        ({"url": "http://user:hunter2@otel:4318"}, "must not hold a user or password"),
        ({"token_file": "/nowhere/token"}, "No such file"),
        ({"ca_file": "/nowhere/ca.pem"}, "no such file"),
    ],
)
def test_settings_that_cannot_work_are_refused_at_the_start(settings: dict[str, str], said: str) -> None:
    with pytest.raises(SettingsError, match=said) as raised:
        validate_export(ExportConfig(otlp=(replace(OtlpConfig("a", "http://otel:4318"), **settings),)))
    assert "hunter2" not in str(raised.value)


def test_no_two_exporters_have_one_name_on_the_metrics_page() -> None:
    good = OtlpConfig("a", "http://otel:4318")
    validate_export(ExportConfig(otlp=(good, replace(good, name="b"))))
    with pytest.raises(SettingsError, match="twice"):
        validate_export(ExportConfig(otlp=(good, good)))
    with pytest.raises(SettingsError, match="twice"):  # its queues are called so
        validate_export(ExportConfig(remote_write=(RemoteWriteConfig("a-logs", "http://prom/"),), otlp=(good,)))


def test_a_metric_that_is_listed_twice_is_sent_once(fleet: Exported) -> None:
    bucket = fleet.bucket()
    with http_receiver() as receiver, sending_to(receiver.url, metrics=("power_w", "power_w")) as otlp:
        otlp.take(bucket, fleet.identities(bucket), fleet.xids)
        wait_until(lambda: not otlp.metrics.status.waiting)
        assert (otlp.metrics.status.sent, otlp.metrics.status.refused) == (4, 0)


def test_grpc_reaches_an_address_of_ipv6(fleet: Exported) -> None:
    with grpc_receiver("[::1]") as (service, address), sending_to(address, "grpc") as otlp:
        otlp.take_record(of_audit(AUDIT))
        wait_until(lambda: otlp.logs.status.sent or otlp.logs.status.failures)
        assert len(service.got) == 1


def test_over_grpc_a_request_that_is_too_large_does_not_keep_back_all_after_it(fleet: Exported) -> None:
    with grpc_receiver() as (service, address), sending_to(address, "grpc") as otlp:
        service.failing = [grpc.StatusCode.RESOURCE_EXHAUSTED]
        otlp.take_record(of_audit(AUDIT))
        wait_until(lambda: not otlp.logs.status.waiting)
        assert (otlp.logs.status.refused, otlp.logs.status.failures) == (1, 0)


def test_over_grpc_a_receiver_that_says_when_gets_it_again_then() -> None:
    duration = duration_pb2.Duration(seconds=2, nanos=500_000_000).SerializeToString()
    delay = b"\x0a" + bytes([len(duration)]) + duration
    kind = b"type.googleapis.com/google.rpc.RetryInfo"
    any_ = b"\x0a" + bytes([len(kind)]) + kind + b"\x12" + bytes([len(delay)]) + delay
    status = b"\x08\x08\x1a" + bytes([len(any_)]) + any_
    assert retry_info([("a", "b"), ("grpc-status-details-bin", status)]) == 2.5
    assert retry_info([("grpc-status-details-bin", status[:-3])]) is None
    assert retry_info([("grpc-status-details-bin", b"\x08\x08")]) is None


def test_the_default_metrics_all_have_a_name_of_the_conventions() -> None:
    from drover_collector.exporters.otlp_names import instrument_of

    assert all(instrument_of(metric).name.startswith("hw.") for metric in HARDWARE)

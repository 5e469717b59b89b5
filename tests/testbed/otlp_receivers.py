"""A receiver of OTLP built on opentelemetry-proto, over gRPC, what sends to one, and a reader of what came."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import grpc
from opentelemetry.proto.collector.logs.v1 import logs_service_pb2, logs_service_pb2_grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc

from drover_collector.exporters.otlp import Otlp
from drover_collector.exporters.settings import OtlpConfig

SECRET = "s3cret-token-of-the-test"


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

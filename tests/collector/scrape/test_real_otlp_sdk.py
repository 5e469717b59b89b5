"""The official OpenTelemetry SDK for Python sends to a whole collector, whose API then answers for the node.

One program sends over HTTP, another over gRPC, each for a node of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

import grpc
import pytest
from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter as GrpcExporter
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricExporter, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource

from drover_proto import fleet_methods as methods
from drover_proto import fleet_pb2 as pb
from testbed import collector_process
from testbed.waiting import wait_until


def _uuid(node: str, gpu: int) -> str:
    return f"GPU-0000000{gpu}-1111-2222-3333-4444444444{node}"


def _meters(exporter: MetricExporter, node: str) -> MeterProvider:
    """Return what a program on a GPU node does to report its GPUs by the conventions."""
    reader = PeriodicExportingMetricReader(exporter, export_interval_millis=600_000)  # the test asks for each
    provider = MeterProvider([reader], Resource.create({"host.name": node}))
    meter = provider.get_meter("gpus")

    def each(values: Iterable[float]) -> list[Observation]:
        return [
            Observation(
                value, {"hw.id": _uuid(node, n), "hw.type": "gpu", "hw.name": f"gpu{n}", "hw.model": "NVIDIA H100"}
            )
            for n, value in enumerate(values)
        ]

    def power(_: CallbackOptions) -> list[Observation]:
        return each((300.5, 688.25))

    def used(_: CallbackOptions) -> list[Observation]:
        return each((1e9, 7e10))

    meter.create_observable_gauge("hw.power", [power], "W")
    meter.create_observable_up_down_counter("hw.gpu.memory.usage", [used], "By")
    meter.create_counter("gpu.jobs").add(1)  # nobody wants it
    meter.create_histogram("hw.gpu.utilization", "1").record(0.5, {"hw.id": _uuid(node, 0)})  # no gauge: it is rejected
    return provider


def test_the_official_sdk_feeds_nodes_without_an_agent(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = '[rest]\nlisten = "127.0.0.1:0"\n[rest.otlp]\nenabled = true\ngrpc = true\n'
    with (
        collector_process.collector(collector_process.write(tmp_path, settings)) as running,
        closing(grpc.insecure_channel(running.addresses["Fleet API"])) as channel,
    ):
        url, gzip = f"http://{running.addresses['REST']}/v1/metrics", grpc.Compression.Gzip
        exporters: dict[str, MetricExporter] = {
            "n1": OTLPMetricExporter(url, compression=Compression.Gzip, timeout=120),
            "n2": GrpcExporter(running.addresses["agents"], insecure=True, compression=gzip, timeout=120),
        }
        providers = {name: _meters(exporter, name) for name, exporter in exporters.items()}

        def node(name: str) -> pb.NodeDetail:
            providers[name].force_flush()
            return methods.GET_NODE.of(channel)(pb.NodeRequest(node=name), timeout=120)

        def values(name: str, metric: str) -> list[float]:
            return [v.value for gpu in node(name).gpus for v in gpu.values if v.metric == metric and v.present]

        try:
            for name in providers:
                with caplog.at_level(logging.WARNING, "opentelemetry"):
                    wait_until(lambda name=name: len(values(name, "power_w")) == 2, f"{name}'s GPUs have values")
                assert values(name, "power_w") == [pytest.approx(value, rel=1e-3) for value in (300.5, 688.25)]
                used = [pytest.approx(value, rel=1e-3) for value in (1e9, 7e10)]
                assert values(name, "framebuffer_used_bytes") == used
                assert not values(name, "gpu_util_ratio")
                assert node(name).row.agent_version.endswith("(scraped)")

            def state() -> pb.ScrapingState:
                return methods.GET_SYSTEM.of(channel)(pb.SystemRequest(), timeout=120).scraping

            wait_until(lambda: bool(state().blind) and bool(state().unused), "it is said who is blind")
            assert any("hw.* has no name for it" in text for text in state().blind)
            assert any("histogram" in why for why in state().unused)
            assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
        finally:
            for provider in providers.values():
                provider.shutdown()

"""A collector of OpenTelemetry from elsewhere passes on what Drover sends, and nothing of it is lost or changed.

rotel decodes each request and encodes it again, with its own copy of the protocol. What stands behind it gets what it
gets straight from Drover.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from drover_collector.exporters.otlp import Otlp
from drover_collector.exporters.records import of_audit, of_event, of_incident
from drover_core.metrics.series import GPU_METRICS
from drover_core.model.events import Audit, Event, EventKind
from testbed.exported import END_MS, NAN, Exported, silent
from testbed.monitoring import INCIDENT
from testbed.otlp_receivers import facts, grpc_receiver, points, sending_to
from testbed.rotel import rotel
from testbed.waiting import wait_until

RECORDS = (
    of_audit(Audit("a1", END_MS, "operator/älice", "drain", "n0", 'dust, "much"\nof it')),
    of_incident(INCIDENT),
    of_event(Event("e1", END_MS, "n0", 1, EventKind.XID, "79", "GPU has fallen off the bus")),
)


def send(fleet: Exported, otlp: Otlp) -> int:
    """Send three buckets of all metrics, with absent values and a GPU that falls silent; and logs. Return how many."""
    for number in range(3):
        bucket = fleet.bucket(END_MS + number * 30_000, jobs=["train", "", "", ""],
                              **{name: [1.5, 0.0, NAN, 2.0**53] for name in GPU_METRICS})  # fmt: skip
        bucket = silent(bucket, 3) if number else bucket
        otlp.take(bucket, fleet.identities(bucket), fleet.xids)
    for record in RECORDS:
        otlp.take_record(record)
    wait_until(lambda: not otlp.metrics.status.waiting and not otlp.logs.status.waiting)
    assert (otlp.metrics.status.refused, otlp.logs.status.refused) == (0, 0)
    assert otlp.logs.status.sent == len(RECORDS)
    return otlp.metrics.status.sent


def as_points(got: list[Any]) -> Counter[str]:
    """Each point with all that the protocol says of it."""
    metrics = {
        metric.name: (metric.unit, metric.WhichOneof("data"), metric.sum.is_monotonic,
                      metric.sum.aggregation_temporality)
        for request in got if hasattr(request, "resource_metrics") for resource in request.resource_metrics
        for scope in resource.scope_metrics for metric in scope.metrics
    }  # fmt: skip
    return Counter(
        repr((host, name, metrics[name], point.time_unix_nano, point.start_time_unix_nano, point.WhichOneof("value"),
              point.as_double, point.as_int, point.flags, sorted(attributes.items())))
        for host, name, point, attributes in points([r for r in got if hasattr(r, "resource_metrics")])
    )  # fmt: skip


def as_logs(got: list[Any]) -> Counter[str]:
    return Counter(
        repr((sorted(facts(resource.resource.attributes).items()), log.time_unix_nano, log.severity_number,
              log.severity_text, log.body.string_value, log.event_name, sorted(facts(log.attributes).items())))
        for request in got if hasattr(request, "resource_logs") for resource in request.resource_logs
        for scope in resource.scope_logs for log in scope.log_records
    )  # fmt: skip


@pytest.mark.system
@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_collector_of_opentelemetry_passes_on_all_that_is_sent(tmp_path: Path, protocol: str) -> None:
    with grpc_receiver() as (straight, address), sending_to(address, "grpc", metrics=GPU_METRICS) as otlp:
        sent = send(Exported(), otlp)
    with grpc_receiver() as (behind, address), rotel(tmp_path, address) as rotels:
        with sending_to(rotels[protocol], protocol, timeout_s=10.0, metrics=GPU_METRICS) as otlp:
            assert send(Exported(), otlp) == sent
        wait_until(lambda: as_points(behind.got).total() >= sent and as_logs(behind.got).total() >= len(RECORDS))
    assert as_points(straight.got).total() == sent > len(GPU_METRICS)
    assert as_points(behind.got) == as_points(straight.got)
    assert as_logs(behind.got) == as_logs(straight.got)

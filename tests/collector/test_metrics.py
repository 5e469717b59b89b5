"""The Prometheus page."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import urllib3

from drover_collector.api_facts import Facts
from drover_collector.config import CollectorConfig
from drover_collector.ingest_stats import IngestStats
from drover_collector.metrics import MetricsServer, exposition
from drover_collector.notify import Outbox
from drover_collector.pipeline import Pipeline
from drover_collector.policy import Policy
from drover_collector.store import Store
from testbed.collected import small_index

LINE = re.compile(r'drover_[a-z_]+(\{[a-z]+="([^"\\\n]|\\["\\n])*"\})? -?[0-9.e+-]+')


@pytest.fixture
def facts(store: Store) -> Facts:
    pipeline = Pipeline(small_index(), store, Policy.load(), Outbox(store, [], "http://console"), lag_ms=7000)
    stats = IngestStats(connected=3, batches=17)
    stats.rejected['a "bad"\nbatch'] += 2
    return Facts(pipeline, stats, CollectorConfig())


def test_every_line_is_of_the_text_format(facts: Facts) -> None:
    lines = exposition(facts).splitlines()
    samples = [line for line in lines if not line.startswith("#")]
    assert [line for line in samples if not LINE.fullmatch(line)] == []
    assert 'drover_gpus{health="unknown"} 8' in samples
    assert "drover_nodes_expected 4" in samples
    assert "drover_agents_connected 3" in samples
    assert "drover_batches_total 17" in samples
    assert r'drover_rejected_total{reason="a \"bad\"\nbatch"} 2' in samples
    typed = {line.split()[2] for line in lines if line.startswith("# TYPE")}
    assert {line.partition("{")[0].partition(" ")[0] for line in samples} <= typed


@pytest.fixture
def server(facts: Facts) -> Iterator[MetricsServer]:
    made = MetricsServer(facts, "127.0.0.1", 0)
    yield made
    made.close()


def test_it_is_served_at_metrics_and_nowhere_else(server: MetricsServer) -> None:
    page = urllib3.request("GET", f"http://127.0.0.1:{server.port}/metrics", timeout=20)
    assert page.status == 200
    assert page.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert b"drover_store_bytes" in page.data
    assert urllib3.request("GET", f"http://127.0.0.1:{server.port}/", timeout=20).status == 404


def test_a_closed_store_gives_503(server: MetricsServer, store: Store) -> None:
    store.close()
    assert urllib3.request("GET", f"http://127.0.0.1:{server.port}/metrics", timeout=20).status == 503

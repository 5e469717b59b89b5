"""The Prometheus page."""

from __future__ import annotations

import re
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import urllib3
from prometheus_client import Histogram

from drover_collector.api import store as store_watch
from drover_collector.api.snapshot import ApiSnapshot
from drover_collector.api.store import StoreWatch
from drover_collector.ingest.stats import MAX_LABELS
from drover_collector.observability.metrics_server import MetricsServer, exposition
from drover_collector.observability.page import Page
from drover_collector.store import Store, StoreError
from testbed.monitoring import facts_of, names_of, whole_page

LABEL = r'[a-z]+="([^"\\\n]|\\["\\n])*"'
LINE = re.compile(rf"[a-z_]+(\{{{LABEL}(,{LABEL})?\}})? (-?[0-9.e+-]+|\+Inf)")


@pytest.fixture
def facts(store: Store) -> ApiSnapshot:
    return facts_of(store)


@pytest.fixture
def watch(facts: ApiSnapshot) -> StoreWatch:
    return StoreWatch(facts)


def samples(page: str) -> list[str]:
    return [line for line in page.splitlines() if not line.startswith("#")]


def test_every_line_is_of_the_text_format(facts: ApiSnapshot, watch: StoreWatch) -> None:
    page = exposition(facts, watch)
    assert [line for line in samples(page) if not LINE.fullmatch(line)] == []
    for line in (
        'drover_gpus{health="unknown"} 8.0',
        "drover_nodes_expected 4.0",
        "drover_nodes_reporting 0.0",
        "drover_agents_connected 3.0",
        "drover_batches_total 17.0",
        r'drover_rejected_total{reason="a \"bad\"\nbatch"} 2.0',
        'drover_write_seconds_bucket{le="0.25",what="telemetry"} 1.0',
        'drover_write_seconds_bucket{le="+Inf",what="telemetry"} 2.0',
        'drover_write_seconds_count{what="telemetry"} 2.0',
        'drover_insert_rows_bucket{le="1000"} 1.0',
        'drover_role{role="standby"} 0.0',
        "drover_store_answers 1.0",
    ):
        assert line in samples(page), line
    typed = {line.split()[2] for line in page.splitlines() if line.startswith("# TYPE")}
    assert {re.sub(r"_(bucket|sum|count)$", "", n) for n in names_of(page)} == typed
    assert len(set(samples(page))) == len(samples(page))


@pytest.mark.system
def test_promtool_finds_nothing_wrong(facts: ApiSnapshot, tmp_path: Path) -> None:
    page = whole_page(facts, tmp_path).encode()
    checked = subprocess.run(["promtool", "check", "metrics"], input=page, capture_output=True)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, b"", b"")


def test_what_agents_name_without_end_is_added_up(facts: ApiSnapshot, watch: StoreWatch) -> None:
    for n in range(10_000):
        facts.stats.rejected[f"reason {n}"] += 1
    lines = [line for line in samples(exposition(facts, watch)) if line.startswith("drover_rejected_total")]
    assert len(lines) == MAX_LABELS + 1
    assert sum(float(line.split()[-1]) for line in lines) == 10_002


def test_what_is_not_known_is_left_out() -> None:
    page = Page()
    page.gauge("drover_a", "a", None)
    page.gauge("drover_b", "b", {}, "x")
    page.counter("drover_c_total", "c", 0)
    assert page.text() == "# HELP drover_c_total c\n# TYPE drover_c_total counter\ndrover_c_total 0.0\n"


def test_a_histogram_counts_what_lies_on_a_bound_below_it() -> None:
    histogram, page = Histogram("h", "a histogram", registry=None, buckets=(1, 2)), Page()
    for value in (1, 1.5, 3):
        histogram.observe(value)
    page.histogram(histogram)
    assert samples(page.text()) == [
        'h_bucket{le="1"} 1.0', 'h_bucket{le="2"} 2.0', 'h_bucket{le="+Inf"} 3.0', "h_count 3.0", "h_sum 5.5",
    ]  # fmt: skip


def test_a_histogram_without_a_value_is_left_out() -> None:
    page = Page()
    page.histogram(Histogram("h", "a histogram", ["what"], registry=None))
    assert page.text() == ""


def test_a_store_that_fails_is_reported_and_its_figures_are_left_out(
    facts: ApiSnapshot, watch: StoreWatch, store: Store
) -> None:
    store.close()
    page = samples(exposition(facts, watch))
    assert "drover_store_answers 0.0" in page
    assert "drover_agents_connected 3.0" in page
    assert not [line for line in page if line.startswith(("drover_store_bytes", "drover_store_samples"))]


def test_a_store_that_hangs_holds_up_no_scrape(
    facts: ApiSnapshot, watch: StoreWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = threading.Event()
    asked = []

    def partitions() -> list[object]:
        asked.append(1)
        assert goes_on.wait(120)
        return []

    monkeypatch.setattr(facts.store.sizes, "partitions", partitions)
    monkeypatch.setattr(store_watch, "WAIT_S", 0.05)
    for _ in range(5):
        page = samples(exposition(facts, watch))
        assert "drover_store_answers 0.0" in page
        assert "drover_batches_total 17.0" in page
    assert len(asked) == 1, "one reading at a time, however many scrapes"
    goes_on.set()
    monkeypatch.setattr(store_watch, "WAIT_S", 20)
    assert watch.look() is not None


def test_old_figures_are_not_shown(facts: ApiSnapshot, watch: StoreWatch, monkeypatch: pytest.MonkeyPatch) -> None:
    assert watch.look() is not None
    monkeypatch.setattr(store_watch, "EVERY_S", 0)

    def away() -> list[object]:
        raise StoreError("the store is away")

    monkeypatch.setattr(facts.store.sizes, "partitions", away)
    monkeypatch.setattr(store_watch, "OLD_S", 0)
    assert watch.look() is None


def test_one_scrape_asks_the_store_nothing_within_ten_seconds_of_another(
    facts: ApiSnapshot, watch: StoreWatch, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = exposition(facts, watch)
    asked: list[str] = []
    monkeypatch.setattr(store.clients, "arrow", lambda sql, *_: asked.append(sql))
    second = exposition(facts, watch)
    assert asked == []
    assert names_of(first) == names_of(second)


@pytest.fixture
def server(facts: ApiSnapshot) -> Iterator[MetricsServer]:
    made = MetricsServer(facts, ("127.0.0.1", 0))
    yield made
    made.close()


def test_it_is_served_at_metrics_and_nowhere_else(server: MetricsServer) -> None:
    page = urllib3.request("GET", f"http://127.0.0.1:{server.port}/metrics", timeout=120)
    assert page.status == 200
    assert page.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert b"drover_store_bytes" in page.data
    assert urllib3.request("GET", f"http://127.0.0.1:{server.port}/", timeout=120).status == 404


def test_a_closed_store_still_gives_the_page(server: MetricsServer, store: Store) -> None:
    store.close()
    page = urllib3.request("GET", f"http://127.0.0.1:{server.port}/metrics", timeout=120)
    assert page.status == 200
    assert b"drover_store_answers 0.0" in page.data

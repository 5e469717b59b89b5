"""A real Prometheus and a real VictoriaMetrics scrape both pages and take remote_write, and lose nothing meanwhile."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import urllib3

from drover_collector.exporters.page import PATHS, make_pages
from drover_collector.exporters.remote_write import RemoteWrite
from drover_collector.exporters.settings import FleetPageConfig, RemoteWriteConfig
from drover_collector.fleet.buckets import Bucket
from drover_collector.observability.metrics_server import MetricsServer
from drover_collector.store import Store
from testbed.exported import Exported, silent
from testbed.monitoring import facts_of
from testbed.system_processes import free_port
from testbed.waiting import wait_until

JOBS = ["train", "", "", ""]


def query(port: int, expression: str) -> list[dict[str, Any]]:
    """The labels and the value of each series; none while nobody answers."""
    try:
        answer = urllib3.request(
            "GET", f"http://127.0.0.1:{port}/api/v1/query", fields={"query": expression}, timeout=120, retries=False
        )
    except urllib3.exceptions.HTTPError:
        return []
    found = json.loads(answer.data)["data"]["result"] if answer.status == 200 else []
    return [{**row["metric"], "value": float(row["value"][1])} for row in found]


@contextmanager
def program(folder: Path, *command: str) -> Iterator[None]:
    with (folder / f"{command[0]}.log").open("w") as output:
        child = subprocess.Popen(command, stdout=output, stderr=output)
        try:
            yield
        finally:
            child.terminate()
            child.wait(120)


def command_of(name: str, folder: Path, port: int) -> list[str]:
    if name == "prometheus":
        return [
            name, f"--config.file={folder}/scrape.yml", f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address=127.0.0.1:{port}", "--web.enable-remote-write-receiver",
        ]  # fmt: skip
    return [
        name, f"-storageDataPath={folder}/data", f"-httpListenAddr=127.0.0.1:{port}",
        f"-promscrape.config={folder}/scrape.yml", "-search.latencyOffset=0s", "-promscrape.configCheckInterval=0",
    ]  # fmt: skip


@pytest.fixture
def fleet() -> Exported:
    return Exported()


@pytest.mark.system
@pytest.mark.parametrize("name", ["prometheus", "victoria-metrics"])
def test_a_real_receiver_scrapes_both_pages_and_takes_remote_write(
    fleet: Exported, store: Store, tmp_path: Path, name: str
) -> None:
    now_ms = time.time_ns() // 1_000_000
    bucket: list[Bucket] = [fleet.bucket(now_ms - 20_000, JOBS)]
    pages = make_pages(FleetPageConfig(("drover", "dcgm"), interval_s=1), lambda: bucket[-1], fleet.reader, fleet.xids)
    server = MetricsServer(facts_of(store), ("127.0.0.1", 0), pages=pages)
    scrapes = [
        f"- {{job_name: {naming}, metrics_path: {path}, honor_labels: true, static_configs:"
        f" [{{targets: ['127.0.0.1:{server.port}']}}]}}"
        for naming, path in PATHS.items()
    ]
    (tmp_path / "scrape.yml").write_text("global: {scrape_interval: 1s}\nscrape_configs:\n" + "\n".join(scrapes) + "\n")
    port = free_port()
    path = "/api/v1/write"
    config = RemoteWriteConfig(
        "real", f"http://127.0.0.1:{port}{path}", labels=("by=remote_write",), metrics=("power_w",), timeout_s=5
    )
    writer = RemoteWrite(config, "export.remote_write[0]")
    writer.sender.start()
    try:
        writer.take(bucket[0], fleet.identities(bucket[0]), fleet.xids)  # nobody listens yet: it waits
        wait_until(lambda: writer.sender.status.failures)
        with program(tmp_path, *command_of(name, tmp_path, port)):
            wait_until(lambda: len(query(port, 'drover_gpu_power_w{by=""}')) == 4, "the fleet's page")
            wait_until(lambda: len(query(port, "DCGM_FI_DEV_GPU_UTIL")) == 4, "dcgm's page")
            jobs = {(s["node"], s["gpu"]): s.get("job") for s in query(port, 'drover_gpu_power_w{by=""}')}
            assert jobs == {("n0", "0"): "train", ("n0", "1"): None, ("n1", "0"): None, ("n1", "1"): None}
            assert {s["value"] for s in query(port, "DCGM_FI_DEV_GPU_UTIL")} == {100}
            assert query(port, "DCGM_FI_DEV_GPU_TEMP")[0]["modelName"] == 'NVIDIA "H100"\\80GB'
            wait_until(lambda: writer.sender.status.sent == 4, "what waited is taken")
            written = '{__name__="drover_gpu_power_w",by="remote_write"}'
            wait_until(lambda: len(query(port, written)) == 4, "and answered")
            bucket.append(silent(fleet.bucket(now_ms, JOBS), 3))
            writer.take(bucket[1], fleet.identities(bucket[1]), fleet.xids)
            wait_until(lambda: len(query(port, written)) == 3, "a silent GPU has no value at once")
            wait_until(lambda: len(query(port, 'drover_gpu_power_w{by=""}')) == 3, "nor on the page")
        assert writer.sender.status.refused == 0
    finally:
        writer.close()
        server.close()


@pytest.mark.system
def test_a_prometheus_that_knows_1_0_only_is_found_out(fleet: Exported, tmp_path: Path) -> None:
    port = free_port()
    (tmp_path / "scrape.yml").write_text("{}\n")
    config = RemoteWriteConfig("real", f"http://127.0.0.1:{port}/api/v1/write", version=2)
    writer = RemoteWrite(config, "export.remote_write[0]")
    writer.sender.start()
    try:
        with program(tmp_path, *command_of("prometheus", tmp_path, port)):
            bucket = fleet.bucket(time.time_ns() // 1_000_000)
            writer.take(bucket, fleet.identities(bucket), fleet.xids)
            wait_until(lambda: "set version = 1" in writer.sender.status.trouble, "it is said")
        assert writer.sender.status.sent == 0
    finally:
        writer.close()

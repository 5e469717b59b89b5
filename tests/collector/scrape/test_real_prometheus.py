"""A real Prometheus scrapes an exporter and sends it to a whole collector, whose API then answers for the node."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import grpc
import pytest

from drover_proto import fleet_methods as methods
from drover_proto import fleet_pb2 as pb
from testbed import collector_process
from testbed.system_processes import free_port
from testbed.waiting import wait_until

PAGE = (Path(__file__).parent / "pages/dcgm.txt").read_bytes()


@contextmanager
def _exporter() -> Iterator[int]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(PAGE)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield int(server.server_address[1])
        server.shutdown()


def _prometheus_of(folder: Path, exporter: int, rest: str) -> subprocess.Popen[bytes]:
    (folder / "prometheus.yml").write_text(
        "global: {scrape_interval: 2s}\n"
        f"scrape_configs: [{{job_name: gpus, static_configs: [{{targets: ['127.0.0.1:{exporter}'],"
        " labels: {node: n1}}]}]\n"
        f"remote_write: [{{url: 'http://{rest}/api/v1/write', queue_config: {{batch_send_deadline: 1s}},"
        " write_relabel_configs: [{source_labels: [__name__], regex: 'DCGM_.*', action: keep}]}]\n"
    )
    return subprocess.Popen(
        ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
         f"--web.listen-address=127.0.0.1:{free_port()}"],
        stdout=(folder / "prometheus.log").open("wb"), stderr=subprocess.STDOUT,
    )  # fmt: skip


@pytest.mark.system
def test_a_real_prometheus_feeds_a_node_without_an_agent(tmp_path: Path) -> None:
    settings = '[rest]\nlisten = "127.0.0.1:0"\n[rest.remote_write]\nenabled = true\nexporters = ["dcgm"]\n'
    with _exporter() as exporter, collector_process.collector(collector_process.write(tmp_path, settings)) as running:
        with closing(grpc.insecure_channel(running.addresses["Fleet API"])) as channel:
            prometheus = _prometheus_of(tmp_path, exporter, running.addresses["REST"])

            def node() -> pb.NodeDetail:
                return methods.GET_NODE.of(channel)(pb.NodeRequest(node="n1"), timeout=120)

            def power() -> list[float]:
                return [v.value for gpu in node().gpus for v in gpu.values if v.metric == "power_w" and v.present]

            try:
                wait_until(lambda: len(power()) == 2, "both GPUs have values")
                assert power() == [pytest.approx(value, rel=1e-3) for value in (112.6, 688.1)]
                assert node().row.agent_version.endswith("(scraped)")

                def scraping() -> pb.ScrapingState:
                    return methods.GET_SYSTEM.of(channel)(pb.SystemRequest(), timeout=120).scraping

                wait_until(lambda: bool(scraping().blind), "it is said who is blind")
                state = scraping()
                assert (state.nodes, state.pages, state.failing) == (1, 1, 0)
                # On a busy machine Prometheus sends a request again before it is answered: then all stands there twice.
                assert set(state.unused) <= {"series that stand there twice"}
                assert any(text.startswith("kernel: ") for text in state.blind)
            finally:
                prometheus.terminate()
                prometheus.wait(120)
        assert "err=" not in (tmp_path / "prometheus.log").read_text("utf-8")

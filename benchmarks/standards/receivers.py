"""Real receivers of standards that can be taken away and come back, and that say what they hold."""

from __future__ import annotations

import gzip
import json
import multiprocessing
import re
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any, Protocol

from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from testbed.system_processes import free_port, reachable
from testbed.waiting import wait_until

LABEL = 'by="outage"'
APPENDED = "prometheus_tsdb_head_samples_appended_total"
STOP_S = 60.0


class Receiver(Protocol):
    """`exporters`: names of what sends to it."""

    name: str

    @property
    def exporters(self) -> Sequence[str]: ...

    def settings(self, interval_s: float) -> str:
        """Return the tables of the collector's settings that send to it."""

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def held(self) -> int:
        """Return how many samples, points or lines it holds."""

    def close(self) -> None: ...


class _Program:
    """A program of the system with files and a port of its own."""

    def __init__(self, folder: Path, command: list[str], port: int) -> None:
        self._log, self._command, self.port = folder / f"{command[0]}.log", command, port
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self._log.open("ab") as output:
            self._process = subprocess.Popen(self._command, stdout=output, stderr=output)
        wait_until(lambda: reachable("127.0.0.1", self.port), f"{self._command[0]} listens", 60)

    def stop(self) -> None:
        """End it as an operator does. What it has taken stays."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait(STOP_S)
            self._process = None

    def close(self) -> None:
        _Program.stop(self)


class _Metrics(_Program):
    """Takes remote_write, and counts what it holds by PromQL."""

    name = ""

    @property
    def exporters(self) -> Sequence[str]:
        return (self.name,)

    def settings(self, interval_s: float) -> str:
        return (
            f'[[export.remote_write]]\nname = "{self.name}"\nurl = "http://127.0.0.1:{self.port}/api/v1/write"\n'
            f"labels = [{json.dumps(LABEL.replace(chr(34), ''))}]\ninterval_s = {interval_s}\n"
        )

    def start(self) -> None:
        super().start()
        wait_until(self._is_ready, f"{self.name} is ready", 300, 0.2)

    def _is_ready(self) -> bool:
        """Prometheus listens before it has read its log of what it took."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/-/ready", timeout=10):
                return True
        except urllib.error.URLError:
            return False

    def counted(self, function: str = "count_over_time") -> int:
        """Return the sum of a function over all series and the whole time."""
        names = self._ask("/api/v1/label/__name__/values", {"start": str(int(time.time()) - 86_400)})
        found = 0
        for name in names:
            if name.startswith("drover_"):
                result = self._ask("/api/v1/query", {"query": f"sum({function}({name}{{{LABEL}}}[6h]))"})["result"]
                found += int(float(result[0]["value"][1])) if result else 0
        return found

    def _ask(self, path: str, parameters: dict[str, str]) -> Any:
        url = f"http://127.0.0.1:{self.port}{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=120) as answer:
            return json.load(answer)["data"]


class Prometheus(_Metrics):
    name = "prometheus"

    def __init__(self, folder: Path) -> None:
        port = free_port()
        (folder / "prometheus.yml").write_text("{}\n")
        super().__init__(folder, [
            "prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/prometheus",
            f"--web.listen-address=127.0.0.1:{port}", "--web.enable-remote-write-receiver",
            "--query.max-samples=500000000",
        ], port)  # fmt: skip
        self._before = 0  # what it had appended when it was stopped

    def stop(self) -> None:
        if self._process is not None:
            self._before += self._appended()
        super().stop()

    def held(self) -> int:
        """Samples by its own count, with the markers that end series. No PromQL counts those."""
        return self._before + self._appended()

    def _appended(self) -> int:
        """Return how many it has appended since it was started; what comes twice counts once."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=60) as answer:
            lines = answer.read().decode().splitlines()
        return round(sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(APPENDED)))


class VictoriaMetrics(_Metrics):
    name = "victoria"

    def __init__(self, folder: Path) -> None:
        port = free_port()
        super().__init__(folder, [
            "victoria-metrics", f"-storageDataPath={folder}/victoria", f"-httpListenAddr=127.0.0.1:{port}",
            "-search.latencyOffset=0s", "-search.maxUniqueTimeseries=10000000",
        ], port)  # fmt: skip

    def held(self) -> int:
        """With the markers that end series."""
        return self.counted() + self.counted("stale_samples_over_time")


class Rsyslog(_Program):
    name, exporters = "siem", ("siem",)

    def __init__(self, folder: Path) -> None:
        port = free_port()
        self._out = folder / "syslog"
        (folder / "rsyslog.conf").write_text(
            f'module(load="imtcp")\ninput(type="imtcp" port="{port}" address="127.0.0.1")\n'
            'template(name="all" type="list") { property(name="structured-data") constant(value="\\n") }\n'
            f'*.* action(type="omfile" file="{self._out}" template="all" asyncWriting="off")\n'
        )
        super().__init__(
            folder, ["rsyslogd", "-n", "-f", f"{folder}/rsyslog.conf", "-i", f"{folder}/rsyslog.pid"], port
        )

    def settings(self, interval_s: float) -> str:  # noqa: ARG002  # a line is sent when it is made
        return f'[[export.syslog]]\nname = "siem"\naddress = "127.0.0.1:{self.port}"\ntransport = "tcp"\n'

    def held(self) -> int:
        """A line that came twice counts once."""
        wait_until(self._out.exists, "rsyslog has written", 20)
        return len(set(re.findall(r'drover@32473 kind="[a-z]+" id="([^"]+)"', self._out.read_text("utf-8", "replace"))))


class Otlp:
    """Decodes with opentelemetry-proto, in a process of its own. Away, it closes each connection unread."""

    name, exporters = "otel", ("otel-metrics", "otel-logs")

    def __init__(self, folder: Path) -> None:  # noqa: ARG002  # as of the others
        self._port, self._held = multiprocessing.Value("i", 0), multiprocessing.Value("q", 0)
        self._away = multiprocessing.Value("b", 0)
        self._child = multiprocessing.Process(
            target=_receive, args=(self._port, self._held, self._away), daemon=True
        )  # fmt: skip
        self._child.start()
        wait_until(lambda: bool(self._port.value), "the OTLP receiver listens", 60)

    def settings(self, interval_s: float) -> str:
        return (
            f'[[export.otlp]]\nname = "otel"\nurl = "http://127.0.0.1:{self._port.value}"\ninterval_s = {interval_s}\n'
        )

    def start(self) -> None:
        self._away.value = 0

    def stop(self) -> None:
        self._away.value = 1

    def held(self) -> int:
        return int(self._held.value)

    def close(self) -> None:
        self._child.kill()
        self._child.join()


def _receive(port: Synchronized[int], held: Synchronized[int], away: Synchronized[int]) -> None:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            if away.value:  # a connection that was open before
                self.close_connection = True
                return
            body = gzip.decompress(self.rfile.read(int(self.headers["content-length"])))
            count = _points(body) if self.path == "/v1/metrics" else _records(body)
            with held.get_lock():
                held.value += count
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        def verify_request(self, request: object, client_address: object) -> bool:  # noqa: ARG002  # as socketserver calls it
            return not away.value

    server = Server(("127.0.0.1", 0), Handler)
    port.value = server.server_address[1]
    server.serve_forever()


def _points(body: bytes) -> int:
    return sum(
        len(metric.gauge.data_points) + len(metric.sum.data_points)
        for resource in ExportMetricsServiceRequest.FromString(body).resource_metrics
        for scope in resource.scope_metrics for metric in scope.metrics
    )  # fmt: skip


def _records(body: bytes) -> int:
    return sum(
        len(scope.log_records)
        for resource in ExportLogsServiceRequest.FromString(body).resource_logs for scope in resource.scope_logs
    )  # fmt: skip

"""A collector of OpenTelemetry from elsewhere: rotel, in Rust, from PyPI (`tests/otlp_setup.sh`)."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from testbed.system_processes import free_port, reachable
from testbed.waiting import wait_until

AGENT = Path("/var/cache/drover-testbed/rotel-0.0.1a15/rotel-agent")


@contextmanager
def rotel(folder: Path, behind: str) -> Iterator[dict[str, str]]:
    """The collector's addresses by protocol; it passes on to the gRPC address `behind`."""
    ports = {protocol: free_port() for protocol in ("grpc", "http")}
    grpc_listens, http_listens = (f"127.0.0.1:{port}" for port in ports.values())
    log = folder / "rotel.log"
    with log.open("w") as output:
        child = subprocess.Popen(
            [
                AGENT, "start", "--otlp-grpc-endpoint", grpc_listens, "--otlp-http-endpoint", http_listens,
                "--exporter", "otlp", "--otlp-exporter-endpoint", behind, "--otlp-exporter-protocol", "grpc",
                "--pid-file", str(folder / "rotel.pid"),
            ],
            stdout=output, stderr=output,
        )  # fmt: skip
        try:
            wait_until(lambda: all(reachable("127.0.0.1", port) for port in ports.values()), "rotel listens")
            yield {protocol: f"http://127.0.0.1:{port}" for protocol, port in ports.items()}
        finally:
            ended = child.poll()
            child.terminate()
            child.wait(30)
            assert ended is None, log.read_text()[-2000:]

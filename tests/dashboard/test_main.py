"""The command: what it refuses, and what its server serves."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from testbed.waiting import wait_until


def run(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "drover_dashboard.main", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_an_occupied_port_is_one_line_and_exit_2() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = run("--port", str(port))
    assert done.returncode == 2
    assert done.stderr == (
        f"drover-dashboard: cannot listen on 127.0.0.1:{port} (Address already in use);"
        " choose another with --port or --address\n"
    )


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--ca", "x.pem"), "mutual TLS needs all of --ca, --cert and --key"),
        (("--ca", "/no/x", "--cert", "/no/y", "--key", "/no/z"), "/no/x: No such file or directory"),
        (("--port", "70000"), "'70000' is not a port"),
        (("--collector", "somewhere"), "'somewhere' is not HOST:PORT, such as collector.example:7302"),
        (("--address", "no.such.host.invalid"), "cannot listen on no.such.host.invalid:"),
    ],
)
def test_bad_arguments_are_reported_and_exit_2(args: tuple[str, ...], said: str) -> None:
    done = run(*([*args] if "--port" in args else [*args, "--port", str(free_port())]))
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


@pytest.fixture(scope="module")
def console() -> Iterator[str]:
    """Address of a console whose collector is not there."""
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "drover_dashboard.main",
        "--port",
        str(port),
        "--collector",
        f"127.0.0.1:{free_port()}",
    ]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    base = f"http://127.0.0.1:{port}"
    try:
        wait_until(lambda: child.poll() is None and get(f"{base}/_stcore/health")[0] == 200, "the console is up")
        yield base
    finally:
        child.terminate()
        assert child.wait(120) in (0, -15)


def get(url: str, **headers: str) -> tuple[int, bytes, dict[str, str]]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=120) as reply:
            return reply.status, reply.read(), dict(reply.headers)
    except urllib.error.HTTPError as error:
        return error.code, error.read(), dict(error.headers)
    except OSError:
        return 0, b"", {}


def test_assets_are_served_once_and_nothing_else(console: str) -> None:
    status, body, headers = get(f"{console}/drover/assets/uplot/uPlot.esm.js")
    assert status == 200
    assert headers["content-type"].startswith("text/javascript")
    assert b"uPlot" in body
    assert get(f"{console}/drover/assets/uplot/uPlot.esm.js", **{"If-None-Match": headers["etag"]})[0] == 304
    for path in ("../main.py", "..%2fmain.py", "%2e%2e/main.py", "none.js", "uplot", "fleet.html", "%2fetc%2fpasswd"):
        assert get(f"{console}/drover/assets/{path}")[0] in (400, 404)


@pytest.mark.parametrize("path", ["layout", "picture", "picture?color_by=power_w"])
def test_without_a_collector_the_picture_says_why(console: str, path: str) -> None:
    status, body, _ = get(f"{console}/drover/{path}")
    assert status == 503
    assert "has not answered (connection refused): is drover-collector running?" in json.loads(body)["trouble"]


def test_an_unknown_colour_is_refused(console: str) -> None:
    status, body, _ = get(f"{console}/drover/picture?color_by=beauty")
    assert status == 400
    assert "unknown metric" in json.loads(body)["trouble"]

"""A whole collector under attack by an agent's certificate, as a process in a memory cgroup where there is one."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from drover_collector.grpc_h2.frames import Code
from testbed.certificates import Files, Fleet
from testbed.collector_process import collector, write
from testbed.fleets import hello
from testbed.hostile_agents import (
    bombs_after_hello,
    bombs_before_hello,
    empty_parts,
    loose,
    measured,
    settings_floods,
)

CGROUPS = Path("/sys/fs/cgroup/memory")  # of version 1
MOST_BYTES = 2 << 30
OK, INVALID_ARGUMENT, RESOURCE_EXHAUSTED = "0", "3", "8"
BOMB_BYTES = 5_100_000  # 5 kB once it is compressed
SMALL_BYTES = 250_000  # which no bound of bytes refuses


@dataclass
class Attacked:
    pid: int
    ingest: str
    api: str
    agent: Files
    viewer: Files


@contextlib.contextmanager
def caged(pid: int) -> Iterator[None]:
    """It is killed, and nothing else is, when it takes too much."""
    cage = CGROUPS / f"drover-test-{os.getpid()}"
    try:
        cage.mkdir()
    except OSError:
        yield
        return
    before = re.search(r":memory:(.*)", Path(f"/proc/{pid}/cgroup").read_text())
    assert before is not None
    try:
        (cage / "memory.limit_in_bytes").write_text(str(MOST_BYTES))
        (cage / "cgroup.procs").write_text(str(pid))
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):  # it was killed
            (CGROUPS / before[1].lstrip("/") / "cgroup.procs").write_text(str(pid))
        cage.rmdir()


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    folder = tmp_path_factory.mktemp("attacked")
    fleet = Fleet(folder / "ca")
    with collector(write(folder, fleet.issue("collector", "c1").toml)) as running, caged(running.process.pid):
        at = {name: f"localhost:{address.rsplit(':', 1)[1]}" for name, address in running.addresses.items()}
        agent, viewer = fleet.issue("agent", "n1"), fleet.issue("viewer", "wall")
        yield Attacked(running.process.pid, at["agents"], at["Fleet API"], agent, viewer)


@pytest.mark.parametrize("size", [BOMB_BYTES, SMALL_BYTES])
@pytest.mark.parametrize("kind", ["records", "blocks", "entities", "columns", "inventory"])
def test_bombs_before_a_hello_are_refused_before_they_are_parsed(attacked: Attacked, kind: str, size: int) -> None:
    """Of 16 streams of one certificate, each with one message of 5 kB: parsed, they took 3.2 GiB."""
    with measured(attacked.pid, attacked.api, attacked.viewer) as cost:
        ends = bombs_before_hello(attacked.ingest, attacked.agent, empty_parts(kind, size))
    print(kind, cost, ends)
    assert set(ends.values()) <= {INVALID_ARGUMENT, RESOURCE_EXHAUSTED}
    assert cost.grown_mib < 100
    assert cost.answers


@pytest.mark.parametrize("kind", ["records", "blocks"])
def test_bombs_of_a_welcomed_agent_are_refused_before_they_are_parsed(attacked: Attacked, kind: str) -> None:
    """10 MB from 70 kB each, which is less tight than the bound; its stream goes on."""
    message, own = loose(empty_parts(kind, 10_000_000)), hello("n1")
    own.ts_ms = time.time_ns() // 1_000_000  # else its clock is wrong, and its stream is ended for that
    with measured(attacked.pid, attacked.api, attacked.viewer) as cost:
        end = bombs_after_hello(attacked.ingest, attacked.agent, own, message, 10)
    print(kind, cost)
    assert end == OK
    assert cost.grown_mib < 100


def test_floods_of_settings_on_many_connections_end_them(attacked: Attacked) -> None:
    with measured(attacked.pid, attacked.api, attacked.viewer) as cost:
        codes = settings_floods(attacked.ingest, attacked.agent)
    print(cost, codes)
    assert Code.ENHANCE_YOUR_CALM in codes
    assert cost.grown_mib < 100
    assert cost.answers

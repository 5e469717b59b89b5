"""The pages of one node's GPUs."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import urllib3

from drover_agent.app import NodeRuntime
from drover_agent.config import AgentConfig, PageConfig, SpoolConfig
from drover_agent.page import server as page_server
from drover_agent.page.server import PageServer
from drover_agent.page.values import FRESH_MS, NewestValues
from drover_agent.sources.base import Entity, NodeEvent, Reading
from drover_core.metrics.catalog import Absent, Scope
from drover_core.metrics.prometheus_text import parse
from drover_core.metrics.series import DCGM, DROVER, GPU_METRICS, series_of
from drover_core.model.kinds import EventKind
from drover_core.settings import SettingsError
from testbed.clock import ManualClock

GPUS = [
    Entity(Scope.GPU, f"S{n}", n, uuid=f"GPU-{n}", serial=f"S{n}", pci=f"0000:{n + 0x1B:02x}:00.0", model="NVIDIA H100")
    for n in range(2)
]
NOW_MS = 1_790_000_000_000


def values(now_ms: int = NOW_MS) -> NewestValues:
    made = NewestValues("n0", lambda: now_ms)
    made.take(NOW_MS, Reading(rows=[(gpu, {"power_w": 600.5, "gpu_util_ratio": 0.93}) for gpu in GPUS]))
    return made


def page(of: NewestValues, naming: str = DROVER) -> dict[str, list[str]]:
    """Name -> lines."""
    found: dict[str, list[str]] = {}
    for line in of.page(series_of(naming, GPU_METRICS), naming).splitlines():
        if line[0] != "#":
            found.setdefault(line.partition("{")[0], []).append(line)
    return found


def test_each_gpu_has_its_newest_values_and_its_job() -> None:
    made = values()
    made.take(NOW_MS + 1000, Reading(rows=[(GPUS[1], {"power_w": 601.0})], holdings=[(1, "train")]))
    made.take(NOW_MS + 1000, Reading(rows=[(Entity(Scope.GPU, "m", 0, mig="MIG-1"), {"power_w": 5.0})]))
    assert page(made)["drover_gpu_power_w"] == [
        'drover_gpu_power_w{node="n0",gpu="0",uuid="GPU-0",model="NVIDIA H100",job=""} 600.5',
        'drover_gpu_power_w{node="n0",gpu="1",uuid="GPU-1",model="NVIDIA H100",job="train"} 601.0',
    ]


def test_drovers_own_reader_of_such_pages_reads_the_dcgm_page() -> None:
    made = values()
    event = NodeEvent(NOW_MS, 1, EventKind.XID, "79", "", "nvml")
    made.take(NOW_MS, Reading(events=[event]))
    text = made.page(series_of(DCGM, GPU_METRICS), DCGM)
    found = parse(text, frozenset({"DCGM_FI_DEV_GPU_UTIL", "DCGM_FI_DEV_XID_ERRORS"}))
    assert [(labels["gpu"], labels["Hostname"], value) for labels, value in found["DCGM_FI_DEV_GPU_UTIL"]] == [
        ("0", "n0", 93), ("1", "n0", 93),
    ]  # fmt: skip
    assert [value for _, value in found["DCGM_FI_DEV_XID_ERRORS"]] == [0, 79]
    assert found["DCGM_FI_DEV_GPU_UTIL"][0][0]["pci_bus_id"] == "00000000:1B:00.0"


def test_a_value_that_is_absent_or_old_is_left_out() -> None:
    made = values()
    made.take(NOW_MS, Reading(absent=[(GPUS[0], "power_w", Absent.LOST)]))
    assert len(page(made)["drover_gpu_power_w"]) == 1
    assert len(page(made)["drover_gpu_util_ratio"]) == 2
    assert page(values(NOW_MS + FRESH_MS + 1)) == {}


@pytest.fixture
def server() -> Iterator[PageServer]:
    made = PageServer(PageConfig("127.0.0.1:0"), "n0", ManualClock(NOW_MS))
    made.values.take(NOW_MS, Reading(rows=[(GPUS[0], {"power_w": 600.5})]))
    yield made
    made.close()


def test_a_slot_has_one_gpu_and_a_value_that_is_no_number_is_left_out() -> None:
    values = NewestValues("n0", lambda: 1_000)
    before, now = Entity(Scope.GPU, "n0/gpu0", 0), Entity(Scope.GPU, "GPU-b", 0, uuid="GPU-b")
    values.take(1_000, Reading(rows=[(before, {"power_w": 300.0})]))
    values.take(1_000, Reading(rows=[(now, {"power_w": 100.0, "gpu_temp_c": float("nan")})]))
    page = values.page(series_of(DROVER, GPU_METRICS), DROVER)
    assert [line for line in page.splitlines() if line[0] != "#"] == [
        'drover_gpu_power_w{node="n0",gpu="0",uuid="GPU-b",job=""} 100.0'
    ]


def test_they_are_served(server: PageServer) -> None:
    for path, name in (("/metrics", "drover_gpu_power_w"), ("/metrics/dcgm", "DCGM_FI_DEV_POWER_USAGE")):
        answer = urllib3.request("GET", f"http://127.0.0.1:{server.port}{path}", timeout=120)
        assert answer.status == 200
        assert f"{name}{{" in answer.data.decode()
    assert urllib3.request("GET", f"http://127.0.0.1:{server.port}/", timeout=120).status == 404


def test_a_scraper_that_hangs_keeps_others_waiting_for_its_limit_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_server, "REQUEST_S", 0.2)
    made = PageServer(PageConfig("127.0.0.1:0"), "n0", ManualClock(NOW_MS))
    with socket.create_connection(("127.0.0.1", made.port)) as slow:
        slow.send(b"GET /metr")
        assert urllib3.request("GET", f"http://127.0.0.1:{made.port}/metrics", timeout=120).status == 200
    made.close()


def test_an_address_that_is_taken_is_said() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(SettingsError, match=r"page\.listen: cannot listen"),
    ):
        PageServer(PageConfig(f"127.0.0.1:{taken.getsockname()[1]}"), "n0", ManualClock(NOW_MS))


def test_an_agent_with_the_page_on_shows_what_it_reads_and_one_without_has_none(tmp_path: Path) -> None:
    off = AgentConfig(hardware="none", kmsg_enabled=False, spool=SpoolConfig(str(tmp_path / "off")))
    assert NodeRuntime(off)._page is None
    on = replace(off, page=PageConfig("127.0.0.1:0"), spool=SpoolConfig(str(tmp_path / "on")))
    node = NodeRuntime(on, ManualClock(NOW_MS))
    assert node._page is not None
    node.agent.batcher.add(NOW_MS, Reading(rows=[(GPUS[0], {"power_w": 600.5})]))  # as `accept` does
    answer = urllib3.request("GET", f"http://127.0.0.1:{node._page.port}/metrics", timeout=120)
    node._page.close()
    assert 'drover_gpu_power_w{node="' in answer.data.decode()


@pytest.mark.system
def test_promtool_can_read_the_nodes_page(tmp_path: Path) -> None:
    for naming in (DROVER, DCGM):
        text = values().page(series_of(naming, GPU_METRICS), naming)
        checked = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True)
        assert checked.returncode in (0, 3), checked.stderr  # 1: it cannot be read

"""`drover-agent sources`: every source of the table, whether it is on, and what a reading costs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from drover_agent.commands.read_all import SourceReading
from drover_agent.commands.sources import _row, as_text, sources
from drover_agent.config import AgentConfig
from drover_agent.polled_sources import POLLED
from drover_agent.sampling.scheduler import OUTCOME_ROWS, READ_ROWS
from drover_agent.sources.base import Reading
from drover_agent.sources.facts import FACTS, JOBS_UNKNOWN
from testbed.nvml import FakeNvml


def rows(tmp_path: Path, **settings: Any) -> dict[str, dict[str, Any]]:
    (tmp_path / "kmsg").write_text("")
    config = AgentConfig(**{"node": "n1", "hardware": "none", "kmsg_path": str(tmp_path / "kmsg"), **settings})
    return {row["name"]: row for row in sources(config)}


def test_every_source_has_its_facts() -> None:
    assert FACTS.keys() == {*POLLED, "nvml", "kmsg"}
    for name, facts in FACTS.items():
        assert all((facts.what, facts.reads, facts.pace, facts.rights, facts.missing, facts.setting)), name


@pytest.mark.parametrize("name", sorted(FACTS.keys() - {"simulated"}))
def test_every_source_has_its_rows_in_the_catalog(name: str) -> None:
    assert name in OUTCOME_ROWS
    assert name in READ_ROWS or name == "kmsg"  # which waits for lines


def test_what_is_on_is_read_twice_and_its_cost_reported(tmp_path: Path) -> None:
    host = rows(tmp_path)["host"]
    assert host["on"]
    assert host["error"] == ""
    assert host["values"] > 5
    assert host["cpu_s"] > 0
    assert host["read_s"] > 0


@pytest.mark.parametrize(
    ("name", "settings", "why"),
    [
        ("nvml", {"hardware": "none"}, "hardware = none"),
        ("kmsg", {"kmsg_enabled": False}, "kmsg_enabled = false"),
        ("simulated", {"hardware": "none"}, "hardware = none"),
        ("inference", {"inference_urls": ()}, "not set: `inference_urls`"),
        ("steps", {"steps_socket": ""}, "not set: `steps_socket`"),
    ],
)
def test_what_is_off_names_its_setting(tmp_path: Path, name: str, settings: dict[str, Any], why: str) -> None:
    row = rows(tmp_path, **settings)[name]
    assert not row["on"]
    assert row["why"] == why
    assert row["read_s"] is None


def test_what_is_not_there_or_cannot_be_read_says_so(tmp_path: Path) -> None:
    (tmp_path / "sys").mkdir()
    found = rows(tmp_path, kmsg_path=str(tmp_path / "none"), sys_root=str(tmp_path / "sys"))
    assert (found["infiniband"]["on"], found["infiniband"]["why"]) == (True, FACTS["infiniband"].missing)
    assert found["kmsg"]["error"] == "No such file or directory"
    assert found["sensors"]["why"] == FACTS["sensors"].missing, "all that it would have is unsupported"
    assert any(line.startswith("sensors      nothing") for line in as_text(list(found.values())).splitlines())


@pytest.mark.parametrize(("gpus", "why"), [(0, FACTS["jobs"].missing), (8, f"8 GPUs: {JOBS_UNKNOWN}")])
def test_no_jobs_known_and_no_gpus_are_two_things(gpus: int, why: str) -> None:
    looks = [SourceReading("jobs", 5.0, readings=[Reading()])]
    assert _row(AgentConfig(), "jobs", looks, gpus)["why"] == why


def test_the_steps_socket_is_left_to_the_running_agent(tmp_path: Path) -> None:
    path = tmp_path / "steps.sock"
    assert rows(tmp_path, steps_socket=str(path))["steps"]["on"]
    assert not path.exists()


def test_the_command_reports_a_gpu_that_hangs(tmp_path: Path, fake_nvml: FakeNvml) -> None:
    fake_nvml.block(2, "nvmlDeviceGetFieldValues")
    command = [sys.executable, "-m", "drover_agent.main", "sources", "--json", "--set", "hardware=nvml"]
    env = {**os.environ, **fake_nvml.env()}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env=env)
    assert done.returncode == 0
    found = json.loads(done.stdout)
    [nvml] = [row for row in found if row["name"] == "nvml"]
    assert nvml["error"] == "nvml:2: did not answer within 3 s"
    assert nvml["values"] > 0
    lines = as_text(found).splitlines()
    assert any(line.startswith("nvml         failing") for line in lines)
    assert any(line.startswith("simulated    off") for line in lines)

"""`drover-agent once`: every row of the catalog is a value or absent with its reason."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from drover_agent.commands.once import (
    NOT_READ,
    WHY,
    as_json,
    as_text,
    kernel_log,
)
from drover_agent.commands.read_all import SourceReading
from drover_agent.config import AgentConfig
from drover_agent.sources.base import Entity, NodeEvent, Reading
from drover_agent.sources.facts import JOBS_UNKNOWN
from drover_core.metrics.catalog import Absent, Scope, of_agents
from drover_core.model.events import EventKind
from testbed.nvml import FakeNvml

GPU = Entity(Scope.GPU, "S0", 0, serial="S0")


def once(fake_nvml: FakeNvml, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "drover_agent.main", "once", "--set", "node=n1", *words]
    env = {**os.environ, **fake_nvml.env()}
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env=env)


def entity_of(report: dict[str, Any], gpu: int) -> dict[str, Any]:
    [found] = [e for e in report["entities"] if e["scope"] == "gpu" and e["gpu"] == gpu]
    assert isinstance(found, dict)
    return found


def report_of(*readings: Reading, **more: Any) -> dict[str, Any]:
    return as_json(
        AgentConfig(node="n1", kmsg_enabled=False), [SourceReading("x", 1.0, readings=list(readings), **more)]
    )


def test_every_row_of_the_catalog_is_a_value_or_absent_in_words(fake_nvml: FakeNvml) -> None:
    done = once(fake_nvml, "--json")
    assert done.returncode == 0
    report = json.loads(done.stdout)
    assert {entity["gpu"] for entity in report["entities"] if entity["scope"] == "gpu"} == set(range(8))
    for entity in report["entities"]:
        rows = {metric.name for metric in of_agents(Scope(entity["scope"]))}
        assert entity["values"].keys() | entity["absent"].keys() == rows
        assert not entity["values"].keys() & entity["absent"].keys()
        assert set(entity["absent"].values()) <= {*map(str, Absent), NOT_READ}
        assert entity["why"].keys() == entity["absent"].keys()
        assert all(entity["why"].values())
    [node] = [entity for entity in report["entities"] if entity["scope"] == "node"]
    assert node["why"]["spool_bytes"] == "only a running agent knows it"


def test_one_hung_and_one_lost_gpu_are_named_and_cost_themselves_alone(fake_nvml: FakeNvml) -> None:
    fake_nvml.block(2, "nvmlDeviceGetFieldValues")
    fake_nvml.lose(5)
    fake_nvml.set(3, "nvmlDeviceGetCurrentClocksEventReasons", "8")
    done = once(fake_nvml, "--json")
    assert done.returncode == 0
    report = json.loads(done.stdout)
    assert report["sources"]["nvml:2"]["trouble"] == "did not answer within 3 s"
    assert set(entity_of(report, 2)["absent"].values()) == {"timeout"}
    assert set(entity_of(report, 5)["absent"].values()) == {"lost"}
    assert all(entity_of(report, gpu)["values"]["power_w"] > 0 for gpu in (0, 1, 3, 4, 6, 7))
    assert [event["code"] for event in report["events"]] == ["gpu_lost"]
    text = as_text(report).splitlines()
    [header] = [line for line in text if line.startswith("GPUs")]
    assert header.split("  ")[-1].strip() == "GPU 7"
    [power] = [line.split() for line in text if line.startswith("power, W")]
    assert power[2:] == ["642", "642", "-", "642", "642", "-", "642", "642"]
    assert f"Absent, lost ({WHY['lost']}), GPU 5: everything" in text
    assert f"Absent, timeout ({WHY['timeout']}), GPU 2: everything" in text
    assert any("hardware slowdown (GPU 3)" in line for line in text)
    assert "Source nvml:2: did not answer within 3 s" in text


def test_a_reading_may_take_an_earlier_one_back() -> None:
    first = Reading(rows=[(GPU, {"power_w": 300.0, "gpu_temp_c": 50.0})], absent=[(GPU, "pcie_width", Absent.ERROR)])
    second = Reading(rows=[(GPU, {"pcie_width": 16.0})], absent=[(GPU, "power_w", Absent.OUT_OF_RANGE)])
    [entity] = report_of(first, second)["entities"]
    assert entity["values"] == {"gpu_temp_c": 50.0, "pcie_width": 16.0}
    assert (entity["absent"]["power_w"], entity["why"]["power_w"]) == ("out-of-range", WHY["out-of-range"])


def test_a_gpu_that_reported_its_name_only_later_is_listed_once() -> None:
    nameless = Entity(Scope.GPU, "n1/gpu0", 0)
    report = report_of(Reading(rows=[(nameless, {"power_w": 1.0})]), Reading(rows=[(GPU, {"power_w": 2.0})]))
    assert [(e["key"], e["values"]["power_w"]) for e in report["entities"]] == [("S0", 2.0)]


def test_mig_instances_ports_and_workloads_are_entities_of_their_own() -> None:
    mig = Entity(Scope.GPU, "MIG-1", 0, mig="MIG-1")
    port = Entity(Scope.LINK, "n1/mlx5_0/1", link="mlx5_0/1")
    server = Entity(Scope.WORKLOAD, "n1/vllm")
    reading = Reading(
        rows=[
            (GPU, {"power_w": 300.0}),
            (mig, {"framebuffer_used_bytes": 1e9}),
            (port, {"link_up": 1.0}),
            (server, {"requests_running": 3.0}),
        ]
    )
    report = report_of(reading)
    assert [(e["scope"], e["key"]) for e in report["entities"]] == [
        ("gpu", "S0"),
        ("gpu", "MIG-1"),
        ("link", "n1/mlx5_0/1"),
        ("workload", "n1/vllm"),
    ]
    assert (
        report["entities"][1]["why"]["power_w"]
        == "not available for MIG instances; the row of the whole GPU may have it"
    )
    assert (
        report["entities"][3]["why"]["step_time_s"] == "this workload does not report it, or has nothing to report now"
    )
    text = as_text(report)
    assert "mlx5_0/1" in text
    assert "vllm" in text
    assert [line.split() for line in text.splitlines() if line.startswith("MIG")] == [["MIG", "instances", "0/MIG-1"]]


def test_jobs_events_and_inventory_are_shown() -> None:
    event = NodeEvent(1_700_000_000_000, 0, EventKind.XID, "79", "XID 79: fallen off the bus", "kmsg", backlog=True)
    inventory = {
        "driver_version": "580.1",
        "gpu0.model": "H100",
        "gpu1.model": "H100",
        "gpu0.pci": "a",
        "gpu1.pci": "b",
    }
    report = report_of(Reading(holdings=[(0, "slurm:7"), (1, None)], events=[event], inventory=inventory))
    assert report["holdings"] == {"0": "slurm:7", "1": None}
    assert report["events"][0] | {"gpu": 0, "code": "79", "backlog": True} == report["events"][0]
    lines = as_text(report).splitlines()
    assert "  GPU 0 is held by slurm:7" in lines
    assert "  GPU 1 is held by no job" in lines
    assert "  all 2 GPUs: model H100" in lines
    assert "  gpu1: pci b" in lines
    assert "  event 79: XID 79: fallen off the bus" in lines


def test_gpus_whose_job_is_not_known_are_not_left_out() -> None:
    entities = [Entity(Scope.GPU, f"S{slot}", slot) for slot in range(3)]
    reading = Reading(rows=[(entity, {"power_w": 100.0}) for entity in entities], holdings=[(1, None)])
    report = as_json(AgentConfig(node="n1", kmsg_enabled=False), [SourceReading("jobs", 5.0, readings=[reading])])
    assert (report["holdings"], report["holdings_unknown"]) == ({"1": None}, [0, 2])
    assert f"  GPU 0, 2: {JOBS_UNKNOWN}" in as_text(report).splitlines()
    assert report_of(reading)["holdings_unknown"] == [], "nobody was asked"


def test_sixteen_gpus_are_listed_eight_in_a_row() -> None:
    entities = [Entity(Scope.GPU, f"S{slot}", slot) for slot in range(16)]
    text = as_text(report_of(Reading(rows=[(entity, {"power_w": 100.0 + entity.gpu}) for entity in entities])))
    headers = [line.split("GPU ")[1:] for line in text.splitlines() if line.startswith("GPUs")]
    assert [[name.strip() for name in header] for header in headers] == [
        [str(slot) for slot in range(8)],
        [str(slot) for slot in range(8, 16)],
    ]


@pytest.mark.parametrize(
    ("name", "enabled", "readable", "why"),
    [
        ("log", True, True, ""),
        ("nowhere", True, False, "No such file or directory"),
        ("log", False, False, "turned off (kmsg_enabled)"),
    ],
)
def test_whether_the_kernel_log_can_be_read(tmp_path: Path, name: str, enabled: bool, readable: bool, why: str) -> None:
    (tmp_path / "log").write_text("4,1,1,-;a line\n")
    found = kernel_log(AgentConfig(kmsg_path=str(tmp_path / name), kmsg_enabled=enabled))
    assert (found["readable"], found["why"]) == (readable, why)

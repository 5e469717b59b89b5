"""`drover node`: the GPUs of a node as a table and as JSON; an absent value has its reason and is never 0."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from drover_cli.main import main
from drover_core.model import gpu_processes
from drover_core.model.gpu_processes import GpuProcess
from drover_proto import fleet_pb2 as pb
from testbed.fleet_stand_in import FleetStandIn

NOW_MS = 1_795_320_000_000
VALUES = {
    "gpu_util_ratio": 0.97, "framebuffer_used_bytes": 62.1e9, "framebuffer_total_bytes": 85.9e9, "gpu_temp_c": 61.0,
    "power_w": 641.0, "power_limit_w": 700.0, "sm_clock_mhz": 1410.0, "clock_event_reasons": 0x4,
}  # fmt: skip


@pytest.fixture
def detail(monkeypatch: pytest.MonkeyPatch) -> pb.NodeDetail:
    monkeypatch.setattr("drover_cli.commands.node.time", SimpleNamespace(time=lambda: NOW_MS / 1000))
    values = [pb.Value(metric=name, present=True, value=value, ts_ms=NOW_MS) for name, value in VALUES.items()]
    well = pb.GpuDetail(
        gpu=0, health="healthy", job="812", values=[*values, pb.Value(metric="memory_temp_c", reason="unsupported")]
    )
    lost = [pb.Value(metric=name, reason="lost") for name in (*VALUES, "memory_temp_c")]
    gone = pb.GpuDetail(gpu=1, health="confirmed", reason="XID 79 \x1b[31m", values=lost)
    row = pb.NodeRow(name="n1", health="confirmed", rack="r1", last_seen_ms=NOW_MS, reason="GPU 1 is lost")
    made = pb.NodeDetail(row=row, gpus=[well, gone])

    class Stub(FleetStandIn):
        def GetNode(self, request: pb.NodeRequest) -> pb.NodeDetail:
            assert request.node == "n1"
            return made

    Stub().install(monkeypatch)
    return made


def test_a_nodes_gpus_stand_side_by_side(detail: pb.NodeDetail, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["node", "n1"]) == 0
    out = capsys.readouterr().out
    head, *lines = out.splitlines()
    assert head.startswith("n1: confirmed, last report ")
    assert head.endswith("rack r1: GPU 1 is lost")
    well, gone = (next(line for line in lines if line.split()[:1] == [slot]) for slot in ("0", "1"))
    for text in ("healthy", "job 812", "97.0 %", "62.1 GB of 85.9 GB", "61", "641 W of 700 W", "1,410 MHz",
                 "software power cap", "HBM temperature: unsupported"):  # fmt: skip
        assert text in well, well
    assert "XID 79" in gone
    assert "all: lost" in gone
    assert " 0 " not in gone.removeprefix("1 ")
    assert "\x1b" not in out


def test_an_old_value_says_of_when_it_is(detail: pb.NodeDetail, capsys: pytest.CaptureFixture[str]) -> None:
    detail.gpus[0].values[0].ts_ms = NOW_MS - 3_600_000
    assert main(["node", "n1"]) == 0
    assert "GPU utilisation: from 60 min ago" in capsys.readouterr().out


def test_as_json_every_metric_has_its_value_or_its_reason(
    detail: pb.NodeDetail, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["node", "n1", "--json"]) == 0
    well, gone = map(json.loads, capsys.readouterr().out.splitlines())
    assert (well["node"], well["gpu"], well["values"]["power_w"], well["absent"]) == (
        "n1", 0, 641.0, {"memory_temp_c": "unsupported"},
    )  # fmt: skip
    assert well["times_ms"]["power_w"] == NOW_MS
    assert (gone["values"], gone["absent"]["power_w"], gone["health"]) == ({}, "lost", "confirmed")


def test_without_a_gpu_it_says_why(detail: pb.NodeDetail, capsys: pytest.CaptureFixture[str]) -> None:
    del detail.gpus[:]
    detail.inventory["no_gpu_reason"] = "no driver is loaded"
    assert main(["node", "n1"]) == 0
    assert "no GPU: no driver is loaded" in capsys.readouterr().out


def test_who_holds_a_gpu(detail: pb.NodeDetail, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["node", "n1"]) == 0
    assert "PROCESS" not in capsys.readouterr().out, "not known, or not for this caller"
    held = [GpuProcess(4242, 1000, "ada", "python3 \x1b[31m", NOW_MS - 7_200_000), GpuProcess(4243, 1001, "", "x", 0)]
    detail.inventory[gpu_processes.key(0)] = gpu_processes.pack(held)
    assert main(["node", "n1"]) == 0
    out = capsys.readouterr().out
    lines = [line.split() for line in out[out.index("PROCESS") :].splitlines()]
    assert next(line for line in lines if "4242" in line)[:4] == ["0", "4242", "ada", "python3"]
    assert next(line for line in lines if "4243" in line)[2:4] == ["uid", "1001"]
    assert "\x1b" not in out
    assert main(["node", "n1", "--json"]) == 0
    first, second = (json.loads(line)["processes"] for line in capsys.readouterr().out.splitlines())
    assert [one["pid"] for one in first] == [4243, 4242]
    assert second is None


def test_conditions_of_kubernetes_stand_above_the_gpus(
    detail: pb.NodeDetail, capsys: pytest.CaptureFixture[str]
) -> None:
    detail.conditions.add(type="KernelDeadlock", status="True", reason="DockerHung", standing="fault")
    detail.conditions.add(type="Lunch", status="True", message="\x1b[31m", standing="shown")
    assert main(["node", "n1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "Kubernetes condition KernelDeadlock=True: DockerHung" in lines
    [unknown] = [line for line in lines if "Lunch" in line]
    assert unknown.startswith("Kubernetes condition Lunch=True (not judged)") and "\x1b" not in unknown

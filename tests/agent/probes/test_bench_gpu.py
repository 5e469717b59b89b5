"""`benchmarks/bench_gpu.py` on the stand-in: it works, and can say no. Its recordings of real GPUs are whole."""

from __future__ import annotations

import copy
import importlib.util
import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from testbed.nvml import FakeNvml
from testbed.nvml_values import GPUS

ROOT = Path(__file__).resolve().parents[3]
RECORDED = ROOT / "tests/cases/agent/nvml_recorded"  # of real GPUs, one file each
NO_TORCH = "torch sees no CUDA device"


@pytest.fixture
def bench(fake_nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, with a second that takes no time, and processes that find the stand-in."""
    spec = importlib.util.spec_from_file_location("bench_gpu", ROOT / "benchmarks/bench_gpu.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def at_once(seconds: float) -> Iterator[int]:
        yield from range(1_700_000_000_000, 1_700_000_000_000 + round(seconds) * 1000, 1000)

    monkeypatch.setattr(module.common, "each_second", at_once)
    monkeypatch.setattr(module.common, "ENV", module.common.ENV | os.environ | fake_nvml.env())
    return module


def test_once_reads_every_metric_or_says_why(bench: ModuleType, tmp_path: Path) -> None:
    found = bench.once(tmp_path)
    assert found["holds"], found
    assert found["gpus"] == GPUS
    assert set(found["absent"].values()) == {"unsupported"}  # BER, which came with Blackwell
    assert not [key for key in found["inventory"] if key.endswith(("serial", "uuid"))]
    seen = json.loads((tmp_path / "once.json").read_text())
    gpu = next(entity for entity in seen["entities"] if entity["scope"] == "gpu")
    del gpu["values"]["power_w"]
    assert bench.judge_once(seen)["silent"] == {gpu["key"]: ["power_w"]}
    assert not bench.judge_once(seen)["holds"]
    assert not bench.judge_once(seen | {"entities": []})["holds"]


def test_the_cost_of_each_call_is_reported_at_the_agents_pace(
    bench: ModuleType, fake_nvml: FakeNvml, tmp_path: Path
) -> None:
    fake_nvml.cost(0, "nvmlDeviceGetTemperatureV", 2000)
    found = bench.calls(20)
    assert (found["holds"], found["gpus"], found["ticks"]) == (True, GPUS, 20)
    of_each_tick = {"nvmlDeviceGetFieldValues", "nvmlDeviceGetTemperatureV", "nvmlGpmSampleGet", "nvmlGpmMetricsGet"}
    [each_tick] = {found["calls"][name]["per_s"] for name in of_each_tick}
    assert found["calls"]["nvmlDeviceGetGpuFabricInfoV"]["per_s"] < each_tick / 5  # once in 10 s
    slow = found["calls"]["nvmlDeviceGetTemperatureV"]
    assert slow["p95_us"] >= 2000 > slow["median_us"]  # one of eight GPUs
    assert slow["cpu_median_us"] <= slow["median_us"]


@pytest.fixture
def recorded(bench: ModuleType, fake_nvml: FakeNvml, tmp_path: Path) -> dict[str, Any]:
    fake_nvml.trains(GPUS)
    found = bench.recording.record(tmp_path / "recording.json", NO_TORCH, 35)
    assert found["holds"], found["trouble"]
    made: dict[str, Any] = json.loads((tmp_path / "recording.json").read_text())
    return made


def test_a_recording_is_whole_and_names_no_gpu(recorded: dict[str, Any]) -> None:
    assert len(recorded["ticks"]) == 35
    assert recorded["inventory"]["gpu3.serial"] == "made-up-gpu3.serial"
    assert "GPU-0000" not in json.dumps(recorded)


@pytest.mark.parametrize("what", ["beyond its range", "a counter that falls", "a metric nobody reports"])
def test_a_recording_that_cannot_be_true_is_refused(bench: ModuleType, recorded: dict[str, Any], what: str) -> None:
    spoilt = copy.deepcopy(recorded)
    rows = [row for tick in spoilt["ticks"] for row in tick["rows"] if row["gpu"] == 2]
    if what == "beyond its range":
        rows[-1]["values"]["gpu_temp_c"] = 4000
    elif what == "a counter that falls":
        next(row for row in reversed(rows) if "energy_j" in row["values"])["values"]["energy_j"] = 1.0
    else:
        for row in rows:
            row["values"].pop("power_w", None)
    assert not bench.recording.trouble_of(recorded)
    [trouble] = bench.recording.trouble_of(spoilt)
    assert "(2, '')" in trouble


def test_recordings_of_real_gpus_are_whole(bench: ModuleType, recorded: dict[str, Any], tmp_path: Path) -> None:
    files = [tmp_path / "recording.json", *sorted(RECORDED.glob("*.json"))]
    assert len(files) >= 3
    assert {file.name: bench.recording.trouble_of(json.loads(file.read_text())) for file in files} == {
        f.name: [] for f in files
    }


@pytest.mark.parametrize(
    ("with_", "without", "holds"),
    [
        ((1.000, 1.001, 1.002, 1.001), (1.001, 1.000, 1.002, 1.001), True),
        ((1.050, 1.051, 1.050, 1.052), (1.001, 1.000, 1.002, 1.001), False),
        ((1.050, 1.051, 1.050, 1.052), (1.000, 1.080, 1.001, 1.002), True),
        ((0.950, 0.951, 0.950, 0.952), (1.001, 1.000, 1.002, 1.001), True),
    ],
    ids=["the same", "slower by 5 %", "no more than windows without differ", "faster"],
)
def test_a_slower_loop_is_distinguished_from_noise(
    bench: ModuleType, with_: tuple[float, ...], without: tuple[float, ...], holds: bool
) -> None:
    pairs = zip(without, with_, strict=True)
    found = bench.steps.compare([window for one, other in pairs for window in ((False, one), (True, other))])
    assert found["holds"] is holds, found
    assert found["slower_by"] == pytest.approx(sum(with_) / sum(without) - 1, abs=1e-5)


def test_a_loop_runs_while_the_agent_comes_and_goes(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(bench.common, "SETTLE_S", 0.2)
    monkeypatch.setattr(bench.steps, "WINDOWS", 2)
    found = bench.steps.compared(tmp_path, NO_TORCH, 2.0)
    assert found["holds"], found
    assert len(found["step_ms_with"]) == len(found["step_ms_without"]) == 1
    assert list(tmp_path.glob("spool-*/id"))

"""What is said of how good the ranking is: what the benchmark gives, and nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from drover_collector.api_risk import MEASURED, measured

ROOT = Path(__file__).resolve().parents[2]


def test_the_measured_figures_are_those_of_the_benchmark() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks/bench_risk.py")],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    written = json.loads((ROOT / "collector/drover_collector/detectors" / MEASURED).read_text("utf-8"))
    again = "python benchmarks/bench_risk.py > collector/drover_collector/detectors/risk_measured.json"
    assert written == json.loads(done.stdout), f"the model or the benchmark changed: {again}"


def test_they_reach_the_console_whole() -> None:
    told = measured()
    assert 0 < told.chance < told.captured < 1
    assert told.top_share == 0.05
    assert told.days > 100
    assert told.trace

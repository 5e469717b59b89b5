"""A short form of benchmarks/bench_durability.py: processes killed with -9 under load, and a damaged file."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "bench_durability.py"
KILLS = 5


def test_what_was_acknowledged_is_there_once_whichever_process_is_killed(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(BENCHMARK), "--kills", str(KILLS), "--nodes", "2", "--no-disk", "--quick", "--keep",
         str(tmp_path)],
        capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert (found["wrong"], found["not_shown"]) == ([], [])
    assert sum(found["collector_killed"]["points"].values()) == KILLS
    stored = found["stored"]
    assert min(stored["rows"], stored["acks"], stored["events"], stored["rollups_compared"]) > 0
    assert stored["spoiled_found"]["10s"] == 1  # the comparison is not blind
    # It was read and missed; of a merged part what it was made of may still have been there, and nothing is lost then.
    assert "is damaged: table gpu_samples" in found["damage"]["reported"]
    assert found["damage"]["rows_lost_after_agents_sent_again"] == 0

"""When a part of the demo dies: what happened is said, and nothing that explains it is deleted."""

from __future__ import annotations

import re
import urllib.request
from pathlib import Path

from testbed.demo import demo


def _kept(said: str) -> Path:
    """The folder that it names at its end."""
    found = re.findall(r"the logs are kept in (\S+);", said)
    assert found, said
    return Path(found[-1])


def test_a_collector_that_dies_leaves_its_logs_and_a_console_that_shows_it(tmp_path: Path) -> None:
    with demo(tmp_path, "--nodes", "8", "--faults", "none") as running:
        console = running.wait_for(r"console: +(\S+)\n")[1]
        running.wait_for("the fleet streams")
        running.child("drover_collector.main").kill()
        said = running.wait_for(r"failed: the collector was killed by signal 9; its last lines:\n(.*)\n")
        assert said[1].strip(), "the last line of its log"
        running.wait_for(f"The console stays up at {console}")
        with urllib.request.urlopen(f"{console}/_stcore/health", timeout=120) as reply:
            assert reply.status == 200
        assert running.interrupt() == 2
        assert "drover-collector is ready" in (_kept(running.said) / "collector.log").read_text()


def test_without_a_console_it_ends_by_itself_and_keeps_its_logs(tmp_path: Path) -> None:
    with demo(tmp_path, "--nodes", "8", "--faults", "none", "--no-dashboard") as running:
        running.wait_for("the fleet streams")
        running.child("drover_agent.main").kill()
        assert running.process.wait(120) == 2
        assert "the fleet was killed by signal 9" in running.said
        assert {"collector.log", "fleet.log"} <= {path.name for path in _kept(running.said).iterdir()}


def test_a_demo_that_ends_well_leaves_nothing_and_takes_no_port_that_others_agents_know(tmp_path: Path) -> None:
    with demo(tmp_path, "--nodes", "8", "--faults", "none", "--no-dashboard") as running:
        running.wait_for("the fleet streams")
        (folder,) = (tmp_path / "tmp").glob("drover-demo-*")
        found = re.search(r"agents on 127\.0\.0\.1:(\d+)", (folder / "collector.log").read_text())
        assert found is not None and int(found[1]) != 7301
        assert running.interrupt() == 0
        assert not folder.exists()

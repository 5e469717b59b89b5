"""The units that renew a node's certificate, as systemd's own tools read them."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "agent/systemd"
EXPOSURE = 2.5  # of 10, by `systemd-analyze security` of systemd 252


@pytest.fixture
def unit(tmp_path: Path) -> Path:
    """The service with a program that is there, beside its timer."""
    path = tmp_path / "drover-renew.service"
    path.write_text((FOLDER / path.name).read_text("utf-8").replace("/opt/drover/bin/drover-agent", "/bin/true"))
    shutil.copy2(FOLDER / "drover-renew.timer", tmp_path)
    return path


@pytest.mark.system
def test_systemd_finds_nothing_wrong(unit: Path) -> None:
    command = ["systemd-analyze", "verify", "--man=no", str(unit), str(unit.with_suffix(".timer"))]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@pytest.mark.system
def test_root_has_no_more_than_it_needs(unit: Path) -> None:
    command = ["systemd-analyze", "security", "--offline=true", "--no-pager", str(unit)]
    text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    found = re.search(r"Overall exposure level for \S+: ([\d.]+)", text)
    assert found is not None
    assert float(found[1]) <= EXPOSURE, text

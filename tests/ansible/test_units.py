"""All services' units by systemd's own tools, against what docs/explanation/security.md states."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STATED = dict(
    re.findall(
        r"^\| `(drover-[\w-]+\.service)` \| ([\d.]+) \|", (ROOT / "docs/explanation/security.md").read_text(), re.M
    )
)
UNITS = {path.name: path for path in sorted(ROOT.glob("*/systemd/*.service"))}


def test_every_service_has_its_exposure_stated() -> None:
    assert set(STATED) == set(UNITS) != set()


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """The units, with a program that is there."""
    for path in ROOT.glob("*/systemd/drover-*.*"):
        text = re.sub(r"/opt/drover/bin/drover[\w-]*", "/bin/true", path.read_text("utf-8"))
        (tmp_path / path.name).write_text(text)
    return tmp_path


@pytest.mark.system
@pytest.mark.parametrize("name", UNITS)
def test_a_service_exposes_no_more_than_stated(name: str, installed: Path) -> None:
    command = ["systemd-analyze", "security", "--offline=true", "--no-pager", str(installed / name)]
    text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    found = re.search(r"Overall exposure level for \S+: ([\d.]+)", text)
    assert found and float(found[1]) <= float(STATED[name]), text


@pytest.mark.system
@pytest.mark.parametrize("name", [*UNITS, "drover-renew.timer", "drover-probe.path"])
def test_systemd_finds_nothing_wrong(name: str, installed: Path) -> None:
    command = ["systemd-analyze", "verify", "--man=no", str(installed / name)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")

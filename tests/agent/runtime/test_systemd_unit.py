"""The unit as systemd's own tools read it."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from drover_agent.config import AgentConfig
from drover_agent.runtime.agent import GOODBYE_S
from drover_agent.runtime.systemd_notify import STALE_S, STATUS_S
from drover_agent.spool.async_spool import CLOSE_LIMIT_S

FOLDER = Path(__file__).resolve().parents[3] / "agent/systemd"
UNIT = FOLDER / "drover-agent.service"
EXPOSURE = 2.0  # of 10, by `systemd-analyze security` of systemd 252


def settings(path: Path) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in path.read_text("utf-8").splitlines():
        key, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            found.setdefault(key, []).append(value)
    return found


def test_nothing_in_the_unit_hides_what_the_agent_reads() -> None:
    unit = settings(UNIT)
    hiding = {"PrivateDevices", "ProtectKernelLogs", "ProtectProc", "PrivateUsers", "PrivateNetwork", "DynamicUser"}
    assert not hiding & unit.keys()
    assert unit["ProcSubset"] == ["all"]
    assert "CAP_SYSLOG" in unit["AmbientCapabilities"]
    assert {"char-195 rw", "/dev/kmsg r"} <= set(unit["DeviceAllow"])


def test_the_unit_bounds_what_the_agent_may_take_and_is_watched() -> None:
    """`systemd-analyze verify` (below) says that systemd takes each of these as a directive of its own."""
    unit = settings(UNIT)
    bounds = {key: unit[key] for key in ("MemoryHigh", "MemoryMax", "CPUQuota", "TasksMax", "LimitCORE")}
    assert bounds == {
        "MemoryHigh": ["128M"],
        "MemoryMax": ["256M"],
        "CPUQuota": ["50%"],
        "TasksMax": ["128"],
        "LimitCORE": ["0"],
    }
    assert (unit["Type"], unit["Restart"], unit["User"]) == (["notify"], ["always"], ["drover"])
    # Keep-alives are sent three times in the watchdog's time, and stop later than a stale tick.
    assert float(unit["WatchdogSec"][0]) >= 3 * STATUS_S
    assert float(unit["WatchdogSec"][0]) > STALE_S
    assert float(unit["TimeoutStopSec"][0]) > GOODBYE_S + CLOSE_LIMIT_S


def test_the_folder_that_containers_mount_outlives_the_agent() -> None:
    unit = settings(UNIT)
    assert unit["RuntimeDirectory"] == [Path(AgentConfig().steps_socket).parent.name]
    assert unit["RuntimeDirectoryPreserve"] == ["yes"]


@pytest.mark.parametrize(
    ("name", "capability"), [("job-environment.conf", "CAP_SYS_PTRACE"), ("kubernetes.conf", "CAP_DAC_OVERRIDE")]
)
def test_a_right_that_few_nodes_need_is_only_in_a_drop_in(name: str, capability: str) -> None:
    assert settings(UNIT)["AmbientCapabilities"] == settings(UNIT)["CapabilityBoundingSet"] == ["CAP_SYSLOG"]
    drop_in = settings(FOLDER / name)
    assert drop_in["AmbientCapabilities"] == drop_in["CapabilityBoundingSet"] == [capability]


@pytest.fixture
def unit(tmp_path: Path) -> Path:
    """The unit with a program that is there."""
    path = tmp_path / UNIT.name
    path.write_text(UNIT.read_text("utf-8").replace("/opt/drover/bin/drover-agent", "/bin/true"))
    return path


@pytest.mark.system
def test_systemd_finds_nothing_wrong_with_the_unit(unit: Path) -> None:
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit)], capture_output=True, text=True, check=False, timeout=120
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@pytest.mark.system
def test_the_unit_exposes_no_more_than_stated(unit: Path) -> None:
    command = ["systemd-analyze", "security", "--offline=true", "--no-pager", str(unit)]
    text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    found = re.search(r"Overall exposure level for \S+: ([\d.]+)", text)
    assert found and float(found[1]) <= EXPOSURE, text


@pytest.mark.system
def test_user_and_folders_are_made_by_systemd(tmp_path: Path) -> None:
    for name in ("etc", "usr", "var", "run"):
        (tmp_path / name).mkdir()
    root = f"--root={tmp_path}"
    subprocess.run(["systemd-sysusers", root, str(FOLDER / "drover.sysusers.conf")], check=True, timeout=120)
    subprocess.run(
        ["systemd-tmpfiles", root, "--create", str(FOLDER / "drover.tmpfiles.conf")], check=True, timeout=120
    )
    [user] = [line.split(":") for line in (tmp_path / "etc/passwd").read_text().splitlines() if "drover" in line]
    [group] = [line.split(":") for line in (tmp_path / "etc/group").read_text().splitlines() if "drover" in line]
    assert user[6] == "/usr/sbin/nologin"
    status = (tmp_path / "etc/drover").stat()
    assert (status.st_mode & 0o777, status.st_uid, status.st_gid) == (0o750, 0, int(group[2]))

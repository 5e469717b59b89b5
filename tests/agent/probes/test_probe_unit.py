"""The probe service's units as systemd's own tools read them."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[3] / "agent/systemd"
SERVICE, PATH, GROUP = (FOLDER / name for name in ("drover-probe.service", "drover-probe.path", "probe-group.conf"))
SPOOL = "/var/lib/drover/agent"
EXPOSURE = 2.0  # of 10, by `systemd-analyze security` of systemd 252


def settings(path: Path) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in path.read_text("utf-8").splitlines():
        key, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            found.setdefault(key, []).append(value)
    return found


def test_path_service_and_agent_mean_the_same_folder() -> None:
    watched = {Path(pattern).parent for pattern in settings(PATH)["PathExistsGlob"]}
    assert watched == {Path(SPOOL, "probes/requests"), Path(SPOOL, "probes/taken")}
    service = settings(SERVICE)
    assert service["ReadWritePaths"] == [f"{SPOOL}/probes"]
    assert f"--serve {SPOOL}/probes " in service["ExecStart"][0] + " "
    assert "--folder /var/lib/" + service["StateDirectory"][0] in service["ExecStart"][0]
    assert settings(FOLDER / "drover-agent.service")["StateDirectory"] == [SPOOL.removeprefix("/var/lib/")]


def test_it_has_no_right_and_no_network_and_bounds() -> None:
    service = settings(SERVICE)
    assert service["User"] == ["drover"]
    assert service["CapabilityBoundingSet"] == service["AmbientCapabilities"] == [""]
    assert (service["IPAddressDeny"], service["IPAddressAllow"]) == (["any"], ["localhost"])
    assert {"MemoryMax", "TasksMax", "CPUWeight", "IOWeight", "DevicePolicy"} <= service.keys()
    assert service["OOMPolicy"] == ["continue"], "or a probe that is killed would take the service with it"
    assert "Restart" not in service
    assert not {"MemoryDenyWriteExecute", "PrivateDevices", "ProtectProc", "PrivateNetwork"} & service.keys()
    assert {"char-195 rw", "char-nvidia-uvm rw"} <= set(service["DeviceAllow"])


def test_only_a_drop_in_gives_the_network() -> None:
    assert settings(GROUP)["IPAddressAllow"] == ["any"]


@pytest.fixture
def units(tmp_path: Path) -> list[str]:
    """The units with a program that is there."""
    for unit in (SERVICE, PATH):
        text = unit.read_text("utf-8").replace("/opt/drover/bin/drover-agent", "/bin/true")
        (tmp_path / unit.name).write_text(text)
    drop_in = tmp_path / "drover-probe.service.d/probe-group.conf"
    drop_in.parent.mkdir()
    drop_in.write_text(GROUP.read_text("utf-8"))
    return [str(tmp_path / unit.name) for unit in (SERVICE, PATH)]


@pytest.mark.system
def test_systemd_finds_nothing_wrong_with_them(units: list[str]) -> None:
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *units], capture_output=True, text=True, check=False, timeout=120
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@pytest.mark.system
def test_the_service_exposes_no_more_than_stated(units: list[str]) -> None:
    command = ["systemd-analyze", "security", "--offline=true", "--no-pager", units[0]]
    text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    found = re.search(r"Overall exposure level for \S+: ([\d.]+)", text)
    assert found and float(found[1]) <= EXPOSURE, text

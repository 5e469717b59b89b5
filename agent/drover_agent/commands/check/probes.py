"""Check of whether probes can run on this node: torch, the devices that CUDA opens, and the unit that runs them."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from drover_agent.commands.check.line import CheckState, Line
from drover_agent.commands.check.node import SYSTEMCTL_S

UNIT = "drover-probe.path"
NAME = "probes"
UVM = "nvidia-uvm"
INSTALL = "/opt/drover/bin/pip install '/path/to/drover[probe]'; docs/how-to/probe.md"
ENABLE = f"systemctl enable --now {UNIT}; docs/how-to/probe.md tells where it lies"
AT_BOOT = "nvidia-persistenced, or nvidia-modprobe -u -c=0 at boot"
BY_HAND = "`drover-agent probe` works by hand"


def probes() -> list[Line]:
    return [of(torch_version(), Path("/dev"), _unit())]


def torch_version() -> str:
    """Of torch as it is installed beside this agent, without importing it; "" where there is none."""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return ""


def of(torch: str, dev: Path, unit: Mapping[str, str] | None) -> Line:
    """The first thing that stands in the way.

    Args:
        torch: its version, "" for none. dev: /dev. unit: properties as `systemctl show` prints them; None: no systemd.
    """
    gpus = (dev / "nvidiactl").exists()
    if not torch:
        return Line(NAME, CheckState.MISSING, "cannot run here: torch is not installed", INSTALL)
    if gpus and "+cpu" in torch:
        return Line(NAME, CheckState.BROKEN, f"torch {torch} is built without CUDA: no GPU can be probed", INSTALL)
    if gpus and not (dev / UVM).exists():
        return Line(NAME, CheckState.BROKEN, f"{dev / UVM} is not there, which CUDA opens", AT_BOOT)
    if gpus and not os.access(dev / UVM, os.R_OK | os.W_OK):
        text = f"{dev / UVM} cannot be opened by this user, so CUDA cannot be used"
        return Line(NAME, CheckState.BROKEN, text, f"mode 0666, as the driver makes it: {AT_BOOT}")
    if unit is None:
        return Line(
            NAME, CheckState.MISSING, f"torch {torch}; {BY_HAND}, but without systemd no collector can ask for any"
        )
    if unit.get("LoadState") != "loaded":
        text = f"torch {torch}; no {UNIT}: {BY_HAND}, but no collector can ask for any"
        return Line(NAME, CheckState.MISSING, text, ENABLE)
    if unit.get("ActiveState") == "failed":
        return Line(
            NAME, CheckState.BROKEN, f"{UNIT} has failed", "journalctl -u drover-probe.path -u drover-probe.service"
        )
    if unit.get("ActiveState") != "active":
        text = f"{UNIT} is {unit.get('ActiveState', '?')}: requests of the collector end as not taken"
        return Line(NAME, CheckState.LIMITED, text, ENABLE)
    on = "GPUs" if gpus else "the CPU alone: no NVIDIA driver here"
    return Line(NAME, CheckState.OK, f"torch {torch}, {UNIT} waits for requests; they would run on {on}")


def _unit() -> dict[str, str] | None:
    if not Path("/run/systemd/system").exists():
        return None
    shown = subprocess.run(
        ["systemctl", "show", UNIT, "--property=LoadState,ActiveState"],
        capture_output=True, text=True, timeout=SYSTEMCTL_S, check=False,
    ).stdout  # fmt: skip
    return dict(line.partition("=")[::2] for line in shown.splitlines())

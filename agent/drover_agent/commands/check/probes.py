"""Check whether probes can run on this node: torch, the devices that CUDA opens, and the unit that runs them."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from drover_agent.commands.check.node import SYSTEMCTL_S
from drover_agent.commands.check.result import CheckResult, CheckState

UNIT = "drover-probe.path"
NAME = "probes"
UVM = "nvidia-uvm"
INSTALL = "/opt/drover/bin/pip install '/path/to/drover[probe]'; docs/how-to/probe.md"
ENABLE = f"systemctl enable --now {UNIT}; docs/how-to/probe.md says where it is"
AT_BOOT = "nvidia-persistenced, or nvidia-modprobe -u -c=0 at boot"
BY_HAND = "`drover-agent probe` works by hand"


def probes() -> list[CheckResult]:
    return [check_setup(torch_version(), Path("/dev"), _unit())]


def torch_version() -> str:
    """Return the version of the installed torch without importing it, "" if there is none."""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return ""


def check_setup(torch: str, dev: Path, unit: Mapping[str, str] | None) -> CheckResult:
    """Return the first obstacle, or that probes can run.

    Args:
        torch: its version, "" for none. dev: /dev. unit: properties as `systemctl show` prints them; None: no systemd.
    """
    gpus = (dev / "nvidiactl").exists()
    if not torch:
        return CheckResult(NAME, CheckState.MISSING, "cannot run here: torch is not installed", INSTALL)
    if gpus and "+cpu" in torch:
        return CheckResult(
            NAME, CheckState.BROKEN, f"torch {torch} is built without CUDA: no GPU can be probed", INSTALL
        )
    if gpus and not (dev / UVM).exists():
        return CheckResult(NAME, CheckState.BROKEN, f"{dev / UVM} does not exist, and CUDA needs it", AT_BOOT)
    if gpus and not os.access(dev / UVM, os.R_OK | os.W_OK):
        text = f"{dev / UVM} cannot be opened by this user, and CUDA needs it"
        return CheckResult(NAME, CheckState.BROKEN, text, f"mode 0666, as the driver makes it: {AT_BOOT}")
    if unit is None:
        return CheckResult(
            NAME, CheckState.MISSING, f"torch {torch}; {BY_HAND}, but without systemd no collector can request them"
        )
    if unit.get("LoadState") != "loaded":
        text = f"torch {torch}; no {UNIT}: {BY_HAND}, but no collector can request them"
        return CheckResult(NAME, CheckState.MISSING, text, ENABLE)
    if unit.get("ActiveState") == "failed":
        return CheckResult(
            NAME, CheckState.BROKEN, f"{UNIT} has failed", "journalctl -u drover-probe.path -u drover-probe.service"
        )
    if unit.get("ActiveState") != "active":
        text = f"{UNIT} is {unit.get('ActiveState', '?')}: the collector's requests end as not_taken"
        return CheckResult(NAME, CheckState.LIMITED, text, ENABLE)
    on = "GPUs" if gpus else "the CPU only: there is no NVIDIA driver"
    return CheckResult(NAME, CheckState.OK, f"torch {torch}, {UNIT} waits for requests; they run on {on}")


def _unit() -> dict[str, str] | None:
    if not Path("/run/systemd/system").exists():
        return None
    shown = subprocess.run(
        ["systemctl", "show", UNIT, "--property=LoadState,ActiveState"],
        capture_output=True, text=True, timeout=SYSTEMCTL_S, check=False,
    ).stdout  # fmt: skip
    return dict(line.partition("=")[::2] for line in shown.splitlines())

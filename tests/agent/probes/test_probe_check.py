"""`drover-agent check`: whether probes can run here, and what stands in the way."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

from drover_agent.commands.check import probes as check_probes
from drover_agent.commands.check.result import CheckState

ACTIVE = {"LoadState": "loaded", "ActiveState": "active"}
GPUS = ("nvidiactl", "nvidia-uvm")


@pytest.mark.parametrize(
    ("torch", "devices", "unit", "state", "text", "remedy"),
    [
        ("", GPUS, ACTIVE, CheckState.MISSING, "torch is not installed", "drover[probe]"),
        ("2.9.0+cpu", GPUS, ACTIVE, CheckState.BROKEN, "torch 2.9.0+cpu is built without CUDA", "drover[probe]"),
        ("2.9.0", ("nvidiactl",), ACTIVE, CheckState.BROKEN, "nvidia-uvm does not exist", "nvidia-modprobe -u -c=0"),
        ("2.9.0", GPUS, None, CheckState.MISSING, "without systemd no collector can request", ""),
        (
            "2.9.0",
            GPUS,
            {"LoadState": "not-found"},
            CheckState.MISSING,
            "no drover-probe.path",
            "systemctl enable --now",
        ),
        (
            "2.9.0",
            GPUS,
            ACTIVE | {"ActiveState": "failed"},
            CheckState.BROKEN,
            "has failed",
            "journalctl -u drover-probe",
        ),
        ("2.9.0", GPUS, ACTIVE | {"ActiveState": "inactive"}, CheckState.LIMITED, "end as not_taken", "enable --now"),
        (
            "2.9.0",
            GPUS,
            ACTIVE,
            CheckState.OK,
            "torch 2.9.0, drover-probe.path waits for requests; they run on GPUs",
            "",
        ),
        ("2.9.0+cpu", (), ACTIVE, CheckState.OK, "they run on the CPU only: there is no NVIDIA driver", ""),
    ],
)
def test_what_stands_in_the_way_of_probes(
    tmp_path: Path, torch: str, devices: tuple[str, ...], unit: dict[str, str] | None, state: CheckState, text: str,
    remedy: str,
) -> None:  # fmt: skip
    for name in devices:
        (tmp_path / name).touch()
    line = check_probes.check_setup(torch, tmp_path, unit)
    assert (line.name, line.state) == ("probes", state)
    assert text in line.text
    assert remedy in line.remedy
    assert bool(remedy) == bool(line.remedy)


def test_a_device_that_this_user_may_not_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in GPUS:
        (tmp_path / name).touch()
    asked: list[Path] = []
    monkeypatch.setattr(check_probes.os, "access", lambda path, mode: asked.append(path) or mode != os.R_OK | os.W_OK)
    line = check_probes.check_setup("2.9.0", tmp_path, ACTIVE)
    assert (line.state, asked) == (CheckState.BROKEN, [tmp_path / "nvidia-uvm"])
    assert "cannot be opened by this user" in line.text


def test_the_version_is_that_of_the_torch_next_to_the_agent() -> None:
    found = check_probes.torch_version()
    assert bool(found) == (importlib.util.find_spec("torch") is not None)

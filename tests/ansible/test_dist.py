"""What `make dist` refuses. A whole one is built by `make test-rollout`."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

FILE = Path(__file__).resolve().parents[2] / "ansible/dist.py"


@pytest.fixture
def dist(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """With downloads of one wheel of `MB`."""
    spec = importlib.util.spec_from_file_location("drover_dist", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "drover_dist", module)  # its dataclasses look for it
    spec.loader.exec_module(module)
    module.MB = 1

    def download(_: object, into: Path, *_more: object, **_named: object) -> None:
        (into / "pip-1-py3-none-any.whl").write_bytes(b"")
        (into / "big-1-py3-none-any.whl").write_bytes(os.urandom(module.MB * 1_000_000))

    monkeypatch.setattr(module, "download", download)
    return module


def bundle(dist: ModuleType, folder: Path) -> Path:
    own = folder / "drover-1-py3-none-any.whl"
    own.write_bytes(b"")
    made: Path = dist.bundle_up(dist.BUNDLES[0], own, "1", "x86_64", ("3.11",), folder)
    return made


def test_a_bundle_for_nodes_that_grew_too_heavy_is_not_made(dist: ModuleType, tmp_path: Path) -> None:
    assert bundle(dist, tmp_path).name == "drover-agent-1-x86_64.tar.gz"
    dist.MB = 31
    with pytest.raises(dist.DistError, match=r"would have 31\.\d MB, more than 30"):
        bundle(dist, tmp_path)
    assert list(tmp_path.glob("*.tar.gz")) == []


@pytest.mark.parametrize("number", [0, 1])
def test_each_lock_meets_its_requirements(dist: ModuleType, number: int) -> None:
    chosen = dist.BUNDLES[number]
    assert dist.unmet(chosen, chosen.lock("x86_64").read_text()) == []


def test_a_lock_with_two_versions_of_one_package_is_not_written(
    dist: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(_: object, into: Path, python: str, machine: str) -> None:
        version = "2.4" if python == "3.11" else "2.5"
        (into / f"numpy-{version}-cp{python.replace('.', '')}-none-manylinux_x86_64.whl").write_bytes(b"x")

    monkeypatch.setattr(dist, "download", download)
    monkeypatch.setattr(dist.Bundle, "lock", lambda self, machine: tmp_path / "lock.txt")
    with pytest.raises(dist.DistError, match=r"the newest numpy does not run on every Python.*bound it in pyproject"):
        dist.lock(dist.BUNDLES[1], "x86_64", ("3.11", "3.12"))
    assert not (tmp_path / "lock.txt").exists()


def test_a_pin_that_no_lock_has_is_refused(dist: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "requirements", lambda _: ["left-pad>=9.9"])
    with pytest.raises(dist.DistError, match=r"agent-x86_64\.txt lacks left-pad>=9\.9: run"):
        bundle(dist, tmp_path)

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


def test_a_pin_that_no_lock_has_is_refused(dist: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "requirements", lambda _: ["left-pad>=9.9"])
    with pytest.raises(dist.DistError, match=r"agent-x86_64\.txt lacks left-pad>=9\.9: run"):
        bundle(dist, tmp_path)

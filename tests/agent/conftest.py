"""A node with GPUs for tests of the agent: the real nvidia-ml-py on the C stand-in for NVML."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from testbed.nvml import SCRIPT_VARIABLE, FakeNvml, build, forget, load


@pytest.fixture(scope="session")
def nvml_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stand-in, loaded into this process; tests that do not ask for `fake_nvml` see a machine without GPU."""
    if shutil.which("gcc") is None:
        pytest.skip("the stand-in for NVML is compiled with gcc: apt-get install gcc libc6-dev")
    library = build(tmp_path_factory.mktemp("nvml"))
    load(library)
    return library


@pytest.fixture
def fake_nvml(nvml_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    """Eight healthy GPUs, for this process and, by its `env()`, for others."""
    forget(nvml_library)
    fake = FakeNvml(tmp_path / "nvml.script", nvml_library)
    fake.healthy(8)
    monkeypatch.setenv(SCRIPT_VARIABLE, str(fake.script))
    return fake

"""The NVIDIA library is there and the loader does not take it: files made with gcc, each met in its own process."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from drover_agent.sources.nvml.library import NOT_FOUND, SONAME

READ = (
    "from drover_agent.sources.nvml.source import NvmlSource\n"
    "print(NvmlSource('n').read(0).inventory['no_gpu_reason'])"
)  # fmt: skip
PROBE = (
    "from drover_agent.probes.eligible import DriverError, look\n"
    "try: print(look().why_none)\n"
    "except DriverError as error: print('DriverError', error)"
)

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")


def build(path: Path, code: str = "int nvmlOne(void) { return 1; }", *flags: str) -> Path:
    source = path.parent / "source.c"
    source.write_text(code)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", path, source, *flags], check=True)
    return path


def said(folder: Path, program: str = READ) -> str:
    """What a new process prints that searches this folder first."""
    if os.path.lexists(f"/usr/lib/x86_64-linux-gnu/{SONAME}"):
        pytest.skip("this machine has the NVIDIA library")
    done = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | {"LD_LIBRARY_PATH": str(folder)}, capture_output=True,
        text=True, check=True, timeout=99,
    )  # fmt: skip
    return done.stdout.strip()


def test_no_library_anywhere_is_not_found(tmp_path: Path) -> None:
    assert said(tmp_path) == NOT_FOUND


def test_an_undefined_symbol_is_named(tmp_path: Path) -> None:
    build(tmp_path / SONAME, "extern int gone(void); int nvmlInit_v2(void) { return gone(); }")
    text = said(tmp_path)
    assert "was found and could not be loaded" in text
    assert f"{tmp_path / SONAME}; undefined symbol; gone" in text
    why, _, remedy = text.partition(": ")
    assert remedy.startswith("install the NVIDIA driver's libraries for this machine"), why


def test_a_part_that_the_library_needs_is_named(tmp_path: Path) -> None:
    needed = build(tmp_path / "libneeded.so")
    build(tmp_path / SONAME, "int nvmlOne(void); int nvmlInit_v2(void) { return nvmlOne(); }", str(needed))
    needed.unlink()
    text = said(tmp_path)
    assert "was found and could not be loaded" in text
    assert "libneeded.so" in text


def test_a_truncated_file_is_said_to_be_too_short(tmp_path: Path) -> None:
    made = build(tmp_path / SONAME)
    made.write_bytes(made.read_bytes()[:40])
    text = said(tmp_path)
    assert "was found and could not be loaded" in text
    assert "file too short" in text


@pytest.mark.parametrize(
    ("place", "value", "words"), [(4, 1, "is of 32 bits"), (18, 0xB7, "is of another architecture")]
)
def test_a_file_for_another_machine_is_named(tmp_path: Path, place: int, value: int, words: str) -> None:
    """glibc passes over it and says that there is none."""
    made = build(tmp_path / SONAME)
    data = bytearray(made.read_bytes())
    data[place] = value if data[place] != value else 0x3E
    made.write_bytes(data)
    text = said(tmp_path)
    assert "was found and could not be loaded" in text
    assert f"{tmp_path / SONAME} {words}" in text


def test_a_link_to_nothing_is_named(tmp_path: Path) -> None:
    (tmp_path / SONAME).symlink_to("libnvidia-ml.so.580.95.05")
    assert "links to libnvidia-ml.so.580.95.05, which is not there" in said(tmp_path)


@pytest.mark.skipif(not shutil.which("setpriv") and os.geteuid() == 0, reason="root reads every file")
def test_a_file_that_may_not_be_read_is_named(tmp_path: Path) -> None:
    build(tmp_path / SONAME).chmod(0)
    if os.geteuid():
        text = said(tmp_path)
    else:  # root may read it all the same: without that right
        rights = "-dac_override,-dac_read_search"
        done = subprocess.run(
            ["setpriv", "--bounding-set", rights, "--inh-caps", rights, sys.executable, "-c", READ],
            env=os.environ | {"LD_LIBRARY_PATH": str(tmp_path)}, capture_output=True, text=True, check=True, timeout=99,
        )  # fmt: skip
        text = done.stdout
    assert "was found and could not be loaded" in text
    assert "Permission denied" in text


def test_a_probe_says_it_too(tmp_path: Path) -> None:
    build(tmp_path / SONAME, "extern int gone(void); int nvmlInit_v2(void) { return gone(); }")
    assert said(tmp_path, PROBE).startswith("DriverError the NVIDIA driver cannot be used: libnvidia-ml.so.1 was found")
    (tmp_path / SONAME).unlink()
    assert said(tmp_path, PROBE).startswith("no NVIDIA driver is in use here")


def test_check_calls_it_broken_on_a_machine_without_gpus_on_its_bus(tmp_path: Path) -> None:
    """One that is not there is no fault of such a machine; one that cannot be loaded is."""
    program = (
        "from pathlib import Path\n"
        "from drover_agent.commands.check import sources as check_sources\n"
        "from drover_agent.config import AgentConfig\n"
        "from drover_agent.commands.read_all import SourceReading\n"
        "from drover_agent.sources.nvml.source import NvmlSource\n"
        "config = AgentConfig(node='n1', sys_root='/nowhere')\n"
        "opened = SourceReading('nvml', 1.0, 0, readings=[NvmlSource('n').read(0)])\n"
        "line, = check_sources._gpus(config, opened, [])\n"
        "print(line.state.value, '|', line.text, '|', line.remedy)"
    )
    assert said(tmp_path, program).startswith("missing | libnvidia-ml.so.1 was not found | install")
    build(tmp_path / SONAME, "extern int gone(void); int nvmlInit_v2(void) { return gone(); }")
    state, text, remedy = said(tmp_path, program).split(" | ")
    assert state == "broken"
    assert "undefined symbol; gone" in text
    assert remedy.startswith("install the NVIDIA driver's libraries")

"""What a running agent loads and keeps; the figures themselves come from `benchmarks/bench_agent.py`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from drover_agent.lean import settle


def answer(program: str) -> Any:
    """What a fresh interpreter prints, as JSON."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    return json.loads(done.stdout)


def loaded(*modules: str) -> set[str]:
    """The top-level modules and those of grpc that an import of these brings in."""
    names = ", ".join(modules)
    return set(answer(f"import sys, json, {names}; print(json.dumps(list(sys.modules)))"))


def test_a_running_agent_loads_nothing_that_only_others_need() -> None:
    found = loaded(
        "drover_agent.main", "drover_agent.runtime", "drover_agent.sources.nvml", "drover_agent.sources.host"
    )
    heavy = {
        "numpy",
        "pyarrow",
        "rich",
        "torch",
        "psutil",
        "cryptography",
        "multiprocessing",
        "http.client",
        "unittest",
    }
    assert not found & heavy
    assert not {name for name in found if name.startswith(("drover_agent.simulation", "drover_agent.check"))}
    assert "grpc" in found


def test_the_command_alone_loads_neither_grpc_nor_asyncio() -> None:
    assert not loaded("drover_agent.main") & {"asyncio", "grpc", "pynvml"}


TEXT = """
import json, re
def text():
    "KiB of program text that is resident."
    total, wanted = 0, False
    for line in open("/proc/self/smaps"):
        if re.match("[0-9a-f]+-[0-9a-f]+ ", line):
            wanted = line.split()[1] == "r-xp"
        elif wanted and line.startswith("Rss:"):
            total += int(line.split()[1])
    return total
"""


def test_text_that_only_the_start_needed_is_given_back_and_the_process_goes_on() -> None:
    found = answer(
        TEXT + "import ssl, grpc, pynvml\n"
        "from drover_agent.lean import settle\n"
        "before = text(); unmapped = settle(); after = text()\n"
        "grpc.insecure_channel('127.0.0.1:1').close()\n"
        "ssl.create_default_context()\n"
        "print(json.dumps([before, after, unmapped]))"
    )
    before, after, unmapped = found
    assert after < before / 2
    assert unmapped >= 1024 * before


def test_what_was_made_before_is_no_work_for_the_garbage_collector() -> None:
    frozen, left = answer(
        "import gc, json, drover_agent.config\nfrom drover_agent.lean import settle\nsettle()\n"
        "print(json.dumps([gc.get_freeze_count(), len(gc.get_objects())]))"
    )
    assert frozen > 10 * left


def test_a_machine_without_maps_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gc.freeze", lambda: None)  # the tests' own process goes on
    assert settle(tmp_path / "maps") == 0


def test_only_text_of_files_is_unmapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Constants that were relocated, data and memory of no file would be lost."""
    monkeypatch.setattr("gc.freeze", lambda: None)
    (tmp_path / "maps").write_text(
        "1000-2000 r--p 00000000 08:01 77 /lib/libx.so\n2000-3000 rw-p 00000000 08:01 77 /lib/libx.so\n"
        "3000-4000 r-xp 00000000 00:00 0 [vdso]\n4000-5000 rwxp 00000000 08:01 77 /lib/libx.so\n"
        "5000-6000 r-xs 00000000 08:01 77 /lib/libx.so\n6000-7000 rw-p 00000000 00:00 0 \n"
    )
    assert settle(tmp_path / "maps") == 0

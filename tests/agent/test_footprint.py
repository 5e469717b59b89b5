"""What a running agent loads and keeps; the figures themselves come from `benchmarks/bench_agent.py`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from drover_agent.runtime.trim_memory import settle
from drover_core.program_text import texts as mapped_texts


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
        "drover_agent.main", "drover_agent.app", "drover_agent.sources.nvml.source", "drover_agent.sources.host.source"
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
    assert not {name for name in found if name.startswith(("drover_simulator", "drover_agent.commands.check.report"))}
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
        "from drover_agent.runtime.trim_memory import settle\n"
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
        "import gc, json, drover_agent.config\nfrom drover_agent.runtime.trim_memory import settle\nsettle()\n"
        "print(json.dumps([gc.get_freeze_count(), len(gc.get_objects())]))"
    )
    assert frozen > 10 * left


def test_rings_that_die_after_the_start_are_freed() -> None:
    """Frozen ones never would be: freezing again and again would be a leak."""
    assert answer(
        "import gc, json, weakref\nfrom drover_agent.runtime.trim_memory import settle\nsettle()\n"
        "class Ring:\n    pass\n"
        "one = Ring(); one.itself = one; known = weakref.ref(one)\n"
        "settle(); del one; gc.collect()\n"
        "print(json.dumps(known() is None))"
    )


def test_a_machine_without_maps_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gc.freeze", lambda: None)  # the tests' own process goes on
    assert settle(tmp_path / "smaps") == 0
    (tmp_path / "smaps").write_text("what is this: no-number r-xp 0 0 0 /lib/x\nx-y r-xp 0 0 0 /lib/x\n")
    assert settle(tmp_path / "smaps") == 0


def test_only_text_that_is_the_same_in_its_file_is_unmapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Data, memory of no file, relocated or patched text, files that are there no more: all would be lost."""
    monkeypatch.setattr("gc.freeze", lambda: None)
    lines = (
        "1000-2000 r--p 00000000 08:01 77 /lib/libx.so", "2000-3000 rw-p 00000000 08:01 77 /lib/libx.so",
        "3000-4000 r-xp 00000000 00:00 0 [vdso]", "4000-5000 rwxp 00000000 08:01 77 /lib/libx.so",
        "5000-6000 r-xs 00000000 08:01 77 /lib/libx.so", "6000-7000 rw-p 00000000 00:00 0",
        "7000-8000 r-xp 00000000 08:01 77 /lib/libx.so (deleted)", "8000-9000 r-xp 00000000 00:06 5 /dev/zero",
        "9000-a000 r-xp 00000000 00:01 9 /memfd:jit (deleted)", "a000-b000 r-xp 00000000 00:00 0",
    )  # fmt: skip
    texts = [f"{line}\nSize: 4 kB\nRss: 4 kB\nAnonymous: 0 kB\nVmFlags: rd ex mr mw me sd\n" for line in lines]
    texts.append("b000-c000 r-xp 00000000 08:01 77 /lib/relocated.so\nRss: 4 kB\nAnonymous: 4 kB\n")
    (tmp_path / "smaps").write_text("".join(texts))
    assert mapped_texts(tmp_path / "smaps") == []
    (tmp_path / "smaps").write_text(texts[0].replace("r--p", "r-xp") + "".join(texts))
    assert mapped_texts(tmp_path / "smaps") == [(0x1000, 0x1000)]


def test_text_that_was_written_to_in_memory_is_left_as_it_is(tmp_path: Path) -> None:
    """As a debugger's breakpoint is: a page of its own over a file's."""
    (tmp_path / "text").write_bytes(b"A" * 8192)
    assert answer(
        "import ctypes, json, mmap, sys\n"
        "from drover_agent.runtime.trim_memory import settle\n"
        f"file = open({str(tmp_path / 'text')!r}, 'r+b')\n"
        "rights = mmap.PROT_READ | mmap.PROT_WRITE\n"
        "both = [mmap.mmap(file.fileno(), 8192, mmap.MAP_PRIVATE, rights) for _ in range(2)]\n"
        "both[0][0:1] = b'B'\n"
        "libc = ctypes.CDLL(None)\n"
        "at = [ctypes.addressof(ctypes.c_char.from_buffer(one)) for one in both]\n"
        "done = [libc.mprotect(ctypes.c_void_p(a), ctypes.c_size_t(8192), 5) for a in at]\n"
        "settle()\n"
        "print(json.dumps([done, ctypes.string_at(at[0], 1).decode(), ctypes.string_at(at[1], 1).decode()]))"
    ) == [[0, 0], "B", "A"]

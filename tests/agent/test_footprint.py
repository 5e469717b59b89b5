"""What a running agent loads and keeps; the figures themselves come from `benchmarks/bench_agent.py`."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any


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


def test_what_lives_after_the_start_is_no_work_for_the_garbage_collector() -> None:
    frozen, left = answer(
        "import gc, json\nfrom drover_agent.app import keep_what_lives\nkeep_what_lives()\n"
        "print(json.dumps([gc.get_freeze_count(), len(gc.get_objects())]))"
    )
    assert frozen > 10 * left


def test_cycles_that_die_after_the_start_are_freed() -> None:
    assert answer(
        "import gc, json, weakref\nfrom drover_agent.app import keep_what_lives\nkeep_what_lives()\n"
        "class Ring:\n    pass\n"
        "one = Ring(); one.itself = one; known = weakref.ref(one)\n"
        "del one; gc.collect()\n"
        "print(json.dumps(known() is None))"
    )

"""What the process may open, and what becomes of freed memory."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

from drover_collector.process import open_files


def limit(monkeypatch: pytest.MonkeyPatch, soft: int, hard: int | None = None) -> list[tuple[int, int]]:
    """Pretend these limits; gives what is set."""
    limits_set: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, soft if hard is None else hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: limits_set.append(limits))
    return limits_set


def test_the_soft_limit_is_raised_to_the_hard_one(monkeypatch: pytest.MonkeyPatch) -> None:
    limits_set = limit(monkeypatch, 1024, 20_000)
    open_files.raise_limit()
    assert limits_set == [(20_000, 20_000)]


def test_a_fleet_that_does_not_fit_is_reported_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    limit(monkeypatch, 4096)
    (trouble,) = open_files.troubles(12_500)
    assert trouble.startswith("Only 2,096 of 12,500 agents fit: this process may open 4,096 files;")
    assert "LimitNOFILE=65536" in trouble
    assert open_files.troubles(2_096) == []


def test_without_a_limit_all_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    limit(monkeypatch, resource.RLIM_INFINITY)
    assert open_files.troubles(10**6) == []


def test_connections_leave_files_to_the_store_and_some_are_always_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    for soft, most in ((65_536, 63_536), (4096, 2096), (1024, 512), (resource.RLIM_INFINITY, None)):
        limit(monkeypatch, soft)
        assert open_files.connections() == most


FREED = """
import sys, threading
if sys.argv[1] == "settled":
    from drover_collector.process import memory
    memory.settle()
def rss():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
def work():
    held = [bytearray(b"x" * (1 << 20)) for _ in range(100)]
    small = bytearray(100)  # above them, so that an arena could not shrink
    kept.append(small)
    del held
kept = []
before = rss()
work()  # glibc learns from the first free what it takes for large
for _ in range(4):
    thread = threading.Thread(target=work); thread.start(); thread.join()
print((rss() - before) >> 20)
"""


def test_large_arrays_that_were_freed_go_back_to_the_system() -> None:
    done = subprocess.run([sys.executable, "-c", FREED, "settled"], capture_output=True, check=True, timeout=120)
    assert int(done.stdout) < 40  # MiB; the arrays of one thread took 100


BETWEEN = """
import os
from drover_collector.process import memory
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
held = [(bytes(100_000), bytes(600)) for _ in range(1000)]  # what stays lies between what goes
kept = [small for _, small in held]
del held
before = resident()
memory.give_back()
print(before - resident())
"""


def test_memory_between_what_is_held_goes_back_too() -> None:
    done = subprocess.run([sys.executable, "-c", BETWEEN], capture_output=True, check=True, timeout=120)
    assert int(done.stdout) > 50 << 20

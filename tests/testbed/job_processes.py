"""A node's GPUs and a /proc whose processes are those of jobs."""

from __future__ import annotations

from pathlib import Path

from drover_agent.sources.base import Entity
from drover_agent.sources.gpus import Gpus
from drover_agent.sources.workloads.jobs import JobsSource
from drover_core.metrics.catalog import Scope

T = 1_800_000_000_000
RESOURCES = ("nvidia.com/gpu*", "nvidia.com/mig-*")


def uuid(slot: int) -> str:
    return f"GPU-{slot:08d}-0000-0000-0000-000000000000"


def node(count: int = 8) -> Gpus:
    gpus = Gpus()
    for slot in range(count):
        gpus.set_entity(Entity(Scope.GPU, f"S{slot}", slot, uuid=uuid(slot), pci=f"0000:{0x10 + slot:02x}:00.0"))
        gpus.set_pids(slot, ())
    return gpus


def source(gpus: Gpus, proc: Path, socket: Path | None = None) -> JobsSource:
    return JobsSource(proc, gpus, str(socket or ""), RESOURCES)


def namespace(proc: Path, name: str) -> None:
    (proc / "self/ns").mkdir(parents=True, exist_ok=True)
    (proc / "self/ns/pid").unlink(missing_ok=True)
    (proc / "self/ns/pid").symlink_to(name)


def process(proc: Path, pid: int, name: str, parent: int, cgroup: str = "/", **files: str) -> None:
    folder = proc / str(pid)
    (folder / f"task/{pid}").mkdir(parents=True)
    files = {
        "comm": name,
        "stat": f"{pid} ({name}) S {parent} 0",
        "cgroup": f"0::{cgroup}",
        "status": "Uid:\t0",
        **files,
    }
    for file, text in files.items():
        (folder / file).write_text(text + ("" if text.endswith("\0") else "\n"))
    (folder / f"task/{pid}/children").write_text("")


def ended(holdings: dict[int, str | None], slot: int) -> bool:
    return slot in holdings and holdings[slot] is None

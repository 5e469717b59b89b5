"""A node's parts together: what happens to one when another stalls or fails."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from drover_agent.app import NodeRuntime
from drover_agent.config import AgentConfig, SpoolConfig
from drover_agent.runtime import kernel_log as runtime_module
from drover_proto import telemetry_pb2 as pb
from testbed.waiting import until


def kernel_line(seq: int, code: int) -> str:
    us = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
    return f"4,{seq},{us},-;NVRM: Xid (PCI:0000:3b:00): {code}, pid=1\n"


def codes(node: NodeRuntime) -> list[str]:
    found, after = [], 0
    while record := node.agent.spool.next(pb.EVENTS, after):
        after = record.seq
        found.append(pb.Record.FromString(record.body).event.code)
    return found


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "kmsg"
    path.write_text(kernel_line(1, 48))
    return path


@contextlib.asynccontextmanager
async def running(folder: Path, log: Path) -> AsyncIterator[NodeRuntime]:
    config = AgentConfig(
        node="n1",
        collectors=("127.0.0.1:1",),
        hardware="none",
        kmsg_path=str(log),
        spool=SpoolConfig(dir=str(folder / "spool")),
    )
    node = NodeRuntime(config)
    task = asyncio.create_task(node.run())
    try:
        yield node
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def add(log: Path, line: str) -> None:
    with log.open("a") as file:
        file.write(line)


def test_the_kernel_log_is_read_on_after_the_agent_stood_still(
    tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow disk or a paused machine stops the event loop; the reader's thread waits for it."""
    monkeypatch.setattr(runtime_module, "STOP_CHECK_S", 0.05)

    async def scenario() -> None:
        async with running(tmp_path, log) as node:
            await until(lambda: "48" in codes(node), "the backlog")
            add(log, kernel_line(2, 79))
            time.sleep(0.4)  # noqa: ASYNC251  # the loop stands still: the reader has a line and nobody to take it
            await until(lambda: "79" in codes(node), "the line that came meanwhile")
            add(log, kernel_line(3, 94))
            await until(lambda: "94" in codes(node), "a line after it")

    asyncio.run(scenario())


def test_a_reader_of_the_kernel_log_that_fails_is_reported_and_tried_again(
    tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime_module, "RETRY_S", 0.05)

    log.unlink()

    async def scenario() -> None:
        async with running(tmp_path, log) as node:
            await until(lambda: "kmsg_unreadable" in codes(node), "word of it")
            add(log, kernel_line(1, 79))
            await until(lambda: "79" in codes(node), "its lines, once it can be read")
            assert codes(node).count("kmsg_unreadable") == 1

    asyncio.run(scenario())


def test_an_unforeseen_error_in_the_reader_is_reported(
    tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime_module, "RETRY_S", 0.05)
    broken = True

    def slot_of(self: runtime_module.KernelLogWatcher, pci: str, uuid: str) -> int | None:
        if broken:
            raise RuntimeError("devices changed while they were looked at")
        return 0

    monkeypatch.setattr(runtime_module.KernelLogWatcher, "slot_of", slot_of)

    async def scenario() -> None:
        nonlocal broken
        async with running(tmp_path, log) as node:
            await until(lambda: "kmsg_unreadable" in codes(node), "word of it")
            broken = False
            add(log, kernel_line(2, 79))
            await until(lambda: "79" in codes(node), "later lines")

    asyncio.run(scenario())

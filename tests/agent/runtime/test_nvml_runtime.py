"""The driver let go at an operator's request, and an agent that starts again when its NVIDIA library was replaced."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import shutil
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from drover_agent import app as runtime
from drover_agent.app import NodeRuntime
from drover_agent.config import AgentConfig, SpoolConfig
from drover_agent.runtime import nvml as nvml_runtime
from drover_agent.runtime.driver_release import (
    MAX_S,
    ReleaseError,
    ReleaseRequests,
    request_release,
)
from drover_agent.sampling.scheduler import Sampler
from drover_agent.sources.nvml import source as nvml
from drover_agent.sources.nvml.events import BURST
from drover_agent.sources.nvml.library import SONAME, replaced_by
from drover_proto import telemetry_pb2 as pb
from testbed.nvml import FakeNvml
from testbed.telemetry_server import TelemetryServer, play
from testbed.waiting import until

HANG_S = 1.0  # that a read, an opening or a closing is waited for here, so that no test waits for long
# The agent's own command, but for how often it tries to start NVML.
AGENT = (
    "import sys; from drover_agent.main import main; from drover_agent.sources.nvml import source; "
    "source.RETRY_MS = 500; "
    "sys.exit(main())"
)


@pytest.fixture(autouse=True)
def looks_and_gives_up_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml_runtime, "REQUEST_MS", 1_000)
    monkeypatch.setattr(nvml_runtime, "READ_LIMIT_S", HANG_S)
    monkeypatch.setattr(runtime, "Sampler", functools.partial(Sampler, limit_s=HANG_S))


def codes(node: NodeRuntime) -> list[str]:
    found, after = [], 0
    while record := node.agent.spool.next(pb.EVENTS, after):
        after = record.seq
        found.append(pb.Record.FromString(record.body).event.code)
    return found


@contextlib.asynccontextmanager
async def running(folder: Path) -> AsyncIterator[NodeRuntime]:
    config = AgentConfig(
        node="n1",
        collectors=("127.0.0.1:1",),
        hardware="nvml",
        kmsg_enabled=False,
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
        assert node._nvml
        node._nvml.nvml.close()  # or the next test of this process finds NVML open


def opened(fake_nvml: FakeNvml) -> int:
    """How many times NVML is open now: what holds /dev/nvidia*."""
    calls = fake_nvml.calls()
    return calls.get("nvmlInitWithFlags", 0) - calls.get("nvmlShutdown", 0)


def test_an_operator_has_the_driver_let_go_and_given_back(tmp_path: Path, fake_nvml: FakeNvml) -> None:
    fake_nvml.count_calls(tmp_path / "calls")

    async def scenario() -> None:
        async with running(tmp_path) as node:
            await until(lambda: len(node.gpus.pids()) == 8, "the GPUs")
            assert opened(fake_nvml) == 1
            text = await asyncio.to_thread(request_release, tmp_path / "spool", 60)
            assert text.startswith("the agent has released the NVIDIA driver until ")
            assert opened(fake_nvml) == 0
            assert node.gpus.pids() == {}
            assert len(node.gpus.all()) == 8  # the kernel log's lines still find their GPUs
            await until(lambda: "driver_released" in codes(node), "the event")
            await asyncio.to_thread(request_release, tmp_path / "spool", 0)
            await until(lambda: "driver_back" in codes(node), "the end of it")
            await until(lambda: len(node.gpus.pids()) == 8, "the GPUs again")
            assert opened(fake_nvml) == 1
            assert "driver_missing" not in codes(node)
            assert sorted(path.name for path in (tmp_path / "spool").glob("nvml-*")) == []

    asyncio.run(scenario())


def test_a_driver_in_which_a_call_hangs_is_not_let_go_and_the_operator_is_reported_why(
    tmp_path: Path, fake_nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvml, "CLOSE_LIMIT_S", 0.2)
    fake_nvml.count_calls(tmp_path / "calls")

    async def scenario() -> None:
        async with running(tmp_path) as node:
            await until(lambda: len(node.gpus.pids()) == 8, "the GPUs")
            fake_nvml.block(2, "nvmlDeviceGetFieldValues")
            await until(lambda: "driver_hung" in codes(node), "the hang")
            with pytest.raises(ReleaseError, match="a call for GPU 2 does not return from the driver"):
                await asyncio.to_thread(request_release, tmp_path / "spool", 60, 4.0)
            assert opened(fake_nvml) == 1
            fake_nvml.unblock(2, "nvmlDeviceGetFieldValues")
            await until(lambda: "driver_back" in codes(node), "its return")

    asyncio.run(scenario())


def test_an_opening_that_hangs_is_reported_and_waited_for(tmp_path: Path, fake_nvml: FakeNvml) -> None:
    fake_nvml.block(0, "nvmlInitWithFlags")

    async def scenario() -> None:
        async with running(tmp_path) as node:
            await until(lambda: "driver_hung" in codes(node), "word of it")
            assert node.gpus.all() == ()
            fake_nvml.unblock(0, "nvmlInitWithFlags")
            await until(lambda: "driver_back" in codes(node), "its end")
            await until(lambda: len(node.gpus.all()) == 8, "the GPUs")

    asyncio.run(scenario())


def test_an_opening_that_hung_and_then_fails_leaves_the_driver_missing(
    tmp_path: Path, fake_nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of the hang is reported as `driver_back`, after which a collector takes the driver for healthy."""
    monkeypatch.setattr(nvml, "RETRY_MS", 500)
    fake_nvml.down()

    async def scenario() -> None:
        async with running(tmp_path) as node:
            await until(lambda: "driver_missing" in codes(node), "the driver to be missing")
            fake_nvml.block(0, "nvmlInitWithFlags")
            await until(lambda: "driver_hung" in codes(node), "the hang")
            fake_nvml.unblock(0, "nvmlInitWithFlags")
            await until(lambda: "driver_back" in codes(node), "its end")
            await until(lambda: codes(node)[-1] == "driver_missing", "the driver to be missing still")

    asyncio.run(scenario())


def test_a_disk_that_hangs_under_the_requests_holds_up_nothing_else(
    tmp_path: Path, fake_nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs, asked = threading.Event(), threading.Event()

    def read(self: ReleaseRequests, now_ms: int) -> None:
        asked.set()
        hangs.wait(120)

    monkeypatch.setattr(ReleaseRequests, "read", read)

    async def scenario() -> None:
        async with running(tmp_path) as node:
            await until(lambda: len(node.gpus.pids()) == 8, "the GPUs, though the disk hangs")
            assert asked.is_set()
            assert not hangs.is_set()
            hangs.set()

    asyncio.run(scenario())


def test_a_request_without_an_agent_is_taken_back(tmp_path: Path) -> None:
    with pytest.raises(ReleaseError, match="is drover-agent running with its spool in"):
        request_release(tmp_path, 60, wait_s=0.3)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("seconds", [-1, MAX_S + 1])
def test_a_release_has_an_end(tmp_path: Path, seconds: float) -> None:
    with pytest.raises(ReleaseError, match=f"must be between 0 and {MAX_S}"):
        request_release(tmp_path, seconds)


def test_a_folder_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    with pytest.raises(ReleaseError, match="run this as root or as the agent's user"):
        request_release(tmp_path / "none", 60)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "[" * 999,
        '{"id": "a"}',
        '{"id": "a", "until_ms": "soon"}',
        '{"id": "a", "until_ms": 99999999999999}',
        '{"id": "a", "until_ms": 1e999}',
    ],
)
def test_a_request_that_is_none_is_removed(tmp_path: Path, text: str) -> None:
    (tmp_path / "nvml-release.json").write_text(text)
    assert ReleaseRequests(tmp_path).read(1_700_000_000_000) is None
    assert list(tmp_path.iterdir()) == []


def test_an_agent_whose_library_was_replaced_starts_again_in_place(
    tmp_path: Path, nvml_library: Path, fake_nvml: FakeNvml
) -> None:
    """The driver was upgraded under it: the same process, with the new library, and nothing of the spool lost."""
    folder = tmp_path / "lib"
    folder.mkdir()
    old, new, link = (folder / name for name in ("libnvidia-ml.so.580.95.05", "libnvidia-ml.so.590.44.01", SONAME))
    shutil.copy(nvml_library, old)
    link.symlink_to(old.name)
    fake = FakeNvml(tmp_path / "upgraded.script", link)
    fake.healthy(2)

    async def scenario() -> None:
        server = TelemetryServer()
        address = await server.start()
        settings = {
            "node": "n1",
            "collectors": f'["{address}"]',
            "spool.dir": str(tmp_path / "spool"),
            "hardware": "nvml",
            "kmsg_enabled": "false",
            "batch_s": "1",
        }
        words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
        agent = await asyncio.create_subprocess_exec(
            sys.executable, "-c", AGENT, "run", *words, env=fake.env(), stderr=asyncio.subprocess.PIPE
        )
        await until(lambda: any(e.gpu == 1 and e.serial for h in server.hellos for e in h.entities), "the GPUs")
        shutil.copy(nvml_library, new)
        link.unlink()
        link.symlink_to(new.name)
        old.unlink()
        fake.system("driver", "590.44.01")
        fake.system("library", "590.44.01")
        await until(lambda: server.codes().count("agent_started") == 2, "the new start")
        await until(lambda: server.hellos[-1].inventory.get("driver_version") == "590.44.01", "the GPUs again")
        assert agent.returncode is None
        assert server.codes().index("driver_missing") < server.codes().index("agent_stopped")
        agent.terminate()
        _, errors = await asyncio.wait_for(agent.communicate(), 120)
        assert agent.returncode == 0, errors.decode()
        assert "Starting again: the NVIDIA library was replaced by" in errors.decode()

    play(scenario())


def test_a_new_start_that_changes_nothing_is_not_made_again(
    tmp_path: Path, nvml_library: Path, fake_nvml: FakeNvml
) -> None:
    """A link of another folder leads to the old library still, so that a new process loads it again: one new start
    shows it, and each further one would cost telemetry."""
    folder, found_first = tmp_path / "lib", tmp_path / "first"
    folder.mkdir()
    found_first.mkdir()
    for version in ("580.95.05", "590.44.01"):
        shutil.copy(nvml_library, folder / f"libnvidia-ml.so.{version}")
    (folder / SONAME).symlink_to("libnvidia-ml.so.590.44.01")
    (found_first / SONAME).symlink_to(folder / "libnvidia-ml.so.580.95.05")
    fake = FakeNvml(tmp_path / "upgraded.script", found_first / SONAME)
    fake.healthy(2)
    fake.system("library", "590.44.01")

    async def scenario() -> None:
        server = TelemetryServer()
        address = await server.start()
        log = tmp_path / "log"
        words = ["--set", "node=n1", "--set", f'collectors=["{address}"]', "--set", f"spool.dir={tmp_path / 'spool'}"]
        words += ["--set", "hardware=nvml", "--set", "kmsg_enabled=false", "--set", "batch_s=1"]
        with log.open("w") as errors:
            agent = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "drover_agent.main", "run", *words, env=fake.env(), stderr=errors
            )
        await until(lambda: "A restart did not help: the NVIDIA library was" in log.read_text(), "that it gives up")
        await until(lambda: server.codes().count("agent_started") == 2, "both starts")
        assert "differ in version" in server.hellos[-1].inventory["no_gpu_reason"]
        agent.terminate()
        assert await asyncio.wait_for(agent.wait(), 120) == 0
        assert log.read_text().count("Starting again") == 1

    play(scenario())


def maps_of(folder: Path, name: str) -> Path:
    path = folder / "maps"
    path.write_text(
        "7f0000000000-7f0000001000 r-xp 00000000 08:01 11    /usr/lib/libc.so.6\n"
        f"7f1000000000-7f1000001000 r-xp 00000000 08:01 12                         {folder}/{name}\n"
    )
    return path


def test_a_library_counts_as_replaced_only_where_a_new_process_would_load_another(tmp_path: Path) -> None:
    now = tmp_path / "libnvidia-ml.so.580.95.05"
    now.touch()
    (tmp_path / SONAME).symlink_to(now.name)
    assert replaced_by(maps_of(tmp_path, now.name)) == ""
    assert replaced_by(maps_of(tmp_path, "libnvidia-ml.so.570.1 (deleted)")) == str(now)
    assert replaced_by(maps_of(tmp_path, "libnvidia-ml.so.570.1")) == str(now)
    assert replaced_by(maps_of(tmp_path, "libother.so.1")) == ""
    (tmp_path / SONAME).unlink()
    now.unlink()
    assert replaced_by(maps_of(tmp_path, f"{now.name} (deleted)")) == ""  # removed, and nothing to load instead


def test_more_xids_than_one_read_gives_all_arrive_and_nobody_waits_for_more_when_the_node_ends(
    tmp_path: Path, fake_nvml: FakeNvml
) -> None:
    def waiting() -> bool:
        return any(thread.name == "nvml:xids" for thread in threading.enumerate())

    async def scenario() -> None:
        async with running(tmp_path) as node:
            assert node._nvml
            watcher = node._nvml.nvml.xids
            await until(lambda: len(watcher.watching) == 8, "the wait for XIDs")
            different = [1000 + number for number in range(BURST + 10)]  # else repeats would be summed
            with fake_nvml.batch():
                for code in different:
                    fake_nvml.xid(5, code)
            await until(lambda: set(map(str, different)) <= set(codes(node)), "all of them")
            assert waiting()
        await until(lambda: not waiting(), "the end of the wait")

    asyncio.run(scenario())

"""The command as users run it: a process of its own, a real collector's side, signals."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from drover_agent.config import AgentConfig
from drover_core import VERSION
from drover_core.settings import example_toml
from drover_proto import telemetry_pb2 as pb
from testbed.nvml import FakeNvml
from testbed.telemetry_server import TelemetryServer, play
from testbed.waiting import until

COMMAND = [sys.executable, "-m", "drover_agent.main"]


def drover_agent(*words: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    full = {**os.environ, **(env or {})}
    return subprocess.run([*COMMAND, *words], capture_output=True, text=True, check=False, timeout=120, env=full)


def overrides(folder: Path, address: str = "127.0.0.1:1", **more: str) -> list[str]:
    settings = {"node": "n1", "collectors": f'["{address}"]', "spool.dir": str(folder / "spool"), **more}
    return [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["run", "--config", "/no/such/file"],
            "drover-agent: /no/such/file: No such file or directory; check the path",
        ),
        (["run", "--set", "intervall_s=1"], "unknown key; did you mean interval_s?"),
        (["once", "--set", "hardware=7"], "hardware: must be a string"),
        (["run", "--set", "spool.dir=/proc/no/spool"], "cannot be used as the spool"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(words: list[str], message: str) -> None:
    done = drover_agent(*words)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert done.stdout == ""


def test_config_prints_the_sample() -> None:
    assert drover_agent("config").stdout == example_toml(AgentConfig)


def test_once_without_a_gpu_reads_the_host_and_says_why_there_is_none(tmp_path: Path) -> None:
    done = drover_agent("once", "--json", *overrides(tmp_path))
    report = json.loads(done.stdout)
    [node] = [entity for entity in report["entities"] if entity["scope"] == "node"]
    assert (report["node"], node["scope"], node["key"]) == ("n1", "node", "n1")
    assert node["values"]["memory_total_bytes"] > 1e8
    assert "cpu_util_ratio" in node["values"]
    assert "libnvidia-ml.so.1 was not found" in report["inventory"]["no_gpu_reason"]
    assert not (tmp_path / "spool").exists()
    text = drover_agent("once", *overrides(tmp_path)).stdout
    assert "no_gpu_reason: libnvidia-ml.so.1 was not found" in text


def test_once_shows_gpus_and_the_reason_for_what_is_absent(tmp_path: Path, fake_nvml: FakeNvml) -> None:
    done = drover_agent("once", "--json", *overrides(tmp_path), env=fake_nvml.env())
    report = json.loads(done.stdout)
    gpus = [entity for entity in report["entities"] if entity["scope"] == "gpu"]
    assert [gpu["gpu"] for gpu in gpus] == list(range(8))
    assert all(gpu["values"]["power_w"] > 0 for gpu in gpus)
    assert all(not gpu["values"].keys() & gpu["absent"].keys() for gpu in gpus)


async def start(*words: str, env: dict[str, str] | None = None) -> asyncio.subprocess.Process:
    full = {**os.environ, **(env or {})}
    return await asyncio.create_subprocess_exec(*COMMAND, "run", *words, env=full, stderr=asyncio.subprocess.PIPE)


async def stop(agent: asyncio.subprocess.Process, number: int = signal.SIGTERM) -> str:
    agent.send_signal(number)
    _, errors = await asyncio.wait_for(agent.communicate(), 120)
    return errors.decode()


def test_a_node_without_a_gpu_streams_its_host_until_sigterm(tmp_path: Path) -> None:
    async def scenario() -> None:
        server = TelemetryServer()
        log = tmp_path / "kmsg"
        log.write_text("")
        words = overrides(tmp_path, await server.start(), interval_s="0.2", batch_s="1", kmsg_path=str(log))
        agent = await start(*words)
        await until(lambda: len(server.rows) > 5, "rows of the host")
        await until(lambda: "driver_missing" in server.codes())
        assert "libnvidia-ml.so.1 was not found" in server.hellos[-1].inventory["no_gpu_reason"]
        with log.open("a") as file:
            file.write(
                f"4,1,{time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000},-;NVRM: Xid (PCI:0000:3b:00): 79, x\n"
            )
        await until(lambda: "79" in server.codes(), "the line of the kernel log")
        await stop(agent)
        assert agent.returncode == 0
        assert server.codes()[-1] == "agent_stopped"
        assert (server.broken, server.repeated_rows) == ([], 0)
        assert {key for key, _ in server.rows if "/" not in key} == {"n1"}

    play(scenario())


def test_a_node_with_gpus_sends_one_event_for_an_xid_from_both_sides(tmp_path: Path, fake_nvml: FakeNvml) -> None:
    async def scenario() -> None:
        server = TelemetryServer()
        log = tmp_path / "kmsg"
        log.write_text("")
        words = overrides(tmp_path, await server.start(), interval_s="0.5", batch_s="1", kmsg_path=str(log))
        agent = await start(*words, env=fake_nvml.env())
        await until(lambda: len({key for key, _ in server.rows if "/" not in key}) == 9, "eight GPUs and the host")
        pci = next(e.pci for e in server.hellos[-1].entities if e.gpu == 3 and e.pci).rpartition(".")[0]
        fake_nvml.xid(3, 79)
        with log.open("a") as file:
            when = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
            file.write(f"4,1,{when},-;NVRM: Xid (PCI:{pci}): 79, GPU has fallen off the bus.\n")
        await until(lambda: "79" in server.codes())
        await stop(agent)
        [xid] = [event for event in server.events.values() if event.code == "79"]
        assert (xid.gpu, xid.count, xid.source) == (3, 1, "kmsg")
        assert server.broken == []

    play(scenario())


def test_a_hung_gpu_silences_itself_alone_and_the_agent_still_stops(tmp_path: Path, fake_nvml: FakeNvml) -> None:
    async def scenario() -> None:
        server = TelemetryServer()
        words = overrides(tmp_path, await server.start(), interval_s="0.5", batch_s="1", kmsg_enabled="false")
        agent = await start(*words, env=fake_nvml.env())
        await until(lambda: len({key for key, _ in server.rows if "/" not in key}) == 9, "eight GPUs and the host")
        keys = {e.gpu: e.key for e in server.hellos[-1].entities if e.scope == pb.GPU}
        fake_nvml.block(2, "nvmlDeviceGetFieldValues")
        await until(lambda: "driver_hung" in server.codes(), "the silence as an event")
        [hung] = [event for event in server.events.values() if event.code == "driver_hung"]
        last = max(ts for key, ts in server.rows if key == keys[2])
        others = set(keys.values()) - {keys[2]} | {"n1"}
        await until(
            lambda: {key for key, ts in server.rows if ts > last + 4_000 and "/" not in key} == others,
            "all others go on",
        )
        await until(lambda: any(a.gpu == 2 and a.reason == "timeout" for a in server.absences))
        assert hung.gpu == 2
        await stop(agent)
        assert agent.returncode == 0

    play(scenario())


def test_a_killed_agent_goes_on_where_it_was(tmp_path: Path) -> None:
    async def scenario() -> None:
        server = TelemetryServer(acks=False)
        address = await server.start()
        words = overrides(tmp_path, address, interval_s="0.1", batch_s="1", kmsg_enabled="false", hardware="none")
        agent = await start(*words)
        await until(lambda: sum(lane != 1 for lane, _ in server.order) >= 3, "three batches")
        await stop(agent, signal.SIGKILL)
        sent = set(server.order)
        server.acks = True
        agent = await start(*words)
        await until(lambda: server.codes().count("agent_started") == 2)
        await until(lambda: sent <= set(server.order[len(sent) :]), "what was not acknowledged, again")
        await stop(agent)
        assert (server.broken, server.repeated_rows) == ([], 0)

    play(scenario())


def test_simulated_hardware_streams_gpus(tmp_path: Path) -> None:
    async def scenario() -> None:
        server = TelemetryServer()
        words = overrides(tmp_path, await server.start(), hardware="simulated", batch_s="1")
        agent = await start(*words)
        await until(lambda: len({key for key, _ in server.rows if "/" not in key}) >= 9, "GPUs and the host")
        await stop(agent)
        assert server.broken == []

    play(scenario())


def test_the_version_an_agent_sends_is_the_installed_one() -> None:
    assert importlib.metadata.version("drover") == VERSION


def test_an_agent_loads_no_module_that_only_costs_memory() -> None:
    script = "import sys, drover_agent.main; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120
    ).stdout
    assert not {"importlib.metadata", "email.message", "numpy", "drover_simulator"} & set(loaded.split())


def test_systemd_is_reported_that_it_is_ready_and_goes_on_while_a_gpu_hangs(
    tmp_path: Path, fake_nvml: FakeNvml
) -> None:
    async def scenario() -> None:
        server = TelemetryServer()
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
            systemd.bind(str(tmp_path / "notify"))
            systemd.setblocking(False)
            received: list[str] = []

            def has_received(line: str) -> bool:
                with contextlib.suppress(BlockingIOError):
                    while True:
                        received.extend(systemd.recv(65536).decode().split("\n"))
                return any(one.startswith(line) for one in received)

            words = overrides(tmp_path, await server.start(), interval_s="0.5", batch_s="1", kmsg_enabled="false")
            env = {**fake_nvml.env(), "NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "600000"}
            agent = await start(*words, env=env)
            await until(lambda: has_received("READY=1"), "ready")
            await until(lambda: has_received(f"STATUS=8 GPUs; sending to 127.0.0.1:{server.port}"), "how it stands")
            fake_nvml.block(2, "nvmlDeviceGetFieldValues")
            await until(lambda: "driver_hung" in server.codes(), "the silence as an event")
            received.clear()
            await until(lambda: has_received("WATCHDOG=1"), "a keep-alive while the driver hangs")
            await until(lambda: any("s from the collector's" in one for one in received), "its clock")
            await until(
                lambda: has_received("") and any("no answer from nvml:2" in one for one in received), "who hangs"
            )
            fake_nvml.unblock(2, "nvmlDeviceGetFieldValues")
            await until(lambda: "driver_back" in server.codes(), "its answer")
            done = await asyncio.to_thread(drover_agent, "release", *overrides(tmp_path))
            assert done.returncode == 0, done.stderr
            received.clear()
            await until(
                lambda: has_received("STATUS=8 GPUs, none of them read: NVML is not open; "), "who has the driver"
            )
            await stop(agent)
            assert has_received("STOPPING=1")

    play(scenario())


def test_release_lets_go_of_the_driver_for_a_while(tmp_path: Path, fake_nvml: FakeNvml) -> None:
    async def scenario() -> None:
        server = TelemetryServer()
        words = overrides(tmp_path, await server.start(), interval_s="0.5", batch_s="1", kmsg_enabled="false")
        agent = await start(*words, env=fake_nvml.env())
        await until(lambda: len({key for key, _ in server.rows if "/" not in key}) == 9, "eight GPUs and the host")
        done = await asyncio.to_thread(drover_agent, "release", "--seconds", "3600", *overrides(tmp_path))
        assert done.returncode == 0, done.stderr
        assert "has released the NVIDIA driver until" in done.stdout
        await until(lambda: "driver_released" in server.codes(), "the pause as an event")
        done = await asyncio.to_thread(drover_agent, "release", "--seconds", "0", *overrides(tmp_path))
        assert done.returncode == 0, done.stderr
        await until(lambda: "driver_back" in server.codes(), "the driver is taken up again")
        await stop(agent)

    play(scenario())


def test_release_without_an_agent_says_so(tmp_path: Path) -> None:
    done = drover_agent("release", *overrides(tmp_path))
    assert done.returncode == 1
    assert str(tmp_path / "spool") in done.stderr

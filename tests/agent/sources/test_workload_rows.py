"""From a training loop and an inference server to the collector's store: settings, sources, agent, wire, claims."""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path

import pytest

from drover_agent.client.training_steps import Reporter
from drover_agent.config import AgentConfig, load_config
from drover_agent.polled_sources import POLLED, build_sources
from drover_agent.runtime.agent import Agent
from drover_agent.sources.base import Entity
from drover_agent.sources.gpus import Gpus
from drover_agent.sources.workloads.steps import NAMES
from drover_collector.store import Store
from drover_core.metrics.catalog import Scope
from testbed.ingest import Collector
from testbed.loop import in_loop
from testbed.pages import serving
from testbed.waiting import until, wait_until

H100 = Entity(Scope.GPU, "S0", 0, serial="S0", model="NVIDIA H100 80GB HBM3")


def settings(folder: Path, port: int, url: str) -> AgentConfig:
    values = {
        "node": '"n1"',
        "hardware": '"none"',
        "collectors": f'["127.0.0.1:{port}"]',
        "spool.dir": f'"{folder}/spool"',
        "steps_socket": f'"{folder}/steps.sock"',
        "inference_urls": f'["chat={url}"]',
        "proc_root": f'"{folder}/proc"',
        "sys_root": f'"{folder}/sys"',
    }
    return load_config(None, [f"{key}={value}" for key, value in values.items()])


@in_loop
async def test_rows_of_workloads_reach_the_store_with_their_absences(store: Store) -> None:
    now_ms = time.time_ns() // 1_000_000
    gpus = Gpus()
    gpus.set_entity(H100)
    with tempfile.TemporaryDirectory(prefix="drover") as name, serving() as page:
        page.body = b'vllm:num_requests_running{model_name="m"} 12\nvllm:num_requests_waiting{model_name="m"} 3\n'
        async with Collector(store, now_ms=now_ms) as collector:
            config = settings(Path(name), collector.port, page.url)
            sources = [one for one in build_sources(config, gpus) if one.name in ("inference", "steps")]
            agent = Agent(config, config.node_name)
            running = asyncio.create_task(agent.run())

            def tick(ts_ms: int) -> int:
                readings = [source.read(ts_ms) for source in sources]
                for reading in readings:
                    agent.accept(ts_ms, reading)
                return sum(len(reading.rows) for reading in readings)

            tick(now_ms)
            Reporter("pretrain", 1000, 4e14, 1, 0, f"{name}/steps.sock").step(1.0)
            wait_until(lambda: tick(time.time_ns() // 1_000_000) == 2, "both give a row")
            agent.flush()

            def stored() -> dict[str, dict[str, float]]:
                found = store.samples.latest_values("n1", time.time_ns() // 1_000_000)
                return {
                    link or "": {metric: value for metric, (value, _) in values.items()}
                    for (scope, _, link), values in found.items()
                    if scope is Scope.WORKLOAD
                }

            await until(lambda: stored().keys() == {"chat", "pretrain"}, "both rows are stored")
            assert stored()["chat"] == {"requests_running": 12, "requests_waiting": 3}
            assert stored()["pretrain"] == {
                "step_time_s": 1.0,
                "tokens_per_step": 1000,
                "flops_per_step": 4e14,
                "mfu_ratio": pytest.approx(4e14 / 989.4e12),
            }
            page.status = 503
            tick(time.time_ns() // 1_000_000)
            agent.flush()

            def away() -> set[tuple[str, str, str]]:
                return {(a.link, a.metric, a.reason) for a in store.absences.current("n1") if a.reason == "error"}

            names = {"ttft_p50_s", "ttft_p95_s", "tokens_per_s", "requests_running", "requests_waiting"}
            await until(lambda: away() == {("chat", metric, "error") for metric in names}, "the absences are stored")
            assert not {a.metric for a in store.absences.current("n1") if a.link == "pretrain"} & set(NAMES[:-1])
            assert collector.ingest.stats.rejected_total == 0
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            for source in sources:
                source.close()


def test_a_node_loads_only_what_its_settings_turn_on(tmp_path: Path) -> None:
    config = load_config(None, ["dcgm_url=", "steps_socket=", f"proc_root={tmp_path}"])
    for name in ("dcgm", "inference", "steps"):
        source = POLLED[name][1](config, Gpus())
        assert source.name == name
        assert type(source).__name__ == "Off"
        assert not source.read(0).rows
        source.close()

"""CPU per sample of a collector and of VictoriaMetrics that get the same telemetry at the same time, from many agents.

Every agent has a TLS connection of its own to either server, kept open. VictoriaMetrics (remote write, snappy) asks for
no client certificate: that its version cannot do. The collector is a whole one: mutual TLS with a certificate per node,
validation, an Ack after the data is durable (VictoriaMetrics answers before its data is on disk), detection. CPU is
user and system time of each process over the same windows, merges included. Messages of several seconds are sent to
VictoriaMetrics in both forms of remote write, each measured by itself: as Prometheus and vmagent send them, and
grouped, which costs it least (`RemoteWrite`). Prints one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import resource
import shutil
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("GRPC_VERBOSITY", "NONE")

import grpc

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "benchmarks")]

from cpu_agents import GPUS, START_S, Agent, BenchError, Load, telemetry
from load.certificates import Authority
from load.collector import usage_of

from drover_core.model.fleet import dump_toml
from drover_simulator.fleet import build_fleet
from testbed.system_processes import free_port

VICTORIA = "victoria-metrics"
GOALS = {1: 10.0, 10: 30.0}
LAG_S = 12.0  # messages of 10 s come up to 10 s after a bucket's end
SETTLE_S = 120.0
STEADY = 0.95  # of the samples that should have come
CONNECTING = 16  # agents at once


@contextlib.contextmanager
def process(folder: Path, name: str, *command: str) -> Iterator[tuple[int, Path]]:
    log = folder / f"{name}.log"
    with log.open("w") as output:
        child = subprocess.Popen(command, stdout=output, stderr=output)
        try:
            yield child.pid, log
        finally:
            ended = child.poll()
            child.terminate()
            child.wait(60)
    if ended is not None:
        raise SystemExit(f"{name} ended by itself: {log.read_text()[-1000:]}")


def forms(lengths: Sequence[int]) -> list[tuple[int, bool]]:
    """(seconds of a message, whether remote write is grouped); of one second both forms are the same."""
    return [(seconds, grouped) for seconds in lengths for grouped in (False, True) if seconds > 1 or not grouped]


@dataclass(slots=True)
class Servers:
    ours: int  # process ids
    victoria: int

    def cpu(self) -> tuple[float, float]:
        return usage_of(self.ours).cpu_s, usage_of(self.victoria).cpu_s


def failed(running: Sequence[asyncio.Task[None]]) -> None:
    """
    Raises:
        BenchError: of the first of these that ended.
    """
    for task in running:
        if task.done():
            task.result()


async def measure(args: argparse.Namespace, agents: Sequence[Agent], load: Load, servers: Servers) -> dict[str, Any]:
    windows: list[dict[str, Any]] = []
    running = [asyncio.create_task(agent.run()) for agent in agents]
    deadline = time.monotonic() + SETTLE_S
    while min(agent.accepted for agent in agents) < 3:  # till then VictoriaMetrics makes its index of the series
        await asyncio.sleep(0.5)
        failed(running)
        if time.monotonic() > deadline:
            raise BenchError(f"not every agent got through within {SETTLE_S:g} s: too many, or a busy machine")
    first, began = servers.cpu(), load.samples
    for _ in range(args.rounds):
        for seconds, grouped in forms(args.messages):
            load.seconds, load.grouped = seconds, grouped
            await asyncio.sleep(args.warm_up + seconds)
            threads = usage_of(servers.ours).by_thread
            before, samples, messages, at = servers.cpu(), load.samples, load.messages, time.monotonic()
            posted = load.posted_bytes
            await asyncio.sleep(args.window)
            after, took = servers.cpu(), time.monotonic() - at
            count = load.samples - samples
            now = usage_of(servers.ours).by_thread
            spent = {name: round((now[name] - threads.get(name, 0.0)) / took, 3) for name in now}
            windows.append(
                {
                    "message_s": seconds,
                    "grouped": grouped,
                    "samples_per_s": round(count / took),
                    "messages_per_s": round((load.messages - messages) / took),
                    "posted_bytes": round((load.posted_bytes - posted) / max(load.messages - messages, 1)),
                    "ours_us": 1e6 * (after[0] - before[0]) / count,
                    "victoria_us": 1e6 * (after[1] - before[1]) / count,
                    "ours_cores": round((after[0] - before[0]) / took, 3),
                    "victoria_cores": round((after[1] - before[1]) / took, 3),
                    "ours_threads": dict(sorted(spent.items(), key=lambda item: -item[1])[:8]),
                }
            )
            print(json.dumps(windows[-1]), file=sys.stderr)
            failed(running)
    load.stopped = True
    await asyncio.gather(*running)
    deadline = time.monotonic() + 30
    while not all(agent.all_held for agent in agents) and time.monotonic() < deadline:  # noqa: ASYNC110  # many waits
        await asyncio.sleep(0.1)
    held = sum(agent.all_held for agent in agents)
    await asyncio.sleep(args.tail)
    last = servers.cpu()
    return {
        "windows": windows,
        "acknowledged_agents": held,
        "whole_run": {
            "ours_us": 1e6 * (last[0] - first[0]) / (load.samples - began),
            "victoria_us": 1e6 * (last[1] - first[1]) / (load.samples - began),
        },
    }


def report(args: argparse.Namespace, found: dict[str, Any], load: Load, extra: dict[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = {"benchmark": "cpu", "agents": args.agents, "gpus": args.agents * GPUS, **extra}
    for seconds, grouped in forms(args.messages):
        windows = [w for w in found["windows"] if (w["message_s"], w["grouped"]) == (seconds, grouped)]
        ours = statistics.median(w["ours_us"] for w in windows)
        theirs = statistics.median(w["victoria_us"] for w in windows)
        result[f"messages_{seconds}s" + ("_grouped" if grouped else "")] = {
            "ratio": round(theirs / ours, 2),
            "goal": GOALS.get(seconds),
            "ratios": [round(w["victoria_us"] / w["ours_us"], 2) for w in windows],
            "ours_us_per_sample": round(ours, 4),
            "victoria_us_per_sample": round(theirs, 4),
            "posted_bytes": windows[-1]["posted_bytes"],
            "samples_per_s": windows[-1]["samples_per_s"],
            "steady": all(w["samples_per_s"] >= STEADY * extra["samples_per_s_wanted"] for w in windows),
            "ours_cores": windows[-1]["ours_cores"],
            "victoria_cores": windows[-1]["victoria_cores"],
            "ours_cores_by_thread": windows[-1]["ours_threads"],
        }
    whole = found["whole_run"]
    return result | {
        "whole_run_ratio": round(whole["victoria_us"] / whole["ours_us"], 2),
        "samples": load.samples,
        "late_messages": load.late,
        "acknowledged_agents": found["acknowledged_agents"],
        "failures": len(load.failures),
        "failure": load.failures[0] if load.failures else None,
        "generator_cpu_s": round(sum(resource.getrusage(resource.RUSAGE_SELF)[:2]), 1),
    }


async def bench(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    spec = build_fleet(args.agents, 7)
    ticks = round(args.rounds * sum(args.warm_up + args.window + s for s, _ in forms(args.messages))) + 60
    blocks, present, fleet = telemetry(spec, min(ticks, args.ticks))
    authority = Authority.new()
    authority.save(folder)
    ca, cert, key = (folder / name for name in ("ca.crt", "collector.crt", "collector.key"))
    agents_port, api_port, victoria_port = free_port(), free_port(), free_port()
    (folder / "fleet.toml").write_text(dump_toml(spec))
    (folder / "collector.toml").write_text(
        f'fleet = "{folder}/fleet.toml"\n[store]\nurl = "chdb://{folder}/store"\n[detect]\nlag_s = {LAG_S}\n'
        f'[ingest]\nlisten = "127.0.0.1:{agents_port}"\n[api]\nlisten = "127.0.0.1:{api_port}"\n'
        f'[tls]\nca = "{ca}"\ncert = "{cert}"\nkey = "{key}"\n'
    )
    collector = [sys.executable, "-m", "drover_collector.main", "run", "--config", str(folder / "collector.toml")]
    victoria = [VICTORIA, f"-storageDataPath={folder}/victoria", f"-httpListenAddr=127.0.0.1:{victoria_port}", "-tls"]
    victoria += [f"-tlsCertFile={cert}", f"-tlsKeyFile={key}", "-retentionPeriod=1"]
    victoria += ["-http.connTimeout=1h", "-http.idleConnTimeout=1h"]  # else it closes them
    tls = ssl.create_default_context(cafile=str(ca))
    with (
        process(folder, "collector", *collector) as (ours, log),
        process(folder, "victoria", *victoria) as (theirs, their_log),
    ):
        deadline = time.monotonic() + START_S
        while "is ready" not in log.read_text() or "started VictoriaMetrics" not in their_log.read_text():
            if time.monotonic() > deadline:
                raise SystemExit(f"not ready: {log.read_text()[-500:]} {their_log.read_text()[-500:]}")
            await asyncio.sleep(0.1)
        load = Load(blocks, 0.0)
        share = [(n + 0.5) / args.agents for n in range(args.agents)]
        agents = [Agent(n, node.name, load, present, share[n]) for n, node in enumerate(spec.nodes)]
        gate = asyncio.Semaphore(CONNECTING)

        async def connect(agent: Agent) -> None:
            async with gate:
                key, certificate = authority.issue(agent.name, f"drover://agent/{agent.name}")
                credentials = grpc.ssl_channel_credentials(authority.pem, key, certificate)
                await agent.connect(f"localhost:{agents_port}", credentials, victoria_port, tls)

        await asyncio.gather(*(connect(agent) for agent in agents))
        load.started_s = float(int(time.time()))
        jobs: dict[str, list[tuple[int, str, int]]] = {}
        for job in fleet.jobs:
            for node, slot in job.members if job.end_ms is None else ():
                jobs.setdefault(node, []).append((slot, job.id, int(load.started_s * 1000)))
        listening = [asyncio.create_task(agent.listen()) for agent in agents]
        for agent in agents:
            await agent.report_jobs(jobs.get(agent.name, []))
        found = await measure(args, agents, load, Servers(ours, theirs))
        rows = await asyncio.to_thread(victoria_rows, victoria_port, tls)
        extra: dict[str, Any] = {
            "metrics": len(blocks.metrics),
            "victoria_metrics": await asyncio.to_thread(victoria_version),
            "victoria_rows": rows,
            "samples_per_s_wanted": int(present.sum()),
            "ours_rss_mib": usage_of(ours).rss_bytes >> 20,
            "victoria_rss_mib": usage_of(theirs).rss_bytes >> 20,
        }
        await asyncio.gather(*(agent.close() for agent in agents))
        await asyncio.gather(*listening, return_exceptions=True)
    return report(args, found, load, extra)


def victoria_rows(port: int, tls: ssl.SSLContext) -> int:
    """Samples that VictoriaMetrics says it took by remote write."""
    import urllib.request

    page = urllib.request.urlopen(f"https://localhost:{port}/metrics", context=tls, timeout=30).read().decode()
    return sum(
        int(float(v)) for v in re.findall(r'^vm_rows_inserted_total\{type="promremotewrite"\} (\S+)', page, re.M)
    )


def victoria_version() -> str:
    """Debian's; the program itself was built without one."""
    done = subprocess.run(
        ["dpkg-query", "-W", "-f", "${Version}", VICTORIA], check=False, capture_output=True, text=True
    )
    return done.stdout or "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--agents", type=int, default=250, help="of 8 GPUs each")
    parser.add_argument("--messages", type=int, nargs="+", default=[1, 10], help="seconds of samples in a message")
    parser.add_argument("--rounds", type=int, default=2, help="how often each length is measured, in turn")
    parser.add_argument("--window", type=float, default=40, help="seconds measured; whole buckets of 10 s")
    parser.add_argument("--warm-up", type=float, default=10, help="seconds before each window")
    parser.add_argument("--tail", type=float, default=10, help="seconds after the last message, for merges that follow")
    parser.add_argument("--ticks", type=int, default=120, help="different seconds of telemetry; then they come again")
    parser.add_argument("--keep", type=Path, help="leave logs and stores in this folder")
    args = parser.parse_args()
    if shutil.which(VICTORIA) is None:
        raise SystemExit(f"{VICTORIA} is not installed; on Debian: apt-get install victoria-metrics")
    folder = args.keep or Path(tempfile.mkdtemp(prefix="drover-cpu-"))
    folder.mkdir(exist_ok=True)
    try:
        print(json.dumps(asyncio.run(bench(args, folder))))
    except BenchError as error:
        raise SystemExit(str(error)) from None
    finally:
        if not args.keep:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()

"""Step times of a training loop in windows with and without a running agent, in turn."""

from __future__ import annotations

import contextlib
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from gpu import common

START_S = 120.0  # for a loop or an agent to begin
WINDOWS = 8  # of steps, in turn with and without the agent


def compared(folder: Path, torch: Any, window_s: float) -> dict[str, Any]:
    """One loop runs all the time; the agent comes and goes. A window's figure is the median of its steps."""
    device = "none" if isinstance(torch, str) else "cuda"
    times = folder / "steps.jsonl"
    command = [
        sys.executable,
        str(common.ROOT / "benchmarks/bench_gpu.py"),
        "--train",
        device,
        "--steps-file",
        str(times),
    ]
    loop = subprocess.Popen(command, env=common.ENV)
    spans: list[tuple[bool, float, float]] = []
    agents: list[dict[str, float]] = []
    try:
        deadline_s = time.monotonic() + START_S
        while not times.exists() and loop.poll() is None and time.monotonic() < deadline_s:
            time.sleep(0.1)
        for number in range(WINDOWS):
            with running_agent(folder) if number % 2 else contextlib.nullcontext() as agent:
                time.sleep(common.SETTLE_S)
                began_s, cpu_s = time.time(), cpu_of(agent)
                time.sleep(window_s)
                spans.append((bool(number % 2), began_s, time.time()))
                if agent:
                    share = (cpu_of(agent) - cpu_s) / (time.time() - began_s)
                    agents.append({"cpu_cores": round(share, 5)} | memory_of(agent))
    finally:
        loop.terminate()
        loop.wait(30)
    written = [json.loads(line) for line in times.read_text().splitlines()] if times.exists() else []
    windows = [
        (on, [step_s for at_s, step_s in written if began_s <= at_s < ended_s]) for on, began_s, ended_s in spans
    ]
    if any(len(found) < 10 for _, found in windows):
        return {"holds": False, "why": f"steps in the windows: {[len(found) for _, found in windows]}"}
    return {"device": device, "agent": agents} | compare([(on, statistics.median(found)) for on, found in windows])


def cpu_of(process: psutil.Process | None) -> float:
    """Seconds of user and system time; 0 without a process."""
    if process is None:
        return 0.0
    times = process.cpu_times()
    return times.user + times.system


def memory_of(process: psutil.Process) -> dict[str, float]:
    """MiB: resident, and private, which is what would be free without the process. Of Linux's smaps."""
    full = process.memory_full_info()
    return {"rss_mib": round(full.rss / 2**20, 1), "private_mib": round(full.uss / 2**20, 1)}


def compare(windows: Sequence[tuple[bool, float]]) -> dict[str, Any]:
    """The difference of the means, and in how many ways to name as many windows "with" it is as large: exact, as there
    are few. Holds when that may be chance (p >= 0.05), or when it is less than the windows without the agent differ
    among themselves."""
    medians = [median for _, median in windows]
    with_, without = [m for on, m in windows if on], [m for on, m in windows if not on]

    def difference(chosen: Sequence[int]) -> float:
        of_chosen = [medians[place] for place in chosen]
        rest = [median for place, median in enumerate(medians) if place not in chosen]
        return statistics.fmean(of_chosen) - statistics.fmean(rest)

    seen = statistics.fmean(with_) - statistics.fmean(without)
    ways = [difference(chosen) for chosen in itertools.combinations(range(len(medians)), len(with_))]
    p = sum(way >= seen - 1e-15 for way in ways) / len(ways)
    noise = (max(without) - min(without)) / statistics.fmean(without)
    slower = seen / statistics.fmean(without)
    return {
        "step_ms_without": [round(m * 1e3, 4) for m in without],
        "step_ms_with": [round(m * 1e3, 4) for m in with_],
        "slower_by": round(slower, 5),
        "windows_without_differ_by": round(noise, 5),
        "p": round(p, 4),
        "holds": p >= 0.05 or slower <= noise,
    }


@contextlib.contextmanager
def running_agent(folder: Path) -> Iterator[psutil.Process]:
    """A whole one, from its start on, with nobody to send to: its spool is written all the same."""
    spool = Path(tempfile.mkdtemp(prefix="spool-", dir=folder))
    settings = common.sets(**{"spool.dir": str(spool), "log_level": "error"})
    with (folder / "agent.log").open("a") as log:
        command = [sys.executable, "-m", "drover_agent.main", "run", *settings]
        agent = subprocess.Popen(command, env=common.ENV, stdout=log, stderr=log)
        try:
            deadline_s = time.monotonic() + START_S
            while not (spool / "id").exists() and agent.poll() is None and time.monotonic() < deadline_s:
                time.sleep(0.1)
            yield psutil.Process(agent.pid)
        finally:
            if agent.poll() is not None:
                raise SystemExit(f"the agent ended by itself: {(folder / 'agent.log').read_text()[-1000:]}")
            agent.terminate()
            agent.wait(30)


def train(device: str, path: Path) -> None:
    """Steps of a transformer layer on CUDA, for ever; each is over before the next begins, as in synchronous training.
    On device "none" they are a sum: that shows only that the comparison works."""
    if device == "none":
        return _write_steps(lambda: sum(number * number for number in range(50_000)), path)
    import torch

    torch.manual_seed(1)
    width = 4096
    model = torch.nn.TransformerEncoderLayer(width, 16, 4 * width, batch_first=True).to(device, torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    data = torch.randn(16, 512, width, device=device, dtype=torch.bfloat16)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        model(data).float().square().mean().backward()
        optimizer.step()
        torch.cuda.synchronize()

    for _ in range(20):
        step()
    return _write_steps(step, path)


def _write_steps(step: Callable[[], Any], path: Path) -> None:
    with path.open("w", buffering=1) as file:
        while True:
            began_s = time.perf_counter()
            step()
            file.write(json.dumps([time.time(), time.perf_counter() - began_s]) + "\n")

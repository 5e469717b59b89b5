"""Everything that only a real NVIDIA GPU can show of the agent, by one command, from a source tree:

    python3 benchmarks/bench_gpu.py --out FOLDER

1. `once`: one reading of everything; every GPU metric of the catalog is read, or absent for a reason that is told.
2. `calls`: what each NVML call costs, as the agent makes it: of the clock, and of CPU.
3. `gpm`: GPM's tensor activity beside that of a matrix product whose operations are known, busy all and half the time.
4. `recording`: a reading each second under load, for tests/cases/agent/nvml_recorded (serials and UUIDs made up).
5. `steps`: step times of a training loop in windows with and without a running agent, in turn.

Needs what the agent needs (grpcio, protobuf, nvidia-ml-py) and, for 3 and 5, torch with CUDA; what is not there is said
and left out. Nothing of the GPU's settings is changed. Prints a JSON line for each part; exits with 1 when one of them
does not hold. Without a GPU it runs on the C stand-in (tests/testbed/nvml.py), where it shows only that it works.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "agent"), str(ROOT / "proto")]

import pynvml

from drover_agent.sources.nvml import NvmlSource
from drover_proto.catalog import Scope, of_scope

PARTS = ("once", "calls", "gpm", "recording", "steps")
# Dense bf16 operations of one SM in one clock, by compute capability. The peaks of NVIDIA's data sheets over the number
# of SMs and the boost clock: A100 312e12/108/1.41e9, H100 SXM 989.4e12/132/1.83e9, B200 2250e12/148/1.86e9.
FLOPS_PER_CLOCK = {(8, 0): 2048, (9, 0): 4096, (10, 0): 8192}
GPM_TOLERANCE = 0.10  # of GPM's share of time from the product's: a clock that is read once a second moves between
SIZE = 8192  # of the matrices, as in the gemm probe
SETTLE_S = 5.0  # after the agent was started or stopped, before a window counts
START_S = 120.0  # for a loop or an agent to begin
WINDOWS = 8  # of steps, in turn with and without the agent
ENV = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "agent"), str(ROOT / "proto")])}
SETTINGS = {"node": "gpu-node", "hardware": "nvml", "dcgm_url": "", "steps_socket": "", "kubelet_socket": ""}


def sets(**more: str) -> list[str]:
    return [part for key, value in (SETTINGS | more).items() for part in ("--set", f"{key}={json.dumps(value)}")]


def torch_with_cuda() -> Any:
    """The module, or why there is none."""
    try:
        import torch
    except ImportError as error:
        return str(error)
    return torch if torch.cuda.is_available() else "torch sees no CUDA device"


# ---- 1. once


def once(folder: Path) -> dict[str, Any]:
    command = [
        sys.executable,
        "-m",
        "drover_agent.main",
        "once",
        "--json",
        *sets(**{"spool.dir": str(folder / "once")}),
    ]
    answer = subprocess.run(command, env=ENV, capture_output=True, text=True, timeout=120)
    if answer.returncode:
        return {"holds": False, "why": answer.stderr[-1000:]}
    (folder / "once.json").write_text(answer.stdout)
    return judge_once(json.loads(answer.stdout))


def judge_once(seen: dict[str, Any]) -> dict[str, Any]:
    """Every GPU metric of the catalog, of every GPU, is there or absent for a reason that a reader gave."""
    names = {metric.name for metric in of_scope(Scope.GPU)}
    gpus = [entity for entity in seen["entities"] if entity["scope"] == Scope.GPU and not entity["mig"]]
    silent = {e["key"]: sorted(n for n in names if n not in e["values"] and not e["absent"].get(n)) for e in gpus}
    absent = {f"{e['key']} {name}": why for e in gpus for name, why in e["absent"].items()}
    unknown = sorted({key for e in gpus for key in e["values"].keys() - names})
    return {
        "gpus": len(gpus),
        "read": {e["key"]: len(e["values"]) for e in gpus},
        "absent": absent,
        "silent": {key: found for key, found in silent.items() if found},
        "inventory": {k: v for k, v in seen["inventory"].items() if not re.search(r"serial|uuid", k)},
        "holds": bool(gpus) and not any(silent.values()) and not unknown and "not-read" not in absent.values(),
    }


# ---- 2. what calls cost


class Costs:
    """Wraps every function that nvidia-ml-py or the agent takes out of the library."""

    def __init__(self) -> None:
        self.wall_s: dict[str, list[float]] = defaultdict(list)
        self.cpu_s: dict[str, list[float]] = defaultdict(list)

    @contextlib.contextmanager
    def measuring(self) -> Iterator[None]:
        find = pynvml._nvmlGetFunctionPointer
        pynvml._nvmlGetFunctionPointer = lambda name: self._timed(name, find(name))
        try:
            yield
        finally:
            pynvml._nvmlGetFunctionPointer = find

    def _timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            wall_s, cpu_s = time.perf_counter(), time.thread_time()
            try:
                return function(*arguments)
            finally:
                self.cpu_s[name].append(time.thread_time() - cpu_s)
                self.wall_s[name].append(time.perf_counter() - wall_s)

        return call

    def table(self, seconds: float) -> dict[str, dict[str, float]]:
        found = {}
        for name, wall_s in sorted(self.wall_s.items(), key=lambda row: -sum(row[1])):
            ordered = sorted(wall_s)
            found[name] = {
                "per_s": round(len(ordered) / seconds, 2),
                "median_us": round(statistics.median(ordered) * 1e6, 1),
                "p95_us": round(ordered[int(0.95 * (len(ordered) - 1))] * 1e6, 1),
                "cpu_median_us": round(statistics.median(self.cpu_s[name]) * 1e6, 1),
                "cpu_ms_per_s": round(sum(self.cpu_s[name]) / seconds * 1e3, 3),
            }
        return found


def calls(seconds: int) -> dict[str, Any]:
    """At the agent's pace: each tick a second, so that processor and driver are as idle between as in real life."""
    costs = Costs()
    with costs.measuring():
        source = NvmlSource("gpu-node")
        try:
            for now_ms in each_second(SETTLE_S + 10):  # all slow calls were made once
                source.read(now_ms)
            costs.wall_s.clear()
            costs.cpu_s.clear()
            began_s, ticks = time.monotonic(), 0
            for now_ms in each_second(seconds):
                for device in source.devices:
                    if finish := device.ask(now_ms):
                        finish()
                    else:
                        device.read(now_ms)
                ticks += 1
            found = costs.table(time.monotonic() - began_s)
        finally:
            source.close()
    whole = sum(row["cpu_ms_per_s"] for row in found.values())
    return {
        "gpus": len(source.devices),
        "ticks": ticks,
        "calls": found,
        "cpu_ms_per_s": round(whole, 3),
        "holds": bool(found),
    }


def each_second(seconds: float) -> Iterator[int]:
    begin_s = time.time()
    for number in range(round(seconds)):
        time.sleep(max(begin_s + number - time.time(), 0))
        yield round((begin_s + number) * 1000)


# ---- 3. GPM beside a product that is known


def gpm(torch: Any, seconds: int) -> dict[str, Any]:
    """Operations done over those that the tensor cores can do at the clock of that time is the share in which they were
    busy: what GPM calls ANY_TENSOR_UTIL."""
    properties = torch.cuda.get_device_properties(0)
    per_clock = FLOPS_PER_CLOCK.get((properties.major, properties.minor))
    if per_clock is None:
        return {"left_out": f"no figure for compute capability {properties.major}.{properties.minor}"}
    found = {f"duty_{duty:g}": _one_duty(torch, properties, per_clock, seconds, duty) for duty in (1.0, 0.5)}
    return {**found, "tolerance": GPM_TOLERANCE, "holds": all(row.get("holds") for row in found.values())}


def _one_duty(torch: Any, properties: Any, per_clock: int, seconds: int, duty: float) -> dict[str, Any]:
    a, b = (torch.randn(SIZE, SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    ended, products = threading.Event(), 0

    def work() -> None:
        nonlocal products
        while not ended.is_set():
            began_s = time.perf_counter()
            for _ in range(10):
                torch.mm(a, b, out=out)
            torch.cuda.synchronize()
            products += 10
            time.sleep((time.perf_counter() - began_s) * (1 / duty - 1))

    source = NvmlSource("gpu-node")
    thread = threading.Thread(target=work)
    rows: list[tuple[float, int, dict[str, float]]] = []
    thread.start()
    try:
        time.sleep(SETTLE_S)
        slot = _slot_of(properties, source)
        for now_ms in each_second(seconds):
            reading = source.read(now_ms)
            values = next((dict(v) for e, v in reading.rows if e.gpu == slot and not e.mig), {})
            rows.append((time.perf_counter(), products, values))
    finally:
        ended.set()
        thread.join()
        source.close()
    told = [
        (tensor, clock)
        for _, _, v in rows[2:]
        if (tensor := v.get("tensor_active_ratio")) is not None and (clock := v.get("sm_clock_mhz"))
    ]
    if not told:
        return {"left_out": "GPM told nothing"}
    (first_s, first, _), (last_s, last, _) = rows[2], rows[-1]
    flops = 2 * SIZE**3 * (last - first) / (last_s - first_s)
    clock_mhz = statistics.fmean(clock for _, clock in told)
    expected = flops / (properties.multi_processor_count * per_clock * clock_mhz * 1e6)
    seen = statistics.fmean(tensor for tensor, _ in told)
    beside = {
        name: round(statistics.fmean(values[name] for _, _, values in rows[2:] if name in values), 4)
        for name in ("gpu_util_ratio", "sm_active_ratio", "dram_active_ratio", "power_w")
        if name in rows[-1][2]
    }
    return {
        "tflops": round(flops / 1e12, 1),
        "sm_clock_mhz": round(clock_mhz),
        "expected": round(expected, 4),
        "tensor_active_ratio": round(seen, 4),
        "beside": beside,
        "holds": abs(seen - expected) <= GPM_TOLERANCE,
    }


def _slot_of(properties: Any, source: NvmlSource) -> int:
    """torch may count in another order than NVML."""
    source.read(round(time.time() * 1000))
    uuid = str(getattr(properties, "uuid", ""))
    return next((d.slot for d in source.devices if uuid and uuid in d.entity.uuid), 0)


# ---- 4. a recording


def recording(path: Path, torch: Any, seconds: int) -> dict[str, Any]:
    ended = threading.Event()
    load = threading.Thread(target=_load, args=(torch, ended)) if not isinstance(torch, str) else None
    source = NvmlSource("gpu-node")
    ticks: list[dict[str, Any]] = []
    inventory: dict[str, str] = {}
    if load:
        load.start()
    try:
        for now_ms in each_second(seconds):
            reading = source.read(now_ms)
            inventory |= reading.inventory
            ticks.append({
                "ts_ms": now_ms,
                "rows": [{"gpu": e.gpu, "mig": e.mig, "values": dict(v)} for e, v in reading.rows],
                "absent": [[e.gpu, e.mig, name, why] for e, name, why in reading.absent],
                "events": [dataclasses.asdict(event) for event in reading.events],
            })  # fmt: skip
    finally:
        ended.set()
        if load:
            load.join()
        source.close()
    identity = re.compile(r"\.(serial|uuid)$")
    inventory = {key: f"made-up-{key}" if identity.search(key) else value for key, value in inventory.items()}
    path.write_text(json.dumps({"inventory": inventory, "under_load": bool(load), "ticks": ticks}))
    trouble = trouble_of(json.loads(path.read_text()))
    return {"file": str(path), "ticks": len(ticks), "trouble": trouble[:20], "holds": bool(ticks) and not trouble}


def _load(torch: Any, ended: threading.Event) -> None:
    a = torch.randn(SIZE, SIZE, device="cuda", dtype=torch.bfloat16)
    while not ended.is_set():
        for _ in range(20):
            a @ a
        torch.cuda.synchronize()
        ended.wait(0.2)


def trouble_of(recorded: dict[str, Any]) -> list[str]:
    """What is wrong with a recording: values beyond the catalog's ranges, metrics that are neither there nor absent,
    counters that fall."""
    catalog = {metric.name: metric for metric in of_scope(Scope.GPU)}
    told: dict[tuple[int, str], set[str]] = defaultdict(set)
    counts: dict[tuple[int, str, str], float] = {}
    found = []
    for tick in recorded["ticks"]:
        for row in tick["rows"]:
            who = row["gpu"], row["mig"]
            told[who] |= row["values"].keys()
            for name, value in row["values"].items():
                metric = catalog.get(name)
                if metric is None or not metric.low <= value <= metric.high:
                    found.append(f"{tick['ts_ms']}: {name} of GPU {who} is {value}")
                elif metric.kind == "counter":
                    if value < counts.get((*who, name), value):
                        found.append(f"{tick['ts_ms']}: {name} of GPU {who} fell to {value}")
                    counts[*who, name] = value
        for gpu, mig, name, _ in tick["absent"]:
            told[gpu, mig].add(name)
    readers = {name for name, metric in catalog.items() if metric.sources.keys() & {"nvml", "gpm"}}
    found += [
        f"GPU {who}: nothing is said of {name}"
        for who, names in told.items()
        if not who[1]
        for name in sorted(readers - names)
    ]
    return found


# ---- 5. step times with and without the agent


def steps(folder: Path, torch: Any, window_s: float) -> dict[str, Any]:
    """One loop runs all the time; the agent comes and goes. A window's figure is the median of its steps."""
    device = "none" if isinstance(torch, str) else "cuda"
    times = folder / "steps.jsonl"
    command = [sys.executable, str(Path(__file__).resolve()), "--train", device, "--steps-file", str(times)]
    loop = subprocess.Popen(command, env=ENV)
    spans: list[tuple[bool, float, float]] = []
    try:
        deadline_s = time.monotonic() + START_S
        while not times.exists() and loop.poll() is None and time.monotonic() < deadline_s:
            time.sleep(0.1)
        for number in range(WINDOWS):
            with running_agent(folder) if number % 2 else contextlib.nullcontext():
                time.sleep(SETTLE_S)
                began_s = time.time()
                time.sleep(window_s)
                spans.append((bool(number % 2), began_s, time.time()))
    finally:
        loop.terminate()
        loop.wait(30)
    told = [json.loads(line) for line in times.read_text().splitlines()] if times.exists() else []
    windows = [(on, [step_s for at_s, step_s in told if began_s <= at_s < ended_s]) for on, began_s, ended_s in spans]
    if any(len(found) < 10 for _, found in windows):
        return {"holds": False, "why": f"steps in the windows: {[len(found) for _, found in windows]}"}
    return {"device": device} | compare([(on, statistics.median(found)) for on, found in windows])


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
def running_agent(folder: Path) -> Iterator[None]:
    """A whole one, from its start on, with nobody to send to: its spool is written all the same."""
    spool = Path(tempfile.mkdtemp(prefix="spool-", dir=folder))
    settings = sets(**{"spool.dir": str(spool), "log_level": "error"})
    with (folder / "agent.log").open("a") as log:
        command = [sys.executable, "-m", "drover_agent.main", "run", *settings]
        agent = subprocess.Popen(command, env=ENV, stdout=log, stderr=log)
        try:
            deadline_s = time.monotonic() + START_S
            while not (spool / "id").exists() and agent.poll() is None and time.monotonic() < deadline_s:
                time.sleep(0.1)
            yield
        finally:
            if agent.poll() is not None:
                raise SystemExit(f"the agent ended by itself: {(folder / 'agent.log').read_text()[-1000:]}")
            agent.terminate()
            agent.wait(30)


def train(device: str, path: Path) -> None:
    """Steps of a transformer layer on CUDA, for ever; each is over before the next begins, as in synchronous training.
    On device "none" they are a sum: that shows only that the comparison works."""
    if device == "none":
        return _tell_steps(lambda: sum(number * number for number in range(50_000)), path)
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
    return _tell_steps(step, path)


def _tell_steps(step: Callable[[], Any], path: Path) -> None:
    with path.open("w", buffering=1) as file:
        while True:
            began_s = time.perf_counter()
            step()
            file.write(json.dumps([time.time(), time.perf_counter() - began_s]) + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where recording and logs are put (a temporary folder unless given)")
    parser.add_argument("--seconds", type=int, default=30, help="of calls, of each duty of gpm and of the recording")
    parser.add_argument("--window", type=float, default=15.0, help=f"seconds of each of the {WINDOWS} windows of steps")
    parser.add_argument("--parts", default=",".join(PARTS), help="which of them, with commas")
    parser.add_argument("--train", help=argparse.SUPPRESS)
    parser.add_argument("--steps-file", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.train:
        train(args.train, args.steps_file)
        return 0
    wanted = args.parts.split(",")
    if unknown := set(wanted) - set(PARTS):
        parser.error(f"--parts: no such part: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    with contextlib.ExitStack() as stack:
        folder = args.out or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        torch = torch_with_cuda() if {"gpm", "recording", "steps"} & set(wanted) else ""
        work: dict[str, Callable[[], dict[str, Any]]] = {
            "once": lambda: once(folder),
            "calls": lambda: calls(args.seconds),
            "gpm": lambda: {"left_out": torch} if isinstance(torch, str) else gpm(torch, args.seconds),
            "recording": lambda: recording(folder / "recording.json", torch, args.seconds),
            "steps": lambda: steps(folder, torch, args.window),
        }
        failed = False
        for part in wanted:
            found = {"benchmark": "gpu", "part": part} | work[part]()
            failed |= found.get("holds") is False
            print(json.dumps(found), flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

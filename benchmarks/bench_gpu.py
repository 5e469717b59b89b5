"""Everything that only a real NVIDIA GPU can show of the agent, by one command, from a source tree:

    python3 benchmarks/bench_gpu.py --out FOLDER

1. `once`: one reading of everything; every GPU metric of the catalog is read, or absent with its reason.
2. `calls`: what each NVML call costs, as the agent makes it: of the clock, and of CPU; and the codes it returned.
3. `gpm`: GPM's tensor activity next to that of a matrix product whose operations are known, busy all and half the time.
4. `recording`: a reading each second under load, for tests/cases/agent/nvml_recorded (serials and UUIDs made up).
5. `steps`: step times of a training loop in windows with and without a running agent, in turn; the agent's CPU and
   memory in the windows with it.
6. `xid`: a program that writes to a foreign address; the XID that the driver reports, as NVML delivers it.

Needs what the agent needs (grpcio, protobuf, psutil, nvidia-ml-py) and, for 3 and 5, torch with CUDA; what is not
there is said and left out. Nothing of the GPU's settings is changed. Prints a JSON line for each part; exits with 1
when one of them does not hold. Without a GPU it runs on the C stand-in (tests/testbed/nvml.py), where it shows only
that it works.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / folder) for folder in ("proto", "core", "agent", "benchmarks")]

import pynvml
from gpu import common, recording, steps, xid

from drover_agent.sources.nvml.source import NvmlSource
from drover_core.metrics.catalog import Scope, of_agents

PARTS = ("once", "calls", "gpm", "recording", "steps", "xid")
# Dense bf16 operations of one SM in one clock, by compute capability. The peaks of NVIDIA's data sheets over the number
# of SMs and the boost clock: A100 312e12/108/1.41e9, H100 SXM 989.4e12/132/1.83e9, B200 2250e12/148/1.86e9.
FLOPS_PER_CLOCK = {(8, 0): 2048, (9, 0): 4096, (10, 0): 8192}
GPM_TOLERANCE = 0.10  # of GPM's share of time from the product's: a clock that is read once a second moves between


# ---- 1. once


def once(folder: Path) -> dict[str, Any]:
    command = [
        sys.executable,
        "-m",
        "drover_agent.main",
        "once",
        "--json",
        *common.sets(**{"spool.dir": str(folder / "once")}),
    ]
    answer = subprocess.run(command, env=common.ENV, capture_output=True, text=True, timeout=120)
    if answer.returncode:
        return {"holds": False, "why": answer.stderr[-1000:]}
    (folder / "once.json").write_text(answer.stdout)
    return judge_once(json.loads(answer.stdout))


def judge_once(seen: dict[str, Any]) -> dict[str, Any]:
    """Every GPU metric of the catalog, of every GPU, is there or absent for a reason that a reader gave."""
    names = {metric.name for metric in of_agents(Scope.GPU)}
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
        self.codes: dict[str, Counter[int]] = defaultdict(Counter)

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
            code = function(*arguments)
            self.cpu_s[name].append(time.thread_time() - cpu_s)
            self.wall_s[name].append(time.perf_counter() - wall_s)
            self.codes[name][code] += 1
            return code

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
            for now_ms in common.each_second(common.SETTLE_S + 10):  # all slow calls were made once
                source.read(now_ms)
            costs.wall_s.clear()
            costs.cpu_s.clear()
            began_s, ticks = time.monotonic(), 0
            for now_ms in common.each_second(seconds):
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
        "return_codes": {name: dict(codes) for name, codes in sorted(costs.codes.items())},
        "cpu_ms_per_s": round(whole, 3),
        "holds": bool(found),
    }


# ---- 3. GPM next to a product that is known


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
    a, b = (torch.randn(common.SIZE, common.SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
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
        time.sleep(common.SETTLE_S)
        slot = _slot_of(properties, source)
        for now_ms in common.each_second(seconds):
            reading = source.read(now_ms)
            values = next((dict(v) for e, v in reading.rows if e.gpu == slot and not e.mig), {})
            rows.append((time.perf_counter(), products, values))
    finally:
        ended.set()
        thread.join()
        source.close()
    reported = [
        (tensor, clock)
        for _, _, v in rows[2:]
        if (tensor := v.get("tensor_active_ratio")) is not None and (clock := v.get("sm_clock_mhz"))
    ]
    if not reported:
        return {"left_out": "GPM reported nothing"}
    (first_s, first, _), (last_s, last, _) = rows[2], rows[-1]
    flops = 2 * common.SIZE**3 * (last - first) / (last_s - first_s)
    clock_mhz = statistics.fmean(clock for _, clock in reported)
    expected = flops / (properties.multi_processor_count * per_clock * clock_mhz * 1e6)
    seen = statistics.fmean(tensor for tensor, _ in reported)
    compared = {
        name: round(statistics.fmean(values[name] for _, _, values in rows[2:] if name in values), 4)
        for name in ("gpu_util_ratio", "sm_active_ratio", "dram_active_ratio", "power_w")
        if name in rows[-1][2]
    }
    return {
        "tflops": round(flops / 1e12, 1),
        "sm_clock_mhz": round(clock_mhz),
        "expected": round(expected, 4),
        "tensor_active_ratio": round(seen, 4),
        "compared": compared,
        "holds": abs(seen - expected) <= GPM_TOLERANCE,
    }


def _slot_of(properties: Any, source: NvmlSource) -> int:
    """torch may count in another order than NVML."""
    source.read(round(time.time() * 1000))
    uuid = str(getattr(properties, "uuid", ""))
    return next((d.slot for d in source.devices if uuid and uuid in d.entity.uuid), 0)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where recording and logs are put (a temporary folder unless given)")
    parser.add_argument("--seconds", type=int, default=30, help="of calls, of each duty of gpm and of the recording")
    parser.add_argument(
        "--window", type=float, default=15.0, help=f"seconds of each of the {steps.WINDOWS} windows of steps"
    )
    parser.add_argument("--parts", default=",".join(PARTS), help="which of them, with commas")
    parser.add_argument("--train", help=argparse.SUPPRESS)
    parser.add_argument("--steps-file", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.train:
        steps.train(args.train, args.steps_file)
        return 0
    wanted = args.parts.split(",")
    if unknown := set(wanted) - set(PARTS):
        parser.error(f"--parts: no such part: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    with contextlib.ExitStack() as stack:
        folder = args.out or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        torch = common.torch_with_cuda() if {"gpm", "recording", "steps"} & set(wanted) else ""
        work: dict[str, Callable[[], dict[str, Any]]] = {
            "once": lambda: once(folder),
            "calls": lambda: calls(args.seconds),
            "gpm": lambda: {"left_out": torch} if isinstance(torch, str) else gpm(torch, args.seconds),
            "recording": lambda: recording.record(folder / "recording.json", torch, args.seconds),
            "steps": lambda: steps.compared(folder, torch, args.window),
            "xid": xid.delivered,
        }
        failed = False
        for part in wanted:
            found = {"benchmark": "gpu", "part": part} | work[part]()
            failed |= found.get("holds") is False
            print(json.dumps(found), flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

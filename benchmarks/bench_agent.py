"""What the agent costs a node with 8 GPUs, next to Debian's prometheus-node-exporter scraped once a second.

The agent is a whole one with everything on: nvidia-ml-py on the C stand-in for NVML (`tests/testbed/nvml`), GPM, the
kernel log, 8 InfiniBand ports, the host, a Slurm job with a process on each GPU, the page of an inference server
(`agent_node.py`), a spool on disk, a stream over mutual TLS to a real collector. Only DCGM's page is not there: where
it is, NVML leaves profiling alone, and costs less. node_exporter has its default collectors and the same /sys, and is
asked as Prometheus asks it (connection kept, gzip). Values of GPUs and ports move as those of a training job do. Both
run in the same minute;
CPU is user and system time out of /proc/PID/stat. What the stand-in's calls cost counts as the agent's, so there are
three minutes: in the first each call keeps the CPU busy for as long as it does on a real H100 (`H100_US` in
tests/testbed/nvml.py), which is the agent's share and the driver's together. In the other two every call takes 140 us
(process lists 4.5 ms), asleep and busy: they compare with older measurements. Prints one JSON line; the goals are for
the first.

With --parts the agent counts where its time goes (`agent_parts.py`), which costs some itself, and a table is printed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import http.client
import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "benchmarks")]

from agent_node import GPUS, PORTS, Requests, Traffic, job, system
from load.certificates import Authority
from load.collector import Collector, running
from load.fleet import Shape, name

from testbed.nvml import FakeNvml, build
from testbed.pages import serving
from testbed.system_processes import free_port, reachable
from testbed.waiting import wait_until

EXPORTER = "prometheus-node-exporter"
CPU_GOAL, MEMORY_GOAL_MIB, IMPORT_GOAL_S = 0.30, 45.0, 0.2
HERTZ = os.sysconf("SC_CLK_TCK")
IMPORTS = 15  # fresh processes
IMPORTS_SETTLED_S = 14.0  # after which an agent imports nothing further: two batches were sent, slow sources were read
# What Prometheus 2 sends.
HEADERS = {
    "Accept": "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
    "Accept-Encoding": "gzip",
}


class Wire:
    """A TCP forwarder that counts the bytes of both ways: TLS and all, without the headers of TCP."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = host, int(port)
        self.sent = self.received = 0
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._run, daemon=True).start()
        self._ready.wait(10)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._ready.set()
        self._loop.run_forever()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(*self._target)
        await asyncio.gather(self._pump(reader, far_writer, "sent"), self._pump(far_reader, writer, "received"))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, count: str) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65_536):
                setattr(self, count, getattr(self, count) + len(data))
                writer.write(data)
                await writer.drain()
        writer.close()


class Watched:
    """A process from outside."""

    def __init__(self, pid: int) -> None:
        self._proc = Path(f"/proc/{pid}")
        self._cpu_s, self._before, self._seen = self.cpu_s(), self._tasks(), self._tasks()
        self._sizes = dict.fromkeys(("Rss", "Pss", "Anonymous"), 0.0)

    def look(self) -> None:
        rows = dict(line.split(":", 1) for line in (self._proc / "smaps_rollup").read_text().splitlines()[1:])
        for key, before in self._sizes.items():
            self._sizes[key] = max(before, int(rows[key].split()[0]) / 1024)
        self._seen |= self._tasks()  # those that end keep what they had

    def cpu_s(self) -> float:
        fields = (self._proc / "stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / HERTZ

    def _tasks(self) -> dict[str, tuple[str, float, int]]:
        """Thread -> (name, CPU seconds, times it went to sleep)."""
        found = {}
        for task in (self._proc / "task").iterdir():
            with contextlib.suppress(OSError):  # it has ended
                label = "main" if task.name == self._proc.name else (task / "comm").read_text().strip()
                slept = (task / "status").read_text().partition("\nvoluntary_ctxt_switches:")[2].split()[0]
                spent_s = int((task / "schedstat").read_text().split()[0]) / 1e9
                found[task.name] = label, spent_s, int(slept)
        return found

    def report(self, seconds: float) -> dict[str, Any]:
        threads: dict[str, float] = {}
        slept = 0
        for task, (label, spent_s, times) in self._seen.items():
            _, before_s, before = self._before.get(task, ("", 0.0, 0))
            threads[label] = threads.get(label, 0.0) + (spent_s - before_s) / seconds * 1000
            slept += times - before
        return {
            "cpu_ms_per_s": round((self.cpu_s() - self._cpu_s) / seconds * 1000, 2),
            "rss_mib": round(self._sizes["Rss"], 1),
            "pss_mib": round(self._sizes["Pss"], 1),
            "anonymous_mib": round(self._sizes["Anonymous"], 1),
            "threads": len(self._seen),
            "wakeups_per_s": round(slept / seconds, 1),
            "cpu_ms_per_s_by_thread": {
                k: round(v, 2) for k, v in sorted(threads.items(), key=lambda row: -row[1]) if v >= 0.01
            },
        }


@contextlib.contextmanager
def process(log: Path, command: list[str], env: dict[str, str] | None = None) -> Iterator[int]:
    """It must not end by itself."""
    with log.open("w") as output:
        child = subprocess.Popen(command, stdout=output, stderr=output, env=env)
        try:
            yield child.pid
        finally:
            if child.poll() is not None:
                raise SystemExit(f"{command[0]} ended by itself: {log.read_text()[-2000:]}")
            child.terminate()
            child.wait(30)


class Scraper:
    """One Prometheus."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        self.bytes = self.pages = 0

    def scrape(self) -> None:
        self._connection.request("GET", "/metrics", headers=HEADERS)
        answer = self._connection.getresponse()
        self.bytes += len(answer.read())
        self.pages += 1
        if answer.status != 200:
            raise SystemExit(f"{EXPORTER} answers {answer.status}")


def parts_of(agent: dict[str, Any], counted: Path, seconds: float) -> dict[str, tuple[float, float]]:
    """Part -> (ms of CPU a second, times a second); what was not counted of a thread is its rest."""
    found = {
        part: (spent_s / seconds * 1000, times / seconds)
        for part, (spent_s, times) in json.loads(counted.read_text()).items()
    }
    threads = dict(agent["cpu_ms_per_s_by_thread"])
    loop = sum(ms for part, (ms, _) in found.items() if part.startswith("loop: "))
    reads = sum(ms for part, (ms, _) in found.items() if part.startswith("read: "))
    found["loop: waiting and waking"] = threads.pop("main", 0.0) - loop, 0.0
    found["read: waiting and waking"] = threads.pop("sources", 0.0) - reads, 0.0
    found |= {f"thread {label}": (ms, 0.0) for label, ms in threads.items()}
    return dict(sorted(found.items(), key=lambda row: -row[1][0]))


class Node:
    """What the agent reads of the node, and the commands that start one."""

    def __init__(self, folder: Path, fake: FakeNvml, collector: str, sys_root: Path, inference: str) -> None:
        self._folder, self._fake, self._collector = folder, fake, collector
        self.sys_root, self._inference = sys_root, inference

    def env(self, counted: Path | None = None) -> dict[str, str]:
        return os.environ | self._fake.env() | {"DROVER_PARTS": str(counted)}

    def command(self, spool: Path, collector: str = "", *, parts: bool = False) -> list[str]:
        program = [str(ROOT / "benchmarks/agent_parts.py")] if parts else ["-m", "drover_agent.main"]
        settings = {
            "node": name(0), "collectors": [collector or self._collector], "hardware": "nvml",
            "sys_root": str(self.sys_root), "spool.dir": str(spool), "log_level": "warning",
            "inference_urls": [self._inference],
            "tls.ca": f"{self._folder}/ca.crt", "tls.cert": f"{self._folder}/agent.crt",
            "tls.key": f"{self._folder}/agent.key",
        }  # fmt: skip
        return [
            *program,
            "run",
            *(part for key, value in settings.items() for part in ("--set", f"{key}={json.dumps(value)}")),
        ]


def minute(
    folder: Path,
    node: Node,
    collector: Collector,
    moves: Sequence[Traffic | Requests],
    warm_s: int,
    seconds: int,
    *,
    parts: bool = False,
) -> dict[str, Any]:
    """Both for `warm_s`, then for `seconds` that count. `moves`: what is called each second."""
    counted = folder / "parts.json"
    wire, port = Wire(collector.address), free_port()
    ours_command = [sys.executable, *node.command(folder / "spool", wire.address, parts=parts)]
    with (
        process(
            folder / "exporter.log",
            [EXPORTER, f"--web.listen-address=127.0.0.1:{port}", f"--path.sysfs={node.sys_root}"],
        ) as theirs,
        process(folder / "agent.log", ours_command, node.env(counted)) as ours,
    ):
        wait_until(lambda: reachable("127.0.0.1", port), f"{EXPORTER} answers")
        scraper = Scraper(port)
        for _ in each_second(warm_s):
            scraper.scrape()
            for one in moves:
                one.second()
        if parts:
            os.kill(ours, signal.SIGUSR1)
        agent, exporter = Watched(ours), Watched(theirs)
        before, stored, pages = wire.sent, collector.status().samples_stored, scraper.bytes
        began_s = time.monotonic()
        for _ in each_second(seconds):
            scraper.scrape()
            for one in moves:
                one.second()
            agent.look()
            exporter.look()
        spent_s = time.monotonic() - began_s
        found = {"agent": agent.report(spent_s), "node_exporter": exporter.report(spent_s)}
        found["agent"]["wire_bytes_per_s"] = round((wire.sent - before) / spent_s)
        found["agent"]["values_stored_per_s"] = round((collector.status().samples_stored - stored) / spent_s)
        found["node_exporter"]["wire_bytes_per_s"] = round((scraper.bytes - pages) / spent_s)
        if parts:
            os.kill(ours, signal.SIGUSR2)
            wait_until(counted.exists, "what was counted")
            found["agent"]["parts"] = parts_of(found["agent"], counted, spent_s)
    found["agent"]["log_lines"] = len((folder / "agent.log").read_text().splitlines())
    cpu = found["agent"]["cpu_ms_per_s"] / found["node_exporter"]["cpu_ms_per_s"]
    return {"cpu_ratio": round(cpu, 3), "idle_ratio": round(1 - found["agent"]["cpu_ms_per_s"] / 1000, 4), **found}


def each_second(count: int) -> Iterator[int]:
    """Steadily, half a second after the agent's ticks begin."""
    begin_s = math.ceil(time.time()) + 0.5
    for number in range(count):
        time.sleep(max(begin_s + number - time.time(), 0))
        yield number


def imported(node: Node, folder: Path) -> list[str]:
    """Every module that an agent imports on such a node, from its start until it has sent batches, in that order: as
    `python -X importtime` prints of a real one."""
    log = folder / "imports.log"
    with process(log, [sys.executable, "-X", "importtime", *node.command(folder / "imports-spool")], node.env()):
        time.sleep(IMPORTS_SETTLED_S)
    lines = [line for line in log.read_text().splitlines() if line.startswith("import time:")]
    names = [line.rpartition("|")[2].strip() for line in lines[1:]]  # below a heading
    if not any(name == "drover_agent.sources.workloads.jobs" for name in names):
        raise SystemExit(f"the agent did not come so far in {IMPORTS_SETTLED_S:g} s: {log.read_text()[-2000:]}")
    return list(dict.fromkeys(names))


def import_s(modules: Sequence[str]) -> dict[str, float]:
    """Seconds in which a fresh interpreter imports `main`, and all that a running agent loads; the least and the median
    of IMPORTS.

    The CPU time is printed too: it says what a machine would take that has nothing else to do.
    """
    found: dict[str, float] = {"imported_modules": len(modules)}
    clocks = "time.perf_counter(), time.process_time()"
    for what, names in (("main", ["drover_agent.main"]), ("all", ["drover_agent.main", *modules])):
        program = (
            f"import importlib, time\na = {clocks}\nfor name in {names!r}:\n    try:\n"
            "        importlib.import_module(name)\n    except ImportError:\n        pass\n"  # of another system
            f"b = {clocks}\nprint(b[0] - a[0], b[1] - a[1])"
        )
        runs = [
            subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
            for _ in range(IMPORTS)
        ]
        found[f"import_{what}_s"] = round(min(float(wall_s) for wall_s, _ in runs), 3)
        found[f"import_{what}_median_s"] = round(statistics.median(float(wall_s) for wall_s, _ in runs), 3)
        found[f"import_{what}_cpu_s"] = round(min(float(cpu_s) for _, cpu_s in runs), 3)
    return found


def sleep_cpu_us() -> float:
    """CPU time that one sleep of 140 us costs this machine: part of each call that sleeps, in any process."""
    usleep, count = ctypes.CDLL(None).usleep, 2000
    began_s = time.thread_time()
    for _ in range(count):
        usleep(140)
    return round((time.thread_time() - began_s) / count * 1e6, 1)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=60, help="that count, of each of the three minutes")
    parser.add_argument("--warm", type=int, default=20, help="seconds before them")
    parser.add_argument("--only", choices=("h100", "sleep", "spin"), help="one of the three")
    parser.add_argument("--no-imports", action="store_true", help="without the time of imports")
    parser.add_argument("--parts", action="store_true", help="where the agent's time goes, as a table")
    args = parser.parse_args(argv)
    if shutil.which(EXPORTER) is None:
        raise SystemExit(f"{EXPORTER} is not installed: apt-get install {EXPORTER}")
    line: dict[str, Any] = {
        "benchmark": "agent",
        "cores": os.cpu_count(),
        "gpus": GPUS,
        "ports": PORTS,
        "seconds": args.seconds,
    }
    line["sleep_cpu_us"] = sleep_cpu_us()
    with contextlib.ExitStack() as open_:
        folder = Path(open_.enter_context(tempfile.TemporaryDirectory()))
        fake = FakeNvml(folder / "nvml.script", build(folder))
        with fake.batch():
            fake.healthy(GPUS)
            fake.trains(GPUS)
            for gpu, pid in enumerate(open_.enter_context(job(folder))):
                fake.set(gpu, "first_pid", pid)
        sys_root, served = system(folder), open_.enter_context(serving())
        moves = Traffic(sys_root), Requests(served)
        collector = open_.enter_context(running(folder, Shape(1, GPUS)))
        key, certificate = Authority.load(folder).issue("agent", f"drover://agent/{name(0)}")
        (folder / "agent.key").touch(0o600)
        (folder / "agent.key").write_bytes(key)
        (folder / "agent.crt").write_bytes(certificate)
        node = Node(folder, fake, collector.address, sys_root, f"vllm={served.url}")
        if not args.no_imports:
            line |= import_s(imported(node, folder))
        for calls in ("h100", "sleep", "spin"):
            if args.only in (None, calls):
                fake.costs_of_h100() if calls == "h100" else fake.costs(spin=calls == "spin")
                line[calls] = minute(folder, node, collector, moves, args.warm, args.seconds, parts=args.parts)
                print(json.dumps(line[calls]), file=sys.stderr, flush=True)
                for part, (ms, times) in line[calls]["agent"].get("parts", {}).items():
                    print(f"| {part} | {ms:.2f} | {times:.1f} |", file=sys.stderr)
    line["load1"] = os.getloadavg()[0]  # of this machine: figures of one that has more to do are worth less
    line["goals"] = {"cpu_ratio": CPU_GOAL, "rss_mib": MEMORY_GOAL_MIB, "import_s": IMPORT_GOAL_S}
    print(json.dumps(line))


if __name__ == "__main__":
    main()

"""The Fleet page at 100,000 GPUs: how soon it is painted, what a refresh takes, what open consoles cost.

A real collector, store and detectors (`console/inside_fleet.py` says what stands in for 12,500 agents), the real
console, Debian's Chromium. Each viewer is a browser context of its own, or `console/viewer.py`: a page without a
browser. Prints each part on standard error as it ends, and prints one JSON line, of the parts that ended also when it
is stopped:

- first paint: from the navigation to the pixels of the whole picture, cache empty (`cold`) and on the next visit
  (`warm`), one viewer alone; the console has served a page before, and the browser is running. `stands`: until the
  page's own picture has taken the place of the one drawn before Streamlit's scripts ran, as without such a one the
  first would. Once more while the collector takes nothing in (`first_paint_idle`): collector, console and browser share
  one machine here.
- alone: a Chromium, then a viewer, nobody else: how often each has the page run again, and what the collector is asked
  for it. A viewer that asked less would be no measure: the benchmark ends there.
- consoles: 1, 4 and 10 of them, one a Chromium, the others viewers, by health and by a metric. refresh: from asking for
  the picture to its pixels. bytes of 5 s: all that the Chromium's page gets between two pictures, websocket and HTTP
  together, as they travel (`console/wire.py`); `unpacked`: the websocket's messages themselves.
- cost: what the most consoles cost the collector's process, its `inside` thread left out. In turns (`--turns`, each of
  `--turn` seconds: whole ticks of 10 s): none, all by health, all by the metric, none ...; a cost is a turn's cores
  less the mean of the turns without any console before and after it, printed for each and as their median. `all`: with
  what the engine's merge threads took (MERGES); these take up to half a core and come when they come, whether somebody
  looks or not, as nothing that a console asks writes. `without_merges`: the rest, by which the goal is judged.
  `spread_of_none`: how far the turns without a console lie apart, what a difference has to exceed to mean anything.
- threads: cores of the collector's and the console's threads by the name the kernel has, of a turn each. Threads of
  Python have the process' name; the first one of each process runs its event loop.

    python benchmarks/bench_console_fleet.py [--nodes 12500] [--consoles 1 4 10] [--seconds 20] [--paints 3]
        [--turns 3] [--turn 40]
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import grpc
import psutil
from console.inside_fleet import FAULTY, SILENT
from console.viewer import Viewers
from console.watched import Session
from console.wire import Websocket
from load.collector import MERGES, Usage, usage_of
from load.fleet import Shape
from playwright.sync_api import sync_playwright

from drover_proto import fleet_pb2 as pb
from drover_proto.fleet_pb2_grpc import FleetStub
from testbed.browser import CHROMIUM, FLAGS
from testbed.system_processes import SOON, free_port, reachable, running
from testbed.waiting import wait_until

GPUS = 8
READY_S = 900.0
OPEN_MS = 120_000.0
INSIDE = "inside"
LEAN = "collector_without_merges"
GONE_S = 3.0  # after which the console has seen that pages went, or the last of them has settled
COLOURS = {"health": "", "power_w": "/?color=power_w"}
PICTURE_S = 5.0  # between two pictures of a page (drover_dashboard/widgets/fleet_picture.py)
ALIKE = 0.9  # of a viewer's reruns to a Chromium's
CALLS_ALIKE = 0.7  # of what the collector is asked: an answer serves for 1 s, which who asks each second may just miss
GOALS = {"first_paint_ms": 2000, "refresh_ms": 200, "refresh_bytes": 120_000, "collector_cores": 0.3}


class Cpu:
    """CPU seconds of the processes that take part."""

    def __init__(self, pids: dict[str, int]) -> None:
        self._pids = pids
        self._usages = self._read()
        self._before, self._began_s = self._now(self._usages), time.monotonic()

    def _read(self) -> dict[str, Usage]:
        return {name: usage_of(pid) for name, pid in self._pids.items()}

    def _now(self, usages: dict[str, Usage]) -> dict[str, float]:
        found = {}
        for name, usage in usages.items():
            found[name] = usage.cpu_s - usage.by_thread.get(INSIDE, 0.0)
            if INSIDE in usage.by_thread:
                found[INSIDE] = usage.by_thread[INSIDE]
                found[LEAN] = found[name] - sum(usage.by_thread.get(part, 0.0) for part in MERGES)
        own = psutil.Process().cpu_times()
        found["viewers"] = own.user + own.system
        found["browser"] = sum(_cpu_s(p) for p in psutil.Process().children(recursive=True) if "chrom" in _name(p))
        return found

    def cores(self) -> dict[str, float]:
        """Cores of each since it was made."""
        passed_s = time.monotonic() - self._began_s
        now = self._now(self._read())
        return {name: round((s - self._before.get(name, 0.0)) / passed_s, 3) for name, s in now.items()}

    def threads(self) -> dict[str, dict[str, float]]:
        """Cores of each process by thread, the dearest first, those of a hundredth or more."""
        passed_s, result = time.monotonic() - self._began_s, {}
        for name, usage in self._read().items():
            before = self._usages[name].by_thread
            cores = {part: (s - before.get(part, 0.0)) / passed_s for part, s in usage.by_thread.items()}
            dearest = sorted(cores.items(), key=lambda row: -row[1])
            result[name] = {part: round(value, 3) for part, value in dearest if value >= 0.01}
        return result


def _cpu_s(process: psutil.Process) -> float:
    with contextlib.suppress(psutil.Error):
        times = process.cpu_times()
        return float(times.user + times.system)
    return 0.0


def _name(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return str(process.name())
    return ""


def pid_of(word: str) -> int:
    """The child of this process with `word` among its arguments."""
    return next(p.pid for p in psutil.Process().children() if word in p.cmdline())


def full(stub: FleetStub, nodes: int, collector: int) -> bool:
    """Whether the fleet reports, is judged, and has its faults. Raises SystemExit when the collector has ended."""
    if psutil.Process(collector).status() == psutil.STATUS_ZOMBIE:
        raise SystemExit("the collector ended before the fleet reported: its log says why")
    with contextlib.suppress(grpc.RpcError):
        status = stub.GetStatus(pb.StatusRequest(), timeout=30)
        opened = sum(status.open_incidents_by_severity.values())
        judged = status.newest_tick_ms > status.started_ms
        return judged and opened > FAULTY // 2 and status.nodes_reporting >= nodes - SILENT
    return False


def spread(values: list[float]) -> dict[str, float]:
    found = sorted(values)
    if not found:
        return {"count": 0}
    return {
        "median": _rounded(statistics.median(found)), "p95": _rounded(found[round(0.95 * (len(found) - 1))]),
        "max": _rounded(found[-1]), "count": len(found),
    }  # fmt: skip


def _rounded(value: float) -> float:
    return round(value, 2) if value < 10 else round(value)


def watch(session: Session, viewers: Viewers, cpu: Callable[[], Cpu], port: int, seconds: float) -> dict[str, Any]:
    """What the open pages get and cost within so long."""
    session.forget()
    viewers.forget()
    wire = Websocket(port)
    wire.look()
    counted, began_s = cpu(), time.monotonic()
    while time.monotonic() < began_s + seconds:
        session.page.wait_for_timeout(500)  # the protocol's events come in meanwhile
        wire.look()
    cores, threads, passed_s = counted.cores(), counted.threads(), time.monotonic() - began_s
    per_5_s = PICTURE_S / passed_s
    others = viewers.open
    refreshes = session.refreshes()
    return {
        "refresh_ms": spread(refreshes),
        "refreshes_ms": [round(ms) for ms in refreshes],
        "refresh_bytes": spread([float(size) for size in session.picture_bytes]),
        "bytes_of_5_s": round((wire.received + session.all_bytes) * per_5_s),
        "websocket_bytes_of_5_s": round(wire.received * per_5_s),
        "websocket_unpacked_of_5_s": round(session.socket_bytes * per_5_s),
        "viewers_unpacked_of_5_s": spread([(v.socket_bytes + v.http_bytes) * per_5_s for v in others]),
        "reruns_per_s": round(session.reruns / passed_s, 2),
        "viewers_reruns_per_s": spread([v.reruns.total() / passed_s for v in others]),
        "viewers_missed": sum(v.missed for v in others),
        "viewers_refused": sum(v.refused for v in others),
        "cores": cores,
        "threads": threads,
    }


def in_turns(
    session: Session, viewers: Viewers, cpu: Callable[[], Cpu], url: str, given: argparse.Namespace,
    note: Callable[[str, Any], None],
) -> None:  # fmt: skip
    """None and the most consoles in turns: the cost, and what the pages of each colour get in all its turns."""
    count, port = max(given.consoles), int(url.rpartition(":")[2])
    nobody: list[dict[str, float]] = []
    watched: dict[str, list[dict[str, Any]]] = {colour: [] for colour in COLOURS}

    def none() -> None:
        session.page.goto("about:blank")
        viewers.set(0, url)
        time.sleep(GONE_S)
        counted = cpu()
        time.sleep(given.turn)
        nobody.append(counted.cores())
        note(f"none, turn {len(nobody)}", {"cores": nobody[-1], "threads": counted.threads()})

    none()
    for turn in range(given.turns):
        for colour, query in COLOURS.items():
            viewers.set(count - 1, url + query)
            session.open(url + query, OPEN_MS)
            session.page.wait_for_timeout(1000 * GONE_S)
            watched[colour].append(watch(session, viewers, cpu, port, given.turn))
            note(f"turn {turn + 1} of {colour}", watched[colour][-1])
        none()
    for colour, parts in watched.items():
        bytes_of_5_s = [part["bytes_of_5_s"] for part in parts]
        refreshes = [float(ms) for part in parts for ms in part["refreshes_ms"]]
        note(f"{colour}, {count}", {"refresh_ms": spread(refreshes), "bytes_of_5_s": max(bytes_of_5_s)})
    note("cost", costs(nobody, {colour: [part["cores"] for part in parts] for colour, parts in watched.items()}))


def costs(nobody: list[dict[str, float]], watched: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Cores of the collector by `all` and `without_merges`, of each colour's turns less those of the turns around."""
    result: dict[str, Any] = {}
    for name, part in (("all", "collector"), ("without_merges", LEAN)):
        none = [cores[part] for cores in nobody]
        result[name] = {"spread_of_none": round(max(none) - min(none), 3), "none": statistics.median(none)}
        for colour, turns in watched.items():
            around = [(before + after) / 2 for before, after in itertools.pairwise(none)]
            more = [round(cores[part] - base, 3) for cores, base in zip(turns, around, strict=True)]
            result[name][colour] = {"median": round(statistics.median(more), 3), "turns": more}
    return result


def alone(session: Session | None, viewers: Viewers, calls: Calls, seconds: float) -> dict[str, Any]:
    """How often one page, and no other, has itself run again, and what the collector is asked for it."""
    if session is not None:
        session.forget()
    viewers.forget()
    before, began_s = calls.read(), time.monotonic()
    while time.monotonic() < began_s + seconds:
        if session is not None:
            session.page.wait_for_timeout(500)
        else:
            time.sleep(0.5)
    passed_s = time.monotonic() - began_s
    asked = calls.read() - before
    reruns = session.reruns if session is not None else viewers.open[0].reruns.total()
    return {
        "reruns_per_s": round(reruns / passed_s, 2),
        "calls_per_s": {name: round(count / passed_s, 2) for name, count in sorted(asked.items())},
    }


class Calls:
    """How often the collector was asked what, so far."""

    def __init__(self, path: Path) -> None:
        self.path, self.pid = path, 0

    def read(self) -> Counter[str]:
        self.path.unlink(missing_ok=True)
        os.kill(self.pid, signal.SIGUSR1)
        wait_until(self.path.exists, "the collector writes what it was asked", 60)
        return Counter(json.loads(self.path.read_text()))


def paints(browser: Any, url: str, count: int) -> dict[str, Any]:
    cold, warm, stood, again_stood, layout, first = [], [], [], [], [], []
    for number in range(count + 1):
        session = Session.of(browser)
        took_ms, stood_ms = session.open(url, OPEN_MS)
        session.page.wait_for_timeout(500)
        sent, got = session.all_bytes + session.socket_bytes, list(session.layout_bytes)
        again_ms, again_stood_ms = session.open(url, OPEN_MS)
        session.context.close()
        if number:  # the first of all warms the console's own process
            cold.append(took_ms)
            warm.append(again_ms)
            stood.append(stood_ms)
            again_stood.append(again_stood_ms)
            first.append(float(sent))
            layout += [float(size) for size in got]
    return {
        "cold_ms": spread(cold), "warm_ms": spread(warm), "cold_stands_ms": spread(stood),
        "warm_stands_ms": spread(again_stood), "bytes": spread(first), "layout_bytes": spread(layout),
    }  # fmt: skip


def measure(folder: Path, given: argparse.Namespace, found: dict[str, Any]) -> None:
    """Fills `found`, part by part."""
    agents, api, port = (free_port() for _ in range(3))
    (folder / "fleet.toml").write_text(Shape(given.nodes, GPUS).toml())
    (folder / "collector.toml").write_text(
        f'fleet = "{folder}/fleet.toml"\n[store]\nurl = "chdb://{folder}/store"\n'
        f'[ingest]\nlisten = "127.0.0.1:{agents}"\n[api]\nlisten = "127.0.0.1:{api}"\n'
    )
    calls = Calls(folder / "calls.json")
    path = os.environ | {"PYTHONPATH": f"{ROOT}/benchmarks", "CALLS": str(calls.path)}
    options = ["--collector", f"127.0.0.1:{api}", "--port", str(port)]
    began_s = time.monotonic()

    def note(part: str, result: Any) -> None:
        found[part] = result
        print(f"{time.monotonic() - began_s:6.1f} s  {part}: {json.dumps(result)}", file=sys.stderr, flush=True)

    with (
        running(folder, "console.inside_fleet", "run", "--config", f"{folder}/collector.toml", env=path),
        grpc.insecure_channel(f"127.0.0.1:{api}", SOON) as channel,
        running(folder, "drover_dashboard.main", *options) as log,
        sync_playwright() as play,
    ):
        stub = FleetStub(channel)
        wait_until(partial(reachable, "127.0.0.1", port), "the console listens", 60)
        collector = pid_of("console.inside_fleet")
        wait_until(partial(full, stub, given.nodes, collector), "the fleet reports, and is judged", READY_S)
        pids = {"collector": collector, "console": pid_of("drover_dashboard.main")}
        cpu = partial(Cpu, pids)
        browser = play.chromium.launch(executable_path=CHROMIUM, headless=True, args=FLAGS)
        url = f"http://127.0.0.1:{port}"
        status = stub.GetStatus(pb.StatusRequest(), timeout=60)
        opened = sum(status.open_incidents_by_severity.values())
        fleet = {"gpus": status.gpus_expected, "nodes_reporting": status.nodes_reporting, "open_incidents": opened}
        note("fleet", fleet | {"samples_stored": status.samples_stored})
        note("first_paint", paints(browser, url, given.paints))
        os.kill(collector, signal.SIGUSR2)
        note("first_paint_idle", paints(browser, url, given.paints))
        os.kill(collector, signal.SIGUSR2)
        calls.pid, viewers = collector, Viewers()
        session = Session.of(browser)
        session.open(url, OPEN_MS)
        chromium = alone(session, viewers, calls, given.seconds)
        session.page.goto("about:blank")
        time.sleep(2)  # the console has seen that it went
        viewers.set(1, url)
        viewer = alone(None, viewers, calls, given.seconds)
        note("alone", {"chromium": chromium, "viewer": viewer})
        asked = [sum(result["calls_per_s"].values()) for result in (viewer, chromium)]
        if viewer["reruns_per_s"] < ALIKE * chromium["reruns_per_s"] or asked[0] < CALLS_ALIKE * asked[1]:
            viewers.close()
            raise SystemExit("a viewer asks less than a browser: it is no measure of what consoles cost")
        for colour, query in COLOURS.items():
            link = url + query
            viewers.set(0, link)
            session.open(link, OPEN_MS)
            for count in sorted(given.consoles)[:-1]:
                viewers.set(count - 1, link)
                note(f"{colour}, {count}", watch(session, viewers, cpu, port, given.seconds))
        in_turns(session, viewers, cpu, url, given, note)
        viewers.close()
        note("problems", session.problems[:5])
        note("console_log", log.read_text("utf-8", "replace").splitlines()[1:6])
        browser.close()


def judged(found: dict[str, Any]) -> dict[str, Any]:
    """The goals that were measured whole, against the dearer of the two colours, and of the most consoles."""
    shown = [result for name, result in found.items() if name.startswith(("health, ", "power_w, "))]
    reached: dict[str, float] = {}
    if "first_paint" in found:
        reached["first_paint_ms"] = found["first_paint"]["cold_ms"]["median"]
    if shown:
        refreshed = [result["refresh_ms"]["median"] for result in shown if result["refresh_ms"]["count"]]
        reached |= {"refresh_ms": max(refreshed)} if refreshed else {}
        reached["refresh_bytes"] = max(result["bytes_of_5_s"] for result in shown)
    if "cost" in found:
        reached["collector_cores"] = max(found["cost"]["without_merges"][colour]["median"] for colour in COLOURS)
    return {name: {"is": value, "goal": GOALS[name], "met": value < GOALS[name]} for name, value in reached.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=12_500, help="of 8 GPUs each")
    parser.add_argument("--consoles", type=int, nargs="+", default=[1, 4, 10], help="open at a time")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each part but the turns")
    parser.add_argument("--turns", type=int, default=3, help="of the most consoles, by each colour")
    parser.add_argument("--turn", type=float, default=40.0, help="seconds of each")
    parser.add_argument("--paints", type=int, default=3, help="first paints, each cold and warm")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # else what it started would live on
    load = [os.getloadavg()[0]]
    found: dict[str, Any] = {}
    try:
        with tempfile.TemporaryDirectory(prefix="drover-bench-console-", ignore_cleanup_errors=True) as name:
            measure(Path(name), given, found)
    finally:
        load.append(os.getloadavg()[0])
        line = {
            "benchmark": "console_fleet", "cores": os.cpu_count(), "consoles": given.consoles,
            "seconds": given.seconds, "load_before_after": [round(value, 1) for value in load], **judged(found),
            **found,
        }  # fmt: skip
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()

"""Nothing acknowledged is lost and nothing is doubled: collectors and agents killed, a full disk, a damaged file.

Real collector processes with an embedded store, and the real spool and uplink of agents that resend, in a process of
their own, fed with values that follow from place and time. The collector is killed with -9 at random moments and right
at chosen points of its work (before and after each insert, before the Ack, around the noting of positions); then the
agents' process is. Afterwards each row and event that an agent had put into its spool must be in the store once, with
its value, by count and by checksum per GPU, and the 10 s and 5 min rollups must be what the rows give, all of them:
they are compared when no mark is open any more, and once more with one of each made wrong, which must be found. Then a
disk runs full (needs root, for a mount), and a file of the store is damaged. Prints one JSON line; exit code 1 when
anything is wrong or could not be shown.

    python benchmarks/bench_durability.py [--kills 50] [--nodes 4] [--seed 1]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
from durability.agents import READY
from durability.content import METRICS, name, toml
from durability.dying import POINTS

from drover_proto import fleet_pb2 as pb
from drover_proto.fleet_pb2_grpc import FleetStub

OFTEN = {"before the insert", "between insert and Ack", "after late rows are noted"}  # points that each batch passes
PERIOD_S = 0.1  # between two rows of a GPU
START_S = 60.0
DELIVER_S = 120.0
ROLL_S = 240.0  # on a busy machine; else that late rows wait for more of their kind, a minute, and some seconds
CHUNK_MS = 300_000  # of the coarser rollups
QUICK_S = 5  # that late rows wait, with --quick
DISK_BYTES = 640 << 20
WRONG = (
    "rows_lost", "rows_doubled", "rows_wrong", "series_unequal", "events_lost", "events_doubled", "rollups_unequal",
    "rollups_5m_unequal", "damaged_parts",
)  # fmt: skip


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Site:
    """A collector's folder and its agents' folder, and the processes that run there."""

    def __init__(self, folder: Path, nodes: int, store: Path | None = None, quick: bool = False) -> None:
        self.folder, self.nodes, self.quick = folder, nodes, quick
        self.began_ms = time.time_ns() // 1_000_000
        self.store = store or folder / "store"
        self.agents_at, self.api_at = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
        self.journals = folder / "agents"
        self.journals.mkdir(parents=True)
        self.config = folder / "collector.toml"
        (folder / "fleet.toml").write_text(toml(nodes))
        self.config.write_text(
            f'fleet = "{folder}/fleet.toml"\n[store]\nurl = "chdb://{self.store}"\nkeep_free_bytes = 1048576\n'
            f'[ingest]\nlisten = "{self.agents_at}"\n[api]\nlisten = "{self.api_at}"\n[detect]\nlag_s = 2.0\n'
        )
        self.collector: subprocess.Popen[bytes] | None = None
        self.agents: subprocess.Popen[bytes] | None = None

    def _spawn(self, log: str, *words: str) -> subprocess.Popen[bytes]:
        paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "GRPC_VERBOSITY": "NONE"}
        with (self.folder / log).open("ab") as errors:
            return subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, stderr=errors, env=environment)

    def start_collector(self, point: str = "", count: int = 0) -> None:
        """`point`: it kills itself there; else it waits to be killed. Returns when it is ready, or dead."""
        settle = [str(QUICK_S)] if self.quick else []
        run = ["-m", "drover_collector.main", "run", "--config", str(self.config)]
        if point or self.quick:
            run = ["-m", "durability.dying", point, str(count), str(self.config), *settle]
        self.collector = self._spawn("collector.log", *run)
        _await(self.collector, b"is ready", dead=bool(point))

    def start_agents(self) -> None:
        self.agents = self._spawn(
            "agents.log", "-m", "durability.agents", str(self.journals), self.agents_at, str(self.nodes), str(PERIOD_S)
        )
        _await(self.agents, READY.encode())

    def kill_collector(self) -> None:
        assert self.collector is not None
        self.collector.kill()
        self.collector.communicate()

    def kill_agents(self) -> None:
        assert self.agents is not None
        self.agents.kill()
        self.agents.communicate()

    def stop_agents(self) -> None:
        """They deliver what they have."""
        assert self.agents is not None
        self.agents.send_signal(signal.SIGTERM)
        try:
            self.agents.communicate(timeout=DELIVER_S)
        except subprocess.TimeoutExpired:
            self.kill_agents()
            raise RuntimeError(f"agents did not deliver all within {DELIVER_S:g} s") from None

    def stop_collector(self) -> None:
        assert self.collector is not None
        self.collector.send_signal(signal.SIGTERM)
        try:
            self.collector.communicate(timeout=START_S)
        except subprocess.TimeoutExpired:
            self.kill_collector()

    def status(self) -> pb.Status:
        with grpc.insecure_channel(self.api_at) as channel:
            return FleetStub(channel).GetStatus(pb.StatusRequest(), timeout=20, wait_for_ready=True)

    def read(self, from_ms: int, to_ms: int) -> None:
        """A chart on the samples of one GPU."""
        request = pb.SeriesRequest(
            scope="gpu", targets=[pb.SeriesTarget(node=name(0), gpu=0)], metrics=METRICS, from_ms=from_ms,
            to_ms=min(to_ms, from_ms + 60_000), max_points=60_000,
        )  # fmt: skip
        with grpc.insecure_channel(self.api_at) as channel:
            FleetStub(channel).QuerySeries(request, timeout=30, wait_for_ready=True)

    def until_rolled_up(self) -> str:
        """Until what was delivered is past, judged, and all rollups of it are made, with late rows; unless --quick also
        those of the first 5 minutes. "", or what did not come."""
        past_ms = time.time_ns() // 1_000_000 + 10_000
        if not self.quick:
            past_ms = max(past_ms, self.began_ms // CHUNK_MS * CHUNK_MS + CHUNK_MS + 10_000)
        wait_s = ROLL_S + (past_ms / 1000 - time.time())
        if not _until(lambda: self.status().newest_tick_ms >= past_ms, wait_s):
            return f"no bucket of {past_ms} ms was judged within {wait_s:.0f} s"
        if not _until(lambda: self.marks() == 0, ROLL_S):
            return f"{self.marks()} marks of rollups to be made again are open after {ROLL_S:g} s"
        return ""

    def marks(self) -> int:
        with grpc.insecure_channel(self.api_at) as channel:
            system = FleetStub(channel).GetSystem(pb.SystemRequest(), timeout=20, wait_for_ready=True)
            return int(system.store.rollup_marks)

    def check(self, *how: str) -> dict[str, Any]:
        words = [f"chdb://{self.store}", str(self.journals), str(self.nodes), *how]
        done = self._spawn("check.log", "-m", "durability.check", *words)
        out, _ = done.communicate(timeout=300)
        if done.returncode:
            raise RuntimeError((self.folder / "check.log").read_text()[-2000:])
        found: dict[str, Any] = json.loads(out.splitlines()[-1])
        return found

    def close(self) -> None:
        for process in (self.collector, self.agents):
            if process is not None and process.poll() is None:
                process.kill()
                process.communicate()


def _await(process: subprocess.Popen[bytes], word: bytes, *, dead: bool = False) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if word in line:
            return
    process.communicate()
    if not dead:
        raise RuntimeError(f"{process.args!r} ended with {process.returncode} before it was ready")


def collector_killed(site: Site, kills: int, rng: random.Random) -> dict[str, Any]:
    """Killed at random moments under load, every second time right at a chosen point."""
    points: Counter[str] = Counter()
    names = list(POINTS)
    site.start_agents()
    for number in range(kills):
        point = names[number // 2 % len(names)] if number % 2 else ""
        site.start_collector(point, rng.randint(1, 4) if point in OFTEN else 1)
        assert site.collector is not None
        if point:
            try:
                site.collector.communicate(timeout=10)
                points[point] += 1
                continue
            except subprocess.TimeoutExpired:
                points["at random, the point was not reached"] += 1
        else:
            time.sleep(rng.uniform(0.05, 2.5))
            points["at random"] += 1
        site.kill_collector()
    return {"kills": kills, "points": dict(points)}


def agents_killed(site: Site, kills: int, rng: random.Random) -> dict[str, Any]:
    """The agents' process, with all its spools open, while the collector takes."""
    for _ in range(kills):
        time.sleep(rng.uniform(0.05, 1.0))
        site.kill_agents()
        site.start_agents()
    return {"kills": kills}


def finished(site: Site) -> dict[str, Any]:
    """Everything delivered and compared; that a wrong rollup would have been found, too."""
    site.stop_agents()
    late = site.until_rolled_up()
    site.stop_collector()
    return {"rollups_not_made": late, **site.check("spoil")}


def not_shown(found: dict[str, Any], quick: bool) -> list[str]:
    """What the comparison of rollups leaves open."""
    if "skipped" in found:
        return []
    blind = [f"a wrong rollup of {level} is not found" for level, count in found["spoiled_found"].items() if not count]
    none = [] if found["rollups_compared"] else ["no 10 s rollup was compared"]
    coarse = [] if quick or found["rollups_5m_compared"] else ["no 5 min rollup was compared"]
    return [found["rollups_not_made"]] * bool(found["rollups_not_made"]) + none + coarse + blind


def disk_full(folder: Path, rng: random.Random, quick: bool = True) -> dict[str, Any]:
    """A disk that others fill: to below what the store asks for, then to the last byte; then there is room again."""
    if os.geteuid() != 0:
        return {"skipped": "needs root, for a mount"}
    disk = folder / "disk"
    disk.mkdir(parents=True)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(disk)], capture_output=True, check=False
    )
    if mounted.returncode:
        return {"skipped": f"no mount: {mounted.stderr.decode().strip()}"}
    site = Site(folder / "site", 2, disk / "store", quick)
    try:
        site.start_collector()
        site.start_agents()
        time.sleep(rng.uniform(3, 5))
        lines: list[str] = []
        held_back = 0
        for left in (200 << 20, 0):
            _fill(disk / "ballast", disk, left)
            time.sleep(2)  # what was under way
            before = site.status().samples_stored
            time.sleep(5)
            status = site.status()
            lines += [line for line in status.troubles if "free on its disk" in line]
            held_back += status.samples_stored == before
        (disk / "ballast").unlink()
        found = finished(site)
        return {"warnings": len(lines), "held_back": held_back, **found}
    finally:
        site.close()
        subprocess.run(["umount", "-l", str(disk)], check=False)


def _fill(ballast: Path, disk: Path, left: int) -> None:
    with ballast.open("ab") as file:
        chunk = bytes(1 << 20)
        try:
            while shutil.disk_usage(disk).free > left:
                file.write(chunk)
                file.flush()
        except OSError:
            pass  # full


def damaged(site: Site, rng: random.Random) -> dict[str, Any]:
    """Bits flipped in the largest part of the samples: reported with table and time, the rest answers, rows go in."""
    largest = max(active_parts(site.store), key=weight)
    # What each read of samples reads.
    file = next(name for name in (largest / "ts.bin", largest / "data.bin") if name.exists())
    data, span = bytearray(file.read_bytes()), (largest / "minmax_ts.idx").read_bytes()
    for _ in range(64):
        data[rng.randrange(len(data))] ^= 255
    file.write_bytes(data)
    started = time.monotonic()
    site.start_collector()
    ready_s = time.monotonic() - started
    low, high = struct.unpack("<qq", span)
    site.read(low, high)
    _until(lambda: any("is damaged" in line for line in site.status().troubles), 60)
    sentence = next((line for line in site.status().troubles if "is damaged" in line), "")
    site.stop_collector()
    lost = site.check()["rows_lost"]
    # Damage to what came in the last minutes: the next start asks agents for what they keep of what was acknowledged.
    site.start_collector()
    begun_ms = time.time_ns() // 1_000_000
    site.start_agents()
    time.sleep(2)
    site.stop_agents()
    takes_in = _until(lambda: site.status().newest_sample_ms > begun_ms, 30)
    site.stop_collector()
    again = site.check()
    return {
        "file": f"{file.parent.name}/{file.name}",
        "started_s": round(ready_s, 2),
        "reported": sentence,
        "names_table_and_time": "table " in sentence and " from 20" in sentence,
        "takes_in": takes_in,
        "rows_lost": lost,
        "rows_lost_after_agents_sent_again": again["rows_lost"],
        "rows_wrong": again["rows_wrong"] + again["rows_doubled"],
    }


def _until(true: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.5)
    return True


def active_parts(store: Path) -> list[Path]:
    """Parts of samples; not those that a merge has replaced, which stay for some minutes."""
    parts = [file.parent for file in store.glob("store/*/*/*/minmax_ts.idx")]

    def covers(other: Path, part: Path) -> bool:
        (to, a, b, level), (at, c, d, lower) = ([*map(int, each.name.split("_")[:4])] for each in (other, part))
        return other.parent == part.parent and to == at and a <= c and d <= b and level > lower

    return [part for part in parts if not any(covers(other, part) for other in parts)]


def weight(part: Path) -> int:
    return sum(file.stat().st_size for file in part.iterdir())


def measure(kills: int, nodes: int, seed: int, folder: Path, disk: bool = True, quick: bool = False) -> dict[str, Any]:
    rng = random.Random(seed)
    started = time.monotonic()
    site = Site(folder / "main", nodes, quick=quick)
    try:
        collector = collector_killed(site, kills, rng)
        site.start_collector()
        agents = agents_killed(site, kills, rng)
        stored = finished(site)
        damage = damaged(site, rng)
    finally:
        site.close()
    full = disk_full(folder / "full", rng) if disk else {"skipped": "not asked for"}
    wrong = [name for found in (stored, full) for name in WRONG if found.get(name)]
    wrong += [f"damage: {name}" for name in ("names_table_and_time", "takes_in") if not damage[name]]
    wrong += ["damage: rows_wrong"] if damage["rows_wrong"] else []
    return {
        "benchmark": "durability",
        "seed": seed,
        "nodes": nodes,
        "collector_killed": collector,
        "agents_killed": agents,
        "stored": stored,
        "disk_full": full,
        "damage": damage,
        "wrong": wrong,
        "not_shown": [*not_shown(stored, quick), *(f"full disk: {text}" for text in not_shown(full, True))],
        "seconds": round(time.monotonic() - started, 1),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50, help="of the collector, and as many of the agents")
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--quick", action="store_true",
        help=f"late rows wait {QUICK_S} s for more instead of a minute, and 5 min rollups are compared if any is over",
    )  # fmt: skip
    parser.add_argument("--no-disk", action="store_true", help="leave out the full disk")
    parser.add_argument("--keep", type=Path, help="folder to work in and to leave (default: a temporary one)")
    args = parser.parse_args(argv)
    folder = args.keep or Path(tempfile.mkdtemp(prefix="drover-durability-"))
    try:
        result = measure(args.kills, args.nodes, args.seed, folder, not args.no_disk, args.quick)
    finally:
        if args.keep is None:
            shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps(result))
    return 1 if result["wrong"] or result["not_shown"] else 0


if __name__ == "__main__":
    sys.exit(main())

"""Processes that are killed, stopped, starved, or started with what they cannot use; disks and clocks."""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from bench_durability import active_parts, weight
from durability.content import METRICS, name

from disruption.place import CALL_S, START_S
from disruption.run import Run, SkipError, now_ms
from drover_proto import fleet_pb2 as pb

PATIENT_S = 90.0  # for what takes a second on a machine of its own
Steps = Iterator[Callable[[], object] | None]


def agents_killed(run: Run) -> Steps:
    run.place.fleet.kill()
    run.hold(2)
    run.place.start_agents()
    yield None


def agents_stopped(run: Run) -> Steps:
    run.place.fleet.signal(signal.SIGSTOP)
    run.hold(12)
    run.place.fleet.signal(signal.SIGCONT)
    yield None


def agents_restarted(run: Run) -> Steps:
    """With data in the spool: the collector is away meanwhile."""
    run["proxy"].weather.refuses = True
    run["proxy"].reset()
    run.hold(4)
    waits = sum(run.place.pending().values())
    run.place.fleet.kill()  # SIGTERM would wait for a collector
    run.place.start_agents()
    run.must(waits > 2, "the spool has something that waits")
    run.saw(f"{waits} records in the spools were sent by the next run")
    run["proxy"].weather.refuses = False
    yield None


def agents_out_of_memory(run: Run) -> Steps:
    """The kernel's own killer, in a control group of 100 MiB, where there is one; else memory is refused."""
    agents = run.place.fleet
    group = Path("/sys/fs/cgroup/memory/drover-chaos")
    try:
        group.mkdir(exist_ok=True)
        (group / "memory.limit_in_bytes").write_text(str(100 << 20))
        (group / "cgroup.procs").write_text(str(agents.child.pid))
        how = "killed by the kernel at 100 MiB"
    except OSError:
        used = int(Path(f"/proc/{agents.child.pid}/statm").read_text().split()[0]) * resource.getpagesize()
        resource.prlimit(agents.child.pid, resource.RLIMIT_AS, (used + (64 << 20), used + (64 << 20)))
        how = "no address space was given beyond what it had and 64 MiB"
    with contextlib.suppress(RuntimeError, BrokenPipeError):  # it has ended
        agents.ask(do="eat", mib=400)
    run.until(lambda: not agents.alive, 10, "it is killed")
    run.saw(f"{how}: ended with {agents.child.poll()}")
    yield None
    if group.exists():
        run.place.wait(lambda: not (group / "cgroup.procs").read_text(), 5)
        group.rmdir()


def collector_killed_before_ack(run: Run) -> Steps:
    place = run.place
    place.collectors["c1"].kill()
    place.start_collector(module=("durability.dying", "between insert and Ack", "3"))
    run.until(lambda: not place.collectors["c1"].alive, START_S, "it came to this point and died")
    place.collectors["c1"].kill()
    run.saw("died by its own hand after an insert, before the Ack")
    place.start_collector()
    yield None


def collector_stopped(run: Run) -> Steps:
    run.place.collectors["c1"].signal(signal.SIGSTOP)
    run.hold(30)
    waits = sum(run.place.pending().values())
    run.saw(f"{waits} records waited in the spools")
    run.place.collectors["c1"].signal(signal.SIGCONT)
    yield None


def collector_restarted(run: Run) -> Steps:
    run.place.collectors["c1"].stop()
    run.place.start_collector()
    yield None


def bad_settings_at_restart(run: Run) -> Steps:
    place, config = run.place, run.folder / "c1.toml"
    place.collectors["c1"].stop()
    good = config.read_text()
    config.write_text(good + '\n[detect]\nlag_s = "soon"\n')
    words = [sys.executable, "-m", "drover_collector.main", "run", "--config", str(config)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    run.must(done.returncode == 2, "exit code 2")
    lines = done.stderr.strip().splitlines()
    run.must(len(lines) == 1 and "collector.toml" not in good, "one line")
    run.saw(f"exit code {done.returncode}: {lines[-1].replace(str(run.folder), '')[:120]}")
    config.write_text(good)
    place.start_collector()
    yield None


def policy_bad(run: Run) -> Steps:
    place, policy = run.place, run.folder / "policy.toml"
    good = policy.read_text()
    policy.write_text('mode = "enforce"\n[[rules]]\naction = "explode"\n')

    def reported() -> list[str]:
        return [line for line in place.troubles() if "policy's file cannot be used" in line]

    run.until(reported, PATIENT_S, "the trouble is reported")
    run.saw("the policy before stays in force, and status says so")
    policy.write_text(good)
    yield lambda: not reported()


# ---- disks


def fill(folder: Path, left: int = 0) -> Path:
    ballast = folder / "ballast"
    with ballast.open("ab") as file:
        try:
            while shutil.disk_usage(folder).free > left:
                file.write(bytes(1 << 18))
                file.flush()
        except OSError:
            pass  # full
    return ballast


def store_full(run: Run) -> Steps:
    if run["disk"] is None:
        raise SkipError("needs root, to mount a disk of its own")
    ballast = fill(run["disk"])
    run.hold(8)
    reported = [line for line in run.place.troubles() if "free on its disk" in line or "No space" in line]
    run.must(reported, "status reports it")
    run.saw(reported[0][:110] if reported else "")
    ballast.unlink()
    yield None


def store_read_only(run: Run) -> Steps:
    """Each write to a file is refused, of this process only (RLIMIT_FSIZE): a mount in use cannot be made read-only."""
    pid = run.place.collectors["c1"].child.pid
    before = resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    run.hold(6)
    reported = sorted(run.place.troubles(), key=lambda line: not line.startswith("The store fails"))
    run.saw(reported[0][:110] if reported else "died, and is started again")
    if run.place.collectors["c1"].alive:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, before)
    yield None


def store_damaged(run: Run) -> Steps:
    """Bits flipped in the largest part of the samples; what agents keep of the last ten minutes is asked for again."""
    place = run.place
    place.collectors["c1"].stop()
    part = max(active_parts(run["store"]), key=weight)
    file = next(found for found in (part / "ts.bin", part / "data.bin") if found.exists())
    data, span = bytearray(file.read_bytes()), (part / "minmax_ts.idx").read_bytes()
    rng = random.Random(1)
    for _ in range(64):
        data[rng.randrange(len(data))] ^= 255
    file.write_bytes(data)
    low, high = struct.unpack("<qq", span)
    place.start_collector()

    def reported() -> list[str]:
        request = pb.SeriesRequest(
            scope="gpu", targets=[pb.SeriesTarget(node=name(0), gpu=0)], metrics=METRICS, from_ms=low, to_ms=high,
            max_points=60_000,
        )  # fmt: skip
        place.stub().QuerySeries(request, timeout=CALL_S)
        return [line for line in place.troubles() if "is damaged" in line]

    run.until(reported, PATIENT_S, "the damage is reported, with table and time")
    run.saw("set aside and reported with table and time; asked for again at the next start")
    place.collectors["c1"].stop()
    place.start_collector()
    yield None


def spool_full(run: Run) -> Steps:
    if run["spool_disk"] is None:
        raise SkipError("needs root, to mount a disk of its own")
    ballast = fill(run["spool_disk"])
    run["proxy"].weather.refuses = True
    run["proxy"].reset()
    run.hold(8)
    waits = run.place.pending()[run["spool_node"]]
    run.must(waits > 5, "what was not written waits in memory")
    run.saw(f"{waits} records waited in memory while the disk and the network were away")
    run["proxy"].weather.refuses = False
    run.hold(1)
    ballast.unlink()
    yield None


def spool_cut(run: Run) -> Steps:
    """Half of what waits is cut off the end of a spool: nobody has acknowledged it. What is whole is sent."""
    node = run["cut_node"]
    run["proxy"].weather.refuses = True
    run["proxy"].reset()
    began_ms = now_ms()
    run.hold(5)
    waits = run.place.fleet.ask(do="pending")[node]
    run.place.fleet.kill()
    segment = max((run.place.journals / node).glob("telemetry-*.seg"), key=lambda path: path.stat().st_mtime)
    os.truncate(segment, segment.stat().st_size - waits[1] // 2)
    run.allowed.append((node, began_ms - 3000, now_ms()))
    run.place.start_agents()
    run["proxy"].weather.refuses = False
    yield None


# ---- clocks of nodes


def clock_moved(ahead_s: float) -> Callable[[Run], Steps]:
    def fault(run: Run) -> Steps:
        node = run["clock_node"]
        run.place.fleet.ask(do="clock", node=node, ahead_s=ahead_s)
        run.hold(8)
        request = pb.EventsRequest(node=node, limit=200)

        def reported() -> list[str]:
            events = map(json.loads, run.place.stub().ListEvents(request, timeout=CALL_S).events_json)
            return [
                e["message"]
                for e in events
                if e["code"] == "clock_wrong" and (e["received_ms"] or 0) >= run.row.begin_ms
            ]

        run.until(reported, PATIENT_S, "the wrong clock is an event")
        run.saw(f"reported: {reported()[0][:90]}" if reported() else "")
        run.place.fleet.ask(do="clock", node=node, ahead_s=0)
        # Else the next wrong clock is no news to the agent.
        yield lambda: not run.place.fleet.ask(do="clock wrong", node=node)["wrong"]

    return fault

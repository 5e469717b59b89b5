"""From a line in the kernel log to the incident that the Fleet API shows, stored: real agent, collector and /dev/kmsg.

Needs root. Prints one JSON line. The lines are test lines of user facility, which an agent only acts on when asked to.

    python benchmarks/bench_kernel_log.py                  a quiet collector
    python benchmarks/bench_kernel_log.py --gpus 20000     next to a load of so many GPUs at 1 Hz (benchmarks/load)
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from load.certificates import Authority
from load.collector import Collector, running
from load.fleet import Shape
from load.measure import Moment, Plan, drive

from drover_core.model.events import Incident, from_json
from drover_proto import fleet_pb2 as pb
from testbed.system_processes import running as process
from testbed.waiting import wait_until

CALL_S = 20.0
WAIT_S = 60.0
GPUS_PER_STREAM = 250
EVERY_S = 5.0  # seconds of telemetry in a message of the load
OPEN_S = 3.0
SETTLE_S = 20.0  # of the load, before the first line
MUTE_S = 10.0  # a generator reports each second
PER_LINE_S = 30.0  # at most, to plan the load's length; it ends with the last line


@dataclass(frozen=True, slots=True)
class Fleet(Shape):
    """The load's nodes, and those whose kernel log is real."""

    lines: int = 0

    @property
    def real(self) -> list[str]:
        return [f"kmsg{n:03d}" for n in range(self.lines)]

    def toml(self) -> str:
        # Not super(): a dataclass with slots is made again, and its methods know the class that was before.
        return Shape.toml(self) + f'\n[[nodes]]\nnames = "kmsg[000-{self.lines - 1:03d}]"\nsku = "H100-SXM"\n'


def delays(collector: Collector, names: Sequence[str]) -> list[float]:
    """Seconds from the write to /dev/kmsg to the stored incident, sorted; a line for each node."""
    folder, found = collector.folder, []
    authority = Authority.load(folder)

    def seen(node: str) -> int:
        return collector.stub.GetNode(pb.NodeRequest(node=node), timeout=CALL_S).row.last_seen_ms

    def shown(node: str) -> bool:
        reply = collector.stub.ListIncidents(pb.ListIncidentsRequest(state="all", node=node), timeout=CALL_S)
        return any(from_json(Incident, text).cause == "xid_79" for text in reply.incidents_json)

    for node in names:  # one line each: what follows on the same node would join its incident
        key, certificate = authority.issue(node, f"drover://agent/{node}")
        (folder / f"{node}.key").write_bytes(key)
        (folder / f"{node}.crt").write_bytes(certificate)
        (folder / f"{node}.key").chmod(0o600)
        settings = {
            "node": node, "collectors": f'["{collector.address}"]', "hardware": "none",
            "spool.dir": f"{folder}/{node}", "kmsg_accept_user_facility": "true", "tls.ca": f"{folder}/ca.crt",
            "tls.cert": f"{folder}/{node}.crt", "tls.key": f"{folder}/{node}.key",
        }  # fmt: skip
        args = [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]
        with process(folder, "drover_agent.main", "run", *args):
            wait_until(partial(seen, node), f"{node} streams", WAIT_S)
            before = time.monotonic()
            with Path("/dev/kmsg").open("w") as log:
                log.write("<4>NVRM: Xid (PCI:0000:3b:00): 79, pid=1, name=drover-bench, test line\n")
            wait_until(partial(shown, node), f"an incident of {node}", WAIT_S)
            found.append(time.monotonic() - before)
    return sorted(found)


class EndedError(Exception):
    """The load has done its work."""


def load(collector: Collector, plan: Plan, settled: threading.Event, ending: threading.Event) -> None:
    """Until its plan ends, or all lines are shown; `settled` once it has run for SETTLE_S, or has failed."""

    def look(moment: Moment) -> None:
        if any(time.time() - row.get("at_s", time.time()) > MUTE_S for row in moment.generators):
            raise RuntimeError("a generator says nothing any more: there is no load")
        if moment.at_s >= SETTLE_S:
            settled.set()
        if ending.is_set():
            raise EndedError

    try:
        with contextlib.suppress(EndedError):
            drive(collector, plan, 5.0, look)
    finally:
        settled.set()


def at(sorted_values: Sequence[float], share: float) -> float:
    """The value below which `share` of them lie; of fewer than 100, the 99th percentile is the highest."""
    return round(sorted_values[min(len(sorted_values) - 1, int(share * len(sorted_values)))], 3)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=0, help="of the load; a multiple of 250")
    parser.add_argument("--lines", type=int, default=20, help="each on a node of its own")
    args = parser.parse_args(argv)
    fleet = Fleet(args.gpus // GPUS_PER_STREAM, GPUS_PER_STREAM, args.lines)
    stored = 0.0
    with tempfile.TemporaryDirectory() as name, running(Path(name), fleet) as collector:
        loading: threading.Thread | None = None
        settled, ending = threading.Event(), threading.Event()
        if fleet.streams:
            plan = Plan(fleet, 1, OPEN_S, EVERY_S, round(EVERY_S), SETTLE_S + PER_LINE_S * args.lines, 5.0)
            loading = threading.Thread(target=load, args=(collector, plan, settled, ending), daemon=True)
            loading.start()
            settled.wait()
        before, began = collector.status().samples_stored, time.monotonic()
        found = delays(collector, fleet.real)
        stored = (collector.status().samples_stored - before) / (time.monotonic() - began)
        loaded = loading is not None and loading.is_alive()
        ending.set()
        if loading is not None:
            loading.join()
    print(
        json.dumps(
            {
                "benchmark": "kernel_log_to_incident",
                "lines": len(found),
                "load_gpus": fleet.total,
                "load_lasted": loaded or not fleet.streams,
                "stored_samples_per_s": round(stored),
                "machine_load": round(os.getloadavg()[0], 1),
                "p50_s": at(found, 0.5),
                "p95_s": at(found, 0.95),
                "p99_s": at(found, 0.99),
                "max_s": round(found[-1], 3),
            }
        )
    )


if __name__ == "__main__":
    main()

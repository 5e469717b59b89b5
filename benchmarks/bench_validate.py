"""`drover validate` over four real agents: one node slowed, one link delayed, and a rank that stops. Writes its page.

Collector, agents, probe services, torch (gloo) and the command are real processes; the nodes are network namespaces of
this machine without GPUs. What stands in: a switch of this process in place of a network (a kernel with tc's netem
would do), a forwarder in place of certificates, a cgroup in place of a slow machine.

    healthy   nothing is wrong; on CPUs the result must be UNKNOWN, never a pass, and nothing may be named
    faults    node n3 gets a tenth of one processor once it has met the others; n2's packets to n4 come 20 ms late: both
              must be named, and nothing else
    stopped   a rank of n2 is stopped (SIGSTOP) in the middle: it must be named, and the command must end

Ends with 1 where something was missed or named wrongly. Needs root.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drover_proto import fleet_pb2 as pb

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from testbed.namespaces import CpuLimit, Switch, can, forward, inside, switched
from testbed.probe_service import AGAIN, AGENT
from testbed.system_processes import collector
from testbed.waiting import wait_until

NODES = ("n1", "n2", "n3", "n4")
SLOW, LINK = "n3", ("n2", "n4")
SHARE, DELAY_S = 0.1, 0.02
SETTINGS = {"kmsg_enabled": "false", "hardware": "none", "steps_socket": "", "batch_s": "1"}
PAGE = Path(__file__).resolve().parents[1] / "docs/evidence/validate.md"
SOURCE = "`benchmarks/bench_validate.py`"


@dataclass(slots=True)
class Place:
    """The running fleet. `limit`: the cgroup of SLOW's probe service. `api`: address of the Fleet API."""

    folder: Path
    switch: Switch
    limit: CpuLimit
    api: str
    names: dict[str, str]  # node -> its namespace


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", nargs="+", default=["healthy", "faults", "stopped"], help="default: all three")
    parser.add_argument("--keep", type=Path, help="folder for the reports")
    parser.add_argument("--page", action="store_true", help=f"write {PAGE.name}")
    options = parser.parse_args()
    if why := can():
        parser.error(why)
    done: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, running(Path(folder)) as place:
        keep = options.keep or Path(folder)
        for name in options.runs:
            done.append(RUNS[name](place, keep))
            print(json.dumps({key: value for key, value in done[-1].items() if key != "report"}), flush=True)
        if options.page:
            PAGE.write_text(page(done), "utf-8")
    return int(not all(run["well"] for run in done))


@contextlib.contextmanager
def running(folder: Path) -> Iterator[Place]:
    names = {node: f"dv{os.getpid()}{node}" for node in NODES}
    addresses = {names[node]: f"10.213.9.{number}" for number, node in enumerate(NODES, 1)}
    fleet = "".join(f'[[nodes]]\nnames = "{n}"\nrack = "r1"\nleaf = "l1"\npool = "new"\ngpus = 8\n' for n in NODES)
    limit = CpuLimit(f"drover-validate-{os.getpid()}")
    shared = folder / "shared"
    shared.mkdir()
    with contextlib.ExitStack() as stack:
        stack.callback(limit.close)
        switch = stack.enter_context(switched(addresses))
        served = stack.enter_context(collector(folder, fleet, "[probes]\ngroup_join_s = 300.0"))
        for node in NODES:
            forward(names[node], int(served.agents.rpartition(":")[2]))
            settings = SETTINGS | {
                "node": node, "collectors": f'["{served.agents}"]', "spool.dir": str(folder / node / "spool"),
                "probe_address": addresses[names[node]],
            }  # fmt: skip
            (folder / node / "spool/probes").mkdir(parents=True)
            words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
            log = stack.enter_context((folder / node / "log").open("w"))
            group = limit.procs if node == SLOW else ""
            serve = [*AGENT, "probe", "--serve", str(folder / node / "spool/probes"), "--shared", str(shared)]
            for command in (
                inside(names[node], *AGENT, "run", *words),
                inside(names[node], "bash", "-c", AGAIN, "service", *serve, group=group),
            ):
                process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
                stack.callback(process.wait)
                stack.callback(os.killpg, process.pid, signal.SIGKILL)

        def all_report() -> bool:
            return served.stub.GetStatus(pb.StatusRequest(), timeout=5).nodes_reporting == len(NODES)

        wait_until(all_report, "all agents", 120)
        yield Place(folder, switch, limit, served.api, names)


def validated(place: Place, keep: Path, name: str, *more: str) -> dict[str, Any]:
    """Run the command over the pool, and return what it said."""
    files = [keep / f"validate-{name}.{ending}" for ending in ("json", "md", "html")]
    words = [word for file in files for word in ("--output", str(file))]
    command = [sys.executable, "-m", "drover_cli.main", "validate", "new", "--collector", place.api, *words, *more]
    began = time.monotonic()
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1800)
    took_s = time.monotonic() - began
    if not files[0].exists():
        raise RuntimeError(f"drover validate ended with {ran.returncode}: {ran.stderr[-2000:]}")
    report = json.loads(files[0].read_text())
    named = sorted({finding["about"] for finding in report["findings"] if finding["mark"] == "fail"})
    return {
        "run": name, "code": ran.returncode, "took_s": round(took_s, 1), "result": report["result"], "named": named,
        "texts": [finding["text"] for finding in report["findings"] if finding["mark"] == "fail"], "report": report,
    }  # fmt: skip


TOGETHER = ("--level", "quick", "--stages", "network", "training")


def healthy(place: Place, keep: Path) -> dict[str, Any]:
    found = validated(place, keep, "healthy", "--level", "quick", "--why", "nothing is wrong")
    return found | {"well": found["result"] == "unknown" and found["named"] == [] and found["code"] == 1}


def faults(place: Place, keep: Path) -> dict[str, Any]:
    ns = place.names
    place.switch.delays[ns[LINK[0]], ns[LINK[1]]] = DELAY_S
    place.switch.met[ns["n3"], ns["n2"]] = lambda: place.limit.set(SHARE)
    try:
        found = validated(place, keep, "faults", *TOGETHER, "--why", "n3 is slow, n2 - n4 late")
    finally:
        place.switch.delays.clear()
        place.limit.lift()
    return found | {"well": found["result"] == "fail" and found["named"] == ["n2 - n4", SLOW]}


def stopped(place: Place, keep: Path) -> dict[str, Any]:
    """Stop the processes of n2 that measure, 5 s after they met those of n3, and let them go on when all is over."""
    over = threading.Event()
    held: list[int] = []

    def stop() -> None:
        if not over.wait(5.0):
            held.extend(_ranks(place.names["n2"]))
            for pid in held:
                os.kill(pid, signal.SIGSTOP)

    place.switch.met[place.names["n2"], place.names["n3"]] = threading.Thread(target=stop, daemon=True).start
    try:
        found = validated(place, keep, "stopped", *TOGETHER, "--why", "a rank of n2 stops")
    finally:
        over.set()
        for pid in held:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    return found | {"stopped": len(held), "well": found["result"] == "fail" and found["named"] == ["n2"]}


def _ranks(namespace: str) -> list[int]:
    """Return the ids of a namespace's processes that hold a rank: Python's spawned children."""
    pids = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, check=True).stdout.split()
    return [int(pid) for pid in pids if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]


RUNS = {"healthy": healthy, "faults": faults, "stopped": stopped}


def page(done: list[dict[str, Any]]) -> str:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
    today = datetime.datetime.now(datetime.UTC).strftime("%-d %B %Y")
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    lines = [
        "# Validation over several nodes",
        "",
        "<!-- written by benchmarks/bench_validate.py --page -->",
        "",
        f"Commit {commit.stdout.strip()}, {today}, {os.cpu_count()} cores that other work shares (load {load}).",
        "",
        f"{SOURCE}: collector, four agents, their probe services, torch with gloo and",
        "`drover validate` as real processes; each node is a network namespace without a GPU. The kernel",
        "of this machine has no `netem`, so a switch in user space (TUN devices) delays the link, with",
        "real packets through it.",
        "",
        "| run | what was wrong | result | named | exit code | took |",
        "| --- | --- | --- | --- | ---: | ---: |",
    ]
    what = {
        "healthy": "nothing", "faults": f"n3 at {SHARE:g} of a core; n2 to n4 {1000 * DELAY_S:g} ms late",
        "stopped": "the rank of n2 stopped",
    }  # fmt: skip
    for run in done:
        named = ", ".join(run["named"]) or "nothing"
        name, goal = run["run"], "" if run["well"] else " (goal missed)"
        lines.append(f"| {name} | {what[name]} | {run['result']} | {named}{goal} | {run['code']} | {run['took_s']} s |")
    if any(run["run"] == "healthy" for run in done):
        lines += ["", "On CPUs a validation never passes: the healthy run ends as unknown, with exit code 1."]
    left_out = [name for name in RUNS if name not in [run["run"] for run in done]]
    if left_out:
        lines += ["", f"Not run for this page: {', '.join(left_out)}."]
    lines.append("")
    for run in done:
        if run["texts"]:
            lines += [f"What the report of `{run['run']}` says:", "", *_quoted(run["texts"]), ""]
    return "\n".join(lines)


def _quoted(texts: list[str]) -> list[str]:
    found = []
    for text in texts:
        line = "-"
        for word in text.split():
            if len(line) + len(word) + 1 > 100:
                found.append(line)
                line = " "
            line += f" {word}"
        found.append(line)
    return found


if __name__ == "__main__":
    sys.exit(main())

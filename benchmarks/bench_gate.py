"""The gate before each job: how long `drover-agent gate` takes, and 200 nodes whose gates fail.

Each run is a process of its own, as Slurm starts its prolog, with the console script's start: measured from outside.
The 200 nodes have a fatal XID each, at once or one a second; the decisions are the product's, with its default guard,
and each gate reads a file with its node's verdict. A node's drain has begun by the next decision. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from drover_agent.commands import gate
from drover_agent.config import GateConfig
from drover_agent.runtime.gate_file import GateFile
from drover_collector.policy.decider import Decider
from drover_collector.policy.gate import NOTHING_KNOWN, GateAnswer, GateVerdict, gate_verdicts
from drover_collector.policy.guard import GuardLimits
from drover_core.model.events import Health, NodeOutage
from drover_proto import telemetry_pb2 as pb
from testbed.deciding import decide, fleet, incident, policy

NODES = 200
BOOT = Path(gate.BOOT_ID).read_text().strip()
SCRIPT = "import re, sys; from drover_agent.main import main; sys.exit(main())"  # as pip writes console scripts


def written(folder: Path, node: str, verdict: GateVerdict) -> Path:
    """Return the file that the agent of a node keeps after this verdict."""
    path = folder / f"{node}.json"
    GateFile(GateConfig(file=str(path)), node, BOOT).take_verdict(
        pb.GateVerdict(answer=verdict.answer, text=verdict.text, incident=verdict.incident, mode="enforce")
    )
    return path


def times(command: list[str], runs: int, code: int) -> dict[str, float]:
    """Return p50, p99 and the longest time of a command that must exit with `code`, and its mean CPU time, in ms."""
    found, cpu_s = [], 0.0
    env = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}  # as it is installed
    for number in range(runs + 1):
        began = time.perf_counter()
        child = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=env)
        _, status, used = os.wait4(child.pid, 0)
        passed_s = time.perf_counter() - began
        child.returncode = os.waitstatus_to_exitcode(status)
        assert child.returncode == code, f"{command}: {child.returncode}"
        if number:  # the first one writes the bytecode
            found.append(1000 * passed_s)
            cpu_s += used.ru_utime + used.ru_stime
    found.sort()
    at = {"p50_ms": runs // 2, "p99_ms": round(0.99 * (runs - 1)), "max_ms": runs - 1}
    return {name: round(found[n], 1) for name, n in at.items()} | {"cpu_ms": round(1000 * cpu_s / runs, 1)}


def refused(folder: Path, every_ms: int) -> int:
    """Return how many of 200 gates refuse when one node fails each `every_ms`; 0: all at once."""
    index = fleet(NODES)
    subject, sick = Decider(index, policy("enforce", GuardLimits()), "enforce"), []
    duties: dict[str, NodeOutage] = {}
    for n in range(NODES):
        sick.append(incident(index.nodes[n].name, at_ms=every_ms * n))
        if every_ms or n == NODES - 1:
            made, _ = decide(subject, sick, every_ms * n)
            begun = [d for d in made if d.outcome == "act"]
            duties |= {d.node: NodeOutage(d.node, Health.DRAINING, d.ts_ms, d.incident_id, "") for d in begun}
            subject.take_duties(duties)
    found = gate_verdicts(subject)
    paths = [written(folder, node.name, found.get(node.name, NOTHING_KNOWN)) for node in index.nodes]
    null = os.open(os.devnull, os.O_WRONLY)
    shown = os.dup(1)
    os.dup2(null, 1)
    try:
        return sum(gate.run(["--file", str(path)]) for path in paths)
    finally:
        os.dup2(shown, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=500, help="of the gate (default 500)")
    runs = parser.parse_args().runs
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sick = written(folder, "sick", GateVerdict(GateAnswer.REFUSE, "drain sick for xid/xid_79", "inc"))
        well = written(folder, "well", GateVerdict(GateAnswer.PASS, "", "inc"))
        command = [sys.executable, "-c", SCRIPT, "gate", "--file"]
        result = {
            "benchmark": "gate", "runs": runs,
            "python_alone": times([sys.executable, "-c", "pass"], runs, 0),
            "passes": times([*command, str(well)], runs, gate.PASS),
            "refuses": times([*command, str(sick)], runs, gate.REFUSE),
            "nodes": NODES,
            "refused_of_all_at_once": refused(folder, 0),
            "refused_of_one_a_second": refused(folder, 1000),
            "load1": round(os.getloadavg()[0], 1),
        }  # fmt: skip
    print(json.dumps(result))


if __name__ == "__main__":
    main()

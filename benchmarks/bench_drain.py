"""From XID 79 in the kernel log to the node draining in Slurm: real agent, collector in enforce mode, /dev/kmsg.

Needs root and Slurm (tests/system_setup.sh). Prints one JSON line. Each run has an agent of its own; `scontrol` is
asked until it shows the drain, and its own time is counted too. The lines are test lines of user facility, which an
agent only acts on when asked to.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from drover_collector.actions.settings import SlurmConfig
from drover_collector.actions.slurm.scontrol import Scontrol
from drover_proto import fleet_pb2 as pb
from testbed.acting import acting
from testbed.slurm import running as running_slurm
from testbed.system_processes import running
from testbed.waiting import wait_until


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=50, help="lines in the kernel log (default 50)")
    runs = parser.parse_args().runs
    nodes = [f"gpu{n:02d}" for n in range(runs)]  # one each: a second line would join the incident of the first
    delays: list[float] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "slurm").mkdir()
        with running_slurm(folder / "slurm", nodes) as slurm, acting(folder / "collector", slurm) as collector:
            client = Scontrol(SlurmConfig(conf=f"{slurm.folder}/slurm.conf"))

            def drains(node: str) -> bool:
                return client.nodes([node])[node].reason.startswith("drover:")

            for node in nodes:
                spool = folder / f"spool-{node}"
                args = ["run", "--set", f"node={node}", "--set", f'collectors=["{collector.agents}"]']
                args += ["--set", "hardware=none", "--set", "kmsg_accept_user_facility=true", "--set", "batch_s=1"]
                began_ms = time.time_ns() // 1_000_000
                with running(folder, "drover_agent.main", *args, "--set", f"spool.dir={spool}"):
                    wait_until(partial(collector.reports, node, began_ms), f"{node} reports")
                    before = time.monotonic()
                    with Path("/dev/kmsg").open("w") as log:
                        log.write(f"<4>NVRM: Xid (PCI:0000:3b:00): 79, pid=1, name=bench, test line {node}\n")
                    try:
                        wait_until(partial(drains, node), f"{node} drains")
                    except AssertionError as error:
                        reply = collector.stub.ListIncidents(
                            pb.ListIncidentsRequest(state="all", node=node), timeout=20
                        )
                        raise SystemExit(
                            f"{error}\nincidents: {list(reply.incidents_json)}\nactions: {collector.actions(node)}\n"
                            f"{collector.log.read_text()[-2000:]}"
                        ) from None
                    delays.append(time.monotonic() - before)
    delays.sort()
    print(
        json.dumps(
            {
                "benchmark": "kernel_log_to_drain",
                "runs": len(delays),
                "p50_s": round(delays[len(delays) // 2], 3),
                "p99_s": round(delays[round(0.99 * (len(delays) - 1))], 3),
                "max_s": round(delays[-1], 3),
                "load1": round(os.getloadavg()[0], 1),
            }
        )
    )


if __name__ == "__main__":
    main()

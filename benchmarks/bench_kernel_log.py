"""From a line in the kernel log to the incident that the Fleet API tells: real agent, collector and /dev/kmsg (root).

Prints one JSON line. The lines are test lines of user facility, which an agent only acts on when told to.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from drover_proto import fleet_pb2 as pb
from drover_proto.events import Incident, from_json
from testbed.system_processes import collector, running
from testbed.waiting import wait_until

NODES = [f"kmsg{n:02d}" for n in range(20)]
CALL_S = 5.0


def main() -> None:
    delays: list[float] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with collector(folder, '[[nodes]]\nnames = "kmsg[00-19]"\nsku = "H100-SXM"\n') as (address, _, stub):

            def seen(node: str) -> int:
                return stub.GetNode(pb.NodeRequest(node=node), timeout=CALL_S).row.last_seen_ms

            def told(node: str) -> bool:
                reply = stub.ListIncidents(pb.ListIncidentsRequest(state="all", node=node), timeout=CALL_S)
                return any(from_json(Incident, text).cause == "xid_79" for text in reply.incidents_json)

            for node in NODES:  # one line each: what follows on the same node would join its incident
                args = ["run", "--set", f"node={node}", "--set", f'collectors=["{address}"]', "--set", "hardware=none"]
                args += ["--set", f"spool.dir={folder}/{node}", "--set", "kmsg_accept_user_facility=true"]
                with running(folder, "drover_agent.main", *args):
                    wait_until(partial(seen, node), f"{node} streams")
                    before = time.monotonic()
                    with Path("/dev/kmsg").open("w") as log:
                        log.write("<4>NVRM: Xid (PCI:0000:3b:00): 79, pid=1, name=drover-bench, test line\n")
                    wait_until(partial(told, node), f"an incident of {node}")
                    delays.append(time.monotonic() - before)
    delays.sort()
    print(
        json.dumps(
            {
                "benchmark": "kernel_log_to_incident",
                "lines": len(delays),
                "p50_s": round(delays[len(delays) // 2], 3),
                "p95_s": round(delays[int(0.95 * (len(delays) - 1))], 3),
                "max_s": round(delays[-1], 3),
            }
        )
    )


if __name__ == "__main__":
    main()

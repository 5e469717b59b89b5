"""From a line in the kernel log to the incident on the console's screen, in a real browser (root, Chromium).

Real agent, collector, /dev/kmsg, Streamlit and Chromium. Prints one JSON line.
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

from playwright.sync_api import sync_playwright

from drover_proto import fleet_pb2 as pb
from drover_proto.fleet_pb2_grpc import FleetStub
from testbed.browser import CHROMIUM, FLAGS
from testbed.system_processes import collector, free_port, reachable, running
from testbed.waiting import wait_until

NODES = [f"screen{n:02d}" for n in range(10)]


def seen_ms(stub: FleetStub, node: str) -> int:
    return stub.GetNode(pb.NodeRequest(node=node), timeout=5).row.last_seen_ms


def main() -> None:
    delays: list[float] = []
    with (
        tempfile.TemporaryDirectory() as name,
        collector(Path(name), '[[nodes]]\nnames = "screen[00-09]"\nsku = "H100-SXM"\n') as (address, api, stub),
    ):
        folder, port = Path(name), free_port()
        console = ["--collector", api, "--port", str(port)]
        with running(folder, "drover_dashboard.main", *console), sync_playwright() as play:
            wait_until(partial(reachable, "127.0.0.1", port), "the console listens", 60)
            browser = play.chromium.launch(executable_path=CHROMIUM, headless=True, args=FLAGS)
            page = browser.new_page(viewport={"width": 1440, "height": 900})
            page.goto(f"http://127.0.0.1:{port}")
            page.get_by_text("No open incident").wait_for(timeout=60_000)
            for node in NODES:
                args = ["run", "--set", f"node={node}", "--set", f'collectors=["{address}"]', "--set", "hardware=none"]
                args += ["--set", f"spool.dir={folder}/{node}", "--set", "kmsg_accept_user_facility=true"]
                with running(folder, "drover_agent.main", *args):
                    wait_until(partial(seen_ms, stub, node))
                    before = time.monotonic()
                    with Path("/dev/kmsg").open("w") as log:
                        log.write("<4>NVRM: Xid (PCI:0000:3b:00): 79, pid=1, name=drover-bench, test line\n")
                    page.get_by_text(f"of node {node}").or_(page.get_by_text(f"on node {node}")).first.wait_for()
                    delays.append(time.monotonic() - before)
            browser.close()
    delays.sort()
    print(
        json.dumps(
            {
                "benchmark": "kernel_log_to_screen",
                "lines": len(delays),
                "p50_s": round(delays[len(delays) // 2], 2),
                "max_s": round(delays[-1], 2),
            }
        )
    )


if __name__ == "__main__":
    main()

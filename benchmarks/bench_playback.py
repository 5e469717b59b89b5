"""The Fleet map played over an incident: what 60 frames cost the collector, the way and the browser.

    python benchmarks/bench_playback.py [NODES]     default 12500 nodes of 8 GPUs

A Fleet API over a store in which one node's GPU fell ill and came back (tests/testbed/past_fleet.py), the console, and
Chromium. Prints JSON lines: the call, and what a frame takes the browser.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from drover_dashboard.client import FleetClient
from drover_dashboard.widgets import fleet_picture, moment
from testbed import past_fleet
from testbed.browsing import chromium, lone_tab
from testbed.system_processes import free_port, reachable, running
from testbed.waiting import wait_until

RUNS = 5
DRAWN = """async () => {
  const roots = [...document.querySelectorAll('*')].map((e) => e.shadowRoot).filter(Boolean);
  const range = roots.map((root) => root.querySelector('.player input')).find(Boolean);
  const took = [];
  for (let at = 0; at <= Number(range.max); at += 1) {
    range.value = String(at);
    const began = performance.now();
    range.dispatchEvent(new Event("input"));
    took.push(performance.now() - began);
    await new Promise((next) => requestAnimationFrame(next));
  }
  return { took: took.sort((a, b) => a - b), past: window.__drover_fleet.past };
}"""


def main() -> int:
    nodes = int(sys.argv[1]) if len(sys.argv) > 1 else 12_500
    api, port = free_port(), free_port()
    at = past_fleet.moments(time.time_ns() // 1_000_000)
    low, high = at["onset"] - 10 * past_fleet.MIN_MS, at["over"]
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        with (
            running(folder, "testbed.past_fleet", made, str(api), str(nodes)),
            running(folder, "drover_dashboard.main", "--collector", f"127.0.0.1:{api}", "--port", str(port)),
            closing(FleetClient(f"127.0.0.1:{api}")) as fleet,
        ):
            wait_until(lambda: reachable("127.0.0.1", api), "the API listens", 300)
            wait_until(lambda: reachable("127.0.0.1", port), "the console listens", 60)
            for run in range(RUNS):
                began_s = time.monotonic()
                found = fleet_picture.frames(fleet, "health", low - run, high)  # each one another question
                took_s = time.monotonic() - began_s
                assert isinstance(found, fleet_picture.Frame), found
                print(json.dumps({"gpus": nodes * 8, "call_s": round(took_s, 3), "bytes": len(found.body)}), flush=True)
            with chromium() as browser, lone_tab(browser, "light") as tab:
                play = f"at={moment.written(at['onset'])}&play={low // 1000}-{high // 1000}"
                tab.goto(f"http://127.0.0.1:{port}/?{play}")
                tab.page.wait_for_function("window.__drover_fleet?.past?.frames > 1")
                drawn = tab.page.evaluate(DRAWN)
            took, past = drawn["took"], drawn["past"]
            line = {
                "frames": past["frames"], "unpacked_bytes": past["bytes"],
                "frame_ms_median": round(took[len(took) // 2], 1), "frame_ms_most": round(took[-1], 1),
            }  # fmt: skip
            print(json.dumps(line))
    return 0


if __name__ == "__main__":
    sys.exit(main())

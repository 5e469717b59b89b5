"""Nine tasks of an operator, done in a real browser and on the command line, counted in clicks and seconds.

On the live fleet of `console/live_fleet.py`. In the browser each begins with the Fleet page open and ends when the
answer stands in the window; on the command line with a prompt. Seconds are those of the machine alone. Prints one JSON
line; docs/evidence/console-speed.md has its figures.

    python benchmarks/bench_console_tasks.py [--only TASK ...] [--shots FOLDER]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from console.history import NODE as TUESDAY_NODE
from console.history import RISKY
from console.live_fleet import EMPTY, FAILED, FLAPPING, LEAF, SLOW, WARM_RACK, Live, live
from console.walk import LIMIT_MS, Shell, Walk, attempt
from playwright.sync_api import sync_playwright

from testbed.browser import CHROMIUM, FLAGS

SCREEN = {"width": 1440, "height": 900}
ME = "kim@example.com"


def slows(walk: Walk) -> str:
    walk.go("Job")
    return walk.read(re.compile(rf"GPU {SLOW[1]} of node {SLOW[0]}.*"))


def switch(walk: Walk) -> str:
    walk.go("Fabric")
    return walk.read(re.compile(rf".*{FLAPPING}.*{LEAF}.*|.*{LEAF}.*{FLAPPING}.*"))


def enforce(walk: Walk) -> str:
    walk.go("Policy")
    return walk.read(re.compile("Had it enforced in the last 7 days.*drained.*"))


def approve(walk: Walk) -> str:
    walk.click(walk.page.get_by_role("link", name=re.compile("for a person to approve or reject")))
    form = walk.page.get_by_test_id("stForm").filter(has_text=FAILED[0]).first
    walk.write(form.get_by_label("Your name"), ME)
    walk.write(form.get_by_label("Why"), "its job has ended")
    walk.click(form.get_by_role("button", name="Approve"))
    return walk.read(f"Approved by {ME}: ")


def node(walk: Walk, name: str) -> None:
    walk.go("Node")
    walk.write(walk.page.get_by_role("combobox", name="Node").first, name)
    walk.page.keyboard.press("Enter")


def drained(walk: Walk) -> str:
    node(walk, TUESDAY_NODE)
    row = walk.page.get_by_role("row").filter(has_text="drained").filter(has_text="Tue").first
    walk.look(row)
    return str(row.inner_text())


def safe(walk: Walk) -> str:
    node(walk, EMPTY)
    return walk.read(re.compile("safe to give back"), re.compile("since it was taken out, passed"))


def risky(walk: Walk) -> str:
    walk.go("Risk")
    return walk.read(RISKY[0], "A ranking, not a prophecy")


def cost(walk: Walk) -> str:
    walk.go("Capacity")
    return walk.read(re.compile("GPU-hours that faults cost in the last 7 days"), re.compile("EUR"))


def hot(walk: Walk) -> str:
    walk.go("Thermals")
    return walk.read(re.compile(rf"{WARM_RACK}.*(hot|inlet|warm).*", re.I))


def cli_slows(shell: Shell) -> str:
    shell.run("job", shell.job)
    return shell.line(rf"GPU {SLOW[1]} of node {SLOW[0]}")


def cli_switch(shell: Shell) -> str:
    shell.run("fabric")
    return shell.line(rf"{LEAF}.*{FLAPPING}")


def cli_enforce(shell: Shell) -> str:
    shell.run("policy", "if-enforced")
    return shell.line("Had it enforced")


def cli_approve(shell: Shell) -> str:
    shell.run("decisions", "--outcome", "pending_approval")
    decision = shell.line(r"\bdrain\b").split()[0]
    shell.run("approve", decision, "--why", "its job has ended")
    return shell.line("approved")


def cli_drained(shell: Shell) -> str:
    shell.run("explain", TUESDAY_NODE, "--day", "tuesday")
    shell.line("fallen off the bus")
    return shell.line("approved by alex")


def cli_safe(shell: Shell) -> str:
    shell.run("resume", EMPTY, "--check")
    return shell.line("safe")


def cli_risky(shell: Shell) -> str:
    shell.run("risk")
    return shell.line(RISKY[0])


def cli_cost(shell: Shell) -> str:
    shell.run("capacity")
    return shell.line("EUR")


def cli_hot(shell: Shell) -> str:
    shell.run("thermals")
    return shell.line(WARM_RACK)


# Approving changes the fleet: it comes last.
TASKS: dict[str, tuple[str, Callable[[Walk], str], Callable[[Shell], str]]] = {
    "slows": ("which GPU slows job X, and why", slows, cli_slows),
    "switch": ("is it one node or the switch", switch, cli_switch),
    "enforce": ("what happens if I enforce", enforce, cli_enforce),
    "drained": (f"why was {TUESDAY_NODE} drained last Tuesday", drained, cli_drained),
    "safe": (f"is it safe to give {EMPTY} back", safe, cli_safe),
    "risky": ("which nodes will fail next", risky, cli_risky),
    "cost": ("what did faults cost this week", cost, cli_cost),
    "hot": ("which rack runs hot", hot, cli_hot),
    "approve": ("approve this drain", approve, cli_approve),
}


def in_browser(browser: Any, fleet: Live, name: str, shots: Path | None) -> dict[str, Any]:
    context = browser.new_context(viewport=SCREEN, color_scheme="dark", timezone_id="Europe/Berlin")
    page = context.new_page()
    page.set_default_timeout(LIMIT_MS)
    page.goto(fleet.url)
    page.wait_for_function("window.__drover_fleet && !window.__drover_fleet.early")
    page.get_by_text("Open incidents").first.wait_for()
    walk = Walk(page)
    found = attempt(lambda: walk.attempted(TASKS[name][1](walk)))
    if shots is not None:
        page.screenshot(path=str(shots / f"task-{name}.png"))
    context.close()
    return found


def on_the_line(fleet: Live, name: str) -> dict[str, Any]:
    shell = Shell(fleet.api, fleet.job)
    return attempt(lambda: shell.attempted(TASKS[name][2](shell)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(TASKS), default=list(TASKS), metavar="TASK")
    parser.add_argument("--shots", type=Path, help="a folder for a picture of each answer")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # else what it started would live on
    if given.shots is not None:
        given.shots.mkdir(parents=True, exist_ok=True)
    tasks = {}
    with tempfile.TemporaryDirectory(prefix="drover-bench-tasks-") as name, live(Path(name)) as fleet:
        loads = [os.getloadavg()[0]]
        with sync_playwright() as play:
            browser = play.chromium.launch(executable_path=CHROMIUM, headless=True, args=FLAGS)
            for task in given.only:
                line = partial(on_the_line, fleet, task)
                # Of two waiting drains one is approved on each way.
                tasks[task] = {
                    "task": TASKS[task][0], "browser": in_browser(browser, fleet, task, given.shots), "line": line()
                }  # fmt: skip
                print(task, json.dumps(tasks[task]), file=sys.stderr, flush=True)
            browser.close()
        loads.append(os.getloadavg()[0])
    done = [t for t in tasks.values() if "failed" not in t["browser"]]
    print(
        json.dumps(
            {
                "benchmark": "console_tasks", "cores": os.cpu_count(), "load": [round(load, 1) for load in loads],
                "clicks": sum(t["browser"]["clicks"] for t in done), "done_in_browser": len(done),
                "done_on_the_line": sum("failed" not in t["line"] for t in tasks.values()), "tasks": tasks,
            }
        )
    )  # fmt: skip


if __name__ == "__main__":
    main()

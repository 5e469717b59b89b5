"""Tasks of an operator, done in a real browser and on the command line, counted in clicks and seconds.

On the live fleet of `console/live_fleet.py`. In the browser each begins with the Fleet page open and ends when the
answer stands in the window; on the command line with a prompt. Seconds are those of the machine alone. Prints one JSON
line; `--page` writes docs/evidence/console-tasks.md, next to the figures of the review of 23 November 2026. With
`--keyboard` the mouse is not touched: `tabs` counts how often Tab was pressed.

    python benchmarks/bench_console_tasks.py [--only TASK ...] [--shots FOLDER] [--keyboard] [--page]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from console.history import NIGHT, RISKY, last_night
from console.history import NODE as TUESDAY_NODE
from console.live_fleet import (
    EMPTY,
    FAILED,
    FALLEN,
    FLAPPING,
    FREE,
    HOT,
    LEAF,
    SLOW,
    WARM_RACK,
    Live,
    live,
)
from console.walk import LIMIT_MS, Keys, Shell, Walk, attempt
from playwright.sync_api import sync_playwright

from testbed.browser import CHROMIUM, FLAGS
from testbed.browsing import at_rest

ROOT = Path(__file__).resolve().parents[1]
PAGE, ANSWER = ROOT / "docs" / "evidence" / "console-tasks.md", 160
SCREEN = {"width": 1440, "height": 900}
ME = "kim@example.com"
SLOWING = "|".join(f"GPU {gpu} of node {node}" for node, gpu in (SLOW, HOT))  # both are in one job: the costlier first


def slows(walk: Walk) -> str:
    walk.go("Job")
    return walk.read(re.compile(rf"({SLOWING}).*"))


def switch(walk: Walk) -> str:
    walk.go("Fabric")
    return walk.read(re.compile(rf".*{FLAPPING}.*{LEAF}.*|.*{LEAF}.*{FLAPPING}.*"))


def enforce(walk: Walk) -> str:
    walk.go("Policy")
    return walk.read(re.compile("Had it enforced in the last 7 days.*drained.*"))


def approve(walk: Walk) -> str:
    walk.click(walk.page.get_by_role("link", name=re.compile("wait for you: approve or reject")))
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


def sick(walk: Walk) -> str:
    return walk.read(f"XID 79 on {FALLEN[0]} GPU {FALLEN[1]}")


def healthy(walk: Walk) -> str:
    walk.go("System")
    return walk.read(re.compile("Every node of the fleet file reports.*"), re.compile("Nobody is notified"))


def night(walk: Walk) -> str:
    """What happened at 03:12 last night: in the viewer's own zone."""
    walk.go("Incidents")
    walk.click(walk.page.get_by_role("radio", name="all", exact=True))
    row = walk.page.get_by_role("row").filter(has_text="03:12").first
    walk.click(row)
    return walk.read(re.compile(rf"GPU {NIGHT[1]} of node {NIGHT[0]}: contained.*"), re.compile("closed .*lasted"))


def compare(walk: Walk) -> str:
    """The slow GPU against its neighbour, in the same charts."""
    walk.find(f"{SLOW[0]}:{SLOW[1]}")
    other = f"GPU {SLOW[1] + 1}"
    walk.write(walk.page.get_by_role("combobox", name="Compare with"), other)
    walk.page.keyboard.press("Enter")
    return walk.read(f"thick GPU {SLOW[1]}, thin {SLOW[0]} {other}")


def holds(walk: Walk) -> str:
    walk.find(f"{SLOW[0]}:{SLOW[1]}")
    return walk.read(re.compile(rf"Processes of GPU {SLOW[1]}.*Its job is .*"))


def serial(walk: Walk) -> str:
    return str(walk.search(walk.serial).inner_text())


def silence(walk: Walk) -> str:
    walk.click(walk.page.get_by_text(f"Port flaps on {FLAPPING}").first)
    walk.click(walk.page.get_by_role("button", name="Silence", exact=True))
    walk.write(walk.page.get_by_label("Your name").last, ME)
    walk.write(walk.page.get_by_label("Why").last, "cable is ordered")
    walk.click(walk.page.get_by_role("button", name="Silence it"))
    return walk.read(re.compile("^silenced until .* by kim"))


def hand_over(walk: Walk) -> str:
    """Acknowledge an incident, and give it to a colleague."""
    walk.click(walk.page.get_by_text(f"Poor cooling on {HOT[0]}").first)
    walk.click(walk.page.get_by_role("button", name="Acknowledge", exact=True))
    acknowledge = walk.page.get_by_role("button", name="Acknowledge it")
    if acknowledge.count():  # nobody has said who he is
        walk.write(walk.page.get_by_label("Your name").last, ME)
        walk.click(acknowledge)
    walk.read(re.compile("^acknowledged by kim"))
    walk.click(walk.page.get_by_role("button", name="Assign, note"))
    walk.write(walk.page.get_by_label("Assign to"), "bo@example.com")
    walk.click(walk.page.get_by_role("button", name="Save", exact=True))
    return walk.read(re.compile("assigned to bo@example.com"))


def by_hand(walk: Walk) -> str:
    """Drain a node and give it back. The guard holds drains while a rack is warm: a person says that it is to be."""
    node(walk, FREE)
    _act(walk, "Drain")
    walk.read(re.compile(f"Drain {FREE}: done"))
    _act(walk, "Resume")
    return walk.read(re.compile(f"Resume {FREE}: done.*"))


def _act(walk: Walk, act: str) -> None:
    at_rest(walk.page)  # while it is drawn again the buttons of before stand there too
    walk.click(walk.page.get_by_role("button", name=f"{act} ...", exact=True).first)
    at_rest(walk.page)
    send = walk.page.get_by_role("button", name=f"{act} {FREE}", exact=True)
    walk.look(send)
    name = walk.page.locator(".st-key-node_act").get_by_label("Your name")
    if not name.input_value():  # once for all forms
        walk.write(name, ME)
    walk.write(walk.page.locator(".st-key-node_act").get_by_label("Why"), "cable")
    force = walk.page.get_by_text("Do it although the guard holds it back")
    if force.count():
        walk.click(force)
    walk.click(send)


def cli_slows(shell: Shell) -> str:
    shell.run("job", shell.job)
    return shell.line(SLOWING)


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


def cli_sick(shell: Shell) -> str:
    shell.run("nodes")
    return shell.line(FALLEN[0])


def cli_healthy(shell: Shell) -> str:
    shell.run("status")
    return shell.line("nodes .*reporting")


def cli_night(shell: Shell) -> str:
    at = last_night(datetime.now(UTC)).astimezone(UTC)
    shell.run("incidents", "--state", "all", "--since", f"{at:%Y-%m-%dT%H:%M}Z")
    return shell.line(f"{at:%Y-%m-%dT%H:%M}Z")


def cli_compare(shell: Shell) -> str:
    shell.run("node", SLOW[0])
    return f"{shell.line(rf'^ *{SLOW[1]} ')} / {shell.line(rf'^ *{SLOW[1] + 1} ')}"


def cli_holds(shell: Shell) -> str:
    shell.run("find", f"{SLOW[0]}:{SLOW[1]}")
    return shell.line("held by")


def cli_serial(shell: Shell) -> str:
    shell.run("find", shell.serial)
    return shell.line(rf"{SLOW[0]} GPU {SLOW[1]}")


def _incident(shell: Shell, pattern: str) -> str:
    shell.run("incidents")
    return shell.line(pattern).split()[0]


def cli_silence(shell: Shell) -> str:
    shell.run("silence", _incident(shell, f"port_flaps.*{FLAPPING}"), "--for", "4h", "--why", "cable is ordered")
    return shell.line("silence|incident")


def cli_hand_over(shell: Shell) -> str:
    found = _incident(shell, f"cooling.*{HOT[0]}")
    shell.run("ack", found)
    shell.run("assign", found, "bo@example.com")
    return shell.line("bo@example.com")


def cli_by_hand(shell: Shell) -> str:
    shell.run("drain", FREE, "--why", "cable", "--force")
    shell.run("resume", FREE, "--why", "cable is in")
    return shell.line("done")


@dataclass(frozen=True, slots=True)
class Task:
    """One question, how it is answered both ways, and what the review of 23 November 2026 needed ("": it was not asked
    then): clicks and fields, seconds; commands, seconds (shared/reviews/console.md, part D)."""

    what: str
    browser: Callable[[Walk], str]
    line: Callable[[Shell], str]
    before: str = ""
    line_before: str = ""


# What changes the fleet comes last, approving at the very end.
TASKS: dict[str, Task] = {
    "sick": Task("which node is sick", sick, cli_sick, "0, 1.8 s (cold)", "1, 0.19 s"),
    "slows": Task("which GPU slows job X, and why", slows, cli_slows, "1, 0.2 s", "1, 0.20 s"),
    "switch": Task("is it one node or the switch", switch, cli_switch, "1, 0.18 s", "1, 0.17 s"),
    "enforce": Task("what happens if I enforce", enforce, cli_enforce, "1, 0.23 s", "1, 0.25 s"),
    "risky": Task("which nodes will fail next", risky, cli_risky, "1, 0.18 s", "1, 0.29 s"),
    "cost": Task("what did faults cost this week", cost, cli_cost, "1, 0.36 s", "1, 0.26 s"),
    "healthy": Task("is Drover itself healthy", healthy, cli_healthy, "1, 0.26 s", "1, 0.27 s"),
    "drained": Task(f"why was {TUESDAY_NODE} drained last Tuesday", drained, cli_drained),
    "safe": Task(f"is it safe to give {EMPTY} back", safe, cli_safe),
    "hot": Task("which rack runs hot", hot, cli_hot),
    "night": Task("what happened at 03:12 last night", night, cli_night),
    "compare": Task("compare two GPUs", compare, cli_compare),
    "holds": Task("who holds this GPU", holds, cli_holds),
    "serial": Task("whose serial number is this", serial, cli_serial),
    "silence": Task("silence an incident", silence, cli_silence, "3 and 2 fields, 1.5 s", "1, 0.2 s"),
    "hand_over": Task("acknowledge an incident and hand it over", hand_over, cli_hand_over),
    "by_hand": Task(
        "drain a node by hand and give it back", by_hand, cli_by_hand, "5 and 4 fields, 11.4 s", "2, 0.6 s"
    ),
    "approve": Task("approve this drain", approve, cli_approve),
}


def in_browser(browser: Any, fleet: Live, name: str, shots: Path | None, way: type[Walk] = Walk) -> dict[str, Any]:
    context = browser.new_context(viewport=SCREEN, color_scheme="dark", timezone_id="Europe/Berlin")
    page = context.new_page()
    page.set_default_timeout(LIMIT_MS)
    page.goto(fleet.url)
    page.wait_for_function("window.__drover_fleet && !window.__drover_fleet.early")
    page.get_by_text("Open incidents").first.wait_for()
    walk = way(page, fleet.serial)
    found = attempt(lambda: walk.attempted(TASKS[name].browser(walk)))
    if shots is not None:
        page.screenshot(path=str(shots / f"task-{name}.png"))
    context.close()
    return found


def on_the_line(fleet: Live, name: str) -> dict[str, Any]:
    shell = Shell(fleet.api, fleet.job, fleet.serial)
    return attempt(lambda: shell.attempted(TASKS[name].line(shell)))


def page_of(tasks: dict[str, Any], loads: list[float]) -> str:
    """The page of these figures."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    day = time.strftime("%d %B %Y", time.gmtime())
    load = f"load {loads[0]:.1f} before and {loads[-1]:.1f} after"
    lines = [
        "# The console: an operator's tasks in clicks and seconds", "",
        "<!-- written by benchmarks/bench_console_tasks.py --page -->", "",
        f"{day}, commit {commit.stdout.strip()}: a live simulated fleet of 32 nodes with six faults,"
        f" {os.cpu_count()} cores, {load}. Seconds are the machine's; a person's reading is not in them. The columns of"
        " 23 November are those of the review then, on its own fleet, at a load of 3 to 9; an empty cell was not asked"
        " then. A field that is filled is a click too.", "",
        "| task | console: clicks (fields), s | 23 Nov | command line: commands, s | 23 Nov |",
        "| --- | --- | --- | --- | --- |",
    ]  # fmt: skip
    lines += [_row_of(name, found) for name, found in tasks.items()]
    lines += ["", "The commands, and what each way answered:", ""]
    for name, found in tasks.items():
        said = [found[way].get("answer") or found[way]["failed"] for way in ("browser", "line")]
        commands = "; ".join(f"`{command}`" for command in found["line"].get("commands", ()))
        lines.append(f"- **{TASKS[name].what}**: {commands}")
        lines += [
            f"    - {way}: {text[:ANSWER].replace('|', '/')}"
            for way, text in zip(("console", "command line"), said, strict=True)
        ]
    return "\n".join(textwrap.fill(line, 100, subsequent_indent=_indent(line), break_long_words=False,
                                   break_on_hyphens=False) if not line.startswith("|") else line
                     for line in lines) + "\n"  # fmt: skip


def _indent(line: str) -> str:
    return "" if not line.lstrip().startswith("- ") else " " * (len(line) - len(line.lstrip()) + 2)


def _row_of(name: str, found: dict[str, Any]) -> str:
    task, browser, line = TASKS[name], found["browser"], found["line"]
    fields = f" ({browser['fields']})" if browser.get("fields") else ""
    scrolls = f", {browser['scrolls']} scrolled to" if browser.get("scrolls") else ""
    here = "not done" if "failed" in browser else f"{browser['clicks']}{fields}, {browser['seconds']} s{scrolls}"
    there = "not done" if "failed" in line else f"{len(line['commands'])}, {line['seconds']} s"
    return f"| {task.what} | {here} | {task.before} | {there} | {task.line_before} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(TASKS), default=list(TASKS), metavar="TASK")
    parser.add_argument("--shots", type=Path, help="a folder for a picture of each answer")
    parser.add_argument("--keyboard", action="store_true", help="without a mouse: Tab, Enter, Space and arrows")
    parser.add_argument("--page", action="store_true", help="write docs/evidence/console-tasks.md")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # else what it started would live on
    if given.shots is not None:
        given.shots.mkdir(parents=True, exist_ok=True)
    tasks: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="drover-bench-tasks-") as name, live(Path(name)) as fleet:
        loads = [os.getloadavg()[0]]
        with sync_playwright() as play:
            browser = play.chromium.launch(executable_path=CHROMIUM, headless=True, args=FLAGS)
            for task in given.only:
                line = partial(on_the_line, fleet, task)
                # Of two waiting drains one is approved on each way.
                tasks[task] = {
                    "task": TASKS[task].what,
                    "browser": in_browser(browser, fleet, task, given.shots, Keys if given.keyboard else Walk),
                    "line": line(),
                }  # fmt: skip
                print(task, json.dumps(tasks[task]), file=sys.stderr, flush=True)
            browser.close()
        loads.append(os.getloadavg()[0])
    if given.page:
        PAGE.write_text(page_of(tasks, loads))
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

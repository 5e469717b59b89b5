"""One console over ten clusters: first paint with all there and with one away, and that an act reaches its own only.

`--part large`: ten collectors of 12,500 nodes each, played from answers made once (`console/replayed.py`), console and
Chromium real. All there, then one whose port is closed, then one that takes connections and never answers:

- strips: from the navigation to all strips on the screen, cache empty (`cold`) and on the next visit (`warm`); `page`:
  until the page's own stand there, as without those drawn early; `incidents`: until those of all are listed.
- picture: the same for the Fleet page of one cluster, all 100,000 GPUs of it.
- find: from a name in the search to its rows of all clusters.
- greyed: from the moment a collector hangs to its strip being grey, the others' all being of now.
- acts: a person drains a node that all ten have, in c03; then, with the form of c05 filled, chooses c06 and presses the
  button that is still there within the same moment. `reached`: what came of these presses, by cluster.
- one_collector: the Fleet page of a console that has c03 alone, in the same minutes.

`--part real`: ten real collectors with an embedded store each, four simulated nodes each with the same names, Slurm's
place taken by a command. One is killed, one stopped (SIGSTOP). The same paints, greyed, and drains by the command line,
each looked for in the audit of all.

Prints one JSON line; --write puts the figures into docs/evidence/clusters.md. Collectors, console and browser share one
machine.

    python benchmarks/bench_clusters.py --part large --write [--paints 5]      # 15 minutes on a quiet machine
    python benchmarks/bench_clusters.py --part real --write [--paints 5]       # 8 minutes
    python benchmarks/bench_clusters.py --part real --clusters 3 --paints 1    # a small one
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import psutil
from page_block import EVIDENCE, put, when

from drover_core.model.fleet import dump_toml
from drover_simulator.fleet import build_fleet
from testbed.browsing import SCREEN, chromium
from testbed.system_processes import free_port, reachable, running
from testbed.waiting import wait_until

CLUSTERS, AWAY, NODES = 10, 9, 12_500  # of `large`; `real` may have fewer
WAIT_MS = 60_000
GOAL_MS = 2000
PRESSES = 5
# Another cluster is chosen, and within the same moment the button of the form is pressed that is still there.
PRESS = """(option) => { option.click();
  [...document.querySelectorAll('button')].find((b) => b.textContent.includes('in cluster c05')).click(); }"""
NODE = "r001n01"  # all ten have it
STRIPS = """(() => { const found = (root) => root.querySelectorAll('.strip').length;
  return [...document.body?.children || []].some((e) => e.shadowRoot && found(e.shadowRoot) === COUNT)
    || [...document.querySelectorAll('.st-key-clusters *')]
      .some((e) => e.shadowRoot && found(e.shadowRoot) === COUNT); })()"""
OWN = """[...document.querySelectorAll('.st-key-clusters *')].some((e) => e.shadowRoot
  && e.shadowRoot.querySelectorAll('.strip').length === COUNT)"""
LISTED = (
    "[...document.querySelectorAll('.st-key-all_incidents *')].some((e) => e.shadowRoot?.querySelector('tbody tr'))"
)
PICTURE = "window.__drover_fleet && window.__drover_fleet.cells().length === GPUS"
OVERVIEW = {"strips": STRIPS, "page": OWN}
STATES = """[...document.querySelectorAll('.st-key-clusters *')].flatMap((e) => e.shadowRoot
  ? [...e.shadowRoot.querySelectorAll('a.strip')].map((s) => [s.dataset.cluster, s.classList.contains('away')]) : [])"""


def counted(script: str, gpus: int = 0, clusters: int = CLUSTERS) -> str:
    return script.replace("COUNT", str(clusters + 1)).replace("GPUS", str(gpus))


class Console:
    """The console over these collectors, and a browser."""

    def __init__(self, folder: Path, addresses: dict[str, str], browser: Any, stack: ExitStack) -> None:
        settings = folder / "console.toml"
        rows = [f'[[clusters]]\nname = "{name}"\ncollector = "{address}"\n' for name, address in addresses.items()]
        settings.write_text("\n".join(rows))
        settings.chmod(0o600)
        port = free_port()
        options = ["--settings", str(settings), "--port", str(port)]
        log = stack.enter_context(running(folder, "drover_dashboard.main", *options))
        wait_until(lambda: reachable("127.0.0.1", port), "the console listens", 60)
        self.url, self.log, self.browser, self.settings = f"http://127.0.0.1:{port}", log, browser, settings
        self.problems: list[str] = []
        self.overview = {name: counted(script, clusters=len(addresses)) for name, script in OVERVIEW.items()}
        self.paint("", self.overview)  # it has served a page before

    def tab(self) -> Any:
        page = self.browser.new_context(viewport=SCREEN).new_page()
        page.set_default_timeout(WAIT_MS)
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        return page

    def paint(self, path: str, until: dict[str, str]) -> dict[str, dict[str, float]]:
        """Milliseconds from the navigation until each, in an empty browser and again in the same one."""
        page = self.tab()
        found: dict[str, dict[str, float]] = {}
        for visit in ("cold", "warm"):
            began, found[visit] = time.monotonic(), {}
            page.goto(f"{self.url}/{path}", wait_until="commit")
            for name, script in until.items():
                page.wait_for_function(script, polling=20)
                found[visit][name] = (time.monotonic() - began) * 1000
            page.goto("about:blank")
        page.context.close()
        return found

    def states(self, page: Any) -> dict[str, bool]:
        """Whether each cluster's strip is grey."""
        return dict(page.evaluate(STATES))

    def greyed_s(self, act: Callable[[], None], away: set[str]) -> dict[str, Any]:
        """Do what takes collectors away; seconds until their strips are grey, and none else ever was."""
        page = self.tab()
        page.goto(self.url)
        page.wait_for_function(self.overview["page"])
        wait_until(lambda: self.states(page) and not any(self.states(page).values()), "all are of now", 60)
        act()
        began, wrongly = time.monotonic(), set()
        while True:
            grey = {name for name, is_away in self.states(page).items() if is_away}
            wrongly |= grey - away
            if grey >= away or time.monotonic() - began > 60:
                break
            page.wait_for_timeout(100)
        page.context.close()
        return {"s": round(time.monotonic() - began, 1), "grey": sorted(grey), "wrongly": sorted(wrongly)}


def figures(paints: list[dict[str, dict[str, float]]]) -> dict[str, Any]:
    """Median and the worst of each."""
    return {
        f"{visit}_{name}": {
            "median_ms": round(statistics.median(p[visit][name] for p in paints)),
            "most_ms": round(max(p[visit][name] for p in paints)),
        }
        for visit in ("cold", "warm")
        for name in paints[0][visit]
    }


def painted(console: Console, count: int, gpus: int, cluster: str) -> dict[str, Any]:
    overview = console.overview | {"incidents": LISTED}
    return {
        "overview": figures([console.paint("", overview) for _ in range(count)]),
        "picture": figures(
            [console.paint(f"?cluster={cluster}", {"picture": counted(PICTURE, gpus)}) for _ in range(count)]
        ),
    }


# ---- large


@contextmanager
def replayed(acts: Path) -> Iterator[tuple[dict[str, str], subprocess.Popen[str], str]]:
    """Nine that answer, one in a process of its own that can be stopped, and the address of one that never answers."""
    with ExitStack() as stack:
        found: list[tuple[dict[str, str], subprocess.Popen[str]]] = []
        for first, count in ((0, AWAY), (AWAY, 1)):
            command = [
                sys.executable, "-m", "console.replayed", "--first", str(first), "--clusters", str(count), "--nodes",
                str(NODES), "--acts", str(acts),
            ]  # fmt: skip
            path = {
                **os.environ,
                "PYTHONPATH": os.pathsep.join([f"{ROOT}/benchmarks", os.environ.get("PYTHONPATH", "")]),
            }
            child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=path)
            stack.callback(_end, child)
            assert child.stdout is not None
            found.append((json.loads(child.stdout.readline()), child))
        yield found[0][0] | found[1][0], found[1][1], f"c{AWAY:02d}"


def _end(child: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        child.send_signal(signal.SIGCONT)
        child.terminate()
    child.wait(30)


def large(folder: Path, given: argparse.Namespace, browser: Any, found: dict[str, Any]) -> None:
    acts = folder / "acts"
    acts.touch()
    with ExitStack() as stack:
        addresses, last, name = stack.enter_context(replayed(acts))
        console = Console(folder, addresses, browser, stack)
        found["one_collector"] = alone(folder, addresses["c03"], browser, given.paints, stack)
        found["all_there"] = painted(console, given.paints, NODES * 8, "c03")
        note(found, "all_there")
        found["find"] = find_ms(console)
        found["acts"] = act(console, acts)
        note(found, "acts")
        found["greyed_hanging"] = console.greyed_s(lambda: last.send_signal(signal.SIGSTOP), {name})
        found["one_hangs"] = painted(console, given.paints, NODES * 8, "c03")
        found["find_one_hangs"] = find_ms(console)
        note(found, "one_hangs")
        last.send_signal(signal.SIGCONT)
        found["greyed_killed"] = console.greyed_s(lambda: _end(last), {name})
        found["one_is_gone"] = painted(console, given.paints, NODES * 8, "c03")
        note(found, "one_is_gone")
        found["problems"] = console.problems[:5]
        found["console_rss_mb"] = round(_console().memory_info().rss / 1e6)
        found["console_log"] = console.log.read_text("utf-8", "replace").splitlines()[1:6]


def alone(folder: Path, address: str, browser: Any, count: int, stack: ExitStack) -> dict[str, Any]:
    own, port = folder / "alone", free_port()
    own.mkdir()
    stack.enter_context(running(own, "drover_dashboard.main", "--collector", address, "--port", str(port)))
    wait_until(lambda: reachable("127.0.0.1", port), "the other console listens", 60)
    console = Console.__new__(Console)
    console.url, console.browser, console.problems = f"http://127.0.0.1:{port}", browser, []
    until = {"picture": counted(PICTURE, NODES * 8)}
    console.paint("", until)
    return figures([console.paint("", until) for _ in range(count)])


def _console() -> psutil.Process:
    return next(p for p in psutil.Process().children(recursive=True) if "--settings" in p.cmdline())


def find_ms(console: Console) -> int:
    page = console.tab()
    page.goto(console.url)
    page.locator(".find").wait_for()
    page.keyboard.press("/")
    began = time.monotonic()
    page.keyboard.insert_text("r244n11")
    page.locator(".hit", has_text="r244n11").first.wait_for()
    took = round((time.monotonic() - began) * 1000)
    page.context.close()
    return took


def act(console: Console, acts: Path) -> dict[str, Any]:
    """Drain in c03. Then fill the form in c05 and press while the page goes to c06."""
    page = console.tab()
    page.goto(f"{console.url}/node?cluster=c03&node={NODE}")
    _form(page)
    page.get_by_role("button", name=f"Drain {NODE} in cluster c03").click()
    page.get_by_text(f"Drain {NODE} in cluster c03: done").wait_for()
    own = [json.loads(line) for line in acts.read_text().splitlines()]
    for _ in range(PRESSES):
        page.goto(f"{console.url}/node?cluster=c05&node={NODE}")
        _form(page)
        page.get_by_role("combobox", name="Cluster").click()
        page.get_by_role("option", name="cluster c06").evaluate(PRESS)
        page.get_by_text("c06 hall").first.wait_for()
        page.wait_for_timeout(2000)
    late = [json.loads(line) for line in acts.read_text().splitlines()][len(own) :]
    page.context.close()
    return {"drained": own, "presses_as_the_page_went_on": PRESSES, "reached": late}


def _form(page: Any) -> None:
    page.get_by_role("button", name="Drain ...").click()
    page.get_by_label("Your name").fill("alex")
    page.get_by_label("Why").fill("fan")
    page.get_by_label("Why").press("Tab")


# ---- real


def real(folder: Path, given: argparse.Namespace, browser: Any, found: dict[str, Any]) -> None:
    with ExitStack() as stack:
        addresses, pids, scheduler = {}, {}, ROOT / "tests" / "testbed" / "command_scheduler.py"
        for number in range(given.clusters):
            own = folder / f"c{number:02d}"
            (own / "scheduler").mkdir(parents=True)
            agents, api = free_port(), free_port()
            (own / "fleet.toml").write_text(dump_toml(build_fleet(4, 7)))
            (own / "collector.toml").write_text(
                f'fleet = "{own}/fleet.toml"\n[store]\nurl = "chdb://{own}/store"\n'
                f'[ingest]\nlisten = "127.0.0.1:{agents}"\n[api]\nlisten = "127.0.0.1:{api}"\n'
                f'[act]\nmode = "approve"\nvalidate = false\n'
                f'[act.command]\nprogram = ["{sys.executable}", "{scheduler}", "{own}/scheduler"]\n'
            )
            command = [sys.executable, "-m", "drover_collector.main", "run", "--config", str(own / "collector.toml")]
            with (own / "collector.log").open("w") as log:
                child = subprocess.Popen(command, stdout=log, stderr=log, text=True)
            stack.callback(_end, child)
            addresses[own.name], pids[own.name] = f"127.0.0.1:{api}", child
            wait_until(partial(reachable, "127.0.0.1", api), f"{own.name} listens", 180)
            stack.enter_context(
                running(
                    own, "drover_agent.main", "fleet", "--collector", f"127.0.0.1:{agents}", "--interval", "5",
                    "--fleet", f"{own}/fleet.toml", "--spool-dir", f"{own}/spool", "--seed", str(number),
                    "--faults", "none",
                )
            )  # fmt: skip
            print(f"{own.name} runs", file=sys.stderr, flush=True)
        console = Console(folder, addresses, browser, stack)
        page = console.tab()
        page.goto(console.url)
        wait_until(lambda: len(console.states(page)) == given.clusters, "all strips", 60)
        wait_until(lambda: not any(console.states(page).values()), "all answer", 120)
        page.context.close()
        paints = range(given.paints)
        found["all_there"] = {"overview": figures([console.paint("", console.overview) for _ in paints])}
        names = list(addresses)
        found["acts"] = real_acts(console, names)
        note(found, "acts")
        found["greyed_killed"] = console.greyed_s(lambda: pids[names[-2]].kill(), {names[-2]})
        pids[names[-1]].send_signal(signal.SIGSTOP)
        found["two_away"] = {"overview": figures([console.paint("", console.overview) for _ in paints])}
        page = console.tab()
        page.goto(console.url)
        wait_until(lambda: sum(console.states(page).values()) == 2, "two are grey", 60)
        found["grey_then"] = sorted(name for name, grey in console.states(page).items() if grey)
        page.context.close()
        found["problems"] = console.problems[:5]


def real_acts(console: Console, names: list[str]) -> dict[str, Any]:
    """Drain the same node in two clusters by the command line; which clusters' audits have it, node by node."""
    environment = os.environ | {"DROVER_CLUSTERS": str(console.settings)}

    def drover(*args: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "drover_cli.main", *args]
        return subprocess.run(
            command, capture_output=True, text=True, env=environment, timeout=120, check=False,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip

    node, own = "r01n01", (names[len(names) // 5], names[len(names) // 2])
    said = {name: drover("--cluster", name, "drain", node, "--why", f"for {name}", "--force") for name in own}
    unnamed = drover("drain", node, "--why", "nobody named a cluster")
    audits = {}
    for name in names:
        text = drover("--cluster", name, "audit").stdout
        audits[name] = [of for of in own if f"for {of}" in text]
    return {
        "said": {name: [done.returncode, done.stderr.strip(), done.stdout.strip()] for name, done in said.items()},
        "unnamed": [unnamed.returncode, unnamed.stderr.strip()[:120]],
        "in_the_audit_of": {name: of for name, of in audits.items() if of},
        "nowhere_else": all(of == ([name] if name in own else []) for name, of in audits.items()),
    }


def note(found: dict[str, Any], part: str) -> None:
    print(json.dumps({part: found[part]}), file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=["large", "real"], default="large")
    parser.add_argument("--paints", type=int, default=5)
    parser.add_argument("--clusters", type=int, default=CLUSTERS, help="of --part real, at least 3")
    parser.add_argument("--write", action="store_true", help="write the figures into docs/evidence/clusters.md")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # else what it started would live on
    load = [os.getloadavg()[0]]
    found: dict[str, Any] = {}
    try:
        with (
            tempfile.TemporaryDirectory(prefix="drover-bench-clusters-", ignore_cleanup_errors=True) as name,
            chromium() as browser,
        ):
            {"large": large, "real": real}[given.part](Path(name), given, browser, found)
    finally:
        load.append(os.getloadavg()[0])
        line = {
            "benchmark": f"clusters_{given.part}", "cores": os.cpu_count(), "goal_ms": GOAL_MS,
            "load_before_after": [round(value, 1) for value in load], "clusters": given.clusters, **found,
        }  # fmt: skip
        print(json.dumps(line), flush=True)
    if given.write:
        put(EVIDENCE / "clusters.md", given.part, {"large": large_lines, "real": real_lines}[given.part](line))


# ---- the page


def ms(figure: dict[str, int]) -> str:
    return f"{figure['median_ms']:,} ({figure['most_ms']:,} at most)"


def head(found: dict[str, Any], command: str) -> list[str]:
    before, after = found["load_before_after"]
    return [f"`{command}`, run on {when()}, {found['cores']} cores,", f"load {before} before and {after} after.", ""]


def large_lines(found: dict[str, Any]) -> list[str]:
    """Return the block of ten collectors of 12,500 nodes."""
    columns = {"all there": "all_there", "one hangs (SIGSTOP)": "one_hangs", "one is gone": "one_is_gone"}
    rows = {
        "strips of all clusters on the screen, cache empty": ("overview", "cold_strips"),
        "the same on the next visit": ("overview", "warm_strips"),
        "the page's own strips stand, cache empty": ("overview", "cold_page"),
        "the same then": ("overview", "warm_page"),
        "incidents of all are listed, cache empty": ("overview", "cold_incidents"),
        "100,000 GPUs of another cluster, cache empty": ("picture", "cold_picture"),
    }
    acts, hanging, killed = found["acts"], found["greyed_hanging"], found["greyed_killed"]
    return [
        *head(found, "benchmarks/bench_clusters.py --part large"),
        "Ten collectors of 12,500 nodes each, played from answers made once. Milliseconds, medians; the goal",
        f"for the first paint is {found['goal_ms']:,}.", "",
        f"| what | {' | '.join(columns)} |", "| --- |" + " --- |" * len(columns),
        *(f"| {title} | {' | '.join(ms(found[c][part][name]) for c in columns.values())} |"
          for title, (part, name) in rows.items()),
        f"| a search over all, to its rows | {found['find']:,} | {found['find_one_hangs']:,} | not measured |",
        f"| one collector's console: 100,000 GPUs, cache empty | {ms(found['one_collector']['cold_picture'])} | | |",
        "", f"- The strip of the collector that hangs is grey after {hanging['s']} s, of the killed one after"
        f" {killed['s']} s.", f"  Strips that were grey and should not have been:"
        f" {len(hanging['wrongly']) + len(killed['wrongly'])}.",
        f"- The console of ten clusters holds {found['console_rss_mb']} MB.",
        f"- A drain in c03 reached {_reached(acts['drained'])}. Of {acts['presses_as_the_page_went_on']} presses on"
        " the form of c05", f"  while c06 was chosen: {_reached(acts['reached'])}.",
    ]  # fmt: skip


def _reached(acts: list[list[str]]) -> str:
    """`acts`: cluster, act, node and reason of each."""
    by: dict[str, int] = {}
    for cluster, *_ in acts:
        by[cluster] = by.get(cluster, 0) + 1
    return ", ".join(f"{name} ({count})" for name, count in sorted(by.items())) or "none"


def real_lines(found: dict[str, Any]) -> list[str]:
    """Return the block of ten real collectors."""
    columns, killed, acts = {"all there": "all_there", "two away": "two_away"}, found["greyed_killed"], found["acts"]
    rows = {
        "strips of all clusters on the screen, cache empty": "cold_strips", "the same on the next visit": "warm_strips",
        "the page's own strips stand, cache empty": "cold_page", "the same then": "warm_page",
    }  # fmt: skip
    return [
        *head(found, "benchmarks/bench_clusters.py --part real"),
        f"{found['clusters']} real collectors with an embedded store and four simulated nodes each, one killed and",
        "then one stopped by SIGSTOP. Milliseconds, medians.", "",
        f"| what | {' | '.join(columns)} |", "| --- |" + " --- |" * len(columns),
        *(f"| {title} | {' | '.join(ms(found[c]['overview'][name]) for c in columns.values())} |"
          for title, name in rows.items()),
        "", f"- The strip of the killed one is grey after {killed['s']} s; wrongly grey: {len(killed['wrongly'])}.",
        f"  Grey in the end: {', '.join(found['grey_then'])}.",
        f"- Drains by the command line with `--cluster` stand in the audits of {', '.join(acts['in_the_audit_of'])},",
        f"  each in its own and nowhere else: {'yes' if acts['nowhere_else'] else 'NO'}. Without a cluster the command"
        f" ended with {acts['unnamed'][0]}.",
    ]  # fmt: skip


if __name__ == "__main__":
    main()

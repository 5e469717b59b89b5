"""Faults and attacks, one after another, while real agents stream to a collector: nothing acknowledged may be lost.

Six agents in one process (real spool and uplink, rows that follow from place and time) and a whole agent whose eight
GPUs are the stand-in for NVML stream over mutual TLS, through a network that can be cut, to a collector with a store
on a disk of its own, which drains nodes of a real Slurm and notifies a webhook and a real Alertmanager. Each fault is
brought about, held and taken away; the time from then until nothing waits in any spool and detection is on time is the
time to recover. What has ended is started again, as systemd would. At the end each row and event that an agent had in
its spool must be in the store once, with its value, by count and by checksum per series; Slurm may have drained broken
nodes only, one at a time as the guard allows; and no message may have been taken twice. Prints one JSON line, and with
--write the table of docs/evidence/chaos.md; exit code 1 when anything is wrong. Needs root for disks, Slurm and memory
limits: without, those faults are left out and named.

With --only a few run, and --write keeps the other lines of the table; each names its commit.

    python benchmarks/chaos.py [--only WORD...] [--write docs/evidence/chaos.md] [--keep FOLDER]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from datetime import UTC, datetime
from itertools import zip_longest
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))  # the testbed's Slurm, driver and receivers

from disruption import attacks, elsewhere
from disruption import faults_around as around
from disruption import faults_network as network
from disruption import faults_processes as processes
from disruption.around import main_place
from disruption.run import Fault, Row

Found = tuple[list[Row], dict[str, Any]]
Elsewhere = Callable[[Path, Sequence[str]], Found]
WRONG = (
    "rows_lost",
    "rows_doubled",
    "rows_wrong",
    "series_unequal",
    "events_lost",
    "events_doubled",
    "rollups_unequal",
    "rollups_5m_unequal",
)
FAULTS: tuple[tuple[str, str, Fault], ...] = (
    ("agent", "agents killed (-9) and started again", processes.agents_killed),
    ("collector", "collector killed between insert and Ack", processes.collector_killed_before_ack),
    ("collector", "collector restarted", processes.collector_restarted),
    ("store", "a file of the store damaged", processes.store_damaged),
    ("agent", "agents stopped (SIGSTOP) for 12 s", processes.agents_stopped),
    ("agent", "agents killed with data in the spool", processes.agents_restarted),
    ("agent", "agents out of memory", processes.agents_out_of_memory),
    ("agent", "spool cut in the middle", processes.spool_cut),
    ("agent", "spool's disk full, network away", processes.spool_full),
    ("agent", "two agents claim one node", network.rival),
    ("agent", "a node's clock an hour ahead", processes.clock_moved(3600)),
    ("agent", "a node's clock an hour behind", processes.clock_moved(-3600)),
    ("network", "network cut for 10 s", network.network_cut),
    ("network", "network slow", network.network_slow),
    ("network", "network that resets connections", network.network_lossy),
    ("network", "reset amid a message", network.reset_amid_a_message),
    ("network", "half-open connections", network.half_open),
    ("network", "connections that nobody answers", network.black_hole),
    ("certificates", "an agent's certificate ends under its stream", network.certificate_ends),
    ("certificates", "all certificates renewed under streams", network.certificates_rotate),
    ("certificates", "an agent's certificate denied, then allowed", network.denied),
    ("certificates", "list of denied certificates unreadable", network.denied_unreadable),
    ("certificates", "authority replaced", network.authority_replaced),
    ("collector", "collector stopped (SIGSTOP) for 30 s", processes.collector_stopped),
    ("collector", "settings bad at a restart", processes.bad_settings_at_restart),
    ("collector", "policy bad at a reload", processes.policy_bad),
    ("store", "store's disk full", processes.store_full),
    ("store", "store cannot be written", processes.store_read_only),
    ("around", "Slurm's controller away while a node is to be drained", around.slurm_away),
    ("around", "webhook's receiver down", around.receiver_down),
    ("around", "Alertmanager down", around.alertmanager_down),
    ("around", "console killed", around.console_killed),
    ("node", "driver's call hangs", around.driver_hangs),
    ("node", "GPU lost", around.gpu_lost),
    ("node", "driver unloaded", around.driver_unloaded),
    ("node", f"storm of {around.STORM:,} lines in the kernel log", around.kernel_log_storm),
    *(("attack", name, attack) for name, attack in attacks.ATTACKS),
)
STANDBY, UPGRADE = "detecting collector killed, standby takes over", "collector one version older, then upgraded"
PLACES: tuple[tuple[str, str, tuple[str, ...], Elsewhere], ...] = (
    ("standby", "collector", (STANDBY,), lambda folder, _: single(elsewhere.standby(folder))),
    ("one", "collector", (UPGRADE,), lambda folder, _: single(elsewhere.upgrade(folder))),
    ("history", "attack", tuple(name for name, _ in attacks.HISTORY), attacks.history),
)  # (folder, group, names of the faults, what brings about those that are named)
NAMES = (*(name for _, name, _ in FAULTS), *(name for _, _, names, _ in PLACES for name in names))
ROOT = Path(__file__).resolve().parents[1]
OTHER_RUN = "Lines of commit "
TABLE = "| fault | held | recovered after | seen | lost | commit |\n| --- | ---: | ---: | --- | ---: | --- |\n"


def single(found: tuple[Row, dict[str, Any]]) -> Found:
    return [found[0]], found[1]


def wanted(group: str, name: str, only: Sequence[str]) -> bool:
    """Whether a fault runs: all do where `only` is empty, else those of these groups and those these words find."""
    return not only or group in only or any(re.search(word, name) for word in only)


def measure_main(folder: Path, chosen: Sequence[tuple[str, str, Fault]]) -> tuple[Found, dict[str, Any]]:
    """The faults of the main place; and what is wrong there, in words, and else counted."""
    with ExitStack() as stack:
        run = main_place(folder, stack)
        if not run.place.wait(lambda: not run.place.well(), 60):
            raise RuntimeError(f"the fleet does not begin: {run.place.well()}")
        for group, name, fault in chosen:
            run.suffer(group, name, fault)
        drained = around.drained_nodes(run)
        run.place.finish()
        if run["disk"] is not None:
            (run["disk"] / "ballast").unlink(missing_ok=True)
        stored = run.place.check(f"chdb://{run['store']}", run.allowed, "real")
        blame(run.rows, stored)
        wrong = [f"drained though it was well: {node}" for node in sorted(drained - run.broken)]
        wrong += [f"the guard allows one node at a time, drained: {sorted(drained)}"] if len(drained) > 1 else []
        taken = Counter(got.headers.get("webhook-id", "") for got in run["hook"].got)
        restarts = run.place.restarts
        messages = {"taken": len(taken), "again": sum(taken.values()) - len(taken)}
    return (run.rows, stored), {
        "wrong": wrong, "drained": sorted(drained), "started_again": restarts, "messages": messages
    }  # fmt: skip


def measure(folder: Path, only: Sequence[str] = ()) -> dict[str, Any]:
    started, of = time.monotonic(), commit()
    rows: list[Row] = []
    stored: dict[str, dict[str, Any]] = {}
    counted: dict[str, Any] = {"wrong": [], "drained": [], "started_again": 0, "messages": {"taken": 0, "again": 0}}
    if chosen := [fault for fault in FAULTS if wanted(*fault[:2], only)]:
        (more, stored["main"]), counted = measure_main(folder / "main", chosen)
        rows += more
    for name, group, names, place in PLACES:
        if some := [each for each in names if wanted(group, each, only)]:
            more, found = place(folder / name, some)
            rows += more
            stored[name] = found
            blame(more, found)
    wrong = counted.pop("wrong")
    wrong += [
        f"{where}: no rollup was compared" for where, found in stored.items() if found and not found["rollups_compared"]
    ]
    if len(rows) == len(NAMES) and not stored["main"]["rollups_5m_compared"]:  # only a whole run is long
        wrong.append("main: no rollup of 5 min was compared")
    wrong += [f"{row.name}: {text}" for row in rows for text in row.wrong]
    wrong += [f"{where}: {found[name]} {name}" for where, found in stored.items() for name in WRONG if found.get(name)]
    return {
        "benchmark": "chaos",
        "commit": of,
        "faults": len([row for row in rows if not row.skipped]),
        "skipped": [f"{row.name}: {row.skipped}" for row in rows if row.skipped],
        "stored": {name: {k: v for k, v in found.items() if k[-3:] != "_ms"} for name, found in stored.items()},
        **counted,
        "wrong": wrong,
        "rows": [asdict(row) for row in rows],
        "load": round(os.getloadavg()[2], 1),
        "seconds": round(time.monotonic() - started, 1),
    }


def blame(rows: Sequence[Row], found: dict[str, Any]) -> None:
    """Each missing row and event is the fault's during which it was made, or that was the newest then."""
    for row, following in zip_longest(rows, rows[1:]):
        end_ms = following.begin_ms if following else 1 << 60
        row.rows_lost = sum(row.begin_ms <= ts_ms < end_ms for ts_ms in found.get("missing_ms", ()))
        events = [int(text.rpartition(" ")[2]) for text in found.get("events_missing", ())]
        row.events_lost = sum(row.begin_ms <= ts_ms < end_ms for ts_ms in events)


def commit() -> str:
    """That this checkout is of; with a + when it has changes."""
    words = ["git", "-C", str(ROOT), "describe", "--always", "--exclude=*", "--dirty=+"]
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


def merged(before: str, result: dict[str, Any]) -> str:
    """docs/evidence/chaos.md of before, with the lines of a run of some faults. Faults that are gone are left out."""
    head, middle, tail = before.partition(TABLE)
    if not middle:
        raise ValueError("the page has no table with commits; run all faults first")
    old, _, foot = tail.partition("\n\n")
    lines = {text.split(" | ")[0].removeprefix("| "): text for text in old.splitlines()}
    lines |= {row["name"]: line(row, result["commit"]) for row in result["rows"]}
    kept = [lines[name] for name in NAMES if name in lines]
    commits = {text.rsplit(" | ", 1)[1].removesuffix(" |") for text in kept}
    notes = [text for text in foot.splitlines() if text.startswith(OTHER_RUN)]
    notes = [text for text in notes if text.removeprefix(OTHER_RUN).split(" ")[0] in commits - {result["commit"]}]
    rest = "\n".join(text for text in foot.splitlines() if not text.startswith(OTHER_RUN)).strip("\n")
    return f"{head}{middle}" + "\n".join([*kept, "", rest, "", *notes, other_run(result), ""])


def other_run(result: dict[str, Any]) -> str:
    """One line about a run of some faults."""
    stored = result["stored"].values()
    rows, events = (sum(found.get(name, 0) for found in stored) for name in ("rows", "events"))
    wrong = ", ".join(f"{sum(found.get(name, 0) for found in stored)} {name.replace('_', ' ')}" for name in WRONG)
    return (
        f"{OTHER_RUN}{result['commit']} are of a run of those {result['faults']} alone,"
        f" {datetime.now(UTC):%Y-%m-%d %H:%M} UTC, at a load of {result['load']:.0f}, {result['seconds']:.0f} s in all:"
        f" {rows:,} rows and {events:,} events stored; {wrong}."
    )


def page(result: dict[str, Any]) -> str:
    """docs/evidence/chaos.md."""
    stored = result["stored"].values()
    sums = {
        name: sum(found.get(name, 0) for found in stored)
        for name in ("rows", "events", "acks", "rollups_compared", "rollups_5m_compared", *WRONG)
    }
    cut = sum(found.get("cut_before_acknowledged", 0) for found in stored)
    lines = [
        "# Chaos: what was broken, and how long it took",
        "",
        "Written by `make chaos` (`benchmarks/chaos.py --write docs/evidence/chaos.md`): nothing is filled in by hand.",
        "Attacks say how far the collector's memory grew, and the slowest answer to an operator's GetStatus meanwhile.",
        "The head of the script says what runs. Recovered: nothing waits in any spool, and detection is on time.",
        "",
        f"Run of {datetime.now(UTC):%Y-%m-%d %H:%M} UTC on {os.cpu_count()} cores, at a load of {result['load']:.0f}"
        f" from this and other programs, {result['seconds']:.0f} s in all, commit {result['commit']}:"
        f" {result['faults']} faults.",
        "",
        "| counted at the end | |",
        "| --- | ---: |",
        f"| rows stored; events; acknowledgements | {sums['rows']:,}; {sums['events']:,}; {sums['acks']:,} |",
        f"| lost: rows, events | {sums['rows_lost']}, {sums['events_lost']} |",
        f"| doubled: rows, events | {sums['rows_doubled']}, {sums['events_doubled']} |",
        f"| wrong values; series with an unequal checksum | {sums['rows_wrong']}; {sums['series_unequal']} |",
        f"| rollups of 10 s compared with their rows; unequal | {sums['rollups_compared']:,};"
        f" {sums['rollups_unequal']} |",
        f"| rollups of 5 min compared with theirs; unequal | {sums['rollups_5m_compared']:,};"
        f" {sums['rollups_5m_unequal']} |",
        f"| drained in Slurm (broken ones only, one at a time) | {', '.join(result['drained']) or 'none'} |",
        f"| webhook messages taken; taken again under the same id | {result['messages']['taken']};"
        f" {result['messages']['again']} |",
        f"| processes that ended and were started again | {result['started_again']} |",
        f"| cut off a spool before anybody had acknowledged it: rows | {cut} |",
        "",
        *TABLE.splitlines(),
        *(line(row, result["commit"]) for row in result["rows"]),
        "",
        "An agent's limit for an Ack, its look for a renewed certificate and its longest pause are 15, 1 and 2 s here",
        "(shipped: 60, 60 and 30), so a half-open connection may really take up to a minute. Not tried: a collector's",
        "clock that is moved, and packets lost singly (connections are reset instead). The driver is a stand-in, and",
        "all runs on one machine.",
        "",
    ]
    return "\n".join(lines)


def line(row: dict[str, Any], of: str) -> str:
    if row["skipped"]:
        return f"| {row['name']} | | not run | {row['skipped']} | | {of} |"
    after = "never" if row["recovered_s"] is None else f"{row['recovered_s']:.1f} s"
    seen = "; ".join([*row["seen"], *(f"**{text}**" for text in row["wrong"])]).replace("|", "/").replace("\n", " ")
    lost = row["rows_lost"] + row["events_lost"]
    return f"| {row['name']} | {row['held_s']:.1f} s | {after} | {seen} | {lost} | {of} |"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", default=(), help="groups, or expressions that find names of faults")
    parser.add_argument("--write", type=Path, help="put the table there")
    parser.add_argument("--keep", type=Path, help="folder to work in and to leave (default: a temporary one)")
    args = parser.parse_args(argv)
    folder = args.keep or Path(tempfile.mkdtemp(prefix="drover-chaos-"))
    try:
        result = measure(folder, args.only)
    finally:
        if args.keep is None:
            shutil.rmtree(folder, ignore_errors=True)
    if args.write:
        old = args.write.read_text("utf-8") if args.only else ""
        args.write.write_text(merged(old, result) if args.only else page(result), "utf-8")
    print(json.dumps(result))
    return 1 if result["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())

"""What is lost without the agent: 64 simulated nodes judged by their agents' values, and by their exporters' pages.

One fleet with injected faults is judged four times: as agents report it, by pages of dcgm-exporter with its default
fields and of node_exporter, with all fields that the table knows, and by the page of AMD's exporter
(`scraped/replayed.py`: no clock, so a loaded machine changes no figure). `--cpu` measures the CPU of one node's pages.
On a quiet machine: `--live` does the first three in real time with three real collectors, agents and a real HTTP server
(`scraped/pages.py`); `--cost` has a real collector scrape 1,000 nodes every 15 s, and measures CPU. Each prints one
JSON line, and writes its part of docs/evidence/scraped.md (`--no-write`: not).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
from page_block import when, wrapped
from scraped.pages import PORTS, FleetPages, address
from scraped.replayed import play

from drover_cli.scoring.score import Label, Score, counts, covers, found_of, label_of, score
from drover_collector.scrape.blind import XID_EVENTS, blindness, inventory
from drover_collector.scrape.mapping import PageMapper
from drover_collector.scrape.messages import NodeMessages
from drover_collector.scrape.tables import table
from drover_core.model.events import Incident, RecommendedAction, from_json
from drover_core.model.fleet import dump_toml
from drover_core.model.reports import incident_report
from drover_proto import fleet_pb2 as pb
from drover_proto.fleet_pb2_grpc import FleetStub
from drover_simulator.faults import Fault, dump_faults
from drover_simulator.fleet import SimulatedFleet, build_fleet
from testbed.system_processes import free_port, running
from testbed.waiting import wait_until

PAGE = ROOT / "docs/evidence/scraped.md"
DATA = ROOT / "benchmarks/data/scraped.json"
NODES, SEED = 64, 7
BEGIN_S, APART_S = 120.0, 5.0
FAULTS: tuple[tuple[str, str, str, int | None, float], ...] = (
    ("straggler", "power_cap", "r01n02", 3, 0.3),
    ("straggler", "clock", "r03n07", 0, 0.3),
    ("thermal", "cooling", "r02n04", 5, 1.8),
    ("memory", "row_remap_failure", "r02n03", 2, 1.0),
    ("memory", "ecc_storm", "r03n02", 1, 200.0),
    ("memory", "uncorrectable", "r03n05", 4, 1.0),
    ("link", "ib_flap", "r02n06", None, 1.0),
    ("link", "nvlink", "r05n02", 3, 0.1),
    ("xid", "fallen_off_bus", "r04n03", 1, 1.0),
    ("xid", "gsp_timeout", "r04n06", 0, 1.0),
    ("xid", "uncontained_ecc", "r05n07", 2, 1.0),
    ("liveness", "gpu_lost", "r06n02", 6, 1.0),
    ("liveness", "driver_hung", "r06n04", None, 1.0),
    ("liveness", "silent", "r05n05", None, 1.0),
    ("hang", "rank_stopped", "r01n06", 2, 1.0),
    ("sdc", "wrong_results", "r06n07", 4, 1.0),
)
LIVE = {"agents": "with agents", "full": "all fields", "default": "default fields"}
RUNS = LIVE | {"amd": "AMD's exporter"}


def settings(folder: Path, which: str, agents: int, api: int, nodes: list[str], interval_s: float) -> str:
    lines = [
        f'fleet = "{folder}/fleet.toml"\n[store]\nurl = "chdb://{folder}/store"',
        f'[ingest]\nlisten = "127.0.0.1:{agents}"\n[api]\nlisten = "127.0.0.1:{api}"',
    ]
    for exporter, port in (("dcgm", PORTS.get(which, 0)), ("node", PORTS["node"])) if which != "agents" else ():
        targets = json.dumps([f"{name}={address(number)}:{port}" for number, name in enumerate(nodes)])
        lines.append(
            f'[[scrape]]\nname = "{exporter}"\nexporter = "{exporter}"\ntargets = {targets}\ninterval_s = {interval_s}'
        )
    return "\n".join(lines) + "\n"


@contextmanager
def collecting(folder: Path, which: str, nodes: int, interval_s: float = 10.0) -> Iterator[tuple[FleetStub, str]]:
    """Run a collector; gives its Fleet API and its address for agents."""
    folder.mkdir()
    agents, api = free_port(), free_port()
    spec = build_fleet(nodes, SEED)
    (folder / "fleet.toml").write_text(dump_toml(spec))
    names = [node.name for node in spec.nodes]
    (folder / "collector.toml").write_text(settings(folder, which, agents, api, names, interval_s))
    with (
        running(folder, "drover_collector.main", "run", "--config", f"{folder}/collector.toml"),
        grpc.insecure_channel(f"127.0.0.1:{api}", [("grpc.max_reconnect_backoff_ms", 1000)]) as channel,
    ):
        stub = FleetStub(channel)
        wait_until(lambda: _answers(stub), "the collector answers", 300)
        yield stub, f"127.0.0.1:{agents}"


def _answers(stub: FleetStub) -> bool:
    try:
        return bool(stub.GetStatus(pb.StatusRequest(), timeout=5))
    except grpc.RpcError:
        return False


@contextmanager
def serving(folder: Path, nodes: int, faults: Path | None = None) -> Iterator[Path]:
    labels = folder / "pages-labels.jsonl"
    command = [
        sys.executable,
        str(ROOT / "benchmarks/scraped/pages.py"),
        "--nodes",
        str(nodes),
        "--labels",
        str(labels),
    ]
    if faults is not None:
        command += ["--faults", str(faults)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert child.stdout is not None
    try:
        child.stdout.readline()
        yield labels
    finally:
        child.terminate()
        child.wait()


def faults_of() -> list[Fault]:
    return [
        Fault(kind, cause, node, gpu, BEGIN_S + APART_S * number, None, severity)
        for number, (kind, cause, node, gpu, severity) in enumerate(FAULTS)
    ]


def replayed(seconds: float) -> dict[str, Any]:
    """Return what an engine makes of the faults as agents and as pages show them."""
    incidents, labels, seen = play(NODES, SEED, faults_of(), round(seconds / 10))
    truth = [label_of(label.to_dict()) for label in labels]
    result: dict[str, Any] = {which: scored(truth, found) for which, found in incidents.items()}
    result["blind"] = inventory(
        ["dcgm-exporter", "node_exporter"], blindness(seen["default"] | {XID_EVENTS}, ["nvidia"])
    )
    result["blind_amd"] = inventory([table("amd").title, "node_exporter"], blindness(seen["amd"], ["amd"]))
    return result


def found_in(seconds: float) -> dict[str, Any]:
    """Return what each of the three collectors made of the faults."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="scrape-")))
        (folder / "faults.json").write_text(dump_faults(faults_of()))
        stubs = {which: stack.enter_context(collecting(folder / which, which, NODES)) for which in LIVE}
        pages = stack.enter_context(serving(folder, NODES, folder / "faults.json"))
        labels = folder / "agents-labels.jsonl"
        stack.enter_context(
            running(
                folder, "drover_agent.main", "fleet", "--collector", stubs["agents"][1], "--interval", "2",
                "--fleet", f"{folder}/agents/fleet.toml", "--spool-dir", f"{folder}/spool", "--seed", str(SEED),
                "--faults", f"{folder}/faults.json", "--labels", str(labels),
            )
        )  # fmt: skip
        time.sleep(seconds)
        result = {which: judged(stub, labels if which == "agents" else pages) for which, (stub, _) in stubs.items()}
        result["blind"] = blind(stubs["default"][0], "r01n01")
        return result | {"seconds": seconds, "load": os.getloadavg()[0], "when": when()}


def judged(stub: FleetStub, labels: Path) -> dict[str, Any]:
    reply = stub.ListIncidents(pb.ListIncidentsRequest(state="all", limit=5000), timeout=60)
    incidents = [from_json(Incident, text) for text in reply.incidents_json]
    truth = [label_of(json.loads(line)) for line in labels.read_text().splitlines()]
    status = stub.GetStatus(pb.StatusRequest(), timeout=60)
    return scored(truth, incidents) | {"reporting": status.nodes_reporting, "troubles": list(status.troubles)}


def scored(truth: Sequence[Label], incidents: Sequence[Incident]) -> dict[str, Any]:
    found = [found_of(incident_report(incident)) for incident in incidents]
    result: Score = score(truth, found, 1.0)
    rows = {}
    for label in truth:
        named = sorted({f"{f.kind}/{f.cause}" for f in found if counts(f) and covers(label, f)})
        rows[f"{label.kind}/{label.cause}"] = {"s": result.delays_of.get(label.id), "as": named}
    drains = [i for i in incidents if i.action in (RecommendedAction.DRAIN, RecommendedAction.ISOLATE)]
    return {
        "faults": rows, "false": [f"{f.kind}/{f.cause}" for f in result.false], "drains": len(result.false_drains),
        "asked": len(drains),
    }  # fmt: skip


def blind(stub: FleetStub, node: str) -> dict[str, str]:
    inventory = stub.GetNode(pb.NodeRequest(node=node), timeout=60).inventory
    return {key: text for key, text in sorted(inventory.items()) if key.startswith("scrape.")}


def cost(nodes: int, seconds: float) -> dict[str, Any]:
    """Return the CPU of a collector and its scraping process over nodes with two pages each, every 15 s."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="scrape-")))
        stack.enter_context(serving(folder, NODES))
        stub, _ = stack.enter_context(collecting(folder / "full", "full", nodes, 15.0))
        wait_until(lambda: stub.GetStatus(pb.StatusRequest(), timeout=60).nodes_reporting >= nodes, "all report", 300)
        children = {_name(pid): pid for pid in _below(os.getpid())}
        scraper, collector = children["scrape"], children["collector"]
        before, began = (_cpu_s(scraper), _cpu_s(collector)), time.monotonic()
        rows = stub.GetStatus(pb.StatusRequest(), timeout=60).samples_stored
        time.sleep(seconds)
        passed = time.monotonic() - began
        stored = stub.GetStatus(pb.StatusRequest(), timeout=60).samples_stored - rows
        return {
            "nodes": nodes, "pages": 2 * nodes, "interval_s": 15, "seconds": round(passed),
            "scrape_cores": round((_cpu_s(scraper) - before[0]) / passed, 3),
            "collector_cores": round((_cpu_s(collector) - before[1]) / passed, 3),
            "values_per_s": round(stored / passed), "load": os.getloadavg()[0],
            "scrape_mb": round(_rss(scraper) / 2**20),
        }  # fmt: skip


def page_cpu() -> dict[str, Any]:
    """Return the process time that one node's pages take: parsed, mapped, packed."""
    fleet = SimulatedFleet(build_fleet(4, SEED), SEED, [], 1_800_000_000_000)
    pages = FleetPages(fleet)
    pages.step(10.0)
    texts = pages.gpus(0, "full"), pages.node(0)
    tables = table("dcgm"), table("node")
    mappers, messages = [PageMapper(of) for of in tables], NodeMessages("n")
    passed = []
    for number in range(60):
        began, ts_ms = time.process_time(), fleet.start_ms + 15_000 * number
        found = mappers[0].read(texts[0], ts_ms)
        found.add(mappers[1].read(texts[1], ts_ms))
        messages.add(ts_ms, found, list(tables), 2, 0)
        passed.append(time.process_time() - began)
    middle = statistics.median(passed)
    return {
        "ms": round(middle * 1000, 1), "bytes": [len(text) for text in texts],
        "cores_1000": round(middle * 1000 / 15, 2),
    }  # fmt: skip


def _below(pid: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            child, parent = int(path.parent.name), int(path.read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            continue
        if parent == pid:
            found += [child, *_below(child)]
    return found


def _name(pid: int) -> str:
    try:
        line = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return ""
    return "scrape" if b"scrape.process" in line else "collector" if b"drover_collector.main" in line else ""


def _cpu_s(pid: int) -> float:
    parts = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(parts[11]) + int(parts[12])) / os.sysconf("SC_CLK_TCK")


def _rss(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def page(data: dict[str, Any]) -> str:
    """Return the evidence page."""
    found = data["found"]
    head = " | ".join(RUNS.values())
    happened = len(found["agents"]["faults"])
    lines = [
        "# Without the agent", "",
        "<!-- Written by benchmarks/bench_scrape.py. -->", "",
        f"{NODES} simulated nodes of 8 GPUs, {happened} injected faults, judged by four engines: with the values,",
        "events and jobs that agents report, and by pages that are read every 10 s: of node_exporter, and",
        "of dcgm-exporter or AMD's device-metrics-exporter. The pages are rendered as text, and parsed and",
        "mapped by the collector's own code: dcgm-exporter's with all fields that Drover's table knows, or",
        "with its default fields and two of profiling. One fleet, one seed, time as simulated. A delay is",
        "from the fault's start to the first warning of a kind that fits.", "",
        "AMD's column is the same fleet with AMD's page, as no machine with AMD's GPUs was at hand: its",
        "temperatures and powers are those of NVIDIA's boards. CRC errors of an NVLink are drawn as",
        "corrected errors of XGMI, and XID 74 as an uncorrected one. No other XID and no row remap is on",
        "that page: they are NVIDIA's own.", "",
        f"| fault | {head} |", "| --- |" + " --- |" * len(RUNS),
    ]  # fmt: skip
    names = {f"{kind}/{cause}": None for kind, cause, *_ in FAULTS}
    for name in names:
        if not any(name in found[which]["faults"] for which in RUNS):
            continue  # no job ran there
        cells = [_cell(found[which]["faults"].get(name)) for which in RUNS]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    total = [sum(row["s"] is not None for row in found[which]["faults"].values()) for which in RUNS]
    lines += [f"| **found** | {' | '.join(map(str, total))} |"]
    lines += [f"| **false warnings** | {' | '.join(str(len(found[which]['false'])) for which in RUNS)} |"]
    lines += [f"| **incidents that ask for a drain** | {' | '.join(str(found[which]['asked']) for which in RUNS)} |"]
    lines += [f"| **false drains** | {' | '.join(str(found[which]['drains']) for which in RUNS)} |", ""]
    for which, title in RUNS.items():
        if found[which]["false"]:
            lines += [f"False warnings, {title}: {', '.join(found[which]['false'])}.", ""]
    lines += ["What shows only in the kernel log or in a job's own steps stands on no page. A node that is silent",
              "is reported without a drain, since its exporters may be down alone; and so is a GPU that a page",
              "lacks, since an exporter may be set to leave it out.", "",
              "## Who is blind, as a node says it", "",
              "Of a node with the default fields, as its page and `drover node` show it:", "",
              "| entry | text |", "| --- | --- |"]  # fmt: skip
    lines += [f"| `{key}` | {text} |" for key, text in found["blind"].items()]
    lines += ["", "Of a node with AMD's exporter:", "", "| entry | text |", "| --- | --- |"]
    lines += [f"| `{key}` | {text} |" for key, text in found["blind_amd"].items()]
    parts = _live_part(data.get("live")), _cpu_part(data.get("cpu"), "cost" in data), _cost_part(data.get("cost"))
    return "\n".join([*lines, *(line for part in parts for line in wrapped(part))]) + "\n"


def _live_part(found: dict[str, Any] | None) -> list[str]:
    if found is None:
        return []
    counted = {
        "faults that began": [len(found[which]["faults"]) for which in LIVE],
        "**found**": [sum(r["s"] is not None for r in found[which]["faults"].values()) for which in LIVE],
        "**false warnings**": [len(found[which]["false"]) for which in LIVE],
        "**incidents that ask for a drain**": [found[which]["asked"] for which in LIVE],
        "**false drains**": [found[which]["drains"] for which in LIVE],
        "nodes that report at the end": [found[which]["reporting"] for which in LIVE],
    }
    return [
        "", "## The same in real time", "",
        f"Three real collectors for {found['seconds']:g} s, one with 64 simulated agents, two that read the pages of",
        f"a real HTTP server (`--live`, {found['when']}; load of the machine, 2 cores, {found['load']:.1f}):", "",
        f"| | {' | '.join(LIVE.values())} |", "| --- |" + " --- |" * len(LIVE),
        *(f"| {name} | {' | '.join(map(str, row))} |" for name, row in counted.items()),
    ]  # fmt: skip


def _cpu_part(spent: dict[str, Any] | None, has_cost: bool) -> list[str]:
    if spent is None:
        return []
    first, second = spent["bytes"]
    whole = ["A collector with 1,000 targets was not measured as a whole: no quiet machine was at hand",
             "(`--cost` does it)."]  # fmt: skip
    return [
        "", "## CPU", "",
        f"One node's pages ({first:,} and {second:,} bytes) take {spent['ms']} ms of CPU to parse, map and",
        f"pack (median of 60). That is {spent['cores_1000']} of a core for 1,000 nodes every 15 s, without the",
        "network, in a process of its own.", *([] if has_cost else whole),
    ]  # fmt: skip


def _cost_part(spent: dict[str, Any] | None) -> list[str]:
    if spent is None:
        return []
    return [
        "", "## Cost", "",
        f"{spent['nodes']:,} nodes with {spent['pages']:,} pages, each read every {spent['interval_s']} s for"
        f" {spent['seconds']} s:", "",
        "| | |", "| --- | --- |",
        f"| CPU of the process that reads pages | {spent['scrape_cores']} cores |",
        f"| CPU of the collector, all of it | {spent['collector_cores']} cores |",
        f"| values stored a second | {spent['values_per_s']:,} |",
        f"| memory of the process that reads pages | {spent['scrape_mb']} MB |",
        f"| load of the machine (2 cores) meanwhile | {spent['load']:.1f} |",
    ]  # fmt: skip


def _cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return "did not happen"
    if row["s"] is None:
        return "not found"
    return f"{row['s']:.0f} s: {', '.join(row['as'])}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=540.0)
    parser.add_argument("--live", action="store_true")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--cost", action="store_true")
    parser.add_argument("--nodes", type=int, default=1000, help="of --cost")
    parser.add_argument("--no-write", action="store_true")
    args = parser.parse_args()
    data: dict[str, Any] = json.loads(DATA.read_text()) if DATA.is_file() else {}
    key = "cpu" if args.cpu else "cost" if args.cost else "live" if args.live else "found"
    if args.cpu:
        data["cpu"] = page_cpu()
    elif args.cost:
        data["cost"] = cost(args.nodes, args.seconds)
    elif args.live:
        data["live"] = found_in(args.seconds)
    else:
        data["found"] = replayed(args.seconds)
    print(json.dumps(data[key]))
    if not args.no_write:
        DATA.write_text(json.dumps(data, indent=1) + "\n")
        if "found" in data:
            PAGE.write_text(page(data))


if __name__ == "__main__":
    main()

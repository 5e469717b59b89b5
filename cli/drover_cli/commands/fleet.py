"""`drover fleet discover | diff | adopt`: write the fleet file from what is there, compare the two, adopt a node."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from drover_cli import client
from drover_cli.errors import CliError
from drover_cli.output import ago, plain, print_json, print_table, say
from drover_proto import fleet_methods as methods
from drover_proto import fleet_pb2 as pb

if TYPE_CHECKING:
    from drover_cli.fleet.sources import Found, Nodes

HELP = "write the fleet file from what reports and from schedulers, or compare it with them"
RUN_S = 60.0  # for a scheduler's answer
SILENT_MS = 60_000
RUNS = "-"  # in the place of a file: run the program
SOURCES = {
    "slurm": ("scontrol", "-o", "show", "node"),
    "kubernetes": ("kubectl", "get", "nodes", "-o", "json"),
    "ansible": ("ansible-inventory", "--list"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parts = parser.add_subparsers(dest="part", required=True)
    discover = parts.add_parser(
        "discover", help="print a fleet file made of what reports, Slurm, Kubernetes and an Ansible inventory"
    )
    diff = parts.add_parser("diff", help="what the fleet file says and what reports; exit code 1 if they differ")
    adopt = parts.add_parser(
        "adopt",
        help="take a node that reports into the fleet, without the fleet file; until then nothing is done to it",
    )
    client.add_arguments(adopt)
    adopt.add_argument("node", metavar="NODE", help="its name; `drover fleet diff` lists those that report")
    for key in ("rack", "leaf", "pool", "sku"):
        adopt.add_argument(f"--{key}", default="", help="as in the fleet file; left out: not known")
    adopt.add_argument("--gpus", type=int, help="how many GPUs it has (default: as many as report)")
    adopt.add_argument("--forget", action="store_true", help="end its adoption")
    adopt.add_argument("--why", required=True, help="the reason, kept with your certificate's name")
    adopt.add_argument("--json", action="store_true", help="one JSON object")
    parts.metavar = "{" + ",".join(parts.choices) + "}"
    for part in (discover, diff):
        client.add_arguments(part)
        for name, words in SOURCES.items():
            part.add_argument(
                f"--{name}", nargs="?", const=RUNS, metavar="FILE",
                help=f"also what `{' '.join(words)}` prints; without FILE it is run",
            )  # fmt: skip
        part.add_argument("--topology", metavar="FILE", help="also Slurm's topology.conf: leaf switches, or blocks")
    discover.add_argument("--offline", action="store_true", help="ask no collector: only what is named here")
    discover.add_argument(
        "--new", action="store_true", help="only nodes that report and are not in the file: to append"
    )
    into = discover.add_mutually_exclusive_group()
    into.add_argument("--output", "-o", type=Path, metavar="FILE", help="write a new file instead")
    into.add_argument("--json", action="store_true", help="one JSON object per node instead of a fleet file")
    diff.add_argument("--json", action="store_true", help="one JSON object per difference")


def run(args: argparse.Namespace) -> int:
    return {"discover": _discover, "diff": _diff, "adopt": _adopt}[args.part](args)


def _adopt(args: argparse.Namespace) -> int:
    if args.gpus is not None and args.gpus < 0:
        raise CliError("--gpus: give a number from 0 on")
    request = pb.AdoptRequest(
        node=args.node, rack=args.rack, leaf=args.leaf, pool=args.pool, sku=args.sku, gpus=args.gpus, why=args.why,
        forget=args.forget,
    )  # fmt: skip
    with client.connect(args) as fleet:
        detail = fleet.call(methods.ADOPT_NODE, request).detail
    if args.json:
        print_json({"node": args.node, "detail": detail})
    else:
        print(plain(detail))
    return 0


def _discover(args: argparse.Namespace) -> int:
    from drover_cli.fleet.files import tables

    reporting, others = [] if args.offline else _reporting(args), _others(args)
    nodes = _writable(_merged(reporting, others))
    _say_counts_differ(reporting, others)
    _say_two_names(nodes)
    if args.new:
        fresh = {row.name for row in reporting if not row.in_file}
        nodes = {name: found for name, found in nodes.items() if name in fresh}
    if not nodes:
        print(f"no node: nothing reports{' that is not in the file' if args.new else ''}", file=sys.stderr)
        return 1
    if args.json:
        for name, found in sorted(nodes.items()):
            print_json({"node": name, **asdict(found)})
        return 0
    text = "\n" + tables(nodes)  # the file that it is appended to may end without a new line
    if not args.new:
        text = 'name = ""  # of the fleet, in messages and on the console\n' + text
    if args.output is None:
        sys.stdout.write(text)
    else:
        try:
            with args.output.open("x", encoding="utf-8") as file:  # a file that people mend is not replaced
                file.write(text)
        except OSError as error:
            raise CliError(f"{args.output}: {error.strerror}; give the name of a new file") from None
    count, plural = sum(found.gpus or 0 for found in nodes.values()), "" if len(nodes) == 1 else "s"
    print(
        f"{len(nodes)} node{plural}, {count} GPUs known; check places and models", file=sys.stderr
    )  # not into the file
    return 0


def _writable(nodes: Nodes) -> Nodes:
    """Return what a fleet file can hold, and say what is left out."""
    from drover_core.model.fleet import MOST_GPUS, is_node_name

    strange = sorted(name for name in nodes if not is_node_name(name))
    if strange:
        print(
            f"left out: {len(strange)} with names that no node can have: {', '.join(map(ascii, strange[:5]))}",
            file=sys.stderr,
        )
    crowded = sorted(name for name, found in nodes.items() if (found.gpus or 0) > MOST_GPUS)
    if crowded:
        print(f"more than {MOST_GPUS} GPUs, so unknown: {', '.join(map(ascii, crowded[:5]))}", file=sys.stderr)
    gone = set(strange)
    return {
        name: replace(found, gpus=None) if (found.gpus or 0) > MOST_GPUS else found
        for name, found in nodes.items()
        if name not in gone
    }


def _other_count(row: pb.ReportingNode, says: Found | None) -> str:
    """Return what others say of a node's GPUs, if it is not what its agent counts; "": it is, or they do not know."""
    if not row.gpus_reported or says is None or says.gpus in (None, 0, row.gpus_reported):
        return ""
    return f"{says.gpus} by a scheduler or inventory"


def _say_counts_differ(reporting: list[pb.ReportingNode], others: Nodes) -> None:
    """Name new nodes that may have lost a GPU: a file with the agents' count would never miss it."""
    odd = [
        f"{row.name!a} ({row.gpus_reported} report, {said})"
        for row in reporting
        if not row.in_file and (said := _other_count(row, others.get(row.name)))
    ]
    if odd:
        more = f" and {len(odd) - 5} more" if len(odd) > 5 else ""
        print(f"counts of GPUs differ, the one that reports is written: {', '.join(odd[:5])}{more}", file=sys.stderr)


def _say_two_names(nodes: Iterable[str]) -> None:
    """Name nodes that stand there twice, by a short and a full name: the one that no agent uses would be silent."""
    known = set(nodes)
    twice = sorted(f"{s} and {name}" for name in known if (s := name.partition(".")[0]) != name and s in known)
    if twice:
        more = f" and {len(twice) - 5} more" if len(twice) > 5 else ""
        print(
            f"one node by two names? {', '.join(twice[:5])}{more}: keep the one that its agent and its scheduler use",
            file=sys.stderr,
        )


def _reporting(args: argparse.Namespace) -> list[pb.ReportingNode]:
    with client.connect(args) as fleet:
        return list(fleet.call(methods.LIST_REPORTING, pb.ReportingRequest()).nodes)


def _others(args: argparse.Namespace) -> Nodes:
    """Return what Slurm, Kubernetes and Ansible say, as far as they were named. The first one counts more."""
    from drover_cli.fleet import sources

    readers: dict[str, Callable[[str], Nodes]] = {
        "slurm": sources.of_scontrol, "kubernetes": sources.of_kubernetes, "ansible": sources.of_ansible,
    }  # fmt: skip
    found: list[Nodes] = []
    for name, read in readers.items():
        if (given := getattr(args, name)) is not None:
            found.append(read(_output_of(SOURCES[name]) if given == RUNS else _content(given)))
    if args.topology is not None:
        found.insert(0, sources.of_topology(_content(args.topology)))
    nodes: Nodes = {}
    for each in found:
        for node, says in each.items():
            nodes[node] = nodes.get(node, sources.Found()).over(says)
    return nodes


def _content(path: str) -> str:
    try:
        return Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CliError(f"{path}: {getattr(error, 'strerror', '') or 'it is not text'}") from None


def _output_of(words: tuple[str, ...]) -> str:
    try:
        done = subprocess.run(
            words, capture_output=True, timeout=RUN_S, check=True, stdin=subprocess.DEVNULL,
            encoding="utf-8", errors="replace",  # people's reasons and comments
        )  # fmt: skip
    except FileNotFoundError:
        raise CliError(f"{words[0]} is not here; run `{' '.join(words)}` where it is, and give its output") from None
    except subprocess.CalledProcessError as error:
        raise CliError(f"{words[0]}: {' '.join(str(error.stderr).split()) or f'exit {error.returncode}'}") from None
    except subprocess.TimeoutExpired:
        raise CliError(f"{words[0]} does not answer within {RUN_S:.0f} s") from None
    return done.stdout


def _merged(reporting: list[pb.ReportingNode], others: Nodes) -> Nodes:
    """Return each node: what stands in the file, else what others say; GPUs as the agent counts them.

    Nodes that a scheduler has without GPUs are left out: login nodes, control planes.
    """
    from drover_cli.fleet.sources import Found

    nodes = {name: found for name, found in others.items() if found.gpus != 0}
    for row in reporting:
        filed = Found(row.rack, row.leaf, row.pool, row.sku, row.gpus if row.in_file else None)
        counted = Found(sku=_sku(row.model), gpus=row.gpus_reported or None)
        said = nodes.get(row.name, Found())
        if row.in_file:
            nodes[row.name] = filed.over(said).over(counted)
        elif row.HasField("gpus_reported"):
            nodes[row.name] = counted.over(said)
    return nodes


def _sku(model: str) -> str:
    return model.removeprefix("NVIDIA ").strip()


class Difference(NamedTuple):
    node: str
    what: str
    in_file: str
    found: str


def _diff(args: argparse.Namespace) -> int:
    reporting, others = _reporting(args), _others(args)
    now_ms = round(time.time() * 1000)
    found = [line for row in reporting for line in _differences(row, others.get(row.name), now_ms)]
    known = {row.name for row in reporting}
    found += [
        Difference(name, "node", "-", "a scheduler or inventory has it; it does not report")
        for name, says in sorted(others.items())
        if name not in known and says.gpus != 0
    ]
    if args.json:
        for line in found:
            print_json(line._asdict())
    elif found:
        print_table(["NODE", "WHAT", "FILE", "FOUND"], [list(line) for line in found])
        if any(line.what == "node" and line.in_file == "-" for line in found):
            say(
                "`drover fleet adopt NODE` takes one in; `drover fleet discover --new >> fleet.toml` adds all: then"
                " restart the collector"
            )
    else:
        print(f"{len(known)} nodes: the file says what reports")
    return 1 if found else 0


def _differences(row: pb.ReportingNode, says: Found | None, now_ms: int) -> Iterator[Difference]:
    if not row.in_file:
        count = f"{row.gpus_reported} GPUs" if row.gpus_reported else "no GPU known"
        other = _other_count(row, says)
        text = f"it reports: {count} {_sku(row.model)}".rstrip()
        yield Difference(row.name, "node", "-", f"{text}; {other}" if other else text)
        return
    if row.adopted:
        yield Difference(row.name, "node", "-", "adopted; add it to the fleet file when you next change that")
    if not row.last_seen_ms:
        yield Difference(row.name, "node", "it should exist", "it has never reported")
    elif row.last_seen_ms < now_ms - SILENT_MS:
        yield Difference(row.name, "node", "it should exist", f"it last reported {ago(row.last_seen_ms, now_ms)}")
    if row.HasField("gpus_reported") and row.gpus_reported != row.gpus:
        yield Difference(row.name, "gpus", str(row.gpus), f"{row.gpus_reported} report")
    for key in ("rack", "leaf", "pool") if says is not None else ():
        filed, other = getattr(row, key), getattr(says, key)
        if other and other != filed:
            yield Difference(row.name, key, filed or "-", other)
    if says is not None and says.gpus is not None and says.gpus != row.gpus:
        yield Difference(row.name, "gpus", str(row.gpus), f"{says.gpus} by a scheduler or inventory")

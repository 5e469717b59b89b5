"""`drover config list|use|current`: the clusters of the command line, and which of them it asks."""

from __future__ import annotations

import argparse

from drover_cli import contexts
from drover_cli.errors import CliError
from drover_cli.output import print_json, print_table

HELP = "clusters that this command knows, and which it asks where none is named"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parts = parser.add_subparsers(dest="part", required=True, metavar="{list,use,current}")
    listed = parts.add_parser("list", help="all clusters; * is the current one")
    listed.add_argument("--json", action="store_true", help="one JSON object per cluster")
    chosen = parts.add_parser("use", help="make a cluster the current one")
    chosen.add_argument("name", metavar="NAME", help="of the cluster")
    chosen.add_argument("--json", action="store_true", help="one JSON object")
    current = parts.add_parser("current", help="print the current cluster's name; exit code 1 where there is none")
    current.add_argument("--json", action="store_true", help="one JSON object")


def run(args: argparse.Namespace) -> int:
    return {"list": _list, "use": _use, "current": _current}[args.part](args)


def _list(args: argparse.Namespace) -> int:
    found = contexts.known()
    if args.json:
        for cluster in found.clusters:
            current = cluster.name == found.current
            print_json({"cluster": cluster.name, "collector": cluster.collector, "current": current})
        return 0
    if not found.clusters:
        raise CliError(f"no cluster is known: {contexts.path()} has none (docs/how-to/clusters.md shows one)")
    print_table(["", "CLUSTER", "COLLECTOR", "CERTIFICATE"], contexts.rows_of(found))
    return 0


def _use(args: argparse.Namespace) -> int:
    contexts.use(args.name)
    cluster = contexts.known().find(args.name)
    if args.json:
        print_json({"cluster": args.name, "current": True})
    elif cluster is not None:
        print(f"commands now ask cluster {cluster.name} ({cluster.collector})")
    return 0


def _current(args: argparse.Namespace) -> int:
    current = contexts.known().current
    if args.json:
        print_json({"cluster": current or None, "current": bool(current)})
    else:
        print(current or "none: `drover config use NAME` chooses one")
    return 0 if current else 1

"""`drover top`: the whole fleet in one terminal, live: health of every GPU, what is wrong, which jobs it hurts."""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from typing import TYPE_CHECKING

from drover_cli import client
from drover_cli.arguments import finite
from drover_cli.commands import status
from drover_cli.errors import CliError, UnreachableError
from drover_cli.extras import needs
from drover_cli.output import incident_json, message_json, print_json
from drover_core.model.events import Incident, from_json
from drover_proto import fleet_methods as methods
from drover_proto import fleet_pb2 as pb

if TYPE_CHECKING:
    from drover_cli.commands.top_screen import ScreenFacts

HELP = "the whole fleet live in one terminal; Ctrl-C ends it"
LISTED = 100  # of each kind; a terminal has no room for more
WIDTH, HEIGHT = 100, 40  # where there is no terminal
LEAST_S, MOST_S = 0.5, 60.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    client.add_arguments(parser)
    parser.add_argument("--interval", type=finite, default=2.0, help="seconds between two looks (default 2)")
    parser.add_argument("--once", action="store_true", help="print one frame and end")
    parser.add_argument("--json", action="store_true", help="one JSON object of what a frame shows, and end")


def run(args: argparse.Namespace) -> int:
    if not LEAST_S <= args.interval <= MOST_S:
        raise CliError(f"--interval must be from {LEAST_S:g} to {MOST_S:g} seconds")
    if args.json:
        print_json(_as_json(_look(args)))
        return 0
    with needs("collector"):
        from rich.console import Console

        from drover_cli.commands.top_screen import frame
    if args.once:
        tty = sys.stdout.isatty()
        size = shutil.get_terminal_size((WIDTH, HEIGHT)) if tty else None
        console = Console(width=size.columns if size else WIDTH, highlight=False, no_color=not tty)
        console.print(frame(_look(args), console.width, size.lines - 1 if size else HEIGHT))
        return 0
    if not sys.stdout.isatty():
        raise CliError("this is no terminal: give --once for one frame, or --json")
    return _live(args)


def _live(args: argparse.Namespace) -> int:
    """Until Ctrl-C. What is no longer received stays on the screen, with since when."""
    from rich.console import Console
    from rich.live import Live

    from drover_cli.commands.top_screen import frame

    facts = _look(args)  # nothing there: an error, and no screen
    console = Console(highlight=False)
    try:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                live.update(frame(facts, console.width, console.height), refresh=True)
                time.sleep(args.interval)
                try:
                    facts = _look(args)
                except UnreachableError as error:
                    facts.trouble = (
                        f"since {time.strftime('%H:%M:%S')}: {error}" if not facts.trouble else facts.trouble
                    )
    except KeyboardInterrupt:  # the usual way to end it
        return 0


def _look(args: argparse.Namespace) -> ScreenFacts:
    from drover_cli.commands.top_screen import ScreenFacts

    with client.connect(args) as fleet:
        return ScreenFacts(
            fleet.call(methods.GET_STATUS, pb.StatusRequest()),
            fleet.call(methods.GET_LAYOUT, pb.LayoutRequest()),
            fleet.call(methods.GET_PICTURE, pb.PictureRequest(color_by="health")),
            [
                from_json(Incident, text)
                for text in fleet.call(methods.LIST_INCIDENTS, pb.ListIncidentsRequest(limit=LISTED)).incidents_json
            ],
            list(fleet.call(methods.LIST_JOBS, pb.ListJobsRequest(limit=LISTED)).jobs),
            list(fleet.call(methods.LIST_NODES, pb.ListNodesRequest(limit=LISTED)).nodes),
            round(time.time() * 1000),
        )


def _as_json(facts: ScreenFacts) -> dict[str, object]:
    return {
        "status": {name: value for name, value in status.as_json(facts.status).items() if name != "tables"},
        "incidents": [incident_json(incident) for incident in facts.incidents],
        "jobs": [message_json(row) for row in facts.jobs],
        "nodes": [
            {"node": n.name, "rack": n.rack, "health": n.health, "reason": n.reason, "gpu_health": list(n.gpu_health)}
            for n in facts.nodes
        ],
    }

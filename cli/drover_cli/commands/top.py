"""`drover top`: the whole fleet in one terminal, live: health of every GPU, what is wrong, which jobs it hurts."""

from __future__ import annotations

import argparse
import contextlib
import shutil
import sys
import time
from typing import TYPE_CHECKING

import grpc

from drover_cli import client
from drover_cli.arguments import finite
from drover_cli.commands import status
from drover_cli.errors import CliError
from drover_cli.extras import needs
from drover_cli.output import cut, incident_json, message_json, print_json
from drover_core.model.events import Incident, from_json
from drover_proto import fleet_methods as methods
from drover_proto import fleet_pb2 as pb

if TYPE_CHECKING:
    from rich.console import RenderableType

    from drover_cli.commands import top_keys
    from drover_cli.commands.top_lists import ListFacts
    from drover_cli.commands.top_screen import ScreenFacts

HELP = "the whole fleet live in one terminal: lists to go through, sort and filter, down to a node's GPUs; q ends it"
LISTED = 100  # of each kind; a terminal has no room for more
ASK_S = 4.0
ROWS = 1000  # of a list that one goes through; a filter finds the others
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
    if not (sys.stdout.isatty() and sys.stdin.isatty()):
        raise CliError("this is no terminal: give --once for one frame, or --json")
    return _live(args)


def _live(args: argparse.Namespace) -> int:
    """Until q or Ctrl-C. What is no longer received stays on the screen, with since when."""
    from rich.console import Console
    from rich.live import Live

    from drover_cli.commands import top_keys

    args.deadline_s = ASK_S  # a collector that hangs must not hold up the keys for long
    with client.connect(args) as fleet:
        source = _Source(fleet)
        source.ask(top_keys.Look())  # nothing there: an error, and no screen
        look, console = top_keys.Look(), Console(highlight=False)
        with (
            contextlib.suppress(KeyboardInterrupt),  # the usual way to end it
            top_keys.keyboard() as terminal,
            Live(console=console, screen=True, auto_refresh=False) as live,
        ):
            next_s = time.monotonic() + args.interval
            while not look.over:
                live.update(source.drawn(look, console.width, console.height), refresh=True)
                keys = top_keys.pressed(terminal, next_s - time.monotonic())
                before = look
                for key in keys:
                    look = top_keys.press(look, key, source.nodes(look))
                if _asks_again(before, look) or not keys:
                    source.try_ask(look, args)
                    next_s = time.monotonic() + args.interval
    return 0


def _asks_again(before: top_keys.Look, after: top_keys.Look) -> bool:
    """Whether the collector has to be asked for it; to go up and down in a list it has not."""
    return (before.view, before.node, before.contains, before.order) != (
        after.view, after.node, after.contains, after.order
    )  # fmt: skip


class _Source:
    """The last answers for the screen that is looked at. Only that is asked for; the layout once for each version."""

    def __init__(self, fleet: client.FleetClient) -> None:
        self._fleet = fleet
        self._layout = pb.Layout()
        self._facts: ScreenFacts | None = None
        self._lists: ListFacts | None = None

    def ask(self, look: top_keys.Look) -> None:
        """
        Raises:
            grpc.RpcError: the collector does not answer.
        """
        from drover_cli.commands.top_lists import ListFacts

        status, now_ms = self._fleet.call(methods.GET_STATUS, pb.StatusRequest()), round(time.time() * 1000)
        if look.view == "fleet":
            self._facts, self._lists = self._fleet_facts(status, now_ms), None
            return
        made = ListFacts(status, now_ms, of=(look.view, look.node))
        if look.view == "nodes":
            request = pb.ListNodesRequest(contains=look.contains, limit=ROWS, order=look.sorted_by())
            reply = self._fleet.call(methods.LIST_NODES, request)
            made.nodes, made.total = list(reply.nodes), reply.total
        elif look.view == "incidents":
            made.incidents = _incidents(self._fleet, ROWS)
        elif look.view == "jobs":
            made.jobs = list(self._fleet.call(methods.LIST_JOBS, pb.ListJobsRequest(limit=ROWS)).jobs)
        else:
            made.node = self._fleet.call(methods.GET_NODE, pb.NodeRequest(node=look.node))
        self._lists, self._facts = made, None

    def try_ask(self, look: top_keys.Look, args: argparse.Namespace) -> None:
        """As `ask`; where the collector does not answer, what came before stays and is marked as old."""
        try:
            self.ask(look)
        except (grpc.RpcError, CliError) as error:
            said = error if isinstance(error, CliError) else client.error_of(error, args)
            since = f"since {time.strftime('%H:%M:%S')}: {said}"
            for facts in (self._facts, self._lists):
                if facts is not None and not facts.trouble:
                    facts.trouble = since

    def nodes(self, look: top_keys.Look) -> list[str]:
        from drover_cli.commands.top_lists import nodes_of

        return nodes_of(self._lists, look) if self._lists is not None else []

    def drawn(self, look: top_keys.Look, width: int, height: int) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        from drover_cli.commands.top_keys import HELP
        from drover_cli.commands.top_lists import screen
        from drover_cli.commands.top_screen import frame

        if self._lists is not None:
            return screen(self._lists, look, width, height)
        foot = Text(cut(HELP, width), style="dim", no_wrap=True)
        return Group(frame(self._facts, width, height - 1), foot) if self._facts is not None else foot

    def _fleet_facts(self, status: pb.Status, now_ms: int) -> ScreenFacts:
        from drover_cli.commands.top_screen import ScreenFacts

        picture = self._fleet.call(methods.GET_PICTURE, pb.PictureRequest(color_by="health"))
        if picture.layout_version != self._layout.version:
            self._layout = self._fleet.call(methods.GET_LAYOUT, pb.LayoutRequest())
        return ScreenFacts(
            status, self._layout, picture, _incidents(self._fleet, LISTED),
            list(self._fleet.call(methods.LIST_JOBS, pb.ListJobsRequest(limit=LISTED)).jobs),
            list(self._fleet.call(methods.LIST_NODES, pb.ListNodesRequest(limit=LISTED)).nodes),
            now_ms,
        )  # fmt: skip


def _incidents(fleet: client.FleetClient, limit: int) -> list[Incident]:
    reply = fleet.call(methods.LIST_INCIDENTS, pb.ListIncidentsRequest(limit=limit))
    return [from_json(Incident, text) for text in reply.incidents_json]


def _look(args: argparse.Namespace) -> ScreenFacts:
    with client.connect(args) as fleet:
        source = _Source(fleet)
        return source._fleet_facts(fleet.call(methods.GET_STATUS, pb.StatusRequest()), round(time.time() * 1000))


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

"""Entry point of `drover`.

Exit codes: 0 done; 1 refused, or done and the answer is no; 2 bad input; 3 no answer of the collector; 4 nothing has
this name; 130 interrupted.
"""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Sequence

from drover_cli import contexts, forms
from drover_cli.commands import NAMES, commands
from drover_cli.errors import CliError, visible
from drover_cli.help import GroupedParser, version
from drover_core import interrupts


def build_parser() -> argparse.ArgumentParser:
    parser = GroupedParser(prog="drover", description="Health and observability for GPU fleets.")
    parser.add_argument("--version", action="version", version=version())
    parser.add_argument("--cluster", metavar="NAME", help="ask this cluster: `drover config list` shows all")
    subparsers = parser.add_subparsers(
        dest="command", required=True, metavar="COMMAND", parser_class=argparse.ArgumentParser
    )
    for command in commands():
        sub = subparsers.add_parser(command.name, help=command.help, description=command.help)
        command.add_arguments(sub)
        forms.add_arguments(command.name, sub)
        sub.set_defaults(run=command.run, drover=parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    interrupts.enable_sigint()
    given = list(sys.argv[1:] if argv is None else argv)
    try:
        _known(given)
        args, rest = build_parser().parse_known_args(given)
        if rest:  # argparse itself would print the usage of bare `drover`
            raise CliError(f"{args.command} takes no {rest[0]!r}; `drover {args.command} --help` lists what it takes")
        if hasattr(args, "collector_env"):  # it asks a collector
            contexts.resolve(args)
        with forms.chosen(args):
            return forms.watched(args, lambda: int(args.run(args)))
    except CliError as error:
        lines = map(visible, str(error).split("\n"))
        print("drover: " + "\n".join(lines), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("drover: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output, such as head, has left: not an error
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _known(given: Sequence[str]) -> None:
    """
    Raises:
        CliError: no command, or one that there is not; argparse would print all their names as one line.
    """
    if not given:
        raise CliError("give a command: `drover --help` lists them; `drover status` says how the fleet is")
    name = next(iter(given[2:] if given[0] == "--cluster" else given), "-")
    if name not in NAMES and not name.startswith("-"):
        near = difflib.get_close_matches(name, NAMES, 1)
        meant = f"did you mean `drover {near[0]}`?" if near else "`drover --help` lists all"
        raise CliError(f"no command {name!r}; {meant}")


if __name__ == "__main__":
    sys.exit(main())

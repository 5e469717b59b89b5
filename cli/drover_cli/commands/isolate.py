"""`drover isolate NODE --why TEXT`: a node without work, now."""

from __future__ import annotations

import argparse

from drover_cli import acting

HELP = "take a node out of service at once: its jobs are requeued or evicted"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    acting.add_arguments(parser, "even where the guard's caps say no")
    parser.epilog = "For one GPU there is drover drain NODE --gpu SLOT: its pod is never evicted."
    acting.add_save_first(parser)


def run(args: argparse.Namespace) -> int:
    return acting.run(args, "isolate")

"""`drover reset NODE --why TEXT`: the GPUs of a node, reset; off unless `act.reset_command` is set."""

from __future__ import annotations

import argparse

from drover_cli import acting

HELP = "reset the GPUs of a node that is out of service, by the command of the settings"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    acting.add_arguments(parser, "also a node on which jobs may run")


def run(args: argparse.Namespace) -> int:
    return acting.run(args, "reset")

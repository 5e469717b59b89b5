"""`drover reboot NODE --why TEXT`: a node, booted again; off unless `act.reboot_command` is set."""

from __future__ import annotations

import argparse

from drover_cli import acting

HELP = "reboot a node that is out of service, by the command of the settings"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    acting.add_arguments(parser, "also a node on which jobs may run")


def run(args: argparse.Namespace) -> int:
    return acting.run(args, "reboot")

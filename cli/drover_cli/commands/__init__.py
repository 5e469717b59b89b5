"""The explicit table of subcommands, in the order that `drover --help` shows."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from keyword import iskeyword


@dataclass(frozen=True, slots=True)
class Command:
    """A subcommand's module. Its top imports only the standard library and drover_proto: `--help` must be quick."""

    name: str
    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


NAMES = (
    "status",
    "clusters",
    "doctor",
    "top",
    "node",
    "nodes",
    "find",
    "incidents",
    "job",
    "why",
    "explain",
    "runbook",
    "decisions",
    "approve",
    "reject",
    "ack",
    "assign",
    "comment",
    "ticket",
    "outcome",
    "silence",
    "silences",
    "unsilence",
    "maintenance",
    "audit",
    "policy",
    "fabric",
    "thermals",
    "capacity",
    "report",
    "conform",
    "risk",
    "probe",
    "validate",
    "drain",
    "isolate",
    "resume",
    "reset",
    "reboot",
    "fleet",
    "export",
    "backup",
    "restore",
    "import",
    "simulate",
    "replay",
    "score",
    "demo",
    "certs",
    "config",
    "completion",
)


def commands() -> list[Command]:
    """All subcommands."""
    modules = [import_module(f"drover_cli.commands.{name}{'_' * iskeyword(name)}") for name in NAMES]
    return [Command(name, m.HELP, m.add_arguments, m.run) for name, m in zip(NAMES, modules, strict=True)]

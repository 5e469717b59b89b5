"""`drover drain NODE --why TEXT`: no new work for a node, or for one GPU of it."""

from __future__ import annotations

import argparse

from drover_cli import acting

HELP = "take a node, or one GPU of it, out of service: no new jobs, those that run may end"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    acting.add_arguments(parser, "even where the guard's caps say no")
    acting.add_gpu(parser, "only this GPU, while its node works; Kubernetes with dynamic resource allocation can do it")
    acting.add_save_first(parser)


def run(args: argparse.Namespace) -> int:
    return acting.run(args, "drain")

"""`drover resume NODE --why TEXT`: put a node back in service."""

from __future__ import annotations

import argparse

from drover_cli import acting

HELP = "put a node or GPU back that Drover took out, after its validation; withdraw a drain that still waits for jobs"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    acting.add_arguments(parser, "at once, without validation")
    acting.add_gpu(parser, "only this GPU, which Drover isolated while its node works")


def run(args: argparse.Namespace) -> int:
    return acting.run(args, "resume")

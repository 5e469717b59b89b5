"""`drover doctor`: what is wrong with this installation, and how to mend it."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from drover_cli import client
from drover_cli.errors import CliError
from drover_cli.output import print_json
from drover_proto import fleet_methods as methods
from drover_proto import fleet_pb2 as pb

if TYPE_CHECKING:
    from drover_cli.doctor.finding import Finding
    from drover_collector.config import CollectorConfig

HELP = "what is wrong with this installation, and how to mend it: settings, certificates, store, agents, receivers"
SETTINGS = Path("/etc/drover/collector.toml")
LIMIT_S = 25.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    client.add_arguments(parser, default=None)
    parser.add_argument(
        "--config", type=Path, help=f"the collector's settings, on its machine (default {SETTINGS}, if it is there)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object")


def run(args: argparse.Namespace) -> int:
    """Exit code 1 when something is bad; what is only to be known or watched is none."""
    from drover_cli.doctor.finding import FindingState, as_text, run_all

    found = run_all(checks(args), LIMIT_S)
    bad = any(finding.state is FindingState.BAD for finding in found)
    if args.json:
        print_json({"bad": bad, "findings": [asdict(finding) for finding in found]})
    else:
        print(as_text(found))
    return int(bad)


def checks(args: argparse.Namespace) -> dict[str, Callable[[], list[Finding]]]:
    """By name; those of the settings only where there are some that load.

    Raises:
        CliError: --config names no file, or --ca, --cert and --key are not all given.
    """
    from drover_cli.doctor import own
    from drover_cli.doctor.finding import bad, ok, unknown
    from drover_collector.config import load_config
    from drover_core.settings import SettingsError

    client.tls_files(args)
    if args.config is not None and not args.config.is_file():
        raise CliError(f"--config {args.config}: no such file; give the collector's settings, or leave it out")
    path = args.config or SETTINGS
    found: dict[str, Callable[[], list[Finding]]] = {}
    config: CollectorConfig | None = None
    if path.is_file():
        try:
            config = load_config(path)
            good = ok("settings", f"{path}: all keys known, and they go together")
            found["settings"] = lambda: [good]
        except SettingsError as error:
            wrong = bad("settings", str(error), f"mend it; drover-collector check --config {path}")
            found["settings"] = lambda: [wrong]
    else:
        away = unknown("settings", f"no {path} here: files, rights and disks are not looked at", "run it there, too")
        found["settings"] = lambda: [away]
    if config is not None:
        for name in ("fleet", "enforcement", "certificates", "secrets", "ports", "store", "backups", "notifications"):
            found[name] = partial(getattr(own, name), config)
        found |= scheduler_checks(config)
        found["clock"] = clock
    address = args.collector or (own.reachable(config.api.listen) if config is not None else client.DEFAULT)
    found["collector"] = partial(collector, argparse.Namespace(**{**vars(args), "collector": address}))
    return found


def scheduler_checks(config: CollectorConfig) -> dict[str, Callable[[], list[Finding]]]:
    from drover_cli.doctor import own, probe_jobs, schedulers
    from drover_core.model.fleet import FleetError, load_toml

    names = own.actuators(config)
    found: dict[str, Callable[[], list[Finding]]] = {}
    if "slurm" in names:
        with contextlib.suppress(FleetError):  # reported by the check of the fleet
            found["slurm"] = partial(schedulers.slurm, config, load_toml(Path(config.fleet)))
    if "kubernetes" in names:
        found["kubernetes"] = partial(schedulers.kubernetes, config)
    if config.probes.slurm.on:
        with contextlib.suppress(FleetError):
            found["probe jobs"] = partial(probe_jobs.slurm, config, load_toml(Path(config.fleet)))
    return found


def clock() -> list[Finding]:
    """Whether something keeps this machine's clock in step."""
    from drover_agent.commands.check import node as check_node
    from drover_agent.commands.check.result import CheckState
    from drover_cli.doctor.finding import ok, warn

    (line,) = check_node.clock()
    return [
        ok("clock", line.text) if line.state is CheckState.OK else warn("clock", line.text, line.remedy or "chrony")
    ]


def collector(args: argparse.Namespace) -> list[Finding]:
    """All that the running collector says of itself."""
    from drover_cli.doctor import running
    from drover_cli.doctor.finding import bad

    try:
        with client.connect(args) as fleet:
            status = fleet.call(methods.GET_STATUS, pb.StatusRequest())
            system = fleet.call(methods.GET_SYSTEM, pb.SystemRequest())
    except CliError as error:
        return [bad("collector", str(error), "systemctl status drover-collector; with TLS give --ca, --cert and --key")]
    return running.findings(status, system)

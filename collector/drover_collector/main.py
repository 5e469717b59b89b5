"""The command `drover-collector run | check | config | notify-test`: its arguments and exit codes."""

from __future__ import annotations

import argparse
import asyncio
import importlib.abc
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

# gRPC's core reads this on import. Otherwise it writes log lines of its own, such as for an occupied port.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
# Read by pyarrow on import: its own memory pool keeps what was freed.
os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")

from drover_collector.app import AddressError, serve
from drover_collector.check import check
from drover_collector.config import DEFAULT_FLEET, CollectorConfig, load_config
from drover_collector.notify.factory import notifiers
from drover_collector.notify.maintenance_windows import validate_window_places
from drover_collector.notify.routes import validate_places
from drover_collector.notify.test_command import choose, send_test
from drover_collector.policy.policy import Policy
from drover_collector.store import StoreError
from drover_core import interrupts, logs
from drover_core.model.events import Severity
from drover_core.model.fleet import FleetError, FleetSpec, load_toml
from drover_core.settings import SettingsError, error_at_key, example_toml


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit code: 0 done, 1 a test message failed, 2 the settings or the start failed, 130 interrupted."""
    interrupts.enable_sigint()
    args = _parser().parse_args(argv)
    logs.configure(args.log_level)
    for name in ("clickhouse_connect", "urllib3"):  # their failures arrive as errors and are logged where handled
        logging.getLogger(name).setLevel(logging.ERROR)
    if args.command == "config":
        print(example_toml(CollectorConfig), end="")
        return 0
    try:
        config = load_config(args.config)
        found = _fleet(config)
        spec = found or FleetSpec(())
        _check_places(args.config, config, spec)
        policy = Policy.load(None if config.policy.path is None else Path(config.policy.path), config.policy.preset)
        if args.command == "check":
            return check(args.config, config, spec, policy)
        if args.command == "notify-test":
            made = choose(notifiers(config.notify, config.webhooks, spec), args.names)
            return 0 if send_test(made, Severity(args.severity), config.console.url, over=args.over) else 1
        if asyncio.run(serve(config, found, policy)):
            logging.shutdown()
            os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606  # our own command, without a shell
    except (SettingsError, FleetError, StoreError, AddressError) as error:
        print(f"drover-collector: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # before `serve` handles signals
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="drover-collector",
        description="Receives and stores telemetry, detects faults, serves the Fleet API.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, help_ in (
        ("run", "run until SIGTERM or Ctrl-C"),
        ("check", "validate settings, fleet, policy and the store's folder; opens nothing"),
        ("config", "print a commented sample of the settings"),
        ("notify-test", "send a test message to receivers, and say whether they took it"),
    ):
        command = commands.add_parser(name, help=help_, description=help_)
        command.add_argument(
            "--log-level", default="info", choices=("debug", "info", "warning", "error"), help="what to log on stderr"
        )
        if name != "config":
            command.add_argument("--config", type=Path, help="settings, TOML (default: built-in defaults)")
        if name == "notify-test":
            command.add_argument("names", nargs="*", metavar="NAME", help="receivers; none: all")
            command.add_argument("--severity", default="critical", choices=tuple(Severity), help="of the test")
            command.add_argument("--over", action="store_true", help="take the test back: send its end")
    return parser


def _fleet(config: CollectorConfig) -> FleetSpec | None:
    """Return what the fleet file says; None: there is none, and the fleet is learned from what reports.

    Raises:
        FleetError: the file that the settings name is missing, or not good.
        SettingsError: the settings need a fleet file.
    """
    path = Path(config.fleet)
    if config.fleet and (config.fleet != DEFAULT_FLEET or path.exists()):
        return load_toml(path)
    why = "write a fleet file (`drover fleet discover -o FILE`), or leave fleet empty and observe with one collector"
    if config.act.mode != "observe":
        raise SettingsError(f'fleet: act.mode "{config.act.mode}" acts on nodes that a person has listed alone: {why}')
    if not config.store.url.startswith("chdb:"):
        raise SettingsError(f"fleet: several collectors on one server need the same fleet: {why}")
    return None


def _check_places(path: Path | None, config: CollectorConfig, spec: FleetSpec) -> None:
    """
    Raises:
        SettingsError: settings name a place that the fleet file does not have.
    """
    try:
        validate_places(config.notify.route, spec)
        validate_window_places(config.maintenance, spec)
    except SettingsError as error:
        raise error_at_key(str(error), path) from None


class _NoPandas(importlib.abc.MetaPathFinder):
    """Keep pyarrow from importing pandas where the console has installed it: 0.4 s and 31 MiB without any use."""

    def find_spec(self, fullname: str, *_: object) -> None:
        if fullname == "pandas":
            raise ModuleNotFoundError("a collector has no use for pandas")


def program() -> int:
    """Run `main` in a process of its own."""
    sys.meta_path.insert(0, _NoPandas())
    return main()


if __name__ == "__main__":
    sys.exit(program())

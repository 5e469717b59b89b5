"""The command `drover-agent`: run, once, fleet, config."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import signal
import sys
from collections.abc import Sequence

from drover_agent.config import DEFAULT_PATH, AgentConfig, load_config
from drover_agent.once import as_text, once
from drover_agent.runtime import NodeRuntime
from drover_agent.spool import SpoolError
from drover_proto.settings import SettingsError, sample

BAD_INPUT = 2


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(arguments)
    except (SettingsError, SpoolError) as error:
        print(f"drover-agent: {error}", file=sys.stderr)
        return BAD_INPUT
    except ModuleNotFoundError as error:
        if error.name not in ("numpy", "pyarrow", "rich"):
            raise
        print(f"drover-agent: simulated hardware needs {error.name}: pip install 'drover[simulation]'", file=sys.stderr)
        return BAD_INPUT


def _run(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="drover-agent", description="Streams a node's telemetry to a Drover collector."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, help_ in (("run", "stream this node until stopped"), ("once", "read everything once and print it")):
        command = commands.add_parser(name, help=help_, description=help_)
        command.add_argument("--config", metavar="FILE", help=f"settings (default: {DEFAULT_PATH} if it is there)")
        command.add_argument(
            "--set", metavar="KEY=VALUE", action="append", default=[], help="override one setting; may be repeated"
        )
        if name == "once":
            command.add_argument("--json", action="store_true", help="print JSON")
    commands.add_parser("config", help="print a settings file with every setting, its help and default")
    fleet = commands.add_parser("fleet", help="stream a whole simulated fleet from this process")
    if argv[:1] == ["fleet"]:
        import drover_agent.simulation.run as simulation  # numpy, only here

        simulation.add_arguments(fleet)
        return simulation.run(parser.parse_args(argv))
    options = parser.parse_args(argv)
    if options.command == "config":
        print(sample(AgentConfig), end="")
        return 0
    config = load_config(options.config, options.set)
    logging.basicConfig(
        level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    if options.command == "once":
        report = once(config)
        print(json.dumps(report, indent=2) if options.json else as_text(report))
        return 0
    return asyncio.run(_serve(config))


async def _serve(config: AgentConfig) -> int:
    """Run until SIGTERM or SIGINT, which end it cleanly."""
    work = asyncio.create_task(NodeRuntime(config).run())
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, work.cancel)
    try:
        await work
    except asyncio.CancelledError:
        logging.getLogger(__name__).info("stopped")
    return 0


if __name__ == "__main__":
    sys.exit(main())

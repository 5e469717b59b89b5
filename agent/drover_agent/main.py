"""The command `drover-agent`: run, once, check, sources, release, gate, probe, fleet, enrol, renew, config.

Modules are imported where they are used: a running agent must not load those of other commands, and the gate, which
stands before each job, loads as good as none.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # known to type checkers by its name; to import `typing` would be a third of the gate's time
if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from drover_agent.config import AgentConfig

BAD_INPUT = 2
COMMANDS = {
    "run": "stream this node until stopped",
    "once": "read everything once and print it, with the reason for every value that is absent",
    "check": "print what can be read here, what cannot, why, and what to do; exit with 1 if something is broken",
    "sources": "print every source: whether it is on, why not, how often it is read, and what a reading costs here",
    "release": "have the running agent release the NVIDIA driver, so that it can be unloaded or a GPU reset",
}


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["gate"]:
        from drover_agent.commands import gate

        return gate.run(arguments[1:])
    import logging

    from drover_agent.runtime.restart import RestartNeeded, restart_in_place
    from drover_agent.spool.spool import SpoolError
    from drover_core import interrupts
    from drover_core.settings import SettingsError

    interrupts.enable_sigint()
    try:
        return _run(arguments)
    except (SettingsError, SpoolError) as error:
        print(f"drover-agent: {error}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:  # before the event loop handles the signal
        return 130
    except RestartNeeded as reason:
        logging.getLogger(__name__).warning("Starting again: %s", reason)
        return restart_in_place(str(reason))
    except ModuleNotFoundError as error:
        if error.name not in ("numpy", "pyarrow", "rich"):
            raise
        print(f"drover-agent: simulated hardware needs {error.name}: pip install 'drover[simulation]'", file=sys.stderr)
        return BAD_INPUT


def _run(argv: list[str]) -> int:
    """Run a command other than the gate."""
    import argparse

    from drover_agent import simulated

    parser = argparse.ArgumentParser(
        prog="drover-agent", description="Streams a node's telemetry to a Drover collector."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, help_ in COMMANDS.items():
        _add_options(commands.add_parser(name, help=help_, description=help_), name)
    commands.add_parser("gate", help="whether a job may begin here, for Slurm's prolog and for init containers")
    commands.add_parser("config", help="print a settings file with every setting, its help and default")
    probe = commands.add_parser("probe", help="micro-benchmarks of this node; needs no collector (extra `probe`)")
    fleet = commands.add_parser("fleet", help="stream a whole simulated fleet from this process")
    enrol = commands.add_parser("enrol", help="get this node's certificate, by a token of `drover certs token`")
    renew = commands.add_parser("renew", help="renew this node's certificate by the one in force")
    match argv[:1]:
        case ["fleet"]:
            simulation = simulated.load("fleet")
            simulation.add_arguments(fleet)
            return int(simulation.run(parser.parse_args(argv)))
        case ["probe"]:
            import drover_agent.commands.probe as probing

            probing.add_arguments(probe)
            return probing.run(parser.parse_args(argv))
        case ["enrol"] | ["renew"]:
            import drover_agent.commands.enrol as enrolment

            enrolment.add_arguments(enrol, renew)
            try:
                return enrolment.run(parser.parse_args(argv))
            except enrolment.EnrolError as error:
                print(f"drover-agent: {error}", file=sys.stderr)
                return 1
    return _run_configured(parser.parse_args(argv))


def _run_configured(options: argparse.Namespace) -> int:
    """Run a command that reads the settings."""
    from drover_agent.config import AgentConfig, load_config
    from drover_core import logs
    from drover_core.settings import example_toml

    if options.command == "config":
        print(example_toml(AgentConfig), end="")
        return 0
    config = load_config(options.config, options.set)
    logs.configure(config.log_level)
    if options.command == "run":
        import asyncio

        from drover_agent.app import serve

        return asyncio.run(serve(config))
    if options.command == "release":
        return _release(config, options.seconds)
    return _report(config, options)


def _add_options(command: argparse.ArgumentParser, name: str) -> None:
    from drover_agent.config import DEFAULT_PATH

    command.add_argument("--config", metavar="FILE", help=f"settings (default: {DEFAULT_PATH} if it exists)")
    command.add_argument(
        "--set", metavar="KEY=VALUE", action="append", default=[], help="override one setting; may be repeated"
    )
    if name in ("once", "check", "sources"):
        command.add_argument("--json", action="store_true", help="print JSON")
    if name == "release":
        command.add_argument(
            "--seconds", type=float, default=60.0, help="for how long (60, at most 3600; 0: open it again now)"
        )


def _release(config: AgentConfig, seconds: float) -> int:
    from pathlib import Path

    from drover_agent.runtime.driver_release import ReleaseError, request_release

    try:
        print(request_release(Path(config.spool.dir), seconds))
    except ReleaseError as error:
        print(f"drover-agent: {error}", file=sys.stderr)
        return 1
    return 0


def _report(config: AgentConfig, options: argparse.Namespace) -> int:
    """Run once, check or sources."""
    import json

    from drover_agent.config import DEFAULT_PATH

    code = 0
    if options.command == "once":
        from drover_agent.commands import once

        report = once.once(config)
        text = json.dumps(report, indent=2) if options.json else once.as_text(report)
    elif options.command == "check":
        from drover_agent.commands.check import report as check

        lines = check.check(config, str(options.config or (DEFAULT_PATH if DEFAULT_PATH.exists() else "")))
        code = 1 if check.is_broken(lines) else 0
        text = json.dumps(check.as_json(config.node_name, lines), indent=2) if options.json else check.as_text(lines)
    else:
        from drover_agent.commands import sources

        rows = sources.sources(config)
        text = json.dumps(rows, indent=2) if options.json else sources.as_text(rows)
    print(text, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())

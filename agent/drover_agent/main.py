"""The command `drover-agent`: run, once, check, sources, release, probe, fleet, enrol, renew, config."""

from __future__ import annotations

import argparse
import json
import logging
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from drover_agent import simulated
from drover_agent.config import DEFAULT_PATH, AgentConfig, load_config
from drover_agent.runtime.restart import RestartNeeded, restart_in_place
from drover_agent.spool.spool import SpoolError
from drover_core import interrupts, logs
from drover_core.settings import SettingsError, example_toml

if TYPE_CHECKING:
    from drover_agent.app import NodeRuntime

BAD_INPUT = 2
COMMANDS = {
    "run": "stream this node until stopped",
    "once": "read everything once and print it; what is absent says why",
    "check": "what can be read here and what cannot, why, and how to mend it; exits with 1 when something is broken",
    "sources": "every source: whether it is on, why not, its pace, what a reading costs here",
    "release": "have the running agent let go of the NVIDIA driver, so that it can be unloaded or a GPU reset",
}


def main(argv: Sequence[str] | None = None) -> int:
    interrupts.enable_sigint()
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(arguments)
    except (SettingsError, SpoolError) as error:
        print(f"drover-agent: {error}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:  # it came before the event loop listened for it
        return 130
    except RestartNeeded as reason:
        logging.getLogger(__name__).warning("starting again: %s", reason)
        return restart_in_place(str(reason))
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
    for name, help_ in COMMANDS.items():
        command = commands.add_parser(name, help=help_, description=help_)
        command.add_argument("--config", metavar="FILE", help=f"settings (default: {DEFAULT_PATH} if it is there)")
        command.add_argument(
            "--set", metavar="KEY=VALUE", action="append", default=[], help="override one setting; may be repeated"
        )
        if name in ("once", "check", "sources"):
            command.add_argument("--json", action="store_true", help="print JSON")
        if name == "release":
            command.add_argument(
                "--seconds", type=float, default=60.0, help="for how long (60, at most 3600; 0: take it up again now)"
            )
    commands.add_parser("config", help="print a settings file with every setting, its help and default")
    probe = commands.add_parser("probe", help="micro-benchmarks of this node; needs no collector (extra `probe`)")
    fleet = commands.add_parser("fleet", help="stream a whole simulated fleet from this process")
    if argv[:1] == ["fleet"]:
        simulation = simulated.load("fleet")  # numpy, only here
        simulation.add_arguments(fleet)
        return int(simulation.run(parser.parse_args(argv)))
    if argv[:1] == ["probe"]:
        import drover_agent.commands.probe as probing

        probing.add_arguments(probe)
        return probing.run(parser.parse_args(argv))
    enrol = commands.add_parser("enrol", help="get this node's certificate, by a token of `drover certs token`")
    renew = commands.add_parser("renew", help="renew this node's certificate by the one in force")
    if argv[:1] in (["enrol"], ["renew"]):
        import drover_agent.commands.enrol as enrolment

        enrolment.add_arguments(enrol, renew)
        try:
            return enrolment.run(parser.parse_args(argv))
        except enrolment.EnrolError as error:
            print(f"drover-agent: {error}", file=sys.stderr)
            return 1
    options = parser.parse_args(argv)
    if options.command == "config":
        print(example_toml(AgentConfig), end="")
        return 0
    config = load_config(options.config, options.set)
    logs.configure(config.log_level)
    if options.command == "run":
        import asyncio

        return asyncio.run(_serve(config))
    if options.command == "release":
        return _release(config, options.seconds)
    return _look(config, options)


def _release(config: AgentConfig, seconds: float) -> int:
    from drover_agent.runtime.driver_release import ReleaseError, ask

    try:
        print(ask(Path(config.spool.dir), seconds))
    except ReleaseError as error:
        print(f"drover-agent: {error}", file=sys.stderr)
        return 1
    return 0


def _look(config: AgentConfig, options: argparse.Namespace) -> int:
    """once, check, sources. Their modules are loaded here: a running agent has no use for them."""
    code = 0
    if options.command == "once":
        from drover_agent.commands import once, once_text

        seen = once.once(config)
        text = json.dumps(seen, indent=2) if options.json else once_text.as_text(seen)
    elif options.command == "check":
        from drover_agent.commands.check import report as check

        lines = check.check(config, str(options.config or (DEFAULT_PATH if DEFAULT_PATH.exists() else "")))
        code = 1 if check.is_broken(lines) else 0
        text = json.dumps(check.as_json(config.node_name, lines), indent=2) if options.json else check.as_text(lines)
    else:
        from drover_agent.commands import sources as sources_report

        rows = sources_report.sources(config)
        text = json.dumps(rows, indent=2) if options.json else sources_report.as_text(rows)
    print(text, flush=True)
    return code


async def _serve(config: AgentConfig) -> int:
    """Run until SIGTERM or SIGINT, which end it cleanly. systemd, where it is there, is told how it goes."""
    import asyncio

    from drover_agent.app import NodeRuntime
    from drover_agent.clock import SystemClock
    from drover_agent.runtime import trim_memory as lean
    from drover_agent.runtime.systemd_notify import Notifier, Tender, tended

    node = NodeRuntime(config)
    tender = Tender(Notifier(), SystemClock(), config.interval_s, lambda: node.sampler.ticks, lambda: status(node))
    work = asyncio.create_task(node.run())

    def stop() -> None:
        tender.stopping()
        work.cancel()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)

    def settle() -> None:
        lean.settle()
        loop.call_later(lean.AGAIN_S, settle)

    loop.call_later(lean.SETTLED_S, settle)
    try:
        await tended(tender, work)
    except asyncio.CancelledError:
        logging.getLogger(__name__).info("stopped")
    return 0


def status(node: NodeRuntime) -> str:
    """One line of how the agent stands, for `systemctl status`."""
    gpus = len(node.gpus.all())
    waiting, size = node.agent.spool.pending()
    to = f"sending to {node.agent.connected_to}" if node.agent.connected_to else "no collector"
    of_gpus = f"{gpus or 'no'} GPU{'' if gpus == 1 else 's'}"
    if gpus and node.driver_closed:
        of_gpus += ", none of them read: NVML is not open"
    parts = [of_gpus, to, f"{waiting} messages ({size / 1e6:.1f} MB) wait"]
    if node.agent.clock_offset_s is not None:
        parts.append(f"clock {node.agent.clock_offset_s:+.3f} s from the collector's")
    if hung := [name for name, stats in node.sampler.stats.items() if stats.hung]:
        parts.append(f"no answer from {', '.join(hung)}")
    return "; ".join(parts)


if __name__ == "__main__":
    sys.exit(main())

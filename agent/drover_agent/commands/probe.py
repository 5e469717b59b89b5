"""`drover-agent probe`: run micro-benchmarks of this node without a collector; with --serve, be the probe service.

Exit codes. 0: everything was measured, or cannot be on such a device (the table says why). 1: a wrong result, a hang, a
crash, a run that was cut short, or a GPU that was left out. 2: bad input, or nothing can run here. 130: interrupted.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import math
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from drover_agent.probes import PROBES, Level, eligible, plan, trying
from drover_agent.probes.base import Result
from drover_agent.probes.inlet import inlet_c
from drover_agent.probes.runner import End, Report, Runner

BAD_INPUT = 2


class CommandError(Exception):
    """Bad input. The message says what to do, in one line."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--level",
        choices=[level.value for level in Level],
        default=Level.QUICK.value,
        help="how thorough: quick (under a minute for the node), standard (under 5), deep; default: quick",
    )
    parser.add_argument("--only", nargs="+", metavar="NAME", default=[], help=f"only these, of: {', '.join(PROBES)}")
    parser.add_argument("--gpus", metavar="SLOTS", default="", help="such as 0,1,5; default: all that no process holds")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--force", action="store_true", help="also on GPUs that a process holds, which disturbs that process"
    )
    parser.add_argument(
        "--timeout", type=float, metavar="S", help="end after so many seconds; default: depends on the probes"
    )
    parser.add_argument("--folder", default="", help="where the disk's probes write; default: the temporary folder")
    parser.add_argument("--shared", default="", help="a folder of storage that nodes share, for storage_*")
    parser.add_argument("--serve", metavar="FOLDER", help="run the agent's requests in FOLDER, then end")
    parser.add_argument("--hold", metavar="ID", help="be the scheduler's job that holds this node for a request")


def run(options: argparse.Namespace) -> int:
    try:
        if options.timeout is not None and not (math.isfinite(options.timeout) and options.timeout > 0):
            raise CommandError(f"--timeout {options.timeout:g}: must be more than 0 seconds")
        if options.folder and not Path(options.folder).is_dir():
            raise CommandError(f"--folder {options.folder}: is not a folder")
        if options.hold is not None:
            _hold(options.hold)
        return _serve(options) if options.serve else _probe(options)
    except (CommandError, eligible.DriverError) as error:
        print(f"drover-agent probe: {error}", file=sys.stderr)
        return BAD_INPUT


def _hold(id_: str) -> NoReturn:
    from drover_agent.probes.exchange import is_id
    from drover_agent.probes.hold import hold

    if not is_id(id_):
        raise CommandError(f"--hold {id_[:100]!r}: is not the id of a request")
    try:
        _print_progress(hold(id_))
    except OSError as error:
        raise CommandError(f"--hold {id_}: {error.strerror or error}") from None
    os._exit(0)  # the next job waits for the end of this process, so skip Python's clean-up


def _serve(options: argparse.Namespace) -> int:
    from drover_agent.probes.service import Busy, Service

    logging.basicConfig(level="INFO", format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    service = Service(Path(options.serve), options.folder, options.shared)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: service.stop())
    try:
        service.serve()
    except (Busy, OSError) as error:
        raise CommandError(f"--serve {options.serve}: {error}") from None
    return 0


def _probe(options: argparse.Namespace) -> int:
    level = Level(options.level)
    try:
        names = plan.names_of([n for word in options.only for n in word.split(",") if n], level)
    except ValueError as error:
        raise CommandError(str(error)) from None
    slots = _slots(options.gpus)
    if not plan.has_torch():
        raise CommandError(plan.NO_TORCH)
    found = eligible.look()
    gpus, left_out = eligible.choose(found, slots, force=options.force)
    if refused := [slot for slot in slots if slot in left_out]:
        raise CommandError(f"GPU {refused[0]}: {left_out[refused[0]]}{_remedy(left_out[refused[0]])}")
    if found.gpus and not gpus:
        slot, why = next(iter(left_out.items()))
        raise CommandError(f"no GPU can be probed; GPU {slot}: {why}{_remedy(why)}")
    if not found.gpus:
        _print_progress(
            f"{found.why_none}: the CPU is probed, which shows that the probes work but says nothing about a GPU"
        )
    for slot, why in left_out.items():
        _print_progress(f"GPU {slot} is left out: {why}")
    report, stopped_by = _run_stoppable(options, names, level, gpus)
    shown = as_json(level, report, left_out)
    print(json.dumps(shown, indent=2) if options.json else as_text(report, left_out), flush=True)
    if stopped_by:
        return 128 + stopped_by
    if report.end is End.REFUSED:
        raise CommandError(report.detail)
    wrong = any(result.ok is False for result in report.results)
    return int(wrong or report.end is not End.DONE or bool(left_out))


def _run_stoppable(
    options: argparse.Namespace, names: tuple[str, ...], level: Level, gpus: Sequence[eligible.Gpu]
) -> tuple[Report, int]:
    """Run the probes; return the report, and the signal that ended them or 0."""
    request = plan.request_of(names, level, gpus, options.timeout, options.folder)
    request = dataclasses.replace(request, shared=options.shared)
    if "soak" in names and gpus:
        found_c, why = inlet_c()
        _print_progress(f"inlet air has {found_c:g} degC" if found_c is not None else f"{why}: no thermal resistance")
        request = dataclasses.replace(request, inlet_c=found_c)
    began, signals = time.monotonic(), [0]
    tolerated = [pid for gpu in gpus for pid in gpu.pids]
    running: list[Runner] = []

    def stop(number: int, _frame: object) -> None:
        signals[0] = number
        for runner in running:
            runner.stop("it was interrupted")

    def started(runner: Runner) -> None:
        running[:] = [runner]
        if signals[0]:
            runner.stop("it was interrupted")

    def report_progress(text: str) -> None:
        _print_progress(f"{time.monotonic() - began:5.0f} s  {text}")

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        return trying.run(request, gpus, started, report_progress, tolerated), signals[0]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _slots(text: str) -> list[int]:
    try:
        slots = [int(word) for word in text.split(",") if word.strip()]
    except ValueError:
        slots = [-1]
    if any(slot < 0 for slot in slots):
        raise CommandError(f"--gpus {text}: must be slots, as in --gpus 0,1,5")
    return slots


def _remedy(why: str) -> str:
    return "; end it, or --force to disturb it" if why.startswith("held by") else ""


def _print_progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def as_json(level: Level, report: Report, left_out: Mapping[int, str]) -> dict[str, Any]:
    return {
        "level": level.value,
        "end": report.end.value,
        "detail": report.detail,
        "probe": report.probe or None,
        "gpu": report.gpu,
        "seconds": round(report.seconds, 3),
        "devices": [dataclasses.asdict(device) for device in report.devices],
        "left_out": [{"gpu": slot, "why": why} for slot, why in left_out.items()],
        "results": [dataclasses.asdict(result) for result in report.results],
    }


def as_text(report: Report, left_out: Mapping[int, str]) -> str:
    """Return a table, then a line for each problem."""
    rows = [("probe", "on", "value", "", "spread", "what")]
    rows += [_row(result) for result in report.results]
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    lines = [
        f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c:>{widths[2]}} {d:<{widths[3]}}  {e:>{widths[4]}}  {f}".rstrip()
        for a, b, c, d, e, f in rows
    ]
    lines += [f"GPU {slot} was left out: {why}" for slot, why in left_out.items()]
    if report.end is not End.DONE:
        lines.append(f"{report.end.value}: {report.detail}")
    return "\n".join(lines)


def _row(result: Result) -> tuple[str, str, str, str, str, str]:
    where = "node" if result.gpu is None else f"GPU {result.gpu}"
    where += "" if result.peer is None else f" to {result.peer}"
    spread = "" if result.spread is None else f"{result.spread:.2%}"
    detail = ("WRONG: " if result.ok is False else "") + result.detail
    if result.value is None:
        return result.probe, where, "-", "", spread, f"not measured: {detail}"
    return result.probe, where, _number(result.value), result.unit, spread, detail


def _number(value: float) -> str:
    """Return a number with four significant digits; whole numbers without decimals."""
    if abs(value) >= 1000 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.4g}"

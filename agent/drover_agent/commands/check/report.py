"""`drover-agent check`: print what can be read on this node, what cannot, why, and what to do.

Each check runs in a thread that is left behind if it does not return: a driver, a file system or a name server may hang
for ever.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from drover_agent.commands.check import (
    collector as check_collector,
)
from drover_agent.commands.check import (
    node as check_node,
)
from drover_agent.commands.check import (
    probes as check_probes,
)
from drover_agent.commands.check import (
    sources as check_sources,
)
from drover_agent.commands.check.result import CheckResult, CheckState
from drover_agent.commands.read_all import LIMIT_S as READ_LIMIT_S
from drover_agent.commands.read_all import read_all_sources
from drover_agent.config import AgentConfig

LIMIT_S = READ_LIMIT_S + 2.0

Check = Callable[[], list[CheckResult]]


def check(config: AgentConfig, settings_file: str) -> list[CheckResult]:
    """Run all checks within LIMIT_S. `settings_file`: the file with the settings, "" for none."""
    checks: dict[str, Check] = {
        "settings": partial(check_node.settings, settings_file),
        "user": check_node.user,
        "sources": lambda: check_sources.sources(config, asyncio.run(read_all_sources(config))),
        "kernel log": partial(check_node.kernel_log_readable, config),
        "spool": partial(check_node.spool, config),
        "certificate": partial(check_collector.own_certificate, config),
    }
    for address in config.collectors:
        checks[f"collector {address}"] = partial(check_collector.collector, config, address)
    checks |= {"clock": check_node.clock, "service": check_node.service, "probes": check_probes.probes}
    return run_all(checks, LIMIT_S)


def run_all(checks: Mapping[str, Check], limit_s: float) -> list[CheckResult]:
    """Return the results in the order of `checks`. One that does not return or raises is a result too."""
    done: queue.SimpleQueue[tuple[str, list[CheckResult]]] = queue.SimpleQueue()
    for name, one in checks.items():
        threading.Thread(target=_run, args=(name, one, done), name=f"check {name}", daemon=True).start()
    found: dict[str, list[CheckResult]] = {}
    deadline = time.monotonic() + limit_s
    while len(found) < len(checks):
        try:
            name, lines = done.get(timeout=max(deadline - time.monotonic(), 0.0))
        except queue.Empty:
            break
        found[name] = lines
    hung = f"did not return within {limit_s:g} s"
    return [
        line
        for name in checks
        for line in found.get(
            name, [CheckResult(name, CheckState.BROKEN, hung, "look for processes in state D (ps -eo stat,comm)")]
        )
    ]


def _run(name: str, one: Check, done: queue.SimpleQueue[tuple[str, list[CheckResult]]]) -> None:
    try:
        lines = one()
    except Exception as error:  # noqa: BLE001  # what a check raises is its result
        lines = [
            CheckResult(
                name, CheckState.BROKEN, f"the check itself failed: {type(error).__name__}: {error}", "report this"
            )
        ]
    done.put((name, lines))


def as_json(node: str, lines: Sequence[CheckResult]) -> dict[str, Any]:
    return {"node": node, "broken": is_broken(lines), "checks": [asdict(line) for line in lines]}


def as_text(lines: Sequence[CheckResult]) -> str:
    width = max(len(line.name) for line in lines)
    out = []
    for line in lines:
        out.append(f"{line.state:<8} {line.name:<{width}}  {line.text}")
        if line.remedy:
            out.append(f"{'':<8} {'':<{width}}  -> {line.remedy}")
    count = {state: sum(line.state is state for line in lines) for state in CheckState}
    return "\n".join([*out, "", ", ".join(f"{number} {state}" for state, number in count.items() if number)])


def is_broken(lines: Sequence[CheckResult]) -> bool:
    return any(line.state is CheckState.BROKEN for line in lines)

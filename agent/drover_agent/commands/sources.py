"""`drover-agent sources`: list every source, whether it is on and why not, its pace, and what a reading costs here."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from drover_agent.commands.once import kernel_log
from drover_agent.commands.read_all import PASSIVE, SourceReading, read_all_sources
from drover_agent.config import AgentConfig
from drover_agent.polled_sources import POLLED
from drover_agent.sources.facts import FACTS, JOBS_UNKNOWN
from drover_core.metrics.catalog import Absent

Report = dict[str, Any]


def sources(config: AgentConfig) -> list[Report]:
    """Return a row for each source of FACTS.

    Raises:
        SettingsError: hardware is simulated, and the simulator is not installed.
    """
    readings = asyncio.run(read_all_sources(config))
    gpus = sum(found.slot is not None for found in readings)
    return [
        _row(config, name, [found for found in readings if found.name.partition(":")[0] == name], gpus)
        for name in FACTS
    ]


def _row(config: AgentConfig, name: str, readings: Sequence[SourceReading], gpus: int) -> Report:
    facts = FACTS[name]
    off = _off(config, name, readings)
    row: Report = {
        "name": name,
        "on": not off,
        "why": off,
        "gives": facts.what,
        "reads": facts.reads,
        "pace": facts.pace,
        "first_s": _total(readings, 0),
        "read_s": _total(readings, -1),
        "cpu_s": round(sum(found.cpu_s[-1] for found in readings if found.cpu_s), 6) if readings else None,
        "values": sum(len(values) for found in readings for r in found.readings[-1:] for _, values in r.rows),
        "error": "; ".join(f"{found.name}: {found.error}" for found in readings if found.error),
    }
    if name == "kmsg" and not off:
        log = kernel_log(config)
        row["error"] = "" if log["readable"] else log["why"]
    elif not off and name not in PASSIVE and not row["error"] and not any(_gave(found) for found in readings):
        row["why"] = facts.missing if name != "jobs" or not gpus else f"{gpus} GPUs: {JOBS_UNKNOWN}"
    if name == "nvml":
        reasons = [r.inventory.get("no_gpu_reason", "") for found in readings for r in found.readings]
        row["why"] = row["why"] if off else next(filter(None, reasons), "")
    return row


def _total(readings: Sequence[SourceReading], which: int) -> float | None:
    """Return the seconds of the first or last reading, summed over devices. Opening NVML counts as a first one."""
    took = [f.seconds[which] for f in readings if f.seconds and (which == 0 or f.name != "nvml")]
    return round(sum(took), 6) if took else None


def _gave(found: SourceReading) -> bool:
    """Return whether a source gave anything. An answer that nothing is supported does not count."""
    return any(
        any(r.inventory.values())
        or r.holdings
        or r.events
        or any(values for _, values in r.rows)
        or any(why is not Absent.UNSUPPORTED for _, _, why in r.absent)
        for r in found.readings
    )


def _off(config: AgentConfig, name: str, readings: Sequence[SourceReading]) -> str:
    """Return which setting turns a source off, "" if it is on."""
    if name == "nvml":
        wanted = {"auto", "nvml"}
    elif name == "kmsg":
        if not config.kmsg_enabled:
            return "kmsg_enabled = false"
        wanted = {"auto", "nvml", "none"}
    else:
        wanted = set(POLLED[name][0])
    if config.hardware not in wanted:
        return f"hardware = {config.hardware}"
    off = any(found.off for found in readings) or (name == "steps" and not config.steps_socket)
    return f"not set: {FACTS[name].setting}" if off else ""


def as_text(rows: Sequence[Report]) -> str:
    lines = []
    for row in rows:
        state = "off" if not row["on"] else "failing" if row["error"] else "nothing" if row["why"] else "on"
        lines.append(f"{row['name']:<12} {state:<8} {row['gives']}")
        details = [f"reads {row['reads']}", f"pace: {row['pace']}"]
        if row["read_s"] is not None:
            cost = f"a reading of {row['values']} values took {_ms(row['read_s'])}, {_ms(row['cpu_s'])} of it on a CPU"
            details.append(f"{cost}; the first {_ms(row['first_s'])}")
        details += [text for text in (row["why"], row["error"]) if text]
        lines += [f"{'':<21} {text}" for text in details]
    return "\n".join(lines)


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.2f} ms"

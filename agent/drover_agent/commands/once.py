"""`drover-agent once`: read everything once and print it, with the reason for every value that is absent."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import textwrap
from collections import Counter
from collections.abc import Sequence
from typing import Any

from drover_agent.clock import SystemClock
from drover_agent.commands.read_all import SourceReading, read_all_sources
from drover_agent.config import AgentConfig
from drover_agent.sources.base import Entity, Reading
from drover_agent.sources.facts import JOBS_UNKNOWN
from drover_agent.uplink.tls import describe_certificate
from drover_core import VERSION
from drover_core.metrics.catalog import (
    Absent,
    Metric,
    Scope,
    describe,
    of_agents,
)
from drover_core.times import iso

NOT_READ = "not-read"  # in addition to the reasons of Absent: no source here reads it
WHY: dict[str, str] = {
    Absent.UNSUPPORTED: "this device, driver or kernel does not have it",
    Absent.LOST: "the device has gone",
    Absent.TIMEOUT: "the read did not return",
    Absent.NO_PERMISSION: "this user may not read it; `drover-agent check` says what is missing",
    Absent.ERROR: "the read failed; standard error says how",
    Absent.OUT_OF_RANGE: "what was read cannot be true",
}
OF_RUNNING_AGENT = frozenset({"uplink", "spool", "sampler"})  # sources of the catalog that only a running agent has


class Collected:
    """The newest value of everything that was read."""

    def __init__(self, node: str) -> None:
        self._node = node
        self.values: dict[Entity, dict[str, float]] = {}
        self.absent: dict[Entity, dict[str, Absent]] = {}
        self.inventory: dict[str, str] = {}
        self.holdings: dict[int, str | None] = {}
        self.events: list[dict[str, Any]] = []

    def take(self, found: SourceReading) -> None:
        for reading in found.readings:
            self._take_reading(reading)
        if found.hung and found.slot is not None:
            entity = next((e for e in self.values if e.gpu == found.slot and e.scope is Scope.GPU and not e.mig), None)
            entity = entity or Entity(Scope.GPU, f"{self._node}/gpu{found.slot}", found.slot)
            self.values[entity] = {}
            self.absent[entity] = {metric.name: Absent.TIMEOUT for metric in of_agents(Scope.GPU)}

    def _take_reading(self, reading: Reading) -> None:
        for entity, values in reading.rows:
            self.values.setdefault(entity, {}).update(values)
            for name in values:
                self.absent.get(entity, {}).pop(name, None)
        for entity, name, reason in reading.absent:
            self.values.setdefault(entity, {}).pop(name, None)
            self.absent.setdefault(entity, {})[name] = reason
        for entity, name in reading.quiet:
            self.absent.get(entity, {}).pop(name, None)
        self.inventory |= reading.inventory
        self.holdings |= dict(reading.holdings)
        for event in reading.events:
            row = dataclasses.asdict(event) | {"ts": iso(event.ts_ms)}
            del row["ts_ms"]
            self.events.append(row)

    def entities(self) -> list[Entity]:
        """Return each entity once: a device whose name was known only at the second reading is one entity."""
        last = {(e.scope, e.gpu, e.mig, e.link, "" if e.scope is Scope.GPU else e.key): e for e in self.values}
        return sorted(last.values(), key=lambda e: (list(Scope).index(e.scope), e.gpu or 0, e.mig, e.link, e.key))


def why_not_read(entity: Entity, metric: Metric) -> str:
    """Return why no source gave a metric."""
    readers = metric.sources.keys()
    if readers and readers <= OF_RUNNING_AGENT:
        return "only a running agent knows it"
    if entity.mig:
        return "not available for MIG instances; the row of the whole GPU may have it"
    if entity.scope is Scope.WORKLOAD:
        return "this workload does not report it, or has nothing to report now"
    return "no source that is on here gives it"


def kernel_log(config: AgentConfig) -> dict[str, Any]:
    """Return whether the kernel log can be read, by reading its first record."""
    path = config.kmsg_path
    found: dict[str, Any] = {"path": path, "readable": False, "why": ""}
    if not config.kmsg_enabled:
        return found | {"why": "turned off (kmsg_enabled)"}
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            os.read(descriptor, 8192)  # the kernel checks the right at open or at read, by version
        except (BlockingIOError, BrokenPipeError):  # it is empty, or the oldest line was just overwritten
            pass
        finally:
            os.close(descriptor)
    except PermissionError:
        return found | {"why": "not allowed: the agent needs CAP_SYSLOG"}
    except OSError as error:
        return found | {"why": error.strerror or str(error)}
    return found | {"readable": True}


def as_json(config: AgentConfig, readings: Sequence[SourceReading]) -> dict[str, Any]:
    collected = Collected(config.node_name)
    for found in readings:
        collected.take(found)
    now_ms = SystemClock().now_ms()
    gpus = {e.gpu for e in collected.values if e.scope is Scope.GPU and e.gpu is not None}
    unknown = sorted(gpus - collected.holdings.keys())
    return {
        "node": config.node_name,
        "ts": iso(now_ms),
        "version": VERSION,
        "certificate": describe_certificate(config.tls, now_ms / 1000),  # empty: plain connections
        "inventory": collected.inventory,
        "kernel_log": kernel_log(config),
        "holdings": {str(gpu): job for gpu, job in sorted(collected.holdings.items())},
        "holdings_unknown": unknown if any(found.name == "jobs" for found in readings) else [],
        "events": collected.events,
        "entities": [_entity(collected, entity) for entity in collected.entities()],
        "sources": {
            found.name: {
                "seconds": round(found.seconds[-1], 6) if found.seconds else None,
                "readings": len(found.readings),
                "trouble": found.error,
            }
            for found in readings
            if not found.off
        },
    }


def _entity(collected: Collected, entity: Entity) -> dict[str, Any]:
    values = collected.values[entity]
    absent: dict[str, str] = {name: str(reason) for name, reason in collected.absent.get(entity, {}).items()}
    why = {name: WHY[reason] for name, reason in absent.items()}
    for metric in of_agents(entity.scope):
        if metric.name not in values and metric.name not in absent:
            absent[metric.name], why[metric.name] = NOT_READ, why_not_read(entity, metric)
    found = {"scope": entity.scope, "key": entity.key, "gpu": entity.gpu, "mig": entity.mig, "link": entity.link}
    return found | {"values": values, "absent": absent, "why": why}


def once(config: AgentConfig) -> dict[str, Any]:
    """Read all sources and return the report.

    Raises:
        SettingsError: hardware is simulated, and the simulator is not installed.
    """
    return as_json(config, asyncio.run(read_all_sources(config)))


# ---- the report as text

WIDE = 118  # characters a line
COLUMNS = 8  # devices side by side
WIDEST = 14  # a longer value gets its own line
ABSENT = "-"
TITLES = {Scope.GPU: "GPUs", Scope.NODE: "Node", Scope.LINK: "Ports", Scope.WORKLOAD: "Workloads"}
SHOWN_EVENTS = 20
SHORT_MIG = len("MIG-01234567")  # of a UUID: enough to distinguish instances

Report = dict[str, Any]


def as_text(report: Report) -> str:
    lines = [f"{report['node']} at {report['ts']}, drover-agent {report['version']}"]
    if report["certificate"]:
        lines.append(f"  certificate: {report['certificate']}")
    log = report["kernel_log"]
    lines.append(f"  kernel log {log['path']}: " + ("readable" if log["readable"] else f"not read: {log['why']}"))
    for gpu, job in report["holdings"].items():
        lines.append(f"  GPU {gpu} is held by {job or 'no job'}")
    if unknown := report["holdings_unknown"]:
        lines.append(f"  GPU {', '.join(map(str, unknown))}: {JOBS_UNKNOWN}")
    lines += _inventory(report["inventory"])
    for event in report["events"][:SHOWN_EVENTS]:
        lines.append(f"  event {event['code']}: {event['message']}")
    if len(report["events"]) > SHOWN_EVENTS:
        lines.append(f"  and {len(report['events']) - SHOWN_EVENTS} more events (--json has all)")
    for scope in Scope:
        found = [entity for entity in report["entities"] if entity["scope"] == scope]
        for kind in ([e for e in found if not e["mig"]], [e for e in found if e["mig"]]):
            for start in range(0, len(kind), COLUMNS):
                lines += ["", *_table(scope, kind[start : start + COLUMNS])]
    absent = _absences(report["entities"])
    lines += ["", *(absent or ["Nothing is absent."]), "", *_sources(report["sources"])]
    return "\n".join(lines)


def _inventory(inventory: dict[str, str]) -> list[str]:
    """Return a line for each value. Values of GPUs share a line; one that all have is printed once."""
    parts: dict[str, dict[str, str]] = {}  # part -> GPU -> value
    lines = []
    for key, value in inventory.items():
        owner, dot, part = key.partition(".")
        if not value:
            continue
        if dot and owner.startswith("gpu") and owner[3:].isdigit():
            parts.setdefault(part, {})[owner] = value
        else:
            lines.append(f"  {key}: {value}")
    gpus = {gpu for of in parts.values() for gpu in of}
    alike = {p for p, of in parts.items() if len(gpus) > 1 and of.keys() == gpus and len(set(of.values())) == 1}
    said = {
        f"all {len(gpus)} GPUs": [f"{part} {next(iter(of.values()))}" for part, of in parts.items() if part in alike]
    }
    for gpu in sorted(gpus, key=lambda gpu: int(gpu[3:])):
        said[gpu] = [f"{part} {of[gpu]}" for part, of in parts.items() if part not in alike and gpu in of]
    for who, what in said.items():
        if what:
            lines += [
                f"  {line}" for line in textwrap.wrap(f"{who}: {', '.join(what)}", WIDE, subsequent_indent="    ")
            ]
    return lines


def _name(entity: Report) -> str:
    if entity["scope"] == Scope.GPU:
        return f"{entity['gpu']}/{entity['mig'][:SHORT_MIG]}" if entity["mig"] else f"GPU {entity['gpu']}"
    if entity["scope"] == Scope.NODE:
        return str(entity["key"])
    return str(entity["link"] or entity["key"].partition("/")[2])


def _title(entity: Report) -> str:
    return "MIG instances" if entity["mig"] else TITLES[Scope(entity["scope"])]


def _table(scope: Scope, entities: Sequence[Report]) -> list[str]:
    """Return a row for each metric that one of the devices has, with a column for each device."""
    names = [_name(entity) for entity in entities]
    title = _title(entities[0])
    rows: list[tuple[str, list[str]]] = []
    notes: list[str] = []
    for metric in of_agents(scope):
        cells = [_cell(metric, entity["values"].get(metric.name)) for entity in entities]
        if all(cell == ABSENT for cell in cells):
            continue
        if max(map(len, cells)) <= WIDEST:
            rows.append((_label(metric), cells))
        else:
            notes += _long(metric, names, cells)
    if not rows and not notes:
        return [f"{title}: {', '.join(names)}: nothing could be read"]
    first = max([len(title), *(len(label) for label, _ in rows)])
    widths = [max(len(names[i]), *(len(cells[i]) for _, cells in rows), 0) for i in range(len(names))]
    lines = ["  ".join([f"{title:<{first}}", *(f"{n:>{w}}" for n, w in zip(names, widths, strict=True))])]
    for label, cells in rows:
        lines.append("  ".join([f"{label:<{first}}", *(f"{c:>{w}}" for c, w in zip(cells, widths, strict=True))]))
    return lines + notes


def _label(metric: Metric) -> str:
    unit = metric.unit
    return (
        f"{metric.label}, {unit}"
        if unit not in ("ratio", "bool", "count", "B", "B/s", "enum", "bitmask")
        else metric.label
    )


def _cell(metric: Metric, value: float | None) -> str:
    return ABSENT if value is None else describe(metric, value).removesuffix(f" {metric.unit}")


def _long(metric: Metric, names: Sequence[str], cells: Sequence[str]) -> list[str]:
    """Return a long text for each group of devices that have it."""
    if len(set(cells)) == 1:
        return [f"{metric.label}: {cells[0]}" + (" (all)" if len(cells) > 1 else "")]
    texts: dict[str, list[str]] = {}
    for name, cell in zip(names, cells, strict=True):
        if cell != ABSENT:
            texts.setdefault(cell, []).append(name)
    return [f"{metric.label}: " + "; ".join(f"{text} ({', '.join(who)})" for text, who in texts.items())]


def _absences(entities: Sequence[Report]) -> list[str]:
    """Return what is absent, grouped by reason, then by the devices that lack the same."""
    # (title, scope, reason, why) -> metric -> devices
    groups: dict[tuple[str, str, str, str], dict[str, list[str]]] = {}
    count = Counter(_title(entity) for entity in entities)
    for entity in entities:
        for metric, reason in entity["absent"].items():
            group = groups.setdefault((_title(entity), entity["scope"], reason, entity["why"][metric]), {})
            group.setdefault(metric, []).append(_name(entity))
    lines: list[str] = []
    for (title, scope, reason, why), metrics in groups.items():
        alike: dict[tuple[str, ...], list[str]] = {}
        for metric, who in metrics.items():
            alike.setdefault(tuple(who), []).append(metric)
        for devices, names in alike.items():
            where = f"all {title}" if len(devices) == count[title] > 1 else ", ".join(devices)
            everything = len(names) == len(of_agents(Scope(scope)))
            text = f"Absent, {reason} ({why}), {where}: " + ("everything" if everything else ", ".join(names))
            lines += textwrap.wrap(text, WIDE, subsequent_indent="  ", break_on_hyphens=False)
    return lines


def _sources(sources: dict[str, Report]) -> list[str]:
    took = [f"{name} {s['seconds'] * 1000:.1f} ms" for name, s in sources.items() if s["seconds"] is not None]
    lines = textwrap.wrap("Read: " + ", ".join(took), WIDE, subsequent_indent="  ")
    return lines + [f"Source {name}: {s['trouble']}" for name, s in sources.items() if s["trouble"]]

"""The report of `once` as people read it: devices of a kind side by side, absences by reason."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Sequence
from typing import Any

from drover_agent.sources.facts import JOBS_UNKNOWN
from drover_core.metrics.catalog import (
    Metric,
    Scope,
    describe,
    of_scope,
)

WIDE = 118  # characters a line
COLUMNS = 8  # devices side by side
WIDEST = 14  # a longer value stands in a line of its own
ABSENT = "-"
TITLES = {Scope.GPU: "GPUs", Scope.NODE: "Node", Scope.LINK: "Ports", Scope.WORKLOAD: "Workloads"}
SHOWN_EVENTS = 20
SHORT_MIG = len("MIG-01234567")  # of a UUID: enough to tell instances apart

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
    """One line a value; those of GPUs beside each other, what all have alike once."""
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
    """A row for each metric that one of the devices has, a column for each device."""
    names = [_name(entity) for entity in entities]
    title = _title(entities[0])
    rows: list[tuple[str, list[str]]] = []
    notes: list[str] = []
    for metric in of_scope(scope):
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
    """Words instead of numbers: once where all say the same."""
    if len(set(cells)) == 1:
        return [f"{metric.label}: {cells[0]}" + (" (all)" if len(cells) > 1 else "")]
    said: dict[str, list[str]] = {}
    for name, cell in zip(names, cells, strict=True):
        if cell != ABSENT:
            said.setdefault(cell, []).append(name)
    return [f"{metric.label}: " + "; ".join(f"{text} ({', '.join(who)})" for text, who in said.items())]


def _absences(entities: Sequence[Report]) -> list[str]:
    """Grouped by reason, then by the devices that lack the same."""
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
            everything = len(names) == len(of_scope(Scope(scope)))
            text = f"Absent, {reason} ({why}), {where}: " + ("everything" if everything else ", ".join(names))
            lines += textwrap.wrap(text, WIDE, subsequent_indent="  ", break_on_hyphens=False)
    return lines


def _sources(sources: dict[str, Report]) -> list[str]:
    took = [f"{name} {s['seconds'] * 1000:.1f} ms" for name, s in sources.items() if s["seconds"] is not None]
    lines = textwrap.wrap("Read: " + ", ".join(took), WIDE, subsequent_indent="  ")
    return lines + [f"Source {name}: {s['trouble']}" for name, s in sources.items() if s["trouble"]]

"""`drover-agent once`: one reading of everything, and for what is absent the reason."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections.abc import Sequence
from typing import Any

from drover_agent.clock import SystemClock
from drover_agent.commands.read_all import SourceReading, look
from drover_agent.config import AgentConfig
from drover_agent.sources.base import Entity, Reading
from drover_agent.uplink.tls import report as tls_report
from drover_core import VERSION
from drover_core.metrics.catalog import (
    Absent,
    Metric,
    Scope,
    of_scope,
)
from drover_core.times import iso

NOT_READ = "not-read"  # beside the reasons of Absent: nothing that reads here knows it
WHY: dict[str, str] = {
    Absent.UNSUPPORTED: "this device, driver or kernel does not have it",
    Absent.LOST: "the device has gone",
    Absent.TIMEOUT: "the read did not return",
    Absent.NO_PERMISSION: "not allowed to this user; `drover-agent check` says what is missing",
    Absent.ERROR: "the read failed; standard error says how",
    Absent.OUT_OF_RANGE: "what was read cannot be true",
}
OF_RUNNING_AGENT = frozenset({"uplink", "spool", "sampler"})  # readers of the catalog that only a running agent has


class Collected:
    """The newest of everything that was read."""

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
            self.absent[entity] = {metric.name: Absent.TIMEOUT for metric in of_scope(Scope.GPU)}

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
        """Each once: a device that told its name only at the second reading is the same as before."""
        last = {(e.scope, e.gpu, e.mig, e.link, "" if e.scope is Scope.GPU else e.key): e for e in self.values}
        return sorted(last.values(), key=lambda e: (list(Scope).index(e.scope), e.gpu or 0, e.mig, e.link, e.key))


def why_not_read(entity: Entity, metric: Metric) -> str:
    """Why a metric that no source told of is not there."""
    readers = metric.sources.keys()
    if readers and readers <= OF_RUNNING_AGENT:
        return "only a running agent knows it"
    if entity.mig:
        return "not told of MIG instances; the whole GPU's row may have it"
    if entity.scope is Scope.WORKLOAD:
        return "this workload does not report it, or has nothing to report now"
    return "no source that is on here gives it"


def kernel_log(config: AgentConfig) -> dict[str, Any]:
    """Whether the kernel log can be read; nothing is read of it but its first record."""
    path = config.kmsg_path
    found: dict[str, Any] = {"path": path, "readable": False, "why": ""}
    if not config.kmsg_enabled:
        return found | {"why": "switched off (kmsg_enabled)"}
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            os.read(descriptor, 8192)  # the kernel asks for the right at open or at read, by version
        except (BlockingIOError, BrokenPipeError):  # nothing in it, or the oldest line was just overwritten
            pass
        finally:
            os.close(descriptor)
    except PermissionError:
        return found | {"why": "not allowed: the agent needs CAP_SYSLOG"}
    except OSError as error:
        return found | {"why": error.strerror or str(error)}
    return found | {"readable": True}


def as_json(config: AgentConfig, looks: Sequence[SourceReading]) -> dict[str, Any]:
    collected = Collected(config.node_name)
    for found in looks:
        collected.take(found)
    now_ms = SystemClock().now_ms()
    gpus = {e.gpu for e in collected.values if e.scope is Scope.GPU and e.gpu is not None}
    unknown = sorted(gpus - collected.holdings.keys())
    return {
        "node": config.node_name,
        "ts": iso(now_ms),
        "version": VERSION,
        "certificate": tls_report(config.tls, now_ms / 1000),  # empty: plain connections
        "inventory": collected.inventory,
        "kernel_log": kernel_log(config),
        "holdings": {str(gpu): job for gpu, job in sorted(collected.holdings.items())},
        "holdings_unknown": unknown if any(found.name == "jobs" for found in looks) else [],
        "events": collected.events,
        "entities": [_entity(collected, entity) for entity in collected.entities()],
        "sources": {
            found.name: {
                "seconds": round(found.seconds[-1], 6) if found.seconds else None,
                "readings": len(found.readings),
                "trouble": found.error,
            }
            for found in looks
            if not found.off
        },
    }


def _entity(collected: Collected, entity: Entity) -> dict[str, Any]:
    values = collected.values[entity]
    absent: dict[str, str] = {name: str(reason) for name, reason in collected.absent.get(entity, {}).items()}
    why = {name: WHY[reason] for name, reason in absent.items()}
    for metric in of_scope(entity.scope):
        if metric.name not in values and metric.name not in absent:
            absent[metric.name], why[metric.name] = NOT_READ, why_not_read(entity, metric)
    found = {"scope": entity.scope, "key": entity.key, "gpu": entity.gpu, "mig": entity.mig, "link": entity.link}
    return found | {"values": values, "absent": absent, "why": why}


def once(config: AgentConfig) -> dict[str, Any]:
    """
    Raises:
        ImportError: simulated hardware is asked for, and the extra `simulation` is not installed.
    """
    return as_json(config, asyncio.run(look(config)))

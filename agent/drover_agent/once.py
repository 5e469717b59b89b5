"""`drover-agent once`: one reading of everything, and for what is absent the reason."""

from __future__ import annotations

import asyncio
from typing import Any

from drover_agent.clock import SystemClock
from drover_agent.config import AgentConfig
from drover_agent.sampler import Sampler, SourceStats
from drover_agent.sources import polled
from drover_agent.sources.base import Entity, Reading
from drover_agent.sources.gpus import Gpus
from drover_agent.sources.nvml import NvmlSource
from drover_agent.tls import report as tls_report
from drover_proto.catalog import BY_NAME, Absent, describe
from drover_proto.times import iso

BETWEEN_S = 0.5  # rates need two readings
LIMIT_S = 10.0


class Collected:
    """The newest of everything that was read."""

    def __init__(self) -> None:
        self.values: dict[Entity, dict[str, float]] = {}
        self.absent: dict[Entity, dict[str, Absent]] = {}
        self.inventory: dict[str, str] = {}

    def take(self, _: int, reading: Reading) -> None:
        for entity, values in reading.rows:
            self.values.setdefault(entity, {}).update(values)
            for name in values:
                self.absent.get(entity, {}).pop(name, None)
        for entity, name, reason in reading.absent:
            self.values.setdefault(entity, {}).pop(name, None)
            self.absent.setdefault(entity, {})[name] = reason
        self.inventory |= reading.inventory


async def read_once(config: AgentConfig) -> tuple[Collected, dict[str, SourceStats]]:
    """Read every source twice, a moment apart."""
    clock = SystemClock()
    collected = Collected()
    sampler = Sampler(collected.take, BETWEEN_S, clock, LIMIT_S)
    gpus = Gpus()
    for source in polled(config, gpus):
        sampler.add(source)
    if config.hardware in ("auto", "nvml"):
        sampler.add(NvmlSource(config.node_name, gpus))
    await sampler.tick(clock.now_ms())
    await clock.sleep(BETWEEN_S)
    # Sources sit out ticks within their own interval, so the second tick is one of the next second.
    await sampler.tick(clock.now_ms() + 1000)
    sampler.close()
    return collected, sampler.stats


def as_json(config: AgentConfig, collected: Collected, stats: dict[str, SourceStats]) -> dict[str, Any]:
    entities = sorted(collected.values, key=lambda e: (e.scope, e.gpu or 0, e.link))
    return {
        "node": config.node_name,
        "ts": iso(SystemClock().now_ms()),
        "certificate": tls_report(config.tls, SystemClock().now_ms() / 1000),  # empty: plain connections
        "inventory": collected.inventory,
        "entities": [
            {
                "scope": entity.scope,
                "key": entity.key,
                "gpu": entity.gpu,
                "values": collected.values[entity],
                "absent": collected.absent.get(entity, {}),
            }
            for entity in entities
        ],
        "sources": {
            name: {"seconds": round(s.last_s, 6), "timeouts": s.timeouts, "failures": s.failures}
            for name, s in stats.items()
        },
    }


def as_text(report: dict[str, Any]) -> str:
    lines = [f"{report['node']} at {report['ts']}"]
    if report["certificate"]:
        lines.append(f"  certificate: {report['certificate']}")
    lines += [f"  {key}: {value}" for key, value in report["inventory"].items() if value]
    for entity in report["entities"]:
        title = f"GPU {entity['gpu']} ({entity['key']})" if entity["scope"] == "gpu" else entity["key"]
        lines += ["", f"{entity['scope']}: {title}"]
        for name, value in entity["values"].items():
            lines.append(f"  {name:<26} {describe(BY_NAME[name], value)}")
        for name, reason in entity["absent"].items():
            lines.append(f"  {name:<26} absent: {reason}")
    lines.append("")
    for name, source in report["sources"].items():
        trouble = "; did not answer" if source["timeouts"] else "; failed, see the log" if source["failures"] else ""
        lines.append(f"source {name}: {source['seconds'] * 1000:.1f} ms{trouble}")
    return "\n".join(lines)


def once(config: AgentConfig) -> dict[str, Any]:
    collected, stats = asyncio.run(read_once(config))
    return as_json(config, collected, stats)

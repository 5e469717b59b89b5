"""Turn the columns of a simulated fleet into Readings, one per node and tick, for live agents.

Arrays become Python lists once per tick for the whole fleet: reading single numpy values is slow.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from drover_agent.sources.base import Entity, NodeEvent, Reading
from drover_core.metrics.catalog import Absent, Scope
from drover_core.model.events import Event
from drover_simulator.hardware import Bools, Floats, Hardware
from drover_simulator.modifiers import Modifiers
from drover_simulator.steps import Steps

DRIVER = "570.172.08"
CUDA = "12.8"


class SensorValues(Protocol):
    """What readings are made of: the columns of a fleet, its jobs and its events."""

    modifiers: Modifiers
    steps: Steps

    def gpu_columns(self) -> dict[str, Floats]: ...

    def node_columns(self) -> dict[str, Floats]: ...

    def link_columns(self) -> tuple[list[tuple[str, str]], dict[str, Floats]]: ...

    def unreachable(self) -> Bools: ...

    def take_events(self) -> list[Event]: ...


def gpu_entities(hardware: Hardware, node: int) -> list[Entity]:
    """Return the GPUs of a node; serials and UUIDs derive from its name and the slot."""
    result = []
    for g in hardware.gpus_of(node).tolist():
        rng = np.random.default_rng([zlib.crc32(hardware.names[node].encode()), int(hardware.gpu_slot[g]), 12])
        serial = f"165{int(rng.integers(10**10)):010d}"
        h = rng.bytes(16).hex()
        uuid = f"GPU-{h[:8]}-{h[8:12]}-{h[12:16]}-{h[16:20]}-{h[20:]}"
        slot, sku = int(hardware.gpu_slot[g]), hardware.sku_of_node[node]
        pci = hardware.pci(g) + ".0"
        result.append(Entity(Scope.GPU, serial, slot, uuid=uuid, serial=serial, pci=pci, model=sku.model))
    return result


def inventory(hardware: Hardware, node: int) -> dict[str, str]:
    """Return what the agent of a node reports about its hardware at its start."""
    sku, count = hardware.sku_of_node[node], hardware.spec.nodes[node].gpus
    facts = {
        "os": "Ubuntu 22.04.5 LTS",
        "kernel": "5.15.0-1071-nvidia",
        "cpu": "2 x Intel Xeon Platinum 8480C, 224 threads",
        "memory": "2,048 GiB",
        "bios": "1.6.3",
    }
    if not count:
        return facts | {"no_gpu_reason": "the fleet file gives this node no GPU"}
    facts |= {"driver": DRIVER, "cuda": CUDA, "gpu_model": sku.model, "gpus": str(count)}
    for entity in gpu_entities(hardware, node):
        for key, value in (
            ("model", entity.model), ("serial", entity.serial), ("uuid", entity.uuid), ("pci", entity.pci),
            ("vbios", "92.00.36.00.01" if "A100" in sku.model else "96.00.A5.00.01"),
        ):  # fmt: skip
            facts[f"gpu{entity.gpu}.{key}"] = value
    for k in np.flatnonzero(np.isin(hardware.link_gpu, hardware.gpus_of(node))).tolist():
        facts.setdefault(f"gpu{hardware.gpu_slot[hardware.link_gpu[k]]}.nic", hardware.link_names[k][1])
    return facts


class ReadingMaker:
    """Make Readings of a fleet's columns. Keep the jobs reported last, to report changes only."""

    def __init__(self, hardware: Hardware) -> None:
        self._hw = hardware
        self._gpus = [entity for n in range(hardware.nodes) for entity in gpu_entities(hardware, n)]
        self._nodes = [Entity(Scope.NODE, name) for name in hardware.names]
        self._links = [Entity(Scope.LINK, f"{node}/{link}", link=link) for node, link in hardware.link_names]
        self._gpu_node: list[int] = hardware.gpu_node.tolist()
        self._gpu_slot: list[int] = hardware.gpu_slot.tolist()
        self._link_node: list[int] = hardware.link_node.tolist()
        self._reported_jobs: list[str | bool | None] = [False] * hardware.gpus  # the newest of each; False: none yet
        # GPUs of boards that lack the same metrics share one table.
        self._tables: dict[frozenset[str], list[int]] = {}
        for g, n in enumerate(self._gpu_node):
            self._tables.setdefault(hardware.sku_of_node[n].unsupported, []).append(g)

    def make(self, fleet: SensorValues) -> dict[str, Reading]:
        """Return the readings of all nodes that are not silent."""
        silent: list[bool] = fleet.modifiers.silent.tolist()
        readings = [Reading() for _ in self._nodes]
        self._add_gpus(fleet, readings)
        self._add_rows(fleet.node_columns(), self._nodes, range(len(self._nodes)), readings)
        links = fleet.link_columns()[1]
        self._add_rows(links, self._links, self._link_node, readings)
        self._add_holdings(fleet, silent, readings)
        for event in fleet.take_events():
            readings[self._hw.number[event.node]].events.append(_node_event(event))
        return {
            name: reading for name, reading, quiet in zip(self._hw.names, readings, silent, strict=True) if not quiet
        }

    def _add_gpus(self, fleet: SensorValues, readings: list[Reading]) -> None:
        columns = fleet.gpu_columns()
        gone: list[bool] = fleet.unreachable().tolist()
        lost: list[bool] = fleet.modifiers.lost.tolist()
        for unsupported, gpus in self._tables.items():
            names = [name for name in columns if name not in unsupported]
            values = np.array([columns[name] for name in names])[:, gpus]
            holes: list[bool] = np.isnan(values).any(axis=0).tolist()
            for g, row, hole in zip(gpus, values.T.tolist(), holes, strict=True):
                entity, reading = self._gpus[g], readings[self._gpu_node[g]]
                reading.absent.extend([(entity, name, Absent.UNSUPPORTED) for name in unsupported])
                if gone[g]:
                    reason = Absent.LOST if lost[g] else Absent.TIMEOUT
                    reading.absent.extend([(entity, name, reason) for name in names])
                else:
                    reading.rows.append((entity, _present(names, row, entity, reading, hole)))

    def _add_rows(
        self, columns: dict[str, Floats], entities: list[Entity], nodes: Sequence[int], readings: list[Reading]
    ) -> None:
        if not entities:
            return
        names = list(columns)
        values = np.array(list(columns.values()))
        holes: list[bool] = np.isnan(values).any(axis=0).tolist()
        for entity, n, row, hole in zip(entities, nodes, values.T.tolist(), holes, strict=True):
            readings[n].rows.append((entity, _present(names, row, entity, readings[n], hole)))

    def _add_holdings(self, fleet: SensorValues, silent: list[bool], readings: list[Reading]) -> None:
        for g, number in enumerate(fleet.steps.job_of.tolist()):
            job, n = fleet.steps.name_of(number), self._gpu_node[g]
            if job != self._reported_jobs[g] and not silent[n]:
                self._reported_jobs[g] = job
                readings[n].holdings.append((self._gpu_slot[g], job))


def _present(names: list[str], row: list[float], entity: Entity, reading: Reading, hole: bool) -> dict[str, float]:
    """Return the values of a row; add those that could not be read to `reading.absent`."""
    values = dict(zip(names, row, strict=True))
    if hole:
        for name in [name for name, value in values.items() if value != value]:  # NaN
            del values[name]
            reading.absent.append((entity, name, Absent.ERROR))
    return values


def _node_event(event: Event) -> NodeEvent:
    return NodeEvent(event.ts_ms, event.gpu, event.kind, event.code, event.message, event.source)

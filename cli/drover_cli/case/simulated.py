"""What the simulated fleet gives, written as a case."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from drover_cli.case.write import ParquetWriter, write_jsonl
from drover_core.metrics.catalog import Scope
from drover_core.model.events import Event
from drover_core.model.fleet import FleetSpec, dump_json
from drover_core.model.reports import event_report

if TYPE_CHECKING:
    from drover_simulator.fleet import SimulatedFleet

ROWS_PER_WRITE = 100_000

Columns = dict[str, npt.NDArray[np.float64]]


class _Rows:
    """Collects ticks of one scope and writes them as one block now and then."""

    def __init__(self, path: Path, scope: Scope, keys: dict[str, npt.NDArray[Any]]) -> None:
        self._writer = ParquetWriter(path, scope)
        self._keys = keys
        self._ticks: list[tuple[int, npt.NDArray[np.bool_], Columns]] = []
        self._waiting = 0
        self.rows = 0

    def add(self, ts_ms: int, present: npt.NDArray[np.bool_], columns: Columns) -> int:
        """Take one tick; rows of silent nodes are left out. Returns how many values there were."""
        kept = {name: values[present] for name, values in columns.items()}
        self._ticks.append((ts_ms, present, kept))
        self._waiting += int(present.sum())
        if self._waiting >= ROWS_PER_WRITE:
            self._flush()
        return sum(int((~np.isnan(values)).sum()) for values in kept.values())

    def _flush(self) -> None:
        if not self._waiting:
            self._ticks.clear()
            return
        keys: dict[str, Any] = {
            name: np.concatenate([values[present] for _, present, _ in self._ticks])
            for name, values in self._keys.items()
        }
        keys["ts"] = np.concatenate([np.full(int(present.sum()), ts, np.int64) for ts, present, _ in self._ticks])
        names = self._ticks[0][2].keys()
        self._writer.write(keys, {name: np.concatenate([c[name] for _, _, c in self._ticks]) for name in names})
        self.rows += self._waiting
        self._ticks.clear()
        self._waiting = 0

    def close(self) -> None:
        self._flush()
        self._writer.close()


class CaseSink:
    """Writes a simulated fleet into `folder`, tick by tick."""

    def __init__(self, folder: Path, spec: FleetSpec) -> None:
        self._folder = folder
        self._spec = spec
        self._nodes = np.array([n.name for n in spec.nodes], object)
        gpu_node = np.repeat(np.arange(len(spec.nodes)), [n.gpus for n in spec.nodes])
        slots = np.concatenate([np.arange(n.gpus) for n in spec.nodes]).astype(np.uint8)
        self._gpu_node = gpu_node
        self._gpu = _Rows(folder / "gpu.parquet", Scope.GPU, {"node": self._nodes[gpu_node], "gpu": slots})
        self._node = _Rows(folder / "node.parquet", Scope.NODE, {"node": self._nodes})
        self._link: _Rows | None = None
        self._link_node: npt.NDArray[Any] = np.array([], object)
        self._events: list[Event] = []
        self.samples = 0

    @property
    def events(self) -> int:
        return len(self._events)

    def take(self, fleet: SimulatedFleet) -> None:
        """Take the fleet as it stands now."""
        reporting = ~np.isin(self._nodes.astype(str), list(fleet.silent_nodes()))
        gpus = fleet.gpu_columns()
        alive = reporting[self._gpu_node] & ~np.all(np.isnan(list(gpus.values())), axis=0)
        self.samples += self._gpu.add(fleet.now_ms, alive, gpus)
        self.samples += self._node.add(fleet.now_ms, reporting, fleet.node_columns())
        links, columns = fleet.link_columns()
        if links:
            if self._link is None:
                self._link_node = np.array([node for node, _ in links], object)
                names = np.array([link for _, link in links], object)
                self._link = _Rows(self._folder / "link.parquet", Scope.LINK, {"node": self._link_node, "link": names})
            linked = ~np.isin(self._link_node.astype(str), list(fleet.silent_nodes()))
            self.samples += self._link.add(fleet.now_ms, linked, columns)
        self._events += fleet.take_events()

    def close(self, fleet: SimulatedFleet) -> None:
        """Write what is only known at the end."""
        for rows in (self._gpu, self._node, self._link):
            if rows is not None:
                rows.close()
        spec = FleetSpec(self._spec.nodes, tuple(fleet.jobs), self._spec.name)
        (self._folder / "fleet.json").write_text(dump_json(spec, "simulation"), "utf-8")
        events = sorted(self._events, key=lambda e: e.ts_ms)
        write_jsonl(self._folder / "events.jsonl", map(event_report, events))
        write_jsonl(self._folder / "labels.jsonl", (label.to_dict() for label in fleet.labels))

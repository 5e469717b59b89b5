"""Where each entity is and was: the table, and all of it in memory."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from drover_collector.fleet.index import FleetIndex, IntArray
from drover_collector.fleet.ports import name_key
from drover_collector.store.clickhouse.client import Clients
from drover_collector.store.records import EntityRow, Ids, Millis, entity_id, placed_id
from drover_collector.store.samples.spans import Span, merged, without
from drover_collector.store.table_writer import Ms, TableWriter
from drover_core.metrics.catalog import Scope

FOREVER = 2**63 - 1
_NOW = 2**62
PORT_KEPT_MS = 7 * 86_400_000  # a port that was not reported for so long is left out at a start
Place = tuple[int, str, int | None, str, str]  # entity id, node, gpu, link, mig
Target = tuple[str, int | None, str | None]  # node, gpu, link


@dataclass(frozen=True, slots=True)
class PlaceMap:
    """Entity ids, ascending, and the position of each in the index's layout (-1: not in it)."""

    ids: Ids
    target: IntArray
    since_ms: Millis

    def find(self, ids: Ids) -> tuple[npt.NDArray[np.intp], IntArray]:
        """Return which of `ids` the index has, and their positions. Of two entities at one place the newer is last."""
        if not len(self.ids):
            return np.zeros(0, np.intp), np.zeros(0, np.int32)
        at = np.minimum(np.searchsorted(self.ids, ids), len(self.ids) - 1)
        rows = np.flatnonzero((self.ids[at] == ids) & (self.target[at] >= 0))
        rows = rows[np.argsort(self.since_ms[at[rows]], kind="stable")]
        return rows, self.target[at[rows]]


@dataclass(frozen=True, slots=True)
class Stay:
    """An entity at a target during [from_ms, to_ms)."""

    entity_id: int
    target: int
    from_ms: int
    to_ms: int


@dataclass(frozen=True, slots=True)
class WorkloadPlaces:
    """Entity ids of workloads, ascending, uint64 [W]; the node's number in the index (-1: not in it) and the name."""

    ids: Ids
    node: IntArray
    names: tuple[str, ...]

    def find(self, ids: Ids) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
        """Return which of `ids` are known, and their positions here."""
        if not len(self.ids):
            return np.zeros(0, np.intp), np.zeros(0, np.intp)
        at = np.minimum(np.searchsorted(self.ids, ids), len(self.ids) - 1)
        rows = np.flatnonzero(self.ids[at] == ids)
        return rows, at[rows]


class EntityRegistry:
    """All entities in memory. Thread-safe. `version` grows with every change."""

    def __init__(self, rows: Iterable[EntityRow]) -> None:
        self._lock = threading.Lock()
        self._places: dict[Place, EntityRow] = {}
        self._of_entity: dict[int, list[EntityRow]] = {}
        self._of_node: dict[str, dict[Place, EntityRow]] = {}
        self._maps: dict[tuple[Scope, int], tuple[FleetIndex, int, PlaceMap]] = {}
        self._workloads: tuple[FleetIndex, int, WorkloadPlaces] | None = None  # of an index and a version
        self.version = 0
        self._seen_ids: Ids = np.zeros(0, np.uint64)
        self._seen_ms: Millis = np.zeros(0, np.int64)
        self._counts: Counter[Scope] = Counter()
        self._counted_version = -1
        self._id_of_name: dict[int, int] = {}  # name -> id of GPUs whose id is not their name (`records.placed_id`)
        self._nameless: set[int] = set()  # ids of GPUs that have samples in the store, and no place
        self._sorted: dict[Scope, tuple[int, Ids]] = {}  # version, and its ids
        self.add(list(rows))

    def add(self, rows: Sequence[EntityRow]) -> list[EntityRow]:
        """Add rows. Of several stays of an entity at one place only the newest is kept.

        Returns:
            The rows to store, with the earliest known `first_ms` of each place.
        """
        with self._lock:
            merged = []
            for row in rows:
                place = (row.entity_id, row.node, row.gpu, row.link, row.mig)
                held = self._places.get(place)
                history = self._of_entity.get(row.entity_id)
                others = [r for r in history if r is not held] if history else []
                first_ms, last_ms = row.first_ms, row.last_ms
                if held is not None:
                    away = any(held.first_ms < other.first_ms <= first_ms for other in others)
                    first_ms = first_ms if away else min(held.first_ms, first_ms)
                    last_ms = max(held.last_ms, last_ms)
                row = row.during(first_ms, last_ms)
                place = (row.entity_id, row.node, row.gpu, row.link, row.mig)  # with its own texts
                self._places[place] = row
                # Most have one place: nothing to sort.
                self._of_entity[row.entity_id] = sorted([*others, row], key=lambda r: r.first_ms) if others else [row]
                self._of_node.setdefault(row.node, {})[place] = row
                if history is None and row.scope is Scope.GPU and (name := row.name) != row.entity_id:
                    self._id_of_name.setdefault(name, row.entity_id)
                merged.append(row)
            if merged:
                self.version += 1
            return merged

    def news(self, rows: Iterable[EntityRow]) -> list[EntityRow]:
        """Return the rows that add a place, or a later time at a known one."""
        with self._lock:
            known = self._places
            return [
                row
                for row in rows
                if (held := known.get((row.entity_id, row.node, row.gpu, row.link, row.mig))) is None
                or held.last_ms < row.last_ms
            ]

    def of_node(self, node: str) -> list[EntityRow]:
        """Return the entities whose newest place is on this node."""
        with self._lock:
            rows = list(self._of_node.get(node, {}).values())
            return [row for row in rows if self._of_entity[row.entity_id][-1] is row]

    def rows(self) -> list[EntityRow]:
        """Return all places of all entities."""
        with self._lock:
            return list(self._places.values())

    def gpus(self) -> list[EntityRow]:
        """Return GPUs and their MIG instances, each at its newest place."""
        with self._lock:
            newest = [rows[-1] for rows in self._of_entity.values()]
        return [row for row in newest if row.scope is Scope.GPU]

    def count(self, scope: Scope) -> int:
        """Return how many entities of a scope were ever seen."""
        with self._lock:
            if self._counted_version != self.version:
                self._counts = Counter(history[0].scope for history in self._of_entity.values())
                self._counted_version = self.version
            return self._counts[scope]

    def id_of(self, name: int) -> int | None:
        """Return the id of a GPU that was ever seen. Without a lock, as the event loop calls it."""
        return name if name in self._of_entity or name in self._nameless else self._id_of_name.get(name)

    def note_nameless(self, ids: Ids) -> None:
        """Note ids of GPUs that have samples: one without a place, as after damage, may have its name as id."""
        self._nameless.update(id_ for id_ in ids.tolist() if id_ not in self._of_entity)

    def ids(self, scope: Scope) -> Ids:
        """Return the ids of all entities of a scope that were ever seen, ascending."""
        with self._lock:
            held = self._sorted.get(scope)
            if held is None or held[0] != self.version:
                mine = [id_ for id_, history in self._of_entity.items() if history[0].scope is scope]
                held = self._sorted[scope] = self.version, np.sort(np.array(mine, np.uint64))
            return held[1]

    def map(self, index: FleetIndex, scope: Scope, at_ms: int) -> PlaceMap:
        """Return the places at a time: each entity's newest place that had begun by then, else its first."""
        with self._lock:
            held = self._maps.get((scope, id(index)))
            if held is None or held[0] is not index or held[1] != self.version:
                held = (index, self.version, self._all(index, scope))
                if len(self._maps) > 16:
                    self._maps.clear()
                self._maps[scope, id(index)] = held
        every = held[2]
        if not len(every.ids):
            return every
        first = np.append(True, every.ids[1:] != every.ids[:-1])
        begun = np.flatnonzero(first | (every.since_ms <= at_ms))
        ids = every.ids[begun]
        last = begun[np.append(ids[1:] != ids[:-1], True)]
        return PlaceMap(every.ids[last], every.target[last], every.since_ms[last])

    def workloads(self, index: FleetIndex) -> WorkloadPlaces:
        """Return where the workloads are. One never moves: its key begins with its node."""
        with self._lock:
            held = self._workloads
            if held is None or held[0] is not index or held[1] != self.version:
                rows = {row.entity_id: row for row in self._places.values() if row.scope is Scope.WORKLOAD}
                ordered = [rows[id_] for id_ in sorted(rows)]
                number = index.node_number
                places = WorkloadPlaces(
                    np.array([row.entity_id for row in ordered], np.uint64),
                    np.array([number.get(row.node, -1) for row in ordered], np.int32),
                    tuple(row.link for row in ordered),
                )
                held = self._workloads = (index, self.version, places)
            return held[2]

    def stays(self, targets: Sequence[Target], scope: Scope) -> list[Stay]:
        """Return which entities were at each target, and when; whole GPUs only."""
        found: list[Stay] = []
        with self._lock:
            places = {node: self._rows_at(node, scope) for node in dict.fromkeys(node for node, _, _ in targets)}
            for number, (node, gpu, link) in enumerate(targets):
                for row in places[node].get((gpu, link or ""), ()):
                    history = self._of_entity[row.entity_id]
                    at = history.index(row) if len(history) > 1 else 0
                    from_ms = 0 if at == 0 else row.first_ms
                    to_ms = FOREVER if at == len(history) - 1 else history[at + 1].first_ms
                    found.append(Stay(row.entity_id, number, from_ms, to_ms))
        return found

    def _rows_at(self, node: str, scope: Scope) -> dict[tuple[int | None, str], list[EntityRow]]:
        """Return (gpu, link) -> the entities of a scope that were ever there, without MIG instances."""
        found: dict[tuple[int | None, str], list[EntityRow]] = {}
        for row in self._of_node.get(node, {}).values():
            if row.scope is scope and not row.mig:
                found.setdefault((row.gpu, row.link), []).append(row)
        return found

    def names(
        self, scope: Scope, ids: Ids, ts_ms: Millis, *, instances: bool = False
    ) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Return (node, slot or link) of each row at its time; node "" for an unknown entity or a part of a GPU.

        Args:
            ids: uint64 [R]; ts_ms: int64 [R]. instances: only MIG instances, as "SLOT/NAME".
        Returns:
            str [R]; int16 [R] for GPUs, else str [R].
        """
        with self._lock:
            rows = [row for row in self._places.values() if row.scope is scope and bool(row.mig) is instances]
        rows.sort(key=lambda row: (row.entity_id, row.first_ms))
        count = len(rows)
        nodes = np.array([row.node for row in rows] + [""])
        slots = scope is Scope.GPU and not instances
        names = [f"{row.gpu}/{row.mig}" if instances else row.gpu if slots else row.link for row in rows]
        places = np.array([*names, 0 if slots else ""], np.int16 if slots else np.str_)
        known, first = np.unique(np.array([row.entity_id for row in rows], np.uint64), return_index=True)
        if not count:
            return nodes[np.zeros(len(ids), np.intp)], places[np.zeros(len(ids), np.intp)]
        since = np.array([row.first_ms for row in rows], np.int64)
        owner = np.minimum(np.searchsorted(known, ids), len(known) - 1)
        at = np.where(known[owner] == ids, first[owner], count)
        last = np.append(first[1:], count) - 1  # of each known entity
        for _ in range(int((last - first).max())):  # as often as the entity that moved most
            onward = np.minimum(at + 1, count - 1)
            moved = (at < last[owner]) & (at < count) & (since[onward] <= ts_ms)
            at = np.where(moved, onward, at)
        return nodes[at], places[at]

    def note_seen(self, ids: Ids, ts_ms: Millis) -> None:
        """Remember the newest sample of each entity."""
        with self._lock:
            if len(self._seen_ids) != len(self._of_entity):  # none is ever forgotten
                known = np.sort(np.fromiter(self._of_entity, np.uint64, len(self._of_entity)))
                seen = np.zeros(len(known), np.int64)
                if len(self._seen_ids):
                    seen[np.searchsorted(known, self._seen_ids)] = self._seen_ms
                self._seen_ids, self._seen_ms = known, seen
            if len(self._seen_ids):
                at = np.minimum(np.searchsorted(self._seen_ids, ids), len(self._seen_ids) - 1)
                rows = np.flatnonzero(self._seen_ids[at] == ids)
                np.maximum.at(self._seen_ms, at[rows], ts_ms[rows])

    def seen(self) -> tuple[Ids, Millis]:
        """Return the ids of all entities, and when each was seen last."""
        with self._lock:
            return self._seen_ids.copy(), self._seen_ms.copy()

    def newest_place(self, id_: int) -> tuple[str, int]:
        """Return the node that an entity is on, and when it had a sample last; ("", 0): it was never seen."""
        with self._lock:
            history = self._of_entity.get(id_)
            at = int(np.searchsorted(self._seen_ids, np.uint64(id_)))
            seen = at < len(self._seen_ids) and self._seen_ids[at] == np.uint64(id_)
            return (history[-1].node, int(self._seen_ms[at]) if seen else 0) if history else ("", 0)

    def newest_row(self, id_: int) -> EntityRow | None:
        """Return an entity at its newest place; None: it was never seen."""
        with self._lock:
            history = self._of_entity.get(id_)
            return history[-1] if history else None

    def moved(self) -> list[list[EntityRow]]:
        """Return the places of each entity that was on several nodes, oldest first."""
        with self._lock:
            several = [history for history in self._of_entity.values() if len(history) > 1]
        return [history for history in several if len({row.node for row in history}) > 1]

    def _add_ports(self, index: FleetIndex) -> None:
        """Add ports that agents reported and the index does not have, the newest first, as a node has a limit."""
        rows = [row for row in self._places.values() if row.scope is Scope.LINK]
        new = [at for at, row in enumerate(rows) if index.ports.number(row.node, row.link) is None]
        if not new:
            return
        reported_ms = np.array([row.last_ms for row in rows], np.int64)  # when each was reported or had a sample last
        if len(self._seen_ids):
            ids = np.array([row.entity_id for row in rows], np.uint64)
            place = np.minimum(np.searchsorted(self._seen_ids, ids), len(self._seen_ids) - 1)
            reported_ms = np.where(
                self._seen_ids[place] == ids, np.maximum(reported_ms, self._seen_ms[place]), reported_ms
            )
        fresh = [at for at in new if reported_ms[at] >= reported_ms.max() - PORT_KEPT_MS]
        fresh.sort(key=lambda at: (-int(reported_ms[at]), rows[at].node, name_key(rows[at].link)))
        index.ports.add((rows[at].node, rows[at].link) for at in fresh)

    def _all(self, index: FleetIndex, scope: Scope) -> PlaceMap:
        if scope is Scope.LINK:
            self._add_ports(index)
        ids: list[int] = []
        since: list[int] = []
        target: list[int] = []
        for row in self._places.values():
            if row.scope is not scope or row.mig:
                continue
            place: int | None = None
            if scope is Scope.GPU and row.gpu is not None:
                place = index.gpu(row.node, row.gpu)
            elif scope is Scope.NODE:
                place = index.node_number.get(row.node)
            elif scope is Scope.LINK:
                place = index.ports.number(row.node, row.link)
            ids.append(row.entity_id)
            since.append(row.first_ms)
            target.append(-1 if place is None else place)
        id_array, since_array = np.array(ids, np.uint64), np.array(since, np.int64)
        order = np.lexsort((since_array, id_array))
        return PlaceMap(id_array[order], np.array(target, np.int32)[order], since_array[order])


class EntityTable:
    """Entities and their places. `registry`: all of them in memory."""

    def __init__(self, clients: Clients, registry: EntityRegistry, writer: TableWriter) -> None:
        self._clients = clients
        self._writer = writer
        self._blocks: Sequence[Span] = ()  # numbers of inserts whose rows are in the registry
        self.registry = registry

    def write(self, rows: Sequence[EntityRow]) -> None:
        """Write where entities are from their `first_ms` on."""
        stored = self.registry.add(rows)
        self._writer.insert(
            "entities",
            stored,
            {
                "entity_id": lambda r: r.entity_id,
                "scope": lambda r: str(r.scope),
                "key": lambda r: r.key,
                "node": lambda r: r.node,
                "gpu": lambda r: -1 if r.gpu is None else r.gpu,
                "link": lambda r: r.link,
                "mig": lambda r: r.mig,
                "uuid": lambda r: r.uuid,
                "serial": lambda r: r.serial,
                "pci": lambda r: r.pci,
                "model": lambda r: r.model,
                "first": lambda r: Ms(r.first_ms),
                "last": lambda r: Ms(r.last_ms),
            },
        )
        ids, last = np.array([r.entity_id for r in stored], np.uint64), np.array([r.last_ms for r in stored], np.int64)
        self.registry.note_seen(ids, last)

    def gpu_id(self, key: str, node: str, near: str) -> int:
        """Return the id of a GPU or a part of one: the id that it has, else one next to those of its neighbours.

        A query about a rack or a job then reads few places of a table instead of one for each GPU. On a server the id
        is the hash of the key alone, as no collector knows what another has just seen.

        Args:
            near: neighbourhood of the node, as `FleetIndex.near` gives it.
        """
        name = entity_id(Scope.GPU, key)
        if not self._clients.embedded:
            return name
        return self.registry.id_of(name) or placed_id(name, near, node)

    def of_node(self, node: str) -> list[EntityRow]:
        """Return the entities whose newest place is on this node."""
        return self.registry.of_node(node)

    def gpus_of(self, node: str) -> list[EntityRow]:
        """Return the whole GPUs now in this node, by slot; of two in one slot, the newer."""
        rows = [row for row in self.of_node(node) if row.scope is Scope.GPU and not row.mig]
        by_slot = {row.gpu: row for row in sorted(rows, key=lambda row: row.first_ms)}
        return sorted(by_slot.values(), key=lambda row: row.gpu or 0)

    def last_seen(self, index: FleetIndex) -> Millis:
        """Return int64 [N]: when each node or anything on it was seen last, 0 for never."""
        result = np.zeros(index.node_count, np.int64)
        ids, seen = self.registry.seen()
        for scope in (Scope.GPU, Scope.NODE, Scope.LINK):
            places = self.registry.map(index, scope, _NOW)
            rows, target = places.find(ids)
            if scope is Scope.GPU:
                target = index.gpu_node[target]
            elif scope is Scope.LINK:
                target = np.array([port.node for port in index.ports.all()], np.int32)[target]
            np.maximum.at(result, target, seen[rows])
        return result

    def refresh(self) -> int:
        """Add what other collectors have written; return how many rows were new."""
        parts = self._clients.rows(
            "SELECT toInt64(min_block_number) AS low, toInt64(max_block_number) + 1 AS high"
            f" FROM {self._clients.parts} WHERE table = 'entities'"
        )
        spans = [(row["low"], row["high"]) for row in parts]
        new = merged(span for span in spans if without(span, self._blocks))
        if not new:
            return 0
        # By blocks, not by names: a part may be merged before it is read.
        low, high = (f"toInt64OrZero(splitByChar('_', _part)[{n}])" for n in (2, 3))
        rows = _rows(
            self._clients, f" WHERE {' OR '.join(f'({high} >= {first} AND {low} < {last})' for first, last in new)}"
        )
        news = self.registry.news(rows)
        self.registry.add(news)
        self._blocks = merged([*self._blocks, *new])
        return len(news)


def read_entities(clients: Clients) -> EntityRegistry:
    """Read all entities of a store."""
    rows = _rows(clients, " FINAL ORDER BY first, entity_id")  # of two ids of one name always the first counts
    return EntityRegistry(rows)


def _rows(clients: Clients, condition: str) -> list[EntityRow]:
    found = clients.rows(
        "SELECT entity_id, scope, key, node, nullIf(gpu, -1) AS gpu, uuid, serial, pci, model, link, mig,"
        f" toUnixTimestamp64Milli(first) AS first_ms, toUnixTimestamp64Milli(last) AS last_ms FROM entities{condition}"
    )
    return [EntityRow(**(row | {"scope": Scope(row["scope"])})) for row in found]

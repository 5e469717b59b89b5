"""What is known of the node's GPUs: set by their reader (`nvml`), read by every other source, from any thread."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping
from types import MappingProxyType

from drover_agent.sources.base import Entity
from drover_agent.sources.kmsg.lines import normal_pci
from drover_core.jobs.place import RankPlace

MAX_PLACES = 1_024  # processes that may say where they stand


class Gpus:
    """Who the GPUs and MIG instances of this node are, and which processes hold them.

    Attributes:
        profiled_elsewhere: another source gives the profiling metrics (DCGM does), so NVML need not, and must not: two
            readers of the same hardware counters disturb each other.
    """

    def __init__(self) -> None:
        self.profiled_elsewhere = False
        self._lock = threading.Lock()
        self._entities: dict[tuple[int | None, str], Entity] = {}
        self._places: dict[tuple[int, int], Entity] = {}
        self._pids: dict[int, tuple[int, ...]] = {}
        self._jobs: Mapping[str, tuple[int, ...]] = {}
        self._said: dict[int, RankPlace] = {}

    def set_entity(self, entity: Entity) -> None:
        """This is now the GPU of its slot, or the MIG instance of its name there."""
        place = entity.gpu, entity.mig
        known = self._entities.get(place)
        if known is not entity and known != entity:
            with self._lock:
                self._entities = {**self._entities, place: entity}

    def set_instances(
        self, gpu: int, instances: tuple[Entity, ...], places: Mapping[int, Entity] = MappingProxyType({})
    ) -> None:
        """These are now the MIG instances of the GPU in this slot; `places`: see `instance`."""
        with self._lock:
            others = {place: entity for place, entity in self._places.items() if place[0] != gpu}
            self._places = others | {(gpu, number): entity for number, entity in places.items()}
            kept = {p: e for p, e in self._entities.items() if p[0] != gpu or not p[1]}
            self._entities = kept | {(gpu, entity.mig): entity for entity in instances}

    def set_pids(self, gpu: int, pids: tuple[int, ...] | None) -> None:
        """The processes with a context on this GPU; None: it cannot be read."""
        with self._lock:
            rest = {slot: held for slot, held in self._pids.items() if slot != gpu}
            self._pids = rest if pids is None else {**rest, gpu: pids}

    def forget(self, gpu: int | None = None) -> None:
        """This GPU and its MIG instances, or all, are not what they were."""
        with self._lock:
            self._entities = {p: e for p, e in self._entities.items() if gpu is not None and p[0] != gpu}
            self._places = {p: e for p, e in self._places.items() if gpu is not None and p[0] != gpu}
            self._pids = {slot: pids for slot, pids in self._pids.items() if gpu is not None and slot != gpu}

    def all(self) -> tuple[Entity, ...]:
        """Whole GPUs, by slot."""
        return tuple(e for (_, mig), e in sorted(self._entities.items(), key=lambda row: row[0][0] or 0) if not mig)

    def find(self, *, pci: str = "", uuid: str = "") -> Entity | None:
        """The GPU at a PCI address, or the GPU or MIG instance with a UUID; None for any other device."""
        wanted = normal_pci(pci)
        for (_, mig), entity in self._entities.items():
            if uuid and (entity.uuid == uuid or mig == uuid):
                return entity
            if wanted and not mig and normal_pci(entity.pci) == wanted:
                return entity
        return None

    def instance(self, gpu: int | None, number: int) -> Entity | None:
        """The MIG instance that has this GPU instance, by NVML's number, for itself; None where several share it."""
        return None if gpu is None else self._places.get((gpu, number))

    def pids(self) -> Mapping[int, tuple[int, ...]]:
        """Slot -> processes that hold it; a slot that could not be read is missing."""
        return self._pids

    def set_jobs(self, jobs: Mapping[str, tuple[int, ...]]) -> None:
        """These jobs hold GPUs, and these of their processes are known."""
        self._jobs = jobs

    def jobs(self) -> Mapping[str, tuple[int, ...]]:
        """Job -> processes of it, also ones that are on no GPU; maybe none."""
        return self._jobs

    def say_place(self, process: int, place: RankPlace) -> None:
        """The loop in this process says where it stands in its job's parallel groups."""
        with self._lock:
            if process in self._said or len(self._said) < MAX_PLACES:
                self._said[process] = place

    def keep_places(self, processes: Collection[int]) -> None:
        """Only these processes hold GPUs now."""
        with self._lock:
            self._said = {process: place for process, place in self._said.items() if process in processes}

    def places(self) -> Mapping[int, RankPlace]:
        """Process -> where its loop says that it stands."""
        return self._said

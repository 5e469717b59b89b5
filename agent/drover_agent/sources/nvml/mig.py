"""MIG instances of one GPU, as rows of their own in addition to the GPU's."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pynvml

from drover_agent.sources.base import Entity, Reading
from drover_agent.sources.nvml.calls import ProcessList, Read
from drover_agent.sources.nvml.errors import FOR_GOOD
from drover_agent.sources.nvml.fields import MEMORY, PROCESSES_KEY
from drover_agent.sources.nvml.found import GPM_ALL, TARGETS, Found, Why
from drover_agent.sources.nvml.gpm import Gpm
from drover_core.metrics.catalog import Absent

# Every metric that an instance may have.
OF_INSTANCE = frozenset({*(TARGETS[key].name for key in (*MEMORY.keys, PROCESSES_KEY)), *GPM_ALL.names})
COMPUTE_LISTS = ("nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetComputeRunningProcesses_v2")


@dataclass(slots=True, eq=False, repr=False)
class _Instance:
    """One compute instance, which is what NVML calls a MIG device."""

    handle: Any
    entity: Entity
    gpu_instance: int
    memory: Read
    processes: ProcessList
    gpm: Gpm | None = None
    no_gpm: Absent | None = None

    def close(self) -> None:
        if self.gpm is not None:
            self.gpm.close()
            self.gpm = None


class MigInstances:
    """Those of one GPU; none while it is not in MIG mode."""

    def __init__(self, parent: Any, why: Why) -> None:
        self._parent, self._why = parent, why
        self._instances: dict[str, _Instance] = {}
        self._supported = True

    @property
    def entities(self) -> tuple[Entity, ...]:
        return tuple(instance.entity for instance in self._instances.values())

    @property
    def places(self) -> dict[int, Entity]:
        """GPU instance -> the instance that has it for itself."""
        all_ = list(self._instances.values())
        numbers = [instance.gpu_instance for instance in all_]
        return {one.gpu_instance: one.entity for one in all_ if numbers.count(one.gpu_instance) == 1}

    def look(self, gpu: Entity) -> bool:
        """See which instances there are now; whether they changed. May cost 2 calls for each place of an instance.

        Raises:
            LostError, DriverGoneError.
        """
        before = self.entities
        listed = self._listed(gpu)
        if listed is None:
            return False
        found = {entity.mig: (handle, entity, place) for handle, entity, place in listed}
        for uuid in [uuid for uuid in self._instances if uuid not in found]:
            self._instances.pop(uuid).close()
        for uuid, (handle, entity, place) in found.items():
            known = self._instances.get(uuid)
            if known is None or known.gpu_instance != place:
                if known is not None:
                    known.close()
                make = MEMORY.make
                assert make is not None
                self._instances[uuid] = _Instance(handle, entity, place, make(), ProcessList(*COMPUTE_LISTS))
            else:
                known.handle, known.entity = handle, entity
        return before != self.entities

    def _listed(self, gpu: Entity) -> list[tuple[Any, Entity, int]] | None:
        """Return the instances; None: not known now whether there are any, so those listed last stay."""
        if not self._supported:
            return []
        try:
            if pynvml.nvmlDeviceGetMigMode(self._parent)[0] != pynvml.NVML_DEVICE_MIG_ENABLE:
                return []
            places = pynvml.nvmlDeviceGetMaxMigDeviceCount(self._parent)
        except pynvml.NVMLError as error:
            self._supported = self._why(error.value, "nvmlDeviceGetMigMode") is not Absent.UNSUPPORTED
            return None if self._supported else []
        listed = []
        for index in range(places):
            try:
                handle = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(self._parent, index)
                uuid = str(pynvml.nvmlDeviceGetUUID(handle))
                place = int(pynvml.nvmlDeviceGetGpuInstanceId(handle))
                model = str(pynvml.nvmlDeviceGetName(handle))
            except pynvml.NVMLError as error:
                if error.value != pynvml.NVML_ERROR_NOT_FOUND:  # an empty place, or an instance going away right now
                    self._why(error.value, "nvmlDeviceGetMigDeviceHandleByIndex")
                continue
            listed.append((handle, replace(gpu, key=uuid, uuid=uuid, serial="", model=model, mig=uuid), place))
        return listed

    def read(self, reading: Reading, *, slow: bool, profile: bool) -> None:
        """A row for each instance: memory, processes, and GPM where the instance has its part of the GPU for itself.

        Raises:
            LostError, DriverGoneError.
        """
        instances = list(self._instances.values())
        places = [instance.gpu_instance for instance in instances]
        for instance in instances:
            found = Found()
            if slow:
                self._ask(found, instance)
            if profile:
                # GPM counts GPU instances. Where several compute instances share one, none of them is the counted.
                self._read_gpm(found, instance, alone=places.count(instance.gpu_instance) == 1, slow=slow)
            elif instance.gpm is not None:
                instance.gpm.skip()
            if found.values:
                reading.rows.append((instance.entity, found.values))
            reading.absent.extend((instance.entity, name, why) for name, why in found.absent.items())

    def _ask(self, found: Found, instance: _Instance) -> None:
        try:
            for key, raw in zip(MEMORY.keys, instance.memory(instance.handle), strict=True):
                found.put(TARGETS[key], raw)
        except pynvml.NVMLError as error:
            found.rest((TARGETS[key].name for key in MEMORY.keys), self._reason(error, MEMORY.name))
        try:
            found.put(TARGETS[PROCESSES_KEY], len(instance.processes.read(instance.handle)))
        except pynvml.NVMLError as error:
            found.absent[TARGETS[PROCESSES_KEY].name] = self._reason(error, PROCESSES_KEY)

    def _reason(self, error: Any, what: str) -> Absent:
        """Return why. An instance destroyed since the last listing is no lost GPU, and our arguments were right."""
        gone = (pynvml.NVML_ERROR_INVALID_ARGUMENT, pynvml.NVML_ERROR_NOT_FOUND, pynvml.NVML_ERROR_GPU_NOT_FOUND)
        return Absent.LOST if error.value in gone else self._why(error.value, f"{what} of a MIG instance")

    def _read_gpm(self, found: Found, instance: _Instance, *, alone: bool, slow: bool) -> None:
        if alone and instance.no_gpm is None:
            try:
                if instance.gpm is None:
                    instance.gpm = Gpm(self._parent, GPM_ALL, instance.gpu_instance)
                GPM_ALL.put(found, instance.gpm.read(), self._why)
                return
            except pynvml.NVMLError as error:
                why = self._reason(error, "GPM")
                if why in FOR_GOOD:
                    instance.no_gpm = why
                else:
                    found.rest(GPM_ALL.names, why)
                    return
        if slow:
            found.rest(GPM_ALL.names, instance.no_gpm or Absent.UNSUPPORTED)

    def close(self) -> None:
        for instance in self._instances.values():
            instance.close()
        self._instances = {}

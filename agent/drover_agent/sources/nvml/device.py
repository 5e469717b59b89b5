"""One GPU as a source: what NVML and GPM say of it and its MIG instances, and why the rest is absent."""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pynvml

from drover_agent.sources.base import Entity, NodeEvent, Reading
from drover_agent.sources.gpus import Gpus
from drover_agent.sources.nvml.calls import ProcessList
from drover_agent.sources.nvml.errors import (
    FOR_GOOD,
    DriverGoneError,
    LostError,
    absence,
)
from drover_agent.sources.nvml.fields import (
    NVML_METRICS,
    PROCESSES_KEY,
    RARE_MS,
    SLOW_MS,
)
from drover_agent.sources.nvml.found import GPM_ALL, GPM_BUT_UTILIZATION, TARGETS, Found
from drover_agent.sources.nvml.identity import Identity
from drover_agent.sources.nvml.inventory import Inventory
from drover_agent.sources.nvml.metrics import Metrics
from drover_agent.sources.nvml.mig import COMPUTE_LISTS, OF_INSTANCE, MigInstances
from drover_core.metrics.catalog import Absent
from drover_core.model.kinds import EventKind

MPS_LISTS = ("nvmlDeviceGetMPSComputeRunningProcesses_v3", "nvmlDeviceGetMPSComputeRunningProcesses_v2")
STAGGERED = 8  # GPUs whose slow metrics are read in seconds of their own; a ninth shares that of the first
MPS_MS = 60_000  # a list costs milliseconds, and few nodes run MPS: asked this rarely while there is nothing in it

_log = logging.getLogger(__name__)

PROFILING = frozenset(GPM_ALL.names)
# Every metric that this source gives: what is absent while a GPU is lost.
ALL = tuple(dict.fromkeys([*(metric.name for metric in NVML_METRICS.values()), *GPM_ALL.names]))
# Where another reader gives what GPM would.
BUT_PROFILING = tuple(name for name in ALL if name not in GPM_BUT_UTILIZATION.names)


@dataclass(slots=True, eq=False, repr=False)
class Session:
    """One opening of NVML, shared by all who call it.

    Attributes:
        open: False: make no call.
        count: how many GPUs NVML lists.
        ids: the driver's number of each field it has.
        trouble: why it must be closed; set by the caller that meets it.
    """

    open: bool = False
    number: int = 0
    count: int = 0
    ids: Mapping[str, int] = field(default_factory=dict)
    trouble: str = ""


class NvmlDevice:
    """One GPU. `read` never raises for what a device does; it blocks when the driver does."""

    interval_s = 1.0

    def __init__(self, slot: int, node: str, session: Session, serials: dict[str, set[int]], gpus: Gpus) -> None:
        """`serials`: the slots that have each serial, one dict for all devices."""
        self.slot = slot
        self.name = f"nvml:{slot}"
        self.handle: Any = None
        self.address: int | None = None  # the last handle as a number: events name their device by it
        self.lost = False
        self.times_lost = 0  # and times that NVML was closed: an event set of before does not know the GPU any more
        self.calling = threading.Lock()  # held while it may be in a call: NVML must not be closed meanwhile
        self._session, self._gpus = session, gpus
        self._seen_session = 0
        self._identity = Identity(slot, node, serials)
        self._inventory = Inventory(slot)
        self._metrics: Metrics | None = None
        self._mig: MigInstances | None = None
        self._instances: tuple[Entity, ...] = ()  # those of the last look: they are lost with their GPU
        self._lists: list[ProcessList | Absent] = []
        self._mps_ms = 0  # when the MPS list is due
        self._last_slow = self._last_rare = -1  # number of this GPU's SLOW_MS and RARE_MS in which it was last so read
        self._plain = 0, 0  # from when until when a tick has nothing slow, new or wrong: see `ask`
        self._logged: set[tuple[str, int]] = set()

    @property
    def entity(self) -> Entity:
        """Keyed by serial, else UUID, else NODE/PCI address, else NODE/gpuN."""
        return self._identity.entity

    def ask(self, now_ms: int) -> Callable[[], Reading] | None:
        """Make the calls of a tick in which nothing is slow, new or wrong; what they brought is the Reading of what is
        given, which makes none. None: `read` is needed. Both block when the driver does.

        A processor that sleeps in a call comes back with cold caches: the less is done between two calls, the less it
        costs.
        """
        first_ms, end_ms = self._plain
        if not first_ms <= now_ms < end_ms or not self.calling.acquire(blocking=False):
            return None
        try:
            metrics = self._metrics
            if not self._session.open or self._seen_session != self._session.number or metrics is None:
                return None
            profile = not self._gpus.profiled_elsewhere
            if not metrics.ask(now_ms, profile=profile):
                return None
            return partial(self._take, metrics, profile)
        finally:
            self.calling.release()

    def _take(self, metrics: Metrics, profile: bool) -> Reading:
        found, entity = Found(), self.entity
        metrics.take(found, profile=profile)
        self._gpus.set_entity(entity)
        absent = [(entity, name, why) for name, why in found.absent.items()]
        return Reading(rows=[(entity, found.values)] if found.values else [], absent=absent)

    def read(self, now_ms: int) -> Reading:
        """Values, absences and whether the GPU was lost or came back since the last read."""
        if not self.calling.acquire(blocking=False):
            return Reading() if self._session.open else self._closed()  # being closed: no news, but if that hangs
        try:
            return self._read(now_ms)
        finally:
            self.calling.release()

    def _read(self, now_ms: int) -> Reading:
        if not self._session.open:
            return self._closed()
        reading, found = Reading(), Found()
        if self._seen_session != self._session.number:
            self._seen_session = self._session.number
            self._let_go()
        slow_number = self._slow_number(now_ms)
        rare_number = slow_number * SLOW_MS // RARE_MS
        pace_ms = 0
        if slow_number != self._last_slow or self.lost:
            pace_ms = RARE_MS if rare_number != self._last_rare or self.lost else SLOW_MS
        try:
            refused = self._open(now_ms, reading.inventory)
            if refused is None:
                self._read_all(found, reading, now_ms, pace_ms)
            else:
                self._nothing(found, reading, refused)
        except LostError as error:
            if not self.lost:
                self.lost = True
                why_lost = str(error) or "no longer answers: NVML says that it is lost"
                reading.events.append(self._event(now_ms, "gpu_lost", why_lost))
            self._let_go()  # samples and instances went with the GPU, and it may be another one when a slot answers
            self._nothing(found, reading, Absent.LOST)
        except DriverGoneError as error:
            self._session.trouble = self._session.trouble or f"the NVIDIA driver does not answer any more: {error}"
            self._nothing(found, reading, Absent.ERROR)
        else:
            if self.lost and refused is None:
                self.lost = False
                reading.events.append(self._event(now_ms, "gpu_back", "answers again"))
            if pace_ms:
                self._last_slow = slow_number
            if pace_ms == RARE_MS:
                self._last_rare = rare_number
        self._plain = self._plain_from(now_ms)
        entity = self.entity
        if self.slot < self._session.count:
            self._gpus.set_entity(entity)
        if found.values:
            reading.rows.insert(0, (entity, found.values))
        reading.absent.extend((entity, name, why) for name, why in found.absent.items())
        return reading

    def _slow_number(self, now_ms: int) -> int:
        """Changes a second after that of the GPU before it, so that no tick has the slow calls of all; and early in the
        10 s, so that a tick that is missed can be made up for in the same detector bucket."""
        return (now_ms - self.slot % STAGGERED * 1000) // SLOW_MS

    def _plain_from(self, now_ms: int) -> tuple[int, int]:
        """(first, end) of the time in which `ask` can do what `read` would, as things are now."""
        if self.lost or self._metrics is None or self._instances or self._slow_number(now_ms) != self._last_slow:
            return 0, 0
        slow_ms = (self._last_slow + 1) * SLOW_MS + self.slot % STAGGERED * 1000
        return now_ms, min(slow_ms, self._identity.next_ms, self._inventory.next_ms)

    def _closed(self) -> Reading:
        reading, found = Reading(), Found()
        self._nothing(found, reading, Absent.ERROR)
        reading.absent.extend((self.entity, name, why) for name, why in found.absent.items())
        return reading

    def _nothing(self, found: Found, reading: Reading, why: Absent) -> None:
        """What was not read, of the GPU and of its instances, is absent for this reason."""
        elsewhere = self._gpus.profiled_elsewhere
        found.rest(BUT_PROFILING if elsewhere else ALL, why)
        names = OF_INSTANCE - PROFILING if elsewhere else OF_INSTANCE
        reading.absent.extend((instance, name, why) for instance in self._instances for name in names)

    def again(self) -> None:
        """Read everything next: all of it was reported as absent while a call hung."""
        self._last_slow = self._last_rare = -1
        self._plain = 0, 0

    def close(self) -> None:
        """Let go of what NVML gave; NVML itself is closed by who opened it."""
        if self._session.open:
            for part in (self._metrics, self._mig):
                if part is not None:
                    part.close()
        self._let_go()

    def _let_go(self) -> None:
        """What NVML gave means nothing any more."""
        self.times_lost += 1
        self.handle, self._metrics, self._mig, self._lists = None, None, None, []
        self._last_slow, self._last_rare, self._mps_ms = -1, -1, 0
        self._plain = 0, 0
        self._identity.doubt()
        self._inventory.again()
        self._gpus.set_pids(self.slot, None)
        self._gpus.set_instances(self.slot, ())

    def _open(self, now_ms: int, inventory: dict[str, str]) -> Absent | None:
        """Get a handle and what is not known yet of the identity; the reason when there is no handle to be had."""
        if self.slot >= self._session.count:
            # Of the GPUs that were there before NVML was opened again. The one here may be in another slot now.
            inventory |= self._identity.clear() | self._inventory.clear()
            self._gpus.forget(self.slot)
            self._instances = ()
            raise LostError(f"is not there any more: NVML lists {self._session.count} GPUs")
        if self.handle is None:
            try:
                handle = pynvml.nvmlDeviceGetHandleByIndex(self.slot)
            except pynvml.NVMLError as error:
                return self._why(error.value, "nvmlDeviceGetHandleByIndex")
            self._identity.read(handle, now_ms, self._why)
            inventory |= self._identity.inventory()
            self.handle, self.address = handle, ctypes.cast(handle, ctypes.c_void_p).value
            self._metrics = Metrics(handle, self._session.ids, self._why)
            self._mig = MigInstances(handle, self._why)
        elif self._identity.read(self.handle, now_ms, self._why):
            self._inventory.again()
            inventory |= self._identity.inventory()
        return None

    def _read_all(self, found: Found, reading: Reading, now_ms: int, pace_ms: int) -> None:
        assert self._metrics is not None
        assert self._mig is not None
        profile, slow = not self._gpus.profiled_elsewhere, pace_ms > 0
        if slow and self._mig.look(self.entity):
            self._metrics.forget()  # in MIG mode a GPU refuses what it gave before, and the other way round
            self._inventory.again()
            self._gpus.set_instances(self.slot, self._mig.entities, self._mig.places)
        self._instances = self._mig.entities
        self._metrics.read(found, now_ms, pace_ms=pace_ms, profile=profile)
        if slow:
            self._read_processes(found, now_ms)
        self._mig.read(reading, slow=slow, profile=profile)
        reading.inventory |= self._inventory.read(self.handle, now_ms)

    def _read_processes(self, found: Found, now_ms: int) -> None:
        """Process ids for who asks which job holds the GPU; the metric counts those with a compute context."""
        target = TARGETS[PROCESSES_KEY]
        if not self._lists:
            self._lists = [self._list(*COMPUTE_LISTS), self._list(*MPS_LISTS)]
        pids = self._listed(0)
        if isinstance(pids, Absent):
            found.absent[target.name] = pids
            self._gpus.set_pids(self.slot, None)
            return
        found.put(target, len(pids))
        if not 0 < self._mps_ms - now_ms <= MPS_MS:
            of_mps = self._listed(1)
            if isinstance(of_mps, Absent) or not of_mps:
                self._mps_ms = now_ms + MPS_MS
            else:
                pids = sorted({*pids, *of_mps})
        self._gpus.set_pids(self.slot, tuple(pids))

    def _list(self, *names: str) -> ProcessList | Absent:
        try:
            return ProcessList(*names)
        except pynvml.NVMLError as error:
            return self._why(error.value, names[0])

    def _listed(self, place: int) -> list[int] | Absent:
        asked = self._lists[place]
        if isinstance(asked, Absent):
            return asked
        try:
            return asked.read(self.handle)
        except pynvml.NVMLError as error:
            why = self._why(error.value, PROCESSES_KEY)
            if why in FOR_GOOD and place == 1:
                self._lists[place] = why
            return why

    def _why(self, code: int, what: str) -> Absent:
        """The reason for the records of one failure; unexpected ones are logged once.

        Raises:
            LostError, DriverGoneError: the rest need not be asked.
        """
        why = absence(code)
        if why is not Absent.UNSUPPORTED and (what, code) not in self._logged:
            self._logged.add((what, code))
            _log.warning("GPU %d: %s could not be read: %s", self.slot, what, pynvml.NVMLError(code))
        return why

    def _event(self, now_ms: int, code: str, text: str) -> NodeEvent:
        entity = self.entity
        label = " ".join(filter(None, (f"GPU {self.slot}", entity.model, entity.pci)))
        return NodeEvent(now_ms, self.slot, EventKind.LIFECYCLE, code, f"{label} {text}", "nvml")

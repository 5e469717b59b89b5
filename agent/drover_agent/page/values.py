"""The newest value of each metric of each GPU of this node, and the pages made of them."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable

from drover_agent.sources.base import Entity, Reading
from drover_core.metrics.catalog import Scope
from drover_core.metrics.dcgm_names import LAST_XID
from drover_core.metrics.series import GpuIdentity, Series, label_text
from drover_core.model.kinds import EventKind

FRESH_MS = 60_000  # an older value says nothing of now; the slowest source reads every 30 s


class NewestValues:
    """`take` in the event loop; `page` from any thread."""

    def __init__(self, node: str, now_ms: Callable[[], int]) -> None:
        self._node, self._now_ms = node, now_ms
        self._lock = threading.Lock()
        self._values: dict[Entity, dict[str, tuple[float, int]]] = {}  # value, and when it was read
        self._jobs: dict[int, str] = {}
        self._xids: dict[int, float] = {}  # the newest of each slot since the start, as DCGM keeps it

    def take(self, ts_ms: int, reading: Reading) -> None:
        """Take what a source read at `ts_ms`."""
        with self._lock:
            for entity, values in reading.rows:
                if entity.scope is Scope.GPU and not entity.mig:
                    own = self._values.get(entity)
                    if own is None:
                        own = self._place(entity)
                    for name, value in values.items():
                        own[name] = value, ts_ms
            for entity, name, _ in reading.absent:
                self._values.get(entity, {}).pop(name, None)
            for gpu, job in reading.holdings:
                self._jobs[gpu] = job or ""
            for event in reading.events:
                is_new = event.kind is EventKind.XID and event.code.isdecimal() and not event.backlog
                if is_new and event.gpu is not None:
                    self._xids[event.gpu] = float(event.code)

    def _place(self, entity: Entity) -> dict[str, tuple[float, int]]:
        """Begin a GPU. What stood in its slot before, or the same one before its UUID was read, ends at once."""
        for other in [other for other in self._values if other.gpu == entity.gpu]:
            del self._values[other]
        own = self._values[entity] = {}
        return own

    def page(self, families: Iterable[Series], naming: str) -> str:
        """Return the page with these families. A value that is not known now is left out."""
        now_ms = self._now_ms()
        gpus: list[tuple[str, dict[str, float]]] = []
        with self._lock:
            self._forget(now_ms)
            for entity, own in sorted(self._values.items(), key=lambda item: item[0].gpu or 0):
                values = {name: value for name, (value, _) in own.items() if not math.isnan(value)}
                slot = entity.gpu or 0
                values[LAST_XID] = self._xids.get(slot, 0.0)
                identity = GpuIdentity(self._node, slot, entity.uuid, entity.model, "", entity.pci)
                gpus.append((label_text(identity.labels(naming, self._jobs.get(slot, ""))), values))
        lines: list[str] = []
        for family in families:
            known = [(labels, value) for labels, values in gpus if (value := family.value(values)) is not None]
            if known:
                lines.append(family.header)
                lines += [f"{family.name}{labels} {value!r}\n" for labels, value in known]
        return "".join(lines)

    def _forget(self, now_ms: int) -> None:
        """Drop old values, and GPUs without any: what stood in a slot before, or has fallen off the bus."""
        for entity, own in list(self._values.items()):
            for name, (_, ts_ms) in list(own.items()):
                if abs(now_ms - ts_ms) > FRESH_MS:
                    del own[name]
            if not own:
                del self._values[entity]

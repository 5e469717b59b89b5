"""Who the GPU in a slot is, read again whenever it may have become another."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import pynvml

from drover_agent.sources.base import Entity
from drover_core.metrics.catalog import Absent, Scope

CHECK_MS = 60_000  # a slot's UUID is asked again after this long, so that no row carries another GPU's key

_log = logging.getLogger(__name__)


def pci_address(info: Any) -> str:
    """As sysfs and the kernel log write it."""
    return f"{info.domain:04x}:{info.bus:02x}:{info.device:02x}.0"


_PARTS: Mapping[str, Callable[[Any], str]] = {
    "uuid": lambda h: str(pynvml.nvmlDeviceGetUUID(h)),
    "serial": lambda h: str(pynvml.nvmlDeviceGetSerial(h)),
    "pci": lambda h: pci_address(pynvml.nvmlDeviceGetPciInfo(h)),
    "model": lambda h: str(pynvml.nvmlDeviceGetName(h)),
}


class Identity:
    """Serial, UUID, PCI address and model of the GPU in one slot."""

    def __init__(self, slot: int, node: str, serials: dict[str, set[int]]) -> None:
        """`serials`: the slots that have each serial, one dict for all GPUs of the node."""
        self._slot, self._node, self._serials = slot, node, serials
        self._known: dict[str, str] = {}
        self._asked: set[str] = set()  # parts that were answered, or refused for good
        self._checked_ms = 0
        self._entity: tuple[bool, Entity] | None = None

    @property
    def entity(self) -> Entity:
        """Keyed by serial, else UUID, else NODE/PCI address, else NODE/gpuN."""
        known = self._known
        serial = known.get("serial", "")
        # Two GPUs of one board may carry the board's serial: then it identifies neither.
        alone = bool(serial) and not self._serials.get(serial, set()) - {self._slot}
        if self._entity is None or self._entity[0] != alone:
            uuid, pci = known.get("uuid", ""), known.get("pci", "")
            own = serial if alone else ""
            key = own or uuid or (f"{self._node}/{pci}" if pci else f"{self._node}/gpu{self._slot}")
            self._entity = (
                alone,
                Entity(Scope.GPU, key, self._slot, uuid=uuid, serial=serial, pci=pci, model=known.get("model", "")),
            )
        return self._entity[1]

    def doubt(self) -> None:
        """It may be another GPU now. What is known stays until the next `read`: a lost GPU keeps its name, but not
        against one that has its serial in another slot now."""
        self._asked.clear()
        self._serials.get(self._known.get("serial", ""), set()).discard(self._slot)

    def due(self, now_ms: int) -> bool:
        """Whether `read` would ask something."""
        return len(self._asked) < len(_PARTS) or not 0 <= now_ms - self._checked_ms < CHECK_MS

    @property
    def next_ms(self) -> int:
        """When `read` next asks something, unless the clock is set back."""
        return self._checked_ms + CHECK_MS if len(self._asked) == len(_PARTS) else 0

    def read(self, handle: Any, now_ms: int, why: Callable[[int, str], Absent]) -> bool:
        """Ask what is not known, and now and then whether it is still the same GPU; whether anything changed.

        Raises:
            LostError, DriverGoneError: by `why`.
        """
        if not self.due(now_ms):
            return False
        if len(self._asked) == len(_PARTS):
            self._checked_ms = now_ms
            if self._ask("uuid", handle, why) in (None, self._known.get("uuid", "")):
                return False
            _log.warning("GPU %d is another one now", self._slot)
            self.doubt()
        asked, before = set(self._asked), self._known
        if not asked:
            self._checked_ms = now_ms
        found = dict(before) if asked else {}  # nothing is taken over before the last part is read: it may be lost
        for part in _PARTS:
            if part in asked:
                continue
            text = self._ask(part, handle, why)
            if text is not None:
                asked.add(part)
                if text:
                    found[part] = text
            elif part in before and before.get("uuid", "") == found.get("uuid", "-"):
                found[part] = before[part]  # it is the same GPU, so its key must not change meanwhile
        self._asked = asked
        self._set(found)
        return found != before

    def _set(self, known: dict[str, str]) -> None:
        self._serials.get(self._known.get("serial", ""), set()).discard(self._slot)
        self._known, self._entity = known, None
        if serial := known.get("serial", ""):
            self._serials.setdefault(serial, set()).add(self._slot)

    def _ask(self, part: str, handle: Any, why: Callable[[int, str], Absent]) -> str | None:
        """Return its text; "" when the GPU has none, None when it may be given another time."""
        try:
            text = _PARTS[part](handle)
        except UnicodeDecodeError as error:
            _log.warning("GPU %d: its %s is not text (%s)", self._slot, part, error)
            return ""
        except pynvml.NVMLError as error:
            return "" if why(error.value, part) is Absent.UNSUPPORTED else None
        return text if text.strip("0 ") else ""  # boards without a serial number of their own report zeros

    def clear(self) -> dict[str, str]:
        """There is no GPU in this slot; what the inventory had of it, as empty."""
        known = dict.fromkeys(self.inventory(), "") if self._known else {}
        self._asked.clear()
        self._set({})
        return known

    def inventory(self) -> dict[str, str]:
        return {f"gpu{self._slot}.{part}": self._known.get(part, "") for part in _PARTS}

"""Which GPU a sample of a page is of, by its labels. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from drover_collector.scrape.tables import GpuLabels
from drover_core.metrics.prometheus_text import Sample

MAX_GPUS = 64  # of one node
MAX_NAME = 128  # characters of a GPU's serial, UUID, place or model, and of a port's name
_SLOT = re.compile(r"(?:(?:gpu|card|nvidia|amd|accelerator|device)[ _#:-]?)?([0-9]{1,3})", re.IGNORECASE)
_UUID = re.compile(r"(?:GPU-)?[0-9a-fA-F]{8}(?:-?[0-9a-fA-F]{4}){3}-?[0-9a-fA-F]{12}")


@dataclass(frozen=True, slots=True)
class GpuId:
    """A GPU as its page names it. `key`: its serial, else its UUID."""

    slot: int
    key: str
    uuid: str = ""
    serial: str = ""
    pci: str = ""
    model: str = ""


def gpu_of(names: GpuLabels, labels: Mapping[str, str], whole: bool = False) -> GpuId | None:
    """Return the GPU that a sample is of; None: it is of something else, or its labels cannot name a GPU.

    Args:
        whole: a sample of a part of the GPU has the whole one's value, so it counts as the GPU's.
    """
    if any(labels.get(name) for name in names.skip_with if not (whole and name in names.parts)):
        return None
    if any(labels.get(name, value) != value for name, value in names.only.items()):
        return None

    def first(of: Sequence[str]) -> str:
        return next((text for name in of if (text := labels.get(name, ""))), "")

    slot, uuid, serial = first(names.slot), first(names.uuid), first(names.serial)
    key = serial or uuid
    if not (slot.isascii() and slot.isdecimal() and len(slot) <= 3 and int(slot) <= 255) or not is_plain(key):
        return None
    texts = (uuid, serial, first(names.pci), first(names.model))
    return GpuId(int(slot), key, *(text if len(text) <= MAX_NAME and text.isprintable() else "" for text in texts))


def is_plain(name: str) -> bool:
    """Return whether a name may become part of ids, and stand in logs."""
    return 0 < len(name) <= MAX_NAME and name.isascii() and name.isprintable() and not set(name) & {" ", "\\", '"'}


@dataclass(slots=True)
class _Known:
    """What is known of one GPU. `key` never changes, so that it stays one GPU."""

    slot: int | None = None
    key: str = ""
    texts: dict[str, str] = field(default_factory=dict)


class HwGpus:
    """The GPUs of one source of OpenTelemetry's `hw.*` metrics.

    Only `hw.id` is on every point: the conventions make slot, model and serial optional, and put them on some metrics
    alone. So what one point says of a GPU holds for all with the same `hw.id`. A sensor may name its GPU in
    `hw.parent`. A slot is a number in `gpu.index`, else in `hw.id` or `hw.name`, perhaps behind a word (`gpu3`). It is
    never made up of the order of GPUs, which changes when one is lost.
    """

    def __init__(self, names: GpuLabels, node: str) -> None:
        self._names, self._node = names, node
        self._known: dict[str, _Known] = {}
        self._gpus: dict[str, GpuId] = {}
        self.vendors: set[str] = set()

    def learn(self, samples: Mapping[str, list[Sample]]) -> set[str]:
        """Note what the samples of a page say of GPUs. Return why some cannot be used."""
        problems: set[str] = set()
        once: set[int] = set()
        for name, found in samples.items():
            for labels, _ in found:
                if id(labels) not in once and (name.startswith("hw.gpu.") or labels.get("hw.type") == "gpu"):
                    once.add(id(labels))
                    problems |= self._note(labels)
        for name, known in self._known.items():
            if known.slot is None:
                problems.add("GPUs without a slot: send gpu.index, or a number in hw.name")
            else:
                self._gpus[name] = GpuId(known.slot, known.key, **known.texts)
        return problems

    def of(self, labels: Mapping[str, str]) -> GpuId | None:
        """Return the GPU of a point; None: it is of something else."""
        if any(labels.get(name) for name in self._names.skip_with):
            return None
        return self._gpus.get(labels.get("hw.id", "")) or self._gpus.get(labels.get("hw.parent", ""))

    def _note(self, labels: Mapping[str, str]) -> set[str]:
        name = labels.get("hw.id", "")
        if any(labels.get(label) for label in self._names.skip_with):
            return set()
        if not is_plain(name):
            return {"GPUs without a plain hw.id"}
        if name not in self._known and len(self._known) >= MAX_GPUS:
            return {f"more than {MAX_GPUS} GPUs"}
        known = self._known.setdefault(name, _Known())
        slots = [int(match[1]) for text in self._all(self._names.slot, labels) if (match := _SLOT.fullmatch(text))]
        if known.slot is None and slots and slots[0] <= 255:
            known.slot = slots[0]
        models = [text for text in self._all(self._names.model, labels) if not _SLOT.fullmatch(text)]
        texts = {
            "uuid": [name] if _UUID.fullmatch(name) else [], "model": models,
            "serial": self._all(self._names.serial, labels), "pci": self._all(self._names.pci, labels),
        }  # fmt: skip
        for field_name, given in texts.items():
            if field_name not in known.texts and given and len(given[0]) <= MAX_NAME and given[0].isprintable():
                known.texts[field_name] = given[0]
        if not known.key:
            unique = known.texts.get("uuid") or known.texts.get("serial", "")
            # The conventions make hw.id unique within its host alone.
            known.key = unique if is_plain(unique) else f"{self._node}:{name}"
        vendor = (labels.get("hw.vendor", "") + " " + known.texts.get("model", "")).lower()
        self.vendors |= {word for word in ("nvidia", "amd") if word in vendor}
        return set()

    @staticmethod
    def _all(names: Sequence[str], labels: Mapping[str, str]) -> list[str]:
        return [text for name in names if (text := labels.get(name, ""))]

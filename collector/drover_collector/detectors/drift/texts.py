"""List the attributes that drift compares, and write its findings."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from drover_collector.detectors._lib.texts import place
from drover_collector.detectors._lib.window import Window
from drover_core.model.events import (
    SEVERITY_ORDER,
    WANTED_ORDER,
    Evidence,
    Finding,
    IncidentKind,
    RecommendedAction,
    Severity,
)


class Attribute(NamedTuple):
    """One attribute of hardware or settings.

    Attributes:
        version: updates raise it: a higher value is a trial or the start of a rollout, a lower one was left behind.
        below: only a lower value does harm; None: any difference does.
        by_board: differs by board revision, which is therefore part of the group.
        base: of its numbers: parts of a VBIOS version are bytes in hexadecimal.
    """

    key: str
    cause: str
    scope: str  # gpu, node
    words: str
    version: bool
    wanted: RecommendedAction
    advice: str
    below: bool | None = None
    by_board: bool = False
    unit: str = ""
    base: int = 10


_RESET = "It takes effect with the next reset of the GPU."
ATTRIBUTES = (
    Attribute(
        "ecc_mode", "ecc_mode", "gpu", "ECC mode", False, RecommendedAction.ADVISE,
        f"Set it to the peers' value when the node is free (`nvidia-smi -e`). Without ECC, wrong data stays unnoticed."
        f" {_RESET}",
    ),
    Attribute(
        "power_limit_set_w", "power_limit", "gpu", "power limit", False, RecommendedAction.ADVISE,
        "Set it to the peers' value (`nvidia-smi -pl`) unless it is intended: the GPU slows down each of its jobs.",
        below=True, unit=" W",
    ),
    Attribute(
        "sm_clock_max_mhz", "sm_clock_max", "gpu", "highest SM clock", False, RecommendedAction.ADVISE,
        "Compare its VBIOS and the locked clocks (`nvidia-smi -rgc` resets them).", below=True, unit=" MHz",
    ),
    Attribute(
        "memory_clock_max_mhz", "memory_clock_max", "gpu", "highest memory clock", False, RecommendedAction.ADVISE,
        "Compare its VBIOS and the locked clocks (`nvidia-smi -rmc` resets them).", below=True, unit=" MHz",
    ),
    Attribute(
        "mig_mode", "mig_mode", "gpu", "MIG mode", False, RecommendedAction.WATCH,
        f"Set it to the peers' value unless it is intended: jobs that need a whole GPU cannot use it. {_RESET}",
    ),
    Attribute(
        "driver", "driver", "node", "driver", True, RecommendedAction.WATCH,
        "Update it to the peers' version when the node is free. Jobs across both versions can fail unpredictably.",
    ),
    Attribute(
        "vbios", "vbios", "gpu", "VBIOS", True, RecommendedAction.WATCH,
        "Update it to the peers' version with the vendor's tool when the node is free.", by_board=True, base=16,
    ),
    Attribute(
        "gsp_firmware", "gsp_firmware", "gpu", "GSP firmware", True, RecommendedAction.WATCH,
        "It comes with the driver: check which driver is loaded, and reboot the node if an update needs it.",
    ),
    Attribute(
        "inforom_image", "inforom", "gpu", "InfoROM", True, RecommendedAction.WATCH,
        "Update it to the peers' version with the vendor's tool when the node is free.", by_board=True,
    ),
    Attribute(
        "kernel", "kernel", "node", "kernel", True, RecommendedAction.WATCH,
        "Update and reboot the node when it is free, like its peers.",
    ),
    Attribute(
        "bios", "bios", "node", "BIOS", True, RecommendedAction.WATCH,
        "Update it to the peers' version when the node is free, and compare its settings.",
    ),
)  # fmt: skip
NIC = Attribute(
    "nic", "nic_firmware", "node", "adapter's firmware", True, RecommendedAction.WATCH,
    "Update it to the peers' version when the node is free: the adapters of one job should run the same version.",
)  # fmt: skip


class Deviation(NamedTuple):
    """A node or GPU with `value`, while `having` of the `total` entities of its group have `usual`."""

    attribute: Attribute
    n: int
    g: int | None
    value: str
    usual: str
    having: int
    total: int
    since_ms: int
    lasting: bool  # for AHEAD_MS

    @property
    def severity(self) -> Severity:
        """A setting above the peers' is information only; so is a newer version, while others may still follow."""
        if self.ahead and not self.lasting:
            return Severity.INFO
        if self.attribute.below and compare(self.value, self.usual) > 0:
            return Severity.INFO
        return Severity.WARNING

    @property
    def ahead(self) -> bool:
        """It is a newer version than the peers have."""
        return self.attribute.version and compare(self.value, self.usual, self.attribute.base) > 0


def compare(a: str, b: str, base: int = 10) -> int:
    """Return -1, 0 or 1: version `a` is older than, equal to or newer than `b`. Parts without digits sort as text."""
    one, two = (_parts(text, base) for text in (a, b))
    return (one > two) - (one < two)


def _parts(text: str, base: int) -> list[tuple[int, str]]:
    number = re.compile(r"[0-9a-f]+" if base == 16 else r"[0-9]+", re.IGNORECASE)
    parts = re.split(r"[.\-_+~ ]", text)
    return [(int(part, base), "") if number.fullmatch(part) else (0, part.lower()) for part in parts]


def finding(detector: str, window: Window, deviations: Sequence[Deviation], now_ms: int) -> Finding:
    """Return one finding for all deviations of a node or GPU. The worst leads, in the order of ATTRIBUTES."""
    first = max(deviations, key=lambda d: SEVERITY_ORDER.index(d.severity))
    node = window.index.nodes[first.n].name
    slot = None if first.g is None else int(window.index.gpu_slot[first.g])
    severity = first.severity
    wanted = RecommendedAction.NONE if severity is Severity.INFO else max(
        (d.attribute.wanted for d in deviations if d.severity is severity), key=WANTED_ORDER.index
    )  # fmt: skip
    where = place(node, slot)
    since = min(min(d.since_ms for d in deviations), now_ms)
    return Finding(
        detector, IncidentKind.DRIFT, first.attribute.cause, "node" if slot is None else "gpu", node, slot,
        ((node, slot),), now_ms, since, severity, 0.8, wanted, f"{where[0].upper()}{where[1:]}: {_sentence(first)}.",
        _advice(first),
        tuple(Evidence(f"{_sentence(d)}.", from_ms=d.since_ms, peers=d.total) for d in deviations),
        None if first.g is None else window.job_of(first.g),
        snapshot={"differs": {d.attribute.key: d.value for d in deviations}},
    )  # fmt: skip


def _advice(d: Deviation) -> str:
    if not d.ahead:
        return d.attribute.advice
    if not d.lasting:
        return "Nothing to do if this is a trial or the start of a rollout."
    return (
        "If this is a trial, silence it until the others follow. Else bring it to the peers' version: jobs across both"
        " can fail."
    )


def _sentence(d: Deviation) -> str:
    unit, peers = d.attribute.unit, "nodes" if d.attribute.scope == "node" else "GPUs"
    ahead = ", an older version" if d.ahead else ""
    return (
        f"{d.attribute.words} is {d.value}{unit}, while {d.having} of {d.total} {peers} of its kind and pool have"
        f" {d.usual}{unit}{ahead}"
    )

"""Which lines of the kernel log are events, and what they say."""

from __future__ import annotations

import re
from dataclasses import dataclass

from drover_proto.events import EventKind

MAX_MESSAGE = 1_000  # characters kept of a line

_PCI = r"(?:[0-9a-fA-F]{4,8}:)?[0-9a-fA-F]{2}:[0-9a-fA-F]{2}(?:\.[0-7])?"
_ADDRESS = re.compile(rf"\b({_PCI})")
_UUID = re.compile(r"GPU-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
# NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, name=python, GPU has fallen off the bus.
# NVRM: Xid (PCI:0000:01:00 GPU-I:02): 13, ...   (MIG)      NVRM: Xid (0000:03:00): 31, ...   (older drivers)
_XID = re.compile(r"NVRM: Xid \(([^)]{1,120})\): (\d{1,5})\b")
# nvidia-nvswitch0: SXid (PCI:0000:05:00.0): 12028, Non-fatal, Link 32 egress non-posted PRIV error (First)
_SXID = re.compile(r"nvidia-nvswitch\d+: SXid \(([^)]{1,120})\): (\d{1,6})\b")
# Words are chosen so that what every boot prints ("AER: enabled with IRQ 24", "mce: CPU0: Thermal monitoring
# enabled", "EDAC MC: Ver: 3.0.0") is not taken for an error.
_OTHERS: tuple[tuple[str, str, re.Pattern[str]], ...] = (
    ("aer", "AER", re.compile(r"AER: .*(?:error (?:message )?received|recovery failed)")),
    ("aer", "PCIe Bus Error", re.compile(r"PCIe Bus Error: severity=")),
    ("edac", "EDAC", re.compile(r"EDAC \S+: \d+ (?:CE|UE) ")),
    ("mce", "Hardware Error", re.compile(r"\[Hardware Error\]: ")),
    ("oom", "ut of memory", re.compile(r"[Oo]ut of memory: Kill(?:ed)? process \d+")),
    ("hung_task", "blocked for more than", re.compile(r"INFO: task .{1,80}:\d+ blocked for more than \d+ seconds")),
    (
        "nvrm",
        "NVRM",
        re.compile(
            r"NVRM: .*(?:fallen off the bus|[Rr]m_?[Ii]nit_?[Aa]dapter failed|GPU (?:is )?lost|API mismatch"
            r"|heartbeat timed out|Timeout after \d+s? of waiting for RPC|probe failed|GPU reset required)"
        ),
    ),
)


@dataclass(frozen=True, slots=True)
class Line:
    """A line that matters. `pci` is as `normal_pci` writes it, "" where the line names no device."""

    kind: EventKind
    code: str
    message: str
    pci: str
    uuid: str


def normal_pci(text: str) -> str:
    """`00000000:3B:00.0`, `0000:3b:00` and `3b:00` as `0000:3b:00`; "" for what is no PCI address.

    The function is left out: a GPU's audio function is the same board, and XID lines don't name it.
    """
    found = _ADDRESS.search(text)
    if found is None:
        return ""
    parts = found[1].partition(".")[0].lower().split(":")
    domain = int(parts[0], 16) if len(parts) == 3 else 0
    return f"{domain:04x}:{parts[-2]}:{parts[-1]}"


def understand(text: str) -> Line | None:
    """The event in a kernel message, None for the many that are none."""
    if "Xid (" in text:
        for kind, pattern in ((EventKind.SXID, _SXID), (EventKind.XID, _XID)):
            if found := pattern.search(text):
                uuid = _UUID.search(text)
                return Line(kind, str(int(found[2])), text[:MAX_MESSAGE], normal_pci(found[1]), uuid[0] if uuid else "")
    for code, word, pattern in _OTHERS:
        if word in text and pattern.search(text):
            # AER lines name the reporting port first and the device that erred last.
            addresses = _ADDRESS.findall(text)
            device = addresses[-1] if code in ("aer", "nvrm") and addresses else ""
            return Line(EventKind.KERNEL, code, text[:MAX_MESSAGE], normal_pci(device), "")
    return None

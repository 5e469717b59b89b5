"""XID and SXid: what the error numbers of NVIDIA's driver mean, which cause which, and what their text adds.

The rows are in `table.py`, the actions in `actions.py`, the registers of 144-150 in `nvlink5.py`.
Source: NVIDIA XID catalog, https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html
"""

import re
from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType

from drover_core.model.kinds import Severity
from drover_core.xid.actions import ADVICE, XidAction
from drover_core.xid.table import ROWS, Xid, XidCategory

__all__ = [
    "ADVICE",
    "RECOVERY_SEVERITY",
    "SYMPATHETIC",
    "XIDS",
    "RecoveryAction",
    "Xid",
    "XidAction",
    "XidCategory",
    "lookup",
    "previous_xid_from_message",
    "recovery_action_from_message",
    "sxid_is_fatal",
]

XIDS: Mapping[int, Xid] = MappingProxyType({row.code: row for row in ROWS})


def lookup(code: int) -> Xid | None:
    """Return the row of a code, None if the catalog does not know it (newer drivers add codes)."""
    return XIDS.get(code)


_NEEDS_RECOVERY = {
    XidAction.RESET_GPU,
    XidAction.RESTART_NODE,
    XidAction.WORKFLOW_XID_48,
    XidAction.WORKFLOW_NVLINK,
    XidAction.WORKFLOW_NVLINK5,
    XidAction.CHECK_UVM,
}


_FAULTS = frozenset(row.code for row in ROWS if row.in_use and row.category is not XidCategory.INFORMATIONAL)
# The catalog links four milder codes to XID 154 in addition to those that ask for a reset.
_RAISES_154 = frozenset(code for code in _FAULTS if XIDS[code].action in _NEEDS_RECOVERY) | {63, 94, 160, 161}

# Code -> the codes that may be its cause if they are seen shortly before or with it. On the same GPU unless noted.
# Sources: [C] NVIDIA XID catalog, trigger conditions and guidance; [D] its decode of 144-150, local and remote effects;
# [L] the driver's own lines ("caused by previous Xid ..."); [M] NVIDIA GPU Memory Error Management;
# [S] Cui et al., Characterizing GPU Resilience and Impact on AI/HPC Systems, arXiv:2503.11901;
# [F] published kernel logs (such as NVIDIA/open-gpu-kernel-modules issues 461 and 1150).
SYMPATHETIC: Mapping[int, frozenset[int]] = MappingProxyType(
    {
        31: frozenset({122, 123}),  # [S] a failing power controller shows up as page faults
        43: frozenset({13, 31, 48, 94, 95}),  # [F] [M] the faulting program is ended
        45: _FAULTS - {45},  # [C] [L] any error that ends a channel
        48: frozenset({144, 145, 146}),  # [D] an uncorrectable error in the link's buffers
        63: frozenset({48, 92, 171}),  # [C] [M] the row is replaced because of the error
        64: frozenset({48, 92, 171}),  # [C] [M] the same, and the replacement failed
        74: frozenset({79}),  # [C] on a peer GPU: the link fell with the GPU at its far end
        94: frozenset({48, 144, 146, 171, 172}),  # [C] [D] [M] poison from the error reached a program
        95: frozenset({48, 144, 146, 171, 172}),  # [C] [D] [M] the same, not contained
        119: frozenset({79}),  # [F] a GPU that left the bus cannot answer
        120: frozenset({79}),  # [F] the same
        145: frozenset({149, 155}),  # [C] [F] also on a peer GPU: requests lost with a link that went down
        154: _RAISES_154,  # [C] the driver sums the others up
        171: frozenset({48}),  # [C] says where a 48 happened
        172: frozenset({48}),  # [C] the same
    }
)

_PREVIOUS_XID = re.compile(r"caused by previous Xid (\d{1,4})\b")


def previous_xid_from_message(message: str) -> int | None:
    """Return the cause that the driver names, mostly in an XID 45: "... caused by previous Xid 149"."""
    found = _PREVIOUS_XID.search(message)
    return int(found[1]) if found else None


class RecoveryAction(StrEnum):
    """What an XID 154 asks for; the values are the driver's words."""

    NONE = "None"
    GPU_RESET = "GPU Reset Required"
    NODE_REBOOT = "Node Reboot Required"
    DRAIN_P2P = "Drain P2P"
    DRAIN_AND_RESET = "Drain and Reset"


RECOVERY_SEVERITY: Mapping[str, Severity] = MappingProxyType(
    {
        RecoveryAction.NONE: Severity.INFO,
        RecoveryAction.GPU_RESET: Severity.CRITICAL,
        RecoveryAction.NODE_REBOOT: Severity.CRITICAL,
        RecoveryAction.DRAIN_P2P: Severity.WARNING,
        RecoveryAction.DRAIN_AND_RESET: Severity.CRITICAL,
    }
)

_RECOVERY = re.compile(r"recovery action changed from .*? to (0x[0-9a-f]{1,8}) \(([^)]+)\)", re.IGNORECASE)
# The number stays the same (NVML: nvmlDeviceGpuRecoveryAction_t) while drivers reword its text:
# 0x1 is also printed as "PF FLR", 0x2 as "OS Reboot".
_RECOVERY_BY_NUMBER = MappingProxyType(dict(enumerate(RecoveryAction)))


def recovery_action_from_message(message: str) -> str | None:
    """Return the action that an XID 154 changed to: a `RecoveryAction`, or the driver's text for a new one.

    None for a line that is not an XID 154 or was cut short. The text "None" means that the GPU has recovered.
    """
    found = _RECOVERY.search(message)
    if found is None:
        return None
    return _RECOVERY_BY_NUMBER.get(int(found[1], 16), found[2])


# "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 28006, Non-fatal, Link 46 ..."; the lines that follow it with the same
# number ("Severity 0 Engine instance ...", "Data {...}") have no such word.
_SXID = re.compile(r"SXid \([^)]{1,40}\): \d+, (Non-?fatal|Fatal)\b", re.IGNORECASE)


def sxid_is_fatal(message: str) -> bool | None:
    """Return whether an NVSwitch error is fatal by the word that its driver prints, None if it prints none.

    NVSwitch numbers (SXid) exist up to Hopper; from Blackwell on the switches report elsewhere.
    """
    found = _SXID.search(message)
    return found[1].lower() == "fatal" if found else None

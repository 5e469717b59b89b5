"""Format kernel-log lines as the NVIDIA driver writes them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_TEXTS: Mapping[int, str] = MappingProxyType(
    {
        13: "pid={pid}, name=python3, Graphics SM Warp Exception on (GPC 2, TPC 4, SM 1): Out Of Range Address",
        31: "pid={pid}, name=python3, Ch 0000002c, intr 00000000. MMU Fault: ENGINE GRAPHICS GPCCLIENT_T1_0 faulted @ "
        "0x7f3a_1c400000. Fault is of type FAULT_PDE ACCESS_TYPE_VIRT_READ",
        43: "pid={pid}, name=python3, Ch 00000010",
        45: "pid={pid}, name=python3, Ch 0000000b",
        48: "pid='<unknown>', name=<unknown>, An uncorrectable double bit error (DBE) has been detected on GPU in the "
        "framebuffer at physical address 0x1c3f2a4c0 partition 5, subpartition 0.",
        63: "pid='<unknown>', name=<unknown>, Row Remapper: New row (0x00000001c3f2a4c0) marked for remapping, reset "
        "gpu to activate.",
        64: "pid='<unknown>', name=<unknown>, Row Remapper: Failed to remap row (0x00000001c3f2a4c0), no spare row is "
        "left in the bank.",
        74: "pid='<unknown>', name=<unknown>, NVLink: fatal error detected on link 10(0x0, 0x0, 0x10000, 0x0, 0x0, "
        "0x0, 0x0)",
        79: "pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
        94: "pid={pid}, name=python3, Contained: SM (0x1). RST: No, D-RST: No",
        95: "pid='<unknown>', name=<unknown>, Uncontained: FBHUB. RST: Yes, D-RST: No",
        119: "pid={pid}, name=python3, Timeout after 6s of waiting for RPC response from GPU{slot} GSP! Expected "
        "function 76 (GSP_RM_CONTROL) (0x20800a6a 0x4).",
        122: "pid='<unknown>', name=<unknown>, SPI PMU RPC read failure",
        145: "RLW_REMAP Fatal XC0 i0 Link 08 (0x00000084 0x00000040 0x00000000 0x00000000 0x00000000 0x00000000)",
        154: "GPU recovery action changed from 0x0 (None) to {action}",
    }
)
# XID -> what the driver asks for after it: the value of recovery_action, and its text in XID 154.
RECOVERY_ACTIONS: Mapping[int, tuple[int, str]] = MappingProxyType(
    {
        64: (1, "0x1 (GPU Reset Required)"),
        79: (2, "0x2 (Node Reboot Required)"),
        95: (1, "0x1 (GPU Reset Required)"),
        119: (1, "0x1 (GPU Reset Required)"),
        145: (1, "0x1 (GPU Reset Required)"),
    }
)


def xid_line(xid: int, pci: str, slot: int, pid: int = 0, after: int = 0) -> str:
    """Return `NVRM: Xid (PCI:0000:3b:00): 79, ...`; `after` is the XID that an XID 154 follows."""
    action = RECOVERY_ACTIONS[after][1] if after else ""
    return f"NVRM: Xid (PCI:{pci}): {xid}, " + _TEXTS[xid].format(pid=pid, slot=slot, action=action)

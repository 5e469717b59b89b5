"""Lines as the kernel log has them."""

from __future__ import annotations

import numpy as np

BUS = ("18", "2a", "3a", "5d", "9a", "ab", "ba", "db")


def head(pid: int, code: int, slot: int) -> str:
    who = f"pid={pid}, name=python3" if pid else "pid='<unknown>', name=<unknown>"
    return f"NVRM: Xid (PCI:0000:{BUS[slot % 8]}:00): {code}, {who}, "


def xid(rng: np.random.Generator, code: int, slot: int, pid: int) -> str:
    a, b, c = (int(x) for x in rng.integers(0, 8, 3))
    ch = f"Ch {int(rng.integers(2, 40)):08x}"
    text = {
        13: f"Graphics SM Warp Exception on (GPC {a}, TPC {b}, SM {c % 2}): Out Of Range Address",
        31: f"{ch}, intr 00000000. MMU Fault: ENGINE GRAPHICS GPC{a} GPCCLIENT_T1_{b} faulted @ 0x7f{int(rng.integers(16, 255)):02x}_"
        f"{int(rng.integers(0, 2**31)):08x}. Fault is of type FAULT_PDE ACCESS_TYPE_VIRT_READ",
        45: f"{ch}",
        48: f"An uncorrectable double bit error (DBE) has been detected on GPU in the framebuffer at partition {a}, subpartition {b % 2}.",
        62: f"{int(rng.integers(0, 2**31)):08x} {int(rng.integers(0, 2**31)):08x} 00000000 {int(rng.integers(0, 2**31)):08x} 00000000",
        63: f"Row Remapper: New row (0x{int(rng.integers(0, 2**31)):016x}) marked for remapping, reset gpu to activate.",
        64: f"Row Remapper: All reserved rows for bank are remapped (0x{int(rng.integers(0, 2**31)):016x}), remapping failed.",
        74: f"NVLink: fatal error detected on link {int(rng.integers(0, 12))}(0x10000, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0)",
        79: "GPU has fallen off the bus.",
        92: "High single-bit ECC error rate",
        94: f"Contained: CE User Channel (0x{a}). RST: No, D-RST: No",
        95: f"Uncontained: LTC TAG (0x{a},0x{b}). RST: Yes, D-RST: No",
        119: f"Timeout after 6s of waiting for RPC response from GPU{slot} GSP! Expected function 76 (GSP_RM_CONTROL) (0x2080a06c 0x{a}).",
        120: f"GSP Error: Task {a} raised error code 0x{b} for reason 0x0 at 0x{int(rng.integers(0, 2**31)):x} (0 more errors skipped)",
        140: f"An uncorrectable ECC error detected (possible firmware handling failure) DRAM:0, LTC:{a}, MMU:0, PCIE:0",
        145: f"RLW_REMAP Fatal XC0 i0 Link {int(rng.integers(0, 18)):02d} (0x00000004 0x00000040 0x00000000 0x00000000 0x00000000 0x00000000)",
        149: f"NETIR_LINK_DOWN Fatal XC0 i0 Link {int(rng.integers(0, 18)):02d} (0x004505c6 0x00000000 0x00000000 0x00000000 0x00000000 0x00000000)",
        154: "GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)",
    }[code]
    return head(pid if code not in (79, 62, 149, 145, 154, 63, 64, 92) else 0, code, slot) + text


def pcie(rng: np.random.Generator, slot: int) -> str:
    return f"pcieport 0000:{int(BUS[slot % 8], 16) - 1:02x}:01.0: bwctrl: Link speed or width degraded, retrained to {['2.5', '8.0', '16.0'][int(rng.integers(0, 3))]} GT/s"


def aer(rng: np.random.Generator, slot: int) -> str:
    return (
        f"nvidia 0000:{BUS[slot % 8]}:00.0: PCIe Bus Error: severity=Corrected, type=Data Link Layer, "
        f"({['Receiver ID', 'Transmitter ID'][int(rng.integers(0, 2))]})"
    )


def nic(dev: str, up: bool) -> str:
    return f"mlx5_core 0000:3b:00.0 {dev}: Link {'up' if up else 'down'}"


def nvrm(slot: int) -> str:
    return f"NVRM: GPU 0000:{BUS[slot % 8]}:00.0: GPU has fallen off the bus."

"""Which lines of the kernel log are events, and what they say.

The forms are those of Linux 4.18 to 6.17 and of NVIDIA's drivers 450 to 580, taken from their sources: drivers/pci/pcie
(aer, dpc), drivers/edac, mm/oom_kill.c, kernel/hung_task.c, kernel/watchdog.c, kernel/rcu/tree_stall.h,
drivers/nvme/host, block/blk-core.c, fs/ext4, fs/xfs, drivers/net/ethernet (mellanox/mlx5/core events.c and health.c,
broadcom/bnxt, intel/ice), drivers/thermal/intel/therm_throt.c, open-gpu-kernel-modules. Cases: tests/cases/agent/kmsg/.

Every pattern begins at the line's beginning: names that a user gives (of a cgroup, a process, a file) stand in lines
of the kernel too, and must not pass for an error. Some lines even begin with the name of a process and end with that
of a file or cgroup (arch/x86/mm/fault.c show_signal_msg, kernel/signal.c, mm/page_alloc.c warn_alloc): those are no
event whatever they say. File systems and disks in loop devices are a user's too (Apptainer mounts images so).
"""

from __future__ import annotations

import re
from functools import cache
from typing import NamedTuple

from drover_core.model.kinds import EventKind

MAX_MESSAGE = 1_000  # characters kept of a line
MAX_TEXT = 4_096  # characters looked at: a record has 1,024 bytes at most, each written as \xNN if it is no ASCII
SETTLED_US = 300_000_000  # links come up and cables are found while a machine starts; that is sent from then on
# The lines for which this counts. Errors of modules and ports do not: they are logged once, and that may be then.
_STARTING = re.compile(r".*(?:Link (?:is )?(?:[Uu]p|[Dd]own)\b|Card not present|Cable (?:un)?plugged)")

_PCI = r"(?:[0-9a-fA-F]{4,8}:)?[0-9a-fA-F]{2}:[0-9a-fA-F]{2}(?:\.[0-7])?"
_ADDRESS = re.compile(rf"\b({_PCI})")
_UUID = re.compile(r"GPU-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
# NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, name=python, GPU has fallen off the bus.
# NVRM: Xid (PCI:0000:01:00 GPU-I:02): 13, ...   (MIG)      NVRM: Xid (0000:03:00): 31, ...   (older drivers)
_XID = re.compile(r"NVRM: (?:GPU at \S+ )?Xid \(([^)]{1,120})\): (\d{1,5})\b")
# nvidia-nvswitch0: SXid (PCI:0000:05:00.0): 12028, Non-fatal, Link 32 egress non-posted PRIV error (First)
_SXID = re.compile(r"nvidia-nvswitch\d+: SXid \(([^)]{1,120})\): (\d{1,6})\b(?:.*?(Link \d+))?")
# python[812]: segfault at 0 ip ... in libcuda.so[7f21+1000]      python: page allocation failure: ... cpuset=step_0
# A name has 15 bytes at most (TASK_COMM_LEN).
_BY_A_PROCESS = re.compile(r"(?:\\x[0-9a-f]{2}|[^\\]){1,15}(?:\[\d+\]|: (?:page allocation|vmalloc))")
_SXID_MORE = re.compile(r"\): \d+, (?:Severity \d+ Engine instance|Data \{)")  # more of the error before it


def _row(code: str, word: str, pattern: str) -> tuple[str, str, str]:
    """`word` is what every such line contains, a cheap check before the pattern. The named groups and the PCI address
    distinguish errors with the same code."""
    return code, word, pattern


_compiled = cache(re.compile)  # of these patterns, those that a line with their word asked for


# Words are chosen so that what every boot prints ("AER: enabled with IRQ 24", "mce: CPU0: Thermal monitoring
# enabled", "EDAC MC: Ver: 3.0.0") is not taken for an error. The first that matches counts.
_OTHERS = (
    _row(
        "aer",
        "AER: ",
        r"(?:\S+ \S+: )?AER: (?:(?:Multiple )?(?P<severity>(?:Unc|C)orrect(?:ed|able)(?: \([\w-]+\))?) error "
        r"(?:message )?received|(?:device|subordinate device) re(?:covery|set) failed)",
    ),
    _row("aer", "PCIe Bus Error", r"\S+ \S+: (?:AER: )?PCIe Bus Error: severity=(?P<severity>[^,]+)"),
    _row("pcie", "DPC: ", r"\S+ \S+: DPC: (?:containment event|unmasked uncorrectable error)"),
    _row(
        "pcie",
        "pciehp: ",
        r"\S+ \S+: pciehp: Slot\((?P<slot>[^)]{1,40})\): (?P<what>Link Down|Card not present|Power fault)",
    ),
    _row("edac", "EDAC ", r"EDAC (?P<controller>\S+): \d+ (?P<type>CE|UE) "),
    _row("edac", "Memory failure", r"Memory failure: 0x[0-9a-f]+: recovery action for (?P<page>[^:]{1,60}): "),
    _row(
        "mce",
        "[Hardware Error]: ",
        r"(?:\S{1,20}:? ?)?(?:\{\d+\})?\[Hardware Error\]: (?:CPU \d+: )?(?P<severity>event severity: \w+"
        r"|Machine Check Exception|System Fatal error|Uncorrected|Deferred|Corrected)?(?:.*?Bank (?P<bank>\d+))?",
    ),
    _row(
        "oom",
        "ut of memory",
        r"(?:Memory cgroup o|O)ut of memory(?: \(oom_kill_allocating_task\))?: "
        r"Kill(?:ed)? process \d+ (?:\((?P<name>.{1,16}?)\))?",
    ),
    _row(
        "hung_task", "blocked", r"INFO: task (?P<name>.{1,80}):\d+ blocked(?: in I/O wait)? for more than \d+ seconds"
    ),
    _row("lockup", "soft lockup", r"(?:\S+ )?(?:watchdog: )?BUG: soft lockup - CPU#(?P<cpu>\d+) stuck for \d+"),
    _row("lockup", "hard LOCKUP", r"(?:NMI )?watchdog: (?:Watchdog detected|CPU\d+: Watchdog detected) hard LOCKUP"),
    _row("rcu_stall", "INFO: rcu", r"(?:rcu: )?INFO: rcu\w+ (?:self-)?detected (?:expedited )?stalls?\b"),
    _row("panic", "Kernel panic", r"Kernel panic - not syncing"),
    _row("panic", "BUG: ", r"BUG: (?:unable to handle|kernel NULL pointer|KASAN|Bad page|scheduling while atomic)"),
    _row("panic", "[#", r"(?:Internal error|Oops|general protection fault)[^\[]*: [0-9a-f]{4,16} \[#\d+\]"),
    _row("panic", "kernel BUG at", r"kernel BUG at "),
    _row(
        "nvlink",
        "nvidia-nv",
        r"nvidia-(?:nvswitch\d*|nvlink): .*(?:[Ff]atal|[Ff]ailed|[Tt]imed out|[Tt]imeout|degraded|not responding)",
    ),
    _row("nvlink", "NVRM: ", r"NVRM: .*(?i:nvlink).*(?:[Ff]atal|[Tt]raining failed|failed to train)"),
    _row(
        "nvrm",
        "NVRM: ",
        r"NVRM: .*(?:fallen off the bus|[Rr]m_?[Ii]nit_?[Aa]dapter(?: failed|: .*failed|: Cannot)|GPU (?:is )?lost"
        r"|API mismatch|heartbeat timed out|Timeout after \d+s? of waiting for RPC|GSP Timeout|WPR2 already up"
        r"|Cannot initialize GSP|GSP firmware.*(?:failed|timed out)|probe failed|probe routine failed"
        r"|None of the NVIDIA .*initialized|device is invalid|GPU reset required)",
    ),
    _row("nic_link", "ink ", r"mlx5_core \S+ (?P<port>\S+): Link (?P<state>down|up)\b"),
    _row(
        "nic_link",
        "NIC Link is ",
        r"(?:bnxt_en|ice|i40e|ixgbe|igb) \S+ (?P<port>\S+): NIC Link is (?P<state>[Uu]p|[Dd]own)\b",
    ),
    _row(
        "nic_module", "Port module event", r"mlx5_core \S+ .*Port module event.*?: module (?P<module>\d+), (?P<what>.+)"
    ),
    _row("nic_temperature", "High temp", r"mlx5_core \S+ .*High temp(?:e)?rature"),
    _row("nic_power", "insufficient power", r"mlx5_core \S+ .*Detected insufficient power on the PCIe slot"),
    _row(
        "nic_error",
        "mlx5_core",
        r"mlx5_core.*(?:health compromised|Fatal error \d+ detected|FW is unable to respond|handling bad device"
        r"|Health issue observed|firmware internal error|unrecoverable hardware error|irisc not responding"
        r"|firmware CRC error|fetch PCI error|HW fatal error|EQ buffer overrun|EQ error|FFSER error"
        r"|timeout\. Will cause a leak|health recovery f(?:ailed|low failed))",
    ),
    _row(
        "nic_error",
        "NETDEV WATCHDOG",
        r"(?:\S+ \S+ \S+: )?NETDEV WATCHDOG: (?:(?P<port>\S+) \(\S+\): |.*?)transmit queue \d+ timed out",
    ),
    _row(
        "nic_error",
        "bnxt_en",
        r"bnxt_en \S+ (?P<port>\S+): .*(?:TX timeout detected|[Ff]irmware (?:\S+ )?reset event|Error \(timeout"
        r"|Firmware not re(?:ady|sponding))",
    ),
    _row("nic_error", "ice ", r"ice \S+ .*(?:tx_timeout: VSI|[Rr]eset failed|Malicious Driver Detection|GLOBR|EMPR)"),
    _row(
        "nic_error",
        "irdma",
        r"(?:irdma|ice|i40e) \S+ .*(?:CQP .*(?:timeout|error)|[Aa]bnormal|HW error|Requesting a reset)",
    ),
    _row(
        "nvme",
        "nvme ",
        r"nvme (?P<device>nvme\d+): (?:I/O (?:tag )?\d+ .*timeout|controller is down|Removing after probe failure"
        r"|Device not ready|Disabling device after reset failure|frozen state error|Identify Controller failed)",
    ),
    _row(
        "filesystem",
        "EXT4-fs",
        r"EXT4-fs (?:error \(device (?P<device>(?!loop)[^)]{1,40})\)"
        r"|\((?P<mounted>(?!loop)[^)]{1,40})\): (?:Remounting filesystem read-only|.*[Ss]hut(?:ting)? ?down))",
    ),
    _row("filesystem", "Aborting journal", r"(?:JBD2: )?Aborting journal on device (?P<device>(?!loop)[^ ]{1,40}?)\."),
    _row(
        "filesystem",
        "XFS (",
        r"XFS \((?P<device>(?!loop)[^)]{1,40})\): .*(?:[Cc]orruption|[Ss]hut(?:ting)? down|I/O [Ee]rror)",
    ),
    _row("filesystem", "BTRFS ", r"BTRFS (?:error|critical) \(device (?P<device>(?!loop)[^)]{1,40})\)"),
    # A drive without a disc, as many virtual machines have one, fails each time it is looked at. A target refuses what
    # it cannot do (discards), and a thin pool is full: neither is a disk that fails (block/blk-core.c, blk_errors).
    _row(
        "disk",
        " error",
        r"(?:\w{1,40}: )?(?:critical medium|I/O|Buffer I/O|timeout|protection) error,? (?:on )?dev "
        r"(?P<device>(?!fd|sr|loop)\w[\w-]*)",
    ),
    _row("disk", "ata", r"(?P<device>ata\d+(?:\.\d+)?): (?:exception Emask|failed command|disable device|disabled)"),
    _row("disk", "Disk failure", r"md/\S+ Disk failure on (?P<device>\w+)"),
    _row("cpu_throttle", "above threshold", r"CPU\d+: (?P<what>Core|Package) temperature (?:is )?above threshold"),
)


class Line(NamedTuple):
    """A line that matters. `pci` is as `normal_pci` writes it, "" where the line names no device."""

    kind: EventKind
    code: str
    message: str
    pci: str
    uuid: str
    where: str = ""  # what distinguishes it from others with its code: device, port, severity


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


def of_start(line: Line) -> bool:
    """Whether a machine that starts says so as a matter of course."""
    return line.code in ("nic_link", "nic_module", "pcie") and bool(_STARTING.match(line.message))


def understand(text: str) -> Line | None:
    """The event in a kernel message, None for the many that are none."""
    text = text[:MAX_TEXT]
    if "Xid (" in text:
        if _BY_A_PROCESS.match(text):
            return None
        if found := _XID.match(text):
            uuid = _UUID.search(text)
            pci = normal_pci(found[1])
            return Line(EventKind.XID, str(int(found[2])), text[:MAX_MESSAGE], pci, uuid[0] if uuid else "", pci)
        if found := _SXID.match(text):
            if _SXID_MORE.search(text):
                return None
            pci = normal_pci(found[1])
            where = f"{pci} {found[3]}" if found[3] else pci
            return Line(EventKind.SXID, str(int(found[2])), text[:MAX_MESSAGE], pci, "", where)
        return None
    for code, word, pattern in _OTHERS:
        if word in text and (found := _compiled(pattern).match(text)) and not _BY_A_PROCESS.match(text):
            # AER lines name the reporting port first and the device that erred last.
            addresses = _ADDRESS.findall(text)
            pci = ""
            if addresses and code not in ("oom", "hung_task", "edac", "mce"):
                pci = normal_pci(addresses[-1 if code == "aer" else 0])
            where = " ".join(part for part in (pci, *found.groupdict().values()) if part)
            return Line(EventKind.KERNEL, code, text[:MAX_MESSAGE], pci, "", where[:120])
    return None

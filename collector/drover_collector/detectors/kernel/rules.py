"""Map lines of the kernel log other than XIDs to incidents: kind, cause, severity, action and advice.

Patterns are of Linux 4.18 to 6.17 (the agent's kmsg/lines.py names the files). A line that a program, a user or a
shared service can cause on a healthy node is information. A line without a rule is stored and shown only.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from drover_core.model.events import (
    Event,
    IncidentKind,
    RecommendedAction,
    Severity,
)


@dataclass(frozen=True, slots=True)
class Rule:
    code: str
    pattern: re.Pattern[str]
    kind: IncidentKind
    cause: str
    severity: Severity
    action: RecommendedAction
    what: str  # follows "GPU 3 of node n12: "
    advice: str
    least: int  # so many lines within an hour make it a warning, fewer are information
    gpu_or_port: bool  # only of these


def rule_of(event: Event) -> Rule | None:
    """Return the first rule that matches a kernel event, or None."""
    for rule in RULES:
        if rule.code == event.code and rule.pattern.search(event.message) and (not rule.gpu_or_port or _is_one(event)):
            return rule
    return None


def _is_one(event: Event) -> bool:
    """Return True if the failed device is a GPU or a port.

    A port's line about another device is not about the port itself; the device logs its own line.
    """
    own = "PCIe Bus Error" in event.message or "recovery failed" in event.message or "reset failed" in event.message
    return event.gpu is not None or (own and event.message.startswith(("pcieport ", "nvidia ")))


def _note(code: str, pattern: str, kind: IncidentKind, cause: str, what: str, advice: str) -> Rule:
    return Rule(code, re.compile(pattern), kind, cause, Severity.INFO, RecommendedAction.NONE, what, advice, 1, False)


def _fault(
    code: str,
    pattern: str,
    kind: IncidentKind,
    cause: str,
    what: str,
    advice: str,
    *,
    severity: Severity = Severity.WARNING,
    action: RecommendedAction = RecommendedAction.ADVISE,
    least: int = 1,
    gpu_or_port: bool = False,
) -> Rule:
    return Rule(code, re.compile(pattern), kind, cause, severity, action, what, advice, least, gpu_or_port)


_MEMORY, _LINK, _HANG, _LIVENESS, _RISK, _THERMAL = (
    IncidentKind.MEMORY, IncidentKind.LINK, IncidentKind.HANG, IncidentKind.LIVENESS, IncidentKind.RISK,
    IncidentKind.THERMAL,
)  # fmt: skip
_PCIE = "Check the device's link and errors (lspci -vvv), reseat the board or its riser, and test its bandwidth."
_DIMM = "Give the node no new long job. Find the memory module in the BMC's event log and replace it."
_CPU = "Give the node no new long job. Read the BMC's event log, and have the board or CPU checked."
_DISK = "Give the node no new long job. Check the drive (nvme smart-log, smartctl) and replace it."
_NIC = "Give the node no new long job. Check the adapter's health and firmware, and reset it when the node is free."
_WAITS = "Nothing to do for one such line. Check what ran there, and check the node if only this node repeats it."
_BOOT = "Save the kernel log, and reboot the node when its work is done: its kernel is unreliable after a failure."

# `_fault` is used only for lines that no program and no planned work can cause.
RULES: tuple[Rule, ...] = (
    # PCIe: drivers/pci/pcie/aer.c, dpc.c. Corrected errors are judged by their rate.
    _fault("aer", r"Uncorrect\w+ \(Fatal\)|re(?:covery|set) failed", _LINK, "pcie_fatal", "a fatal PCIe error", _PCIE,
           action=RecommendedAction.PROBE, gpu_or_port=True),
    _fault("aer", r"PCIe Bus Error: severity=Uncorrect\w+ \(Fatal\)|re(?:covery|set) failed", _LINK, "pcie_fatal",
           "a fatal PCIe error of a device other than a GPU", _PCIE),
    _fault("aer", r"Uncorrect\w+ \(Non-Fatal\)", _LINK, "pcie_uncorrected", "an uncorrected PCIe error", _PCIE,
           action=RecommendedAction.PROBE, gpu_or_port=True),
    _note("aer", r"Uncorrect", _LINK, "pcie_device", "an uncorrected error of a PCIe device other than a GPU", _PCIE),
    _fault("pcie", r"DPC: ", _LINK, "pcie_fatal", "a PCIe port disconnected its device after an error (DPC)", _PCIE,
           action=RecommendedAction.PROBE),
    _fault("pcie", r"Power fault", _LINK, "pcie_power", "a power fault in a PCIe slot", _PCIE),
    _note("pcie", r"", _LINK, "pcie_slot", "a PCIe slot lost its device or link",
          "Nothing to do if the device was reset or removed."),
    # Host memory and CPU: drivers/edac/edac_mc.c, mm/memory-failure.c, arch/x86/kernel/cpu/mce, drivers/edac/mce_amd.c,
    # drivers/firmware/efi/cper.c. The firmware's "recoverable" may be about any device, which logs its own line.
    _fault("edac", r"^EDAC \S+: \d+ UE |^Memory failure: ", _MEMORY, "host_memory",
           "an uncorrected error of host memory", _DIMM),
    _fault("mce", r"System Fatal error|event severity: fatal", _MEMORY, "cpu", "a fatal hardware error", _CPU,
           severity=Severity.CRITICAL),
    _fault("mce", r"Machine Check Exception|\]: Uncorrected", _MEMORY, "cpu",
           "an uncorrected hardware error of CPU or memory", _CPU),
    _note("mce", r"event severity: recoverable|Deferred", _MEMORY, "cpu", "a hardware error that was contained", _CPU),
    _fault("panic", r"^Kernel panic.*(?:[Mm]achine check|[Hh]ardware error)", _MEMORY, "cpu",
           "the kernel stopped after a fatal hardware error", _CPU, severity=Severity.CRITICAL),
    # The kernel itself. A stuck CPU or task usually waits for a shared file system, a hypervisor or a driver.
    _fault("panic", r"", _LIVENESS, "kernel_failed", "the kernel failed", _BOOT),
    _fault("lockup", r"hard LOCKUP", _LIVENESS, "hard_lockup", "a CPU hung with its interrupts off", _BOOT),
    _note("lockup", r"", _HANG, "soft_lockup", "a CPU was stuck in the kernel", _WAITS),
    _note("rcu_stall", r"", _HANG, "rcu_stall", "a CPU stalled the kernel (RCU)", _WAITS),
    _note("hung_task", r"", _HANG, "hung_task", "tasks are blocked for minutes", _WAITS),
    _note("oom", r"", _MEMORY, "oom", "processes were killed because host memory ran out",
          "Give the job more memory or fewer workers. The node is not at fault."),
    # Drives and file systems. Paths to remote storage depend on the network; drives in the node do not.
    _fault("nvme", r"controller is down|Removing after|Disabling device|Device not ready", _RISK, "nvme",
           "an NVMe drive failed", _DISK),
    _fault("nvme", r"", _RISK, "nvme_slow", "an NVMe drive did not answer in time", _DISK, least=5),
    _fault("disk", r"Disk failure|critical medium error", _RISK, "disk", "a disk failed", _DISK),
    _fault("disk", r"dev nvme\d", _RISK, "disk_errors", "an NVMe drive has errors", _DISK, least=5),
    _note("disk", r"", _RISK, "disk_errors", "a disk has errors", _DISK),
    _fault("filesystem", r"^EXT4-fs error|^EXT4-fs .*read-only|Aborting journal|^XFS .*(?:[Cc]orrupt|[Ss]hut)", _RISK,
           "filesystem", "a file system is damaged or was shut down",
           "Give the node no new job. Check the file system and its drive."),
    _note("filesystem", r"", _RISK, "filesystem_errors", "a file system has errors", _DISK),
    # Adapters: drivers/net/ethernet/mellanox/mlx5/core/health.c and events.c, broadcom/bnxt. Links that go down are
    # judged by the detector `links`; many boards log missing slot power at each start, which has no rule.
    _fault("nic_error", r"health compromised|Fatal error \d|unrecoverable hardware|HW fatal|firmware internal error"
           r"|irisc not responding|firmware CRC error|FW is unable|recovery f(?:low f)?ailed|Firmware fatal", _LINK,
           "nic_firmware", "the firmware or hardware of a network adapter failed", _NIC),
    _note("nic_error", r"", _LINK, "nic_errors", "a network adapter has errors", _NIC),
    _fault("nic_temperature", r"", _THERMAL, "nic", "a network adapter is too hot",
           "Check air flow, baffles and fans around the adapter, and the temperature of its module."),
    _note("nic_module", r"\[error\]", _LINK, "nic_module", "a network cable or module is faulty",
          "Reseat or replace the cable or module."),
    _note("cpu_throttle", r"", _THERMAL, "cpu", "heat slows down CPUs", "Check the fans and the room's air."),
    _note("nvlink", r"", _LINK, "nvlink_driver", "the NVLink driver reported an error",
          "Check for XIDs and SXids at the same time."),
    # Any container with another driver's library causes "API mismatch".
    _note("nvrm", r"^(?!.*API mismatch)", _LIVENESS, "driver", "the NVIDIA driver reported an error",
          "Check whether the GPU answers (nvidia-smi), and for XIDs at the same time."),
)  # fmt: skip

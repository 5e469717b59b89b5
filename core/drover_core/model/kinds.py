"""Kinds of events, their severity, and the codes of events without an NVIDIA number.

Separate from `events.py`, which exports these names too: an agent needs nothing else of it, and importing it takes a
fiftieth of a second.
"""

from __future__ import annotations

import types
import typing
from enum import StrEnum


class Severity(StrEnum):
    INFO = "info"
    WARNING = "warning"
    CRITICAL = "critical"


class EventKind(StrEnum):
    XID = "xid"
    SXID = "sxid"
    KERNEL = "kernel"  # code: one of KERNEL_CODES
    LIFECYCLE = "lifecycle"  # code: one of LIFECYCLE_CODES
    RANK = "rank"  # code: one of RANK_CODES; the message is JSON (drover_core.jobs.rank_report)
    CONDITION = "condition"  # code: its type; the message is JSON (drover_core.model.conditions); of no agent


BOOT_ID = "host.boot_id"  # key in a stored inventory: the boot of the node when it reported

LIFECYCLE_CODES: typing.Mapping[str, str] = types.MappingProxyType(
    {
        "agent_started": "the agent started",
        "agent_stopped": "the agent was asked to stop",
        "gpu_lost": "a GPU no longer answers",
        "gpu_back": "a lost GPU answers again",
        "driver_hung": "calls into the driver do not return",
        "driver_back": "a driver that hung, was missing or was released answers again",
        "driver_missing": "there is no usable NVIDIA driver",
        "driver_released": "the agent released the NVIDIA driver for a while, at an operator's request",
        "spool_dropped": "the agent dropped stored data because of its size or age",
        "spool_unwritable": "the agent cannot write its spool and keeps data in memory",
        "batch_rejected": "the collector refused data of this agent",
        "kmsg_overrun": "kernel log lines were lost before they were read",
        "kmsg_unreadable": "the kernel log cannot be read, so XIDs are reported by NVML only",
        "kmsg_back": "the kernel log can be read again",
        "source_failing": "a source of the agent failed three times in a row",
        "source_back": "a source that failed has answered for a minute",
        "clock_wrong": "the node's clock differs from the collector's",
    }
)

KERNEL_CODES: typing.Mapping[str, str] = types.MappingProxyType(
    {
        "aer": "a PCIe device reported errors (AER)",
        "pcie": "a PCIe slot lost its link or device, or was cut off after an error (DPC, hot-plug)",
        "mce": "the CPU or firmware reported a hardware error (machine check)",
        "edac": "the memory controller reported errors of host memory (EDAC)",
        "oom": "a process was killed because memory ran out",
        "hung_task": "a task was blocked for minutes",
        "lockup": "a CPU was stuck in the kernel",
        "rcu_stall": "a CPU blocked the kernel's bookkeeping (RCU stall)",
        "panic": "the kernel failed (panic, oops, BUG)",
        "nvrm": "the NVIDIA driver reported trouble without an XID",
        "nvlink": "the NVLink or NVSwitch driver reported trouble without an SXid",
        "nic_link": "a network port's link went down or came up",
        "nic_error": "a network adapter or its firmware failed",
        "nic_module": "a network cable or module was plugged, unplugged or is faulty",
        "nic_temperature": "a network adapter is too hot",
        "nic_power": "a network adapter gets too little power from its slot",
        "nvme": "an NVMe drive did not answer",
        "disk": "a disk failed to read or write",
        "filesystem": "a file system found errors or was shut down",
        "cpu_throttle": "a CPU was slowed down by its temperature",
    }
)

CHECKPOINT = "checkpoint"  # one of RANK_CODES
OWNER = "owner"  # another: drover_core.jobs.owner
RANK_CODES: typing.Mapping[str, str] = types.MappingProxyType(
    {
        "collective": "where a rank of a job stands in its collectives, by the flight recorder dump that it left",
        "checkpoint": "a job reported that a checkpoint is on disk",
        "owner": "whose a job is, by the environment of its processes or by Kubernetes",
    }
)

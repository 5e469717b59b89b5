"""Map types of conditions to incidents: which status is bad, kind, severity, what it means, and who documents it.

A condition that jobs can cause on a healthy node is information, as is one that others' software alone is about. A type
without a row is shown and not judged, unless a setting names it. DroverHealthy is Drover's own and is never read.

Sources:
    KUBELET     kubernetes.io/docs/reference/node/node-status, "Conditions"
    NPD         github.com/kubernetes/node-problem-detector, config/: kernel-monitor, readonly-monitor, docker-monitor,
                systemd-monitor-counter, kernel-monitor-counter, health-checker-*, custom-plugin-monitor
    NVSENTINEL  docs.nvidia.com/nvsentinel/getting-started/integrations, "Standard Condition Types";
                GpuThermalMarginWatch: its release 1.10.0
    EKS         docs.aws.amazon.com/eks/latest/userguide/node-health-nma.html: False when a "Condition" is found
    AKS         learn.microsoft.com/azure/aks/node-problem-detector, "Node conditions", and aks/gpu-health-monitoring
    NEBIUS      docs.nebius.com/kubernetes/maintenance/health-checks
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from drover_core.model.events import IncidentKind, Severity

OWN = "DroverHealthy"  # drover_collector.actions.kubernetes.actuator
TRUE, FALSE = "True", "False"
KUBELET, NPD, NVSENTINEL, EKS, AKS, NEBIUS = "kubelet", "NPD", "NVSentinel", "EKS", "AKS", "Nebius"
SETTINGS = "settings"
HOLD_S = 120  # ours: two readings agree


@dataclass(frozen=True, slots=True)
class Rule:
    """
    Attributes:
        bad: the status that means a fault.
        what: follows "Node n12: ".
        work: work on a node causes it too, so it proves nothing while the node is cordoned.
        hold_s: how long it must last.
    """

    type: str
    bad: str
    kind: IncidentKind
    severity: Severity
    what: str
    advice: str
    source: str
    work: bool = False
    hold_s: int = HOLD_S


_MEMORY, _LINK, _LIVENESS, _RISK, _THERMAL = (
    IncidentKind.MEMORY, IncidentKind.LINK, IncidentKind.LIVENESS, IncidentKind.RISK, IncidentKind.THERMAL,
)  # fmt: skip
_WARNING, _INFO = Severity.WARNING, Severity.INFO
_SERVICES = (
    "Look at the journal of kubelet and container runtime on the node. Give it no new long job until it is clear."
)
_GPU = (
    "Look at the node's GPUs here and with nvidia-smi: the condition's text names the error. Give it no new long job."
)
_DISK = "Give the node no new job. Look at the kernel log, the file system and its drive."
_NETWORK = "Look at the node's ports here, and at its network plugin (CNI)."
_USERS = "Look at what runs there. The node is not at fault."

ROWS: tuple[Rule, ...] = (
    # GKE repairs a node that is not ready for 10 minutes, or short of disk for 30:
    # cloud.google.com/kubernetes-engine/docs/how-to/node-auto-repair, "Repair criteria".
    Rule("Ready", FALSE, _LIVENESS, _WARNING, "its kubelet reports that it is not ready", _SERVICES, KUBELET, True,
         600),
    Rule("DiskPressure", TRUE, _RISK, _WARNING, "its kubelet is short of disk and refuses pods",
         "Free room on the disk of images and logs, or find what fills it.", KUBELET, hold_s=1800),
    Rule("MemoryPressure", TRUE, _MEMORY, _INFO, "its kubelet is short of memory and evicts pods", _USERS, KUBELET),
    Rule("PIDPressure", TRUE, _RISK, _INFO, "too many processes run on it", _USERS, KUBELET),
    Rule("NetworkUnavailable", TRUE, _LINK, _WARNING, "its network is not set up for pods", _NETWORK, KUBELET, True),
    Rule("KernelDeadlock", TRUE, _LIVENESS, _WARNING, "its kernel is reported to be deadlocked",
         "Look at the kernel log for blocked tasks. Reboot the node when its work is done.", NPD),
    Rule("ReadonlyFilesystem", TRUE, _RISK, _WARNING, "a file system became read-only", _DISK, NPD),
    Rule("XfsShutdown", TRUE, _RISK, _WARNING, "an XFS file system was shut down", _DISK, NPD),
    Rule("CperHardwareErrorFatal", TRUE, _MEMORY, _WARNING, "its firmware reported a fatal hardware error",
         "Give the node no new long job. Read the BMC's event log, and have the board or CPU checked.", NPD),
    Rule("CorruptDockerOverlay2", TRUE, _RISK, _WARNING, "its images' storage is damaged", _DISK, NPD),
    Rule("FrequentKubeletRestart", TRUE, _LIVENESS, _WARNING, "its kubelet restarts again and again", _SERVICES, NPD,
         True),
    Rule("FrequentDockerRestart", TRUE, _LIVENESS, _WARNING, "Docker restarts again and again", _SERVICES, NPD, True),
    Rule("FrequentContainerdRestart", TRUE, _LIVENESS, _WARNING, "containerd restarts again and again", _SERVICES, NPD,
         True),
    Rule("KubeletUnhealthy", TRUE, _LIVENESS, _WARNING, "its kubelet fails its health check", _SERVICES, NPD, True),
    Rule("ContainerRuntimeUnhealthy", TRUE, _LIVENESS, _WARNING, "its container runtime fails its health check",
         _SERVICES, NPD, True),
    Rule("FrequentUnregisterNetDevice", TRUE, _LINK, _INFO, "network devices of ended pods stay behind", _NETWORK, NPD),
    Rule("NTPProblem", TRUE, _LIVENESS, _INFO, "its time service is down", "Start chrony or ntpd again.", NPD, True),
    Rule("GpuMemWatch", TRUE, _MEMORY, _WARNING, "memory of a GPU fails, by DCGM", _GPU, NVSENTINEL),
    Rule("GpuThermalWatch", TRUE, _THERMAL, _WARNING, "a GPU is too hot, by DCGM", _GPU, NVSENTINEL),
    Rule("GpuThermalMarginWatch", TRUE, _THERMAL, _WARNING, "a GPU has passed its slowdown temperature, by DCGM", _GPU,
         NVSENTINEL),
    Rule("GpuPcieWatch", TRUE, _LINK, _WARNING, "the PCIe link of a GPU has errors, by DCGM", _GPU, NVSENTINEL),
    Rule("GpuNvlinkWatch", TRUE, _LINK, _WARNING, "an NVLink fails, by DCGM", _GPU, NVSENTINEL),
    Rule("GpuPowerWatch", TRUE, _THERMAL, _WARNING, "the power of a GPU is wrong, by DCGM", _GPU, NVSENTINEL),
    Rule("GpuInforomWatch", TRUE, _RISK, _WARNING, "the InfoROM of a GPU is corrupt, by DCGM", _GPU, NVSENTINEL),
    Rule("GpuSmWatch", TRUE, _RISK, _WARNING, "a multiprocessor of a GPU fails, by DCGM", _GPU, NVSENTINEL),
    Rule("GpuMcuWatch", TRUE, _RISK, _WARNING, "the microcontroller of a GPU fails, by DCGM", _GPU, NVSENTINEL),
    Rule("GpuPmuWatch", TRUE, _RISK, _WARNING, "the power management unit of a GPU fails, by DCGM", _GPU, NVSENTINEL),
    Rule("GpuDriverWatch", TRUE, _LIVENESS, _WARNING, "the GPU driver fails, by DCGM", _GPU, NVSENTINEL, True),
    Rule("SysLogsXIDError", TRUE, _RISK, _WARNING, "its log has an XID", _GPU, NVSENTINEL),
    Rule("SysLogsSXIDError", TRUE, _LINK, _WARNING, "its log has an SXid of an NVSwitch", _GPU, NVSENTINEL),
    Rule("SysLogsGPUFallenOff", TRUE, _LINK, _WARNING, "its log says that a GPU fell off the bus", _GPU, NVSENTINEL),
    Rule("NVSwitchFatalError", TRUE, _LINK, _WARNING, "an NVSwitch has a fatal error", _GPU, NVSENTINEL),
    Rule("NVSwitchDown", TRUE, _LINK, _WARNING, "an NVSwitch is down", _GPU, NVSENTINEL),
    Rule("AcceleratedHardwareReady", FALSE, _RISK, _WARNING, "its GPUs are reported to be broken", _GPU, EKS),
    Rule("KernelReady", FALSE, _LIVENESS, _WARNING, "its kernel is reported to be broken",
         "Look at the kernel log. Reboot the node when its work is done.", EKS),
    Rule("StorageReady", FALSE, _RISK, _WARNING, "its storage is reported to be broken", _DISK, EKS),
    Rule("NetworkingReady", FALSE, _LINK, _WARNING, "its network is reported to be broken", _NETWORK, EKS, True),
    Rule("ContainerRuntimeReady", FALSE, _LIVENESS, _WARNING, "its container runtime is reported to be broken",
         _SERVICES, EKS, True),
    Rule("GPUMissing", TRUE, _LIVENESS, _WARNING, "it has fewer GPUs than its size of machine", _GPU, AKS, True),
    Rule("NVLinkStatusInactive", TRUE, _LINK, _WARNING, "an NVLink is inactive", _GPU, AKS),
    Rule("XIDErrors", TRUE, _RISK, _WARNING, "its kernel log has XIDs", _GPU, AKS),
    Rule("IBLinkFlapping", TRUE, _LINK, _WARNING, "an InfiniBand port goes down again and again", _NETWORK, AKS),
    Rule("GPUClockThrottling", TRUE, _THERMAL, _WARNING, "the clocks of a GPU are held down", _GPU, AKS),
    Rule("UnhealthyNvidiaDevicePlugin", TRUE, _LIVENESS, _WARNING, "the NVIDIA device plugin does not run: no new pod"
         " gets a GPU", "Look at the plugin's service or pod on the node.", AKS, True),
    Rule("FilesystemCorruptionProblem", TRUE, _RISK, _WARNING, "a file system is damaged", _DISK, AKS),
    Rule("KubeletProblem", TRUE, _LIVENESS, _WARNING, "its kubelet is down", _SERVICES, AKS, True),
    Rule("ContainerRuntimeProblem", TRUE, _LIVENESS, _WARNING, "its container runtime is down", _SERVICES, AKS, True),
    Rule("NebiusGPUError", TRUE, _RISK, _WARNING, "a check of its GPUs fails", _GPU, NEBIUS),
    Rule("NebiusBootDiskIOError", TRUE, _RISK, _WARNING, "its boot disk fails to read or write", _DISK, NEBIUS),
)  # fmt: skip
RULES: Mapping[str, Rule] = {rule.type: rule for rule in ROWS}


def rule_of(type_: str) -> Rule:
    """Return the row of a type; of one that only a setting names, a plain warning."""
    return RULES.get(type_) or Rule(
        type_, TRUE, _RISK, _WARNING, f"its condition {type_} is bad",
        "Look at what writes this condition and what it says. Give the node no new long job until it is clear.",
        SETTINGS,
    )  # fmt: skip

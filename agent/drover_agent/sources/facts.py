"""What each source is, for `drover-agent sources`, `check` and docs/reference/sources.md.

A source without a row fails a test.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class SourceFacts:
    """
    Attributes:
        what: what it gives.
        reads: from where.
        pace: how often.
        rights: what it needs beyond those of any user, or how to mend that it may not.
        missing: what it means that it gives nothing.
        setting: what turns it on and off.
    """

    what: str
    reads: str
    pace: str
    rights: str
    missing: str
    setting: str


# What it means that `jobs` gives nothing, or not all, where GPUs are.
JOBS_UNKNOWN = "which job holds them is not known: their processes, or those of a job, cannot be identified"

FACTS: Mapping[str, SourceFacts] = MappingProxyType(
    {
        "nvml": SourceFacts(
            what="GPUs, MIG instances: clocks, power, heat, memory, ECC, PCIe, NVLink, inventory, profiling",
            reads="libnvidia-ml.so.1; a GPU that hangs is left behind alone",
            pace="1 s; energy, memory in use, memory clock, margin to slowdown, clock event reasons and time held "
            "down, ECC, row remaps, NVLinks up, PCIe link, fabric, recovery action and processes every 10 s, and "
            "memory utilisation where GPM reports each second how busy the memory is; errors of NVLinks every 30 s; "
            "inventory every 5 min",
            rights="read and write access to /dev/nvidiactl and /dev/nvidia*; those of /dev/nvidia-caps for MIG",
            missing="no NVIDIA driver on this node",
            setting='`hardware = "auto"` or `"nvml"`',
        ),
        "kmsg": SourceFacts(
            what="events: XIDs, SXids, PCIe, memory and OOM lines, as they come and of while the agent was down",
            reads="/dev/kmsg",
            pace="at once",
            rights="CAP_SYSLOG where kernel.dmesg_restrict is 1",
            missing="the kernel log is not read",
            setting="`kmsg_enabled`",
        ),
        "host": SourceFacts(
            what="the node: CPU, memory, disks, network, PCIe AER, EDAC, OOM kills, the agent, what it is made of",
            reads="/proc, /sys",
            pace="1 s; error counters every 10 s; new devices every minute",
            rights="none",
            missing="/proc or /sys is not what it should be",
            setting="always on, but for simulated hardware",
        ),
        "sensors": SourceFacts(
            what="inlet temperature and fans",
            reads="/sys/class/hwmon; what it lacks: `ipmitool` or `ipmi-sensors` on /dev/ipmi0",
            pace="10 s; IPMI every minute",
            rights="read and write access to /dev/ipmi0 for IPMI",
            missing="no such sensor on this node",
            setting="always on, but for simulated hardware",
        ),
        "infiniband": SourceFacts(
            what="InfiniBand and RoCE ports: state, rate, traffic, errors, congestion",
            reads="/sys/class/infiniband",
            pace="1 s; rates of links that stay up, error counters and new ports every 10 s",
            rights="none",
            missing="no InfiniBand or RoCE port on this node",
            setting="always on, but for simulated hardware",
        ),
        "ethernet": SourceFacts(
            what="Ethernet ports: state, rate, traffic, errors",
            reads="/sys/class/net, physical ports only",
            pace="1 s; rates of links that stay up, error counters and new ports every 10 s",
            rights="none",
            missing="no physical Ethernet port on this node",
            setting="always on, but for simulated hardware",
        ),
        "dcgm": SourceFacts(
            what="GPUs' profiling metrics; everything it has where NVML cannot be opened",
            reads="dcgm-exporter's metrics page",
            pace="10 s; dcgm-exporter itself reads every 30 s by default",
            rights="none",
            missing="no dcgm-exporter at `dcgm_url`",
            setting="`dcgm_url`",
        ),
        "inference": SourceFacts(
            what="inference servers: time to first token, tokens per second, requests running and waiting",
            reads="the metrics pages of vLLM, SGLang, Triton and TGI servers",
            pace="10 s",
            rights="none",
            missing="no server is set in `inference_urls`",
            setting="`inference_urls`",
        ),
        "steps": SourceFacts(
            what="training loops: step time, tokens and operations per step, MFU",
            reads="reports of drover_agent.client.training_steps at a Unix socket",
            pace="1 s, when there are reports",
            rights="a folder for the socket that the agent may write to: RuntimeDirectory=drover in its unit",
            missing="no training loop reports its steps",
            setting="`steps_socket`",
        ),
        "jobs": SourceFacts(
            what="which Slurm job or Kubernetes pod holds which GPU",
            reads="/proc; the kubelet's pod-resources socket",
            pace="5 s",
            rights="CAP_SYS_PTRACE, to know of GPUs that a Slurm job was given and does not use; for pods "
            "CAP_DAC_OVERRIDE, as the kubelet's socket is of root",
            missing="no GPU, so nothing to hold",
            setting="`kubelet_socket`, `kubernetes_resources`",
        ),
        "owners": SourceFacts(
            what="events: whose each job is (user, account, project, array, Ray's job); inventory: places of ranks",
            reads="/proc: the user id, a fixed list of variables, and sizes of parallel groups in the command line, of "
            "processes of jobs that hold GPUs",
            pace="10 s; sent when it is new, owners once a day too",
            rights="CAP_SYS_PTRACE, to read variables of other users' processes; without it the user alone is known",
            missing="no process of a job is seen on a GPU",
            setting="none",
        ),
        "rank_dumps": SourceFacts(
            what="events: where ranks of jobs stand in their collectives",
            reads="flight recorder dumps of PyTorch at the paths that are set; /proc, for the GPU of a rank",
            pace="2 s, when a dump is new",
            rights="read access to the dumps; CAP_SYS_PTRACE, to know the GPU of a rank by its environment",
            missing="no path is set in `rank_dumps`, or no rank has left a dump",
            setting="`rank_dumps`",
        ),
        "simulated": SourceFacts(
            what="eight GPUs, their host and jobs, made up",
            reads="nothing of this machine",
            pace="each tick",
            rights="none; needs the extra `simulation`",
            missing="nothing is simulated",
            setting='`hardware = "simulated"`',
        ),
    }
)

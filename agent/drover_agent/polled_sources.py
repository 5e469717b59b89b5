"""The sources that the sampler reads on a schedule: one row of POLLED each.

The GPUs (`sources/nvml`, which come and go with the driver) and the kernel log (`sources/kmsg`, which waits for lines)
are run by `app.py`.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from drover_agent.simulated import load
from drover_agent.sources.base import Reading, Source
from drover_agent.sources.gpus import Gpus

if TYPE_CHECKING:
    from drover_agent.config import AgentConfig


class Off:
    """A source that the settings turn off."""

    interval_s = 3600.0
    off = True

    def __init__(self, name: str) -> None:
        self.name = name

    def read(self, _: int) -> Reading:
        return Reading()

    def close(self) -> None:
        """Nothing is held open."""


def _host(config: AgentConfig, _: Gpus) -> Source:
    from drover_agent.sources.host.source import HostSource

    return HostSource(config.node_name, Path(config.proc_root), Path(config.sys_root))


def _sensors(config: AgentConfig, _: Gpus) -> Source:
    from drover_agent.sources.host.sensors import SensorsSource

    return SensorsSource(config.node_name, Path(config.sys_root))


def _infiniband(config: AgentConfig, gpus: Gpus) -> Source:
    from drover_agent.sources.network.infiniband import InfinibandSource

    return InfinibandSource(config.node_name, Path(config.sys_root), gpus)


def _ethernet(config: AgentConfig, _: Gpus) -> Source:
    from drover_agent.sources.network.ethernet import EthernetSource

    return EthernetSource(config.node_name, Path(config.sys_root))


def _dcgm(config: AgentConfig, gpus: Gpus) -> Source:
    if not config.dcgm_url:
        return Off("dcgm")
    from drover_agent.sources.dcgm import DcgmSource

    kmsg = Path(config.kmsg_path) if config.kmsg_enabled else None
    return DcgmSource(config.node_name, config.dcgm_url, gpus, kmsg, Path(config.proc_root))


def _inference(config: AgentConfig, _: Gpus) -> Source:
    if not config.inference_urls:
        return Off("inference")
    from drover_agent.sources.workloads.inference import InferenceSource

    return InferenceSource(config.node_name, config.inference_urls)


def _steps(config: AgentConfig, gpus: Gpus) -> Source:
    if not config.steps_socket:
        return Off("steps")
    from drover_agent.sources.workloads.steps import StepsSource

    return StepsSource(config.node_name, Path(config.steps_socket), gpus)


def _jobs(config: AgentConfig, gpus: Gpus) -> Source:
    from drover_agent.sources.workloads.jobs import JobsSource
    from drover_agent.sources.workloads.processes import ProcessReport

    proc = Path(config.proc_root)
    return JobsSource(proc, gpus, config.kubelet_socket, config.kubernetes_resources, ProcessReport(proc))


def _owners(config: AgentConfig, gpus: Gpus) -> Source:
    from drover_agent.sources.workloads.owners import OwnersSource

    return OwnersSource(Path(config.proc_root), gpus)


def _rank_dumps(config: AgentConfig, gpus: Gpus) -> Source:
    if not config.rank_dumps:
        return Off("rank_dumps")
    from drover_agent.sources.workloads.rank_dumps import RankDumpsSource

    return RankDumpsSource(config.rank_dumps, gpus, Path(config.proc_root))


def _simulated(config: AgentConfig, _: Gpus) -> Source:
    seed = zlib.crc32(config.node_name.encode())  # else all nodes had the same serials
    source: Source = load("node")(config.node_name, seed)
    return source


# name -> (values of the setting `hardware`, how to build it). Imports are inside: a node loads only what it uses.
POLLED: dict[str, tuple[frozenset[str], Callable[[AgentConfig, Gpus], Source]]] = {
    "host": (frozenset({"auto", "nvml", "none"}), _host),
    "sensors": (frozenset({"auto", "nvml", "none"}), _sensors),
    "infiniband": (frozenset({"auto", "nvml", "none"}), _infiniband),
    "ethernet": (frozenset({"auto", "nvml", "none"}), _ethernet),
    "dcgm": (frozenset({"auto", "nvml"}), _dcgm),
    "inference": (frozenset({"auto", "nvml", "none"}), _inference),
    "steps": (frozenset({"auto", "nvml", "none"}), _steps),
    "jobs": (frozenset({"auto", "nvml"}), _jobs),
    "owners": (frozenset({"auto", "nvml"}), _owners),
    "rank_dumps": (frozenset({"auto", "nvml", "none"}), _rank_dumps),
    "simulated": (frozenset({"simulated"}), _simulated),
}


def build_sources(config: AgentConfig, gpus: Gpus) -> list[Source]:
    """Return the scheduled sources of a node; from `gpus` they learn its GPUs.

    Raises:
        SettingsError: hardware is simulated, and the simulator is not installed.
    """
    return [build(config, gpus) for hardware, build in POLLED.values() if config.hardware in hardware]

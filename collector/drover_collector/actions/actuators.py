"""The actuators that the settings name, and which nodes each has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from drover_collector.actions.base import Actuator
from drover_collector.actions.command import CommandActuator
from drover_collector.actions.kubernetes.actuator import KubernetesActuator
from drover_collector.actions.kubernetes.api import KubernetesApi
from drover_collector.actions.settings import ActConfig, used
from drover_collector.actions.slurm.actuator import SlurmActuator
from drover_collector.actions.slurm.scontrol import Scontrol
from drover_collector.actions.slurm.slurmrestd import Slurmrestd
from drover_core.model.fleet import FleetSpec

# Why a scheduler cannot take out one GPU alone (docs/how-to/slurm.md).
NO_SINGLE_GPU = {
    "slurm": "Slurm cannot take one named GPU of a node out of service",
    "command": "act.command has no call for one GPU",
}


@dataclass(frozen=True, slots=True)
class Actuators:
    """
    Attributes:
        of: the actuator that has a node; None: no actuator has it, so nothing can be done to it.
        nodes: of the fleet, whose state is surveyed no matter who closed them.
        scheduler: the name of the actuator that has a node, or would have it in a mode that acts; "": none.
        gpu_hindrance: why the scheduler of a node cannot take out one GPU alone; "": it can. In observe mode too.
    """

    all: tuple[Actuator, ...] = ()
    of: Callable[[str], Actuator | None] = lambda _: None
    nodes: tuple[str, ...] = ()
    gpu_hindrance: Callable[[str], str] = lambda _: ""
    scheduler: Callable[[str], str] = lambda _: ""


def make_actuators(config: ActConfig, spec: FleetSpec) -> Actuators:
    """Return the actuators that are switched on; none in observe mode. No scheduler is asked anything yet."""
    made = _actuators(config)
    pools = used(config)

    def of(node: str) -> Actuator | None:
        place = spec.by_name.get(node)
        if place is None:
            return None
        return next((a for a in made if not pools[a.name] or place.pool in pools[a.name]), None)

    def scheduler(node: str) -> str:
        place = spec.by_name.get(node)
        return next((n for n, its in pools.items() if not its or (place is not None and place.pool in its)), "")

    def gpu_hindrance(node: str) -> str:
        return NO_SINGLE_GPU.get(scheduler(node), "")

    return Actuators(tuple(made), of, tuple(node.name for node in spec.nodes), gpu_hindrance, scheduler)


def _actuators(config: ActConfig) -> list[Actuator]:
    if config.mode == "observe":
        return []
    made: list[Actuator] = []
    if config.slurm.enabled:
        client = Scontrol(config.slurm) if config.slurm.slurmrestd is None else Slurmrestd(config.slurm)
        made.append(SlurmActuator(client, config.slurm.advise_weight))
    if config.kubernetes.enabled:
        made.append(KubernetesActuator(KubernetesApi(config.kubernetes), config.kubernetes.gpu_resources))
    if config.command.program:
        made.append(CommandActuator(config.command))
    return made

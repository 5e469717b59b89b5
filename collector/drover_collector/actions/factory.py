"""The actuators that the settings name, and who of them has which node."""

from __future__ import annotations

from collections.abc import Callable

from drover_collector.actions.base import Actuator
from drover_collector.actions.command import CommandActuator
from drover_collector.actions.kubernetes.actuator import KubernetesActuator
from drover_collector.actions.kubernetes.api import KubernetesApi
from drover_collector.actions.settings import ActConfig, used
from drover_collector.actions.slurm.actuator import SlurmActuator
from drover_collector.actions.slurm.scontrol import Scontrol
from drover_collector.actions.slurm.slurmrestd import Slurmrestd
from drover_core.model.fleet import FleetSpec


def actuators(config: ActConfig) -> list[Actuator]:
    """Those that are switched on; none in observe mode. Nothing is asked of any scheduler yet."""
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


def by_pool(config: ActConfig, made: list[Actuator], spec: FleetSpec) -> Callable[[str], Actuator | None]:
    """Node -> who has it; None: nobody."""
    pools = used(config)

    def of(node: str) -> Actuator | None:
        place = spec.by_name.get(node)
        if place is None:
            return None
        return next((a for a in made if not pools[a.name] or place.pool in pools[a.name]), None)

    return of

"""The actuators that the settings name, and who of them has which node."""

from __future__ import annotations

from collections.abc import Callable

from drover_collector.actions.base import Actuator
from drover_collector.actions.command import CommandActuator
from drover_collector.actions.scontrol import Scontrol
from drover_collector.actions.settings import ActConfig, used
from drover_collector.actions.slurm import SlurmActuator
from drover_proto.fleet import FleetSpec
from drover_proto.settings import SettingsError


def actuators(config: ActConfig) -> list[Actuator]:
    """Those that are switched on; none in observe mode. Nothing is asked of any scheduler yet.

    Raises:
        SettingsError: one that cannot be made.
    """
    if config.mode == "observe":
        return []
    made: list[Actuator] = []
    for name in used(config):
        match name:
            case "slurm":
                made.append(SlurmActuator(Scontrol(config.slurm), config.slurm.advise_weight))
            case "command":
                made.append(CommandActuator(config.command))
            case _:
                raise SettingsError(f"act.{name}: this version has no such actuator")
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

"""Act on simulated nodes as a scheduler and an operator would: close, open, reset and reboot them."""

from __future__ import annotations

from drover_simulator.counters import STATES, VOLATILE
from drover_simulator.effects import EFFECTS
from drover_simulator.fleet import Active, SimulatedFleet
from drover_simulator.kinds import KINDS

LEAVE_S = 15.0  # from a node's closing to the end of its job
MOVE_S = 45.0  # until the job starts again on its other nodes
BOOT_S = 20.0  # a real server takes minutes
RESET_S = 2.0
CURES = {"reset": frozenset({"reset"}), "reboot": frozenset({"reset", "reboot"})}  # act -> kinds' `cured_by`
KEPT = {"row_remap_failed": ("memory", "row_remap_failure")}  # state in the board's own memory -> its fault


class Operations:
    """Operations on the nodes of a fleet. All names must be in the fleet.

    Attributes:
        boots: node -> how often it was rebooted.
    """

    def __init__(self, fleet: SimulatedFleet) -> None:
        self._fleet = fleet
        self.boots: dict[str, int] = {}

    def jobs_on(self, node: str) -> list[str]:
        fleet, n = self._fleet, self._fleet.hardware.number[node]
        found = (fleet.steps.job_at(int(g)) for g in fleet.hardware.gpus_of(n))
        return sorted({job for job in found if job is not None})

    def close(self, node: str, *, at_once: bool = False) -> None:
        """Start no further jobs on a node. Its running jobs end after LEAVE_S, or at once, and continue elsewhere."""
        fleet = self._fleet
        fleet.closed.add(fleet.hardware.number[node])
        leave_s = fleet.now_s + (0.0 if at_once else LEAVE_S)
        fleet.at(leave_s, lambda: self._leave(node, leave_s))

    def open(self, node: str) -> None:
        self._fleet.closed.discard(self._fleet.hardware.number[node])

    def reset(self, node: str) -> None:
        """Reset the GPUs of a node, which must not run a job."""
        at_s = self._fleet.now_s + RESET_S
        self._fleet.at(at_s, lambda: self._cure(node, "reset"))

    def reboot(self, node: str) -> None:
        """Reboot a node: it is silent for BOOT_S, and then has only the faults that a reboot does not cure."""
        fleet, n = self._fleet, self._fleet.hardware.number[node]
        self._end_jobs(node, fleet.now_s)
        fleet.booting.add(n)

        def up() -> None:
            self._cure(node, "reboot")
            self.boots[node] = self.boots.get(node, 0) + 1
            fleet.booting.discard(n)

        fleet.at(fleet.now_s + BOOT_S, up)

    def _leave(self, node: str, at_s: float) -> None:
        if self._fleet.hardware.number[node] in self._fleet.closed:
            self._end_jobs(node, at_s)

    def _end_jobs(self, node: str, at_s: float) -> None:
        fleet = self._fleet
        for name in self.jobs_on(node):
            job = fleet.steps.running[name]
            fleet.end_job(name, at_s)
            fleet.at(at_s + MOVE_S, lambda job=job: fleet.start_again(job, at_s + MOVE_S))  # type: ignore[misc]  # mypy cannot infer lambda defaults

    def _cure(self, node: str, act: str) -> None:
        fleet = self._fleet
        n = fleet.hardware.number[node]
        for active in [a for a in fleet.active if self._is_cured(a, n, act)]:
            fleet.active.remove(active)
            effect = EFFECTS[active.fault.kind, active.fault.cause]
            if act == "reset" and effect.end is not None:
                effect.end(fleet, active.fault, active.target)
        for gpu in fleet.hardware.gpus_of(n).tolist():
            faults = fleet.faults_on(gpu)
            for name in (*VOLATILE, *STATES):
                if KEPT.get(name) not in faults:
                    fleet.counters.gpu[name][gpu] = 0.0
            fleet.physics.forget(gpu)

    def _is_cured(self, active: Active, node: int, act: str) -> bool:
        kind = KINDS[active.fault.kind, active.fault.cause]
        return kind.scope in ("gpu", "node") and node in active.target.nodes and kind.cured_by in CURES[act]

"""A Slurm in memory, for what a real one is too slow for: the client that `SlurmActuator` works with.

It answers as version 22.05 does (tests/collector/test_slurm.py holds the actuator against the real one).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from drover_collector.actions.base import ActError, AwayError, LaterError
from drover_collector.actions.slurm.save_signal import SaveSignal
from drover_collector.actions.slurm.scontrol import SlurmNode


class SlurmStandIn:
    """
    Attributes:
        running: node -> jobs on it; kept: jobs that may not be requeued.
        effects: every change that was asked for, in order.
        away: slurmctld does not answer.
        save_signals: job -> the signal that it names.
    """

    def __init__(self, *nodes: str) -> None:
        self.held: dict[str, SlurmNode] = {}
        self.running: dict[str, list[str]] = {}
        self.kept: set[str] = set()
        self.effects: list[str] = []
        self.away = False
        self.requeues = True
        self.save_signals: dict[str, SaveSignal] = {}
        for name in nodes:
            self.add(name)

    def add(self, node: str) -> None:
        self.held[node] = SlurmNode(node, frozenset({"IDLE"}), 1)
        self.running[node] = []

    def start(self, node: str, *jobs: str) -> None:
        self.running[node] += jobs
        self._busy(node)

    def finish(self, node: str) -> None:
        self.running[node].clear()
        self._busy(node)

    def drain_by(self, node: str, who: str, reason: str) -> None:
        """What somebody else does."""
        held = self.held[node]
        self.held[node] = replace(held, states=held.states | {"DRAIN"}, reason=reason, by=who)

    def resume_by_hand(self, node: str) -> None:
        held = self.held[node]
        self.held[node] = replace(held, states=held.states - {"DRAIN"}, reason="", by="")

    # ---- the client

    def nodes(self, names: Sequence[str]) -> Mapping[str, SlurmNode]:
        self._answer()
        return {name: self.held[name] for name in names if name in self.held}

    def update(self, node: str, **fields: str) -> None:
        self._answer()
        self.effects.append(f"{node} " + " ".join(f"{key}={value}" for key, value in fields.items()))
        match fields.get("state"):
            case "drain":
                self.drain_by(node, "root", fields["reason"])
            case "undrain":
                self.resume_by_hand(node)
        if "weight" in fields:
            self.held[node] = replace(self.held[node], weight=int(fields["weight"]))

    def jobs(self, node: str) -> tuple[str, ...]:
        self._answer()
        return tuple(self.running[node])

    def requeue(self, job: str) -> None:
        self._answer()
        if job in self.kept:
            raise LaterError(f"Slurm: Requested operation is presently disabled for job {job}")
        nodes = [name for name, jobs in self.running.items() if job in jobs]
        if not nodes:
            raise ActError(f"Slurm: Job is pending execution for job {job}")
        self.effects.append(f"requeue {job}")
        for node in nodes:
            self.running[node].remove(job)
            self._busy(node)

    def save_signal(self, job: str) -> SaveSignal | None:
        self._answer()
        return self.save_signals.get(job)

    def signal(self, job: str, signal: SaveSignal) -> None:
        self._answer()
        self.effects.append(f"signal {job} {signal.name}{' to its script' if signal.to_script else ''}")

    def _busy(self, node: str) -> None:
        held = self.held[node]
        base = {"MIXED"} if self.running[node] else {"IDLE"}
        self.held[node] = replace(held, states=held.states - {"IDLE", "MIXED"} | base)

    def _answer(self) -> None:
        if self.away:
            raise AwayError("Slurm does not answer: Unable to contact slurm controller (connect failure)")

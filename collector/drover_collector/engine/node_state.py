"""What the engine knows of one node, and what schedulers say of all. Pure values."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field

FRESH_MS = 120_000  # the newest values of a node and of each of its GPUs are not older, unless it is read seldom


@dataclass(frozen=True, slots=True)
class Survey:
    """What schedulers say of all nodes of a fleet.

    Attributes:
        closed: nodes that get no work, no matter who closed them; None: not known.
        answers: node -> whether its slurmd or kubelet answers the scheduler. A node that is missing here: unknown. A
            scheduler notices late that a node is gone (Slurm within SlurmdTimeout, 300 s; Kubernetes within 40 s).
    """

    closed: Set[str] | None = frozenset()
    answers: Mapping[str, bool] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class NodeNow:
    """What the engine knows of one node.

    Attributes:
        values_ms: end of the newest bucket with values of the node or its GPUs; 0: none since the collector's start.
        gpus_ms: the same for each GPU that the fleet file gives the node, by slot.
        said: open incident of the node -> detector that has not said "over" -> when it last said that it holds.
        reset_ms: GPU (None: the node) -> when telemetry proved that it was reset since its newest XID.
        asked: GPU -> what its driver asks for, as `catalog.RECOVERY_ACTIONS` numbers it; 0 is left out.
        boards: slot -> UUID of the GPU there, as the node last reported it.
        late_ms: how long it may give no values and is not silent: agents may read it every 10 min.
    """

    values_ms: int = 0
    gpus_ms: tuple[int, ...] = ()
    said: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    reset_ms: Mapping[int | None, int] = field(default_factory=dict)
    late_ms: int = 0
    asked: Mapping[int, int] = field(default_factory=dict)
    boards: Mapping[int, str] = field(default_factory=dict)

    @property
    def fresh_ms(self) -> int:
        """How old its newest values may be."""
        return max(FRESH_MS, self.late_ms)

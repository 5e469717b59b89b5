"""What the judgement is given and what it gives."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from drover_collector.store.repositories.probes import Key


class End(StrEnum):
    """How the probe ended, as the agent's runner names it."""

    DONE = "done"
    STOPPED = "stopped"  # it gave way: the node was needed
    HUNG = "hung"
    CRASHED = "crashed"
    TIMEOUT = "timeout"
    LOST = "lost"  # the driver no longer answers for the GPU
    MEMORY = "memory"  # took more of the host's memory than it may
    UNSERVED = "unserved"  # the node could not run probes, or never answered


@dataclass(frozen=True, slots=True)
class Measurement:
    """One figure of one GPU, pair or node.

    Attributes:
        gpu: slot, None: of the node. peer: the other GPU of a pair.
        value: median of `repeats`, in the probe's unit; None: not measured, `detail` says why.
        spread: coefficient of variation over the repeats, None for one.
        ok: of exact probes, which the node judges itself. tries: of one that hung or crashed, how often it did.
    """

    node: str
    gpu: int | None
    probe: str
    value: float | None
    key: Key = field(default_factory=Key)
    ts_ms: int = 0
    peer: int | None = None
    spread: float | None = None
    repeats: int = 1
    ok: bool | None = None
    detail: str = ""
    end: End = End.DONE
    tries: int = 1

    @property
    def who(self) -> str:
        if self.gpu is None:
            return self.node
        return (
            f"GPU {self.gpu} of {self.node}" if self.peer is None else f"GPU {self.gpu} to {self.peer} of {self.node}"
        )


class Basis(StrEnum):
    """What a verdict rests on."""

    FLEET = "fleet"  # GPUs of the same configuration
    POOLED = "pooled"  # those of other drivers too
    REFERENCE = "reference"  # what is published of the model
    EXACT = "exact"  # there is one right answer
    END = "end"  # how the probe ended
    NOTHING = "nothing"


@dataclass(frozen=True, slots=True)
class Verdict:
    """Of one measurement.

    Attributes:
        ok: None: could not be judged. text: a sentence for an operator.
        worse: share by which it is worse than expected (0.098: 9.8 %), negative where it is better.
        detectable: smallest such share that is found nine times in ten.
        peers: boards it was held against, itself among them.
        suspicious: worth another look though it is no proof.
        culprits: (node, GPU or None) that it speaks against, where that is not just what was measured.
    """

    measurement: Measurement
    ok: bool | None
    text: str
    basis: Basis
    worse: float | None = None
    detectable: float | None = None
    peers: int = 0
    suspicious: bool = False
    culprits: tuple[tuple[str, int | None], ...] = ()

    @property
    def against(self) -> tuple[tuple[str, int | None], ...]:
        """Whom a verdict of False is about: one is the faulty one; of several, one of them."""
        return self.culprits or ((self.measurement.node, self.measurement.gpu),)


class NoteKind(StrEnum):
    BELOW_REFERENCE = "below-reference"  # a whole configuration reads less than published
    TWO_CLUSTERS = "two-clusters"  # more than a third reads less: by design, or a batch
    SHIFT = "shift"  # a configuration reads less than it did before


@dataclass(frozen=True, slots=True)
class Note:
    """A finding about a configuration, not about one GPU."""

    kind: NoteKind
    probe: str
    key: Key
    text: str
    gpus: int


@dataclass(frozen=True, slots=True)
class Group:
    """A configuration's distribution, for the console: centre in the probe's unit, the others as shares of it."""

    probe: str
    key: Key
    size: int
    centre: float
    spread: float
    detectable: float


@dataclass(frozen=True, slots=True)
class Judgement:
    """`verdicts` in the order of node, GPU, peer and probe, whatever the order of the measurements."""

    verdicts: tuple[Verdict, ...] = ()
    notes: tuple[Note, ...] = ()
    groups: tuple[Group, ...] = ()

"""What is known of a dead job: its class of failure, the rank to blame, the evidence, what followed from it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType


class Failure(StrEnum):
    """How a job ended. The order is that of strength where the log does not say what came first."""

    GPU_HARDWARE = "gpu_hardware"
    GPU_OOM = "gpu_oom"
    HOST_OOM = "host_oom"
    STORAGE = "storage"
    NODE_LOST = "node_lost"
    TIME_LIMIT = "time_limit"
    CANCELLED = "cancelled"
    NOT_STARTED = "not_started"
    COLLECTIVE_MISMATCH = "collective_mismatch"
    NETWORK_HARDWARE = "network_hardware"
    PROGRAM = "program"
    COLLECTIVE_TIMEOUT = "collective_timeout"
    PEER_DIED = "peer_died"
    ENDED_NORMALLY = "ended_normally"
    UNKNOWN = "unknown"


MEANING = MappingProxyType(
    {
        Failure.GPU_HARDWARE: "a GPU failed",
        Failure.GPU_OOM: "GPU memory ran out",
        Failure.HOST_OOM: "host memory ran out",
        Failure.STORAGE: "storage failed: an I/O error, a stale NFS handle or no space",
        Failure.NODE_LOST: "a node was lost",
        Failure.TIME_LIMIT: "the time limit was reached",
        Failure.CANCELLED: "the job was preempted or cancelled",
        Failure.NOT_STARTED: "the job's container did not start: its image or its configuration",
        Failure.COLLECTIVE_MISMATCH: "the ranks called different collectives",
        Failure.NETWORK_HARDWARE: "the network failed",
        Failure.PROGRAM: "the program failed: an exception or a crash",
        Failure.COLLECTIVE_TIMEOUT: "a collective timed out",
        Failure.PEER_DIED: "a rank died, and nothing says of what",
        Failure.ENDED_NORMALLY: "the job ended normally",
        Failure.UNKNOWN: "the evidence does not say why",
    }
)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank ran, as far as its log or dump says."""

    node: str = ""
    gpu: int | None = None


@dataclass(frozen=True, slots=True)
class Proof:
    """One line or fact that the verdict rests on. `text` is safe to print: no control characters, at most 300."""

    text: str
    source: str = ""  # file and line, or the kind of evidence
    rank: int | None = None
    rule: str = ""  # id of the rule that matched


@dataclass(frozen=True, slots=True)
class Fault:
    """What one rank did in a collective that others did not."""

    what: str  # missing, type, size, dtype, silent (it left no dump), last
    ranks: tuple[int, ...]
    collective: str  # such as all_reduce
    sequence: int | None  # number of the collective in its group
    group: str
    detail: str  # a sentence
    confidence: float
    waiting: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class HardwareEvent:
    """An XID, kernel line or lifecycle event of a node, from a case, an events file or the collector."""

    node: str
    gpu: int | None
    kind: str  # xid, sxid, kernel, lifecycle
    code: str
    message: str
    ts_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why the job ended."""

    failure: Failure
    confidence: float  # 0..1
    sentence: str
    rank: int | None = None  # the rank that failed first, or did not come
    place: Place = Place()
    proofs: tuple[Proof, ...] = ()
    consequences: tuple[Proof, ...] = ()  # what followed from it on other ranks
    faults: tuple[Fault, ...] = ()
    notes: tuple[str, ...] = ()  # what could not be read or judged
    ranks: tuple[int, ...] = field(default=())  # all that are known

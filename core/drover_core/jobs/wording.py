"""The sentence that says first what happened."""

from __future__ import annotations

from collections.abc import Sequence

from drover_core.jobs.exits import Ends
from drover_core.jobs.model import MEANING, Failure, Fault, Place, Proof

_OF_RANK = {
    Failure.GPU_HARDWARE: "the GPU of {who} failed",
    Failure.GPU_OOM: "{who} ran out of GPU memory",
    Failure.HOST_OOM: "{who} was killed because host memory ran out",
    Failure.STORAGE: "{who} could not read or write its storage",
    Failure.NETWORK_HARDWARE: "the network of {who} failed",
    Failure.PROGRAM: "the program failed on {who}",
    Failure.COLLECTIVE_TIMEOUT: "{who} did not come to a collective",
    Failure.COLLECTIVE_MISMATCH: "{who} called another collective than the others",
    Failure.PEER_DIED: "{who} died, and nothing says of what",
    Failure.UNKNOWN: "{who} failed, and the evidence does not say why",
}


def who(rank: int, place: Place) -> str:
    """`rank 3 on node n07, GPU 1`, as far as that is known."""
    words = f"rank {rank}"
    if place.node:
        words += f" on node {place.node}"
    return words + (f", GPU {place.gpu}" if place.gpu is not None else "")


def sentence_of(
    failure: Failure, rank: int | None, place: Place, proofs: Sequence[Proof], faults: Sequence[Fault], ends: Ends
) -> str:  # fmt: skip
    """Return one sentence: which rank, where, what."""
    if failure is Failure.ENDED_NORMALLY:
        slow = next((fault for fault in faults if fault.what == "last"), None)
        return MEANING[failure] + (f"; {slow.detail}" if slow else "")
    words = MEANING[failure] if rank is None else _OF_RANK.get(failure, MEANING[failure]).format(who=who(rank, place))
    fault = next((f for f in faults if f.what != "last" and f.ranks and (rank is None or rank in f.ranks)), None)
    if fault and rank is not None and failure in (Failure.COLLECTIVE_TIMEOUT, Failure.COLLECTIVE_MISMATCH):
        words = fault.detail.replace(f"rank {rank} ", f"{who(rank, place)} ", 1)
    elif fault and fault.confidence >= 0.5:
        words += f"; {fault.detail}"
    end = ends.of(rank) if rank is not None else None
    if end and end.first and end.code < 0 and failure is not Failure.HOST_OOM:
        words += f"; its process {end.words}"
    elif proofs and failure in (Failure.PROGRAM, Failure.STORAGE, Failure.GPU_OOM, Failure.GPU_HARDWARE):
        words += f": {proofs[0].text[:160]}"
    return words

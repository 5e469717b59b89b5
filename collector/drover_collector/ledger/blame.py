"""Whose fault it is that a job lost GPU time: one GPU, the network, storage, a host, the whole job, the program.

What counts as lost is what the ledger gives to waiting, lost, restarting and repeated, and nothing else: the sum of the
Job page, of `drover job` and of the report is the same. Each millisecond of it goes to the incident that took it, and
with that to one blame, so that the parts add up. Time that no incident explains is unknown, as is that of an incident
whose cause may be hardware or program.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from drover_collector.fleet.index import FleetIndex
from drover_collector.ledger.checkpoints import find_repeated
from drover_collector.ledger.claims import JobHistory, find_ends, make_layers
from drover_collector.ledger.facts import Facts, LedgerIncident, Share
from drover_collector.ledger.partition import Ledger, partition
from drover_collector.ledger.spans import NONE
from drover_core.model.events import IncidentKind
from drover_core.xid.codes import lookup

TAKEN = (Share.WAITING, Share.LOST, Share.RESTARTING, Share.REPEATED)


class Blame(StrEnum):
    GPU = "gpu"
    NETWORK = "network"
    STORAGE = "storage"  # or the data loader
    HOST = "host"  # a node, a rack's power or air
    JOB = "job"  # a cause of the whole job
    PROGRAM = "program"
    UNKNOWN = "unknown"


# Causes that decide, of whatever kind.
NETWORK = frozenset(
    {
        "port_down", "port_flaps", "port_errors", "nic", "switch", "congested_port", "hot_switch",
        "waits_alike", "nic_errors", "nic_module",
    }
)  # fmt: skip
OF_CAUSE = {
    **dict.fromkeys(NETWORK, Blame.NETWORK),
    "waits_for_host": Blame.STORAGE, "filesystem": Blame.STORAGE, "disk": Blame.STORAGE, "nvme": Blame.STORAGE,
    "host": Blame.HOST, "host_memory": Blame.HOST, "rack_capped": Blame.HOST, "inlet": Blame.HOST, "fan": Blame.HOST,
    "clocks": Blame.JOB, "more_work": Blame.PROGRAM, "collective_mismatch": Blame.PROGRAM,
    # A rank that stops does so by its GPU or by its program; an incident of its hardware would have taken the time.
    "rank_stopped": Blame.UNKNOWN, "rank_missing": Blame.UNKNOWN, "standstill": Blame.UNKNOWN,
    "slower": Blame.UNKNOWN, "slow_from_start": Blame.UNKNOWN,
}  # fmt: skip
OF_HARDWARE = frozenset(
    {
        IncidentKind.XID, IncidentKind.MEMORY, IncidentKind.LINK, IncidentKind.THERMAL, IncidentKind.STRAGGLER,
        IncidentKind.LIVENESS, IncidentKind.SDC,
    }
)  # fmt: skip


def blame_of(incident: LedgerIncident) -> Blame:
    """Return whose fault an incident is, by its cause, and else by the width of what it names."""
    if (known := OF_CAUSE.get(incident.cause)) is not None:
        return known
    prefix, _, code = incident.cause.rpartition("_")
    if prefix == "xid" and code.isdigit():
        found = lookup(int(code))
        if found is None or found.hardware is None:
            return Blame.UNKNOWN
        return Blame.GPU if found.hardware else Blame.PROGRAM
    if incident.kind not in OF_HARDWARE:
        return Blame.UNKNOWN
    if len(incident.members) == 1:
        return Blame.HOST if incident.members[0][1] is None else Blame.GPU
    return Blame.HOST if incident.members and incident.kind != IncidentKind.LINK else Blame.UNKNOWN


@dataclass(frozen=True, slots=True)
class Part:
    """Lost time of a job that one incident took. `incident`: its number; NONE: no incident explains it.

    Attributes:
        ms: GPU-milliseconds. slow_ms: of them those by which the job was slower than its own past.
    """

    blame: Blame
    incident: int
    ms: int
    slow_ms: int = 0


@dataclass(frozen=True, slots=True)
class JobLoss:
    """What a job lost. `parts` add up to `lost_ms`, most first.

    Attributes:
        shares: the ledger's shares of the job, int64 [SHARES]; they add up to `held_ms`.
    """

    from_ms: int
    to_ms: int
    shares: tuple[int, ...]
    parts: Sequence[Part]

    @property
    def held_ms(self) -> int:
        return sum(self.shares)

    @property
    def lost_ms(self) -> int:
        return sum(part.ms for part in self.parts)


def job_loss(index: FleetIndex, facts: Facts, job: int, from_ms: int, to_ms: int) -> JobLoss:
    """Return what a job lost within [from_ms, to_ms), or up to where the facts reach. `job`: its number in `facts`."""
    history = JobHistory(index, facts)
    attempts = find_ends(facts, history)
    layers = make_layers(facts, history, attempts, find_repeated(facts, attempts))
    mine = replace(facts, holds=facts.holds.where(facts.holds.value == job))
    ledger = partition(mine, layers, from_ms, to_ms)
    shares = tuple(int(ms) for ms in ledger.ms.sum(axis=0))
    parts = [_part(facts.incidents[n], n, ms) for n, ms in _by_incident(ledger)]
    taken = sum(shares[share] for share in TAKEN)
    if rest := taken - sum(part.ms for part in parts):
        parts.append(Part(Blame.UNKNOWN, NONE, rest))
    return JobLoss(ledger.from_ms, ledger.to_ms, shares, sorted(parts, key=lambda part: -part.ms))


def _part(incident: LedgerIncident, number: int, ms: int) -> Part:
    return Part(blame_of(incident), number, ms, ms if incident.kind == IncidentKind.SLOWDOWN else 0)


def _by_incident(ledger: Ledger) -> Iterator[tuple[int, int]]:
    """Yield each incident that took time, and how much."""
    took = ledger.claim_ms.sum(axis=1)
    for n in np.unique(ledger.claim_incident).tolist():
        if ms := int(took[ledger.claim_incident == n].sum()):
            yield n, ms

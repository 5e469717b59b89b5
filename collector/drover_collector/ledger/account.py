"""The account of a span of time: shares, claims, energy, availability and interruptions, out of stored facts alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from drover_collector.fleet.index import FleetIndex
from drover_collector.ledger.availability import find_kept, find_service
from drover_collector.ledger.checkpoints import find_repeated
from drover_collector.ledger.claims import Attempt, JobHistory, find_ends, make_layers, restarts, works_after
from drover_collector.ledger.facts import Facts
from drover_collector.ledger.partition import DAY_MS, Ledger, cut_by_day, partition
from drover_collector.ledger.spans import GpuSpans, Ints
from drover_collector.ledger.telemetry import EnergyMeter


@dataclass(frozen=True, slots=True)
class Interruption:
    """An attempt of a job that a fault ended.

    Attributes:
        nodes: numbers of the nodes that the incident names.
        recovery_ms: from the fault until the job worked again; None: it has not, as far as is known.
    """

    attempt: Attempt
    nodes: tuple[int, ...]
    recovery_ms: int | None


@dataclass(frozen=True, slots=True)
class Account:
    """Everything that is known of [from_ms, to_ms).

    Attributes:
        energy_mj, energy_known_ms: int64 [U], of the rows of `ledger`.
        fleet_energy: (mJ, ms for which it is known) of all GPUs, held or not.
        service: int64 [G, SERVICES].
        unsaved: restarts after a fault whose last checkpoint is not known.
        kept: int64 [G], time in service while another GPU of the node was out alone.
        between_ms: job -> GPU time from the end of an attempt by a fault to the next.
    """

    from_ms: int
    to_ms: int
    ledger: Ledger
    energy_mj: Ints
    energy_known_ms: Ints
    fleet_energy: tuple[int, int]
    service: Ints
    interruptions: Sequence[Interruption]
    between_ms: dict[int, int]
    unsaved: int = 0
    kept: Ints = field(default_factory=lambda: np.zeros(0, np.int64))


def make_account(index: FleetIndex, facts: Facts, energy: EnergyMeter, from_ms: int, to_ms: int) -> Account:
    """Return the account of [from_ms, to_ms), or up to where the facts reach.

    Args:
        energy: of `asked_energy`.
    """
    to_ms = max(from_ms, min(to_ms, facts.until_ms))
    history = JobHistory(index, facts)
    attempts = find_ends(facts, history)
    repeats = find_repeated(facts, attempts)
    layers = make_layers(facts, history, attempts, repeats)
    ledger = partition(facts, layers, from_ms, to_ms)
    mj, known = _energy_of_rows(ledger, energy)
    interruptions, between = _interruptions(index, facts, history, attempts, from_ms, to_ms)
    return Account(
        from_ms, to_ms, ledger, mj, known, (energy.fleet_mj, energy.fleet_known_ms),
        find_service(index, facts, layers.stops, from_ms, to_ms), interruptions, between,
        sum(each.spans is None for each in repeats), find_kept(index, facts, layers.stops, from_ms, to_ms),
    )  # fmt: skip


def asked_energy(index: FleetIndex, holds: GpuSpans, from_ms: int, to_ms: int) -> EnergyMeter:
    """Return a meter for the energy of holds within [from_ms, to_ms), by day."""
    return EnergyMeter(cut_by_day(holds.clipped(from_ms, to_ms)), index.gpu_count, from_ms, to_ms)


def _energy_of_rows(ledger: Ledger, energy: EnergyMeter) -> tuple[Ints, Ints]:
    parts, found = energy.asked, np.zeros((2, len(ledger.job)), np.int64)
    if len(parts):
        keys = [(ledger.job, ledger.gpu, ledger.day), (parts.value, parts.gpu, parts.from_ms // DAY_MS)]
        # One number for each (job, GPU, day), in the order of the rows.
        gpus, days = int(max(ledger.gpu.max(), parts.gpu.max())) + 1, int(parts.to_ms.max()) // DAY_MS + 1
        row, part = ((job * gpus + gpu) * days + day for job, gpu, day in keys)
        at = np.searchsorted(row, part)
        np.add.at(found[0], at, energy.mj)
        np.add.at(found[1], at, energy.known_ms)
    return found[0], found[1]


def _interruptions(
    index: FleetIndex, facts: Facts, history: JobHistory, attempts: Sequence[Attempt], from_ms: int, to_ms: int
) -> tuple[list[Interruption], dict[int, int]]:
    recovered: dict[tuple[int, int], int] = {}
    between: dict[int, int] = {}
    for restart in restarts(facts, attempts):
        former = restart.former
        if former is None:
            continue
        works_ms = works_after(facts, history, restart.attempt, restart.begin_ms)
        if works_ms is not None:
            since_ms = facts.incidents[restart.incident].since_ms
            recovered.setdefault((former.job, former.from_ms), works_ms - since_ms)
        gap_ms = max(0, min(restart.begin_ms, to_ms) - max(former.to_ms, from_ms))
        job = restart.attempt.job
        between[job] = between.get(job, 0) + gap_ms * len(restart.attempt.gpus)
    found = []
    for attempt in attempts:
        if attempt.incident >= 0 and from_ms < attempt.to_ms <= to_ms:
            nodes = np.unique(index.gpu_node[history.members(facts.incidents[attempt.incident])])
            found.append(
                Interruption(attempt, tuple(nodes.tolist()), recovered.get((attempt.job, attempt.from_ms)))
            )  # fmt: skip
    return found, between

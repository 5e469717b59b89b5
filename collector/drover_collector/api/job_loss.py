"""What a job lost and whose fault that is, with one sentence that says so first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from drover_collector.api.ledger import read_facts
from drover_collector.api.moves import messages, moves_of
from drover_collector.api.snapshot import DAY_MS, ApiSnapshot
from drover_collector.ledger.blame import Blame, JobLoss, Part, job_loss
from drover_collector.ledger.claims import RESTARTED, is_fault
from drover_collector.ledger.facts import Facts, LedgerIncident, Share
from drover_collector.ledger.message import HOUR_MS, place_of
from drover_collector.ledger.phases import Lane, Phase, job_phases
from drover_collector.ledger.spans import NONE
from drover_core.model.events import Incident, IncidentKind, Severity, from_json
from drover_core.model.reports import gpu_hours, job_label
from drover_proto import fleet_pb2 as pb

DAYS = 7
KEPT_S = 60.0
PARTS = 20
NAMED = 2  # parts in the sentence
MOSTLY = 0.5  # of the held time unknown: then nobody can say that a job is healthy
OF = {
    Blame.GPU: "", Blame.NETWORK: "the network", Blame.STORAGE: "storage or the data loader", Blame.HOST: "the host",
    Blame.JOB: "a cause of the whole job", Blame.PROGRAM: "the program itself", Blame.UNKNOWN: "an unknown cause",
}  # fmt: skip


def add_loss(
    facts: ApiSnapshot, reply: pb.JobDetail, job: str, gpus: Sequence[int], incidents: Sequence[Incident]
) -> None:
    """Fill in what the job lost since it began."""
    to_ms = reply.row.ended_ms if reply.row.HasField("ended_ms") else facts.now_ms()
    from_ms = max(reply.row.since_ms, to_ms - DAYS * DAY_MS)
    if from_ms >= to_ms or not gpus:
        return
    made = facts.once(("loss", job, from_ms // HOUR_MS), KEPT_S, lambda: _make(facts, job, gpus, (from_ms, to_ms)))
    reply.loss.CopyFrom(_message(facts, made, {incident.id: incident for incident in incidents}))
    if reply.loss.held_ms:  # of incidents alone, an hour that two of them took would count twice
        shares = reply.loss.shares
        reply.row.gpu_hours_waited = shares.waiting_ms / HOUR_MS
        reply.row.gpu_hours_lost = (reply.loss.lost_ms - shares.waiting_ms) / HOUR_MS
    reply.loss.moves.extend(messages(moves_of(facts, from_ms, to_ms, job), made.facts))


@dataclass(frozen=True, slots=True)
class Made:
    """What follows from the facts of a job. `loss` None: nothing is known yet. `late_ms`: still to be rolled up."""

    facts: Facts
    loss: JobLoss | None
    phases: Sequence[Phase]
    late_ms: int


def _make(facts: ApiSnapshot, job: str, gpus: Sequence[int], span: tuple[int, int]) -> Made:
    found, _, to_ms, late_ms = read_facts(facts, *span, np.array(gpus, np.int64))
    if job not in found.jobs:
        return Made(found, None, (), late_ms)
    number, nodes = found.jobs.index(job), {facts.index.member(g)[0] for g in gpus}
    former = RESTARTED.fullmatch(job)
    names = {job, former[1] if former else job}  # what ended a run also explains the restart of the next one
    kept = [n for n, name in enumerate(found.jobs) if name in names]
    found = replace(
        found,
        holds=found.holds.where(np.isin(found.holds.value, kept)),
        checkpoints=[each for each in found.checkpoints if each[0] in kept],
        incidents=[i for i in found.incidents if i.job in names or any(node in nodes for node, _ in i.members)],
    )
    loss = job_loss(facts.index, found, number, span[0], to_ms)
    return Made(found, loss, job_phases(facts.index, found, number, span[0], to_ms), late_ms)


def _message(facts: ApiSnapshot, made: Made, known: dict[str, Incident]) -> pb.JobLoss:
    found, loss = made.facts, made.loss
    if loss is None:
        return pb.JobLoss(doubts=["Nothing is known yet of what it lost: its holds are not stored."])
    reply = pb.JobLoss(
        from_ms=loss.from_ms, to_ms=loss.to_ms, held_ms=loss.held_ms, lost_ms=loss.lost_ms,
        slow_ms=sum(part.slow_ms for part in loss.parts),
        shares=pb.LedgerShares(**{f"{share.name.lower()}_ms": loss.shares[share] for share in Share}),
        parts=[_part(facts, found, part, known) for part in loss.parts[:PARTS]],
        phases=[_phase(found, phase) for phase in made.phases],
    )  # fmt: skip
    for blame in Blame:  # further ones, so that the parts add up
        rest = [part for part in loss.parts[PARTS:] if part.blame is blame]
        if rest:
            ms, slow_ms = sum(part.ms for part in rest), sum(part.slow_ms for part in rest)
            reply.parts.add(blame=blame, ms=ms, slow_ms=slow_ms, summary=f"{len(rest)} further incidents")
    if made.late_ms:
        reply.doubts.append("Late samples are still being added to the rollups; until then their time is unknown.")
    unknown_ms = loss.shares[Share.UNKNOWN]
    if unknown_ms:
        reply.doubts.append(f"Of {gpu_hours(unknown_ms)} GPU-hours it is not known what they were used for.")
    if number := sum(_is_unmeasured(incident, loss) for incident in found.incidents):
        count = "1 incident" if number == 1 else f"{number} incidents"
        reply.doubts.append(f"What {count} took is not known: there the telemetry of the GPUs counts.")
    if not found.checkpoints:
        reply.doubts.append("Work repeated since the last checkpoint is not known: the job reports no checkpoints.")
    return reply


def _is_unmeasured(incident: LedgerIncident, loss: JobLoss) -> bool:
    """Return whether a fault was open in the job's time and nobody knows what it took."""
    known = incident.lost_ms is not None or incident.waited_ms is not None
    upto_ms = loss.to_ms if incident.closed_ms is None else incident.closed_ms
    return is_fault(incident) and not known and incident.since_ms < loss.to_ms and upto_ms > loss.from_ms


def _part(facts: ApiSnapshot, found: Facts, part: Part, known: dict[str, Incident]) -> pb.JobLossPart:
    made = pb.JobLossPart(blame=part.blame, ms=part.ms, slow_ms=part.slow_ms)
    if part.incident == NONE:
        made.summary = "no incident explains it"
        return made
    incident = found.incidents[part.incident]
    made.where = _where(facts, part.blame, incident, known.get(incident.id))
    made.incident, made.kind, made.cause, made.summary = incident.id, incident.kind, incident.cause, incident.summary
    return made


def _phase(found: Facts, phase: Phase) -> pb.JobPhase:
    made = pb.JobPhase(lane=phase.lane, from_ms=phase.from_ms, to_ms=phase.to_ms)
    if phase.lane is Lane.RUN:
        made.text = f"{phase.gpus} GPUs"
    if phase.incident != NONE:
        incident = found.incidents[phase.incident]
        made.incident, made.severity = incident.id, incident.severity
        made.text = f"{made.text}; ended by: {incident.summary}" if phase.lane is Lane.RUN else incident.summary
    return made


def _where(facts: ApiSnapshot, blame: Blame, incident: LedgerIncident, whole: Incident | None) -> str:
    """Return the GPU or node; of the network the port, and the leaf where several nodes are named."""
    if blame is Blame.NETWORK:
        nodes = {node for node, _ in incident.members}
        ports = sorted({each.port for each in whole.evidence if each.port}) if whole is not None else []
        if len(nodes) == 1 and ports:
            return f"{next(iter(nodes))} port {ports[0]}" + (f" and {len(ports) - 1} more" if len(ports) > 1 else "")
        leafs = {facts.index.spec.by_name[node].leaf for node in nodes if node in facts.index.spec.by_name}
        if len(leafs) == 1 and len(nodes) > 1:
            return f"leaf {next(iter(leafs))}"
    return place_of(incident) if incident.members and len({node for node, _ in incident.members}) == 1 else ""


def sentence_of(detail: pb.JobDetail) -> str:
    """Return whether a job is healthy, and what it lost, in one sentence."""
    row, loss = detail.row, detail.loss if detail.HasField("loss") else None
    name = row.job if job_label(row.job) == row.job else f"Job {row.job}"
    if row.HasField("died"):
        state = f"died with {row.died.cause} on {row.died.node or 'its nodes'}"
    elif row.HasField("ended_ms"):
        state = "has ended"
    elif any(map(_hangs, detail.incidents_json)):
        state = "makes no progress"
    elif row.severity:
        state = "is hurt"
    elif loss is not None and loss.held_ms and loss.shares.unknown_ms >= MOSTLY * loss.held_ms:
        state = "is not known to be healthy"
    elif not detail.metrics:
        state = "is not known to be healthy: its GPUs report nothing"
    else:
        state = "is healthy"
    text = f"{name} {state}"
    if loss is None:
        return f"{text}."
    if not loss.held_ms:
        return f"{text}; what it lost is not known yet."
    held = gpu_hours(loss.held_ms)
    unknown = f"; {gpu_hours(loss.shares.unknown_ms)} GPU-hours are unknown" if loss.shares.unknown_ms else ""
    if not loss.lost_ms:
        measured = "what that took is not known" if row.severity else f"nothing of {held} GPU-hours is known to be lost"
        return f"{text}; {measured}{unknown}."
    lost = f"{gpu_hours(loss.lost_ms)} of {held} GPU-hours ({loss.lost_ms / loss.held_ms:.1%})"
    return f"{text}; it lost {lost}: {_split(loss)}{unknown}."


def _hangs(text: str) -> bool:
    incident = from_json(Incident, text)
    open_fault = incident.closed_ms is None and incident.severity is not Severity.INFO
    return open_fault and incident.kind is IncidentKind.HANG


def split(parts: Iterable[pb.JobLossPart]) -> list[tuple[str, str, int]]:
    """Return (blame, where, ms) of the parts together, most first."""
    found: dict[tuple[str, str], int] = {}
    for part in parts:
        found[part.blame, part.where] = found.get((part.blame, part.where), 0) + part.ms
    return sorted(((blame, where, ms) for (blame, where), ms in found.items()), key=lambda row: -row[2])


def _split(loss: pb.JobLoss) -> str:
    rows = split(loss.parts)
    named = [f"{ms / loss.lost_ms:.0%} by {_who(blame, where)}" for blame, where, ms in rows[:NAMED]]
    if rest := sum(ms for _, _, ms in rows[NAMED:]):
        named.append(f"{rest / loss.lost_ms:.0%} by others")
    return ", ".join(named)


def _who(blame: str, where: str) -> str:
    words = OF.get(Blame(blame), blame) if blame in set(Blame) else blame
    if not where:
        return words or "a GPU"
    return where if not words else f"{words} ({where})"

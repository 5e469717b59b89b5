"""The finding that names a rank: its GPU and node, the collective, and whether hardware there is accused already."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from drover_collector.detectors._lib.metrics import Ints
from drover_collector.detectors._lib.texts import duration, listing, place
from drover_collector.detectors._lib.window import Window
from drover_collector.detectors.hang.ranks import SURE, JobRanks, Named
from drover_collector.fleet.buckets import GUESSED
from drover_collector.fleet.index import FleetIndex
from drover_core.model.events import Evidence, Finding, IncidentKind, Member, RecommendedAction, Severity

Subject = tuple[str, str | None, int | None, tuple[Member, ...]]  # scope, node, GPU, members

NAME = "hang"
ABSENT = ("missing", "silent")  # what a rank that did not come did
ACCUSED_MS = 600_000  # an incident of hardware that ended so long before the hang may have caused it


def rank_finding(window: Window, job: str, ranks: JobRanks, found: Named, base: Finding | None, now_ms: int) -> Finding:
    """Return the finding of a job whose ranks name what stopped it.

    Args:
        base: what telemetry shows of the same hang; None: nothing. The subject of what was reported first stays, so
            that one hang is one incident.
    """
    index, fault, gpus = window.index, found.fault, ranks.gpus
    sure = fault.confidence >= SURE
    culprits = [found.places[rank] for rank in fault.ranks if rank in found.places] if sure else []
    since_ms = found.since_ms if base is None else min(base.since_ms, found.since_ms)
    scope, node, gpu, members = _subject(index, gpus, culprits)
    if base is not None and not ranks.began_hang:
        scope, node, gpu, members = base.scope, base.node, base.gpu, base.members
    nodes = list(dict.fromkeys(index.member(g)[0] for g in culprits))
    subject = "A job that nobody names" if job.startswith(GUESSED) else f"Job {job}"
    text = f"{_who(index, found)}. {subject} has made no progress for {duration(now_ms - since_ms)}."
    accused = list(_accused(window, nodes, since_ms))
    evidence = (
        Evidence(fault.detail, key="ranks"),
        Evidence(_how_known(found, culprits, len(gpus)), key="ranks known"),
        *(Evidence(each, key=f"accused {at}") for at, each in enumerate(accused or _not_accused(window, nodes))),
    )
    severity = Severity.CRITICAL if sure else Severity.WARNING
    made = Finding(
        NAME, IncidentKind.HANG, "rank_missing" if fault.what in ABSENT else "collective_mismatch", scope, node, gpu,
        members, now_ms, since_ms, severity, fault.confidence, RecommendedAction.WATCH, text,
        _advice(fault.what, nodes, bool(accused)), evidence, job, lost_gpus=float(len(culprits)),
        waiting_gpus=float(len(gpus) - len(culprits)),
    )  # fmt: skip
    if base is None:
        return made
    return replace(made, action=base.action, evidence=(*evidence, *base.evidence), snapshot=base.snapshot)


def _subject(index: FleetIndex, gpus: Ints, culprits: Sequence[int]) -> Subject:
    places = [index.member(g) for g in culprits]
    if len(places) == 1:
        return "gpu", *places[0], (places[0],)
    if places and len({node for node, _ in places}) == 1:
        node = places[0][0]
        return "node", node, None, ((node, None),)
    return "job", None, None, tuple(index.member(g) for g in gpus.tolist())


def _who(index: FleetIndex, found: Named) -> str:
    """Return the fault's sentence, with the place of the rank where it is known."""
    text, rank = found.fault.detail, found.fault.ranks[0]
    if rank in found.places and len(found.fault.ranks) == 1:
        text = text.replace(f"rank {rank} ", f"rank {rank} ({place(*index.member(found.places[rank]))}) ", 1)
    return text[0].upper() + text[1:]


def _how_known(found: Named, culprits: Sequence[int], size: int) -> str:
    text = f"flight recorder dumps of {found.ranks} ranks came; the job holds {size} GPUs"
    if not culprits:
        return f"{text}; which GPU the rank has is not known"
    how = "as its agent reports it" if found.exact else "by the usual order of ranks"
    return f"{text}; the rank's GPU {how}"


def _accused(window: Window, nodes: Sequence[str], since_ms: int) -> Iterator[str]:
    """Yield the incidents of the nodes' hardware that are open, or ended shortly before the hang began."""
    for node in nodes:
        for trouble in (window.troubles or {}).get(node, {}).values():
            if trouble.end_ms is None or trouble.end_ms >= since_ms - ACCUSED_MS:
                state = "open" if trouble.end_ms is None else "ended"
                yield f"hardware of node {node} is accused already: incident {trouble.id}, {trouble.what}, {state}"


def _not_accused(window: Window, nodes: Sequence[str]) -> list[str]:
    if window.troubles is None or not nodes:
        return []
    return [f"no incident accuses the hardware of {listing(nodes)}: the program is likelier"]


def _advice(what: str, nodes: Sequence[str], accused: bool) -> str:
    where = f" on node {nodes[0]}" if len(nodes) == 1 else ""
    if what not in ABSENT:
        return "It is the program: compare what the named rank calls there with the other ranks."
    if accused:
        return f"Follow the incident of the hardware{where} first; the other ranks only wait."
    return f"Look at the process of the named rank{where} (py-spy dump, logs) before you end the job."

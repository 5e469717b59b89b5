"""What verdicts of probes mean for incidents: a failed one proves, a passed one clears what it can refute. Pure.

A suspicion is refuted by the figures that its cause would show in, and by no others: a GPU that multiplies as fast as
its peers may still have a slow link. What registers and logs report (an XID, a failed remap) no probe refutes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from drover_core.model.conditions import is_foreign
from drover_core.model.events import (
    Evidence,
    Finding,
    Incident,
    IncidentKind,
    Member,
    ProbeVerdict,
    RecommendedAction,
    Severity,
)
from drover_core.model.probe_figures import FIGURES, LOST, WRONG

NAME = "probe"  # as a detector; `policy.PROOF` looks for it
DRIFT = "probe_drift"
CONFIDENCE = 0.97  # of a thousand healthy GPUs that are probed one fails (judgement.BUDGET), and few are faulty
CONFIDENCE_EXACT = 0.99
CONFIDENCE_DRIVER = 0.9  # of a node whose driver is silent, as when its agent says so
# Figure (or its first word) -> kind and cause of what is proved where no open suspicion says.
_KINDS: Mapping[str, tuple[IncidentKind, str]] = MappingProxyType(
    {
        "sdc": (IncidentKind.SDC, "wrong_results"), "memory": (IncidentKind.MEMORY, "memory_pattern"),
        "gemm": (IncidentKind.STRAGGLER, "clock"), "launch": (IncidentKind.STRAGGLER, "host"),
        "train": (IncidentKind.STRAGGLER, "clock"), "hbm": (IncidentKind.STRAGGLER, "hbm"),
        "pcie": (IncidentKind.LINK, "pcie"), "p2p": (IncidentKind.LINK, "nvlink"),
        "allreduce": (IncidentKind.LINK, "collective"), "allgather": (IncidentKind.LINK, "collective"),
        "alltoall": (IncidentKind.LINK, "collective"), "soak": (IncidentKind.THERMAL, "cooling"),
        "host": (IncidentKind.STRAGGLER, "host"), "disk": (IncidentKind.STRAGGLER, "disk"),
    }
)  # fmt: skip
_OF_THE_HOST = frozenset({"host", "disk"})  # advice: no GPU is sick there
_GEMM = ("gemm_bf16", "gemm_fp16", "gemm_tf32", "gemm_fp8")
_HBM = ("hbm_copy", "hbm_triad")
_SLOW, _LINK, _HANG = IncidentKind.STRAGGLER, IncidentKind.LINK, IncidentKind.HANG
# Cause -> groups of figures; of each group one must be good for the cause to be refuted.
_SHOWS: Mapping[tuple[IncidentKind, str], tuple[tuple[str, ...], ...]] = MappingProxyType(
    {
        (_SLOW, "power_cap"): (_GEMM,), (_SLOW, "clock"): (_GEMM,), (_SLOW, "thermal"): (("soak",),),
        (_SLOW, "hbm"): (_HBM,), (_SLOW, "pcie"): (("pcie_h2d",), ("pcie_d2h",)), (_SLOW, "nvlink"): (("p2p",),),
        (_SLOW, "unexplained"): (_HBM, _GEMM),
        (_SLOW, "host"): (("host_memory",),), (_SLOW, "disk"): (("disk_read",),),
        (_SLOW, "nic"): (("allreduce_group",),),  # needs more than one node
        (_LINK, "pcie"): (("pcie_h2d",), ("pcie_d2h",)), (_LINK, "nvlink"): (("p2p",),),
        (_LINK, "collective"): (("allreduce",),), (_HANG, "probe_hung"): (_GEMM, ("sdc",)),
        (_HANG, "probe_crashed"): (_GEMM, ("sdc",)), (_HANG, "probe_lost"): (_GEMM, ("sdc",)),
        (IncidentKind.SDC, "wrong_results"): (("sdc",),),
        (IncidentKind.MEMORY, "memory_pattern"): (("memory_pattern",),),
        (IncidentKind.THERMAL, "cooling"): (("soak",),),
    }
)  # fmt: skip
_OTHERWISE = (_GEMM, _HBM)  # a straggler of another cause


@dataclass(frozen=True, slots=True)
class Word:
    """Of one order: what is found, and of open incidents which are refuted and which a probe could not; id -> text."""

    findings: tuple[Finding, ...]
    refuted: Mapping[str, str]
    noted: Mapping[str, str]


def read(verdicts: Sequence[ProbeVerdict], incidents: Iterable[Incident], now_ms: int) -> Word:
    """
    Args:
        verdicts: of one order. incidents: those that are open.
    """
    open_ = list(incidents)
    own = [i for i in open_ if not is_foreign(i.cause)]  # a probe proves or refutes nothing that others wrote
    findings: list[Finding] = []
    refuted: dict[str, str] = {}
    noted: dict[str, str] = {}
    of_gpus = any(v.gpu is not None and v.passed is False for v in verdicts)
    for verdict in verdicts:
        scope = "node" if verdict.gpu is None else "gpu"
        about = [i for i in own if (i.scope, i.node, i.gpu) == (scope, verdict.node, verdict.gpu)]
        findings += _drift(verdict, about, now_ms)
        findings += _shifts(verdict, open_, now_ms)
        if verdict.passed is False:
            if verdict.gpu is not None or not of_gpus:  # else the node's only sums up its GPUs'
                findings.append(_proof(verdict, about, now_ms))
        elif verdict.passed:
            for incident in about:
                if refutable(incident) and refutes(verdict, incident):
                    refuted[incident.id] = f"cleared by a probe: {verdict.text}"
                elif refutable(incident):
                    noted[incident.id] = f"a probe found nothing, and did not look for its cause: {verdict.text}"
                elif NAME in incident.detectors and "sdc" in verdict.good:
                    findings.append(_over(incident, verdict, now_ms))  # what else was found of it may still hold
        else:
            noted |= {i.id: f"a probe gave no verdict: {verdict.text}" for i in _meant(verdict, open_)}
            if verdict.gpu is None and verdict.end == LOST:
                findings.append(_silent_driver(verdict, now_ms))
    return Word(tuple(findings), refuted, noted)


def refutable(incident: Incident) -> bool:
    """Return whether a passed probe may clear it."""
    proved = NAME in incident.detectors and set(incident.detectors) <= {NAME, DRIFT, "straggler"}
    return proved or incident.kind is IncidentKind.STRAGGLER


def refutes(verdict: ProbeVerdict, incident: Incident) -> bool:
    """Whether a passed verdict has the figures in which this incident's cause would show, and those that failed."""
    failed = _failed(incident)
    if not failed <= set(verdict.good):
        return False
    if failed and set(incident.detectors) <= {NAME, DRIFT}:
        return True
    groups = _SHOWS.get((incident.kind, incident.cause), _OTHERWISE)
    return all(set(group) & set(verdict.good) for group in groups)


def _failed(incident: Incident) -> set[str]:
    """Figures that probes have proved it by, as its evidence names them ("GPU 3 of n1: gemm_fp64 31 TFLOP/s, ...")."""
    if NAME not in incident.detectors:
        return set()
    return {figure for figure in FIGURES for fact in incident.evidence if f": {figure} " in fact.text}


def _meant(verdict: ProbeVerdict, open_: Iterable[Incident]) -> list[Incident]:
    """Return the incident of an order without a result."""
    return [i for i in open_ if verdict.gpu is None and i.id == verdict.incident_id]


def _proof(verdict: ProbeVerdict, about: Sequence[Incident], now_ms: int) -> Finding:
    word = verdict.probe.partition("_")[0]
    exact = verdict.end == WRONG
    suspected = next((i for i in about if i.kind is IncidentKind.STRAGGLER), None)
    kind, cause = _KINDS.get(word, (IncidentKind.STRAGGLER, "clock"))
    if exact:
        kind, cause = _KINDS[word] if word == "memory" else _KINDS["sdc"]
    elif verdict.end:
        kind, cause = IncidentKind.HANG, f"probe_{verdict.end}"
    elif suspected is not None:
        kind, cause = suspected.kind, suspected.cause
    mild = word in _OF_THE_HOST
    members: tuple[Member, ...] = ((verdict.node, verdict.gpu),)
    advice = (
        "See the host's memory and disks; its GPUs are not to blame."
        if mild
        else "Drain the node when its work is done, and have the board looked at: this was measured with no job on it."
    )
    return Finding(
        NAME, kind, cause, "node" if verdict.gpu is None else "gpu", verdict.node, verdict.gpu, members, now_ms,
        min((i.since_ms for i in about), default=verdict.ts_ms), Severity.WARNING if mild else Severity.CRITICAL,
        CONFIDENCE_EXACT if exact else CONFIDENCE, RecommendedAction.ADVISE if mild else RecommendedAction.DRAIN,
        f"A probe failed: {verdict.text}", advice,
        (Evidence(verdict.text, value=verdict.value, expected=verdict.expected, peers=verdict.peers),),
    )  # fmt: skip


def _silent_driver(verdict: ProbeVerdict, now_ms: int) -> Finding:
    """Return what an agent reports whose calls into the driver do not return: no single GPU is to blame."""
    return Finding(
        NAME, IncidentKind.LIVENESS, "driver_hung", "node", verdict.node, None, ((verdict.node, None),), now_ms,
        verdict.ts_ms, Severity.CRITICAL, CONFIDENCE_DRIVER, RecommendedAction.DRAIN,
        f"Node {verdict.node}: under a probe its NVIDIA driver answered for none of its GPUs any more.",
        "Drain the node and reboot it: a hung driver does not come back by itself.", (Evidence(verdict.text),),
    )  # fmt: skip


def _over(incident: Incident, verdict: ProbeVerdict, now_ms: int) -> Finding:
    """What a probe had proved is over."""
    return Finding(
        NAME, incident.kind, incident.cause, incident.scope, incident.node, incident.gpu, incident.members, now_ms,
        verdict.ts_ms, Severity.INFO, CONFIDENCE, RecommendedAction.NONE, verdict.text, "", cleared=True,
    )  # fmt: skip


def _drift(verdict: ProbeVerdict, about: Sequence[Incident], now_ms: int) -> list[Finding]:
    """Report a GPU that became slower than it was; nothing is done for it. It ends when a later order shows its end."""
    if verdict.gpu is None:
        return []
    known = any(DRIFT in i.detectors for i in about)
    if not verdict.drift and not (known and verdict.passed is not None):
        return []
    text = verdict.drift or verdict.text
    return [
        Finding(
            DRIFT, IncidentKind.DRIFT, "probe", "gpu", verdict.node, verdict.gpu, ((verdict.node, verdict.gpu),),
            now_ms, verdict.drift_since_ms or verdict.ts_ms, Severity.INFO, 0.9, RecommendedAction.WATCH,
            f"Slower than it was itself: {text}", "Watch it; if it goes on, look at its power, cooling and driver.",
            (Evidence(text),), cleared=not verdict.drift,
        )
    ]  # fmt: skip


def _shifts(verdict: ProbeVerdict, open_: Sequence[Incident], now_ms: int) -> list[Finding]:
    """Report what a whole configuration has lost with its driver: one incident a figure, of the first node to show it.

    It ends when a later order of any node no longer shows it.
    """
    shifted = {figure: i for i in open_ for figure in i.snapshot_of(DRIFT).get("figures", {})}
    known = {figure: shifted[figure] for figure in verdict.measured if figure in shifted}
    shifts = dict(zip(verdict.shifted, verdict.shifts, strict=True))
    found = []
    for figure in dict.fromkeys([*shifts, *known]):
        incident = known.get(figure)
        node = verdict.node if incident is None or incident.node is None else incident.node
        text = shifts.get(figure, verdict.text)
        found.append(
            Finding(
                DRIFT, IncidentKind.DRIFT, f"driver_{figure.split()[0]}", "node", node, None, ((node, None),), now_ms,
                verdict.ts_ms, Severity.INFO, 0.9, RecommendedAction.WATCH, f"Slower since its driver: {text}",
                "Compare the drivers' notes, clocks and power limits before more nodes get it; no board is to blame.",
                (Evidence(text),), cleared=figure not in shifts, snapshot={"figures": {figure: True}},
            )
        )  # fmt: skip
    return found

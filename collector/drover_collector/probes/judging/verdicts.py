"""What a finished order proves: the judgement's verdicts on figures -> one on each GPU, one on the node. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from drover_collector.probes.judging.drift import Drift
from drover_collector.probes.judging.measurements import (
    Basis,
    Judgement,
    NoteKind,
    Verdict,
)
from drover_collector.probes.judging.rows import CPU, form_of
from drover_collector.probes.judging.shifts import head, heads
from drover_collector.store import ProbeRow
from drover_core.model.events import ProbeOrder, ProbeResult, ProbeVerdict
from drover_core.model.probe_figures import FIGURES, LOST, WRONG, Better

DONE = "done"
AGAINST = frozenset({"hung", "crashed", "lost", "timeout"})  # ends that say something of what they name
LEAST_JUDGED = 0.5  # of a GPU's figures: with fewer nothing is proved, though none is bad
Place = tuple[str, int | None]
_Place = tuple[str, int | None, int | None, str, str]


def verdicts(
    order: ProbeOrder, rows: Sequence[ProbeRow], judged: Judgement, drifts: Mapping[int, Sequence[Drift]], now_ms: int
) -> list[ProbeVerdict]:
    """One of each GPU that was measured, by slot, and at last one of the node, which stands for all of them.

    Args:
        rows: results of the order; the closing one is among them.
        judged: of the fleet's newest results, these among them. drifts: slot -> its own histories.
    """
    end = next((row.result for row in rows if row.result.end), None)
    if end is None:
        return [failed(order, "no closing result came", now_ms)]
    if end.end != DONE and end.end not in AGAINST:
        return [failed(order, f"{end.end}: {end.detail}" if end.detail else end.end, now_ms)]
    if any(row.result.device == CPU for row in rows):
        return [failed(order, "its CPU was measured: no NVIDIA driver there; that says nothing of a GPU", now_ms)]
    own = {_place(row.result) for row in rows}
    of: dict[Place, list[Verdict]] = defaultdict(list)
    for verdict in judged.verdicts:
        m = verdict.measurement
        if (m.node, m.gpu, m.peer, m.probe, m.key.form) in own:
            for place in {(m.node, m.gpu), *(verdict.against if verdict.ok is False else ())}:
                of[place].append(verdict)
    slots = {row.result.gpu for row in rows if row.result.gpu is not None} | set(order.gpus)
    found = [_of_gpu(order, end, g, of[order.node, g], drifts.get(g, ()), now_ms) for g in sorted(slots)]
    node = _of_node(order, end, found, [*of[order.node, None], *_between(of, order.node)], now_ms)
    measured, shifts = _configuration(own, judged)
    return [
        *found,
        replace(
            node, measured=measured, shifts=tuple(text for _, text in shifts), shifted=tuple(name for name, _ in shifts)
        ),
    ]


def _configuration(own: Collection[_Place], judged: Judgement) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
    """Return the figures that were measured, with their configuration, and those that have shifted."""
    mine = heads(
        m for v in judged.verdicts if ((m := v.measurement).node, m.gpu, m.peer, m.probe, m.key.form) in own
    )  # fmt: skip
    shifted = [(head(note.probe, note.key), note.text) for note in judged.notes if note.kind is NoteKind.SHIFT]
    return mine, tuple((figure, text) for figure, text in shifted if figure in mine)


def failed(order: ProbeOrder, why: str, now_ms: int) -> ProbeVerdict:
    """Return the verdict of an order that failed: nothing is known of the hardware."""
    text = f"{order.node}: not judged, {why}"
    return ProbeVerdict(order.id, order.node, None, None, "", text, now_ms, order.why, order.incident_id)


def with_all(found: Sequence[ProbeVerdict], gpus: int) -> list[ProbeVerdict]:
    """Return the verdicts of an order for all GPUs of a node, which fails if fewer were probed than it has.

    NVML does not count a GPU that is off the bus when the driver starts (nvmlDeviceGetCount), so nothing reports it as
    left out.

    Args:
        gpus: that the node has, by the fleet file.
    """
    there = sum(v.gpu is not None for v in found)
    return [
        replace(v, passed=None, text=f"{v.node}: not judged as a whole, its driver knows {there} of its {gpus} GPUs")
        if v.gpu is None and v.passed and there < gpus
        else v
        for v in found
    ]


def _of_gpu(
    order: ProbeOrder, end: ProbeResult, gpu: int, of: Sequence[Verdict], drifts: Sequence[Drift], now_ms: int
) -> ProbeVerdict:
    place = (order.node, gpu)
    bad = [v for v in of if v.ok is False and v.against == (place,)]
    worst = _worst(bad)
    figures = [v for v in of if FIGURES[v.measurement.probe].better is not Better.NEITHER]
    good = tuple(dict.fromkeys(v.measurement.probe for v in figures if v.ok))
    doubts = [v for v in figures if v.ok is None and v.suspicious]
    doubts += [v for v in of if v.ok is False and place in v.against and len(v.against) > 1]
    passed: bool | None = None
    if worst is not None:
        passed, text = False, worst.text
    elif doubts:
        text = doubts[0].text
    elif end.end != DONE:
        text = f"GPU {gpu} of {order.node}: not judged, the order was cut short ({end.end}: {end.detail})"
    elif not figures:
        text = f"GPU {gpu} of {order.node}: not judged, it was not measured ({end.detail or 'no figure came'})"
    elif not good or len(good) < LEAST_JUDGED * len({v.measurement.probe for v in figures}):
        why = next((v.text for v in figures if v.ok is None), "")
        text = f"GPU {gpu} of {order.node}: only {len(good)} of {len(figures)} figures could be judged; {why}"
    else:
        passed = True
        text = f"GPU {gpu} of {order.node}: {', '.join(good)} as its configuration gives"
    decided = worst or (doubts[0] if doubts else None)
    worse = [d for d in drifts if d.ok is False]
    return ProbeVerdict(
        order.id, order.node, gpu, passed, decided.measurement.probe if decided else "", text, now_ms, order.why,
        order.incident_id, decided.measurement.value if decided else None, _expected(decided),
        decided.peers if decided else None, good, worse[0].text if worse else "",
        worse[0].since_ms if worse else None, _ended(decided),
    )  # fmt: skip


def _of_node(
    order: ProbeOrder, end: ProbeResult, gpus: Sequence[ProbeVerdict], of: Sequence[Verdict], now_ms: int
) -> ProbeVerdict:
    bad = _worst([v for v in of if v.ok is False])
    bad_gpu = next((v for v in gpus if v.passed is False), None)
    unsure = next((v for v in gpus if v.passed is None), None)
    doubt = next((v for v in of if v.ok is None and v.suspicious), None)
    everywhere = set.intersection(*(set(v.good) for v in gpus)) if gpus else set()
    good = tuple(sorted(everywhere | {v.measurement.probe for v in of if v.ok}))
    passed: bool | None = None
    probe, value, expected, peers, ended = "", None, None, None, ""
    if bad_gpu is not None:
        passed, probe, text = False, bad_gpu.probe, bad_gpu.text
        value, expected, peers, ended = bad_gpu.value, bad_gpu.expected, bad_gpu.peers, bad_gpu.end
    elif bad is not None:
        passed, probe, text = False, bad.measurement.probe, bad.text
        value, expected, peers, ended = bad.measurement.value, _expected(bad), bad.peers, _ended(bad)
    elif end.end != DONE:
        what = f" in {end.probe}" if end.probe else ""
        text = f"{order.node}: not judged, {end.end}{what}: {end.detail}"
        ended = LOST if end.end == LOST and end.gpu is None else ""
    elif unsure is not None or doubt is not None:
        text = unsure.text if unsure is not None else doubt.text if doubt is not None else ""
    elif not gpus:
        text = f"{order.node}: not judged, no GPU was measured ({end.detail or 'none there'})"
    elif end.detail:
        text = f"{order.node}: not judged as a whole, {end.detail}"  # GPUs that were left out
    else:
        passed = True
        text = f"{order.node}: {len(gpus)} GPUs give what their configuration gives"
    return ProbeVerdict(
        order.id, order.node, None, passed, probe, text, now_ms, order.why, order.incident_id, value, expected, peers,
        good, end=ended,
    )  # fmt: skip


def _between(of: Mapping[Place, Sequence[Verdict]], node: str) -> list[Verdict]:
    """Verdicts against several GPUs of the node, as on the link between two: one of them, or what they share."""
    found = {id(v): v for (name, _), judged in of.items() for v in judged if name == node and v.ok is False}
    return [v for v in found.values() if len(v.against) > 1]


def _worst(bad: Sequence[Verdict]) -> Verdict | None:
    """Wrong answers before what hung, before what is slow; of these the slowest, by what is known of it."""
    rank = {Basis.EXACT: 2, Basis.END: 1}
    return max(
        bad, key=lambda v: (rank.get(v.basis, 0), (v.worse or 0.0) / (v.detectable or 1.0), v.measurement.probe),
        default=None,
    )  # fmt: skip


def _ended(verdict: Verdict | None) -> str:
    if verdict is not None and verdict.basis is Basis.EXACT and verdict.ok is False:
        return WRONG
    return verdict.measurement.end.value if verdict is not None and verdict.basis is Basis.END else ""


def _expected(verdict: Verdict | None) -> float | None:
    """In the probe's unit; `worse` is the share that is missing (or, where lower is better, too much)."""
    if verdict is None or verdict.measurement.value is None or verdict.worse is None or verdict.worse >= 1:
        return None
    value, worse = verdict.measurement.value, verdict.worse
    return value * (1 - worse) if FIGURES[verdict.measurement.probe].better is Better.LOWER else value / (1 - worse)


def _place(result: ProbeResult) -> _Place:
    return result.node, result.gpu, result.peer, result.probe, form_of(result)

"""Judge the newest results of a fleet: like the others of the configuration, worse, or not judged.

Budget: of 1,000 healthy GPUs that are validated, `budget` fail, over all probes together. Each probe gets an equal part
of it (Bonferroni, which needs no independence). Differences below `detectable` cannot be found at that rate.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

from drover_collector.probes.judging.fleet import (
    LARGE,
    LEAST,
    Scale,
    by_few,
    by_fleet,
    logs_of,
)
from drover_collector.probes.judging.groups import (
    fit,
    part,
    sign,
    usual,
)
from drover_collector.probes.judging.matrices import by_matrix
from drover_collector.probes.judging.measurements import (
    Basis,
    End,
    Group,
    Judgement,
    Measurement,
    Note,
    NoteKind,
    Verdict,
)
from drover_collector.probes.judging.references import Reference, reference
from drover_collector.probes.judging.shared import (
    LONE_SLOT,
    MOST_BAD,
    by_slot,
    by_software,
    doubted,
)
from drover_collector.probes.judging.shifts import shifts
from drover_collector.probes.judging.texts import number, share
from drover_collector.store.repositories.probes import Key
from drover_core.model.probe_figures import FIGURES, Better

BUDGET = 1.0  # false fails per 1,000 GPUs validated
MOST_FASTER = 0.1  # of a group: a few fast boards are chance or a slip, many are another kind
TRIES = 2  # hangs or crashes of one probe on one device, each in a process of its own
TWO_KINDS = "its configuration is of two kinds"

Timed = dict[tuple[str, Key], list[Measurement]]


def judge(measurements: Iterable[Measurement], budget: float = BUDGET) -> Judgement:
    """The newest measurement of each GPU, pair or node and probe, in any order.

    Raises:
        ValueError: a figure that the table does not have, or a budget that is not positive.
    """
    if not budget > 0:
        raise ValueError(f"the budget of false fails must be more than 0, and is {budget}")
    verdicts: list[Verdict] = []
    timed: Timed = defaultdict(list)
    for m in newest(measurements):
        if (verdict := by_itself(m)) is not None:
            verdicts.append(verdict)
        else:
            timed[m.probe, part(m.key, m.probe)].append(m)
    alpha = budget / 1000 / max(1, len({probe for probe, _ in timed}))
    notes: list[Note] = []
    groups: list[Group] = []
    for (probe, key), group in sorted(timed.items(), key=lambda item: (item[0][0], repr(item[0][1]))):
        if probe == "p2p":
            verdicts += by_matrix(group, alpha)
            continue
        judged, noted, seen = _judge_group(probe, key, group, timed, alpha)
        verdicts += judged
        notes += noted
        groups.append(seen)
    notes += shifts(timed)
    return Judgement(tuple(sorted(by_software(verdicts), key=_place)), tuple(notes), tuple(groups))


def newest(measurements: Iterable[Measurement]) -> list[Measurement]:
    """One for each GPU, pair or node, probe and form, in their order; of two at the same time the worse one."""
    kept: dict[tuple[str, int, int, str, str], Measurement] = {}
    for m in measurements:
        if m.probe not in FIGURES:
            raise ValueError(f"no probe gives a figure called {m.probe}; there are {', '.join(FIGURES)}")
        place = (m.node, -1 if m.gpu is None else m.gpu, -1 if m.peer is None else m.peer, m.probe, m.key.form)
        if place not in kept or (m.ts_ms, _badness(m)) > (kept[place].ts_ms, _badness(kept[place])):
            kept[place] = m
    return [kept[place] for place in sorted(kept)]


def by_itself(m: Measurement) -> Verdict | None:
    """What needs no fleet: how it ended, exact answers, figures that are not there. None: the fleet must judge."""
    why = f" ({m.detail})" if m.detail else ""
    figure = FIGURES[m.probe]
    if m.ok is False:
        return Verdict(m, False, f"{m.who}: {m.probe} gave a wrong answer{why}", Basis.EXACT)
    if m.end is End.LOST:
        ok = False if m.gpu is not None else None
        return Verdict(m, ok, f"{m.who}: the driver no longer answers for it{why}", Basis.END, suspicious=True)
    if m.end in (End.HUNG, End.CRASHED):
        # Once may be chance, or what ran before it. Of a device: a disk or a collective may hang for another's fault.
        ok = False if m.gpu is not None and m.tries >= TRIES else None
        how = "" if m.tries < TRIES else " in two tries"
        again = "; once is no proof: probe it again" if m.gpu is not None and m.tries < TRIES else ""
        return Verdict(m, ok, f"{m.who}: {m.probe} {m.end.value}{how}{why}{again}", Basis.END, suspicious=True)
    if m.end is not End.DONE:
        text = f"{m.who}: {m.probe} {_ENDS[m.end]}{why}: not judged"
        return Verdict(m, None, text, Basis.END, suspicious=m.end is End.TIMEOUT)
    if m.value is None:
        return Verdict(m, None, f"{m.who}: {m.probe} gave no figure{why}: not judged", Basis.NOTHING)
    if figure.better is Better.EXACT:
        how = "all right" if m.ok else "not checked"
        return Verdict(m, m.ok, f"{m.who}: {m.probe}, {number(m.value)} {figure.unit}, {how}", Basis.EXACT)
    if not math.isfinite(m.value) or m.value <= 0:
        return Verdict(m, None, f"{m.who}: {m.probe} cannot be {m.value} {figure.unit}: not judged", Basis.NOTHING)
    if figure.better is Better.NEITHER:
        return Verdict(m, None, f"{m.who}: {m.probe} {number(m.value)} {figure.unit}", Basis.NOTHING)
    return None


_ENDS = {
    End.STOPPED: "gave way",
    End.TIMEOUT: "was not done in time",
    End.MEMORY: "took more of the host's memory than it may",
    End.UNSERVED: "was not run",
}


def _judge_group(
    probe: str, key: Key, group: Sequence[Measurement], timed: Timed, alpha: float
) -> tuple[list[Verdict], list[Note], Group]:
    scale = Scale(probe, fit(logs := logs_of(group), usual(probe).spread), alpha)
    published = reference(probe, key)
    seen = Group(probe, key, len(group), scale.centre, scale.fit.spread, scale.detectable)
    notes: list[Note] = []
    best = math.exp(float(logs.max()))
    low = published is not None and len(group) > 1 and (scale.centre if len(group) >= LARGE else best) < published.floor
    if low and published is not None:
        text = (
            f"all {len(group)} boards of one configuration read {number(scale.centre)} {FIGURES[probe].unit} in "
            f"{probe}, {share(1 - scale.centre / published.expected)} below what healthy ones reach "
            f"({published.source}): a setting or the cooling of all, not a fault of each"
        )
        notes.append(Note(NoteKind.BELOW_REFERENCE, probe, key, text, len(group)))
    if len(group) < LEAST or scale.coarse:
        verdicts = _below_published(
            by_slot(by_few(group, logs, scale, published, _pool(probe, key, timed, alpha))), published
        )
        return _most_slow(verdicts) if len(group) >= LEAST else verdicts, notes, seen
    verdicts = _below_published(by_slot(by_fleet(group, logs, scale, low)), published)
    slower = [v for v in verdicts if v.ok is False]
    reach = float(scale.reach())
    fast = (logs > scale.fit.centre + reach).tolist()
    faster = [v for v, is_fast in zip(verdicts, fast, strict=True) if is_fast]
    many = max((slower, faster), key=len)
    if len(many) > 1 and len(many) > (MOST_BAD if many is slower else MOST_FASTER) * len(group):
        most = max(abs(v.worse or 0.0) for v in many)
        text = (
            f"{len(many)} of {len(group)} boards of one configuration are up to {share(most)} "
            f"{'worse' if many is slower else 'better'} in {probe} than the others ({scale.text}): a design or a "
            "batch, not single faults. What differs that the inventory does not show?"
        )
        notes.append(Note(NoteKind.TWO_CLUSTERS, probe, key, text, len(many)))
    if len(faster) > MOST_BAD * len(group):
        return [v if is_fast else doubted(v, TWO_KINDS) for v, is_fast in zip(verdicts, fast, strict=True)], notes, seen
    return _most_slow(verdicts), notes, seen


def _below_published(verdicts: list[Verdict], published: Reference | None) -> list[Verdict]:
    """What was doubted for its slot alone fails where it is below what is published, and others are not: no slot is
    meant to give so little."""
    if published is None or not any((v.measurement.value or 0.0) >= published.floor for v in verdicts):
        return verdicts
    return [
        dataclasses.replace(
            v, ok=False, suspicious=False,
            text=v.text.replace(LONE_SLOT, f"and below the {number(published.floor)} of any slot ({published.source})"),
        )
        if v.ok is None and LONE_SLOT in v.text and (v.measurement.value or 0.0) < published.floor
        else v
        for v in verdicts
    ]  # fmt: skip


def _most_slow(verdicts: list[Verdict]) -> list[Verdict]:
    """More slow ones than single faults can be are no verdicts on single boards."""
    if sum(v.ok is False for v in verdicts) <= MOST_BAD * len(verdicts):
        return verdicts
    return [doubted(v, TWO_KINDS) if v.ok is False else v for v in verdicts]


def _pool(probe: str, key: Key, timed: Timed, alpha: float) -> Scale | None:
    """The same boards with any driver, where they are enough."""
    if not key.driver:
        return None
    wide = part(key, probe, without=("driver",))
    pooled = [
        m for (p, k), ms in timed.items() if p == probe and part(k, probe, without=("driver",)) == wide for m in ms
    ]
    if len(pooled) < LARGE:
        return None
    scale = Scale(probe, fit(logs_of(pooled), usual(probe).spread), alpha)
    return None if scale.coarse else scale


def _place(verdict: Verdict) -> tuple[str, int, int, str, str]:
    m = verdict.measurement
    return m.node, -1 if m.gpu is None else m.gpu, -1 if m.peer is None else m.peer, m.probe, m.key.form


def _badness(m: Measurement) -> tuple[bool, bool, float, str]:
    return m.ok is False, m.value is None, -sign(m.probe) * (m.value or 0.0), repr(m)

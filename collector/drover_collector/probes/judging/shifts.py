"""Whether a configuration gives less since a change of driver: two distributions, those with the old one and the new.

A new driver begins a new group and new histories (`groups.part`, `drift.drift`), so that no board is failed for it;
what all of them lost is seen here alone. By the similarity of empirical distributions, as SuperBench compares nodes
(`groups.similarity`), with a test of the medians: with few boards two samples of one distribution differ by as much.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from drover_collector.probes.judging.fleet import LARGE, logs_of
from drover_collector.probes.judging.groups import (
    part,
    sign,
    similarity,
    usual,
)
from drover_collector.probes.judging.measurements import Measurement, Note, NoteKind
from drover_collector.probes.judging.texts import number, off
from drover_collector.store.repositories.probes import Key
from drover_core.model.probe_figures import FIGURES

SHIFTED = 0.98  # similarity below which a configuration reads otherwise than it did
SURE = 4.0  # standard errors between the medians
_MEDIAN = math.sqrt(math.pi / 2)  # standard error of a median over that of a mean, of normal values


def shifts(groups: Mapping[tuple[str, Key], Sequence[Measurement]]) -> list[Note]:
    """Of the newest results of a fleet, by figure and configuration: those of the newest driver against each other one
    that differs in it alone.

    Which is the newer one the results say: it was probed last. Boards that have not got the new one yet, and those
    whose newest results are from before it, are the old distribution.
    """
    wide: dict[tuple[str, Key], list[Sequence[Measurement]]] = defaultdict(list)
    for (probe, key), group in groups.items():
        if key.driver and probe != "p2p":
            wide[probe, part(key, probe, without=("driver",))].append(group)
    found = []
    for several in wide.values():
        *before, after = sorted(several, key=lambda group: max(m.ts_ms for m in group))
        found_shifts = (shift(old, after) for old in reversed(before))
        if (note := next((note for note in found_shifts if note is not None), None)) is not None:
            found.append(note)
    return found


def shift(before: Sequence[Measurement], after: Sequence[Measurement]) -> Note | None:
    """A note if `after` reads worse than `before`; None too if the boards are too few."""
    if min(len(before), len(after)) < LARGE:
        return None
    old, new = logs_of(before), logs_of(after)
    probe, key = after[0].probe, part(after[0].key, after[0].probe)
    drop = float(np.median(old) - np.median(new))
    spread = max(usual(probe).spread, *(float(np.std(logs)) for logs in (old, new)))
    error = _MEDIAN * spread * math.sqrt(1 / len(old) + 1 / len(new))
    alike = similarity(np.exp(sign(probe) * old), np.exp(sign(probe) * new))
    if alike >= SHIFTED or drop <= max(SURE * error, -math.log1p(-usual(probe).material)):
        return None
    centre = math.exp(sign(probe) * float(np.median(old)))
    text = (
        f"{head(probe, key)} {len(after)} boards read {off(probe, drop)} what {len(before)} gave with driver "
        f"{before[0].key.driver} ({number(centre)} {FIGURES[probe].unit}); similarity {alike:.3f}"
    )
    return Note(NoteKind.SHIFT, probe, key, text, len(after))


def head(probe: str, key: Key) -> str:
    """Begins each text about a figure of a configuration: "hbm_copy (quick) of H200, driver 570.1:"."""
    return f"{probe}{f' ({key.form})' if key.form else ''} of {key.sku or 'boards'}, driver {key.driver}:"


def heads(measured: Iterable[Measurement]) -> tuple[str, ...]:
    """Of what was measured under a driver that is known."""
    return tuple(dict.fromkeys(head(m.probe, m.key) for m in measured if m.key.driver and m.value is not None))

"""How GPUs were used over days: a row for each GPU and 5 minutes, out of the rollups alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from drover_collector.fleet.index import FleetIndex
from drover_collector.store.records import Ids
from drover_collector.store.rollups.rollups import Rollups
from drover_collector.store.samples.entities import EntityRegistry
from drover_collector.store.samples.fold import Folded, units
from drover_collector.store.samples.rows import LEVELS_MS, SampleRows
from drover_collector.store.samples.spans import Span, merged
from drover_core.metrics.catalog import Scope

STEP_MS = LEVELS_MS["5m"]
BUSY = ("gpu_util_ratio", "sm_active_ratio")
ENERGY = "energy_j"  # stored in millijoules
FRESH_MS = 600_000  # rollups that end longer ago do not go on


@dataclass(frozen=True, slots=True)
class UsagePiece:
    """Some GPUs in all their 5 minutes, by entity and time. Arrays [B].

    Attributes:
        gpu: int64, number in the index; start_ms: int64; rows: int64, moments that were reported.
        busy: float64, the highest share of time at work; NaN: absent.
        energy_mj: int64, the counter at the end; -1: absent.
    """

    gpu: npt.NDArray[np.int64]
    start_ms: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int64]
    busy: npt.NDArray[np.float64]
    energy_mj: npt.NDArray[np.int64]

    def where(self, kept: npt.NDArray[np.generic]) -> UsagePiece:
        return UsagePiece(
            self.gpu[kept], self.start_ms[kept], self.rows[kept], self.busy[kept], self.energy_mj[kept]
        )  # fmt: skip

    @staticmethod
    def join(parts: Sequence[UsagePiece]) -> UsagePiece:
        return UsagePiece(
            *(np.concatenate([getattr(part, name) for part in parts]) for name in UsagePiece.__dataclass_fields__)
        )


class UsageReader:
    """Reads 5-minute rollups, and the newest minutes from those of 10 s. Memory is bounded by pieces of GPUs."""

    def __init__(self, rows: SampleRows, rollups: Rollups, registry: EntityRegistry) -> None:
        self._rows, self._rollups, self._registry = rows, rollups, registry

    def upto_ms(self, now_ms: int) -> int:
        """Return up to when usage is known now; `now_ms` if rollups have stopped, and the time since is not known."""
        upto_ms, _ = self._rollups.rolled_up(Scope.GPU, "10s", (now_ms, now_ms))
        return upto_ms if now_ms - upto_ms <= FRESH_MS else now_ms

    def late_ms(self, from_ms: int, to_ms: int) -> int:
        """Return how much of a time is still to be rolled up again, as samples of it came late."""
        return sum(high - low for low, high in self._rollups.rolled_up(Scope.GPU, "5m", (from_ms, to_ms))[1])

    def pieces(
        self, index: FleetIndex, from_ms: int, to_ms: int, gpus: npt.NDArray[np.int64] | None = None
    ) -> Iterator[UsagePiece]:
        """Yield GPUs' usage within [from_ms, to_ms), which are multiples of 5 minutes. Each GPU is in one piece.

        `gpus`: numbers of those that are read; None: all.
        """
        places = self._registry.map(index, Scope.GPU, to_ms)
        ids = None if gpus is None else places.ids[np.isin(places.target, gpus)]
        metrics = (*BUSY, ENERGY)

        def placed(folded: Folded) -> UsagePiece:
            gpu = _gpus_of(folded.ids, places.ids, places.target)
            columns = {name: folded.columns.get(name) for name in metrics}
            busy = np.full(len(gpu), np.nan)
            for name in BUSY:
                if (column := columns[name]) is not None:
                    busy = np.fmax(busy, units(name, *column))
            energy = np.full(len(gpu), -1, np.int64)
            if (column := columns[ENERGY]) is not None:
                energy = np.where(column[1], column[0].astype(np.int64), -1)
            found = UsagePiece(gpu, folded.start_ms, folded.rows, busy, energy)
            return found if (gpu >= 0).all() else found.where(gpu >= 0)

        tail_ms = self._tail_ms(Scope.GPU, from_ms, to_ms)
        newest = [
            placed(folded)
            for folded in self._rows.folds(
                Scope.GPU, _span(tail_ms, to_ms), STEP_MS, level="10s", metrics=metrics, ids=ids
            )
        ]
        tail = UsagePiece.join(newest) if newest else None
        done = np.zeros(index.gpu_count, np.bool_)
        for folded in self._rows.folds(
            Scope.GPU, _span(from_ms, tail_ms), STEP_MS, level="5m", metrics=metrics, ids=ids
        ):
            piece = placed(folded)
            mine = np.zeros(index.gpu_count, np.bool_)
            mine[piece.gpu] = True
            done |= mine
            yield piece if tail is None else UsagePiece.join([piece, tail.where(mine[tail.gpu])])
        if tail is not None and len(tail.gpu):
            yield tail.where(~done[tail.gpu])

    def _tail_ms(self, scope: Scope, from_ms: int, to_ms: int) -> int:
        """Return where the 5-minute rollups end: what follows is read from those of 10 s, but no more than 20 minutes.

        They also end early in a new store, and where the collector was down for long.
        """
        upto_ms, _ = self._rollups.rolled_up(scope, "5m", (to_ms, to_ms))
        return max(from_ms, upto_ms, to_ms - 2 * FRESH_MS) // STEP_MS * STEP_MS

    def steps(self, from_ms: int, to_ms: int) -> tuple[list[tuple[str, int, int]], list[tuple[str, int]]]:
        """Return (node, from_ms, to_ms) in which a training loop reported steps, within 5-minute buckets.

        And (node, ms) of the checkpoints that loops reported; of several within 5 minutes the last.
        """
        spans: dict[str, list[Span]] = {}
        checkpoints: set[tuple[str, int]] = set()
        tail_ms = self._tail_ms(Scope.WORKLOAD, from_ms, to_ms)
        for level, span in (("5m", (from_ms, tail_ms)), ("10s", (tail_ms, to_ms))):
            for folded in self._rows.folds(
                Scope.WORKLOAD, _span(*span), STEP_MS, level=level, metrics=["step_time_s", "last_checkpoint_s"]
            ):  # fmt: skip
                column = folded.columns.get("step_time_s")
                if column is None:
                    continue
                checkpoints |= self._checkpoints(folded)
                kept = np.flatnonzero(column[1])
                nodes, _ = self._registry.names(Scope.WORKLOAD, folded.ids[kept], folded.start_ms[kept])
                for node, low in zip(nodes.tolist(), folded.start_ms[kept].tolist(), strict=True):
                    if node:
                        spans.setdefault(node, []).append((low, low + STEP_MS))
        return [(node, *span) for node, each in sorted(spans.items()) for span in merged(each)], sorted(checkpoints)

    def _checkpoints(self, folded: Folded) -> set[tuple[str, int]]:
        column = folded.columns.get("last_checkpoint_s")
        if column is None:
            return set()
        kept = np.flatnonzero(column[1])
        nodes, _ = self._registry.names(Scope.WORKLOAD, folded.ids[kept], folded.start_ms[kept])
        at_ms = np.round(units("last_checkpoint_s", *column)[kept] * 1000).astype(np.int64)
        return {(node, ms) for node, ms in zip(nodes.tolist(), at_ms.tolist(), strict=True) if node}


def _span(low: int, high: int) -> list[Span]:
    return [(low, high)] if low < high else []


def _gpus_of(ids: Ids, known: Ids, target: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
    """Return the GPU of each row, -1: none. Rows are by id, so each id is looked up once."""
    if not len(ids) or not len(known):
        return np.full(len(ids), -1, np.int64)
    first = np.flatnonzero(np.append(True, ids[1:] != ids[:-1]))
    at = np.minimum(np.searchsorted(known, ids[first]), len(known) - 1)
    gpu = np.where(known[at] == ids[first], target[at], -1).astype(np.int64)
    return np.repeat(gpu, np.diff(np.append(first, len(ids))))

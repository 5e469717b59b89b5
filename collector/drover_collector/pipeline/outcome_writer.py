"""Store the outcomes of judging in order, and report them. While the store fails or hangs, report from memory.

A thread of its own stores, so that a write that never returns delays neither later events nor their webhooks. The
engine's thread waits for it a short time: what is shown has then been stored, unless the store is slow.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass

from drover_collector.engine.engine import Outcome
from drover_collector.notify import Outbox
from drover_collector.notify.incident_updates import IncidentUpdate, of_decisions
from drover_collector.pipeline.stats import Ticks
from drover_collector.store import Store, StoreError
from drover_core.model.events import (
    Audit,
    Event,
    Finding,
    Incident,
)
from drover_core.times import iso

log = logging.getLogger(__name__)

_Key = tuple[object, ...]

STORED_AGAIN_MS = 300_000  # a finding that repeats, as open incidents are
MAX_UNSAVED = 1_000  # outcomes waiting for a store that does not take them
PATIENCE_S = 2.0  # how long judging waits for a write; a store under load answers within 1 s
BACKLOG = 8  # with so many waiting, judging waits for none
RETRY_S = 5.0  # after a store has failed, if nothing new comes
SWEEP_MS = 5_000  # at least this long between two sweeps: events come far more often than ticks
UNSWEPT_MS = 30_000  # without a sweep for this long, the store fails or hangs
STOP_S = 10.0  # for what is left at a stop


@dataclass(slots=True, eq=False)
class _Result:
    outcome: Outcome
    events: Sequence[Event]  # that were judged for it
    audit: Sequence[Audit] = ()
    news: Sequence[IncidentUpdate] = ()
    stored: bool = False
    refused: bool = False  # by a store that fails, for now; or for ever


class OutcomeWriter:
    """Outcomes on their way into the store. `put` in the engine's thread; `stop` ends the thread that stores.

    Args:
        known: incidents, for messages that are due because time has passed.
        watched: returns the nodes whose every finding is stored.

    Attributes:
        takers: called with each stored outcome; again with the same one after a store failed.
    """

    def __init__(
        self,
        store: Store,
        outbox: Outbox,
        ticks: Ticks,
        now_ms: Callable[[], int],
        known: Callable[[], Mapping[str, Incident]] = dict,
        watched: Callable[[], Set[str]] = frozenset,
    ) -> None:
        self._store, self._outbox, self._ticks, self._now_ms = store, outbox, ticks, now_ms
        self.takers: list[Callable[[Outcome], None]] = []
        self.known, self.watched = known, watched
        self._repeats = RepeatFilter()
        self._waiting: deque[_Result] = deque()  # the first is under way
        self._changed = threading.Condition()
        self._due = self._stopping = False
        self._since_s: float | None = None  # when the write under way began
        self._swept_ms = 0
        self._refreshed_ms = now_ms()
        self._thread: threading.Thread | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def put(
        self,
        outcome: Outcome,
        events: Sequence[Event],
        audit: Sequence[Audit] = (),
        news: Sequence[IncidentUpdate] = (),
    ) -> None:
        """Return when an outcome is stored; if the store fails or is slow, when it is reported from memory.

        Args:
            events: that were judged for it.
            audit: lines about its cause.
            news: of incidents, in addition to the outcome's decisions.
        """
        result = _Result(outcome, events, audit, [*news, *of_decisions(outcome.decisions)])
        empty = not (
            events or audit or news or outcome.findings or outcome.incidents or outcome.decisions or outcome.health
        )
        with self._changed:
            self._start()
            if not empty:
                self._waiting.append(result)
                self._bound()
            self._due = True
            self._changed.notify_all()
            if not empty:
                self._changed.wait_for(lambda: result.stored or result.refused or self._behind(), PATIENCE_S)
        if not empty and not result.stored:
            self._report_unstored(result)
        self._refresh_unswept()

    def forget(self) -> None:
        with self._changed:
            self._waiting.clear()

    def stop(self) -> None:
        """Store what waits, as far as the store takes it within STOP_S."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(STOP_S)
            self._thread = None
        for result in list(self._waiting):
            incidents, findings = len(result.outcome.incidents), len(result.outcome.findings)
            log.error("not stored at the end: %d incidents, %d findings", incidents, findings)

    def _start(self) -> None:
        if self._thread is None:
            self._stopping = False
            self._thread = threading.Thread(target=self._run, name="outcomes", daemon=True)
            self._thread.start()

    def _behind(self) -> bool:
        """Return whether waiting is useless: a write under way hangs, or many outcomes come before this one."""
        hangs = self._since_s is not None and time.monotonic() - self._since_s > PATIENCE_S
        return hangs or len(self._waiting) > BACKLOG

    def _bound(self) -> None:
        if len(self._waiting) > MAX_UNSAVED:
            lost = self._waiting[1]
            del self._waiting[1]
            self._lost(lost)

    def _refresh_unswept(self) -> None:
        """Send open incidents again: a receiver that drops stale ones must not take a failing store for their end."""
        now_ms = self._now_ms()
        if not self._waiting or now_ms - max(self._swept_ms, self._refreshed_ms) < UNSWEPT_MS:
            return
        self._refreshed_ms = now_ms
        try:
            self._outbox.repeat(self.known().values())
        except Exception as error:  # noqa: BLE001  # nor may this end detection
            self._ticks.failed(error, now_ms)

    def _report_unstored(self, result: _Result) -> None:
        if not result.refused:
            self._ticks.troubles["store"] = (
                "The store is slow: what detection finds waits to be stored. It is shown and sent already."
            )
        try:
            self._outbox.enqueue_unstored(result.outcome.incidents)
            self._outbox.send_updates(result.news, self._known(result), from_memory=True)
        except Exception as error:  # noqa: BLE001  # nor may this end detection
            self._ticks.failed(error, self._now_ms())

    # ---- in the thread that stores

    def _run(self) -> None:
        while True:
            with self._changed:
                retry_s = RETRY_S if self._waiting else None
                self._changed.wait_for(lambda: self._due or self._stopping, retry_s)
                self._due, stopping = False, self._stopping
            self._save()
            if stopping:
                return

    def _save(self) -> None:
        """Store outcomes in order. One that fails stays first in line; writing one twice changes nothing."""
        while True:
            with self._changed:
                first = self._waiting[0] if self._waiting else None
                self._since_s = None if first is None else time.monotonic()
            if first is None:
                self._ticks.troubles.pop("store", None)
                self._sweep()
                return
            try:
                self._store_one(first)
            except StoreError as error:
                self._ticks.store_failed(error)
                self._refuse()
                return
            except Exception as error:  # noqa: BLE001  # a defect: it would fail for ever, and keep back all after it
                self._ticks.failed(error, self._now_ms())
                self._lost(first)
                self._settle(first, stored=False)
            else:
                self._settle(first, stored=True)

    def _sweep(self) -> None:
        """Send messages that are due because time has passed. Here each tick passes, and all outcomes are stored."""
        now_ms = self._now_ms()
        if 0 <= now_ms - self._swept_ms < SWEEP_MS:
            return
        self._swept_ms = now_ms
        try:
            self._outbox.sweep(self.known())
        except StoreError as error:
            self._ticks.store_failed(error)
        except Exception as error:  # noqa: BLE001  # a defect here must not end what stores
            self._ticks.failed(error, self._now_ms())

    def _store_one(self, result: _Result) -> None:
        outcome, store = result.outcome, self._store
        steps: list[Callable[[], object]] = [
            lambda: store.audit.write(list(result.audit)),
            lambda: store.incidents.write(list(outcome.incidents)),
            lambda: store.decisions.write(list(outcome.decisions)),
            # Before the rest, so that a drain does not wait for it.
            *(functools.partial(self._hand, take, outcome) for take in self.takers),
            lambda: self._write_findings(outcome.findings),
            lambda: store.health.write([dataclasses.asdict(change) for change in outcome.health]),
            lambda: self._outbox.enqueue(outcome.incidents),
            lambda: self._outbox.send_updates(result.news, self._known(result)),
            lambda: store.events.write_judged(result.events),
        ]
        for step in steps:
            if not self._first(result):  # forgotten while the store hung: the collector that judges now decides again
                return
            step()

    def _write_findings(self, findings: Sequence[Finding]) -> None:
        new = self._repeats.new(findings, self.watched())
        self._store.findings.write(new)
        self._repeats.note(new)

    def _known(self, result: _Result) -> dict[str, Incident]:
        return {**self.known(), **{incident.id: incident for incident in result.outcome.incidents}}

    def _hand(self, take: Callable[[Outcome], None], outcome: Outcome) -> None:
        try:
            take(outcome)
        except StoreError:
            raise  # all takers are called again
        except Exception as error:  # noqa: BLE001  # a defect of one must not keep it from the others
            self._ticks.failed(error, self._now_ms())

    def _first(self, result: _Result) -> bool:
        with self._changed:
            return bool(self._waiting) and self._waiting[0] is result

    def _settle(self, result: _Result, stored: bool) -> None:
        with self._changed:
            result.stored, result.refused = stored, not stored
            if self._waiting and self._waiting[0] is result:  # else all was forgotten meanwhile
                self._waiting.popleft()
            self._changed.notify_all()

    def _refuse(self) -> None:
        with self._changed:
            self._since_s = None
            for result in self._waiting:
                result.refused = True
            self._changed.notify_all()

    def _lost(self, result: _Result) -> None:
        self._ticks.lost_outcomes += 1
        self._ticks.troubles["outcomes"] = (
            f"{self._ticks.lost_outcomes} results of detection could not be stored, last at {iso(self._now_ms())};"
            " see the collector's log."
        )
        outcome = result.outcome
        log.error("given up: %d incidents, %d findings", len(outcome.incidents), len(outcome.findings))


class RepeatFilter:
    """Decides which findings to store: new ones, changed ones, and each again after `STORED_AGAIN_MS`.

    A detector finds a lasting condition again with each bucket. Stored each time, 20 silent nodes and 30 pending row
    remaps made 173 million rows in 400 days.
    """

    def __init__(self) -> None:
        self._stored: dict[_Key, tuple[int, _Key]] = {}  # subject -> when it was stored, and its state

    def new(self, findings: Sequence[Finding], watched: Set[str] = frozenset()) -> list[Finding]:
        """Return those to store.

        Args:
            watched: nodes whose every finding counts, such as those being validated.
        """
        return [f for f in findings if not self._repeats(f, watched)]

    def note(self, findings: Sequence[Finding]) -> None:
        """Remember that these are stored now."""
        newest_ms = max((f.ts_ms for f in findings), default=0)
        for finding in findings:
            self._stored[_subject_of(finding)] = finding.ts_ms, _state_of(finding)
        if findings:
            self._stored = {k: v for k, v in self._stored.items() if abs(newest_ms - v[0]) < STORED_AGAIN_MS}

    def _repeats(self, finding: Finding, watched: Set[str]) -> bool:
        at_ms, state = self._stored.get(_subject_of(finding), (0, None))
        # A clock that was set back gives the old row a later time: then the finding is stored again.
        fresh = 0 <= finding.ts_ms - at_ms < STORED_AGAIN_MS
        return fresh and state == _state_of(finding) and watched.isdisjoint(node for node, _ in finding.members)


def _subject_of(finding: Finding) -> _Key:
    return (
        finding.detector, finding.kind, finding.cause, finding.scope, finding.node, finding.gpu, finding.job,
        finding.members,
    )  # fmt: skip


def _state_of(finding: Finding) -> _Key:
    """Return what makes a difference to an incident. Values and sentences change with each bucket."""
    return finding.severity, finding.action, round(finding.confidence, 1), finding.cleared

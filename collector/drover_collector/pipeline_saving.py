"""What comes of judging is stored, in order, and told. While the store fails it is told from memory."""

from __future__ import annotations

import dataclasses
import logging
from collections import deque
from collections.abc import Callable, Sequence

from drover_collector.engine import Outcome
from drover_collector.notify import Outbox
from drover_collector.store import Store, StoreError
from drover_collector.ticks import Ticks
from drover_proto.events import Event
from drover_proto.times import iso

log = logging.getLogger(__name__)

MAX_UNSAVED = 1_000  # outcomes waiting for a store that does not take them


class Saving:
    """Outcomes on their way into the store. `put` and `save` in the thread that judges."""

    def __init__(self, store: Store, outbox: Outbox, ticks: Ticks, now_ms: Callable[[], int]) -> None:
        self._store, self._outbox, self._ticks, self._now_ms = store, outbox, ticks, now_ms
        self._waiting: deque[tuple[Outcome, Sequence[Event]]] = deque()  # with the events that were judged

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, outcome: Outcome, events: Sequence[Event]) -> None:
        """`events` were judged for it."""
        if events or outcome.findings or outcome.incidents or outcome.decisions or outcome.health:
            self._waiting.append((outcome, events))

    def forget(self) -> None:
        self._waiting.clear()

    def tell_left(self) -> None:
        """What a stop leaves unstored."""
        for outcome, _ in self._waiting:
            log.error("not stored at the end: %d incidents, %d findings", len(outcome.incidents), len(outcome.findings))

    def save(self) -> None:
        """Stores outcomes in order. One that fails stays first in line; writing one twice changes nothing."""
        try:
            while self._waiting:
                outcome, events = self._waiting[0]
                self._store.write_findings(list(outcome.findings))
                self._store.write_incidents(list(outcome.incidents))
                self._store.write_decisions(list(outcome.decisions))
                self._store.write_health([dataclasses.asdict(change) for change in outcome.health])
                self._outbox.enqueue(outcome.incidents)
                self._store.write_judged(events)
                self._waiting.popleft()
            self._ticks.troubles.pop("store", None)
        except StoreError as error:
            self._ticks.store_failed(error)
            if self._waiting:  # those before it were told when they came
                self._tell_unstored(self._waiting[-1][0])
            if len(self._waiting) > MAX_UNSAVED:
                self._give_up_oldest()
        except Exception as error:  # noqa: BLE001  # a defect: it would fail for ever, and keep back all after it
            self._ticks.failed(error, self._now_ms())
            self._give_up_oldest()

    def _tell_unstored(self, outcome: Outcome) -> None:
        try:
            self._outbox.enqueue_unstored(outcome.incidents)
        except Exception as error:  # noqa: BLE001  # nor may this end detection
            self._ticks.failed(error, self._now_ms())

    def _give_up_oldest(self) -> None:
        lost, _ = self._waiting.popleft()
        self._ticks.lost_outcomes += 1
        self._ticks.troubles["outcomes"] = (
            f"{self._ticks.lost_outcomes} results of detection could not be stored, last at {iso(self._now_ms())};"
            " see the collector's log."
        )
        log.error("given up: %d incidents, %d findings", len(lost.incidents), len(lost.findings))

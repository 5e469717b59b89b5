"""The thread that stores how far messages are."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping

from drover_collector.store import OutboxRow, Store

log = logging.getLogger(__name__)

MAX_PENDING = 10_000  # messages per receiver, in memory
RETRY_S = 5.0  # after the store has failed
STOP_S = 2.0  # how long a stop waits for what is under way


class DeliveryRecorder(threading.Thread):
    """Stores how far messages are, tried until the store takes it. `on_saved`: told of their ids."""

    def __init__(
        self, store: Store, receivers: int, on_saved: Callable[[Iterable[str]], object] = lambda _: None
    ) -> None:
        super().__init__(name="outbox", daemon=True)
        self._store, self._on_saved = store, on_saved
        self._room = MAX_PENDING * max(1, receivers)
        self._rows: dict[str, OutboxRow] = {}  # newest states that the store does not have
        self._changed = threading.Condition()
        self._due = self._stopping = False
        self._failing = False  # said once, not with each delivery

    def note(self, row: OutboxRow) -> None:
        with self._changed:
            self._rows[row.id] = row
            if len(self._rows) > self._room:
                del self._rows[next(iter(self._rows))]
            self._due = True
            self._changed.notify()

    def look(self) -> None:
        """The store takes data now."""
        with self._changed:
            self._due = bool(self._rows)
            self._changed.notify()

    def end(self) -> None:
        """Stores what is left, if the store takes it now."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self.is_alive():
            self.join(STOP_S)

    def run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._due or self._stopping, RETRY_S if self._rows else None)
                stopping = self._stopping
            self.flush()
            if stopping:
                return

    def flush(self) -> None:
        """One try to store what there is."""
        with self._changed:
            self._due = False
            rows = dict(self._rows)
        if rows:
            self._write(rows)

    def _write(self, rows: Mapping[str, OutboxRow]) -> None:
        try:
            self._store.outbox.write(list(rows.values()))
        except Exception as error:  # noqa: BLE001  # again later; after a restart by the ids that receivers know
            if not self._failing:
                log.warning("how far %d messages are is not stored, and tried again: %s", len(rows), error)
            self._failing = True
            return
        if self._failing:
            log.info("how far messages are is stored again, %d of them", len(rows))
        self._failing = False
        self._on_saved(rows)
        with self._changed:
            for id_, row in rows.items():
                if self._rows.get(id_) is row:
                    del self._rows[id_]

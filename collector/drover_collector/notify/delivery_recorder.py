"""Store how far messages are, in a thread of its own, so that a store that hangs delays no delivery."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping

from drover_collector.notify.message_queue import MAX_PENDING
from drover_collector.store import OutboxRow, Store

log = logging.getLogger(__name__)

RETRY_S = 5.0  # after the store has failed
STOP_S = 2.0  # the longest wait for what is under way at a stop


class DeliveryRecorder(threading.Thread):
    """Stores the newest state of each message, and tries until the store accepts it.

    Args:
        on_saved: called with the ids that were stored.
    """

    def __init__(
        self, store: Store, receivers: int, on_saved: Callable[[Iterable[str]], object] = lambda _: None
    ) -> None:
        super().__init__(name="outbox", daemon=True)
        self._store, self._on_saved = store, on_saved
        self._room = MAX_PENDING * max(1, receivers)
        self._rows: dict[str, OutboxRow] = {}  # newest states that the store does not have
        self._changed = threading.Condition()
        self._due = self._stopping = False
        self._failing = False  # logged once, not with each delivery

    def record(self, row: OutboxRow) -> None:
        """Have a message's state stored soon."""
        with self._changed:
            self._rows[row.id] = row
            if len(self._rows) > self._room:
                del self._rows[next(iter(self._rows))]
            self._due = True
            self._changed.notify()

    def retry_now(self) -> None:
        """Store without waiting what failed before: the store works again."""
        with self._changed:
            self._due = bool(self._rows)
            self._changed.notify()

    def end(self) -> None:
        """Store what is left, if the store accepts it now, and end the thread."""
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
        """Try once to store what there is."""
        with self._changed:
            self._due = False
            rows = dict(self._rows)
        if rows:
            self._write(rows)

    def _write(self, rows: Mapping[str, OutboxRow]) -> None:
        try:
            self._store.outbox.write(list(rows.values()))
        except Exception as error:  # noqa: BLE001  # tried again; after a restart receivers drop ids that they know
            if not self._failing:
                log.warning("the state of %d messages cannot be stored and is tried again: %s", len(rows), error)
            self._failing = True
            return
        if self._failing:
            log.info("the state of messages is stored again, %d of them", len(rows))
        self._failing = False
        self._on_saved(rows)
        with self._changed:
            for id_, row in rows.items():
                if self._rows.get(id_) is row:
                    del self._rows[id_]

"""Run the delivery of all receivers: a worker for each, and one recorder that stores how far messages are."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from drover_collector.notify.base import Notifier
from drover_collector.notify.delivery_recorder import STOP_S, DeliveryRecorder
from drover_collector.notify.delivery_worker import DeliveryWorker
from drover_collector.notify.fallback_file import FallbackFile
from drover_collector.store import OutboxRow, Store


class DeliveryPool:
    """Workers, recorder, and the file for messages that the store could not keep.

    Attributes:
        workers: receiver -> its worker; replaced as a whole by `renew`.
    """

    def __init__(
        self,
        store: Store,
        notifiers: Sequence[Notifier],
        delays_s: Sequence[float],
        fallback: FallbackFile,
        now_ms: Callable[[], int],
        on_given_up: Callable[[OutboxRow, str], None],
    ) -> None:
        self._store = store
        self._notifiers = tuple(notifiers)
        self._delays_s = tuple(delays_s)
        self._now_ms = now_ms
        self._on_given_up = on_given_up
        self.fallback = fallback
        self.renew()

    def renew(self) -> None:
        """Make new workers and a new recorder: a thread starts once."""
        self.recorder = DeliveryRecorder(self._store, len(self._notifiers), self.fallback.forget)
        self.workers = {
            n.name: DeliveryWorker(self._store, n, self._delays_s, self._now_ms, self.recorder, self._on_given_up)
            for n in self._notifiers
        }

    def start(self) -> None:
        self.recorder.start()
        for worker in self.workers.values():
            worker.start()

    def stop(self) -> None:
        """End delivery. Pending messages stay pending in the store."""
        for worker in self.workers.values():
            worker.ask_to_stop()
        until_s = time.monotonic() + STOP_S  # for all workers together
        for worker in self.workers.values():
            worker.join_and_close(until_s)
        self.recorder.end()

    def step(self) -> bool:
        """Deliver what is due in the caller's thread, without `start`. Return False if nothing was due."""
        stepped = [worker.step() for worker in self.workers.values()]
        self.recorder.flush()
        return any(stepped)

    def add(self, row: OutboxRow) -> None:
        """Have a message delivered, if its receiver is still configured."""
        if (worker := self.workers.get(row.notifier)) is not None:
            worker.add(row)

    def keep_for_store(self, rows: Iterable[OutboxRow]) -> None:
        """Keep messages that the store cannot take now: in the fallback file, and for the recorder."""
        rows = list(rows)
        self.fallback.add(rows)
        for row in rows:
            self.recorder.record(row)

    @property
    def receivers(self) -> int:
        """How many receivers there are; 0: nobody is notified."""
        return len(self._notifiers)

    @property
    def pending(self) -> dict[str, int]:
        """Waiting messages, by receiver."""
        return {name: worker.waiting for name, worker in self.workers.items()}

    @property
    def oldest_s(self) -> dict[str, float]:
        """Age of the oldest waiting message, by receiver; 0: none waits."""
        now_ms = self._now_ms()
        return {name: max(0, now_ms - worker.oldest_ms(now_ms)) / 1000 for name, worker in self.workers.items()}

    @property
    def delivered(self) -> dict[str, float]:
        """Messages since the start, by receiver; the same for the next two."""
        return {name: worker.stats.delivered for name, worker in self.workers.items()}

    @property
    def tries_failed(self) -> dict[str, float]:
        return {name: worker.stats.tries_failed for name, worker in self.workers.items()}

    @property
    def given_up(self) -> dict[str, float]:
        return {name: worker.stats.given_up for name, worker in self.workers.items()}

    @property
    def kinds(self) -> dict[str, str]:
        return {name: worker.notifier.kind for name, worker in self.workers.items()}

    @property
    def troubles(self) -> dict[str, str]:
        """A sentence for each receiver that does not accept messages now, by receiver."""
        return {name: worker.stats.trouble for name, worker in self.workers.items() if worker.stats.trouble}

"""What an outbox tells of its receivers, for status, console and metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from drover_collector.notify.delivery_worker import DeliveryWorker


class Figures:
    """Of all receivers, each by its name."""

    _couriers: Mapping[str, DeliveryWorker]
    _now_ms: Callable[[], int]

    @property
    def pending(self) -> dict[str, int]:
        """Messages that wait, by receiver."""
        return {name: courier.waiting for name, courier in self._couriers.items()}

    @property
    def oldest_s(self) -> dict[str, float]:
        """Age of the oldest message that waits, by receiver; 0: none waits."""
        now_ms = self._now_ms()
        return {name: max(0, now_ms - courier.oldest_ms(now_ms)) / 1000 for name, courier in self._couriers.items()}

    @property
    def delivered(self) -> dict[str, float]:
        """Since the start, by receiver; likewise those below."""
        return {name: courier.delivered for name, courier in self._couriers.items()}

    @property
    def tries_failed(self) -> dict[str, float]:
        return {name: courier.tries_failed for name, courier in self._couriers.items()}

    @property
    def given_up(self) -> dict[str, float]:
        return {name: courier.given_up for name, courier in self._couriers.items()}

    @property
    def kinds(self) -> dict[str, str]:
        """What each receiver is, by name."""
        return {name: courier.notifier.kind for name, courier in self._couriers.items()}

    @property
    def trouble_of(self) -> dict[str, str]:
        """Why a receiver does not take messages now, by name; of those that do, nothing."""
        return {name: courier.trouble for name, courier in self._couriers.items() if courier.trouble}

    @property
    def troubles(self) -> list[str]:
        """A sentence for every receiver that does not take messages now."""
        return list(self.trouble_of.values())

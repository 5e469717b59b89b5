"""Choose which connection is closed when there is no place for another."""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")


class ConnectionLimit(Generic[T]):
    """Connections by address. Used by one thread at a time."""

    def __init__(self) -> None:
        self._of: dict[str, dict[T, None]] = {}  # address -> its connections, the oldest first
        self._address: dict[T, str] = {}

    def __len__(self) -> int:
        return len(self._address)

    def __contains__(self, one: T) -> bool:
        return one in self._address

    def all(self) -> list[T]:
        return list(self._address)

    def join(self, one: T, address: str) -> None:
        self._of.setdefault(address, {})[one] = None
        self._address[one] = address

    def leave(self, one: T) -> None:
        """Remove a connection, if it is there."""
        address = self._address.pop(one, None)
        if address is not None:
            del self._of[address][one]
            if not self._of[address]:
                del self._of[address]

    def spare(self) -> T | None:
        """Return the oldest connection of the address that has most, so that a flood closes its own. None: empty."""
        most = max(self._of.values(), key=lambda held: len(held), default=None)
        return None if most is None else next(iter(most))

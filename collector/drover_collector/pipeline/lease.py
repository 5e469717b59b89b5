"""This collector's claim to be the active one: the only one that detects and acts."""

from __future__ import annotations

from dataclasses import dataclass

from drover_collector.store import FileLease, Lease, StoreError

ACTIVE, STANDBY, INGEST = "active", "standby", "ingest"


@dataclass(frozen=True, slots=True)
class LeaseState:
    """`holder`: this collector's name in it; `ttl_s` 0: the lock on an embedded store's folder, which has no end."""

    holder: str = "embedded"
    ttl_s: float = 0.0
    left_s: float | None = None  # None: it has no end, or this one may not hold it


class LeaderLease:
    """Any thread may use it.

    Args:
        lease: None: there is no other collector.
        may_lead: False for a collector that only ingests.
    """

    def __init__(self, lease: Lease | FileLease | None = None, *, may_lead: bool = True) -> None:
        self.lease, self.may_lead = lease, may_lead

    def holds(self) -> bool:
        return self.may_lead and (self.lease is None or self.lease.holds())

    def role(self, leading: bool) -> str:
        """Return which part this collector has. `leading`: it detects."""
        if not self.may_lead:
            return INGEST
        if self.lease is None:
            return ACTIVE
        return ACTIVE if leading and self.lease.holds() else STANDBY

    def state(self) -> LeaseState:
        if self.lease is None:
            return LeaseState()
        if isinstance(self.lease, FileLease):
            return LeaseState(self.lease.holder, 0.0, None)
        return LeaseState(self.lease.holder, self.lease.ttl_s, self.lease.left_s() if self.may_lead else None)

    def fence(self) -> str:
        """Return a text for the server's log. Raises StoreError: another collector may be the active one."""
        if self.lease is None:
            return ""
        if not self.lease.holds():
            raise StoreError("this collector is not the active one any more")
        return f"drover {self.lease.holder} {self.lease.token}"

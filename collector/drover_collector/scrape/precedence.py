"""Which of a node's sources gives a counter or names a GPU, where several do: one of them, and never in turn.

A source is a page that is read, or an exporter or program whose values are sent. Two of them count from different
moments: a series that took its values from one and then from another would jump, and errors would seem to be new.
dcgm-exporter, AMD's exporter and node_exporter give what the driver or the kernel counts, so another of the same kind
may go on for one that has gone, or for the node's agent. What is sent by OpenTelemetry's names is mostly counted since
its sender began.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from drover_collector.scrape.gpu_ids import GpuId
from drover_collector.scrape.mapping import Found
from drover_collector.scrape.tables import NAMES, Table
from drover_core.metrics.catalog import METRICS, Kind

# A page of the node is known by then, after a start too. Until then nothing is counted by a sender's own names: else
# who comes first after each start of the collector would count.
SETTLES_S = 60.0
KEPT_S = 3600.0  # a counter without a value for so long is another's from then on
SAME_XID_S = 60.0  # two exporters of a node report one XID within this
NAMED_S = 60.0  # a GPU whose source gave nothing for so long may be another's
MAX_PLACES = 512  # of one source, as NodeMessages takes so many: who names ever new ports must not fill the memory
ALIKE = "of an exporter whose GPUs are others than another's in the same slots: do two nodes have one name?"
COUNTED = "of a counter that another source of the node gave within the hour: the two may count from other moments"

COUNTERS = frozenset(metric.name for metric in METRICS if metric.kind is Kind.COUNTER)
Place = Hashable  # GPU's slot, name of a port, "" for the node


@dataclass(slots=True)
class _Given:
    """What one source has given.

    Attributes:
        settled_s: from when on its counters are used.
        counters: place -> counter -> when it gave that one last. Of one place it may have what it has not of another:
            an SDK gives a counter when it first grows.
    """

    table: str
    settled_s: float
    counters: dict[Place, dict[str, float]] = field(default_factory=dict)

    @property
    def is_of_a_page(self) -> bool:
        """Whether the driver or the kernel counts, and not the sender."""
        return self.table in NAMES

    @property
    def newest_s(self) -> float:
        """When it gave a counter last."""
        return max((max(its.values()) for its in self.counters.values()), default=self.settled_s)

    def has(self, place: Place, name: str, now_s: float) -> bool:
        """Return whether a counter is its own."""
        its = self.counters.get(place)
        return its is not None and now_s - its.get(name, -KEPT_S) < KEPT_S

    def note(self, place: Place, name: str, now_s: float) -> None:
        """Note that a counter is its own. Not of more places than a node has."""
        its = self.counters.get(place)
        if its is None:
            if len(self.counters) >= MAX_PLACES:
                self.counters = {at: of for at, of in self.counters.items() if now_s - max(of.values()) < KEPT_S}
            if len(self.counters) >= MAX_PLACES:
                return
            its = self.counters[place] = {}
        its[name] = now_s


@dataclass(slots=True)
class _Named:
    """Who named a GPU, and when it did so last."""

    gpu: GpuId
    key: Hashable
    at_s: float


class Precedence:
    """Of one node."""

    def __init__(self) -> None:
        self._given: dict[Hashable, _Given] = {}
        self._gpus: dict[int, _Named] = {}  # by slot
        self._xids: dict[tuple[int, int], tuple[Hashable, float]] = {}  # (slot, code) -> who reported it, and when
        self._agent_s = -KEPT_S  # when the node had an agent last

    def note_agent(self, now_s: float) -> None:
        """Note that the node has an agent, so that what others count from other moments does not follow it."""
        self._agent_s = now_s
        for given in self._given.values():
            if not given.is_of_a_page:
                given.counters.clear()

    def drop(self, key: Hashable) -> None:
        """Forget a source in whose place another has come."""
        self._given.pop(key, None)

    def is_alike(self, key: Hashable, found: Found, now_s: float) -> bool:
        """Return whether a source names other GPUs than another does in the same slots, as those of two nodes would."""
        for gpu in found.gpus:
            known = self._gpus.get(gpu.slot)
            if known is None or known.key == key or now_s - known.at_s >= NAMED_S:
                continue
            if gpu.uuid and known.gpu.uuid and gpu.uuid != known.gpu.uuid:
                return True
        return False

    def keep(self, key: Hashable, table: Table, found: Found, now_s: float) -> int:
        """Take out of what a source gave which counters and XIDs are another's, and give its GPUs their names.

        Args:
            key: the source; the same for each of its pages.
        Returns:
            How many values of counters were left out.
        """
        given = self._given.get(key)
        if given is None:
            self._forget(now_s)
            given = self._given[key] = _Given(table.name, now_s)
            given.settled_s += 0.0 if given.is_of_a_page else SETTLES_S
        self._rename(key, found, now_s)
        while self._xids and now_s - next(iter(self._xids.values()))[1] >= SAME_XID_S:
            del self._xids[next(iter(self._xids))]
        found.xids[:] = [xid for xid in found.xids if self._is_first(key, xid, now_s)]
        rivals = [
            other
            for its, other in self._given.items()
            if its != key and not (other.is_of_a_page and other.table == given.table)
        ]
        left_out = self._counters(given, rivals, "", found.node, now_s)
        for gpu, values in found.gpus.items():
            left_out += self._counters(given, rivals, gpu.slot, values, now_s)
        for link, values in found.links.items():
            left_out += self._counters(given, rivals, link, values, now_s)
        return left_out

    def _forget(self, now_s: float) -> None:
        """Forget sources without a counter for long: who sends under ever new names must not fill the memory."""
        self._given = {key: its for key, its in self._given.items() if now_s - its.newest_s < KEPT_S}

    def _counters(
        self, given: _Given, rivals: list[_Given], place: Place, values: dict[str, float], now_s: float
    ) -> int:
        """Leave out the counters of one place that are another's. Return how many; not those that settle."""
        mine = [name for name in values if name in COUNTERS]
        others = {name for name in mine if any(rival.has(place, name, now_s) for rival in rivals)}
        follows_agent = not given.is_of_a_page and now_s - self._agent_s < KEPT_S
        for name in mine:
            if name in others or follows_agent or now_s < given.settled_s:
                del values[name]
            else:
                given.note(place, name, now_s)
        return len(others)

    def _is_first(self, key: Hashable, xid: tuple[int, int], now_s: float) -> bool:
        known = self._xids.get(xid)
        if known is not None and known[0] != key and now_s - known[1] < SAME_XID_S:
            return False
        self._xids.pop(xid, None)
        self._xids[xid] = key, now_s  # behind the others: the oldest is the first
        return True

    def _rename(self, key: Hashable, found: Found, now_s: float) -> None:
        """Give each GPU the name that it has: of two sources one may know its serial, and the other only its UUID."""
        renamed: dict[GpuId, dict[str, float]] = {}
        for gpu, values in found.gpus.items():
            known = self._gpus.get(gpu.slot)
            if known is None or (gpu.uuid and gpu.uuid != known.gpu.uuid):
                known = self._gpus[gpu.slot] = _Named(gpu, key, now_s)  # also another board in this slot
            elif known.key == key or now_s - known.at_s >= NAMED_S:
                known.key, known.at_s = key, now_s
            renamed[known.gpu] = values
        found.gpus = renamed

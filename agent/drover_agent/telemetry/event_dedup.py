"""One event for what several lines tell: the same error from NVML and the kernel log, and storms of one error.

The first occurrence leaves at once. Repeats of the same error of the same device are summed, and told every
`WINDOW_MS` with their count. What two sources report in one window is the same occurrence: the higher of their counts
is the true one. NVML carries no text, so its report waits `HOLD_MS` for the kernel's line where that log is read.

Windows count in the events' own time, which may be long ago (a log of before the start, a reader that lags behind a
storm); what is left untold, and what is forgotten, goes by the time now.

What is remembered is bounded. Beyond `MAX_OPEN` different errors (or `MAX_FORGEABLE` lines that user space could have
written) in one window, further ones are summed whatever they are, so that no storm fills the spool.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from drover_agent.sources.base import NodeEvent
from drover_core.model.kinds import EventKind

WINDOW_MS = 10_000
HOLD_MS = 250
MAX_OPEN = 3_000  # every XID on each of 16 GPUs
MAX_FORGEABLE = 50
MANY = "many different lines, such as: "

Key = tuple[EventKind, int | None, str, str, bool, bool]


@dataclass(slots=True, eq=False, repr=False)
class _Open:
    """One error of one device that was seen lately."""

    newest: NodeEvent
    until_ms: int  # end of the window, or of the wait for text, in the events' time
    due_ms: int  # the same in the time now
    lag_ms: int  # of the newest event's time behind now
    waits: bool  # nothing told yet: the kernel's line may bring the text
    many: bool  # stands for all that was too many to remember
    told: int = 0
    seen: dict[str, int] = field(default_factory=dict)  # source -> occurrences since this was opened
    text: str = ""  # the message told last

    @property
    def untold(self) -> int:
        return max(self.seen.values(), default=0) - self.told

    def over(self, ts_ms: int) -> bool:
        """Whether an event of then is beyond the window."""
        return _over(self.until_ms, ts_ms)

    def due(self, now_ms: int) -> bool:
        """Whether what is untold has waited long enough."""
        return _over(self.due_ms, now_ms)

    def extend(self, ms: int, now_ms: int) -> None:
        """A window (or wait) of `ms` from now on."""
        self.until_ms, self.due_ms = now_ms - self.lag_ms + ms, now_ms + ms


def _over(until_ms: int, now_ms: int) -> bool:
    """Also when the clock was set back to long before."""
    return not until_ms - 2 * WINDOW_MS <= now_ms < until_ms


class EventMerger:
    """A filter in front of the spool. Lifecycle events pass untouched."""

    def __init__(self, *, expect_kernel_log: bool) -> None:
        self._expect_kernel_log = expect_kernel_log
        self._open: dict[Key, _Open] = {}
        self._forgeable = 0  # of these
        self.merged = 0  # lines that did not become events of their own

    @property
    def open(self) -> bool:
        """Whether anything is remembered."""
        return bool(self._open)

    @property
    def waits(self) -> bool:
        """Whether something that was not told yet is due within HOLD_MS; the ends of windows can wait for longer."""
        return any(known.waits for known in self._open.values())

    def offer(self, event: NodeEvent, now_ms: int | None = None) -> list[NodeEvent]:
        """What to tell now that `event` came; `now_ms`: its own time unless given."""
        if event.kind is EventKind.LIFECYCLE:
            return [event]
        now_ms = event.ts_ms if now_ms is None else now_ms
        key = self._key(event)
        told = []
        known = self._open.get(key)
        if known and known.over(event.ts_ms):
            told += self._close(key, now_ms)
            known = self._open.get(key)
        if known is None:
            waits = event.source == "nvml" and self._expect_kernel_log
            known = _Open(event, 0, 0, now_ms - event.ts_ms, waits, many=not key[2], seen={event.source: event.count})
            known.extend(HOLD_MS if waits else WINDOW_MS, now_ms)
            self._open[key] = known
            self._forgeable += event.forgeable
            return told if waits else [*told, self._tell(known, event)]
        known.seen[event.source] = known.seen.get(event.source, 0) + event.count
        known.lag_ms = now_ms - event.ts_ms
        if event.source != "nvml" or known.newest.source == "nvml":
            known.newest = event
        waited_for = known.waits and event.source != "nvml"
        # XID 154 is a state that changes, not an occurrence that repeats.
        other_state = event.code == "154" and event.source != "nvml" and event.message != known.text
        if waited_for or other_state:
            known.extend(WINDOW_MS, now_ms)
            return [*told, self._tell(known, event)]
        self.merged += 1
        return told

    def due(self, now_ms: int) -> list[NodeEvent]:
        """What to tell because time has passed. Call it each second, and every `HOLD_MS` while something `waits`."""
        told: list[NodeEvent] = []
        for key in [key for key, known in self._open.items() if known.due(now_ms)]:
            told += self._close(key, now_ms)
        return told

    def flush(self) -> list[NodeEvent]:
        """Everything not told yet; for the end."""
        return [event for key in list(self._open) for event in self._flush(key)]

    def _close(self, key: Key, now_ms: int) -> list[NodeEvent]:
        """At the end of a window: tell its sum and begin the next one, or forget a device that was quiet."""
        known = self._open[key]
        if known.untold <= 0:
            self._forget(key)
            return []
        known.extend(WINDOW_MS, now_ms)
        return [self._tell(known, known.newest)]

    def _flush(self, key: Key) -> list[NodeEvent]:
        known = self._forget(key)
        return [self._tell(known, known.newest)] if known.untold > 0 else []

    def _forget(self, key: Key) -> _Open:
        known = self._open.pop(key)
        self._forgeable -= known.newest.forgeable
        return known

    def _tell(self, known: _Open, event: NodeEvent) -> NodeEvent:
        count = max(known.untold, 1)
        known.told += count
        known.waits = False
        known.text = event.message
        return replace(event, count=count, message=MANY + event.message if known.many else event.message)

    def _key(self, event: NodeEvent) -> Key:
        """What makes two events reports of the same thing. A line that user space could have written hides no real
        one. NVML says no more of an XID than its GPU and code."""
        where = "" if event.kind is EventKind.XID and event.gpu is not None else event.where
        key = event.kind, event.gpu, event.code, where, event.forgeable, event.backlog
        full = self._forgeable >= MAX_FORGEABLE if event.forgeable else len(self._open) >= MAX_OPEN
        return key if key in self._open or not full else (event.kind, None, "", "", event.forgeable, event.backlog)

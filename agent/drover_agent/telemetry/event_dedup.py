"""Merge lines about one error into one event: an error that NVML and the kernel log both report, and storms.

The first occurrence is sent at once. Repeats of the same error of the same device are summed and sent every WINDOW_MS
with their count. What two sources report within one window is one occurrence: the higher of their counts is true. NVML
gives no text, so its report waits HOLD_MS for the kernel's line if that log is read.

Windows count in the events' own time, which may be long ago (a log from before the start, or a reader that lags behind
a storm). When a sum is sent or forgotten depends on the time now.

Memory is bounded: above MAX_OPEN different errors in one window (or MAX_FORGEABLE lines that user space could have
written) further ones are summed whatever they are, so that no storm fills the spool.
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
class _Error:
    """One error of one device that was seen lately."""

    newest: NodeEvent
    until_ms: int  # end of the window, or of the wait for text, in the events' time
    due_ms: int  # the same, in the time now
    lag_ms: int  # how far the newest event's time is behind now
    waits: bool  # nothing sent yet: the kernel's line may bring the text
    many: bool  # stands for all errors above the limit
    sent: int = 0
    seen: dict[str, int] = field(default_factory=dict)  # source -> occurrences since this was opened
    text: str = ""  # the message sent last

    @property
    def unsent(self) -> int:
        return max(self.seen.values(), default=0) - self.sent

    def is_over(self, ts_ms: int) -> bool:
        """Return whether an event of that time is outside the window."""
        return _is_over(self.until_ms, ts_ms)

    def is_due(self, now_ms: int) -> bool:
        """Return whether the unsent count has waited long enough."""
        return _is_over(self.due_ms, now_ms)

    def extend(self, ms: int, now_ms: int) -> None:
        """Begin a window (or wait) of `ms` now."""
        self.until_ms, self.due_ms = now_ms - self.lag_ms + ms, now_ms + ms


def _is_over(until_ms: int, now_ms: int) -> bool:
    """Return whether the time is past, or so long before that the clock was set back."""
    return not until_ms - 2 * WINDOW_MS <= now_ms < until_ms


class EventMerger:
    """A filter in front of the spool. Events of the agent and of ranks pass unchanged."""

    def __init__(self, *, expect_kernel_log: bool) -> None:
        self._expect_kernel_log = expect_kernel_log
        self._open: dict[Key, _Error] = {}
        self._forgeable = 0  # of `_open`
        self.merged = 0  # lines that were summed into another event

    @property
    def open(self) -> bool:
        """Whether anything is remembered."""
        return bool(self._open)

    @property
    def waits(self) -> bool:
        """Whether a first report waits HOLD_MS for its text. Ends of windows may wait longer."""
        return any(known.waits for known in self._open.values())

    def offer(self, event: NodeEvent, now_ms: int | None = None) -> list[NodeEvent]:
        """Take an event and return what to send now. `now_ms`: the event's own time unless given."""
        if event.kind in (EventKind.LIFECYCLE, EventKind.RANK):
            return [event]
        now_ms = event.ts_ms if now_ms is None else now_ms
        key = self._key(event)
        events = []
        known = self._open.get(key)
        if known and known.is_over(event.ts_ms):
            events += self._close(key, now_ms)
            known = self._open.get(key)
        if known is None:
            waits = event.source == "nvml" and self._expect_kernel_log
            known = _Error(event, 0, 0, now_ms - event.ts_ms, waits, many=not key[2], seen={event.source: event.count})
            known.extend(HOLD_MS if waits else WINDOW_MS, now_ms)
            self._open[key] = known
            self._forgeable += event.forgeable
            return events if waits else [*events, self._send(known, event)]
        known.seen[event.source] = known.seen.get(event.source, 0) + event.count
        known.lag_ms = now_ms - event.ts_ms
        if event.source != "nvml" or known.newest.source == "nvml":
            known.newest = event
        waited_for = known.waits and event.source != "nvml"
        # XID 154 is a state that changes, not an occurrence that repeats.
        other_state = event.code == "154" and event.source != "nvml" and event.message != known.text
        if waited_for or other_state:
            known.extend(WINDOW_MS, now_ms)
            return [*events, self._send(known, event)]
        self.merged += 1
        return events

    def due(self, now_ms: int) -> list[NodeEvent]:
        """Return what to send because time has passed. Call it each second, and every HOLD_MS while `waits`."""
        events: list[NodeEvent] = []
        for key in [key for key, known in self._open.items() if known.is_due(now_ms)]:
            events += self._close(key, now_ms)
        return events

    def flush(self) -> list[NodeEvent]:
        """Return everything not sent yet. Call it at the end."""
        return [event for key in list(self._open) for event in self._flush(key)]

    def _close(self, key: Key, now_ms: int) -> list[NodeEvent]:
        """End a window: return its sum and begin the next one, or forget an error that did not repeat."""
        known = self._open[key]
        if known.unsent <= 0:
            self._forget(key)
            return []
        known.extend(WINDOW_MS, now_ms)
        return [self._send(known, known.newest)]

    def _flush(self, key: Key) -> list[NodeEvent]:
        known = self._forget(key)
        return [self._send(known, known.newest)] if known.unsent > 0 else []

    def _forget(self, key: Key) -> _Error:
        known = self._open.pop(key)
        self._forgeable -= known.newest.forgeable
        return known

    def _send(self, known: _Error, event: NodeEvent) -> NodeEvent:
        count = max(known.unsent, 1)
        known.sent += count
        known.waits = False
        known.text = event.message
        return replace(event, count=count, message=MANY + event.message if known.many else event.message)

    def _key(self, event: NodeEvent) -> Key:
        """Return what two reports of the same error share.

        A line that user space could have written never hides a real one. Of an XID, NVML knows only GPU and code.
        """
        where = "" if event.kind is EventKind.XID and event.gpu is not None else event.where
        key = event.kind, event.gpu, event.code, where, event.forgeable, event.backlog
        full = self._forgeable >= MAX_FORGEABLE if event.forgeable else len(self._open) >= MAX_OPEN
        return key if key in self._open or not full else (event.kind, None, "", "", event.forgeable, event.backlog)

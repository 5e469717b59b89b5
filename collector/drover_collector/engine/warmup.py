"""Rebuild what detectors knew before a restart, from buckets and judged events in order of time.

What they find there was reported before the restart. New are only conditions that ended meanwhile, and lines that
were held when the former run stopped. For a large fleet this takes a while, so a second runner does it, a bucket at a
time, while the first judges events; at the end it takes the first one's place.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

from drover_collector.detectors import DETECTORS
from drover_collector.detectors.kernel import detector as kernel
from drover_collector.detectors.xid import detector as xid
from drover_collector.detectors.xid.state import XidState, back_in_service
from drover_collector.engine.detector_runner import DetectorRunner
from drover_collector.engine.late_events import Boots, dealt_with
from drover_collector.fleet.buckets import Bucket
from drover_core.model.events import (
    SEVERITY_ORDER,
    Event,
    Finding,
    Incident,
    NodeOutage,
    Severity,
)

LAG_MS = 7_000  # a bucket is judged this long after its end: batches of 5 s, and 2 s on the way
TOGETHER_MS = 1_000  # events of a restart: one by one, each of thousands would cost a look at all the others


class DetectorWarmup:
    """`add_bucket` with each bucket in order of time, then `finish`.

    Args:
        runner: one without data. incidents: of the former run, without those of the guard.
        events: that were judged. back: nodes that are back in service -> their outage.
    Attributes:
        over: subject -> the finding that ended in that time.
        missed: subject -> a finding that was held when the former run stopped, and that no incident shows.
    """

    def __init__(
        self,
        runner: DetectorRunner,
        incidents: Sequence[Incident],
        events: Iterable[Event],
        back: Mapping[str, NodeOutage],
        subject_of: Callable[[Finding], object],
    ) -> None:
        self.runner, self._subject_of = runner, subject_of
        self.over: dict[object, Finding] = {}
        self.missed: dict[object, Finding] = {}
        self._known = [i for i in incidents if not {kernel.NAME, xid.NAME}.isdisjoint(i.detectors)]
        for detector in DETECTORS:
            runner.states[detector.name] = detector.restored(incidents, runner.index, runner.context.started_ms)
        self._back, self._boots = back, Boots(runner.index)
        self._events = deque(sorted(((e.received_ms or e.ts_ms, e) for e in events), key=lambda entry: entry[0]))
        self._since: list[tuple[int, tuple[Event, ...] | str]] = []  # events judged, and nodes that returned, meanwhile

    def add_bucket(self, bucket: Bucket) -> None:
        """Judge the next bucket, after the events that were judged before it."""
        self._add(bucket, fresh=True)

    def add_placement(self, bucket: Bucket) -> None:
        """Add a bucket without metric values: jobs and who reported, enough to attribute a job's errors.

        Lines that waited for others fall due with it; else the next event would report them again.
        """
        self._add(bucket, fresh=False)

    def _add(self, bucket: Bucket, fresh: bool) -> None:
        at_ms = bucket.end_ms + LAG_MS
        self._judge_events(at_ms)
        self.runner.add_bucket(bucket)
        self._note(self.runner.detect(self.runner.window(fresh), at_ms))

    def judged(self, now_ms: int, events: tuple[Event, ...]) -> None:
        """Note events that the other runner judges meanwhile."""
        self._since.append((now_ms, events))

    def returned(self, now_ms: int, node: str) -> None:
        """Note a node that comes back to service meanwhile."""
        self._since.append((now_ms, node))

    def finish(self) -> None:
        """Judge what is left, after the newest bucket."""
        self._judge_events(None)
        for at_ms, what in self._since:
            if isinstance(what, str):
                note_return(self.runner, what, at_ms)
            else:
                for event in what:
                    self._boots.note(event)
                self._note(self.runner.detect(self.runner.window(False, what), at_ms), reported=True)
        self._since.clear()
        # Lines of an earlier boot, or that waited when their node was booted, are history.
        self.missed = {
            key: f for key, f in self.missed.items() if f.node is None or not self._boots.since(f.node, f.ts_ms)
        }

    def _judge_events(self, before_ms: int | None) -> None:
        """Judge events up to a time, those in one call that came at one time, as live."""
        while self._events and (before_ms is None or self._events[0][0] <= before_ms):
            first_ms, event = self._events.popleft()
            together, newest_ms = [(first_ms, event)], first_ms
            while self._events and (before_ms is None or self._events[0][0] <= before_ms):
                if self._events[0][0] - first_ms > TOGETHER_MS:
                    break
                newest_ms, event = self._events.popleft()
                together.append((newest_ms, event))
            window = self.runner.window(False)
            for _, event in together:
                self._boots.note(event)
            judged = tuple(dealt_with(event, at_ms, self._back, window, self._boots) for at_ms, event in together)
            self._note(self.runner.detect(self.runner.window(False, judged), newest_ms))

    def _note(self, findings: Iterable[Finding], reported: bool = False) -> None:
        """Keep for the first bucket what has ended. `reported`: the other runner has reported these findings."""
        for finding in findings:
            key = finding.detector, finding.kind, self._subject_of(finding)
            if finding.cleared:
                self.over[key] = finding
                self.missed.pop(key, None)
                continue
            self.over.pop(key, None)
            if not reported and self._was_missed(finding):
                self.missed[key] = finding

    def _was_missed(self, finding: Finding) -> bool:
        """Return whether no incident shows a finding: its line was held when the former run stopped.

        Events of the last hour are read, and their incidents too, closed ones included.
        """
        if finding.detector not in (kernel.NAME, xid.NAME) or finding.severity is Severity.INFO:
            return False
        nodes, rank = {node for node, _ in finding.members}, SEVERITY_ORDER.index(finding.severity)
        return not any(
            finding.detector in i.detectors
            and SEVERITY_ORDER.index(i.severity) >= rank
            and not nodes.isdisjoint(node for node, _ in i.members)
            for i in self._known
        )


def note_return(runner: DetectorRunner, node: str, now_ms: int) -> None:
    """Note that a node is back in service: errors from now on are new ones."""
    state = runner.states.get(xid.NAME)
    if isinstance(state, XidState):
        back_in_service(state, node, now_ms, xid.BURST_GAP_MS)

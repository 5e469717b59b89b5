"""What detectors knew before a restart, built again out of what they saw: buckets and judged events, in order of time.

What they find there was told before the restart; only what ended meanwhile is news, and lines that were held then. Of
a large fleet this takes a while: it is done beside the senses that judge events already, a bucket at a time, and put in
their place at its end.
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
TOGETHER_MS = 1_000  # events of a restart: thousands one by one would each cost a look at all the others


class DetectorWarmup:
    """`hear` each bucket in order of time, then `finish`.

    Args:
        senses: new ones. incidents: that a former run left, those of the guard not among them.
        events: that were judged. back: nodes that are back in service -> their duty.
    Attributes:
        senses: what the detectors know. over: what ended in that time, by what it is about. missed: lines that waited
            for company when the former run stopped, and that no incident tells of.
    """

    def __init__(
        self,
        senses: DetectorRunner,
        incidents: Sequence[Incident],
        events: Iterable[Event],
        back: Mapping[str, NodeOutage],
        subject_of: Callable[[Finding], object],
    ) -> None:
        self.senses, self._subject_of = senses, subject_of
        self.over: dict[object, Finding] = {}
        self.missed: dict[object, Finding] = {}
        self._known = [i for i in incidents if not {kernel.NAME, xid.NAME}.isdisjoint(i.detectors)]
        for detector in DETECTORS:
            senses.states[detector.name] = detector.restored(incidents, senses.index, senses.started_ms)
        self._back, self._boots = back, Boots(senses.index)
        self._told = deque(sorted(((e.received_ms or e.ts_ms, e) for e in events), key=lambda entry: entry[0]))
        self._since: list[tuple[int, tuple[Event, ...] | str]] = []  # what was judged, and who came back, meanwhile

    def hear(self, bucket: Bucket) -> None:
        """The next bucket, after the events that were judged before it."""
        at_ms = bucket.end_ms + LAG_MS
        self._tell(at_ms)
        self.senses.hear(bucket)
        self._note(self.senses.detect(self.senses.window(True), at_ms))

    def place(self, bucket: Bucket) -> None:
        """The next bucket, of which only is known who held which GPU and who was heard: errors of a job are put down to
        one by it. Lines that waited for company fall due, or the next event would have them told again."""
        at_ms = bucket.end_ms + LAG_MS
        self._tell(at_ms)
        self.senses.hear(bucket)
        self._note(self.senses.detect(self.senses.window(False), at_ms))

    def judged(self, now_ms: int, events: tuple[Event, ...]) -> None:
        """Events that were judged while this is under way, by other senses."""
        self._since.append((now_ms, events))

    def returned(self, now_ms: int, node: str) -> None:
        """Likewise a node that came back to service."""
        self._since.append((now_ms, node))

    def finish(self) -> None:
        """After the newest bucket."""
        self._tell(None)
        for at_ms, what in self._since:
            if isinstance(what, str):
                back(self.senses, what, at_ms)
            else:  # told by those other senses
                for event in what:
                    self._boots.note(event)
                self._note(self.senses.detect(self.senses.window(False, what), at_ms), told=True)
        self._since.clear()
        # What was judged as history of an earlier boot, or waited when its node was booted, is none.
        self.missed = {
            key: f for key, f in self.missed.items() if f.node is None or not self._boots.since(f.node, f.ts_ms)
        }

    def _tell(self, before_ms: int | None) -> None:
        """Events up to a time, those together that came together, as they do live."""
        while self._told and (before_ms is None or self._told[0][0] <= before_ms):
            first_ms, event = self._told.popleft()
            together, newest_ms = [(first_ms, event)], first_ms
            while self._told and (before_ms is None or self._told[0][0] <= before_ms):
                if self._told[0][0] - first_ms > TOGETHER_MS:
                    break
                newest_ms, event = self._told.popleft()
                together.append((newest_ms, event))
            window = self.senses.window(False)
            for _, event in together:
                self._boots.note(event)
            judged = tuple(dealt_with(event, at_ms, self._back, window, self._boots) for at_ms, event in together)
            self._note(self.senses.detect(self.senses.window(False, judged), newest_ms))

    def _note(self, findings: Iterable[Finding], told: bool = False) -> None:
        """What ended in the time that a restart reads again: told with the first bucket, unless it began anew."""
        for finding in findings:
            key = finding.detector, finding.kind, self._subject_of(finding)
            if finding.cleared:
                self.over[key] = finding
                self.missed.pop(key, None)
                continue
            self.over.pop(key, None)
            if not told and self._was_missed(finding):
                self.missed[key] = finding

    def _was_missed(self, finding: Finding) -> bool:
        """Events are read for an hour back, and so are the incidents that came of them, closed ones too. So a line that
        none of these tells of was held when the former run stopped."""
        if finding.detector not in (kernel.NAME, xid.NAME) or finding.severity is Severity.INFO:
            return False
        nodes, rank = {node for node, _ in finding.members}, SEVERITY_ORDER.index(finding.severity)
        return not any(
            finding.detector in i.detectors
            and SEVERITY_ORDER.index(i.severity) >= rank
            and not nodes.isdisjoint(node for node, _ in i.members)
            for i in self._known
        )


def back(senses: DetectorRunner, node: str, now_ms: int) -> None:
    """A node is back in service: an error of it from now on is a new one."""
    state = senses.states.get(xid.NAME)
    if isinstance(state, XidState):
        back_in_service(state, node, now_ms, xid.BURST_GAP_MS)

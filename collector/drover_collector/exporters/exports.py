"""All exporters of one collector: builds them, hands them each new bucket, and ends them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence

from drover_collector.exporters.cloud_events import CloudEvents
from drover_collector.exporters.gpus import IdentityReader, LastXids
from drover_collector.exporters.otlp import Otlp
from drover_collector.exporters.page import FleetPage, make_pages
from drover_collector.exporters.records import (
    Once,
    Record,
    Refusals,
    of_action,
    of_audit,
    of_decision,
    of_event,
    of_incident,
)
from drover_collector.exporters.remote_write import RemoteWrite, Snapshot
from drover_collector.exporters.sending import Sender, SendStatus
from drover_collector.exporters.settings import ExportConfig
from drover_collector.exporters.syslog import Syslog
from drover_collector.fleet.buckets import BUCKET_MS, Bucket
from drover_collector.fleet.index import FleetIndex
from drover_collector.store.samples.entities import EntityRegistry
from drover_core.model.events import Action, Audit, Decision, Event, Incident

log = logging.getLogger(__name__)

LOOK_S = 1.0  # between looks for a new bucket
Newest = Callable[[], Bucket | None]


class Exports:
    """The exporters. `take_events` may be called from the event loop and returns at once.

    Raises (at construction):
        SettingsError: a file that the settings name cannot be used.
    """

    def __init__(self, config: ExportConfig, index: FleetIndex, registry: EntityRegistry) -> None:
        self._config, self._index, self._registry = config, index, registry
        self._xids = LastXids(index)
        self._writers = [RemoteWrite(entry, f"export.remote_write[{n}]") for n, entry in enumerate(config.remote_write)]
        self._otlp = [Otlp(entry, f"export.otlp[{n}]") for n, entry in enumerate(config.otlp)]
        self._logs = [Syslog(entry, f"export.syslog[{n}]") for n, entry in enumerate(config.syslog)]
        self._events = [CloudEvents(entry, f"export.cloud_events[{n}]") for n, entry in enumerate(config.cloud_events)]
        self._takers: list[RemoteWrite | Otlp] = [*self._writers, *self._otlp]  # of buckets
        self._refusals, self._once = Refusals(), Once()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def take_events(self, events: Sequence[Event]) -> None:
        """Take events that are stored."""
        self._xids.take(events)
        if self._otlp or self._events:
            self._log(map(of_event, events))

    def take_found(self, incidents: Sequence[Incident], decisions: Sequence[Decision]) -> None:
        """Take what detection found, when it is stored. From any thread."""
        if self._otlp or self._events:
            self._log(of_incident(i) for i in incidents if self._once.first("incident", i.id, i.version))
            self._log(of_decision(d) for d in decisions if self._once.first("decision", d.id, d.outcome))

    def take_actions(self, actions: Sequence[Action]) -> None:
        """Take actions that are stored, each once in each state. From any thread."""
        if self._otlp or self._events:
            self._log(of_action(a) for a in actions if self._once.first("action", a.id, a.state))

    def take_audit(self, lines: Sequence[Audit]) -> None:
        """Take lines of the audit that are stored. From any thread."""
        if self._logs or self._otlp or self._events:  # a line may be corrected: "approve (too late)"
            self._log(of_audit(line) for line in lines if self._once.first("audit", line.id, line.what))

    def take_refusal(self, identity: str, reason: str, text: str) -> None:
        """Take a peer that was refused, as `Gate` has it. From any thread."""
        if (self._logs or self._otlp or self._events) and (
            record := self._refusals.of(identity, reason, text)
        ) is not None:
            self._log([record])

    def _log(self, records: Iterable[Record]) -> None:
        for record in records:
            for receiver in self._logs:
                receiver.take(record)
            for events in self._events:
                events.take(record)
            for otlp in self._otlp:
                otlp.take_record(record)

    def pages(self, newest: Newest) -> dict[str, FleetPage]:
        """Return path -> page, of those that the settings ask for. `newest`: as for `FleetPage`."""
        return make_pages(self._config.page, newest, IdentityReader(self._index, self._registry), self._xids)

    def statuses(self) -> dict[str, SendStatus]:
        """Return the status of each exporter that sends, by its name."""
        return {sender.name: sender.status for sender in self._senders()}

    def _senders(self) -> list[Sender[Snapshot] | Sender[Record]]:
        found: list[Sender[Snapshot] | Sender[Record]] = [each.sender for each in self._writers]
        found += [sender for each in self._otlp for sender in each.senders]
        return [*found, *(each.sender for each in self._logs), *(each.sender for each in self._events)]

    def start(self, newest: Newest) -> None:
        """Send from now on. `newest`: the newest bucket that this collector judged; None: another one judges."""
        for sender in self._senders():
            sender.start()
        if not self._takers:
            return
        self._thread = threading.Thread(target=self._run, args=(newest,), name="export", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(LOOK_S * 3)
        for each in [*self._takers, *self._logs, *self._events]:
            each.close()

    def _run(self, newest: Newest) -> None:
        identities = IdentityReader(self._index, self._registry)
        sent_ms = [0] * len(self._takers)
        while not self._stopping.wait(LOOK_S):
            try:
                bucket = newest()
                due = [] if bucket is None else self._due(bucket, sent_ms)
                if bucket is None or not due:
                    continue
                known = identities.read(bucket)
            except Exception:  # a defect or a store that fails must not end the export for good
                log.exception("export: a bucket could not be taken")
                continue
            for number in due:
                sent_ms[number] = bucket.end_ms
                try:
                    self._takers[number].take(bucket, known, self._xids)
                except Exception:  # a defect of one must not keep the bucket from the others
                    log.exception("export: a bucket could not be taken by one exporter")

    def _due(self, bucket: Bucket, sent_ms: Sequence[int]) -> list[int]:
        """Return the writers to which this bucket goes. A clock that was set back starts the intervals again."""
        return [
            number
            for number, writer in enumerate(self._takers)
            if bucket.end_ms < sent_ms[number] - BUCKET_MS
            or bucket.end_ms - sent_ms[number] >= max(writer.interval_s * 1000, 1)
        ]

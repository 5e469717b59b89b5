"""What was told while the store could not keep it: kept in a file on the local disk until the store can.

Without it a crash in that time forgets what receivers were told, and an incident that is found anew under another id
leaves the first one open with them for ever. What such a file names at a start, and nobody knows a while later, is
ended. A thread of its own writes the file: a disk that hangs delays no alarm, and then all is as without it.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import threading
from collections.abc import Container, Iterable
from pathlib import Path

from drover_collector.notify.state import CLOSED, kind_of, told_by
from drover_collector.store import OutboxRow, Store
from drover_core.times import iso

log = logging.getLogger(__name__)

KNOWN_MS = 900_000  # after a start: what was open then has been found again by now
MOST = 10_000  # messages in the file: the newest
BECAUSE = "it was told while the store failed, and is not known since the restart; if it goes on it has another id"


class Unstored:
    """`note` and `saved` from any thread; `load` and `ends` ask the store.

    Args:
        path: the file; None: nothing is kept, as with a server's store and no folder for state.
    """

    def __init__(self, store: Store, path: Path | None) -> None:
        self._store, self._path = store, path
        self._rows: dict[str, OutboxRow] = {}
        self._of_before: dict[str, list[OutboxRow]] = {}  # incident -> what a former run told of it
        self._due_ms = 0
        self._changed = threading.Condition()
        self._version = self._written = 0  # of what the file is to hold, and of what it holds
        self._thread: threading.Thread | None = None

    def load(self, now_ms: int) -> None:
        """What a former run left is stored now; before what is pending is read from the store.

        Raises:
            StoreError.
        """
        rows = self._read()
        if rows:
            there = {row.id for row in self._store.outbox.of_incidents(*{row.incident_id for row in rows})}
            self._store.outbox.write([row for row in rows if row.id not in there])
            log.info("%d messages had been told while the store failed", len(rows))
        self._due_ms = now_ms + KNOWN_MS
        with self._changed:
            self._of_before.clear()
            for row in rows:
                self._of_before.setdefault(row.incident_id, []).append(row)

    def note(self, rows: Iterable[OutboxRow]) -> None:
        """These are told, and are not stored."""
        if self._path is None:
            return
        with self._changed:
            self._rows.update((row.id, row) for row in rows)
            for id_ in list(self._rows)[:-MOST]:
                del self._rows[id_]
            self._write_soon()

    def saved(self, ids: Iterable[str]) -> None:
        """The store has them."""
        with self._changed:
            if [id_ for id_ in ids if self._rows.pop(id_, None) is not None]:
                self._write_soon()

    def ends(self, known: Container[str], now_ms: int) -> list[OutboxRow]:
        """The ends of what nobody knows any more, to be stored and delivered, once.

        Args:
            known: ids of incidents.
        Raises:
            StoreError: call again.
        """
        if not self._of_before or now_ms < self._due_ms:
            return []
        made = []
        for incident in self._of_before:
            if incident in known:
                continue
            rows = self._store.outbox.of_incidents(incident)
            newest = {row.notifier: row for row in sorted(rows, key=lambda row: (row.created_ms, row.id))}
            for (_, name), told in told_by(rows).items():
                if not told.closed and not told.unsent:
                    made.append(_end(newest[name], now_ms))
        return made

    def ended(self, now_ms: int) -> None:
        """What `ends` gave at that moment is stored."""
        with self._changed:
            if self._of_before and now_ms >= self._due_ms:
                self._of_before.clear()
                self._write_soon()

    # ---- the file

    def _write_soon(self) -> None:
        """With the lock held."""
        self._version += 1
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="outbox-unstored", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def wait(self, seconds: float) -> bool:
        """Whether the file is as it should be; for tests, and a stop."""
        with self._changed:
            return self._changed.wait_for(lambda: self._version == self._written, seconds)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._version != self._written)
                version = self._version
                rows = [*(row for rows in self._of_before.values() for row in rows), *self._rows.values()]
            try:
                self._write(rows)
            except OSError as error:
                log.warning("%s: %s; after a crash what is told now may stay open with its receivers",
                            self._path, error.strerror)  # fmt: skip
            with self._changed:
                self._written = version  # also of a disk that fails: the next change tries again
                self._changed.notify_all()

    def _write(self, rows: list[OutboxRow]) -> None:
        assert self._path is not None
        if not rows:
            self._path.unlink(missing_ok=True)
            return
        new = self._path.with_suffix(".new")
        with new.open("w") as file:
            file.writelines(json.dumps(dataclasses.asdict(row)) + "\n" for row in rows)
            file.flush()
            os.fsync(file.fileno())
        new.replace(self._path)

    def _read(self) -> list[OutboxRow]:
        try:
            lines = [] if self._path is None else self._path.read_text("utf-8").splitlines()
        except FileNotFoundError:
            return []
        except OSError as error:
            log.warning("%s: %s; left as it is", self._path, error.strerror)
            return []
        rows = []
        for line in lines:
            try:
                rows.append(OutboxRow(**json.loads(line)))
                kind_of(rows[-1])
            except (ValueError, TypeError, KeyError):
                log.warning("%s: a line is none of ours: %r", self._path, line[:100])
        return rows


def _end(row: OutboxRow, now_ms: int) -> OutboxRow:
    body = json.loads(row.payload_json)
    body["type"], body["timestamp"] = CLOSED, iso(now_ms)
    body["data"].pop("news", None)
    body["data"] |= {"closed": iso(now_ms), "closed_because": BECAUSE}
    text = json.dumps(body, separators=(",", ":"), allow_nan=False)
    created_ms = max(now_ms, row.created_ms + 1)
    return OutboxRow(f"{row.id}_end", row.incident_id, row.notifier, text, created_ms, next_ms=now_ms)

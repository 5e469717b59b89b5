"""Keep messages that were sent while the store failed in a local file, until the store has them.

Without it a crash in that time forgets what receivers got, and an incident that is found again under another id leaves
the first one open at its receivers for ever. An incident in the file that is still unknown a while after a start gets
its end. A thread of its own writes the file, so that a disk that hangs delays no alarm.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import threading
from collections.abc import Container, Iterable
from pathlib import Path

from drover_collector.notify.state import CLOSED, kind_of, states_of
from drover_collector.store import OutboxRow, Store
from drover_core.times import iso

log = logging.getLogger(__name__)

SETTLE_MS = 900_000  # after a start: open incidents have been found again by then
MAX_MESSAGES = 10_000  # in the file: the newest
BECAUSE = "it was reported while the store failed and is unknown since the restart; if it goes on, it has another id"


class FallbackFile:
    """`add` and `forget` from any thread; `load` and `ends` ask the store.

    Args:
        path: None: nothing is kept, as with a database server and no state folder.
    """

    def __init__(self, store: Store, path: Path | None) -> None:
        self._store, self._path = store, path
        self._rows: dict[str, OutboxRow] = {}
        self._earlier: dict[str, list[OutboxRow]] = {}  # incident -> messages of an earlier run
        self._due_ms = 0
        self._changed = threading.Condition()
        self._version = self._written = 0  # of what the file should hold, and of what it holds
        self._thread: threading.Thread | None = None

    def load(self, now_ms: int) -> None:
        """Store what an earlier run left. Call this before pending messages are read from the store.

        Raises:
            StoreError.
        """
        rows = self._read()
        if rows:
            stored = {row.id for row in self._store.outbox.of_incidents(*{row.incident_id for row in rows})}
            self._store.outbox.write([row for row in rows if row.id not in stored])
            log.info("%d messages were sent while the store failed", len(rows))
        self._due_ms = now_ms + SETTLE_MS
        with self._changed:
            self._earlier.clear()
            for row in rows:
                self._earlier.setdefault(row.incident_id, []).append(row)

    def add(self, rows: Iterable[OutboxRow]) -> None:
        """Keep messages that are sent and not stored."""
        if self._path is None:
            return
        with self._changed:
            self._rows.update((row.id, row) for row in rows)
            for id_ in list(self._rows)[:-MAX_MESSAGES]:
                del self._rows[id_]
            self._write_soon()

    def forget(self, ids: Iterable[str]) -> None:
        """Remove messages that the store has now."""
        with self._changed:
            if [id_ for id_ in ids if self._rows.pop(id_, None) is not None]:
                self._write_soon()

    def ends(self, known: Container[str], now_ms: int) -> list[OutboxRow]:
        """Return the ends of incidents that nobody knows any longer, for the caller to store and deliver.

        Args:
            known: ids of known incidents.
        Raises:
            StoreError: call again.
        """
        if not self._earlier or now_ms < self._due_ms:
            return []
        made = []
        for incident in self._earlier:
            if incident in known:
                continue
            rows = self._store.outbox.of_incidents(incident)
            newest = {row.notifier: row for row in sorted(rows, key=lambda row: (row.created_ms, row.id))}
            for (_, name), state in states_of(rows).items():
                if not state.closed and not state.unsent:
                    made.append(_end(newest[name], now_ms))
        return made

    def finish_ends(self, now_ms: int) -> None:
        """Forget the earlier run: what `ends` returned is stored."""
        with self._changed:
            if self._earlier and now_ms >= self._due_ms:
                self._earlier.clear()
                self._write_soon()

    def _write_soon(self) -> None:
        """Have the file written. The caller holds the lock."""
        self._version += 1
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="outbox-unstored", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def wait(self, seconds: float) -> bool:
        """Wait until the file is written. Return whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: self._version == self._written, seconds)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._version != self._written)
                version = self._version
                rows = [*(row for rows in self._earlier.values() for row in rows), *self._rows.values()]
            try:
                self._write(rows)
            except OSError as error:
                log.warning("%s: %s; after a crash, incidents reported now may stay open at their receivers",
                            self._path, error.strerror)  # fmt: skip
            with self._changed:
                self._written = version  # also after an error: the next change tries again
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
            log.warning("%s: %s; the file is not read", self._path, error.strerror)
            return []
        rows = []
        for line in lines:
            try:
                rows.append(OutboxRow(**json.loads(line)))
                kind_of(rows[-1])
            except (ValueError, TypeError, KeyError):
                log.warning("%s: a line is not a stored message: %r", self._path, line[:100])
        return rows


def _end(row: OutboxRow, now_ms: int) -> OutboxRow:
    body = json.loads(row.payload_json)
    body["type"], body["timestamp"] = CLOSED, iso(now_ms)
    body["data"].pop("news", None)
    body["data"] |= {"closed": iso(now_ms), "closed_because": BECAUSE}
    text = json.dumps(body, separators=(",", ":"), allow_nan=False)
    created_ms = max(now_ms, row.created_ms + 1)
    return OutboxRow(f"{row.id}_end", row.incident_id, row.notifier, text, created_ms, next_ms=now_ms)

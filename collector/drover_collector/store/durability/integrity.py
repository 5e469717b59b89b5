"""Find damage to the files of an embedded store, report it, and set it aside, while the rest stays in use.

The engine keeps each insert and each merge in a folder of its own, a part, with checksums of its files. At its start it
checks sizes and names, and sets aside what does not fit (`detached/broken-on-start_...`). What only a read finds,
such as flipped bits, fails the read with the part's path: that part is checked and set aside, and the read is repeated.
Failed merges are seen in the engine's error counts. Nothing is ever deleted.
"""

from __future__ import annotations

import contextlib
import logging
import math
import re
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from drover_collector.store.clickhouse.client import Clients
from drover_collector.store.durability import damaged_parts
from drover_collector.store.durability.verify_insert import whole
from drover_collector.store.errors import StoreError
from drover_collector.store.schema import ddl_copies as definitions
from drover_core.times import iso

log = logging.getLogger(__name__)

PARTITION_MS = 4 * 3_600_000
YEAR_2200_MS = 7_258_118_400_000
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
CHECK_EVERY_S = 10.0  # how often the engine's error counts are checked
RESEND_MS = (
    900_000  # agents keep acknowledged data for 10 minutes, and a batch may be some minutes old when it is acknowledged
)
CHECK_BYTES = 256 << 20  # larger parts are checked only when a read or a merge fails on them
CHECK_BYTES_PER_S = 20 << 20
RECENT_S = 10
REST = 4  # pause before the next check, as a multiple of what the last one took
SHORTEST_REST_S = 0.5
# A part's folder: the table's UUID, then partition, first and last insert, level and perhaps mutation.
_NAME = re.compile(r"[0-9a-z-]+(?:_\d+){3,4}")
_PART = re.compile(rf"([0-9a-f]{{8}}(?:-[0-9a-f]{{4}}){{3}}-[0-9a-f]{{12}})/({_NAME.pattern})/")


@dataclass(frozen=True, slots=True)
class Damage:
    """A part or a definition that was set aside."""

    table: str
    path: Path  # where it is now
    from_ms: int | None  # times of its rows, if known: [from_ms, to_ms]
    to_ms: int | None
    written_ms: int  # when its files were written; 0: there are none

    @property
    def sentence(self) -> str:
        if self.from_ms is not None and self.to_ms is not None:
            span = f"from {iso(self.from_ms)} to {iso(self.to_ms)}"
        else:
            span = f"written before {iso(self.written_ms)}" if self.written_ms else "of unknown time"
        return (
            f"The store is damaged: table {self.table}, rows {span}, were set aside in {self.path};"
            " everything else can be read. Check the disk, restore a backup if you need them, and move the folder away."
        )


class Integrity:
    """Watches an embedded store in a thread of its own, from `start` on."""

    def __init__(self, clients: Clients, path: Path, database: str) -> None:
        self._clients = clients.apart()
        self._path = path
        self._boot = path / f"boot-{database}"  # boot id of the machine when the store was opened last
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._found: tuple[Damage, ...] = ()
        self._checked: set[str] = set()  # parts, by table and name
        self._merged: set[str] = set()  # paths of merged parts that were complete
        self._set_aside_s = -math.inf  # monotonic, when a part was set aside last
        self._seen = 0  # when the engine's errors were checked, seconds
        self._unreported: list[Damage] = []
        self._report: Callable[[Damage], None] | None = None

    @property
    def damages(self) -> tuple[Damage, ...]:
        """What is set aside, as of the last check; the newest last."""
        return self._found

    def check_set_aside(self) -> tuple[Damage, ...]:
        """Check what is set aside now, and report what is new.

        Raises:
            StoreError
        """
        rows = self._clients.rows(
            "SELECT table, name, partition_id, path FROM system.detached_parts WHERE database = currentDatabase()"
        )
        found = [
            _damage(row["table"], row["name"], Path(row["path"]))
            for row in rows
            if not str(row["name"]).startswith(("covered-by-broken", "tmp", "attaching", "deleting"))
        ]
        found += [
            Damage(file.name.split(".")[0], file, None, None, _written_ms(file))
            for file in definitions.replaced(self._path)
        ]
        known = {damage.path for damage in self._found}
        self._found = tuple(sorted(found, key=lambda damage: damage.written_ms))
        for damage in self._found:
            if damage.path not in known:
                log.error("%s", damage.sentence)
                if _is_new(damage.path):
                    self._unreported.append(damage)
        self._send_reports()
        return self._found

    def _send_reports(self) -> None:
        try:
            while self._unreported and self._report is not None:
                self._report(self._unreported[0])
                self._unreported.pop(0)
        except StoreError as error:
            log.warning("store: rollups that damage affects are not marked yet: %s", error)

    def lost(self, now_ms: int) -> bool:
        """Return whether data may be lost that agents still have.

        That is damage to data that was written last, or the restart of a machine that may not have written everything
        to its disk, which no file shows.
        """
        boot = _boot()
        with contextlib.suppress(OSError):
            if boot and self._boot.read_text("ascii") not in ("", boot):
                log.info("store: the machine was restarted; agents are asked to send again what they still have")
                return True
        return any(now_ms - damage.written_ms < RESEND_MS for damage in self._found)

    def note_boot(self) -> None:
        """Note this boot of the machine, after agents are asked for lost data."""
        with contextlib.suppress(OSError):  # a full disk: agents are asked again at the next start
            definitions.write_whole(self._boot, _boot().encode())

    def set_aside(self, error: str) -> bool:
        """Set aside the damaged parts that an error of the engine names.

        A result may also be cut off without a reason; then the newest of the engine's errors has it.

        Returns:
            Whether to repeat what failed.
        """
        with self._lock:
            try:
                messages = [error] if _PART.search(error) else self._errors(int(time.time()) - RECENT_S)
                found = sum(self._part_of(text) for text in messages)
                # Otherwise another thread, which met the same part, may have set it aside.
                return found > 0 or time.monotonic() < self._set_aside_s + RECENT_S
            except StoreError as failure:
                log.error("store: the part that failed cannot be checked: %s", failure)
                return False

    def _errors(self, since_s: int) -> list[str]:
        """Return the messages of the engine's newest errors that name a part."""
        rows = self._clients.rows(
            "SELECT last_error_message AS message FROM system.errors"
            f" WHERE toUnixTimestamp(last_error_time) >= {since_s}"
        )
        return [row["message"] for row in rows if _PART.search(row["message"])]

    def _part_of(self, error: str) -> bool:
        """Check the part that an error names. Return whether it is not in use now."""
        found = _PART.search(error)
        if found is None:
            return False
        rows = self._clients.rows(
            "SELECT table FROM system.parts WHERE active AND database = currentDatabase()"
            f" AND name = '{found[2]}' AND table IN (SELECT name FROM system.tables"
            f" WHERE database = currentDatabase() AND toString(uuid) = '{found[1]}')"
        )
        return not rows or self._check(rows[0]["table"], found[2])  # none: it was merged or set aside in between

    def report_to(self, report: Callable[[Damage], None]) -> None:
        """Call `report` with each part that is set aside from now on, again if it raises StoreError."""
        self._report = report
        self.check_set_aside()

    def start(self) -> None:
        """Start to watch."""
        self._thread = threading.Thread(target=self._run, name="store-integrity", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
        self._clients.close()

    def _run(self) -> None:
        unchecked: Iterator[float] = iter(())
        next_check_s = 0.0
        while not self._stopping.is_set():
            pause = CHECK_EVERY_S
            try:
                if time.monotonic() >= next_check_s:
                    next_check_s = time.monotonic() + CHECK_EVERY_S
                    self._check_errors()
                    self._check_merged()
                    self.check_set_aside()
                took = next(unchecked, None)
                if took is None:
                    unchecked = self._check_all()
                else:
                    pause = min(max(took * REST, SHORTEST_REST_S), CHECK_EVERY_S)
            except StoreError as error:
                if not self._stopping.is_set():
                    log.warning("store: its files were not checked: %s", error)
            except Exception:  # a defect or a folder that cannot be read must not end this thread
                log.exception("store: its files were not checked")
            self._stopping.wait(pause)

    def _check_errors(self) -> None:
        """Check the engine's errors, which are the only sign of a failed merge."""
        now = int(time.time())
        for text in self._errors(self._seen):
            self.set_aside(text)
        self._seen = now

    def _check_merged(self) -> None:
        """Check merged parts, which are cut off if the disk was full; their sources are kept for eight minutes."""
        rows = self._clients.rows(
            "SELECT table, name, path FROM system.parts WHERE active AND level > 0 AND database = currentDatabase()"
        )
        for row in rows:
            if row["path"] not in self._merged and not whole(Path(row["path"])):
                with self._lock:
                    self._check(row["table"], row["name"])
        for table, folder in {(row["table"], Path(row["path"]).parent) for row in rows}:
            if damaged_parts.waiting(folder):
                damaged_parts.clear(self._clients, table)
        self._merged = {row["path"] for row in rows}

    def _check_all(self) -> Iterator[float]:
        """Check each small part once, the newest first, as a crash damages these. Yield the seconds taken."""
        rows = self._clients.rows(
            "SELECT table, name FROM system.parts WHERE active AND database = currentDatabase()"
            f" AND bytes_on_disk < {CHECK_BYTES} AND modification_time < now() - 60 ORDER BY modification_time DESC"
        )
        names = {f"{row['table']} {row['name']}" for row in rows}
        self._checked &= names
        for row in rows:
            name = f"{row['table']} {row['name']}"
            if name not in self._checked:
                started = time.monotonic()
                with self._lock:
                    self._check(row["table"], row["name"])
                self._checked.add(name)
                yield time.monotonic() - started

    def _check(self, table: str, part: str) -> bool:
        """Check a part, and set it aside if it is damaged. Return whether it was."""
        try:
            rows = self._clients.rows(
                f"CHECK TABLE `{table}` PART '{part}' SETTINGS check_query_single_value_result = 0, max_threads = 1,"
                f" max_local_read_bandwidth = {CHECK_BYTES_PER_S}"
            )
        except StoreError as error:
            if "NO_SUCH_DATA_PART" in str(error):  # merged in between
                return True
            raise
        bad = [row for row in rows if not row["is_passed"]]
        if not bad:
            return False
        log.error("store: part %s of table %s is damaged: %s", part, table, str(bad[0]["message"]).split(": ", 2)[-1])
        damaged_parts.clear(self._clients, table, part)
        self._set_aside_s = time.monotonic()
        self.check_set_aside()
        return True


def _boot() -> str:
    """Return an id that changes with each start of the machine; empty: not known."""
    try:
        return BOOT_ID.read_text("ascii").strip()
    except OSError:
        return ""


def _damage(table: str, name: str, path: Path) -> Damage:
    return Damage(table, path, *span_of(path, name), _written_ms(path))


def span_of(path: Path, name: str) -> tuple[int | None, int | None]:
    """Return the first and last time of the rows of a part with this name, from its files; None: not known."""
    part = _NAME.search(name.rpartition("broken-on-start_")[2])
    return _span(path, part[0].split("_")[0] if part is not None else "")


def _span(path: Path, partition: str) -> tuple[int | None, int | None]:
    """Return the first and last time of a part's rows, from its index of times, else from its partition."""
    begin, end = 0, YEAR_2200_MS
    if re.fullmatch(r"\d{10}", partition):  # seconds, see `tables.PARTITION`
        begin = int(partition) * 1000
        end = begin + PARTITION_MS
    with contextlib.suppress(OSError, struct.error):
        low, high = struct.unpack("<qq", (path / "minmax_ts.idx").read_bytes())
        if begin <= low <= high < end and high > 0:
            return low, high
    return (begin, end - 1) if begin else (None, None)


def _is_new(path: Path) -> bool:
    try:
        return path.stat().st_ctime > time.time() - RESEND_MS / 1000
    except OSError:
        return False


def _written_ms(path: Path) -> int:
    try:
        files = [path] if path.is_file() else list(path.iterdir())
        return max((int(file.stat().st_mtime * 1000) for file in files), default=0)
    except OSError:
        return 0

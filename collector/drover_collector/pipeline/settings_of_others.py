"""Compare the settings of collectors that write to one store, where a difference makes Drover act otherwise.

Their clocks are compared too: rows of agents come late where one is ahead.

Each collector notes its own in the store every minute, and says in its troubles (`drover status`, `drover doctor`)
where another's differ. A table `[[scrape]]` belongs to one collector, so it is no difference when others lack it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import logging
import time
from collections.abc import Callable, Mapping, MutableMapping

from drover_collector.config import CollectorConfig
from drover_collector.store import Store, StoreError

log = logging.getLogger(__name__)

EVERY_S = 60.0
FRESH_MS = 180_000  # a collector that wrote nothing for so long is gone
CLOCK_MS = 5_000  # clocks that differ by more are reported
NAMED = 4  # differences in one sentence
PAGES = "scrape."  # so begin the keys of tables of pages; their value is a digest
REMEDY = "Give all collectors of one store the same tables, or a standby that takes over acts otherwise"


def settings_of(config: CollectorConfig) -> dict[str, str]:
    """Return the settings that are compared: key -> value, as text."""
    found = {"act.mode": json.dumps(config.act.mode)}
    for table, entry in (("rest.remote_write", config.rest.remote_write), ("rest.otlp", config.rest.otlp)):
        for field in dataclasses.fields(entry):
            found[f"{table}.{field.name}"] = json.dumps(getattr(entry, field.name))
    for name in ("remote_write", "otlp", "syslog", "cloud_events"):  # names alone: an address may be a secret
        found[f"export.{name}"] = json.dumps(sorted(entry.name for entry in getattr(config.export, name)))
    for scrape in config.scrape:
        whose = {key: value for key, value in dataclasses.asdict(scrape).items() if key in ("targets", "file_sd")}
        digest = hashlib.blake2b(json.dumps([scrape.exporter, whose]).encode(), digest_size=8).hexdigest()
        found[f"{PAGES}{scrape.name}"] = digest
    return found


def differences(own: Mapping[str, str], others: Mapping[str, Mapping[str, str]]) -> str:
    """Return a sentence for the operator; "" where the collectors go together.

    Args:
        others: collector -> its settings. A key that one of two lacks is of another version, and not compared.
    """
    parts = []
    for name, theirs in sorted(others.items()):
        parts += [
            f"{key} is {own[key]} here and {theirs[key]} on {name}"
            for key in sorted(own.keys() & theirs.keys())
            if not key.startswith(PAGES) and own[key] != theirs[key]
        ]
    if parts:
        more = f"; and {len(parts) - NAMED} more" if len(parts) > NAMED else ""
        return f"Collectors of this store have different settings: {'; '.join(parts[:NAMED])}{more}. {REMEDY}."
    mine = {value: key.removeprefix(PAGES) for key, value in own.items() if key.startswith(PAGES)}
    for name, theirs in sorted(others.items()):
        for key, value in sorted(theirs.items()):
            if key.startswith(PAGES) and value in mine:
                return (
                    f"The pages of [[scrape]] {mine[value]!r} are read by {name} too: every value is stored twice."
                    " Give the table to one of the two."
                )
    return ""


class ClocksOfOthers:
    """Compares clocks by when other collectors wrote last: between two looks here, so their times are between these."""

    def __init__(self) -> None:
        self._looked_ms = 0
        self._written: dict[str, tuple[int, int]] = {}  # collector -> its own time, and the time here when it was read
        self._off_ms: dict[str, int] = {}  # collector -> how far its clock is ahead of the clock here, at least

    def compare(self, written: Mapping[str, int], began_ms: int, now_ms: int) -> str:
        """Return a sentence for the operator; "" where no clock is known to differ.

        Args:
            written: collector -> the time of what it wrote last, by its own clock.
            began_ms: when this look began, by the clock here. now_ms: when `written` was read: a store may be slow.
        """
        for name, at_ms in written.items():
            before = self._written.get(name)
            if before is not None and before[0] == at_ms:
                if now_ms - before[1] > FRESH_MS:
                    self._off_ms.pop(name, None)  # it is gone
                continue
            self._written[name] = at_ms, now_ms
            if before is not None:
                self._off_ms[name] = at_ms - min(max(at_ms, self._looked_ms), now_ms)
        self._looked_ms = began_ms
        off = {name: ms for name, ms in self._off_ms.items() if abs(ms) > CLOCK_MS}
        if not off:
            return ""
        name = max(off, key=lambda each: abs(off[each]))
        where = "ahead of" if off[name] > 0 else "behind"
        return (
            f"The clock of {name} is {abs(off[name]) / 1000:.0f} s or more {where} the clock here. Set both by NTP"
            " (chrony): until then rows of agents come late to one of the two, and their nodes are unknown to it."
        )


class SettingsOfOthers:
    """Run `run` until cancelled. Does nothing where the store has one collector.

    Args:
        name: of this collector, which no other has.
        troubles: gets a sentence under "settings".
    """

    def __init__(
        self, store: Store, name: str, settings: Mapping[str, str], troubles: MutableMapping[str, str],
        now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:  # fmt: skip
        self._store, self._name, self._settings, self._troubles = store, name, settings, troubles
        self._now_ms, self._clocks = now_ms, ClocksOfOthers()

    async def run(self) -> None:
        while self._store.shared:
            try:
                found = await asyncio.to_thread(self.compare)
            except StoreError as error:  # ingest reports it: it writes to the same store
                log.info("settings of other collectors cannot be compared: %s", error)
            else:
                self._note(found)
            await asyncio.sleep(EVERY_S)

    def compare(self) -> str:
        """Note this collector's settings, and return what differs: clocks first.

        Raises:
            StoreError: the store does not answer.
        """
        now_ms = self._now_ms()
        self._store.collectors.write(self._name, now_ms, self._settings)
        written = self._store.collectors.written_ms()
        written.pop(self._name, None)
        clocks = self._clocks.compare(written, now_ms, self._now_ms())
        others = self._store.collectors.newest(now_ms - FRESH_MS)
        others.pop(self._name, None)
        return " ".join(filter(None, (clocks, differences(self._settings, others))))

    def _note(self, found: str) -> None:
        if not found:
            self._troubles.pop("settings", None)
            return
        if self._troubles.get("settings") != found:
            log.warning("%s", found)
        self._troubles["settings"] = found

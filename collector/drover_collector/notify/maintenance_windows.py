"""Read the maintenance windows of the settings: every week at the same local time. Pure.

While a window is open, nobody is notified of incidents on its nodes and no action is taken on them. Incidents are still
found, stored and shown, and those that are open when the window closes are notified then.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from drover_core.model.events import Silence
from drover_core.model.fleet import FleetSpec
from drover_core.settings import (
    SettingsError,
    between,
    required,
    setting,
)
from drover_core.times import iso

DAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
PLACES = ("node", "rack", "leaf", "pool")
MOST_HOURS = 72.0


def _days(values: tuple[str, ...]) -> str | None:
    wrong = [value for value in values if value not in DAYS]
    return f"{wrong[0]!r} is not one of {', '.join(DAYS)}" if wrong else None if values else "name at least one day"


def _start(value: str) -> str | None:
    return None if re.fullmatch(r"([01]\d|2[0-3]):[0-5]\d", value) else "must be a time of day such as 02:30"


def _zone(value: str) -> str | None:
    try:
        ZoneInfo(value)
    except (ZoneInfoNotFoundError, ValueError, OSError):  # OSError: the name of a folder of zones
        return "is not a time zone of this machine; write one such as Europe/Berlin or UTC"
    return None


def _name(value: Any) -> str | None:
    return None if re.fullmatch(r"[A-Za-z0-9_-]{1,64}", value) else "must be 1 to 64 letters, digits, - and _"


@dataclass(frozen=True)
class MaintenanceConfig:
    name: str = required("its name, shown where something is held back", _name)
    why: str = required("what work is planned, shown in the same places")
    days: tuple[str, ...] = required(f"on which days it begins: {', '.join(DAYS)}", _days)
    start: str = required("local time of its beginning, HH:MM", _start)
    hours: float = required("how long it lasts", between(0.1, MOST_HOURS))
    time_zone: str = setting("UTC", "of `days` and `start`, such as Europe/Berlin", _zone)
    node: tuple[str, ...] = setting((), "these nodes")
    rack: tuple[str, ...] = setting((), "nodes of these racks; a node must match every key that is set")
    leaf: tuple[str, ...] = setting((), "nodes of these leaf switches")
    pool: tuple[str, ...] = setting((), "nodes of these pools")

    def open_at(self, now_ms: int) -> Silence | None:
        """Return the silence of the window that is open then, with another id each week; None: it is closed."""
        zone = ZoneInfo(self.time_zone)
        today = datetime.fromtimestamp(now_ms / 1000, zone).date()
        hour, minute = int(self.start[:2]), int(self.start[3:])
        for back in range(int(MOST_HOURS // 24) + 2):
            day = today - timedelta(days=back)
            if DAYS[day.weekday()] not in self.days:
                continue
            begins = datetime(day.year, day.month, day.day, hour, minute, tzinfo=zone).astimezone(UTC)
            from_ms = round(begins.timestamp() * 1000)
            until_ms = from_ms + round(self.hours * 3_600_000)
            if from_ms <= now_ms < until_ms:
                return Silence(
                    f"{self.name}-{iso(from_ms)[:16]}", from_ms, from_ms, until_ms, f"maintenance {self.name}",
                    self.why, self.node, (), self.rack, self.leaf, self.pool, maintenance=True,
                )  # fmt: skip
        return None


def validate_windows(windows: Sequence[MaintenanceConfig]) -> None:
    """Check the windows by themselves.

    Raises:
        SettingsError: a window without a place or a reason, or two of one name.
    """
    for number, window in enumerate(windows):
        if not any(getattr(window, key) for key in PLACES):
            raise SettingsError(f"maintenance[{number}]: say where: give {', '.join(PLACES[:-1])} or {PLACES[-1]}")
        if not window.why.strip():
            raise SettingsError(f"maintenance[{number}].why: is empty; say what work is planned")
        if window.name in [other.name for other in windows[:number]]:
            raise SettingsError(
                f"maintenance[{number}].name: {window.name!r} is there twice; give each window its own name"
            )


def validate_window_places(windows: Sequence[MaintenanceConfig], spec: FleetSpec) -> None:
    """Check the windows against the fleet file.

    Raises:
        SettingsError: a place that the fleet file does not have, so that the window would protect nothing.
    """
    for number, window in enumerate(windows):
        if wrong := unknown_place(spec, {key: getattr(window, key) for key in PLACES}):
            raise SettingsError(f"maintenance[{number}].{wrong[0]}: {wrong[1]!r} is not in the fleet file")


def unknown_place(spec: FleetSpec, places: dict[str, Sequence[str]]) -> tuple[str, str] | None:
    """Return key and value of the first node, rack, leaf or pool that the fleet file does not have."""
    for key, values in places.items():
        known = {node.name if key == "node" else getattr(node, key) for node in spec.nodes}
        for value in values:
            if not value or value not in known:
                return key, value
    return None

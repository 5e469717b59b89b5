"""Inlet temperature and fans: from hwmon where the board has a driver (Documentation/hwmon/sysfs-interface), else by
IPMI (`ipmi.py`). The BMC is asked once a minute; between, what it said last stands, since air and fans change slowly.
"""

from __future__ import annotations

import re
from pathlib import Path

from drover_agent.sources.base import Entity, Reading
from drover_agent.sources.host.files import KeptFile, text_of
from drover_agent.sources.host.ipmi import Ipmi
from drover_core.metrics.catalog import Absent, Scope

METRICS = ("inlet_temp_c", "fan_min_rpm", "fans_failed")
FIND_MS = 60_000


class SensorsSource:
    """One row for the node every ten seconds."""

    name = "sensors"
    interval_s = 10.0

    def __init__(self, node: str, sys: Path = Path("/sys"), ipmi: Ipmi | None = None) -> None:
        self._entity = Entity(Scope.NODE, node)
        self._hwmon = sys / "class/hwmon"
        self._ipmi = ipmi or Ipmi()
        self._found = -1
        self._inlet: KeptFile | None = None
        self._fans: list[tuple[KeptFile, list[KeptFile]]] = []  # (speed, its alarms)

    def read(self, now_ms: int) -> Reading:
        if now_ms // FIND_MS != self._found:
            self._found = now_ms // FIND_MS
            self._find()
        values, wrong = self._read_hwmon()
        if len(values) + len(wrong) < len(METRICS):
            self._ipmi.look()
        reading = Reading()
        for name in METRICS:
            if name not in values and name not in wrong:
                if name in self._ipmi.values:
                    values[name] = self._ipmi.values[name]
                else:
                    wrong[name] = self._ipmi.reason
        if values:
            reading.rows.append((self._entity, values))
        reading.inventory["sensors.trouble"] = self._ipmi.trouble
        reading.absent = [(self._entity, name, why) for name, why in wrong.items()]
        return reading

    def close(self) -> None:
        self._ipmi.close()
        self._forget()

    def _forget(self) -> None:
        for file in (self._inlet, *(file for speed, alarms in self._fans for file in (speed, *alarms))):
            if file is not None:
                file.close()
        self._inlet, self._fans = None, []

    def _find(self) -> None:
        """Which sensors there are."""
        self._forget()
        for label in sorted(self._hwmon.glob("hwmon*/temp*_label")):
            try:
                text = text_of(label).lower()
            except OSError:
                continue
            if "inlet" in text or "ambient" in text:
                self._inlet = KeptFile(label.with_name(label.name.replace("_label", "_input")))
                break
        for speed in sorted(self._hwmon.glob("hwmon*/fan*_input")):
            if number := re.fullmatch(r"fan(\d+)_input", speed.name):
                alarms = (speed.with_name(f"fan{number[1]}_{kind}") for kind in ("fault", "alarm", "min_alarm"))
                self._fans.append((KeptFile(speed), [KeptFile(path) for path in alarms if path.exists()]))

    def _read_hwmon(self) -> tuple[dict[str, float], dict[str, Absent]]:
        """Values, and what is there and cannot be read."""
        values: dict[str, float] = {}
        wrong: dict[str, Absent] = {}
        if self._inlet:
            try:
                values["inlet_temp_c"] = int(self._inlet.head(64)) / 1000
            except (OSError, ValueError) as error:
                wrong["inlet_temp_c"] = _why(error)
        speeds, failed, has_alarms = [], 0, False
        for speed, alarms in self._fans:
            try:
                bad = any(int(alarm.head(16)) for alarm in alarms)
                rpm = int(speed.head(64))
            except (OSError, ValueError) as error:
                wrong["fan_min_rpm"] = wrong["fans_failed"] = _why(error)
                return values, wrong
            has_alarms = has_alarms or bool(alarms)
            failed += bad
            if rpm > 0 or bad:  # 0 of a fan that nobody complains of: nothing is plugged in
                speeds.append(rpm)
        if speeds:
            values["fan_min_rpm"] = float(min(speeds))
        if has_alarms:
            values["fans_failed"] = float(failed)
        return values, wrong


def _why(error: Exception) -> Absent:
    return Absent.NO_PERMISSION if isinstance(error, PermissionError) else Absent.ERROR

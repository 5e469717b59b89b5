"""Inlet temperature and fans as the board's BMC reports them, by ipmitool(1) or ipmi-sensors(8) where one is installed.

The program runs by itself at a slow pace and never blocks a tick: a BMC takes seconds, and some never answer.
Formats: ipmitool lib/ipmi_sdr.c (`-c sdr list full`: name,value,unit,status; status is ok, nc, cr, nr or ns),
FreeIPMI ipmi-sensors/ipmi-sensors-simple-output.c (ID,name,type,state,reading,units,event).
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import math
import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, NamedTuple

from drover_core.metrics.catalog import Absent

log = logging.getLogger(__name__)

EVERY_S = 60.0
LIMIT_S = 30.0  # ipmitool waits 15 s for one answer of a slow BMC
FIRST_WAIT_S = (
    2.0  # the first time it is worth to wait, so that `once` has something to show; less than a read may take
)
MAX_OUTPUT = 262_144  # bytes; what a program writes lies in the agent's memory
DEVICES = ("ipmi0", "ipmi/0", "ipmidev/0")
COMMANDS: Mapping[str, tuple[str, ...]] = {
    "ipmitool": ("-c", "sdr", "list", "full"),
    "ipmi-sensors": (
        "--sensor-types=Temperature,Fan",
        "--comma-separated-output",
        "--no-header-output",
        "--output-sensor-state",
        "--sdr-cache-directory=/tmp",  # its own place is the home folder, which a service has not
    ),
}

# "Inlet Temp" (Dell, Supermicro), "01-Inlet Ambient" (HPE), "Ambient Temp" (Lenovo), "TEMP_AMBIENT" (DGX)
_INLET = (re.compile(r"inlet", re.I), re.compile(r"ambient|\bamb\b", re.I))
_ELSEWHERE = re.compile(
    r"psu|(?<![a-z])ps ?\d|pdb|power|cpu|gpu|dimm|(?<![a-z])nic|hdd|ssd|ocp|pcie|exhaust|outlet|exit"
    r"|water|coolant|liquid|(?<![a-z])cdu",  # 40 degC and more by design: no air
    re.I,
)
_FAN = re.compile(r"fan|tach|blower|cooling", re.I)


class Sensor(NamedTuple):
    """One line: `value` None where the BMC gave none; `state` as ok, warning, failed or "" for no reading."""

    name: str
    value: float | None
    unit: str
    state: str


_STATES = {"ok": "ok", "nc": "warning", "cr": "failed", "nr": "failed"}
_STATES |= {"nominal": "ok", "warning": "warning", "critical": "failed"}


def sensors(text: str) -> list[Sensor]:
    """The sensors in the output of either program; lines that are something else are left out."""
    found = []
    for line in text.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) >= 7 and fields[0].isdigit():  # FreeIPMI
            name, kind, state, value, unit = fields[1:6]
            if kind not in ("Temperature", "Fan"):
                continue
        elif len(fields) >= 4:
            name, value, unit, state = fields[:4]
        else:
            continue
        try:
            number = float(value)
        except ValueError:
            number = None
        if number is not None and not math.isfinite(number):
            number = None
        found.append(Sensor(name, number, unit, _STATES.get(state.lower(), "")))
    return found


def values_of(found: Sequence[Sensor]) -> dict[str, float]:
    """Catalog values. A fan that stands still and is said to be well (a power supply's that rests, an empty place) is
    not the slowest fan."""
    values: dict[str, float] = {}
    degrees = [s for s in found if s.unit in ("degrees C", "C") and s.value is not None and s.state]
    for pattern in _INLET:
        here = [s.value for s in degrees if pattern.search(s.name) and not _ELSEWHERE.search(s.name)]
        if here and here[0] is not None:
            values["inlet_temp_c"] = here[0]
            break
    fans = [s for s in found if s.state and (s.unit == "RPM" or (s.unit in ("percent", "%") and _FAN.search(s.name)))]
    if fans:
        values["fans_failed"] = float(sum(fan.state == "failed" for fan in fans))
    turning = [
        s.value for s in fans if s.unit == "RPM" and s.value is not None and (s.value > 0 or s.state == "failed")
    ]
    if turning:
        values["fan_min_rpm"] = min(turning)
    return values


def _program(name: str, path: str) -> str | None:
    """Where a program is. Not shutil's, whose import brings three compressors into the agent's memory."""
    places = (os.path.join(folder, name) for folder in path.split(os.pathsep) if folder)  # noqa: PTH118  # strings
    return next((place for place in places if os.access(place, os.X_OK)), None)


def _bounded_file(size: int) -> IO[bytes]:
    """A file in memory that takes `size` bytes: a program that writes more gets an error (memfd_create(2), sealing)."""
    descriptor = os.memfd_create("ipmi", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
    return os.fdopen(descriptor, "rb")


class Ipmi:
    """What the BMC said last, and why it says nothing."""

    def __init__(self, dev: Path = Path("/dev"), *, path: str | None = None, limit_s: float = LIMIT_S) -> None:
        """`path`: where programs are looked for, $PATH unless given."""
        self._dev, self._limit_s = dev, limit_s
        self._path = os.environ.get("PATH", os.defpath) if path is None else path
        self._process: subprocess.Popen[bytes] | None = None
        self._output: IO[bytes] | None = None
        self._started_s = -EVERY_S
        self.trouble = ""  # why it says nothing, in words; "" where there is no BMC
        self._first = True
        self.values: dict[str, float] = {}
        self.reason = Absent.UNSUPPORTED  # of what is not in `values`

    @property
    def running(self) -> bool:
        """Whether its program has not answered yet."""
        return self._process is not None

    def look(self) -> None:
        """Take what the program gave; begin it when it is time. Waits only the first time, for FIRST_WAIT_S."""
        if self._process is None and time.monotonic() - self._started_s >= EVERY_S:
            self._begin()
        if self._process is None:
            return
        if self._first:
            self._first = False
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(min(FIRST_WAIT_S, self._limit_s))
        code = self._process.poll()
        if code is not None:
            self._end(code)
        elif time.monotonic() - self._started_s > self._limit_s:
            self._kill()
            self._fail(Absent.TIMEOUT, f"no answer within {self._limit_s:g} s")

    def close(self) -> None:
        if self._process is not None:
            self._kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(1.0)
            self._process = None
        if self._output is not None:
            self._output.close()
            self._output = None

    def _begin(self) -> None:
        self._started_s = time.monotonic()
        device = next((path for path in (self._dev / name for name in DEVICES) if path.exists()), None)
        if device is None:
            self.values, self.reason, self.trouble = {}, Absent.UNSUPPORTED, ""
            return None
        if not os.access(device, os.R_OK | os.W_OK):
            return self._fail(Absent.NO_PERMISSION, f"{device} may not be opened; give the agent's group access to it")
        command = next(
            ([found, *options] for name, options in COMMANDS.items() if (found := _program(name, self._path))),
            None,
        )
        if command is None:
            return self._fail(Absent.UNSUPPORTED, "neither ipmitool nor ipmi-sensors is installed")
        self._output = _bounded_file(MAX_OUTPUT)
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={"LC_ALL": "C", "PATH": os.environ.get("PATH", "")},
            )
        except OSError as error:
            self._output.close()
            self._output = None
            self._fail(Absent.ERROR, f"{command[0]}: {error.strerror}")
        return None

    def _end(self, code: int) -> None:
        assert self._output is not None
        descriptor = self._output.fileno()
        written = os.lseek(descriptor, 0, os.SEEK_CUR)  # the program's own position
        text = os.pread(descriptor, min(written, MAX_OUTPUT), 0).decode("utf-8", "replace")
        self._output.close()
        self._process = self._output = None
        if self.reason is Absent.TIMEOUT and code == -signal.SIGKILL:
            return
        found = sensors(text)
        if not found:
            last = (text.strip().splitlines() or ["it wrote nothing"])[-1]
            self._fail(Absent.ERROR, f"the BMC could not be asked (status {code}): {last[:200]}")
            return
        self.values, self.reason, self.trouble = values_of(found), Absent.UNSUPPORTED, ""

    def _kill(self) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _fail(self, reason: Absent, why: str) -> None:
        self.values, self.reason = {}, reason
        if why != self.trouble:
            self.trouble = why
            log.warning("no fans and inlet temperature by IPMI: %s", why)

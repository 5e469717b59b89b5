"""Ports of network cards as sysfs reports them: what InfiniBand and Ethernet have in common.

Files are kept open and read again with pread: sysfs makes the text of an attribute again for every read at offset 0
(kernel: fs/seq_file.c, seq_read_iter). Measured on Linux 6.18: 3 us a value, against 17 us for open, read and close.
A file of a device that has gone answers ENODEV, also when another one of its name is there.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from drover_agent.sources.base import Entity, Reading
from drover_core.metrics.catalog import Absent, Scope, of_scope

SLOW_MS = 10_000  # error counters are read once in each of these, in its first tick: one value per detector bucket
FAST = frozenset({"link_up", "rate_gbps", "rx_bytes", "tx_bytes"})
QUICK = FAST - {"rate_gbps"}  # of a port that stays up: its rate changes with a new start of the link, and once in 10 s
LINK_METRICS = {metric.name: metric for metric in of_scope(Scope.LINK)}

_log = logging.getLogger(__name__)

_MAX_TEXT = 256  # a number, a state or a rate: an attribute may have a page, those read here have a short line
_UNSUPPORTED = {errno.ENOENT, errno.ENOTDIR, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS}
_GONE = {errno.ENODEV, errno.ENXIO}


class UnsupportedError(Exception):
    """The device has no such value."""


class OutOfRangeError(Exception):
    """What the device says cannot be true."""


class LinkFile:
    """One attribute, kept open."""

    __slots__ = ("_fd", "_parse", "_text", "_value", "path")

    def __init__(self, path: Path, parse: Callable[[str], float]) -> None:
        self.path = str(path)
        self._parse = parse
        self._fd = -1
        self._text = b""  # that `_value` was parsed of: most files say the same for long
        self._value = 0.0

    def read(self) -> float:
        """Its value now.

        Raises:
            OSError: FileNotFoundError where there is none, ENODEV when its device has gone, or what the driver says.
            UnsupportedError, OutOfRangeError, ValueError: what `parse` makes of its text.
        """
        return self._value_of(self._read())

    def read_open(self) -> float:
        """The same of a file that was read before and is open still, by no more than one system call.

        Raises:
            OSError, UnsupportedError, OutOfRangeError, ValueError: `read` meets it again.
        """
        return self._value_of(os.pread(self._fd, _MAX_TEXT, 0))

    def _value_of(self, text: bytes) -> float:
        if text != self._text:
            self._text = b""
            self._value = self._parse(text.decode("ascii", "replace"))
            self._text = text
        elif not text:
            raise ValueError("it is empty")
        return self._value

    def _read(self) -> bytes:
        if self._fd >= 0:
            try:
                return os.pread(self._fd, _MAX_TEXT, 0)
            except OSError as error:
                self.close()
                if error.errno not in _GONE | {errno.EINVAL}:
                    raise
        # The first time, or the device behind the descriptor went: perhaps its driver was loaded again.
        self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.pread(self._fd, _MAX_TEXT, 0)
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


# Where a metric may be, below the folder of a port, and how the text there becomes a number in our unit.
Place = tuple[str, Callable[[str], float]]


class Port:
    """One port: its files, and what they say."""

    def __init__(self, node: str, name: str, folder: Path, places: Mapping[str, Sequence[Place]]) -> None:
        """`places`: metric -> its places, and the first that exists counts; other metrics are unsupported."""
        self.entity = Entity(Scope.LINK, f"{node}/{name}", link=name)
        self.lost = False
        self._folder = folder
        self._files = {
            metric: [LinkFile(folder / path, parse) for path, parse in some] for metric, some in places.items()
        }
        self._unsupported: set[str] = set()  # of those asked in each tick: asked again in slow ticks only
        self._sources: dict[str, LinkFile] = {}  # metric -> the file that gave it last
        self._quick: tuple[tuple[str, LinkFile, float, float], ...] = ()  # metric, file, range: of a port that stays up
        self._logged: set[tuple[str, str]] = set()

    def read(self, reading: Reading, *, slow: bool) -> None:
        """Add this port's row to `reading`; all is absent as lost once the device has gone."""
        if not slow and self._quick and (well := self._read_quickly()):
            reading.rows.append((self.entity, well))
            return None
        found: dict[str, float] = {}
        absent: dict[str, Absent] = {}
        # A port that just came back reports everything, so that no counter stays lost until the next slow tick.
        slow = slow or self.lost
        if slow:
            self._unsupported.clear()
        self._quick = ()
        asked = LINK_METRICS if slow else FAST - self._unsupported
        for metric in asked:
            why = self._read_one(metric, found)
            if why is None:
                continue
            if why is Absent.LOST:
                return self._gone(reading)
            if why is Absent.UNSUPPORTED:
                self._unsupported.add(metric)
            absent[metric] = why
        self.lost = False
        if found.get("link_up") == 0 and "rate_gbps" not in absent:
            # A port that is not active has no rate: of InfiniBand that is down the kernel reports the lowest there is.
            found.pop("rate_gbps", None)
            absent["rate_gbps"] = Absent.UNSUPPORTED
        if found:
            reading.rows.append((self.entity, found))
        reading.absent += [(self.entity, metric, why) for metric, why in absent.items()]
        quick = FAST - self._unsupported
        if found.get("link_up") and quick <= found.keys():
            self._quick = tuple(
                (name, self._sources[name], known.low, known.high)
                for name, known in LINK_METRICS.items()
                if name in quick & QUICK
            )
        return None

    def _read_quickly(self) -> dict[str, float]:
        """Read what each tick asks of a port that was up and gave all of it; nothing once it no longer does.
        8 ports are 24 values a second."""
        found: dict[str, float] = {}
        try:
            for metric, file, low, high in self._quick:
                value = file.read_open()
                if not low <= value <= high:
                    return {}
                found[metric] = value
        except (OSError, ValueError, UnsupportedError, OutOfRangeError):
            return {}
        return found if found["link_up"] else {}

    def _read_one(self, metric: str, found: dict[str, float]) -> Absent | None:
        why = Absent.UNSUPPORTED
        for file in self._files.get(metric, ()):
            try:
                value = file.read()
            except OSError as error:
                why = self._why(error, file.path)
                if why is not Absent.UNSUPPORTED:
                    return why
            except UnsupportedError:
                continue
            except OutOfRangeError as error:
                self._log_once(file.path, str(error))
                return Absent.OUT_OF_RANGE
            except ValueError as error:
                self._log_once(file.path, f"not understood: {error}")
                return Absent.ERROR
            else:
                known = LINK_METRICS[metric]
                if known.low <= value <= known.high:
                    found[metric] = value
                    self._sources[metric] = file
                    return None
                return Absent.OUT_OF_RANGE
        return why

    def _why(self, error: OSError, path: str) -> Absent:
        if error.errno in _GONE:
            return Absent.LOST
        if error.errno in _UNSUPPORTED:
            return Absent.UNSUPPORTED if self._folder.exists() else Absent.LOST
        self._log_once(path, error.strerror or str(error))
        if isinstance(error, PermissionError):
            return Absent.NO_PERMISSION
        return Absent.TIMEOUT if error.errno == errno.ETIMEDOUT else Absent.ERROR

    def _gone(self, reading: Reading) -> None:
        if not self.lost:
            _log.warning("port %s has gone", self.entity.link)
            self.close()
        self.lost, self._quick = True, ()
        reading.absent += [(self.entity, metric, Absent.LOST) for metric in LINK_METRICS]

    def _log_once(self, path: str, text: str) -> None:
        if (path, text) not in self._logged:
            self._logged.add((path, text))
            _log.warning("port %s: %s: %s", self.entity.link, path, text)

    def close(self) -> None:
        for files in self._files.values():
            for file in files:
                file.close()


def count(text: str) -> float:
    """A plain counter.

    Raises:
        UnsupportedError, ValueError: it says that there is none ("N/A (no PMA)"), or something that is no number.
    """
    if text.startswith("N/A"):
        raise UnsupportedError
    return float(int(text))


def line(path: Path) -> str:
    """The first line of a file, "" where there is none to be had."""
    try:
        return path.read_text("ascii", "replace").strip().partition("\n")[0]
    except OSError:
        return ""


def pci_of(device: Path) -> str:
    """The PCI address of `.../device`, "" for other buses."""
    name = os.path.realpath(device).rpartition("/")[2] if device.exists() else ""
    return name if name.count(":") == 2 else ""


def driver_of(device: Path) -> str:
    link = device / "driver"
    return os.path.realpath(link).rpartition("/")[2] if link.exists() else ""


def is_virtual_function(device: Path) -> bool:
    """Whether this is an SR-IOV virtual function, on the machine that has its physical one too."""
    return (device / "physfn").exists()


def names_in(folder: Path) -> list[str]:
    """Sorted; none where there is no such folder.

    Raises:
        OSError: it is there and cannot be read.
    """
    try:
        return sorted(os.listdir(folder))  # noqa: PTH208  # names only, each tick: no objects for them
    except (FileNotFoundError, NotADirectoryError):
        return []


def read_ports(ports: Iterable[Port], *, slow: bool) -> Reading:
    reading = Reading()
    for port in ports:
        port.read(reading, slow=slow)
    return reading

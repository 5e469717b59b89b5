"""The node itself: load, memory, disks, network, temperatures and the kernel's error counters.

procfs and sysfs are read directly: their roots are parameters (a test points at a folder), and a handful of small reads
each second costs less than psutil's generality. What is told of the agent's own process is of this one, whatever root
is read: CPU time out of getrusage(2), memory out of /proc/self/statm (proc(5)).
"""

from __future__ import annotations

import os
import platform
import resource
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from drover_agent.sources.base import Entity, Reading
from drover_proto.catalog import Absent, Scope

SLOW_MS = 10_000  # counters that need many files, read once in each of these: one value per detector bucket
SECTOR = 512  # bytes per sector in /proc/diskstats, whatever the disk's own sector size

Values = dict[str, float]


class MissingError(Exception):
    """This node does not have what is asked; not a failure."""


class HostSource:
    """One row per tick for the node. Rates need two readings, so the first one lacks them."""

    name = "host"
    interval_s = 1.0

    def __init__(self, node: str, proc: Path = Path("/proc"), sys: Path = Path("/sys"), root: Path = Path("/")) -> None:
        self._entity = Entity(Scope.NODE, node)
        self._proc, self._sys, self._root = proc, sys, root
        self._disk_names: dict[str, bool] = {}  # name in diskstats -> whether it is a whole disk
        self._before: dict[str, tuple[float, int]] = {}  # counter -> (value, ts_ms) at the last reading
        self._counts: dict[str, tuple[Mapping[str, int], int]] = {}  # counter -> (device -> value, ts_ms) likewise
        self._slow_done = -1
        self._inventory_told = False
        # metrics -> how to read them; each fails by itself
        self._fast: tuple[tuple[tuple[str, ...], Callable[[int], Values]], ...] = (
            (("cpu_util_ratio",), self._cpu),
            (("load1",), self._load),
            (("memory_available_bytes", "memory_total_bytes"), self._memory),
            (("disk_read_bytes_per_s", "disk_write_bytes_per_s"), self._disks),
            (("net_rx_bytes_per_s", "net_tx_bytes_per_s"), self._network),
            (("agent_cpu_ratio", "agent_rss_bytes"), self._self),
        )
        self._slow: tuple[tuple[tuple[str, ...], Callable[[int], Values]], ...] = (
            (("root_used_ratio",), self._root_disk),
            (("inlet_temp_c",), self._inlet),
            (("pcie_aer_correctable",), lambda _: self._aer("correctable", "TOTAL_ERR_COR", "pcie_aer_correctable")),
            (("pcie_aer_fatal",), lambda _: self._aer("fatal", "TOTAL_ERR_FATAL", "pcie_aer_fatal")),
            (("edac_corrected",), lambda _: self._edac("ce_count", "edac_corrected")),
            (("edac_uncorrected",), lambda _: self._edac("ue_count", "edac_uncorrected")),
            (("oom_kills",), self._oom),
        )

    def read(self, now_ms: int) -> Reading:
        reading = Reading()
        row: Values = {}
        slow = now_ms // SLOW_MS != self._slow_done
        self._slow_done = now_ms // SLOW_MS
        if slow:
            self._disk_names.clear()  # a disk may have come, or another one got the name
        for names, read in (*self._fast, *(self._slow if slow else ())):
            try:
                row |= read(now_ms)
            except (OSError, ValueError, IndexError, KeyError, MissingError) as error:
                reason = _reason(error)
                reading.absent += [(self._entity, name, reason) for name in names]
        reading.rows.append((self._entity, row))
        if not self._inventory_told:
            self._inventory_told = True
            reading.inventory = self._inventory()
        return reading

    def close(self) -> None:
        """Nothing is held open."""

    def _rate(self, key: str, value: float, now_ms: int) -> float | None:
        """Per second since the last reading; None at the first one and after a counter began again."""
        before = self._before.get(key)
        self._before[key] = value, now_ms
        if before is None or now_ms <= before[1] or value < before[0]:
            return None
        return (value - before[0]) / ((now_ms - before[1]) / 1000)

    def _rates(self, key: str, counts: Mapping[str, int], now_ms: int) -> float | None:
        """The sum of the rates of all devices that were there before and did not begin again: the total of their
        counters would jump whenever one comes or goes. None when there is none such.

        Raises:
            MissingError: there is no device at all.
        """
        if not counts:
            raise MissingError
        before, since_ms = self._counts.get(key, ({}, now_ms))
        self._counts[key] = counts, now_ms
        grown = [count - before[name] for name, count in counts.items() if count >= before.get(name, count + 1)]
        return sum(grown) / ((now_ms - since_ms) / 1000) if grown and now_ms > since_ms else None

    def _cpu(self, now_ms: int) -> Values:
        user_to_steal = [int(x) for x in _text(self._proc / "stat").split("\n", 1)[0].split()[1:9]]
        idle = user_to_steal[3] + user_to_steal[4]
        busy = self._rate("cpu busy", sum(user_to_steal) - idle, now_ms)
        resting = self._rate("cpu idle", idle, now_ms)
        if busy is None or resting is None or busy + resting == 0:
            return {}
        return {"cpu_util_ratio": busy / (busy + resting)}

    def _load(self, _: int) -> Values:
        return {"load1": float(_text(self._proc / "loadavg").split()[0])}

    def _memory(self, _: int) -> Values:
        text = _text(self._proc / "meminfo")
        found = {}
        for name, key in (("memory_available_bytes", "MemAvailable:"), ("memory_total_bytes", "MemTotal:")):
            found[name] = float(text[text.index(key) + len(key) :].split(None, 1)[0]) * 1024
        return found

    def _disks(self, now_ms: int) -> Values:
        """Whole disks only: partitions, RAID and device mapper would count the same bytes again."""
        read: dict[str, int] = {}
        written: dict[str, int] = {}
        for line in _text(self._proc / "diskstats").splitlines():
            columns = line.split()
            name = columns[2]
            if name not in self._disk_names:
                self._disk_names[name] = (self._sys / "block" / name.replace("/", "!") / "device").exists()
            if self._disk_names[name]:
                read[name] = int(columns[5]) * SECTOR
                written[name] = int(columns[9]) * SECTOR
        return _present(
            disk_read_bytes_per_s=self._rates("disk read", read, now_ms),
            disk_write_bytes_per_s=self._rates("disk write", written, now_ms),
        )

    def _network(self, now_ms: int) -> Values:
        received: dict[str, int] = {}
        sent: dict[str, int] = {}
        for line in _text(self._proc / "net/dev").splitlines()[2:]:
            name, _, rest = line.partition(":")
            if name.strip() != "lo":
                columns = rest.split()
                received[name], sent[name] = int(columns[0]), int(columns[8])
        return _present(
            net_rx_bytes_per_s=self._rates("net received", received, now_ms),
            net_tx_bytes_per_s=self._rates("net sent", sent, now_ms),
        )

    def _self(self, now_ms: int) -> Values:
        spent = resource.getrusage(resource.RUSAGE_SELF)
        cores = self._rate("agent cpu", spent.ru_utime + spent.ru_stime, now_ms)
        pages = int(_text(Path("/proc/self/statm")).split()[1])
        return _present(agent_cpu_ratio=cores, agent_rss_bytes=float(pages * resource.getpagesize()))

    def _root_disk(self, _: int) -> Values:
        """As df shows it: blocks kept for root count as neither used nor free."""
        found = os.statvfs(self._root)
        used = found.f_blocks - found.f_bfree
        if used + found.f_bavail == 0:
            raise MissingError
        return {"root_used_ratio": used / (used + found.f_bavail)}

    def _inlet(self, _: int) -> Values:
        """The first sensor that calls itself inlet or ambient, in millidegrees."""
        for label in sorted(self._sys.glob("class/hwmon/hwmon*/temp*_label")):
            text = _text(label).lower()
            if "inlet" in text or "ambient" in text:
                value = _text(label.with_name(label.name.replace("_label", "_input")))
                return {"inlet_temp_c": int(value) / 1000}
        raise MissingError

    def _aer(self, file: str, total: str, metric: str) -> Values:
        counts = [
            int(line.split()[1])
            for path in self._sys.glob(f"bus/pci/devices/*/aer_dev_{file}")
            for line in _text(path).splitlines()
            if line.startswith(total)
        ]
        return {metric: _sum(counts)}

    def _edac(self, file: str, metric: str) -> Values:
        return {metric: _sum(int(_text(path)) for path in self._sys.glob(f"devices/system/edac/mc/mc[0-9]*/{file}"))}

    def _oom(self, _: int) -> Values:
        for line in _text(self._proc / "vmstat").splitlines():
            if line.startswith("oom_kill "):
                return {"oom_kills": float(line.split()[1])}
        raise MissingError

    def _inventory(self) -> dict[str, str]:
        found = {"kernel": platform.release(), "arch": platform.machine(), "cpus": str(os.cpu_count() or 0)}
        try:
            found["os"] = platform.freedesktop_os_release().get("PRETTY_NAME", "")
        except OSError:
            found["os"] = platform.system()
        return found


def _text(path: Path) -> str:
    with open(path, "rb", 0) as file:  # noqa: PTH123  # a buffer and a decoder around each file cost more than the read
        return file.read().decode("ascii", "replace")


def _sum(counts: Iterable[int]) -> float:
    """Raises MissingError when there is nothing to count: no error counter is not the same as no error."""
    found = list(counts)
    if not found:
        raise MissingError
    return float(sum(found))


def _present(**values: float | None) -> Values:
    return {name: value for name, value in values.items() if value is not None}


def _reason(error: Exception) -> Absent:
    if isinstance(error, MissingError | FileNotFoundError | NotADirectoryError):
        return Absent.UNSUPPORTED
    return Absent.NO_PERMISSION if isinstance(error, PermissionError) else Absent.ERROR

"""The node itself: load, memory, disks, network and the kernel's error counters. Its sensors: `sensors.py`.

procfs and sysfs are read directly: their roots are parameters (a test points at a folder), and a handful of small reads
each second costs less than psutil's generality. Which devices there are is looked at each FIND_MS; their files are
kept open. The agent's own use is that of this process, whatever root is read: CPU time out of getrusage(2),
memory out of /proc/self/statm (proc(5)).
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from drover_agent.sources.base import Entity, Reading
from drover_agent.sources.host.files import KeptFile, KeptFiles
from drover_agent.sources.host.inventory import inventory
from drover_core.metrics.catalog import Absent, Scope

SLOW_MS = 10_000  # counters that need many files, read once in each of these: one value per detector bucket
FIND_MS = 60_000  # devices that came or went are noticed within this
SECTOR = 512  # bytes per sector in /proc/diskstats, whatever the disk's own sector size

# One path of several to an NVMe drive (kernel: drivers/nvme/host/multipath.c). The drive itself is nvme0n1, whose own
# counters stand at 0 before Linux 6.4.
_NVME_PATH = re.compile(r"(nvme\d+)c\d+(n\d+)$")

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
        self._kept = {name: KeptFile(proc / name) for name in ("stat", "loadavg", "meminfo", "diskstats", "vmstat")}
        self._statm = KeptFile(Path("/proc/self/statm"))
        self._counters = {name: KeptFiles() for name in ("rx_bytes", "tx_bytes", "correctable", "fatal", "ce", "ue")}
        self._disk_names: dict[str, bool] = {}  # name in diskstats -> whether it is a whole disk
        self._before: dict[str, tuple[float, int]] = {}  # counter -> (value, ts_ms) at the last reading
        self._counts: dict[
            str, tuple[Mapping[str, int], int]
        ] = {}  # counter -> (device -> value, ts_ms); at the last reading
        self._slow_done = self._found = -1
        self._inventory_sent = False
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
            (("pcie_aer_correctable",), lambda _: self._aer("correctable", "TOTAL_ERR_COR", "pcie_aer_correctable")),
            (("pcie_aer_fatal",), lambda _: self._aer("fatal", "TOTAL_ERR_FATAL", "pcie_aer_fatal")),
            (("edac_corrected",), lambda _: self._edac("ce", "edac_corrected")),
            (("edac_uncorrected",), lambda _: self._edac("ue", "edac_uncorrected")),
            (("oom_kills",), self._oom),
        )

    def read(self, now_ms: int) -> Reading:
        reading = Reading()
        row: Values = {}
        slow = now_ms // SLOW_MS != self._slow_done
        self._slow_done = now_ms // SLOW_MS
        if slow:
            self._disk_names.clear()  # a disk may have come, or another one got the name
        if now_ms // FIND_MS != self._found:
            self._found = now_ms // FIND_MS
            self._find()
        for names, read in (*self._fast, *(self._slow if slow else ())):
            try:
                row |= read(now_ms)
            except (OSError, ValueError, IndexError, KeyError, MissingError) as error:
                reason = _reason(error)
                reading.absent += [(self._entity, name, reason) for name in names]
        reading.rows.append((self._entity, row))
        if not self._inventory_sent:
            self._inventory_sent = True
            reading.inventory = inventory(self._proc, self._sys, self._root)
        return reading

    def close(self) -> None:
        for file in (*self._kept.values(), self._statm):
            file.close()
        for files in self._counters.values():
            files.close()

    def _find(self) -> None:
        """Which devices there are."""
        net = self._sys / "class/net"
        cards = [net / name for name in _names(net) if self._is_card(net / name)]
        for counter in ("rx_bytes", "tx_bytes"):
            self._counters[counter].keep(card / "statistics" / counter for card in cards)
        devices = self._sys / "bus/pci/devices"
        for kind in ("correctable", "fatal"):
            paths = (devices / name / f"aer_dev_{kind}" for name in _names(devices))
            self._counters[kind].keep(path for path in paths if path.exists())
        memory = self._sys / "devices/system/edac/mc"
        controllers = [memory / name for name in _names(memory) if re.fullmatch(r"mc\d+", name)]
        for kind in ("ce", "ue"):
            self._counters[kind].keep(controller / f"{kind}_count" for controller in controllers)

    def _is_card(self, folder: Path) -> bool:
        """Whether bytes are counted here and nowhere else: a card, not a bridge, bond, tunnel or a container's end; not
        a virtual function or a port of a switch in a card (kernel: networking/switchdev.rst), whose physical port is
        here; nor the card behind another one, which counts for both (Hyper-V: networking/device_drivers/.../netvsc)."""
        if not (folder / "device").exists() or (folder / "device/physfn").exists():
            return False
        if (folder / "master/device").exists():
            return False
        try:
            return not KeptFile(folder / "phys_port_name").head(64).startswith("pf")
        except OSError:
            return True

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
            MissingError: there is no device.
        """
        if not counts:
            raise MissingError
        before, since_ms = self._counts.get(key, ({}, now_ms))
        self._counts[key] = counts, now_ms
        grown = [count - before[name] for name, count in counts.items() if count >= before.get(name, count + 1)]
        return sum(grown) / ((now_ms - since_ms) / 1000) if grown and now_ms > since_ms else None

    def _cpu(self, now_ms: int) -> Values:
        user_to_steal = [int(x) for x in self._kept["stat"].head(512).split("\n", 1)[0].split()[1:9]]
        idle = user_to_steal[3] + user_to_steal[4]
        busy = self._rate("cpu busy", sum(user_to_steal) - idle, now_ms)
        resting = self._rate("cpu idle", idle, now_ms)
        if busy is None or resting is None or busy + resting == 0:
            return {}
        return {"cpu_util_ratio": busy / (busy + resting)}

    def _load(self, _: int) -> Values:
        return {"load1": float(self._kept["loadavg"].head(256).split()[0])}

    def _memory(self, _: int) -> Values:
        text = self._kept["meminfo"].head(512)
        found = {}
        for name, key in (("memory_available_bytes", "MemAvailable:"), ("memory_total_bytes", "MemTotal:")):
            found[name] = float(text[text.index(key) + len(key) :].split(None, 1)[0]) * 1024
        return found

    def _disks(self, now_ms: int) -> Values:
        """Whole disks only: partitions, RAID and device mapper would count the same bytes again."""
        read: dict[str, int] = {}
        written: dict[str, int] = {}
        paths: dict[str, tuple[int, int]] = {}
        # A disk is one record with all its partitions (kernel: block/genhd.c, diskstats_show): with a dozen, 2 kB.
        for line in self._kept["diskstats"].text(long_records=True).splitlines():
            columns = line.split(None, 10)
            name = columns[2]
            if path := _NVME_PATH.match(name):
                drive = path[1] + path[2]
                before = paths.get(drive, (0, 0))
                paths[drive] = before[0] + int(columns[5]) * SECTOR, before[1] + int(columns[9]) * SECTOR
                continue
            if name not in self._disk_names:
                self._disk_names[name] = (self._sys / "block" / name.replace("/", "!") / "device").exists()
            if self._disk_names[name]:
                read[name] = int(columns[5]) * SECTOR
                written[name] = int(columns[9]) * SECTOR
        for name, (path_read, path_written) in paths.items():
            read[name] = max(read.get(name, 0), path_read)
            written[name] = max(written.get(name, 0), path_written)
        return _present(
            disk_read_bytes_per_s=self._rates("disk read", read, now_ms),
            disk_write_bytes_per_s=self._rates("disk write", written, now_ms),
        )

    def _network(self, now_ms: int) -> Values:
        """What goes over the node's own cards: sysfs shows the network namespace that it was mounted in, the host's."""
        return _present(
            net_rx_bytes_per_s=self._rates("net received", self._bytes("rx_bytes"), now_ms),
            net_tx_bytes_per_s=self._rates("net sent", self._bytes("tx_bytes"), now_ms),
        )

    def _bytes(self, counter: str) -> dict[str, int]:
        found = {}
        for file in self._counters[counter].all():
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # it has gone since
                found[file.path] = int(file.head(64))
        return found

    def _self(self, now_ms: int) -> Values:
        spent = resource.getrusage(resource.RUSAGE_SELF)
        cores = self._rate("agent cpu", spent.ru_utime + spent.ru_stime, now_ms)
        pages = int(self._statm.head(256).split()[1])
        return _present(agent_cpu_ratio=cores, agent_rss_bytes=float(pages * resource.getpagesize()))

    def _root_disk(self, _: int) -> Values:
        """As df shows it: blocks kept for root count as neither used nor free. A read-only image is always full."""
        found = os.statvfs(self._root)
        used = found.f_blocks - found.f_bfree
        if used + found.f_bavail == 0 or found.f_flag & os.ST_RDONLY:
            raise MissingError
        return {"root_used_ratio": used / (used + found.f_bavail)}

    def _aer(self, kind: str, total: str, metric: str) -> Values:
        counts = []
        for file in self._counters[kind].all():
            with contextlib.suppress(FileNotFoundError):  # the device has gone, as one does that falls off the bus
                counts += [int(line.split()[1]) for line in file.head(4096).splitlines() if line.startswith(total)]
        return {metric: _sum(counts)}

    def _edac(self, kind: str, metric: str) -> Values:
        return {metric: _sum(int(file.head(64)) for file in self._counters[kind].all())}

    def _oom(self, _: int) -> Values:
        for line in self._kept["vmstat"].text().splitlines():
            if line.startswith("oom_kill "):
                return {"oom_kills": float(line.split()[1])}
        raise MissingError


def _names(folder: Path) -> list[str]:
    """What is in a folder; nothing where there is none."""
    try:
        return sorted(os.listdir(folder))  # noqa: PTH208  # names are wanted, not paths: this folder may hold hundreds
    except (FileNotFoundError, NotADirectoryError):
        return []


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

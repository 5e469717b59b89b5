"""The host source on folders that stand for /proc and /sys."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from pathlib import Path

import pytest

from drover_agent.polled_sources import POLLED
from drover_agent.sources.base import Reading
from drover_agent.sources.host.files import KeptFile
from drover_agent.sources.host.source import HostSource
from drover_core.metrics.catalog import Absent, Scope, of_scope

T = 1_800_000_000_000


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def traffic(root: Path, card: str, received: int, sent: int) -> None:
    write(root, f"sys/class/net/{card}/device/vendor", "0x15b3\n")
    write(root, f"sys/class/net/{card}/statistics/rx_bytes", f"{received}\n")
    write(root, f"sys/class/net/{card}/statistics/tx_bytes", f"{sent}\n")


@pytest.fixture
def node(tmp_path: Path) -> Path:
    """A machine with two CPUs, a disk with a partition and RAID on it, two cards, error counters."""
    proc, sys = tmp_path / "proc", tmp_path / "sys"
    write(proc, "stat", "cpu  100 5 50 800 40 1 2 2 9 0\ncpu0 0 0 0 0\n")
    write(proc, "loadavg", "3.25 2.00 1.00 5/900 4242\n")
    write(proc, "meminfo", "MemTotal:       2000000 kB\nMemFree:         500 kB\nMemAvailable:    750000 kB\n")
    write(
        proc,
        "diskstats",
        " 259 0 nvme0n1 10 0 1000 0 20 0 2000 0 0 0 0\n 259 1 nvme0n1p1 9 0 999 0 9 0 999 0 0 0 0\n"
        " 9 0 md0 1 0 77777 0 1 0 77777 0 0 0 0\n",
    )
    traffic(tmp_path, "eth0", 100, 200)
    traffic(tmp_path, "ib0", 10, 20)
    write(proc, "vmstat", "nr_free_pages 1\noom_kill 3\n")
    write(sys, "block/nvme0n1/device/model", "disk\n")
    write(sys, "block/md0/md/level", "raid1\n")
    for address, corrected, fatal in (("0000:3b:00.0", 7, 1), ("0000:86:00.0", 4, 0)):
        folder = f"bus/pci/devices/{address}"
        write(sys, f"{folder}/aer_dev_correctable", f"RxErr 1\nBadTLP 2\nTOTAL_ERR_COR {corrected}\n")
        write(sys, f"{folder}/aer_dev_fatal", f"Undefined 0\nTOTAL_ERR_FATAL {fatal}\n")
    for number in (0, 1):
        write(sys, f"devices/system/edac/mc/mc{number}/ce_count", f"{10 + number}\n")
        write(sys, f"devices/system/edac/mc/mc{number}/ue_count", f"{number}\n")
    return tmp_path


def source(node: Path) -> HostSource:
    return HostSource("n1", node / "proc", node / "sys", node)


def values(reading: Reading) -> dict[str, float]:
    [(entity, row)] = reading.rows
    assert (entity.scope, entity.key) == (Scope.NODE, "n1")
    return dict(row)


def test_every_value_arrives_in_its_own_metric_and_unit(node: Path) -> None:
    host = source(node)
    first = values(host.read(T))
    assert "cpu_util_ratio" not in first  # a rate needs two readings; unknown is not zero
    write(node, "proc/stat", "cpu  160 5 70 900 60 1 2 2 9 0\n")
    write(
        node, "proc/diskstats", " 259 0 nvme0n1 10 0 1100 0 20 0 2400 0 0 0 0\n 9 0 md0 1 0 99999 0 1 0 99999 0 0 0 0\n"
    )
    traffic(node, "eth0", 1100, 5200)
    second = values(host.read(T + 2_000))
    assert second.pop("agent_rss_bytes") > 1e6
    assert second.pop("agent_cpu_ratio") >= 0
    assert second == {
        "cpu_util_ratio": 80 / 200,
        "load1": 3.25,
        "memory_available_bytes": 750_000 * 1024,
        "memory_total_bytes": 2_000_000 * 1024,
        "disk_read_bytes_per_s": 100 * 512 / 2,
        "disk_write_bytes_per_s": 400 * 512 / 2,
        "net_rx_bytes_per_s": 500,
        "net_tx_bytes_per_s": 2500,
    }
    slow = values(host.read(T + 10_000))
    assert {name: slow[name] for name in slow.keys() - second.keys() if not name.startswith("agent_")} == {
        "root_used_ratio": pytest.approx(slow["root_used_ratio"]),
        "pcie_aer_correctable": 11,
        "pcie_aer_fatal": 1,
        "edac_corrected": 21,
        "edac_uncorrected": 1,
        "oom_kills": 3,
    }
    assert 0 < slow["root_used_ratio"] <= 1


def test_together_with_the_agents_own_it_gives_every_node_metric(node: Path) -> None:
    host = source(node)
    host.read(T)
    write(node, "proc/stat", "cpu  160 5 70 900 60 1 2 2 9 0\n")
    found = values(host.read(T + 10_000)).keys()
    elsewhere = {
        metric.name
        for metric in of_scope(Scope.NODE)
        if metric.sources.keys() & {"uplink", "spool", "sampler", "scrape", *POLLED.keys() - {"host"}}
    }
    assert found | elsewhere == {metric.name for metric in of_scope(Scope.NODE)}
    assert not found & elsewhere


def test_what_a_machine_lacks_is_unsupported_and_nothing_else_suffers(tmp_path: Path) -> None:
    write(tmp_path, "proc/loadavg", "1.5 0 0 1/1 1\n")
    reading = source(tmp_path).read(T)
    absent = {name: why for _, name, why in reading.absent}
    assert values(reading)["load1"] == 1.5
    for name in (
        "cpu_util_ratio",
        "memory_total_bytes",
        "pcie_aer_fatal",
        "edac_corrected",
        "oom_kills",
    ):
        assert absent[name] is Absent.UNSUPPORTED, name
    assert not absent.keys() & values(reading).keys()


def test_garbage_is_an_error_and_no_number(node: Path) -> None:
    write(node, "proc/loadavg", "\n")
    write(node, "proc/meminfo", "MemTotal: many kB\n")
    write(node, "sys/devices/system/edac/mc/mc0/ue_count", "n/a\n")
    reading = source(node).read(T)
    absent = {name: why for _, name, why in reading.absent}
    assert absent == dict.fromkeys(
        ("load1", "memory_available_bytes", "memory_total_bytes", "edac_uncorrected"), Absent.ERROR
    )


def test_a_counter_that_began_again_gives_no_rate(node: Path) -> None:
    host = source(node)
    host.read(T)
    write(node, "proc/diskstats", " 259 0 nvme0n1 10 0 5 0 20 0 5 0 0 0 0\n")
    row = values(host.read(T + 1_000))
    assert "disk_read_bytes_per_s" not in row
    write(node, "proc/diskstats", " 259 0 nvme0n1 10 0 7 0 20 0 5 0 0 0 0\n")
    assert values(host.read(T + 2_000))["disk_read_bytes_per_s"] == 2 * 512


def test_the_real_machine_can_be_read() -> None:
    host = HostSource("n1")
    reading = host.read(T)
    assert values(reading)["memory_total_bytes"] > 1e8
    assert reading.inventory["host.kernel"]


def test_a_port_that_comes_or_goes_is_no_traffic(node: Path) -> None:
    """A pod's interface, or a port handed back by one with all that it ever counted."""
    host = source(node)
    traffic(node, "ib0", 0, 0)
    traffic(node, "eth0", 1000, 1000)
    host.read(T)
    traffic(node, "eth0", 1500, 1100)
    traffic(node, "eth9", 5_000_000_000_000, 5_000_000_000_000)
    row = values(host.read(T + 60_000))
    assert (row["net_rx_bytes_per_s"], row["net_tx_bytes_per_s"]) == (500 / 60, 100 / 60)
    traffic(node, "eth0", 1700, 1100)
    shutil.rmtree(node / "sys/class/net/eth9")
    row = values(host.read(T + 61_000))
    assert (row["net_rx_bytes_per_s"], row["net_tx_bytes_per_s"]) == (200, 0)


def test_a_device_that_fell_off_the_bus_takes_no_other_devices_errors_along(node: Path) -> None:
    host = source(node)
    host.read(T)
    for file in host._counters["correctable"].all() + host._counters["fatal"].all():
        file.close()  # as sysfs does with the files of a device that went; those of a folder stay readable
    shutil.rmtree(node / "sys/bus/pci/devices/0000:86:00.0")
    row = values(host.read(T + 10_000))
    assert (row["pcie_aer_correctable"], row["pcie_aer_fatal"]) == (7, 1)


def test_a_disk_with_many_partitions_hides_none_after_what_comes_before_it(node: Path) -> None:
    """The kernel writes a disk with all its partitions at once, and begins a new piece where that does not fit: one
    that is short is not the last."""
    first = " 259 0 nvme0n1 10 0 {} 0 20 0 0 0 0 0 0\n"
    rest = " 8 0 sda 10 0 {} 0 20 0 0 0 0 0 0\n" + 40 * f" 8 1 sda1 {'1234567890 ' * 10}0\n"
    write(node, "sys/block/sda/device/model", "disk\n")

    class Pieces(KeptFile):
        def _read(self, offset: int, size: int) -> bytes:
            data = Path(self.path).read_bytes()[offset:]
            return data if offset or len(data) < 4096 else data[: data.index(b"\n") + 1]

    host = source(node)
    host._kept["diskstats"] = Pieces(node / "proc/diskstats")
    for second, sectors in enumerate((1000, 1100)):
        write(node, "proc/diskstats", first.format(sectors) + rest.format(2 * sectors))
        row = values(host.read(T + second * 1000))
    assert row["disk_read_bytes_per_s"] == 300 * 512


def test_a_node_without_disks_has_no_disk_traffic_rather_than_none(node: Path) -> None:
    write(node, "proc/diskstats", " 9 0 md0 1 0 99999 0 1 0 99999 0 0 0 0\n")
    host = source(node)
    host.read(T)
    reading = host.read(T + 1_000)
    assert {name: why for _, name, why in reading.absent if name.startswith("disk_")} == dict.fromkeys(
        ("disk_read_bytes_per_s", "disk_write_bytes_per_s"), Absent.UNSUPPORTED
    )


def test_a_disk_that_comes_is_counted_from_the_next_slow_read_on(node: Path) -> None:
    host = source(node)
    host.read(T)
    line = " 259 2 nvme1n1 10 0 {} 0 20 0 {} 0 0 0 0\n"
    stats = (node / "proc/diskstats").read_text()
    write(node, "proc/diskstats", stats + line.format(0, 0))
    host.read(T + 1000)  # the name is met before its device is there
    write(node, "sys/block/nvme1n1/device/model", "disk\n")
    host.read(T + 10_000)
    write(node, "proc/diskstats", stats + line.format(2000, 4000))
    row = values(host.read(T + 11_000))
    assert (row["disk_read_bytes_per_s"], row["disk_write_bytes_per_s"]) == (2000 * 512, 4000 * 512)


def test_what_is_reported_of_the_agent_itself_is_this_process(node: Path) -> None:
    host = source(node)
    host.read(T)
    row = values(host.read(T + 1000))
    page = os.sysconf("SC_PAGE_SIZE")
    assert row["agent_rss_bytes"] % page == 0
    assert 2**20 < row["agent_rss_bytes"] < 2**36
    assert 0 <= row["agent_cpu_ratio"] < 64


CASES = sorted((Path(__file__).parents[2] / "cases/agent/host").iterdir())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_machines_of_many_kinds(case: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tree of /proc and /sys, what has changed in it some seconds later, and every value that this makes."""
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    expected = json.loads((case / "expected.json").read_text())
    root = tmp_path / "root"
    shutil.copytree(case / "first", root)
    host = HostSource("n1", root / "proc", root / "sys", root)
    first = host.read(T)
    for changed in (case / "second").rglob("*"):
        if changed.is_file():
            (root / changed.relative_to(case / "second")).write_bytes(changed.read_bytes())
    second = host.read(T + expected["seconds"] * 1000)
    host.close()
    own = {"agent_cpu_ratio", "agent_rss_bytes", "root_used_ratio"}
    assert {name: value for name, value in values(second).items() if name not in own} == pytest.approx(
        expected["values"]
    )
    assert {name: reason for _, name, reason in second.absent} == expected["absent"]
    assert {key: value for key, value in first.inventory.items() if key != "host.arch"} == expected["inventory"]


def test_files_stay_open_and_are_closed_at_the_end(node: Path) -> None:
    def opened() -> int:
        found = 0
        for descriptor in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # the one by which this folder is read
                found += str(node) in str(descriptor.readlink())
        return found

    host = source(node)
    host.read(T)
    before = opened()
    assert before > 5
    for second in range(1, 130):
        host.read(T + second * 1000)
    assert opened() == before
    host.close()
    assert opened() == 0


def test_a_card_whose_driver_is_loaded_again_is_read_on(node: Path) -> None:
    """The files are others then, though their names are the same."""
    host = source(node)
    host.read(T)
    shutil.rmtree(node / "sys/class/net/ib0")
    traffic(node, "eth0", 600, 200)
    row = values(host.read(T + 1_000))
    assert row["net_rx_bytes_per_s"] == 500  # what is open of the card that went no longer counts
    host.read(T + 60_000)
    traffic(node, "ib0", 50, 50)
    host.read(T + 120_000)
    traffic(node, "ib0", 1050, 50)
    assert values(host.read(T + 121_000))["net_rx_bytes_per_s"] == 1000


@pytest.mark.parametrize("name", ["vmstat", "diskstats", "interrupts"])
def test_a_long_file_of_the_kernel_is_read_to_its_end(name: str) -> None:
    """It comes in pieces of a page or so; the last one is known by its length where it is short."""
    first_words = [line.split()[:1] for line in (Path("/proc") / name).read_text().splitlines()]
    file = KeptFile(Path("/proc") / name)
    assert [line.split()[:1] for line in file.text().splitlines()] == first_words
    file.close()

"""Ethernet ports on trees that stand for /sys, and on real devices of the kernel."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from drover_agent.sources.base import Reading
from drover_agent.sources.network.ethernet import PLACES, EthernetSource
from drover_agent.sources.network.link_files import QUICK, LinkFile, Port
from drover_core.metrics.catalog import Absent, Scope, of_scope
from testbed.source_cases import cases_of, check, reported
from testbed.trees import plant
from testbed.waiting import wait_until

T = 1_800_000_000_000
CARDS = next(case for case in cases_of("ethernet") if case.name == "cards")


@pytest.mark.parametrize("case", cases_of("ethernet"), ids=lambda case: case.name)
def test_case(case: Path, tmp_path: Path) -> None:
    plant(case / "tree.txt", tmp_path)
    source = EthernetSource("n1", tmp_path / "sys")
    check(case, reported(source.read(T)))
    source.close()


def test_a_port_that_is_switched_on_later_is_reported_and_stays(tmp_path: Path) -> None:
    plant(CARDS / "tree.txt", tmp_path)
    source = EthernetSource("n1", tmp_path / "sys")
    first = source.read(T)
    assert "ens3" not in {entity.link for entity, _ in first.rows}
    folder = tmp_path / "sys/class/net/ens3"
    (folder / "flags").write_text("0x1003\n")
    (folder / "operstate").write_text("up\n")
    assert "ens3" not in {entity.link for entity, _ in source.read(T + 10_000).rows}  # looked for each minute
    assert "ens3" in {entity.link for entity, _ in source.read(T + 60_000).rows}
    (folder / "flags").write_text("0x1002\n")
    (folder / "operstate").write_text("down\n")
    rows = {entity.link: values for entity, values in source.read(T + 70_000).rows}
    assert rows["ens3"]["link_up"] == 0


def test_a_bmcs_port_on_usb_is_not_the_nodes(tmp_path: Path) -> None:
    """It comes and goes with the BMC."""
    plant(CARDS / "tree.txt", tmp_path)
    for bus in ("0000:00:14.0/usb1/1-3/1-3:1.0", "0000:00:15.0"):
        device = tmp_path / "sys/devices/pci0000:00" / bus
        folder = device / "net" / f"enx{len(bus)}"
        folder.mkdir(parents=True)
        for name, text in (("type", "1"), ("flags", "0x1003"), ("operstate", "up"), ("address", "02:00:00:00:00:09")):
            (folder / name).write_text(f"{text}\n")
        (folder / "device").symlink_to(device)
        (tmp_path / "sys/class/net" / folder.name).symlink_to(folder)
    found = {entity.link for entity, _ in EthernetSource("n1", tmp_path / "sys").read(T).rows}
    assert f"enx{len('0000:00:15.0')}" in found
    assert f"enx{len('0000:00:14.0/usb1/1-3/1-3:1.0')}" not in found


@pytest.fixture
def pair() -> Iterator[str]:
    """A real pair of ports of the kernel."""
    name, other = "drvt0", "drvt1"
    made = subprocess.run(
        ["ip", "link", "add", name, "type", "veth", "peer", "name", other], capture_output=True, text=True, check=False
    )
    assert made.returncode == 0, f"SYSTEM=1 needs root and `ip`: {made.stderr}"
    for end in (name, other):
        subprocess.run(["ip", "link", "set", end, "up"], check=True)
    sent = Path("/sys/class/net") / name / "statistics/tx_bytes"

    def carries() -> bool:
        send(name)
        return int(sent.read_text()) > 0

    wait_until(carries, "the kernel drops what is sent until its link watch has switched the queue on")
    yield name
    subprocess.run(["ip", "link", "del", name], capture_output=True, check=False)


def send(name: str) -> None:
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as raw:
        raw.bind((name, 0))
        raw.send(b"\xff" * 6 + b"\x02" * 6 + b"\x88\xb5" + b"x" * 50)


@pytest.mark.system
def test_a_real_port_counts_goes_and_comes_back(pair: str) -> None:
    port = Port("n1", pair, Path("/sys/class/net") / pair, PLACES)

    def read(*, slow: bool) -> Reading:
        reading = Reading()
        port.read(reading, slow=slow)
        return reading

    [(entity, first)] = read(slow=True).rows
    assert (entity.key, first["link_up"]) == (f"n1/{pair}", 1)
    send(pair)
    [(_, second)] = read(slow=False).rows
    assert second.keys() == QUICK
    assert second["tx_bytes"] >= first["tx_bytes"] + 64
    subprocess.run(["ip", "link", "del", pair], check=True)
    gone = read(slow=False)
    assert gone.rows == []
    assert {why for _, _, why in gone.absent} == {Absent.LOST}
    assert {metric for _, metric, _ in gone.absent} == {m.name for m in of_scope(Scope.LINK)}
    subprocess.run(["ip", "link", "add", pair, "type", "veth", "peer", "name", "drvt1"], check=True)
    [(_, back)] = read(slow=False).rows
    assert back["link_up"] == 0  # it is there again, and nobody has switched it on
    assert "rx_errors" in back  # all of it at once


@pytest.mark.system
def test_an_open_file_of_a_device_that_was_made_again_reads_the_new_one(pair: str) -> None:
    file = LinkFile(Path("/sys/class/net") / pair / "statistics/tx_bytes", float)
    assert file.read() > 0
    subprocess.run(["ip", "link", "del", pair], check=True)
    subprocess.run(["ip", "link", "add", pair, "type", "veth", "peer", "name", "drvt1"], check=True)
    assert file.read() == 0
    file.close()


def test_the_real_machine_can_be_read() -> None:
    reading = EthernetSource("n1").read(T)
    for entity, values in reading.rows:
        assert entity.scope is Scope.LINK
        assert values["rx_bytes"] >= 0
    assert reading.holdings == [] and reading.events == []

"""Ethernet ports of the node's own network cards, from /sys/class/net.

The kernel's words for it: Documentation/ABI/testing/sysfs-class-net.

Only cards (what has a `device`), not bridges, bonds, tunnels and the ends of containers; no virtual functions and no
ports of an embedded switch, which are others' views of the same wire; none on USB, which is how a BMC shows its own
port and takes it away again; only those that someone has switched on; and none that `infiniband.py` reports already, as
RoCE.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from drover_agent.sources.base import Reading
from drover_agent.sources.network.link_files import (
    LINK_METRICS,
    SLOW_MS,
    Place,
    Port,
    UnsupportedError,
    count,
    driver_of,
    is_virtual_function,
    line,
    names_in,
    pci_of,
    read_ports,
)

FIND_MS = 60_000  # a card that is switched on is noticed within this, one that comes at the next slow tick
ETHERNET = "1"  # kernel: include/uapi/linux/if_arp.h, ARPHRD_ETHER
IFF_UP = 1  # kernel: include/uapi/linux/if.h


class EthernetSource:
    """Every port at one pace; which ones there are is looked at in slow ticks."""

    name = "ethernet"
    interval_s = 1.0

    def __init__(self, node: str, sys: Path = Path("/sys")) -> None:
        self._node, self._sys = node, sys
        self._ports: dict[str, Port] = {}
        self._last_slow = self._last_find = -1
        self._interfaces: list[str] = []

    def read(self, now_ms: int) -> Reading:
        slow = now_ms // SLOW_MS != self._last_slow
        self._last_slow = now_ms // SLOW_MS
        found: dict[str, str] = {}
        if slow:
            interfaces = names_in(self._sys / "class/net")
            if interfaces != self._interfaces or now_ms // FIND_MS != self._last_find:
                self._interfaces, self._last_find = interfaces, now_ms // FIND_MS
                found = self._find(interfaces)
        reading = read_ports(self._ports.values(), slow=slow)
        reading.inventory = found
        return reading

    def close(self) -> None:
        for port in self._ports.values():
            port.close()

    def _find(self, interfaces: Iterable[str]) -> dict[str, str]:
        """Add new ports and return the inventory of their cards. A port that was reported once is kept."""
        inventory: dict[str, str] = {}
        cards = [name for name in interfaces if self._is_card(self._sys / "class/net" / name)]
        real = [name for name in cards if not is_virtual_function(self._sys / "class/net" / name / "device")]
        for name in real or cards:
            folder = self._sys / "class/net" / name
            if name not in self._ports and (not _is_on(folder) or _is_roce(folder)):
                continue
            if name not in self._ports:
                self._ports[name] = Port(self._node, name, folder, PLACES)
            device = folder / "device"
            card = {"driver": driver_of(device), "pci": pci_of(device), "mac": line(folder / "address")}
            inventory |= {f"nic.{name}.{key}": value for key, value in card.items() if value}
        return inventory

    def _is_card(self, folder: Path) -> bool:
        if not (folder / "device").exists() or line(folder / "type") != ETHERNET or (folder / "phy80211").exists():
            return False
        if "/usb" in os.path.realpath(folder / "device"):
            return False
        # "p0" is a port of a card, "pf0vf3" and "pf0sf2" are one end of what a virtual machine has: switchdev.rst
        return not line(folder / "phys_port_name").startswith("pf")


def _is_on(folder: Path) -> bool:
    try:
        return line(folder / "operstate") == "up" or bool(int(line(folder / "flags"), 16) & IFF_UP)
    except ValueError:
        return False


def _is_roce(folder: Path) -> bool:
    """Whether an RDMA device of the same card has this port. Cards with two of them number both from `dev_port`."""
    try:
        number = str(int(line(folder / "dev_port") or "0") + 1)
    except ValueError:
        number = "1"
    for device in names_in(folder / "device/infiniband"):
        ports = folder / "device/infiniband" / device / "ports"
        port = number if (ports / number).exists() else "1"
        if line(ports / port / "link_layer") == "Ethernet":
            return True
    return False


def _up(text: str) -> float:
    """`operstate`, RFC 2863. Drivers that do not report it leave it at unknown."""
    state = text.strip()
    if state == "unknown":
        raise UnsupportedError
    return float(state == "up")


def _speed(text: str) -> float:
    """-1: the driver does not know."""
    speed = int(text)
    if speed < 0:
        raise UnsupportedError
    return speed * LINK_METRICS["rate_gbps"].sources["ethernet"].scale


def _places() -> dict[str, list[Place]]:
    found: dict[str, list[Place]] = {
        "link_up": [("operstate", _up), ("carrier", count)],
        "rate_gbps": [("speed", _speed)],
    }
    for name, metric in LINK_METRICS.items():
        if name not in found and "ethernet" in metric.sources:
            found[name] = [(metric.sources["ethernet"].key, count)]
    return found


PLACES = _places()

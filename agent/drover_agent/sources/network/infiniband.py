"""InfiniBand and RoCE ports, from /sys/class/infiniband (kernel: Documentation/ABI/stable/sysfs-class-infiniband).

A link is called as its device where that has one port ("mlx5_0"), else "mlx5_0/1": so fleet.toml names it. Every
counter under `counters/` is a firmware command to the card, so only what detectors want at once is read each second.

On a RoCE port `counters/` counts RDMA traffic alone; the netdev's own is in the node's net_rx_bytes_per_s. Cards other
than Mellanox's count under `hw_counters/`, by names of their own (kernel: drivers/infiniband/hw/*): bnxt_re is
Broadcom's driver, efa that of AWS. What they do not count is unsupported.
"""

from __future__ import annotations

from pathlib import Path

from drover_agent.sources.base import Reading
from drover_agent.sources.gpus import Gpus
from drover_agent.sources.network.link_files import (
    LINK_METRICS,
    SLOW_MS,
    OutOfRangeError,
    Place,
    Port,
    count,
    driver_of,
    is_virtual_function,
    line,
    names_in,
    pci_of,
    read_ports,
)
from drover_agent.sources.network.pci_paths import distance, nearest

FIND_MS = 60_000  # what is known of the cards is read again at least this often
ACTIVE = 4  # kernel: include/rdma/ib_verbs.h, enum ib_port_state

# Bits of the counters of the port (kernel: drivers/infiniband/core/sysfs.c, PORT_PMA_ATTR; InfiniBand specification,
# PortCounters). They stay at all ones until someone clears them: from then on "no new error" would be a lie.
_BITS = {
    "symbol_error": 16, "link_error_recovery": 8, "link_downed": 8, "port_rcv_errors": 16, "port_xmit_discards": 16,
    "local_link_integrity_errors": 4, "excessive_buffer_overrun_errors": 4, "port_xmit_wait": 32,
    "port_rcv_data": 32, "port_xmit_data": 32,  # before kernel 4.5 and on old cards; now 64
}  # fmt: skip
# Under which name other drivers count the same: bnxt_re/hw_counters.c, efa/efa_verbs.c.
_ELSEWHERE = {
    "rx_bytes": "rx_bytes", "tx_bytes": "tx_bytes", "rx_errors": "rx_roce_errors", "tx_discards": "tx_roce_discards",
    "out_of_sequence": "oos_drop_count", "packet_sequence_errors": "seq_err_naks_rcvd",
    "rnr_nak_retries": "rnr_naks_rcvd", "ack_timeouts": "to_retransmits", "cnp_sent": "tx_cnp_pkts",
    "cnp_handled": "rx_cnp_pkts",
}  # fmt: skip


class InfinibandSource:
    """Every port of every device, at one pace. Devices may come and go: those that come are seen in slow ticks."""

    name = "infiniband"
    interval_s = 1.0

    def __init__(self, node: str, sys: Path = Path("/sys"), gpus: Gpus | None = None) -> None:
        """`gpus`: asked for their places, to report which port is nearest to each."""
        self._node, self._sys = node, sys
        self._class = sys / "class/infiniband"
        self._gpus = gpus or Gpus()
        self._ports: dict[str, Port] = {}
        self._devices: list[str] = []
        self._functions: dict[str, str] = {}  # device -> its PCI address
        self._last_slow = self._last_find = -1
        self._placed: tuple[tuple[str, ...], dict[str, str]] = (), {}  # GPUs and cards, and what was sent of them last

    def read(self, now_ms: int) -> Reading:
        slow = now_ms // SLOW_MS != self._last_slow
        self._last_slow = now_ms // SLOW_MS
        inventory: dict[str, str] = {}
        if slow:
            devices = names_in(self._class)
            if devices != self._devices or (devices and now_ms // FIND_MS != self._last_find):
                self._devices, self._last_find = devices, now_ms // FIND_MS
                inventory = self._find(devices)
                self._placed = (), {}
        reading = read_ports(self._ports.values(), slow=slow)
        reading.inventory = inventory
        if slow and self._functions:
            reading.inventory |= self._nearest()
        return reading

    def close(self) -> None:
        for port in self._ports.values():
            port.close()

    def _find(self, devices: list[str]) -> dict[str, str]:
        """Add new ports and return the inventory of their cards. A port that was reported once is kept."""
        inventory: dict[str, str] = {}
        virtual = {name for name in devices if is_virtual_function(self._class / name / "device")}
        own = [name for name in devices if name not in virtual] or devices  # a machine may have nothing else
        self._functions = {}
        for device in own:
            folder = self._class / device
            card = _card(folder)
            self._functions[device] = card.get("pci", "")
            inventory |= {f"nic.{device}.{key}": value for key, value in card.items()}
            numbers = names_in(folder / "ports")
            for number in numbers:
                name = device if len(numbers) == 1 else f"{device}/{number}"
                if name not in self._ports:
                    self._ports[name] = Port(self._node, name, folder / "ports" / number, PLACES)
        return inventory

    def _nearest(self) -> dict[str, str]:
        found: dict[str, str] = {}
        gpus = self._gpus.all()
        placed = tuple(gpu.pci for gpu in gpus), self._functions
        if placed == self._placed:  # thousands of links of sysfs are walked for it
            return found
        self._placed = placed
        for gpu in gpus:
            device = nearest(self._sys, gpu.pci, self._functions)
            if device is not None:
                found[f"gpu{gpu.gpu}.nic"] = device
                first = self._functions[device.partition(",")[0]]
                found[f"gpu{gpu.gpu}.nic_path"] = distance(self._sys, gpu.pci, first)
        return found


def _card(folder: Path) -> dict[str, str]:
    """Return what is known of a card and its ports; what it does not report is left out."""
    found = {
        "firmware": line(folder / "fw_ver"),
        "board": line(folder / "board_id"),
        "type": line(folder / "hca_type"),
        "driver": driver_of(folder / "device"),
        "pci": pci_of(folder / "device"),
        "guid": line(folder / "node_guid"),
    }
    for number in names_in(folder / "ports"):
        found[f"port{number}.layer"] = line(folder / "ports" / number / "link_layer")
    if netdevs := names_in(folder / "device/net"):
        found["netdev"] = ",".join(netdevs)
        found["mac"] = ",".join(filter(None, (line(folder / "device/net" / name / "address") for name in netdevs)))
    return {key: value for key, value in found.items() if value}


def _state(text: str) -> float:
    """ "4: ACTIVE" """
    return float(int(text.partition(":")[0]) == ACTIVE)


def _rate(text: str) -> float:
    """ "400 Gb/sec (4X NDR)": Gb/s."""
    return float(text.split(" ", 1)[0])


def _counter(key: str, scale: float) -> Place:
    """A counter of `counters/`, or of `hw_counters/` where `key` says so."""
    if key.startswith("hw_counters/"):
        return key, lambda text: count(text) * scale
    stuck = {2 ** _BITS[key] - 1, 2**64 - 1}

    def parse(text: str) -> float:
        value = count(text)
        if value in stuck:
            raise OutOfRangeError(
                f"is at its highest value, {value:.0f}, and no longer counts; `perfquery -R` clears it"
            )
        return value * scale

    return f"counters/{key}", parse


def _places() -> dict[str, list[Place]]:
    found: dict[str, list[Place]] = {"link_up": [("state", _state)], "rate_gbps": [("rate", _rate)]}
    for name, metric in LINK_METRICS.items():
        if name not in found:
            source = metric.sources["sysfs"]
            found[name] = [_counter(source.key.split(" ", 1)[0], source.scale)]
            if name in _ELSEWHERE:
                found[name].append(_counter(f"hw_counters/{_ELSEWHERE[name]}", 1.0))
    return found


PLACES = _places()

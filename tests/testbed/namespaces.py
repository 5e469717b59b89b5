"""Nodes as network namespaces behind a switch in this process, which can delay what one node sends another.

Each namespace has a TUN device (linux/if_tun.h), and the switch passes packets on by their destination. A kernel
without the netem discipline of tc can so have a slow link between two nodes alone. Needs root.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import os
import selectors
import shutil
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
CLONE_NEWNET = 0x40000000
MTU = 60_000  # fewer packets for a switch in Python
CGROUPS = Path("/sys/fs/cgroup")
PERIOD_US = 100_000


class Switch:
    """Passes packets between nodes until it is closed. `delays`: (from, to) -> seconds, may be changed at any time.

    Args:
        addresses: node -> its IPv4 address.
    """

    def __init__(self, addresses: Mapping[str, str]) -> None:
        self.delays: dict[tuple[str, str], float] = {}
        self.met: dict[tuple[str, str], Callable[[], None]] = {}  # called once, at the first packet
        self._names = {socket.inet_aton(address): node for node, address in addresses.items()}
        self._tuns = {node: _tun(node, address) for node, address in addresses.items()}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._pass_on, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._thread.join(5)
        for tun in self._tuns.values():
            os.close(tun)

    def _pass_on(self) -> None:
        waiting: list[tuple[float, int, int, bytes]] = []
        count = 0
        with selectors.DefaultSelector() as ready:
            for node, tun in self._tuns.items():
                os.set_blocking(tun, False)
                ready.register(tun, selectors.EVENT_READ, node)
            while not self._over.is_set():
                limit = max(0.0, waiting[0][0] - time.monotonic()) if waiting else 0.1
                for key, _ in ready.select(min(limit, 0.1)):
                    with contextlib.suppress(BlockingIOError):
                        packet = os.read(key.fd, MTU + 100)
                        to = self._names.get(packet[16:20]) if packet[0] >> 4 == 4 else None
                        if to is None:
                            continue
                        way = key.data, to
                        if (call := self.met.pop(way, None)) is not None:
                            call()
                        count += 1
                        heapq.heappush(
                            waiting, (time.monotonic() + self.delays.get(way, 0.0), count, self._tuns[to], packet)
                        )
                while waiting and waiting[0][0] <= time.monotonic():
                    _, _, tun, packet = heapq.heappop(waiting)
                    with contextlib.suppress(OSError):  # the namespace is going
                        os.write(tun, packet)


def _tun(node: str, address: str) -> int:
    """Open a TUN device in the node's namespace, with the address."""
    with entered(node):
        tun = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
        fcntl.ioctl(tun, TUNSETIFF, struct.pack("16sH22x", b"eth0", IFF_TUN | IFF_NO_PI))
        for words in (["addr", "add", f"{address}/24", "dev", "eth0"], ["link", "set", "eth0", "mtu", str(MTU), "up"]):
            subprocess.run(["ip", *words], check=True)
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    return tun


@contextlib.contextmanager
def entered(node: str) -> Iterator[None]:
    """Have this thread in the node's namespace."""
    own = os.open("/proc/self/ns/net", os.O_RDONLY)
    try:
        _enter(os.open(f"/run/netns/{node}", os.O_RDONLY))
        yield
    finally:
        _enter(own)


def forward(node: str, port: int) -> None:
    """Pass connections to 127.0.0.1:`port` in the namespace on to the same port here, until this process ends."""
    with entered(node):
        listening = socket.create_server(("127.0.0.1", port))

    def accept() -> None:
        while True:
            near, _ = listening.accept()
            far = socket.create_connection(("127.0.0.1", port))
            for one, other in ((near, far), (far, near)):
                threading.Thread(target=_pump, args=(one, other), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()


def _pump(one: socket.socket, other: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := one.recv(65_536):
            other.sendall(data)
    for end in (one, other):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


def _enter(namespace: int) -> None:
    """Of this thread alone; closes the descriptor."""
    try:
        if ctypes.CDLL(None, use_errno=True).setns(namespace, CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
    finally:
        os.close(namespace)


@contextlib.contextmanager
def switched(addresses: Mapping[str, str]) -> Iterator[Switch]:
    """Make the nodes' namespaces, and a switch between them."""
    nodes = list(addresses)
    try:
        for node in nodes:
            subprocess.run(["ip", "netns", "add", node], check=True)
        switch = Switch(addresses)
        try:
            yield switch
        finally:
            switch.close()
    finally:
        for node in nodes:
            subprocess.run(["ip", "netns", "del", node], check=False)


def inside(node: str, *words: str, group: str = "") -> list[str]:
    """Return the command that runs `words` in a node's namespace. `group`: and in this cgroup (`limited`)."""
    command = ["ip", "netns", "exec", node, *words]
    return ["sh", "-c", 'echo $$ > "$0" && exec "$@"', group, *command] if group else command


class CpuLimit:
    """A cgroup (version 1 or 2) whose processes have `set` of one processor, and of a fair share where others want it.

    All they want until then.
    """

    def __init__(self, name: str) -> None:
        self._v1 = (CGROUPS / "cpu/cpu.cfs_quota_us").exists()
        self._folder = (CGROUPS / "cpu" if self._v1 else CGROUPS) / name
        self._folder.mkdir()
        self.procs = str(self._folder / "cgroup.procs")

    def set(self, share: float) -> None:
        quota = int(share * PERIOD_US)
        if self._v1:
            (self._folder / "cpu.cfs_quota_us").write_text(str(quota))
            (self._folder / "cpu.shares").write_text(str(max(2, int(1024 * share))))
        else:
            (self._folder / "cpu.max").write_text(f"{quota} {PERIOD_US}")
            (self._folder / "cpu.weight").write_text(str(max(1, int(100 * share))))

    def lift(self) -> None:
        """Undo `set`."""
        if self._v1:
            (self._folder / "cpu.cfs_quota_us").write_text("-1")
            (self._folder / "cpu.shares").write_text("1024")
        else:
            (self._folder / "cpu.max").write_text(f"max {PERIOD_US}")
            (self._folder / "cpu.weight").write_text("100")

    def close(self) -> None:
        until = time.monotonic() + 60
        while time.monotonic() < until:
            try:
                self._folder.rmdir()
            except OSError:  # its last processes are going
                time.sleep(0.1)
            else:
                return


def can() -> str:
    """Return why this machine cannot have such nodes; "" if it can."""
    if os.getuid():
        return "needs root"
    if not Path("/dev/net/tun").exists():
        return "needs /dev/net/tun"
    return "" if shutil.which("ip") else "needs ip (iproute2)"

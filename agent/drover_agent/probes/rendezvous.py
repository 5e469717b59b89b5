"""Where the nodes of a collective meet: a port of the first node, open while the probe runs, to the others alone.

torch's TCPStore asks nobody who they are. So the socket is ours: bound to the one address, with a filter in the kernel
(SO_ATTACH_FILTER, socket(7): needs no rights) that drops what comes from other addresses before a connection is made;
the store takes it over. What this does not do: an address is no proof of who speaks, nothing on the way is encrypted,
and the connections that carry the data (gloo's and NCCL's own) have ports and rules of their own.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import datetime
import fcntl
import ipaddress
import json
import socket
import struct
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from drover_agent.probes.base import Group
from drover_agent.probes.ranks import MissedError

_READ_KEY = "heard/"  # and a node's number, in the shared store: the node has read the decision
SIOCGIFADDR = 0x8915  # linux/sockios.h
SO_ATTACH_FILTER = 26  # asm-generic/socket.h
# linux/filter.h and bpf_common.h: load a word at a fixed place, jump if equal, return.
LOAD, JUMP_EQUAL, RETURN = 0x20, 0x15, 0x06
NET = 0xFFF00000  # SKF_NET_OFF: places count from the network header
SOURCE = {4: 12, 6: 8}  # where the sender's address is in an IP header
BACKLOG = 512
LEAVE_S = 10.0  # for the others to have left, before the first node takes the store away


def packet_filter(partners: Iterable[str]) -> bytes:
    """Instructions that let pass what these addresses (all of one family) send, and nothing else."""
    code: list[tuple[int, int, int, int]] = []
    for partner in sorted(set(partners)):
        address = ipaddress.ip_address(partner)
        words = struct.unpack(f">{len(address.packed) // 4}I", address.packed)
        for k, word in enumerate(words):
            code.append((LOAD, 0, 0, NET + SOURCE[address.version] + 4 * k))
            code.append((JUMP_EQUAL, 0, 2 * (len(words) - 1 - k) + 1, word))  # else on to the next partner
        code.append((RETURN, 0, 0, 0xFFFFFFFF))
    code.append((RETURN, 0, 0, 0))
    return b"".join(struct.pack("HBBI", *one) for one in code)


def listening(address: str, port: int, partners: Sequence[str]) -> socket.socket:
    """Open a socket that listens at this one address and accepts from `partners` alone; none: from everybody.

    Raises:
        OSError: the address is none of this node, the port is taken, or the kernel takes no filter.
    """
    family, _, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if partners:
            code = packet_filter(_numeric(partners, family))
            buffer = ctypes.create_string_buffer(code, len(code))
            program = struct.pack("HP", len(code) // 8, ctypes.addressof(buffer))
            made.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)
        made.bind(place)
        made.listen(BACKLOG)
    except BaseException:
        made.close()
        raise
    return made


def _numeric(names: Iterable[str], family: int) -> set[str]:
    found = set()
    for name in names:
        for one in socket.getaddrinfo(name, None, family=family, type=socket.SOCK_STREAM):
            found.add(str(one[4][0]))
    return found


def free_port() -> int:
    """Of loopback, for the ranks of one node."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def interface_to(address: str, port: int) -> str:
    """Return the name of the interface by which this node reaches an address; "" if that is not known."""
    try:
        family, _, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as asked:
            asked.connect(place)  # sends nothing: only asks for the way
            own = str(asked.getsockname()[0])
            for _, name in socket.if_nameindex():
                if own in (_ipv4(asked, name) if family == socket.AF_INET else _ipv6(name)):
                    return name
    except OSError:
        return ""
    return ""


def _ipv4(asked: socket.socket, name: str) -> tuple[str, ...]:
    request = array.array("B", struct.pack("16s24x", name.encode()))
    try:
        fcntl.ioctl(asked.fileno(), SIOCGIFADDR, request)
    except OSError:  # it has none
        return ()
    return (socket.inet_ntoa(request[20:24].tobytes()),)


def _ipv6(name: str, table: Path = Path("/proc/net/if_inet6")) -> tuple[str, ...]:
    lines = [line.split() for line in table.read_text("ascii").splitlines()]
    return tuple(str(ipaddress.IPv6Address(bytes.fromhex(line[0]))) for line in lines if line[-1:] == [name])


class Meeting:
    """One process of a group: comes to the rendezvous, waits for all nodes, and leaves in order.

    Args:
        local: which process of its node it is. about: what all nodes must have alike, such as their devices.
    """

    def __init__(self, group: Group, local: int, about: dict[str, Any]) -> None:
        self._group, self._first = group, local == 0
        self._hosts = group.node == 0 and self._first
        self._about = json.dumps(about, sort_keys=True)
        self._local = local
        self._store: Any = None

    def join(self) -> Any:
        """torch's store of this group, once a process of each node is there.

        Raises:
            MissedError: one did not come, or is of another kind.
        """
        from torch.distributed import PrefixStore, TCPStore

        group = self._group
        until = time.monotonic() + group.join_s
        handed: dict[str, Any] = {}
        if self._hosts:
            try:
                handed["master_listen_fd"] = listening(group.address, group.port, group.addresses).detach()
            except OSError as error:
                raise MissedError(
                    f"{group.name(0)} cannot listen at {group.address}:{group.port}: {error.strerror or error}"
                ) from None
        try:
            store = TCPStore(
                group.address, group.port, None, self._hosts, datetime.timedelta(seconds=group.join_s),
                wait_for_workers=False, **handed,
            )  # fmt: skip
        except RuntimeError:  # DistError: nothing answers
            raise MissedError(
                f"{group.name(0)} never joined within {group.join_s:g} s: nothing answers at "
                f"{group.address}:{group.port}"
            ) from None
        self._store = PrefixStore(f"drover/{group.key}", store)
        if self._first:
            self._store.set(f"node/{group.node}", self._about)
        why = self._decide(until) if self._hosts else self._read_decision()
        if why:
            raise MissedError(why)
        return PrefixStore("ranks", self._store)

    def second_store(self, answer_s: float) -> Any:
        """Return the group's store over a connection of its own: the first one may be waiting in a collective.

        Args:
            answer_s: an operation that takes longer raises RuntimeError.
        """
        from torch.distributed import PrefixStore, TCPStore

        group = self._group
        store = TCPStore(
            group.address, group.port, None, False, datetime.timedelta(seconds=answer_s), wait_for_workers=False
        )
        return PrefixStore(f"drover/{group.key}/signs", store)

    def _decide(self, until: float) -> str:
        """Check, on the first node, that all have joined and are alike. Send all the reason why not; "" to begin."""
        keys = [f"node/{n}" for n in range(self._group.nodes)]
        try:
            self._store.wait(keys, datetime.timedelta(seconds=max(0.001, until - time.monotonic())))
        except RuntimeError:
            missing = [n for n, key in enumerate(keys) if not self._store.check([key])]
            why = f"{', '.join(map(self._group.name, missing))} never joined within {self._group.join_s:g} s"
            self._store.set("go", why)
            read = [f"{_READ_KEY}{n}" for n in range(1, self._group.nodes) if n not in missing]
            self._wait_briefly(read)
            return why
        kinds = [self._store.get(key).decode() for key in keys]
        odd = next((n for n, about in enumerate(kinds) if about != kinds[0]), 0)
        why = f"not alike: {self._group.name(0)} has {kinds[0]}, {self._group.name(odd)} {kinds[odd]}" if odd else ""
        self._store.set("go", why)
        if why:
            self._wait_briefly([f"{_READ_KEY}{n}" for n in range(1, self._group.nodes)])
        return why

    def _read_decision(self) -> str:
        """What the first node's process has decided."""
        try:
            self._store.wait(["go"], datetime.timedelta(seconds=self._group.join_s + LEAVE_S))
            why = self._store.get("go").decode()
            if why and self._first:
                self._store.set(f"{_READ_KEY}{self._group.node}", "1")
        except RuntimeError:
            return f"{self._group.name(0)} left before all had joined"
        return str(why)

    def _wait_briefly(self, keys: Sequence[str]) -> None:
        if keys:
            with contextlib.suppress(RuntimeError):  # one of them has died meanwhile
                self._store.wait(keys, datetime.timedelta(seconds=LEAVE_S))

    def leave(self, rank: int, world: int) -> None:
        """The first node's process stays until the others are through: the store goes with it."""
        if not self._hosts:
            self._store.set(f"left/{rank}", "1")
            return
        self._wait_briefly([f"left/{k}" for k in range(world) if k != rank])

"""Probes over several nodes: the rendezvous lets in whom it should, and real processes meet there."""

from __future__ import annotations

import socket
import struct
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import pytest

from drover_agent.probes import rendezvous
from drover_agent.probes.base import Group
from drover_agent.probes.rendezvous import NET, interface_to, listening, packet_filter
from drover_agent.probes.runner import End, Report, Request, Runner

GROUP = ("allreduce_group", "allgather_group", "alltoall_group")


def connects(place: tuple[str, int], source: str) -> bool:
    """Whether a connection from a source address comes about. The kernel drops what it filters: no answer comes."""
    with socket.socket() as made:
        made.bind((source, 0))
        made.settimeout(0.3)
        try:
            made.connect(place)
        except TimeoutError:
            return False
    return True


def test_the_rendezvous_answers_its_partners_alone_and_at_one_address() -> None:
    with listening("127.0.0.1", 0, ["127.0.0.1", "127.0.0.3"]) as open_:
        place = open_.getsockname()
        assert place[0] == "127.0.0.1"
        assert [connects(place, f"127.0.0.{k}") for k in (1, 2, 3, 4)] == [True, False, True, False]
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", place[1]), timeout=120).close()
    with listening("127.0.0.1", 0, []) as open_:
        assert connects(open_.getsockname(), "127.0.0.2")


def passes(code: bytes, source: str) -> bool:
    """What the kernel makes of the instructions for a packet from an address."""
    version = 6 if ":" in source else 4
    packed = socket.inet_pton(socket.AF_INET6 if version == 6 else socket.AF_INET, source)
    header = bytes(rendezvous.SOURCE[version]) + packed
    at, word = 0, 0
    while True:
        what, then, otherwise, value = struct.unpack_from("HBBI", code, 8 * at)
        if what == rendezvous.RETURN:
            return bool(value)
        if what == rendezvous.LOAD:
            word = int(struct.unpack_from(">I", header, value - NET)[0])
            at += 1
        else:
            at += 1 + (then if word == value else otherwise)


@pytest.mark.parametrize(
    ("partners", "others"),
    [
        (["10.0.0.1", "10.0.0.2", "10.0.1.1"], ["10.0.0.3", "10.1.0.1", "11.0.0.1"]),
        (["fe80::1", "fe80::2:1"], ["fe80::2", "fe80::1:1", "2001:db8::1"]),
    ],
)
def test_the_filter_compares_whole_addresses(partners: list[str], others: list[str]) -> None:
    code = packet_filter(partners)
    assert [passes(code, one) for one in partners + others] == [True] * len(partners) + [False] * len(others)


def test_the_interface_is_that_of_the_way_to_the_others() -> None:
    assert interface_to("127.0.0.1", 29_500) == "lo"
    assert interface_to("no such name.invalid", 1) == ""


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def met(present: int, nodes: int, join_s: float, folder: Path) -> list[Report]:
    """What the real processes of the first `present` nodes of a group find, side by side."""
    port = free_port()

    def one(node: int) -> Report:
        names = tuple(f"r1n{k}" for k in range(nodes))
        group = Group("127.0.0.1", port, node, nodes, names, ("127.0.0.1",), "k1", join_s)
        return Runner(Request(GROUP, scale=0.01, folder=str(folder), group=asdict(group))).run()

    with ThreadPoolExecutor(present) as pool:
        return list(pool.map(one, range(present)))


def test_two_nodes_meet_and_measure_and_a_third_one_that_never_comes_is_reported_by_name(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="probes need torch: pip install 'drover[probe]'")
    for report in met(2, 2, 60.0, tmp_path):
        assert (report.end, report.detail) == (End.DONE, "")
        assert [r.probe for r in report.results] == list(GROUP)
        assert all(r.value and r.detail == "1024 KiB over 2 ranks" for r in report.results)
    for report in met(2, 3, 15.0, tmp_path):
        assert (report.end, report.detail) == (End.DONE, ""), "no word against anybody"
        assert {(r.value, r.detail) for r in report.results} == {(None, "rank 2 (r1n2) never joined within 15 s")}

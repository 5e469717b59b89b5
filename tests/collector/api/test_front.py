"""The front of the Fleet API's port, before an echo in gRPC's place."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from drover_collector.api import connection_front as front
from drover_collector.api.connection_front import Front
from drover_collector.auth.connection_limit import ConnectionLimit
from testbed.loop import in_loop

WAIT_S = 120
PLACES = 4


def test_who_floods_makes_room_and_not_who_comes_from_elsewhere() -> None:
    crowd: ConnectionLimit[int] = ConnectionLimit()
    assert crowd.spare() is None
    crowd.join(1, "10.0.0.1")
    for number in (2, 3, 4):
        crowd.join(number, "10.0.0.9")
    assert crowd.spare() == 2
    crowd.leave(2)
    crowd.leave(2)
    crowd.leave(3)
    assert (len(crowd), crowd.all(), crowd.spare()) == (2, [1, 4], 1)


@contextlib.asynccontextmanager
async def echoing(folder: Path) -> AsyncIterator[tuple[int, list[int]]]:
    """The port of a front of four places, and how many had to make room."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65_536):
                writer.write(data)
                await writer.drain()
        writer.close()

    crowded: list[int] = []
    path = f"{folder}/s"
    server = await asyncio.start_unix_server(echo, path)
    made = Front(PLACES, lambda: crowded.append(1))
    port = made.listen("127.0.0.1", 0)
    await made.start(path)
    try:
        yield port, crowded
    finally:
        await made.stop()
        server.close()


Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def said(ends: Ends, data: bytes = b"x") -> bytes:
    reader, writer = ends
    writer.write(data)
    return await asyncio.wait_for(reader.readexactly(len(data)), WAIT_S)


async def ended(ends: Ends) -> bool:
    try:
        return await asyncio.wait_for(ends[0].read(1), WAIT_S) == b""
    except ConnectionError:
        return True


@in_loop
async def test_bytes_pass_both_ways_and_a_peer_that_reads_late_holds_up_itself(tmp_path: Path) -> None:
    async with echoing(tmp_path) as (port, _):
        data = bytes(range(256)) * 40_000
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(data)
        other = await asyncio.open_connection("127.0.0.1", port)
        assert await said(other) == b"x"
        assert await asyncio.wait_for(reader.readexactly(len(data)), WAIT_S) == data
        writer.close()
        other[1].close()


@in_loop
async def test_silent_ones_make_room_first_and_then_those_that_were_not_answered_often(tmp_path: Path) -> None:
    async with echoing(tmp_path) as (port, crowded):

        async def connect() -> Ends:
            return await asyncio.open_connection("127.0.0.1", port)

        settled = await connect()
        for _ in range(front.ANSWERS):
            await said(settled)
        begun = await connect()
        await said(begun)
        silent = [await connect() for _ in range(PLACES - 2)]
        newer = await connect()
        assert await said(newer) == b"x"
        assert await ended(silent[0])
        second = await connect()
        assert await said(second) == b"x"
        assert await ended(silent[1])
        third = await connect()
        assert await said(third) == b"x"
        assert await ended(begun)
        assert await said(settled) == b"x"
        assert len(crowded) == 3
        for ends in (settled, newer, second, third):
            ends[1].close()


@in_loop
async def test_one_that_says_nothing_ends_and_one_that_leaves_gives_its_place_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(front, "HANDSHAKE_S", 0.2)
    monkeypatch.setattr(front, "CHECK_S", 0.05)
    async with echoing(tmp_path) as (port, crowded):
        assert await ended(await asyncio.open_connection("127.0.0.1", port))
        for _ in range(3 * PLACES):
            ends = await asyncio.open_connection("127.0.0.1", port)
            assert await said(ends) == b"x"
            ends[1].close()
            await ends[1].wait_closed()
        left = [await asyncio.open_connection("127.0.0.1", port) for _ in range(PLACES)]
        for ends in left:
            ends[1].close()
        assert await said(await asyncio.open_connection("127.0.0.1", port)) == b"x"
        assert len(crowded) <= PLACES


@in_loop
async def test_without_anybody_behind_it_a_connection_ends(tmp_path: Path) -> None:
    made = Front(PLACES)
    port = made.listen("127.0.0.1", 0)
    await made.start(f"{tmp_path}/none")
    ends = await asyncio.open_connection("127.0.0.1", port)
    ends[1].write(b"x")
    assert await ended(ends)
    await made.stop()

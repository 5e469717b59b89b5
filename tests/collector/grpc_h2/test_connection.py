"""One connection without sockets: frames, windows, limits, and arbitrary bytes."""

from __future__ import annotations

import gzip
import os
import struct
import tracemalloc
import zlib

import grpc
import hpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drover_collector.grpc_h2 import frames, headers, messages
from drover_collector.grpc_h2.connection import (
    BUDGET,
    CONTROL,
    STREAMS,
    CertificateBudget,
    Connection,
)
from drover_collector.grpc_h2.frames import Code
from drover_collector.grpc_h2.send_queue import HELD_BYTES, SendQueue, Stream
from testbed.http2 import GREETING, REQUEST, block, data, goodbye, kinds, opened, split

PING = frames.ping(b"12345678", answer=False)


def greeted(*sent: bytes) -> Connection:
    connection = Connection()
    connection.receive(GREETING + b"".join(sent))
    return connection


def open_stream() -> tuple[Connection, Stream]:
    connection = greeted(opened())
    connection.queue.buffer.clear()
    return connection, connection.streams[1]


# ---- messages


def test_a_message_is_cut_when_it_is_whole() -> None:
    buffer = bytearray(messages.wrap(b"one") + messages.wrap(b"") + b"\1\0\0\0\3tw")
    assert messages.cut(buffer, 10) == (False, b"one")
    assert messages.cut(buffer, 10) == (False, b"")
    assert messages.cut(buffer, 10) is None
    buffer += b"o"
    assert messages.cut(buffer, 10) == (True, b"two")
    assert not buffer
    assert messages.cut(buffer, 10) is None


@pytest.mark.parametrize(
    ("prefix", "code"),
    [(b"\0\0\0\0\x0b", grpc.StatusCode.RESOURCE_EXHAUSTED), (b"\2\0\0\0\1", grpc.StatusCode.INTERNAL)],
)
def test_a_message_that_is_too_long_or_none_is_known_by_its_prefix(prefix: bytes, code: grpc.StatusCode) -> None:
    with pytest.raises(messages.MessageError) as raised:
        messages.cut(bytearray(prefix), 10)
    assert raised.value.code is code


def test_what_is_compressed_grows_no_further_than_a_message_may() -> None:
    bomb = gzip.compress(bytes(50_000_000))
    tracemalloc.start()
    with pytest.raises(messages.MessageError) as raised:
        messages.inflate(bomb, 1_000_000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert raised.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert peak < 4_000_000
    tight = gzip.compress(bytes(messages.FREE_BYTES))
    assert messages.inflate(tight, 1_000_000) == bytes(messages.FREE_BYTES)
    with pytest.raises(messages.MessageError, match="larger than max"):  # tighter than data is
        messages.inflate(gzip.compress(bytes(messages.FREE_BYTES + 1)), 1_000_000)
    still = (b"a row of GPUs at rest" + bytes(79)) * 9_000 + os.urandom(6_000)
    assert messages.inflate(gzip.compress(still), 1_000_000) == still
    assert messages.inflate(zlib.compress(b"deflate"), 10) == b"deflate"


@pytest.mark.parametrize(
    "packed", [b"junk", b"", gzip.compress(b"x", mtime=0)[:-3], gzip.compress(b"x", mtime=0) + b"more"]
)
def test_what_is_not_compressed_as_it_says_is_no_message(packed: bytes) -> None:
    with pytest.raises(messages.MessageError):
        messages.inflate(packed, 100)


# ---- headers


def test_a_status_is_encoded_as_grpc_encodes_it() -> None:
    pairs = hpack.Decoder().decode(headers.trailers(grpc.StatusCode.NOT_FOUND, "100 % of ü\n" + "x" * 3000))
    assert dict(pairs)["grpc-status"] == "5"
    assert dict(pairs)["grpc-message"].startswith("100 %25 of %C3%BC%0Axxx")
    assert len(dict(pairs)["grpc-message"]) < 2100
    assert dict(hpack.Decoder().decode(headers.RESPONSE))[":status"] == "200"
    assert dict(hpack.Decoder().decode(headers.http_status(415))) == {":status": "415"}


def test_blocks_build_on_those_before_them() -> None:
    encoder, reader = hpack.Encoder(), headers.HeaderReader()
    first, second = (block(encoder, drover_turn=turn) for turn in "12")
    assert len(second) < len(first) / 2
    assert reader.read(first).metadata == (("drover-turn", "1"),)
    assert reader.read(second).metadata == (("drover-turn", "2"),)
    assert headers.HeaderReader().read(first).path == "/echo"


# ---- a connection


MALFORMED = {
    "path-twice": [*REQUEST, (":path", "/other")],
    "method-twice": [(":method", "GET"), *REQUEST],
    "scheme-twice": [(":scheme", "https"), *REQUEST],
    "authority-twice": [(":authority", "y"), *REQUEST],
    "of-an-answer": [(":status", "200"), *REQUEST],
    "of-nobody": [(":test", "x"), *REQUEST],
    "behind-others": [("x", "y"), *REQUEST],
    "no-path": [pair for pair in REQUEST if pair[0] != ":path"],
    "empty-path": [(name, "" if name == ":path" else value) for name, value in REQUEST],
    "no-method": [pair for pair in REQUEST if pair[0] != ":method"],
    "no-scheme": [pair for pair in REQUEST if pair[0] != ":scheme"],
    "capitals": [*REQUEST, ("X-Test", "x")],
    "connection": [*REQUEST, ("connection", "keep-alive")],
    "te": [(name, "gzip" if name == "te" else value) for name, value in REQUEST],
}


@pytest.mark.parametrize("case", MALFORMED)
def test_a_header_list_that_is_no_request_ends_its_stream_alone(case: str) -> None:
    encoder = hpack.Encoder()
    connection = greeted(frames.headers(1, encoder.encode(MALFORMED[case]), last=False))
    assert split(bytes(connection.queue.buffer))[-1] == (frames.RST_STREAM, 0, 1, Code.PROTOCOL_ERROR.to_bytes(4))
    assert not connection.streams
    assert connection.active_calls == 0
    (stream,) = connection.receive(frames.headers(3, block(encoder), last=False))
    assert stream.request.path == "/echo"


def test_a_dynamic_table_is_allowed_until_the_peer_knows_that_it_is_not() -> None:
    table, none = b"\x3f\xe1\x1f", b"\x20"
    connection = greeted(frames.headers(1, table + block(), last=False), frames.settings_ack())
    connection.receive(frames.headers(3, none + block(), last=False))
    connection.receive(frames.headers(5, block(), last=False))
    assert not connection.error
    assert list(connection.streams) == [1, 3, 5]


def test_entries_of_settings_are_counted_and_the_last_window_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """One frame of 2,730 windows made the server look at all streams as often: 22 ms."""
    connection = greeted(*(opened(number) for number in range(1, 2 * STREAMS, 2)))
    connection.refill_budget()
    entries = [struct.pack(">HL", frames.INITIAL_WINDOW_SIZE, 70_000 + number) for number in range(2_730)]
    flood = b"".join(entries)
    widened: list[int] = []
    monkeypatch.setattr(SendQueue, "widen", lambda _, stream, more: widened.append(more))
    connection.receive(frames.head(frames.SETTINGS, 0, 0, len(flood)) + flood)
    assert widened == [72_729 - frames.WINDOW] * STREAMS
    assert BUDGET - connection.budget >= len(entries) + STREAMS
    for _ in range(4):
        connection.receive(frames.head(frames.SETTINGS, 0, 0, len(flood)) + flood)
    assert goodbye(bytes(connection.queue.buffer)) == Code.ENHANCE_YOUR_CALM


def test_connections_of_one_certificate_share_a_budget() -> None:
    """One that asks for little goes on: it is the agent at work, whatever others do with its certificate."""
    share = CertificateBudget()
    connections = [greeted(opened()) for _ in range(4)]
    for connection in connections:
        connection.certificate_budget = share
    quiet, *floods = connections
    for _ in range(BUDGET // 2 // CONTROL):
        for connection in floods:
            connection.receive(PING)
            connection.queue.buffer.clear()
    assert all(connection.error for connection in floods)
    quiet.receive(PING)
    assert not quiet.error
    share.refill()
    assert share.left == BUDGET


def test_the_same_in_crumbs() -> None:
    sent = GREETING + opened() + data(b"hello") + PING + frames.reset(1, Code.NO_ERROR)
    whole, crumbs = Connection(), Connection()
    assert [stream.number for stream in whole.receive(sent)] == [1]
    seen = [stream.number for at in range(len(sent)) for stream in crumbs.receive(sent[at : at + 1])]
    assert seen == [1, 1, 1]
    assert crumbs.queue.buffer == whole.queue.buffer
    assert kinds(bytes(whole.queue.buffer)) == [frames.SETTINGS, frames.SETTINGS, frames.PING]
    assert not whole.streams


def test_headers_in_pieces_with_padding_and_priority() -> None:
    text = block()
    first = b"\3" + b"\0\0\0\0\7" + text[:10] + b"\0\0\0"
    flags = frames.PADDED | frames.WITH_PRIORITY
    connection = greeted(
        frames.head(frames.HEADERS, flags, 1, len(first)) + first,
        frames.head(frames.CONTINUATION, frames.END_HEADERS, 1, len(text) - 10) + text[10:],
        data(b"\2ab\0\0", flags=frames.PADDED | frames.END_STREAM),
    )
    stream = connection.streams[1]
    assert (stream.request.path, bytes(stream.received), stream.peer_ended) == ("/echo", b"ab", True)


BROKEN = {
    "headers-first": (frames.PREFACE + opened(), Code.PROTOCOL_ERROR),
    "http1": (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", Code.PROTOCOL_ERROR),
    "tls": (b"\x16\x03\x01\x02\x00\x01", Code.PROTOCOL_ERROR),
    "too-long-a-frame": (GREETING + frames.head(0, 0, 1, 16_385), Code.FRAME_SIZE_ERROR),
    "even-stream": (GREETING + opened(2), Code.PROTOCOL_ERROR),
    "data-of-nothing": (GREETING + data(b"x"), Code.PROTOCOL_ERROR),
    "reset-of-nothing": (GREETING + frames.reset(1, Code.NO_ERROR), Code.PROTOCOL_ERROR),
    "push": (GREETING + frames.head(frames.PUSH_PROMISE, 0, 1, 0), Code.PROTOCOL_ERROR),
    "continuation": (GREETING + frames.head(frames.CONTINUATION, 4, 1, 0), Code.PROTOCOL_ERROR),
    "cut-headers": (GREETING + frames.head(frames.HEADERS, 0, 1, 1) + b"\x88" + PING, Code.PROTOCOL_ERROR),
    "all-padding": (GREETING + opened() + data(b"\5ab", flags=frames.PADDED), Code.PROTOCOL_ERROR),
    "no-hpack": (GREETING + frames.headers(1, b"\xff\xff\xff\xff\xff", last=False), Code.COMPRESSION_ERROR),
    "long-list": (GREETING + frames.headers(1, block(x="y" * 40_000), last=False), Code.ENHANCE_YOUR_CALM),
    "packed-list": (
        GREETING + frames.headers(1, b"\x40\x01x\x7f\x81\x1f" + b"y" * 4096 + b"\xbe" * 20, last=False),
        Code.COMPRESSION_ERROR,
    ),
    "window-too-large": (GREETING + frames.window_update(0, 2**31 - 1), Code.FLOW_CONTROL_ERROR),
    "stream-window-too-large": (
        GREETING + opened() + frames.window_update(1, 2**31 - 1),
        Code.FLOW_CONTROL_ERROR,
    ),
    "first-window-too-large": (GREETING + frames.settings({4: 2**31}), Code.FLOW_CONTROL_ERROR),
    "window-not-larger": (GREETING + frames.window_update(0, 0), Code.PROTOCOL_ERROR),
    "short-ping": (GREETING + frames.head(frames.PING, 0, 0, 1) + b"x", Code.FRAME_SIZE_ERROR),
    "odd-settings": (GREETING + frames.head(frames.SETTINGS, 0, 0, 1) + b"x", Code.FRAME_SIZE_ERROR),
    "headers-again": (GREETING + opened() + opened(), Code.PROTOCOL_ERROR),
    "push-neither-on-nor-off": (GREETING + frames.settings({frames.ENABLE_PUSH: 2}), Code.PROTOCOL_ERROR),
    "frames-too-short": (GREETING + frames.settings({frames.MAX_FRAME_SIZE: 16_383}), Code.PROTOCOL_ERROR),
    "frames-too-long": (GREETING + frames.settings({frames.MAX_FRAME_SIZE: 2**24}), Code.PROTOCOL_ERROR),
    "a-table": (
        GREETING + frames.settings_ack() + frames.headers(1, b"\x3f\xe1\x1f" + block(), last=False),
        Code.COMPRESSION_ERROR,
    ),
    "data-behind-the-end": (
        GREETING + opened() + data(b"", flags=frames.END_STREAM) + data(b"more"),
        Code.STREAM_CLOSED,
    ),
    "headers-behind-the-end": (
        GREETING + opened() + data(b"", flags=frames.END_STREAM) + opened(),
        Code.STREAM_CLOSED,
    ),
    "depends-on-itself": (
        GREETING + frames.head(frames.PRIORITY, 0, 1, 5) + b"\0\0\0\1\7",
        Code.PROTOCOL_ERROR,
    ),
    "begins-and-depends-on-itself": (
        GREETING + frames.head(frames.HEADERS, frames.WITH_PRIORITY | 4, 1, 5) + b"\0\0\0\1\7",
        Code.PROTOCOL_ERROR,
    ),
    "priority-of-nothing": (GREETING + frames.head(frames.PRIORITY, 0, 0, 5) + bytes(5), Code.PROTOCOL_ERROR),
    "short-priority": (GREETING + frames.head(frames.PRIORITY, 0, 1, 4) + bytes(4), Code.FRAME_SIZE_ERROR),
    "goaway-of-a-stream": (GREETING + frames.head(frames.GOAWAY, 0, 1, 8) + bytes(8), Code.PROTOCOL_ERROR),
    "beyond-the-window": (GREETING + opened() + data(bytes(16_384)) * 4, Code.FLOW_CONTROL_ERROR),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_breaks_a_connection(case: str) -> None:
    sent, code = BROKEN[case]
    connection = Connection()
    connection.receive(sent)
    assert connection.error
    assert goodbye(bytes(connection.queue.buffer)) == code
    before = len(connection.queue.buffer)
    assert connection.receive(GREETING + opened(9)) == []
    assert len(connection.queue.buffer) == before


FLOODS = {
    "pings": PING,
    "settings": frames.settings({}),
    "ping-answers": frames.ping(b"12345678", answer=True),
    "empty-data": data(b""),
    "crumbs": data(b"x"),
    "windows": frames.window_update(0, 1),
    "unknown": frames.head(0x55, 0, 0, 0),
    "priorities": frames.head(frames.PRIORITY, 0, 1, 5) + bytes(5),
}


@pytest.mark.parametrize("case", [*FLOODS, "resets", "continuations"])
def test_floods_end_the_connection_within_bounds(case: str) -> None:
    connection, _ = open_stream()
    if case == "continuations":
        connection.receive(frames.head(frames.HEADERS, 0, 3, 1) + b"\x88")
    most = 0
    for turn in range(BUDGET + 1):
        number = 2 * turn + 3
        flood = frames.head(frames.CONTINUATION, 0, 3, 0) if case == "continuations" else FLOODS.get(case)
        connection.receive(flood or opened(number) + frames.reset(number, Code.NO_ERROR))
        connection.active_calls = 0  # as if each were served at once
        most = max(most, len(connection.queue.buffer))
        if connection.error:
            break
    assert goodbye(bytes(connection.queue.buffer)) == Code.ENHANCE_YOUR_CALM
    assert most < HELD_BYTES


def test_who_is_busy_gets_no_more_streams() -> None:
    connection = greeted(*(opened(number) for number in range(1, 2 * STREAMS, 2)))
    assert connection.active_calls == len(connection.streams) == STREAMS
    for stream in connection.streams.values():
        stream.served_by = "somebody"
    connection.receive(b"".join(frames.reset(number, Code.NO_ERROR) for number in range(1, 2 * STREAMS, 2)))
    connection.queue.buffer.clear()
    assert connection.receive(opened(2 * STREAMS + 1)) == []  # those that were reset are still being served
    ((kind, _, number, body),) = split(bytes(connection.queue.buffer))
    assert (kind, number, int.from_bytes(body)) == (frames.RST_STREAM, 2 * STREAMS + 1, Code.REFUSED_STREAM)
    connection.active_calls = 0
    assert connection.receive(opened(2 * STREAMS + 3)) == [connection.streams[2 * STREAMS + 3]]


def test_nobody_sends_more_than_a_window_that_nobody_takes() -> None:
    connection, stream = open_stream()
    connection.receive(data(bytes(16_384)) * 3)
    assert [number for _, _, number, _ in split(bytes(connection.queue.buffer))] == [0]  # not the stream
    connection.queue.buffer.clear()
    stream.needs_more = True  # somebody waits for the rest of a message
    connection.refill_window(stream)
    assert split(bytes(connection.queue.buffer)) == [(frames.WINDOW_UPDATE, 0, 1, (3 * 16_384).to_bytes(4))]
    assert stream.window_in == frames.WINDOW
    stream.needs_more = False
    connection.receive(data(bytes(16_383)) * 4)
    connection.queue.buffer.clear()
    connection.refill_window(stream)
    assert not connection.queue.buffer
    stream.received.clear()
    connection.refill_window(stream)
    assert stream.window_in == frames.WINDOW


def test_answers_keep_to_the_windows_of_the_peer() -> None:
    connection, stream = open_stream()
    connection.queue.write(stream, bytes(100_000))
    connection.queue.end(stream, b"trailers", at_once=False)
    said = sum(len(body) for kind, _, _, body in split(bytes(connection.queue.buffer)) if kind == frames.DATA)
    assert said == frames.WINDOW
    connection.queue.buffer.clear()
    connection.receive(frames.window_update(1, 100_000))
    assert not connection.queue.buffer  # the connection's is used up too
    connection.receive(frames.settings({frames.INITIAL_WINDOW_SIZE: 0}))  # which makes the stream's smaller
    connection.queue.buffer.clear()
    connection.receive(frames.window_update(0, 34_465))
    *rest, (kind, flags, _, body), _ = split(bytes(connection.queue.buffer))
    assert sum(len(part) for _, _, _, part in rest) == 34_465
    assert stream.window_out == 0
    assert (kind, flags & frames.END_STREAM, body) == (frames.HEADERS, frames.END_STREAM, b"trailers")
    assert stream.closed
    assert not connection.streams


def test_a_socket_that_takes_nothing_holds_little() -> None:
    connection, stream = open_stream()
    connection.receive(frames.window_update(0, 2**30) + frames.window_update(1, 2**30))
    connection.queue.write(stream, bytes(1_000_000))
    assert HELD_BYTES <= len(connection.queue.buffer) < 2 * HELD_BYTES
    said = 0
    while connection.queue.buffer:
        said += sum(len(body) for kind, _, _, body in split(bytes(connection.queue.buffer)) if kind == frames.DATA)
        connection.queue.buffer.clear()
        connection.queue.resume()
    assert said == 1_000_000
    assert not stream.unsent


def test_an_end_at_once_leaves_out_what_waits() -> None:
    connection, stream = open_stream()
    connection.queue.write(stream, bytes(100_000))
    connection.queue.buffer.clear()
    connection.queue.end(stream, b"why", at_once=True)
    assert kinds(bytes(connection.queue.buffer)) == [frames.HEADERS, frames.RST_STREAM]
    connection.queue.buffer.clear()
    connection.queue.write(stream, b"more")
    connection.queue.end(stream, b"again", at_once=True)
    connection.receive(data(bytes(5000)))  # was under way
    assert not connection.queue.buffer
    assert not stream.received


FRAME = st.builds(
    lambda kind, flags, stream, body: frames.head(kind, flags, stream, len(body)) + body,
    st.integers(0, 11), st.integers(0, 255), st.sampled_from((0, 1, 1, 2, 3, 5, 2**31 - 1)),
    st.one_of(st.binary(max_size=40), st.just(block()), st.just(bytes(16_000)), st.just(messages.wrap(b"x" * 50))),
)  # fmt: skip


@given(
    st.lists(st.one_of(FRAME, FRAME, st.just(opened(1)), st.just(PING), st.binary(max_size=60)), max_size=25),
    st.lists(st.integers(1, 2000), min_size=1, max_size=5),
    st.booleans(),
)
def test_whatever_comes_is_bounded_and_raises_nothing(sent: list[bytes], cuts: list[int], greets: bool) -> None:
    """As the server does: what changed is read, and answered; messages that are none end their stream."""
    connection = Connection()
    rest, turn = (GREETING if greets else b"") + b"".join(sent), 0
    while rest:
        part, rest = rest[: cuts[turn % len(cuts)]], rest[cuts[turn % len(cuts)] :]
        turn += 1
        for stream in connection.receive(part):
            stream.needs_more = turn % 2 == 0
            try:
                while messages.cut(stream.received, 1000) is not None:
                    connection.queue.write(stream, b"answer")
            except messages.MessageError as error:
                connection.queue.end(stream, headers.trailers(error.code, str(error)), at_once=True)
            else:
                connection.refill_window(stream)
        for stream in connection.streams.values():
            assert len(stream.received) <= frames.WINDOW + 1000
        assert len(connection.streams) <= connection.active_calls <= STREAMS
        assert len(connection.queue.buffer) < 4 * HELD_BYTES
    split(bytes(connection.queue.buffer))
    connection.abandon()
    assert not connection.streams
    assert not connection.queue.buffer

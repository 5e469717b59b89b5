"""Messages of too many parts are found out before they are parsed; those that agents send are not."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from drover_collector.ingest.decode import MAX_BLOCKS
from drover_collector.ingest.limits import Limits
from drover_collector.ingest.message_parts import (
    COLUMNS,
    FIELDS,
    RECORDS,
    SCHEMAS,
    TEXTS,
    UNCOUNTED_BYTES,
    PartsError,
    check_parts,
)
from drover_collector.store import Store
from drover_core.metrics.catalog import BY_NAME, Scope
from drover_proto import telemetry_pb2 as pb
from testbed.fleets import batch, block, hello
from testbed.hostile_agents import BATCH, HELLO, RECORD, empty_parts, nested, varint
from testbed.hostile_agents import RECORDS as SEVERAL
from testbed.ingest import EVENTS, GOOD, LIVE, Collector, event
from testbed.loop import in_loop

ENTITIES = Limits().entities
FILL = nested(b"\x52", nested(b"\x0a", bytes(UNCOUNTED_BYTES)))  # a long entry of an inventory: the rest is counted


def hello_of(part: bytes, count: int) -> bytes:
    return nested(HELLO, part * count + FILL)


def batch_of(count: int) -> bytes:
    return nested(
        BATCH, b"\x08\x02\x10\x07" + b"\x1a\x00" * count + nested(b"\x1a", nested(b"\x22", bytes(UNCOUNTED_BYTES)))
    )


def records_of(count: int) -> bytes:
    long = nested(b"\x0a", nested(b"\x12", nested(b"\x2a", bytes(UNCOUNTED_BYTES))))
    return nested(SEVERAL, b"\x0a\x02\x12\x00" * (count - 1) + long)


LISTS: dict[str, tuple[Callable[[int], bytes], int]] = {
    "entities": (lambda n: hello_of(b"\x42\x00", n), ENTITIES),
    "schemas": (lambda n: hello_of(b"\x4a\x00", n), SCHEMAS),
    "columns of one schema": (lambda n: nested(HELLO, nested(b"\x4a", b"\x1a\x00" * n) + FILL), COLUMNS),
    "columns of many": (lambda n: hello_of(nested(b"\x4a", b"\x1a\x00" * (n // 64)), 64) + b"", COLUMNS),
    "inventory": (lambda n: hello_of(b"\x52\x00", n - 1), TEXTS),
    "capabilities": (lambda n: hello_of(b"\x5a\x00", n), TEXTS),
    "blocks": (lambda n: batch_of(n - 1), MAX_BLOCKS),
    "records": (records_of, RECORDS),
    "fields that nobody knows": (lambda n: nested(BATCH, b"\x78\x01" * (n - 2) + batch_of(0)[4:]), FIELDS),
}


@pytest.mark.parametrize("name", LISTS)
def test_one_part_too_many_is_refused(name: str) -> None:
    make, most = LISTS[name]
    right, more = make(most), make(most + 64)
    assert min(len(right), len(more)) > UNCOUNTED_BYTES
    check_parts(right, ENTITIES)
    pb.AgentMessage.FromString(right)
    with pytest.raises(PartsError) as raised:
        check_parts(more, ENTITIES)
    assert raised.value.refusal.code == "too many parts"


@pytest.mark.parametrize("kind", ["records", "blocks", "entities", "schemas", "columns", "inventory", "capabilities"])
def test_bombs_are_refused(kind: str) -> None:
    with pytest.raises(PartsError):
        check_parts(empty_parts(kind, 1_000_000), ENTITIES)


def test_a_record_that_is_one_thing_and_then_another_is_refused() -> None:
    """Of the things of a `oneof` the last counts, and each is parsed."""
    changing = b"\x12\x00\x1a\x00" * 40_000
    for raw in (nested(RECORD, changing), nested(SEVERAL, nested(b"\x0a", changing))):
        with pytest.raises(PartsError):
            check_parts(raw, ENTITIES)


@pytest.mark.parametrize(
    "raw",
    [
        nested(BATCH, bytes(80_000))[:-1],
        nested(BATCH, b"\x1a\xff\xff\xff\x7f" + bytes(80_000)),
        b"\x12" + b"\xff" * 80_000,
        b"\x7b" * 80_000 + b"\x7c" * 80_000,
        nested(HELLO, FILL) + nested(BATCH, batch_of(1)),
        nested(HELLO, FILL) * 2,
        bytes(80_000),
    ],
)
def test_what_is_no_message_is_refused(raw: bytes) -> None:
    with pytest.raises(PartsError) as raised:
        check_parts(raw, ENTITIES)
    assert raised.value.refusal.code in ("junk", "too many parts")


def largest_hello() -> pb.Hello:
    """16 GPUs in 7 parts, 128 ports, all columns in many schemas, and workloads up to what an agent remembers."""
    message = hello(inventory={f"item {number}": "x" * 200 for number in range(100)})
    for index in range(ENTITIES - len(message.entities)):
        message.entities.add(index=index, scope=pb.WORKLOAD, key=f"n0/team-training-pretrain-{index:06d}-worker-0")
    for number in range(100):
        columns = [pb.Column(metric=m.id, type=m.type, name=m.name) for m in BY_NAME.values() if m.scope is Scope.GPU]
        message.schemas.append(pb.Schema(id=10 + number, scope=pb.GPU, columns=columns))
    return message


def test_the_largest_that_agents_send_is_not_refused() -> None:
    rows = [(1_700_000_000_000 + row, 1, (300.0, 50.0)) for row in range(4_000)]
    long = event(1, message="x" * 16_384)
    for message in (
        pb.AgentMessage(hello=largest_hello()),
        pb.AgentMessage(batch=batch(1, *[block(rows)] * 16)),
        pb.AgentMessage(records=pb.Records(records=[long] * 64)),
        pb.AgentMessage(record=long),
    ):
        raw = message.SerializeToString()
        assert len(raw) > UNCOUNTED_BYTES or message.HasField("record")
        check_parts(raw, ENTITIES)


@in_loop
async def test_the_largest_hello_is_welcomed(store: Store) -> None:
    async with Collector(store) as collector, collector.agent(largest_hello()) as agent:
        await agent.send(batch=batch(1, GOOD))
        await agent.until_held(LIVE, 1)


@in_loop
async def test_what_was_not_parsed_is_refused_once_and_ends_no_stream(store: Store) -> None:
    """A batch by its number, so that its agent drops it; records with one refusal for all."""
    async with Collector(store) as collector, collector.agent(hello()) as agent:
        await agent.call.write(batch_of(100_000))
        await agent.call.write(empty_parts("records", 1_000_000))
        await agent.send(records=pb.Records(records=[pb.Record(seq=9)] * (RECORDS + 1)))  # too short to be counted
        await agent.send(batch=batch(8, GOOD))
        await agent.send(record=event(1))
        await agent.until_held(LIVE, 8)
        await agent.until_held(EVENTS, 1)
        assert agent.rejected == {(LIVE, 7): f"a message with too many blocks; at most {MAX_BLOCKS} are allowed"}
        assert dict(collector.ingest.stats.rejected) == {"too many parts": 3}


def test_a_varint_is_read_as_protobuf_reads_it() -> None:
    seq = 2**64 - 1
    raw = nested(BATCH, b"\x08\x02\x10" + varint(seq) + b"\x1a\x00" * (MAX_BLOCKS * 16))
    with pytest.raises(PartsError) as raised:
        check_parts(raw, ENTITIES)
    assert (raised.value.lane, raised.value.seq) == (pb.LIVE, seq)

"""Fuzzing of the wire: whatever comes in, the collector and its good agents go on, its memory stays bounded, and no
node's data is touched but that of the node that the stream speaks for.

Real gRPC, a real Ingest, the real store. 200 sequences in the test suite, the same each time; the long form is

    DROVER_FUZZ=20000 .venv/bin/python -m pytest tests/collector/grpc_h2/test_wire_fuzz.py --timeout 7200

with as many sequences and new ones each time.
"""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

import grpc
import hypothesis
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from drover_collector.ingest.limits import Limits
from drover_collector.store import Store
from drover_proto import telemetry_pb2 as pb
from testbed.examples import examples
from testbed.fleets import T0, batch, block, everything, gpu_key, hello, index_of
from testbed.ingest import LIVE, Agent, Collector

LONG = int(os.environ.get("DROVER_FUZZ", "0"))
EXAMPLES = LONG or examples(50)
FEW = Limits(
    flush_s=0.002, retry_s=0.01, seqs_every_s=0.5, waiting_bytes=4 << 20, record_bytes=1 << 20, batch_bytes=1 << 20,
    messages_per_s=1e6, rows_per_s=1e9, bytes_per_s=1e12, events_per_s=1e6, hellos_per_s=1e6, hellos=1e6,
    fresh_per_s=1e6, alive_s=0.0, unknown_nodes=50,
)  # fmt: skip
GOOD_NODE, BAD_NODE = "n0", "n1"
NOW = T0 + 2000
POWER, TEMP = 300.0, 50.0

# ---- what comes in

U64 = st.sampled_from([0, 1, 2, 255, 256, 2**31, 2**32 - 1, 2**53, 2**63 - 1, 2**63, 2**64 - 1]) | st.integers(
    0, 2**64 - 1
)
U32 = st.sampled_from([0, 1, 2, 255, 65_535, 65_536, 2**31, 2**32 - 1]) | st.integers(0, 2**32 - 1)
I64 = st.sampled_from([-(2**63), -1, 0, 1, T0, NOW, NOW + 86_400_000, 2**53, 2**63 - 1]) | st.integers(
    -(2**63), 2**63 - 1
)
LANE = st.integers(0, 5) | st.just(2**31 - 1)
TEXT = st.text(max_size=40) | st.sampled_from(
    [
        "n0",
        "n1",
        "N1",
        "n1/",
        "n1 ",
        "n0/mlx5_0",
        "../n0",
        "n1\x00",
        "ｎ0",
        "n\u200b1",
        "\u202en1",
        "🐎" * 80,
        "x" * 9000,
    ]
)
KEY = TEXT | st.sampled_from([gpu_key(0, 0), gpu_key(1, 0), gpu_key(2, 3), "n0/mlx5_0", "n2/mlx5_1"])
BLOB = st.binary(max_size=400)

TYPE = st.sampled_from(["B", "H", "I", "Q", "h", "q", "d", "?", "", "s", "é"])
COLUMN = st.builds(pb.Column, metric=st.integers(0, 120) | U32, type=TYPE, name=TEXT)
SCHEMA = st.builds(pb.Schema, id=st.integers(0, 3) | U32, scope=st.integers(0, 6), columns=st.lists(COLUMN, max_size=6))
ENTITY = st.builds(
    pb.Entity, index=st.integers(0, 6) | U32, scope=st.integers(0, 6), key=KEY, gpu=st.integers(0, 9) | U32, uuid=TEXT,
    serial=KEY, pci=TEXT, model=TEXT, mig=TEXT, link=TEXT,
)  # fmt: skip
BLOCK = st.builds(pb.Block, schema=st.integers(0, 3) | U32, rows=st.integers(0, 9) | U32, presence=BLOB, body=BLOB)
ROW = st.tuples(I64 | st.integers(T0 - 5000, NOW), st.integers(0, 5) | st.just(65_535))


@st.composite
def good_blocks(draw: st.DrawFn) -> pb.Block:
    """A block of the right size, whose rows may be of anyone and of any time."""
    rows = draw(st.lists(ROW, min_size=1, max_size=8))
    return block([(ts_ms, entity, (draw(st.sampled_from([None, POWER, 0.0])), TEMP)) for ts_ms, entity in rows])


BATCH = st.builds(pb.Batch, lane=LANE, seq=U64, blocks=st.lists(BLOCK | good_blocks(), max_size=4))
EVENT = st.builds(
    pb.Event, ts_ms=I64, gpu=st.none() | U32, kind=TEXT | st.sampled_from(["xid", "sxid", "kernel", "lifecycle"]),
    code=TEXT, message=TEXT, source=TEXT, backlog=st.booleans(), count=U32, forgeable=st.booleans(),
)  # fmt: skip
ABSENCE = st.builds(
    pb.Absence, gpu=st.none() | U32, link=TEXT, metric=TEXT | st.just("power_w"), reason=TEXT | st.just("lost"),
    from_ms=I64, to_ms=st.none() | I64,
)  # fmt: skip
HOLDING = st.builds(pb.Holding, gpu=U32, job=TEXT, from_ms=I64)
RESULT = {"id": "r/0", "node": "n1", "gpu": 0, "probe": "launch", "ts_ms": 1, "ok": None, "value": 5.0, "unit": "us"}
ODD_RESULT = st.builds(lambda key, value: json.dumps(RESULT | {key: value}), st.sampled_from(list(RESULT)), I64 | TEXT)
PROBE_RESULT = st.builds(pb.ProbeResult, request_id=TEXT, json=TEXT | ODD_RESULT)
RECORD = (
    st.builds(pb.Record, seq=U64, event=EVENT)
    | st.builds(pb.Record, seq=U64, absence=ABSENCE)
    | st.builds(pb.Record, seq=U64, holding=HOLDING)
    | st.builds(pb.Record, seq=U64, probe_result=PROBE_RESULT)
    | st.builds(pb.Record, seq=U64)
)


@st.composite
def hellos(draw: st.DrawFn) -> pb.Hello:
    """Of the bad node, with parts that are not right."""
    message = hello(BAD_NODE, spool=draw(st.sampled_from(["s1", "s2", ""]) | TEXT))
    message.entities.extend(draw(st.lists(ENTITY, max_size=5)))
    message.schemas.extend(draw(st.lists(SCHEMA, max_size=3)))
    message.ts_ms = draw(I64)
    message.node = draw(st.just(BAD_NODE) | TEXT.filter(lambda text: text != GOOD_NODE))
    message.boot_id = draw(TEXT)
    message.protocol = draw(st.sampled_from([1, 1, 1, 0, 2**32 - 1]))
    for key, value in draw(st.dictionaries(TEXT, TEXT, max_size=4)).items():
        message.inventory[key] = value
    if draw(st.booleans()):  # numbers sent twice mean the last or the first, never another node's
        message.entities.extend(message.entities[:3])
    return message


MESSAGE = (
    st.builds(pb.AgentMessage, hello=hellos())
    | st.builds(pb.AgentMessage, batch=BATCH)
    | st.builds(pb.AgentMessage, record=RECORD)
    | st.builds(pb.AgentMessage, records=st.builds(pb.Records, records=st.lists(RECORD, max_size=4)))
)


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """A valid message with some bits turned, cut off, repeated, or with foreign bytes in it."""
    raw = bytearray(draw(MESSAGE).SerializeToString())
    for _ in range(draw(st.integers(0, 4))):
        if not raw:
            break
        at = draw(st.integers(0, len(raw) - 1))
        match draw(st.integers(0, 4)):
            case 0:
                raw[at] ^= 1 << draw(st.integers(0, 7))
            case 1:
                del raw[at:]
            case 2:
                raw[at:at] = draw(st.binary(max_size=20))
            case 3:
                raw[at:at] = raw[:at][-200:] * draw(st.integers(1, 20))
            case 4:
                raw[at] = 0xFF  # a length or number far beyond what follows
    return bytes(raw)


def nested(depth: int) -> bytes:
    """Groups within groups, which parsers follow by recursion."""
    return b"\x7b" * depth + b"\x7c" * depth


INPUT = (
    mutated()
    | MESSAGE.map(lambda message: message.SerializeToString())
    | st.binary(max_size=300)
    | st.integers(1, 20_000).map(nested)
)
SEQUENCE = st.lists(INPUT, min_size=1, max_size=12)

# ---- what must hold


class Bench:
    """One collector for all examples, and an agent of node n0 that must not notice anything."""

    def __init__(self, store: Store) -> None:
        self.store, self.runner = store, asyncio.Runner()
        self.collector = Collector(store, FEW, now_ms=NOW)
        self.sequence = 0
        self.ids = np.array([row.entity_id for row in everything(3) if row.node != BAD_NODE], np.uint64)

    def start(self) -> None:
        async def begin() -> None:
            await self.collector.__aenter__()
            self.good = self.collector.agent(hello(GOOD_NODE))
            self.agent: Agent = await self.good.__aenter__()

        self.runner.run(begin())

    def stop(self) -> None:
        async def end() -> None:
            await self.good.__aexit__(None, None, None)
            await self.collector.__aexit__(None, None, None)

        self.runner.run(end())
        self.runner.close()

    async def attack(self, messages: list[bytes], with_hello: bool) -> None:
        """Send it all on a stream of its own, with a message of the good agent between, and see that agent served."""
        async with self.collector.agent(hello(BAD_NODE) if with_hello else None) as bad:
            try:
                for number, raw in enumerate(messages):
                    await bad.call.write(raw)
                    if number == len(messages) // 2:
                        await self.send_good()
                await bad.call.done_writing()
                while isinstance(await asyncio.wait_for(bad.call.read(), 120), pb.CollectorMessage):
                    pass
            except (grpc.RpcError, asyncio.InvalidStateError, grpc.aio.UsageError):
                pass  # the collector may end this stream, and does
        await self.send_good()
        await self.agent.until_held(LIVE, self.sequence)

    async def send_good(self) -> None:
        self.sequence += 1
        row = (T0 + self.sequence % 1900, 1, (POWER, TEMP))
        await self.agent.send(batch=batch(self.sequence, block([row])))

    def check(self) -> None:
        ingest = self.collector.ingest
        stats, limits = ingest.stats, ingest._context.limits
        assert self.agent.rejected == {}
        assert stats.defects == 0, stats.defect
        assert stats.store_failures == 0, stats.troubles
        # Everything that agents can make grow has an end.
        assert stats.connected <= 2
        assert stats.waiting_bytes <= limits.waiting_bytes + limits.record_bytes + 2 * limits.batch_bytes
        assert len(stats.unknown_nodes) <= limits.unknown_nodes
        assert len(stats.unknown_metrics) <= 1000
        assert len(stats.last_seen) <= limits.unknown_nodes + 3
        assert len(stats.agent_versions) <= limits.unknown_nodes + 3
        assert len(ingest._writer.offsets) <= 16 * 3 + 20_000
        assert len(stats.rejected) <= 40  # reasons are a few words of the collector, not what agents send
        assert len(stats.skipped) <= 10

    def check_stored(self) -> None:
        """Of the other nodes' things only the good agent's rows are there, as it sent them; nothing stands under a
        GPU of theirs but what is theirs; no record of theirs came from the bad node."""
        store = self.store
        rows = store.clients.rows(
            "SELECT entity_id, toUnixTimestamp64Milli(ts) AS ts_ms, power_w, gpu_temp_c FROM gpu_samples FINAL"
        )
        mine = store.entities.gpu_id(gpu_key(0, 0), GOOD_NODE, index_of().near(GOOD_NODE))
        seen = [row for row in rows if row["entity_id"] == mine]
        sent = {T0 + seq % 1900 for seq in range(1, self.sequence + 1)}
        assert {row["ts_ms"] for row in seen} == sent
        placed = store.clients.rows("SELECT entity_id, scope, key, node FROM entities FINAL")
        for row in placed:
            if row["scope"] != "gpu":
                assert row["key"].partition("/")[0] == row["node"], row
        for table in ("events", "absences", "holdings"):
            nodes = {row["node"] for row in store.clients.rows(f"SELECT DISTINCT node FROM {table}")}
            assert not nodes & {GOOD_NODE, "n2"}, (table, nodes)


@pytest.fixture
def bench(store: Store) -> Any:
    made = Bench(store)
    made.start()
    yield made
    made.stop()


def test_no_input_stops_the_collector_grows_it_or_lands_elsewhere(bench: Bench) -> None:
    count = 0

    @settings(
        max_examples=EXAMPLES, derandomize=not LONG, database=None,
        suppress_health_check=list(HealthCheck), phases=(hypothesis.Phase.explicit, hypothesis.Phase.generate),
    )  # fmt: skip
    @given(SEQUENCE, st.booleans())
    def run(messages: list[bytes], with_hello: bool) -> None:
        nonlocal count
        count += 1
        bench.runner.run(bench.attack(messages, with_hello))
        bench.check()
        if count % EXAMPLES == 0:
            bench.check_stored()

    run()
    bench.check_stored()
    assert bench.sequence > EXAMPLES

"""When an Ack leaves, and what it says."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from drover_collector.ingest.acks import (
    ACKS_PER_S,
    FEW,
    MAX_PAUSE_S,
    MESSAGES,
    SOME_S,
    AckSender,
)
from drover_collector.ingest.context import IngestContext
from drover_collector.ingest.limits import AgentAllowance, Limits
from drover_collector.ingest.offsets import LaneOffsets
from drover_collector.ingest.schema_registry import Refusal
from drover_collector.ingest.session import Session, encode_ack
from drover_collector.ingest.stats import IngestStats
from drover_proto import telemetry_pb2 as pb
from testbed.loop import in_loop

NOW_MS = 1_800_000_000_000


class Reader:
    """An agent that takes answers at once, or `late`."""

    def __init__(self) -> None:
        self.late = False
        self.received: list[pb.CollectorMessage] = []

    def try_write(self, message: bytes) -> bool:
        if not self.late:
            self.received.append(pb.CollectorMessage.FromString(message))
        return not self.late


def made(streams: int) -> tuple[AckSender, Session, Reader]:
    reader = Reader()
    session = Session(reader, AgentAllowance(Limits()))
    session.acks.waiting = 100
    return sender(streams, {pb.LIVE: 7}), session, reader


def sender(streams: int, held: dict[int, int]) -> AckSender:
    context = SimpleNamespace(stats=IngestStats(connected=streams), now_ms=lambda: NOW_MS)
    return AckSender(cast("IngestContext", context), cast("LaneOffsets", SimpleNamespace(get=lambda _: held)))


@pytest.mark.parametrize(
    ("streams", "pause_s"),
    [
        (1, 1 / ACKS_PER_S),
        (FEW, FEW / ACKS_PER_S),
        (FEW + 1, SOME_S),
        (2_400, 4.0),
        (6_000, 10.0),
        (12_500, MAX_PAUSE_S),
    ],
)
def test_the_more_streams_the_longer_each_waits(streams: int, pause_s: float) -> None:
    assert sender(streams, {}).pause_s == pytest.approx(pause_s)


@in_loop
async def test_an_ack_stands_for_several_messages_and_a_refusal_does_not_wait() -> None:
    acks, session, reader = made(500)
    acks.settle(session, 1, True, at_once=False)
    assert len(reader.received) == 1  # the first: none has left yet
    acks.settle(session, MESSAGES - 1, True, at_once=False)
    acks.try_send_if_soon(session)
    acks.send_due()
    assert len(reader.received) == 1
    acks.settle(session, 1, True, at_once=False)
    assert len(reader.received) == 2
    session.acks.refuse(pb.LIVE, 9, Refusal("bad time", "too old"))
    acks.settle(session, 1, True, at_once=False)
    assert [len(said.ack.rejected) for said in reader.received] == [0, 0, 1]
    acks.settle(session, 1, False, at_once=True)  # given up: nothing is durable
    assert len(reader.received) == 3


@in_loop
async def test_what_cannot_be_sent_at_once_is_not_lost() -> None:
    _, session, reader = made(1)
    session.acks.refuse(pb.LIVE, 9, Refusal("bad time", "too old"))
    session.acks.unacked, reader.late = 3, True
    assert not session.acks.try_send(session.stream, {pb.LIVE: 9}, NOW_MS)
    assert session.acks.unacked == 3 and session.acks.urgent
    reader.late = False
    assert session.acks.try_send(session.stream, {pb.LIVE: 9}, NOW_MS)
    assert session.acks.unacked == 0 and not session.acks.urgent
    assert [each.seq for each in reader.received[0].ack.rejected] == [9]


def test_nothing_of_one_ack_is_in_the_next() -> None:
    refused = [pb.Rejection(lane=pb.LIVE, seq=4, reason="bad")]
    first = pb.CollectorMessage.FromString(encode_ack({pb.LIVE: 4, pb.EVENTS: 2}, NOW_MS, refused)).ack
    assert {each.lane: each.seq for each in first.held} == {pb.EVENTS: 2, pb.LIVE: 4, pb.BACKFILL: 0}
    assert list(first.rejected) == refused and first.ts_ms == NOW_MS
    second = pb.CollectorMessage.FromString(encode_ack({pb.BACKFILL: 1}, NOW_MS + 1, ())).ack
    assert {each.lane: each.seq for each in second.held} == {pb.EVENTS: 0, pb.LIVE: 0, pb.BACKFILL: 1}
    assert not second.rejected and second.ts_ms == NOW_MS + 1

"""The bytes that are sent mean the same as a message that was parsed, given its sequence, and serialised."""

from __future__ import annotations

import pytest

from drover_agent.spool.messages import agent_message, outgoing
from drover_proto import telemetry_pb2 as pb

BATCH = pb.Batch(
    blocks=[pb.Block(schema=n, rows=2, presence=b"\xff" * 20, body=b"x" * size) for n, size in ((1, 9), (7, 4_000))]
)
RECORDS = [
    pb.Record(event=pb.Event(ts_ms=1_800_000_000_000, gpu=0, kind="xid", code="79", message="NVRM: Xid 79", count=3)),
    pb.Record(absence=pb.Absence(gpu=3, link="mlx5_0/1", metric="power_w", reason="lost", from_ms=1)),
    pb.Record(holding=pb.Holding(gpu=255, job="", from_ms=2)),
    pb.Record(probe_result=pb.ProbeResult(request_id="r1", json="{}" * 9_000)),
]
SEQUENCES = [1, 127, 128, 2**32 + 5, 2**63]


def by_parsing(lane: int, seq: int, payload: bytes) -> pb.AgentMessage:
    """Return what release 0.1 sent of a stored payload."""
    message = pb.AgentMessage()
    if lane == pb.EVENTS:
        message.record.MergeFromString(payload)
        message.record.seq = seq
    else:
        message.batch.MergeFromString(payload)
        message.batch.lane = pb.LIVE if lane == pb.LIVE else pb.BACKFILL
        message.batch.seq = seq
    return message


@pytest.mark.parametrize("seq", SEQUENCES)
@pytest.mark.parametrize("lane", [pb.LIVE, pb.BACKFILL])
@pytest.mark.parametrize("batch", [BATCH, pb.Batch()], ids=["blocks", "empty"])
def test_a_batch_of_both_lanes(lane: int, seq: int, batch: pb.Batch) -> None:
    payload = batch.SerializeToString()
    sent = agent_message(lane, [outgoing(lane, seq, payload).body])
    assert pb.AgentMessage.FromString(sent) == by_parsing(lane, seq, payload)


@pytest.mark.parametrize("seq", SEQUENCES)
@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.WhichOneof("body"))
def test_a_record(seq: int, record: pb.Record) -> None:
    payload = record.SerializeToString()
    sent = agent_message(pb.EVENTS, [outgoing(pb.EVENTS, seq, payload).body])
    assert pb.AgentMessage.FromString(sent) == by_parsing(pb.EVENTS, seq, payload)


def test_several_records_in_one_message_keep_their_order() -> None:
    bodies = [outgoing(pb.EVENTS, 5 + n, record.SerializeToString()).body for n, record in enumerate(RECORDS)]
    wanted = [by_parsing(pb.EVENTS, 5 + n, record.SerializeToString()).record for n, record in enumerate(RECORDS)]
    assert pb.AgentMessage.FromString(agent_message(pb.EVENTS, bodies)) == pb.AgentMessage(
        records=pb.Records(records=wanted)
    )


def test_an_unknown_field_of_a_newer_agent_is_sent_on() -> None:
    payload = BATCH.SerializeToString() + b"\xfa\x07\x03new"  # field 127
    sent = pb.AgentMessage.FromString(agent_message(pb.LIVE, [outgoing(pb.LIVE, 9, payload).body]))
    assert sent.batch.SerializeToString().endswith(b"new")
    assert sent.batch.seq == 9

"""Make the bytes of a stream's messages from stored payloads, without parsing or serialising them again.

Protobuf allows this: parts of one message may be concatenated, and of a field set twice the last value counts. So a
payload becomes a record or batch when its sequence (and lane) is appended, and a message when its field's tag is put
in front.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from google.protobuf.descriptor import Descriptor

from drover_proto import telemetry_pb2 as pb

_VARINT, _LENGTH_DELIMITED = 0, 2  # wire types of numbers, and of bytes and messages


class Outgoing(NamedTuple):
    """A record or batch that may be sent.

    Attributes:
        seq: its sequence on its lane.
        body: a serialised `Record` on the EVENTS lane, else a serialised `Batch`.
    """

    seq: int
    body: bytes


def outgoing(lane: int, seq: int, payload: bytes) -> Outgoing:
    """Return a stored payload with its sequence, and with its lane if it is a batch."""
    if lane == pb.EVENTS:
        return Outgoing(seq, payload + _RECORD_SEQ + _varint(seq))
    return Outgoing(seq, payload + (_LIVE if lane == pb.LIVE else _BACKFILL) + _BATCH_SEQ + _varint(seq))


def agent_message(lane: int, bodies: Sequence[bytes]) -> bytes:
    """Return a serialised `AgentMessage`: one batch, one record, or several records in order."""
    if lane != pb.EVENTS:
        return _BATCH + _varint(len(bodies[0])) + bodies[0]
    if len(bodies) == 1:
        return _RECORD + _varint(len(bodies[0])) + bodies[0]
    records = b"".join(_RECORDS_ITEM + _varint(len(body)) + body for body in bodies)
    return _RECORDS + _varint(len(records)) + records


def _varint(number: int) -> bytes:
    """Return a number in base 128, least significant group first, as protobuf writes lengths and tags."""
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def _tag(message: Descriptor, field: str, wire_type: int = _LENGTH_DELIMITED) -> bytes:
    return _varint(message.fields_by_name[field].number << 3 | wire_type)


_BATCH = _tag(pb.AgentMessage.DESCRIPTOR, "batch")
_RECORD = _tag(pb.AgentMessage.DESCRIPTOR, "record")
_RECORDS = _tag(pb.AgentMessage.DESCRIPTOR, "records")
_RECORDS_ITEM = _tag(pb.Records.DESCRIPTOR, "records")
_RECORD_SEQ = _tag(pb.Record.DESCRIPTOR, "seq", _VARINT)
_BATCH_SEQ = _tag(pb.Batch.DESCRIPTOR, "seq", _VARINT)
_LIVE, _BACKFILL = (_tag(pb.Batch.DESCRIPTOR, "lane", _VARINT) + _varint(lane) for lane in (pb.LIVE, pb.BACKFILL))

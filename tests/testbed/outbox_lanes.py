"""An agent's outbox, fed, and drained lane by lane."""

from __future__ import annotations

from pathlib import Path

from drover_agent.config import SpoolConfig
from drover_agent.spool.async_spool import AsyncSpool
from drover_proto import telemetry_pb2 as pb
from testbed.clock import ManualClock
from testbed.waiting import until

NOW = 1_800_000_000_000


def open_outbox(folder: Path, clock: ManualClock | None = None, **settings: int) -> AsyncSpool:
    return AsyncSpool(SpoolConfig(dir=str(folder), **settings), clock or ManualClock(NOW))


def batch(outbox: AsyncSpool, number: int, ts_ms: int = NOW, size: int = 10) -> None:
    outbox.add_batch(ts_ms, [pb.Block(schema=number, rows=1, body=b"x" * size)])


def event(outbox: AsyncSpool, code: str) -> None:
    outbox.add_record(NOW, pb.Record(event=pb.Event(ts_ms=NOW, kind="xid", code=code)))


def name(message: pb.AgentMessage) -> str:
    return message.record.event.code or str(message.batch.blocks[0].schema)


def ready(outbox: AsyncSpool, lane: int, after: int = 0) -> list[str]:
    """What may be sent this moment."""
    found = []
    while sent := outbox.next(lane, after):
        after = sent[0]
        found.append(name(sent[1]))
    return found


async def drain(outbox: AsyncSpool, lane: int, count: int, after: int = 0) -> list[tuple[int, str]]:
    """The next `count` of a lane, as a stream gets them."""
    found: list[tuple[int, str]] = []

    def more() -> bool:
        nonlocal after
        while sent := outbox.next(lane, after):
            after = sent[0]
            assert (sent[1].record.seq or sent[1].batch.seq) == after
            found.append((after, name(sent[1])))
        return len(found) >= count

    await until(more, f"{count} of lane {lane}, got {found}")
    return found


def names(found: list[tuple[int, str]]) -> list[str]:
    return [one for _, one in found]

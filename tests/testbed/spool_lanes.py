"""A spool for tests: fill it, and drain it lane by lane."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from drover_agent.config import SpoolConfig
from drover_agent.spool.async_spool import AsyncSpool
from drover_agent.spool.messages import Outgoing, agent_message
from drover_proto import telemetry_pb2 as pb
from testbed.clock import ManualClock
from testbed.waiting import until

NOW = 1_800_000_000_000


def open_spool(
    folder: Path, clock: ManualClock | None = None, on_ready: Callable[[], None] = lambda: None, **settings: int
) -> AsyncSpool:
    return AsyncSpool(SpoolConfig(dir=str(folder), **settings), clock or ManualClock(NOW), on_ready=on_ready)


def batch(spool: AsyncSpool, number: int, ts_ms: int = NOW, size: int = 10) -> None:
    spool.add_batch(ts_ms, [pb.Block(schema=number, rows=1, body=b"x" * size)])


def event(spool: AsyncSpool, code: str) -> None:
    spool.add_record(NOW, pb.Record(event=pb.Event(ts_ms=NOW, kind="xid", code=code)))


def parse(lane: int, sent: Outgoing) -> pb.AgentMessage:
    """Return the message as a collector reads it."""
    return pb.AgentMessage.FromString(agent_message(lane, [sent.body]))


def name(lane: int, sent: Outgoing) -> str:
    message = parse(lane, sent)
    return message.record.event.code or str(message.batch.blocks[0].schema)


def ready(spool: AsyncSpool, lane: int, after: int = 0) -> list[str]:
    """What may be sent this moment."""
    found = []
    while sent := spool.next(lane, after):
        after = sent[0]
        found.append(name(lane, sent))
    return found


async def drain(spool: AsyncSpool, lane: int, count: int, after: int = 0) -> list[tuple[int, str]]:
    """The next `count` of a lane, as a stream gets them."""
    found: list[tuple[int, str]] = []

    def more() -> bool:
        nonlocal after
        while sent := spool.next(lane, after):
            after = sent[0]
            message = parse(lane, sent)
            assert (message.record.seq or message.batch.seq) == after
            found.append((after, name(lane, sent)))
        return len(found) >= count

    await until(more, f"{count} of lane {lane}, got {found}")
    return found


def names(found: list[tuple[int, str]]) -> list[str]:
    return [one for _, one in found]

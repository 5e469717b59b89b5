"""Whatever fails and in whatever order: what was acknowledged is in the store, once, with its values.

The real store and server. An insert is refused before or after it was done, a stream is lost, the collector is killed
or started again, at any moment. The agent is the strictest there can be: it forgets what is acknowledged at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from drover_collector.ingest.limits import Limits
from drover_collector.store import Store, StoreError
from drover_core.metrics.catalog import BY_NAME
from drover_proto import telemetry_pb2 as pb
from testbed.examples import examples
from testbed.fleets import T0, batch, block, hello
from testbed.ingest import EVENTS, LIVE, Collector, event
from testbed.waiting import until

WRITES = {
    "write_samples": ("samples", "write"),
    "write_events": ("events", "write"),
    "mark_late": ("dirty_ranges", "mark_late"),
    "write_lane_seqs": ("offsets", "write"),
}
REFUSED = [f"{name} {when}" for name in WRITES for when in ("before", "after")]  # it is done
STEPS = ("telemetry", "event", "telemetry", "event", "cut", "killed", "started again", "turn", *REFUSED)
LIMITS = Limits(
    flush_s=0.005, retry_s=0.005, check_s=0.01, seqs_every_s=0.02, backoff_ms=1, waiting_bytes=6_000,
    record_bytes=6_000, ends_per_s=1_000,
)  # fmt: skip
WINDOW_MS = 100_000  # of one example
_examples = itertools.count(1)


class Faults:
    """What becomes of the next writes: of each kind, whether it is refused before or after it is done."""

    def __init__(self) -> None:
        self.next: dict[str, list[str]] = {name: [] for name in WRITES}

    def add(self, step: str) -> None:
        name, _, when = step.partition(" ")
        self.next[name].append(when)

    def clear(self) -> None:
        for waiting in self.next.values():
            waiting.clear()

    def around(self, name: str, write: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*args: Any) -> Any:
            when = self.next[name].pop(0) if self.next[name] and args[0] else ""
            if when == "before":
                raise StoreError(when)
            found = write(*args)
            if when:
                raise StoreError(when)
            return found

        return guarded


class Strict:
    """An agent's spool and uplink, in memory."""

    def __init__(self, number: int) -> None:
        self.spool, self.base_ms = f"s{number}", T0 + number * WINDOW_MS
        self.kept: dict[pb.Lane.ValueType, dict[int, pb.AgentMessage]] = {LIVE: {}, EVENTS: {}}
        self.sent: dict[pb.Lane.ValueType, int] = {LIVE: 0, EVENTS: 0}
        self.expected: dict[int, float] = {}
        self._call: Any = None
        self._reading: asyncio.Task[None] | None = None
        self._channel: grpc.aio.Channel | None = None

    def keep(self, lane: pb.Lane.ValueType) -> pb.AgentMessage:
        self.sent[lane] += 1
        seq = self.sent[lane]
        ts_ms = self.base_ms + 1000 * seq
        if lane == LIVE:
            self.expected[ts_ms] = 100.0 + seq
            made = pb.AgentMessage(batch=batch(seq, block([(ts_ms, 1, (100.0 + seq, 40.0))])))
        else:
            made = pb.AgentMessage(record=event(seq, ts_ms))
        self.kept[lane][seq] = made
        return made

    async def send(self, port: int, message: pb.AgentMessage | None = None) -> None:
        """On the stream there is, else on a new one, which begins with all that is kept."""
        if self._reading is None or self._reading.done():
            await self.cut()
            await self._connect(port)
        elif message is not None:
            with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
                await self._call.write(message.SerializeToString())

    async def _connect(self, port: int) -> None:
        self._channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=(("grpc.use_local_subchannel_pool", 1),))
        self._call = self._channel.stream_stream(
            "/drover.telemetry.v1.Telemetry/Stream", response_deserializer=pb.CollectorMessage.FromString
        )()
        with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
            first = hello(spool=self.spool, boot_id="b1", ts_ms=self.base_ms)
            await self._call.write(pb.AgentMessage(hello=first).SerializeToString())
            self._take(await self._call.read())
            for lane in (EVENTS, LIVE):
                for each in list(self.kept[lane].values()):
                    await self._call.write(each.SerializeToString())
        self._reading = asyncio.create_task(self._read())

    def _take(self, answer: Any) -> None:
        if not isinstance(answer, pb.CollectorMessage):
            return
        assert not answer.ack.rejected, answer.ack.rejected
        for held in (*answer.welcome.held, *answer.ack.held):
            for seq in [seq for seq in self.kept.get(held.lane, ()) if seq <= held.seq]:
                del self.kept[held.lane][seq]

    async def _read(self) -> None:
        with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
            while isinstance(answer := await self._call.read(), pb.CollectorMessage):
                self._take(answer)

    async def cut(self) -> None:
        if self._call is not None:
            self._call.cancel()
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait([self._reading])
            self._reading = None
        if self._channel is not None:
            await self._channel.close()


def had_its_turn(collector: Collector, faults: Faults) -> bool:
    return not collector.ingest.stats.waiting_bytes or any(faults.next.values())


async def killed(collector: Collector) -> None:
    """As little as can be done of its stop."""
    ingest = collector.ingest
    for task in (*ingest._writer._tasks, *([ingest._checker] if ingest._checker else ())):
        task.cancel()
    await collector.server.stop(0)


@pytest.fixture
def faulty(store: Store, monkeypatch: pytest.MonkeyPatch) -> tuple[Store, Faults]:
    """One for all examples; each has a spool and a time of its own."""
    faults = Faults()
    for name, (part, method) in WRITES.items():
        table = getattr(store, part)
        monkeypatch.setattr(table, method, faults.around(name, getattr(table, method)))
    return store, faults


@given(st.lists(st.sampled_from(STEPS), min_size=6, max_size=20))
@settings(max_examples=examples(12), suppress_health_check=list(HealthCheck))
def test_what_is_acknowledged_is_stored_once_whatever_fails(faulty: tuple[Store, Faults], plan: list[str]) -> None:
    store, faults = faulty
    agent = Strict(next(_examples))

    async def scenario() -> None:
        now_ms = agent.base_ms + WINDOW_MS // 2
        collector = await Collector(store, LIMITS, now_ms=now_ms).__aenter__()
        for step in plan:
            match step:
                case "telemetry" | "event":
                    await agent.send(collector.port, agent.keep(LIVE if step == "telemetry" else EVENTS))
                case "cut":
                    await agent.cut()
                case "turn":
                    await until(partial(had_its_turn, collector, faults), "the store had its turn")
                case _ if step in REFUSED:
                    faults.add(step)
                case _:
                    await (killed(collector) if step == "killed" else collector.__aexit__())
                    collector = await Collector(store, LIMITS, now_ms=now_ms).__aenter__()
        faults.clear()
        for _ in range(400):
            await agent.send(collector.port)
            with contextlib.suppress(AssertionError):
                await until(lambda: not any(agent.kept.values()), "all is acknowledged", 0.05)
                break
        assert agent.kept == {LIVE: {}, EVENTS: {}}
        await agent.cut()
        await collector.__aexit__()

    asyncio.run(scenario())
    low, high = agent.base_ms, agent.base_ms + WINDOW_MS
    found = store.clients.rows(
        "SELECT toUnixTimestamp64Milli(ts) AS at, power_w FROM gpu_samples FINAL"
        f" WHERE ts >= fromUnixTimestamp64Milli({low}) AND ts < fromUnixTimestamp64Milli({high})"
    )
    assert sorted((row["at"], row["power_w"] * BY_NAME["power_w"].step) for row in found) == [
        (at, pytest.approx(value)) for at, value in sorted(agent.expected.items())
    ]
    assert sorted(e.id for e in store.events.read(low, high)) == sorted(
        f"n0/{agent.spool}/{seq}" for seq in range(1, agent.sent[EVENTS] + 1)
    )

"""Send each agent what its node's gate is to answer (`drover-agent gate`): after its Welcome, and with each change.

It is repeated each minute, from a fresh look at the decisions. A collector that ingests and no longer judges therefore
falls silent here, and the gates know that nobody answers.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from drover_collector.pipeline.pipeline import Pipeline
from drover_collector.policy.gate import NOTHING_KNOWN, GateVerdict, gate_verdicts, in_mode, of_outages
from drover_collector.policy.policy import least_mode
from drover_collector.store import StoreError
from drover_proto import telemetry_pb2 as pb

log = logging.getLogger(__name__)

LOOK_S = 1.0
FOLLOW_S = 5.0  # for a collector that does not detect, and reads what the active one has stored
REPEAT_S = 60.0  # a gate takes an answer for fresh for three times as long (`FRESH_S` of the agent)
MOST_AT_ONCE = 2_000  # streams in one look: all agents connect at once after a start
MAX_TEXT = 400


class GateStream(Protocol):
    """An agent's stream, after its Welcome."""

    node: str

    def try_send(self, message: pb.CollectorMessage) -> bool:
        """Send if that needs no waiting. Return whether it was sent."""


class GateSender:
    """Event loop only.

    Args:
        streams: returns those of all agents that have their Welcome.
    """

    def __init__(self, pipeline: Pipeline, streams: Callable[[], Sequence[GateStream]]) -> None:
        self._pipeline, self._streams = pipeline, streams
        self._sent: dict[str, tuple[GateStream, GateVerdict, str, float]] = {}  # with the mode, and when it is due

    async def run(self) -> None:
        """Run until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S if self._pipeline.leading else FOLLOW_S)
            try:
                await self.send_due()
            except Exception as error:  # noqa: BLE001  # a defect must neither end this task nor go unseen
                self._pipeline.ticks.failed(error, self._pipeline.now_ms())

    async def send_due(self) -> None:
        """Send what is new for its stream, has changed, or is to be repeated."""
        found = await self._verdicts()
        if found is None:
            return
        ceiling = self._pipeline.ceiling
        mode = least_mode(self._pipeline.policy.most_mode, ceiling)
        now_s, left = time.monotonic(), MOST_AT_ONCE
        before, self._sent = self._sent, {}
        for stream in self._streams():
            node = stream.node
            verdict, last = in_mode(found.get(node, NOTHING_KNOWN), mode, ceiling), before.get(node)
            if last is not None and last[:3] == (stream, verdict, mode) and now_s < last[3]:
                self._sent[node] = last
            elif left > 0 and stream.try_send(pb.CollectorMessage(gate_verdict=self._message(node, verdict, mode))):
                left -= 1
                self._sent[node] = stream, verdict, mode, now_s + random.uniform(0.7, 1.0) * REPEAT_S

    def _message(self, node: str, verdict: GateVerdict, mode: str) -> pb.GateVerdict:
        desk = self._pipeline.dispatcher
        return pb.GateVerdict(
            answer=verdict.answer, text=verdict.text[:MAX_TEXT], incident=verdict.incident, mode=mode,
            ts_ms=self._pipeline.now_ms(),
            closed_by=desk.context.actuators.scheduler(node) if verdict.closed and desk is not None else "",
        )  # fmt: skip

    async def _verdicts(self) -> Mapping[str, GateVerdict] | None:
        """Return the verdicts of nodes against which something stands; None: it is not known now."""
        pipeline = self._pipeline
        if pipeline.leading:
            found: dict[str, GateVerdict] = {}
            await pipeline.in_engine_thread(lambda: found.update(gate_verdicts(pipeline.engine.decider)))
            return found
        if not pipeline.store.shared:
            return None
        try:  # another collector detects; its decisions become outages within seconds
            return of_outages(await asyncio.to_thread(pipeline.store.outages.current))
        except StoreError as error:
            log.info("gates get no verdict: %s", error)
            return None

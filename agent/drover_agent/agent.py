"""What one node tells: Readings become batches and records, go into the spool, and from there to a collector."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path

from drover_agent.absences import Absences
from drover_agent.clock import Clock, SystemClock
from drover_agent.config import AgentConfig
from drover_agent.dictionary import Dictionary
from drover_agent.merge import HOLD_MS, EventMerger
from drover_agent.sources.base import Entity, NodeEvent, Reading
from drover_agent.spool import Spool
from drover_agent.uplink import PROTOCOL, Uplink
from drover_proto import VERSION
from drover_proto import telemetry_pb2 as pb
from drover_proto.blocks import BlockBuilder
from drover_proto.catalog import BY_NAME, Absent, Metric, Scope
from drover_proto.events import EventKind

log = logging.getLogger(__name__)

GOODBYE_S = 2.0  # for the last words to be delivered at a stop
MAX_ROWS = 4_000  # rows kept for one batch; a batch leaves early at this size
LATE_WINDOWS = 2  # rows older than this many batches come from a clock that was set back, not from a slow source
REPORT_MS = 10_000  # losses and refusals are told at most this often
CLOCK_WRONG_S = 5.0


class Agent:
    """One node's voice. Not thread-safe: other threads use `loop.call_soon_threadsafe(agent.accept, ...)`.

    Raises (at construction):
        SpoolError: the spool's folder cannot be used.
    """

    def __init__(
        self,
        config: AgentConfig,
        node: str,
        inventory: Mapping[str, str] | None = None,
        *,
        clock: Clock | None = None,
    ) -> None:
        self.config, self.node = config, node
        self._clock: Clock = clock or SystemClock()
        self._inventory = dict(inventory or {})
        self._boot_id = boot_id(Path(config.proc_root))
        self.spool = Spool(config.spool, self._clock.now_ms())
        self._dictionary = Dictionary.load(self.spool.folder / "dictionary.json", self.spool.oldest_batch_ms())
        self._absences = Absences(self.spool.folder / "absences.json")
        self._columns: dict[Scope, set[str]] = {}
        self._rows: dict[tuple[int, Entity], dict[str, float]] = {}
        self._missing: dict[tuple[int, Entity], list[tuple[str, Absent]]] = {}
        self._last_ts: dict[Entity, int] = {}
        self._window: int | None = None
        # Agents send at different moments of the window, or thousands of them would all send at the same one.
        self._phase_ms = hash_of(node) % max(int(config.batch_s * 1000), 1)
        self._merger = EventMerger(expect_kernel_log=config.kmsg_enabled and config.hardware in ("auto", "nvml"))
        self._uplink = Uplink(config, self.spool, self, self._clock)
        self._events_added = asyncio.Event()
        self._refused: dict[str, int] = {}
        self._next_report_ms = 0
        self._trouble: str | None = None
        self._clock_wrong = False
        self.late_rows = 0  # rows that came after a newer one of the same thing had been packed
        self.unknown_metrics: set[str] = set()

    @property
    def connected_to(self) -> str | None:
        """Address of the collector that takes this node's data now."""
        return self._uplink.connected_to

    # ---- in

    def accept(self, ts_ms: int, reading: Reading) -> None:
        """Take what a source read at `ts_ms`. Events leave at once, telemetry every `batch_s`."""
        window = (ts_ms + self._phase_ms) // max(int(self.config.batch_s * 1000), 1)
        if self._window is None or not self._window - LATE_WINDOWS <= window <= self._window:
            self.flush()  # the next window, or a clock that was set back
            self._window = window
        for entity, values in reading.rows:
            self._rows.setdefault((ts_ms, entity), {}).update(values)
        for entity, metric, reason in reading.absent:
            self._missing.setdefault((ts_ms, entity), []).append((metric, reason))
        if reading.events or reading.holdings:
            for event in reading.events:
                self._tell(self._merger.offer(event))
            for gpu, job in reading.holdings:
                holding = pb.Holding(gpu=gpu, job=job or "", from_ms=ts_ms)
                self._add_record(ts_ms, pb.Record(holding=holding))
        if any(self._inventory.get(key) != value for key, value in reading.inventory.items()):
            self._inventory.update(reading.inventory)
            self._uplink.hello_changed()
        if len(self._rows) >= MAX_ROWS:
            self.flush()

    def tell(self, code: str, message: str, gpu: int | None = None, count: int = 1) -> None:
        """An event about the agent itself; `code` is one of LIFECYCLE_CODES."""
        now_ms = self._clock.now_ms()
        self._tell([NodeEvent(now_ms, gpu, EventKind.LIFECYCLE, code, message, "agent", count=count)])

    def _tell(self, events: Iterable[NodeEvent]) -> None:
        for event in events:
            message = pb.Event(
                ts_ms=event.ts_ms,
                gpu=event.gpu,
                kind=event.kind,
                code=event.code,
                message=event.message,
                source=event.source,
                backlog=event.backlog,
                count=event.count,
                forgeable=event.forgeable,
            )
            self._add_record(event.ts_ms, pb.Record(event=message))

    def _add_record(self, ts_ms: int, record: pb.Record) -> None:
        self.spool.add_record(ts_ms, record)
        self._events_added.set()

    # ---- telemetry

    def flush(self) -> None:
        """Pack what was accepted so far into one batch, and keep the spool in bounds."""
        now_ms = self._clock.now_ms()
        self._add_own_values()
        rows, self._rows = self._rows, {}
        missing, self._missing = self._missing, {}
        blocks = self._pack(rows, missing, now_ms)
        for ts_ms, entity in sorted(rows.keys() | missing.keys(), key=lambda key: key[0]):
            away = missing.get((ts_ms, entity), [])
            self._absences.present(entity, rows.get((ts_ms, entity), {}).keys() - {name for name, _ in away}, ts_ms)
            for name, reason in away:
                self._absences.missing(entity, name, reason, ts_ms)
        if changes := self._absences.changes():
            for absence in changes:
                self._add_record(absence.from_ms, pb.Record(absence=absence))
            self._absences.save()
        if self._dictionary.changed:
            self._uplink.hello_changed()
        if self._dictionary.due:
            try:
                self._dictionary.save()
            except OSError as error:
                log.error("%s: %s", self._dictionary.path, error.strerror)
        if blocks:
            self.spool.add_batch(max(ts for ts, _ in rows), blocks)
        self.spool.tidy(now_ms)
        self._report(now_ms)
        self._uplink.wake()

    def _pack(
        self,
        rows: Mapping[tuple[int, Entity], Mapping[str, float]],
        missing: dict[tuple[int, Entity], list[tuple[str, Absent]]],
        now_ms: int,
    ) -> list[pb.Block]:
        """Blocks of all rows, one per scope; values that cannot be true are added to `missing`."""
        names: dict[Scope, set[str]] = {}
        for (_, entity), values in rows.items():
            names.setdefault(entity.scope, set()).update(values)
        blocks = []
        for scope, found in names.items():
            known = {name for name in found if name in BY_NAME and BY_NAME[name].scope is scope}
            for name in found - known - self.unknown_metrics:
                self.unknown_metrics.add(name)
                log.error("a source gave %s for a %s, which the catalog does not have; it is dropped", name, scope)
            columns = self._columns.setdefault(scope, set())
            columns |= known
            schema, metrics = self._dictionary.schema_of(scope, columns, now_ms)
            builder = BlockBuilder(schema, metrics)
            for (ts_ms, entity), values in rows.items():
                if entity.scope is scope:
                    self._add_row(builder, ts_ms, entity, values, metrics, missing, now_ms)
            if block := builder.take():
                blocks.append(block)
        return blocks

    def _add_row(
        self,
        builder: BlockBuilder,
        ts_ms: int,
        entity: Entity,
        values: Mapping[str, float],
        metrics: tuple[Metric, ...],
        missing: dict[tuple[int, Entity], list[tuple[str, Absent]]],
        now_ms: int,
    ) -> None:
        last_ms = self._last_ts.get(entity, -1)
        if last_ms - LATE_WINDOWS * self.config.batch_s * 1000 <= ts_ms <= last_ms:
            # It may be of a second that this entity has a row of already, and the store keeps one row for each.
            self.late_rows += 1
            return
        index = self._dictionary.index_of(entity, now_ms)
        refused = builder.add(ts_ms, index, [values.get(metric.name) for metric in metrics])
        self._last_ts[entity] = ts_ms
        for column in refused:
            missing.setdefault((ts_ms, entity), []).append((metrics[column].name, Absent.OUT_OF_RANGE))

    def _add_own_values(self) -> None:
        """What the agent knows about itself joins the node's newest row."""
        newest = max((key for key in self._rows if key[1].scope is Scope.NODE), key=lambda key: key[0], default=None)
        if newest is None:
            return
        row = self._rows[newest]
        row["spool_bytes"] = float(self.spool.pending()[1])
        if self._uplink.offset_s is not None:
            row["clock_offset_s"] = self._uplink.offset_s

    def _report(self, now_ms: int) -> None:
        """Tell what was lost, refused or is in trouble."""
        if 0 < self._next_report_ms - now_ms <= REPORT_MS:  # more than that: the clock was set back
            return
        if losses := self.spool.take_losses():
            self._next_report_ms = now_ms + REPORT_MS
            parts = list(losses.damage)
            if losses.telemetry or losses.events:
                parts.append(f"{losses.telemetry} batches and {losses.events} events dropped: {losses.reason}")
            self.tell("spool_dropped", "; ".join(parts), count=max(losses.telemetry + losses.events, 1))
        refused, self._refused = self._refused, {}
        for reason, count in refused.items():
            self._next_report_ms = now_ms + REPORT_MS
            self.tell("batch_rejected", f"the collector refused {count} messages: {reason}", count=count)
        if self.spool.trouble != self._trouble:
            self._trouble = self.spool.trouble
            if self._trouble:
                self.tell("spool_unwritable", f"data is kept in memory: {self._trouble}")
        offset_s = self._uplink.offset_s or 0.0
        if (abs(offset_s) > CLOCK_WRONG_S) != self._clock_wrong:
            self._clock_wrong = not self._clock_wrong
            if self._clock_wrong:
                self.tell("clock_wrong", f"this node's clock is {offset_s:+.1f} s from the collector's")

    # ---- for the uplink

    def hello(self) -> pb.Hello:
        hello = pb.Hello(
            node=self.node,
            boot_id=self._boot_id,
            spool_id=self.spool.id,
            agent_version=VERSION,
            protocol=PROTOCOL,
            ts_ms=self._clock.now_ms(),
            interval_ms=int(self.config.interval_s * 1000),
            inventory=self._inventory,
            capabilities=[f"hardware:{self.config.hardware}", *(["kmsg"] if self.config.kmsg_enabled else [])],
        )
        self._dictionary.tell(hello)
        return hello

    def rejected(self, lane: int, seq: int, reason: str) -> None:
        known = reason if reason in self._refused or len(self._refused) < 20 else "other reasons"
        if known not in self._refused:  # once per report, or a refused backlog fills the log
            log.warning("the collector refused %s %d: %s", pb.Lane.Name(pb.Lane.ValueType(lane)), seq, reason)
        self._refused[known] = self._refused.get(known, 0) + 1

    # ---- life

    async def run(self) -> None:
        """Stream until cancelled; then say goodbye if a collector listens, and close the spool."""
        self.tell("agent_started", f"drover-agent {VERSION} started")
        tasks = [asyncio.create_task(job()) for job in (self._uplink.run, self._sync_events, self._watch_time)]
        try:
            # Not gather: its cancellation would end the uplink before the goodbye.
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            try:
                await self._goodbye()
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                self._absences.save()
                self.spool.close()

    async def _goodbye(self) -> None:
        self._tell(self._merger.flush())
        self.tell("agent_stopped", "the agent was asked to stop")
        self.flush()
        await self.spool.sync_events()
        self._uplink.wake()
        if self._uplink.connected_to:
            try:
                async with asyncio.timeout(GOODBYE_S):
                    await self._uplink.delivered()
            except TimeoutError:
                log.info("stopped with data in the spool; it is sent after the next start")

    async def _sync_events(self) -> None:
        while True:
            await self._events_added.wait()
            self._events_added.clear()
            await self.spool.sync_events()
            self._uplink.wake()

    async def _watch_time(self) -> None:
        """Summed events when their window ends; rows that wait although nothing new comes."""
        window, since = self._window, self._clock.monotonic()
        while True:
            await self._clock.sleep(HOLD_MS / 1000 if self._merger.open else 1.0)
            self._tell(self._merger.due(self._clock.now_ms()))
            if window != self._window or not self._rows:
                window, since = self._window, self._clock.monotonic()
            elif self._clock.monotonic() - since > 2 * self.config.batch_s:
                self.flush()


def boot_id(proc: Path) -> str:
    try:
        return (proc / "sys/kernel/random/boot_id").read_text("ascii").strip()
    except OSError:
        return ""


def hash_of(name: str) -> int:
    """A number that is the same in every run, unlike `hash`."""
    return uuid.uuid5(uuid.NAMESPACE_DNS, name).int

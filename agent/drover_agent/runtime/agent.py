"""The agent of one node: readings become batches and records, go into the spool, and from there to a collector."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from drover_agent.clock import Clock, SystemClock
from drover_agent.config import AgentConfig
from drover_agent.runtime.gate_file import GateFile
from drover_agent.runtime.self_reports import SelfReports
from drover_agent.sources.base import NodeEvent, Reading
from drover_agent.spool.async_spool import AsyncSpool
from drover_agent.spool.disk_thread import DiskThread
from drover_agent.telemetry.absences import Absences
from drover_agent.telemetry.batch_window import LATE_WINDOWS, BatchWindow
from drover_agent.telemetry.batcher import Batcher, Watch
from drover_agent.telemetry.event_dedup import HOLD_MS, EventMerger
from drover_agent.telemetry.schema_registry import SchemaRegistry
from drover_agent.uplink.stream import PROTOCOL, Uplink
from drover_core import VERSION
from drover_core.metrics.catalog import Scope
from drover_core.model.kinds import EventKind
from drover_proto import telemetry_pb2 as pb

log = logging.getLogger(__name__)

REGISTRY_FILE, ABSENCES_FILE = "dictionary.json", "absences.json"  # in the spool's folder
GOODBYE_S = 2.0  # to deliver the last events at a stop
MAX_ROWS = 4_000  # of one batch; a batch leaves early at this size
MAX_TEXT = 8_000  # characters of an event's message; collectors refuse twice as many
MAX_PROBE_REQUESTS = 16  # that wait for the folder of the probe service


@dataclass(frozen=True, slots=True)
class Readers:
    """Who on this node gets to know of readings and verdicts, in addition to the collector.

    Attributes:
        gate: keeps the collector's verdicts for `drover-agent gate`; None: nobody does.
        watch: gets each reading; None: nobody does.
    """

    gate: GateFile | None = None
    watch: Watch | None = None


NO_READERS = Readers()


class Inbox:
    """What a collector sends besides acknowledgements. The stream's reader adds it, so nothing here blocks.

    Attributes:
        gate: None: no gate answers from this agent.
    """

    def __init__(self, gate: GateFile | None) -> None:
        self.gate = gate
        self._requests: asyncio.Queue[pb.ProbeRequest] = asyncio.Queue(MAX_PROBE_REQUESTS)
        self._added = asyncio.Event()

    def add(self, request: pb.ProbeRequest) -> None:
        """Queue a request for the probe service."""
        try:
            self._requests.put_nowait(request)
        except asyncio.QueueFull:  # the disk hangs
            log.warning("Probe request %s is dropped: %d wait already.", request.id[:100], MAX_PROBE_REQUESTS)
        self._added.set()

    async def run(self, node: str, spool: AsyncSpool, clock: Clock) -> None:
        """Pass requests on, and results back, also those that were written while no agent ran."""
        folder = spool.folder / "probes"
        if not folder.exists():
            await self._added.wait()
        from drover_agent.probes.relay import ProbeRelay  # only nodes that are probed need it

        relay = ProbeRelay(folder, node, spool.add_record, spool.wait_stored, clock.now_ms)
        await relay.run(self._requests)


class Agent:
    """What one node sends. Not thread-safe: other threads use `loop.call_soon_threadsafe(agent.accept, ...)`.

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
        disk: DiskThread | None = None,
        readers: Readers = NO_READERS,
    ) -> None:
        """
        Args:
            disk: the thread that writes the spool; None: a thread of its own.
            readers: what else on this node gets to know of readings and verdicts.
        """
        self.config, self.node = config, node
        self._clock: Clock = clock or SystemClock()
        self._inventory = dict(inventory or {})
        if config.probe_address:
            self._inventory["probe.address"] = config.probe_address
        self._boot_id = boot_id(Path(config.proc_root))
        work = asyncio.Event()
        self.spool = AsyncSpool(config.spool, self._clock, disk, work.set)
        self._registry = SchemaRegistry.load(self.spool.folder / REGISTRY_FILE, self.spool.status.oldest_batch_ms)
        self._absences = Absences(self.spool.folder / ABSENCES_FILE, self._clock.monotonic())
        self.batcher = Batcher(self._registry, self._absences, LATE_WINDOWS * config.batch_s * 1000, readers.watch)
        self._window = BatchWindow(node, config.batch_s, self._clock)
        self._merger = EventMerger(expect_kernel_log=config.kmsg_enabled and config.hardware in ("auto", "nvml"))
        self._uplink = Uplink(config, self.spool, self, self._clock, work)
        self._holdings: dict[int, pb.Holding] = {}  # GPU slot -> the newest
        self._self_reports = SelfReports(self.spool, self._clock, self._report_own)
        self._inbox = Inbox(readers.gate)

    @property
    def connected_to(self) -> str | None:
        """Address of the collector that takes this node's data now."""
        return self._uplink.connected_to

    @property
    def clock_offset_s(self) -> float | None:
        """This node's clock minus the collector's, at the last exchange; None before the first."""
        return self._uplink.offset_s

    # ---- in

    def accept(self, ts_ms: int, reading: Reading) -> None:
        """Take what a source read at `ts_ms`. Events leave at once, telemetry every `batch_s`."""
        set_back, ended = self._window.advance(ts_ms)
        if set_back:
            self.flush()
            self.batcher.clock_set_back()
        if ended:
            self.flush()
        self.batcher.add(ts_ms, reading)
        for event in reading.events:
            self._store_events(self._merger.offer(self._with_uptime(event), ts_ms))
        for gpu, job in reading.holdings:
            self._holdings[gpu] = holding = pb.Holding(gpu=gpu, job=job or "", from_ms=ts_ms)
            self.spool.add_record(ts_ms, pb.Record(holding=holding))
        if reading.inventory and any(self._inventory.get(key) != value for key, value in reading.inventory.items()):
            self._inventory.update(reading.inventory)
            self._uplink.send_hello()
        if self.batcher.rows >= MAX_ROWS:
            self.flush()

    def report(self, code: str, message: str, gpu: int | None = None, count: int = 1) -> None:
        """Store an event about the agent itself; `code` is one of LIFECYCLE_CODES."""
        now_ms = self._clock.now_ms()
        self._store_events([NodeEvent(now_ms, gpu, EventKind.LIFECYCLE, code, message, "agent", count=count)])

    def _report_own(self, code: str, message: str, count: int) -> None:
        self.report(code, message, count=count)

    def _with_uptime(self, event: NodeEvent) -> NodeEvent:
        """Return the event with its time since boot: while lines are summed the wall clock may be set."""
        if event.up_ms:
            return event
        ago_ms = max(0, self._clock.now_ms() - event.ts_ms)
        return replace(event, up_ms=max(1, self._clock.up_ms() - ago_ms))

    def _store_events(self, events: Iterable[NodeEvent]) -> None:
        now_ms = self._clock.now_ms()
        for event in events:
            if self._inbox.gate is not None:
                self._inbox.gate.note_event(event)
            message = pb.Event(
                ts_ms=event.ts_ms,
                gpu=event.gpu,
                kind=event.kind,
                code=event.code,
                message=_valid_text(event.message),
                source=event.source,
                backlog=event.backlog,
                count=event.count,
                forgeable=event.forgeable,
                told_ms=now_ms,
                boot_id=self._boot_id,
                up_ms=self._with_uptime(event).up_ms,
            )
            self.spool.add_record(event.ts_ms, pb.Record(event=message))

    # ---- telemetry

    def flush(self) -> None:
        """Store what was accepted so far as one batch, and keep the spool within its bounds."""
        now_ms = self._clock.now_ms()
        self._add_own_values()
        blocks, newest_ms = self.batcher.take(now_ms)
        if self._registry.due:
            self._forget_unused(now_ms)
            if self._registry.changed:
                self._uplink.send_hello()
            self.spool.write_file(REGISTRY_FILE, self._registry.dump(), before_records=True)
        if blocks:
            self.spool.add_batch(newest_ms, blocks)
        if changes := self._absences.take_changes(self._clock.monotonic()):
            for absence in changes:
                self.spool.add_record(absence.from_ms, pb.Record(absence=absence))
            self.spool.write_file(ABSENCES_FILE, self._absences.dump(), before_records=False)
        self.spool.tidy()
        self._self_reports.report(self._uplink.offset_s)

    def _forget_unused(self, now_ms: int) -> None:
        """Free the numbers of entities that are gone and that no batch still to be sent uses."""
        oldest_ms = self.spool.status.oldest_batch_ms
        if self.spool.is_hung or (oldest_ms is None and self.spool.pending()[0]):
            return
        self.batcher.forget(self._registry.forget(now_ms if oldest_ms is None else min(oldest_ms, now_ms)))

    def _add_own_values(self) -> None:
        """Add what the agent knows of itself to the node's newest row."""
        values = {"spool_bytes": float(self.spool.pending()[1])}
        if self._uplink.offset_s is not None:
            values["clock_offset_s"] = self._uplink.offset_s
        self.batcher.add_to_newest(Scope.NODE, values)

    # ---- for the uplink

    def hello(self) -> pb.Hello:
        hello = pb.Hello(
            node=self.node,
            boot_id=self._boot_id,
            spool_id=self.spool.id,
            agent_version=VERSION,
            protocol=PROTOCOL,
            ts_ms=self._clock.now_ms(),
            up_ms=self._clock.up_ms(),
            interval_ms=int(self.config.interval_s * 1000),
            inventory=self._inventory,
            capabilities=[f"hardware:{self.config.hardware}", *(["kmsg"] if self.config.kmsg_enabled else [])],
        )
        self._registry.add_to(hello)
        return hello

    def report_state_again(self) -> None:
        """Store again what is stored only when it changes: the collector has nothing of this node."""
        self._absences.report_all_again()
        for holding in self._holdings.values():
            self.spool.add_record(holding.from_ms, pb.Record(holding=holding))

    def count_rejection(self, lane: int, seq: int, reason: str) -> None:
        self._self_reports.count_rejection(lane, seq, reason)

    def add_probe_request(self, request: pb.ProbeRequest) -> None:
        """Pass a request on to the probe service. The stream's reader calls this, so it does not block."""
        self._inbox.add(request)

    def take_gate_verdict(self, verdict: pb.GateVerdict) -> None:
        """Keep what the collector says of this node for `drover-agent gate`."""
        if self._inbox.gate is not None:
            self._inbox.gate.take_verdict(verdict)

    # ---- running

    async def run(self) -> None:
        """Stream until cancelled; then report the stop if a collector is connected, and close the spool."""
        self.report("agent_started", f"drover-agent {VERSION} started")
        tasks = [asyncio.create_task(job()) for job in (self._uplink.run, self._watch_time, self._run_probes)]
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
                self.spool.close()

    async def _run_probes(self) -> None:
        await self._inbox.run(self.node, self.spool, self._clock)

    async def _goodbye(self) -> None:
        self._store_events(self._merger.flush())
        self.report("agent_stopped", "the agent was asked to stop")
        self.flush()
        if self._uplink.connected_to:
            try:
                async with asyncio.timeout(GOODBYE_S):
                    await self._uplink.delivered()
            except TimeoutError:
                log.info("Stopped with data in the spool. It is sent after the next start.")

    async def _watch_time(self) -> None:
        """Store summed events when their window ends, and rows that wait although no reading follows."""
        window, since_s = self._window.number, self._clock.monotonic()
        while True:
            await (self._clock.sleep(HOLD_MS / 1000) if self._merger.waits else self._clock.second())
            self._store_events(self._merger.due(self._clock.now_ms()))
            if window != self._window.number or not self.batcher.rows:
                window, since_s = self._window.number, self._clock.monotonic()
            elif self._clock.monotonic() - since_s > 2 * self.config.batch_s:
                self.flush()


def boot_id(proc: Path) -> str:
    """Return the id of this boot, "" if the kernel does not give it."""
    try:
        return (proc / "sys/kernel/random/boot_id").read_text("ascii").strip()
    except OSError:
        return ""


def _valid_text(text: str) -> str:
    """Return at most MAX_TEXT characters of valid UTF-8: files and devices may hold other bytes."""
    return text[:MAX_TEXT].encode("utf-8", "replace").decode()

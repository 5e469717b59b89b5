"""What one node tells: Readings become batches and records, go into the spool, and from there to a collector."""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from drover_agent.clock import Clock, SystemClock
from drover_agent.config import AgentConfig
from drover_agent.sources.base import NodeEvent, Reading
from drover_agent.spool.async_spool import AsyncSpool
from drover_agent.spool.disk_thread import DiskThread
from drover_agent.telemetry.absences import Absences
from drover_agent.telemetry.batcher import Batcher
from drover_agent.telemetry.event_dedup import HOLD_MS, EventMerger
from drover_agent.telemetry.schema_registry import Dictionary
from drover_agent.uplink.stream import PROTOCOL, Uplink
from drover_core import VERSION
from drover_core.metrics.catalog import Scope
from drover_core.model.kinds import EventKind
from drover_proto import telemetry_pb2 as pb

log = logging.getLogger(__name__)

DICTIONARY, ABSENCES = "dictionary.json", "absences.json"  # beside the spool
GOODBYE_S = 2.0  # for the last words to be delivered at a stop
MAX_ROWS = 4_000  # rows kept for one batch; a batch leaves early at this size
LATE_WINDOWS = 2  # rows older than this many batches come from a clock that was set back, not from a slow source
MAX_TEXT = 8_000  # characters of an event's message; collectors refuse twice as many
MAX_DAMAGE = 20  # damaged places of the spool that are named one by one
REPORT_S = 10.0  # losses and refusals are told at most this often
QUIET_S = 60.0  # a disk that was well for so long is told anew when it is not
SET_BACK_MS = 500  # a wall clock that falls so far behind the steady one was set
PROBES_ASKED = 16  # requests that wait for the folder that the probe service looks into
CLOCK_WRONG_S, CLOCK_RIGHT_S = 5.0, 2.5  # from the collector's: told over the one, forgotten under the other


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
        disk: DiskThread | None = None,
    ) -> None:
        """`disk`: the thread that writes the spool; one of its own unless given."""
        self.config, self.node = config, node
        self._clock: Clock = clock or SystemClock()
        self._inventory = dict(inventory or {})
        if config.probe_address:
            self._inventory["probe.address"] = config.probe_address
        self._boot_id = boot_id(Path(config.proc_root))
        self.spool = AsyncSpool(config.spool, self._clock, disk)
        self._dictionary = Dictionary.load(self.spool.folder / DICTIONARY, self.spool.oldest_batch_ms)
        self._absences = Absences(self.spool.folder / ABSENCES, self._clock.monotonic())
        self.packer = Batcher(self._dictionary, self._absences, LATE_WINDOWS * config.batch_s * 1000)
        self._window: int | None = None
        self._accepted_ms = -1  # the moment of the newest reading
        self._ahead_ms = self._wall_ahead_ms()
        # Agents send at different moments of the window, or thousands of them would all send at the same one.
        self._phase_ms = hash_of(node) % max(int(config.batch_s * 1000), 1)
        self._merger = EventMerger(expect_kernel_log=config.kmsg_enabled and config.hardware in ("auto", "nvml"))
        self._uplink = Uplink(config, self.spool, self, self._clock)
        self.spool.on_ready = self._uplink.wake
        self._holdings: dict[int, pb.Holding] = {}  # the newest of each GPU
        self._refused: dict[str, int] = {}
        self._next_report_s = 0.0
        self._trouble: str | None = None
        self._well_since_s = 0.0
        self._clock_wrong = False
        self._probes_asked: asyncio.Queue[pb.ProbeRequest] = asyncio.Queue(PROBES_ASKED)
        self._probes_due = asyncio.Event()

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
        if ts_ms != self._accepted_ms or self._set_back():  # else of the same tick as the last one
            self._accepted_ms = ts_ms
            self._begin(ts_ms)
        self.packer.add(ts_ms, reading)
        if reading.events or reading.holdings:
            for event in reading.events:
                self._tell(self._merger.offer(self._dated(event), ts_ms))
            for gpu, job in reading.holdings:
                self._holdings[gpu] = holding = pb.Holding(gpu=gpu, job=job or "", from_ms=ts_ms)
                self.spool.add_record(ts_ms, pb.Record(holding=holding))
        if reading.inventory and any(self._inventory.get(key) != value for key, value in reading.inventory.items()):
            self._inventory.update(reading.inventory)
            self._uplink.hello_changed()
        if self.packer.rows >= MAX_ROWS:
            self.flush()

    def _begin(self, ts_ms: int) -> None:
        """Pack what came before, where this moment belongs to another batch."""
        back, ahead_ms = self._set_back(), self._wall_ahead_ms()
        if back:
            log.warning("the clock was set back by %.1f s", (self._ahead_ms - ahead_ms) / 1000)
            self.flush()
            self.packer.clock_set_back()
        self._ahead_ms = ahead_ms
        window = (ts_ms + self._phase_ms) // max(int(self.config.batch_s * 1000), 1)
        if self._window is None or not self._window - LATE_WINDOWS <= window <= self._window:
            self.flush()  # the next window, or a clock that was set back
            self._window = window

    def _set_back(self) -> bool:
        return self._wall_ahead_ms() < self._ahead_ms - SET_BACK_MS

    def _wall_ahead_ms(self) -> float:
        """Of the steady clock: changes by no more than its rate is adjusted, unless it is set or the machine sleeps."""
        return self._clock.now_ms() - self._clock.monotonic() * 1000

    def tell(self, code: str, message: str, gpu: int | None = None, count: int = 1) -> None:
        """An event about the agent itself; `code` is one of LIFECYCLE_CODES."""
        now_ms = self._clock.now_ms()
        self._tell([NodeEvent(now_ms, gpu, EventKind.LIFECYCLE, code, message, "agent", count=count)])

    def _dated(self, event: NodeEvent) -> NodeEvent:
        """With the time since boot: what a sum of lines waits for may be a step of the wall clock."""
        if event.up_ms:
            return event
        ago_ms = max(0, self._clock.now_ms() - event.ts_ms)
        return replace(event, up_ms=max(1, self._clock.up_ms() - ago_ms))

    def _tell(self, events: Iterable[NodeEvent]) -> None:
        now_ms = self._clock.now_ms()
        for event in events:
            message = pb.Event(
                ts_ms=event.ts_ms,
                gpu=event.gpu,
                kind=event.kind,
                code=event.code,
                message=_sendable(event.message),
                source=event.source,
                backlog=event.backlog,
                count=event.count,
                forgeable=event.forgeable,
                told_ms=now_ms,
                boot_id=self._boot_id,
                up_ms=self._dated(event).up_ms,
            )
            self.spool.add_record(event.ts_ms, pb.Record(event=message))

    # ---- telemetry

    def flush(self) -> None:
        """Pack what was accepted so far into one batch, and keep the spool in bounds."""
        now_ms = self._clock.now_ms()
        self._add_own_values()
        blocks, newest_ms = self.packer.take(now_ms)
        if self._dictionary.due:
            self._forget_old(now_ms)
            if self._dictionary.changed:
                self._uplink.hello_changed()
            self.spool.keep_file(DICTIONARY, self._dictionary.dump(), first=True)
        if blocks:
            self.spool.add_batch(newest_ms, blocks)
        if changes := self._absences.changes(self._clock.monotonic()):
            for absence in changes:
                self.spool.add_record(absence.from_ms, pb.Record(absence=absence))
            self.spool.keep_file(ABSENCES, self._absences.dump(), first=False)
        self.spool.tidy()
        self._report()

    def _forget_old(self, now_ms: int) -> None:
        """Things that came and went: their numbers, when nothing that may yet be sent uses them."""
        oldest_ms = self.spool.oldest_batch_ms
        if self.spool.hangs or (oldest_ms is None and self.spool.pending()[0]):
            return
        self.packer.forget(self._dictionary.forget(now_ms if oldest_ms is None else min(oldest_ms, now_ms)))

    def _add_own_values(self) -> None:
        """What the agent knows about itself joins the node's newest row."""
        values = {"spool_bytes": float(self.spool.pending()[1])}
        if self._uplink.offset_s is not None:
            values["clock_offset_s"] = self._uplink.offset_s
        self.packer.add_to_newest(Scope.NODE, values)

    def _report(self) -> None:
        """Tell what was lost, refused or is in trouble."""
        steady_s = self._clock.monotonic()
        if steady_s < self._next_report_s:
            return
        if losses := self.spool.take_losses():
            self._next_report_s = steady_s + REPORT_S
            parts = list(losses.damage[:MAX_DAMAGE])
            if (more := len(losses.damage) - MAX_DAMAGE) > 0:
                parts.append(f"{more} more like these")
            if losses.telemetry or losses.events:
                parts.append(f"{losses.telemetry} batches and {losses.events} events dropped: {losses.reason}")
            self.tell("spool_dropped", "; ".join(parts), count=max(losses.telemetry + losses.events, 1))
        refused, self._refused = self._refused, {}
        for reason, count in refused.items():
            self._next_report_s = steady_s + REPORT_S
            self.tell("batch_rejected", f"the collector refused {count} messages: {reason}", count=count)
        self._report_trouble(steady_s)
        offset_s = self._uplink.offset_s or 0.0
        if abs(offset_s) > CLOCK_WRONG_S and not self._clock_wrong:
            self._clock_wrong = True
            self.tell("clock_wrong", f"this node's clock is {offset_s:+.1f} s from the collector's")
        elif abs(offset_s) < CLOCK_RIGHT_S:
            self._clock_wrong = False

    def _report_trouble(self, steady_s: float) -> None:
        """A disk that comes and goes is one trouble."""
        if trouble := self.spool.trouble:
            self._well_since_s = steady_s
            if trouble != self._trouble:
                self._trouble = trouble
                self.tell("spool_unwritable", f"data is kept in memory: {trouble}")
        elif steady_s - self._well_since_s > QUIET_S:
            self._trouble = None

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
        self._dictionary.tell(hello)
        return hello

    def told_anew(self) -> None:
        """The collector holds nothing of this node, and the spool no longer has all that was told: what is told only
        when it changes is told once more."""
        self._absences.again()
        for holding in self._holdings.values():
            self.spool.add_record(holding.from_ms, pb.Record(holding=holding))

    def rejected(self, lane: int, seq: int, reason: str) -> None:
        known = reason if reason in self._refused or len(self._refused) < 20 else "other reasons"
        if known not in self._refused:  # once per report, or a refused backlog fills the log
            log.warning("the collector refused %s %d: %s", pb.Lane.Name(pb.Lane.ValueType(lane)), seq, reason)
        self._refused[known] = self._refused.get(known, 0) + 1

    def probe_asked(self, request: pb.ProbeRequest) -> None:
        """Hand it to the probe service. Must return at once: it is the stream's reader that calls."""
        try:
            self._probes_asked.put_nowait(request)
        except asyncio.QueueFull:  # the disk hangs
            log.warning("probe request %s is dropped: %d wait already", request.id[:100], PROBES_ASKED)
        self._probes_due.set()

    async def _run_probes(self) -> None:
        """Requests for probes, and results that came while no agent ran. Loaded where there are some."""
        folder = self.spool.folder / "probes"
        if not folder.exists():
            await self._probes_due.wait()
        from drover_agent.probes.relay import ProbeRelay

        desk = ProbeRelay(folder, self.node, self.spool.add_record, self.spool.kept, self._clock.now_ms)
        await desk.run(self._probes_asked)

    # ---- life

    async def run(self) -> None:
        """Stream until cancelled; then say goodbye if a collector listens, and close the spool."""
        self.tell("agent_started", f"drover-agent {VERSION} started")
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

    async def _goodbye(self) -> None:
        self._tell(self._merger.flush())
        self.tell("agent_stopped", "the agent was asked to stop")
        self.flush()
        if self._uplink.connected_to:
            try:
                async with asyncio.timeout(GOODBYE_S):
                    await self._uplink.delivered()
            except TimeoutError:
                log.info("stopped with data in the spool; it is sent after the next start")

    async def _watch_time(self) -> None:
        """Summed events when their window ends; rows that wait although nothing new comes."""
        window, since = self._window, self._clock.monotonic()
        while True:
            await (self._clock.sleep(HOLD_MS / 1000) if self._merger.waits else self._clock.second())
            self._tell(self._merger.due(self._clock.now_ms()))
            if window != self._window or not self.packer.rows:
                window, since = self._window, self._clock.monotonic()
            elif self._clock.monotonic() - since > 2 * self.config.batch_s:
                self.flush()


def boot_id(proc: Path) -> str:
    try:
        return (proc / "sys/kernel/random/boot_id").read_text("ascii").strip()
    except OSError:
        return ""


def _sendable(text: str) -> str:
    """What was read of files and devices may hold what is no text."""
    return text[:MAX_TEXT].encode("utf-8", "replace").decode()


def hash_of(name: str) -> int:
    """A number that is the same in every run, unlike `hash`."""
    return zlib.crc32(name.encode())

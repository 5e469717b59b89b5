"""The true world of a property test: nodes that fail and are mended, their schedulers, and one collector after another.

Everything runs in the test's thread, and time is a number: the threads that judge, store and act are replaced by turns
(`Collector.turn`), so that a history plays in a second and always plays the same.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

from drover_collector.actions import (
    command as commands,
)
from drover_collector.actions import (
    context,
    worker,
)
from drover_collector.actions import (
    reconciler as looks,
)
from drover_collector.actions import (
    return_to_service as returning,
)
from drover_collector.actions.base import CheckLease, Result
from drover_collector.actions.run_program import Ran
from drover_collector.actions.settings import ActConfig
from drover_collector.actions.slurm.actuator import SlurmActuator
from drover_collector.api import actions as api_actions
from drover_collector.detectors import DETECTORS, Detector
from drover_collector.detectors._lib.examples import START_MS, training_bucket
from drover_collector.engine.engine import Engine
from drover_collector.fleet.buckets import BUCKET_MS
from drover_collector.fleet.index import FleetIndex
from drover_collector.ingest.parse_records import RecordSource, parse_record
from drover_collector.notify.incident_notes import IncidentNotes
from drover_collector.notify.silences import Silences
from drover_collector.pipeline import pipeline as judging
from drover_collector.pipeline.action_review import ActionReview
from drover_collector.pipeline.pipeline import Pipeline, PipelineOptions
from drover_collector.policy.policy import Policy
from drover_core.model.events import (
    Action,
    Event,
    ProbeOrder,
    ProbeReason,
    ProbeVerdict,
)
from drover_core.model.fleet import FleetSpec, NodeSpec
from drover_core.model.kinds import BOOT_ID
from drover_proto import telemetry_pb2 as pb
from testbed.desks import dispatcher_of
from testbed.kept_store import KeptStore, Lease
from testbed.slurm_stand_in import SlurmStandIn

GPUS = 2
INDEX = FleetIndex(
    FleetSpec(tuple(NodeSpec(f"n{n:02d}", f"r{n // 3}", f"l{n // 6}", f"p{n // 6}", "H100", GPUS) for n in range(12)))
)
NAMES = tuple(node.name for node in INDEX.nodes)
LAG_MS = 7000
STEP_S = 20  # between two buckets that are judged
BEGIN_MS = START_MS + 3 * 86_400_000


class Idle(BaseException):  # no error: a thread would wait now
    """Nothing is due."""


class Crash(BaseException):  # the same: the collector is killed here
    """kill -9."""


class Turn(threading.Condition):
    """Of a thread's loop that is run until it would wait."""

    def wait(self, timeout: float | None = None) -> bool:
        raise Idle


class Judge:
    """Stands for the thread that judges: what is asked for while it is busy comes after that."""

    def __init__(self) -> None:
        self._waiting: list[Callable[[], None]] = []
        self._busy = False

    def submit(self, call: Callable[..., Any], *args: Any) -> Future[Any]:
        answer: Future[Any] = Future()

        def work() -> None:
            try:
                answer.set_result(call(*args))
            except Exception as error:  # noqa: BLE001  # it is the asker's
                answer.set_exception(error)

        self._waiting.append(work)
        if not self._busy:
            self._busy = True
            while self._waiting:
                self._waiting.pop(0)()
            self._busy = False
        return answer

    def shutdown(self) -> None:
        pass


class Quiet:
    """An outbox that sends nothing."""

    def __init__(self) -> None:
        self.silences, self.notes = Silences(), IncidentNotes()
        self.delivery = SimpleNamespace(troubles={})

    def __getattr__(self, _: str) -> Callable[..., int]:
        return lambda *_, **__: 0


class Scheduler(SlurmStandIn):
    """A Slurm whose people do as they like, and that lets the world know of each change by Drover before it is made."""

    def __init__(self, name: str, world: World, nodes: Sequence[str]) -> None:
        super().__init__(*nodes)
        self.name, self._world = name, world

    def nodes(self, names: Sequence[str]) -> Mapping[str, Any]:
        found = super().nodes(names)
        if len(names) > 1:
            self._world.surveyed[self.name] = self._world.true_ms
        return found

    def update(self, node: str, **fields: str) -> None:
        self._answer()
        match fields.get("state"):
            case "drain":
                self._world.on_close(self, node, fields["reason"])
            case "undrain":
                self._world.on_open(self, node)
        super().update(node, **fields)

    def closed(self) -> set[str]:
        return {name for name, node in self.held.items() if node.states & {"DRAIN", "DOWN"}}

    def set_reachable(self, node: str, answer: bool) -> None:
        held = self.held[node]
        states = held.states - {"NOT_RESPONDING"} if answer else held.states | {"NOT_RESPONDING"}
        self.held[node] = replace(held, states=states)


@dataclass
class Fault:
    """What is truly wrong. Times are true ones (`World.true_ms`); None: not yet."""

    code: str
    gpu: int
    at_ms: int
    over_ms: int | None = None
    received_ms: int | None = None  # its event, by the collector
    late: bool = False  # that came as history
    seen_ms: int | None = None  # it was in a bucket that was judged
    known_over_ms: int | None = None  # its node's Hello and values of after its end were


@dataclass
class Node:
    name: str
    boot: int = 1
    booted_ms: int = 0
    reported_boot: int = 0  # by its agent's newest Hello
    boot_known_ms: int = 0  # when that was
    agent: bool = True  # runs
    linked: bool = True  # reaches the collector
    alive: bool = True
    judged_ms: int = 0  # its values were judged
    quiet_since_ms: int | None = None  # no values leave it
    spool: list[tuple[str, str, int | None, int, int, int]] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    kept_by: str = ""  # the person who drained it with Drover's command and does not ask for it back

    def open(self, code: str = "") -> list[Fault]:
        return [f for f in self.faults if f.over_ms is None and code in ("", f.code)]

    @property
    def speaks(self) -> bool:
        return self.alive and self.agent and self.linked


class World:
    """
    Attributes:
        violations: what must never be, as sentences; filled by `on_close`, `on_open` and `on_command` of who knows.
        detectors: that its collectors have.
    """

    detectors: Sequence[Detector] = DETECTORS

    def __init__(self, policy: Policy, ceiling: str) -> None:
        self.true_ms, self.offset_ms = 0, BEGIN_MS
        self.policy, self.ceiling = policy, ceiling
        self.nodes = {name: Node(name) for name in NAMES}
        self.surveyed: dict[str, int] = {}  # scheduler -> when it last said how several of its nodes are
        self.schedulers = (Scheduler("slurm", self, NAMES[:6]), Scheduler("slurm2", self, NAMES[6:]))
        self.kept = KeptStore()
        self.collector: Collector | None = None
        self.crash_in: int | None = None  # steps of actions until it is killed
        self.seq = 0
        self.actor = ""  # for whom Drover does something now
        self.orders: dict[str, ProbeOrder] = {}  # probes that run, by node

    def now_ms(self) -> int:
        return self.true_ms + self.offset_ms

    def scheduler(self, node: str) -> Scheduler:
        return self.schedulers[0] if node in self.schedulers[0].held else self.schedulers[1]

    # ---- what the test says of them

    def on_close(self, scheduler: Scheduler, node: str, reason: str) -> None: ...

    def on_open(self, scheduler: Scheduler, node: str) -> None: ...

    def on_command(self, node: str, act: str) -> None: ...

    def step(self, name: str) -> None:
        del name
        if self.crash_in is not None:
            self.crash_in -= 1
            if self.crash_in < 0:
                self.crash_in = None
                raise Crash

    def program(self, words: Sequence[str], _timeout_s: float, *, stdin: str) -> Ran:
        """`drover reboot` and `drover reset`."""
        asked = json.loads(stdin)
        self.on_command(asked["node"], asked["act"])
        if words[0] == "reboot":
            self.reboot(asked["node"])
        else:
            self.mend(asked["node"])
        return Ran(0, "done", "")

    # ---- nodes

    def fail(self, name: str, code: str, gpu: int) -> None:
        """`code`: 79 (no values of it any more), gone (the same, without a line), 119 (it works on), remap (bad
        rows of its memory, until it is replaced)."""
        node = self.nodes[name]
        if node.open(code) or not node.alive:
            return
        node.faults.append(Fault(code, gpu, self.true_ms))
        if code.isdigit() and node.agent:
            self.log(node, "xid", code, gpu)

    def log(self, node: Node, kind: str, code: str, gpu: int | None) -> None:
        node.spool.append((kind, code, gpu, self.now_ms(), node.boot, self.true_ms))

    def mend(self, name: str) -> None:
        """What a reset ends."""
        for fault in self.nodes[name].open("119"):
            fault.over_ms = self.true_ms
        self.nodes[name].booted_ms = self.true_ms  # its counters begin again

    def reboot(self, name: str) -> None:
        node = self.nodes[name]
        for fault in node.open():
            if fault.code != "remap":
                fault.over_ms = self.true_ms
        node.boot += 1
        node.booted_ms, node.agent, node.alive = self.true_ms, True, True
        self.scheduler(name).finish(name)
        self.scheduler(name).set_reachable(name, answer=True)
        self.log(node, "lifecycle", "agent_started", None)

    def repair(self, name: str) -> None:
        for fault in self.nodes[name].open("remap"):
            fault.over_ms = self.true_ms
        self.reboot(name)

    def die(self, name: str) -> None:
        self.nodes[name].alive = False
        self.scheduler(name).finish(name)
        self.scheduler(name).set_reachable(name, answer=False)

    def healthy(self, name: str) -> bool:
        return self.nodes[name].alive and not self.nodes[name].open()

    # ---- time

    def wait(self, seconds: int) -> None:
        """All nodes that speak report, and threads do what is due."""
        for _ in range(max(1, seconds // STEP_S)):
            self.true_ms += STEP_S * 1000
            self.take_reports()

    def away(self, seconds: int) -> None:
        """No collector runs; nor does anybody else notice."""
        self.true_ms += seconds * 1000

    def set_clock(self, seconds: int) -> None:
        """Of all machines. A collector that runs notices with what it judges next."""
        self.offset_ms += seconds * 1000
        self.take_reports()

    def take_reports(self) -> None:
        for node in self.nodes.values():
            quiet = not (node.alive and node.agent)
            node.quiet_since_ms = (node.quiet_since_ms or self.true_ms) if quiet else None
        if self.collector is None:
            return
        self.deliver()
        self.collector.judge_bucket()
        self.collector.turn()

    def deliver(self) -> None:
        """What agents have in their spools, if they reach the collector."""
        assert self.collector is not None
        events: list[Event] = []
        for node in self.nodes.values():
            if not node.speaks:
                continue
            if node.reported_boot != node.boot:
                node.reported_boot, node.boot_known_ms = node.boot, self.true_ms
                self.kept.inventory_reports.append((self.now_ms(), node.name, {BOOT_ID: f"{node.name}-{node.boot}"}))
            for kind, code, gpu, ts_ms, boot, true_ms in node.spool:
                self.seq += 1
                event = pb.Event(ts_ms=ts_ms, kind=kind, code=code, boot_id=f"{node.name}-{boot}", gpu=gpu)
                now_ms = self.now_ms()
                age_ms = self.true_ms - true_ms if boot == node.boot else None
                source = RecordSource(node.name, "s", now_ms, now_ms, 0, f"{node.name}-{node.boot}", age_ms)
                taken = parse_record(pb.Record(seq=self.seq, event=event), source)
                assert not isinstance(taken, str)
                events.append(taken.event)  # type: ignore[union-attr,arg-type]  # it is one
                for fault in node.faults:
                    if (fault.code, fault.at_ms) == (code, true_ms):
                        fault.received_ms = self.true_ms
                        fault.late = self.true_ms - true_ms > 3_600_000
            node.spool.clear()
        if events:
            self.collector.take(events)

    # ---- collectors

    @contextmanager
    def playing(self) -> Iterator[World]:
        clock = SimpleNamespace(monotonic=lambda: 1e6 + self.true_ms / 1000, time_ns=lambda: 0)
        modules: tuple[ModuleType, ...] = (worker, looks, context, returning)
        with ExitStack() as stack:
            for module in modules:
                if hasattr(module, "time"):
                    stack.enter_context(mock.patch.object(module, "time", clock))
            stack.enter_context(mock.patch.object(judging, "Engine", partial(Engine, detectors=self.detectors)))
            stack.enter_context(mock.patch.object(api_actions, "WAIT_S", 0.0))  # nothing goes on meanwhile
            stack.enter_context(mock.patch.object(commands, "run", self.program))
            stack.enter_context(mock.patch.object(worker.Worker, "start", _begin))
            stack.enter_context(mock.patch.object(worker.Worker, "ask", lambda _, call: call()))
            logging.disable(logging.CRITICAL)  # thousands of lines of refusals that are meant
            stack.callback(logging.disable, logging.NOTSET)
            yield self

    def start(self) -> None:
        """A collector, whatever ran before it and may still think that it does."""
        self.surveyed.clear()
        self.orders.clear()
        self.collector = Collector(self)
        self.collector.start()

    def stop(self) -> None:
        if self.collector is not None:
            self.collector.stop()
        self.collector = None

    def crash(self) -> None:
        self.collector = None


def _begin(thread: Any) -> None:
    thread._changed = Turn()


class Seen(SlurmActuator):
    """Lets the world know for whom it does what it does."""

    def __init__(self, world: World, scheduler: Scheduler) -> None:
        super().__init__(scheduler, 10_000)
        self.name, self._world = scheduler.name, world

    def do(self, action: Action, check_lease: CheckLease) -> Result:
        self._world.actor = action.by
        return super().do(action, check_lease)


class Collector:
    def __init__(self, world: World) -> None:
        self.world = world
        lease: Any = Lease(world.kept)
        outbox: Any = Quiet()
        self.pipeline = made = Pipeline(
            INDEX, lease, world.policy, outbox,
            PipelineOptions(lag_ms=LAG_MS, now_ms=world.now_ms, ceiling=world.ceiling,
            boot_ms=lambda: world.true_ms + 1),
        )  # fmt: skip
        made._judge = judge = Judge()  # type: ignore[assignment]  # it is asked for no more than this
        self._judge = judge
        saving = made.saving
        saving._start = lambda: None  # type: ignore[method-assign]

        class Saved(threading.Condition):
            def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
                saving._save()
                return predicate()

        saving._changed = Saved()
        actuators = [Seen(world, scheduler) for scheduler in world.schedulers]
        self.desk = dispatcher_of(
            lease,
            ActConfig(mode=world.ceiling, give_up_s=600, reboot_command=("reboot",), reset_command=("reset",)),
            actuators, lambda node: actuators[0 if node in NAMES[:6] else 1], detection=ActionReview(made),
            nodes=NAMES, now_ms=world.now_ms, look_s=5.0, step=world.step,
            validator=self,
        )  # fmt: skip
        made.act_by(self.desk)

    def start(self) -> None:
        self._judge.submit(self.pipeline._restore).result()
        self.pipeline.leading = True
        past = self.pipeline.buckets.past
        while past is not None and past.steps:
            self._judge.submit(past.steps.popleft()(), self.pipeline.engine).result()
        assert past is not None
        self.pipeline.buckets.newest, self.pipeline.buckets.past = past.newest, None
        self._judge.submit(self.pipeline.judge_events).result()
        self.turn()

    def stop(self) -> None:
        self._judge.submit(self.pipeline.judge_events).result()
        self.desk.stop()
        self.pipeline.leading = False

    def turn(self) -> None:
        """What its threads would do now."""
        for _ in range(2):
            for thread in self.desk._workers.values():
                with suppress(Idle):
                    thread._run()

    def store(self, events: Sequence[Event]) -> None:
        self.world.kept.write_events(events)

    def take(self, events: Sequence[Event]) -> None:
        self.store(events)
        self.pipeline.take_events(events)
        self._judge.submit(self.pipeline.judge_events).result()

    def judge_bucket(self) -> None:
        world = self.world
        number = (world.now_ms() - LAG_MS - START_MS) // BUCKET_MS - 1
        silent = [n for n, node in enumerate(world.nodes.values()) if not node.speaks]

        def change(_: int, gpu: dict[str, Any], node: dict[str, Any]) -> None:
            del node
            if silent:
                del gpu["power_w"]  # nothing shows whether the silent node's job goes on
            gpu["energy_j"] = np.zeros(INDEX.gpu_count)
            for n, one in enumerate(world.nodes.values()):
                gpu["energy_j"][n * GPUS : (n + 1) * GPUS] = (world.true_ms - one.booted_ms + 1) * 0.6
            for n, one in enumerate(world.nodes.values()):
                for fault in one.open("remap"):
                    gpu["row_remap_failed"][n * GPUS + fault.gpu] = 1.0
                for fault in one.open("79") + one.open("gone"):
                    for column in gpu.values():
                        column[n * GPUS + fault.gpu] = np.nan

        bucket = training_bucket(INDEX, number, change, silent)
        world.kept.buckets[bucket.start_ms] = bucket
        self._judge.submit(self.pipeline.judge_bucket, bucket).result()
        for node in world.nodes.values():
            if node.speaks:
                node.judged_ms = world.true_ms
                for fault in node.faults:
                    if fault.over_ms is not None:
                        fault.known_over_ms = fault.known_over_ms or world.true_ms
                for fault in node.open():
                    fault.seen_ms = fault.seen_ms or (None if fault.code == "119" else world.true_ms)

    # ---- probes

    def ask(
        self, node: str, why: ProbeReason, *, level: str = "quick", incident_id: str = "", by: str = "drover"
    ) -> str:
        world = self.world
        order = world.orders.get(node)
        if order is None:
            world.seq += 1
            order = ProbeOrder(f"p{world.seq}", node, (), level, (), why, "asked", world.now_ms(), incident_id, by)
            world.orders[node] = world.kept.orders[order.id] = order
        return order.id

    def probed(self, node: str, passed: bool | None) -> None:
        """Whatever is true of the node: probes may be wrong."""
        world = self.world
        order = world.orders.pop(node, None)
        if order is None:
            return
        verdict = ProbeVerdict(
            order.id, node, None, passed, "", f"passed: {passed}", world.now_ms(), order.why, order.incident_id
        )
        self.pipeline.judge_now(lambda engine: engine.on_verdicts([verdict], verdict.ts_ms))
        self.desk.on_verdicts([verdict])
        self.turn()

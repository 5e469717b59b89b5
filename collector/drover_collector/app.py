"""The collector as a whole: builds its parts, runs them, and closes them in order. Nothing else builds parts."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

from drover_collector.actions.actuators import make_actuators
from drover_collector.actions.base import Actuator
from drover_collector.actions.context import ActionContext
from drover_collector.actions.dispatcher import ActionDispatcher
from drover_collector.actions.kubernetes.actuator import kept_closed
from drover_collector.actions.kubernetes.api import KubernetesApi
from drover_collector.actions.outage_store import OutageStore
from drover_collector.actions.settings import ActConfig, used
from drover_collector.api.connection_front import Front
from drover_collector.api.recent_buckets import recent
from drover_collector.api.service import FleetApi
from drover_collector.api.snapshot import ApiSnapshot, HeartbeatStatus, OptionalParts
from drover_collector.auth.authorization import Gate
from drover_collector.auth.identity import Denied
from drover_collector.auth.tls import ServerTls, server_tls
from drover_collector.config import CollectorConfig, StoreConfig, split_address, store_password
from drover_collector.exporters.exports import Exports
from drover_collector.exporters.page import FleetPage
from drover_collector.fleet.buckets import Bucket
from drover_collector.fleet.index import FleetIndex
from drover_collector.grpc_h2 import GrpcServer, Handler, ServerOptions
from drover_collector.ingest.context import IngestContext, IngestListeners
from drover_collector.ingest.limits import MESSAGE_BYTES
from drover_collector.ingest.service import IngestService
from drover_collector.notify import Outbox, OutboxOptions
from drover_collector.notify.factory import notifiers
from drover_collector.notify.routes import Routes
from drover_collector.notify.silences import Silences
from drover_collector.observability.dead_man_switch import DeadManSwitch
from drover_collector.observability.metrics_server import MetricsServer
from drover_collector.observability.self_check import read_signals
from drover_collector.pipeline.action_review import ActionReview
from drover_collector.pipeline.adopted_nodes import AdoptionWatch, adopted, with_adopted
from drover_collector.pipeline.gate_sender import GateSender
from drover_collector.pipeline.leadership import Leadership, holder
from drover_collector.pipeline.learned_fleet import FleetLearner, learned, sentence
from drover_collector.pipeline.lease import LeaderLease
from drover_collector.pipeline.maintenance import Maintenance
from drover_collector.pipeline.maintenance_events import MaintenanceEvents, Marks, marks_of
from drover_collector.pipeline.node_conditions import ConditionSettings, NodeConditions, Reading
from drover_collector.pipeline.pipeline import Pipeline, PipelineOptions
from drover_collector.pipeline.pod_owners import PodOwners
from drover_collector.pipeline.settings_of_others import SettingsOfOthers, settings_of
from drover_collector.pipeline.value_origins import ValueOrigins
from drover_collector.policy.policy import Policy
from drover_collector.policy.reload import PolicyWatch
from drover_collector.probes.context import NodeAccess, ProbeRuntime, Stream
from drover_collector.probes.scheduling.group_orders import address_of
from drover_collector.probes.scheduling.protection import GpuProtection, Protection, Unprotected
from drover_collector.probes.scheduling.requests import Asking, held_nodes
from drover_collector.probes.scheduling.slurm_holds import SlurmHolds
from drover_collector.probes.service import ProbeOrderService
from drover_collector.probes.settings import ProbesConfig
from drover_collector.process import memory, open_files
from drover_collector.rest.otlp_grpc import OtlpService
from drover_collector.rest.server import RestServer
from drover_collector.scrape.feed import ScrapeFeed
from drover_collector.scrape.forgeable import ForgeablePages
from drover_collector.store import Store, StoreError
from drover_core.model.events import Event, NodeOutage, ProbeVerdict
from drover_core.model.fleet import FleetSpec
from drover_core.settings import SettingsError

log = logging.getLogger("drover_collector")

STORE_WAIT_S = 5.0  # a predecessor that is stopping needs a moment to release the store
GRACE_S = 3.0  # for calls under way at a stop
STOP_S = 60.0  # for a whole stop; a store that hangs must not hold it up forever
SWITCH_S = 0.001  # otherwise a message waits 5 ms for each thread that computes, until Python switches threads
REQUEST_BYTES = 65_536
STREAMS_MOST = 64  # of one connection to the Fleet API; its client holds the next one back until one has ended
PENDING_MOST = open_files.PEOPLE * STREAMS_MOST  # all that all connections may have
CALLS_MOST = 1_024  # of all together, also those being refused; the gate has limits for each certificate
SERVER_OPTIONS = (  # of the Fleet API
    # Its largest honest request, a silence of 1,000 nodes by name, takes 40 kB; parsed, one may take 30 times that.
    ("grpc.max_receive_message_length", REQUEST_BYTES),
    ("grpc.max_concurrent_streams", STREAMS_MOST),
    # Otherwise gRPC drops some of more than 1,000 new calls unread, also an operator's among an intruder's.
    ("grpc.server.max_pending_requests", PENDING_MOST),
    ("grpc.server.max_pending_requests_hard_limit", PENDING_MOST),
    ("grpc.server_handshake_timeout_ms", 10_000),  # otherwise a silent connection stays for two minutes
    # A peer that lost its power never says so; and one that pings while no answer is due is no nuisance.
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
)

Streams = Callable[[str], Stream | None]  # node -> the stream of its agent


class AddressError(Exception):
    """An address that cannot be listened on."""


async def serve(config: CollectorConfig, spec: FleetSpec | None, policy: Policy) -> bool:
    """Run until SIGTERM or SIGINT. Return whether to start again, as the fleet has changed.

    Args:
        spec: None: there is no fleet file; the fleet is learned from what reports.

    Raises:
        StoreError, AddressError: it cannot start, or the store failed at the start.
    """
    stopping, stop = _stop_on_signals()
    _prepare_process(0 if spec is None else len(spec.nodes))
    store = await asyncio.to_thread(_open_store, config.store)
    try:
        watch: FleetLearner | AdoptionWatch
        is_learned = spec is None
        if spec is None:
            spec = learned(store, time.time_ns() // 1_000_000)
            watch = FleetLearner(store, spec, stop)
        else:
            filed, spec = spec, with_adopted(spec, adopted(store))
            watch = AdoptionWatch(store, filed, spec, stop)
        check_disk(config.store, store.sizes.disk())
        lease = await asyncio.to_thread(store.lease, holder(), config.detect.lease_s)
        leader = LeaderLease(lease, may_lead=config.detect.role == "auto")
        store.fence.use(leader.fence)
        detection = Detection(config, FleetIndex(spec), store, policy, leader)
        await detection.leadership.start()
        watching = asyncio.ensure_future(watch.run())
        try:
            if is_learned:
                detection.pipeline.ticks.troubles["fleet"] = sentence(spec)
            await _serve(config, detection, stopping)
        finally:
            watching.cancel()
            await detection.leadership.stop()
    finally:
        await asyncio.to_thread(store.close)
    log.info("stopped")
    return watch.changed


class Detection:
    """What a collector does without its listeners: ingest, pipeline, actions, probes, maintenance.

    One knot: probes are sent over the streams of ingest, which hands their results to the probes.
    """

    def __init__(
        self, config: CollectorConfig, index: FleetIndex, store: Store, policy: Policy, leader: LeaderLease
    ) -> None:
        forgeable = ForgeablePages(config.scrape, config.rest.remote_write, config.rest.otlp)
        options = PipelineOptions(
            lag_ms=round(config.detect.lag_s * 1000),
            ceiling=config.act.mode,
            watch=PolicyWatch(None if config.policy.path is None else Path(config.policy.path)),
            boot_ms=lambda: time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000,
            lease=leader,
            spoke_ms=lambda: self.ingest.spoke_ms(),
            origins=ValueOrigins(
                index,
                forgeable.__contains__,
                lambda node: self.ingest.has_agent(node),
                lambda node: store.shared and not forgeable.vouches(node),
            ),
        )
        self.pipeline = Pipeline(index, store, policy, _outbox(config, index.spec, store), options)
        actuators = make_actuators(config.act, index.spec)
        review = ActionReview(self.pipeline)
        context = ActionContext(store, config.act, actuators, OutageStore(store), review, self.pipeline.now_ms)
        self.probes = make_probes(
            self.pipeline, config.probes, config.act, lambda node: self.ingest.stream(node), actuators.of
        )
        begin_acting(self.pipeline, self.probes, ActionDispatcher(context, self.probes.service.orders))
        self.leadership = Leadership(self.pipeline)
        self.exports = Exports(config.export, index, store.entities.registry)
        store.audit.takers.append(self.exports.take_audit)
        store.actions.takers.append(self.exports.take_actions)
        self.pipeline.saving.takers.append(lambda found: self.exports.take_found(found.incidents, found.decisions))
        listeners = IngestListeners(
            self._take_events, self.pipeline.take_unstored, self.probes.service.orders.take_results
        )
        self.ingest = IngestService(IngestContext(store, index, listeners))
        (stream,) = self.ingest.methods().values()
        self.conditions = node_conditions(config.act, self.pipeline, self._take_events)
        self.scrape = ScrapeFeed(
            config.scrape, stream, self.pipeline.ticks.troubles, config.rest.remote_write, config.rest.otlp
        )
        self.maintenance = Maintenance(
            store, config.store, lambda: self.pipeline.leading, troubles=self.pipeline.ticks.troubles,
            votes=lambda: self.ingest.stats.clock_votes, nodes=index.node_count,
        )  # fmt: skip

    def methods(self, config: CollectorConfig) -> Mapping[str, Handler]:
        """Return path -> handler, for the agents' server."""
        found = self.ingest.methods()
        return found | dict(OtlpService(self.scrape.writes.take_otlp).methods()) if config.rest.otlp.grpc else found

    def tasks(self, config: CollectorConfig) -> list[Callable[[], Awaitable[None]]]:
        """Return what runs next to judging; run each until cancelled."""
        verdicts = GateSender(self.pipeline, self.ingest.streams)
        events = maintenance_events(config, self.pipeline, self.conditions)
        others = SettingsOfOthers(
            self.pipeline.store, f"{socket.gethostname()}:{config.ingest.listen.rpartition(':')[2]}",
            settings_of(config), self.pipeline.ticks.troubles,
        )  # fmt: skip
        tasks = [self.maintenance.run, self.scrape.run, verdicts.run, events.run, others.run, *self.probes.tasks]
        if config.act.kubernetes.enabled:
            tasks.append(PodOwners(self.pipeline, KubernetesApi(config.act.kubernetes)).run)
        if self.conditions is not None and not config.maintenance_events.marks:
            tasks.append(self.conditions.run)
        return tasks

    def _take_events(self, events: Sequence[Event]) -> None:
        self.pipeline.take_events(events)
        self.exports.take_events(events)


@dataclass(frozen=True, slots=True)
class Probes:
    """The probe orders of one collector, and what asks for probes by itself."""

    service: ProbeOrderService
    asking: Asking

    @property
    def tasks(self) -> tuple[Callable[[], Awaitable[None]], ...]:
        """Run each until cancelled."""
        return self.service.run, self.asking.run


def begin_acting(pipeline: Pipeline, probes: Probes, dispatcher: ActionDispatcher) -> None:
    """Hand the dispatcher what the pipeline decides and what probes find. Call it before the pipeline starts."""
    pipeline.act_by(dispatcher)
    probes.service.on_verdicts.append(dispatcher.on_verdicts)


def make_probes(
    pipeline: Pipeline,
    config: ProbesConfig,
    act: ActConfig,
    stream: Streams,
    actuator_of: Callable[[str], Actuator | None] = lambda _: None,
) -> Probes:
    """Build the probes and connect them to the pipeline, which must not have started."""

    def leading() -> bool:
        return pipeline.leading

    def address(node: str) -> str:
        """Return where other nodes reach this one. Raises StoreError."""
        return address_of(pipeline.store.inventories.newest(node), getattr(stream(node), "peer", ""))

    def judge(verdicts: Sequence[ProbeVerdict]) -> None:
        _judge_verdicts(pipeline, verdicts)

    nodes = NodeAccess(
        stream,
        busy=lambda: held_nodes(pipeline.store, pipeline.index, pipeline.now_ms()),
        address=address,
        maintained=lambda: pipeline.outbox.silences.held(pipeline.now_ms()),
    )
    runtime = ProbeRuntime(leading, pipeline.now_ms, pipeline.ticks.troubles)
    protection = _protection(pipeline, config, act, actuator_of)
    service = ProbeOrderService(pipeline.store, pipeline.index, config, nodes, runtime, protection)
    asking = Asking(
        pipeline.store, pipeline.index, config, service, leading, lambda: pipeline.incidents, pipeline.now_ms,
        lambda: {risk.node: risk.chance for risk in pipeline.engine.risks}, maintained=nodes.maintained,
    )  # fmt: skip
    service.on_verdicts.append(judge)
    pipeline.saving.takers.append(asking.take)
    return Probes(service, asking)


def _judge_verdicts(pipeline: Pipeline, verdicts: Sequence[ProbeVerdict]) -> None:
    """
    Raises:
        StoreError: the outcome is not stored; the same verdicts are given again.
    """
    if not pipeline.leading:
        raise StoreError("this collector is no longer the active one")
    try:
        stored = pipeline.judge_now(lambda engine: engine.on_verdicts(verdicts, verdicts[0].ts_ms))
    except RuntimeError:
        raise StoreError("this collector stops") from None
    if not stored:
        raise StoreError("the results of probes wait for the store")


def _protection(
    pipeline: Pipeline, config: ProbesConfig, act: ActConfig, actuator_of: Callable[[str], Actuator | None]
) -> Protection:
    spec, pools, holds = pipeline.index.spec, used(act), config.slurm
    if not pools and not holds.on:
        return Unprotected()

    def of_scheduler(node: str) -> bool:
        return any(not its or spec.by_name[node].pool in its for its in pools.values())

    def out(node: str, gpu: int) -> NodeOutage | None:
        return None if pipeline.dispatcher is None else pipeline.dispatcher.context.gpus.at(node, gpu)

    def board(node: str, gpu: int) -> str:
        now = pipeline.engine.now_of(node)
        return "" if now is None else now.boards.get(gpu, "")

    return GpuProtection(
        out, board, actuator_of, of_scheduler,
        SlurmHolds(holds) if holds.on else None,
        lambda node: not holds.pools or spec.by_name[node].pool in holds.pools,
        holds, pipeline.store.fence, pipeline.now_ms,
    )  # fmt: skip


def _outbox(config: CollectorConfig, spec: FleetSpec, store: Store) -> Outbox:
    """
    Raises:
        SettingsError: a receiver's secret cannot be read.
    """
    receivers = notifiers(config.notify, config.webhooks, spec)
    options = OutboxOptions(
        Routes(receivers, config.notify.route, spec.by_name),
        Silences(spec.by_name, config.maintenance, config.maintenance_events),
        fallback_file=_fallback_file(config.store.url),
    )  # fmt: skip
    return Outbox(store, receivers, config.console.url, options)


def _fallback_file(url: str) -> Path | None:
    """Return the file for messages that the store cannot keep. For a database server systemd names its folder."""
    kind, _, place = url.partition("://")
    folder = place.partition("?")[0] if kind == "chdb" else os.environ.get("STATE_DIRECTORY", "").partition(":")[0]
    return Path(folder) / "told-unstored.jsonl" if folder else None


async def _serve(config: CollectorConfig, detection: Detection, stopping: asyncio.Event) -> None:
    """Listen and run all tasks until `stopping`. Then the agents' streams end first, then ingest, then the API."""
    pipeline, ingest = detection.pipeline, detection.ingest
    path = config.tls.denied_serials_file
    tls = server_tls(config.tls)
    denied = Denied(None if path is None else Path(path))
    gate = Gate(secure=tls is not None, denied=denied, on_refused=detection.exports.take_refusal)
    methods = {path: gate.guarded(path, behaviour) for path, behaviour in detection.methods(config).items()}
    agents = GrpcServer(methods, ServerOptions(MESSAGE_BYTES, open_files.connections()))
    async with contextlib.AsyncExitStack() as stack:
        # A file, not a port: on a port other users of this machine would bypass the limit of connections.
        api_file = f"{stack.enter_context(_socket_folder())}/api"
        agents_address = _listen_for_agents(agents, "ingest.listen", config.ingest.listen, tls)
        beats = HeartbeatStatus()
        parts = _optional_parts(config, detection, beats, agents_address)
        facts = ApiSnapshot(pipeline, ingest.stats, config, gate, tls, parts)
        switch = DeadManSwitch(config.heartbeat, lambda: read_signals(facts), pipeline.ticks.troubles, beats)
        api = FleetApi(facts)
        front, people = _people_server(api, gate)
        addresses = [
            f"agents on {agents_address}",
            f"Fleet API on {_listen(front, people, 'api.listen', config.api.listen, tls, api_file)}",
        ]
        if config.metrics.listen:
            metrics = _metrics_server(config, facts, tls, detection.exports.pages(lambda: _newest(recent(facts))))
            stack.callback(metrics.close)
            addresses.append(f"metrics on {split_address(config.metrics.listen)[0]}:{metrics.port}")
        if config.rest.listen:
            rest = _rest_server(config, api, facts, tls)
            stack.callback(rest.close)
            addresses.append(f"REST on {split_address(config.rest.listen)[0]}:{rest.port}")
        detection.exports.start(lambda: _newest(recent(facts)) if pipeline.leading else None)
        stack.callback(detection.exports.close)
        stack.callback(api.close)
        stack.push_async_callback(front.stop)
        stack.push_async_callback(people.stop, GRACE_S)
        stack.callback(front.close)
        stack.push_async_callback(ingest.close)
        stack.push_async_callback(detection.scrape.close)
        stack.push_async_callback(agents.stop, GRACE_S)
        memory.settled()
        await agents.start()
        await people.start()
        await front.start(api_file)
        for task in (gate.watch, switch.run, *detection.tasks(config)):
            stack.callback(asyncio.ensure_future(task()).cancel)
        judging = asyncio.create_task(detection.leadership.run())
        print(f"drover-collector is ready: {', '.join(addresses)}", flush=True)
        await _until_stopped(judging, stopping)


def maintenance_events(
    config: CollectorConfig, pipeline: Pipeline, conditions: NodeConditions | None
) -> MaintenanceEvents:
    """Build what watches for planned work that others report. Where it lists nodes, `conditions` reads that list."""
    events = config.maintenance_events
    if not events.marks:
        return MaintenanceEvents(events, pipeline)
    api, taints, types = KubernetesApi(config.act.kubernetes), set(events.taints), set(events.conditions)

    def marks() -> Marks:
        nodes = api.nodes()
        listed = conditions.through(nodes) if conditions is not None else nodes
        return marks_of(listed, taints, types, kept_closed, pipeline.index.spec.by_name)

    return MaintenanceEvents(events, pipeline, marks)


def node_conditions(
    act: ActConfig, pipeline: Pipeline, take: Callable[[Sequence[Event]], None]
) -> NodeConditions | None:
    """Build what reads the conditions of Kubernetes' nodes; None: they are not read."""
    config = act.kubernetes
    if not config.enabled or not config.conditions:
        return None
    counted = ConditionSettings.of(config.warn_conditions, config.ignore_conditions)
    return NodeConditions(counted, pipeline, KubernetesApi(config).nodes, take)


def _optional_parts(
    config: CollectorConfig, detection: Detection, beats: HeartbeatStatus, agents_address: str
) -> OptionalParts:
    writes = detection.scrape.writes
    return OptionalParts(
        detection.probes.service, beats, detection.maintenance.expiring, agents_address, detection.exports.statuses,
        detection.scrape.read_state, writes.ask if config.rest.remote_write.enabled else None,
        writes.ask_otlp if config.rest.otlp.enabled else None,
        lambda: Reading() if detection.conditions is None else detection.conditions.reading,
    )  # fmt: skip


def _newest(buckets: Sequence[Bucket]) -> Bucket | None:
    return buckets[-1] if buckets else None


async def _until_stopped(judging: asyncio.Task[None], stopping: asyncio.Event) -> None:
    stopped = asyncio.create_task(stopping.wait())
    await asyncio.wait((judging, stopped), return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    judging.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await judging


def _people_server(api: FleetApi, gate: Gate) -> tuple[Front, grpc.aio.Server]:
    """Return the Fleet API's port and the gRPC server behind it."""
    most = open_files.people()
    bounded = *SERVER_OPTIONS, ("grpc.max_allowed_incoming_connections", most)
    server = grpc.aio.server(options=bounded, interceptors=(gate,), maximum_concurrent_rpcs=CALLS_MOST)
    api.add_to(server)
    return Front(most, on_crowded=lambda: gate.refused.update(("too many connections",))), server


# ---- the process


def _prepare_process(nodes: int) -> None:
    memory.settle()
    sys.setswitchinterval(SWITCH_S)
    open_files.raise_limit()
    for trouble in open_files.troubles(nodes):
        log.warning("%s", trouble)


def _stop_on_signals() -> tuple[asyncio.Event, Callable[[], None]]:
    """Return an event that SIGTERM and SIGINT set, and what they call.

    A stop that takes longer than STOP_S ends the process.
    """
    stopping = asyncio.Event()

    def stop() -> None:
        if not stopping.is_set():
            stopping.set()
            overdue = threading.Timer(STOP_S, _leave)
            overdue.daemon = True
            overdue.start()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop)
    return stopping, stop


def _leave() -> None:
    log.error("not stopped within %g s; the process ends now. Agents resend what was not acknowledged", STOP_S)
    logging.shutdown()
    os._exit(1)  # threads that hang in the store would keep the process forever


# ---- the store


def _open_store(config: StoreConfig) -> Store:
    return Store.open(
        config.url,
        wait_s=STORE_WAIT_S,
        retention_days=config.retention_days,
        retention_10s_days=config.retention_10s_days,
        retention_5min_days=config.retention_5min_days,
        password=store_password(config),
        cluster=config.cluster,
    )


def check_disk(config: StoreConfig, disk: tuple[int, int] | None) -> None:
    """
    Args:
        disk: free and total bytes of the store's disk; None: a server's, not known here.
    Raises:
        SettingsError: the disk is smaller than what must stay free of it, so that everything would be deleted.
    """
    if disk is not None and config.keep_free_bytes >= disk[1]:
        raise SettingsError(
            f"store.keep_free_bytes: {config.keep_free_bytes} is more than the store's disk has, {disk[1]}: all samples"
            " would be deleted; set less, or 0 for a share of the disk"
        )


# ---- addresses


def _socket_folder() -> tempfile.TemporaryDirectory[str]:
    """
    Raises:
        AddressError: no folder can be made.
    """
    try:
        return tempfile.TemporaryDirectory(prefix="drover-", ignore_cleanup_errors=True)
    except OSError as error:
        raise AddressError(
            f"api.listen: a folder for a socket file cannot be made in {tempfile.gettempdir()}: {error.strerror}; set"
            " TMPDIR to a folder in which one can"
        ) from None


def _listen(front: Front, server: grpc.aio.Server, name: str, address: str, tls: ServerTls | None, path: str) -> str:
    """Listen on `address`, with gRPC behind it on a socket file. Return HOST:PORT, also where the port is 0.

    Raises:
        AddressError: occupied, or not an address of this machine.
    """
    host, port = split_address(address)
    try:
        port = front.listen(host, port)
    except OSError:
        raise _address_error(name, address) from None
    try:
        if tls is None:
            server.add_insecure_port(f"unix:{path}")
        else:
            server.add_secure_port(f"unix:{path}", tls.credentials(name))
    except RuntimeError:
        raise AddressError(
            f"{name}: gRPC cannot listen on the file {path}: set TMPDIR to a folder in which files can be made, with a"
            " path of less than 80 characters"
        ) from None
    return f"{address.rpartition(':')[0]}:{port}"


def _listen_for_agents(server: GrpcServer, name: str, address: str, tls: ServerTls | None) -> str:
    """Listen on `address`. Return HOST:PORT, also where the port is 0.

    Raises:
        AddressError: occupied, or not an address of this machine.
    """
    host, port = split_address(address)
    try:
        port = server.listen(host, port, None if tls is None else tls.contexts(name))
    except OSError:
        raise _address_error(name, address) from None
    return f"{address.rpartition(':')[0]}:{port}"


def _address_error(name: str, address: str) -> AddressError:
    return AddressError(
        f"{name}: cannot listen on {address}; it is taken (by another collector?) or not an address of this"
        f" machine: stop what holds it, or set {name} to another"
    )


def _metrics_server(
    config: CollectorConfig, facts: ApiSnapshot, tls: ServerTls | None, pages: Mapping[str, FleetPage]
) -> MetricsServer:
    address = split_address(config.metrics.listen)
    try:
        return MetricsServer(facts, address, None if tls is None else tls.context, open_files.scrapers(), pages)
    except OSError as error:
        raise AddressError(
            f"metrics.listen: cannot serve on {config.metrics.listen}: {error.strerror or error};"
            " set metrics.listen to another address, or to nothing"
        ) from None


def _rest_server(config: CollectorConfig, api: FleetApi, facts: ApiSnapshot, tls: ServerTls | None) -> RestServer:
    address = split_address(config.rest.listen)
    try:
        return RestServer(api, facts, address, None if tls is None else tls.context, open_files.scrapers())
    except OSError as error:
        raise AddressError(
            f"rest.listen: cannot serve on {config.rest.listen}: {error.strerror or error};"
            " set rest.listen to another address, or to nothing"
        ) from None

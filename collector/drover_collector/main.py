"""`drover-collector run | check | config | notify-test`."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.abc
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

# Else its core prints lines of its own beside ours, such as for an occupied port. It reads this when it is imported.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
# Likewise pyarrow, whose own pool keeps what was freed.
os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")

import grpc

from drover_collector.actions.actuators import make_actuators
from drover_collector.actions.context import ActionContext
from drover_collector.actions.dispatcher import ActionDispatcher
from drover_collector.actions.outage_store import OutageStore
from drover_collector.api.connection_front import Front
from drover_collector.api.service import FleetApi
from drover_collector.api.snapshot import ApiSnapshot
from drover_collector.auth.authorization import Gate
from drover_collector.auth.identity import Denied
from drover_collector.auth.tls import server_tls
from drover_collector.config import (
    CollectorConfig,
    StoreConfig,
    load_config,
    split_address,
    store_password,
)
from drover_collector.fleet.index import FleetIndex
from drover_collector.grpc_h2 import GrpcServer, ServerOptions
from drover_collector.ingest.context import IngestContext, IngestListeners
from drover_collector.ingest.limits import MESSAGE_BYTES
from drover_collector.ingest.service import IngestService
from drover_collector.listeners import AddressError, listen, listen_for_agents, metrics_server, socket_folder
from drover_collector.notify import Outbox
from drover_collector.notify.factory import notifiers
from drover_collector.notify.maintenance_windows import validate_window_places
from drover_collector.notify.routes import Routes, validate_places
from drover_collector.notify.silences import Silences
from drover_collector.notify.test_command import chosen, try_out
from drover_collector.observability import self_check as blindness
from drover_collector.observability.dead_man_switch import DeadManSwitch
from drover_collector.pipeline.action_review import ActionReview
from drover_collector.pipeline.leadership import Leadership, holder
from drover_collector.pipeline.lease import LeaderLease
from drover_collector.pipeline.maintenance import Maintenance
from drover_collector.pipeline.pipeline import Pipeline, PipelineOptions
from drover_collector.policy.policy import Policy
from drover_collector.policy.reload import PolicyWatch
from drover_collector.probing import Probing
from drover_collector.process import memory, open_files
from drover_collector.store import KEEP_FREE_BYTES, Store, StoreError, StoreFolderState, folder_state
from drover_core import interrupts, logs, x509
from drover_core.model.events import Severity
from drover_core.model.fleet import FleetError, FleetSpec, load_toml
from drover_core.settings import SettingsError, error_at_key, example_toml
from drover_core.times import iso

log = logging.getLogger("drover_collector")

STORE_WAIT_S = 5.0  # a predecessor that is being stopped needs a moment to let go of the store
GRACE_S = 3.0  # for calls under way at a stop
STOP_S = 60.0  # for a whole stop; a store that hangs must not hold it up for ever
CLOCK_AHEAD_S, CLOCK_BACK_S = 7 * 86_400, 3600  # between the clock and the store's last write: `check` wonders beyond
SWITCH_S = 0.001  # else a message waits 5 ms for each thread that computes: Python's lock is taken over that seldom
REQUEST_BYTES = 65_536
STREAMS_MOST = 64  # of one connection to the Fleet API; a client keeps the next one back until one has ended
PENDING_MOST = open_files.PEOPLE * STREAMS_MOST  # all that all connections may have
CALLS_MOST = 1_024  # of all together, also those that are being refused; the gate has bounds for each certificate
SERVER_OPTIONS = (  # of the Fleet API
    # Its largest honest request, a silence of 1,000 nodes by name, takes some 40 kB; parsed one may take 30 times that.
    ("grpc.max_receive_message_length", REQUEST_BYTES),
    ("grpc.max_concurrent_streams", STREAMS_MOST),
    # Of more than 1,000 calls that have just come gRPC else ends some unheard, also an operator's among an intruder's.
    ("grpc.server.max_pending_requests", PENDING_MOST),
    ("grpc.server.max_pending_requests_hard_limit", PENDING_MOST),
    ("grpc.server_handshake_timeout_ms", 10_000),  # else a connection that says nothing stands for two minutes
    # A peer that lost its power never says so; and one that pings while we have nothing to say is no nuisance.
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
)


def main(argv: Sequence[str] | None = None) -> int:
    interrupts.enable_sigint()
    args = _parser().parse_args(argv)
    logs.configure(args.log_level)
    for name in ("clickhouse_connect", "urllib3"):  # what fails comes as an error, and is told where it does
        logging.getLogger(name).setLevel(logging.ERROR)
    if args.command == "config":
        print(example_toml(CollectorConfig), end="")
        return 0
    try:
        config = load_config(args.config)
        spec = load_toml(Path(config.fleet))
        _check_places(args.config, config, spec)
        policy = Policy.load(None if config.policy.path is None else Path(config.policy.path), config.policy.preset)
        if args.command == "check":
            return _check(args.config, config, spec, policy)
        if args.command == "notify-test":
            made = chosen(notifiers(config.notify, config.webhooks, spec), args.names)
            return 0 if try_out(made, Severity(args.severity), config.console.url, over=args.over) else 1
        asyncio.run(serve(config, spec, policy))
    except (SettingsError, FleetError, StoreError, AddressError) as error:
        print(f"drover-collector: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # it came before `serve` listened for it
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="drover-collector", description="Takes telemetry, stores it, finds what is wrong, serves the Fleet API."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, help_ in (
        ("run", "run until SIGTERM or Ctrl-C"),
        ("check", "validate settings, fleet, policy and the store's folder; opens nothing"),
        ("config", "print a commented sample of the settings"),
        ("notify-test", "send a test message to receivers, and say whether they took it"),
    ):
        command = commands.add_parser(name, help=help_, description=help_)
        command.add_argument(
            "--log-level", default="info", choices=("debug", "info", "warning", "error"), help="what to log on stderr"
        )
        if name != "config":
            command.add_argument("--config", type=Path, help="settings, TOML (default: built-in defaults)")
        if name == "notify-test":
            command.add_argument("names", nargs="*", metavar="NAME", help="receivers; none: all")
            command.add_argument("--severity", default="critical", choices=tuple(Severity), help="of the test")
            command.add_argument("--over", action="store_true", help="take the test back: its end is told")
    return parser


def _check_places(path: Path | None, config: CollectorConfig, spec: FleetSpec) -> None:
    """
    Raises:
        SettingsError: settings name a place that the fleet file does not have.
    """
    try:
        validate_places(config.notify.route, spec)
        validate_window_places(config.maintenance, spec)
    except SettingsError as error:
        raise error_at_key(str(error), path) from None


def _check(path: Path | None, config: CollectorConfig, spec: FleetSpec, policy: Policy) -> int:
    """
    Raises:
        SettingsError: certificates, receivers or room that cannot be used. StoreError: a store.url that is none, or
            whose folder cannot be one.
    """
    told = ", ".join(f"{n.name} ({n.kind})" for n in notifiers(config.notify, config.webhooks, spec)) or "nobody"
    met = folder_state(config.store.url, config.store.cluster)
    check_disk(config.store, None if met is None else met.disk)
    tls = server_tls(config.tls)
    until = f", certificate until {x509.format_time(tls.own.ends_s)}" if tls is not None else ""
    nodes, gpus = (
        f"{n:,} {word}{'' if n == 1 else 's'}" for n, word in ((len(spec.nodes), "node"), (spec.gpu_count, "GPU"))
    )
    print(f"{path or 'defaults'}: good; {nodes}, {gpus}, {policy.name}{until}; tells {told}")
    for remark in _remarks(met):
        print(f"but {remark}")
    return 2 if tls is not None and tls.own.ended(time.time()) else 0


def _several(count: int, word: str) -> str:
    return f"{count:,} {word}{'' if count == 1 else 's'}"


def _remarks(met: StoreFolderState | None) -> list[str]:
    """What of the store is no fault of the settings, and would still keep a collector from running or storing now."""
    if met is None:
        return ["whether the ClickHouse server of store.url answers shows at the start"]
    remarks = []
    if met.holder:
        remarks.append(f"the store is open in process {met.holder}: another collector starts when that has stopped")
    if met.disk[0] < KEEP_FREE_BYTES:
        free, least = met.disk[0] >> 20, KEEP_FREE_BYTES >> 20
        remarks.append(f"only {free} MB are free on the store's disk, and below {least} nothing is stored: make room")
    return remarks + _clock_remark(met.written_s, time.time())


def _clock_remark(written_s: float | None, now_s: float) -> list[str]:
    """What makes this machine's clock look wrong: nothing of the store tells more before agents are connected."""
    if written_s is None or -CLOCK_BACK_S <= now_s - written_s <= CLOCK_AHEAD_S:
        return []
    days = abs(now_s - written_s) / 86_400
    told = f"{days:.0f} days ago" if now_s > written_s else f"{days:.1f} days from now"
    return [
        f"by this machine's clock the store was last written {told}, at {iso(round(written_s * 1000))}: if that is not"
        " so, set the clock (timedatectl)"
    ]


def _unstored(url: str) -> Path | None:
    """The file for what receivers are told while the store fails; systemd names the folder where that is a server."""
    kind, _, place = url.partition("://")
    folder = place.partition("?")[0] if kind == "chdb" else os.environ.get("STATE_DIRECTORY", "").partition(":")[0]
    return Path(folder) / "told-unstored.jsonl" if folder else None


async def serve(config: CollectorConfig, spec: FleetSpec, policy: Policy) -> None:
    """Run until SIGTERM or SIGINT.

    Raises:
        StoreError, AddressError: it cannot start, or the store failed at the start.
    """
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _stop, stopping)
    index = FleetIndex(spec)
    memory.settle()
    sys.setswitchinterval(SWITCH_S)
    open_files.raise_limit()
    for trouble in open_files.troubles(index.node_count):
        log.warning("%s", trouble)
    store = await asyncio.to_thread(
        Store.open,
        config.store.url,
        wait_s=STORE_WAIT_S,
        retention_days=config.store.retention_days,
        retention_10s_days=config.store.retention_10s_days,
        retention_5min_days=config.store.retention_5min_days,
        password=store_password(config.store),
        cluster=config.store.cluster,
    )
    try:
        check_disk(config.store, store.sizes.disk())
        receivers = notifiers(config.notify, config.webhooks, spec)
        outbox = Outbox(
            store, receivers, config.console.url, routes=Routes(receivers, config.notify.route, spec.by_name),
            silences=Silences(spec.by_name, config.maintenance), unstored=_unstored(config.store.url),
        )  # fmt: skip
        lease = await asyncio.to_thread(store.lease, holder(), config.detect.lease_s)
        leader = LeaderLease(lease, may_lead=config.detect.role == "auto")
        store.fence.use(leader.fence)
        pipeline = Pipeline(
            index, store, policy, outbox,
            PipelineOptions(lag_ms=round(config.detect.lag_s * 1000), ceiling=config.act.mode,
            watch=PolicyWatch(None if config.policy.path is None else Path(config.policy.path)),
            boot_ms=lambda: time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000, lease=leader),
        )  # fmt: skip
        actuators = make_actuators(config.act, spec)
        context = ActionContext(
            store, config.act, actuators, OutageStore(store), ActionReview(pipeline), pipeline.now_ms
        )
        pipeline.act_by(ActionDispatcher(context))
        probing = Probing(pipeline, config.probes, config.act)
        leadership = Leadership(pipeline)
        await leadership.start()
        try:
            await _serve(config, pipeline, leadership, probing, stopping)
        finally:
            await leadership.stop()
    finally:
        await asyncio.to_thread(store.close)
    log.info("stopped")


def check_disk(config: StoreConfig, disk: tuple[int, int] | None) -> None:
    """
    Args:
        disk: free and total bytes of the store's disk; None: a server's, not known here.
    Raises:
        SettingsError: the disk is too small for what is to be kept free of it, so that everything would be deleted.
    """
    if disk is not None and config.keep_free_bytes >= disk[1]:
        raise SettingsError(
            f"store.keep_free_bytes: {config.keep_free_bytes} is more than the store's disk has, {disk[1]}: all samples"
            " would be deleted; set less, or 0 for a share of the disk"
        )


def _stop(stopping: asyncio.Event) -> None:
    if not stopping.is_set():
        stopping.set()
        overdue = threading.Timer(STOP_S, _leave)
        overdue.daemon = True
        overdue.start()


def _leave() -> None:
    log.error("not stopped within %g s; leaving as I am: agents send again what was not acknowledged", STOP_S)
    logging.shutdown()
    os._exit(1)  # threads that hang in the store would keep the process for ever


async def _serve(
    config: CollectorConfig, pipeline: Pipeline, leadership: Leadership, probing: Probing, stopping: asyncio.Event
) -> None:
    path = config.tls.denied_serials_file
    tls = server_tls(config.tls)
    gate = Gate(secure=tls is not None, denied=Denied(None if path is None else Path(path)))
    listeners = IngestListeners(pipeline.take_events, pipeline.take_unstored, probing.desk.take_results)
    ingest = IngestService(IngestContext(pipeline.store, pipeline.index, listeners))
    pipeline.buckets.spoke_ms = lambda: ingest.stats.last_seen
    probing.stream = ingest.stream
    facts = ApiSnapshot(pipeline, ingest.stats, config, gate, tls)
    facts.probe_desk = probing.desk
    api = FleetApi(facts)
    methods = {path: gate.guarded(path, behaviour) for path, behaviour in ingest.methods().items()}
    agents = GrpcServer(methods, ServerOptions(MESSAGE_BYTES, open_files.connections()))
    most = open_files.people()
    bounded = *SERVER_OPTIONS, ("grpc.max_allowed_incoming_connections", most)
    people = grpc.aio.server(options=bounded, interceptors=(gate,), maximum_concurrent_rpcs=CALLS_MOST)
    api.add_to(people)
    front = Front(most, on_crowded=lambda: gate.refused.update(("too many connections",)))
    async with contextlib.AsyncExitStack() as stack:
        # A file, and not a port: other users of this machine would go round the bound.
        api_file = f"{stack.enter_context(socket_folder())}/api"
        facts.agents_address = listen_for_agents(agents, "ingest.listen", config.ingest.listen, tls)
        addresses = [
            f"agents on {facts.agents_address}",
            f"Fleet API on {listen(front, people, 'api.listen', config.api.listen, tls, api_file)}",
        ]
        if config.metrics.listen:
            metrics = metrics_server(config, facts, tls)
            stack.callback(metrics.close)
            addresses.append(f"metrics on {split_address(config.metrics.listen)[0]}:{metrics.port}")
        stack.callback(api.close)
        stack.push_async_callback(front.stop)
        stack.push_async_callback(people.stop, GRACE_S)
        stack.callback(front.close)
        stack.push_async_callback(ingest.close)
        stack.push_async_callback(agents.stop, GRACE_S)
        memory.settled()
        await agents.start()
        await people.start()
        await front.start(api_file)
        guarding = asyncio.create_task(gate.watch())
        stack.callback(guarding.cancel)
        maintenance = Maintenance(
            pipeline.store, config.store, lambda: pipeline.leading, troubles=pipeline.ticks.troubles,
            votes=lambda: ingest.stats.clock_votes, nodes=pipeline.index.node_count,
        )  # fmt: skip
        facts.expiring = maintenance.expiring
        maintaining = asyncio.create_task(maintenance.run())
        stack.callback(maintaining.cancel)
        heartbeat = DeadManSwitch(config.heartbeat, lambda: blindness.read_signals(facts), pipeline.ticks.troubles)
        facts.beats = heartbeat.status
        stack.callback(asyncio.create_task(heartbeat.run()).cancel)
        for work in probing.works:
            stack.callback(asyncio.ensure_future(work()).cancel)
        judging = asyncio.create_task(leadership.run())
        print(f"drover-collector is ready: {', '.join(addresses)}", flush=True)
        stopped = asyncio.create_task(stopping.wait())
        await asyncio.wait((judging, stopped), return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        judging.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await judging
    # Left: first the agents' streams end, then ingest stores what it holds, then the API.


class _NoPandas(importlib.abc.MetaPathFinder):
    """pyarrow imports pandas wherever it is installed, as it is beside the console: 0.4 s and 31 MiB for nothing."""

    def find_spec(self, fullname: str, *_: object) -> None:
        if fullname == "pandas":
            raise ModuleNotFoundError("a collector has no use for pandas")


def program() -> int:
    """`main` for a process of its own."""
    sys.meta_path.insert(0, _NoPandas())
    return main()


if __name__ == "__main__":
    sys.exit(program())

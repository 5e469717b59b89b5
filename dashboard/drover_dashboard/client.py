"""The console's only source of data: the Fleet service of a collector.

Every call has a deadline. When the collector does not answer, the last good answer stays on the screen, marked as old,
with one line that says since when and what to do.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import grpc
from google.protobuf.message import Message

from drover_core import x509
from drover_proto import fleet_methods as methods
from drover_proto import fleet_pb2 as pb
from drover_proto.call_errors import reason_of
from drover_proto.fleet_methods import FleetMethod

log = logging.getLogger(__name__)

T = TypeVar("T")
Q = TypeVar("Q", bound=Message)
R = TypeVar("R", bound=Message)

KEPT_ANSWERS = 256  # last good answers, the oldest dropped first
PICTURE_FRESH_S = 2.0  # by health: pages that ask within so long share one
VALUES_FRESH_S = 4.9  # of a metric of all GPUs, which costs the collector most: less than a page's refresh of 5 s
SILENCES = 200  # listed
DEADLINE_S = 4.0  # a question with a longer one reads from disk, so its delay says nothing about the collector
SLOW_S = 2.0  # an answer from memory that takes this long gets a warning: the page is older than it looks
RETRY_S = 1.0  # while the collector is away, one call this often finds out whether it is back; the others do not wait
RETRY_DEADLINE_S = DEADLINE_S  # of that one call: a shorter one would never see a slow collector come back
SHARED_MOST_MS = 10_000  # the longest that pages share an answer because it took long
REPLACED_CHANNEL_S = 30.0  # a replaced channel stays open for its calls under way
UNASKED_MS = 60_000  # a question that nobody asked for so long has no earlier trouble
_TO_NEXT_RETRY_MS = round((RETRY_DEADLINE_S + RETRY_S) * 1000)


class ClientError(ValueError):
    """The console cannot be set up: the message says what to do."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """Why there is no fresh answer, or why it was late (`slow`). `since_ms`: of the first failure in a row."""

    what: str
    reason: str
    advice: str
    since_ms: int
    not_found: bool = False
    slow: bool = False


@dataclass(frozen=True, slots=True)
class Answer(Generic[T]):
    """The result of a call: fresh (no trouble, or one that is `slow`), old (both), or nothing (value None).

    `as_of_ms`: when it was received. `took_ms`: from the question to that.
    """

    value: T | None
    as_of_ms: int
    trouble: Trouble | None = None
    took_ms: int = 0


_NOTHING: Answer[Any] = Answer(None, 0)


@dataclass(frozen=True, slots=True)
class Tls:
    ca: Path
    cert: Path
    key: Path

    def read(self) -> x509.TlsFiles:
        """
        Raises:
            ClientError: a file cannot be read, or they do not belong together.
        """
        try:
            return x509.read_files(self.ca, self.cert, self.key)
        except x509.CertificateError as error:
            raise ClientError(str(error).replace("tls.", "--", 1)) from None

    def stamp(self) -> object:
        return x509.file_versions(self.ca, self.cert, self.key)


class CollectorChannel:
    """A connection to the collector, safe from many threads. A renewed certificate gets a new channel."""

    def __init__(self, target: str, tls: Tls | None = None) -> None:
        self.target = target
        self._tls, self._files, self._tls_stamp = tls, tls.read() if tls else None, tls.stamp() if tls else None
        self._channel = self._connect()
        self._replaced: tuple[grpc.Channel, float] | None = None  # and when, monotonic seconds
        self._logged = ""
        self._lock = threading.Lock()

    def close(self) -> None:
        self._channel.close()

    def call(self, method: FleetMethod[Q, R], request: Q, deadline_s: float) -> R:
        """
        Raises:
            grpc.RpcError: the collector refused or did not answer within `deadline_s`.
        """
        self._renew()
        return method.of(self._channel)(request, timeout=deadline_s)

    def tls_reason(self, detail: str) -> str | None:
        """Return what is wrong with the certificates if that explains gRPC's `detail`."""
        if self._tls is None or self._files is None:
            return None
        own = x509.expiry_warnings(self._files, self._tls.ca, self._tls.cert)
        explained = x509.explain_failure(detail, own, self._tls.ca, self._tls.cert)
        return explained if explained != detail else None

    def _connect(self) -> grpc.Channel:
        options = [
            ("grpc.max_receive_message_length", 64 << 20),
            ("grpc.initial_reconnect_backoff_ms", 500),
            ("grpc.max_reconnect_backoff_ms", 2000),  # a restarted collector is seen within seconds
        ]
        if self._files is None:
            return grpc.insecure_channel(self.target, options)
        files = self._files
        return grpc.secure_channel(self.target, grpc.ssl_channel_credentials(files.ca, files.key, files.cert), options)

    def _renew(self) -> None:
        """Use a renewed certificate for the next calls. Files that are half written are read again later."""
        if self._tls is None or (stamp := self._tls.stamp()) == self._tls_stamp:
            return
        with self._lock:
            if self._replaced is not None and time.monotonic() - self._replaced[1] < REPLACED_CHANNEL_S:
                return
            try:
                files = self._tls.read()
            except ClientError as error:
                if str(error) != self._logged:
                    log.warning("%s; the console keeps using the files it read before", error)
                self._logged = str(error)
                return
            self._tls_stamp = stamp
            if files == self._files:
                return
            if self._replaced is not None:
                self._replaced[0].close()
            self._replaced = self._channel, time.monotonic()
            self._files = files
            self._channel = self._connect()


class FleetClient:
    """Blocking calls, safe from many threads. `ask` and `act` serve any method of the table; the others are typed forms
    of them for the pages.

    It keeps the last good answer to each question, for two reasons: all open pages share a fresh one, and an old one
    stays on the screen while the collector is away.
    """

    def __init__(
        self, target: str, tls: Tls | None = None, now_ms: Callable[[], int] | None = None, cluster: str = ""
    ) -> None:
        """`cluster`: its name, where there are several."""
        self.target, self.cluster = target, cluster
        self._channel = CollectorChannel(target, tls)
        self._now_ms = now_ms or (lambda: time.time_ns() // 1_000_000)
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[str, object], Answer[Any]] = OrderedDict()
        self._in_trouble: OrderedDict[tuple[str, object], tuple[int, int]] = OrderedDict()  # question -> from, to, ms
        self._away: Trouble | None = None
        self._retry_ms = 0
        self._acted_ms = 0  # answers from before a person's act may show the fleet without it

    def close(self) -> None:
        self._channel.close()

    def ask(
        self,
        method: FleetMethod[Q, R],
        request: Q,
        key: object = None,
        deadline_s: float | None = None,
        fresh_s: float | None = None,
    ) -> Answer[R]:
        """Return the answer to a question, or the last good one with its trouble.

        Args:
            key: of the question, where its request changes with the time; else the request's bytes.
            deadline_s: if not `method.page_s`.
            fresh_s: if not `method.fresh_s`.
        """
        at_ms = _moment()
        if at_ms and "at_ms" in request.DESCRIPTOR.fields_by_name:
            request, key = _of_then(request, at_ms), None if key is None else (key, at_ms)
        name = (method.name, request.SerializeToString(deterministic=True) if key is None else key)
        deadline_s = method.page_s if deadline_s is None else deadline_s
        fresh_s = method.fresh_s if fresh_s is None else fresh_s
        takes_long = deadline_s > RETRY_DEADLINE_S
        if takes_long and self._away is not None and not method.acts:
            self.status()  # a quick question finds out whether it is back: this one would take too long for that
        asked_ms = self._now_ms()
        with self._lock:
            kept, away = self._kept.get(name, _NOTHING), self._away
            # A slow collector is busy with one question for a third of the time, however many pages have it.
            shared_ms = max(fresh_s * 1000, min(2 * kept.took_ms, SHARED_MOST_MS)) if fresh_s else 0
            young = 0 <= asked_ms - kept.as_of_ms < shared_ms and kept.as_of_ms > self._acted_ms
            if away is None and kept.value is not None and young:
                return kept
            if away is not None and not method.acts:  # an act is always asked: a person waits for it
                if takes_long or 0 < self._retry_ms - asked_ms <= _TO_NEXT_RETRY_MS:
                    return replace(kept, trouble=away)
                self._retry_ms = asked_ms + _TO_NEXT_RETRY_MS
        try:
            value = self._channel.call(method, request, deadline_s)
        except grpc.RpcError as error:
            trouble = self._trouble(error, name, asked_ms, deadline_s)
            return Answer(None, 0, trouble) if trouble.not_found else replace(kept, trouble=trouble)
        return self._keep(name, value, asked_ms, deadline_s)

    def act(self, method: FleetMethod[Q, R], request: Q) -> Answer[R]:
        """Do what a person asks, now. Pages that draw themselves next ask again: what they had is from before it.

        On a page of the past nothing is done: a person who presses there looks at what stood then.
        """
        if _moment():
            return Answer(None, 0, Trouble("not done", "this page shows the past", "go back to now", self._now_ms()))
        try:
            return self.ask(method, request, (request.SerializeToString(deterministic=True), self._now_ms()))
        finally:
            self._acted_ms = self._now_ms()

    def status(self) -> Answer[pb.Status]:
        return self.ask(methods.GET_STATUS, pb.StatusRequest())

    def layout(self, jobs: bool = False) -> Answer[pb.Layout]:
        """`jobs`: with the job of each GPU."""
        return self.ask(methods.GET_LAYOUT, pb.LayoutRequest(jobs=jobs), fresh_s=1.0 if jobs else None)

    def picture(self, color_by: str) -> Answer[pb.Picture]:
        """Return the packed picture, which is passed on to browsers."""
        fresh_s = PICTURE_FRESH_S if color_by == "health" else VALUES_FRESH_S
        return self.ask(methods.GET_PICTURE, pb.PictureRequest(color_by=color_by, packed=True), fresh_s=fresh_s)

    def nodes(self, limit: int = 0) -> Answer[pb.NodeList]:
        return self.ask(methods.LIST_NODES, pb.ListNodesRequest(limit=limit))

    def node(self, name: str) -> Answer[pb.NodeDetail]:
        return self.ask(methods.GET_NODE, pb.NodeRequest(node=name))

    def incidents(self, state: str = "open", since_days: float = 0.0, **filters: Any) -> Answer[pb.IncidentList]:
        """Return incidents. `filters`: fields of the request. `since_days`: open or closed since; 0: all."""
        wanted: dict[str, Any] = {"state": state, "limit": 200, **filters}
        request = pb.ListIncidentsRequest(**wanted)
        key = (request.SerializeToString(deterministic=True), since_days)
        if since_days:
            request.since_ms = (_moment() or self._now_ms()) - round(since_days * 86_400_000)
        return self.ask(methods.LIST_INCIDENTS, request, key)

    def incident(self, incident_id: str) -> Answer[pb.IncidentDetail]:
        return self.ask(methods.GET_INCIDENT, pb.IncidentRequest(id=incident_id))

    def policy(self) -> Answer[pb.PolicyState]:
        return self.ask(methods.GET_POLICY, pb.PolicyRequest())

    def decisions(self, limit: int) -> Answer[pb.DecisionList]:
        """Return the decisions of the last 7 days with their outcomes."""
        return self.ask(methods.LIST_DECISIONS, pb.DecisionsRequest(limit=limit))

    def backtest(self) -> Answer[pb.BacktestReply]:
        """Decide the last 7 days again, by the policy in force and by each preset."""
        return self.ask(methods.BACKTEST_POLICIES, pb.BacktestRequest())

    def actions(self, node: str, limit: int = 100) -> Answer[pb.ActionList]:
        """Return the actions on a node, oldest first."""
        return self.ask(methods.LIST_ACTIONS, pb.ActionsRequest(node=node, limit=limit))

    def answer(self, decision: str, why: str, who: str, approve: bool) -> Answer[pb.Answered]:
        """Approve or reject a decision that waits for a person."""
        method = methods.APPROVE_DECISION if approve else methods.REJECT_DECISION
        return self.act(method, pb.Answer(decision=decision, why=why, who=who))

    def series(self, request: pb.SeriesRequest, key: str) -> Answer[pb.SeriesReply]:
        """`key` names the chart: while the collector is away its last good answer is shown, of any time."""
        return self.ask(methods.QUERY_SERIES, request, key)

    def probes(self, figure: str = "", node: str = "") -> Answer[pb.ProbeList]:
        return self.ask(methods.LIST_PROBES, pb.ProbesRequest(figure=figure, node=node))

    def probe_history(self, node: str, gpu: int | None, figure: str) -> Answer[pb.ProbeHistoryReply]:
        return self.ask(methods.PROBE_HISTORY, pb.ProbeHistoryRequest(node=node, gpu=gpu, figure=figure))

    def probe_orders(self, node: str = "", limit: int = 50) -> Answer[pb.ProbeOrderList]:
        return self.ask(methods.LIST_PROBE_ORDERS, pb.ProbeOrdersRequest(node=node, limit=limit))

    def jobs(self, ended: bool = False, contains: str = "") -> Answer[pb.JobList]:
        return self.ask(methods.LIST_JOBS, pb.ListJobsRequest(ended=ended, contains=contains))

    def job(self, name: str, *, loss: bool = False) -> Answer[pb.JobDetail]:
        """`loss`: with what it lost and its time line, which are read from the store."""
        return self.ask(methods.GET_JOB, pb.JobRequest(job=name, loss=loss))

    def fabric(self, leaf: str = "", node: str = "") -> Answer[pb.Fabric]:
        return self.ask(methods.GET_FABRIC, pb.FabricRequest(leaf=leaf, node=node))

    def thermals(self, rack: str = "") -> Answer[pb.Thermals]:
        return self.ask(methods.GET_THERMALS, pb.ThermalsRequest(rack=rack))

    def system(self) -> Answer[pb.System]:
        return self.ask(methods.GET_SYSTEM, pb.SystemRequest())

    def capacity(self, days: float) -> Answer[pb.Capacity]:
        """Return what faults cost in the last `days`, and how GPUs are used now."""
        request = pb.CapacityRequest(from_ms=self._now_ms() - round(days * 86_400_000))
        return self.ask(methods.GET_CAPACITY, request, days)

    def risk(self, limit: int) -> Answer[pb.RiskList]:
        return self.ask(methods.LIST_RISK, pb.RiskRequest(limit=limit))

    def preview(self, asked: pb.ActRequest) -> Answer[pb.ActPreview]:
        """Return what an act on a node, or on one GPU of it, would meet now."""
        key = (asked.act, asked.node, asked.gpu_uuid, self._now_ms())
        return self.ask(methods.PREVIEW_ACT, asked, key, methods.ACT_S)

    def preview_drain(self, node: str) -> Answer[pb.ActPreview]:
        """Return what a drain would meet, for a form that stays open."""
        return self.ask(methods.PREVIEW_ACT, pb.ActRequest(node=node, act="drain"))

    def preview_resume(self, node: str) -> Answer[pb.ActPreview]:
        """Return what is known for and against returning a node to service."""
        return self.ask(methods.PREVIEW_ACT, pb.ActRequest(node=node, act="resume"))

    def silences(self, ended_days: float = 0.0) -> Answer[pb.SilenceList]:
        """Return the silences in force or planned, the open maintenance windows, and those that ended lately."""
        since_ms = self._now_ms() - round(ended_days * 86_400_000) if ended_days else 0
        request = pb.SilencesRequest(limit=SILENCES, since_ms=since_ms)
        return self.ask(methods.LIST_SILENCES, request, ended_days)

    def _keep(self, name: tuple[str, object], value: R, asked_ms: int, deadline_s: float) -> Answer[R]:
        received_ms = self._now_ms()
        late = deadline_s <= DEADLINE_S and received_ms - asked_ms >= SLOW_S * 1000
        slow = self._slow((received_ms - asked_ms) / 1000, self._since(name, asked_ms)) if late else None
        answer = Answer(value, received_ms, slow, received_ms - asked_ms)
        with self._lock:
            self._away = None
            if slow is None:
                self._in_trouble.pop(name, None)
            self._kept[name] = answer
            self._kept.move_to_end(name)
            while len(self._kept) > KEPT_ANSWERS:
                self._kept.popitem(last=False)
        return answer

    def _since(self, name: tuple[str, object], now_ms: int) -> int:
        """Return since when this question has been in trouble. It begins again when nobody asked for UNASKED_MS."""
        with self._lock:
            from_ms, to_ms = self._in_trouble.get(name, (now_ms, now_ms))
            if not 0 <= now_ms - to_ms <= UNASKED_MS:
                from_ms = now_ms
            self._in_trouble[name] = from_ms, now_ms
            self._in_trouble.move_to_end(name)
            while len(self._in_trouble) > KEPT_ANSWERS:
                self._in_trouble.popitem(last=False)
        return from_ms

    def _slow(self, took_s: float, since_ms: int) -> Trouble:
        what, advice = f"{self._who()} has answered slowly", "is its machine overloaded, or the way to it?"
        return Trouble(what, f"{took_s:.1f} s", advice, since_ms, slow=True)

    def _who(self) -> str:
        return f"Collector {self.target}" + (f" of cluster {self.cluster}" if self.cluster else "")

    def _trouble(self, error: grpc.RpcError, name: tuple[str, object], asked_ms: int, deadline_s: float) -> Trouble:
        trouble = _trouble_of(self._who(), error, asked_ms, deadline_s)
        code = error.code()
        detail = error.details() or ""
        if code is grpc.StatusCode.UNAVAILABLE and "refused" not in detail.lower():
            explained = self._channel.tls_reason(detail)
            if explained is not None:
                trouble = replace(trouble, reason=explained, advice="docs/how-to/tls.md says more")
        # A chart that takes too long says nothing about the collector; a number from its memory does.
        late = code is grpc.StatusCode.DEADLINE_EXCEEDED and deadline_s <= DEADLINE_S
        with self._lock:
            gone = code is grpc.StatusCode.UNAVAILABLE or late
            if gone:
                if self._away is not None:
                    trouble = replace(trouble, since_ms=self._away.since_ms)
                self._away = trouble
                self._retry_ms = self._now_ms() + round(RETRY_S * 1000)
            elif code is not grpc.StatusCode.DEADLINE_EXCEEDED:
                self._away = None  # a refusal is an answer
        return trouble if gone else replace(trouble, since_ms=self._since(name, asked_ms))


def _trouble_of(who: str, error: grpc.RpcError, asked_ms: int, deadline_s: float) -> Trouble:
    code, detail = error.code(), (error.details() or "").strip()
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        advice = "is its machine or its store's disk overloaded? See its log: journalctl -u drover-collector"
        return Trouble(f"{who} has not answered", f"no answer within {deadline_s:g} s", advice, asked_ms)
    if code is grpc.StatusCode.UNAVAILABLE:
        reason = reason_of(detail) or "no reason given"
        return Trouble(f"{who} has not answered", reason, "is drover-collector running?", asked_ms)
    if code in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.INVALID_ARGUMENT):
        return Trouble("not found", detail, "check its name", asked_ms, not_found=True)
    if code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
        return Trouble(f"{who} has refused this console", detail, "check --ca, --cert and --key", asked_ms)
    if code is grpc.StatusCode.UNIMPLEMENTED:
        older = "it is older than this console"
        return Trouble(f"{who} has not known a question of this page", older, "run both at one version", asked_ms)
    return Trouble(f"{who} has failed to answer", f"{code.name}: {detail}", "see the collector's log", asked_ms)


_shared: Callable[[], FleetClient] | None = None
_named: Callable[[], str] = str
_moment: Callable[[], int] = int  # returns 0: now


def share(client: FleetClient) -> None:
    """Make `client` the one that the pages and the picture's endpoint use."""
    share_choice(lambda: client, lambda: client.cluster)


def share_choice(choose: Callable[[], FleetClient], named: Callable[[], str]) -> None:
    """Let `choose` say which client the page that runs now uses, and `named` the name of its cluster ("": none)."""
    global _shared, _named
    _shared, _named = choose, named


def share_moment(moment: Callable[[], int]) -> None:
    """Let `moment` say what moment, ms, the page that runs now shows; 0: now."""
    global _moment
    _moment = moment


def moment_ms() -> int:
    """Return the moment that the page shows, ms; 0: now."""
    return _moment()


def _of_then(request: Q, at_ms: int) -> Q:
    made = type(request)()
    made.CopyFrom(request)
    made.at_ms = at_ms  # type: ignore[attr-defined]  # the caller has looked for it
    return made


def fleet() -> FleetClient:
    """Return the client of the collector that this page shows."""
    if _shared is None:
        raise RuntimeError("no collector was named; start the console with drover-dashboard")
    return _shared()


def fleet_name() -> str:
    """Return the cluster that this page shows; "" where there is one collector, and on a page of all clusters."""
    return _named()


def scoped(key: str) -> str:
    """Return `key` as the one of this page's cluster.

    What acts is drawn under such keys: a press on a form of one cluster is unknown to the page of another, though both
    may have a node of the same name.
    """
    cluster = fleet().cluster
    return f"{key}@{cluster}" if cluster else key


def targets(node: str, gpus: Sequence[int]) -> list[pb.SeriesTarget]:
    return [pb.SeriesTarget(node=node, gpu=gpu) for gpu in gpus]

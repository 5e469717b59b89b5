"""The console's only source: the Fleet service of a collector.

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

from drover_core import x509
from drover_proto import fleet_pb2 as pb
from drover_proto.fleet_pb2_grpc import FleetStub

log = logging.getLogger(__name__)

T = TypeVar("T")

KEPT_ANSWERS = 256  # last good answers, the oldest dropped first
FRESH_S = 1.0  # answers this young are shared by all open pages
PICTURE_FRESH_S = 2.0  # by health: one made shortly before it is asked for (fleet_ahead.py) must serve
VALUES_FRESH_S = 4.9  # of a metric of all GPUs, which costs the collector most: less than a page's refresh of 5 s
SILENCES = 200  # listed
LAYOUT_FRESH_S = 10.0  # a layout changes with a restart of the collector, which a picture's version tells at once
DEADLINE_S = 4.0
SLOW_S = 2.0  # numbers kept in memory that take this long: said, as the page is then older than it looks
RETRY_S = 1.0  # while the collector is away, one call this often finds out whether it is back; all others wait for none
PROBE_DEADLINE_S = DEADLINE_S  # of that one call: a shorter one would never see a collector come back that is slow
SERIES_DEADLINE_S = 15.0  # a day of a node is read from disk
ANSWER_DEADLINE_S = 25.0  # of a person's answer: detection goes first
UNASKED_MS = 60_000  # a question not asked for so long has no trouble of before
_TO_NEXT_PROBE_MS = round((PROBE_DEADLINE_S + RETRY_S) * 1000)


class ClientError(ValueError):
    """The console cannot be set up: the message says what to do."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """Why there is no fresh answer, or why it came late (`slow`). `since_ms`: of the first failure in a row."""

    what: str
    reason: str
    advice: str
    since_ms: int
    not_found: bool = False
    slow: bool = False


@dataclass(frozen=True, slots=True)
class Answer(Generic[T]):
    """What a call gave: fresh (no trouble, or one that is `slow`), old (both), or nothing (value None).

    `as_of_ms`: when it was received.
    """

    value: T | None
    as_of_ms: int
    trouble: Trouble | None = None


_NOTHING: Answer[Any] = Answer(None, 0)


@dataclass(frozen=True, slots=True)
class Tls:
    ca: Path
    cert: Path
    key: Path

    def read(self) -> x509.TlsFiles:
        """Raises ClientError when a file cannot be read, or they do not belong together."""
        try:
            return x509.read_files(self.ca, self.cert, self.key)
        except x509.CertificateError as error:
            raise ClientError(str(error).replace("tls.", "--", 1)) from None

    def stamp(self) -> object:
        return x509.file_versions(self.ca, self.cert, self.key)


class FleetClient:
    """Blocking calls, safe from many threads; one channel for all, made anew when the certificate was renewed."""

    def __init__(self, target: str, tls: Tls | None = None, now_ms: Callable[[], int] | None = None) -> None:
        self.target = target
        self._tls, self._files, self._tls_stamp = tls, tls.read() if tls else None, tls.stamp() if tls else None
        self._channel = self._connect()
        self._stub = FleetStub(self._channel)
        self._told = ""
        self._older: tuple[grpc.Channel, float] | None = None  # and when it was replaced: calls may still be under way
        self._now_ms = now_ms or (lambda: time.time_ns() // 1_000_000)
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[str, str], Answer[Any]] = OrderedDict()
        self._begun: OrderedDict[tuple[str, str], tuple[int, int]] = OrderedDict()  # of questions in trouble: from, to
        self._away: Trouble | None = None
        self._retry_ms = 0
        self._acted_ms = 0  # answers of before a person's act may say that it was not done

    def close(self) -> None:
        self._channel.close()

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

    def _fleet(self) -> FleetStub:
        self._renew()
        return self._stub

    def _renew(self) -> None:
        """Take a renewed certificate for the next calls; one that is half written is looked at again."""
        if self._tls is None or (stamp := self._tls.stamp()) == self._tls_stamp:
            return
        with self._lock:
            if self._older is not None and time.monotonic() - self._older[1] < 2 * SERIES_DEADLINE_S:
                return
            try:
                files = self._tls.read()
            except ClientError as error:
                if str(error) != self._told:
                    log.warning("%s; the console goes on with the files as they were", error)
                self._told = str(error)
                return
            self._tls_stamp = stamp
            if files == self._files:
                return
            if self._older is not None:
                self._older[0].close()
            self._older = self._channel, time.monotonic()
            self._files = files
            self._channel = self._connect()
            self._stub = FleetStub(self._channel)

    def status(self) -> Answer[pb.Status]:
        return self._call(self._fleet().GetStatus, pb.StatusRequest(), "status")

    def layout(self, jobs: bool = False) -> Answer[pb.Layout]:
        """`jobs`: with who holds each GPU."""
        fresh_s = FRESH_S if jobs else LAYOUT_FRESH_S
        return self._call(self._fleet().GetLayout, pb.LayoutRequest(jobs=jobs), f"layout {jobs}", fresh_s=fresh_s)

    def picture(self, color_by: str, for_s: float = 0.0) -> Answer[pb.Picture]:
        """`for_s`: one that will do so long from now, too."""
        fresh_s = PICTURE_FRESH_S if color_by == "health" else VALUES_FRESH_S
        request = pb.PictureRequest(color_by=color_by)
        return self._call(self._fleet().GetPicture, request, f"picture {color_by}", fresh_s=fresh_s - for_s)

    def nodes(self, limit: int = 0) -> Answer[pb.NodeList]:
        return self._call(self._fleet().ListNodes, pb.ListNodesRequest(limit=limit), f"nodes {limit}")

    def node(self, name: str) -> Answer[pb.NodeDetail]:
        return self._call(self._fleet().GetNode, pb.NodeRequest(node=name), f"node {name}")

    def incidents(
        self, state: str = "open", node: str = "", min_severity: str = "", since_ms: int = 0, limit: int = 200,
        silenced: str = "",
    ) -> Answer[pb.IncidentList]:  # fmt: skip
        request = pb.ListIncidentsRequest(
            state=state, node=node, min_severity=min_severity, since_ms=since_ms, limit=limit, silenced=silenced
        )
        key = f"incidents {state} {node} {min_severity} {silenced} {limit}"
        return self._call(self._fleet().ListIncidents, request, key)

    def policy(self) -> Answer[pb.PolicyState]:
        return self._call(self._fleet().GetPolicy, pb.PolicyRequest(), "policy")

    def decisions(self, limit: int) -> Answer[pb.DecisionList]:
        """Of the last 7 days, how each stands."""
        return self._call(self._fleet().ListDecisions, pb.DecisionsRequest(limit=limit), f"decisions {limit}")

    def backtest(self) -> Answer[pb.BacktestReply]:
        """The last 7 days decided again by the policy in force and by each preset."""
        return self._call(self._fleet().BacktestPolicies, pb.BacktestRequest(), "backtest", ANSWER_DEADLINE_S)

    def actions(self, node: str, limit: int = 100) -> Answer[pb.ActionList]:
        """What was done to a node, oldest first."""
        request = pb.ActionsRequest(node=node, limit=limit)
        return self._call(self._fleet().ListActions, request, f"actions {node} {limit}")

    def answer(self, decision: str, why: str, who: str, approve: bool) -> Answer[pb.Answered]:
        """A person's answer to a decision that waits; never one of before."""
        request = pb.Answer(decision=decision, why=why, who=who)
        method = self._fleet().ApproveDecision if approve else self._fleet().RejectDecision
        return self._act(method, request, f"answer {decision} {approve} {self._now_ms()}")

    def incident(self, incident_id: str) -> Answer[pb.IncidentDetail]:
        return self._call(self._fleet().GetIncident, pb.IncidentRequest(id=incident_id), f"incident {incident_id}")

    def series(self, request: pb.SeriesRequest, key: str) -> Answer[pb.SeriesReply]:
        """`key` names the chart: its last good answer is shown while the collector is away, whatever time it was of."""
        return self._call(self._fleet().QuerySeries, request, f"series {key}", SERIES_DEADLINE_S)

    def probes(self, figure: str = "", node: str = "") -> Answer[pb.ProbeList]:
        request = pb.ProbesRequest(figure=figure, node=node)
        return self._call(self._fleet().ListProbes, request, f"probes {figure} {node}", SERIES_DEADLINE_S)

    def probe_history(self, node: str, gpu: int | None, figure: str) -> Answer[pb.ProbeHistoryReply]:
        request = pb.ProbeHistoryRequest(node=node, gpu=gpu, figure=figure)
        return self._call(self._fleet().ProbeHistory, request, f"probe history {node} {gpu} {figure}")

    def probe_orders(self, node: str = "", limit: int = 50) -> Answer[pb.ProbeOrderList]:
        request = pb.ProbeOrdersRequest(node=node, limit=limit)
        return self._call(self._fleet().ListProbeOrders, request, f"probe orders {node} {limit}")

    def jobs(self, ended: bool = False, contains: str = "") -> Answer[pb.JobList]:
        request = pb.ListJobsRequest(ended=ended, contains=contains)
        return self._call(self._fleet().ListJobs, request, f"jobs {ended} {contains}")

    def job(self, name: str) -> Answer[pb.JobDetail]:
        return self._call(self._fleet().GetJob, pb.JobRequest(job=name), f"job {name}")

    def fabric(self, leaf: str = "", node: str = "") -> Answer[pb.Fabric]:
        return self._call(self._fleet().GetFabric, pb.FabricRequest(leaf=leaf, node=node), f"fabric {leaf} {node}")

    def thermals(self, rack: str = "") -> Answer[pb.Thermals]:
        return self._call(self._fleet().GetThermals, pb.ThermalsRequest(rack=rack), f"thermals {rack}")

    def system(self) -> Answer[pb.System]:
        return self._call(self._fleet().GetSystem, pb.SystemRequest(), "system")

    def capacity(self, days: float) -> Answer[pb.Capacity]:
        """What faults cost in the last `days`; the rest is of now."""
        request = pb.CapacityRequest(from_ms=self._now_ms() - round(days * 86_400_000))
        return self._call(self._fleet().GetCapacity, request, f"capacity {days}", SERIES_DEADLINE_S)

    def risk(self, limit: int) -> Answer[pb.RiskList]:
        return self._call(self._fleet().ListRisk, pb.RiskRequest(limit=limit), f"risk {limit}")

    def preview(self, node: str, act: str) -> Answer[pb.ActPreview]:
        """What the act would meet, asked anew."""
        request = pb.ActRequest(node=node, act=act)
        return self._call(
            self._fleet().PreviewAct, request, f"preview {act} {node} {self._now_ms()}", ANSWER_DEADLINE_S
        )

    def look(self, node: str) -> Answer[pb.ActPreview]:
        """What a drain would meet, for a form that stays open."""
        return self._call(self._fleet().PreviewAct, pb.ActRequest(node=node, act="drain"), f"look {node}")

    def safe(self, node: str) -> Answer[pb.ActPreview]:
        """What is known for and against giving a node back."""
        return self._call(self._fleet().PreviewAct, pb.ActRequest(node=node, act="resume"), f"safe {node}")

    def act(self, request: pb.ActRequest) -> Answer[pb.ActReply]:
        """What a person does to a node; never an answer of before."""
        return self._act(self._fleet().ActOnNode, request, f"act {self._now_ms()}")

    def silences(self) -> Answer[pb.SilenceList]:
        """Those in force or to come, with the maintenance windows that are open."""
        return self._call(self._fleet().ListSilences, pb.SilencesRequest(limit=SILENCES), "silences")

    def silence(self, request: pb.SilenceAsk) -> Answer[pb.SilenceReply]:
        return self._act(self._fleet().CreateSilence, request, f"silence {self._now_ms()}")

    def end_silence(self, request: pb.SilenceEnd) -> Answer[pb.SilenceReply]:
        return self._act(self._fleet().EndSilence, request, f"end silence {request.id} {self._now_ms()}")

    def ask_probe(self, request: pb.ProbeAsk) -> Answer[pb.ProbeAsked]:
        """Order probes; never an answer of before."""
        return self._act(self._fleet().RequestProbe, request, f"probe {self._now_ms()}")

    def _act(self, method: Any, request: Any, key: str) -> Answer[Any]:
        """Do what a person asks. Pages that draw themselves next ask anew: what they had is of before it."""
        try:
            return self._call(method, request, key, ANSWER_DEADLINE_S)
        finally:
            self._acted_ms = self._now_ms()

    def _call(
        self, method: Any, request: Any, key: str, deadline_s: float = DEADLINE_S, fresh_s: float = FRESH_S
    ) -> Answer[Any]:
        name = (type(request).__name__, key)
        asked_ms = self._now_ms()
        with self._lock:
            kept, away = self._kept.get(name, _NOTHING), self._away
            young = 0 <= asked_ms - kept.as_of_ms < fresh_s * 1000 and kept.as_of_ms > self._acted_ms
            if away is None and kept.value is not None and young:
                return kept
            if away is not None:
                if 0 < self._retry_ms - asked_ms <= _TO_NEXT_PROBE_MS:
                    return replace(kept, trouble=away)
                deadline_s = min(deadline_s, PROBE_DEADLINE_S)
                self._retry_ms = asked_ms + _TO_NEXT_PROBE_MS
        try:
            value = method(request, timeout=deadline_s)
        except grpc.RpcError as error:
            trouble = self._trouble(error, name, asked_ms, deadline_s)
            return Answer(None, 0, trouble) if trouble.not_found else replace(kept, trouble=trouble)
        received_ms = self._now_ms()
        late = deadline_s <= DEADLINE_S and received_ms - asked_ms >= SLOW_S * 1000
        slow = self._slow((received_ms - asked_ms) / 1000, self._since(name, asked_ms)) if late else None
        answer = Answer(value, received_ms, slow)
        with self._lock:
            self._away = None
            if slow is None:
                self._begun.pop(name, None)
            self._kept[name] = answer
            self._kept.move_to_end(name)
            while len(self._kept) > KEPT_ANSWERS:
                self._kept.popitem(last=False)
        return answer

    def _since(self, name: tuple[str, str], now_ms: int) -> int:
        """Since when this question has been in trouble; anew where nobody asked it for a while."""
        with self._lock:
            from_ms, to_ms = self._begun.get(name, (now_ms, now_ms))
            if not 0 <= now_ms - to_ms <= UNASKED_MS:
                from_ms = now_ms
            self._begun[name] = from_ms, now_ms
            self._begun.move_to_end(name)
            while len(self._begun) > KEPT_ANSWERS:
                self._begun.popitem(last=False)
        return from_ms

    def _slow(self, took_s: float, since_ms: int) -> Trouble:
        what, advice = f"Collector {self.target} has answered slowly", "is its machine overloaded, or the way to it?"
        return Trouble(what, f"{took_s:.1f} s", advice, since_ms, slow=True)

    def _trouble(self, error: grpc.RpcError, name: tuple[str, str], asked_ms: int, deadline_s: float) -> Trouble:
        trouble = _told(f"Collector {self.target}", error, asked_ms, deadline_s)
        code = error.code()
        detail = error.details() or ""
        if code is grpc.StatusCode.UNAVAILABLE and self._tls and self._files and "refused" not in detail.lower():
            own = x509.expiry_warnings(self._files, self._tls.ca, self._tls.cert)
            explained = x509.explain_failure(detail, own, self._tls.ca, self._tls.cert)
            if explained != detail:
                trouble = replace(trouble, reason=explained, advice="docs/how-to/tls.md tells more")
        # A chart that takes too long says nothing of the collector; a number kept in its memory does.
        late = code is grpc.StatusCode.DEADLINE_EXCEEDED and deadline_s <= DEADLINE_S
        with self._lock:
            gone = code is grpc.StatusCode.UNAVAILABLE or late
            if gone:
                if self._away is not None:
                    trouble = replace(trouble, since_ms=self._away.since_ms)
                self._away = trouble
                self._retry_ms = self._now_ms() + round(RETRY_S * 1000)
            else:
                self._away = None  # a refusal is an answer
        return trouble if gone else replace(trouble, since_ms=self._since(name, asked_ms))


def _told(who: str, error: grpc.RpcError, asked_ms: int, deadline_s: float) -> Trouble:
    code, detail = error.code(), (error.details() or "").strip()
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        advice = "is its machine or its store's disk overloaded? Its log tells: journalctl -u drover-collector"
        return Trouble(f"{who} has not answered", f"no answer within {deadline_s:g} s", advice, asked_ms)
    if code is grpc.StatusCode.UNAVAILABLE:
        return Trouble(f"{who} has not answered", _short(detail), "is drover-collector running?", asked_ms)
    if code in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.INVALID_ARGUMENT):
        return Trouble("not found", detail, "choose from the list", asked_ms, not_found=True)
    if code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
        return Trouble(f"{who} has refused this console", detail, "check --ca, --cert and --key", asked_ms)
    if code is grpc.StatusCode.UNIMPLEMENTED:
        older = "it is older than this console"
        return Trouble(f"{who} has not known a question of this page", older, "run both at one version", asked_ms)
    return Trouble(f"{who} has failed to answer", f"{code.name}: {detail}", "see the collector's log", asked_ms)


def _short(detail: str) -> str:
    """The reason inside gRPC's long texts."""
    lowered = detail.lower()
    for reason in ("connection refused", "no route to host", "connection reset", "handshake failed", "timed out"):
        if reason in lowered:
            return reason
    if "dns" in lowered or "name resolution" in lowered:
        return "its name cannot be resolved"
    return detail.splitlines()[0][:120] if detail else "no reason given"


_shared: FleetClient | None = None


def share(client: FleetClient) -> None:
    """Make `client` the one that the pages and the picture's endpoint use."""
    global _shared
    _shared = client


def fleet() -> FleetClient:
    """The client of this process."""
    if _shared is None:
        raise RuntimeError("no collector was named; start the console with drover-dashboard")
    return _shared


def targets(node: str, gpus: Sequence[int]) -> list[pb.SeriesTarget]:
    return [pb.SeriesTarget(node=node, gpu=gpu) for gpu in gpus]

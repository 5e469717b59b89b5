"""A Fleet server whose answers a test chooses, among them failures that a real collector does not give on demand."""

from __future__ import annotations

import gzip
import json
import sys
import threading
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import grpc
import numpy as np
import pytest

from drover_core.model.events import (
    Audit,
    Decision,
    Event,
    EventKind,
    Evidence,
    Health,
    Incident,
    IncidentKind,
    NodeOutage,
    Note,
    Silence,
    to_json,
)
from drover_core.model.events import RecommendedAction as W
from drover_core.model.events import Severity as S
from drover_core.model.incident_notes import handling_of
from drover_dashboard import client
from drover_dashboard.client import FleetClient
from drover_proto import fleet_pb2 as pb
from drover_proto.fleet_pb2_grpc import FleetServicer, add_FleetServicer_to_server

NOW_MS = 1_800_000_000_000
HOSTILE = "<script>alert(1)</script> :red[**x**] ![i](http://x/) $y$"
LEGEND = [str(health) for health in Health]


class Chosen(FleetServicer):
    """Two nodes of two GPUs: n2 GPU 1 is confirmed, its power absent."""

    def __init__(self) -> None:
        self.failure: tuple[grpc.StatusCode, str] | None = None
        self.hang = threading.Event()
        self.hang.set()
        self.calls: list[str] = []
        self.quiet_ms = 0
        self.may_answer = False
        self.ceiling = "enforce"
        self.decision: Decision | None = None
        self.answers: list[tuple[str, str, str, str]] = []
        self.currency, self.measured = "", True
        self.judged = True  # it has judged since it began
        self.role = "active"
        self.ledger = pb.Ledger()
        self.ledgers: list[pb.LedgerRequest] = []  # that were asked for
        self.preview = pb.ActPreview(may_act=True)
        self.series: list[pb.SeriesRequest] = []
        self.peers: list[pb.InventoryPeers] = []
        self.held: dict[int, str] = {}  # job of each GPU of a node
        self.pending, self.receivers = 0, 1
        self.silence: pb.SilenceNote | None = None  # of the incident i1
        self.silences: list[Silence] = []
        self.notes: list[Audit] = []  # on the incident i1
        self.refuses = ""  # this act of a note
        self.asked_filters: list[pb.ListIncidentsRequest] = []
        self.asked_silenced: list[str] = []
        self.over: list[Incident] = []
        self.strangers: list[str] = []  # nodes that report and are not in the fleet
        self.known, self.packs = 3, True  # GPUs whose metric is known; pictures are packed, as since 0.2.0
        self.acts: list[tuple[str, str, str, str, bool]] = []  # what, of what, why, who, force (4 h of a silence)
        self.save_s = -1.0  # of the last act on a node

    def _called(self, name: str, context: grpc.ServicerContext) -> None:
        self.calls.append(name)
        self.hang.wait(120)
        if self.failure:
            context.abort(*self.failure)

    def GetStatus(self, request: Any, context: grpc.ServicerContext) -> pb.Status:
        self._called("status", context)
        return pb.Status(
            fleet="demo", mode="observe", nodes_expected=2, nodes_reporting=1, gpus_expected=4, ts_ms=NOW_MS,
            gpus_by_health={"healthy": 3, "confirmed": 1},
            open_incidents_by_severity={"critical": 1} if self.judged else {},
            pending=self.pending, receivers=self.receivers, unknown_nodes=self.strangers,
            newest_sample_ms=NOW_MS - self.quiet_ms, newest_tick_ms=NOW_MS if self.judged else 0,
            role=self.role,
            troubles=[f"the store is slow: {HOSTILE}"],
        )  # fmt: skip

    def GetLayout(self, request: Any, context: grpc.ServicerContext) -> pb.Layout:
        self._called("layout", context)
        nodes = [pb.RackNode(name=name, gpus=2) for name in ("n1", "n2")]
        return pb.Layout(version="v1", racks=[pb.Rack(name="r1", nodes=nodes)])

    def Search(self, request: pb.SearchRequest, context: grpc.ServicerContext) -> pb.SearchReply:
        self._called("search", context)
        gpu = pb.SearchHit(kind="gpu", name="n2 GPU 1", node="n2", gpu=1, detail=f"confirmed: {HOSTILE}")
        hits = [
            pb.SearchHit(kind="node", name="n2", node="n2", detail=HOSTILE, state="confirmed"), gpu,
            pb.SearchHit(kind="incident", name=f"lost for xid/xid_79 {HOSTILE}", incident="i1", state="critical"),
            pb.SearchHit(kind="xid", name="XID 31", detail=HOSTILE), pb.SearchHit(kind="job", name=HOSTILE),
            pb.SearchHit(kind="rack", name="r1"), pb.SearchHit(kind="a kind of a newer collector", name="x"),
        ]  # fmt: skip
        return pb.SearchReply(hits=[] if request.text == "nothing" else hits, more=True)

    def GetPicture(self, request: pb.PictureRequest, context: grpc.ServicerContext) -> pb.Picture:
        self._called(f"picture {request.color_by}", context)
        body = bytes([0, 0, 0, 2])
        picture = pb.Picture(layout_version="v1", ts_ms=NOW_MS, legend=LEGEND, gpus=4)
        if request.color_by != "health":
            picture.low, picture.high, picture.unit, picture.known, picture.exact = 300, 500, "W", self.known, True
            body += bytes([1, 128, 255, 0]) + np.array([300, 400, 500, np.nan], "<f4").tobytes()
        if request.packed and self.packs:
            picture.frame = gzip.compress(body)
        return picture

    def GetNode(self, request: pb.NodeRequest, context: grpc.ServicerContext) -> pb.NodeDetail:
        self._called("node", context)
        if request.node not in ("n1", "n2"):
            context.abort(grpc.StatusCode.NOT_FOUND, f"no node {request.node!r} in the fleet")
        present = pb.Value(metric="sm_clock_mhz", present=True, value=1500, ts_ms=NOW_MS, peers_median=1700, peers=3)
        absent = pb.Value(metric="power_w", reason="lost")
        gpus = [
            pb.GpuDetail(
                gpu=slot, uuid=f"GPU-{slot}", health="healthy", values=[present, absent], job=self.held.get(slot, "")
            )
            for slot in (0, 1)
        ]
        row = pb.NodeRow(name=request.node, health="healthy", reason=HOSTILE, last_seen_ms=NOW_MS)
        return pb.NodeDetail(
            row=row, gpus=gpus, events_json=[to_json(event())], inventory={"driver": HOSTILE},
            inventory_peers=self.peers,
        )  # fmt: skip

    def ListNodes(self, request: Any, context: grpc.ServicerContext) -> pb.NodeList:
        self._called("nodes", context)
        return pb.NodeList(nodes=[pb.NodeRow(name="n2", health="confirmed")], total=2)

    def ListIncidents(self, request: Any, context: grpc.ServicerContext) -> pb.IncidentList:
        self._called("incidents", context)
        self.asked_silenced.append(request.silenced)
        self.asked_filters.append(request)
        silences = {"i1": self.silence} if self.silence else {}
        if not self.judged:
            return pb.IncidentList()
        if request.state == "closed":
            return pb.IncidentList(incidents_json=[to_json(one) for one in self.over], total=len(self.over))
        if (request.silenced == "no" and silences) or (request.silenced == "only" and not silences):
            return pb.IncidentList()
        return pb.IncidentList(incidents_json=[to_json(incident())], total=1, silences=silences,
                               handling={"i1": found} if (found := self._handling()) else {})  # fmt: skip

    def GetIncident(self, request: pb.IncidentRequest, context: grpc.ServicerContext) -> pb.IncidentDetail:
        self._called("incident", context)
        if request.id != "i1":
            context.abort(grpc.StatusCode.NOT_FOUND, f"no incident {request.id!r}")
        decision = self.decision or Decision(
            "d1", "i1", NOW_MS, "n2", W.DRAIN, "observe", "would_act", "xid-79", "1 of 3 nodes"
        )
        return pb.IncidentDetail(
            incident_json=to_json(incident()), decisions_json=[to_json(decision)], events_json=[to_json(event())],
            notifications=[f"webhook ops: {HOSTILE}"], health="confirmed",
            health_history=[f"2027-01-15T08:00:00.000Z {HOSTILE}"], may_answer=self.may_answer,
            silence=self.silence, handling=self._handling(), audit_json=[to_json(line) for line in self.notes],
        )  # fmt: skip

    def GetPolicy(self, request: Any, context: grpc.ServicerContext) -> pb.PolicyState:
        self._called("policy", context)
        rule = {
            "action": "drain", "name": HOSTILE, "mode": "approve", "kind": ["xid"], "cause": [], "xid": [79],
            "scope": ["gpu"], "severity": [], "pool": [], "sku": [], "min_confidence": 0.5,
        }  # fmt: skip
        held = Decision("d2", "i2", NOW_MS, "n1", W.DRAIN, "approve", "held", "fatal", f"2 of 2 nodes {HOSTILE}")
        duty = NodeOutage("n2", Health.DRAINED, NOW_MS, "i1", HOSTILE)
        override = {"pool": ["lab"], "sku": [], "mode": "observe", "at_most": "probe"}
        guard = {"fleet_ratio": 0.1, "per_hour": 10, "quiet_s": 0.0, "cooldown_s": 600.0, "fleet_nodes": 0}
        return pb.PolicyState(
            name="ours", mode="approve", ceiling=self.ceiling, may_answer=self.may_answer, out=["n2"], taken_in_hour=1,
            policy_json=json.dumps({"guard": guard, "rules": [rule], "overrides": [override]}),
            breaker_json=[to_json(incident())], held_json=[to_json(held)], duties_json=[to_json(duty)],
            pending_json=[to_json(self.decision)] if self.decision else [], trouble="ours.toml:3: guard.x: unknown key",
        )  # fmt: skip

    def BacktestPolicies(self, request: Any, context: grpc.ServicerContext) -> pb.BacktestReply:
        self._called("backtest", context)
        rows = [
            pb.BacktestRow(policy="ours", in_force=True, wanted={"advise": 3}),
            pb.BacktestRow(
                policy=HOSTILE, wanted={"drain": 1_200}, nodes=["n1", "n2", "n3", "n4", "n5"], nodes_out=50, times=60,
                most_out=7, gpu_hours=1234.5, held=4, mass_events=1,
            ),
        ]  # fmt: skip
        return pb.BacktestReply(policies=rows, incidents=1_000, total=1_203, since_ms=NOW_MS)

    def ApproveDecision(self, request: pb.Answer, context: grpc.ServicerContext) -> pb.Answered:
        self.answers.append(("approve", request.decision, request.who, request.why))
        return pb.Answered()

    def RejectDecision(self, request: pb.Answer, context: grpc.ServicerContext) -> pb.Answered:
        self.answers.append(("reject", request.decision, request.who, request.why))
        return pb.Answered()

    def GetSystem(self, request: Any, context: grpc.ServicerContext) -> pb.System:
        self._called("system", context)
        silent = pb.AgentTrouble(node="n1", kind="silent", text=HOSTILE, since_ms=NOW_MS)
        newer = pb.AgentTrouble(node="n2", kind="a kind of a newer collector", text="x")
        return pb.System(
            version="1", ts_ms=NOW_MS, started_ms=NOW_MS - 1000, troubles=[HOSTILE],
            agents=pb.AgentsState(expected=2, reporting=1, troubles=[silent, newer], trouble_counts={"silent": 1}),
            notifiers=[pb.NotifierState(name="ops", kind="webhook", pending=3, oldest_s=90, trouble=HOSTILE)],
        )  # fmt: skip

    def GetCapacity(self, request: pb.CapacityRequest, context: grpc.ServicerContext) -> pb.Capacity:
        self._called("capacity", context)
        xid = pb.LostHours(kind="xid", cause="xid_79", incidents=1, lost=3, waited=1, worst="i1")
        out = pb.LostHours(kind="service", cause="out_of_service", incidents=1, lost=2, worst="i1")
        pool = pb.PoolCapacity(pool=HOSTILE, nodes=2, gpus=4, held=3, unknown=1, gpu_hours_lost=3)
        leaf = pb.LeafCapacity(leaf="leaf1", nodes=2, gpus=4, free=1, scattered=1)
        service = pb.ServiceSpeed(service=HOSTILE, servers=1, nodes=["n1"], tokens_per_s=10)
        return pb.Capacity(
            from_ms=request.from_ms, to_ms=NOW_MS, pools=[pool], leafs=[leaf], lost=[xid, out], services=[service],
            idle=[pb.IdleHolder(job=HOSTILE, gpus=2, idle=1, since_ms=NOW_MS, gpu_hours=0.5)], idle_after_s=1800,
            currency=self.currency,
        )  # fmt: skip

    def GetLedger(self, request: pb.LedgerRequest, context: grpc.ServicerContext) -> pb.Ledger:
        self._called("ledger", context)
        self.ledgers.append(request)
        return self.ledger

    def ListRisk(self, request: pb.RiskRequest, context: grpc.ServicerContext) -> pb.RiskList:
        self._called("risk", context)
        rows = [pb.RiskRow(node="n2", chance=0.3, reasons=[HOSTILE]), pb.RiskRow(node="n1", chance=0.02)]
        measured = pb.RiskMeasured(trace="a trace", servers=400, captured=0.25, top_share=0.05, failed_before=0.7)
        return pb.RiskList(nodes=rows, total=2, days=7, measured=measured if self.measured else None)

    def PreviewAct(self, request: pb.ActRequest, context: grpc.ServicerContext) -> pb.ActPreview:
        return self.preview

    def ActOnNode(self, request: pb.ActRequest, context: grpc.ServicerContext) -> pb.ActReply:
        self._called("act", context)
        self.save_s = request.save_s
        gpu = f" GPU {request.gpu} {request.gpu_uuid}" if request.HasField("gpu") else ""
        self.acts.append((request.act, request.node + gpu, request.why, request.who, request.force))
        return pb.ActReply(state="done", detail="no new jobs")

    def AdoptNode(self, request: pb.AdoptRequest, context: grpc.ServicerContext) -> pb.AdoptReply:
        self.acts.append(("adopt", f"{request.node} {request.rack}", request.why, request.who, request.forget))
        return pb.AdoptReply(detail=f"{request.node} is adopted with 8 GPUs")

    def RequestProbe(self, request: pb.ProbeAsk, context: grpc.ServicerContext) -> pb.ProbeAsked:
        self.acts.append(("probe", request.node, request.why, request.who, False))
        return pb.ProbeAsked(id="o1")

    def CreateSilence(self, request: pb.SilenceAsk, context: grpc.ServicerContext) -> pb.SilenceReply:
        self.acts.append(
            (
                "silence",
                (*request.incident, *request.node, *request.rack)[0],
                request.why,
                request.who,
                request.hours == 4,
            )
        )
        self.silence = note(request.who, request.why)
        return pb.SilenceReply()

    def ListSilences(self, request: Any, context: grpc.ServicerContext) -> pb.SilenceList:
        self._called("silences", context)
        return pb.SilenceList(silences_json=[to_json(s) for s in self.silences], may_change=True, max_hours=168)

    def EndSilence(self, request: pb.SilenceEnd, context: grpc.ServicerContext) -> pb.SilenceReply:
        self.acts.append(("end", request.id, request.why, request.who, False))
        self.silence, self.silences = None, []
        return pb.SilenceReply()

    def NoteIncident(self, request: pb.IncidentNoteAsk, context: grpc.ServicerContext) -> pb.IncidentNoteReply:
        if self.refuses == request.act:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "the store is full")
        self.acts.append((request.act, request.value, request.text, request.who, False))
        line = Audit(f"a{len(self.notes)}", NOW_MS + len(self.notes), request.who, request.act, "i1", request.text,
                     state=request.value)  # fmt: skip
        self.notes.append(line)
        return pb.IncidentNoteReply(audit_json=to_json(line))

    def _handling(self) -> pb.IncidentHandling | None:
        known = handling_of(self.notes)
        return pb.IncidentHandling(
            acknowledged_by=known.acknowledged_by, acknowledged_ms=known.acknowledged_ms, assignee=known.assignee,
            tickets=known.tickets, outcome=known.outcome, outcome_by=known.outcome_by,
        ) if self.notes else None  # fmt: skip

    def ListSimilar(self, request: pb.SimilarRequest, context: grpc.ServicerContext) -> pb.SimilarList:
        self._called("similar", context)
        again = pb.SimilarIncident(
            id="i0", same="gpu", kind="xid", cause="gpu_lost", node="n2", gpu=1, since_ms=NOW_MS - 9_000_000,
            closed_ms=NOW_MS - 8_000_000, done=[f"reset: done {HOSTILE}"], outcome="fault", again_ms=NOW_MS,
        )  # fmt: skip
        return pb.SimilarList(incidents=[again], total=3, since_ms=NOW_MS - 90 * 86_400_000)

    def ListAudit(self, request: pb.AuditRequest, context: grpc.ServicerContext) -> pb.AuditList:
        self._called(f"audit {request.whole} {request.subject}", context)
        lines = [
            Audit("a1", NOW_MS, HOSTILE, "drain", "n2", HOSTILE, HOSTILE),
            Audit("a2", NOW_MS, "bo", "comment", "0123456789abcdef", f"board came {HOSTILE}"),
        ]  # fmt: skip
        return pb.AuditList(audit_json=[to_json(line) for line in lines])

    def QuerySeries(self, request: pb.SeriesRequest, context: grpc.ServicerContext) -> pb.SeriesReply:
        self._called("series", context)
        self.series.append(request)
        times = np.array([request.from_ms, request.to_ms], "<i8")
        reply = pb.SeriesReply(step_ms=1000, ts_ms=times.tobytes())
        for target in request.targets:
            for metric in request.metrics:
                values = np.array([np.nan, np.nan] if metric == "power_w" else [1, 2], "<f4").tobytes()
                reply.series.add(node=target.node, gpu=target.gpu, metric=metric, role="value", values=values)
        return reply


def incident() -> Incident:
    evidence = (Evidence(HOSTILE, "power_w", None), Evidence("slow", "sm_clock_mhz", 1500, 1700, 5, 3))
    return Incident(
        "i1", IncidentKind.XID, "gpu_lost", "gpu", "n2", 1, (("n2", 1),), NOW_MS, NOW_MS - 60_000, None, S.CRITICAL,
        0.99, W.DRAIN, f"n2 GPU 1 is lost {HOSTILE}", f"Drain n2. {HOSTILE}", evidence, (Note(NOW_MS, HOSTILE),),
        ("xid",),
    )  # fmt: skip


def note(by: str = "alex", why: str = HOSTILE) -> pb.SilenceNote:
    return pb.SilenceNote(
        id="s1", by=by, until_ms=NOW_MS + 4 * 3_600_000, why=why, covers="incident i1", alone=True
    )  # fmt: skip


def event() -> Event:
    return Event("n2/1/1", NOW_MS, "n2", 1, EventKind.XID, "79", HOSTILE, "kmsg", forgeable=True)


@pytest.fixture(scope="session", autouse=True)
def no_scan() -> Iterator[None]:
    """Each AppTest would read the metadata of every installed package, in search of components that others ship."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("streamlit.components.v2.manifest_scanner.scan_component_manifests", list)
        patch.setattr("streamlit.page_link", lambda *_, **__: None)  # a page alone knows no other to lead to
        yield


@pytest.fixture(autouse=True)
def own_main() -> Iterator[None]:
    """An AppTest leaves its page as `__main__`, and a later test that starts a process would run that page in it."""
    main = sys.modules["__main__"]
    yield
    sys.modules["__main__"] = main


@pytest.fixture
def chosen() -> Chosen:
    return Chosen()


@pytest.fixture
def served(chosen: Chosen) -> Iterator[str]:
    """Address of the server."""
    server = grpc.server(futures.ThreadPoolExecutor(4), options=[("grpc.so_reuseport", 0)])
    add_FleetServicer_to_server(chosen, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    chosen.hang.set()
    server.stop(None).wait()


@pytest.fixture
def shared(served: str) -> Iterator[FleetClient]:
    """The process' client, as pages find it."""
    made = FleetClient(served)
    client.share(made)
    yield made
    made.close()

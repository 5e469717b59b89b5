"""The methods of the Fleet service: who may call each, what it does, and how long a caller waits.

The collector's servicer and authorization, the clients of console and command line, and docs/reference/fleet-api.md
are made from this table. A method without roles cannot be written: `roles` has no default, and the table is compared
with fleet.proto on import.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import grpc
from google.protobuf.message import Message

from drover_proto import fleet_pb2 as pb

Q = TypeVar("Q", bound=Message)
R = TypeVar("R", bound=Message)

SERVICE = "drover.fleet.v1.Fleet"
READERS = frozenset({"viewer", "operator", "admin"})
OPERATORS = frozenset({"operator", "admin"})

ANSWER_S = 30.0
ACT_S = 25.0  # of a person's question: detection goes first


@dataclass(frozen=True, slots=True)
class FleetMethod(Generic[Q, R]):
    """One method.

    Attributes:
        name: as in fleet.proto.
        roles: of certificates whose holders may call it.
        summary: what it does, for the reference page.
        limit_s: the collector ends the call after this, or at the caller's deadline; inf: it runs to its end.
        page_s: how long a page of the console waits for it.
        fresh_s: a page may show an answer this old without asking again.
    """

    name: str
    request: type[Q]
    reply: type[R]
    roles: frozenset[str]
    summary: str
    limit_s: float = ANSWER_S
    page_s: float = 4.0
    fresh_s: float = 1.0

    @property
    def path(self) -> str:
        return f"/{SERVICE}/{self.name}"

    @property
    def acts(self) -> bool:
        """Return True if the method changes something."""
        return self.roles == OPERATORS

    def of(self, channel: grpc.Channel) -> grpc.UnaryUnaryMultiCallable[Q, R]:
        """Return the method as a blocking call over `channel`."""
        return channel.unary_unary(
            self.path, request_serializer=self.request.SerializeToString, response_deserializer=self.reply.FromString
        )

    def stream_of(self, channel: grpc.Channel) -> grpc.UnaryStreamMultiCallable[Q, R]:
        """Return a method that streams its replies as a call over `channel`."""
        return channel.unary_stream(
            self.path, request_serializer=self.request.SerializeToString, response_deserializer=self.reply.FromString
        )


def _act(name: str, request: type[Q], reply: type[R], summary: str) -> FleetMethod[Q, R]:
    return FleetMethod(name, request, reply, OPERATORS, summary, page_s=ACT_S)


GET_STATUS = FleetMethod(
    "GetStatus", pb.StatusRequest, pb.Status, READERS, "The fleet and the collector in figures, and what is wrong."
)
GET_LAYOUT = FleetMethod(
    "GetLayout", pb.LayoutRequest, pb.Layout, READERS, "Racks, nodes and GPUs, in the picture's order.",
    fresh_s=10.0,  # it changes when the collector restarts, which a picture's layout version shows
)  # fmt: skip
GET_PICTURE = FleetMethod(
    "GetPicture", pb.PictureRequest, pb.Picture, READERS, "One cell for each GPU: its health, or a metric's value."
)
LIST_NODES = FleetMethod("ListNodes", pb.ListNodesRequest, pb.NodeList, READERS, "Nodes, the worst first.")
GET_NODE = FleetMethod(
    "GetNode", pb.NodeRequest, pb.NodeDetail, READERS, "One node: its GPUs, ports, values, inventory and incidents."
)
LIST_INCIDENTS = FleetMethod(
    "ListIncidents", pb.ListIncidentsRequest, pb.IncidentList, READERS, "Incidents, open or of a time."
)
GET_INCIDENT = FleetMethod(
    "GetIncident", pb.IncidentRequest, pb.IncidentDetail, READERS, "One incident with its evidence and decisions."
)
QUERY_SERIES = FleetMethod(
    "QuerySeries", pb.SeriesRequest, pb.SeriesReply, READERS, "Values of metrics over a time.",
    page_s=15.0,  # a day of a node is read from disk
)  # fmt: skip
LIST_EVENTS = FleetMethod("ListEvents", pb.EventsRequest, pb.EventList, READERS, "Events of a time, as stored.")
LIST_RISK = FleetMethod("ListRisk", pb.RiskRequest, pb.RiskList, READERS, "Nodes by their chance of failing soon.")
EXPORT = FleetMethod(
    "Export", pb.ExportRequest, pb.ExportChunk, READERS, "Everything stored of a time, as a stream.", limit_s=3600.0
)
BACKUP = FleetMethod(
    "Backup", pb.BackupRequest, pb.BackupReply, OPERATORS, "A backup of the store on the collector's machine.",
    limit_s=math.inf,
)  # fmt: skip
LIST_PROBES = FleetMethod(
    "ListProbes", pb.ProbesRequest, pb.ProbeList, READERS, "The newest probe results and how they were judged.",
    page_s=15.0,
)  # fmt: skip
PROBE_HISTORY = FleetMethod(
    "ProbeHistory", pb.ProbeHistoryRequest, pb.ProbeHistoryReply, READERS, "One figure of probes over time."
)
LIST_PROBE_ORDERS = FleetMethod(
    "ListProbeOrders", pb.ProbeOrdersRequest, pb.ProbeOrderList, READERS, "Probes that were ordered, and their states."
)
REQUEST_PROBE = _act("RequestProbe", pb.ProbeAsk, pb.ProbeAsked, "Order probes of a node.")
ACT_ON_NODE = _act("ActOnNode", pb.ActRequest, pb.ActReply, "Drain, isolate, reset, reboot or resume a node.")
LIST_ACTIONS = FleetMethod("ListActions", pb.ActionsRequest, pb.ActionList, READERS, "Actions, oldest first.")
LIST_DECISIONS = FleetMethod(
    "ListDecisions", pb.DecisionsRequest, pb.DecisionList, READERS, "Decisions and their outcomes."
)
APPROVE_DECISION = _act("ApproveDecision", pb.Answer, pb.Answered, "Approve a decision that waits for a person.")
REJECT_DECISION = _act("RejectDecision", pb.Answer, pb.Answered, "Reject a decision that waits for a person.")
LIST_AUDIT = FleetMethod("ListAudit", pb.AuditRequest, pb.AuditList, READERS, "What people and Drover did.")
GET_POLICY = FleetMethod(
    "GetPolicy", pb.PolicyRequest, pb.PolicyState, READERS, "The policy in force, and what it holds back."
)
LIST_JOBS = FleetMethod("ListJobs", pb.ListJobsRequest, pb.JobList, READERS, "Jobs, those that incidents hurt first.")
GET_JOB = FleetMethod("GetJob", pb.JobRequest, pb.JobDetail, READERS, "One job: its GPUs, their values, its incidents.")
GET_FABRIC = FleetMethod("GetFabric", pb.FabricRequest, pb.Fabric, READERS, "Leaf switches and ports of the network.")
GET_THERMALS = FleetMethod("GetThermals", pb.ThermalsRequest, pb.Thermals, READERS, "Temperatures by rack and slot.")
GET_SYSTEM = FleetMethod(
    "GetSystem", pb.SystemRequest, pb.System, READERS, "Drover itself: agents, ingest, detection, store, receivers."
)
GET_CAPACITY = FleetMethod(
    "GetCapacity", pb.CapacityRequest, pb.Capacity, READERS, "How GPU time was used, and what faults cost.",
    page_s=15.0,
)  # fmt: skip
GET_LEDGER = FleetMethod(
    "GetLedger", pb.LedgerRequest, pb.Ledger, READERS, "What every held GPU-hour was used for, and availability.",
    limit_s=600.0, page_s=60.0, fresh_s=60.0,  # a week of 100,000 GPUs is 200 million rollups
)  # fmt: skip
PREVIEW_ACT = FleetMethod(
    "PreviewAct",
    pb.ActRequest,
    pb.ActPreview,
    READERS,
    "What an action meets and what is against it; changes nothing.",
)
LIST_SILENCES = FleetMethod(
    "ListSilences", pb.SilencesRequest, pb.SilenceList, READERS, "Silences, and open maintenance windows."
)
CREATE_SILENCE = _act("CreateSilence", pb.SilenceAsk, pb.SilenceReply, "Hold notifications back for a time.")
END_SILENCE = _act("EndSilence", pb.SilenceEnd, pb.SilenceReply, "End a silence or a maintenance window.")
REPORT_MAINTENANCE = _act(
    "ReportMaintenance", pb.MaintenanceReport, pb.SilenceReply, "Report planned work on nodes, change it or end it."
)
BACKTEST_POLICIES = FleetMethod(
    "BacktestPolicies", pb.BacktestRequest, pb.BacktestReply, READERS,
    "The last 7 days decided again, by the policy in force and each preset; changes nothing.", page_s=ACT_S,
)  # fmt: skip
ADOPT_NODE = _act("AdoptNode", pb.AdoptRequest, pb.AdoptReply, "Take a node that reports into the fleet.")
LIST_REPORTING = FleetMethod(
    "ListReporting", pb.ReportingRequest, pb.ReportingList, READERS,
    "What the fleet file says of each node, and what its agent reports; also nodes that are not in the file.",
)  # fmt: skip
NOTE_INCIDENT = _act(
    "NoteIncident", pb.IncidentNoteAsk, pb.IncidentNoteReply,
    "Acknowledge an incident, assign it, comment on it, link a ticket, say what it was.",
)  # fmt: skip
LIST_SIMILAR = FleetMethod(
    "ListSimilar", pb.SimilarRequest, pb.SimilarList, READERS,
    "Earlier incidents like this one, what was done for them, and whether it came back.", fresh_s=60.0,
)  # fmt: skip

SEARCH = FleetMethod(
    "Search", pb.SearchRequest, pb.SearchReply, READERS,
    "Nodes, GPUs (by UUID or serial number), jobs, incidents, XIDs, racks and leaf switches that a text names.",
    fresh_s=2.0,
)  # fmt: skip

GET_PLAYBACK = FleetMethod(
    "GetPlayback", pb.PlaybackRequest, pb.Playback, READERS,
    "How the fleet looked at moments of the past: each GPU's health, or a metric.", page_s=15.0, fresh_s=60.0,
)  # fmt: skip
LIST_CHANGES = FleetMethod(
    "ListChanges", pb.ChangesRequest, pb.ChangeList, READERS,
    "Starts and upgrades of agents and collectors, changes of the policy, and maintenance windows of a time.",
    fresh_s=10.0,
)  # fmt: skip
GET_TREND = FleetMethod(
    "GetTrend", pb.TrendRequest, pb.Trend, READERS,
    "Utilisation, power, GPU-hours lost and goodput of each of the last days.", page_s=30.0, fresh_s=60.0,
)  # fmt: skip

METHODS: Mapping[str, FleetMethod[Any, Any]] = {
    each.name: each for each in list(globals().values()) if isinstance(each, FleetMethod)
}


def _compare_with_proto() -> None:
    """
    Raises:
        TypeError: fleet.proto and the table differ.
    """
    found = {name: (method.request.DESCRIPTOR, method.reply.DESCRIPTOR) for name, method in METHODS.items()}
    service = pb.DESCRIPTOR.services_by_name["Fleet"]
    asked = {method.name: (method.input_type, method.output_type) for method in service.methods}
    if service.full_name != SERVICE or found != asked:
        names = sorted(name for name in found.keys() | asked.keys() if found.get(name) != asked.get(name))
        raise TypeError(f"fleet.proto and fleet_methods.py differ in {', '.join(names) or service.full_name}")


_compare_with_proto()

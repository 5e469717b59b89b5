"""The operations of REST. Made by client/generate.py: change nothing here."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from datetime import datetime
from typing import cast
from urllib.parse import quote

from drover_client import models
from drover_client.transport import AsyncTransport, Transport

SCHEMA_VERSION = "1.0.0"


class Drover(Transport):
    """Drover's REST for blocking calls."""

    def list_actions(
        self,
        *,
        node: str | None = None,
        incident: str | None = None,
        limit: int | None = None,
        cursor: str | None = None,
    ) -> models.ActionList:
        """Actions, oldest first."""
        return cast(
            "models.ActionList",
            self._get("/api/v1/actions", {"node": node, "incident": incident, "limit": limit, "cursor": cursor}),
        )

    def iterate_actions(self, *, node: str | None = None, incident: str | None = None) -> Iterator[models.ActionLine]:
        """Actions, oldest first. All pages, an item at a time."""
        for item in self._pages("/api/v1/actions", {"node": node, "incident": incident, "limit": 1000}, "actions"):
            yield cast("models.ActionLine", item)

    def list_annotations(
        self,
        *,
        min_severity: str | None = None,
        node: str | None = None,
        kind: str | None = None,
        from_: datetime | str | None = None,
        to: datetime | str | None = None,
    ) -> list[models.Annotation]:
        """Incidents that were open in a time, as annotations of Grafana."""
        return cast(
            "list[models.Annotation]",
            self._get(
                "/api/v1/annotations",
                {"min_severity": min_severity, "node": node, "kind": kind, "from": from_, "to": to},
            ),
        )

    def list_audit(
        self,
        *,
        since: datetime | str | None = None,
        subject: str | None = None,
        whole: bool | None = None,
        limit: int | None = None,
        cursor: str | None = None,
    ) -> models.AuditList:
        """What people and Drover did."""
        return cast(
            "models.AuditList",
            self._get(
                "/api/v1/audit", {"since": since, "subject": subject, "whole": whole, "limit": limit, "cursor": cursor}
            ),
        )

    def iterate_audit(
        self, *, since: datetime | str | None = None, subject: str | None = None, whole: bool | None = None
    ) -> Iterator[models.Audit]:
        """What people and Drover did. All pages, an item at a time."""
        for item in self._pages(
            "/api/v1/audit", {"since": since, "subject": subject, "whole": whole, "limit": 1000}, "audit"
        ):
            yield cast("models.Audit", item)

    def get_capacity(self, *, from_: datetime | str | None = None, to: datetime | str | None = None) -> models.Capacity:
        """How GPU time was used, and what faults cost."""
        return cast("models.Capacity", self._get("/api/v1/capacity", {"from": from_, "to": to}))

    def list_changes(
        self,
        *,
        from_: datetime | str | None = None,
        to: datetime | str | None = None,
        nodes: Sequence[str] | None = None,
        limit: int | None = None,
    ) -> models.ChangeList:
        """Starts and upgrades of agents and collectors, changes of the policy, and maintenance windows of a time."""
        return cast(
            "models.ChangeList", self._get("/api/v1/changes", {"from": from_, "to": to, "nodes": nodes, "limit": limit})
        )

    def list_decisions(
        self,
        *,
        outcome: str | None = None,
        since: datetime | str | None = None,
        limit: int | None = None,
        cursor: str | None = None,
    ) -> models.DecisionList:
        """Decisions and their outcomes."""
        return cast(
            "models.DecisionList",
            self._get("/api/v1/decisions", {"outcome": outcome, "since": since, "limit": limit, "cursor": cursor}),
        )

    def iterate_decisions(
        self, *, outcome: str | None = None, since: datetime | str | None = None
    ) -> Iterator[models.Decision]:
        """Decisions and their outcomes. All pages, an item at a time."""
        for item in self._pages("/api/v1/decisions", {"outcome": outcome, "since": since, "limit": 1000}, "decisions"):
            yield cast("models.Decision", item)

    def approve_decision(
        self, decision: str, *, why: str, who: str | None = None, idempotency_key: str | None = None
    ) -> models.Answered:
        """Approve a decision that waits for a person."""
        return cast(
            "models.Answered",
            self._post(
                f"/api/v1/decisions/{quote(decision, safe='')}/approve", {"why": why, "who": who}, idempotency_key
            ),
        )

    def reject_decision(
        self, decision: str, *, why: str, who: str | None = None, idempotency_key: str | None = None
    ) -> models.Answered:
        """Reject a decision that waits for a person."""
        return cast(
            "models.Answered",
            self._post(
                f"/api/v1/decisions/{quote(decision, safe='')}/reject", {"why": why, "who": who}, idempotency_key
            ),
        )

    def list_events(
        self,
        *,
        node: str | None = None,
        gpu: int | None = None,
        from_: datetime | str | None = None,
        to: datetime | str | None = None,
        limit: int | None = None,
        cursor: str | None = None,
    ) -> models.EventList:
        """Events of a time, as stored."""
        return cast(
            "models.EventList",
            self._get(
                "/api/v1/events", {"node": node, "gpu": gpu, "from": from_, "to": to, "limit": limit, "cursor": cursor}
            ),
        )

    def iterate_events(
        self,
        *,
        node: str | None = None,
        gpu: int | None = None,
        from_: datetime | str | None = None,
        to: datetime | str | None = None,
    ) -> Iterator[models.Event]:
        """Events of a time, as stored. All pages, an item at a time."""
        for item in self._pages(
            "/api/v1/events", {"node": node, "gpu": gpu, "from": from_, "to": to, "limit": 1000}, "events"
        ):
            yield cast("models.Event", item)

    def get_fabric(
        self,
        *,
        leaf: str | None = None,
        node: str | None = None,
        at: datetime | str | None = None,
        limit: int | None = None,
        cursor: str | None = None,
    ) -> models.Fabric:
        """Leaf switches and ports of the network."""
        return cast(
            "models.Fabric",
            self._get("/api/v1/fabric", {"leaf": leaf, "node": node, "at": at, "limit": limit, "cursor": cursor}),
        )

    def list_incidents(
        self,
        *,
        state: str | None = None,
        since: datetime | str | None = None,
        node: str | None = None,
        min_severity: str | None = None,
        silenced: str | None = None,
        kind: str | None = None,
        job: str | None = None,
        rack: str | None = None,
        text: str | None = None,
        acknowledged: str | None = None,
        assignee: str | None = None,
        sort: str | None = None,
        at: datetime | str | None = None,
        limit: int | None = None,
        cursor: str | None = None,
    ) -> models.IncidentList:
        """Incidents, open or of a time."""
        return cast(
            "models.IncidentList",
            self._get(
                "/api/v1/incidents",
                {
                    "state": state,
                    "since": since,
                    "node": node,
                    "min_severity": min_severity,
                    "silenced": silenced,
                    "kind": kind,
                    "job": job,
                    "rack": rack,
                    "text": text,
                    "acknowledged": acknowledged,
                    "assignee": assignee,
                    "sort": sort,
                    "at": at,
                    "limit": limit,
                    "cursor": cursor,
                },
            ),
        )

    def iterate_incidents(
        self,
        *,
        state: str | None = None,
        since: datetime | str | None = None,
        node: str | None = None,
        min_severity: str | None = None,
        silenced: str | None = None,
        kind: str | None = None,
        job: str | None = None,
        rack: str | None = None,
        text: str | None = None,
        acknowledged: str | None = None,
        assignee: str | None = None,
        sort: str | None = None,
        at: datetime | str | None = None,
    ) -> Iterator[models.Incident]:
        """Incidents, open or of a time. All pages, an item at a time."""
        for item in self._pages(
            "/api/v1/incidents",
            {
                "state": state,
                "since": since,
                "node": node,
                "min_severity": min_severity,
                "silenced": silenced,
                "kind": kind,
                "job": job,
                "rack": rack,
                "text": text,
                "acknowledged": acknowledged,
                "assignee": assignee,
                "sort": sort,
                "at": at,
                "limit": 1000,
            },
            "incidents",
        ):
            yield cast("models.Incident", item)

    def get_incident(self, id: str, *, at: datetime | str | None = None) -> models.IncidentDetail:
        """One incident with its evidence and decisions."""
        return cast("models.IncidentDetail", self._get(f"/api/v1/incidents/{quote(id, safe='')}", {"at": at}))

    def note_incident(
        self,
        id: str,
        *,
        act: str | None = None,
        text: str | None = None,
        value: str | None = None,
        who: str | None = None,
        idempotency_key: str | None = None,
    ) -> models.IncidentNoteReply:
        """Acknowledge an incident, assign it, comment on it, link a ticket, say what it was."""
        return cast(
            "models.IncidentNoteReply",
            self._post(
                f"/api/v1/incidents/{quote(id, safe='')}/notes",
                {"act": act, "text": text, "value": value, "who": who},
                idempotency_key,
            ),
        )

    def list_similar(self, id: str, *, limit: int | None = None) -> models.SimilarList:
        """Earlier incidents like this one, what was done for them, and whether it came back."""
        return cast(
            "models.SimilarList", self._get(f"/api/v1/incidents/{quote(id, safe='')}/similar", {"limit": limit})
        )

    def list_jobs(
        self,
        *,
        ended: bool | None = None,
        contains: str | None = None,
        at: datetime | str | None = None,
        limit: int | None = None,
        cursor: str | None = None,
    ) -> models.JobList:
        """Jobs, those that incidents hurt first."""
        return cast(
            "models.JobList",
            self._get(
                "/api/v1/jobs", {"ended": ended, "contains": contains, "at": at, "limit": limit, "cursor": cursor}
            ),
        )

    def iterate_jobs(
        self, *, ended: bool | None = None, contains: str | None = None, at: datetime | str | None = None
    ) -> Iterator[models.JobRow]:
        """Jobs, those that incidents hurt first. All pages, an item at a time."""
        for item in self._pages(
            "/api/v1/jobs", {"ended": ended, "contains": contains, "at": at, "limit": 1000}, "jobs"
        ):
            yield cast("models.JobRow", item)

    def get_job(self, job: str, *, loss: bool | None = None, at: datetime | str | None = None) -> models.JobDetail:
        """One job: its GPUs, their values, its incidents."""
        return cast("models.JobDetail", self._get(f"/api/v1/jobs/{quote(job, safe='')}", {"loss": loss, "at": at}))

    def get_layout(self, *, jobs: bool | None = None) -> models.Layout:
        """Racks, nodes and GPUs, in the picture's order."""
        return cast("models.Layout", self._get("/api/v1/layout", {"jobs": jobs}))

    def get_ledger(
        self,
        *,
        from_: datetime | str | None = None,
        to: datetime | str | None = None,
        job: str | None = None,
        limit: int | None = None,
    ) -> models.Ledger:
        """What every held GPU-hour was used for, and availability."""
        return cast("models.Ledger", self._get("/api/v1/ledger", {"from": from_, "to": to, "job": job, "limit": limit}))

    def report_maintenance(
        self,
        *,
        why: str,
        source: str,
        id: str,
        node: Sequence[str] | None = None,
        from_: datetime | str | None = None,
        until: datetime | str | None = None,
        over: bool | None = None,
        who: str | None = None,
        idempotency_key: str | None = None,
    ) -> models.SilenceReply:
        """Report planned work on nodes, change it or end it."""
        return cast(
            "models.SilenceReply",
            self._post(
                "/api/v1/maintenance",
                {
                    "node": node,
                    "from": from_,
                    "until": until,
                    "why": why,
                    "source": source,
                    "id": id,
                    "over": over,
                    "who": who,
                },
                idempotency_key,
            ),
        )

    def list_nodes(
        self,
        *,
        health: str | None = None,
        contains: str | None = None,
        order: str | None = None,
        limit: int | None = None,
        cursor: str | None = None,
    ) -> models.NodeList:
        """Nodes, the worst first."""
        return cast(
            "models.NodeList",
            self._get(
                "/api/v1/nodes",
                {"health": health, "contains": contains, "order": order, "limit": limit, "cursor": cursor},
            ),
        )

    def iterate_nodes(
        self, *, health: str | None = None, contains: str | None = None, order: str | None = None
    ) -> Iterator[models.NodeRow]:
        """Nodes, the worst first. All pages, an item at a time."""
        for item in self._pages(
            "/api/v1/nodes", {"health": health, "contains": contains, "order": order, "limit": 1000}, "nodes"
        ):
            yield cast("models.NodeRow", item)

    def get_node(
        self,
        node: str,
        *,
        health_from: datetime | str | None = None,
        health_to: datetime | str | None = None,
        at: datetime | str | None = None,
    ) -> models.NodeDetail:
        """One node: its GPUs, ports, values, inventory and incidents."""
        return cast(
            "models.NodeDetail",
            self._get(
                f"/api/v1/nodes/{quote(node, safe='')}", {"health_from": health_from, "health_to": health_to, "at": at}
            ),
        )

    def act_on_node(
        self,
        node: str,
        *,
        act: str,
        why: str,
        force: bool | None = None,
        who: str | None = None,
        gpu: int | None = None,
        gpu_uuid: str | None = None,
        save_s: float | None = None,
        idempotency_key: str | None = None,
    ) -> models.ActReply:
        """Drain, isolate, reset, reboot or resume a node."""
        return cast(
            "models.ActReply",
            self._post(
                f"/api/v1/nodes/{quote(node, safe='')}/actions",
                {
                    "act": act,
                    "why": why,
                    "force": force,
                    "who": who,
                    "gpu": gpu,
                    "gpu_uuid": gpu_uuid,
                    "save_s": save_s,
                },
                idempotency_key,
            ),
        )

    def preview_act(
        self,
        node: str,
        *,
        act: str,
        why: str | None = None,
        force: bool | None = None,
        who: str | None = None,
        gpu: int | None = None,
        gpu_uuid: str | None = None,
        save_s: float | None = None,
    ) -> models.ActPreview:
        """What an action meets and what is against it; changes nothing."""
        return cast(
            "models.ActPreview",
            self._get(
                f"/api/v1/nodes/{quote(node, safe='')}/actions/preview",
                {
                    "act": act,
                    "why": why,
                    "force": force,
                    "who": who,
                    "gpu": gpu,
                    "gpu_uuid": gpu_uuid,
                    "save_s": save_s,
                },
            ),
        )

    def adopt_node(
        self,
        node: str,
        *,
        why: str,
        rack: str | None = None,
        leaf: str | None = None,
        pool: str | None = None,
        sku: str | None = None,
        gpus: int | None = None,
        who: str | None = None,
        forget: bool | None = None,
        idempotency_key: str | None = None,
    ) -> models.AdoptReply:
        """Take a node that reports into the fleet."""
        return cast(
            "models.AdoptReply",
            self._post(
                f"/api/v1/nodes/{quote(node, safe='')}/adoption",
                {
                    "rack": rack,
                    "leaf": leaf,
                    "pool": pool,
                    "sku": sku,
                    "gpus": gpus,
                    "why": why,
                    "who": who,
                    "forget": forget,
                },
                idempotency_key,
            ),
        )

    def get_picture(self, *, color_by: str | None = None) -> models.Picture:
        """One cell for each GPU: its health, or a metric's value."""
        return cast("models.Picture", self._get("/api/v1/picture", {"color_by": color_by}))

    def get_policy(self) -> models.PolicyState:
        """The policy in force, and what it holds back."""
        return cast("models.PolicyState", self._get("/api/v1/policy", {}))

    def backtest_policies(self) -> models.BacktestReply:
        """The last 7 days decided again, by the policy in force and each preset; changes nothing."""
        return cast("models.BacktestReply", self._get("/api/v1/policy/backtest", {}))

    def list_probes(self, *, figure: str | None = None, node: str | None = None) -> models.ProbeList:
        """The newest probe results and how they were judged."""
        return cast("models.ProbeList", self._get("/api/v1/probes", {"figure": figure, "node": node}))

    def probe_history(
        self, *, node: str, figure: str, gpu: int | None = None, peer: int | None = None, limit: int | None = None
    ) -> models.ProbeHistoryReply:
        """One figure of probes over time."""
        return cast(
            "models.ProbeHistoryReply",
            self._get(
                "/api/v1/probes/history", {"node": node, "gpu": gpu, "peer": peer, "figure": figure, "limit": limit}
            ),
        )

    def list_probe_orders(
        self,
        *,
        node: str | None = None,
        id: str | None = None,
        since: datetime | str | None = None,
        limit: int | None = None,
        cursor: str | None = None,
    ) -> models.ProbeOrderList:
        """Probes that were ordered, and their states."""
        return cast(
            "models.ProbeOrderList",
            self._get(
                "/api/v1/probes/orders", {"node": node, "id": id, "since": since, "limit": limit, "cursor": cursor}
            ),
        )

    def iterate_probe_orders(
        self, *, node: str | None = None, id: str | None = None, since: datetime | str | None = None
    ) -> Iterator[models.ProbeOrderRow]:
        """Probes that were ordered, and their states. All pages, an item at a time."""
        for item in self._pages(
            "/api/v1/probes/orders", {"node": node, "id": id, "since": since, "limit": 1000}, "orders"
        ):
            yield cast("models.ProbeOrderRow", item)

    def request_probe(
        self,
        *,
        node: str | None = None,
        gpus: Sequence[int] | None = None,
        level: str | None = None,
        probes: Sequence[str] | None = None,
        why: str | None = None,
        who: str | None = None,
        group: Sequence[str] | None = None,
        fabric: bool | None = None,
        idempotency_key: str | None = None,
    ) -> models.ProbeAsked:
        """Order probes of a node."""
        return cast(
            "models.ProbeAsked",
            self._post(
                "/api/v1/probes/orders",
                {
                    "node": node,
                    "gpus": gpus,
                    "level": level,
                    "probes": probes,
                    "why": why,
                    "who": who,
                    "group": group,
                    "fabric": fabric,
                },
                idempotency_key,
            ),
        )

    def list_reporting(self, *, limit: int | None = None, cursor: str | None = None) -> models.ReportingList:
        """What the fleet file says of each node, and what its agent reports; also nodes that are not in the file."""
        return cast("models.ReportingList", self._get("/api/v1/reporting", {"limit": limit, "cursor": cursor}))

    def iterate_reporting(self) -> Iterator[models.ReportingNode]:
        """What the fleet file says of each node, and what its agent reports; also nodes that are not in the file. All pages, an item at a time."""
        for item in self._pages("/api/v1/reporting", {"limit": 1000}, "nodes"):
            yield cast("models.ReportingNode", item)

    def list_risk(self, *, limit: int | None = None, cursor: str | None = None) -> models.RiskList:
        """Nodes by their chance of failing soon."""
        return cast("models.RiskList", self._get("/api/v1/risk", {"limit": limit, "cursor": cursor}))

    def iterate_risk(self) -> Iterator[models.RiskRow]:
        """Nodes by their chance of failing soon. All pages, an item at a time."""
        for item in self._pages("/api/v1/risk", {"limit": 1000}, "nodes"):
            yield cast("models.RiskRow", item)

    def search(self, *, text: str | None = None, limit: int | None = None) -> models.SearchReply:
        """Nodes, GPUs (by UUID or serial number), jobs, incidents, XIDs, racks and leaf switches that a text names."""
        return cast("models.SearchReply", self._get("/api/v1/search", {"text": text, "limit": limit}))

    def query_series(
        self,
        *,
        scope: str,
        targets: Sequence[str],
        metrics: Sequence[str],
        from_: datetime | str,
        to: datetime | str,
        max_points: int | None = None,
        with_peers: bool | None = None,
    ) -> models.SeriesReply:
        """Values of metrics over a time."""
        return cast(
            "models.SeriesReply",
            self._get(
                "/api/v1/series",
                {
                    "scope": scope,
                    "targets": targets,
                    "metrics": metrics,
                    "from": from_,
                    "to": to,
                    "max_points": max_points,
                    "with_peers": with_peers,
                },
            ),
        )

    def list_silences(
        self, *, since: datetime | str | None = None, limit: int | None = None, cursor: str | None = None
    ) -> models.SilenceList:
        """Silences, and open maintenance windows."""
        return cast(
            "models.SilenceList", self._get("/api/v1/silences", {"since": since, "limit": limit, "cursor": cursor})
        )

    def iterate_silences(self, *, since: datetime | str | None = None) -> Iterator[models.Silence]:
        """Silences, and open maintenance windows. All pages, an item at a time."""
        for item in self._pages("/api/v1/silences", {"since": since, "limit": 1000}, "silences"):
            yield cast("models.Silence", item)

    def create_silence(
        self,
        *,
        hours: float,
        why: str,
        node: Sequence[str] | None = None,
        gpu: Sequence[int] | None = None,
        rack: Sequence[str] | None = None,
        leaf: Sequence[str] | None = None,
        pool: Sequence[str] | None = None,
        kind: Sequence[str] | None = None,
        incident: Sequence[str] | None = None,
        from_: datetime | str | None = None,
        maintenance: bool | None = None,
        who: str | None = None,
        idempotency_key: str | None = None,
    ) -> models.SilenceReply:
        """Hold notifications back for a time."""
        return cast(
            "models.SilenceReply",
            self._post(
                "/api/v1/silences",
                {
                    "node": node,
                    "gpu": gpu,
                    "rack": rack,
                    "leaf": leaf,
                    "pool": pool,
                    "kind": kind,
                    "incident": incident,
                    "from": from_,
                    "hours": hours,
                    "why": why,
                    "maintenance": maintenance,
                    "who": who,
                },
                idempotency_key,
            ),
        )

    def end_silence(
        self, id: str, *, why: str, who: str | None = None, idempotency_key: str | None = None
    ) -> models.SilenceReply:
        """End a silence or a maintenance window."""
        return cast(
            "models.SilenceReply",
            self._post(f"/api/v1/silences/{quote(id, safe='')}/end", {"why": why, "who": who}, idempotency_key),
        )

    def get_status(self) -> models.Status:
        """The fleet and the collector in figures, and what is wrong."""
        return cast("models.Status", self._get("/api/v1/status", {}))

    def get_system(self) -> models.System:
        """Drover itself: agents, ingest, detection, store, receivers."""
        return cast("models.System", self._get("/api/v1/system", {}))

    def get_thermals(self, *, rack: str | None = None, at: datetime | str | None = None) -> models.Thermals:
        """Temperatures by rack and slot."""
        return cast("models.Thermals", self._get("/api/v1/thermals", {"rack": rack, "at": at}))

    def get_trend(self, *, days: int | None = None) -> models.Trend:
        """Utilisation, power, GPU-hours lost and goodput of each of the last days."""
        return cast("models.Trend", self._get("/api/v1/trend", {"days": days}))


class AsyncDrover(AsyncTransport):
    """Drover's REST for asyncio."""

    async def list_actions(
        self,
        *,
        node: str | None = None,
        incident: str | None = None,
        limit: int | None = None,
        cursor: str | None = None,
    ) -> models.ActionList:
        """Actions, oldest first."""
        return cast(
            "models.ActionList",
            await self._get("/api/v1/actions", {"node": node, "incident": incident, "limit": limit, "cursor": cursor}),
        )

    async def iterate_actions(
        self, *, node: str | None = None, incident: str | None = None
    ) -> AsyncIterator[models.ActionLine]:
        """Actions, oldest first. All pages, an item at a time."""
        async for item in self._pages(
            "/api/v1/actions", {"node": node, "incident": incident, "limit": 1000}, "actions"
        ):
            yield cast("models.ActionLine", item)

    async def list_annotations(
        self,
        *,
        min_severity: str | None = None,
        node: str | None = None,
        kind: str | None = None,
        from_: datetime | str | None = None,
        to: datetime | str | None = None,
    ) -> list[models.Annotation]:
        """Incidents that were open in a time, as annotations of Grafana."""
        return cast(
            "list[models.Annotation]",
            await self._get(
                "/api/v1/annotations",
                {"min_severity": min_severity, "node": node, "kind": kind, "from": from_, "to": to},
            ),
        )

    async def list_audit(
        self,
        *,
        since: datetime | str | None = None,
        subject: str | None = None,
        whole: bool | None = None,
        limit: int | None = None,
        cursor: str | None = None,
    ) -> models.AuditList:
        """What people and Drover did."""
        return cast(
            "models.AuditList",
            await self._get(
                "/api/v1/audit", {"since": since, "subject": subject, "whole": whole, "limit": limit, "cursor": cursor}
            ),
        )

    async def iterate_audit(
        self, *, since: datetime | str | None = None, subject: str | None = None, whole: bool | None = None
    ) -> AsyncIterator[models.Audit]:
        """What people and Drover did. All pages, an item at a time."""
        async for item in self._pages(
            "/api/v1/audit", {"since": since, "subject": subject, "whole": whole, "limit": 1000}, "audit"
        ):
            yield cast("models.Audit", item)

    async def get_capacity(
        self, *, from_: datetime | str | None = None, to: datetime | str | None = None
    ) -> models.Capacity:
        """How GPU time was used, and what faults cost."""
        return cast("models.Capacity", await self._get("/api/v1/capacity", {"from": from_, "to": to}))

    async def list_changes(
        self,
        *,
        from_: datetime | str | None = None,
        to: datetime | str | None = None,
        nodes: Sequence[str] | None = None,
        limit: int | None = None,
    ) -> models.ChangeList:
        """Starts and upgrades of agents and collectors, changes of the policy, and maintenance windows of a time."""
        return cast(
            "models.ChangeList",
            await self._get("/api/v1/changes", {"from": from_, "to": to, "nodes": nodes, "limit": limit}),
        )

    async def list_decisions(
        self,
        *,
        outcome: str | None = None,
        since: datetime | str | None = None,
        limit: int | None = None,
        cursor: str | None = None,
    ) -> models.DecisionList:
        """Decisions and their outcomes."""
        return cast(
            "models.DecisionList",
            await self._get(
                "/api/v1/decisions", {"outcome": outcome, "since": since, "limit": limit, "cursor": cursor}
            ),
        )

    async def iterate_decisions(
        self, *, outcome: str | None = None, since: datetime | str | None = None
    ) -> AsyncIterator[models.Decision]:
        """Decisions and their outcomes. All pages, an item at a time."""
        async for item in self._pages(
            "/api/v1/decisions", {"outcome": outcome, "since": since, "limit": 1000}, "decisions"
        ):
            yield cast("models.Decision", item)

    async def approve_decision(
        self, decision: str, *, why: str, who: str | None = None, idempotency_key: str | None = None
    ) -> models.Answered:
        """Approve a decision that waits for a person."""
        return cast(
            "models.Answered",
            await self._post(
                f"/api/v1/decisions/{quote(decision, safe='')}/approve", {"why": why, "who": who}, idempotency_key
            ),
        )

    async def reject_decision(
        self, decision: str, *, why: str, who: str | None = None, idempotency_key: str | None = None
    ) -> models.Answered:
        """Reject a decision that waits for a person."""
        return cast(
            "models.Answered",
            await self._post(
                f"/api/v1/decisions/{quote(decision, safe='')}/reject", {"why": why, "who": who}, idempotency_key
            ),
        )

    async def list_events(
        self,
        *,
        node: str | None = None,
        gpu: int | None = None,
        from_: datetime | str | None = None,
        to: datetime | str | None = None,
        limit: int | None = None,
        cursor: str | None = None,
    ) -> models.EventList:
        """Events of a time, as stored."""
        return cast(
            "models.EventList",
            await self._get(
                "/api/v1/events", {"node": node, "gpu": gpu, "from": from_, "to": to, "limit": limit, "cursor": cursor}
            ),
        )

    async def iterate_events(
        self,
        *,
        node: str | None = None,
        gpu: int | None = None,
        from_: datetime | str | None = None,
        to: datetime | str | None = None,
    ) -> AsyncIterator[models.Event]:
        """Events of a time, as stored. All pages, an item at a time."""
        async for item in self._pages(
            "/api/v1/events", {"node": node, "gpu": gpu, "from": from_, "to": to, "limit": 1000}, "events"
        ):
            yield cast("models.Event", item)

    async def get_fabric(
        self,
        *,
        leaf: str | None = None,
        node: str | None = None,
        at: datetime | str | None = None,
        limit: int | None = None,
        cursor: str | None = None,
    ) -> models.Fabric:
        """Leaf switches and ports of the network."""
        return cast(
            "models.Fabric",
            await self._get("/api/v1/fabric", {"leaf": leaf, "node": node, "at": at, "limit": limit, "cursor": cursor}),
        )

    async def list_incidents(
        self,
        *,
        state: str | None = None,
        since: datetime | str | None = None,
        node: str | None = None,
        min_severity: str | None = None,
        silenced: str | None = None,
        kind: str | None = None,
        job: str | None = None,
        rack: str | None = None,
        text: str | None = None,
        acknowledged: str | None = None,
        assignee: str | None = None,
        sort: str | None = None,
        at: datetime | str | None = None,
        limit: int | None = None,
        cursor: str | None = None,
    ) -> models.IncidentList:
        """Incidents, open or of a time."""
        return cast(
            "models.IncidentList",
            await self._get(
                "/api/v1/incidents",
                {
                    "state": state,
                    "since": since,
                    "node": node,
                    "min_severity": min_severity,
                    "silenced": silenced,
                    "kind": kind,
                    "job": job,
                    "rack": rack,
                    "text": text,
                    "acknowledged": acknowledged,
                    "assignee": assignee,
                    "sort": sort,
                    "at": at,
                    "limit": limit,
                    "cursor": cursor,
                },
            ),
        )

    async def iterate_incidents(
        self,
        *,
        state: str | None = None,
        since: datetime | str | None = None,
        node: str | None = None,
        min_severity: str | None = None,
        silenced: str | None = None,
        kind: str | None = None,
        job: str | None = None,
        rack: str | None = None,
        text: str | None = None,
        acknowledged: str | None = None,
        assignee: str | None = None,
        sort: str | None = None,
        at: datetime | str | None = None,
    ) -> AsyncIterator[models.Incident]:
        """Incidents, open or of a time. All pages, an item at a time."""
        async for item in self._pages(
            "/api/v1/incidents",
            {
                "state": state,
                "since": since,
                "node": node,
                "min_severity": min_severity,
                "silenced": silenced,
                "kind": kind,
                "job": job,
                "rack": rack,
                "text": text,
                "acknowledged": acknowledged,
                "assignee": assignee,
                "sort": sort,
                "at": at,
                "limit": 1000,
            },
            "incidents",
        ):
            yield cast("models.Incident", item)

    async def get_incident(self, id: str, *, at: datetime | str | None = None) -> models.IncidentDetail:
        """One incident with its evidence and decisions."""
        return cast("models.IncidentDetail", await self._get(f"/api/v1/incidents/{quote(id, safe='')}", {"at": at}))

    async def note_incident(
        self,
        id: str,
        *,
        act: str | None = None,
        text: str | None = None,
        value: str | None = None,
        who: str | None = None,
        idempotency_key: str | None = None,
    ) -> models.IncidentNoteReply:
        """Acknowledge an incident, assign it, comment on it, link a ticket, say what it was."""
        return cast(
            "models.IncidentNoteReply",
            await self._post(
                f"/api/v1/incidents/{quote(id, safe='')}/notes",
                {"act": act, "text": text, "value": value, "who": who},
                idempotency_key,
            ),
        )

    async def list_similar(self, id: str, *, limit: int | None = None) -> models.SimilarList:
        """Earlier incidents like this one, what was done for them, and whether it came back."""
        return cast(
            "models.SimilarList", await self._get(f"/api/v1/incidents/{quote(id, safe='')}/similar", {"limit": limit})
        )

    async def list_jobs(
        self,
        *,
        ended: bool | None = None,
        contains: str | None = None,
        at: datetime | str | None = None,
        limit: int | None = None,
        cursor: str | None = None,
    ) -> models.JobList:
        """Jobs, those that incidents hurt first."""
        return cast(
            "models.JobList",
            await self._get(
                "/api/v1/jobs", {"ended": ended, "contains": contains, "at": at, "limit": limit, "cursor": cursor}
            ),
        )

    async def iterate_jobs(
        self, *, ended: bool | None = None, contains: str | None = None, at: datetime | str | None = None
    ) -> AsyncIterator[models.JobRow]:
        """Jobs, those that incidents hurt first. All pages, an item at a time."""
        async for item in self._pages(
            "/api/v1/jobs", {"ended": ended, "contains": contains, "at": at, "limit": 1000}, "jobs"
        ):
            yield cast("models.JobRow", item)

    async def get_job(
        self, job: str, *, loss: bool | None = None, at: datetime | str | None = None
    ) -> models.JobDetail:
        """One job: its GPUs, their values, its incidents."""
        return cast(
            "models.JobDetail", await self._get(f"/api/v1/jobs/{quote(job, safe='')}", {"loss": loss, "at": at})
        )

    async def get_layout(self, *, jobs: bool | None = None) -> models.Layout:
        """Racks, nodes and GPUs, in the picture's order."""
        return cast("models.Layout", await self._get("/api/v1/layout", {"jobs": jobs}))

    async def get_ledger(
        self,
        *,
        from_: datetime | str | None = None,
        to: datetime | str | None = None,
        job: str | None = None,
        limit: int | None = None,
    ) -> models.Ledger:
        """What every held GPU-hour was used for, and availability."""
        return cast(
            "models.Ledger", await self._get("/api/v1/ledger", {"from": from_, "to": to, "job": job, "limit": limit})
        )

    async def report_maintenance(
        self,
        *,
        why: str,
        source: str,
        id: str,
        node: Sequence[str] | None = None,
        from_: datetime | str | None = None,
        until: datetime | str | None = None,
        over: bool | None = None,
        who: str | None = None,
        idempotency_key: str | None = None,
    ) -> models.SilenceReply:
        """Report planned work on nodes, change it or end it."""
        return cast(
            "models.SilenceReply",
            await self._post(
                "/api/v1/maintenance",
                {
                    "node": node,
                    "from": from_,
                    "until": until,
                    "why": why,
                    "source": source,
                    "id": id,
                    "over": over,
                    "who": who,
                },
                idempotency_key,
            ),
        )

    async def list_nodes(
        self,
        *,
        health: str | None = None,
        contains: str | None = None,
        order: str | None = None,
        limit: int | None = None,
        cursor: str | None = None,
    ) -> models.NodeList:
        """Nodes, the worst first."""
        return cast(
            "models.NodeList",
            await self._get(
                "/api/v1/nodes",
                {"health": health, "contains": contains, "order": order, "limit": limit, "cursor": cursor},
            ),
        )

    async def iterate_nodes(
        self, *, health: str | None = None, contains: str | None = None, order: str | None = None
    ) -> AsyncIterator[models.NodeRow]:
        """Nodes, the worst first. All pages, an item at a time."""
        async for item in self._pages(
            "/api/v1/nodes", {"health": health, "contains": contains, "order": order, "limit": 1000}, "nodes"
        ):
            yield cast("models.NodeRow", item)

    async def get_node(
        self,
        node: str,
        *,
        health_from: datetime | str | None = None,
        health_to: datetime | str | None = None,
        at: datetime | str | None = None,
    ) -> models.NodeDetail:
        """One node: its GPUs, ports, values, inventory and incidents."""
        return cast(
            "models.NodeDetail",
            await self._get(
                f"/api/v1/nodes/{quote(node, safe='')}", {"health_from": health_from, "health_to": health_to, "at": at}
            ),
        )

    async def act_on_node(
        self,
        node: str,
        *,
        act: str,
        why: str,
        force: bool | None = None,
        who: str | None = None,
        gpu: int | None = None,
        gpu_uuid: str | None = None,
        save_s: float | None = None,
        idempotency_key: str | None = None,
    ) -> models.ActReply:
        """Drain, isolate, reset, reboot or resume a node."""
        return cast(
            "models.ActReply",
            await self._post(
                f"/api/v1/nodes/{quote(node, safe='')}/actions",
                {
                    "act": act,
                    "why": why,
                    "force": force,
                    "who": who,
                    "gpu": gpu,
                    "gpu_uuid": gpu_uuid,
                    "save_s": save_s,
                },
                idempotency_key,
            ),
        )

    async def preview_act(
        self,
        node: str,
        *,
        act: str,
        why: str | None = None,
        force: bool | None = None,
        who: str | None = None,
        gpu: int | None = None,
        gpu_uuid: str | None = None,
        save_s: float | None = None,
    ) -> models.ActPreview:
        """What an action meets and what is against it; changes nothing."""
        return cast(
            "models.ActPreview",
            await self._get(
                f"/api/v1/nodes/{quote(node, safe='')}/actions/preview",
                {
                    "act": act,
                    "why": why,
                    "force": force,
                    "who": who,
                    "gpu": gpu,
                    "gpu_uuid": gpu_uuid,
                    "save_s": save_s,
                },
            ),
        )

    async def adopt_node(
        self,
        node: str,
        *,
        why: str,
        rack: str | None = None,
        leaf: str | None = None,
        pool: str | None = None,
        sku: str | None = None,
        gpus: int | None = None,
        who: str | None = None,
        forget: bool | None = None,
        idempotency_key: str | None = None,
    ) -> models.AdoptReply:
        """Take a node that reports into the fleet."""
        return cast(
            "models.AdoptReply",
            await self._post(
                f"/api/v1/nodes/{quote(node, safe='')}/adoption",
                {
                    "rack": rack,
                    "leaf": leaf,
                    "pool": pool,
                    "sku": sku,
                    "gpus": gpus,
                    "why": why,
                    "who": who,
                    "forget": forget,
                },
                idempotency_key,
            ),
        )

    async def get_picture(self, *, color_by: str | None = None) -> models.Picture:
        """One cell for each GPU: its health, or a metric's value."""
        return cast("models.Picture", await self._get("/api/v1/picture", {"color_by": color_by}))

    async def get_policy(self) -> models.PolicyState:
        """The policy in force, and what it holds back."""
        return cast("models.PolicyState", await self._get("/api/v1/policy", {}))

    async def backtest_policies(self) -> models.BacktestReply:
        """The last 7 days decided again, by the policy in force and each preset; changes nothing."""
        return cast("models.BacktestReply", await self._get("/api/v1/policy/backtest", {}))

    async def list_probes(self, *, figure: str | None = None, node: str | None = None) -> models.ProbeList:
        """The newest probe results and how they were judged."""
        return cast("models.ProbeList", await self._get("/api/v1/probes", {"figure": figure, "node": node}))

    async def probe_history(
        self, *, node: str, figure: str, gpu: int | None = None, peer: int | None = None, limit: int | None = None
    ) -> models.ProbeHistoryReply:
        """One figure of probes over time."""
        return cast(
            "models.ProbeHistoryReply",
            await self._get(
                "/api/v1/probes/history", {"node": node, "gpu": gpu, "peer": peer, "figure": figure, "limit": limit}
            ),
        )

    async def list_probe_orders(
        self,
        *,
        node: str | None = None,
        id: str | None = None,
        since: datetime | str | None = None,
        limit: int | None = None,
        cursor: str | None = None,
    ) -> models.ProbeOrderList:
        """Probes that were ordered, and their states."""
        return cast(
            "models.ProbeOrderList",
            await self._get(
                "/api/v1/probes/orders", {"node": node, "id": id, "since": since, "limit": limit, "cursor": cursor}
            ),
        )

    async def iterate_probe_orders(
        self, *, node: str | None = None, id: str | None = None, since: datetime | str | None = None
    ) -> AsyncIterator[models.ProbeOrderRow]:
        """Probes that were ordered, and their states. All pages, an item at a time."""
        async for item in self._pages(
            "/api/v1/probes/orders", {"node": node, "id": id, "since": since, "limit": 1000}, "orders"
        ):
            yield cast("models.ProbeOrderRow", item)

    async def request_probe(
        self,
        *,
        node: str | None = None,
        gpus: Sequence[int] | None = None,
        level: str | None = None,
        probes: Sequence[str] | None = None,
        why: str | None = None,
        who: str | None = None,
        group: Sequence[str] | None = None,
        fabric: bool | None = None,
        idempotency_key: str | None = None,
    ) -> models.ProbeAsked:
        """Order probes of a node."""
        return cast(
            "models.ProbeAsked",
            await self._post(
                "/api/v1/probes/orders",
                {
                    "node": node,
                    "gpus": gpus,
                    "level": level,
                    "probes": probes,
                    "why": why,
                    "who": who,
                    "group": group,
                    "fabric": fabric,
                },
                idempotency_key,
            ),
        )

    async def list_reporting(self, *, limit: int | None = None, cursor: str | None = None) -> models.ReportingList:
        """What the fleet file says of each node, and what its agent reports; also nodes that are not in the file."""
        return cast("models.ReportingList", await self._get("/api/v1/reporting", {"limit": limit, "cursor": cursor}))

    async def iterate_reporting(self) -> AsyncIterator[models.ReportingNode]:
        """What the fleet file says of each node, and what its agent reports; also nodes that are not in the file. All pages, an item at a time."""
        async for item in self._pages("/api/v1/reporting", {"limit": 1000}, "nodes"):
            yield cast("models.ReportingNode", item)

    async def list_risk(self, *, limit: int | None = None, cursor: str | None = None) -> models.RiskList:
        """Nodes by their chance of failing soon."""
        return cast("models.RiskList", await self._get("/api/v1/risk", {"limit": limit, "cursor": cursor}))

    async def iterate_risk(self) -> AsyncIterator[models.RiskRow]:
        """Nodes by their chance of failing soon. All pages, an item at a time."""
        async for item in self._pages("/api/v1/risk", {"limit": 1000}, "nodes"):
            yield cast("models.RiskRow", item)

    async def search(self, *, text: str | None = None, limit: int | None = None) -> models.SearchReply:
        """Nodes, GPUs (by UUID or serial number), jobs, incidents, XIDs, racks and leaf switches that a text names."""
        return cast("models.SearchReply", await self._get("/api/v1/search", {"text": text, "limit": limit}))

    async def query_series(
        self,
        *,
        scope: str,
        targets: Sequence[str],
        metrics: Sequence[str],
        from_: datetime | str,
        to: datetime | str,
        max_points: int | None = None,
        with_peers: bool | None = None,
    ) -> models.SeriesReply:
        """Values of metrics over a time."""
        return cast(
            "models.SeriesReply",
            await self._get(
                "/api/v1/series",
                {
                    "scope": scope,
                    "targets": targets,
                    "metrics": metrics,
                    "from": from_,
                    "to": to,
                    "max_points": max_points,
                    "with_peers": with_peers,
                },
            ),
        )

    async def list_silences(
        self, *, since: datetime | str | None = None, limit: int | None = None, cursor: str | None = None
    ) -> models.SilenceList:
        """Silences, and open maintenance windows."""
        return cast(
            "models.SilenceList",
            await self._get("/api/v1/silences", {"since": since, "limit": limit, "cursor": cursor}),
        )

    async def iterate_silences(self, *, since: datetime | str | None = None) -> AsyncIterator[models.Silence]:
        """Silences, and open maintenance windows. All pages, an item at a time."""
        async for item in self._pages("/api/v1/silences", {"since": since, "limit": 1000}, "silences"):
            yield cast("models.Silence", item)

    async def create_silence(
        self,
        *,
        hours: float,
        why: str,
        node: Sequence[str] | None = None,
        gpu: Sequence[int] | None = None,
        rack: Sequence[str] | None = None,
        leaf: Sequence[str] | None = None,
        pool: Sequence[str] | None = None,
        kind: Sequence[str] | None = None,
        incident: Sequence[str] | None = None,
        from_: datetime | str | None = None,
        maintenance: bool | None = None,
        who: str | None = None,
        idempotency_key: str | None = None,
    ) -> models.SilenceReply:
        """Hold notifications back for a time."""
        return cast(
            "models.SilenceReply",
            await self._post(
                "/api/v1/silences",
                {
                    "node": node,
                    "gpu": gpu,
                    "rack": rack,
                    "leaf": leaf,
                    "pool": pool,
                    "kind": kind,
                    "incident": incident,
                    "from": from_,
                    "hours": hours,
                    "why": why,
                    "maintenance": maintenance,
                    "who": who,
                },
                idempotency_key,
            ),
        )

    async def end_silence(
        self, id: str, *, why: str, who: str | None = None, idempotency_key: str | None = None
    ) -> models.SilenceReply:
        """End a silence or a maintenance window."""
        return cast(
            "models.SilenceReply",
            await self._post(f"/api/v1/silences/{quote(id, safe='')}/end", {"why": why, "who": who}, idempotency_key),
        )

    async def get_status(self) -> models.Status:
        """The fleet and the collector in figures, and what is wrong."""
        return cast("models.Status", await self._get("/api/v1/status", {}))

    async def get_system(self) -> models.System:
        """Drover itself: agents, ingest, detection, store, receivers."""
        return cast("models.System", await self._get("/api/v1/system", {}))

    async def get_thermals(self, *, rack: str | None = None, at: datetime | str | None = None) -> models.Thermals:
        """Temperatures by rack and slot."""
        return cast("models.Thermals", await self._get("/api/v1/thermals", {"rack": rack, "at": at}))

    async def get_trend(self, *, days: int | None = None) -> models.Trend:
        """Utilisation, power, GPU-hours lost and goodput of each of the last days."""
        return cast("models.Trend", await self._get("/api/v1/trend", {"days": days}))

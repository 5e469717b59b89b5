"""The Fleet service: what console and command line ask. Answers come from worker threads, each within a deadline."""

# ruff: noqa: N802  # methods are named as fleet.proto names them
from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn, TypeVar

import grpc

from drover_collector.api import (
    actions as api_actions,
)
from drover_collector.api import (
    backtest as api_backtest,
)
from drover_collector.api import (
    backup as api_backup,
)
from drover_collector.api import (
    capacity as api_capacity,
)
from drover_collector.api import (
    decisions as api_decisions,
)
from drover_collector.api import (
    export as api_export,
)
from drover_collector.api import (
    fabric as api_fabric,
)
from drover_collector.api import (
    fleet as api_fleet,
)
from drover_collector.api import (
    incidents as api_incidents,
)
from drover_collector.api import (
    job as api_job,
)
from drover_collector.api import (
    jobs as api_jobs,
)
from drover_collector.api import (
    nodes as api_nodes,
)
from drover_collector.api import (
    probes as api_probes,
)
from drover_collector.api import (
    risk as api_risk,
)
from drover_collector.api import (
    series as api_series,
)
from drover_collector.api import (
    silences as api_silences,
)
from drover_collector.api import (
    system as api_system,
)
from drover_collector.api import (
    thermals as api_thermals,
)
from drover_collector.api.snapshot import ApiSnapshot, RefusalError
from drover_collector.auth import authorization as gate
from drover_collector.store import StoreError
from drover_proto import fleet_pb2 as pb
from drover_proto.fleet_pb2_grpc import FleetServicer

log = logging.getLogger(__name__)

T = TypeVar("T")
Context = grpc.aio.ServicerContext[Any, Any]

THREADS = 4  # for questions
ACT_THREADS = 4  # for what operators do: a drain does not wait for four slow questions of viewers
ANSWER_S = 30.0  # for callers that give no deadline of their own
EXPORT_S = 3600.0
BACKUPS = 2  # one works; another is told so
EXPORTS = 1  # at a time: one reads the whole store


class FleetApi(FleetServicer):
    """Implements `fleet.proto`. Who may call is the gate's matter, which stands before the server."""

    def __init__(self, facts: ApiSnapshot) -> None:
        self._facts = facts
        self._threads = ThreadPoolExecutor(THREADS, "api")
        self._act_threads = ThreadPoolExecutor(ACT_THREADS, "act")
        self._export_thread = ThreadPoolExecutor(EXPORTS, "export")
        self._backup_thread = ThreadPoolExecutor(BACKUPS, "backup")
        self._exporting = asyncio.Semaphore(EXPORTS)
        self._system = api_system.SystemWatch(facts)

    def close(self) -> None:
        """Waits for the answers under way, which may read the store."""
        self._threads.shutdown(cancel_futures=True)
        self._act_threads.shutdown(cancel_futures=True)
        self._export_thread.shutdown(cancel_futures=True)
        self._facts.store.backups.stop()
        self._backup_thread.shutdown(cancel_futures=True)

    async def GetStatus(self, _request: pb.StatusRequest, context: Context) -> pb.Status:
        return await self._answer(context, lambda: api_fleet.get_status(self._facts))

    async def GetLayout(self, request: pb.LayoutRequest, context: Context) -> pb.Layout:
        return await self._answer(context, lambda: api_fleet.get_layout(self._facts, request.jobs))

    async def GetPicture(self, request: pb.PictureRequest, context: Context) -> pb.Picture:
        return await self._answer(context, lambda: api_fleet.get_picture(self._facts, request.color_by))

    async def ListNodes(self, request: pb.ListNodesRequest, context: Context) -> pb.NodeList:
        return await self._answer(context, lambda: api_nodes.list_nodes(self._facts, request))

    async def GetNode(self, request: pb.NodeRequest, context: Context) -> pb.NodeDetail:
        return await self._answer(context, lambda: api_nodes.get_node(self._facts, request))

    async def ListIncidents(self, request: pb.ListIncidentsRequest, context: Context) -> pb.IncidentList:
        return await self._answer(context, lambda: api_incidents.list_incidents(self._facts, request))

    async def GetIncident(self, request: pb.IncidentRequest, context: Context) -> pb.IncidentDetail:
        may = api_decisions.may_answer(gate.caller())
        return await self._answer(context, lambda: api_incidents.get_incident(self._facts, request, may))

    async def QuerySeries(self, request: pb.SeriesRequest, context: Context) -> pb.SeriesReply:
        return await self._answer(context, lambda: api_series.query_series(self._facts, request))

    async def ListEvents(self, request: pb.EventsRequest, context: Context) -> pb.EventList:
        return await self._answer(context, lambda: api_incidents.list_events(self._facts, request))

    async def ListProbes(self, request: pb.ProbesRequest, context: Context) -> pb.ProbeList:
        return await self._answer(context, lambda: api_probes.list_probes(self._facts, request))

    async def ProbeHistory(self, request: pb.ProbeHistoryRequest, context: Context) -> pb.ProbeHistoryReply:
        return await self._answer(context, lambda: api_probes.probe_history(self._facts, request))

    async def ListProbeOrders(self, request: pb.ProbeOrdersRequest, context: Context) -> pb.ProbeOrderList:
        return await self._answer(context, lambda: api_probes.list_orders(self._facts, request))

    async def RequestProbe(self, request: pb.ProbeAsk, context: Context) -> pb.ProbeAsked:
        by = api_decisions.named(gate.caller(), request.who)  # here: a worker thread does not know it
        return await self._act(context, lambda: api_probes.request_probe(self._facts, request, by))

    async def ListRisk(self, request: pb.RiskRequest, context: Context) -> pb.RiskList:
        return await self._answer(context, lambda: api_risk.list_risk(self._facts, request))

    async def ActOnNode(self, request: pb.ActRequest, context: Context) -> pb.ActReply:
        by = api_decisions.named(gate.caller(), request.who)  # here: a worker thread does not know it
        forces = gate.may_force()
        return await self._act(context, lambda: api_actions.act_on_node(self._facts, request, by, forces))

    async def ListActions(self, request: pb.ActionsRequest, context: Context) -> pb.ActionList:
        return await self._answer(context, lambda: api_actions.list_actions(self._facts, request))

    async def ListDecisions(self, request: pb.DecisionsRequest, context: Context) -> pb.DecisionList:
        may = api_decisions.may_answer(gate.caller())
        return await self._answer(context, lambda: api_decisions.list_decisions(self._facts, request, may))

    async def ApproveDecision(self, request: pb.Answer, context: Context) -> pb.Answered:
        by = api_decisions.named(gate.caller(), request.who)
        return await self._act(context, lambda: api_decisions.answer(self._facts, request, True, by))

    async def RejectDecision(self, request: pb.Answer, context: Context) -> pb.Answered:
        by = api_decisions.named(gate.caller(), request.who)
        return await self._act(context, lambda: api_decisions.answer(self._facts, request, False, by))

    async def ListAudit(self, request: pb.AuditRequest, context: Context) -> pb.AuditList:
        return await self._answer(context, lambda: api_decisions.list_audit(self._facts, request))

    async def GetPolicy(self, _request: pb.PolicyRequest, context: Context) -> pb.PolicyState:
        may = api_decisions.may_answer(gate.caller())
        return await self._answer(context, lambda: api_decisions.get_policy(self._facts, may))

    async def ListJobs(self, request: pb.ListJobsRequest, context: Context) -> pb.JobList:
        return await self._answer(context, lambda: api_jobs.list_jobs(self._facts, request))

    async def GetJob(self, request: pb.JobRequest, context: Context) -> pb.JobDetail:
        return await self._answer(context, lambda: api_job.get_job(self._facts, request))

    async def GetFabric(self, request: pb.FabricRequest, context: Context) -> pb.Fabric:
        return await self._answer(context, lambda: api_fabric.get_fabric(self._facts, request))

    async def GetThermals(self, request: pb.ThermalsRequest, context: Context) -> pb.Thermals:
        return await self._answer(context, lambda: api_thermals.get_thermals(self._facts, request))

    async def GetSystem(self, _request: pb.SystemRequest, context: Context) -> pb.System:
        return await self._answer(context, lambda: api_system.get_system(self._system))

    async def GetCapacity(self, request: pb.CapacityRequest, context: Context) -> pb.Capacity:
        return await self._answer(context, lambda: api_capacity.get_capacity(self._facts, request))

    async def PreviewAct(self, request: pb.ActRequest, context: Context) -> pb.ActPreview:
        may, forces = api_decisions.may_answer(gate.caller()), gate.may_force()
        return await self._answer(context, lambda: api_actions.preview_act(self._facts, request, may, forces))

    async def ListSilences(self, request: pb.SilencesRequest, context: Context) -> pb.SilenceList:
        may = api_decisions.may_answer(gate.caller())
        return await self._answer(context, lambda: api_silences.list_silences(self._facts, request, may))

    async def CreateSilence(self, request: pb.SilenceAsk, context: Context) -> pb.SilenceReply:
        by = api_decisions.named(gate.caller(), request.who)
        return await self._act(context, lambda: api_silences.create_silence(self._facts, request, by))

    async def EndSilence(self, request: pb.SilenceEnd, context: Context) -> pb.SilenceReply:
        by = api_decisions.named(gate.caller(), request.who)
        return await self._act(context, lambda: api_silences.end_silence(self._facts, request, by))

    async def BacktestPolicies(self, _request: pb.BacktestRequest, context: Context) -> pb.BacktestReply:
        return await self._answer(context, lambda: api_backtest.backtest_policies(self._facts))

    async def Export(self, request: pb.ExportRequest, context: Context) -> AsyncIterator[pb.ExportChunk]:
        if self._exporting.locked():
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "another export is under way; try again later")
        async with self._exporting:
            chunks = api_export.export(self._facts, request)
            following = functools.partial(next, chunks, None)
            loop = asyncio.get_running_loop()
            try:
                async with asyncio.timeout(_within(context, EXPORT_S)):
                    while (chunk := await loop.run_in_executor(self._export_thread, following)) is not None:
                        yield chunk
            except Exception as error:  # noqa: BLE001  # the same line for every kind, as for the other calls
                await _tell(context, error)
            finally:
                await loop.run_in_executor(self._export_thread, chunks.close)

    async def Backup(self, request: pb.BackupRequest, context: Context) -> pb.BackupReply:
        """Goes on to its end even when nobody waits for it any more."""
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._backup_thread, api_backup.backup, self._facts, request)
        except Exception as error:  # noqa: BLE001  # the same line for every kind, as for the other calls
            await _tell(context, error)

    async def _act(self, context: Context, make: Callable[[], T]) -> T:
        return await self._answer(context, make, self._act_threads)

    async def _answer(self, context: Context, make: Callable[[], T], threads: ThreadPoolExecutor | None = None) -> T:
        seconds = _within(context, ANSWER_S)

        def answer() -> T:
            with self._facts.store.limited(seconds):  # or it would keep a thread and the store from others
                return make()

        try:
            async with asyncio.timeout(seconds):
                return await asyncio.get_running_loop().run_in_executor(threads or self._threads, answer)
        except Exception as error:  # noqa: BLE001  # the caller gets a status and one line, whatever it is
            await _tell(context, error)


def _within(context: Context, seconds: float) -> float:
    remaining = context.time_remaining()
    return seconds if remaining is None else min(seconds, remaining)


async def _tell(context: Context, error: Exception) -> NoReturn:
    if isinstance(error, RefusalError):
        await context.abort(error.code, str(error))
    if isinstance(error, StoreError):
        await context.abort(grpc.StatusCode.UNAVAILABLE, f"the store cannot answer: {error}")
    if isinstance(error, TimeoutError):
        await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "this took too long; ask for less, or try again")
    log.exception("a request failed", exc_info=error)
    await context.abort(grpc.StatusCode.INTERNAL, "this failed inside the collector; its log says how")

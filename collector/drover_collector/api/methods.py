"""The table of the Fleet service: which function answers each method. Roles and deadlines are in `fleet_methods`.

To add a method: write it in fleet.proto and in drover_proto/fleet_methods.py, and its function here. What is missing
in one of the three is refused on import.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from google.protobuf.message import Message

from drover_collector.api import (
    actions,
    capacity,
    changes,
    decisions,
    export,
    fabric,
    fleet,
    incident_notes,
    incidents,
    job,
    jobs,
    ledger,
    nodes,
    past_node,
    playback,
    probes,
    reporting,
    search,
    series,
    silences,
    store,
    system,
    thermals,
    trend,
)
from drover_collector.api.moment import Moment, of_then
from drover_collector.api.snapshot import ApiSnapshot
from drover_collector.auth.identity import Identity
from drover_proto import fleet_methods as wire
from drover_proto.fleet_methods import FleetMethod

Q = TypeVar("Q", bound=Message)
R = TypeVar("R", bound=Message)


@dataclass(frozen=True, slots=True)
class Call(Generic[Q]):
    """One call, as its function sees it on a worker thread.

    Attributes:
        caller: None without TLS, where every local user may do everything.
        forces: the caller may act past the guard.
    """

    facts: ApiSnapshot
    system: system.SystemWatch
    request: Q
    caller: Identity | None
    forces: bool

    @property
    def may_answer(self) -> bool:
        """Return True if the caller may approve and reject."""
        return decisions.may_answer(self.caller)

    def by(self, who: str) -> str:
        """Return who acts: `who` as the console names the person, and the certificate's name."""
        return decisions.named(self.caller, who)


@dataclass(frozen=True, slots=True)
class Rpc(Generic[Q, R]):
    """A method and the function that answers it, which may block.

    The function returns the reply; that of `Export` returns a generator of them.
    """

    method: FleetMethod[Q, R]
    answer: Callable[[Call[Q]], Any]


def _table(*rpcs: Rpc[Any, Any]) -> Mapping[str, Rpc[Any, Any]]:
    """
    Raises:
        TypeError: a method has no function, or two.
    """
    found = {rpc.method.name: rpc for rpc in rpcs}
    if len(found) < len(rpcs) or found.keys() != wire.METHODS.keys():
        raise TypeError(f"the table lacks or repeats methods: {', '.join(wire.METHODS.keys() - found.keys())}")
    return found


def _node(call: Call[Any]) -> Any:
    if isinstance(call.facts, Moment):
        return past_node.get_node(call.facts, call.request, call.may_answer)
    return nodes.get_node(call.facts, call.request, call.may_answer)


METHODS = _table(
    Rpc(wire.GET_STATUS, lambda call: fleet.get_status(call.facts)),
    Rpc(wire.GET_LAYOUT, lambda call: fleet.get_layout(call.facts, call.request.jobs)),
    Rpc(wire.GET_PICTURE, lambda call: fleet.get_picture(call.facts, call.request.color_by, call.request.packed)),
    Rpc(wire.LIST_NODES, lambda call: nodes.list_nodes(call.facts, call.request)),
    Rpc(wire.GET_NODE, of_then(_node)),
    Rpc(wire.LIST_INCIDENTS, of_then(lambda call: incidents.list_incidents(call.facts, call.request))),
    Rpc(wire.GET_INCIDENT, of_then(lambda call: incidents.get_incident(call.facts, call.request, call.may_answer))),
    Rpc(wire.QUERY_SERIES, lambda call: series.query_series(call.facts, call.request)),
    Rpc(wire.LIST_EVENTS, lambda call: incidents.list_events(call.facts, call.request)),
    Rpc(wire.LIST_RISK, lambda call: fleet.list_risk(call.facts, call.request)),
    Rpc(wire.EXPORT, lambda call: export.export(call.facts, call.request)),
    Rpc(wire.BACKUP, lambda call: store.backup(call.facts, call.request)),
    Rpc(wire.LIST_PROBES, lambda call: probes.list_probes(call.facts, call.request)),
    Rpc(wire.PROBE_HISTORY, lambda call: probes.probe_history(call.facts, call.request)),
    Rpc(wire.LIST_PROBE_ORDERS, lambda call: probes.list_orders(call.facts, call.request)),
    Rpc(wire.REQUEST_PROBE, lambda call: probes.request_probe(call.facts, call.request, call.by(call.request.who))),
    Rpc(
        wire.ACT_ON_NODE,
        lambda call: actions.act_on_node(call.facts, call.request, call.by(call.request.who), call.forces),
    ),
    Rpc(wire.LIST_ACTIONS, lambda call: actions.list_actions(call.facts, call.request)),
    Rpc(wire.LIST_DECISIONS, lambda call: decisions.list_decisions(call.facts, call.request, call.may_answer)),
    Rpc(
        wire.APPROVE_DECISION, lambda call: decisions.answer(call.facts, call.request, True, call.by(call.request.who))
    ),
    Rpc(
        wire.REJECT_DECISION, lambda call: decisions.answer(call.facts, call.request, False, call.by(call.request.who))
    ),
    Rpc(wire.LIST_AUDIT, lambda call: decisions.list_audit(call.facts, call.request)),
    Rpc(wire.GET_POLICY, lambda call: decisions.get_policy(call.facts, call.may_answer)),
    Rpc(wire.LIST_JOBS, of_then(lambda call: jobs.list_jobs(call.facts, call.request))),
    Rpc(wire.GET_JOB, of_then(lambda call: job.get_job(call.facts, call.request))),
    Rpc(wire.GET_FABRIC, of_then(lambda call: fabric.get_fabric(call.facts, call.request))),
    Rpc(wire.GET_THERMALS, of_then(lambda call: thermals.get_thermals(call.facts, call.request))),
    Rpc(wire.GET_SYSTEM, lambda call: system.get_system(call.system)),
    Rpc(wire.GET_CAPACITY, lambda call: capacity.get_capacity(call.facts, call.request)),
    Rpc(wire.GET_LEDGER, lambda call: ledger.get_ledger(call.facts, call.request)),
    Rpc(wire.PREVIEW_ACT, lambda call: actions.preview_act(call.facts, call.request, call.may_answer, call.forces)),
    Rpc(wire.LIST_SILENCES, lambda call: silences.list_silences(call.facts, call.request, call.may_answer)),
    Rpc(wire.CREATE_SILENCE, lambda call: silences.create_silence(call.facts, call.request, call.by(call.request.who))),
    Rpc(wire.END_SILENCE, lambda call: silences.end_silence(call.facts, call.request, call.by(call.request.who))),
    Rpc(
        wire.REPORT_MAINTENANCE,
        lambda call: silences.report_maintenance(call.facts, call.request, call.by(call.request.who)),
    ),
    Rpc(wire.BACKTEST_POLICIES, lambda call: decisions.backtest_policies(call.facts)),
    Rpc(wire.ADOPT_NODE, lambda call: reporting.adopt_node(call.facts, call.request, call.by(call.request.who))),
    Rpc(wire.LIST_REPORTING, lambda call: reporting.list_reporting(call.facts)),
    Rpc(wire.SEARCH, lambda call: search.search(call.facts, call.request)),
    Rpc(
        wire.NOTE_INCIDENT,
        lambda call: incident_notes.note_incident(call.facts, call.request, call.by(call.request.who)),
    ),
    Rpc(wire.GET_PLAYBACK, lambda call: playback.get_playback(call.facts, call.request)),
    Rpc(wire.LIST_CHANGES, lambda call: changes.list_changes(call.facts, call.request)),
    Rpc(wire.GET_TREND, lambda call: trend.get_trend(call.facts, call.request)),
    Rpc(wire.LIST_SIMILAR, lambda call: incident_notes.list_similar(call.facts, call.request)),
)

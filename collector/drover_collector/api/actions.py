"""What people do to nodes, and what was done to them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from itertools import takewhile

import grpc
import numpy as np

from drover_collector.actions.base import ActError, gpu_of
from drover_collector.actions.dispatcher import OBSERVES, ActionDispatcher
from drover_collector.actions.node_outage import IDLE, gpu_hours_lost, is_out
from drover_collector.api import gpu_actions
from drover_collector.api.snapshot import (
    DAY_MS,
    REPORTING_MS,
    ApiSnapshot,
    RefusalError,
    bad_argument,
)
from drover_collector.engine.engine import Engine
from drover_collector.policy.decider import UNSEEN
from drover_collector.policy.guard import hold, may_resume
from drover_collector.store import StoreError
from drover_core.model.events import (
    Act,
    Action,
    ActionState,
    Audit,
    Incident,
    NodeOutage,
    ProbeVerdict,
    Severity,
)
from drover_core.times import iso
from drover_proto import fleet_pb2 as pb

log = logging.getLogger(__name__)

BY_HAND = (Act.DRAIN, Act.ISOLATE, Act.RESUME, Act.RESET, Act.REBOOT)
WAIT_S = 8.0  # for the outcome, before the answer says that it is under way
WHY_CHARS = 500
SAVE_MAX_S = 86_400  # as a rule's save_s
LISTED = 100
MOST_LISTED = 10_000
LOST_DAYS = 90
NO_FORCE = "by force acts whose certificate has a name drover://admin/NAME; an operator's acts within the guard"
SHOWN_INCIDENTS = 5  # open incidents


def act_on_node(facts: ApiSnapshot, request: pb.ActRequest, by: str, forces: bool = True) -> pb.ActReply:
    """`by`: who asks, as the certificate names them; `forces`: whether they may act past the guard.

    A resume passes no guard.
    """
    facts.node_number(request.node)
    act = next((act for act in BY_HAND if act == request.act), None)
    if act is None:
        raise bad_argument(f"{request.act[:80]!r} is nothing that can be done; there are {', '.join(BY_HAND)}")
    why = " ".join(request.why.split())[:WHY_CHARS]
    try:
        if request.force and not forces:
            raise RefusalError(grpc.StatusCode.PERMISSION_DENIED, NO_FORCE)
        reply = _done(facts, request, act, why, by)
    except RefusalError as refusal:
        _note_refused(facts, request, act, why, by, str(refusal))
        raise
    now_ms = facts.now_ms()
    subject = gpu_actions.subject_of(facts, request)
    line = Audit(
        f"{act} {subject} {now_ms}", now_ms, by, act.value, subject, why,
        ("forced: " if request.force else "") + ": ".join(filter(None, (reply.state, reply.detail))),
    )  # fmt: skip
    facts.store.audit.write([line])
    return reply


def _done(facts: ApiSnapshot, request: pb.ActRequest, act: Act, why: str, by: str) -> pb.ActReply:
    if not why:
        raise bad_argument("say why: it stands in the record and in the scheduler's reason")
    if gpu_actions.asks_for_gpu(request) and act not in (Act.DRAIN, Act.RESUME):
        raise bad_argument(gpu_actions.only_nodes(act))
    if request.save_s and act not in (Act.DRAIN, Act.ISOLATE):
        raise bad_argument(f"{act} does not wait for jobs; drain and isolate do (save_s)")
    if not 0 <= request.save_s <= SAVE_MAX_S:
        raise bad_argument(f"save_s is {request.save_s:g}; 0 to {SAVE_MAX_S} s are possible")
    if request.save_s and gpu_actions.asks_for_gpu(request):
        raise bad_argument("the job of one GPU is not asked to save itself (save_s); drain the node for that")
    dispatcher = _dispatcher(facts)
    try:
        return (
            _resume(dispatcher, request, why, by)
            if act is Act.RESUME
            else _take_out(facts, dispatcher, request, act, why, by)
        )
    except ActError as error:
        raise RefusalError(grpc.StatusCode.FAILED_PRECONDITION, str(error)) from None


def _note_refused(facts: ApiSnapshot, request: pb.ActRequest, act: Act, why: str, by: str, refusal: str) -> None:
    """In the audit too. The refusal is answered whether the store takes its line or not."""
    now_ms = facts.now_ms()
    forced = "forced: " if request.force else ""
    subject = gpu_actions.subject_of(facts, request)
    line = Audit(
        f"{act} {subject} {now_ms} refused", now_ms, by, f"{act} (refused)", subject, why, forced + refusal
    )  # fmt: skip
    try:
        facts.store.audit.write([line])
    except StoreError as error:  # as of one that stands by, whose audit is the active one's
        log.warning("not in the audit: %s of %s by %s, refused: %s (%s)", act, request.node, by, refusal, error)


def preview_act(facts: ApiSnapshot, request: pb.ActRequest, may: bool, forces: bool = True) -> pb.ActPreview:
    """What an act would meet: the guard, the jobs on the node. Nothing is done."""
    n = facts.node_number(request.node)
    act = next((act for act in BY_HAND if act == request.act), None)
    if act is None:
        raise bad_argument(f"{request.act[:80]!r} is nothing that can be done; there are {', '.join(BY_HAND)}")
    dispatcher = facts.pipeline.dispatcher
    if gpu_actions.asks_for_gpu(request):
        return _preview_gpu(facts, request, act, pb.ActPreview(may_act=may, no_force=not forces))
    outages = facts.pipeline.engine.duties if dispatcher is None else dispatcher.context.outages.current
    duty = outages.get(request.node)
    reply = pb.ActPreview(
        may_act=may, no_force=not forces, jobs=_jobs_on(facts, n), mode=facts.pipeline.ceiling,
        stage=str(duty.stage) if duty is not None and is_out(duty) else "",
    )  # fmt: skip
    if dispatcher is None or (why_not := dispatcher.acts_not(request.node)):
        reply.hindrance = OBSERVES if dispatcher is None else why_not
    elif act is Act.RESUME and (waiting := dispatcher.withdrawals.waiting(request.node)):
        reply.safe = True
        reply.grounds.extend(f"{a.action} by {a.by} {a.detail or 'waits'}: it is withdrawn." for a in waiting)
    elif act is Act.RESUME:
        reply.hindrance = may_resume(request.node, duty) or ""
        if dispatcher.returns.validator is not None and dispatcher.context.config.validate:
            reply.validates = dispatcher.context.config.validate_level
    elif act in (Act.RESET, Act.REBOOT):
        reply.hindrance = dispatcher.hindrance(act)
        if duty is None or duty.stage not in IDLE:
            reply.guard = f"jobs may run on {request.node}: drain it first"
    else:
        reply.guard = facts.pipeline.of_engine(partial(_held, request.node)) or ""
    if act is Act.RESUME and duty is not None and is_out(duty):
        safe, grounds = return_grounds(facts, request.node, duty)
        reply.grounds.extend(grounds)
        if safe is not None:
            reply.safe = safe
    reply.maintenance = facts.pipeline.outbox.silences.held(facts.now_ms()).get(request.node, "")
    return reply


def _preview_gpu(facts: ApiSnapshot, request: pb.ActRequest, act: Act, reply: pb.ActPreview) -> pb.ActPreview:
    """Do the same for one GPU of a node."""
    node, n = request.node, facts.node_number(request.node)
    gpu, outage = gpu_actions.preview(facts, request, act, reply)
    reply.mode = facts.pipeline.ceiling
    slot = gpu.slot if gpu is not None else request.gpu if request.HasField("gpu") else None
    reply.jobs.extend([] if slot is None else _jobs_on(facts, n, slot))  # also of what cannot be done: it runs there
    reply.maintenance = facts.pipeline.outbox.silences.held(facts.now_ms()).get(node, "")
    if act is Act.RESUME and outage is not None and facts.pipeline.dispatcher is not None:
        safe, grounds = _gpu_grounds(facts, facts.pipeline.dispatcher, outage)
        reply.grounds.extend(grounds)
        if safe is not None:
            reply.safe = safe
    return reply


def _gpu_grounds(facts: ApiSnapshot, dispatcher: ActionDispatcher, outage: NodeOutage) -> tuple[bool | None, list[str]]:
    """Do what `return_grounds` does, for a GPU that is out alone."""
    gpu, node = gpu_of(outage), outage.node
    stages = list(takewhile(is_out, reversed(facts.store.outages.gpus.history(gpu.uuid)))) or [outage]
    opened = [i for i in facts.open_by_node().get(node, []) if i.severity is not Severity.INFO]
    of_others = [i for i in opened if i.gpu is not None and i.gpu != gpu.slot]
    silent_ms = facts.now_ms() - int(facts.last_seen()[facts.node_number(node)])
    verdicts = facts.store.probes.verdicts.read(node=node, from_ms=stages[-1].ts_ms)
    own = [v for v in verdicts if v.gpu == gpu.slot]
    safe, grounds = judge_return(stages[-1], outage, [i for i in opened if i not in of_others], silent_ms, own)
    if lack := dispatcher.gpu_returns.lack_text(outage):
        safe, grounds = False, [f"{lack[0].upper()}{lack[1:]}.", *grounds]
    return safe, grounds


def _jobs_on(facts: ApiSnapshot, n: int, slot: int | None = None) -> list[pb.JobThere]:
    """Who holds GPUs of a node, most of them first. `slot`: this GPU alone."""
    index = facts.index
    codes, names = facts.jobs()
    first, end = int(index.first_gpu[n]), int(index.first_gpu[n + 1])
    here = codes[first:end] if slot is None else codes[first:end][slot : slot + 1]
    found = []
    for code in np.unique(here[here >= 0]).tolist():
        gpus = np.flatnonzero(codes == code)
        found.append(
            pb.JobThere(
                job=names[code], gpus_here=int((here == code).sum()), gpus=len(gpus),
                nodes=len(np.unique(index.gpu_node[gpus])),
            )
        )  # fmt: skip
    return sorted(found, key=lambda job: (-job.gpus_here, job.job))


def list_actions(facts: ApiSnapshot, request: pb.ActionsRequest) -> pb.ActionList:
    if request.node:
        facts.node_number(request.node)
    limit = min(request.limit or LISTED, MOST_LISTED)
    actions = facts.store.actions.newest(node=request.node, incident=request.incident, limit=limit)
    duties = [
        d for d in facts.store.outages.current().values() if (d.node == request.node if request.node else is_out(d))
    ]
    alone = [o for o in facts.store.outages.gpus.current().values() if is_out(o) and request.node in ("", o.node)]
    return pb.ActionList(
        actions=[_action(action) for action in actions], duties=[_duty(facts, duty) for duty in duties],
        gpus=[_gpu_outage(facts, outage) for outage in sorted(alone, key=lambda o: (o.node, o.ts_ms))],
    )  # fmt: skip


def _dispatcher(facts: ApiSnapshot) -> ActionDispatcher:
    dispatcher = facts.pipeline.dispatcher
    if dispatcher is None:
        raise RefusalError(grpc.StatusCode.FAILED_PRECONDITION, OBSERVES)
    return dispatcher


def _resume(dispatcher: ActionDispatcher, request: pb.ActRequest, why: str, by: str) -> pb.ActReply:
    if gpu_actions.asks_for_gpu(request):
        gpu_actions.outage_of(dispatcher, request)
        action, said = dispatcher.resume_gpu(request.node, gpu_actions.which(request), why, by, request.force)
    elif withdrawn := _withdraw(dispatcher, request.node, why, by):
        return pb.ActReply(action_id=withdrawn[0].id, state=ActionState.DONE, detail=_withdrawal(withdrawn))
    else:
        action, said = dispatcher.resume(request.node, why, by, request.force)
    return pb.ActReply(detail=said) if action is None else _reply(dispatcher.wait(action, WAIT_S))


def _withdraw(dispatcher: ActionDispatcher, node: str, why: str, by: str) -> list[Action]:
    dispatcher.check(node)
    return dispatcher.withdrawals.withdraw(node, why, by)


def _withdrawal(withdrawn: Sequence[Action]) -> str:
    """Return what is said of what was withdrawn: its jobs may go on saving themselves, which harms nothing."""
    said = " and ".join(f"the {a.action} by {a.by}" for a in withdrawn)
    return f"{said}, which waited for jobs to save themselves, is withdrawn; {withdrawn[0].node} stays in service"


def _take_out(
    facts: ApiSnapshot, dispatcher: ActionDispatcher, request: pb.ActRequest, act: Act, why: str, by: str
) -> pb.ActReply:
    if gpu_actions.asks_for_gpu(request):
        isolation = gpu_actions.drain_gpu(facts, dispatcher, request, why, by)
        return gpu_actions.drained(dispatcher.wait(isolation, WAIT_S))
    outages = dispatcher.context.outages
    duty = outages.current.get(request.node)
    if act in (Act.RESET, Act.REBOOT):
        if not request.force and (duty is None or duty.stage not in IDLE):
            raise ActError(f"jobs may run on {request.node}: drain it first, or give --force")
        return _reply(dispatcher.wait(dispatcher.drain(request.node, act, why, by, request.force), WAIT_S))
    dispatcher.check(request.node)
    with outages.requested(request.node):
        if not request.force and (why_not := facts.pipeline.of_engine(partial(_held, request.node))):
            raise ActError(f"the guard holds it back: {why_not}; {gpu_actions.FORCE}")
        made = dispatcher.drain(request.node, act, why, by, request.force, request.save_s)
    return _reply(dispatcher.wait(made, WAIT_S))


def _held(node: str, engine: Engine) -> str | None:
    """Why the caps of the guard would not let the node go; its pace and breaker are for what Drover does by itself.
    A scheduler that is away takes all that wait when it is back: they count."""
    if engine.decider.away is None:
        return UNSEEN
    census = engine.census()
    if node not in census.really:
        census.give_back(node)
    return hold(node, engine.jobs_on(node), census, engine.policy.guard)


def _reply(action: Action) -> pb.ActReply:
    return pb.ActReply(action_id=action.id, state=action.state, detail=action.detail)


def _action(a: Action) -> pb.ActionLine:
    return pb.ActionLine(
        id=a.id, node=a.node, act=a.action, state=a.state, detail=a.detail, by=a.by, why=a.why, ts_ms=a.ts_ms,
        incident_id=a.incident_id, actuator=a.actuator, attempts=a.attempts,
        gpu=None if a.gpu is None else a.gpu.slot, gpu_uuid="" if a.gpu is None else a.gpu.uuid,
    )  # fmt: skip


def _duty(facts: ApiSnapshot, duty: NodeOutage) -> pb.DutyLine:
    now_ms = facts.now_ms()
    place = facts.index.spec.by_name.get(duty.node)
    lost = 0.0
    if place is not None:
        history = facts.store.outages.history(duty.node, now_ms - LOST_DAYS * DAY_MS) or [duty]
        lost = gpu_hours_lost(history, place.gpus, now_ms)
    return pb.DutyLine(
        node=duty.node, stage=duty.stage, ts_ms=duty.ts_ms, incident_id=duty.incident_id, reason=duty.reason,
        by=duty.by, returns=duty.returns, gpu_hours_lost=lost, waits_for=duty.waits_for,
    )  # fmt: skip


def _gpu_outage(facts: ApiSnapshot, outage: NodeOutage) -> pb.DutyLine:
    gpu, now_ms = gpu_of(outage), facts.now_ms()
    history = [o for o in facts.store.outages.gpus.history(gpu.uuid) if o.ts_ms >= now_ms - LOST_DAYS * DAY_MS]
    return pb.DutyLine(
        node=outage.node, stage=outage.stage, ts_ms=outage.ts_ms, incident_id=outage.incident_id, reason=outage.reason,
        by=outage.by, returns=outage.returns, gpu_hours_lost=gpu_hours_lost(history or [outage], 1, now_ms),
        waits_for=outage.waits_for, gpu=gpu.slot, uuid=gpu.uuid,
    )  # fmt: skip


def return_grounds(facts: ApiSnapshot, node: str, duty: NodeOutage) -> tuple[bool | None, list[str]]:
    """Whether what is known speaks for giving `node` back (None: nothing proves it either way), and why, a sentence
    each.

    Raises:
        StoreError: its history cannot be read.
    """
    # Its stages since it last served, the newest first.
    stages = list(takewhile(is_out, reversed(facts.store.outages.history(node)))) or [duty]
    out_ms = stages[-1].ts_ms
    opened = [i for i in facts.open_by_node().get(node, []) if i.severity is not Severity.INFO]
    silent_ms = facts.now_ms() - int(facts.last_seen()[facts.node_number(node)])
    verdicts = facts.store.probes.verdicts.read(node=node, from_ms=out_ms)
    return judge_return(stages[-1], duty, opened, silent_ms, verdicts)


def judge_return(
    first: NodeOutage, now: NodeOutage, opened: Sequence[Incident], silent_ms: int, verdicts: Sequence[ProbeVerdict]
) -> tuple[bool | None, list[str]]:
    """Pure. `first`, `now`: how it was taken out, and its present stage. `verdicts`: since then, the oldest first."""
    by = "" if first.by == "drover" else f", by {first.by}"
    grounds = [f"Out since {iso(first.ts_ms)}{by}: {_stage_reason(first)}."]
    if now.stage is not first.stage:
        grounds.append(f"Now {now.stage}: {_stage_reason(now)}.")
    own = [incident for incident in opened if incident.scope in ("gpu", "node")]
    against = [f"Still open: {incident.summary}" for incident in own[:SHOWN_INCIDENTS]]
    if len(own) > SHOWN_INCIDENTS:
        against.append(f"{len(own) - SHOWN_INCIDENTS} more incidents of it are open.")
    if silent_ms > REPORTING_MS:
        against.append("It does not report: its present state is not known.")
    newest = [v for v in verdicts if v.request == verdicts[-1].request]  # of the last probes, the node's and its GPUs'
    failed = [verdict for verdict in newest if verdict.passed is False]
    against += [f"Its probes of {iso(v.ts_ms)} failed: {v.text}" for v in failed]
    passed = bool(newest) and all(verdict.passed for verdict in newest)
    if passed:
        whole = next((v for v in newest if v.gpu is None), newest[-1])
        grounds.append(f"Its probes of {iso(whole.ts_ms)}, since it was taken out, passed: {whole.text}")
    elif not newest:
        grounds.append("It was not probed since it was taken out: nothing proves that it works.")
    elif not failed:
        grounds.append(f"Its probes of {iso(newest[-1].ts_ms)} could not be judged: {newest[-1].text}")
    around = [incident for incident in opened if incident not in own]  # no fault of the node, but it will meet it
    grounds += [f"Open around it, not on it: {incident.summary}" for incident in around[:SHOWN_INCIDENTS]]
    if first.returns:
        grounds.append(f"It came back {first.returns} times before, and failed again.")
    return (False if against else True if passed else None), [*against, *grounds]


def _stage_reason(duty: NodeOutage) -> str:
    return duty.reason.rstrip(".") or "no reason was given"

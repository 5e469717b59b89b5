"""What people do to one GPU of a node: which board they mean, what it would meet, and the order to take it out.

A GPU is named by its slot, its UUID, or both. With both, a board that was swapped since somebody looked is not taken.
"""

from __future__ import annotations

from drover_collector.actions.base import ActError, Actuator, GpuIsolator, LaterError, gpu_of
from drover_collector.actions.dispatcher import OBSERVES, ActionDispatcher
from drover_collector.actions.node_outage import is_out
from drover_collector.api.snapshot import ApiSnapshot
from drover_collector.engine.engine import Engine
from drover_collector.policy.decider import UNSEEN, hold_gpu
from drover_collector.policy.one_gpu import described
from drover_core.model.events import Act, Action, GpuRef, NodeOutage
from drover_proto import fleet_pb2 as pb

FORCE = "--force does it all the same (over TLS an admin's)"
CANNOT = "its scheduler cannot take one GPU of a node out of service"
SHOWN = 16  # UUIDs in a refusal


def asks_for_gpu(request: pb.ActRequest) -> bool:
    return request.HasField("gpu") or bool(request.gpu_uuid)


def subject_of(facts: ApiSnapshot, request: pb.ActRequest) -> str:
    """Return what an act is about, as the audit names it: a GPU by its slot, where that is known."""
    if not asks_for_gpu(request):
        return request.node
    if request.HasField("gpu"):
        return f"{request.node} GPU {request.gpu}"
    slots = [slot for slot, uuid in _boards(facts, request.node).items() if _same(uuid, request.gpu_uuid)]
    dispatcher = facts.pipeline.dispatcher
    outage = None if dispatcher is None else dispatcher.context.gpus.at(request.node, request.gpu_uuid.strip())
    if outage is not None:
        slots = [gpu_of(outage).slot]
    return f"{request.node} GPU {slots[0] if slots else request.gpu_uuid[:64]}"


def _boards(facts: ApiSnapshot, node: str) -> dict[int, str]:
    """Return slot -> UUID, as the node reports them."""
    now = facts.pipeline.engine.now_of(node)
    return {} if now is None else {slot: uuid for slot, uuid in sorted(now.boards.items()) if uuid}


def _same(uuid: str, asked: str) -> bool:
    return uuid.casefold() == asked.strip().casefold()


def named_gpu(facts: ApiSnapshot, request: pb.ActRequest) -> GpuRef:
    """Return the GPU that is meant, as its node reports it. Raises ActError: it is not known which."""
    node, boards = request.node, _boards(facts, request.node)
    if request.gpu_uuid:
        slots = [slot for slot, uuid in boards.items() if _same(uuid, request.gpu_uuid)]
        if not slots:
            there = ", ".join(f"{slot}: {uuid}" for slot, uuid in list(boards.items())[:SHOWN])
            raise ActError(f"{node} reports no GPU {request.gpu_uuid[:64]}; it has {there or 'reported no UUID'}")
        slot = request.gpu if request.HasField("gpu") else slots[0]
        if slot not in slots:
            is_now = boards.get(slot, "not known")
            raise ActError(f"GPU {slot} of {node} is {is_now}, not {request.gpu_uuid[:64]}: look again")
    else:
        slot, count = request.gpu, facts.index.nodes[facts.node_number(node)].gpus
        if slot >= count:
            raise ActError(f"{node} has no GPU {slot}: the fleet file gives it {count}, from 0 on")
    if not (uuid := boards.get(slot, "")):
        raise ActError(f"{node} has not reported the UUID of GPU {slot}, by which it would go out")
    if list(boards.values()).count(uuid) > 1:
        raise ActError(f"{node} reports {uuid} in two slots: it is not clear which GPU that is")
    return GpuRef(slot, uuid)


def drain_gpu(facts: ApiSnapshot, dispatcher: ActionDispatcher, request: pb.ActRequest, why: str, by: str) -> Action:
    """Store the intent, if the guard lets the GPU go or the request is forced. Raises ActError, StoreError."""
    node = request.node
    dispatcher.check(node)
    if hindrance := _hindrance(facts, dispatcher, node):
        raise ActError(f"{hindrance}; {_whole(node)}")
    gpu = named_gpu(facts, request)
    with dispatcher.context.gpus.requested(node, gpu.uuid):
        if not request.force and (why_not := _held(facts, node, gpu)):
            raise ActError(f"the guard holds it back: {why_not}; {FORCE}")
        seed = f"{by} {gpu.uuid} {facts.now_ms()}"
        return dispatcher.intend(node, Act.ISOLATE_GPU, seed, "", why, by, forced=request.force, gpu=gpu)


def drained(action: Action) -> pb.ActReply:
    """Return the answer to a drain of one GPU. Where its scheduler cannot do that, it says what can be done."""
    refused = action.gpu is not None and action.gpu.refused
    detail = f"{action.detail}; {_whole(action.node)}" if refused else action.detail
    return pb.ActReply(action_id=action.id, state=action.state, detail=detail)


def outage_of(dispatcher: ActionDispatcher, request: pb.ActRequest) -> NodeOutage | None:
    """Return the outage of the GPU that a return is about; None: Drover has it not out.

    Raises:
        ActError: slot and UUID are of two GPUs.
    """
    found = dispatcher.context.gpus.at(request.node, which(request))
    if found is not None and request.HasField("gpu") and gpu_of(found).slot != request.gpu:
        raise ActError(f"{gpu_of(found).uuid} went out of slot {gpu_of(found).slot}, not {request.gpu}: look again")
    return found


def which(request: pb.ActRequest) -> int | str:
    return request.gpu_uuid.strip() or request.gpu


Known = tuple[GpuRef | None, NodeOutage | None]  # which GPU is meant, if that is known; its outage, if it is out


def preview(facts: ApiSnapshot, request: pb.ActRequest, act: Act, reply: pb.ActPreview) -> Known:
    """Fill in what an act on one GPU would meet. Nothing is done."""
    dispatcher, node = facts.pipeline.dispatcher, request.node
    if dispatcher is None or (why_not := dispatcher.acts_not(node)):
        reply.hindrance = OBSERVES if dispatcher is None else why_not
        return None, None
    if act not in (Act.DRAIN, Act.RESUME):
        reply.hindrance = only_nodes(act)
        return None, None
    try:
        if act is Act.DRAIN:
            return _preview_drain(facts, dispatcher, request, reply)
        outage = outage_of(dispatcher, request)
    except ActError as error:
        reply.hindrance = str(error)
        return None, None
    if outage is None and (was := dispatcher.context.gpus.replaced_board(node, which(request))) is not None:
        reply.hindrance = dispatcher.gpu_returns.why_kept(was)
        reply.grounds.append(f"{was.reason}. A resume deletes its rule: it then stays in service.")
        return gpu_of(was), None
    if outage is None:
        reply.hindrance = f"Drover has not taken it out alone: `drover explain {node}` says what is out"
        return None, None
    reply.stage = str(outage.stage)
    if dispatcher.returns.validator is not None and dispatcher.context.config.validate:
        reply.validates = dispatcher.context.config.validate_level
    return gpu_of(outage), outage


def _preview_drain(
    facts: ApiSnapshot, dispatcher: ActionDispatcher, request: pb.ActRequest, reply: pb.ActPreview
) -> Known:
    node = request.node
    if hindrance := _hindrance(facts, dispatcher, node):
        reply.hindrance = f"{hindrance}; {_whole(node)}"
        return None, None
    gpu = named_gpu(facts, request)
    outage = dispatcher.context.gpus.current.get(gpu.uuid)
    others = facts.index.nodes[facts.node_number(node)].gpus - 1
    reply.grounds.append(
        f"No new pod gets {described(gpu, node)}; one that holds it runs to its end. The other {others} GPUs"
        " stay in service. It comes back when somebody resumes it, not by itself."
    )
    if outage is not None and is_out(outage):
        reply.stage = str(outage.stage)
        reply.grounds.append(f"It is isolated already: {outage.reason.rstrip('.')}.")
    reply.guard = _held(facts, node, gpu)
    try:
        if why := dispatcher.ask(node, lambda actuator: _alone(actuator, node, gpu)):
            reply.hindrance = f"{why}; {_whole(node)}"
    except LaterError as error:
        reply.grounds.append(f"Whether its scheduler can take it alone is not known now: {error}.")
    return gpu, outage if is_out(outage) else None


def only_nodes(act: Act) -> str:
    if act is Act.ISOLATE:
        return "isolate evicts the pods of a whole node; drover drain NODE --gpu takes out one GPU, whose pod may end"
    return f"{act} takes a node; only drain and resume take one GPU"


def _hindrance(facts: ApiSnapshot, dispatcher: ActionDispatcher, node: str) -> str:
    if facts.index.nodes[facts.node_number(node)].gpus < 2:
        return f"{node} has no other GPU"
    actuators = dispatcher.context.actuators
    if why := actuators.gpu_hindrance(node):
        return why
    return "" if isinstance(actuators.of(node), GpuIsolator) else CANNOT


def _alone(actuator: Actuator, node: str, gpu: GpuRef) -> str:
    """Return why a GPU cannot go alone, as its scheduler says now; "": nothing is known against it."""
    return actuator.why_not_alone(node, gpu) if isinstance(actuator, GpuIsolator) else CANNOT


def _held(facts: ApiSnapshot, node: str, gpu: GpuRef) -> str:
    """Return what the guard says against it, as for a node: its caps, not its pace."""

    def asked(engine: Engine) -> str:
        decider = engine.decider
        if decider.away is None:
            return UNSEEN
        if gpu.uuid in decider.gpus.isolated(node):
            return ""  # it takes nothing more away
        crowded = decider.gpus.crowded(node, gpu.uuid)
        return crowded or hold_gpu(decider, node, gpu.uuid, engine.census(), engine.jobs_on(node))

    return facts.pipeline.of_engine(asked)


def _whole(node: str) -> str:
    return f"drover drain {node} --why TEXT takes the whole node"

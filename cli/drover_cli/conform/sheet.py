"""The rows: NVIDIA's requirements for AI clouds about telemetry, breakfix and capacity, each with its checks. Pure.

The text was read on docs.nvidia.com/dsx/ncp/nvidia-requirements-for-ai-clouds/: the pages telemetry-requirements,
breakfix-requirements (BFX01 to BFX03) and capacity-and-fleet-management (CAP01 to CAP03; its further rows are not
here). `asks` is our own short form of it. The telemetry page has no ids: those that begin with TEL are ours.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import TypeVar

from drover_cli.conform.answers import Answer, Evidence, Found, Part, Row, UnreadError, never, share
from drover_core.model.events import Event, Health, Incident
from drover_core.model.jsonform import from_json
from drover_proto import fleet_methods as methods
from drover_proto import fleet_pb2 as pb

PAGE = "https://docs.nvidia.com/dsx/ncp/nvidia-requirements-for-ai-clouds/"
LATENCY_S = 120.0  # the telemetry page: no longer than this
UNHEARD = "no source of Drover reads it"
NO_ACCOUNTS = "Drover knows pools and jobs, and no account, project or tenant"
T = TypeVar("T", Event, Incident)


def _records(of: type[T], texts: Iterable[str]) -> list[T]:
    """
    Raises:
        UnreadError: one has what this version does not know, as of a newer collector.
    """
    try:
        return [from_json(of, text) for text in texts]
    except (ValueError, KeyError, TypeError) as error:
        raise UnreadError(f"this version of the command cannot read an answer of the collector: {error}") from None


# ---- telemetry


def _delivered(signal: str) -> Callable[[Evidence], Found]:
    def check(evidence: Evidence) -> Found:
        system = evidence.of(methods.GET_SYSTEM)
        own = [state for state in system.exporters if state.kind == f"otlp_{signal}"]
        if own:
            return min((_on_time(state, system.ts_ms) for state in own), key=lambda found: _BEST.index(found[0]))
        other = [state for state in system.exporters if signal == "metrics" and state.kind == "remote_write"]
        for state in other:
            answer, proof = _on_time(state, system.ts_ms)
            return (Answer.PARTLY if answer is Answer.YES else answer), f"by remote_write, and not by OTLP: {proof}"
        return Answer.NO, f"no exporter sends {signal} by OTLP; set [[export.otlp]]"

    return check


_BEST = (Answer.YES, Answer.PARTLY, Answer.UNKNOWN, Answer.NO)


def _on_time(state: pb.ExporterState, now_ms: int) -> Found:
    """Judge one queue by what its receiver took, and by what waits."""
    if state.trouble:
        return Answer.NO, f"{state.name}: {state.waiting} wait; the receiver: {state.trouble}"
    if not state.HasField("latency_s"):
        return Answer.UNKNOWN, f"{state.name}: its receiver has taken nothing yet"
    age_s = (now_ms - state.taken_ms) / 1000 if state.kind != "otlp_logs" else 0.0  # lines come when something happens
    late_s = max(state.latency_s, age_s, state.oldest_s)
    text = f"{state.name}: {state.sent} taken, the newest {state.latency_s:.1f} s after its time"
    if late_s > LATENCY_S:
        return Answer.NO, f"{text}; what is due is {late_s:.0f} s old"
    if state.lost:
        return Answer.PARTLY, f"{text}; {state.lost} lost since the start"
    return Answer.YES, text


def _specified(evidence: Evidence) -> Found:
    kinds = Counter(state.kind for state in evidence.of(methods.GET_SYSTEM).exporters)
    sent = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items())) or "none"
    return (
        Answer.UNKNOWN,
        f"the list of metrics and logs is given to the provider and not public; exporters here: {sent}",
    )


def _east_west(evidence: Evidence) -> Found:
    fabric = evidence.of(methods.GET_FABRIC)
    ports = sum(leaf.ports for leaf in fabric.leafs)
    known = ports - sum(leaf.ports_unknown for leaf in fabric.leafs)
    if not known:
        return Answer.NO, f"0 of {ports} ports have values"
    return Answer.PARTLY, f"{known} of {ports} ports of nodes have values; switches themselves are not read"


def _nvswitch(evidence: Evidence) -> Found:
    names = ("nvlink_active_links", "fabric_state")
    with_values = sum(
        any(value.present and value.metric in names for gpu in node.gpus for value in gpu.values)
        for node in evidence.nodes()
    )
    answer, text = share(with_values, len(evidence.nodes()), "nodes looked at have values of their GPUs' NVLinks")
    return (Answer.PARTLY, f"{text}; switch trays are not read") if answer is Answer.YES else (answer, text)


def _host_network(evidence: Evidence) -> Found:
    nodes = evidence.nodes()
    have = sum(any(value.present for link in node.links for value in link.values) for node in nodes)
    answer, text = share(have, len(nodes), "nodes looked at have values of their ports")
    return (
        (Answer.PARTLY, f"{text}, in the API alone: no exporter sends ports")
        if answer is Answer.YES
        else (answer, text)
    )


def _syslogs(evidence: Evidence) -> Found:
    nodes = evidence.nodes()
    reading = sum(
        any(value.metric == "source_kmsg_outcome" and value.present and value.value == 0 for value in node.values)
        for node in nodes
    )
    answer, text = share(reading, len(nodes), "nodes looked at have their kernel log read")
    if answer is Answer.NO:
        return answer, text
    logs, why = _delivered("logs")(evidence)
    if logs is Answer.UNKNOWN:
        raise UnreadError(why)
    if logs is Answer.NO:
        return Answer.NO, f"{text}, but nothing of it is sent on: {why}"
    return Answer.PARTLY, f"{text}: lines about hardware are sent on, others are not"


def _events_of(*sources: str) -> Callable[[Evidence], Found]:
    """Return whether events of these sources came within a day."""

    def check(evidence: Evidence) -> Found:
        events = _records(Event, evidence.of(methods.LIST_EVENTS).events_json)
        found = Counter(event.source for event in events)
        listed = ", ".join(f"{name or 'not named'} {count}" for name, count in sorted(found.items())) or "no event"
        have = sum(found[name] for name in sources)
        return (
            Answer.PARTLY if have else Answer.NO
        ), f"{have} events of it; sources of the last day's events: {listed}"

    return check


# ---- breakfix


def _can(act: str) -> Callable[[Evidence], Found]:
    def check(evidence: Evidence) -> Found:
        asked = {node: preview for (node, of), preview in evidence.previews.items() if of == act}
        if not asked:
            raise UnreadError(evidence.unread.get("PreviewAct", "no node reports, so none could be asked about"))
        why = Counter(preview.hindrance for preview in asked.values() if preview.hindrance)
        answer, text = share(len(asked) - why.total(), len(asked), f"nodes looked at can be acted on: {act}")
        return answer, f"{text}; {why.most_common(1)[0][0]}" if why else text

    return check


def _reports_maintenance(evidence: Evidence) -> Found:
    reply = evidence.of(methods.LIST_SILENCES)
    if not reply.may_change:
        raise UnreadError("this caller may only read; ask with an operator's certificate")
    return Answer.YES, f"this caller may report it for nodes and racks, at most {reply.max_hours:g} h at once"


def _replaces(evidence: Evidence) -> Found:
    policy = evidence.of(methods.GET_POLICY)
    if not policy.HasField("opens_tickets"):
        return Answer.NO, "this collector only observes, so it opens no ticket"
    if not policy.opens_tickets:
        return Answer.NO, "neither act.repair_command nor act.repair_webhook is set"
    return Answer.YES, "a node that fails validation gets a ticket, by the settings"


def _maintenance_events(evidence: Evidence) -> Found:
    windows = sum(
        '"maintenance":true' in text.replace(" ", "") for text in evidence.of(methods.LIST_SILENCES).silences_json
    )
    return Answer.YES, f"ListSilences answers with {windows} maintenance windows: open, planned, or of the last 30 days"


def _repair_history(evidence: Evidence) -> Found:
    reply = evidence.of(methods.LIST_ACTIONS)
    return (
        Answer.YES,
        f"ListActions answers with {len(reply.actions)} actions and {len(reply.duties)} nodes out of service",
    )


def _event_has(name: str, has: Callable[[Incident], bool]) -> Callable[[Evidence], Found]:
    def check(evidence: Evidence) -> Found:
        known = _records(Incident, evidence.of(methods.LIST_INCIDENTS).incidents_json)
        return share(sum(map(has, known)), len(known), f"incidents of 30 days have {name}")

    return check


def _closed(evidence: Evidence) -> Found:
    known = _records(Incident, evidence.of(methods.LIST_INCIDENTS).incidents_json)
    ended = [incident for incident in known if incident.closed_ms is not None]
    if not ended:
        raise UnreadError(f"none of {len(known)} incidents of 30 days is closed yet")
    return share(
        sum((i.closed_ms or 0) >= i.opened_ms > 0 for i in ended), len(ended), "closed incidents have its time"
    )


def _ticket_ids(evidence: Evidence) -> Found:
    linked = sum(bool(of.tickets) for of in evidence.of(methods.LIST_INCIDENTS).handling.values())
    if linked:
        return Answer.PARTLY, f"people have linked tickets to {linked} incidents; nothing links them by itself"
    tickets = [a for a in evidence.of(methods.LIST_ACTIONS).actions if a.act == "repair" and a.state == "done"]
    if not tickets:
        return Answer.NO, "no ticket was opened or linked; an incident's id is not a ticket's"
    return Answer.PARTLY, f"{len(tickets)} tickets have the id that Drover gave them, not that of the other system"


def _inventory_has(what: str, *names: str) -> Callable[[Evidence], Found]:
    """Return whether the inventories of nodes have a key of one of these names, such as `vbios` or `gpu0.vbios`."""

    def check(evidence: Evidence) -> Found:
        nodes, ends = evidence.nodes(), tuple(f".{name}" for name in names)
        have = sum(
            any(
                value and key.endswith(ends)
                for key, value in ((f".{key}", value) for key, value in node.inventory.items())
            )
            for node in nodes
        )
        return share(have, len(nodes), f"nodes looked at report {what}")

    return check


def _gpu_serials(evidence: Evidence) -> Found:
    gpus = [gpu for node in evidence.nodes() for gpu in node.gpus]
    return share(sum(bool(gpu.serial) for gpu in gpus), len(gpus), "GPUs looked at report their serial number")


# ---- capacity


def _delivered_nodes(evidence: Evidence) -> Found:
    status = evidence.of(methods.GET_STATUS)
    if not status.nodes_expected:
        return Answer.NO, "the fleet has no node"
    pools = len(evidence.of(methods.GET_CAPACITY).pools)
    return Answer.PARTLY, f"{status.nodes_expected} nodes, {status.gpus_expected} GPUs, pools: {pools}; {NO_ACCOUNTS}"


def _healthy(evidence: Evidence) -> Found:
    status = evidence.of(methods.GET_STATUS)
    healthy, unknown = (status.gpus_by_health.get(health, 0) for health in (Health.HEALTHY, Health.UNKNOWN))
    if status.gpus_expected <= unknown:
        return Answer.NO, f"the health of all {status.gpus_expected} GPUs is unknown"
    return Answer.PARTLY, f"{healthy} of {status.gpus_expected} GPUs are healthy, {unknown} unknown; {NO_ACCOUNTS}"


def _in_use(evidence: Evidence) -> Found:
    capacity = evidence.of(methods.GET_CAPACITY)
    if not capacity.judged_ms:
        return Answer.NO, "nothing was judged in the last minute, so what is held is not known"
    held, gpus = sum(pool.held for pool in capacity.pools), sum(pool.gpus for pool in capacity.pools)
    return Answer.PARTLY, f"{held} of {gpus} GPUs are held by jobs; {NO_ACCOUNTS}"


def _of_nodes(listed: pb.NodeList, have: int, text: str) -> Found:
    """As `share`, but nodes that were not listed are not known to have it."""
    answer, proof = share(have, len(listed.nodes), text)
    if listed.total <= len(listed.nodes):
        return answer, proof
    return Answer.PARTLY if answer is Answer.YES else answer, f"{proof}; {listed.total} nodes in all"


def _each_node(text: str, has: Callable[[pb.NodeRow], bool]) -> Callable[[Evidence], Found]:
    def check(evidence: Evidence) -> Found:
        listed = evidence.of(methods.LIST_NODES)
        return _of_nodes(listed, sum(map(has, listed.nodes)), f"nodes have {text}")

    return check


def _field(*names: str) -> Callable[[Evidence], Found]:
    """Return whether what is answered of a node has a field with one of these names."""

    def check(evidence: Evidence) -> Found:
        nodes, fields = evidence.of(methods.LIST_NODES).nodes, [field.name for field in pb.NodeRow.DESCRIPTOR.fields]
        named = [name for name in names if name in fields]
        if not named:
            return Answer.NO, f"{len(nodes)} nodes are listed with {len(fields)} fields, and none of them is {names[0]}"
        return share(
            sum(any(getattr(node, name) for name in named) for node in nodes), len(nodes), f"nodes have {named[0]}"
        )

    return check


def _nodes_in_use(evidence: Evidence) -> Found:
    if not evidence.of(methods.GET_CAPACITY).judged_ms:
        return Answer.NO, "nothing was judged in the last minute, so it is not known"
    listed, looked = evidence.of(methods.LIST_NODES), evidence.nodes()
    reading = sum(map(_reads_jobs, looked))
    if not reading:
        raise UnreadError(f"none of {len(looked)} nodes looked at reports which jobs hold its GPUs")
    known = [node for node in listed.nodes if node.health != Health.UNKNOWN]
    answer, text = _of_nodes(listed, len(known), "nodes are known to be in use or not")
    text = f"{text}: {sum(bool(node.jobs) for node in known)} have a job"
    if reading < len(looked):
        return Answer.PARTLY, f"{text}; {reading} of {len(looked)} nodes looked at report which jobs hold their GPUs"
    return answer, text


def _reads_jobs(node: pb.NodeDetail) -> bool:
    """Return True if a missing job means that none holds the node's GPUs. Without an agent nothing reads that."""
    return bool(node.row.jobs) or any(
        value.metric == "source_jobs_outcome" and value.present and value.value == 0 for value in node.values
    )


def _discovered(evidence: Evidence) -> Found:
    listed = evidence.of(methods.LIST_REPORTING).nodes
    reporting = [node for node in listed if node.last_seen_ms]
    new = [node for node in reporting if not node.in_file]
    if not reporting:
        return Answer.NO, f"none of {len(listed)} nodes has ever reported, so a new one is not seen"
    return Answer.YES, f"ListReporting answers with {len(listed)} nodes; {len(new)} report and are new to the fleet"


def _reasons(evidence: Evidence) -> Found:
    adopted = sum(node.adopted for node in evidence.of(methods.LIST_REPORTING).nodes)
    whys = sum('"adopt"' in text for text in evidence.of(methods.LIST_AUDIT).audit_json)
    if not adopted or not whys:
        return Answer.NO, "no node was taken in by name with a reason; a fleet file has none"
    return (
        Answer.PARTLY,
        f"{adopted} nodes were taken in, and the audit has {whys} reasons; those of the file have none",
    )


HEALTHS = frozenset(Health) - {Health.UNKNOWN}
ROWS: tuple[Row, ...] = (
    Row(
        "TEL-DELIVERY",
        "telemetry, delivery",
        "metrics and logs natively by OTLP, at most 120 s late",
        PAGE + "telemetry-requirements",
        (
            Part("metrics", _delivered("metrics")),
            Part("logs", _delivered("logs")),
        ),
    ),
    Row(
        "TEL-SCOPE",
        "telemetry, scope",
        "the metrics and logs of a specification that the provider gets",
        PAGE + "telemetry-requirements",
        (Part("specified metrics and logs", _specified),),
    ),
    Row(
        "TEL-NETWORK",
        "telemetry, network",
        "telemetry of five networks",
        PAGE + "telemetry-requirements",
        (
            Part("north-south network", never(UNHEARD)),
            Part("east-west network", _east_west),
            Part("management network", never(UNHEARD)),
            Part("NVSwitch fabric", _nvswitch),
            Part("host network", _host_network),
        ),
    ),
    Row(
        "TEL-LOGS",
        "telemetry, logs",
        "logs of networks and nodes",
        PAGE + "telemetry-requirements",
        (
            Part("Fabric Manager logs", _events_of("fabric_manager")),
            Part("Subnet Manager logs", _events_of("subnet_manager")),
            Part("VPC flow logs", _events_of("vpc_flow")),
            Part("UFM event logs", _events_of("ufm")),
            Part("switch logs", _events_of("switch")),
            Part("switch syslogs", _events_of("switch_syslog")),
            Part("switch kernel logs", _events_of("switch_kernel")),
            Part("BMC SEL logs", _events_of("bmc_sel", "sel")),
            Part("syslogs", _syslogs),
        ),
    ),
    Row(
        "BFX01",
        "breakfix lifecycle",
        "acts on a node, without harm to the rest of a tenancy",
        PAGE + "breakfix-requirements",
        (
            Part("power-cycle a node", _can("reboot")),
            Part("reset the GPUs of a node", _can("reset")),
            Part("report a node or rack for maintenance", _reports_maintenance),
            Part("cordon: no new jobs, running ones end", _can("drain")),
            Part("ask for a replacement", _replaces),
            Part("NVLink is set up again without the node", never("no act of Drover sets up NVLink partitions")),
        ),
    ),
    Row(
        "BFX02",
        "breakfix events",
        "questions about maintenance, retirement and repairs, with certain fields",
        PAGE + "breakfix-requirements",
        (
            Part("maintenance now and to come", _maintenance_events),
            Part("retirement notices", never("Drover keeps none")),
            Part("repairs, then and now", _repair_history),
            Part("open date", _event_has("an open date", lambda i: i.opened_ms > 0)),
            Part("update date", _event_has("an update date", lambda i: i.updated_ms > 0)),
            Part("close date", _closed),
            Part("stable id of the hardware", _event_has("a node's name", lambda i: bool(i.node or i.members))),
            Part("category of the hardware", _event_has("a kind", lambda i: bool(i.kind))),
            Part("description of the fault", _event_has("a summary", lambda i: bool(i.summary))),
            Part("category of the action", _event_has("an action", lambda i: bool(i.action))),
            Part("provider account", _field("account")),
            Part("ticket id", _ticket_ids),
            Part("handover date of the node", _field("handover_ms", "created_ms")),
        ),
    ),
    Row(
        "BFX03",
        "diagnostics",
        "serial numbers and firmware versions of hardware",
        PAGE + "breakfix-requirements",
        (
            Part("serial of the chassis", _inventory_has("a serial of the chassis", "host.serial")),
            Part("serial of the baseboard", _inventory_has("a serial of the baseboard", "host.board_serial")),
            Part("id of network adapters", _inventory_has("a GUID or MAC of an adapter", "guid", "mac")),
            Part("serial of CPUs", never(UNHEARD)),
            Part("serials of GPUs", _gpu_serials),
            Part("firmware of the host", _inventory_has("a BIOS version", "host.bios_version", "bios")),
            Part("firmware of GPUs", _inventory_has("a VBIOS version", "vbios")),
            Part("firmware of network adapters", _inventory_has("an adapter's firmware", "firmware")),
            Part("firmware of NV switch trays", never(UNHEARD)),
        ),
    ),
    Row(
        "CAP01",
        "governance metrics",
        "nodes and GPUs delivered, healthy, reserved and in use, by account",
        PAGE + "capacity-and-fleet-management",
        (
            Part("delivered", _delivered_nodes),
            Part("healthy", _healthy),
            Part("reserved", never(f"reservations of schedulers are not read; {NO_ACCOUNTS}")),
            Part("in use", _in_use),
        ),
    ),
    Row(
        "CAP02",
        "governance API",
        "ten fields of each node",
        PAGE + "capacity-and-fleet-management",
        (
            Part("node id", _each_node("a name", lambda node: bool(node.name))),
            Part("health state", _each_node("a known health", lambda node: node.health in HEALTHS)),
            Part("instance id", _field("instance_id", "instance")),
            Part("creation time", _field("created_ms", "handover_ms")),
            Part("hardware type", _each_node("a model", lambda node: bool(node.sku))),
            Part("GPU count", _each_node("a GPU count above 0", lambda node: len(node.gpu_health) > 0)),
            Part("top-level account", _field("account")),
            Part("project", _field("project", "tenant")),
            Part("in use", _nodes_in_use),
            Part("region", _field("region")),
        ),
    ),
    Row(
        "CAP03",
        "resource discovery API",
        "new capacity is found by an API, with a stable id and a reason",
        PAGE + "capacity-and-fleet-management",
        (
            Part("new nodes are listed", _discovered),
            Part("stable id", _gpu_serials),
            Part("why it is provided", _reasons),
        ),
    ),
)

"""The answers of REST. Made by client/generate.py: change nothing here."""

from __future__ import annotations

from typing import Any, TypedDict


class ActPreview(TypedDict):
    may_act: bool
    hindrance: str
    guard: str
    jobs: list[JobThere]
    stage: str
    mode: str
    maintenance: str
    safe: bool | None
    grounds: list[str]
    validates: str
    no_force: bool


class ActReply(TypedDict):
    action_id: str
    state: str
    detail: str


class Action(TypedDict):
    id: str
    decision_id: str
    incident_id: str
    node: str
    action: str
    actuator: str
    state: str
    time: str | None
    detail: str
    by: str
    attempts: int
    why: str
    before: str
    forced: bool
    running: bool
    foreign: bool
    saving: Saving | None
    gpu: GpuRef | None


class ActionLine(TypedDict):
    id: str
    node: str
    act: str
    state: str
    detail: str
    by: str
    why: str
    time: str | None
    incident_id: str
    actuator: str
    attempts: int
    gpu: int | None
    gpu_uuid: str


class ActionList(TypedDict):
    actions: list[ActionLine]
    duties: list[DutyLine]
    gpus: list[DutyLine]
    next_cursor: str | None


class AdoptReply(TypedDict):
    detail: str


class AgentTrouble(TypedDict):
    node: str
    kind: str
    text: str
    since: str | None


class AgentVersion(TypedDict):
    version: str
    nodes: int


class AgentsState(TypedDict):
    expected: int
    reporting: int
    connected: int
    versions: list[AgentVersion]
    troubles: list[AgentTrouble]
    trouble_counts: dict[str, int]
    lag_median_s: float | None
    lag_max_s: float | None
    clock_worst_s: float | None


class Annotation(TypedDict):
    id: str
    time: str
    timeEnd: str
    title: str
    text: str
    tags: str
    url: str


class Answered(TypedDict):
    decisions: list[Decision]


class Audit(TypedDict):
    id: str
    time: str | None
    by: str
    what: str
    subject: str
    why: str
    detail: str
    state: str


class AuditList(TypedDict):
    audit: list[Audit]
    next_cursor: str | None


class Availability(TypedDict):
    name: str
    gpus: int
    in_ms: int
    out_ms: int
    lost_ms: int
    silent_ms: int
    unknown_ms: int
    available: float | None
    interruptions: int
    between_ms: int | None
    recovered: int
    recovery_ms: int | None
    pool: str
    kept_ms: int


class BacktestReply(TypedDict):
    policies: list[BacktestRow]
    incidents: int
    total: int
    since: str | None


class BacktestRow(TypedDict):
    policy: str
    in_force: bool
    wanted: dict[str, int]
    nodes: list[str]
    nodes_out: int
    times: int
    most_out: int
    gpu_hours: float
    held: int
    mass_events: int


Capacity = TypedDict(
    "Capacity",
    {
        "from": "str | None",
        "to": "str | None",
        "judged": "str | None",
        "pools": "list[PoolCapacity]",
        "leafs": "list[LeafCapacity]",
        "idle": "list[IdleHolder]",
        "lost": "list[LostHours]",
        "services": "list[ServiceSpeed]",
        "currency": str,
        "idle_after_s": float,
        "untold": int,
        "services_trouble": str,
    },
)

Change = TypedDict("Change", {"from": "str | None", "to": "str | None", "kind": str, "text": str, "nodes": int})


class ChangeList(TypedDict):
    changes: list[Change]
    total: int


class Decision(TypedDict):
    id: str
    incident_id: str
    time: str | None
    node: str
    wanted: str
    mode: str
    outcome: str
    rule: str
    reason: str
    takes: bool
    cause: str
    save_s: float
    gpu: GpuRef | None
    forgeable: bool


class DecisionList(TypedDict):
    decisions: list[Decision]
    may_answer: bool
    next_cursor: str | None


class DetectionState(TypedDict):
    role: str
    holder: str
    lease_left_s: float | None
    lease_s: float
    newest_tick: str | None
    tick_s: float
    interval_s: float
    read_s: float
    judge_s: float
    rollup_s: float
    ticks: int
    skipped: int
    failures: int
    detectors: list[DetectorState]
    events_waiting: int
    outcomes_waiting: int


class DetectorState(TypedDict):
    name: str
    seconds: float
    failures: int
    newest_failure: str


class DutyLine(TypedDict):
    node: str
    stage: str
    time: str | None
    incident_id: str
    reason: str
    by: str
    returns: int
    gpu_hours_lost: float
    waits_for: str
    gpu: int | None
    uuid: str


class Event(TypedDict):
    id: str
    time: str | None
    node: str
    gpu: int | None
    kind: str
    code: str
    message: str
    source: str
    backlog: bool
    count: int
    received: str | None
    clock_suspect: bool
    forgeable: bool
    boot: str


class EventList(TypedDict):
    events: list[Event]
    next_cursor: str | None


Evidence = TypedDict(
    "Evidence",
    {
        "text": str,
        "metric": "str | None",
        "value": "float | None",
        "expected": "float | None",
        "spread": "float | None",
        "peers": "int | None",
        "from": "str | None",
        "to": "str | None",
        "port": str,
        "key": str,
    },
)


class ExporterState(TypedDict):
    name: str
    kind: str
    sent: int
    lost: int
    failures: int
    trouble: str
    waiting: int
    oldest_s: float | None
    latency_s: float | None
    taken: str | None


class Fabric(TypedDict):
    time: str | None
    counted_from: str | None
    leafs: list[LeafRow]
    leafs_total: int
    ports: list[PortRow]
    ports_total: int
    nvlinks: list[NvlinkRow]
    absent: list[str]
    next_cursor: str | None


class GpuDetail(TypedDict):
    gpu: int
    health: str
    reason: str
    job: str
    serial: str
    uuid: str
    pci: str
    model: str
    values: list[Value]


class GpuRef(TypedDict):
    slot: int
    uuid: str
    refused: bool
    order: str
    replaced_by: str


class HealthMoment(TypedDict):
    time: str | None
    gpu: int | None
    health: str
    reason: str
    incident_id: str


class HotGpu(TypedDict):
    node: str
    gpu: int
    rack: str
    temp_c: float | None
    power_w: float | None
    margin_c: float | None
    held_share: float | None
    resistance: float | None
    expected: float | None
    incident: str
    job: str
    summary: str


class IdleHolder(TypedDict):
    job: str
    gpus: int
    idle: int
    since: str | None
    gpu_hours: float
    nodes: list[str]
    pool: str


class Incident(TypedDict):
    id: str
    kind: str
    cause: str
    scope: str
    node: str | None
    gpu: int | None
    members: list[Member]
    opened: str | None
    since: str | None
    closed: str | None
    severity: str
    confidence: float
    action: str
    summary: str
    advice: str
    evidence: list[Evidence]
    timeline: list[Note]
    detectors: list[str]
    job: str | None
    gpu_hours_lost: float | None
    gpu_hours_waited: float | None
    version: int
    updated: str | None
    asked: str | None
    worsened: bool


class IncidentDetail(TypedDict):
    incident: Incident
    decisions: list[Decision]
    events: list[Event]
    notifications: list[str]
    health: str
    health_history: list[str]
    actions: list[Action]
    duties: list[NodeOutage]
    audit: list[Audit]
    may_answer: bool
    probe_orders: list[ProbeOrder]
    probe_verdicts: list[ProbeVerdict]
    silence: SilenceNote | None
    handling: IncidentHandling | None


class IncidentHandling(TypedDict):
    acknowledged_by: str
    acknowledged: str | None
    assignee: str
    tickets: list[str]
    outcome: str
    outcome_by: str


class IncidentList(TypedDict):
    incidents: list[Incident]
    total: int
    silences: dict[str, SilenceNote]
    handling: dict[str, IncidentHandling]
    next_cursor: str | None


class IncidentNoteReply(TypedDict):
    audit: Audit
    handling: IncidentHandling | None


class IngestState(TypedDict):
    samples_per_s: float
    batches_per_s: float
    bytes_per_s: float
    records_per_s: float
    samples: int
    rejected: dict[str, int]
    out_of_range: dict[str, int]
    left_with_agents: int
    backoffs: int
    slowed: int
    store_failures: int
    waiting_bytes: int
    waiting_limit_bytes: int
    unstored_events: int
    calls_refused: dict[str, int]


class InventoryPeers(TypedDict):
    key: str
    usual: str
    having: int
    peers: int


class JobDeath(TypedDict):
    incident_id: str
    kind: str
    cause: str
    node: str
    gpu: int | None
    restarted_as: str


class JobDetail(TypedDict):
    row: JobRow | None
    time: str | None
    gpus: list[JobGpu]
    metrics: list[JobMetric]
    incidents: list[Incident]
    workloads: list[JobWorkload]
    ports: list[PortRow]
    ports_total: int
    saturation_median: float | None
    saturation_max: float | None
    absent: list[str]
    ports_absent: str
    loss: JobLoss | None
    sentence: str
    parallel: str


class JobGpu(TypedDict):
    node: str
    gpu: int
    health: str
    incident: str
    place: str


class JobList(TypedDict):
    jobs: list[JobRow]
    total: int
    hurt: int | None
    next_cursor: str | None


JobLoss = TypedDict(
    "JobLoss",
    {
        "from": "str | None",
        "to": "str | None",
        "held_ms": int,
        "shares": "LedgerShares | None",
        "lost_ms": int,
        "slow_ms": int,
        "parts": "list[JobLossPart]",
        "doubts": "list[str]",
        "phases": "list[JobPhase]",
        "moves": "list[JobMove]",
    },
)


class JobLossPart(TypedDict):
    blame: str
    where: str
    incident: str
    kind: str
    cause: str
    ms: int
    slow_ms: int
    summary: str


class JobMetric(TypedDict):
    metric: str
    values: list[float | None]
    p10: float | None
    median: float | None
    p90: float | None
    known: int


class JobMove(TypedDict):
    job: str
    node: str
    asked: str | None
    answer: str
    text: str
    steps_kept: int | None
    kept_ms: int | None


class JobOwner(TypedDict):
    user: str
    account: str
    team: str
    project: str
    array: str
    het: str
    controller: str
    ray_job: str
    ray_work: str
    said_by: str
    text: str


JobPhase = TypedDict(
    "JobPhase", {"lane": str, "from": "str | None", "to": "str | None", "incident": str, "text": str, "severity": str}
)


class JobRow(TypedDict):
    job: str
    gpus: int
    nodes: int
    since: str | None
    ended: str | None
    incidents: list[str]
    severity: str
    hurt: str
    waiting_share: float | None
    gpu_hours_waited: float | None
    gpu_hours_lost: float | None
    pools: list[str]
    skus: list[str]
    step_time_s: float | None
    tokens_per_s: float | None
    mfu_ratio: float | None
    died: JobDeath | None
    owner: JobOwner | None


class JobSave(TypedDict):
    job: str
    how: str
    signal: str
    to_script: bool
    why_not: str
    answered: str | None
    left: bool
    step: int | None
    step_before: int | None
    saved: str | None
    before: str | None
    asked: str | None


class JobThere(TypedDict):
    job: str
    gpus_here: int
    gpus: int
    nodes: int


class JobWorkload(TypedDict):
    name: str
    nodes: int
    time: str | None
    step_time_s: float | None
    tokens_per_s: float | None
    mfu_ratio: float | None
    ttft_p95_s: float | None
    node: str


class Layout(TypedDict):
    version: str
    racks: list[Rack]
    job_names: list[str]
    jobs: list[int]


class LeafCapacity(TypedDict):
    leaf: str
    nodes: int
    gpus: int
    free: int
    free_nodes: int
    scattered: int
    out_nodes: int


class LeafNode(TypedDict):
    node: str
    state: str
    why: str


class LeafRow(TypedDict):
    name: str
    nodes: list[LeafNode]
    nodes_troubled: int
    ports: int
    ports_down: int
    ports_unused: int
    ports_unknown: int
    errors: float | None
    downs: float | None
    saturation_median: float | None
    saturation_max: float | None
    incident: str
    severity: str
    verdict: str
    switch: bool


Ledger = TypedDict(
    "Ledger",
    {
        "from": "str | None",
        "to": "str | None",
        "total": "LedgerRow | None",
        "pools": "list[LedgerRow]",
        "days": "list[LedgerRow]",
        "jobs": "list[LedgerRow]",
        "other_jobs": "LedgerRow | None",
        "jobs_total": int,
        "nodes": "list[LedgerRow]",
        "nodes_total": int,
        "causes": "list[LedgerCause]",
        "incidents": "list[LedgerIncident]",
        "availability": "list[Availability]",
        "worst_nodes": "list[Availability]",
        "repair": "list[NodeToRepair]",
        "objective": float,
        "currency": str,
        "kwh_price": "float | None",
        "fleet_energy": "LedgerEnergy | None",
        "doubts": "list[str]",
        "moves": "list[JobMove]",
        "teams": "list[LedgerRow]",
    },
)


class LedgerCause(TypedDict):
    kind: str
    cause: str
    incidents: int
    shares: LedgerShares | None
    cost: float | None


class LedgerEnergy(TypedDict):
    mj: int
    known_ms: int
    unknown_ms: int
    cost: float | None


class LedgerIncident(TypedDict):
    id: str
    kind: str
    cause: str
    where: str
    summary: str
    since: str | None
    closed: str | None
    shares: LedgerShares | None
    cost: float | None


class LedgerRow(TypedDict):
    name: str
    shares: LedgerShares | None
    held_ms: int
    gpus: int
    goodput: float | None
    ettr: float | None
    between_ms: int
    interruptions: int
    cost: float | None
    lost_cost: float | None
    energy: LedgerEnergy | None
    pool: str


class LedgerShares(TypedDict):
    useful_ms: int
    waiting_ms: int
    lost_ms: int
    restarting_ms: int
    repeated_ms: int
    idle_ms: int
    unknown_ms: int


class LinkDetail(TypedDict):
    link: str
    values: list[Value]


class LostHours(TypedDict):
    kind: str
    cause: str
    incidents: int
    lost: float
    waited: float
    cost: float | None
    worst: str


class Member(TypedDict):
    node: str
    gpu: int | None


class NodeCondition(TypedDict):
    type: str
    status: str
    reason: str
    message: str
    since: str | None
    standing: str


class NodeDetail(TypedDict):
    row: NodeRow | None
    inventory: dict[str, str]
    gpus: list[GpuDetail]
    values: list[Value]
    incident_ids: list[str]
    events: list[Event]
    links: list[LinkDetail]
    inventory_peers: list[InventoryPeers]
    health: list[HealthMoment]
    conditions: list[NodeCondition]
    conditions_well: int
    conditions_read: str | None
    absent: list[str]


class NodeHeat(TypedDict):
    node: str
    inlet_c: float | None
    gpu_median_c: float | None
    gpu_max_c: float | None
    power_w: float | None
    throttled: int
    incident: str
    fan_min_rpm: float | None


class NodeList(TypedDict):
    nodes: list[NodeRow]
    total: int
    next_cursor: str | None


class NodeOutage(TypedDict):
    node: str
    stage: str
    time: str | None
    incident_id: str
    reason: str
    by: str
    returns: int
    asked: str | None
    waits_for: str
    withheld: str
    passed_before: bool
    incidents: list[str]
    gpu: GpuRef | None


class NodeRow(TypedDict):
    name: str
    rack: str
    leaf: str
    pool: str
    sku: str
    health: str
    reason: str
    gpu_health: list[str]
    last_seen: str | None
    incidents: list[str]
    jobs: list[str]
    agent_version: str
    maintenance: str


class NodeToRepair(TypedDict):
    node: str
    pool: str
    stage: str
    reason: str
    interruptions: int
    lost_ms: int


class Note(TypedDict):
    time: str | None
    text: str
    kind: str
    detector: str
    incident: str
    why: str


class NotifierState(TypedDict):
    name: str
    kind: str
    pending: int
    oldest_s: float
    delivered: int
    tries_failed: int
    given_up: int
    trouble: str


class NvlinkRow(TypedDict):
    gpu: int
    links_up: float | None
    links_usual: float | None
    crc_errors: float | None
    replays: float | None
    recoveries: float | None
    rx_bytes_per_s: float | None
    tx_bytes_per_s: float | None
    incident: str
    absent: str


class Picture(TypedDict):
    layout_version: str
    time: str | None
    cells: list[int]
    legend: list[str]
    low: float
    high: float
    unit: str
    values: list[float | None]


class PolicyState(TypedDict):
    name: str
    mode: str
    ceiling: str
    policy: dict[str, Any]
    breaker: list[Incident]
    out: list[str]
    taken_in_hour: int
    pending: list[Decision]
    held: list[Decision]
    trouble: str
    duties: list[NodeOutage]
    may_answer: bool
    opens_tickets: bool | None


class PoolCapacity(TypedDict):
    pool: str
    nodes: int
    gpus: int
    held: int
    idle: int | None
    unknown: int
    out: int
    free: int
    free_nodes: int
    price: float | None
    gpu_hours_lost: float
    gpu_hours_waited: float
    gpu_hours_out: float


class PortRow(TypedDict):
    node: str
    link: str
    leaf: str
    gpu: int | None
    state: str
    rate_gbps: float | None
    rx_bytes_per_s: float | None
    tx_bytes_per_s: float | None
    saturation: float | None
    errors: float | None
    downs: float | None
    discards: float | None
    trouble: str
    incident: str


class ProbeAsked(TypedDict):
    id: str
    ids: list[str]


class ProbeFigure(TypedDict):
    figure: str
    unit: str
    better: str
    sku: str
    values: list[ProbeValue]
    groups: list[ProbeGroup]
    notes: list[str]
    fleet: list[float | None]
    nodes: int


class ProbeGroup(TypedDict):
    configuration: str
    size: int
    centre: float
    spread: float
    detectable: float


class ProbeHistoryReply(TypedDict):
    figure: str
    unit: str
    points: list[ProbePoint]
    drift: str
    steady: bool | None
    since: str | None


class ProbeList(TypedDict):
    figures: list[ProbeFigure]


class ProbeOrder(TypedDict):
    id: str
    node: str
    gpus: list[int]
    level: str
    probes: list[str]
    why: str
    state: str
    time: str | None
    incident_id: str
    by: str
    detail: str
    group: str
    members: list[str]
    addresses: list[str]
    port: int
    protection: str
    job: str


class ProbeOrderList(TypedDict):
    orders: list[ProbeOrderRow]
    next_cursor: str | None


class ProbeOrderRow(TypedDict):
    order: ProbeOrder
    asked: str | None
    verdicts: list[ProbeVerdict]
    results: list[ProbeResult]


class ProbePoint(TypedDict):
    time: str | None
    value: float | None
    spread: float | None
    order: str
    configuration: str
    level: str


class ProbeResult(TypedDict):
    id: str
    node: str
    gpu: int | None
    probe: str
    time: str | None
    ok: bool | None
    value: float | None
    unit: str
    detail: str
    request: str
    peer: int | None
    spread: float | None
    repeats: int
    level: str
    end: str
    seconds: float | None
    device: str
    tries: int


class ProbeValue(TypedDict):
    node: str
    gpu: int | None
    peer: int | None
    value: float | None
    verdict: str
    text: str
    time: str | None
    expected: float | None
    worse: float | None
    detectable: float | None
    spread: float | None
    order: str
    level: str


class ProbeVerdict(TypedDict):
    request: str
    node: str
    gpu: int | None
    passed: bool | None
    probe: str
    text: str
    time: str | None
    why: str
    incident_id: str
    value: float | None
    expected: float | None
    peers: int | None
    good: list[str]
    drift: str
    drift_since: str | None
    end: str
    measured: list[str]
    shifts: list[str]
    shifted: list[str]


class Rack(TypedDict):
    name: str
    nodes: list[RackNode]


class RackHeat(TypedDict):
    name: str
    row: str
    nodes: int
    gpus: int
    inlet_c: float | None
    inlet_max_c: float | None
    gpu_median_c: float | None
    gpu_max_c: float | None
    gpu_max_at: str
    margin_min_c: float | None
    power_w: float | None
    power_known: int
    limit_w: float | None
    budget_w: float | None
    throttled: int
    poor: int
    incident: str
    severity: str
    cause: str
    summary: str


class RackNode(TypedDict):
    name: str
    gpus: int
    leaf: str
    pool: str
    sku: str


class ReportingList(TypedDict):
    nodes: list[ReportingNode]
    next_cursor: str | None


class ReportingNode(TypedDict):
    name: str
    in_file: bool
    rack: str
    leaf: str
    pool: str
    sku: str
    gpus: int
    gpus_reported: int | None
    model: str
    last_seen: str | None
    agent_version: str
    adopted: bool


class RiskList(TypedDict):
    nodes: list[RiskRow]
    total: int
    days: int
    measured: RiskMeasured | None
    in_trouble: list[TroubledNode]
    in_trouble_total: int
    next_cursor: str | None


class RiskMeasured(TypedDict):
    trace: str
    servers: int
    days: int
    faults: int
    top_share: float
    captured: float
    recency: float
    chance: float
    auc: float
    failed_before: float


class RiskRow(TypedDict):
    node: str
    chance: float
    reasons: list[str]


class Saving(TypedDict):
    wait_s: float
    asked: str | None
    jobs: list[JobSave]


class ScrapingState(TypedDict):
    nodes: int
    pages: int
    failing: int
    with_agent: int
    failing_pages: list[str]
    blind: dict[str, int]
    unused: dict[str, int]


class SearchHit(TypedDict):
    kind: str
    name: str
    detail: str
    node: str
    gpu: int | None
    incident: str
    state: str


class SearchReply(TypedDict):
    hits: list[SearchHit]
    more: bool


class Series(TypedDict):
    node: str
    gpu: int | None
    link: str
    metric: str
    role: str
    values: list[float | None]


class SeriesReply(TypedDict):
    step_ms: int
    time: list[str]
    series: list[Series]


class ServiceSpeed(TypedDict):
    service: str
    servers: int
    nodes: list[str]
    ttft_p50_s: float | None
    ttft_p95_s: float | None
    tokens_per_s: float | None
    running: float | None
    waiting: float | None
    time: str | None


Silence = TypedDict(
    "Silence",
    {
        "id": str,
        "made": "str | None",
        "from": "str | None",
        "until": "str | None",
        "by": str,
        "why": str,
        "node": "list[str]",
        "gpu": "list[int]",
        "rack": "list[str]",
        "leaf": "list[str]",
        "pool": "list[str]",
        "kind": "list[str]",
        "incident": "list[str]",
        "maintenance": bool,
        "ended_by": str,
        "event": str,
    },
)


class SilenceList(TypedDict):
    silences: list[Silence]
    may_change: bool
    max_hours: float
    next_cursor: str | None


class SilenceNote(TypedDict):
    id: str
    by: str
    until: str | None
    why: str
    maintenance: bool
    covers: str
    alone: bool


class SilenceReply(TypedDict):
    silence: Silence
    covers: int


class SimilarIncident(TypedDict):
    id: str
    same: str
    kind: str
    cause: str
    node: str
    gpu: int | None
    since: str | None
    closed: str | None
    done: list[str]
    outcome: str
    again: str | None


class SimilarList(TypedDict):
    incidents: list[SimilarIncident]
    total: int
    since: str | None


class Status(TypedDict):
    fleet: str
    version: str
    time: str | None
    started: str | None
    mode: str
    nodes_expected: int
    nodes_reporting: int
    gpus_expected: int
    gpus_by_health: dict[str, int]
    open_incidents_by_severity: dict[str, int]
    samples_stored: int
    samples_per_s: float
    batches_rejected: int
    newest_sample: str | None
    newest_tick: str | None
    detector_seconds: float
    store_bytes: int
    unknown_nodes: list[str]
    troubles: list[str]
    gpu_hours_lost: float
    gpu_hours_waited: float
    jobs_hurt: int
    policy: str
    tables: list[TableSize]
    store_free_bytes: int | None
    store_days_left: float | None
    retention_days: int
    role: str
    mfu_ratio: float | None
    mfu_gpus: int
    gpus_held: int
    gpus_idle: int | None
    gpus_free: int | None
    pending: int
    receivers: int | None
    blind: list[str]


class StoreState(TypedDict):
    answers: bool
    tables: list[TableSize]
    bytes: int
    retention_days: int
    free_bytes: int | None
    disk_bytes: int | None
    days_left: float | None
    held_s: float | None
    dropped_bytes: int | None
    rollup_marks: int
    rollup_oldest_s: float
    write_s: float
    damaged_parts: int
    kind: str


class System(TypedDict):
    version: str
    time: str | None
    started: str | None
    agents: AgentsState | None
    ingest: IngestState | None
    detection: DetectionState | None
    store: StoreState | None
    notifiers: list[NotifierState]
    troubles: list[str]
    certificate_ends: str | None
    resident_bytes: int
    cpu_cores: float
    agents_address: str
    scraping: ScrapingState | None
    exporters: list[ExporterState]


class TableSize(TypedDict):
    name: str
    rows: int
    bytes: int
    oldest: str | None
    newest: str | None


class Thermals(TypedDict):
    time: str | None
    racks: list[RackHeat]
    hot: list[HotGpu]
    hot_total: int
    nodes: list[NodeHeat]
    absent: list[str]
    held_known: int | None


class Trend(TypedDict):
    days: list[TrendDay]
    pending: int


TrendDay = TypedDict(
    "TrendDay",
    {
        "from": "str | None",
        "util_ratio": "float | None",
        "power_w": "float | None",
        "gpu_hours_lost": "float | None",
        "goodput": "float | None",
        "pending": bool,
    },
)


class TroubledNode(TypedDict):
    node: str
    incident_id: str
    kind: str
    cause: str
    severity: str
    since: str | None
    summary: str


class Value(TypedDict):
    metric: str
    present: bool
    value: float
    time: str | None
    reason: str
    peers_median: float
    peers: int
    own: float | None

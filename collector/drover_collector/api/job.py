"""One job in full: its GPUs against each other, its incidents, its steps, its network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from drover_collector.api import fabric as api_fabric
from drover_collector.api import job_loss
from drover_collector.api import jobs as api_jobs
from drover_collector.api.owners import add_owners
from drover_collector.api.recent_buckets import (
    NOW,
    is_warning,
    last_known,
    recent,
)
from drover_collector.api.snapshot import (
    RECENT_MS,
    ApiSnapshot,
    bad_argument,
    worst_first,
)
from drover_collector.detectors._lib.parallel import JobPlaces, places_of
from drover_collector.fleet.buckets import BUCKET_MS, Floats
from drover_collector.store import JobSpan
from drover_core.jobs.place import words
from drover_core.metrics.catalog import BY_NAME, Scope
from drover_core.model.events import Incident, Member, to_json
from drover_proto import fleet_pb2 as pb

METRICS = (
    "sm_clock_mhz", "tensor_active_ratio", "sm_active_ratio", "gpu_util_ratio", "power_w", "gpu_temp_c",
    "dram_active_ratio", "memory_clock_mhz", "nvlink_rx_bytes_per_s", "pcie_rx_bytes_per_s",
)  # fmt: skip
GPUS_MAX = 512  # drawn; a screen has room for no more dots in a row
FARTHEST = 128  # of them those farthest from the median
PORTS_MAX = 32
INCIDENTS_MAX = 200  # the worst first; a mass event may open thousands on a large job
BEFORE_END_MS = 60_000  # an ended job is shown as it was then
NO_STEPS = (
    "Step time, tokens per second and MFU: nothing reports them on its nodes. A training loop does with three lines of"
    " drover_agent.client.training_steps (docs/how-to/workloads.md)."
)


def get_job(facts: ApiSnapshot, request: pb.JobRequest) -> pb.JobDetail:
    if not request.job:
        raise bad_argument("job is empty; give the name of a job")
    job = api_jobs.find_job(facts, request.job)
    index = facts.index
    if isinstance(job, JobSpan):
        members = facts.store.jobs.members(job.job)
        gpus = [g for node, slot in members if (g := index.gpu(node, slot)) is not None]
        named = api_jobs.incidents_by_job(facts).get(job.job, ())
        row, (ts_ms, values) = api_jobs.ended_row(job, named, api_jobs.running(facts).values()), _then(facts, job)
    else:
        gpus, row = list(job.gpus), api_jobs.row_of(facts, job)
        ts_ms, values = _now(facts)
    add_owners(facts, [row])
    incidents = _incidents(facts, job.job, gpus, job.since_ms, isinstance(job, JobSpan))
    reply = pb.JobDetail(
        row=row, ts_ms=ts_ms if gpus else 0, incidents_json=[to_json(i) for i in incidents[:INCIDENTS_MAX]]
    )  # fmt: skip
    of_gpu = _by_gpu(facts, gpus, incidents)
    table = {m: values[m][gpus] for m in METRICS if m in values and not np.isnan(values[m][gpus]).all()}
    places = None if isinstance(job, JobSpan) else places_of(job.job, gpus, facts.pipeline.engine.inventory.places)
    shown = _shown(table, [g in of_gpu for g in gpus])
    reply.gpus.extend(_gpu(facts, gpus[at], of_gpu.get(gpus[at]), places) for at in shown)
    for metric, column in table.items():
        known = column[~np.isnan(column)]
        low, middle, high = (float(v) for v in np.quantile(known, (0.1, 0.5, 0.9)))
        reply.metrics.add(
            metric=metric, values=column[shown].astype("<f4").tobytes(), p10=low, median=middle, p90=high,
            known=len(known),
        )  # fmt: skip
    if not isinstance(job, JobSpan):
        reply.workloads.extend(api_jobs.summed(facts, _nodes(facts, gpus)))
        _network(facts, reply, gpus)
    over = isinstance(job, JobSpan)
    if not over:
        reply.ports_absent = _ports_absent(reply)
    reply.absent.extend(_absent(reply, over))
    _parallel(reply, places)
    if request.loss:
        job_loss.add_loss(facts, reply, job.job, gpus, incidents)
    reply.sentence = job_loss.sentence_of(reply)
    return reply


def _gpu(facts: ApiSnapshot, g: int, worst: Incident | None, places: JobPlaces | None) -> pb.JobGpu:
    node, slot = facts.index.member(g)
    rank = places.places.get(g) if places is not None else None
    return pb.JobGpu(
        node=node, gpu=slot, health=facts.health_of(node, slot)[0],
        incident=worst.id if worst else "", place=words([rank]) if rank is not None else "",
    )  # fmt: skip


def _parallel(reply: pb.JobDetail, places: JobPlaces | None) -> None:
    """Fill in the sizes of its parallel groups, or why they are not used."""
    if places is not None and places.trouble:
        reply.absent.append(f"Places of its ranks ({places.text}) are not used: {places.trouble}.")
    elif places is not None:
        reply.parallel = places.text


def _now(facts: ApiSnapshot) -> tuple[int, Mapping[str, Floats]]:
    buckets, size = recent(facts), facts.index.gpu_count
    if not buckets:
        return 0, {}
    return buckets[-1].end_ms, {metric: last_known(buckets[-NOW:], Scope.GPU, metric, size) for metric in METRICS}


def _then(facts: ApiSnapshot, job: JobSpan) -> tuple[int, Mapping[str, Floats]]:
    """Shortly before its end."""
    start_ms = max(job.since_ms, job.ended_ms - BEFORE_END_MS) // BUCKET_MS * BUCKET_MS
    return start_ms + BUCKET_MS, facts.store.buckets.values_at(facts.index, Scope.GPU, start_ms, BUCKET_MS, METRICS)


def _nodes(facts: ApiSnapshot, gpus: Sequence[int]) -> list[str]:
    return [facts.index.nodes[n].name for n in np.unique(facts.index.gpu_node[gpus]).tolist()]


def _incidents(facts: ApiSnapshot, job: str, gpus: Sequence[int], since_ms: int, over: bool) -> list[Incident]:
    """That name the job; of one that runs also open ones about what it holds, whatever job they name, if any."""
    members: set[Member] = {facts.index.member(g) for g in gpus} | {(node, None) for node in _nodes(facts, gpus)}
    found = [
        i for i in facts.incidents(max(since_ms, facts.now_ms() - RECENT_MS))
        if i.job == job or (not over and i.job is None and is_warning(i) and members.intersection(i.members))
    ]  # fmt: skip
    return sorted(found, key=worst_first)


def _by_gpu(facts: ApiSnapshot, gpus: Sequence[int], incidents: Sequence[Incident]) -> dict[int, Incident]:
    """The worst open incident of one GPU or node that names a GPU or its node. One of a whole job distinguishes none;
    one of a network port is shown with the port."""
    found: dict[int, Incident] = {}
    ours = set(gpus)
    for incident in incidents:
        if not is_warning(incident) or incident.scope not in ("gpu", "node") or incident.cause in api_fabric.OF_PORTS:
            continue
        for node, slot in incident.members:
            n = facts.index.node_number.get(node)
            if n is None:
                continue
            first, end = int(facts.index.first_gpu[n]), int(facts.index.first_gpu[n + 1])
            for g in range(first, end) if slot is None else (first + slot,):
                if g in ours:
                    found.setdefault(g, incident)
    return found


def _shown(table: Mapping[str, Floats], named: Sequence[bool]) -> list[int]:
    """Places of the GPUs that are drawn, in order: all, or those named, the farthest from the median, and others."""
    count = len(named)
    if count <= GPUS_MAX:
        return list(range(count))
    far = np.zeros(count)
    for column in table.values():
        away = np.abs(column - np.nanmedian(column))
        far = np.fmax(far, away / max(float(np.nanmedian(away)), 1e-9))
    keep = dict.fromkeys(np.flatnonzero(named).tolist()[: GPUS_MAX // 2])
    keep |= dict.fromkeys(np.argsort(-far, kind="stable")[:FARTHEST].tolist())
    for at in np.linspace(0, count - 1, GPUS_MAX).astype(int).tolist():
        if len(keep) < GPUS_MAX:
            keep[at] = None
    return sorted(keep)


def _network(facts: ApiSnapshot, reply: pb.JobDetail, gpus: Sequence[int]) -> None:
    """Ports that serve its GPUs; those that serve none carry other traffic."""
    index, ports = facts.index, api_fabric.all_ports(facts)
    layout, first = ports.layout, index.first_gpu
    serves = np.where(layout.gpu >= 0, first[layout.node] + layout.gpu, -1)
    mine = np.flatnonzero(np.isin(serves, gpus)).tolist()
    reply.ports_total = len(mine)
    reply.ports.extend(ports.row(index, k) for k in ports.worst(mine)[:PORTS_MAX])
    busy = ports.saturation[mine]
    if len(busy) and not np.isnan(busy).all():
        reply.saturation_median, reply.saturation_max = float(np.nanmedian(busy)), float(np.nanmax(busy))


def _absent(reply: pb.JobDetail, over: bool) -> list[str]:
    found = []
    if not reply.metrics:
        found.append("Its GPUs: no values of that time." if over else "Its GPUs: no values of the last minute.")
    elif missing := [BY_NAME[m].label for m in METRICS if m not in {each.metric for each in reply.metrics}]:
        found.append(f"No GPU of it reports: {', '.join(missing)}.")
    if over:
        return [*found, "Steps and network are shown for running jobs only."]
    if not reply.workloads:
        found.append(NO_STEPS)
    return [*found, reply.ports_absent] if reply.ports_absent else found


def _ports_absent(reply: pb.JobDetail) -> str:
    if not reply.ports_total:
        return "Network: no port is known to serve its GPUs; fleet.toml can name them (links)."
    if not reply.HasField("saturation_max") and any(port.state != "down" for port in reply.ports):
        return "Network: its ports do not report their rate and traffic."
    return ""

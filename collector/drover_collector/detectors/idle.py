"""Detect GPUs that a job holds without using them, and free GPUs that no job of whole nodes can use.

Both concern users and the scheduler, not the hardware, so nothing is recommended and no node is suspect. GPUs that a
job holds idle are information after half an hour and a warning after an hour; scattered free GPUs are information only.
A process that keeps a GPU which no job holds, without using it, counts as a job: it was left over, or nobody names the
jobs here. Where processes are not read, memory in use shows one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from drover_collector.detectors._lib.examples import Example, play, small_fleet
from drover_collector.detectors._lib.inventory import Codes
from drover_collector.detectors._lib.metrics import Ints, column
from drover_collector.detectors._lib.robust import Bools
from drover_collector.detectors._lib.texts import duration, listing
from drover_collector.detectors._lib.window import Window
from drover_collector.fleet.buckets import Floats
from drover_collector.fleet.index import FleetIndex
from drover_core.model.events import (
    Evidence,
    Finding,
    Incident,
    IncidentKind,
    RecommendedAction,
    Severity,
)

NAME = "idle"
VERSION = 1
EVERY_MS = 60_000
QUIET_MS = 180_000

# Starts, checkpoints, evaluations and waits for data take minutes. Sites that end idle jobs write to their owners
# first, and end the jobs after two hours (Princeton Research Computing, "Utilization Policies": zero GPU utilisation).
IDLE_MS = 1_800_000
# Princeton's Job Defense Shield sends the first warning after 60 minutes (`first_warning_minutes`).
WARN_MS = 3_600_000
# A job that has used its GPUs before gets the first warning after 240 minutes (`sliding_warning_minutes`), here of one
# GPU: two GPUs cost as much in half the time. An hour passes in any case, and twice its longest earlier break.
USED_GPU_MS, BREAKS = 4 * 3_600_000, 2
USED_MS = 600_000  # less work than this is a start, no use: our own limit
# It also warns at 24 GPU-hours without use (`gpu_hours_threshold_user`, `min_run_time` 30 minutes), there over a week
# and all jobs of a user, here within one job.
COSTLY_MS = 24 * 3_600_000  # of GPUs
IDLE_MS_KEPT = IDLE_MS + 300_000  # most idle time that counts: a longer break ends the idle state
BREAK = 10  # times its length a break subtracts: half a minute in a notebook, or a save of nothing new, is no use
# No kernel in 95 % of the time, and power near idle: an idle H100 takes 70 to 120 W of 700, an A100 45 to 60 W of 400.
IDLE_UTIL = 0.05
IDLE_POWER = 0.3  # of its limit
# Where utilisation is not read, so little of the limit is no work, unless one of these activities says otherwise.
REST_POWER = 0.18
ACTIVITIES = ("sm_active_ratio", "tensor_active_ratio", "dram_active_ratio")
# Bytes per second: a job that copies is working. Polling by drivers and hosts stays below: on strangers' fleets GPUs
# without a kernel had up to 1.2 GB/s on PCIe. 2 GB/s are 6 % of 16 lanes of its fourth generation.
TRAFFIC = {
    "nvlink_tx_bytes_per_s": 1e8,
    "nvlink_rx_bytes_per_s": 1e8,
    "pcie_tx_bytes_per_s": 2e9,
    "pcie_rx_bytes_per_s": 2e9,
}

PROCESSES_MS = 900_000  # for which a count of processes holds: some agents read it each 5 minutes
KEPT_MEMORY = 0.1  # of a GPU's memory in use: the driver alone takes 1 to 3 %, an empty CUDA context .5 GB
# Of the idle GPUs without a job: if more of them, on more nodes than a small job has, are kept, that is a service of
# the site, such as MPS or the replicas of a model.
PROCESSES_SHARE, SERVICE_NODES = 0.5, 3

# Drover's own limits: two nodes' worth of GPUs are free under a leaf, half of them or more on nodes in use.
SCATTERED_NODES = 2
SCATTERED_SHARE = 0.5
WHOLE_SHARE = 0.5  # of the held GPUs belong to jobs of whole nodes: otherwise jobs can use scattered GPUs


@dataclass(slots=True)
class IdleState:
    idle_ms: Ints = field(default_factory=lambda: np.zeros(0, np.int64))  # idle time, except short breaks, [G]
    calm_ms: Ints = field(default_factory=lambda: np.zeros(0, np.int64))  # idle time less BREAK times the breaks, [G]
    longest_ms: Ints = field(default_factory=lambda: np.zeros(0, np.int64))  # idle time that ended in work, [G]
    worked_ms: Ints = field(default_factory=lambda: np.zeros(0, np.int64))  # in this job, [G]
    jobs: Codes = field(default_factory=lambda: np.zeros(0, np.int32))  # each GPU's job, in `job_names`; -1: none
    job_names: tuple[str, ...] = ()
    processes: Floats = field(default_factory=lambda: np.zeros(0))  # newest known count of each GPU, NaN unknown, [G]
    seen_ms: Ints = field(default_factory=lambda: np.zeros(0, np.int64))  # of that count, [G]
    memory: Floats = field(default_factory=lambda: np.zeros(0))  # newest known share in use, NaN unknown, [G]
    memory_ms: Ints = field(default_factory=lambda: np.zeros(0, np.int64))  # of that share, [G]
    kept_ms: Ints = field(default_factory=lambda: np.zeros(0, np.int64))  # idle with a process and without a job, [G]
    scattered_ms: dict[int, int] = field(default_factory=dict)  # leaf -> start
    reported_ms: int = 0
    reopened: Sequence[Incident] = ()  # open when the collector started


def restored(incidents: Sequence[Incident], _index: FleetIndex | None = None, _started_ms: int = 0) -> IdleState:
    """Return state that continues to count from the start of each open incident."""
    return IdleState(reopened=[i for i in incidents if NAME in i.detectors and i.closed_ms is None])


def _resume(window: Window, s: IdleState) -> None:
    bucket, index = window.newest, window.index
    numbers = {name: number for number, name in enumerate(bucket.job_names)}
    s.jobs, s.job_names = np.full(index.gpu_count, -1, np.int32), bucket.job_names
    for incident in s.reopened:
        if incident.cause == "scattered" and incident.members:
            n = index.node_number.get(incident.members[0][0])
            if n is not None:
                s.scattered_ms[int(index.leaf[n])] = incident.since_ms
        for node, slot in incident.members if incident.cause == "process_left" else ():
            g = None if slot is None else index.gpu(node, slot)
            if g is not None:
                s.kept_ms[g], s.processes[g] = max(0, bucket.start_ms - incident.since_ms), 1.0
                s.seen_ms[g] = bucket.end_ms
        for node, slot in incident.members if incident.job in numbers else ():
            g = None if slot is None else index.gpu(node, slot)
            if g is not None:
                s.jobs[g] = numbers[incident.job or ""]
                s.idle_ms[g] = max(0, bucket.start_ms - incident.since_ms)
                s.calm_ms[g] = IDLE_MS_KEPT
    s.reopened = ()


def detect(window: Window, state: IdleState | None, now_ms: int) -> tuple[list[Finding], IdleState]:
    s = state if state is not None else IdleState()
    if not window.fresh:
        return [], s
    bucket = window.newest
    idle = _idle(window)
    if len(s.idle_ms) != window.index.gpu_count:
        s.idle_ms, s.calm_ms = np.zeros(window.index.gpu_count, np.int64), np.zeros(window.index.gpu_count, np.int64)
        s.jobs, s.job_names = np.full(window.index.gpu_count, -1, np.int32), ()
        s.longest_ms, s.worked_ms = np.zeros((2, len(idle)), np.int64)
        s.processes, s.kept_ms = np.full(len(idle), np.nan), np.zeros(len(idle), np.int64)
        s.seen_ms, s.memory_ms = np.zeros((2, len(idle)), np.int64)
        s.memory = np.full(len(idle), np.nan)
        if s.reopened:
            _resume(window, s)
    fresh = (bucket.jobs != _renumbered(s, bucket.job_names)) | (bucket.jobs < 0)
    # A gap in the data counts neither as idle nor as work.
    length = bucket.length_ms * ((idle == 1) - BREAK * (idle == 0))
    s.calm_ms = np.where(fresh, 0, np.clip(s.calm_ms + length, 0, IDLE_MS_KEPT))
    ended = (s.idle_ms > 0) & (s.calm_ms <= 0)
    s.longest_ms = np.where(fresh, 0, np.where(ended, np.maximum(s.longest_ms, s.idle_ms), s.longest_ms))
    s.worked_ms = np.where(fresh, 0, s.worked_ms + bucket.length_ms * (idle == 0))
    before = s.idle_ms
    s.idle_ms = np.where(s.calm_ms > 0, s.idle_ms + np.where(idle == 1, bucket.length_ms, 0), 0)
    s.jobs, s.job_names = bucket.jobs, bucket.job_names
    kept_before = s.kept_ms
    _keep_count(window, s, idle)
    scattered = dict(_scattered(window, s))
    for leaf in [leaf for leaf in s.scattered_ms if leaf not in scattered]:
        del s.scattered_ms[leaf]
    warns = ((before < WARN_MS) & (s.idle_ms >= WARN_MS)).any()
    warns |= ((kept_before < WARN_MS) & (s.kept_ms >= WARN_MS)).any()
    if 0 <= now_ms - s.reported_ms < EVERY_MS and not warns:
        return [], s
    found = [*_jobs(window, s, now_ms), *_left(window, s, now_ms)]
    found += [f for leaf, f in scattered.items() if now_ms - s.scattered_ms[leaf] >= IDLE_MS]
    s.reported_ms = now_ms if found else 0
    return found, s


def _renumbered(s: IdleState, names: tuple[str, ...]) -> Codes:
    """Return the former job of each GPU, numbered by `names`, int32 [G]; -1: none, or the job is gone."""
    if names == s.job_names:
        return s.jobs
    numbers = {name: number for number, name in enumerate(names)}
    table = np.array([*(numbers.get(name, -1) for name in s.job_names), -1], np.int32)
    return np.asarray(table[s.jobs], np.int32)


def could_not_judge(window: Window) -> list[str]:
    if not (window.newest.jobs >= 0).any():
        return ["idle GPUs: no data on which job holds which GPU"]
    if "gpu_util_ratio" not in window.newest.gpu:
        return ["idle GPUs: the data lacks gpu_util_ratio, so only GPUs near their idle power are judged"]
    return []


def _idle(window: Window) -> Floats:
    """Return 1 for an idle GPU, 0 for one at work, NaN where unknown; float64 [G]."""
    util = column(window, "gpu_util_ratio")
    power, limit = column(window, "power_w"), column(window, "power_limit_w")
    work = util >= IDLE_UTIL
    with np.errstate(invalid="ignore"):
        work |= power > IDLE_POWER * limit  # NaN: unknown, judged by the rest
        rests = power <= REST_POWER * limit
    for metric, least in TRAFFIC.items():
        work |= column(window, metric) >= least
    for metric in ACTIVITIES:
        rests &= ~(column(window, metric) >= IDLE_UTIL)
    unread = np.isnan(util)
    return np.where(work, 0.0, np.where(~unread | rests, 1.0, np.nan))


def _jobs(window: Window, s: IdleState, now_ms: int) -> Iterator[Finding]:
    """Yield a finding for each job that holds idle GPUs.

    If they have not cost much yet, but some were idle for an hour, the finding covers only those.
    """
    bucket, index = window.newest, window.index
    long = (s.calm_ms >= IDLE_MS) & (bucket.jobs >= 0)
    for number in np.unique(bucket.jobs[long]).tolist():
        job = bucket.job_names[number]
        held = bucket.jobs == number
        idle = long & held
        hour = idle & (s.idle_ms >= _patience_ms(s, idle))
        costly = int(s.idle_ms[idle].sum()) >= COSTLY_MS
        warn = costly or bool(hour.any())
        gpus = np.flatnonzero(hour if warn and not costly else idle)
        count, total = len(gpus), int(held.sum())
        idle_ms = int(s.idle_ms[gpus].min())
        hours = float(s.idle_ms[gpus].sum()) / 3_600_000
        members = tuple(index.member(int(g)) for g in gpus)
        all_of = f"all its {total} GPUs" if count == total else f"{count} of its {total} GPUs"
        evidence = [Evidence(f"on {listing({node for node, _ in members})}", from_ms=now_ms - idle_ms, to_ms=now_ms)]
        if _known(window, "gpu_util_ratio", gpus):
            util = float(np.nanmedian(column(window, "gpu_util_ratio")[gpus]))
            text = f"no kernel most of the time, {util:.0%} at the median"
            evidence.append(Evidence(text, "gpu_util_ratio", util, IDLE_UTIL))
        if _known(window, "power_w", gpus):
            power = float(np.nanmedian(column(window, "power_w")[gpus]))
            evidence.append(Evidence(f"power near idle, {power:.0f} W at the median", "power_w", power))
        yield Finding(
            NAME, IncidentKind.IDLE, "idle_gpus", "job", None, None, members, now_ms, now_ms - idle_ms,
            Severity.WARNING if warn else Severity.INFO, 0.9, RecommendedAction.NONE,
            f"Job {job} has held {all_of} idle for {duration(idle_ms)} or longer: {hours:.1f} GPU-hours so far.",
            "Ask the job's owner whether it waits for something or requested too many GPUs. The GPUs are healthy.",
            tuple(evidence), job, lost_gpus=float(count),
        )  # fmt: skip


def _patience_ms(s: IdleState, idle: Bools) -> int:
    """Return how long the idle GPUs of a job may be so before it is warned of. `idle`: bool [G]."""
    if not (s.worked_ms[idle] >= USED_MS).any():
        return WARN_MS
    own_ms = min(BREAKS * int(s.longest_ms[idle].max()), USED_GPU_MS)
    return max(WARN_MS, USED_GPU_MS // int(np.count_nonzero(idle)), own_ms)


def _keep_count(window: Window, s: IdleState, idle: Floats) -> None:
    """Add the bucket to how long each GPU without a job has been kept by a process that does not use it.

    A process that holds next to no memory keeps the GPU from nobody.
    """
    bucket = window.newest
    with np.errstate(invalid="ignore", divide="ignore"):
        used = column(window, "framebuffer_used_bytes") / column(window, "framebuffer_total_bytes")
    for now, kept_values, at_ms in (
        (column(window, "compute_processes"), s.processes, s.seen_ms), (used, s.memory, s.memory_ms),
    ):  # fmt: skip
        known = ~np.isnan(now)
        kept_values[known], at_ms[known] = now[known], bucket.end_ms
        kept_values[bucket.end_ms - at_ms > PROCESSES_MS] = np.nan  # the node is silent, or reads it no longer
    memory, unread = s.memory, np.isnan(s.processes)
    free = (bucket.jobs < 0) & (bucket.gpu_rows > 0) & ~(unread & np.isnan(memory))
    kept = free & (unread | (s.processes >= 1)) & ~(memory < KEPT_MEMORY)
    rests = kept & (idle == 1)
    many = rests.sum() > PROCESSES_SHARE * (free & (idle == 1)).sum()
    service = many and len(np.unique(window.index.gpu_node[rests])) > SERVICE_NODES
    added = np.where(rests & ~service, bucket.length_ms, 0)
    ends = (free & ~kept) | (bucket.jobs >= 0) | (unread & np.isnan(memory))
    worked = np.where((idle == 0) | (rests & service), BREAK * bucket.length_ms, 0)
    s.kept_ms = np.where(ends, 0, np.maximum(0, s.kept_ms + added - worked))


def _left(window: Window, s: IdleState, now_ms: int) -> Iterator[Finding]:
    """Yield a finding for each node with processes that keep idle GPUs which no job holds."""
    index = window.index
    for n in np.unique(index.gpu_node[s.kept_ms >= IDLE_MS]).tolist():
        gpus = np.flatnonzero((s.kept_ms >= IDLE_MS) & (index.gpu_node == n))
        warn = bool((s.kept_ms[gpus] >= WARN_MS).any())
        kept_ms, node, count = int(s.kept_ms[gpus].max()), index.nodes[n].name, len(gpus)
        slots = ", ".join(str(int(index.gpu_slot[g])) for g in gpus)
        whose = f"GPU {slots}" if count == 1 else f"GPUs {slots}"
        known = s.processes[gpus[0]] == s.processes[gpus[0]]  # not NaN
        metric = "compute_processes" if known else "framebuffer_used_bytes"
        value = float(s.processes[gpus[0]] if known else column(window, metric)[gpus[0]])
        has = "a process" if known else f"{s.memory[gpus[0]]:.0%} of {'its' if count == 1 else 'their'} memory in use"
        text = f"{whose} of node {node} {'has' if count == 1 else 'have'} {has} and no work for {duration(kept_ms)}"
        fact = Evidence(
            text, metric, None if np.isnan(value) else value, 0.0 if known else None, from_ms=now_ms - kept_ms
        )
        yield Finding(
            NAME, IncidentKind.IDLE, "process_left", "node", node, None,
            tuple(index.member(int(g)) for g in gpus), now_ms, now_ms - kept_ms,
            Severity.WARNING if warn else Severity.INFO, 0.8, RecommendedAction.NONE, f"{text}, and no job holds them.",
            "See whose process it is (nvidia-smi on the node, the node's page). If its job is over, end it: the next"
            " job finds less memory, or fails. The GPUs are healthy.",
            (fact,),
            lost_gpus=float(count),
        )  # fmt: skip


def _known(window: Window, metric: str, gpus: Ints) -> bool:
    return bool(np.isfinite(column(window, metric)[gpus]).any())


def _scattered(window: Window, s: IdleState) -> Iterator[tuple[int, Finding]]:
    """Yield (leaf, finding) where most free GPUs are scattered over nodes in use, and note since when."""
    bucket, index = window.newest, window.index
    sizes = np.diff(index.first_gpu)
    used = np.bincount(index.gpu_node[bucket.jobs >= 0], minlength=index.node_count)
    reporting = bucket.node_rows > 0
    if not used.any() or not len(sizes) or not _whole_jobs(bucket.jobs, index.gpu_node, sizes):
        return
    free = np.where(reporting, sizes - used, 0)
    partly = (free > 0) & (used > 0)
    for leaf in np.unique(index.leaf[partly]).tolist():
        here = index.leaf == leaf
        total, pieces = int(free[here].sum()), int(free[here & partly].sum())
        if pieces < SCATTERED_NODES * int(sizes[here].max()) or pieces < SCATTERED_SHARE * total:
            continue
        since = s.scattered_ms.setdefault(leaf, bucket.end_ms)
        whole = int((here & (free == sizes) & (sizes > 0)).sum())
        members = tuple((index.nodes[n].name, None) for n in np.flatnonzero(here & partly).tolist())
        name = f"leaf {index.leafs[leaf]}" if index.leafs[leaf] else "the fleet"
        nodes = "no node is entirely free" if not whole else f"{whole} nodes are entirely free"
        yield leaf, Finding(
            NAME, IncidentKind.IDLE, "scattered", "leaf", None, None, members, bucket.end_ms, since, Severity.INFO, 0.9,
            RecommendedAction.NONE,
            f"{pieces} of {total} free GPUs under {name} are scattered over {len(members)} nodes in use; {nodes}.",
            "Jobs of whole nodes cannot use them. Pack small jobs together (Slurm: CR_Pack_Nodes, LLN=no).",
            (Evidence(f"free GPUs on {listing({node for node, _ in members})}", value=float(pieces), from_ms=since),),
        )  # fmt: skip


def _whole_jobs(jobs: Codes, gpu_node: Codes, sizes: Codes) -> bool:
    """Return True if most held GPUs belong to jobs that hold whole nodes."""
    held = jobs >= 0
    pairs, counts = np.unique(jobs[held].astype(np.int64) * len(sizes) + gpu_node[held], return_counts=True)
    whole = counts == sizes[pairs % len(sizes)]
    return bool(counts[whole].sum() >= WHOLE_SHARE * held.sum())


def _rests(number: int, gpu: dict[str, Floats], _node: dict[str, Floats], gpus: int | None = None) -> None:
    if number >= 3:
        for metric, value in (("gpu_util_ratio", 0.0), ("power_w", 95.0), ("sm_active_ratio", 0.0)):
            gpu[metric][:gpus] = value


def _some_rest(number: int, gpu: dict[str, Floats], node: dict[str, Floats]) -> None:
    _rests(number, gpu, node, 16)


EXAMPLES = (
    Example("a checkpoint of ten minutes", lambda: play(small_fleet(), 63, _rests), frozenset()),
    Example(
        "a job that holds GPUs without using them",
        lambda: play(small_fleet(), 190, _some_rest),
        frozenset({("idle", "idle_gpus", "job", "info")}),
    ),
    Example(
        "a job that holds GPUs idle for an hour",
        lambda: play(small_fleet(), 370, _some_rest),
        frozenset({("idle", "idle_gpus", "job", "info"), ("idle", "idle_gpus", "job", "warning")}),
    ),
    Example(
        "a job that wastes 24 GPU-hours within half an hour",
        lambda: play(small_fleet(), 190, _rests),
        frozenset({("idle", "idle_gpus", "job", "warning")}),
    ),
)

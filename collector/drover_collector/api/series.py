"""Time series for charts, with the spread of the peers."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from drover_collector.api.nodes import gpu_group
from drover_collector.api.snapshot import DAY_MS, ApiSnapshot, bad_argument
from drover_core.metrics.catalog import BY_NAME, Scope
from drover_proto import fleet_pb2 as pb

TARGETS_MAX = 128  # a rack of 72 GPUs in one answer
METRICS_MAX = 16
POINTS = 1000
POINTS_MAX = 10_000
VALUES_MAX = 800_000  # of one answer, in 4 bytes each: a client's default limit is 4 MiB a message
SPAN_MS = 3_600_000  # when from_ms is not given
SPAN_MAX_MS = 400 * DAY_MS


def query_series(facts: ApiSnapshot, request: pb.SeriesRequest) -> pb.SeriesReply:
    scope = _scope(request)
    targets = [_target(facts, scope, target) for target in request.targets]
    to_ms = request.to_ms or facts.now_ms()
    from_ms = request.from_ms or to_ms - SPAN_MS
    if from_ms < 0 or not 0 < to_ms - from_ms <= SPAN_MAX_MS:
        raise bad_argument(f"from_ms {from_ms} to to_ms {to_ms}: give a span of more than 0 and at most 400 days")
    metrics = list(dict.fromkeys(request.metrics))
    most = min(POINTS_MAX, VALUES_MAX // (len(targets) * len(metrics)))
    points = max(2, min(request.max_points or POINTS, most))
    peers = _peers(facts, targets[0]) if request.with_peers else None
    raster = None if peers is None else facts.store.series.with_peers(facts.index, peers, from_ms, to_ms)
    step_ms, ts_ms, found = facts.store.series.read(scope, targets, metrics, from_ms, to_ms, points, raster)
    reply = pb.SeriesReply(step_ms=step_ms, ts_ms=ts_ms.astype("<i8").tobytes())
    for node, gpu, link in targets:
        for metric in metrics:
            values = found.get((node, gpu, link, metric))
            if values is None:
                values = np.full(len(ts_ms), np.nan, np.float32)
            _add(reply, node, gpu, link, metric, "value", values)
    if peers is not None:
        node, slot, _ = targets[0]
        end_ms = min(to_ms, int(ts_ms[-1]) + step_ms)
        spreads = facts.store.series.read_peers(facts.index, peers, metrics, from_ms, end_ms, step_ms, raster)
        for metric, spread in spreads.items():
            for role, values in zip(("peers_p10", "peers_median", "peers_p90"), spread, strict=True):
                _add(reply, node, slot, None, metric, role, values)
    return reply


def _scope(request: pb.SeriesRequest) -> Scope:
    if request.scope not in list(Scope):
        raise bad_argument(f"scope {request.scope!r}: give gpu, node, link or workload")
    scope = Scope(request.scope)
    if not 1 <= len(request.targets) <= TARGETS_MAX:
        raise bad_argument(f"{len(request.targets)} targets: give 1 to {TARGETS_MAX}")
    if not 1 <= len(request.metrics) <= METRICS_MAX:
        raise bad_argument(f"{len(request.metrics)} metrics: give 1 to {METRICS_MAX}")
    for name in request.metrics:
        if name not in BY_NAME or BY_NAME[name].scope is not scope:
            raise bad_argument(f"{name!r} is no {scope} metric; docs/reference/metrics.md lists them")
    if request.with_peers and scope is not Scope.GPU:
        raise bad_argument("with_peers: only GPUs have peers; leave it out")
    return scope


def _target(facts: ApiSnapshot, scope: Scope, target: pb.SeriesTarget) -> tuple[str, int | None, str | None]:
    number = facts.node_number(target.node)
    gpus = facts.index.nodes[number].gpus
    if scope is Scope.GPU:
        if not target.HasField("gpu") or target.gpu >= gpus:
            which = f"GPU {target.gpu}" if target.HasField("gpu") else "no GPU"
            raise bad_argument(f"{target.node}: {which} given; it has GPUs 0 to {gpus - 1}")
        return target.node, target.gpu, None
    if scope in (Scope.LINK, Scope.WORKLOAD):
        if not target.link:
            raise bad_argument(f"{target.node}: no link given; give the name of a port or workload")
        return target.node, None, target.link
    return target.node, None, None


def _peers(facts: ApiSnapshot, target: tuple[str, int | None, str | None]) -> npt.NDArray[np.int32] | None:
    """Return the numbers of the GPUs that one is compared with."""
    node, slot, _ = target
    gpu = facts.index.gpu(node, slot) if slot is not None else None
    if gpu is None:
        return None
    _, members = gpu_group(facts, gpu)
    peers = members[members != gpu].astype(np.int32)
    return peers if len(peers) else None


def _add(
    reply: pb.SeriesReply,
    node: str,
    gpu: int | None,
    link: str | None,
    metric: str,
    role: str,
    values: npt.NDArray[np.float32],
) -> None:
    reply.series.add(
        node=node, gpu=gpu, link=link or "", metric=metric, role=role, values=values.astype("<f4", copy=False).tobytes()
    )

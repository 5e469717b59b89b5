"""How the fleet looked at moments of the past, for the picture of all GPUs: one answer for all frames of an incident.

Health comes from its stored changes, so a fleet of 100,000 GPUs costs one read of a small table. A metric comes from
the rollups of 10 s, at most `VALUES_MAX` values.
"""

from __future__ import annotations

import gzip
from collections import Counter

import numpy as np
import numpy.typing as npt

from drover_collector.api.fleet import layout_order, scale
from drover_collector.api.moment import MOST_DAYS, UNJUDGED, changes_of, gaps
from drover_collector.api.snapshot import DAY_MS, LONG_S, ApiSnapshot, bad_argument
from drover_collector.fleet.buckets import BUCKET_MS
from drover_collector.incidents.health import HEALTHS
from drover_collector.incidents.health_history import blank, played, standing
from drover_core.metrics.catalog import BY_NAME, Metric, Scope
from drover_proto import fleet_pb2 as pb

FRAMES_MAX = 60
FRAME_MS = 60_000  # apart, where the caller does not say how many
VALUES_MAX = 1_000_000  # GPUs times frames of a metric: each frame is a read of all GPUs
LEVEL = 6  # of gzip: frames are alike
CUT = "Health: more changed in this time than is read; the frames after that show the last that was read."
TOO_MANY = (
    f"Values: {{gpus:,}} GPUs in {{frames}} frames are more than {VALUES_MAX:,}, so they are left out. Play by health,"
    " or choose one moment."
)


def get_playback(facts: ApiSnapshot, request: pb.PlaybackRequest) -> pb.Playback:
    times = _times(facts, request)
    metric = _metric(request.color_by)
    order = facts.once("order", LONG_S, lambda: layout_order(facts.index))
    begin = standing(facts.index, changes_of(facts.store.health.standing(times[0])))
    table, cut = facts.store.health.moves(times[0], times[-1])
    nodes, gpus = played(facts.index, begin, changes_of(table), times)
    reply = pb.Playback(
        layout_version=facts.index.version, frames_ms=times, gpus=facts.index.gpu_count,
        legend=[str(health) for health in HEALTHS],
    )  # fmt: skip
    if blank(times, gaps(facts, times[0], times[-1]), nodes, gpus):
        reply.absent.append(UNJUDGED)
    if cut:
        reply.absent.append(CUT)
    last = Counter(gpus[-1].tolist())
    reply.gpus_by_health.update({str(HEALTHS[code]): count for code, count in last.items()})
    parts = [gpus[:, order].astype(np.uint8)]
    if metric is not None:
        parts.append(_values(facts, metric, times, order, reply))
    reply.frames = gzip.compress(b"".join(_padded(row) for part in parts for row in part), LEVEL, mtime=0)
    held, names = facts.store.jobs.at(facts.index, times[-1])
    reply.jobs, reply.gpus_held = len(names), int(np.count_nonzero(held >= 0))
    return reply


def _times(facts: ApiSnapshot, request: pb.PlaybackRequest) -> list[int]:
    now_ms, to_ms = facts.now_ms(), request.to_ms
    from_ms = request.from_ms or to_ms
    if not 0 < from_ms <= to_ms <= now_ms or from_ms < now_ms - MOST_DAYS * DAY_MS:
        raise bad_argument(f"from_ms {from_ms} to to_ms {to_ms}: give a time of the last {MOST_DAYS} days")
    if request.frames > FRAMES_MAX:
        raise bad_argument(f"frames {request.frames}: give at most {FRAMES_MAX}")
    if from_ms == to_ms:
        return [to_ms]
    frames = request.frames or min(FRAMES_MAX, max(2, (to_ms - from_ms) // FRAME_MS + 1))
    return [round(at) for at in np.linspace(from_ms, to_ms, max(2, frames)).tolist()]


def _metric(color_by: str) -> Metric | None:
    if color_by in ("", "health"):
        return None
    metric = BY_NAME.get(color_by)
    if metric is None or metric.scope is not Scope.GPU:
        raise bad_argument(f"color_by {color_by[:80]!r}: give health or a GPU metric, such as gpu_temp_c or power_w")
    return metric


def _values(
    facts: ApiSnapshot, metric: Metric, times: list[int], order: npt.NDArray[np.intp], reply: pb.Playback
) -> npt.NDArray[np.uint8]:
    """Return cells uint8 [T, G] on one scale, 0 where not known: of the 10 s that each moment lies in."""
    index, reply.unit = facts.index, metric.unit
    shape = (len(times), index.gpu_count)
    if shape[0] * shape[1] > VALUES_MAX:
        reply.absent.append(TOO_MANY.format(gpus=shape[1], frames=shape[0]))
        return np.zeros(shape, np.uint8)
    found = np.full(shape, np.nan)
    for frame, at_ms in enumerate(times):
        start_ms = at_ms // BUCKET_MS * BUCKET_MS - BUCKET_MS  # the bucket that is over
        columns = facts.store.buckets.values_at(index, Scope.GPU, start_ms, BUCKET_MS, [metric.name])
        if (column := columns.get(metric.name)) is not None:
            found[frame] = column[order]
    cells, reply.low, reply.high = scale(found.ravel(), metric)
    reply.known = bool(cells.any())
    return cells.reshape(shape)


def _padded(row: npt.NDArray[np.uint8]) -> bytes:
    return row.tobytes() + bytes(-len(row) % 4)

"""Detect from telemetry that a GPU with a fatal XID was reset, in case no event reports it.

A restart of the agent proves nothing, nor does a GPU that still answers after its XID.
"""

from __future__ import annotations

import numpy as np

from drover_collector.detectors._lib.window import Window
from drover_collector.detectors.xid.state import Open, Where
from drover_core.model.events import Severity

GONE_CAUSES = frozenset({"xid_79", "xid_79_repeated"})  # off the bus: it cannot answer until it is reset or rebooted


def note_resets(window: Window, held: dict[Where, Open], now_ms: int) -> None:
    """Set `back_ms` of faults whose GPUs were all reset, as the newest bucket proves."""
    for where, one in held.items():
        if one.severity is Severity.CRITICAL and one.back_ms is None:
            gpus = _gpus(window, where)
            one.proven |= {g for g in gpus if _proof(window, one, g)}
            if gpus and one.proven >= set(gpus) and answers(window, where):
                one.back_ms = now_ms
                one.proven.clear()


def answers(window: Window, where: Where) -> bool:
    """Return True if the node or GPU has values in the newest bucket."""
    node, gpu = where
    if gpu is None:
        n = window.index.node_number.get(node)
        return n is not None and bool(window.newest.node_rows[n])
    g = window.index.gpu(node, gpu)
    return g is not None and _answers(window, g)


def _answers(window: Window, g: int) -> bool:
    bucket = window.newest
    if not bucket.gpu_rows[g]:
        return False
    values = [bucket.gpu[name][g] for name in ("gpu_temp_c", "power_w", "sm_clock_mhz") if name in bucket.gpu]
    return not values or not bool(np.isnan(values).all())


def _gpus(window: Window, where: Where) -> list[int]:
    node, gpu = where
    n = window.index.node_number.get(node)
    if n is None:
        return []
    if gpu is None:
        return list(range(int(window.index.first_gpu[n]), int(window.index.first_gpu[n + 1])))
    g = window.index.gpu(node, gpu)
    return [] if g is None else [g]


def _proof(window: Window, one: Open, g: int) -> bool:
    bucket, n = window.newest, int(window.index.gpu_node[g])
    if not _answers(window, g):
        inside = slice(int(window.index.first_gpu[n]), int(window.index.first_gpu[n + 1]))
        if bucket.node_rows[n] or bucket.gpu_rows[inside].any():
            one.gone.add(g)  # the node reports and the GPU does not answer: the agent runs
        return False
    if g in one.gone or (one.cause in GONE_CAUSES and bucket.start_ms > one.last_ms):
        one.gone.discard(g)
        return True
    return _fell(window, one.energy_j, "energy_j", g) or _fell(
        window, one.requested, "recovery_action", g, to_zero=True
    )


def _fell(window: Window, last: dict[int, float], metric: str, g: int, to_zero: bool = False) -> bool:
    """Return True if a value is lower than the last known one.

    Energy counts from the load of the driver; the recovery action returns to 0 (`to_zero`).
    """
    column = window.newest.gpu.get(metric)
    if column is None or np.isnan(column[g]):
        return False
    value, before = float(column[g]), last.get(g)
    last[g] = value
    return before is not None and value < before and (not to_zero or value == 0)

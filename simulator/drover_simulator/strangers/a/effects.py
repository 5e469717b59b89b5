"""Effects: what faults and negatives do to the physics and to the instruments, as functions of time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass
class Effect:
    """Changes `target` of `idx` from t0 to t1; it grows over `ramp` seconds, or pulses with `period` and `duty`."""

    target: str
    idx: Any
    t0: float
    t1: float
    amount: Any
    op: str = "mul"  # "mul", "add", "set"
    ramp: float = 0.0
    period: float = 0.0
    duty: float = 1.0
    solve: Callable[[Any], Any] | None = None  # amount from the state of the physics at t0

    def shape(self, ts: np.ndarray) -> np.ndarray:
        on = (ts >= self.t0) & (ts < self.t1)
        f = np.clip((ts - self.t0) / self.ramp, 0, 1) if self.ramp > 0 else np.ones(len(ts))
        if self.period:
            f = f * (((ts - self.t0) % self.period) < self.period * self.duty)
        return np.where(on, f, 0.0)


class Effects:
    """All effects by target, single additions to counters, and resets of counters."""

    def __init__(self) -> None:
        self.all: dict[str, list[Effect]] = {}
        self.bumps: dict[str, list[tuple[float, int, float]]] = {}  # column -> (time, index, count)
        self.resets_links: list[tuple[float, np.ndarray]] = []  # reboots: time, ports
        self.resets: list[tuple[float, np.ndarray]] = []  # driver reloads: time, GPUs

    def add(self, target: str, idx: Any, t0: float, t1: float, amount: Any, op: str = "mul", **more: Any) -> Effect:
        effect = Effect(target, np.atleast_1d(np.asarray(idx, int)), t0, t1, amount, op, **more)
        self.all.setdefault(target, []).append(effect)
        return effect

    def bump(self, column: str, t: float, index: int, count: float = 1) -> None:
        self.bumps.setdefault(column, []).append((t, int(index), count))

    def solvable(self) -> list[Effect]:
        return [e for es in self.all.values() for e in es if e.solve is not None]

    def over(self, target: str, base: np.ndarray, ts: np.ndarray) -> np.ndarray:
        """[B, N] of the target; the base itself, broadcast, where nothing acts."""
        active = [e for e in self.all.get(target, ()) if e.t0 <= ts[-1] and e.t1 > ts[0] and e.amount is not None]
        if not active:
            return np.broadcast_to(base, (len(ts), len(base)))
        out = np.repeat(base[None].astype(float), len(ts), axis=0)
        for e in active:
            f = e.shape(ts)[:, None]
            part = out[:, e.idx]
            if e.op == "mul":
                part = part * (1 + (np.asarray(e.amount) - 1) * f)
            elif e.op == "add":
                part = part + np.asarray(e.amount) * f
            else:
                part = np.where(f > 0, np.asarray(e.amount, float), part)
            out[:, e.idx] = part
        return out

    def bumped(self, column: str, inc: np.ndarray, ts: np.ndarray, dt: float) -> None:
        """Add the single counts of a column to the increments of a block."""
        for t, index, count in self.bumps.get(column, ()):
            if ts[0] - dt < t <= ts[-1]:
                inc[min(int(np.searchsorted(ts, t)), len(ts) - 1), index] += count

"""Numbers and phrases of the verdicts."""

from __future__ import annotations

import math

from drover_collector.probes.judging.groups import sign
from drover_core.model.probe_figures import FIGURES


def number(value: float | None) -> str:
    """Four digits: 789.4, 0.05123, 48340."""
    if value is None:
        return "none"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def share(value: float) -> str:
    return f"{100 * value:.1f} %"


def centre_text(probe: str, centre: float, spread: float) -> str:
    """ "789 +- 4": centre in the probe's unit and standard deviation between boards."""
    return f"{number(centre)} +- {number(float(f'{centre * spread:.2g}'))} {FIGURES[probe].unit}"


def off(probe: str, logs: float) -> str:
    """How far from the centre, `logs` > 0 being worse: "9.8 % below"; "4.0 % above" where lower is better."""
    change = math.expm1(-sign(probe) * logs)
    return f"{share(abs(change))} {'below' if change < 0 else 'above'}"

"""What the detector of links finds in training whose values a test changes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from drover_collector.detectors._lib.examples import play, small_fleet
from drover_collector.detectors.links import detector as links
from drover_core.model.events import Finding

Columns = dict[str, np.ndarray]
PORT = 20  # mlx5_4 of n02, in a fleet of 8 ports a node


def run(
    link: Callable[[int, Columns], None] | None = None,
    gpu: Callable[[int, Columns, Columns], None] | None = None,
    count: int = 10,
    nodes: int = 8,
) -> list[Finding]:
    state, reported = None, []
    for window, now_ms in play(small_fleet(nodes, ports=8), count, gpu, links=link):
        findings, state = links.detect(window, state, now_ms)
        reported += findings
    return reported

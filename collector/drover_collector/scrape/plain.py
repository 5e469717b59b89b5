"""Which nodes' pages come without TLS: a user of such a node can write them when its exporter is down.

What is found on them is shown and notified as anything else, but a person is asked before Drover takes the node out.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence, Set

from drover_collector.scrape.settings import ScrapeConfig
from drover_collector.scrape.targets import TargetList

AGAIN_S = 10.0  # between two looks at file_sd files


class PlainPages:
    """From any thread."""

    def __init__(self, configs: Sequence[ScrapeConfig]) -> None:
        self._lists = [TargetList(config) for config in configs if not config.tls and config.ask_first]
        self._lock = threading.Lock()
        self._nodes: Set[str] = frozenset()
        self._next_s = 0.0

    def __contains__(self, node: str) -> bool:
        """Return whether a page of this node is read without TLS."""
        if not self._lists:
            return False
        with self._lock:
            if time.monotonic() >= self._next_s:
                self._next_s = time.monotonic() + AGAIN_S
                self._nodes = {target.node for targets in self._lists for target in targets.current()}
            return node in self._nodes

"""Which nodes' values others than root could have written.

A user of a node can write its pages without TLS when its exporter is down. A writer of remote_write or OTLP can write
every node's values. What is found in them is shown and notified as anything else, but a person is asked before Drover
takes such a node out.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence, Set

from drover_collector.scrape.settings import OtlpInConfig, ScrapeConfig, WriteInConfig
from drover_collector.scrape.targets import TargetList

AGAIN_S = 10.0  # between two looks at file_sd files


class ForgeablePages:
    """From any thread.

    Attributes:
        is_configured: the settings say where values of nodes without an agent are from.
    """

    def __init__(self, configs: Sequence[ScrapeConfig], *sent: WriteInConfig | OtlpInConfig) -> None:
        """`sent`: how values of any node may be sent."""
        self._any_written = any(
            way.ask_first for way in sent if (way.taken if isinstance(way, OtlpInConfig) else way.enabled)
        )
        self.is_configured = bool(configs) or any(
            way.taken if isinstance(way, OtlpInConfig) else way.enabled for way in sent
        )
        self._lists = [TargetList(config) for config in configs if not config.tls and config.ask_first]
        self._lock = threading.Lock()
        self._nodes: Set[str] = frozenset()
        self._next_s = 0.0

    def __contains__(self, node: str) -> bool:
        """Return whether a page of this node is read without TLS, or its values may be sent."""
        if self._any_written or not self._lists:
            return self._any_written
        with self._lock:
            if time.monotonic() >= self._next_s:
                self._next_s = time.monotonic() + AGAIN_S
                self._nodes = {target.node for targets in self._lists for target in targets.current()}
            return node in self._nodes

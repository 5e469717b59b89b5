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
    """From any thread."""

    def __init__(self, configs: Sequence[ScrapeConfig], *sent: WriteInConfig | OtlpInConfig) -> None:
        """`sent`: how values of any node may be sent."""
        taken = [way for way in sent if (way.taken if isinstance(way, OtlpInConfig) else way.enabled)]
        self._any_written = any(way.ask_first for way in taken)
        self._vouches_for_all = bool(taken) and not self._any_written
        asked = [not config.tls and config.ask_first for config in configs]
        self._lists = [TargetList(config) for config, asks in zip(configs, asked, strict=True) if asks]
        self._sure_lists = [TargetList(config) for config, asks in zip(configs, asked, strict=True) if not asks]
        self._lock = threading.Lock()
        self._nodes: Set[str] = frozenset()
        self._sure: Set[str] = frozenset()
        self._next_s = 0.0

    def __contains__(self, node: str) -> bool:
        """Return whether a page of this node is read without TLS, or its values may be sent."""
        if self._any_written or not self._lists:
            return self._any_written
        with self._lock:
            self._read()
            return node in self._nodes

    def vouches(self, node: str) -> bool:
        """Return whether the settings here say that what is taken of this node without an agent needs no question."""
        if node in self:
            return False
        with self._lock:
            self._read()
            return self._vouches_for_all or node in self._sure

    def _read(self) -> None:
        if time.monotonic() < self._next_s:
            return
        self._next_s = time.monotonic() + AGAIN_S
        self._nodes, self._sure = (
            {target.node for targets in lists for target in targets.current()}
            for lists in (self._lists, self._sure_lists)
        )

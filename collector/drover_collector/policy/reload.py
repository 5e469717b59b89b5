"""The policy's file while the collector runs: what is written there holds from the next tick or two on."""

from __future__ import annotations

import logging
from pathlib import Path

from drover_collector.policy.policy import Policy
from drover_core.settings import SettingsError

log = logging.getLogger(__name__)

Stamp = tuple[int, int, int] | None


class PolicyWatch:
    """A file is taken when two looks find it the same: one that is being written is never read by half.

    Args:
        path: the file; None: a preset, which does not change.

    Attributes:
        trouble: what is wrong with the file now, a sentence; "": nothing. The policy before stays in force.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._taken = self._seen = self._look()
        self.trouble = ""

    def poll(self) -> Policy | None:
        """The policy when its file has changed, and is good; else None."""
        if self._path is None:
            return None
        before, self._seen = self._seen, self._look()
        if self._seen == self._taken or self._seen != before:
            return None
        self._taken = self._seen
        try:
            policy = Policy.load(self._path)
        except SettingsError as error:
            self.trouble = f"The policy's file cannot be used, the one before stays in force: {error}."
            log.error("%s", self.trouble)
            return None
        self.trouble = ""
        log.info("policy %s read again from %s", policy.name, self._path)
        return policy

    def _look(self) -> Stamp:
        if self._path is None:
            return None
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino

"""The policy's file while the collector runs: what is written there holds from the next tick on."""

from __future__ import annotations

import logging
from pathlib import Path

from drover_collector.policy import Policy
from drover_proto.settings import SettingsError

log = logging.getLogger(__name__)


class PolicyWatch:
    """
    Args:
        path: the file; None: a preset, which does not change.

    Attributes:
        trouble: what is wrong with the file as it is now, a sentence; "" when nothing is. The policy before stays.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._stamp = self._look()
        self.trouble = ""

    def poll(self) -> Policy | None:
        """The policy when its file has changed, and is good; else None."""
        if self._path is None or (stamp := self._look()) == self._stamp:
            return None
        self._stamp = stamp
        try:
            policy = Policy.load(self._path)
        except SettingsError as error:
            self.trouble = f"The policy's file cannot be used, the one before stays in force: {error}."
            log.error("%s", self.trouble)
            return None
        self.trouble = ""
        log.info("policy %s read again from %s", policy.name, self._path)
        return policy

    def _look(self) -> tuple[int, int, int] | None:
        if self._path is None:
            return None
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino

"""Restart this process: the NVIDIA library that it has loaded was replaced on disk (decision 16)."""

from __future__ import annotations

import logging
import os
import sys
from typing import NoReturn

REASON = "DROVER_AGENT_RESTARTED_FOR"  # environment variable, which the new process inherits


class RestartNeeded(Exception):  # noqa: N818  # not an error: a way to end
    """Only a new process can go on; the message says why. `NodeRuntime.run` raises it after spool and stream closed."""


def restarted_for(reason: str) -> bool:
    """Return whether this process was restarted for this reason, so that another restart does not help."""
    return os.environ.get(REASON) == reason


def restart_in_place(reason: str) -> NoReturn:
    """Run this process's command again, with the same process id. The spool is closed.

    It needs no supervisor, and a supervisor sees no failure.
    """
    os.environ[REASON] = reason
    logging.shutdown()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606  # our own command, without a shell

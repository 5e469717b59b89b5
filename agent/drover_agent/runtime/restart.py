"""When only a new process can go on: the NVIDIA library that this one has loaded was replaced (decision 16)."""

from __future__ import annotations

import logging
import os
import sys
from typing import NoReturn

REASON = "DROVER_AGENT_RESTARTED_FOR"  # in the environment, which the new start inherits


class RestartNeeded(Exception):  # noqa: N818  # no error: a way to end
    """Only a new process can go on. Raised by NodeRuntime.run once spool and streams are closed; the text says why."""


def restarted_for(reason: str) -> bool:
    """Whether this process was started anew for this reason: then another start helps no more."""
    return os.environ.get(REASON) == reason


def restart_in_place(reason: str) -> NoReturn:
    """Run this process's own command again, in the same process, once the spool is closed.

    It needs no supervisor, and one that there is sees no failure: the process id and its sockets' names stay.
    """
    os.environ[REASON] = reason
    logging.shutdown()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606  # our own command, and no shell is wanted

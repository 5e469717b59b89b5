"""When only a new process can go on: the NVIDIA library that this one has loaded was replaced (decision 16)."""

from __future__ import annotations

import logging
import os
import sys
from typing import NoReturn


class RestartNeeded(Exception):  # noqa: N818  # no error: a way to end
    """Only a new process can go on. Raised by NodeRuntime.run once spool and streams are closed; the text says why."""


def restart_in_place() -> NoReturn:
    """Run this process's own command again, in the same process, once the spool is closed.

    It needs no supervisor, and one that there is sees no failure: the process id and its sockets' names stay.
    """
    logging.shutdown()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606  # our own command, and no shell is wanted

"""SIGINT for programs that run until they are stopped."""

from __future__ import annotations

import signal
import threading


def enable_sigint() -> None:
    """Let SIGINT end this program also if it was started with SIGINT ignored, as a shell script's `&` does.

    Python sets its own handler only if the signal is not ignored at the start. Only the main thread may set one.
    """
    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    if ignored and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.default_int_handler)

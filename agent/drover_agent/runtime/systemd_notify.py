"""Report to systemd (sd_notify(3)): the agent is ready, its status line, and keep-alives.

A hung driver does not stop the ticks, so keep-alives go on. An event loop that stands still stops them, and systemd
restarts the agent. Nothing is sent outside systemd, or if the unit is not Type=notify.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Mapping

from drover_agent.clock import Clock

log = logging.getLogger(__name__)

READY_S = 10.0  # ready by then, also if the interval between two ticks is longer
FIRST_TICK_CHECK_S = 0.2
STATUS_S = 10.0  # between two status lines
STALE_S = 20.0  # added to two intervals: without a tick for so long, the schedule stands still


class Notifier:
    """A sender to the socket that systemd names in the environment."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        env = os.environ if environment is None else environment
        path = env.get("NOTIFY_SOCKET", "")
        # A leading @ stands for the zero byte of an abstract address.
        self._address = "\0" + path[1:] if path.startswith("@") else path
        self.watchdog_s = _watchdog_s(env)
        self._trouble_logged = False

    @property
    def on(self) -> bool:
        return bool(self._address)

    def send(self, *lines: str) -> bool:
        """Return whether the lines were sent. A failure is logged once and stops nothing."""
        if not self._address:
            return False
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK) as out:
                out.sendto("\n".join(lines).encode(), self._address)
        except OSError as error:
            if not self._trouble_logged:
                log.warning("Reporting to systemd at NOTIFY_SOCKET failed: %s", error.strerror)
            self._trouble_logged = True
            return False
        self._trouble_logged = False
        return True


def _watchdog_s(env: Mapping[str, str]) -> float | None:
    """Return the seconds within which systemd expects a keep-alive, None if it expects none."""
    if env.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return None  # meant for another process of the unit
    try:
        return int(env["WATCHDOG_USEC"]) / 1e6 or None
    except (KeyError, ValueError):
        return None


class SystemdReporter:
    """Reports the state of one agent until cancelled."""

    def __init__(
        self, notifier: Notifier, clock: Clock, interval_s: float, ticks: Callable[[], int], status: Callable[[], str]
    ) -> None:
        """`ticks` returns how many ticks there have been, `status` one line for `systemctl status`."""
        self._notifier, self._clock, self._interval_s = notifier, clock, interval_s
        self._ticks, self._status = ticks, status

    async def run(self) -> None:
        if not self._notifier.on:
            return
        began_s = self._clock.monotonic()
        while not self._ticks() and self._clock.monotonic() - began_s < READY_S:
            await self._clock.sleep(FIRST_TICK_CHECK_S)
        self._notifier.send("READY=1", f"STATUS={self._line()}")
        every_s = min(STATUS_S, (self._notifier.watchdog_s or STATUS_S) / 3)
        seen, since_s = self._ticks(), self._clock.monotonic()
        while True:
            now_s = self._clock.monotonic()
            if self._ticks() != seen:
                seen, since_s = self._ticks(), now_s
            lines = [f"STATUS={self._line()}"]
            if self._notifier.watchdog_s and now_s - since_s < 2 * self._interval_s + STALE_S:
                lines.append("WATCHDOG=1")
            self._notifier.send(*lines)
            await self._clock.sleep(every_s)

    def report_stopping(self) -> None:
        self._notifier.send("STOPPING=1", "STATUS=stopping")

    def _line(self) -> str:
        return " ".join(self._status().split())  # a line break would begin another assignment


async def run_reporting(reporter: SystemdReporter, work: asyncio.Task[None]) -> None:
    """Wait for `work`, and report to systemd meanwhile."""
    reporting = asyncio.create_task(reporter.run())
    try:
        await work
    finally:
        reporting.cancel()
        [ended] = await asyncio.gather(reporting, return_exceptions=True)
        if isinstance(ended, Exception):
            log.error("Reporting to systemd failed.", exc_info=ended)

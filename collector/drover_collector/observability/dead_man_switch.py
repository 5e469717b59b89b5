"""The dead-man's switch: a sign of life at a steady interval while Drover sees, judges and can tell, so that silence
alarms. What takes it must be elsewhere, and alarm by itself: healthchecks.io, Dead Man's Snitch and the like.

The ping is a GET, as https://healthchecks.io/docs/http_api/ has it: any answer of 2xx counts. `fail_url`, as its
/fail, is asked while Drover is blind and can still say so, so that nobody waits for the silence to be noticed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Mapping, MutableMapping
from urllib.parse import urlsplit

from drover_collector.api.snapshot import HeartbeatStatus
from drover_collector.notify.dead_man_settings import HeartbeatConfig, ping_urls
from drover_collector.notify.http import Http, HttpAnswer, TimeLimited
from drover_collector.observability.self_check import HealthSignals, beats, self_check
from drover_collector.store import StoreError

log = logging.getLogger(__name__)

LOOK_S = 10.0  # how often it is looked, so that status and metrics tell of blindness soon
ASK_S = 8.0  # for the figures; what takes longer hangs in the store
SUBJECT = "blind"  # its place among the troubles of detection


class DeadManSwitch:
    """
    Args:
        look: gives the figures; may block.
        troubles: where a sentence is put while Drover is blind, under SUBJECT.
    """

    def __init__(
        self,
        config: HeartbeatConfig,
        look: Callable[[], HealthSignals],
        troubles: MutableMapping[str, str],
        *,
        environment: Mapping[str, str] = os.environ,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config, self._look, self._troubles, self._monotonic = config, look, troubles, monotonic
        self._url, self._fail_url = ping_urls(config, environment)
        self._http = Http(config.timeout_s, config.ca_file, config.proxy)
        self._figures: TimeLimited[HealthSignals] = TimeLimited("signs", ASK_S)
        self._pings: TimeLimited[HttpAnswer] = TimeLimited("heartbeat", 3 * config.timeout_s)
        self._next_s = 0.0
        self.beats = HeartbeatStatus()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            try:
                await asyncio.to_thread(self.look)
            except Exception:  # a defect of ours must not end this watch; the silence then tells
                log.exception("looking whether Drover is blind")
            await asyncio.sleep(min(LOOK_S, self._config.interval_s))

    def look(self) -> None:
        """Once: tell of blindness, and give the sign of life when it is due."""
        figures, reasons = self._judge()
        self._tell(reasons)
        if self._monotonic() < self._next_s:
            return
        if figures is not None and beats(figures, reasons):
            self._ping(self._url)
        elif reasons:
            self._ping(self._fail_url)
        else:
            return  # it stands by, or begins: the sign is another's, or not due yet
        self._next_s = self._monotonic() + self._config.interval_s

    def _judge(self) -> tuple[HealthSignals | None, list[str]]:
        try:
            figures = self._figures.call(self._look)
        except StoreError as error:
            return None, [f"the store does not answer ({error})"]
        if figures is None:
            return None, [f"the store does not answer within {ASK_S:g} s"]
        return figures, self_check(figures, self._config.silent_ratio)

    def _tell(self, reasons: list[str]) -> None:
        text = f"Drover is blind: {'; '.join(reasons)}." if reasons else ""
        if bool(text) != (SUBJECT in self._troubles):
            log.log(logging.ERROR if text else logging.WARNING, "%s", text or "Drover sees again")
        if text:
            self._troubles[SUBJECT] = text
        else:
            self._troubles.pop(SUBJECT, None)

    def _ping(self, url: str | None) -> None:
        if url is None:
            return
        answer = self._pings.call(lambda: self._http.request("GET", url, {}, read=False))
        trouble = "it does not end" if answer is None else "" if answer.good else answer.problem()
        if trouble and trouble != self.beats.trouble:
            log.warning("the sign of life did not arrive at %s: %s", urlsplit(url).hostname, trouble)
        self.beats.trouble = trouble
        if trouble:
            self.beats.failed += 1
        else:
            self.beats.sent += 1

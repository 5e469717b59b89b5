"""The dead man's switch: ping a service at a steady interval while Drover works, so that silence raises an alarm.

The service must run elsewhere and alarm by itself, such as healthchecks.io or Dead Man's Snitch. A ping is a GET, as in
https://healthchecks.io/docs/http_api/: any 2xx answer counts. While Drover is blind, `fail_url` (its /fail) is pinged
instead, so that the alarm does not wait for the silence.
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
from drover_collector.observability.self_check import HealthSignals, self_check, works
from drover_collector.store import StoreError

log = logging.getLogger(__name__)

CHECK_S = 10.0  # between checks, so that status and metrics show blindness soon
SIGNALS_S = 8.0  # for reading the signals; a longer read hangs in the store
SUBJECT = "blind"  # its key among the troubles of detection


class DeadManSwitch:
    """Pings at its interval and reports blindness. One thread at a time.

    Args:
        read_signals: may block.
        troubles: gets a sentence under SUBJECT while Drover is blind.
        status: where pings are counted.
    """

    def __init__(
        self,
        config: HeartbeatConfig,
        read_signals: Callable[[], HealthSignals],
        troubles: MutableMapping[str, str],
        status: HeartbeatStatus | None = None,
        *,
        environment: Mapping[str, str] = os.environ,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config, self._read_signals, self._troubles, self._monotonic = config, read_signals, troubles, monotonic
        self._url, self._fail_url = ping_urls(config, environment)
        self._http = Http(config.timeout_s, config.ca_file, config.proxy)
        self._signals: TimeLimited[HealthSignals] = TimeLimited("signs", SIGNALS_S)
        self._pings: TimeLimited[HttpAnswer] = TimeLimited("heartbeat", 3 * config.timeout_s)
        self._next_s = 0.0
        self.status = status or HeartbeatStatus()

    async def run(self) -> None:
        """Check until cancelled."""
        while True:
            try:
                await asyncio.to_thread(self.check)
            except Exception:  # a defect must not end this watch; the silence then raises the alarm
                log.exception("checking whether Drover is blind failed")
            await asyncio.sleep(min(CHECK_S, self._config.interval_s))

    def check(self) -> None:
        """Check once: report blindness, and ping if a ping is due."""
        signals, reasons = self._judge()
        self._report(reasons)
        if self._monotonic() < self._next_s:
            return
        if signals is not None and works(signals, reasons):
            self._ping(self._url)
        elif reasons:
            self._ping(self._fail_url)
        else:
            return  # another collector detects and pings, or this one has not begun yet
        self._next_s = self._monotonic() + self._config.interval_s

    def _judge(self) -> tuple[HealthSignals | None, list[str]]:
        try:
            signals = self._signals.call(self._read_signals)
        except StoreError as error:
            return None, [f"the store does not answer ({error})"]
        if signals is None:
            return None, [f"the store does not answer within {SIGNALS_S:g} s"]
        return signals, self_check(signals, self._config.silent_ratio)

    def _report(self, reasons: list[str]) -> None:
        text = f"Drover is blind: {'; '.join(reasons)}." if reasons else ""
        if bool(text) != (SUBJECT in self._troubles):
            log.log(logging.ERROR if text else logging.WARNING, "%s", text or "Drover is no longer blind")
        if text:
            self._troubles[SUBJECT] = text
        else:
            self._troubles.pop(SUBJECT, None)

    def _ping(self, url: str | None) -> None:
        if url is None:
            return
        answer = self._pings.call(lambda: self._http.request("GET", url, {}, read=False))
        trouble = "it does not return" if answer is None else "" if answer.good else answer.problem()
        if trouble and trouble != self.status.trouble:
            log.warning("the heartbeat did not reach %s: %s", urlsplit(url).hostname, trouble)
        self.status.trouble = trouble
        if trouble:
            self.status.failed += 1
        else:
            self.status.sent += 1

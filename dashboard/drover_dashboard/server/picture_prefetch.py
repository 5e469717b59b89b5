"""Pictures made shortly before the pages that show them ask again, so that nobody waits for the collector.

A page asks 5 s after it drew the last answer (assets/fleet.js), so each answer foretells a question. What would be too
old for it by then is asked of the collector a little before, by one thread, hence about as often as the pages would
have it asked themselves, and stops once they are gone. A page that comes sooner or later asks as if this were not.
"""

from __future__ import annotations

import heapq
import logging
import threading
import time
from collections.abc import Callable

from drover_dashboard.widgets.fleet_picture import REFRESH_S

log = logging.getLogger(__name__)

LEAD_S = 0.7  # what a metric of 100,000 GPUs takes, twice; a picture on the screen is older by this at most
LATE_S = 0.3  # how much later than foretold a page may ask: it has the answer to fetch and to draw
MOST = 256  # questions foreseen at a time; pages beyond these wait for themselves


class PicturePrefetcher:
    """`make(color_by, for_s)`: have the picture ready, young enough for who asks within so long."""

    def __init__(self, make: Callable[[str, float], object], now_s: Callable[[], float] = time.monotonic) -> None:
        self._make, self._now_s = make, now_s
        self._foreseen: list[tuple[float, str]] = []  # a heap: when to make what
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def answered(self, color_by: str) -> None:
        """A page is given this picture now, and nothing is wrong with it."""
        with self._changed:
            if len(self._foreseen) >= MOST:
                return
            heapq.heappush(self._foreseen, (self._now_s() + REFRESH_S - LEAD_S, color_by))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="ahead", daemon=True)
                self._thread.start()
            self._changed.notify()

    def due(self) -> tuple[list[str], float | None]:
        """What is to be made now, each once, and the seconds until more is (None: nothing is foreseen)."""
        found: dict[str, None] = {}
        with self._changed:
            while self._foreseen and self._foreseen[0][0] <= self._now_s():
                found[heapq.heappop(self._foreseen)[1]] = None
            return list(found), self._foreseen[0][0] - self._now_s() if self._foreseen else None

    def make(self, color_by: str) -> None:
        try:
            self._make(color_by, LEAD_S + LATE_S)
        except Exception:  # the page that asks for it gets the error
            log.exception("a picture by %s could not be made before it is asked for", color_by)

    def _run(self) -> None:
        while True:
            colors, wait_s = self.due()
            for color_by in colors:
                self.make(color_by)
            with self._changed:
                # What was foreseen since then comes after what is waited for, unless nothing was.
                if not colors and (wait_s is not None or not self._foreseen):
                    self._changed.wait(wait_s)

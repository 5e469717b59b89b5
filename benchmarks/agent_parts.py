"""An agent that counts where its CPU time goes: `bench_agent.py --parts` runs it in the place of `drover_agent.main`.

The event loop's time is split by what it runs (a task by its coroutine, else the callback), the reading thread's by
source, both out of the thread's own clock; other threads are measured whole from outside. The counting
itself costs some 2 us for each piece, which is why the figures that count are those of an agent without it.
SIGUSR1 begins again, SIGUSR2 writes {part: [CPU seconds, times]} to $DROVER_PARTS.
"""

from __future__ import annotations

import asyncio
import asyncio.events
import json
import os
import signal
import sys
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from drover_agent import main
from drover_agent.sampling import abandonable_worker as watchdog

_parts: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0])


def _count(part: str, began_s: float) -> None:
    found = _parts[part]
    found[0] += time.thread_time() - began_s
    found[1] += 1


def _label(handle: Any) -> str:
    callback = handle._callback
    owner = getattr(callback, "__self__", None)
    if isinstance(owner, asyncio.Task):
        return f"loop: {getattr(owner.get_coro(), '__qualname__', '?')}"
    return f"loop: {getattr(callback, '__qualname__', type(callback).__name__)}"


def _watch_loop() -> None:
    run = asyncio.events.Handle._run

    def counted(self: asyncio.Handle) -> None:
        label, began_s = _label(self), time.thread_time()
        run(self)
        _count(label, began_s)

    asyncio.events.Handle._run = counted  # type: ignore[method-assign]  # to be counted


def _watch_reads() -> None:
    run, finish = watchdog.Read.run, watchdog.Read.finish

    def name_of(read: Any) -> str:
        name: str = read._source.name
        return "nvml" if name.startswith("nvml:") else name

    def counted_run(self: watchdog.Read[Any]) -> bool:
        began_s = time.thread_time()
        asked = run(self)
        _count(f"read: {name_of(self)}{', calls of a tick' if asked else ''}", began_s)
        return asked

    def counted_finish(self: watchdog.Read[Any]) -> None:
        began_s = time.thread_time()
        finish(self)
        _count(f"read: {name_of(self)}, answers taken", began_s)

    watchdog.Read.run = counted_run  # type: ignore[method-assign]  # to be counted
    watchdog.Read.finish = counted_finish  # type: ignore[method-assign]  # to be counted


def _name_threads() -> None:
    """For the system too, which Python 3.11 does not do."""
    run = threading.Thread.run

    def named(self: threading.Thread) -> None:
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(self.name[:15])
        run(self)

    threading.Thread.run = named  # type: ignore[method-assign]  # to be counted


def run() -> int:
    _watch_loop()
    _watch_reads()
    _name_threads()
    path = Path(os.environ["DROVER_PARTS"])
    signal.signal(signal.SIGUSR1, lambda *_: _parts.clear())
    signal.signal(signal.SIGUSR2, lambda *_: path.write_text(json.dumps(_parts)))
    return main.main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(run())

"""Small kernels, in us each: `launch` many in a row, `launch_wait` one at a time until the host knows of its end.

In a row the device works while the host calls on: the figure is how fast host and driver issue, or, where that is
less, how fast the device ends them. One at a time the whole way counts: the call, the bus, the kernel, and its end back
on the host. A slow host, a busy PCIe link or a driver in trouble shows here before it shows in bandwidth.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator

from drover_agent.probes.base import Context, Result
from drover_agent.probes.near import near
from drover_agent.probes.timing import LEAST_REPEATS, variation

UNIT = "us"
CALLS = 1000  # in a row
WAITS = 100  # between two looks at the clock, each waited for


def run(context: Context, name: str) -> Iterator[Result]:
    """`name`: launch or launch_wait."""
    torch = context.torch
    for device in context.devices:
        context.show_progress(f"{device.name}: {name}")
        with near(device):
            small = torch.zeros(32, device=device.name)

            def call(small: object = small) -> None:
                small.add_(1)  # type: ignore[attr-defined]  # a tensor: torch is not typed here

            def wait(name: str = device.name, cuda: bool = device.is_cuda) -> None:
                if cuda:
                    torch.cuda.synchronize(name)

            call()  # loads the kernel
            wait()
            found: list[float] = []
            until = time.monotonic() + context.seconds
            while len(found) < LEAST_REPEATS or time.monotonic() < until:
                if context.stopping():
                    raise InterruptedError("asked to stop")
                found.append(_one_by_one(call, wait) if name == "launch_wait" else _in_a_row(call, wait))
        how = f"each waited for, {WAITS}" if name == "launch_wait" else f"{CALLS}"
        yield Result(
            name, device.slot, statistics.median(found) * 1e6, UNIT, f"{how} in a row",
            spread=variation(found), repeats=len(found),
        )  # fmt: skip


def _in_a_row(call: Callable[[], None], wait: Callable[[], None]) -> float:
    """Seconds of each."""
    began = time.perf_counter()
    for _ in range(CALLS):
        call()
    wait()
    return (time.perf_counter() - began) / CALLS


def _one_by_one(call: Callable[[], None], wait: Callable[[], None]) -> float:
    """Seconds of each: the median, as single ones wait for the host's own work."""
    took: list[float] = []
    for _ in range(WAITS):
        began = time.perf_counter()
        call()
        wait()
        took.append(time.perf_counter() - began)
    return statistics.median(took)

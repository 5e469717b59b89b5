"""Latency of a kernel launch, in us: what a small kernel costs from the call to its end, many in a row.

A slow host, a busy PCIe link or a driver in trouble shows here before it shows in bandwidth.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator

from drover_agent.probes.base import Context, Result
from drover_agent.probes.near import near
from drover_agent.probes.timing import LEAST_REPEATS, variation

UNIT = "us"
CALLS = 1000


def run(context: Context, name: str) -> Iterator[Result]:
    torch = context.torch
    for device in context.devices:
        context.tell(f"{device.name}: launches")
        with near(device):
            small = torch.zeros(32, device=device.name)
            found: list[float] = []
            until = time.monotonic() + context.seconds
            small.add_(1)  # loads the kernel
            while len(found) < LEAST_REPEATS or time.monotonic() < until:
                if context.stopping():
                    raise InterruptedError("told to stop")
                began = time.perf_counter()
                for _ in range(CALLS):
                    small.add_(1)
                if device.is_cuda:
                    torch.cuda.synchronize(device.name)
                found.append((time.perf_counter() - began) / CALLS * 1e6)
        yield Result(
            name, device.slot, statistics.median(found), UNIT, f"{CALLS} in a row",
            spread=variation(found), repeats=len(found),
        )  # fmt: skip

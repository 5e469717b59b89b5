"""Bandwidth between a device and its host, in GB/s: each way alone, and both at once. Pinned memory.

A link that trained with fewer lanes or at a lower generation gives half, or a quarter. On a CPU a copy in memory stands
in, which shows only that the probe works.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from drover_agent.probes.base import Context, Device, Result
from drover_agent.probes.near import near
from drover_agent.probes.timing import COPIES, random_bytes, time_calls

UNIT = "GB/s"
BYTES = 256 << 20
CPU_BYTES = 8 << 20


def run(context: Context, name: str) -> Iterator[Result]:
    """`name`: pcie_h2d, pcie_d2h or pcie_both (the sum of both ways)."""
    for device in context.devices:
        size = BYTES if device.is_cuda else CPU_BYTES
        context.show_progress(f"{device.name}: {name} of {size >> 20} MiB")
        with near(device) as bound:
            try:
                call = _call(context.torch, device, name, size, context.seed)
            except RuntimeError as error:  # memory that cannot be pinned: a limit of the host
                yield Result(name, device.slot, None, UNIT, f"no pinned memory: {str(error).splitlines()[0]}")
                continue
            timing = time_calls(context.torch, device, call, context.seconds, context.stopping, COPIES)
        moved = size * (2 if name == "pcie_both" else 1)
        detail = (
            f"{size >> 20} MiB, pinned{', on the cores next to it' if bound else ''}"
            if device.is_cuda
            else f"{size >> 20} MiB within the host's memory"
        )
        yield Result(
            name, device.slot, moved / timing.seconds / 1e9, UNIT, detail, spread=timing.spread, repeats=timing.repeats
        )


def _call(torch: Any, device: Device, name: str, size: int, seed: int) -> Callable[[], Any]:
    def pair() -> tuple[Any, Any]:
        host = torch.empty(size, dtype=torch.uint8, pin_memory=device.is_cuda)
        drawn = random_bytes(torch, size, seed)
        return host.copy_(drawn), drawn.to(device.name, copy=True)

    host, there = pair()
    if name == "pcie_h2d":
        return lambda: there.copy_(host, non_blocking=True)
    if name == "pcie_d2h":
        return lambda: host.copy_(there, non_blocking=True)
    other_host, other_there = pair()
    if not device.is_cuda:
        return lambda: (there.copy_(host), other_host.copy_(other_there))
    ways = [torch.cuda.Stream(device.name) for _ in range(2)]

    def both() -> None:
        """On two streams, which the current one (whose events time it) waits for."""
        now = torch.cuda.current_stream(device.name)
        for way, to, source in zip(ways, (there, other_host), (host, other_there), strict=True):
            way.wait_stream(now)
            with torch.cuda.stream(way):
                to.copy_(source, non_blocking=True)
        for way in ways:
            now.wait_stream(way)

    return both

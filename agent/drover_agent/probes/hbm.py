"""Bandwidth of a device's own memory, in GB/s: bytes read plus bytes written, over the time (as STREAM counts).

copy: b = a. triad: c = a + s b. Arrays far beyond the last cache (H100: 50 MB), so that the memory itself is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from drover_agent.probes.base import Context, Device, Result
from drover_agent.probes.timing import COPIES, time_calls

UNIT = "GB/s"
BYTES = 2 << 30
LEAST_BYTES = 256 << 20  # five times the largest cache
FREE_SHARE = 0.2  # of the memory, for each of three arrays
CPU_BYTES = 16 << 20


def run(context: Context, name: str) -> Iterator[Result]:
    """`name`: hbm_copy or hbm_triad."""
    arrays = {"hbm_copy": 2, "hbm_triad": 3}[name]
    for device in context.devices:
        size = array_bytes(context.torch, device)
        if not size:
            yield Result(name, device.slot, None, UNIT, "too little free memory on the device")
            continue
        context.show_progress(f"{device.name}: {name} of {size >> 20} MiB")
        timing = time_calls(
            context.torch, device, _call(context.torch, device, name, size), context.seconds, context.stopping, COPIES
        )
        yield Result(
            name, device.slot, arrays * size / timing.seconds / 1e9, UNIT, f"{arrays} arrays of {size >> 20} MiB",
            spread=timing.spread, repeats=timing.repeats,
        )  # fmt: skip


def array_bytes(torch: Any, device: Device) -> int:
    """Of one array; 0: it would lie in the cache."""
    if not device.is_cuda:
        return CPU_BYTES
    free, _ = torch.cuda.mem_get_info(device.name)
    size = min(BYTES, int(free * FREE_SHARE) >> 20 << 20)
    return size if size >= LEAST_BYTES else 0


def _call(torch: Any, device: Device, name: str, size: int) -> Callable[[], Any]:
    count = size // 4
    a, b = (torch.rand(count, dtype=torch.float32, device=device.name) for _ in range(2))
    if name == "hbm_copy":
        return lambda: b.copy_(a)
    c = torch.empty_like(a)
    return lambda: torch.add(a, b, alpha=3.0, out=c)

"""Bandwidth of the host's memory, in GB/s read plus written: a large copy by all cores."""

from __future__ import annotations

from collections.abc import Iterator

from drover_agent.probes.base import Context, Device, Result
from drover_agent.probes.timing import COPIES, random_bytes, time_calls

UNIT = "GB/s"
BYTES = 1 << 30
QUICK_BYTES = 64 << 20


def run(context: Context, name: str) -> Iterator[Result]:
    torch = context.torch
    size = BYTES if any(device.is_cuda for device in context.devices) else QUICK_BYTES
    context.show_progress(f"host memory, {size >> 20} MiB")
    source = random_bytes(torch, size, context.seed)
    target = source.clone()
    host = Device(None, "cpu", "host", 0)
    timing = time_calls(torch, host, lambda: target.copy_(source), context.seconds, context.stopping, COPIES)
    yield Result(
        name, None, 2 * size / timing.seconds / 1e9, UNIT, f"{size >> 20} MiB, {torch.get_num_threads()} threads",
        spread=timing.spread, repeats=timing.repeats,
    )  # fmt: skip

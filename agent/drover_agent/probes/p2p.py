"""Bandwidth from each GPU to each other one of the node, in GB/s, one pair at a time: NVLink where it is there.

The matrix shows a pair whose links are down, and a GPU all of whose pairs are slow.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations

from drover_agent.probes.base import Context, Result
from drover_agent.probes.timing import PAIRS, random_bytes, time_calls

UNIT = "GB/s"
BYTES = 256 << 20
CPU_BYTES = 4 << 20


def run(context: Context, name: str) -> Iterator[Result]:
    torch = context.torch
    pairs = list(permutations(context.devices, 2))
    if not pairs:
        yield Result(name, None, None, UNIT, "needs two devices")
        return
    for source, target in pairs:
        if context.stopping():
            raise InterruptedError("asked to stop")
        context.show_progress(f"{source.name} to {target.name}")
        direct = source.is_cuda and torch.cuda.can_device_access_peer(target.name, source.name)
        size = BYTES if source.is_cuda else CPU_BYTES
        here = random_bytes(torch, size, context.seed, source.name)
        there = torch.zeros(size, dtype=torch.uint8, device=target.name)

        def copy(here: object = here, there: object = there) -> object:
            return there.copy_(here, non_blocking=True)  # type: ignore[attr-defined]  # tensors: torch is not typed here

        # Copies between devices run on the source's stream.
        share = context.seconds / max(1, len(context.devices) - 1)
        timing = time_calls(torch, source, copy, share, context.stopping, PAIRS)
        right = torch.equal(there, random_bytes(torch, size, context.seed, target.name))
        how = "direct" if direct else "through the host" if source.is_cuda else "within the host's memory"
        detail = f"{size >> 20} MiB, {how}" if right else f"{size >> 20} MiB came out changed"
        yield Result(
            name, source.slot, size / timing.seconds / 1e9, UNIT, detail, peer=target.slot, ok=None if right else False,
            spread=timing.spread, repeats=timing.repeats,
        )  # fmt: skip

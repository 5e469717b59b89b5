"""Patterns over most of a device's free memory, bit-exact: what is read must be what was written.

walking ones (a data line that sticks), address (a line that reaches the wrong cell), random and its inverse (cells that
disturb their neighbours). The value is how many bytes were tested; a single wrong one is a fault.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from drover_agent.probes.base import Context, Device, Result

UNIT = "B"
FREE_SHARE = 0.9
BLOCK_BYTES = 1 << 30
CPU_BYTES = 32 << 20
CPU_BLOCK_BYTES = 8 << 20
REPORTED = 4  # wrong addresses written out


def run(context: Context, name: str) -> Iterator[Result]:
    torch = context.torch
    for device in context.devices:
        blocks = _take(torch, device)
        if not blocks:
            yield Result(name, device.slot, None, UNIT, "no free memory on the device")
            continue
        tested = sum(block.numel() * 8 for block in blocks)
        wrong: list[str] = []
        count = 0
        for pattern in ("walking ones", "address", "random", "inverse random"):
            context.show_progress(f"{device.name}: {pattern} over {tested >> 20} MiB")
            for number, block in enumerate(blocks):
                _raise_if_stopping(context)
                block.copy_(values(torch, device, pattern, number, block.numel(), context.seed))
            for number, block in enumerate(blocks):  # only after all are written: one may overwrite another
                _raise_if_stopping(context)
                bad = block != values(torch, device, pattern, number, block.numel(), context.seed)
                found = int(bad.sum().item())
                if found:
                    count += found
                    places = torch.nonzero(bad).flatten()[:REPORTED].tolist()
                    wrong += [f"{pattern}, block {number}, word {place}" for place in places]
        del blocks
        detail = f"{tested >> 20} MiB in four patterns"
        if count:
            detail = f"{count} of {tested // 8} words came back wrong: {'; '.join(wrong[:REPORTED])}"
        yield Result(name, device.slot, float(tested), UNIT, detail, ok=not count)


def values(torch: Any, device: Device, pattern: str, number: int, count: int, seed: int) -> Any:
    """Return what block `number` holds: int64 [count]. The comparison computes it again, from the same numbers."""
    if pattern in ("walking ones", "address"):
        words = torch.arange(count, dtype=torch.int64, device=device.name)
        if pattern == "address":
            return words * 8 + (number << 40)
        return torch.ones_like(words) << ((words + number) % 64)
    generator = torch.Generator(device=device.name).manual_seed(seed * 1000 + number)
    drawn = torch.randint(-(2**62), 2**62, (count,), generator=generator, dtype=torch.int64, device=device.name)
    return ~drawn if pattern == "inverse random" else drawn


def _take(torch: Any, device: Device) -> list[Any]:
    """Blocks of int64 that fill most of the free memory; room is left for one block of what is compared with."""
    size = BLOCK_BYTES if device.is_cuda else CPU_BLOCK_BYTES
    total = int(torch.cuda.mem_get_info(device.name)[0] * FREE_SHARE) - 4 * size if device.is_cuda else CPU_BYTES
    blocks = []
    for _ in range(total // size):
        try:
            blocks.append(torch.empty(size // 8, dtype=torch.int64, device=device.name))
        except torch.OutOfMemoryError:
            break
    return blocks


def _raise_if_stopping(context: Context) -> None:
    if context.stopping():
        raise InterruptedError("asked to stop")

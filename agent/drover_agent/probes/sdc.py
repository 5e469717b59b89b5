"""Silent corruption: the same products again and again, and on every device, must be the same to the last bit.

A core that computes wrongly now and then gives no error; only an answer that differs from its own, or from that of the
other devices of the same model, shows it. Several shapes and types, since a defect sits in one unit of the chip.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

from drover_agent.probes.base import Context, Device, Result
from drover_agent.probes.gemm import UnsupportedError, product

UNIT = "products"
KINDS = ("bf16", "fp16", "fp32", "fp64", "fp8")
SIZES = (1024, 3072, 8192)
CPU_SIZES = (64, 192)
LEAST_PRODUCTS = 3
CHUNK = 1 << 24  # words

Product = Callable[[Any, Device, str, int, int], Callable[[], Any]]


def run(context: Context, name: str, make: Product = product) -> Iterator[Result]:
    """One result per device: how many products it made, and whether all were right."""
    torch = context.torch
    made: Counter[Device] = Counter()
    wrong: dict[Device, list[str]] = defaultdict(list)
    first: dict[Device, dict[tuple[str, int], int]] = {device: {} for device in context.devices}
    for device in context.devices:
        context.show_progress(f"{device.name}: products, bit for bit")
        cases = [(kind, size) for kind in KINDS for size in (SIZES if device.is_cuda else CPU_SIZES)]
        share = context.seconds / len(cases)
        for kind, size in cases:
            try:
                call = make(torch, device, kind, size, context.seed)
            except UnsupportedError:
                continue
            until = time.monotonic() + share
            reference = call().clone()
            first[device][kind, size] = fingerprint(torch, reference)
            count, differ = 1, 0
            while count < LEAST_PRODUCTS or time.monotonic() < until:
                if context.stopping():
                    raise InterruptedError("asked to stop")
                count += 1
                differ += not torch.equal(bits(torch, call()), bits(torch, reference))
            made[device] += count
            if differ:
                wrong[device].append(f"{kind} {size}: {differ} of {count} products differ from the first")
    for device, text in odd_ones(first):
        wrong[device].append(text)
    for device in context.devices:
        if not made[device]:
            yield Result(name, device.slot, None, UNIT, "none of the number types is there")
            continue
        detail = "; ".join(wrong[device]) or f"{len(first[device])} shapes and types, each the same every time"
        yield Result(name, device.slot, float(made[device]), UNIT, detail, ok=not wrong[device])


def bits(torch: Any, values: Any) -> Any:
    """The words of a matrix as integers: no two different patterns are equal, and NaN is equal to itself."""
    return values.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()])


def fingerprint(torch: Any, values: Any) -> int:
    """Of all bits of a matrix: the sum of its words, each times an odd number of its own, modulo 2^64.

    A single changed bit changes it, for an odd number times a power of two below 2^64 is not 0 modulo 2^64.
    """
    words = bits(torch, values).flatten()
    total = 0
    for start in range(0, words.numel(), CHUNK):  # as 64-bit integers a large matrix would take four times its memory
        part = words[start : start + CHUNK].to(torch.int64)
        factors = torch.arange(start, start + part.numel(), dtype=torch.int64, device=part.device) * 5308871522 + 1
        total += int((part * factors).sum().item())
    return total % 2**64


def odd_ones(first: dict[Device, dict[tuple[str, int], int]]) -> Iterator[tuple[Device, str]]:
    """Devices whose answer most devices of the same model do not share. With two that differ, it may be either."""
    groups: dict[tuple[str, str, int], dict[Device, int]] = defaultdict(dict)
    for device, answers in first.items():
        for (kind, size), value in answers.items():
            groups[device.model, kind, size][device] = value
    for (_, kind, size), by_device in groups.items():
        counts = Counter(by_device.values())
        usual, votes = counts.most_common(1)[0]
        if len(counts) == 1:
            continue
        for holder, value in by_device.items():
            if votes * 2 <= len(by_device):
                yield holder, f"{kind} {size}: devices of one model disagree, and no majority says which is right"
            elif value != usual:
                yield holder, f"{kind} {size}: another answer than {votes} devices of its model"

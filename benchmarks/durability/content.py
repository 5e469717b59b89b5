"""What agents send: values that follow from place and time, so that anyone can say what must be stored."""

from __future__ import annotations

import zlib
from collections.abc import Iterable

from drover_core.model.fleet import NodeSpec

GPUS = 8
METRICS = ("power_w", "gpu_temp_c", "sm_clock_mhz")


def name(number: int) -> str:
    return f"n{number:02d}"


def spec(number: int) -> NodeSpec:
    return NodeSpec(name(number), "r1", "leaf1", "default", "H100-SXM", GPUS)


def toml(nodes: int) -> str:
    return f'[[nodes]]\nnames = "n[00-{nodes - 1:02d}]"\nrack = "r1"\nsku = "H100-SXM"\ngpus = {GPUS}\n'


def values(node: str, gpu: int, ts_ms: int) -> tuple[int, int, int]:
    """In the order of METRICS."""
    drawn = zlib.crc32(f"{node}/{gpu}/{ts_ms}".encode())
    return 100 + drawn % 500, 30 + drawn // 500 % 40, 1000 + drawn // 20_000 % 900


def checksum(rows: Iterable[tuple[int, tuple[float | None, ...]]]) -> int:
    """Of one GPU's rows, (ts_ms, values), each counted as often as it occurs; in any order."""
    return sum(zlib.crc32(repr((ts_ms, tuple(found))).encode()) for ts_ms, found in rows) % (1 << 64)

"""What the parts of `bench_gpu.py` have in common: how an agent is started from a source tree, and the pace."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SIZE = 8192  # of the matrices, as in the gemm probe
SETTLE_S = 5.0  # after the agent was started or stopped, before a window counts
PACKAGES = [str(ROOT / folder) for folder in ("proto", "core", "agent", "benchmarks")]  # none needs to be installed
ENV = os.environ | {"PYTHONPATH": os.pathsep.join([*PACKAGES, *filter(None, [os.environ.get("PYTHONPATH")])])}
SETTINGS = {"node": "gpu-node", "hardware": "nvml", "dcgm_url": "", "steps_socket": "", "kubelet_socket": ""}


def sets(**more: str) -> list[str]:
    return [part for key, value in (SETTINGS | more).items() for part in ("--set", f"{key}={json.dumps(value)}")]


def torch_with_cuda() -> Any:
    """The module, or why there is none."""
    try:
        import torch
    except ImportError as error:
        return str(error)
    return torch if torch.cuda.is_available() else "torch sees no CUDA device"


def each_second(seconds: float) -> Iterator[int]:
    begin_s = time.time()
    for number in range(round(seconds)):
        time.sleep(max(begin_s + number - time.time(), 0))
        yield round((begin_s + number) * 1000)

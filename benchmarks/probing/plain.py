"""What plain library calls of torch reach here, by the host's clock: the ceiling that probes are held against.

    python plain.py DEVICE SIZE COPY_BYTES SECONDS

Nothing of Drover: `torch.mm` of two random matrices, and `copy_` of one array into another, again and again, the
device waited for before and after each batch. The best of ten batches counts, as a ceiling should. One JSON line.
"""

import json
import sys
import time
from collections.abc import Callable
from functools import partial

import torch

BATCHES = 10


def best(call: Callable[[], object], device: str, seconds: float) -> float:
    """Seconds of one call."""
    wait = torch.cuda.synchronize if device.startswith("cuda") else lambda: None
    for _ in range(3):
        call()
    wait()
    began = time.perf_counter()
    call()
    wait()
    count = max(1, round(seconds / BATCHES / (time.perf_counter() - began)))
    found = []
    for _ in range(BATCHES):
        began = time.perf_counter()
        for _ in range(count):
            call()
        wait()
        found.append((time.perf_counter() - began) / count)
    return min(found)


def main(device: str, size: int, copy_bytes: int, seconds: float) -> dict[str, float]:
    reached: dict[str, float] = {}
    kinds = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    for name, dtype in kinds.items():
        n = min(size, 4096) if name in ("fp64", "fp32") else size
        a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
        torch.backends.cuda.matmul.allow_tf32 = False
        reached[f"gemm_{name}"] = 2 * n**3 / best(partial(torch.mm, a, b), device, seconds) / 1e12
    if device.startswith("cuda"):
        torch.backends.cuda.matmul.allow_tf32 = True
        a, b = (torch.randn(size, size, device=device) for _ in range(2))
        reached["gemm_tf32"] = 2 * size**3 / best(lambda: torch.mm(a, b), device, seconds) / 1e12
        if torch.cuda.get_device_capability(device) >= (8, 9):
            x, y = (torch.randn(size, size, device=device).to(torch.float8_e4m3fn) for _ in range(2))
            one, turned = torch.ones((), device=device), y.t()
            call = lambda: torch._scaled_mm(x, turned, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)  # noqa: E731  # as the others
            reached["gemm_fp8"] = 2 * size**3 / best(call, device, seconds) / 1e12
    source = torch.rand(copy_bytes // 4, device=device)
    target = torch.empty_like(source)
    reached["hbm_copy"] = 2 * copy_bytes / best(lambda: target.copy_(source), device, seconds) / 1e9
    return reached


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))))

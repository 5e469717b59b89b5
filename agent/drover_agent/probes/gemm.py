"""Matrix products: the arithmetic that training is made of, per number type, in TFLOP/s.

2 n^3 operations for a product of n x n matrices. Random data, because zeros cost less power and so clock higher.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from drover_agent.probes.base import Context, Device, Result
from drover_agent.probes.timing import random_bytes, time_calls

UNIT = "TFLOP/s"
# Large enough that every SM is busy for many waves (H100: 8192 gives what larger ones give); fp64 and fp32 without
# tensor cores take longer for the same size.
SIZES = {"fp64": 4096, "fp32": 4096}
SIZE = 8192
CPU_SIZE = 256
DRAWN = 8  # matrices kept: two seeds of each of four sizes, under 1 GiB of the host's memory


def run(context: Context, name: str) -> Iterator[Result]:
    """`name`: gemm_TYPE; fp64, fp32, tf32, bf16, fp16, fp8 (e4m3, 32-bit accumulation) or fp4 (nvfp4)."""
    kind = name.removeprefix("gemm_")
    for device in context.devices:
        size = SIZES.get(kind, SIZE) if device.is_cuda else CPU_SIZE
        context.show_progress(f"{device.name}: {kind} {size}")
        try:
            call = product(context.torch, device, kind, size, context.seed)
        except UnsupportedError as error:
            yield Result(name, device.slot, None, UNIT, str(error))
            continue
        timing = time_calls(context.torch, device, call, context.seconds, context.stopping)
        yield Result(
            name, device.slot, 2 * size**3 / timing.seconds / 1e12, UNIT, f"{size} x {size}",
            spread=timing.spread, repeats=timing.repeats,
        )  # fmt: skip


class UnsupportedError(Exception):
    """This device or build does not have the type."""


def product(torch: Any, device: Device, kind: str, size: int, seed: int) -> Callable[[], Any]:
    """A call that multiplies two random matrices of `kind` on the device; the result is returned, not copied.

    Raises:
        UnsupportedError: the device, or this build of torch, does not have the type.
    """
    if kind == "tf32" and not device.is_cuda:
        raise UnsupportedError("tf32 is a format of tensor cores; a CPU has none")
    if kind == "fp8":
        return _product_fp8(torch, device, size, seed)
    if kind == "fp4":
        return _product_fp4(torch, device, size, seed)
    types = {"fp64": "float64", "fp32": "float32", "tf32": "float32", "bf16": "bfloat16", "fp16": "float16"}
    a, b = (random(torch, device, (size, size), seed + k).to(getattr(torch, types[kind])) for k in range(2))
    out = torch.empty_like(a)
    tensor_cores = kind == "tf32"

    def multiply() -> Any:
        if device.is_cuda:  # a switch of the process: another probe may have turned it
            torch.backends.cuda.matmul.allow_tf32 = tensor_cores
        return torch.mm(a, b, out=out)

    return multiply


def random(torch: Any, device: Device, shape: tuple[int, ...], seed: int) -> Any:
    """float32, normal, drawn on the CPU: the same numbers on every device, however its own generator draws."""
    return _drawn(torch, shape, seed).to(device.name)


@functools.lru_cache(maxsize=DRAWN)
def _drawn(torch: Any, shape: tuple[int, ...], seed: int) -> Any:
    """On the host, kept for the next device and type: 8192 x 8192 normal numbers take a second of one core."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)


def _product_fp8(torch: Any, device: Device, size: int, seed: int) -> Callable[[], Any]:
    if not device.is_cuda or not hasattr(torch, "_scaled_mm") or torch.cuda.get_device_capability(device.name) < (8, 9):
        raise UnsupportedError("fp8 needs tensor cores of compute capability 8.9 or newer")
    a, b = (random(torch, device, (size, size), seed + k).to(torch.float8_e4m3fn) for k in range(2))
    one = torch.ones((), device=device.name)
    b = b.t()  # the second operand is read by columns

    def multiply() -> Any:
        return torch._scaled_mm(a, b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)

    try:
        multiply()
    except RuntimeError as error:
        raise UnsupportedError(f"fp8: {str(error).splitlines()[0]}") from None
    return multiply


FP4_BLOCK = 16  # values that share a scale


def _product_fp4(torch: Any, device: Device, size: int, seed: int) -> Callable[[], Any]:
    """nvfp4: two e2m1 values a byte, an e4m3 scale for each 16 of them, scales swizzled as Blackwell's cores read them.

    As pytorch's own tests call it (test/test_scaled_matmul_cuda.py: capability 10.0 or newer) and as
    torch/testing/_internal distinguishes formats: round_up(rows, 128) x round_up(size / 16, 4) scales, SWIZZLE_32_4_4.
    All bytes are drawn, all scales are 1: their order then does not matter.

    Raises:
        UnsupportedError: the device, or this build of torch, does not have the type.
    """
    multiply_scaled = getattr(torch.nn.functional, "scaled_mm", None)
    if not device.is_cuda or torch.cuda.get_device_capability(device.name) < (10, 0):
        raise UnsupportedError("unsupported: fp4 needs tensor cores of compute capability 10.0 or newer")
    if multiply_scaled is None or not hasattr(torch, "float4_e2m1fn_x2"):
        raise UnsupportedError(f"unsupported: torch {torch.__version__} has no product of fp4 matrices")
    kinds, swizzles = torch.nn.functional.ScalingType, torch.nn.functional.SwizzleType
    a, b = (random_bytes(torch, size * size // 2, seed + k, device.name).view(size, size // 2) for k in range(2))
    scales = torch.ones(-(-size // 128) * 128 * (-(-size // FP4_BLOCK // 4) * 4), device=device.name)
    scales = scales.to(torch.float8_e4m3fn)
    packed_a, packed_b = a.view(torch.float4_e2m1fn_x2), b.view(torch.float4_e2m1fn_x2).t()

    def multiply() -> Any:
        return multiply_scaled(
            packed_a, packed_b, scales, kinds.BlockWise1x16, scales, kinds.BlockWise1x16,
            swizzle_a=swizzles.SWIZZLE_32_4_4, swizzle_b=swizzles.SWIZZLE_32_4_4, output_dtype=torch.bfloat16,
        )  # fmt: skip

    try:
        multiply()
    except (RuntimeError, ValueError) as error:  # NotImplementedError is a RuntimeError
        raise UnsupportedError(f"unsupported: fp4: {(str(error).splitlines() or [''])[0]}") from None
    return multiply

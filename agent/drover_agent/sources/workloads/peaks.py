"""What GPUs could do at most: dense bf16 operations per second, the denominator of MFU.

From NVIDIA's data sheets and architecture papers. Where a sheet gives the figure with sparsity only, half of it stands
here. A model is found by its name in NVML; one that is not in the table has no peak, and so no MFU (B300 and H20 are
not: what is published of them differs).
"""

from __future__ import annotations

import re

# NVML's name -> dense bf16 TFLOP/s of one GPU at its boost clock. The first that matches counts.
PEAKS: tuple[tuple[str, float], ...] = (
    (r"\bGB200\b", 2500.0),  # GB200 NVL72: 360 PFLOP/s with sparsity over 72
    (r"\bB200\b", 2250.0),  # HGX B200: 36 PFLOP/s with sparsity over 8
    (r"\bGH200\b", 989.4),  # 1,979 with sparsity
    (r"\bH200 NVL\b", 835.5),  # 1,671 with sparsity
    (r"\bH200\b", 989.4),  # 1,979 with sparsity
    (r"\bH100 PCIe\b", 756.0),  # 1,513 with sparsity
    (r"\bH100 NVL\b", 835.5),  # 1,671 with sparsity
    (r"\bH[18]00\b.*\bHBM3\b|\bH[18]00[ -]SXM", 989.4),  # H100 and H800 SXM5, "NVIDIA H100 80GB HBM3"
    (r"\bA[18]00\b", 312.0),  # A100 and A800: SXM4 and PCIe alike
    (r"\bA30\b", 165.0),
    (r"\bA40\b", 149.7),
    (r"\bA10\b", 125.0),
    (r"\bL40S\b", 362.05),
    (r"\bL40\b", 181.05),
    (r"\bL4\b", 121.0),  # 242 with sparsity
)
_COMPILED = tuple((re.compile(pattern), peak * 1e12) for pattern, peak in PEAKS)


def bf16_peak_flops(model: str) -> float | None:
    """Dense bf16 FLOP/s of a GPU by NVML's name of its model; None when it is not known."""
    return next((peak for pattern, peak in _COMPILED if pattern.search(model)), None)

"""What is published of each model: the datasheet's peak, and the share of it that a healthy board reaches.

A floor for fleets too small to judge by themselves, and a second look at large ones. Never alone a reason to fail a
GPU whose whole configuration reads the same. Peaks are dense (datasheets quote tensor cores with sparsity, twice that).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from drover_collector.store.repositories.probes import Key

# How far below what healthy boards reached a board may read: other libraries, shapes and hosts, 15 %; where the share
# is an assumption instead of a measurement, 25 %.
FLOOR_MEASURED = 0.85
FLOOR_ASSUMED = 0.75
FULL_POWER = (
    0.98  # of the model's own limit: below, by design or not, its products are slower, and no table says how much
)


@dataclass(frozen=True, slots=True)
class Reference:
    """`expected` and `floor` in the probe's unit; `source` of the share, after that of the peak."""

    expected: float
    floor: float
    source: str


@dataclass(frozen=True, slots=True)
class Sku:
    """One model.

    Attributes:
        name: as NVML has it, whole: the H200 NVL is another model than the H200. power_w: the limit it is sold with.
        datasheet: where the peaks are from. peaks: figure -> peak. reached: figure -> (share, source).
    """

    name: str
    power_w: float
    datasheet: str
    peaks: Mapping[str, float]
    reached: Mapping[str, tuple[float, str]]


_MAMF = "S. Bekman, ML Engineering, Maximum Achievable Matmul FLOPS (best shape)"
_NDM = "mean of 729 Azure NDmv4 nodes, microsoft/superbench-results v0.4.0"
_H200 = "measured on one H200, 8192 cubed, random data (issue 5)"
_ASSUMED = "assumed"
_HOPPER = {"gemm_fp64": 66.9, "gemm_fp32": 66.9, "gemm_tf32": 494.7, "gemm_bf16": 989.4, "gemm_fp16": 989.4}
_AMPERE = {"gemm_fp64": 19.5, "gemm_fp32": 19.5, "gemm_tf32": 156.0, "gemm_bf16": 312.0, "gemm_fp16": 312.0}
_AMPERE_REACHED = {
    "gemm_fp64": (18.95 / 19.5, _NDM), "gemm_fp32": (18.36 / 19.5, _NDM), "gemm_tf32": (127.4 / 156, _NDM),
    "gemm_bf16": (261.2 / 312, _NDM), "gemm_fp16": (275.4 / 312, _NDM), "hbm_copy": (0.85, _ASSUMED),
    "hbm_triad": (0.85, _ASSUMED), "p2p": (0.80, _ASSUMED),
}  # fmt: skip
# Nobody publishes these by this method; near to what bf16 reaches.
_HOPPER_REST = {
    "gemm_fp64": (0.80, _ASSUMED), "gemm_fp32": (0.75, _ASSUMED), "gemm_tf32": (0.75, _ASSUMED),
    "gemm_fp16": (0.75, _ASSUMED), "hbm_triad": (0.88, _ASSUMED),
}  # fmt: skip

SKUS: tuple[Sku, ...] = (
    Sku(
        "NVIDIA H200", 700, "NVIDIA H200 datasheet (SXM)",
        _HOPPER | {"gemm_fp8": 1979.0, "hbm_copy": 4800.0, "hbm_triad": 4800.0, "p2p": 450.0},
        _HOPPER_REST | {"gemm_bf16": (790 / 989.4, _H200), "gemm_fp8": (1453.4 / 1979, _MAMF),
                        "hbm_copy": (4300 / 4800, _H200), "p2p": (335 / 0.85 / 450, "Azure NHC ND H200 v5: 335")},
    ),
    Sku(
        "NVIDIA H100 80GB HBM3", 700, "NVIDIA H100 datasheet (SXM)",
        _HOPPER | {"gemm_fp8": 1979.0, "hbm_copy": 3350.0, "hbm_triad": 3350.0, "p2p": 450.0},
        _HOPPER_REST | {"gemm_bf16": (794.5 / 989.4, _MAMF), "gemm_fp8": (1402.6 / 1979, _MAMF),
                        "hbm_copy": (0.88, _ASSUMED), "p2p": (0.80, _ASSUMED)},
    ),
    Sku(
        "NVIDIA H100 PCIe", 350, "NVIDIA H100 datasheet (PCIe)",
        {"gemm_fp64": 51.0, "gemm_fp32": 51.0, "gemm_tf32": 378.0, "gemm_bf16": 756.0, "gemm_fp16": 756.0,
         "gemm_fp8": 1513.0, "hbm_copy": 2000.0, "hbm_triad": 2000.0},
        # Its 350 W, not its tensor cores, bound what random data reach.
        dict.fromkeys(("gemm_tf32", "gemm_bf16", "gemm_fp16", "gemm_fp8"), (0.55, _ASSUMED))
        | {"gemm_fp64": (0.7, _ASSUMED), "gemm_fp32": (0.7, _ASSUMED),
           "hbm_copy": (0.88, _ASSUMED), "hbm_triad": (0.88, _ASSUMED)},
    ),
    Sku(
        "NVIDIA A100-SXM4-80GB", 400, "NVIDIA A100 datasheet (SXM 80 GB)",
        _AMPERE | {"hbm_copy": 2039.0, "hbm_triad": 2039.0, "p2p": 300.0}, _AMPERE_REACHED,
    ),
    Sku(
        "NVIDIA A100-SXM4-40GB", 400, "NVIDIA A100 datasheet (SXM 40 GB)",
        _AMPERE | {"hbm_copy": 1555.0, "hbm_triad": 1555.0, "p2p": 300.0}, _AMPERE_REACHED,  # the same chip and power
    ),
    Sku(
        "NVIDIA B200", 1000, "NVIDIA DGX B200 datasheet, an eighth of it",
        {"gemm_bf16": 2250.0, "gemm_fp16": 2250.0, "gemm_fp8": 4500.0, "gemm_tf32": 1125.0, "hbm_copy": 8000.0,
         "hbm_triad": 8000.0, "p2p": 900.0},
        {"gemm_bf16": (1745 / 2250, _MAMF), "gemm_fp16": (0.75, _ASSUMED), "gemm_fp8": (3432.5 / 4500, _MAMF),
         "gemm_tf32": (0.70, _ASSUMED), "hbm_copy": (0.85, _ASSUMED), "hbm_triad": (0.85, _ASSUMED),
         "p2p": (0.80, _ASSUMED)},
    ),
    Sku(
        "NVIDIA L40S", 350, "NVIDIA L40S datasheet",
        {"gemm_fp32": 91.6, "gemm_tf32": 183.0, "gemm_bf16": 362.0, "gemm_fp16": 362.0, "gemm_fp8": 733.0,
         "hbm_copy": 864.0, "hbm_triad": 864.0},
        dict.fromkeys(("gemm_fp32", "gemm_tf32", "gemm_bf16", "gemm_fp16", "gemm_fp8"), (0.55, _ASSUMED))
        | {"hbm_copy": (0.82, _ASSUMED), "hbm_triad": (0.82, _ASSUMED)},
    ),
)  # fmt: skip

# GB/s each way: transfers/s x lanes x 128/130, and what pinned copies reach of it. 12.36: example output of
# NVIDIA/nvbandwidth's README (generation 3); 25.9: superbench-results (4); 55.6: NVIDIA's post on nvbandwidth (5).
_PCIE_LANE: Mapping[int, float] = MappingProxyType({gen: 2.0 ** (gen - 3) * 8 / 8 * 128 / 130 for gen in (3, 4, 5)})
_PCIE_REACHED: Mapping[int, tuple[float, str]] = MappingProxyType(
    {
        3: (12.36 / (16 * _PCIE_LANE[3]), "nvbandwidth README"),
        4: (25.9 / (16 * _PCIE_LANE[4]), _NDM),
        5: (55.6 / (16 * _PCIE_LANE[5]), "NVIDIA, nvbandwidth"),
    }
)


def reference(probe: str, key: Key) -> Reference | None:
    """What a healthy board of this configuration reads, or None where nothing is known of it.

    None too for a part of a GPU (MIG), where what it depends on is not known, and below the model's own power limit.
    """
    if key.mig:
        return None
    if probe in ("pcie_h2d", "pcie_d2h"):
        if key.pcie_gen is None or key.pcie_gen not in _PCIE_LANE or not key.pcie_width:
            return None
        share, source = _PCIE_REACHED[key.pcie_gen]
        peak = key.pcie_width * _PCIE_LANE[key.pcie_gen]
        return Reference(peak * share, peak * share * FLOOR_MEASURED, f"PCI Express base specification; {source}")
    sku = next((s for s in SKUS if key.sku == s.name), None)
    if sku is None or probe not in sku.reached:
        return None
    if probe.startswith("gemm") and (key.power_limit_w is None or key.power_limit_w < FULL_POWER * sku.power_w):
        return None
    if probe == "p2p" and key.nvlinks is not None and key.nvlinks <= 0:
        return None
    share, source = sku.reached[probe]
    expected = sku.peaks[probe] * share
    floor = FLOOR_ASSUMED if source == _ASSUMED else FLOOR_MEASURED
    return Reference(expected, expected * floor, f"{sku.datasheet}; {source}")

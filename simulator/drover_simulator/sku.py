"""List the boards of the simulation, with constants of their data sheets and values that NVML reports.

Dynamic power is set so that a pure matrix multiplication at the highest clock would draw about 1.2 x TDP: such kernels
reach the power limit on real boards. Thermal resistance: the published mean of 0.060 degC/W for H100 (Theta's slots are
within +-11 % of it); the others are scaled so that TDP at a 25 degC inlet results in core temperatures of the field.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

MIB = 1048576.0


class SimulationError(ValueError):
    """A simulation that cannot be set up; the message is one line: what is wrong and what to do."""


@dataclass(frozen=True, slots=True)
class Sku:
    """One kind of board."""

    name: str  # as in fleet.toml
    model: str  # as NVML names it
    tdp_w: float
    idle_w: float  # no process holds the GPU
    static_w: float  # a CUDA context at full clocks, nothing running, at 50 degC
    dynamic_w: float  # added by the busiest kernel at the highest clock
    max_clock_mhz: float
    idle_clock_mhz: float
    memory_clock_mhz: float
    memory_bytes: float
    operating_temp_c: float  # software slowdown holds the core here; T.Limit counts down to it
    slowdown_temp_c: float  # hardware slowdown
    thermal_resistance: float  # degC/W, core over inlet
    heat_capacity_j_per_k: float  # with the resistance gives the time constant
    nvlinks: int
    nvlink_bytes_per_s: float  # one direction, all links
    pcie_generation: int
    pcie_width: int
    pcie_bytes_per_s: float
    remap_banks: int
    network_gbps: float
    unsupported: frozenset[str]  # metrics this board does not have


_GPM = frozenset(
    {
        "sm_active_ratio", "sm_occupancy_ratio", "tensor_active_ratio", "dram_active_ratio", "fp64_active_ratio",
        "fp32_active_ratio", "fp16_active_ratio", "nvlink_tx_bytes_per_s", "nvlink_rx_bytes_per_s",
    }
)  # fmt: skip
_BLACKWELL = frozenset({"nvlink_effective_ber"})

H100 = Sku(
    name="H100-SXM", model="NVIDIA H100 80GB HBM3", tdp_w=700, idle_w=70, static_w=115, dynamic_w=725,
    max_clock_mhz=1980, idle_clock_mhz=345, memory_clock_mhz=2619, memory_bytes=81559 * MIB,
    operating_temp_c=87, slowdown_temp_c=89, thermal_resistance=0.060, heat_capacity_j_per_k=230,
    nvlinks=18, nvlink_bytes_per_s=450e9, pcie_generation=5, pcie_width=16, pcie_bytes_per_s=64e9,
    remap_banks=2560, network_gbps=400, unsupported=_BLACKWELL,
)  # fmt: skip
H200 = Sku(
    name="H200-SXM", model="NVIDIA H200", tdp_w=700, idle_w=76, static_w=120, dynamic_w=720,
    max_clock_mhz=1980, idle_clock_mhz=345, memory_clock_mhz=3201, memory_bytes=143771 * MIB,
    operating_temp_c=87, slowdown_temp_c=89, thermal_resistance=0.058, heat_capacity_j_per_k=235,
    nvlinks=18, nvlink_bytes_per_s=450e9, pcie_generation=5, pcie_width=16, pcie_bytes_per_s=64e9,
    remap_banks=3072, network_gbps=400, unsupported=_BLACKWELL,
)  # fmt: skip
# Through NVML, Ampere has neither GPM nor T.Limit nor fabric information: a fleet without DCGM lacks them.
A100 = Sku(
    name="A100-SXM", model="NVIDIA A100-SXM4-80GB", tdp_w=400, idle_w=52, static_w=80, dynamic_w=400,
    max_clock_mhz=1410, idle_clock_mhz=210, memory_clock_mhz=1593, memory_bytes=81920 * MIB,
    operating_temp_c=85, slowdown_temp_c=89, thermal_resistance=0.085, heat_capacity_j_per_k=170,
    nvlinks=12, nvlink_bytes_per_s=300e9, pcie_generation=4, pcie_width=16, pcie_bytes_per_s=32e9,
    remap_banks=640, network_gbps=200, unsupported=_GPM | _BLACKWELL | {"thermal_margin_c", "fabric_state"},
)  # fmt: skip

# nvidia-smi of 8 x B200: 1,000 W, 183,359 MiB, 1,965 MHz, about 140 W and 28 degC idle. Five generations of NVLink: 18
# links of 50 GB/s one way. Resistance: 1,000 W at a 25 degC inlet gives a core in the 70s (assumed).
B200 = Sku(
    name="B200-SXM", model="NVIDIA B200", tdp_w=1000, idle_w=140, static_w=190, dynamic_w=1010,
    max_clock_mhz=1965, idle_clock_mhz=120, memory_clock_mhz=3996, memory_bytes=183359 * MIB,
    operating_temp_c=87, slowdown_temp_c=90, thermal_resistance=0.047, heat_capacity_j_per_k=330,
    nvlinks=18, nvlink_bytes_per_s=900e9, pcie_generation=5, pcie_width=16, pcie_bytes_per_s=64e9,
    remap_banks=4096, network_gbps=400, unsupported=frozenset(),
)  # fmt: skip

SKUS: Mapping[str, Sku] = MappingProxyType({sku.name: sku for sku in (H100, H200, A100, B200)})


def sku_of(name: str) -> Sku:
    """Return the board called `name`; "" is H100-SXM.

    Raises:
        SimulationError: no such board.
    """
    if not name:
        return H100
    if name not in SKUS:
        raise SimulationError(f"sku {name!r} has no simulated board; use one of {', '.join(SKUS)} in the fleet file")
    return SKUS[name]

"""Boards: datasheet figures (NVIDIA product briefs) and thermal figures from server manuals, rounded."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Board:
    """One product. Watts, MHz, bytes, bytes/s, degrees, K/W."""

    name: str
    tdp: float
    idle: float
    fmax: float
    fidle: float
    mclk: float
    mclk_idle: float
    mem: float
    hbm_bw: float
    hbm: bool
    links: int
    nvl_bw: float
    gen: int
    pcie_bw: float
    nic_gbps: float
    r_air: float
    r_liq: float
    t_sw: float
    t_hw: float
    tm_sw: float
    per_node: tuple[int, ...]
    blackwell: bool
    prof: bool
    liquid: float  # share of sites with cold plates


G = 1e9
BOARDS = {
    b.name: b
    for b in (
        Board("A100-SXM4-80GB", 400, 58, 1410, 210, 1593, 1593, 80 * G, 2.04e12, True, 12, 300e9, 4, 25e9, 200, 0.082, 0.045, 85, 92, 95, (4, 8, 8), False, True, 0.1),
        Board("A100-PCIE-80GB", 300, 46, 1410, 210, 1512, 1512, 80 * G, 1.94e12, True, 12, 300e9, 4, 25e9, 200, 0.112, 0.07, 85, 92, 95, (1, 2, 4), False, True, 0.0),
        Board("H100-SXM5-80GB", 700, 72, 1980, 345, 2619, 2619, 80 * G, 3.35e12, True, 18, 450e9, 5, 52e9, 400, 0.056, 0.03, 87, 93, 95, (8,), False, True, 0.3),
        Board("H200-SXM-141GB", 700, 76, 1980, 345, 3201, 3201, 141 * G, 4.8e12, True, 18, 450e9, 5, 52e9, 400, 0.056, 0.03, 87, 93, 95, (8,), False, True, 0.4),
        Board("B200-SXM-180GB", 1000, 140, 1965, 120, 3996, 3996, 180 * G, 7.7e12, True, 18, 900e9, 5, 53e9, 400, 0.043, 0.024, 87, 94, 98, (8,), True, True, 0.5),
        Board("GB200-186GB", 1200, 150, 2062, 120, 3996, 3996, 186 * G, 8.0e12, True, 18, 900e9, 5, 53e9, 400, 0.04, 0.021, 85, 92, 98, (4,), True, True, 1.0),
        Board("GB300-288GB", 1400, 165, 2032, 120, 3996, 3996, 279 * G, 8.0e12, True, 18, 900e9, 6, 100e9, 800, 0.036, 0.019, 85, 92, 98, (4,), True, True, 1.0),
        Board("L40S", 350, 33, 2520, 210, 9001, 405, 48 * G, 0.864e12, False, 0, 0, 4, 25e9, 200, 0.118, 0.08, 86, 95, 0, (2, 4, 8), False, True, 0.0),
        Board("L4", 72, 13, 2040, 210, 6251, 405, 24 * G, 0.3e12, False, 0, 0, 4, 25e9, 100, 0.52, 0.4, 85, 92, 0, (1, 2, 4, 8), False, True, 0.0),
        Board("T4", 70, 10, 1590, 300, 5001, 405, 16 * G, 0.32e12, False, 0, 0, 3, 12e9, 50, 0.62, 0.5, 88, 94, 0, (1, 2, 4), False, False, 0.0),
    )
}  # fmt: skip
WEIGHTS = {"A100-SXM4-80GB": 4, "A100-PCIE-80GB": 1, "H100-SXM5-80GB": 7, "H200-SXM-141GB": 4, "B200-SXM-180GB": 4,
           "GB200-186GB": 3, "GB300-288GB": 2, "L40S": 1, "L4": 1.5, "T4": 1.2}  # fmt: skip

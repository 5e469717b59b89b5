"""Which devices are near each other: the words of `nvidia-smi topo -m`, on trees that stand for sysfs."""

from __future__ import annotations

from pathlib import Path

import pytest

from drover_agent.sources.network.pci_paths import distance, nearest

# GPU 1b and NIC 18 below ports of one PCIe switch; NIC 28 below another switch of the same root port; NIC 30 at the
# root complex itself; NIC 40 at another one of the same socket; NIC 80 at the other socket; NIC 90 nobody says where.
TREE = {
    "0000:1b:00.0": ("pci0000:15/0000:15:01.0/0000:16:00.0/0000:1a:00.0", 0),
    "0000:18:00.0": ("pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:00.0", 0),
    "0000:28:00.0": ("pci0000:15/0000:15:01.0/0000:26:00.0/0000:27:00.0/0000:29:00.0", 0),
    "0000:30:00.0": ("pci0000:15/0000:15:03.0", 0),
    "0000:40:00.0": ("pci0000:37/0000:37:01.0", 0),
    "0000:80:00.0": ("pci0000:80/0000:80:01.0", 1),
    "0000:90:00.0": ("pci0000:90/0000:90:01.0", -1),
}
GPU = "0000:1B:00.0"


@pytest.fixture
def sys(tmp_path: Path) -> Path:
    devices = tmp_path / "bus/pci/devices"
    devices.mkdir(parents=True)
    for address, (path, numa) in TREE.items():
        folder = tmp_path / "devices" / path / address
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{numa}\n")
        (devices / address).symlink_to(folder)
    return tmp_path


@pytest.mark.parametrize(
    ("other", "word"), [("18", "PIX"), ("28", "PXB"), ("30", "PHB"), ("40", "NODE"), ("80", "SYS"), ("90", "SYS")]
)
def test_how_far_a_card_is(sys: Path, other: str, word: str) -> None:
    assert distance(sys, GPU, f"0000:{other}:00.0") == word


def test_the_nearest_are_chosen_by_bridges_then_by_numa_node(sys: Path) -> None:
    cards = {f"mlx5_{n}": f"0000:{bus}:00.0" for n, bus in enumerate(("90", "80", "40", "30", "28", "18"))}
    for taken, word in (("mlx5_5", "PIX"), ("mlx5_4", "PXB"), ("mlx5_3", "PHB"), ("mlx5_2", "NODE")):
        assert nearest(sys, GPU, cards) == taken, word
        del cards[taken]
    assert nearest(sys, GPU, cards) is None, "none is nearer than the others"
    assert nearest(sys, "0000:90:00.0", {"mlx5_9": "0000:80:00.0"}) is None, "a kernel without NUMA says -1 of all"

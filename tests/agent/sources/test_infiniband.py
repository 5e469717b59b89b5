"""InfiniBand and RoCE ports on trees that stand for /sys."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from drover_agent.sources.base import Entity, Reading
from drover_agent.sources.gpus import Gpus
from drover_agent.sources.network.infiniband import InfinibandSource
from drover_agent.sources.network.link_files import QUICK
from drover_core.metrics.catalog import Absent, Scope, of_scope
from testbed.source_cases import cases_of, check, reported
from testbed.trees import plant

T = 1_800_000_000_000
NDR = next(case for case in cases_of("infiniband") if case.name == "ndr")
PORT = "sys/class/infiniband/mlx5_0/ports/1"


def gpus() -> Gpus:
    found = Gpus()
    for slot, pci in enumerate(("0000:19:00.0", "0000:1b:00.0", "0000:3b:00.0", "0000:81:00.0")):
        found.set_entity(Entity(Scope.GPU, f"S{slot}", slot, pci=pci))
    return found


@pytest.mark.parametrize("case", cases_of("infiniband"), ids=lambda case: case.name)
def test_case(case: Path, tmp_path: Path) -> None:
    plant(case / "tree.txt", tmp_path)
    source = InfinibandSource("n1", tmp_path / "sys", gpus())
    check(case, reported(source.read(T)))
    source.close()


@pytest.fixture
def node(tmp_path: Path) -> Path:
    return plant(NDR / "tree.txt", tmp_path)


def row(reading: Reading, port: str) -> dict[str, float]:
    [values] = [values for entity, values in reading.rows if entity == Entity(Scope.LINK, f"n1/{port}", link=port)]
    return dict(values)


def absences(reading: Reading, port: str) -> dict[str, Absent]:
    return {metric: why for entity, metric, why in reading.absent if entity.link == port}


def test_a_port_gives_every_link_metric_of_the_catalog(node: Path) -> None:
    source = InfinibandSource("n1", node / "sys")
    assert row(source.read(T), "mlx5_0").keys() == {metric.name for metric in of_scope(Scope.LINK)}


def test_error_counters_are_read_once_in_ten_seconds(node: Path) -> None:
    source = InfinibandSource("n1", node / "sys")
    source.read(T)
    (node / PORT / "counters/port_rcv_data").write_text("1000\n")
    (node / PORT / "counters/symbol_error").write_text("12\n")
    second = row(source.read(T + 1_000), "mlx5_0")
    assert second.keys() == QUICK
    assert second["rx_bytes"] == 4 * 1000  # words of 4 bytes
    assert row(source.read(T + 10_000), "mlx5_0")["symbol_errors"] == 12


def test_the_rate_of_a_link_is_reported_when_it_comes_up_and_while_it_is_up_once_in_ten_seconds(node: Path) -> None:
    source = InfinibandSource("n1", node / "sys")
    assert row(source.read(T), "mlx5_0")["rate_gbps"] == 400
    (node / PORT / "rate").write_text("200 Gb/sec (4X HDR)\n")
    assert "rate_gbps" not in row(source.read(T + 1_000), "mlx5_0")
    (node / PORT / "state").write_text("1: DOWN\n")
    assert absences(source.read(T + 2_000), "mlx5_0") == {"rate_gbps": Absent.UNSUPPORTED}
    (node / PORT / "state").write_text("4: ACTIVE\n")
    assert row(source.read(T + 3_000), "mlx5_0")["rate_gbps"] == 200
    (node / PORT / "rate").write_text("100 Gb/sec (4X EDR)\n")
    assert "rate_gbps" not in row(source.read(T + 4_000), "mlx5_0")
    assert row(source.read(T + 10_000), "mlx5_0")["rate_gbps"] == 100


def test_a_device_that_goes_is_lost_and_its_return_is_seen_at_once(node: Path) -> None:
    source = InfinibandSource("n1", node / "sys")
    source.read(T)
    folder = node / "sys/class/infiniband/mlx5_0"
    target = folder.readlink()
    folder.unlink()  # as the driver does; the open files of a real one say ENODEV, see the test with a real device
    for files in source._ports["mlx5_0"]._files.values():
        for file in files:
            file.close()
    reading = source.read(T + 1_000)
    assert absences(reading, "mlx5_0") == dict.fromkeys((m.name for m in of_scope(Scope.LINK)), Absent.LOST)
    assert [entity.link for entity, _ in reading.rows] == ["mlx5_1"]
    folder.symlink_to(target)
    back = source.read(T + 2_000)
    assert row(back, "mlx5_0").keys() == {m.name for m in of_scope(Scope.LINK)}
    assert not absences(back, "mlx5_0")


def test_a_device_that_comes_later_is_found(tmp_path: Path) -> None:
    source = InfinibandSource("n1", tmp_path / "sys")
    assert source.read(T) == Reading()
    plant(NDR / "tree.txt", tmp_path)
    assert source.read(T + 1_000) == Reading()
    reading = source.read(T + 10_000)
    assert row(reading, "mlx5_1")["rx_bytes"] == 4 * 1000002
    assert reading.inventory["nic.mlx5_1.firmware"] == "28.39.1002"


def test_nothing_is_reported_of_the_cards_again_within_a_minute(node: Path) -> None:
    source = InfinibandSource("n1", node / "sys", gpus())
    assert source.read(T).inventory
    assert source.read(T + 1_000).inventory == {}
    (node / "sys/class/infiniband/mlx5_0/fw_ver").write_text("28.40.1000\n")
    assert source.read(T + 60_000).inventory["nic.mlx5_0.firmware"] == "28.40.1000"


def test_who_is_near_whom_is_looked_at_as_rarely(node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def near(_: Path, gpu: str, others: Mapping[str, str]) -> str:
        asked.append(gpu)
        return ",".join(sorted(others))

    monkeypatch.setattr("drover_agent.sources.network.infiniband.nearest", near)
    known = gpus()
    source = InfinibandSource("n1", node / "sys", known)
    for second in range(0, 50, 10):
        source.read(T + 1000 * second)
    every = [gpu.pci for gpu in known.all()]
    assert asked == every
    known.set_entity(Entity(Scope.GPU, "new", 9, pci="0000:ff:00.0"))
    found = source.read(T + 50_000).inventory
    assert asked[len(every) :] == [*every, "0000:ff:00.0"]
    assert found["gpu9.nic"] == "mlx5_0,mlx5_1"


def test_what_cannot_be_read_is_absent_for_its_reason_and_harms_nothing_else(
    node: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers of drivers in trouble; a file that may not be opened is not to be had as root, so it is acted."""
    real = os.pread
    trouble = {"symbol_error": 110, "rate": 5, "port_xmit_wait": 13, "port_rcv_data": 95, "np_cnp_sent": 22}
    broken: dict[int, int] = {}
    opened = os.open

    def open_(path: str, flags: int) -> int:
        descriptor = opened(path, flags)
        broken.pop(descriptor, None)
        if "mlx5_0" in path and Path(path).name in trouble:
            broken[descriptor] = trouble[Path(path).name]
        return descriptor

    def pread(descriptor: int, size: int, offset: int) -> bytes:
        if descriptor in broken:
            raise OSError(broken[descriptor], "in trouble")
        return real(descriptor, size, offset)

    monkeypatch.setattr("os.open", open_)
    monkeypatch.setattr("os.pread", pread)
    (node / PORT / "hw_counters/out_of_sequence").write_text("many\n")
    reading = InfinibandSource("n1", node / "sys").read(T)
    assert absences(reading, "mlx5_0") == {
        "symbol_errors": Absent.TIMEOUT,
        "rate_gbps": Absent.ERROR,
        "tx_wait": Absent.NO_PERMISSION,
        "rx_bytes": Absent.UNSUPPORTED,
        "cnp_sent": Absent.UNSUPPORTED,
        "out_of_sequence": Absent.ERROR,
    }
    assert row(reading, "mlx5_0")["link_up"] == 1
    assert absences(reading, "mlx5_1") == {"rate_gbps": Absent.UNSUPPORTED}  # it is not active

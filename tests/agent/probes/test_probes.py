"""Each probe's whole path on the CPU, and what it says of a device that computes or remembers wrongly."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from drover_agent.probes import (
    GROUP,
    PROBES,
    Level,
    collectives,
    disk,
    gemm,
    inlet,
    launch,
    memory_pattern,
    of_level,
    sdc,
    soak,
    timing,
)
from drover_agent.probes.base import Context, Device, Result
from drover_agent.probes.timing import CHUNK
from drover_agent.sources.host.ipmi import Ipmi

# Not `importorskip`: each worker of pytest reads this file, and torch takes two seconds of CPU to import.
pytestmark = pytest.mark.skipif(not find_spec("torch"), reason="probes need torch: pip install 'drover[probe]'")

TWO = (Device(0, "cpu", "board", 0), Device(1, "cpu", "board", 0))
THREE = (*TWO, Device(2, "cpu", "board", 0))


def context(folder: Path, devices: tuple[Device, ...] = TWO, seconds: float = 0.05) -> Context:
    import torch

    return Context(torch, devices, Level.QUICK, seconds, lambda text: None, lambda: False, folder=str(folder))


def run(name: str, given: Context) -> list[Result]:
    import importlib

    return list(importlib.import_module(f"drover_agent.probes.{PROBES[name].module}").run(given, name))


@pytest.mark.parametrize("name", sorted(PROBES))
def test_every_probe_gives_a_figure_in_its_unit_or_says_why_not(name: str, tmp_path: Path) -> None:
    results = run(name, replace(context(tmp_path), names=collectives.KINDS, shared=str(tmp_path)))  # the three at once
    assert results
    own = [result for result in results if result.probe == name]
    assert {result.unit for result in own} == {PROBES[name].unit}
    for result in results:
        assert (result.value is not None and result.value > 0) or result.detail, "never 0, never nothing"
        assert result.ok is not False
        if result.value is not None and PROBES[name].better != "exact":
            assert result.repeats > 1, "one measurement says nothing of its spread"
            assert result.spread is not None and 0 <= result.spread < 100
    # A CPU has no tensor cores, and no sensors that NVML reads; nodes of a group are others'.
    no_figure = {"gemm_tf32", "gemm_fp8", "gemm_fp4", "soak", *(name for name in PROBES if name.endswith(GROUP))}
    assert all(result.value is None for result in own) == (name in no_figure)
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"


def test_levels_hold_each_other() -> None:
    quick, standard, deep = ({p.name for p in of_level(level)} for level in Level)
    assert quick < standard < deep == {p.name for p in PROBES.values() if p.level is not None}
    seconds = sum(p.seconds[0] * (7 if p.name == "p2p" else 1) for p in of_level(Level.QUICK))
    assert seconds < 60, "of one device; devices of a node are measured one after the other only where they must be"


@pytest.mark.parametrize(
    "name", ["gemm_fp32", "hbm_copy", "launch", "p2p", "sdc", "memory_pattern", "disk_read", "soak"]
)
def test_asked_to_stop_it_ends_between_two_measurements(name: str, tmp_path: Path) -> None:
    given = replace(context(tmp_path, seconds=60.0), stopping=lambda: True)
    with pytest.raises(InterruptedError):
        run(name, given)


def test_a_product_with_one_changed_bit_is_found_and_the_odd_device_named(tmp_path: Path) -> None:
    calls = 0

    def flips(torch_: Any, device: Device, kind: str, size: int, seed: int) -> Callable[[], Any]:
        """Device 1's third product of its third shape has one bit turned; device 2 always turns another one."""
        right = gemm.product(torch_, device, kind, size, seed)

        def multiply() -> Any:
            nonlocal calls
            found = right().clone()
            words = sdc.bits(torch_, found).view(-1)
            if device.slot == 1 and kind == "fp16" and size == sdc.CPU_SIZES[1]:
                calls += 1
                if calls == 3:
                    words[77] ^= 1 << 3
            if device.slot == 2:
                words[0] ^= 1
            return found

        return multiply

    good, once, always = sdc.run(context(tmp_path, THREE), "sdc", flips)
    assert (good.ok, good.gpu) == (True, 0)
    assert (once.ok, once.gpu) == (False, 1)
    assert "fp16 192: 1 of" in once.detail
    assert (always.ok, always.gpu) == (False, 2)
    assert "another answer than 2 devices of its model" in always.detail


def test_two_devices_that_disagree_are_both_reported_for_no_majority_says_which_is_right() -> None:
    answers = {TWO[0]: {("bf16", 64): 1}, TWO[1]: {("bf16", 64): 2}}
    assert {device for device, _ in sdc.odd_ones(answers)} == set(TWO)


def test_devices_of_other_models_may_round_otherwise() -> None:
    other = Device(1, "cpu", "another board", 0)
    assert list(sdc.odd_ones({TWO[0]: {("bf16", 64): 1}, other: {("bf16", 64): 2}})) == []


@pytest.mark.parametrize("bit", range(0, 64, 7))
def test_a_fingerprint_shows_any_single_bit(bit: int) -> None:
    import torch

    values = torch.randn(33, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(bit))
    before = sdc.fingerprint(torch, values)
    words = sdc.bits(torch, values).view(-1)
    words[bit] ^= (1 << bit) - (1 << 64 if bit == 63 else 0)
    assert sdc.fingerprint(torch, values) != before
    words[bit] ^= (1 << bit) - (1 << 64 if bit == 63 else 0)
    assert sdc.fingerprint(torch, values) == before


@pytest.mark.parametrize("pattern", ["walking ones", "address", "random", "inverse random"])
def test_a_cell_that_forgets_is_found(pattern: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = memory_pattern._take
    blocks: list[Any] = []

    def keep(*args: Any) -> list[Any]:
        blocks[:] = taken(*args)
        return list(blocks)

    right = memory_pattern.values

    def forget(torch_: Any, device: Device, name: str, number: int, count: int, seed: int) -> Any:
        """As the last block of a pattern is about to be compared, a bit of the first one has fallen."""
        forget.calls[name] = forget.calls.get(name, 0) + 1  # type: ignore[attr-defined]  # a counter on the function
        if name == pattern and forget.calls[name] == len(blocks) + 1:  # type: ignore[attr-defined]  # the same
            blocks[0][1234] ^= 1 << 17
        return right(torch_, device, name, number, count, seed)

    forget.calls = {}  # type: ignore[attr-defined]  # the same
    monkeypatch.setattr(memory_pattern, "_take", keep)
    monkeypatch.setattr(memory_pattern, "values", forget)
    (result,) = memory_pattern.run(context(tmp_path, TWO[:1]), "memory_pattern")
    assert result.ok is False
    assert f"{pattern}, block 0, word 1234" in result.detail
    assert result.detail.startswith("1 of ")


def test_patterns_differ_from_block_to_block_and_cover_both_states_of_each_bit() -> None:
    import torch

    cpu = TWO[0]
    for pattern in ("walking ones", "address", "random"):
        first, second = (memory_pattern.values(torch, cpu, pattern, number, 256, 1) for number in range(2))
        assert not torch.equal(first, second), "a block that lands in another's place shows"
    drawn = memory_pattern.values(torch, cpu, "random", 0, 256, 1)
    assert torch.equal(memory_pattern.values(torch, cpu, "inverse random", 0, 256, 1), ~drawn)


@pytest.mark.parametrize(("name", "factor"), [("allreduce", 1.75), ("allgather", 0.875), ("alltoall", 0.875)])
def test_bus_bandwidth_is_that_of_nccl_tests(name: str, factor: float) -> None:
    assert collectives.bus_bandwidth(name, 10**9, 1.0, 8) == pytest.approx(factor)


def sensors(device: Device) -> dict[str, float]:
    return {"sm_clock_mhz": 1700.0, "power_w": 600.0, "gpu_temp_c": 61.0}


def test_the_soak_gives_the_thermal_resistance_over_the_inlet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "LOOK_S", 0.01)
    given = replace(context(tmp_path, TWO[:1]), inlet_c=25.0)
    found = {result.probe: result for result in soak.run(given, "soak", sensors)}
    assert found["soak"].value == pytest.approx(0.06)
    assert (found["soak_power_w"].value, found["soak_sm_clock_mhz"].unit) == (600.0, "MHz")
    (alone,) = [r for r in soak.run(replace(given, inlet_c=None), "soak", sensors) if r.probe == "soak"]
    assert (alone.value, alone.detail) == (None, "no inlet temperature is known")


def test_the_inlet_is_read_here_where_nobody_gives_it_or_said_to_be_absent(tmp_path: Path) -> None:
    none = Ipmi(tmp_path / "dev", path=str(tmp_path))
    assert inlet.inlet_c(tmp_path, none) == (None, "no inlet temperature can be read here (unsupported)")
    sensor = tmp_path / "class/hwmon/hwmon3"
    sensor.mkdir(parents=True)
    (sensor / "temp2_label").write_text("Inlet Temp\n")
    (sensor / "temp2_input").write_text("23500\n")
    assert inlet.inlet_c(tmp_path, none) == (23.5, "")


def test_a_slow_bmc_is_waited_for_and_a_mute_one_is_reported(tmp_path: Path) -> None:
    (tmp_path / "ipmi0").touch()
    program = tmp_path / "ipmitool"
    program.write_text("#!/bin/sh\necho 'Inlet Temp,21,degrees C,ok'\n")
    program.chmod(0o755)
    assert inlet.inlet_c(tmp_path, Ipmi(tmp_path, path=str(tmp_path))) == (21.0, "")
    program.write_text("#!/bin/sh\necho 'Could not open device'; exit 1\n")
    value, why = inlet.inlet_c(tmp_path, Ipmi(tmp_path, path=str(tmp_path)))
    assert value is None
    assert why.endswith("(the BMC could not be asked (status 1): Could not open device)")


def test_small_kernels_are_measured_in_a_row_and_one_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that issues one each 2 us, and knows of an end 50 us after it: only who waits for each sees that."""
    now = [0.0]

    class Small:
        def add_(self, _: int) -> None:
            now[0] += 2e-6

    def synchronize(_: str) -> None:
        now[0] += 50e-6

    monkeypatch.setattr(launch, "time", SimpleNamespace(perf_counter=lambda: now[0], monotonic=lambda: now[0]))
    stand_in = SimpleNamespace(zeros=lambda _, device: Small(), cuda=SimpleNamespace(synchronize=synchronize))
    given = replace(context(tmp_path, (Device(3, "cuda:0", "H200", 0),), 0.0), torch=stand_in)
    (row,) = launch.run(given, "launch")
    (one,) = launch.run(given, "launch_wait")
    assert row.value == pytest.approx(2.05)
    assert one.value == pytest.approx(52.0)
    assert (row.detail, one.detail) == ("1000 in a row", "each waited for, 100 in a row")
    assert [row.spread, one.spread] == pytest.approx([0.0, 0.0], abs=1e-9)
    assert row.repeats == one.repeats == 5


def test_what_is_moved_is_random(tmp_path: Path) -> None:
    import torch

    drawn = timing.random_bytes(torch, (20 << 20) + 5, 1)
    assert drawn.numel() == (20 << 20) + 5
    counts = torch.bincount(drawn[:CHUNK].long(), minlength=256)
    assert int(counts.min()) > 0.9 * CHUNK / 256, "each byte as often as the others"
    assert torch.equal(drawn, timing.random_bytes(torch, (20 << 20) + 5, 1)), "the same on every device"


def test_a_soak_has_settled_when_the_temperature_has_not_moved_for_15_s() -> None:
    rising = [soak.SoakSample(s, {"gpu_temp_c": min(60.0, 30.0 + s)}) for s in range(0, 60, 2)]
    assert not soak.settled([look for look in rising if look.at_s <= 40])
    assert soak.settled([look for look in rising if look.at_s <= 46])
    assert not soak.settled([look for look in rising if look.at_s <= 20])


def test_timing_is_the_median_and_shows_how_far_repeats_lie_apart() -> None:
    import torch

    assert timing.variation([1.0, 1.0, 1.0]) == 0
    assert timing.variation([9.0, 11.0]) == pytest.approx(2**0.5 / 10)
    measured = timing.time_calls(torch, TWO[0], lambda: None, 0.01, lambda: False)
    assert measured.repeats >= timing.LEAST_REPEATS
    assert measured.seconds > 0


def test_a_disk_without_room_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "SPARE_SHARE", 0.0)
    (result,) = disk.run(context(tmp_path), "disk_write")
    assert (result.value, result.detail) == (None, f"too little free space in {tmp_path}")


def test_a_link_in_the_shared_folder_is_not_written_through(tmp_path: Path) -> None:
    victim, shared = tmp_path / "victim", tmp_path / "shared"
    victim.write_text("keep")
    shared.mkdir()
    (shared / f".drover-storage_write-{socket.gethostname()}.bin").symlink_to(victim)
    (result,) = disk.run(replace(context(tmp_path), shared=str(shared)), "storage_write")
    assert result.value is None and "symbolic links" in result.detail
    assert victim.read_text() == "keep"


def test_a_slow_disk_is_measured_by_what_it_takes_in_time_and_the_probe_says_that_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that takes 40 s for the whole file, which no probe may be silent for."""
    now_s = 0.0

    def synced(_file: int) -> None:
        nonlocal now_s
        now_s += 1.0

    monkeypatch.setattr(disk.os, "fdatasync", synced)
    monkeypatch.setattr(disk.time, "perf_counter", lambda: now_s)
    monkeypatch.setattr(disk, "CPU_BYTES", 40 << 20)
    monkeypatch.setattr(disk, "BLOCK", 1 << 16)
    shown: list[str] = []
    given = replace(context(tmp_path, seconds=2.5), show_progress=shown.append)
    (result,) = disk.run(given, "disk_write")
    step = disk.SYNC_BLOCKS << 16
    assert result.value == pytest.approx(3 * step / 3.0 / 1e9), "the third step ends after 2.5 s"
    assert shown[1:] == ["2 MiB written", "4 MiB written", "6 MiB written"]

"""Probes that run a training step: losses that change or are not shared, ranks, random numbers, affinity."""

from __future__ import annotations

import multiprocessing
import os
import time
from dataclasses import replace
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from drover_agent.probes import (
    PROBES,
    Level,
    gemm,
    near,
    ranks,
    train_step,
)
from drover_agent.probes.base import Context, Device, Result
from drover_agent.probes.ranks import RankError
from testbed.nvml import FakeNvml

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


def test_a_loss_that_changes_from_run_to_run_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    losses = iter([4.5, 4.5, 4.5, 4.25, 4.5, 4.5])
    monkeypatch.setattr(train_step, "_train", lambda *_: (next(losses), [0.1]))
    found = list(train_step.alone(context(tmp_path, THREE, seconds=60), "train_step"))
    assert [result.ok for result in found] == [True, False, True]
    assert "differs from run to run" in found[1].detail


def test_a_device_whose_loss_the_others_do_not_share_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_step, "_train", lambda _context, device, _shape: (4.5 + (device.slot == 1), [0.1]))
    found = list(train_step.alone(context(tmp_path, THREE, seconds=60), "train_step"))
    assert [result.ok for result in found] == [True, False, True]
    assert "2 devices of its model have 4.5" in found[1].detail


def test_who_waits_for_ranks_gives_signs_of_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another node may come late, or never: that is its own result, and no hang of this one."""
    now_s = 0.0

    def sleeps(seconds: float) -> None:
        nonlocal now_s
        now_s += 1.0

    monkeypatch.setattr(ranks, "time", SimpleNamespace(sleep=sleeps, monotonic=lambda: now_s))
    monkeypatch.setattr(ranks, "_received", lambda _: None)
    shown_s: list[float] = []
    given = replace(context(tmp_path, seconds=1.0), show_progress=lambda _text: shown_s.append(now_s))
    rank = SimpleNamespace(exitcode=None)
    with pytest.raises(RankError, match="they did not finish: one of them, or the way between them, hangs"):
        ranks._await(given, "allreduce over 16 ranks", [rank], [], 100.0)
    gaps = [after - before for before, after in pairwise([0.0, *shown_s, now_s])]
    assert max(gaps) <= ranks.PROGRESS_S + 2
    assert now_s > 100.0, "as long as it was given"
    rank.exitcode = -9
    with pytest.raises(RankError, match="process 0 of 1 on this node ended by itself"):
        ranks._await(given, "allreduce over 16 ranks", [rank], [], 1000.0)


def test_ranks_have_nothing_in_shared_memory_that_a_kill_would_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = f"drover-test-{os.getpid()}"
    monkeypatch.setitem(multiprocessing.current_process()._config, "semprefix", f"/{prefix}")  # type: ignore[attr-defined]
    made = multiprocessing.get_context("spawn").Lock()
    left = len(list(Path("/dev/shm").glob(f"sem.{prefix}*")))
    assert left == 1, "that is what a lock leaves"
    found: list[int] = []

    def stopping() -> bool:
        found.append(len(list(Path("/dev/shm").glob(f"sem.{prefix}*"))) - left)
        return True

    with pytest.raises(InterruptedError):
        ranks.first_answer(replace(context(tmp_path), stopping=stopping), "sleep", time.sleep, [(60,), (60,)], 60.0)
    del made
    assert found == [0]


def test_a_rank_whose_parent_is_gone_already_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "die_with_parent", lambda: None)
    receiver, sender = multiprocessing.Pipe(duplex=False)
    for pid, rank_reports in ((os.getppid(), True), (os.getppid() + 1, False)):
        monkeypatch.setattr(ranks, "parent_process", lambda pid=pid: SimpleNamespace(pid=pid))
        ranks._rank(abs, (-3,), sender)
        assert receiver.poll() is rank_reports
        if rank_reports:
            assert receiver.recv() == (False, "", 3)


def test_switches_that_add_up_in_any_order_are_kept_out_of_an_exact_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the site's settings want them: a healthy node would differ from itself."""
    import torch

    seen: list[tuple[str | None, str | None]] = []

    def starts(*_: object, **__: object) -> None:
        seen.append((os.environ.get("NCCL_NVLS_ENABLE"), os.environ.get("NCCL_ALGO")))
        raise InterruptedError

    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    monkeypatch.setenv("NCCL_ALGO", "NVLS")
    monkeypatch.setattr(torch.distributed, "init_process_group", starts)
    monkeypatch.setattr(train_step, "Meeting", lambda *_: SimpleNamespace(join=lambda: None))
    with pytest.raises(InterruptedError):
        train_step.train_sharded("cpu", 0, 2, train_step.Group("127.0.0.1", 1, 0, 1), 1, False)
    assert seen == [("0", None)]


def test_the_same_numbers_are_drawn_once_for_all_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    drawn = []
    real = torch.randn
    monkeypatch.setattr(torch, "randn", lambda *args, **kinds: (drawn.append(args), real(*args, **kinds))[1])
    shape = (17, 19)
    first, second = (gemm.random(torch, device, shape, 1234) for device in TWO)
    assert torch.equal(first, second)
    assert drawn == [(shape,)]


def test_a_loss_is_judged_only_where_its_algorithms_are_deterministic(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    strict: list[bool] = []

    def train(*_: Any) -> tuple[float, list[float]]:
        strict.append(
            torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
        )
        if strict[-1]:
            raise RuntimeError("attention_backward does not have a deterministic implementation, but you set ...")
        return 4.5 + len(strict), [0.1]

    monkeypatch.setattr(train_step, "_train", train)
    (result,) = train_step.alone(context(tmp_path, TWO[:1], seconds=60), "train_step")
    assert strict == [True, False, False]
    assert result.ok is None, "it differs from run to run, as it may"
    assert result.value and result.detail.startswith("the loss is not judged")
    assert not torch.are_deterministic_algorithms_enabled(), "later probes are unchanged"


@pytest.mark.parametrize("odd", [1, None])
def test_a_sharded_loss_that_changes_is_that_of_a_device_or_of_what_they_share(
    odd: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_step, "first_answer", lambda *_: train_step.Trained((4.5, 4.25), (0.1, 0.1, 0.2, 0.1)))
    monkeypatch.setattr(train_step, "_train", lambda _context, device, _shape: (4.5 + (device.slot == odd), [0.1]))
    *named, whole = train_step.run(context(tmp_path, THREE, seconds=60), "train_step")
    assert [(result.gpu, result.ok, result.value) for result in named] == [(1, False, None)] * (odd is not None)
    assert (whole.gpu, whole.ok) == (None, False)
    assert whole.detail.startswith("the loss differs from run to run: 4.5, 4.25")
    assert ("it is what they share" in whole.detail) == (odd is None)
    tokens = train_step.CPU.batch * train_step.CPU.length
    assert whole.value == pytest.approx(tokens / 0.1), "of each device"


def test_a_sharded_loss_that_no_algorithm_makes_exact_is_not_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def first_answer(_context: Any, _what: str, _work: Any, given: Any, _limit_s: float) -> train_step.Trained:
        if given[0][-1]:
            raise RankError("RuntimeError: cumsum does not have a deterministic implementation, but you set ...")
        return train_step.Trained((4.5, 4.25), (0.1,))

    monkeypatch.setattr(train_step, "first_answer", first_answer)
    (result,) = train_step.run(context(tmp_path, THREE), "train_step")
    assert (result.ok, result.detail) == (None, train_step.NOT_EXACT)
    assert result.value


def test_the_real_training_step_has_deterministic_algorithms_alone(tmp_path: Path) -> None:
    (result,) = train_step.alone(context(tmp_path, TWO[:1]), "train_step")
    assert result.ok is True


def test_copies_are_made_on_the_cores_next_to_the_gpu(
    fake_nvml: FakeNvml, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pynvml

    pynvml.nvmlInit()
    address = pynvml.nvmlDeviceGetPciInfo(pynvml.nvmlDeviceGetHandleByIndex(3)).busId
    pynvml.nvmlShutdown()
    cores = sorted(os.sched_getaffinity(0))
    place = tmp_path / "bus/pci/devices" / address.lower()[-12:]
    place.mkdir(parents=True)
    gpu = Device(3, "cuda:0", "board", 1)
    for text, bound in ((f"{cores[-1]},9998-9999\n", {cores[-1]}), ("9999\n", None), ("", None)):
        (place / "local_cpulist").write_text(text)
        with near.near(gpu, tmp_path) as is_near:
            assert is_near == (bound is not None)
            assert os.sched_getaffinity(0) == (bound or set(cores)), "never on cores that it may not use"
        assert os.sched_getaffinity(0) == set(cores)
    assert near.cores_of(TWO[0], tmp_path) == set()
    assert near.cpu_list("0-3,8\n") == {0, 1, 2, 3, 8}

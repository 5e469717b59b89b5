"""Who stands still, by the signs of life in a group's store: a real store over loopback, a thread for each process."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from drover_agent.probes import gemm, signs
from drover_agent.probes.signs import Signs

WORLD = 3


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Signs]]:
    torch = pytest.importorskip("torch", reason="probes need torch: pip install 'drover[probe]'")
    monkeypatch.setattr(signs, "BEAT_S", 0.02)
    monkeypatch.setattr(signs, "LOOK_S", 0.2)
    monkeypatch.setattr(signs, "LEAVE_S", 0.5)
    limit = datetime.timedelta(seconds=5)
    host = torch.distributed.TCPStore("127.0.0.1", 0, None, True, limit, wait_for_workers=False)
    stores = [
        torch.distributed.TCPStore("127.0.0.1", host.port, None, False, limit, wait_for_workers=False)
        for _ in range(WORLD)
    ]
    found = [Signs(store, rank, WORLD) for rank, store in enumerate(stores)]
    yield found
    for one in reversed(found):
        one.leave()


def test_one_that_gives_no_sign_is_named(group: list[Signs]) -> None:
    for one in group:
        one.at("window 1")
    group[2]._over.set()  # as a stopped process: its thread no longer beats
    odd = group[0].odd()
    assert odd.ranks == (2,)
    assert "no sign of life" in odd.why


def test_one_that_lives_and_is_behind_is_named_with_its_step(group: list[Signs]) -> None:
    for number, one in enumerate(group):
        one.at("round 1 of pairs")
        if number != 1:
            one.at("round 2 of pairs")
    odd = group[0].odd()
    assert odd.ranks == (1,)
    assert "round 1 of pairs" in odd.why


def test_where_all_wait_for_each_other_nobody_is_named(group: list[Signs]) -> None:
    for one in group:
        one.at("window 1")
    assert group[1].odd().ranks == ()


def test_a_gpu_older_than_blackwell_has_no_fp4_and_the_call_has_the_shapes_that_torch_wants(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch = pytest.importorskip("torch", reason="probes need torch: pip install 'drover[probe]'")
    device = SimpleNamespace(name="meta", is_cuda=True)  # shapes and types are checked, nothing is computed
    for capability in ((9, 0), (8, 9)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, c=capability: c)
        with pytest.raises(gemm.UnsupportedError, match=r"^unsupported: fp4 needs"):
            gemm.product(torch, device, "fp4", 256, 1)  # type: ignore[arg-type]  # has what it asks of one
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (10, 0))
    found = gemm.product(torch, device, "fp4", 256, 1)()  # type: ignore[arg-type]  # as above
    assert (found.shape, found.dtype) == ((256, 256), torch.bfloat16)
    monkeypatch.delattr(torch, "float4_e2m1fn_x2")
    with pytest.raises(gemm.UnsupportedError, match=r"^unsupported: torch "):
        gemm.product(torch, device, "fp4", 256, 1)  # type: ignore[arg-type]  # as above


def test_one_that_has_finished_and_left_is_not_odd(group: list[Signs]) -> None:
    for one in group:
        one.at("round 1 of pairs")
    group[2].leave()
    odd = group[0].odd()
    assert 2 not in odd.ranks, odd.why

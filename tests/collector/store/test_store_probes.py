"""Probe results, orders and verdicts: what is written is read, the newest counts, a resend changes nothing."""

from __future__ import annotations

from dataclasses import replace

from drover_collector.store import ProbeRow, Store
from drover_collector.store.repositories.probes import Key
from drover_core.model.events import (
    ProbeOrder,
    ProbeReason,
    ProbeResult,
    ProbeVerdict,
)
from testbed.fleets import T0

KEY = Key("NVIDIA H200", "570.1", 700.0, True, 5, 16, None, False, "host")


def row(number: int, probe: str = "hbm_copy", gpu: int | None = 0, value: float | None = 4000.0, **more) -> ProbeRow:
    request = more.pop("request", "r1")
    serial, key = more.pop("serial", "S0"), more.pop("key", KEY)
    base = ProbeResult(
        f"{request}/{number}", more.pop("node", "n0"), gpu, probe, T0 + number, None, value, "GB/s", request=request,
        device="NVIDIA H200",
    )  # fmt: skip
    return ProbeRow(replace(base, **more), key, serial, "U", T0 + 5)


def end(request: str = "r1", **more) -> ProbeRow:
    closing = row(99, "", None, None, request=request, end="done")
    return replace(closing, result=replace(closing.result, id=f"{request}/end", **more))


def order(id_: str = "r1", state: str = "asked", ts_ms: int = T0, node: str = "n0") -> ProbeOrder:
    return ProbeOrder(id_, node, (1, 2), "quick", ("sdc",), ProbeReason.CONFIRM, state, ts_ms, "i1", "ann", "why")


def test_results_come_back_unchanged_and_once(store: Store) -> None:
    results = [
        row(2),
        row(10, "p2p", 0, 300.0, peer=3, spread=0.01, repeats=5),
        row(1, "sdc", 1, None, ok=False),
        end(),
    ]
    store.probes.results.write(results)
    store.probes.results.write(results[:2])  # a resend
    found = store.probes.results.of_order("r1")
    assert [r.result.id for r in found] == ["r1/1", "r1/2", "r1/10", "r1/end"]
    assert {r.result.id: r for r in found} == {r.result.id: r for r in results}
    assert store.probes.results.of_order("r2") == []
    assert [r.result.id for r in store.probes.results.of_node("n0", limit=2)] == ["r1/end", "r1/10"]
    assert store.probes.results.between(T0 + 2, T0 + 3) == [results[0]]


def test_the_newest_of_each_place_and_figure(store: Store) -> None:
    store.probes.results.write(
        [
            row(1), row(2, value=3900.0), row(3, gpu=1), row(4, "p2p", 0, 1.0, peer=1), row(5, "p2p", 0, 2.0, peer=2),
            row(6, end="stopped"), row(7, "gemm_bf16", 1, None, end="hung"), end(),
            row(8, node="n1", device="cpu"), row(9, node="n2", key=replace(KEY, sku="other")),
        ]
    )  # fmt: skip
    found = {
        (r.result.node, r.result.gpu, r.result.peer, r.result.probe): r.result
        for r in store.probes.results.newest(now_ms=T0)
    }
    assert {place: r.value for place, r in found.items()} == {
        ("n0", 0, None, "hbm_copy"): 3900.0, ("n0", 1, None, "hbm_copy"): 4000.0, ("n0", 0, 1, "p2p"): 1.0,
        ("n0", 0, 2, "p2p"): 2.0, ("n0", 1, None, "gemm_bf16"): None, ("n2", 0, None, "hbm_copy"): 4000.0,
    }  # fmt: skip
    some = store.probes.results.newest(["p2p"], sku=KEY.sku, node="n0", now_ms=T0)
    assert sorted(r.result.peer or 0 for r in some) == [1, 2]
    assert {r.result.node for r in store.probes.results.newest(node="n0", nodes=1, now_ms=T0)} == {"n0", "n2"}
    assert store.probes.results.newest(now_ms=T0 + 91 * 86_400_000) == []
    assert store.probes.results.last_probed() == {"n0": T0 + 5, "n2": T0 + 9}


def test_a_history_is_that_of_one_board(store: Store) -> None:
    store.probes.results.write([row(1, serial="old"), row(2), row(3, value=3900.0), row(4, gpu=1), row(5, end="hung")])
    assert [r.result.value for r in store.probes.results.history("n0", 0, "hbm_copy")] == [3900.0, 4000.0]
    assert store.probes.results.history("n0", 3, "hbm_copy") == []
    together = store.probes.results.histories("n0", ["hbm_copy", "sdc", "p2p"])
    assert together.keys() >= {(0, "hbm_copy")}
    for (gpu, probe), rows in together.items():
        assert rows == store.probes.results.history("n0", gpu, probe) != []
    assert [len(rows) for rows in store.probes.results.histories("n0", ["hbm_copy"], limit=1).values()] == [1] * len(
        {gpu for gpu, probe in together if probe == "hbm_copy"}
    )


def test_the_newest_version_of_an_order_counts(store: Store) -> None:
    store.probes.orders.write([order(), order("r2", node="n1"), order("r3")])
    store.probes.orders.write([order("r1", "sent", T0), order("r3", "failed", T0 + 9)])
    assert [o.state for o in store.probes.orders.versions("r1")] == ["asked", "sent"]
    assert [(o.id, o.state) for o in store.probes.orders.newest()] == [
        ("r3", "failed"),
        ("r2", "asked"),
        ("r1", "sent"),
    ]
    assert [o.id for o in store.probes.orders.newest("n1")] == ["r2"]
    assert [o.id for o in store.probes.orders.newest(since_ms=T0 + 9)] == ["r3"]
    assert [(o.order.id, o.asked_ms, o.sent_ms) for o in store.probes.orders.open()] == [
        ("r1", T0, T0),
        ("r2", T0, None),
    ]
    assert store.probes.orders.between(T0 + 9, T0 + 10) == [order("r3", "failed", T0 + 9)]


def test_verdicts_of_an_order_that_was_judged_again(store: Store) -> None:
    verdict = ProbeVerdict(
        "r1", "n0", 1, False, "sdc", "wrong", T0, ProbeReason.CONFIRM, "i1", 1.0, None, 4, ("hbm_copy",)
    )
    whole = replace(verdict, gpu=None)
    store.probes.verdicts.write([verdict, whole])
    store.probes.verdicts.write([replace(verdict, ts_ms=T0 + 5)])
    assert store.probes.verdicts.read() == [whole, replace(verdict, ts_ms=T0 + 5)]
    assert store.probes.verdicts.read("n1") == []
    assert store.probes.verdicts.read(request="r1", from_ms=T0 + 1) == [replace(verdict, ts_ms=T0 + 5)]


def test_an_order_that_has_ended_is_not_opened_by_a_later_note_of_another(store: Store) -> None:
    done = order(state="failed", ts_ms=T0 + 2)
    store.probes.orders.write([order(), done])
    store.probes.orders.write([order(state="sent", ts_ms=T0 + 1)])  # a collector that held the stream, a moment late
    assert store.probes.orders.open() == []
    assert store.probes.orders.newest() == [done]
    assert store.probes.orders.versions("r1")[-1] == done

"""GPU-hours that stay in service because single GPUs were isolated instead of their nodes."""

from __future__ import annotations

from drover_collector.detectors._lib.examples import small_fleet
from drover_collector.ledger.account import Account, asked_energy, make_account
from drover_collector.ledger.availability import Service
from drover_collector.ledger.facts import Activity, Facts
from drover_collector.ledger.message import Asked, Prices, make_message
from drover_collector.ledger.spans import GpuSpans
from drover_core.model.events import GpuRef, Health, NodeOutage

HOUR = 3_600_000
INDEX = small_fleet(2, per_rack=2)
GPUS = INDEX.nodes[0].gpus


def stages(slot: int, *steps: tuple[Health, int]) -> list[NodeOutage]:
    return [NodeOutage("n00", stage, at, "i1", "it", gpu=GpuRef(slot, f"GPU-{slot}")) for stage, at in steps]


def account(**more: object) -> tuple[Facts, Account]:
    works = GpuSpans.of([(gpu, 0, 10 * HOUR, int(Activity.WORKING)) for gpu in range(INDEX.gpu_count)])
    facts = Facts([], GpuSpans.of(()), 10 * HOUR, works, **more)  # type: ignore[arg-type]  # fields by name
    meter = asked_energy(INDEX, facts.holds, 0, 10 * HOUR)
    return facts, make_account(INDEX, facts, meter, 0, 10 * HOUR)


def test_the_others_of_the_node_count_from_when_the_gpu_was_empty_until_it_was_back() -> None:
    facts, found = account(
        gpu_outages={
            "GPU-3": stages(3, (Health.DRAINING, HOUR), (Health.DRAINED, 2 * HOUR), (Health.HEALTHY, 5 * HOUR))
        }
    )
    assert found.kept.sum() == (GPUS - 1) * 3 * HOUR
    assert found.service[3, Service.OUT] == 3 * HOUR
    assert found.service[:, Service.OUT].sum() == 3 * HOUR
    prices = Prices("", [None] * INDEX.node_count, None, 0.999)
    message = make_message(INDEX, facts, found, prices, Asked())
    assert message.availability[0].kept_ms == (GPUS - 1) * 3 * HOUR


def test_of_two_gpus_of_a_node_each_hour_counts_once() -> None:
    _, found = account(
        gpu_outages={
            "GPU-3": stages(3, (Health.DRAINED, HOUR), (Health.HEALTHY, 3 * HOUR)),
            "GPU-4": stages(4, (Health.DRAINED, 2 * HOUR), (Health.HEALTHY, 4 * HOUR)),
        }
    )
    expected = (GPUS - 1) * 2 + (GPUS - 2)  # hours: one is out from 1 to 2 and from 3 to 4, both from 2 to 3
    assert found.kept.sum() == expected * HOUR


def test_nothing_is_kept_while_the_node_is_out_itself() -> None:
    node = [NodeOutage("n00", Health.DRAINED, 0, "i2", "it")]
    _, found = account(
        outages={"n00": node}, gpu_outages={"GPU-3": stages(3, (Health.DRAINED, HOUR), (Health.HEALTHY, 3 * HOUR))}
    )
    assert found.kept.sum() == 0

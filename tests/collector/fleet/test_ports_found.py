"""Network ports that no fleet file lists: found where agents report them, judged, and known again after a restart."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import numpy as np
import pytest

from drover_collector.detectors._lib.examples import LAG_MS as EXAMPLE_LAG_MS
from drover_collector.detectors._lib.examples import small_fleet, training_bucket
from drover_collector.detectors._lib.inventory import Inventory, served_by
from drover_collector.detectors.links import detector as links
from drover_collector.detectors.links.ports import ports_of
from drover_collector.engine.engine import Engine
from drover_collector.fleet.buckets import BUCKET_MS, Bucket
from drover_collector.fleet.index import FleetIndex
from drover_collector.fleet.ports import FOUND_MAX
from drover_collector.policy.policy import Policy
from drover_collector.store import EntityRow, SampleBatch, Store, entity_id
from drover_core.metrics.catalog import BY_NAME, Scope
from drover_core.model.events import (
    Finding,
    Incident,
    RecommendedAction,
    Severity,
)
from drover_core.model.fleet import FleetSpec, LinkSpec, NodeSpec
from drover_proto import telemetry_pb2 as pb
from drover_proto.blocks import schema_message
from testbed.collected import small_index, write_entities, write_ticks
from testbed.fleets import batch, block, hello
from testbed.ingest import LIVE, Collector
from testbed.pipelines import LAG_MS, T0, Clock, advance, pipeline_of, running, until

Columns = dict[str, np.ndarray]
COLUMNS = ("link_up", "symbol_errors")
Change = Callable[[int, Columns], None]


def found_ports(index: FleetIndex, count: int = 8, name: str = "mlx5_{}") -> FleetIndex:
    index.ports.add((node.name, name.format(at)) for node in index.nodes for at in range(count))
    return index


def nearest(gpus: int = 8) -> dict[str, str]:
    """What an agent says of its PCI bus: GPU n is nearest to mlx5_n."""
    return {f"gpu{slot}.nic": f"mlx5_{slot}" for slot in range(gpus)}


def played(
    index: FleetIndex, count: int, change: Change, reported: Mapping[str, str] | None = None
) -> Iterator[tuple[Engine, Bucket]]:
    engine = Engine(index, Policy.load(), 0)
    for node in index.nodes if reported else ():
        engine.on_inventory(node.name, reported or {}, 1)
    for number in range(count):
        bucket = training_bucket(index, number, links=change)
        engine.on_bucket(bucket, bucket.end_ms + EXAMPLE_LAG_MS)
        yield engine, bucket


def incidents(
    index: FleetIndex, count: int, change: Change, reported: Mapping[str, str] | None = None
) -> list[Incident]:
    *_, (engine, _) = played(index, count, change, reported)
    return [i for i in engine.incidents.values() if "links" in i.detectors]


def port(index: FleetIndex, node: str, name: str) -> int:
    number = index.ports.number(node, name)
    assert number is not None
    return number


def flapping(at: int) -> Change:
    def change(number: int, link: Columns) -> None:
        link["link_downed"][at] += sum(number >= when for when in (4, 7, 10))

    return change


def down(*ports: int) -> Change:
    def change(number: int, link: Columns) -> None:
        link["link_up"][list(ports)] = number < 4

    return change


def test_a_port_that_nobody_lists_is_judged() -> None:
    index = found_ports(small_fleet(8))
    (found,) = incidents(index, 14, flapping(port(index, "n02", "mlx5_4")), nearest())
    assert (found.node, found.cause, found.severity) == ("n02", "port_flaps", Severity.CRITICAL)
    assert found.asked is RecommendedAction.DRAIN


def test_which_gpu_it_serves_is_not_known_so_it_drains_nothing() -> None:
    index = found_ports(small_fleet(8))
    (found,) = incidents(index, 32, down(port(index, "n02", "mlx5_4")))
    assert (found.cause, found.severity, found.asked) == ("port_down", Severity.WARNING, RecommendedAction.ADVISE)


def test_a_port_of_storage_or_management_is_a_warning_however_long_it_is_down() -> None:
    index = found_ports(small_fleet(8), 1, "eno{}")
    found_ports(index)
    (found,) = incidents(index, 40, down(port(index, "n02", "eno0")), nearest())
    assert (found.node, found.severity, found.asked) == ("n02", Severity.WARNING, RecommendedAction.ADVISE)
    assert found.summary == "Port eno0 has been down for 6 min (node n02)."


def test_a_port_that_was_never_up_is_not_in_use() -> None:
    index = found_ports(small_fleet(8))

    def change(_: int, link: Columns) -> None:
        link["link_up"][::8] = 0.0

    assert incidents(index, 40, change, nearest()) == []


def test_errors_at_15_a_second_are_found() -> None:
    index = found_ports(small_fleet(8))

    def change(number: int, link: Columns) -> None:
        link["symbol_errors"][port(index, "n05", "mlx5_1")] += 150.0 * max(0, number - 4)

    (found,) = incidents(index, 20, change)
    assert (found.node, found.cause) == ("n05", "port_errors")


def test_a_switch_that_nobody_names_takes_no_node_out_of_service() -> None:
    """A switch with one port of each of five nodes: the nodes' leaf has 40 ports, so it is not that one."""
    index = found_ports(small_fleet(8, per_rack=8))
    found = incidents(index, 40, down(*(port(index, f"n{n:02d}", "mlx5_3") for n in range(5))), nearest())
    assert {i.asked for i in found} == {RecommendedAction.ADVISE}
    assert [(i.cause, i.scope, len(i.members)) for i in found if i.closed_ms is None] == [("switch", "leaf", 5)]


def test_flaps_of_a_switch_that_nobody_names_are_not_its_nodes() -> None:
    index = found_ports(small_fleet(8, per_rack=8))
    ports = [port(index, f"n{n:02d}", "mlx5_3") for n in range(5)]

    def change(number: int, link: Columns) -> None:
        link["link_downed"][ports] += sum(number >= when for when in (4, 7, 10))

    found = incidents(index, 14, change, nearest())
    assert [(i.cause, i.scope, i.asked) for i in found] == [("switch", "leaf", RecommendedAction.ADVISE)]


def test_the_only_node_with_all_ports_down_is_not_drained() -> None:
    """Nothing shows that its switch is alive, as where a leaf is named."""
    index = found_ports(FleetIndex(FleetSpec((NodeSpec("n1", "r1", gpus=8),))))
    (found,) = incidents(index, 40, down(*range(8)), nearest())
    assert (found.severity, found.asked) == (Severity.WARNING, RecommendedAction.ADVISE)
    assert "no other port that serves a GPU is up" in found.summary


def test_a_port_that_comes_late_is_judged_from_then_on() -> None:
    index = found_ports(small_fleet(8))
    engine = Engine(index, Policy.load(), 0)
    late = len(index.ports)
    for number in range(20):
        if number == 5:
            index.ports.add([("n03", "mlx5_9")])
        link = flapping(late) if number >= 5 else None
        bucket = training_bucket(index, number, links=link)
        if number == 8:  # one that was laid out before it came
            bucket = replace(bucket, link={name: values[:late] for name, values in bucket.link.items()})
        engine.on_bucket(bucket, bucket.end_ms + EXAMPLE_LAG_MS)
    assert engine.errors == {}
    (found,) = engine.incidents.values()
    assert (found.node, found.cause) == ("n03", "port_flaps")
    assert "mlx5_9" in found.summary


def test_a_port_that_was_renamed_while_it_was_down_is_over_in_the_end() -> None:
    """Its node names its cards, and no longer this one; before, and where the node says nothing, it stays down."""
    index = found_ports(small_fleet(8), 2, "eth{}")
    at, engine = port(index, "n02", "eth1"), Engine(index, Policy.load(), 0)
    cards = {"nic.eth0.mac": "02:00", "nic.eth1.mac": "02:01"}
    engine.on_inventory("n02", cards, 1)
    open_at = []
    for number in range(90):
        bucket = training_bucket(index, number, links=down(at))
        if number >= 10:  # the file of a new boot has another name for it
            bucket.link["link_up"][at] = np.nan
        if number == 12:
            engine.on_inventory("n02", {"nic.eth0.mac": "02:00", "nic.ens3.mac": "02:01"}, 2)
        engine.on_bucket(bucket, bucket.end_ms + EXAMPLE_LAG_MS)
        if any(i.closed_ms is None for i in engine.incidents.values()):
            open_at.append(number)
    assert min(open_at) < 12
    assert 40 < max(open_at) < 89


def test_the_fleet_file_adds_and_corrects() -> None:
    listed = (LinkSpec("mlx5_0", None, "rail0"), LinkSpec("mlx5_1", 5), LinkSpec("mlx5_2", -1))
    index = FleetIndex(FleetSpec((NodeSpec("n1", "r", "leaf1", gpus=8, links=listed),)))
    index.ports.add([("n1", "mlx5_3"), ("n1", "mlx5_3"), ("n1", "eno1"), ("nobody", "mlx5_0")])
    inventory = Inventory(index)
    inventory.update("n1", nearest(), 1)
    ports = ports_of(index, inventory)
    assert [(p.name, p.gpu, p.leaf, p.sure) for p in ports] == [
        ("mlx5_0", 0, "rail0", True), ("mlx5_1", 5, "leaf1", True), ("mlx5_2", None, "leaf1", True),
        ("mlx5_3", 3, "leaf1", False), ("eno1", None, "", False),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("ports", "serves"),
    [
        (["mlx5_0", "mlx5_1"], {"mlx5_0": 0, "mlx5_1": 1}),
        (["mlx5_2,mlx5_10"] * 2, {"mlx5_2": 0, "mlx5_10": 1}),
        (["mlx5_0"] * 2, {"mlx5_0": 0}),
        (["a,b"] * 4, {"a": 0, "b": 2}),
        (["a,b,c,d"] * 2, {"a": 0, "b": 0, "c": 1, "d": 1}),
        (["", ""], {}),
    ],
)
def test_cards_that_are_as_near_are_shared_in_order(ports: list[str], serves: dict[str, int]) -> None:
    assert served_by({f"gpu{slot}.nic": names for slot, names in enumerate(ports)}, 8) == serves


def test_an_agent_that_reports_thousands_of_ports_fills_no_memory() -> None:
    index = small_fleet(4)
    index.ports.add(("n00", f"eth{n}") for n in range(8000))
    index.ports.add([("n01", "mlx5_0")])
    assert len(index.ports) == FOUND_MAX + 1
    assert index.ports.left_out == {"n00": 8000 - FOUND_MAX}
    assert index.ports.number("n01", "mlx5_0") is not None
    engine = Engine(index, Policy.load(), 0)
    engine.on_bucket(training_bucket(index, 0), T0)
    assert any(f"{8000 - FOUND_MAX} network ports of n00" in text for text in engine.could_not_judge())


def test_the_order_in_which_ports_came_changes_nothing_that_is_said() -> None:
    def said(names: list[str]) -> list[Finding]:
        index = small_fleet(8)
        index.ports.add((node.name, name) for name in names for node in index.nodes)
        bad = [port(index, "n02", "mlx5_1"), port(index, "n02", "mlx5_0"), port(index, "n04", "mlx5_2")]
        state, findings = None, []
        for engine, _ in played(index, 12, down(*bad)):
            found, state = links.detect(engine._runner.window(True), state, 0)
            findings += found
        return findings

    found = said(["mlx5_0", "mlx5_1", "mlx5_2"])
    assert found
    assert said(["mlx5_2", "mlx5_1", "mlx5_0"]) == found


# ---- with a store


def write_ports(store: Store, rows: list[EntityRow], from_ms: int, to_ms: int, errors_per_s: float = 0.0) -> None:
    """All ports are up; the last one collects symbol errors."""
    ticks = np.arange(from_ms, to_ms, 1000, dtype=np.int64)
    ids = np.array([row.entity_id for row in rows], np.uint64)
    errors = np.zeros((len(ticks), len(rows)))
    errors[:, -1] = errors_per_s * (ticks - T0) / 1000
    values = {"link_up": np.ones(errors.size), "symbol_errors": errors.ravel()}
    store.samples.write(
        SampleBatch.of_values(Scope.LINK, np.tile(ids, len(ticks)), np.repeat(ticks, len(rows)), values)
    )


def port_row(node: str, name: str) -> EntityRow:
    key = f"{node}/{name}"
    return EntityRow(entity_id(Scope.LINK, key), Scope.LINK, key, node, None, link=name, first_ms=T0, last_ms=T0)


def test_live_a_port_is_found_and_known_again_after_a_restart(store: Store) -> None:
    """Nodes with ports of different names; one of them collects 15 symbol errors a second, and after the
    restart another one too."""
    rows = [port_row("n0", "mlx5_0"), port_row("n1", "rdmap0s29"), port_row("n2", "mlx5_4")]

    async def scenario() -> None:
        clock = Clock()
        index = small_index()
        write_entities(store, index)
        write_ticks(store, index, T0, T0 + 240_000)
        async with running(pipeline_of(store, index, clock)) as pipeline:
            assert len(index.ports) == 0
            await advance(pipeline, clock, T0 + 20_000 + LAG_MS)
            store.entities.write(rows)  # they come while the collector runs
            write_ports(store, rows, T0 + 20_000, T0 + 120_000, 15.0)
            await advance(pipeline, clock, T0 + 120_000 + LAG_MS)
            (incident,) = pipeline.incidents.values()
            assert (incident.node, incident.cause) == ("n2", "port_errors")
            assert pipeline.engine.errors == {}
        again = small_index()
        write_ports(store, rows[1:], T0 + 120_000, T0 + 240_000, 15.0)
        write_ports(store, rows[:1], T0 + 120_000, T0 + 240_000, 15.0)
        async with running(pipeline_of(store, again, clock)) as pipeline:
            await until(lambda: pipeline.buckets.past is None, "the past is known again")
            assert [port.name for port in again.ports.all()] == ["mlx5_0", "rdmap0s29", "mlx5_4"]
            await advance(pipeline, clock, T0 + 240_000 + LAG_MS)
            assert {i.node: i.cause for i in pipeline.incidents.values()} == {"n0": "port_errors", "n2": "port_errors"}
            assert incident.id in pipeline.incidents

    asyncio.run(scenario())


def test_an_agents_own_word_is_enough(store: Store) -> None:
    """Over its stream, with a fleet file that has nothing but names and GPUs, as README's."""
    index = FleetIndex(FleetSpec((NodeSpec("n0", "r1", sku="H100-SXM", gpus=4),)))

    async def scenario() -> None:
        message = hello(metrics=("power_w",), ts_ms=T0)
        message.entities.add(index=9, scope=pb.LINK, key="n0/mlx5_0", link="mlx5_0")
        message.schemas.append(schema_message(2, pb.LINK, [BY_NAME[name] for name in COLUMNS]))
        message.inventory["gpu2.nic"] = "mlx5_0"
        clock = Clock(T0)
        async with Collector(store, index=index, now_ms=T0) as collector, collector.agent(message) as agent:
            rows = [(T0 + second * 1000, 9, (1.0, 15.0 * second)) for second in range(90)]
            await agent.send(batch=batch(1, block(rows, COLUMNS, 2)))
            await agent.until_held(LIVE, 1)
            async with running(pipeline_of(store, index, clock)) as pipeline:
                await advance(pipeline, clock, T0 + 90_000 + LAG_MS)
                found = [i for i in pipeline.incidents.values() if i.cause == "port_errors"]
                assert [i.node for i in found] == ["n0"]
                inventory = pipeline.engine.inventory
                await until(lambda: bool(inventory.serves.get(0)), "the PCI bus is known")
                assert [(p.name, p.gpu) for p in ports_of(index, inventory)] == [("mlx5_0", 2)]

    asyncio.run(scenario())


def test_buckets_of_the_store_grow_with_the_ports(store: Store) -> None:
    index = small_index()
    write_entities(store, index)
    write_ports(store, rows := [port_row("n0", "a"), port_row("n1", "b")], T0, T0 + BUCKET_MS)
    store.entities.write(rows[:1])
    assert store.buckets.read(index, T0).link["link_up"].tolist() == [1.0]
    store.entities.write(rows[1:])
    assert store.buckets.read(index, T0).link["link_up"].tolist() == [1.0, 1.0]
    assert [len(b.link["link_up"]) for b in store.buckets.read_past(index, T0, 1)] == [2]
    write_ports(store, rows, T0 + BUCKET_MS, T0 + 2 * BUCKET_MS)
    assert store.entities.last_seen(index)[1] == T0 + 19_000


def test_a_port_that_nobody_reported_for_a_week_is_left_out_until_it_is_reported_again(store: Store) -> None:
    index, day_ms = small_index(), 86_400_000
    old, new = port_row("n0", "eth0"), port_row("n0", "ens3").during(T0 + 8 * day_ms, T0 + 8 * day_ms)
    store.entities.write([old, new])
    store.buckets.read(index, T0)
    write_ports(store, [old, new], T0, T0 + BUCKET_MS)
    store.buckets.read(index, T0)
    assert [found.name for found in index.ports.all()] == ["ens3"]
    store.entities.write([old.during(T0, T0 + 9 * day_ms)])
    store.buckets.read(index, T0)
    assert [found.name for found in index.ports.all()] == ["ens3", "eth0"]

"""Orders for several nodes together: all are asked at once or none, and who is blamed for the result."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import cast

import numpy as np
import pytest

from collector.probes.test_probe_orders import Answers, Bench, bench, closing, figure, requested
from drover_collector.probes.context import Stream
from drover_collector.probes.judging.group_orders import Ran, blames_of, verdicts
from drover_collector.probes.scheduling.follow_ups import ROUNDS, follow_ups
from drover_collector.probes.scheduling.group_orders import address_of, check_group
from drover_collector.probes.scheduling.planner import fabric_rounds
from drover_collector.probes.settings import ProbesConfig
from drover_collector.store import OpenOrder, ProbeRow, Store
from drover_collector.store.repositories.probes import Key
from drover_core.model.events import (
    ProbeOrder,
    ProbeReason,
    ProbeResult,
    ProbeVerdict,
)
from drover_core.model.fleet import FleetSpec, NodeSpec
from drover_core.model.probe_figures import GROUP_FIGURES
from testbed.fleets import T0, hello, index_of
from testbed.loop import in_loop
from testbed.waiting import until

NOW = T0 + 60_000
USUAL = {"allreduce_group": 380.0, "allgather_group": 360.0, "alltoall_group": 190.0}


async def ask_group(of: Bench, *nodes: str) -> list[str]:
    return await asyncio.to_thread(lambda: of.desk.orders.ask_group(nodes, ProbeReason.PERSON, by="ada"))


def from_node(node: str, result: ProbeResult) -> ProbeResult:
    return replace(result, node=node)


@in_loop
async def test_a_group_is_asked_at_once_with_one_rendezvous_and_a_partner_that_never_came_condemns_nobody(
    store: Store,
) -> None:
    async with bench(store) as at:
        at.desk.nodes.address = {"n0": "10.0.0.1", "n1": "10.0.0.2"}.__getitem__
        first, second = await ask_group(at, "n0", "n1")
        assert await ask_group(at, "n0", "n1") == [first, second], "the same one that is open"
        async with at.collector.agent(hello("n0")) as one, at.collector.agent(hello("n1")) as other:
            asked = [await requested(one), await requested(other)]
            assert [request.id for request in asked] == [first, second]
            assert [list(request.probes) for request in asked] == [list(GROUP_FIGURES)] * 2
            groups = [request.group for request in asked]
            assert [(g.node, g.nodes, g.address, g.port) for g in groups] == [
                (0, 2, "10.0.0.1", 29_500), (1, 2, "10.0.0.1", 29_500),
            ]  # fmt: skip
            assert {tuple(g.names) for g in groups} == {("n0", "n1")}
            assert {tuple(g.addresses) for g in groups} == {("10.0.0.1", "10.0.0.2")}
            (key,) = {g.key for g in groups}
            assert len(key) > 30 and {g.join_s for g in groups} == {60.0}
            missed = "rank 1 (n1) never joined within 60 s"
            await Answers(one)(
                *(figure(first, k, probe, None, None, detail=missed) for k, probe in enumerate(GROUP_FIGURES)),
                closing(first),
            )  # fmt: skip
            await until(lambda: first in at.desk.orders.answered, "the first answer")
            assert at.state(first) == "sent", "the group is judged together"
            await Answers(other)(from_node("n1", closing(second, "refused", detail="GPU 3: held by python (7)")))
            ends = [await at.ended(first), await at.ended(second)]
        assert [(o.state, o.detail) for o in ends] == [("done", ""), ("failed", "refused: GPU 3: held by python (7)")]
        assert [(v.node, v.gpu, v.passed) for v in at.verdicts] == [("n0", None, None), ("n1", None, None)]
        assert all("n1: refused: GPU 3: held by python (7)" in v.text for v in at.verdicts)
        assert at.desk.orders.open_orders() == []


@in_loop
async def test_nothing_is_asked_of_anybody_while_one_is_busy_or_away(store: Store) -> None:
    async with bench(store, ProbesConfig(wait_s=60)) as at, at.collector.agent(hello("n0")) as one:
        at.desk.nodes.address = lambda node: "10.0.0.1"
        waits = await ask_group(at, "n0", "n2")
        alone = await asyncio.to_thread(lambda: at.desk.orders.ask("n0", ProbeReason.PERSON))
        assert (await requested(one)).id == alone, "the group's was not sent, and holds nothing up"
        async with at.collector.agent(hello("n1")):
            at.held = {"n1"}
            busy = await ask_group(at, "n0", "n1")
            why = "given up: a job runs on n1, so that the group is not run"
            assert {(await at.ended(order)).detail for order in busy} == {why}
            at.held = set()
            queued = await ask_group(at, "n1", "n0")
            await Answers(one)(closing(alone, "refused"))
            request = await requested(one)
            assert (request.id, request.group.node) == (queued[1], 1), "its other order first"
        at.collector.now_ms += 60_000
        assert {(await at.ended(order)).detail for order in waits} == {
            "expired: not sent within 60 s, n2 has no stream"
        }
        assert {v.passed for v in at.verdicts if v.request in (*waits, *busy)} == {None}


@in_loop
async def test_an_address_that_nobody_knows_is_reported(store: Store) -> None:
    async with bench(store) as at, at.collector.agent(hello("n0")), at.collector.agent(hello("n1")):
        for order in await ask_group(at, "n0", "n1"):
            assert "reach n0: set probe_address in its agent's settings" in (await at.ended(order)).detail


@pytest.mark.parametrize(
    ("nodes", "probes", "text"),
    [
        (["n0"], [], "a group has 2 to 256 nodes, each once"),
        (["n0", "n0"], [], "a group has 2 to 256 nodes, each once"),
        (["n0", "n9"], [], "no node is called 'n9'"),
        (["n0", "n1"], ["sdc"], "'sdc' is not a probe for groups; there are allreduce_group, "),
    ],
)
def test_what_no_group_is(nodes: list[str], probes: list[str], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        check_group(index_of(), nodes, probes)


def test_where_a_node_is_reached_is_what_its_agent_says_and_else_whence_it_speaks() -> None:
    assert address_of({"probe.address": "node7.fabric"}, "ipv4:10.0.0.7:4321") == "node7.fabric"
    assert address_of({}, "ipv4:10.0.0.7:4321") == "10.0.0.7"
    assert address_of({}, "ipv6:%5Bfe80::1%5D:4321") == "fe80::1"
    assert address_of({}, "unix:") == ""


# --- who is blamed

LEAF = {f"n{k}": f"leaf{k // 8}" for k in range(16)}


def ran(nodes: tuple[str, ...], factor: float = 1.0, ts_ms: int = NOW, ends: tuple[str, ...] = (), **row: str) -> Ran:
    """A group and what each of its nodes answered; `ends`: of those where it is not "done"."""
    name = "-".join(nodes)
    made = Ran()
    rng = np.random.default_rng(sum(name.encode()))
    noise = {probe: float(np.exp(rng.normal(0, 0.01))) for probe in GROUP_FIGURES}
    for k, node in enumerate(nodes):
        order = ProbeOrder(
            f"{name}/{node}", node, (), "quick", GROUP_FIGURES, ProbeReason.PERSON, "done", ts_ms, group=name,
            members=nodes,
        )  # fmt: skip
        end = ends[k] if k < len(ends) else "done"
        given = []
        for number, probe in enumerate(GROUP_FIGURES):
            value = USUAL[probe] * factor * noise[probe] if not set(ends) - {"done"} else None
            given.append(replace(figure(order.id, number, probe, None, value), node=node, level="quick", **row))
        last = closing(
            order.id, end, node=node, detail="", probe="" if end in ("done", "stopped") else "allreduce_group"
        )
        made.orders.append(order)
        made.rows[order.id] = [ProbeRow(r, Key(sku="NVIDIA H200")) for r in (*given, replace(last, **row))]
    return made


def fabric(bad: set[str], nodes: int = 16) -> list[Ran]:
    """All pairs that are planned for a fleet; those with a bad node are slow."""
    spec = FleetSpec(tuple(NodeSpec(f"n{k}", "r", LEAF[f"n{k}"], "p", "sku", 8) for k in range(nodes)))
    pairs = [pair for round_ in fabric_rounds(spec) for pair in round_]
    return [ran(pair, 0.5 if bad & set(pair) else 1.0) for pair in pairs]


def by_node(found: dict[str, ProbeVerdict]) -> dict[str, set[bool | None]]:
    given: dict[str, set[bool | None]] = {}
    for verdict in found.values():
        given.setdefault(verdict.node, set()).add(verdict.passed)
    return given


def test_the_odd_node_is_named_by_comparing_pairs_and_its_partners_are_not() -> None:
    found = by_node(verdicts(fabric({"n11"}), [], LEAF, NOW))
    assert found["n11"] == {False}
    assert all(False not in given for node, given in found.items() if node != "n11")
    assert all(True in given for node, given in found.items() if node != "n11")
    text = next(v.text for v in verdicts(fabric({"n11"}), [], LEAF, NOW).values() if v.node == "n11")
    assert "n11: allreduce_group over " in text and "below the " in text and "good elsewhere" in text


def test_healthy_pairs_pass_with_the_figures_that_clear_a_network() -> None:
    found = verdicts(fabric(set()), [], LEAF, NOW)
    assert {v.passed for v in found.values()} == {True}
    assert {v.good for v in found.values()} == {GROUP_FIGURES}


def test_one_bad_group_makes_a_suspect_and_says_what_to_run_next() -> None:
    runs = [ran((f"n{k}", f"n{k + 1}")) for k in range(0, 8, 2)] + [ran(("n2", "n9"), 0.5)]
    runs += [ran(("n0", f"n{k}")) for k in (10, 12, 14)]
    found = verdicts(runs, [], LEAF, NOW)
    suspect = found["n2-n9/n9"]
    assert suspect.passed is None
    assert "it ran in no other; run next: n9 with " in suspect.text
    assert False not in {v.passed for v in found.values()}


def followed(runs: list[Ran], bad: set[str], nodes: list[str], *, anybody: bool = False) -> tuple[list[Ran], int]:
    """What Drover asks for by itself, round after round, is run: all that ran, and how many rounds it took."""
    for number in range(10):
        orders = [order for one in runs for order in one.orders]
        more = follow_ups(blames_of(runs, [], LEAF), orders, lambda _: nodes, anybody=anybody)
        if not more:
            return runs, number
        for one in more:
            made = ran(one.nodes, 0.5 if bad & {*one.nodes} else 1.0)
            made.orders = [replace(order, by="drover") for order in made.orders]
            runs = [*runs, made]
    raise AssertionError("it goes on for ever")


GOOD = [ran((f"n{k}", f"n{k + 1}")) for k in range(8, 16, 2)] + [ran((f"n{k}", f"n{k + 8}")) for k in (0, 1, 6, 7)]


@pytest.mark.parametrize("pair", [("n2", "n3"), ("n3", "n12"), ("n3", "n0")], ids=["leaf", "across", "with a good one"])
def test_after_a_slow_pair_drover_finds_the_odd_node_by_itself_with_good_ones(pair: tuple[str, str]) -> None:
    runs, rounds = followed([*GOOD, ran(pair, 0.5)], {"n3"}, list(LEAF))
    found = by_node(verdicts(runs, [], LEAF, NOW))
    assert False in found["n3"]
    assert [node for node, given in found.items() if False in given] == ["n3"]
    assert rounds <= 2


def test_a_pair_that_is_slow_alone_ends_at_the_way_between() -> None:
    runs, _ = followed([*GOOD, ran(("n2", "n3"), 0.5)], set(), list(LEAF))
    found = verdicts(runs, [], LEAF, NOW)
    assert False not in {v.passed for v in found.values()}
    assert "leaf leaf0, or it was disturbed" in found["n2-n3/n2"].text


def test_follow_ups_end_and_take_no_node_that_nobody_named_unless_that_is_allowed() -> None:
    everybody = list(LEAF)
    pairs = [ran((f"n{k}", f"n{k + 1}"), 0.5 if k == 2 else 1.0) for k in range(0, 8, 2)]
    runs, _ = followed(pairs, {"n2", "n3"}, everybody)
    assert {node for one in runs for node in one.members} == {f"n{k}" for k in range(8)}
    runs, rounds = followed(pairs, {"n2", "n3"}, everybody, anybody=True)
    asked = [one for one in runs if one.orders[0].by == "drover"]
    assert rounds <= ROUNDS
    assert max(sum(node in one.members for one in asked) for node in ("n2", "n3")) <= ROUNDS
    alone, _ = followed(pairs, {"n2"}, ["n2", "n3"])
    assert alone == pairs, "nobody is free to run next to them"


@pytest.mark.parametrize("maintained", [(), ("n2",)], ids=["free", "people work on it"])
@in_loop
async def test_the_pairs_that_decide_are_asked_for(store: Store, maintained: tuple[str, ...]) -> None:
    """What ran before is in the store; the group that ends now was slow."""
    async with bench(store, ProbesConfig()) as at:
        at.desk.nodes.stream = lambda node: cast(Stream, object()) if node in ("n0", "n1", "n2") else None
        at.desk.nodes.maintained = lambda: maintained
        now_ms = at.collector.now_ms = time.time_ns() // 1_000_000  # what is old is dropped by the store
        earlier = [ran(pair, ts_ms=now_ms - 10**7) for pair in (("n0", "n2"), ("n2", "n1"), ("n1", "n0"))]
        slow = ran(("n0", "n1"), 0.5, ts_ms=now_ms)
        all_ran = [*earlier, ran(("n1", "n2"), ts_ms=now_ms), slow]
        store.probes.orders.write([order for one in all_ran for order in one.orders])
        rows = [row for one in all_ran for rows in one.rows.values() for row in rows]
        store.probes.results.write(
            [replace(row, result=replace(row.result, ts_ms=now_ms), received_ms=now_ms) for row in rows]
        )
        held = [OpenOrder(order, now_ms, now_ms) for order in slow.orders]
        await asyncio.to_thread(at.desk.completion.finish_group, held)
        assert {v.passed for v in at.verdicts if v.node == "n0"} == {None}, "once is no proof"
        asked = at.desk.orders.open_orders()
        assert [(o.node, o.members, o.why, o.by) for o in asked] == [
            (node, ("n0", "n2"), ProbeReason.CONFIRM, "drover") for node in ("n0", "n2") if not maintained
        ]  # fmt: skip
        assert {o.probes for o in asked} <= {GROUP_FIGURES}


def test_one_that_gave_way_or_was_not_there_is_no_hang_of_the_others() -> None:
    healthy = fabric(set())
    for ends in (("stopped", "crashed"), ("crashed", "refused"), ("hung", "not_taken")):
        odd = [ran(("n3", f"n{k}"), ends=ends) for k in (5, 6, 7)]
        found = verdicts([*healthy, *odd], [], LEAF, NOW)
        assert {found[f"n3-n{k}/n{k}"].passed for k in (5, 6, 7)} == {None}
        assert False not in {v.passed for v in found.values()}


def test_a_node_whose_probe_service_is_killed_is_not_named_for_it() -> None:
    """It crashed in no probe: somebody killed the service, or the node was restarted. Its partners fail for it."""
    healthy = [one for one in fabric(set()) if "n3" not in one.members]
    odd = [ran(("n3", f"n{k}"), ends=("crashed", "crashed")) for k in (5, 6)]
    for one in odd:
        id_ = one.orders[0].id
        one.rows[id_] = [replace(row, result=replace(row.result, probe="")) for row in one.rows[id_] if row.result.end]
    found = verdicts([*healthy, *odd], [], LEAF, NOW)
    assert {found[f"n3-n{k}/n3"].passed for k in (5, 6)} == {None}
    assert False not in {v.passed for v in found.values()}


def test_a_node_that_hangs_with_each_partner_is_named() -> None:
    healthy = [one for one in fabric(set()) if "n3" not in one.members]
    odd = [ran(("n3", f"n{k}"), ends=("crashed", "hung")) for k in (5, 6)]
    found = by_node(verdicts([*healthy, *odd], [], LEAF, NOW))
    assert [node for node, given in found.items() if False in given] == ["n3"]


def test_groups_are_held_against_earlier_ones_of_their_kind_and_board_alone() -> None:
    earlier = [ran(("n4", f"n{k}"), ts_ms=NOW - 10**8) for k in (1, 2, 3)]
    lone = ran(("n5", "n6"))
    assert by_node(verdicts([lone], earlier, LEAF, NOW)) == {"n5": {True}, "n6": {True}}
    others = [replace(row, key=Key(sku="NVIDIA A100")) for rows in lone.rows.values() for row in rows]
    for order in lone.orders:
        lone.rows[order.id] = [row for row in others if row.result.request == order.id]
    assert by_node(verdicts([lone], earlier, LEAF, NOW)) == {"n5": {None}, "n6": {None}}


def test_cpus_say_nothing_of_a_fabric() -> None:
    found = verdicts([*fabric(set()), ran(("n0", "n9"), 0.01, device="cpu")], [], LEAF, NOW)
    odd = [v for id_, v in found.items() if id_.startswith("n0-n9/")]
    assert {v.passed for v in odd} == {None}
    assert "CPUs were measured" in odd[0].text
    assert False not in {v.passed for v in found.values()}

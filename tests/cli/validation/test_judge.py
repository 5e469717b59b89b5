"""How a validation judges: the node, the port or the way is named, healthy noise is not, and a pass is proved."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations

import pytest

from drover_cli.validation.judge import judge
from drover_cli.validation.model import Answer, Judgement, Mark, Member
from drover_core.model.events import ProbeOrder, ProbeReason, ProbeResult, ProbeVerdict

NODES = tuple(f"n{number}" for number in range(8))
MEMBERS = [Member(name, "new", "l1" if name < "n4" else "l2", "drained", "1.0") for name in NODES]
GPUS = 2
H200 = "NVIDIA H200"
Change = Callable[[ProbeResult, tuple[str, str]], float]  # a result and its pair -> what to multiply its value with


def results(
    seed: int, nodes: Sequence[str] = NODES, change: Change = lambda *_: 1.0, device: str = H200
) -> dict[str, list[ProbeResult]]:
    """What healthy nodes measure together, with a little noise; pairs across leaves are slower by design."""
    rng = random.Random(seed)
    found: dict[str, list[ProbeResult]] = {node: [] for node in nodes}

    def add(node: str, other: str, probe: str, unit: str, value: float, **more: object) -> None:
        base = ProbeResult("", node, None, probe, 1, None, None, unit, level="standard", device=device)
        one = replace(base, spread=0.01, repeats=50, **more)  # type: ignore[arg-type]  # fields of it
        turn = change(one, (node, other))
        found[node].append(replace(one, id=f"{node}/{len(found[node])}", value=value * turn))

    for a, b in combinations(range(len(nodes)), 2):
        across = 1.0 if (a < 4) == (b < 4) else 0.6
        for gpu in range(GPUS):
            gbs, us = 45 * across * (1 + rng.gauss(0, 0.01)), 12 / across * (1 + rng.gauss(0, 0.02))
            for one, two in ((a, b), (b, a)):
                add(nodes[one], nodes[two], "pairs_group", "GB/s", gbs, gpu=gpu, peer=two)
                add(nodes[one], nodes[two], "pairs_group_latency", "us", us, gpu=gpu, peer=two)
    for node in nodes:
        for gpu in range(GPUS):
            add(node, "", "fsdp_group_solo", "tokens/s", 9000 * (1 + rng.gauss(0, 0.01)), gpu=gpu)
        for name in ("fsdp_group", "tp_group"):
            add(node, "", name, "tokens/s", 5000)
            add(node, "", f"{name}_slowest", "tokens/s", 4900)
    return found


def answers(found: dict[str, list[ProbeResult]]) -> list[Answer]:
    members = tuple(found)
    order = ProbeOrder("p", "", (), "standard", (), ProbeReason.PERSON, "done", 1, group="g", members=members)
    made = [Answer("network", replace(order, id=f"p{node}", node=node), found[node], ()) for node in members]
    alone = ProbeOrder("q", "", (), "standard", (), ProbeReason.PERSON, "done", 1)
    for node in members:
        passed = ProbeVerdict("q", node, None, True, "", "well", 1, ProbeReason.PERSON)
        figure = ProbeResult("", node, 0, "hbm_copy", 1, None, 4300.0, "GB/s", device=found[node][0].device)
        made.append(Answer("node", replace(alone, id=f"q{node}", node=node), [figure], [passed]))
    return made


def judged(found: dict[str, list[ProbeResult]], **more: object) -> Judgement:
    return judge(answers(found), [m for m in MEMBERS if m.name in found], **more)  # type: ignore[arg-type]  # of many types


def named(judgement: Judgement) -> list[str]:
    return sorted({finding.about for finding in judgement.findings if finding.mark is Mark.FAILED})


@pytest.mark.parametrize("seed", range(20))
def test_healthy_nodes_pass_and_nobody_is_named(seed: int) -> None:
    judgement = judged(results(seed))
    assert (named(judgement), judgement.mark) == ([], Mark.PASSED), judgement.findings


def of(nodes: Sequence[str], gpu: int | None, share: float, probe: str = "") -> Change:
    """All pairs of these nodes with each other (of one: with anybody) get so much of their value."""

    def change(result: ProbeResult, pair: tuple[str, str]) -> float:
        hit = set(nodes) <= set(pair) and (gpu is None or result.gpu == gpu) and result.peer is not None
        wanted = result.probe == (probe or "pairs_group")
        return share if hit and wanted else 1.0

    return change


@pytest.mark.parametrize(
    ("change", "about"),
    [
        (of(["n2"], 1, 0.5), "n2 GPU 1"),
        (of(["n6"], None, 0.7), "n6 GPU 0, 1"),
        (of(["n1", "n5"], None, 0.5), "n1 - n5"),
        (of(["n3", "n0"], 0, 40.0, "pairs_group_latency"), "n0 - n3"),
        (of(["n7"], 0, 3.0, "pairs_group_latency"), "n7 GPU 0"),
    ],
)
def test_a_port_or_a_way_is_named_and_nothing_else(change: Change, about: str) -> None:
    for seed in range(5):
        judgement = judged(results(seed, change=change))
        assert (named(judgement), judgement.mark) == ([about], Mark.FAILED), judgement.findings


def test_a_device_slow_by_itself_is_named_and_its_pairs_are_attributed_to_it() -> None:
    def slow(result: ProbeResult, pair: tuple[str, str]) -> float:
        mine = result.probe == "fsdp_group_solo" and result.node == "n4" and result.gpu == 1
        paired = result.probe == "pairs_group" and "n4" in pair
        return 0.85 if mine else 0.6 if paired else 1.0

    assert named(judged(results(1, change=slow))) == ["n4 GPU 1"]


def test_of_two_nodes_with_a_slow_way_nobody_knows_which_and_it_is_no_pass() -> None:
    one = {node: [r for r in found if r.gpu in (None, 0)] for node, found in results(1, NODES[:2]).items()}
    judgement = judged(one)
    assert (named(judgement), judgement.mark) == ([], Mark.UNKNOWN)


def test_what_cpus_measure_may_name_but_never_passes() -> None:
    assert judged(results(1, device="cpu")).mark is Mark.UNKNOWN
    assert named(judged(results(1, change=of(["n2"], 1, 0.5), device="cpu"))) == [], "others share the processors"
    assert named(judged(results(1, change=of(["n2"], 1, 0.2), device="cpu"))) == ["n2 GPU 1"]


def test_a_stage_left_out_an_order_without_a_verdict_or_an_open_order_is_no_pass() -> None:
    assert judged(results(1), not_run=["storage"]).mark is Mark.UNKNOWN
    found = answers(results(1))
    assert judge([replace(found[-1], verdicts=()), *found[:-1]], MEMBERS).mark is Mark.UNKNOWN
    late = replace(found[0], order=replace(found[0].order, state="sent"), results=(), late=True)
    judgement = judge([late, *found[1:]], MEMBERS)
    assert judgement.mark is Mark.UNKNOWN
    assert ("n0", Mark.UNKNOWN) in {(finding.about, finding.mark) for finding in judgement.findings}
    assert judge([], MEMBERS).mark is Mark.UNKNOWN


def test_a_node_that_stood_still_is_named_once_and_a_network_that_nobody_stopped_names_nobody() -> None:
    def without(peer: int | None) -> dict[str, list[ProbeResult]]:
        gone = {node: [r for r in of_node if r.probe.startswith("pairs")] for node, of_node in results(1).items()}
        for node, of_node in gone.items():
            none = ProbeResult(
                "x", node, None, "fsdp_group", 1, None, None, "tokens/s", "stopped", peer=peer, device=H200
            )
            of_node.append(none)
        return gone

    pairs = [r for r in results(1)["n5"] if r.probe.startswith("pairs")]
    assert named(judged({**without(5), "n5": pairs})) == ["n5"], "it gave no word of it"
    assert named(judged({**without(5), "n5": results(1)["n5"]})) == [], "it had its figure, and had left"
    assert named(judged(without(5))) == ["n5"], "it says so itself"
    away = without(0)
    away |= {"n0": without(5)["n0"], "n5": pairs}
    assert named(judged(away)) == ["n5"], "n0 lives: it names another"
    nobody = judged(without(None))
    assert (named(nobody), nobody.mark) == ([], Mark.UNKNOWN)
    assert len([f for f in nobody.findings if f.about == "all nodes"]) == 1


def test_throughput_is_held_against_an_earlier_report_and_an_unsteady_run_is_no_pass() -> None:
    before = {("fsdp_group", "", H200): 5100.0, ("tp_group", "", H200): 5100.0}
    assert judged(results(1), reference=before).mark is Mark.PASSED
    worse = judged(results(1), reference={**before, ("fsdp_group", "", H200): 6000.0})
    assert (named(worse), worse.mark) == (["all nodes"], Mark.FAILED)

    def unsteady(result: ProbeResult, _: tuple[str, str]) -> float:
        return 0.7 if result.probe == "fsdp_group_slowest" else 1.0

    judgement = judged(results(1, change=unsteady))
    assert judgement.mark is Mark.UNKNOWN
    assert any("not steady" in finding.text for finding in judgement.findings)


def test_what_the_collector_failed_fails_the_validation() -> None:
    found = answers(results(1))
    bad = replace(
        found[-1], verdicts=[ProbeVerdict("q", "n7", 3, False, "hbm_copy", "n7 GPU 3: slow", 1, ProbeReason.PERSON)]
    )
    judgement = judge([*found[:-1], bad], MEMBERS)
    assert (named(judgement), judgement.mark) == (["n7 GPU 3"], Mark.FAILED)


Left = Callable[[str, ProbeResult], bool]
NOT_MEASURED: dict[str, Left] = {
    "nothing": lambda _n, _r: True,
    "no training": lambda _n, r: r.probe.startswith(("fsdp", "tp")),
    "no tensor parallel": lambda _n, r: r.probe.startswith("tp"),
    "no pairs": lambda _n, r: r.probe.startswith("pairs"),
    "a node without pairs": lambda n, r: r.probe.startswith("pairs") and (n == "n3" or r.peer == 3),
    "a GPU without pairs": lambda n, r: r.probe.startswith("pairs") and n == "n3" and r.gpu == 1,
    "one pair of nodes": lambda n, r: r.peer is not None and {n, NODES[r.peer]} == {"n1", "n6"},
    "a GPU alone": lambda n, r: r.probe == "fsdp_group_solo" and n == "n3" and r.gpu == 1,
}


@pytest.mark.parametrize("what", NOT_MEASURED)
def test_what_was_asked_for_and_gave_no_figure_is_no_pass(what: str) -> None:
    """An order that ends well proves nothing of what it did not measure."""
    left = NOT_MEASURED[what]
    found = [
        replace(a, results=[r for r in a.results if not left(a.order.node, r)]) if a.order.group else a
        for a in answers(results(1))
    ]
    judgement = judge(found, MEMBERS)
    assert judgement.mark is Mark.UNKNOWN and any("no figure of" in f.text for f in judgement.findings)
    assert named(judgement) == []
